"""Bars under a real terminal, and their absence in files and pipes."""

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.monitor.events import FILE_NAME, EventLog
from tests.integration.nodes import ENVIRON, RUN_TEXT, MakeNode, swarm_node
from tests.unit.monitor_records import held_out, round_done, started

pytestmark = pytest.mark.integration

TIMEOUT_S = 240.0
ESCAPE = "\x1b"
CHILD = """
import threading
from node.monitor.progress import SHOWN_AFTER_S, Work, on_stderr
with on_stderr().showing("a long work") as show:
    for number in range(3):
        show(Work("a long work", number, 3.0))
        print(f"line {number}", flush=True)
        threading.Event().wait(SHOWN_AFTER_S)
print("the end", flush=True)
"""


# The command line, with bars from the first moment on: how fast a machine is decides nothing.
AT_ONCE = """
import sys
from node.monitor import progress
progress.SHOWN_AFTER_S = 0.0
from node.cli import main
sys.exit(main(sys.argv[1:]))
"""
COMMAND = (sys.executable, "-c", AT_ONCE)


class Terminal:
    """A terminal of 100 columns, and what came to it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 65_536)
            except OSError:  # how a terminal says that nobody has it open any more
                part = b""
            if not part:
                return
            self._parts.append(part)

    def text(self) -> str:
        """All of it. Once every program on it has ended."""
        os.close(self.slave)
        self._reader.join(TIMEOUT_S)
        os.close(self._master)
        return b"".join(self._parts).decode()


def run_on(words: Sequence[str], *, stdout_too: bool, **environ: str) -> tuple[int, str, str]:
    """(status, what came to the terminal, what came to the pipe). Standard error is a terminal, and
    with `stdout_too` standard output is the same one."""
    terminal = Terminal()
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=terminal.slave if stdout_too else subprocess.PIPE,
        stderr=terminal.slave,
        env=ENVIRON | {"COLUMNS": "100", "TERM": "xterm"} | environ,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, terminal.text(), (done.stdout or b"").decode()


def test_bars_are_drawn_on_a_terminal_and_lines_go_where_they_should() -> None:
    words = [sys.executable, "-c", CHILD]
    status, seen, piped = run_on(words, stdout_too=False)
    assert status == 0
    assert "a long work" in seen
    assert "line" not in seen
    assert piped == "line 0\nline 1\nline 2\nthe end\n"
    status, seen, _ = run_on(words, stdout_too=True)
    assert status == 0
    assert "a long work" in seen
    for number in range(3):  # whole, and above the bar
        assert f"line {number}\r\n" in seen
    assert seen.index(ESCAPE) < seen.rindex("the end") == len(seen) - len("the end\r\n")


def test_without_a_terminal_there_are_lines_and_nothing_else() -> None:
    words = [sys.executable, "-c", CHILD]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRON, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "line 0\nline 1\nline 2\nthe end\n"


def test_the_warm_up_and_a_report_have_bars(tmp_path: Path) -> None:
    run_file, cache = tmp_path / "sums.toml", str(tmp_path / "cache")
    run_file.write_text(RUN_TEXT)
    words = [sys.executable, "-m", "node.cli", "prepare", "--run", str(run_file)]
    status, seen, piped = run_on(words, stdout_too=False, SWARM_NODE_CACHE_DIR=cache)
    assert status == 0
    assert "warming the tiny policy" in seen
    assert "%" in seen
    assert "sampled right" in seen
    assert ESCAPE not in piped
    assert piped.splitlines()[-1].startswith(cache)

    with EventLog(tmp_path / "data" / FILE_NAME, lambda: 1.0) as log:
        for record in (started(), held_out(0, 0.1), round_done(1), held_out(1, 0.2)):
            log.write(record)
    report = ["report", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    status, seen, piped = run_on([*COMMAND, *report], stdout_too=False)
    assert status == 0
    assert "drawing the report" in seen
    assert "report.html" in piped
    done = swarm_node(*report)
    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout


def test_a_node_shows_in_a_terminal_what_it_waits_for(make_node: MakeNode) -> None:
    node = make_node("ann")
    words = [*COMMAND, "join", "--run", str(node.run_file)]
    words += ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", "--rounds", "1", "--no-lan"]
    words += ["--local", "2", "--external", "2", "--group-size", "4", "--data-dir"]
    environ = {"SWARM_NODE_CACHE_DIR": str(node.cache_dir)}
    status, seen, _ = run_on([*words, str(node.data_dir)], stdout_too=True, **environ)
    assert status == 0
    assert "loading the policy" in seen  # as part of the panel
    status, seen, piped = run_on([*words, f"{node.data_dir}-2"], stdout_too=False, **environ)
    assert status == 0
    assert "loading the policy" in seen  # of its own
    assert "round 1:" in piped
    assert "round 1:" not in seen
    assert ESCAPE not in piped
    assert "loading" not in piped
