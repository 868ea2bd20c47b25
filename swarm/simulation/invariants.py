"""Invariants of every simulated run, and the limit of each collection in a node. A
collection without a line in `LIMITS` may have `UNNAMED_MAX` entries."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgpack
import trio
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from swarm.errors import Reject
from swarm.exchange.adverts import REMEMBERED_MAX
from swarm.exchange.exchange_service import SERVED_PEERS_MAX
from swarm.exchange.fetching import (
    ADVERTS_PER_PRODUCER_MAX,
    HOLDERS_TRIED_MAX,
    OFFER_LIMITS,
    RECENT_ADVERTS_MAX,
)
from swarm.exchange.holder_search import RESTING_MAX
from swarm.exchange.pool import AddResult, Pool, PoolLimits
from swarm.identity import PeerId, public_key_of
from swarm.limits.address_blocks import Block
from swarm.limits.dial_backoff import DIALS_MAX, ENDPOINTS_MAX, KEYS_MAX, PROVEN_MAX
from swarm.limits.quotas import BUCKETS_MAX, Kind
from swarm.peers import reputation
from swarm.peers.address_book import BOOK_PEERS_MAX, HEARSAY_PEERS_MAX
from swarm.peers.connection_gater import NEW_BANS_MAX
from swarm.peers.credit import (
    MADE_MAX,
    TAKERS_MAX,
    TAKERS_PER_GROUP_MAX,
    TRAINED_KEPT,
)
from swarm.peers.discovery import (
    BOOTSTRAP_DIALS_MAX,
    DIALS_AT_A_TIME_MAX,
    EXTRA_PEERS_MAX,
    INSTANCES_MAX,
)
from swarm.peers.reputation import LEDGER_PEERS_MAX, Ban
from swarm.rollouts import GroupId, ScoredGroup
from swarm.wire.messages import GROUP_DOMAIN, LARGE_GROUP_BYTES_MAX, WANT_GROUPS_MAX

WALK_DEPTH_MAX = 8
WALK_ENTRIES_MAX = 8  # entries inspected per collection
NOT_OF_A_NODE = ("swarm.transport.memory", "swarm.simulation", "node.simulat")
UNNAMED_MAX: Final = 8  # entries of a collection without a line here
SETTLED_MAX: Final = 4_096  # of collections fixed before the start
HEARD_INSTANCES_MAX: Final = 2  # per peer, in `Discovery`
RECENT_ROUNDS_MAX: Final = 200  # own rounds that a node keeps
REFUSALS_MAX: Final = 6  # reasons of `ConnectionGater` for refusals


def limits_of(
    peers_max: int, batches_max: int, pool_groups_max: int, external_groups: int
) -> Mapping[str, int]:
    """Limit of each collection by name. `peers_max`: other hosts, liars included. `batches_max`:
    groups being fetched. `external_groups`: J."""
    peers = dict.fromkeys(
        (
            "Discovery._asked",
            "Discovery._dialled",
            "Discovery._greeted_at",
            "Discovery.peers",
            "Fetcher._open",
        ),
        peers_max,
    )
    of_run = {
        "Fetcher._in_flight": batches_max,
        "PoolStatistics.by_producer": pool_groups_max,
        "RoundDone.foreign_by_producer": external_groups,
        "RoundDone.foreign_groups": external_groups,
    }
    return {**LIMITS, **peers, **of_run}


LIMITS: Final[Mapping[str, int]] = {
    "AddressBook.entries": BOOK_PEERS_MAX,
    "AddressBook.hearsay": HEARSAY_PEERS_MAX,
    "AdvertCache._adverts": RECENT_ADVERTS_MAX,
    "AdvertCache._by_producer": RECENT_ADVERTS_MAX,
    "AdvertCache._by_producer[]": ADVERTS_PER_PRODUCER_MAX,
    "AdvertCache._records": RECENT_ADVERTS_MAX,
    "Credit._made": MADE_MAX,
    "Credit._made[]": TAKERS_PER_GROUP_MAX,
    "Credit._takers": TAKERS_MAX,
    "Credit._takers_ever": TAKERS_MAX,
    "Credit._trained": TRAINED_KEPT,
    "DialBackoff._pauses": ENDPOINTS_MAX,
    "DialBackoff._proven": PROVEN_MAX,
    "Discovery._dialling": DIALS_AT_A_TIME_MAX + BOOTSTRAP_DIALS_MAX,
    "Discovery._heard": INSTANCES_MAX,
    "Discovery._heard[]": HEARD_INSTANCES_MAX,
    "Discovery._extra_peers": EXTRA_PEERS_MAX,
    "Discovery._strangers": BOOK_PEERS_MAX,
    "Exchange._peer_budgets": SERVED_PEERS_MAX,
    "HeldOutGuard._prompts": SETTLED_MAX,
    "HolderSearch._rests_until": RESTING_MAX,
    "Ledger._peers": LEDGER_PEERS_MAX,
    "Ledger.rejected": len(Reject),
    "NodeConfig.*": SETTLED_MAX,
    "OfferTable._producers": OFFER_LIMITS.producers_max,
    "PeerRecord.rejected": len(Reject),
    "ProducerSampler._taken": REMEMBERED_MAX,
    "Quotas._buckets": BUCKETS_MAX,
    "Quotas._rates": len(Kind),
    "Quotas.refused": len(Kind),
    "EventWindow._times": KEYS_MAX,
    "EventWindow._times[]": DIALS_MAX,
    "Reputation._accounts": reputation.PEERS_MAX,
    "Reputation._bans": reputation.BANS_MAX,
    "Reputation._blocks": reputation.BLOCKS_MAX,
    "Reputation._blocks[]": reputation.PEERS_PER_BLOCK_MAX,
    "RoundDone.rejected_total": len(Reject),
    "Rounds._recent": RECENT_ROUNDS_MAX,
    "RunConfig.*": SETTLED_MAX,
    "ConnectionGater._new": NEW_BANS_MAX,
    "ConnectionGater.refused_connections": REFUSALS_MAX,
    "_Account.offences": len(Reject),
    "_Batch.answers": 1 + HOLDERS_TRIED_MAX,
    "_Batch.offers": WANT_GROUPS_MAX,
    "_Batch.requests": 1 + HOLDERS_TRIED_MAX,
    "_Batch.wanted": WANT_GROUPS_MAX,
    "Producer.offers": OFFER_LIMITS.groups_per_producer_max,
}


def limit_of(where: str, limits: Mapping[str, int]) -> int:
    of_class = limits.get(f"{where.partition('.')[0]}.*", UNNAMED_MAX)
    return limits.get(where, of_class)


def collections_in(root: object) -> Iterator[tuple[str, int]]:
    """Class, attribute and size of every reachable collection; `[]` per nesting level."""
    seen: set[int] = set()
    todo: deque[tuple[str, Any, int]] = deque([(type(root).__name__, root, 0)])
    while todo:
        where, value, depth = todo.popleft()
        if id(value) in seen or depth > WALK_DEPTH_MAX:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            yield where, len(value)
            inside = value.values() if isinstance(value, Mapping) else value
            # one entry stands for all
            some = islice(inside, WALK_ENTRIES_MAX)
            todo.extend((f"{where}[]", each, depth + 1) for each in some if _is_ours(each))
        elif _is_ours(value):
            kind = type(value).__name__
            todo.extend((f"{kind}.{name}", v, depth + 1) for name, v in _attributes(value).items())


def _is_ours(value: object) -> bool:
    kind = type(value)
    if isinstance(value, dict | list | deque | set):
        return True
    module = kind.__module__
    return module.startswith(("swarm.", "node.")) and not module.startswith(NOT_OF_A_NODE)


def _attributes(value: object) -> dict[str, Any]:
    if hasattr(value, "__dict__"):
        return vars(value)
    names = [each.name for each in fields(value)] if is_dataclass(value) else []
    return {name: getattr(value, name) for name in names}


VIOLATIONS_MAX = 100  # kept; all are counted
LIARS_FOR_BLOCK_BAN = 4  # PROTOCOL.md, "What breaking a rule costs"


@dataclass(frozen=True, slots=True)
class Violation:
    at_s: float
    host: int
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s, host {self.host}: {self.rule}: {self.detail}"


@dataclass(frozen=True, slots=True)
class BanRules:
    """Peers that nobody may ban, and the number of liars by address block."""

    honest: frozenset[PeerId]
    liars_by_block: Counter[Block | PeerId | None]


@dataclass(slots=True)
class Invariants:
    """Watches one run; failed checks are added to `violations`."""

    run_id: str
    record_life_s: int
    clock_skew_s: int
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
        self.checks[rule] += 1
        if not holds:
            self.violate(host, rule, detail)

    def stored(self, host: int, record: bytes, group_id: bytes) -> None:
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
            "of another run": body["run_id"] != self.run_id,
            "expired": body["expires_at_s"] <= now_s,
            "of the future": body["created_at_s"] > now_s + self.clock_skew_s,
            "lives too long": body["expires_at_s"] - body["created_at_s"] > self.record_life_s,
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
        """Check that a foreign group went to a trainer once; `content` identifies it."""
        digest = hashlib.sha256(content).digest()
        seen = self._trained.setdefault(host, set())
        self.require(digest not in seen, host, "trainer", "a foreign group came twice")
        seen.add(digest)

    def check_ban(self, host: int, ban: Ban, rules: BanRules) -> None:
        if ban.is_block:
            liars = rules.liars_by_block[ban.subject]
            detail = f"block {ban.subject} is banned with {liars} liars in it: {ban.why}"
            self.require(liars >= LIARS_FOR_BLOCK_BAN, host, "ban", detail)
        else:
            detail = f"honest {ban.subject} is banned: {ban.why}"
            self.require(ban.subject not in rules.honest, host, "ban", detail)

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
        on_stored: Callable[[bytes, ScoredGroup, bool], None],
        on_refused: Callable[[ScoredGroup, AddResult], None] = lambda *_: None,
    ) -> None:
        super().__init__(path, limits)
        self._on_stored = on_stored
        self._on_refused = on_refused

    def add_all(
        self, groups: Sequence[tuple[bytes, ScoredGroup]], *, own: bool, now_s: float
    ) -> list[AddResult]:
        results = super().add_all(groups, own=own, now_s=now_s)
        for (record, verified), result in zip(groups, results, strict=True):
            if result is AddResult.ADDED:
                self._on_stored(record, verified, own)
            else:
                self._on_refused(verified, result)
        return results


class ByteWatch:
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
    """Groups in each producer's newest adverts and rounds. A lost checkpoint repeats a round."""
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
