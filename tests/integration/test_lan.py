"""Multicast DNS, over this machine's loopback interface."""

from collections.abc import Sequence

import pytest
import trio
import zeroconf

from swarm.identity import Identity, PeerId
from swarm.peers import mdns
from swarm.peers.invite import JoinKey
from swarm.peers.mdns import LanUnavailable, announced, run_lan, tag_of
from tests.support import run

pytestmark = pytest.mark.integration

ANN, BEN, CAT = (Identity(letter * 32).peer_id for letter in (b"a", b"b", b"c"))
HERE = ["127.0.0.1"]
KEY = JoinKey(b"k" * 32)


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
        judge._judge(good | change)
    assert told == []
    judge._judge(good)
    assert told == [(BEN, (f"/ip4/10.0.0.1/tcp/1/p2p/{BEN}",))]


def test_a_flood_of_names_shuts_out_no_member() -> None:
    told: list[PeerId] = []
    browser = mdns._Lan.__new__(mdns._Lan)
    browser._peer, browser._tag = ANN, "ours"
    browser._tell = lambda peer, where: told.append(peer)
    member = mdns._service_info(BEN, "ours", [address(BEN, 1)])

    class Heard:
        """Spoofed names have no text; the member's has."""

        def get_service_info(self, service: str, name: str, timeout_ms: int) -> object:
            assert timeout_ms == mdns.ASK_TIMEOUT_MS
            if not name.endswith(service):
                raise zeroconf.BadTypeInNameException
            return member if name == member.name else None

    change = zeroconf.ServiceStateChange.Added
    for name in [*(f"{number}.{mdns.SERVICE}" for number in range(1000)), "no", member.name]:
        browser._on_change(Heard(), mdns.SERVICE, name, change)  # type: ignore[arg-type]
    assert told == [BEN]
