"""Credit for groups that others trained on: counted once, for who said it, and kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from node.observe.figures import credit_lines
from node.observe.status import render_status
from swarm.errors import Reject, RequestRefused
from swarm.identity import PeerId
from swarm.peers.credit import (
    MADE_MAX,
    OTHERS_TOLD_MAX,
    TAKERS_MAX,
    TAKERS_PER_GROUP_MAX,
    TRAINED_KEPT,
    Credit,
    Credited,
)
from swarm.rollouts import GroupId
from swarm.simulation.world import SimulatedWorld
from swarm.transport.base import Transport
from swarm.wire import codec
from swarm.wire.messages import (
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    TRAINED_MAX,
    Hello,
)
from tests.support import run
from tests.unit.monitor_records import snapshot
from tests.unit.test_discovery import EPOCH_S, RUN_ID, Member, run_inline, simulate

ANN, BEN = PeerId("ann"), PeerId("ben")


def ids(count: int, start: int = 0) -> list[GroupId]:
    return [GroupId(number.to_bytes(32)) for number in range(start, start + count)]


def test_a_group_counts_once_for_each_taker_and_only_if_it_was_made_and_sent() -> None:
    credit = Credit()
    made = ids(4)
    credit.made(made)
    credit.hear(ANN, made)
    assert credit.session == Credited(0, 0)  # nobody can have trained on what was not sent
    credit.sent([*made[:3], *ids(1, start=90)])
    for _ in range(3):
        credit.hear(ANN, made)
    credit.hear(BEN, [*made[:1], *ids(5, start=90)])
    assert credit.session == credit.ever == Credited(groups=3, peers=2)
    assert (credit.of(ANN), credit.of(BEN), credit.of(PeerId("cat"))) == (3, 1, 0)


def test_whatever_many_keys_claim_memory_is_bounded_and_groups_are_those_that_were_made() -> None:
    credit = Credit()
    made = ids(2 * MADE_MAX)
    credit.made(made, sent=True)
    assert list(credit._made) == made[MADE_MAX:]
    for number in range(TAKERS_MAX + 50):
        credit.hear(PeerId(f"key {number}"), made[-TRAINED_MAX:])
    assert all(len(takers or ()) <= TAKERS_PER_GROUP_MAX for takers in credit._made.values())
    assert credit.session.groups == TRAINED_MAX
    for number in range(2 * TAKERS_MAX):
        credit.hear(PeerId(f"other key {number}"), [made[number % MADE_MAX + MADE_MAX]])
    assert credit.ever.peers == len(credit._takers) == TAKERS_MAX
    for number in range(2 * TRAINED_KEPT):
        credit.trained(ANN, made[number % len(made)])
    assert len(credit._trained) == TRAINED_KEPT


def test_a_hello_tells_the_makers_own_groups_first_then_a_few_others() -> None:
    credit = Credit()
    for each in ids(10):
        credit.trained(ANN, each)
    for each in ids(100, start=10):
        credit.trained(BEN, each)
    assert credit.told_to(BEN) == tuple(reversed(ids(100, start=10)))[:TRAINED_MAX]
    told = credit.told_to(ANN)
    assert told[:10] == tuple(reversed(ids(10)))
    assert len(told) == OTHERS_TOLD_MAX


async def kept(path: Path) -> Credited:
    credit = Credit(path)
    before = credit.ever
    assert credit.session == Credited()
    credit.made(ids(3), sent=True)
    credit.hear(ANN, ids(3))
    credit.hear(PeerId(f"of {before.groups}"), ids(1))
    await credit.save_if_changed(run_inline)
    return credit.ever


def test_totals_outlive_the_process_and_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "credit.json"
    assert run(kept, path) == Credited(groups=3, peers=2)
    assert run(kept, path) == Credited(groups=6, peers=3)
    assert path.stat().st_mode & 0o777 == 0o600
    for damaged in ("", "[]", '{"groups": "x"}', '{"groups": 1, "peers": 3}'):
        path.write_text(damaged)
        assert Credit(path).ever == Credited()


async def saves(path: Path) -> bool:
    credit = Credit(path)
    credit.made(ids(1), sent=True)
    credit.hear(ANN, ids(1))
    await credit.save_if_changed(run_inline)
    return credit._changed


def test_a_disk_that_takes_nothing_ends_no_node_and_is_tried_again(tmp_path: Path) -> None:
    assert run(saves, tmp_path / "missing" / "credit.json")
    assert not run(saves, tmp_path / "credit.json")


# --- over hellos ---------------------------------------------------------------------------------


def test_two_peers_tell_each_other_by_their_hellos() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        maker = Member(world, 0)
        taker = Member(world, 1, (maker.address,))
        maker.ledger.credit.made(ids(5), sent=True)
        for each in ids(3):
            taker.ledger.train(maker.transport.peer_id, each)
        for member in (maker, taker):
            nursery.start_soon(member.discovery.run)
        await trio.sleep(20)
        assert maker.ledger.credit.session == Credited(groups=3, peers=1)
        assert maker.ledger.credit.of(taker.transport.peer_id) == 3
        assert taker.ledger.account(maker.transport.peer_id).trained == 3
        assert taker.ledger.credit.session == Credited()

    simulate(2, body)


def claim(world: SimulatedWorld, host: int, groups: tuple[bytes, ...], run_id: str) -> bytes:
    body = Hello(
        type="hello", packages=(), run_id=run_id, instance=bytes(16), started_at_s=EPOCH_S,
        sent_at_s=EPOCH_S, agent="liar", addresses=(), trained=groups,
    )  # fmt: skip
    return codec.sign_hello(body, world.identities[host])


async def ask(liar: Transport, peer: PeerId, record: bytes) -> None:
    await liar.request(
        peer, HELLO_PROTOCOL, record, timeout_s=5.0, response_bytes_max=HELLO_REPLY_BYTES_MAX
    )


def test_false_claims_have_no_effect() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        maker = Member(world, 0)
        nursery.start_soon(maker.discovery.run)
        maker.ledger.credit.made(ids(5), sent=True)
        liar, peer = world.join(1), maker.transport.peer_id
        await liar.connect(maker.address, timeout_s=5.0)
        await ask(liar, peer, claim(world, 1, tuple(ids(TRAINED_MAX, start=500)), RUN_ID))
        await ask(liar, peer, claim(world, 1, tuple(ids(5)), "another-run"))
        with pytest.raises(RequestRefused):  # in the name of another
            await ask(liar, peer, claim(world, 2, tuple(ids(5)), RUN_ID))
        assert maker.ledger.credit.session == Credited()
        assert maker.ledger.account(liar.peer_id).rejected[Reject.WRONG_PRODUCER] == 1

    simulate(3, body)


def test_a_claim_that_is_repeated_counts_once_and_a_flood_is_refused() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        maker = Member(world, 0)
        nursery.start_soon(maker.discovery.run)
        maker.ledger.credit.made(ids(5), sent=True)
        liar, peer = world.join(1), maker.transport.peer_id
        await liar.connect(maker.address, timeout_s=5.0)
        record = claim(world, 1, (*ids(2), *ids(62, start=700)), RUN_ID)
        assert len(record) < HELLO_BYTES_MAX
        refused = 0
        for _ in range(60):
            try:
                await ask(liar, peer, record)
            except RequestRefused:
                refused += 1
        assert maker.ledger.credit.session == Credited(groups=2, peers=1)
        assert refused > 20

    simulate(2, body)


# --- for people ----------------------------------------------------------------------------------


def test_status_says_who_trained_on_the_nodes_groups() -> None:
    lately = snapshot(credited_groups=12, credited_by=3)
    both = replace(lately, credited_groups_ever=340, credited_by_ever=17)
    told = "12 of your groups were trained on by 3 peers"
    assert credit_lines(replace(lately, credited_groups_ever=12)) == [("to others", told)]
    ever = "340 of your groups were trained on by 17 peers since its first start"
    assert credit_lines(both) == [("to others", f"{told}; {ever}")]
    assert told in render_status(both)
    assert "no peer has told yet" in credit_lines(snapshot())[0][1]
    assert credit_lines(snapshot(role="learner")) == []
