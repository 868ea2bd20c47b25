"""The verifier: the same judgement inline and in a process, and no stranger's text stops it."""

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from node.config import RunConfig
from node.tasks import registry, scoring
from node.tasks.base import Problem
from node.tasks.stream import assigned_task
from node.tasks.verifier import InlineVerifier, ProcessVerifier, Verifier
from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError
from swarm.rollouts import Task
from tests.support import run as run_async
from tests.unit.tasks_support import ALICE, BOB, first_tasks, make_config, make_group, make_run

TIME_LIMIT_S = 0.5
_HELD: list[bytearray] = []


def _be_careless(text: str) -> None:
    if text.startswith("a" * 20):
        re.fullmatch(r"(a+)+b", text)  # each letter more doubles the time
    if text.startswith("9" * 20):
        int(text) ** int(text)
    if text.startswith("["):
        json.loads(text)
    if text.startswith("("):
        eval(text)


class Trap:
    """Does what the text says, as a careless scorer might."""

    name = "trap"
    version = "1"

    def problem(self, task: Task) -> Problem:
        return Problem(task, "?", "good", {})

    def score(self, problem: Problem, text: str) -> float:
        if text == "loop":
            while True:
                pass
        if text == "sleep":
            threading.Event().wait()
        if text == "memory":
            _HELD.append(bytearray(2**31))
        _be_careless(text)
        if text == "die":
            os._exit(3)
        if text == "print":
            print("{}")  # noqa: T201 - into the pipe of the answers, were it not claimed
        return 1.0 if text in ("good", "print") else 0.0


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    """A run with `trap`, installed where this process and its children look."""
    package = tmp_path / "trap-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: trap\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[swarm_node.environments]\ntrap = {__name__}:Trap\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (registry.environment, scoring._problem):
        cached.cache_clear()
    yield make_run({"name": "trap"})
    for cached in (registry.environment, scoring._problem):
        cached.cache_clear()


def with_process(run: RunConfig, body: Callable[[ProcessVerifier], Awaitable[None]]) -> None:
    """Run the body with a verifier of short patience."""

    async def main() -> None:
        config = make_config(run, verify_timeout_s=TIME_LIMIT_S)
        async with ProcessVerifier.open(config) as verifier:
            await body(verifier)

    run_async(main)


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


def test_a_text_over_the_runs_limit_is_refused() -> None:
    run = make_run(limits={"text_chars_max": 10})

    async def body(verifier: Verifier) -> None:
        await verifier.verify(make_group(run, "x" * 10))
        assert (await refusal(verifier, "x" * 11, run=run)).reason is Reject.OVERSIZE

    with_both(run, body)


@pytest.mark.parametrize("text", ["loop", "sleep"])
def test_a_scorer_that_does_not_end_is_cut_off_while_the_loop_goes_on(
    trap: RunConfig, text: str
) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))  # started
        started = trio.current_time()
        gaps: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick, gaps)
            refused = await refusal(verifier, text, run=trap)
            nursery.cancel_scope.cancel()
        assert refused.reason is Reject.UNVERIFIABLE
        assert TIME_LIMIT_S <= trio.current_time() - started < TIME_LIMIT_S + 5.0
        assert max(gaps) < TIME_LIMIT_S  # a loop that waited for the scorer would show all of it
        assert (await verifier.verify(make_group(trap, "good", "bad")))[1] == (1.0, 0.0)
        assert (verifier.counters.timeouts, verifier.counters.starts) == (1, 2)
        assert verifier.counters.groups == 2

    with_process(trap, body)


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
            assert refused.reason is Reject.UNVERIFIABLE
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
        assert await judged(verifier, trap, text, "good") in ((0.0, 1.0), Reject.UNVERIFIABLE)
        assert await judged(verifier, trap, "good", "bad") == (1.0, 0.0)

    with_process(trap, body)


async def judged(
    verifier: ProcessVerifier, run: RunConfig, *texts: str
) -> tuple[float, ...] | Reject:
    try:
        return (await verifier.verify(make_group(run, *texts)))[1]
    except RemoteProtocolError as error:
        return error.reason


def test_a_scorer_that_kills_its_process_costs_that_group_alone(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        assert (await refusal(verifier, "good", "die", run=trap)).reason is Reject.UNVERIFIABLE
        assert (await verifier.verify(make_group(trap, "good")))[1] == (1.0,)

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
    monkeypatch.setattr("node.tasks.verifier.OWN_BATCH_TIMEOUT_S", TIME_LIMIT_S)

    async def body(verifier: ProcessVerifier) -> None:
        tasks = first_tasks(trap, ALICE, 3)
        texts = [["good", "bad"], ["good", "loop"], ["bad", "good"]]
        rewards = await verifier.score(tasks, texts)
        assert rewards == [(1.0, 0.0), (0.0, 0.0), (0.0, 1.0)]
        with pytest.raises(ChildFailed):
            await verifier.score(tasks[:1], [["die"]])
        assert await verifier.score(tasks[:1], [["good"]]) == [(1.0,)]

    with_process(trap, body)


def test_a_cancelled_call_leaves_no_answer_for_the_next(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        await verifier.verify(make_group(trap, "good"))
        with trio.move_on_after(0.05) as scope:
            await verifier.verify(make_group(trap, "sleep", "bad"))
        assert scope.cancelled_caught
        assert (await verifier.verify(make_group(trap, "good")))[1] == (1.0,)

    with_process(trap, body)


def test_calls_may_overlap(trap: RunConfig) -> None:
    async def body(verifier: ProcessVerifier) -> None:
        async def one(texts: tuple[str, ...]) -> None:
            rewards = (await verifier.verify(make_group(trap, *texts)))[1]
            assert rewards == tuple(float(text == "good") for text in texts)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(one, ("good",) * (number % 5 + 1) + ("bad",))
        assert verifier.counters.starts == 1

    with_process(trap, body)


def test_wrong_parameters_stop_own_work_with_the_reason() -> None:
    run = make_run({"name": "scripted_sum", "parameters": {"maximum": 3}})

    async def body(verifier: Verifier) -> None:
        with pytest.raises(ConfigError, match="scripted_sum parameters"):
            await verifier.problems([assigned_task(run, ALICE, 0)])

    with_both(run, body)


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


def test_nothing_is_left_running_afterwards(trap: RunConfig) -> None:
    async def main() -> int:
        async with ProcessVerifier.open(make_config(trap)) as verifier:
            await verifier.verify(make_group(trap, "good"))
            assert verifier._foreign._process is not None
            return verifier._foreign._process.pid

    pid = run_async(main)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_nine_are_verified_in_a_process() -> None:
    run = make_run(
        {"name": "propositional_logic", "parameters": {"prompt": "terse"}},
        {"name": "binary_matrix"},
    )

    async def main() -> None:
        async with ProcessVerifier.open(make_config(run)) as verifier:
            tasks = first_tasks(run, ALICE, 20)
            posed = await verifier.problems(tasks)
            texts = [[problem.answer, "exit()"] for problem in posed]
            assert await verifier.score(tasks, texts) == [(1.0, 0.0)] * 20
            group = make_group(run, posed[3].answer, "[", task=tasks[3])
            assert await verifier.verify(group) == (posed[3].prompt, (1.0, 0.0))
            assert verifier.counters.timeouts == 0

    run_async(main)
