"""What `swarm-node weights fetch` says while nothing comes."""

from pathlib import Path

import trio

from node.commands.weights_transfer import WAITING_S, _explain, _Swarm
from node.hosting.policy_weights import open_weights_service, weights_rules
from node.observe.progress_bars import on_stderr
from node.run.peer import Peer, PeerSettings
from node.simulation.simulated_nodes import SimulatedNetwork
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from swarm.weights.weights_service import Follower

OWN, OTHER = 0, 1
SOON_S = 5.0


def said_of(directory: Path, other: str, wait_s: float) -> list[str]:
    """What a fetcher of run `weights-x` says, whose one peer is of the run `other`, or gone."""
    said: list[str] = []

    async def main() -> None:
        async with (
            open_world(0, 2, LinkProfile(latency_s=0.05)) as world,
            trio.open_nursery() as nursery,
        ):
            address = world.network.address(world.peer_id(OTHER))
            if other:
                transport = world.join(OTHER)
                network = SimulatedNetwork(world, OTHER)
                settings = PeerSettings(other)
                peer = Peer(network, world.identities[OTHER], transport, settings)
                await nursery.start(peer.run)
            network = SimulatedNetwork(world, OWN)
            identity, transport = world.identities[OWN], world.join(OWN)
            peer = Peer(network, identity, transport, PeerSettings("weights-x", (address,)))
            publisher = world.peer_id(OTHER)
            rules = weights_rules("weights-x", [publisher], 60.0, "p", publishes=False)
            with open_weights_service(
                directory, rules, transport, peer.gater, network, Follower()
            ) as service:
                await nursery.start(service.run)
                await nursery.start(peer.run)
                swarm = _Swarm(service, peer, nursery, on_stderr())
                nursery.start_soon(_explain, service, swarm, said.append)
                await trio.sleep(wait_s)
                nursery.cancel_scope.cancel()

    deterministic_run(main, seed=0)
    return said


def test_who_waits_for_a_peer_that_is_gone_is_told_so(tmp_path: Path) -> None:
    said = said_of(tmp_path, "", 2 * WAITING_S)
    assert said
    assert all(line.startswith("cannot join through /") for line in said)


def test_who_names_another_publisher_is_told_so_soon(tmp_path: Path) -> None:
    assert SOON_S < WAITING_S
    said = said_of(tmp_path / "a", "weights-y", SOON_S)
    assert "another run, weights-y, than this node, weights-x" in said[0]
    assert "another publisher than --publisher" in said[1]
    assert said_of(tmp_path / "b", "weights-x", SOON_S) == []  # who is right is told nothing
