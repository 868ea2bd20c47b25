"""Multicast DNS, over this machine's loopback interface."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import trio
import zeroconf

from swarm.identity import Identity, PeerId
from swarm.limits.bounded_table import BoundedTable
from swarm.peers import mdns
from swarm.peers.invite import JoinKey
from swarm.peers.mdns import LanUnavailable, announced, run_lan, tag_of
from tests.support import run

pytestmark = pytest.mark.integration

ANN, BEN, CAT = (Identity(letter * 32).peer_id for letter in (b"a", b"b", b"c"))
HERE = ["127.0.0.1"]
KEY = JoinKey(b"k" * 32)
FLOOD_NAMES = 6_000
PTR, IN, FLAGS_ANSWER = 12, 1, 0x8400  # as of RFC 6762


def address(peer: PeerId, number: int) -> str:
    return f"/ip4/192.168.7.{number}/tcp/4001/p2p/{peer}"


@pytest.fixture
def _multicast() -> None:
    """Some machines have no multicast on loopback; their tests are counted as not run."""
    try:
        zeroconf.Zeroconf(interfaces=HERE, ip_version=zeroconf.IPVersion.V4Only).close()
    except OSError as error:
        pytest.skip(f"no multicast on loopback: {error}")


@pytest.mark.usefixtures("_multicast")
def test_members_of_one_swarm_find_each_other_and_nobody_else() -> None:
    async def main() -> None:
        found: dict[PeerId, dict[PeerId, Sequence[str]]] = {ANN: {}, BEN: {}, CAT: {}}
        async with trio.open_nursery() as nursery:
            for number, (peer, tag) in enumerate([(ANN, "ours"), (BEN, "ours"), (CAT, "other")]):
                await nursery.start(
                    run_lan, peer, tag, [address(peer, number)], found[peer].__setitem__, HERE
                )
            with trio.fail_after(30):
                while not (found[ANN] and found[BEN]):  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert found[ANN] == {BEN: (address(BEN, 1),)}
            assert found[BEN] == {ANN: (address(ANN, 0),)}
            assert found[CAT] == {}
            nursery.cancel_scope.cancel()

    run(main)


def test_without_multicast_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**settings: object) -> None:
        raise OSError(19, "No such device")  # as from a machine without a network

    monkeypatch.setattr(zeroconf, "Zeroconf", refused)

    async def main() -> None:
        with pytest.raises(LanUnavailable, match="No such device"):
            await run_lan(ANN, "ours", [], lambda peer, where: None, HERE)

    run(main)


def test_a_tag_is_the_runs_and_tells_no_key() -> None:
    tags = {tag_of("a-1", None), tag_of("a-2", None), tag_of("a-1", KEY), tag_of("a-2", KEY)}
    assert len(tags) == 4
    assert all(len(tag) == mdns.TAG_CHARS for tag in tags)


def test_this_machines_own_addresses_are_not_for_others() -> None:
    other = ["/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1", "/ip6/::1/tcp/1"]
    assert announced([*other, "/ip4/10.0.0.1/tcp/1"]) == ("/ip4/10.0.0.1/tcp/1",)


def test_what_a_hostile_service_says_is_dropped() -> None:
    told: list[tuple[PeerId, Sequence[str]]] = []
    judge = mdns._Lan.__new__(mdns._Lan)
    judge._peer, judge._tag = ANN, "ours"
    judge._tell = lambda peer, where: told.append((peer, where))
    good = {"id": BEN, "tag": "ours", "a0": "/ip4/10.0.0.1/tcp/1"}
    for change in (
        {"id": ""}, {"id": "nobody"}, {"id": ANN}, {"tag": "other"}, {"a0": ""},
        {"a0": "/ip4/127.0.0.1/tcp/1"}, {"a0": "/dns/" + "x" * 300}, {"a0": "/dns4/x/tcp/1"},
        {"a0": "//ip4/127.0.0.1/tcp/1"}, {"a0": "dns4/x/tcp/1"}, {"a0": "/unix/x"},
    ):  # fmt: skip
        judge._report_service(good | change)
    assert told == []
    judge._report_service(good)
    assert told == [(BEN, (f"/ip4/10.0.0.1/tcp/1/p2p/{BEN}",))]


def names_of(numbers: range) -> list[bytes]:
    """What announces names without a text."""
    made = zeroconf.DNSOutgoing(FLAGS_ANSWER)
    for number in numbers:
        name = f"{number}.{mdns.SERVICE}"
        made.add_answer_at_time(zeroconf.DNSPointer(mdns.SERVICE, PTR, IN, 4_500, name), 0)
    return list(made.packets())


@pytest.mark.usefixtures("_multicast")
def test_a_flood_of_names_shuts_out_no_member_nor_takes_what_it_likes() -> None:
    async def main() -> None:
        found: list[PeerId] = []
        sock = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        sock.setsockopt(
            trio.socket.IPPROTO_IP, trio.socket.IP_MULTICAST_IF, socket.inet_aton(HERE[0])
        )
        async with trio.open_nursery() as nursery:

            def tell(peer: PeerId, where: Sequence[str]) -> None:
                found.append(peer)

            await nursery.start(run_lan, ANN, "ours", [address(ANN, 0)], tell, HERE)
            for first in range(0, FLOOD_NAMES, 100):
                for packet in names_of(range(first, first + 100)):
                    await sock.sendto(packet, ("224.0.0.251", 5353))
                    await trio.sleep(0.01)  # the kernel keeps few that are not read
            await nursery.start(
                run_lan, BEN, "ours", [address(BEN, 1)], lambda peer, where: None, HERE
            )
            with trio.fail_after(30):
                while BEN not in found:  # noqa: ASYNC110  it says so in no other way
                    await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        sock.close()

    run(main, timeout_s=120)


def test_few_names_wait_and_what_came_with_its_text_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mdns, "NAMES_MAX", 500)
    monkeypatch.setattr(mdns, "AGAIN_S", 0.05)
    begun: list[mdns._Lan] = []

    class Silent(mdns._Lan):
        """Nobody answers, and zeroconf has no socket."""

        def __init__(self, *args: object) -> None:
            begun.append(self)
            self.names = 0
            self._lock = threading.Lock()
            self._rng = Random(1)
            self._waiting: BoundedTable[str, None] = BoundedTable(mdns.WAITING_MAX)
            self._lookups = ThreadPoolExecutor(1)
            self.hold = threading.Event()
            self._lookups.submit(self.hold.wait)

        def close(self) -> None:
            self.hold.set()
            self._lookups.shutdown(cancel_futures=True)

    monkeypatch.setattr(mdns, "_Lan", Silent)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(run_lan, ANN, "ours", [], lambda peer, where: None, HERE)
            world = zeroconf.Zeroconf(interfaces=HERE)
            change = zeroconf.ServiceStateChange.Added
            for number in range(600):
                begun[0]._on_change(world, mdns.SERVICE, f"{number}.{mdns.SERVICE}", change)
            begun[0]._on_change(world, mdns.SERVICE, "no name", change)
            assert len(begun[0]._waiting) == mdns.WAITING_MAX
            with trio.fail_after(30):
                while len(begun) < 2:  # noqa: ASYNC110  it begins anew
                    await trio.sleep(0.01)
            world.close()
            nursery.cancel_scope.cancel()

    run(main, timeout_s=60)
