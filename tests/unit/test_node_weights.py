"""`swarm-node weights ls` and `weights verify`."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from node.cli import main
from node.hosting.policy_weights import DIFFERENCES_SHOWN_MAX, POLICIES, STORE, differences, verify
from swarm.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from swarm.weights import manifest as manifest_wire
from swarm.weights.chunk_store import ChunkStore
from swarm.weights.manifest import Artifact, ChunkRef, Manifest, open_weights
from swarm.weights.version_store import Versions
from tests import weights_samples
from tests.unit.test_weights_chunks import chunk, ref
from tests.weights_files import write_model

Output = pytest.CaptureFixture[str]


def manifest_of(directory: Path, version: int) -> Manifest:
    artifact = Artifact(None, None, (ChunkRef(bytes(32), 100),))
    manifest = weights_samples.manifest_of(version, (artifact,), {})
    return replace(manifest, tensors=open_weights(directory).specs)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", 1)
    return tmp_path / "model"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Of a node that has versions 1, 2 and 3, of which 2 serves."""
    versions = Versions(tmp_path / "data" / POLICIES / "actor", keep=3)
    for version in (1, 2, 3):
        staged = versions.staging(version)
        staged.rmdir()
        write_model(staged, version)
        versions.commit(manifest_wire.encode_manifest(manifest_of(staged, version)))
    versions.make_current(2)
    return tmp_path / "data"


def run(output: Output, *arguments: object) -> tuple[int, list[str], str]:
    """Exit status, lines of output, and what was told as an error."""
    status = main(["weights", *map(str, arguments)])
    said = output.readouterr()
    return status, said.out.splitlines(), said.err


# --- ls ----------------------------------------------------------------------------------------


def test_ls_shows_each_version_and_which_of_them_serves(data_dir: Path, capsys: Output) -> None:
    data = chunk(1)
    with ChunkStore(data_dir / STORE, 10_000) as store:  # a node that runs is no obstacle
        store.put(ref(data).sha256, data)
        status, lines, _ = run(capsys, "ls", data_dir)
    assert status == EXIT_OK
    assert [line.split()[:2] for line in lines] == [
        ["actor", "1"],
        ["actor", "2*"],
        ["actor", "3"],
        ["3", "is"],
        ["1", "chunks,"],
    ]
    state = Versions(data_dir / POLICIES / "actor").states()[2].hex()[:12]
    assert state in lines[1]
    assert "2027-01-15 08:00:02 UTC" in lines[1]
    assert lines[4] == "1 chunks, 1.00 kB"
    newest = lines[3].removeprefix("  3 is in ")
    assert run(capsys, "verify", newest)[0] == EXIT_OK


def test_ls_changes_nothing(data_dir: Path, capsys: Output) -> None:
    staged = Versions(data_dir / POLICIES / "actor").staging(4)
    staged.rmdir()
    write_model(staged, 4)
    before = sorted(data_dir.rglob("*"))
    run(capsys, "ls", data_dir)
    assert sorted(data_dir.rglob("*")) == before


def test_ls_where_there_is_nothing(tmp_path: Path, capsys: Output) -> None:
    status, lines, error = run(capsys, "ls", tmp_path)
    assert (status, lines) == (EXIT_USAGE, [])
    assert error == f"swarm-node: {tmp_path}: no weights in there; name a node's data directory\n"
    (tmp_path / POLICIES / "actor").mkdir(parents=True)
    assert run(capsys, "ls", tmp_path)[1] == ["no complete version", "0 chunks, 0 B"]


# --- verify ------------------------------------------------------------------------------------


def test_a_version_of_a_node_verifies_by_itself(data_dir: Path, capsys: Output) -> None:
    status, lines, _ = run(capsys, "verify", data_dir / POLICIES / "actor" / "current")
    assert status == EXIT_OK
    assert len(lines) == 1
    assert lines[0].startswith("the same: ")


def test_weights_verify_against_a_manifest_or_against_weights(
    model: Path, tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "m").write_bytes(manifest_wire.encode_manifest(manifest_of(model, 1)))
    copy = shutil.copytree(model, tmp_path / "copy")
    assert run(capsys, "verify", copy, "--manifest", tmp_path / "m")[0] == EXIT_OK
    assert run(capsys, "verify", copy, "--against", model)[0] == EXIT_OK
    write_model(tmp_path / "other", 2)
    assert run(capsys, "verify", tmp_path / "other", "--against", model)[0] == EXIT_FAILED


def _bit(directory: Path) -> None:
    path = next(iter(sorted(directory.glob("*.safetensors"))))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut_short(directory: Path) -> None:
    path = next(iter(sorted(directory.glob("*.safetensors"))))
    path.write_bytes(path.read_bytes()[:-1])


def _one_more(directory: Path) -> None:
    (directory / "more.json").write_text("{}")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "one bit": (_bit, ": other content"),
    "cut short": (_cut_short, "its header tells of"),
    "a file more": (_one_more, "more.json: should not be there"),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_told(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], told: str, capsys: Output
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    damage(copy)
    status, lines, _ = run(capsys, "verify", copy, "--against", model)
    assert status == EXIT_FAILED
    assert len(lines) == 2
    assert told in lines[0]
    assert lines[1].startswith("not the same")


def test_what_differs_is_counted_among_the_entries_of_both(tmp_path: Path) -> None:
    for name, tensors in (("a", ("x", "y", "z")), ("b", ("w",))):
        (tmp_path / name).mkdir()
        arrays = {each: np.zeros(2, np.float32) for each in tensors}
        save_file(arrays, tmp_path / name / "model.safetensors")
    told = verify(tmp_path / "a", None, tmp_path / "b").lines[-1]
    differ, entries = map(int, re.findall(r"[0-9]+", told))
    assert 4 <= differ <= entries


def test_what_is_no_part_of_weights_is_named(model: Path, tmp_path: Path, capsys: Output) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "modeling.py").write_text("print()")
    status, lines, _ = run(capsys, "verify", copy, "--against", model)
    assert status == EXIT_OK
    assert lines[1] == "not looked at, no part of weights: modeling.py"


def test_all_ways_to_differ_are_told(model: Path) -> None:
    specs = manifest_of(model, 1).tensors
    first = specs[0]
    assert list(differences(specs, specs)) == []
    assert list(differences(specs[1:], specs)) == [f"{first.name}: missing"]
    assert list(differences(specs, specs[1:])) == [f"{first.name}: should not be there"]


def test_many_differences_are_counted(tmp_path: Path, capsys: Output) -> None:
    for name in ("one", "other"):
        write_model(tmp_path / name, 1)
        for number in range(DIFFERENCES_SHOWN_MAX + 5):
            (tmp_path / name / f"{number}.json").write_text(f'"{name}"')
    status, lines, _ = run(capsys, "verify", tmp_path / "one", "--against", tmp_path / "other")
    assert status == EXIT_FAILED
    assert lines[-2:-1] == ["and 5 more"]
    assert len(lines) == DIFFERENCES_SHOWN_MAX + 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{model}"], "model.manifest: No such file or directory; name a manifest with --manifest"),
        (["{model}", "--manifest", "{model}/config.json"], "config.json: no manifest: "),
        (["{model}x", "--against", "{model}"], "modelx: no such directory"),
        (["{model}", "--against", "{model}x"], "modelx is no directory"),
    ],
)
def test_wrong_input_is_one_line(
    model: Path, arguments: list[str], told: str, capsys: Output
) -> None:
    status, lines, error = run(
        capsys, "verify", *(argument.format(model=model) for argument in arguments)
    )
    assert (status, lines) == (EXIT_USAGE, [])
    assert told in error
    assert error.count("\n") == 1
