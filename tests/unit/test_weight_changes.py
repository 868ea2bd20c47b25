"""What differs between two directories of weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from node.policies.weight_diff import changed_tensors, check_alike, layer_of
from swarm.errors import ChildFailed

NAMES = (
    "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight", "model.layers.10.mlp.experts.3.up_proj.weight",
    "model.layers.10.mlp.experts.4.up_proj.weight", "model.norm.weight",
)  # fmt: skip


def write(directory: Path, **changed: float) -> Path:
    """Two files, with a value of `changed` in the tensors whose names end so."""
    directory.mkdir()
    tensors = {name: np.full((3, 2), 1.0, np.float32) for name in NAMES}
    for name in NAMES:
        for end, value in changed.items():
            if end in name:
                tensors[name][2, 1] = value
    save_file({name: tensors[name] for name in NAMES[:3]}, directory / "one.safetensors")
    save_file({name: tensors[name] for name in NAMES[3:]}, directory / "two.safetensors")
    return directory


@pytest.fixture
def old(tmp_path):
    return write(tmp_path / "old")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ()),
        ({"norm": 2.0}, NAMES[5:]),
        ({"q_proj": 2.0}, NAMES[1:3]),
        ({"experts.3": 2.0, "embed": 2.0}, (NAMES[0], *NAMES[3:5])),
    ],
    ids=["nothing", "outside of the layers", "its layer with it", "several"],
)
def test_what_changed_comes_with_its_layer(old, tmp_path, changed, expected):
    changes = changed_tensors(old, write(tmp_path / "new", **changed))
    assert (changes.names, changes.total) == (tuple(sorted(expected)), len(NAMES))


def test_layers_are_told_apart_by_the_outermost_number():
    assert layer_of(NAMES[3]) == "model.layers.10."
    assert layer_of("0.weight") == "0."
    assert layer_of("model.norm.weight") is None


def other_shape(directory: Path) -> None:
    tensors = load_file(directory / "two.safetensors")
    tensors[NAMES[5]] = np.zeros((2, 2), np.float32)
    save_file(tensors, directory / "two.safetensors")


def other_type(directory: Path) -> None:
    tensors = load_file(directory / "two.safetensors")
    tensors[NAMES[5]] = tensors[NAMES[5]].astype(np.float16)
    save_file(tensors, directory / "two.safetensors")


def one_missing(directory: Path) -> None:
    (directory / "two.safetensors").unlink()


def cut_short(directory: Path) -> None:
    path = directory / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def no_header(directory: Path) -> None:
    (directory / "two.safetensors").write_bytes(b"\xff" * 40)


def none_at_all(directory: Path) -> None:
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (other_shape, "norm.weight is .*2, 2"),
        (other_type, "norm.weight is .*F16"),
        (one_missing, "missing"),
        (cut_short, "bytes"),
        (no_header, "header"),
        (none_at_all, "no safetensors file"),
    ],
)
def test_another_model_or_a_damaged_one_is_refused(old, tmp_path, spoil, said):
    new = write(tmp_path / "new")
    check_alike(old, new)
    spoil(new)
    with pytest.raises(ChildFailed, match=said) as failure:
        check_alike(old, new)
    assert "new" in str(failure.value)
