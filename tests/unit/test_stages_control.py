"""Methods of control in a round: each acts, what it does is what its formula says, and it goes on
after a restart as if there had been none."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from node.config import load_config
from node.interfaces.engine import Request
from node.stages.control import measured
from node.stages.stage import BatchGroup, RoundOutcome, Stage, Wanted
from node.stages.table import stages_of
from node.verify.held_out import Assignment
from swarm.errors import ConfigError
from tests.unit.stages_support import (
    ONE_KIND,
    Played,
    Student,
    config_of,
    family_of,
    is_small,
    play,
)
from tests.unit.test_learner_batch import of_size, view


def questions(played: Played, number: int) -> list[str]:
    """Of the round's own groups."""
    return [each.scored.prompt for each in played.outcomes[number].own]


def rewards(played: Played, number: int) -> list[tuple[float, ...]]:
    return [each.scored.rewards for each in played.outcomes[number].own]


def sizes(played: Played, number: int) -> list[int]:
    return [len(each.completions) for each in played.policy.batches[number]]


# --- the effect of each method, found from what was asked and trained on alone ------------------


def halves_by_competence(played: Played) -> bool:
    """Small sums are always solved and large ones never, so the policy is between the two. A task
    whose question is held out is replaced alone, by a hard one."""
    asked = [sum(map(is_small, questions(played, n))) for n in range(2, len(played.rounds))]
    return sum(abs(each - 2) for each in asked) <= 2


def more_of_hard(played: Played) -> bool:
    """By hand, of four: none right 27 / 5 - 4 -> 6 more; one right (2 - 1.5) / 0.375 -> 2 more."""
    more = {0: 6, 1: 2}
    wanted = [
        [4 + more.get(int(sum(each[:4])), 0) for each in rewards(played, n)]
        for n in range(len(played.rounds))
    ]
    found = [sizes(played, n) for n in range(len(played.rounds))]
    return found == wanted and max(map(max, found)) > 4


def widths_by_pass_rate(played: Played) -> bool:
    """Of one environment, so that all tasks have one pass rate."""
    right, tries = sum(map(sum, rewards(played, 0))), 16
    p = (right + 1) / (tries + 2)
    told = next(n for n in range(4, 513) if 1 - p**n - (1 - p) ** n >= 0.9)
    return sizes(played, 0) == [4] * 4 and sizes(played, 1) == [told] * 4 and told > 4


def budget_in_phases(played: Played) -> bool:
    """Two of each at first, then the other eight as 3, 3 and 2; a group that varies has more than
    one that does not."""
    calls = [[each.n for each in call] for call in played.policy.asked]
    by_round = [calls[at : at + 4] for at in range(0, len(calls), 4)]
    varied = [
        (len(each), len(set(each[:2])) > 1)
        for n in range(len(played.rounds))
        for each in rewards(played, n)
    ]
    mean = {told: fmean(size for size, is_so in varied if is_so is told) for told in (True, False)}
    return (
        all([sum(call) for call in each] == [8, 3, 3, 2] for each in by_round)
        and all(each[0] == [2] * 4 for each in by_round)
        and mean[True] > mean[False]
    )


def lengths_swing(played: Played) -> bool:
    limits = [call[0].limit for call in played.policy.asked]
    longest = [
        max(len(c.token_ids) for each in batch for c in each.completions)
        for batch in played.policy.batches
    ]
    return limits == [None, 2, None, 2] and longest[1] == longest[3] == 2 < longest[0]


def spends_by_signal(played: Played) -> bool:
    """Nothing is learned of small sums, which are always solved; weights even that out."""
    last = played.policy.batches[-1]
    small = [is_small(each.prompt) for each in last]
    counts = [len(each.completions) for each in last]
    weights = [weight for each in last for weight in each.weights]
    if not weights or len(set(small)) < 2:
        return False
    most = max(n for n, is_so in zip(counts, small, strict=True) if is_so)
    least = min(n for n, is_so in zip(counts, small, strict=True) if not is_so)
    mean = fmean(counts)
    inverse = [1 / min(1.0, n / mean) for n in counts for _ in range(n)]
    right = [each / fmean(inverse) for each in inverse]
    return most < least and weights == pytest.approx(right)


def only_halves(played: Played) -> bool:
    """Of four completions one right one has a score of 0.75, and two have 1."""
    found = [each.scored.rewards for o in played.outcomes for each in o.batch]
    return bool(found) and all(sum(each) == 2 for each in found)


Effect = Callable[[Played], bool]
BIG: dict[str, Any] = {"group_size": 8, "local_groups": 6}
CASES: dict[str, tuple[str, dict[str, Any], tuple[float, float], int, tuple[str, ...], Effect]] = {
    "cdas": ("cdas", {}, (1.0, 0.0), 10, ("choose", "learn"), halves_by_competence),
    "dars": ("dars", {}, (0.3, 0.3), 3, ("more",), more_of_hard),
    "brorl": ("brorl", {"run": ONE_KIND}, (0.1, 0.1), 2, ("plan",), widths_by_pass_rate),
    "xrpo_allocation": (
        "xrpo_allocation", {}, (0.5, 0.5), 8, ("plan", "more"), budget_in_phases
    ),
    "length_schedule": (
        "length_schedule, tokens_min=2, period_steps=2, cycles=9",
        {"run": ONE_KIND}, (0.5, 0.5), 4, ("generate",), lengths_swing,
    ),
    "duet": ("duet, budget_share=0.6", BIG, (1.0, 0.5), 6, ("plan", "weigh"), spends_by_signal),
    "variance_curriculum": (
        "variance_curriculum, score_first=0.8", {}, (0.5, 0.5), 4, ("select",), only_halves
    ),
}  # fmt: skip


def played_with(kind: str, resume_after: int = 0) -> Played:
    text, settings, (small, large), rounds, _, _ = CASES[kind]
    config = config_of(control=text, **settings)
    return play(config, Student(small, large), rounds, resume_after)


@pytest.mark.parametrize("kind", CASES)
def test_it_acts_as_its_formula_says(kind: str) -> None:
    played = played_with(kind)
    assert played.acted(kind) > 0
    assert CASES[kind][-1](played)


@pytest.mark.parametrize(("kind", "hook"), [(k, hook) for k in CASES for hook in CASES[k][4]])
def test_without_what_it_does_its_effect_is_absent(
    kind: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [stage] = stages_of(config_of(control=CASES[kind][0])).methods
    monkeypatch.setattr(type(stage), hook, getattr(Stage, hook))
    assert not CASES[kind][-1](played_with(kind))


@pytest.mark.parametrize("kind", CASES)
def test_after_a_restart_it_decides_as_it_would_have(kind: str) -> None:
    whole, again = played_with(kind), played_with(kind, resume_after=CASES[kind][3] - 1)
    assert again.policy.asked == whole.policy.asked
    assert again.policy.batches == whole.policy.batches


@pytest.mark.parametrize("kind", ["cdas", "duet"])
def test_what_it_learned_is_needed_for_that(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [stage] = stages_of(config_of(control=CASES[kind][0])).methods
    monkeypatch.setattr(type(stage), "restore", Stage.restore)
    again = played_with(kind, resume_after=CASES[kind][3] - 1)
    assert again.policy.asked != played_with(kind).policy.asked


@pytest.mark.parametrize("kind", ["cdas", "duet", "brorl"])
@pytest.mark.parametrize("record", ["none", 7, [1], [[[1]]], {"competence": "much"}])
def test_a_record_of_another_version_ends_the_start_with_one_line(kind: str, record: Any) -> None:
    stages = stages_of(config_of(control=CASES[kind][0]))
    with pytest.raises(ConfigError, match=f"record of {kind} is not of this version.*a round with"):
        stages.restore({kind: record})
    stages.restore({"another": record})


def test_a_group_of_one_says_nothing_of_a_spread() -> None:
    played = play(config_of(), Student(), 1)
    own = [each.only([0]) if at == 0 else each for at, each in enumerate(played.outcomes[0].own)]
    at, four = (
        replace(view("t"), role="node"),
        [Wanted(Assignment(t.scored.group.task, "p"), Request("p", 4)) for t in own],
    )
    [stage] = stages_of(config_of(control="xrpo_allocation")).methods
    assert [each.request.n for each in stage.plan(four, at)] == [2] * 4
    more = stage.more(own, at).wanted
    assert sum(each.request.n for each in more) == 3
    assert own[0].scored.group.task not in [each.assigned.task for each in more]


@pytest.mark.parametrize("text", ["xrpo_allocation", "dynamic_sampling, rounds_max=2"])
def test_an_abandoned_round_leaves_nothing_to_the_one_that_repeats_it(text: str) -> None:
    own = play(config_of(), Student(0.1), 1).outcomes[0].own
    at = replace(view("t"), role="node", config=config_of(**{family_of(text.split(",")[0]): text}))
    stages = stages_of(at.config)

    def asked() -> Any:
        wanted = [Wanted(each.assigned, Request("p", 4)) for each in own]
        planned = stages.plan(wanted, at)
        return list(planned), [stages.more(own, at) for _ in range(3)]

    first = asked()
    stages.begin()
    assert asked() == first
    assert asked() != first


# --- together -----------------------------------------------------------------------------------


def test_what_is_asked_for_later_has_the_schedules_limit_too() -> None:
    text = "dars, length_schedule, tokens_min=2, period_steps=2, cycles=9"
    played = play(config_of(ONE_KIND, control=text), Student(0.1), 2)
    assert len(played.policy.asked) == 4
    assert [[each.limit for each in call] for call in played.policy.asked[2:]] == [
        [2] * len(call) for call in played.policy.asked[2:]
    ]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"control": "cdas, vade"}, "cdas and vade both decide the choice of tasks"),
        ({"control": "dars, brorl"}, "dars and brorl both decide the number of completions"),
        ({"control": "xrpo_allocation, duet"}, "both decide the number of completions"),
        ({"control": "length_schedule, duet"}, "both decide the length of completions"),
        ({"control": "brorl, rollouts_min=9, rollouts_max=8"}, "rollouts_min 9: over 8"),
        ({"control": "duet, tokens_min=9, tokens_max=8"}, "duet: Value error, bounds"),
        ({"control": "length_schedule", "engine": "scripted"}, "has no requests"),
    ],
)
def test_what_makes_no_sense_together_is_refused_by_name(
    settings: dict[str, str], why: str, tmp_path: Any
) -> None:
    run = tmp_path / "run.toml"
    run.write_text('name = "r"\n[common]\nshare = 0.5\n[[environments]]\nname = "scripted_sum"\n')
    with pytest.raises(ConfigError, match=why):
        load_config(settings, {}, run)


# --- learners -----------------------------------------------------------------------------------


def test_a_learners_leases_have_the_schedules_limit_and_the_width_of_the_pass_rate() -> None:
    at = view("t")
    text = "brorl, length_schedule, tokens_min=2, period_steps=2"
    stages = stages_of(at.config.model_copy(update={"control": config_of(control=text).control}))
    assert stages.lease(8, 64, at) == (8, 64)  # nothing is known yet, and the first step is long
    hard = of_size(1, 8)
    hard = replace(hard, rewards=(1.0, *(0.0,) * 7))
    nothing: Any = None
    stages.learn(RoundOutcome([BatchGroup(hard)], [], [], nothing, 0), at)
    p = 2 / 10
    told = next(n for n in range(8, 513) if 1 - p**n - (1 - p) ** n >= 0.9)
    second = replace(at, number=2)
    assert stages.lease(8, 64, second) == (told, 2)
    assert stages.acted == {"brorl": 1, "length_schedule": 1}
    again = stages_of(at.config.model_copy(update={"control": config_of(control=text).control}))
    again.restore(stages.to_record())
    assert again.lease(8, 64, second) == (told, 2)


def test_only_plain_samples_of_the_policy_say_how_able_it_is() -> None:
    bare = BatchGroup(of_size(0, 4))
    others = [replace(bare, private=True), replace(bare, drawn=True), replace(bare, prompts=("p",))]
    others.append(replace(bare, scored=replace(bare.scored, decided=False)))
    assert measured([bare, *others]) == [bare]
