"""`swarm-node join` on a run that has a learner: a rollout worker as a process.

On top of what every node has: the policy's versions, fetched and swapped in while the engine goes
on, and the loop of leases. There is no trainer: who holds the policy samples, and nothing else.
"""

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random

import trio

from node.app import RESTART_DELAY_S, RESTARTS_MAX, App, trainer_spec
from node.config import NodeConfig
from node.engines.hosts import Host, first_answer_counts, open_torch_host, open_vllm_host
from node.engines.vllm_engine import NOT_INSTALLED, Tell
from node.learner_app import rules_of
from node.models import resolve_model
from node.monitor.events import Record
from node.monitor.progress import Work, version_work
from node.monitor.records import (
    Started,
    StatusSnapshot,
    Trouble,
    VersionCame,
    VersionComing,
    WorkDone,
)
from node.monitor.reporting import Extras, broadcast_row
from node.policy_weights import policy_weights
from node.rollout_worker import IdleNote, RolloutWorker, Serving
from node.sapo import Progress
from node.training.adapter_files import is_adapter
from node.training.base import PolicyInfo
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.identity import Identity, PeerId
from swarm.leasing.lease_client import WorkSource
from swarm.telemetry.reports import Role
from swarm.weights.service import Outcome, Stage, WeightsService
from swarm.weights.store.versions import version_of

EVENTS_MAX = 128  # of broadcasts that wait to be logged


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
        self._host: Host | None = None
        self._directory: Path | None = None
        self.version = 0
        self.serving: Serving | None = None
        self.ready = trio.Event()  # a version is served
        self.starting = False  # the engine
        self._first = True  # nothing was served when the last version came

    @property
    def paused_s(self) -> float | None:
        """See `Host`. The first start of the engine keeps nothing from sampling."""
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
                with first_answer_counts(has_served=self.serving is not None):
                    host: Host = await open_vllm_host(
                        *(spec, config.data_dir, directory, config.engine_update),
                        merges=config.merges_adapters,
                        quantization=config.engine_quantization,
                        gpu_memory_share=config.engine_gpu_share,
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


def outcome_records(peer: PeerId, outcome: Outcome) -> list[Record]:
    """What is logged of a try to get a version."""
    applied, bound_s = outcome.applied, outcome.bound_s
    came = VersionCame(
        peer_id=peer,
        version=applied.wanted,
        serving=applied.serving,
        failure=applied.failure,
        fetch_s=applied.fetch_s,
        patch_s=applied.patch_s,
        paused_s=applied.paused_s,
        fetched_bytes=applied.bytes_fetched,
        saved_bytes=applied.bytes_saved,
        bound_s=bound_s,
        over_bound=applied.fetch_s / bound_s if bound_s else None,
    )
    if applied.failure is None:
        return [came]
    serving = "none" if applied.serving is None else f"version {applied.serving}"
    trouble = Trouble(f"version {applied.wanted}: {applied.failure}; {serving} serves on")
    return [came, trouble]


class WorkerApp(App):
    """A worker."""

    ROLE: Role = "worker"
    _unlogged = 0  # events since the last that could be logged
    _host: PolicyHost
    _service: WeightsService | None = None

    @classmethod
    def check(cls, config: NodeConfig, identity: Identity) -> None:
        """See `App.check`."""
        learner = rules_of(config).peer
        if learner == identity.peer_id:
            raise ConfigError(
                f"this key is the learner's of run {config.run.name}: use swarm-node learn"
            )
        if config.engine not in ("torch", "vllm"):
            raise ConfigError(
                f"--engine {config.engine}: not for a rollout worker; use torch or vllm"
            )
        if config.engine == "vllm" and find_spec("vllm") is None:
            raise ConfigError(NOT_INSTALLED)

    @classmethod
    def model_of(cls, config: NodeConfig, say: Callable[[str], None]) -> str:
        """See `App.model_of`: a worker's policy comes from the learner."""
        return ""

    async def _work(self) -> None:
        config, node = self._config, self._node
        learner = PeerId(rules_of(config).peer)
        node.discovery.sought = learner
        self._host = PolicyHost(
            config, self._say, lambda text: self._tell(Trouble(text)), self._threads
        )
        send, receive = trio.open_memory_channel[Record](EVENTS_MAX)

        def log(record: Record) -> None:
            try:
                send.send_nowait(record)
            except trio.WouldBlock:  # the disk is slow: the log is cut, and says so
                self._unlogged += 1

        def tell(outcome: Outcome) -> None:
            if self._host.paused_s is not None:
                applied = replace(outcome.applied, paused_s=self._host.paused_s)
                outcome = replace(outcome, applied=applied)
            self._telemetry.reporter.note_outcome(outcome)
            for record in outcome_records(self._identity.peer_id, outcome):
                log(record)

        def watch(stage: Stage) -> None:
            log(VersionComing(self._identity.peer_id, stage.version, stage.phase))

        await self._tell(self._joined())
        source = WorkSource(
            config.run.run_id,
            learner,
            self._identity,
            self._transport,
            node.ledger,
            Random(secrets.randbits(64)),
        )
        self._worker = RolloutWorker(
            config.run,
            rules_of(config),
            self._identity.peer_id,
            source,
            node.guard,
            now_s=time.time,
            on_work=self._tell_work,
            tokens_per_s_max=config.tokens_per_s_max,
        )
        with policy_weights(
            config,
            self._transport,
            node.warden,
            publishes=False,
            engine=self._host,
            tell=tell,
            watch=watch,
        ) as service:
            self._service = service
            bound = float(rules_of(config).staleness_max)
            self._extras = lambda: Extras(
                {"staleness_bound_steps": bound},
                broadcast=broadcast_row(service.sharing.holding()),
            )
            try:
                current = service.versions.current()
                if current is not None:
                    await self._host.load(current.directory)
                async with trio.open_nursery() as nursery:
                    await nursery.start(service.run)
                    nursery.start_soon(self._log_events, receive)
                    nursery.start_soon(self._note_waiting)
                    nursery.start_soon(self._work_on)
                    await self._leaving.wait()
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    await self._host.stop()

    def _joined(self) -> Started:
        """Nothing is known of the policy before it is here."""
        rules = rules_of(self._config)
        policy = PolicyInfo(rules.model, 0, "", 0, 0, clipping_active=False)
        return replace(
            self._started(policy, Progress()),
            local_groups=0,
            external_groups=0,
            group_size=rules.group_size,
        )

    async def _tell_work(self, record: WorkDone) -> None:
        counters = self._transport.counters
        record = replace(
            record,
            bytes_in_total=counters.bytes_in.total(),
            bytes_out_total=counters.bytes_out.total(),
        )
        self._node.note_work(record)
        await self._tell(record)

    def _snapshot(self) -> StatusSnapshot:
        """See `App._snapshot`; the policy is the run's."""
        snapshot = replace(super()._snapshot(), model=rules_of(self._config).model)
        if self._service is None:  # nothing has begun
            return snapshot
        return replace(snapshot, policy_version=self._host.version)

    def _works(self) -> list[Work]:
        """See `App._works`."""
        works = super()._works()
        if self._service is None:  # nothing has begun
            return works
        if self._host.starting:
            works.append(Work(f"starting the engine ({self._config.engine})"))
        progress = self._service.progress()
        if progress is not None:
            works.append(version_work(progress))
        return works

    async def _work_on(self) -> None:
        """Work; restart the engine where it dies.

        Raises:
            ChildFailed: it died `RESTARTS_MAX` times without finishing a batch in between.
        """
        failures = 0
        while True:
            before = self._worker.batches
            try:
                if self._host.serving is not None and not self._host.ready.is_set():
                    await self._host.restart()
                await self._host.ready.wait()
                assert self._host.serving is not None
                await self._note_maker(self._host.serving.engine.maker)
                await self._worker.run(self._host.serving)
            except* ChildFailed as group:
                failures = 1 if self._worker.batches > before else failures + 1
                await self._tell(Trouble(f"the engine failed and is restarted: {first_of(group)}"))
                if failures >= RESTARTS_MAX:
                    raise
            await self._host.stop()
            await trio.sleep(RESTART_DELAY_S * 2**failures)

    async def _log_events(self, records: "trio.MemoryReceiveChannel[Record]") -> None:
        async for record in records:
            await self._tell(record)
            if self._unlogged:
                lost, self._unlogged = self._unlogged, 0
                await self._tell(
                    Trouble(f"{lost} events of broadcasts are not in the log: the disk is slow")
                )

    async def _note_waiting(self) -> None:
        idle = IdleNote()
        while True:
            await trio.sleep(1.0)
            waiting = self._worker.waiting_for
            self._node.phase = "waiting" if waiting else "generating"
            note = idle.look(waiting, self._worker.batches, trio.current_time())
            if note is not None:
                self._node.notes["work"] = note
            else:
                self._node.notes.pop("work", None)
            self._note_clock()

    def _note_clock(self) -> None:
        """Of two clocks nobody can tell which is wrong: both are named, and no alarm is raised."""
        ahead = self._service.ahead if self._service else None
        if ahead is None:
            self._node.notes.pop("clock", None)
            return
        self._node.notes["clock"] = (
            f"the learner's newest version is refused, dated in the future ({ahead}): either this "
            "machine's clock is slow or the learner's is fast; set both by NTP"
        )
