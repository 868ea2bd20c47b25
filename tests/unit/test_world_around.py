"""Commands in a world that lacks something: an exit status and one line, whatever it is."""

import io
import os
import pwd
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing
from huggingface_hub import constants

import coordinator.cli
import node.cli
import node.commands.doctor
import node.commands.environments
import node.commands.policy
import node.run.app
from node.config import load_config
from node.hosting.hub import OFFLINE_VARIABLE, use_cache_offline
from node.observe.samples import keep, sample_log
from node.system.child_environment import CACHE_VARIABLE
from swarm.command import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    output_failure,
    output_may_fail,
    status_of,
)
from swarm.errors import ConfigError
from swarm.leaving import leave_signals, set_when_asked
from tests.unit.tasks_support import ALICE
from tests.unit.test_samples import group

FOREIGN = "« … 你好 ▁▂ é –"
MODEL = ("--model", "./nothing")
NODE_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "join": ("join", *MODEL),
    "join a kept model": ("join", "--model", "smollm2"),
    "learn": ("learn",),
    "work": ("join", "--role", "worker", *MODEL),
    "model ls": ("model", "ls"),
    "clean": ("clean", "--yes"),
    "config": ("config",),
    "keygen": ("keygen", "--out", "key.pem"),
    "invite": ("invite",),
    "status": ("status",),
    "samples": ("samples",),
    "top": ("top",),
    "report": ("report", "swarm-data", "--out", "report"),
    "eval": ("eval", *MODEL),
    "export": ("export", "out", *MODEL),
    "chat": ("chat", "nothing"),
    "prepare": ("prepare", *MODEL),
    "env list": ("env", "list"),
    "env new": ("env", "new", "mine"),
    "data check": ("data", "check", "questions.jsonl"),
    "pause": ("pause",),
    "resume": ("resume",),
    "weights ls": ("weights", "ls"),
    "weights verify": ("weights", "verify", "nothing"),
    "simulate": ("simulate", "--scenario", "nothing"),
    "service logs": ("service", "logs"),
    "completion": ("completion", "bash"),
    "help": ("--help",),
}
COORDINATOR_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("plan", "--example"),
    "workers": ("workers",),
    "serve": ("serve", "--example"),
    "drain": ("drain", "somebody"),
}
Main = Callable[[list[str]], int]
COMMANDS: dict[str, tuple[Main, tuple[str, ...]]] = {
    **{name: (node.cli.main, each) for name, each in NODE_COMMANDS.items()},
    **{name: (coordinator.cli.main, each) for name, each in COORDINATOR_COMMANDS.items()},
}


def _no_home() -> None:
    def unknown(_: int) -> None:
        raise KeyError

    os.environ.pop("HOME", None)
    pwd.getpwuid = unknown  # type: ignore[assignment]  # as for a user of a container


def _home_is_no_directory() -> None:
    os.environ["HOME"] = "/dev/null/none"


def _no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _full() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def _reader_left() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    os.dup2(theirs, 1)


CONDITIONS: Mapping[str, Callable[[], None]] = {
    "no home": _no_home,
    "home is no directory": _home_is_no_directory,
    "no room": _no_room,
    "full": _full,
    "closed": lambda: os.close(1),
    "reader left": _reader_left,
    "ascii": lambda: None,
}


@dataclass(slots=True)
class Ended:
    status: int = -1
    outputs: list[bytes] = field(default_factory=lambda: [b"", b""])

    @property
    def out(self) -> str:
        return self.outputs[0].decode()

    @property
    def err(self) -> str:
        return self.outputs[1].decode()


def _be(main: Main, words: tuple[str, ...], condition: str) -> int:
    """The command in this fork, with streams as an interpreter opens them."""
    encoding = "ascii" if condition == "ascii" else "utf-8"
    CONDITIONS[condition]()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            raw = io.FileIO(number, "wb" if number else "rb", closefd=False)
            stream = io.TextIOWrapper(
                io.BufferedWriter(raw) if number else io.BufferedReader(raw), encoding
            )
        except OSError:
            stream = None  # type: ignore[assignment]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    try:
        return main(list(words))
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:  # noqa: BLE001
        os.write(2, traceback.format_exc().encode())
        return EXIT_FAILED


def run(main: Main, words: tuple[str, ...], condition: str, place: Path) -> Ended:
    """Run a command in a fork, which has imported what is slow to import."""
    pipes = [os.pipe() for _ in range(2)]
    fork = os.fork()
    if not fork:
        try:
            os.chdir(place)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, (_, theirs) in enumerate(pipes, 1):
                os.dup2(theirs, number)
            os.closerange(3, 64)
            os.environ |= {"HOME": str(place), "XDG_CONFIG_HOME": str(place)}
            for name in ("XDG_CACHE_HOME", CACHE_VARIABLE):
                os.environ.pop(name, None)
            os._exit(_be(main, words, condition))
        finally:
            os._exit(99)
    ended = Ended()

    def read(number: int, ours: int) -> None:
        with open(ours, "rb") as pipe:
            ended.outputs[number] = pipe.read()

    readers = [
        threading.Thread(target=read, args=(number, ours)) for number, (ours, _) in enumerate(pipes)
    ]
    for _, theirs in pipes:
        os.close(theirs)
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    ended.status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    return ended


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a node's data, and questions."""
    (tmp_path / "questions.jsonl").write_text('{"question": "1 + 1 é?", "answer": "2"}\n' * 40)
    (tmp_path / "swarm-data").mkdir(mode=0o700)
    with sample_log(tmp_path / "swarm-data", lambda: 0.0) as log:
        keep(log, [group(1, 1.0, text=FOREIGN)])
    return tmp_path


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_one_line(command, condition, place):
    ended = run(*COMMANDS[command], condition, place)
    assert "Traceback" not in ended.err
    assert ended.status in (EXIT_OK, EXIT_FAILED, EXIT_USAGE), ended.err
    assert ended.err.count("\n") == (ended.status != EXIT_OK), ended.err
    if condition == "full" and ended.status == EXIT_FAILED:
        assert ended.err.endswith(": standard output: No space left on device\n")


def test_an_ascii_terminal_shows_samples(place):
    ended = run(node.cli.main, ("samples",), "ascii", place)
    assert (ended.status, ended.err) == (EXIT_OK, "")
    assert '"\\u4f60' not in ended.out
    assert '"" ... \\u4f60\\u597d 12 \\xe9 -"' in ended.out


@pytest.mark.parametrize("condition", ["no home", "home is no directory"])
def test_a_cache_that_cannot_be_is_named(condition, place):
    ended = run(node.cli.main, ("model", "get", "smollm2"), condition, place)
    assert ended.status != EXIT_OK
    assert ("HOME" if condition == "no home" else "/dev/null/none/.cache") in ended.err


def test_a_closed_terminal_asks_to_leave_and_never_forces(monkeypatch):
    told: list[str] = []

    async def main() -> None:
        leaving = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(set_when_asked, leaving, lambda: told.append("leaving"))
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
                await leaving.wait()
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert told == ["leaving"]


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def main() -> None:
            with leave_signals():
                os.kill(os.getpid(), signal.SIGHUP)
                await trio.testing.wait_all_tasks_blocked()

        trio.run(main)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_running_node_notices_and_goes_on_until_it_has_saved():
    def main(_: list[str]) -> int:
        def work() -> int:
            with output_may_fail():
                sys.stdout.write("a line\n")
                sys.stdout.flush()
                assert output_failure() is not None
                os.write(2, b"saved\n")
            return EXIT_OK

        return status_of("test", work)

    ended = run(main, (), "full", Path("/"))
    assert ended.err == "saved\ntest: standard output: No space left on device\n"
    assert ended.status == EXIT_FAILED
    assert run(main, (), "reader left", Path("/")).err == "saved\n"


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("/ip4/192.0.2.1/udp/4001/quic-v1", "is QUIC, and nodes speak TCP alone"),
        ("/ip4/192.0.2.1/udp/4001", "is UDP"),
        ("/dns4/example.org/tcp/443/wss", "is a websocket"),
        ("/dnsaddr/example.org", "is a list in DNS, which is not looked up"),
    ],
)
def test_an_address_of_another_transport_is_named(address, told):
    with pytest.raises(ConfigError, match=f"{told}.*must look like /ip4/"):
        load_config({"peers": [f"{address}/p2p/{ALICE}"]}, {})


@pytest.mark.parametrize("there", [True, False])
def test_a_hub_that_does_not_answer_is_not_waited_for(there, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv(OFFLINE_VARIABLE, "0")
    if not there:
        with pytest.raises(ConfigError, match="does not answer; name a directory"):
            use_cache_offline("some/model")
        return
    (tmp_path / "models--some--model").mkdir()
    assert "comes from" in (use_cache_offline("some/model") or "")
    assert os.environ[OFFLINE_VARIABLE] == "1"
