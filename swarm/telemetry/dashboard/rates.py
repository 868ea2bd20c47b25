"""From counters to rates: what each node did in its last seconds, by its own clock. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from swarm.telemetry import metrics as m
from swarm.telemetry.fleet_view import plausible
from swarm.telemetry.reports import NodeReport

WINDOW_S: Final = 5.0  # a rate is over at least this much, or one interval
SAMPLES_MAX: Final = 16  # of one node
RATE_INTERVAL_S_MIN: Final = 0.1  # between two reports; of what is shorter no rate is made
RATE_MAX: Final = 1e15  # a second, of anything; what is above it nobody measured
COUNTERS: Final = (m.BYTES_IN_TOTAL, m.BYTES_OUT_TOTAL, m.ACCEPTED_TOTAL, m.GENERATED_TOKENS_TOTAL)
REJECTED: Final = m.REJECTED_TOTAL

Sample = tuple[float, dict[str, float]]


class Rates:
    """Keeps a few samples of each node that is watched, and forgets the others."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, int, deque[Sample]]] = {}

    def look(self, reports: Iterable[NodeReport]) -> dict[str, dict[str, float]]:
        """Rates a second of each node by counter; a node of one report has none."""
        kept: dict[str, tuple[str, int, deque[Sample]]] = {}
        for report in reports:
            instance, sequence, samples = self._kept.get(report.peer_id, ("", -1, deque()))
            if instance != report.instance:
                samples, sequence = deque(maxlen=SAMPLES_MAX), -1
            if report.sequence > sequence:
                samples.append((report.sent_at_s, counters(report)))
                _forget_old(samples)
            kept[report.peer_id] = (report.instance, report.sequence, samples)
        self._kept = kept
        return {peer: _rates(samples) for peer, (_, _, samples) in kept.items()}


def counters(report: NodeReport) -> dict[str, float]:
    """Those of a report that rates are made of."""
    found = {name: plausible(report.metrics[name]) for name in COUNTERS if name in report.metrics}
    return found | {REJECTED: total(report.labelled.get(REJECTED, {}))}


def total(values: Mapping[str, float]) -> float:
    """Over all values of a label."""
    return sum(map(plausible, values.values()))


def _forget_old(samples: deque[Sample]) -> None:
    """Keep what covers the window and no more, so that a rate is that of now."""
    while len(samples) > 2 and samples[-1][0] - samples[1][0] >= WINDOW_S:
        samples.popleft()


def _rates(samples: deque[Sample]) -> dict[str, float]:
    if len(samples) < 2:
        return {}
    (began_s, before), (ended_s, after) = samples[0], samples[-1]
    elapsed_s = ended_s - began_s
    if elapsed_s < RATE_INTERVAL_S_MIN:  # its clock went back, or it made the two up
        return {}
    # A counter never falls while a node runs; one that does is not believed.
    return {
        name: min(RATE_MAX, (value - before[name]) / elapsed_s)
        for name, value in after.items()
        if name in before and value >= before[name]
    }
