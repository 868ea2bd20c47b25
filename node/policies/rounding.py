"""From fp32 to bf16 so that many small steps are not lost.

Rounding to the nearest number hides a step until a weight has moved by half of the distance between
two bf16 numbers, some 1/512 of its size. At a rate of 1e-6 a weight of 0.05 takes a hundred steps,
and a rounded policy stays where it began. Here each weight has a threshold of its own: it rounds up
where its place between two numbers exceeds the threshold. Thresholds are spread evenly, so a sum
over many weights moves as it does in fp32. They stay the same from version to version, so a weight
that did not move keeps its bits, and a delta holds no more numbers than moved.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_LOW_BITS: Final = 16  # of fp32, which bf16 does without
_BLOCKS: Final = {"cpu": 2**18}  # numbers at a time, which its caches hold
_BLOCK: Final = 2**24  # of other devices, where each call takes its time
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
    multiples = _multiples(value.device)
    most = multiples.numel()
    for begin in range(0, whole.numel(), most):
        block = whole[begin : begin + most]
        bits = multiples[: block.numel()] + _signed(begin * _STEP)
        bits >>= _LOW_BITS
        bits &= 0xFFFF  # thresholds, to add below the bits that stay
        bits += block
        bits >>= _LOW_BITS
        out[begin : begin + most] = bits
    return rounded


@cache
def _multiples(device: torch.device) -> torch.Tensor:
    """The first multiples of `_STEP`, modulo 2^32."""
    with torch.inference_mode(mode=False):
        count = _BLOCKS.get(device.type, _BLOCK)
        return torch.arange(count, dtype=torch.int32, device=device) * _signed(_STEP)


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

    def __init__(self, model: nn.Module, *, keeps: bool = True) -> None:
        """`keeps`: they stay in memory. Else each layer makes its own when it runs. In inference
        mode, without gradients and activations, all are made at once and dropped at the end."""
        self._layers = [each for each in model.modules() if isinstance(each, _LINEAR)]
        self._keeps = keeps
        self._kept: dict[nn.Parameter, tuple[tuple[int, int], torch.Tensor]] = {}
        self._is_loaded = False

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within it linear layers compute with bf16 weights, and gradients go to the fp32 ones."""
        if self._is_loaded:
            yield
            return
        self._is_loaded, at_once = True, self._keeps or torch.is_inference_mode_enabled()
        with ExitStack() as stack:
            stack.callback(setattr, self, "_is_loaded", False)
            for layer in self._layers:
                if at_once:
                    stack.callback(self._take(layer))
                else:
                    self._hook(stack, layer)
            yield

    def _hook(self, stack: ExitStack, layer: nn.Module) -> None:
        taken: list[Callable[[], None]] = []
        before = layer.register_forward_pre_hook(lambda *_: taken.append(self._take(layer)))
        after = layer.register_forward_hook(lambda *_: taken.pop()(), always_call=True)
        stack.callback(before.remove)
        stack.callback(after.remove)

    def _take(self, layer: nn.Module) -> Callable[[], None]:
        """Give a layer its rounded weight; the result puts the fp32 one back."""
        weight = layer._parameters["weight"]
        if weight is None or weight.dtype != torch.float32:
            return lambda: None
        layer._parameters["weight"] = self._of(weight)  # type: ignore[assignment]
        return partial(layer._parameters.__setitem__, "weight", weight)

    def _of(self, weight: nn.Parameter) -> torch.Tensor:
        if not self._keeps:
            return rounded(weight)
        now = (weight.data_ptr(), weight._version)
        was, kept = self._kept.get(weight, (None, None))
        if kept is None or was != now:
            with torch.inference_mode(mode=False), torch.no_grad():
                kept = to_bfloat16(weight)
            self._kept[weight] = (now, kept)
        result: torch.Tensor = _Rounded.apply(weight, kept)  # type: ignore[no-untyped-call]
        return result
