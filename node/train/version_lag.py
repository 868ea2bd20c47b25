"""The share of what was learned that is missing from the rounded policy that generates.

A trainer keeps fp32, engines and published versions hold bf16. Rounding may hide steps for long:
the policy that is trained moves, the one that generates does not, and no curve shows it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch.autograd.graph import increment_version

from node.policies import tensor_files
from node.policies.rounding import to_bfloat16

FIRST_UPDATE: Final = 5  # before it there is little to compare
TIMES_MIN: Final = 50.0  # the cost of a measurement in training time, before the next one


@contextmanager
def swapped(trained: Sequence[torch.Tensor], others: list[torch.Tensor]) -> Iterator[None]:
    """Within it the model has the other weights, and nothing may train it."""

    def swap() -> None:
        for place, now in enumerate(trained):
            others[place], now.data = now.data, others[place]
        increment_version(trained)

    swap()
    try:
        yield
    finally:
        swap()


class VersionLag:
    """Measures the lag of one policy's version now and then."""

    def __init__(self, model: str, network: torch.nn.Module) -> None:
        """`model`: the directory or hub id that the policy started from."""
        self._model, self._network = model, network
        self._trained_s = math.inf  # since the last measurement
        self._cost_s = 0.0  # of the last measurement
        self._last = math.nan

    def measure(self, updates: int, seconds: float, logprobs: Callable[[], torch.Tensor]) -> float:
        """mean |log p(now) - log p(version)| over mean |log p(now) - log p(start)|, as last
        measured; nan: not yet. It is measured again once that costs a fiftieth of the training
        time.

        `updates`: made so far. `seconds`: what the last one took. `logprobs`: those of some tokens
        under the weights of the moment.
        """
        self._trained_s += seconds
        if updates < FIRST_UPDATE or self._trained_s < TIMES_MIN * self._cost_s:
            return self._last
        begun = time.perf_counter()
        with torch.no_grad():
            self._last = self._measured(logprobs)
        self._trained_s, self._cost_s = 0.0, time.perf_counter() - begun
        return self._last

    def _measured(self, logprobs: Callable[[], torch.Tensor]) -> float:
        named = dict(self._network.named_parameters())
        trained = list(named.values())
        now = logprobs()
        with swapped(trained, [to_bfloat16(each).to(each.dtype) for each in trained]):
            version = logprobs()
        first = dict(tensor_files.load(self._model, torch.float32).named_parameters())
        with swapped(
            trained, [first.pop(name).data.to(each.device) for name, each in named.items()]
        ):
            start = logprobs()
        moved = float((now - start).abs().sum())
        return float((now - version).abs().sum()) / moved if moved else math.nan
