"""Losses for unlike peers and stale batches, against numbers worked out by hand and float64."""

import math

import numpy as np
import pytest
import torch

from node.methods.choices import chosen_loss
from node.methods.loss_settings import Dpo, EwmaLoss
from node.methods.losses import (
    OBJECTIVES,
    TokenLosses,
    Tokens,
    preferred,
    supervised,
    taught,
    whiten,
)
from node.train.kept_weights import KeptWeights


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


# --- PPO-EWMA -------------------------------------------------------------------------------------


def test_the_average_counts_an_update_by_its_age_without_bias():
    weight = torch.zeros(1)
    average = KeptWeights([weight])
    found = []
    for value in (1.0, 2.0, 3.0):
        weight.fill_(value)
        average.follow(EwmaLoss(centre_of_mass=8.0).decay)
        with average.loaded():
            found.append(float(weight))
    assert found == pytest.approx([0.5294, 1.0783, 1.6467], abs=5e-5)
    assert float(weight) == 3.0
    average.follow(0.0)  # no memory: the present weights
    with average.loaded():
        assert float(weight) == 3.0
    assert EwmaLoss(centre_of_mass=32.0).decay == pytest.approx(0.9697, abs=5e-5)


def averaged(now: float, average: float, behaviour: float, advantage: float) -> Tokens:
    columns = (column(each) for each in (now, now, behaviour, advantage))
    return Tokens(*columns, averaged=column(average))


def test_the_clip_of_ppo_ewma_is_around_the_average():
    found, gradient = of("ppo_ewma", averaged(-0.9, -1.2, -1.0, 1.0))
    assert found.each.tolist() == pytest.approx([-0.9825], abs=5e-5)  # 1.2 e^-0.2
    assert (found.clipped.tolist(), gradient) == ([True], [0.0])
    found, gradient = of("ppo_ewma, clip=0.9", averaged(-0.9, -1.2, -1.0, 1.0))
    assert found.each.tolist() == pytest.approx([-1.1052], abs=5e-5)
    assert gradient == pytest.approx([-1.1052], abs=5e-5)
    found, gradient = of("ppo_ewma", averaged(-1.2, -0.9, -1.0, 1.0))  # nothing gained by a clip
    assert (found.clipped.tolist(), gradient) == ([False], pytest.approx([-math.exp(-0.2)]))
    found, _ = of("ppo_ewma", averaged(-1.2, -0.9, -1.0, -1.0))
    assert found.each.tolist() == pytest.approx([0.8 * math.exp(0.1)])
    assert found.clipped.tolist() == [True]


def test_ppo_ewma_bounds_the_ratio_to_what_generated():
    found, gradient = of("ppo_ewma, ratio_max=100", averaged(-1.0, -1.0, -9.0, 1.0))
    assert found.each.tolist() == pytest.approx([-100.0])
    assert gradient == pytest.approx([-100.0])
    assert of("ppo_ewma", averaged(-1.0, -1.0, -9.0, 1.0))[1] == pytest.approx([-10.0])


def test_a_preference_by_its_margin():
    found = preferred(column(2.0, 0.0), Dpo(beta=0.1))
    assert found.tolist() == pytest.approx([0.5981, 0.6931], abs=5e-5)


def test_a_teacher_moves_advantages_by_its_log_probs():
    student, teacher = column(-1.2, -1.2, -1.2), column(-0.7, -3.2, -math.inf)
    assert taught(column(0, 0, 0), student, teacher, 1.0).tolist() == pytest.approx([0.5, -2, -20])
    assert taught(column(1, 1, 1), student, teacher, 0.1).tolist() == pytest.approx([1.05, 0.8, -1])


def test_guidance_with_a_weight_has_that_gradient():
    logs = column(-0.1, -9.0).requires_grad_()
    supervised(logs, 0.3).each.sum().backward()
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([-0.3, -0.3])


# --- AEPO -----------------------------------------------------------------------------------------


def test_aepo_keeps_a_gradient_above_its_clip():
    ratios, behaviour = [1.5, 1.1, 0.5, 1.5, 0.5, 4.0], [-2.0] * 6
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, -2.0]
    logs = column(*(b + math.log(r) for b, r in zip(behaviour, ratios, strict=True)))
    old = column(*behaviour)
    found, gradient = of("aepo", Tokens(logs, old, old, column(*advantages)))
    assert found.each.tolist() == pytest.approx([-2.4, -2.2, -1.0, 3.0, 1.6, 6.0])
    assert gradient == pytest.approx([x / 6 for x in (-2.4, -2.2, -1.0, 3.0, 0.0, 0.0)])
    assert found.clipped.tolist() == [False, False, False, False, True, True]


def test_aepo_counts_tokens_of_high_entropy_more():
    entropies = column(0.0, 1.0, 2.0, 3.0)
    z = whiten(entropies, entropies)
    assert z.tolist() == pytest.approx(((np.arange(4) - 1.5) / np.std(range(4), ddof=1)).tolist())
    logs, adv = column(-1.0, -1.0, -1.0, -1.0), column(1.0, 1.0, -1.0, -1.0)
    _, gradient = of("aepo", Tokens(logs, logs.clone(), logs.clone(), adv, whitened=z))
    wanted = [-a * (1 + 0.2 * v) / 4 for a, v in zip([1, 1, -1, -1], z.tolist(), strict=True)]
    assert gradient == pytest.approx(wanted)
    assert whiten(column(7.0), column(7.0)).tolist() == [0.0]
    assert whiten(column(2.0, 2.0), column(2.0, 2.0)).tolist() == [0.0, 0.0]


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
