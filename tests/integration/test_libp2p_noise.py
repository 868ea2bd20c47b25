"""The Noise transport against upstream's, and what it does better, over pipes in memory."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from libp2p.abc import ISecureConn, ISecureTransport
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.rsa import create_new_key_pair as create_rsa_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import NoiseFailure, PeerIDMismatchesPubkey
from libp2p.security.noise.messages import NoiseExtensions, NoiseHandshakePayload
from libp2p.security.noise.transport import Transport as UpstreamNoise

from swarm.transport.libp2p import noise as noise_module
from swarm.transport.libp2p.noise import (
    HANDSHAKE_BYTES_MAX,
    HANDSHAKE_TIMEOUT_S,
    RECORD_PLAIN_BYTES_MAX,
    SOCKET_READ_BYTES,
    SOCKET_WAKE_BYTES_MAX,
    Noise,
    NoiseSession,
    _records,
)
from tests.integration.raw_pipes import Raw, pipe
from tests.support import run

pytestmark = pytest.mark.integration

DIALLER, LISTENER = create_new_key_pair(b"d" * 32), create_new_key_pair(b"l" * 32)
MIB = 1_048_576


def ours(keys: KeyPair, network_key: bytes | None = None) -> Noise:
    return Noise(keys, network_key)


def upstream(keys: KeyPair) -> UpstreamNoise:
    return UpstreamNoise(keys, create_x25519_key_pair().private_key)


async def failure_of(secure: Awaitable[ISecureConn]) -> BaseException | None:
    try:
        await secure
    except (NoiseFailure, ConnectionClosedError) as error:
        return error
    return None


async def secured(
    dialler: ISecureTransport, listener: ISecureTransport, ends: tuple[Raw, Raw]
) -> tuple[Any, Any]:
    made: dict[bool, ISecureConn] = {}

    async def listen() -> None:
        made[False] = await listener.secure_inbound(ends[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        made[True] = await dialler.secure_outbound(ends[0], ID.from_pubkey(LISTENER.public_key))
    return made[True], made[False]


async def carried(sender: Any, receiver: Any, data: bytes) -> bytes:
    got = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.write, data)
        while len(got) < len(data):
            got += await receiver.read(min(len(data) - len(got), 50_000))
    return got


@pytest.mark.parametrize(
    ("dialler", "listener"), [(ours, ours), (ours, upstream), (upstream, ours)]
)
def test_bytes_on_the_wire_are_upstreams(
    dialler: Callable[[KeyPair], ISecureTransport], listener: Callable[[KeyPair], ISecureTransport]
) -> None:
    async def main() -> None:
        a, b = await secured(dialler(DIALLER), listener(LISTENER), pipe())
        assert a.get_remote_peer() == ID.from_pubkey(LISTENER.public_key)
        assert b.get_remote_peer() == ID.from_pubkey(DIALLER.public_key)
        assert (a.is_initiator, b.is_initiator) == (True, False)
        full = RECORD_PLAIN_BYTES_MAX
        for size in (1, 100, full - 1, full, full + 1, 3 * full, MIB):
            data = bytes(i % 251 for i in range(size))
            assert await carried(a, b, data) == data
            assert await carried(b, a, data) == data

    run(main, virtual=True)


def test_one_write_of_ours_is_one_write_of_the_socket() -> None:
    async def calls(make: Callable[[KeyPair], ISecureTransport]) -> tuple[int, int]:
        ends = pipe()
        a, b = await secured(make(DIALLER), make(LISTENER), ends)
        ends[0].pipe.writes = ends[1].pipe.reads = 0
        assert len(await carried(a, b, bytes(MIB))) == MIB
        return ends[0].pipe.writes, ends[1].pipe.reads

    writes, reads = run(calls, ours, virtual=True)
    assert writes == 1
    assert reads <= MIB // SOCKET_READ_BYTES + 2
    writes, reads = run(calls, upstream, virtual=True)  # why it is replaced
    assert writes > 16
    assert reads > 32


def test_receive_takes_all_there_is_without_joining_it() -> None:
    async def main() -> None:
        a, b = await secured(ours(DIALLER), ours(LISTENER), pipe())
        await a.write_pieces([b"head", bytes(100_000), b"tail"])
        got: list[memoryview] = []
        while sum(len(piece) for piece in got) < 100_008:
            got += (await b.receive())[0]
        assert b"".join(got) == b"head" + bytes(100_000) + b"tail"
        assert await carried(b, a, b"and back") == b"and back"

    run(main, virtual=True)


def test_a_cancelled_read_loses_nothing() -> None:
    async def main() -> None:
        a, b = await secured(ours(DIALLER), ours(LISTENER), pipe())
        await a.write(b"first")
        with trio.move_on_after(1.0):
            await b.read(10)
        await a.write(b"second")
        assert await b.read(11) == b"firstsecond"

    run(main, virtual=True)


async def over_sockets() -> tuple[RawConnection, RawConnection]:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with listener:
        dialled = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        accepted = await listener.accept()
    return RawConnection(TrioTCPStream(dialled), True), RawConnection(
        TrioTCPStream(accepted), False
    )


async def reads_of_a_record_in_packets() -> tuple[int, int]:
    """How often the socket is read, and woke us, while a full record comes a kilobyte at a time."""
    a, b = await secured(ours(DIALLER), ours(LISTENER), await over_sockets())  # type: ignore[arg-type]
    reads = 0
    take = b._tcp.receive_some

    async def count(size: int) -> bytes | bytearray:
        nonlocal reads
        got = await take(size)
        reads += 1
        return got

    b._tcp.receive_some = count
    sent: list[bytes] = []
    send, a._send = a._send, lambda sealed, moved: keep(sent, sealed)
    await a.write(bytes(RECORD_PLAIN_BYTES_MAX))
    await a.write(b"short")
    data = b"".join(sent)
    got = b""
    async with trio.open_nursery() as nursery:

        async def packets() -> None:
            for at in range(0, len(data), 1_000):
                await send(bytearray(data[at : at + 1_000]), lambda: None)
                for _ in range(3):  # enough for who would read it
                    await trio.testing.wait_all_tasks_blocked(0.001)

        nursery.start_soon(packets)
        got = await b.read(RECORD_PLAIN_BYTES_MAX + len(b"short"))
    assert got == bytes(RECORD_PLAIN_BYTES_MAX) + b"short"
    for end in (a, b):
        await end.close()
    return reads, len(data) // 1_000


async def keep(sent: list[bytes], sealed: bytearray) -> None:
    await trio.lowlevel.checkpoint()
    sent.append(bytes(sealed))


@pytest.mark.skipif(not noise_module.IS_LINUX, reason="the socket is asked for that on Linux alone")
def test_a_record_that_comes_in_packets_does_not_wake_us_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, packets = run(reads_of_a_record_in_packets)
    assert reads <= 2 + RECORD_PLAIN_BYTES_MAX // SOCKET_WAKE_BYTES_MAX + 2 < packets / 8
    monkeypatch.setattr(noise_module, "IS_LINUX", False)
    reads, packets = run(reads_of_a_record_in_packets)
    assert reads > packets / 2


@example([16_000] * 6)
@given(st.lists(st.integers(0, 3 * RECORD_PLAIN_BYTES_MAX), max_size=8))
def test_records_hold_the_pieces_in_order_and_fit(sizes: list[int]) -> None:
    pieces = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    records = _records(pieces)
    assert b"".join(records) == b"".join(pieces)
    assert all(len(record) <= RECORD_PLAIN_BYTES_MAX for record in records)


# --- the network key -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "fails"),
    [
        ((None, None), False),
        ((b"k" * 32, b"k" * 32), False),
        ((b"k" * 32, None), True),
        ((None, b"k" * 32), True),
        ((b"k" * 32, b"l" * 32), True),
    ],
)
def test_ends_with_different_keys_do_not_meet(
    keys: tuple[bytes | None, bytes | None], fails: bool
) -> None:
    async def main() -> None:
        ends = pipe()
        outcome: list[BaseException | None] = []

        async def one(noise: Noise, end: Raw) -> None:
            if end.is_initiator:
                secure = noise.secure_outbound(end, ID.from_pubkey(LISTENER.public_key))
            else:
                secure = noise.secure_inbound(end)
            outcome.append(await failure_of(secure))
            if outcome[-1]:
                await end.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, ours(DIALLER, keys[0]), ends[0])
            nursery.start_soon(one, ours(LISTENER, keys[1]), ends[1])
        assert [isinstance(error, NoiseFailure) for error in outcome] == [fails, fails]

    run(main, virtual=True)


# --- peers that lie or stall ---------------------------------------------------------------


async def refusal_of(message: bytes, *, dialling: bool, close: bool = True) -> BaseException | None:
    """What comes of a handshake with a peer that sends these bytes."""
    ours_end, theirs = pipe()
    await theirs.write(message)
    if close:
        await theirs.close()
    noise = ours(LISTENER)
    if dialling:
        return await failure_of(noise.secure_outbound(ours_end, ID.from_pubkey(DIALLER.public_key)))
    return await failure_of(noise.secure_inbound(ours_end))


@pytest.mark.parametrize("dialling", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00",
        b"\x00\x00",
        b"\x00\x20" + bytes(10),  # cut short
        b"\x00\x10" + b"\x01" * 16,
        b"\x00\x20" + bytes(32),  # the zero point
        b"\x00\x60" + b"\x07" * 96,
        b"\xff\xff" + bytes(65_535),
    ],
)
def test_garbage_in_the_handshake_is_a_failed_handshake(message: bytes, dialling: bool) -> None:
    async def main() -> None:
        error = await refusal_of(message, dialling=dialling)
        assert isinstance(error, (NoiseFailure, ConnectionClosedError))

    run(main, virtual=True)


def test_a_long_handshake_message_is_refused_by_its_length() -> None:
    async def main() -> None:
        message = (HANDSHAKE_BYTES_MAX + 1).to_bytes(2, "big")
        error = await refusal_of(message, dialling=False, close=False)
        assert "bytes" in str(error)
        assert trio.current_time() < 1.0  # it was not waited for

    run(main, virtual=True)


def test_a_peer_that_stalls_in_the_handshake_is_given_up() -> None:
    async def main() -> None:
        started_s = trio.current_time()
        error = await refusal_of(b"\x00", dialling=False, close=False)
        assert isinstance(error, NoiseFailure)
        assert trio.current_time() - started_s == pytest.approx(HANDSHAKE_TIMEOUT_S)
        with trio.move_on_after(100 * HANDSHAKE_TIMEOUT_S) as scope:
            await upstream(LISTENER).secure_inbound(pipe()[0])
        assert scope.cancelled_caught  # why it is replaced

    run(main, virtual=True, timeout_s=10_000.0)


def test_a_forged_record_ends_the_connection() -> None:
    def flip(record: bytearray) -> None:
        record[-1] ^= 1

    async def main() -> None:
        ends = pipe()
        a, b = await secured(ours(DIALLER), ours(LISTENER), ends)
        ends[0].pipe.spoil = flip
        await a.write(b"hello")
        with pytest.raises(ConnectionClosedError, match="forged"):
            await b.read(5)

    run(main, virtual=True)


def test_an_identity_that_is_no_ed25519_key_is_refused() -> None:
    async def main() -> None:
        ends = pipe()

        async def dial() -> None:
            noise = Noise(create_rsa_key_pair(2048))
            await failure_of(noise.secure_outbound(ends[0], ID.from_pubkey(LISTENER.public_key)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            error = await failure_of(ours(LISTENER).secure_inbound(ends[1]))
        assert "Ed25519" in str(error)

    run(main, virtual=True)


def handshake_with(payload: bytes) -> tuple[BaseException | None, BaseException | None]:
    """A handshake with a dialler that says `payload` of itself: what came of it at both ends."""

    async def main() -> tuple[BaseException | None, BaseException | None]:
        ends = pipe()
        dialler = ours(DIALLER)
        dialler._payload = payload or dialler._payload
        outcome: dict[str, BaseException | None] = {}

        async def dial() -> None:
            outcome["dialler"] = await failure_of(
                dialler.secure_outbound(ends[0], ID.from_pubkey(LISTENER.public_key))
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial)
            outcome["listener"] = await failure_of(ours(LISTENER).secure_inbound(ends[1]))
        return outcome["dialler"], outcome["listener"]

    return run(main, virtual=True)  # type: ignore[no-any-return]


def test_an_identity_that_did_not_sign_the_key_is_refused() -> None:
    assert handshake_with(b"") == (None, None)
    stolen = ours(LISTENER)._payload  # signed for another static key
    assert isinstance(handshake_with(stolen)[1], NoiseFailure)
    for payload in (b"\xff" * 40, b"\x0a\x00\x12\x00"):
        assert isinstance(handshake_with(payload)[1], NoiseFailure)


def test_extensions_and_early_data_of_others_are_ignored() -> None:
    async def main() -> None:
        dialler = ours(DIALLER)
        payload = NoiseHandshakePayload.deserialize(dialler._payload)
        payload.extensions = NoiseExtensions([b"hash"], ["/yamux/1.0.0"], b"early")
        dialler._payload = payload.serialize() + b"\x1a\x05older"  # field 3, once early data
        a, b = await secured(dialler, ours(LISTENER), pipe())
        assert await carried(a, b, b"hello") == b"hello"

    run(main, virtual=True)


def test_another_peer_than_the_expected_one_is_refused() -> None:
    async def main() -> None:
        ends = pipe()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(failure_of, ours(LISTENER).secure_inbound(ends[1]))
            with pytest.raises(PeerIDMismatchesPubkey):
                await ours(DIALLER).secure_outbound(ends[0], ID.from_pubkey(DIALLER.public_key))
            await ends[0].close()

    run(main, virtual=True)


def test_sessions_are_what_the_muxer_expects() -> None:
    async def main() -> None:
        a, b = await secured(ours(DIALLER), ours(LISTENER), pipe())
        assert isinstance(a, NoiseSession)
        assert isinstance(b, NoiseSession)
        assert a.get_remote_public_key() == LISTENER.public_key
        await a.close()
        with pytest.raises(BaseLibp2pError):
            await b.read(1)

    run(main, virtual=True)
