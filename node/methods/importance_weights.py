"""Importance weights of one completion's tokens: (T,) without gradient, 0 masks a token.

Each function takes `logs` (T,), log rho: log-prob before the update less the behaviour log-prob."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor, ones_like

from node.methods import loss_settings as settings
from node.methods.losses import log_ratio
from node.methods.method import MethodSettings
from node.methods.own import told

OfLogRatios = Callable[[Tensor, Tensor, Any], Tensor]


def truncated(logs: Tensor, advantages: Tensor, set_to: settings.Truncated) -> Tensor:
    """min(rho, weight_max)."""
    return logs.exp().clamp(max=set_to.weight_max)


def icepop(logs: Tensor, advantages: Tensor, set_to: settings.IcePop) -> Tensor:
    """rho in [weight_min, weight_max], 0 outside (IcePop, as slime and verl have it)."""
    return logs.exp() * _within(logs, set_to.weight_min, set_to.weight_max)


def masked(logs: Tensor, advantages: Tensor, set_to: settings.Masked) -> Tensor:
    """1 where rho is in [weight_min, weight_max], 0 outside."""
    return _within(logs, set_to.weight_min, set_to.weight_max)


def veto(logs: Tensor, advantages: Tensor, set_to: settings.Veto) -> Tensor:
    """1, and 0 for all tokens where any has rho below weight_min."""
    return ones_like(logs) * bool((logs.exp() >= set_to.weight_min).all())


def geometric(logs: Tensor, advantages: Tensor, set_to: settings.Geometric) -> Tensor:
    """1 where exp(mean log rho) is in [weight_min, weight_max], else 0, for all tokens."""
    middle = math.exp(float(logs.mean())) if logs.numel() else 1.0
    return ones_like(logs) * (set_to.weight_min <= middle <= set_to.weight_max)


def k3(logs: Tensor, advantages: Tensor, set_to: settings.K3) -> Tensor:
    """1 where the mean of rho - log rho - 1 is at most divergence_max, else 0, for all tokens."""
    divergence = float((logs.exp() - logs - 1.0).mean()) if logs.numel() else 0.0
    return ones_like(logs) * (divergence <= set_to.divergence_max)


def opsm(logs: Tensor, advantages: Tensor, set_to: settings.Opsm) -> Tensor:
    """0 for tokens with A < 0 where the mean of -log rho over the completion is above moved_max,
    else 1 (off-policy sequence masking, as slime has it)."""
    moved = float(-logs.mean()) if logs.numel() else 0.0
    return ones_like(logs).masked_fill((advantages < 0) & (moved > set_to.moved_max), 0.0)


def _within(logs: Tensor, least: float, most: float) -> Tensor:
    rho = logs.exp()
    return ((rho >= least) & (rho <= most)).to(rho.dtype)


IMPORTANCE_WEIGHTS: Final[Mapping[str, OfLogRatios]] = {
    "truncated": truncated,
    "icepop": icepop,
    "masked": masked,
    "veto": veto,
    "geometric": geometric,
    "k3": k3,
    "opsm": opsm,
}


def importance_weights(
    proximal: Tensor, behaviour: Tensor, advantages: Tensor, set_to: MethodSettings
) -> Tensor:
    """The weights by the method that `set_to` belongs to."""
    logs = log_ratio(proximal, behaviour).detach()
    if set_to.own is None:
        return IMPORTANCE_WEIGHTS[set_to.kind](logs, advantages, set_to)
    with told(set_to):
        weights: Tensor = set_to.own(logs, advantages, set_to)
        if weights.shape != logs.shape or not bool((weights.isfinite() & (weights >= 0)).all()):
            raise ValueError("gives weights that are no finite number from 0 for each token")
    return weights
