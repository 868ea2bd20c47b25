"""Rounds that take the transcripts that are done first, and go on with the others later."""

from collections.abc import Sequence

import pytest
import trio

from node.config import NodeConfig, load_config
from node.envs.base import Interaction
from node.envs.registry import interaction
from node.envs.replay_turns import forgery, said_of
from node.interfaces.engine import Context, Engine, EngineInfo, Outcome, Request, Sampling
from node.run.partial_rollouts import PartialRollouts
from node.run.turns import Player
from node.stages.stage import Wanted
from node.verify.assignment import assigned_task
from node.verify.held_out import Assignment
from node.verify.verifier import InlineVerifier
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Completion, FinishReason
from tests.support import run as run_async
from tests.unit.tasks_support import ALICE
from tests.unit.test_turns_play import run_of

RUN = run_of("guess_number")
SAMPLING = Sampling(max_new_tokens=20)


def source() -> Interaction:
    found = interaction("guess_number")
    assert found is not None
    return found


class Guesser(Engine):
    """An engine that finds the number at a turn of its own for each task: the first task's at once,
    the second one's with the second guess, and so on to the fourth."""

    maker = EngineInfo("scripted")

    def __init__(self, indices: int) -> None:
        self.version = 1
        self.fails = False
        self.sampled: list[int] = []  # turns in each call
        self._problems = {}
        for index in range(indices):
            problem = source().problem(assigned_task(RUN, ALICE, index))
            self._problems[problem.prompt] = (problem.answer, index % 4)

    def _turn(self, prompt: str, number: int) -> Completion:
        right, at = self._problems[prompt]
        wrong = [str(n) for n in range(1, 16) if str(n) != right]
        text = right if number == at else wrong[number]
        ids = (*map(ord, text), 0)
        return Completion(text, ids, (-0.5,) * len(ids), FinishReason.STOP, self.version)

    async def generate(
        self, prompts: Sequence[str], each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        await trio.lowlevel.checkpoint()
        return [(self._turn(prompt, 0),) * each for prompt in prompts]

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        await trio.lowlevel.checkpoint()
        if self.fails:
            raise ChildFailed("gone")
        self.sampled.append(len(contexts))
        return [self._turn(each.prompt, len(each.turns)) for each in contexts]


class Rounds:
    """Rounds of two groups of two transcripts each, over so many tasks."""

    def __init__(self, excess: float, indices: int = 40) -> None:
        self.engine = Guesser(indices)
        player = Player(RUN, self.engine, InlineVerifier(RUN))  # type: ignore[arg-type]
        self.partial = PartialRollouts(player, excess)
        self.assigned = 0

    async def assign(self, count: int) -> list[Wanted]:
        await trio.lowlevel.checkpoint()
        found = []
        for index in range(self.assigned, self.assigned + count):
            task = assigned_task(RUN, ALICE, index)
            prompt = source().problem(task).prompt
            found.append(Wanted(Assignment(task, prompt), Request(prompt, 2)))
        self.assigned += count
        return found

    async def round(self) -> list[tuple[Wanted, Outcome]]:
        made = await self.partial.groups(2, SAMPLING, self.engine.version, self.assign)
        self.engine.version += 1
        return made


def turns_of(made: list[tuple[Wanted, Outcome]]) -> list[int]:
    return [(len(group.completions[0].segments) + 1) // 2 for _, group in made]


def test_a_round_takes_what_is_done_and_the_next_goes_on() -> None:
    async def main() -> None:
        rounds = Rounds(2.0)
        first = await rounds.round()
        assert turns_of(first) == [1, 2]  # of four, the two that are done first
        assert rounds.engine.sampled == [6]  # one more turn of the three that were not
        assert len(rounds.partial._begun) == 2
        second = await rounds.round()
        assert turns_of(second) == [3, 1]  # one of the old ones, and a new one
        third = await rounds.round()
        assert turns_of(third)[0] == 4
        completion, _ = third[0][1].completions
        assert [version for version, _ in completion.spans] == [1, 2, 3]
        assert completion.policy_version == 1
        for its, outcome in [*first, *second, *third]:
            problem = source().problem(its.assigned.task)
            for each in outcome.completions:
                assert forgery(source(), problem, said_of(each)) is None

    run_async(main)


def test_nothing_is_lost_and_long_ones_come_as_often_as_short_ones() -> None:
    async def main() -> None:
        rounds = Rounds(2.0, 200)
        turns = [count for _ in range(40) for count in turns_of(await rounds.round())]
        assert rounds.assigned == len(turns) + len(rounds.partial._begun)
        for length in (1, 2, 3, 4):
            assert abs(turns.count(length) - len(turns) / 4) <= 4

    run_async(main)


def test_without_excess_every_group_is_waited_for() -> None:
    async def main() -> None:
        rounds = Rounds(1.0)
        assert turns_of(await rounds.round()) == [1, 2]
        assert turns_of(await rounds.round()) == [3, 4]
        assert len(rounds.partial._begun) == 0

    run_async(main)


def test_an_engine_that_fails_leaves_every_transcript_where_it_was() -> None:
    async def main() -> None:
        rounds = Rounds(2.0)
        rounds.engine.fails = True
        with pytest.raises(ChildFailed):
            await rounds.round()
        rounds.engine.fails = False
        assert turns_of(await rounds.round()) == [1, 2]
        assert rounds.assigned == 4

    run_async(main)


def test_which_nodes_may_leave_transcripts_for_a_later_round() -> None:
    assert NodeConfig(run=RUN, engine="torch", over_provision=2.0).over_provision == 2.0
    assert NodeConfig(run=RUN, engine="vllm", over_provision=2.0).over_provision == 2.0
    with pytest.raises(ConfigError, match="needs the engine vllm, or a run with turns"):
        load_config({"engine": "torch", "over_provision": "2"}, {})
