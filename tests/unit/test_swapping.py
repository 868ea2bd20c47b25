"""A version comes to a sampling engine, from files on disk, through the two phases of a swap."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from node.hosting.engine_hosts import HostedEngine
from node.interfaces.engine import Sampling
from node.interfaces.trainer_spec import TrainerSpec
from node.system.pause_gate import Gate
from node.train.process import SEGMENT_STEPS, InProcessTrainer
from swarm.errors import LocalProtocolError
from swarm.rollouts import Completion, version_spans
from swarm.weights import manifest as manifest_wire
from swarm.weights.hot_swap import Applied, Made, apply_version
from swarm.weights.manifest import Artifact, ChunkRef, Manifest, open_weights
from swarm.weights.version_store import Versions, version_of
from tests import weights_samples
from tests.support import run
from tests.unit.training_support import open_policy, qwen_directory, reference_logprobs

LONG = Sampling(max_new_tokens=5 * SEGMENT_STEPS)
SHARDS = "40KB"  # so that a version has several files of tensors


def manifest_of(directory: Path, version: int) -> Manifest:
    artifact = Artifact(None, None, (ChunkRef(bytes(32), 100),))
    manifest = weights_samples.manifest_of(version, (artifact,), {})
    return replace(manifest, tensors=open_weights(directory).specs)


class Segmented(InProcessTrainer):
    """A trainer that tells when the second segment of a generation begins."""

    def __init__(self, model: Path) -> None:
        super().__init__(TrainerSpec(str(model), device="cpu", threads=1))
        self.steps = 0
        self.in_the_middle = trio.Event()

    async def _call(self, op: str, *arguments: Any) -> Any:
        self.steps += 1
        if self.steps == 3:  # to begin, and the first segment
            self.in_the_middle.set()
        return await super()._call(op, *arguments)


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """A thread would take as long as it likes, and the generation would be over."""
    return function(*arguments)


class Worker:
    """An engine that serves version 1; version 2 is ready to be made."""

    def __init__(self, directory: Path) -> None:
        self.versions = Versions(directory / "versions")
        self.first = self._add(directory / "a", 1)
        self.versions.make_current(1)
        self.engine = Segmented(self.first)
        self.next = directory / "b"

    def _add(self, scratch: Path, version: int) -> Path:
        staged = self.versions.staging(version)
        policy = open_policy(qwen_directory(scratch, seed=version))
        policy.model.save_pretrained(staged, max_shard_size=SHARDS)
        policy.tokenizer.save_pretrained(staged)
        return self.versions.commit(
            manifest_wire.encode_manifest(manifest_of(staged, version))
        ).directory

    async def apply(self, truncate: bool = False) -> Applied:
        async def make() -> Made:
            directory = self._add(self.next, 2)
            if truncate:
                *_, last = sorted(directory.glob("*.safetensors"))
                last.write_bytes(last.read_bytes()[:-100])
            return Made(2, 0.0, 0.0, 0, 0)

        return await apply_version(
            2, make, self.versions, HostedEngine(self.engine, ""), run_sync=inline
        )

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.engine._core.policy.model.state_dict()
        return {name: value.clone() for name, value in state.items()}


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


@pytest.mark.slow
def test_a_generation_goes_on_over_a_swap(worker):
    async def body() -> tuple[list[tuple[Completion, ...]], Applied]:
        await worker.engine.load(worker.first, 1)
        groups: list[tuple[Completion, ...]] = []

        async def generate() -> None:
            groups.extend(await worker.engine.generate(["1+1="], 8, LONG, 3))

        worker.engine.steps = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await worker.engine.in_the_middle.wait()
            applied = await worker.apply()
        return groups, applied

    [group], applied = run(body)
    assert (applied.serving, applied.failure) == (2, None)
    assert any(completion.spans for completion in group)
    held = {local.version: local.directory for local in worker.versions.held()}
    for completion in group:
        begin = 0
        for version, count in version_spans(completion):
            policy = open_policy(held[version])
            expected = reference_logprobs(policy, "1+1=", completion, LONG)
            end = begin + count
            assert completion.logprobs[begin:end] == pytest.approx(expected[begin:end], abs=1e-4)
            begin = end


def test_a_version_with_a_torn_file_replaces_not_one_tensor(worker):
    async def body() -> Applied:
        await worker.engine.load(worker.first, 1)
        before = worker.weights()
        loaded: list[Any] = []
        load = worker.engine.load

        async def watched(weights: Path, policy_version: int) -> None:
            try:
                await load(weights, policy_version)
            finally:
                loaded.append((policy_version, worker.weights()))

        worker.engine.load = watched
        applied = await worker.apply(truncate=True)
        assert [version for version, _ in loaded] == [2, 1]
        for _, after in loaded:
            assert all(torch.equal(after[name], value) for name, value in before.items())
        return applied

    applied = run(body)
    assert applied.serving == 1
    assert applied.failure is not None
    assert "did not load version 2: ChildFailed: trainer, load: " in applied.failure
    [[completion]] = run(worker.engine.generate, ["1+1="], 1, LONG, 3)
    assert version_spans(completion) == ((1, len(completion.token_ids)),)


def test_a_directory_says_which_version_it_is(tmp_path):
    assert version_of(tmp_path / "v00000012") == 12
    for name in ("v12", "00000012", "v00000012.partial"):
        with pytest.raises(LocalProtocolError, match="not named as a version"):
            version_of(tmp_path / name)


def test_a_gate_lets_out_what_is_inside_and_nothing_in():
    async def body() -> list[str]:
        gate, said, leave = Gate(), [], trio.Event()

        async def inside() -> None:
            async with gate.passing():
                await leave.wait()
                said.append("out")

        async def pause(name: str) -> None:
            await gate.pause()
            said.append(name)

        async def late() -> None:
            async with gate.passing():
                said.append("in")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(inside)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(pause, "paused")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(pause, "paused")
            nursery.start_soon(late)
            await trio.testing.wait_all_tasks_blocked()
            assert said == []
            leave.set()
            await trio.testing.wait_all_tasks_blocked()
            assert said == ["out", "paused", "paused"]
            gate.resume()
        return said

    assert run(body) == ["out", "paused", "paused", "in"]


def test_a_pause_that_is_cancelled_stays_until_it_is_ended():
    async def body() -> None:
        gate = Gate()
        async with gate.passing():
            with trio.move_on_after(0):
                await gate.pause()
        with trio.move_on_after(0) as scope:
            async with gate.passing():
                raise AssertionError("the gate is open")
        assert scope.cancelled_caught
        gate.resume()
        async with gate.passing():
            pass

    run(body)
