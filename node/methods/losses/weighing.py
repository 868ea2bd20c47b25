"""How a token's loss is weighed by how much likelier it was before the update than where it was
generated. Pure functions of one completion's tokens: log-probs (T,) before the update and of what
generated them, and its advantages (T,); weights (T,) without gradient, 0: left out."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from node.methods.losses import weighing_settings as settings
from node.methods.losses.corrections import log_ratio

Weigh = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def truncated(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    set_to: settings.Truncated,
) -> torch.Tensor:
    """min(rho, weight_max)."""
    return _rho(proximal, behaviour).clamp(max=set_to.weight_max)


def icepop(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    set_to: settings.IcePop,
) -> torch.Tensor:
    """rho in [weight_min, weight_max], 0 outside (IcePop, as slime and verl have it)."""
    rho = _rho(proximal, behaviour)
    return rho * _within(rho, set_to.weight_min, set_to.weight_max)


def masked(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    set_to: settings.Masked,
) -> torch.Tensor:
    """1 where rho is in [weight_min, weight_max], 0 outside."""
    rho = _rho(proximal, behaviour)
    return _within(rho, set_to.weight_min, set_to.weight_max)


def veto(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    set_to: settings.Veto,
) -> torch.Tensor:
    """1, and 0 for all tokens where any has rho below weight_min."""
    rho = _rho(proximal, behaviour)
    return torch.ones_like(rho) * bool((rho >= set_to.weight_min).all())


def geometric(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    set_to: settings.Geometric,
) -> torch.Tensor:
    """1 where exp(mean log rho) is in [weight_min, weight_max], else 0, for all tokens."""
    logs = log_ratio(proximal, behaviour).detach()
    middle = math.exp(float(logs.mean())) if logs.numel() else 1.0
    return torch.ones_like(logs) * (set_to.weight_min <= middle <= set_to.weight_max)


def k3(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    set_to: settings.K3,
) -> torch.Tensor:
    """1 where the mean of rho - log rho - 1 is at most divergence_max, else 0, for all tokens."""
    logs = log_ratio(proximal, behaviour).detach()
    divergence = float((logs.exp() - logs - 1.0).mean()) if logs.numel() else 0.0
    return torch.ones_like(logs) * (divergence <= set_to.divergence_max)


def opsm(
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    set_to: settings.Opsm,
) -> torch.Tensor:
    """0 for tokens with A < 0 where the mean of -log rho over the completion is above moved_max,
    else 1 (off-policy sequence masking, as slime has it)."""
    logs = log_ratio(proximal, behaviour).detach()
    moved = float(-logs.mean()) if logs.numel() else 0.0
    return torch.ones_like(logs).masked_fill((advantages < 0) & (moved > set_to.moved_max), 0.0)


def _rho(proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    return log_ratio(proximal, behaviour).detach().exp()


def _within(rho: torch.Tensor, least: float, most: float) -> torch.Tensor:
    return ((rho >= least) & (rho <= most)).to(rho.dtype)


WEIGHINGS: Final[Mapping[str, Weigh]] = {
    "truncated": truncated,
    "icepop": icepop,
    "masked": masked,
    "veto": veto,
    "geometric": geometric,
    "k3": k3,
    "opsm": opsm,
}
