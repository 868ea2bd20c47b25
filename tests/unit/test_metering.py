"""Small work is put to accounts, and who is heavy waits behind the others."""

import time

import pytest
import trio

from swarm.transport import metering
from swarm.transport.metering import (
    ACCOUNTS_MAX,
    LANE_SHARE,
    MODEST_BONUS_S,
    NODE_SHARE_MAX,
    ORIGIN_SHARE_MAX,
    PEER_SHARE_MAX,
    Payer,
    WorkMeter,
)
from tests.support import run

PIECE_S = 0.002


async def work(meter: WorkMeter, origin: str, peer: str, each_s: float, done: list[str]) -> None:
    """Do pieces of work for ever, `each_s` of virtual time apart."""
    while True:
        await meter.settle(origin, peer, PIECE_S)
        done.append(peer)
        await trio.sleep(each_s)


def test_who_is_light_never_waits() -> None:
    async def main() -> None:
        meter = WorkMeter()
        for _ in range(1_000):
            started = trio.current_time()
            await meter.settle("a", "honest", 0.0005)  # nobody runs the lane
            assert trio.current_time() == started
            await trio.sleep(1 / 7)

    run(main, virtual=True, timeout_s=1_000)


def test_who_is_heavy_has_a_share_of_the_time() -> None:
    async def main() -> None:
        meter, done = WorkMeter(), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            for number in range(8):
                nursery.start_soon(work, meter, "a", f"p{number}", 0.0, done)
            await trio.sleep(10.0)
            done.clear()
            await trio.sleep(10.0)
            nursery.cancel_scope.cancel()
        assert len(done) * PIECE_S / 10.0 == pytest.approx(LANE_SHARE, rel=0.05)
        counts = [done.count(f"p{number}") for number in range(8)]
        assert min(counts) > 0.8 * max(counts)

    run(main, virtual=True, timeout_s=100)


def longest_wait_s(identities: int) -> float:
    """How long an honest peer waits that asks seven times a second, from the address from which so
    many others work as fast as they may."""

    async def main() -> float:
        meter, longest = WorkMeter(), 0.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            for number in range(identities):
                nursery.start_soon(work, meter, "a", f"p{number}", 0.0, [])
            for _ in range(100):
                await trio.sleep(1 / 7)
                started = trio.current_time()
                await meter.settle("a", "honest", 0.0005)
                longest = max(longest, trio.current_time() - started)
            nursery.cancel_scope.cancel()
        return longest

    found: float = run(main, virtual=True, timeout_s=1_000)
    return found


def test_an_honest_peer_at_a_heavy_address_waits_for_a_piece_or_two() -> None:
    assert longest_wait_s(100) < 0.02


def test_who_is_heavier_than_all_others_waits_and_is_not_starved() -> None:
    async def main() -> None:
        meter = WorkMeter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            for number in range(96):
                nursery.start_soon(work, meter, f"o{number % 3}", f"p{number}", 0.0, [])
            await trio.sleep(5.0)
            meter.charge("honest", "burst", 0.065)
            started = trio.current_time()
            await meter.settle("honest", "burst", PIECE_S)
            assert trio.current_time() - started < 15.0
            nursery.cancel_scope.cancel()

    run(main, virtual=True, timeout_s=100)


def test_a_large_debt_is_paid_in_pieces() -> None:
    async def main() -> None:
        meter, done = WorkMeter(), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            payer = Payer(meter, "a", "large")
            payer.owe(0.4)
            nursery.start_soon(payer.pay)
            await trio.sleep(0.01)
            nursery.start_soon(work, meter, "b", "small", 0.0, done)
            meter.charge("b", "small", 0.1)
            await trio.sleep(0.2)
            assert len(done) > 10
            nursery.cancel_scope.cancel()

    run(main, virtual=True)


def test_without_an_order_it_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    charge = WorkMeter.charge
    monkeypatch.setattr(
        WorkMeter, "charge", lambda self, *rest: None if charge(self, *rest) is None else 1.0
    )
    assert longest_wait_s(100) > 0.1


@pytest.mark.parametrize(
    ("origins", "peers", "each_s"),
    [(1, 1, PEER_SHARE_MAX), (1, 50, ORIGIN_SHARE_MAX / 50), (50, 1, NODE_SHARE_MAX / 50)],
)
def test_over_a_limit_those_are_heavy_who_use_more_than_their_part(
    origins: int, peers: int, each_s: float
) -> None:
    async def main() -> None:
        meter = WorkMeter()
        who = [(f"o{o}", f"p{p}") for o in range(origins) for p in range(peers)]
        for origin, peer in who:
            meter.charge(origin, peer, 1.5 * each_s)
        assert all(meter.charge(origin, peer, 0.0) for origin, peer in who)
        assert meter.charge(*who[0][:1], "light", 0.0) is None
        assert meter.charge("elsewhere", "light", 0.0) is None

    run(main, virtual=True)


def waits_beside_new_addresses_s() -> list[float]:
    """How long each request of an admitted peer that asks seven times a second waits beside 400
    handshakes a second, each from an address of its own; for ten seconds."""
    waits_s: list[float] = []

    async def ask(meter: WorkMeter) -> None:
        while True:
            before = trio.current_time()
            try:
                await meter.settle("home", "honest", 0.0005)
            finally:  # the last may wait for ever
                waits_s.append(trio.current_time() - before)
            await trio.sleep(1 / 7)

    async def main() -> None:
        meter = WorkMeter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            nursery.start_soon(ask, meter)
            for number in range(4_000):
                nursery.start_soon(meter.settle, f"new {number}", "", 0.0025)
                await trio.sleep(1 / 400)
            nursery.cancel_scope.cancel()

    run(main, virtual=True, timeout_s=100)
    return waits_s


@pytest.mark.slow
def test_new_addresses_wait_behind_who_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s = waits_beside_new_addresses_s()
    assert len(waits_s) > 60
    assert max(waits_s) < 0.05
    monkeypatch.setattr(metering, "MODEST_BONUS_S", 0.0)
    assert max(waits_beside_new_addresses_s()) > 0.5


def test_new_addresses_have_their_turn_beside_modest_peers() -> None:
    """Two hundred admitted ones, each of them modest, would take more than the lane has."""

    async def main() -> None:
        meter, done = WorkMeter(), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            for number in range(200):
                nursery.start_soon(work, meter, f"o{number}", "p", 0.05, done)
            await trio.sleep(20.0)
            started = trio.current_time()
            await meter.settle("new", "", 0.0025)
            assert trio.current_time() - started < MODEST_BONUS_S + 2 * metering.NEWCOMER_PENALTY_S
            nursery.cancel_scope.cancel()

    run(main, virtual=True, timeout_s=100)


def turns_in_a_second(busy_s: float) -> int:
    """How many turns the lane gives one heavy peer in a second of real time, beside work that keeps
    the event loop for so long again and again."""

    async def keep_busy() -> None:
        while True:
            ends_s = time.perf_counter() + busy_s
            while time.perf_counter() < ends_s:
                pass
            await trio.lowlevel.checkpoint()

    async def main() -> int:
        meter, done = WorkMeter(), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            meter.charge("a", "heavy", 10.0)
            if busy_s:
                nursery.start_soon(keep_busy)
            nursery.start_soon(work, meter, "a", "heavy", 0.0, done)
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()
        return len(done)

    return trio.run(main)


def test_the_lane_stands_still_where_the_loop_is_late() -> None:
    # a second in which others have this core makes few turns either way
    assert any(turns_in_a_second(0.0) > 4 * turns_in_a_second(0.01) for _ in range(3))
    assert turns_in_a_second(0.01) < 50  # two pieces in each 10 ms would be 100


def test_who_leaves_the_queue_costs_nobody_time() -> None:
    async def main() -> None:
        meter = WorkMeter()
        for number in range(50):
            with trio.move_on_after(0.0):
                await meter.settle("a", f"p{number}", 1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meter.run)
            started = trio.current_time()
            await meter.settle("a", "last", 1.0)
            assert trio.current_time() - started < 0.1
            nursery.cancel_scope.cancel()

    run(main, virtual=True)


def test_accounts_are_bounded_and_forgotten() -> None:
    async def main() -> None:
        meter = WorkMeter()
        for number in range(3 * ACCOUNTS_MAX):
            meter.charge(f"o{number}", "p", 0.001)
            meter.charge("one", f"p{number}", 0.001)
        assert len(meter._node.within) <= ACCOUNTS_MAX
        assert len(meter._node.within["one"].within) <= ACCOUNTS_MAX
        await trio.sleep(10 * metering.IDLE_S)
        meter.charge("one", "p", 0.001)
        assert list(meter._node.within) == ["one"]
        assert list(meter._node.within["one"].within) == ["p"]

    run(main, virtual=True)


def test_a_debt_is_paid_in_pieces_and_what_carries_its_weight_is_given_back() -> None:
    async def main() -> None:
        meter = WorkMeter()
        payer = Payer(meter, "a", "p")
        assert not payer.owe(0.0004)
        assert payer.owe(0.0007)
        await payer.pay()
        assert meter._node.value == pytest.approx(0.0011)
        payer.refund(0.0011)
        assert meter.charge("a", "p", 0.0) is None
        assert meter._node.value == pytest.approx(0.0, abs=1e-9)

    run(main, virtual=True)
