"""The real world: this machine's sockets, clock and processes."""

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Final

import trio

from node.config import NodeConfig
from node.config.joined import recall
from node.engines.openai_engine import ServedModel
from node.engines.policy_files import policy_files
from node.engines.vllm.engine import open_vllm
from node.engines.vllm.server import ServerSettings, dtype
from node.hosting.engine_hosts import PARAMETER_BYTES, first_answer_counts
from node.hosting.hand_over import EngineHandOver, device_plan
from node.hosting.membership import Membership
from node.hosting.models import check_teacher, served_model, trainer_spec, vllm_context_tokens
from node.hosting.policy_host import PolicyHost, WorkerEngine
from node.interfaces.engine import Engine, Tell
from node.observe.records import Trouble
from node.run.claims import Scorer, VersionDirectory
from node.run.world import Listener, SamplingTrainer, World
from node.sandbox.confinement import NEEDED, found
from node.system.machine import core_count, threads_of
from node.system.pause_rules import Hours, PauseRules
from node.train.process import TrainerProcess, open_trainer
from node.train.ranks import Ranks
from node.verify.confinement_settings import run_needs_sandbox
from node.verify.verifier import ProcessVerifier
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.storage import RunSync
from swarm.transport.base import Transport
from swarm.transport.libp2p.addresses import on_free_ports
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.reachability import ReachRules

AGENT: Final = f"swarm-node/{version('swarm-node')}"
SCORER: Final = "scorer"


class RealNetwork:
    """`Network` over sockets."""

    agent: str = AGENT
    run_sync: RunSync = staticmethod(trio.to_thread.run_sync)

    def now_s(self) -> float:
        return time.time()

    def rng(self, purpose: str) -> Random:
        return Random(secrets.randbits(64))

    def secret(self, size_bytes: int) -> bytes:
        return secrets.token_bytes(size_bytes)

    def open_transport(
        self, identity: Identity, config: NodeConfig, membership: Membership
    ) -> AbstractAsyncContextManager[Libp2pTransport]:
        """Listen on the ports of the last start if they are free, so that peers find the node."""
        return open_libp2p(
            identity,
            on_free_ports(config.listen, recall(config.data_dir).ports),
            config.announce,
            network_key=membership.network_key,
            reach=ReachRules(relay=config.relay),
        )

    def can_be_dialled(self, transport: Transport) -> bool:
        reach = transport.reach if isinstance(transport, Libp2pTransport) else None
        return reach is None or reach.reachable is not False


def _trouble_to(listener: Listener) -> Tell:
    """The function by which an engine reports troubles."""

    async def tell(text: str) -> None:
        await listener.tell(Trouble(text))

    return tell


class RealWorld(RealNetwork, World):
    """`World`: policies in processes of their own."""

    def __init__(
        self,
        model: str,
        nodes_here: Callable[[], int],
        say: Callable[[str], None],
        *,
        is_learner: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`model`: of the start, a directory or a hub id. `nodes_here`: the nodes that share the
        cores; blocking. `is_learner` decides the loss where the run names none. `ranks`: of a
        trainer of several processes."""
        self._model = model
        self._nodes_here = nodes_here
        self._say = say
        self._is_learner = is_learner
        self._ranks = ranks
        self._starting: tuple[str, ...] = ()
        self._threads_said = (0, 0)  # cores and nodes that share them
        self._has_served = False  # a vLLM of this process
        self._guest: PauseRules | None = None

    @property
    def restarts_trainer(self) -> bool:
        """False under torchrun, which restarts all ranks itself."""
        return self._ranks is None

    @property
    def starting(self) -> Sequence[str]:
        return self._starting

    async def rest(self, config: NodeConfig, tell: Callable[[str], None]) -> None:
        if self._guest is None:
            self._guest = PauseRules(
                config.data_dir,
                [Hours.parse(each) for each in config.quiet_hours],
                pause_on_battery=config.pause_on_battery,
                busy_share=config.busy_share,
                say=self._say,
            )
        await self._guest.wait(tell)

    @asynccontextmanager
    async def open_verifier(self, config: NodeConfig) -> AsyncIterator[ProcessVerifier]:
        if config.verify_sandbox == "off":
            self._say('what scores is not confined (verify_sandbox = "off")')
        else:
            layers = await trio.to_thread.run_sync(found)
            suffices = layers.suffice(config.verify_sandbox)
            if not suffices and run_needs_sandbox(config.run):
                raise ConfigError(f"run {config.run.name}: {NEEDED}")
            if not suffices:
                self._say("no sandbox here: runs with plug-ins or code are not for this machine")
        async with ProcessVerifier.open(config) as verifier:
            yield verifier

    @asynccontextmanager
    async def open_trainer(
        self, config: NodeConfig, checkpoint: Path | None
    ) -> AsyncIterator[SamplingTrainer]:
        if config.engine == "openai":
            async with served_model(config) as served:
                yield served
            return
        await check_teacher(config, self._model)
        spec = trainer_spec(config, self._model, is_learner=self._is_learner)
        spec = replace(spec, threads=await self.threads(config))
        async with open_trainer(spec, config.data_dir, checkpoint, self._ranks) as trainer:
            yield trainer

    async def threads(self, config: NodeConfig) -> int:
        """CPU threads of trainer and engine, which work in turn. Ranks of torchrun share the cores
        among themselves."""
        wanted = config.threads
        if wanted or self._ranks is not None:
            return wanted
        cores, nodes = core_count(), await trio.to_thread.run_sync(self._nodes_here)
        threads = threads_of(cores, nodes)
        if self._threads_said != (cores, nodes):
            self._threads_said = (cores, nodes)
            who = f"{nodes} nodes share" if nodes > 1 else "one node has"
            self._say(f"{who} {cores} cores here: torch takes {threads} (--threads)")
        return threads

    @asynccontextmanager
    async def open_engine(
        self, config: NodeConfig, trainer: SamplingTrainer, listener: Listener
    ) -> AsyncIterator[tuple[Engine, EngineHandOver | None]]:
        """The torch engine and a served model are the trainer itself and need no hand-over."""
        if isinstance(trainer, ServedModel):
            trainer.tell = _trouble_to(listener)
        if config.engine in ("torch", "openai"):
            yield trainer, None
            return
        if config.engine != "vllm":
            raise ConfigError(f"--engine {config.engine}: not for a node; use torch or vllm")
        assert isinstance(trainer, TrainerProcess)
        async with self._open_vllm(config, trainer, listener) as engine:
            yield engine

    @asynccontextmanager
    async def _open_vllm(
        self, config: NodeConfig, trainer: TrainerProcess, listener: Listener
    ) -> AsyncIterator[tuple[Engine, EngineHandOver | None]]:
        info = await trainer.info()
        size_bytes = info.parameters * PARAMETER_BYTES
        plan = device_plan(config, info)
        tell = _trouble_to(listener)
        precision = dtype(config.engine_quantization)
        with policy_files(config.data_dir, size_bytes, precision=precision) as files:
            self._starting = ("starting vLLM",)
            try:
                opened = open_vllm(
                    await files.export(trainer, info.policy_version),
                    config.data_dir,
                    ServerSettings(
                        threads=await self.threads(config),
                        context_tokens=min(info.context_tokens, vllm_context_tokens(config)),
                        quantization=config.engine_quantization,
                        gpu_memory_share=plan.gpu_memory_share,
                        gpus=config.engine_gpus,
                        sleeps=plan.sleeps,
                        template_rules=config.run.template_rules,
                        thinking=config.run.thoughts,
                    ),
                    policy_version=info.policy_version,
                    update_mode=config.engine_update,
                    reference=lambda _, rows: trainer.logprobs(rows),  # of what it has just written
                    tell=tell,
                )
                async with AsyncExitStack() as stack:
                    with first_answer_counts(has_served=self._has_served):
                        engine = await stack.enter_async_context(opened)
                    self._has_served, self._starting = True, ()
                    listener.say(engine.sizes)
                    hand_over = EngineHandOver(
                        *(trainer, engine, files, tell),
                        shares_device=plan.shared,
                        sleeps=plan.sleeps,
                    )
                    yield engine, hand_over
            finally:
                self._starting = ()

    def open_scorer(
        self, config: NodeConfig, find: VersionDirectory
    ) -> AbstractAsyncContextManager[Scorer | None]:
        spec = replace(trainer_spec(config, self._model), threads=1, precision="by_device")
        if self._ranks is not None:  # several ranks train over bases in fp32
            spec = replace(spec, lora_base="float32")
        return Scorer.open(spec, config.data_dir / SCORER, find)

    def policy_host(self, config: NodeConfig, listener: Listener) -> WorkerEngine:
        return PolicyHost(config, listener.say, _trouble_to(listener), lambda: self.threads(config))
