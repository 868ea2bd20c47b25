"""The hand-over of weights and memory between a trainer and its engine around each update.

On one GPU the engine sleeps while the trainer trains, and takes the new weights from the trainer's
memory. Files in shared memory are written in any case: a restarted engine begins with them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.config import NodeConfig
from node.engines.policy_files import PolicyFiles
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.server import (
    GPU_MEMORY_SHARE,
    GPU_MEMORY_SHARE_ALONE,
    GPU_SHARE_ASLEEP,
    gpu_share,
    is_cpu_build,
)
from node.interfaces.engine import Tell
from node.interfaces.trainer import PolicyInfo
from node.train.process import TrainerProcess
from swarm.errors import ChildFailed

HAND_OVERS_MAX: Final = 3  # failures in a row; then trainer and engine are started again


@dataclass(frozen=True, slots=True)
class DevicePlan:
    gpu_memory_share: float  # where the engine is on a GPU
    shared: bool  # both are on one GPU and no other, so that weights can be lent
    sleeps: bool  # the engine, while the trainer trains


def device_plan(config: NodeConfig, trainer: PolicyInfo) -> DevicePlan:
    if is_cpu_build() or trainer.device_bytes == 0:
        return DevicePlan(config.engine_gpu_share or GPU_MEMORY_SHARE_ALONE, False, False)
    if config.engine_gpu_share is not None:
        share = config.engine_gpu_share
    elif config.engine_sleep:
        share = gpu_share(
            trainer.device_bytes,
            trainer.held_bytes,
            trainer.parameters,
            trainer.name,
            config.engine_gpus,
        )
    else:
        share = GPU_MEMORY_SHARE
    # Weights that are lent lie on one GPU, and each of several wants its part of them
    return DevicePlan(share, config.engine_gpus == 1, config.engine_sleep)


def share_left(config: NodeConfig) -> float:
    """The share of its GPU's memory that a trainer plans to leave to the engine of this node."""
    if config.engine != "vllm" or is_cpu_build():
        return 0.0
    if config.engine_sleep:
        return GPU_SHARE_ASLEEP
    return config.engine_gpu_share or GPU_MEMORY_SHARE


class EngineHandOver:
    """Gives each new policy to an engine in a process of its own. An engine that fails to take it
    serves the one before for another round."""

    def __init__(
        self,
        trainer: TrainerProcess,
        engine: VllmEngine,
        files: PolicyFiles,
        tell: Tell,
        *,
        shares_device: bool = False,
        sleeps: bool = False,
    ) -> None:
        """`shares_device`: weights can be lent on one device. `sleeps`: the engine gives its memory
        to the trainer during training."""
        self._trainer, self._engine, self._files, self._tell = trainer, engine, files, tell
        self._shares_device, self._sleeps = shares_device, sleeps
        self._failures = self._sleepless = 0  # in a row
        self._why_not: str | None = None  # weights were lent the last time

    async def before_training(self) -> None:
        """Stop sampling until `after_training` ends. An engine that does not fall asleep is ended;
        the new policy starts it. `ChildFailed` after `HAND_OVERS_MAX` such failures in a row."""
        if not self._sleeps:
            return
        try:
            await self._engine.sleep()
        except ChildFailed as error:
            await self._engine.close()  # the trainer needs the memory, in one way or another
            self._sleepless += 1
            if self._sleepless >= HAND_OVERS_MAX:
                raise
            await self._tell(f"vLLM did not fall asleep, and is started again later: {error}")
        else:
            self._sleepless = 0

    async def after_training(self, policy_version: int) -> float:
        """Load the new policy into the engine. Returns the seconds that the engine stood still
        without its sleep. `ChildFailed` after `HAND_OVERS_MAX` failures in a row."""
        directory = await self._files.export(self._trainer, policy_version)
        lent = self._shares_device and await self._lend(directory)
        try:
            await self._engine.load(directory, policy_version, lent=lent)
        except ChildFailed as error:
            self._failures += 1
            if self._failures >= HAND_OVERS_MAX:
                raise
            await self._tell(f"the engine did not take version {policy_version}: {error}")
        else:
            self._failures = 0
        await self._files.keep_only(self._engine.directory)
        return self._engine.paused_s

    async def _lend(self, directory: Path) -> bool:
        why_not = await self._trainer.lend(directory)
        await self._trainer.release()
        if why_not is not None and why_not != self._why_not:
            await self._tell(f"new weights reach vLLM by way of files: {why_not}")
        self._why_not = why_not
        return why_not is None
