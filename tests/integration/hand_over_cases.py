"""A trainer and a vLLM engine on one device, a CPU or a GPU, and what joins them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from node.engines.policy_files import PolicyFiles, policy_files
from node.engines.vllm.engine import VllmEngine
from node.hosting.hand_over import EngineHandOver
from node.interfaces.engine import Sampling
from node.interfaces.trainer_spec import Device, TrainerSpec
from node.train.process import TrainerProcess, open_trainer
from tests.integration.vllm_models import open_model

PROMPTS = ("3+4=", "what day is it?", "and tomorrow?")
SHORT = Sampling(max_new_tokens=24)
PARAMETER_BYTES = 4


@dataclass
class Pair:
    """Both, and what joins them."""

    trainer: TrainerProcess
    engine: VllmEngine
    files: PolicyFiles
    hand_over: EngineHandOver
    told: list[str] = field(default_factory=list)
    version: int = 0

    async def learn(self, weights: Path, *, sleeping: bool = True) -> None:
        """What a round does, with the weights of a directory in place of a step. `sleeping`: as
        between `before_training` and `after_training`."""
        self.version += 1
        if sleeping:
            await self.hand_over.before_training()
        await self.trainer.load(weights, self.version)
        await self.hand_over.after_training(self.version)


@asynccontextmanager
async def trainer_and_engine(
    first: Path,
    data: Path,
    *,
    device: Device = "cpu",
    context_tokens: int = 1024,
    gpu_memory_share: float = 0.4,
) -> AsyncIterator[Pair]:
    """Both on one device."""
    spec = TrainerSpec(str(first), threads=1, device=device, context_tokens_max=context_tokens)
    told: list[str] = []

    async def tell(text: str) -> None:
        told.append(text)

    async with open_trainer(spec, data) as trainer:
        info = await trainer.info()
        with policy_files(data, PARAMETER_BYTES * info.parameters) as files:
            async with open_model(
                await files.export(trainer, 0),
                data,
                threads=1,
                context_tokens=info.context_tokens,
                reference=lambda _, rows: trainer.logprobs(rows),
                gpu_memory_share=gpu_memory_share,
                sleeps=device == "cuda",
                tell=tell,
            ) as engine:
                hand_over = EngineHandOver(
                    *(trainer, engine, files, tell), shares_device=True, sleeps=True
                )
                yield Pair(trainer, engine, files, hand_over, told)
