"""How an engine that shares a device with the trainer is treated around an update.

The real engine and trainer are in `tests/integration/test_vllm_hand_over.py`; here is what they
will not do when asked to: fail in their sleep.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.engines.vllm import engine, server
from node.engines.vllm.server import (
    GPU_MEMORY_SHARE_ALONE,
    GPU_RESERVE_BYTES,
    GPU_SHARE_ASLEEP,
    ServerSettings,
    gpu_share,
)
from node.hosting.hand_over import (
    HAND_OVERS_MAX,
    DevicePlan,
    EngineHandOver,
    device_plan,
    share_left,
)
from node.interfaces.trainer import PolicyInfo
from node.interfaces.trainer_spec import TrainerSpec
from node.train import memory
from swarm.errors import ChildFailed, ConfigError
from tests.support import run
from tests.unit.training_support import qwen_directory

GIB = 2**30
RUN = RunConfig.model_validate({"name": "shared", "environments": [{"name": "scripted_sum"}]})


class Trainer(ScriptedPolicy):
    """Lends, or not."""

    why_not: str | None = None
    released = 0

    async def lend(self, _: Path) -> str | None:
        return self.why_not

    async def release(self) -> None:
        self.released += 1


class Engine:
    """Fails as often as it is told to."""

    def __init__(self) -> None:
        self.fails_asleep = self.fails_loading = 0
        self.slept = self.closed = 0
        self.loads: list[tuple[int, bool]] = []
        self.directory = Path("first")
        self.paused_s = 0.5

    async def sleep(self) -> None:
        if self.fails_asleep:
            self.fails_asleep -= 1
            raise ChildFailed("it cannot sleep")
        self.slept += 1

    async def close(self) -> None:
        self.closed += 1

    async def load(self, weights: Path, policy_version: int, *, lent: bool = False) -> None:
        if self.fails_loading:
            self.fails_loading -= 1
            raise ChildFailed("it does not take it")
        self.directory = weights
        self.loads.append((policy_version, lent))


class Files:
    async def export(self, _: object, policy_version: int) -> Path:
        return Path(f"v{policy_version}")

    async def keep_only(self, directory: Path) -> None:
        self.kept = directory


class Case:
    def __init__(self, **options: bool) -> None:
        self.trainer, self.engine, self.files = Trainer(), Engine(), Files()
        self.told: list[str] = []
        parts = (self.trainer, self.engine, self.files, self._tell)
        self.hand_over = EngineHandOver(*parts, **options)  # type: ignore[arg-type]

    async def _tell(self, text: str) -> None:
        self.told.append(text)

    async def update(self, version: int) -> float:
        await self.hand_over.before_training()
        return await self.hand_over.after_training(version)


def test_an_engine_with_memory_of_its_own_neither_sleeps_nor_borrows() -> None:
    case = Case()

    async def body() -> None:
        assert await case.update(1) == 0.5

    run(body)
    assert (case.engine.slept, case.engine.loads, case.trainer.released) == (0, [(1, False)], 0)


def test_one_that_shares_a_device_sleeps_and_borrows_what_is_lent() -> None:
    case = Case(shares_device=True, sleeps=True)

    async def body() -> None:
        await case.update(1)
        case.trainer.why_not = "it has no handles"
        await case.update(2)
        await case.update(3)

    run(body)
    assert case.engine.slept == 3
    assert case.engine.loads == [(1, True), (2, False), (3, False)]
    assert case.told == ["new weights reach vLLM by way of files: it has no handles"]
    assert case.trainer.released == 3  # before each load: the engine needs its memory
    assert case.files.kept == Path("v3")


def test_one_that_does_not_fall_asleep_is_ended_for_the_trainers_sake() -> None:
    """It was given more memory than the trainer has left for it. A few in a row end both."""
    case = Case(shares_device=True, sleeps=True)

    async def body() -> None:
        case.engine.fails_asleep = HAND_OVERS_MAX - 1
        for version in range(1, HAND_OVERS_MAX + 1):
            await case.update(version)
        assert (case.engine.closed, case.engine.slept) == (HAND_OVERS_MAX - 1, 1)
        assert case.told == [case.told[0]] * (HAND_OVERS_MAX - 1)
        assert case.told[0].endswith("is started again later: it cannot sleep")
        case.engine.fails_asleep = HAND_OVERS_MAX
        for version in range(10, 9 + HAND_OVERS_MAX):
            await case.update(version)
        with pytest.raises(ChildFailed, match="it cannot sleep"):
            await case.update(9 + HAND_OVERS_MAX)

    run(body)
    assert case.engine.closed == 2 * HAND_OVERS_MAX - 1


def test_a_version_that_is_not_taken_leaves_the_one_before_and_a_few_in_a_row_end_it() -> None:
    case = Case()

    async def body() -> None:
        await case.update(1)
        case.engine.fails_loading = HAND_OVERS_MAX - 1
        for version in range(2, 2 + HAND_OVERS_MAX):
            await case.update(version)
        case.engine.fails_loading = HAND_OVERS_MAX
        for version in range(10, 9 + HAND_OVERS_MAX):
            await case.update(version)
        with pytest.raises(ChildFailed, match="it does not take it"):
            await case.update(9 + HAND_OVERS_MAX)

    run(body)
    assert case.engine.loads == [(1, False), (1 + HAND_OVERS_MAX, False)]
    assert case.told[0] == "the engine did not take version 2: it does not take it"
    assert len(case.told) == 2 * (HAND_OVERS_MAX - 1)
    assert case.files.kept == Path(f"v{1 + HAND_OVERS_MAX}")


@pytest.mark.parametrize(
    ("total", "held", "parameters", "share"),
    [
        (80 * GIB, 8 * GIB, GIB // 2, 1 - 11 / 80),
        (80 * GIB, 56 * GIB, 7 * GIB, 1 - 59 / 80),
        (80 * GIB, 0, GIB // 2, GPU_MEMORY_SHARE_ALONE),
    ],
)
def test_an_engine_that_sleeps_has_what_the_trainer_does_not_hold(
    total: int, held: int, parameters: int, share: float
) -> None:
    assert GPU_RESERVE_BYTES == 3 * GIB
    assert gpu_share(total, held, parameters, "a model") == pytest.approx(share, abs=1e-3)


def test_a_trainer_that_leaves_no_room_is_said_before_vllm_starts() -> None:
    with pytest.raises(ConfigError, match=r"holds 16.0, and vLLM needs 6.0 beside it: .*--lora"):
        gpu_share(24 * GIB, 16 * GIB, 5 * GIB // 2, "a model")


def test_of_a_model_that_is_cut_over_gpus_each_has_a_part() -> None:
    with pytest.raises(ConfigError, match=r"vLLM needs 15.0 beside it: .*more GPUs"):
        gpu_share(24 * GIB, 16 * GIB, 7 * GIB, "a model")
    assert gpu_share(24 * GIB, 16 * GIB, 7 * GIB, "a model", gpus=4) == pytest.approx(
        5 / 24, abs=1e-3
    )


def test_several_gpus_are_told_to_vllm_and_cpus_have_none(monkeypatch, tmp_path) -> None:
    one = ServerSettings(threads=1, context_tokens=64, cache_bytes=1, start_timeout_s=1.0)
    monkeypatch.setattr(server, "is_cpu_build", lambda: False)
    command = " ".join(server._command(tmp_path, replace(one, gpus=4), tmp_path))
    assert "--tensor-parallel-size 4" in command
    assert "--distributed-executor-backend mp" in command
    assert "--tensor-parallel-size" not in server._command(tmp_path, one, tmp_path)
    monkeypatch.setattr(engine, "is_cpu_build", lambda: True)
    monkeypatch.setattr(engine, "find_spec", lambda _: True)
    with pytest.raises(
        ConfigError, match="engine_gpus = 2: the vLLM that is installed is for CPUs"
    ):
        run(engine.make_vllm, tmp_path, tmp_path, replace(one, gpus=2))


def on_gpu(**changes: Any) -> PolicyInfo:
    info = PolicyInfo("model", GIB // 2, "", 0, 1024, clipping_active=False)
    return replace(info, **({"device_bytes": 80 * GIB, "held_bytes": 8 * GIB} | changes))


@pytest.mark.parametrize(
    ("config", "trainer", "plan", "left"),
    [
        ({}, {}, DevicePlan(1 - 11 / 80, shared=True, sleeps=True), GPU_SHARE_ASLEEP),
        ({"engine_sleep": False}, {}, DevicePlan(0.4, shared=True, sleeps=False), 0.4),
        (
            {"engine_gpus": 2},
            {},
            DevicePlan(1 - 11 / 80, shared=False, sleeps=True),
            GPU_SHARE_ASLEEP,
        ),
        (
            {"engine_sleep": False, "engine_gpu_share": 0.2},
            {},
            DevicePlan(0.2, shared=True, sleeps=False),
            0.2,
        ),
        (
            {"engine_gpu_share": 0.3},
            {},
            DevicePlan(0.3, shared=True, sleeps=True),
            GPU_SHARE_ASLEEP,
        ),
        (
            {},
            {"device_bytes": 0},
            DevicePlan(GPU_MEMORY_SHARE_ALONE, shared=False, sleeps=False),
            GPU_SHARE_ASLEEP,
        ),
    ],
)
def test_how_a_gpu_is_shared(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    trainer: dict[str, int],
    plan: DevicePlan,
    left: float,
) -> None:
    monkeypatch.setattr("node.hosting.hand_over.is_cpu_build", lambda: False)
    ours = NodeConfig(run=RUN, engine="vllm", **config)
    found = device_plan(ours, on_gpu(**trainer))
    assert found.gpu_memory_share == pytest.approx(plan.gpu_memory_share, abs=1e-3)
    assert (found.shared, found.sleeps) == (plan.shared, plan.sleeps)
    assert share_left(ours) == left
    assert share_left(NodeConfig(run=RUN)) == 0.0
    monkeypatch.setattr("node.hosting.hand_over.is_cpu_build", lambda: True)
    assert not device_plan(ours, on_gpu(**trainer)).shared
    assert share_left(ours) == 0.0


def test_a_trainer_plans_without_what_it_leaves_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(qwen_directory(tmp_path / "model"))
    monkeypatch.setattr(memory, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(memory, "free_bytes", lambda _: 70 * GIB)
    monkeypatch.setattr(memory, "total_bytes", lambda _: 80 * GIB)
    whole = memory.plan(TrainerSpec(model)).available_bytes
    rest = memory.plan(TrainerSpec(model, gpu_share_left=0.4)).available_bytes
    assert whole - rest == pytest.approx(32 * GIB, abs=2)
