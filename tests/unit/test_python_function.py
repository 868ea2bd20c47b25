"""Functions to write: right ones pass, hostile ones get nothing, and all nodes agree on it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from node.envs.base import Problem, Undecided
from node.envs.function_specs import KINDS, draw_spec
from node.envs.python_function import PythonFunction, _same
from node.envs.scoring import score_group
from node.sandbox import confinement, runner, runner_main
from node.verify.verifier import ProcessVerifier
from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError
from swarm.rollouts import Task
from tests.support import run as run_async
from tests.unit.tasks_support import ALICE, first_tasks, make_config, make_group, make_run

SOURCE = PythonFunction()
pytestmark = pytest.mark.slow
LAYERS = confinement.found()
sandboxed = pytest.mark.skipif(not LAYERS.is_sandbox, reason="no sandbox on this machine")


def task(index: int, parameters: str = "{}") -> Task:
    return Task(SOURCE.name, SOURCE.version, parameters, seed=3, index=index)


@pytest.fixture
def own_runner() -> Iterator[None]:
    runner.start()
    yield
    runner.stop()


# --- descriptions ---------------------------------------------------------------------------------


def test_there_are_many_descriptions_of_every_kind() -> None:
    rng = Random(1)
    for kind in KINDS:
        assert len({draw_spec(rng, [kind]).task for _ in range(400)}) >= 30


def test_a_task_is_the_same_everywhere_and_tells_results_apart() -> None:
    told = [SOURCE.problem(task(index)) for index in range(200)]
    assert told == [SOURCE.problem(task(index)) for index in range(200)]
    for problem in told:
        results = {json.dumps(each) for each in problem.entry["expected"]}
        assert len(results) >= 2, problem.prompt
        shown = problem.prompt.splitlines()[1]
        assert shown.startswith("For example, `solve(")


@pytest.mark.parametrize(
    "parameters", ['{"tests":3}', '{"tests":true}', '{"kinds":[]}', '{"kinds":["x"]}', '{"k":1}']
)
def test_wrong_parameters_are_refused_in_one_line(parameters: str) -> None:
    with pytest.raises(ConfigError, match="give tests, 4 to 40, and kinds"):
        SOURCE.problem(task(0, parameters))


def test_values_of_another_kind_are_not_the_same() -> None:
    assert _same({"a": [1, "x", None]}, {"a": [1, "x", None]})
    for found, right in ((True, 1), (1.0, 1), ("1", 1), ([1], [1, 2]), ({}, {"a": 1}), (None, 0)):
        assert not _same(found, right)


@sandboxed
@pytest.mark.usefixtures("own_runner")
def test_every_right_function_passes_far_from_all_limits() -> None:
    families: set[str] = set()
    for index in range(100):
        problem = SOURCE.problem(task(index))
        if (family := problem.prompt.split(". ")[2][:24]) in families and index > 50:
            continue
        families.add(family)
        ran = runner.run(problem.answer, "solve", problem.entry["calls"])
        assert SOURCE.score(problem, problem.answer) == 1.0, problem.prompt
        assert ran.lines < runner_main.LINES_MIN / runner_main.BAND
    assert len(families) > 9


# --- what code gets -------------------------------------------------------------------------------

CALLS: list[list[int]] = [[n] for n in range(8)]
EVEN = Problem(task(0), "", "", {"calls": CALLS, "expected": [n % 2 for (n,) in CALLS]})
ZERO: dict[str, str] = {
    "nothing": "",
    "no function": "x = 1",
    "no Python": "def solve(n) return n % 2",
    "wrong": "def solve(n):\n    return n % 2 == 1",
    "spins": "def solve(n):\n    while True:\n        n += 1",
    "spins on": "def solve(n):\n    while True:\n        try:\n            n += 1\n"
    "        except BaseException:\n            continue",
    "goes deep": "def solve(n):\n    return solve(n)",
    "goes deeper": "import sys\nsys.setrecursionlimit(10**9)\ndef solve(n):\n    return solve(n)",
    "leaves": "import sys\nsys.exit(0)",
    "leaves in a call": "import sys\ndef solve(n):\n    sys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "spins untraced": "import sys\nsys.settrace(None)\nwhile True:\n    pass",
    "is not traced": "import sys\nsys.settrace(None)\ndef solve(n):\n    return n % 2",
    "prints": "def solve(n):\n    print('[\"done\", [[0]], 1]' * 10**5)\n    return 7",
    "forks": "import os\nos.fork()\ndef solve(n):\n    return n % 2",
    "starts a thread": "import threading\nthreading.Thread(target=print).start()\n"
    "def solve(n):\n    return n % 2",
    "kills the runner": "import os\nos.kill(os.getppid(), 9)\ndef solve(n):\n    return n % 2",
    "reads": "open('/etc/hosts').read()\ndef solve(n):\n    return n % 2",
    "writes": "open('x', 'w')\ndef solve(n):\n    return n % 2",
    "asks the one who knows": "from node.environments import python_function\n"
    "def solve(n):\n    return n % 2",
    "is like everything": "class Like(int):\n    def __eq__(self, other):\n        return True\n"
    "def solve(n):\n    return Like(7)",
    "patches": "import builtins, json\njson.dumps = lambda each: '[]'\nbuiltins.type = str\n"
    "def solve(n):\n    return n % 2",
    "answers for the runner": "import os\nos.write(3, b'[\"done\", [[0]], 1]')\nos._exit(0)",
    "answers in no form": "import os\nos.write(3, b'[' * 10**5)\nos._exit(0)",
    "answers nan": "def solve(n):\n    return float('nan')",
    "answers too much": "def solve(n):\n    return [0] * 10**5",
    "answers a long text": "def solve(n):\n    return 'a' * 300_000",
    "answers many long texts": "def solve(n):\n    return ['\\u1234' * 30_000] * 4",
}
UNDECIDED: dict[str, str] = {
    "spins in C": "def solve(n):\n    return sum(range(10**12))",
    "allocates": "def solve(n):\n    return len([0] * 10**12)",
    "holds": "def solve(n):\n    return len(bytearray(200 * 2**20))",
    "goes back": "import re\ndef solve(n):\n    return re.match('(a+)+b', 'a' * 64)",
    "has large numbers": "def solve(n):\n    return 10**10**9 % 2",
    "crashes": "import ctypes\ndef solve(n):\n    ctypes.string_at(0)",
}

_ALARM = (
    "import os, signal\ndef solve(n):\n    signal.signal(signal.SIGALRM, lambda *_: 1 / 0)\n"
    "    {}\n    {}\n    return n % 2"
)
WAITING: dict[str, str] = {  # for less than what a run may take of a clock
    "disarms": "import signal, sys\nsys.settrace(None)\nsignal.setitimer(signal.ITIMER_PROF, 0)\n"
    "while True:\n    pass",
    "waits": "import time\ndef solve(n):\n    time.sleep(1000)",
    "closes its pipe and waits": "import os, time\nos.close(3)\ntime.sleep(90)",
    "answers, closes its pipe and waits": "import os, time\n"
    "os.write(3, b'[\"done\", [[0]], 1]')\nos.close(3)\ntime.sleep(90)",
    "sleeps": "import time\ndef solve(n):\n    time.sleep(0.45)\n    return n % 2",
    "selects": "import select\ndef solve(n):\n    select.select([], [], [], 0.45)\n    return 1",
    "polls": "import select\ndef solve(n):\n    select.poll().poll(450)\n    return n % 2",
    "waits for a lock": "import _thread\ndef solve(n):\n    lock = _thread.allocate_lock()\n"
    "    lock.acquire()\n    lock.acquire(True, 0.45)\n    return n % 2",
    "waits for an alarm": _ALARM.format("signal.setitimer(0, 0.45)", "os.read(os.pipe()[0], 1)"),
    "waits for a signal": "import signal\ndef solve(n):\n"
    "    signal.sigtimedwait([signal.SIGUSR1], 0.45)\n    return n % 2",
}


@sandboxed
@pytest.mark.usefixtures("own_runner")
@pytest.mark.skipif(not LAYERS.calls, reason="nothing here refuses to wait")
@pytest.mark.parametrize("text", WAITING.values(), ids=WAITING)
def test_nobody_can_wait_at_the_cost_of_others(text: str) -> None:
    """A run that waits holds up whoever is next, and uses no CPU time that it could be charged."""
    started = time.perf_counter()
    try:
        assert SOURCE.score(EVEN, text) == 0.0
    except Undecided:
        assert "lock" in text  # whoever waits for ever is ended by a fault
    assert time.perf_counter() - started < 1.0
    assert SOURCE.score(EVEN, "def solve(n):\n    return n % 2") == 1.0


@sandboxed
@pytest.mark.usefixtures("own_runner")
@pytest.mark.parametrize("text", [*ZERO.values(), *UNDECIDED.values()], ids=[*ZERO, *UNDECIDED])
def test_what_hostile_code_gets(text: str) -> None:
    started, before_s = time.perf_counter(), runner.used_s()
    if text in ZERO.values():
        assert SOURCE.score(EVEN, text) == 0.0
    else:
        with pytest.raises(Undecided):
            SOURCE.score(EVEN, text)
    assert runner.used_s() - before_s < 6.0
    assert time.perf_counter() - started < 60.0
    assert SOURCE.score(EVEN, "def solve(n):\n    return n % 2") == 1.0  # for the next one
    assert SOURCE.score(EVEN, "def solve(n):\n    return 0") == 0.5


@sandboxed
@pytest.mark.usefixtures("own_runner")
@pytest.mark.parametrize(
    ("lines", "ended"),
    [(0.5, "done"), (1.5, "undecided"), (3.5, "undecided"), (5.0, "over"), (100.0, "over")],
)
def test_what_is_near_a_limit_is_undecided(lines: float, ended: str) -> None:
    rounds = int(lines * runner_main.LINES_MIN / 2)  # of two lines each
    text = f"def solve(n):\n    for each in range({rounds}):\n        n += 1\n    return n"
    assert runner.run(text, "solve", [[0]]).ended == ended
    deep = int(lines * runner_main.DEPTH_MIN)
    text = "def solve(n):\n    return n and solve(n - 1)"
    assert runner.run(text, "solve", [[deep]]).ended == ended


@sandboxed
def test_beyond_what_a_request_may_use_all_is_undecided() -> None:
    runner.start()
    runner.allow(0.0, 1.0)
    with pytest.raises(Undecided):
        SOURCE.score(EVEN, "def solve(n):\n    return n % 2")
    runner.allow(1.0, 1.0)
    assert SOURCE.score(EVEN, "def solve(n):\n    return n % 2") == 1.0
    runner.stop()


@sandboxed
@pytest.mark.usefixtures("own_runner")
def test_the_code_has_no_right_answer_at_hand() -> None:
    """What makes and judges problems is no more to be found than other people's packages."""
    listing = "import os\ndef solve(n):\n    return os.listdir(n)"
    assert runner.run(listing, "solve", [["/"]]).results in ((None,), (([],),))
    for module in ("node.envs.python_function", "swarm", "numpy"):
        text = f"import {module}\ndef solve(n):\n    return n % 2"
        assert SOURCE.score(EVEN, text) == 0.0
        exec(text, {})  # here it would be


# --- agreement ------------------------------------------------------------------------------------

ORDERS = """
def solve(n):
    return list({str(each) for each in range(n)}), [hash("a") % 7, hash(("b", 1)) % 7]
"""


@sandboxed
def test_two_fresh_processes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order of sets their own interpreters have; without a fixed seed they would not."""
    texts = [ORDERS, *ZERO.values(), "def solve(n):\n    return n % 2"]
    program = (
        "import json, sys\nfrom node.sandbox import runner\n"
        "if len(sys.argv) > 1:\n    runner.HASH_SEED = sys.argv[1]\n"
        "ran = [runner.run(t, 'solve', [[9], [4]]) for t in json.load(sys.stdin)]\n"
        "print(json.dumps([[r.ended, r.results, r.lines] for r in ran]))"
    )

    def told(*arguments: str, seed: str) -> list[Any]:
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            input=json.dumps(texts), capture_output=True, text=True, check=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        return list(json.loads(done.stdout))

    assert told(seed="1") == told(seed="2")
    assert told("1", seed="1")[0] != told("2", seed="1")[0]


@sandboxed
@pytest.mark.usefixtures("own_runner")
def test_who_asks_next_does_not_get_the_answer_of_a_fork_that_ended() -> None:
    slow = "import time\ndef solve(n):\n    time.sleep(1.0)\n    return 'its'"
    fork = os.fork()
    if fork == 0:
        runner.run(slow, "solve", [[0]])
        os._exit(0)
    time.sleep(0.3)  # noqa: TID251 - the fork is to be waiting by then
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    assert runner.run("def solve(n):\n    return 'mine'", "solve", [[0]]).results == (("mine",),)


Body = Callable[[ProcessVerifier], Awaitable[None]]


def with_run(body: Body, sandbox: str = "auto", *, cpu_s: float = 2.0, **rules: Any) -> None:
    run = make_run(
        {"name": SOURCE.name, "parameters": {"tests": 8}}, {"name": "scripted_sum", "weight": 0.5},
        answer={"format": "code"}, reward="partial", **rules,
    )  # fmt: skip

    async def main() -> None:
        config = make_config(run, verify_cpu_s=cpu_s, verify_sandbox=sandbox)
        config = config.model_copy(update={"data_dir": Path("/nonexistent/node")})
        async with ProcessVerifier.open(config) as verifier:
            await body(verifier)

    run_async(main)


def fenced(text: str) -> str:
    return f"I think.\n```python\n{text}\n```"


@sandboxed
@pytest.mark.usefixtures("busy_machine")
def test_in_the_verifiers_process_undecided_groups_are_nobodys_fault() -> None:
    async def body(verifier: ProcessVerifier) -> None:
        run = verifier._run
        tasks = [each for each in first_tasks(run, ALICE, 8) if each.environment == SOURCE.name]
        posed = await verifier.problems(tasks)
        right = [[each.answer, fenced("def solve(*n):\n    return 'x'")] for each in posed]
        for found in await verifier.score(tasks, right):
            assert found[0] == 1.0
            assert found[1] is not None
            assert found[1] < 1.0
        waits = fenced(UNDECIDED["spins in C"])
        own = await verifier.score(tasks[:1], [[posed[0].answer, waits, posed[0].answer]])
        assert own == [(1.0, None, 1.0)]
        group = make_group(run, posed[0].answer, waits, waits, waits, waits, task=tasks[0])
        with pytest.raises(RemoteProtocolError) as refused:
            await verifier.verify(group)
        assert refused.value.reason is Reject.UNDECIDED
        # charged to whoever sent it: its CPU time or, on a busy machine, a share of the clock's
        assert (
            sum(verifier.counters.cpu_s.values())
            > 0.8 * runner_main.WALL_MAX_S * runner_main.WALL_SHARE
        )
        loops = [fenced(ZERO["spins"])] * 8
        group = make_group(run, posed[0].answer, *loops, task=tasks[0])
        assert (await verifier.verify(group))[1] == (1.0, *[0.0] * 8)
        assert verifier.counters.starts == 2

    with_run(body, cpu_s=8.0)  # which eight texts that loop do not use up on a busy machine


RUNNERS = """
from node.sandbox import runner
runner.MODULE_FLAGS = (*runner.MODULE_FLAGS[:-2], "-c", {program!r})
"""  # they begin with a program
NO_LANDLOCK = "from node.sandbox import landlock; landlock.revision = lambda: 0"
NO_LAYERS = "from node.sandbox import kernel; kernel.NUMBERS.clear()"
DIES = """
import io, os
from node.sandbox import runner_main
def read(job, mode):
    with open(job, mode) as pipe:
        text = pipe.read()
    if b"no runner survives" in text:
        os.kill(os.getppid(), 9)
    return io.BytesIO(text)
runner_main.open = read
runner_main.main()
"""


@pytest.fixture
def plant(in_workers: Callable[[str], None]) -> Callable[[str], None]:
    """Have the worker and its runner begin with some code, and a runner end over some texts."""

    def plant(code: str) -> None:
        in_workers(code + RUNNERS.format(program=f"{code}\n{DIES}"))

    return plant


@pytest.mark.skipif(not LAYERS.view, reason="no namespaces on this machine")
def test_namespaces_are_enough_for_the_runner(plant: Callable[[str], None]) -> None:
    """It has a view of its own, narrower than that of the worker, which may make none any more."""
    plant(NO_LANDLOCK)

    async def body(verifier: ProcessVerifier) -> None:
        task = next(t for t in first_tasks(verifier._run, ALICE, 8) if t.environment == SOURCE.name)
        (posed,) = await verifier.problems([task])
        package = str(Path(runner.__file__).parents[2])
        tried = ("pass", "open('/scratch/x', 'w')", f"import os\nos.listdir({package!r})")
        texts = [posed.answer.replace("def ", f"{each}\ndef ", 1) for each in tried]
        group = make_group(verifier._run, *texts, task=task)
        assert (await verifier.verify(group))[1] == (1.0, 0.0, 0.0)

    with_run(body)


@pytest.mark.parametrize("sandbox", [pytest.param("auto", marks=sandboxed), "off"])
def test_a_runner_that_ends_is_our_own_fault(sandbox: str, plant: Callable[[str], None]) -> None:
    """And where nothing confines it, it runs code if it is told to."""
    plant(NO_LAYERS if sandbox == "off" else "")

    async def body(verifier: ProcessVerifier) -> None:
        task = next(t for t in first_tasks(verifier._run, ALICE, 8) if t.environment == SOURCE.name)
        (posed,) = await verifier.problems([task])
        wrong = fenced("def solve(*n):\n    return {}")
        good = make_group(verifier._run, posed.answer, wrong, task=task)
        assert (await verifier.verify(good))[1] == (1.0, 0.0)
        bad = make_group(verifier._run, posed.answer, fenced("'no runner survives'"), task=task)
        with pytest.raises(ChildFailed):
            await verifier.verify(bad)
        with pytest.raises(ChildFailed):
            await verifier.score([task], [[each.text for each in bad.completions]])
        assert (await verifier.verify(good))[1] == (1.0, 0.0)
        assert await verifier.score([task], [[posed.answer, wrong]]) == [(1.0, 0.0)]
        assert verifier.counters.starts == 4

    with_run(body, sandbox)


def test_a_group_is_undecided_from_its_first_text_on() -> None:
    class Doubtful(PythonFunction):
        def score(self, problem: Problem, text: str) -> float:
            if text == "x":
                raise Undecided
            return 1.0

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("node.envs.scoring.environment", lambda _: Doubtful())
        each = score_group(task(0), ["a", "x", "a"], "exact")
        assert each.rewards == (1.0, None, 1.0)
        assert each.scorer_errors == 0
        foreign = score_group(task(0), ["a", "x", "a"], "exact", until_undecided=True)
        assert foreign.rewards == (1.0, None, None)


def test_from_any_directory_a_verifier_runs_code(tmp_path: Path) -> None:
    """An editable install is on no path that the worker is told of, unless one starts there."""
    script = tmp_path / "verify.py"
    script.write_text(
        "import trio\n"
        "from tests.unit.tasks_support import make_config, make_run\n"
        "from node.verify.assignment import held_out_tasks\n"
        "from node.verify.verifier import ProcessVerifier\n"
        "async def main():\n"
        "    run = make_run({'name': 'python_function'})\n"
        "    async with ProcessVerifier.open(make_config(run)) as verifier:\n"
        "        [task] = held_out_tasks(run)[:1]\n"
        "        [problem] = await verifier.problems([task])\n"
        "        print(await verifier.score([task], [[problem.answer, 'no']]))\n"
        "trio.run(main)\n"
    )
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(root)!r}); import tests.unit."
         "tasks_support; sys.path.remove(" f"{str(root)!r}); exec(open('verify.py').read())"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert told.stdout.strip() == "[(1.0, 0.0)]", told.stderr[-2000:]
