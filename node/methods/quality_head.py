"""The chance that an unfinished completion comes out right, learned from its hidden state."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from node.methods.ridge import Numbers, Ridge

DIRECTIONS: Final = 64  # random ones that states are projected to, whatever the model; ours
RIDGE: Final = 1.0  # ours
KEPT: Final = 0.99  # the share of what was learned that is left after another batch; ours


class QualityHead:
    """Ridge regression of right (1) or not (0) on hidden states. It stands in for the perceptron of
    ARRoL (arXiv 2603.24840), whose state would grow with a model's width. A mean of 0 and 1 needs
    no calibration by bins."""

    def __init__(self) -> None:
        self._known = Ridge(DIRECTIONS + 1)

    def learn(
        self, states: Sequence[Sequence[float]], right: Sequence[bool], weights: Sequence[float]
    ) -> None:
        """Take in completions: hidden states (n, H), and 1 / the probability that each was seen to
        its end."""
        if not states:
            return
        self._known.fade(KEPT)
        for row, told, weight in zip(_projected(states), right, weights, strict=True):
            self._known.add(row, float(told), weight)

    def chances(self, states: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """The chance of each of the states (n, H) to come out right; 0 before anything is known."""
        if not states:
            return ()
        found = _projected(states) @ np.asarray(self._known.weights(RIDGE))
        return tuple(np.clip(found, 0.0, 1.0).tolist())

    def to_record(self) -> Any:
        return self._known.to_record()

    def restore(self, record: Any) -> None:
        """Take back a record. ValueError: it is none."""
        self._known.restore(record)


def _projected(states: Sequence[Sequence[float]]) -> Numbers:
    """States (n, H) of unit size in the random directions, and a constant: (n, DIRECTIONS + 1)."""
    rows = np.asarray(states, dtype=np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) + 1e-12
    directions = np.random.default_rng(0).standard_normal((rows.shape[1], DIRECTIONS))
    return np.hstack([rows @ directions, np.ones((len(rows), 1))])
