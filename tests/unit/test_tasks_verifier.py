"""The verifier: the same judgement inline and in a process, and no stranger's text stops it."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import trio
import trio.testing

from node.config import RunConfig
from node.envs.base import Problem
from node.verify import verifier as verifier_module
from node.verify.assignment import assigned_task, common_task
from node.verify.fair_queue import (
    PROVEN_GROUPS,
    WAITING_PER_PRODUCER_MAX,
)
from node.verify.verifier import (
    FIRST_SHARE,
    InlineVerifier,
    ProcessVerifier,
    Verifier,
)
from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError
from swarm.identity import Identity, PeerId
from swarm.rollouts import Task
from tests.support import run as run_async
from tests.unit.tasks_support import ALICE, BOB, first_tasks, make_config, make_group, make_run
from tests.unit.verifier_trap import CPU_LIMIT_S, WALL_LIMIT_S, fork_of, with_process


def with_both(run: RunConfig, body: Callable[[Verifier], Awaitable[None]]) -> None:
    run_async(body, InlineVerifier(run))
    with_process(run, body)


async def refusal(verifier: Verifier, *texts: str, run: RunConfig) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as refused:
        await verifier.verify(make_group(run, *texts))
    return refused.value


def test_both_verifiers_judge_alike() -> None:
    run = make_run()

    async def body(verifier: Verifier) -> None:
        tasks = first_tasks(run, ALICE, 3)
        posed = await verifier.problems(tasks)
        texts = [[problem.answer, "no"] for problem in posed]
        assert await verifier.score(tasks, texts) == [(1.0, 0.0)] * 3
        prompt, rewards = await verifier.verify(make_group(run, "no", posed[0].answer, "\ud800"))
        assert (prompt, rewards) == (posed[0].prompt, (0.0, 1.0, 0.0))
        assert await verifier.problems([]) == []

    with_both(run, body)


def test_only_the_producers_own_task_is_verified() -> None:
    run = make_run()
    own = assigned_task(run, ALICE, 0)
    forged = [
        assigned_task(run, BOB, 0),
        replace(own, index=1_000, seed=own.seed + 1),
        replace(own, parameters='{"max":1}'),
        replace(own, version="2"),
        replace(own, environment="no_such"),
    ]

    async def body(verifier: Verifier) -> None:
        for task in forged:
            with pytest.raises(RemoteProtocolError) as refused:
                await verifier.verify(make_group(run, "1", task=task))
            assert refused.value.reason is Reject.UNASSIGNED_TASK
        await verifier.verify(make_group(run, "1", task=assigned_task(run, ALICE, 1_000)))

    with_both(run, body)


def test_a_common_task_is_anybodys_and_again() -> None:
    run = make_run(common={"tasks": 8, "share": 0.5})
    common, own = common_task(run, 7), assigned_task(run, ALICE, 7)
    refused = [
        (common_task(run, 8), 0),  # there are eight
        (own, 1),  # once is all there is of it
        (common_task(make_run(common={"tasks": 9, "share": 0.5}), 7), 0),
    ]

    async def body(verifier: Verifier) -> None:
        for producer, attempt in ((ALICE, 0), (ALICE, 3), (BOB, 0)):
            group = make_group(run, "1", producer=producer, task=common)
            await verifier.verify(replace(group, attempt=attempt))
        await verifier.verify(make_group(run, "1", task=own))
        for task, attempt in refused:
            with pytest.raises(RemoteProtocolError) as refusal:
                await verifier.verify(replace(make_group(run, "1", task=task), attempt=attempt))
            assert refusal.value.reason is Reject.UNASSIGNED_TASK

    with_both(run, body)


def test_a_text_over_the_runs_limit_is_refused() -> None:
    run = make_run(limits={"text_chars_max": 10})

    async def body(verifier: Verifier) -> None:
        await verifier.verify(make_group(run, "x" * 10))
        assert (await refusal(verifier, "x" * 11, run=run)).reason is Reject.OVERSIZE

    with_both(run, body)


def test_a_scorer_that_does_not_end_is_cut_off_while_the_loop_goes_on(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))  # started
        gaps: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick, gaps)
            refused = await refusal(verifier, "loop", run=trap)
            nursery.cancel_scope.cancel()
        assert refused.reason is Reject.OVERRUN
        assert max(gaps) < CPU_LIMIT_S  # a loop that waited for the scorer would show all of it
        assert (await verifier.verify(make_group(trap, "good", "bad")))[1] == (1.0, 0.0)
        counters = verifier.counters
        assert (counters.second_tries, counters.overruns, counters.groups) == (1, 1, 2)
        assert counters.starts == 1  # what it cost was a fork
        assert counters.cpu_s["overrun"] == pytest.approx(1.25 * CPU_LIMIT_S)

    with_process(trap, body)


def test_a_scorer_that_waits_costs_nobody_a_fault(trap: RunConfig) -> None:
    """It used no CPU time: from here it looks as a machine that has none for us."""

    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        started = trio.current_time()
        with pytest.raises(ChildFailed):
            await verifier.verify(make_group(trap, "sleep"))
        assert trio.current_time() - started >= WALL_LIMIT_S
        assert (await verifier.verify(make_group(trap, "good")))[1] == (1.0,)
        assert (verifier.counters.starved, verifier.counters.overruns) == (1, 0)

    with_process(trap, body)


def test_an_honest_group_is_not_blamed_for_a_machine_that_was_paused(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        fork_of(verifier).suspend()
        with pytest.raises(ChildFailed):
            await verifier.verify(make_group(trap, "good"))
        assert (await verifier.verify(make_group(trap, "good")))[1] == (1.0,)

    with_process(trap, body)


@pytest.mark.parametrize("which", ["fork", "group"])
def test_an_honest_group_is_not_blamed_for_a_worker_that_somebody_killed(
    trap: RunConfig, which: str
) -> None:
    """As the kernel does where memory is short."""

    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        fork = fork_of(verifier)

        async def kill() -> None:
            while not fork.cpu_times().user > 0.02:  # noqa: ASYNC110 - at work, or spinning
                await trio.sleep(0.001)
            fork.kill() if which == "fork" else os.killpg(os.getpgid(fork.pid), signal.SIGKILL)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with pytest.raises(ChildFailed):
                await verifier.verify(make_group(trap, "loop"))
        assert (await verifier.verify(make_group(trap, "good")))[1] == (1.0,)
        assert verifier.counters.starts == (1 if which == "fork" else 2)

    with_process(trap, body)


def test_a_fork_that_is_killed_while_it_is_idle_leaves_no_answer_for_anybody(
    trap: RunConfig,
) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        for number in range(1, 4):
            fork = fork_of(verifier)
            fork.kill()
            while fork.is_running():  # noqa: ASYNC110 - it is another process's child
                await trio.sleep(0.001)
            texts = ["good"] * number + ["bad"]
            rewards = (await verifier.verify(make_group(trap, *texts)))[1]
            assert rewards == (1.0,) * number + (0.0,)
        assert (verifier.counters.starts, verifier.counters.starved) == (1, 0)

    with_process(trap, body)


def test_honest_groups_are_scored_on_a_machine_that_has_little_time_for_us(
    trap: RunConfig,
) -> None:
    """The worker runs now and then; by the clock a group takes longer than its whole CPU time."""

    async def starve(fork: psutil.Process) -> None:
        while True:
            fork.suspend()
            await trio.sleep(0.5)
            fork.resume()
            await trio.sleep(0.02)

    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(starve, fork_of(verifier))
            for _ in range(2):
                assert (await verifier.verify(make_group(trap, "busy", "good")))[1] == (0.0, 1.0)
            nursery.cancel_scope.cancel()
        assert trio.current_time() - started > 2 * 1.0
        assert verifier.counters.second_tries == verifier.counters.starved == 0

    with_process(trap, body, cpu_limit_s=1.0)


async def tick(gaps: list[float]) -> None:
    """Note how long each 10 ms really took."""
    while True:
        before = trio.current_time()
        await trio.sleep(0.01)
        gaps.append(trio.current_time() - before)


@pytest.mark.parametrize("text", ["loop", "die"])
def test_strangers_do_not_disturb_own_work(trap: RunConfig, text: str) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        task = assigned_task(trap, ALICE, 0)
        await verifier.verify(make_group(trap, "good"))
        await verifier.problems([task])
        order: list[str] = []

        async def stranger() -> None:
            refused = await refusal(verifier, text, run=trap)
            assert refused.reason is (Reject.OVERRUN if text == "loop" else Reject.UNVERIFIABLE)
            order.append("stranger")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stranger)
            assert await verifier.score([task], [["good", "bad"]]) == [(1.0, 0.0)]
            order.append("own")
        if text == "loop":
            assert order == ["own", "stranger"]

    with_process(trap, body)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 64,
        "9" * 4_000,
        "[" * 8_000,
        "(" * 8_000,
        "(10**10)**(10**10)",
        "('x' * 2**20) * 2**12",
        "([0] * 10**10)",
    ],
    ids=["regex", "integer", "nesting", "parentheses", "power", "memory", "list"],
)
def test_no_completion_takes_a_careless_scorer_and_the_node_down(
    trap: RunConfig, text: str
) -> None:
    """It costs its group, or its reward, and the next group is scored as ever."""

    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        found = await judged(verifier, trap, text, "good")
        assert found in ((0.0, 1.0), Reject.UNVERIFIABLE, Reject.OVERRUN)
        assert await judged(verifier, trap, "good", "bad") == (1.0, 0.0)

    with_process(trap, body)


async def judged(
    verifier: ProcessVerifier, run: RunConfig, *texts: str
) -> tuple[float, ...] | Reject:
    try:
        return (await verifier.verify(make_group(run, *texts)))[1]
    except RemoteProtocolError as error:
        return error.reason


@pytest.mark.parametrize("text", ["die", "leave", "crash"])
def test_a_scorer_that_ends_its_process_costs_that_group_alone(trap: RunConfig, text: str) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        assert (await refusal(verifier, "good", text, run=trap)).reason is Reject.UNVERIFIABLE
        assert (await verifier.verify(make_group(trap, "good")))[1] == (1.0,)
        assert verifier.counters.starts == 1

    with_process(trap, body)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no address space to read here")
def test_memory_is_bounded_and_running_into_the_bound_scores_zero(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        assert (await verifier.verify(make_group(trap, "memory", "good")))[1] == (0.0, 1.0)
        assert verifier.counters.scorer_errors == 1
        assert verifier.counters.starts == 1

    with_process(trap, body)


def test_prints_of_an_environment_do_not_reach_the_answers(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        for _ in range(3):
            assert (await verifier.verify(make_group(trap, "print", "bad")))[1] == (1.0, 0.0)

    with_process(trap, body)


def test_own_work_that_does_not_end_is_worth_zero_group_by_group(
    trap: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = verifier_module._Limits(CPU_LIMIT_S, WALL_LIMIT_S)
    monkeypatch.setattr(verifier_module, "OWN_BATCH_LIMITS", little)

    async def body(verifier: ProcessVerifier) -> None:
        tasks = first_tasks(trap, ALICE, 3)
        texts = [["good", "bad"], ["good", "loop"], ["bad", "good"]]
        rewards = await verifier.score(tasks, texts)
        assert rewards == [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
        assert await verifier.score(tasks[:1], [["die"]]) == [(None,)]
        assert "status" in verifier.counters.left_out[tasks[0]]
        assert await verifier.score(tasks[:1], [["good"]]) == [(1.0,)]

    with_process(trap, body)


def test_a_cancelled_call_leaves_no_answer_for_the_next_and_ends_no_worker(
    trap: RunConfig,
) -> None:
    """Else whoever can have a call cancelled makes everybody wait for another worker's start."""

    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        for text in ("busy", "loop"):
            with trio.move_on_after(0.01) as scope:
                await verifier.verify(make_group(trap, text, "bad"))
            assert scope.cancelled_caught
            assert (await verifier.verify(make_group(trap, "good")))[1] == (1.0,)
        with trio.move_on_after(0.01):
            await verifier.verify(make_group(trap, "sleep"))
        assert verifier.counters.starts == 1

    with_process(trap, body)


def test_calls_may_overlap(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        async def one(texts: tuple[str, ...]) -> None:
            rewards = (await verifier.verify(make_group(trap, *texts)))[1]
            assert rewards == tuple(float(text == "good") for text in texts)

        async with trio.open_nursery() as nursery:
            for number in range(WAITING_PER_PRODUCER_MAX):
                nursery.start_soon(one, ("good",) * (number % 5 + 1) + ("bad",))
        assert verifier.counters.starts == 1

    with_process(trap, body)


def test_wrong_parameters_stop_own_work_with_the_reason() -> None:
    run = make_run({"name": "scripted_sum", "parameters": {"maximum": 3}})

    async def body(verifier: Verifier) -> None:
        with pytest.raises(ConfigError, match="environment scripted_sum: "):
            await verifier.problems([assigned_task(run, ALICE, 0)])

    with_process(run, body)


def test_a_problem_that_cannot_be_posed_is_counted_and_named() -> None:
    run = make_run({"name": "scripted_sum", "parameters": {"maximum": 3}})
    verifier = InlineVerifier(run)
    (problem,) = run_async(verifier.problems, [assigned_task(run, ALICE, 0)])
    assert problem.failure.startswith("environment scripted_sum: ")
    assert problem.failure in (verifier.counters.note or "")


@pytest.mark.parametrize("fault", ["settings", "program", "death"])
def test_a_worker_that_does_not_start_is_nobody_elses_fault(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"maximum": 3} if fault == "settings" else {}
    run = make_run({"name": "scripted_sum", "parameters": parameters})
    with monkeypatch.context() as patched:
        if fault != "settings":
            program = {"program": "/nonexistent/python", "death": shutil.which("true")}[fault]
            patched.setattr(sys, "executable", program)

        async def fails(verifier: ProcessVerifier) -> None:
            with pytest.raises(ChildFailed):
                await verifier.verify(make_group(run, "1"))

        with_process(run, fails)

    async def works(verifier: ProcessVerifier) -> None:
        if fault != "settings":
            await verifier.verify(make_group(run, "1"))

    with_process(run, works)


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_nothing_is_left_running_afterwards(sandbox: str, trap: RunConfig) -> None:
    async def main() -> list[psutil.Process]:
        async with ProcessVerifier.open(make_config(trap, verify_sandbox=sandbox)) as verifier:
            await verifier.verify(make_group(trap, "good"))
            with trio.move_on_after(0.05):
                await verifier.verify(make_group(trap, "loop"))
            fork = fork_of(verifier)
            return [fork, *fork.parents()[:1]]

    for process in run_async(main):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)  # noqa: TID251 - it was killed; the kernel takes a moment


async def score_right_and_wrong(verifier: Verifier, tasks: Sequence[Task]) -> list[Problem]:
    """Score the right answer and one that is code; returns the problems."""
    posed = await verifier.problems(tasks)
    texts = [[problem.answer, "exit()"] for problem in posed]
    assert await verifier.score(tasks, texts) == [(1.0, 0.0)] * len(tasks)
    return posed


@pytest.mark.parametrize("missing", ["nothing", "namespaces", "mounts", "landlock"])
def test_the_nine_are_verified_where_a_layer_of_the_sandbox_is_missing(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In most containers there are no namespaces for a user, and where AppArmor keeps them from
    users there are, but nothing can be mounted in them."""
    name = {
        "namespaces": "namespaces.enter",
        "mounts": "namespaces._mount",
        "landlock": "landlock.confine",
    }.get(missing)
    (tmp_path / "sitecustomize.py").write_text(
        "def is_missing(*arguments):\n    raise OSError('left out')\n"
        f"from node.sandbox import landlock, namespaces\n{name} = is_missing\n"
        if name
        else ""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    run = make_run({"name": "binary_matrix"})

    async def main() -> None:
        async with ProcessVerifier.open(make_config(run)) as verifier:
            await score_right_and_wrong(verifier, first_tasks(run, ALICE, 4))

    run_async(main)


def test_the_nine_are_verified_in_a_process() -> None:
    run = make_run(
        {"name": "propositional_logic", "parameters": {"prompt": "terse"}},
        {"name": "binary_matrix"},
    )

    async def main() -> None:
        async with ProcessVerifier.open(make_config(run)) as verifier:
            tasks = first_tasks(run, ALICE, 20)
            posed = await score_right_and_wrong(verifier, tasks)
            group = make_group(run, posed[3].answer, "[", task=tasks[3])
            assert await verifier.verify(group) == (posed[3].prompt, (1.0, 0.0))
            assert verifier.counters.second_tries == 0

    run_async(main)


# --- many strangers ------------------------------------------------------------------------------


def test_a_flood_of_dear_groups_holds_an_honest_one_up_for_one_budget_at_most(
    trap: RunConfig,
) -> None:
    """Thirty keys with an overrun each are before it, and another takes the place of each."""

    async def body(verifier: ProcessVerifier) -> None:
        honest, keys = BOB, [Identity.generate().peer_id for _ in range(30)]
        for index in range(PROVEN_GROUPS):
            task = assigned_task(trap, honest, index)
            await verifier.verify(make_group(trap, "good", producer=honest, task=task))

        async def attack(producer: PeerId) -> None:
            for index in range(5):
                task = assigned_task(trap, producer, index)
                with suppress(RemoteProtocolError, ChildFailed):
                    await verifier.verify(make_group(trap, "loop", producer=producer, task=task))

        waits: list[float] = []
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(attack, key)
            await trio.testing.wait_all_tasks_blocked()
            for index in range(10):
                before = spent(verifier)
                task = assigned_task(trap, honest, PROVEN_GROUPS + index)
                await verifier.verify(make_group(trap, "good", producer=honest, task=task))
                waits.append(spent(verifier) - before)
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert max(waits) <= CPU_LIMIT_S  # CPU seconds of others: the clock is the machine's
        assert spent(verifier) > 5 * FIRST_SHARE * CPU_LIMIT_S  # there was something to wait for

    with_process(trap, body)


def spent(verifier: ProcessVerifier) -> float:
    """CPU seconds that went into overruns."""
    return verifier.counters.cpu_s["overrun"]
