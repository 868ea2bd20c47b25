"""Losses by the ratio to what generated the tokens: against slow definitions in float64, gradients
against those of the definition, and what no peer can make of them."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.methods import losses
from node.methods.choices import chosen_loss
from node.methods.loss_settings import LOSSES
from node.methods.losses import OBJECTIVES, TokenLosses, Tokens, token_weights

LOGS = [-0.5, -1.0, -2.0, -0.1, -3.0]
BEHAVIOUR = [-0.7, -0.9, -3.5, -0.1, -2.0]
ADVANTAGES = [1.0, -1.0, 0.5, -2.0, 0.25]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def slow_gspo(logs: Sequence[float], old: Sequence[float], adv: Sequence[float]) -> list[float]:
    whole = math.exp(sum(a - b for a, b in zip(logs, old, strict=True)) / len(logs))
    cut = min(max(whole, 1 - 3e-4), 1 + 4e-4)
    return [min(-min(whole * a, cut * a), 10.0 * -a if a < 0 else math.inf) for a in adv]


def slow_gepo(logs: Sequence[float], old: Sequence[float], adv: Sequence[float]) -> list[float]:
    """`old` is the group's expectation, the same for each token."""
    whole = math.exp(sum(logs) / len(logs) - sum(old) / len(old))
    cut = min(max(whole, 0.8), 1.2)
    return [min(-min(whole * a, cut * a), 10.0 * -a if a < 0 else math.inf) for a in adv]


def slow_cispo(logs: Sequence[float], old: Sequence[float], adv: Sequence[float]) -> list[float]:
    return [-min(math.exp(p - q), 5.0) * a * p for p, q, a in zip(logs, old, adv, strict=True)]


def slow_gate(logs: Sequence[float], old: Sequence[float], adv: Sequence[float]) -> list[float]:
    found = []
    for p, q, a in zip(logs, old, adv, strict=True):
        k = 1.0 if a > 0 else 1.05
        found.append(-4 / k * sigmoid(k * (math.exp(p - q) - 1)) * a)
    return found


def slow_topr(logs: Sequence[float], old: Sequence[float], adv: Sequence[float]) -> list[float]:
    """The published weight is that of the whole completion."""
    whole = min(1.0, math.exp(math.fsum(logs) - math.fsum(old)))
    return [-a * p * (1.0 if a > 0 else whole) for p, a in zip(logs, adv, strict=True)]


SLOW: dict[str, Callable[..., list[float]]] = {
    "gspo": slow_gspo,
    "gepo": slow_gepo,
    "cispo": slow_cispo,
    "soft_gate": slow_gate,
    "topr": slow_topr,
}
numbers = st.floats(-8.0, -0.01)
rows = st.lists(st.tuples(numbers, numbers, st.floats(-3, 3)), min_size=1, max_size=6)


def of(name: str, logs: torch.Tensor, old: torch.Tensor, adv: torch.Tensor) -> TokenLosses:
    objective, set_to = OBJECTIVES[name], chosen_loss(name)
    tokens = Tokens(logs, old, old, adv)
    if objective.keep is not None:
        kept = objective.keep(tokens, torch.zeros(len(logs), dtype=torch.long), set_to)
        tokens = Tokens(logs, old, old, adv, kept)
    return objective.losses(tokens, set_to)


def columns(*values: Sequence[float]) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=torch.float64) for each in values]


@pytest.mark.parametrize("name", SLOW)
@given(rows=rows)
def test_against_the_definition(name: str, rows: list[tuple[float, float, float]]) -> None:
    logs, old, adv = (list(each) for each in zip(*rows, strict=True))
    found = of(name, *columns(logs, old, adv)).each
    assert found.tolist() == pytest.approx(SLOW[name](logs, old, adv), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # by token d(loss)/d(log p) / -A: what a token's own log-prob is multiplied by
        ("cispo", [math.exp(0.2), math.exp(-0.1), math.exp(1.5), 1.0, math.exp(-1.0)]),
        ("topr", [1.0, 1.0, 1.0, 1.0, 1.0]),  # all of it is likelier than where it was made
    ],
)
def test_gradients_are_those_of_a_policy_gradient_with_weights(
    name: str, weights: list[float]
) -> None:
    logs, old, adv = columns(LOGS, BEHAVIOUR, ADVANTAGES)
    logs.requires_grad_(True)
    of(name, logs, old, adv).each.sum().backward()
    assert logs.grad is not None
    wanted = [-a * w for a, w in zip(ADVANTAGES, weights, strict=True)]
    assert logs.grad.tolist() == pytest.approx(wanted)


def test_the_soft_gate_has_the_policy_gradient_where_nothing_moved() -> None:
    logs, old, adv = columns(BEHAVIOUR, BEHAVIOUR, ADVANTAGES)
    logs.requires_grad_(True)
    of("soft_gate", logs, old, adv).each.sum().backward()
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([-a for a in ADVANTAGES])


def test_a_completion_is_clipped_as_a_whole() -> None:
    old = [-1.0, -1.0]
    for logs, advantage, is_clipped in (
        ([-1.001, -0.9985], 1.0, False),  # a mean of +0.00025
        ([-1.001, -0.998], 1.0, True),
        ([-1.001, -0.998], -1.0, False),
        ([-1.001, -1.0], -1.0, True),
    ):
        now, before, adv = columns(logs, old, [advantage] * 2)
        now.requires_grad_(True)
        found = of("gspo", now, before, adv)
        found.each.sum().backward()
        assert found.clipped.tolist() == [is_clipped] * 2
        assert now.grad is not None
        assert (float(now.grad.abs().sum()) == 0.0) is is_clipped


def test_what_a_group_expects_of_its_completions() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    group = columns([half, half], [quarter])
    assert losses.expected(group) == pytest.approx(math.log((0.25 + 0.0625) / 0.75))
    assert losses.expected(group[:1]) == pytest.approx(half)  # alone: its own, as `gspo` has it
    assert losses.expected(columns([-900.0], [-901.0])) == pytest.approx(-900.0, abs=1.0)
    for nothing in ([], columns([half], [])):
        with pytest.raises(ValueError, match="completions with tokens"):
            losses.expected(nothing)


@given(st.lists(st.lists(numbers, min_size=1, max_size=4), min_size=1, max_size=6))
def test_an_unlikely_completion_weighs_little_in_what_is_expected(group: list[list[float]]) -> None:
    means = [sum(each) / len(each) for each in group]
    likely = [math.exp(each) for each in means]
    found = losses.expected(columns(*group))
    assert found == pytest.approx(math.log(sum(q * q for q in likely) / sum(likely)), abs=1e-9)
    assert min(means) - 1e-9 <= found <= max(means) + 1e-9
    assert found >= math.log(sum(likely) / len(likely)) - 1e-9


# --- BAPO -----------------------------------------------------------------------------------------


def kept(
    ratio: Sequence[float], adv: Sequence[float], sources: torch.Tensor | None = None
) -> list[bool]:
    logs, advantages = columns([math.log(each) for each in ratio], adv)
    zeros = torch.zeros_like(logs)
    keep = OBJECTIVES["bapo"].keep
    assert keep is not None
    tokens = Tokens(logs, zeros, zeros, advantages)
    numbers = torch.zeros(len(ratio), dtype=torch.long) if sources is None else sources
    return keep(tokens, numbers, LOSSES["bapo"]()).tolist()


def test_bounds_stay_where_positive_tokens_have_their_share() -> None:
    assert kept([1.0, 1.3, 0.7, 0.5], [1.0, 1.0, -0.4, -1.0]) == [True, False, True, False]


def test_the_lower_bound_rises_before_the_upper_one() -> None:
    assert kept([1.0, 1.3, 0.72, 0.65], [1.0, 1.0, -1.0, -1.0]) == [True, False, True, False]
    # all that the lower bound takes away is not enough: the upper one lets a positive token in
    assert kept([1.0, 1.3, 0.95, 0.7], [0.5, 1.0, -1.0, -1.0]) == [True, True, True, False]


def test_a_batch_without_positive_tokens_ends_at_the_last_bounds() -> None:
    assert kept([0.95, 0.85, 0.65], [-1.0, -1.0, -1.0]) == [True, False, False]
    assert kept([], []) == []


def test_no_source_moves_the_bounds_of_another() -> None:
    ratio, adv = [1.0, 1.3, 0.72, 0.65], [1.0, 1.0, -1.0, -1.0]
    alone = kept(ratio, adv)
    loud = kept(
        [*ratio, 0.95, 0.95], [*adv, -900.0, -900.0], sources=torch.tensor([0, 0, 0, 0, 1, 1])
    )
    assert loud[:4] == alone
    assert kept([*ratio, 0.95, 0.95], [*adv, -900.0, -900.0])[:4] != alone


# --- limiting cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_absurd_claims_and_no_tokens_stay_finite(name: str) -> None:
    logs, adv = columns([-1.0, -1e9, -1.0, -5.0], [1.0, -1.0, -1.0, 1.0])
    (old,) = columns([-1e9, -1e-9, -1e9, -5.0])
    logs.requires_grad_(True)
    found = of(name, logs, old, adv).each
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert logs.grad is not None
    assert torch.isfinite(logs.grad).all()
    nothing = torch.zeros(0, dtype=torch.float64)
    if name not in ("gspo", "gepo"):  # the mean of no token is none: completions have one
        assert of(name, nothing, nothing, nothing).each.tolist() == []


@pytest.mark.parametrize("name", LOSSES)
def test_without_an_advantage_there_is_no_gradient(name: str) -> None:
    logs, old = columns(LOGS, BEHAVIOUR)
    logs.requires_grad_(True)
    of(name, logs, old, torch.zeros_like(old)).each.sum().backward()
    assert logs.grad is not None
    assert not logs.grad.any()


def test_how_token_losses_become_a_number() -> None:
    assert token_weights([1, 3], "token_mean") == [0.25, 0.25]
    assert token_weights([1, 3], "sequence_mean") == [1 / 2, 1 / 6]
    assert token_weights([1, 3], "sequence_sum") == [1 / 2, 1 / 2]
    assert token_weights([1, 3], "constant_norm", 10) == [1 / 20, 1 / 20]
    assert token_weights([1, 3], "constant_norm") == [1 / 6, 1 / 6]
    assert token_weights([], "constant_norm") == []


@pytest.mark.parametrize("name", LOSSES)
def test_no_claimed_log_prob_makes_a_wrong_completion_own_the_update(name: str) -> None:
    """What a peer says of tokens that the policy finds likely: one in 10^17."""
    logs, old, adv = columns([-1.0, -1.4], [-40.0, -40.0], [-1.0, -1.0])
    logs.requires_grad_(True)
    each = of(name, logs, old, adv).each
    if each.requires_grad:
        each.sum().backward()
    assert logs.grad is None or float(logs.grad.abs().max()) <= 10.0 + 1e-9
