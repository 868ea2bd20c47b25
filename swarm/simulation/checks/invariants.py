"""What must hold through every simulated run, whatever goes wrong in it.

**Records.** Nothing is ever stored that is not signed by the producer that it names, over exactly
its bytes, for this run, within its size and its time; nor a group that this host stored before,
nor a second one for a task that its producer did before. The check reads the bytes by itself, by
PROTOCOL.md, and shares no code with the one that it watches.

**Trainer.** No foreign group reaches a host's trainer twice, restarts included.

**Bounds.** The pool keeps its limits; every collection in the objects of a node has no more entries
than its own limit in `bounds.py`; what a host serves and fetches in a window of time is within its
budget.

**Bans.** No honest host bans an honest peer, at any time and for whatever reason. Nor does it ban
an address block with fewer than `LIARS_FOR_BLOCK_BAN` liars in it, however many honest hosts live
there too: a household is not shut out for what one of it did. A block with as many may be banned;
that closes the connections of its honest hosts as well, as PROTOCOL.md says. Looked at whenever a
ban is made, and again every virtual second.

**Reach.** When faults are over and the swarm has settled, each group that an honest host published
has been stored by every other live honest host, if all want all groups. Left out are groups that
have expired, and those that their producer has moved on from: others are told of its newest adverts
alone (`still_on_offer`). A run in which nothing is left to judge breaks the rule too.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import trio
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarm.exchange.pool import AddResult, Pool, PoolLimits
from swarm.identity import PeerId, public_key_of
from swarm.limits.address_blocks import Block
from swarm.peers.reputation import Ban
from swarm.rollouts import GroupId, VerifiedGroup
from swarm.simulation.checks.bounds import collections_in, limit_of
from swarm.wire.messages import GROUP_DOMAIN, LARGE_GROUP_BYTES_MAX

VIOLATIONS_MAX = 100  # kept; all are counted
LIARS_FOR_BLOCK_BAN = 4  # PROTOCOL.md, "What breaking a rule costs"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: when, at which host, which, and what was seen."""

    at_s: float
    host: int
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s, host {self.host}: {self.rule}: {self.detail}"


@dataclass(frozen=True, slots=True)
class RecordRules:
    """What the run allows of a record."""

    run_id: str
    life_s: int
    skew_s: int


@dataclass(frozen=True, slots=True)
class BanRules:
    """Who is who: the peers that nobody may ban, and how many liars an address block has."""

    honest: frozenset[PeerId]
    liars_by_block: Counter[Block | PeerId | None]


@dataclass(slots=True)
class Invariants:
    """Watches one run. Each check adds to `violations` and goes on."""

    rules: RecordRules
    now_s: Callable[[], float]  # unix time
    violations: list[Violation] = field(default_factory=list)
    count: int = 0
    checks: Counter[str] = field(default_factory=Counter)  # how often each rule was looked at
    _stored: dict[int, set[bytes]] = field(default_factory=dict)
    _tasks: dict[int, dict[tuple[Any, ...], bytes]] = field(default_factory=dict)
    _trained: dict[int, set[bytes]] = field(default_factory=dict)

    def violate(self, host: int, rule: str, detail: str) -> None:
        """Note a broken rule."""
        self.count += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(trio.current_time(), host, rule, detail))

    def require(self, holds: bool, host: int, rule: str, detail: str) -> None:
        """Note a rule as broken unless it holds."""
        self.checks[rule] += 1
        if not holds:
            self.violate(host, rule, detail)

    # --- records and trainer ----------------------------------------------------------------

    def stored(self, host: int, record: bytes, group_id: bytes) -> None:
        """A host stored a record under that id."""
        self.checks["record"] += 1
        fault = self._fault_of(record, group_id)
        if fault is None:
            fault = self._replay_of(host, record, group_id)
        if fault is not None:
            self.violate(host, "record", fault)

    def _fault_of(self, record: bytes, group_id: bytes) -> str | None:
        if len(record) > LARGE_GROUP_BYTES_MAX:
            return f"oversize: {len(record)} bytes"
        envelope = msgpack.unpackb(record)
        payload, signer = envelope["payload"], envelope["signer"]
        try:
            key = Ed25519PublicKey.from_public_bytes(public_key_of(signer))
            key.verify(envelope["signature"], GROUP_DOMAIN + payload)
        except InvalidSignature:
            return f"mis-signed by {signer}"
        body, now_s = msgpack.unpackb(payload), self.now_s()
        faults = {
            "stored under another id": group_id != hashlib.sha256(GROUP_DOMAIN + payload).digest(),
            "signed by another than its producer": body["producer"] != signer,
            "of another run": body["run_id"] != self.rules.run_id,
            "expired": body["expires_at_s"] <= now_s,
            "of the future": body["created_at_s"] > now_s + self.rules.skew_s,
            "lives too long": body["expires_at_s"] - body["created_at_s"] > self.rules.life_s,
        }
        return next((fault for fault, is_so in faults.items() if is_so), None)

    def _replay_of(self, host: int, record: bytes, group_id: bytes) -> str | None:
        stored = self._stored.setdefault(host, set())
        tasks = self._tasks.setdefault(host, {})
        body = msgpack.unpackb(msgpack.unpackb(record)["payload"])
        task = (body["producer"], *sorted(body["task"].items()))
        if group_id in stored:
            return f"replayed: {group_id.hex()}"
        stored.add(group_id)
        if tasks.setdefault(task, group_id) != group_id:
            return f"second group for task {body['task']['index']} of {body['producer']}"
        return None

    def has_stored(self, host: int, group_id: bytes) -> bool:
        """Whether a host stored a group at any time."""
        return group_id in self._stored.get(host, ())

    def trained(self, host: int, content: bytes) -> None:
        """A foreign group went to a host's trainer; `content` is what tells groups apart."""
        digest = hashlib.sha256(content).digest()
        seen = self._trained.setdefault(host, set())
        self.require(digest not in seen, host, "trainer", "a foreign group came twice")
        seen.add(digest)

    # --- bans -------------------------------------------------------------------------------

    def check_ban(self, host: int, ban: Ban, rules: BanRules) -> None:
        """An honest host's ban is of somebody who deserves it."""
        if ban.is_block:
            liars = rules.liars_by_block[ban.subject]
            detail = f"block {ban.subject} is banned with {liars} liars in it: {ban.why}"
            self.require(liars >= LIARS_FOR_BLOCK_BAN, host, "ban", detail)
        else:
            detail = f"honest {ban.subject} is banned: {ban.why}"
            self.require(ban.subject not in rules.honest, host, "ban", detail)

    # --- bounds -----------------------------------------------------------------------------

    def check_pool(self, host: int, pool: Pool) -> None:
        """The pool is within its limits."""
        statistics, limits = pool.statistics(), pool.limits
        most = max(statistics.by_producer.values(), default=0)
        for what, value, limit in (
            ("groups", statistics.groups, limits.groups_max),
            ("bytes", statistics.bytes, limits.bytes_max),
            ("groups of one producer", most, limits.groups_per_producer_max),
        ):
            self.require(value <= limit, host, "pool", f"{value} {what}, at most {limit}")

    def check_collections(self, host: int, root: object, limits: Mapping[str, int]) -> None:
        """Every collection in these objects is within its own limit."""
        for where, size in collections_in(root):
            limit = limit_of(where, limits)
            detail = f"{where} has {size} entries, at most {limit}"
            self.require(size <= limit, host, "collections", detail)


class WatchedPool(Pool):
    """The production pool, which tells of each group that it stored."""

    def __init__(
        self,
        path: Path | str,
        limits: PoolLimits,
        on_stored: Callable[[bytes, VerifiedGroup, bool], None],
        on_refused: Callable[[VerifiedGroup, AddResult], None] = lambda *_: None,
    ) -> None:
        super().__init__(path, limits)
        self._on_stored = on_stored
        self._on_refused = on_refused

    def add_all(
        self, groups: Sequence[tuple[bytes, VerifiedGroup]], *, own: bool, now_s: float
    ) -> list[AddResult]:
        """See `Pool.add_all`."""
        results = super().add_all(groups, own=own, now_s=now_s)
        for (record, verified), result in zip(groups, results, strict=True):
            if result is AddResult.ADDED:
                self._on_stored(record, verified, own)
            else:
                self._on_refused(verified, result)
        return results


class ByteWatch:
    """Whether bytes counted over time stay within a budget of so many a second."""

    def __init__(self, bytes_per_s: float, slack_bytes: float, window_s: float) -> None:
        """`slack_bytes` may come at any time on top: what one answer may overdraw."""
        self._rate = bytes_per_s
        self._slack = slack_bytes
        self._window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()

    def excess(self, total_bytes: float, now_s: float) -> float:
        """By how many bytes the window that ends now is over the budget; 0.0 if it is not."""
        self._seen.append((now_s, total_bytes))
        while self._seen[0][0] < now_s - self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        # a bucket holds one second's worth at the start
        allowed = self._rate * (now_s - since_s + 1.0) + self._slack
        return max(0.0, total_bytes - before - allowed)


@dataclass(frozen=True, slots=True)
class PublishedGroup:
    """A group that an honest host published."""

    group_id: GroupId
    host: int
    round: int
    at_s: float
    expires_at_s: float


def still_on_offer(
    published: Collection[PublishedGroup], rounds: int, adverts: int
) -> list[PublishedGroup]:
    """Those that others are still told of: in one of the producer's newest adverts, and of its
    newest rounds. A producer that lost a checkpoint repeats a round, with other tasks."""
    by_host: dict[int, dict[tuple[float, int], list[PublishedGroup]]] = {}
    for each in published:
        advert = (each.expires_at_s, each.round)  # all of one advert were made at once
        by_host.setdefault(each.host, {}).setdefault(advert, []).append(each)
    found: list[PublishedGroup] = []
    for of_host in by_host.values():
        newest = sorted(of_host)[-adverts:]
        last_round = newest[-1][1]
        for advert in newest:
            found += [each for each in of_host[advert] if each.round > last_round - rounds]
    return found
