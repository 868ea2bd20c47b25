"""`swarm-node join --engine vllm`: the trainer's policy goes to vLLM each round, through memory.
That of a rollout worker comes from a learner."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from node.engines.policy_files import SHARED_MEMORY
from node.observe.records import StepDone, WorkDone
from swarm.command import EXIT_USAGE
from tests.integration.nodes import (
    WAIT_S,
    MakeFed,
    MakeNode,
    NodeProcess,
    all_gone,
    until,
)
from tests.unit.training_support import qwen_directory

pytestmark = [pytest.mark.vllm, pytest.mark.integration]
FP32_ERROR_MAX = 1e-3
ENDS_S = 400.0  # two processes start before it may end; what counts is how often


def keeper(node: NodeProcess) -> psutil.Process | None:
    """The process that leads the server's group."""
    found = (p for p in node.children() if "node.engines.vllm.child" in " ".join(p.cmdline()))
    return next(found, None)


def in_memory(before: set[str]) -> set[str]:
    """What lies in shared memory that did not before."""
    return {path.name for path in SHARED_MEMORY.glob("swarm-policy-*")} - before


@pytest.mark.long
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


@pytest.mark.long
def test_a_model_that_vllm_cannot_run_ends_the_node_at_the_first_answer(
    make_node: MakeNode, tmp_path: Path
) -> None:
    """The trainer takes it; vLLM starts, and its attention on CPUs fails at heads of 8."""
    model = qwen_directory(tmp_path / "small-heads")
    node = make_node("a", "--engine", "vllm", "--external", "0", "--model", str(model)).start()
    assert node.process.wait(ENDS_S) == EXIT_USAGE
    assert len(node.starts_told()) == 1
    assert node.troubles() == []
    [line] = [each for each in node.said().splitlines() if "swarm-node: " in each]
    assert re.search(r"--engine vllm: .*Error: .*head.*vllm\.log.*--engine torch", line)
    assert "Traceback" not in node.said()


@pytest.mark.long
def test_a_worker_with_vllm_feeds_a_learner(make_fed: MakeFed) -> None:
    """Over several versions, each swapped into the server; what it says of its tokens is what the
    learner says of them, but for the steps between; in float32, as rounding would hide the rest."""
    rules = '[node]\npublish_precision = "float32"\n'
    learner, worker = make_fed(worker=("--engine", "vllm"), rules=rules)
    # A server starts and takes three versions; that fills one core for over a minute.
    worker.until(lambda: any(w.policy_version >= 3 for w in worker.events(WorkDone)), 2 * WAIT_S)
    learner.until(lambda: len(learner.events(StepDone)) >= 4)
    assert worker.troubles() == []
    steps = [each for each in learner.events(StepDone) if each.informative_groups]
    fresh = [each for each in steps if each.staleness_max == 0]
    assert fresh or steps[0].step > 1  # the first is fresh, and mostly informative
    assert all(each.mismatch_k3 is not None for each in steps)
    for step in fresh:
        assert step.mismatch_k3 is not None
        assert step.mismatch_k3 < FP32_ERROR_MAX**2
        assert step.effective_share == pytest.approx(1.0, abs=1e-3)
    assert worker.interrupt() == 0
