"""How many of others' groups a node draws where that follows from what they brought."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from statistics import fmean

import pytest

from node.config import NodeConfig, load_config
from node.engines.scripted import ScriptedPolicy
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.methods.task_control import (
    AdaptiveExternal,
    ExternalGains,
    evaluated,
    groups_of,
    no_gains,
)
from node.run.progress import Progress
from node.run.validation import Validated, decide
from node.stages.control import AdaptForeignGroups
from node.stages.stage import Stages
from swarm.errors import ConfigError
from tests.unit.simulated_pair import rounds_beside
from tests.unit.tasks_support import make_run

THREE = AdaptiveExternal(levels=2)
TWO = AdaptiveExternal(levels=1)
RUN = make_run({"name": "scripted_sum", "parameters": {"max": 5_000}})


def test_an_arm_is_a_share_of_what_is_wanted() -> None:
    assert groups_of(no_gains(THREE), 5, THREE) == 5  # before the first evaluation
    tried = [groups_of(ExternalGains((0,) * 3, (0,) * 3, arm), 5, THREE) for arm in range(3)]
    assert tried == [0, 3, 5]
    other = ExternalGains((0,) * 9, (0,) * 9, 8)  # of a node that was started with other levels
    assert [groups_of(other, 5, each) for each in (TWO, THREE)] == [5, 5]


def test_the_arm_that_was_tried_gets_what_it_brought() -> None:
    rng = Random(1)
    begun = evaluated(ExternalGains(), None, rng, THREE)
    assert begun.arm is not None
    assert sum(begun.trials) == 0
    then = evaluated(begun, 0.04, rng, THREE)
    assert (then.trials[begun.arm], then.sums[begun.arm]) == (1.0, 0.04)
    assert sum(then.trials) == 1.0
    assert then.arm != begun.arm  # the others were never tried
    # set to other levels in the meantime: what was known is of other arms
    other = evaluated(then, 0.04, rng, AdaptiveExternal(levels=4))
    assert other.trials == (0.0,) * 5


def test_a_checkpoint_keeps_it() -> None:
    before, after = AdaptForeignGroups(TWO), AdaptForeignGroups(TWO)
    before.gains = ExternalGains((1.0, 0.0, 0.5), (0.1, 0.0, 0.0), 2)
    progress = Progress(methods=Stages([before]).to_record())
    saved = Progress.from_json(json.loads(json.dumps(asdict(progress))))
    Stages([after]).restore(saved.methods)
    assert after.gains == before.gains


def test_who_went_back_begins_where_the_best_was() -> None:
    best = Validated(best=0.8, best_tasks=64, best_round=10, last=0.3, falls=1)
    act, validated = decide(best, 0.3, 64, 30)
    assert (act, validated.went_back) == ("return", True)
    act, validated = decide(validated, 0.7, 64, 40)
    assert (act, validated.went_back) == ("none", False)


# --- on nodes --------------------------------------------------------------------------------


class Taught(ScriptedPolicy):
    """Gets better by so much with each update with groups of others, and worse without."""

    def __init__(self, by_others: float) -> None:
        super().__init__(generate_s=0.1)
        self.skill, self.by_others = 0.5, by_others

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        has_foreign = any(not each.own_tokens for each in groups)
        changed = self.skill + (self.by_others if has_foreign else -self.by_others)
        self.skill = min(0.9, max(0.1, changed))
        return await super().train(groups)


def wanted_in_the_end(by_others: float, rule: AdaptiveExternal | None) -> float:
    """J of the first of two nodes, mean over the later half of its rounds."""
    config = NodeConfig(
        run=RUN, local_groups=4, external_groups=4, group_size=4, rounds=50, external_rule=rule,
        evaluate_every_rounds=1, validation_tasks=200, returns_to_best=False,
    )  # fmt: skip
    other = config.model_copy(update={"external_rule": None})
    found = rounds_beside(config, Taught(by_others), other, ScriptedPolicy(generate_s=0.1))
    later = found[len(found) // 2 :]
    assert all(each.external_groups <= (each.external_wanted or 0) for each in later)
    assert len({each.external_wanted for each in found}) == (1 if rule is None else 2)
    return fmean(each.external_wanted or 0 for each in later)


@pytest.mark.slow
def test_a_node_draws_what_helps_and_leaves_what_harms() -> None:
    assert wanted_in_the_end(0.04, None) == 4.0
    helped, harmed = wanted_in_the_end(0.04, TWO), wanted_in_the_end(-0.04, TWO)
    assert harmed < 1.7 < 2.3 < helped


def test_what_nothing_would_tell_is_refused(tmp_path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('name = "r"\n[[environments]]\nname = "scripted_sum"\n')
    given = {"external_rule": "adaptive_external, levels=4"}
    assert load_config(given, {}, run).external_rule == AdaptiveExternal(levels=4)
    for field in ("validation_tasks", "evaluate_every_rounds"):
        with pytest.raises(ConfigError, match="tells nothing to adaptive_external"):
            load_config({**given, field: "0"}, {}, run)
    with pytest.raises(ConfigError, match="fetches nothing for adaptive_external"):
        load_config({**given, "external_groups": "0"}, {}, run)
