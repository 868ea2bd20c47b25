"""What `swarm-node weights fetch` says while nothing comes."""

from pathlib import Path

import trio

from node.commands.weights_transfer import WAITING_S, _explain, _Swarm
from node.hosting.policy_weights import open_weights_service, weights_rules
from node.monitor.console.progress import on_stderr
from node.roles.peer import Peer
from node.simulation.nodes import SimulatedNetwork
from swarm.peers.address_book import AddressBook
from swarm.simulation.determinism import deterministic_run
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import open_world

OWN, GONE = 0, 1


def test_who_waits_for_a_peer_that_is_gone_is_told_so(tmp_path: Path) -> None:
    said: list[str] = []

    async def main() -> None:
        async with (
            open_world(0, 2, LinkProfile(latency_s=0.05)) as world,
            trio.open_nursery() as nursery,
        ):
            network = SimulatedNetwork(world, OWN)
            gone = world.network.address(world.peer_id(GONE))
            identity, transport = world.identities[OWN], world.join(OWN)
            peer = Peer(network, identity, transport, "weights-x", (gone,), AddressBook())
            rules = weights_rules("weights-x", [world.peer_id(GONE)], 60.0, "p", publishes=False)
            with open_weights_service(tmp_path, rules, transport, peer.gater, network) as service:
                await nursery.start(service.run)
                await nursery.start(peer.run)
                swarm = _Swarm(service, peer, nursery, on_stderr())
                nursery.start_soon(_explain, service, swarm, said.append)
                await trio.sleep(2 * WAITING_S)
                nursery.cancel_scope.cancel()

    deterministic_run(main, seed=0)
    assert said
    assert all(line.startswith("cannot join through /") for line in said)
