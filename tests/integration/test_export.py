"""What a node has trained, taken out as a model directory, and talking to it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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
