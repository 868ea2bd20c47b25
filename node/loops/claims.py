"""Whether tokens can be what they claim to be: samples of a policy whose log-probs somebody else
reports. Pure.

Two questions. Are the log-probs those of the claimed policy? Another model, an older version or
invented numbers show in their distance from what the claimed weights give. Are the tokens samples
of it? Who generates with something cheaper, edits the text or turns the temperature down, and then
reports honest log-probs, is off in the mean: over tokens that a policy sampled, log-prob + entropy
is zero on average, and its spread is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, isnan, nan, sqrt
from typing import Final

DISTANCE_MAX: Final = 0.05  # mean |claimed - scored|; other dtypes and kernels make 0.001 to 0.02
KL_MAX: Final = 0.01  # from the claimed policy to the scored one, by the estimator w - 1 - log w
DEVIATIONS_MAX: Final = 5.0  # of the mean log-prob from that of samples, in standard errors
LOG_RATIO_MAX: Final = 20.0


@dataclass(frozen=True, slots=True)
class ClaimedToken:
    """One token under the policy that it claims: natural log-probs, and the mean and the variance
    that the log-prob of a sample has there; both nan where they were not worked out."""

    claimed: float
    scored: float
    mean: float = nan  # minus the entropy
    variance: float = nan


@dataclass(frozen=True, slots=True)
class Fit:
    """How well tokens fit their claim."""

    tokens: int
    distance: float
    kl: float
    deviations: float  # signed: above zero, the tokens are likelier than samples are


def fit_of(samples: Sequence[ClaimedToken]) -> Fit:
    """Over all tokens of a group; there is at least one."""
    count = len(samples)
    logs = [max(-LOG_RATIO_MAX, min(LOG_RATIO_MAX, s.scored - s.claimed)) for s in samples]
    known = [sample for sample in samples if not isnan(sample.variance)]
    spread = sqrt(fsum(sample.variance for sample in known))
    excess = fsum(sample.scored - sample.mean for sample in known)
    if spread == 0.0:  # nothing to choose: any other token is impossible
        spread = DISTANCE_MAX * count
    return Fit(
        tokens=count,
        distance=fsum(abs(each) for each in logs) / count,
        kl=fsum(exp(each) - 1.0 - each for each in logs) / count,
        deviations=excess / spread,
    )


def fault_of(fit: Fit, temperature: float = 1.0) -> str | None:
    """Why tokens cannot be what they claim, in one line; None: they can.

    Log-probs are at the temperature. Below 1 it widens differences of logits, and with them what
    rounding makes of them: the limit of the mean grows with its inverse, that of the KL, which is
    quadratic in them, with its square. Above 1 the limits stay."""
    scale = min(1.0, temperature)
    if fit.distance > DISTANCE_MAX / scale or fit.kl > KL_MAX / scale**2:
        return (
            f"log-probs are {fit.distance:.3f} off in the mean over {fit.tokens} tokens"
            f" (KL {fit.kl:.4f})"
        )
    if abs(fit.deviations) > DEVIATIONS_MAX:
        much = "likelier" if fit.deviations > 0 else "less likely"
        return (
            f"tokens are {much} than samples by {abs(fit.deviations):.1f} standard errors"
            f" over {fit.tokens} tokens"
        )
    return None
