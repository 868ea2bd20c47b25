"""The policy of a simulated learner: a scripted one that takes the time it is told to, and whose
weights may be exchanged in the middle of a generation."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan, pi, sin
from pathlib import Path
from random import Random
from typing import Final

import trio

from node.engines.scripted import TOKENIZER, ScriptedPolicy
from node.interfaces.engine import Sampling, Serving
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.interfaces.trainer_spec import Precision
from node.run.claims import Columns, VersionDirectory
from node.run.learner import FIRST_VERSION
from swarm.rollouts import Completion, version_spans
from swarm.weights.version_store import version_of

Told = Callable[[Sequence[TrainingGroup], int], None]
STATE_FILE: Final = "timed.json"
SEGMENTS: Final = 8  # of one generation, between which weights may be exchanged


class KeptPolicy(ScriptedPolicy):
    """A scripted policy that is saved and restored without threads."""

    async def save(self, directory: Path) -> None:
        await trio.lowlevel.checkpoint()
        (directory / STATE_FILE).write_text(json.dumps([self.skill, self.version]))

    def restore(self, directory: Path) -> None:
        """Go on from what was saved."""
        self.skill, self.version = json.loads((directory / STATE_FILE).read_text())

    async def roll_back(self, directory: Path) -> int:
        await trio.lowlevel.checkpoint()
        version = self.version
        self.restore(directory)
        self.version = version + 1
        return self.version


class TimedTrainer(KeptPolicy):
    """A scripted trainer whose versions weigh what they are told to."""

    def __init__(self, train_s: float, version_bytes: int, tell: Told | None = None) -> None:
        """`tell` learns of each batch, and of the version that it is trained on."""
        super().__init__(generate_s=0.0, train_s=train_s)
        self.version = FIRST_VERSION
        self._version_bytes = version_bytes
        self._tell = tell

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        if self._tell is not None:
            self._tell(groups, self.version)
        return await super().train(groups)

    async def export(self, directory: Path, precision: Precision = "float32") -> None:
        """Write noise, which no delta makes smaller."""
        await trio.lowlevel.checkpoint()
        (directory / "skill.json").write_text(str(self.skill))
        noise = Random(f"weights/{self.version}").randbytes(self._version_bytes)
        tensor = {"dtype": "U8", "shape": [len(noise)], "data_offsets": [0, len(noise)]}
        header = json.dumps({"noise": tensor}).encode()
        content = len(header).to_bytes(8, "little") + header + noise
        (directory / "model.safetensors").write_bytes(content)


class TimedEngine(ScriptedPolicy):
    """A scripted engine that takes a time for each group, and whose weights may be exchanged in the
    middle of it: each token says which version made it."""

    def __init__(self, group_s: float) -> None:
        super().__init__(generate_s=0.0)
        self.group_s = group_s
        self.made: Callable[[str, int], None] = lambda prompt, version: None
        self.newest: Callable[[], int] = lambda: self.version  # that was heard of
        self.has_logprobs = False  # of versions; else they are any numbers

    @property
    def said_version(self) -> int:
        """The version that the worker reports."""
        return self.version

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        versions = []
        for _ in range(SEGMENTS):
            versions.append(self.version)
            await trio.sleep(self.group_s * len(prompts) / SEGMENTS)
        groups = await super().generate(prompts, completions_each, sampling, seed)
        for prompt in prompts:
            self.made(prompt, min(versions))
        return [
            tuple(self._told(prompt, each, versions) for each in group)
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _told(self, prompt: str, completion: Completion, versions: Sequence[int]) -> Completion:
        """A completion as it is handed in."""
        completion = _by_versions(completion, versions)
        return with_logprobs(prompt, completion) if self.has_logprobs else completion

    async def load(self, weights: Path, policy_version: int) -> None:
        await trio.lowlevel.checkpoint()
        self.take(policy_version, float((weights / "skill.json").read_text()))

    def take(self, version: int, skill: float) -> None:
        """Generate with these weights from now on."""
        self.version, self.skill = version, skill


def _by_versions(completion: Completion, versions: Sequence[int]) -> Completion:
    """The completion with its tokens spread over the segments of its generation."""
    count = len(completion.token_ids)
    runs: list[tuple[int, int]] = []
    for at in range(count):
        version = versions[at * len(versions) // count]
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + 1)
        else:
            runs.append((version, 1))
    spans = tuple(runs) if len(runs) > 1 else ()
    return replace(completion, policy_version=min(versions), spans=spans)


def logprob(version: int, prompt: str, place: int, token: int) -> float:
    """Log-prob of a token under a version of the scripted policy. It drifts by 0.02 a version on
    average: a few versions apart is more than numerics explain (`node.run.claims`)."""
    rng = Random(f"{prompt}/{place}/{token}")
    return -0.6 - rng.random() + 0.5 * sin(0.06 * version + 2.0 * pi * rng.random())


def with_logprobs(prompt: str, completion: Completion) -> Completion:
    """The completion with the log-probs of the versions that it names."""
    versions = [version for version, count in version_spans(completion) for _ in range(count)]
    told = tuple(
        logprob(version, prompt, place, token)
        for place, (version, token) in enumerate(zip(versions, completion.token_ids, strict=True))
    )
    return replace(completion, logprobs=told)


class ScriptedScorer:
    """Scores tokens as `logprob` does, under versions that are kept."""

    def __init__(self, find: VersionDirectory) -> None:
        self._find = find

    async def score(self, version: int, group: TrainingGroup) -> Columns | None:
        """Log-probs without means and variances."""
        await trio.lowlevel.checkpoint()
        if self._find(version) is None:
            return None
        columns: Columns = []
        for each in group.completions:
            count = len(each.token_ids)
            scored = tuple(
                logprob(version, group.prompt, place, token)
                for place, token in enumerate(each.token_ids)
            )
            columns.append((*scored, *(nan,) * (2 * count)))
        return columns


class TimedHost:
    """The engine of a worker, as `node.hosting.policy_host.WorkerEngine`."""

    paused_s: float | None = None
    starting = False

    def __init__(self, engine: TimedEngine, loaded: Callable[[int], None]) -> None:
        """`loaded` is told of each version that is served from now on."""
        self._engine = engine
        self._loaded = loaded
        self.version = 0
        self.serving: Serving | None = None
        self.ready = trio.Event()

    async def load(self, directory: Path) -> None:
        await self._engine.load(directory, version_of(directory))
        self._note(version_of(directory))

    def take(self, version: int) -> None:
        """Serve a version that has no files."""
        self._engine.take(version, self._engine.skill)
        self._note(version)

    def _note(self, version: int) -> None:
        self.version = version
        self.serving = Serving(self._engine, TOKENIZER, lambda: self._engine.said_version)
        self._loaded(version)
        self.ready.set()

    async def restart(self) -> None:
        await trio.lowlevel.checkpoint()
        self.ready.set()

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()
        self.ready = trio.Event()
