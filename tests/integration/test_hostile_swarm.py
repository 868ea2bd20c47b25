"""Three nodes and a liar, each a process over real libp2p.

The liar tries everything that a message can lie about. It is to be banned by each of the three,
and what they learn is to be what they would have learned without it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.observe.event_log import read_events
from node.observe.records import Banned
from tests.integration.nodes import ENVIRON, MakeNode, NodeProcess
from tests.integration.replay import curve, replayed, settings_of

pytestmark = pytest.mark.integration

ROUNDS_AFTER = 3  # that each node still does after the ban
BANNED_WITHIN_S = 60.0
LIE_FOR_S = 600  # it is ended before


class Liar:
    """The hostile process, which tells each lie that it tries on a line of its own."""

    def __init__(self, log: Path, run_file: Path, peers: list[str]) -> None:
        self._log = log
        script = Path(__file__).parents[1] / "hostile" / "hostile_node.py"
        command = [sys.executable, str(script), "--run", str(run_file), "--seed", "7"]
        for peer in peers:
            command += ["--peer", peer]
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--seconds", str(LIE_FOR_S)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=ENVIRON,
            )
        self._started_s = psutil.Process(self.process.pid).create_time()

    def told(self) -> list[dict[str, Any]]:
        whole = self._log.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in whole if line.endswith("\n")]

    def first_lie_s(self) -> float:
        """Unix time of the first lie that somebody was there to hear; at the latest."""
        return self._started_s + min(
            float(each["at_s"]) for each in self.told() if each.get("peers")
        )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


@pytest.fixture
def liars() -> Iterator[list[Liar]]:
    """Those that a test starts end with it."""
    started: list[Liar] = []
    yield started
    for liar in started:
        liar.end()


def bans(node: NodeProcess) -> list[tuple[float, Banned]]:
    """When it banned whom, by its event log."""
    found = read_events(node.data_dir / "events.jsonl")
    return [(time_s, record) for time_s, record in found if isinstance(record, Banned)]


@pytest.mark.long
def test_a_liar_is_banned_and_leaves_no_trace_in_what_the_others_learn(
    make_node: MakeNode, prepared: tuple[Path, Path], liars: list[Liar], tmp_path: Path
) -> None:
    first = make_node("a").start()
    others = [make_node(name, "--peer", first.address()).start() for name in "bc"]
    swarm = [first, *others]
    ids = {str(node.until(node.status).peer_id) for node in swarm}
    for node in swarm:  # the swarm is whole, and shares
        node.until(lambda node=node: node.foreign_trained() > 0)

    liar = Liar(tmp_path / "liar.jsonl", prepared[0], [node.address() for node in swarm])
    liars.append(liar)
    for node in swarm:
        node.until(lambda node=node: bans(node))
    liar_id = liar.told()[0]["peer_id"]
    for node in swarm:
        assert {ban.subject for _, ban in bans(node)} == {liar_id}
        assert bans(node)[0][0] - liar.first_lie_s() <= BANNED_WITHIN_S
        status = node.status()
        assert status is not None
        assert [ban.subject for ban in status.bans] == [liar_id]
        before = node.last_round()
        node.until(lambda node=node, before=before: node.last_round() >= before + ROUNDS_AFTER)
    assert liar.process.poll() is None, "it ended by itself"
    liar.end()

    assert [node.interrupt() for node in swarm] == [0, 0, 0], [node.said() for node in swarm]
    for node in swarm:
        assert node.sources() <= ids, "something of the liar was trained on"
        assert not node.troubles(), node.troubles()
        told = node.rounds()
        again = replayed(settings_of(node), told, tmp_path)
        assert curve(again) == curve(told), "the liar left a trace"
