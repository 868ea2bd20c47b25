"""Makes problems of tasks and rewards of texts, in this process."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, cast

from node.envs import replay_turns as replay
from node.envs.answers import (
    FORMATS,
    WHOLE,
    AnswerFormat,
    AnswerRule,
    after_thought,
    answer_in,
    bare,
    is_padded,
    without_blanks,
    written,
)
from node.envs.base import Environment, Interaction, Problem, TellsTurns, Undecided
from node.envs.registry import environment, interaction
from node.envs.replay_turns import Said
from node.interfaces.prompts import Prompt
from node.sandbox.bounds import PROBLEM_CPU_S, OutOfTime, cpu_bound
from node.sandbox.runner import NoSandbox, RunnerFailed
from swarm.errors import ConfigError, Reject
from swarm.rollouts import Task
from swarm.texts import printable
from swarm.wire.messages import TEXT_CHARS_MAX

PROBLEMS_CACHED_MAX = 1024
_PARAMETERS_SHOWN_CHARS = 200

T = TypeVar("T")

_OURS = (NoSandbox, RunnerFailed)  # faults of this machine, which are no text's
RewardRule = Literal["exact", "partial"]
ScoreRule = RewardRule | Literal["turn"]  # of each transcript's last turn alone


@dataclass(frozen=True, slots=True)
class PosedProblem:
    """A policy's prompt, and one right completion for supervised warm-up."""

    prompt: str
    answer: str  # in the run's format
    failure: str = ""  # why the task is left out; then there is neither


@dataclass(frozen=True, slots=True)
class GroupScore:
    """A verifier's findings about one group."""

    prompt: str
    rewards: tuple[float | None, ...]  # None: undecided
    scorer_errors: int  # texts on which the environment's scorer failed; they score 0
    forgery: Reject | None = None  # why a transcript of it is none of this task


def pose(
    task: Task,
    prompt_chars_max: int,
    rule: AnswerRule = WHOLE,
    answer_chars_max: int = TEXT_CHARS_MAX,
) -> PosedProblem:
    """The problem of a task, after the run's instructions; ConfigError if it has none, or one that
    is too long."""
    problem = _problem(task)
    prompt = Prompt.read(problem.prompt).below(rule.system, rule.examples).text
    if len(prompt) > prompt_chars_max:
        raise ConfigError(
            f"environment {task.environment}: a prompt has {len(prompt)} characters, "
            f"limits.prompt_chars_max is {prompt_chars_max}; raise it or make the problems smaller"
        )
    answer = rule.written(problem.answer)
    if len(answer) > answer_chars_max:
        raise ConfigError(
            f"environment {task.environment}: a right answer has {len(answer)} characters, "
            f"limits.text_chars_max is {answer_chars_max}; raise it or make the problems smaller"
        )
    return PosedProblem(prompt, answer)


def score_group(
    task: Task,
    texts: Sequence[Said],
    reward: ScoreRule,
    rule: AnswerRule = WHOLE,
    *,
    until_undecided: bool = False,
) -> GroupScore:
    """Rewards by the run's rules: `exact` is 1 for a full score, else 0; `partial` keeps fractions.
    A text without an answer scores 0; a wrong answer in the right format scores at least
    `rule.format_reward`. `until_undecided`: texts after an undecided one are undecided too.

    Raises:
        ConfigError: the run's parameters make no problem.
        NoSandbox, RunnerFailed: this machine could not run a text's code.
    """
    problem = _problem(task)
    source = environment(task.environment)
    prompt = Prompt.read(problem.prompt).below(rule.system, rule.examples).text
    has_turns = isinstance(source, Interaction)
    if not has_turns and not all(isinstance(text, str) for text in texts):
        return GroupScore(prompt, (0.0,) * len(texts), 0, Reject.MALFORMED)
    rewards: list[float | None] = []
    errors = 0
    for text in texts:
        answer: Said | None = text
        if isinstance(text, str) and not has_turns:
            answer = _answer(rule, text, problem.answer)
        if until_undecided and None in rewards:
            rewards.append(None)
        elif answer is None:
            rewards.append(0.0)
        else:
            try:
                raw = _best_score(source, problem, answer, reward)
            except Undecided:
                rewards.append(None)
                continue
            if isinstance(raw, Reject):  # one of another task spoils its group
                return GroupScore(prompt, (0.0,) * len(texts), 0, raw)
            errors += raw is None
            least = 0.0 if has_turns else rule.format_reward
            rewards.append(max(_by_rule(raw, reward), least))
    return GroupScore(prompt, tuple(rewards), errors)


def _best_score(
    source: Environment, problem: Problem, said: Said, reward: ScoreRule
) -> float | Reject | None:
    """The score of an answer, or of the same without emphasis and closing marks if that is more:
    few environments look through these."""
    raw = _raw_score(source, problem, said, reward)
    if not isinstance(said, str) or raw is None or isinstance(raw, Reject) or raw == 1.0:
        return raw
    plain = bare(said)
    again = _raw_score(source, problem, plain, reward) if plain != said else None
    return max(raw, again) if isinstance(again, float) else raw


def _raw_score(
    source: Environment, problem: Problem, said: Said, reward: ScoreRule
) -> float | Reject | None:
    """The environment's own score; None if it fails or leaves [0, 1]; a `Reject` if a transcript is
    none of this task. Undecided as `Environment.score`, and if replies of a text's code differ from
    those where it was made, which may be the other machine's fault."""
    if not isinstance(source, Interaction):
        return _score_of(partial(source.score, problem, cast("str", said)))
    if isinstance(said, str) or not replay.takes_turns(said[1]):
        return Reject.SKIPPED_TURN
    # a tuple, so that no forgery is told from a failure
    found = _guarded(lambda: (replay.forgery(source, problem, said),), Undecided)
    if found is None:
        return None
    (forgery,) = found
    if forgery is not None and getattr(source, "runs_code", False):
        raise Undecided(str(forgery))
    if forgery is not None:
        return forgery
    texts = [text for mine, text in said[1] if mine]
    if reward == "turn" and isinstance(source, TellsTurns):
        return _score_of(partial(source.of_turn, problem, texts))
    return _score_of(partial(source.worth, problem, texts))


def replies(task: Task, transcripts: Sequence[Sequence[str]]) -> list[str | None]:
    """The reply to the last turn of each transcript, given the policy's turns. None: it is over, as
    for tasks of one turn and after a failure of the environment."""
    source, problem = interaction(task.environment), _problem(task)
    if source is None:
        return [None] * len(transcripts)
    found: list[str | None] = []
    for texts in transcripts:  # a failure here is counted when the transcript is scored
        said = _guarded(partial(replay.replies, source, problem, texts))
        found.append(said[-1] if said and len(said) == len(texts) else None)
    return found


def right_turns(task: Task) -> list[tuple[str, str]] | None:
    """Turns that reach a full score, each with the reply to it, empty at the end; None: the task
    has one turn."""
    source, problem = interaction(task.environment), _problem(task)
    if source is None:
        return None
    texts = source.right(problem)
    if not texts:
        raise ConfigError(
            f"environment {task.environment}: knows no turns that reach a full score, to warm a "
            "policy up on; name another --model, or the environment's solution"
        )
    said = replay.replies(source, problem, texts)
    return [(text, reply or "") for text, reply in zip(texts, said, strict=True)]


def _answer(rule: AnswerRule, text: str, right: str) -> str | None:
    said = after_thought(text, rule.thought_end)
    if said is None:
        return None
    if rule.format == "whole":
        said = without_blanks(said) if without_blanks(right) == right else said
        if is_padded(said, right):
            return None
    return answer_in(rule.format, said)


def check_format(tasks: Sequence[Task], rule: AnswerRule) -> None:
    """Refuse a format in which the environments' own answers cannot be given. `tasks`: a sample,
    of which those that cannot be posed are left out, unless that is all."""
    tasks = [task for task in tasks if _guarded(partial(_problem, task))] or tasks
    for task in tasks:
        if _passes(task, rule.format):
            continue
        alike = [
            each
            for each in tasks
            if (each.environment, each.parameters) == (task.environment, task.parameters)
        ]
        fitting = [kind for kind in FORMATS if all(_passes(each, kind) for each in alike)]
        fitting.sort(key=lambda kind: (kind == "code", -FORMATS.index(kind)))  # the best one first
        answer = printable(_problem(task).answer, 40)
        raise ConfigError(
            f"environment {task.environment}: an answer such as {answer!r} cannot be given as "
            f"{rule.format}; take {' or '.join(fitting)} for its answer.format"
        )


def _passes(task: Task, kind: AnswerFormat) -> bool:
    problem = _problem(task)
    found = answer_in(kind, written(kind, problem.answer))
    try:
        score = environment(task.environment).score
        return found is not None and _score_of(partial(score, problem, found)) == 1
    except Undecided:
        return False


def _score_of(score: Callable[[], float]) -> float | None:
    """A score; None if the scorer failed or left [0, 1]."""
    reward = _guarded(lambda: float(score()), Undecided)
    return reward if reward is not None and 0.0 <= reward <= 1.0 else None  # nan is in no range


def _guarded(call: Callable[[], T], *through: type[Exception]) -> T | None:
    """The result of foreign code on strangers' text; None: it failed, and the caller counts that.
    Faults of this machine and the errors `through` are raised."""
    let_through: tuple[type[Exception], ...] = (*through, *_OURS)
    try:
        return call()
    except let_through:
        raise
    except Exception:  # noqa: BLE001
        return None


def _by_rule(raw: float | None, reward: ScoreRule) -> float:
    found = raw or 0.0
    return float(found == 1.0) if reward == "exact" else found


@functools.lru_cache(maxsize=PROBLEMS_CACHED_MAX)
def _problem(task: Task) -> Problem:
    source = environment(task.environment)
    if task.version != source.version:
        raise ConfigError(
            f"environment {task.environment}: version {task.version} is wanted, "
            f"{source.version} is installed; install the former"
        )
    return made(source, task)


def made(source: Environment, task: Task) -> Problem:
    """The problem that an environment makes of a task, in bounded time; ConfigError if it makes
    none. The task's parameters may be a stranger's."""
    try:
        with cpu_bound(PROBLEM_CPU_S):
            return source.problem(task)
    except OutOfTime:
        why = f"takes over {PROBLEM_CPU_S:g} s of CPU time"
    except MemoryError:
        why = "takes more memory than there is for it"
    except (ConfigError, *_OURS):
        raise
    except Exception as error:  # noqa: BLE001 - others' code
        why = f"cannot be posed ({printable(f'{type(error).__name__}: {error}', 100)})"
    raise ConfigError(
        f"environment {task.environment} with {printable(task.parameters, _PARAMETERS_SHOWN_CHARS)}"
        f": a problem {why}; make the problems smaller"
    )
