"""Attacks on a relay: reservations, circuits, and streams that become neither."""

from collections.abc import Awaitable, Callable
from functools import wraps

import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from swarm.identity import Identity
from tests.hostile.attack import (
    Assault,
    Run,
    admitting,
    attack,
    connected,
    held,
    paced,
    tried,
)
from tests.hostile.attacks.gossip import peer_bytes, wrapped
from tests.hostile.wire import Mux, Stream

HOP, STOP = "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop"
ANSWER_S = 15.0
RESERVE = wrapped(pb.HopMessage(type=pb.HopMessage.RESERVE).SerializeToString())
ACCEPT = wrapped(pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK).SerializeToString())


def connect_to(target: Identity) -> bytes:
    """The request for a circuit to somebody."""
    peer = pb.PeerId(id=peer_bytes(target))
    return wrapped(pb.HopMessage(type=pb.HopMessage.CONNECT, peer=peer).SerializeToString())


async def status_of(assault: Assault, stream: Stream) -> bool:
    """Whether the relay says yes."""
    with trio.fail_after(ANSWER_S):
        await stream.line()
        await stream.line()
        (length,) = await stream.exactly(1)
        answer = pb.HopMessage()
        answer.ParseFromString(await stream.exactly(length))
    assault.spent.count(pb.Status.Name(answer.status))
    return bool(answer.status == pb.OK)


@attack("20 a second", "1,000 keys of one address")
@admitting(20)
async def reservations(assault: Assault, mux: Mux) -> None:
    """As many reservations as there are places, held."""
    await status_of(assault, await mux.open(HOP, RESERVE))
    await held(mux, 20.0)


@attack("200 a second", "4 connections of one address")
@admitting(4)
async def hop_flood(assault: Assault, mux: Mux) -> None:
    """Ask for reservations and circuits to nobody, over and over."""
    asks = (RESERVE, connect_to(Identity.generate()))
    async for number in paced(assault, 50.0, mux=mux):
        await mux.open(HOP, asks[number % 2])


@attack("200 at once", "4 connections of one address")
@admitting(4, 0.5)
async def silent_hops(assault: Assault, mux: Mux) -> None:
    """Hop streams on which nothing is said, or half of it."""
    for number in range(200):
        await mux.open(HOP, b"\x20" if number % 2 else b"")
    await held(mux, 30.0)


def to_ourselves(count: int) -> Callable[..., Run]:
    """Decorate what a connection does with a peer of ours behind the relay: there are `count`. The
    peer can be reached through the relay alone, and takes every circuit."""

    def shaped(use: Callable[[Assault, Mux, Identity], Awaitable[None]]) -> Run:
        @wraps(use)
        async def run(assault: Assault) -> None:
            key, ready = assault.key(), trio.Event()

            async def take(stream: Stream) -> None:
                (length,) = await stream.exactly(1)
                await stream.exactly(length)
                await stream.send(ACCEPT)
                assault.spent.count("circuits")

            async def relayed() -> None:
                async with assault.admitted(240, key) as mux:
                    mux.handling[STOP] = take
                    if await status_of(assault, await mux.open(HOP, RESERVE)):
                        assault.spent.count("relayed for us")
                    ready.set()
                    await mux.over.wait()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(tried, assault, relayed)
                with trio.move_on_after(5.0):
                    await ready.wait()
                await connected(assault, count, lambda mux: use(assault, mux, key))

        return run

    return shaped


@attack("30 a second", "64 circuits of 16 keys of one address, idle")
@to_ourselves(16)
async def idle_circuits(assault: Assault, mux: Mux, target: Identity) -> None:
    """Circuits to ourselves on which nothing is ever said."""
    for _ in range(4):
        await mux.open(HOP, connect_to(target))
    await held(mux, assault.seconds)


@attack("as fast as it is relayed, 20 MB/s at most", "4 circuits of one address")
@to_ourselves(4)
async def full_circuits(assault: Assault, mux: Mux, target: Identity) -> None:
    """Circuits to ourselves that carry all that they can."""
    stream = await mux.open(HOP, connect_to(target))
    if await status_of(assault, stream):
        async for _ in paced(assault, 80.0):
            await stream.send(bytes(65_000))
