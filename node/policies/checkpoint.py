"""Model, optimizer and generator state on disk, from which a trainer resumes bit for bit on as many
threads. Files are fsynced into a directory that the caller made and moves into place."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from node.interfaces.trainer import DamagedCheckpoint
from node.interfaces.trainer_spec import Precision
from node.policies import exported_files
from node.policies.policy import Policy
from node.policies.rounding import to_bfloat16
from node.policies.tensor_files import not_finite
from swarm.errors import ConfigError, LocalProtocolError
from swarm.texts import first_line

FORMAT = 1
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.pt", "trainer.json"


def save(
    directory: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    policy_version: int,
    step_guard: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint into an existing empty directory; every file is on disk on return.
    LocalProtocolError: weights that are not finite."""
    _check_finite(policy)
    save_file(_untied(_trained(policy)), directory / _MODEL)
    torch.save(
        {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()},
        directory / _OPTIMIZER,
    )
    state = {
        "format": FORMAT,
        "policy_version": policy_version,
        "tokenizer": policy.fingerprint,
        "adapter": _adapter_record(policy),
        "step_guard": step_guard or {},
    }
    (directory / _STATE).write_text(json.dumps(state))
    sync_directory(directory)


def load(directory: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Restore what `save` wrote into a policy of the same model; returns its policy version. The
    learning rate stays the optimizer's own.

    Raises:
        DamagedCheckpoint: missing or damaged files; policy and optimizer may be half restored.
        ConfigError: a checkpoint of another model, tokenizer or format.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        state: Mapping[str, Any] = json.loads((directory / _STATE).read_text())
        weights = load_file(directory / _MODEL)
        saved = torch.load(directory / _OPTIMIZER, weights_only=True)
    except Exception as error:
        # boundary: damaged bytes raise anything from OSError to SafetensorError and RuntimeError
        raise _damaged(directory, f"{type(error).__name__}: {first_line(error)}") from error
    bad = not_finite(weights)
    if bad is not None:
        raise _damaged(directory, f"{bad} is not finite")
    try:
        if state["format"] != FORMAT:
            raise ConfigError(f"checkpoint {directory} has format {state['format']}, not {FORMAT}")
        if state["tokenizer"] != policy.fingerprint:
            raise ConfigError(f"checkpoint {directory} is of another tokenizer than {policy.name}")
        _check_adapter(directory, state.get("adapter"), policy)
        _restore_model(directory, policy, weights)
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        version = int(state["policy_version"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(directory, f"{type(error).__name__}: {first_line(error)}") from error
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return version


def step_guard_of(directory: Path) -> Mapping[str, Any]:
    """The step guard's record in a checkpoint that `load` has taken."""
    found: Mapping[str, Any] = json.loads((directory / _STATE).read_text()).get("step_guard", {})
    return found


def digests(policy: Policy) -> dict[str, str]:
    """The SHA-256 of each trained weight by name, as a checkpoint would hold it."""
    return {
        name: hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, value in _untied(_trained(policy)).items()
    }


def export(directory: Path, policy: Policy, precision: Precision = "float32") -> None:
    """Write the policy as a Hugging Face model directory with tokenizer, or its adapter alone,
    always in fp32; fsynced. LocalProtocolError: weights that are not finite."""
    if policy.adapter is None:
        export_whole(directory, policy, precision)
        return
    from node.policies import adapters  # brings PEFT in

    _check_finite(policy)
    adapters.export(directory, policy)
    sync_directory(directory)


def export_whole(directory: Path, policy: Policy, precision: Precision = "float32") -> None:
    """As `export`, an adapter merged into the model, in that precision."""
    _check_finite(policy)
    with ExitStack() as stack:
        if policy.adapter is not None:
            from node.policies import adapters  # brings PEFT in

            stack.enter_context(adapters.merged(policy))
        wanted = getattr(torch, precision)
        if all(each.dtype == wanted for each in policy.model.parameters()):
            policy.model.save_pretrained(directory)
        else:
            _save_as(directory, policy.model, wanted)
    if not exported_files.write_tokenizer(directory, policy.files):
        policy.tokenizer.save_pretrained(directory)
    exported_files.respell(directory, policy.files, policy.model, precision)
    sync_directory(directory)


def _save_as(directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write a model with its floating-point numbers in one type."""
    rounded: dict[int, torch.Tensor] = {}  # by where it lies, so that tied weights stay tied
    state = {}
    for name, value in model.state_dict().items():
        if value.is_floating_point() and value.numel():
            value = rounded.setdefault(value.data_ptr(), _in_type(value, dtype))
        state[name] = value
    model.save_pretrained(directory, state_dict=state)


def _in_type(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return to_bfloat16(value) if dtype == torch.bfloat16 else value.to(dtype)


def sync_directory(directory: Path) -> None:
    """fsync every file of a flat directory, then the directory itself."""
    for path in [*sorted(directory.iterdir()), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _trained(policy: Policy) -> Mapping[str, torch.Tensor]:
    """The weights that a checkpoint holds: all, or the adapter, in place and by name."""
    if policy.adapter is None:
        return policy.model.state_dict()
    from node.policies import adapters  # brings PEFT in

    return adapters.factors(policy)


def _adapter_record(policy: Policy) -> dict[str, Any] | None:
    if policy.adapter is None:
        return None
    shape = asdict(policy.adapter.shape)
    return {**shape, "targets": list(shape["targets"]), "base": policy.adapter.base}


def _check_adapter(directory: Path, saved: Mapping[str, Any] | None, policy: Policy) -> None:
    """Raise ConfigError if the checkpoint and the policy differ in having an adapter, or in its
    shape or base."""
    ours = _adapter_record(policy)
    if saved == ours:
        return
    if saved is None or ours is None:
        kinds, rank = ("a whole model", "an adapter"), saved["rank"] if saved else 0
        raise ConfigError(
            f"checkpoint {directory} is of {kinds[saved is not None]}, and this node trains "
            f"{kinds[ours is not None]}: set lora_rank = {rank} as it was, "
            "or use another --data-dir"
        )
    name = next(name for name in ours if saved.get(name) != ours[name])
    raise ConfigError(
        f"checkpoint {directory} is of an adapter with {name} {saved.get(name)!r}, not "
        f"{ours[name]!r}: set it as it was, or use another --data-dir"
    )


def _untied(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each storage once: tied weights share theirs, which the file format refuses."""
    seen: set[int] = set()
    result = {}
    for name, value in state.items():
        if value.data_ptr() in seen and value.numel():
            continue
        seen.add(value.data_ptr())
        result[name] = value.detach().cpu().contiguous()
    return result


def _restore_model(directory: Path, policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
    target = _trained(policy)
    expected = _untied(target)
    if expected.keys() != weights.keys() or any(
        expected[name].shape != weights[name].shape for name in expected
    ):
        raise ConfigError(f"checkpoint {directory} is of another model than {policy.name}")
    with torch.no_grad():
        for name, value in weights.items():
            target[name].copy_(value)


def _check_finite(policy: Policy) -> None:
    bad = not_finite(_trained(policy))
    if bad is not None:
        raise LocalProtocolError(f"the policy's {bad} is not finite: it is not written")


def _damaged(directory: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"checkpoint damaged: {directory} does not load: {what}")
