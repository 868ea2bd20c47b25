"""Membership on a simulated network: finding peers, keeping them, and one process for one key."""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest
import trio

from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.errors import IdentityInUse, Reject
from swarm.identity import Identity, PeerId
from swarm.peers.address_book import HEARSAY_PEERS_MAX, AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.discovery import VERSION_NOTES_MAX, Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.base import ServeLimits
from swarm.transport.memory.network import MemoryTransport
from swarm.wire import codec
from swarm.wire.messages import (
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    KNOWN_PEERS_MAX,
    Hello,
    HelloReply,
    KnownPeer,
    PackageBody,
)

LAN = LinkProfile(latency_s=0.02)
RUN_ID = "sums-1"


def now_s() -> float:
    return EPOCH_S + trio.current_time()


class Member:
    """One host with discovery on it; `start` it in a nursery."""

    def __init__(
        self,
        world: SimulatedWorld,
        host: int,
        bootstrap: tuple[str, ...] = (),
        *,
        run_id: str = RUN_ID,
        book: AddressBook | None = None,
        packages: dict[str, str] | None = None,
    ) -> None:
        self.book = book or AddressBook()
        self.ledger = Ledger()
        self.transport = world.join(host)
        self.discovery = Discovery(
            NodeInfo(
                run_id,
                "test",
                world.identities[host],
                world.rng(f"instance/{host}").randbytes(16),
                packages=packages or {},
            ),
            bootstrap,
            self.book,
            ConnectionGater(self.transport, self.ledger),
            now_s=now_s,
            rng=world.rng(f"discovery/{host}"),
            run_sync=run_inline,
        )

    @property
    def address(self) -> str:
        return self.transport.addresses()[0]


def simulate(hosts: int, body: Callable[[SimulatedWorld, trio.Nursery], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with open_world(1, hosts, LAN) as world, trio.open_nursery() as nursery:
            result = await body(world, nursery)
            nursery.cancel_scope.cancel()
            return result

    return deterministic_run(main, seed=1)


def test_peers_of_one_bootstrap_peer_find_each_other() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        first = Member(world, 0)
        others = [Member(world, host, (first.address,)) for host in range(1, 6)]
        for member in (first, *others):
            nursery.start_soon(member.discovery.run)
        await trio.sleep(40)
        for member in (first, *others):
            assert len(member.discovery.peers) == 5
            assert not member.discovery.notes

    simulate(6, body)


def test_an_unreachable_bootstrap_peer_is_noted_and_tried_again() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        first, late = Member(world, 0), Member(world, 1)
        address = late.address
        late.transport.close()
        first.discovery._bootstrap = (address,)
        nursery.start_soon(first.discovery.run)
        await trio.sleep(20)
        assert address in first.discovery.notes[0]
        nursery.start_soon(Member(world, 1).discovery.run)
        await trio.sleep(20)
        assert first.discovery.notes == []
        assert len(first.discovery.peers) == 1

    simulate(2, body)


def test_the_address_book_brings_a_node_back_without_any_bootstrap_peer(tmp_path: Any) -> None:
    path = tmp_path / "addresses.json"

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        bootstrap = Member(world, 0)
        friend = Member(world, 1, (bootstrap.address,))
        own = Member(world, 2, (bootstrap.address,), book=AddressBook(path))
        async with trio.open_nursery() as first_life:
            nursery.start_soon(friend.discovery.run)
            first_life.start_soon(bootstrap.discovery.run)
            first_life.start_soon(own.discovery.run)
            await trio.sleep(30)
            first_life.cancel_scope.cancel()
        bootstrap.transport.close()
        own.transport.close()
        await trio.sleep(5)
        again = Member(world, 2, (bootstrap.address,), book=AddressBook.load(path))
        nursery.start_soon(again.discovery.run)
        await trio.sleep(30)
        assert world.peer_id(1) in again.discovery.peers

    simulate(3, body)


def test_a_node_that_was_offline_for_long_has_forgotten_nobody() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        lonely = Member(world, 0)
        nursery.start_soon(lonely.discovery.run)
        async with trio.open_nursery() as before:
            for host in (1, 2):
                before.start_soon(Member(world, host, (lonely.address,)).discovery.run)
            await trio.sleep(30)
            before.cancel_scope.cancel()
        world.crash(1)
        world.crash(2)
        await trio.sleep(1800)
        assert not lonely.discovery.peers
        for host in (1, 2):  # they do not know where the lonely one is
            nursery.start_soon(Member(world, host).discovery.run)
        await trio.sleep(30)
        assert len(lonely.discovery.peers) == 2

    simulate(3, body)


def test_a_peer_of_another_run_that_asks_first_and_leaves_is_noted() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        stranger = Member(world, 0, run_id="other-1")
        own = Member(world, 1, (stranger.address,))
        await own.discovery._serve_hello(
            world.peer_id(0), stranger.discovery._own_hello(world.peer_id(1))
        )
        assert "another run, other-1" in own.discovery.notes[0]
        assert own.discovery.meets_strangers

    simulate(2, body)


def test_a_peer_of_another_run_is_left_noted_and_taken_back_when_it_comes_over() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        stranger = Member(world, 0, run_id="other-1")
        own = Member(world, 1, (stranger.address,))
        async with trio.open_nursery() as first_life:
            first_life.start_soon(stranger.discovery.run)
            nursery.start_soon(own.discovery.run)
            await trio.sleep(20)
            assert not own.discovery.peers
            assert not own.transport.peers()
            assert "another run" in own.discovery.notes[0]
            assert own.ledger.rejected[Reject.OTHER_RUN] > 0
            first_life.cancel_scope.cancel()
        world.crash(0)
        nursery.start_soon(Member(world, 0, (own.address,)).discovery.run)
        await trio.sleep(20)
        assert len(own.discovery.peers) == 1
        assert own.discovery.notes == []

    simulate(2, body)


# --- one process for one key -------------------------------------------------------------------


class Informer:
    """A peer that answers each hello with a record of its choosing."""

    def __init__(self, world: SimulatedWorld, host: int, known: tuple[KnownPeer, ...] = ()) -> None:
        self.transport: MemoryTransport = world.join(host)
        self.record: bytes | None = None
        self.known = known
        self.asked = 0
        self.transport.serve(
            HELLO_PROTOCOL, self.answer, ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX)
        )

    async def answer(self, peer: PeerId, payload: bytes) -> bytes:
        self.asked += 1
        reply = HelloReply(
            type="hello_reply", packages=(),
            run_id=RUN_ID, agent="test", addresses=self.transport.addresses(),
            known_peers=self.known, other_hello=self.record,
        )  # fmt: skip
        return codec.encode(reply)


def hello(identity: Identity, *, started: float, sent: float) -> bytes:
    body = Hello(
        type="hello", packages=(), run_id=RUN_ID, instance=bytes(16), started_at_s=int(started),
        sent_at_s=int(sent), agent="test", addresses=(),
    )  # fmt: skip
    return codec.sign_hello(body, identity)


def stops(record_of: Callable[[SimulatedWorld], bytes]) -> tuple[bool, Ledger]:
    """Whether a node stops that is shown this record, and what it counted."""

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> tuple[bool, Ledger]:
        informer = Informer(world, 0)
        await trio.sleep(100)
        own = Member(world, 1, (informer.transport.addresses()[0],))
        informer.record = record_of(world)
        stopped = False
        with trio.move_on_after(20):
            try:
                await own.discovery.run()
            except* IdentityInUse as group:
                stopped = own.transport.peer_id in str(group.exceptions[0])
        assert informer.asked
        return stopped, own.ledger

    return simulate(3, body)  # type: ignore[no-any-return]


def test_a_newcomer_stops_where_an_older_process_is_alive_under_its_key() -> None:
    stopped, _ = stops(lambda w: hello(w.identities[1], started=EPOCH_S, sent=EPOCH_S + 110))
    assert stopped


def test_what_our_own_past_said_stops_nobody() -> None:
    stopped, ledger = stops(lambda w: hello(w.identities[1], started=EPOCH_S, sent=EPOCH_S + 100))
    assert not stopped
    assert not ledger.rejected


def test_the_older_of_two_goes_on() -> None:
    record = EPOCH_S + 105
    stopped, _ = stops(lambda w: hello(w.identities[1], started=record, sent=record + 5))
    assert not stopped


def test_nobody_can_be_stopped_by_a_record_of_another_key() -> None:
    def forged(world: SimulatedWorld) -> bytes:
        return hello(world.identities[2], started=EPOCH_S, sent=EPOCH_S + 110)

    stopped, ledger = stops(forged)
    assert not stopped
    assert ledger.rejected[Reject.MALFORMED] > 0


def test_nobody_can_be_stopped_by_bytes_that_are_no_proof() -> None:
    def broken(world: SimulatedWorld) -> bytes:
        record = hello(world.identities[1], started=EPOCH_S, sent=EPOCH_S + 110)
        return record.replace(record[-64:], bytes(64))

    stopped, ledger = stops(broken)
    assert not stopped
    assert ledger.rejected


def test_two_processes_with_one_key_are_told_apart_by_whom_they_meet() -> None:
    """The honest path that leads to the proof: a third peer keeps both hellos."""

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        third = Member(world, 0)
        nursery.start_soon(third.discovery.run)
        serve = third.discovery._record_instance
        twin = world.identities[1]
        old = hello(twin, started=EPOCH_S, sent=EPOCH_S + 1)
        new = hello(twin, started=EPOCH_S, sent=EPOCH_S + 2)
        assert serve(twin.peer_id, b"a" * 16, old) is None
        assert serve(twin.peer_id, b"a" * 16, new) is None
        assert serve(twin.peer_id, b"b" * 16, b"x") == new
        assert serve(twin.peer_id, b"a" * 16, new) == b"x"

    simulate(2, body)


# --- bounds ------------------------------------------------------------------------------------


def test_hearsay_is_bounded_and_its_flood_ends_nothing() -> None:
    def names(seed: int) -> tuple[KnownPeer, ...]:
        rng = Random(seed)
        return tuple(
            KnownPeer(
                peer_id=(peer := Identity(rng.randbytes(32)).peer_id),
                addresses=(f"/memory/{rng.randrange(10**6, 10**7)}/p2p/{peer}",),
            )
            for _ in range(KNOWN_PEERS_MAX)
        )

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        informer = Informer(world, 0)
        own = Member(world, 1, (informer.transport.addresses()[0],))
        nursery.start_soon(own.discovery.run)
        for seed in range(30):
            informer.known = names(seed)
            await trio.sleep(10)
        assert informer.asked >= 20
        assert len(own.book.entries) == 1
        assert 0 < len(own.book.hearsay) <= HEARSAY_PEERS_MAX

    simulate(2, body)


def test_a_book_that_is_damaged_is_an_empty_one(tmp_path: Any) -> None:
    path = tmp_path / "addresses.json"
    for text in ("", "[1]", '{"a": 1}', '{"a"', "\x00"):
        path.write_text(text)
        assert not AddressBook.load(path).entries
    book = AddressBook(path)
    book.learn(PeerId("peer"), ["/memory/1/p2p/peer"], worked=True)
    trio.run(book.save_if_changed, trio.to_thread.run_sync)
    assert AddressBook.load(path).entries[PeerId("peer")].addresses == ("/memory/1/p2p/peer",)


@pytest.mark.parametrize("worked", [True, False])
def test_hearsay_never_replaces_an_address_that_worked(worked: bool) -> None:
    book = AddressBook()
    book.learn(PeerId("peer"), ["good"], worked=True)
    book.learn(PeerId("peer"), ["new"], worked=worked)
    assert book.entries[PeerId("peer")].addresses == (("new",) if worked else ("good",))


def test_other_versions_of_a_package_are_told_in_one_line_for_each_peer() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        own = Member(world, 0, packages={"reasoning-gym": "0.1.25", "mine": "1"})
        same = Member(world, 1, (own.address,), packages={"reasoning-gym": "0.1.25", "other": "7"})
        other = Member(
            world, 2, (own.address,), run_id="other-1", packages={"reasoning-gym": "0.1.24"}
        )
        for member in (own, same, other):
            nursery.start_soon(member.discovery.run)
        await trio.sleep(60)
        (told,) = own.discovery.notes
        assert str(world.peer_id(2)) in told
        assert "has reasoning-gym 0.1.24, and this run is of reasoning-gym 0.1.25" in told
        assert "pip install reasoning-gym==0.1.25)" in told
        assert not same.discovery.notes or "mine" not in same.discovery.notes[0]
        assert any("run is of reasoning-gym 0.1.24" in note for note in other.discovery.notes)

    simulate(3, body)


def test_lines_about_versions_have_a_bound() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        own = Member(world, 0, packages={"a": "1"})
        for number in range(3 * VERSION_NOTES_MAX):
            peer = Identity(number.to_bytes(32)).peer_id
            own.discovery._compare(peer, [PackageBody(name="a", version="2")])
        assert len(own.discovery.notes) == VERSION_NOTES_MAX
        await trio.lowlevel.checkpoint()

    simulate(1, body)
