"""The event log: what happened to a node, one JSON object a line.

It survives kill -9: readers drop a torn line, and opening the log removes it. It is bounded: at
`bytes_max` the file becomes `events.jsonl.1`, in place of the one before.
"""

import json
import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter

from node.observe.records import (
    Banned,
    HeldOut,
    RoundDone,
    SampledGroup,
    Started,
    StartEnded,
    StepDone,
    Trouble,
    VersionCame,
    VersionComing,
    VersionPublished,
    VersionSpread,
    VersionSpreading,
    WentBack,
    WorkDone,
)
from swarm.telemetry.metrics import FIGURES, RoundFigures

VersionEvent = VersionPublished | VersionSpreading | VersionSpread | VersionComing | VersionCame
Record = (
    Started | RoundDone | StepDone | WorkDone | HeldOut | WentBack | Trouble | Banned | StartEnded
) | VersionEvent

FILE_NAME = "events.jsonl"
FILE_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 1024 * 1024
_NAMES: dict[type[Record] | type[SampledGroup], str] = {
    Started: "started",
    RoundDone: "round",
    StepDone: "step",
    WorkDone: "work",
    HeldOut: "held_out",
    WentBack: "went_back",
    Trouble: "trouble",
    Banned: "banned",
    StartEnded: "ended",
    VersionPublished: "published",
    VersionSpreading: "spreading",
    VersionSpread: "spread",
    VersionComing: "coming",
    VersionCame: "came",
    SampledGroup: "sampled",
}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(record) for record, name in _NAMES.items()
}


def plain_json(value: Any) -> Any:
    """A dataclass's fields as strict JSON values; non-finite floats become strings such as "nan",
    which the record's validation turns back into floats."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value


def record_line(record: Record | SampledGroup, time_s: float) -> bytes:
    """A record as a line of the log; figures of a round come last."""
    fields = asdict(record)
    if isinstance(record, RoundFigures):
        fields |= {name: fields.pop(name) for name in FIGURES}
    return json_line(_NAMES[type(record)], time_s, fields)


def _head(event: str) -> bytes:
    """The beginning of each line of an event."""
    return json.dumps({"event": event})[:-1].encode() + b","


def json_line(event: str, time_s: float, fields: Mapping[str, Any]) -> bytes:
    """A line in the log's form."""
    head = {"event": event, "time_s": round(time_s, 3)}
    return json.dumps(plain_json({**head, **fields}), allow_nan=False).encode() + b"\n"


class EventLog:
    """Appends records. Blocking: on an event loop, call it in a thread; one call at a time runs.

    `clock` gives unix time in seconds. Opening repairs a torn last line.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float],
        *,
        bytes_max: int = FILE_BYTES_MAX,
    ) -> None:
        self._path = path
        self._clock = clock
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._size = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Record | SampledGroup) -> None:
        """Append one record.

        Raises:
            OSError: the disk is full or gone; nothing of the record stays in the file.
        """
        line = record_line(record, self._clock())
        with self._lock:
            if self._size and self._size + len(line) > self._bytes_max:
                self._rotate()
            self._append(line)

    def close(self) -> None:
        """Close the file. Doing it twice is harmless."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _append(self, line: bytes) -> None:
        try:
            rest = line
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def _open(self) -> tuple[int, int]:
        """The file's descriptor, for appending, and its size, after the last whole line."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(file).st_size
        whole = _end_of_last_line(file, size)
        if whole != size:
            os.ftruncate(file, whole)
        return file, whole

    def _rotate(self) -> None:
        os.close(self._file)
        self._file = -1
        self._path.replace(_older(self._path))
        self._file, self._size = self._open()


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _end_of_last_line(file: int, size: int) -> int:
    """The offset after the last newline in a file, reading backwards in blocks."""
    block_bytes = 65_536
    end = size
    while end:
        start = max(0, end - block_bytes)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def read_events(path: Path) -> Iterator[tuple[float, Record]]:
    """(unix time in seconds, record) for each line of the log, the older file first.

    Lines that are torn, unknown, or without a needed field are skipped: a log may come from a
    crashed node or from a later version.

    Raises:
        FileNotFoundError: there is no log at `path`.
    """
    older = _older(path)
    for each in (older, path) if older.exists() else (path,):
        with each.open("rb") as file:
            while line := file.readline(LINE_BYTES_MAX):
                event = _parse(line)
                if event is not None:
                    yield event


def followed(
    path: Path, count: int, but: Iterable[type[Record]] = ()
) -> Iterator[tuple[float, Record] | None]:
    """The last events of the log, then those that come, as `read_events`; None: none for now. The
    log may begin later, be opened anew, or become the older file meanwhile. Events of the kinds
    `but` are left out, and not counted.

    Raises:
        OSError: the log cannot be read.
    """
    lines: deque[bytes] = deque(maxlen=count)
    older = _older(path)
    left_out = tuple(_head(_NAMES[kind]) for kind in but)

    def wanted(file: FileIO) -> Iterator[bytes]:
        return (line for line in _whole_lines(file) if not line.startswith(left_out))

    if older.exists():
        with FileIO(older) as file:
            lines.extend(wanted(file))
    while not path.exists():
        yield None
    file = FileIO(path)
    try:
        lines.extend(wanted(file))
        while True:
            yield from (event for line in lines if (event := _parse(line)) is not None)
            lines.clear()
            is_older = not path.exists() or not os.path.samestat(
                path.stat(), os.fstat(file.fileno())
            )
            lines.extend(wanted(file))  # nothing comes to an older file any more
            if is_older and not lines and path.exists():
                file.close()
                file = FileIO(path)
            elif not lines:
                yield None
    finally:
        file.close()


def _whole_lines(file: FileIO) -> Iterator[bytes]:
    """Further lines; a torn one stays to be read, because its rest may come or it may be cut. The
    file has no buffer, which would keep what was cut."""
    while part := file.read(LINE_BYTES_MAX):
        whole, _, torn = part.rpartition(b"\n")
        if len(torn) == LINE_BYTES_MAX:
            continue  # longer than any line
        file.seek(-len(torn), os.SEEK_CUR)
        if not whole:
            return
        yield from (line + b"\n" for line in whole.split(b"\n"))


def _parse(line: bytes) -> tuple[float, Record] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        fields = json.loads(line)
        adapter = _ADAPTERS[fields.pop("event")]
        return float(fields.pop("time_s")), adapter.validate_python(fields)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class History:
    """A node's life as its log tells it, without what a restart from a checkpoint undid."""

    started: Started | None  # the latest; None when rotated away
    rounds: tuple[tuple[float, RoundDone], ...]  # (unix time, record), by round
    held_out: tuple[tuple[float, HeldOut], ...]  # by round
    troubles: tuple[tuple[float, Trouble], ...]
    starts: int
    steps: tuple[tuple[float, StepDone], ...] = ()  # of a learner, by step
    work: tuple[tuple[float, WorkDone], ...] = ()  # of a rollout worker, as it came
    versions: tuple[tuple[float, VersionEvent], ...] = ()  # of broadcasts, as they came

    @property
    def held_out_first(self) -> float | None:
        """Pass rate of the first evaluation, in [0, 1]."""
        return self.held_out[0][1].passed if self.held_out else None

    @property
    def held_out_last(self) -> float | None:
        """Pass rate of the latest evaluation, in [0, 1]."""
        return self.held_out[-1][1].passed if self.held_out else None


def history(events: Iterable[tuple[float, Record]]) -> History:
    """Order a log. Of a round that was done twice the later record counts, and rounds after the
    one that a restart resumed from are gone, because the policy that did them is."""
    started: Started | None = None
    starts = 0
    found: dict[Any, dict[int, tuple[float, Any]]] = defaultdict(dict)  # by round, or as they came
    for place, (time_s, record) in enumerate(events):
        match record:
            case Started():
                started, starts = record, starts + 1
                for kind in (RoundDone, HeldOut, StepDone):
                    found[kind] = {n: each for n, each in found[kind].items() if n <= record.round}
            case RoundDone(round=number) | HeldOut(round=number) | StepDone(step=number):
                found[type(record)][number] = time_s, record
            case Trouble() | WorkDone():
                found[type(record)][place] = time_s, record
            case WentBack() | Banned() | StartEnded():
                pass
            case _:
                found[VersionEvent][place] = time_s, record

    def ordered(kind: Any) -> tuple[Any, ...]:
        return tuple(found[kind][number] for number in sorted(found[kind]))

    return History(
        started=started,
        rounds=ordered(RoundDone),
        held_out=ordered(HeldOut),
        troubles=ordered(Trouble),
        starts=starts,
        steps=ordered(StepDone),
        work=ordered(WorkDone),
        versions=ordered(VersionEvent),
    )
