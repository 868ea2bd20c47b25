"""The outside of a role: this machine (`machine`) or a simulation. A role opens everything outside
of itself through a `World`, and so is the same code in both."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from node.config import NodeConfig
from node.hosting.policy_host import WorkerEngine
from node.hosting.policy_weights import (
    policy_weights,
    published_versions,
    version_directory,
)
from node.hosting.publisher_queue import PublisherQueue
from node.interfaces.engine import Engine
from node.interfaces.trainer import Trainer
from node.observe.event_log import Record
from node.observe.records import SampledGroup
from node.run.claims import Scores, VersionDirectory
from node.run.learner import PolicyOutlet
from node.run.parts import HandOver
from node.run.peer import Network, Peer
from node.verify.verifier import Verifier
from swarm.weights.publisher import Published, Publisher, Spread
from swarm.weights.weights_service import Follower, NoEngine, Outcome, Stage, WeightsService


class SamplingTrainer(Trainer, Engine, Protocol):
    """A trainer that samples too."""


class Listener(Protocol):
    """Hears what a role does."""

    def say(self, text: str) -> None:
        """For a person who watches; forgotten afterwards."""
        ...

    async def tell(self, record: Record) -> None:
        """For the log and whoever asks later."""
        ...

    async def show(self, groups: Sequence[SampledGroup]) -> None:
        """Some of what the policy and others said lately, for people to look at."""
        ...

    def note_outcome(self, outcome: Outcome) -> None:
        """A try to get a version is over."""
        ...


@dataclass(frozen=True, slots=True)
class Publishing:
    """The way of a learner's versions to its workers."""

    publisher_queue: PolicyOutlet
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
        """Wait until the machine is the node's to use. `tell`: what it waits for."""
        ...

    def open_verifier(self, config: NodeConfig) -> AbstractAsyncContextManager[Verifier]:
        """Open the verifier of groups."""
        ...

    def open_trainer(
        self, config: NodeConfig, checkpoint: Path | None
    ) -> AbstractAsyncContextManager[SamplingTrainer]:
        """The policy with its trainer, as a checkpoint has it; None: as it was to begin with.

        Raises:
            ChildFailed: it failed.
            ConfigError: it never will work so.
        """
        ...

    def open_engine(
        self, config: NodeConfig, trainer: SamplingTrainer, listener: Listener
    ) -> AbstractAsyncContextManager[tuple[Engine, HandOver | None]]:
        """Open the engine that samples a trainer's policy, with the hand-over of each new one.

        Raises:
            ChildFailed, ConfigError: as `open_trainer`.
        """
        ...

    def open_scorer(
        self, config: NodeConfig, find: VersionDirectory
    ) -> AbstractAsyncContextManager[Scores | None]:
        """Open the scorer of tokens under published versions; None if there is none."""
        ...

    def policy_host(self, config: NodeConfig, listener: Listener) -> WorkerEngine:
        """The host of a worker's policy. The caller stops it."""
        ...

    def open_publishing(
        self, config: NodeConfig, peer: Peer, watchers: Watchers
    ) -> AbstractAsyncContextManager[Publishing]:
        """Broadcast a learner's versions until the block ends."""
        return _broadcasting(self, config, peer, watchers)

    def open_following(
        self,
        config: NodeConfig,
        peer: Peer,
        host: WorkerEngine,
        tell: Callable[[Outcome], None],
        watch: Callable[[Stage], None],
    ) -> AbstractAsyncContextManager[WeightsService | None]:
        """Fetch versions for a worker's host until the block ends; None as in `Publishing`."""
        return _following(self, config, peer, host, tell, watch)


@asynccontextmanager
async def _broadcasting(
    world: Network, config: NodeConfig, peer: Peer, watchers: Watchers
) -> AsyncIterator[Publishing]:
    with policy_weights(config, peer.transport, peer.gater, world) as service:
        publisher = Publisher(service, peer.identity, watchers.spread)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            nursery.start_soon(publisher.run)
            publisher_queue = PublisherQueue(
                service,
                publisher,
                config.data_dir / "exports",
                nursery,
                watchers.failed,
                world.run_sync,
                watchers.published,
            )
            yield Publishing(
                publisher_queue,
                partial(published_versions, service),
                partial(version_directory, service),
                service,
                lambda: publisher_queue.making,
            )
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def _following(
    world: Network,
    config: NodeConfig,
    peer: Peer,
    host: WorkerEngine,
    tell: Callable[[Outcome], None],
    watch: Callable[[Stage], None],
) -> AsyncIterator[WeightsService]:
    with policy_weights(
        config, peer.transport, peer.gater, world, Follower(host or NoEngine(), tell, watch)
    ) as service:
        current = service.versions.current()
        if current is not None:
            await host.load(current.directory)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            yield service
            nursery.cancel_scope.cancel()
