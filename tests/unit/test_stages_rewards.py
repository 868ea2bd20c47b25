"""Methods of rewards and advantages in a round: each acts, what is trained on is what its formula
says, and it goes on after a restart as if there had been none."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import pytest
import trio

from node.interfaces.trainer import TrainingGroup
from node.methods.advantages import Hacpo, grpo_advantages
from node.methods.groups import Advantages
from node.observe.records import RoundDone
from node.stages.advantage import MeasureByCapability
from node.stages.stage import BatchGroup, Stage, View
from tests.unit.simulated_pair import rounds_beside
from tests.unit.test_learner_batch import of_size, view
from tests.unit.test_rescue import CONFIG, Kept

# --- HACPO ---------------------------------------------------------------------------------------


def right(group: TrainingGroup) -> list[float]:
    """Rewards of a group's sums, found from its texts alone."""
    wanted = sum(map(int, group.prompt.removesuffix("=").split("+")))
    return [float(each.text == str(wanted)) for each in group.completions]


def beside_another(**settings: Any) -> tuple[list[RoundDone], list[list[TrainingGroup]]]:
    """A node that solves a third, beside one that solves most."""
    config = CONFIG.model_copy(update={"external_groups": 4, **settings})
    policy = Kept(0.3)
    rounds = rounds_beside(config, policy, CONFIG, Kept(0.8))
    return rounds, policy.batches


def by_capability(batches: Sequence[Sequence[TrainingGroup]], kept: int = 5) -> list[bool]:
    """For each task that both tried: whether its advantages are HACPO's."""
    lately = defaultdict[str, list[float]](list)
    found = []
    for batch in batches:
        rewards = {id(each): right(each) for each in batch}
        told = defaultdict[str, list[float]](list)
        tasks = defaultdict[str, list[TrainingGroup]](list)
        for each in batch:
            told[each.source] += rewards[id(each)]
            tasks[each.prompt].append(each)
        for source, values in told.items():
            lately[source].append(fmean(values))
        able = {source: max(fmean(means[-kept:]), 1e-8) for source, means in lately.items()}
        for groups in tasks.values():
            every = [r for each in groups for r in rewards[id(each)]]
            if len({each.source for each in groups}) < 2 or len(set(every)) < 2:
                continue
            lead = {s: min(max(able[""] / able[s], 0.1), 10.0) for s in able}
            mu = fmean(lead[each.source] * r for each in groups for r in rewards[id(each)])
            if mu > 1:
                mu = fmean(r for each in groups if not each.source for r in rewards[id(each)])
            wanted = [
                (r - mu) / (stdev(every) + 1e-6) / lead[each.source]
                for each in groups
                for r in rewards[id(each)]
            ]
            told_to = [value for each in groups for value in each.advantages]
            found.append(told_to == pytest.approx(wanted))
    return found


HACPO: dict[str, Any] = {"advantage": Hacpo()}


def test_common_tasks_are_measured_by_how_able_who_tried_them_is() -> None:
    rounds, batches = beside_another(**HACPO)
    assert sum(each.acted.get("hacpo", 0) for each in rounds) > 0
    found = by_capability(batches)
    assert len(found) > 5
    assert all(found)


async def _grpo(_: object, batch: Sequence[BatchGroup], at: View) -> Advantages:
    return [grpo_advantages(each.scored.rewards) for each in batch]


@pytest.mark.parametrize(("hook", "planted"), [("reward", Stage.reward), ("advantage", _grpo)])
def test_without_what_hacpo_does_its_effect_is_absent(
    hook: str, planted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeasureByCapability, hook, planted)
    _, batches = beside_another(**HACPO)
    assert not all(by_capability(batches))


def test_what_is_known_of_peers_outlives_a_restart_and_has_a_bound() -> None:
    at = view("t")
    stage, again = MeasureByCapability(Hacpo(rounds=2)), MeasureByCapability(Hacpo(rounds=2))
    both = [BatchGroup(of_size(1, 5)), BatchGroup(of_size(1, 3), drawn=True)]
    for _ in range(3):
        stage.reward(both, at)
    again.restore(json.loads(json.dumps(stage.to_record())))
    assert again.to_record() == stage.to_record()
    assert [len(means) for _, means in stage.to_record()] == [2, 2]
    more = [BatchGroup(of_size(2, 4), drawn=True)]
    found = [trio.run(each.advantage, more, at) for each in (stage, again)]
    assert found[0] == found[1] != trio.run(MeasureByCapability(Hacpo()).advantage, more, at)
