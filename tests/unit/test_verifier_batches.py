"""Groups that go to the verifier's worker as one batch: each is judged as if it were alone."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from node.config import RunConfig
from node.verify import verifier as verifier_module
from node.verify.assignment import assigned_task
from node.verify.fair_queue import BATCH_GROUPS_MAX, PROVEN_GROUPS
from node.verify.verifier import FIRST_SHARE, ProcessVerifier
from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import PeerId
from tests.unit.tasks_support import ALICE, BOB, make_group
from tests.unit.verifier_trap import CPU_LIMIT_S, STUCK_ONCE, fork_of, with_process

Sizes = list[int]  # how many groups went to the worker at a time


async def proven(verifier: ProcessVerifier, run: RunConfig, *producers: PeerId) -> Sizes:
    """Let producers become proven; the sizes of all batches from then on."""
    for producer in producers:
        for index in range(PROVEN_GROUPS):
            task = assigned_task(run, producer, index)
            await verifier.verify(make_group(run, "good", producer=producer, task=task))
    sizes: Sizes = []
    call = verifier._foreign.call

    async def noting(request: Any, limits: Any) -> Any:
        sizes.append(len(request["tasks"]))
        return await call(request, limits)

    verifier._foreign.call = noting  # type: ignore[method-assign]
    return sizes


Judged = tuple[float, ...] | Reject


async def judge_together(
    verifier: ProcessVerifier, run: RunConfig, works: Sequence[tuple[PeerId, str]]
) -> tuple[list[Judged | None], list[int]]:
    """What each group, of a producer and with one text beside a good one, was found to be; and in
    which order they were done."""
    found: list[Judged | None] = [None] * len(works)
    order: list[int] = []

    async def one(at: int, producer: PeerId, text: str) -> None:
        task = assigned_task(run, producer, PROVEN_GROUPS + at)
        group = make_group(run, *["good"] * at, text, producer=producer, task=task)
        try:
            found[at] = (await verifier.verify(group))[1]
        except RemoteProtocolError as error:
            found[at] = error.reason
        order.append(at)

    async with trio.open_nursery() as nursery:
        for at, work in enumerate(works):
            nursery.start_soon(one, at, *work)
    return found, order


def rewards_of(works: Sequence[tuple[PeerId, str]]) -> list[Judged]:
    return [(1.0,) * at + (float(text == "good"),) for at, (_, text) in enumerate(works)]


def check_one_bad_group_among_others(run: RunConfig, text: str, reason: Reject) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        sizes = await proven(verifier, run, ALICE, BOB)
        works = [(ALICE, "good"), (BOB, text), *[(ALICE, "bad"), (ALICE, "good")] * 3]
        found, _ = await judge_together(verifier, run, works)
        assert sizes[0] == len(works)
        assert found == [
            reason if who is BOB else x
            for (who, _), x in zip(works, rewards_of(works), strict=True)
        ]
        assert verifier._waiting.is_proven(ALICE)
        assert verifier.counters.overruns == (reason is Reject.OVERRUN)
        now = trio.current_time()
        used = {who: verifier._waiting._levels(who, 0.0, now)[1] for who in (ALICE, BOB)}
        assert used[ALICE] < FIRST_SHARE * CPU_LIMIT_S < used[BOB]
        assert verifier.counters.starts == 1

    with_process(run, body)


BAD_GROUPS = [
    ("loop", Reject.OVERRUN),
    ("die", Reject.UNVERIFIABLE),
    ("crash", Reject.UNVERIFIABLE),
]


@pytest.mark.parametrize(("text", "reason"), BAD_GROUPS)
def test_a_bad_group_in_a_batch_costs_its_producer_alone(
    trap: RunConfig, text: str, reason: Reject
) -> None:
    check_one_bad_group_among_others(trap, text, reason)


def test_blaming_a_whole_batch_is_noticed(trap: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    blame = ProcessVerifier._blame

    def all_of_them(verifier: ProcessVerifier, batch: Any, *how: Any) -> None:
        for ticket in batch:
            blame(verifier, [ticket], *how)

    monkeypatch.setattr(ProcessVerifier, "_blame", all_of_them)
    with pytest.raises(ExceptionGroup) as noticed:
        check_one_bad_group_among_others(trap, "die", Reject.UNVERIFIABLE)
    assert noticed.group_contains(AssertionError)


def check_order(run: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        sizes = await proven(verifier, run, ALICE, BOB)
        works = [((ALICE, BOB)[at % 2], "good" if at % 3 else "bad") for at in range(24)]
        assert (await judge_together(verifier, run, works))[0] == rewards_of(works)
        assert sizes == [BATCH_GROUPS_MAX, len(works) - BATCH_GROUPS_MAX]

    with_process(run, body)


def test_each_caller_gets_what_its_own_group_is_worth(trap: RunConfig) -> None:
    check_order(trap)


def test_results_in_another_order_are_noticed(
    trap: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = verifier_module._result
    monkeypatch.setattr(verifier_module, "_result", lambda answer: result(answer)[::-1])
    with pytest.raises(ExceptionGroup) as noticed:
        check_order(trap)
    assert noticed.group_contains(AssertionError)


@pytest.mark.parametrize("which", ["fork", "group"])
def test_a_worker_that_is_killed_in_the_middle_of_a_batch_is_nobodys_fault(
    trap: RunConfig, which: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    async def body(verifier: ProcessVerifier) -> None:
        sizes = await proven(verifier, trap, ALICE, BOB)
        fork = fork_of(verifier)

        async def kill() -> None:
            while not begun.exists():  # noqa: ASYNC110 - another process makes it
                await trio.sleep(0.001)
            fork.kill() if which == "fork" else os.killpg(os.getpgid(fork.pid), signal.SIGKILL)

        works = [(ALICE, f"{STUCK_ONCE}{begun}"), (BOB, "good"), (ALICE, "good"), (BOB, "bad")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            found, _ = await judge_together(verifier, trap, works)
        assert found == rewards_of(works)
        assert sizes == [4, 1, 1, 1, 1]
        assert verifier.counters.starts == (1 if which == "fork" else 2)
        assert verifier._waiting.is_proven(ALICE)
        assert verifier._waiting.is_proven(BOB)

    with_process(trap, body, cpu_limit_s=2.0)


def check_dear_batch(run: RunConfig) -> None:
    """Groups that come while a batch of dear ones is at work do not wait for all of it."""

    async def body(verifier: ProcessVerifier) -> None:
        sizes = await proven(verifier, run, ALICE, BOB)
        done: list[PeerId] = []

        async def one(producer: PeerId, index: int, text: str) -> None:
            task = assigned_task(run, producer, 100 + index)
            await verifier.verify(make_group(run, text, producer=producer, task=task))
            done.append(producer)

        async with trio.open_nursery() as nursery:
            for index in range(10):  # each takes 50 ms of CPU
                nursery.start_soon(one, ALICE, index, "busy")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(one, BOB, 0, "good")
        assert sizes[0] == 10
        assert done.index(BOB) < 8

    with_process(run, body, cpu_limit_s=2.0)


def test_a_batch_of_dear_groups_is_cut_short(trap: RunConfig) -> None:
    check_dear_batch(trap)


def test_a_batch_without_a_bound_in_time_is_noticed(
    trap: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_module, "BATCH_CPU_S", 10.0)
    with pytest.raises(ExceptionGroup) as noticed:
        check_dear_batch(trap)
    assert noticed.group_contains(AssertionError)


def test_a_caller_that_leaves_a_batch_takes_nobody_with_it(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        sizes = await proven(verifier, trap, ALICE, BOB)
        async with trio.open_nursery() as nursery:
            task = assigned_task(trap, BOB, 100)
            group = make_group(trap, "busy", producer=BOB, task=task)
            nursery.start_soon(verifier.verify, group)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
        works = [(ALICE, "good"), (BOB, "bad")]
        assert (await judge_together(verifier, trap, works))[0] == rewards_of(works)
        assert sizes == [1, 2]
        assert verifier.counters.starts == 1

    with_process(trap, body)


def test_where_texts_may_run_code_a_group_goes_alone(trap: RunConfig) -> None:
    """It could speak for the others of its request."""

    async def body(verifier: ProcessVerifier) -> None:
        sizes = await proven(verifier, trap, ALICE)
        works = [(ALICE, "good")] * 4
        await judge_together(verifier, trap, works)
        assert max(sizes) > 1
        sizes.clear()
        verifier._prepare["apart"] = True  # the worker that runs was told otherwise
        found, _ = await judge_together(verifier, trap, [(ALICE, "bad"), *works[1:]])
        assert found == rewards_of([(ALICE, "bad"), *works[1:]])
        assert sizes == [1] * 4

    with_process(trap, body)
