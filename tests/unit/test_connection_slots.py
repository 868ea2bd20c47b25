"""Who has a slot: the count, and who gives way."""

import pytest
import trio

from swarm.identity import Identity, PeerId
from swarm.transport.connection_slots import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_PEER_MAX,
    HANDSHAKES_MAX,
    INBOUND_MAX,
    ConnectionSlot,
    ConnectionSlots,
)
from tests.support import run


def peer(number: int) -> PeerId:
    return Identity(number.to_bytes(32, "big")).peer_id


def filled(origins: int, *, inbound: bool = True) -> tuple[ConnectionSlots, list[ConnectionSlot]]:
    """As many connections as there may be, evenly from so many public blocks."""
    slots, taken = ConnectionSlots(), []
    for number in range(INBOUND_MAX):
        ip = f"203.0.{number % origins}.{number // origins % 250}"
        slot = slots.admit(peer(number), ip, inbound=inbound)
        assert slot is not None
        taken.append(slot)
    return slots, taken


def test_a_newcomer_from_elsewhere_takes_the_place_of_the_newest_of_the_largest_origin() -> None:
    async def main() -> None:
        slots, taken = filled(3)
        newcomer = slots.admit(peer(9_000), "198.51.100.1", inbound=True)
        assert newcomer is not None
        ended = [slot for slot in taken if slot.scope.cancel_called]
        assert len(ended) == 1
        assert ended[0] is taken[-1]  # the newest of two blocks that have as many
        assert slots.figures().inbound == INBOUND_MAX
        assert slots.evicted == {"full": 1}

    run(main, virtual=True)


def test_nobody_gives_way_to_who_has_as_many() -> None:
    async def main() -> None:
        slots, taken = filled(3)
        for _ in range(9):
            assert slots.admit(peer(9_000), "203.0.0.251", inbound=True) is None
        assert not any(slot.scope.cancel_called for slot in taken)
        assert slots.turned_away == {"full": 9}

    run(main, virtual=True)


@pytest.mark.slow
def test_identities_without_number_from_few_origins_end_one_another_and_nobody_else() -> None:
    async def main() -> None:
        slots = ConnectionSlots()
        honest = [slots.admit(peer(n), f"198.51.{n}.1", inbound=True) for n in range(40)]
        for number in range(2_000):
            slots.admit(peer(10_000 + number), f"203.0.{number % 3}.7", inbound=True)
        assert not any(slot.scope.cancel_called for slot in honest if slot)
        assert slots.admit(peer(1), "192.0.2.1", inbound=True) is not None

    run(main, virtual=True)


def test_a_part_is_kept_for_connections_that_we_make() -> None:
    async def main() -> None:
        slots, _ = filled(3)
        for number in range(CONNECTIONS_MAX - INBOUND_MAX):
            assert slots.admit(peer(20_000 + number), "192.0.2.1", inbound=False) is not None
        assert slots.figures().connections == CONNECTIONS_MAX
        assert not slots.evicted

    run(main, virtual=True)


def test_hundreds_of_blocks_of_one_contract_keep_nobody_out() -> None:
    async def main() -> None:
        slots = ConnectionSlots()
        for number in range(INBOUND_MAX):
            ip = f"2001:db8:0:{number:x}00::1"  # each in a block of its own
            assert slots.admit(peer(number), ip, inbound=True) is not None
            assert number >= HANDSHAKES_MAX or slots.begin_handshake(ip) is not None
        assert slots.admit(peer(9_000), "2001:db8:0:ff00::1", inbound=True) is None
        assert slots.admit(peer(9_001), "203.0.113.5", inbound=True) is not None
        assert slots.begin_handshake("203.0.113.5") is not None

    run(main, virtual=True)


def test_one_peer_gives_way_to_itself() -> None:
    async def main() -> None:
        slots = ConnectionSlots()
        mine = [
            slots.admit(peer(1), "192.0.2.1", inbound=True)
            for _ in range(CONNECTIONS_PER_PEER_MAX + 2)
        ]
        assert [slot.scope.cancel_called for slot in mine if slot] == [True, True] + (
            [False] * CONNECTIONS_PER_PEER_MAX
        )

    run(main, virtual=True)


def test_handshakes_of_few_addresses_keep_nobody_out_for_a_moment() -> None:
    async def main() -> None:
        slots = ConnectionSlots()
        flood = [slots.begin_handshake(f"10.0.{n % 2}.1") for n in range(2 * HANDSHAKES_MAX)]
        assert slots.handshakes == HANDSHAKES_MAX
        newcomers = [slots.begin_handshake(f"192.0.2.{n}") for n in range(4)]
        assert None not in newcomers
        assert slots.handshakes == HANDSHAKES_MAX
        ended = [each for each in flood if each and each.scope.cancel_called]
        assert len(ended) == 4

    run(main, virtual=True)


def test_what_is_left_is_free() -> None:
    async def main() -> None:
        slots, taken = filled(3)
        for slot in taken:
            slots.release(slot)
            slots.release(slot)  # twice is no harm
        assert slots.figures().connections == 0
        begun = slots.begin_handshake("203.0.113.1")
        assert begun is not None
        assert slots.handshakes == 1
        slots.release(begun)
        assert slots.handshakes == 0
        await trio.lowlevel.checkpoint()

    run(main, virtual=True)
