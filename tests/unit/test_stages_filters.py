"""Filters in a round: each acts, what it does is what its formula says, and it goes on after a
restart as if there had been none."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from node.config import load_config
from node.envs.scoring import pose
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.filters import Extremes, Variance
from node.observe.records import RoundDone
from node.policies.tiny import make_tiny
from node.run.parts import LivePolicy, NodeParts
from node.run.round import Round
from node.run.sapo import _shareable
from node.stages.filtering import BANK_CHARS_MAX, DropUnvaried, KeepExtremes
from node.stages.stage import BatchGroup, Stage, View
from node.stages.table import stages_of
from node.train.process import InProcessTrainer
from node.verify.assignment import assigned_task
from swarm.errors import ConfigError
from swarm.rollouts import ScoredGroup
from tests import support
from tests.unit.stages_support import ONE_KIND, RUN, Played, Student, config_of, parts_of, play
from tests.unit.test_learner_batch import of_size, view
from tests.unit.test_sapo import RECIPE


def trained(played: Played) -> list[tuple[float, ...]]:
    """The rewards of each own group that was trained on."""
    return [
        each.scored.rewards
        for outcome in played.outcomes
        for each in outcome.batch
        if not each.drawn
    ]


def is_flat(rewards: Sequence[float]) -> bool:
    return len(set(rewards)) == 1


# --- the effect of each method, found from what was made and trained on alone ------------------


def nothing_flat(played: Played) -> bool:
    return bool(trained(played)) and not any(map(is_flat, trained(played)))


def full_of_informative(played: Played) -> bool:
    """Each batch has the first four groups of the round whose rewards differ."""
    return all(
        [each.scored.prompt for each in outcome.batch]
        == [each.scored.prompt for each in outcome.own if not is_flat(each.scored.rewards)][:4]
        and len(outcome.batch) == 4
        for outcome in played.outcomes
    )


def long_ones_lose(played: Played) -> bool:
    """Of at most three tokens the last one costs the whole factor, which is 0.5."""
    lowered = 0
    for outcome in played.outcomes:
        for own, each in zip(outcome.own, outcome.batch, strict=True):
            counts = [len(c.token_ids) for c in own.scored.group.completions]
            pairs = zip(own.scored.rewards, counts, strict=True)
            right = tuple(reward - 0.5 * (count >= 3) for reward, count in pairs)
            if each.scored.rewards != right:
                return False
            lowered += right != own.scored.rewards
    return lowered > 0


def varied_or_recalled(played: Played) -> bool:
    """Two right ones of four score 1, and what scored that is asked again, for the node alone."""
    if not trained(played) or any(sum(each) != 2 for each in trained(played)):
        return False
    kept: set[str] = set()
    recalled = 0
    for outcome in played.outcomes:
        for each in outcome.own:
            if each.private != (each.scored.prompt in kept):
                return False
            recalled += each.private
        kept |= {each.scored.prompt for each in outcome.batch}
    return recalled > 0


def the_most_varied(played: Played) -> bool:
    """Half of what has an advantage, and of its tokens half; no left-out one lies between."""
    for outcome, batch in zip(played.outcomes, played.policy.batches, strict=True):
        told = [grpo(each.scored.rewards) for each in outcome.own]
        every = sorted(value for values in told for value in values)
        kept = sorted(value for each in batch for value in each.advantages)
        rank = len(every) - len(kept)
        ends = [every[:low] + every[low + rank :] for low in range(len(kept) + 1)]
        spread = [stdev(each) for each in ends]
        if len(kept) * 2 != len(every) or stdev(kept) < max(spread) - 1e-4:
            return False
        masks = [mask for each in batch for mask in each.masks]
        tokens = sum(map(len, masks))
        if abs(sum(map(sum, masks)) - tokens / 2) > 0.5 or not tokens:
            return False
        # the later a token, the higher its entropy: a completion keeps its end
        if any(mask != tuple(sorted(mask)) for mask in masks):
            return False
    return True


def grpo(rewards: Sequence[float]) -> list[float]:
    if is_flat(rewards):
        return [0.0] * len(rewards)
    return [(each - fmean(rewards)) / stdev(rewards) for each in rewards]


Effect = Callable[[Played], bool]
CASES: dict[str, tuple[str, tuple[float, float], int, tuple[str, ...], Effect]] = {
    "zero_advantage": ("zero_advantage", (0.3, 0.3), 3, ("select",), nothing_flat),
    "dynamic_sampling": (
        "dynamic_sampling", (0.2, 0.2), 4, ("select", "more"), full_of_informative
    ),
    "overlong": (
        "overlong, tokens_max=3, buffer=1, factor=0.5", (0.5, 0.5), 3, ("reward",), long_ones_lose
    ),
    "variance": (
        "variance, score_min=0.8", (0.5, 0.5), 6, ("select", "plan"), varied_or_recalled
    ),
    "extremes": (
        "extremes, samples_first=0.5, tokens_first=0.5, tokens_last=0.5", (0.4, 0.4), 3,
        ("weigh", "generate"), the_most_varied,
    ),
}  # fmt: skip


def played_with(kind: str, resume_after: int = 0) -> Played:
    text, (small, large), rounds, _, _ = CASES[kind]
    return play(config_of(filter=text), Student(small, large), rounds, resume_after)


@pytest.mark.parametrize("kind", CASES)
def test_it_acts_as_its_formula_says(kind: str) -> None:
    played = played_with(kind)
    assert played.acted(kind) > 0
    assert CASES[kind][-1](played)


@pytest.mark.parametrize(("kind", "hook"), [(k, hook) for k in CASES for hook in CASES[k][3]])
def test_without_what_it_does_its_effect_is_absent(
    kind: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [stage] = stages_of(config_of(filter=CASES[kind][0])).methods
    monkeypatch.setattr(type(stage), hook, getattr(Stage, hook))
    assert not CASES[kind][-1](played_with(kind))


@pytest.mark.parametrize("kind", CASES)
def test_after_a_restart_it_decides_as_it_would_have(kind: str) -> None:
    whole, again = played_with(kind), played_with(kind, resume_after=2)
    assert again.policy.asked == whole.policy.asked
    assert again.policy.batches == whole.policy.batches


def test_without_its_bank_a_node_recalls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DropUnvaried, "restore", Stage.restore)
    whole, again = played_with("variance"), played_with("variance", resume_after=5)
    assert any(each.private for each in whole.outcomes[-1].own)
    assert not any(each.private for each in again.outcomes[-1].own)


# --- bounds -------------------------------------------------------------------------------------


def test_what_is_recalled_is_not_shared() -> None:
    own = [each for outcome in played_with("variance").outcomes for each in outcome.own]
    assert {each.private: _shareable(each, ONE_KIND) is None for each in own} == {
        False: False,
        True: True,
    }


def test_a_schedule_sets_the_banks_bound() -> None:
    """With one right of four a group scores 0.75."""
    both = {"filter": "variance, score_min=0.8", "control": "variance_curriculum, score_first=0.7"}
    least = [sum(each) for each in trained(play(config_of(**both), Student(0.5), 6))]
    assert set(least) == {1, 2, 3}
    played = play(config_of(control="variance_curriculum, score_first=0.8", filter="variance"),
        Student(0.5), 8,
    )  # fmt: skip
    assert varied_or_recalled(played)  # what the schedule left out is replaced as well


def test_the_bank_has_a_bound_in_characters() -> None:
    played = played_with("variance")
    stage, at = DropUnvaried(Variance()), replace(view("t"), role="node")
    long = "x" * (BANK_CHARS_MAX // 3)
    own = [
        replace(each, scored=replace(each.scored, prompt=f"{number}{long}"))
        for number, each in enumerate(each for o in played.outcomes for each in o.own)
        if sum(each.scored.rewards) == 2
    ]
    assert len(own) >= 3
    assert len(stage.select(own, at)) == len(own)
    known, scores, _ = stage.to_record()
    assert len(known) == len(scores) == 2


def test_a_groups_limit_is_the_runs() -> None:
    """Of four tokens the last is the buffer: four tokens lose all, three nothing."""
    [stage] = stages_of(config_of(filter="overlong")).methods
    played = play(config_of(ONE_KIND), Student(0.5), 1)
    [scored] = {each.scored for each in played.outcomes[0].own[:1]}
    made = scored.group.completions
    sized = tuple(
        replace(each, token_ids=(65,) * n) for each, n in zip(made, (1, 3, 4, 2), strict=True)
    )
    group = replace(scored, group=replace(scored.group, completions=sized), rewards=(1.0,) * 4)
    at = replace(view(scored.group.tokenizer), config=config_of())
    [found] = stage.reward([BatchGroup(group)], at)
    assert found.scored.rewards == (1.0, 1.0, 0.0, 1.0)
    other = replace(group, group=replace(group.group, tokenizer="another"))
    assert stage.reward([BatchGroup(other)], at) == [BatchGroup(other)]


def test_groups_without_entropies_keep_all_their_tokens() -> None:
    stage = KeepExtremes(Extremes(tokens_first=0.25))
    groups = [BatchGroup(of_size(1, 4)), BatchGroup(of_size(2, 4), drawn=True)]
    worth = [(1.0, -1.0, 1.0, -1.0)] * 2
    batch, found = stage.weigh(groups, worth, view("t"))
    assert list(batch) == groups
    assert found == worth


def test_bounds_the_wrong_way_round_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('name = "r"\n[[environments]]\nname = "scripted_sum"\n')
    with pytest.raises(ConfigError, match="buffer 9: over tokens_max 8"):
        load_config({"filter": "overlong, tokens_max=8, buffer=9"}, {}, run)


# --- learners -----------------------------------------------------------------------------------


class Leased:
    """A source of these groups."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        self.groups = groups

    async def own(self, at: View, clock: Any) -> list[BatchGroup]:
        return [BatchGroup(each) for each in self.groups]

    async def share(self, own: Sequence[BatchGroup], at: View) -> int:
        return 0

    async def draw(self, at: View) -> list[ScoredGroup]:
        return []

    async def show(self, own: Sequence[BatchGroup], foreign: Sequence[ScoredGroup]) -> None:
        pass


def learned_from(groups: Sequence[ScoredGroup], text: str) -> tuple[list[TrainingGroup], int]:
    """What a learner trains on, and how often the method acted."""
    policy = Student()
    at = view(groups[0].group.tokenizer)
    stages = stages_of(config_of(filter=text))

    async def step() -> None:
        live = await LivePolicy.of(policy, policy)
        parts: NodeParts = parts_of(at.config)
        await Round(parts, live, Leased(groups), stages).run(at)

    support.run(step, virtual=True)
    return policy.batches[0], sum(stages.acted.values())


FLAT = replace(of_size(1, 4), rewards=(1.0,) * 4)
RARE = replace(of_size(2, 4), rewards=(1.0, 0.0, 0.0, 0.0))
EVEN = replace(of_size(3, 4), rewards=(1.0, 1.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("zero_advantage", [4, 4]),
        ("variance, score_min=0.8", [4]),
        ("extremes, samples_first=0.5", [0, 2, 4]),  # of 1.5, thrice -0.5, twice +-0.87
        ("overlong, tokens_max=1", [4, 4, 4]),
    ],
)
def test_a_learner_has_it_too(text: str, sizes: list[int]) -> None:
    batch, acted = learned_from([FLAT, RARE, EVEN], text)
    assert [len(each.completions) for each in batch] == sizes
    assert acted > 0


# --- the real engine and trainer ----------------------------------------------------------------


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sums")
    problems = (pose(assigned_task(RUN, "warm-up", index), 100) for index in range(10_000))
    make_tiny(
        ((p.prompt, p.answer) for p in problems),
        directory,
        lambda *_: None,
        replace(RECIPE, steps=200),
    )
    return directory


@pytest.mark.parametrize(
    "settings",
    [
        {"control": "cdas"},
        {"control": "dars", "filter": "zero_advantage"},
        {"control": "brorl", "filter": "overlong"},
        {"control": "xrpo_allocation", "filter": "dynamic_sampling"},
        {"control": "variance_curriculum", "filter": "variance, extremes, samples_first=0.3"},
    ],
)
def test_a_real_policy_is_sampled_and_trained_by_it(settings: dict[str, str], sums: Path) -> None:
    spec = TrainerSpec(str(sums), device="cpu", threads=1, learning_rate=3e-3)
    policy: Any = InProcessTrainer(replace(spec, step_guard=False))
    rounds: list[RoundDone] = play(config_of(**settings), policy, 3).rounds
    assert sum(each.generated_tokens for each in rounds) > 0
    assert rounds[-1].trained_tokens_total > 0
    assert any(each.acted for each in rounds)
