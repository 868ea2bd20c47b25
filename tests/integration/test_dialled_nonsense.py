"""Whom we dial may answer nonsense: that is a failed dial and no more."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarm.errors import PeerUnreachable
from swarm.identity import Identity
from swarm.transport.libp2p.relay import STOP_PROTOCOL, accept_circuit
from swarm.wire import codec
from swarm.wire.messages import REACH_BYTES_MAX, REACH_PROTOCOL, DialBack, DialBackReply
from tests.integration.test_reach import RULES, circuit, hosts, is_well, relayed
from tests.support import run

pytestmark = pytest.mark.integration

NO_HANDSHAKES = [b"\x02\xff\n", b"\xff" * 20, b"\xff\xff\xff\xff\x7f", b"\x01\n", b""]


@asynccontextmanager
async def answering(data: bytes) -> AsyncIterator[int]:
    """A port where every caller gets these bytes and nothing more."""

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("data", NO_HANDSHAKES)
def test_a_port_to_dial_back_to_that_answers_nonsense_is_just_closed(data: bytes) -> None:
    async def main() -> None:
        async with answering(data) as port, hosts(None, RULES) as (a, b):
            await a.connect(b.addresses()[0])
            request = codec.encode(DialBack(type="dial_back", ports=(port,)))
            answer = await a.request(
                b.peer_id, REACH_PROTOCOL, request,
                timeout_s=20, response_bytes_max=REACH_BYTES_MAX,
            )  # fmt: skip
            assert codec.decode(answer, DialBackReply, REACH_BYTES_MAX).ports == ()
            assert await is_well(b)

    run(main)


@pytest.mark.parametrize("data", NO_HANDSHAKES)
def test_a_peer_behind_a_relay_that_answers_nonsense_is_not_reached(data: bytes) -> None:
    async def evil(stream: INetStream) -> None:
        circuit = await accept_circuit(stream.muxed_stream)  # type: ignore[attr-defined]
        await circuit.write(data)
        await trio.sleep(0.05)
        await circuit.close()

    async def main() -> None:
        async with relayed() as (_, hidden, other):
            hidden._host.set_stream_handler(STOP_PROTOCOL, evil)  # type: ignore[arg-type]
            with pytest.raises(PeerUnreachable):
                await other.connect(circuit(hidden))
            assert await is_well(other)

    run(main)


@pytest.mark.parametrize("data", NO_HANDSHAKES)
def test_a_punched_connection_on_which_nonsense_comes_is_a_failed_dial(data: bytes) -> None:
    async def main() -> None:
        target = ID.from_base58(Identity(bytes([77]) * 32).peer_id)
        async with answering(data) as port, hosts(RULES) as (node,):
            where = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
            with pytest.raises(BaseLibp2pError):
                await node._network.dial_addr_as_responder(where, target)
            with pytest.raises(BaseLibp2pError):
                await node._network.dial_addr(where, target)
            assert await is_well(node)

    run(main)
