"""When an address that others named is dialled: by where it leads, whoever tells and is named."""

from collections import Counter
from itertools import count, pairwise
from pathlib import Path
from random import Random

import pytest
import trio

import swarm as swarm_package
from swarm.errors import DialHeldBack, PeerUnreachable
from swarm.identity import PeerId
from swarm.limits.dial_backoff import (
    DIAL_AGAIN_MAX_S,
    DIAL_AGAIN_S,
    DIALS_MAX,
    DIALS_PER_BLOCK_MAX,
    DIALS_PER_IP_MAX,
    ENDPOINTS_MAX,
    KEYS_MAX,
    PROVEN_FAILURES_MAX,
    PROVEN_MAX,
    WINDOW_S,
    DialAttempts,
    DialBackoff,
    hops_of,
)
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.reputation import Ledger
from tests.support import run

NOBODY: frozenset[PeerId] = frozenset()


def dial(
    backoff: DialBackoff, address: str, now_s: float, *, answers: bool = False, counts: bool = True
) -> bool:
    """Whether the address was dialled."""
    hops = hops_of(address, NOBODY)
    if not backoff.begin(hops, now_s):
        return False
    for hop in hops:
        if answers:
            backoff.succeeded(hop)
        else:
            backoff.failed(hop, now_s, counts=counts)
    return True


def spellings(number: int) -> str:
    """One endpoint, as a stranger may write it, for ever other peers."""
    where = (
        "/ip4/9.9.9.9/tcp/443", "/ip4/9.9.9.9/tcp/0443", "/ip6/::ffff:9.9.9.9/tcp/443",
        "/ip6/0:0::ffff:0909:0909/tcp/443", "/ip6/64:ff9b::909:909/tcp/443",
        "/ip6/2002:909:909::/tcp/443",
    )  # fmt: skip
    return f"{where[number % len(where)]}/p2p/peer{number}"


def test_one_endpoint_is_dialled_ever_more_rarely_whoever_is_said_to_be_there() -> None:
    backoff = DialBackoff()
    dialled = [at for at in range(7_200) if dial(backoff, spellings(at), float(at))]
    gaps = [later - earlier for earlier, later in pairwise(dialled)]
    assert gaps[:4] == [DIAL_AGAIN_S * 2**n for n in range(4)]
    assert max(gaps) == DIAL_AGAIN_MAX_S
    assert len(dialled) <= 15
    assert backoff.held_back == 7_200 - len(dialled)


def test_what_may_be_our_own_links_fault_makes_no_pause_longer() -> None:
    backoff = DialBackoff()
    for at in range(20):
        assert dial(backoff, spellings(at), at * DIAL_AGAIN_S, counts=False)
    assert not dial(backoff, spellings(99), 19 * DIAL_AGAIN_S + 1)


@pytest.mark.parametrize(
    ("address", "at_most"),
    [
        ("/ip4/9.9.9.9/tcp/{}/p2p/ann", DIALS_PER_IP_MAX),
        ("/ip6/2606:4700::1/tcp/{}/p2p/ann", DIALS_PER_IP_MAX),
        ("/ip4/9.9.9.9/tcp/{0}/p2p/relay{0}/p2p-circuit/p2p/ben", DIALS_PER_IP_MAX),
    ],
)
def test_one_address_is_dialled_a_few_times_a_minute_at_all_its_ports(
    address: str, at_most: int
) -> None:
    backoff = DialBackoff()
    for minute in range(3):
        ports = range(1_000 * minute + 1, 1_000 * minute + 500)
        now_s = minute * WINDOW_S
        assert sum(dial(backoff, address.format(port), now_s) for port in ports) == at_most


def test_one_block_is_dialled_a_few_times_a_minute_at_all_its_addresses() -> None:
    backoff = DialBackoff()
    addresses = [f"/ip4/9.9.9.{host}/tcp/1/p2p/ann" for host in range(1, 200)]
    assert sum(dial(backoff, each, 0.0) for each in addresses) == DIALS_PER_BLOCK_MAX
    assert dial(backoff, "/ip4/9.9.8.1/tcp/1/p2p/ann", 0.0)


def test_all_that_strangers_name_has_one_bound_and_nothing_is_forgotten_too_soon() -> None:
    backoff, rng = DialBackoff(), Random(1)
    victim = "/ip4/9.9.9.9/tcp/443/p2p/"
    dialled, at_victim = 0, 0
    names = count()
    for second in range(3_600):
        for _ in range(10):
            where = ".".join(str(rng.randrange(11, 250)) for _ in range(4))
            dialled += dial(backoff, f"/ip4/{where}/tcp/1/p2p/{next(names)}", float(second))
        at_victim += dial(backoff, f"{victim}{next(names)}", float(second))
        assert len(backoff._pauses) <= ENDPOINTS_MAX
        assert len(backoff._recent._times) <= KEYS_MAX
    assert dialled <= 60 * DIALS_MAX + DIALS_MAX
    assert at_victim <= 12
    assert DIALS_MAX * DIAL_AGAIN_MAX_S / WINDOW_S < ENDPOINTS_MAX


def test_many_honest_peers_behind_one_address_cost_nothing() -> None:
    backoff = DialBackoff()
    for port in range(1, 3 * DIALS_MAX):
        assert dial(backoff, f"/ip4/9.9.9.9/tcp/{port}/p2p/p{port}", 0.0, answers=True)
        assert len(backoff._proven) <= PROVEN_MAX


@pytest.mark.parametrize("host", ["ip4/127.0.0.1", "ip4/192.168.1.2", "ip6/fd00::1", "memory"])
def test_private_addresses_count_by_endpoint_alone(host: str) -> None:
    backoff, port = DialBackoff(), "" if host == "memory" else "/tcp"
    for number in range(1, DIALS_MAX // 2):
        assert dial(backoff, f"/{host}{port}/{number}/p2p/ann", 0.0)
        assert not dial(backoff, f"/{host}{port}/{number}/p2p/ben", 0.0)


def test_nobody_keeps_us_from_a_peer_that_answered_by_naming_others_at_its_place() -> None:
    backoff = DialBackoff()
    honest = "/ip4/9.9.9.9/tcp/443/p2p/ann"
    assert dial(backoff, honest, 0.0, answers=True)
    for second in range(3_000):
        dial(backoff, spellings(second), float(second))
    assert dial(backoff, honest, 3_000.0)
    assert not dial(backoff, honest, 3_009.0)
    assert dial(backoff, honest, 3_010.0, answers=True)


def test_a_peer_that_has_not_answered_for_long_is_as_good_as_never_met() -> None:
    backoff, now_s = DialBackoff(), 0.0
    gone = "/ip4/9.9.9.9/tcp/443/p2p/ann"
    assert dial(backoff, gone, now_s, answers=True)
    for _ in range(PROVEN_FAILURES_MAX):
        now_s += DIAL_AGAIN_MAX_S
        assert dial(backoff, gone, now_s)
    assert not backoff._proven
    assert not dial(backoff, "/ip4/9.9.9.9/tcp/443/p2p/ben", now_s + DIAL_AGAIN_MAX_S - 1)


def test_a_relay_that_is_connected_is_not_dialled_and_each_peer_behind_it_is_once() -> None:
    backoff = DialBackoff()
    through = "/ip4/9.9.9.9/tcp/443/p2p/relay/p2p-circuit/p2p/{}"
    assert len(hops_of(through.format("ann"), NOBODY)) == 2
    connected = {PeerId("relay")}
    for peer in ("ann", "ben"):
        hops = hops_of(through.format(peer), connected)
        assert backoff.begin(hops, 0.0)
        backoff.failed(hops[0], 0.0)
        assert not backoff.begin(hops, 9.0)
    assert dial(backoff, spellings(0), 0.0), "the relay's own place is another matter"


class Nowhere:
    """A transport with which no dial succeeds but of a relay, on the way to somebody behind it."""

    peer_id = PeerId("me")

    def __init__(self) -> None:
        self.dialled: list[str] = []
        self.connected: tuple[PeerId, ...] = (PeerId("some peer"),)

    def peers(self) -> tuple[PeerId, ...]:
        return self.connected

    def set_gate(self, gate: object, limits: object) -> None:
        """Nobody comes."""

    def report_to(self, report: object) -> None:
        """As above."""

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        await trio.lowlevel.checkpoint()
        self.dialled.append(address)
        if "/p2p/relay/" in address:
            self.connected = (PeerId("relay"),)
        raise PeerUnreachable(address)


def test_a_dial_through_a_relay_counts_against_the_part_that_failed() -> None:
    async def main() -> None:
        transport = Nowhere()
        gater = ConnectionGater(transport, Ledger())  # type: ignore[arg-type]
        dead, alive = (
            f"/ip4/9.9.9.9/tcp/{port}/p2p/{relay}/p2p-circuit/p2p/"
            for port, relay in ((1, "dead"), (2, "relay"))
        )
        for number in range(20):
            for where in (dead, alive):
                with pytest.raises(PeerUnreachable):
                    await gater.dial(f"{where}{number}", timeout_s=1.0)
        through_dead = [each for each in transport.dialled if each.startswith(dead)]
        assert len(through_dead) == 1
        assert len(transport.dialled) == 21, "to whom no relay's place is dialled, 20 were tried"
        with pytest.raises(DialHeldBack):
            await gater.dial_one_of([f"{dead}x", f"{alive}1"], timeout_s=1.0)

    run(main)


def test_what_we_are_asked_to_knock_at_has_bounds_and_turns() -> None:
    attempts = DialAttempts(9, 300.0)
    assert sum(attempts.allow("9.9.9.9", at) for at in range(299)) == 9
    assert attempts.allow("9.9.9.9", 300.0)
    assert sum(attempts.allow(f"9.9.8.{host}", 0.0) for host in range(200)) == 18
    assert sum(attempts.allow("192.168.1.1", 0.0) for _ in range(99)) == 72
    assert [attempts.next_turn_s("9.9.9.9", 5.0, 0.5) for _ in range(3)] == [5.0, 5.5, 6.0]
    assert attempts.next_turn_s("9.9.9.8", 5.0, 0.5) == 5.0
    for number in range(2 * KEYS_MAX):
        ip = f"9.{number >> 8}.{number & 255}.1"
        assert attempts.allow(ip, 5.0)
        attempts.next_turn_s(ip, 5.0, 0.5)
    assert len(attempts._turns) == KEYS_MAX == len(attempts._recent._times)


def test_nothing_above_the_transport_dials_past_the_gater() -> None:
    """What is left dials what a person gave: bootstrap peers."""
    swarm = Path(swarm_package.__file__).parent
    found = Counter(
        path.name
        for room in ("peers", "exchange", "leasing", "weights", "telemetry")
        for path in (swarm / room).rglob("*.py")
        for line in path.read_text().splitlines()
        if "transport.connect(" in line
    )
    assert found == {"connection_gater.py": 2, "discovery.py": 1, "dht.py": 1}
