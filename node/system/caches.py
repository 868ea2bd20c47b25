"""Cache directory shared by all nodes of a user."""

import os
from pathlib import Path


def cache_directory(cache_dir: Path | None) -> Path:
    """`cache_dir` None: in the user's cache."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (cache_dir or user_cache / "swarm-node").absolute()
