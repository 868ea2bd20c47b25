"""A learner's reports to its coordinator, and the plan that it follows, which survives restarts."""

from collections import deque
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean, median
from typing import Final

import trio

from node.config.run import LearnerRules
from node.observe.node_reports import Extras, broadcast_row, worker_rows
from node.observe.records import StepDone
from node.run.learner import Learner
from swarm.errors import RemoteProtocolError
from swarm.identity import PeerId
from swarm.leases import coordination
from swarm.leases.coordination import ReportedWorker
from swarm.leases.intake import Intake
from swarm.storage import RunSync, write_whole
from swarm.telemetry import metrics as m
from swarm.transport.base import Transport
from swarm.weights.publisher import Published, Spread
from swarm.weights.weights_service import WeightsService
from swarm.wire import codec
from swarm.wire.messages import (
    AMOUNT_MAX,
    DEPTH_MAX,
    PLAN_BYTES_MAX,
    REPORT_WORKERS_MAX,
    LearnerPaceBody,
    LearnerReport,
    LearnerRulesBody,
    LearnerSizesBody,
    LearnerWorkBody,
    SetPlan,
)

PLAN_FILE: Final = "plan.msgpack"
STEPS_LOOKED_AT: Final = 12  # the last so many
SPREADS_LOOKED_AT: Final = 5


@dataclass(frozen=True, slots=True)
class _Step:
    """Duration and record of one step."""

    wall_s: float  # since the end of the one before
    idle_s: float
    record: StepDone


class CoordinatorClient:
    """Implements `swarm.leases.coordination.CoordinatedLearner` for one learner's process."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        rules: LearnerRules,
        transport: Transport,
        service: WeightsService | None,
        run_sync: RunSync,
        *,
        has_coordinator: bool = True,
    ) -> None:
        """The plan is kept in `directory`; an old one counts only if `has_coordinator`. `service`:
        None where versions reach workers without one."""
        self._path = directory / PLAN_FILE
        self._run_id = run_id
        self._rules = rules
        self._transport = transport
        self._sharing = None if service is None else service.sharing
        self._run_sync = run_sync
        self._plan = _kept(self._path) if has_coordinator else None
        self.failure = ""  # of keeping the plan
        self._learner: Learner | None = None
        self._intake: Intake | None = None
        self._steps: deque[_Step] = deque(maxlen=STEPS_LOOKED_AT)
        self._spreads_s: deque[float] = deque(maxlen=SPREADS_LOOKED_AT)
        self._spread: Spread | None = None  # the last
        self._stepped_s: float | None = None
        self._own_credits = 0
        self._published: Published | None = None

    # --- what the learner's process tells ----------------------------------------------------

    def attend(self, learner: Learner, intake: Intake) -> None:
        """Steer this learner from now on; the plan that was kept is in force at once."""
        self._learner, self._intake = learner, intake
        self._own_credits = intake.book.account.rules.groups_max
        self._stepped_s = None
        if self._plan is not None:
            self._put_in_force(self._plan)

    def note_step(self, record: StepDone) -> None:
        """Record a step."""
        now_s = trio.current_time()
        if self._stepped_s is not None:
            self._steps.append(_Step(now_s - self._stepped_s, record.idle_s, record))
        self._stepped_s = now_s

    def note_published(self, published: Published) -> None:
        """Record a version on offer."""
        self._published = published

    def note_spread(self, spread: Spread) -> None:
        """Record that all peers that took part have a version."""
        self._spread = spread
        self._spreads_s.append(spread.time_s)

    def lift(self) -> None:
        """End the standby of all workers until the next plan."""
        if self._intake is not None:
            self._intake.standby = frozenset()

    @property
    def is_idle(self) -> bool:
        """True if workers stand by while none works."""
        intake = self._intake
        return intake is not None and bool(intake.standby) and intake.counts().leased == 0

    # --- for whoever watches -----------------------------------------------------------------

    def workers(self) -> list[ReportedWorker]:
        """Figures of the workers that were heard of since the learner's start, at most the last
        `REPORT_WORKERS_MAX`."""
        accounts = self._intake.book.accounts() if self._intake else []
        now_s, links = trio.current_time(), self._sharing.links if self._sharing else {}
        there = set(self._transport.peers())
        heard = sorted(
            (each.known.heard_at, each.worker, each.known, each.leased)
            for each in accounts
            if each.known.heard_at
        )
        standby = self._intake.standby if self._intake else frozenset()
        return [
            ReportedWorker(
                peer=PeerId(name),
                version=each.version,
                groups_per_s=each.rate,
                failed_share=each.failed_share,
                turnaround_s=each.turnaround_s,
                heard_s=max(0.0, now_s - heard_at),
                admitted=each.admitted,
                refused=each.refused,
                leased=leased,
                up_bytes_per_s=links.get(PeerId(name), (0, 0))[0],
                down_bytes_per_s=links.get(PeerId(name), (0, 0))[1],
                standing_by=name in standby,
                relayed=name in there and self._transport.ip_of(PeerId(name)) is None,
                connected=name in there,
            )
            for heard_at, name, each, leased in heard[-REPORT_WORKERS_MAX:]
        ]

    def extras(self) -> Extras:
        """A learner's telemetry beyond its records."""
        intake, spread = self._intake, self._spread
        counts = None if intake is None else intake.counts()
        metrics = {m.STALENESS_BOUND_STEPS: float(self._rules.staleness_max)}
        if intake is not None and counts is not None:
            metrics[m.IN_FLIGHT_GROUPS] = float(counts.leased)
            metrics[m.TRIAL_GROUPS] = float(counts.on_trial)
            metrics[m.QUEUED_GROUPS] = float(counts.buffered)
            metrics[m.QUEUED_STALENESS_MAX_STEPS] = float(intake.staleness_buffered() or 0)
        if spread is not None:
            metrics[m.BROADCAST_S] = spread.time_s
            if spread.bound_s:
                metrics[m.BROADCAST_BOUND_RATIO] = spread.time_s / spread.bound_s
        discarded = {} if counts is None else counts.discarded
        return Extras(
            metrics,
            {m.DISCARDED_TOTAL: {reason: float(count) for reason, count in discarded.items()}},
            worker_rows(self.workers()),
            broadcast_row(self._sharing.holding()) if self._sharing else None,
        )

    # --- for the coordinator -----------------------------------------------------------------

    @property
    def plan_number(self) -> int:
        return 0 if self._plan is None else self._plan.number

    async def follow(self, plan: SetPlan) -> None:
        try:
            await self._run_sync(write_whole, self._path, codec.encode(plan))
        except OSError as error:  # it is followed all the same, until the next start
            self.failure = f"the coordinator's plan could not be kept: {error}"
        else:
            self.failure = ""
        self._plan = plan
        self._put_in_force(plan)

    def _put_in_force(self, plan: SetPlan) -> None:
        if self._learner is None or self._intake is None:
            return
        self._intake.standby = frozenset(map(str, coordination.unpack_peers(plan.standby)))
        self._intake.book.account.set_pacing(plan.pacing)
        self._intake.book.account.set_groups_max(plan.credits or self._own_credits)
        most = max(1, self._rules.staleness_max)
        self._learner.publish_every = min(plan.publish_every or self._rules.publish_every, most)

    # Long: one report, field by field.
    def report(self) -> LearnerReport:
        learner, intake = self._learner, self._intake
        counts = None if intake is None else intake.counts()
        steps = [each.record for each in self._steps]
        shares = [each.effective_share for each in steps if each.effective_share is not None]
        k3s = [each.mismatch_k3 for each in steps if each.mismatch_k3 is not None]
        published = self._published
        wall_s = sum(each.wall_s for each in self._steps)
        idle_s = sum(each.idle_s for each in self._steps)
        return LearnerReport(
            type="report",
            run_id=self._run_id,
            plan=self.plan_number,
            version=learner.version if learner else 0,
            published=learner.published if learner else 0,
            rules=LearnerRulesBody(
                staleness_max=self._rules.staleness_max,
                pacing=intake.book.account.pacing if intake else self._rules.staleness_max,
                publish_every=learner.publish_every if learner else self._rules.publish_every,
                groups_per_step=self._rules.groups_per_step,
                credits=intake.book.account.rules.groups_max if intake else 0,
            ),
            work=LearnerWorkBody(
                buffered=counts.buffered if counts else 0,
                leased=counts.leased if counts else 0,
                consumed=counts.consumed if counts else 0,
                discarded=sum(counts.discarded.values()) if counts else 0,
                would_be_stale=counts.denied.get("would_be_stale", 0) if counts else 0,
            ),
            # now and then a step evaluates, or waits for a disk: the median is without these
            pace=LearnerPaceBody(
                train_s=_amount(median(s.wall_s - s.idle_s for s in self._steps) if steps else 0.0),
                step_s=_amount(wall_s / len(steps) if steps else 0.0),
                idle_share=min(1.0, idle_s / wall_s) if wall_s > 0.0 else 0.0,
                broadcast_s=_amount(median(self._spreads_s) if self._spreads_s else 0.0),
                staleness_mean=_amount(
                    fmean(each.staleness_mean for each in steps) if steps else 0.0
                ),
                staleness_worst=min(
                    max((each.staleness_max for each in steps), default=0), DEPTH_MAX
                ),
                effective_share=_amount(fmean(shares)) if shares else None,
                mismatch_k3=_amount(fmean(k3s)) if k3s else None,
            ),
            sizes=LearnerSizesBody(
                weights_bytes=published.full_bytes if published else 0,
                delta_bytes=(published.delta_bytes or 0) if published else 0,
                up_bytes_per_s=int(self._sharing.up_bytes_per_s) if self._sharing else 0,
                group_bytes=intake.group_bytes if intake else 0,
            ),
            workers=coordination.pack(self.workers()),
        )


def _amount(value: float) -> float:
    """A measurement within the bounds of the wire format."""
    return 0.0 if isnan(value) else max(0.0, min(value, AMOUNT_MAX))


def _kept(path: Path) -> SetPlan | None:
    """The plan from before the restart; a damaged one is none."""
    try:
        return codec.decode(path.read_bytes()[: PLAN_BYTES_MAX + 1], SetPlan, PLAN_BYTES_MAX)
    except (FileNotFoundError, RemoteProtocolError):
        return None
