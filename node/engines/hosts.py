"""What a rollout worker samples with: an engine on one version's weights, and no trainer.

The engine `torch` is the trainer's process, which holds the policy and no optimizer state. The
engine `vllm` has such a process beside it, on the CPU, which holds the policy in fp32 and says what
the log-probs of each new version should be: there is no trainer here to ask. It starts with the
engine and goes with it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import trio

from node.engines.base import RolloutEngine
from node.engines.probe import LogProbs, Rows
from node.engines.swapping import SwappingEngine
from node.engines.vllm_engine import UpdateMode, VllmEngine, make_vllm
from node.training.process import TrainerProcess
from node.training.spec import TrainerSpec
from swarm.errors import ChildFailed
from swarm.weights.versions import version_of


class Host(Protocol):
    """An engine that runs; as `swarm.weights.swap.Engine` it takes new versions."""

    engine: RolloutEngine
    tokenizer: str  # fingerprint

    @property
    def alive(self) -> bool:
        """Whether it can sample, or start by itself what samples."""
        ...

    @property
    def paused_s(self) -> float | None:
        """How long the last load kept it from sampling; None: as long as it was paused."""
        ...

    async def pause(self) -> None: ...

    async def load(self, directory: Path) -> None: ...

    async def resume(self) -> None: ...

    async def stop(self) -> None: ...


class TorchHost:
    """The trainer's process. Made by `open_torch_host`."""

    paused_s: float | None = None

    def __init__(self, process: TrainerProcess, tokenizer: str) -> None:
        self.engine = process
        self.tokenizer = tokenizer
        self._swap = SwappingEngine(process)

    @property
    def alive(self) -> bool:
        """See `Host`."""
        return self.engine.alive

    async def pause(self) -> None:
        """See `Engine`."""
        await self._swap.pause()

    async def load(self, directory: Path) -> None:
        """See `Engine`."""
        await self._swap.load(directory)

    async def resume(self) -> None:
        """See `Engine`."""
        await self._swap.resume()

    async def stop(self) -> None:
        """End the process."""
        await self.engine.stop()


class VllmHost:
    """A vLLM engine and what it is checked against. Made by `open_vllm_host`.

    A load interrupts by itself, once all that can be done before is done; so a swap's pause, which
    would come before that, is none.
    """

    def __init__(self, engine: VllmEngine, reference: "ReferencePolicy", tokenizer: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._reference = reference

    @property
    def alive(self) -> bool:
        """See `Host`."""
        return True

    @property
    def paused_s(self) -> float | None:
        """See `Host`."""
        return self.engine.paused_s

    async def pause(self) -> None:
        """See `Engine`."""
        await trio.lowlevel.checkpoint()

    async def load(self, directory: Path) -> None:
        """See `Engine`."""
        version = await trio.to_thread.run_sync(version_of, directory)
        await self.engine.load(directory, version)

    async def resume(self) -> None:
        """See `Engine`."""
        await trio.lowlevel.checkpoint()

    async def stop(self) -> None:
        """End both."""
        await self.engine.close()
        await self._reference.stop()


class ReferencePolicy:
    """A policy in a process of its own that is asked for log-probs alone."""

    def __init__(self, spec: TrainerSpec, data_directory: Path) -> None:
        self._process = TrainerProcess(replace(spec, device="cpu"), data_directory)

    async def start(self) -> tuple[str, int]:
        """The tokenizer's fingerprint, and how many tokens the context takes.

        Raises:
            ConfigError: the model does not load or fit.
            ChildFailed: the process ended.
        """
        await self._process.start()
        info = await self._process.info()
        return info.tokenizer, info.context_tokens

    async def logprobs(self, weights: Path, rows: Rows) -> LogProbs:
        """See `probe.Reference`."""
        try:
            return await self._said(weights, rows)
        except ChildFailed:
            if self._process.alive:
                raise
            await self._process.start()
            return await self._said(weights, rows)

    async def _said(self, weights: Path, rows: Rows) -> LogProbs:
        await self._process.load(weights, 0)
        return await self._process.logprobs(rows)

    async def stop(self) -> None:
        """End the process."""
        await self._process.stop()


async def open_torch_host(spec: TrainerSpec, data_directory: Path, weights: Path) -> TorchHost:
    """A started host on a version's directory, which is the spec's model.

    Raises:
        ConfigError, ChildFailed: it does not start.
    """
    process = TrainerProcess(spec, data_directory)
    try:
        await process.start()
        await process.load(weights, version_of(weights))
        info = await process.info()
    except BaseException:
        await process.stop()
        raise
    return TorchHost(process, info.tokenizer)


async def open_vllm_host(
    spec: TrainerSpec, data_directory: Path, weights: Path, update_mode: UpdateMode
) -> VllmHost:
    """As `open_torch_host`.

    Raises:
        ConfigError, ChildFailed: it does not start.
    """
    reference = ReferencePolicy(spec, data_directory)
    engine: VllmEngine | None = None
    try:
        tokenizer, context_tokens = await reference.start()
        engine = await make_vllm(
            weights,
            data_directory,
            threads=spec.threads,
            context_tokens=context_tokens,
            policy_version=version_of(weights),
            update_mode=update_mode,
            reference=reference.logprobs,
        )
        await engine.start()
    except BaseException:
        if engine is not None:
            await engine.close()
        await reference.stop()
        raise
    return VllmHost(engine, reference, tokenizer)
