"""`swarm-node report` on a real learner and two workers: who had which version when."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from node.observe.event_log import FILE_NAME, history, read_events
from node.observe.records import (
    VersionCame,
    VersionComing,
    VersionPublished,
    VersionSpread,
    VersionSpreading,
)
from node.observe.saved_report import PUBLISHER, NodeSummary, Waterfall, summarise, waterfall
from tests.integration.nodes import MakeFed, NodeProcess, swarm_node, until

pytestmark = pytest.mark.integration

VERSION = 3  # up to which it is watched
FETCHED = ("manifest", "fetch", "patch", "load")


def drawn(*directories: Path) -> Waterfall:
    lives = [(each.name, history(read_events(each / FILE_NAME))) for each in directories]
    found = waterfall(lives)
    assert found is not None
    return found


def at_version(node: NodeProcess, version: int) -> list[VersionCame]:
    return [each for each in node.events(VersionCame) if each.version >= version]


def check_status(learner: NodeProcess, workers: list[NodeProcess]) -> None:
    """Each says what it did by its role."""
    shown = learner.until(lambda: told(learner, "step", VERSION))
    assert shown.role == "learner"
    assert shown.round >= VERSION - 1
    for worker in workers:
        shown = worker.until(lambda worker=worker: told(worker, "work", VERSION))
        assert (shown.role, shown.parameters) == ("worker", 0)
        assert shown.round == shown.work.batch >= 1
        assert shown.tokens_per_s > 0


def told(node: NodeProcess, what: str, version: int) -> Any:
    """Its status, once it has that record and that version."""
    shown = node.status()
    if shown is None or getattr(shown, what) is None or shown.policy_version < version:
        return None
    return shown


def check_figures(learner: NodeProcess, workers: list[NodeProcess]) -> None:
    """What a report says of each in numbers."""
    node = summarised(learner)
    assert node.steps >= VERSION - 1
    assert min(node.starts, node.foreign_groups) >= 1
    for worker in workers:
        node = summarised(worker)
        assert node.starts == 1
        assert min(node.batches, node.generated_tokens) > 0
    assert sum(node.verdicts["accepted"] for node in map(summarised, workers)) > 0


def summarised(node: NodeProcess) -> NodeSummary:
    return summarise("", history(read_events(node.data_dir / FILE_NAME)))


@pytest.mark.long
def test_a_report_draws_what_two_workers_did_with_each_version(
    tmp_path: Path, make_fed: MakeFed
) -> None:
    learner, *workers = make_fed("--no-lan", names=("ann", "ben"))
    ids = [worker.until(worker.status).peer_id for worker in workers]
    for worker in workers:
        worker.until(lambda worker=worker: at_version(worker, VERSION))

    def spread() -> bool:
        """The learner has learned of both that they use a version, and that both have one."""
        seen = learner.events(VersionSpreading)
        if not any(each.peers == 2 for each in learner.events(VersionSpread)):
            return False
        return set(ids) <= {each for event in seen for each in event.using}

    learner.until(spread)
    check_status(learner, workers)
    nodes = (learner, *workers)
    for node in nodes:
        assert node.interrupt() == 0, node.said()
        until(lambda node=node: node.process.poll() is not None)

    check_logs(learner, workers, ids)
    directories = [node.data_dir for node in nodes]
    check_rows(drawn(*directories), ids)
    check_figures(learner, workers)
    check_partial_logs(tmp_path, learner, workers, ids)
    done = swarm_node("report", *directories, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report" / "report.html").read_text()
    assert '"waterfall":{"title":"Broadcasts' in page


def check_logs(learner: NodeProcess, workers: list[NodeProcess], ids: list[str]) -> None:
    published = {each.version: each for each in learner.events(VersionPublished)}
    assert all(each.full_bytes > 0 and each.made_s > 0 for each in published.values())
    assert learner.events(VersionSpread)
    whole = {
        peer
        for event in learner.events(VersionSpreading)
        for peer, share in event.shares.items()
        if share == 1.0
    }
    assert whole == set(ids)
    for worker, peer in zip(workers, ids, strict=True):
        came = [each for each in worker.events(VersionCame) if each.failure is None]
        assert {each.peer_id for each in came} == {peer}
        assert {each.version for each in came} <= set(published)
        assert came[0].paused_s == 0.0  # nothing was sampled before the engine's first start
        assert all(each.paused_s > 0 and each.fetched_bytes >= 0 for each in came[1:])
        assert came[0].fetched_bytes > 0
        assert came[0].fetch_s > 0
        for each in came:
            phases = [
                event.phase
                for event in worker.events(VersionComing)
                if event.version == each.version
            ]
            assert phases[0] == "manifest"
            assert phases[-1] == "load"


def check_rows(found: Waterfall, ids: list[str]) -> None:
    by_peer = {peer: [row for row in found.rows if row.peer == peer] for peer in (PUBLISHER, *ids)}
    assert all(by_peer.values())
    assert any(bar.phase == "made" for row in by_peer[PUBLISHER] for bar in row.bars)
    for peer in ids:
        whole = [row for row in by_peer[peer] if [bar.phase for bar in row.bars][-1] == "load"]
        assert whole
        for row in whole:
            ends = [bar.end_s for bar in row.bars]
            assert ends == sorted(ends)
            assert {bar.phase for bar in row.bars} <= set(FETCHED)
        assert any(row.had_s is not None for row in by_peer[peer])


def check_partial_logs(
    directory: Path, learner: NodeProcess, workers: list[NodeProcess], ids: list[str]
) -> None:
    """The learner's log alone shows its workers as it heard of them; a worker's alone itself; one
    that was cut, what is left of it."""
    heard = drawn(learner.data_dir)
    assert {row.peer for row in heard.rows} >= set(ids)
    assert all(bar.phase == "heard" for row in heard.rows if row.peer in ids for bar in row.bars)
    alone = drawn(workers[0].data_dir)
    assert {row.peer for row in alone.rows} == {ids[0]}
    lines = (workers[0].data_dir / FILE_NAME).read_bytes()
    cut = directory / "cut"
    cut.mkdir()
    (cut / FILE_NAME).write_bytes(lines[: len(lines) * 2 // 3])
    assert drawn(cut).rows[-1].version <= alone.rows[-1].version
    shutil.rmtree(cut)
