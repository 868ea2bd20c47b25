"""What the page is told: figures, tables, curves and the map, from what is watched."""

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from node.observe.node_reports import Traffic, peer_rows
from swarm.telemetry.dashboard.feeding import DRAWN_MAX, EDGES_MAX, FRESH_S, Feeding
from swarm.telemetry.dashboard.page_server import Frames, frame_of
from swarm.telemetry.dashboard.page_state import (
    ALARMS_SHOWN_MAX,
    LABELS_SHOWN_MAX,
    NODES_SHOWN_MAX,
    RUNS_SHOWN_MAX,
    DashboardState,
    PageState,
    ReportSource,
    band,
)
from swarm.telemetry.dashboard.series import (
    FOLDED_POINTS_MAX,
    RATE_MAX,
    RECENT_POINTS,
    SAMPLES_MAX,
    WINDOW_S,
    Fold,
    Rates,
    Series,
)
from swarm.telemetry.dashboard.version_broadcasts import (
    CELLS_MAX,
    ROWS_MAX,
    bits_of,
    cell_shares,
    levels,
)
from swarm.telemetry.fleet_view import NodeView
from swarm.telemetry.reports import (
    PEERS_MAX,
    Alarm,
    AlarmReport,
    BroadcastReport,
    NodeReport,
    PeerTraffic,
    WorkerRow,
)
from swarm.transport.base import TransportCounters
from tests.dashboard_samples import NOW_S, report, seen
from tests.unit.monitor_records import snapshot

SOURCE = ReportSource("mqtt://127.0.0.1:1883")


def look(
    *nodes: NodeView, state: DashboardState | None = None, now_s: float = NOW_S
) -> dict[str, Any]:
    """The page of these nodes, through JSON and back as a browser gets it."""
    made = (state or DashboardState()).look(nodes, {}, SOURCE, now_s)
    return json.loads(frame_of(made))  # type: ignore[no-any-return]


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


# --- curves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, FOLDED_POINTS_MAX, FOLDED_POINTS_MAX + 1, 5_000, 70_001])
def test_a_run_of_any_length_folds_into_its_bound(count: int) -> None:
    fold = Fold(1)
    for value in range(count):
        fold.add((float(value),))
    found = [row[0] for row in fold.rows]
    assert len(found) <= FOLDED_POINTS_MAX + 1  # the last point is not full yet
    assert len(found) > min(count, FOLDED_POINTS_MAX) // 2 - 1
    assert found == sorted(found)  # type: ignore[type-var]
    assert found[0] is not None
    assert found[0] < max(1.0, 4 * count / FOLDED_POINTS_MAX)  # the beginning is there
    assert found[-1] is not None
    assert found[-1] >= count - 1 - 4 * count / FOLDED_POINTS_MAX - 1  # and so is the end


def test_where_there_is_no_value_the_others_count() -> None:
    fold = Fold(2, points_max=2)
    for row in ((1.0, None), (3.0, 4.0), (5.0, None)):
        fold.add(row)
    assert fold.rows == ((2.0, 4.0), (5.0, None))


def test_recent_points_are_bounded_and_the_newest() -> None:
    series = Series(("a",))
    for second in range(3 * RECENT_POINTS):
        series.add(float(second), {"a": float(second)})
    recent = series.as_json()["recent"]
    assert len(recent["t"]) == RECENT_POINTS
    assert recent["t"][-1] == 3 * RECENT_POINTS - 1
    assert recent["a"][-1] == pytest.approx(recent["t"][-1], rel=1e-3)


def test_a_band_leaves_out_the_outer_tenths() -> None:
    assert band([]) == (None, None)
    assert band([0.5]) == (0.5, 0.5)
    assert band([float(value) for value in range(20)]) == (2.0, 17.0)


# --- rates -------------------------------------------------------------------------------------


def sent(sequence: int, taken: float, at_s: float, instance: str = "1") -> NodeReport:
    return report(
        "a", sequence=sequence, sent_at_s=NOW_S + at_s, instance=instance,
        metrics={"bytes_in_total": taken},
    )  # fmt: skip


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rates = Rates()
    found = {}
    for second in range(60):
        fast = max(0, second - 40) * 900.0  # 100 a second, and 1000 from the fortieth second on
        found = rates.look([sent(second, 100.0 * second + fast, float(second))])["a"]
        if second == 39:
            assert found["bytes_in_total"] == pytest.approx(100.0)
    assert found["bytes_in_total"] == pytest.approx(1_000.0)
    assert WINDOW_S < 20


def test_a_new_process_a_falling_counter_and_a_clock_that_went_back_make_no_rate() -> None:
    rates = Rates()
    assert rates.look([sent(1, 500.0, 0.0)])["a"] == {}
    assert rates.look([sent(2, 400.0, 1.0)])["a"].keys() == {"rejected_total"}
    assert rates.look([sent(1, 10.0, 2.0, instance="2")])["a"] == {}
    assert rates.look([sent(2, 20.0, 1.0, instance="2")])["a"] == {}


def test_nodes_that_are_not_watched_any_more_are_forgotten() -> None:
    rates = Rates()
    rates.look([sent(1, 1.0, 0.0)])
    rates.look([])
    assert rates.look([sent(2, 2.0, 1.0)])["a"] == {}


def test_reports_that_come_twice_a_second_keep_few_samples() -> None:
    rates = Rates()
    for count in range(10 * SAMPLES_MAX):
        found = rates.look([sent(count, float(count), count / 100)])["a"]
    assert found["bytes_in_total"] == pytest.approx(100.0)


# --- headline, alarms, tables ------------------------------------------------------------------


def test_figures_are_sums_and_means_of_who_is_there() -> None:
    page = look(
        seen("a", metrics={"bytes_in_total": 10.0, "own_reward": 0.2, "round": 4.0}),
        seen("b", metrics={"bytes_in_total": 5.0, "own_reward": 0.6, "round": 6.0}),
        seen("c", gone=True, metrics={"bytes_in_total": 99.0, "own_reward": 1.0, "round": 99.0}),
    )
    head = page["headline"]
    assert (head["nodes"], head["present"], head["gone"]) == (3, 2, 1)
    assert head["in_bytes"] == 15
    assert head["reward"] == pytest.approx(0.4)
    assert (head["round"], head["round_low"], head["round_high"]) == (5, 4, 6)
    assert [row["id"] for row in rows(page["nodes"]) if row["gone"]] == ["c"]


def test_steps_of_a_learner_count_and_not_the_batches_of_its_workers() -> None:
    learner = seen("l", role="learner", metrics={"round": 9.0})
    head = look(learner, seen("w", role="worker", metrics={"round": 99.0}))["headline"]
    assert (head["round"], head["round_high"]) == (9, 9)


def test_who_is_gone_for_long_is_no_news_and_then_not_shown() -> None:
    away = [seen(f"n{n}", gone=True, heard_s=30.0 * 20**n) for n in range(3)]  # the last: 200 min
    page = look(seen("a"), *away)
    assert (page["headline"]["gone"], page["headline"]["gone_lately"]) == (2, 2)
    assert {row["id"] for row in rows(page["nodes"])} == {"a", "n0", "n1"}


def test_who_said_goodbye_left_and_is_no_news() -> None:
    page = look(seen("a"), replace(seen("b", gone=True), left=True), seen("c", gone=True))
    head = page["headline"]
    assert (head["gone"], head["left"], head["gone_lately"]) == (2, 1, 1)
    assert {row["id"]: row["left"] for row in rows(page["nodes"])} == {
        "a": False, "b": True, "c": False,
    }  # fmt: skip


def test_nobody_moves_the_held_out_curve_by_coming_or_going() -> None:
    state = DashboardState()

    def point(second: int, **passed: float) -> float:
        nodes = [seen(peer, metrics={"held_out_ratio": each}) for peer, each in passed.items()]
        page = look(*nodes, state=state, now_s=NOW_S + second)
        return page["history"]["recent"]["held_out"][-1]  # type: ignore[no-any-return]

    assert point(1, a=0.4, b=0.6) == pytest.approx(0.5)
    assert point(2, a=0.6, b=0.6) == pytest.approx(0.6)
    assert point(3, a=0.6, b=0.6, newcomer=0.0) == pytest.approx(0.6)
    assert point(4, a=0.6, b=0.6, newcomer=0.3) == pytest.approx(0.7)
    assert point(5, a=0.6) == pytest.approx(0.7)


def test_the_last_minutes_are_no_more_after_a_pause() -> None:
    series = Series(("a",))
    for at_s in (0.0, 1.0, 2_400.0, 2_401.0):
        series.add(at_s, {"a": at_s})
    assert series.as_json()["recent"]["t"] == [2_400.0, 2_401.0]
    assert series.as_json()["all"]["t"][0] == 0.0


def test_a_broker_that_is_away_makes_no_node_gone() -> None:
    state = DashboardState()

    def gone(now_s: float, away_s: float | None = None, heard_at_s: float = 4.0) -> bool:
        heard_s = now_s - heard_at_s
        node = seen("a", heard_s=heard_s, gone=heard_s > 10.0)
        source = ReportSource("b", away_s is None, away_s)
        shown = state.look([node], {}, source, NOW_S + now_s)
        return shown["headline"]["gone"] == 1

    assert not gone(5.0)
    assert not gone(30.0, away_s=24.0)  # nobody could hear of it
    assert not gone(39.0)  # the broker is back for nine seconds
    assert gone(41.0)
    state = DashboardState()
    assert gone(20.0)  # it was gone before
    assert gone(30.0, away_s=1.0)
    assert gone(31.0)


def test_throughput_is_there_from_the_second_report_on() -> None:
    state = DashboardState()
    first = look(seen("a", metrics={"bytes_in_total": 0.0}), state=state)
    assert first["headline"]["in_bytes_per_s"] is None
    later = seen("a", metrics={"bytes_in_total": 500.0}, sequence=2, sent_at_s=NOW_S + 1.0)
    second = look(later, state=state, now_s=NOW_S + 1.0)
    assert second["headline"]["in_bytes_per_s"] == 500.0
    assert second["history"]["recent"]["in_bytes_per_s"] == [None, 500.0]


def test_while_the_broker_is_away_no_rate_is_live_and_no_curve_goes_on() -> None:
    state = DashboardState()
    for second in range(4):
        node = seen(
            "a", sequence=second, sent_at_s=NOW_S + second,
            metrics={"bytes_in_total": 500.0 * second, "own_reward": 0.5},
        )  # fmt: skip
        source = SOURCE if second != 2 else ReportSource("b", connected=False, away_s=1.0)
        page = state.look([node], {}, source, NOW_S + second)
        assert page["headline"]["in_bytes_per_s"] == (500.0 if second in (1, 3) else None)
        assert page["headline"]["reward"] == 0.5  # as it was heard last
    recent = page["history"]["recent"]
    assert recent["in_bytes_per_s"] == [None, 500.0, None, 500.0]
    assert (recent["reward"], recent["nodes"]) == ([0.5, 0.5, None, 0.5], [1.0, 1.0, None, 1.0])
    assert recent["t"] == [NOW_S + second for second in range(4)]


def alarm(kind: Alarm, level: str = "warning", text: str = "so") -> AlarmReport:
    return AlarmReport(kind=kind, level=level, text=text, advice="do")  # type: ignore[arg-type]


def test_alarms_of_a_kind_are_one_and_the_critical_come_first() -> None:
    page = look(
        *(seen(f"n{n}", alarms=(alarm(Alarm.NO_FOREIGN),)) for n in range(20)),
        seen("x", alarms=(alarm(Alarm.DISK_LOW, "critical"),)),
        seen("y", alarms=(alarm(Alarm.MEMORY_LOW),), gone=True),
    )
    shown = page["alarms"]["shown"]
    assert [(each["kind"], each["level"], each["count"]) for each in shown] == [
        ("disk_low", "critical", 1),
        ("no_foreign", "warning", 20),
    ]
    assert len(shown[1]["nodes"]) < 20
    assert len(shown) <= ALARMS_SHOWN_MAX
    assert rows(page["nodes"])[0]["alarms"]  # its row is among the first


def test_more_nodes_than_are_shown_are_counted_and_alarms_stay() -> None:
    many = [seen(f"n{n:05}") for n in range(NODES_SHOWN_MAX + 9)]
    last = seen("z", alarms=(alarm(Alarm.CLOCK_SKEW),))
    page = look(*many, last)
    assert len(page["nodes"]["rows"]) == NODES_SHOWN_MAX
    assert page["nodes"]["left_out"] == 10
    assert rows(page["nodes"])[0]["id"] == "z"
    assert page["headline"]["nodes"] == NODES_SHOWN_MAX + 10


def test_a_worker_is_one_row_with_its_price_and_how_far_it_is_behind() -> None:
    learner = seen(
        "l",
        role="learner",
        metrics={"published_version": 9.0},
        workers=(WorkerRow(name="w", peer_id="w1", version=7, admitted=5),),
    )
    planner = seen(
        "c",
        role="coordinator",
        workers=(
            WorkerRow(name="spot", peer_id="w1", price_per_h=0.3),
            WorkerRow(name="idle", price_per_h=0.1),
        ),
    )
    found = rows(look(learner, planner)["workers"])
    assert [(r["name"], r["behind"], r["admitted"], r["price_per_h"]) for r in found] == [
        ("spot", 2, 5, 0.3),
        ("idle", None, 0, 0.1),
    ]


def test_workers_that_a_report_had_no_room_for_are_counted() -> None:
    learner = seen("l", role="learner", workers=(WorkerRow(name="w"),), workers_left_out=7)
    assert look(learner)["workers"]["left_out"] == 7


def test_the_prediction_stands_beside_what_was_measured() -> None:
    learner = seen("l", role="learner", metrics={"idle_ratio": 0.2, "staleness_max_steps": 3.0})
    planner = seen("c", role="coordinator", metrics={"predicted_idle_ratio": 0.1})
    found = look(learner, planner)["capacity"]
    assert (found["idle_ratio"], found["predicted_idle_ratio"]) == (0.2, 0.1)
    assert look(seen("a"))["capacity"] is None


def test_reasons_beyond_the_bound_are_one() -> None:
    reasons = {f"r{n:02}": float(n + 1) for n in range(LABELS_SHOWN_MAX + 3)}
    found = look(seen("a", labelled={"rejected_total": reasons}))["rejected"]
    assert len(found) == LABELS_SHOWN_MAX + 1
    assert found[-1] == ["others", 1 + 2 + 3]


def test_figures_of_strangers_that_no_sum_holds_stop_nothing() -> None:
    """1e308 is a finite number, and twice it is none: JSON has no word for that."""
    huge = {"bytes_in_total": 1e308, "own_reward": 1e308, "round": -1e308}
    state = DashboardState()
    for sequence in range(3):
        changes: dict[str, Any] = {"sequence": sequence, "sent_at_s": NOW_S + 1e-9 * sequence}
        metrics = {**huge, "bytes_in_total": 1e308 if sequence else -1e308}
        many = [
            seen(peer, metrics=metrics, labelled={"rejected_total": huge}, **changes)
            for peer in "abc"
        ]
        look(*many, state=state, now_s=NOW_S + sequence)
    with pytest.raises(ValueError, match="JSON"):
        frame_of({"a": float("inf")})


def test_two_reports_at_nearly_one_moment_make_no_rate() -> None:
    """5e-324 s is above zero, and what is divided by it is no number."""
    state = DashboardState()
    look(seen("a", sent_at_s=0.0, metrics={"bytes_in_total": 0.0}), state=state)
    later = {"sequence": 2, "metrics": {"bytes_in_total": 1e18}}
    page = look(seen("a", sent_at_s=5e-324, **later), state=state)
    assert page["headline"]["in_bytes_per_s"] is None
    page = look(seen("a", sent_at_s=0.5, **(later | {"sequence": 3})), state=state)
    assert page["headline"]["in_bytes_per_s"] == RATE_MAX


def test_no_figure_of_the_page_mixes_two_runs() -> None:
    """The run with most nodes comes first. Curves of each go on, whoever joins another one."""
    state, metrics = PageState(), {"held_out_ratio": 0.2, "own_reward": 0.1}
    first = seen("a", metrics=metrics)
    state.look([first], {}, SOURCE, NOW_S)
    others = [
        seen(peer, run_id="other", metrics={"held_out_ratio": 0.8}, alarms=()) for peer in "bcd"
    ]
    page = state.look([first, *others], {}, SOURCE, NOW_S + 1.0)
    (run_id,) = page["others"]
    small = page["others"][run_id]
    assert (page["runs"], small["runs"]) == (["other"], [run_id])
    assert [each["headline"]["held_out"] for each in (page, small)] == [0.8, 0.2]
    assert [len(each["history"]["recent"]["held_out"]) for each in (page, small)] == [1, 2]
    moved = seen("a", run_id="other", metrics=metrics)
    page = state.look([moved, first, *others], {}, SOURCE, NOW_S + 2.0)  # it was heard there last
    assert page["others"] == {}
    assert len(page["nodes"]["rows"]) == 4
    many = [seen(str(n), run_id=f"run-{n}") for n in range(RUNS_SHOWN_MAX + 3)]
    assert len(state.look(many, {}, SOURCE, NOW_S + 3.0)["others"]) == RUNS_SHOWN_MAX - 1
    assert state.look([], {}, SOURCE, NOW_S + 4.0)["headline"]["nodes"] == 0
    assert set(state.curves()) == {""}


class _Fails(PageState):
    """A state that JSON has no word for, as often as is wanted."""

    fails = False

    def look(self, *args: Any) -> dict[str, Any]:
        return super().look(*args) | ({"number": float("inf")} if self.fails else {})


def test_where_no_frame_can_be_made_the_last_one_stays_and_that_is_counted() -> None:
    state = _Fails()
    state.fails = True
    frames = Frames(state)
    assert frames.make([seen("a")], {}, SOURCE, NOW_S) is None
    state.fails = False
    assert json.loads(frames.make([seen("a")], {}, SOURCE, NOW_S) or b"")["headline"]["nodes"] == 1
    state.fails = True
    kept = json.loads(frames.make([], {"x": 1}, SOURCE, NOW_S + 1.0) or b"")
    assert (kept["headline"]["nodes"], kept["unix_s"], kept["failing"]) == (1, NOW_S, True)
    assert kept["telemetry"] == {"x": 1, "frames_failed": 2}
    state.fails = False
    good = json.loads(frames.make([], {}, SOURCE, NOW_S + 2.0) or b"")
    assert "failing" not in good
    assert good["telemetry"] == {"frames_failed": 2}


def test_a_learner_that_is_gone_is_news_as_long_as_its_workers_report() -> None:
    def news(*others: NodeView) -> tuple[int, int]:
        gone = seen("l", role="learner", gone=True, heard_s=9_000.0)
        head = look(gone, *others)["headline"]
        assert head["heard_of"] == 1 + len(others)
        return head["nodes"], head["gone_lately"]

    worker = seen("w", role="worker")
    assert news(worker) == (2, 1)
    assert news(seen("w", role="worker", run_id="other")) == (1, 0)
    assert news(worker, seen("m", role="learner")) == (2, 0)  # another one took its place
    assert news() == (0, 0)


def test_hostile_texts_arrive_as_they_were() -> None:
    text = "<img src=x onerror=alert(1)>\u202e\x00"
    page = look(seen("a", phase=text, notes=(text,)))
    assert rows(page["nodes"])[0]["phase"] == text
    assert page["notes"] == [["a", text]]


def test_the_page_says_to_whom_a_node_sends_most() -> None:
    status = snapshot()
    peers = [replace(status.peers[0], peer_id=f"p{n}", out_bytes_per_s=99.6 * n) for n in range(6)]
    told = peer_rows(replace(status, peers=tuple(peers)), Traffic(TransportCounters(), ()))
    (row,) = rows(look(seen("a", peers=told))["nodes"])
    assert row["sends_to"] == [["p5", 498], ["p4", 398], ["p3", 299], ["p2", 199]]


# --- the map -----------------------------------------------------------------------------------


def eats(peer: str, *others: tuple[str, int], **changes: Any) -> NodeView:
    fed = tuple(PeerTraffic(peer_id=giver, groups_trained=groups) for giver, groups in others)
    return seen(peer, peers=fed, **changes)


def test_edges_go_from_giver_to_taker() -> None:
    graph = Feeding().look([eats("a", ("b", 5), ("c", 0), ("a", 3)), eats("b")], NOW_S)
    assert graph["edges"] == [["b", "a", 5, False]]
    assert {dot["id"] for dot in graph["dots"]} == {"a", "b"}


def test_an_edge_is_fresh_for_a_while_after_it_carried_something() -> None:
    feeding = Feeding()

    def fresh(groups: int, now_s: float) -> bool:
        return bool(feeding.look([eats("a", ("b", groups)), eats("b")], now_s)["edges"][0][3])

    assert not fresh(5, 0.0)  # nobody knows when
    assert fresh(6, 10.0)
    assert fresh(6, 10.0 + FRESH_S)
    assert not fresh(6, 11.0 + FRESH_S)


def test_peers_that_do_not_report_are_one_dot() -> None:
    graph = Feeding().look([eats("a", ("ghost", 2), ("spirit", 3))], NOW_S)
    assert graph["edges"] == [["*unwatched", "a", 5, False]]


def test_who_works_for_a_learner_feeds_it() -> None:
    learner = seen("l", role="learner", workers=(WorkerRow(name="w", peer_id="w", admitted=4),))
    graph = Feeding().look([learner, seen("w", role="worker")], NOW_S)
    assert graph["edges"] == [["w", "l", 4, False]]
    assert [dot["centre"] for dot in graph["dots"]] == [True, False]


def test_a_thousand_nodes_are_drawn_as_few_and_none_is_lost() -> None:
    random = Random(1)
    names = [f"n{n}" for n in range(1_000)]
    nodes = [
        eats(name, *((random.choice(names), random.randrange(9)) for _ in range(PEERS_MAX // 4)))
        for name in names
    ]
    nodes.append(seen("alarmed", alarms=(alarm(Alarm.DISK_LOW),)))
    graph = Feeding().look(nodes, NOW_S)
    assert len(graph["dots"]) <= DRAWN_MAX
    assert len(graph["edges"]) <= EDGES_MAX
    assert sum(dot["count"] for dot in graph["dots"]) == 1_001
    assert "alarmed" in {dot["id"] for dot in graph["dots"]}
    drawn = {dot["id"] for dot in graph["dots"]}
    assert all(giver in drawn and taker in drawn for giver, taker, _, _ in graph["edges"])


# --- broadcasts --------------------------------------------------------------------------------


def carried(have: str, chunks: int, version: int = 3, *, complete: bool = False) -> BroadcastReport:
    return BroadcastReport(
        version=version, chunks=chunks, have=have, size_bytes=chunks * 10, complete=complete
    )


def test_bits_are_read_first_chunk_first() -> None:
    assert bits_of("a5") == [1, 0, 1, 0, 0, 1, 0, 1]
    assert bits_of("8") == [1, 0, 0, 0, 0, 0, 0, 0]
    assert bits_of("no") == []


def test_cells_are_shares_of_their_chunks() -> None:
    assert cell_shares(carried("c0", 4)) == [1.0, 1.0, 0.0, 0.0]
    assert cell_shares(carried("", 4, complete=True)) == [1.0] * 4
    assert cell_shares(carried("zz", 2)) == [0.0, 0.0]
    wide = cell_shares(carried("f" * (CELLS_MAX // 2), 4 * CELLS_MAX))
    assert len(wide) == CELLS_MAX
    assert cell_shares(carried("f" * (CELLS_MAX // 2) + "0" * (CELLS_MAX // 2), 4 * CELLS_MAX))[
        :: CELLS_MAX - 1
    ] == [1.0, 0.0]


def test_only_what_is_whole_looks_whole() -> None:
    assert levels([0.0, 0.001, 0.5, 0.999, 1.0]) == "01489"


def test_a_broadcast_shows_who_misses_most_and_the_mean_of_all() -> None:
    nodes = [seen(f"n{n:02}", broadcast=carried("ff", 8)) for n in range(ROWS_MAX + 5)]
    late = seen("late", broadcast=carried("ff", 8, version=2, complete=True))
    page = look(*nodes, seen("half", broadcast=carried("f0", 8)), late)["broadcast"]
    assert (page["version"], page["nodes"], page["behind"]) == (3, ROWS_MAX + 7, 1)
    assert [row[0] for row in page["rows"][:2]] == ["late", "half"]
    assert len(page["rows"]) == ROWS_MAX
    assert page["left_out"] == 7
    assert page["swarm"] == "88888888"
    assert look(seen("a"))["broadcast"] is None
