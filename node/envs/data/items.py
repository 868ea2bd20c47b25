"""Items as bytes that are the same on every machine, and back again.

Of each row only the columns that a run uses are kept, named by their use. A row becomes one line of
JSON with sorted keys and no spaces, in the order of the file; rows that are no items are left out.
These lines are again a file of rows that makes the same bytes, so strangers' items can be checked.
"""

import functools
import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from node.envs.data import shapes
from node.envs.data.shapes import Columns
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
EXAMPLE: Final = '{"question": "2+2=", "answer": "4"}'
AS_IT_STANDS: Final = "as it stands"
ROWS_SHOWN: Final = 20  # of those that were left out for one reason
REASONS_SHOWN: Final = 40

Item = Mapping[str, Any]  # `answer`, perhaps `rule`, a list `choices`; `question`, perhaps messages
Rows = Iterable[tuple[str, Any]]  # (file and row, the row or an `Unread`)


class Unread(NamedTuple):
    """A row that could not be read."""

    why: str


class LeftOut(NamedTuple):
    """A row that is no item."""

    where: str
    why: str


@dataclass(frozen=True, slots=True)
class Content:
    """The items of a file."""

    data: bytes
    items: int
    places: tuple[str, ...] = ()  # of each item in the file
    left_out: tuple[LeftOut, ...] = ()
    readings: Mapping[str, int] = field(default_factory=dict)  # answers by how they were read


@dataclass(frozen=True, slots=True)
class Judging:
    """A scorer's part in reading rows."""

    fault: Callable[[Item], str | None]  # says why the scorer refuses an item
    marked: bool = False  # the answer may be the marked end of a worked one
    schemas: bool = False  # an answer or rule may be a record, which stands for its JSON


def rows_of(lines: Iterable[str | bytes], name: str) -> Iterator[tuple[str, Any]]:
    """Rows of lines of JSON, without blank lines."""
    for number, line in enumerate(lines, 1):
        where = f"{name} line {number}"
        if len(line) > LINE_BYTES_MAX:
            yield where, Unread(f"over {LINE_BYTES_MAX} bytes; shorten it")
        elif line.strip():
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError):
                yield where, Unread(f"not JSON; write one object a line, such as {EXAMPLE}")


def content_of(rows: Rows, columns: Columns, name: str, judging: Judging) -> Content:
    """The items of rows. `name`: of their file.

    Raises:
        ConfigError: no row is an item, or there are too many.
    """
    lines: list[bytes] = []
    places: list[str] = []
    left_out: list[LeftOut] = []
    readings: Counter[str] = Counter()
    size = 0
    for where, row in rows:
        try:
            line, how = _line(row, columns, judging)
        except ValueError as error:
            left_out.append(LeftOut(where, str(error)))
            continue
        size += len(line)
        lines.append(line)
        places.append(where)
        readings[how] += 1
        if size > DATA_BYTES_MAX or len(lines) > DATA_ITEMS_MAX:
            raise ConfigError(
                f"{where}: over {DATA_ITEMS_MAX} items or {DATA_BYTES_MAX} bytes; leave some out"
            )
    if not lines:
        first = "; ".join(f"{where}: {why}" for where, why in left_out[:1])
        raise ConfigError(
            f"{name}: none of its {len(left_out)} rows is an item; {first}"
            if left_out
            else f"{name}: no items; write one JSON object a line, such as {EXAMPLE}"
        )
    return Content(b"".join(lines), len(lines), tuple(places), tuple(left_out), readings)


def _line(row: Any, columns: Columns, judging: Judging) -> tuple[bytes, str]:
    """The line of a row, and how its answer was read; ValueError says why it is no item."""
    if not isinstance(row, Mapping):
        is_told = isinstance(row, Unread)
        raise ValueError(row.why if is_told else f"not an object, such as {EXAMPLE}")  # noqa: TRY004
    if judging.schemas:
        row = _with_json(row, columns)
    kept, how = _kept(row, columns, judging.marked)
    try:
        line = f"{canonical_json(kept)}\n".encode()
    except UnicodeEncodeError:
        raise ValueError("half a character (a surrogate); correct its text") from None
    if len(line) > ITEM_BYTES_MAX:
        raise ValueError(f"{len(line)} bytes, at most {ITEM_BYTES_MAX}; shorten it")
    if (trouble := judging.fault(kept)) is not None:
        raise ValueError(trouble)
    return line, how


def _kept(row: Mapping[str, Any], columns: Columns, marked: bool) -> tuple[dict[str, Any], str]:
    """The item in a row, and how its answer was read."""
    kept: dict[str, Any] = {"question": shapes.question_of(row, columns)}
    answer, how = shapes.answer_of(row, columns), AS_IT_STANDS
    while marked and (found := shapes.gold_in(answer)) is not None:
        answer, how = found
    answer = answer.strip() if marked else answer
    if marked and columns.shape and how == AS_IT_STANDS and shapes.is_worked(answer):
        raise ValueError("a worked solution without a marked answer; name another column as answer")
    if columns.choices is not None:
        shapes.check_there(row, "choices", columns.choices)
        given = shapes.choices_at(row, columns.choices)
        kept["choices"], labels = shapes.choices_of(given, columns.choices)
        typed = shapes.value_at(row, columns.answer)
        answer = shapes.lettered(typed, answer, kept["choices"], labels)
    if columns.rule is not None:
        shapes.check_there(row, "rule", columns.rule)
        kept["rule"] = shapes.texts_of(row, columns.rule)
    return {**kept, "answer": answer}, how


def _with_json(row: Mapping[str, Any], columns: Columns) -> Mapping[str, Any]:
    """The row with JSON for records and lists in the columns of answer and rule."""
    named = [path for path in (columns.answer, columns.rule) if path is not None]
    values = {path: shapes.value_at(row, path) for path in named}
    return {
        **row,
        **{path: canonical_json(v) for path, v in values.items() if isinstance(v, list | dict)},
    }


def left_out_lines(name: str, left_out: Sequence[LeftOut], items: int) -> list[str]:
    """A table of the rows of a file that are no items, by reason; empty if there are none."""
    if not left_out:
        return []
    told = [f"{name}: left out: {len(left_out)} of {items + len(left_out)} rows"]
    places: dict[str, list[str]] = {}
    for where, why in left_out:
        places.setdefault(why, []).append(where.removeprefix(f"{name} "))
    for why, found in sorted(places.items(), key=lambda each: -len(each[1]))[:REASONS_SHOWN]:
        more = f" and {len(found) - ROWS_SHOWN} more" if len(found) > ROWS_SHOWN else ""
        told.append(f"  {len(found):>6}  {why}: {', '.join(found[:ROWS_SHOWN])}{more}")
    if len(places) > REASONS_SHOWN:
        told.append(f"          and {len(places) - REASONS_SHOWN} other reasons")
    return told


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, in its own letters."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


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
_TOLD: Final[dict[str, tuple[str, ...]]] = {}  # by the hash of items


def path_of(sha256: str) -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    return cache_directory(Path(named) if named else None) / "data" / f"{sha256}.jsonl"


def sha256_of(content: Content) -> str:
    return data_id(manifest_of(content.data, content.items)).hex()


def keep_own(content: Content, told: Iterable[str]) -> str:
    """Keep items of a file of one's own, and return their hash. They are not sent to strangers
    before `agree_to_share`. `told`: lines about how the file was read, for its user."""
    sha256 = sha256_of(content)
    path = path_of(sha256)
    _TOLD[sha256] = tuple(told)
    if path.exists():
        return sha256
    try:
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        path.with_suffix(".own").touch(mode=0o600)
        write_whole(path, content.data)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the items of a run are kept there") from None
    return sha256


def told_of(sha256: str) -> tuple[str, ...]:
    """The lines about a file that this process read."""
    return _TOLD.get(sha256, ())


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
