"""Where a role is run: on this machine (`machine`), or in a simulation. What opens something of the
outside is here, so that a role is the same code in both."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node.config import NodeConfig
from node.hosting.policy_host import HostsPolicy
from node.interfaces.engine import RolloutEngine
from node.interfaces.trainer import Trainer
from node.loops.learner import PolicyOutlet
from node.loops.learner_checks import Scores, VersionDirectory
from node.loops.parts import HandOver
from node.records.event_log import Record
from node.records.records import SampledGroup
from node.roles.peer import Network, Peer
from node.verification.verifier import Verifier
from swarm.weights.publisher import Published, Spread
from swarm.weights.service import Outcome, Stage, WeightsService


class SamplingTrainer(Trainer, RolloutEngine, Protocol):
    """A trainer that samples too."""


class Listener(Protocol):
    """Who hears what a role does."""

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
    """Where a learner's versions go."""

    outlet: PolicyOutlet
    held: Callable[[], Sequence[int]]  # the newest ones that were published, ascending
    find: VersionDirectory
    service: WeightsService | None  # None: they reach workers without one
    making: Callable[[], int | None]  # the version that is being put on offer


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who learns of a learner's versions."""

    published: Callable[[Published], None]
    spread: Callable[[Spread], None]
    failed: Callable[[str], Awaitable[None]]  # why one was not published


class World(Network, Protocol):
    """What is opened for roles; each of these ends with its block."""

    @property
    def restarts_trainer(self) -> bool:
        """Whether a trainer that died is opened again; else somebody else starts all anew."""
        ...

    @property
    def starting(self) -> Sequence[str]:
        """What is being started just now and takes long, by name."""
        ...

    async def rest(self, config: NodeConfig, tell: Callable[[str], None]) -> None:
        """Wait until the machine is the node's to use. `tell`: what it waits for."""
        ...

    def open_verifier(self, config: NodeConfig) -> AbstractAsyncContextManager[Verifier]:
        """What judges groups."""
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
    ) -> AbstractAsyncContextManager[tuple[RolloutEngine, HandOver | None]]:
        """What samples the policy of a trainer, and what hands it each new one.

        Raises:
            ChildFailed, ConfigError: as `open_trainer`.
        """
        ...

    def open_scorer(
        self, config: NodeConfig, find: VersionDirectory
    ) -> AbstractAsyncContextManager[Scores | None]:
        """What scores tokens under published versions; None: nothing does."""
        ...

    def policy_host(self, config: NodeConfig, listener: Listener) -> HostsPolicy:
        """What samples at a worker. It is stopped by whoever asked for it."""
        ...

    def open_publishing(
        self, config: NodeConfig, peer: Peer, watchers: Watchers
    ) -> AbstractAsyncContextManager[Publishing]:
        """The way of versions from a learner, at work."""
        ...

    def open_following(
        self,
        config: NodeConfig,
        peer: Peer,
        host: HostsPolicy,
        tell: Callable[[Outcome], None],
        watch: Callable[[Stage], None],
    ) -> AbstractAsyncContextManager[WeightsService | None]:
        """The way of versions to a worker's host, at work; None as in `Publishing`."""
        ...
