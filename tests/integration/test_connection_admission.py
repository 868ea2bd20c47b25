"""What a stranger may do before it is admitted, over real sockets: it costs little, and leaves
nothing behind."""

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError

from swarm.errors import PeerUnreachable, Reject
from swarm.identity import Identity, PeerId
from swarm.transport.libp2p import negotiation
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from tests.hostile.wire import (
    FAILURES,
    GO_AWAY,
    MULTISTREAM,
    NOISE,
    YAMUX,
    Door,
    Session,
    Spent,
    Wire,
    choose,
    dialled,
    frame,
    line,
    secured,
    varint,
)
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
MIB = 1_048_576
SENT_MAX = 6 * MIB  # what the buffers of two sockets hold, and more
SELECT = line(MULTISTREAM)
LINGER_NOT = struct.pack("ii", 1, 0)  # a close becomes a reset


def host(number: int) -> Any:
    return open_libp2p(Identity(bytes([number]) * 32), LOOPBACK)


def caller(node: Libp2pTransport, ip: str = "127.0.0.1") -> AbstractAsyncContextManager[Wire]:
    """A TCP connection from an address of this machine."""
    return dialled(Door("127.0.0.1", port_of(node), node.peer_id), ip, Spent())


def port_of(node: Libp2pTransport) -> int:
    return int(node.own_addresses()[0].rpartition("/")[2])


def stranger(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


async def muxed(wire: Wire, number: int) -> Session:
    """A session of a stranger with Yamux agreed on."""
    session = await secured(wire, stranger(number))
    await choose(session, YAMUX)
    return session


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110  transports announce no changes
            await trio.sleep(0.02)


def held(node: Libp2pTransport) -> int:
    """Connections that count against those that a node may have."""
    return len(node._network.get_connections())


async def admits_somebody(node: Libp2pTransport) -> bool:
    async with host(99) as newcomer:
        try:
            await newcomer.connect(node.addresses()[0])
            await until(lambda: newcomer.peer_id in node.peers(), 3.0)
        except (PeerUnreachable, trio.TooSlowError):
            return False
        return True


# --- slots -------------------------------------------------------------------------------------


async def by_reset(wire: Wire, session: Session) -> None:
    wire.reset()


async def by_end(wire: Wire, session: Session) -> None:
    await wire.stream.aclose()


async def by_goodbye(wire: Wire, session: Session) -> None:
    await session.send(frame(GO_AWAY, 0, 0, 0))
    await wire.stream.aclose()


Leave = Callable[[Wire, Session], Awaitable[None]]


@pytest.mark.parametrize("leave", [by_reset, by_end, by_goodbye])
def test_a_connection_that_dies_while_it_is_admitted_leaves_no_place_taken(leave: Leave) -> None:
    async def visit(node: Libp2pTransport, number: int) -> None:
        with suppress(*FAILURES):
            async with caller(node) as wire:
                session = await secured(wire, stranger(1 + number))
                await session.send(SELECT + line(YAMUX))
                if number % 2:
                    await session.exactly(len(SELECT + line(YAMUX)))
                await leave(wire, session)

    async def main() -> None:
        async with host(1) as node:
            for first in range(0, 120, 8):
                async with trio.open_nursery() as nursery:
                    for number in range(first, first + 8):
                        nursery.start_soon(visit, node, number)
            with suppress(trio.TooSlowError):
                await until(lambda: not held(node), 5.0)
            assert held(node) == 0
            assert await admits_somebody(node)

    run(main)


def test_few_addresses_do_not_fill_a_node() -> None:
    """Six addresses in six blocks come 44 times each; whoever comes from a seventh has a slot."""

    async def main() -> None:
        async with host(1) as node, trio.open_nursery() as nursery:

            async def stay(ip: str, number: int) -> None:
                with suppress(*FAILURES):
                    async with caller(node, ip) as wire:
                        session = await muxed(wire, number)
                        while await session.some():
                            pass

            for block in range(6):
                for number in range(44):
                    nursery.start_soon(stay, f"127.0.{block}.9", 1 + block * 44 + number)
                    if number % 8 == 0:
                        await trio.sleep(0.05)
            await until(lambda: held(node) >= 200)
            await trio.sleep(1.0)
            arrived = False
            with suppress(*FAILURES):
                async with caller(node, "127.0.200.1") as wire:
                    await muxed(wire, 5_000)
                    newcomer = stranger(5_000).peer_id
                    with suppress(trio.TooSlowError):
                        await until(lambda: newcomer in node.peers(), 3.0)
                    arrived = newcomer in node.peers()
            assert arrived
            nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.parametrize("listens", ["/ip6/::1/tcp/0", "/ip4/127.0.0.1/tcp/0"])
def test_both_ends_know_where_the_other_is(listens: str) -> None:
    """Without an address everybody would share the slots of those who come through relays."""

    async def main() -> None:
        ip = listens.split("/")[2]
        async with open_libp2p(Identity(bytes(32)), [listens]) as node, host(2) as visitor:
            await visitor.connect(node.addresses()[0])
            await until(lambda: visitor.peer_id in node.peers())
            assert (node.ip_of(visitor.peer_id), visitor.ip_of(node.peer_id)) == (ip, ip)
            assert node.door is not None
            assert node.door.largest_origin == ip

    run(main)


def test_who_is_gone_before_it_is_looked_at_does_not_count_as_relayed() -> None:
    async def main() -> None:
        async with host(1) as node:
            for _ in range(20):  # faster than the node accepts them
                with socket.create_connection(("127.0.0.1", port_of(node))) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
            await until(lambda: node.door and node.door.failed.get("reset"))
            assert node.door is not None
            assert set(node.door.failed) <= {"reset", "handshake"}
            assert node.door.failed["reset"] > 0
            assert await admits_somebody(node)

    run(main)


def test_one_peer_has_three_connections_at_most() -> None:
    async def main() -> None:
        async with host(1) as node, trio.open_nursery() as nursery:

            async def stay() -> None:
                with suppress(*FAILURES):
                    async with caller(node) as wire:
                        await muxed(wire, 7)
                        await trio.sleep_forever()

            for _ in range(6):
                nursery.start_soon(stay)
                await trio.sleep(0.1)
            await until(lambda: held(node) >= 3)
            await trio.sleep(0.3)
            assert held(node) == 3
            nursery.cancel_scope.cancel()

    run(main)


# --- what is collected ----------------------------------------------------------------------------


async def sent_before_the_end(send: Callable[[bytes], Awaitable[None]]) -> int:
    """How many bytes a stranger gets rid of, up to 32 MiB."""
    total = 0
    with suppress(*FAILURES):
        with trio.move_on_after(8.0):
            while total < 32 * MIB:
                await send(b"x" * 65_536)
                total += 65_536
    return total


BEFORE_NOISE = {
    "first-line": varint(26 * MIB),
    "second-line": SELECT + varint(12 * MIB),
    "no-end-of-length": b"\xff" * 9,
    "handshake": SELECT + line(NOISE) + b"\xff\xff",
}


@pytest.mark.parametrize("head", BEFORE_NOISE.values(), ids=BEFORE_NOISE)
def test_before_the_handshake_little_is_collected(head: bytes) -> None:
    async def main() -> None:
        async with host(1) as node, caller(node) as wire:
            await wire.send(head)
            assert await sent_before_the_end(wire.send) < SENT_MAX

    run(main)


AFTER_NOISE = {
    "first-line": varint(700 * MIB),
    "second-line": SELECT + varint(700 * MIB),
}


@pytest.mark.parametrize("head", AFTER_NOISE.values(), ids=AFTER_NOISE)
def test_after_the_handshake_little_is_collected(head: bytes) -> None:
    async def main() -> None:
        async with host(1) as node, caller(node) as wire:
            session = await secured(wire, stranger(5))
            await session.send(head)
            assert await sent_before_the_end(session.send) < SENT_MAX

    run(main)


def test_without_a_bound_the_whole_line_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above measure what they should."""
    monkeypatch.setattr(negotiation, "LINE_BYTES_MAX", 2**60)
    monkeypatch.setattr(negotiation, "LENGTH_SHIFTS", tuple(range(0, 63, 7)))

    async def main() -> None:
        async with host(1) as node, caller(node) as wire:
            await wire.send(BEFORE_NOISE["first-line"])
            assert await sent_before_the_end(wire.send) >= 20 * MIB

    run(main)


def test_protocols_are_not_tried_without_end() -> None:
    async def main() -> None:
        async with host(1) as node, caller(node) as wire:
            await wire.send(SELECT)
            tried = 0
            with suppress(*FAILURES):
                while tried < 1_000:
                    await wire.send(line(b"/no"))
                    await wire.some()
                    tried += 1
            assert tried < 20
            await until(lambda: node.door and node.door.failed == {"handshake": 1})

    run(main)


def test_whom_we_dial_has_us_collect_little() -> None:
    async def main() -> None:
        async with host(1) as node, trio.open_nursery() as nursery:
            sent: list[int] = []

            async def answer(stream: trio.SocketStream) -> None:
                async with stream:
                    await stream.send_all(varint(26 * MIB))
                    sent.append(await sent_before_the_end(stream.send_all))

            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, answer, listeners)
            port = listeners[0].socket.getsockname()[1]
            somebody = Identity(b"n" * 32).peer_id
            with pytest.raises(PeerUnreachable):
                await node.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{somebody}")
            await until(lambda: sent)
            assert sent[0] < SENT_MAX
            nursery.cancel_scope.cancel()

    run(main)


def test_one_deadline_holds_for_all_steps_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps nobody's slot."""
    from swarm.transport.libp2p import admission as front_door

    monkeypatch.setattr(front_door, "ADMISSION_TIMEOUT_S", 1.0)

    async def main() -> None:
        async with host(1) as node, caller(node) as wire:
            started = trio.current_time()
            with suppress(trio.BrokenResourceError):
                for byte in SELECT + line(NOISE):
                    await wire.send(bytes([byte]))
                    await trio.sleep(0.2)
            assert trio.current_time() - started < 4.0, "of 5.4 s that all bytes take"
            await until(lambda: node.door and node.door.failed == {"deadline": 1})

    run(main)


# --- what is served beside our own protocols ------------------------------------------------------


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with host(1) as a, host(2) as b:
        await a.connect(b.addresses()[0])
        await until(lambda: a.peer_id in b.peers())
        yield a, b


def test_who_we_are_is_told_within_a_quota() -> None:
    async def main() -> None:
        async with pair() as (a, b):
            answered = 0
            for _ in range(60):
                with suppress(BaseLibp2pError):
                    stream = await a._host.new_stream(b._id, ["/ipfs/id/1.0.0"])  # type: ignore[list-item]
                    answered += bool(await stream.read(10_000))
                    await stream.reset()
            assert 10 <= answered <= 20

    run(main)


def test_a_gossip_message_of_empty_entries_is_an_offence() -> None:
    """A hundred thousand empty IWANTs in 200 kB: nobody walks them, and it is counted."""

    async def main() -> None:
        async with pair() as (a, b):
            offences: list[tuple[PeerId, Reject]] = []
            b.report_to(lambda peer, reason: offences.append((peer, reason)))
            await b.subscribe("/test/topic", lambda peer, payload: True)
            await until(lambda: a._id in b._gossip._inbound and b._id in a._gossip.peers)
            entries = b"\x12\x00" * 100_000
            rpc = b"\x1a" + varint(len(entries)) + entries
            stream = await a._host.new_stream(b._id, ["/meshsub/1.1.0"])  # type: ignore[list-item]
            await stream.write(varint(len(rpc)) + rpc)
            with suppress(trio.TooSlowError):
                await until(lambda: offences, 5.0)
            assert offences == [(a.peer_id, Reject.FLOOD)]

    run(main)
