"""What a rollout worker samples with: an engine on one version's weights, and no trainer.

The engine `torch` is the trainer's process, which holds the policy and no optimizer state. The
engine `vllm` has such a process beside it, on the CPU, which holds the policy in fp32 and says what
the log-probs of each new version should be: there is no trainer here to ask. It starts with the
engine and goes with it.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TypeVar

import trio

from node.engines.policy_files import PolicyFiles, policy_files
from node.engines.vllm.engine import UpdateMode, VllmEngine, make_vllm
from node.engines.vllm.probe import LogProbs, Rows
from node.engines.vllm.server import GPU_MEMORY_SHARE_ALONE, ServerRefused
from node.hosting.swapping import SwappingEngine
from node.interfaces.adapter_files import is_adapter
from node.interfaces.engine import RolloutEngine, Tell
from node.interfaces.quantisation import Quantisation
from node.interfaces.trainer_spec import TrainerSpec
from node.training.process import TrainerProcess
from swarm.errors import ChildFailed, ConfigError
from swarm.weights.store.versions import version_of

PARAMETER_BYTES: Final = 4  # of a model that is written
T = TypeVar("T")


@contextmanager
def first_answer_counts(*, has_served: bool) -> Iterator[None]:
    """A start of vLLM in the block is not tried again where vLLM refuses it, unless this node's has
    served before: then it is no fault of the settings or the model, and may pass.

    Raises:
        ConfigError: it refuses; with the reason.
    """
    try:
        yield
    except ServerRefused as error:
        if has_served:
            raise
        raise ConfigError(
            f"--engine vllm: {error}; mend that, take another model or use --engine torch"
        ) from error


class EngineHost(Protocol):
    """An engine that runs; as `swarm.weights.hot_swap.Engine` it takes new versions."""

    tokenizer: str  # fingerprint

    @property
    def engine(self) -> RolloutEngine:
        """What samples."""
        ...

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
        """See `EngineHost`."""
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
    would come before that, is none. An adapter is merged into its base before.
    """

    def __init__(self, engine: VllmEngine, reference: "ReferencePolicy", tokenizer: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._reference = reference

    @property
    def alive(self) -> bool:
        """See `EngineHost`."""
        return True

    @property
    def paused_s(self) -> float | None:
        """See `EngineHost`."""
        return self.engine.paused_s

    async def pause(self) -> None:
        """See `Engine`."""
        await trio.lowlevel.checkpoint()

    async def load(self, directory: Path) -> None:
        """See `Engine`."""
        version = await trio.to_thread.run_sync(version_of, directory)
        try:
            directory = await self._reference.whole(directory, version)
            await self.engine.load(directory, version)
        finally:
            await self._reference.keep_only(self.engine.directory)

    async def resume(self) -> None:
        """See `Engine`."""
        await trio.lowlevel.checkpoint()

    async def stop(self) -> None:
        """End both."""
        await self.engine.close()
        await self._reference.stop()


class ReferencePolicy:
    """A policy in a process of its own that is asked for log-probs, and makes whole models of
    adapters: what it says of these is of base and adapter, and not of what it made."""

    def __init__(self, spec: TrainerSpec, data_directory: Path) -> None:
        """What it makes lies about until it is stopped."""
        self._process = TrainerProcess(replace(spec, device="cpu"), data_directory)
        self._directory = data_directory
        self._stack = ExitStack()  # of the room for what it makes
        self._files: PolicyFiles | None = None
        self._made_of: dict[Path, Path] = {}  # whole models: of which adapters

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
        source = self._made_of.get(weights, weights)
        return await self._persist(lambda: self._said(source, rows))

    async def whole(self, weights: Path, version: int) -> Path:
        """A version's directory as a whole model: itself, or an adapter merged into its base.

        Raises:
            ChildFailed: the adapter is damaged or for another base; or a crash.
        """
        if not is_adapter(weights):
            return weights
        made = await self._persist(lambda: self._merge(weights, version))
        self._made_of[made] = weights
        return made

    async def keep_only(self, directory: Path) -> None:
        """Remove what was made, but for this one."""
        if self._files is not None:
            await self._files.keep_only(directory)
        self._made_of = {made: of for made, of in self._made_of.items() if made == directory}

    async def _merge(self, weights: Path, version: int) -> Path:
        await self._process.load(weights, version)
        if self._files is None:
            size_bytes = PARAMETER_BYTES * (await self._process.info()).parameters
            self._files = self._stack.enter_context(policy_files(self._directory, size_bytes))
        return await self._files.export(self._process, version)

    async def _persist(self, job: Callable[[], Awaitable[T]]) -> T:
        """What it says, by a process that is started anew where it died."""
        try:
            return await job()
        except ChildFailed:
            if self._process.alive:
                raise
            await self._process.start()
            return await job()

    async def _said(self, weights: Path, rows: Rows) -> LogProbs:
        await self._process.load(weights, 0)
        return await self._process.logprobs(rows)

    async def stop(self) -> None:
        """End the process, and remove what it made."""
        await self._process.stop()
        self._stack.close()


async def open_torch_host(spec: TrainerSpec, data_directory: Path, weights: Path) -> TorchHost:
    """A started host on a version's directory: the spec's model, or an adapter for it.

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
    spec: TrainerSpec,
    data_directory: Path,
    weights: Path,
    update_mode: UpdateMode,
    *,
    quantization: Quantisation = "none",
    gpu_memory_share: float | None = None,
    gpus: int = 1,
    tell: Tell | None = None,
) -> VllmHost:
    """As `open_torch_host`. vLLM gets an adapter merged into its base. The reference is on the CPU:
    of a GPU's memory vLLM takes nearly all, unless it is given a share. For `tell` see
    `VllmEngine`.

    Raises:
        ConfigError, ChildFailed: it does not start.
    """
    reference = ReferencePolicy(spec, data_directory)
    engine: VllmEngine | None = None
    try:
        tokenizer, context_tokens = await reference.start()
        model = await reference.whole(weights, version_of(weights))
        engine = await make_vllm(
            model,
            data_directory,
            threads=spec.threads,
            context_tokens=context_tokens,
            policy_version=version_of(weights),
            update_mode=update_mode,
            reference=reference.logprobs,
            quantization=quantization,
            gpu_memory_share=gpu_memory_share or GPU_MEMORY_SHARE_ALONE,
            gpus=gpus,
            tell=tell,
        )
        await engine.start()
    except BaseException:
        if engine is not None:
            await engine.close()
        await reference.stop()
        raise
    return VllmHost(engine, reference, tokenizer)
