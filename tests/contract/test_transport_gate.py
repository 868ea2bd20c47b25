"""Who may connect, over each maker in `transport_makers`."""

from collections.abc import Sequence
from ipaddress import ip_address

import pytest

from swarm.errors import PeerUnreachable, RequestRefused, RequestTimeout
from swarm.identity import PeerId
from swarm.transport.base import REFUSED_CONNECTIONS, Transport
from tests.contract.transport_makers import TransportMaker
from tests.contract.transport_support import LIMITS, PROTOCOL, ask, check, echo, link, until


async def connect_and_ask(a: Transport, b: Transport) -> None:
    """What a refusal ends: the dial, or the first use of a connection that ends at once."""
    await a.connect(b.addresses()[0])
    await ask(a, b)


def test_ip_of_a_connected_peer(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        assert a.ip_of(b.peer_id) is None
        await link(a, b)
        for here, there in ((a, b), (b, a)):
            ip = here.ip_of(there.peer_id)
            assert ip is not None
            assert ip_address(ip).is_private

    check(maker, 2, body)


def test_gate_sees_both_directions_and_lets_in(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        asked: list[tuple[PeerId, PeerId, str | None]] = []
        for node in nodes:
            node.set_gate(lambda peer, ip, me=node.peer_id: asked.append((me, peer, ip)) is None)
        await link(a, b)
        assert sorted(asked) == sorted(
            [
                (a.peer_id, b.peer_id, a.ip_of(b.peer_id)),
                (b.peer_id, a.peer_id, b.ip_of(a.peer_id)),
            ]
        )
        assert not a.counters.refused
        assert not b.counters.refused

    check(maker, 2, body)


@pytest.mark.parametrize("refuser", [0, 1], ids=["dialler", "dialled"])
def test_refused_connection_ends_before_it_serves(maker: TransportMaker, refuser: int) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b, c = nodes
        served: list[PeerId] = []

        async def note(peer: PeerId, payload: bytes) -> bytes:
            served.append(peer)
            return payload

        b.serve(PROTOCOL, note, LIMITS)
        other = nodes[1 - refuser].peer_id
        gatekeeper = nodes[refuser]
        gatekeeper.set_gate(lambda peer, ip: peer != other)
        with pytest.raises((PeerUnreachable, RequestRefused, RequestTimeout)):
            await connect_and_ask(a, b)
        await until(lambda: not a.peers() and not b.peers())
        assert gatekeeper.counters.refused[REFUSED_CONNECTIONS] == 1
        await link(c, b)  # others are let in
        assert await ask(c, b) == b"x"
        assert served == [c.peer_id]

    check(maker, 3, body)


def test_gate_leaves_existing_connections(maker: TransportMaker) -> None:
    async def body(nodes: Sequence[Transport]) -> None:
        a, b = nodes
        b.serve(PROTOCOL, echo, LIMITS)
        await link(a, b)
        b.set_gate(lambda peer, ip: False)
        assert await ask(a, b) == b"x"
        await b.disconnect(a.peer_id)
        await until(lambda: not a.peers())
        with pytest.raises((PeerUnreachable, RequestRefused, RequestTimeout)):
            await connect_and_ask(a, b)

    check(maker, 2, body)
