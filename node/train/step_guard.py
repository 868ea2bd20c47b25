"""The step guard: bounds on a gradient's norm and on how far one step may move the policy, from the
updates so far, and the undoing of a step that went too far.

One bad batch can cost what hundreds of updates taught: a step ten times as long as usual, which
Adam's momentum carries on. It shows in the divergence (k3) of the new policy from the one before.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import torch

WINDOW: Final = 32  # updates that a running median is of
SEEN_MIN: Final = 5  # before so many updates there is no median to speak of
NORM_TIMES_MAX: Final = 3.0  # of the median of gradients' norms
MOVE_TIMES_MAX: Final = 10.0  # of the median of steps' divergences
MOVE_MIN: Final = 2e-3  # nats per token; a step within it is never taken back
FIRST_MOVE_MAX: Final = 0.1  # the same before there is a median: a young Adam's steps are long
CAUTION_UPDATES: Final = 10
CAUTION_MIN: Final = 2.0**-10


def _window() -> "deque[float]":
    return deque(maxlen=WINDOW)


@dataclass(slots=True)
class StepGuard:
    """The record of past updates, the same on all ranks."""

    norms: "deque[float]" = field(default_factory=_window)  # of gradients, before they were clipped
    moves: "deque[float]" = field(default_factory=_window)  # k3 of the steps that stand
    caution: float = 1.0  # the share of the rate that steps take
    cautious_updates: int = 0  # for so many more

    def norm_bound(self, most: float) -> float:
        """The largest norm of the next gradient, at most `most`."""
        if len(self.norms) < SEEN_MIN:
            return most
        usual = median(self.norms)
        return min(most, NORM_TIMES_MAX * usual) if usual > 0 else most

    def move_bound(self) -> float:
        """The most that the next step may move the policy (k3), in nats."""
        if len(self.moves) < SEEN_MIN:
            return FIRST_MOVE_MAX
        return max(MOVE_TIMES_MAX * median(self.moves), MOVE_MIN)

    def note_norm(self, norm: float) -> None:
        if math.isfinite(norm):
            self.norms.append(norm)

    def takes(self, move: float) -> bool:
        """True if a step that moved the policy so far stands. If not, the rate is halved for some
        updates, again if it repeats, and then rises step by step."""
        if not move <= self.move_bound():  # nan does not stand either
            self.caution = max(self.caution / 2, CAUTION_MIN)
            self.cautious_updates = CAUTION_UPDATES
            return False
        self.moves.append(move)
        if self.cautious_updates:
            self.cautious_updates -= 1
            if not self.cautious_updates and self.caution < 1.0:
                self.caution *= 2
                self.cautious_updates = CAUTION_UPDATES if self.caution < 1.0 else 0
        return True

    def to_record(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "norms": list(self.norms),
            "moves": list(self.moves),
            "caution": self.caution,
            "cautious_updates": self.cautious_updates,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "StepGuard":
        """The inverse of `to_record`; an empty record gives a new guard.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        if not record:
            return cls()
        step_guard = cls(
            caution=float(record["caution"]), cautious_updates=int(record["cautious_updates"])
        )
        step_guard.norms.extend(float(each) for each in record["norms"])
        step_guard.moves.extend(float(each) for each in record["moves"])
        return step_guard


def take_back(optimizer: torch.optim.Adam) -> None:
    """Undo the step that `optimizer` has just made, and zero its momentum. Gradients and rates must
    be those of the step. Without a copy, which large models have no memory for: weights follow from
    Adam's moments, and the second moment from the gradient, but for rounding."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = optimizer.state[weight]
                step = float(state["step"])
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                scale = square.sqrt().div_(math.sqrt(1 - second**step)).add_(group["eps"])
                weight.addcdiv_(mean, scale, value=group["lr"] / (1 - first**step))
                square.addcmul_(weight.grad, weight.grad, value=second - 1).div_(second)
                square.clamp_(min=0.0)
                mean.zero_()
                state["step"] -= 1
