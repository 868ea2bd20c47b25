"""Rounds that take the groups that are done first, and go on with the others later."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import trio

from node.config import NodeConfig, RunConfig, load_config
from node.interfaces.engine import Request, Sampling
from node.run.partial_rollouts import EngineWorks, PartialRollouts
from node.stages.stage import Wanted
from node.verify.held_out import Assignment
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason, Task

SAMPLING = Sampling(max_new_tokens=1_000)
RUN = RunConfig.model_validate(
    {"name": "sums", "environments": [{"name": "scripted_sum"}], "held_out": {"tasks": 4}}
)


@dataclass
class _Work:
    prompt: str
    completions: int
    steps: int  # tokens that its longest completion will have
    versions: list[int] = field(default_factory=list)  # of its tokens

    @property
    def done(self) -> bool:
        return len(self.versions) >= self.steps


class LongTails:
    """A partial engine whose works take as many steps as their prompts say, all at a time."""

    def __init__(self) -> None:
        self.version = 0
        self.steps = 0  # it took so far

    async def begin(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[_Work]:
        await trio.lowlevel.checkpoint()
        return [_Work(prompt, completions_each, int(prompt)) for prompt in prompts]

    async def advance(self, works: Sequence[_Work], enough: int) -> None:
        await trio.lowlevel.checkpoint()
        while sum(work.done for work in works) < enough:
            self.steps += 1
            for work in works:
                if not work.done:
                    work.versions.append(self.version)

    async def collect(self, works: Sequence[_Work]) -> list[tuple[Completion, ...]]:
        await trio.lowlevel.checkpoint()
        assert all(work.done for work in works)
        return [
            (Completion(w.prompt, (1,), (-1.0,), FinishReason.STOP, w.versions[0]),) * w.completions
            for w in works
        ]


def wanted(index: int, prompt: str) -> Wanted:
    """Two completions."""
    return Wanted(Assignment(Task("e", "1", "{}", 0, index), prompt), Request(prompt, 2))


def lengths(count: int) -> list[int]:
    """A long tail: most are short, one in ten is twenty times as long."""
    rng = Random(1)
    return [rng.choice((5, 6, 7, 8, 9, 10, 5, 6, 7, 160)) for _ in range(count)]


async def rounds(excess: float, number: int, groups: int = 4) -> tuple[list[str], list[int], int]:
    """What the rounds trained on, how many groups each left waiting, and the engine's steps."""
    engine = LongTails()
    partial = PartialRollouts(EngineWorks(engine), excess)  # type: ignore[arg-type]
    stream = iter(lengths(10_000))
    trained, left = [], []

    async def assign(count: int) -> list[Wanted]:
        await trio.lowlevel.checkpoint()
        return [wanted(0, str(next(stream))) for _ in range(count)]

    for _ in range(number):
        made = await partial.groups(groups, SAMPLING, 0, assign)
        assert len(made) == groups
        assert all(got.completions[0].text == its.request.prompt for its, got in made)
        trained += [its.request.prompt for its, _ in made]
        left.append(len(partial._begun))
        engine.version += 1
    return trained, left, engine.steps


def test_it_takes_fewer_steps_for_as_many_groups_and_leaves_no_length_out() -> None:
    async def body() -> None:
        every, _, waiting_for_all = await rounds(1.0, 200)
        trained, left, steps = await rounds(2.0, 200)
        assert every == list(map(str, lengths(800)))
        assert steps < waiting_for_all / 2
        assert set(left) == {4}  # as many as are begun at once, less those that were taken
        missing = Counter(map(str, lengths(804))) - Counter(trained)
        assert missing.total() == 4  # those under way, and no long one but these
        assert Counter(trained)["160"] >= Counter(map(str, lengths(804)))["160"] - 4

    trio.run(body)


def test_what_fails_keeps_what_was_begun() -> None:
    class Failing(LongTails):
        fails = True

        async def advance(self, works: Sequence[_Work], enough: int) -> None:
            await super().advance(works, 1)
            if self.fails:
                raise ConfigError("no")
            await super().advance(works, enough)

    async def body() -> None:
        engine = Failing()
        partial = PartialRollouts(EngineWorks(engine), 1.5)  # type: ignore[arg-type]
        asked: list[int] = []

        async def assign(count: int) -> list[Wanted]:
            await trio.lowlevel.checkpoint()
            asked.append(count)
            return [wanted(n, str(n + 3)) for n in range(count)]

        with pytest.raises(ConfigError):
            await partial.groups(4, SAMPLING, 0, assign)
        assert len(partial._begun) == 6
        engine.fails = False
        made = await partial.groups(4, SAMPLING, 0, assign)
        assert asked == [6]
        assert [its.request.prompt for its, _ in made] == ["3", "4", "5", "6"]

    trio.run(body)


def test_only_an_engine_that_keeps_partial_completions_may_over_provision() -> None:
    assert NodeConfig(run=RUN, engine="vllm", over_provision=1.5).over_provision == 1.5
    for engine in ("torch", "scripted"):
        with pytest.raises(Exception, match="needs the engine vllm"):
            NodeConfig(run=RUN, engine=engine, over_provision=1.5)


def test_completions_that_each_update_begins_anew_may_not_be_left_for_later_rounds() -> None:
    for update in ("keep", "drain"):
        flags = {"engine": "vllm", "over_provision": "1.5", "engine_update": update}
        assert load_config(flags, {}).engine_update == update
    assert load_config({"engine": "vllm", "engine_update": "abort"}, {}).over_provision == 1.0
    with pytest.raises(ConfigError, match=r"--engine-update abort: .*try --engine-update keep"):
        load_config({"engine": "vllm", "over_provision": "1.5", "engine_update": "abort"}, {})


@pytest.mark.parametrize(
    "asked", [[], [Request("3", 2), Request("3", 3)], [Request("3", 2, limit=1)]]
)
def test_requests_that_it_would_not_keep_to_are_refused(asked: list[Request]) -> None:
    async def body() -> None:
        works = EngineWorks(LongTails())  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="alike in all"):
            await works.begin([], asked, SAMPLING, 0)

    trio.run(body)
