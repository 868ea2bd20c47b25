"""What service managers are told. `tests/integration/test_service.py` has a real systemd."""

import argparse
import io
import plistlib
import subprocess
from pathlib import Path

import pytest

from node.cli import main
from node.commands import service as command
from node.commands.service import Service, launch_agent, systemd_unit
from node.config import load_run
from swarm.identity import Identity
from swarm.peers.invite import Invitation, JoinKey
from swarm.peers.invite_flags import take_invitation

WORDS = ("/usr/bin/python3", "-P", "-m", "node.cli", "join", "--run", 'a b%n $HOME "c" \\d\ne')


def service(tmp_path: Path) -> Service:
    return Service(
        "swarm-node", "swarm-node join\nExecStart=/bin/false", WORDS, tmp_path, tmp_path / "env",
        tmp_path / "log",
    )  # fmt: skip


def test_no_word_of_a_command_is_a_line_of_the_unit(tmp_path):
    lines = systemd_unit(service(tmp_path)).splitlines()
    starts = [line for line in lines if line.startswith("ExecStart=")]
    assert len(starts) == 1
    assert starts[0].endswith('"--run" "a b%%n $$HOME \\"c\\" \\\\d\\ne"')
    assert "Description=swarm-node join ExecStart=/bin/false" in lines
    assert "RestartPreventExitStatus=2 3" in lines


def test_a_launch_agent_reads_its_variables_and_is_the_command(tmp_path):
    told = plistlib.loads(launch_agent(service(tmp_path)))
    shell, *rest = told["ProgramArguments"]
    assert shell == "/bin/sh"
    assert tuple(rest[-len(WORDS) :]) == WORDS
    (tmp_path / "env").write_text("SWARM_NODE_LOCAL_GROUPS=7\n")
    script = rest[: -len(WORDS)]
    done = subprocess.run(
        [shell, *script, "/bin/sh", "-c", 'echo "$SWARM_NODE_LOCAL_GROUPS $1"', "-", WORDS[-1]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"7 {WORDS[-1]}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name the command that it runs"),
        (["status"], "one of join, learn"),
        (["--name", "A", "join"], "--name A: lower-case"),
        (["join", "--local", "none"], "--local"),
        (["join"], "no systemd and no launchd here"),
    ],
)
def test_what_cannot_be_installed_is_said_and_leaves_nothing(
    words, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(command.sys, "platform", "linux")
    monkeypatch.setattr(command.shutil, "which", lambda _: None)
    assert main(["service", "install", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / ".config").exists()


def test_what_cannot_be_started_is_not_left_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path))
    fake = tmp_path / "systemctl"
    fake.write_text(
        '#!/bin/sh\n[ "$2" = enable ] && { echo "no room" >&2; exit 1; }\necho "$@" >> told\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(command.sys, "platform", "linux")
    assert main(["service", "install", "join"]) == 2
    assert "enable --now swarm-node: no room" in capsys.readouterr().err
    assert list((tmp_path / "config/systemd/user").iterdir()) == []
    assert (tmp_path / "told").read_text().splitlines()[-1] == "--user daemon-reload"


def test_settings_of_the_terminal_alone_are_named():
    assert command.left_behind({"SWARM_NODE_RUN": "x", "PATH": "y"}) == ["SWARM_NODE_RUN"]


@pytest.mark.parametrize("how", ["--invite TEXT", "--invite=TEXT", "--invite -", "TEXT"])
def test_a_unit_names_a_file_in_place_of_an_invitation(how, tmp_path, monkeypatch, capsys):
    peer = Identity(b"a" * 32).peer_id
    key, run = JoinKey(b"s" * 32), load_run(Path("sums"), {})[0]
    text = Invitation(run.run_id, (f"/ip4/203.0.113.7/tcp/4001/p2p/{peer}",), key).encode()
    config = tmp_path / "config"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n"))
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setattr(command.sys, "platform", "linux")
    words = how.replace("TEXT", text).split()
    assert main(["service", "install", "join", *words, "--no-lan"]) == 0
    unit = (config / "systemd/user/swarm-node.service").read_text()
    held = config / "swarm-node/swarm-node.invite"
    assert text not in unit
    assert text not in capsys.readouterr().out
    assert f'"--no-lan" "--invite-file" "{held}"' in unit
    assert held.read_text() == f"{text}\n"
    assert held.stat().st_mode & 0o777 == 0o600
    assert take_invitation(argparse.Namespace(invite=None, invite_file=held)) == text
    assert main(["service", "remove"]) == 0
    assert not held.exists()
