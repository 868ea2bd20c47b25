"""Invariants of every simulated run.

**Records.** A stored record is signed by its producer over exactly its bytes, for this run, within
its size and time. A host stores no group twice, and no second group of a producer for one task. The
check parses the bytes by PROTOCOL.md, without the code that it checks.

**Trainer.** No foreign group reaches a host's trainer twice, restarts included.

**Bounds.** The pool keeps its limits. Collections stay within `bounds.py`. Bytes served and fetched
stay within their budget.

**Bans.** No honest host bans an honest peer, or an address block with fewer than
`LIARS_FOR_BLOCK_BAN` liars.

**Reach.** After the faults, every live honest host has stored each group of an honest host, if all
want all. Expired groups and those no longer offered (`still_on_offer`) are left out; a run with
nothing left to judge is a violation.
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
    """One broken rule: time, host, rule, observation."""

    at_s: float
    host: int
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s, host {self.host}: {self.rule}: {self.detail}"


@dataclass(frozen=True, slots=True)
class RecordRules:
    run_id: str
    life_s: int
    skew_s: int


@dataclass(frozen=True, slots=True)
class BanRules:
    """Peers that nobody may ban, and the number of liars by address block."""

    honest: frozenset[PeerId]
    liars_by_block: Counter[Block | PeerId | None]


@dataclass(slots=True)
class Invariants:
    """Watches one run. Failed checks are added to `violations`."""

    rules: RecordRules
    now_s: Callable[[], float]  # unix time
    violations: list[Violation] = field(default_factory=list)
    count: int = 0
    checks: Counter[str] = field(default_factory=Counter)  # checks by rule
    _stored: dict[int, set[bytes]] = field(default_factory=dict)
    _tasks: dict[int, dict[tuple[Any, ...], bytes]] = field(default_factory=dict)
    _trained: dict[int, set[bytes]] = field(default_factory=dict)

    def violate(self, host: int, rule: str, detail: str) -> None:
        self.count += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(trio.current_time(), host, rule, detail))

    def require(self, holds: bool, host: int, rule: str, detail: str) -> None:
        """Record a violation unless the rule holds."""
        self.checks[rule] += 1
        if not holds:
            self.violate(host, rule, detail)

    # --- records and trainer ----------------------------------------------------------------

    def stored(self, host: int, record: bytes, group_id: bytes) -> None:
        """Check a record that a host stored under this id."""
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
        return group_id in self._stored.get(host, ())

    def trained(self, host: int, content: bytes) -> None:
        """Check a foreign group that went to a trainer; `content` identifies groups."""
        digest = hashlib.sha256(content).digest()
        seen = self._trained.setdefault(host, set())
        self.require(digest not in seen, host, "trainer", "a foreign group came twice")
        seen.add(digest)

    # --- bans -------------------------------------------------------------------------------

    def check_ban(self, host: int, ban: Ban, rules: BanRules) -> None:
        """Check that a ban of an honest host hits a liar."""
        if ban.is_block:
            liars = rules.liars_by_block[ban.subject]
            detail = f"block {ban.subject} is banned with {liars} liars in it: {ban.why}"
            self.require(liars >= LIARS_FOR_BLOCK_BAN, host, "ban", detail)
        else:
            detail = f"honest {ban.subject} is banned: {ban.why}"
            self.require(ban.subject not in rules.honest, host, "ban", detail)

    # --- bounds -----------------------------------------------------------------------------

    def check_pool(self, host: int, pool: Pool) -> None:
        statistics, limits = pool.statistics(), pool.limits
        most = max(statistics.by_producer.values(), default=0)
        for what, value, limit in (
            ("groups", statistics.groups, limits.groups_max),
            ("bytes", statistics.bytes, limits.bytes_max),
            ("groups of one producer", most, limits.groups_per_producer_max),
        ):
            self.require(value <= limit, host, "pool", f"{value} {what}, at most {limit}")

    def check_collections(self, host: int, root: object, limits: Mapping[str, int]) -> None:
        for where, size in collections_in(root):
            limit = limit_of(where, limits)
            detail = f"{where} has {size} entries, at most {limit}"
            self.require(size <= limit, host, "collections", detail)


class WatchedPool(Pool):
    """The production pool; reports each stored group."""

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
        results = super().add_all(groups, own=own, now_s=now_s)
        for (record, verified), result in zip(groups, results, strict=True):
            if result is AddResult.ADDED:
                self._on_stored(record, verified, own)
            else:
                self._on_refused(verified, result)
        return results


class ByteWatch:
    """Checks byte counts against a budget per second."""

    def __init__(self, bytes_per_s: float, slack_bytes: float, window_s: float) -> None:
        """`slack_bytes`: allowed overdraft, such as one answer."""
        self._rate = bytes_per_s
        self._slack = slack_bytes
        self._window_s = window_s
        self._seen: deque[tuple[float, float]] = deque()

    def excess(self, total_bytes: float, now_s: float) -> float:
        """Bytes over the budget in the window that ends now; 0.0 if none."""
        self._seen.append((now_s, total_bytes))
        while self._seen[0][0] < now_s - self._window_s:
            self._seen.popleft()
        since_s, before = self._seen[0]
        # a bucket starts with one second's worth
        allowed = self._rate * (now_s - since_s + 1.0) + self._slack
        return max(0.0, total_bytes - before - allowed)


@dataclass(frozen=True, slots=True)
class PublishedGroup:
    group_id: GroupId
    host: int
    round: int
    at_s: float
    expires_at_s: float


def still_on_offer(
    published: Collection[PublishedGroup], rounds: int, adverts: int
) -> list[PublishedGroup]:
    """Groups in the producer's newest adverts and rounds. A producer that lost a checkpoint repeats
    a round with other tasks."""
    by_host: dict[int, dict[tuple[float, int], list[PublishedGroup]]] = {}
    for each in published:
        advert = (each.expires_at_s, each.round)  # identifies an advert
        by_host.setdefault(each.host, {}).setdefault(advert, []).append(each)
    found: list[PublishedGroup] = []
    for of_host in by_host.values():
        newest = sorted(of_host)[-adverts:]
        last_round = newest[-1][1]
        for advert in newest:
            found += [each for each in of_host[advert] if each.round > last_round - rounds]
    return found
