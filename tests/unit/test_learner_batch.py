"""What a learner trains on: leased groups, and those that it draws from the pool."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from node.config import NodeConfig
from node.config.run import LearnerRules
from node.interfaces.trainer import TrainingGroup
from node.run.learner import Learner
from node.run.parts import LivePolicy, NodeParts
from node.run.progress import Progress
from node.run.round import training_groups
from node.stages.stage import BatchGroup, Stages, View
from swarm.rollouts import ScoredGroup
from tests.pool_samples import PRODUCERS, make_group
from tests.unit.tasks_support import make_run

RULES = LearnerRules(peer=str(PRODUCERS[0].peer_id), group_size=8)


def view(tokenizer: str) -> View:
    """The first step of a learner of which nothing but its batch is asked."""
    unused: Any = None
    run = make_run().model_copy(update={"learner": RULES})
    config = NodeConfig(run=run, data_dir=Path("unused"))
    node = NodeParts(config, *[unused] * 7)
    policy = LivePolicy(unused, unused, tokenizer)

    async def begun() -> View:
        return Learner(node, policy, unused, unused, unused, Progress())._view()

    return trio.run(begun)


def of_size(index: int, completions: int) -> ScoredGroup:
    _, verified = make_group(1, index)
    [first, *_] = verified.group.completions
    group = replace(verified.group, completions=(first,) * completions)
    rewards = tuple(float(place % 2) for place in range(completions))
    return replace(verified, group=group, rewards=rewards)


def batch(leased: list[ScoredGroup], shared: list[ScoredGroup]) -> list[TrainingGroup]:
    at = view((leased + shared)[0].group.tokenizer)
    groups = [*map(BatchGroup, leased), *(BatchGroup(each, drawn=True) for each in shared)]
    return training_groups(groups, trio.run(Stages().advantage, groups, at), at)


def test_a_group_of_the_pool_has_no_more_completions_than_a_leased_one():
    made = batch([of_size(1, 8)], [of_size(2, 64), of_size(3, 4)])
    assert [len(group.completions) for group in made] == [8, 8, 4]
    assert [len(group.advantages) for group in made] == [8, 8, 4]
    assert [group.own_tokens for group in made] == [True, False, False]


def test_which_ones_stay_follows_from_the_seed_alone():
    once, again = (batch([], [of_size(2, 64), of_size(3, 64)]) for _ in range(2))
    assert once == again
    assert once[0].advantages != once[1].advantages


def test_the_pools_groups_say_whose_tokens_they_are_of():
    [group] = batch([], [of_size(2, 4)])
    assert group.tokenizer == of_size(2, 4).group.tokenizer
