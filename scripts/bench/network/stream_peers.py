"""One end of a bulk stream in a process of its own, for `bench_network.py`.

    python stream_peers.py STACK listen             prints its address
    python stream_peers.py STACK send ADDRESS       for each line with a number of bytes on
                                                            its input: sends them, prints seconds

Stacks: `ours`, `stock` (libp2p as it comes), `tls` (trio's TCP and TLS, no libp2p) and `p2pd` (the
go-libp2p daemon that the variable SWARM_P2PD names, over its local socket). All move the same
bytes: a length, the data in pieces of a mebibyte, and one byte back when all have arrived.
"""

import datetime
import os
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

from swarm.identity import Identity
from swarm.transport.libp2p.host import open_libp2p

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.p2pd import Daemon

PROTOCOL = TProtocol("/bench/bulk/1.0.0")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PIECE_BYTES = 2**20
LENGTH_BYTES = 8


class Bulk(Protocol):
    """A stream of bytes."""

    async def write(self, data: bytes) -> None: ...

    async def read(self, n: int) -> bytes: ...


Handler = Callable[[Bulk], Awaitable[None]]
Listening = AbstractAsyncContextManager[str]
Dialled = AbstractAsyncContextManager[Bulk]


async def exactly(stream: Bulk, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += await some(stream, count - len(data))
    return data


async def some(stream: Bulk, count: int) -> bytes:
    piece = await stream.read(count)
    if not piece:
        raise EOFError
    return piece


async def receive(stream: Bulk) -> None:
    """Serve transfers until the other end leaves."""
    try:
        while True:
            left = int.from_bytes(await exactly(stream, LENGTH_BYTES), "big")
            while left:
                left -= len(await some(stream, min(left, PIECE_BYTES)))
            await stream.write(b"\x01")
    except Exception:  # noqa: BLE001  however this stack says that the other end has left
        return


async def send(stream: Bulk, count: int) -> float:
    """Send so many bytes; how many seconds it took until the other end had them."""
    piece = os.urandom(PIECE_BYTES)
    started_s = time.perf_counter()
    await stream.write(count.to_bytes(LENGTH_BYTES, "big"))
    for _ in range(count // PIECE_BYTES):
        await stream.write(piece)
    await exactly(stream, 1)
    return time.perf_counter() - started_s


# --- ours ------------------------------------------------------------------------------------


@asynccontextmanager
async def _listen_ours(handler: Handler) -> AsyncIterator[str]:
    async with open_libp2p(Identity.generate(), [LOOPBACK]) as transport:
        transport._host.set_stream_handler(PROTOCOL, handler)  # type: ignore[arg-type]
        yield transport.addresses()[0]


@asynccontextmanager
async def _dial_ours(address: str) -> AsyncIterator[Bulk]:
    async with open_libp2p(Identity.generate(), [LOOPBACK]) as transport:
        peer = await transport.connect(address)
        yield await transport._host.new_stream(ID.from_base58(peer), [PROTOCOL])  # type: ignore[misc]


# --- libp2p as it comes ----------------------------------------------------------------------


def stock_host() -> Any:
    keys = create_new_key_pair()
    noise = NoiseTransport(keys, create_x25519_key_pair().private_key)
    return new_host(key_pair=keys, sec_opt={NOISE_PROTOCOL: noise})


@asynccontextmanager
async def _listen_stock(handler: Handler) -> AsyncIterator[str]:
    host = stock_host()
    async with host.run([Multiaddr(LOOPBACK)]):
        host.set_stream_handler(PROTOCOL, handler)
        yield str(host.get_addrs()[0])


@asynccontextmanager
async def _dial_stock(address: str) -> AsyncIterator[Bulk]:
    host = stock_host()
    async with host.run([Multiaddr(LOOPBACK)]):
        info = info_from_p2p_addr(Multiaddr(address))
        await host.connect(info)
        yield await host.new_stream(info.peer_id, [PROTOCOL])


# --- TCP and TLS -----------------------------------------------------------------------------


class TlsBulk:
    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self.write = stream.send_all
        self.read = stream.receive_some


def _tls_context(directory: Path) -> ssl.SSLContext:
    """A server's, with a fresh self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    pem += key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = directory / "both.pem"
    path.write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


@asynccontextmanager
async def _listen_tls(handler: Handler) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        context = _tls_context(Path(directory))
    listeners = await trio.open_ssl_over_tcp_listeners(0, context, host="127.0.0.1")
    port = listeners[0].transport_listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, lambda stream: handler(TlsBulk(stream)), listeners)
        yield str(port)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _dial_tls(address: str) -> AsyncIterator[Bulk]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    port = int(address)
    async with await trio.open_ssl_over_tcp_stream("127.0.0.1", port, ssl_context=context) as tls:
        yield TlsBulk(tls)


# --- go-libp2p -------------------------------------------------------------------------------


class SocketBulk:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.write = stream.send_all
        self.read = stream.receive_some


@asynccontextmanager
async def _listen_p2pd(handler: Handler) -> AsyncIterator[str]:
    async with (
        Daemon.running(Path(os.environ["SWARM_P2PD"])) as daemon,
        daemon.serving(PROTOCOL, lambda stream: handler(SocketBulk(stream))),
    ):
        yield (await daemon.identify())[0]


@asynccontextmanager
async def _dial_p2pd(address: str) -> AsyncIterator[Bulk]:
    async with Daemon.running(Path(os.environ["SWARM_P2PD"])) as daemon:
        await daemon.connect(address)
        async with await daemon.open_stream(address.rpartition("/p2p/")[2], PROTOCOL) as stream:
            yield SocketBulk(stream)


STACKS: dict[str, tuple[Callable[[Handler], Listening], Callable[[str], Dialled]]] = {
    "ours": (_listen_ours, _dial_ours),
    "stock": (_listen_stock, _dial_stock),
    "tls": (_listen_tls, _dial_tls),
    "p2pd": (_listen_p2pd, _dial_p2pd),
}


async def _main(stack: str, role: str, *address: str) -> None:
    listen, dial = STACKS[stack]
    if role == "listen":
        async with listen(receive) as where:
            print(where, flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)
        return
    async with dial(*address) as stream:
        print("ready", flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            print(await send(stream, int(line)), flush=True)


if __name__ == "__main__":
    trio.run(_main, *sys.argv[1:])
