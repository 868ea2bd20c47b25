"""The data directories of nodes that have worked a while: nobody else reads anything there."""

from pathlib import Path

import pytest

from tests.integration.conftest import MakeFed, MakeNode
from tests.unit.test_private_files import open_to_others

pytestmark = pytest.mark.integration

CONSOLE = "console.log"  # the test's own, which is there before the node is


@pytest.mark.long
def test_a_learner_and_its_worker_keep_all_to_themselves(make_fed: MakeFed) -> None:
    learner, worker = make_fed()
    learner.until(lambda: any((learner.data_dir / "checkpoints").glob("*/*")))
    worker.until(lambda: any((worker.data_dir / "weights").rglob("*.safetensors")))
    for node in (learner, worker):
        assert (node.data_dir / "events.jsonl").exists()
        assert set(open_to_others(node.data_dir)) <= {CONSOLE}


@pytest.mark.long
def test_a_node_closes_the_directory_of_an_older_one_and_says_so(make_node: MakeNode) -> None:
    node = make_node("a", "--rounds", "1", "--checkpoint-every", "1")
    node.start().process.wait(120)
    assert set(open_to_others(node.data_dir)) <= {CONSOLE}
    for path in (node.data_dir, *node.data_dir.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    node.start().process.wait(120)
    assert open_to_others(node.data_dir) == []
    assert "was open to other users" in node.said()


@pytest.mark.long
def test_a_cache_that_users_share_stays_one(
    make_node: MakeNode, tmp_path: Path, prepared: tuple[Path, Path]
) -> None:
    node = make_node("a", "--rounds", "1")
    node.cache_dir = tmp_path / "cache"
    node.start().process.wait(240)
    made = [path for path in node.cache_dir.rglob("*") if path.is_file()]
    assert any(path.name == "config.json" for path in made)
    assert all(path.stat().st_mode & 0o044 for path in made), "umask 022, as it was started with"
