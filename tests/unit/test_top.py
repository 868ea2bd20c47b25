"""What `swarm-node top` draws, line by line in 80 columns, and how it leaves."""

import fcntl
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import trio
from rich.cells import cell_len
from rich.console import Console

from node.observe.records import BanStatus, PeerStatus, StatusSnapshot
from node.observe.status import serve_status
from node.observe.top import (
    ALARMS_SHOWN,
    WIDTH_COLUMNS,
    LocalNode,
    Screen,
    node_screen,
    render,
    spark,
    swarm_screen,
    versions,
)
from swarm.errors import ConfigError
from swarm.telemetry.dashboard.page_state import DashboardState, ReportSource
from swarm.telemetry.reports import Alarm, AlarmReport
from tests.dashboard_samples import NOW_S, seen

WAIT_S = 40.0


def snapshot(**changes: Any) -> StatusSnapshot:
    fields: dict[str, Any] = {
        "peer_id": "12D3KooWabcdefgh", "run_id": "sums", "agent": "swarm-node/0.1.0",
        "model": "tiny", "parameters": 1, "engine": "torch", "uptime_s": 61.0,
        "phase": "training", "round": 7, "policy_version": 7, "local_groups": 4,
        "external_groups": 3, "external_groups_wanted": 4, "own_reward": 0.625,
        "held_out_passed": 0.5, "held_out_first": 0.25, "tokens_per_s": 812.0,
        "pool_groups": 40, "pool_foreign": 30, "pool_bytes": 123_456, "accepted": 31,
        "rejected": {"duplicate": 2}, "bytes_in": 10_000, "bytes_out": 5_000,
        "bytes_by_protocol": {}, "memory_bytes": 1, "trainer_memory_bytes": 1, "addresses": (),
    }  # fmt: skip
    return StatusSnapshot(**(fields | changes))


def peer(name: str, trained: int = 1) -> PeerStatus:
    return PeerStatus(f"12D3KooW{name:>08}", (), "swarm-node/0.1.0", 5, trained, {"stale": 1})


def drawn(screen: Screen, height: int | None = None) -> list[str]:
    out = StringIO()
    Console(file=out, width=WIDTH_COLUMNS, color_system=None).print(render(screen, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def swarm_of(*nodes: Any, source: ReportSource | None = None) -> Screen:
    return swarm_screen(
        DashboardState().look(nodes, {}, source or ReportSource("mqtt://b:1883"), NOW_S)
    )


# --- frames ------------------------------------------------------------------------------------


def test_a_node_says_how_it_is() -> None:
    lines = drawn(
        node_screen(snapshot(peers=(peer("a"), peer("b", 9))), [50.0, 100.0], [7.0], [0.6])
    )
    text = "\n".join(lines)
    assert lines[0] == "swarm-node abcdefgh  sums, up 1 min 01 s"
    assert "training, round 7, policy version 7" in text
    assert "0.625  ▅" in text  # its height is a share of one
    assert "▅█  100 B/s in, 7 B/s out" in text
    assert "4 own groups, 3 of 4 wanted from others" in text
    assert "31 groups accepted, 2 rejected" in text
    assert "2, 0 banned" in text
    assert "swarm-node/0.1.0 × 3" in text
    rows = [line.split() for line in lines if line.endswith("0.1.0") and "×" not in line]
    assert [row[2] for row in rows] == ["9", "1"]  # who feeds most comes first


def test_a_swarm_says_how_it_is() -> None:
    fine = {"round": 5.0, "own_reward": 0.5, "pool_groups": 10.0, "pool_bytes": 1e6}
    away = seen("12D3KooWgonegone", gone=True, heard_s=42.0, metrics=fine)
    text = "\n".join(drawn(swarm_of(seen("12D3KooWaaaaaaaa", metrics=fine), away)))
    assert text.startswith("swarm sums  at mqtt://b:1883")
    assert "1 report, 1 gone; 1 node" in text
    assert "10 groups, 1.00 MB" in text
    assert "gone, 42 s ago" in text


def test_alarms_come_first_and_with_advice() -> None:
    alarm = AlarmReport(
        kind=Alarm.DISK_LOW, level="critical", text="1 GB left", advice="Free some."
    )
    lines = drawn(swarm_of(seen("a", alarms=(alarm,)), seen("b", alarms=(alarm,))))
    assert lines[1:3] == ["! 1 GB left (2 nodes)", "  Free some."]
    many = snapshot(notes=tuple(f"note {n}" for n in range(ALARMS_SHOWN + 3)))
    lines = drawn(node_screen(many, (), (), ()))
    assert lines[1] == "! note 0"
    assert lines[1 + ALARMS_SHOWN] == "  and 3 more alarms"


def test_long_advice_is_read_whole() -> None:
    advice = " ".join(["Start more rollout workers, or ask how many are needed for it."] * 4)
    alarm = AlarmReport(kind=Alarm.LEARNER_STARVING, level="warning", text="so", advice=advice)
    lines = drawn(swarm_of(seen("a", alarms=(alarm,))))
    assert " ".join(line.strip() for line in lines[2 : lines.index("")]) == advice
    lines = drawn(node_screen(snapshot(notes=(advice,)), (), (), ()))
    assert " ".join(line.strip() for line in lines[1 : lines.index("")]) == f"! {advice}"


def test_a_broker_that_is_away_and_an_empty_swarm_are_said() -> None:
    lines = drawn(swarm_of(source=ReportSource("mqtt://b:1883", connected=False, away_s=75.0)))
    assert lines[1].startswith("! the broker does not answer for 1 min 15 s")
    assert lines[-1] == "nobody yet"


@pytest.mark.parametrize("height", [None, 24, 12, 3])
def test_whatever_strangers_say_stays_in_its_columns_and_lines(height: int | None) -> None:
    text = "\x1b[2J\u202e<b>" + "x" * 300 + "\n"
    alarm = AlarmReport(kind=Alarm.CLOCK_SKEW, level="warning", text=text, advice=text)
    swarm = swarm_of(
        *(seen(f"12D3KooW{n:08}", phase=text[:40], agent=text[:80], alarms=(alarm,),
               metrics={"round": 1e300, "own_reward": -1e300}) for n in range(60)),
        source=ReportSource("mqtt://" + "h" * 200),
    )  # fmt: skip
    alone = node_screen(
        snapshot(
            run_id=text, agent=text, phase=text, notes=(text,) * 9,
            peers=tuple(PeerStatus(f"p{n}" * 20, (), text, 10**12, 10**12, {text: 10**12})
                        for n in range(60)),
            bans=(BanStatus(text, False, text, 1.0, 1),),
        ),
        [1e300] * 99, [1e300] * 99, [7.0] * 99,
    )  # fmt: skip
    for screen in (swarm, alone):
        lines = drawn(screen, height)
        assert max(map(cell_len, lines)) <= WIDTH_COLUMNS
        assert "\x1b" not in "".join(lines)
        assert "\u202e" not in "".join(lines)
        if height is not None and height > 20:
            assert len(lines) <= height


def test_more_rows_than_there_is_room_for_are_counted() -> None:
    lines = drawn(swarm_of(*(seen(f"n{n}") for n in range(50))), height=24)
    assert len(lines) <= 24
    shown = sum(" node " in f"{line} " and "ago" in line for line in lines)
    assert lines[-1] == f"and {50 - shown} more"


def test_bars_have_the_highest_full() -> None:
    assert spark([]) == "–"
    assert spark([0.0, 0.0]) == "–"
    assert spark([1.0, 2.0, 4.0])[-1] == "█"


def test_versions_are_counted_and_bounded() -> None:
    assert versions(["a", "b", "a", ""]) == "a × 2, b × 1, unknown × 1"
    assert versions(["a", "b", "c", "d", "e"]).endswith("and 2 others")


# --- the local node ----------------------------------------------------------------------------


def test_speeds_are_between_two_looks_and_an_end_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        state = {"bytes_in": 0, "uptime_s": 1.0}
        now_s = iter((10.0, 12.0, 14.0))
        node = LocalNode(tmp_path, lambda: next(now_s))
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_status, tmp_path, lambda: snapshot(**state), Counter())
            await node.look()
            state.update(bytes_in=500, uptime_s=3.0)
            assert "250 B/s in" in "\n".join(drawn(await node.look()))
            state.update(bytes_in=0, uptime_s=0.1)  # another process
            assert "250 B/s in" in "\n".join(drawn(await node.look()))
            nursery.cancel_scope.cancel()
        ended = drawn(await node.look())
        assert ended[1].startswith("! no node is running")
        assert "round 7" in "\n".join(ended)
        with pytest.raises(ConfigError, match="no node is running"):
            await LocalNode(tmp_path).look()

    trio.run(main)


# --- the process -------------------------------------------------------------------------------


@contextmanager
def running_status(data_dir: Path) -> Iterator[None]:
    """A status socket that another process answers."""
    code = (
        "import sys, trio\nfrom collections import Counter\nfrom pathlib import Path\n"
        "from node.observe.status import serve_status\n"
        "from tests.unit.test_top import snapshot\n"
        "async def main():\n"
        "    async with trio.open_nursery() as nursery:\n"
        "        await nursery.start(serve_status, Path(sys.argv[1]), snapshot, Counter())\n"
        "        print('up', flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(data_dir)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        yield
    finally:
        child.kill()
        child.communicate()


def top(*arguments: str, **options: Any) -> list[str]:
    return [sys.executable, "-m", "node.cli", "top", *arguments]


@pytest.mark.integration
@pytest.mark.slow
def test_without_a_terminal_it_prints_once_and_without_a_node_it_says_so(tmp_path: Path) -> None:
    command = top("--data-dir", str(tmp_path))
    nobody = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert nobody.returncode == 2
    assert "no node is running" in nobody.stderr
    assert len(nobody.stderr.splitlines()) == 1
    with running_status(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("swarm-node abcdefgh")
    assert "\x1b" not in done.stdout


@pytest.mark.integration
def test_without_a_terminal_a_broker_that_does_not_answer_is_one_line() -> None:
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        command = top("--broker", f"mqtt://127.0.0.1:{bound.getsockname()[1]}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "mqtt://127.0.0.1" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.integration
@pytest.mark.parametrize("leave", [b"q", b"\x03", signal.SIGTERM])
def test_in_a_terminal_it_stays_until_a_key_or_a_signal_and_gives_the_screen_back(
    tmp_path: Path, leave: bytes | signal.Signals
) -> None:
    with running_status(tmp_path):
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            top("--data-dir", str(tmp_path)), stdin=theirs, stdout=theirs, stderr=theirs,
            env=os.environ | {"TERM": "xterm"}, start_new_session=True,
            preexec_fn=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        seen_bytes = bytearray()
        try:
            read_until(ours, seen_bytes, b"round 7")
            assert child.poll() is None
            if isinstance(leave, bytes):
                os.write(ours, leave)
            else:
                child.send_signal(leave)
            read_until(ours, seen_bytes, b"\x1b[?1049l")  # the screen as it was
            assert child.wait(WAIT_S) == 0
        finally:
            child.kill()
            child.wait()
            os.close(ours)


def read_until(terminal: int, into: bytearray, wanted: bytes) -> None:
    while wanted not in into:
        ready, _, _ = select.select([terminal], [], [], WAIT_S)
        assert ready, bytes(into)
        into += os.read(terminal, 65_536)
