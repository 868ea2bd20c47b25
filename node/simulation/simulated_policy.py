"""The scripted policy of a simulated learner: it takes a set time, and weights may be swapped in
the middle of a generation."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Final

import trio

from node.engines.scripted import TOKENIZER, ScriptedPolicy
from node.interfaces.engine import Sampling, Serving
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.interfaces.trainer_spec import Precision
from node.run.learner import FIRST_VERSION
from swarm.rollouts import Completion
from swarm.weights.version_store import version_of

OnBatch = Callable[[Sequence[TrainingGroup], int], None]
STATE_FILE: Final = "timed.json"
SEGMENTS: Final = 8  # of one generation; weights may be swapped between two


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
    """A scripted trainer whose versions have a set size."""

    def __init__(self, train_s: float, version_bytes: int, on_batch: OnBatch) -> None:
        """`on_batch` gets each batch, and the version that it is trained on."""
        super().__init__(generate_s=0.0, train_s=train_s)
        self.version = FIRST_VERSION
        self._version_bytes = version_bytes
        self._on_batch = on_batch

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self._on_batch(groups, self.version)
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
    """A scripted engine that takes `group_s` seconds for each group. Each token names the version
    that made it."""

    def __init__(self, group_s: float) -> None:
        super().__init__(generate_s=0.0)
        self.group_s = group_s

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        versions = []
        for _ in range(SEGMENTS):
            versions.append(self.version)
            await trio.sleep(self.group_s * len(prompts) / SEGMENTS)
        groups = await super().generate(prompts, completions_each, sampling, seed)
        return [
            tuple(self.reported(prompt, each, versions) for each in group)
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def reported(self, prompt: str, completion: Completion, versions: Sequence[int]) -> Completion:
        """The completion as it is submitted: its tokens spread over the segments of its
        generation."""
        count = len(completion.token_ids)
        of_token = [versions[at * len(versions) // count] for at in range(count)]
        spans = tuple((version, len(list(same))) for version, same in groupby(of_token))
        return replace(
            completion, policy_version=min(versions), spans=spans if len(spans) > 1 else ()
        )

    async def load(self, weights: Path, policy_version: int) -> None:
        await trio.lowlevel.checkpoint()
        self.version, self.skill = policy_version, float((weights / "skill.json").read_text())


class TimedHost:
    """The engine of a worker, as `node.hosting.policy_host.WorkerEngine`."""

    paused_s: float | None = None
    starting = False

    def __init__(self, engine: TimedEngine) -> None:
        self.engine = engine
        self.version = 0
        self.serving: Serving | None = None
        self.ready = trio.Event()

    async def load(self, directory: Path) -> None:
        await self.engine.load(directory, version_of(directory))
        self.serve(version_of(directory))

    def serve(self, version: int) -> None:
        """Serve a version that the engine has."""
        self.version = version
        self.serving = Serving(self.engine, TOKENIZER, lambda: self.engine.version)
        self.ready.set()

    async def restart(self) -> None:
        await trio.lowlevel.checkpoint()
        self.ready.set()

    async def stop(self) -> None:
        await trio.lowlevel.checkpoint()
        self.ready = trio.Event()
