"""The process that keeps a server no longer than the node, with commands that need no vLLM."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio

from node.engines.vllm import child
from node.engines.vllm import server as vllm_server
from node.engines.vllm.server import ServerSettings, VllmServer
from swarm.errors import ChildFailed
from tests.integration.process_groups import PAUSE_S, WAIT_S, gone, members, pause
from tests.support import run

ROOT = Path(__file__).parents[2]

# a server that leaves a process behind, and says so; it does not end when it is asked to
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("below", below.pid, flush=True)
time.sleep(600)
"""
TALK_BYTES, FILE_BYTES = 400_000, 100_000  # both below the limit of the log
PIPE_BYTES = 65_536
OBEDIENT = "print('ready', flush=True); import time; time.sleep(600)"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    (path / "socket").touch()
    return path


def command(log: Path, scratch: Path, code: str) -> list[str]:
    server = [sys.executable, "-c", code]
    return [sys.executable, "-m", "node.engines.vllm.child", str(log), str(scratch), *server]


@pytest.fixture
def started(log: Path, scratch: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Filled by the test; what is left of it is ended."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def start(started: list[subprocess.Popen[bytes]], args: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(args, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)
    started.append(process)
    return process


def wait_for_line(log: Path, word: str) -> list[str]:
    """The words of the first whole line that begins with `word`."""
    for _ in range(int(WAIT_S / PAUSE_S)):
        text = log.read_text() if log.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.startswith(word) and line.endswith("\n"):
                return line.split()
        pause()
    raise AssertionError(f"no line {word!r} in {log}")


@pytest.mark.integration
def test_the_group_ends_with_the_input(
    started: list[subprocess.Popen[bytes]], log: Path, scratch: Path
) -> None:
    process = start(started, command(log, scratch, OBEDIENT))
    wait_for_line(log, "ready")
    assert len(members(process.pid)) == 2
    assert process.stdin is not None
    process.stdin.close()
    assert gone(process.pid)
    assert not scratch.exists()


@pytest.mark.integration
def test_what_ignores_the_polite_end_is_killed_with_all_below_it(
    started: list[subprocess.Popen[bytes]], log: Path, scratch: Path
) -> None:
    process = start(started, command(log, scratch, STUBBORN))
    _, below = wait_for_line(log, "below")
    assert psutil.pid_exists(int(below))
    assert process.stdin is not None
    process.stdin.close()
    assert gone(process.pid)


@pytest.mark.integration
def test_the_group_ends_when_the_node_is_killed(
    started: list[subprocess.Popen[bytes]], log: Path, scratch: Path
) -> None:
    node = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({command(log, scratch, OBEDIENT)!r}, stdin=subprocess.PIPE, "
        "start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(f'group {child.pid}\\n')\n"
        "time.sleep(600)\n"
    )
    note = log.with_name("group")
    process = start(started, [sys.executable, "-c", node, str(note)])
    _, group = wait_for_line(note, "group")
    wait_for_line(log, "ready")
    process.kill()
    assert gone(int(group))


@pytest.mark.integration
def test_the_server_ends_with_close_when_the_child_alone_was_killed(
    log: Path, scratch: Path
) -> None:
    async def kill_the_child_and_close() -> int:
        process = await trio.lowlevel.open_process(
            command(log, scratch, OBEDIENT), cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
        )
        server = VllmServer(process, scratch, log)
        try:
            await trio.to_thread.run_sync(wait_for_line, log, "ready")
            process.kill()
            await process.wait()
            assert len(members(process.pid)) == 1
        finally:
            await server.close()
        await server.close()
        return process.pid

    assert gone(run(kill_the_child_and_close))
    assert not scratch.exists()


@pytest.mark.integration
def test_a_server_that_ends_leaves_its_last_words(
    started: list[subprocess.Popen[bytes]], log: Path, scratch: Path
) -> None:
    process = start(started, command(log, scratch, "raise SystemExit('no such model')"))
    process.wait(WAIT_S)
    assert log.read_text().splitlines() == ["no such model", "the server ended with status 1"]
    assert not scratch.exists()


@pytest.mark.integration
def test_the_log_is_bounded_and_keeps_the_end(
    started: list[subprocess.Popen[bytes]], log: Path, scratch: Path
) -> None:
    lines = 5 * child.LOG_BYTES_MAX // 1000
    code = f"for i in range({lines}): print(f'{{i:0999}}')"
    process = start(started, command(log, scratch, code))
    process.wait(60)
    files = [log, log.with_suffix(".log.old")]
    assert all(path.stat().st_size <= child.LOG_BYTES_MAX for path in files)
    assert f"{lines - 1:0999}\n" in log.read_text()
    assert sorted(path.name for path in log.parent.iterdir()) == ["server.log", "server.log.old"]


# one that writes more than its log takes, waits until there is room again, then says a last word
TALKATIVE = f"""
import pathlib, sys, threading
room = pathlib.Path(sys.argv[1])
for _ in range({TALK_BYTES} // 1000): print("x" * 999, flush=True)
room.with_name("wrote").touch()
while not room.exists(): threading.Event().wait({PAUSE_S})
print("enough", flush=True)
"""


@pytest.mark.integration
def test_a_log_that_cannot_grow_stops_no_server_and_says_what_it_lacks(
    started: list[subprocess.Popen[bytes]], log: Path, scratch: Path
) -> None:
    wrote, room = log.with_name("wrote"), log.with_name("room")
    limited = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, resource.RLIM_INFINITY))\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    args = [*command(log, scratch, TALKATIVE), str(room)]
    process = start(started, [sys.executable, "-c", limited, *args])
    for _ in range(int(WAIT_S / PAUSE_S)):
        if wrote.exists():
            break
        pause()
    assert wrote.exists(), "the server waits for its log"
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
    room.touch()
    process.wait(WAIT_S)
    assert not scratch.exists()
    lines = log.read_text().splitlines()
    lost = int(next(line for line in lines if "left out" in line).split()[0])
    assert lost <= TALK_BYTES - FILE_BYTES
    assert lost >= TALK_BYTES - FILE_BYTES - PIPE_BYTES  # what the pipe held is written later
    assert lines[-2:] == ["enough", "the server ended with status 0"]


@pytest.mark.integration
def test_a_process_that_leads_no_group_is_refused(log: Path, scratch: Path) -> None:
    done = subprocess.run(
        command(log, scratch, OBEDIENT), cwd=ROOT, capture_output=True, check=False, timeout=WAIT_S
    )
    assert done.returncode == 1
    assert b"leader of a process group" in done.stderr


@pytest.mark.integration
def test_a_server_that_is_long_in_starting_is_told_of_and_in_the_end_given_up(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "STARTING_TOLD_S", 0.5)
    monkeypatch.setattr(vllm_server, "_command", lambda *_: [sys.executable, "-c", OBEDIENT])
    settings = ServerSettings(threads=1, context_tokens=64, cache_bytes=1, start_timeout_s=1.8)
    told: list[str] = []

    async def tell(text: str) -> None:
        told.append(text)

    async def start_one() -> None:
        with pytest.raises(ChildFailed, match=r"did not answer within 1.8 s"):
            await VllmServer.start(tmp_path, settings, log, tell)

    run(start_one)
    assert told
    assert set(told) <= {f"vLLM is not up after {n} s; what it says is in {log}" for n in (0, 1, 2)}
