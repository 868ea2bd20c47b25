"""The parts of a node and of its policy that the loops work with."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from node.config import NodeConfig
from node.hosting.hand_over import EngineHandOver
from node.interfaces.engine import Engine
from node.interfaces.trainer import Trainer
from node.methods.replay import SolvedTasks
from node.methods.task_control import Vade
from node.observe.records import SampledGroup
from node.verify.held_out import HeldOutGuard
from node.verify.task_choice import TaskChoice
from node.verify.verifier import Verifier
from swarm.exchange.exchange_service import Exchange
from swarm.identity import PeerId

OnSamples = Callable[[Sequence[SampledGroup]], Awaitable[None]]  # samples of a round, for people


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

    @classmethod
    def without_network(
        cls,
        config: NodeConfig,
        peer_id: PeerId,
        verifier: Verifier,
        now_s: Callable[[], float],
        guard: HeldOutGuard | None = None,
    ) -> "NodeParts":
        """The parts of a node that meets nobody. `guard`: None for the run's own."""
        return cls(
            config,
            peer_id,
            verifier,
            guard or HeldOutGuard(config.run, verifier, config.validated_by),
            None,
            TaskChoice(config.run, config.method(Vade), now_s=now_s),
            SolvedTasks(),
            now_s,
        )

    @property
    def stream(self) -> str:
        """The name that tasks and randomness of the node follow: its key's, or a seed's."""
        given = self.config.task_seed
        return self.peer_id if given is None else f"seed/{given}"  # the latter is no peer id

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
    hand_over: EngineHandOver | None = None  # None: the engine lives in the trainer's process

    @classmethod
    async def of(
        cls, trainer: Trainer, engine: Engine, hand_over: EngineHandOver | None = None
    ) -> "LivePolicy":
        return cls(trainer, engine, (await trainer.info()).tokenizer, hand_over)
