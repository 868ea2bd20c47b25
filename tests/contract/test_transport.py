"""What every transport must do, run over each maker in `transport_makers`."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio

from swarm.errors import (
    ConfigError,
    LocalProtocolError,
    NotServed,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    RequestTimeout,
)
from swarm.identity import Identity, PeerId
from swarm.transport.base import (
    GOSSIP_BYTES_MAX,
    GOSSIP_QUEUE_MAX,
    GossipMessage,
    ServeLimits,
    Transport,
)
from tests.contract.transport_makers import TransportMaker
from tests.contract.transport_support import (
    LIMITS,
    MIB,
    PROTOCOL,
    TOPIC,
    accept,
    ask,
    check,
    echo,
    identities,
    link,
    until,
)
from tests.support import run

# --- connections ---------------------------------------------------------------------------


def test_connection_is_seen_by_both_sides(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        assert a.peers() == ()
        assert b.peers() == ()
        assert await a.connect(b.addresses()[0]) == b.peer_id
        assert a.peers() == (b.peer_id,)
        await until(lambda: b.peers() == (a.peer_id,))
        assert await a.connect(b.addresses()[0]) == b.peer_id  # again: nothing happens
        assert a.peers() == (b.peer_id,)

    check(maker, 2, body)


def test_peers_are_in_order_of_their_ids(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        hub, *others = nodes
        for other in others:
            await link(other, hub)
        assert hub.peers() == tuple(sorted(other.peer_id for other in others))

    check(maker, 4, body)


def test_addresses_end_in_the_peer_id(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        for node in nodes:
            assert node.addresses()
            assert all(text.endswith(f"/p2p/{node.peer_id}") for text in node.addresses())
            assert len(set(node.addresses())) == len(node.addresses())
        assert [node.peer_id for node in nodes] == [i.peer_id for i in identities(2)]

    check(maker, 2, body)


def test_another_peer_at_the_address_is_unreachable(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        stranger = Identity(b"s" * 32).peer_id
        where, _, _ = b.addresses()[0].rpartition("/p2p/")
        with pytest.raises(PeerUnreachable):
            await a.connect(f"{where}/p2p/{stranger}")
        await until(lambda: a.peers() == () and b.peers() == ())
        await link(a, b)

    check(maker, 2, body)


def test_own_address_is_unreachable(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        (a,) = nodes
        with pytest.raises(PeerUnreachable, match="own"):
            await a.connect(a.addresses()[0])

    check(maker, 1, body)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/tcp/4001/p2p/nonsense"]
)
def test_bad_address_text_is_a_config_error(maker: TransportMaker, text: str) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        with pytest.raises(ConfigError):
            await nodes[0].connect(text)

    check(maker, 1, body)


def test_who_serves_is_told_when_each_answer_has_left(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        left: list[tuple[PeerId, int]] = []

        async def answer(peer: PeerId, payload: bytes) -> bytes:
            if payload == b"no":
                raise RequestRefused("no")
            return payload

        b.serve(PROTOCOL, answer, LIMITS, lambda peer, size_bytes: left.append((peer, size_bytes)))
        await link(a, b)
        await ask(a, b, b"x" * MIB)
        await until(lambda: left == [(a.peer_id, MIB)])
        with pytest.raises(RequestRefused):  # no answer, so none that leaves
            await ask(a, b, b"no")
        await ask(a, b, b"y")
        await until(lambda: left == [(a.peer_id, MIB), (a.peer_id, 1)])

    check(maker, 2, body)


def test_disconnect_is_seen_by_both_sides(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        b.serve(PROTOCOL, echo, LIMITS)
        await link(a, b)
        await a.disconnect(b.peer_id)
        await until(lambda: a.peers() == () and b.peers() == ())
        await a.disconnect(b.peer_id)  # again: nothing happens
        with pytest.raises(PeerUnreachable):
            await ask(a, b)
        await link(a, b)
        assert await ask(a, b, b"back") == b"back"

    check(maker, 2, body)


@pytest.mark.parametrize(
    ("asker", "asked", "connects"),
    [
        (b"k" * 32, b"k" * 32, True),
        (b"k" * 32, b"K" * 32, False),
        (None, b"k" * 32, False),
        (b"k" * 32, None, False),
    ],
    ids=["same key", "wrong key", "stranger comes", "member comes"],
)
def test_only_the_same_network_key_connects(
    maker: TransportMaker, asker: bytes | None, asked: bytes | None, connects: bool
) -> None:
    async def main() -> None:
        async with maker.open(identities(3), [asker, asked, asked]) as (a, b, member):
            b.serve(PROTOCOL, echo, LIMITS)
            if connects:
                await link(a, b)
                assert await ask(a, b, b"hello") == b"hello"
            else:
                with pytest.raises(PeerUnreachable):
                    await a.connect(b.addresses()[0])
                assert a.peers() == b.peers() == ()
            await link(member, b)
            assert await ask(member, b, b"still served") == b"still served"

    run(main, virtual=maker.virtual)


# --- requests ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, MIB])
def test_request_and_response(maker: TransportMaker, size: int) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        asked_by = []

        async def reverse(peer: PeerId, payload: bytes) -> bytes:
            asked_by.append(peer)
            return payload[::-1]

        b.serve(PROTOCOL, reverse, LIMITS)
        await link(a, b)
        payload = (bytes(range(256)) * (size // 256 + 1))[:size]
        assert await ask(a, b, payload) == payload[::-1]
        assert asked_by == [a.peer_id]

    check(maker, 2, body)


def test_both_sides_of_a_connection_may_ask(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        a.serve(PROTOCOL, echo, LIMITS)
        b.serve(PROTOCOL, echo, LIMITS)
        await link(a, b)
        assert await ask(b, a, b"from b") == b"from b"
        assert await ask(a, b, b"from a") == b"from a"

    check(maker, 2, body)


def test_request_to_a_peer_that_is_not_connected(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        with pytest.raises(PeerUnreachable):
            await ask(nodes[0], nodes[1])

    check(maker, 2, body)


def test_request_over_the_limit_is_refused(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        b.serve(PROTOCOL, echo, ServeLimits(request_bytes_max=100, response_bytes_max=100))
        await link(a, b)
        for size in (101, 4 * MIB):
            with pytest.raises(RequestRefused):
                await ask(a, b, bytes(size))
        assert b.counters.refused[PROTOCOL] == 2
        assert await ask(a, b, bytes(100)) == bytes(100)

    check(maker, 2, body)


def test_response_over_the_limit_is_the_peers_fault(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        b.serve(PROTOCOL, echo, LIMITS)
        await link(a, b)
        for size in (101, MIB):
            with pytest.raises(RemoteProtocolError) as info:
                await a.request(
                    b.peer_id, PROTOCOL, bytes(size), timeout_s=10.0, response_bytes_max=100
                )
            assert info.value.reason is Reject.OVERSIZE
        assert await ask(a, b, b"next") == b"next"

    check(maker, 2, body)


@pytest.mark.parametrize("payload", [b"", bytes(300), b"\xff" * 300])
def test_unknown_protocol_is_refused_and_no_offence(maker: TransportMaker, payload: bytes) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        offences: list[object] = []
        b.report_to(lambda *offence: offences.append(offence))
        await link(a, b)
        with pytest.raises(NotServed):
            await ask(a, b, payload)
        b.serve(PROTOCOL, echo, LIMITS)
        assert await ask(a, b, b"now") == b"now"
        assert not offences  # peers of another release know other protocols

    check(maker, 2, body)


@pytest.mark.parametrize(
    "error", [RequestRefused("not now"), RemoteProtocolError(Reject.MALFORMED, "no message")]
)
def test_a_handler_may_refuse(maker: TransportMaker, error: Exception) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes

        async def refuse(peer: PeerId, payload: bytes) -> bytes:
            raise error

        b.serve(PROTOCOL, refuse, LIMITS)
        await link(a, b)
        for _ in range(LIMITS.concurrent_per_peer_max + 1):  # a refusal gives its slot back
            with pytest.raises(RequestRefused):
                await ask(a, b)
        assert a.peers() == (b.peer_id,)

    check(maker, 2, body)


class HandlerBug(OSError):
    pass


def test_a_bug_in_a_handler_ends_the_transport(maker: TransportMaker) -> None:
    async def main() -> None:
        async with maker.open(identities(2)) as (a, b):

            async def broken(peer: PeerId, payload: bytes) -> bytes:
                raise HandlerBug("broken pipe")  # as networking code tends to swallow

            b.serve(PROTOCOL, broken, LIMITS)
            await link(a, b)
            with pytest.raises((RequestRefused, RequestTimeout, PeerUnreachable)):
                await ask(a, b)
            await trio.sleep(5.0)

    with pytest.raises(BaseExceptionGroup) as info:
        run(main, virtual=maker.virtual)
    assert info.group_contains(HandlerBug)


def test_timeout_and_the_next_request_works(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        ended = trio.Event()

        async def slow_once(peer: PeerId, payload: bytes) -> bytes:
            if payload == b"slow":
                try:
                    await trio.sleep_forever()
                finally:
                    ended.set()
            return payload

        b.serve(PROTOCOL, slow_once, ServeLimits(100, 100, timeout_s=1.0))
        await link(a, b)
        started_s = trio.current_time()
        with pytest.raises(RequestTimeout):  # by the server's limit it would be refused instead
            await ask(a, b, b"slow", timeout_s=0.2)
        assert trio.current_time() - started_s >= 0.2
        assert await ask(a, b, b"next") == b"next"
        with trio.fail_after(20.0):
            await ended.wait()  # the server gives up on its own limit

    check(maker, 2, body)


def test_a_handler_over_its_time_is_refused(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes

        async def stuck(peer: PeerId, payload: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        b.serve(PROTOCOL, stuck, ServeLimits(100, 100, timeout_s=0.2))
        await link(a, b)
        with pytest.raises(RequestRefused):
            await ask(a, b)
        assert b.counters.refused[PROTOCOL] == 1

    check(maker, 2, body)


@pytest.mark.parametrize("size", [10, MIB])
def test_cancel_mid_request_and_the_next_works(maker: TransportMaker, size: int) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes

        async def wait_if_asked(peer: PeerId, payload: bytes) -> bytes:
            if payload != b"next":
                await trio.sleep(0.02)
            return payload

        b.serve(PROTOCOL, wait_if_asked, ServeLimits(MIB, MIB, concurrent_per_peer_max=32))
        await link(a, b)
        for step in range(10):
            with trio.move_on_after(0.002 * step):
                await ask(a, b, bytes(size))
        await trio.sleep(0.2)
        assert await ask(a, b, b"next") == b"next"
        assert a.peers() == (b.peer_id,)

    check(maker, 2, body)


def test_requests_over_the_limit_per_peer_are_refused(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b, c = nodes
        await check_concurrency(a, [b, b, b], concurrent_max=32, concurrent_per_peer_max=2)
        await check_free_again(a, [b, b])
        await check_free_again(a, [c])

    check(maker, 3, body)


def test_requests_over_the_limit_of_all_are_refused(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b, c = nodes
        await check_concurrency(a, [b, c, b], concurrent_max=2, concurrent_per_peer_max=2)
        await check_free_again(a, [b, c])

    check(maker, 3, body)


async def check_concurrency(
    server: Transport, askers: list[Transport], concurrent_max: int, concurrent_per_peer_max: int
) -> None:
    """All askers but the last one are served at a time; the last one is refused at once."""
    release = trio.Event()
    running = 0

    async def hold(peer: PeerId, payload: bytes) -> bytes:
        nonlocal running
        running += 1
        await release.wait()
        return payload

    server.serve(PROTOCOL, hold, ServeLimits(100, 100, concurrent_max, concurrent_per_peer_max))
    for asker in set(askers):
        await link(asker, server)
    answers = []

    async def one(asker: Transport) -> None:
        answers.append(await ask(asker, server, b"held"))

    async with trio.open_nursery() as nursery:
        for asker in askers[:-1]:
            nursery.start_soon(one, asker)
        await until(lambda: running == len(askers) - 1)
        with pytest.raises(RequestRefused):
            await ask(askers[-1], server, timeout_s=1.0)
        assert server.counters.refused[PROTOCOL] == 1
        release.set()
    assert answers == [b"held"] * (len(askers) - 1)


async def check_free_again(server: Transport, askers: list[Transport]) -> None:
    for asker in askers:
        if server.peer_id not in asker.peers():
            await link(asker, server)
        assert await ask(asker, server, b"free") == b"free"


# --- gossip --------------------------------------------------------------------------------


async def warm_up(
    publisher: Transport, channels: Sequence[trio.MemoryReceiveChannel[GossipMessage]]
) -> None:
    """Publish until a payload has reached every channel, then empty the channels."""
    waiting = list(channels)
    with trio.fail_after(20.0):
        for i in range(1000):
            await publisher.publish(TOPIC, b"warm %d" % i)
            await trio.sleep(0.1)
            waiting = [c for c in waiting if c.statistics().current_buffer_used == 0]
            if not waiting:
                break
    await trio.sleep(0.5)
    for channel in channels:
        drain(channel)


def drain(channel: trio.MemoryReceiveChannel[GossipMessage]) -> list[GossipMessage]:
    messages = []
    try:
        while True:
            messages.append(channel.receive_nowait())
    except trio.WouldBlock:
        return messages


def test_gossip_reaches_a_line_of_five_once_each(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        for left, right in pairwise(nodes):
            await link(left, right)
        channels = [await node.subscribe(TOPIC, accept) for node in nodes]
        await warm_up(nodes[0], channels[1:])
        drain(channels[0])
        payloads = [b"one", b"two", b"", bytes(GOSSIP_BYTES_MAX)]
        for payload in payloads:
            await nodes[0].publish(TOPIC, payload)
        await nodes[2].publish(TOPIC, b"middle")
        await until(
            lambda: (
                all(c.statistics().current_buffer_used >= 4 for c in channels[1:])
                and channels[0].statistics().current_buffer_used >= 1
            )
        )
        await trio.sleep(0.5)  # time for duplicates to show
        got = [drain(channel) for channel in channels]
        assert [m.payload for m in got[0]] == [b"middle"]
        assert sorted(m.payload for m in got[2]) == sorted(payloads)
        for i in (1, 3, 4):
            assert sorted(m.payload for m in got[i]) == sorted([*payloads, b"middle"])
        assert {m.received_from for m in got[4]} == {nodes[3].peer_id}  # who forwarded it

    check(maker, 5, body)


def test_gossip_in_a_full_mesh_is_delivered_once(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        for i, node in enumerate(nodes):
            for other in nodes[i + 1 :]:
                await link(node, other)
        channels = [await node.subscribe(TOPIC, accept) for node in nodes]
        await warm_up(nodes[0], channels[1:])
        payloads = [b"%d" % i for i in range(20)]
        for payload in payloads:
            await nodes[0].publish(TOPIC, payload)
        await until(lambda: all(c.statistics().current_buffer_used >= 20 for c in channels[1:]))
        await trio.sleep(0.5)  # time for duplicates to show
        assert drain(channels[0]) == []
        for channel in channels[1:]:
            assert sorted(m.payload for m in drain(channel)) == sorted(payloads)

    check(maker, 4, body)


def test_equal_payloads_are_delivered_each_time(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        await link(a, b)
        await a.subscribe(TOPIC, accept)
        channel = await b.subscribe(TOPIC, accept)
        await warm_up(a, [channel])
        for _ in range(3):
            await a.publish(TOPIC, b"same")
        await until(lambda: channel.statistics().current_buffer_used >= 3)
        await trio.sleep(0.2)
        assert [m.payload for m in drain(channel)] == [b"same"] * 3

    check(maker, 2, body)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_false_validator_stops_forwarding(maker: TransportMaker, is_open: bool) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b, c = nodes
        await link(a, b)
        await link(b, c)
        judged = []

        def judge(peer: PeerId, payload: bytes) -> bool:
            judged.append((peer, payload))
            return not payload.startswith(b"bad")

        await a.subscribe(TOPIC, accept)
        middle = await b.subscribe(TOPIC, judge)
        end = await c.subscribe(TOPIC, accept)
        await warm_up(a, [middle, end])
        if not is_open:
            middle.close()
        for payload in (b"bad 1", b"good", b"bad 2"):
            await a.publish(TOPIC, payload)
        await until(lambda: end.statistics().current_buffer_used >= 1)
        await until(lambda: (a.peer_id, b"bad 2") in judged)
        await trio.sleep(1.5)  # past a heartbeat, so that lazy gossip has its chance
        assert b.counters.dropped[TOPIC] == 0
        if is_open:
            assert [m.payload for m in drain(middle)] == [b"good"]
        assert [m.payload for m in drain(end)] == [b"good"]

    check(maker, 3, body)


def test_a_message_turned_away_from_one_peer_comes_from_another(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b, c = nodes
        for one, other in ((a, b), (b, c), (a, c)):
            await link(one, other)
        for each in (a, b):
            await each.subscribe(TOPIC, accept)
        end = await c.subscribe(TOPIC, accept, lambda forwarder: forwarder != a.peer_id)
        await warm_up(a, [end])
        for i in range(5):
            await a.publish(TOPIC, b"%d" % i)
        await until(lambda: end.statistics().current_buffer_used == 5)
        assert {m.received_from for m in drain(end)} == {b.peer_id}
        assert c.counters.refused[TOPIC] > 0

    check(maker, 3, body)


def test_full_subscription_queue_drops_and_counts(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        await link(a, b)
        await a.subscribe(TOPIC, accept)
        channel = await b.subscribe(TOPIC, accept)
        await warm_up(a, [channel])
        before = b.counters.messages_in[TOPIC]
        extra = 20
        for i in range(GOSSIP_QUEUE_MAX + extra):
            await a.publish(TOPIC, b"%d" % i)
            if i % 128 == 127:  # no more in flight than any link's own queue holds
                await until(lambda i=i: b.counters.messages_in[TOPIC] == before + i + 1)
        await until(lambda: b.counters.messages_in[TOPIC] == before + GOSSIP_QUEUE_MAX + extra)
        assert b.counters.dropped[TOPIC] == extra
        assert len(drain(channel)) == GOSSIP_QUEUE_MAX

    check(maker, 2, body)


def test_oversize_publish_is_our_fault(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        (a,) = nodes
        await a.subscribe(TOPIC, accept)
        with pytest.raises(LocalProtocolError):
            await a.publish(TOPIC, bytes(GOSSIP_BYTES_MAX + 1))

    check(maker, 1, body)


# --- counters ------------------------------------------------------------------------------


def test_counters_of_requests_add_up(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes

        async def double(peer: PeerId, payload: bytes) -> bytes:
            return payload * 2

        b.serve(PROTOCOL, double, LIMITS)
        await link(a, b)
        for size in (10, 20):
            await ask(a, b, bytes(size))
        # A server counts an answer once it has sent all of it; the asker may have it before.
        await until(lambda: b.counters.messages_out[PROTOCOL] == 2)
        assert (a.counters.bytes_out[PROTOCOL], a.counters.bytes_in[PROTOCOL]) == (30, 60)
        assert (b.counters.bytes_in[PROTOCOL], b.counters.bytes_out[PROTOCOL]) == (30, 60)
        for node in nodes:
            assert node.counters.messages_in[PROTOCOL] == 2
            assert node.counters.messages_out[PROTOCOL] == 2
            assert not node.counters.refused

    check(maker, 2, body)


def test_counters_of_gossip_add_up(maker: TransportMaker) -> None:
    """A publish counts once at its publisher, whatever the number of its links; each payload
    counts once at a receiver, when it comes to the validator."""

    async def body(nodes: Sequence[Transport]) -> None:
        a, b, c = nodes
        await link(a, b)
        await link(a, c)
        channels = [await node.subscribe(TOPIC, accept) for node in nodes]
        await warm_up(a, channels[1:])
        before = [(n.counters.bytes_in[TOPIC], n.counters.messages_in[TOPIC]) for n in nodes]
        out = a.counters.bytes_out[TOPIC], a.counters.messages_out[TOPIC]
        for size in (10, 20):
            await a.publish(TOPIC, bytes(size))
        await until(lambda: all(c.statistics().current_buffer_used == 2 for c in channels[1:]))
        after = [(n.counters.bytes_in[TOPIC], n.counters.messages_in[TOPIC]) for n in nodes]
        assert after == [
            (had[0] + got[0], had[1] + got[1])
            for had, got in zip(before, [(0, 0), (30, 2), (30, 2)], strict=True)
        ]
        now = a.counters.bytes_out[TOPIC], a.counters.messages_out[TOPIC]
        assert now == (out[0] + 30, out[1] + 2)

    check(maker, 3, body)


def test_bytes_are_counted_by_peer(maker: TransportMaker) -> None:
    """Both ends of a request agree, and nobody else's account moves."""

    async def body(nodes: Sequence[Transport]) -> None:
        a, b, c = nodes

        async def double(peer: PeerId, payload: bytes) -> bytes:
            return payload * 2

        b.serve(PROTOCOL, double, LIMITS)
        await link(a, b)
        await link(c, b)
        await ask(a, b, bytes(10))
        await ask(c, b, bytes(700))
        await until(lambda: b.counters.messages_out[PROTOCOL] == 2)

        def seen(by: Transport, of: Transport) -> tuple[int, int]:
            account = by.counters.by_peer.of(of.peer_id)
            return account.bytes_in, account.bytes_out

        assert (seen(a, b), seen(c, b)) == ((20, 10), (1400, 700))
        assert (seen(b, a), seen(b, c)) == ((10, 20), (700, 1400))
        assert seen(a, c) == (0, 0)
        assert [peer for peer, _ in b.counters.by_peer.busiest(1)] == [c.peer_id]

    check(maker, 3, body)


def test_gossip_is_counted_by_who_forwarded_it(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        await link(a, b)
        channels = [await node.subscribe(TOPIC, accept) for node in nodes]
        await warm_up(a, channels[1:])
        account = b.counters.by_peer.of(a.peer_id)
        before = account.bytes_in, account.bytes_out
        await a.publish(TOPIC, bytes(300))
        await until(lambda: channels[1].statistics().current_buffer_used == 1)
        account = b.counters.by_peer.of(a.peer_id)
        assert (account.bytes_in, account.bytes_out) == (before[0] + 300, before[1])
        assert a.counters.by_peer.of(b.peer_id).bytes_out == 0

    check(maker, 2, body)
