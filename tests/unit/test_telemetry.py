"""What a node tells those who watch: what is believed of it, and what is refused."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import Identity, PeerId
from swarm.telemetry.metrics import METRICS
from swarm.telemetry.reports import (
    ADVICE,
    ALARMS_DOMAIN,
    DOMAIN,
    LABELS_MAX,
    NOTES_MAX,
    PEERS_MAX,
    REPORT_BYTES_MAX,
    STATUS_BYTES_MAX,
    STATUS_DOMAIN,
    TEXT_CHARS_MAX,
    WORKERS_MAX,
    Alarm,
    AlarmReport,
    AlarmsReport,
    BroadcastReport,
    NodeReport,
    PeerTraffic,
    Status,
    Topic,
    WorkerRow,
    decode_report,
    decode_status,
    encode_report,
    sealed,
)
from swarm.transport.base import TrafficByPeer
from tests.alarms_reader import decode_alarms

NODE = Identity(b"n" * 32)
OTHER = Identity(b"o" * 32)
RUN = "demo-0123456789abcdef0123456789abcdef"


def report_of(peer: PeerId = NODE.peer_id, **changes: Any) -> NodeReport:
    fields: dict[str, Any] = {
        "peer_id": peer,
        "run_id": RUN,
        "role": "node",
        "instance": "5f",
        "sequence": 7,
        "sent_at_s": 1_000.5,
        "interval_s": 2.0,
        "metrics": {"round": 3.0, "own_reward": -0.25},
        "labelled": {"rejected_total": {"expired": 2.0}},
        "peers": (PeerTraffic(peer_id=OTHER.peer_id, bytes_in=5, groups_trained=1),),
        "workers": (WorkerRow(name="box-1", version=4, price_per_h=0.2),),
        "broadcast": BroadcastReport(version=4, chunks=3, have="a0", size_bytes=9, complete=False),
        "alarms": (
            AlarmReport(
                kind=Alarm.DISK_LOW,
                level="critical",
                text="1 MB left",
                advice=ADVICE[Alarm.DISK_LOW],
            ),
        ),
        "notes": ("<b>no work</b>",),
    }
    return NodeReport(**(fields | changes))


def signed(
    body: str | Mapping[str, Any], identity: Identity = NODE, domain: bytes = DOMAIN
) -> bytes:
    """Whatever it is, signed well."""
    text = body if isinstance(body, str) else json.dumps(body)
    signature = identity.sign(domain, text.encode()).hex()
    return json.dumps({"report": text, "signature": signature}).encode()


def changed(**changes: Any) -> dict[str, Any]:
    """A report's JSON with fields that a node of ours would not send."""
    fields: dict[str, Any] = json.loads(report_of().model_dump_json())
    return fields | changes


def refusal(payload: bytes, peer: PeerId = NODE.peer_id) -> Reject:
    with pytest.raises(RemoteProtocolError) as info:
        decode_report(payload, peer)
    return info.value.reason


def test_a_report_comes_back_as_it_was() -> None:
    assert decode_report(encode_report(report_of(), NODE), NODE.peer_id) == report_of()


def test_a_report_is_believed_of_its_signer_alone() -> None:
    assert refusal(encode_report(report_of(), NODE), OTHER.peer_id) is Reject.BAD_SIGNATURE
    about_another = encode_report(report_of(OTHER.peer_id), NODE)
    assert refusal(about_another) is Reject.WRONG_PRODUCER
    assert refusal(about_another, OTHER.peer_id) is Reject.BAD_SIGNATURE
    assert refusal(encode_report(report_of(), NODE), PeerId("nobody")) is Reject.MALFORMED


def test_one_changed_byte_is_noticed() -> None:
    payload = json.loads(encode_report(report_of(), NODE))
    payload["report"] = payload["report"].replace("3.0", "4.0")
    assert refusal(json.dumps(payload).encode()) is Reject.BAD_SIGNATURE


@pytest.mark.parametrize("domain", [STATUS_DOMAIN, ALARMS_DOMAIN])
def test_what_was_signed_as_something_else_is_no_report(domain: bytes) -> None:
    assert refusal(signed(changed(), domain=domain)) is Reject.BAD_SIGNATURE


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 30_000,
        b'{"report": "{}", "signature": "zz"}',
        b'{"report": "{}", "signature": "' + b"z" * 128 + b'"}',
        b'{"report": "\\ud800", "signature": "' + b"0" * 128 + b'"}',
        b'{"report": 1, "signature": "' + b"0" * 128 + b'"}',
    ],
)
def test_what_is_no_envelope_is_malformed(payload: bytes) -> None:
    assert refusal(payload) is Reject.MALFORMED


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {f"m{i}": 1.0 for i in range(len(METRICS) + 1)}},
        {"metrics": {"round": "3"}},
        {"metrics": {"round": None}},
        {"metrics": {"x" * 81: 1.0}},
        {"labelled": {"rejected_total": {str(i): 1.0 for i in range(LABELS_MAX + 1)}}},
        {"peers": [{"peer_id": "p"}] * (PEERS_MAX + 1)},
        {"peers": [{"peer_id": "p", "bytes_in": -1}]},
        {"workers": [{"name": "w"}] * (WORKERS_MAX + 1)},
        {"notes": ["n"] * (NOTES_MAX + 1)},
        {"notes": ["n" * (TEXT_CHARS_MAX + 1)]},
        {"alarms": [{"kind": "fire", "level": "critical", "text": "", "advice": ""}]},
        {"role": "king"},
        {"sequence": 2**63},
        {"sequence": -1},
        {"sequence": 1.5},
        {"sent_at_s": -1.0},
        {"interval_s": 0.0},
        {"instance": "i" * 33},
    ],
)
def test_a_report_over_a_limit_is_refused_whole(changes: dict[str, Any]) -> None:
    assert decode_report(signed(changed()), NODE.peer_id) == report_of()
    assert refusal(signed(changed(**changes))) is Reject.MALFORMED


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_is_refused(number: str) -> None:
    text = report_of().model_dump_json()
    assert refusal(signed(text.replace("-0.25", number))) is Reject.MALFORMED
    assert refusal(signed(text.replace("1000.5", number))) is Reject.MALFORMED


def test_a_node_makes_no_report_with_what_is_no_number() -> None:
    with pytest.raises(ValidationError):
        report_of(metrics={"round": float("nan")})


def test_a_large_payload_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    body = signed(changed(notes=["n" * REPORT_BYTES_MAX]))
    parsed = []
    monkeypatch.setattr("swarm.telemetry.reports._Envelope.model_validate_json", parsed.append)
    assert refusal(body) is Reject.OVERSIZE
    assert not parsed


def test_metrics_that_nobody_knows_are_left_out() -> None:
    metrics = {"round": 3.0, "rejected_total": 1.0, "from_the_future": 9.0}
    labelled = {"rejected_total": {"expired": 1.0}, "round": {"a": 1.0}, "new": {"a": 1.0}}
    got = decode_report(signed(changed(metrics=metrics, labelled=labelled, new=1)), NODE.peer_id)
    assert got.metrics == {"round": 3.0}
    assert got.labelled == {"rejected_total": {"expired": 1.0}}


def test_a_report_that_would_be_too_large_leaves_out_rows_from_the_end() -> None:
    many = tuple(
        WorkerRow(name=f"worker {i:03} " + "ü" * 60, phase="x" * 40, peer_id="p" * 64)
        for i in range(WORKERS_MAX)
    )
    report = report_of(workers=many, peers=(PeerTraffic(peer_id=OTHER.peer_id),) * PEERS_MAX)
    payload = encode_report(report, NODE)
    assert len(payload) <= REPORT_BYTES_MAX
    got = decode_report(payload, NODE.peer_id)
    assert 0 < len(got.workers) < WORKERS_MAX
    assert got.workers == many[: len(got.workers)]
    assert got.workers_left_out == WORKERS_MAX - len(got.workers)
    assert (got.metrics, got.notes) == (report.metrics, report.notes)


def test_the_longest_texts_still_make_a_report() -> None:
    text = "\N{GRINNING FACE}" * TEXT_CHARS_MAX
    alarm = AlarmReport(kind=Alarm.DISK_LOW, level="critical", text=text, advice=text)
    report = report_of(notes=(text,) * NOTES_MAX, alarms=(alarm,) * 16)
    payload = encode_report(report, NODE)
    assert decode_report(payload, NODE.peer_id).alarms == report.alarms


def test_a_status_is_of_one_signer_and_one_connection() -> None:
    status = Status(run_id=RUN, instance="5f", connection=2, online=False)
    payload = sealed(status, NODE)
    assert decode_status(payload, NODE.peer_id) == status
    for wrong, peer in (
        (payload, OTHER.peer_id),
        (payload + b" " * STATUS_BYTES_MAX, NODE.peer_id),
        (signed(json.loads(status.model_dump_json())), NODE.peer_id),
    ):
        with pytest.raises(RemoteProtocolError):
            decode_status(wrong, peer)


def test_alarms_come_back_as_they_were() -> None:
    alarms = AlarmsReport(run_id=RUN, instance="5f", sent_at_s=3.0, alarms=report_of().alarms)
    payload = sealed(alarms, NODE)
    assert decode_alarms(payload, NODE.peer_id) == alarms
    with pytest.raises(RemoteProtocolError):
        decode_alarms(payload, OTHER.peer_id)


def test_each_alarm_has_one_sentence_on_what_to_do() -> None:
    assert set(ADVICE) == set(Alarm)
    for advice in ADVICE.values():
        assert advice.endswith(".")
        assert 20 <= len(advice) <= TEXT_CHARS_MAX


def test_metrics_end_in_their_unit() -> None:
    without = {"peers", "round", "policy_version", "own_reward", "published_version"}
    without |= {
        "loss",
        "grad_norm",
        "learning_rate",
        "connections",
        "connections_max",
        "largest_origin_connections",
    }
    units = (
        "_total",
        "_s",
        "_bytes",
        "_groups",
        "_ratio",
        "_steps",
        "_wanted",
        "_per_h",
        "_nats",
        "_tokens",
    )
    for name, metric in METRICS.items():
        assert name in without or name.endswith(units), name
        assert (metric.kind == "counter") == name.endswith("_total"), name


@pytest.mark.parametrize("kind", ["report", "status", "alarms"])
def test_a_topic_comes_back_as_it_was(kind: Any) -> None:
    topic = Topic(RUN, NODE.peer_id, kind)
    assert Topic.parse(str(topic)) == topic


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text + "/more",
        lambda text: text + "\n",
        lambda text: text.replace("swarm", "$SYS"),
        lambda text: text.replace("report", "else"),
        lambda text: text.replace(RUN, "<b>"),
        lambda text: text.replace(RUN, "a" * 300),
        lambda text: text.replace("12D3", "+/"),
        lambda text: "",
    ],
)
def test_what_is_no_topic_of_a_node_is_refused(spoil: Callable[[str], str]) -> None:
    with pytest.raises(RemoteProtocolError):
        Topic.parse(spoil(str(Topic(RUN, NODE.peer_id, "report"))))


def test_traffic_by_peer_forgets_who_was_quiet_longest() -> None:
    traffic = TrafficByPeer(peers_max=2)
    one, two, three = (PeerId(name) for name in ("one", "two", "three"))
    traffic.touch(one).bytes_in += 5
    traffic.touch(two).bytes_out += 9
    traffic.touch(one).bytes_in += 1
    assert traffic.forgotten == 0
    traffic.touch(three).bytes_in += 1
    assert [peer for peer, _ in traffic.busiest(5)] == [one, three]
    assert traffic.forgotten == 1
    assert traffic.of(two).bytes_out == 0
    assert len(traffic.busiest(5)) == 2  # to look opens no account
