"""What strangers may cost a node's membership: bytes, time and places in its address book."""

from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from pydantic import ValidationError

from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.errors import RemoteProtocolError
from swarm.identity import Identity, PeerId
from swarm.limits.address_blocks import path_of
from swarm.peers import discovery
from swarm.peers.address_book import (
    BOOK_PEERS_MAX,
    HEARSAY_PEERS_MAX,
    HEARSAY_PER_TELLER_MAX,
    AddressBook,
)
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.discovery import (
    BOOTSTRAP_DIALS_MAX,
    DIAL_TIMEOUT_S,
    DIALS_AT_A_TIME_MAX,
    EXTRA_DIAL_S,
    HEARSAY_PER_REPLY_MAX,
    PEERS_WANTED,
    Discovery,
    NodeInfo,
)
from swarm.peers.reputation import Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.base import ServeLimits
from swarm.wire import codec
from swarm.wire.messages import (
    ADDRESSES_MAX,
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    KNOWN_PEERS_MAX,
    Hello,
    HelloReply,
    KnownPeer,
)
from tests.support import run

LAN = LinkProfile(latency_s=0.02)
RUN_ID = "sums-1"


def simulate(hosts: int, body: Callable[[SimulatedWorld, trio.Nursery], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with open_world(1, hosts, LAN) as world, trio.open_nursery() as nursery:
            result = await body(world, nursery)
            nursery.cancel_scope.cancel()
            return result

    return deterministic_run(main, seed=1)


def hello(addresses: tuple[str, ...]) -> Hello:
    return Hello(
        type="hello", packages=(), run_id=RUN_ID, instance=bytes(16), started_at_s=EPOCH_S,
        sent_at_s=EPOCH_S, agent="test", addresses=addresses,
    )  # fmt: skip


def long_addresses(peer: str) -> tuple[str, ...]:
    """As long as addresses may be that anybody dials: through a relay, at an IPv6 address."""
    relay = Identity(b"r" * 32).peer_id
    return tuple(
        f"/ip6/2606:4700:4700:1111:2222:3333:4444:{1000 + i}/tcp/65535/p2p/{relay}"
        f"/p2p-circuit/p2p/{peer}"
        for i in range(ADDRESSES_MAX)
    )


def member(world: SimulatedWorld, host: int, bootstrap: tuple[str, ...] = ()) -> Discovery:
    transport = world.join(host)
    return Discovery(
        NodeInfo(RUN_ID, "test", world.identities[host], bytes([host]) * 16),
        bootstrap,
        AddressBook(),
        ConnectionGater(transport, Ledger()),
        now_s=lambda: EPOCH_S + trio.current_time(),
        rng=world.rng(f"discovery/{host}"),
        run_sync=run_inline,
    )


# --- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["/dns4/\N{SNOWMAN}/tcp/1", "/ip4/1.2.3.4 /tcp/1", "/a\n", ""])
def test_an_address_is_printable_ascii(address: str) -> None:
    with pytest.raises(ValidationError):
        hello((address,))


def test_a_hello_with_other_addresses_is_the_peers_fault() -> None:
    own = Identity(b"a" * 32)
    body = hello(()).model_copy(update={"addresses": ("\N{GRINNING FACE}" * 256,)})
    with pytest.raises(RemoteProtocolError):
        codec.decode_hello(codec.sign_hello(body, own))


@pytest.mark.parametrize("limit", [HELLO_REPLY_BYTES_MAX, 8_000])
def test_no_legal_hellos_bring_our_reply_over_our_own_limit(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second limit stands for peers that find more to say than they can today."""
    monkeypatch.setattr(discovery, "HELLO_REPLY_BYTES_MAX", limit)

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        own = member(world, 0)
        nursery.start_soon(own.run)
        await trio.sleep(0.1)
        replies = []
        for host in range(1, KNOWN_PEERS_MAX + 3):
            guest = world.join(host)
            await guest.connect(own._transport.addresses()[0])
            record = codec.sign_hello(hello(long_addresses(guest.peer_id)), world.identities[host])
            answer = await guest.request(
                own._transport.peer_id, HELLO_PROTOCOL, record,
                timeout_s=5, response_bytes_max=HELLO_REPLY_BYTES_MAX,
            )  # fmt: skip
            assert len(answer) <= limit
            replies.append(codec.decode(answer, HelloReply, limit))
        assert replies[-1].known_peers

    simulate(KNOWN_PEERS_MAX + 3, body)


# --- time and places ---------------------------------------------------------------------------


class Talker:
    """A peer that names others of its choosing in each answer, or never answers."""

    def __init__(self, world: SimulatedWorld, host: int, *, silent: bool = False) -> None:
        self.transport = world.join(host)
        self.asked_at: list[float] = []
        self.known: Callable[[], tuple[KnownPeer, ...]] = tuple
        self.silent = silent
        self.transport.serve(
            HELLO_PROTOCOL, self.answer, ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX)
        )

    async def answer(self, peer: PeerId, payload: bytes) -> bytes:
        self.asked_at.append(trio.current_time())
        if self.silent:
            await trio.sleep_forever()
        return codec.encode(
            HelloReply(
                type="hello_reply", packages=(),
                run_id=RUN_ID, agent="test", known_peers=self.known(),
                addresses=self.transport.addresses(), other_hello=None,
            )
        )  # fmt: skip

    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.asked_at)]


def invented(rng: Random) -> tuple[KnownPeer, ...]:
    """As many peers as a reply may name, each with addresses where nobody ever answers."""
    found = []
    for _ in range(KNOWN_PEERS_MAX):
        peer = Identity(rng.randbytes(32)).peer_id
        number = rng.randrange(10**6, 10**8)
        addresses = tuple(f"/memory/{number + i}/p2p/{peer}" for i in range(ADDRESSES_MAX))
        found.append(KnownPeer(peer_id=peer, addresses=addresses))
    return tuple(found)


def test_silent_hearsay_neither_delays_hellos_nor_takes_places_of_peers_that_worked() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        rng = Random(1)
        liar = Talker(world, 0)
        liar.known = lambda: invented(rng)
        own = member(world, 1, liar.transport.addresses())
        worked = [Identity(rng.randbytes(32)).peer_id for _ in range(20)]
        for peer in worked:
            own._book.learn(peer, [f"/memory/99/p2p/{peer}"], worked=True)
        nursery.start_soon(own.run)
        await trio.sleep(60)
        assert max(liar.gaps_s()) < 6
        own._book.hearsay = AddressBook().hearsay
        for _ in range(100):
            own._learn_hearsay(PeerId("teller"), invented(rng))
        assert len(own._book.hearsay) == HEARSAY_PER_TELLER_MAX
        for number in range(100):
            own._learn_hearsay(PeerId(f"teller{number}"), invented(rng))
        assert len(own._book.hearsay) == HEARSAY_PEERS_MAX
        assert own._book.entries.keys() >= set(worked)

    simulate(2, body)


def test_a_peer_that_never_answers_delays_no_hello_to_others() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        silent, good = Talker(world, 0, silent=True), Talker(world, 1)
        bootstrap = (*silent.transport.addresses(), *good.transport.addresses())
        nursery.start_soon(member(world, 2, bootstrap).run)
        await trio.sleep(60)
        assert silent.asked_at
        assert max(good.gaps_s()) < 6

    simulate(3, body)


def test_dials_are_few_at_a_time_and_none_waits_for_ever() -> None:
    """Most bootstrap peers and all of the book never answer, and there are more of each than may
    be dialled at a time."""

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        rng = Random(1)
        nobody = [Identity(rng.randbytes(32)).peer_id for _ in range(60)]
        silent = [f"/memory/{100 + at}/p2p/{peer}" for at, peer in enumerate(nobody)]
        good = Talker(world, 0)
        own = member(world, 1, (*silent[:30], *good.transport.addresses()))
        for peer, address in zip(nobody[30:], silent[30:], strict=True):
            own._book.learn(peer, [address], worked=True)
        nursery.start_soon(own.run)
        most = 0
        for _ in range(1200):
            await trio.sleep(0.1)
            most = max(most, len(own._dialling))
        assert most <= DIALS_AT_A_TIME_MAX + BOOTSTRAP_DIALS_MAX
        assert most > DIALS_AT_A_TIME_MAX
        assert good.asked_at

    simulate(2, body)


def test_looking_around_is_one_of_the_dials_at_a_time() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        own = member(world, 0)
        for at in range(1, PEERS_WANTED + 1):
            await own._transport.connect(world.join(at).addresses()[0])
        named = [Identity(Random(at).randbytes(32)).peer_id for at in range(9)]
        own._book.learn(named[0], [f"/memory/100/p2p/{named[0]}"], worked=True)
        await trio.sleep(EXTRA_DIAL_S)
        own._dialling.update(named[-DIALS_AT_A_TIME_MAX:])
        own._dial_extra(nursery)
        assert len(own._dialling) == DIALS_AT_A_TIME_MAX
        own._dialling.pop()
        own._dial_extra(nursery)
        assert named[0] in own._dialling

    simulate(PEERS_WANTED + 1, body)


def test_one_reply_leaves_few_names() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        liar = Talker(world, 0)
        liar.known = lambda: invented(Random(1))
        own = member(world, 1, liar.transport.addresses())
        nursery.start_soon(own.run)
        await trio.sleep(3)
        assert len(liar.asked_at) == 1
        assert len(own._book.hearsay) == HEARSAY_PER_REPLY_MAX

    simulate(2, body)


def test_an_address_of_somebody_else_is_not_kept() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        victim, named = world.peer_id(2), world.peer_id(3)
        liar = Talker(world, 0)
        addresses = (f"/memory/2/p2p/{victim}", f"/memory/3/p2p/{named}", "/memory/3")
        liar.known = lambda: (KnownPeer(peer_id=named, addresses=addresses),)
        own = member(world, 1, liar.transport.addresses())
        nursery.start_soon(own.run)
        await trio.sleep(3)
        assert own._book.addresses(named) == (f"/memory/3/p2p/{named}",)

    simulate(4, body)


def test_one_peer_costs_a_dial_of_bounded_length_over_all_its_addresses() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> float:
        own = member(world, 0)
        (named, *_) = invented(Random(1))
        started = trio.current_time()
        await own._dial(PeerId(named.peer_id), own._choose_addresses(named.addresses))
        return trio.current_time() - started

    assert simulate(1, body) <= DIAL_TIMEOUT_S


def test_whoever_dials_us_gets_our_hello_within_a_second() -> None:
    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        own, guest = member(world, 0), Talker(world, 1)
        nursery.start_soon(own.run)
        await trio.sleep(1.5)
        await guest.transport.connect(own._transport.addresses()[0])
        connected_at = trio.current_time()
        await trio.sleep(1.2)
        assert guest.asked_at
        assert guest.asked_at[0] - connected_at < 1.2
        await trio.sleep(1.0)
        assert own._book.entries.size_of(path_of(world.ips[1])) == 1  # not where it says it is

    simulate(2, body)


def test_the_book_is_written_off_the_loop_and_only_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"
    calls: list[object] = []

    async def run_sync(function: Callable[..., object], *args: object) -> object:
        await trio.lowlevel.checkpoint()
        calls.append(function)
        return function(*args)

    async def main() -> None:
        book = AddressBook(path)
        await book.save_if_changed(run_sync)
        for _ in range(2):
            book.learn(PeerId("peer"), ["/memory/1/p2p/peer"], worked=True)
            await book.save_if_changed(run_sync)
        assert len(calls) == 1
        assert AddressBook.load(path).entries.keys() == {"peer"}
        for number in range(BOOK_PEERS_MAX):
            book.learn(PeerId(f"peer {number}"), [f"/memory/{number}"], worked=True)
        await book.save_if_changed(run_sync)
        assert len(calls) == 2
        entries = AddressBook.load(path).entries
        assert len(entries) == BOOK_PEERS_MAX
        assert "peer" not in entries, "the one that was heard of longest ago goes"

    run(main)


def test_a_node_saves_its_book_through_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "addresses.json"

    async def body(world: SimulatedWorld, nursery: trio.Nursery) -> None:
        friend = Talker(world, 0)
        own = member(world, 1, friend.transport.addresses())
        own._book.path = path
        nursery.start_soon(own.run)
        await trio.sleep(12)
        assert friend.transport.peer_id in AddressBook.load(path).entries

    simulate(2, body)
