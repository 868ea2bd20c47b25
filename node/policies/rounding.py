"""From fp32 to bf16 so that many small steps are not lost.

Rounding to the nearest number hides a step until a weight has moved by half of the distance between
two bf16 numbers, some 1/512 of its size. At a rate of 1e-6 a weight of 0.05 takes a hundred steps,
and a rounded policy stays where it began. Here each weight has a threshold of its own: it rounds up
where its place between two numbers exceeds the threshold. Thresholds are spread evenly, so a sum
over many weights moves as it does in fp32. They stay the same from version to version, so a weight
that did not move keeps its bits, and a delta holds no more numbers than moved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_LOW_BITS: Final = 16  # of fp32, which bf16 does without
_BLOCK: Final = 2**18  # numbers at a time, which caches of processors hold
_STEP: Final = 0x9E3779B1  # 2^32 over the golden ratio: multiples of it spread evenly, modulo 2^32
_LINEAR: Final = (nn.Linear, Conv1D)


def to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    """A tensor in bf16. Its sum is off by a few units in the last place, however large it is; the
    numbers that bf16 has stay as they are."""
    if value.dtype != torch.float32:
        return value.to(torch.bfloat16)
    value = value.detach().contiguous()
    rounded = torch.empty_like(value, dtype=torch.bfloat16)
    whole, out = value.view(-1).view(torch.int32), rounded.view(-1).view(torch.int16)
    for begin in range(0, whole.numel(), _BLOCK):
        block = whole[begin : begin + _BLOCK]
        bits = _multiples(value.device)[: block.numel()] + _signed(begin * _STEP)
        bits >>= _LOW_BITS
        bits &= 0xFFFF  # thresholds, to add below the bits that stay
        bits += block
        bits >>= _LOW_BITS
        out[begin : begin + _BLOCK] = bits
    return rounded


@cache
def _multiples(device: torch.device) -> torch.Tensor:
    """The first multiples of `_STEP`, modulo 2^32."""
    with torch.inference_mode(mode=False):
        places = torch.arange(_BLOCK, dtype=torch.int32, device=device)
        return places * _signed(_STEP)


def _signed(number: int) -> int:
    """The number of 32 bits with a sign that equals this one modulo 2^32."""
    return (number + 2**31) % 2**32 - 2**31


class _Rounded(torch.autograd.Function):
    """Has a copy's numbers and passes the gradient on to the fp32 numbers."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].float(), None


def rounded(value: torch.Tensor) -> torch.Tensor:
    """As `to_bfloat16`; the gradient goes to `value` as it is."""
    result: torch.Tensor = _Rounded.apply(value, to_bfloat16(value))  # type: ignore[no-untyped-call]
    return result


class RoundedWeights:
    """The bf16 weights of a model's linear layers, made anew once the fp32 ones change. Weights
    that change outside of an operation in place are told by `increment_version` of torch."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[nn.Parameter, tuple[tuple[int, int], torch.Tensor]] = {}
        self._is_loaded = False

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within it linear layers compute with bf16 weights, and gradients go to the fp32 ones."""
        if self._is_loaded:
            yield
            return
        self._is_loaded, taken = True, []
        try:
            for module in self._model.modules():
                weight = module._parameters.get("weight") if isinstance(module, _LINEAR) else None
                if weight is not None and weight.dtype == torch.float32:
                    taken.append((module, weight))
                    module._parameters["weight"] = self._of(weight)  # type: ignore[assignment]
            yield
        finally:
            for module, weight in taken:
                module._parameters["weight"] = weight
            self._is_loaded = False

    def _of(self, weight: nn.Parameter) -> torch.Tensor:
        now = (weight.data_ptr(), weight._version)
        was, kept = self._kept.get(weight, (None, None))
        if kept is None or was != now:
            with torch.inference_mode(mode=False), torch.no_grad():
                kept = to_bfloat16(weight)
            self._kept[weight] = (now, kept)
        result: torch.Tensor = _Rounded.apply(weight, kept)  # type: ignore[no-untyped-call]
        return result
