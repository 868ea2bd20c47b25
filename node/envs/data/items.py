"""Items as bytes that are the same on every machine, and back again.

Of each row only the columns that a run names are kept. A row becomes one line of JSON with sorted
keys and no spaces, in the order of the file; values other than texts become their JSON. These lines
are again a file of rows that makes the same bytes, which is how strangers' items are checked.
"""

import functools
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.interfaces.prompts import MARK
from node.system.caches import cache_directory
from node.system.child_environment import CACHE_VARIABLE
from swarm.errors import ConfigError
from swarm.storage import write_whole
from swarm.wire.messages import (
    DATA_BYTES_MAX,
    DATA_CHUNK_BYTES_MAX,
    DATA_ITEMS_MAX,
    DataManifest,
    chunk_hash,
    chunk_size,
    chunks_of,
    data_id,
    manifest_of,
)

ITEM_BYTES_MAX: Final = 65_536  # of a line that is kept
LINE_BYTES_MAX: Final = 4_194_304  # of a line that is read, with all its columns
CHOICES_MAX: Final = 26

Item = Mapping[str, Any]  # texts `question`, `answer`, perhaps `rule`, and a list `choices`
Rows = Iterable[tuple[str, Any]]  # (file and line, row)


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of a file's columns by their use; None: there is no such column."""

    question: str = "question"
    answer: str = "answer"
    choices: str | None = None
    rule: str | None = None

    def by_use(self) -> dict[str, str]:
        named = (("question", self.question), ("answer", self.answer))
        more = (("choices", self.choices), ("rule", self.rule))
        return {use: name for use, name in (*named, *more) if name is not None}

    def item(self, row: Mapping[str, Any]) -> Item:
        """The item of a row that was kept."""
        return {use: row[name] for use, name in self.by_use().items()}


@dataclass(frozen=True, slots=True)
class Content:
    data: bytes
    items: int


def rows_of(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, Any]]:
    """Rows of lines of JSON, without blank lines; ConfigError for a line that is no JSON."""
    for number, line in enumerate(lines, 1):
        where = f"{name} line {number}"
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"{where}: over {LINE_BYTES_MAX} bytes; shorten it or leave it out")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{where}: not JSON; write one object a line, such as "
                '{"question": "2+2=", "answer": "4"}'
            ) from None
        yield where, row


def content_of(
    rows: Rows, columns: Columns, name: str, fault: Callable[[Item], str | None]
) -> Content:
    """The items of rows. `name`: of their file; `fault`: says why the scorer refuses an item.

    Raises:
        ConfigError: a row is no item, or there are none or too many.
    """
    lines: list[bytes] = []
    size = 0
    for where, row in rows:
        line = _line(where, row, columns, fault)
        size += len(line)
        lines.append(line)
        if size > DATA_BYTES_MAX or len(lines) > DATA_ITEMS_MAX:
            raise ConfigError(
                f"{where}: over {DATA_ITEMS_MAX} items or {DATA_BYTES_MAX} bytes; leave some out"
            )
    if not lines:
        raise ConfigError(f"{name}: no items; write one JSON object a line")
    return Content(b"".join(lines), len(lines))


def _line(where: str, row: Any, columns: Columns, fault: Callable[[Item], str | None]) -> bytes:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: not an object; write one JSON object a line")
    kept: dict[str, Any] = {}
    for use, column in columns.by_use().items():
        if row.get(column) is None:
            raise ConfigError(
                f"{where}: no column {column!r}; name another one as {use}, or add it"
            )
        kept[column] = _choices(where, row[column]) if use == "choices" else _text(row[column])
    if not kept[columns.question].strip() or kept[columns.question].startswith(MARK):
        raise ConfigError(
            f"{where}: an empty question, or one that begins with a control character"
        )
    trouble = fault(columns.item(kept))
    if trouble is not None:
        raise ConfigError(f"{where}: {trouble}; correct it or leave it out")
    try:
        line = f"{canonical_json(kept)}\n".encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: half a character (a surrogate); correct its text") from None
    if len(line) > ITEM_BYTES_MAX:
        raise ConfigError(
            f"{where}: {len(line)} bytes, at most {ITEM_BYTES_MAX}; shorten it or leave it out"
        )
    return line


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, in its own letters."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _choices(where: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= CHOICES_MAX:
        raise ConfigError(f"{where}: choices must be a list of 2 to {CHOICES_MAX} texts")
    return [_text(each) for each in value]


class Items:
    """Items in memory as their bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._ends = array("Q")
        end = data.find(b"\n")
        while end >= 0:
            self._ends.append(end)
            end = data.find(b"\n", end + 1)

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, place: int) -> Mapping[str, Any]:
        """The row at a place, by the columns' names."""
        begin = self._ends[place - 1] + 1 if place else 0
        row: Mapping[str, Any] = json.loads(self._data[begin : self._ends[place]])
        return row


# Items on disk, each set in one file named by the hash of its manifest, readable by the owner.

LOADED_MAX: Final = 4  # sets of items in memory


def path_of(sha256: str) -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    return cache_directory(Path(named) if named else None) / "data" / f"{sha256}.jsonl"


def sha256_of(content: Content) -> str:
    return data_id(manifest_of(content.data, content.items)).hex()


def keep_own(content: Content) -> str:
    """Keep items of a file of one's own, and return their hash. They are not sent to strangers
    before `agree_to_share`."""
    sha256 = sha256_of(content)
    path = path_of(sha256)
    if path.exists():
        return sha256
    try:
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        path.with_suffix(".own").touch(mode=0o600)
        write_whole(path, content.data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the items of a run are kept there") from None
    return sha256


def is_unshared(sha256: str) -> bool:
    return path_of(sha256).with_suffix(".own").exists()


def agree_to_share(sha256: str) -> None:
    path_of(sha256).with_suffix(".own").unlink(missing_ok=True)


def is_here(sha256: str) -> bool:
    return path_of(sha256).exists()


def read(sha256: str) -> tuple[DataManifest, bytes]:
    """Items and their manifest; ConfigError if they are not here, or damaged."""
    path = path_of(sha256)
    try:
        with path.open("rb") as file:
            data = file.read(DATA_BYTES_MAX + 1)
    except OSError:
        raise ConfigError(
            f"environment dataset: the items {sha256[:12]}… are not on this machine; join with "
            "--peer, and a node of the run hands them on, or name their file as path"
        ) from None
    if 0 < len(data) <= DATA_BYTES_MAX and (count := data.count(b"\n")):
        manifest = manifest_of(data, count)
        if data_id(manifest).hex() == sha256:
            return manifest, data
    raise ConfigError(f"{path}: is damaged; delete it and start again")


@functools.lru_cache(maxsize=LOADED_MAX)
def load(sha256: str) -> Items:
    return Items(read(sha256)[1])


class Arriving:
    """Items that arrive chunk by chunk, kept over a restart. Raises OSError if the disk refuses."""

    def __init__(self, sha256: str, manifest: DataManifest) -> None:
        self._path = path_of(sha256)
        self._part = self._path.with_suffix(".part")
        self._manifest = manifest
        self._path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._part.touch(mode=0o600)

    def missing(self) -> Iterator[int]:
        for chunk in range(chunks_of(self._manifest.size_bytes)):
            with self._part.open("rb") as file:
                file.seek(chunk * DATA_CHUNK_BYTES_MAX)
                found = file.read(chunk_size(self._manifest, chunk))
            if hashlib.sha256(found).digest() != chunk_hash(self._manifest, chunk):
                yield chunk

    def write(self, chunk: int, content: bytes) -> None:
        with self._part.open("r+b") as file:
            file.seek(chunk * DATA_CHUNK_BYTES_MAX)
            file.write(content)

    def whole(self) -> bytes:
        with self._part.open("rb") as file:
            return file.read(self._manifest.size_bytes)

    def finish(self) -> None:
        os.truncate(self._part, self._manifest.size_bytes)
        self._part.replace(self._path)

    def give_up(self) -> None:
        self._part.unlink(missing_ok=True)
