"""Which task a producer has at an index."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.verify.assignment import (
    HELD_OUT_PRODUCER,
    INDEX_MAX,
    assigned_task,
    common_task,
    held_out_tasks,
    is_common,
    next_task,
)
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import public_key_of
from tests.unit.tasks_support import ALICE, BOB, first_tasks, make_run

TWO = (
    {"name": "scripted_sum", "weight": 3.0, "parameters": {"max": 9}},
    {"name": "scripted_sum", "weight": 1.0, "parameters": {"max": 99}},
)


def test_a_task_follows_from_run_producer_and_index_alone() -> None:
    assert assigned_task(make_run(), ALICE, 7) == assigned_task(make_run(), ALICE, 7)


def test_this_task_is_the_same_at_every_node_and_in_every_release() -> None:
    task = assigned_task(make_run(), "12D3KooW", 5)
    assert (task.seed, task.index, task.parameters) == (241699991694286913, 5, "{}")


def test_producers_and_runs_have_tasks_of_their_own() -> None:
    run, other = make_run(*TWO), make_run(*TWO, reward="partial")
    streams = [
        first_tasks(run, ALICE, 100),
        first_tasks(run, BOB, 100),
        first_tasks(other, ALICE, 100),
        held_out_tasks(run),
    ]
    # the library draws a problem from seed + index, so these sums must not meet
    drawn = [task.seed + task.index for stream in streams for task in stream]
    assert len(set(drawn)) == len(drawn)


def test_environments_are_drawn_by_weight() -> None:
    tasks = first_tasks(make_run(*TWO), ALICE, 4000)
    share = Counter(task.parameters for task in tasks)['{"max":9}'] / 4000
    assert share == pytest.approx(0.75, abs=0.03)


def test_held_out_tasks_are_of_nobody_and_of_the_wanted_number() -> None:
    tasks = held_out_tasks(make_run(held_out={"tasks": 30}))
    assert len(set(tasks)) == 30
    with pytest.raises(RemoteProtocolError):
        public_key_of(HELD_OUT_PRODUCER)


@given(st.text(max_size=64), st.integers(0, INDEX_MAX))
def test_any_producer_text_and_index_give_a_task_that_fits_the_wire(
    producer: str, index: int
) -> None:
    task = assigned_task(make_run(*TWO), producer.encode("utf-8", "replace").decode(), index)
    assert 0 <= task.seed + task.index < 2**63


COMMON = {"tasks": 8, "share": 0.25}  # an epoch has 32 places


def test_each_common_task_is_done_once_in_an_epoch_and_by_all() -> None:
    run = make_run(*TWO, common=COMMON)
    common = {common_task(run, number) for number in range(8)}
    orders = []
    for producer in (ALICE, BOB):
        for epoch in range(3):
            due = [next_task(run, producer, 32 * epoch + place) for place in range(32)]
            met = [(place, task) for place, (task, _) in enumerate(due) if task in common]
            assert {task for _, task in met} == common
            assert len(met) == 8
            assert {again for task, again in due if task in common} == {epoch}
            assert {again for task, again in due if task not in common} == {0}
            orders.append(tuple(met))
    assert len(set(orders)) == len(orders)
    own = [next_task(run, ALICE, index)[0] for index in range(96)]
    assert [task for task in own if task not in common] == list(first_tasks(run, ALICE, 72))


def test_without_a_share_nothing_changes() -> None:
    run = make_run(*TWO)
    expected = [(task, 0) for task in first_tasks(run, ALICE, 64)]
    assert [next_task(run, ALICE, index) for index in range(64)] == expected
    assert not is_common(run, common_task(run, 0))


def test_an_epoch_has_a_bound() -> None:
    with pytest.raises(ConfigError, match=r"common.tasks = 4096: .* at most 65536"):
        make_run(common={"tasks": 4096, "share": 0.01})
