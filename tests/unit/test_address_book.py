"""The address book: back-off without forgetting, and hearsay that nobody can mean."""

import os
from pathlib import Path
from random import Random

import pytest
import trio

from swarm.identity import Identity, PeerId
from swarm.limits.address_blocks import GLOBAL, LOCAL, NOWHERE, THIS_MACHINE, path_of
from swarm.limits.dial_backoff import DIAL_AGAIN_MAX_S, DIAL_AGAIN_S
from swarm.peers.address_book import (
    BOOK_PEERS_MAX,
    AddressBook,
    plausible,
    reach_of,
)
from swarm.transport.libp2p.addresses import parse_peer_address

ANN, BEN = PeerId("ann"), PeerId("ben")


def test_a_peer_that_does_not_answer_is_dialled_ever_more_rarely_and_never_forgotten() -> None:
    book = AddressBook()
    book.learn(ANN, ["/memory/1/p2p/ann"], worked=True)
    now_s, pauses = 0.0, []
    for _ in range(200):
        assert book.draw(4, (), Random(0), now_s) == [ANN]
        book.failed(ANN, now_s)
        assert book.draw(4, (), Random(0), now_s) == []
        due_s = book.entries[ANN].due_s
        pauses.append(due_s - now_s)
        now_s = due_s
    assert pauses[:3] == [DIAL_AGAIN_S, 2 * DIAL_AGAIN_S, 4 * DIAL_AGAIN_S]
    assert max(pauses) == pauses[-1] == DIAL_AGAIN_MAX_S
    book.learn(ANN, [], worked=True)
    assert book.entries[ANN].failures == 0


def test_keys_of_one_address_that_name_other_networks_as_theirs_push_out_nobody() -> None:
    book, honest = AddressBook(), [PeerId(f"honest {number}") for number in range(40)]
    for number, peer in enumerate(honest):
        ip = f"81.2.{number // 4}.{number % 4 + 1}"
        book.learn(peer, [f"/ip4/{ip}/tcp/4001"], worked=True, path=path_of(ip))
    for number in range(BOOK_PEERS_MAX + 100):
        claimed = f"/ip4/{60 + number % 20}.{100 + number // 20}.1.1/tcp/4001"
        greedy = PeerId(f"greedy {number}")
        book.learn(greedy, [claimed], worked=True, path=path_of("93.184.216.34"))
    assert book.entries.keys() >= set(honest)


def test_hearsay_is_forgotten_at_the_first_failure() -> None:
    book = AddressBook()
    book.learn(BEN, ["/memory/1/p2p/ben"], worked=False)
    book.failed(BEN, 0.0)
    assert not book.hearsay


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("/ip4/8.8.8.8/tcp/1", GLOBAL),
        ("/ip6/2606:4700::1/tcp/1", GLOBAL),
        ("/dns/node.example.org/tcp/1", GLOBAL),
        ("/memory/7", GLOBAL),
        ("/ip4/192.168.1.1/tcp/1", LOCAL),
        ("/ip4/10.0.0.1/tcp/1", LOCAL),
        ("/ip4/100.64.0.1/tcp/1", LOCAL),
        ("/ip4/169.254.169.254/tcp/80", LOCAL),
        ("/ip6/fe80::1/tcp/1", LOCAL),
        ("/ip6/fe80::1%eth0/tcp/1", NOWHERE),
        ("/ip6/fd00::1/tcp/1", LOCAL),
        ("/ip6/::ffff:192.168.1.1/tcp/1", LOCAL),
        ("/ip4/127.0.0.53/tcp/1", THIS_MACHINE),
        ("/ip6/::1/tcp/1", THIS_MACHINE),
        ("/ip6/::ffff:127.0.0.1/tcp/1", THIS_MACHINE),
        ("/ip4/0.0.0.0/tcp/1", NOWHERE),
        ("/ip4/224.0.0.1/tcp/1", NOWHERE),
        ("/ip4/nonsense/tcp/1", NOWHERE),
        ("/ip6/64:ff9b::7f00:1/tcp/1", THIS_MACHINE),  # NAT64
        ("/ip6/64:ff9b::a00:1/tcp/1", LOCAL),
        ("/ip6/64:ff9b::808:808/tcp/1", GLOBAL),
        ("/ip6/2002:7f00:1::/tcp/1", THIS_MACHINE),  # 6to4
        ("/ip6/2002:c0a8:101::1/tcp/1", LOCAL),
        ("ip4/127.0.0.1/tcp/1", NOWHERE),
        ("//ip4/127.0.0.1/tcp/1", NOWHERE),
        ("/ip4//127.0.0.1/tcp/1", NOWHERE),
        ("/ip4/8.8.8.8//tcp/1", NOWHERE),
        ("/ip4/8.8.8.8/tcp/+1", NOWHERE),
        ("/ip4/8.8.8.8/udp/1", NOWHERE),
        ("dns4/localhost/tcp/1", NOWHERE),
        ("//dns4/localhost/tcp/1", NOWHERE),
        ("/unix/socket", NOWHERE),
        ("/ip4/127.0.0.1/tcp/1/p2p/hub/p2p-circuit/p2p/ann", THIS_MACHINE),
        ("/ip4/10.0.0.1/tcp/1/p2p/hub/p2p-circuit/p2p/ann", LOCAL),
        ("/p2p/hub/p2p-circuit/p2p/ann", NOWHERE),
        ("/ip4/8.8.8.8/tcp/1/ip4/127.0.0.1/tcp/1/p2p/ann", NOWHERE),
        ("/ip4/8.8.8.8/tcp/1/p2p/r1/p2p-circuit/p2p/r2/p2p-circuit/p2p/ann", NOWHERE),
    ],
)
def test_from_how_far_an_address_can_be_dialled(address: str, reach: int) -> None:
    assert reach_of(address) == reach


def test_nobody_sends_us_into_our_own_network_from_outside() -> None:
    public, local, machine = "/ip4/8.8.8.8/tcp/1", "/ip4/192.168.1.1/tcp/1", "/ip4/127.0.0.1/tcp/1"
    everywhere = (public, local, machine, "/ip4/0.0.0.0/tcp/1")
    assert plausible(everywhere, "9.9.9.9") == (public,)
    assert plausible(everywhere, None) == (public,)
    assert plausible(everywhere, "192.168.1.7") == (public, local)
    assert plausible(everywhere, "127.0.0.1") == (public, local, machine)


@pytest.mark.parametrize("teller_ip", ["9.9.9.9", "192.168.1.7", "127.0.0.1", None])
def test_no_name_is_looked_up_because_a_peer_says_so(teller_ip: str | None) -> None:
    names = ("/dns4/localhost/tcp/1", "/dns/x.example/tcp/1", "/dnsaddr/x.example")
    strange = ("dns4/localhost/tcp/1", "//dns4/localhost/tcp/1", "/dns4//localhost/tcp/1")
    assert plausible(strange, teller_ip) == ()
    relayed = f"/dns6/x.example/tcp/1/p2p/{ANN}/p2p-circuit/p2p/{ANN}"
    assert plausible((*names, relayed), teller_ip) == ()


@pytest.mark.parametrize("teller_ip", ["9.9.9.9", "192.168.1.7", None])
@pytest.mark.parametrize(
    "address",
    [
        "ip4/127.0.0.1/tcp/22",
        "//ip4/127.0.0.1/tcp/22",
        "///ip6/::1/tcp/22",
        "/ip6/64:ff9b::7f00:1/tcp/22",
        "/ip4/127.0.0.1/tcp/22/p2p/{ann}/p2p-circuit",
        "//ip4/127.0.0.1/tcp/22/p2p/{ann}/p2p-circuit",
    ],
)
def test_no_spelling_sends_us_to_ourselves(address: str, teller_ip: str | None) -> None:
    """Each is one that the parser below takes, as though it were written as it should be."""
    ann = Identity(b"a" * 32).peer_id
    where, relayed, _ = address.format(ann=ann).partition("/p2p-circuit")
    text = where if relayed else f"{where}/p2p/{ann}"
    assert parse_peer_address(text)
    assert plausible([f"{where}{relayed}/p2p/{ann}"], teller_ip) == ()


def test_what_is_saved_is_on_the_disk_before_it_takes_the_old_ones_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "peers.json"
    path.write_text("old")
    synced: list[int] = []
    sync = os.fsync

    def note(file: int) -> None:
        sync(file)
        synced.append(os.fstat(file).st_size)
        assert path.read_text() == "old"

    monkeypatch.setattr(os, "fsync", note)
    book = AddressBook(path)
    book.learn(ANN, ["/memory/1"], worked=True)
    trio.run(book.save_if_changed, trio.to_thread.run_sync)
    assert synced == [path.stat().st_size]
    assert AddressBook.load(path).addresses(ANN) == ("/memory/1",)
