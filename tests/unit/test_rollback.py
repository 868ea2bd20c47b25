"""Validation in a node's rounds: what is kept, the way back from a fall, and what is told of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.envs.scoring import pose
from node.hosting.hand_over import EngineHandOver
from node.interfaces.engine import Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.interfaces.trainer_spec import TrainerSpec
from node.observe.records import HeldOut, RoundDone, WentBack
from node.observe.samples import EXAMPLES
from node.policies.presets import TinyRecipe
from node.policies.tiny import make_tiny
from node.run.checkpoints import Checkpoints
from node.run.evaluation import evaluate
from node.run.parts import LivePolicy, NodeParts
from node.run.progress import Progress
from node.run.sapo_role import TOO_FEW_PROBLEMS, Record
from node.simulation.simulated_nodes import SimulatedNode, build, run_inline
from node.train.process import InProcessTrainer
from node.verify.assignment import VALIDATION_PRODUCER, assigned_task
from node.verify.held_out import HeldOutGuard
from node.verify.verifier import InlineVerifier
from node.verify.warm_up import PRODUCER as WARM_UP_PRODUCER
from swarm.errors import ChildFailed, ConfigError, RemoteProtocolError
from swarm.identity import public_key_of
from swarm.rollouts import Completion, ScoredGroup
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from tests import support
from tests.unit.tasks_support import make_group

LAN = LinkProfile(latency_s=0.02)


def sums(largest: int, **rules: Any) -> RunConfig:
    environment = {"name": "scripted_sum", "parameters": {"max": largest}}
    return RunConfig.model_validate(
        {
            "name": "sums",
            "environments": [environment],
            "sampling": {"max_new_tokens": 4},
            "held_out": {"tasks": 10},
            **rules,
        }
    )


MANY = sums(4999)  # problems enough
FEW = sums(9)
CONFIG = NodeConfig(
    run=MANY, local_groups=4, external_groups=0, group_size=4, evaluate_every_rounds=1, rounds=8
)


class Falling(ScriptedPolicy):
    """Has a skill of its own after each round, whatever it trains on. Counts what it is asked."""

    def __init__(self, *skills: float) -> None:
        super().__init__(skill=skills[0], generate_s=0.0, train_s=0.0)
        self._skills = iter(skills[1:])
        self.prompts: list[int] = []  # of each call
        self.turned = 0

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        self.prompts.append(len(prompts))
        return await super().generate(prompts, completions_each, sampling, seed)

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        skill = self.skill
        report = await super().train(groups)
        self.skill = next(self._skills, skill)
        return report

    async def save(self, directory: Path) -> None:
        (directory / "skill").write_text(str(self.skill))

    async def roll_back(self, directory: Path) -> int:
        self.skill = float((directory / "skill").read_text())
        self.version += 1
        self.turned += 1
        return self.version


Policy = Falling | InProcessTrainer


async def _lives(
    config: NodeConfig,
    policy: Policy,
    kept: Checkpoints | None,
    progress: Progress,
    hand_over: EngineHandOver | None,
) -> SimulatedNode:
    async with open_world(1, 1, LAN) as world:
        node = build(world, 0, config)

        async def keep(record: Record) -> None:
            node.records.append(record)

        await node.rounds.run(
            await LivePolicy.of(policy, policy, hand_over),
            progress,
            leaving=node.leaving,
            on_record=keep,
            checkpoints=kept,
        )
        return node


def live(
    config: NodeConfig,
    policy: Policy,
    kept: Checkpoints | None = None,
    progress: Progress | None = None,
    hand_over: EngineHandOver | None = None,
) -> SimulatedNode:
    """The node after all its rounds, alone."""
    arguments = (config, policy, kept, progress or Progress(), hand_over)
    return deterministic_run(_lives, *arguments, seed=1)


def checkpoints(directory: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(directory / "checkpoints", keep, {}, run_inline)


def change(config: NodeConfig, **values: object) -> NodeConfig:
    return config.model_copy(update=values)


def evaluations(node: SimulatedNode) -> list[HeldOut]:
    return [record for record in node.records if isinstance(record, HeldOut)]


def rounds(node: SimulatedNode) -> list[RoundDone]:
    return [record for record in node.records if isinstance(record, RoundDone)]


def turns(node: SimulatedNode) -> list[WentBack]:
    return [record for record in node.records if isinstance(record, WentBack)]


# --- the validation tasks ------------------------------------------------------------------------


def questions(guard: HeldOutGuard) -> set[str]:
    return {Prompt.read(each.prompt).question for each in support.run(guard.validation)}


def test_validation_tasks_are_of_nobody_and_apart_from_the_test() -> None:
    run = sums(25, held_out={"tasks": 300})  # of 676 problems, so that they meet
    verifier = InlineVerifier(run)
    guard = HeldOutGuard(run, verifier, 64)
    decide = questions(guard)
    assert len(decide) == 64
    assert not decide & support.run(guard.questions)
    assert decide > questions(HeldOutGuard(run, verifier, 32))  # nodes agree as far as they can
    assert not questions(HeldOutGuard(run, verifier, 0))
    with pytest.raises(RemoteProtocolError):
        public_key_of(VALIDATION_PRODUCER)


def test_own_tasks_are_none_of_them() -> None:
    run, verifier = sums(99), InlineVerifier(sums(99))

    def own(validation: int) -> set[str]:
        guard = HeldOutGuard(run, verifier, validation)
        assigned, _ = support.run(guard.assignments, "me", 0, 5_000)
        return {Prompt.read(each.prompt).question for each in assigned}

    decide = questions(HeldOutGuard(run, verifier, 64))
    assert not own(64) & decide
    assert own(0) & decide  # else it says nothing


def test_a_group_of_another_on_such_a_question_is_no_offence_and_is_not_trained_on() -> None:
    run, verifier = sums(99), InlineVerifier(sums(99))
    guard = HeldOutGuard(run, verifier, 64)
    decide = questions(guard)
    met, kept = 0, 0
    for index in range(2_000):
        group = make_group(run, "1", task=assigned_task(run, make_group(run, "1").producer, index))
        prompt = pose(group.task, 100).prompt
        seen = ScoredGroup(bytes(32), group, prompt, (1.0,))
        if Prompt.read(prompt).question in decide:
            support.run(guard.verify, group)
            met += 1
            assert support.run(guard.trainable, [seen]) == []
        elif kept < 3:
            kept += 1
            assert support.run(guard.trainable, [seen]) == [seen]
    assert met
    assert kept


def test_a_run_of_few_problems_has_none_and_the_node_says_so() -> None:
    assert not questions(HeldOutGuard(FEW, InlineVerifier(FEW), 64))
    node = live(change(CONFIG, run=FEW, rounds=1), Falling(0.5))
    assert node.node.notes["validation"] == TOO_FEW_PROBLEMS
    assert [each.validation for each in evaluations(node)] == [None, None]
    assert len(rounds(node)) == 1
    meant = live(change(CONFIG, run=FEW, rounds=1, validation_tasks=0), Falling(0.5))
    assert "validation" not in list(meant.node.notes)


def test_an_evaluation_is_one_call_and_says_the_same_of_the_test() -> None:
    policy = Falling(0.5)
    verifier = InlineVerifier(MANY)
    guard = HeldOutGuard(MANY, verifier, 64)
    validation = support.run(guard.validation)
    unused: Any = None
    node = NodeParts(change(CONFIG, run=MANY), unused, verifier, guard, *[unused] * 4)
    alone = support.run(evaluate, node, policy, Progress())
    both = support.run(evaluate, node, policy, Progress(), validation)
    assert both.examples == alone.examples  # of the held-out tasks alone, and always the same
    prompts = [each.prompt for each in both.examples]
    assert len(set(prompts)) == len(prompts) == EXAMPLES
    assert all(len(each.texts) == 1 for each in both.examples)
    assert policy.prompts == [10, 74]
    assert replace(both, validation=None, validation_tasks=0, seconds=alone.seconds) == alone
    assert both.validation_tasks == 64
    assert len(both.rewards) == both.tasks
    assert fmean(each or 0.0 for each in both.rewards) == pytest.approx(both.passed)
    assert both.validation is not None
    assert 0.3 < both.validation < 0.7


def test_without_validation_nothing_is_decided(tmp_path: Path) -> None:
    policy, kept = Falling(0.9, 0.9, 0.1), checkpoints(tmp_path)
    node = live(change(CONFIG, validation_tasks=0), policy, kept)
    assert not turns(node)
    assert kept.best() is None
    assert 10 in policy.prompts  # the test
    assert node.rounds.progress.validated.rate_share == 1.0


# --- the way back --------------------------------------------------------------------------------

FALL = (0.5, 0.9, 0.1, 0.1)  # skills, from before the first round on


def test_a_fall_leads_back_to_the_best(tmp_path: Path) -> None:
    policy, kept = Falling(*FALL), checkpoints(tmp_path)
    node = live(change(CONFIG, rounds=5), policy, kept)
    best = evaluations(node)[1].validation
    left = evaluations(node)[3].validation
    assert best is not None
    assert left is not None
    # versions: one for each of three updates, then one for the way back
    assert turns(node) == [WentBack(3, 4, left, best, 1, 0.5)]
    assert [each.policy_version for each in rounds(node)] == [1, 2, 3, 5, 6]
    assert [each.rate_share for each in rounds(node)] == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert policy.rate_share == 0.5
    assert [(each.validation or 0) > 0.5 for each in evaluations(node)[1:]] == [
        True, False, False, True, True,
    ]  # fmt: skip
    assert (policy.turned, policy.skill) == (1, 0.9)


def test_without_the_setting_it_stays_where_it_fell(tmp_path: Path) -> None:
    policy, kept = Falling(*FALL), checkpoints(tmp_path)
    node = live(change(CONFIG, rounds=5, returns_to_best=False), policy, kept)
    assert not turns(node)
    assert (policy.turned, policy.skill) == (0, 0.1)
    assert kept.best() is not None  # for whoever looks


def test_progress_goes_on_and_no_task_is_done_twice(tmp_path: Path) -> None:
    fallen = live(change(CONFIG, rounds=5), Falling(*FALL), checkpoints(tmp_path))
    steady = live(change(CONFIG, rounds=5), Falling(0.5))
    assert fallen.rounds.progress.round == 5
    assert fallen.rounds.progress.next_index == steady.rounds.progress.next_index
    assert [each.round for each in rounds(fallen)] == [1, 2, 3, 4, 5]
    assert fallen.rounds.progress.generated_tokens > 0


class Diary:
    """An `EngineHandOver` that writes down what it is asked for."""

    def __init__(self, policy: Falling) -> None:
        self._policy = policy
        self.lines: list[str] = []

    async def before_training(self) -> None:
        self.lines.append("before")

    async def after_training(self, policy_version: int) -> float:
        self.lines.append(f"after {policy_version} of {self._policy.skill}")
        return 0.0


def test_the_engine_gets_the_best_as_it_gets_every_policy(tmp_path: Path) -> None:
    policy = Falling(*FALL)
    diary = Diary(policy)
    live(change(CONFIG, rounds=4), policy, checkpoints(tmp_path), hand_over=diary)
    afters = [
        "after 1 of 0.9",
        "after 2 of 0.1",
        "after 3 of 0.1",
        "after 4 of 0.9",
        "after 5 of 0.9",
    ]
    assert diary.lines == [line for after in afters for line in ("before", after)]


def test_what_a_return_came_to_is_saved_at_once(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path, keep=9)
    live(change(CONFIG, rounds=4, checkpoint_every_rounds=100), Falling(*FALL), kept)
    folders = sorted((tmp_path / "checkpoints").glob("round-*"))
    assert [each.name for each in folders] == ["round-00000003", "round-00000004"]
    assert (folders[0] / "skill").read_text() == "0.9"
    found = kept.latest()
    assert found is not None
    assert found.progress.validated.returns == 1


def test_a_return_by_the_last_evaluation_of_all_is_on_the_disk(tmp_path: Path) -> None:
    """Round 5 was saved when it was done, and what follows its evaluation is decided after that."""
    kept = checkpoints(tmp_path, keep=9)
    falls = Falling(0.9, 0.9, 0.9, 0.1, 0.1, 0.1)
    setting = change(CONFIG, rounds=5, evaluate_every_rounds=2, checkpoint_every_rounds=1)
    node = live(setting, falls, kept)
    assert [(type(each), each.round) for each in turns(node)] == [(WentBack, 5)]
    found = kept.latest()
    assert found is not None
    assert found.directory.name == "round-00000005"
    assert (found.directory / "skill").read_text() == "0.9"
    assert found.progress.validated.returns == 1


def test_an_evaluation_that_an_interrupt_left_out_is_made_up_for(tmp_path: Path) -> None:
    kept, setting = checkpoints(tmp_path), change(CONFIG, rounds=4, evaluate_every_rounds=2)
    live(setting, Falling(0.9), kept)
    found = kept.latest()
    assert found is not None
    again = live(setting, Falling(0.9), kept, found.progress)
    assert [each.round for each in evaluations(again)] == [4]


def test_what_was_decided_holds_after_a_restart(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    live(change(CONFIG, rounds=4), Falling(*FALL), kept)
    found = kept.latest()
    assert found is not None
    slowed = Falling(0.9)
    live(change(CONFIG, rounds=5), slowed, kept, found.progress)
    assert slowed.rate_share == 0.5
    again = Falling(0.9, 0.1, 0.1)
    node = live(change(CONFIG, rounds=7), again, kept, found.progress)
    assert rounds(node)[0].rate_share == 0.5
    assert [type(each) for each in turns(node)] == [WentBack]
    assert again.skill == 0.9  # of the best, which the first start kept
    assert again.rate_share == 0.25
    assert node.rounds.progress.validated.returns == 2


def test_the_best_on_the_disk_counts_and_not_what_an_older_checkpoint_knows(tmp_path: Path) -> None:
    kept = checkpoints(tmp_path)
    live(change(CONFIG, rounds=1), Falling(0.5, 0.9), kept)
    node = live(change(CONFIG, rounds=2), Falling(0.5), kept, Progress())
    assert node.rounds.progress.validated.best == evaluations_best(kept) > 0.7

    support.run(run_inline, lambda: (tmp_path / "checkpoints" / "best").unlink())
    lost = live(change(CONFIG, rounds=3), Falling(0.5), kept, node.rounds.progress)
    assert lost.rounds.progress.validated.best == evaluations_best(kept) < 0.7


def evaluations_best(kept: Checkpoints) -> float:
    found = kept.best()
    assert found is not None
    assert found.progress.validated.best is not None
    return found.progress.validated.best


class Undone(Falling):
    """Cannot load what was kept."""

    async def roll_back(self, directory: Path) -> int:
        raise ConfigError(f"checkpoint damaged: {directory}")


def test_a_best_that_does_not_load_is_put_aside_and_the_trainer_is_started_again(
    tmp_path: Path,
) -> None:
    kept = checkpoints(tmp_path)
    failed = pytest.RaisesExc(ChildFailed, match="moved to .*damaged-best-00000001")
    with pytest.RaisesGroup(failed, flatten_subgroups=True):
        live(CONFIG, Undone(*FALL), kept)
    assert kept.best() is None
    assert kept.latest() is not None


def test_without_a_disk_there_is_no_way_back() -> None:
    policy = Falling(*FALL)
    node = live(change(CONFIG, rounds=8), policy)
    assert turns(node) == []
    assert policy.turned == 0


# --- with a real policy --------------------------------------------------------------------------

SMALL = sums(20)
SMALL_CONFIG = change(CONFIG, run=SMALL, validation_tasks=24, rounds=4)
RECIPE = TinyRecipe(
    hidden=32, layers=2, heads=4, key_value_heads=2, head_size=8, intermediate=48,
    context_tokens=64, batch=32, steps=1500, ramp_steps=5, target=0.5, learning_rate=1e-2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is right about every other time."""
    directory = tmp_path_factory.mktemp("sums")
    tasks = (assigned_task(SMALL, WARM_UP_PRODUCER, index) for index in range(100_000))
    problems = (pose(task, 100) for task in tasks)
    make_tiny(((p.prompt, p.answer) for p in problems), directory, lambda *_: None, RECIPE)
    return directory


class Wrecked(InProcessTrainer):
    """The real trainer; the second update leaves nothing of the policy."""

    def __init__(self, model: Path) -> None:
        super().__init__(TrainerSpec(str(model), device="cpu", threads=1, learning_rate=1e-5))
        self.updates = 0
        self.turned: list[dict[str, torch.Tensor]] = []

    def weights(self) -> dict[str, torch.Tensor]:
        named = self._core.policy.model.named_parameters()
        return {name: each.detach().clone() for name, each in named}

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        report = await super().train(groups)
        self.updates += 1
        if self.updates == 2:
            with torch.no_grad():
                for each in self._core.policy.model.parameters():
                    each.normal_(generator=torch.Generator().manual_seed(0))
        return report

    async def roll_back(self, directory: Path) -> int:
        version = await super().roll_back(directory)
        self.turned.append(self.weights())
        return version


def test_a_policy_that_is_wrecked_is_back_within_two_evaluations(
    model: Path, tmp_path: Path
) -> None:
    policy, kept = Wrecked(model), checkpoints(tmp_path)
    node = live(SMALL_CONFIG, policy, kept)
    passed = [each.validation or 0.0 for each in evaluations(node)]
    before = max(passed[:2])
    assert before > 0.3
    assert passed[2:4] == [0.0, 0.0]
    assert passed[4] == pytest.approx(before, abs=0.1)  # after one more update
    (turn,) = turns(node)
    assert isinstance(turn, WentBack)
    assert (turn.round, turn.best, turn.rate_share) == (3, before, 0.5)
    versions = [each.policy_version for each in rounds(node)]
    assert versions == sorted(versions)  # of a wreck no group is informative: it stands still
    assert versions[2] < turn.policy_version < versions[3]

    best = kept.best()
    assert best is not None
    (turned,) = policy.turned
    saved = load_file(best.directory / "model.safetensors")
    assert all(torch.equal(turned[name], saved[name]) for name in saved)


def test_a_policy_that_is_wrecked_stays_so_without_the_way_back(
    model: Path, tmp_path: Path
) -> None:
    config = change(SMALL_CONFIG, returns_to_best=False)
    node = live(config, Wrecked(model), checkpoints(tmp_path))
    passed = [each.validation or 0.0 for each in evaluations(node)]
    assert max(passed[:2]) > 0.3
    assert passed[2:] == [0.0, 0.0, 0.0]
    assert not turns(node)
