"""What an environment says is worked out again; whoever says otherwise is named for what it did."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from node.config import NodeConfig, RunConfig
from node.envs import trial
from node.envs.base import Interaction, Problem
from node.envs.registry import interaction
from node.envs.replay_turns import Parts, replies
from node.envs.scoring import score_group
from node.envs.tool_use import answered, calculator, call_in, file_tree, search
from node.envs.trial import hostile_texts
from node.verify.assignment import assigned_task
from node.verify.verifier import InlineVerifier, Verifier
from swarm.errors import ConfigError, LocalProtocolError, Reject, RemoteProtocolError
from swarm.rollouts import Author, Completion, FinishReason, RolloutGroup, Task, Turn
from tests.support import run as run_async
from tests.unit.tasks_support import ALICE, make_group
from tests.unit.verifier_trap import with_process

GUESS, TOOL = "guess_number", "calculator_sum"
NAMES = (GUESS, "text_maze", TOOL, "file_lookup")


def run_of(name: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "turns",
            "environments": [{"name": name}],
            "sampling": {"max_new_tokens": 200},
            "held_out": {"tasks": 5},
        }
    )


def source_of(name: str) -> Interaction:
    found = interaction(name)
    assert found is not None
    return found


def told(source: Interaction, problem: Problem, texts: Sequence[str]) -> Parts:
    """The honest transcript of what a policy says."""
    found: list[tuple[bool, str]] = []
    for text, reply in zip(texts, replies(source, problem, texts), strict=True):
        found += [(True, text)] + ([] if reply is None else [(False, reply)])
    return found


def completion_of(parts: Parts, reason: FinishReason = FinishReason.STOP) -> Completion:
    turns = tuple(
        Turn(Author.POLICY if mine else Author.ENVIRONMENT, len(text), 1 if mine else 0)
        for mine, text in parts
    )
    said = sum(mine for mine, _ in parts)
    text = "".join(text for _, text in parts)
    return Completion(text, (7,) * said, (-0.5,) * said, reason, 1, segments=turns)


def group_of(run: RunConfig, *completions: Completion) -> RolloutGroup:
    return replace(make_group(run), completions=completions)


def with_both(run: RunConfig, body: Callable[[Verifier], Awaitable[None]]) -> None:
    run_async(body, InlineVerifier(run))
    with_process(run, body)


def texts_of_four_turns(problem: Problem) -> tuple[str, ...]:
    """A game of guess whose three replies are known, and which is won with the last try."""
    wrong = [str(n) for n in range(1, 16) if str(n) != problem.answer]
    return (*wrong[:3], problem.answer)


@pytest.mark.parametrize("name", NAMES)
def test_right_turns_come_to_a_full_score_and_wrong_ones_do_not(name: str) -> None:
    run = run_of(name)
    for index in range(20):
        task = assigned_task(run, ALICE, index)
        source, problem = source_of(name), source_of(name).problem(task)
        texts = source.right(problem)
        honest = told(source, problem, texts)
        nothing = told(
            source, problem, ("nothing",) * len(replies(source, problem, ["nothing"] * 99))
        )
        score = score_group(task, [(False, honest), (False, nothing)], "exact")
        assert (score.rewards, score.forgery, score.scorer_errors) == ((1.0, 0.0), None, 0)
        assert source.problem(task) == problem
        assert replies(source, problem, texts) == replies(source, problem, texts)


def test_tasks_of_a_game_have_prompts_of_their_own() -> None:
    run = run_of(GUESS)
    tasks = [assigned_task(run, ALICE, index) for index in range(50)]
    assert len({source_of(GUESS).problem(task).prompt for task in tasks}) == 50


def test_a_verifier_plays_and_judges_transcripts() -> None:
    run = run_of(GUESS)
    task = assigned_task(run, ALICE, 0)
    source, problem = source_of(GUESS), source_of(GUESS).problem(task)
    texts = texts_of_four_turns(problem)
    won = completion_of(told(source, problem, texts))
    cut = completion_of(told(source, problem, texts)[:3], FinishReason.LENGTH)

    async def body(verifier: Verifier) -> None:
        prompt, rewards = await verifier.verify(group_of(run, won, cut))
        assert (prompt, rewards) == (problem.prompt, (1.0, 0.0))
        said = await verifier.replies([task], [[list(texts[:1]), list(texts)]])
        assert said == [[replies(source, problem, texts[:1])[0], None]]

    with_both(run, body)


def forged(name: str, kind: str) -> tuple[RunConfig, RolloutGroup]:
    """A group with one honest transcript and one that is forged."""
    run = run_of(name)
    source = source_of(name)
    problem = source.problem(assigned_task(run, ALICE, 0))
    texts = texts_of_four_turns(problem) if name == GUESS else source.right(problem)
    honest = list(told(source, problem, texts))
    lie = list(honest)
    if kind == "observation":
        lie[1] = (False, "lower, 3 left" if "higher" in lie[1][1] else "higher, 3 left")
    elif kind == "tool":
        lie[1] = (False, "<result>1</result>")
    elif kind == "skipped":
        del lie[2:4]
    elif kind == "stopped":
        del lie[3:]
    elif kind == "after the end":
        lie += [(False, "higher, 9 left"), (True, "1")]
    elif kind == "twice":
        lie.insert(1, lie[0])
    return run, group_of(run, completion_of(honest), completion_of(lie))


FORGERIES = [
    (GUESS, "observation", Reject.FORGED_OBSERVATION),
    (TOOL, "tool", Reject.FORGED_TOOL_RESULT),
    (GUESS, "skipped", Reject.SKIPPED_TURN),
    (GUESS, "stopped", Reject.SKIPPED_TURN),
    (GUESS, "after the end", Reject.SKIPPED_TURN),
    (GUESS, "twice", Reject.SKIPPED_TURN),
]


@pytest.mark.parametrize(("name", "kind", "reason"), FORGERIES)
def test_forgeries_are_refused_by_name(name: str, kind: str, reason: Reject) -> None:
    run, group = forged(name, kind)

    async def body(verifier: Verifier) -> None:
        with pytest.raises(RemoteProtocolError) as refused:
            await verifier.verify(group)
        assert refused.value.reason is reason
        honest = replace(group, completions=(group.completions[0],) * 2)
        assert (await verifier.verify(honest))[1] == (1.0, 1.0)

    with_both(run, body)


def test_a_transcript_of_another_task_is_refused_by_name() -> None:
    """A maze in which nothing that is said of another one fits."""
    run = run_of("text_maze")
    source = source_of("text_maze")
    problem = source.problem(assigned_task(run, ALICE, 0))
    for index in range(1, 200):
        other = source.problem(assigned_task(run, ALICE, index))
        texts = source.right(other)
        theirs, ours = replies(source, other, texts), replies(source, problem, texts)
        pairs = list(zip(theirs[:-1], ours, strict=False))
        if len(pairs) > 1 and all(a != b and b is not None for a, b in pairs):
            break
    else:
        raise AssertionError("every maze has a word in common with the first")
    lie = completion_of(told(source, other, texts))

    async def body(verifier: Verifier) -> None:
        with pytest.raises(RemoteProtocolError) as refused:
            await verifier.verify(group_of(run, lie))
        assert refused.value.reason is Reject.OTHER_TRANSCRIPT
        task = assigned_task(run, ALICE, index)
        honest = replace(group_of(run, lie), task=task)
        assert (await verifier.verify(honest))[1] == (1.0,)

    with_both(run, body)


def test_turns_belong_to_environments_that_answer() -> None:
    run = run_of("scripted_sum")
    parts = [(True, "1"), (False, "no"), (True, "2")]

    async def body(verifier: Verifier) -> None:
        with pytest.raises(RemoteProtocolError) as refused:
            await verifier.verify(group_of(run, completion_of(parts)))
        assert refused.value.reason is Reject.MALFORMED

    with_both(run, body)
    games = run_of(GUESS)
    plain = replace(completion_of([(True, "1")]), segments=())

    async def one_turn(verifier: Verifier) -> None:
        with pytest.raises(RemoteProtocolError) as refused:
            await verifier.verify(group_of(games, plain))
        assert refused.value.reason is Reject.SKIPPED_TURN

    with_both(games, one_turn)


def test_own_transcripts_that_others_would_refuse_are_a_loud_mistake() -> None:
    run = run_of(GUESS)
    task = assigned_task(run, ALICE, 0)
    problem = source_of(GUESS).problem(task)
    whole = told(source_of(GUESS), problem, (problem.answer,))

    async def body(verifier: Verifier) -> None:
        assert await verifier.score([task], [[(False, whole)]]) == [(1.0,)]
        for wrong in (problem.answer, (False, [*whole, (False, "higher, 1 left"), (True, "1")])):
            with pytest.raises(LocalProtocolError, match="own transcript"):
                await verifier.score([task], [[wrong]])

    with_both(run, body)


def test_what_no_rule_of_a_run_means_is_not_taken_for_the_policys() -> None:
    run = run_of(GUESS)
    plain = completion_of([(True, "1")], FinishReason.LENGTH)
    drafted = group_of(run, replace(plain, splices=(1,)))

    async def body(verifier: Verifier) -> None:
        assert await verifier.verify(group_of(run, plain))
        assert await verifier.verify(drafted)  # what was kept of a draft is not trained on
        for group, task in (
            (group_of(run, replace(plain, propensity=0.5)), None),
            (replace(group_of(run, plain), context="hint"), None),
            (drafted, drafted.task),  # workers have no drafts
        ):
            with pytest.raises(RemoteProtocolError) as refused:
                await verifier.verify(group, task)
            assert refused.value.reason is Reject.UNVERIFIABLE

    run_async(body, InlineVerifier(run))


def test_runs_with_turns_refuse_what_cannot_have_them() -> None:
    with pytest.raises(Exception, match="several turns"):
        NodeConfig(run=run_of(GUESS), engine="scripted")
    with pytest.raises(ConfigError, match=r"take answer.format = whole"):
        RunConfig.model_validate(
            {
                **run_of(GUESS).model_dump(include={"name", "environments"}),
                "answer": {"format": "tags"},
            }
        )


@pytest.mark.parametrize("name", NAMES)
def test_hostile_turns_are_answered_quickly_and_worth_nothing(name: str, tmp_path: Path) -> None:
    source = source_of(name)
    problem = source.problem(assigned_task(run_of(name), ALICE, 0))
    assert trial.own_reward(source, problem) == 1.0
    marker = tmp_path / "made"
    texts = list(hostile_texts(marker))
    texts += [(f"{what}, called", f"<tool>{tool}: {text}</tool>")
              for tool in source.tools for what, text in texts]  # fmt: skip
    for what, text in texts:
        found = trial.scored(source, problem, text)
        assert (found.error, found.reward) == ("", 0.0), what
        assert found.cpu_s < 0.2, what
    assert not marker.exists()


# --- tools -----------------------------------------------------------------------------------


def test_the_first_call_of_a_turn_counts() -> None:
    text = "I think <tool>calculator: 12*7</tool> or <tool>calculator: 1</tool>"
    assert call_in(text) == ("calculator", "12*7")
    assert call_in("84") is None
    assert call_in("<tool>calculator: 1") is None
    assert answered({"calculator": calculator}, "clock", "") == (
        "<result>no tool clock; there are: calculator</result>"
    )


@pytest.mark.parametrize("text", ["<tool>a:" * 8_192, "<tool>calculator: 1</tool" * 4_000])
def test_calls_without_an_end_are_not_looked_for_again_and_again(text: str) -> None:
    started = time.process_time()
    assert call_in(text) is None
    assert time.process_time() - started < 0.1  # seconds, before


@pytest.mark.parametrize(
    ("argument", "result"),
    [
        ("12*7", "84"),
        ("(1+2)*3 - 10 // 3", "6"),
        ("1/3", "1/3"),
        ("-7 % 3", "2"),
        ("1/0", "division by zero"),
        ("9**9**9", "only whole numbers and + - * / // % ( )"),
        ("__import__('os')", "only whole numbers and + - * / // % ( )"),
        ("1+", "not an expression"),
        ("", "not an expression"),
        ("(" * 120 + "1", "not an expression"),
        ("1" * 129, "over 128 characters"),
    ],
)
def test_calculator(argument: str, result: str) -> None:
    assert calculator(argument) == result


def test_files_and_search() -> None:
    look = file_tree({"a/x": "1", "a/y": "2", "b": "3"})
    assert (look("list"), look("list a"), look("read a/y")) == ("a b", "x y", "2")
    assert (look("read c"), look("list c"), look("rm a")) == (
        "no file c",
        "no folder c",
        "list FOLDER or read PATH",
    )
    find = search(("red fox", "red hen", "grey hen"))
    assert find("a red HEN") == "red hen\nred fox\ngrey hen"
    assert find("owl") == "nothing found"


def test_parameters_have_bounds() -> None:
    for parameters in ('{"max":1}', '{"tries":17}', '{"max":true}', '{"least":1}'):
        with pytest.raises(ConfigError, match="guess_number"):
            source_of(GUESS).problem(Task(GUESS, "1", parameters, 0, 0))
