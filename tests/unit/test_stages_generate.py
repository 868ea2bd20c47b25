"""Methods of generation in rounds of a tiny policy with the torch engine: each acts, and a planted
one that does nothing shows. Tokens that were continued are trained on under right log-probs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from node.config import RunConfig, load_config
from node.interfaces.engine import Outcome, Recorded, Request, Sampling
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.methods.generation import Branching
from node.methods.hints import Nudges
from node.methods.quality_head import DIRECTIONS, QualityHead
from node.run.sapo import _shareable
from node.stages import generate, trees
from node.stages.stage import RECORD_CHARS_MAX, Stage, Wanted
from node.verify.held_out import Assignment
from node.verify.task_choice import TaskChoice
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason, Task
from tests import support
from tests.unit.stages_support import Played, config_of, play
from tests.unit.test_sapo import RUN, PacedTrainer
from tests.unit.test_sapo import model as model

COMMON = RunConfig.model_validate(
    {**RUN.model_dump(exclude={"answer"}), "common": {"share": 1.0, "tasks": 4}}
)  # the same four tasks again and again
ERROR_MAX = 1e-4


class Watched(PacedTrainer):
    """The real trainer and engine. Keeps what it was asked for and given."""

    def __init__(self, model: Path) -> None:
        super().__init__(model, seconds=0.0)
        self.calls: list[tuple[Sequence[Request], float]] = []  # and the noise
        self.sampled = 0  # tokens
        self.scored: list[list[list[tuple[float, ...]]]] = []  # of each batch, before the update

    @property
    def requests(self) -> list[Request]:
        return [each for requests, _ in self.calls for each in requests]

    async def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, noise: float = 0.0
    ) -> list[Outcome]:
        self.calls.append((requests, noise))
        found = await super().sample(requests, sampling, seed, noise)
        for asked, got in zip(requests, found, strict=True):
            self.sampled += sum(len(c.token_ids) - len(asked.beginning) for c in got.completions)
        return found

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self.scored.append(await self.score(groups))
        return await super().train(groups)

    @property
    def trained(self) -> list[TrainingGroup]:
        return [group for batch in self.batches for group in batch]

    def errors(self) -> list[float]:
        """The largest difference of recorded log-probs from the trainer's own, by batch."""
        return [
            max(
                abs(said - own)
                for group, columns in zip(batch, scored, strict=True)
                for made, column in zip(group.completions, columns, strict=True)
                for said, own in zip(made.logprobs, column, strict=False)
            )
            for batch, scored in zip(self.batches, self.scored, strict=True)
        ]


def rounds_of(
    model: Path, chain: str, rounds: int = 5, resume_after: int = 0
) -> tuple[Played, Watched]:
    policy = Watched(model)
    config = config_of(COMMON, generate=chain)
    return play(config, cast("Any", policy), rounds, resume_after), policy


# --- the effect of each method, from what was asked and trained on alone --------------------------


def noise_by_stages(played: Played, policy: Watched) -> bool:
    """By hand: without, then 0.1, 0.01, 0.001; the groups have the noisy policy's log-probs."""
    wanted = (0.0, 0.1, 0.01, 0.001, 0.001)
    assert all(_shareable(each, COMMON) for each in played.outcomes[-1].own)
    noisy = [error > ERROR_MAX for error in policy.errors()]
    return noisy == [False] + 4 * [True] and [n for _, n in policy.calls] == pytest.approx(wanted)


def pruned_ones_are_gone_and_the_others_count_for_them(played: Played, policy: Watched) -> bool:
    weights = [weight for group in policy.trained for weight in group.weights]
    fewer = [len(group.completions) < 4 for group in policy.trained]
    begun = [each for each in policy.requests if each.beginning]
    assert max(policy.errors()) < ERROR_MAX
    assert not any(_shareable(each, COMMON) for each in played.outcomes[0].own if each.weights)
    ids = [c.token_ids for group in policy.trained for c in group.completions]
    went_on = all(any(e.beginning == row[: len(e.beginning)] for row in ids) for e in begun)
    return any(fewer) and any(weight > 1.0 for weight in weights) and bool(begun) and went_on


def branches_part_by_the_second_token(played: Played, policy: Watched) -> bool:
    """A branch has its parent's tokens, then the second likeliest, and is not shared."""
    assert max(policy.errors()) < ERROR_MAX
    assert all(len(each.completions) == 4 for each in policy.trained)
    found = 0
    for outcome in played.outcomes:
        for group in outcome.own:
            made = group.scored.group.completions
            branches = [each for each in made if each.splices]
            assert (_shareable(group, COMMON) is None) is bool(branches)
            found += sum(
                any(
                    other.token_ids[: at - 1] == each.token_ids[: at - 1]
                    and other.token_ids[at - 1 : at] != each.token_ids[at - 1 : at]
                    for other in made
                )
                for each in branches
                for at in each.splices
            )
    return found == played.acted("branching") > 0


def shortened_prompts_teach_the_whole_one(played: Played, policy: Watched) -> bool:
    whole = {each.prompt for each in policy.calls[0][0]}
    short = {each.prompt for each in policy.requests} - whole
    cut = {text[:at] + text[at + 1 :] for text in whole for at in range(len(text))}
    mixed = [group for group in policy.trained if group.weights]
    assert all(set(group.weights) == {0.5} for group in mixed)
    assert all(len(group.completions) == 4 for group in policy.trained)
    only_whole = {group.prompt for group in policy.trained} == whole
    return only_whole and bool(mixed) and bool(short) and short <= cut


def nudged_prompts_teach_the_bare_one(played: Played, policy: Watched) -> bool:
    texts = Nudges().texts
    nudged = [each for each in policy.trained if each.prompt.endswith(texts)]
    distilled = [each for each in policy.trained if each.weights]
    assert all(set(each.weights) == {0.1} for each in distilled)
    assert not any(c.logprobs for each in distilled for c in each.completions)
    assert all(sum(each.n for each in call) == 16 for call, _ in policy.calls)
    for group in played.outcomes[0].own:
        assert len(group.scored.rewards) == 4
        for place, context in enumerate(group.scored.contexts):
            assert bool(context) == (group.prompt_of(place) != group.scored.prompt)
            assert group.prompt_of(place).endswith(context)
    texts_of = [
        sorted(c.text for each in some for c in each.completions) for some in (nudged, distilled)
    ]
    return bool(nudged) and texts_of[0] == texts_of[1]


def drafts_are_kept(played: Played, policy: Watched) -> bool:
    return sum(each.kept_tokens for each in played.rounds) > 0


NUMBER = "noise, steps=4, stages=4, sigma_first=0.1, sigma_last=0.001"
ACTS: dict[str, tuple[str, type[Stage[Any]], tuple[str, ...], Callable[..., bool]]] = {
    "noise": (NUMBER, generate.AddNoise, ("generate",), noise_by_stages),
    "pruning": (
        "pruning, uniform_steps=0",
        trees.PruneRollouts,
        ("generate",),
        pruned_ones_are_gone_and_the_others_count_for_them,
    ),
    "branching": (
        "branching",
        trees.GrowTrees,
        ("generate",),
        branches_part_by_the_second_token,
    ),
    "purify": (
        "purify, success_min=1",
        generate.PurifyPrompts,
        ("generate", "more", "select"),
        shortened_prompts_teach_the_whole_one,
    ),
    "nudges": (
        "nudges",
        generate.Nudge,
        ("plan", "weigh"),
        nudged_prompts_teach_the_bare_one,
    ),
    "speculative": ("speculative", generate.Redraft, ("generate", "learn"), drafts_are_kept),
}


@pytest.mark.parametrize("kind", ACTS)
def test_a_method_acts_in_the_loop_and_one_that_does_nothing_shows(
    model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, stage, hooks, has_effect = ACTS[kind]
    played, policy = rounds_of(model, chain)
    assert played.acted(kind) > 0
    assert has_effect(played, policy)
    if kind != "speculative":
        assert sum(each.generated_tokens for each in played.rounds) == policy.sampled
    for hook in hooks:  # each of them is needed
        with monkeypatch.context() as planted:
            planted.setattr(stage, hook, getattr(Stage, hook))
            idle, watched = rounds_of(model, chain)
            assert idle.acted(kind) < played.acted(kind) or hook == "weigh"
            assert not has_effect(idle, watched)


def test_tasks_are_not_judged_by_rollouts_that_were_chosen(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[Task, Sequence[float]]] = []
    monkeypatch.setattr(TaskChoice, "learn", lambda _, results: judged.extend(results))
    played, _ = rounds_of(model, "branching", 2)
    own = [each for outcome in played.outcomes for each in outcome.own]
    assert {each.private for each in own} == {True, False}
    assert judged == [
        (each.scored.group.task, each.scored.rewards) for each in own if not each.private
    ]


@pytest.mark.parametrize("kind", ["pruning", "purify"])
def test_a_method_goes_on_from_a_checkpoint_as_if_there_had_been_none(
    model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, stage, *_ = ACTS[kind]

    def batches(resume_after: int) -> list[list[TrainingGroup]]:
        return rounds_of(model, chain, 4, resume_after)[1].batches

    through = batches(0)
    assert batches(2) == through
    monkeypatch.setattr(stage, "to_record", Stage.to_record)
    assert batches(2) != through


@pytest.mark.parametrize("other", [{"filter": "extremes, steps=2"}, {"reward": "distribution"}])
def test_trees_and_plain_rollouts_both_have_what_another_method_records(
    model: Path, other: dict[str, str]
) -> None:
    config = config_of(COMMON, generate="branching", **other)
    played = play(config, cast("Any", Watched(model)), 3)
    own = [each for outcome in played.outcomes for each in outcome.own]
    assert any(each.private for each in own)
    for each in own:
        made, told = each.scored.group.completions, each.recorded
        assert [len(one.entropies) for one in told] == [len(one.token_ids) for one in made]


def test_drafts_of_further_tasks_have_a_seed_of_their_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    redraft = Watched.redraft

    async def watched(self: Watched, *given: Any) -> list[Completion]:
        seeds.append(given[-1])
        return await redraft(self, *given)

    monkeypatch.setattr(Watched, "redraft", watched)
    chains = {"generate": "speculative", "filter": "dynamic_sampling"}
    config = config_of(COMMON, group_size=2, **chains)
    played = play(config, cast("Any", Watched(model)), 3)
    assert played.acted("dynamic_sampling") > 0
    assert len(set(seeds)) == len(seeds) > 3


def test_a_second_token_with_another_log_prob_would_show(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "log", lambda _: -1.0)
    _, policy = rounds_of(model, "branching")
    assert max(policy.errors()) > ERROR_MAX


def test_two_methods_that_sample_are_refused_and_so_are_engines_without() -> None:
    given = {"generate": "pruning, branching"}
    with pytest.raises(ConfigError, match="pruning and branching both decide how tokens"):
        load_config(given, {})
    for kind in ("pruning", "branching", "noise"):
        with pytest.raises(ConfigError, match="engine vllm: has no"):
            load_config({"generate": kind, "engine": "vllm"}, {})
    assert load_config({"generate": "nudges, noise"}, {}).generate


# --- trees, without a policy ----------------------------------------------------------------------

LIMIT = 60


def completion(ids: Sequence[int], points: Sequence[int]) -> tuple[Completion, Recorded]:
    """Of tokens that are all sure but for those at `points`, where 1000 + place is second."""
    made = Completion("", tuple(ids), (-1.0,) * len(ids), FinishReason.LENGTH, 1)
    rows = [(1_000 + at, 0.4, 0.35) if at in points else (7, 0.9, 0.1) for at in range(len(ids))]
    return made, Recorded(runners_up=tuple(rows))


def test_a_branch_that_says_what_its_parent_says_is_cut_after_a_look_ahead() -> None:
    """At 5 the branch goes on as the trunk does, at 20 otherwise, and at 59 it ends at once."""
    asked: list[Request] = []

    async def sample(wanted: Sequence[Wanted], noise: float = 0.0) -> list[Outcome]:
        found = []
        for its in wanted:
            asked.append(its.request)
            begun, limit = its.request.beginning, its.request.settings(at.sampling).max_new_tokens
            shift = 500 if len(begun) > 20 else 0
            rest = [place + shift for place in range(len(begun), limit)]
            made = completion([*begun, *rest], (5, 20, 59))
            count = its.request.n
            found.append(Outcome((made[0],) * count, (made[1],) * count))
        return found

    at = cast("Any", type("At", (), {"sampling": Sampling(max_new_tokens=LIMIT), "step": 0}))
    wanted = Wanted(Assignment(cast("Any", None), "?"), Request("?", 6))
    stage = trees.GrowTrees(Branching(leaves_max=4))

    async def grown() -> list[Outcome]:
        return await stage.generate([wanted], at, sample)

    [outcome] = support.run(grown)
    parted = [each.splices for each in outcome.completions]
    # trees of 4 and 2 leaves; of the second one the branch at 5 was cut, and the next one has room
    assert parted == [(), (21,), (60,), (60,), (), (21,)]
    assert stage.acted == 4
    assert outcome.private
    assert len(outcome.recorded) == len(outcome.completions)
    tried = [(len(each.beginning), each.limit) for each in asked if each.beginning]
    assert (6, 55) in tried  # 50 tokens after they parted, the longest look ahead
    assert (21, LIMIT) in tried
    assert not [each for each in tried if each[0] == 55]  # no cut branch went on
    told = next(each for each in asked if len(each.beginning) == 21)
    assert told.beginning[-1] == 1_020
    assert told.beginning_logprobs[-1] == pytest.approx(-1.0498221)  # ln 0.35


# --- the quality head -----------------------------------------------------------------------------


def test_the_head_learns_whom_to_believe_and_its_record_is_small() -> None:
    rng = Random(1)

    def states(count: int, width: int) -> tuple[list[list[float]], list[bool]]:
        rows = [[rng.gauss(0, 1) for _ in range(width)] for _ in range(count)]
        return rows, [row[0] + row[1] > 0 for row in rows]

    head = QualityHead()
    assert set(head.chances(states(3, 32)[0])) == {0.0}
    for _ in range(20):
        rows, right = states(64, 32)
        head.learn(rows, right, [1.0] * 64)
    rows, right = states(500, 32)
    found = [(chance > 0.5) is told for chance, told in zip(head.chances(rows), right, strict=True)]
    assert sum(found) > 450
    record = json.dumps(head.to_record())
    assert len(record) < RECORD_CHARS_MAX / 10
    again = QualityHead()
    again.restore(json.loads(record))
    assert again.chances(rows) == head.chances(rows)
    with pytest.raises(ValueError, match="no record"):
        again.restore([[[1.0]], [1.0]])
    assert DIRECTIONS == 64


def test_a_completion_with_a_weight_counts_as_often_in_the_head() -> None:
    one, twice = QualityHead(), QualityHead()
    rows = [[1.0, 0.0], [0.0, 1.0]]
    one.learn(rows, [True, False], [2.0, 1.0])
    twice.learn([rows[0], *rows], [True, True, False], [1.0] * 3)
    assert one.chances(rows) == pytest.approx(twice.chances(rows))
    assert one.chances(rows)[0] > 0.5 > one.chances(rows)[1]
