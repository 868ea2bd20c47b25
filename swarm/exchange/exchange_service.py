"""The exchange of rollout groups: advert, choose, fetch, verify, pool. A producer signs its
groups and gossips one small advert a round. A group enters the pool after its signature, run,
times and task were checked and its rewards were computed here. A round samples what has arrived
and waits for nobody."""

from collections.abc import Callable, Container, Sequence
from functools import partial
from math import ceil, inf

import trio

from swarm.errors import Reject, RemoteProtocolError, RequestRefused, RequestTimeout, TransportError
from swarm.exchange.adverts import AdvertCache, ProducerSampler
from swarm.exchange.fetching import (
    ADVERTS_PER_PRODUCER_MAX,
    RECENT_ADVERTS_MAX,
    ExchangeRules,
    Fetcher,
    Verify,
)
from swarm.exchange.pool import AddResult, Candidate, Pool
from swarm.identity import Identity, PeerId
from swarm.limits.bounded_table import BoundedTable
from swarm.limits.quotas import BAD_ADVERT_COST, RELAYED, ByteBudget, Kind
from swarm.peers.address_book import addresses_of_peer, plausible
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.reputation import Ledger
from swarm.peers.requests import PeersToAsk, ask
from swarm.rollouts import GroupId, RolloutGroup, ScoredGroup
from swarm.storage import Runtime
from swarm.transport.base import ServeLimits, Transport
from swarm.wire import codec
from swarm.wire.messages import (
    ADDRESSES_MAX,
    ADVERT_GROUPS_MAX,
    ADVERTS_PER_REPLY_MAX,
    ADVERTS_PROTOCOL,
    ADVERTS_REPLY_BYTES_MAX,
    GROUP_BYTES_MAX,
    GROUPS_REPLY_BYTES_MAX,
    HAVE_REPLY_BYTES_MAX,
    HOLDERS_PROTOCOL,
    PIECE_BYTES,
    PIECE_REPLY_BYTES_MAX,
    PIECES_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertBody,
    AdvertEntry,
    AdvertsReply,
    GroupsReply,
    Have,
    HaveReply,
    PieceReply,
    RecentAdverts,
    Want,
    WantPiece,
    adverts_topic,
)

__all__ = ["Exchange", "ExchangeRules", "Verify"]

Rewards = tuple[float, ...]
_Entry = tuple[GroupId, int]  # a group on offer, and the bytes of its signed record

REPLY_OVERHEAD_BYTES = 1_024
CATCH_UP_LOOK_S = 1.0
PRODUCERS_ENOUGH = 8  # to take in during a round, or more where much is wanted in stock:
PRODUCERS_PER_STOCKED_GROUP = 0.5  # each brings a group or more, which stays on offer for rounds
SAMPLED_ROUND_S = 60.0  # at most
CATCH_UPS_PER_LOOK_MAX = 4
EXPIRE_S = 10.0  # between two removals of what has expired
STOPPED_S = 10.0  # a look that is this late: the process was stopped, or the machine slept
SERVE_SLACK_S = 5.0
SERVE_SHARE_OF_ONE_PEER = 0.25  # of the bytes served in a second
SERVE_SHARE_OF_RELAYED = 0.5  # of all relayed peers together
SERVE_SHARE_OF_ONE_RELAYED = 0.0625
SERVED_PEERS_MAX = 256  # whose budgets are kept, the most recent ones


# Long: what is served and what is drawn share one pool.
class Exchange:
    """One node's side of the exchange. `run` serves and fetches until cancelled."""

    def __init__(
        self,
        rules: ExchangeRules,
        identity: Identity,
        transport: Transport,
        pool: Pool,
        verify: Verify,
        runtime: Runtime,
        gater: ConnectionGater | None = None,
    ) -> None:
        """`gater`: run by its maker, with its ledger. None: one that runs here."""
        self._rules = rules
        self._identity = identity
        self._transport = transport
        self._pool = pool
        self._now_s = runtime.now_s
        self._rng = runtime.rng
        self._run_sync = runtime.run_sync
        enough = ceil(PRODUCERS_PER_STOCKED_GROUP * rules.stock_groups)
        self._sampler = ProducerSampler(max(PRODUCERS_ENOUGH, enough))
        self._round_began = trio.current_time()
        self._serve_budget = ByteBudget(rules.serve_bytes_per_s, trio.current_time())
        self._peer_budgets: BoundedTable[str, ByteBudget] = BoundedTable(SERVED_PEERS_MAX)
        self._runs_gater = gater is None
        self.gater = gater or ConnectionGater(transport, Ledger())
        self.ledger = self.gater.ledger
        self.fetcher = Fetcher(rules, transport, pool, verify, self.gater, self.candidates, runtime)
        self._offers = self.fetcher.offers
        self.on_advert: Callable[[AdvertBody], None] = lambda _: None
        self._advert_cache = AdvertCache(
            RECENT_ADVERTS_MAX,
            ADVERTS_PER_PRODUCER_MAX,
            identity.peer_id,
            lambda producer: self._offers.of(producer).proven,
        )

    async def share(
        self, groups: Sequence[RolloutGroup], prompts: Sequence[str], rewards: Sequence[Rewards]
    ) -> list[ScoredGroup]:
        """Sign, keep and advertise own groups, but none for a task shared before a crash."""
        signed: list[tuple[bytes, ScoredGroup]] = []
        for group, prompt, group_rewards in zip(groups, prompts, rewards, strict=True):
            group_id, record = codec.sign_group(group, self._identity, self._rules.record_bytes_max)
            signed.append((record, ScoredGroup(group_id, group, prompt, tuple(group_rewards))))
        results: list[AddResult] = await self._run_sync(
            lambda: self._pool.add_all(signed, own=True, now_s=self._now_s())
        )
        added = [s for s, result in zip(signed, results, strict=True) if result is AddResult.ADDED]
        shared = [verified for _, verified in added]
        entries = [(verified.group_id, len(record)) for record, verified in added]
        self.ledger.credit.made(group_id for group_id, _ in entries)
        self._next_round()
        for start in range(0, len(entries), ADVERT_GROUPS_MAX):
            example = groups[start]
            if example.expires_at_s <= self._now_s():
                break  # the machine slept while the groups were made: nobody would take them
            record = self._advertise(
                example.round,
                example.created_at_s,
                example.expires_at_s,
                entries[start : start + ADVERT_GROUPS_MAX],
            )
            await self._transport.publish(adverts_topic(self._rules.run_id), record)
        return shared

    def _advertise(
        self, round_: int, created_at_s: int, expires_at_s: int, entries: Sequence[_Entry]
    ) -> bytes:
        """The signed advert of some groups, kept for peers that ask."""
        body = AdvertBody(
            type="advert",
            run_id=self._rules.run_id,
            producer=self._identity.peer_id,
            round=round_,
            addresses=self._transport.addresses()[:ADDRESSES_MAX],
            groups=tuple(AdvertEntry(group_id=i, size_bytes=size) for i, size in entries),
            created_at_s=created_at_s,
            expires_at_s=expires_at_s,
        )
        advert_id, record = codec.sign_advert(body, self._identity)
        self._advert_cache.put(advert_id, record, body)
        return record

    async def _advertise_again(self) -> None:
        """Put groups shared before a restart in the cache of adverts."""
        own = await self._run_sync(self._pool.own_newest, self._now_s())
        newest = own[0][2] if own else 0
        rounds: dict[tuple[int, int, int], list[_Entry]] = {}
        # as they were shared, so that the adverts are the same again
        for group_id, size, round_, created_at_s, expires_at_s in reversed(own):
            if newest - self._rules.offers.rounds_max < round_ <= newest:
                key = (round_, created_at_s, expires_at_s)
                rounds.setdefault(key, []).append((group_id, size))
        for key, entries in rounds.items():
            for start in range(0, len(entries), ADVERT_GROUPS_MAX):
                self._advertise(*key, entries[start : start + ADVERT_GROUPS_MAX])

    async def _tell_again(self) -> None:
        cache = self._advert_cache
        records = cache.choose(len(cache), self._now_s(), self._rng)
        while records and not self._transport.peers():  # noqa: ASYNC110 - no event tells of peers
            await trio.sleep(CATCH_UP_LOOK_S)
        await trio.sleep(CATCH_UP_LOOK_S)  # until gossip knows who listens
        for record in reversed(records):
            await self._transport.publish(adverts_topic(self._rules.run_id), record)

    async def candidates(self) -> list[Candidate]:
        """Foreign groups to draw: untrained, recent, and not of a banned producer."""
        rounds = self._rules.offers.rounds_max
        eligible: list[Candidate] = await self._run_sync(
            lambda: self._pool.eligible(own=False, now_s=self._now_s(), rounds_max=rounds)
        )
        producers = {c.producer for c in eligible} - self.gater.banned_peers()
        before = {each: self._offers.of(each).round - rounds for each in producers}
        return [c for c in eligible if c.round > before.get(c.producer, inf)]

    async def look(self, group_ids: Sequence[GroupId]) -> list[ScoredGroup]:
        """Groups by id, without those that have left."""
        found: list[ScoredGroup] = await self._run_sync(self._pool.groups, group_ids)
        return found

    async def take(self, group_ids: Sequence[GroupId], round_: int) -> list[ScoredGroup]:
        """Hand groups out, marked durably before, so that none is trained on twice."""
        groups: list[ScoredGroup] = await self._run_sync(self._take, group_ids, round_)
        for verified in groups:
            self.ledger.train(verified.group.producer, verified.group_id)
        self.fetcher.wake()
        return groups

    def _take(self, group_ids: Sequence[GroupId], round_: int) -> list[ScoredGroup]:
        self._pool.mark_trained(group_ids, round_)
        return self._pool.groups(group_ids)

    def _serve(self) -> None:
        limits = ServeLimits(WANT_BYTES_MAX, HAVE_REPLY_BYTES_MAX, concurrent_max=16)
        self._transport.serve(HOLDERS_PROTOCOL, self._serve_holders, limits)
        limits = ServeLimits(WANT_BYTES_MAX, ADVERTS_REPLY_BYTES_MAX, concurrent_max=8)
        self._transport.serve(ADVERTS_PROTOCOL, self._serve_adverts, limits)
        served = [(ROLLOUTS_PROTOCOL, self._serve_groups, GROUPS_REPLY_BYTES_MAX, GROUP_BYTES_MAX)]
        if self._rules.takes_large:
            served.append((PIECES_PROTOCOL, self._serve_piece, PIECE_REPLY_BYTES_MAX, PIECE_BYTES))
        for protocol, handler, reply_bytes_max, size_bytes in served:
            # no sooner than the requester, who allows for the slowest uplink
            timeout_s = SERVE_SLACK_S + self._rules.timeout_s(size_bytes)
            limits = ServeLimits(WANT_BYTES_MAX, reply_bytes_max, 16, timeout_s=timeout_s)
            self._transport.serve(protocol, handler, limits)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        if self._rules.serves:
            self._serve()
        await self._advertise_again()
        topic = adverts_topic(self._rules.run_id)
        heard = await self._transport.subscribe(
            topic, self._hear_gossip, self._admits, self._sampler.asks
        )
        heard.close()  # the validator takes each advert in
        async with trio.open_nursery() as nursery:
            if self._runs_gater:
                nursery.start_soon(self.gater.run)
            nursery.start_soon(self._expire_forever)
            nursery.start_soon(self._tell_again)
            if self._rules.stock_groups > 0:
                nursery.start_soon(self._catch_up_forever)
                nursery.start_soon(self.fetcher.run)
            task_status.started()

    async def _serve_piece(self, peer: PeerId, payload: bytes) -> bytes:
        want = self.gater.read(Kind.WANT, peer, payload, WantPiece, WANT_BYTES_MAX)
        self.gater.check_run(peer, want.run_id, self._rules.run_id)
        self._check_budget(peer)
        banned = self.gater.banned_peers()
        size_bytes, data = await self._run_sync(
            self._pool.piece,
            GroupId(want.group_id),
            PIECE_BYTES * want.piece,
            PIECE_BYTES,
            self._now_s(),
            banned,
        )
        self._spend(peer, [data])
        if data:
            self.ledger.credit.sent([GroupId(want.group_id)])
        return codec.encode(PieceReply(type="piece", size_bytes=size_bytes, data=data))

    async def _serve_groups(self, peer: PeerId, payload: bytes) -> bytes:
        want = self.gater.read(Kind.WANT, peer, payload, Want, WANT_BYTES_MAX)
        self.gater.check_run(peer, want.run_id, self._rules.run_id)
        self._check_budget(peer)
        wanted = list(dict.fromkeys(want.group_ids))
        banned = self.gater.banned_peers()
        found: dict[GroupId, bytes] = await self._run_sync(self._records, wanted, banned)
        self._spend(peer, [*found.values()])
        self.ledger.credit.sent(found)
        return codec.encode(GroupsReply(type="groups", records=tuple(found.values())))

    async def _serve_holders(self, peer: PeerId, payload: bytes) -> bytes:
        asked = self.gater.read(Kind.HAVE, peer, payload, Have, WANT_BYTES_MAX)
        self.gater.check_run(peer, asked.run_id, self._rules.run_id)
        held: set[bytes] = set()
        if not self._is_spent(peer):
            banned = self.gater.banned_peers()
            held = await self._run_sync(self._pool.held, asked.group_ids, self._now_s(), banned)
        at = tuple(at for at, group_id in enumerate(asked.group_ids) if group_id in held)
        return codec.encode(HaveReply(type="have_reply", held=at))

    def _check_budget(self, peer: PeerId) -> None:
        if self._is_spent(peer):
            raise RequestRefused("the serving budget is spent")

    def _is_spent(self, peer: PeerId) -> bool:
        return any(budget.is_spent(trio.current_time()) for budget in self._budgets(peer))

    def _spend(self, peer: PeerId, records: Sequence[bytes]) -> None:
        for budget in self._budgets(peer):
            budget.spend(sum(map(len, records)), trio.current_time())

    def _budgets(self, peer: PeerId) -> list[ByteBudget]:
        """The budgets to spend: of all peers, of a block, or of relayed peers and each of them."""
        shares: dict[str, float] = {self.gater.share_of(peer): SERVE_SHARE_OF_ONE_PEER}
        if self.gater.is_relayed(peer):
            shares = {RELAYED: SERVE_SHARE_OF_RELAYED, peer: SERVE_SHARE_OF_ONE_RELAYED}
        now, rate = trio.current_time(), self._rules.serve_bytes_per_s
        kept = self._peer_budgets.obtain
        own = (kept(of, partial(ByteBudget, part * rate, now)) for of, part in shares.items())
        return [self._serve_budget, *own]

    def _records(
        self, group_ids: Sequence[bytes], banned: Container[PeerId]
    ) -> dict[GroupId, bytes]:
        records: dict[GroupId, bytes] = {}
        room = GROUPS_REPLY_BYTES_MAX - REPLY_OVERHEAD_BYTES
        for group_id in group_ids:
            record = self._pool.record(GroupId(group_id), self._now_s(), without=banned)
            if record is not None and len(record) <= room:
                records[GroupId(group_id)] = record
                room -= len(record) + 8
        return records

    async def _serve_adverts(self, peer: PeerId, payload: bytes) -> bytes:
        asked = self.gater.read(Kind.CATCH_UP, peer, payload, RecentAdverts, WANT_BYTES_MAX)
        self.gater.check_run(peer, asked.run_id, self._rules.run_id)
        self._check_budget(peer)
        records = self._advert_cache.choose(ADVERTS_PER_REPLY_MAX, self._now_s(), self._rng)
        self._spend(peer, records)
        return codec.encode(AdvertsReply(type="adverts", records=tuple(records)))

    def _admits(self, peer: PeerId) -> bool:
        return not self.gater.is_banned(peer) and self.gater.allows(Kind.ADVERT, peer)

    def _hear_gossip(self, peer: PeerId, payload: bytes, *, sampled: bool = True) -> bool:
        try:
            return self._hear(peer, payload, sampled=sampled)
        except RemoteProtocolError:
            self.gater.allows(Kind.ADVERT, peer, BAD_ADVERT_COST - 1)
            return False

    def _hear(self, peer: PeerId, record: bytes, *, sampled: bool) -> bool:
        """Take in one signed advert; True if it was new. `sampled`: leave out producers beyond
        enough. Bad bytes count against their signer."""
        if self._advert_cache.holds(record):
            return False
        advert_id, advert = self.ledger.judge(peer, codec.decode_advert, record)
        if advert.producer == self._identity.peer_id:
            return False
        self._check_advert(advert, peer)
        producer = PeerId(advert.producer)
        if self.gater.is_banned(producer):
            return False
        if sampled and not self._sampler.wants(producer, self._rng):
            return False
        told_by = self.gater.path_of(peer)
        if not self._advert_cache.put(advert_id, record, advert, told_by):
            return False
        addresses = plausible(
            addresses_of_peer(producer, advert.addresses), self._transport.ip_of(peer)
        )
        self.on_advert(advert)
        if self._offers.hear(advert, peer, trio.current_time(), told_by, addresses):
            if peer == producer:
                self._offers.is_back(producer, trio.current_time())
            self.fetcher.wake()
        return True

    def _check_advert(self, advert: AdvertBody, peer: PeerId) -> None:
        if advert.run_id != self._rules.run_id:
            self.ledger.reject(peer, Reject.WRONG_RUN)
            raise RemoteProtocolError(Reject.WRONG_RUN, advert.run_id)
        if any(entry.size_bytes > self._rules.record_bytes_max for entry in advert.groups):
            self.ledger.reject(PeerId(advert.producer), Reject.OVERSIZE)
            raise RemoteProtocolError(Reject.OVERSIZE, "a group larger than the run allows")
        try:
            codec.check_times(
                advert.created_at_s,
                advert.expires_at_s,
                self._now_s(),
                self._rules.record_life_s,
                self._rules.clock_skew_s,
            )
        except RemoteProtocolError as error:
            if peer == advert.producer:  # it may have aged on its way through others' hands
                self.ledger.reject(peer, error.reason)
            raise

    def _next_round(self) -> None:
        self._sampler.next_round()
        self._round_began = trio.current_time()

    async def _catch_up_forever(self) -> None:
        """Ask new peers, and now and then any peer, for adverts while few groups are on offer."""
        now = last = stopped_until = trio.current_time()
        again_s = self._rules.catch_up_interval_s
        to_ask = PeersToAsk(again_s, CATCH_UPS_PER_LOOK_MAX, self._rng, now)
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                if now - last > STOPPED_S:
                    stopped_until = now + again_s
                    to_ask.forget_all()
                if now < stopped_until or self.fetcher.is_short_of_offers():
                    for peer in to_ask.draw(self._transport.peers(), now):
                        nursery.start_soon(self._catch_up, peer, to_ask)
                last = now
                await trio.sleep(CATCH_UP_LOOK_S)

    async def _catch_up(self, peer: PeerId, to_ask: PeersToAsk) -> None:
        try:
            reply = await ask(
                self._transport,
                peer,
                ADVERTS_PROTOCOL,
                RecentAdverts(type="recent_adverts", run_id=self._rules.run_id),
                AdvertsReply,
                ADVERTS_REPLY_BYTES_MAX,
                self._rules.fetch_timeout_s,
                self.ledger,
            )
        except RequestTimeout:
            to_ask.forget(peer)  # it is cut off: ask again until it is not
            return
        except (RemoteProtocolError, TransportError):
            return
        for record in reversed(reply.records):  # oldest first, so that the newest round wins
            if self._admits(peer):
                self._hear_gossip(peer, record, sampled=False)

    async def _expire_forever(self) -> None:
        while True:
            await trio.sleep(EXPIRE_S)
            now_s = self._now_s()
            self._offers.expire(now_s)
            self._advert_cache.expire(now_s)
            if trio.current_time() - self._round_began >= SAMPLED_ROUND_S:
                self._next_round()  # shares seldom, or never
            await self._run_sync(self._pool.expire, now_s)
