"""The differences between two directories of weights. Blocks; for threads. Files are read by
offset: a mapped file that is cut short kills the process."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from swarm.errors import ChildFailed, ConfigError, StorageFailed
from swarm.weights.manifest import (
    HEADER_DTYPE,
    READ_BYTES,
    BadLayout,
    Entry,
    header_size,
    parse_header,
    read_at,
)

SUFFIX: Final = "*.safetensors"
_LAYER: Final = re.compile(r"(?:^|\.)\d+\.")  # the outermost number in a tensor's name

Tensors = dict[str, tuple[Path, Entry]]  # by name


def check_alike(old: Path, new: Path) -> None:
    """Raise ChildFailed if the weights differ in names, shapes or types, or the new ones cannot be
    read. Checked before a load, which cannot be taken back."""
    expected, found = kinds_of(old), kinds_of(new)
    wrong = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if wrong:
        raise ChildFailed(
            f"weights {new}: {wrong[0]} is {found.get(wrong[0], 'missing')}, not "
            f"{expected.get(wrong[0], 'of this model')}"
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """The tensors to load from a directory when another one is loaded."""

    names: tuple[str, ...]  # of tensors, sorted
    total: int  # how many tensors there are


def changed_tensors(old: Path, new: Path) -> Changes:
    """Names of the tensors of `new` whose content is not that of `old`, with all others of their
    layers: an engine may keep several of them in one. ChildFailed: a file cannot be read."""
    before, after = tensors_of(old), tensors_of(new)
    try:
        changed = {
            name
            for name, place in after.items()
            if name not in before or not _same(before[name], place)
        }
    except (OSError, StorageFailed) as error:
        raise ChildFailed(f"weights {new}: {error}") from error
    return Changes(tuple(sorted(with_layers(changed, after))), len(after))


def all_tensors(directory: Path) -> Changes:
    names = tuple(sorted(tensors_of(directory)))
    return Changes(names, len(names))


def with_layers(changed: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """`changed`, and all `names` that are of the same layers."""
    changed = frozenset(changed)
    layers = {layer_of(name) for name in changed} - {None}
    return changed | {name for name in names if layer_of(name) in layers}


def layer_of(name: str) -> str | None:
    """The part of its name that the tensors of one layer share; None outside of the layers."""
    found = _LAYER.search(name)
    return name[: found.end()] if found else None


def tensors_of(directory: Path) -> Tensors:
    """The tensors of a model directory; ChildFailed: there are none, or a file is damaged."""
    files = sorted(directory.glob(SUFFIX))
    if not files:
        raise ChildFailed(f"weights {directory}: no safetensors file in it")
    tensors: Tensors = {}
    for path in files:
        try:
            entries = _entries(path)
        except (OSError, BadLayout) as error:
            raise ChildFailed(f"weights {path}: {error}") from error
        tensors |= {entry.name: (path, entry) for entry in entries}
    return tensors


def check_whole(model: str) -> None:
    """Raise ConfigError if a file of a model on this machine is not as long as its header says."""
    for path in sorted(Path(model).glob(SUFFIX)):
        try:
            _entries(path)
        except (OSError, BadLayout) as error:
            raise ConfigError(
                f"{path.name} of the model is damaged, fetch or copy it again ({error}): {model}"
            ) from None


def kinds_of(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and shapes of a directory's tensors, by name."""
    return {name: (each.dtype, each.shape) for name, (_, each) in tensors_of(directory).items()}


def _entries(path: Path) -> list[Entry]:
    with path.open("rb") as file:
        start = file.read(8)
        entries = parse_header(start + file.read(header_size(start) - 8), path.name)
    end = entries[-1].offset_bytes + entries[-1].size_bytes
    if end != path.stat().st_size:
        raise BadLayout(f"its header tells of {end} bytes, it has {path.stat().st_size}")
    return [entry for entry in entries if entry.dtype != HEADER_DTYPE]


def _same(one: tuple[Path, Entry], other: tuple[Path, Entry]) -> bool:
    (path, entry), (other_path, other_entry) = one, other
    if entry.size_bytes != other_entry.size_bytes:
        return False
    for start in range(0, entry.size_bytes, READ_BYTES):
        size_bytes = min(READ_BYTES, entry.size_bytes - start)
        ours = read_at(path, entry.offset_bytes + start, size_bytes)
        theirs = read_at(other_path, other_entry.offset_bytes + start, size_bytes)
        if not np.array_equal(ours, theirs):
            return False
    return True
