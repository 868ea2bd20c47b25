"""What the tests of tasks and config share."""

from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig, RunConfig
from node.envs.base import Problem, Undecided
from node.envs.games import ScriptedSum
from node.verify.assignment import assigned_task
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup, Task

ALICE = Identity(b"a" * 32).peer_id
BOB = Identity(b"b" * 32).peer_id

NINE = (
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_matrix",
    "calendar_arithmetic",
    "decimal_arithmetic",
    "fraction_simplification",
    "propositional_logic",
)

SUMS = ("chain_sum", "gcd", "products")


def make_run(*environments: dict[str, Any], **rules: Any) -> RunConfig:
    """A run named `test`; of `scripted_sum` unless told otherwise."""
    return RunConfig.model_validate(
        {"name": "test", "environments": environments or ({"name": "scripted_sum"},), **rules}
    )


def make_config(run: RunConfig, **settings: Any) -> NodeConfig:
    return NodeConfig(run=run, data_dir=Path("unused"), **settings)


def leave_wrong_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the scorer of sums decide on right texts alone."""
    score = ScriptedSum.score

    def doubtful(self: ScriptedSum, problem: Problem, text: str) -> float:
        if not (found := score(self, problem, text)):
            raise Undecided
        return found

    monkeypatch.setattr(ScriptedSum, "score", doubtful)


def first_tasks(run: RunConfig, producer: str, count: int) -> tuple[Task, ...]:
    """The first of a producer's stream."""
    return tuple(assigned_task(run, producer, index) for index in range(count))


def make_group(
    run: RunConfig, *texts: str, producer: PeerId = ALICE, task: Task | None = None
) -> RolloutGroup:
    """A group of that producer's first task, unless another is given."""
    return RolloutGroup(
        run_id=run.run_id,
        producer=producer,
        round=1,
        task=task or assigned_task(run, producer, 0),
        completions=tuple(Completion(text, (), (), FinishReason.STOP, 0) for text in texts),
        tokenizer="t",
        temperature=1.0,
        top_p=1.0,
        created_at_s=0,
        expires_at_s=1,
    )
