import json
import math
import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from node.cli import main
from node.observe import event_log
from node.observe.event_log import FILE_NAME, EventLog, Record, followed, history, read_events
from node.observe.live import UNTOLD
from node.observe.log_lines import NOTE, SAID, show_log
from node.observe.records import StartEnded, Trouble, VersionComing, WentBack
from swarm.command import EXIT_OK, EXIT_USAGE
from tests.unit.monitor_records import held_out, round_done, started


def clock() -> float:
    return 1_000.0


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    records = [
        started(),
        round_done(1, foreign_logprob=None),
        held_out(1, 0.25),
        held_out(2, 0.25, validation=0.125, validation_tasks=64),
        WentBack(2, 3, 0.125, 0.5, 1, 0.5),
        Trouble('quotes " newline \n and ü'),
        StartEnded("a disk"),
        StartEnded(None),
    ]
    with EventLog(tmp_path / FILE_NAME, clock) as log:
        for record in records:
            log.write(record)
    assert [record for _, record in read_events(tmp_path / FILE_NAME)] == records
    assert {time_s for time_s, _ in read_events(tmp_path / FILE_NAME)} == {1_000.0}


def test_no_record_has_a_field_that_the_line_itself_has() -> None:
    """It would take the place of the line's time or name."""
    for record in get_args(Record):
        assert not {"event", "time_s"} & {each.name for each in fields(record)}, record


def test_lines_are_strict_json_even_for_a_diverged_loss(tmp_path: Path) -> None:
    with EventLog(tmp_path / FILE_NAME, clock) as log:
        log.write(round_done(1, loss=math.nan, grad_norm=math.inf))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = (tmp_path / FILE_NAME).read_text()
    json.loads(line, parse_constant=refuse)
    ((_, record),) = read_events(tmp_path / FILE_NAME)
    assert math.isnan(record.loss)
    assert record.grad_norm == math.inf


def test_a_log_that_is_torn_at_any_byte_loses_only_its_last_line(tmp_path: Path) -> None:
    whole = tmp_path / FILE_NAME
    with EventLog(whole, clock) as log:
        log.write(started())
        log.write(held_out(0, 0.5))
    data = whole.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(first, len(data)):
        torn = tmp_path / "torn" / FILE_NAME
        torn.parent.mkdir(exist_ok=True)
        torn.write_bytes(data[:size])
        assert [record for _, record in read_events(torn)] == [started()]
        with EventLog(torn, clock) as log:
            log.write(held_out(3, 0.75))
        assert [record for _, record in read_events(torn)] == [started(), held_out(3, 0.75)]
        assert torn.read_bytes()[:first] == data[:first]


def test_a_file_without_any_whole_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"x" * 200_000)
    EventLog(path, clock).close()
    assert path.read_bytes() == b""


def test_lines_of_another_version_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with EventLog(path, clock) as log:
        log.write(held_out(0, 0.5))
    with path.open("ab") as file:
        for line in (
            b'{"event": "invented", "time_s": 1}',
            b'{"event": "held_out", "time_s": 1}',
            b'{"event": ["held_out"], "time_s": 1}',
            b'{"event": "trouble", "time_s": [], "what": "x"}',
            b"[1]",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"event": "trouble", "time_s": 2, "what": "kept", "new_field": 1}',
        ):
            file.write(line + b"\n")
    assert [r for _, r in read_events(path)] == [held_out(0, 0.5), Trouble("kept")]


def test_the_log_is_bounded_and_drops_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with EventLog(path, clock, bytes_max=1_000) as log:
        for number in range(100):
            log.write(Trouble(f"number {number}"))
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * 1_000
    kept = [int(record.what.split()[1]) for _, record in read_events(path)]
    assert kept == list(range(kept[0], 100))
    assert 0 < kept[0] < 90
    assert {file.name for file in tmp_path.iterdir()} == {FILE_NAME, f"{FILE_NAME}.1"}


def test_a_failed_write_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / FILE_NAME
    write = os.write

    def disk_full(file: int, data: bytes) -> int:
        if len(data) > 10:
            return write(file, data[:10])
        raise OSError(28, "No space left on device")

    with EventLog(path, clock) as log:
        log.write(Trouble("before"))
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", disk_full)
            with pytest.raises(OSError, match="No space"):
                log.write(Trouble("x" * 95))
        log.write(Trouble("after"))
    assert [record for _, record in read_events(path)] == [Trouble("before"), Trouble("after")]


def test_a_restart_undoes_the_rounds_after_its_checkpoint() -> None:
    first = round_done(2, own_reward=0.1)
    again = round_done(2, own_reward=0.9)
    life = history(
        enumerate(
            [
                started(),
                held_out(0, 0.4),
                round_done(1),
                first,
                round_done(3),
                held_out(3, 0.6),
                started(round_=1),
                again,
            ]
        )
    )
    assert [record for _, record in life.rounds] == [round_done(1), again]
    assert life.held_out_last == 0.4
    assert life.starts == 2
    assert life.started == started(round_=1)


def test_of_a_repeated_round_the_latest_counts() -> None:
    life = history([(1.0, round_done(5, loss=1.0)), (2.0, round_done(5, loss=2.0))])
    assert life.rounds == ((2.0, round_done(5, loss=2.0)),)
    assert life.started is None


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_events(tmp_path / FILE_NAME))


def test_each_event_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    told = page.partition("## Logs")[2].partition("## Grafana")[0]
    names = {*event_log._NAMES.values(), SAID, NOTE}
    assert {name for name in names if f"`{name}`" not in told} == set()


def texts(followed: Iterator[tuple[float, Record] | None]) -> list[str]:
    """The troubles until there is nothing new for now."""
    found = iter(lambda: next(followed), None)
    return [record.what for _, record in found if isinstance(record, Trouble)]


def test_a_log_is_followed_across_torn_lines_restarts_and_rotation(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    seen = followed(path, 2)
    assert texts(seen) == []  # there is no log yet
    with EventLog(path, clock) as log:
        for what in "abc":
            log.write(Trouble(what))
        assert texts(seen) == ["b", "c"]
        log.write(Trouble("d"))
    with path.open("ab") as file:
        file.write(b'{"event": "trouble", "time_s": 1, "wh')
    assert texts(seen) == ["d"]
    size = path.stat().st_size
    with EventLog(path, clock, bytes_max=4 * size) as log:  # which cuts the torn line
        log.write(Trouble("e"))
        log.write(Trouble("f" * 3 * size))
        log.write(Trouble("g"))
        assert [text[0] for text in texts(seen)] == ["e", "f", "g"]
    path.unlink()
    assert texts(seen) == []
    with EventLog(path, clock) as log:
        log.write(Trouble("h"))
    assert texts(seen) == ["h"]
    assert [text[0] for text in texts(followed(path, 9))] == [*"abcdeh"]


def test_events_that_are_not_told_are_not_counted(tmp_path: Path) -> None:
    with EventLog(tmp_path / FILE_NAME, clock) as log:
        log.write(Trouble("a"))
        log.write(Trouble("b"))
        for _ in range(5):
            log.write(VersionComing("peer", 3, "fetching"))
    assert texts(followed(tmp_path / FILE_NAME, 2)) == []
    assert texts(followed(tmp_path / FILE_NAME, 2, UNTOLD)) == ["a", "b"]
    lines: list[str] = []
    show_log(tmp_path, lines.append, 1, follows=False)
    assert [line.rpartition(" ")[2] for line in lines] == ["b"]


def test_the_last_lines_of_a_log_are_told_as_the_node_printed_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter((0.0, 1.0, 2.0, 3.0))
    with EventLog(tmp_path / FILE_NAME, lambda: next(times)) as log:
        for record in (held_out(0, 0.25), round_done(1), held_out(1, 0.5), Trouble("a disk")):
            log.write(record)
    assert main(["logs", "--data-dir", str(tmp_path), "-n", "2"]) == EXIT_OK
    first, second = capsys.readouterr().out.splitlines()
    assert first[4:].startswith("-01-01 ") or first[4:].startswith("-12-31 ")
    assert "INFO    held-out after round 1: 50.0 % passed (+25.0 points since the start" in first
    assert second.endswith("WARNING a disk")
    for wrong in (["--data-dir", str(tmp_path / "none")], ["-n", "-1"]):
        assert main(["logs", *wrong]) == EXIT_USAGE
        assert capsys.readouterr().err.count("\n") == 1
