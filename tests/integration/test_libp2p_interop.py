"""Ours and go-libp2p: handshake, identify, ping, streams and gossip, whoever dialled.

The other side is go-libp2p's daemon p2pd, which `tests/p2pd.py` fetches.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID

from swarm.errors import PeerUnreachable
from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p.gossipsub import MESHSUB_PROTOCOL
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.streams import LENGTH, STATUS
from tests import p2pd
from tests.support import run

pytestmark = [pytest.mark.integration, pytest.mark.interop]

PING, IDENTIFY = "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"
PROTOCOL = "/test/echo/1.0.0"
TOPIC = "/test/topic/1.0.0"
PING_BYTES = 32
MIB = 1_048_576


@asynccontextmanager
async def met(we_dial: bool, *flags: str) -> AsyncIterator[tuple[Libp2pTransport, Any, ID]]:
    """Our transport, the daemon, and the daemon's peer id."""
    async with (
        p2pd.Daemon.running(p2pd.find(), *flags) as daemon,
        open_libp2p(Identity(b"a" * 32), ["/ip4/127.0.0.1/tcp/0"]) as ours,
    ):
        address = (await daemon.identify())[0]
        theirs = ID.from_base58(address.rpartition("/p2p/")[2])
        if we_dial:
            await ours.connect(address)
        else:
            await daemon.connect(ours.addresses()[0])
        with trio.fail_after(10.0):
            while str(theirs) not in ours.peers() or not await daemon.peers():  # noqa: ASYNC110
                await trio.sleep(0.02)
        assert await daemon.peers() == [ours.peer_id]
        yield ours, daemon, theirs


async def exactly(stream: Any, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await stream.receive_some(count - len(data))
        assert piece, "the stream ended"
        data += piece
    return data


async def until_end(stream: Any) -> bytes:
    data = b""
    while piece := await stream.receive_some(65_536):
        data += piece
    return data


@pytest.mark.parametrize("we_dial", [True, False], ids=["we dial", "they dial"])
def test_ping_and_identify_both_ways(we_dial: bool) -> None:
    async def main() -> None:
        async with met(we_dial) as (ours, daemon, theirs):
            payload = bytes(range(PING_BYTES))
            stream = await ours._host.new_stream(theirs, [TProtocol(PING)])
            await stream.write(payload)
            assert await stream.read(PING_BYTES) == payload
            async with await daemon.open_stream(ours.peer_id, PING) as socket:
                await socket.send_all(payload)
                assert await exactly(socket, PING_BYTES) == payload
            async with await daemon.open_stream(ours.peer_id, IDENTIFY) as socket:
                said = Identify()
                said.ParseFromString((await until_end(socket))[2:])  # after a length of two bytes
            assert ID.from_pubkey(ours._host.get_public_key()) == ours._id
            assert said.public_key == ours._host.get_public_key().serialize()
            assert MESHSUB_PROTOCOL in said.protocols

    run(main)


@pytest.mark.parametrize("we_dial", [True, False], ids=["we dial", "they dial"])
def test_megabytes_pass_both_ways(we_dial: bool) -> None:
    async def main() -> None:
        data = random.Random(0).randbytes(8 * MIB)

        async def echo(socket: Any) -> None:
            await socket.send_all(await exactly(socket, len(data)))

        async with (
            met(we_dial) as (ours, daemon, theirs),
            daemon.serving("/test/raw", echo),
        ):
            stream = await ours._host.new_stream(theirs, [TProtocol("/test/raw")])
            got = b""
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, data)
                while len(got) < len(data):
                    got += await stream.read(MIB)
            assert got == data

    run(main)


def test_a_go_peer_may_ask_us() -> None:
    """The protocol of requests needs no more than streams."""

    async def main() -> None:
        async def echo(peer: PeerId, payload: bytes) -> bytes:
            return payload

        async with met(True) as (ours, daemon, _):
            ours.serve(PROTOCOL, echo, ServeLimits(MIB, MIB))
            async with await daemon.open_stream(ours.peer_id, PROTOCOL) as socket:
                payload = bytes(300_000)
                await socket.send_all(LENGTH.pack(len(payload)) + payload)
                status, length = STATUS.unpack(await exactly(socket, STATUS.size))
                assert (status, length) == (0, len(payload))
                assert await exactly(socket, length) == payload

    run(main)


async def go_on_saying(daemon: Any) -> None:
    """Publish something bad and something good, again and again.

    What waits in the queue of a stream is lost if a side replaces that stream.
    """
    while True:
        await daemon.publish(TOPIC, b"bad")
        await daemon.publish(TOPIC, b"from go")
        await trio.sleep(1.0)


@pytest.mark.parametrize("we_dial", [True, False], ids=["we dial", "they dial"])
def test_gossip_goes_both_ways(we_dial: bool) -> None:
    async def main() -> None:
        flags = ("-pubsub", "-gossipsubHeartbeatInterval=200ms")
        async with met(we_dial, *flags) as (ours, daemon, theirs):
            channel = await ours.subscribe(TOPIC, lambda peer, payload: payload != b"bad")
            async with daemon.subscribed(TOPIC) as receive:
                with trio.fail_after(20.0):
                    while theirs not in ours._router.mesh[TOPIC]:  # noqa: ASYNC110
                        await trio.sleep(0.02)
                    await ours.publish(TOPIC, b"from us")
                    assert await receive() == b"from us"
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(go_on_saying, daemon)
                        message = await channel.receive()
                        nursery.cancel_scope.cancel()
            assert (message.payload, message.received_from) == (b"from go", str(theirs))

    run(main)


def test_a_go_peer_does_not_get_into_a_private_swarm() -> None:
    async def main() -> None:
        async with (
            p2pd.Daemon.running(p2pd.find()) as daemon,
            open_libp2p(
                Identity(b"a" * 32), ["/ip4/127.0.0.1/tcp/0"], network_key=b"k" * 32
            ) as ours,
        ):
            address = (await daemon.identify())[0]
            with pytest.raises(PeerUnreachable):
                await ours.connect(address)
            with pytest.raises(p2pd.DaemonRefused):
                await daemon.connect(ours.addresses()[0])
            assert not ours.peers()

    run(main)
