"""Production nodes over a simulated network, for tests, simulations and experiments.

Unlike in `app`, the transport is in memory, the clock starts at a fixed date, verifier and pool
work inline, and the caller brings the policy.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from node.config import NodeConfig
from node.hosting.membership import Membership
from node.interfaces.engine import Engine
from node.interfaces.trainer import Trainer
from node.observe.records import StatusSnapshot
from node.run.checkpoints import Checkpoints
from node.run.node import Node, pool_limits
from node.run.parts import LivePolicy
from node.run.peer import Peer, PeerSettings
from node.run.progress import Progress
from node.run.sapo_role import Record, Rounds
from node.verify.verifier import InlineVerifier
from swarm.exchange.exchange_service import Exchange
from swarm.exchange.pool import Pool
from swarm.identity import Identity
from swarm.peers.address_book import AddressBook
from swarm.simulation.world import SimulatedWorld
from swarm.storage import RunSync
from swarm.transport.base import Transport
from swarm.transport.memory.network import MemoryTransport

EPOCH_S: Final = 1_800_000_000  # unix time at which simulations begin
AGENT: Final = "simulated"


async def run_inline(function: Callable[..., object], *args: object) -> object:
    """Call a blocking function in place: a simulation has no threads."""
    await trio.lowlevel.checkpoint()
    return function(*args)


class SimulatedNetwork:
    """`Network` of one start of one host."""

    agent: str = AGENT
    run_sync: RunSync = staticmethod(run_inline)

    def __init__(
        self, world: SimulatedWorld, host: int, start: int = 0, clock_off_s: float = 0.0
    ) -> None:
        """`start`: number of this start of the host. Its clock is ahead by `clock_off_s`."""
        self.world = world
        self.host = host
        self._name = f"node/{host}/{start}"
        self._clock_off_s = clock_off_s
        self._secrets = self.rng("secrets")

    def now_s(self) -> float:
        return EPOCH_S + trio.current_time() + self._clock_off_s

    def rng(self, purpose: str) -> Random:
        return self.world.rng(f"{self._name}/{purpose}")

    def secret(self, size_bytes: int) -> bytes:
        return self._secrets.randbytes(size_bytes)

    @asynccontextmanager
    async def open_transport(
        self, identity: Identity, config: NodeConfig, membership: Membership
    ) -> AsyncIterator[Transport]:
        await trio.lowlevel.checkpoint()
        yield self.world.join(self.host)

    def can_be_dialled(self, transport: Transport) -> bool:
        return True


@dataclass(slots=True)
class SimulatedNode:
    """One node of a simulation and its reports."""

    host: int
    node: Node
    rounds: Rounds
    transport: MemoryTransport
    pool: Pool
    records: list[Record] = field(default_factory=list)
    leaving: trio.Event = field(default_factory=trio.Event)
    shown: StatusSnapshot | None = None  # for the caller, e.g. the state at the end of a run

    @property
    def exchange(self) -> Exchange:
        return self.rounds.exchange


def build(
    world: SimulatedWorld,
    host: int,
    config: NodeConfig,
    peers: Sequence[str] = (),
    *,
    pool: Pool | None = None,
    book: AddressBook | None = None,
    start: int = 0,
    clock_off_s: float = 0.0,
) -> SimulatedNode:
    """A node on a host of the world that learns by itself and does not run yet. `peers` are
    simulated addresses and replace those in `config`."""
    transport = world.join(host)
    if pool is None:
        pool = Pool(":memory:", pool_limits(config))
    network = SimulatedNetwork(world, host, start, clock_off_s)
    config = config.model_copy(update={"peers": tuple(peers)})
    settings = PeerSettings(config.run.run_id, config.bootstrap, book or AddressBook())
    peer = Peer(network, world.identities[host], transport, settings)
    node = Node(config, network, peer, InlineVerifier(config.run), pool, config.external_groups)
    return SimulatedNode(host, node, Rounds(config, node), transport, pool)


async def run(
    simulated: SimulatedNode,
    trainer: Trainer,
    engine: Engine,
    on_record: Callable[[Record], Awaitable[None]] | None = None,
    *,
    progress: Progress | None = None,
    checkpoints: Checkpoints | None = None,
    stay: bool = True,
) -> None:
    """Run a node's network and rounds. With `stay` it serves until cancelled; else it leaves after
    its last round."""

    async def keep(record: Record) -> None:
        simulated.records.append(record)
        if on_record is not None:
            await on_record(record)

    async with trio.open_nursery() as nursery:
        await nursery.start(simulated.node.run_network)
        await simulated.rounds.run(
            await LivePolicy.of(trainer, engine),
            progress or Progress(),
            leaving=simulated.leaving,
            on_record=keep,
            checkpoints=checkpoints,
        )
        if not stay:
            nursery.cancel_scope.cancel()
