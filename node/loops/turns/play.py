"""Turn by turn: all transcripts of a batch that go on have their next turn sampled together.

The engine goes on on the ids that it sampled itself; what is said to the policy the node's own
verifier works out, in its process, as receivers will.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import cast

from node.config import RunConfig
from node.environments.registry import interaction
from node.interfaces.engine import Context, RolloutEngine, Sampling, TurnsEngine
from node.verification.verifier import Verifier
from swarm.rollouts import (
    Author,
    Completion,
    FinishReason,
    Spans,
    Task,
    Turn,
    version_spans,
)
from swarm.wire.messages import SEGMENTS_MAX

TURNS_MAX = (SEGMENTS_MAX + 1) // 2


@dataclass(eq=False, slots=True)
class _Row:
    """One transcript in the making."""

    task: Task
    prompt: str
    turns: list[Completion]  # of the policy
    heard: list[str] = field(default_factory=list)  # between them
    over: bool = False

    def goes_on(self, tokens_max: int) -> bool:
        """Whether the policy may have another turn."""
        ended = self.turns[-1].finish_reason is FinishReason.STOP
        return ended and not self.over and self.tokens < tokens_max and len(self.turns) < TURNS_MAX

    @property
    def tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def context(self, tokens_max: int) -> Context:
        said = zip(self.turns, self.heard, strict=True)
        turns = tuple((turn.token_ids, reply) for turn, reply in said)
        return Context(self.prompt, turns, tokens_max - self.tokens)

    def take(self, turn: Completion) -> None:
        """The next turn; one without tokens is none: the transcript ends before it."""
        if turn.token_ids:
            self.turns.append(turn)
        else:
            self.heard.pop()
            self.over = True
            self.turns[-1] = replace(self.turns[-1], finish_reason=FinishReason.LENGTH)


async def completions(
    run: RunConfig,
    engine: RolloutEngine,
    verifier: Verifier,
    tasks: Sequence[Task],
    prompts: Sequence[str],
    each: int,
    sampling: Sampling,
    seed: int,
) -> list[tuple[Completion, ...]]:
    """As `RolloutEngine.generate`, to the end of every transcript. `max_new_tokens` is for all
    turns of a completion together. Tasks of one turn, and runs that have no others, are generated
    as ever.

    Raises:
        ChildFailed, ConfigError: as `RolloutEngine.generate` and `Verifier.replies`.
    """
    groups = await engine.generate(prompts, each, sampling, seed)
    if not run.has_turns:
        return groups
    several = {task for task in tasks if interaction(task.environment) is not None}
    rows = [
        [_Row(task, prompt, [completion]) for completion in group]
        for task, prompt, group in zip(tasks, prompts, groups, strict=True)
    ]
    open_rows = [row for group in rows for row in group if row.task in several]
    turn = 0
    while open_rows := [row for row in open_rows if row.goes_on(sampling.max_new_tokens)]:
        turn += 1
        await _hear(verifier, open_rows)
        going_on = [row for row in open_rows if not row.over]
        contexts = [row.context(sampling.max_new_tokens) for row in going_on]
        if contexts:
            turns_engine = cast("TurnsEngine", engine)
            said = await turns_engine.go_on(contexts, sampling, _seed(seed, turn))
            for row, next_turn in zip(going_on, said, strict=True):
                row.take(next_turn)
    return [
        tuple(_joined(row) if row.task in several else row.turns[0] for row in group)
        for group in rows
    ]


async def _hear(verifier: Verifier, rows: Sequence[_Row]) -> None:
    """Ask what is said to the last turn of each row; rows of one task are neighbours."""
    by_task = [list(same) for _, same in groupby(rows, key=lambda row: row.task)]
    replies = await verifier.replies(
        [same[0].task for same in by_task],
        [[[turn.text for turn in row.turns] for row in same] for same in by_task],
    )
    for same, of_task in zip(by_task, replies, strict=True):
        for row, reply in zip(same, of_task, strict=True):
            row.over = reply is None
            if reply is not None:
                row.heard.append(reply)


def _joined(row: _Row) -> Completion:
    """A transcript as one completion."""
    text, segments = "", []
    for at, turn in enumerate(row.turns):
        if at:
            text += row.heard[at - 1]
            segments.append(Turn(Author.ENVIRONMENT, len(row.heard[at - 1]), 0))
        text += turn.text
        segments.append(Turn(Author.POLICY, len(turn.text), len(turn.token_ids)))
    spans = _spans(row.turns)
    last = row.turns[-1]
    # with no room left for a turn that was still to come, the transcript was cut
    cut = last.finish_reason is FinishReason.STOP and not row.over
    return Completion(
        text=text,
        token_ids=tuple(each for turn in row.turns for each in turn.token_ids),
        logprobs=tuple(each for turn in row.turns for each in turn.logprobs),
        finish_reason=FinishReason.LENGTH if cut else last.finish_reason,
        policy_version=min(turn.policy_version for turn in row.turns),
        spans=spans if len(spans) > 1 else (),
        segments=tuple(segments),
    )


def _spans(turns: Sequence[Completion]) -> Spans:
    """The versions of all turns, those in a row that are the same counted together."""
    runs = [run for turn in turns for run in version_spans(turn)]
    return tuple(
        (version, sum(count for _, count in same))
        for version, same in groupby(runs, key=lambda run: run[0])
    )


def _seed(seed: int, turn: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/turn/{turn}".encode()).digest()[:7])
