"""`swarm-node replay`: repeats a recorded round of a node bit for bit, and names the first
difference. The node may be running meanwhile."""

import json
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import trio

from node.config import NodeConfig
from node.envs.replay_turns import said_of
from node.interfaces.trainer_spec import TrainerSpec
from node.run.parts import LivePolicy, NodeParts
from node.run.progress import Progress
from node.run.recorded import RecordedRound, Recording, parts_of, recording_of
from node.run.round import Stopwatch
from node.run.sapo import Sapo
from node.stages.stage import BatchGroup
from node.train.process import TrainerProcess, open_trainer
from node.verify.held_out import Assignment, HeldOutGuard
from node.verify.verifier import ProcessVerifier, Verifier
from swarm.errors import ChildFailed, ConfigError, RemoteProtocolError, first_of
from swarm.identity import PeerId
from swarm.rollouts import ScoredGroup
from swarm.storage import private_files
from swarm.wire.codec import content_id

Say = Callable[[str], None]
# Of a group: its time and its signature are not repeated.
_NOT_REPEATED: Final = frozenset({"group_id", "created_at_s", "expires_at_s", "counters"})
_ENTRIES: Final[Mapping[str, str]] = {
    "completions": "completion",
    "token_ids": "token",
    "logprobs": "log-prob of token",
    "rewards": "reward of completion",
    "advantages": "advantage of completion",
    "token_advantages": "advantages of the tokens of completion",
}  # one of a field's entries, as people call it
_NONE: Final = "nothing"


class Differs(Exception):
    """The first difference between a round and its record, in words."""


def replay(data_dir: Path, number: int | None, say: Say) -> bool:
    """Repeat a recorded round of a node, or all of them; True if they match their records.

    Raises:
        ConfigError: the round is not recorded, or its record is damaged.
        ChildFailed: the trainer or the verifier ended.
    """
    for part, wanted in parts_of(data_dir, number).items():
        with recording_of(data_dir, part, max(wanted)) as recording, private_files():
            try:
                if not trio.run(_replay, recording, wanted, say):
                    return False
            except* (ConfigError, ChildFailed, OSError) as group:
                raise first_of(group) from None
    return True


async def _replay(recording: Recording, wanted: Sequence[int], say: Say) -> bool:
    config, start = recording.config, recording.start
    async with _trainer(recording) as trainer, ProcessVerifier.open(config) as verifier:
        try:
            await _Repeated(recording, wanted, trainer, verifier, say).run()
        except Differs as difference:
            say(f"DIFFERS: {difference}")
            here = (await trainer.origin())["facts"]
            for name in sorted({*here, *start.facts}):
                was, now = start.facts.get(name, _NONE), here.get(name, _NONE)
                if was != now:
                    say(f"  {name}: {was} in the record, {now} here")
            return False
    return True


@asynccontextmanager
async def _trainer(recording: Recording) -> AsyncIterator[TrainerProcess]:
    """The trainer as it was before the first round of the recording."""
    spec = TrainerSpec.from_record(dict(recording.start.spec))
    with tempfile.TemporaryDirectory() as room:
        async with open_trainer(spec, Path(room), recording.part) as trainer:
            yield trainer


class _AsRecorded(HeldOutGuard):
    """Assigns the tasks of a record."""

    def __init__(self, config: NodeConfig, verifier: Verifier, recorded: RecordedRound) -> None:
        super().__init__(config.run, verifier)
        self._calls = iter(recorded.assigned)

    async def assignments(self, *_: Any, **__: Any) -> tuple[list[Assignment], int]:
        await trio.lowlevel.checkpoint()
        call = next(self._calls, None)
        if call is None:
            raise Differs("tasks: more are asked for than in the record")
        return [Assignment(*each) for each in call], 0


@dataclass(slots=True)
class _Repeated:
    """Recorded rounds that are done again, part by part. Each part begins with what the record
    has, so that a difference is found where it arose."""

    recording: Recording
    wanted: Sequence[int]  # the rounds; of those before them the update alone is repeated
    trainer: TrainerProcess
    verifier: Verifier
    say: Say

    async def run(self) -> None:
        """Differs: something is not as in the record."""
        rounds = self.recording.rounds
        await self._compare_weights(self.recording.start.weights, f"before round {min(rounds)}")
        share = self._progress(rounds[min(rounds)]).validated.rate_share
        if share < 1.0:
            await self.trainer.slow_down(share)
        for number, each in rounds.items():
            if number in self.wanted:
                await self._repeat_batch(number, each)
            await self.trainer.train(each.trained)
            await self._compare_weights(each.weights, f"after round {number}")
            if number in self.wanted:
                self.say(f"MATCH: round {number}")

    def _progress(self, recorded: RecordedRound) -> Progress:
        try:
            return Progress.from_json(json.loads(recorded.progress))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.recording.part}: progress of another version") from error

    async def _compare_weights(self, recorded: Mapping[str, str], when: str) -> None:
        here = await self.trainer.digests()
        names = [each for each in {**recorded, **here} if recorded.get(each) != here.get(each)]
        if names:
            more = f", and {len(names) - 1} more of {len(here)}" if names[1:] else ""
            raise Differs(f"weights {when}: tensor {names[0]}{more}")
        self.say(f"weights {when}: {len(here)} tensors match")

    async def _repeat_batch(self, number: int, recorded: RecordedRound) -> None:
        config = self.recording.config
        if config.control or config.generate or config.replay:
            self.say(
                "samples, rewards, advantages: not repeated, because a method of control, generate "
                "or replay remembers earlier rounds; the update is repeated"
            )
            return
        sapo = self._sapo(recorded, await LivePolicy.of(self.trainer, self.trainer))
        sapo.stages.begin()
        at = sapo.view(number)
        told = "match"
        if config.engine == "torch" and config.over_provision == 1.0:
            own = await sapo.own(at, Stopwatch())
            _compare(f"round {number}: own group", recorded.own, [each.scored for each in own])
        else:
            own = [BatchGroup(each) for each in recorded.own]
            await self._compare_rewards(f"round {number}: own group", own)
            told = "have rewards that match; samples of this engine are not repeated"
        self.say(f"own groups: {_counted(recorded.own)} {told}")
        for place, each in enumerate(recorded.foreign, 1):
            await self._compare_foreign(f"round {number}: foreign group {place}", each)
        self.say(f"foreign groups: {_counted(recorded.foreign)} match their ids and rewards")
        _, trained = await sapo.staged.batch(own, recorded.foreign, at)
        _compare(f"round {number}: group of the batch", recorded.trained, trained)
        self.say(f"advantages: {len(trained)} groups of the batch match")

    def _sapo(self, recorded: RecordedRound, policy: LivePolicy) -> Sapo:
        config = self.recording.config
        parts = NodeParts.without_network(
            config,
            PeerId(self.recording.start.peer_id),
            self.verifier,
            lambda: 0.0,
            _AsRecorded(config, self.verifier, recorded),
        )
        return Sapo(parts, policy, self._progress(recorded))

    async def _compare_rewards(self, name: str, own: Sequence[BatchGroup]) -> None:
        tasks = [each.scored.group.task for each in own]
        texts = [[said_of(c) for c in each.scored.group.completions] for each in own]
        found = await self.verifier.score(tasks, texts)
        for place, (each, rewards) in enumerate(zip(own, found, strict=True), 1):
            _compare(f"{name} {place}: reward of completion", each.scored.rewards, rewards)

    async def _compare_foreign(self, name: str, each: ScoredGroup) -> None:
        if content_id(each.group) != each.group_id:
            raise Differs(f"{name}: its content is not that of its id {each.group_id.hex()[:16]}")
        try:
            _, rewards = await self.verifier.verify(each.group)
        except RemoteProtocolError as error:
            raise Differs(f"{name}: refused here: {error}") from None
        _compare(f"{name}: reward of completion", each.rewards, rewards)


def _counted(groups: Sequence[ScoredGroup]) -> str:
    completions = [each for group in groups for each in group.group.completions]
    tokens = sum(len(each.token_ids) for each in completions)
    return f"{len(groups)} groups, {len(completions)} completions, {tokens} tokens"


def _compare(name: str, recorded: Any, here: Any) -> None:
    """Differs: the first difference, by places counted from 1."""
    if (found := next(_differences(name, recorded, here), None)) is not None:
        raise Differs(found)


def _differences(name: str, recorded: Any, here: Any) -> Iterator[str]:
    """All differences of two values. Numbers are compared by their bits."""
    if is_dataclass(recorded) and type(recorded) is type(here):
        names = [each.name for each in fields(recorded) if each.name not in _NOT_REPEATED]
        for each in sorted(names, key=lambda each: each != "token_ids"):  # it says most
            inner = f"{name}: {_ENTRIES.get(each, each)}"
            if each == "group":
                inner = name
            yield from _differences(inner, getattr(recorded, each), getattr(here, each))
    elif isinstance(recorded, tuple | list) and isinstance(here, tuple | list):
        pairs = zip_longest(recorded, here, fillvalue=_NONE)
        for place, (was, now) in enumerate(pairs, 1):
            yield from _differences(f"{name} {place}", was, now)
    elif not _same(recorded, here):
        yield f"{name}: {_shown(recorded)} in the record, {_shown(here)} here"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


def _shown(value: Any) -> str:
    text = value if value is _NONE else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
