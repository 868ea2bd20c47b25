"""Records of rounds, from which `swarm-node replay` repeats them.

`recorded/round-00000008` in the data directory is a checkpoint after round 8. `start.record` in it
says what decides all bits of the rounds that follow, and `00000009.record` has round 9. After
`record_rounds` rounds another checkpoint begins, and the one before the last is removed.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from node.config import NodeConfig
from node.config.node import Conflict
from node.interfaces.trainer import TrainingGroup
from node.run.checkpoints import STATE_FILE, Checkpoints
from node.run.parts import NodeParts
from node.run.progress import Progress
from node.run.sapo import Sapo
from node.train import frames
from node.train.process import TrainerClient
from swarm.errors import ConfigError
from swarm.rollouts import ScoredGroup, Task
from swarm.storage import RunSync, write_whole
from swarm.texts import first_line

RECORDED: Final = "recorded"
PARTS_KEPT: Final = 2  # checkpoints with the rounds that follow them
_SUFFIX: Final = ".record"
_START: Final = f"start{_SUFFIX}"
_HASH_BYTES: Final = 32
# Who replays a record may not be its author: the sandbox is the reader's, and secrets stay out.
_LEFT_OUT: Final = frozenset({"invite", "peers", "telemetry", "verify_sandbox", "verify_read"})
T = TypeVar("T", "RecordedStart", "RecordedRound")


@dataclass(frozen=True, slots=True)
class RecordedStart:
    """A node before the first of some recorded rounds."""

    peer_id: str
    settings: str  # of the node, as JSON
    spec: Mapping[str, Any]  # of its trainer
    facts: Mapping[str, str]  # versions, processor and sizes
    weights: Mapping[str, str]  # the SHA-256 of each weight


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """All that went into one round, and all that came out."""

    progress: str  # before the round, as JSON
    assigned: tuple[tuple[tuple[Task, str, int], ...], ...]  # `Assignment`s, call by call
    own: tuple[ScoredGroup, ...]
    foreign: tuple[ScoredGroup, ...]
    trained: tuple[TrainingGroup, ...]
    weights: Mapping[str, str]  # after the round


class Recorder:
    """Records the rounds of one start of a trainer."""

    def __init__(self, node: NodeParts, trainer: TrainerClient, run_sync: RunSync) -> None:
        self._node, self._trainer, self._run_sync = node, trainer, run_sync
        self._root = node.config.data_dir / RECORDED
        self._checkpoints = Checkpoints(self._root, PARTS_KEPT, {}, run_sync)
        self._after, self._returns = 0, -1  # of the present part: its round, and rollbacks before

    async def begin(self, progress: Progress) -> None:
        """Before each round: save the policy if another part is due, as after a rollback."""
        rounds, returns = self._node.config.record_rounds, progress.validated.returns
        if progress.round < self._after + rounds and returns == self._returns:
            return
        origin = await self._trainer.origin()
        start = RecordedStart(
            self._node.peer_id,
            self._node.config.model_dump_json(exclude=set(_LEFT_OUT)),
            origin["spec"],
            origin["facts"],
            await self._trainer.digests(),
        )
        await self._run_sync(shutil.rmtree, _part(self._root, progress.round), True)
        content = partial(_packed, start)
        await self._checkpoints.save(progress, self._trainer, {_START: content})
        self._after, self._returns = progress.round, returns

    async def keep(self, before: Progress, sapo: Sapo) -> None:
        """Record the last round, which began with this progress."""
        assert sapo.outcome is not None
        outcome = sapo.outcome
        record = RecordedRound(
            json.dumps(asdict(before)),
            tuple(tuple((a.task, a.prompt, a.attempt) for a in call) for call in sapo.assigned),
            tuple(each.scored for each in outcome.own),
            tuple(outcome.foreign),
            tuple(outcome.trained),
            await self._trainer.digests(),
        )
        path = round_path(_part(self._root, self._after), sapo.progress.round)
        await self._run_sync(write_record, path, record)


def _part(root: Path, after: int) -> Path:
    return root / f"round-{after:08d}"


def round_path(part: Path, number: int) -> Path:
    return part / f"{number:08d}{_SUFFIX}"


def _packed(record: RecordedStart | RecordedRound) -> bytes:
    body = frames.pack({each.name: getattr(record, each.name) for each in fields(record)})
    return hashlib.sha256(body).digest() + body


def write_record(path: Path, record: RecordedStart | RecordedRound) -> None:
    write_whole(path, _packed(record))


def _read(path: Path, kind: type[T]) -> T:
    """ConfigError: the file is missing or damaged."""
    try:
        whole = path.read_bytes()
        body = whole[_HASH_BYTES:]
        if hashlib.sha256(body).digest() != whole[:_HASH_BYTES]:
            raise ConfigError(f"{path}: damaged: its content is not that of its hash")
        return kind(**frames.unpack(body))
    except (OSError, TypeError, ValueError, KeyError) as error:
        why = first_line(error, 200)
        raise ConfigError(f"{path}: a damaged record, or of another version: {why}") from None


def recorded_rounds(data_dir: Path) -> dict[int, Path]:
    """The recorded rounds, ascending, and the part that has each. A later start replaces them."""
    found: dict[int, Path] = {}
    for part in sorted((data_dir / RECORDED).glob("round-*[0-9]")):
        found = {number: where for number, where in found.items() if number <= _after(part)}
        names = sorted(path.stem for path in part.glob(f"*[0-9]{_SUFFIX}"))
        found |= {int(name): part for name in names}
    return found


def _after(part: Path) -> int:
    return int(part.name.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Recording:
    """Some recorded rounds in a row, with the checkpoint before them."""

    part: Path  # the checkpoint, and the records beside it
    start: RecordedStart
    rounds: Mapping[int, RecordedRound]
    config: NodeConfig


def parts_of(data_dir: Path, number: int | None) -> dict[Path, list[int]]:
    """The parts that have a recorded round, or all of them, and their rounds that are meant.

    Raises:
        ConfigError: it is not recorded.
    """
    if not data_dir.is_dir():
        raise ConfigError(f"{data_dir}: no such directory; name a node's data directory")
    known = recorded_rounds(data_dir)
    if not known:
        raise ConfigError(
            f"{data_dir}: no round is recorded; record them from the next start on: "
            f"swarm-node join --record 8 --data-dir {data_dir}"
        )
    if number is not None and number not in known:
        told = ", ".join(map(str, known))
        raise ConfigError(f"--round {number}: not recorded; take one of {told}")
    found: dict[Path, list[int]] = {}
    for each, part in known.items():
        if number in (None, each):
            found.setdefault(part, []).append(each)
    return found


@contextmanager
def recording_of(data_dir: Path, part: Path, last: int) -> Iterator[Recording]:
    """The rounds of a part up to the `last`, which a running node does not remove within the
    block. ConfigError: one of its files is missing or damaged."""
    try:
        lock = (part / STATE_FILE).open()
    except OSError as error:
        raise ConfigError(f"{part}: a damaged recording: {error.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        start = _read(part / _START, RecordedStart)
        numbers = range(_after(part) + 1, last + 1)
        rounds = {each: _read(round_path(part, each), RecordedRound) for each in numbers}
        yield Recording(part, start, rounds, _settings(data_dir, part, start))


def _settings(data_dir: Path, part: Path, start: RecordedStart) -> NodeConfig:
    try:
        found = NodeConfig.model_validate_json(start.settings)
    except (ValueError, Conflict) as error:
        why = first_line(error, 200)
        raise ConfigError(f"{part / _START}: settings of another version: {why}") from None
    return found.model_copy(update={"data_dir": data_dir})
