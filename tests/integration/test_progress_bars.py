"""Bars under a real terminal, and their absence in files and pipes."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from node.observe.event_log import FILE_NAME, EventLog
from tests.integration.nodes import ENVIRON, LOOPBACK, RUN_TEXT, MakeNode, swarm_node, until
from tests.integration.stalling import StallingWay, stalling_way
from tests.unit.monitor_records import held_out, round_done, started
from tests.weights_files import write_model

pytestmark = pytest.mark.integration

TIMEOUT_S = 240.0
ESCAPE = "\x1b"
CHILD = """
import threading
from node.observe.progress_bars import SHOWN_AFTER_S, Work, on_stderr
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
from node.observe import progress_bars as progress
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

    def seen(self) -> str:
        """What came so far."""
        return b"".join(self._parts).decode(errors="replace")

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
    words[-1] = CHILD.replace('"a long work")', '"a long work", always=True)', 1)
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRON, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "a long work …\n")


@pytest.mark.long
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


@pytest.mark.long
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


def test_a_fetch_and_its_publisher_have_bars(tmp_path: Path) -> None:
    """The chunks stop half-way, so that both are seen while they are at it."""
    write_model(tmp_path / "model", 1, size=500_000)
    terminals = {name: Terminal() for name in ("publisher", "fetcher")}
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-m", "node.cli", "weights", *words),
                    *("--data-dir", str(tmp_path / name), "--listen", LOOPBACK),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=terminals[name].slave,
                env=ENVIRON | {"TERM": "xterm"},
            )
        processes.append(process)
        return process

    def said(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text()

    try:
        publisher = start("publisher", "publish", str(tmp_path / "model"))
        until(lambda: "weights fetch " in said("publisher"), said=terminals["publisher"].seen)
        flags = said("publisher").split("weights fetch ")[1].splitlines()[0].split()
        port = flags[-1].split("/tcp/")[1].split("/")[0]
        with stalling_way(int(port), 400_000) as way:
            flags[-1] = flags[-1].replace(f"/tcp/{port}", f"/tcp/{way.port}")
            fetcher = start("fetcher", "fetch", *flags)
            for name, drawn in (("fetcher", "fetch "), ("publisher", "version 1 to peers")):
                until(lambda at=name, what=drawn: what in terminals[at].seen(), said=way_said(way))
            assert "version 1" in terminals["fetcher"].seen()
            way.let_all_through()
            assert fetcher.wait(TIMEOUT_S) == 0
        publisher.send_signal(signal.SIGINT)
        assert publisher.wait(TIMEOUT_S) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for terminal in terminals.values():
            terminal.text()
    assert "version 1 from nothing" in said("fetcher")
    assert "version 1 from nothing" not in terminals["fetcher"].seen()
    assert ESCAPE not in said("fetcher") + said("publisher")


def way_said(way: StallingWay) -> Callable[[], str]:
    return lambda: f"stalled: {way.stalled.is_set()}"
