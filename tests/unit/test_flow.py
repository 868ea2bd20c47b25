"""How many completions are in flight: the rule, engines that it settles on, and the places."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from node.engines.vllm.concurrency import (
    CACHE_NEARLY_EMPTY,
    LIMIT_FIRST,
    LIMIT_MIN,
    EngineLoad,
    Flow,
    next_limit,
)
from node.engines.vllm.engine import LOOK_INTERVAL_S
from tests.support import run


def load(
    running: int = 0, waiting: int = 0, share: float = 0.0, preempted: int = 0, tokens: int = 0
) -> EngineLoad:
    return EngineLoad(running, waiting, share, preempted, tokens)


@pytest.mark.parametrize(
    ("said", "preempted", "wanted", "expected"),
    [
        (load(64, 0, 0.5), 0, True, 66),
        (load(64, 0, 0.5), 0, False, 64),
        (load(64, 3, 0.5), 0, True, 64),
        (load(64, 0, 0.95), 0, True, 64),
        (load(64, 0, 0.9), 1, True, 63),
        (load(60, 4, 1.0), 5, True, 59),
        (load(70, 9, 1.0), 5, True, 64),
        (load(8, 0, 1.0), 5, False, 57),
    ],
    ids=[
        "grows",
        "not wanted",
        "queues",
        "full",
        "preempts",
        "what it holds",
        "comes down",
        "few left",
    ],
)
def test_the_rule(said, preempted, wanted, expected):
    found = next_limit(64, 1024, said, preempted, wanted=wanted, ended=True, holds=0)
    assert found == expected


@pytest.mark.parametrize(
    ("said", "preempted", "wanted", "ended", "holds", "expected"),
    [
        (load(64), 0, True, False, 500, 128),
        (load(64), 0, True, False, 100, 100),
        (load(64), 0, True, False, 64, 64),
        (load(64), 0, True, False, 3, 64),
        (load(64), 0, True, True, 65, 66),
        (load(64), 0, True, False, 0, 64),
        (load(64), 0, False, False, 500, 64),
        (load(60, 4), 0, True, False, 500, 64),
        (load(64, 0, CACHE_NEARLY_EMPTY), 0, True, False, 500, 64),
        (load(64, 0, CACHE_NEARLY_EMPTY), 0, True, True, 500, 66),
        (load(64), 1, True, False, 500, 63),
    ],
    ids=[
        "doubles",
        "what it holds",
        "holds no more",
        "holds less",
        "grows more",
        "not known",
        "not wanted",
        "queues",
        "not empty",
        "not empty, and grows",
        "preempts",
    ],
)
def test_it_doubles_while_the_cache_is_nearly_empty(
    said, preempted, wanted, ended, holds, expected
):
    """Up to what the cache holds of the longest, and before anything has ended."""
    found = next_limit(64, 1024, said, preempted, wanted=wanted, ended=ended, holds=holds)
    assert found == expected


def test_it_ends_at_the_most_and_at_the_least():
    assert next_limit(1020, 1024, load(1020), 0, wanted=True, ended=True) == 1024
    assert next_limit(600, 1024, load(600), 0, wanted=True, ended=False, holds=2000) == 1024
    assert next_limit(2, 1024, load(2), 0, wanted=True, ended=True) == 3
    assert next_limit(1, 1024, load(1, 0, 1.0), 1, wanted=True, ended=True) == LIMIT_MIN


def test_it_does_not_go_down_again_for_what_it_has_already_gone_down_for():
    """All that was let in stays in flight until it ends, and is thrown out meanwhile."""
    limit = 128
    for _ in range(10):
        limit = next_limit(limit, 128, load(60, 68, 1.0), 8, wanted=True, ended=True)
    assert limit == 59


@dataclass(eq=False, slots=True)
class Sequence:
    """A completion in an engine."""

    length: int
    tokens: int = 0
    blocks: int = 0


@dataclass
class Machine:
    """An engine with a key-value cache of blocks, after vLLM's scheduler: completions take blocks
    as they grow; where none is left, the last one that was let in is thrown out and computed again
    once there is room. It makes `stride` tokens of each completion at a time."""

    holds: int  # full completions
    length: Callable[[Random], int]  # of a completion
    length_max: int
    step_s: float  # of a token each, with none
    sequence_s: float  # more, for each completion
    prompt_s: float  # of a token that is computed again
    seats: int  # at a time
    stride: int = 1
    block: int = 16
    rng: Random = field(default_factory=lambda: Random(1))
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    preempted: int = 0
    ended: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.total = self.free = self.holds * math.ceil(self.length_max / self.block)

    def fill(self, limit: int) -> None:
        """Take completions up to a limit, and one where there is none."""
        for _ in range(max(limit, 1) - len(self.running) - len(self.waiting)):
            self.waiting.append(Sequence(self.length(self.rng)))

    def step(self) -> float:
        """Make tokens; how long it took."""
        thrown_out = self.preempted
        for each in list(self.running):
            if each.blocks:  # not thrown out by another one
                self._grow(each)
        again = 0 if self.preempted > thrown_out else self._let_in()
        for each in self.running:
            each.tokens += self.stride
            self.tokens += self.stride
        for each in [each for each in self.running if each.tokens >= each.length]:
            self.free += each.blocks
            self.ended += 1
        self.running = [each for each in self.running if each.tokens < each.length]
        batch_s = self.step_s + self.sequence_s * len(self.running)
        return self.stride * batch_s + self.prompt_s * again

    def _grow(self, sequence: Sequence) -> None:
        more = self._wanted(sequence) - sequence.blocks
        while more > self.free:
            last = self.running.pop()
            self.free += last.blocks
            last.blocks = 0
            self.waiting.insert(0, last)
            self.preempted += 1
            if last is sequence:
                return
        sequence.blocks += more
        self.free -= more

    def _let_in(self) -> int:
        """Tokens that were made before."""
        again = 0
        while self.waiting and len(self.running) < self.seats:
            wanted = self._wanted(self.waiting[0])
            if wanted > self.free:
                break
            sequence = self.waiting.pop(0)
            sequence.blocks = wanted
            self.free -= wanted
            self.running.append(sequence)
            again += sequence.tokens
        return again

    def _wanted(self, sequence: Sequence) -> int:
        return math.ceil(min(sequence.tokens + self.stride, self.length_max) / self.block)

    @property
    def load(self) -> EngineLoad:
        share = 1 - self.free / self.total
        tokens = self.total * self.block
        return EngineLoad(len(self.running), len(self.waiting), share, self.preempted, tokens)


Rule = Callable[[int, EngineLoad, int, bool], int]


def worked(machine: Machine, rule: Rule, limit: int, span_s: float) -> tuple[float, list[int]]:
    """Tokens a second in the later two thirds of a span, and the limits in them, at each look."""
    now_s = look_s = 0.0
    preempted = ended = early = 0
    limits = []
    while now_s < span_s:
        if now_s >= look_s:
            new = machine.preempted - preempted
            limit = rule(limit, machine.load, new, machine.ended > ended)
            preempted, ended = machine.preempted, machine.ended
            look_s += LOOK_INTERVAL_S
            if now_s >= span_s / 3:
                limits.append(limit)
        machine.fill(limit)
        if now_s < span_s / 3:
            early = machine.tokens
        now_s += machine.step()
    return (machine.tokens - early) / (span_s * 2 / 3), limits


def tuned(limit_max: int, longest: int) -> Rule:
    """`longest`: tokens of a completion."""

    def rule(limit: int, said: EngineLoad, preempted: int, ended: bool) -> int:
        holds = said.cache_tokens // longest
        return next_limit(limit, limit_max, said, preempted, wanted=True, ended=ended, holds=holds)

    return rule


def by_chance(mean: int, most: int) -> Callable[[Random], int]:
    return lambda rng: min(most, 1 + int(rng.expovariate(1 / mean)))


# How to make it, limits among which its best one is, and for how long it works
MACHINES = {
    "slow": (
        lambda: Machine(3, by_chance(260, 600), 600, 0.1, 0.01, 0.002, 128),
        (8, 12, 16, 128),
        3000.0,
    ),
    "two cores": (
        lambda: Machine(24, by_chance(260, 600), 600, 0.004, 0.00016, 4e-5, 128, 2),
        (24, 48, 64, 128),
        90.0,
    ),
    "GPU": (
        lambda: Machine(100, by_chance(800, 2000), 2000, 0.012, 1e-5, 2e-5, 1024, 32),
        (256, 384, 512, 1024),
        240.0,
    ),
    "large GPU": (
        lambda: Machine(1024, by_chance(800, 2000), 2000, 0.010, 1e-5, 1e-5, 1024, 32),
        (256, 1024),
        180.0,
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_it_does_as_well_as_the_best_limit_on_any_machine(name):
    """From the same beginning, and then it stays about there."""
    make, fixed, span_s = MACHINES[name]
    limit_max, longest = make().seats, make().length_max
    best = max(worked(make(), lambda limit, *_: limit, each, span_s)[0] for each in fixed)
    rule = tuned(limit_max, longest)
    rate, limits = worked(make(), rule, min(LIMIT_FIRST, limit_max), span_s)
    assert rate >= 0.95 * best
    assert max(limits) <= 3 * min(limits) + 16


def test_a_cache_that_holds_all_gets_all():
    make, _, span_s = MACHINES["large GPU"]
    machine = make()
    _, limits = worked(machine, tuned(1024, machine.length_max), LIMIT_FIRST, span_s)
    assert (set(limits), machine.preempted) == ({1024}, 0)


LONG_TOKENS = 8000


def long_completions(holds: int) -> Machine:
    """A GPU on which nothing ends for minutes, and then everything about at once."""
    return Machine(holds, lambda _: LONG_TOKENS, LONG_TOKENS, 0.015, 1e-5, 1e-5, 1024, 32)


def test_a_large_cache_fills_before_the_first_long_completion_ends():
    machine = long_completions(1024)
    span_s = 12 * LOOK_INTERVAL_S
    _, limits = worked(machine, tuned(1024, LONG_TOKENS), LIMIT_FIRST, span_s)
    assert (set(limits), machine.ended) == ({1024}, 0)
    while not machine.ended:
        machine.step()
    assert machine.preempted == 0


@pytest.mark.parametrize("holds", [8, 64, 100, 300])
def test_a_small_cache_gets_no_more_because_it_is_empty_at_first(holds):
    """And where more are let in than it holds, many are thrown out."""
    machine = long_completions(holds)
    span_s = 12 * LOOK_INTERVAL_S
    _, limits = worked(machine, tuned(1024, LONG_TOKENS), LIMIT_FIRST, span_s)
    assert set(limits) == {max(LIMIT_FIRST, holds)}
    greedy = long_completions(holds)
    _, limits = worked(greedy, tuned(1024, LONG_TOKENS // 64), LIMIT_FIRST, span_s)
    assert max(limits) > 2 * max(LIMIT_FIRST, holds)
    for each in (machine, greedy):
        while not each.ended:
            each.step()
    assert machine.preempted == max(0, LIMIT_FIRST - holds)
    assert greedy.preempted > machine.preempted + holds


def test_an_engine_started_anew_counts_from_zero():
    flow = Flow(1024)
    flow.look(load(preempted=5))
    before = flow.limit
    assert flow.preempted == 5
    flow.look(load(preempted=0))
    assert (flow.preempted, flow.limit) == (5, before)


def test_places_go_round_in_order_and_the_limit_holds():
    async def body():
        flow = Flow(4)
        inside: list[int] = []
        leave = [trio.Event() for _ in range(4)]

        async def hold(number: int, count: int) -> None:
            async with flow.place(count):
                inside.append(number)
                await leave[number].wait()
            inside.remove(number)

        async with trio.open_nursery() as nursery:
            for number, count in enumerate((3, 2, 1, 9)):
                nursery.start_soon(hold, number, count)
                await wait_all_tasks_blocked()
            assert (inside, flow.in_flight) == ([0], 3)  # the third would fit, and waits its turn
            leave[0].set()
            await wait_all_tasks_blocked()
            assert (inside, flow.in_flight) == ([1, 2], 3)
            leave[1].set()
            await wait_all_tasks_blocked()
            assert inside == [2]
            leave[2].set()
            await wait_all_tasks_blocked()
            assert (inside, flow.in_flight) == ([3], 9)  # too many for the limit, and alone
            leave[3].set()
        assert flow.in_flight == 0

    run(body)


def test_it_grows_when_something_waits_and_something_has_ended():
    async def body():
        flow = Flow(1024)
        leave = trio.Event()

        async def hold(count: int) -> None:
            async with flow.place(count):
                await leave.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, LIMIT_FIRST - 1)
            await wait_all_tasks_blocked()
            async with flow.place(1):
                flow.look(load(LIMIT_FIRST, 0, 0.5))
                assert flow.limit == LIMIT_FIRST  # nothing waits, and nothing has ended
                nursery.start_soon(hold, 4)
                await wait_all_tasks_blocked()
                flow.look(load(LIMIT_FIRST, 0, 0.5))
                assert flow.limit == LIMIT_FIRST  # nothing has ended
            flow.look(load(LIMIT_FIRST, 0, 0.5))
            assert flow.limit > LIMIT_FIRST
            grown = flow.limit
            flow.look(load(LIMIT_FIRST, 0, 0.5))
            assert flow.limit == grown  # nothing has ended since
            leave.set()

    run(body)


def test_it_doubles_up_to_what_it_holds_of_the_longest_that_ever_asked():
    async def body():
        flow = Flow(1024)
        async with trio.open_nursery() as nursery:

            async def hold(count: int, longest: int) -> None:
                async with flow.place(count, longest):
                    await trio.sleep_forever()

            nursery.start_soon(hold, LIMIT_FIRST, 100)
            await wait_all_tasks_blocked()
            flow.look(load(tokens=30_000))
            assert flow.limit == LIMIT_FIRST  # nothing waits
            nursery.start_soon(hold, 1024, 100)
            await wait_all_tasks_blocked()
            flow.look(load())
            assert flow.limit == LIMIT_FIRST  # nobody says what it holds
            flow.look(load(tokens=30_000))
            assert flow.limit == 2 * LIMIT_FIRST
            nursery.start_soon(hold, 1, 200)
            await wait_all_tasks_blocked()
            nursery.start_soon(hold, 1, 50)
            await wait_all_tasks_blocked()
            for _ in range(5):
                flow.look(load(tokens=30_000))
            assert flow.limit == 150
            nursery.cancel_scope.cancel()

    run(body)


def test_who_gives_up_waiting_leaves_no_hole():
    async def body():
        flow = Flow(4)
        async with flow.place(4):
            with trio.move_on_after(0):
                async with flow.place(1):
                    raise AssertionError("there was no room")
            assert flow.in_flight == 4
        async with flow.place(4):
            assert flow.in_flight == 4

    run(body)
