"""What an installation may lack, and how it is had: the extras of pyproject.toml."""

import sys
from importlib.util import find_spec
from typing import Final

from swarm.errors import ConfigError

# The extra that brings a package, by the name under which it is imported.
EXTRAS: Final = {
    "torch": "torch",
    "transformers": "torch",
    "peft": "torch",
    "gguf": "torch",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}


def install_line(what: str) -> str:
    """The command that adds `what` to this installation. One that uv made has no pip."""
    if find_spec("pip") is not None:
        return f"pip install {what}"
    return f"uv pip install --python {sys.executable} {what}"


def need(package: str) -> None:
    """Check that a package is installed before work starts.

    Raises:
        ConfigError: it is not; says what brings it.
    """
    if find_spec(package) is None:
        raise missing(package)


def missing(package: str) -> ConfigError:
    """What to say of one of these packages, or a part of it, that could not be imported."""
    extra = EXTRAS[package.partition(".")[0]]
    who = ", as every machine needs that trains or samples" if extra == "torch" else ""
    return ConfigError(
        f"this takes {package}, which is not installed: install 'swarm-node[{extra}]'{who}"
    )
