"""Whether tokens can be what they claim: honest ones pass, and each lie is found out."""

import math
from random import Random

import pytest

from node.run.claims import (
    ALARM_STAKE,
    DEVIATION_MAX,
    DEVIATION_SPREAD,
    DISTANCE_MAX,
    EVIDENCE_MAX,
    NOISE_KL,
    TEMPERATURE_MIN,
    ClaimedToken,
    Fit,
    Record,
    deviation_factor,
    evidence,
    fault_of,
    fit_of,
    kl_factor,
    noise_between,
)

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
    assert max(fit.likelier, fit.rarer) < EVIDENCE_MAX / 2
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
    sure = ClaimedToken(behaviour=0.0, scored=0.0, mean=0.0, variance=0.0)
    assert fault_of(fit_of([sure] * 8)) is None
    other = ClaimedToken(behaviour=-9.0, scored=-9.0, mean=0.0, variance=0.0)
    assert fault_of(fit_of([other] * 8)) is not None


@pytest.mark.parametrize("sharpness", [4.0, 6.0])
def test_a_fifth_of_edited_tokens_shows_in_one_group(sharpness: float) -> None:
    """Their log-probs are said as they are; who edits does not know what is likely."""

    def group_of(share: float) -> list[ClaimedToken]:
        rng, found = Random(6), []
        for _ in range(100):
            probs = distribution(rng, sharpness)
            drawn = rng.choices(range(VOCABULARY), probs)[0]
            token = rng.randrange(VOCABULARY) if rng.random() < share else drawn
            logs = [math.log(p) for p in probs]
            mean = math.fsum(p * log for p, log in zip(probs, logs, strict=True))
            spread = math.fsum(p * (log - mean) ** 2 for p, log in zip(probs, logs, strict=True))
            found.append(ClaimedToken(logs[token], logs[token], mean, spread))
        return found

    assert fault_of(fit_of(group_of(0.0))) is None
    fault = fault_of(fit_of(group_of(0.2)))
    assert fault is not None
    assert "less likely" in fault


def sure_tokens(rng: Random, count: int, rare: float) -> list[ClaimedToken]:
    """Of a policy that says one of two things: one of them hardly ever."""
    logs = math.log1p(-rare), math.log(rare)
    mean = (1 - rare) * logs[0] + rare * logs[1]
    variance = (1 - rare) * rare * (logs[0] - logs[1]) ** 2
    drawn = [logs[rng.random() < rare] for _ in range(count)]
    return [ClaimedToken(each, each, mean, variance) for each in drawn]


def test_a_sure_policy_may_say_something_rare_now_and_then() -> None:
    rng, far = Random(5), 0
    for _ in range(20_000):
        fit = fit_of(sure_tokens(rng, 16, 1e-3))
        assert fault_of(fit) is None
        far += abs(fit.deviations) > 5.0
    assert far > 50  # a limit in standard errors would have refused them
    logs = math.log(1e-3)
    mean = 1e-3 * logs
    others = [ClaimedToken(logs, logs, mean, 1e-3 * logs**2)] * 4
    assert fault_of(fit_of([*sure_tokens(rng, 12, 1e-3), *others])) is not None


def test_two_bounds_on_evidence_make_one_of_11_000_groups() -> None:
    assert 2 * math.exp(-EVIDENCE_MAX) == pytest.approx(1 / 11_000, rel=0.01)


@pytest.mark.parametrize("rare", [0.5, 0.1, 0.01, 1e-4])
@pytest.mark.parametrize("count", [1, 16, 200])
def test_the_bound_on_evidence_holds(rare: float, count: int) -> None:
    """Of honest groups no more than e^-x have evidence over x."""
    rng, groups = Random(7), 4_000
    fits = [fit_of(sure_tokens(rng, count, rare)) for _ in range(groups)]
    for most in (1.0, 3.0, 6.0):
        expected = groups * math.exp(-most)
        for over in (sum(f.likelier > most for f in fits), sum(f.rarer > most for f in fits)):
            assert over <= expected + 4 * math.sqrt(expected) + 1


def test_evidence_grows_with_the_excess_and_there_is_none_below_the_mean() -> None:
    assert evidence(-1.0, 1.0, 1.0) == evidence(0.0, 1.0, 1.0) == 0.0
    few = [evidence(x, 4.0, 2.0) for x in (1.0, 2.0, 4.0, 8.0)]
    assert few == sorted(few)
    # far below the largest number it is the normal one, x^2 / 2 V
    assert evidence(1.0, 1e4, 1.0) == pytest.approx(1 / 2e4, rel=1e-3)


# --- over many groups -------------------------------------------------------------------------

NOISE = noise_between("float32", "float32")


def group(kl: float = 0.0, deviations: float = 0.0) -> Fit:
    return Fit(tokens=300, distance=0.001, kl=kl, deviations=deviations)


def found_after(fits: list[Fit], temperature: float = 1.0) -> int | None:
    record = Record()
    for count, fit in enumerate(fits, start=1):
        if record.fault_after(fit, NOISE, temperature) is not None:
            return count
    return None


def test_bets_on_an_honest_worker_do_not_pay() -> None:
    """Half of its groups are below the noise, and nine tenths below three times that; deviations
    have the mean 0 and the spread 1, or are off by an eighth."""
    assert 0.5 * kl_factor(0.9) + 0.4 * kl_factor(2.0) + 0.1 * kl_factor(9.0) <= 1.0
    rng = Random(2)
    for shift in (0.0, 0.12):
        drawn = [deviation_factor(rng.gauss(shift, 1.0)) for _ in range(20_000)]
        assert math.fsum(drawn) / len(drawn) < 1.01
    # they would, if nothing were taken off for the spread
    free = [deviation_factor(rng.gauss(0, 1)) * math.exp(DEVIATION_SPREAD / 8) for _ in range(9999)]
    assert math.fsum(free) / len(free) > 1.1


def test_rare_tokens_of_a_sure_policy_pay_hardly_more() -> None:
    """The mean factor where k of the tokens are rare, with the chance of each k."""

    def mean(count: int, rare: float) -> float:
        logs = math.log1p(-rare), math.log(rare)
        middle = (1 - rare) * logs[0] + rare * logs[1]
        spread = math.sqrt(count * (1 - rare) * rare) * (logs[0] - logs[1])
        total = 0.0
        for k in range(count + 1):
            excess = (count - k) * logs[0] + k * logs[1] - count * middle
            z = max(-DEVIATION_MAX, min(DEVIATION_MAX, excess / spread))
            chance = math.comb(count, k) * rare**k * (1 - rare) ** (count - k)
            total += chance * deviation_factor(-z)
        return total

    worst = max(mean(n, share / n) for n in (1, 16, 60) for share in (1e-3, 0.03, 0.06, 0.1, 0.3))
    assert 1.0 < worst <= 1.05


def test_an_honest_worker_is_left_in_peace_for_a_hundred_thousand_groups() -> None:
    rng, record = Random(3), Record()
    for _ in range(100_000):
        kl = NOISE * rng.lognormvariate(0.0, 0.8)  # half below; nine tenths below 2.8
        fit = group(kl, rng.gauss(0.0, 1.0))
        assert record.fault_after(fit, NOISE) is None


@pytest.mark.parametrize(
    ("kl", "deviations"),
    [(2.0, 0.0), (1.6, 0.0), (0.0, 1.0), (0.0, -1.0)],
    ids=["twice the noise", "1.6 of it", "too likely", "too rare"],
)
def test_a_small_lie_in_each_group_is_found_within_fifty(kl: float, deviations: float) -> None:
    """Each group alone passes; together they do not."""
    rng = Random(4)
    fits = [
        group(kl * NOISE * rng.lognormvariate(0.0, 0.4), deviations + rng.gauss(0.0, 1.0))
        for _ in range(400)
    ]
    assert all(fault_of(fit) is None for fit in fits[:50])
    found = found_after(fits)
    assert found is not None
    assert found <= 60


def test_what_is_within_the_noise_is_not_found() -> None:
    assert found_after([group(0.9 * NOISE)] * 10_000) is None
    assert found_after([group(0.0, 0.1)] * 10_000) is None


def test_noise_is_that_of_both_sides_and_who_says_nothing_has_most() -> None:
    full = noise_between("float32", "float32")
    assert full < noise_between("float32", "bfloat16") == noise_between("bfloat16", "float32")
    assert noise_between("bfloat16", "bfloat16") == 2 * NOISE_KL["bfloat16"]
    assert noise_between("", "float32") == noise_between("int8", "float32") > 1e-3


def test_a_low_temperature_widens_the_noise_down_to_a_floor() -> None:
    fits = [group(3.0 * NOISE / TEMPERATURE_MIN**2)] * 50
    assert found_after(fits, TEMPERATURE_MIN) is not None
    assert found_after(fits, TEMPERATURE_MIN / 100) == found_after(fits, TEMPERATURE_MIN)
    assert found_after([group(2.0 * NOISE)] * 1000, 0.5) is None


def test_after_an_alarm_a_few_good_groups_bring_it_down_and_bad_ones_do_not() -> None:
    record = Record()
    for _ in range(1000):
        last = record.fault_after(group(9 * NOISE), NOISE)
    assert last is not None
    assert "log-probs are off by more than rounding explains over 1000 groups" in last
    assert record.off <= 2 * ALARM_STAKE
    assert record.fault_after(group(9 * NOISE), NOISE) is not None
    assert record.fault_after(group(0.0), NOISE) is None
    tired = [record.fault_after(group(0.0), NOISE) for _ in range(30)]
    assert set(tired) == {None}
    assert (record.off, record.groups) == (1.0, 0)


def test_the_limits_stop_growing_at_low_temperatures() -> None:
    """Claiming -0.4 for tokens that score -0.01 passes at no temperature."""
    sure = fit_of([ClaimedToken(-0.4, -0.01)] * 100)
    for temperature in (1.0, 0.25, 0.1, 0.01):
        assert fault_of(sure, temperature) is not None
