"""Reports among nodes on the difficulty of tasks, and how far they are believed.

Reports are merged in any order, and twice does no harm: of each producer the newest report on a
bucket counts. A full map gives up the oldest reports of the voice that has most, which is as
independent of the order; so it is no `BoundedTable`, for which that matters. Pure.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from node.methods.control.vade import SuccessCounts
from swarm.rollouts import Counters

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
    """Reports by bucket. A producer's voice is the same in all of its reports."""

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
        """Take reports in; those without tries say nothing."""
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
        """In whose name a producer's reports count; empty: there is none."""
        return _voice(self._producers.get(producer, {}))

    def expire(self, now_s: float) -> None:
        """Forget reports whose groups have expired."""
        every = [each for of_one in self._producers.values() for each in of_one.values()]
        for report in every:
            if report.expires_at_s <= now_s:
                self._forget(report)

    def of(self, bucket: int, others_max: float) -> SuccessCounts:
        """All other nodes' reports on a bucket as counts: `others_max` rollouts at most, of which
        the median voice's share are right.

        A voice's rate is the median of those of its producers, and it weighs as many rollouts as
        they had, as each of them does within its voice: at most `VOICE_MAX`, and no more than the
        median voice has, for rollouts are cheap to state. So who is fewer than half of the voices
        moves the rate no further than to what another voice said, unless most of these have little
        to tell, and all liars together bring no more than `others_max` rollouts.
        """
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
    """In whose name a producer's reports count."""
    return next((each.voice for each in reports.values()), "")


def _median(said: list[tuple[float, float]]) -> tuple[float, float]:
    """The weighted median of (rate, weight) in the order of rates, and the weight of all. Where
    exactly half lies on each side, the middle between the two."""
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
    """The reports in a group's counters."""
    return [
        TriesReport(created_at_s, round_, producer, bucket, tries, successes, expires_at_s, voice)
        for bucket, tries, successes in counters
    ]
