"""What those who watch believe of what a broker delivers, and how little of it they keep."""

import json
from typing import Any

import pytest

from swarm.identity import Identity
from swarm.telemetry.fleet_view import (
    EARLY_MAX,
    FAILURES_SAMPLE,
    GONE_S_MAX,
    GONE_S_MIN,
    REPORTS_BYTES_MAX,
    SKEW_S_MAX,
    WINDOW_FAILURES_MAX,
    WINDOW_REPORTS_MAX,
    Drop,
    Gone,
    NodeView,
    Watch,
)
from swarm.telemetry.reports import (
    NodeReport,
    Status,
    Topic,
    encode_report,
    sealed,
)

RUN = "demo-0123456789abcdef0123456789abcdef"
NODE = Identity(b"n" * 32)
OTHER = Identity(b"o" * 32)


def report_of(
    identity: Identity = NODE, sequence: int = 0, sent_at_s: float = 100.0, **changes: Any
) -> NodeReport:
    fields: dict[str, Any] = {
        "peer_id": identity.peer_id,
        "run_id": RUN,
        "role": "node",
        "instance": "a",
        "sequence": sequence,
        "sent_at_s": sent_at_s,
        "interval_s": 2.0,
        "metrics": {},
    }
    return NodeReport(**(fields | changes))


def topic(identity: Identity = NODE, kind: Any = "report", run_id: str = RUN) -> str:
    return str(Topic(run_id, identity.peer_id, kind))


def send(
    watch: Watch, report: NodeReport, now_s: float | None = None, identity: Identity = NODE,
    *, retained: bool = False,
) -> bool:  # fmt: skip
    now_s = report.sent_at_s if now_s is None else now_s
    return bool(
        watch.take(topic(identity), encode_report(report, identity), now_s, retained=retained)
    )


def say(
    watch: Watch, *, online: bool, connection: int = 1, instance: str = "a", left: bool = False
) -> bool:
    status = Status(run_id=RUN, instance=instance, connection=connection, online=online, left=left)
    return watch.take(topic(kind="status"), sealed(status, NODE), 100.0) is not None


def view(watch: Watch, now_s: float) -> NodeView:
    return next(each for each in watch.nodes(now_s) if each.report.peer_id == NODE.peer_id)


# --- who is there -------------------------------------------------------------------------------


def test_a_node_is_there_until_it_is_silent_for_too_long() -> None:
    watch = Watch()
    send(watch, report_of())
    assert view(watch, 100.0 + GONE_S_MIN).gone is None
    assert view(watch, 100.1 + GONE_S_MIN).gone is Gone.SILENT
    send(watch, report_of(sequence=1, sent_at_s=150.0))
    assert view(watch, 150.0).gone is None


@pytest.mark.parametrize(("interval_s", "after_s"), [(5.0, 15.0), (86_400.0, GONE_S_MAX)])
def test_who_reports_seldom_is_given_longer(interval_s: float, after_s: float) -> None:
    watch = Watch()
    send(watch, report_of(interval_s=interval_s))
    assert view(watch, 100.0 + after_s).gone is None
    assert view(watch, 100.1 + after_s).gone is Gone.SILENT


def test_what_a_broker_had_kept_is_as_old_as_it_says() -> None:
    watch = Watch()
    send(watch, report_of(), now_s=1_000.0, retained=True)
    assert (view(watch, 1_000.0).gone, view(watch, 1_000.0).heard_s) == (Gone.SILENT, 900.0)
    send(watch, report_of(sequence=1, sent_at_s=1_001.0))
    assert view(watch, 1_001.0).gone is None


def test_a_node_is_gone_when_it_says_so_and_back_with_its_next_report() -> None:
    watch = Watch()
    send(watch, report_of())
    assert say(watch, online=True)
    assert say(watch, online=False)
    assert view(watch, 100.0).gone is Gone.OFFLINE
    assert not view(watch, 100.0).left  # its broker said it
    assert say(watch, online=False, left=True)
    assert view(watch, 100.0).left
    send(watch, report_of(sequence=1, sent_at_s=101.0))
    assert view(watch, 101.0).gone is None
    assert not view(watch, 101.0).left


def test_nobody_else_takes_a_node_offline() -> None:
    watch = Watch()
    send(watch, report_of())
    forged = sealed(Status(run_id=RUN, instance="a", connection=9, online=False), OTHER)
    assert watch.take(topic(kind="status"), forged, 100.0) is None
    report = encode_report(report_of(), NODE)
    assert watch.take(topic(kind="status"), report, 100.0) is None
    say(watch, online=False, instance="b")  # of another process of that node
    other_run = sealed(Status(run_id="x", instance="a", connection=9, online=False), NODE)
    assert watch.take(topic(kind="status"), other_run, 100.0) is None
    assert view(watch, 100.0).gone is None
    assert watch.dropped == {Drop.FORGED: 3}


def test_the_will_of_an_earlier_connection_says_nothing() -> None:
    watch = Watch()
    send(watch, report_of())
    say(watch, online=True, connection=2)
    assert not say(watch, online=False, connection=1)
    assert view(watch, 100.0).gone is None
    assert say(watch, online=False, connection=2)
    assert view(watch, 100.0).gone is Gone.OFFLINE


def test_a_node_that_starts_again_has_broken_no_rule() -> None:
    watch = Watch()
    send(watch, report_of())
    say(watch, online=True, instance="a", connection=3)
    say(watch, online=True, instance="b", connection=2)  # before its first report
    assert send(watch, report_of(sent_at_s=101.0, instance="b"))
    say(watch, online=False, instance="a", connection=3)  # the will of before, late
    assert view(watch, 101.0).gone is None
    assert not say(watch, online=False, instance="b", connection=1)
    assert say(watch, online=False, instance="b", connection=2)
    assert view(watch, 101.0).gone is Gone.OFFLINE
    assert watch.dropped == {Drop.REPLAYED: 1}


@pytest.mark.parametrize("retained", [True, False])
def test_a_status_may_come_before_the_report(retained: bool) -> None:
    """Of a live report the node is there, whatever it left behind; of a kept one nobody knows."""
    watch = Watch()
    say(watch, online=False)
    send(watch, report_of(), retained=retained)
    assert view(watch, 100.0).gone is (Gone.OFFLINE if retained else None)


# --- what is lost, and what comes twice ---------------------------------------------------------


def test_gaps_are_counted() -> None:
    watch = Watch()
    for sequence in (3, 4, 7, 8):
        assert send(watch, report_of(sequence=sequence, sent_at_s=100.0 + sequence))
    assert (view(watch, 108.0).lost, watch.lost, watch.taken) == (2, 2, 4)
    assert send(watch, report_of(sequence=0, sent_at_s=110.0, instance="b"))
    assert (view(watch, 110.0).lost, watch.lost) == (0, 2)


def test_a_report_counts_once() -> None:
    watch = Watch()
    report = report_of(sequence=5)
    assert send(watch, report)
    assert not send(watch, report)
    assert not send(watch, report_of(sequence=4))
    assert watch.dropped == {Drop.REPLAYED: 2}
    assert not send(watch, report, retained=True)  # as a broker does after a reconnection
    assert (watch.repeated, watch.taken) == (1, 1)
    assert watch.dropped == {Drop.REPLAYED: 2}


def test_reports_of_an_earlier_process_are_not_the_node() -> None:
    watch = Watch()
    old = report_of(instance="old", sent_at_s=100.0)
    assert send(watch, report_of(instance="new", sent_at_s=1_000.0))
    assert not send(watch, old, now_s=1_001.0)
    assert not send(watch, old, now_s=9_000.0)
    assert watch.dropped == {Drop.REPLAYED: 2}


def test_a_node_whose_clock_was_set_back_is_seen_when_it_starts_again() -> None:
    watch = Watch()
    assert send(watch, report_of(instance="old", sent_at_s=5_000.0), now_s=1_000.0)
    assert send(watch, report_of(instance="new", sent_at_s=1_010.0 - SKEW_S_MAX), now_s=1_010.0)


# --- hostile ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_million_topic_names_leave_nothing_behind() -> None:
    watch = Watch()
    payload = encode_report(report_of(), NODE)
    for i in range(1_000_000):
        watch.take(f"swarm/{i}", payload, 100.0)
    assert watch.dropped == {Drop.TOPIC: 1_000_000}
    assert watch.nodes(100.0) == []


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"x" * 10_000_000, Drop.OVERSIZE),
        (b"", Drop.MALFORMED),
        (b"\x00\xff", Drop.MALFORMED),
        (encode_report(report_of(OTHER), OTHER), Drop.FORGED),
        (encode_report(report_of(OTHER), NODE), Drop.FORGED),
        (encode_report(report_of(run_id="other"), NODE), Drop.FORGED),
    ],
)
def test_what_is_no_report_of_the_node_is_dropped(payload: bytes, reason: Drop) -> None:
    watch = Watch()
    assert watch.take(topic(), payload, 100.0) is None
    assert watch.dropped == {reason: 1}
    assert watch.nodes(100.0) == []


def test_what_is_no_number_is_dropped() -> None:
    body = report_of(metrics={"round": 1.0}).model_dump_json().replace("1.0}", "NaN}")
    signature = NODE.sign(b"swarm-telemetry-1:", body.encode()).hex()
    payload = json.dumps({"report": body, "signature": signature}).encode()
    watch = Watch()
    assert watch.take(topic(), payload, 100.0) is None
    assert watch.dropped == {Drop.MALFORMED: 1}


def test_another_run_is_not_watched() -> None:
    watch = Watch("mine")
    assert not send(watch, report_of())
    assert watch.dropped == {Drop.OTHER_RUN: 1}


def test_who_reports_without_end_is_heard_only_so_often() -> None:
    watch = Watch()
    for sequence in range(WINDOW_REPORTS_MAX + 10):
        send(watch, report_of(sequence=sequence), now_s=100.0)
    assert watch.dropped == {Drop.TOO_OFTEN: 10}
    assert send(watch, report_of(sequence=10_000), now_s=120.0)


@pytest.mark.parametrize("replayed", [True, False])
def test_who_floods_a_topic_does_not_spend_what_its_node_may_send(replayed: bool) -> None:
    watch = Watch()
    assert send(watch, report_of())
    junk = encode_report(report_of(), NODE if replayed else OTHER)
    for sequence in range(1, 31):
        for _ in range(50):
            assert watch.take(topic(), junk, 100.0) is None
        assert send(watch, report_of(sequence=sequence, sent_at_s=100.0 + sequence), now_s=100.0)
    assert watch.dropped == {Drop.REPLAYED if replayed else Drop.FORGED: 1_500}


def test_above_its_bound_a_flood_is_looked_at_in_samples_and_others_are_not() -> None:
    watch = Watch()
    send(watch, report_of())
    send(watch, report_of(OTHER), identity=OTHER)
    junk = encode_report(report_of(OTHER), OTHER)
    more = 400
    for _ in range(WINDOW_FAILURES_MAX + more):
        watch.take(topic(), junk, 100.0)
    looked_at = watch.dropped[Drop.FORGED] - WINDOW_FAILURES_MAX
    assert looked_at == more // FAILURES_SAMPLE
    assert watch.dropped[Drop.TOO_OFTEN] == more - looked_at
    good = sum(send(watch, report_of(sequence=n)) for n in range(1, 41))
    assert good == 40 // FAILURES_SAMPLE
    assert send(watch, report_of(OTHER, sequence=1), identity=OTHER)
    stranger = Identity(b"s" * 32)
    assert any(send(watch, report_of(stranger, n), identity=stranger) for n in range(9))
    assert send(watch, report_of(sequence=99), now_s=120.0)


def identities(count: int) -> list[Identity]:
    return [Identity(i.to_bytes(32, "big")) for i in range(1, count + 1)]


def test_the_number_of_nodes_is_bounded_and_gone_ones_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.telemetry.fleet_view.NODES_MAX", 3)
    watch = Watch()
    one, two, three, four = identities(4)
    for who in (one, two, three):
        send(watch, report_of(who), identity=who)
    assert not send(watch, report_of(four), identity=four)
    assert watch.dropped == {Drop.FULL: 1}
    send(watch, report_of(two, sequence=1, sent_at_s=120.0), identity=two)
    assert send(watch, report_of(four, sent_at_s=120.0), identity=four)
    assert watch.forgotten == 1
    there = [each.report.peer_id for each in watch.nodes(120.0)]
    assert there == [four.peer_id, two.peer_id, three.peer_id]


@pytest.mark.slow
def test_the_bytes_of_all_reports_are_bounded() -> None:
    watch = Watch()
    notes = ("n" * 400,) * 16
    size_bytes = len(encode_report(report_of(notes=notes), NODE))
    who = identities(REPORTS_BYTES_MAX // size_bytes + 5)
    for each in who:
        send(watch, report_of(each, notes=notes), identity=each)
    assert watch.dropped[Drop.FULL] >= 5
    assert len(watch.nodes(100.0)) == len(who) - watch.dropped[Drop.FULL]
    # whoever is there already is not shut out by a report of the same size
    assert send(watch, report_of(who[0], sequence=1, notes=notes), identity=who[0])


def test_statuses_of_nodes_that_never_report_are_bounded() -> None:
    watch = Watch()
    for who in identities(EARLY_MAX + 3):
        status = Status(run_id=RUN, instance="a", connection=1, online=True)
        watch.take(topic(who, "status"), sealed(status, who), 100.0)
    assert len(watch._early) == EARLY_MAX
