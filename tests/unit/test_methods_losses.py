"""Losses for unlike peers and stale batches, against numbers worked out by hand and float64."""

import math

import pytest
import torch

from node.methods.choices import chosen_loss
from node.methods.losses import OBJECTIVES, TokenLosses, Tokens


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of(name: str, tokens: Tokens) -> tuple[TokenLosses, list[float]]:
    """The losses, and the gradient of their mean over tokens."""
    tokens.logprobs.requires_grad_(True)
    objective, set_to = OBJECTIVES[name.partition(",")[0]], chosen_loss(name)
    found = objective.losses(tokens, set_to)
    found.each.mean().backward()
    assert tokens.logprobs.grad is not None
    return found, tokens.logprobs.grad.tolist()


# --- HACPO ----------------------------------------------------------------------------------------


def foreign(s: float, advantage: float, update: int = 0) -> Tokens:
    """Two tokens of ours for a completion whose mean log-prob at its source is -1."""
    mean = math.log(s) - 1.0
    logs = column(mean - 0.3, mean + 0.3)
    return Tokens(
        logs, logs.detach().clone(), column(-1.0, -1.0), column(advantage, advantage), None,
        own=False, update=update,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("alpha", "factor"),
    [(1, 0.405), (3, 0.32805)],  # c^(1 + alpha) times the peer's factor .5: .9 x .9 x .5
)
def test_hacpo_weighs_a_foreign_completion_by_a_power_of_its_ratio(alpha, factor):
    found, gradient = of(f"hacpo, alpha={alpha}", foreign(0.9, 0.5))
    assert found.each.tolist() == pytest.approx([-factor] * 2)
    assert gradient == pytest.approx([-factor / 2] * 2)
    assert not found.clipped.any()


@pytest.mark.parametrize("advantage", [0.7, -0.7])
@pytest.mark.parametrize(
    ("s", "update", "is_clipped"),
    [
        (0.79, 0, True),
        (0.81, 0, False),
        (0.81, 1, True),  # below .825
        (0.84, 2, True),
        (0.86, 2, False),  # above .85
        (1.0, 40, False),  # the bound is 1 at most
        (1.01, 0, True),  # likelier here than at its source
    ],
)
def test_hacpo_has_no_gradient_out_of_bounds_for_either_sign(s, update, is_clipped, advantage):
    found, gradient = of("hacpo", foreign(s, advantage, update))
    assert found.clipped.tolist() == [is_clipped] * 2
    wanted = 0.0 if is_clipped else -s * s * advantage / 2
    assert gradient == pytest.approx([wanted] * 2)


def test_hacpo_of_own_completions_is_gspo():
    logs, behaviour = column(-1.0, -2.0), column(-1.0002, -2.0002)
    tokens = [Tokens(logs.clone(), logs, behaviour, column(1.0, 1.0)) for _ in range(2)]
    (found, gradient), (wanted, same) = of("hacpo", tokens[0]), of("gspo", tokens[1])
    assert torch.equal(found.each, wanted.each)
    assert gradient == same
    assert any(gradient)


def test_hacpo_without_power_or_bounds_pools_by_the_ratio():
    found, _ = of("hacpo, alpha=0, delta=0.999", foreign(0.3, 1.0))
    assert found.each.tolist() == pytest.approx([-0.3] * 2)
