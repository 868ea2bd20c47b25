import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from node.observe.abilities import interval
from node.observe.event_log import FILE_NAME, EventLog, Record, history
from node.observe.records import Trouble
from node.observe.saved_report import (
    ReportSummary,
    curves,
    summarise,
    write_report,
)
from swarm.errors import ConfigError
from tests.unit.monitor_records import (
    PEER_A,
    PEER_B,
    held_out,
    round_done,
    started,
    step_done,
    work_done,
)

EVIL = "<script>alert(1)</script>"


def log(directory: Path, records: Sequence[Record], start_s: float = 1_000.0) -> Path:
    ticks = iter(range(10_000))
    with EventLog(directory / FILE_NAME, lambda: start_s + 2.0 * next(ticks)) as events:
        for record in records:
            events.write(record)
    return directory


def a_life(peer_id: str, other: str, rise: float) -> list[Record]:
    rounds = [round_done(n, foreign_by_producer={other: 2}) for n in range(1, 21)]
    return [started(peer_id), held_out(0, 0.4), *rounds, held_out(20, 0.4 + rise)]


class Page(HTMLParser):
    """Collects what a page would fetch, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "srcset")]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and data.strip():
            self.scripts.append(data)


def state_of(summary: ReportSummary) -> dict[str, Any]:
    """The data that a saved page shows."""
    data, _ = Page(summary.html.read_text()).scripts
    found: dict[str, Any] = json.loads(data)
    return found


def sentences(summary: ReportSummary) -> str:
    return " ".join(state_of(summary)["saved"]["sentences"])


def charts(summary: ReportSummary) -> dict[str, Any]:
    return {each["title"]: each for each in state_of(summary)["saved"]["charts"]}


def tables(summary: ReportSummary) -> dict[str, Any]:
    return {each["title"]: each for each in state_of(summary)["saved"]["tables"]}


def test_two_nodes_make_one_page_with_curves(tmp_path: Path) -> None:
    first = log(tmp_path / "a", a_life(PEER_A, PEER_B, 0.2))
    second = log(tmp_path / "b", a_life(PEER_B, PEER_A, 0.3), start_s=1_004.0)
    summary = write_report([first, second], tmp_path / "out")

    assert [node.name for node in summary.nodes] == [PEER_A[-8:], PEER_B[-8:]]
    assert summary.nodes[0].rise_points == pytest.approx(20.0)
    assert summary.rise_points_mean == pytest.approx(25.0)
    assert summary.nodes[0].external_groups_mean == 2.0
    assert summary.nodes[0].foreign_groups == 40
    drawn = charts(summary)
    assert set(drawn) == {
        "Held-out pass rate over rounds",
        "Held-out pass rate over generated tokens",
        "Own training reward, mean over the last 15 rounds",
    }
    held_out = drawn["Held-out pass rate over rounds"]
    assert (held_out["x"], [line["y"] for line in held_out["lines"]]) == (
        [0, 20],
        [[0.4, 0.6], [0.4, 0.7]],
    )
    edges = [edge[:3] for edge in state_of(summary)["feeding"]["edges"]]
    assert sorted(edges) == [[PEER_A, PEER_B, 40], [PEER_B, PEER_A, 40]]
    text = sentences(summary)
    assert "+25.0 points (by model " in text
    assert "Groups of others were trained on 80 times." in text
    assert "+20.0 points" in str(summary)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (
            (1.0,) * 40,
            "That is more than luck: over all tasks of this kind the change is betw",
        ),
        ((1.0,) * 11 + (0.0,) * 29, "That may be luck: over all tasks of this kind the change is"),
        ((), "Whether that is luck is unknown"),
    ],
)
def test_the_first_sentences_say_what_changed_and_whether_it_may_be_luck(
    tmp_path: Path, after: tuple[float, ...], verdict: str
) -> None:
    before = (1.0,) * 10 + (0.0,) * 30
    life = [
        started(),
        held_out(0, 0.25, tasks=40, rewards=before),
        round_done(1),
        held_out(1, 0.5, tasks=40, rewards=after),
    ]
    told = sentences(write_report([log(tmp_path / "a", life)], tmp_path / "out"))
    assert told.startswith(
        "1 language model practised binary_matrix, and was tested before and after on 40 tasks "
        "kept out of practice. Before, 25.0 % of these were solved, and after, 50.0 %: "
        "+25.0 points. " + verdict
    )


def test_each_run_of_a_report_has_a_page_of_its_own(tmp_path: Path) -> None:
    lives = [
        [replace(started(peer), run_id=run), held_out(0, passed), round_done(1)]
        for peer, run, passed in (
            (PEER_A, "one", 0.2),
            (PEER_B, "two", 0.6),
            (f"{PEER_B[:-1]}c", "one", 0.4),
        )
    ]
    summary = write_report(
        [log(tmp_path / str(place), life) for place, life in enumerate(lives)], tmp_path / "out"
    )
    first = state_of(summary)
    (second,) = first["others"].values()
    assert [first["runs"], second["runs"]] == [["one"], ["two"]]
    assert [len(page["nodes"]["rows"]) for page in (first, second)] == [2, 1]
    assert [page["headline"]["held_out"] for page in (first, second)] == [pytest.approx(0.3), 0.6]
    lines = [[len(c["lines"]) for c in page["saved"]["charts"]] for page in (first, second)]
    assert [set(counts) for counts in lines] in ([{2}, {1}], [{2, 0}, {1, 0}])


def test_the_page_is_the_dashboard_and_stands_alone(tmp_path: Path) -> None:
    run = log(tmp_path / "a", a_life(PEER_A, PEER_B, 0.2))
    summary = write_report([run], tmp_path / "out")
    page = Page(summary.html.read_text())
    assert "link" not in page.tags
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert re.search(r"url\((?!#)", summary.html.read_text()) is None
    assert not re.search(r"^\s*(import|export) ", page.scripts[1], re.MULTILINE)
    state = state_of(summary)
    assert state["headline"]["round"] == 20
    assert state["headline"]["held_out"] == 0.6
    assert state["headline"]["reward"] == 0.5
    assert state["feeding"]["edges"][0][2] == 40
    history = state["history"]["all"]
    assert next(each for each in history["held_out"] if each is not None) == 0.4
    assert max(each or 0.0 for each in history["in_bytes_per_s"]) == 2_500.0


def test_everything_from_a_log_is_escaped(tmp_path: Path) -> None:
    life: list[Record] = [
        started(peer_id=f"p{EVIL}"),
        held_out(0, 0.5),
        round_done(
            1,
            foreign_by_producer={f"q$\\frac{EVIL}": 1, "$x^$": 1},
            rejected_total={EVIL: 3, "-->": 1},
        ),
        Trouble(EVIL),
    ]
    summary = write_report([log(tmp_path / "a", life)], tmp_path / "out")
    assert EVIL not in summary.html.read_text()
    assert Page(summary.html.read_text()).tags.count("script") == 2
    assert [EVIL, 3] in state_of(summary)["rejected"]


def test_rejected_records_are_counted_by_reason(tmp_path: Path) -> None:
    life = [started(), round_done(1, rejected_total={"expired": 2, "malformed": 5})]
    summary = write_report([log(tmp_path / "a", life)], tmp_path / "out")
    assert state_of(summary)["rejected"] == [["malformed", 5], ["expired", 2]]
    assert "No model was tested twice" in sentences(summary)


def test_a_node_that_did_nothing_yet_is_reported_so(tmp_path: Path) -> None:
    summary = write_report([log(tmp_path / "a", [])], tmp_path / "out")
    assert charts(summary) == {}
    assert summary.rise_points_mean is None
    assert summary.nodes[0].name == "a"
    assert "1 node in 0 rounds" in sentences(summary)


def test_many_nodes_and_many_producers_still_draw(tmp_path: Path) -> None:
    foreign = {f"stranger{n:03d}": n for n in range(60)}
    lives = [
        log(
            tmp_path / f"node-{k}",
            [started(f"peer{k:08d}"), held_out(0, 0.1), round_done(1, foreign_by_producer=foreign)],
        )
        for k in range(20)
    ]
    summary = write_report(lives, tmp_path / "out")
    assert len(summary.nodes) == 20
    assert ["*unwatched", "peer00000000", 1770, False] in state_of(summary)["feeding"]["edges"]
    assert len(charts(summary)["Held-out pass rate over rounds"]["lines"]) == 20


def test_a_directory_without_a_log_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no event log in .*nowhere"):
        write_report([tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(ConfigError, match="from 1 to"):
        write_report([], tmp_path / "out")


def test_the_same_logs_make_the_same_page(tmp_path: Path) -> None:
    run = log(tmp_path / "a", a_life(PEER_A, PEER_B, 0.2))
    first = write_report([run], tmp_path / "out1").html.read_bytes()
    assert write_report([run], tmp_path / "out2").html.read_bytes() == first


def test_effective_counts_are_means_over_rounds() -> None:
    life = history(enumerate([round_done(1, external_groups=0), round_done(2, external_groups=3)]))
    node = summarise("x", life)
    assert node.external_groups_mean == 1.5
    assert node.local_groups_mean == 4.0
    assert node.rise_points is None


def test_one_evaluation_is_no_rise() -> None:
    node = summarise("x", history([(0.0, held_out(0, 0.5))]))
    assert node.held_out_first == node.held_out_last == 0.5
    assert node.rise_points is None


def test_a_curve_is_bounded_and_keeps_its_ends() -> None:
    line = [(float(n), float(n)) for n in range(100_000)]
    drawn = curves([("a", line), ("b", line[:10])], 400)
    assert len(drawn["x"]) <= 400
    assert (drawn["x"][0], drawn["x"][-1]) == (0.0, pytest.approx(99_999))
    assert drawn["x"] == sorted(drawn["x"])
    assert drawn["lines"][1]["y"].count(None) == len(drawn["x"]) - 1
    few = curves([("a", [(1.0, 3.0), (2.0, 4.0)]), ("b", [(2.0, 5.0)])], 400)
    assert [each["y"] for each in few["lines"]] == [[3.0, 4.0], [None, 5.0]]


def test_a_figure_of_a_round_has_a_chart(tmp_path: Path) -> None:
    life = [started(), *(round_done(n, mismatch_k3=0.01 * n) for n in (1, 2, 3))]
    drawn = charts(write_report([log(tmp_path / "a", life)], tmp_path / "out"))["mismatch k3 nats"]
    assert (drawn["unit"], drawn["lines"][0]["y"]) == ("nats", [0.01, 0.02, 0.03])


def test_a_learner_and_its_worker_show_staleness(tmp_path: Path) -> None:
    steps = [step_done(n, staleness_max=n % 4) for n in range(1, 13)]
    learner = log(tmp_path / "l", [started(PEER_A), *steps])
    worker = log(tmp_path / "w", [started(PEER_B), *(work_done(n) for n in range(1, 9))])
    summary = write_report([learner, worker], tmp_path / "out")
    assert set(charts(summary)) == {
        "Own training reward, mean over the last 15 rounds",
        "idle ratio",
        "staleness mean steps",
        "staleness max steps",
    }
    assert state_of(summary)["headline"]["roles"] == {"learner": 1, "worker": 1}
    assert state_of(summary)["capacity"]["staleness_max_steps"] == 0
    workers = state_of(summary)["workers"]
    assert workers["rows"][0][workers["columns"].index("admitted")] == 96
    assert [node.starts for node in summary.nodes] == [1, 1]
    assert "32 of 32 groups accepted in 8 batches" in str(summary)
    assert "in 12 steps" in str(summary)
    words = sentences(summary)
    assert "2 nodes in 12 steps and 8 batches over" in words
    assert "8,000 tokens generated." in words
    assert "Workers handed in 32 groups: accepted 32." in words
    assert "quantised" not in words


def test_a_learner_s_summary_is_of_its_steps() -> None:
    steps = [
        step_done(
            n,
            reward=0.1 * n,
            shared_groups=2,
            groups_quantised=1,
        )
        for n in range(1, 5)
    ]
    node = summarise("x", history(enumerate([started(), *steps])))
    assert (node.rounds, node.reward_first, node.reward_last) == (0, 0.1, 0.4)
    assert (node.local_groups_mean, node.external_groups_mean) == (6.0, 2.0)
    assert (node.steps, node.foreign_groups, node.groups_quantised) == (4, 32, 4)


def test_a_worker_s_totals_go_on_over_its_starts() -> None:
    first = [work_done(n) for n in (1, 2, 3)]
    second = [replace(work_done(n), verdicts_total={"accepted": 1, "stale": n}) for n in (1, 2)]
    node = summarise("x", history(enumerate([started(), *first, started(), *second])))
    assert (node.starts, node.rounds, node.generated_tokens) == (2, 0, 5_000)
    assert (node.batches, node.verdicts) == (5, {"accepted": 13, "stale": 2})
    assert "13 of 15 groups accepted in 5 batches" in str(node)


def test_groups_of_quantised_engines_are_said_where_there_are_any(tmp_path: Path) -> None:
    life = [started(), round_done(1, groups_quantised=3), round_done(2)]
    text = sentences(write_report([log(tmp_path / "a", life)], tmp_path / "out"))
    assert "3 groups trained on came from engines with quantised weights." in text


def test_steps_that_a_restart_undid_do_not_count() -> None:
    records = [started(), step_done(1), step_done(2), step_done(3, reward=0.1), started(round_=2)]
    life = history((float(n), record) for n, record in enumerate([*records, step_done(3)]))
    assert [record.step for _, record in life.steps] == [1, 2, 3]
    assert life.steps[-1][1].reward == 0.4
    assert history([(0.0, step_done(5)), (1.0, started(round_=4))]).steps == ()


def test_intervals_are_those_of_students_t_and_of_two_values_more() -> None:
    """A textbook's: of 3, 4, 5, 6, 7 the mean is 5, the variance 2.5, and t(4) is 2.776."""
    mean, low, high = interval([4.0, 5.0, 6.0], 3.0, 7.0)
    assert (mean, high - mean) == (5.0, pytest.approx(2.776 * (2.5 / 5) ** 0.5, rel=1e-3))
    assert mean - low == pytest.approx(high - mean)
    mean, low, high = interval([1.0, 1.0], 0.0, 1.0)
    assert (mean, high) == (1.0, 1.0)
    assert low < 0.5  # two are too few to be sure of
    many = interval([0.0, 1.0] * 50, 0.0, 1.0)
    assert many[2] - many[0] < 0.11  # beyond the table
