"""Nodes as processes, for the tests that run them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.nodes import (
    LEARNER_RUN_TEXT,
    RUN_TEXT,
    MakeFed,
    MakeNode,
    NodeProcess,
    swarm_node,
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run file and a cache with the policy for it."""
    directory = tmp_path_factory.mktemp("prepared")
    run_file = directory / "sums.toml"
    run_file.write_text(RUN_TEXT)
    cache = directory / "cache"
    done = swarm_node("prepare", "--run", run_file, SWARM_NODE_CACHE_DIR=str(cache))
    assert (done.returncode, done.stderr) == (0, "")  # and no bar, where there is no terminal
    return run_file, cache


@pytest.fixture
def make_node(tmp_path: Path, prepared: tuple[Path, Path]) -> Iterator[MakeNode]:
    """Nodes with data directories of their own, gone after the test."""
    made: list[NodeProcess] = []

    def make(name: str, *flags: str) -> NodeProcess:
        made.append(NodeProcess(tmp_path / name, *prepared, flags))
        return made[-1]

    yield make
    for node in made:
        node.clean_up()


@pytest.fixture
def make_fed(tmp_path: Path, prepared: tuple[Path, Path]) -> Iterator[MakeFed]:
    """A learner and a worker, gone after the test."""
    made: list[NodeProcess] = []

    def make(
        *flags: str,
        worker: tuple[str, ...] = (),
        names: tuple[str, ...] = ("worker",),
        rules: str = "",
    ) -> list[NodeProcess]:
        """`rules`: more of the run file."""
        key, run_file = tmp_path / "key.pem", tmp_path / "fed.toml"
        learner_id = swarm_node("keygen", "--out", key).stdout.strip()
        run_file.write_text(LEARNER_RUN_TEXT.replace("{peer}", learner_id) + rules)

        def add(command: str, name: str, *own: str) -> NodeProcess:
            all_flags = (*flags, *own)
            node = NodeProcess(tmp_path / name, run_file, prepared[1], all_flags, (command,))
            made.append(node)
            return node.start()

        learner = add("learn", "learner", "--key-file", str(key), "--evaluate-every", "0")
        peer = learner.address()
        return [learner, *(add("join", name, "--peer", peer, *worker) for name in names)]

    yield make
    for node in made:
        node.clean_up()
