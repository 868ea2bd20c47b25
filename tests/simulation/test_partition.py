"""Two halves of a swarm that lost each other come together again."""

from collections.abc import Sequence

import pytest
import trio

from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.limits.dial_backoff import DIAL_AGAIN_MAX_S
from swarm.peers import discovery
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.discovery import Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world

HALF = 8
APART_S = 1_500.0
LAN = LinkProfile(latency_s=0.02)


def members(world: SimulatedWorld) -> list[Discovery]:
    """All hosts; they join through host 0."""
    made: list[Discovery] = []
    for host in range(2 * HALF):
        transport = world.join(host)
        bootstrap = made[0]._transport.addresses() if made else ()
        node = Discovery(
            NodeInfo("sums-1", "test", world.identities[host], bytes([host]) * 16),
            bootstrap,
            AddressBook(),
            ConnectionGater(transport, Ledger()),
            now_s=lambda: EPOCH_S + trio.current_time(),
            rng=world.rng(f"discovery/{host}"),
            run_sync=run_inline,
        )
        made.append(node)
    return made


def across(world: SimulatedWorld, half: Sequence[Discovery], other: int) -> list[int]:
    """For each node of a half: how many peers of the other half it has."""
    ids = {world.peer_id(other * HALF + host) for host in range(HALF)}
    return [len(ids & set(node.peers)) for node in half]


async def tear_apart(world: SimulatedWorld, halves: Sequence[Sequence[Discovery]]) -> None:
    """No common neighbour is left: the link is cut and every connection over it ends."""
    ids = [[node._transport.peer_id for node in half] for half in halves]
    world.network.partition(*ids)
    for node in halves[0]:
        for peer in ids[1]:
            await node._transport.disconnect(peer)


def merges(wanted: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many peers across each node of one half has, some time after the link's return."""
    monkeypatch.setattr(discovery, "PEERS_WANTED", wanted)
    monkeypatch.setattr(discovery, "HEARTBEAT_S", 40.0)  # fewer hellos to simulate

    async def main() -> list[int]:
        async with open_world(1, 2 * HALF, LAN) as world, trio.open_nursery() as nursery:
            nodes = members(world)
            for node in nodes:
                nursery.start_soon(node.run)
            await trio.sleep(120)
            halves = nodes[:HALF], nodes[HALF:]
            for node in nodes:
                node._bootstrap = ()  # the bootstrap peer is gone for good: the book must do
            await tear_apart(world, halves)
            await trio.sleep(APART_S)
            assert across(world, halves[0], 1) == [0] * HALF
            world.network.heal()
            with trio.fail_after(DIAL_AGAIN_MAX_S):
                while sum(across(world, halves[0], 1)) < HALF // 2:  # noqa: ASYNC110
                    await trio.sleep(1)
            await trio.sleep(500)
            result = across(world, halves[0], 1)
            nursery.cancel_scope.cancel()
            return result

    return deterministic_run(main, seed=1)  # type: ignore[no-any-return]


def test_halves_with_few_peers_become_one_full_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    found = merges(2 * HALF, monkeypatch)
    assert found == [HALF] * HALF


def test_halves_with_peers_enough_are_joined_by_looking_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = merges(HALF // 2, monkeypatch)
    assert sum(found) >= HALF // 2
