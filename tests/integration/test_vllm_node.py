"""`swarm-node join --engine vllm`: the trainer's policy goes to vLLM each round, through memory."""

import os
import signal

import psutil
import pytest

from node.engines.policy_files import SHARED_MEMORY
from tests.integration.nodes import MakeNode, NodeProcess, all_gone, until

pytestmark = [pytest.mark.vllm, pytest.mark.integration]
FP32_ERROR_MAX = 1e-3


def keeper(node: NodeProcess) -> psutil.Process | None:
    """The process that leads the server's group."""
    found = (p for p in node.children() if "node.engines.vllm_child" in " ".join(p.cmdline()))
    return next(found, None)


def in_memory(before: set[str]) -> set[str]:
    """What lies in shared memory that did not before."""
    return {path.name for path in SHARED_MEMORY.glob("swarm-policy-*")} - before


def test_rounds_with_vllm_through_its_death_and_the_nodes(make_node: MakeNode) -> None:
    before = in_memory(set())
    node = make_node("a", "--engine", "vllm", "--external", "0", "--evaluate-every", "0").start()
    node.until(lambda: node.last_round() >= 3)
    assert len(in_memory(before)) == 1
    assert not list(node.data_dir.glob("policy-*"))
    for record in node.rounds():
        assert record.paused_s is not None
        assert record.paused_s > 0
        if record.informative_groups:
            assert record.mismatch_max is not None
            assert record.mismatch_mean <= record.mismatch_max < FP32_ERROR_MAX
            assert record.effective_share == pytest.approx(1.0, abs=1e-3)
    status = node.status()
    assert status is not None
    assert status.paused_s is not None
    server = keeper(node)
    assert server is not None
    os.killpg(server.pid, signal.SIGKILL)
    done = node.last_round()
    node.until(lambda: node.last_round() >= done + 3)
    assert keeper(node) != server
    assert len(node.starts_told()) == 1  # the trainer did not have to start again
    children = node.children()
    node.kill()
    assert all_gone(children)
    assert until(lambda: not in_memory(before))
