"""Nodes as processes that share transcripts of several turns, replay them and train on them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.observe.records import StepDone, WorkDone
from swarm.rollouts import Author
from swarm.wire.codec import decode_group
from tests.integration.nodes import ENVIRON, NodeProcess, swarm_node

pytestmark = pytest.mark.integration

PREPARE_S = 600.0  # a minute of one core that nobody else wants

RUNS = {
    "turns": """
name = "two-turns"
environments = [{name = "guess_number", parameters = {max = 3, tries = 2}}]
sampling = {max_new_tokens = 8}
held_out = {tasks = 10}
""",
    "tool": """
name = "tool"
environments = [{name = "calculator_sum", parameters = {max = 6}}]
sampling = {max_new_tokens = 48}
held_out = {tasks = 10}
""",
}


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[NodeProcess]]:
    run_file, cache = tmp_path / "run.toml", tmp_path / "cache"
    run_file.write_text(RUNS[request.param])
    prepare = [sys.executable, "-m", "node.cli", "prepare", "--run", str(run_file)]
    environ = ENVIRON | {"SWARM_NODE_CACHE_DIR": str(cache)}
    subprocess.run(prepare, env=environ, timeout=PREPARE_S, check=True)
    nodes = [NodeProcess(tmp_path / name, run_file, cache) for name in ("a", "b")]
    yield nodes
    for node in nodes:
        node.clean_up()


@pytest.mark.parametrize(
    "pair", ["turns", pytest.param("tool", marks=pytest.mark.long)], indirect=True
)
def test_nodes_share_transcripts_replay_them_and_train_on_them(pair: list[NodeProcess]) -> None:
    first, second = pair
    first.start()
    second.start("--peer", first.address())
    for node in pair:
        node.until(lambda node=node: node.foreign_trained() >= 4)
    for node in pair:
        assert not node.troubles()
        assert any(record.own_reward > 0 for record in node.rounds())
        assert node.rounds()[-1].rejected_total == {}
        assert node.interrupt() == 0
    records = first._pool("SELECT record FROM groups JOIN records USING (seq) WHERE NOT own")
    groups = [decode_group(record)[1] for record in records]
    assert groups
    said = [each.segments for group in groups for each in group.completions]
    assert all(said)
    several = [turns for turns in said if len(turns) > 1]
    assert several, "no transcript had a second turn"
    assert {turn.author for turn in several[0]} == {Author.POLICY, Author.ENVIRONMENT}


LEARNER = """
name = "fed-turns"
environments = [{name = "guess_number", parameters = {max = 3, tries = 2}}]
sampling = {max_new_tokens = 8}
held_out = {tasks = 10}
[learner]
peer = "{peer}"
staleness_max = 2
groups_per_step = 4
group_size = 8
rescored_share = 1.0
"""


def trained(learner: NodeProcess) -> bool:
    """Three steps, one of them on tokens that its own policy has an opinion of."""
    steps = learner.events(StepDone)
    return len(steps) >= 3 and any(step.mismatch_k3 is not None for step in steps)


@pytest.mark.long
def test_a_learner_trains_on_transcripts_that_its_worker_made(tmp_path: Path) -> None:
    key, run_file, cache = tmp_path / "key.pem", tmp_path / "run.toml", tmp_path / "cache"
    peer = swarm_node("keygen", "--out", key).stdout.strip()
    run_file.write_text(LEARNER.replace("{peer}", peer))
    prepare = ["prepare", "--run", run_file]
    assert swarm_node(*prepare, SWARM_NODE_CACHE_DIR=str(cache)).returncode == 0
    flags = ("--key-file", str(key))
    learner = NodeProcess(tmp_path / "learner", run_file, cache, flags, ("learn",))
    worker = NodeProcess(tmp_path / "worker", run_file, cache, (), ("join",))
    try:
        learner.start()
        worker.start("--peer", learner.address())
        learner.until(lambda: trained(learner))
        steps, work = learner.events(StepDone), worker.events(WorkDone)
        assert not learner.troubles()
        assert not worker.troubles()
        mismatches = [step.mismatch_k3 for step in steps if step.mismatch_k3 is not None]
        assert mismatches == pytest.approx([0.0] * len(mismatches), abs=0.05)
        # every log-prob that it claims was looked at, with what was said between its turns
        verdicts = work[-1].verdicts_total
        assert verdicts["accepted"] >= 0.8 * sum(verdicts.values()) > 0, learner.status()
        tokens, groups = (
            sum(getattr(w, of) for w in work) for of in ("generated_tokens", "groups")
        )
        assert tokens > 2.2 * 8 * groups  # a guess and its end are two: some had a second turn
    finally:
        learner.clean_up()
        worker.clean_up()
