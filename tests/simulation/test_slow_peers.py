"""Peers that answer everything, as late as they may: honest ones are fetched from all the same."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import trio

from swarm.exchange import fetching
from swarm.exchange.fetching import BATCHES_FACTOR, LATE_FACTOR, LATE_OF_ONE_FACTOR
from swarm.exchange.offers import Producer
from swarm.identity import PeerId
from swarm.simulation.world import deterministic_run
from swarm.wire import codec
from swarm.wire.messages import (
    HOLDERS_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    GroupsReply,
    HaveReply,
    Want,
)
from tests.simulation.exchanges import Peer, Swarm, exchanges, until

PARALLEL = 4
SLOW = 40
NEARLY_S = 7.5  # of the 8 s that even an empty answer has
GROUPS_EACH = 20

NEVER = property(lambda self: False, lambda self, value: None)


@dataclass
class Waiting:
    """How many slow answers each asker waits for."""

    now: Counter[PeerId] = field(default_factory=Counter)
    most: Counter[PeerId] = field(default_factory=Counter)


def answers_slowly(peer: Peer, waiting: Waiting) -> None:
    """Deliver the first groups at once, and then one at a time, as late as is allowed."""
    was_asked = False

    async def want(asker: PeerId, payload: bytes) -> bytes:
        nonlocal was_asked
        asked = codec.decode(payload, Want, WANT_BYTES_MAX)
        if was_asked:
            waiting.now[asker] += 1
            waiting.most[asker] = max(waiting.most[asker], waiting.now[asker])
            try:
                await trio.sleep(NEARLY_S)
            finally:
                waiting.now[asker] -= 1
        was_asked = True
        record = peer.pool.record(asked.group_ids[0], 0.0)  # type: ignore[arg-type]
        return codec.encode(GroupsReply(type="groups", records=(record or b"",)))

    async def have(asker: PeerId, payload: bytes) -> bytes:
        return codec.encode(HaveReply(type="have_reply", held=()))

    peer.serve(ROLLOUTS_PROTOCOL, want)
    peer.serve(HOLDERS_PROTOCOL, have)


async def waits_of_honest_groups(swarm: Swarm, waiting: Waiting) -> list[float]:
    """How long groups of an honest peer take that shares them among slow ones, time after time."""
    *slow, honest, asker = swarm.peers
    for host in (len(slow), len(slow) + 1):
        await swarm.start(host)
    for peer in slow:
        answers_slowly(peer, waiting)
        await peer.share_new(GROUPS_EACH)
    first = await honest.share_new(2)
    await until(lambda: asker.has(first), timeout_s=300)
    account = asker.exchange.ledger.account
    await until(lambda: all(account(peer.peer_id).accepted for peer in slow), timeout_s=600)
    await trio.sleep(30.0)  # the slow ones are at it
    waits = []
    for number in range(1, 6):
        shared = await honest.share_new(2, 10 * number)
        waits.append(await until(lambda shared=shared: asker.has(shared), timeout_s=600))  # type: ignore[misc]
    return waits


def waits_among_slow_peers() -> tuple[list[float], int]:
    """The waits, and how many slow answers one node awaited at a time, at most."""
    found: list[float] = []
    waiting = Waiting()

    async def main() -> None:
        async with exchanges(SLOW + 2, stock_groups=2_000, fetch_parallel=PARALLEL) as swarm:
            found.extend(await waits_of_honest_groups(swarm, waiting))

    deterministic_run(main, seed=1)
    return found, max(waiting.most.values())


def test_honest_groups_find_a_place_among_slow_answers() -> None:
    waits, most = waits_among_slow_peers()
    assert sum(waits) < 3
    assert PARALLEL < most <= LATE_FACTOR * PARALLEL + PARALLEL // 2


def test_without_the_bounds_they_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_gives_way(waiting_for: Sequence[str], parallel: int) -> int | None:
        return None

    monkeypatch.setattr(fetching, "to_give_up", nobody_gives_way)
    monkeypatch.setattr(Producer, "slow", NEVER)
    waits, most = waits_among_slow_peers()
    assert sum(waits) > 9
    assert most == BATCHES_FACTOR * PARALLEL


def late_batches_of_one_block() -> int:
    """How many late batches one node has at most, while all slow peers are of one public block."""
    most = 0

    async def main() -> None:
        nonlocal most
        async with exchanges(SLOW + 1, stock_groups=2_000, fetch_parallel=PARALLEL) as swarm:
            *slow, asker = swarm.peers
            for host, peer in enumerate(slow):
                peer.transport._network._ips[peer.transport._number] = f"203.0.113.{host + 1}"
                answers_slowly(peer, Waiting())
            await swarm.start(len(slow))
            for peer in slow:
                await peer.share_new(GROUPS_EACH)
            for _ in range(120):
                await trio.sleep(0.5)
                batches = asker.exchange.fetcher._in_flight.values()
                most = max(most, sum(batch.late and not batch.given_up for batch in batches))

    deterministic_run(main, seed=1)
    return most


def test_a_block_of_slow_peers_has_its_part_of_what_may_be_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Producer, "slow", NEVER)
    assert late_batches_of_one_block() == LATE_OF_ONE_FACTOR * PARALLEL
    monkeypatch.setattr(fetching, "to_give_up", lambda waiting_for, parallel: None)
    assert late_batches_of_one_block() > 2 * LATE_OF_ONE_FACTOR * PARALLEL
