"""Completion in a shell: by bash itself, of the script that the command prints."""

import shutil
import subprocess
from pathlib import Path

import pytest

from node.cli import main

ASK = """
source {script}
COMP_WORDS=({words}); COMP_CWORD={last}; COMP_LINE="{words}"; COMPREPLY=()
_shtab_swarm_node
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("swarm-node jo", {"join"}),
        ("swarm-node service in", {"install"}),
        ("swarm-node join --engine-u", {"--engine-url", "--engine-update"}),
        ("swarm-node learn --key-file le", {"learner.pem"}),
        ("swarm-node nothing", set()),
    ],
)
def test_bash_completes_commands_flags_and_files(words, completed, tmp_path: Path, capsys):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "learner.pem").touch()
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("NOT TESTED: there is no bash here")
    ask = ASK.format(script=script, words=words, last=len(words.split()) - 1)
    done = subprocess.run(
        [bash, "-c", ask], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert set(done.stdout.split()) == completed


@pytest.mark.parametrize(("shell", "has"), [("zsh", "#compdef swarm-node"), ("tcsh", "complete")])
def test_other_shells_have_theirs(shell, has, capsys):
    assert main(["completion", shell]) == 0
    assert has in capsys.readouterr().out
