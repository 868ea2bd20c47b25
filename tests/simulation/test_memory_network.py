"""What the simulated network adds to the transport contract: time, loss, partitions, crashes."""

from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio

from swarm.errors import LocalProtocolError, PeerUnreachable, RequestTimeout
from swarm.identity import PeerId
from swarm.simulation.links import OVERHEAD_BYTES, LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.base import GOSSIP_QUEUE_MAX, GossipMessage, ServeLimits
from swarm.transport.memory.memory_gossip import LINK_GOSSIP_MAX, SEEN_MESSAGES_MAX
from swarm.transport.memory.network import HANDSHAKE_ROUND_TRIPS, MemoryTransport

PROTOCOL = "/test/echo/1.0.0"
TOPIC = "/test/topic/1.0.0"
LIMITS = ServeLimits(1_000_000, 1_000_000)
FAR = LinkProfile(latency_s=0.1)

Body = Callable[[SimulatedWorld, Sequence[MemoryTransport]], Awaitable[None]]


def check(
    body: Body,
    hosts: int,
    profile: LinkProfile = FAR,
    profiles: dict[int, LinkProfile] | None = None,
) -> None:
    """Run `body` over hosts that are on the network, serve an echo, and are not connected."""

    async def main() -> None:
        async with open_world(1, hosts, profile, profiles) as world:
            joined = [world.join(index) for index in range(hosts)]
            for host in joined:
                host.serve(PROTOCOL, echo, LIMITS)
            await body(world, joined)

    deterministic_run(main, seed=1)


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


async def link(a: MemoryTransport, b: MemoryTransport) -> None:
    await a.connect(b.addresses()[0])


async def ask(
    a: MemoryTransport, b: MemoryTransport, payload: bytes = b"x", timeout_s: float = 30.0
) -> bytes:
    return await a.request(
        b.peer_id, PROTOCOL, payload, timeout_s=timeout_s, response_bytes_max=1_000_000
    )


def accept(peer: PeerId, payload: bytes) -> bool:
    return True


def drain(channel: trio.MemoryReceiveChannel[GossipMessage]) -> list[bytes]:
    payloads = []
    while channel.statistics().current_buffer_used:
        payloads.append(channel.receive_nowait().payload)
    return payloads


# --- time ----------------------------------------------------------------------------------


def test_connecting_takes_round_trips_and_so_does_a_request() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        assert trio.current_time() == pytest.approx(HANDSHAKE_ROUND_TRIPS * 0.2)
        started_s = trio.current_time()
        await ask(a, b)
        assert trio.current_time() - started_s == pytest.approx(0.2)

    check(body, 2)


def test_gossip_takes_its_latency_on_each_hop() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b, c = hosts
        await link(a, b)
        await link(b, c)
        channels = [await host.subscribe(TOPIC, accept) for host in hosts]
        started_s = trio.current_time()
        await a.publish(TOPIC, b"news")
        await channels[2].receive()
        assert trio.current_time() - started_s == pytest.approx(0.2)

    check(body, 3)


def test_requests_share_the_uplink_of_their_host() -> None:
    slow = LinkProfile(latency_s=0.1, up_bytes_per_s=1000.0)

    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b, c = hosts
        await link(a, b)
        await link(a, c)
        started_s = trio.current_time()
        ended_s = []

        async def one(other: MemoryTransport) -> None:
            await ask(a, other, bytes(2000 - OVERHEAD_BYTES))
            ended_s.append(trio.current_time() - started_s)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, b)
            nursery.start_soon(one, c)
        assert ended_s == pytest.approx([2.2, 4.2], abs=0.01)

    check(body, 3, LinkProfile(latency_s=0.1), {0: slow})


@pytest.mark.parametrize(
    ("piece_bytes", "ended_s"), [(None, [2.2, 4.2, 6.2]), (500, [3.94, 4.2, 6.2])]
)
def test_answers_to_several_peers_leave_in_turns_or_together(
    piece_bytes: int | None, ended_s: list[float]
) -> None:
    """Two answers to one peer and one to another: where connections take turns in pieces, the
    first answer to each shares the uplink, and the second of one peer follows the first."""
    slow = LinkProfile(latency_s=0.1, up_bytes_per_s=1000.0)

    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b, c = hosts
        world.network.piece_bytes = piece_bytes
        left_s: list[float] = []

        async def give(peer: PeerId, payload: bytes) -> bytes:
            pieces = 2000 // piece_bytes if piece_bytes else 1
            return bytes(2000 - pieces * OVERHEAD_BYTES)

        def left(peer: PeerId, size_bytes: int) -> None:
            left_s.append(trio.current_time() - started_s)

        a.serve("/test/give/1.0.0", give, LIMITS, left)
        await link(b, a)
        await link(c, a)
        started_s = trio.current_time()
        got_s: list[float] = []

        async def take(peer: MemoryTransport) -> None:
            await peer.request(
                a.peer_id, "/test/give/1.0.0", b"", timeout_s=60.0, response_bytes_max=10_000
            )
            got_s.append(trio.current_time() - started_s)

        async with trio.open_nursery() as nursery:
            for peer in (b, c, b):
                nursery.start_soon(take, peer)
        assert sorted(got_s) == pytest.approx(ended_s, abs=0.01)
        assert left_s == pytest.approx([each - 0.1 for each in ended_s], abs=0.01)

    check(body, 3, LinkProfile(latency_s=0.1), {0: slow})


# --- loss ----------------------------------------------------------------------------------


def test_lost_gossip_stays_lost_and_duplicates_are_delivered_once() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        channel = await b.subscribe(TOPIC, accept)
        sent = [b"%d" % number for number in range(500)]
        for payload in sent:
            await a.publish(TOPIC, payload)
            await trio.sleep(0.2)
        got = drain(channel)
        assert got == [payload for payload in sent if payload in got]  # each once, in order
        assert len(got) / len(sent) == pytest.approx(0.8, abs=0.05)
        assert b.counters.messages_in[TOPIC] == len(got)

    check(body, 2, LinkProfile(latency_s=0.1, loss=0.2, duplication=0.3))


def test_no_request_is_lost_but_some_are_late() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        taken_s = []
        for number in range(100):
            started_s = trio.current_time()
            assert await ask(a, b, b"%d" % number) == b"%d" % number
            taken_s.append(trio.current_time() - started_s)
        assert min(taken_s) == pytest.approx(0.2)
        assert 20 <= sum(each > 0.5 for each in taken_s) <= 60

    check(body, 2, LinkProfile(latency_s=0.1, loss=0.2))


def test_gossip_in_flight_dies_with_its_connection() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        channel = await b.subscribe(TOPIC, accept)
        await a.publish(TOPIC, b"gone")
        await a.disconnect(b.peer_id)
        await trio.sleep(1.0)
        assert drain(channel) == []

    check(body, 2)


def test_what_links_lost_is_asked_for_by_whoever_wants_it() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        for at, host in enumerate(hosts):
            for other in hosts[:at]:
                await link(host, other)
        asked: list[int] = []

        def asks_not() -> bool:
            asked.append(1)
            return False

        channels = [await host.subscribe(TOPIC, accept) for host in hosts[:-1]]
        never = await hosts[-1].subscribe(TOPIC, accept, asks=asks_not)
        for number in range(20):
            await hosts[0].publish(TOPIC, b"%d" % number)
        await trio.sleep(5.0)
        heard = [len(drain(channel)) for channel in channels[1:]]
        assert asked
        assert 0 < len(drain(never)) < min(heard)  # what the mesh brings is heard all the same

    check(body, 16, LinkProfile(latency_s=0.01, loss=0.7))


# --- partitions ----------------------------------------------------------------------------


def test_a_partition_stops_everything_until_it_heals() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b, c = hosts
        await link(a, b)
        await link(a, c)
        channel = await b.subscribe(TOPIC, accept)
        world.network.partition([a.peer_id, c.peer_id], [b.peer_id])
        assert a.peers() == tuple(sorted([b.peer_id, c.peer_id]))
        with pytest.raises(RequestTimeout):
            await ask(a, b, timeout_s=5.0)
        with pytest.raises(PeerUnreachable, match="within"):
            await c.connect(b.addresses()[0], timeout_s=5.0)
        await a.publish(TOPIC, b"lost")
        assert await ask(a, c, b"same side") == b"same side"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, a, b)  # stalls, then comes through
            await trio.sleep(2.0)
            world.network.heal()
        await a.publish(TOPIC, b"after")
        await trio.sleep(1.0)
        assert drain(channel) == [b"after"]
        await c.connect(b.addresses()[0], timeout_s=5.0)

    check(body, 3)


def test_a_partition_may_be_one_way() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        channels = [await host.subscribe(TOPIC, accept) for host in hosts]
        world.network.partition([a.peer_id], [b.peer_id], one_way=True)
        await a.publish(TOPIC, b"from a")
        await b.publish(TOPIC, b"from b")
        await trio.sleep(1.0)
        assert [drain(channel) for channel in channels] == [[b"from b"], []]
        for asker, other in ((a, b), (b, a)):  # an answer needs both ways
            with pytest.raises(RequestTimeout):
                await ask(asker, other, timeout_s=5.0)

    check(body, 2)


def test_requests_given_up_in_a_partition_leave_nothing_behind() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        tasks = len(world.network._nursery.child_tasks)
        world.network.partition([a.peer_id], [b.peer_id])
        for _ in range(20):
            with pytest.raises(RequestTimeout):
                await ask(a, b, timeout_s=1.0)
        await trio.sleep(0.1)
        assert len(world.network._nursery.child_tasks) == tasks

    check(body, 2)


# --- crashes -------------------------------------------------------------------------------


def test_a_crash_ends_connections_requests_handlers_and_subscriptions() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        ended = []

        async def hold(peer: PeerId, payload: bytes) -> bytes:
            try:
                await trio.sleep_forever()
            finally:
                ended.append(peer)
            raise AssertionError

        b.serve("/test/hold", hold, LIMITS)
        await link(a, b)
        channel = await b.subscribe(TOPIC, accept)

        async def crash_soon() -> None:
            await trio.sleep(1.0)
            world.crash(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(crash_soon)
            with pytest.raises(PeerUnreachable):
                await a.request(b.peer_id, "/test/hold", b"", timeout_s=9.0, response_bytes_max=9)
        assert trio.current_time() < 3.0
        assert ended == [a.peer_id]
        assert a.peers() == b.peers() == ()
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()
        with pytest.raises(PeerUnreachable):
            await link(a, b)
        with pytest.raises(PeerUnreachable):
            await link(b, a)

    check(body, 2)


def test_a_restarted_host_has_its_address_and_nothing_else() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        with pytest.raises(LocalProtocolError, match="already"):
            world.join(1)
        world.crash(1)
        again = world.network.restart(b.peer_id)
        assert again.addresses() == b.addresses()
        assert not again.counters.messages_out
        await link(a, again)
        again.serve(PROTOCOL, echo, LIMITS)
        assert await ask(a, again, b"back") == b"back"
        assert b.peers() == ()
        channel = await again.subscribe(TOPIC, accept)
        await a.publish(TOPIC, b"news")
        with trio.fail_after(1.0):
            assert (await channel.receive()).payload == b"news"

    check(body, 2)


def test_leaving_the_context_leaves_the_network() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        async with b:
            assert await ask(a, b) == b"x"
        assert a.peers() == ()

    check(body, 2)


def test_nobody_at_an_address_is_a_timeout() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        with pytest.raises(PeerUnreachable, match="within"):
            await a.connect(f"/memory/77/p2p/{b.peer_id}", timeout_s=4.0)
        assert trio.current_time() == pytest.approx(4.0)

    check(body, 2)


# --- limits --------------------------------------------------------------------------------


def test_gossip_in_flight_on_a_link_is_bounded() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        channel = await b.subscribe(TOPIC, accept)
        for number in range(LINK_GOSSIP_MAX + 9):
            await a.publish(TOPIC, b"%d" % number)
        await trio.sleep(1.0)
        assert len(drain(channel)) == LINK_GOSSIP_MAX
        assert a.counters.dropped[TOPIC] == 9
        await a.publish(TOPIC, b"free again")
        await trio.sleep(1.0)
        assert drain(channel) == [b"free again"]

    check(body, 2)


def test_what_a_host_remembers_of_messages_is_bounded() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        (a,) = hosts
        for _ in range(SEEN_MESSAGES_MAX + 5):
            await a.publish(TOPIC, b"")
        assert len(a.gossip.seen) == SEEN_MESSAGES_MAX

    check(body, 1)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_subscriber_that_stopped_reading_is_no_error(is_open: bool) -> None:
    """What does not fit into its buffer is counted; who closed the channel wants none."""

    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        await link(a, b)
        channel = await b.subscribe(TOPIC, accept)
        if not is_open:
            channel.close()
        for number in range(GOSSIP_QUEUE_MAX + 1):
            await a.publish(TOPIC, b"news %d" % number)
            await trio.sleep(1.0)
        assert b.counters.dropped[TOPIC] == int(is_open)

    check(body, 2)


def test_an_answer_over_the_servers_own_limit_is_our_bug() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        a, b = hosts
        b.serve("/test/small", echo, ServeLimits(100, 5))
        await link(a, b)
        await a.request(b.peer_id, "/test/small", b"much more", timeout_s=9, response_bytes_max=99)

    with pytest.raises(BaseExceptionGroup) as info:
        check(body, 2)
    assert info.group_contains(LocalProtocolError, match="/test/small")


def test_the_hash_of_the_trace_covers_all_events() -> None:
    async def body(world: SimulatedWorld, hosts: Sequence[MemoryTransport]) -> None:
        before = world.trace_hash
        for number in range(5):
            world.record(f"event {number}")
        assert world.events == 5 + 1  # the host joined
        assert world.trace_hash != before

    check(body, 1)
