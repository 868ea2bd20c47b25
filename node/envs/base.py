"""The protocol of environments.

An environment turns a `Task` into a `Problem` (prompt and whatever its verifier needs) and scores
a completion's text. It must be a pure function of the task: two nodes with the same environment
version regenerate the same problem. Other people's environments plug in through the entry-point
group `swarm_node.environments`: each entry point loads to a callable that returns an `Environment`.

The verifier's worker makes a problem of each environment, then forks, and scores in the fork. So
importing an environment or making a problem must leave no thread running. Both happen in a sandbox:
without a network or a new process, with nothing on the disk but Python and its packages, and what
`verify_read` names. One that runs what a text says does so by `node.sandbox.runner`, and has an
attribute `runs_code` that is true. A node also imports a plug-in outside of the sandbox, to learn
its version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ValidationError

from swarm.errors import ConfigError
from swarm.rollouts import Task

ENTRY_POINT_GROUP = "swarm_node.environments"


class Undecided(Exception):
    """The reward of a text depends on the machine that scores it, so no machine sends it to
    another.

    For environments to raise from `score`.
    """


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
        """The problem of a task.

        Raises:
            ConfigError: this environment cannot make such a task (unknown parameters).
        """
        ...

    def score(self, problem: Problem, text: str) -> float:
        """The reward of a completion's text, in [0, 1]; 1 is a full score.

        The text may come from anybody. Whatever this raises, and a reward out of range, is counted
        by `scoring.score_group` and worth 0.

        Raises:
            Undecided: by a limit of time or memory that other machines may not have come to.
        """
        ...


@runtime_checkable
class Reads(Protocol):
    """An environment with files of its own, which its scorer finds in the sandbox as well."""

    def reads(self, parameters: str) -> Sequence[Path]:
        """Those that tasks with such parameters need."""
        ...


@runtime_checkable
class Settles(Protocol):
    """An environment whose parameters a run file may write in a way that does not travel."""

    def settled(self, parameters: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
        """The parameters as all nodes of the run have them, and the run's id follows from them.
        `folder`: of a run file of the user's; None: they come from elsewhere.

        Raises:
            ConfigError: they are wrong.
        """
        ...


@runtime_checkable
class Interaction(Environment, Protocol):
    """An environment that answers: its tasks are done in several turns.

    What it says and what a transcript is worth are pure functions of the task and of what the
    policy said before, so that a receiver works out every word of it again.
    """

    @property
    def turns_max(self) -> int:
        """The most turns of the policy; at least 1."""
        ...

    @property
    def tools(self) -> frozenset[str]:
        """The names of the tools that give its replies; empty: it replies by itself."""
        ...

    def begin(self, problem: Problem) -> Any:
        """The state before the policy's first turn. States are values: none is ever changed."""
        ...

    def reply(self, problem: Problem, state: Any, text: str) -> tuple[Any, str | None]:
        """The state after a turn of the policy, and what is said to it; None: it is over.

        The text may come from anybody, as in `score`, and whatever this raises ends the transcript.
        """
        ...

    def worth(self, problem: Problem, texts: Sequence[str]) -> float:
        """The reward of all that the policy said, by turns; as `score`, which is of one turn."""
        ...

    def right(self, problem: Problem) -> tuple[str, ...]:
        """Turns of a policy that come to a full score, for supervised warm-up."""
        ...


# Parameters of an environment that are a model: read, or refused in one line.

M = TypeVar("M", bound=BaseModel)


def wrong_parameters(environment: str, what: str) -> ConfigError:
    """The error for a run's wrong parameters."""
    return ConfigError(f"environment {environment}: {what}")


def checked(
    model: type[M],
    parameters: Mapping[str, Any],
    environment: str,
    *,
    more: Sequence[str] = (),
    hints: Mapping[str, str] | None = None,
) -> M:
    """The parameters as their model. `more`: names that are known besides the model's. `hints`:
    what to do about a parameter, by its name, in place of what the model says.

    Raises:
        ConfigError: one of them is wrong, unknown or missing.
    """
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
