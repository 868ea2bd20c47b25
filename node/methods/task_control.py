"""Choice of tasks by difficulty (CDAS, VADE), and of the number of foreign groups in a batch."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, log, sqrt
from random import Random
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Le

from node.methods.checked import finite, probability, right_of, whole
from node.methods.method import (
    NODE,
    Count,
    MethodSettings,
    Need,
    NonNegative,
    Positive,
    PositiveShare,
)
from swarm.rollouts import Counters


class Cdas(
    MethodSettings, kind="cdas", needs={Need.REVISITS}, roles=NODE, decides={"the choice of tasks"}
):
    """Half of the tasks a little below the policy's competence, half a little above it."""

    uniform_steps: Annotated[int, Ge(0)] = 1  # steps with uniform draws, before anything is known
    # beyond it those rated longest ago are forgotten
    tasks_max: Annotated[int, Ge(1), Le(65_536)] = 65_536
    # tasks of its stream that a node looks at for each wanted one; ours
    ahead: Annotated[int, Ge(2), Le(64)] = 4


@dataclass(frozen=True, slots=True)
class TaskDifficulty:
    """Average of expected less observed pass rate."""

    value: float = 0.0  # within [-1, 1]
    terms: int = 1  # of the average; the first is the 0 that every task begins with


@dataclass(frozen=True, slots=True)
class Competence:
    """Ratings of the policy and of its tasks."""

    value: float = 0.0
    steps: int = 0
    difficulties: Mapping[str, TaskDifficulty] = field(default_factory=lambda: MappingProxyType({}))

    def to_record(self) -> list[Any]:
        known = {task: [each.value, each.terms] for task, each in self.difficulties.items()}
        return [self.value, self.steps, known]

    @classmethod
    def from_record(cls, record: Any) -> "Competence":
        """Read the output of `to_record`. KeyError, TypeError, ValueError: it is none."""
        value, steps, known = record
        return cls(value, steps, {task: TaskDifficulty(*each) for task, each in known.items()})

    def difficulty(self, task: str) -> float:
        return self.difficulties.get(task, TaskDifficulty()).value


def expected_rate(difficulty: float, competence: float) -> float:
    """1 / (1 + e^(difficulty - competence))."""
    gap = difficulty - competence
    if gap > 0:  # so that no exponent is positive
        return math.exp(-gap) / (1.0 + math.exp(-gap))
    return 1.0 / (1.0 + math.exp(gap))


def rated(state: Competence, rates: Mapping[str, float], tasks: int, set_to: Cdas) -> Competence:
    """The state after a step (CDAS, arXiv 2505.17652) with these pass `rates`, of `tasks` tasks in
    all. Each difficulty is the running mean of expected less observed pass rate; the competence
    falls by the mean rise of the difficulties."""
    whole(tasks, "tasks", max(1, len(rates)))
    known = dict(state.difficulties)
    rise = 0.0
    for task in sorted(rates):
        before = known.pop(task, TaskDifficulty())
        surprise = expected_rate(before.value, state.value) - probability(rates[task], "pass rate")
        terms = before.terms + 1
        value = before.value + (surprise - before.value) / terms
        rise += value - before.value
        known[task] = TaskDifficulty(value, terms)  # at the end: rated last
    for task in list(known)[: max(0, len(known) - set_to.tasks_max)]:
        del known[task]
    return Competence(state.value - rise / tasks, state.steps + 1, MappingProxyType(known))


def cdas(
    state: Competence, tasks: Iterable[str], count: int, rng: Random, set_to: Cdas
) -> tuple[str, ...]:
    """The next step's tasks: `count` of them, or all where there are fewer. Half are the nearest
    that are at most as hard as the policy is able, the others the nearest harder ones. A side gives
    what the other one lacks. Equally near tasks are drawn."""
    whole(count, "count")
    drawn = sorted(set(tasks))
    rng.shuffle(drawn)
    if state.steps < set_to.uniform_steps:
        return tuple(drawn[:count])
    easier: list[str] = []
    harder: list[str] = []
    for task in sorted(drawn, key=lambda each: abs(state.difficulty(each) - state.value)):
        (easier if state.difficulty(task) <= state.value else harder).append(task)
    of_harder = min(len(harder), count - min(len(easier), count // 2))
    return tuple(easier[: count - of_harder] + harder[:of_harder])


# Tasks whose rewards will differ most, by what is believed of them (VADE, arXiv 2511.18902).


class Vade(
    MethodSettings, kind="vade", needs={Need.REVISITS}, roles=NODE, decides={"the choice of tasks"}
):
    """Thompson's draw of each task's success, and those taken that promise most."""

    decay_global: PositiveShare = 0.99  # of all counts, each step; ours
    decay_local: PositiveShare = 0.9  # also of tasks with new results; ours
    evidence_max: Positive = 64.0  # rollouts that one result counts for; ours
    tasks_max: Count = 100_000  # beyond it those with results longest ago are forgotten
    # tasks of its stream that a node looks at for each wanted one; ours
    ahead: Annotated[int, Ge(2), Le(64)] = 4
    # rollouts that an environment's mean counts for, of a task that comes again; ours
    prior_max: Annotated[float, Ge(0), Le(64)] = 8.0
    # rollouts that all reports on a bucket count for; 0: none are used; ours
    others_max: Annotated[float, Ge(0), Le(64)] = 16.0


@dataclass(frozen=True, slots=True)
class SuccessCounts:
    """Rollouts of a task, the older the less they count."""

    right: float = 0.0
    wrong: float = 0.0


@dataclass(frozen=True, slots=True)
class SuccessBeliefs:
    """Success counts by task."""

    counts: Mapping[str, SuccessCounts] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, task: str) -> SuccessCounts:
        return self.counts.get(task, SuccessCounts())


def information(success: float) -> float:
    """p (1 - p)^2, which is largest, 4/27, where a third of the rollouts is right."""
    return probability(success, "success") * (1.0 - success) ** 2


def vade(beliefs: SuccessBeliefs, tasks: Iterable[str], count: int, rng: Random) -> tuple[str, ...]:
    """The next step's tasks, best first: `count` of them, or all where there are fewer (VADE, arXiv
    2511.18902). A task is rated by the `information` of a draw from Beta(right + 1, wrong + 1)."""
    whole(count, "count")
    drawn = {}
    for task in sorted(set(tasks)):
        counts = beliefs.of(task)
        drawn[task] = information(rng.betavariate(counts.right + 1.0, counts.wrong + 1.0))
    return tuple(sorted(drawn, key=lambda each: -drawn[each])[:count])


def learned(
    beliefs: SuccessBeliefs, results: Sequence[tuple[str, int, int]], set_to: Vade
) -> SuccessBeliefs:
    """The beliefs after a step with `results` (task, right, rollouts): all counts decay, those of
    the step's tasks once more, and the results are added. A task may come more than once."""
    fresh: dict[str, SuccessCounts] = {}
    for task, right, rollouts in sorted(results):
        right_of(right, rollouts)
        weight = min(1.0, set_to.evidence_max / rollouts)
        so_far = fresh.get(task, SuccessCounts())
        fresh[task] = SuccessCounts(
            so_far.right + weight * right, so_far.wrong + weight * (rollouts - right)
        )
    left = set_to.decay_global
    known = {
        task: SuccessCounts(each.right * left, each.wrong * left)
        for task, each in beliefs.counts.items()
    }
    for task, new in fresh.items():
        old = known.pop(task, SuccessCounts())
        known[task] = SuccessCounts(  # at the end: it has the newest results
            old.right * set_to.decay_local + new.right, old.wrong * set_to.decay_local + new.wrong
        )
    for task in list(known)[: max(0, len(known) - set_to.tasks_max)]:
        del known[task]
    return SuccessBeliefs(MappingProxyType(known))


# Reports among nodes on the difficulty of tasks, and how far they are believed.

REPORTS_MAX: Final = 16_384
REPORTS_PER_VOICE_MAX: Final = 4_096
REPORTS_PER_PRODUCER_MAX: Final = 256
VOICE_MAX: Final = 16.0  # rollouts that one voice counts for in a bucket, whatever it tells


@dataclass(frozen=True, slots=True, order=True)
class TriesReport:
    """One producer's report on one bucket; the fields give the order in time."""

    created_at_s: int
    round: int
    producer: str
    bucket: int
    tries: int
    successes: int
    expires_at_s: int
    voice: str  # in whose name it counts: of an address block, of all who are not connected


class SharedMap:
    """Other nodes' reports by bucket. A producer's voice is the same in all of its reports."""

    def __init__(
        self,
        reports_max: int = REPORTS_MAX,
        per_voice_max: int = REPORTS_PER_VOICE_MAX,
        per_producer_max: int = REPORTS_PER_PRODUCER_MAX,
    ) -> None:
        self._most = (reports_max, per_voice_max, per_producer_max)
        self._buckets: dict[int, dict[str, TriesReport]] = {}
        self._producers: dict[str, dict[int, TriesReport]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._producers.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedMap) and self._producers == other._producers

    __hash__ = None  # type: ignore[assignment]  # it changes

    def receive(self, reports: Iterable[TriesReport]) -> None:
        voices: dict[str, str] = {}
        for report in reports:
            known = self._producers.get(report.producer, {}).get(report.bucket)
            if report.tries < 1 or (known is not None and known >= report):
                continue
            self._producers.setdefault(report.producer, {})[report.bucket] = report
            self._buckets.setdefault(report.bucket, {})[report.producer] = report
            voices[report.producer] = report.voice
        in_all, of_voice, of_producer = self._most
        for producer in voices:
            self._trim([self._producers[producer]], of_producer)
        for voice in set(voices.values()):
            self._trim(
                [each for each in self._producers.values() if _voice(each) == voice], of_voice
            )
        self._trim_greediest(in_all)

    def _trim_greediest(self, most: int) -> None:
        held: Counter[str] = Counter()
        for reports in self._producers.values():
            held[_voice(reports)] += len(reports)
        while held.total() > most:
            greediest = max(held, key=lambda voice: (held[voice], voice))
            held[greediest] -= 1
            self._trim(
                [each for each in self._producers.values() if _voice(each) == greediest],
                held[greediest],
            )

    def _trim(self, owners: Sequence[Mapping[int, TriesReport]], most: int) -> None:
        """Forget the oldest reports of these producers beyond so many."""
        beyond = sum(map(len, owners)) - most
        if beyond > 0:
            every = (report for each in owners for report in each.values())
            for report in heapq.nsmallest(beyond, every):
                self._forget(report)

    def voice_of(self, producer: str) -> str:
        return _voice(self._producers.get(producer, {}))

    def expire(self, now_s: float) -> None:
        """Forget reports whose groups have expired."""
        every = [each for of_one in self._producers.values() for each in of_one.values()]
        for report in every:
            if report.expires_at_s <= now_s:
                self._forget(report)

    def of(self, bucket: int, others_max: float) -> SuccessCounts:
        """Success counts of a bucket from all reports: `others_max` rollouts at most, at the rate
        of the median voice.

        A voice has the median rate of its producers and weighs as many rollouts as they had, at
        most `VOICE_MAX` and at most what the median voice has: rollouts are cheap to state. So a
        minority of voices moves the rate at most to one that some other voice gave."""
        voices: dict[str, list[tuple[float, float]]] = {}
        for report in self._buckets.get(bucket, {}).values():
            said = (report.successes / report.tries, min(VOICE_MAX, float(report.tries)))
            voices.setdefault(report.voice, []).append(said)
        if not voices:
            return SuccessCounts()
        medians = [_median(sorted(said)) for said in voices.values()]
        weights = sorted(min(VOICE_MAX, tries) for _, tries in medians)
        most = weights[(len(weights) - 1) // 2]
        rate, weight = _median(sorted((rate, min(most, tries)) for rate, tries in medians))
        counted = min(others_max, weight)
        return SuccessCounts(counted * rate, counted * (1.0 - rate))

    def _forget(self, report: TriesReport) -> None:
        del self._buckets[report.bucket][report.producer]
        if not self._buckets[report.bucket]:
            del self._buckets[report.bucket]
        del self._producers[report.producer][report.bucket]
        if not self._producers[report.producer]:
            del self._producers[report.producer]


def _voice(reports: Mapping[int, TriesReport]) -> str:
    return next((each.voice for each in reports.values()), "")


def _median(said: list[tuple[float, float]]) -> tuple[float, float]:
    """Weighted median of (rate, weight), sorted by rate, and the summed weight. Where half lies on
    each side it is the middle of the two."""
    upto = list(accumulate(weight for _, weight in said))
    half = upto[-1] / 2.0
    low = next(rate for (rate, _), sum_ in zip(said, upto, strict=True) if sum_ >= half)
    high = next(rate for (rate, _), sum_ in zip(said, upto, strict=True) if sum_ > half)
    return (low + high) / 2.0, upto[-1]


def reports_of(
    counters: Counters,
    producer: str,
    round_: int,
    created_at_s: int,
    expires_at_s: int,
    voice: str,
) -> list[TriesReport]:
    return [
        TriesReport(created_at_s, round_, producer, bucket, tries, successes, expires_at_s, voice)
        for bucket, tries, successes in counters
    ]


# The number of foreign groups in a batch, learned from validation gains.

TRIALS_MIN: Final = 1e-9  # an arm with fewer is forgotten, and as good as new


class AdaptiveExternal(MethodSettings, kind="adaptive_external", needs={Need.PEERS}, roles=NODE):
    """A bandit whose arms are shares of J, the foreign groups that a node wants. An arm is held
    from one evaluation on validation tasks to the next."""

    # arms are 0 to this; J arm / levels groups are drawn, rounded up
    levels: Annotated[int, Ge(1), Le(256)] = 2
    rule: Literal["ucb", "thompson"] = "ucb"
    exploration: NonNegative = 0.5  # in units of `gain_max`
    gain_max: Positive = 0.1  # bound on a gain, either way
    decay: PositiveShare = 0.95  # of all gains, at a new one: early help may not help late


@dataclass(frozen=True, slots=True)
class ExternalGains:
    """Decayed tries and summed gains of each arm, and the arm that is being tried."""

    trials: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()
    arm: int | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ExternalGains":
        """Read the output of `dataclasses.asdict`, with lists for tuples.

        Raises:
            TypeError, KeyError: it is none.
        """
        return cls(tuple(fields["trials"]), tuple(fields["sums"]), fields["arm"])


def no_gains(set_to: AdaptiveExternal) -> ExternalGains:
    return ExternalGains((0.0,) * (set_to.levels + 1), (0.0,) * (set_to.levels + 1))


def groups_of(state: ExternalGains, wanted: int, set_to: AdaptiveExternal) -> int:
    """Foreign groups for a batch under the present arm, of `wanted`; all of them without an arm,
    and where the arms have changed."""
    if state.arm is None or len(state.trials) != set_to.levels + 1:
        return wanted
    return ceil(wanted * state.arm / set_to.levels)


def evaluated(
    state: ExternalGains, gain: float | None, rng: Random, set_to: AdaptiveExternal
) -> ExternalGains:
    """The state with the next arm, after an evaluation. `gain`: of the pass rate since the present
    arm began, in [-1, 1]; None: not known."""
    if len(state.trials) != set_to.levels + 1:
        state = no_gains(set_to)  # it is set to something else than it was
    if gain is not None and state.arm is not None:
        state = gained(state, state.arm, gain, set_to)
    return replace(state, arm=adaptive_external(state, rng, set_to))


def adaptive_external(state: ExternalGains, rng: Random, set_to: AdaptiveExternal) -> int:
    """The next arm: a draw among arms without a trial, then the largest mean gain + exploration
    gain_max d, of equal ones the smallest. d = sqrt(2 log(trials) / its trials) (`ucb`), or a
    normal draw / sqrt(its trials) (`thompson`)."""
    _fits(state, set_to)
    new = [arm for arm, trials in enumerate(state.trials) if trials < TRIALS_MIN]
    if new:
        return rng.choice(new)
    width = set_to.exploration * set_to.gain_max
    total = max(1.0, sum(state.trials))
    scores = []
    for trials, gained in zip(state.trials, state.sums, strict=True):
        doubt = (
            sqrt(2.0 * log(total) / trials)
            if set_to.rule == "ucb"
            else rng.gauss(0.0, 1.0) / sqrt(trials)
        )
        scores.append(gained / trials + width * doubt)
    return scores.index(max(scores))


def gained(state: ExternalGains, arm: int, gain: float, set_to: AdaptiveExternal) -> ExternalGains:
    """The state after this arm brought `gain`, cut to +-`gain_max`."""
    _fits(state, set_to)
    if not 0 <= arm <= set_to.levels:
        raise ValueError(f"arm {arm}: not within 0 and {set_to.levels}")
    finite([gain], "gain")
    kept = min(max(gain, -set_to.gain_max), set_to.gain_max)
    trials = [each * set_to.decay for each in state.trials]
    sums = [each * set_to.decay for each in state.sums]
    trials[arm] += 1.0
    sums[arm] += kept
    return replace(state, trials=tuple(trials), sums=tuple(sums))


def _fits(state: ExternalGains, set_to: AdaptiveExternal) -> None:
    if not len(state.trials) == len(state.sums) == set_to.levels + 1:
        raise ValueError(f"{len(state.trials)} arms where there are {set_to.levels + 1}")
