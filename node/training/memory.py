"""How much memory training will take, estimated before it starts.

The estimate is meant to be a little high. Fixed part: weights, gradients and Adam's two moments,
all fp32, next to the runtime itself; where an adapter is trained, these are its own, and of the
model there are the weights alone. Varying part: what one micro-batch keeps for its backward pass,
which is linear in its padded tokens.
"""

from dataclasses import dataclass

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from node.machine import free_memory_bytes
from node.training.adapter_files import AdapterShape
from node.training.policy import load_error_line, pick_device, refuse_quantised
from node.training.ranks import Ranks
from node.training.spec import TrainerSpec
from swarm.errors import ConfigError

RUNTIME_BYTES = 450 * 2**20  # interpreter, torch and transformers, without a model
MICRO_BATCH_TOKENS_MIN = 256
_FLOAT = 4  # bytes
_COPIES = 4  # weights, gradients, two moments
_FROZEN = 1  # weights alone
_MERGED = 1  # weights, while an adapter is written merged into them
_GATHERED = 1  # weights, while rank 0 of several samples or writes
_USABLE = 0.9  # of what is free: the rest is for everybody else


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimate needs to know of a model."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    adapter_parameters: int = 0  # of an adapter that is trained in place of the model


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What training will take at `micro_batch_tokens`."""

    micro_batch_tokens: int
    row_tokens_max: int  # padded tokens of the largest single row that fits
    estimate_bytes: int
    available_bytes: int
    held_bytes: int  # of the estimate, also between updates


def plan(spec: TrainerSpec, ranks: Ranks | None = None) -> MemoryPlan:
    """The largest micro-batch up to the wanted one that fits, from the configuration alone. With
    `ranks` the states are cut over them, and on the CPU its ranks share a machine's memory.

    Raises:
        ConfigError: the model cannot be read, or does not fit at the smallest micro-batch.
    """
    available = spec.memory_bytes_max
    if available is None:
        device = pick_device(spec.device)
        available = int(free_bytes(device) * _USABLE)
        available -= int(spec.gpu_share_left * total_bytes(device))
        if ranks is not None and device.type == "cpu":
            available //= ranks.local_size
    copies: float = _COPIES
    if spec.adapter is not None:
        copies = _FROZEN + _MERGED * spec.writes_merged
    if ranks is not None:
        copies = copies / ranks.size + _GATHERED
    return fit(
        shape_of(spec.model, spec.adapter), spec.micro_batch_tokens, available, spec.model, copies
    )


def fit(
    shape: ModelShape,
    wanted_tokens: int,
    available_bytes: int,
    name: str,
    copies: float = _COPIES,
) -> MemoryPlan:
    """Halve the micro-batch until the estimate fits.

    Raises:
        ConfigError: it does not fit at `MICRO_BATCH_TOKENS_MIN`.
    """
    tokens = wanted_tokens
    while (
        estimate_bytes(shape, tokens, copies) > available_bytes and tokens > MICRO_BATCH_TOKENS_MIN
    ):
        tokens = max(tokens // 2, MICRO_BATCH_TOKENS_MIN)
    estimate = estimate_bytes(shape, tokens, copies)
    if estimate > available_bytes:
        raise ConfigError(
            f"model {name}: training needs about {_mib(estimate)} of memory and "
            f"{_mib(available_bytes)} are free: take a smaller model or free memory"
        )
    held = estimate_bytes(shape, 0, copies)
    room = (available_bytes - held) // _token_bytes(shape)
    return MemoryPlan(tokens, room, estimate, available_bytes, held)


def estimate_bytes(shape: ModelShape, micro_batch_tokens: int, copies: float = _COPIES) -> int:
    """Peak bytes of a training process that holds so many numbers for each of the model's
    parameters."""
    states = int(_FLOAT * (copies * shape.parameters + _COPIES * shape.adapter_parameters))
    return RUNTIME_BYTES + states + _token_bytes(shape) * micro_batch_tokens


def _token_bytes(shape: ModelShape) -> int:
    per_layer = 16 * shape.hidden + 5 * shape.intermediate + 8 * shape.heads
    return _FLOAT * (shape.layers * per_layer + 4 * shape.vocabulary)


def shape_of(model: str, adapter: AdapterShape | None = None) -> ModelShape:
    """Read a model's shape without its weights.

    Raises:
        ConfigError: the configuration cannot be read, or the model takes no such adapter.
    """
    try:
        config = AutoConfig.from_pretrained(model)
        refuse_quantised(config, model)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(load_error_line(model, error)) from error
    trained = 0
    if adapter is not None:
        from node.training import adapters  # brings PEFT in

        trained = adapters.parameters(network, adapter, model)
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    return ModelShape(
        parameters=sum(p.numel() for p in network.parameters()),
        layers=int(text.num_hidden_layers),
        hidden=hidden,
        intermediate=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        heads=int(getattr(text, "num_attention_heads", 1)),
        vocabulary=int(text.vocab_size),
        adapter_parameters=trained,
    )


def free_bytes(device: torch.device) -> int:
    """Memory that training may take: of the GPU, or of the machine within our control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


def total_bytes(device: torch.device) -> int:
    """Of a GPU; 0 for the CPU, whose memory is everybody's."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
