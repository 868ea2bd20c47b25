"""One simulated run in a process of its own: `determinism_child.py seeded|unseeded SEED`.

All latencies are equal, so that many things happen at the same moment and only the scheduler
decides their order. Prints the hash of the trace.
"""

import os
import sys

import trio
from trio.testing import MockClock

from swarm.identity import PeerId
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.base import ServeLimits
from swarm.transport.memory.network import MemoryTransport

HOSTS = 8
ROUNDS = 5
TOPIC = "/test/topic"
PROTOCOL = "/test/echo"


async def run_swarm(seed: int, profile: LinkProfile) -> str:
    """Hosts on a ring with chords gossip and ask each other at the same moments."""
    async with open_world(seed, HOSTS, profile) as world, trio.open_nursery() as nursery:
        hosts = [world.join(index) for index in range(HOSTS)]
        for host in hosts:
            host.serve(PROTOCOL, echo, ServeLimits(1000, 1000))
            await host.subscribe(TOPIC, lambda peer, payload: True)
        for index in range(HOSTS):
            nursery.start_soon(live, world, index, hosts)
        await trio.sleep(60.0)
        return world.trace_hash


async def echo(peer: PeerId, payload: bytes) -> bytes:
    await trio.sleep(0.1)
    return payload


async def live(world: SimulatedWorld, index: int, hosts: list[MemoryTransport]) -> None:
    """One host: connect, then gossip and ask in each round."""
    host = hosts[index]
    neighbours = [hosts[(index + step) % HOSTS] for step in (1, 3)]
    for other in neighbours:
        await host.connect(other.addresses()[0])
    await trio.sleep_until(10.0)
    for number in range(ROUNDS):
        await host.publish(TOPIC, b"%d/%d" % (index, number))
        for other in neighbours:
            answer = await host.request(
                other.peer_id, PROTOCOL, b"ask", timeout_s=30.0, response_bytes_max=10
            )
            world.record(f"host {index} got {answer!r}")


def main(how: str, seed: int) -> None:
    garbage = [bytearray(os.urandom(1)[0] + 1) for _ in range(os.urandom(1)[0] * 50)]
    profile = LinkProfile(latency_s=0.1, loss=0.05)
    if how == "seeded":
        trace_hash = deterministic_run(run_swarm, seed, profile, seed=seed)
    else:
        trace_hash = trio.run(run_swarm, seed, profile, clock=MockClock(autojump_threshold=0.0))
    del garbage
    sys.stdout.write(trace_hash)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
