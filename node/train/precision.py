"""The precision that a policy computes in: bf16 where it is clearly faster, else fp32.

Processors with AMX or AVX512-BF16 multiply bf16 matrices faster than fp32 ones, others slower, so
both are timed at the sizes of the model."""

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch.nn import functional

from node.interfaces.trainer_spec import Precision, TrainerSpec

PARAMETERS_MIN: Final = 50_000_000  # a smaller model spends its time between multiplications
GAIN_MIN: Final = 1.3  # fp32's time over that of bf16
_TOKENS: Final = 256
_HIDDEN_MAX, _INTERMEDIATE_MAX = 1024, 4096  # larger layers only take longer to time
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class Chosen:
    """The precision, and in words why where it was timed."""

    precision: Precision
    told: str = ""


FULL: Final = Chosen("float32")


def choose(
    spec: TrainerSpec, device: str, parameters: int, hidden: int, intermediate: int
) -> Chosen:
    """The precision for a model on a type of device. A base that an adapter's owner wants in fp32
    is computed in fp32."""
    if spec.precision in ("float32", "bfloat16"):
        return Chosen(spec.precision)
    if device == "cuda":
        return Chosen("bfloat16")
    if spec.precision == "by_device":
        return FULL
    is_exact = spec.adapter is not None and spec.held == "float32"
    if is_exact or parameters < PARAMETERS_MIN:
        return FULL
    gain = measured_gain(min(hidden, _HIDDEN_MAX), min(intermediate, _INTERMEDIATE_MAX))
    if gain < GAIN_MIN:
        return FULL
    told = f"the policy is computed in bf16, which is {gain:.1f} times as fast as fp32 here"
    return Chosen("bfloat16", told)


@cache
def measured_gain(hidden: int, intermediate: int) -> float:
    """The time of one linear layer with its gradients in fp32, over that in bf16; the fastest of
    some passes each, in turns."""
    fastest = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    for _ in range(_REPEATS):
        for dtype in fastest:
            x = torch.ones(_TOKENS, hidden, dtype=dtype, requires_grad=True)
            weight = torch.ones(intermediate, hidden, dtype=dtype, requires_grad=True)
            begun = time.perf_counter()
            functional.linear(x, weight).sum().backward()
            fastest[dtype] = min(fastest[dtype], time.perf_counter() - begun)
    return fastest[torch.float32] / fastest[torch.bfloat16]
