"""Broadcasts of weights over simulated links: near the bound, through churn and lies."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import trio

from swarm.simulation.links import LinkProfile, links_of
from swarm.weights import broadcast
from swarm.weights.piece_selection import Picker
from tests.support import script

broadcasts = script("simulated_broadcasts")
BroadcastCase, simulate = broadcasts.BroadcastCase, broadcasts.simulate

MB = 1_000_000
LINK = LinkProfile(latency_s=0.028, up_bytes_per_s=12.5 * MB, down_bytes_per_s=12.5 * MB)
EQUAL = BroadcastCase(20 * MB, 131_072, (LINK,) * 9, seed=3)


@pytest.fixture(scope="module")
def plain() -> broadcasts.BroadcastResult:
    return simulate(EQUAL)


def test_a_swarm_comes_near_the_bound_and_the_publisher_sends_each_chunk_once(
    plain: broadcasts.BroadcastResult,
) -> None:
    assert plain.unfinished == 0
    assert len(plain.times_s) == 8
    assert plain.bound_s == pytest.approx(1.6)
    assert plain.over_bound < 1.6
    assert plain.publisher_copies < 1.05
    assert plain.duplicate_share < 0.02


def test_the_same_seed_gives_the_same_broadcast_and_another_does_not(
    plain: broadcasts.BroadcastResult,
) -> None:
    assert simulate(EQUAL) == plain
    assert simulate(replace(EQUAL, seed=4)) != plain


def slow_disks(monkeypatch: pytest.MonkeyPatch, write_s: float) -> dict[object, int]:
    """Have each write take that long; the most that one host was storing at a time."""
    now: Counter[object] = Counter()
    most: dict[object, int] = {}

    async def write(self: object, chunks: Mapping[int, bytes]) -> None:
        now[self] += len(chunks)
        most[self] = max(most.get(self, 0), now[self])
        await trio.sleep(write_s)
        now[self] -= len(chunks)

    monkeypatch.setattr(broadcasts._Memory, "write", write)
    return most


def test_chunks_are_asked_for_while_others_are_stored(
    plain: broadcasts.BroadcastResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = slow_disks(monkeypatch, 1.0)
    monkeypatch.setattr(broadcast, "WRITING_BYTES_MAX", 32 * EQUAL.chunk_bytes)
    beside = simulate(EQUAL)
    assert beside.unfinished == 0
    assert beside.duplicate_share < 0.02  # what is being stored is not asked for again
    assert max(most.values()) == 32

    take = broadcasts.Broadcast._take

    async def take_and_wait(self: broadcasts.Broadcast, *arguments: Any) -> None:
        await take(self, *arguments)
        while self._writing_bytes:
            await self._written.park()

    monkeypatch.setattr(broadcasts.Broadcast, "_take", take_and_wait)
    one_by_one = simulate(EQUAL)
    assert plain.last_s < beside.last_s < one_by_one.last_s


def test_a_chunk_of_a_peer_that_left_before_it_could_be_stored_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow_disks(monkeypatch, 0.1)
    monkeypatch.setattr(broadcast, "WRITING_BYTES_MAX", 2 * EQUAL.chunk_bytes)
    asked_again = 0
    take = broadcasts.Broadcast._take

    async def count(self: broadcasts.Broadcast, *arguments: Any) -> None:
        nonlocal asked_again
        try:
            await take(self, *arguments)
        except trio.Cancelled:
            asked_again += 1
            raise

    monkeypatch.setattr(broadcasts.Broadcast, "_take", count)
    result = simulate(replace(EQUAL, leave_share=0.25))
    assert asked_again  # else this test says nothing
    assert result.unfinished == 0  # though more waits at times than may be stored at once


def test_peers_that_leave_cost_the_others_little(plain: broadcasts.BroadcastResult) -> None:
    result = simulate(replace(EQUAL, leave_share=0.25))
    assert result.unfinished == 0
    assert len(result.times_s) == 6
    assert result.last_s < 2.0 * plain.last_s


def test_peers_that_send_garbage_are_found_out_and_cost_little(
    plain: broadcasts.BroadcastResult,
) -> None:
    result = simulate(replace(EQUAL, corrupt_share=0.25))
    assert result.unfinished == 0
    assert result.distrusted >= 12  # two of them, by each of six
    # no more than what is on its way when the first comes: then a peer is asked no more
    assert result.corrupt_bytes <= 2 * 6 * 16 * EQUAL.chunk_bytes
    assert result.last_s < 1.5 * plain.last_s


VERY_FAST = LinkProfile(latency_s=0.001, up_bytes_per_s=125 * MB, down_bytes_per_s=125 * MB)
LARGE = replace(EQUAL, size_bytes=100 * MB, links=(VERY_FAST,) * 9, corrupt_share=0.25)


def watch_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> dict[tuple[object, object], list[list[bytes]]]:
    """The chunks of each answer, by who gave it and who asked."""
    answers: dict[tuple[object, object], list[list[bytes]]] = {}
    serve = broadcasts.ChunkService._serve

    async def watch(self: object, peer: object, payload: bytes) -> bytes:
        answer: bytes = await serve(self, peer, payload)
        if isinstance(answer, broadcasts._Answer):
            answers.setdefault((self, peer), []).append(list(answer.chunks))
        return answer

    monkeypatch.setattr(broadcasts.ChunkService, "_serve", watch)
    return answers


def test_a_peer_is_asked_for_one_chunk_until_it_sent_a_good_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = watch_answers(monkeypatch)
    assert simulate(LARGE).unfinished == 0
    assert {len(each[0]) for each in answers.values()} == {1}
    assert max(len(chunks) for each in answers.values() for chunks in each) > 1


def test_an_answer_of_garbage_is_one_offence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liars send good chunks first here, so that answers have several."""
    blames = 0
    content, distrust = broadcasts._Memory._content, broadcasts.Broadcast._distrust

    def lie_late(self: Any, chunk: int) -> Any:
        self.told = getattr(self, "told", 0) + 1
        return self._contents[chunk] if self.told <= 100 else content(self, chunk)

    def count(self: broadcasts.Broadcast, *arguments: Any) -> None:
        nonlocal blames
        blames += 1
        distrust(self, *arguments)

    monkeypatch.setattr(broadcasts._Memory, "_content", lie_late)
    monkeypatch.setattr(broadcasts.Broadcast, "_distrust", count)
    given = watch_answers(monkeypatch)
    assert simulate(LARGE).unfinished == 0
    lies = [chunks for each in given.values() for chunks in each if is_garbage(chunks)]
    assert max(map(len, lies)) > 1
    assert 0 < blames <= len(lies)


def is_garbage(chunks: list[bytes]) -> bool:
    return not all(bytes(each)[:5] == b"chunk" for each in chunks)


def test_who_begins_before_the_others_asks_each_as_soon_as_it_takes_part() -> None:
    early = replace(LINK, latency_s=0.001)
    result = simulate(replace(EQUAL, size_bytes=4 * MB, links=(LINK, early) + (LINK,) * 7))
    assert result.last_s < 0.8


def test_without_distrust_garbage_would_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgive(self: broadcasts.Broadcast, peer: str, reason: str) -> None:
        self.counters.distrusted += 1

    kept = simulate(replace(EQUAL, corrupt_share=0.25))
    monkeypatch.setattr(broadcasts.Broadcast, "_distrust", forgive)
    forgiven = simulate(replace(EQUAL, corrupt_share=0.25))
    assert forgiven.corrupt_bytes > 3 * kept.corrupt_bytes


def test_handing_chunks_out_twice_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a publisher that forgets what it has given away."""
    give = Picker.fresh_for

    def forgetful(self: Picker, peer: broadcasts.PeerId, now_s: float) -> int | None:
        chunk = give(self, peer, now_s)
        if chunk is not None and chunk % 2:
            self.fresh |= 1 << chunk
        return chunk

    monkeypatch.setattr(Picker, "fresh_for", forgetful)
    result = simulate(EQUAL)
    assert result.publisher_copies > 1.3


def test_where_all_uplinks_are_slow_somebody_relays_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One chunk to all takes each of them two seconds here."""
    link = replace(LINK, up_bytes_per_s=0.262 * MB, down_bytes_per_s=0.262 * MB)
    case = BroadcastCase(12 * MB, 65_536, (link,) * 9, seed=3)
    result = simulate(case)
    assert result.over_bound < 1.4
    assert result.publisher_copies < 1.4
    few = replace(case, size_bytes=4 * MB, chunk_bytes=131_072)  # each takes a while to go round
    assert simulate(few).publisher_copies < 3.0
    monkeypatch.setattr(broadcast, "SLOW_CYCLE_SHARE", 0.0)  # who is slow by the clock never does
    monkeypatch.setattr(broadcast, "SLOW_UP_SHARE_LONG", 4.0)
    assert simulate(few).publisher_copies > 4.0


def test_unlike_links_do_not_hold_each_other_up() -> None:
    links = links_of("volunteer", 4)[:1] + links_of("volunteer", 8)
    result = simulate(BroadcastCase(40 * MB, 131_072, links, seed=1))
    assert result.unfinished == 0
    assert result.over_bound < 2.5


def test_a_late_joiner_is_served_by_all_with_the_publisher_gone() -> None:
    """Peers that together hold every chunk suffice."""
    result = simulate(replace(EQUAL, publisher_leaves_s=1.2 * 1.6 + 0.3, late_s=4.0))
    assert result.unfinished == 0
    assert result.last_s < 4.0 + 2.5 * 1.6


@pytest.mark.parametrize("shared", [False, True])
def test_where_nobody_knows_a_rate_relays_ask_for_enough_to_keep_the_publisher_busy(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Who knows no rate of its own asks for as many fresh chunks as are under way at least; with
    fewer the publisher finds nothing to do and relays by itself what others could."""
    case = replace(EQUAL, chunk_bytes=65_536, rates_known=False, shared_uplinks=shared)
    result = simulate(case)
    assert result.over_bound < 1.6
    assert result.publisher_copies < 1.3
    if not shared:  # where answers share the uplink, a rate is measured soon
        monkeypatch.setattr(broadcast, "RELAY_AHEAD_COPIES", 1)
        assert simulate(case).publisher_copies > 1.5


def test_few_relays_on_slow_links_that_answers_share_suffice() -> None:
    link = replace(LINK, latency_s=0.015, up_bytes_per_s=0.75 * MB, down_bytes_per_s=0.75 * MB)
    case = BroadcastCase(
        12 * MB, 65_536, (link,) * 4, rates_known=False, shared_uplinks=True, seed=3
    )
    result = simulate(case)
    assert result.over_bound < 1.1
    assert result.publisher_copies < 1.1


def test_relays_ask_ahead_so_that_a_publisher_finds_work() -> None:
    result = simulate(replace(EQUAL, rates_known=False))
    assert result.over_bound < 1.3
    assert result.publisher_copies < 1.1


def test_a_broadcast_over_shared_uplinks_replays_and_differs_from_one_in_turns(
    plain: broadcasts.BroadcastResult,
) -> None:
    shared = simulate(replace(EQUAL, shared_uplinks=True))
    assert shared == simulate(replace(EQUAL, shared_uplinks=True))
    assert shared != plain
    assert shared.over_bound < 1.6


def test_a_publisher_with_an_uplink_to_spare_is_asked_for_as_much_as_a_round_trip_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = replace(LINK, up_bytes_per_s=2.5 * MB, down_bytes_per_s=25.0 * MB)
    fast = replace(LINK, up_bytes_per_s=125.0 * MB, down_bytes_per_s=125.0 * MB)
    case = BroadcastCase(8 * MB, 65_536, (fast,) + (slow,) * 4, rates_known=False, seed=3)
    result = simulate(case)
    assert result.unfinished == 0
    monkeypatch.setattr(broadcast, "PUBLISHER_AHEAD_BYTES", 0)
    assert simulate(case).last_s > 1.2 * result.last_s


def test_a_publisher_sends_by_itself_what_relays_of_unknown_rates_hold_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = replace(LINK, up_bytes_per_s=0.5 * MB, down_bytes_per_s=25.0 * MB)
    fast = replace(LINK, up_bytes_per_s=125.0 * MB, down_bytes_per_s=125.0 * MB)
    case = BroadcastCase(4 * MB, 65_536, (fast,) + (slow,) * 12, rates_known=False, seed=3)
    result = simulate(case)
    assert result.unfinished == 0
    monkeypatch.setattr(Picker, "take_over", lambda *_: None)
    assert simulate(case).last_s > 1.25 * result.last_s


def test_where_chunks_come_slowly_peers_tell_of_them_no_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[float] = []
    tell = broadcasts.Broadcast._tell_one

    async def count(self: broadcasts.Broadcast, peer: broadcasts.PeerId) -> None:
        told.append(trio.current_time())
        await tell(self, peer)

    monkeypatch.setattr(broadcasts.Broadcast, "_tell_one", count)
    link = replace(LINK, up_bytes_per_s=0.262 * MB, down_bytes_per_s=0.262 * MB)
    case = BroadcastCase(4 * MB, 131_072, (link,) * 5, seed=3)  # two seconds to all
    result = simulate(case)
    seldom = len(told)
    told.clear()
    never = property(lambda picker: 0.0, lambda *_: None)
    monkeypatch.setattr(Picker, "cycle_s", never, raising=False)
    simulate(case)
    assert len(told) > 2 * seldom
    assert result.over_bound < 1.6


def test_on_fast_links_answers_carry_several_chunks_and_on_slow_ones_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    split = broadcasts._Memory.split

    def count(self: object, answer: bytes, most: int) -> list[bytes]:
        chunks = split(self, answer, most)
        sizes.append(len(chunks))
        return chunks

    monkeypatch.setattr(broadcasts._Memory, "split", count)
    assert simulate(replace(EQUAL, chunk_bytes=262_144)).unfinished == 0
    assert max(sizes) == 1  # 12.5 MB/s pass 250 kB in 20 ms
    sizes.clear()
    fast = LinkProfile(latency_s=0.001, up_bytes_per_s=125 * MB, down_bytes_per_s=125 * MB)
    result = simulate(replace(EQUAL, size_bytes=200 * MB, links=(fast,) * 9))
    assert result.unfinished == 0
    assert result.duplicate_share < 0.02
    together = sum(size for size in sizes if size > 1)
    assert together / sum(sizes) > 0.33  # relayed chunks, and not the first of any
