"""The engine of a rollout worker: it starts with the first version, and again when it died."""

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
    """A worker's engine from its first version on, real or simulated."""

    version: int
    serving: Serving | None
    ready: trio.Event  # a version is served
    starting: bool  # the engine

    @property
    def paused_s(self) -> float | None:
        """Seconds that the last load kept it from sampling; None: all of the load."""

    async def restart(self) -> None:
        """Start the engine again with its version, unless a newer one has done so."""

    async def stop(self) -> None:
        """End the engine."""


class PolicyHost:
    def __init__(
        self,
        config: NodeConfig,
        say: Callable[[str], None] = lambda _: None,
        tell: Tell | None = None,
        threads: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """`say` gets the messages of a download, `tell` troubles that were mended. `threads` gives
        the number of threads at each start; None: that of the settings."""
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
        """0 for the first start of the engine, which interrupts no sampling."""
        if self._first:
            return 0.0
        return None if self._host is None else self._host.engine.paused_s

    async def load(self, directory: Path) -> None:
        """Load a version; start the engine if none is alive."""
        async with self._lock:
            self._first = self.serving is None
            if self._host is None or not self._host.engine.alive:
                await self._start(directory)
            else:
                await self._host.load(directory)
            self._directory, self.version = directory, version_of(directory)

    async def restart(self) -> None:
        async with self._lock:
            if self._host is None or not self._host.engine.alive:
                assert self._directory is not None
                await self._start(self._directory)

    async def stop(self) -> None:
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
                        template_rules=config.run.template_rules,
                        thinking=config.run.thoughts,
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
        """The base of adapters: the node's model if one was named, else the run's."""
        config = self._config
        if "model" not in config.model_fields_set:
            config = config.model_copy(update={"model": rules_of(config).model})
        return await trio.to_thread.run_sync(resolve_model, config, self._say)
