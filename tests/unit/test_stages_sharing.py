"""Methods on tasks that come again and on groups of others, in rounds of a real policy.

Each acts, and what is trained on by it differs from what is trained on without it. With the stage
replaced by one that does nothing there is no difference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node.config import NodeConfig, RunConfig
from node.interfaces.trainer import TrainingGroup
from node.methods.choices import KNOWN
from node.stages import table
from node.stages.stage import Stage
from tests.unit.test_sapo import (
    CONFIG,
    PEER,
    Others,
    PacedTrainer,
    change,
    live,
    model,  # noqa: F401 - a fixture
    rounds,
)

COMMON = RunConfig.model_validate(
    {
        "name": "sums",
        "environments": [{"name": "scripted_sum", "parameters": {"max": 9}}],
        "sampling": {"max_new_tokens": 4},
        "held_out": {"tasks": 4},
        "common": {"share": 0.9, "tasks": 8},
    }
)
AGAIN = change(CONFIG, run=COMMON, rounds=6, external_groups=2)
TUNED: dict[str, dict[str, Any]] = {
    "hints": {"success_max": 1.0},
    "need": {"floor": 0.01},
}
WATCHED = {"evaluate_every_rounds": 1, "validation_tasks": 2}


@dataclass(frozen=True)
class Case:
    family: str
    kind: str
    skill: float = 0.9  # of the peer
    settings: tuple[tuple[str, Any], ...] = ()


CASES = [
    Case("control", "vade"),
    Case("generate", "speculative"),
    Case("generate", "hints"),
    Case("replay", "rescue"),
    Case("draw", "need"),
    Case("external_rule", "adaptive_external", settings=tuple(WATCHED.items())),
]


def played(directory: Path, config: NodeConfig, skill: float) -> tuple[Any, dict[str, int]]:
    """What was trained on, and how often each method acted."""
    learner = PacedTrainer(directory)
    peer = change(PEER, run=COMMON)
    node = live(config, learner, Others([peer, peer], skill))
    acted: dict[str, int] = {}
    for each in rounds(node):
        for kind, count in each.acted.items():
            acted[kind] = acted.get(kind, 0) + count
    wanted = [each.external_wanted for each in rounds(node)]
    return [*map(batch_of, learner.batches), wanted], acted


def batch_of(groups: list[TrainingGroup]) -> list[Any]:
    return [(g.prompt, g.completions, g.advantages, g.guided, g.source) for g in groups]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[each.kind for each in CASES])
def test_it_acts(
    case: Case,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = KNOWN[case.family][case.kind]  # type: ignore[index]
    made = kind(**TUNED.get(case.kind, {}))
    value = made if case.family in ("draw", "external_rule") else (made,)
    plain = change(AGAIN, **dict(case.settings))
    config = change(plain, **{case.family: value})
    usual, _ = played(model, plain, case.skill)
    found, acted = played(model, config, case.skill)
    assert acted[case.kind] > 0
    assert found != usual
    monkeypatch.setattr(table, "STAGES", {**table.STAGES, kind: Stage})
    found, acted = played(model, config, case.skill)
    assert not acted
    assert found == usual
