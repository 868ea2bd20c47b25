"""Model directories made of GGUF files: weights in bf16, configuration, tokenizer, chat template.

Quantised weights often lie halfway between two bf16 numbers. Rounded after a first small step of
training, all would move by half a number, and log-probs by 0.5 in the mean. So they are rounded
here.

`python -m node.policies.gguf_models FILE DIRECTORY` runs as a child, without torch in the node."""

import shutil
import sys
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from node.policies import tensor_files as tensors
from swarm.errors import ConfigError
from swarm.storage import make_shared

_READ_ERRORS: Final = (OSError, ValueError, KeyError, ImportError, RuntimeError)


def convert(file: Path, directory: Path) -> None:
    """Make `directory`, which must not exist, from a GGUF file.

    Raises:
        ConfigError: transformers cannot read the file as a causal LM.
    """
    transformers_logging.disable_progress_bar()
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model: Any = tensors.load(file.parent, torch.float32, gguf_file=file.name)
        tokenizer: Any = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False
        )
    except _READ_ERRORS as error:
        line = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file}: cannot be read as a model: {line}") from None
    _unquantised(model).to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    make_shared(partial)  # safetensors makes its files private
    partial.rename(directory)


def _unquantised(model: Any) -> Any:
    """The same weights in a model without a trace of quantisation: a model from GGUF refuses to be
    saved."""
    fields = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    config = type(model.config).from_dict(fields)
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return plain


def main(file: str, directory: str) -> int:
    try:
        convert(Path(file), Path(directory))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
