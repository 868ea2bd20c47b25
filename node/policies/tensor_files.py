"""Checks that a model's files hold exactly the tensors of its configuration. transformers fills up
missing tensors with random numbers, and leaves out surplus ones."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm.errors import ConfigError
from swarm.texts import first_line, listed

# Masks that old releases kept beside the weights of attention, where no parameter has that name.
_MASKS: Final = re.compile(r"(^|\.)(attn|attention|self_attention)\.(masked_)?bias$")
_NAMES_SHOWN: Final = 3


def load(model: str | Path, dtype: torch.dtype, **more: Any) -> PreTrainedModel:
    """A causal LM from a directory, a hub id or a GGUF file, with the arguments of
    `from_pretrained`. ConfigError: its tensors are not those of its configuration, or not finite.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # told in one line, as all else
            output_loading_info=True,
            **more,
        )
    except RuntimeError as error:  # tensors that cannot be put together
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"model {model}: {line}") from error
    network: PreTrainedModel = loaded[0]
    if wrong := _wrong(loaded[1]):
        raise ConfigError(f"model {model}: {wrong}")
    if not _is_tied_as_told(network):
        raise ConfigError(
            f"model {model}: its config.json ties the head to the embeddings, and its files hold "
            "another head: set tie_word_embeddings to false there"
        )
    if name := not_finite(network.state_dict()):
        raise ConfigError(f"model {model}: tensor {name} holds numbers that are not finite")
    return network


def _wrong(told: Mapping[str, Any]) -> str | None:
    """The differences between files and configuration, from transformers' loading report."""
    if mismatched := sorted(told["mismatched_keys"]):
        name, in_file, described = mismatched[0]
        return (
            f"tensor {name} is {tuple(in_file)} in its files and {tuple(described)} by its "
            "config.json"
        )
    if missing := listed(sorted(told["missing_keys"]), _NAMES_SHOWN):
        return f"its files lack tensors that its config.json describes: {missing}"
    unexpected = sorted(name for name in told["unexpected_keys"] if not _MASKS.search(name))
    if surplus := listed(unexpected, _NAMES_SHOWN):
        return f"its files hold tensors that its config.json does not describe: {surplus}"
    return None


def _is_tied_as_told(network: PreTrainedModel) -> bool:
    """False if a head that the configuration ties has weights of its own, which stay so."""
    head, words = network.get_output_embeddings(), network.get_input_embeddings()
    is_told = getattr(network.config.get_text_config(), "tie_word_embeddings", False)
    is_tied = bool(is_told and network._tied_weights_keys)  # some classes never tie it
    return not (is_tied and isinstance(head, torch.nn.Linear)) or head.weight is words.weight


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a tensor with a number that is not finite."""
    for name, value in tensors.items():
        if not value.is_floating_point() or bool(torch.isfinite(value.sum())):
            continue
        if not bool(torch.isfinite(value).all()):  # else it was the sum alone
            return name
    return None


def read(file: Path, what: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; ConfigError, of `what`, if it is damaged."""
    try:
        return load_file(file)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{what}: {first_line(error)}") from error
