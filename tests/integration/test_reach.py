"""Reaching each other on real sockets: dialling back, relays, and leaving the relay.

Hosts here are on one machine, so that everybody could dial everybody. A host that "cannot be
reached" listens, but its port is told to nobody, and dials to it are refused by a test's rule.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as circuit_pb
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb
from libp2p.utils import encode_delim
from multiaddr import Multiaddr

from swarm.errors import PeerUnreachable, Reject, RemoteProtocolError, RequestRefused
from swarm.identity import Identity, PeerId
from swarm.limits.bounded_table import OriginLimits
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p import observed_addresses, reachability
from swarm.transport.libp2p import relay as relay_module
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.negotiation import Reader
from swarm.transport.libp2p.reachability import (
    PUNCH_PROTOCOL,
    PUNCH_ROUNDS,
    Reachability,
    ReachRules,
)
from swarm.transport.libp2p.relay import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    Call,
    encoded,
    read_message,
)
from swarm.wire import codec
from swarm.wire.messages import REACH_BYTES_MAX, REACH_PROTOCOL, DialBack, DialBackReply
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
PROTOCOL = "/test/echo/1.0.0"
MIB = 1_048_576
RULES = ReachRules()
NO_PUNCH = ReachRules(punch=False)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "TICK_S", 0.05)
    monkeypatch.setattr(reachability, "REFUSED_AGAIN_S", 0.2)
    monkeypatch.setattr(reachability, "RELAY_GRACE_S", 0.1)


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110  transports announce no changes
            await trio.sleep(0.02)


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


@asynccontextmanager
async def hosts(*rules: ReachRules | None) -> AsyncIterator[list[Libp2pTransport]]:
    async with AsyncExitStack() as stack:
        made = []
        for number, each in enumerate(rules):
            identity = Identity(bytes([number + 1]) * 32)
            made.append(
                await stack.enter_async_context(open_libp2p(identity, LOOPBACK, reach=each))
            )
            made[-1].serve(PROTOCOL, echo, ServeLimits(2 * MIB, 2 * MIB))
        yield made


def unreachable(node: Libp2pTransport) -> None:
    """What nobody can dial back to proves to be unreachable: the ports it asks for are not its."""
    assert node._reach is not None
    node._reach._ports = lambda: (1,)  # type: ignore[method-assign]


async def ask(a: Libp2pTransport, peer: PeerId, payload: bytes) -> bytes:
    return await a.request(peer, PROTOCOL, payload, timeout_s=20.0, response_bytes_max=2 * MIB)


def reach(node: Libp2pTransport) -> Reachability:
    assert node._reach is not None
    return node._reach


# --- the check -----------------------------------------------------------------------------


def test_peers_dial_back_and_say_where_they_see_us() -> None:
    async def main() -> None:
        async with hosts(RULES, RULES, RULES) as (a, b, c):
            for other in (b, c):
                await a.connect(other.addresses()[0])
            await until(lambda: reach(a).summary.reachable and reach(b).summary.reachable)
            assert reach(a).summary.observed_ip == "127.0.0.1"
            assert reach(a).summary.keeps_ports is True, "there is no router between"
            assert reach(a).summary.addresses == (), "it is known already"

    run(main)


def test_a_peer_that_goes_with_its_answer_ends_nothing_but_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with hosts(RULES, RULES) as (a, b):
            ask_once, answers = a.request, 0

            async def then_gone(
                peer: PeerId, protocol: str, payload: bytes, **limits: Any
            ) -> bytes:
                nonlocal answers
                answer = await ask_once(peer, protocol, payload, **limits)
                await a.disconnect(peer)
                answers += protocol == REACH_PROTOCOL
                return answer

            monkeypatch.setattr(a, "request", then_gone)
            await a.connect(b.addresses()[0])
            await until(lambda: answers and reach(a).summary.voices == 1)
            assert await a.connect(b.addresses()[0]) == b.peer_id

    run(main)


def test_a_closed_port_is_told_as_unreachable() -> None:
    async def main() -> None:
        async with hosts(RULES, RULES) as (a, b):
            unreachable(a)
            await a.connect(b.addresses()[0])
            await until(lambda: reach(a).summary.reachable is False)

    run(main)


def test_a_dial_back_goes_to_the_asker_alone_and_not_too_often() -> None:
    async def main() -> None:
        async with hosts(None, RULES) as (a, b):
            await a.connect(b.addresses()[0])
            own = int(a.addresses()[0].split("/")[4])
            foreign = int(b.addresses()[0].split("/")[4])  # somebody else answers there
            request = codec.encode(DialBack(type="dial_back", ports=(own, foreign, 1)))

            async def dial_back() -> DialBackReply:
                answer = await a.request(
                    b.peer_id, REACH_PROTOCOL, request,
                    timeout_s=20, response_bytes_max=REACH_BYTES_MAX,
                )  # fmt: skip
                return codec.decode(answer, DialBackReply, REACH_BYTES_MAX)

            assert (await dial_back()).ports == (own,)
            with pytest.raises(RequestRefused, match="a moment ago"):
                await dial_back()

    run(main)


def test_who_comes_in_is_noticed_once_and_who_is_dialled_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noticed: list[tuple[PeerId, str]] = []
    monkeypatch.setattr(
        observed_addresses.Observations,
        "record_inbound",
        lambda self, peer, ip: noticed.append((peer, ip)),
    )

    async def main() -> None:
        async with hosts(None, RULES, RULES) as (silent, dialled, dialling):
            await silent.connect(dialled.addresses()[0])
            await dialling.connect(silent.addresses()[0])
            await until(lambda: reach(dialled)._asked and reach(dialling)._asked)
            assert noticed == [(silent.peer_id, "127.0.0.1")]

    run(main)


def test_peers_of_one_public_block_prove_nothing_and_relay_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observed_addresses, "is_public", lambda ip: True)

    async def main() -> None:
        async with relayed() as (relay, hidden, other):
            assert reach(relay).summary.voices == reach(hidden).summary.voices == 1
            assert reach(relay).summary.reachable is None
            assert reach(hidden).summary.observed_ip is None
            assert await other.connect(circuit(hidden)) == hidden.peer_id

    run(main)


# --- relays --------------------------------------------------------------------------------


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport, Libp2pTransport]]:
    """A relay; somebody unreachable with a reservation there; and who wants to reach it."""
    async with hosts(RULES, NO_PUNCH, NO_PUNCH) as (relay, hidden, other):
        unreachable(hidden)
        await hidden.connect(relay.addresses()[0])
        await until(lambda: reach(hidden).summary.relays)
        yield relay, hidden, other


def circuit(hidden: Libp2pTransport) -> str:
    return next(address for address in hidden.addresses() if "/p2p-circuit/" in address)


def test_an_unreachable_peer_is_reached_through_a_relay() -> None:
    async def main() -> None:
        async with relayed() as (relay, hidden, other):
            address = circuit(hidden)
            assert relay.peer_id in address
            assert await other.connect(address) == hidden.peer_id
            await until(lambda: other.peer_id in hidden.peers())
            assert other.ip_of(hidden.peer_id) is None
            assert hidden.ip_of(other.peer_id) is None
            for payload in (b"x", bytes(MIB)):
                assert await ask(other, hidden.peer_id, payload) == payload
                assert await ask(hidden, other.peer_id, payload) == payload
            assert reach(relay)._relay.figures.circuits == 1
            assert reach(relay)._relay.figures.bytes > 4 * MIB
            await other.disconnect(hidden.peer_id)
            await until(lambda: not reach(relay)._relay.figures.circuits)
            await until(lambda: other.peer_id not in hidden.peers())
            assert not reach(relay)._relay._by_target

    run(main)


def test_without_a_reservation_or_after_it_nobody_is_relayed() -> None:
    async def main() -> None:
        async with relayed() as (relay, hidden, other):
            address = circuit(hidden)
            own = f"{relay.addresses()[0]}/p2p-circuit/p2p/{other.peer_id}"
            with pytest.raises(PeerUnreachable, match="own"):
                await other.connect(own)
            await hidden.disconnect(relay.peer_id)
            await until(lambda: hidden.peer_id not in relay.peers())
            with pytest.raises(PeerUnreachable, match="204"):
                await other.connect(address)
            await until(lambda: not reach(hidden).summary.relays)
            assert not any("/p2p-circuit/" in a for a in hidden.addresses())
            reach(hidden)._observations.forget()  # it asks for no reservation again
            reach(hidden)._asked[relay.peer_id] = trio.current_time() + 1e6
            await hidden.connect(relay.addresses()[0])
            await until(lambda: hidden.peer_id in relay.peers())
            with pytest.raises(PeerUnreachable, match="204"):
                await other.connect(address)

    run(main)


def test_a_relay_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with relayed() as (relay, hidden, other):
            with monkeypatch.context() as patch:
                table = reach(relay)._relay._by_asker
                patch.setattr(table, "_limit_of", OriginLimits(peer=0))
                with pytest.raises(PeerUnreachable, match="201"):
                    await other.connect(circuit(hidden))
            monkeypatch.setattr(reach(relay)._relay._reserved, "_total_max", 1)
            unreachable(other)
            await other.connect(relay.addresses()[0])
            refused = reach(relay)._relay.figures.refused
            await until(lambda: refused["RESOURCE_LIMIT_EXCEEDED"] >= 2)
            assert not reach(other).summary.relays
            monkeypatch.setattr(relay_module, "CIRCUIT_BYTES_MAX", MIB // 2)
            await other.connect(circuit(hidden))
            with pytest.raises(PeerUnreachable):
                await ask(other, hidden.peer_id, bytes(2 * MIB))
            await until(lambda: hidden.peer_id not in other.peers())

    run(main)


def test_who_cannot_be_reached_relays_for_nobody() -> None:
    async def main() -> None:
        async with hosts(RULES, RULES) as (a, b):
            for node in (a, b):
                unreachable(node)
            await a.connect(b.addresses()[0])
            refused = reach(b)._relay.figures.refused
            await until(lambda: refused["RESERVATION_REFUSED"])
            assert not reach(a).summary.relays

    run(main)


def test_a_node_may_keep_out_of_relaying() -> None:
    async def main() -> None:
        async with hosts(ReachRules(relay=False), RULES) as (selfish, hidden):
            unreachable(hidden)
            await hidden.connect(selfish.addresses()[0])
            await until(lambda: reach(hidden).summary.reachable is False)
            await until(lambda: selfish.peer_id in reach(hidden)._refused)
            assert not reach(hidden).summary.relays

    run(main)


def test_nobody_is_let_in_by_a_relay_that_was_not_asked() -> None:
    async def main() -> None:
        async with relayed() as (relay, hidden, other):
            reach(hidden)._reservations.clear()
            reach(hidden)._refused[relay.peer_id] = trio.current_time() + 1e6
            with pytest.raises(PeerUnreachable, match="203"):
                await other.connect(f"{relay.addresses()[0]}/p2p-circuit/p2p/{hidden.peer_id}")

    run(main)


# --- leaving the relay -----------------------------------------------------------------------


def test_a_relayed_connection_becomes_a_direct_one() -> None:
    async def main() -> None:
        async with hosts(RULES, RULES, RULES) as (relay, hidden, other):
            unreachable(hidden)
            await hidden.connect(relay.addresses()[0])
            await until(lambda: reach(hidden).summary.relays)
            await other.connect(relay.addresses()[0])
            await until(lambda: reach(other).summary.reachable)
            await other.connect(circuit(hidden))
            await until(lambda: other.ip_of(hidden.peer_id) and hidden.ip_of(other.peer_id))
            await until(lambda: not reach(relay)._relay.figures.circuits)
            assert reach(hidden).summary.punched == 1
            assert await ask(other, hidden.peer_id, b"direct") == b"direct"
            assert await ask(hidden, other.peer_id, b"direct") == b"direct"

    run(main)


async def is_well(node: Libp2pTransport) -> bool:
    """Whether a node serves somebody new."""
    async with open_libp2p(Identity(bytes([99]) * 32), LOOPBACK) as somebody:
        await somebody.connect(node.addresses()[0])
        return await ask(somebody, node.peer_id, b"well?") == b"well?"


# --- whose fault it is ---------------------------------------------------------------------------


def blames(node: Libp2pTransport) -> list[tuple[PeerId, Reject]]:
    """What a node finds its peers guilty of, from now on."""
    found: list[tuple[PeerId, Reject]] = []
    node.report_to(lambda peer, reason: found.append((peer, reason)))
    return found


async def answer_dial_back(node: Libp2pTransport, answer: bytes) -> None:
    async def serve(peer: PeerId, payload: bytes) -> bytes:
        return answer

    node.serve(REACH_PROTOCOL, serve, ServeLimits(REACH_BYTES_MAX, REACH_BYTES_MAX))


def test_a_malformed_request_to_dial_back_costs_its_sender() -> None:
    async def main() -> None:
        async with hosts(None, RULES) as (a, b):
            blamed = blames(b)
            await a.connect(b.addresses()[0])
            for request in (b"garbage", codec.encode(DialBack(type="dial_back", ports=(1,)))):
                with suppress(RequestRefused):
                    await a.request(
                        b.peer_id, REACH_PROTOCOL, request,
                        timeout_s=20, response_bytes_max=REACH_BYTES_MAX,
                    )  # fmt: skip
            assert blamed == [(a.peer_id, Reject.MALFORMED)]

    run(main)


def dialled_back(ip: str) -> bytes:
    return codec.encode(
        DialBackReply(type="dial_back_reply", observed_ip=ip, observed_port=1, ports=())
    )


@pytest.mark.parametrize(
    ("answer", "guilty"),
    [
        (b"garbage", True),
        (dialled_back("nowhere"), True),
        (dialled_back("0.0.0.0"), True),
        (dialled_back("127.0.0.9"), False),
    ],
)
def test_a_malformed_answer_costs_who_gives_it(answer: bytes, guilty: bool) -> None:
    async def main() -> None:
        async with hosts(None, RULES) as (a, b):
            blamed = blames(b)
            await answer_dial_back(a, answer)
            await b.connect(a.addresses()[0])
            await until(lambda: blamed or reach(b).summary.voices)
            assert blamed == ([(a.peer_id, Reject.MALFORMED)] if guilty else [])

    run(main)


def test_nonsense_about_circuits_and_punches_costs_its_sender_and_a_no_costs_nothing() -> None:
    async def tell(a: Libp2pTransport, b: Libp2pTransport, protocol: str, data: bytes) -> None:
        conn = a._network.live(b._id)
        assert conn is not None
        stream = await conn.muxed_conn.open_stream()
        head = encode_delim(b"/multistream/1.0.0") + encode_delim(protocol.encode())
        await stream.write(head + data)
        with suppress(BaseLibp2pError):
            while await stream.read(100):  # type: ignore[attr-defined]
                pass

    async def main() -> None:
        async with hosts(None, RULES) as (a, b):
            blamed = blames(b)
            await a.connect(b.addresses()[0])
            stop = encoded(circuit_pb.StopMessage(type=circuit_pb.StopMessage.CONNECT))
            await tell(a, b, STOP_PROTOCOL, stop)  # of a relay that b has not asked
            punch = encoded(pb.HolePunch(type=pb.HolePunch.CONNECT))
            await tell(a, b, PUNCH_PROTOCOL, punch)  # with nobody behind a relay
            await tell(a, b, "/not/served", b"")
            assert not blamed
            await tell(a, b, HOP_PROTOCOL, b"\x03\xff\xff\xff")
            assert blamed == [(a.peer_id, Reject.MALFORMED)]
            await b.connect(a.addresses()[0])
            reach(b)._reservations[a.peer_id] = (1e9, 1e9)
            await tell(a, b, STOP_PROTOCOL, b"\xff\xff\x7f")
            assert blamed[1:] == [(a.peer_id, Reject.OVERSIZE)]

    run(main)


def test_a_relay_that_answers_nonsense_pays_for_it() -> None:
    async def evil(stream: INetStream) -> None:
        await stream.write(b"\x03\xff\xff\xff")

    async def main() -> None:
        async with hosts(None, RULES) as (relay, hidden):
            blamed = blames(hidden)
            unreachable(hidden)
            relay.handle(HOP_PROTOCOL, evil)
            await answer_dial_back(relay, dialled_back("127.0.0.1"))
            await hidden.connect(relay.addresses()[0])
            await until(lambda: blamed)
            assert set(blamed) == {(relay.peer_id, Reject.MALFORMED)}
            where = f"{relay.addresses()[0]}/p2p-circuit/p2p/{Identity(bytes([77]) * 32).peer_id}"
            del blamed[:]
            with pytest.raises(PeerUnreachable, match="nonsense"):
                await hidden.connect(where)
            assert (relay.peer_id, Reject.MALFORMED) in blamed

    run(main)


# --- what hole punching may be misused for -----------------------------------------------------

NO_ADDRESSES = [
    bytes.fromhex("2a8ec0fe"),
    b"",
    b"\xff" * 40,
    b"\x04\x01",
    bytes(8),
    b"\x35\x04a.b.",
]


def quick_punches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "DIRECT_FIRST_S", 0.1)
    monkeypatch.setattr(reachability, "PUNCH_ROUND_S", 0.3)


async def reserve_and_dial(
    relay: Libp2pTransport, hidden: Libp2pTransport, *others: Libp2pTransport
) -> None:
    """Everybody dials the relay, and one gets a reservation there."""
    unreachable(hidden)
    for node in (hidden, *others):
        await node.connect(relay.addresses()[0])
        await until(lambda node=node: reach(node).summary.observed_ip)  # type: ignore[misc]
    await until(lambda: reach(hidden).summary.relays)


def test_addresses_to_punch_at_that_are_nonsense_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick_punches(monkeypatch)

    async def evil(stream: INetStream) -> None:
        raw = stream.muxed_stream  # type: ignore[attr-defined]
        await read_message(Reader(raw, 4_096), pb.HolePunch)
        await raw.write(encoded(pb.HolePunch(type=pb.HolePunch.CONNECT, ObsAddrs=NO_ADDRESSES)))
        await trio.sleep_forever()

    async def main() -> None:
        async with hosts(RULES, RULES, RULES) as (relay, hidden, other):
            await reserve_and_dial(relay, hidden, other)
            other.handle(PUNCH_PROTOCOL, evil)
            await other.connect(circuit(hidden))
            await until(lambda: reach(hidden).summary.punch_failures)
            assert await is_well(hidden)

    run(main)


def test_nobody_has_third_parties_flooded_by_asking_for_a_punch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick_punches(monkeypatch)
    knocks: Counter[str] = Counter()
    answered = 0

    async def ask_for_punch(
        attacker: Libp2pTransport, victim: PeerId, offered: list[bytes]
    ) -> None:
        nonlocal answered
        conn = reach(attacker)._relayed(ID.from_base58(victim))
        assert conn is not None
        hello = pb.HolePunch(type=pb.HolePunch.CONNECT, ObsAddrs=offered)
        with suppress(BaseLibp2pError, RemoteProtocolError):
            call = await Call.open(conn, PUNCH_PROTOCOL, hello)
            await read_message(call.reader, pb.HolePunch)
            answered += 1
            await call.send(pb.HolePunch(type=pb.HolePunch.SYNC))
            await call.reader.exactly(1)  # to its end

    async def third_party(ip: str, nursery: trio.Nursery) -> bytes:
        async def knock(stream: trio.SocketStream) -> None:
            knocks[ip] += 1
            await stream.aclose()

        listeners = await trio.open_tcp_listeners(0, host=ip)
        nursery.start_soon(trio.serve_listeners, knock, listeners)
        return Multiaddr(f"/ip4/{ip}/tcp/{listeners[0].socket.getsockname()[1]}").to_bytes()

    async def main() -> None:
        async with (
            trio.open_nursery() as nursery,
            hosts(RULES, NO_PUNCH, RULES) as (relay, attacker, victim),
        ):
            offered = [await third_party(f"127.0.0.{10 + n}", nursery) for n in range(4)]
            await reserve_and_dial(relay, attacker, victim)
            await victim.connect(circuit(attacker))
            await until(lambda: victim.peer_id in attacker.peers())
            async with trio.open_nursery() as asking:
                for _ in range(10):
                    asking.start_soon(ask_for_punch, attacker, victim.peer_id, offered)
            for _ in range(2 * PUNCH_ROUNDS):
                await ask_for_punch(attacker, victim.peer_id, offered)
            assert answered == PUNCH_ROUNDS
            assert 0 < len(knocks) <= reachability.PUNCH_IPS_MAX
            # in each round at the start, and where the round is as short as here never again
            assert knocks.total() <= PUNCH_ROUNDS * reachability.PUNCH_IPS_MAX
            nursery.cancel_scope.cancel()

    run(main)


def test_who_comes_while_others_are_punched_is_punched_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick_punches(monkeypatch)
    monkeypatch.setattr(reachability, "PUNCHES_MAX", 1)
    begun, over = trio.Event(), trio.Event()

    async def slow(stream: INetStream) -> None:
        begun.set()
        await over.wait()
        raise RemoteProtocolError(Reject.MALFORMED, "enough")

    async def main() -> None:
        async with hosts(RULES, RULES, RULES, RULES) as (relay, hidden, first, second):
            await reserve_and_dial(relay, hidden, first, second)
            first.handle(PUNCH_PROTOCOL, slow)
            await first.connect(circuit(hidden))
            await begun.wait()
            await second.connect(circuit(hidden))
            await until(lambda: second.peer_id in hidden.peers())
            assert hidden.ip_of(second.peer_id) is None
            over.set()
            await until(lambda: hidden.ip_of(second.peer_id))
            await until(lambda: reach(hidden).summary.punched == 1)
            assert reach(hidden).summary.punch_failures == 1

    run(main)
