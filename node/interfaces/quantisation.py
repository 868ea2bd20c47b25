"""Quantised sampling: vLLM quantises weights as it loads them; the trainer's policy stays exact.

vLLM does `fp8` itself, with a scale for each output and token. It knows `int8` only from
checkpoints, so it is told that the model is such a checkpoint (compressed-tensors), starts without
weights, and the worker quantises what it loads. Imports neither torch nor vLLM.
"""

from collections.abc import Collection, Iterator
from typing import Any, Final, Literal

Quantisation = Literal["none", "fp8", "int8"]
INT8_MAX: Final = 127
_FP8: Final = "fp8_per_channel"  # of vLLM's kinds the one that runs on CPUs as well
_INT8: Final = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def server_flags(kind: Quantisation) -> dict[str, Any]:
    """Flags of vLLM's server. Values that are not strings are JSON."""
    if kind == "fp8":
        return {"quantization": _FP8}
    if kind == "int8":
        return {"hf-overrides": {"quantization_config": _INT8}, "load-format": "dummy"}
    return {}


def in_int8(
    tensors: Iterator[tuple[str, Any]], layers: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """A model's tensors by name, with those of `layers` (last parts of names) as int8 and a scale
    for each output. Tensors in int8 are unchanged."""
    for name, tensor in tensors:
        layer, _, kind = name.rpartition(".")
        wanted = kind == "weight" and layer.rpartition(".")[2] in layers
        if not wanted or not tensor.is_floating_point():
            yield name, tensor
            continue
        exact = tensor.float()
        scale = exact.abs().amax(dim=1, keepdim=True).div(INT8_MAX)
        scale[scale == 0] = 1.0  # of outputs that are zero
        yield name, exact.div(scale).round().char()
        yield f"{name}_scale", scale
