"""Transcripts of several turns: all that go on have their next turn sampled together.

The engine continues its own token ids. The node's verifier computes the replies, as receivers will.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from node.config import RunConfig
from node.envs.registry import interaction
from node.interfaces.engine import Context, Engine, Outcome, Recorded, Request, Sampling
from node.run.groups import seed_of
from node.verify.held_out import Assignment
from node.verify.verifier import Verifier
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

    prompt: str
    turns: list[Completion]  # of the policy
    replies: list[str] = field(default_factory=list)  # between them
    over: bool = False

    def goes_on(self, tokens_max: int) -> bool:
        """True if the policy may have another turn."""
        ended = self.turns[-1].finish_reason is FinishReason.STOP
        return ended and not self.over and self.tokens < tokens_max and len(self.turns) < TURNS_MAX

    @property
    def tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    def context(self, tokens_max: int) -> Context:
        said = zip(self.turns, self.replies, strict=True)
        turns = tuple((turn.token_ids, reply) for turn, reply in said)
        return Context(self.prompt, turns, tokens_max - self.tokens)

    def take(self, turn: Completion) -> None:
        """Add a turn. The transcript ends before a turn without tokens, or of an older policy
        than the last."""
        before, after = version_spans(self.turns[-1]), version_spans(turn)
        if after and (not before or before[-1][0] <= after[0][0]):
            self.turns.append(turn)
        else:
            self.replies.pop()
            self.over = True
            self.turns[-1] = replace(self.turns[-1], finish_reason=FinishReason.LENGTH)


@dataclass(eq=False, slots=True)
class Played:
    """A group in the making: the transcripts of one task."""

    task: Task
    rows: list[_Row]
    has_turns: bool
    tokens_max: int  # of all turns of a completion together
    temperature: float
    recorded: tuple[Recorded, ...] = ()  # of completions of one turn

    @property
    def open_rows(self) -> list[_Row]:
        """The transcripts that go on."""
        return [row for row in self.rows if self.has_turns and row.goes_on(self.tokens_max)]

    @property
    def done(self) -> bool:
        return not self.open_rows

    def completions(self) -> tuple[Completion, ...]:
        """Each transcript as one completion."""
        return tuple(_joined(row) if self.has_turns else row.turns[0] for row in self.rows)


class Player:
    """Plays the tasks of a run with one engine, turn by turn."""

    def __init__(self, run: RunConfig, engine: Engine, verifier: Verifier) -> None:
        self._run = run
        self._engine = engine
        self._verifier = verifier

    async def begin(
        self,
        tasks: Sequence[Task],
        requests: Sequence[Request],
        sampling: Sampling,
        seed: int,
        noise: float = 0.0,
    ) -> list[Played]:
        """The first turn of the transcripts that are requested of each task."""
        made = await self._engine.sample(requests, sampling, seed, noise)
        found: list[Played] = []
        for task, request, outcome in zip(tasks, requests, made, strict=True):
            has_turns = self._run.has_turns and interaction(task.environment) is not None
            rows = [_Row(request.prompt, [completion]) for completion in outcome.completions]
            limit = request.limit or sampling.max_new_tokens
            heat = request.temperature or sampling.temperature
            found.append(Played(task, rows, has_turns, limit, heat, outcome.recorded))
        await self._ask_replies(found)
        return found

    async def go_on(self, groups: Sequence[Played], sampling: Sampling, seed: int) -> None:
        """One more turn of each transcript that goes on. A failure loses no turn before it."""
        await self._ask_replies(groups)
        rows = [(group, row) for group in groups for row in group.open_rows]
        for heat in dict.fromkeys(group.temperature for group, _ in rows):
            alike = [(group, row) for group, row in rows if group.temperature == heat]
            contexts = [row.context(group.tokens_max) for group, row in alike]
            said = await self._engine.go_on(contexts, replace(sampling, temperature=heat), seed)
            for (_, row), turn in zip(alike, said, strict=True):
                row.take(turn)
        await self._ask_replies(groups)

    async def advance(
        self, works: Sequence[Played], enough: int, sampling: Sampling, seed: int
    ) -> None:
        """Go on until `enough` works are done; the others stop between two turns."""
        turn = 0
        while sum(each.done for each in works) < enough:
            turn += 1
            await self.go_on(works, sampling, seed_of(seed, "turn", turn))

    async def collect(self, works: Sequence[Played]) -> list[tuple[Completion, ...]]:
        """The completions of works that are done, in their order."""
        return [each.completions() for each in works]

    async def _ask_replies(self, groups: Sequence[Played]) -> None:
        """Ask for replies to last turns that have none yet."""
        asked = [
            (group.task, rows)
            for group in groups
            if (rows := [row for row in group.open_rows if len(row.replies) < len(row.turns)])
        ]
        if not asked:
            return
        replies = await self._verifier.replies(
            [task for task, _ in asked],
            [[[turn.text for turn in row.turns] for row in rows] for _, rows in asked],
        )
        for (_, rows), of_task in zip(asked, replies, strict=True):
            for row, reply in zip(rows, of_task, strict=True):
                row.over = reply is None
                if reply is not None:
                    row.replies.append(reply)


async def outcomes(
    player: Player,
    tasks: Sequence[Task],
    requests: Sequence[Request],
    sampling: Sampling,
    seed: int,
    noise: float = 0.0,
) -> list[Outcome]:
    """Generate every transcript to its end. The limit bounds all turns together."""
    groups = await player.begin(tasks, requests, sampling, seed, noise)
    await player.advance(groups, len(groups), sampling, seed)
    return [Outcome(each.completions(), each.recorded) for each in groups]


async def completions(
    player: Player, assigned: Sequence[Assignment], each: int, sampling: Sampling, seed: int
) -> list[tuple[Completion, ...]]:
    """`each` completions of each task, to their ends."""
    requests = [Request(its.prompt, each) for its in assigned]
    made = await outcomes(player, [its.task for its in assigned], requests, sampling, seed)
    return [each.completions for each in made]


def _joined(row: _Row) -> Completion:
    """A transcript as one completion."""
    text, segments = "", []
    for at, turn in enumerate(row.turns):
        if at:
            text += row.replies[at - 1]
            segments.append(Turn(Author.ENVIRONMENT, len(row.replies[at - 1]), 0))
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
