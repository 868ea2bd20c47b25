"""The coordinator's loop: measure, decide, start and release machines, set the learner's plan.

It needs no state on disk: each beat finds the machines again. Machines that ran before this
coordinator stay wanted until a decision releases them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from coordinator.estimates import (
    MachineHistory,
    calibrated_load_s,
    decided,
    is_measured,
    outlook,
    run_of,
    worker_of,
)
from coordinator.fleet_file import Fleet, Machine
from coordinator.forecast import Forecast
from coordinator.model.activation import (
    ActivationState,
    Decision,
    Phase,
    Seen,
    Standing,
    is_fresh_enough,
)
from coordinator.model.capacity import WORKERS_MAX, Capacity, Obstacle, Run, Worker
from coordinator.model.pacing import Measured, Pacing, next_pacing
from coordinator.providers.base import Condition, Instance, Provider, ProviderFailed
from coordinator.providers.static import is_there
from coordinator.view import CoordinatorView, MachineRow
from swarm.errors import RemoteProtocolError, RequestRefused, TransportError
from swarm.identity import PeerId
from swarm.leases import coordination
from swarm.leases.coordination import ControlClient, ReportedWorker
from swarm.storage import Runtime
from swarm.wire.messages import LearnerReport, SetPlan

GONE_S: Final = 60.0  # silence after which a disconnected worker counts as lost
HUNG_S: Final = 600.0  # the same for a connected worker without leases
ALONE_S_MAX: Final = 3600.0  # without the learner, until all machines are released
LEAVE_S: Final = 60.0  # for a released worker to hand in its groups
CREDITS_NEAR: Final = 0.1  # relative change of the credits that needs no new plan
LEAST_LOOKED_AT: Final = 12  # beats; the largest least depth of these counts
VOLUNTEERS: Final = "static"

Say = Callable[[str], None]


@dataclass(slots=True)
class _Known:
    """A machine as one beat sees it."""

    machine: Machine
    reported: ReportedWorker | None
    instance: Instance | None
    worker: Worker
    is_drained: bool

    @property
    def is_silent(self) -> bool:
        """True if the learner hears nothing. A generating worker is quiet, but has leases."""
        its = self.reported
        if its is None:
            return True
        if its.connected:
            return its.heard_s >= HUNG_S and its.leased == 0
        return its.heard_s >= GONE_S

    @property
    def has_left(self) -> bool:
        """True if it has nothing to hand in: it failed, or stands by without leases."""
        if self.instance is not None and self.instance.condition is Condition.FAILED:
            return True
        its = self.reported
        return its is None or (its.standing_by and its.leased == 0)

    @property
    def delivers(self) -> bool:
        """True if the learner took groups of it, and hears of it still."""
        return self.reported is not None and self.reported.admitted > 0 and not self.is_silent

    @property
    def is_running(self) -> bool:
        return self.instance is not None and self.instance.condition is not Condition.FAILED


@dataclass(slots=True)
class _Memory:
    """Machine data by name that improves the plans and may be lost in a restart."""

    histories: dict[str, MachineHistory] = field(default_factory=dict)
    started_s: dict[str, float] = field(default_factory=dict)  # of machines that are joining
    leaving: dict[str, float] = field(default_factory=dict)  # deadline for handing in
    failures: set[str] = field(default_factory=set)  # failed starts since the last beat
    notes: dict[str, str] = field(default_factory=dict)
    tried_s: dict[str, float] = field(default_factory=dict)  # first starts, before any decision
    beat_s: float | None = None


# Long: a beat looks, decides and acts on one set of workers.
class Coordinator:
    """Plans one learner's workers."""

    def __init__(
        self,
        fleet: Fleet,
        providers: Mapping[str, Provider],
        client: ControlClient,
        nursery: trio.Nursery,
        runtime: Runtime,
        drained: Callable[[], frozenset[str]],
        say: Say,
    ) -> None:
        """`providers` by name, with `VOLUNTEERS`. `drained`: names or peer ids of machines that
        shall not work. `nursery` runs starts and releases, `runtime.run_sync` slow decisions."""
        self.fleet = fleet
        self._providers = providers
        self._client = client
        self._nursery = nursery
        self._unix_s = runtime.now_s
        self._drained = drained
        self._say = say
        self._run_sync = runtime.run_sync
        self._alone_since_s: float | None = None
        self._state = ActivationState()
        self._is_first = True
        self._pacing: Pacing | None = None
        self._refused_before = 0
        self._forecast = Forecast()
        self._least: deque[int] = deque(maxlen=LEAST_LOOKED_AT)  # of the last beats
        self._memory = _Memory()
        self._busy: set[str] = set()  # machines that are being started or released
        self._plan: SetPlan | None = None
        self._why = ""
        self._obstacle: Obstacle | None = None
        self.view: CoordinatorView | None = None

    async def beat(self, unreachable: str = "") -> CoordinatorView:
        """Measure, decide, act. `unreachable`: why there is no connection to the learner."""
        if unreachable:
            return await self._alone(f"the learner is not reachable: {unreachable}")
        try:
            report, reported = await self._client.report()
        except (TransportError, RemoteProtocolError) as error:
            return await self._alone(_unanswered(error))
        self._alone_since_s = None
        for provider in self._providers.values():
            provider.use(self.fleet)
        known = await self._look(reported)
        usable = {name: each for name, each in known.items() if not each.is_drained}
        now_s = trio.current_time()
        if self._is_first:
            self._recall(usable, now_s)
        if self._pacing is None:  # as the one before left it
            self._pacing = Pacing(report.rules.pacing)
            self._refused_before = report.work.would_be_stale
        pacing = self._pacing
        run = run_of(report, self.fleet.learner, report.rules.staleness_max, aimed=True)
        if run is None:
            decision = self._begin(usable, now_s)
        else:
            decision = await self._decide(run, report, usable, now_s)
        self._state = decision.state
        self._act(decision, known, now_s)
        real = run_of(report, self.fleet.learner, pacing.depth, aimed=False)
        capacity = None
        if real is not None:
            active = [
                each.worker
                for name, each in usable.items()
                if self._state.of(name).phase is Phase.ACTIVE
            ]
            capacity, least = await self._run_sync(outlook, real, active, report.pace.broadcast_s)
            self._pacing = self._paced(pacing, report, capacity, least)
        await self._set_plan(report, known, capacity)
        self._forecast = self._forecast.looked(report, capacity)
        if self._forecast.is_calm and _warns_of_age(decision):
            decision = replace(decision, problem=None)
        self._say_why(decision.why)
        obstacle = None if decision.problem is None else decision.problem.obstacle
        if obstacle is not self._obstacle:  # its figures change all the time
            self._obstacle = obstacle
            self._say(str(decision.problem or "there is a plan again without obstacles"))
        self._memory.beat_s = now_s
        self.view = self._seen(report, decision, known, capacity)
        return self.view

    async def _alone(self, why: str) -> CoordinatorView:
        """Without the learner, workers go on for `ALONE_S_MAX`; then they are released."""
        now_s = trio.current_time()
        if self._alone_since_s is None:
            self._alone_since_s = now_s
        self._say_why(why)
        before = self.view or CoordinatorView(str(self._client.learner))
        self.view = replace(before, reachable=False, why=why, problem="")
        if now_s - self._alone_since_s >= ALONE_S_MAX:
            self._alone_since_s = now_s
            self._state = ActivationState()
            self._say(f"no learner for {ALONE_S_MAX:g} s: what was started here is released")
            await self.release_all()
        return self.view

    def _say_why(self, why: str) -> None:
        if why != self._why:
            self._why = why
            self._say(why)

    async def release_all(self) -> None:
        """End all machines that were started here."""
        async with trio.open_nursery() as nursery:
            for provider in self._providers.values():
                for name in await provider.look(()):
                    nursery.start_soon(self._release, provider, name)

    # --- machines ----------------------------------------------------------------------------

    async def _look(self, reported: Sequence[ReportedWorker]) -> dict[str, _Known]:
        """All machines: those of the fleet file, and volunteers."""
        by_peer = {each.peer: each for each in reported}
        machines = {each.name: each for each in self.fleet.machines}
        instances: dict[str, Instance] = {}
        ours = [each for kind, each in self._providers.items() if kind != VOLUNTEERS]
        for provider in ours:
            for name, instance in (await provider.look(reported)).items():
                if name in machines:
                    instances[name] = instance
                elif name not in self._busy:  # from an earlier fleet file
                    self._busy.add(name)
                    self._nursery.start_soon(self._release, provider, name)
        volunteers = [
            each for each in reported if not any(provider.owns(each.peer) for provider in ours)
        ]
        seen = await self._providers[VOLUNTEERS].look(volunteers)
        instances.update(seen)
        named = {each.peer for each in self.fleet.machines if each.peer}
        for worker in volunteers:
            name = str(worker.peer)
            if name not in named and (is_there(worker) or name in seen):
                machines[name] = Machine(name, VOLUNTEERS, name)
        drained = self._drained()
        found: dict[str, _Known] = {}
        for name, machine in list(machines.items())[:WORKERS_MAX]:
            instance_of = instances.get(name)
            peer = instance_of.peer if instance_of and instance_of.peer else None
            peer = peer or (PeerId(machine.peer) if machine.peer else None)
            its = by_peer.get(peer) if peer else None
            history = self._memory.histories.get(name, MachineHistory())
            found[name] = _Known(
                machine,
                its,
                instance_of,
                worker_of(machine, its, history),
                not drained.isdisjoint({name, machine.peer, str(peer or "")} - {""}),
            )
        return found

    def _recall(self, usable: Mapping[str, _Known], now_s: float) -> None:
        """Count all running machines as wanted."""
        running = frozenset(name for name, each in usable.items() if each.is_running)
        standings = {name: Standing(Phase.ACTIVE, now_s) for name in running}
        self._state = ActivationState(standings=standings, wanted=running)
        self._is_first = False
        if running:
            self._say(f"found at work: {', '.join(sorted(running))}")

    # --- decisions ---------------------------------------------------------------------------

    def _begin(self, usable: Mapping[str, _Known], now_s: float) -> Decision:
        """Before the first step: one machine, the cheapest for a group by the file's guesses."""
        self._memory.failures.clear()
        pause_s, tried_s = self.fleet.settings.cooldown_s, self._memory.tried_s
        join_s_max = self.fleet.settings.join_s_max
        for name, each in usable.items():
            if each.is_running and each.machine.provider != VOLUNTEERS:
                tried_s.setdefault(name, now_s)  # an earlier coordinator started it
        working = {
            name
            for name, each in usable.items()
            if each.delivers
            or (each.is_running and now_s - tried_s.get(name, -join_s_max) < join_s_max)
        }
        if working or self._busy:
            return self._wait_for_steps(working, usable, now_s)
        ready = [
            each
            for name, each in usable.items()
            if each.machine.provider != VOLUNTEERS
            and not each.is_running
            and now_s - tried_s.get(name, -pause_s) >= pause_s
        ]
        if not ready:
            return Decision(self._state, why="no worker is there, and none can be started now")
        first = min(
            (each.machine.price_per_h / each.machine.groups_per_s, each.machine.name)
            for each in ready
        )[1]
        tried_s[first] = now_s
        standings = {**self._state.standings, first: Standing(Phase.JOINING, now_s)}
        state = replace(self._state, standings=standings, wanted=frozenset({first}))
        return Decision(state, (first,), why="one worker, until it is known what a step takes")

    def _wait_for_steps(
        self, working: Iterable[str], usable: Mapping[str, _Known], now_s: float
    ) -> Decision:
        """Let all that deliver work: after a restart of the learner its first steps need them."""
        idle = {name for name in working if usable[name].delivers and not self._state.of(name).runs}
        for name in idle:
            self._memory.leaving.pop(name, None)
        active = dict.fromkeys(idle, Standing(Phase.ACTIVE, now_s))
        standings = {**self._state.standings, **active}
        state = replace(self._state, standings=standings, wanted=self._state.wanted | idle)
        return Decision(state, why="waiting for the learner's first steps")

    async def _decide(
        self, run: Run, report: LearnerReport, usable: Mapping[str, _Known], now_s: float
    ) -> Decision:
        fresh = frozenset(name for name, each in usable.items() if _is_fresh(each, report))
        failed = self._failed(usable, fresh, now_s)
        self._remember(usable, fresh, failed, now_s)
        active = [usable[name].worker for name in sorted(fresh)]
        run = replace(run, load_s=calibrated_load_s(run, active, report.pace.broadcast_s))
        seen = Seen([each.worker for each in usable.values()], fresh, failed)
        bound = report.rules.staleness_max
        decision: Decision = await self._run_sync(
            decided, run, self._state, seen, now_s, self.fleet.settings, bound
        )
        return decision

    def _failed(
        self, usable: Mapping[str, _Known], fresh: frozenset[str], now_s: float
    ) -> frozenset[str]:
        """Machines that should work and do not: ended, silent, or failed to start."""
        failed, self._memory.failures = self._memory.failures, set()
        for name, each in usable.items():
            standing = self._state.of(name)
            if not standing.runs or name in self._busy:
                continue
            if each.instance is not None and each.instance.condition is Condition.FAILED:
                failed.add(name)
                self._memory.notes[name] = each.instance.detail
            elif (
                standing.phase is Phase.ACTIVE
                and each.is_silent
                and now_s - standing.since_s >= GONE_S
            ):
                failed.add(name)
                self._memory.notes[name] = "the learner does not hear of it"
        return frozenset(failed)

    def _remember(
        self,
        usable: Mapping[str, _Known],
        fresh: frozenset[str],
        failed: frozenset[str],
        now_s: float,
    ) -> None:
        memory = self._memory
        since_s = memory.beat_s
        for name in usable:
            history = memory.histories.get(name, MachineHistory())
            if name in fresh:
                if name in memory.started_s:
                    history = history.started(now_s - memory.started_s.pop(name))
                    memory.notes.pop(name, None)
                if since_s is not None:
                    history = history.served(now_s - since_s)
            if name in failed:
                if self._state.of(name).phase is Phase.ACTIVE:
                    history = history.lost()
                memory.started_s.pop(name, None)
            memory.histories[name] = history
        for gone in memory.histories.keys() - usable.keys():
            del memory.histories[gone]
        for about in (memory.notes, memory.started_s, memory.tried_s):
            for gone in about.keys() - usable.keys():
                about.pop(gone)

    # --- starts and releases -----------------------------------------------------------------

    def _act(self, decision: Decision, known: Mapping[str, _Known], now_s: float) -> None:
        """Start and release. A released worker gets no more leases and `LEAVE_S` to hand in."""
        memory = self._memory
        waiting = [
            name
            for name, each in known.items()
            if self._state.of(name).phase is Phase.JOINING
            and each.instance is None
            and not each.is_drained
        ]  # their start came during a release, or was lost
        for name in dict.fromkeys((*decision.activate, *waiting)):
            memory.leaving.pop(name, None)
            if name not in self._busy:
                memory.started_s[name] = now_s
                self._busy.add(name)
                self._nursery.start_soon(self._start, known[name].machine)
        unwanted = [
            name
            for name, each in known.items()
            if each.is_running and name not in self._busy and not self._may_work(name, each)
        ]
        for name in (*decision.release, *unwanted):
            memory.leaving.setdefault(name, now_s + LEAVE_S)
        for name, until_s in list(memory.leaving.items()):
            each = known.get(name)
            if each is None or each.instance is None:
                del memory.leaving[name]
            elif (now_s >= until_s or each.has_left) and name not in self._busy:
                del memory.leaving[name]
                self._busy.add(name)
                provider = self._providers[each.machine.provider]
                self._nursery.start_soon(self._release, provider, name)

    async def _start(self, machine: Machine) -> None:
        try:
            self._say(f"start {machine.name} ({machine.provider})")
            await self._providers[machine.provider].start(machine)
        except ProviderFailed as error:
            self._memory.failures.add(machine.name)
            self._memory.notes[machine.name] = str(error)
            self._say(f"{machine.name} did not start: {error}")
        finally:
            self._busy.discard(machine.name)

    async def _release(self, provider: Provider, name: str) -> None:
        try:
            self._say(f"release {name}")
            await provider.release(name)
        except ProviderFailed as error:
            self._memory.notes[name] = str(error)
            self._say(f"{name} could not be released: {error}")
        finally:
            self._busy.discard(name)

    # --- the learner's plan ------------------------------------------------------------------

    def _paced(
        self, pacing: Pacing, report: LearnerReport, capacity: Capacity | None, least: int | None
    ) -> Pacing:
        if least is None:
            self._least.clear()
        else:
            self._least.append(least)
        refused = max(0, report.work.would_be_stale - self._refused_before)
        self._refused_before = report.work.would_be_stale
        seen = Measured(
            step=report.version,
            bound=report.rules.staleness_max,
            least=max(self._least, default=None),
            idle_share=report.pace.idle_share,
            predicted_idle_share=0.0 if capacity is None else 1.0 - capacity.utilisation,
            refused=refused,
            effective_share=report.pace.effective_share,
            mismatch_k3=report.pace.mismatch_k3,
        )
        moved = next_pacing(pacing, seen, self.fleet.pacing)
        if moved.depth != pacing.depth:
            self._say(f"pacing depth {pacing.depth} -> {moved.depth}: {moved.why}")
        return moved

    async def _set_plan(
        self, report: LearnerReport, known: Mapping[str, _Known], capacity: Capacity | None
    ) -> None:
        """Send the learner its plan if that has changed."""
        standby = {
            each.reported.peer
            for name, each in known.items()
            if each.reported is not None and not self._may_work(name, each)
        }
        depth = self._pacing.depth if self._pacing else report.rules.staleness_max
        wanted = SetPlan(
            type="plan",
            number=max(int(1e3 * self._unix_s()), report.plan + 1),
            standby=coordination.pack_peers(sorted(standby)),
            pacing=min(depth, report.rules.staleness_max),
            publish_every=0 if capacity is None else min(capacity.period_steps, 1024),
            credits=0 if capacity is None else capacity.inflight_groups,
        )
        if self._is_in_force(wanted, report):
            return
        try:
            await self._client.set_plan(wanted)
        except (TransportError, RemoteProtocolError) as error:
            self._say(f"the plan did not reach the learner: {error}")
            return
        self._plan = wanted

    def _is_in_force(self, wanted: SetPlan, report: LearnerReport) -> bool:
        """True if the learner follows such a plan, up to `CREDITS_NEAR`."""
        before = self._plan
        if before is None or before.number != report.plan:
            return False
        near = abs(wanted.credits - before.credits) <= CREDITS_NEAR * before.credits
        same = {"number": before.number, "credits": before.credits if near else wanted.credits}
        return wanted.model_copy(update=same) == before

    def _may_work(self, name: str, each: _Known) -> bool:
        """True if it gets leases. A free volunteer is measured before it is stood by."""
        if each.is_drained or name in self._memory.leaving:
            return False
        standing = self._state.of(name)
        is_free = each.machine.provider == VOLUNTEERS and each.machine.price_per_h == 0.0
        is_new = each.reported is None or not is_measured(each.reported)
        return standing.runs or (is_free and is_new and standing.phase is not Phase.COOLING)

    # --- view --------------------------------------------------------------------------------

    def _seen(
        self,
        report: LearnerReport,
        decision: Decision,
        known: Mapping[str, _Known],
        capacity: Capacity | None,
    ) -> CoordinatorView:
        pacing, forecast = self._pacing, self._forecast
        predicted = None if capacity is None else forecast.corrected(capacity, report)
        running = [each for name, each in known.items() if self._state.of(name).runs]
        return CoordinatorView(
            learner=str(self._client.learner),
            why=decision.why,
            problem=str(decision.problem or ""),
            report=report,
            plan=self._plan.number if self._plan else 0,
            depth=pacing.depth if pacing else report.rules.staleness_max,
            depth_why=pacing.why if pacing else "",
            predicted=predicted,
            error=forecast.error,
            cost_per_h=sum(each.machine.price_per_h for each in running),
            rows=tuple(self._row(name, each) for name, each in sorted(known.items())),
        )

    def _row(self, name: str, each: _Known) -> MachineRow:
        its, instance = each.reported, each.instance
        phase = "drained" if each.is_drained else str(self._state.of(name).phase)
        if name in self._memory.leaving:
            phase = "leaving"
        return MachineRow(
            name=name,
            provider=each.machine.provider,
            peer=str(instance.peer if instance and instance.peer else each.machine.peer),
            phase=phase,
            condition="" if instance is None else str(instance.condition),
            version=None if its is None else its.version,
            groups_per_s=each.worker.admitted_per_s,
            measured=its is not None and is_measured(its),
            price_per_h=each.machine.price_per_h,
            admitted=0 if its is None else its.admitted,
            heard_s=None if its is None else its.heard_s,
            note=self._memory.notes.get(name, ""),
        )


def _unanswered(error: Exception) -> str:
    did = "refuses" if isinstance(error, RequestRefused) else "does not answer"
    why = str(error).strip("'")
    return f"the learner {did}: {why}"


def _warns_of_age(decision: Decision) -> bool:
    return decision.problem is not None and decision.problem.obstacle is Obstacle.STALENESS


def _is_fresh(each: _Known, report: LearnerReport) -> bool:
    """True if it runs, reports, and generates with weights that are fresh enough."""
    its = each.reported
    if its is None or each.is_silent or not 0 < its.version <= report.version:
        return False
    if each.instance is None or each.instance.condition is not Condition.UP:
        return False
    # a worker with the newest version on offer cannot have a fresher one
    needed = is_fresh_enough(
        its.version, report.version, report.rules.publish_every, report.rules.staleness_max
    )
    return needed or its.version >= report.published - report.rules.publish_every
