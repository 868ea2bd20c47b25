"""One exchange and one peer that speaks its protocols: who pays for which failure."""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import trio

from node.engines.scripted import TOKENIZER
from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.errors import (
    ChildFailed,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
)
from swarm.exchange.exchange_service import Exchange, ExchangeRules
from swarm.exchange.fetching import DIAL_ADDRESSES_MAX, TAKEN_IN_AT_ONCE
from swarm.exchange.offers import OfferLimits
from swarm.exchange.pool import Pool, PoolLimits
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup, Task
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, open_world
from swarm.storage import Runtime
from swarm.transport.base import ServeLimits
from swarm.transport.memory.network import MemoryTransport
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    ADVERTS_REPLY_BYTES_MAX,
    GROUPS_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertBody,
    AdvertEntry,
    AdvertsReply,
    GroupsReply,
    RecentAdverts,
    Want,
    adverts_topic,
)
from tests.support import run

RUN_ID = "run"


def now_s() -> float:
    return EPOCH_S + trio.current_time()


def group_of(identity: Identity, index: int) -> RolloutGroup:
    created_at_s = int(now_s())
    return RolloutGroup(
        run_id=RUN_ID,
        producer=identity.peer_id,
        round=1,
        task=Task("scripted_sum", "1", "{}", index, index),
        completions=(Completion("12", (1, 2), (-0.1, -0.1), FinishReason.STOP, 1),) * 4,
        tokenizer=TOKENIZER,
        temperature=1.0,
        top_p=1.0,
        created_at_s=created_at_s,
        expires_at_s=created_at_s + 900,
    )


async def approve(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
    await trio.lowlevel.checkpoint()
    return f"prompt {group.task.index}", (0.0, 1.0, 0.0, 1.0)


async def no_adverts(peer: str, payload: bytes) -> bytes:
    raise RequestRefused("none")


@dataclass
class Setting:
    """The exchange under test and its one peer."""

    exchange: Exchange
    identity: Identity
    other: Identity
    transport: MemoryTransport  # the peer's
    others_transport: MemoryTransport
    own: PeerId
    world: SimulatedWorld

    async def advertise(self, *groups: RolloutGroup) -> dict[bytes, bytes]:
        records = dict(codec.sign_group(group, self.identity) for group in groups)
        body = AdvertBody(
            type="advert",
            run_id=RUN_ID,
            producer=self.identity.peer_id,
            round=1,
            addresses=self.transport.addresses(),
            groups=tuple(AdvertEntry(group_id=i, size_bytes=len(r)) for i, r in records.items()),
            created_at_s=int(now_s()),
            expires_at_s=int(now_s()) + 900,
        )
        await self.transport.publish(
            adverts_topic(RUN_ID), codec.sign_advert(body, self.identity)[1]
        )
        return records

    def serve(self, handle: Callable[[PeerId, bytes], Awaitable[bytes]]) -> None:
        self.transport.serve(
            ROLLOUTS_PROTOCOL, handle, ServeLimits(WANT_BYTES_MAX, GROUPS_REPLY_BYTES_MAX)
        )

    def move(self, transport: MemoryTransport, ip: str) -> None:
        """Let a host seem to be elsewhere."""
        self.world.network._ips[self.world.network._numbers[transport.peer_id]] = ip

    async def want(self, transport: MemoryTransport, *ids: bytes) -> int:
        """How many records an honest request brings."""
        answer = await transport.request(
            self.own,
            ROLLOUTS_PROTOCOL,
            codec.encode(Want(type="want", run_id=RUN_ID, group_ids=ids)),
            timeout_s=5.0,
            response_bytes_max=GROUPS_REPLY_BYTES_MAX,
        )
        return len(codec.decode(answer, GroupsReply, GROUPS_REPLY_BYTES_MAX).records)


@asynccontextmanager
async def setting(verify: Any = approve, adverts: Any = no_adverts, **rules: Any) -> Any:
    async with (
        open_world(1, 3, LinkProfile(latency_s=0.02)) as world,
        trio.open_nursery() as nursery,
    ):
        own, peer, third = (world.join(host) for host in range(3))
        pool = Pool(":memory:", PoolLimits(100, 10_000_000, 100))
        exchange = Exchange(
            ExchangeRules(
                **{
                    "run_id": RUN_ID,
                    "stock_groups": 8,
                    "record_life_s": 3600,
                    "clock_skew_s": 60,
                    "group_size_max": 8,
                    **rules,
                }
            ),
            world.identities[0],
            own,
            pool,
            verify,
            Runtime(now_s, Random(0), run_inline),
        )
        await nursery.start(exchange.run)
        peer.serve(ADVERTS_PROTOCOL, adverts, ServeLimits(WANT_BYTES_MAX, 9_000))
        await peer.subscribe(adverts_topic(RUN_ID), lambda *_: True)
        for each in (peer, third):
            await each.connect(own.addresses()[0], timeout_s=5.0)
        _, one, other = world.identities
        yield Setting(exchange, one, other, peer, third, own.peer_id, world)
        nursery.cancel_scope.cancel()
    pool.close()


def server_of(records: dict[bytes, bytes], refusals: int = 0) -> Any:
    """Serves `records`, after it has refused some requests."""
    left = refusals

    async def serve(peer: PeerId, payload: bytes) -> bytes:
        nonlocal left
        if left > 0:
            left -= 1
            raise RequestRefused("busy")
        want = codec.decode(payload, Want, WANT_BYTES_MAX)
        found = tuple(records[i] for i in want.group_ids if i in records)
        return codec.encode(GroupsReply(type="groups", records=found))

    return serve


@pytest.mark.parametrize(("failures", "tried"), [(4, 4), (1000, OfferLimits().attempts_max)])
def test_a_failed_verifier_is_our_own_failure_and_the_offer_stays_for_some_tries(
    failures: int, tried: int
) -> None:
    """A group over which it fails each time would else be fetched until it expires."""

    async def fails_first(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        nonlocal failures
        if failures:
            failures -= 1
            raise ChildFailed("a verifier process ended")
        return await approve(group)

    async def main() -> None:
        async with setting(fails_first) as here:
            here.serve(server_of(await here.advertise(group_of(here.identity, 1))))
            await trio.sleep(60)
            assert here.exchange.fetcher.verifier_failures == tried
            assert here.exchange.ledger.accepted == (tried == 4)
            assert not here.exchange.ledger.rejected

    run(main, virtual=True, timeout_s=1000)


class Judge:
    """Judges one group after the other, a second each, and counts who waits."""

    def __init__(self) -> None:
        self.is_right = True
        self.judged = self.at_once = self.at_once_most = 0
        self._turn = trio.Lock()

    async def __call__(self, group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        self.at_once += 1
        self.at_once_most = max(self.at_once, self.at_once_most)
        try:
            async with self._turn:
                await trio.sleep(1.0)
                self.judged += 1
                if not self.is_right:
                    raise RemoteProtocolError(Reject.OVERRUN, "it takes too long")
                return await approve(group)
        finally:
            self.at_once -= 1


def test_the_verifier_gets_more_at_once_of_a_producer_whose_groups_were_good() -> None:
    async def main() -> None:
        judge = Judge()
        async with setting(judge, stock_groups=64) as here:
            here.serve(server_of(records := {}))
            for first, most in ((0, 1), (16, TAKEN_IN_AT_ONCE)):
                groups = [group_of(here.identity, first + at) for at in range(12)]
                records |= await here.advertise(*groups)
                await trio.sleep(60)
                assert judge.at_once_most == most
            assert here.exchange.ledger.accepted == 24

    run(main, virtual=True, timeout_s=1000)


@pytest.mark.parametrize("bans", [True, False])
def test_what_waits_of_a_producer_that_is_banned_meanwhile_is_not_judged(bans: bool) -> None:
    async def main() -> None:
        judge = Judge()
        async with setting(judge, stock_groups=64) as here:
            here.serve(server_of(records := await here.advertise(group_of(here.identity, 0))))
            await trio.sleep(60)
            judge.is_right = False
            if not bans:  # a fault that shows
                here.exchange.gater.is_banned = lambda _: False
            groups = [group_of(here.identity, 1 + at) for at in range(12)]
            records |= await here.advertise(*groups)
            await trio.sleep(60)
            overruns = 3  # then it is banned
            assert (judge.judged == 1 + overruns) is bans
            assert judge.at_once == 0

    run(main, virtual=True, timeout_s=1000)


def test_refusals_use_up_no_offer_and_are_no_fault() -> None:
    async def main() -> None:
        async with setting() as here:
            records = await here.advertise(group_of(here.identity, 1))
            here.serve(server_of(records, refusals=5))
            await trio.sleep(200)
            assert here.exchange.ledger.accepted == 1
            assert not here.exchange.ledger.rejected

    run(main, virtual=True, timeout_s=1000)


def test_one_request_at_a_time_is_open_for_one_producers_groups() -> None:
    open_now = most = 0

    async def main() -> None:
        async with setting(stock_groups=64, fetch_parallel=64) as here:
            records: dict[bytes, bytes] = {}
            for start in (0, 20, 40):
                groups = [group_of(here.identity, start + n) for n in range(20)]
                records.update(await here.advertise(*groups))
            answer = server_of(records)

            async def slow(peer: PeerId, payload: bytes) -> bytes:
                nonlocal open_now, most
                open_now += 1
                most = max(most, open_now)
                await trio.sleep(3)
                open_now -= 1
                return bytes(await answer(peer, payload))

            here.serve(slow)
            await trio.sleep(60)
            assert most == 1
            assert here.exchange.ledger.accepted == 60

    run(main, virtual=True, timeout_s=1000)


@pytest.mark.parametrize("answers_adverts", [False, True])
def test_an_answer_against_the_rules_counts_once(answers_adverts: bool) -> None:
    async def garbage(peer: PeerId, payload: bytes) -> bytes:
        return b"\xc1garbage"

    async def main() -> None:
        async with setting(adverts=garbage if answers_adverts else no_adverts) as here:
            if not answers_adverts:
                await here.advertise(group_of(here.identity, 1))
                here.serve(garbage)
            await trio.sleep(10)
            assert here.exchange.ledger.rejected == {Reject.MALFORMED: 1}

    run(main, virtual=True, timeout_s=1000)


def test_a_stream_cut_short_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut(*args: Any, **limits: Any) -> bytes:
        raise RemoteProtocolError(Reject.MALFORMED, "the stream ended early")

    async def main(about_adverts: bool) -> None:
        with monkeypatch.context() as patch:
            request = MemoryTransport.request

            async def some_cut(self: Any, peer: Any, protocol: str, *rest: Any, **k: Any) -> bytes:
                if (protocol == ADVERTS_PROTOCOL) == about_adverts and str(peer) == guilty:
                    return await cut()
                return await request(self, peer, protocol, *rest, **k)

            guilty = ""
            patch.setattr(MemoryTransport, "request", some_cut)
            async with setting() as here:
                guilty = here.identity.peer_id
                if not about_adverts:
                    here.serve(server_of(await here.advertise(group_of(here.identity, 1))))
                await trio.sleep(10)
                assert here.exchange.ledger.rejected == {Reject.MALFORMED: 1}

    for about_adverts in (False, True):
        run(main, about_adverts, virtual=True, timeout_s=1000)


async def share_ten(here: Setting, own: Identity) -> list[bytes]:
    groups = [group_of(own, index) for index in range(10)]
    shared = await here.exchange.share(groups, ["p"] * 10, [(0.0, 1.0, 0.0, 1.0)] * 10)
    return [verified.group_id for verified in shared]


def test_a_greedy_peer_is_refused_while_others_are_served() -> None:
    async def main() -> None:
        async with setting(stock_groups=0, serve_bytes_per_s=8_000.0) as here:
            ids = await share_ten(here, here.exchange._identity)
            assert await here.want(here.transport, *ids) == 10
            with pytest.raises(RequestRefused):
                await here.want(here.transport, ids[0])
            assert await here.want(here.others_transport, ids[0]) == 1
            await trio.sleep(10)
            assert await here.want(here.transport, ids[0]) == 1

    run(main, virtual=True, timeout_s=1000)


def test_relayed_peers_leave_half_of_what_is_served_to_others() -> None:
    async def main() -> None:
        async with setting(stock_groups=0, serve_bytes_per_s=8_000.0) as here:
            ids = await share_ten(here, here.exchange._identity)
            here.move(here.transport, "behind a relay")
            assert await here.want(here.transport, *ids) == 10
            here.move(here.others_transport, "behind a relay")
            with pytest.raises(RequestRefused):
                await here.want(here.others_transport, ids[0])
            here.move(here.others_transport, "10.9.9.9")
            assert await here.want(here.others_transport, ids[0]) == 1

    run(main, virtual=True, timeout_s=1000)


def test_one_relayed_peer_leaves_something_to_the_others() -> None:
    async def main() -> None:
        async with setting(stock_groups=0, serve_bytes_per_s=16_000.0) as here:
            ids = await share_ten(here, here.exchange._identity)
            for each in (here.transport, here.others_transport):
                here.move(each, "behind a relay")
            assert await here.want(here.transport, *ids[:4]) == 4
            with pytest.raises(RequestRefused):
                await here.want(here.transport, ids[0])
            assert await here.want(here.others_transport, ids[0]) == 1

    run(main, virtual=True, timeout_s=1000)


def test_adverts_for_whoever_catches_up_are_part_of_what_is_served() -> None:
    async def ask(here: Setting) -> int:
        answer = await here.transport.request(
            here.own,
            ADVERTS_PROTOCOL,
            codec.encode(RecentAdverts(type="recent_adverts", run_id=RUN_ID)),
            timeout_s=5.0,
            response_bytes_max=ADVERTS_REPLY_BYTES_MAX,
        )
        return len(codec.decode(answer, AdvertsReply, ADVERTS_REPLY_BYTES_MAX).records)

    async def main() -> None:
        async with setting(stock_groups=0, serve_bytes_per_s=1_000.0) as here:
            await share_ten(here, here.exchange._identity)
            assert await ask(here) == 1
            with pytest.raises(RequestRefused, match="budget"):
                await ask(here)
            await trio.sleep(10)
            assert await ask(here) == 1

    run(main, virtual=True, timeout_s=1000)


def test_an_id_that_is_wanted_twice_is_served_once() -> None:
    async def main() -> None:
        async with setting(stock_groups=0) as here:
            ids = await share_ten(here, here.exchange._identity)
            assert await here.want(here.transport, ids[0], ids[0], ids[1], ids[0]) == 2

    run(main, virtual=True, timeout_s=1000)


def test_a_silent_producer_is_asked_ever_more_rarely() -> None:
    asked: list[float] = []

    async def silent(peer: PeerId, payload: bytes) -> bytes:
        asked.append(trio.current_time())
        await trio.sleep_forever()
        raise AssertionError

    async def main() -> None:
        # it answers other requests, so the silence is its own and not our link's
        async with setting(catch_up_interval_s=1.0) as here:
            here.serve(silent)
            for start in range(0, 600, 20):
                await here.advertise(*(group_of(here.identity, start + n) for n in range(20)))
                await trio.sleep(10)
            waits = [b - a for a, b in itertools.pairwise(asked)]
            assert 3 <= len(waits) <= 4
            assert all(b > 1.4 * a for a, b in itertools.pairwise(waits))
            assert here.exchange.ledger.rejected == {Reject.UNAVAILABLE: len(asked)}

    run(main, virtual=True, timeout_s=1000)


def test_who_is_cut_off_from_everybody_blames_nobody() -> None:
    async def main() -> None:
        async with setting() as here:
            records = await here.advertise(group_of(here.identity, 1))
            await trio.sleep(1)  # refused so far
            here.serve(server_of(records))
            clogged_s = 100.0  # longer than several requests wait
            here.world.clog(0, clogged_s)
            await trio.sleep(clogged_s)
            assert not here.exchange.ledger.rejected
            await trio.sleep(10)  # nor is the producer left alone for long when the link is back
            assert here.exchange.ledger.accepted == 1

    run(main, virtual=True, timeout_s=1000)


def test_what_a_silent_producer_may_never_deliver_does_not_count_as_coming() -> None:
    async def silent(peer: PeerId, payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def main() -> None:
        async with setting() as here:
            here.serve(silent)
            await here.advertise(*(group_of(here.identity, n) for n in range(30)))
            await trio.sleep(3)  # by now its batch of a whole stock is under way
            here.identity, here.transport = here.other, here.others_transport
            await here.transport.subscribe(adverts_topic(RUN_ID), lambda *_: True)
            here.serve(
                server_of(await here.advertise(*(group_of(here.other, n) for n in range(4))))
            )
            await trio.sleep(2)
            assert here.exchange.ledger.accepted == 4

    run(main, virtual=True, timeout_s=1000)


@pytest.mark.parametrize(
    ("teller", "kept"), [("9.9.9.9", [2, 3]), ("10.7.0.1", [1, 2, 3]), ("127.0.0.1", range(4))]
)
def test_only_what_a_forwarder_can_know_of_a_producer_is_dialled(
    teller: str, kept: Sequence[int]
) -> None:
    dialled: list[str] = []

    async def main() -> None:
        async with setting() as here:
            away = Identity(b"a" * 32)  # a producer that nobody is connected to
            where = [
                f"{start}/p2p/{away.peer_id}"
                for start in (
                    "/ip4/127.0.0.1/tcp/22",
                    "/ip4/192.168.0.1/tcp/80",
                    "/ip4/198.41.0.4/tcp/4001",
                    "/memory/99",
                )
            ]
            body = AdvertBody(
                type="advert",
                run_id=RUN_ID,
                producer=away.peer_id,
                round=1,
                addresses=(f"/ip4/198.41.0.4/tcp/53/p2p/{here.other.peer_id}", *where),
                groups=(AdvertEntry(group_id=bytes(32), size_bytes=9),),
                created_at_s=int(now_s()),
                expires_at_s=int(now_s()) + 900,
            )
            here.move(here.transport, teller)
            transport = here.exchange._transport

            async def dial(address: str, *, timeout_s: float) -> PeerId:
                dialled.append(address)
                raise PeerUnreachable(address)

            transport.connect = dial  # type: ignore[method-assign]
            record = codec.sign_advert(body, away)[1]
            await here.transport.publish(adverts_topic(RUN_ID), record)
            with trio.fail_after(60):
                while not dialled:  # noqa: ASYNC110
                    await trio.sleep(1)
            await trio.sleep(60)
            assert set(dialled) == {where[at] for at in kept[:DIAL_ADDRESSES_MAX]}

    run(main, virtual=True, timeout_s=1000)
