"""SkyPilot in an environment of its own, beside the project's: for tests alone.

    python scripts/sky_env.py         make it where it is not there yet, and print its Python

It takes 460 MB, and an older click than the project's. What SkyPilot does not bring itself is
the project's. SWARM_SKY names another environment's Python, one that has both.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKE_TIMEOUT_S = 900.0


def _requirement() -> str:
    """As the extra has it."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (requirement,) = table["project"]["optional-dependencies"]["sky"]
    return str(requirement)


def _cached() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarm-node"
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache / f"{_requirement().replace('==', '-')}-{tag}"


def _python(directory: Path) -> Path:
    return directory / "bin" / "python"


def find() -> Path | None:
    """Its Python, if it is there already."""
    if "SWARM_SKY" in os.environ:
        path = Path(os.environ["SWARM_SKY"])
        return path if os.access(path, os.X_OK) else None
    return _python(_cached()) if _beside(_cached()).exists() else None


def _beside(directory: Path) -> Path:
    """Has the project's packages found after its own. Written last: with it, all is there."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return directory / "lib" / version / "site-packages" / "swarm_node_beside.pth"


def fetch() -> Path | None:
    """Its Python, made if need be; `None` where that fails."""
    if find() is None and "SWARM_SKY" not in os.environ:
        try:
            _make(_cached())
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", None) or str(error).encode()
            sys.stderr.write(said.decode(errors="replace")[-2000:])
            return None
    return find()


def _make(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=0"]
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [str(_python(directory)), *install, "--only-binary=:all:", _requirement()],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=MAKE_TIMEOUT_S)
    _beside(directory).write_text(sysconfig.get_path("purelib") + "\n")


if __name__ == "__main__":
    there = fetch()
    if there is None:
        sys.exit(f"sky_env: {_requirement()} could not be installed; see above")
    print(there)
