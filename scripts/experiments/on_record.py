"""Results that are not made twice: each is kept under a key of all that decides it."""

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
CODE = ("node", "swarm")
PACKAGES = ("torch", "transformers", "reasoning-gym")

Cell = TypeVar("Cell")


def code_of(*paths: str) -> str:
    """A hash of the code under these paths, with uncommitted and untracked files."""
    git = ["git", "-C", str(ROOT)]
    parts = [subprocess.check_output([*git, "rev-parse", f"HEAD:{path}"]) for path in paths]
    parts.append(subprocess.check_output([*git, "diff", "HEAD", "--", *paths]))
    others = [*git, "ls-files", "-z", "--others", "--exclude-standard", "--", *paths]
    for name in sorted(filter(None, subprocess.check_output(others).decode().split("\0"))):
        parts += [name.encode(), (ROOT / name).read_bytes()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def files_of(directory: Path) -> str:
    """A hash of a model directory's weights."""
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def key_of(facts: Mapping[str, Any], *paths: str) -> str:
    """A hash of all that decides a result: `facts`, the code, packages and processor."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    packages = [version(name) for name in PACKAGES]
    whole = [sorted(facts.items()), code_of(*(paths or CODE)), packages]
    whole += [platform.python_version(), cpu[:1]]
    return hashlib.sha256(json.dumps(whole, default=str).encode()).hexdigest()[:16]


def kept(directory: Path, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result under a key; made now if it is not on record."""
    file = directory / f"{key}.json"
    if not file.exists():
        result = make()
        directory.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.rename(file)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def run_missing(
    missing: Sequence[Cell],
    start: Callable[[Cell], "subprocess.Popen[bytes]"],
    parallel: int,
    name: str,
) -> None:
    """Run children for all cells, `parallel` at a time; end all if one fails."""
    waiting = list(missing)
    running: dict[subprocess.Popen[bytes], Cell] = {}
    started_s, finished = time.monotonic(), 0
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                cell = waiting.pop(0)
                running[start(cell)] = cell
            time.sleep(0.5)
            for child in [each for each in running if each.poll() is not None]:
                cell = running.pop(child)
                if child.returncode:
                    raise SystemExit(f"{name}: {cell} failed with {child.returncode}")
                finished += 1
                left = (time.monotonic() - started_s) / finished * (len(waiting) + len(running))
                print(f"{name}: {cell} done; about {left / 60:.0f} min left", flush=True)
    finally:
        for child in running:
            child.terminate()
