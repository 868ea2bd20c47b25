"""The engine of a rollout worker over its versions: it starts with the first one, and again when it
died; see `engine_hosts` for what there is."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import trio

from node.config import NodeConfig
from node.config.node import rules_of
from node.engines.vllm.server import GPU_MEMORY_SHARE_ALONE, ServerSettings
from node.hosting.engine_hosts import (
    HostedEngine,
    first_answer_counts,
    open_checked_vllm,
    open_torch,
)
from node.hosting.models import resolve_model, trainer_spec, vllm_context_tokens
from node.interfaces.adapter_files import is_adapter
from node.interfaces.engine import Serving, Tell
from swarm.weights.hot_swap import VersionLoader
from swarm.weights.version_store import version_of


class WorkerEngine(VersionLoader, Protocol):
    """The protocol of a worker's engine, from its first version on."""

    version: int
    serving: Serving | None
    ready: trio.Event  # a version is served
    starting: bool  # the engine

    @property
    def paused_s(self) -> float | None:
        """Seconds that the last load kept it from sampling; None: all of the load."""
        ...

    async def restart(self) -> None:
        """Start the engine again with the version that it had; a newer one may have done so.

        Raises:
            ChildFailed, ConfigError: it does not come up.
        """
        ...

    async def stop(self) -> None:
        """End the engine."""
        ...


class PolicyHost:
    """The engine of a worker, from the first version on; `swarm.weights.hot_swap.VersionLoader`."""

    def __init__(
        self,
        config: NodeConfig,
        say: Callable[[str], None] = lambda _: None,
        tell: Tell | None = None,
        threads: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`say` gets what a model's download says, `tell` what went wrong and was mended. `threads`
        says how many to take at each start; None: as the settings have it."""
        self._config = config
        self._say = say
        self._tell = tell
        self._threads = threads
        self._lock = trio.Lock()  # a version may come while the engine is being restarted
        self._host: HostedEngine | None = None
        self._directory: Path | None = None
        self.version = 0
        self.serving: Serving | None = None
        self.ready = trio.Event()  # a version is served
        self.starting = False  # the engine
        self._first = True  # nothing was served when the last version came

    @property
    def paused_s(self) -> float | None:
        """See `WorkerEngine`. The first start of the engine keeps nothing from sampling."""
        if self._first:
            return 0.0
        return None if self._host is None else self._host.engine.paused_s

    async def load(self, directory: Path) -> None:
        """See `VersionLoader`. Starts the engine if none is alive."""
        async with self._lock:
            self._first = self.serving is None
            if self._host is None or not self._host.engine.alive:
                await self._start(directory)
            else:
                await self._host.load(directory)
            self._directory, self.version = directory, version_of(directory)

    async def restart(self) -> None:
        """Start the engine again with the version that it had; a newer one may have done so.

        Raises:
            ChildFailed, ConfigError: it does not come up.
        """
        async with self._lock:
            if self._host is None or not self._host.engine.alive:
                assert self._directory is not None
                await self._start(self._directory)

    async def stop(self) -> None:
        """End the engine."""
        async with self._lock:
            host, self._host = self._host, None
            self.ready = trio.Event()
            if host is not None:
                await host.close()

    async def _start(self, directory: Path) -> None:
        config = self._config
        self.starting = True
        try:
            model = await self._base() if is_adapter(directory) else str(directory)
            spec = replace(trainer_spec(config, model), lora_rank=0)  # a version says what it is
            if self._threads is not None:
                spec = replace(spec, threads=await self._threads())
            if config.engine == "vllm":
                spec = replace(spec, context_tokens_max=vllm_context_tokens(config))
                with first_answer_counts(has_served=self.serving is not None):
                    settings = ServerSettings(
                        quantization=config.engine_quantization,
                        gpu_memory_share=config.engine_gpu_share or GPU_MEMORY_SHARE_ALONE,
                        gpus=config.engine_gpus,
                    )
                    host = await open_checked_vllm(
                        *(spec, config.data_dir, directory, settings),
                        update_mode=config.engine_update,
                        tell=self._tell,
                    )
            else:
                host = await open_torch(spec, config.data_dir, directory)
        finally:
            self.starting = False
        self._host = host
        self.serving = Serving(host.engine, host.tokenizer, lambda: self.version)
        self.ready.set()

    async def _base(self) -> str:
        """The model that adapters are for: the one named to this node, or else the run's."""
        config = self._config
        if "model" not in config.model_fields_set:
            config = config.model_copy(update={"model": rules_of(config).model})
        return await trio.to_thread.run_sync(resolve_model, config, self._say)
