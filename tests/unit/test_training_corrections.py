"""Losses for stale data against their definitions, in plain Python, one token at a time."""

import math
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.methods.losses import (
    TokenLosses,
    behaviour_weights,
    clipped_surrogate,
    decoupled,
    dual_clipped_surrogate,
    dual_clipped_tokens,
    mismatch,
    second_moment,
    second_moment_kept,
)

TAU = 0.04
COUNT = 200


def columns(seed: int, spread: float = 0.6) -> tuple[list[float], ...]:
    """Current, proximal and behaviour log-probs and advantages of tokens that differ somewhat."""
    rng = Random(seed)
    behaviour = [-rng.expovariate(1.0) for _ in range(COUNT)]
    proximal = [value + rng.gauss(0.0, spread) for value in behaviour]
    current = [value + rng.gauss(0.0, spread) for value in proximal]
    return current, proximal, behaviour, [rng.choice([-1.3, -0.4, 0.0, 0.8]) for _ in behaviour]


def tensors(*lists: Sequence[float]) -> list[torch.Tensor]:
    """In fp64, so that a definition is compared and not its rounding."""
    return [torch.tensor(each, dtype=torch.float64) for each in lists]


def plain_clip(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def gradient(losses: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(losses.sum(), logprobs)[0]


def difference(loss, logprobs: torch.Tensor, step: float = 1e-6) -> torch.Tensor:
    """Each token's slope by central differences; a token's loss depends on no other token."""
    return (loss(logprobs + step) - loss(logprobs - step)) / (2 * step)


# --- dual clip -------------------------------------------------------------------------------


@pytest.mark.parametrize("dual_clip", [3.0, 1.5])
def test_dual_clip_bounds_what_a_negative_token_costs(dual_clip):
    current, old, _, advantages = columns(1)
    ours = dual_clipped_surrogate(*tensors(current, old, advantages), 0.2, 0.28, dual_clip)
    expected = []
    for now, before, advantage in zip(current, old, advantages, strict=True):
        loss = plain_clip(math.exp(now - before), advantage, 0.2, 0.28)
        expected.append(min(loss, -dual_clip * advantage) if advantage < 0 else loss)
    assert ours.tolist() == pytest.approx(expected)
    assert (ours != clipped_surrogate(*tensors(current, old, advantages), 0.2, 0.28)).any()


def test_without_a_dual_clip_the_loss_is_the_clipped_one():
    values = tensors(*(columns(2)[i] for i in (0, 1, 3)))
    plain = clipped_surrogate(*values, 0.2, 0.2)
    assert torch.equal(dual_clipped_surrogate(*values, 0.2, 0.2, math.inf), plain)


def test_tokens_under_the_dual_clip_are_those_without_gradient():
    current, old, advantages = tensors(*(columns(3)[i] for i in (0, 1, 3)))
    current.requires_grad_()
    wide = 1 - 1e-9  # so that the lower clip takes no gradient
    slopes = gradient(dual_clipped_surrogate(current, old, advantages, wide, 1e9, 1.5), current)
    clipped = dual_clipped_tokens(current.detach(), old, advantages, 1.5)
    assert clipped.any()
    assert torch.equal(slopes == 0, clipped | (advantages == 0))


# --- decoupled and truncated -----------------------------------------------------------------


def plain_decoupled(rows, low: float, high: float, most: float, *, truncate: bool) -> list[float]:
    losses = []
    for now, proximal, behaviour, advantage in rows:
        weight = math.exp(proximal - behaviour)
        if truncate:
            weight = min(weight, most)
        elif weight > most:
            weight = 0.0
        losses.append(weight * plain_clip(math.exp(now - proximal), advantage, low, high))
    return losses


@pytest.mark.parametrize("most", [5.0, 1.2])
def test_decoupled_follows_its_definition(most):
    data = columns(4)
    ours = decoupled(*tensors(*data), 0.2, 0.25, most)
    rows = list(zip(*data, strict=True))
    assert ours.each.tolist() == pytest.approx(
        plain_decoupled(rows, 0.2, 0.25, most, truncate=False)
    )
    assert ours.masked.tolist() == [math.exp(p - b) > most for _, p, b, _ in rows]
    assert 0 < ours.masked.sum() < COUNT
    assert not (ours.clipped & ours.masked).any()


@pytest.mark.parametrize("most", [2.0, 1.0])
def test_truncated_importance_follows_its_definition(most):
    data = columns(5)
    ours = decoupled(*tensors(*data), 0.2, 0.25, most, truncates=True)
    rows = list(zip(*data, strict=True))
    assert ours.each.tolist() == pytest.approx(
        plain_decoupled(rows, 0.2, 0.25, most, truncate=True)
    )
    assert not ours.masked.any()


def test_weights_of_the_reference_vector():
    proximal = torch.tensor([0.3, 1.0, 2.5, 6.0]).log()
    zero = torch.zeros(4)
    weights = behaviour_weights(proximal, zero).clamp(max=2.0)
    assert weights.tolist() == pytest.approx([0.3, 1.0, 2.0, 2.0])
    one = decoupled(proximal, proximal, zero, -torch.ones(4), 0.2, 0.2, 2.0, truncates=True)
    assert one.each.tolist() == pytest.approx([0.3, 1.0, 2.0, 2.0])


@pytest.mark.parametrize("method", [decoupled, partial(decoupled, truncates=True)])
def test_at_the_proximal_policy_the_gradient_is_the_importance_weighted_one(method):
    """There the clip is silent: what is left is w A, the policy gradient under the behaviour."""
    _, proximal, behaviour, advantages = tensors(*columns(6))
    current = proximal.clone().requires_grad_()
    found = method(current, proximal, behaviour, advantages, 0.2, 0.2, 1e9)
    expected = -(proximal - behaviour).exp() * advantages
    assert torch.allclose(gradient(found.each, current), expected)


@pytest.mark.parametrize("method", [decoupled, partial(decoupled, truncates=True)])
def test_the_gradient_is_that_of_finite_differences(method):
    current, *others = tensors(*columns(7))
    current.requires_grad_()
    found = method(current, *others, 0.2, 0.28, 2.0)
    slopes = gradient(found.each, current)
    near = difference(lambda c: method(c, *others, 0.2, 0.28, 2.0).each, current.detach())
    assert torch.allclose(slopes, near, atol=1e-7)
    silent = found.clipped | found.masked | (others[-1] == 0)
    assert torch.equal(slopes == 0, silent)


@pytest.mark.parametrize("method", [decoupled, partial(decoupled, truncates=True)])
def test_fresh_data_has_the_plain_clipped_loss_to_the_bit(method):
    current, proximal, behaviour, advantages = tensors(*columns(8))
    plain = clipped_surrogate(current, proximal, advantages, 0.2, 0.28)
    assert torch.equal(method(current, proximal, proximal, advantages, 0.2, 0.28, 2.0).each, plain)
    assert not torch.equal(
        method(current, proximal, behaviour, advantages, 0.2, 0.28, 2.0).each, plain
    )


# --- M2PO ------------------------------------------------------------------------------------


def plain_kept(current, behaviour, advantages, tau: float) -> list[bool]:
    """The definition as it is told: take the largest out, look at the mean of the rest, go on."""
    region = [
        i
        for i, advantage in enumerate(advantages)
        if (advantage > 0 and current[i] > behaviour[i])
        or (advantage < 0 and current[i] < behaviour[i])
    ]
    while region:
        squares = [(current[i] - behaviour[i]) ** 2 for i in region]
        if sum(squares) / len(squares) <= tau:
            break
        region.remove(max(region, key=lambda i: (current[i] - behaviour[i]) ** 2))
    outward = [
        (a > 0 and c > b) or (a < 0 and c < b)
        for c, b, a in zip(current, behaviour, advantages, strict=True)
    ]
    return [not out or i in region for i, out in enumerate(outward)]


TOKEN = st.tuples(
    st.floats(-6, 0).map(lambda x: round(x, 3)),
    st.floats(-6, 0).map(lambda x: round(x, 3)),
    st.sampled_from([-1.0, -0.25, 0.0, 0.5]),
)


@given(st.lists(TOKEN, max_size=40), st.sampled_from([TAU, 0.5, 4.0]))
def test_m2po_masks_by_its_definition(tokens, tau):
    current, behaviour, advantages = zip(*tokens, strict=True) if tokens else ((), (), ())
    kept = second_moment_kept(*tensors(current, behaviour, advantages), tau)
    assert kept.tolist() == plain_kept(current, behaviour, advantages, tau)


@pytest.mark.parametrize("spread", [0.05, 0.3, 2.0])
def test_m2po_leaves_a_second_moment_within_its_bound_and_masks_no_more_than_it_must(spread):
    current, _, behaviour, advantages = tensors(*columns(9, spread))
    kept = second_moment_kept(current, behaviour, advantages, TAU)
    squares = (current - behaviour).square()
    outward = (current - behaviour) * advantages > 0
    rest = squares[kept & outward]
    assert rest.numel() == 0 or rest.mean() <= TAU
    gone = squares[~kept]
    assert kept[~outward].all()
    assert (spread == 0.05) == (gone.numel() == 0)
    if gone.numel():
        assert gone.min() >= (rest.max() if rest.numel() else 0.0)
        assert torch.cat([rest, gone.min()[None]]).mean() > TAU


def test_m2po_is_the_ratio_times_the_advantage_on_what_is_kept():
    current, _, behaviour, advantages = columns(10)
    kept = plain_kept(current, behaviour, advantages, TAU)
    expected = [
        -math.exp(c - b) * a if keep else 0.0
        for c, b, a, keep in zip(current, behaviour, advantages, kept, strict=True)
    ]
    found = second_moment(*tensors(current, behaviour, advantages), torch.tensor(kept))
    assert found.each.tolist() == pytest.approx(expected)
    assert found.masked.tolist() == [not keep for keep in kept]
    assert not found.clipped.any()
    now = tensors(current)[0].requires_grad_()
    slopes = gradient(
        second_moment(now, *tensors(behaviour, advantages), torch.tensor(kept)).each, now
    )
    assert torch.allclose(slopes, found.each)  # the gradient of -r A by log r is -r A


def test_the_largest_ratio_leaves_out_tokens_whatever_their_sign():
    behaviour = torch.tensor([-30.0, -30.0, -1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0])
    found = second_moment(
        torch.full((3,), -1.0), behaviour, advantages, torch.ones(3, dtype=torch.bool), 10.0
    )
    assert found.each.tolist() == [0.0, 0.0, -1.0]
    assert found.masked.tolist() == [True, True, False]


def test_a_source_moves_no_bound_but_its_own():
    current, _, behaviour, advantages = tensors(*columns(11))
    alone = second_moment_kept(current, behaviour, advantages, TAU)
    liar = torch.full((500,), -0.001)  # many tokens that hardly moved, and so hide those that did
    both = [
        torch.cat([one, two])
        for one, two in (
            (current, liar),
            (behaviour, liar - 1e-6),
            (advantages, torch.ones(500)),
        )
    ]
    sources = torch.cat([torch.zeros(COUNT), torch.ones(500)]).long()
    assert torch.equal(second_moment_kept(*both, TAU, sources)[:COUNT], alone)
    assert not torch.equal(second_moment_kept(*both, TAU)[:COUNT], alone)


# --- how far apart ---------------------------------------------------------------------------


def test_mismatch_follows_its_definitions():
    _, proximal, behaviour, _ = columns(12)
    logs = [p - b for p, b in zip(proximal, behaviour, strict=True)]
    weights = [math.exp(each) for each in logs]
    found = mismatch(*tensors(proximal, behaviour))
    assert found.tokens == COUNT
    assert found.effective_share == pytest.approx(
        sum(weights) ** 2 / sum(w * w for w in weights) / COUNT
    )
    assert found.k1 == pytest.approx(-sum(logs) / COUNT)
    assert found.k3 == pytest.approx(
        sum(w - 1 - each for w, each in zip(weights, logs, strict=True)) / COUNT
    )
    assert found.weight_max == pytest.approx(max(weights))
    assert found.mean == pytest.approx(sum(map(abs, logs)) / COUNT)
    assert found.max == pytest.approx(max(map(abs, logs)))


def test_both_estimates_are_of_the_divergence():
    """With tokens as frequent as the behaviour policy makes them, exactly."""
    behaviour, proximal = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]
    tokens = [t for t, share in enumerate(behaviour) for _ in range(round(share * 10))]
    found = mismatch(*tensors(*([math.log(p[t]) for t in tokens] for p in (proximal, behaviour))))
    divergence = sum(b * math.log(b / p) for b, p in zip(behaviour, proximal, strict=True))
    assert found.k1 == pytest.approx(divergence)
    assert found.k3 == pytest.approx(divergence)


def test_the_same_policy_is_no_mismatch_and_no_token_is_none():
    same = torch.tensor([-1.0, -2.0])
    found = mismatch(same, same)
    assert (found.effective_share, found.k1, found.k3, found.weight_max) == (1.0, 0.0, 0.0, 1.0)
    empty = mismatch(torch.zeros(0), torch.zeros(0))
    assert empty.tokens == 0
    assert math.isnan(empty.effective_share)


def test_absurd_claims_stay_finite():
    current = torch.tensor([-1.0, -1.0], requires_grad=True)
    behaviour, advantages = torch.tensor([-5000.0, 0.0]), torch.tensor([1.0, -1.0])
    proximal = current.detach()
    kept = second_moment_kept(current, behaviour, advantages, TAU)
    found: list[TokenLosses] = [
        decoupled(current, proximal, behaviour, advantages, 0.2, 0.2, 1e30),
        decoupled(current, proximal, behaviour, advantages, 0.2, 0.2, 2.0, truncates=True),
        second_moment(current, behaviour, advantages, kept),
    ]
    for each in found:
        assert torch.isfinite(each.each).all()
        assert torch.isfinite(gradient(each.each, current)).all()
    assert math.isfinite(mismatch(proximal, behaviour).k3)
