"""What a hostile peer can do below messages, over real libp2p connections and plain TCP.

Only nonsense is an offence that is counted: a slow link and a slow program look alike from here.
What is to be shown is that it costs the other end a bounded amount and stops nobody.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.utils import encode_delim

from swarm.errors import Reject
from swarm.simulation.hostile.liar import Liar
from swarm.simulation.hostile.lies import Lie, hello
from swarm.transport.libp2p.gossip import MESHSUB_PROTOCOL
from swarm.transport.libp2p.host import Libp2pTransport
from swarm.wire.messages import HELLO_PROTOCOL, ROLLOUTS_PROTOCOL

STREAMS = 200
HANDSHAKES = 100
HOLD_S = 3.0
DRIP_S = 0.5

SOCKET_LIES: list[Lie] = []


Tell = Callable[[Liar], Awaitable[None]]


def _lie(reason: Reject | None) -> Callable[[Tell], Tell]:
    def add(tell: Tell) -> Tell:
        async def told(liar: Liar) -> None:
            with suppress(BaseLibp2pError, OSError, trio.BrokenResourceError):
                await tell(liar)

        SOCKET_LIES.append(Lie(getattr(tell, "__name__", ""), told, reason))
        return told

    return add


def _transport(liar: Liar) -> Libp2pTransport:
    assert isinstance(liar.transport, Libp2pTransport)
    return liar.transport


def _connections(liar: Liar) -> list[object]:
    found = _transport(liar)._network.connections.values()
    return [connection for group in found for connection in group]


@asynccontextmanager
async def _streams(liar: Liar, each: int) -> AsyncIterator[list[object]]:
    """Streams to every peer, that nothing was said on; reset at the end."""
    streams = [
        await connection.new_stream()  # type: ignore[attr-defined]
        for connection in _connections(liar)
        for _ in range(each)
    ]
    try:
        yield streams
    finally:
        for stream in streams:
            with suppress(BaseLibp2pError):
                await stream.reset()


async def _write(stream: object, data: bytes) -> None:
    with suppress(BaseLibp2pError):
        await stream.write(data)  # type: ignore[attr-defined]


@_lie(None)
async def slow_loris(liar: Liar) -> None:
    """Many requests, each of which comes byte by byte."""
    request = encode_delim(b"/multistream/1.0.0") + encode_delim(ROLLOUTS_PROTOCOL.encode())
    async with _streams(liar, 16) as streams:
        for at in range(int(HOLD_S / DRIP_S)):
            for stream in streams:
                await _write(stream, request[at : at + 1])
            await trio.sleep(DRIP_S)


@_lie(None)
async def slow_loris_in_the_payload(liar: Liar) -> None:
    """Requests that are announced whole and come byte by byte."""
    head = encode_delim(b"/multistream/1.0.0") + encode_delim(ROLLOUTS_PROTOCOL.encode())
    async with _streams(liar, 16) as streams:
        for stream in streams:
            await _write(stream, head + (4_096).to_bytes(4, "big"))
        for _ in range(int(HOLD_S / DRIP_S)):
            for stream in streams:
                await _write(stream, b"\0")
            await trio.sleep(DRIP_S)


@_lie(None)
async def slow_reader(liar: Liar) -> None:
    """Hellos whose answers nobody reads."""
    head = encode_delim(b"/multistream/1.0.0") + encode_delim(HELLO_PROTOCOL.encode())
    body = hello(liar, liar.identity)
    async with _streams(liar, 16) as streams:
        for stream in streams:
            await _write(stream, head + len(body).to_bytes(4, "big") + body)
        await trio.sleep(HOLD_S)


@_lie(None)
async def flood_of_streams(liar: Liar) -> None:
    async with _streams(liar, STREAMS):
        await trio.sleep(DRIP_S)


@_lie(None)
async def length_bomb_of_a_request(liar: Liar) -> None:
    head = encode_delim(b"/multistream/1.0.0") + encode_delim(ROLLOUTS_PROTOCOL.encode())
    async with _streams(liar, 4) as streams:
        for stream in streams:
            await _write(stream, head + b"\xff\xff\xff\xff")
        await trio.sleep(DRIP_S)


@_lie(Reject.MALFORMED)
async def garbage_on_streams(liar: Liar) -> None:
    async with _streams(liar, 8) as streams:
        for stream in streams:
            await _write(stream, liar.rng.randbytes(2_000))
        await trio.sleep(DRIP_S)


@_lie(Reject.MALFORMED)
async def garbage_on_gossip(liar: Liar) -> None:
    transport = _transport(liar)
    for peer in list(transport._network.connections):
        for junk in (b"\xff" * 10, b"\x80\x80\x80\x80\x01", liar.rng.randbytes(50_000)):
            with suppress(BaseLibp2pError):
                stream = await transport._host.new_stream(peer, [TProtocol(MESHSUB_PROTOCOL)])
                await _write(stream, junk)
                await stream.reset()


@_lie(None)
async def handshakes_that_stop(liar: Liar) -> None:
    """Plain TCP connections that never say a word, or say nonsense."""
    transport = _transport(liar)
    places = {
        (ip, port)
        for connection in _connections(liar)
        if (remote := connection.muxed_conn.secured_conn.get_remote_address())  # type: ignore[attr-defined]
        for ip, port in [remote]
    }
    assert transport.peer_id
    streams = []
    try:
        for ip, port in sorted(places):
            for number in range(HANDSHAKES):
                with suppress(OSError):
                    streams.append(await trio.open_tcp_stream(ip, port))
                    if number % 2:
                        await streams[-1].send_all(liar.rng.randbytes(100))
        await trio.sleep(DRIP_S)
    finally:
        for each in streams:
            await trio.aclose_forcefully(each)
