"""Checks that a model's files hold exactly the tensors of its configuration. transformers fills up
missing tensors with random numbers, and leaves out surplus ones."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from swarm.errors import ConfigError

# Masks that old releases kept beside the weights of attention, where no parameter has that name.
_MASKS: Final = re.compile(r"(^|\.)(attn|attention|self_attention)\.(masked_)?bias$")
_NAMES_SHOWN: Final = 3


def load(model: str | Path, dtype: torch.dtype, **more: Any) -> PreTrainedModel:
    """A causal LM from a directory, a hub id or a GGUF file, with the arguments of
    `from_pretrained`. ConfigError: its tensors are not those of its configuration, or not finite.
    """
    _refuse_two_sets(Path(model))
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
        raise ConfigError(f"model {model}: {_first_line(error)}") from error
    network: PreTrainedModel = loaded[0]
    if wrong := _wrong(loaded[1]) or _not_finite(network):
        raise ConfigError(f"model {model}: {wrong}")
    return network


def _wrong(told: Mapping[str, Any]) -> str | None:
    """The differences between files and configuration, from transformers' loading report."""
    if mismatched := sorted(told["mismatched_keys"]):
        name, in_file, described = mismatched[0]
        return (
            f"tensor {name} is {tuple(in_file)} in its files and {tuple(described)} by its "
            "config.json"
        )
    if missing := told["missing_keys"]:
        return f"its files lack tensors that its config.json describes: {_some(missing)}"
    if surplus := [name for name in told["unexpected_keys"] if not _MASKS.search(name)]:
        return f"its files hold tensors that its config.json does not describe: {_some(surplus)}"
    return None


def _not_finite(network: PreTrainedModel) -> str | None:
    name = not_finite(network.state_dict())
    return None if name is None else f"tensor {name} holds numbers that are not finite"


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a tensor with a number that is not finite."""
    for name, value in tensors.items():
        if not value.is_floating_point() or bool(torch.isfinite(value.sum())):
            continue
        if not bool(torch.isfinite(value).all()):  # else it was the sum alone
            return name
    return None


def _refuse_two_sets(directory: Path) -> None:
    """Refuse an index of other files beside a whole model: it would win, and one of them is old."""
    index, whole = directory / SAFE_WEIGHTS_INDEX_NAME, directory / SAFE_WEIGHTS_NAME
    if whole.is_file() and index.is_file() and SAFE_WEIGHTS_NAME not in index.read_text():
        raise ConfigError(
            f"model {directory}: it holds {SAFE_WEIGHTS_NAME} and an index of other files: remove "
            "those that are old"
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    over = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {over} more" if over > 0 else "")


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
