"""Cache directory shared by all nodes of a user."""

import os
from pathlib import Path

from node.system.child_environment import CACHE_VARIABLE
from swarm.errors import ConfigError


def home_directory() -> Path:
    """ConfigError: the user has none."""
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            f"this user has no home directory: set HOME, or {CACHE_VARIABLE} for what is cached"
        ) from None


def cache_directory(cache_dir: Path | None) -> Path:
    """`cache_dir` None: as the environment names it, else in the user's cache."""
    named = cache_dir or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME") or home_directory() / ".cache"
    return (Path(user_cache) / "swarm-node").absolute()
