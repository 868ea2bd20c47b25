"""The share of a solution in a prompt, and the rollouts that get a named strategy."""

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random
from typing import Annotated, Final

from annotated_types import Ge, Le

from node.methods.checked import probability, whole
from node.methods.method import (
    NODE,
    Count,
    MethodSettings,
    Need,
    NonNegative,
    PositiveShare,
    Share,
)
from swarm.rollouts import Task

TASKS_MAX: Final = 2**14  # whose success is kept; of more, those done longest ago are given up


class Hints(
    MethodSettings,
    kind="hints",
    needs={Need.REVISITS, Need.PEERS, Need.ONE_TURN},
    roles=NODE,
):
    """The beginning of a solution is given away: more for harder tasks, less as the run goes on."""

    share_max: Share = 0.75  # of a solution's tokens, for a task that nobody solves; ours
    success_max: PositiveShare = 0.5  # a task that goes this well gets no hint; ours
    steps: Count = 500  # after which no task gets one; ours


def hints(success: float, step: int, set_to: Hints) -> float:
    """The share of its solution that a task's prompt gives away: linear in the success without a
    hint and in the step, counted from 0. After ADHint (arXiv 2512.13095), whose abstract has no
    formula."""
    hardness = max(0.0, 1.0 - probability(success, "success") / set_to.success_max)
    left = max(0.0, 1.0 - whole(step, "step") / set_to.steps)
    return set_to.share_max * hardness * left


def hint_tokens(tokens: int, share: float) -> int:
    """Number of a solution's first tokens that are given away, never the last one."""
    wanted = math.floor(probability(share, "share") * whole(tokens, "tokens") + 1e-9)
    return min(wanted, max(0, tokens - 1))


def beginning(text: str, share: float) -> str:
    """A share of a solution's characters, cut back to whole words; never all of it."""
    count = hint_tokens(len(text), share)
    gaps = [gap.end() for gap in re.finditer(r"\s+", text) if 0 < gap.start() <= count]
    inner = [end for end in gaps if end < len(text)]
    return text[: inner[-1]] if inner else text[:count].rstrip()


class BareSuccess:
    """Last success at tasks without a hint. Bounded. A task that got a hint is forgotten, so that
    it is done without one the next time."""

    def __init__(self, tasks_max: int = TASKS_MAX) -> None:
        self._tasks_max = tasks_max
        self._shares: OrderedDict[Task, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shares)

    def learn(self, task: Task, rewards: Sequence[float]) -> None:
        """Take in a group that was made without a hint."""
        self._shares.pop(task, None)
        self._shares[task] = sum(reward == 1.0 for reward in rewards) / len(rewards)
        while len(self._shares) > self._tasks_max:
            self._shares.popitem(last=False)

    def hint(
        self,
        task: Task,
        solutions: Sequence[str],
        step: int,
        set_to: Hints,
        answer_in: Callable[[str], str | None] = str,
    ) -> str:
        """The given-away part of the shortest of `solutions`; empty if it holds the solution's
        answer, as `answer_in` reads it, or where the task needs none."""
        success = self._shares.get(task)
        if success is None or not solutions:
            return ""
        solution = min(solutions, key=lambda text: (len(text), text))
        hint = beginning(solution, hints(success, step, set_to))
        if hint and answer_in(hint) == answer_in(solution):
            return ""
        if hint:
            del self._shares[task]
        return hint


class Nudges(MethodSettings, kind="nudges", roles=NODE):
    """Some strategies are named, each to some rollouts; and some of these do without."""

    strategies: Annotated[int, Ge(1), Le(256)] = 2  # of a task, as far as there are texts
    dropped: Share = 0.5  # share of bare prompts: 0.5 as published, 0.25 in its code
    distil: NonNegative = 0.1  # weight of what is learned under the bare prompt; 0: nothing
    texts: tuple[str, ...] = (  # of strategies, drawn anew for each task; ours
        "Work step by step, and check each step before the next.",
        "Estimate the answer first, then compute it exactly.",
        "Work backwards from what is asked.",
        "Split the problem into smaller parts, and solve each.",
        "Solve it in two different ways, and compare.",
    )


def nudges(rng: Random, rollouts: int, set_to: Nudges) -> tuple[int | None, ...]:
    """The strategy that each of a task's rollouts names (NudgeRL, arXiv 2605.15726), strategy by
    strategy in equal parts. None: the bare prompt. With it the policy is also measured as it will
    be used."""
    return tuple(
        None if rng.random() < set_to.dropped else place * set_to.strategies // rollouts
        for place in range(rollouts)
    )
