"""Control: how many completions of each task, within what budget, and how long they may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, pstdev, stdev
from typing import Any, Final

from node.interfaces.engine import Request
from node.methods import rollout_budgets as formulas
from node.methods.advantages import PASSED
from node.methods.groups import Advantages, lengths
from node.stages.control import bucket, measured
from node.stages.stage import BatchGroup, More, RoundOutcome, Stage, View, Wanted

BUCKETS_MAX: Final = 32_768  # of which DUET keeps figures; beyond it the oldest go
KEPT_SHARE: Final = 0.9  # of the counts of before, at a learner's next step; ours


def further(group: BatchGroup, count: int) -> Wanted:
    """So many more completions of a group's task."""
    return Wanted(group.assigned, Request(group.scored.prompt, count), private=group.private)


def _passed(group: BatchGroup) -> int:
    return sum(reward >= PASSED for reward in group.scored.rewards)


class MoreOfHard(Stage[formulas.Dars]):
    """DARS: further completions of hard tasks, once the first G are scored."""

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        first = [each for each in measured(made) if len(each.scored.rewards) == at.group_size]
        counts = [formulas.dars(_passed(each), at.group_size, self.set_to) for each in first]
        self.acted += sum(counts)
        return More([further(each, n) for each, n in zip(first, counts, strict=True) if n])


class WidenByPassRate(Stage[formulas.Brorl]):
    """BroRL: as many completions as the pass rate asks for, of a task or of all leased ones."""

    def __init__(self, set_to: formulas.Brorl) -> None:
        super().__init__(set_to)
        self._right = self._rollouts = 0.0  # of a learner's groups, the older the less they count

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        found = []
        for each in wanted:
            counts = at.choice.belief(each.assigned.task)
            n = self._width(each.request.n, counts.right, counts.right + counts.wrong)
            self.acted += n != each.request.n
            found.append(replace(each, request=replace(each.request, n=n)))
        return found

    def lease(self, width: int, limit: int, at: View) -> tuple[int, int]:
        most = at.config.run.limits.group_size_max
        found = min(most, self._width(width, self._right, self._rollouts))
        self.acted += found != width
        return found, limit

    def _width(self, width: int, right: float, rollouts: float) -> int:
        """`width` where nothing is known."""
        if not rollouts:
            return width
        return formulas.brorl((right + 1.0) / (rollouts + 2.0), width, self.set_to)

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        if at.role == "learner":
            known = measured(outcome.own)
            self._right = KEPT_SHARE * self._right + sum(map(_passed, known))
            rollouts = sum(len(each.scored.rewards) for each in known)
            self._rollouts = KEPT_SHARE * self._rollouts + rollouts

    def to_record(self) -> Any:
        return [self._right, self._rollouts] if self._rollouts else None

    def restore(self, record: Any) -> None:
        self._right, self._rollouts = map(float, record)


class AllocateInPhases(Stage[formulas.XrpoAllocation]):
    """XRPO: a share of the round's completions alike for all tasks, and the rest, phase by phase,
    where it tells most. The round has as many as without it."""

    def __init__(self, set_to: formulas.XrpoAllocation) -> None:
        super().__init__(set_to)
        self._phase = self._budget = 0  # of this round

    def begin(self) -> None:
        super().begin()
        self._phase = self._budget = 0

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        found = []
        for each in wanted:
            n = min(each.request.n, max(2, round(self.set_to.first_share * each.request.n)))
            self._budget += each.request.n - n
            found.append(replace(each, request=replace(each.request, n=n)))
        return found

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        if self._phase == self.set_to.phases:
            return More()
        budget = formulas.phase_budgets(self._budget, self.set_to)[self._phase]
        self._phase += 1
        known = [each for each in measured(made) if len(each.scored.rewards) > 1]
        tasks = [
            formulas.RolloutStatistics(len(each.scored.rewards), stdev(each.scored.rewards))
            for each in known
        ]
        counts = formulas.xrpo_allocation(tasks, budget, self.set_to)
        self.acted += sum(counts)
        return More([further(each, n) for each, n in zip(known, counts, strict=True) if n])


@dataclass(frozen=True, slots=True)
class Figures:
    """Running means over groups of one bucket."""

    groups: int = 0  # at most the settings' `memory`
    signal: float = 0.0  # spread of advantage times summed log-prob
    tokens: float = 1.0  # of a completion

    def with_group(self, signal: float, tokens: float, memory: int) -> "Figures":
        groups = min(self.groups + 1, memory)
        return Figures(
            groups,
            self.signal + (signal - self.signal) / groups,
            self.tokens + (tokens - self.tokens) / groups,
        )


class SpendTokens(Stage[formulas.Duet]):
    """DUET: numbers and lengths of completions by what their buckets cost and taught before. A
    completion weighs by the inverse of its task's propensity, on average 1."""

    def __init__(self, set_to: formulas.Duet) -> None:
        super().__init__(set_to)
        self._known: dict[str, Figures] = {}

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        """Nothing else than it was until something is known; then what is not has the means."""
        if not self._known or not wanted:
            return wanted
        every = self._known.values()
        mean = Figures(0, fmean(e.signal for e in every), fmean(e.tokens for e in every))
        known = [self._known.get(bucket(each.assigned.task, at), mean) for each in wanted]
        tokens = [each.tokens for each in known]
        full = sum(each.request.n * cost for each, cost in zip(wanted, tokens, strict=True))
        spending = formulas.duet([each.signal for each in known], tokens, full, self.set_to)
        counts, propensities = spending.rollouts, spending.propensities
        inverse = [n / share for n, share in zip(counts, propensities, strict=True)]
        norm = sum(counts) / sum(inverse)
        most = at.sampling.max_new_tokens
        self.acted += len(wanted)
        return [
            replace(
                each,
                request=replace(each.request, n=n, limit=min(limit, most)),
                weight=each.weight * norm / share,
            )
            for each, n, limit, share in zip(
                wanted, counts, spending.tokens, propensities, strict=True
            )
        ]

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        for each, values in zip(batch, worth, strict=True):
            signal = _signal(each, values)
            if measured([each]) and signal is not None:
                name = bucket(each.scored.group.task, at)
                before = self._known.pop(name, Figures())  # at the end: it has the newest group
                tokens = fmean(lengths(each.scored))
                self._known[name] = before.with_group(signal, tokens, self.set_to.memory)
        for name in list(self._known)[: max(0, len(self._known) - BUCKETS_MAX)]:
            del self._known[name]
        return batch, worth

    def to_record(self) -> Any:
        return {name: [e.groups, e.signal, e.tokens] for name, e in self._known.items()}

    def restore(self, record: Mapping[str, Any]) -> None:
        self._known = {name: Figures(*each) for name, each in record.items()}


def _signal(group: BatchGroup, worth: Sequence[float | None]) -> float | None:
    """The spread of advantage times summed log-prob. None: unknown."""
    made = group.scored.group.completions
    terms = [
        value * sum(each.logprobs)
        for value, each in zip(worth, made, strict=True)
        if value is not None and each.logprobs
    ]
    return pstdev(terms) if len(terms) > 1 and all(map(isfinite, terms)) else None
