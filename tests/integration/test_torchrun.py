"""`swarm-node learn` under torchrun: two processes train one policy, a worker feeds it, one of the
two is killed, and all goes on from the last checkpoint."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from node.observe.event_log import read_events
from node.observe.records import Started, StepDone
from node.policies.checkpoint import load
from node.policies.policy import load_policy
from swarm.identity import Identity
from tests.integration.nodes import ENVIRON, LOOPBACK, RUN_TEXT, all_gone, until

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 24  # more than are made until the first is seen and a process is killed
LEARNER_TEXT = """
[learner]
peer = "{peer}"
publish_every_steps = 1
groups_per_step = 2
lease_life_s = 10
group_size = 8
"""
WAIT_S = 300.0


class Swarm:
    """A learner of two ranks and one worker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        key = directory / "learner.pem"
        identity = Identity.generate()
        identity.save(key, None)
        self.run_file = directory / "run.toml"
        self.run_file.write_text(RUN_TEXT + LEARNER_TEXT.format(peer=identity.peer_id))
        self.environ = ENVIRON | {"SWARM_NODE_CACHE_DIR": str(directory / "cache")}
        prepare = ["node.cli", "prepare", "--run", str(self.run_file)]
        subprocess.run(
            [sys.executable, "-m", *prepare],
            check=True,
            capture_output=True,
            env=self.environ,
            timeout=WAIT_S,
        )
        with socket.socket() as free:  # the same after a restart, so that the worker finds it
            free.bind(("127.0.0.1", 0))
            self.address = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
        self.processes: list[subprocess.Popen[bytes]] = []
        learn = ["learn", "--steps", STEPS, "--key-file", key, "--listen", self.address]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        self.torchrun = self._start(
            [*torchrun, "--max-restarts", "1", "-m", "--", "node.cli"], learn, "learner"
        )
        peer = f"{self.address}/p2p/{identity.peer_id}"
        self._start(["node.cli"], ["join", "--peer", peer, "--listen", LOOPBACK], "worker")

    def _start(self, module: list[str], command: list, name: str) -> subprocess.Popen[bytes]:
        data = self.directory / name
        data.mkdir()
        rest = ["--run", self.run_file, "--data-dir", data, "--threads", "1", "--no-lan"]
        with (data / "console.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *module, *map(str, [*command, *rest])],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environ,
                )
            )
        return self.processes[-1]

    def said(self) -> str:
        return (self.directory / "learner" / "console.log").read_text()

    def events(self, kind: type) -> list:
        path = self.directory / "learner" / "events.jsonl"
        if not path.exists():
            return []
        return [record for _, record in read_events(path) if isinstance(record, kind)]

    def steps(self) -> list[StepDone]:
        assert self.torchrun.poll() is None, self.said()
        return self.events(StepDone)

    def other_rank(self) -> psutil.Process:
        """The process that trains and does nothing else."""
        children = psutil.Process(self.torchrun.pid).children()
        [found] = [child for child in children if child.environ().get("RANK") == "1"]
        return found

    def end(self) -> None:
        trees = [psutil.Process(p.pid) for p in self.processes if p.poll() is None]
        children = [child for tree in trees for child in tree.children(recursive=True)]
        for process in (*trees, *children):
            if process.is_running():
                process.kill()
        for process in self.processes:
            process.wait(WAIT_S)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    swarm.end()


def test_a_learner_of_two_ranks_learns_loses_one_and_goes_on(swarm):
    until(swarm.steps, WAIT_S, swarm.said)
    killed = swarm.other_rank()
    os.kill(killed.pid, signal.SIGKILL)
    assert swarm.torchrun.wait(WAIT_S) == 0, swarm.said()
    assert all_gone([killed])
    assert swarm.said().count("rank 1 of 2 trains for the learner of rank 0") == 2
    steps = swarm.events(StepDone)
    first, second = swarm.events(Started)
    assert first.round == 0
    assert 1 <= second.round <= STEPS
    assert steps[-1].step == STEPS
    assert all(step.loss == step.loss and step.trained_tokens_total > 0 for step in steps)
    newest = max((swarm.directory / "learner" / "checkpoints").glob("round-*"))
    [model] = (swarm.directory / "cache" / "policies").glob("*/config.json")
    policy = load_policy(str(model.parent), "cpu")
    import torch

    optimizer = torch.optim.Adam(policy.model.parameters())
    updates = sum(step.informative_groups > 0 for step in steps)  # the others teach nothing
    assert load(newest, policy, optimizer) == updates  # one process resumes from it
