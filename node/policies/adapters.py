"""LoRA: only two small factors B (out, rank) and A (rank, in) of each layer of attention and MLP
are trained, kept and shipped. The layer multiplies with its weight plus alpha / rank times B A.

The base is frozen and may be held in fewer bits than the factors, which are in fp32. Only this file
imports PEFT, whose format the versions have."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from node.interfaces.adapter_files import (
    BASE_FILE,
    WEIGHTS_FILE,
    AdapterShape,
    Held,
    base_record,
    card_of,
)
from node.policies import frozen, tensor_files
from node.policies.policy import Adapter, Policy, move
from swarm.errors import ConfigError

NAME: Final = "default"  # of the one adapter, within PEFT
_PREFIX: Final = "base_model.model."  # that PEFT's files put before each name
EXPERTS_DIM: Final = 3  # of weights that hold all experts of a layer
_ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate"})  # choose experts


def attach(
    policy: Policy,
    shape: AdapterShape,
    seed: int,
    base: str | None = None,
    held: Held = "float32",
    device: torch.device | None = None,
) -> None:
    """Freeze the policy and give it an adapter that changes nothing yet. `shape` without targets:
    all linear layers of attention and MLP. The same seed makes the same first factors. `base`: the
    policy's hash, if known. `device`: where the policy goes; the whole of it need not fit there.

    Raises:
        ConfigError: no such layers, recurrent state, or weights that cannot be `held` so.
    """
    device = device or policy.device
    frozen.check(held, device)
    model = policy.model
    if policy.stateful:
        raise ConfigError(f"model {policy.name}: LoRA is not for models with recurrent state")
    wanted = targets_of(model, shape, policy.name)
    base = base or base_hash(model)
    config = _config(AdapterShape(shape.rank, shape.alpha, wanted), policy)
    with torch.random.fork_rng(devices=[]), _in_fp32(model):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)
    if held != "float32":
        for _, _, layer in _adapted(model) if held == "4bit" else ():  # one at a time
            if type(layer.base_layer) is nn.Linear:
                layer.base_layer = frozen.quantised(layer.base_layer, device)
        frozen.hold(model)
    policy.adapter = Adapter(AdapterShape(shape.rank, shape.alpha, wanted), base, held)
    if device != policy.device:
        move(model, device)
        policy.device = device


@contextmanager
def _in_fp32(model: PreTrainedModel) -> Iterator[None]:
    """Let layers look as if they were in fp32 within the block: PEFT makes factors of the layer's
    type."""
    kept = [(layer.weight, layer.weight.data) for _, layer in _linear_layers(model)]
    try:
        for weight, data in kept:
            if data.dtype != torch.float32:
                weight.data = torch.zeros((), device=data.device).expand(data.shape)
        yield
    finally:
        for weight, data in kept:
            weight.data = data


def targets_of(model: PreTrainedModel, shape: AdapterShape, name: str) -> tuple[str, ...]:
    """Names of the layers that get factors; ConfigError: the model has no such layers."""
    known = {name.rpartition(".")[2] for name, _ in _linear_layers(model)}
    wanted = shape.targets or tuple(sorted(known - _ROUTERS))
    missing = [each for each in wanted if each not in known]
    if missing or not wanted:
        raise ConfigError(
            f"model {name}: lora_targets: no linear layer {', '.join(missing)}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return wanted


def parameters(model: PreTrainedModel, shape: AdapterShape, name: str) -> int:
    """The number of parameters in an adapter of the model."""
    return sum(shape.rank * sum(layer.weight.shape) for _, layer in _wanted(model, shape, name))


def covered(model: PreTrainedModel, shape: AdapterShape, name: str) -> int:
    """The number of weights that an adapter covers and that can be held in four bits."""
    layers = (layer for _, layer in _wanted(model, shape, name) if type(layer) is nn.Linear)
    return sum(layer.weight.numel() for layer in layers)


def _wanted(model: PreTrainedModel, shape: AdapterShape, name: str) -> list[tuple[str, Any]]:
    """The layers that get factors, by name."""
    wanted = targets_of(model, shape, name)
    return [each for each in _linear_layers(model) if each[0].rpartition(".")[2] in wanted]


def factors(policy: Policy) -> dict[str, torch.Tensor]:
    """The adapter's matrices by the names in PEFT's files; in place, not copies."""
    return {
        _PREFIX + name.replace(f".{NAME}.", "."): parameter
        for name, parameter in policy.model.named_parameters()
        if f".{NAME}." in name
    }


def export(directory: Path, policy: Policy) -> None:
    """Write the adapter, in PEFT's format, and which base it is for."""
    assert policy.adapter is not None
    found = {name: value.detach().cpu().contiguous() for name, value in factors(policy).items()}
    save_file(found, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config = _config(policy.adapter.shape, policy)
    config.inference_mode = True
    config.save_pretrained(str(directory))
    record = base_record(policy.adapter.base, policy.adapter.held)
    (directory / BASE_FILE).write_text(record)


def load(policy: Policy, directory: Path, held: Held | None = None) -> None:
    """Load an adapter, or change nothing. A policy without one gets one, and its weights are `held`
    so; None: as where the adapter was trained, or in bf16 where that cannot be.

    Raises:
        ConfigError: it is damaged, for another base, or of another shape than the one before.
    """
    card = card_of(directory)
    what = f"adapter {directory}"
    weights = tensor_files.read(directory / WEIGHTS_FILE, f"{what}: {WEIGHTS_FILE}")
    base = base_hash(policy.model) if policy.adapter is None else policy.adapter.base
    if card.base != base:
        raise ConfigError(
            f"{what} is for the base {card.base[:12]}, and {policy.name} is "
            f"{base[:12]}: give the model that it was trained on with --model"
        )
    if policy.adapter is None:
        _check(weights, _shapes(policy, card.shape), what)
        attach(policy, card.shape, 0, base, held or _like(card.held, policy.device))
    elif card.shape != policy.adapter.shape:
        raise ConfigError(
            f"{what}: it is {_told(card.shape)}, and this policy's is {_told(policy.adapter.shape)}"
        )
    put(policy, weights, what)


def _like(held: Held, device: torch.device) -> Held:
    """The precision for a base that was held so elsewhere."""
    try:
        frozen.check(held, device)
    except ConfigError:
        return "bfloat16"
    return held


def described(policy: Policy) -> str:
    """The adapter in words: layers, the base's precision, and whether experts are left alone."""
    assert policy.adapter is not None
    named = policy.model.named_parameters()
    stacked = any(value.dim() == EXPERTS_DIM and "expert" in name for name, value in named)
    held = policy.adapter.held
    told = _told(policy.adapter.shape) + (f", the base in {held}" if held != "float32" else "")
    return told + ("; experts are left as they are" if stacked else "")


def put(policy: Policy, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Replace the adapter's matrices, all or none; names as in `factors`.

    Raises:
        ConfigError: others than the policy's, of other shapes, or not finite.
    """
    target = factors(policy)
    _check(weights, {name: tuple(value.shape) for name, value in target.items()}, what)
    with torch.no_grad():
        for name, value in weights.items():
            target[name].copy_(value)


@contextmanager
def merged(policy: Policy) -> Iterator[None]:
    """Within the block the model is a plain one, with base and adapter in its weights; afterwards
    it is bit for bit as before. Nothing else may use it meanwhile."""
    kept: list[tuple[nn.Module, str, nn.Module, torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for parent, name, layer in _adapted(policy.model):
                whole, plain = effective_weight(layer), layer.base_layer
                if frozen.is_quantised(plain):
                    plain = frozen.replaced(plain, whole)
                kept.append((parent, name, layer, plain.weight, plain.weight.data))
                plain.weight.data = whole
                setattr(parent, name, plain)
        yield
    finally:
        for parent, name, layer, weight, before in kept:
            weight.data = before
            setattr(parent, name, layer)


def effective_weight(layer: Any) -> torch.Tensor:
    """The weight that an adapted layer multiplies with, in fp32, with gradients."""
    weight: torch.Tensor = frozen.exact(layer.base_layer) + layer.get_delta_weight(NAME)
    return weight


def base_hash(model: PreTrainedModel) -> str:
    """SHA-256 over names, shapes and fp32 values of a model's weights without an adapter, taken
    before they are held in fewer bits. Files and 16-bit formats do not matter."""
    digest = hashlib.sha256(b"swarm/base-model/1\0")
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{','.join(map(str, value.shape))}\0".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().reshape(-1).data)
    return digest.hexdigest()


def _adapted(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Layers with an adapter: what holds each, its name there, and the layer."""
    return [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if hasattr(child, "base_layer") and hasattr(child, "lora_A")
    ]


def _linear_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Linear layers by name, the head aside."""
    head = model.get_output_embeddings()
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def _shapes(policy: Policy, shape: AdapterShape) -> dict[str, tuple[int, ...]]:
    """The shapes of `factors` once such an adapter is attached."""
    found: dict[str, tuple[int, ...]] = {}
    for path, layer in _wanted(policy.model, shape, policy.name):
        rows, columns = layer.weight.shape
        out, into = (columns, rows) if isinstance(layer, Conv1D) else (rows, columns)
        found[f"{_PREFIX}{path}.lora_A.weight"] = (shape.rank, into)
        found[f"{_PREFIX}{path}.lora_B.weight"] = (out, shape.rank)
    return found


def _check(
    weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], what: str
) -> None:
    """Raises ConfigError as `put`."""
    for name in sorted(shapes.keys() ^ weights.keys()):
        raise ConfigError(f"{what}: {name} is {'missing' if name in shapes else 'none of ours'}")
    for name, value in weights.items():
        if tuple(value.shape) != shapes[name]:
            raise ConfigError(f"{what}: {name} has shape {tuple(value.shape)}")
        if not torch.isfinite(value).all():
            raise ConfigError(f"{what}: {name} is not finite")


def _config(shape: AdapterShape, policy: Policy) -> LoraConfig:
    return LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,  # type: ignore[arg-type]  # only divided by the rank
        target_modules=list(shape.targets),
        lora_dropout=0.0,  # sampling and training see one distribution
        bias="none",
        fan_in_fan_out=any(isinstance(each, Conv1D) for each in policy.model.modules()),
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=policy.name,
    )


def _told(shape: AdapterShape) -> str:
    return f"of rank {shape.rank}, alpha {shape.alpha:g}, on {', '.join(shape.targets)}"
