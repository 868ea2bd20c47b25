"""The messages between a learner and its coordinator. Their limits are in `messages`."""

from typing import Annotated, Literal

from pydantic import Field

from swarm.wire.messages import (
    AMOUNT_MAX,
    DEPTH_MAX,
    DETAIL_CHARS_MAX,
    REPORT_ROW_BYTES,
    REPORT_WORKERS_MAX,
    Float,
    RunId,
    SeqNo,
    WireModel,
)

Depth = Annotated[int, Field(ge=0, le=DEPTH_MAX)]
Count = Annotated[int, Field(ge=0, lt=2**48)]
Amount = Annotated[Float, Field(ge=0.0, le=AMOUNT_MAX)]  # seconds, or a share
PlanNumber = Annotated[int, Field(ge=0, lt=2**53)]  # a later plan has a higher one
PublicKeys = Annotated[bytes, Field(max_length=32 * REPORT_WORKERS_MAX)]  # raw, 32 bytes each


class WantReport(WireModel):
    """A coordinator asks the learner how things stand."""

    type: Literal["want_report"]


class LearnerRulesBody(WireModel):
    """The rules that a learner follows now."""

    staleness_max: Depth  # S
    pacing: Depth  # the staleness that leases aim at
    publish_every: Depth  # κ, steps
    groups_per_step: Count
    credits: Count  # groups that may be granted and buffered together


class LearnerWorkBody(WireModel):
    """Groups: now, and ever."""

    buffered: Count
    leased: Count
    consumed: Count  # ever, as those below
    discarded: Count
    would_be_stale: Count  # leases that were refused because their groups would come too late


class LearnerPaceBody(WireModel):
    """Means over the last steps. 0 or None: not known yet."""

    train_s: Amount  # all that a step takes but the wait for groups
    step_s: Amount  # from one step's end to the next
    idle_share: Amount  # of that, waited for groups
    broadcast_s: Amount  # from the announcement of a version until all have it
    staleness_mean: Amount
    staleness_worst: Depth
    effective_share: Amount | None  # effective sample size of importance weights, over their number
    mismatch_k3: Amount | None  # KL from what generated the tokens to the policy before the step


class LearnerSizesBody(WireModel):
    """Bytes. 0 where they are not known yet."""

    weights_bytes: Count  # a whole version
    delta_bytes: Count  # what a version differs by from the one before it
    up_bytes_per_s: Count
    group_bytes: Count  # a group on its way


class LearnerReport(WireModel):
    """A learner's measurements, of itself and of its workers."""

    type: Literal["report"]
    run_id: RunId
    plan: PlanNumber  # that is in force; 0: none
    version: SeqNo
    published: SeqNo  # the newest version on offer
    rules: LearnerRulesBody
    work: LearnerWorkBody
    pace: LearnerPaceBody
    sizes: LearnerSizesBody
    # a row for each of those heard of last, little-endian: its raw public key, 32 bytes; u32
    # version; f32 groups_per_s (negative: not measured), failed share, turnaround_s, heard_s ago;
    # u32 admitted, refused, groups in open leases; u64 up and down bytes per s; u32 flags (1 stands
    # by, 2 relayed, 4 connected); u32 0
    workers: Annotated[bytes, Field(max_length=REPORT_ROW_BYTES * REPORT_WORKERS_MAX)]


class SetPlan(WireModel):
    """A coordinator's plan: it is in force until one with a higher number comes."""

    type: Literal["plan"]
    number: PlanNumber
    standby: PublicKeys  # who gets no leases; everybody else does
    pacing: Depth  # the staleness that leases aim at; the run's bound holds in any case
    publish_every: Depth  # κ; 0: as the run says
    credits: Count  # groups that may be granted and buffered together; 0: as the learner has it


class PlanReply(WireModel):
    """The plan in force; `detail` says why another one was not taken."""

    type: Literal["plan_reply"]
    number: PlanNumber
    detail: Annotated[str, Field(max_length=DETAIL_CHARS_MAX)]
