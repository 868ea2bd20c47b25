"""The bounded, persistent pool of rollout groups: what this node may still train on or serve.

A group is kept as the signed bytes that were received, beside what this node worked out about it
(prompt and rewards). A group that leaves, by expiry or eviction, leaves a tombstone behind, so
that it is neither fetched nor trained on a second time, and so that its producer cannot offer a
second group for the same task.

**What goes first when a bound is reached.** First whatever was trained on already, oldest first
(it is kept only to be served). Then, among untrained foreign groups, the oldest of the producer
that holds most of what ran short (groups or bytes). Untrained own groups go last. Age is the order
of arrival here, never a producer's clock. A producer at its share gives up a group of its own for
each new one, trained ones first, then the oldest; so a flood pushes out only what its maker sent.

All calls are synchronous and short; they may come from any thread, one at a time.
"""

import hashlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from swarm.codec import decode_group
from swarm.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from swarm.identity import PeerId
from swarm.rollouts import GroupId, Task, VerifiedGroup

SCHEMA_VERSION = 1
DAMAGED_KEPT_MAX = 3  # files moved aside; the oldest is deleted beyond that
_WAL_BYTES_MAX = 8 * 1024 * 1024
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


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds of one pool. `bytes_max` is of records, prompts and rewards, without SQLite's own."""

    groups_max: int = 4096
    bytes_max: int = 256 * 1024 * 1024
    groups_per_producer_max: int = 512
    tombstones_max: int = 65_536

    def __post_init__(self) -> None:
        for name in ("groups_max", "bytes_max", "groups_per_producer_max", "tombstones_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"pool {name} is {getattr(self, name)}: must be at least 1")


class AddResult(StrEnum):
    """What became of a group that was offered to the pool."""

    ADDED = "added"
    KNOWN = "known"  # this very group is or was here
    DUPLICATE_TASK = "duplicate_task"  # its producer's group for this task is or was here
    QUOTA = "quota"  # it is larger than the whole pool


@dataclass(frozen=True, slots=True)
class Candidate:
    """One group that may be drawn for training; rewards are this node's own."""

    group_id: GroupId
    producer: PeerId
    rewards: tuple[float, ...]
    round: int  # of the producer
    created_at_s: int  # by the producer's clock


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What is in the pool. `foreign_eligible`: untrained, and unexpired where a time was given."""

    groups: int
    bytes: int
    own: int
    foreign: int
    foreign_eligible: int
    by_producer: dict[PeerId, int]


class Pool:
    """One node's pool, in the file `path` or, with ":memory:", in memory.

    `damaged_path` is where a damaged file was moved on opening, None when all was well.
    `damaged_records` counts stored records that no longer decoded and were dropped.
    """

    def __init__(self, path: Path | str, limits: PoolLimits) -> None:
        """Open or create the pool.

        Raises:
            ConfigError: the file is in use, no pool, or made by a newer version.
        """
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
        with self._transaction():
            rows = self._db.execute("SELECT producer, count(*), sum(bytes) FROM groups GROUP BY 1")
            for producer, groups, size in rows:
                self._groups[producer] = groups
                self._bytes += size
            # limits may be lower than when the file was written
            self._make_room(groups_max=limits.groups_max, bytes_max=limits.bytes_max)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the file. The pool cannot be used afterwards."""
        with self._lock:
            self._db.close()

    def add(self, record: bytes, verified: VerifiedGroup, *, own: bool, now_s: float) -> AddResult:
        """Keep a group that the caller has verified. Survives a killed process once it returns."""
        group = verified.group
        rewards = json.dumps(verified.rewards, allow_nan=False)
        size = len(record) + len(verified.prompt.encode()) + len(rewards)
        key = _task_key(group.producer, group.task)
        with self._transaction():
            self._remove("expires_at_s <= ?", (now_s,))
            if self._is_known("group_id", verified.group_id):
                return AddResult.KNOWN
            if self._is_known("task_key", key):
                return AddResult.DUPLICATE_TASK
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
        return AddResult.ADDED

    def record(
        self, group_id: GroupId, now_s: float, without: Container[PeerId] = ()
    ) -> bytes | None:
        """The signed bytes to serve; None when the group is not here, has expired, or was made by
        one of the producers `without` which the caller does."""
        with self._transaction():
            row = self._db.execute(
                "SELECT record, producer FROM groups JOIN records USING (seq)"
                " WHERE group_id = ? AND expires_at_s > ?",
                (group_id, now_s),
            ).fetchone()
        return None if row is None or row[1] in without else bytes(row[0])

    def has(self, group_id: GroupId) -> bool:
        """Whether the group is in the pool now, expired or not."""
        with self._transaction():
            query = "SELECT 1 FROM groups WHERE group_id = ?"
            return self._db.execute(query, (group_id,)).fetchone() is not None

    def held(self, group_ids: Iterable[GroupId], now_s: float) -> set[GroupId]:
        """Those that `record` would give."""
        query = "SELECT 1 FROM groups WHERE group_id = ? AND expires_at_s > ?"
        with self._transaction():
            return {
                each
                for each in group_ids
                if self._db.execute(query, (each, now_s)).fetchone() is not None
            }

    def ids_seen(self, group_ids: Iterable[GroupId]) -> set[GroupId]:
        """Those that are or were in the pool, as far back as tombstones reach."""
        with self._transaction():
            return {each for each in group_ids if self._is_known("group_id", each)}

    def eligible(self, own: bool, now_s: float) -> list[Candidate]:
        """Untrained, unexpired groups in order of their ids, so that arrival order is no matter."""
        with self._transaction():
            rows = self._db.execute(
                "SELECT group_id, producer, rewards, round, created_at_s FROM groups"
                " WHERE own = ? AND trained_round IS NULL AND expires_at_s > ? ORDER BY group_id",
                (own, now_s),
            ).fetchall()
        return [
            Candidate(GroupId(group_id), PeerId(producer), _rewards(text), of_round, created)
            for group_id, producer, text, of_round, created in rows
        ]

    def groups(self, group_ids: Sequence[GroupId]) -> list[VerifiedGroup]:
        """The groups themselves, in the order asked for; those that have left are left out."""
        query = (
            "SELECT record, prompt, rewards FROM groups JOIN records USING (seq) WHERE group_id = ?"
        )
        with self._transaction():
            found = [(each, self._db.execute(query, (each,)).fetchone()) for each in group_ids]
        verified: list[VerifiedGroup] = []
        for group_id, row in found:
            if row is None:
                continue
            try:
                decoded_id, group = decode_group(bytes(row[0]))
            except RemoteProtocolError:
                decoded_id = None
            if decoded_id != group_id:
                self._drop_damaged(group_id)
                continue
            verified.append(VerifiedGroup(group_id, group, row[1], _rewards(row[2])))
        return verified

    def mark_trained(self, group_ids: Iterable[GroupId], round_number: int) -> None:
        """Record, on the disk itself before this returns, that groups go into a round's update.

        All or none are marked. Marking again for the same round changes nothing; a group that left
        the pool since it was drawn is marked on its tombstone.

        Raises:
            LocalProtocolError: a group is marked for another round, or was never here.
        """
        self._mark(list(group_ids), round_number)

    def expire(self, now_s: float) -> int:
        """Remove what has expired; returns how many groups that was."""
        with self._transaction():
            return self._remove("expires_at_s <= ?", (now_s,))

    def statistics(self, now_s: float | None = None) -> PoolStatistics:
        """What is in the pool now."""
        with self._transaction():
            own, eligible = self._db.execute(
                "SELECT count(*) FILTER (WHERE own), count(*) FILTER"
                " (WHERE NOT own AND trained_round IS NULL AND expires_at_s > ?) FROM groups",
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
            )

    def _mark(self, group_ids: list[GroupId], round_number: int) -> None:
        with self._transaction(to_disk=True):
            for group_id in group_ids:
                table = self._table_of(group_id)
                (marked,) = self._db.execute(
                    f"SELECT trained_round FROM {table} WHERE group_id = ?",
                    (group_id,),
                ).fetchone()
                if marked is not None and marked != round_number:
                    raise LocalProtocolError(
                        f"group {group_id.hex()} was trained on in round {marked} already"
                    )
                self._db.execute(
                    f"UPDATE {table} SET trained_round = ? WHERE group_id = ?",
                    (round_number, group_id),
                )

    def _table_of(self, group_id: GroupId) -> str:
        for table in ("groups", "tombstones"):
            query = f"SELECT 1 FROM {table} WHERE group_id = ?"
            if self._db.execute(query, (group_id,)).fetchone() is not None:
                return table
        raise LocalProtocolError(f"group {group_id.hex()} was never in the pool")

    def _is_known(self, column: str, value: bytes) -> bool:
        query = (
            f"SELECT 1 FROM groups WHERE {column} = ?1"
            f" UNION ALL SELECT 1 FROM tombstones WHERE {column} = ?1"
        )
        return self._db.execute(query, (value,)).fetchone() is not None

    def _make_share(self, producer: str, *, own: bool) -> bool:
        """Keep the producer within its share: its oldest group makes place, trained ones first.

        Not the new one: a node that refused it would hold what nobody draws any more and take in
        nothing of that producer until the old groups expire.
        """
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
        """Remove the one group whose sequence number the query finds, if it finds one."""
        found = self._db.execute(query, values).fetchone()
        return found is not None and self._remove("seq = ?", found) > 0

    def _remove(self, condition: str, values: tuple[object, ...]) -> int:
        """Replace groups by tombstones and the oldest tombstones by nothing."""
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
                del self._groups[producer]
        if removed:
            self._db.execute(
                "DELETE FROM tombstones WHERE seq <= (SELECT max(seq) FROM tombstones) - ?",
                (self.limits.tombstones_max,),
            )
        return len(removed)

    def _drop_damaged(self, group_id: GroupId) -> None:
        self.damaged_records += 1
        with self._transaction():
            self._remove("group_id = ?", (group_id,))

    @contextmanager
    def _transaction(self, *, to_disk: bool = False) -> Iterator[None]:
        """All or nothing, the sums in memory too. With `to_disk` it outlives a power cut."""
        with self._lock:
            groups, size = self._groups.copy(), self._bytes
            if to_disk:
                self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                self._groups, self._bytes = groups, size
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                if to_disk:
                    self._db.execute("PRAGMA synchronous = NORMAL")


class _DamagedFileError(Exception):
    """The file is no intact SQLite database."""


def _task_key(producer: PeerId, task: Task) -> bytes:
    parts = [producer, task.environment, task.version, task.parameters, task.seed, task.index]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


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
        if isinstance(error, sqlite3.DatabaseError):
            raise _open_failure(error, path) from error
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


def _open_failure(error: sqlite3.DatabaseError, path: Path | str) -> Exception:
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _DamagedFileError()
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return ConfigError(f"pool {path} is in use by another process: give each node its own")
    return ConfigError(f"pool {path} cannot be opened: {error}")


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
