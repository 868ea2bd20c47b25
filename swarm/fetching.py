"""The fetching side of the exchange: choose, fetch, verify, pool.

No producer holds up the others. One batch at a time is under way to each; what is under way to a
producer that has not delivered hardly counts as stock to come; and one that failed is left alone
for a while, so that silence costs the swarm a few seconds now and then.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import Any

import trio

from swarm import codec
from swarm.budget import ByteBudget
from swarm.errors import (
    ChildFailed,
    ConfigError,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
)
from swarm.identity import PeerId
from swarm.ledger import Ledger
from swarm.messages import (
    GROUPS_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    WANT_GROUPS_MAX,
    GroupsReply,
    Want,
)
from swarm.offers import Offer, OfferLimits, OfferTable
from swarm.pool import AddResult, Candidate, Pool
from swarm.rollouts import GroupId, RolloutGroup, VerifiedGroup
from swarm.transport.base import Transport

Verify = Callable[[RolloutGroup], Awaitable[tuple[str, tuple[float, ...]]]]
"""Regenerates the task and scores the completions: group -> (prompt, rewards).

Raises `RemoteProtocolError` if the task is not the producer's or cannot be verified, and
`ChildFailed` if the fault is our own.
"""

RunSync = Callable[..., Awaitable[Any]]
"""Runs a blocking call off the event loop: `trio.to_thread.run_sync`, or inline in simulation."""

POOL_REJECTS = {
    AddResult.DUPLICATE_TASK: Reject.DUPLICATE_TASK,
    AddResult.QUOTA: Reject.QUOTA,
}
OFFER_LIMITS = OfferLimits()
FETCH_RETRY_S = 2.0
FAILED_REST_S = 30.0  # at first, for a producer that did not answer or answered against the rules
REFUSED_REST_S = 2.0  # at first, for one that refused or had nothing
VERIFIER_RETRY_S = 5.0
DIAL_ADDRESSES_MAX = 2  # of a producer that we are not connected to, for each fetch
FORWARDERS_MAX = 2  # asked after the producer
REWARD_SPREAD_MIN = 1e-8  # rewards closer than this are equal: the group teaches nothing


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    """What the run and this node allow."""

    run_id: str
    stock_groups: int  # informative foreign groups to keep ready; 0 fetches nothing
    record_life_s: int
    clock_skew_s: int
    group_size_max: int
    fetch_parallel: int = 4
    fetch_timeout_s: float = 8.0
    fetch_bytes_per_s: float = 4 * 1024 * 1024
    serve_bytes_per_s: float = 8 * 1024 * 1024
    dial_timeout_s: float = 5.0
    catch_up_interval_s: float = 15.0
    expire_interval_s: float = 10.0
    recent_adverts_max: int = 512
    recent_adverts_per_producer_max: int = 4
    offers: OfferLimits = OFFER_LIMITS


def informative(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that its advantages are not all zero."""
    return max(rewards) - min(rewards) > REWARD_SPREAD_MIN


class _Answer(Enum):
    """What asking one peer came to."""

    GOOD = auto()  # at least one group passed every check
    NOTHING = auto()  # none of the wanted groups: no fault
    REFUSED = auto()
    SILENT = auto()
    BROKEN = auto()  # against the rules, and counted


class Fetcher:
    """Keeps the stock of foreign groups filled. `run` fetches until cancelled."""

    def __init__(
        self,
        rules: ExchangeRules,
        transport: Transport,
        pool: Pool,
        verify: Verify,
        offers: OfferTable,
        ledger: Ledger,
        candidates: Callable[[], Awaitable[list[Candidate]]],
        *,
        now_s: Callable[[], float],
        rng: Random,
        run_sync: RunSync,
    ) -> None:
        self._rules = rules
        self._transport = transport
        self._pool = pool
        self._verify = verify
        self._offers = offers
        self._ledger = ledger
        self._candidates = candidates
        self._now_s = now_s
        self._rng = rng
        self._run_sync = run_sync
        self._in_flight: dict[PeerId, int] = {}  # groups of the one batch for each producer
        self._wake = trio.Event()
        self._budget = ByteBudget(rules.fetch_bytes_per_s, trio.current_time())
        self.verifier_failures = 0

    def wake(self) -> None:
        """Say that there may be something to fetch, or need of it."""
        self._wake.set()

    async def run(self) -> None:
        """Fetch what is short until cancelled."""
        async with trio.open_nursery() as nursery:
            slots = trio.CapacityLimiter(self._rules.fetch_parallel)
            while True:
                with trio.move_on_after(FETCH_RETRY_S):
                    await self._wake.wait()
                self._wake = trio.Event()
                for producer, batch in (await self._choose()).items():
                    self._in_flight[producer] = len(batch)
                    nursery.start_soon(self._fetch_in_slot, producer, batch, slots)

    async def _choose(self) -> dict[PeerId, list[Offer]]:
        """One batch of offers to fetch now from each of some producers that have none under way.
        What the pool has ever held is taken off the table instead."""
        missing = await self._missing()
        trials_left = max(1, self._rules.fetch_parallel // 2) - len(self._unproven())
        chosen = self._offers.choose(
            missing,
            self._rng,
            trio.current_time(),
            self._in_flight,
            proven_only=trials_left <= 0,
        )
        seen: set[GroupId] = await self._run_sync(
            self._pool.ids_seen, [offer.group_id for offer in chosen]
        )
        batches: dict[PeerId, list[Offer]] = {}
        for offer in chosen:
            if offer.group_id in seen:
                self._offers.drop(offer.group_id, offer.producer)
                self._wake.set()
                continue
            if offer.producer not in batches and not self._offers.is_proven(offer.producer):
                if trials_left <= 0:
                    continue
                trials_left -= 1
            batch = batches.setdefault(offer.producer, [])
            if len(batch) < WANT_GROUPS_MAX:
                batch.append(offer)
        return batches

    def _unproven(self) -> list[PeerId]:
        return [peer for peer in self._in_flight if not self._offers.is_proven(peer)]

    async def _missing(self) -> int:
        """How many groups short of the wanted stock we are, counting those under way; of those
        that unproven producers may never deliver, no more than half the stock."""
        stock = sum(informative(c.rewards) for c in await self._candidates())
        unproven = sum(self._in_flight[peer] for peer in self._unproven())
        proven = sum(self._in_flight.values()) - unproven
        wanted = self._rules.stock_groups
        coming = proven + min(unproven, WANT_GROUPS_MAX, wanted // 2)
        return max(0, wanted - stock - coming)

    async def _fetch_in_slot(
        self, producer: PeerId, batch: list[Offer], slots: trio.CapacityLimiter
    ) -> None:
        try:
            async with slots:
                size_bytes = sum(offer.size_bytes for offer in batch)
                await trio.sleep(self._budget.spend(size_bytes, trio.current_time()))
                await self._fetch(producer, batch)
        except ChildFailed:  # our own failure: the offers stay on the table as they were
            self.verifier_failures += 1
            await trio.sleep(VERIFIER_RETRY_S)
        finally:
            del self._in_flight[producer]
        self._wake.set()

    async def _fetch(self, producer: PeerId, batch: list[Offer]) -> None:
        """Get one producer's groups from it or, failing that, from who forwarded the advert."""
        wanted = {offer.group_id: offer for offer in batch}
        forwarders = [p for p in dict.fromkeys(o.heard_from for o in batch) if p != producer]
        answers: list[_Answer] = []
        for peer in (producer, *forwarders[:FORWARDERS_MAX]):
            if wanted:
                answers.append(await self._ask(peer, wanted))
        if _Answer.REFUSED not in answers:
            for offer in wanted.values():
                self._offers.failed(offer)
        self._conclude(producer, answers)

    def _conclude(self, producer: PeerId, answers: list[_Answer]) -> None:
        """Settle the producer's standing by what a fetch of its groups came to."""
        if _Answer.GOOD in answers:
            self._offers.delivered(producer)
            return
        silent = answers[0] is _Answer.SILENT and bool(self._transport.peers())  # else it is us
        if silent:
            self._ledger.reject(producer, Reject.UNAVAILABLE)
        at_fault = silent or answers[0] is _Answer.BROKEN
        rest_s = FAILED_REST_S if at_fault else REFUSED_REST_S
        self._offers.rest(producer, rest_s, trio.current_time())

    async def _reach(self, peer: PeerId) -> bool:
        if peer in self._transport.peers():
            return True
        for address in self._offers.addresses(peer)[:DIAL_ADDRESSES_MAX]:
            try:
                await self._transport.connect(address, timeout_s=self._rules.dial_timeout_s)
            except (TransportError, ConfigError):
                continue
            return True
        return False

    async def _ask(self, peer: PeerId, wanted: dict[GroupId, Offer]) -> _Answer:
        """Ask a peer for the wanted groups and take in what it gives; those leave `wanted`."""
        if not await self._reach(peer):
            return _Answer.SILENT
        want = Want(type="want", run_id=self._rules.run_id, group_ids=tuple(wanted))
        try:
            answer = await self._transport.request(
                peer,
                ROLLOUTS_PROTOCOL,
                codec.encode(want),
                timeout_s=self._rules.fetch_timeout_s,
                response_bytes_max=GROUPS_REPLY_BYTES_MAX,
            )
            reply = codec.decode(answer, GroupsReply, GROUPS_REPLY_BYTES_MAX)
        except RemoteProtocolError as error:
            self._ledger.reject(peer, error.reason)
            return _Answer.BROKEN
        except RequestRefused:
            return _Answer.REFUSED
        except TransportError:
            return _Answer.SILENT
        return await self._take_all_in(peer, reply, wanted)

    async def _take_all_in(
        self, peer: PeerId, reply: GroupsReply, wanted: dict[GroupId, Offer]
    ) -> _Answer:
        good = 0
        for record in reply.records:
            try:
                await self._take_in(peer, record, wanted)
            except RemoteProtocolError:
                continue  # counted where it was found
            good += 1
        if good:
            return _Answer.GOOD
        return _Answer.BROKEN if reply.records else _Answer.NOTHING

    async def _take_in(self, peer: PeerId, record: bytes, wanted: dict[GroupId, Offer]) -> None:
        """Check one fetched record completely and pool it.

        Raises:
            RemoteProtocolError: it broke a rule; counted.
            ChildFailed: it could not be verified, through our own fault.
        """
        group_id, group = self._ledger.judge(peer, codec.decode_group, record)
        offer = wanted.get(group_id)
        if offer is None:
            self._ledger.reject(peer, Reject.NOT_REQUESTED)
            raise RemoteProtocolError(Reject.NOT_REQUESTED, "nobody asked for it")
        try:
            prompt, rewards = await self._judge_group(group, offer)
        except RemoteProtocolError:
            self._settle(offer, wanted)
            raise
        self._settle(offer, wanted)
        verified = VerifiedGroup(group_id, group, prompt, rewards)
        result: AddResult = await self._run_sync(
            lambda: self._pool.add(record, verified, own=False, now_s=self._now_s())
        )
        if result is AddResult.ADDED:
            self._ledger.accept(group.producer)
        elif result in POOL_REJECTS:
            self._ledger.reject(group.producer, POOL_REJECTS[result])

    def _settle(self, offer: Offer, wanted: dict[GroupId, Offer]) -> None:
        del wanted[offer.group_id]
        self._offers.drop(offer.group_id, offer.producer)

    async def _judge_group(
        self, group: RolloutGroup, offer: Offer
    ) -> tuple[str, tuple[float, ...]]:
        """Prompt and rewards. What is wrong is counted against the peer that advertised the group,
        which need not be the one who made it; a group that aged on its way is nobody's fault."""
        try:
            self._check_group(group, offer)
            return await self._verify(group)
        except RemoteProtocolError as error:
            if error.reason is not Reject.EXPIRED or self._now_s() < offer.expires_at_s:
                self._ledger.reject(offer.producer, error.reason)
            raise

    def _check_group(self, group: RolloutGroup, offer: Offer) -> None:
        if group.producer != offer.producer:
            raise RemoteProtocolError(Reject.WRONG_PRODUCER, "advertised by another peer")
        if group.run_id != self._rules.run_id:
            raise RemoteProtocolError(Reject.WRONG_RUN, group.run_id)
        if group.round != offer.round:
            raise RemoteProtocolError(Reject.MALFORMED, "round differs from its advert")
        if len(group.completions) > self._rules.group_size_max:
            raise RemoteProtocolError(Reject.OVERSIZE, "more completions than the run allows")
        codec.check_times(
            group.created_at_s,
            group.expires_at_s,
            self._now_s(),
            self._rules.record_life_s,
            self._rules.clock_skew_s,
        )
