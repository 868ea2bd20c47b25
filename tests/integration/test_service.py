"""A node as a service: by a systemd of the user's that the test starts with a /run of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.observe.event_log import read_events
from node.observe.records import RoundDone
from tests.integration.nodes import ENVIRON, LOOPBACK, pause, until

SYSTEMD = """
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR"
chmod 700 "$XDG_RUNTIME_DIR"
exec systemd --user --log-target=console
"""
Done = subprocess.CompletedProcess[str]
STARTS_TRIES = 200
ODD = 'a b %n $HOME "c" \\d'  # as names of folders may be

pytestmark = [pytest.mark.integration, pytest.mark.systemd, pytest.mark.slow]


class Session:
    """What a user has who is logged in."""

    def __init__(self, process: "subprocess.Popen[bytes]", home: Path) -> None:
        self.process = process
        self.home = home
        self.environ = {**ENVIRON, "HOME": str(home), "XDG_RUNTIME_DIR": "/run/of-the-test"}
        self.environ.pop("XDG_CONFIG_HOME", None)

    def run(self, *words: object, directory: Path | None = None) -> Done:
        inside = ["nsenter", "--mount", f"--target={self.process.pid}"]
        if directory is not None:
            inside.append(f"--wd={directory}")
        return subprocess.run(
            [*inside, *map(str, words)],
            capture_output=True, text=True, check=False, env=self.environ, timeout=200,
        )  # fmt: skip

    def swarm_node(self, *words: object, directory: Path | None = None) -> Done:
        return self.run(sys.executable, "-P", "-m", "node.cli", *words, directory=directory)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    home = tmp_path / "home"
    home.mkdir()
    environ = {**ENVIRON, "HOME": str(home), "XDG_RUNTIME_DIR": "/run/of-the-test"}
    with (tmp_path / "systemd.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "bash", "-c", SYSTEMD], stdout=log, stderr=log, env=environ
        )
    session = Session(process, home)
    try:
        asked = ("systemctl", "--user", "show-environment")
        for _ in range(STARTS_TRIES):
            if session.run(*asked).returncode == 0:
                break
            pause()
        else:
            log = (tmp_path / "systemd.log").read_text()
            pytest.skip(f"NOT TESTED: no systemd of a user's comes up here: {log[-200:]}")
        yield session
    finally:
        session.run("systemctl", "--user", "exit")
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_service_comes_again_when_it_is_killed_and_leaves_in_order_when_it_is_removed(
    session: Session, prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, cache = prepared
    directory = tmp_path / ODD
    directory.mkdir()
    (directory / "node").mkdir()  # which would be taken for the program
    settings = session.home / ".config" / "swarm-node" / "swarm-node.env"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"SWARM_NODE_CACHE_DIR={cache}\nHOME={session.home}\n")
    words = ["join", "--run", run_file, "--data-dir", ODD, "--listen", LOOPBACK, "--threads", "1"]

    refused = session.swarm_node("service", "install", "join", "--lokal", "3")
    assert "did you mean --local" in refused.stderr
    unit = session.home / ".config/systemd/user/swarm-node.service"
    assert not unit.exists()

    done = session.swarm_node("service", "install", *words, directory=directory)
    assert done.stderr == ""
    assert f"swarm-node runs: {unit}" in done.stdout
    again = session.swarm_node("service", "install", *words, directory=directory)
    assert (again.returncode, "swarm-node is there already" in again.stderr) == (2, True)
    drop_in = unit.with_name("swarm-node.service.d")
    drop_in.mkdir()
    (drop_in / "soon.conf").write_text("[Service]\nRestartSec=0.2\n")
    session.run("systemctl", "--user", "daemon-reload")

    data_dir = directory / ODD

    def first_rounds() -> int:
        log = data_dir / "events.jsonl"
        found = [r for _, r in read_events(log)] if log.exists() else []
        return sum(isinstance(record, RoundDone) for record in found)

    def process_id() -> int:
        told = session.run("systemctl", "--user", "show", "swarm-node", "--property=MainPID")
        return int(told.stdout.strip().partition("=")[2])

    def answers() -> bool:
        """Asked within: the way to a node may be in /run."""
        return session.swarm_node("status", "--data-dir", data_dir).returncode == 0

    until(lambda: first_rounds() >= 1)
    killed = process_id()
    os.kill(killed, signal.SIGKILL)
    until(lambda: process_id() not in (0, killed) and answers())

    removed = session.swarm_node("service", "remove")
    assert (removed.returncode, removed.stderr) == (0, "")
    assert not unit.exists()
    assert process_id() == 0
    assert not answers()
    assert (data_dir / "checkpoints").is_dir()  # it saved before it left
    assert session.swarm_node("service", "remove").returncode == 2
    assert "not installed" in session.swarm_node("service", "logs").stderr
