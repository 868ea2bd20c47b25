"""Optional packages and the extras of pyproject.toml that install them."""

import sys
from importlib.util import find_spec
from typing import Final

from swarm.errors import ConfigError

# Import name -> extra.
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
    """The command that installs `what` here; an environment of uv has no pip."""
    if find_spec("pip") is not None:
        return f"pip install {what}"
    return f"uv pip install --python {sys.executable} {what}"


def need(package: str) -> None:
    """Check that a package is installed.

    Raises:
        ConfigError: it is not; the error gives the install command.
    """
    if find_spec(package) is None:
        raise missing(package)


def missing(package: str) -> ConfigError:
    """Message for a package that could not be imported."""
    extra = EXTRAS[package.partition(".")[0]]
    who = ", as every machine needs that trains or samples" if extra == "torch" else ""
    return ConfigError(
        f"this takes {package}, which is not installed: install 'swarm-node[{extra}]'{who}"
    )
