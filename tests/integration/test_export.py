"""What a node has trained, taken out as a model directory, and talking to it."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from node.observe.records import StartEnded
from tests.integration.nodes import COMMAND_TIMEOUT_S, ENVIRON, MakeNode, swarm_node

pytestmark = pytest.mark.integration


@pytest.mark.long
def test_a_running_nodes_policy_can_be_taken_out_and_talked_to(
    make_node: MakeNode, prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, cache = prepared
    node = make_node("a").start()
    of_node = ("--run", run_file, "--data-dir", node.data_dir)

    def export(out: Path, *more: str) -> "subprocess.CompletedProcess[str]":
        return swarm_node("export", out, *of_node, *more, SWARM_NODE_CACHE_DIR=str(cache))

    node.until(lambda: node.last_round() >= 2)
    running = export(tmp_path / "running")
    assert running.returncode == 0, running.stderr
    assert node.interrupt() == 0, node.said()
    assert (node.data_dir / "trainer.log").exists()
    assert not node.troubles()

    out, half = tmp_path / "new" / "policy", tmp_path / "half"
    assert export(out).stdout == f"{out}: the policy after round {node.last_round()}\n"
    last = max((node.data_dir / "checkpoints").glob("round-*"))
    saved, whole = load_file(last / "model.safetensors"), load_file(out / "model.safetensors")
    assert saved.keys() == whole.keys()
    assert all(torch.equal(saved[name], whole[name]) for name in saved)
    assert {path.name for path in out.iterdir()} >= {"config.json", "tokenizer.json"}
    assert export(half, "--precision", "bfloat16").returncode == 0
    assert {v.dtype for v in load_file(half / "model.safetensors").values()} == {torch.bfloat16}

    twice, adapter = export(out), export(tmp_path / "adapter", "--adapter")
    for refused, said in ((twice, "is there already"), (adapter, "trains no adapter")):
        assert refused.returncode == 2
        assert said in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert [path for path in tmp_path.rglob(".*") if path.is_dir()] == []  # nothing half written

    talk = subprocess.run(
        [sys.executable, "-m", "node.cli", "chat", str(out), "--max-new-tokens", "3"],
        input="1+2=\n\n/new\n3+4=\n",
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env=ENVIRON,
        check=False,
    )
    assert talk.returncode == 0, talk.stderr
    assert len(talk.stdout.splitlines()) == 2, talk.stdout
    none = swarm_node("chat", node.data_dir)
    assert none.returncode == 2
    assert "swarm-node export" in none.stderr


@pytest.mark.long
def test_a_node_that_leaves_says_what_to_do_with_what_it_learned_and_is_found_again(
    make_node: MakeNode, prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    """The lines are pasted as they are; a run file is not named again."""
    _, cache = prepared
    node = make_node("a").start()
    node.until(lambda: node.last_round() >= 1)
    address = node.address()
    assert node.interrupt() == 0, node.said()
    lines = node.said().splitlines()
    assert f"left after round {node.last_round()}, which is saved" in lines[-4]
    out = tmp_path / "policy"
    command = shlex.split(lines[-2].replace("my-model", str(out)), comments=True)
    assert command[:2] == ["swarm-node", "export"]
    done = swarm_node(*command[1:], SWARM_NODE_CACHE_DIR=str(cache))
    assert (done.returncode, done.stderr) == (0, "")
    assert (out / "config.json").exists()
    assert [each.failure for each in node.events(StartEnded)] == [None]
    said = swarm_node(*shlex.split(lines[-3], comments=True)[1:])
    assert said.returncode == 0
    assert "reward" in said.stdout
    elsewhere = ("--data-dir", node.data_dir, "--run", "sapo9")
    other = swarm_node("export", tmp_path / "other", *elsewhere)
    assert "its checkpoint has run_id" in other.stderr, "a flag comes before what was kept"

    node.start()
    node.until(lambda: len(node.starts_told()) == 2)
    assert node.address() == address


def test_there_is_nothing_to_take_out_of_a_node_without_a_checkpoint(
    prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    run_file, cache = prepared
    (tmp_path / "empty").mkdir()
    for directory, said in (("empty", "no checkpoint yet"), ("mistyped", "no such directory")):
        found = swarm_node(
            *("export", tmp_path / "out", "--run", run_file, "--data-dir", tmp_path / directory),
            SWARM_NODE_CACHE_DIR=str(cache),
        )
        assert found.returncode == 2
        assert said in found.stderr
        assert not (tmp_path / "out").exists()
