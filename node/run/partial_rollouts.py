"""Rounds that do not wait for their longest completions (APRIL, arXiv 2509.18521).

A round begins more groups than it needs and takes the first that are done. The others are
interrupted and keep their tokens; the next round goes on with them under its own policy, before it
begins any new ones. So nothing is thrown away, and long completions are trained on as often as
short ones, a round or more later; their tokens are of several policy versions, and say of which.

An engine is interrupted anywhere. Transcripts of several turns (`turns/play.py`) stop between two:
a turn that was begun is waited for, and is of one version.
"""

from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import Generic, Protocol, TypeVar

from node.interfaces.engine import Engine, PendingGroup, Sampling
from node.verify.held_out import Assignment
from swarm.rollouts import Completion

W = TypeVar("W", bound=PendingGroup)

Assign = Callable[[int], Awaitable[list[Assignment]]]
Made = tuple[Assignment, tuple[Completion, ...]]


class Works(Protocol[W]):
    """Makes groups that may take several rounds. `turns.play.Player` is one."""

    async def begin(
        self, assigned: Sequence[Assignment], each: int, sampling: Sampling, seed: int
    ) -> Sequence[W]:
        """So many completions of each task, in the making."""
        ...

    async def advance(self, works: Sequence[W], enough: int, sampling: Sampling, seed: int) -> None:
        """Go on until so many of them are done; the others keep what they have."""
        ...

    async def collect(self, works: Sequence[W]) -> list[tuple[Completion, ...]]:
        """The completions of works that are done, in their order."""
        ...


class EngineWorks:
    """Completions of one turn, by an engine that can be interrupted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def begin(
        self, assigned: Sequence[Assignment], each: int, sampling: Sampling, seed: int
    ) -> Sequence[PendingGroup]:
        prompts = [its.prompt for its in assigned]
        return await self._engine.begin(prompts, each, sampling, seed)

    async def advance(
        self, works: Sequence[PendingGroup], enough: int, sampling: Sampling, seed: int
    ) -> None:
        """Groups keep the sampling and the seed that they were begun with."""
        await self._engine.advance(works, enough)

    async def collect(self, works: Sequence[PendingGroup]) -> list[tuple[Completion, ...]]:
        return await self._engine.collect(works)


class PartialRollouts(Generic[W]):
    """Groups that earlier rounds began. They are lost with the process; their tasks are then left
    out. At most `excess` times a round's groups are under way at once."""

    def __init__(self, works: Works[W], excess: float) -> None:
        """`excess`: groups that a round has under way at first, over those that it needs; at least
        1."""
        assert excess >= 1.0
        self._works = works
        self._excess = excess
        self._begun: list[tuple[Assignment, W]] = []  # the oldest first

    @property
    def waiting(self) -> int:
        """Groups that are begun and not done."""
        return len(self._begun)

    async def groups(
        self, wanted: int, completions_each: int, sampling: Sampling, seed: int, assign: Assign
    ) -> list[Made]:
        """The next `wanted` groups that get done. `assign` gives so many further tasks.

        Raises:
            ChildFailed, ConfigError: as `Works`; what was begun is kept.
        """
        new = ceil(self._excess * wanted) - len(self._begun)
        if new > 0:
            assigned = await assign(new)
            works = await self._works.begin(assigned, completions_each, sampling, seed)
            self._begun += zip(assigned, works, strict=True)
        await self._works.advance([work for _, work in self._begun], wanted, sampling, seed)
        done = [each for each in self._begun if each[1].done][:wanted]
        made = await self._works.collect([work for _, work in done])
        taken = set(map(id, done))
        self._begun = [each for each in self._begun if id(each) not in taken]
        return [(assigned, group) for (assigned, _), group in zip(done, made, strict=True)]
