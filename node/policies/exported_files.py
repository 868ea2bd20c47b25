"""Configuration and tokenizer of an export: those of the model that was trained, so that it opens
wherever that one did. What transformers 5 writes anew is spelled so that transformers 4 reads it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedModel

from swarm.weights.delta import AUTO_MAP

CONFIG: Final = "config.json"
_TOKENIZER: Final = "tokenizer.json"  # without it, the others do not say what was read
_SETTINGS: Final = "tokenizer_config.json"
_TEXTS: Final = (
    *(_TOKENIZER, _SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
)
_SCALINGS: Final = frozenset(
    {"linear", "dynamic", "yarn", "longrope", "llama3"}
)  # of transformers 4
_CLASS: Final = "PreTrainedTokenizerFast"  # reads `tokenizer.json` as it is


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a model that its exports hold as well, by name."""
    names = (CONFIG, *_TEXTS) if (directory / _TOKENIZER).exists() else (CONFIG,)
    paths = [path for name in names for path in directory.glob(name)]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def write_tokenizer(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Write a model's tokenizer files; False if it has none that can be copied."""
    if _TOKENIZER not in files:
        return False
    for name in files.keys() - {CONFIG}:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(files[name])
    return True


def respell(
    directory: Path, files: Mapping[str, bytes], model: PreTrainedModel, dtype: str
) -> None:
    """Complete an export of a model that transformers wrote with numbers of type `dtype`. The
    model's own configuration stays if it is of the same class."""
    own = json.loads(files.get(CONFIG, b"{}"))
    path = directory / CONFIG
    is_same = own.get("architectures") == [type(model).__name__]
    config = own if is_same else json.loads(path.read_bytes())
    config.pop(AUTO_MAP, None)
    config |= {"dtype": dtype, "torch_dtype": dtype}
    if config.get("rope_parameters") and "rope_theta" not in config:  # written by transformers 5
        names = model.config.attribute_map.items()
        aliases = {old: config[new] for old, new in names if new in config and old not in config}
        config |= _rotations(config["rope_parameters"]) | aliases
    _write(path, config)
    path = directory / _SETTINGS
    if path.exists():
        before = json.loads(path.read_bytes())
        after = {name: value for name, value in before.items() if name != AUTO_MAP}
        if (directory / _TOKENIZER).exists():
            after["tokenizer_class"] = _CLASS
        if isinstance(after.get("extra_special_tokens"), list):
            after["additional_special_tokens"] = after.pop("extra_special_tokens")
        if after != before:
            _write(path, after)


def _rotations(told: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotary embeddings as transformers 4 spells them."""
    whole = told.get("full_attention", told)
    found = {"rope_theta": whole["rope_theta"]} if "rope_theta" in whole else {}
    if "sliding_attention" in told:
        found["rope_local_base_freq"] = told["sliding_attention"]["rope_theta"]
    scaling = {name: value for name, value in whole.items() if name != "rope_theta"}
    if scaling.get("rope_type") in _SCALINGS:
        found["rope_scaling"] = scaling
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
