"""A rollout worker (`swarm-node join` on a run that has a learner).

It fetches versions of the policy, swaps them in while the engine goes on, and works on leases. It
has no trainer and no pool.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import ClassVar, Final

import trio

from node.config import NodeConfig
from node.config.node import rules_of
from node.engines.vllm.engine import NOT_INSTALLED
from node.interfaces.trainer import PolicyInfo
from node.observe.event_log import Record
from node.observe.node_reports import Extras, broadcast_row
from node.observe.progress_bars import Work, version_work
from node.observe.records import (
    StatusSnapshot,
    Trouble,
    VersionCame,
    VersionComing,
    WorkDone,
)
from node.run.node import Node
from node.run.progress import Progress
from node.run.role import RESTART, RESTARTS_MAX, Deaths, Needs, Role
from node.run.rollout_worker import IdleNote, RolloutWorker
from node.run.world import Listener, World
from node.system.extras import need
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.identity import Identity, PeerId
from swarm.leases.lease_client import LeaseClient
from swarm.telemetry import metrics as m
from swarm.telemetry import reports
from swarm.weights.weights_service import VersionOutcome, VersionProgress, WeightsService

EVENTS_MAX: Final = 128  # of broadcasts that wait to be logged
ENGINES: Final = ("torch", "vllm")


def outcome_records(peer: PeerId, outcome: VersionOutcome) -> list[Record]:
    """Log records of an attempt to get a version."""
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


class WorkerRole(Role):
    KIND: ClassVar[reports.Role] = "worker"

    @staticmethod
    def needs(config: NodeConfig, identity: Identity) -> Needs:
        """The policy comes from the learner."""
        if rules_of(config).peer == identity.peer_id:
            raise ConfigError(
                f"this key is the learner's of run {config.run.name}: use swarm-node learn"
            )
        if config.engine not in ENGINES:
            raise ConfigError(
                f"--engine {config.engine}: not for a rollout worker; use torch or vllm"
            )
        need("torch")
        if config.engine == "vllm" and find_spec("vllm") is None:
            raise ConfigError(NOT_INSTALLED)
        return Needs(policy=False, draws=None)

    def __init__(
        self,
        world: World,
        config: NodeConfig,
        node: Node,
        listener: Listener,
        *,
        source: type[LeaseClient] = LeaseClient,
    ) -> None:
        super().__init__(world, config, node, listener)
        self._rules = rules_of(config)
        self._learner = PeerId(self._rules.peer)
        self._host = world.policy_host(config, listener)
        self._service: WeightsService | None = None
        self._last: WorkDone | None = None
        self._unlogged = 0  # events since the last that could be logged
        self._send, self._receive = trio.open_memory_channel[Record](EVENTS_MAX)
        peer = node.peer
        self.source = source(
            config.run.run_id,
            self._learner,
            peer.identity,
            peer.transport,
            peer.ledger,
            world.rng("work"),
        )
        self._worker = RolloutWorker(
            node.parts, self.source, self._tell_work, lambda tell: world.rest(config, tell)
        )

    async def run(self, leaving: trio.Event) -> None:
        self._node.discovery.sought = self._learner
        # nothing is known of the policy before it is here
        policy = PolicyInfo(self._rules.model, 0, "", 0, 0, clipping_active=False)
        started = self._node.started(policy, Progress())
        group_size = self._rules.group_size
        await self._listener.tell(
            replace(started, local_groups=0, external_groups=0, group_size=group_size)
        )
        opened = self._world.open_following(
            self._config, self._node.peer, self._host, self._note_outcome, self._note_stage
        )
        try:
            async with opened as self._service, trio.open_nursery() as nursery:
                nursery.start_soon(self._log_events)
                nursery.start_soon(self._note_waiting)
                nursery.start_soon(self._work_on)
                with trio.move_on_at(self._node.ends_at):
                    await leaving.wait()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._host.stop()

    async def _work_on(self) -> None:
        """Work; restart the engine where it dies, as far as `Deaths` lets it."""
        deaths, host = Deaths(self._config.data_dir, self._node.notes), self._host
        while True:
            before = self._worker.batches
            try:
                if host.serving is not None and not host.ready.is_set():
                    await host.restart()
                await host.ready.wait()
                assert host.serving is not None
                await self._node.note_maker(host.serving.engine.maker, self._listener.tell)
                await self._worker.run(host.serving)
            except* ChildFailed as group:
                done = self._worker.batches
                error = first_of(group)
                told = deaths.count("the engine", error, done, went_on=done > before)
                await self._listener.tell(Trouble(told))
                if deaths.in_a_row >= RESTARTS_MAX:
                    raise
            await host.stop()
            await trio.sleep(RESTART.after(deaths.in_a_row))

    async def _tell_work(self, record: WorkDone) -> None:
        self._node.notes.put("trainer", None)
        record = self._last = self._node.counted(record)
        self._node.note_rate(record)
        await self._listener.tell(record)

    # --- versions on their way ----------------------------------------------------------------

    def _note_stage(self, stage: VersionProgress) -> None:
        self._log(VersionComing(self._node.peer.identity.peer_id, stage.version, stage.phase))

    def _note_outcome(self, outcome: VersionOutcome) -> None:
        if self._host.paused_s is not None:
            applied = replace(outcome.applied, paused_s=self._host.paused_s)
            outcome = replace(outcome, applied=applied)
        self._listener.note_outcome(outcome)
        for record in outcome_records(self._node.peer.identity.peer_id, outcome):
            self._log(record)

    def _log(self, record: Record) -> None:
        try:
            self._send.send_nowait(record)
        except trio.WouldBlock:  # the disk is slow: the log is cut, and says so
            self._unlogged += 1

    async def _log_events(self) -> None:
        async for record in self._receive:
            await self._listener.tell(record)
            if self._unlogged:
                lost, self._unlogged = self._unlogged, 0
                await self._listener.tell(
                    Trouble(f"{lost} events of broadcasts are not in the log: the disk is slow")
                )

    # --- for whoever watches ------------------------------------------------------------------

    async def _note_waiting(self) -> None:
        idle, worker = IdleNote(), self._worker
        while True:
            await trio.sleep(1.0)
            waiting = worker.waiting_for
            self._node.enter("waiting" if waiting else "generating")
            note = idle.poll(waiting, worker.batches, trio.current_time())
            self._node.notes.put("work", note)
            self._node.notes.put("clock", self._clock_note())

    def _clock_note(self) -> str | None:
        """Nobody can tell which of two clocks is wrong: both are named, and no alarm is raised."""
        ahead = self._service.ahead if self._service else None
        if ahead is None:
            return None
        return (
            f"the learner's newest version is refused, dated in the future ({ahead}): either this "
            "machine's clock is slow or the learner's is fast; set both by NTP"
        )

    def status(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """The snapshot with the last batch of work."""
        work = self._last
        version = work.policy_version if work else 0
        return replace(
            snapshot,
            role="worker",
            model=self._rules.model,
            round=work.batch if work else 0,
            policy_version=version if self._service is None else self._host.version,
            local_groups=work.groups if work else 0,
            staleness_bound=self._rules.staleness_max,
            work=work,
        )

    def works(self) -> list[Work]:
        works = super().works()
        if self._host.starting:
            works.append(Work(f"starting the engine ({self._config.engine})"))
        progress = self._service.progress() if self._service else None
        return works if progress is None else [*works, version_work(progress)]

    def extras(self) -> Extras:
        bound = {m.STALENESS_BOUND_STEPS: float(self._rules.staleness_max)}
        if self._service is None:
            return Extras()
        return Extras(bound, broadcast=broadcast_row(self._service.sharing.holding()))
