"""The round: plain GRPO without foreign groups, honest numbers with them, and its own tasks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
import trio

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.envs.scoring import pose
from node.hosting.hand_over import EngineHandOver
from node.interfaces.engine import EngineInfo, Sampling
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.interfaces.trainer_spec import TrainerSpec
from node.observe.records import AnswerCounts, HeldOut, RoundDone, SampledGroup
from node.policies.presets import TinyRecipe
from node.policies.tiny import make_tiny
from node.run.checkpoints import Checkpoints
from node.run.parts import LivePolicy, OnSamples
from node.run.progress import Progress
from node.simulation.simulated_nodes import SimulatedNode, build
from node.simulation.simulated_nodes import run as run_simulated
from node.train.process import InProcessTrainer
from node.verify.assignment import assigned_task
from node.verify.held_out import HeldOutGuard
from node.verify.verifier import InlineVerifier
from node.verify.warm_up import PRODUCER as WARM_UP_PRODUCER
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.rollouts import Completion, GroupId, ScoredGroup
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from tests import support
from tests.unit.tasks_support import leave_wrong_undecided

RUN = RunConfig.model_validate(
    {
        "name": "sums",
        "environments": [{"name": "scripted_sum", "parameters": {"max": 9}}],
        "sampling": {"max_new_tokens": 4},
        "held_out": {"tasks": 10},
    }
)
CONFIG = NodeConfig(run=RUN, local_groups=4, external_groups=0, group_size=4, rounds=3)
RECIPE = TinyRecipe(
    hidden=32, layers=2, heads=4, key_value_heads=2, head_size=8, intermediate=48,
    context_tokens=64, batch=32, steps=400, ramp_steps=5, target=0.15, learning_rate=1e-2,
)  # fmt: skip
LAN = LinkProfile(latency_s=0.02)
HEAD_START_S = 12.0  # for peers to connect and to share before the node's rounds begin


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is sometimes right, so that its groups have advantages."""
    directory = tmp_path_factory.mktemp("sums")
    problems = (pose(assigned_task(RUN, WARM_UP_PRODUCER, index), 100) for index in range(10_000))
    make_tiny(((p.prompt, p.answer) for p in problems), directory, lambda *_: None, RECIPE)
    return directory


class PacedTrainer(InProcessTrainer):
    """The real trainer; an update takes time, so that the network has some. Keeps its batches."""

    def __init__(self, model: Path, seconds: float = 5.0) -> None:
        spec = TrainerSpec(str(model), device="cpu", threads=1, learning_rate=3e-3)
        super().__init__(replace(spec, step_guard=False))  # at such a rate all steps are long
        self.batches: list[list[TrainingGroup]] = []
        self._seconds = seconds

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        await trio.sleep(self._seconds)
        self.batches.append(list(groups))
        return await super().train(groups)


class FrozenPolicy(ScriptedPolicy):
    """Trains without learning: what moves its rewards then is a fault. Keeps what it was given."""

    def __init__(self, skill: float, generate_s: float = 1.0) -> None:
        super().__init__(skill=skill, generate_s=generate_s, train_s=generate_s)
        self.batches: list[list[TrainingGroup]] = []
        self.prompts: list[int] = []  # of each call

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        self.prompts.append(len(prompts))
        return await super().generate(prompts, completions_each, sampling, seed)

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        skill = self.skill
        report = await super().train(groups)
        self.skill = skill
        self.batches.append(list(groups))
        return report


Policy = PacedTrainer | FrozenPolicy


@dataclass
class Others:
    """The peers around the node under test: one for each config, all with this skill."""

    configs: Sequence[NodeConfig] = ()
    skill: float = 0.5
    nodes: list[SimulatedNode] = field(default_factory=list)
    kind: type["FrozenPolicy"] = FrozenPolicy


NOBODY = Others()
PEER = CONFIG.model_copy(update={"rounds": None, "external_groups": 1})


async def _lives(
    config: NodeConfig,
    policy: Policy,
    others: Others,
    seed: int,
    hand_over: EngineHandOver | None = None,
    on_samples: OnSamples | None = None,
) -> SimulatedNode:
    async with open_world(seed, 1 + len(others.configs), LAN) as world, trio.open_nursery() as all_:
        node = build(world, 0, config)
        address = node.transport.addresses()[:1]
        async with trio.open_nursery() as network:
            if others.configs:
                await network.start(node.node.run_network)
            for host, peer_config in enumerate(others.configs, start=1):
                others.nodes.append(build(world, host, peer_config, address))
                scripted = others.kind(others.skill)
                all_.start_soon(run_simulated, others.nodes[-1], scripted, scripted)
            await trio.sleep(HEAD_START_S)
            if others.configs:
                assert len(node.transport.peers()) == len(others.configs)

            async def keep(record: RoundDone | HeldOut) -> None:
                node.records.append(record)

            await node.rounds.run(
                await LivePolicy.of(policy, policy, hand_over),
                Progress(),
                leaving=node.leaving,
                on_record=keep,
                on_samples=on_samples,
            )
            network.cancel_scope.cancel()
        all_.cancel_scope.cancel()
        return node


def live(
    config: NodeConfig,
    policy: Policy,
    others: Others = NOBODY,
    *,
    seed: int = 1,
    hand_over: EngineHandOver | None = None,
    on_samples: OnSamples | None = None,
) -> SimulatedNode:
    """The node, after all its rounds among the others."""
    return deterministic_run(_lives, config, policy, others, seed, hand_over, on_samples, seed=seed)


def rounds(node: SimulatedNode) -> list[RoundDone]:
    return [record for record in node.records if isinstance(record, RoundDone)]


def held_out(node: SimulatedNode) -> list[float]:
    return [record.passed for record in node.records if isinstance(record, HeldOut)]


def change(config: NodeConfig, **values: object) -> NodeConfig:
    return config.model_copy(update=values)


def weights(policy: PacedTrainer, directory: Path) -> bytes:
    directory.mkdir()
    support.run(policy.export, directory)
    return (directory / "model.safetensors").read_bytes()


# --- J = 0 -------------------------------------------------------------------------------------


def test_without_foreign_groups_it_is_plain_grpo_to_the_bit(model: Path, tmp_path: Path) -> None:
    def outcome(
        name: str, config: NodeConfig, others: Others = NOBODY
    ) -> tuple[list[tuple[float, ...]], bytes, int]:
        policy = PacedTrainer(model)
        done = rounds(live(config, policy, others))
        numbers = [(r.loss, r.grad_norm, r.own_reward, r.own_logprob) for r in done]
        foreign = sum(r.external_groups for r in done)
        return numbers, weights(policy, tmp_path / name), foreign

    before = (model / "model.safetensors").read_bytes()
    alone = outcome("alone", change(CONFIG, share="none"))
    among_others = Others([PEER, PEER])
    connected = outcome("connected", CONFIG, among_others)
    assert any(numbers[1] > 0 for numbers in alone[0]), "no update: the comparison says nothing"
    assert alone[1] != before
    assert connected == alone
    assert all(r.external_groups for peer in among_others.nodes for r in rounds(peer)[-2:]), (
        "the peers share nothing"
    )

    another_seed = outcome("seed", change(CONFIG, seed=1))
    assert another_seed[0] != alone[0]
    assert another_seed[1] != alone[1]
    with_foreign = outcome("foreign", change(CONFIG, external_groups=2), Others([PEER, PEER]))
    assert with_foreign[2] > 0
    assert with_foreign[0][0][2] == alone[0][0][2]  # the same own completions at first
    assert with_foreign[1] != alone[1]


def test_a_task_seed_repeats_a_run_under_another_key(model: Path, tmp_path: Path) -> None:
    def outcome(name: str, key: int, **values: object) -> tuple[str, bytes]:
        policy = PacedTrainer(model)
        node = live(change(CONFIG, share="none", **values), policy, seed=key)
        return str(node.node.peer.identity.peer_id), weights(policy, tmp_path / name)

    one, repeated = outcome("one", 1, task_seed=7), outcome("repeated", 2, task_seed=7)
    assert one[0] != repeated[0], "the keys are equal: the comparison says nothing"
    assert one[1] == repeated[1]
    assert outcome("tasks", 2, task_seed=8)[1] != one[1]
    assert outcome("seed", 2, task_seed=7, seed=1)[1] != one[1]
    assert outcome("key", 1)[1] != outcome("other key", 2)[1]


class Diary(FrozenPolicy):
    """Policy and `EngineHandOver` in one, which writes down what it is asked for."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.lines: list[str] = []

    async def generate(self, *arguments: Any) -> list[tuple[Completion, ...]]:
        self.lines.append("generate")
        return await super().generate(*arguments)

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self.lines.append("train")
        return await super().train(groups)

    async def before_training(self) -> None:
        self.lines.append("before")

    async def after_training(self, policy_version: int) -> float:
        self.lines.append(f"after {policy_version}")
        return policy_version / 4


def test_an_engine_of_its_own_is_told_before_and_after_each_update() -> None:
    diary = Diary()
    node = live(change(CONFIG, rounds=2, evaluate_every_rounds=0), diary, hand_over=diary)
    each = [["generate", "before", "train", f"after {version}"] for version in (1, 2)]
    assert diary.lines == [*each[0], *each[1]]
    assert [record.paused_s for record in rounds(node)] == [0.25, 0.5]


def test_nothing_is_fetched_where_nothing_is_wanted() -> None:
    node = live(CONFIG, FrozenPolicy(0.5), Others([PEER, PEER]))
    assert node.node.ledger.accepted == 0


# --- what is reported --------------------------------------------------------------------------


def test_foreign_rewards_never_enter_the_nodes_own_numbers() -> None:
    config = change(CONFIG, rounds=8, external_groups=4, evaluate_every_rounds=2)
    alone = live(config, FrozenPolicy(0.2))
    policy = FrozenPolicy(0.2)
    among_experts = live(config, policy, Others([PEER, PEER, PEER], skill=0.9))
    foreign = [g for batch in policy.batches for g in batch if not g.own_tokens]
    assert len(foreign) == sum(r.external_groups for r in rounds(among_experts)) > 8
    assert [r.own_reward for r in rounds(among_experts)] == [r.own_reward for r in rounds(alone)]
    assert held_out(among_experts) == held_out(alone)
    assert len(held_out(alone)) == 5
    assert [r.generated_tokens for r in rounds(among_experts)] == [
        r.generated_tokens for r in rounds(alone)
    ]


def test_a_round_says_what_taught_nothing_and_what_its_completions_came_to() -> None:
    for skill, share in ((1.0, 1.0), (0.0, 0.0)):
        node = live(change(CONFIG, rounds=2), FrozenPolicy(skill))
        for record in rounds(node):
            made = record.local_groups * CONFIG.group_size
            assert record.answers == AnswerCounts(made, unread=0, right=int(share * made), cut=0)
            assert (record.own_taught, record.informative_groups) == (0, 0)
    mixed = rounds(live(change(CONFIG, rounds=4), FrozenPolicy(0.5)))
    assert any(record.own_taught for record in mixed)
    assert all(record.own_taught == record.informative_groups for record in mixed)


def test_a_run_with_a_format_trains_and_shares_and_its_groups_can_be_looked_at() -> None:
    class Talker(FrozenPolicy):
        def _complete(self, prompt: str, sampling: Sampling, rng: Random) -> Completion:
            short = super()._complete(prompt, sampling, rng)
            return replace(short, text=f"{prompt[1:4]}: it is **{short.text}**.")

    answer = {"format": "last_number", "system": "Be brief."}
    run = RunConfig.model_validate({**RUN.model_dump(exclude={"answer"}), "answer": answer})
    config = change(CONFIG, run=run, external_groups=2, rounds=6)
    peer = PEER.model_copy(update={"run": run})
    found: list[SampledGroup] = []

    async def look(groups: Sequence[SampledGroup]) -> None:
        found.extend(groups)

    others = Others([peer, peer], kind=Talker)
    node = live(config, Talker(0.5), others, on_samples=look)
    assert 0.2 < fmean(record.own_reward for record in rounds(node)) < 0.8
    assert sum(record.external_groups for record in rounds(node)) > 0
    assert {each.own for each in found} == {True, False}
    for each in found:
        assert each.prompt.startswith("Be brief.\n\n")
        assert all(f"**{text.answer}**" in text.text for text in each.texts)
    plain = live(change(CONFIG, rounds=2), Talker(0.5))
    assert {record.own_reward for record in rounds(plain)} == {0.0}


def test_groups_of_quantised_engines_are_counted_apart() -> None:
    class Quantised(FrozenPolicy):
        maker = EngineInfo("vllm", "fp8")

    node = live(change(CONFIG, external_groups=2), FrozenPolicy(0.5), Others([PEER, PEER]))
    assert [r.groups_quantised for r in rounds(node)] == [0] * len(rounds(node))
    own = rounds(live(change(CONFIG, external_groups=2), Quantised(0.5), Others([PEER, PEER])))
    assert any(r.external_groups for r in own)
    assert [r.groups_quantised for r in own] == [r.local_groups for r in own]
    foreign = live(
        change(CONFIG, external_groups=2), FrozenPolicy(0.5), Others([PEER, PEER], kind=Quantised)
    )
    counts = [(r.groups_quantised, r.external_groups) for r in rounds(foreign)]
    assert all(quantised == drawn for quantised, drawn in counts)
    assert any(drawn for _, drawn in counts)


def test_foreign_groups_without_advantage_are_taken_in_and_not_trained_on() -> None:
    config = change(CONFIG, rounds=6, external_groups=2)
    node = live(config, FrozenPolicy(0.2), Others([PEER, PEER], skill=1.0))
    assert node.node.ledger.accepted > 4
    assert [r.external_groups for r in rounds(node)] == [0] * 6
    assert "no usable foreign group" in node.node.notes["sharing"]


def test_fewer_foreign_groups_than_wanted_are_all_used_and_counted() -> None:
    wanted = 40
    policy = FrozenPolicy(0.5)
    node = live(change(CONFIG, rounds=4, external_groups=wanted), policy, Others([PEER]))
    for record, batch in zip(rounds(node), policy.batches, strict=True):
        foreign = [group for group in batch if not group.own_tokens]
        assert record.external_groups == len(foreign) < wanted
        assert record.local_groups == 4
        assert record.foreign_by_producer == (
            {node.node.discovery.peers and next(iter(node.node.discovery.peers)): len(foreign)}
            if foreign
            else {}
        )
        assert all(any(group.advantages) for group in foreign)
    assert sum(r.external_groups for r in rounds(node)) > 0
    marked = node.pool._db.execute(
        "SELECT count(*) FROM groups WHERE NOT own AND trained_round IS NOT NULL"
    ).fetchone()
    assert marked[0] == sum(r.external_groups for r in rounds(node))


def test_groups_of_all_sizes_train_in_one_step_and_none_outweighs_an_own_one(model: Path) -> None:
    sizes = (2, 4, 8)
    assert CONFIG.group_size == 4
    policy = PacedTrainer(model)
    others = Others([change(PEER, group_size=size) for size in sizes])
    node = live(change(CONFIG, rounds=2, external_groups=24), policy, others)
    foreign = [g for g in policy.batches[0] if not g.own_tokens]
    assert {len(g.completions) for g in foreign} == {2, 4}
    assert all(len(g.completions) == len(g.advantages) for g in foreign)
    made = {len(v.group.completions) for v in _pooled(node)}
    assert made == set(sizes)  # the largest ones arrived whole, and were cut for the batch
    assert rounds(node)[0].policy_version == 1
    assert isfinite(rounds(node)[0].loss)
    assert rounds(node)[0].grad_norm > 0
    assert rounds(node)[0].foreign_logprob is not None


# --- filtering own groups ----------------------------------------------------------------------


def _pooled(node: SimulatedNode) -> list[ScoredGroup]:
    ids = node.pool._db.execute("SELECT group_id FROM groups WHERE NOT own").fetchall()
    return node.pool.groups([GroupId(each) for (each,) in ids])


def test_a_producer_gets_no_more_than_its_share_of_a_batch_among_others() -> None:
    config = change(CONFIG, rounds=6, external_groups=4)
    loud = change(PEER, local_groups=16)

    def largest_share(share_max: float) -> int:
        node = live(
            change(config, foreign_share_max=share_max), FrozenPolicy(0.5), Others([loud, PEER])
        )
        several = [r.foreign_by_producer for r in rounds(node) if len(r.foreign_by_producer) > 1]
        return max(max(each.values()) for each in several)

    assert largest_share(0.5) == 2
    assert largest_share(1.0) > 2  # the control


# --- the node's own tasks ----------------------------------------------------------------------


def test_two_nodes_have_other_tasks() -> None:
    async def first_hundred(producer: str) -> list[tuple[int, int]]:
        guard = HeldOutGuard(RUN, InlineVerifier(RUN))
        assigned, _ = await guard.assignments(producer, 0, 100)  # type: ignore[arg-type]
        return [(a.task.seed, a.task.index) for a in assigned]

    async def body() -> None:
        one, other = await first_hundred("one"), await first_hundred("other")
        assert len(set(one)) == 100
        assert not set(one) & set(other)
        assert await first_hundred("one") == one

    support.run(body)


class DyingPolicy(FrozenPolicy):
    """Its process is gone when the update of a round comes."""

    def __init__(self, dies_at: int) -> None:
        super().__init__(0.5, generate_s=0.0)
        self.rounds_left = dies_at

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self.rounds_left -= 1
        if self.rounds_left == 0:
            raise ChildFailed("gone")
        return await super().train(groups)


def test_a_nodes_stream_goes_on_after_a_crash_without_sharing_a_task_twice(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, 2, {})

    async def keep(record: object) -> None:
        pass

    async def body() -> list[int]:
        async with open_world(1, 1, LAN) as world:
            node = build(world, 0, change(CONFIG, rounds=5, checkpoint_every_rounds=1))

            async def rounds_of(policy: DyingPolicy, progress: Progress) -> None:
                await node.rounds.run(
                    await LivePolicy.of(policy, policy),
                    progress,
                    leaving=node.leaving,
                    on_record=keep,
                    checkpoints=kept,
                )

            with pytest.RaisesGroup(ChildFailed, flatten_subgroups=True):
                await rounds_of(DyingPolicy(3), Progress())
            saved = kept.latest()
            assert saved is not None
            assert saved.progress.round == 2
            assert kept.reserved() > saved.progress.next_index  # the third round was shared
            await rounds_of(DyingPolicy(0), replace(saved.progress, next_index=kept.reserved()))
            assert node.rounds.progress.round == 5
            shared = [c.group_id for c in node.pool.eligible(own=True, now_s=0)]
            return sorted(g.group.task.index for g in node.pool.groups(shared))

    indices = support.run(body)
    assert len(indices) == len(set(indices)) == 4 * 6  # five rounds and the one that was lost
    last = kept.latest()
    assert last is not None
    assert last.progress.next_index > indices[-1]


class CountsSaves(FrozenPolicy):
    """Without `learns` it is as a policy whose every update is taken back."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__(0.5, generate_s=0.0)
        self.saves, self._learns = 0, learns

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        report = await super().train(groups)
        self.version -= not self._learns
        return replace(report, policy_version=self.version)

    async def save(self, directory: Path) -> None:
        self.saves += 1
        await super().save(directory)


@pytest.mark.parametrize("learns", [True, False])
def test_rounds_that_changed_nothing_write_no_policy_again(tmp_path: Path, *, learns: bool) -> None:
    kept, policy = Checkpoints(tmp_path, 2, {}), CountsSaves(learns=learns)

    async def nothing(record: object) -> None:
        pass

    async def body() -> None:
        async with open_world(1, 1, LAN) as world:
            node = build(world, 0, change(CONFIG, rounds=5, checkpoint_every_rounds=1))
            await node.rounds.run(
                await LivePolicy.of(policy, policy),
                Progress(),
                leaving=node.leaving,
                on_record=nothing,
                checkpoints=kept,
            )

    support.run(body)
    assert policy.saves == (5 if learns else 1)
    last = kept.latest()
    assert last is not None
    assert last.progress.round == 5


def test_a_node_that_shares_nothing_gives_nothing_away() -> None:
    peer = Others([change(PEER, external_groups=4)])
    node = live(change(CONFIG, share="none", rounds=6, external_groups=2), FrozenPolicy(0.5), peer)
    assert node.pool.statistics().own == 0
    assert [r.groups_shared for r in rounds(node)] == [0] * 6
    assert sum(r.external_groups for r in rounds(node)) > 0  # it takes
    assert peer.nodes[0].node.ledger.accepted == 0
    sharing = Others([change(PEER, external_groups=4)])
    live(change(CONFIG, rounds=6, external_groups=2), FrozenPolicy(0.5), sharing)
    assert sharing.nodes[0].node.ledger.accepted > 0


def test_what_is_undecided_is_left_out_and_its_group_is_shared_with_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody knows that it is wrong: those that are right beside it gain nothing by it."""
    leave_wrong_undecided(monkeypatch)
    policy = FrozenPolicy(0.5)
    config = change(CONFIG, rounds=24, external_groups=0, group_size=3)
    node = live(config, policy)
    trained = [group for batch in policy.batches for group in batch]
    assert {len(group.completions) for group in trained} == {1, 2, 3}
    assert not any(any(group.advantages) for group in trained)
    assert len(trained) < 24 * CONFIG.local_groups  # of some nothing is known
    assert all(each.own_reward == 1.0 for each in rounds(node) if each.local_groups)
    shared = [c.group_id for c in node.pool.eligible(own=True, now_s=0)]
    whole = sum(len(group.completions) == 3 for group in trained)
    assert 0 < len(shared) == whole == sum(each.groups_shared for each in rounds(node))


class Drafting(FrozenPolicy):
    """All of each completion is kept of a draft."""

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        groups = await super().generate(prompts, completions_each, sampling, seed)
        return [
            tuple(replace(each, splices=(len(each.token_ids),)) for each in group)
            for group in groups
        ]


def test_others_hear_where_drafts_end() -> None:
    policy = FrozenPolicy(0.5)
    live(change(CONFIG, rounds=4, external_groups=2), policy, Others([PEER], kind=Drafting))
    drawn = [c for batch in policy.batches for g in batch if g.source for c in g.completions]
    assert drawn
    assert all(each.splices == (len(each.token_ids),) for each in drawn)


class ShortSighted(FrozenPolicy):
    """Its context has no room for questions that end in an even number."""

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        made = await super().generate(prompts, completions_each, sampling, seed)
        fits = [int(re.findall(r"[0-9]+", prompt)[-1]) % 2 for prompt in prompts]
        return [group if fit else () for group, fit in zip(made, fits, strict=True)]


def test_a_task_too_long_for_the_context_is_left_out_and_named() -> None:
    config = change(CONFIG, evaluate_every_rounds=1)
    node = live(config, ShortSighted(0.5))
    assert len(rounds(node)) == 3
    measured = [each.tasks for each in node.records if isinstance(each, HeldOut)]
    assert all(0 < tasks < 10 for tasks in measured)
    assert [each.local_groups for each in rounds(node)] == [4] * 3  # others took their places
    note = node.node.verifier.counters.note
    assert note is not None
    assert "tasks left out so far; the first is number " in note
    assert "its prompt does not fit the context of the model" in note


class Blind(FrozenPolicy):
    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        return [() for _ in prompts]


def test_a_node_that_can_do_no_task_ends_and_says_why() -> None:
    config = change(CONFIG, evaluate_every_rounds=0)
    with pytest.raises(BaseExceptionGroup) as ended:
        live(config, Blind(0.5))
    said = first_of(ended.value)
    assert isinstance(said, ConfigError)
    assert re.match(r"none of 5\d tasks in a row can be done: its prompt does not fit", str(said))
