import json
from dataclasses import replace

import pytest

from swarm.errors import RemoteProtocolError
from swarm.weights import manifest
from swarm.weights.manifest import (
    BadLayout,
    TensorSpec,
    check_header,
    check_path,
    check_specs,
    parse_header,
)
from tests.weights_files import header_of

FILE = "model.safetensors"
ROW = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
NEXT = {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}


def specs(file: str = FILE) -> list[TensorSpec]:
    header = header_of({"a": ROW, "b": NEXT})
    entries = parse_header(header, file)
    config = manifest.Entry("config.json", "file", (5,), "config.json", 0, 5)
    entries = sorted([*entries, config], key=lambda entry: entry.name)
    return [entry.hashed(bytes(32)) for entry in entries]


def changed(name: str, /, **fields: object) -> list[TensorSpec]:
    """The sound entries, one of them made unsound."""
    return [
        replace(spec, **fields) if spec.name == name else spec  # type: ignore[arg-type]
        for spec in specs()
    ]


def test_a_sound_version_is_accepted() -> None:
    check_specs(specs())
    check_specs(specs("part/model.safetensors"))


def test_a_tensor_is_placed_after_the_header() -> None:
    header = header_of({"b": NEXT, "a": ROW}, {"format": "pt"})
    start, first, second = parse_header(header, "unet/" + FILE)
    assert (start.name, start.size_bytes) == ("unet/" + FILE, len(header))
    assert (first.name, first.shape, first.offset_bytes) == ("unet/a", (2, 3), len(header))
    assert (second.name, second.offset_bytes) == ("unet/b", len(header) + 12)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/config.json", "../config.json", "a/../config.json", "a//config.json", "./config.json",
        "a\\config.json", ".config.json", "a/.git/config.json", "config.json/", "", "con.json",
        "NUL.txt", "a/Lpt1/x.json", "c:config.json", "a\nb.json", "a\0.json", "tab\t.json",
        "modeling.py", "pytorch_model.bin", "weights.pt", "config.json.", "config.json ", "~.json",
        "a/b/c/d/config.json", "x" * 251 + ".json", "é.json", "\udc80.json",
    ],
)  # fmt: skip
def test_a_file_name_from_a_peer_is_refused(path: str) -> None:
    with pytest.raises(BadLayout):
        check_path(path)
    with pytest.raises(RemoteProtocolError):
        check_specs([TensorSpec(path, "file", (5,), path, 0, 5, bytes(32))])


@pytest.mark.parametrize("path", ["config.json", "a/b/c/tokenizer.model", "m-1 of 2.safetensors"])
def test_a_plain_file_name_is_accepted(path: str) -> None:
    check_path(path)


@pytest.mark.parametrize(
    "wrong",
    [
        changed("a", size_bytes=13),
        changed("a", shape=(2, 4)),
        changed("a", shape=(-2, -3)),
        changed("a", shape=(1 << 50, 1 << 50)),
        changed("a", shape=(2, 3) + (1,) * 8),
        changed("a", dtype="BF17"),
        changed("a", dtype="file"),
        changed("a", sha256=b""),
        changed("a", name=""),
        changed("a", name="a\n"),
        changed("a", name="\udc80"),
        changed("a", offset_bytes=0),
        changed("b", offset_bytes=1 << 40),
        changed("b", offset_bytes=-1),
        changed("b", name="a"),
        changed("b", name="c" * 600),
        changed("b", file="other.safetensors"),
        changed("b", file="config.json", offset_bytes=5),
        changed("config.json", name="a.json"),
        changed("config.json", name="config.txt", file="config.txt", offset_bytes=1),
        changed("config.json", size_bytes=1 << 40, shape=(1 << 40,)),
        specs()[::-1],
        [spec for spec in specs() if spec.name != FILE],
        [spec for spec in specs() if spec.name != "a"],
        sorted([*specs(), replace(specs()[2], name="Config.json", file="Config.json")],
               key=lambda spec: spec.name),
        sorted([*specs(), replace(specs()[2], name="config.json/a.json",
        file="config.json/a.json")],
               key=lambda spec: spec.name),
    ],
)  # fmt: skip
def test_a_versions_entries_are_refused(wrong: list[TensorSpec]) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        check_specs(wrong)
    assert "\n" not in str(refused.value)


def test_limits_on_entries_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, below in (("ENTRIES_MAX", 3), ("FILES_MAX", 1), ("VERSION_BYTES_MAX", 20)):
        with monkeypatch.context() as patched:
            patched.setattr(manifest, limit, below)
            with pytest.raises(RemoteProtocolError):
                check_specs(specs())


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"a": 1},
        {"a": {**ROW, "extra": 1}},
        {"a": {"dtype": "BF16", "shape": [2, 3]}},
        {"a": {**ROW, "dtype": 3}},
        {"a": {**ROW, "dtype": "header"}},
        {"a": {**ROW, "shape": "23"}},
        {"a": {**ROW, "shape": [2.0, 3]}},
        {"a": {**ROW, "shape": [True, 6]}},
        {"a": {**ROW, "data_offsets": [0]}},
        {"a": {**ROW, "data_offsets": [-12, 0]}},
        {"a": {**ROW, "data_offsets": ["0", "12"]}},
        {"a": {**ROW, "data_offsets": [0, 11]}},
        {"a": {**ROW, "data_offsets": [1, 13]}},
        {"a": ROW, "b": {**NEXT, "data_offsets": [11, 15]}},
        {"a": ROW, "b": {**NEXT, "data_offsets": [13, 17]}},
        {"__metadata__": {"step": 3}, "a": ROW},
        {"__metadata__": [], "a": ROW},
    ],
)
def test_a_damaged_header_is_refused(table: object) -> None:
    with pytest.raises(BadLayout):
        parse_header(header_of(table), FILE)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"a":1,"a":2}',
        b'{"__metadata__":{"a":NaN}}',
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,1]}}',
    ],
)
def test_a_header_that_is_no_table_is_refused(text: bytes) -> None:
    with pytest.raises(BadLayout):
        parse_header(len(text).to_bytes(8, "little") + text, FILE)


def test_a_header_may_not_claim_to_be_huge() -> None:
    assert manifest.header_size((manifest.HEADER_BYTES_MAX - 8).to_bytes(8, "little"))
    with pytest.raises(BadLayout):
        manifest.header_size((manifest.HEADER_BYTES_MAX - 7).to_bytes(8, "little"))
    with pytest.raises(BadLayout):
        manifest.header_size(b"short")


def test_a_header_must_tell_of_the_versions_tensors() -> None:
    mine = [spec for spec in specs() if spec.file == FILE]
    check_header(header_of({"a": ROW, "b": NEXT}), mine, FILE)
    other = header_of({"a": ROW, "c": NEXT})
    assert len(other) == mine[-1].size_bytes
    with pytest.raises(RemoteProtocolError):
        check_header(other, mine, FILE)
    with pytest.raises(RemoteProtocolError):
        check_header(json.dumps({}).encode(), mine, FILE)
