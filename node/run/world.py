"""The outside of a role: this machine (`machine`) or a simulation. Roles are alike in both."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import trio

from node.config import NodeConfig
from node.hosting.hand_over import EngineHandOver
from node.hosting.policy_host import WorkerEngine
from node.hosting.policy_weights import policy_weights
from node.hosting.publisher_queue import PublisherQueue
from node.interfaces.engine import Engine
from node.interfaces.trainer import Trainer
from node.observe.event_log import Record
from node.observe.records import SampledGroup
from node.run.claims import Scorer, VersionDirectory
from node.run.peer import Network, Peer
from node.verify.verifier import Verifier
from swarm.weights.publisher import Published, Publisher, Spread
from swarm.weights.weights_service import Follower, VersionOutcome, VersionProgress, WeightsService


class SamplingTrainer(Trainer, Engine, Protocol):
    """A trainer that samples too."""


class Listener(Protocol):
    """The receiver of a role's reports."""

    def say(self, text: str) -> None:
        """Show a line to the person who watches."""

    async def tell(self, record: Record) -> None:
        """Log a record."""

    async def show(self, groups: Sequence[SampledGroup]) -> None:
        """Keep samples of completions for people."""

    def note_outcome(self, outcome: VersionOutcome) -> None:
        """An attempt to get a version has ended."""


@dataclass(frozen=True, slots=True)
class Publishing:
    """The way of a learner's versions to its workers."""

    publisher_queue: PublisherQueue
    held: Callable[[], Sequence[int]]  # the newest ones that were published, ascending
    find: VersionDirectory
    service: WeightsService | None  # None: they reach workers without one
    making: Callable[[], int | None]  # the version that is being put on offer


@dataclass(frozen=True, slots=True)
class Watchers:
    """Callbacks on a learner's versions."""

    published: Callable[[Published], None]
    spread: Callable[[Spread], None]
    failed: Callable[[str], Awaitable[None]]  # why one was not published


class World(Network, Protocol):
    """Opens the outside for roles. Each `open_...` ends with its block."""

    @property
    def restarts_trainer(self) -> bool:
        """True if the node restarts a trainer that died; else the node ends."""
        return True

    @property
    def starting(self) -> Sequence[str]:
        """Names of slow starts that are under way."""
        return ()

    async def rest(self, config: NodeConfig, tell: Callable[[str], None]) -> None:
        """Wait until the node may use the machine. `tell` gets what it waits for."""

    def open_verifier(self, config: NodeConfig) -> AbstractAsyncContextManager[Verifier]:
        """Open the verifier of groups."""

    def open_trainer(
        self, config: NodeConfig, checkpoint: Path | None
    ) -> AbstractAsyncContextManager[SamplingTrainer]:
        """The policy with its trainer, as a checkpoint has it; None: the policy of the start. Fails
        with `ConfigError` where a restart would not help, else with `ChildFailed`."""

    def open_engine(
        self, config: NodeConfig, trainer: SamplingTrainer, listener: Listener
    ) -> AbstractAsyncContextManager[tuple[Engine, EngineHandOver | None]]:
        """Open the engine that samples a trainer's policy, and hand over each new one. Fails as
        `open_trainer`."""

    def open_scorer(
        self, config: NodeConfig, find: VersionDirectory
    ) -> AbstractAsyncContextManager[Scorer | None]:
        """Open the scorer of tokens under published versions; None if there is none."""

    def policy_host(self, config: NodeConfig, listener: Listener) -> WorkerEngine:
        """The host of a worker's policy. The caller stops it."""

    @asynccontextmanager
    async def open_publishing(
        self, config: NodeConfig, peer: Peer, watchers: Watchers
    ) -> AsyncIterator[Publishing]:
        """Broadcast a learner's versions until the block ends."""
        with policy_weights(config, peer.transport, peer.gater, self) as service:
            versions = service.versions
            publisher = Publisher(service, peer.identity, watchers.spread)

            def find(version: int) -> Path | None:
                local = versions.get(version)
                return None if local is None else local.directory

            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                nursery.start_soon(publisher.run)
                queue = PublisherQueue(
                    service,
                    publisher,
                    config.data_dir / "exports",
                    nursery,
                    watchers.failed,
                    self.run_sync,
                    watchers.published,
                )
                yield Publishing(
                    queue,
                    lambda: [local.version for local in versions.held()],
                    find,
                    service,
                    lambda: queue.making,
                )
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def open_following(
        self,
        config: NodeConfig,
        peer: Peer,
        host: WorkerEngine,
        tell: Callable[[VersionOutcome], None],
        watch: Callable[[VersionProgress], None],
    ) -> AsyncIterator[WeightsService | None]:
        """Fetch versions for a worker's host until the block ends; None as in `Publishing`."""
        with policy_weights(
            config, peer.transport, peer.gater, self, Follower(host, tell, watch)
        ) as service:
            current = service.versions.current()
            if current is not None:
                await host.load(current.directory)
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                yield service
                nursery.cancel_scope.cancel()
