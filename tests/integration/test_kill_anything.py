"""Kill -9 of any process of any node, at random moments: nothing acknowledged is lost, nothing is
trained on twice, and starting the node again, or nothing at all, is all that it takes."""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import psutil
import pytest
import trio

from swarm.exchange.pool import PoolLimits
from swarm.identity import Identity
from swarm.transport.libp2p.host import open_libp2p
from swarm.wire import codec
from swarm.wire.messages import (
    GROUPS_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    WANT_GROUPS_MAX,
    GroupsReply,
    Want,
)
from tests.integration.nodes import LOOPBACK, MakeNode, NodeProcess, all_gone
from tests.integration.process_groups import PAUSE_S, pause

pytestmark = pytest.mark.integration

KINDS = {"node": "node.cli", "trainer": "node.train.trainer_worker", "verifier": "verifier_worker"}
MOMENT_S_MAX = 4.0  # after a kill was survived, the next comes within this time
HURRY = 0.25  # of the kills come before the last one was survived
SERVED_ROUNDS = 8  # of a restarted node, its newest, whose groups it is asked for


@dataclass
class Lives:
    """One node over all its lives, and what it may never lose."""

    node: NodeProcess
    peer_id: str
    acknowledged: dict[bytes, int] = field(default_factory=dict)  # own groups and their rounds
    deaths: Counter[str] = field(default_factory=Counter)

    def kill(self, kind: str, rng: Random) -> None:
        """Kill one of its processes now; start it again if that was the node itself."""
        if kind == "node":
            children = self.node.children()
            self.node.kill()
            assert all_gone(children), "children of a killed node live on"
            self.check_pool()
            self.node.start()
        else:
            processes = self.node.until(lambda: self._processes(kind))
            rng.choice(processes).kill()
        self.deaths[kind] += 1

    def _processes(self, kind: str) -> list[psutil.Process]:
        found = []
        for process in self.node.children():
            try:
                if any(KINDS[kind] in part for part in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it ended meanwhile
        return found

    def survive(self) -> None:
        """Wait until it has done another round."""
        before = self.node.last_round()
        self.node.until(lambda: self.node.last_round() > before)

    # --- what is on its disk ---------------------------------------------------------------

    def check_pool(self) -> None:
        """While it does not run: its pool is sound, holds what was acknowledged, and agrees with
        the log about what was trained on."""
        with closing(sqlite3.connect(self.node.data_dir / "pool.sqlite")) as pool:
            assert pool.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            own = dict(pool.execute("SELECT group_id, round FROM groups WHERE own").fetchall())
            marked = pool.execute(
                "SELECT group_id, trained_round FROM groups WHERE trained_round IS NOT NULL"
                " UNION ALL SELECT group_id, trained_round FROM tombstones"
                " WHERE trained_round IS NOT NULL"
            ).fetchall()
        # at two groups a round, the node's share of its own pool is full before they are too old
        oldest = max(own.values(), default=0) - PoolLimits().groups_per_producer_max // 4
        expected = {group_id for group_id, round_ in self.acknowledged.items() if round_ > oldest}
        assert expected <= own.keys(), "an own group that was shared is gone"
        shared = Counter(own.values())
        for record in self.node.rounds():
            if record.round > oldest:
                shared[record.round] -= record.groups_shared
        assert min(shared.values(), default=0) >= 0, "the log tells of groups that are gone"
        self.acknowledged = own
        self._check_trained(marked)

    def _check_trained(self, marked: list[tuple[bytes, int]]) -> None:
        rounds = dict(marked)
        assert len(rounds) == len(marked)
        trained = [
            (bytes.fromhex(name), record.round)
            for record in self.node.rounds()
            for name in record.foreign_groups
        ]
        assert len({group_id for group_id, _ in trained}) == len(trained), "trained on twice"
        assert all(rounds.get(group_id) == round_ for group_id, round_ in trained)
        assert not list(self.node.data_dir.glob("pool.sqlite.damaged-*"))
        assert not list((self.node.data_dir / "checkpoints").glob("damaged-*"))

    def check_served(self) -> None:
        """While it runs: any peer still gets its newest acknowledged groups."""
        oldest = max(self.acknowledged.values(), default=0) - SERVED_ROUNDS
        wanted = [group_id for group_id, round_ in self.acknowledged.items() if round_ > oldest]
        status = self.node.until(self.node.status)
        assert trio.run(fetch, status.addresses[0], status.run_id, wanted) == set(wanted)


async def fetch(address: str, run_id: str, group_ids: list[bytes]) -> set[bytes]:
    """The ids of what a stranger gets."""
    found: set[bytes] = set()
    left = iter(group_ids)
    async with open_libp2p(Identity.generate(), [LOOPBACK]) as transport:
        peer = await transport.connect(address, timeout_s=60.0)
        while batch := tuple(islice(left, WANT_GROUPS_MAX)):
            want = Want(type="want", run_id=run_id, group_ids=batch)
            answer = await transport.request(
                peer,
                ROLLOUTS_PROTOCOL,
                codec.encode(want),
                timeout_s=60.0,
                response_bytes_max=GROUPS_REPLY_BYTES_MAX,
            )
            reply = codec.decode(answer, GroupsReply, GROUPS_REPLY_BYTES_MAX)
            found |= {codec.decode_group(record)[0] for record in reply.records}
    return found


def wait(seconds: float) -> None:
    for _ in range(int(seconds / PAUSE_S)):
        pause()


def live_and_die(make_node: MakeNode, names: str, deaths: list[str], rng: Random) -> list[Lives]:
    """Nodes that share, kills in the given order of kinds, and all checks."""
    first = make_node(names[0]).start()
    address = first.address()
    nodes = [first, *(make_node(name, "--peer", address).start() for name in names[1:])]
    first.flags = ("--listen", address.rpartition("/p2p/")[0])  # the others know it by this
    lives = [Lives(node, str(node.until(node.status).peer_id)) for node in nodes]
    for each in lives:
        each.node.until(lambda each=each: each.node.foreign_trained() > 0)
    for kind in deaths:
        victim = rng.choice(lives)
        wait(rng.uniform(0.0, MOMENT_S_MAX))
        victim.kill(kind, rng)
        if rng.random() >= HURRY:
            if kind == "node":
                victim.check_served()
            victim.survive()
    for each in lives:
        each.survive()
        foreign = each.node.foreign_trained()
        each.node.until(lambda each=each, foreign=foreign: each.node.foreign_trained() > foreign)
    assert [each.node.interrupt() for each in lives] == [0] * len(lives)
    for each in lives:
        each.check_pool()
    return lives


@pytest.mark.long
def test_any_process_may_be_killed(make_node: MakeNode) -> None:
    lives = live_and_die(make_node, "ab", ["node", "trainer", "verifier"], Random(5))
    assert sum(each.deaths.total() for each in lives) == 3


@pytest.mark.long
def test_twenty_kills_at_random_moments(make_node: MakeNode) -> None:
    rng = Random(20)
    deaths = [kind for kind in KINDS for _ in range(7)][:20]
    rng.shuffle(deaths)
    lives = live_and_die(make_node, "abc", deaths, rng)
    died = sum((each.deaths for each in lives), Counter[str]())
    assert died.total() == 20
    assert min(died.values()) >= 6
