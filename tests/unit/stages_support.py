"""One node that plays rounds with a scripted policy, a real verifier and methods."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.interfaces.engine import Capabilities, Outcome, Recorded, Request, Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.methods.choices import KNOWN
from node.methods.method import MethodSettings
from node.methods.replay import SolvedTasks
from node.methods.task_control import Vade
from node.observe.records import RoundDone
from node.run.parts import LivePolicy, NodeParts
from node.run.progress import Progress
from node.run.sapo import Sapo
from node.stages.stage import RoundOutcome, Stage, View
from node.verify.held_out import HeldOutGuard
from node.verify.task_choice import TaskChoice
from node.verify.verifier import InlineVerifier
from swarm.peers.reputation import Ledger
from tests import support
from tests.unit.tasks_support import ALICE

SMALL, LARGE = 9, 899  # largest summands of the two environments of `RUN`
RUN = RunConfig.model_validate(
    {
        "name": "sums",
        "environments": [
            {"name": "scripted_sum", "parameters": {"max": SMALL}},
            {"name": "scripted_sum", "parameters": {"max": LARGE}},
        ],
        "sampling": {"max_new_tokens": 4},
        "held_out": {"tasks": 4},
    }
)
ONE_KIND = RUN.model_copy(update={"environments": RUN.environments[1:]})


def is_small(question: str) -> bool:
    return all(int(each) <= SMALL for each in question.removesuffix("=").split("+"))


class Student(ScriptedPolicy):
    """Solves this share of the sums of small numbers, and that of the others, and learns nothing.
    Keeps what it was asked and what it was trained on."""

    capabilities = Capabilities(requests=True, records=frozenset({"entropies"}))

    def __init__(self, small: float = 0.5, large: float | None = None) -> None:
        super().__init__()
        self.skills = {True: small, False: small if large is None else large}
        self.asked: list[list[Request]] = []  # of each call
        self.batches: list[list[TrainingGroup]] = []

    async def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, noise: float = 0.0
    ) -> list[Outcome]:
        self.asked.append(list(requests))
        found = []
        for at, each in enumerate(requests):
            self.skill = self.skills[is_small(Prompt.read(each.prompt).question)]
            set_to = each.settings(sampling)
            [made] = await self.generate([each.prompt], each.n, set_to, 1_000 * seed + at)
            # the later a token, the less sure
            rows = [Recorded(tuple(0.5 + n for n in range(len(c.token_ids)))) for c in made]
            found.append(Outcome(made, tuple(rows) if "entropies" in each.record else ()))
        return found

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self.batches.append(list(groups))
        return await super().train(groups)


class Probe(Stage[MethodSettings]):
    """Keeps what rounds came to."""

    def __init__(self) -> None:
        super().__init__(MethodSettings())
        self.outcomes: list[RoundOutcome] = []

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        self.outcomes.append(outcome)


@dataclass
class Played:
    """What a node did in its rounds."""

    config: NodeConfig
    policy: Student
    rounds: list[RoundDone] = field(default_factory=list)
    outcomes: list[RoundOutcome] = field(default_factory=list)

    def acted(self, kind: str) -> int:
        return sum(each.acted.get(kind, 0) for each in self.rounds)


def config_of(run: RunConfig = RUN, **settings: Any) -> NodeConfig:
    sizes = {"local_groups": 4, "group_size": 4, "external_groups": 0, "share": "none"}
    return NodeConfig.model_validate({"run": run, **sizes, **settings})


def parts_of(config: NodeConfig) -> NodeParts:
    """A node without a network."""
    verifier = InlineVerifier(config.run)
    exchange = cast("Any", SimpleNamespace(ledger=Ledger()))
    guard, choice = HeldOutGuard(config.run, verifier), TaskChoice(config.run, config.method(Vade))
    return NodeParts(
        config, ALICE, verifier, guard, exchange, choice, SolvedTasks(), lambda: 0.0
    )  # fmt: skip


def play(
    config: NodeConfig,
    policy: Student,
    rounds: int = 3,
    resume_after: int = 0,
    change: Callable[[Sapo], None] = lambda _: None,
    *,
    virtual: bool = True,
) -> Played:
    """The rounds of a node. With `resume_after` its methods are made anew after so many rounds,
    from the progress as a checkpoint has it."""
    played = Played(config, policy)

    async def body() -> None:
        parts, progress = parts_of(config), Progress()
        live = await LivePolicy.of(policy, policy)
        probe = Probe()

        def begun(progress: Progress) -> Sapo:
            sapo = Sapo(parts, live, progress)
            sapo.stages.methods = [*sapo.stages.methods, probe]
            change(sapo)
            return sapo

        sapo = begun(progress)
        for number in range(rounds):
            if resume_after and number == resume_after:
                record: Mapping[str, Any] = json.loads(json.dumps(asdict(sapo.progress)))
                sapo = begun(Progress.from_json(record))
            played.rounds.append(await sapo.round())
        played.outcomes = probe.outcomes

    support.run(body, virtual=virtual, timeout_s=3_600)
    return played


def family_of(kind: str) -> str:
    return next(family for family, known in KNOWN.items() if kind in known)
