"""How many bytes of requests may be on their way, and who gives way to whom."""

from swarm.identity import PeerId
from swarm.transport.request_slots import (
    ARRIVING_BYTES_MAX,
    ARRIVING_SHARE_MAX,
    REQUEST_BYTES_SMALL,
    Arrival,
    Arrivals,
)
from tests.support import run

A, B, C, NEW = (PeerId(name) for name in ("a", "b", "c", "new"))
PIECE = ARRIVING_BYTES_MAX // 16  # half is eight


def entered(arrivals: Arrivals, share: PeerId, size: int = PIECE) -> Arrival:
    arrival = arrivals.reserve(share, size)
    assert arrival is not None
    return arrival


def test_no_share_has_more_than_half() -> None:
    arrivals = Arrivals()
    for _ in range(8):
        entered(arrivals, A)
    assert arrivals.reserve(A, PIECE) is None
    assert arrivals.held_bytes == ARRIVING_SHARE_MAX


def test_the_oldest_of_the_largest_share_gives_way_to_a_smaller_one() -> None:
    async def main() -> None:
        arrivals = Arrivals()
        of_a = [entered(arrivals, A) for _ in range(6)]
        of_b = [entered(arrivals, B) for _ in range(7)]
        of_c = [entered(arrivals, C) for _ in range(3)]
        of_b[0].is_complete = True
        entered(arrivals, NEW)
        assert [each.scope.cancel_called for each in of_b[:3]] == [False, True, False]
        assert not any(each.scope.cancel_called for each in (*of_a, *of_c))
        assert arrivals.held_bytes == ARRIVING_BYTES_MAX
        assert arrivals.reserve(B, PIECE) is None  # it would have as much as the largest
        arrivals.release(of_b[1])  # as whoever read it does; it counts once
        assert arrivals.held_bytes == ARRIVING_BYTES_MAX

    run(main)


def test_what_is_here_gives_way_to_nobody() -> None:
    arrivals = Arrivals()
    for share in (A, B):
        for _ in range(8):
            entered(arrivals, share).is_complete = True
    assert arrivals.reserve(NEW, PIECE) is None
    assert arrivals.reserve(NEW, REQUEST_BYTES_SMALL) is not None


def test_who_leaves_makes_room() -> None:
    arrivals = Arrivals()
    held = [entered(arrivals, A) for _ in range(8)]
    small = entered(arrivals, A, REQUEST_BYTES_SMALL)
    for each in (*held, small):
        arrivals.release(each)
    assert arrivals.held_bytes == 0
