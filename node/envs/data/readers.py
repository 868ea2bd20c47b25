"""Files with rows: JSON, JSON lines, CSV, Parquet, each perhaps gzipped, and what Hugging Face's
`datasets` saves. The only file that imports `pyarrow`, and only where a file needs it.

Text is UTF-8 or UTF-16, with or without its mark. A row that cannot be read is an `Unread`.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from node.envs.data.items import LINE_BYTES_MAX, Unread, rows_of
from node.envs.data.shapes import Columns
from node.system.extras import extra_line
from swarm.errors import ConfigError

LINES: Final = (".jsonl", ".ndjson")
TABLES: Final = (".parquet", ".arrow")
SHEETS: Final = (".csv", ".tsv")
FILES_MAX: Final = 10_000  # in a folder
JSON_CHARS_MAX: Final = 268_435_456  # of a file that is one JSON value
_BATCH_ROWS: Final = 1024
_GZIP: Final = b"\x1f\x8b"
_WRAPPERS: Final = ("data", "rows", "items", "examples", "questions", "train", "test", "validation")
_SPLIT: Final = re.compile(r"(train|test|val|dev)(?:id\w*)?(?![a-z])")


def read_rows(path: Path, columns: Columns | None) -> Iterator[tuple[str, Any]]:
    """The rows of a file, or of a folder's files by name; ConfigError if one cannot be read. Of
    Parquet and Arrow files the named columns are read; None: all."""
    try:
        for file in _files(path):
            if _kind(file) in TABLES:
                yield from _arrow_rows(file, columns)
            else:
                yield from _text_rows(file)
    except OSError as error:
        remedy = "pack" if isinstance(error, gzip.BadGzipFile) else "write"
        told = error.strerror or f"its data are damaged ({str(error).strip()}); {remedy} it again"
        raise ConfigError(f"{error.filename or path}: {told}") from None
    except (EOFError, zlib.error):
        raise ConfigError(
            f"{path}: its gzip data are damaged or end early; pack it again"
        ) from None
    except UnicodeError:
        raise ConfigError(f"{path}: no text in UTF-8 or UTF-16; save it as UTF-8") from None


def _kind(file: Path) -> str:
    """The suffix in small letters, without that of gzip."""
    name = file.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file; on a machine without it join by --run ID and --peer, and a "
            "node of the run hands its items on"
        )
    if not path.is_dir():
        if not path.is_file():
            raise ConfigError(f"{path}: no regular file; write its rows to one")
        return [path]
    if (path / "dataset_dict.json").exists():
        named = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise ConfigError(f"{path}: holds several splits; name the folder of one: {named}")
    if (path / "state.json").exists():
        return _saved_files(path)
    kinds: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir())[:FILES_MAX]:
        if _kind(file) in (*LINES, *SHEETS, *TABLES, ".json") and file.is_file():
            kinds.setdefault(_kind(file), []).append(file)
    if len(kinds) != 1:
        found = f"files of {len(kinds)} kinds" if kinds else "no .jsonl or .parquet file"
        raise ConfigError(f"{path}: {found}; name one file, or a folder of one kind")
    (files,) = kinds.values()
    splits = [_SPLIT.match(file.name.lower()) for file in files]
    if len({split[1] for split in splits if split}) > 1:
        raise ConfigError(f"{path}: holds several splits; name one file, such as {files[0].name}")
    return files


# --- text -------------------------------------------------------------------------------------


def _text_rows(file: Path) -> Iterator[tuple[str, Any]]:
    is_sheet = _kind(file) in SHEETS
    with file.open("rb") as raw:
        packed = raw.peek(2)[:2] == _GZIP
        source = gzip.GzipFile(fileobj=raw) if packed else raw
        head = source.peek(16)[:16]
        encoding = json.detect_encoding(head[:4])
        is_utf8 = "8" in encoding
        if is_utf8 and b"\0" in head:
            raise ConfigError(f"{file}: no text; unpack it, or save it as JSON lines or CSV")
        newline = "" if is_sheet else None  # cells may have line ends of their own
        text = io.TextIOWrapper(
            source, encoding, "surrogateescape" if is_utf8 else "strict", newline
        )
        if is_sheet:
            yield from _sheet_rows(text, file)
        elif _kind(file) == ".json" or _first(text) == "[":
            yield from _json_rows(text, file)
        else:
            yield from rows_of(_lines(text), file.name)


def _first(text: io.TextIOWrapper) -> str:
    """The first character that is no white space; the text is then at its beginning again."""
    found = next((found for line in _lines(text) if (found := line.strip())), "")[:1]
    text.seek(0)
    return found


def _lines(text: IO[str]) -> Iterator[str]:
    """The lines; of one beyond the limit its beginning, which is beyond the limit too."""
    while line := text.readline(LINE_BYTES_MAX + 1):
        yield line
        while len(line) > LINE_BYTES_MAX and line[-1] != "\n":
            line = text.readline(LINE_BYTES_MAX + 1) or "\n"


def _json_rows(text: IO[str], file: Path) -> Iterator[tuple[str, Any]]:
    """Rows of one JSON value: a list, a record of columns, or one that holds a list under a usual
    name. Where it is none, JSON lines."""
    content = text.read(JSON_CHARS_MAX + 1)
    if len(content) > JSON_CHARS_MAX:
        raise ConfigError(f"{file}: over {JSON_CHARS_MAX} characters; write it as JSON lines")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith("[") and "Extra data" not in str(error):
            raise ConfigError(f"{file}: not JSON ({error}); write it again") from None
        yield from rows_of(_lines(io.StringIO(content)), file.name)
        return
    for number, row in enumerate(_unwrapped(found, file), 1):
        yield f"{file.name} row {number}", row


def _unwrapped(found: Any, file: Path) -> list[Any]:
    if not isinstance(found, Mapping):
        return found if isinstance(found, list) else [found]
    lists = [name for name in _WRAPPERS if isinstance(found.get(name), list)]
    if len(lists) > 1:
        raise ConfigError(f"{file}: holds several splits; write one file of {lists[0]}")
    if lists:
        return list(found[lists[0]])
    values = list(found.values())
    if len(values) > 1 and all(isinstance(v, list) and len(v) == len(values[0]) for v in values):
        return [dict(zip(found, row, strict=True)) for row in zip(*values, strict=True)]
    return [found]


def _sheet_rows(text: IO[str], file: Path) -> Iterator[tuple[str, Any]]:
    """Rows of CSV under a header, with tabs, semicolons or commas between cells."""
    csv.field_size_limit(LINE_BYTES_MAX)
    first = text.readline(LINE_BYTES_MAX)
    marks = "\t" if _kind(file) == ".tsv" else ",;\t"
    cells = csv.reader(_then(first, text), delimiter=max(marks, key=first.count), strict=True)
    names: list[str] = []
    number = 0
    while True:
        try:
            row = next(cells, None)
        except csv.Error as error:
            number += 1
            yield f"{file.name} row {number}", Unread(f"not CSV: {error}")
            continue
        if row is None:
            return
        if not names:
            names = [name.strip() for name in row]
            if len(set(names)) < len(names):
                raise ConfigError(f"{file}: two columns of one name; write a header")
        elif row:
            number += 1
            fits = len(row) == len(names)
            unfit = Unread(f"{len(row)} cells, and the header has {len(names)}")
            yield f"{file.name} row {number}", dict(zip(names, row, strict=True)) if fits else unfit


def _then(first: str, text: IO[str]) -> Iterator[str]:
    yield first
    yield from text


# --- tables -----------------------------------------------------------------------------------


def _saved_files(path: Path) -> list[Path]:
    """The files of a folder that `save_to_disk` wrote, in its order."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        names = [Path(str(each["filename"])).name for each in state["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: its state.json is damaged; save the dataset again") from None
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"{path}: its rows are chosen by a list; call flatten_indices() before save_to_disk"
        )
    return [path / name for name in names]


def _arrow_rows(file: Path, columns: Columns | None) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{file}: reading {file.suffix} takes pyarrow: {extra_line('data')}; or "
            "write the rows as JSON lines"
        ) from None
    wanted = None if columns is None else columns.tops
    number = 0
    try:
        with file.open("rb") as source:
            if _kind(file) == ".parquet":
                table = pyarrow.parquet.ParquetFile(source)
                known = _known(wanted, table.schema_arrow.names)
                batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=known)
            else:
                stream = pyarrow.ipc.open_stream(source)
                known = _known(wanted, stream.schema.names)
                batches = (batch.select(known) for batch in stream)
            for batch in batches:
                for row in _rows_in(batch):
                    number += 1
                    yield f"{file.name} row {number}", row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: {str(error).splitlines()[0]}; write it again") from None


def _rows_in(batch: Any) -> Iterator[Any]:
    """The rows of a batch. A value that Python has no type for spoils its row alone. Short floats
    are as people write them: 0.1 and not 0.10000000149011612."""
    for at, name in enumerate(batch.schema.names):
        if str(batch.schema.field(at).type) == "float":
            told = batch.column(at).cast("string").cast("float64")
            batch = batch.set_column(at, name, told)
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError, NotImplementedError):
        for place in range(len(batch)):
            try:
                yield batch.slice(place, 1).to_pylist()[0]
            except (ValueError, OverflowError, NotImplementedError) as error:
                yield Unread(f"a value that cannot be read ({error})")


def _known(wanted: list[str] | None, names: list[str]) -> list[str]:
    return names if wanted is None else [name for name in names if name.lower() in wanted]
