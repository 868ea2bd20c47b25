"""Files with rows: JSON lines, Parquet, and what Hugging Face's `datasets` saves. The only file
that imports `pyarrow`, and only where a file needs it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from node.envs.data.items import LINE_BYTES_MAX, Columns, rows_of
from swarm.errors import ConfigError

LINES: Final = (".jsonl", ".ndjson")
FILES_MAX: Final = 10_000  # in a folder
_BATCH_ROWS: Final = 1024


def read_rows(path: Path, columns: Columns | None) -> Iterator[tuple[str, Any]]:
    """The rows of a file, or of a folder's files by name; ConfigError if one cannot be read. Of
    Parquet and Arrow files the named columns are read; None: all."""
    try:
        for file in _files(path):
            if file.suffix in (".parquet", ".arrow"):
                yield from _arrow_rows(file, columns)
                continue
            with file.open("rb") as lines:
                yield from rows_of(iter(lambda: lines.readline(LINE_BYTES_MAX + 1), b""), file.name)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror or error}") from None


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file; on a machine without it join by --run ID and --peer, and a "
            "node of the run hands its items on"
        )
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(each.name for each in path.iterdir() if each.is_dir()))
        raise ConfigError(f"{path}: holds several splits; name the folder of one: {splits}")
    if (path / "state.json").exists():
        return _saved_files(path)
    kinds: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir())[:FILES_MAX]:
        if file.suffix in (*LINES, ".parquet", ".arrow"):
            kinds.setdefault(file.suffix, []).append(file)
    if len(kinds) != 1:
        found = f"files of {len(kinds)} kinds" if kinds else "no .jsonl or .parquet file"
        raise ConfigError(f"{path}: {found}; name one file, or a folder of one kind")
    return next(iter(kinds.values()))


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
            f"{file}: reading {file.suffix} takes pyarrow; install swarm-node[data], or write the "
            "rows as JSON lines"
        ) from None
    wanted = None if columns is None else list(columns.by_use().values())
    number = 0
    try:
        with file.open("rb") as source:
            if file.suffix == ".parquet":
                table = pyarrow.parquet.ParquetFile(source)
                known = _known(wanted, table.schema_arrow.names)
                batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=known)
            else:
                stream = pyarrow.ipc.open_stream(source)
                known = _known(wanted, stream.schema.names)
                batches = (batch.select(known) for batch in stream)
            for batch in batches:
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file.name} row {number}", row
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: {str(error).splitlines()[0]}; write it again") from None


def _known(wanted: list[str] | None, names: list[str]) -> list[str]:
    return names if wanted is None else [name for name in wanted if name in names]
