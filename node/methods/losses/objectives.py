"""Losses by name.

A new loss needs one entry of `OBJECTIVES`, and one of `LOSSES` in `settings.py` with its settings.
The entry has a function from tokens to token losses. If a decision needs all tokens of the batch at
once, it also has a function that makes that decision first.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from node.methods.losses import clip as losses
from node.methods.losses import corrections, ratios, settings
from node.methods.losses.corrections import TokenLosses


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
    """One loss. `keep`, if any, gets all tokens of a batch and their sources (T,), integers, before
    each update, and returns a mask of the tokens to train on. `losses` then takes one completion at
    a time."""

    losses: Callable[[Tokens, Any], TokenLosses]
    uses_behaviour: bool = True
    keep: Callable[[Tokens, torch.Tensor, Any], torch.Tensor] | None = None
    by_group: bool = False  # `Tokens.behaviour` is `ratios.expected` of the completion's group


def _sapo(tokens: Tokens, set_to: settings.SapoLoss) -> TokenLosses:
    bounds = (set_to.clip_low, set_to.clip_high)
    columns = (tokens.logprobs, tokens.proximal, tokens.advantages)
    clipped = losses.clipped_tokens(*columns, *bounds)
    return TokenLosses(
        losses.clipped_surrogate(*columns, *bounds), clipped, torch.zeros_like(clipped)
    )


def _clip(tokens: Tokens, set_to: settings.GrpoLoss | settings.DapoLoss) -> TokenLosses:
    bounds, dual = (set_to.clip_low, set_to.clip_high), set_to.dual_clip
    columns = _stale(tokens)
    clipped = losses.clipped_tokens(*columns, *bounds)
    clipped = clipped | losses.dual_clipped_tokens(*columns, dual)
    each = losses.dual_clipped_surrogate(*columns, *bounds, dual)
    return TokenLosses(each, clipped, torch.zeros_like(clipped))


def _decoupled(tokens: Tokens, set_to: settings.DecoupledLoss) -> TokenLosses:
    return corrections.decoupled(*_columns(tokens), *_bounds(set_to))


def _tis(tokens: Tokens, set_to: settings.TisLoss) -> TokenLosses:
    return corrections.truncated_importance(*_columns(tokens), *_bounds(set_to))


def _m2po(tokens: Tokens, set_to: settings.M2poLoss) -> TokenLosses:
    assert tokens.kept is not None
    return corrections.second_moment(*_stale(tokens), tokens.kept, set_to.behaviour_weight_max)


def _m2po_kept(tokens: Tokens, sources: torch.Tensor, set_to: settings.M2poLoss) -> torch.Tensor:
    return corrections.second_moment_kept(*_stale(tokens), set_to.second_moment_max, sources)


def _gspo(tokens: Tokens, set_to: settings.GspoLoss) -> TokenLosses:
    bounds = (set_to.clip_low, set_to.clip_high, set_to.dual_clip)
    return ratios.sequence_clipped(*_stale(tokens), *bounds)


def _gepo(tokens: Tokens, set_to: settings.GepoLoss) -> TokenLosses:
    bounds = (set_to.clip_low, set_to.clip_high, set_to.dual_clip)
    return ratios.sequence_clipped(*_stale(tokens), *bounds)


def _cispo(tokens: Tokens, set_to: settings.CispoLoss) -> TokenLosses:
    return ratios.cut_ratio(*_stale(tokens), set_to.ratio_max)


def _soft_gate(tokens: Tokens, set_to: settings.SoftGateLoss) -> TokenLosses:
    sharpness = (set_to.sharpness_positive, set_to.sharpness_negative)
    return ratios.soft_gated(*_stale(tokens), *sharpness)


def _topr(tokens: Tokens, set_to: settings.ToprLoss) -> TokenLosses:
    return ratios.tapered(*_stale(tokens))


def _bapo(tokens: Tokens, set_to: settings.BapoLoss) -> TokenLosses:
    assert tokens.kept is not None
    return ratios.balanced(*_stale(tokens), tokens.kept, set_to.dual_clip)


def _bapo_kept(tokens: Tokens, sources: torch.Tensor, set_to: settings.BapoLoss) -> torch.Tensor:
    low = (set_to.ratio_low, set_to.ratio_low_max)
    high = (set_to.ratio_high, set_to.ratio_high_max)
    return ratios.balanced_kept(
        *_stale(tokens), set_to.positive_share, low, high, set_to.step, sources
    )


def _stale(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens.logprobs, tokens.behaviour, tokens.advantages


def _columns(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages


def _bounds(set_to: settings.DecoupledLoss | settings.TisLoss) -> tuple[float, float, float]:
    return set_to.clip_low, set_to.clip_high, set_to.behaviour_weight_max


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "sapo": Objective(_sapo, uses_behaviour=False),
    "grpo": Objective(_clip),
    "dapo": Objective(_clip),
    "decoupled": Objective(_decoupled),
    "tis": Objective(_tis),
    "m2po": Objective(_m2po, keep=_m2po_kept),
    "gspo": Objective(_gspo),
    "gepo": Objective(_gepo, by_group=True),
    "cispo": Objective(_cispo),
    "soft_gate": Objective(_soft_gate),
    "topr": Objective(_topr),
    "bapo": Objective(_bapo, keep=_bapo_kept),
}
