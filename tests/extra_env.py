"""Extras in an environment of their own, beside the project's: for tests alone.

    python -m tests.extra_env sky          make it where it is not there yet, and print its Python
    python -m tests.extra_env verifiers
    python -m tests.extra_env trackers     TensorBoard, Weights & Biases, trackio

SkyPilot takes 460 MB, and an older click than the project's; verifiers brings some forty packages;
trackio wants an older pillow. What an extra does not bring itself is the project's. SWARM_SKY,
SWARM_VERIFIERS and SWARM_TRACKERS name another environment's Python, one that has both.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKE_TIMEOUT_S = 900.0
EXTRAS = {
    "sky": ("sky",),
    "verifiers": ("verifiers",),
    "trackers": ("tensorboard", "wandb", "trackio"),
}


def _requirements(name: str) -> list[str]:
    """As the extras have them."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [each for extra in EXTRAS[name] for each in table["optional-dependencies"][extra]]


def _cached(extra: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarm-node"
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = "-".join(re.sub("[^a-z0-9.]+", "-", each) for each in _requirements(extra))
    return cache / f"{name}-{tag}"


def _python(directory: Path) -> Path:
    return directory / "bin" / "python"


def _named(extra: str) -> str | None:
    return os.environ.get(f"SWARM_{extra.upper()}")


def find(extra: str) -> Path | None:
    """Its Python, if it is there already."""
    if (named := _named(extra)) is not None:
        return Path(named) if os.access(named, os.X_OK) else None
    return _python(_cached(extra)) if _stamp(extra).exists() else None


def _stamp(extra: str) -> Path:
    """Written last: with it, all is there. It names the environment that this one is beside."""
    beside = sysconfig.get_path("purelib").strip("/").replace("/", "-")
    return _cached(extra) / f"beside-{beside}"


def fetch(extra: str) -> Path | None:
    """Its Python, made if need be; `None` where that fails."""
    if find(extra) is None and _named(extra) is None:
        try:
            with _one_at_a_time(extra):
                if find(extra) is None:
                    _make(extra)
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", None) or str(error).encode()
            sys.stderr.write(said.decode(errors="replace")[-2000:])
            return None
    return find(extra)


@contextmanager
def _one_at_a_time(extra: str) -> Iterator[None]:
    """Processes of one test run want it at the same moment, and making begins with removing."""
    cached = _cached(extra)
    lock = cached.with_name(f"{cached.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(extra: str) -> None:
    directory = _cached(extra)
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "lib" / version / "site-packages"
    # The project's packages are found after its own, and what they have is not installed again.
    (packages / "swarm_node_beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=0"]
    _run([str(_python(directory)), *install, "--only-binary=:all:", *_requirements(extra)])
    _stamp(extra).touch()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=MAKE_TIMEOUT_S)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        sys.exit(f"usage: python -m tests.extra_env {'|'.join(EXTRAS)}")
    there = fetch(sys.argv[1])
    if there is None:
        sys.exit(f"extra_env: {sys.argv[1]} could not be installed; see above")
    print(there)
