"""Rules of a run that name an installed package of somebody else, and care for its code.

A run file of one's own may leave out the hash of package and tasks. Two fresh processes find it
when the file is read (`package_identity.py`); it is sent, and part of the run's id.
"""

import hashlib
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field

from node.envs.base import wrong_parameters
from node.system.extras import install_line
from swarm.errors import ConfigError
from swarm.texts import printable

TASKS_MAX: Final = 100_000
LOADED_MAX: Final = 128  # packages in memory: the bound on a run's environments
RULES_CACHED_MAX: Final = 64
PACKAGE_FILES_MAX: Final = 10_000
PACKAGE_BYTES_MAX: Final = 1 << 30
WHY_CHARS_MAX: Final = 200
MODULE: Final = r"[a-z_][a-z0-9_]{0,63}"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PackageRules(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    environment: ClassVar[str]

    @property
    def package(self) -> str:
        """The package's top-level module."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Its name in messages, such as `taskset date_shift`."""
        raise NotImplementedError

    def refusal(self, why: str) -> ConfigError:
        return wrong_parameters(self.environment, f"{self.label}: {why}")

    def check_library(self) -> None:
        """ConfigError if a library that the package needs is missing."""

    def places(self) -> list[Path]:
        """The directories of the package, found without importing it; ConfigError if it is not
        installed."""
        found = find_spec(self.package)
        if found is None or (found.origin is None and not found.submodule_search_locations):
            raise self.refusal(f"is not installed; {install_line('ITS-PACKAGE')}")
        if found.submodule_search_locations:
            return [Path(each) for each in found.submodule_search_locations]
        return [Path(found.origin or "")]

    def digest(self) -> str:
        """A hash of all files of the package except compiled ones; ConfigError if it is not
        installed, too large, or cannot be read."""
        digest = hashlib.sha256()
        files, size_bytes = 0, 0
        try:
            for place in self.places():
                inside = sorted(place.rglob("*")) if place.is_dir() else [place]
                for path in inside:
                    if path.suffix == ".pyc" or not path.is_file():
                        continue
                    files, size_bytes = files + 1, size_bytes + path.stat().st_size
                    if files > PACKAGE_FILES_MAX or size_bytes > PACKAGE_BYTES_MAX:
                        raise self.refusal(
                            f"its package has over {PACKAGE_FILES_MAX} files or "
                            f"{PACKAGE_BYTES_MAX >> 30} GiB; is it a package of its own?"
                        )
                    name = path.relative_to(place).as_posix() if place.is_dir() else path.name
                    with path.open("rb") as file:
                        content = hashlib.file_digest(file, "sha256").hexdigest()
                    digest.update(json.dumps([name, content]).encode())
        except OSError as error:
            raise self.refusal(f"{error.filename}: {error.strerror}") from None
        return digest.hexdigest()

    def check_hash(self, wanted: str, found: str) -> None:
        """ConfigError if the run has another hash than what is installed."""
        if found != wanted:
            raise self.refusal(
                f"this run has {wanted[:12]}…, and what is installed "
                f"makes {found[:12]}…; install the package that the run's founder has"
            )

    @contextmanager
    def foreign_code(self, what: str) -> Iterator[None]:
        """Turn any failure of the package's code into a ConfigError of one line."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise self.refusal(f"{what} ({printable(why, WHY_CHARS_MAX)})") from error


def awaited(name: str, result: Any) -> Any:
    """The result of a function that may be async, without an event loop, for which a sandbox has no
    sockets; RuntimeError if it waits for something outside."""
    if not isinstance(result, Coroutine):
        return result
    try:
        result.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        result.close()
    raise RuntimeError(f"{name} waits for something outside; it must be plain arithmetic")
