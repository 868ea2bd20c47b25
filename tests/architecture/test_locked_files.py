"""What is installed is what was tested: versions, and the files that they are."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
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


def made_wheel(folder: Path) -> str:
    """A wheel of a package with one module; the hash of its file."""
    folder.mkdir()
    path = folder / "one_word-1-py3-none-any.whl"
    info = "one_word-1.dist-info"
    held = {
        "one_word.py": "word = 'here'\n",
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


@pytest.mark.parametrize("is_right", [True, False])
def test_a_file_of_another_hash_is_not_installed(is_right: bool, tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("NOT RUN: uv is not installed here")
    digest = made_wheel(tmp_path / "wheels")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / ".venv" / "bin" / "uv").symlink_to(uv)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "constraints.txt").write_text("one-word==1\n")
    (tmp_path / "scripts" / "overrides.txt").write_text("")
    hashed = digest if is_right else "0" * 64
    (tmp_path / "scripts" / "hashes.txt").write_text(f"one-word==1 --hash=sha256:{hashed}\n")
    script = f"set -euo pipefail; log=log; . {ROOT}/scripts/packages.sh; install one-word"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "UV_FIND_LINKS": str(tmp_path / "wheels"), "UV_OFFLINE": "1",
             "UV_NO_INDEX": "1", "UV_CACHE_DIR": str(tmp_path / "cache"), "INSTALLER": "uv"},
    )  # fmt: skip
    assert (done.returncode == 0) == is_right, done.stderr
    assert ("nothing was installed" in done.stderr) == (not is_right)
    assert "pip tries" not in done.stderr
    assert bool(list((tmp_path / ".venv").rglob("one_word.py"))) == is_right
