"""Bars of what takes long: drawn in a terminal, after a while, and nowhere else."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from node.observe.live import LiveView
from node.observe.progress_bars import SHOWN_AFTER_S, WORKS_MAX, Bars, Work, version_work
from swarm.weights.weights_service import VersionProgress
from tests.unit.monitor_records import round_done, snapshot

LONG_S = 2 * SHOWN_AFTER_S


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console_of(clock: Clock, *, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=100, color_system=None, get_time=clock
    )
    return console, out


def drawn(clock: Clock, act: Callable[[Bars], None]) -> str:
    """What bars that a caller draws look like after `act`."""
    console, _ = console_of(clock, terminal=True)
    bars = Bars(console, drawn_by_caller=True)
    act(bars)
    clock.now += LONG_S
    renderable = bars.renderable
    if renderable is None:
        return ""
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_bar_says_what_and_how_far_and_what_is_over_is_gone() -> None:
    clock = Clock()
    text = drawn(clock, lambda bars: bars.set([Work("one", 1.0, 4.0, "a note"), Work("two")]))
    assert "one" in text
    assert " 25%" in text
    assert "a note" in text
    assert "0:00:02" in text
    assert "two" in text

    def end(bars: Bars) -> None:
        bars.set([Work("one"), Work("two")])
        bars.set([Work("two")])

    text = drawn(clock, end)
    assert "two" in text
    assert "one" not in text
    assert drawn(clock, lambda bars: bars.set([])) == ""


def test_a_bar_says_how_long_it_may_still_take() -> None:
    clock = Clock()

    def act(bars: Bars) -> None:
        for done in (0.0, 10.0, 20.0):  # ten a second, which leaves eight seconds for the rest
            bars.set([Work("fetching", done, 100.0), Work("warming")])
            clock.now += 1.0

    text = drawn(clock, act)
    fetching, warming = text.splitlines()
    assert "0:00:08 left" in fetching
    assert "left" not in warming


def test_what_is_short_shows_no_bar() -> None:
    clock = Clock()
    console, _ = console_of(clock, terminal=True)
    bars = Bars(console, drawn_by_caller=True)
    bars.set([Work("short")])
    assert bars.renderable is None
    clock.now += 1.01 * SHOWN_AFTER_S
    assert bars.renderable is not None


def test_many_works_are_as_many_bars_as_fit_and_markup_is_text() -> None:
    text = drawn(Clock(), lambda bars: bars.set(Work(f"[red]w{n}", 0.0, 1.0) for n in range(100)))
    assert text.count("[red]w") == WORKS_MAX


def test_without_a_terminal_nothing_is_written() -> None:
    clock = Clock()
    console, out = console_of(clock, terminal=False)
    bars = Bars(console)
    bars.set([Work("one", 1.0, 2.0)])
    clock.now += LONG_S
    bars.set([])
    with bars.showing("two") as show:
        show(Work("two", 1.0, 2.0))
    assert out.getvalue() == ""


def test_a_bar_on_a_terminal_leaves_its_line_empty() -> None:
    clock = Clock()
    console, out = console_of(clock, terminal=True)
    bars = Bars(console)

    def work() -> None:
        with bars.showing("one") as show:
            show(Work("one", 1.0, 2.0))
            clock.now += LONG_S
            show(Work("one", 2.0, 2.0))
            bars._progress.refresh()
            assert "one" in out.getvalue()
            raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        work()
    # the line is wiped, the cursor to be seen, and back where it was
    assert out.getvalue().endswith("\r\x1b[2K\x1b[?25h\r")


def test_a_live_view_draws_bars_below_the_node() -> None:
    clock = Clock()
    console, out = console_of(clock, terminal=True)
    with LiveView(console, interactive=True, clock=clock) as view:
        view.works([Work("loading", 0.0, None)])
        clock.now += LONG_S
        view.works([Work("loading", 0.0, None)])
        assert "loading" in out.getvalue()  # before there is anything else to show
        clock.now += LONG_S
        view.update(snapshot())
        assert out.getvalue().rindex("held-out") < out.getvalue().rindex("loading")
        clock.now += LONG_S
        view.works([])
        before = len(out.getvalue())
        clock.now += LONG_S
        view.update(snapshot())
        assert "held-out" in out.getvalue()[before:]
        assert "loading" not in out.getvalue()[before:]


def test_a_log_has_lines_of_events_and_no_bar() -> None:
    clock = Clock()
    console, out = console_of(clock, terminal=False)
    with LiveView(console, interactive=False, clock=clock) as view:
        for number in range(5):
            view.works([Work("loading", float(number), 5.0)])
            clock.now += LONG_S
            view.event(round_done(number))
    assert len(out.getvalue().splitlines()) == 5
    assert "loading" not in out.getvalue()


def test_a_version_on_its_way_has_bytes_beside_its_bar() -> None:
    assert version_work(VersionProgress(3, "manifest")) == Work("version 3", 0.0, None, "manifest")
    half = version_work(VersionProgress(3, "fetch", 500_000, 1_000_000))
    assert (half.done, half.total) == (500_000.0, 1_000_000.0)
    assert half.note == "fetch 500 kB of 1.00 MB"
