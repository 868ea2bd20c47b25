"""Configurations that name code of their own, which loaders would fetch and run (`auto_map`)."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

AUTO_MAP: Final = "auto_map"
_SUFFIX: Final = "config.json"  # of all files in which loaders look for it
_BYTES_MAX: Final = 16 << 20


def names_code(directory: Path, names: Iterable[str] | None = None) -> str | None:
    """The first of these files that names code, or that is too large to be looked through; None:
    none does. `names`: relative ones; None: of all files right in the directory. Blocks."""
    if names is None:
        names = [path.name for path in directory.glob(f"*{_SUFFIX}")]
    for name in sorted(name for name in names if name.endswith(_SUFFIX)):
        path = directory / name
        try:
            if path.stat().st_size > _BYTES_MAX or _is_named(json.loads(path.read_bytes())):
                return name
        except (OSError, ValueError, RecursionError):
            continue  # nothing that a loader could read
    return None


def _is_named(found: Any) -> bool:
    """True if there is such an entry, at any depth."""
    left = [found]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if each.get(AUTO_MAP):
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False
