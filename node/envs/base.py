"""The protocol of environments.

An environment turns a `Task` into a `Problem` and scores a completion's text. It must be a pure
function of the task: nodes with the same environment version make the same problem. Plug-ins are
entry points of the group `swarm_node.environments`; each loads to a callable that returns an
`Environment`.

The verifier's worker makes a problem of each environment, then forks, and scores in the fork. So
importing an environment or making a problem must leave no thread running. Both happen in a sandbox:
no network, no new process, and on the disk only Python, its packages and what `verify_read` names.
An environment that runs a text's code does so by `node.sandbox.runner`, and has a true attribute
`runs_code`. A node also imports a plug-in outside of the sandbox, to read its version.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ValidationError

from swarm.errors import ConfigError
from swarm.rollouts import Task

ENTRY_POINT_GROUP = "swarm_node.environments"


class Undecided(Exception):
    """Raised by `score`: the reward depends on the machine, so it is not sent to others."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A task, unfolded."""

    task: Task
    prompt: str
    answer: str  # one correct answer; others may score as well
    entry: Mapping[str, Any]  # what the environment's own verifier needs; never leaves the node


class Environment(Protocol):
    """One named source of problems."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def problem(self, task: Task) -> Problem:
        """The problem of a task; ConfigError if its parameters are unknown or wrong."""
        ...

    def score(self, problem: Problem, text: str) -> float:
        """The reward of a completion's text, in [0, 1]; 1 is a full score. The text may come from
        anybody. An error or a reward out of range is counted and worth 0.

        Raises:
            Undecided: by a limit of time or memory that other machines may not reach.
        """
        ...


@runtime_checkable
class Reads(Protocol):
    """An environment with files of its own, which are visible in the sandbox."""

    def reads(self, parameters: str) -> Sequence[Path]:
        """The files for tasks with these parameters."""
        ...


@runtime_checkable
class Settles(Protocol):
    """An environment whose parameters in a run file differ from those that are sent to others."""

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
        """The parameters that all nodes have and that the run's id follows from; ConfigError if
        they are wrong. `folder`: of the user's run file; None: they come from elsewhere."""
        ...


@runtime_checkable
class Interaction(Environment, Protocol):
    """An environment with several turns. Its replies and rewards are pure functions of the task and
    the policy's turns, so that a receiver can make every word again."""

    @property
    def turns_max(self) -> int:
        """Bound on the policy's turns; at least 1."""
        ...

    @property
    def tools(self) -> frozenset[str]:
        """Names of the tools that give its replies; empty: it replies by itself."""
        ...

    def begin(self, problem: Problem) -> Any:
        """The state before the policy's first turn. States are immutable."""
        ...

    def reply(self, problem: Problem, state: Any, text: str) -> tuple[Any, str | None]:
        """The state after a turn of the policy, and the reply; None: the transcript is over. The
        text may come from anybody; an error ends the transcript."""
        ...

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """The reward of all turns of the policy, as `score` of one."""
        ...

    def right(self, problem: Problem) -> tuple[str, ...]:
        """Turns that reach a full score, for supervised warm-up; none if they are not known."""
        ...


@runtime_checkable
class TellsTurns(Interaction, Protocol):
    """An interaction that can say what a single turn is worth."""

    def of_turn(self, problem: Problem, texts: Sequence[str]) -> float:
        """The reward of the last of the policy's turns so far, in [0, 1]; 1: it was right. As
        `worth` otherwise."""
        ...


M = TypeVar("M", bound=BaseModel)


def values_in(value: Any) -> Iterator[Any]:
    """A value and all values in it, whatever its depth."""
    yield value
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        yield from values_in(each)


def wrong_parameters(environment: str, what: str) -> ConfigError:
    return ConfigError(f"environment {environment}: {what}")


def checked(
    model: type[M],
    parameters: Mapping[str, Any],
    environment: str,
    *,
    more: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> M:
    """The parameters as their model; ConfigError in one line if one is wrong, unknown or missing.
    `more`: further known names; `hints`: advice by parameter, in place of the model's message."""
    try:
        return model.model_validate(dict(parameters))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    hint = (hints or {}).get(name, first["msg"].lower())
    if first["type"] == "extra_forbidden":
        known = ", ".join((*more, *model.model_fields))
        raise wrong_parameters(environment, f"{name}: no such parameter; known: {known}")
    if first["type"] == "missing":
        raise wrong_parameters(environment, f"{name}: is missing; {hint}")
    raise wrong_parameters(environment, f"{name} = {str(first['input'])[:80]!r}: {hint}")
