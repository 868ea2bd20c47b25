"""Limits of all collections in a node, by class and attribute.

Limits are the constants of the code. Tables by connected peer are bounded by their number. Any
other collection may have `UNNAMED_MAX` entries, so one that grows with the swarm needs a line here.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, Final, cast

from swarm.errors import Reject
from swarm.exchange.advert_sampling import REMEMBERED_MAX
from swarm.exchange.fetching import (
    ADVERTS_PER_PRODUCER_MAX,
    HOLDERS_TRIED_MAX,
    OFFER_LIMITS,
    ExchangeRules,
)
from swarm.exchange.holder_search import RESTING_MAX
from swarm.exchange.service import SERVED_PEERS_MAX
from swarm.limits.dial_backoff import DIALS_MAX, ENDPOINTS_MAX, KEYS_MAX, PROVEN_MAX
from swarm.limits.quotas import BUCKETS_MAX, Kind
from swarm.peers.address_book import BOOK_PEERS_MAX, HEARSAY_PEERS_MAX
from swarm.peers.connection_gater import NEW_BANS_MAX
from swarm.peers.discovery import (
    BOOTSTRAP_DIALS_MAX,
    DIALS_AT_A_TIME_MAX,
    EXTRA_PEERS_MAX,
    INSTANCES_MAX,
)
from swarm.peers.ledger import LEDGER_PEERS_MAX
from swarm.peers.reputation import RULES as REPUTATION
from swarm.wire.messages import ADDRESSES_MAX, WANT_GROUPS_MAX

WALK_DEPTH_MAX = 8
WALK_ENTRIES_MAX = 8  # entries inspected per collection
NOT_OF_A_NODE = ("swarm.transport.memory", "swarm.simulation", "node.simulat")
UNNAMED_MAX: Final = 8  # entries of a collection without a line here
SETTLED_MAX: Final = 4_096  # of collections fixed before the start
HEARD_INSTANCES_MAX: Final = 2  # per peer, in `Discovery`
RECENT_ROUNDS_MAX: Final = 200  # own rounds that a node keeps
REFUSALS_MAX: Final = 6  # reasons of `ConnectionGater` for refusals
ADVERTS_MAX: Final = cast(
    "int",
    next(each.default for each in fields(ExchangeRules) if each.name == "recent_adverts_max"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a run that some limits depend on."""

    peers_max: int  # other hosts, liars included
    batches_max: int  # groups being fetched
    pool_groups_max: int
    external_groups: int  # J


def limits_of(size: Size) -> Mapping[str, int]:
    """Limit of each collection by its name in `collections_in`."""
    peers = dict.fromkeys(
        (
            "Discovery._asked",
            "Discovery._dialled",
            "Discovery._greeted_at",
            "Discovery.peers",
            "Fetcher._open",
        ),
        size.peers_max,
    )
    of_run = {
        "Fetcher._in_flight": size.batches_max,
        "PoolStatistics.by_producer": size.pool_groups_max,
        "RoundDone.foreign_by_producer": size.external_groups,
        "RoundDone.foreign_groups": size.external_groups,
    }
    return {**LIMITS, **peers, **of_run}


LIMITS: Final[Mapping[str, int]] = {
    "AddressBook.entries": BOOK_PEERS_MAX,
    "AddressBook.hearsay": HEARSAY_PEERS_MAX,
    "AdvertCache._adverts": ADVERTS_MAX,
    "AdvertCache._by_producer": ADVERTS_MAX,
    "AdvertCache._by_producer[]": ADVERTS_PER_PRODUCER_MAX,
    "AdvertCache._records": ADVERTS_MAX,
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
    "PeerInfo.addresses": ADDRESSES_MAX,
    "PeerRecord.rejected": len(Reject),
    "ProducerSampler._taken": REMEMBERED_MAX,
    "Quotas._buckets": BUCKETS_MAX,
    "Quotas._rates": len(Kind),
    "Quotas.refused": len(Kind),
    "EventWindow._times": KEYS_MAX,
    "EventWindow._times[]": DIALS_MAX,
    "Reputation._accounts": REPUTATION.peers_max,
    "Reputation._bans": REPUTATION.bans_max,
    "Reputation._blocks": REPUTATION.blocks_max,
    "Reputation._blocks[]": REPUTATION.peers_per_block_max,
    "ReputationRules.*": len(Reject),
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
    "_Entry.addresses": ADDRESSES_MAX,
    "_Producer.addresses": ADDRESSES_MAX,
    "_Producer.offers": OFFER_LIMITS.groups_per_producer_max,
}


def limit_of(where: str, limits: Mapping[str, int]) -> int:
    """Limit of a collection: its own or its class's."""
    of_class = limits.get(f"{where.partition('.')[0]}.*", UNNAMED_MAX)
    return limits.get(where, of_class)


def collections_in(root: object) -> Iterator[tuple[str, int]]:
    """Name and size of every collection reachable from an object of this project. The name is class
    and attribute, with `[]` per nesting level."""
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
            todo.extend((f"{kind}.{name}", v, depth + 1) for name, v in _attributes(value))


def _is_ours(value: object) -> bool:
    kind = type(value)
    if isinstance(value, dict | list | deque | set):
        return True
    module = kind.__module__
    return module.startswith(("swarm.", "node.")) and not module.startswith(NOT_OF_A_NODE)


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    if is_dataclass(value):
        for each in fields(value):
            if not hasattr(value, "__dict__"):
                yield each.name, getattr(value, each.name)
