"""Between a learner and its coordinator: reports of measurements, and plans.

The learner's owner names the coordinator's peer id; nobody else is answered. A plan stays in force
until one with a higher number comes, also while the coordinator is away. Workers that the plan does
not mention still get leases.
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import trio

from swarm.errors import Reject, RemoteProtocolError, RequestRefused
from swarm.identity import PeerId, peer_id_of, public_key_of
from swarm.limits.quotas import Kind
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.reputation import Ledger
from swarm.peers.requests import ask
from swarm.transport.base import ServeLimits, Transport
from swarm.wire import codec
from swarm.wire.messages import (
    PLAN_BYTES_MAX,
    PLAN_REPLY_BYTES_MAX,
    PLANS_PROTOCOL,
    REPORT_BYTES_MAX,
    REPORT_ROW_BYTES,
    REPORT_WORKERS_MAX,
    REPORTS_PROTOCOL,
    WANT_REPORT_BYTES_MAX,
    LearnerReport,
    PlanReply,
    SetPlan,
    WantReport,
    WireModel,
)

TIMEOUT_S: Final = 10.0
STANDING_BY, RELAYED, CONNECTED = 1, 2, 4  # flags of a row
_ROW: Final = struct.Struct("<32sIffffIIIQQII")
assert _ROW.size == REPORT_ROW_BYTES
FLOAT_MAX: Final = 3.0e38  # of a row; more is as good as that
COUNT_MAX: Final = 2**32 - 1
LINK_MAX: Final = 2**50  # bytes a second
KEY_BYTES: Final = 32

M = TypeVar("M", bound=WireModel)


NOT_ITS_COORDINATOR: Final = (
    "it names no coordinator, or another one: start it with --coordinator and this one's peer id"
)


@dataclass(frozen=True, slots=True)
class ReportedWorker:
    """One worker as its learner measured it. 0: not known."""

    peer: PeerId
    version: int  # that it has, by its own word
    groups_per_s: float | None  # admitted, while it works; None: not measured
    failed_share: float  # of the groups that it was granted
    turnaround_s: float  # from the grant of a group to its admission
    heard_s: float  # ago
    admitted: int
    refused: int
    leased: int  # groups in its hands
    up_bytes_per_s: int  # of its link, as it says
    down_bytes_per_s: int
    standing_by: bool = False
    relayed: bool = False
    connected: bool = True


def pack(workers: Iterable[ReportedWorker]) -> bytes:
    """The column `workers` of a report, cut at its limit."""
    return b"".join(
        _ROW.pack(
            public_key_of(each.peer),
            each.version,
            -1.0 if each.groups_per_s is None else min(each.groups_per_s, FLOAT_MAX),
            min(each.failed_share, 1.0),
            min(each.turnaround_s, FLOAT_MAX),
            min(each.heard_s, FLOAT_MAX),
            min(each.admitted, COUNT_MAX),
            min(each.refused, COUNT_MAX),
            min(each.leased, COUNT_MAX),
            each.up_bytes_per_s,
            each.down_bytes_per_s,
            each.standing_by * STANDING_BY | each.relayed * RELAYED | each.connected * CONNECTED,
            0,
        )
        for each in list(workers)[:REPORT_WORKERS_MAX]
    )


def unpack(column: bytes) -> tuple[ReportedWorker, ...]:
    """The workers of a report; raises `RemoteProtocolError`."""
    if len(column) % REPORT_ROW_BYTES:
        raise RemoteProtocolError(Reject.MALFORMED, "no whole rows of workers")
    found = tuple(_worker(row) for row in _ROW.iter_unpack(column))
    if len({each.peer for each in found}) < len(found):
        raise RemoteProtocolError(Reject.MALFORMED, "a worker twice")
    return found


def _worker(row: tuple[Any, ...]) -> ReportedWorker:
    key, version, rate, failed, turnaround_s, heard_s, admitted, refused, leased, *rest = row
    up, down, flags, _ = rest
    amounts = (failed, turnaround_s, heard_s)
    if not all(0.0 <= each <= FLOAT_MAX for each in amounts) or not rate <= FLOAT_MAX:
        raise RemoteProtocolError(Reject.MALFORMED, "a row with an impossible number")
    if max(up, down) >= LINK_MAX:
        raise RemoteProtocolError(Reject.MALFORMED, "a row with an impossible link")
    return ReportedWorker(
        peer=peer_id_of(key),
        version=version,
        groups_per_s=None if rate < 0.0 else rate,
        failed_share=min(failed, 1.0),
        turnaround_s=turnaround_s,
        heard_s=heard_s,
        admitted=admitted,
        refused=refused,
        leased=leased,
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        standing_by=bool(flags & STANDING_BY),
        relayed=bool(flags & RELAYED),
        connected=bool(flags & CONNECTED),
    )


def pack_peers(peers: Iterable[PeerId]) -> bytes:
    """The column `standby` of a plan, cut at its limit."""
    keys = [public_key_of(peer) for peer in peers]
    return b"".join(keys[:REPORT_WORKERS_MAX])


def unpack_peers(column: bytes) -> frozenset[PeerId]:
    """The peers of a plan; raises `RemoteProtocolError`."""
    if len(column) % KEY_BYTES:
        raise RemoteProtocolError(Reject.MALFORMED, "no whole keys")
    return frozenset(
        peer_id_of(column[at : at + KEY_BYTES]) for at in range(0, len(column), KEY_BYTES)
    )


class CoordinatedLearner(Protocol):
    """A learner, as its coordinator sees it."""

    @property
    def plan_number(self) -> int:
        """The number of the plan in force; 0: none."""
        ...

    def report(self) -> LearnerReport: ...

    async def follow(self, plan: SetPlan) -> None:
        """Put a plan in force, and keep it for the next start."""
        ...


class ControlService:
    """The learner's side: answers its coordinator, and nobody else."""

    def __init__(
        self,
        transport: Transport,
        gater: ConnectionGater,
        steered: CoordinatedLearner,
        may_steer: Callable[[PeerId], bool],
    ) -> None:
        self._transport = transport
        self._gater = gater
        self._steered = steered
        self._may_steer = may_steer
        self._following = trio.Lock()
        self.heard_s: float | None = None  # when the coordinator asked last, on trio's clock

    def serve(self) -> None:
        limits = ServeLimits(WANT_REPORT_BYTES_MAX, REPORT_BYTES_MAX, concurrent_max=4)
        self._transport.serve(REPORTS_PROTOCOL, self._serve_report, limits)
        limits = ServeLimits(PLAN_BYTES_MAX, PLAN_REPLY_BYTES_MAX, concurrent_max=4)
        self._transport.serve(PLANS_PROTOCOL, self._serve_plan, limits)

    def _check(self, peer: PeerId) -> None:
        self._gater.check_quota(Kind.CONTROL, peer)
        if not self._may_steer(peer):
            raise RequestRefused(NOT_ITS_COORDINATOR)
        self.heard_s = trio.current_time()

    async def _serve_report(self, peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        self._check(peer)
        self._gater.ledger.judge(peer, codec.decode, payload, WantReport, WANT_REPORT_BYTES_MAX)
        return codec.encode(self._steered.report())

    async def _serve_plan(self, peer: PeerId, payload: bytes) -> bytes:
        self._check(peer)
        plan = self._gater.ledger.judge(peer, codec.decode, payload, SetPlan, PLAN_BYTES_MAX)
        async with self._following:
            number, detail = self._steered.plan_number, ""
            self._gater.ledger.judge(peer, unpack_peers, plan.standby)
            if plan.number > number:
                await self._steered.follow(plan)
                number = plan.number
            elif plan.number < number:
                detail = "a later plan is in force"
        return codec.encode(PlanReply(type="plan_reply", number=number, detail=detail))


class ControlClient:
    """The coordinator's side, of one learner."""

    def __init__(self, transport: Transport, ledger: Ledger, learner: PeerId) -> None:
        self._transport = transport
        self._ledger = ledger
        self.learner = learner

    async def report(self) -> tuple[LearnerReport, tuple[ReportedWorker, ...]]:
        """The learner's measurements, of itself and of its workers.

        Raises `TransportError` without an answer, `RequestRefused` if it has another coordinator,
        `RemoteProtocolError` for no report.
        """
        report = await self._ask(
            REPORTS_PROTOCOL, WantReport(type="want_report"), LearnerReport, REPORT_BYTES_MAX
        )
        return report, self._ledger.judge(self.learner, unpack, report.workers)

    async def set_plan(self, plan: SetPlan) -> PlanReply:
        """Put a plan in force. Raises as `report`."""
        return await self._ask(PLANS_PROTOCOL, plan, PlanReply, PLAN_REPLY_BYTES_MAX)

    async def _ask(self, protocol: str, message: WireModel, kind: type[M], bytes_max: int) -> M:
        to = (self._transport, self.learner, protocol)
        return await ask(*to, message, kind, bytes_max, TIMEOUT_S, self._ledger)
