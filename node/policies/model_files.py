"""Checks of a model's directory without torch, so that a node refuses one before it starts."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from node.interfaces.adapter_files import CONFIG_FILE as ADAPTER_FILE
from node.policies.presets import missing_directory
from node.policies.weight_diff import SUFFIX, check_whole
from swarm.errors import ConfigError
from swarm.texts import first_line, listed, printable

CONFIG_FILE: Final = "config.json"
WHOLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
NEEDED: Final = "it needs config.json, tokenizer files and safetensors"
_GGUF_START: Final = struct.Struct("<4sIQ")  # magic, version, number of tensors
_NAMES_SHOWN: Final = 3
_NAME_CHARS: Final = 100


def check_files(model: str) -> None:
    """Raise ConfigError unless a directory holds one whole model; names of a hub pass."""
    if no_directory := missing_directory(model):
        raise ConfigError(no_directory)
    directory = Path(model)
    if not directory.is_dir():
        return
    _refuse_adapter(directory)
    if not (directory / CONFIG_FILE).exists():
        raise ConfigError(f"model {model}: not a model directory; {NEEDED}")
    if not _read(directory, CONFIG_FILE).get("model_type"):
        raise ConfigError(f"model {model}: its {CONFIG_FILE} names no model_type; {NEEDED}")
    weights = _check_index(directory) if (directory / INDEX_FILE).exists() else [WHOLE_FILE]
    _refuse_strays(directory, weights)
    check_whole(model)


def text_note(model: Path) -> str | None:
    """The note about a model that takes more than text; None: it does not."""
    config = _read(model, CONFIG_FILE) if (model / CONFIG_FILE).exists() else {}
    if "text_config" not in config:
        return None
    others = sorted(name for name in config if name.endswith("_config") and name != "text_config")
    parts = printable(listed(others, _NAMES_SHOWN), _NAMES_SHOWN * _NAME_CHARS) or "other parts"
    return f"model {model}: trained and exported as text alone, without {parts}"


def check_gguf(file: Path) -> None:
    """Raise ConfigError for a file without tensors: a model of random weights would be made."""
    with file.open("rb") as source:
        start = source.read(_GGUF_START.size)
    if len(start) < _GGUF_START.size or not start.startswith(b"GGUF"):
        raise ConfigError(f"{file}: not a GGUF file")
    if _GGUF_START.unpack(start)[2] == 0:
        raise ConfigError(f"{file}: it holds a vocabulary alone, without weights")


def _refuse_adapter(directory: Path) -> None:
    """Refuse an adapter, which transformers would put on another model, or on the one beside it."""
    if not (directory / ADAPTER_FILE).exists():
        return
    if (directory / CONFIG_FILE).exists():
        raise ConfigError(
            f"model {directory}: an adapter ({ADAPTER_FILE}) lies beside a whole model: move one "
            "of them elsewhere"
        )
    named = _read(directory, ADAPTER_FILE).get("base_model_name_or_path")
    base = printable(str(named), _NAME_CHARS)
    raise ConfigError(
        f"model {directory}: an adapter for {base}, not a whole model: merge it into that, or "
        "write it whole with swarm-node export"
    )


def _refuse_strays(directory: Path, weights: Sequence[str]) -> None:
    """Refuse weights that are not the model's: some readers take all files of a directory."""
    found = sorted(each.name for each in directory.glob(SUFFIX))
    strays = [name for name in found if name not in weights]
    if strays and len(strays) < len(found):
        told = printable(listed(strays, _NAMES_SHOWN), _NAMES_SHOWN * _NAME_CHARS)
        raise ConfigError(
            f"model {directory}: it holds weights beside its own: {told}: move them elsewhere"
        )


def _check_index(directory: Path) -> list[str]:
    """The files of an index. Refuse one that names files which are not there, or beside a model in
    one file."""
    named = _read(directory, INDEX_FILE).get("weight_map")
    if not isinstance(named, dict):
        raise ConfigError(f"model {directory}: its {INDEX_FILE} has no weight_map")
    files = sorted(set(map(str, named.values())))
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        told = printable(listed(missing, _NAMES_SHOWN), _NAMES_SHOWN * _NAME_CHARS)
        raise ConfigError(f"model {directory}: its index names files that are not there: {told}")
    if (directory / WHOLE_FILE).is_file() and WHOLE_FILE not in files:
        raise ConfigError(
            f"model {directory}: it holds {WHOLE_FILE} and an index of other files: remove those "
            "that are old"
        )
    return files


def _read(directory: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((directory / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {directory}: its {name}: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model {directory}: its {name} is no JSON object")
    return found
