"""The parameters of the environment `verifiers`: the taskset, its set-up and its form of answers.

A run file of one's own may leave out the hash of the taskset's package, configuration and tasks.
Two fresh processes find it when the file is read; it is sent, and part of the run's id.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from node.envs.base import checked, wrong_parameters
from node.system.extras import install_line
from swarm.errors import ConfigError

NAME: Final = "verifiers"
HOLE: Final = "{}"  # where the answer goes in `reply`
TASKS_MAX: Final = 100_000
RULES_CACHED_MAX: Final = 64
PACKAGE_FILES_MAX: Final = 10_000
PACKAGE_BYTES_MAX: Final = 1 << 30


class TasksetRules(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    taskset: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")]
    """The module of an installed package, which exports one `Taskset`."""
    config: dict[str, JsonValue] = {}
    """The taskset's own configuration, without its `id`."""
    tasks: Annotated[int, Field(ge=1, le=TASKS_MAX)] | None = None
    """Number of tasks from the first one; None: all. A taskset without end needs it."""
    answer: Annotated[str, Field(min_length=1, max_length=64)] = "answer"
    """The field of a task's data that has a right answer."""
    reply: Annotated[str, Field(max_length=256)] = HOLE
    """The reply that the taskset sees, with the answer in place of `{}`."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = ""
    """The hash of package, configuration and tasks."""

    def reply_of(self, answer: str) -> str:
        """The part of a completion that the taskset sees."""
        return self.reply.replace(HOLE, answer)


def rules_from(parameters: Mapping[str, Any]) -> TasksetRules:
    hints = {"taskset": "name the module of an installed taskset"}
    rules = checked(TasksetRules, parameters, NAME, hints=hints)
    if rules.reply.count(HOLE) != 1:
        raise wrong(f"reply = {rules.reply!r}: must have {HOLE} once, where the answer goes")
    if "id" in rules.config:
        raise wrong("config.id: is the parameter taskset; remove it")
    return rules


@lru_cache(maxsize=RULES_CACHED_MAX)
def rules_of(parameters: str) -> TasksetRules:
    return rules_from(json.loads(parameters))


def library_version() -> str:
    """The installed version of `verifiers`; ConfigError if there is none."""
    try:
        return version(NAME)
    except PackageNotFoundError:
        line = install_line("'swarm-node[verifiers]'")
        raise wrong(f"its library is missing: {line}") from None


def places_of(taskset: str) -> list[Path]:
    """The directories of a taskset's package, found without importing it; ConfigError if it is not
    installed."""
    found = find_spec(taskset)
    if found is None or (found.origin is None and not found.submodule_search_locations):
        raise wrong(f"taskset {taskset}: is not installed; {install_line('ITS-PACKAGE')}")
    if found.submodule_search_locations:
        return [Path(each) for each in found.submodule_search_locations]
    return [Path(found.origin or "")]


def package_digest(taskset: str) -> str:
    """A hash of all files of a taskset's package except compiled ones; ConfigError if it is not
    installed, too large, or cannot be read."""
    digest = hashlib.sha256()
    files, size_bytes = 0, 0
    try:
        for place in places_of(taskset):
            inside = sorted(place.rglob("*")) if place.is_dir() else [place]
            for path in inside:
                if path.suffix == ".pyc" or not path.is_file():
                    continue
                files, size_bytes = files + 1, size_bytes + path.stat().st_size
                if files > PACKAGE_FILES_MAX or size_bytes > PACKAGE_BYTES_MAX:
                    raise wrong(
                        f"taskset {taskset}: its package has over {PACKAGE_FILES_MAX} files or "
                        f"{PACKAGE_BYTES_MAX >> 30} GiB; is it a package of its own?"
                    )
                name = path.relative_to(place).as_posix() if place.is_dir() else path.name
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(json.dumps([name, content]).encode())
    except OSError as error:
        raise wrong(f"taskset {taskset}: {error.filename}: {error.strerror}") from None
    return digest.hexdigest()


def wrong(what: str) -> ConfigError:
    return wrong_parameters(NAME, what)
