"""Which loss has which name: what a trainer looks up.

A further method is one entry of `OBJECTIVES`, and one of `LOSSES` in
`node/interfaces/trainer_spec.py` with its parameters: a function from tokens to token losses and,
where a decision needs all tokens of the batch at once, a function that makes that decision first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from node.interfaces.trainer_spec import LossParameters
from node.methods import corrections, losses
from node.methods.corrections import TokenLosses


@dataclass(frozen=True, slots=True)
class Tokens:
    """T tokens, by columns (T,)."""

    logprobs: torch.Tensor  # under the policy that is trained; with gradient
    proximal: torch.Tensor  # under that policy before the update
    behaviour: torch.Tensor  # under the one that generated them; proximal where that is unknown
    advantages: torch.Tensor
    kept: torch.Tensor | None = None  # what `Objective.keep` decided


@dataclass(frozen=True, slots=True)
class Objective:
    """One loss. `keep`, if any, is given all tokens of a batch and their sources (T,), integers,
    before each update, and says which to train on; then `losses` takes them in any pieces."""

    losses: Callable[[Tokens, LossParameters], TokenLosses]
    uses_behaviour: bool = True
    keep: Callable[[Tokens, torch.Tensor, LossParameters], torch.Tensor] | None = None


def _had(value: float | None) -> float:
    """A parameter that this loss has: see `LOSSES`."""
    assert value is not None
    return value


def _clips(set_to: LossParameters) -> tuple[float, float]:
    return _had(set_to.clip_low), _had(set_to.clip_high)


def _sapo(tokens: Tokens, set_to: LossParameters) -> TokenLosses:
    bounds = _clips(set_to)
    columns = (tokens.logprobs, tokens.proximal, tokens.advantages)
    clipped = losses.clipped_tokens(*columns, *bounds)
    return TokenLosses(
        losses.clipped_surrogate(*columns, *bounds), clipped, torch.zeros_like(clipped)
    )


def _clip(tokens: Tokens, set_to: LossParameters) -> TokenLosses:
    bounds, dual = _clips(set_to), _had(set_to.dual_clip)
    columns = (tokens.logprobs, tokens.behaviour, tokens.advantages)
    clipped = losses.clipped_tokens(*columns, *bounds)
    clipped = clipped | losses.dual_clipped_tokens(*columns, dual)
    each = losses.dual_clipped_surrogate(*columns, *bounds, dual)
    return TokenLosses(each, clipped, torch.zeros_like(clipped))


def _decoupled(tokens: Tokens, set_to: LossParameters) -> TokenLosses:
    return corrections.decoupled(*_columns(tokens), *_bounds(set_to))


def _tis(tokens: Tokens, set_to: LossParameters) -> TokenLosses:
    return corrections.truncated_importance(*_columns(tokens), *_bounds(set_to))


def _m2po(tokens: Tokens, set_to: LossParameters) -> TokenLosses:
    assert tokens.kept is not None
    columns = (tokens.logprobs, tokens.behaviour, tokens.advantages, tokens.kept)
    return corrections.second_moment(*columns, _had(set_to.behaviour_weight_max))


def _m2po_kept(tokens: Tokens, sources: torch.Tensor, set_to: LossParameters) -> torch.Tensor:
    columns = (tokens.logprobs, tokens.behaviour, tokens.advantages)
    return corrections.second_moment_kept(*columns, _had(set_to.second_moment_max), sources)


def _columns(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages


def _bounds(set_to: LossParameters) -> tuple[float, float, float]:
    return *_clips(set_to), _had(set_to.behaviour_weight_max)


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "sapo": Objective(_sapo, uses_behaviour=False),
    "grpo": Objective(_clip),
    "dapo": Objective(_clip),
    "decoupled": Objective(_decoupled),
    "tis": Objective(_tis),
    "m2po": Objective(_m2po, keep=_m2po_kept),
}
