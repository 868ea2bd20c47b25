"""An adapter as a directory in PEFT's format, with the name of its base model.

`base.json` names the model that the adapter was trained on, by a hash of its weights as fp32, and
the precision they were held in. Free of torch, for the node's own process.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from swarm.errors import ConfigError

Held = Literal["float32", "bfloat16", "4bit"]  # of frozen weights
WEIGHTS_FILE: Final = "adapter_model.safetensors"
CONFIG_FILE: Final = "adapter_config.json"
BASE_FILE: Final = "base.json"
FORMAT: Final = 1
RANK_MAX: Final = 512
ALPHA_MAX: Final = 1_000_000.0  # more would soon be more than fp32 holds
TARGETS_MAX: Final = 64
CONFIG_BYTES_MAX: Final = 1_048_576
_NOT_OURS: Final = (  # settings of PEFT's that make something else of the same matrices
    "alpha_pattern",
    "exclude_modules",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
)


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The properties that two adapters must share to replace each other."""

    rank: int
    alpha: float  # what it adds is scaled by alpha / rank
    targets: tuple[str, ...]  # names of layers, such as `q_proj`; sorted


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """The description in an adapter's directory."""

    shape: AdapterShape
    base: str  # hash of the base model's weights, 64 hex digits
    held: Held = "float32"  # what these were in while it was trained


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG_FILE).exists()


def card_of(directory: Path) -> AdapterCard:
    config, base = _read(directory / CONFIG_FILE), _read(directory / BASE_FILE)
    targets = config.get("target_modules")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not is_plain or any(config.get(name) for name in _NOT_OURS):
        raise ConfigError(f"adapter {directory}: only plain LoRA is known here")
    if (
        not isinstance(rank, int)
        or not 1 <= rank <= RANK_MAX
        or not isinstance(alpha, int | float)
        or not 0 < alpha <= ALPHA_MAX
        or not isinstance(targets, list)
        or not 1 <= len(targets) <= TARGETS_MAX
        or not all(isinstance(name, str) for name in targets)
    ):
        raise ConfigError(f"adapter {directory}: {CONFIG_FILE} makes no sense")
    if base.get("format") != FORMAT or not isinstance(base.get("base"), str):
        raise ConfigError(f"adapter {directory}: {BASE_FILE} names no base")
    held = base.get("held", "float32")  # older versions do not say
    if held not in get_args(Held):
        raise ConfigError(f"adapter {directory}: {BASE_FILE}: held = {held!r} is not known here")
    shape = AdapterShape(rank, float(alpha), tuple(sorted(set(targets))))
    return AdapterCard(shape, base["base"], held)


def base_record(base: str, held: Held) -> str:
    """The content of `BASE_FILE`."""
    return json.dumps({"format": FORMAT, "base": base, "held": held})


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ConfigError(f"adapter {path.parent}: {path.name} is too large")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"adapter {path.parent}: {path.name}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"adapter {path.parent}: {path.name} is damaged") from None
    if not isinstance(content, dict):
        raise ConfigError(f"adapter {path.parent}: {path.name} is no JSON object")
    return content
