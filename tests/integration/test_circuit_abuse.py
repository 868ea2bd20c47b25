"""What relays do for whoever asks: not for ever, not all of it for one, and not all for nothing."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.peer.id import ID

from swarm.errors import PeerUnreachable
from swarm.identity import PeerId
from swarm.limits.quotas import RATES, Kind
from swarm.transport.libp2p import relay as relay_module
from swarm.transport.libp2p import yamux
from swarm.transport.libp2p.host import Libp2pTransport
from swarm.transport.libp2p.relay import (
    CIRCUIT_IDLE_S_MAX,
    CIRCUIT_S_MAX,
    STOP_PROTOCOL,
    CircuitStream,
    Relay,
    accept_circuit,
    dial_through,
)
from tests.integration.test_libp2p_yamux import connected, opened
from tests.integration.test_reach import (
    MIB,
    NO_PUNCH,
    RULES,
    _quick,  # noqa: F401  a fixture of every test
    ask,
    circuit,
    hosts,
    reach,
    unreachable,
    until,
)
from tests.support import run

pytestmark = pytest.mark.integration


# --- how long ------------------------------------------------------------------------------


async def carried(pause_s: float, messages: int, size: int = 30) -> tuple[int, Counter[str]]:
    """Messages that get through a circuit with a pause before each, and how it ended."""
    relay = Relay(lambda _: None, lambda _: None, lambda: True, lambda *_: None)
    got = 0
    async with connected() as one, connected() as other, trio.open_nursery() as nursery:
        near, far = await opened(*one), await opened(*other)
        nursery.start_soon(relay._copy_both_ways, (near[1], b""), (far[0], b""))
        with trio.move_on_after(CIRCUIT_S_MAX + 1.0):
            for _ in range(messages):
                with trio.move_on_after(pause_s):
                    await trio.sleep_forever()
                if relay.figures.ended:
                    break
                await near[0].write(bytes(size))
                left = size
                while left:
                    left -= len(await far[1].read(left))
                got += 1
        nursery.cancel_scope.cancel()
    return got, relay.figures.ended


def test_a_circuit_on_which_something_comes_now_and_then_stays() -> None:
    assert run(carried, 10.0, 200, virtual=True, timeout_s=1e5) == (200, {}), "pings alone"
    pause_s = 0.9 * CIRCUIT_IDLE_S_MAX
    assert run(carried, pause_s, 30, 1_000, virtual=True, timeout_s=1e5) == (30, {})


@pytest.mark.parametrize(("pause_s", "size"), [(100.0, 1), (110.0, 100), (1.0, 2)])
def test_a_few_bytes_now_and_then_keep_no_place(pause_s: float, size: int) -> None:
    got, ended = run(carried, pause_s, 10**4, size, virtual=True, timeout_s=1e5)
    assert ended == {"idle": 1}
    assert got * pause_s <= CIRCUIT_IDLE_S_MAX


def test_an_idle_circuit_ends() -> None:
    pause_s = 1.1 * CIRCUIT_IDLE_S_MAX
    assert run(carried, pause_s, 30, virtual=True, timeout_s=1e5) == (0, {"idle": 1})


def test_no_circuit_lasts_for_ever() -> None:
    pause_s = 0.9 * CIRCUIT_IDLE_S_MAX
    got, ended = run(carried, pause_s, 10**6, 1_000, virtual=True, timeout_s=1e5)
    assert got == CIRCUIT_S_MAX // pause_s
    assert ended == {"age": 1}


@asynccontextmanager
async def relayed_by(
    *others: Libp2pTransport, hidden: tuple[Libp2pTransport, ...]
) -> AsyncIterator[None]:
    """Everybody is connected to the first, and those hidden have a reservation there."""
    relay = others[0]
    for node in hidden:
        unreachable(node)
    for node in (*hidden, *others[1:]):
        await node.connect(relay.addresses()[0])
    for node in hidden:
        await until(lambda node=node: reach(node).summary.relays)  # type: ignore[misc]
    yield


async def silent(stream: INetStream) -> None:
    """Take a circuit and do nothing with it."""
    await accept_circuit(stream.muxed_stream)  # type: ignore[attr-defined]
    await trio.sleep_forever()


async def occupy(asker: Libp2pTransport, relay: Libp2pTransport, target: PeerId) -> CircuitStream:
    """A circuit of a peer that does nothing with it."""
    conn = reach(asker).direct(ID.from_base58(relay.peer_id))
    assert conn is not None
    return await dial_through(conn, ID.from_base58(target))


def test_circuits_that_are_held_for_nothing_end_and_an_honest_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "CIRCUIT_IDLE_S_MAX", 3.0)
    monkeypatch.setattr(yamux, "PING_INTERVAL_S", 0.1)  # as far below as it is in truth

    async def main() -> None:
        async with hosts(RULES, NO_PUNCH, NO_PUNCH, NO_PUNCH, NO_PUNCH) as nodes:
            relay, hidden, friend, accomplice, holder = nodes
            async with relayed_by(relay, friend, holder, hidden=(hidden, accomplice)):
                accomplice.handle(STOP_PROTOCOL, silent)
                await friend.connect(circuit(hidden))
                for _ in range(3):
                    await occupy(holder, relay, accomplice.peer_id)
                figures = reach(relay)._relay.figures
                assert figures.circuits == 4
                await until(lambda: figures.circuits == 1)
                assert figures.ended == {"idle": 3}
                assert await ask(friend, hidden.peer_id, bytes(MIB)) == bytes(MIB)

    run(main)


# --- how many ------------------------------------------------------------------------------

HERE, THERE, ELSEWHERE = "203.0.113.{}", "198.51.100.{}", "192.0.2.{}"


def seen_at(relay: Libp2pTransport, where: dict[str, str]) -> None:
    """Have a relay see peers under public addresses."""
    reach(relay)._relay._ip_of = lambda peer: where[str(peer)]


async def is_refused(asker: Libp2pTransport, relay: Libp2pTransport, target: PeerId) -> bool:
    try:
        await occupy(asker, relay, target)
    except PeerUnreachable as error:
        return "201" in str(error)  # over a limit; anything else is found by its count
    return False


def test_one_block_has_few_circuits_and_cannot_keep_others_from_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_module, "CIRCUITS_TO_ONE_MAX", 1)
    monkeypatch.setattr(relay_module, "CIRCUITS_PER_BLOCK_MAX", 2)

    async def main() -> None:
        async with hosts(RULES, *[NO_PUNCH] * 6) as nodes:
            relay, first, second, third, *askers = nodes
            one, another, friend = askers
            for node in (first, second, third):
                node.handle(STOP_PROTOCOL, silent)
            async with relayed_by(relay, *askers, hidden=(first, second, third)):
                where = {one: HERE.format(1), another: HERE.format(2), friend: THERE.format(1)}
                where |= {
                    node: f"192.0.{number}.1"
                    for number, node in enumerate((first, second, third), 4)
                }
                seen_at(relay, {node.peer_id: ip for node, ip in where.items()})
                assert not await is_refused(one, relay, first.peer_id)
                assert await is_refused(one, relay, first.peer_id)
                assert await is_refused(another, relay, first.peer_id), "of the same block"
                assert not await is_refused(friend, relay, first.peer_id)
                assert not await is_refused(another, relay, second.peer_id)
                assert await is_refused(one, relay, third.peer_id), "the block has two"
                assert not await is_refused(friend, relay, third.peer_id)
                figures = reach(relay)._relay.figures
                # reservations that the same block was refused meanwhile are counted beside them
                assert figures.refused["RESOURCE_LIMIT_EXCEEDED"] == 3
                assert figures.circuits == 4
                for node in (one, another, friend):
                    await node.disconnect(relay.peer_id)
                await until(lambda: not figures.circuits)
                assert not reach(relay)._relay._by_target

    run(main)


def test_peers_at_private_addresses_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "CIRCUITS_TO_ONE_MAX", 1)
    monkeypatch.setattr(relay_module, "CIRCUITS_PER_BLOCK_MAX", 0)

    async def main() -> None:
        async with hosts(RULES, NO_PUNCH, NO_PUNCH, NO_PUNCH) as (relay, hidden, *askers):
            hidden.handle(STOP_PROTOCOL, silent)
            async with relayed_by(relay, *askers, hidden=(hidden,)):
                for asker in askers:
                    assert not await is_refused(asker, relay, hidden.peer_id)
                    assert await is_refused(asker, relay, hidden.peer_id)

    run(main)


def test_one_private_address_has_half_of_the_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "CIRCUITS_PER_PRIVATE_IP_MAX", 3, raising=False)

    async def main() -> None:
        async with hosts(RULES, *[NO_PUNCH] * 6) as (relay, hidden, other, *askers):
            for node in (hidden, other):
                node.handle(STOP_PROTOCOL, silent)
            async with relayed_by(relay, *askers, hidden=(hidden, other)):
                slots = ["10.0.0.2", "10.0.0.3", *["192.168.1.66"] * 3, "192.168.1.7"]
                nodes = (hidden, other, *askers)
                where = zip(nodes, slots, strict=False)
                seen_at(relay, {node.peer_id: ip for node, ip in where})
                one, another, third, friend = askers
                for asker, target in ((one, hidden), (another, hidden), (third, other)):
                    assert not await is_refused(asker, relay, target.peer_id)
                for asker in (one, another, third):
                    assert await is_refused(asker, relay, other.peer_id), "whatever its key"
                assert not await is_refused(friend, relay, other.peer_id)

    run(main)


def test_one_block_has_few_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "RESERVATIONS_PER_BLOCK_MAX", 1)

    async def main() -> None:
        async with hosts(RULES, NO_PUNCH, NO_PUNCH, NO_PUNCH) as (relay, one, another, friend):
            ips = (HERE.format(1), HERE.format(200), THERE.format(1))
            where = zip((one, another, friend), ips, strict=True)
            seen_at(relay, {node.peer_id: ip for node, ip in where})
            async with relayed_by(relay, hidden=(one,)):
                unreachable(another)
                await another.connect(relay.addresses()[0])
                refused = reach(relay)._relay.figures.refused
                await until(lambda: refused["RESOURCE_LIMIT_EXCEEDED"])
                async with relayed_by(relay, hidden=(friend,)):
                    assert not reach(another).summary.relays

    run(main)


def test_a_greedy_address_keeps_no_other_from_relaying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all reservations, or all circuits, are taken, the newest of the greediest goes."""

    async def main() -> None:
        async with hosts(RULES, *[NO_PUNCH] * 6) as (relay, one, another, friend, *askers):
            greedy, friendly = askers[0], askers[1]
            ips = (HERE.format(1), HERE.format(2), THERE.format(1), HERE.format(3), "192.0.9.1")
            nodes = (one, another, friend, greedy, friendly)
            where = zip(nodes, ips, strict=True)
            seen_at(relay, {node.peer_id: ip for node, ip in where})
            inner = reach(relay)._relay
            monkeypatch.setattr(inner._reserved, "_total_max", 2)
            for node in (one, another, friend):
                node.handle(STOP_PROTOCOL, silent)
            async with (
                relayed_by(relay, greedy, friendly, hidden=(one, another)),
                relayed_by(relay, hidden=(friend,)),
            ):
                kept = {str(peer) for peer in inner._reserved}
                assert friend.peer_id in kept
                assert len(kept) == 2
                left = next(node for node in (one, another) if node.peer_id in kept)
                monkeypatch.setattr(inner._by_asker, "_total_max", 2)
                assert not await is_refused(greedy, relay, left.peer_id)
                assert not await is_refused(greedy, relay, friend.peer_id)
                assert await is_refused(greedy, relay, left.peer_id)
                assert not await is_refused(friendly, relay, friend.peer_id)
                assert inner.figures.ended["crowded"] == 1
                assert inner.figures.circuits == 2

    run(main)


def test_whoever_asks_for_circuits_again_and_again_is_refused_at_once() -> None:
    """Each would cost the peer that is asked for a stream, on the relay's connection."""

    async def main() -> None:
        async with hosts(RULES, NO_PUNCH, NO_PUNCH, NO_PUNCH) as (relay, hidden, asker, friend):
            stops = 0

            async def refuse(stream: INetStream) -> None:
                nonlocal stops
                stops += 1
                await stream.reset()

            hidden.handle(STOP_PROTOCOL, refuse)
            async with relayed_by(relay, asker, friend, hidden=(hidden,)):
                started_s = trio.current_time()
                refused = reach(relay)._relay.figures.refused
                for _ in range(100):
                    with pytest.raises(PeerUnreachable):
                        await occupy(asker, relay, hidden.peer_id)
                taken_s = trio.current_time() - started_s
                rate = RATES[Kind.CONNECT]
                assert rate.burst <= stops <= rate.burst + rate.per_s * taken_s + 1
                assert refused["RESOURCE_LIMIT_EXCEEDED"] == 100 - stops
                with pytest.raises(PeerUnreachable, match="203"):  # hidden was asked
                    await occupy(friend, relay, hidden.peer_id)

    run(main)


# --- which relays --------------------------------------------------------------------------


def test_relays_are_chosen_from_different_blocks() -> None:
    async def main() -> None:
        async with hosts(NO_PUNCH) as (node,):
            mine: Any = reach(node)
            first, near, far = (PeerId(name) for name in ("first", "near", "far"))
            mine._direct_peers = lambda: [
                (first, HERE.format(1)),
                (near, HERE.format(2)),
                (far, ELSEWHERE.format(1)),
            ]
            assert {mine._choose_relay() for _ in range(100)} == {first, near, far}
            mine._reservations = {first: (1e9, 1e9)}
            assert {mine._choose_relay() for _ in range(100)} == {far}
            mine._refused[far] = trio.current_time() + 1e9
            assert {mine._choose_relay() for _ in range(100)} == {near}, "better than none"
            mine._reservations[near] = (1e9, 1e9)
            assert mine._choose_relay() is None
            mine._reservations.clear()

    run(main)


def test_the_relay_that_carries_fewest_of_our_circuits_is_told_first() -> None:
    async def main() -> None:
        async with hosts(RULES, RULES, *[NO_PUNCH] * 5) as (one, another, hidden, *askers):
            unreachable(hidden)
            for relay in (one, another):
                await hidden.connect(relay.addresses()[0])
            await until(lambda: len(reach(hidden).summary.relays) == 2)
            for asker in askers:  # each dials what is told first
                await asker.connect(circuit(hidden))
                await until(lambda asker=asker: asker.peer_id in hidden.peers())  # type: ignore[misc]
            circuits = [reach(relay)._relay.figures.circuits for relay in (one, another)]
            assert circuits == [2, 2]
            assert reach(hidden)._through == {one.peer_id: 2, another.peer_id: 2}
            await askers[0].disconnect(hidden.peer_id)
            await until(lambda: reach(hidden)._through.total() == 3)
            fewest = min(reach(hidden)._through.items(), key=lambda item: item[1])[0]
            assert fewest in circuit(hidden)

    run(main)
