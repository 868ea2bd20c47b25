"""Completions of before, of which the policy of now still says a part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from node.methods.method import MethodSettings


@dataclass(frozen=True, slots=True)
class Speculative(MethodSettings):
    """An earlier completion is kept as far as the policy of now agrees with it."""

    kind: Literal["speculative"] = "speculative"
    lenience: Annotated[float, Ge(-20), Le(20)] = 0.5
    """A token may have become less likely by this, as a logarithm: 0.5 was best with GRPO, 0.3 with
    PPO and 0.15 with DAPO. At 1 and above, what is learned suffers."""
    probability_min: Annotated[float, Ge(0), Le(1)] = 0.0
    """A token that is less likely than this now is never kept; not published."""


def keeping_probabilities(
    old: Sequence[float], new: Sequence[float], set_to: Speculative
) -> tuple[float, ...]:
    """min(1, e^(lenience + new - old)) of each token: how likely it is kept where those before it
    are (SPEC-RL, arXiv 2509.23232).

    Args:
        old: (tokens,) log-probs where the completion was generated.
        new: (tokens,) of the same tokens, under the policy of now; -inf: impossible by now.

    Raises:
        ValueError: they are of unlike lengths, `old` has no finite number, or `new` is none.
    """
    if len(old) != len(new):
        raise ValueError(f"{len(old)} log-probs of before and {len(new)} of now")
    found = []
    for before, now in zip(old, new, strict=True):
        if not math.isfinite(before) or math.isnan(now) or now == math.inf:
            raise ValueError(f"log-probs {before} and {now}: no token has these")
        is_too_rare = math.exp(min(now, 0.0)) < set_to.probability_min
        ratio = math.exp(min(0.0, set_to.lenience + now - before))
        found.append(0.0 if is_too_rare else ratio)
    return tuple(found)


def speculative(
    old: Sequence[float], new: Sequence[float], uniforms: Sequence[float], set_to: Speculative
) -> int:
    """Number of tokens that are kept, from the first on (SPEC-RL): those before the first that
    `keeping_probabilities` does not keep. The present policy continues from there, and `new` are
    the behaviour log-probs of kept tokens.

    What follows is drawn from the policy itself and not from what it says more than before, so
    that the result is a little biased even without lenience.

    Args:
        uniforms: (tokens,) random numbers from [0, 1).

    Raises:
        ValueError: as `keeping_probabilities`; or `uniforms` are too few, or not in [0, 1).
    """
    probabilities = keeping_probabilities(old, new, set_to)
    if len(uniforms) < len(probabilities):
        raise ValueError(f"{len(uniforms)} random numbers for {len(probabilities)} tokens")
    for kept, (probability, uniform) in enumerate(zip(probabilities, uniforms, strict=False)):
        if not 0.0 <= uniform < 1.0:
            raise ValueError(f"{uniform}: not in [0, 1)")
        # Not "at most": a random number may be 0, and an impossible token would be kept.
        if not uniform < probability:
            return kept
    return len(probabilities)


def kept_share(kept: Sequence[int], lengths: Sequence[int]) -> float:
    """Of all tokens of earlier completions those that were kept, within [0, 1]: how near a policy
    of before, or a peer's, is to that of now. 0 where there are none.

    Raises:
        ValueError: more is kept than there was, or they are of unlike numbers.
    """
    if len(kept) != len(lengths):
        raise ValueError(f"{len(kept)} kept of {len(lengths)} completions")
    if any(not 0 <= each <= length for each, length in zip(kept, lengths, strict=True)):
        raise ValueError("more is kept than there was")
    return sum(kept) / sum(lengths) if any(lengths) else 0.0
