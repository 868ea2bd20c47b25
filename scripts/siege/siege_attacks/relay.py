"""What peers can make of a relay: reservations, circuits, and streams that become neither."""

import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from siege_wire import KEY_HEAD, Mux, Stream, read_line, varint

from siege_attacks import Assault, attack, held, over_and_over, paced, side_by_side, tried
from swarm.identity import Identity, public_key_of

HOP, STOP = "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop"
ANSWER_S = 15.0


def sized(message: object) -> bytes:
    """A message with its length before it."""
    data = message.SerializeToString()  # type: ignore[attr-defined]
    return varint(len(data)) + bytes(data)


def connect_to(target: Identity) -> bytes:
    """Ask the relay for a circuit to somebody."""
    peer = b"\x00\x24" + KEY_HEAD + public_key_of(target.peer_id)
    return sized(pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=peer)))


RESERVE = sized(pb.HopMessage(type=pb.HopMessage.RESERVE))


async def status_of(assault: Assault, stream: Stream) -> bool:
    """Whether the relay says yes."""
    with trio.fail_after(ANSWER_S):
        await read_line(stream)
        await read_line(stream)
        (length,) = await stream.exactly(1)
        answer = pb.HopMessage()
        answer.ParseFromString(await stream.exactly(length))
    assault.spent.count(pb.Status.Name(answer.status))
    return bool(answer.status == pb.OK)


@attack("relay", "20 a second", "1,000 keys of one address")
async def reservations(assault: Assault) -> None:
    """As many reservations as there are places, held."""

    async def one(place: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                await status_of(assault, await mux.open(HOP, RESERVE))
                await held(mux, 20.0)

        await over_and_over(assault, once, 1.0, 50)

    await side_by_side(20, one)


@attack("relay", "200 a second", "4 connections of one address")
async def hop_flood(assault: Assault) -> None:
    """Ask for reservations and circuits to nobody, over and over."""
    nobody = connect_to(Identity.generate())

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                async for number in paced(assault, 50.0, 100_000):
                    await mux.open(HOP, (RESERVE, nobody)[number % 2])
                    if mux.over.is_set():
                        return

        await over_and_over(assault, once, 1.0)

    await side_by_side(4, one)


@attack("relay", "200 at once", "4 connections of one address")
async def silent_hops(assault: Assault) -> None:
    """Hop streams on which nothing is said, or half of it."""

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                for number in range(200):
                    await mux.open(HOP, b"\x20" if number % 2 else b"")
                await held(mux, 30.0)

        await over_and_over(assault, once, 0.5)

    await side_by_side(4, one)


async def relayed(assault: Assault, key: Identity, ready: trio.Event) -> None:
    """A peer of ours that can be reached through the relay alone, and takes every circuit."""

    async def take(stream: Stream) -> None:
        (length,) = await stream.exactly(1)
        await stream.exactly(length)
        await stream.send(sized(pb.StopMessage(type=pb.StopMessage.STATUS, status=pb.OK)))
        assault.spent.count("circuits")

    async with assault.admitted(240, key) as mux:
        mux.handling[STOP] = take
        if await status_of(assault, await mux.open(HOP, RESERVE)):
            assault.spent.count("relayed for us")
        ready.set()
        await mux.over.wait()


async def _with_relayed(assault: Assault, use: object) -> None:
    """Keep a peer of ours behind the relay while `use` makes circuits to it."""
    assert callable(use)
    key, ready = assault.key(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tried, assault, relayed, assault, key, ready)
        with trio.move_on_after(5.0):
            await ready.wait()
        await use(key)
        nursery.cancel_scope.cancel()


@attack("relay", "30 a second", "64 circuits of 16 keys of one address, idle")
async def idle_circuits(assault: Assault) -> None:
    """Circuits to ourselves on which nothing is ever said."""

    async def use(target: Identity) -> None:
        async def one(_: int) -> None:
            async def once(_: int) -> None:
                async with assault.admitted(0) as mux:
                    for _number in range(4):
                        await mux.open(HOP, connect_to(target))
                    await held(mux, assault.seconds)

            await over_and_over(assault, once, 1.0)

        await side_by_side(16, one)

    await _with_relayed(assault, use)


@attack("relay", "as fast as it is relayed, 20 MB/s at most", "4 circuits of one address")
async def full_circuits(assault: Assault) -> None:
    """Circuits to ourselves that carry all that they can."""

    async def pour(mux: Mux, target: Identity) -> None:
        stream = await mux.open(HOP, connect_to(target))
        if await status_of(assault, stream):
            async for _ in paced(assault, 80.0, 100_000):
                await stream.send(bytes(65_000))

    async def use(target: Identity) -> None:
        async def one(_: int) -> None:
            async def once(_: int) -> None:
                async with assault.admitted(0) as mux:
                    await pour(mux, target)

            await over_and_over(assault, once, 1.0)

        await side_by_side(4, one)

    await _with_relayed(assault, use)
