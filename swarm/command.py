"""Exit statuses and standard streams of commands: an error is one line, whatever is behind them."""

import codecs
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from swarm.errors import (
    CannotHeal,
    ConfigError,
    IdentityInUse,
    OutputFailed,
    SwarmError,
    first_of,
)

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_CANNOT_HEAL, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
STORAGE_ERRORS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG}
# What a file's place may lack besides; with the name of the file these are no fault of ours.
PLACE_ERRORS: Final = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

PLAIN: Final = "plain"  # the name of our error handler of encodings
_LETTERS: Final = str.maketrans(
    {"–": "-", "…": "...", "«": '"', "»": '"'} | dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True))
)


class _Stream(io.FileIO):
    """A descriptor that is written to until that fails; all later output is dropped."""

    def __init__(self, descriptor: int, *, is_needed: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.raises = self._is_needed = is_needed
        self.failure: OutputFailed | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self._is_needed:
                self.failure = OutputFailed(error.errno, error.strerror)
            if self.raises and self.failure is not None:
                raise self.failure from None
            return memoryview(data).nbytes


def status_of(program: str, run: Callable[[], int]) -> int:
    """The exit status of a command. 0: done, or the reader of its output left; 1: it failed;
    2: wrong input; 3: it failed as before, and would again."""
    guard_streams()
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except Exception as raised:
        error = first_of(raised)
        status = _status(error)
        if status is None:
            raise
        if status != EXIT_OK:
            sys.stderr.write(f"{program}: {_line(error)}\n")
        return status


def _status(error: BaseException) -> int | None:
    """None: a fault of ours, which shall be seen whole."""
    if isinstance(error, OutputFailed):
        return EXIT_OK if error.errno == errno.EPIPE else EXIT_FAILED
    if isinstance(error, ConfigError | IdentityInUse):
        return EXIT_USAGE
    if isinstance(error, CannotHeal):
        return EXIT_CANNOT_HEAL
    is_place = (
        isinstance(error, OSError)
        and error.filename is not None
        and error.errno in STORAGE_ERRORS | PLACE_ERRORS
    )
    return EXIT_FAILED if is_place or isinstance(error, SwarmError) else None


def _line(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return str(error)
    told = f"{os.fsdecode(error.filename)}: {error.strerror}"
    return f"{told}; make room for it" if error.errno in NO_ROOM else f"{told}; name another place"


def guard_streams() -> None:
    """Open missing standard streams at the null device. Make standard output raise `OutputFailed`
    where it cannot be written, and both outputs show letters that their encoding lacks as ASCII."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # else the next file to be opened would take its number, and our output
            os.open(os.devnull, os.O_RDWR)
    codecs.register_error(PLAIN, _plain)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it stays open
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(1, sys.stdout, is_needed=True)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(2, sys.stderr, is_needed=False)


def _guarded(descriptor: int, before: Any, *, is_needed: bool) -> TextIO:
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(descriptor, is_needed=is_needed)),
        encoding=getattr(before, "encoding", "utf-8"),
        errors=PLAIN,
        line_buffering=not is_needed or getattr(before, "line_buffering", False),
    )


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_LETTERS)
    return text.encode("ascii", "backslashreplace").decode(), error.end


def output_failure() -> OutputFailed | None:
    """The failure of standard output so far."""
    stream = _stream()
    return None if stream is None else stream.failure


@contextmanager
def output_may_fail() -> Iterator[None]:
    """Record a failure of standard output within the block; it is raised at the end."""
    stream = _stream()
    if stream is None:  # a test's
        yield
        return
    stream.raises = False
    try:
        yield
    finally:
        stream.raises = True
    if stream.failure is not None:
        raise stream.failure


def _stream() -> _Stream | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Stream) else None
