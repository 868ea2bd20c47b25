"""The frozen weights under an adapter, held in fewer bits than they are computed with.

In bf16 a weight takes two bytes. An fp32 forward pass, as on CPUs, makes fp32 of a layer's weight
while it runs, in room that all layers share. Norms, biases, experts in one tensor, and layers of
unknown kinds stay in fp32.

Adapted layers alone may be in four bits (NF4 in blocks of 64 with an fp32 scale), by bitsandbytes,
which only this file imports."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from node.interfaces.adapter_files import Held
from node.system.extras import install_line
from swarm.errors import ConfigError

ROOM_NUMBERS: Final = 2**22  # of a weight at a time, in what is computed: 16 MiB in fp32
_LOCAL: Final = threading.local()  # that room
BITSANDBYTES: Final = "'bitsandbytes>=0.46,<1'"  # as the extra `quantised` has it
FOUR_BITS_BYTES: Final = 0.5 + 4 / 64  # of a weight, its share of a block's scale included
NOT_INSTALLED: Final = (
    f"lora_base = '4bit': bitsandbytes is not installed: {install_line(BITSANDBYTES)}, or "
    "set lora_base = 'bfloat16'"
)


def check(held: Held, device: torch.device) -> None:
    """Raise ConfigError if weights cannot be held so on this device, or with what is installed."""
    if held != "4bit":
        return
    if device.type != "cuda":
        raise ConfigError(
            "lora_base = '4bit': bitsandbytes computes on an NVIDIA GPU, and this policy is on the "
            f"{device.type}: set lora_base = 'bfloat16'"
        )
    _bitsandbytes()


def hold(model: nn.Module) -> None:
    """Put the frozen weights of linear layers and embeddings into bf16, in place, and all others
    into fp32. Their layers compute in the type of their input."""
    narrow = {id(weight): owners for weight, owners in _weights(model) if not weight.requires_grad}
    for parameter in model.parameters():
        owners = narrow.get(id(parameter), [])
        if parameter.is_floating_point():
            kind = torch.bfloat16 if owners else torch.float32
            # a copy, so that a converted parameter keeps no file mapped
            parameter.data = parameter.data.to(kind, copy=not owners)
        for owner in owners:
            owner.forward = partial(_FORWARDS[type(owner)], owner)


def numbers(model: nn.Module) -> int:
    """The number of weights that `hold` puts into bf16 if all of the model is frozen."""
    return sum(weight.numel() for weight, _ in _weights(model))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`functional.linear` in the precision of `x`, for a weight in another one."""
    if weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight, bias)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _multiplied(x, weight, bias)
    result: torch.Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """Keeps the weight as it is held, and not the copy that it multiplied with."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return _multiplied(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        parts = [
            gradient[..., rows] @ _wide(weight[rows], gradient.dtype) for rows in _parts(weight)
        ]
        return sum(parts[1:], parts[0]), None, None


def _multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    parts = _parts(weight)
    if len(parts) == 1:
        return functional.linear(x, _wide(weight, x.dtype), bias)
    made = x.new_empty(*x.shape[:-1], weight.shape[0])
    for rows in parts:
        some = None if bias is None else bias[rows]
        made[..., rows] = functional.linear(x, _wide(weight[rows], x.dtype), some)
    return made


def _parts(weight: torch.Tensor) -> list[slice]:
    """Rows of a weight, as many at a time as there is room for."""
    count = max(1, ROOM_NUMBERS // weight.shape[1])
    return [slice(begin, begin + count) for begin in range(0, weight.shape[0], count)]


def _wide(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight in another type, until the next call of this thread."""
    rooms: dict[Any, torch.Tensor] = _LOCAL.__dict__
    key = f"{weight.device} {dtype}"
    numbers = max(ROOM_NUMBERS, weight.numel())
    if key not in rooms or rooms[key].numel() < numbers:
        with torch.inference_mode(mode=False):  # else nobody could write to it outside of that
            rooms[key] = torch.empty(numbers, dtype=dtype, device=weight.device)
    return rooms[key][: weight.numel()].view(weight.shape).copy_(weight)


_FORWARDS: Final[dict[type, Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    nn.Linear: lambda layer, x: linear(x, layer.weight, layer.bias),
    Conv1D: lambda layer, x: linear(x, layer.weight.t(), layer.bias),
    # in fp32: sums over layers begin with it
    nn.Embedding: lambda layer, ids: nn.Embedding.forward(layer, ids).float(),
}


def _weights(model: nn.Module) -> Iterator[tuple[nn.Parameter, list[nn.Module]]]:
    """Weights that only layers of known kinds use, with these layers; tied weights have several."""
    found: dict[int, tuple[nn.Parameter, list[nn.Module]]] = {}
    others: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if type(module) in _FORWARDS and name == "weight":
                found.setdefault(id(parameter), (parameter, []))[1].append(module)
            else:
                others.add(id(parameter))
    return (pair for key, pair in found.items() if key not in others)


# --- four bits -----------------------------------------------------------------------------------


def quantised(layer: nn.Linear, device: torch.device) -> nn.Module:
    """The layer in four bits, on a GPU."""
    bitsandbytes = _bitsandbytes()
    made: nn.Module = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=torch.bfloat16,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    made.weight = bitsandbytes.nn.Params4bit(
        layer.weight.data.to(torch.bfloat16),
        requires_grad=False,
        compress_statistics=False,
        quant_type="nf4",
    ).to(device)
    made.bias = layer.bias
    return made


def replaced(layer: Any, weight: torch.Tensor) -> nn.Linear:
    """A plain layer in place of a quantised one, with another weight and the same bias."""
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight, made.bias = nn.Parameter(weight, requires_grad=False), layer.bias
    return made


def is_quantised(layer: nn.Module) -> bool:
    return getattr(layer.weight, "quant_state", None) is not None


def exact(layer: Any) -> torch.Tensor:
    """The weight that a layer multiplies with, in fp32."""
    weight: torch.Tensor = layer.weight
    if is_quantised(layer):
        weight = _bitsandbytes().functional.dequantize_4bit(weight.data, layer.weight.quant_state)
    return weight.float()


def numel(parameter: torch.Tensor) -> int:
    """The number of weights in a parameter; in four bits it holds two in a byte."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(NOT_INSTALLED) from error
    return bitsandbytes
