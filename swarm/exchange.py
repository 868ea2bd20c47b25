"""The exchange of rollout groups: advert, choose, fetch, verify, pool.

A producer signs its groups and gossips one small advert a round. Every node keeps a table of
what is on offer and fetches, at random and only as much as it will soon use, from the producer or
from whoever forwarded the advert. A fetched group enters the pool only after its signature, run,
times and task were checked and its rewards were computed here.

Nothing in here waits for anybody: a round samples what has arrived (`candidates`), and a peer
that lies, stalls or vanishes costs a count.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import trio

from swarm import codec
from swarm.budget import ByteBudget
from swarm.errors import (
    ConfigError,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
)
from swarm.identity import Identity, PeerId
from swarm.ledger import Ledger
from swarm.messages import (
    ADDRESSES_MAX,
    ADVERT_GROUPS_MAX,
    ADVERTS_PER_REPLY_MAX,
    ADVERTS_PROTOCOL,
    ADVERTS_REPLY_BYTES_MAX,
    GROUPS_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    WANT_GROUPS_MAX,
    AdvertBody,
    AdvertEntry,
    AdvertsReply,
    GroupsReply,
    RecentAdverts,
    Want,
    adverts_topic,
)
from swarm.offers import Offer, OfferLimits, OfferTable
from swarm.pool import AddResult, Candidate, Pool
from swarm.rollouts import GroupId, RolloutGroup, VerifiedGroup
from swarm.transport.base import ServeLimits, Transport

Verify = Callable[[RolloutGroup], Awaitable[tuple[str, tuple[float, ...]]]]
"""Regenerates the task and scores the completions: group -> (prompt, rewards).

Raises `RemoteProtocolError` if the task is not the producer's or cannot be verified.
"""

RunSync = Callable[..., Awaitable[Any]]
"""Runs a blocking call off the event loop: `trio.to_thread.run_sync`, or inline in simulation."""

Rewards = tuple[float, ...]
T = TypeVar("T")

POOL_REJECTS = {
    AddResult.DUPLICATE_TASK: Reject.DUPLICATE_TASK,
    AddResult.QUOTA: Reject.QUOTA,
}
REPLY_OVERHEAD_BYTES = 1_024
OFFER_LIMITS = OfferLimits()
FETCH_RETRY_S = 2.0
DIAL_ADDRESSES_MAX = 2  # of a producer that we are not connected to, for each fetch
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
    fetch_timeout_s: float = 20.0
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


class Exchange:
    """One node's side of the exchange. `run` serves and fetches until cancelled."""

    def __init__(
        self,
        rules: ExchangeRules,
        identity: Identity,
        transport: Transport,
        pool: Pool,
        verify: Verify,
        *,
        now_s: Callable[[], float],
        rng: Random,
        run_sync: RunSync,
    ) -> None:
        self._rules = rules
        self._identity = identity
        self._transport = transport
        self._pool = pool
        self._verify = verify
        self._now_s = now_s
        self._rng = rng
        self._run_sync = run_sync
        self._offers = OfferTable(rules.offers)
        self._recent: OrderedDict[bytes, tuple[bytes, AdvertBody]] = OrderedDict()
        self._in_flight: set[GroupId] = set()
        self._wake = trio.Event()
        self._fetch_budget = ByteBudget(rules.fetch_bytes_per_s, trio.current_time())
        self._serve_budget = ByteBudget(rules.serve_bytes_per_s, trio.current_time())
        self.ledger = Ledger()

    # --- what the round asks for -----------------------------------------------------------

    async def share(
        self, groups: Sequence[RolloutGroup], prompts: Sequence[str], rewards: Sequence[Rewards]
    ) -> list[VerifiedGroup]:
        """Sign, keep and advertise own groups. Returns when the adverts are handed to gossip.

        The rewards stay here: they are never sent. A group for a task that this node has shared
        before, in a round that a crash undid, is not shared a second time.
        """
        shared: list[VerifiedGroup] = []
        entries: list[AdvertEntry] = []
        for group, prompt, group_rewards in zip(groups, prompts, rewards, strict=True):
            group_id, record = codec.sign_group(group, self._identity)
            verified = VerifiedGroup(group_id, group, prompt, tuple(group_rewards))
            result = await self._run_sync(self._add, record, verified, True)
            if result is AddResult.ADDED:
                shared.append(verified)
                entries.append(AdvertEntry(group_id=group_id, size_bytes=len(record)))
        for start in range(0, len(entries), ADVERT_GROUPS_MAX):
            await self._advertise(groups[start], entries[start : start + ADVERT_GROUPS_MAX])
        return shared

    async def _advertise(self, example: RolloutGroup, entries: Sequence[AdvertEntry]) -> None:
        body = AdvertBody(
            type="advert",
            run_id=example.run_id,
            producer=self._identity.peer_id,
            round=example.round,
            addresses=self._transport.addresses()[:ADDRESSES_MAX],
            groups=tuple(entries),
            created_at_s=example.created_at_s,
            expires_at_s=example.expires_at_s,
        )
        record = codec.sign_advert(body, self._identity)
        self._remember(codec.decode_advert(record)[0], record, body)
        await self._transport.publish(adverts_topic(self._rules.run_id), record)

    async def candidates(self) -> list[Candidate]:
        """Foreign groups that may be drawn now: verified, untrained, and of recent rounds."""
        eligible: list[Candidate] = await self._run_sync(self._eligible)
        oldest = self._rules.offers.rounds_max
        return [c for c in eligible if c.round > self._offers.newest_round(c.producer) - oldest]

    async def take(self, group_ids: Sequence[GroupId], round_: int) -> list[VerifiedGroup]:
        """Hand groups out for training. They are marked first, and durably: a crash between here
        and the checkpoint loses them, and no group is ever trained on twice."""
        groups: list[VerifiedGroup] = await self._run_sync(self._take, group_ids, round_)
        for verified in groups:
            self.ledger.of(verified.group.producer).trained += 1
        self._wake.set()
        return groups

    def _add(self, record: bytes, verified: VerifiedGroup, own: bool) -> AddResult:
        return self._pool.add(record, verified, own=own, now_s=self._now_s())

    def _eligible(self) -> list[Candidate]:
        return self._pool.eligible(own=False, now_s=self._now_s())

    def _take(self, group_ids: Sequence[GroupId], round_: int) -> list[VerifiedGroup]:
        self._pool.mark_trained(group_ids, round_)
        return self._pool.groups(group_ids)

    # --- serving ---------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve, listen and fetch until cancelled."""
        self._transport.serve(
            ROLLOUTS_PROTOCOL,
            self._serve_groups,
            ServeLimits(WANT_BYTES_MAX, GROUPS_REPLY_BYTES_MAX, concurrent_max=16),
        )
        self._transport.serve(
            ADVERTS_PROTOCOL,
            self._serve_adverts,
            ServeLimits(WANT_BYTES_MAX, ADVERTS_REPLY_BYTES_MAX, concurrent_max=8),
        )
        topic = adverts_topic(self._rules.run_id)
        heard = await self._transport.subscribe(topic, self._hear_gossip)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain, heard)
            nursery.start_soon(self._expire_forever)
            if self._rules.stock_groups > 0:
                nursery.start_soon(self._catch_up_forever)
                nursery.start_soon(self._fetch_forever)
            task_status.started()

    async def _serve_groups(self, peer: PeerId, payload: bytes) -> bytes:
        want = self._judge(peer, codec.decode, payload, Want, WANT_BYTES_MAX)
        self._check_run(peer, want.run_id)
        if self._serve_budget.is_spent(trio.current_time()):
            raise RequestRefused("the serving budget is spent")
        records: list[bytes] = await self._run_sync(self._records, want.group_ids)
        self._serve_budget.spend(sum(map(len, records)), trio.current_time())
        return codec.encode(GroupsReply(type="groups", records=tuple(records)))

    def _records(self, group_ids: Sequence[bytes]) -> list[bytes]:
        records: list[bytes] = []
        room = GROUPS_REPLY_BYTES_MAX - REPLY_OVERHEAD_BYTES
        for group_id in group_ids:
            record = self._pool.record(GroupId(group_id), now_s=self._now_s())
            if record is not None and len(record) <= room:
                records.append(record)
                room -= len(record) + 8
        return records

    async def _serve_adverts(self, peer: PeerId, payload: bytes) -> bytes:
        asked = self._judge(peer, codec.decode, payload, RecentAdverts, WANT_BYTES_MAX)
        self._check_run(peer, asked.run_id)
        newest = [record for record, _ in reversed(self._recent.values())]
        return codec.encode(
            AdvertsReply(type="adverts", records=tuple(newest[:ADVERTS_PER_REPLY_MAX]))
        )

    def _check_run(self, peer: PeerId, run_id: str) -> None:
        if run_id != self._rules.run_id:
            self.ledger.reject(peer, Reject.WRONG_RUN)
            raise RemoteProtocolError(Reject.WRONG_RUN, run_id)

    def _judge(self, peer: PeerId, judge: Callable[..., T], *args: Any) -> T:
        """Run a check of foreign bytes; what it finds wrong is counted against `peer`."""
        try:
            return judge(*args)
        except RemoteProtocolError as error:
            self.ledger.reject(peer, error.reason)
            raise

    # --- hearing adverts -------------------------------------------------------------------

    def _hear_gossip(self, peer: PeerId, payload: bytes) -> bool:
        try:
            return self._hear(peer, payload)
        except RemoteProtocolError:
            return False

    def _hear(self, peer: PeerId, record: bytes) -> bool:
        """Take in one signed advert; whether it was new. Faults are counted against its maker
        where the signature shows one, else against the peer that handed it over."""
        advert_id, advert = self._judge(peer, codec.decode_advert, record)
        if advert_id in self._recent or advert.producer == self._identity.peer_id:
            return False
        self._judge(PeerId(advert.producer), self._check_advert, advert)
        new = self._offers.hear(advert, peer)
        self._remember(advert_id, record, advert)
        if new:
            self._wake.set()
        return True

    def _check_advert(self, advert: AdvertBody) -> None:
        if advert.run_id != self._rules.run_id:
            raise RemoteProtocolError(Reject.WRONG_RUN, advert.run_id)
        self._check_times(advert.created_at_s, advert.expires_at_s)

    def _check_times(self, created_at_s: int, expires_at_s: int) -> None:
        codec.check_times(
            created_at_s,
            expires_at_s,
            self._now_s(),
            self._rules.record_life_s,
            self._rules.clock_skew_s,
        )

    def _remember(self, advert_id: bytes, record: bytes, advert: AdvertBody) -> None:
        self._recent[advert_id] = (record, advert)
        of_producer = [i for i, (_, a) in self._recent.items() if a.producer == advert.producer]
        for old in of_producer[: -self._rules.recent_adverts_per_producer_max]:
            del self._recent[old]
        while len(self._recent) > self._rules.recent_adverts_max:
            self._recent.popitem(last=False)

    async def _drain(self, heard: trio.MemoryReceiveChannel[Any]) -> None:
        async for _ in heard:  # the validator has taken each advert in already
            pass

    async def _catch_up_forever(self) -> None:
        """Ask a new peer at once, and now and then any peer, for adverts that gossip lost."""
        asked: set[PeerId] = set()
        next_any_s = trio.current_time()
        while True:
            peers = self._transport.peers()
            asked &= set(peers)
            fresh = [peer for peer in peers if peer not in asked]
            if not fresh and peers and trio.current_time() >= next_any_s:
                fresh = [self._rng.choice(peers)]
            for peer in fresh[:4]:
                asked.add(peer)
                next_any_s = trio.current_time() + self._rules.catch_up_interval_s
                await self._catch_up(peer)
            await trio.sleep(1.0)

    async def _catch_up(self, peer: PeerId) -> None:
        ask = codec.encode(RecentAdverts(type="recent_adverts", run_id=self._rules.run_id))
        try:
            answer = await self._transport.request(
                peer,
                ADVERTS_PROTOCOL,
                ask,
                timeout_s=self._rules.fetch_timeout_s,
                response_bytes_max=ADVERTS_REPLY_BYTES_MAX,
            )
            reply = self._judge(peer, codec.decode, answer, AdvertsReply, ADVERTS_REPLY_BYTES_MAX)
        except (TransportError, RemoteProtocolError):
            return
        for record in reversed(reply.records):  # oldest first, so that the newest round wins
            self._hear_gossip(peer, record)

    async def _expire_forever(self) -> None:
        while True:
            await trio.sleep(self._rules.expire_interval_s)
            now_s = self._now_s()
            self._offers.expire(now_s)
            for advert_id in [i for i, (_, a) in self._recent.items() if a.expires_at_s <= now_s]:
                del self._recent[advert_id]
            await self._run_sync(self._pool.expire, now_s)

    # --- fetching --------------------------------------------------------------------------

    async def _fetch_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            slots = trio.CapacityLimiter(self._rules.fetch_parallel)
            while True:
                await self._sleep_until_woken()
                by_producer: dict[PeerId, list[Offer]] = {}
                for offer in await self._choose():
                    by_producer.setdefault(offer.producer, []).append(offer)
                for offers in by_producer.values():
                    for start in range(0, len(offers), WANT_GROUPS_MAX):
                        batch = offers[start : start + WANT_GROUPS_MAX]
                        self._in_flight.update(offer.group_id for offer in batch)
                        nursery.start_soon(self._fetch_in_slot, batch, slots)

    async def _sleep_until_woken(self) -> None:
        with trio.move_on_after(FETCH_RETRY_S):
            await self._wake.wait()
        self._wake = trio.Event()

    async def _choose(self) -> list[Offer]:
        """Offers to fetch now. What the pool has ever held is taken off the table instead."""
        chosen = self._offers.choose(await self._missing(), self._rng, self._in_flight)
        ids = [offer.group_id for offer in chosen]
        seen: set[GroupId] = await self._run_sync(self._pool.ids_seen, ids)
        for offer in chosen:
            if offer.group_id in seen:
                self._offers.drop(offer.group_id, offer.producer)
        if seen:
            self._wake.set()
        return [offer for offer in chosen if offer.group_id not in seen]

    async def _missing(self) -> int:
        """How many groups short of the wanted stock we are, counting those under way."""
        stock = sum(informative(c.rewards) for c in await self.candidates())
        return max(0, self._rules.stock_groups - stock - len(self._in_flight))

    async def _fetch_in_slot(self, offers: list[Offer], slots: trio.CapacityLimiter) -> None:
        try:
            async with slots:
                size_bytes = sum(offer.size_bytes for offer in offers)
                await trio.sleep(self._fetch_budget.spend(size_bytes, trio.current_time()))
                await self._fetch(offers)
        finally:
            self._in_flight.difference_update(offer.group_id for offer in offers)
        self._wake.set()

    async def _fetch(self, offers: list[Offer]) -> None:
        """Get one producer's groups from it or, failing that, from who forwarded the advert."""
        wanted = {offer.group_id: offer for offer in offers}
        for peer in dict.fromkeys([offers[0].producer, *(o.heard_from for o in offers)]):
            if not wanted:
                return
            if await self._reach(peer):
                await self._fetch_from(peer, wanted)
        for offer in wanted.values():
            self._offers.failed(offer)

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

    async def _fetch_from(self, peer: PeerId, wanted: dict[GroupId, Offer]) -> None:
        want = Want(type="want", run_id=self._rules.run_id, group_ids=tuple(wanted))
        try:
            answer = await self._transport.request(
                peer,
                ROLLOUTS_PROTOCOL,
                codec.encode(want),
                timeout_s=self._rules.fetch_timeout_s,
                response_bytes_max=GROUPS_REPLY_BYTES_MAX,
            )
            reply = self._judge(peer, codec.decode, answer, GroupsReply, GROUPS_REPLY_BYTES_MAX)
        except RemoteProtocolError as error:
            if error.reason is Reject.OVERSIZE:
                self.ledger.reject(peer, error.reason)
            return
        except TransportError:
            return
        for record in reply.records:
            try:
                await self._take_in(peer, record, wanted)
            except RemoteProtocolError:
                continue  # counted where it was found

    async def _take_in(self, peer: PeerId, record: bytes, wanted: dict[GroupId, Offer]) -> None:
        """Check one fetched record completely and pool it."""
        group_id, group = self._judge(peer, codec.decode_group, record)
        offer = wanted.pop(group_id, None)
        if offer is None:
            self.ledger.reject(peer, Reject.NOT_REQUESTED)
            return
        self._offers.drop(group_id, offer.producer)
        self._judge(group.producer, self._check_group, group, offer)
        try:
            prompt, rewards = await self._verify(group)
        except RemoteProtocolError as error:
            self.ledger.reject(group.producer, error.reason)
            return
        verified = VerifiedGroup(group_id, group, prompt, rewards)
        result = await self._run_sync(self._add, record, verified, False)
        if result is AddResult.ADDED:
            self.ledger.accept(group.producer)
        elif result in POOL_REJECTS:
            self.ledger.reject(group.producer, POOL_REJECTS[result])

    def _check_group(self, group: RolloutGroup, offer: Offer) -> None:
        if group.run_id != self._rules.run_id:
            raise RemoteProtocolError(Reject.WRONG_RUN, group.run_id)
        if group.producer != offer.producer:
            raise RemoteProtocolError(Reject.WRONG_PRODUCER, "advertised by another peer")
        if group.round != offer.round:
            raise RemoteProtocolError(Reject.MALFORMED, "round differs from its advert")
        if len(group.completions) > self._rules.group_size_max:
            raise RemoteProtocolError(Reject.OVERSIZE, "more completions than the run allows")
        self._check_times(group.created_at_s, group.expires_at_s)
