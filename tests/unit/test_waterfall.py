"""Broadcasts in logs: what a learner notes of them, and what is drawn."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from node.observe.event_log import FILE_NAME, EventLog, Record, history
from node.observe.records import (
    VersionCame,
    VersionComing,
    VersionPublished,
    VersionSpread,
    VersionSpreading,
)
from node.observe.saved_report import (
    PUBLISHER,
    ROWS_MAX,
    Bar,
    Waterfall,
    WaterfallRow,
    waterfall,
    write_report,
)
from node.run.version_spread import MARKS, WATCHED_MAX, SpreadWatch
from tests.unit.monitor_records import PEER_A, PEER_B, started

Event = tuple[float, Record]


def published(version: int, made_s: float = 0.5) -> VersionPublished:
    return VersionPublished(version, 4_000, 4_000, 900, made_s, 0.1)


def coming(version: int, phase: str, peer: str = PEER_B) -> VersionComing:
    return VersionComing(peer, version, phase)


def came(version: int, peer: str = PEER_B, failure: str | None = None) -> VersionCame:
    return VersionCame(peer, version, version, failure, 1.0, 0.5, 0.25, 900, 3_100, 0.8, 1.25)


def fetched(version: int, at_s: float, peer: str = PEER_B) -> list[Event]:
    return [
        (at_s, coming(version, "manifest", peer)),
        (at_s + 0.25, coming(version, "fetch", peer)),
        (at_s + 1.25, coming(version, "patch", peer)),
        (at_s + 1.75, coming(version, "load", peer)),
        (at_s + 2.0, came(version, peer)),
    ]


LEARNER: list[Event] = [
    (100.1, published(2)),
    (101.0, VersionSpreading(2, {PEER_B: 0.5}, (), 0)),
    (102.0, VersionSpreading(2, {PEER_B: 1.0}, (), 0)),
    (102.5, VersionSpread(2, 1, 2.25, 0.8)),
    (103.0, VersionSpreading(2, {}, (PEER_B,), 0)),
]


def draw(**logs: list[Event]) -> Waterfall:
    found = waterfall((name, history(events)) for name, events in logs.items())
    assert found is not None
    return found


def only(found: Waterfall, peer: str) -> WaterfallRow:
    [row] = [row for row in found.rows if row.peer == peer]
    return row


def test_a_worker_s_phases_follow_each_other_from_the_publication_on() -> None:
    found = draw(learner=LEARNER, worker=fetched(2, 100.25))
    assert [row.peer for row in found.rows] == [PUBLISHER, PEER_B]
    row = only(found, PEER_B)
    assert row.bars == [
        Bar("manifest", 0.25, 0.5),
        Bar("fetch", 0.5, 1.5),
        Bar("patch", 1.5, 2.0),
        Bar("load", 2.0, 2.25),
    ]
    assert row.bound_s == pytest.approx(0.5 + 0.8)
    assert (row.had_s, row.used_s, row.note) == (2.0, 3.0, "")
    own = only(found, PUBLISHER)
    assert own.bars == [Bar("made", pytest.approx(-0.4), 0.0), Bar("spread", 0.25, 2.5)]
    assert own.bound_s == pytest.approx(0.25 + 0.8)


def test_without_the_worker_s_log_its_row_is_what_the_learner_heard() -> None:
    row = only(draw(learner=LEARNER), PEER_B)
    assert (row.bars, row.name) == ([Bar("heard", 0.0, 2.0)], PEER_B[-8:])
    assert (row.had_s, row.used_s, row.note) == (2.0, 3.0, "")
    half = only(draw(learner=LEARNER[:2]), PEER_B)
    assert (half.had_s, half.used_s) == (None, None)
    assert "50%" in half.note


def test_without_the_learner_s_log_time_begins_with_the_first_that_is_known() -> None:
    found = draw(worker=fetched(2, 500.0), other=fetched(2, 500.5, PEER_A))
    assert {row.name: row.bars[0].start_s for row in found.rows} == {"worker": 0.0, "other": 0.5}


@pytest.mark.parametrize("kept", range(1, 5))
def test_a_log_that_was_cut_is_drawn_as_far_as_it_goes(kept: int) -> None:
    events = fetched(2, 100.25)
    row = only(draw(learner=LEARNER[:1], worker=events[:kept]), PEER_B)
    assert [bar.phase for bar in row.bars] == ["manifest", "fetch", "patch", "load"][:kept]
    assert row.bars[-1].start_s == row.bars[-1].end_s  # when it ended is not known
    assert "no more is known" in row.note
    rest = only(draw(learner=LEARNER[:1], worker=events[kept:]), PEER_B)
    assert [bar.phase for bar in rest.bars][-1:] == ["load"]
    assert rest.note == ""


def test_of_a_try_s_end_alone_the_phases_are_known_by_their_lengths() -> None:
    row = only(draw(learner=LEARNER[:1], worker=[(103.0, came(2))]), PEER_B)
    assert row.bars == [Bar("fetch", 1.25, 2.25), Bar("patch", 2.25, 2.75), Bar("load", 2.75, 3.0)]
    assert row.bound_s == pytest.approx(1.25 + 0.8)


def test_what_failed_or_was_dropped_says_so_and_a_second_try_joins_the_row() -> None:
    dropped = [*fetched(2, 100.0)[:2], (100.5, coming(2, "dropped"))]
    row = only(draw(worker=dropped), PEER_B)
    assert (row.note, [bar.phase for bar in row.bars]) == (
        "dropped for a newer one",
        ["manifest", "fetch"],
    )
    failed = [*fetched(2, 100.0)[:3], (102.0, came(2, failure="no room"))]
    assert only(draw(worker=failed), PEER_B).note == "failed"
    again = only(draw(worker=[*failed, *fetched(2, 110.0)]), PEER_B)
    assert again.note == ""
    assert len(again.bars) == 3 + 4
    assert again.bound_s == pytest.approx(10.25 + 0.8)


def test_a_phase_that_nobody_knows_is_left_out() -> None:
    assert only(draw(worker=[(1.0, coming(2, "later")), *fetched(2, 2.0)]), PEER_B).bars


def test_no_broadcast_is_no_picture() -> None:
    assert waterfall([("a", history([]))]) is None
    assert waterfall([]) is None


def test_of_many_versions_the_newest_are_drawn_and_the_rest_counted() -> None:
    learner = [(10.0 * version, published(version)) for version in range(1, 101)]
    worker = [event for version in range(1, 101) for event in fetched(version, 10.0 * version)]
    found = draw(learner=learner, worker=worker)
    assert len(found.rows) == ROWS_MAX
    assert {row.version for row in found.rows} == set(range(71, 101))
    assert found.versions_left_out == 70
    crowd = [(1.0, VersionSpreading(1, {f"p{n:03}": 1.0 for n in range(200)}, (), 0))]
    assert len(draw(learner=crowd).rows) == ROWS_MAX


def of_run(run_id: str, events: list[Event], peer: str = PEER_A) -> list[Event]:
    return [(events[0][0] - 1.0, replace(started(peer), run_id=run_id)), *events]


def test_versions_of_two_runs_are_told_apart() -> None:
    late = [(time_s + 500.0, event) for time_s, event in LEARNER]
    logs = {
        "one": of_run("a", LEARNER[:1]),
        "two": of_run("b", late[:1]),
        "of_one": of_run("a", fetched(2, 450.0), PEER_B),  # nearer to the other run's
        "of_two": of_run("b", fetched(2, 600.25), PEER_B),
    }
    rows = draw(**logs).rows
    assert [(row.name, len(row.bars)) for row in rows] == [
        ("one", 1),
        ("of_one", 4),
        ("two", 1),
        ("of_two", 4),
    ]
    assert [row.bars[0].start_s for row in rows if row.peer] == [350.0, 0.25]


def test_a_log_in_any_order_and_from_anybody_draws_without_a_fault(tmp_path: Path) -> None:
    """Lines of a log that a person edited, or of several nodes in one file."""
    rng = Random(4)
    events = [*LEARNER, *fetched(2, 100.0), *fetched(3, 90.0, PEER_A), (1.0, coming(4, "?"))]
    for turn in range(20):
        some = rng.sample(events, rng.randrange(1, len(events)))
        directory = tmp_path / str(turn)
        times = iter(time_s for time_s, _ in some)
        with EventLog(directory / FILE_NAME, lambda times=times: next(times)) as log:
            for _, record in some:
                log.write(record)
        waterfall([("all", history(some))])
    report = write_report([tmp_path / "0"], tmp_path / "out")
    assert '"waterfall":{"title":"Broadcasts"' in report.html.read_text()


# --- what a learner notes ----------------------------------------------------------------------


def test_a_share_is_noted_when_it_has_come_further_by_a_quarter() -> None:
    watch = SpreadWatch()
    noted = [
        event
        for step in range(1_001)
        if (event := watch.poll(1, {"a": step / 1_000}, ())) is not None
    ]
    assert len(noted) == MARKS + 1
    assert [event.shares["a"] for event in noted] == [0.001, 0.25, 0.5, 0.75, 1.0]
    assert watch.poll(1, {"a": 1.0}, ()) is None


def test_who_uses_a_version_is_noted_once_and_a_newer_version_begins_anew() -> None:
    watch = SpreadWatch()
    assert watch.poll(1, {}, ()) is None
    first = watch.poll(1, {}, ("b", "a"))
    assert first is not None
    assert first.using == ("a", "b")
    assert watch.poll(1, {}, ("b", "a")) is None
    again = watch.poll(2, {"a": 0.5}, ("a",))
    assert again == VersionSpreading(2, {"a": 0.5}, ("a",), 0)


def test_a_crowd_is_watched_up_to_a_number_and_the_rest_counted() -> None:
    watch = SpreadWatch()
    crowd = {f"{n:05}": 1.0 for n in range(3 * WATCHED_MAX)}
    event = watch.poll(1, crowd, ())
    assert event is not None
    assert (len(event.shares), event.left_out) == (WATCHED_MAX, WATCHED_MAX)
    assert watch.poll(1, crowd, tuple(crowd)) == VersionSpreading(
        1, {}, tuple(sorted(event.shares)), WATCHED_MAX
    )
