"""Fetches groups on offer: chooses, requests, verifies and pools them. Late batches free their
place for others, and their number is bounded, in all and for each peer or address block.
Producers that are slow or new get some of the places, not all."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import trio

from swarm.errors import (
    ChildFailed,
    DialHeldBack,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    RequestTimeout,
    TransportError,
)
from swarm.exchange.holder_search import Found, HolderSearch
from swarm.exchange.offers import Offer, OfferLimits, OfferTable
from swarm.exchange.pool import AddResult, Candidate, Pool
from swarm.identity import PeerId
from swarm.limits.quotas import RELAYED, ByteBudget
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.requests import ask
from swarm.rollouts import GroupId, RolloutGroup, ScoredGroup, informative
from swarm.storage import Runtime
from swarm.transport.base import Transport
from swarm.wire import codec
from swarm.wire.messages import (
    GROUP_BYTES_MAX,
    GROUPS_REPLY_BYTES_MAX,
    PIECE_BYTES,
    PIECE_REPLY_BYTES_MAX,
    PIECES_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    WANT_GROUPS_MAX,
    GroupsReply,
    PieceReply,
    Want,
    WantPiece,
)

BATCHES_FACTOR = 4  # times `fetch_parallel`: batches under way, late ones included, at most
LATE_FACTOR = 3  # times `fetch_parallel`: late batches, at most
LATE_OF_ONE_FACTOR = 1  # times `fetch_parallel`: late batches of one peer or one block, at most
LATE_OF_RELAYED_SHARE = 0.5  # of all late batches, those of relayed peers, at most


def to_give_up(waiting_for: Sequence[str], parallel: int) -> int | None:
    """The index of the late batch to give up, or None. `waiting_for`: the peer, block or
    `RELAYED` that each batch waits for, oldest first."""
    most = LATE_FACTOR * parallel
    crowds = Counter(waiting_for)

    def is_over(whose: str) -> bool:
        part = LATE_OF_RELAYED_SHARE * most
        return crowds[whose] > (part if whose == RELAYED else LATE_OF_ONE_FACTOR * parallel)

    over = [whose for whose in crowds if is_over(whose)]
    if not over and len(waiting_for) <= most:
        return None
    return waiting_for.index(max(over or crowds, key=lambda whose: crowds[whose]))


@dataclass(slots=True)
class Trials:
    """The numbers of doubtful producers that may be tried now."""

    unproven: int  # of those that have delivered nothing yet, or not since they last failed
    slow: int  # of those that delivered late
    doubtful: int  # of both together

    @classmethod
    def left(cls, parallel: int, unproven: Sequence[bool], slow: Sequence[bool]) -> "Trials":
        """The numbers left beside the batches under way, one flag each, True if late. One place
        stays free of doubtful producers; each kind gets half of the places."""
        half = max(1, parallel // 2)
        unproven_in_place, slow_in_place = unproven.count(False), slow.count(False)
        return cls(
            unproven=min(half - unproven_in_place, BATCHES_FACTOR * parallel // 2 - len(unproven)),
            slow=half - slow_in_place,
            doubtful=max(1, parallel - 1) - unproven_in_place - slow_in_place,
        )

    def take(self, is_proven: bool, is_slow: bool) -> bool:
        """Count this producer. False: it may not be tried now."""
        if is_proven and not is_slow:
            return True
        if self.doubtful <= 0 or (self.slow if is_proven else self.unproven) <= 0:
            return False
        self.doubtful -= 1
        if is_proven:
            self.slow -= 1
        else:
            self.unproven -= 1
        return True


Verify = Callable[[RolloutGroup], Awaitable[tuple[str, tuple[float, ...]]]]
"""Group -> (prompt, rewards). `RemoteProtocolError`: a bad group; `ChildFailed`: our own fault."""

POOL_REJECTS = {
    AddResult.DUPLICATE_TASK: Reject.DUPLICATE_TASK,
    AddResult.QUOTA: Reject.QUOTA,
}
OFFER_LIMITS = OfferLimits()
RECENT_ADVERTS_MAX = 512  # kept for peers that ask
ADVERTS_PER_PRODUCER_MAX = 4  # of them
FETCH_RETRY_S = 2.0
FAILED_REST_S = 30.0  # at first, for a producer that did not answer or answered against the rules
BROKEN_HOLDER_REST_S = 600.0
PIECE_RETRY_S = 0.5  # after a refusal between pieces: the budget of the peer refills
REFUSED_REST_S = 2.0  # at first, for one that refused or had nothing
VERIFIER_RETRY_S = 5.0
POOL_AFTER_S = 0.5  # a group waits no longer than that, and the next one, for others of its answer
DIAL_ADDRESSES_MAX = 2  # of a producer that we are not connected to, for each fetch
BATCH_BYTES_MAX = 524_288  # of one request, unless a single group is larger
HOLDERS_TRIED_MAX = 3  # for one batch, after the producer
REQUESTS_PER_PEER_MAX = 4  # open at a time; PROTOCOL.md
EXPECTED_S, EXPECTED_BYTES_PER_S = 2.0, 262_144.0  # in which an ordinary peer answers
TAKEN_IN_AT_ONCE = 8  # groups of one answer, of a producer whose groups were good so far


@dataclass(frozen=True, slots=True)
class ExchangeRules:
    run_id: str
    stock_groups: int  # informative foreign groups to keep ready; 0 fetches nothing
    record_life_s: int
    clock_skew_s: int
    group_size_max: int
    group_bytes_max: int = GROUP_BYTES_MAX  # of a signed record; over the default: large groups
    fetch_parallel: int = 4
    fetch_timeout_s: float = 8.0  # for an answer without content; with it, see `timeout_s`
    fetch_bytes_per_s_min: float = 32 * 1024  # of a peer whose uplink many share
    fetch_bytes_per_s: float = 4 * 1024 * 1024
    serve_bytes_per_s: float = 8 * 1024 * 1024
    dial_timeout_s: float = 5.0
    catch_up_interval_s: float = 15.0
    offers: OfferLimits = OFFER_LIMITS
    serves: bool = True  # others may ask here for groups and adverts

    @property
    def takes_large(self) -> bool:
        return self.group_bytes_max > GROUP_BYTES_MAX

    @property
    def record_bytes_max(self) -> int:
        return max(GROUP_BYTES_MAX, self.group_bytes_max)

    def timeout_s(self, size_bytes: int) -> float:
        return self.fetch_timeout_s + size_bytes / self.fetch_bytes_per_s_min


_Checked = tuple[bytes, ScoredGroup]  # a signed record and what this node found in it


class _Answer(Enum):
    GOOD = auto()  # at least one group passed every check
    NOTHING = auto()  # none of the wanted groups: no fault
    REFUSED = auto()
    SILENT = auto()
    CUT_OFF = auto()  # as silent as everybody else meanwhile: our own link may be at fault
    BROKEN = auto()  # against the rules, and counted


@dataclass(eq=False, slots=True)
class _Batch:
    producer: PeerId
    offers: list[Offer]
    wanted: dict[GroupId, Offer] = field(init=False)  # those that nobody has delivered
    answers: dict[PeerId, _Answer] = field(default_factory=dict)
    late: bool = False  # it no longer holds a place
    given_up: bool = False  # too many others were late as well
    asked: PeerId = field(init=False)  # the last one
    requests: set[trio.CancelScope] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.asked = self.producer
        self.wanted = {offer.group_id: offer for offer in self.offers}

    def size_bytes(self, group_ids: Collection[GroupId] | None = None) -> int:
        """Bytes of the groups that are still wanted, or of those among `group_ids`."""
        wanted = self.wanted.values()
        return sum(o.size_bytes for o in wanted if group_ids is None or o.group_id in group_ids)

    def claim(self, group_id: GroupId) -> Offer | None:
        """Take a delivered group; None if it was delivered before. The last one ends all
        requests."""
        offer = self.wanted.pop(group_id, None)
        if not self.wanted:
            self.end_requests()
        return offer

    def end_requests(self) -> None:
        """Stop waiting. Records that have arrived are still taken in."""
        for scope in self.requests:
            scope.cancel()


def _late(batches: Sequence[_Batch]) -> list[bool]:
    return [batch.late for batch in batches]


# Long: who is asked, who failed and what is due share one table.
class Fetcher:
    """Keeps the stock of foreign groups filled. `run` fetches until cancelled."""

    def __init__(
        self,
        rules: ExchangeRules,
        transport: Transport,
        pool: Pool,
        verify: Verify,
        gater: ConnectionGater,
        candidates: Callable[[], Awaitable[list[Candidate]]],
        runtime: Runtime,
    ) -> None:
        self._rules = rules
        self._transport = transport
        self._pool = pool
        self._verify = verify
        self.offers = OfferTable(rules.offers)
        self._gater = gater
        self._ledger = gater.ledger
        self._candidates = candidates
        self._now_s = runtime.now_s
        self._rng = runtime.rng
        self._run_sync = runtime.run_sync
        self._in_flight: dict[PeerId, _Batch] = {}  # one for each producer
        self._stock = 0  # when it was looked at last
        self._open: Counter[PeerId] = Counter()  # requests
        self._holders = HolderSearch(rules.run_id, transport, gater.ledger, runtime.rng)
        self._wake = trio.Event()
        self._budget = ByteBudget(rules.fetch_bytes_per_s, trio.current_time())
        self.verifier_failures = 0

    def wake(self) -> None:
        """Look for groups to fetch now."""
        self._wake.set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            places = trio.Semaphore(self._rules.fetch_parallel)
            while True:
                with trio.move_on_after(FETCH_RETRY_S):
                    await self._wake.wait()
                self._wake = trio.Event()
                for batch in await self._choose():
                    self._in_flight[batch.producer] = batch
                    nursery.start_soon(self._fetch_in_place, batch, places)

    async def _choose(self) -> list[_Batch]:
        """One batch from each chosen producer that has none under way."""
        room = BATCHES_FACTOR * self._rules.fetch_parallel - len(self._in_flight)
        missing = await self._missing()
        slow = _late(self._slow())
        trials = Trials.left(self._rules.fetch_parallel, _late(self._unproven()), slow)
        chosen = self.offers.choose(
            missing,
            self._rng,
            trio.current_time(),
            self._in_flight,
            proven_only=min(trials.unproven, trials.doubtful) <= 0,
            slow_last=not all(slow),
        )
        seen: set[GroupId] = await self._run_sync(
            self._pool.ids_seen, [offer.group_id for offer in chosen]
        )
        batches: dict[PeerId, list[Offer]] = {}
        for offer in chosen:
            if self._gater.is_banned(offer.producer):
                self.offers.forget(offer.producer)
                self._wake.set()
                continue
            if offer.group_id in seen:
                self.offers.drop(offer.group_id, offer.producer)
                self._wake.set()
                continue
            known = self.offers.of(offer.producer)
            if offer.producer not in batches and not trials.take(known.proven, known.slow):
                continue
            batch = batches.setdefault(offer.producer, [])
            size_bytes = sum(each.size_bytes for each in batch) + offer.size_bytes
            if not batch or (len(batch) < WANT_GROUPS_MAX and size_bytes <= BATCH_BYTES_MAX):
                batch.append(offer)
        return [_Batch(*batch) for batch in batches.items()][: max(0, room)]

    def _unproven(self) -> list[_Batch]:
        return [b for b in self._in_flight.values() if not self.offers.of(b.producer).proven]

    def _slow(self) -> list[_Batch]:
        known = [(batch, self.offers.of(batch.producer)) for batch in self._in_flight.values()]
        return [batch for batch, producer in known if producer.slow and producer.proven]

    def _bound_late(self) -> None:
        late = [b for b in self._in_flight.values() if b.late and not b.given_up]
        whose = [self._gater.share_of(batch.asked) for batch in late]
        at = to_give_up(whose, self._rules.fetch_parallel)
        if at is not None:
            late[at].given_up = True
            late[at].end_requests()

    def is_short_of_offers(self) -> bool:
        return self.offers.available(trio.current_time()) < self._rules.stock_groups

    def catching_up(self) -> tuple[int, int] | None:
        """Groups in stock and groups wanted; None: nothing is being fetched, or enough is there."""
        wanted = self._rules.stock_groups
        if not self._in_flight or self._stock >= wanted:
            return None
        return self._stock, wanted

    async def _missing(self) -> int:
        """Groups missing from the wanted stock. Late ones do not count as coming; those of
        unproven producers count for half the stock at most."""
        rewards = Counter(c.rewards for c in await self._candidates())
        stock = self._stock = sum(n for each, n in rewards.items() if informative(each))
        unproven = sum(len(batch.offers) for batch in self._unproven() if not batch.late)
        under_way = sum(len(b.offers) for b in self._in_flight.values() if not b.late)
        wanted = self._rules.stock_groups
        coming = under_way - unproven + min(unproven, WANT_GROUPS_MAX, wanted // 2)
        return max(0, wanted - stock - coming)

    async def _fetch_in_place(self, batch: _Batch, places: trio.Semaphore) -> None:
        await places.acquire()

        def give_up_place() -> None:
            if not batch.late:
                batch.late = True
                places.release()
                self._bound_late()
                self._wake.set()

        try:
            await trio.sleep(self._budget.spend(batch.size_bytes(), trio.current_time()))
            await self._fetch(batch, give_up_place)
        except* ChildFailed:  # our own failure: the offers stay on the table as they were
            self.verifier_failures += 1
            await trio.sleep(VERIFIER_RETRY_S)
        finally:
            give_up_place()
            del self._in_flight[batch.producer]
        self._wake.set()

    async def _fetch(self, batch: _Batch, on_late: Callable[[], None]) -> None:
        producer = batch.producer
        async with trio.open_nursery() as nursery:
            if trio.current_time() >= self.offers.of(producer).rests_until:
                await self._ask_for_a_while(nursery, batch, producer, batch.wanted)
            if batch.wanted:
                on_late()
            if batch.wanted and not batch.given_up:
                await self._ask_holders(nursery, batch)
        others = [answer for peer, answer in batch.answers.items() if peer != producer]
        excused = {_Answer.REFUSED, _Answer.CUT_OFF} & set(batch.answers.values())
        for offer in () if excused else batch.wanted.values():
            self.offers.failed(offer)
        self._conclude(batch, batch.answers.get(producer), _Answer.GOOD in others)

    async def _ask_holders(self, nursery: trio.Nursery, batch: _Batch) -> None:
        forwarders = [offer.heard_from for offer in batch.offers]
        found: Found = []
        with trio.CancelScope() as scope:
            batch.requests.add(scope)
            found = await self._holders.find(list(batch.wanted), forwarders, batch.producer)
        batch.requests.discard(scope)
        for peer, held in found[:HOLDERS_TRIED_MAX]:
            wanted = [each for each in held if each in batch.wanted]
            if wanted and not batch.given_up:
                await self._ask_for_a_while(nursery, batch, peer, wanted)

    async def _ask_for_a_while(
        self, nursery: trio.Nursery, batch: _Batch, peer: PeerId, wanted: Collection[GroupId]
    ) -> None:
        """Return when the peer has answered, or when it is late and goes on in the background."""
        done = trio.Event()
        batch.asked = peer
        group_ids = sorted(wanted)

        async def ask() -> None:
            answer = batch.answers[peer] = await self._ask(batch, peer, group_ids)
            fine = answer in (_Answer.GOOD, _Answer.CUT_OFF)
            if peer != batch.producer and not fine and batch.wanted:
                broken = answer is _Answer.BROKEN
                self._holders.rest(peer, BROKEN_HOLDER_REST_S if broken else FAILED_REST_S)
            done.set()

        nursery.start_soon(ask)
        with trio.move_on_after(EXPECTED_S + batch.size_bytes(wanted) / EXPECTED_BYTES_PER_S):
            await done.wait()

    def _conclude(self, batch: _Batch, answer: _Answer | None, others_had_it: bool) -> None:
        """Record the outcome for the producer. `answer` None: the producer was not asked."""
        now, producer = trio.current_time(), batch.producer
        if answer is _Answer.GOOD:
            self.offers.delivered(producer, late=batch.late)
            return
        silent = answer is _Answer.SILENT or (batch.given_up and answer is _Answer.NOTHING)
        at_fault = silent or answer is _Answer.BROKEN
        rest_s = FAILED_REST_S if at_fault else REFUSED_REST_S
        if others_had_it:
            self.offers.delivered_by_others(producer, rest_s, now)
            return
        if silent:
            self._ledger.reject(producer, Reject.UNAVAILABLE)
        self.offers.rest(producer, rest_s, now)

    async def _reach(self, peer: PeerId) -> bool:
        """Connect to a peer. DialHeldBack: too soon to dial, which is no fault of the peer."""
        if self._gater.is_banned(peer):
            return False
        if peer in self._transport.peers():
            return True
        addresses = self.offers.of(peer).addresses[:DIAL_ADDRESSES_MAX]
        try:
            await self._gater.dial_one_of(addresses, timeout_s=self._rules.dial_timeout_s)
        except DialHeldBack:
            raise
        except TransportError:
            return False
        return True

    async def _ask(self, batch: _Batch, peer: PeerId, group_ids: Sequence[GroupId]) -> _Answer:
        """Ask a peer for groups of a batch and take them in; those leave `wanted`."""
        if self._open[peer] >= REQUESTS_PER_PEER_MAX:
            return _Answer.REFUSED
        self._open[peer] += 1
        answered = self._transport.counters.answered
        try:
            with trio.CancelScope() as scope:
                batch.requests.add(scope)
                reply = await self._request(peer, group_ids, batch.size_bytes(group_ids))
            batch.requests.discard(scope)
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
        cut_off = self._transport.counters.answered == answered
        if scope.cancelled_caught:  # given up, or others were quicker
            return _Answer.CUT_OFF if batch.given_up and cut_off else _Answer.NOTHING
        if isinstance(reply, _Answer):
            return _Answer.CUT_OFF if reply is _Answer.SILENT and cut_off else reply
        return await self._take_all_in(batch, peer, reply)

    async def _request(
        self, peer: PeerId, group_ids: Sequence[GroupId], size_bytes: int
    ) -> Sequence[bytes] | _Answer:
        try:
            if not await self._reach(peer):
                return _Answer.SILENT
        except DialHeldBack:
            return _Answer.REFUSED
        try:
            if size_bytes > GROUP_BYTES_MAX and len(group_ids) == 1:
                return await self._request_large(peer, group_ids[0], size_bytes)
            want = Want(type="want", run_id=self._rules.run_id, group_ids=tuple(group_ids))
            reply = await ask(
                self._transport,
                peer,
                ROLLOUTS_PROTOCOL,
                want,
                GroupsReply,
                GROUPS_REPLY_BYTES_MAX,
                self._rules.timeout_s(size_bytes),
            )
        except RemoteProtocolError as error:
            self._ledger.reject(peer, error.reason)
            return _Answer.BROKEN
        except RequestRefused:
            return _Answer.REFUSED
        except TransportError:
            return _Answer.SILENT
        return reply.records

    async def _request_large(
        self, peer: PeerId, group_id: GroupId, size_bytes: int
    ) -> Sequence[bytes]:
        """Fetch one group in pieces; `_choose` puts it into a batch of its own."""
        record, timeout_s = bytearray(), self._rules.timeout_s(size_bytes)
        with trio.move_on_after(timeout_s):
            while len(record) < size_bytes:
                want = WantPiece(
                    type="want_piece",
                    run_id=self._rules.run_id,
                    group_id=group_id,
                    piece=len(record) // PIECE_BYTES,
                )
                try:
                    reply = await ask(
                        self._transport,
                        peer,
                        PIECES_PROTOCOL,
                        want,
                        PieceReply,
                        PIECE_REPLY_BYTES_MAX,
                        self._rules.timeout_s(PIECE_BYTES),
                    )
                except RequestRefused:
                    if not record:
                        raise
                    await trio.sleep(PIECE_RETRY_S)
                    continue
                if not reply.data:
                    return []
                if reply.size_bytes != size_bytes:
                    raise RemoteProtocolError(Reject.MALFORMED, "a group of another size than told")
                if len(reply.data) != min(PIECE_BYTES, size_bytes - len(record)):
                    raise RemoteProtocolError(Reject.MALFORMED, "a piece of another size")
                record += reply.data
            return [bytes(record)]
        raise RequestTimeout(f"{len(record)} of {size_bytes} bytes in {timeout_s:.0f} s")

    async def _take_all_in(self, batch: _Batch, peer: PeerId, answer: Sequence[bytes]) -> _Answer:
        good = 0
        waiting: list[_Checked] = []  # groups that go into the pool together
        since = trio.current_time()
        records = answer
        at_once = TAKEN_IN_AT_ONCE if self.offers.of(batch.producer).proven else 1
        try:
            while records and not self._gater.is_banned(batch.producer):  # the rest may be as bad
                taken, records = records[:at_once], records[at_once:]
                found = await self._take_in_together(batch, peer, taken, waiting)
                good += found
                if found < len(taken):
                    at_once = 1
                if trio.current_time() - since > POOL_AFTER_S:
                    await self._keep(waiting)
                    waiting, since = [], trio.current_time()
        except* ChildFailed:
            await self._keep(waiting)
            raise
        await self._keep(waiting)
        if good:
            return _Answer.GOOD
        return _Answer.BROKEN if answer else _Answer.NOTHING

    async def _take_in_together(
        self, batch: _Batch, peer: PeerId, records: Sequence[bytes], waiting: list[_Checked]
    ) -> int:
        """Check records in parallel; returns how many were good. `waiting`: for the pool."""
        good = 0

        async def take(record: bytes) -> None:
            nonlocal good
            try:
                checked = await self._take_in(batch, peer, record)
            except RemoteProtocolError as error:  # counted where it was found
                good += error.reason is Reject.UNDECIDED  # delivered as it should be
                if self._gater.is_banned(batch.producer):
                    nursery.cancel_scope.cancel()
                return
            good += 1
            waiting.extend([checked] if checked else [])

        async with trio.open_nursery() as nursery:
            for record in records:
                nursery.start_soon(take, record)
        return good

    async def _take_in(self, batch: _Batch, peer: PeerId, record: bytes) -> _Checked | None:
        """Check one record completely; None if it was delivered before. Errors are counted here."""
        group_id, group = self._decode(peer, record, batch.producer)
        if all(offer.group_id != group_id for offer in batch.offers):
            self._ledger.reject(peer, Reject.NOT_REQUESTED)
            raise RemoteProtocolError(Reject.NOT_REQUESTED, "nobody asked for it")
        offer = batch.claim(group_id)
        if offer is None:
            return None
        try:
            prompt, rewards = await self._judge_group(group, offer)
        except RemoteProtocolError:
            self.offers.drop(group_id, offer.producer)
            raise
        except ChildFailed:  # our own fault, as it seems; a group that it happens to again is left
            self.offers.failed(offer)
            raise
        return record, ScoredGroup(group_id, group, prompt, rewards)

    async def _keep(self, checked: Sequence[_Checked]) -> None:
        """Put groups into the pool in one transaction, and settle their offers."""
        if not checked:
            return
        results: list[AddResult] = await self._run_sync(
            lambda: self._pool.add_all(checked, own=False, now_s=self._now_s())
        )
        for (_, verified), result in zip(checked, results, strict=True):
            producer = verified.group.producer
            self.offers.drop(verified.group_id, producer)
            if result is AddResult.ADDED:
                self._ledger.accept(producer)
            elif result in POOL_REJECTS:
                self._ledger.reject(producer, POOL_REJECTS[result])

    def _decode(
        self, peer: PeerId, record: bytes, producer: PeerId
    ) -> tuple[GroupId, RolloutGroup]:
        """The record's group, without columns. A bad one counts against the producer if it
        signed it, else against the peer that sent it."""
        try:
            return codec.decode_group(record, columns=False, bytes_max=self._rules.record_bytes_max)
        except RemoteProtocolError as error:
            self._ledger.reject(producer if error.signer == producer else peer, error.reason)
            raise

    async def _judge_group(
        self, group: RolloutGroup, offer: Offer
    ) -> tuple[str, tuple[float, ...]]:
        """Prompt and rewards. Faults count against the peer that advertised the group; a group
        that expired on its way is nobody's fault."""
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
