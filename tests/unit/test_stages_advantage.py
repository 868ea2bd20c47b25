"""Advantages in a round: what is trained on is what the method's function says, and not grpo's."""

from functools import cache
from typing import Any

import pytest

from node.config import load_config
from node.methods.advantages import Grpo, grpo
from node.methods.choices import ADVANTAGES
from tests.scored_groups import of_completions
from tests.unit.test_sapo import CONFIG, FrozenPolicy, change, live

Trained = list[list[tuple[float, ...]]]  # advantages, by round and group
NAMES = ("dr_grpo", "rloo", "reinforce_pp", "opo", "pass_k", "mc_grpo", "gapo", "novelty")


@cache
def grpo_batches() -> list[Any]:
    policy = FrozenPolicy(0.5)
    live(CONFIG, policy)
    return policy.batches


def trained(name: str) -> Trained:
    policy = FrozenPolicy(0.5)
    live(change(CONFIG, advantage=load_config({"advantage": name}, {}).advantage), policy)
    return [[each.advantages for each in batch] for batch in policy.batches]


def expected(name: str) -> Trained:
    """By the function, of the rewards that the signs of grpo's advantages tell."""
    kind, function = ADVANTAGES[name]
    found: Trained = []
    for batch in grpo_batches():
        groups = [
            of_completions(each.completions, [float(a > 0) for a in each.advantages], each.prompt)
            for each in batch
        ]
        values = function(groups, kind())
        found.append([tuple(v for v in each if v is not None) for each in values])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_method_acts_in_a_round(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [[each.advantages for each in batch] for batch in grpo_batches()]
    assert any(value for batch in plain for each in batch for value in each)
    found = trained(name)
    wanted = expected(name)
    assert [[pytest.approx(each) for each in batch] for batch in wanted] == found
    assert found != plain
    monkeypatch.setattr("node.stages.stage.advantages", lambda groups, _: grpo(groups, Grpo()))
    assert trained(name) == plain  # the planted no-op: the setting has no effect
