"""Rounds that do not wait for their longest completions (APRIL, arXiv 2509.18521).

A round begins more groups than it needs and takes the first that are done. The others keep their
tokens; the next round continues them under its own policy before it begins new ones. So long
completions are trained on as often as short ones. Transcripts of several turns stop between two.
"""

from collections.abc import Awaitable, Callable, Sequence
from math import ceil
from typing import Generic, Protocol, TypeVar

from node.interfaces.engine import (
    Engine,
    Outcome,
    PendingGroup,
    Request,
    Sampling,
    plain_requests,
)
from node.stages.stage import Wanted
from swarm.errors import ConfigError
from swarm.rollouts import Completion, Task

W = TypeVar("W", bound=PendingGroup)

Assign = Callable[[int], Awaitable[Sequence[Wanted]]]


class Works(Protocol[W]):
    """Makes groups that may take several rounds; `turns.Player` is one."""

    async def begin(
        self, tasks: Sequence[Task], requests: Sequence[Request], sampling: Sampling, seed: int
    ) -> Sequence[W]:
        """Begin the completions that are requested of each task."""

    async def advance(self, works: Sequence[W], enough: int, sampling: Sampling, seed: int) -> None:
        """Go on until `enough` works are done; the others keep their tokens."""

    async def collect(self, works: Sequence[W]) -> list[tuple[Completion, ...]]:
        """The completions of works that are done, in their order."""


class EngineWorks:
    """Completions of one turn, by an engine that can be interrupted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def begin(
        self, tasks: Sequence[Task], requests: Sequence[Request], sampling: Sampling, seed: int
    ) -> Sequence[PendingGroup]:
        """ConfigError: the requests, which a user's own method may change, are unlike."""
        prompts = [each.prompt for each in requests]
        if not requests or list(requests) != plain_requests(prompts, requests[0].n):
            raise ConfigError("--over-provision begins completions alike in all; give 1 instead")
        return await self._engine.begin(prompts, requests[0].n, sampling, seed)

    async def advance(
        self, works: Sequence[PendingGroup], enough: int, sampling: Sampling, seed: int
    ) -> None:
        """Groups keep the sampling and the seed that they were begun with."""
        await self._engine.advance(works, enough)

    async def collect(self, works: Sequence[PendingGroup]) -> list[tuple[Completion, ...]]:
        return await self._engine.collect(works)


class PartialRollouts(Generic[W]):
    """The groups under way, at most `excess` >= 1 times those of a round. They are lost with the
    process; their tasks are then left out."""

    def __init__(self, works: Works[W], excess: float) -> None:
        self._works = works
        self._excess = excess
        self._begun: list[tuple[Wanted, W]] = []  # the oldest first

    async def groups(
        self, wanted: int, sampling: Sampling, seed: int, assign: Assign
    ) -> list[tuple[Wanted, Outcome]]:
        """The next `wanted` groups that are done. `assign` gives further tasks. A failure loses no
        group under way."""
        new = ceil(self._excess * wanted) - len(self._begun)
        if new > 0:
            wanteds = await assign(new)
            tasks = [each.assigned.task for each in wanteds]
            requests = [each.request for each in wanteds]
            works = await self._works.begin(tasks, requests, sampling, seed)
            self._begun += zip(wanteds, works, strict=True)
        await self._works.advance([work for _, work in self._begun], wanted, sampling, seed)
        done = [each for each in self._begun if each[1].done][:wanted]
        made = await self._works.collect([work for _, work in done])
        taken = set(map(id, done))
        self._begun = [each for each in self._begun if id(each) not in taken]
        return [(each, Outcome(group)) for (each, _), group in zip(done, made, strict=True)]
