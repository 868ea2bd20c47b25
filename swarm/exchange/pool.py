"""The bounded, persistent pool of rollout groups that this node may train on or serve.

A group that leaves is remembered by a tombstone, so that neither it nor another group for its task
comes again. Too old is a group past its expiry, or `rounds_max` rounds behind its producer's group
that was created last.

Eviction: trained groups first, then the oldest foreign group of the producer that holds most of
what ran short, own groups last. Age is the order of arrival. Calls may come from any thread. Added
groups survive a killed process (WAL), marks of training a power cut as well.
"""

import hashlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import NamedTuple, Self

from swarm.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from swarm.identity import PeerId
from swarm.rollouts import GroupId, RolloutGroup, ScoredGroup
from swarm.wire.codec import kept_group

SCHEMA_VERSION = 1
OWN_NEWEST_MAX = 256
DAMAGED_KEPT_MAX = 3  # files moved aside; the oldest is deleted beyond that
_WAL_BYTES_MAX = 8 * 1024 * 1024
_REWARDS_CACHED_MAX = 4096
_PRIMARY_CODE = 0xFF  # SQLite's extended result codes hold the primary one in the low byte

_SCHEMA = f"""
CREATE TABLE groups (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id BLOB NOT NULL UNIQUE,
    task_key BLOB NOT NULL UNIQUE,
    producer TEXT NOT NULL,
    own INTEGER NOT NULL,
    round INTEGER NOT NULL,
    created_at_s INTEGER NOT NULL,
    expires_at_s INTEGER NOT NULL,
    trained_round INTEGER,
    bytes INTEGER NOT NULL,
    rewards TEXT NOT NULL
);
CREATE INDEX groups_expiry ON groups (expires_at_s);
CREATE INDEX groups_shares ON groups (own, producer, trained_round, bytes);
CREATE INDEX groups_trained ON groups (seq) WHERE trained_round IS NOT NULL;
CREATE TABLE records (  -- apart from the groups, so that these stay quick to look through
    seq INTEGER PRIMARY KEY,
    prompt TEXT NOT NULL,
    record BLOB NOT NULL
);
CREATE TRIGGER records_leave AFTER DELETE ON groups
BEGIN
    DELETE FROM records WHERE seq = OLD.seq;
END;
CREATE TABLE tombstones (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id BLOB NOT NULL UNIQUE,
    task_key BLOB NOT NULL UNIQUE,
    trained_round INTEGER
);
PRAGMA user_version = {SCHEMA_VERSION};
"""

_KNOWN = "SELECT " + ", ".join(  # whether this group, and whether this task, is or was here
    f"EXISTS(SELECT 1 FROM groups WHERE {column} UNION ALL SELECT 1 FROM tombstones WHERE {column})"
    for column in ("group_id = ?1", "task_key = ?2")
)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`bytes_max` counts records, prompts and rewards, not SQLite's overhead."""

    groups_max: int = 4096
    bytes_max: int = 256 * 1024 * 1024
    groups_per_producer_max: int = 512
    tombstones_max: int = 65_536
    rounds_max: int = 256  # of one producer, its newest

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            if getattr(self, name) < 1:
                raise ConfigError(f"pool {name} is {getattr(self, name)}: must be at least 1")


class AddResult(StrEnum):
    ADDED = "added"
    KNOWN = "known"  # this very group is or was here
    DUPLICATE_TASK = "duplicate_task"  # its producer's group for this task is or was here
    QUOTA = "quota"  # it is larger than the whole pool
    TOO_OLD = "too_old"  # its producer has moved on


class Candidate(NamedTuple):  # thousands of them, at each look
    group_id: GroupId
    producer: PeerId
    rewards: tuple[float, ...]
    round: int  # of the producer
    created_at_s: int  # by the producer's clock


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """`foreign_eligible`: untrained, and unexpired if a time was given."""

    groups: int
    bytes: int
    own: int
    foreign: int
    foreign_eligible: int
    by_producer: dict[PeerId, int]
    oldest_eligible_at_s: int | None = None  # when the oldest of these was created


# Long: all that is said to one database.
class Pool:
    """One node's pool, in the file `path` or, with ":memory:", in memory.

    `damaged_path`: where a damaged file was moved, or None. `damaged_records`: dropped ones.
    """

    def __init__(self, path: Path | str, limits: PoolLimits) -> None:
        """ConfigError: the file is in use, no pool, or made by a newer version."""
        self.limits = limits
        self.damaged_path: Path | None = None
        self.damaged_records = 0
        self._lock = threading.Lock()
        try:
            self._db = _open(path)
        except _DamagedFileError:
            self.damaged_path = _move_aside(Path(path))
            self._db = _open(path)
        self._groups: Counter[str] = Counter()
        self._bytes = 0
        self._newest: dict[str, tuple[int, int]] = {}  # of a producer: creation and round
        self._expiry_s = -inf  # nothing expires before
        with self._transaction():
            rows = self._db.execute("SELECT producer, created_at_s, round, bytes FROM groups")
            for producer, created_at_s, round_, size in rows:
                self._groups[producer] += 1
                self._bytes += size
                self._note_newest(producer, created_at_s, round_)
            # limits may be lower than when the file was written
            for producer in list(self._newest):
                self._drop_old_rounds(producer)
            self._make_room(groups_max=limits.groups_max, bytes_max=limits.bytes_max)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def add_all(
        self, groups: Sequence[tuple[bytes, ScoredGroup]], *, own: bool, now_s: float
    ) -> list[AddResult]:
        """Keep verified groups, each with its signed record, in one transaction."""
        with self._transaction():
            self._drop_expired(now_s)
            return [self._add(record, verified, own=own) for record, verified in groups]

    def _add(self, record: bytes, verified: ScoredGroup, *, own: bool) -> AddResult:
        group = verified.group
        rewards = json.dumps(verified.rewards, allow_nan=False)
        size = len(record) + len(verified.prompt.encode()) + len(rewards)
        key = _task_key(group)
        id_known, task_known = self._db.execute(_KNOWN, (verified.group_id, key)).fetchone()
        if id_known or task_known:
            return AddResult.KNOWN if id_known else AddResult.DUPLICATE_TASK
        this = (group.created_at_s, group.round)
        newest = self._newest.get(group.producer, this)
        if this < newest and group.round <= newest[1] - self.limits.rounds_max:
            return AddResult.TOO_OLD
        if size > self.limits.bytes_max or not self._make_share(group.producer, own=own):
            return AddResult.QUOTA
        self._make_room(
            groups_max=self.limits.groups_max - 1, bytes_max=self.limits.bytes_max - size
        )
        seq = self._db.execute(
            "INSERT INTO groups (group_id, task_key, producer, own, round, created_at_s,"
            " expires_at_s, bytes, rewards) VALUES (?,?,?,?,?,?,?,?,?)",
            (
                verified.group_id,
                key,
                group.producer,
                own,
                group.round,
                group.created_at_s,
                group.expires_at_s,
                size,
                rewards,
            ),
        ).lastrowid
        self._db.execute("INSERT INTO records VALUES (?,?,?)", (seq, verified.prompt, record))
        self._groups[group.producer] += 1
        self._bytes += size
        self._expiry_s = min(self._expiry_s, group.expires_at_s)
        if self._note_newest(group.producer, group.created_at_s, group.round):
            self._drop_old_rounds(group.producer)
        return AddResult.ADDED

    def _note_newest(self, producer: str, created_at_s: int, round_: int) -> bool:
        """True if this moves the producer to another round."""
        before = self._newest.get(producer, (created_at_s, round_))
        self._newest[producer] = max(before, (created_at_s, round_))
        return self._newest[producer][1] != before[1]

    def _drop_old_rounds(self, producer: str) -> None:
        oldest = self._newest[producer][1] - self.limits.rounds_max
        for own in (False, True):
            self._remove(
                "seq IN (SELECT seq FROM groups INDEXED BY groups_shares"
                " WHERE own = ? AND producer = ? AND round <= ?)",
                (own, producer, oldest),
            )

    def record(
        self, group_id: GroupId, now_s: float, without: Container[PeerId] = ()
    ) -> bytes | None:
        """The signed bytes to serve; None: not here, expired, or of a producer in `without`."""
        with self._lock:
            row = self._db.execute(
                "SELECT record, producer FROM groups JOIN records USING (seq)"
                " WHERE group_id = ? AND expires_at_s > ?",
                (group_id, now_s),
            ).fetchone()
        return None if row is None or row[1] in without else bytes(row[0])

    def piece(
        self, group_id: GroupId, start: int, size: int, now_s: float, without: Container[PeerId]
    ) -> tuple[int, bytes]:
        """The size of the signed record and some of its bytes; (0, b""): none to serve."""
        with self._lock:
            row = self._db.execute(
                "SELECT length(record), substr(record, ?, ?), producer"
                " FROM groups JOIN records USING (seq) WHERE group_id = ? AND expires_at_s > ?",
                (start + 1, size, group_id, now_s),
            ).fetchone()
        return (0, b"") if row is None or row[2] in without else (row[0], bytes(row[1]))

    def held(
        self, group_ids: Iterable[GroupId], now_s: float, without: Container[PeerId] = ()
    ) -> set[GroupId]:
        """Those that `record` would give."""
        query = "SELECT producer FROM groups WHERE group_id = ? AND expires_at_s > ?"
        with self._lock:
            found = {each: self._db.execute(query, (each, now_s)).fetchone() for each in group_ids}
        return {each for each, row in found.items() if row is not None and row[0] not in without}

    def own_newest(self, now_s: float) -> list[tuple[GroupId, int, int, int, int]]:
        """Own unexpired groups, newest first, at most `OWN_NEWEST_MAX`: id, size of the record,
        round, created at, expires at."""
        with self._transaction():
            return self._db.execute(
                "SELECT group_id, length(record), round, created_at_s, expires_at_s"
                " FROM groups JOIN records USING (seq)"
                " WHERE own AND expires_at_s > ? ORDER BY seq DESC LIMIT ?",
                (now_s, OWN_NEWEST_MAX),
            ).fetchall()

    def ids_seen(self, group_ids: Iterable[GroupId]) -> set[GroupId]:
        """Those that are or were in the pool, as far back as tombstones reach."""
        with self._lock:
            return {
                each for each in group_ids if self._db.execute(_KNOWN, (each, each)).fetchone()[0]
            }

    def eligible(self, own: bool, now_s: float, rounds_max: int | None = None) -> list[Candidate]:
        """Untrained, unexpired groups by id, of the `rounds_max` newest rounds of each producer."""
        with self._lock:
            rows = self._db.execute(
                "SELECT group_id, producer, rewards, round, created_at_s FROM groups"
                " WHERE own = ? AND trained_round IS NULL AND expires_at_s > ? ORDER BY group_id",
                (own, now_s),
            ).fetchall()
            oldest = {
                producer: newest - rounds_max if rounds_max is not None else -1
                for producer, (_, newest) in self._newest.items()
            }
        return [
            Candidate(group_id, producer, _rewards(text), of_round, created)
            for group_id, producer, text, of_round, created in rows
            if of_round > oldest[producer]
        ]

    def groups(self, group_ids: Sequence[GroupId]) -> list[ScoredGroup]:
        """Groups in the order asked for, without those that have left."""
        query = (
            "SELECT record, prompt, rewards FROM groups JOIN records USING (seq) WHERE group_id = ?"
        )
        with self._lock:
            found = [(each, self._db.execute(query, (each,)).fetchone()) for each in group_ids]
        verified: list[ScoredGroup] = []
        for group_id, row in found:
            if row is None:
                continue
            try:
                group = kept_group(bytes(row[0]), group_id)
            except RemoteProtocolError:
                self.damaged_records += 1
                with self._transaction():
                    self._remove("group_id = ?", (group_id,))
                continue
            verified.append(ScoredGroup(group_id, group, row[1], _rewards(row[2])))
        return verified

    def mark_trained(self, group_ids: Iterable[GroupId], round_number: int) -> None:
        """Record durably that groups go into a round's update, all or none. LocalProtocolError:
        one is marked for another round, or was never here."""
        with self._transaction(to_disk=True):
            for group_id in group_ids:
                table, marked = self._found(group_id)
                if marked is not None and marked != round_number:
                    raise LocalProtocolError(
                        f"group {group_id.hex()} was trained on in round {marked} already"
                    )
                self._db.execute(
                    f"UPDATE {table} SET trained_round = ? WHERE group_id = ?",
                    (round_number, group_id),
                )

    def expire(self, now_s: float) -> int:
        with self._transaction():
            return self._drop_expired(now_s)

    def _drop_expired(self, now_s: float) -> int:
        if now_s < self._expiry_s:
            return 0
        removed = self._remove("expires_at_s <= ?", (now_s,))
        (next_s,) = self._db.execute("SELECT min(expires_at_s) FROM groups").fetchone()
        self._expiry_s = inf if next_s is None else next_s
        return removed

    def statistics(self, now_s: float | None = None) -> PoolStatistics:
        with self._lock:
            own, eligible, oldest_s = self._db.execute(
                "SELECT count(*) FILTER (WHERE own), count(*) FILTER (WHERE eligible),"
                " min(created_at_s) FILTER (WHERE eligible) FROM (SELECT own, created_at_s,"
                " NOT own AND trained_round IS NULL AND expires_at_s > ? AS eligible FROM groups)",
                (-1 if now_s is None else now_s,),
            ).fetchone()
            total = self._groups.total()
            return PoolStatistics(
                groups=total,
                bytes=self._bytes,
                own=own,
                foreign=total - own,
                foreign_eligible=eligible,
                by_producer={PeerId(each): self._groups[each] for each in sorted(self._groups)},
                oldest_eligible_at_s=oldest_s,
            )

    def _found(self, group_id: GroupId) -> tuple[str, int | None]:
        """The table that has a group, and the round for which it is marked."""
        for table in ("groups", "tombstones"):
            query = f"SELECT trained_round FROM {table} WHERE group_id = ?"
            row = self._db.execute(query, (group_id,)).fetchone()
            if row is not None:
                return table, row[0]
        raise LocalProtocolError(f"group {group_id.hex()} was never in the pool")

    def _make_share(self, producer: str, *, own: bool) -> bool:
        """Keep the producer within its share: its oldest group makes place, trained ones first.
        Refusing the new one would leave old groups that nobody draws."""
        if self._groups[producer] < self.limits.groups_per_producer_max:
            return True
        return self._remove_found(
            "SELECT seq FROM groups INDEXED BY groups_shares WHERE own = ? AND producer = ?"
            " ORDER BY trained_round IS NULL, seq LIMIT 1",
            (own, producer),
        )

    def _make_room(self, *, groups_max: int, bytes_max: int) -> None:
        while (over_groups := self._groups.total() > groups_max) or self._bytes > bytes_max:
            what = "count(*)" if over_groups else "sum(bytes)"
            oldest = "SELECT min(seq) FROM groups INDEXED BY groups_shares WHERE own = "
            removed = (
                self._remove_found("SELECT min(seq) FROM groups WHERE trained_round IS NOT NULL")
                or self._remove_found(
                    f"{oldest} 0 AND producer = (SELECT producer FROM groups WHERE own = 0"
                    f" GROUP BY producer ORDER BY {what} DESC, min(seq) LIMIT 1)"
                )
                or self._remove_found(f"{oldest} 1")
            )
            if not removed:
                raise AssertionError("the pool's sums disagree with its rows")

    def _remove_found(self, query: str, values: tuple[object, ...] = ()) -> bool:
        """Remove the one group whose sequence number the query finds."""
        found = self._db.execute(query, values).fetchone()
        return found is not None and self._remove("seq = ?", found) > 0

    def _remove(self, condition: str, values: tuple[object, ...]) -> int:
        """Replace groups by tombstones; drop the oldest tombstones."""
        self._db.execute(
            "INSERT INTO tombstones (group_id, task_key, trained_round)"
            f" SELECT group_id, task_key, trained_round FROM groups WHERE {condition} ORDER BY seq",
            values,
        )
        removed = self._db.execute(
            f"DELETE FROM groups WHERE {condition} RETURNING producer, bytes",
            values,
        ).fetchall()
        for producer, size in removed:
            self._bytes -= size
            self._groups[producer] -= 1
            if not self._groups[producer]:
                del self._groups[producer], self._newest[producer]
        if removed:
            self._db.execute(
                "DELETE FROM tombstones WHERE seq <= (SELECT max(seq) FROM tombstones) - ?",
                (self.limits.tombstones_max,),
            )
        return len(removed)

    @contextmanager
    def _transaction(self, *, to_disk: bool = False) -> Iterator[None]:
        """All or nothing, the sums in memory too. With `to_disk` it outlives a power cut."""
        with self._lock:
            groups, size, newest = self._groups.copy(), self._bytes, self._newest.copy()
            if to_disk:
                self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                self._groups, self._bytes, self._newest = groups, size, newest
                self._expiry_s = -inf
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                if to_disk:
                    self._db.execute("PRAGMA synchronous = NORMAL")


class _DamagedFileError(Exception):
    """The file is no intact SQLite database."""


def _task_key(group: RolloutGroup) -> bytes:
    task = group.task
    task_parts = (task.environment, task.version, task.parameters, task.seed, task.index)
    parts = (group.producer, *task_parts, group.attempt)
    return hashlib.sha256(json.dumps(parts).encode()).digest()


@lru_cache(_REWARDS_CACHED_MAX)
def _rewards(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in json.loads(text))


def _open(path: Path | str) -> sqlite3.Connection:
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        _prepare(db, path)
    except BaseException as error:
        if db is not None:
            db.close()
        code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise _DamagedFileError from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            why = f"pool {path} is in use by another process: give each node its own"
            raise ConfigError(why) from error
        if isinstance(error, sqlite3.DatabaseError):
            raise ConfigError(f"pool {path} cannot be opened: {error}") from error
        raise
    return db


def _prepare(db: sqlite3.Connection, path: Path | str) -> None:
    db.execute("PRAGMA busy_timeout = 0")
    db.execute("PRAGMA locking_mode = EXCLUSIVE")  # the sums in memory bear only one writer
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    is_new = version == 0 and tables == 0
    if not is_new and not 0 < version <= SCHEMA_VERSION:
        found = "no pool" if version == 0 else f"a pool of version {version}"
        raise ConfigError(f"pool {path} is {found}: name another file or a newer program")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES_MAX}")
    if is_new:
        db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}COMMIT;")
    elif db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise _DamagedFileError


def _move_aside(path: Path) -> Path:
    def number(each: Path) -> int:
        text = each.name.rpartition("-")[2]
        return int(text) if text.isdecimal() else 0

    kept = sorted(path.parent.glob(f"{path.name}.damaged-*"), key=number)
    target = path.with_name(f"{path.name}.damaged-{number(kept[-1]) + 1 if kept else 1}")
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    for each in [*kept, target][:-DAMAGED_KEPT_MAX]:
        each.unlink()
    return target
