"""Two simulated nodes, of which the first is looked at."""

import trio

from node.config import NodeConfig
from node.engines.scripted import ScriptedPolicy
from node.observe.records import RoundDone, StatusSnapshot
from node.simulation.simulated_nodes import build
from node.simulation.simulated_nodes import run as run_simulated
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world


def rounds_beside(
    config: NodeConfig,
    policy: ScriptedPolicy,
    other_config: NodeConfig,
    other: ScriptedPolicy,
    shown: list[StatusSnapshot] | None = None,
) -> list[RoundDone]:
    """The rounds of the first node, up to its last one; the other goes on as long. `shown`: takes
    what the first shows after each."""
    rounds: list[RoundDone] = []

    async def body() -> None:
        link = LinkProfile(latency_s=0.02)
        async with open_world(1, 2, link) as world, trio.open_nursery() as nursery:
            over = trio.Event()
            first = build(world, 0, config)
            endless = other_config.model_copy(update={"rounds": None})
            second = build(world, 1, endless, first.transport.addresses())

            async def keep(record: object) -> None:
                if isinstance(record, RoundDone):
                    rounds.append(record)
                    if shown is not None:
                        shown.append(first.rounds.status(first.node.snapshot()))
                    if record.round == config.rounds:
                        over.set()

            async def nothing(record: object) -> None:
                pass

            nursery.start_soon(run_simulated, second, other, other, nothing)
            nursery.start_soon(run_simulated, first, policy, policy, keep)
            await over.wait()
            nursery.cancel_scope.cancel()

    deterministic_run(body, seed=1)
    return rounds
