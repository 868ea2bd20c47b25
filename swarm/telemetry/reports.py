"""Reports of a node: one signed report per interval, with a bound on each field.

A report is JSON, so that any MQTT client can show it. It comes from strangers: it is bounded before
it is parsed, signed by its node, and refused whole if a field breaks a limit. No decision of a
swarm depends on it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.errors import LocalProtocolError, Reject, RemoteProtocolError
from swarm.identity import Identity, PeerId, verify
from swarm.telemetry.metrics import METRICS

DOMAIN: Final = b"swarm-telemetry-1:"
STATUS_DOMAIN: Final = b"swarm-telemetry-status-1:"
ALARMS_DOMAIN: Final = b"swarm-telemetry-alarms-1:"
REPORT_BYTES_MAX: Final = 65_536
STATUS_BYTES_MAX: Final = 1_024
TOPIC_CHARS_MAX: Final = 200
PEERS_MAX: Final = 64  # in one report: those with the most traffic
WORKERS_MAX: Final = 256
LABELS_MAX: Final = 32  # values of one label: reasons, protocols
ALARMS_MAX: Final = 16
NOTES_MAX: Final = 16
TEXT_CHARS_MAX: Final = 400
NAME_CHARS_MAX: Final = 80
PHASE_CHARS_MAX: Final = 40
CHUNKS_MAX: Final = 16_384  # bits of a broadcast's bitfield; each may stand for several chunks
COUNT_MAX: Final = 2**63 - 1

Role = Literal["node", "learner", "worker", "coordinator"]
Level = Literal["warning", "critical"]


class Alarm(StrEnum):
    """A fault of a node or a swarm. `ADVICE` has one sentence on what to do for each."""

    NOT_SHARING = "not_sharing"  # peers are connected, and no foreign group is accepted
    NO_FOREIGN = "no_foreign"  # J is wanted, and rounds train on none
    LEARNER_STARVING = "learner_starving"  # waits for groups most of the time
    STALENESS_NEAR_BOUND = "staleness_near_bound"
    ONE_PRODUCER = "one_producer"  # dominates what is trained on
    REJECT_STORM = "reject_storm"
    DISK_LOW = "disk_low"
    MEMORY_LOW = "memory_low"
    CLOCK_SKEW = "clock_skew"
    REFUSING_NEWCOMERS = "refusing_newcomers"  # all places for connections are taken
    VERSION_SPLIT = "version_split"  # workers far behind the published version
    NOTHING_TO_LEARN = "nothing_to_learn"  # in every group, all rewards are alike
    CUT_THOUGHTS = "cut_thoughts"  # completions end before their thoughts do
    LAGGING_VERSION = "lagging_version"  # what is learned hardly reaches the policy that generates
    WENT_BACK = "went_back"  # the policy fell, and is again the best one


ADVICE: Final[Mapping[Alarm, str]] = {
    Alarm.NOT_SHARING: (
        "Look at the rejects by reason in `swarm-node status`; if there are none, see that the "
        "peers run the same run file and have finished a round."
    ),
    Alarm.NO_FOREIGN: (
        "Wait until peers have finished a round; if it stays, ask for fewer foreign groups with "
        "--external, or for easier tasks, so that not all groups pass or fail alike."
    ),
    Alarm.LEARNER_STARVING: (
        "Start more rollout workers, or ask `swarm-coordinator plan` how many are needed."
    ),
    Alarm.STALENESS_NEAR_BOUND: (
        "Publish less often or pace leases lower; look for a worker that is slow to fetch weights."
    ),
    Alarm.ONE_PRODUCER: (
        "See that other workers are connected and get leases; a run that one machine feeds ends "
        "with it."
    ),
    Alarm.REJECT_STORM: (
        "Look which peer and which reason it is in `swarm-node status`; a peer that goes on is "
        "banned by itself, one reason from many peers is a difference in versions or rules."
    ),
    Alarm.DISK_LOW: (
        "Free space where the data directory is, or lower pool_bytes_max under [node] of the run "
        "file."
    ),
    Alarm.MEMORY_LOW: (
        "End other programs on this machine, or take a smaller model or fewer groups in a round."
    ),
    Alarm.CLOCK_SKEW: "Set this machine's clock by NTP: groups dated wrongly are refused.",
    Alarm.REFUSING_NEWCOMERS: (
        "Look in `swarm-node status` whose connections they are; where they are strangers', a "
        "firewall rule for that address helps, and so does a private swarm."
    ),
    Alarm.VERSION_SPLIT: (
        "Look at the broadcast of the worker that is behind: its link, its disk, its notes."
    ),
    Alarm.NOTHING_TO_LEARN: (
        "Look with `swarm-node samples` at what the policy says; it learns only from tasks that it "
        "solves now and then."
    ),
    Alarm.CUT_THOUGHTS: (
        "Raise the run's limit of tokens, or have its table [thinking] end thoughts at a budget."
    ),
    Alarm.LAGGING_VERSION: (
        "Raise --learning-rate, or have a learner publish in fp32: publish_precision under [node] "
        "of the run file."
    ),
    Alarm.WENT_BACK: (
        "Nothing has to be done about one fall; where it falls again, lower --learning-rate, or "
        "draw fewer foreign groups with --external."
    ),
}
"""Advice by alarm, one sentence each."""

ALONE_ADVICE: Final = (
    "Name a node of the run with --peer or --invite, see with `swarm-node doctor` whether it can "
    "be reached, or train alone with --external 0."
)
"""Advice on `Alarm.NO_FOREIGN` if no peer is connected."""


_Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
_Peer = Annotated[str, Field(min_length=1, max_length=64)]
_Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
_Text = Annotated[str, Field(max_length=TEXT_CHARS_MAX)]
_Amount = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    # Unknown fields are left out, so that a newer node can be watched.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class PeerTraffic(_Part):
    """One peer, as the reporting node sees it. Totals since the node's start."""

    peer_id: _Peer
    bytes_in: _Count = 0
    bytes_out: _Count = 0
    out_bytes_per_s: _Count = 0  # of the last half minute
    groups_accepted: _Count = 0
    groups_trained: _Count = 0  # who feeds whom
    rejected: _Count = 0
    future: _Count = 0  # of these: dated in the future of the reporting node's clock
    connected: bool = True


class WorkerRow(_Part):
    """One rollout worker, as its learner or coordinator sees it."""

    name: _Name
    peer_id: Annotated[str, Field(max_length=64)] = ""
    phase: Annotated[str, Field(max_length=PHASE_CHARS_MAX)] = ""
    version: _Count | None = None
    groups_per_s: Annotated[float, Field(ge=0)] | None = None
    price_per_h: Annotated[float, Field(ge=0)] | None = None
    admitted: _Count = 0
    refused: _Count = 0
    leased: _Count = 0
    heard_s: Annotated[float, Field(ge=0)] | None = None  # ago


class BroadcastReport(_Part):
    """A version on its way to this node, or complete here."""

    version: _Count
    chunks: Annotated[int, Field(ge=0, le=2**31)]
    # Hex bitfield, first chunk's bit first; left out of a complete one.
    have: Annotated[str, Field(max_length=CHUNKS_MAX // 4)]
    size_bytes: _Count
    complete: bool


class AlarmReport(_Part):
    kind: Alarm
    level: Level
    text: _Text  # what is so
    advice: _Text  # what to do
    subject: Annotated[str, Field(max_length=64)] = ""  # the peer that it is about, if it is of one


class NodeReport(_Part):
    """One node at one moment. `metrics` has names of `METRICS` alone; those with a label are in
    `labelled`, by the label's value."""

    peer_id: _Peer
    run_id: _Name
    role: Role
    agent: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    instance: Annotated[str, Field(max_length=32)]  # of the process: another one starts anew
    sequence: _Count  # of the instance's reports, without gaps: what lacks was lost
    sent_at_s: Annotated[float, Field(ge=0, le=2**40)]  # unix time
    interval_s: Annotated[float, Field(gt=0, le=86_400)]
    phase: Annotated[str, Field(max_length=PHASE_CHARS_MAX)] = ""
    metrics: Annotated[dict[_Name, _Amount], Field(max_length=len(METRICS))]
    labelled: Annotated[
        dict[_Name, Annotated[dict[_Name, _Amount], Field(max_length=LABELS_MAX)]],
        Field(max_length=len(METRICS)),
    ] = {}
    peers: Annotated[tuple[PeerTraffic, ...], Field(max_length=PEERS_MAX)] = ()
    workers: Annotated[tuple[WorkerRow, ...], Field(max_length=WORKERS_MAX)] = ()
    workers_left_out: _Count = 0  # for which there was no room
    broadcast: BroadcastReport | None = None
    alarms: Annotated[tuple[AlarmReport, ...], Field(max_length=ALARMS_MAX)] = ()
    notes: Annotated[tuple[_Text, ...], Field(max_length=NOTES_MAX)] = ()


class Status(_Part):
    """Connection state of a process at the broker. Offline is the last will of one connection, or
    with `left` its goodbye."""

    run_id: _Name
    instance: Annotated[str, Field(max_length=32)]
    connection: _Count  # of this instance, rising
    online: bool
    left: bool = False


class AlarmsReport(_Part):
    run_id: _Name
    instance: Annotated[str, Field(max_length=32)]
    sent_at_s: Annotated[float, Field(ge=0, le=2**40)]
    alarms: Annotated[tuple[AlarmReport, ...], Field(max_length=ALARMS_MAX)] = ()


class _Envelope(_Part):
    report: Annotated[str, Field(max_length=REPORT_BYTES_MAX)]
    signature: Annotated[str, Field(min_length=128, max_length=128)]


# Parts that a report leaves out, step by step, until it is short enough.
_SHORTER: Final[tuple[Mapping[str, Any], ...]] = (
    {"workers": 64, "peers": 32},
    {"workers": 16, "peers": 16},
    {"workers": 0, "peers": 0, "broadcast": None},
    {"notes": 0, "labelled": {}},
)


def encode_report(report: NodeReport, identity: Identity) -> bytes:
    """The report as it is published, shortened by `_SHORTER`."""
    payload = sealed(report, identity)
    for shorter in _SHORTER:
        if len(payload) <= REPORT_BYTES_MAX:
            break
        update = {
            name: getattr(report, name)[:keep] if isinstance(keep, int) else keep
            for name, keep in shorter.items()
        }
        if "workers" in update:
            lacking = len(report.workers) - len(update["workers"])
            update["workers_left_out"] = report.workers_left_out + lacking
        report = report.model_copy(update=update)
        payload = sealed(report, identity)
    if len(payload) > REPORT_BYTES_MAX:
        raise LocalProtocolError(f"a report of {len(payload)} bytes")
    return payload


def decode_report(payload: bytes, peer: PeerId) -> NodeReport:
    """A report that came under the name of `peer`.

    Raises:
        RemoteProtocolError: it is too large, malformed, over a limit, or not by and about `peer`.
    """
    report = _open(payload, peer, NodeReport, REPORT_BYTES_MAX)
    if report.peer_id != peer:
        raise RemoteProtocolError(Reject.WRONG_PRODUCER, "a report about another", signer=peer)
    # Metrics of a newer version, whose names are unknown, are left out.
    known = {name: value for name, value in report.metrics.items() if _is(name, labelled=False)}
    labelled = {name: value for name, value in report.labelled.items() if _is(name, labelled=True)}
    return report.model_copy(update={"metrics": known, "labelled": labelled})


def decode_status(payload: bytes, peer: PeerId) -> Status:
    """A status that came under the name of `peer`.

    Raises:
        RemoteProtocolError: as of `decode_report`.
    """
    return _open(payload, peer, Status, STATUS_BYTES_MAX)


_PartT = TypeVar("_PartT", bound=_Part)
_DOMAINS: Final[Mapping[type[_Part], bytes]] = {
    NodeReport: DOMAIN,
    Status: STATUS_DOMAIN,
    AlarmsReport: ALARMS_DOMAIN,
}


def sealed(part: NodeReport | Status | AlarmsReport, identity: Identity) -> bytes:
    """JSON of the part's own JSON, as signed, and the signature; as it is published."""
    body = part.model_dump_json(exclude_defaults=True)
    signature = identity.sign(_DOMAINS[type(part)], body.encode()).hex()
    return json.dumps({"report": body, "signature": signature}, ensure_ascii=False).encode()


def _open(payload: bytes, peer: PeerId, kind: type[_PartT], bytes_max: int) -> _PartT:
    if len(payload) > bytes_max:
        raise RemoteProtocolError(Reject.OVERSIZE, f"{len(payload)} bytes")
    try:
        envelope = _Envelope.model_validate_json(payload)
        body, signature = envelope.report.encode(), bytes.fromhex(envelope.signature)
    except (ValidationError, ValueError) as error:
        raise RemoteProtocolError(Reject.MALFORMED, "no envelope") from error
    verify(peer, _DOMAINS[kind], body, signature)
    try:
        return kind.model_validate_json(body)
    except (ValidationError, ValueError) as error:
        raise RemoteProtocolError(Reject.MALFORMED, "no report", signer=peer) from error


def _is(name: str, *, labelled: bool) -> bool:
    metric = METRICS.get(name)
    return metric is not None and (metric.label is not None) == labelled


TopicKind = Literal["report", "status", "alarms"]
_TOPIC = re.compile(
    r"swarm/(?P<run>[a-z0-9-]{1,80})/(?P<peer>[1-9A-HJ-NP-Za-km-z]{1,64})/"
    r"(?P<kind>report|status|alarms)"
)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of a node: `swarm/<run id>/<peer id>/<kind>`."""

    run_id: str
    peer_id: PeerId
    kind: TopicKind

    def __str__(self) -> str:
        return f"swarm/{self.run_id}/{self.peer_id}/{self.kind}"

    @classmethod
    def parse(cls, text: str) -> "Topic":
        """The topic of that name.

        Raises:
            RemoteProtocolError: it is none of a node's.
        """
        match = _TOPIC.fullmatch(text) if len(text) <= TOPIC_CHARS_MAX else None
        if match is None:
            raise RemoteProtocolError(Reject.MALFORMED, "no topic of a node")
        kind: TopicKind = match["kind"]  # type: ignore[assignment]  # the pattern has no other
        return cls(match["run"], PeerId(match["peer"]), kind)
