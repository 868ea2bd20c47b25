"""How many bytes of answers may be on their way."""

from random import Random

import pytest

from swarm.weights import piece_selection
from swarm.weights.piece_selection import ANSWERS_MIN, Pacer

MB = 1_000_000


def drive(pacer: Pacer, rate: float, seconds: float, latency_s: float = 0.05) -> int:
    """Answers of 0.1 MB over a link of that rate, as many at a time as the pacer lets out; the
    most bytes that were out at once in the second half."""
    now_s, free_s, most = 0.0, 0.0, 0
    out: list[tuple[float, float]] = []
    while now_s < seconds:
        while pacer.has_room(MB // 10):
            pacer.start(MB // 10, now_s)
            free_s = max(free_s, now_s) + 0.1 * MB / rate
            out.append((free_s + latency_s, now_s))
        if now_s > seconds / 2:
            most = max(most, len(out) * MB // 10)
        now_s, begun_s = out.pop(0)
        pacer.done(MB // 10, now_s - begun_s, now_s)
    for left_s, begun_s in out:
        pacer.done(MB // 10, left_s - begun_s, left_s)
    return most


def test_it_finds_the_rate_of_a_link_that_it_knows_nothing_of() -> None:
    for rate in (2 * MB, 12 * MB, 100 * MB):
        pacer = Pacer()
        drive(pacer, rate, 6.0)
        assert 0.8 * rate < pacer.rate() < 1.3 * rate


def share(pacer: Pacer, rate: float, seconds: float, step_s: float = 0.01) -> list[float]:
    """As `drive`, but what is on its way shares the link as connections do, some of which get more
    of it than others; the rates that the pacer took it for in the second half."""
    size, rng = MB // 4, Random(1)
    out: list[tuple[list[float], float, float]] = []  # bytes left, its weight, when begun
    seen: list[float] = []
    for step in range(int(seconds / step_s)):
        now_s = step * step_s
        while pacer.has_room(size):
            pacer.start(size, now_s)
            out.append(([size], 0.5 + rng.random(), now_s))
        weights = sum(weight for _, weight, _ in out)
        for left, weight, _ in out:
            left[0] -= rate * step_s * weight / weights
        for answer in [answer for answer in out if answer[0][0] <= 0.0]:
            out.remove(answer)
            pacer.done(size, now_s + step_s - answer[2], now_s + step_s)
        if now_s > seconds / 2:
            seen.append(pacer.rate())
    return seen


def test_answers_that_share_a_slow_link_do_not_make_it_look_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end together, and a moment that sees several end says nothing of the link."""
    assert max(share(Pacer(), MB, 20.0)) < 1.4 * MB
    monkeypatch.setattr(piece_selection, "BUCKET_ANSWERS", 0.0)
    assert max(share(Pacer(), MB, 20.0)) > 1.8 * MB


def test_what_is_on_its_way_is_little_more_than_the_link_holds() -> None:
    rate = 12 * MB
    most = drive(Pacer(), rate, 6.0)
    assert most < 2.5 * rate * 0.06
    assert most > rate * 0.05  # and never so little that the link would wait


def test_it_starts_with_the_rate_that_was_measured_before() -> None:
    known, unknown = Pacer(12 * MB), Pacer()
    assert known.rate() == 12 * MB
    assert unknown.rate() == 0.0

    def let_out(pacer: Pacer) -> int:
        count = 0
        while pacer.has_room(MB // 10):
            pacer.start(MB // 10, 0.0)
            count += 1
        return count

    assert let_out(unknown) == ANSWERS_MIN
    assert let_out(known) > 2 * ANSWERS_MIN


@pytest.mark.parametrize(("rate", "later_s"), [(MB / 2, 0.13), (20 * MB, 0.0)])
def test_a_slow_link_is_idle_when_its_sockets_have_sent_what_they_took(
    rate: float, later_s: float
) -> None:
    pacer = Pacer(rate)
    assert pacer.is_idle(0.0)  # nothing was sent yet
    pacer.start(4 * MB, 0.0)
    assert not pacer.is_idle(0.1)
    pacer.done(4 * MB, 0.1, 0.1, peers=64)
    assert pacer.is_idle(0.1) == (not later_s)
    if later_s:
        assert not pacer.is_idle(0.1 + 0.9 * later_s)
    assert pacer.is_idle(0.1 + 1.1 * later_s)


def test_a_pause_does_not_make_the_link_look_slow() -> None:
    pacer = Pacer()
    drive(pacer, 12 * MB, 3.0)
    before = pacer.rate()
    pacer.start(1000, 60.0)
    pacer.done(1000, 0.05, 60.05)
    pacer.start(1000, 61.0)
    pacer.done(1000, 0.05, 61.05)
    assert pacer.rate() == before


def test_an_answer_that_waits_for_its_reader_makes_room() -> None:
    pacer = Pacer()
    while pacer.has_room(MB):
        pacer.start(MB, 0.0)
    assert not pacer.has_room(MB)
    pacer.give_up(MB)
    assert pacer.has_room(MB)


def test_a_transfer_that_is_over_before_three_answers_in_a_row_tells_the_rate_too() -> None:
    pacer = Pacer()
    for _ in range(4):
        pacer.start(MB // 10, 0.0)
    for at in range(4):  # they share the link, and end together
        pacer.done(MB // 10, 0.97 + at / 100, 0.97 + at / 100)
    assert pacer.rate() == 0.4 * MB


def burst(rate: float, held_bytes: int, answers: int = 64, peers: int = 8) -> Pacer:
    """Answers of 64 KiB to several peers, whose sockets take some bytes of each peer at once; then
    nothing is on its way."""
    pacer = Pacer()
    for _ in range(answers):
        pacer.start(65_536, 0.0)
    for at in range(answers):
        left_s = max(0.0, 65_536 * (at + 1) - peers * held_bytes) / rate
        pacer.done(65_536, left_s, left_s, peers)
    return pacer


def test_a_fast_link_that_soon_has_nothing_out_tells_its_rate() -> None:
    assert 0.9 * 125 * MB < burst(125 * MB, 0).rate() < 125 * MB
    assert burst(125 * MB, 0, answers=4).rate() == 0.0  # so few say nothing


def test_what_sockets_take_at_once_does_not_make_a_link_look_fast() -> None:
    rate = 25 * MB
    assert burst(rate, 32_768).rate() == pytest.approx(rate)
    assert burst(rate, 32_768, answers=8).rate() == pytest.approx(rate)
