"""Whether tokens can be what they claim: honest ones pass, and each lie is found out."""

import math
from random import Random

import pytest

from node.loops.claims import DEVIATIONS_MAX, DISTANCE_MAX, ClaimedToken, fault_of, fit_of

VOCABULARY = 50
TOKENS = 400


def distribution(rng: Random, sharpness: float = 2.0) -> list[float]:
    logits = [sharpness * rng.gauss(0.0, 1.0) for _ in range(VOCABULARY)]
    total = math.fsum(math.exp(each) for each in logits)
    return [math.exp(each) / total for each in logits]


def samples(
    seed: int, *, temperature: float = 1.0, noise: float = 0.0, moments: bool = True
) -> list[ClaimedToken]:
    """Tokens drawn from a policy at a temperature; log-probs are claimed to be its own at 1."""
    rng = Random(seed)
    found = []
    for _ in range(TOKENS):
        probs = distribution(rng)
        heat = [p ** (1.0 / temperature) for p in probs]
        token = rng.choices(range(VOCABULARY), heat)[0]
        logs = [math.log(p) for p in probs]
        mean = math.fsum(p * log for p, log in zip(probs, logs, strict=True))
        variance = math.fsum(p * (log - mean) ** 2 for p, log in zip(probs, logs, strict=True))
        claimed = logs[token] + noise * rng.gauss(0.0, 1.0)
        known = (mean, variance) if moments else (math.nan, math.nan)
        found.append(ClaimedToken(claimed, logs[token], *known))
    return found


@pytest.mark.parametrize("seed", range(50))
def test_honest_tokens_pass(seed: int) -> None:
    fit = fit_of(samples(seed, noise=0.01))
    assert fault_of(fit) is None
    assert abs(fit.deviations) < DEVIATIONS_MAX
    assert fit.distance < DISTANCE_MAX / 2


@pytest.mark.parametrize("seed", range(10))
def test_log_probs_of_another_policy_are_noticed(seed: int) -> None:
    fault = fault_of(fit_of(samples(seed, noise=0.3)))
    assert fault is not None
    assert "log-probs are" in fault


def test_rounding_weighs_more_at_a_low_temperature() -> None:
    """Logits that are rounded by so much give log-probs that are off by so much / temperature."""
    rounded = fit_of(samples(3, noise=0.02 / 0.25))
    assert fault_of(rounded, temperature=0.25) is None
    assert fault_of(rounded) is not None
    assert fault_of(rounded, temperature=2.0) is not None
    other = fit_of(samples(3, noise=0.1 / 0.25))
    assert fault_of(other, temperature=0.25) is not None


@pytest.mark.parametrize(("temperature", "how"), [(0.5, "likelier"), (2.0, "less likely")])
def test_another_temperature_shows_in_the_mean(temperature: float, how: str) -> None:
    fault = fault_of(fit_of(samples(1, temperature=temperature)))
    assert fault is not None
    assert how in fault


def test_without_moments_only_the_distance_counts() -> None:
    fit = fit_of(samples(1, temperature=0.5, moments=False))
    assert fault_of(fit) is None
    assert fit.deviations == 0.0


def test_a_policy_without_choice_makes_nothing_else() -> None:
    sure = ClaimedToken(claimed=0.0, scored=0.0, mean=0.0, variance=0.0)
    assert fault_of(fit_of([sure] * 8)) is None
    other = ClaimedToken(claimed=-9.0, scored=-9.0, mean=0.0, variance=0.0)
    assert fault_of(fit_of([other] * 8)) is not None
