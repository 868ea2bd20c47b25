"""The engine of a rollout worker: an engine on one version's weights, and no trainer.

The engine `torch` is a trainer's process without optimizer state. The engine `vllm` has such a
process beside it, in fp32 on the CPU, which computes the expected log-probs of each new version.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from node.engines.policy_files import PolicyFiles, policy_files
from node.engines.vllm.engine import UpdateMode, VllmEngine, make_vllm
from node.engines.vllm.probe import LogProbs, Rows
from node.engines.vllm.server import ServerRefused, ServerSettings
from node.interfaces.adapter_files import is_adapter
from node.interfaces.engine import Engine, Tell
from node.interfaces.trainer_spec import TrainerSpec
from node.train.process import TrainerProcess
from swarm.errors import ChildFailed, ConfigError
from swarm.weights.version_store import version_of

PARAMETER_BYTES: Final = 4  # of a model that is written
T = TypeVar("T")


@contextmanager
def first_answer_counts(*, has_served: bool) -> Iterator[None]:
    """A refusal of vLLM at its first start is a `ConfigError`. If it has served before, neither
    settings nor model are at fault, and a restart may help."""
    try:
        yield
    except ServerRefused as error:
        if has_served:
            raise
        raise ConfigError(
            f"--engine vllm: {error}; mend that, take another model or use --engine torch"
        ) from error


@dataclass(slots=True)
class HostedEngine:
    """A worker's running engine, with the reference that a vLLM engine is checked against."""

    engine: Engine
    tokenizer: str  # fingerprint
    reference: "ReferencePolicy | None" = None

    async def load(self, directory: Path) -> None:
        """Serve a version's directory; an adapter is merged into its base for vLLM. If it fails
        with `ChildFailed`, the version before continues to serve."""
        version = version_of(directory)
        if self.reference is None:
            await self.engine.load(directory, version)
            return
        assert isinstance(self.engine, VllmEngine)
        try:
            whole = await self.reference.whole(directory, version)
            await self.engine.load(whole, version)
        finally:
            await self.reference.keep_only(self.engine.directory)

    async def close(self) -> None:
        await self.engine.close()
        if self.reference is not None:
            await self.reference.close()


class ReferencePolicy:
    """A policy in a process of its own that computes log-probs and merges adapters into their base.
    Log-probs of an adapter are those of base and adapter, not of the merged model."""

    def __init__(self, spec: TrainerSpec, data_directory: Path) -> None:
        self._process = TrainerProcess(replace(spec, device="cpu"), data_directory)
        self._directory = data_directory
        self._stack = ExitStack()  # holds the merged models until `close`
        self._files: PolicyFiles | None = None
        self._made_of: dict[Path, Path] = {}  # whole models: of which adapters

    async def start(self) -> tuple[str, int]:
        """The tokenizer's fingerprint, and the context's size in tokens."""
        await self._process.start()
        info = await self._process.info()
        return info.tokenizer, info.context_tokens

    async def logprobs(self, weights: Path, rows: Rows) -> LogProbs:
        source = self._made_of.get(weights, weights)
        return await self._persist(lambda: self._said(source, rows))

    async def whole(self, weights: Path, version: int) -> Path:
        """A version's directory as a whole model: itself, or an adapter merged into its base."""
        if not is_adapter(weights):
            return weights
        made = await self._persist(lambda: self._merge(weights, version))
        self._made_of[made] = weights
        return made

    async def keep_only(self, directory: Path) -> None:
        """Remove all merged models but this one."""
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
        """The result of a job; a process that died is started again for it."""
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

    async def close(self) -> None:
        """End the process, and remove the merged models."""
        await self._process.close()
        self._stack.close()


async def open_torch(spec: TrainerSpec, data_directory: Path, weights: Path) -> HostedEngine:
    """A trainer's process on a version's directory: the spec's model, or an adapter for it."""
    process = TrainerProcess(spec, data_directory)
    try:
        await process.start()
        await process.load(weights, version_of(weights))
        info = await process.info()
    except BaseException:
        await process.close()
        raise
    return HostedEngine(process, info.tokenizer)


async def open_checked_vllm(
    spec: TrainerSpec,
    data_directory: Path,
    weights: Path,
    settings: ServerSettings,
    update_mode: UpdateMode,
    tell: Tell | None = None,
) -> HostedEngine:
    """As `open_torch`, with vLLM; threads and context are the spec's. The reference computes on the
    CPU, because vLLM takes nearly all of a GPU's memory."""
    reference = ReferencePolicy(spec, data_directory)
    engine: VllmEngine | None = None
    try:
        tokenizer, context_tokens = await reference.start()
        engine = await make_vllm(
            await reference.whole(weights, version_of(weights)),
            data_directory,
            replace(settings, threads=spec.threads, context_tokens=context_tokens),
            policy_version=version_of(weights),
            update_mode=update_mode,
            reference=reference.logprobs,
            tell=tell,
        )
        await engine.start()
    except BaseException:
        if engine is not None:
            await engine.close()
        await reference.close()
        raise
    return HostedEngine(engine, tokenizer, reference)
