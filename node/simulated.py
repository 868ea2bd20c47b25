"""Production nodes over a simulated network: for tests, simulations and experiments.

Everything above `Transport` is what `app` runs; what differs is named here: the in-memory
transport, a clock that starts at a fixed date, a verifier and a pool that work inline instead of
in processes and threads, and a policy that the caller brings.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from node.checkpoints import Checkpoints
from node.config import NodeConfig
from node.engines.base import RolloutEngine
from node.monitor.records import StatusSnapshot
from node.node import Node, Record
from node.node import World as NodeWorld
from node.sapo import Progress
from node.tasks.verifier import InlineVerifier, Verifier
from node.training.base import Trainer
from swarm.exchange.pool import Pool, PoolLimits
from swarm.peers.address_book import AddressBook
from swarm.simulation.world import World
from swarm.transport.memory.network import MemoryTransport

EPOCH_S = 1_800_000_000  # unix time at which simulations begin
AGENT = "simulated"


async def run_inline(function: Callable[..., object], *args: object) -> object:
    """Call a blocking function where it is: a simulation has no threads."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@dataclass(slots=True)
class SimulatedNode:
    """One node of a simulation and what it reported."""

    host: int
    node: Node
    transport: MemoryTransport
    pool: Pool
    records: list[Record] = field(default_factory=list)
    leaving: trio.Event = field(default_factory=trio.Event)
    shown: StatusSnapshot | None = None  # for the caller, e.g. the state at the end of a run


def pool_limits(config: NodeConfig) -> PoolLimits:
    """The bounds of the node's pool."""
    return PoolLimits(
        config.pool_groups_max, config.pool_bytes_max, config.pool_groups_per_peer_max
    )


def build(
    world: World,
    host: int,
    config: NodeConfig,
    peers: Sequence[str] = (),
    verifier: Verifier | None = None,
    *,
    pool: Pool | None = None,
    book: AddressBook | None = None,
    start: int = 0,
    clock_off_s: float = 0.0,
) -> SimulatedNode:
    """Put host number `host` of the world on its network, with a node on it that does nothing yet.

    `peers` are addresses of the simulated network; those in `config` are ignored. `pool` and `book`
    are those of its disk, None: empty ones that are forgotten. `start` tells the starts of one host
    apart. Its clock is ahead by `clock_off_s`.
    """
    transport = world.join(host)
    if pool is None:
        pool = Pool(":memory:", pool_limits(config))
    rng = world.rng(f"node/{host}/{start}")
    node = Node(
        config.model_copy(update={"peers": tuple(peers)}),
        world.identities[host],
        transport,
        pool,
        verifier or InlineVerifier(config.run),
        book or AddressBook(),
        NodeWorld(
            now_s=lambda: EPOCH_S + trio.current_time() + clock_off_s,
            rng=rng,
            run_sync=run_inline,
            instance=rng.randbytes(16),
            agent=AGENT,
        ),
    )
    return SimulatedNode(host, node, transport, pool)


async def run(
    simulated: SimulatedNode,
    trainer: Trainer,
    engine: RolloutEngine,
    on_record: Callable[[Record], Awaitable[None]] | None = None,
    *,
    progress: Progress | None = None,
    checkpoints: Checkpoints | None = None,
    stay: bool = True,
) -> None:
    """Run a node's network and rounds, from `progress` on. With `stay` it serves on after its last
    round, until cancelled; else it leaves."""

    async def keep(record: Record) -> None:
        simulated.records.append(record)
        if on_record is not None:
            await on_record(record)

    async with trio.open_nursery() as nursery:
        await nursery.start(simulated.node.run_network)
        await simulated.node.run_rounds(
            trainer,
            engine,
            progress or Progress(),
            leaving=simulated.leaving,
            on_record=keep,
            checkpoints=checkpoints,
        )
        if not stay:
            nursery.cancel_scope.cancel()
