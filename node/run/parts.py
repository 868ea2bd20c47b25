"""The parts of a node and of its policy that the loops work with."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from node.config import NodeConfig
from node.interfaces.engine import Engine
from node.interfaces.trainer import Trainer
from node.methods.replay import SolvedTasks
from node.observe.records import SampledGroup
from node.verify.held_out import HeldOutGuard
from node.verify.task_choice import TaskChoice
from node.verify.verifier import Verifier
from swarm.exchange.exchange_service import Exchange
from swarm.identity import PeerId

OnSamples = Callable[[Sequence[SampledGroup]], Awaitable[None]]
"""Gets some groups of each round, for people to look at."""


class HandOver(Protocol):
    """Gives each new policy to an engine in a process of its own."""

    async def before_training(self) -> None:
        """Stop sampling until `after_training` ends."""
        ...

    async def after_training(self, policy_version: int) -> float:
        """Load the new policy into the engine. Returns the seconds that the engine stood still.

        Raises:
            ChildFailed: the engine does not take the policy.
        """
        ...


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts of a node that do not change when its trainer restarts."""

    config: NodeConfig
    peer_id: PeerId
    verifier: Verifier
    guard: HeldOutGuard
    exchange: Exchange | None  # None: the node draws no shared groups
    choice: TaskChoice
    solved: SolvedTasks
    now_s: Callable[[], float]  # unix time
    enter: Callable[[str], None] = lambda _: None  # told of each phase of a round

    @property
    def the_exchange(self) -> Exchange:
        """The exchange of a node that has one."""
        assert self.exchange is not None
        return self.exchange


@dataclass(frozen=True, slots=True)
class LivePolicy:
    """A loaded policy: its trainer, and the engine that samples it."""

    trainer: Trainer
    engine: Engine
    tokenizer: str  # fingerprint
    hand_over: HandOver | None = None  # None: the engine lives in the trainer's process

    @classmethod
    async def of(
        cls, trainer: Trainer, engine: Engine, hand_over: HandOver | None = None
    ) -> "LivePolicy":
        """Ask the trainer for the tokenizer's fingerprint."""
        return cls(trainer, engine, (await trainer.info()).tokenizer, hand_over)
