"""Interactions whose policy calls tools of a foreign object that changes: a game.

A game is played again from its first turn wherever that is needed, so states are the turns so far.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from node.envs import method_calls
from node.envs.base import Problem, Undecided
from node.envs.data.dataset import shuffled
from node.envs.method_calls import MethodCall
from node.envs.package_rules import PackageRules
from node.envs.replay_turns import REPLY_CHARS_MAX
from swarm.rollouts import Task
from swarm.wire.messages import SEGMENTS_MAX

TURNS_MAX: Final = (SEGMENTS_MAX + 1) // 2
_SHORT: Final = (MemoryError, RecursionError)  # another machine may have more


class CalledGame:
    """One object, and what was said to it."""

    prompt: str

    def __init__(self) -> None:
        self.completion: list[dict[str, Any]] = []  # messages, as chat servers have them

    def take(self, text: str) -> str | None:
        """The reply to a turn; None: it calls nothing. Raises Undecided if memory ran out."""
        calls = method_calls.calls_in(text)
        said: dict[str, Any] = {"role": "assistant", "content": text}
        self.completion.append(said)
        if not calls:
            return None
        said["tool_calls"] = [
            {"type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in calls
        ]
        if len(calls) > method_calls.CALLS_MAX:
            told = f"over {method_calls.CALLS_MAX} calls in a turn; none was made"
            results = [("", method_calls.plain(self.failure(ValueError(told))))]
        else:
            results = [(each.name, method_calls.plain(self._result(each))) for each in calls]
        self.completion += [
            {"role": "tool", "name": name, "content": result} for name, result in results
        ]
        return method_calls.answered([result for _, result in results], REPLY_CHARS_MAX)

    def _result(self, call: MethodCall) -> Any:
        try:
            return self.called(call)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the policy is told
            if isinstance(error, _SHORT) or isinstance(error.__cause__, _SHORT):
                raise Undecided(type(error).__name__) from None
            return self.failure(error)

    def end(self, texts: Sequence[str]) -> float:
        """The reward of a game with these turns; calls of the last one need not have been made."""
        taken = sum(each["role"] == "assistant" for each in self.completion)
        self.completion += [{"role": "assistant", "content": text} for text in texts[taken:]]
        return self.reward()

    def called(self, call: MethodCall) -> Any:
        """The result of a call."""
        raise NotImplementedError

    def failure(self, error: BaseException) -> Any:
        """The result of a call that failed."""
        raise NotImplementedError

    def reward(self) -> float:
        raise NotImplementedError


class GameSource(Protocol):
    """A package that was loaded."""

    @property
    def rules(self) -> PackageRules: ...

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools, as chat servers have them."""
        ...

    @property
    def told(self) -> str:
        """The part of prompts that tells of the tools."""
        ...

    @property
    def count(self) -> int:
        """Number of games; at least 1."""
        ...

    def game(self, number: int, seed: str) -> CalledGame:
        """A new game; ConfigError if it cannot begin."""
        ...

    def right(self, number: int) -> tuple[str, ...]:
        """Turns that reach a full score; none if they are not known."""
        ...


class CalledGames:
    """The turns of an `Interaction` whose problems have the number of a game in `entry`."""

    turns_max = TURNS_MAX
    tools = frozenset({"methods"})

    def __init__(self) -> None:
        self._live: tuple[Task, tuple[str, ...], CalledGame] | None = None  # newest game, its turns

    def source(self, parameters: str) -> GameSource:
        raise NotImplementedError

    def problem(self, task: Task) -> Problem:
        count = self.source(task.parameters).count
        epoch, place = divmod(task.index, count)
        return self.posed(task, shuffled(place, count, task.seed, epoch))

    def turns(self, parameters: str) -> int:
        """The policy's turns at most. Calls in the last one are not made."""
        raise NotImplementedError

    def posed(self, task: Task, number: int) -> Problem:
        self._live = None  # a new game may seed global generators
        source = self.source(task.parameters)
        right = source.right(number)
        prompt = source.game(number, _seed(task)).prompt
        return Problem(task, prompt, right[-1] if right else "", {"number": number})

    def begin(self, problem: Problem) -> tuple[str, ...]:
        """The turns so far."""
        return ()

    def reply(
        self, problem: Problem, state: tuple[str, ...], text: str
    ) -> tuple[tuple[str, ...], str | None]:
        said = (*state, text)
        if len(said) >= self.turns(problem.task.parameters):
            return said, None
        live, self._live = self._live, None
        is_live = live is not None and live[:2] == (problem.task, state)
        game = live[2] if live is not None and is_live else self._played(problem, state)
        reply = game.take(text)
        self._live = problem.task, said, game
        return said, reply

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """The reward after all calls of these turns."""
        self._live = None
        made = self.turns(problem.task.parameters) - 1
        return float(self._played(problem, texts[:made]).end(texts))

    def score(self, problem: Problem, text: str) -> float:
        return self.worth(problem, (text,))

    def right(self, problem: Problem) -> tuple[str, ...]:
        return self.source(problem.task.parameters).right(problem.entry["number"])

    def _played(self, problem: Problem, said: Sequence[str]) -> CalledGame:
        source = self.source(problem.task.parameters)
        game = source.game(problem.entry["number"], _seed(problem.task))
        for text in said:
            game.take(text)
        return game


def _seed(task: Task) -> str:
    return f"{task.seed}/{task.index}"
