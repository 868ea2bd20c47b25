"""Raw connections of a stranger to a real host, up to any step of being admitted."""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.utils import encode_delim

from swarm.transport.libp2p.connection.noise import Noise
from swarm.transport.libp2p.connection.yamux import HEADER
from swarm.transport.libp2p.host import Libp2pTransport

MULTISTREAM = encode_delim(b"/multistream/1.0.0")
NOISE = encode_delim(b"/noise")
YAMUX = encode_delim(b"/yamux/1.0.0")
GO_AWAY = HEADER.pack(0, 3, 0, 0, 0)
LINGER_NOT = struct.pack("ii", 1, 0)  # a close becomes a reset


def port_of(node: Libp2pTransport) -> int:
    return int(node.own_addresses()[0].rpartition("/")[2])


@asynccontextmanager
async def caller(node: Libp2pTransport, ip: str = "127.0.0.1") -> AsyncIterator[trio.SocketStream]:
    """A TCP connection from an address of this machine."""
    sock = trio.socket.socket()
    await sock.bind((ip, 0))
    await sock.connect(("127.0.0.1", port_of(node)))
    async with trio.SocketStream(sock) as stream:
        yield stream


async def secured(stream: trio.SocketStream, node: Libp2pTransport, number: int) -> Any:
    """The Noise session of stranger `number` over a socket."""
    await stream.send_all(MULTISTREAM + NOISE)
    raw = RawConnection(TrioTCPStream(stream), True)
    got = b""
    while len(got) < len(MULTISTREAM + NOISE):
        got += await raw.read(len(MULTISTREAM + NOISE) - len(got))
    keys = create_new_key_pair(number.to_bytes(32, "big"))
    return await Noise(keys).secure_outbound(raw, ID.from_base58(node.peer_id))


async def muxed(stream: trio.SocketStream, node: Libp2pTransport, number: int) -> Any:
    """As `secured`, with Yamux agreed on."""
    session = await secured(stream, node, number)
    await session.write(MULTISTREAM + YAMUX)
    await session.read(len(MULTISTREAM + YAMUX))
    return session


def reset(stream: trio.SocketStream) -> None:
    """End a connection by a reset."""
    with suppress(OSError):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
    stream.socket.close()
