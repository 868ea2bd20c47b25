"""Checks that tokens are samples of the policy that a worker names, with its log-probs. Pure.

Another model, an older version or invented numbers differ from the log-probs of the named weights.
A cheaper generator, an edited text or a lower temperature shifts a mean: over tokens that a policy
sampled, log-prob + entropy is zero on average, with a known spread.

One group shows a large lie (`fault_of`), many groups of one worker a small one (`Record`). Each
group multiplies a stake by a factor with a mean of about 1 at most if the worker is honest; a stake
never falls below 1. So it reaches X at most once in X honest groups, however these are chosen
(Ville's inequality for e-detectors, arXiv 2203.03532), where the mean is at most 1.
"""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import exp, fsum, isnan, nan, sqrt
from pathlib import Path
from typing import Final

import trio

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.train.process import TrainerProcess
from node.verify.held_out import HeldOutGuard
from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.leases.lease_table import Lease
from swarm.rollouts import Completion, RolloutGroup, version_spans

DISTANCE_MAX: Final = 0.05  # mean |claimed - scored|; other dtypes and kernels make 0.001 to 0.02
KL_MAX: Final = 0.01  # from the claimed policy to the scored one, by the estimator w - 1 - log w
EVIDENCE_MAX: Final = 10.0  # in nats: such a group is one of 11,000 honest ones, at most
RARE_MAX: Final = 8.0  # a token counts as rarer than the mean by so many nats at most
ROUNDING: Final = 0.01  # of a log-prob, where a policy has no choice
LOG_RATIO_MAX: Final = 20.0
TEMPERATURE_MIN: Final = 0.25  # below it rounding hides what the checks look for

FULL: Final = "float32"
NOISE_KL: Final = {FULL: 1e-6, "bfloat16": 1e-3}
"""KL (by w - 1 - log w, nats a token) that rounding in a precision adds between a scorer and an
honest engine at temperature 1; half of all honest groups have less. Measured for bf16: 4e-6 where a
tiny policy is nearly sure, 1e-4 where it is not, 7.7e-4 for SmolLM2."""
NOISE_KL_OTHERS: Final = 2e-3  # of engines with quantised weights, and of those that say nothing

ALARM_STAKE: Final = 3e5  # three stakes, and at most one false alarm in 10^5 honest groups
KL_BETS: Final = ((1.0, 0.4), (3.0, 1.4), (math.inf, 2.4))
"""(at most so many times the noise, factor): if half of all groups stay below 1 and nine tenths
below 3, the mean factor is 0.5 x 0.4 + 0.4 x 1.4 + 0.1 x 2.4 = 1."""
DEVIATION_BET: Final = 0.5
DEVIATION_SPREAD: Final = 1.5  # of a squared deviation that is taken for granted; 1 in theory
DEVIATION_MAX: Final = 4.0


@dataclass(frozen=True, slots=True)
class ClaimedToken:
    """One token under the named policy, in nats. `mean` and `variance` are those of a sample's
    log-prob; nan if unknown."""

    behaviour: float
    scored: float
    mean: float = nan  # minus the entropy
    variance: float = nan


@dataclass(frozen=True, slots=True)
class Fit:
    """Agreement of tokens with the policy that their worker names."""

    tokens: int
    distance: float
    kl: float
    deviations: float  # signed: above zero, the tokens are likelier than samples are
    likelier: float = 0.0  # evidence that they are, in nats: minus the log of how probable it was
    rarer: float = 0.0  # that they are less likely


def fit_of(samples: Sequence[ClaimedToken]) -> Fit:
    """Over all tokens of a group; there is at least one."""
    count = len(samples)
    logs = [max(-LOG_RATIO_MAX, min(LOG_RATIO_MAX, s.scored - s.behaviour)) for s in samples]
    known = [sample for sample in samples if not isnan(sample.variance)]
    spread = sqrt(fsum(sample.variance for sample in known))
    excess = fsum(sample.scored - sample.mean for sample in known)
    variance = spread**2 + ROUNDING**2 * len(known)
    surest = max((-sample.mean for sample in known), default=0.0)
    rare = fsum(min(RARE_MAX, sample.mean - sample.scored) for sample in known)
    if spread == 0.0:  # nothing to choose: any other token is impossible
        spread = DISTANCE_MAX * count
    return Fit(
        tokens=count,
        distance=fsum(abs(each) for each in logs) / count,
        kl=fsum(exp(each) - 1.0 - each for each in logs) / count,
        deviations=excess / spread,
        likelier=evidence(excess, variance, max(surest, ROUNDING)),
        rarer=evidence(rare, variance, RARE_MAX),
    )


def evidence(excess: float, variance: float, most: float) -> float:
    """Minus the log of a bound on the probability that numbers add up to `excess` or more. Each is
    at most `most`, has a mean of at most 0 given those before it, and their variances add up to at
    most `variance` > 0 (Bennett's inequality; for martingales, Freedman 1975).

    This holds for log-prob minus mean, at most the entropy of a token, and for mean minus log-prob
    once that is cut: else a sure policy's one rare token would outweigh all others.
    """
    if excess <= 0.0:
        return 0.0
    ratio = excess * most / variance
    return variance / most**2 * ((1.0 + ratio) * math.log1p(ratio) - ratio)


def _scale(temperature: float) -> float:
    return min(1.0, max(temperature, TEMPERATURE_MIN))


def fault_of(fit: Fit, temperature: float = 1.0) -> str | None:
    """One line on why the tokens cannot come from the named policy; None if they can.

    A temperature below 1 widens differences of logits and their rounding: the limit of the mean
    grows with its inverse, that of the KL with the square. Above 1 and below `TEMPERATURE_MIN` the
    limits stay."""
    scale = _scale(temperature)
    if fit.distance > DISTANCE_MAX / scale or fit.kl > KL_MAX / scale**2:
        return (
            f"log-probs are {fit.distance:.3f} off in the mean over {fit.tokens} tokens"
            f" (KL {fit.kl:.4f})"
        )
    if max(fit.likelier, fit.rarer) > EVIDENCE_MAX:
        much = "likelier" if fit.likelier > fit.rarer else "less likely"
        return (
            f"tokens are {much} than samples by {abs(fit.deviations):.1f} standard errors"
            f" over {fit.tokens} tokens"
        )
    return None


@dataclass(slots=True)
class Record:
    """The evidence against one worker, over all of its groups that were scored again."""

    off: float = 1.0  # stake: its log-probs are not those of the versions that it claims
    likelier: float = 1.0  # its tokens are likelier than samples, as of a lower temperature
    rarer: float = 1.0  # they are less likely
    groups: int = 0  # since a stake was last at its least, at most

    def fault_after(self, fit: Fit, noise_kl: float, temperature: float = 1.0) -> str | None:
        """Count another group; `noise_kl` is the usual KL between engine and scorer. Returns a line
        on why the worker's groups together cannot be what they claim, or None. A fault stands until
        honest groups have brought the stakes down."""
        noise = noise_kl / _scale(temperature) ** 2
        z = max(-DEVIATION_MAX, min(DEVIATION_MAX, fit.deviations))
        self.off = _staked(self.off, kl_factor(fit.kl / noise))
        self.likelier = _staked(self.likelier, deviation_factor(z))
        self.rarer = _staked(self.rarer, deviation_factor(-z))
        most = max(self.off, self.likelier, self.rarer)
        self.groups = self.groups + 1 if most > 1.0 else 0
        if most < ALARM_STAKE:
            return None
        if most == self.off:
            return (
                f"log-probs are off by more than rounding explains over {self.groups} groups"
                f" (KL {fit.kl:.1e} in the last, {noise:.1e} is usual)"
            )
        much = "likelier" if most == self.likelier else "less likely"
        return f"tokens are {much} than samples over {self.groups} groups together"


def noise_between(engine: str, scorer: str) -> float:
    """KL that an engine and a scorer of these precisions differ by; see `NOISE_KL`."""
    return sum(NOISE_KL.get(each, NOISE_KL_OTHERS) for each in (engine, scorer))


def kl_factor(times_noise: float) -> float:
    """Stake factor of a group's KL, given in units of the engine's noise."""
    return next(factor for most, factor in KL_BETS if not times_noise > most)


def deviation_factor(z: float) -> float:
    """Stake factor of a group's deviation in standard errors. Its mean is at most 1 if these are
    normal, with mean 0 and a spread up to `DEVIATION_SPREAD`, or off by at most an eighth. A sure
    policy's few rare tokens make it up to 1.05: then the largest known rate of alarms is one in
    750,000 groups a stake, where `ALARM_STAKE` promises 300,000."""
    return exp(DEVIATION_BET * z - DEVIATION_SPREAD * DEVIATION_BET**2 / 2)


def _staked(stake: float, factor: float) -> float:
    """At least 1, and at most so much that a few honest groups bring it below an alarm."""
    return min(max(1.0, stake * factor), 2 * ALARM_STAKE)


# A learner's checks of a worker's group: rewards by its own verifier, and log-probs by a process
# that holds the version that the group names.

VersionDirectory = Callable[[int], Path | None]
RECORDS_MAX = 4096  # workers whose evidence is kept
Columns = list[tuple[float, ...]]  # of each completion: log-probs, means, variances


class Scorer:
    """A process that scores tokens under one version at a time. It starts at its first use, and
    again after it died."""

    def __init__(self, spec: TrainerSpec, directory: Path, find: VersionDirectory) -> None:
        """`directory`: where its log goes. `find`: where the files of a version are."""
        self._process = TrainerProcess(spec, directory)
        self._find = find
        self._lock = trio.Lock()
        self._loaded: int | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, spec: TrainerSpec, directory: Path, find: VersionDirectory
    ) -> AsyncIterator["Scorer"]:
        """A scorer whose process ends with the block."""
        scorer = cls(spec, directory, find)
        try:
            yield scorer
        finally:
            await scorer._process.close()

    @property
    def precision(self) -> str:
        """The precision that it has computed in; full before its first use."""
        return self._process.maker.precision or FULL

    async def score(self, version: int, group: TrainingGroup) -> Columns | None:
        """Log-probs, means and variances of a group's tokens under a version; None if its files are
        gone. `ChildFailed` or `ConfigError` if that could not be found out."""
        async with self._lock:
            directory = self._find(version)
            if directory is None:
                return None
            # The caller may run out of time meanwhile; the next one finds the version loaded.
            with trio.CancelScope(shield=True):
                if not self._process.alive:
                    self._loaded = None
                    await self._process.start()
                if self._loaded != version:
                    self._loaded = None
                    await self._process.load(directory, version)
                    self._loaded = version
            return (await self._process.score([group]))[0]


class LearnerChecks:
    """`swarm.leases.intake.Checks` of a node."""

    def __init__(
        self,
        guard: HeldOutGuard,
        scorer: Scorer | None,
        held: Callable[[], Sequence[int]] = tuple,
        temperature: float = 1.0,
    ) -> None:
        """Without a scorer only rewards are checked. `held`: the newest published versions without
        gaps; empty: unknown. `temperature`: of sampling and scoring."""
        self._guard = guard
        self._scorer = scorer
        self._held = held
        self._temperature = temperature
        self.doubts: dict[PeerId, str] = {}  # workers whose groups together look wrong, and why
        self._records: dict[PeerId, Record] = {}  # of workers, the one looked at last at the end

    async def reward(self, lease: Lease, group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        self._check_published(group)
        assignment = (await self._guard.leased(lease.stream, [group.task.index]))[0]
        return await self._guard.verify(group, assignment.task)

    def _check_published(self, group: RolloutGroup) -> None:
        """A version that was never published made no token; its claimant has an older one."""
        held = self._held()
        for completion in group.completions:
            for version, _ in version_spans(completion):
                if held and version > min(held) and version not in held:
                    raise RemoteProtocolError(
                        Reject.FALSE_LOGPROBS, f"version {version} was never published"
                    )

    async def rescore(self, group: RolloutGroup, prompt: str) -> str | None:
        if self._scorer is None:
            return ""
        as_given = TrainingGroup(
            prompt, group.completions, (1.0,) * len(group.completions), own_tokens=True
        )
        versions = {run[0] for each in group.completions for run in version_spans(each)}
        columns: dict[int, Columns] = {}
        for version in sorted(versions):
            try:
                found = await self._scorer.score(version, as_given)
            except (ChildFailed, ConfigError):
                return ""  # counted as not found out; the process starts again at the next group
            if found is None:
                return ""
            columns[version] = found
        samples = [
            sample
            for at, completion in enumerate(group.completions)
            for sample in _samples(completion, {v: c[at] for v, c in columns.items()})
        ]
        if not samples:
            return ""
        fit = fit_of(samples)
        fault = fault_of(fit, self._temperature)
        return fault or self._fault_of_all(group, fit, self._scorer.precision)

    def _fault_of_all(self, group: RolloutGroup, fit: Fit, precision: str) -> str | None:
        """The fault that a worker's groups show together. It counts against the worker only if
        engine and scorer both compute in full precision. At other precisions the spread of honest
        workers is not measured well enough, and the fault becomes a note."""
        worker = group.producer
        noise = noise_between(group.precision, precision)
        fault = self._record_of(worker).fault_after(fit, noise, self._temperature)
        self.doubts.pop(worker, None)
        if fault is None or group.precision == precision == FULL:
            return fault
        self.doubts[worker] = fault
        return None

    def _record_of(self, worker: PeerId) -> Record:
        record = self._records.pop(worker, None) or Record()
        self._records[worker] = record
        while len(self._records) > RECORDS_MAX:
            oldest = next(iter(self._records))
            del self._records[oldest]
            self.doubts.pop(oldest, None)
        return record


def _samples(completion: Completion, columns: dict[int, tuple[float, ...]]) -> list[ClaimedToken]:
    """The tokens of a completion, each under the version that it claims; none where they could not
    be scored."""
    count = len(completion.token_ids)
    if any(len(column) != 3 * count for column in columns.values()):
        return []
    samples, at = [], 0
    for version, tokens in version_spans(completion):
        column = columns[version]
        samples += [
            ClaimedToken(
                completion.logprobs[place],
                column[place],
                column[count + place],
                column[2 * count + place],
            )
            for place in range(at, at + tokens)
        ]
        at += tokens
    return samples
