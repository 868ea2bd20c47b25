"""A node's network half on a desk: the real handlers, and a peer whose bytes are the input's.

Real are the stream handling of the libp2p transport, GossipSub's reading, discovery, exchange, the
fetcher and the pool. The muxed stream below them gives out what an input says, in the pieces that
it says; time is virtual.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from enum import IntEnum
from random import Random
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing
from google.protobuf.message import DecodeError
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset

from swarm.errors import PeerUnreachable, RemoteProtocolError, RequestRefused
from swarm.exchange.exchange_service import Exchange, ExchangeRules
from swarm.exchange.pool import Pool, PoolLimits
from swarm.identity import Identity, PeerId
from swarm.limits.bounded_table import OriginLimits
from swarm.peers.discovery import AddressBook, Discovery, NodeInfo
from swarm.rollouts import RolloutGroup
from swarm.storage import Runtime
from swarm.transport.base import (
    Admit,
    Asks,
    Gate,
    GossipMessage,
    Handler,
    Report,
    Sent,
    ServeLimits,
    Validator,
    admit_all,
    ask_always,
    ignore_sent,
)
from swarm.transport.connection_slots import SlotFigures
from swarm.transport.libp2p.gossipsub import MESHSUB_PROTOCOL
from swarm.transport.libp2p.host import Libp2pTransport
from swarm.transport.libp2p.reachability import ReachRules
from swarm.transport.libp2p.yamux import MuxedConnection, Stream
from swarm.transport.metering import UNMETERED
from swarm.wire.messages import adverts_topic
from tests.wire_samples import ALICE, BOB

CAROL = Identity(bytes(range(2, 34)))  # the node; nothing that she signed is in any seed
RUN_ID = "sample-1"
NOW_S = 1_800_000_100
PATIENCE_S = 300.0  # virtual, after which a silent stream ends by itself
SINGLE_BYTES = 100
PIECES_MAX = 500
DAY_S = 86_400.0
HEAD_BYTES = 3  # of an input: mode, end, cut
BENCH_RUNS = 100  # inputs on one bench
CASE_S = 2 * PATIENCE_S  # within which an input is over
RULES = ExchangeRules(
    run_id=RUN_ID, stock_groups=8, record_life_s=1_200, clock_skew_s=30, group_size_max=8
)

logging.getLogger("libp2p").setLevel(logging.CRITICAL)

ENDS_A_STREAM = (
    BaseLibp2pError,
    DecodeError,
    RemoteProtocolError,
    RequestRefused,
    trio.TooSlowError,
)


class Swallowed(logging.Handler):
    """What the boundary around libp2p's handlers takes for the peer's fault and only logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.errors: list[BaseException] = []
        log = logging.getLogger("swarm.transport.libp2p.host")
        log.setLevel(logging.DEBUG)
        log.propagate = False
        log.handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        self.errors += [each for each in arguments if isinstance(each, BaseException)]

    def check(self) -> None:
        """Raise the first that no bytes of a peer should cause."""
        errors, self.errors = self.errors, []
        for error in errors:
            if not isinstance(error, ENDS_A_STREAM):
                raise error


class End(IntEnum):
    """What comes after an input's last byte."""

    EOF = 0
    RESET = 1
    SILENCE = 2
    DEAF = 3  # silence, and nothing can be written


def pieces(data: bytes, cut: int) -> Iterator[bytes]:
    """The data in pieces: 0 is all at once, 1 begins with single bytes, others are drawn. What
    `PIECES_MAX` leave over comes at once: each piece costs a read, whatever is in it."""
    random, at = Random(cut), 0
    for number in range(PIECES_MAX):
        single = cut == 1 and number < SINGLE_BYTES
        drawn = random.choice((1, 2, 3, 5, 17, 100, 1_000)) if cut > 1 else len(data)
        size = 1 if single else drawn
        if at < len(data):
            yield data[at : at + size]
        at += size
    if at < len(data):
        yield data[at:]


class DeskConnection(MuxedConnection):
    """Stands where a connection would; carries no frames."""

    def __init__(self, peer: ID) -> None:
        self.peer_id = peer
        self.event_shutting_down = trio.Event()
        self.stream_buffers = {1: bytearray()}
        self.stream_events = {1: trio.Event()}
        self.secured_conn: Any = SimpleNamespace(get_remote_address=lambda: None)
        self.payer = UNMETERED


class DeskStream(Stream):
    """A muxed stream that gives out the input and swallows what is written."""

    def __init__(self, peer: ID, data: bytes, cut: int, end: End) -> None:
        self.conn = self.muxed_conn = DeskConnection(peer)
        self.stream_id = 1
        self._pieces = pieces(data, cut)
        self._held = self.conn.stream_buffers[1]
        self._end = end
        self.recv_closed = False
        self.is_reset = False
        self.outlasted = False  # longer silent than a handler of ours waits
        self.written = 0

    async def read(self, n: int | None = -1) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.is_reset:
            raise MuxedStreamReset("reset here")
        if not self._held:
            self._held += next(self._pieces, b"")
        if not self._held:
            return await self._after_the_end()
        count = len(self._held) if n is None or n < 0 else n
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    async def _after_the_end(self) -> bytes:
        if self._end is End.EOF:
            self.recv_closed = True
            raise MuxedStreamEOF("the input is over")
        if self._end is End.RESET:
            raise MuxedStreamReset("the input is over")
        await trio.sleep(PATIENCE_S)
        self.outlasted = True
        raise MuxedStreamReset("nobody gave it up")

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_reset or self._end is End.DEAF:
            raise MuxedStreamError("closed for sending")
        self.written += len(data)

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        self.is_reset = True


class DeskTransport:
    """`Transport` of the layers above: serves by the real one, and its peers answer by `answer`."""

    def __init__(self, real: Libp2pTransport) -> None:
        self._real = real
        self.peer_id = real.peer_id
        self.counters = real.counters
        self.answer: Callable[[str], bytes | None] = lambda protocol: None
        self.connected = (ALICE.peer_id,)

    def addresses(self) -> tuple[str, ...]:
        return (f"/ip4/10.0.0.3/tcp/4001/p2p/{self.peer_id}",)

    def peers(self) -> tuple[PeerId, ...]:
        return self.connected

    @property
    def door(self) -> SlotFigures | None:
        return None

    def ip_of(self, peer: PeerId) -> str | None:
        return "203.0.113.7"

    def set_gate(self, gate: Gate, limits: OriginLimits | None = None) -> None:
        self._real.set_gate(gate, limits)

    def report_to(self, report: Report) -> None:
        self._real.report_to(report)

    async def connect(self, address: str, *, timeout_s: float = 15.0) -> PeerId:
        await trio.lowlevel.checkpoint()
        raise PeerUnreachable(address)

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        self.connected = tuple(each for each in self.connected if each != peer)

    def serve(
        self, protocol: str, handler: Handler, limits: ServeLimits, sent: Sent = ignore_sent
    ) -> None:
        self._real.serve(protocol, handler, limits)

    async def request(
        self,
        peer: PeerId,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        response_bytes_max: int,
    ) -> bytes:
        await trio.lowlevel.checkpoint()
        answer = self.answer(protocol)
        if answer is None or len(answer) > response_bytes_max:
            raise PeerUnreachable(peer)
        return answer

    async def publish(self, topic: str, payload: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def subscribe(
        self, topic: str, validate: Validator, admit: Admit = admit_all, asks: Asks = ask_always
    ) -> trio.MemoryReceiveChannel[GossipMessage]:
        return await self._real.subscribe(topic, validate, admit, asks)


class Desk:
    """The parts of one input that live as long as it does."""

    def __init__(self, real: Libp2pTransport, pool: Pool) -> None:
        self.real = real
        self.swallowed = Swallowed()
        self.transport = DeskTransport(real)
        clock: dict[str, Any] = {"now_s": now_s, "rng": Random(0), "run_sync": run_inline}
        self.exchange = Exchange(RULES, CAROL, self.transport, pool, verify, Runtime(**clock))
        self.discovery = Discovery(
            NodeInfo(RUN_ID, "fuzz", CAROL, bytes(16)),
            (),
            AddressBook(),
            self.exchange.gater,
            **clock,
        )

    async def serve_stream(self, data: bytes, cut: int, end: End) -> DeskStream:
        """Let the node serve an inbound stream of Alice's to its end."""
        stream = DeskStream(ID.from_base58(ALICE.peer_id), data, cut, end)
        connection = SwarmConn(stream.conn, self.real._network)
        net_stream = NetStream(stream, connection, None)
        connection.streams.add(net_stream)
        await self.real._on_stream(net_stream)
        self.swallowed.check()
        assert not stream.outlasted or net_stream.get_protocol() == MESHSUB_PROTOCOL, "no end"
        return stream


def now_s() -> float:
    return NOW_S + trio.current_time() % DAY_S


async def run_inline(function: Callable[..., Any], *args: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


async def verify(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
    """Every group is taken: what the verifier would refuse is not what is tried here."""
    await trio.lowlevel.checkpoint()
    return "prompt", tuple(float(i % 2) for i in range(len(group.completions)))


class Bench:
    """What many inputs share, for it is slow to make: the transport and a pool with one group."""

    def __init__(self) -> None:
        self.real = Libp2pTransport(CAROL, (), None, ReachRules(), Random(0))
        self.pool = Pool(":memory:", PoolLimits())
        self._manager: Any = SimpleNamespace(is_running=False)
        self.real._gossip._manager = self._manager
        self.real._network.notifees.clear()  # gossip does not run to hear of ends
        self._desk: Desk | None = None

    def _connect(self, peer: Identity) -> None:
        """Let gossip know a peer, in the mesh of our topic, that takes what is sent to it."""
        gossip, name = self.real._gossip, ID.from_base58(peer.peer_id)
        stream: Any = SimpleNamespace(muxed_conn=DeskConnection(name))
        gossip.peers[name] = stream
        gossip.peer_queues[name] = RpcQueue()
        gossip.router.add_peer(name, MESHSUB_PROTOCOL)
        gossip.peer_topics.setdefault(adverts_topic(RUN_ID), set()).add(name)
        self.real._router.mesh[adverts_topic(RUN_ID)].add(name)

    @asynccontextmanager
    async def new_desk(self) -> AsyncIterator[Desk]:
        """A node as new, with all its loops."""
        self.real._served.clear()
        self.real._subscriptions.clear()
        assert self.real._reach is not None
        self.real._reach.start()
        self._desk = Desk(self.real, self.pool)
        async with trio.open_nursery() as loops:
            await loops.start(self._desk.exchange.run)
            await loops.start(self._desk.discovery.run)
            for peer in (ALICE, BOB):
                self._connect(peer)
            self.real._nursery = loops
            loops.start_soon(self.real._network.meter.run)
            yield self._desk
            loops.cancel_scope.cancel()

    @asynccontextmanager
    async def desk(self) -> AsyncIterator[Desk]:
        """A node that only serves."""
        if self._desk is None:
            async with self.new_desk():
                pass
        assert self._desk is not None
        async with trio.open_nursery() as self.real._nursery:
            self.real._nursery.start_soon(self.real._network.meter.run)
            yield self._desk
            self.real._nursery.cancel_scope.cancel()


def run_case(async_fn: Callable[..., Any], *args: Any, day: int = 0) -> None:
    """Run one input under a virtual clock; one that is not over in `CASE_S` raises.

    Each input of one bench has a day for itself, so that no ban or quota of another's is left.
    """

    async def bounded() -> None:
        with trio.fail_after(CASE_S):
            await async_fn(*args)

    clock = trio.testing.MockClock(autojump_threshold=0.0)
    clock.jump(DAY_S * day)
    trio.run(bounded, clock=clock)


Run = Callable[[Bench, int, End, int, bytes], Awaitable[None]]


class BenchCheck:
    """The check of a target whose inputs share a bench, which is made anew now and then.

    An input is a mode, its end (`End`), how its bytes are cut into pieces, and the bytes.

    Raises:
        Exception: whatever the node lets out.
    """

    def __init__(self, modes: int, run: Run) -> None:
        self._modes = modes
        self._run = run
        self._bench: Bench | None = None
        self._runs = 0

    def __call__(self, data: bytes) -> None:
        if len(data) < HEAD_BYTES:
            return
        if self._runs >= BENCH_RUNS:
            self._bench, self._runs = None, 0
        day = self._runs
        self._runs += 1
        try:
            run_case(self._case, data, day=day)
        except Exception as error:
            self._bench, self._runs = None, 0
            if day:  # does it fail on a new bench, too?
                self(data)
                error.add_note(f"only as input {day} of its bench")
            raise

    async def _case(self, data: bytes) -> None:
        if self._bench is None:
            self._bench = Bench()
        mode, end = data[0] % self._modes, End(data[1] % len(End))
        await self._run(self._bench, mode, end, data[2], data[HEAD_BYTES:])
