"""The engine of a rollout worker over its versions: it starts with the first one, and again when it
died; see `engine_hosts` for what there is."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import trio

from node.config import NodeConfig
from node.config.node import rules_of
from node.hosting.engine_hosts import (
    EngineHost,
    first_answer_counts,
    open_torch_host,
    open_vllm_host,
)
from node.hosting.models import resolve_model, trainer_spec, vllm_context_tokens
from node.interfaces.adapter_files import is_adapter
from node.interfaces.engine import Serving, Tell
from swarm.weights.hot_swap import Engine
from swarm.weights.store.versions import version_of


class HostsPolicy(Engine, Protocol):
    """What samples at a worker, from its first version on."""

    version: int
    serving: Serving | None
    ready: trio.Event  # a version is served
    starting: bool  # the engine

    @property
    def paused_s(self) -> float | None:
        """How long the last load kept it from sampling; None: as long as it was paused."""
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
    """The engine of a worker, from the first version on; `swarm.weights.hot_swap.Engine`."""

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
        self._host: EngineHost | None = None
        self._directory: Path | None = None
        self.version = 0
        self.serving: Serving | None = None
        self.ready = trio.Event()  # a version is served
        self.starting = False  # the engine
        self._first = True  # nothing was served when the last version came

    @property
    def paused_s(self) -> float | None:
        """See `EngineHost`. The first start of the engine keeps nothing from sampling."""
        if self._first:
            return 0.0
        return None if self._host is None else self._host.paused_s

    async def pause(self) -> None:
        """See `Engine`."""
        if self._host is not None:
            await self._host.pause()

    async def load(self, directory: Path) -> None:
        """See `Engine`. The first version starts the engine, and so does one that finds it dead."""
        async with self._lock:
            self._first = self.serving is None
            if self._host is None or not self._host.alive:
                await self._start(directory)
            else:
                await self._host.load(directory)
            self._directory, self.version = directory, version_of(directory)

    async def resume(self) -> None:
        """See `Engine`."""
        if self._host is not None:
            await self._host.resume()

    async def restart(self) -> None:
        """Start the engine again with the version that it had; a newer one may have done so.

        Raises:
            ChildFailed, ConfigError: it does not come up.
        """
        async with self._lock:
            if self._host is None or not self._host.alive:
                assert self._directory is not None
                await self._start(self._directory)

    async def stop(self) -> None:
        """End the engine."""
        async with self._lock:
            host, self._host = self._host, None
            self.ready = trio.Event()
            if host is not None:
                await host.stop()

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
                    host: EngineHost = await open_vllm_host(
                        *(spec, config.data_dir, directory, config.engine_update),
                        quantization=config.engine_quantization,
                        gpu_memory_share=config.engine_gpu_share,
                        gpus=config.engine_gpus,
                        tell=self._tell,
                    )
            else:
                host = await open_torch_host(spec, config.data_dir, directory)
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
