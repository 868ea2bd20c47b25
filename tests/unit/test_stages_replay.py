"""Replay in a round: successes of the past or of others that join own groups."""

from collections.abc import Callable
from typing import Any

import pytest

from node.config import RunConfig
from node.interfaces.trainer import TrainingGroup
from node.methods.replay import Distil, PoolOfSuccesses, distil_weight
from node.observe.records import RoundDone
from node.stages.replaying import DistilSuccesses, InjectSuccesses
from node.stages.stage import Stage
from node.stages.table import stages_of
from swarm.rollouts import Completion, FinishReason
from tests.unit.simulated_pair import rounds_beside
from tests.unit.stages_support import Played, Student, config_of, play
from tests.unit.test_rescue import CONFIG, Kept, lives

AGAIN = RunConfig.model_validate(
    {
        "name": "again",
        "environments": [{"name": "scripted_sum", "parameters": {"max": 9}}],
        "sampling": {"max_new_tokens": 4},
        "held_out": {"tasks": 2},
        "common": {"tasks": 6, "share": 1.0},
    }
)
ROUNDS = 12


def rights(group: TrainingGroup) -> list[bool]:
    wanted = sum(map(int, group.prompt.removesuffix("=").split("+")))
    return [each.text == str(wanted) for each in group.completions]


def joined(played: Played) -> list[tuple[int, int, bool]]:
    """Of each group: how many of the first four are right, how many more joined, and whether all of
    those are right ones that this node made in an earlier round, with their log-probs."""
    made = dict[str, set[tuple[str, tuple[float, ...]]]]()
    found = []
    for batch in played.policy.batches:
        for group in batch:
            before, more = made.get(group.prompt, set()), group.completions[4:]
            sound = all(
                is_right and (each.text, each.logprobs) in before
                for each, is_right in zip(more, rights(group)[4:], strict=True)
            )
            found.append((sum(rights(group)[:4]), len(more), sound))
        for group in batch:
            of_task = made.setdefault(group.prompt, set())
            of_task |= {(each.text, each.logprobs) for each in group.completions[:4]}
    return found


def injects(played: Played) -> bool:
    """One success joins where there is none."""
    found = joined(played)
    counts = {more for right, more, _ in found if not right}
    return counts == {0, 1} and all(sound and (not more or not n) for n, more, sound in found)


def replays(played: Played) -> bool:
    """One joins where at most one of four is right: a sum has one right text, kept once."""
    found = joined(played)
    counts = {(right, more) for right, more, _ in found if more}
    return counts == {(0, 1), (1, 1)} and all(sound for *_, sound in found)


CASES: dict[str, Callable[[Played], bool]] = {
    "pool_of_successes": injects,
    "replayed_successes": replays,
}


def played_with(kind: str, resume_after: int = 0) -> Played:
    return play(config_of(AGAIN, replay=kind), Student(0.25), ROUNDS, resume_after)


@pytest.mark.parametrize("kind", CASES)
def test_own_successes_of_before_join_where_they_are_rare(kind: str) -> None:
    played = played_with(kind)
    assert played.acted(kind) == sum(more for _, more, _ in joined(played)) > 0
    assert CASES[kind](played)


@pytest.mark.parametrize("hook", ["replay", "learn"])
@pytest.mark.parametrize("kind", CASES)
def test_without_what_it_does_its_effect_is_absent(
    kind: str, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [stage] = stages_of(config_of(AGAIN, replay=kind)).methods
    monkeypatch.setattr(type(stage), hook, getattr(Stage, hook))
    assert not CASES[kind](played_with(kind))


def said(played: Played) -> list[Any]:
    """What was trained on, with log-probs as a checkpoint rounds them."""
    return [
        (group.prompt, each.token_ids, [round(value, 5) for value in each.logprobs])
        for batch in played.policy.batches
        for group in batch
        for each in group.completions
    ]


@pytest.mark.parametrize("kind", CASES)
def test_what_is_kept_outlives_a_restart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, again = played_with(kind), played_with(kind, resume_after=ROUNDS - 4)
    assert said(again) == said(whole)
    [stage] = stages_of(config_of(AGAIN, replay=kind)).methods
    monkeypatch.setattr(type(stage), "restore", Stage.restore)
    assert said(played_with(kind, resume_after=ROUNDS - 4)) != said(whole)


def test_what_is_kept_has_a_bound() -> None:
    text = "replayed_successes, tokens_max=3"
    stages: list[Any] = []
    play(
        config_of(AGAIN, replay=text),
        Student(0.5),
        ROUNDS,
        change=lambda sapo: stages.append(sapo.stages.methods[0]),
    )
    record = stages[0].to_record()
    assert 0 < sum(len(ids) for _, kept in record for _, ids, *_ in kept) <= 3


def test_the_newest_successes_of_a_task_are_kept_each_once() -> None:
    stage = InjectSuccesses(PoolOfSuccesses(task_max=2))
    for token in (1, 2, 1, 3):
        stage._keep("x", [Completion(str(token), (token,), (-1.0,), FinishReason.STOP, 0)])
    [(name, kept)] = stage.to_record()
    assert (name, [text for text, *_ in kept]) == ("x", ["1", "3"])


# --- distil --------------------------------------------------------------------------------------

DISTIL = Distil(weight=0.4, weight_last=0.1, steps=20, successes_max=2)


def beside_an_able_one() -> tuple[list[RoundDone], list[list[TrainingGroup]]]:
    rounds, policy = lives(CONFIG.model_copy(update={"replay": (DISTIL,)}))
    return rounds, policy.batches


def test_others_successes_are_supervised_with_a_weight_that_falls() -> None:
    rounds, batches = beside_an_able_one()
    assert sum(each.acted.get("distil", 0) for each in rounds) > 0
    last = [each for each in batches[-1] if each.guided]
    assert len(last) == 2  # half of four
    for step, batch in enumerate(batches):
        for each in (group for group in batch if group.guided):
            assert each.guided_weight == pytest.approx(max(0.1, 0.4 - 0.3 * step / 20))
            assert rights(each)[-each.guided :] == [True] * each.guided
            assert each.advantages[: -each.guided] == (0.0,) * 4  # as without them: none is right
    assert distil_weight(10, DISTIL) == pytest.approx(0.25)


def test_without_it_nothing_is_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistilSuccesses, "weigh", Stage.weigh)
    _, batches = beside_an_able_one()
    assert not any(each.guided for batch in batches for each in batch)


def test_a_task_that_is_solved_often_enough_needs_no_others() -> None:
    config = CONFIG.model_copy(update={"replay": (Distil(success_max=0.5),)})
    able = Kept(1.0)
    rounds = rounds_beside(config, able, CONFIG, Kept(1.0))
    assert sum(each.acted.get("distil", 0) for each in rounds) == 0
