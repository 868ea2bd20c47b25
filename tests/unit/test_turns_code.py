"""Turns whose replies come of what the policy wrote: told, played again, and nobody blamed for what
another machine may see otherwise."""

from collections.abc import Iterator, Sequence

import pytest

from node.envs import trial
from node.envs.answers import written as answer
from node.envs.base import Problem, Undecided
from node.envs.code_turns import PYTHON_CHARS_MAX, TESTS_TOLD, python
from node.envs.replay_turns import replies
from node.envs.scoring import score_group
from node.envs.tool_use import written
from node.sandbox import confinement, runner
from node.verify.assignment import assigned_task
from node.verify.verifier import InlineVerifier, Verifier
from swarm.errors import Reject, RemoteProtocolError
from tests.support import run as run_async
from tests.unit.tasks_support import ALICE
from tests.unit.test_turns_replay import completion_of, group_of, run_of, source_of, told
from tests.unit.verifier_trap import with_process

REPAIR, QUESTION = "python_repair", "python_question"
LAYERS = confinement.found()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LAYERS.is_sandbox, reason="no sandbox on this machine"),
]


@pytest.fixture(autouse=True)
def own_runner() -> Iterator[None]:
    runner.start()
    yield
    runner.stop()


def posed(name: str, index: int = 0) -> Problem:
    return source_of(name).problem(assigned_task(run_of(name), ALICE, index))


@pytest.mark.parametrize("name", [REPAIR, QUESTION])
def test_right_turns_come_to_a_full_score(name: str) -> None:
    source = source_of(name)
    for index in range(12):
        problem = posed(name, index)
        honest = told(source, problem, source.right(problem))
        score = score_group(problem.task, [(False, honest)], "exact")
        assert (score.rewards, score.forgery, score.scorer_errors) == ((1.0,), None, 0)


def test_each_try_is_told_a_test_that_it_fails() -> None:
    source, problem = source_of(REPAIR), posed(REPAIR)
    wrong = answer("code", "def solve(*given):\n    return 'no'")
    fails = answer("code", "def solve(*given):\n    raise ValueError")
    said = replies(source, problem, ["def solve", wrong, fails])
    assert said[0] == "no code: give the whole function in one block of code"
    right = repr(problem.entry["expected"][0])
    assert said[1] is not None
    assert said[1].startswith("solve(")
    assert said[1].endswith(f" returned 'no', and should return {right}")
    assert said[2] is None  # the last try
    assert replies(source, problem, [fails])[0] == said[1].replace("returned 'no'", "failed")
    assert replies(source, problem, source.right(problem)) == [None]
    assert source.worth(problem, (wrong, *source.right(problem))) == 1.0
    assert source.worth(problem, (*source.right(problem), wrong)) == 0.0


def test_what_is_told_is_worth_no_more_than_its_share() -> None:
    """An answer that has learned by heart what it was told, and knows nothing else."""
    source, problem = source_of(REPAIR), posed(REPAIR)
    calls, right = (problem.entry[each][:TESTS_TOLD] for each in ("calls", "expected"))
    by_heart = f"def solve(*given):\n    return {right!r}[{calls!r}.index(list(given))]"
    text = answer("code", by_heart)
    assert replies(source, problem, [text]) == [None]  # all that it is told, it passes
    assert source.worth(problem, (text,)) <= 0.5


@pytest.mark.parametrize(
    ("argument", "result"),
    [
        ("sum(range(10))", "45"),
        ("x = 6\nprint(x, 'times', 7.5, True)\nprint(x * 7)", "6 times 7.5 True\n42"),
        ("[1, (2, None)]", "[1, [2, None]]"),
        ("'a' * 3", "aaa"),
        ("print(object(), [1])", "... [1]"),
        ("None", ""),
        ("def main():\n    print(7)\nif __name__ == '__main__':\n    main()", "7"),
        ("print(7, flush=True)", "7"),
        ("print(len(str(list(range(6000)))), list(range(3)))", "34890 [0, 1, 2]"),
        ("print('a' * 300_000)", "a" * 2_000),
        ("[0] * 100_000", "failed"),
        ("1/0", "failed"),
        ("object()", "failed"),
        ("open('/etc/passwd').read()", "failed"),
        ("__import__('_socket').socket()", "failed"),
        ("def f(:", "failed"),
        ("n = 0\nwhile True:\n    n += 1", "stopped: it ran for too long"),
        ("", ""),
        ("1" * (PYTHON_CHARS_MAX + 1), f"over {PYTHON_CHARS_MAX} characters"),
    ],
)
def test_the_python_tool(argument: str, result: str) -> None:
    assert python(argument) == result


def with_both(name: str, wanted: Reject | float, texts: Sequence[str], lie: str = "") -> None:
    """What verifiers make of a transcript. `lie`: told in place of what is told first."""
    source, problem = source_of(name), posed(name)
    honest = list(told(source, problem, texts))
    if lie:
        honest[1] = (False, lie)
    group = group_of(run_of(name), completion_of(honest))

    async def body(verifier: Verifier) -> None:
        if isinstance(wanted, float):
            assert (await verifier.verify(group))[1] == (wanted,)
        else:
            with pytest.raises(RemoteProtocolError) as refused:
                await verifier.verify(group)
            assert refused.value.reason is wanted

    run_async(body, InlineVerifier(run_of(name)))
    with_process(run_of(name), body)


def test_verifiers_play_it_again() -> None:
    for name in (REPAIR, QUESTION):
        with_both(name, 1.0, source_of(name).right(posed(name)))
    right = source_of(REPAIR).right(posed(REPAIR))
    with_both(REPAIR, 1.0, ["no code", *right])


def test_a_result_that_does_not_come_out_again_is_undecided() -> None:
    """It may be a lie, or another machine's. It is not taken, and nobody is blamed."""
    right = source_of(QUESTION).right(posed(QUESTION))
    with_both(QUESTION, Reject.UNDECIDED, right, "<result>1</result>")
    clock = (written("python", "__import__('time').perf_counter_ns()"), "7")
    with_both(QUESTION, Reject.UNDECIDED, clock)


def test_half_a_pair_is_said_as_something_that_can_be_written() -> None:
    """A policy may print what no file and no tokenizer takes."""
    source, problem = source_of(QUESTION), posed(QUESTION)
    (said,) = replies(source, problem, [written("python", "print('\\ud83d', 5)")])
    assert said == "<result>? 5</result>"


def test_one_undecided_transcript_leaves_the_others_their_worth() -> None:
    source, problem = source_of(QUESTION), posed(QUESTION)
    right = (False, told(source, problem, source.right(problem)))
    clock = written("python", "__import__('time').perf_counter_ns()")
    vague = (False, [(True, clock), (False, "<result>1</result>"), (True, "7")])
    found = score_group(problem.task, [right, vague, right], "exact")
    assert (found.rewards, found.forgery) == ((1.0, None, 1.0), None)
    foreign = score_group(problem.task, [right, vague, right], "exact", until_undecided=True)
    assert foreign.rewards == (1.0, None, None)


def test_turns_that_do_not_alternate_are_no_machines_doing() -> None:
    source, problem = source_of(QUESTION), posed(QUESTION)
    honest = told(source, problem, source.right(problem))
    for parts in ([honest[0], *honest[:1], *honest[2:]], honest[:2], []):
        score = score_group(problem.task, [(False, parts)], "exact")
        assert score.forgery is Reject.SKIPPED_TURN


def test_what_a_last_turn_calls_is_not_run() -> None:
    source, problem = source_of(QUESTION), posed(QUESTION)
    near = written("python", "n = 0\nfor i in range(15_000):\n    n += 1")
    quick = written("python", "1")
    texts = [quick] * (source.turns_max - 1) + [near]
    parts = told(source, problem, texts)
    assert score_group(problem.task, [(False, parts)], "exact").rewards == (0.0,)


def test_no_groups_code_uses_up_another_groups_time() -> None:
    run = run_of(QUESTION)
    source = source_of(QUESTION)
    spin = written("python", "sum(range(10**12))")
    tasks = [assigned_task(run, ALICE, index) for index in range(6)]
    problems = [source.problem(task) for task in tasks]
    said = [[(False, told(source, each, source.right(each)))] for each in problems]
    said[0] = [(False, [(True, spin), (False, "<result>1</result>"), (True, "7")])] * 2

    async def body(verifier: Verifier) -> None:
        found = await verifier.score(tasks, said)
        assert found == [(None, None)] + [(1.0,)] * 5
        heard = await verifier.replies(tasks, [[[spin], [spin]]] + [[[written("python", "1")]]] * 5)
        assert heard == [[None, None]] + [["<result>1</result>"]] * 5

    with_process(run, body)


def test_what_comes_near_a_limit_is_undecided_on_both_sides() -> None:
    source, problem = source_of(QUESTION), posed(QUESTION)
    near = written("python", "n = 0\nfor i in range(15_000):\n    n += 1")
    with pytest.raises(Undecided):
        replies(source, problem, [near])
    said = (True, [(True, near), (False, "<result></result>"), (True, "7")])
    assert score_group(problem.task, [said], "exact").rewards == (None,)

    async def body(verifier: Verifier) -> None:
        said = await verifier.replies([problem.task], [[[near]]])
        assert said == [[None]]
        assert (await verifier.score([problem.task], [[(False, [(True, near)])]]))[0] == (None,)

    with_process(run_of(QUESTION), body)


@pytest.mark.parametrize("name", [REPAIR, QUESTION])
def test_no_problem_gives_its_answer_away(name: str) -> None:
    source, problem = source_of(name), posed(name)
    assert trial.own_reward(source, problem) == 1.0
    assert source.worth(problem, ()) == 0.0
    assert source.worth(problem, ("",)) == 0.0
    assert source.worth(problem, (problem.prompt,)) < 1.0
