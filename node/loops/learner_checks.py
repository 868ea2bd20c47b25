"""A learner's checks of a worker's group: rewards by its own verifier, and log-probs by a process
that holds the version that the group names."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import trio

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.loops.claims import FULL, ClaimedToken, Fit, Record, fault_of, fit_of, noise_between
from node.training.process import TrainerProcess
from node.verification.held_out import HeldOutGuard
from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.leasing.leases import Lease
from swarm.rollouts import Completion, RolloutGroup, version_spans

VersionDirectory = Callable[[int], Path | None]
RECORDS_MAX = 4096  # workers whose evidence is kept
Columns = list[tuple[float, ...]]  # of each completion: log-probs, means, variances


class Scores(Protocol):
    """Scores tokens under versions of the policy."""

    async def score(self, version: int, group: TrainingGroup) -> Columns | None:
        """Log-probs, means and variances of a group's tokens under a version; None if its files are
        gone.

        Raises:
            ChildFailed, ConfigError: it could not be found out.
        """
        ...


class Scorer:
    """A process that scores tokens under one version of the policy at a time. It starts at its
    first use; one that dies is started again at the next."""

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

    async def score(self, version: int, group: TrainingGroup) -> Columns | None:
        """Log-probs, means and variances of a group's tokens under a version; None if its files are
        gone.

        Raises:
            ChildFailed, ConfigError: the process failed, or does not take the version.
        """
        async with self._lock:
            directory = self._find(version)
            if directory is None:
                return None
            # Who asked may run out of time meanwhile: the next one finds it done, or it never is.
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
    """`swarm.leasing.intake.Checks` of a node."""

    def __init__(
        self,
        guard: HeldOutGuard,
        scorer: Scores | None,
        held: Callable[[], Sequence[int]] = tuple,
        temperature: float = 1.0,
        precision: str = FULL,
    ) -> None:
        """Without a scorer nothing is looked at more closely. `held`: the newest versions that were
        published, all from some one on; empty: nothing is known of them. `temperature`: at which
        the run samples, and the scorer scores. `precision`: what the scorer computes in."""
        self._guard = guard
        self._scorer = scorer
        self._held = held
        self._temperature = temperature
        self._precision = precision
        self.doubts: dict[PeerId, str] = {}  # workers whose groups together look wrong, and why
        self._records: dict[PeerId, Record] = {}  # of workers, the one looked at last at the end

    async def reward(self, lease: Lease, group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        self._check_published(group)
        assignment = (await self._guard.leased(lease.stream, [group.task.index]))[0]
        return await self._guard.verify(group, assignment.task)

    def _check_published(self, group: RolloutGroup) -> None:
        """A version that never left the learner made no token: who claims one has an older one,
        and there are no files by which that would show."""
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
        return fault_of(fit, self._temperature) or self._fault_of_all(group, fit)

    def _fault_of_all(self, group: RolloutGroup, fit: Fit) -> str | None:
        """The fault that a worker's groups show together. It counts against the worker only if
        engine and scorer both compute in full precision. At other precisions the spread of honest
        workers is not measured well enough, and the fault becomes a note."""
        worker = group.producer
        noise = noise_between(group.precision, self._precision)
        fault = self._record_of(worker).fault_after(fit, noise, self._temperature)
        self.doubts.pop(worker, None)
        if fault is None or group.precision == self._precision == FULL:
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
