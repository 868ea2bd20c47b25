"""One suite for all that strangers fill: whoever has one address and keys without number keeps no
other out, neither its neighbours nor anybody elsewhere, and nothing grows."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import trio

from node.system.bounded_server import CLIENTS_MAX
from swarm.errors import Reject
from swarm.exchange.adverts import AdvertCache
from swarm.exchange.offers import OfferLimits, OfferTable
from swarm.identity import PeerId
from swarm.limits.address_blocks import path_of
from swarm.limits.bounded_table import BoundedTable
from swarm.peers.address_book import BOOK_PEERS_MAX, HEARSAY_PEERS_MAX, AddressBook
from swarm.peers.connection_gater import CONNECTION_LIMITS
from swarm.peers.dht import BUCKET_PEERS_MAX, ENTRIES_MAX, PROVIDERS_PER_KEY_MAX, Store, Table
from swarm.peers.reputation import Ledger
from swarm.telemetry.dashboard.page_server import CONNECTIONS_MAX, STREAMS_MAX, Board
from swarm.transport.connection_slots import HANDSHAKES_MAX, INBOUND_MAX, ConnectionSlots
from swarm.transport.libp2p import relay
from swarm.wire.messages import AdvertBody, AdvertEntry
from tests.support import run

GREEDY_KEYS = 1_000
NEIGHBOURS = 3
RUN_KEY = bytes(32)

Enter = Callable[[str, str], Any]
"""Somebody, at an IP address, takes a slot."""


@dataclass(frozen=True, slots=True)
class User:
    """What strangers fill: how to come in, who is in, and how many there may be."""

    enter: Enter
    inside: Callable[[], Collection[str]]
    most: int


def plain(table: BoundedTable[str, None], most: int) -> User:
    return User(lambda name, ip: table.put(name, None, path_of(ip)), table.keys, most)


def slots(*, inbound: bool) -> User:
    """Connections, with the shares that a node has."""
    made, held = ConnectionSlots(), {}
    made.limits = CONNECTION_LIMITS

    def enter(name: str, ip: str) -> None:
        slot = made.admit(PeerId(name), ip, inbound=inbound)
        if slot is not None:
            held[name] = slot

    return User(
        enter, lambda: [n for n, p in held.items() if not p.scope.cancel_called], INBOUND_MAX
    )


def handshakes() -> User:
    made, held = ConnectionSlots(), {}

    def enter(name: str, ip: str) -> None:
        slot = made.begin_handshake(ip)
        if slot is not None:
            held[name] = slot

    return User(
        enter, lambda: [n for n, p in held.items() if not p.scope.cancel_called], HANDSHAKES_MAX
    )


def of_run() -> User:
    store = Store()
    return User(
        lambda name, ip: store.put(RUN_KEY, PeerId(name), ["x"], 0.0, path_of(ip)),
        lambda: [peer for peer, _ in store.members(RUN_KEY, 1.0)],
        PROVIDERS_PER_KEY_MAX,
    )


def of_all_runs() -> User:
    store = Store()

    def enter(name: str, ip: str) -> None:
        for number in range(5):
            key = f"{name} {number if name.startswith('greedy') else 0}".encode()
            store.put(key, PeerId(name), ["x"], 0.0, path_of(ip))

    return User(enter, lambda: [p for run_ in store.runs.values() for p in run_], ENTRIES_MAX)


def bucket() -> User:
    """Peers whose distance from us is about the same."""
    table = Table(bytes(32))
    own = table._bucket(PeerId("any"))
    table._bucket = lambda peer: own  # type: ignore[method-assign]
    return User(
        lambda name, ip: table.add(PeerId(name), ["x"], path_of(ip)), own.keys, BUCKET_PEERS_MAX
    )


def book(*, worked: bool) -> User:
    made = AddressBook()

    def enter(name: str, ip: str) -> None:
        made.learn(PeerId(name), [f"/ip4/{ip}/tcp/1"], worked=worked, told_by="the network")

    return User(
        enter,
        made.entries.keys if worked else made.hearsay.keys,
        BOOK_PEERS_MAX if worked else HEARSAY_PEERS_MAX,
    )


def advert(producer: str) -> AdvertBody:
    entry = AdvertEntry(group_id=bytes(32), size_bytes=9)
    return AdvertBody(
        type="advert", run_id="run", producer=producer, round=1, addresses=(), groups=(entry,),
        created_at_s=1, expires_at_s=99,
    )  # fmt: skip


def adverts() -> User:
    cache = AdvertCache(64, 4)
    return User(
        lambda name, ip: cache.put(name.encode(), name.encode(), advert(name), path_of(ip)),
        lambda: [each.producer for _, each in cache._adverts.values()],
        64,
    )


def offers() -> User:
    table = OfferTable(OfferLimits(producers_max=64))
    return User(
        lambda name, ip: table.hear(advert(name), PeerId(name), 0.0, path_of(ip)),
        table._producers.keys,
        64,
    )


def accounts() -> User:
    """Whose groups were accepted is not forgotten for those who lie."""
    ledger = Ledger(64)

    def enter(name: str, ip: str) -> None:
        if name.startswith("greedy"):
            ledger.reject(PeerId(name), Reject.MALFORMED)
        else:
            ledger.accept(PeerId(name))

    return User(enter, ledger.peers, 64)


def a_relay() -> Any:
    return relay.Relay(lambda peer: None, lambda peer: None, lambda: True, lambda *_: None)


def reservations() -> User:
    return plain(a_relay()._reserved, relay.RESERVATIONS_MAX)


def circuits() -> User:
    table = a_relay()._by_asker
    return User(
        lambda name, ip: table.put(name, None, (*path_of(ip), name)), table.keys, relay.CIRCUITS_MAX
    )


def watchers() -> User:
    table = Board().watchers
    return User(
        lambda name, ip: table.put(name, None, path_of(ip)),
        lambda: [str(each) for each in table],
        STREAMS_MAX,
    )


USERS: dict[str, Callable[[], User]] = {
    "connections to us": lambda: slots(inbound=True),
    "our own connections": lambda: slots(inbound=False),
    "handshakes": handshakes,
    "providers of a run": of_run,
    "runs of the hash table": of_all_runs,
    "a bucket of the hash table": bucket,
    "addresses that worked": lambda: book(worked=True),
    "hearsay": lambda: book(worked=False),
    "adverts": adverts,
    "offers": offers,
    "accounts": accounts,
    "reservations at a relay": reservations,
    "circuits of a relay": circuits,
    "clients of the page": lambda: plain(BoundedTable(CONNECTIONS_MAX), CONNECTIONS_MAX),
    "streams of the page": watchers,
    "clients of a node's figures": lambda: plain(
        BoundedTable(CLIENTS_MAX, newest_first=True), CLIENTS_MAX
    ),
}


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("block", ["203.0.113", "192.168.7"])
@pytest.mark.parametrize("honest_first", [True, False])
def test_one_greedy_address_keeps_no_other_out(name: str, block: str, honest_first: bool) -> None:
    async def main() -> None:
        user = USERS[name]()
        honest = {f"neighbour {n}": f"{block}.{n + 1}" for n in range(NEIGHBOURS)}
        honest["elsewhere"] = "198.51.100.1"

        def let_honest_in() -> None:
            for who, ip in honest.items():
                user.enter(who, ip)

        if honest_first:
            let_honest_in()
        for number in range(GREEDY_KEYS):
            user.enter(f"greedy {number}", f"{block}.200")
        if not honest_first:
            let_honest_in()
        inside = set(user.inside())
        assert inside >= honest.keys()
        assert len(inside) <= user.most
        assert any(each.startswith("greedy") for each in inside)  # nobody else wants its slots
        await trio.lowlevel.checkpoint()

    run(main, virtual=True)
