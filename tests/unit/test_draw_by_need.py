"""Which of others' groups a node draws where it draws those that it needs most."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
import trio

from node.config import NodeConfig, load_config
from node.engines.scripted import ScriptedPolicy
from node.interfaces.engine import Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.methods.filters import ByNeed, by_need
from node.methods.samplers import draw_needed
from node.methods.task_control import Vade
from node.observe.records import RoundDone
from node.run.parts import LivePolicy, NodeParts
from node.run.progress import Progress
from node.run.sapo import Sapo
from node.simulation.simulated_nodes import build
from node.simulation.simulated_nodes import run as run_simulated
from node.stages.draw import DrawByNeed
from node.stages.stage import View
from node.verify.assignment import bucket_of, common_task, environment_bucket, next_task
from node.verify.task_choice import TaskChoice
from swarm.errors import ConfigError
from swarm.exchange.pool import Candidate
from swarm.identity import PeerId
from swarm.rollouts import Completion, GroupId, ScoredGroup
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from tests.unit.tasks_support import ALICE, make_config, make_group, make_run
from tests.unit.test_task_choice import RUN, TWO, report

PLAIN = ByNeed()


def first_share(passes: Sequence[float], set_to: ByNeed = PLAIN, draws: int = 20_000) -> float:
    """How often the first of these is drawn first."""
    rng = Random(1)
    return sum(by_need(passes, rng, set_to)[0] == 0 for _ in range(draws)) / draws


def test_a_worked_example() -> None:
    # weights 1 - p: 1 against 0.5, and what is always solved has the floor
    assert first_share([0.0, 0.5]) == pytest.approx(1 / 1.5, abs=0.01)
    assert first_share([0.0, 1.0]) == pytest.approx(1 / 1.1, abs=0.01)
    assert first_share([0.0, 1.0], ByNeed(floor=1.0)) == pytest.approx(0.5, abs=0.01)


def test_the_second_draw_is_as_if_the_first_had_not_been_there() -> None:
    """Without replacement, against draws one after the other."""
    rng, slow = Random(1), Random(2)
    passes = [0.0, 0.4, 0.8, 0.9]
    weights = [max(0.1, 1 - p) for p in passes]
    found, expected = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for _ in range(20_000):
        found[tuple(by_need(passes, rng, PLAIN)[:2])] += 1
        (one,) = slow.choices(range(4), weights)
        rest = [each for each in range(4) if each != one]
        (two,) = slow.choices(rest, [weights[each] for each in rest])
        expected[one, two] += 1
    for pair, count in expected.items():
        assert found[pair] == pytest.approx(count, abs=5 * (count**0.5 + 1))


def test_nothing_and_one_and_what_is_no_rate() -> None:
    assert by_need([], Random(1), PLAIN) == []
    assert by_need([1.0], Random(1), PLAIN) == [0]
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="pass rate"):
            by_need([0.5, bad], Random(1), PLAIN)


def test_no_producer_gets_more_places_for_being_needed() -> None:
    def candidate(number: int, producer: str) -> Candidate:
        return Candidate(GroupId(bytes([number]) * 32), PeerId(producer), (1.0, 0.0), 1, 0)

    needed = [candidate(n, "flood") for n in range(16)]
    others = [candidate(100 + n, "other") for n in range(4)]
    passes = [0.0] * 16 + [1.0] * 4
    owner = {each.group_id: each.producer for each in (*needed, *others)}
    for seed in range(50):
        drawn = draw_needed([*needed, *others], passes, 8, Random(seed), PLAIN, 4)
        assert Counter(owner[each] for each in drawn) == {"flood": 4, "other": 4}
        assert drawn == draw_needed([*needed, *others], passes, 8, Random(seed), PLAIN, 4)
    alone = draw_needed(needed, passes[:16], 8, Random(1), PLAIN, 4)
    assert len(set(alone)) == 8  # a single producer has all places, as in every draw


def test_what_others_report_is_no_need_of_the_node() -> None:
    run = make_run(*TWO)
    choice = TaskChoice(run, Vade())
    task, _ = next_task(run, ALICE, 0)
    assert choice.own_pass_rate(task) == 0.5
    bucket = environment_bucket(run, task)
    choice.others.receive([report("liar", 1_000, 1_000, bucket=bucket)])
    assert choice.belief(task).right > 0  # the control: it was heard
    assert choice.own_pass_rate(task) == 0.5
    assert bucket_of(run, task) == bucket
    choice.learn([(task, [0.0] * 8)])
    assert choice.own_pass_rate(task) == pytest.approx(1 / 10)


# --- on nodes --------------------------------------------------------------------------------


class Able(ScriptedPolicy):
    """Solves so many of the sums that begin with a small number, and so many of the others."""

    def __init__(self, small: float, large: float) -> None:
        super().__init__(generate_s=0.1)
        self.small, self.large = small, large
        self.foreign = Counter[bool]()  # groups of others trained on: whether of small numbers

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        made = []
        for at, prompt in enumerate(prompts):
            self.skill = self.small if is_small(Prompt.read(prompt).question) else self.large
            made += await super().generate([prompt], completions_each, sampling, seed + at)
        return made

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self.foreign.update(
            is_small(Prompt.read(g.prompt).question) for g in groups if not g.own_tokens
        )
        return await super().train(groups)


def is_small(question: str) -> bool:
    return int(question.partition("+")[0]) < 10


def share_of_large(draw: ByNeed | None) -> float:
    """Of the groups of others that a node trains on, which never solves large sums."""
    config = NodeConfig(
        run=RUN, local_groups=4, external_groups=2, group_size=4, rounds=30,
        evaluate_every_rounds=0, draw=draw,
    )  # fmt: skip
    policies = [Able(1.0, 0.0), Able(0.5, 0.5), Able(0.5, 0.5)]

    async def body() -> None:
        link = LinkProfile(latency_s=0.02)
        async with open_world(1, len(policies), link) as world, trio.open_nursery() as nursery:
            over, first = trio.Semaphore(0), list[str]()
            for host, policy in enumerate(policies):
                node = build(world, host, config, first)
                first.extend(() if first else node.transport.addresses())

                async def keep(record: object) -> None:
                    if isinstance(record, RoundDone) and record.round == config.rounds:
                        over.release()

                nursery.start_soon(run_simulated, node, policy, policy, keep)
            for _ in policies:
                await over.acquire()
            nursery.cancel_scope.cancel()

    deterministic_run(body, seed=1)
    assert policies[0].foreign.total() > 20
    return policies[0].foreign[False] / policies[0].foreign.total()


def test_a_node_draws_what_it_cannot_do() -> None:
    alike, needed = share_of_large(None), share_of_large(PLAIN)
    assert alike < 0.75
    assert needed > alike + 0.1


class Offered:
    """Of an exchange, the groups that it has."""

    def __init__(self, groups: Sequence[ScoredGroup]) -> None:
        self.groups = {each.group_id: each for each in groups}

    async def look(self, group_ids: Sequence[GroupId]) -> list[ScoredGroup]:
        return [self.groups[each] for each in group_ids]


def test_one_task_again_and_again_takes_no_places() -> None:
    run = make_run(common={"share": 0.5, "tasks": 8})
    groups = []
    for number in range(12):  # one task eight times, and four others
        task = common_task(run, max(0, number - 7))
        made = make_group(run, str(number), "x", producer=ALICE, task=task)
        groups.append(ScoredGroup(GroupId(bytes([number]) * 32), made, "", (1.0, 0.0)))
    offered, nothing = Offered(groups), cast("Any", None)
    node = NodeParts(
        make_config(run), ALICE, nothing, nothing, cast("Any", offered), TaskChoice(run, None),
        nothing, lambda: 0.0,
    )  # fmt: skip
    policy = LivePolicy(nothing, nothing, "")
    candidates = [Candidate(each.group_id, ALICE, each.rewards, 1, 0) for each in groups]

    async def view() -> View:
        return Sapo(node, policy, Progress()).view(1)

    first = trio.run(view)
    for seed in range(20):
        at = replace(first, seed=lambda _, *numbers, seed=seed: seed)
        chosen = trio.run(DrawByNeed(PLAIN).draw, candidates, 4, 4, at)
        assert len({offered.groups[each].group.task for each in chosen}) == 4


def test_what_has_nothing_to_draw_says_so(tmp_path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('name = "r"\n[[environments]]\nname = "scripted_sum"\n')
    assert load_config({"draw": "need, floor=0.2"}, {}, run).draw == ByNeed(floor=0.2)
    with pytest.raises(ConfigError, match="fetches nothing for need"):
        load_config({"draw": "need", "external_groups": "0"}, {}, run)
    with pytest.raises(ConfigError, match="no such method"):
        load_config({"draw": "greed"}, {}, run)
