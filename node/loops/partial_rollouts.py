"""Rounds that do not wait for their longest completions (APRIL, arXiv 2509.18521).

A round begins more groups than it needs and takes the first that are done. The others are
interrupted and keep their tokens; the next round goes on with them under its own policy, before it
begins any new ones. So nothing is thrown away, and long completions are trained on as often as
short ones, a round or more later; their tokens are of several policy versions, and say of which.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import ceil

from node.interfaces.engine import PartialEngine, PendingGroup, Sampling
from node.verification.held_out import Assignment
from swarm.rollouts import Completion

Assign = Callable[[int], Awaitable[list[Assignment]]]
Made = tuple[Assignment, tuple[Completion, ...]]


@dataclass(frozen=True, eq=False, slots=True)
class _Begun:
    assignment: Assignment
    work: PendingGroup


class PartialRollouts:
    """Groups that earlier rounds began. They are lost with the process; their tasks are then left
    out. At most `excess` times a round's groups are under way at once."""

    def __init__(self, engine: PartialEngine, excess: float) -> None:
        """`excess`: groups that a round has under way at first, over those that it needs; at least
        1."""
        assert excess >= 1.0
        self._engine = engine
        self._excess = excess
        self._begun: list[_Begun] = []  # the oldest first

    @property
    def waiting(self) -> int:
        """Groups that are begun and not done."""
        return len(self._begun)

    async def groups(
        self, wanted: int, completions_each: int, sampling: Sampling, seed: int, assign: Assign
    ) -> list[Made]:
        """The next `wanted` groups that get done. `assign` gives so many further tasks.

        Raises:
            ChildFailed, ConfigError: as `RolloutEngine.generate`; what was begun is kept.
        """
        new = ceil(self._excess * wanted) - len(self._begun)
        if new > 0:
            assigned = await assign(new)
            prompts = [each.prompt for each in assigned]
            works = await self._engine.begin(prompts, completions_each, sampling, seed)
            self._begun += map(_Begun, assigned, works)
        await self._engine.advance([each.work for each in self._begun], wanted)
        done = [each for each in self._begun if each.work.done][:wanted]
        made = await self._engine.collect([each.work for each in done])
        self._begun = [each for each in self._begun if each not in done]
        return _paired(done, made)


def _paired(done: Sequence[_Begun], made: Sequence[tuple[Completion, ...]]) -> list[Made]:
    return [(each.assignment, group) for each, group in zip(done, made, strict=True)]
