"""`swarm-node join --watch`: it shows a real swarm, and costs it and this machine little."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.nodes import MakeNode, NodeProcess, swarm_node

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[NodeProcess]:
    """A watcher on a machine without torch, with nothing in its cache."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path / "fake", ROOT)))}
    cache = tmp_path / "empty-cache"
    node = NodeProcess(tmp_path / "w", None, cache, ("--watch",), ("join",), environ=paths)
    yield node
    node.clean_up()


def test_a_watcher_shows_the_swarm_and_is_no_peer_of_it(
    make_node: MakeNode, watcher: NodeProcess
) -> None:
    first = make_node("a").start()
    second = make_node("b", "--peer", first.address()).start()
    for node in (first, second):
        node.until(lambda node=node: node.foreign_trained() > 0)
    run_id = first.until(first.status).run_id
    ids = sorted(node.until(node.status).peer_id for node in (first, second))
    watcher.start(f"{first.address()}/run/{run_id}")
    shorts = [each[-8:] for each in ids]
    watcher.until(lambda: f"2 peers of the run: {', '.join(shorts)}" in watcher.said())
    for maker, taker in (shorts, shorts[::-1]):
        watcher.until(lambda maker=maker: f"{maker} offers 2 groups of its round" in watcher.said())
        watcher.until(lambda maker=maker: f", of {maker}: reward " in watcher.said())
        watcher.until(
            lambda maker=maker, taker=taker: any(
                line.startswith(f"{taker} trained on ") and f" of {maker}, " in line
                for line in watcher.said().splitlines()
            )
        )
    assert "  prompt      «" in watcher.said()
    assert "  completion  «" in watcher.said()
    done = first.last_round()
    first.until(lambda: first.last_round() > done)
    for node, other in ((first, ids), (second, ids)):
        status = node.until(node.status)
        assert {each.peer_id for each in status.peers} == {*other} - {status.peer_id}
        assert status.rejected == {}
    assert watcher.interrupt() == 0, watcher.said()
    assert "the same command without --watch takes part" in watcher.said()
    assert " 0 refused" in watcher.said()
    assert "torch was imported" not in watcher.said()
    assert not os.listdir(watcher.cache_dir)
    assert not {"pool.sqlite", "checkpoints", "events.jsonl"} & set(os.listdir(watcher.data_dir))


def test_who_is_watched_must_be_said_and_for_how_long_may_be(
    make_node: MakeNode, tmp_path: Path
) -> None:
    nobody = swarm_node("join", "--watch", "--data-dir", tmp_path / "w")
    assert nobody.returncode == 2
    assert nobody.stderr.count("\n") == 1
    assert "give a node's link" in nobody.stderr
    node = make_node("a").start()
    link = f"{node.address()}/run/{node.until(node.status).run_id}"
    done = swarm_node("join", link, "--watch", "--stop-after", 1, "--data-dir", tmp_path / "w")
    assert done.returncode == 0, done.stderr
    assert "takes part" in done.stdout
