import io
import json
import logging
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from node.observe.event_log import EventLog, read_events
from node.observe.live import NOTED_AGAIN_S, REDRAW_INTERVAL_S, LiveView
from node.observe.log_lines import LINES_PER_S_MAX, Details, JsonView, detailed
from node.observe.records import AnswerCounts, Trouble, WentBack
from node.observe.status import render_status
from node.observe.text_format import bar_chart
from tests.unit.monitor_records import held_out, round_done, snapshot, started


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=100, color_system=None), out


TIME = "2026-11-26 12:00:00+00:00 "


def noon() -> datetime:
    return datetime.fromisoformat(TIME.strip())


def test_without_a_terminal_each_event_is_one_line() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=40), interactive=False, clock=Clock(), now=noon) as view:
        for record in (started(), held_out(0, 0.4), round_done(1), Trouble("a\nb")):
            view.update(snapshot(held_out_first=None))
            view.event(record)
        view.event(held_out(10, 0.6))
    timed = out.getvalue().splitlines()
    assert len(timed) == 5
    assert all(line.startswith(TIME) for line in timed)
    levels = [line.removeprefix(TIME)[:8].strip() for line in timed]
    assert levels == ["INFO", "INFO", "INFO", "WARNING", "INFO"]
    lines = [line.removeprefix(TIME)[8:] for line in timed]
    assert "starts from the beginning" in lines[0]
    assert "40.0 % passed (+0.0 points" in lines[1]
    assert lines[2].startswith("round 1: own reward 0.500, trained on 4 own and 2 foreign groups")
    assert lines[3] == "a?b"
    assert "60.0 % passed (+20.0 points" in lines[4]


def test_without_a_terminal_a_note_is_told_when_it_comes_comes_back_and_as_long_as_it_stands() -> (
    None
):
    out, clock = io.StringIO(), Clock()
    with LiveView(Console(file=out, width=40), interactive=False, clock=clock, now=noon) as view:
        for at_s, notes in (
            (0.0, ("the clock is 3.5 s wrong",)),
            (1.0, ("the clock is 4.1 s wrong", "no room")),  # a figure is no news
            (2.0, ("no room",)),
            (3.0, ("the clock is 8 s wrong", "no room", "the clock is 9 s wrong")),
            (NOTED_AGAIN_S, ("no room",)),
            (1.0 + NOTED_AGAIN_S, ("no room",)),
            (2.0 + NOTED_AGAIN_S, ("no room",)),
        ):
            clock.now = at_s
            view.update(snapshot(notes=notes))
    assert [line.removeprefix(TIME) for line in out.getvalue().splitlines()] == [
        "WARNING the clock is 3.5 s wrong",
        "WARNING no room",
        "WARNING the clock is 9 s wrong",
        "WARNING no room",
    ]


def test_json_lines_are_those_of_the_event_log_and_what_was_said(tmp_path: Path) -> None:
    records = [started(), held_out(0, 0.4), round_done(1), Trouble("a\nb"), WentBack(*range(6))]
    out = io.StringIO()
    with JsonView(out, clock=Clock(), now=lambda: datetime.fromtimestamp(7.25, UTC)) as view:
        view.say("this node is [red]here[/red]")
        view.works([])
        for record in records:
            view.event(record)
        view.update(snapshot(notes=("no room",)))
        view.update(snapshot(notes=("no room",)))
    first, *lines, last = out.getvalue().splitlines(keepends=True)
    assert json.loads(first) == {
        "event": "said", "time_s": 7.25, "text": "this node is [red]here[/red]"
    }  # fmt: skip
    assert json.loads(last) == {"event": "note", "time_s": 7.25, "text": "no room"}
    log = tmp_path / "events.jsonl"
    log.write_text("".join(lines))
    assert [record for _, record in read_events(log)] == records
    with EventLog(tmp_path / "other.jsonl", lambda: 7.25) as kept:
        for record in records:
            kept.write(record)
    assert (tmp_path / "other.jsonl").read_text() == "".join(lines)


def logged(number: int, at_s: float) -> logging.LogRecord:
    record = logging.LogRecord("swarm.door", logging.DEBUG, "", 0, "%d is at it", (number,), None)
    record.created = at_s
    return record


def test_details_are_told_with_their_logger_and_not_without_being_asked_for() -> None:
    log, told = logging.getLogger("swarm.door"), list[str]()
    root = logging.StreamHandler(io.StringIO())  # as libraries give the root one
    logging.getLogger().addHandler(root)
    with detailed(told.append, verbose=False):
        log.debug("nobody asked")
    with detailed(told.append, verbose=True):
        log.debug("at %s", "the door")
        logging.getLogger("urllib3").debug("of a library")
    log.debug("it is over")
    logging.getLogger().removeHandler(root)
    assert root.stream.getvalue() == ""
    assert told == ["debug swarm.door: at the door"]
    assert not logging.getLogger("swarm").handlers


def test_a_flood_of_details_is_cut_and_counted() -> None:
    told = list[str]()
    details = Details(told.append)
    for number in range(LINES_PER_S_MAX + 7):
        details.handle(logged(number, 100.9))
    assert len(told) == LINES_PER_S_MAX
    details.handle(logged(1000, 101.0))
    assert told[-2] == "left out: 7 lines of a second that had too many"
    assert told[-1] == "debug swarm.door: 1000 is at it"


def test_a_detail_is_one_line_whoever_it_is_of() -> None:
    out, lines = io.StringIO(), io.StringIO()
    with LiveView(Console(file=out), interactive=False, clock=Clock(), now=noon) as view:
        view.detail("[red]\x1b[2Jagent\n! trouble")
    assert out.getvalue() == f"{TIME}DEBUG   [red]?[2Jagent?! trouble\n"
    with JsonView(lines, now=noon) as view:
        view.detail("a\nb")
    assert json.loads(lines.getvalue()) | {"time_s": 0} == {
        "event": "detail", "time_s": 0, "text": "a\nb"
    }  # fmt: skip


def test_a_detail_is_no_warning_whatever_it_begins_with() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out), interactive=False, clock=Clock(), now=noon) as view:
        view.detail("! a stranger's word")
    assert out.getvalue() == f"{TIME}DEBUG   ! a stranger's word\n"


def test_what_validation_decided_is_told() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=40), interactive=False, clock=Clock(), now=noon) as view:
        view.event(held_out(10, 0.4, validation=0.25, validation_tasks=64))
        view.event(WentBack(10, 12, 0.25, 0.5, 8, 0.5))
    held, back = (line.removeprefix(TIME) for line in out.getvalue().splitlines())
    assert held.endswith("100 tasks), validation 25.0 %")
    assert back == (
        "WARNING the policy fell to 25.0 % on the validation tasks and went back to that of round "
        "8 (50.0 %); it learns at 50.0 % of its rate"
    )
    told = {
        "validation_passed": 0.25,
        "validation_best": 0.5,
        "validation_best_round": 8,
        "returns": 1,
        "rate_share": 0.25,
    }
    line = "25.0 % passed, best 50.0 % after round 8, went back 1 time, rate × 0.25"
    console, out = terminal()
    with LiveView(console, interactive=True, clock=Clock()) as view:
        view.update(snapshot(**told))
    assert line in " ".join(render_status(snapshot(**told)).split())
    assert line in out.getvalue()
    assert "validation" not in render_status(snapshot())


def test_what_sharing_brings_is_shown_where_it_can_be_said() -> None:
    told = {"foreign_gradient": 0.4, "sharing_per_token": 1.93}
    line = "sharing 1.9 times the groups that teach for a token, 40.0 % of the gradient"
    console, out = terminal()
    with LiveView(console, interactive=True, clock=Clock()) as view:
        view.update(snapshot(**told))
    assert line in " ".join(render_status(snapshot(**told)).split())
    assert line in " ".join(out.getvalue().split())
    assert "sharing" not in render_status(snapshot())
    others = render_status(snapshot(foreign_gradient=1.0, sharing_per_token=20.0))
    assert "more than 20 times" in " ".join(others.split())


def test_rescued_groups_and_kept_drafts_are_told_where_there_are_some() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=40), interactive=False, clock=Clock(), now=noon) as view:
        view.event(round_done(1, rescued_groups=2))
        view.event(round_done(2, drafted_tokens=80, kept_tokens=1_050, generated_tokens=7))
        view.event(round_done(3))
    rescued, kept, neither = out.getvalue().splitlines()
    assert "trained on 4 own (2 rescued) and 2 foreign groups" in rescued
    assert ", 7 tokens and 1,050 of drafts, " in kept
    assert "rescued" not in neither
    assert "drafts" not in neither


def test_groups_that_taught_nothing_are_not_told_as_trained_on() -> None:
    out = io.StringIO()
    told = {"local_groups": 1, "local_groups_made": 4, "answers": AnswerCounts(32, 8, 16, 4)}
    with LiveView(Console(file=out, width=40), interactive=False, clock=Clock(), now=noon) as view:
        view.event(round_done(1, own_informative=1))
        view.event(round_done(2, own_informative=4))
    first, second = out.getvalue().splitlines()
    assert "trained on 1 of 4 own and 2 foreign groups" in first
    assert "trained on 4 own and 2 foreign groups" in second
    console, out = terminal()
    with LiveView(console, interactive=True, clock=Clock()) as view:
        view.update(snapshot(**told))
    shown = render_status(snapshot(**told))
    answers = "50.0 % of 32 right, 25.0 % without an answer, 12.5 % cut by the token limit"
    assert "1 of 4 own groups" in out.getvalue()
    assert "1 of 4 own groups" in shown
    assert answers in out.getvalue()
    assert answers in " ".join(shown.split())
    assert "0 of 4 own" in render_status(snapshot(local_groups=0, local_groups_made=4))


def test_a_resumed_node_compares_with_its_first_start() -> None:
    out = io.StringIO()
    with LiveView(Console(file=out), interactive=False, clock=Clock(), now=noon) as view:
        view.update(snapshot(held_out_first=0.25))
        view.event(held_out(50, 0.5))
    assert "+25.0 points" in out.getvalue()


def test_redrawing_is_throttled_and_the_last_state_is_shown() -> None:
    clock, (console, out) = Clock(), terminal()
    with LiveView(console, interactive=True, clock=clock) as view:
        sizes = []
        for number in range(1_000):
            clock.now = number * REDRAW_INTERVAL_S / 100
            view.update(snapshot(round=number))
            sizes.append(len(out.getvalue()))
        redraws = sum(a != b for a, b in pairwise(sizes))
        assert redraws == 9
        assert "round 999," not in out.getvalue()
    assert "round 999," in out.getvalue()


def test_in_a_terminal_rounds_only_move_the_bars() -> None:
    clock, (console, out) = Clock(), terminal()
    with LiveView(console, interactive=True, clock=clock) as view:
        view.event(round_done(1, own_reward=0.0))
        view.event(round_done(2, own_reward=1.0))
        view.update(snapshot(notes=("[red]alarm[/red]",)))
        view.event(held_out(2, 0.5))
    text = out.getvalue()
    assert "trained on 4 own and 2 foreign groups, shared" not in text
    assert "▁█" in text
    assert "held-out after round 2" in text
    assert "[red]alarm[/red]" in text


def test_the_terminal_is_left_as_it_was_when_the_node_fails() -> None:
    console, out = terminal()
    view = LiveView(console, interactive=True, clock=Clock())

    def fail() -> None:
        with view:
            view.update(snapshot())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor shows again


def test_bars_stay_in_range() -> None:
    assert bar_chart((-1.0, 0.0, 0.5, 1.0, 7.0)) == "▁▁▅██"
