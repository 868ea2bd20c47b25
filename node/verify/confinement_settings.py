"""Confinement of a verifier's worker: the paths it may read, and its environment variables."""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from node.config import NodeConfig, RunConfig
from node.envs import registry
from node.envs.base import Reads
from node.sandbox.namespaces import SCRATCH
from node.system.caches import cache_directory, home_directory
from node.system.child_environment import CACHE_VARIABLE, child_environ, confined_environ
from swarm.errors import ConfigError


def run_needs_sandbox(run: RunConfig) -> bool:
    """True if an environment of the run may be scored only in a sandbox."""
    return any(registry.needs_sandbox(spec.name) for spec in run.environments)


def confinement_of(config: NodeConfig) -> dict[str, Any]:
    """The confinement in a worker's first request."""
    trust = config.verify_sandbox
    unread = any(registry.is_unread(spec.name) for spec in config.run.environments)
    return {
        "trust": trust,
        "apart": unread and trust != "off",
        "runs_code": any(registry.runs_code(spec.name) for spec in config.run.environments),
        "hidden": [str(each) for each in (config.data_dir, config.key_path, *_homes())],
        "read": [*map(str, config.verify_read), *_places(config.run)],
    }


def _homes() -> list[Path]:
    with suppress(ConfigError):
        return [home_directory()]
    return []


def worker_environ(*, confined: bool) -> dict[str, str]:
    """Our import path, one thread for each library, and one order of sets on all nodes. A confined
    worker gets nothing else but what Python needs, and no home."""
    environ = confined_environ() if confined else child_environ()
    if confined:
        environ |= {"HOME": str(SCRATCH), "TMPDIR": str(SCRATCH), "PYTHONDONTWRITEBYTECODE": "1"}
        cache = cache_directory(None)
        environ[CACHE_VARIABLE] = str(cache)
        # matplotlib, which reasoning-gym brings, needs a folder that looks writable. Without
        # namespaces there is no scratch folder; in this one Landlock lets it write nothing.
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
        environ["MPLCONFIGDIR"] = str(cache)
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _places(run: RunConfig) -> list[str]:
    """Directories of environments' files, and of plug-in packages, which an editable install keeps
    off the import path."""
    places: list[str] = []
    for spec in run.environments:
        source = registry.environment(spec.name)
        if isinstance(source, Reads):
            places += map(str, source.reads(spec.parameters))
        package = registry.package_of(spec.name)
        found = find_spec(package) if package else None
        if found is not None:
            places += [*(found.submodule_search_locations or ()), *filter(None, [found.origin])]
    return places
