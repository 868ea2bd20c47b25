"""A child that runs a text's code knows no other text, may wait for nothing, and pays for time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import trio
import trio.testing

from node.sandbox import kernel, runner
from node.verify.fair_queue import PROVEN_GROUPS
from node.verify.verifier import ProcessVerifier
from swarm.errors import Reject, RemoteProtocolError
from swarm.peers.reputation import Reputation
from swarm.rollouts import Task
from tests.unit.tasks_support import ALICE, BOB, first_tasks, make_group
from tests.unit.test_python_function import (
    LAYERS,
    RUNNERS,
    SOURCE,
    fenced,
    sandboxed,
    with_run,
)
from tests.unit.thieves import CONTROLLED, THIEVES, thief

pytestmark = [pytest.mark.slow, sandboxed]
TRIES = 20  # of each kind of thief; 10,000 of all kinds were tried by hand
PATIENT = (
    "from node.sandbox import runner_main\n"
    "runner_main.LINES_MIN = 10**9\nrunner_main.CPU_MIN_S = 10.0\n"
    "runner_main.main()"
)
BEHIND_MAX_S = 4.0  # 1.5 s of one group, on a machine that does other things; it was 20 s


@pytest.fixture
def patient_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that lets code look around for longer than any text may."""
    flags = (*runner.MODULE_FLAGS[:-2], "-c", PATIENT)
    monkeypatch.setattr(runner, "MODULE_FLAGS", flags)
    monkeypatch.setattr(runner, "WALL_MAX_S", 30.0)
    runner.start()
    runner.allow(1e6, 1e6)
    yield
    runner.stop()


@pytest.fixture
def own_runner() -> Iterator[None]:
    runner.start()
    runner.allow(1e6, 1e6)
    yield
    runner.stop()


# --- what is known of other texts -----------------------------------------------------------------


@pytest.mark.usefixtures("patient_runner")
@pytest.mark.parametrize("kind", THIEVES)
def test_a_thief_finds_nothing_of_the_text_before(kind: str) -> None:
    for _ in range(TRIES):
        secret = os.urandom(8).hex()
        text = f"left = 'MARK:{secret}'\ndef solve(n):\n    return [left, n]"
        assert runner.run(text, "solve", [[left := f"MARK:{secret}"]]).results == ((([left] * 2),),)
        found = runner.run(thief(kind), "solve", [[0]])
        assert found.ended == "done"
        assert found.results in (((([]),),), (None,))  # nothing, or its way there is refused


@pytest.mark.parametrize("kind", sorted(CONTROLLED))
def test_it_would_find_what_another_text_left_in_its_process(kind: str) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.unit.thieves", kind],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(told.stdout)


def test_a_right_answer_is_worth_nothing_to_the_seven_after_it() -> None:
    """Own samples of one task run one after the other, right ones first."""

    async def body(verifier: ProcessVerifier) -> None:
        task = next(t for t in first_tasks(verifier._run, ALICE, 8) if t.environment == SOURCE.name)
        (posed,) = await verifier.problems([task])
        right = posed.answer.replace("def solve", "'MARK:0123456789abcdef'\ndef solve", 1)
        thieves = [fenced(thief(kind)) for kind in list(THIEVES)[:7]]
        (found,) = await verifier.score([task], [[right, *thieves]])
        assert found[0] == 1.0
        assert set(found[1:]) <= {0.0, None}

    with_run(body)


# --- what it may call -----------------------------------------------------------------------------

CALLS_LAST = 480  # of the numbers that kernels know
CALL_ALL = """
import ctypes
def solve(numbers):
    libc, found = ctypes.CDLL(None, use_errno=True), []
    for number in numbers:
        ctypes.set_errno(0)
        libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
        found.append(ctypes.get_errno())
    return found
"""


@pytest.mark.usefixtures("own_runner")
@pytest.mark.skipif(not LAYERS.calls, reason="no filter of system calls here")
def test_every_call_that_is_not_named_is_refused() -> None:
    """All others that a kernel has, those of the next release among them."""
    named = {kernel.NUMBERS.get(each) for each in (*kernel.MORE["computing"], "futex", "clone3")}
    if kernel.machine == "x86_64":
        named |= {335, 336}  # of the kernel's own probes, which refuses them before any filter
    numbers = [each for each in range(CALLS_LAST) if each not in named]
    (found,) = runner.run(CALL_ALL, "solve", [[numbers]]).results
    assert found is not None
    assert set(found[0]) == {1}  # EPERM; each failed otherwise without the filter


_CALL = (
    "import ctypes, os, socket, struct, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "soon = struct.pack('qq', 0, 450_000_000)\n"
    "at = lambda: struct.pack('qq', *divmod(time.time_ns() + 450_000_000, 10**9))\n"
    "def call(*values):\n    if libc.syscall(*values) < 0 and ctypes.get_errno() == 1:\n"
    "        raise OSError('refused')\n"
    "def solve(n):\n    {}\n    return n % 2"
)
_WORD = "word = ctypes.c_int({})"
WAITS = {
    "receives from itself": _CALL.format(
        "a, b = socket.socketpair()\n    "
        "a.setsockopt(1, 20, struct.pack('ll', 0, 450_000))\n    a.recv(1)"  # SO_RCVTIMEO
    ),
    "locks as an heir of priorities": _CALL.format(
        _WORD.format(1) + "; call(202, ctypes.byref(word), 6, 0, at(), 0, 0)"
    ),
    "waits to be queued elsewhere": _CALL.format(
        _WORD.format(0) + "; other = ctypes.c_int(0); "
        "call(202, ctypes.byref(word), 11, 0, at(), ctypes.byref(other), 0)"
    ),
    "waits for input and output": _CALL.format(
        "place = ctypes.c_ulong(0); call(206, 8, ctypes.byref(place)); "
        "call(208, place, 1, 1, ctypes.create_string_buffer(64), soon)"
    ),
    "has all processors come by": _CALL.format("[call(324, 1, 0, 0) for _ in range(40)]"),
    "has all disks written": _CALL.format("[call(162) for _ in range(200)]"),
    # not known of before
    "yields": _CALL.format("[call(24) for _ in range(3000)]"),
    "locks a file twice": _CALL.format(
        "one, two = (os.open(os.__file__, 0) for _ in 'ab'); call(73, one, 2); call(73, two, 2)"
    ),
    "waits for a child that is none": _CALL.format("call(247, 0, 0, 0, 0, 0)"),
    "pairs a pipe with nobody": _CALL.format("r, w = os.pipe(); os.read(r, 1)"),
}


@pytest.mark.usefixtures("own_runner")
@pytest.mark.skipif(kernel.machine != "x86_64", reason="the numbers are of x86-64")
@pytest.mark.parametrize("text", WAITS.values(), ids=WAITS)
def test_no_other_way_to_wait_is_left(text: str) -> None:
    ran = runner.run(text, "solve", [[1]])
    assert ran.results == (None,)  # refused, and nothing was waited for
    assert not runner.has_waited()


# --- what time costs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu_s", "is_busy", "has_waited"),
    [(0.6, False, False), (0.4, False, True), (0.4, True, False)],
)
def test_a_text_has_waited_if_it_leaves_a_free_core_idle(
    cpu_s: float, is_busy: bool, has_waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "lacks_cpu", lambda: is_busy)
    monkeypatch.setattr(runner._Current, "waited", False)
    runner._record_waiting(cpu_s, 1.0)
    assert runner.has_waited() is has_waited


FREE = """
from node.sandbox import runner
runner.lacks_cpu = lambda: False  # whatever else this machine does
"""
UNFILTERED = (
    "from node.sandbox import confinement, runner_main\n"
    "confinement.lock = lambda most, alone: confinement.limit(most)\nrunner_main.main()"
)


@pytest.fixture
def unfiltered(in_workers: Callable[[str], None]) -> None:
    """A runner whose children may wait, as if a way were found that the filter leaves."""
    in_workers(FREE + RUNNERS.format(program=UNFILTERED))


def sleeping(seconds: float) -> str:
    return fenced(f"import time\ndef solve(*n):\n    time.sleep({seconds})\n    return 0")


@pytest.mark.usefixtures("unfiltered")
@pytest.mark.parametrize("seconds", [0.1, 0.9, 3.0])
def test_who_waits_pays_and_is_banned_by_the_third_group(seconds: float) -> None:
    """And an honest producer behind six such groups waits for one of them at most."""

    async def body(verifier: ProcessVerifier) -> None:
        run = verifier._run
        tasks = {
            who: [each for each in first_tasks(run, who, 64) if each.environment == SOURCE.name]
            for who in (ALICE, BOB)
        }
        posed = await verifier.problems(tasks[ALICE])
        for task, problem in list(zip(tasks[ALICE], posed, strict=True))[:PROVEN_GROUPS]:
            await verifier.verify(make_group(run, problem.answer, task=task))
        reputation = Reputation()
        reasons: list[Reject] = []
        waited_s = 0.0

        async def hostile(number: int) -> None:
            texts = [sleeping(seconds / 8)] * 64
            with pytest.raises(RemoteProtocolError) as refused:
                await verifier.verify(
                    make_group(run, *texts, task=tasks[BOB][number], producer=BOB)
                )
            reasons.append(refused.value.reason)

        async def honest(place: int) -> None:
            nonlocal waited_s
            began = time.perf_counter()
            group = make_group(run, posed[place].answer, task=tasks[ALICE][place])
            assert (await verifier.verify(group))[1] == (1.0,)
            waited_s = time.perf_counter() - began

        await honest(PROVEN_GROUPS)
        alone_s = waited_s
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(hostile, number)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.start_soon(honest, PROVEN_GROUPS + 1)
        assert waited_s < alone_s + BEHIND_MAX_S
        assert reasons == [Reject.OVERRUN] * 6
        for count, reason in enumerate(reasons, 1):
            reputation.record_offence(BOB, reason, None, 2.0 * count)
            if reputation.is_banned(BOB, 2.0 * count):
                break
        assert count == 3
        assert verifier.counters.starts == 2  # no worker had to be ended
        assert verifier.counters.cpu_s["overrun"] > 1.0

    with_run(body)


@pytest.mark.usefixtures("busy_machine")
def test_the_third_group_that_is_dear_and_undecided_is_an_offence() -> None:
    """One may be a slow machine's doing; what is cheap, however often, is nobody's fault."""

    async def body(verifier: ProcessVerifier) -> None:
        run = verifier._run
        tasks = [each for each in first_tasks(run, ALICE, 64) if each.environment == SOURCE.name]

        async def refusal(text: str, task: Task) -> Reject:
            with pytest.raises(RemoteProtocolError) as refused:
                await verifier.verify(make_group(run, *[fenced(text)] * 8, task=task))
            return refused.value.reason

        cheap = [await refusal("import ctypes\nctypes.string_at(0)", each) for each in tasks[:5]]
        assert cheap == [Reject.UNDECIDED] * 5
        first = verifier._first_limits  # of these a text that is cut off always pays more
        verifier._first_limits = replace(first, cpu_s=0.09)
        dear = [await refusal("sum(range(10**12))", each) for each in tasks[5:9]]
        assert dear == [Reject.UNDECIDED] * 2 + [Reject.OVERRUN] * 2

    with_run(body)
