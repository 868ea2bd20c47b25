"""How often we knock at one address because somebody asks us to, whatever keys it has."""

from contextlib import suppress

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb
from multiaddr import Multiaddr

from swarm.errors import RemoteProtocolError, RequestRefused
from swarm.identity import PeerId
from swarm.transport.libp2p import reachability
from swarm.transport.libp2p.host import Libp2pTransport
from swarm.transport.libp2p.reachability import PUNCH_PROTOCOL, PUNCH_ROUNDS
from swarm.transport.libp2p.relay import Call, read_message
from swarm.wire import codec
from swarm.wire.messages import REACH_BYTES_MAX, REACH_PROTOCOL, DialBack
from tests.integration.test_reach import (
    NO_PUNCH,
    RULES,
    circuit,
    hosts,
    quick_punches,
    reach,
    reserve_and_dial,
    until,
)
from tests.support import run

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "TICK_S", 0.05)
    monkeypatch.setattr(reachability, "REFUSED_AGAIN_S", 0.2)  # a relay knows later what it is
    monkeypatch.setattr(reachability, "RELAY_GRACE_S", 0.1)


def test_many_keys_at_one_public_address_have_us_dial_back_no_more_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.limits.dial_backoff.is_public", lambda ip: True, raising=False)
    knocks, refused = 0, 0

    async def main() -> None:
        async def knock(stream: trio.SocketStream) -> None:
            nonlocal knocks
            knocks += 1
            await stream.aclose()

        async with trio.open_nursery() as nursery, hosts(*[None] * 12, RULES) as made:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, knock, listeners)
            port = listeners[0].socket.getsockname()[1]
            request = codec.encode(DialBack(type="dial_back", ports=(port,)))
            for asker in made[:-1]:
                await asker.connect(made[-1].addresses()[0])
                try:
                    await asker.request(
                        made[-1].peer_id, REACH_PROTOCOL, request,
                        timeout_s=20, response_bytes_max=REACH_BYTES_MAX,
                    )  # fmt: skip
                except RequestRefused:
                    nonlocal refused
                    refused += 1
            nursery.cancel_scope.cancel()

    run(main)
    assert (knocks, refused) == (8, 4)


def test_many_keys_that_ask_for_punches_have_one_address_knocked_at_no_more_than_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick_punches(monkeypatch)
    monkeypatch.setattr("swarm.limits.dial_backoff.is_public", lambda ip: True, raising=False)
    monkeypatch.setattr(
        "swarm.transport.libp2p.reachability.DIAL_BACKS_PER_IP_MAX", 1_000
    )  # not of these
    attackers_count, knocks = 6, 0

    async def main() -> None:
        async def knock(stream: trio.SocketStream) -> None:
            nonlocal knocks
            knocks += 1
            await stream.aclose()

        async def ask_for_punches(attacker: Libp2pTransport, victim: PeerId) -> None:
            conn = reach(attacker)._relayed(ID.from_base58(victim))
            assert conn is not None
            hello = pb.HolePunch(type=pb.HolePunch.CONNECT, ObsAddrs=[offered])
            for _ in range(PUNCH_ROUNDS):
                with suppress(BaseLibp2pError, RemoteProtocolError):
                    call = await Call.open(conn, PUNCH_PROTOCOL, hello)
                    await read_message(call.reader, pb.HolePunch)
                    await call.send(pb.HolePunch(type=pb.HolePunch.SYNC))
                    await call.reader.exactly(1)  # to its end

        rules = [RULES, RULES, *[NO_PUNCH] * attackers_count]
        async with trio.open_nursery() as nursery, hosts(*rules) as (relay, victim, *attackers):
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.10")
            nursery.start_soon(trio.serve_listeners, knock, listeners)
            port = listeners[0].socket.getsockname()[1]
            offered = Multiaddr(f"/ip4/127.0.0.10/tcp/{port}").to_bytes()
            for attacker in attackers:
                await reserve_and_dial(relay, attacker, victim)
                await victim.connect(circuit(attacker))
                await until(lambda each=attacker: victim.peer_id in each.peers())  # type: ignore[misc]
                await ask_for_punches(attacker, victim.peer_id)
            nursery.cancel_scope.cancel()

    run(main)
    assert 0 < knocks <= 9 < PUNCH_ROUNDS * attackers_count
