"""Checkpoints of a node, one directory each.

`checkpoints/round-00000012/` holds the trainer's files and `state.json` with the node's progress. A
directory is written under a temporary name, synced and renamed, so that whatever has the final name
is whole. `checkpoints/best` links to the policy that did best on the validation tasks.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import trio

from node.interfaces.trainer import Trainer
from node.run.progress import Progress
from swarm.errors import ConfigError
from swarm.storage import RunSync

STATE_FILE = "state.json"
POSITION_FILE = "next-index"
BEST = "best"
TEMPORARY_SUFFIX = ".partial"
SAVING_SHARE = 0.02  # of the time, where nobody says how often to save


Content = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    directory: Path
    progress: Progress


class SavingPace:
    """Decides when to save: every so many rounds, or, with None, so that saving takes at most
    `SAVING_SHARE` of the time."""

    def __init__(self, every_rounds: int | None) -> None:
        self._every = every_rounds
        self._due_s: float | None = None  # None: nothing was saved yet

    def is_due(self, rounds: int, now_s: float) -> bool:
        if self._every is not None:
            return rounds % self._every == 0
        return self._due_s is None or now_s >= self._due_s

    def saved(self, began_s: float, ended_s: float) -> None:
        """Record a save."""
        self._due_s = ended_s + (ended_s - began_s) / SAVING_SHARE


class Checkpoints:
    """The checkpoints of one data directory. `facts` must agree between save and resume."""

    def __init__(
        self,
        directory: Path,
        keep: int,
        facts: Mapping[str, Any],
        run_sync: RunSync = trio.to_thread.run_sync,
    ) -> None:
        self._run_sync = run_sync  # where blocking calls go
        self._directory = directory
        self._keep = keep
        self._facts = dict(facts)
        self._written: tuple[int, Path] | None = None  # a policy's version, and where it is whole

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint, the best one included, after the first round.
        `ConfigError` if it belongs to another run or model."""
        found = self._whole()
        return self._fitting(*found[0]) if found else None

    def at(self, round_number: int) -> Checkpoint | None:
        """That of a round, as `latest`."""
        found = (each for each in self._whole() if each[1].round == round_number)
        return next((self._fitting(*each) for each in found), None)

    def rounds(self) -> list[int]:
        """The rounds of complete checkpoints."""
        return sorted({progress.round for _, progress, _ in self._whole()})

    def _whole(self) -> list[tuple[Path, Progress, Mapping[str, Any]]]:
        """The newest first; the best policy is one of them if a round is behind it."""
        best = self._best_directory()
        found = self._complete() if best is None else [*self._complete(), best]
        read = [(directory, _read_state(directory)) for directory in found]
        whole = [(directory, *state) for directory, state in read if state is not None]
        whole = [each for each in whole if each[0] != best or each[1].round > 0]
        return sorted(whole, key=lambda each: -each[1].round)

    def _fitting(self, directory: Path, progress: Progress, facts: Mapping[str, Any]) -> Checkpoint:
        for name, value in self._facts.items():
            if facts.get(name) != value:
                raise ConfigError(
                    f"--data-dir {directory.parents[1]}: its checkpoint has {name} "
                    f"{facts.get(name)!r}, not {value!r}; name these, or another --data-dir"
                )
        return Checkpoint(directory, progress)

    def read(self, directory: Path) -> Checkpoint | None:
        """The one in this directory, of any node; None: none is there. Errors as `latest`."""
        state = _read_state(directory)
        return None if state is None else self._fitting(directory, *state)

    @contextmanager
    def held(self, round_number: int | None = None) -> Iterator[Checkpoint | None]:
        """The newest complete checkpoint, or that of a round. A running node does not remove it
        within the block."""
        while True:
            found = self.latest() if round_number is None else self.at(round_number)
            if found is None:
                break
            state = found.directory / STATE_FILE
            try:
                lock = state.open()
            except FileNotFoundError:
                continue
            with lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if state.exists():  # else it was removed before we had it
                    yield found
                    return
        yield None

    def copy(self, source: Checkpoint) -> Checkpoint:
        """Take in a checkpoint of another directory."""
        final = self._directory / f"round-{source.progress.round:08d}"
        partial = final.with_suffix(TEMPORARY_SUFFIX)
        _make_empty(partial)
        for path in source.directory.iterdir():
            if path.name != STATE_FILE:
                copied = shutil.copyfile(path, partial / path.name)
                with copied.open("rb") as file:
                    os.fsync(file.fileno())
        self._finish_files(partial, final, source.progress, {})
        return Checkpoint(final, source.progress)

    async def save(
        self,
        progress: Progress,
        trainer: Trainer,
        files: Mapping[str, Content] | None = None,
        version: int | None = None,
    ) -> Path:
        """Write a checkpoint with more `files` by name, and remove those beyond the number kept. If
        the policy's `version` was the last that was saved, its files are linked. A round that is
        saved already is written again for `files` alone."""
        final = self._directory / f"round-{progress.round:08d}"
        saved = _read_state(final)
        is_same = saved is not None and saved[0] == progress  # nothing was decided since
        if is_same and not files:
            return final
        partial, best = final.with_suffix(TEMPORARY_SUFFIX), self.best()
        same = self._written[1] if self._written and self._written[0] == version else None
        if best is not None and best.progress == progress:  # nothing was done since
            same = best.directory
        if is_same:
            same = final
        await self._fill(partial, trainer, same)
        await self._run_sync(self._finish, partial, final, progress, files or {})
        self._written = None if version is None else (version, final)
        return final

    def best(self) -> Checkpoint | None:
        """The policy that did best on the validation tasks; None if none is usable."""
        directory = self._best_directory()
        state = None if directory is None else _read_state(directory)
        if directory is None or state is None:
            return None
        progress, facts = state
        fits = all(facts.get(name) == value for name, value in self._facts.items())
        return Checkpoint(directory, progress) if fits else None

    async def save_best(
        self, progress: Progress, trainer: Trainer, same: Path | None = None
    ) -> None:
        """Replace the best policy. `same`: a checkpoint of this policy, whose files are linked."""
        names = (f"{BEST}-{progress.round:08d}-{number}" for number in count())
        final = next(path for name in names if not (path := self._directory / name).exists())
        partial = final.with_suffix(TEMPORARY_SUFFIX)
        await self._fill(partial, trainer, same)
        await self._run_sync(self._finish_best, partial, final, progress)

    async def _fill(self, partial: Path, trainer: Trainer, same: Path | None) -> None:
        await self._run_sync(_make_empty, partial)
        if same is None or not await self._run_sync(_link_files, same, partial):
            await self._run_sync(_make_empty, partial)
            await trainer.save(partial)

    def put_aside(self, checkpoint: Checkpoint) -> Path:
        """Rename a checkpoint that cannot be used, so that `latest` finds the one before it."""
        aside = checkpoint.directory.with_name(f"damaged-{checkpoint.directory.name}")
        if aside.exists():
            shutil.rmtree(aside)
        checkpoint.directory.rename(aside)
        return aside

    async def reserve(self, next_index: int) -> None:
        """Record before sharing that tasks below `next_index` are spent: a node that crashes and
        resumes from the round before must not do them again."""
        await self._run_sync(self._reserve, next_index)

    def _reserve(self, next_index: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / (POSITION_FILE + TEMPORARY_SUFFIX)
        _write_synced(temporary, str(next_index).encode())
        temporary.replace(self._directory / POSITION_FILE)

    def reserved(self) -> int:
        """The first data position that was never shared; 0 if nothing was."""
        try:
            return int((self._directory / POSITION_FILE).read_text())
        except (OSError, ValueError):
            return 0

    def progress_after(self, resumed: Checkpoint | None) -> Progress:
        """The progress to go on with: tasks that were shared since the checkpoint are spent."""
        progress = resumed.progress if resumed else Progress()
        return replace(progress, next_index=max(progress.next_index, self.reserved()))

    def _best_directory(self) -> Path | None:
        """The target of the link; None if there is no target."""
        link = self._directory / BEST
        return link.resolve() if link.exists() else None

    def _finish_best(self, partial: Path, final: Path, progress: Progress) -> None:
        self._finish_files(partial, final, progress, {})
        link = self._directory / BEST
        temporary = link.with_suffix(TEMPORARY_SUFFIX)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(final.name)
        temporary.replace(link)
        _sync_directory(self._directory)
        for old in self._directory.glob(f"{BEST}-*"):
            if old.suffix == TEMPORARY_SUFFIX:  # a kill left it
                shutil.rmtree(old, ignore_errors=True)
            elif old != final:
                _remove_unless_held(old)

    def _finish(
        self, partial: Path, final: Path, progress: Progress, files: Mapping[str, Content]
    ) -> None:
        self._finish_files(partial, final, progress, files)
        for old in self._complete()[: -self._keep]:
            _remove_unless_held(old)

    def _finish_files(
        self, partial: Path, final: Path, progress: Progress, files: Mapping[str, Content]
    ) -> None:
        for name, content in files.items():
            _write_synced(partial / name, content())
        state = {"facts": self._facts, "progress": asdict(progress)}
        _write_synced(partial / STATE_FILE, json.dumps(state, indent=1).encode())
        _sync_directory(partial)
        if final.exists():
            shutil.rmtree(final)  # damaged, or it would not be written again
        partial.rename(final)
        _sync_directory(self._directory)

    def _complete(self) -> list[Path]:
        if not self._directory.is_dir():
            return []
        return sorted(
            path
            for path in self._directory.glob("round-*")
            if path.suffix != TEMPORARY_SUFFIX and (path / STATE_FILE).is_file()
        )


def _read_state(directory: Path) -> tuple[Progress, Mapping[str, Any]] | None:
    """A checkpoint's progress and facts; None if it is damaged."""
    try:
        state = json.loads((directory / STATE_FILE).read_text())
        return Progress.from_json(state["progress"]), dict(state["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remove_unless_held(directory: Path) -> None:
    """Remove a checkpoint unless a `Checkpoints.held` block uses it; a later save tries again."""
    try:
        with (directory / STATE_FILE).open("r+") as lock:  # some file systems lock no other kind
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        return


def _link_files(source: Path, target: Path) -> bool:
    """Link the files of a checkpoint, except for its state, which has a lock of its own. False if
    this file system has no hard links."""
    try:
        for path in source.iterdir():
            if path.name != STATE_FILE:
                (target / path.name).hardlink_to(path)
    except OSError:
        return False
    return True


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
