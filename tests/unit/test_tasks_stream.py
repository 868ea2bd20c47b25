"""Which task a producer has at an index."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.verification.assignment import HELD_OUT_PRODUCER, INDEX_MAX, assigned_task, held_out_tasks
from swarm.errors import RemoteProtocolError
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
    assert (task.seed, task.index, task.parameters) == (142079182355703853, 5, "{}")


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
