"""How many completions are in flight: the rule, a machine that it settles on, and the places."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from node.engines.flow import LIMIT_FIRST, LIMIT_MIN, STEP, EngineLoad, Flow, next_limit
from tests.support import run


def load(running: int = 0, waiting: int = 0, share: float = 0.0, preempted: int = 0) -> EngineLoad:
    return EngineLoad(running, waiting, share, preempted)


@pytest.mark.parametrize(
    ("said", "preempted", "wanted", "expected"),
    [
        (load(64, 0, 0.5), 0, True, 64 + STEP),
        (load(64, 0, 0.5), 0, False, 64),
        (load(64, 3, 0.5), 0, True, 64),
        (load(64, 0, 0.95), 0, True, 64),
        (load(64, 0, 0.5), 1, True, 44),
        (load(20, 10, 1.0), 5, True, 21),
        (load(1, 0, 1.0), 1, True, LIMIT_MIN),
        (load(), 2, True, 44),
    ],
    ids=["grows", "not wanted", "queues", "full", "preempts", "less than allowed", "least", "idle"],
)
def test_the_rule(said, preempted, wanted, expected):
    assert next_limit(64, 1024, said, preempted, wanted=wanted) == expected


def test_it_ends_at_the_most():
    assert next_limit(1020, 1024, load(1020), 0, wanted=True) == 1024


@pytest.mark.parametrize("holds", [3, 40, 700])
def test_it_settles_about_what_a_cache_holds(holds):
    """An engine that throws out what is over `holds`, looked at a hundred times."""
    limit, seen = LIMIT_FIRST, []
    for _ in range(100):
        over = max(0, limit - holds)
        said = load(min(limit, holds), 0, min(1.0, limit / holds))
        limit = next_limit(limit, 1024, said, over, wanted=True)
        seen.append(limit)
    assert all(0.6 * holds <= each <= holds + STEP for each in seen[-40:])


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
