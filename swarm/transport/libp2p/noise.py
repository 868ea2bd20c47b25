"""The Noise handshake and its records, compatible with upstream and faster.

libp2p's Noise: XX, X25519, ChaCha20-Poly1305, SHA-256; both sides sign their static key. Upstream
reads the socket twice and writes it once for each record, has no deadline, and leaks parser errors.
"""

import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyPair, PublicKey
from libp2p.crypto.x25519 import X25519PublicKey
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import (
    InvalidSignature,
    NoiseFailure,
    PeerIDMismatchesPubkey,
)
from libp2p.security.noise.messages import (
    NoiseHandshakePayload,
    make_handshake_payload_sig,
    verify_handshake_payload_sig,
)
from libp2p.security.secure_session import SecureSession
from noise.connection import Keypair, NoiseConnection

PROTOCOL_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"
PRIVATE_PROTOCOL_NAME = b"Noise_XXpsk0_25519_ChaChaPoly_SHA256"
TAG_BYTES = 16
LENGTH_BYTES = 2
OVERHEAD_BYTES = LENGTH_BYTES + TAG_BYTES  # of one record
RECORD_PLAIN_BYTES_MAX = 65_535 - TAG_BYTES
JOINED_BYTES_MAX = 16_384  # pieces up to this size share a record
SOCKET_READ_BYTES = 262_144
SOCKET_WAKE_BYTES_MAX = 32_768  # socket wake-up threshold; must fit the socket buffer
UNSENT_BYTES = 32_768  # approximate unsent bytes in the kernel
RELAYED_STEP_BYTES = 65_536  # per write on a relayed connection
HANDSHAKE_BYTES_MAX = 4_096  # per message; an honest one has a few hundred
HANDSHAKE_TIMEOUT_S = 10.0
CLOSES_ON_DIALLERS = ": a private swarm takes an invitation, or it is full, or refuses this node"
RECORDS_PER_TURN = 256  # decrypted at a time; one socket read may hold 14,000
NEGOTIATION_RECORDS_MAX = 64  # before the muxer is agreed on; an honest peer sends 2 or 3
RECORD_BYTES_SMALL = 8_192  # less payload makes a small record
IS_LINUX = sys.platform == "linux"


class Noise(ISecureTransport):
    """Secures connections for one identity.

    A `network_key` of 32 bytes is a pre-shared key, mixed in before anything is sent. A stranger's
    first message does not decrypt and gets no answer. A prologue would not do: it is not in the
    keys, so a stranger could still read our identity.
    """

    def __init__(self, keys: KeyPair, network_key: bytes | None = None) -> None:
        self._peer = ID.from_pubkey(keys.public_key)
        self._keys = keys
        self._network_key = network_key
        static = X25519PrivateKey.generate()
        self._static = static.private_bytes_raw()
        public = X25519PublicKey.from_bytes(static.public_key().public_bytes_raw())
        signature = make_handshake_payload_sig(keys.private_key, public)
        self._payload = NoiseHandshakePayload(keys.public_key, signature).serialize()

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return await self.secure(conn, None)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return await self.secure(conn, peer_id)

    async def secure(
        self, conn: IRawConnection, expected: ID | None, read_ahead: bytes = b""
    ) -> ISecureConn:
        """Run the handshake, as initiator where a peer is `expected`. `read_ahead` are bytes
        already read. NoiseFailure: for all that a peer can do wrong."""
        handshake = _Handshake(
            conn, self._static, self._network_key, initiator=expected is not None
        )
        handshake.rest = read_ahead
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                key = await handshake.run(self._payload)
        except trio.TooSlowError:
            raise NoiseFailure(f"no handshake within {HANDSHAKE_TIMEOUT_S:.0f} s") from None
        peer = ID.from_pubkey(key)
        if expected is not None and peer != expected:
            raise PeerIDMismatchesPubkey(f"expected {expected}, found {peer}")
        return NoiseSession(self._peer, self._keys, key, conn, handshake)


class _Handshake:
    """One handshake. Afterwards it holds the keys of both directions and the bytes read ahead."""

    def __init__(
        self, conn: IRawConnection, static: bytes, network_key: bytes | None, *, initiator: bool
    ) -> None:
        self._conn = conn
        self.initiator = initiator
        self.rest = b""
        self._noise: Any = NoiseConnection.from_name(
            PROTOCOL_NAME if network_key is None else PRIVATE_PROTOCOL_NAME
        )
        self._noise.set_keypair_from_private_bytes(Keypair.STATIC, static)
        if network_key is not None:
            self._noise.set_psks(network_key)
        if initiator:
            self._noise.set_as_initiator()
        else:
            self._noise.set_as_responder()
        self._noise.start_handshake()
        self._state = self._noise.noise_protocol.handshake_state  # upstream drops it at the end

    async def run(self, payload: bytes) -> PublicKey:
        """Exchange the three messages. Returns the peer's identity key."""
        if self.initiator:
            await self._send(b"")
            theirs = await self._receive()
            key = self._identity_key(theirs)
            await self._send(payload)
        else:
            await self._receive()
            await self._send(payload)
            key = self._identity_key(await self._receive())
        return key

    def ciphers(self) -> tuple[ChaCha20Poly1305, ChaCha20Poly1305]:
        """Ciphers for sending and receiving; each starts at nonce 0."""
        protocol = self._noise.noise_protocol
        sealer, opener = protocol.cipher_state_encrypt, protocol.cipher_state_decrypt
        assert sealer.n == opener.n == 0
        return ChaCha20Poly1305(sealer.k), ChaCha20Poly1305(opener.k)

    async def _send(self, payload: bytes) -> None:
        message = _step(self._noise.write_message, payload)
        await self._conn.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)

    async def _receive(self) -> bytes:
        await self._read_ahead(LENGTH_BYTES)
        length = int.from_bytes(self.rest[:LENGTH_BYTES], "big")
        if length > HANDSHAKE_BYTES_MAX:
            raise NoiseFailure(f"handshake message of {length} bytes")
        end = LENGTH_BYTES + length
        await self._read_ahead(end)
        message, self.rest = self.rest[LENGTH_BYTES:end], self.rest[end:]
        return _step(self._noise.read_message, message)

    async def _read_ahead(self, count: int) -> None:
        while len(self.rest) < count:
            data = await self._conn.read(HANDSHAKE_BYTES_MAX)
            if not data:
                why = CLOSES_ON_DIALLERS if self.initiator else ""
                raise NoiseFailure(f"the peer closed during the handshake{why}")
            self.rest += data

    def _identity_key(self, payload: bytes) -> PublicKey:
        try:
            received = NoiseHandshakePayload.deserialize(payload)
        except ValueError as error:
            raise NoiseFailure(f"handshake payload refused: {error}") from error
        if not isinstance(received.id_pubkey, Ed25519PublicKey):
            raise NoiseFailure("the peer's identity is no Ed25519 key")
        static = X25519PublicKey.from_bytes(self._state.rs.public_bytes)
        if not verify_handshake_payload_sig(received, static):
            raise InvalidSignature("the peer's identity did not sign its static key")
        return received.id_pubkey


def _step(step: Callable[[bytes], bytearray], data: bytes) -> bytes:
    """Run one step of the handshake. A writing step uses the peer's key, too."""
    try:
        return bytes(step(data))
    except Exception as error:  # boundary: raises what it likes on foreign bytes
        raise NoiseFailure(f"handshake message refused: {error!r}") from error


class NoiseSession(SecureSession):
    """Records after the handshake. One read decrypts all complete records; all records of one write
    leave together."""

    def __init__(
        self,
        local: ID,
        keys: KeyPair,
        key: PublicKey,
        raw: IRawConnection,
        handshake: _Handshake,
    ) -> None:
        super().__init__(
            local_peer=local,
            local_private_key=keys.private_key,
            remote_peer=ID.from_pubkey(key),
            remote_permanent_pubkey=key,
            is_initiator=handshake.initiator,
            conn=raw,  # type: ignore[arg-type]  # asked for its addresses and closed, no more
        )
        self._raw = raw
        inner = raw.stream if isinstance(raw, RawConnection) else None
        # of TCP, without upstream's layers, which take three locks for each use; None: relayed
        self._tcp: trio.abc.Stream | None = (
            inner.stream if isinstance(inner, TrioTCPStream) else None
        )
        self._sealer, self._opener = handshake.ciphers()
        self._sent = 0
        self._received = 0
        self._sealed = memoryview(handshake.rest)  # received, not decrypted
        self._opened: deque[memoryview] = deque()
        self._opened_bytes = 0
        self._wakes_at = 1
        if IS_LINUX and isinstance(self._tcp, trio.SocketStream):
            self._tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` bytes, for negotiation before the muxer takes over. ConnectionClosedError: the
        connection is over, or the peer sent too many records."""
        while self._opened_bytes < (1 if n is None else n):
            if self._received >= NEGOTIATION_RECORDS_MAX:
                raise ConnectionClosedError("too many Noise records", transport="tcp")
            await self._fetch_record()
            self._open_records(1)
        count = self._opened_bytes if n is None else n
        data = b"".join(self._opened)
        self._opened_bytes -= count
        self._opened = deque([memoryview(data)[count:]] if self._opened_bytes else [])
        return data[:count]

    async def receive(self) -> tuple[list[memoryview], int]:
        """Return the next data and the number of small records in it. Waits for at least one
        record, decrypts at most `RECORDS_PER_TURN`."""
        small = 0
        if not self._opened:
            await self._fetch_record()
            small = self._open_records(RECORDS_PER_TURN)
        pieces = list(self._opened)
        self._opened.clear()
        self._opened_bytes = 0
        return pieces, small

    async def _fetch_record(self) -> None:
        while self._missing_bytes() > 0:
            await self._fetch()

    async def _fetch(self) -> None:
        if self._tcp is None:
            data = await self._raw.read(SOCKET_READ_BYTES)
        else:
            try:
                self._wake_at(min(self._missing_bytes(), SOCKET_WAKE_BYTES_MAX))
                data = bytes(await self._tcp.receive_some(SOCKET_READ_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
                raise ConnectionClosedError(str(error), transport="tcp") from error
        if not data:
            raise ConnectionClosedError("connection closed by peer", transport="tcp")
        self._sealed = memoryview(b"".join((self._sealed, data)) if self._sealed else data)

    def _missing_bytes(self) -> int:
        """Bytes missing before a record can be decrypted; 0 or less: none."""
        if len(self._sealed) < LENGTH_BYTES:
            return 1
        end = LENGTH_BYTES + int.from_bytes(self._sealed[:LENGTH_BYTES], "big")
        return end - len(self._sealed)

    def _wake_at(self, count: int) -> None:
        """Have the socket wake us only once this many bytes have arrived. On a slow link each
        record comes in dozens of packets, and a wake-up costs as much as decrypting."""
        if count != self._wakes_at and IS_LINUX and isinstance(self._tcp, trio.SocketStream):
            self._tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wakes_at = count

    def _open_records(self, records_max: int) -> int:
        """Decrypt the complete records. Returns the number of small ones."""
        view = self._sealed
        at = small = 0
        while records_max and len(view) - at >= LENGTH_BYTES:
            start = at + LENGTH_BYTES
            end = start + int.from_bytes(view[at:start], "big")
            if end > len(view):
                break
            try:
                record = self._opener.decrypt(_nonce(self._received), view[start:end], None)
            except InvalidTag:
                raise ConnectionClosedError("forged Noise record", transport="tcp") from None
            records_max -= 1
            self._received += 1
            small += len(record) < RECORD_BYTES_SMALL
            if record:
                self._opened.append(memoryview(record))
                self._opened_bytes += len(record)
            at = end
        rest = view[at:]
        # A part of a record is copied, so as not to hold the whole read while its end is awaited.
        self._sealed = memoryview(bytes(rest)) if records_max else rest
        return small

    async def write(self, data: bytes) -> None:
        await self.write_pieces([data])

    async def write_pieces(
        self, pieces: Sequence[bytes | memoryview], moved: Callable[[], object] = lambda: None
    ) -> None:
        """Send pieces as one message without joining the large ones. Calls `moved` after each
        partial write. Must not be cancelled half-way: sealed records have their nonce."""
        records = _records(pieces)
        sealed = bytearray(sum(len(record) for record in records) + len(records) * OVERHEAD_BYTES)
        view = memoryview(sealed)
        at = 0
        for record in records:
            start, end = at + LENGTH_BYTES, at + OVERHEAD_BYTES + len(record)
            view[at:start] = (end - start).to_bytes(LENGTH_BYTES, "big")
            self._sealer.encrypt_into(_nonce(self._sent), record, None, view[start:end])
            self._sent += 1
            at = end
        try:
            await self._send(sealed, moved)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(str(error), transport="tcp") from error

    async def _send(self, sealed: bytearray, moved: Callable[[], object]) -> None:
        at = 0
        if isinstance(self._tcp, trio.SocketStream):
            with memoryview(sealed) as view:
                while at < len(view):  # as `send_all`, but reports progress
                    at += await self._tcp.socket.send(view[at:])
                    moved()
        elif self._tcp is not None:
            await self._tcp.send_all(sealed)
        else:
            for at in range(0, len(sealed), RELAYED_STEP_BYTES):
                await self._raw.write(bytes(sealed[at : at + RELAYED_STEP_BYTES]))
                moved()


def _records(pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Cut pieces to the size of records; small pieces share one."""
    records: list[bytes | memoryview] = []
    gathered: list[bytes | memoryview] = []
    gathered_bytes = 0
    for piece in pieces:
        small = len(piece) <= JOINED_BYTES_MAX
        if gathered and (not small or gathered_bytes + len(piece) > RECORD_PLAIN_BYTES_MAX):
            records.append(b"".join(gathered))
            gathered, gathered_bytes = [], 0
        if small:
            gathered.append(piece)
            gathered_bytes += len(piece)
        else:
            view = memoryview(piece)
            step = RECORD_PLAIN_BYTES_MAX
            records.extend(view[at : at + step] for at in range(0, len(view), step))
    if gathered:
        records.append(b"".join(gathered))
    return records


def _nonce(count: int) -> bytes:
    return bytes(4) + count.to_bytes(8, "little")
