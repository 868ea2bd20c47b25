"""From fp32 to bf16 so that many small steps are not lost.

Rounding to the nearest number hides a step until a weight has moved by half of the distance between
two bf16 numbers, some 1/512 of its size. At a rate of 1e-6 a weight of 0.05 takes a hundred steps,
and a rounded policy stays where it began. Here each weight has a threshold of its own: it rounds up
where its place between two numbers exceeds the threshold. Thresholds are spread evenly, so a sum
over many weights moves as it does in fp32. They stay the same from version to version, so a weight
that did not move keeps its bits, and a delta holds no more numbers than moved.
"""

from typing import Final

import torch

_LOW_BITS: Final = 16  # of fp32, which bf16 does without
_BLOCK: Final = 2**20  # numbers at a time
_STEP: Final = 0x9E3779B1  # 2^32 over the golden ratio: multiples of it spread evenly, modulo 2^32


def to_bfloat16(value: torch.Tensor) -> torch.Tensor:
    """A tensor in bf16. Its sum is off by a few units in the last place, however large it is; the
    numbers that bf16 has stay as they are."""
    if value.dtype != torch.float32:
        return value.to(torch.bfloat16)
    rounded = torch.empty_like(value, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    flat, out = value.detach().reshape(-1), rounded.view(-1)
    for begin in range(0, flat.numel(), _BLOCK):
        block = flat[begin : begin + _BLOCK]
        bits = block.contiguous().view(torch.int32) + _thresholds(begin, block)
        kept = ((bits >> _LOW_BITS) << _LOW_BITS).view(torch.float32)
        out[begin : begin + _BLOCK] = kept.to(torch.bfloat16)
    return rounded


def _thresholds(begin: int, block: torch.Tensor) -> torch.Tensor:
    """Numbers to add below the bits that stay, for the numbers from `begin` on: 0 to 65,535."""
    places = torch.arange(begin, begin + block.numel(), device=block.device)
    return (((places * _STEP) & 0xFFFFFFFF) >> _LOW_BITS).to(torch.int32)
