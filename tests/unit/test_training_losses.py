import math

import pytest
import torch

from node.methods.losses import (
    clipped_surrogate,
    clipped_tokens,
    token_logprobs,
    token_weights,
)

LOW, HIGH = 0.2, 0.28


def surrogate(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token and its derivative by the ratio's logarithm."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = clipped_surrogate(logprob, torch.zeros(1), torch.tensor([advantage]), LOW, HIGH)
    loss.sum().backward()
    return float(loss.detach()), float(logprob.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 1.6202, -1.6202, -1.6202),
        (1.0, -0.5401, 0.5401, 0.5401),
        (1.2, 1.0, -1.2, -1.2),  # within both bounds
        (1.5, 1.0, -1.28, 0.0),  # clipped above
        (1.5, -1.0, 1.5, 1.5),  # the pessimistic side is never clipped
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_clipped_surrogate_follows_its_definition(ratio, advantage, loss, slope):
    assert surrogate(ratio, advantage) == pytest.approx((loss, slope), abs=1e-6)


def test_clipped_tokens_are_those_without_gradient():
    ratios = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    clipped = clipped_tokens(ratios.log(), torch.zeros(5), advantages, LOW, HIGH)
    assert clipped.tolist() == [False, True, False, True, False]


def test_absurd_ratios_stay_finite():
    far = torch.tensor([500.0, -500.0])
    loss = clipped_surrogate(far, torch.zeros(2), torch.tensor([-1.0, 1.0]), LOW, HIGH)
    assert torch.isfinite(loss).all()


def test_token_mean_counts_every_token_alike():
    assert token_weights([1, 3], "token_mean") == [0.25, 0.25]


def test_sequence_mean_counts_every_completion_alike():
    assert token_weights([1, 4], "sequence_mean") == [0.5, 0.125]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_of_all_tokens_add_up_to_one(aggregation):
    lengths = [3, 1, 7, 2]
    weights = token_weights(lengths, aggregation)
    assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


def test_token_logprobs_are_of_the_targets():
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    values = token_logprobs(logits, torch.tensor([1, 0]))
    assert values.tolist() == pytest.approx([math.log(0.5), math.log(0.75)])
