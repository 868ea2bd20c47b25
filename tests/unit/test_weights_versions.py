"""Versions on disk: complete or absent, `current` one of them, the newest kept."""

import os
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from swarm.errors import LocalProtocolError, RemoteProtocolError, StorageFailed
from swarm.weights import manifest
from swarm.weights.version_store import LocalVersion, Versions
from tests.weights_samples import is_whole, manifest_of, write_files

ROOT = Path(__file__).parents[2]
KILLS = 3


def add(versions: Versions, version: int) -> LocalVersion:
    write_files(versions.staging(version), version)
    return versions.commit(manifest.encode_manifest(manifest_of(version)))


def held(versions: Versions) -> list[int]:
    return [local.version for local in versions.held()]


def faults(directory: Path) -> list[str]:
    """What a reader of the directory could take for whole and is not."""
    found = []
    for path in (directory / "versions").iterdir():
        if path.suffix == "" and not is_whole(path, int(path.name[1:])):
            found.append(f"{path.name} is in parts")
        if path.suffix == "" and not path.with_suffix(".manifest").is_file():
            found.append(f"{path.name} has no manifest")
    current = directory / "current"
    if current.is_symlink() and not current.is_dir():
        found.append("current leads nowhere")
    return found


def test_a_version_is_there_once_it_is_committed(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    write_files(versions.staging(12), 12)
    assert (held(versions), versions.get(12)) == ([], None)
    local = versions.commit(manifest.encode_manifest(manifest_of(12)))
    assert versions.get(12) == local
    assert local.directory == tmp_path / "versions" / "v00000012"
    assert is_whole(local.directory, 12)
    assert versions.states() == {12: manifest_of(12).state}
    assert manifest.decode_manifest(versions.manifest_body(12)) == manifest_of(12)
    assert local.size_bytes == sum(path.stat().st_size for path in local.directory.iterdir())


def test_a_restart_finds_versions_and_which_of_them_serves(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    locals_ = [add(versions, version) for version in (3, 4)]
    versions.make_current(3)
    again = Versions(tmp_path)
    assert again.held() == tuple(locals_)
    assert again.current() == locals_[0]
    assert (tmp_path / "current").resolve() == locals_[0].directory.resolve()


def test_what_was_begun_is_gone_after_a_restart(tmp_path: Path) -> None:
    write_files(Versions(tmp_path).staging(5), 5)
    versions = Versions(tmp_path)
    assert held(versions) == []
    assert list((tmp_path / "versions").iterdir()) == []


def test_staging_begins_anew(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    (versions.staging(5) / "rest.json").write_text("of an attempt that failed")
    assert list(versions.staging(5).iterdir()) == []
    versions.discard(5)
    versions.discard(5)
    with pytest.raises(LocalProtocolError, match="was not made"):
        versions.commit(manifest.encode_manifest(manifest_of(5)))


def test_a_version_can_be_made_again(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    (add(versions, 5).directory / "part-0.json").write_text("changed by somebody")
    assert is_whole(add(versions, 5).directory, 5)
    assert held(Versions(tmp_path)) == [5]


def test_the_newest_and_the_current_stay(tmp_path: Path) -> None:
    versions = Versions(tmp_path, keep=2)
    for version in range(1, 8):
        add(versions, version)
    versions.make_current(2)
    assert versions.prune() == (1, 3, 4, 5)
    assert held(versions) == held(Versions(tmp_path)) == [2, 6, 7]
    names = sorted(path.name for path in (tmp_path / "versions").iterdir())
    assert names == [f"v0000000{n}{end}" for n in (2, 6, 7) for end in ("", ".manifest")]


def test_only_what_is_held_can_serve(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    assert versions.current() is None
    with pytest.raises(LocalProtocolError):
        versions.make_current(3)


@pytest.mark.parametrize("target", ["versions/v00000009", "/etc", "versions/v1", "../versions"])
def test_a_pointer_to_something_else_is_none(tmp_path: Path, target: str) -> None:
    versions = Versions(tmp_path)
    add(versions, 3)
    (tmp_path / "current").symlink_to(target)
    assert versions.current() is None
    versions.make_current(3)
    assert versions.current() == versions.get(3)


def test_a_directory_without_its_manifest_is_not_held(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    for version in (3, 4, 5):
        add(versions, version)
    (tmp_path / "versions" / "v00000003.manifest").unlink()
    (tmp_path / "versions" / "v00000004.manifest").write_bytes(b"damaged")
    (tmp_path / "versions" / "notes").mkdir()
    assert held(Versions(tmp_path)) == [5]


def test_bad_manifests_are_not_committed(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.staging(3)
    with pytest.raises(RemoteProtocolError):
        versions.commit(b"\x80")
    assert held(versions) == []


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="file"):
        Versions(tmp_path / "file")
    with pytest.raises(LocalProtocolError):
        Versions(tmp_path, keep=0)


def test_kill_9_leaves_whole_versions(tmp_path: Path) -> None:
    """At any point: what serves is whole, and not older than what was said to serve."""
    random, begun = Random(3), 1
    for _ in range(KILLS):
        command = [sys.executable, "-m", "tests.unit.version_child", str(tmp_path), str(begun)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
            assert child.stdout is not None
            said = [child.stdout.readline()]
            # somewhere within what follows, as far as it can be told without a clock
            for _ in range(random.randrange(40_000)):
                pass
            child.send_signal(signal.SIGKILL)
            said += child.stdout.readlines()
        served = max(int(line) for line in said if line.endswith(b"\n"))
        versions = Versions(tmp_path)
        assert faults(tmp_path) == []
        current = versions.current()
        assert current is not None
        assert current.version in (served, served + 1)
        begun = served + 2


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it, and `finally` changes no file."""


def steps_before(kill_at: int, patch: pytest.MonkeyPatch) -> None:
    """From now on, end at the step with this number that changes what is on the disk."""
    left = iter(range(kill_at, -1, -1))

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def step(*arguments: Any, **settings: Any) -> Any:
            if next(left) == 0:
                raise Killed
            return original(*arguments, **settings)

        patch.setattr(owner, name, step)

    for name in ("rename", "replace", "unlink", "symlink_to", "mkdir", "open", "write_bytes"):
        counted(Path, name)
    for name in ("fsync", "rmdir"):
        counted(os, name)


def next_version(directory: Path) -> None:
    versions = Versions(directory, keep=1)
    add(versions, 4)
    versions.make_current(4)
    versions.prune()


def test_the_end_at_any_step_leaves_whole_versions(tmp_path: Path) -> None:
    served: list[int] = []
    for kill_at in count():
        directory = tmp_path / str(kill_at)
        before = Versions(directory)
        add(before, 3)
        before.make_current(3)
        with pytest.MonkeyPatch.context() as patch:
            steps_before(kill_at, patch)
            try:
                next_version(directory)
            except Killed:
                pass
            else:
                break
        assert faults(directory) == []
        current = Versions(directory).current()
        assert current is not None
        served.append(current.version)
    assert served == sorted(served)
    assert set(served) == {3, 4}
    assert len(served) > 40


def test_the_check_after_a_kill_finds_what_is_in_parts(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    local = add(versions, 3)
    versions.make_current(3)
    assert faults(tmp_path) == []
    (local.directory / "part-7.json").unlink()
    (tmp_path / "versions" / "v00000003.manifest").unlink()
    assert faults(tmp_path) == ["v00000003 is in parts", "v00000003 has no manifest"]
    local.directory.rename(tmp_path / "elsewhere")
    assert faults(tmp_path) == ["current leads nowhere"]
