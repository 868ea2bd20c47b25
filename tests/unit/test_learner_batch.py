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
from swarm.exchange.pool import Candidate
from swarm.rollouts import GroupId, ScoredGroup
from tests.pool_samples import PRODUCERS, make_group
from tests.unit.tasks_support import make_run

RULES = LearnerRules(peer=str(PRODUCERS[0].peer_id), group_size=8)


def learner(tokenizer: str, exchange: Any = None, rules: LearnerRules = RULES) -> Learner:
    """A learner of which nothing but its batch is asked."""
    unused: Any = None
    run = make_run().model_copy(update={"learner": rules})
    config = NodeConfig(run=run, data_dir=Path("unused"))
    node = replace(NodeParts(config, *[unused] * 7), exchange=exchange)
    policy = LivePolicy(unused, unused, tokenizer)
    return Learner(node, policy, unused, unused, unused, Progress())


def view(tokenizer: str) -> View:
    """Its first step."""

    async def begun() -> View:
        return learner(tokenizer)._view()

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


class Slow:
    """An exchange that waits before each answer."""

    def __init__(self, groups: list[ScoredGroup]) -> None:
        self._groups = groups

    async def candidates(self) -> list[Candidate]:
        await trio.lowlevel.checkpoint()
        return [
            Candidate(each.group_id, PRODUCERS[0].peer_id, each.rewards, 0, 0)
            for each in self._groups
        ]

    async def take(self, chosen: list[GroupId], _: int) -> list[ScoredGroup]:
        await trio.lowlevel.checkpoint()
        return [each for each in self._groups if each.group_id in chosen]


def test_a_draw_ends_though_the_step_is_cancelled_for_the_leased_groups_are_taken():
    exchange = Slow([of_size(2, 4), of_size(3, 4)])
    rules = RULES.model_copy(update={"pool_groups_per_step": 1})
    drawn: list[ScoredGroup] = []

    async def body() -> None:
        its = learner("t", exchange, rules)
        with trio.CancelScope() as step:
            step.cancel()
            drawn.extend(await its.draw(its._view()))

    trio.run(body)
    assert len(drawn) == 1


def test_of_a_common_task_a_copy_and_a_producers_second_group_are_left_out():
    first, elsewhere = of_size(2, 4), of_size(3, 4)
    other = PRODUCERS[1].peer_id
    [made, *_] = first.group.completions
    again = tuple(replace(made, text=f"{made.text} again") for _ in range(4))
    copied = replace(first, group_id=GroupId(b"copied"), group=replace(first.group, producer=other))
    second = replace(
        first, group_id=GroupId(b"second"), group=replace(first.group, completions=again)
    )
    offered = [first, copied, second, elsewhere]
    rules = RULES.model_copy(update={"pool_groups_per_step": 4})

    async def body() -> list[ScoredGroup]:
        its = learner("t", Slow(offered), rules)
        return await its.draw(its._view())

    assert trio.run(body) == [first, elsewhere]
