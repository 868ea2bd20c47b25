import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swarm.errors import ConfigError, RemoteProtocolError, StorageFailed, StoreFull
from swarm.weights import manifest
from swarm.weights.manifest import WeightsWriter, open_weights, state_of
from tests.weights_files import header_of, tree, write_model, write_tensors


def copy(source: Path, target: Path) -> None:
    """Through entries: read each, write each, the last first."""
    weights = open_weights(source)
    writer = WeightsWriter(target, weights.specs)
    for spec in reversed(weights.specs):
        writer.write(spec, 0, weights.read(spec, 0, spec.size_bytes))
    writer.sync()


def test_entries_make_the_same_files(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    write_tensors(tmp_path / "a" / "vae" / "model.safetensors", {"b": ("F64", np.ones(3))})
    copy(tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert open_weights(tmp_path / "a").specs == open_weights(tmp_path / "b").specs


def test_files_of_the_formats_own_writer(tmp_path: Path) -> None:
    arrays = {"x": np.arange(12, dtype=np.float16).reshape(3, 4), "y": np.arange(5)}
    (tmp_path / "a").mkdir()
    save_file(arrays, tmp_path / "a" / "model.safetensors", metadata={"format": "np"})
    weights = open_weights(tmp_path / "a")
    assert {(spec.name, spec.dtype, spec.shape) for spec in weights.specs} == {
        ("model.safetensors", "header", (weights.specs[0].size_bytes,)),
        ("x", "F16", (3, 4)),
        ("y", "I64", (5,)),
    }
    copy(tmp_path / "a", tmp_path / "b")
    made = load_file(tmp_path / "b" / "model.safetensors")
    assert all(np.array_equal(made[name], array) for name, array in arrays.items())


def test_state_is_of_content_names_and_places(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    write_model(tmp_path / "same", 1)
    write_model(tmp_path / "other", 2)
    states = [state_of(open_weights(tmp_path / name).specs) for name in ("a", "same", "other")]
    assert states[0] == states[1] != states[2]


def test_known_specs_spare_hashing_and_must_fit(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    weights = open_weights(tmp_path / "a")
    file = tmp_path / "a" / "config.json"
    file.write_bytes(b"x" * file.stat().st_size)
    assert open_weights(tmp_path / "a", weights.specs) == weights
    wrong = weights.first_difference()
    assert wrong is not None
    assert wrong.name == "config.json"
    file.write_bytes(b"longer than it was, by far")
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_weights(tmp_path / "a", weights.specs)
    file.unlink()
    with pytest.raises(ConfigError):
        open_weights(tmp_path / "a", weights.specs)


def test_what_no_version_has_is_left_out(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"a pickle")
    (tmp_path / "a" / ".hidden.json").write_bytes(b"{}")
    (tmp_path / "a" / ".git").mkdir()
    (tmp_path / "a" / ".git" / "config.json").write_bytes(b"{}")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "a" / "gone.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a" / "pipe.json")
    weights = open_weights(tmp_path / "a")
    assert weights.left_out == (
        ".git", ".hidden.json", "gone.json", "loop", "pipe.json", "pytorch_model.bin",
    )  # fmt: skip
    assert {spec.file for spec in weights.specs} == {
        "config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json",
    }  # fmt: skip


def test_files_may_be_links(tmp_path: Path) -> None:
    write_model(tmp_path / "blobs", 1)
    (tmp_path / "snapshot").mkdir()
    for name in tree(tmp_path / "blobs"):
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blobs" / name)
    linked, plain = open_weights(tmp_path / "snapshot"), open_weights(tmp_path / "blobs")
    assert linked.specs == plain.specs


def cut_short(path: Path) -> None:
    file = path / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def too_long(path: Path) -> None:
    with (path / "model-1.safetensors").open("ab") as file:
        file.write(b"\0")


def without_header(path: Path) -> None:
    (path / "model-1.safetensors").write_bytes(b"\xff" * 100)


def empty(path: Path) -> None:
    (path / "model-1.safetensors").write_bytes(b"")


def twice(path: Path) -> None:
    write_tensors(path / "again.safetensors", {"frozen": ("U8", np.zeros(3, np.uint8))})


def without_shard(path: Path) -> None:
    (path / "model-2.safetensors").unlink()


def bad_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("[]")


def without_tensors(path: Path) -> None:
    without_shard(path)
    (path / "model-1.safetensors").unlink()
    (path / "model.safetensors.index.json").unlink()


def odd_name(path: Path) -> None:
    (path / "con.json").write_text("{}")


def wrong_map(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["frozen"] = "model-1.safetensors"
    index.write_text(json.dumps(table))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut_short, "model-1.safetensors"),
        (too_long, "model-1.safetensors"),
        (without_header, "model-1.safetensors"),
        (empty, "model-1.safetensors"),
        (twice, "twice"),
        (without_shard, "model-2.safetensors"),
        (bad_index, "model.safetensors.index.json"),
        (wrong_map, "frozen"),
        (without_tensors, "safetensors"),
        (odd_name, "con.json"),
    ],
)
def test_a_damaged_directory_is_one_line(tmp_path: Path, damage: object, named: str) -> None:
    write_model(tmp_path / "a", 1)
    open_weights(tmp_path / "a")
    damage(tmp_path / "a")  # type: ignore[operator]
    with pytest.raises(ConfigError) as refused:
        open_weights(tmp_path / "a")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        open_weights(tmp_path / "nowhere")


def test_a_header_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((60 << 20).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError):
        open_weights(tmp_path)


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    weights = open_weights(tmp_path / "a")
    cut_short(tmp_path / "a")
    with pytest.raises(StorageFailed, match=r"model-1\.safetensors"):
        weights.first_difference()


def test_reading_and_writing_stay_inside_an_entry(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    weights = open_weights(tmp_path / "a")
    writer = WeightsWriter(tmp_path / "b", weights.specs)
    spec = next(spec for spec in weights.specs if spec.name == "frozen")
    for start, size_bytes in ((-1, 4), (0, spec.size_bytes + 1), (spec.size_bytes, 1)):
        with pytest.raises(ValueError, match="frozen"):
            weights.read(spec, start, size_bytes)
        with pytest.raises(ValueError, match="frozen"):
            writer.write(spec, start, np.zeros(size_bytes, np.uint8))
    assert weights.read(spec, spec.size_bytes, 0).size == 0


def test_a_writer_makes_only_new_files(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    specs = open_weights(tmp_path / "a").specs
    before = tree(tmp_path / "a")
    with pytest.raises(StorageFailed, match="not empty"):
        WeightsWriter(tmp_path / "a", specs)
    assert tree(tmp_path / "a") == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFailed):
        WeightsWriter(tmp_path / "file", specs)


def test_a_writer_follows_no_link(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    specs = open_weights(tmp_path / "a").specs
    writer = WeightsWriter(tmp_path / "b", specs)
    victim = tmp_path / "victim.json"
    victim.write_text("untouched")
    (tmp_path / "b" / "config.json").unlink()
    (tmp_path / "b" / "config.json").symlink_to(victim)
    spec = next(spec for spec in specs if spec.name == "config.json")
    with pytest.raises(StorageFailed):
        writer.write(spec, 0, np.zeros(1, np.uint8))
    assert victim.read_text() == "untouched"


def test_a_writer_refuses_a_peers_bad_entries(tmp_path: Path) -> None:
    write_model(tmp_path / "a", 1)
    specs = open_weights(tmp_path / "a").specs
    with pytest.raises(RemoteProtocolError):
        WeightsWriter(tmp_path / "b", specs[::-1])
    assert not (tmp_path / "b").exists()


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "a", 1)
    specs = open_weights(tmp_path / "a").specs

    class Usage:
        free = 1000

    monkeypatch.setattr(manifest.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(StoreFull, match="1000 are free"):
        WeightsWriter(tmp_path / "b", specs)
    assert tree(tmp_path / "b") == {}


def test_a_disk_that_fills_up_is_told_from_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "a", 1)
    specs = open_weights(tmp_path / "a").specs
    writer = WeightsWriter(tmp_path / "b", specs)
    for number, kind in ((errno.ENOSPC, StoreFull), (errno.EIO, StorageFailed)):

        def fails(*args: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(manifest.os, "pwrite", fails)
        with pytest.raises(kind, match=os.strerror(number)):
            writer.write(specs[0], 0, np.zeros(1, np.uint8))


def test_a_header_alone_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "none.safetensors").write_bytes(header_of({}, {"only": "metadata"}))
    copy(tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
