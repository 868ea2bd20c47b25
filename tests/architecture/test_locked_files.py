"""What is installed is what was tested: versions, and the files that they are."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_HASHED = {"torch"}  # another file on each index
PINNED = re.compile(r"^([a-z0-9-]+)==([^ \\\n]+)", re.MULTILINE)


def test_each_version_has_the_hashes_of_its_files() -> None:
    versions = dict(PINNED.findall((ROOT / "constraints.txt").read_text()))
    text = (ROOT / "scripts" / "hashes.txt").read_text()
    assert dict(PINNED.findall(text)) == {
        name: version for name, version in versions.items() if name not in NOT_HASHED
    }
    entries = PINNED.split(text)[3::3]
    assert all(re.search("--hash=sha256:[0-9a-f]{64}", each) for each in entries)


def made_wheel(folder: Path, more_bytes: int = 0) -> str:
    """A wheel of a package with one module; the hash of its file."""
    folder.mkdir()
    path = folder / "one_word-1-py3-none-any.whl"
    info = "one_word-1.dist-info"
    held = {
        "one_word.py": "word = 'here'\n" + "#" * more_bytes,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: one-word\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in held.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            lines.append(f"{name},sha256={digest.decode().rstrip('=')},{len(text)}")
            wheel.writestr(name, text)
        wheel.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,", ""]))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(
    folder: Path, hashed: str, before: str = "", within: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Install that package from `folder` as `make` does, after a shell command `before`. `within`:
    the command that runs the shell."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("NOT RUN: uv is not installed here")
    (folder / ".venv").mkdir()
    (folder / "scripts").mkdir()
    (folder / "constraints.txt").write_text("one-word==1\n")
    (folder / "scripts" / "overrides.txt").write_text("")
    (folder / "scripts" / "hashes.txt").write_text(f"one-word==1 --hash=sha256:{hashed}\n")
    lines = [
        "set -euo pipefail",
        before,
        f"{sys.executable} -m venv --without-pip .venv",
        f"ln -s {uv} .venv/bin/uv",
        f"log=log; . {ROOT}/scripts/packages.sh; install one-word",
        "test -e .venv/lib/python*/site-packages/one_word.py",
    ]
    return subprocess.run(
        [*within, "bash", "-c", "\n".join(lines)],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "UV_FIND_LINKS": str(folder / "wheels"), "UV_OFFLINE": "1",
             "UV_NO_INDEX": "1", "UV_CACHE_DIR": str(folder / "cache"), "INSTALLER": "uv"},
    )  # fmt: skip


@pytest.mark.parametrize("is_right", [True, False])
def test_a_file_of_another_hash_is_not_installed(is_right: bool, tmp_path: Path) -> None:
    digest = made_wheel(tmp_path / "wheels")
    done = install(tmp_path, digest if is_right else "0" * 64)
    assert (done.returncode == 0) == is_right, done.stderr
    assert ("nothing was installed" in done.stderr) == (not is_right)
    assert "pip tries" not in done.stderr
    assert bool(list((tmp_path / ".venv").rglob("one_word.py"))) == is_right


IN_NAMESPACE = ("unshare", "--map-root-user", "--mount")


@pytest.mark.parametrize(("disk_mb", "fits"), [(1, False), (100, True)])
def test_a_full_disk_is_one_line_and_not_tried_again(
    disk_mb: int, fits: bool, tmp_path: Path
) -> None:
    tried = ["bash", "-c", " ".join([*IN_NAMESPACE, "true"])]  # there may be no such command
    if subprocess.run(tried, check=False, capture_output=True).returncode:
        pytest.skip("NOT RUN: no namespace of mounts here")
    digest = made_wheel(tmp_path / "wheels", more_bytes=2**20)
    mount = f"mount -t tmpfs -o size={disk_mb}m none .venv"
    done = install(tmp_path, digest, mount, IN_NAMESPACE)
    assert (done.returncode == 0) == fits, done.stderr
    if not fits:
        assert re.fullmatch(r"The disk is full: [01] MB are left for .+\n", done.stderr)
