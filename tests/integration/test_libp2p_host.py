"""What only the real transport can show: sockets, processes, and foreign bytes."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX
from libp2p.utils import encode_delim

from swarm.errors import (
    ConfigError,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    RequestTimeout,
    SwarmError,
)
from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p import yamux
from swarm.transport.libp2p.gossipsub import MESHSUB_PROTOCOL, MESSAGES_PER_RPC_MAX
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
PROTOCOL = "/test/echo/1.0.0"
TOPIC = "/test/topic/1.0.0"
MIB = 1_048_576


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110  transports announce no changes
            await trio.sleep(0.01)


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


async def ask(
    a: Libp2pTransport, peer: PeerId, payload: bytes = b"x", timeout_s: float = 5.0
) -> bytes:
    return await a.request(peer, PROTOCOL, payload, timeout_s=timeout_s, response_bytes_max=8 * MIB)


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with (
        open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
        open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
    ):
        b.serve(PROTOCOL, echo, ServeLimits(8 * MIB, 8 * MIB))
        await a.connect(b.addresses()[0])
        await until(lambda: a.peer_id in b.peers())
        yield a, b


@asynccontextmanager
async def child() -> AsyncIterator[tuple[trio.Process, str]]:
    """Another process with a host, and its address."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.integration.libp2p_child"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        address = b""
        while not address.endswith(b"\n"):
            address += await process.stdout.receive_some(1000)
        yield process, address.decode().strip()
    finally:
        process.kill()
        await process.wait()
        await process.stdout.aclose()


# --- opening -------------------------------------------------------------------------------


async def opening(listen: list[str], announce: tuple[str, ...] = ()) -> tuple[str, ...]:
    async with open_libp2p(Identity(b"a" * 32), listen, announce) as node:
        return node.addresses()


@pytest.mark.parametrize(
    "listen",
    [
        [],
        ["nonsense"],
        ["/ip4/127.0.0.1"],
        ["/ip4/127.0.0.1/udp/0"],
        ["/ip4/127.0.0.1/udp/0/quic-v1"],
        ["/ip4/127.0.0.1/tcp/0/ws"],
        ["/ip4/127.0.0.1/tcp/70000"],
        ["/dns4/localhost/tcp/0"],
        ["/ip4/203.0.113.7/tcp/0"],  # nobody's: reserved for documentation
    ],
)
def test_bad_listen_address_is_one_line(listen: list[str]) -> None:
    with pytest.raises(ConfigError) as info:
        run(opening, listen)
    assert "\n" not in str(info.value)


def test_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            run(opening, [f"/ip4/127.0.0.1/tcp/{port}"])


def test_all_interfaces_are_expanded_loopback_last() -> None:
    announce = ("/dns4/node.example.org/tcp/4001",)
    addresses = run(opening, ["/ip4/0.0.0.0/tcp/0"], announce)
    peer = Identity(b"a" * 32).peer_id
    assert addresses[0] == f"/dns4/node.example.org/tcp/4001/p2p/{peer}"
    assert addresses[-1].startswith("/ip4/127.0.0.1/tcp/")
    assert not any("0.0.0.0" in address for address in addresses)
    assert all(address.endswith(f"/p2p/{peer}") for address in addresses)


def test_only_noise_and_yamux_are_offered() -> None:
    async def main() -> None:
        async with open_libp2p(Identity(b"a" * 32), LOOPBACK) as node:
            port = int(node.addresses()[0].split("/")[4])
            for protocol in ("/plaintext/2.0.0", "/secio/1.0.0", "/tls/1.0.0", "/noise"):
                async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                    hello = encode_delim(b"/multistream/1.0.0")
                    choice = encode_delim(protocol.encode())
                    await stream.send_all(hello + choice)
                    expected = choice if protocol == "/noise" else encode_delim(b"na")
                    got = b""
                    while len(got) < len(hello + expected):
                        got += await stream.receive_some(1000)
                    assert got == hello + expected

    run(main)


# --- peers that vanish, stall or lie ---------------------------------------------------------


def test_killed_peer_is_gone_within_seconds() -> None:
    async def main() -> None:
        async with open_libp2p(Identity(b"a" * 32), LOOPBACK) as a, child() as (process, address):
            peer = await a.connect(address)
            assert await ask(a, peer) == b"x"
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: a.peers() == (), timeout_s=2.0)
            with pytest.raises(PeerUnreachable):
                await ask(a, peer)
            await process.wait()  # while it dies, its port still takes connections and resets them
            with pytest.raises(PeerUnreachable, match=r"refused$"):  # and not how many tries failed
                await a.connect(address)

    run(main)


def test_stopped_peer_delays_nobody_and_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yamux, "PING_INTERVAL_S", 0.5)
    monkeypatch.setattr(yamux, "PING_TIMEOUT_S", 10.0)
    # where the socket is full, no ping is written: then that it takes nothing shows it
    monkeypatch.setattr(yamux, "WRITE_STALL_MAX_S", 10.0)

    async def main() -> None:
        async with open_libp2p(Identity(b"a" * 32), LOOPBACK) as a, child() as (process, address):
            peer = await a.connect(address)
            os.kill(process.pid, signal.SIGSTOP)
            started_s = trio.current_time()
            for _ in range(2):  # more than the socket holds: the writer itself is stuck
                with pytest.raises((RequestTimeout, PeerUnreachable)):
                    await ask(a, peer, bytes(8 * MIB), timeout_s=0.3)
            assert trio.current_time() - started_s < 8.0  # not as long as pings wait
            await until(lambda: a.peers() == (), timeout_s=30.0)

    run(main)


def test_two_nodes_under_one_key_harm_nobody() -> None:
    async def main() -> None:
        twin = Identity(b"t" * 32)
        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
            open_libp2p(twin, LOOPBACK) as one,
            open_libp2p(twin, LOOPBACK) as other,
        ):
            with pytest.raises(PeerUnreachable, match="own"):
                await one.connect(other.addresses()[0])
            received = await a.subscribe(TOPIC, lambda peer, payload: True)
            for node in (one, other):
                await node.subscribe(TOPIC, lambda peer, payload: True)
                node.serve(PROTOCOL, echo, ServeLimits(100, 100))
                await node.connect(a.addresses()[0])
            await until(lambda: a.peers() == (twin.peer_id,))
            for i in range(20):
                await one.publish(TOPIC, b"one %d" % i)
                await other.publish(TOPIC, b"other %d" % i)
                await a.publish(TOPIC, b"a %d" % i)
                assert await ask(a, twin.peer_id) == b"x"
                await trio.sleep(0.02)
            assert received.statistics().current_buffer_used > 0
            await other.disconnect(a.peer_id)
            await trio.sleep(0.3)
            assert await ask(a, twin.peer_id) == b"x"  # over the connection that is left

    run(main)


def gossips(a: Libp2pTransport, b: Libp2pTransport) -> bool:
    """Whether `a` has a gossip stream to `b` on a live connection."""
    stream = a._gossip.peers.get(b._id)
    return stream is not None and stream.muxed_conn.alive  # type: ignore[attr-defined, no-any-return]


def test_gossip_moves_to_the_connection_that_is_left() -> None:
    async def main() -> None:
        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
            open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
        ):
            to_a = await a.subscribe(TOPIC, lambda peer, payload: True)
            to_b = await b.subscribe(TOPIC, lambda peer, payload: True)
            async with trio.open_nursery() as nursery:  # each dials before it hears of the other
                nursery.start_soon(a.connect, b.addresses()[0])
                nursery.start_soon(b.connect, a.addresses()[0])
            connections = a._network.connections[b._id]
            assert len(connections) == 2
            await until(lambda: gossips(a, b) and gossips(b, a))
            carrier = a._gossip.peers[b._id].muxed_conn
            await next(c for c in connections if c.muxed_conn is carrier).close()
            await until(lambda: len(b._network.connections[a._id]) == 1)
            await until(lambda: gossips(a, b) and gossips(b, a))
            await a.publish(TOPIC, b"from a")
            await b.publish(TOPIC, b"from b")
            with trio.fail_after(3.0):
                assert (await to_b.receive()).payload == b"from a"
                assert (await to_a.receive()).payload == b"from b"

    run(main)


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "left"])
def test_a_peer_hears_of_a_topic_that_changed_while_its_stream_was_opened(
    joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        said = trio.Event()
        write = NetStream.write

        async def write_slowly(stream: NetStream, data: bytes) -> None:
            """What is said first says the topics; whoever says it goes on once they changed."""
            await write(stream, data)
            if stream.get_protocol() == MESHSUB_PROTOCOL:
                said.set()
                await trio.sleep(0.05)

        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
            open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
        ):
            if not joins:
                await a.subscribe(TOPIC, lambda *_: True)
            monkeypatch.setattr(NetStream, "write", write_slowly)
            await a.connect(b.addresses()[0])
            await said.wait()
            assert b._id not in a._gossip.peers, "the topics are to change before that"
            await (a.subscribe(TOPIC, lambda *_: True) if joins else a._gossip.unsubscribe(TOPIC))
            await until(lambda: b._id in a._gossip.peers)
            await until(lambda: (a._id in b._gossip.peer_topics.get(TOPIC, ())) == joins)

    run(main)


def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    async def main() -> None:
        async with pair():
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        run(main)


def test_restarted_publisher_is_heard_at_once() -> None:
    """Upstream numbers messages from the clock in seconds, and so takes new ones for old."""

    async def main() -> None:
        async with open_libp2p(Identity(b"a" * 32), LOOPBACK) as a:
            channel = await a.subscribe(TOPIC, lambda peer, payload: True)
            for life in range(2):
                async with open_libp2p(Identity(b"b" * 32), LOOPBACK) as b:
                    await b.subscribe(TOPIC, lambda peer, payload: True)
                    await b.connect(a.addresses()[0])
                    await until(lambda b=b: a._id in b._router.mesh[TOPIC])  # type: ignore[misc]
                    for i in range(50):
                        await b.publish(TOPIC, b"%d %d" % (life, i))
                    await until(
                        lambda n=50 * life + 50: channel.statistics().current_buffer_used == n  # type: ignore[misc]
                    )
                await until(lambda: not a.peers())

    run(main)


def test_early_refusal_arrives_with_its_reason() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            for _ in range(5):
                with pytest.raises(RequestRefused, match="over the limit"):
                    await ask(a, b.peer_id, bytes(20 * MIB))

    run(main)


def test_requests_leave_nothing_behind() -> None:
    """Neither streams nor places, whether answered, refused, cancelled or not served."""

    async def main() -> None:
        async with pair() as (a, b):

            async def picky(peer: PeerId, payload: bytes) -> bytes:
                raise RequestRefused("no")

            b.serve("/test/picky", picky, ServeLimits(100, 100))
            muxed = [
                a._network.connections[b._id][0].muxed_conn,
                b._network.connections[a._id][0].muxed_conn,
            ]
            await trio.sleep(0.2)
            before = [set(conn.streams) for conn in muxed]  # type: ignore[attr-defined]
            for i in range(60):
                await ask(a, b.peer_id, bytes(i))
                for protocol in ("/test/picky", "/test/nobody"):
                    with pytest.raises(RequestRefused):
                        await a.request(
                            b.peer_id, protocol, b"x", timeout_s=5.0, response_bytes_max=1
                        )
                with trio.move_on_after(0.0005 * i):
                    await ask(a, b.peer_id, bytes(MIB))
            await until(lambda: [set(conn.streams) for conn in muxed] == before)  # type: ignore[attr-defined]
            await until(lambda: not b._served[PROTOCOL].requests_by_peer)
            assert not b._served["/test/picky"].requests_by_peer

    run(main)


def test_an_rpc_full_of_bad_signatures_stops_nobody() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            await b.subscribe(TOPIC, lambda peer, payload: True)
            forged = [
                rpc_pb2.Message(
                    from_id=a._id.to_bytes(), seqno=i.to_bytes(8, "big"), data=b"x",
                    topicIDs=[TOPIC], signature=bytes(64),
                )
                for i in range(MESSAGES_PER_RPC_MAX)
            ]  # fmt: skip
            turns = 0

            async def others() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(others)
                await b._gossip._process_rpc(a._id, rpc_pb2.RPC(publish=forged))
                nursery.cancel_scope.cancel()
            assert turns > MESSAGES_PER_RPC_MAX // 2
            assert not b.counters.messages_in[TOPIC]

    run(main)


def test_of_a_huge_rpc_a_bounded_part_is_looked_at() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            await b.subscribe(TOPIC, lambda peer, payload: True)
            assert a._gossip.sign_key is not None
            signed = []
            for i in range(MESSAGES_PER_RPC_MAX + 50):
                message = rpc_pb2.Message(
                    from_id=a._id.to_bytes(), seqno=i.to_bytes(8, "big"), data=b"x",
                    topicIDs=[TOPIC],
                )  # fmt: skip
                unsigned = PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString()
                message.signature = a._gossip.sign_key.sign(unsigned)
                message.key = a._host.get_public_key().serialize()
                signed.append(message)
            await b._gossip._process_rpc(a._id, rpc_pb2.RPC(publish=signed))
            assert b.counters.messages_in[TOPIC] == MESSAGES_PER_RPC_MAX

    run(main)


@pytest.mark.parametrize("kind", ["dns", "dns4"])
def test_a_dns_name_is_dialled(kind: str) -> None:
    async def main() -> None:
        async with pair() as (_, b), open_libp2p(Identity(b"c" * 32), LOOPBACK) as node:
            address = b.addresses()[0].replace("/ip4/127.0.0.1/", f"/{kind}/localhost/")
            assert await node.connect(address) == b.peer_id
            assert await ask(node, b.peer_id) == b"x"

    run(main)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("nobody.invalid", PeerUnreachable),
        *((name, ConfigError) for name in ("x" * 64, "a..b", "-", "%", "[::1]")),
    ],
)
def test_a_wrong_dns_name_is_no_more_than_an_address_that_fails(
    name: str, error: type[SwarmError]
) -> None:
    async def main() -> None:
        async with open_libp2p(Identity(b"c" * 32), LOOPBACK) as node:
            peer = Identity(b"a" * 32).peer_id
            with pytest.raises(error) as info:
                await node.connect(f"/dns/{name}/tcp/4001/p2p/{peer}", timeout_s=5)
            assert "\n" not in str(info.value)

    run(main)


# --- foreign bytes ---------------------------------------------------------------------------

Attack = Callable[[Libp2pTransport, Libp2pTransport], Awaitable[None]]


async def garbage_on_gossip(a: Libp2pTransport, b: Libp2pTransport) -> None:
    draw = random.Random(1)
    for junk in (b"\xff" * 10, b"\x05hello", b"\x80\x80\x80\x80\x01", draw.randbytes(100_000)):
        stream = await a._host.new_stream(b._id, [MESHSUB_PROTOCOL])
        await stream.write(junk)
        await stream.close()


async def garbage_on_multistream(a: Libp2pTransport, b: Libp2pTransport) -> None:
    draw = random.Random(2)
    (conn,) = a._network.connections[b._id]
    for size in (1, 10, 1000, 100_000):
        stream = await conn.new_stream()
        await stream.write(draw.randbytes(size))
    stream = await conn.new_stream()
    await stream.write(encode_delim(b"\xff\xfe not text"))
    for protocol in ("/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"):
        stream = await a._host.new_stream(b._id, [TProtocol(protocol)])
        await stream.write(draw.randbytes(1000))
        await stream.close()


async def garbage_on_tcp(a: Libp2pTransport, b: Libp2pTransport) -> None:
    port = int(b.addresses()[0].split("/")[4])
    draw = random.Random(3)
    for size in (0, 1, 100, 100_000):
        async with await trio.open_tcp_stream("127.0.0.1", port) as tcp:
            with suppress(trio.BrokenResourceError):
                await tcp.send_all(draw.randbytes(size))


async def half_a_request(a: Libp2pTransport, b: Libp2pTransport) -> None:
    for body in (b"", b"\x00\x00", b"\x00\x00\x00\x10half", b"\xff\xff\xff\xff"):
        stream = await a._host.new_stream(b._id, [TProtocol(PROTOCOL)])
        await stream.write(body)
        await stream.reset()


async def many_streams(a: Libp2pTransport, b: Libp2pTransport) -> None:
    (conn,) = a._network.connections[b._id]
    for _ in range(250):
        await conn.new_stream()


@pytest.mark.parametrize(
    "attack",
    [garbage_on_gossip, garbage_on_multistream, garbage_on_tcp, half_a_request, many_streams],
)
def test_foreign_bytes_end_at_most_their_stream(attack: Attack) -> None:
    async def main() -> None:
        async with pair() as (a, b), open_libp2p(Identity(b"c" * 32), LOOPBACK) as honest:
            await b.subscribe(TOPIC, lambda peer, payload: True)
            await attack(a, b)
            await trio.sleep(0.2)
            await honest.connect(b.addresses()[0])
            assert await ask(honest, b.peer_id, b"served on") == b"served on"

    run(main)


async def answer_with(raw: bytes) -> None:
    """Ask a peer that answers a request with these bytes."""
    async with pair() as (a, b):

        async def lie(stream: object) -> None:
            await stream.write(raw)  # type: ignore[attr-defined]
            await stream.close()  # type: ignore[attr-defined]

        b._host.set_stream_handler(TProtocol("/test/lie"), lie)
        await a.request(b.peer_id, "/test/lie", b"x", timeout_s=3.0, response_bytes_max=100)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", Reject.MALFORMED),
        (b"\x00\x00", Reject.MALFORMED),
        (b"\x00\x00\x00\x00\x10short", Reject.MALFORMED),
        (b"\x07\x00\x00\x00\x00", Reject.MALFORMED),
        (b"\x00\xff\xff\xff\xff", Reject.OVERSIZE),
    ],
)
def test_malformed_answer_is_the_peers_fault(raw: bytes, reason: Reject) -> None:
    with pytest.raises(RemoteProtocolError) as info:
        run(answer_with, raw)
    assert info.value.reason is reason


def test_refusal_text_is_bounded_and_decoded() -> None:
    with pytest.raises(RequestRefused):
        run(answer_with, b"\x01\x00\x00\x00\x03\xff\xfe!")
