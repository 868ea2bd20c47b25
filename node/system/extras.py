"""Optional packages and the extras of pyproject.toml that install them."""

import re
import sys
from functools import cache
from importlib.metadata import requires
from importlib.util import find_spec
from shlex import quote
from typing import Final

from swarm.errors import ConfigError

PROJECT: Final = "swarm-node"
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


@cache
def packages_of(extra: str) -> tuple[str, ...]:
    """The requirements of an extra, with those of the extras in it."""
    found: list[str] = []
    for line in requires(PROJECT) or ():
        requirement, _, marker = line.partition(";")
        if not re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            continue
        inner = re.fullmatch(rf"{PROJECT}\[(.+)\]", requirement.strip())
        names = inner[1].split(",") if inner else ()
        found += [each for name in names for each in packages_of(name)]
        found += [] if inner else [requirement.strip()]
    return tuple(found)


def extra_line(extra: str) -> str:
    """The command that installs the packages of an extra, by their own names: that of this project
    is on no index, and pip would compile what it requires."""
    return install_line(" ".join(map(quote, packages_of(extra))))


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
    return ConfigError(f"this takes {package}, which is not installed{who}: {extra_line(extra)}")
