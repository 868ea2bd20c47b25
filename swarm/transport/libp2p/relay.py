"""Relayed connections: libp2p's circuit relay v2.

An unreachable peer keeps a reservation at a relay. A dialler asks the relay, which asks the peer;
then the relay copies bytes, and the two ends secure their connection through it. The relay sees
ciphertext only. Upstream's relay copies without pacing and has no deadlines.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.utils import encode_varint_prefixed

from swarm.errors import PeerUnreachable, Reject, RemoteProtocolError, RequestRefused
from swarm.identity import PeerId
from swarm.limits.address_blocks import OriginPath, path_of
from swarm.limits.bounded_table import BoundedTable, OriginLimits
from swarm.limits.quotas import ByteBudget, Kind, Quotas, Verdict, shared_block
from swarm.transport.libp2p.negotiation import Reader, agree, proposal
from swarm.transport.libp2p.streams import READ_BYTES, reset
from swarm.transport.libp2p.yamux import MuxedConnection

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
MESSAGE_BYTES_MAX = 4_096
MESSAGE_TIMEOUT_S = 10.0

RESERVATION_S = 3_600
RESERVATIONS_MAX = 64
RESERVATIONS_PER_BLOCK_MAX = 8  # per public address block, or per private address
CIRCUITS_MAX = 64
CIRCUITS_PER_PEER_MAX = 8
CIRCUITS_PER_BLOCK_MAX = 16  # per public block, at either end
CIRCUITS_PER_PRIVATE_IP_MAX = 32  # half of all: it may be a swarm, or one attacker
CIRCUITS_TO_ONE_MAX = 4  # to one peer, from one public block or one private peer
CIRCUIT_S_MAX = 7_200
CIRCUIT_IDLE_S_MAX = 120  # in this time it must carry:
CIRCUIT_IDLE_BYTES_MIN = 256  # an honest one carries a ping of 30 bytes every 10 s
CIRCUIT_BYTES_MAX = 1_073_741_824  # both ways together
RELAYED_BYTES_PER_S_MAX = 4_194_304.0  # of all circuits together

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


async def read_message(reader: Reader, kind: type[M]) -> M:
    """Read one length-prefixed protobuf message. RemoteProtocolError: malformed or too long."""
    length = await reader.length("circuit message")
    if length > MESSAGE_BYTES_MAX:
        raise RemoteProtocolError(Reject.OVERSIZE, f"circuit message of {length} bytes")
    message = kind()
    try:
        message.ParseFromString(await reader.exactly(length))
    except DecodeError:
        raise RemoteProtocolError(Reject.MALFORMED, "no circuit message") from None
    return message


def encoded(message: Message) -> bytes:
    """The message with its length prefix."""
    return bytes(encode_varint_prefixed(message.SerializeToString()))


class Call:
    """An outbound stream for messages of one protocol."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.reader = Reader(stream, READ_BYTES)

    @classmethod
    async def open(cls, conn: SwarmConn, protocol: str, first: Message) -> "Call":
        """Ask for the protocol and send the first message in one write. RequestRefused: it is not
        served. RemoteProtocolError: a malformed answer. BaseLibp2pError: no connection any more."""
        assert isinstance(conn.muxed_conn, MuxedConnection)
        call = cls(await conn.muxed_conn.open_stream())
        try:
            await call.stream.write(proposal(protocol) + encoded(first))
            await agree(call.reader, protocol)
        except BaseException:
            await call.drop()
            raise
        return call

    @classmethod
    async def ask(cls, conn: SwarmConn, protocol: str, request: M) -> tuple["Call", M]:
        """As `open`, and read the answer, a message of the same type. RequestRefused,
        RemoteProtocolError, BaseLibp2pError: as `open`."""
        call = await cls.open(conn, protocol, request)
        try:
            return call, await read_message(call.reader, type(request))
        except BaseException:
            await call.drop()
            raise

    async def send(self, message: Message) -> None:
        await self.stream.write(encoded(message))

    async def drop(self) -> None:
        with trio.CancelScope(shield=True):
            await reset(self.stream)


class CircuitStream(ReadWriteCloser):
    """A relayed stream in place of a socket. It has no address."""

    def __init__(self, stream: Any, read_ahead: bytes) -> None:
        self._stream = stream
        self._rest = read_ahead

    async def read(self, n: int | None = None) -> bytes:
        if self._rest:
            count = len(self._rest) if n is None else n
            part, self._rest = self._rest[:count], self._rest[count:]
            return part
        try:
            return bytes(await self._stream.read(READ_BYTES if n is None else n))
        except MuxedStreamEOF:
            return b""
        except BaseLibp2pError as error:
            raise ConnectionClosedError("the circuit is gone", transport="relay") from error

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except BaseLibp2pError as error:
            raise ConnectionClosedError("the circuit is gone", transport="relay") from error

    async def close(self) -> None:
        await reset(self._stream)

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


# --- asking a relay ----------------------------------------------------------------------------


async def reserve(conn: SwarmConn) -> int:
    """Ask the peer to relay for us. Returns the duration in seconds. PeerUnreachable: it refuses or
    does not answer. RemoteProtocolError: the answer is malformed."""
    call = await _ask_relay(conn, pb.HopMessage(type=pb.HopMessage.RESERVE), MESSAGE_TIMEOUT_S)
    await call.drop()
    return RESERVATION_S


async def dial_through(conn: SwarmConn, target: ID) -> CircuitStream:
    """Open a stream to `target` through the relay at the other end of `conn`. PeerUnreachable: the
    target has no reservation there, or the relay refuses. RemoteProtocolError: the answer is
    malformed."""
    request = pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=target.to_bytes()))
    call = await _ask_relay(conn, request, 2 * MESSAGE_TIMEOUT_S)
    return CircuitStream(call.stream, call.reader.rest)


async def _ask_relay(conn: SwarmConn, request: pb.HopMessage, timeout_s: float) -> Call:
    try:
        with trio.fail_after(timeout_s):
            call, answer = await Call.ask(conn, HOP_PROTOCOL, request)
    except (BaseLibp2pError, RequestRefused, trio.TooSlowError) as error:
        raise PeerUnreachable(f"the relay does not answer: {error}") from error
    if answer.type != pb.HopMessage.STATUS or answer.status != pb.OK:
        await call.drop()
        raise PeerUnreachable(f"the relay refuses: status {answer.status}")
    return call


async def accept_circuit(stream: Any) -> CircuitStream:
    """Accept a circuit from a relay. RemoteProtocolError: the relay breaks the protocol."""
    reader = Reader(stream, READ_BYTES)
    with trio.fail_after(MESSAGE_TIMEOUT_S):
        message = await read_message(reader, pb.StopMessage)
        if message.type != pb.StopMessage.CONNECT or not message.peer.id:
            raise RemoteProtocolError(Reject.MALFORMED, "no stop message")
        answer = pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK)
        await stream.write(encoded(answer))
    return CircuitStream(stream, reader.rest)


# --- being a relay -----------------------------------------------------------------------------


@dataclass(slots=True)
class RelayFigures:
    circuits: int = 0
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)  # circuits, by the limit reached


@dataclass(slots=True)
class _Circuit:
    """Remaining time and bytes of a circuit."""

    idle: trio.CancelScope  # traffic moves its deadline
    bytes_left: int
    bytes_since: int = 0  # the deadline last moved

    def move(self, size: int) -> None:
        self.bytes_left -= size
        self.bytes_since += size
        if self.bytes_since >= CIRCUIT_IDLE_BYTES_MIN:  # single bytes do not keep a circuit alive
            self.bytes_since = 0
            self.idle.deadline = trio.current_time() + CIRCUIT_IDLE_S_MAX


_Circuits = BoundedTable[trio.CancelScope, None]


class Relay:
    """The relay's side, for directly connected peers."""

    def __init__(
        self,
        connection_of: Callable[[ID], SwarmConn | None],
        ip_of: Callable[[ID], str | None],
        offers: Callable[[], bool],
        blame: Callable[[ID, Reject], None],
    ) -> None:
        """`connection_of` gives the direct connection to a peer. `offers` is asked for each
        reservation. `blame` is called with peers that send malformed messages."""
        self._connection_of = connection_of
        self._ip_of = ip_of
        self._offers = offers
        self._blame = blame
        reservations = OriginLimits(
            block=RESERVATIONS_PER_BLOCK_MAX, private_address=RESERVATIONS_PER_BLOCK_MAX
        )
        circuits = OriginLimits(
            block=CIRCUITS_PER_BLOCK_MAX,
            private_address=CIRCUITS_PER_PRIVATE_IP_MAX,
            peer=CIRCUITS_PER_PEER_MAX,
            asker=CIRCUITS_TO_ONE_MAX,
        )
        self._reserved: BoundedTable[ID, float] = BoundedTable(
            RESERVATIONS_MAX, limit_of=reservations, newest_first=True
        )  # end of the reservation
        self._by_asker = _Circuits(CIRCUITS_MAX, limit_of=circuits, newest_first=True)
        self._by_target = _Circuits(CIRCUITS_MAX, limit_of=circuits, newest_first=True)
        self._quotas = Quotas()
        self._budget: ByteBudget | None = None
        self.figures = RelayFigures()

    @property
    def reservations(self) -> int:
        self._forget()
        return len(self._reserved)

    async def serve(self, stream: INetStream) -> None:
        """Serve one inbound hop stream until its circuit ends."""
        raw: Any = stream.muxed_stream  # type: ignore[attr-defined]
        asker = stream.muxed_conn.peer_id
        reader = Reader(raw, READ_BYTES)
        try:
            with trio.fail_after(MESSAGE_TIMEOUT_S):
                message = await read_message(reader, pb.HopMessage)
            if message.type == pb.HopMessage.RESERVE:
                await self._answer_and_close(raw, await self._reserve(asker))
            elif message.type == pb.HopMessage.CONNECT:
                await self._connect(raw, reader, asker, ID(message.peer.id))
            else:
                await self._answer_and_close(raw, pb.UNEXPECTED_MESSAGE)
        except (BaseLibp2pError, RemoteProtocolError, trio.TooSlowError) as error:
            log.debug("hop stream of %s ended: %r", asker, error)
            if isinstance(error, RemoteProtocolError):
                self._blame(asker, error.reason)
            await reset(raw)

    async def _answer(self, raw: Any, status: int) -> None:
        answer = pb.HopMessage(type=pb.HopMessage.STATUS, status=status)  # type: ignore[arg-type]
        if status == pb.OK:
            answer.limit.duration = CIRCUIT_S_MAX
            answer.limit.data = CIRCUIT_BYTES_MAX
            answer.reservation.expire = 0  # clocks differ; the limits hold
        else:
            self.figures.refused[pb.Status.Name(status)] += 1  # type: ignore[arg-type]
        await raw.write(encoded(answer))

    async def _answer_and_close(self, raw: Any, status: int) -> None:
        await self._answer(raw, status)
        await raw.close()

    def _forget(self) -> None:
        now_s = trio.current_time()
        for peer, until_s in list(self._reserved.items()):
            if until_s <= now_s or self._connection_of(peer) is None:
                self._reserved.pop(peer)

    async def _reserve(self, asker: ID) -> int:
        ip = self._ip_of(asker)
        if ip is None:
            return pb.PERMISSION_DENIED  # relayed itself
        self._forget()
        if not self._offers():
            return pb.RESERVATION_REFUSED
        gone = self._reserved.put(asker, trio.current_time() + RESERVATION_S, path_of(ip))
        if gone is not None and gone.key == asker:
            return pb.RESOURCE_LIMIT_EXCEEDED
        if gone is not None and (conn := self._connection_of(gone.key)) is not None:
            await conn.close()  # tells it that the reservation is gone
        return pb.OK

    async def _connect(self, raw: Any, reader: Reader, asker: ID, target: ID) -> None:
        self._forget()
        conn = self._connection_of(target) if target in self._reserved else None
        ip, who, now_s = self._ip_of(asker), PeerId(str(asker)), trio.current_time()
        if ip is None or asker == target:
            refusal = pb.PERMISSION_DENIED
        elif (  # each circuit costs the target a stream
            self._quotas.spend(Kind.CONNECT, who, shared_block(ip), now_s) is not Verdict.GRANTED
        ):
            refusal = pb.RESOURCE_LIMIT_EXCEEDED
        elif conn is None:
            refusal = pb.NO_RESERVATION
        else:
            with trio.CancelScope() as circuit, self._counted(circuit, asker, ip, target) as is_in:
                if is_in:
                    await self._bridge(raw, reader, asker, conn)
                    return
            if circuit.cancelled_caught:
                return
            refusal = pb.RESOURCE_LIMIT_EXCEEDED
        await self._answer_and_close(raw, refusal)

    @contextmanager
    def _counted(self, circuit: trio.CancelScope, asker: ID, ip: str, target: ID) -> Iterator[bool]:
        """Count a circuit while it exists. Yields False if there is no room. Eviction cancels
        `circuit`."""
        to = (*path_of(self._ip_of(target)), str(target), shared_block(ip) or str(asker))
        try:
            is_in = self._add_circuit(self._by_asker, circuit, (*path_of(ip), str(asker)))
            yield is_in and self._add_circuit(self._by_target, circuit, to)
        finally:
            self._drop_circuit(circuit)

    def _add_circuit(self, table: _Circuits, circuit: trio.CancelScope, path: OriginPath) -> bool:
        gone = table.put(circuit, None, path)
        self.figures.circuits = len(self._by_asker)
        if gone is None:
            return True
        self._drop_circuit(gone.key)
        if gone.key is circuit:
            return False
        gone.key.cancel()
        self.figures.ended["crowded"] += 1
        return True

    def _drop_circuit(self, circuit: trio.CancelScope) -> None:
        self._by_asker.pop(circuit)
        self._by_target.pop(circuit)
        self.figures.circuits = len(self._by_asker)

    async def _bridge(self, raw: Any, reader: Reader, asker: ID, conn: SwarmConn) -> None:
        call = await self._call(conn, asker)
        if call is None:
            await self._answer_and_close(raw, pb.CONNECTION_FAILED)
            return
        try:
            await self._answer(raw, pb.OK)
            await self._copy_both_ways((raw, reader.rest), (call.stream, call.reader.rest))
        finally:
            await call.drop()
            with trio.CancelScope(shield=True):
                await reset(raw)

    async def _call(self, conn: SwarmConn, asker: ID) -> Call | None:
        """Ask the target to accept. None: it does not."""
        request = pb.StopMessage(type=pb.StopMessage.CONNECT, peer=pb.PeerId(id=asker.to_bytes()))
        request.limit.duration, request.limit.data = CIRCUIT_S_MAX, CIRCUIT_BYTES_MAX
        with trio.move_on_after(MESSAGE_TIMEOUT_S):
            try:
                call, answer = await Call.ask(conn, STOP_PROTOCOL, request)
            except RemoteProtocolError as error:
                self._blame(conn.muxed_conn.peer_id, error.reason)
                return None
            except (BaseLibp2pError, RequestRefused):
                return None
            if answer.type == pb.StopMessage.STATUS and answer.status == pb.OK:
                return call
            await call.drop()
        return None

    async def _copy_both_ways(self, one: tuple[Any, bytes], other: tuple[Any, bytes]) -> None:
        with (
            trio.move_on_after(CIRCUIT_S_MAX) as life,
            trio.move_on_after(CIRCUIT_IDLE_S_MAX) as idle,
        ):
            circuit = _Circuit(idle, CIRCUIT_BYTES_MAX)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, one, other[0], circuit, nursery.cancel_scope)
                nursery.start_soon(self._copy, other, one[0], circuit, nursery.cancel_scope)
        if circuit.bytes_left <= 0:
            self.figures.ended["bytes"] += 1
        elif life.cancelled_caught:
            self.figures.ended["age"] += 1
        elif idle.cancelled_caught:
            self.figures.ended["idle"] += 1

    async def _copy(
        self, source: tuple[Any, bytes], sink: Any, circuit: _Circuit, scope: trio.CancelScope
    ) -> None:
        """Copy until an end is gone or the circuit is over its limit; then end both directions."""
        stream, data = source
        try:
            while circuit.bytes_left > 0:
                if data:
                    circuit.move(len(data))
                    self.figures.bytes += len(data)
                    await trio.sleep(self._pace_s(len(data)))
                    await sink.write(data)
                data = bytes(await stream.read(READ_BYTES))
        except BaseLibp2pError:
            pass  # ends the other direction, too
        scope.cancel()

    def _pace_s(self, size: int) -> float:
        now_s = trio.current_time()
        if self._budget is None:
            self._budget = ByteBudget(RELAYED_BYTES_PER_S_MAX, now_s)
        return self._budget.spend(size, now_s)
