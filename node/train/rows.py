"""Rollout groups as the token rows of a batch, and its micro-batches. The rules for other nodes'
tokens are in `node.train.foreign`."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import torch

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import losses
from node.methods.loss_settings import Aggregation, Dpo
from node.methods.losses import Objective, expected
from node.policies.policy import Policy
from node.train.foreign import is_left_out, logprob_floor, takes_tokens
from swarm.rollouts import Author, Completion, FinishReason, Spans, informative

LOGPROB_ERROR_MAX: Final = 1e-3  # how far above zero rounding may put a log-prob
ROUNDING: Final = 1e-6  # of a sum of advantages, relative to the largest
CACHED_TOKEN_SHARE: Final = 4  # a token only attended to costs about this fraction of memory


@dataclass(slots=True)
class Row:
    """One completion to train on."""

    tokens: list[int]
    advantage: float
    own: bool
    weight: float = 0.0  # of each of its token losses
    old_logprobs: torch.Tensor | None = None  # under the policy before the update
    averaged: torch.Tensor | None = None  # the same under the average of past weights
    reference: torch.Tensor | None = None  # the same under the reference policy
    whitened: torch.Tensor | None = None  # entropies, where the loss takes them
    behaviour_logprobs: torch.Tensor | None = None  # that came with its tokens, if these are ours
    behaviour: torch.Tensor | None = None  # the same, where the loss takes them
    expected: float | None = None  # log-prob of a token of its group's, where the loss asks that
    shaping: float = 0.0  # over 0: guidance, see `losses.guided`
    guided_weight: float = 0.0  # over 0: guidance, see `losses.supervised`
    spans: Spans = ()  # runs of (policy version, tokens) of an own row
    scored: torch.Tensor | None = None  # log-probs under one of those versions
    push: float = 0.0  # d loss / d log p in an update on pairs
    source: int = 0  # number of who generated it, within the batch
    kept: torch.Tensor | None = None  # tokens that the loss trains on, where it decides that first
    before: torch.Tensor | None = None  # log-probs right before the last step
    floor: float | None = None  # tokens that were less likely before the update teach nothing
    tokens_counted: int = 0  # as how long it weighs, in a mean over tokens
    said: list[int] | None = None  # places of its tokens that the policy sampled; None: all
    begun: int = 0  # tokens of its completion before those: a draft's, of another's distribution
    factor: float = 1.0  # that its weight is multiplied by
    token_advantages: torch.Tensor | None = None  # in place of the one
    teacher: torch.Tensor | None = None  # a teacher's log-probs
    mask: torch.Tensor | None = None  # False: the token has no loss

    @property
    def count(self) -> int:
        """Tokens that are trained on, without those of an environment and of a draft."""
        return len(self.tokens) if self.said is None else len(self.said)

    @property
    def is_guidance(self) -> bool:
        return bool(self.shaping or self.guided_weight)

    @property
    def is_informative(self) -> bool:
        """True if it has an advantage, or is learned without one."""
        told = self.token_advantages
        return (
            self.advantage != 0.0
            or self.guided_weight != 0.0
            or self.teacher is not None
            or (told is not None and bool(told.any()))
        )

    @property
    def weighing(self) -> torch.Tensor | None:
        """Behaviour log-probs of a foreign row, where they came along."""
        return None if self.own else self.behaviour_logprobs


@dataclass(slots=True)
class Unit:
    """One prompt with completions: what a micro-batch is packed from."""

    prompt: list[int]
    rows: list[Row]

    @property
    def lacking(self) -> int:
        """Rows without behaviour log-probs; guidance needs none."""
        return sum(row.behaviour is None and not row.is_guidance for row in self.rows)

    @property
    def is_informative(self) -> bool:
        return any(row.is_informative for row in self.rows)


@dataclass(slots=True)
class Prepared:
    """A batch as rows, and what did not become one."""

    units: list[Unit]
    skipped: int = 0  # completions: too long, or of tokens that are none
    left_out: int = 0  # completions: foreign ones that were worse than their group


def turns_of(completion: Completion) -> list[Completion]:
    """The policy's turns, each as a completion; all but the last have ended by themselves."""
    if not completion.segments:
        return [completion]
    found, at = [], 0
    mine = [
        (turn, text)
        for turn, (author, text) in zip(completion.segments, completion.parts(), strict=True)
        if author is Author.POLICY
    ]
    for number, (turn, text) in enumerate(mine, start=1):
        reason = completion.finish_reason if number == len(mine) else FinishReason.STOP
        ids = completion.token_ids[at : at + turn.tokens]
        found.append(Completion(text, ids, (), reason, completion.policy_version))
        at += turn.tokens
    return found


class Encoder:
    """Makes rows of groups for one policy."""

    def __init__(
        self, policy: Policy, spec: TrainerSpec, row_tokens_max: int | None, objective: Objective
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._row_tokens_max = row_tokens_max
        self._objective = objective
        self._special = frozenset(policy.control_tokens())

    def prepare(self, groups: Sequence[TrainingGroup]) -> Prepared:
        """All groups that have rows. Where rows are left out and the mean is the baseline, the
        others are centred again: if long answers are the right ones, short ones are not all wrong.
        Any other baseline stays."""
        made = Prepared([])
        numbers = {name: n for n, name in enumerate(sorted({group.source for group in groups}))}
        for group in groups:
            prompt, found = self.rows(group)
            rows = [row for row in found if row is not None]
            made.skipped += len(found) - len(rows)
            # supervised answers have no part in a baseline
            compared = len(found) - (group.guided if group.guided_weight else 0)
            left = [row for row in found[:compared] if row is not None]
            if 0 < len(left) < compared and _is_centred(group.advantages[:compared]):
                _centre(left)
            kept = [row for row in rows if row.own or not is_left_out(self._spec, row.advantage)]
            made.left_out += len(rows) - len(kept)
            for row in kept:
                row.source = numbers[group.source]
                row.floor = None if row.own else logprob_floor(self._spec, row.advantage)
            if kept:
                made.units.append(Unit(prompt, kept))
        return made

    def rows(self, group: TrainingGroup) -> tuple[list[int], list[Row | None]]:
        """The prompt's tokens, and each completion's row; None: it cannot be trained on."""
        prompt = self._policy.encode_prompt(group.prompt)
        found: list[Row | None] = []
        own = len(group.completions) - group.guided
        pairs = zip(group.completions, group.advantages, strict=True)
        for place, (completion, advantage) in enumerate(pairs):
            row = (self._row if place < own else self._guidance)(group, completion, advantage)
            if row is not None and place < own:
                self._add_columns(row, group, place)
            found.append(row if row is not None and self._fits(prompt, row) else None)
        return prompt, found

    def _row(self, group: TrainingGroup, completion: Completion, advantage: float) -> Row | None:
        if completion.segments:
            told = self._transcript(group, completion, advantage)
            if told is None:
                return None
            row = told
        elif group.own_tokens and self._has_that_text(group, completion):
            row = Row(list(completion.token_ids), advantage, own=True)
            row.behaviour_logprobs = self._claimed(row.tokens, completion.logprobs)
        else:
            most = self._spec.completion_chars_max
            if most is not None and len(completion.text) > most:
                return None
            row = self._carried(group, completion, advantage)
        if completion.splices and row.weighing is not None:
            _begin_at(row, completion.splices[-1])
        row.tokens_counted = self._counted(row)
        if row.own:
            row.spans = completion.spans or ((completion.policy_version, row.count),)
        if self._objective.uses_behaviour:
            row.behaviour = row.behaviour_logprobs
        if self._objective.by_mean and row.behaviour is None and not completion.splices:
            claimed = self._claimed(list(completion.token_ids), completion.logprobs)
            row.behaviour = None if claimed is None else claimed.mean().expand(row.count)
        return row

    def _add_columns(self, row: Row, group: TrainingGroup, place: int) -> None:
        """The group's entries for this completion, by token where the tokens are the same."""
        said = row.tokens if row.said is None else [row.tokens[at] for at in row.said]
        is_same = said == list(group.completions[place].token_ids[row.begun :])

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values[row.begun :], device=self._policy.device)

        if group.weights:
            row.factor = group.weights[place]
        if group.token_advantages and (each := group.token_advantages[place]):
            row.advantage = fmean(each)
            if is_same:
                row.token_advantages = column(each)
        if is_same and self._spec.teacher_weight and group.teacher_logprobs:
            told = group.teacher_logprobs[place]
            row.teacher = column(told) if told else None
        if is_same and group.masks and (kept := group.masks[place]):
            row.mask = column(kept)
        if forced := self._forced(row):
            mask = torch.ones(row.count, dtype=torch.bool, device=self._policy.device)
            mask[forced] = False
            row.mask = mask if row.mask is None else row.mask & mask

    def _forced(self, row: Row) -> slice | None:
        """The tokens by which an engine ended the row's thought, where the budget is used up; None:
        there are none. A policy that ends it right there is not taught that either."""
        thinking = self._policy.thinking
        is_one_turn = row.count == len(row.tokens) - row.begun
        if thinking is None or not thinking.forced or not is_one_turn:
            return None
        most, end = thinking.tokens_max, self._policy.encode_special(thinking.end)
        if most is None or row.tokens[most : most + len(end)] != end:
            return None
        if thinking.end in self._policy.decode(row.tokens[:most]):
            return None
        first = most - row.begun
        return slice(max(0, first), max(0, first + len(end)))

    def _guidance(
        self, group: TrainingGroup, completion: Completion, advantage: float
    ) -> Row | None:
        """Another node's right completion, by its text alone."""
        most = self._spec.completion_chars_max
        if most is not None and len(completion.text) > most:
            return None
        row = Row(self._encoded(completion), advantage, own=False, shaping=group.shaping)
        row.guided_weight = group.guided_weight
        row.tokens_counted = self._counted(row)
        return row

    def _carried(self, group: TrainingGroup, completion: Completion, advantage: float) -> Row:
        """A foreign completion by its own tokens, where they are its text's and have log-probs;
        else by its text."""
        ids = list(completion.token_ids)
        behaviour_logprobs = self._claimed(ids, completion.logprobs)
        if (
            takes_tokens(self._spec, group.tokenizer, self._policy.fingerprint, behaviour_logprobs)
            and self._is_that_text(completion)
            and self._ends_as_told(completion)
            and len(ids) <= self._tokens_max()
        ):
            return Row(ids, advantage, own=False, behaviour_logprobs=behaviour_logprobs)
        return Row(self._encoded(completion), advantage, own=False)

    def _transcript(
        self, group: TrainingGroup, completion: Completion, advantage: float
    ) -> Row | None:
        """A completion of several turns, with the environment's between them, in our chat's words
        and not trained on. Turns are taken by their ids where a completion of one turn would be."""
        turns = turns_of(completion)
        behaviour_logprobs = self._claimed(list(completion.token_ids), completion.logprobs)
        own = group.own_tokens and (
            not group.source or all(self._is_that_text(each) for each in turns)
        )
        carried = (
            takes_tokens(self._spec, group.tokenizer, self._policy.fingerprint, behaviour_logprobs)
            and all(self._is_that_text(each) and self._ends_as_told(each) for each in turns)
            and len(completion.token_ids) <= self._tokens_max()
        )
        most, chars = self._spec.completion_chars_max, sum(len(each.text) for each in turns)
        if not (own or carried) and most is not None and chars > most:
            return None
        heard = [text for author, text in completion.parts() if author is Author.ENVIRONMENT]
        tokens: list[int] = []
        said: list[int] = []
        for at, turn in enumerate(turns):
            if at:
                tokens += self._policy.between_turns(heard[at - 1])
            ids = list(turn.token_ids) if own or carried else self._encoded(turn)
            if turn.text and not ids:
                return None
            said += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
        row = Row(tokens, advantage, own, said=said)
        row.behaviour_logprobs = behaviour_logprobs if own or carried else None
        return row

    def _encoded(self, completion: Completion) -> list[int]:
        """A text's own tokens; none if the tokenizer cannot write it, and so nothing can fit it."""
        tokens = self._policy.encode_completion(completion.text)
        if not self._policy.is_written(completion.text, tokens):
            return []
        if completion.finish_reason is FinishReason.STOP:
            tokens.append(self._policy.eos_id)
        return tokens

    def _counted(self, row: Row) -> int:
        """Tokens of the row, but an answer that is long only in our tokens, because ours are bytes,
        counts as one of the run's length."""
        return row.count if row.own else min(row.count, self._tokens_max())

    def _tokens_max(self) -> int:
        """The most tokens of a foreign completion, EOS included."""
        most = self._spec.completion_tokens_max
        return self._policy.context_tokens if most is None else most + 1

    def _has_that_text(self, group: TrainingGroup, completion: Completion) -> bool:
        """True if tokens that another machine made are those of the text, which was rewarded."""
        if not group.source or not self._knows(completion):
            return True  # made here; or no tokens of ours, which `_fits` leaves out
        return self._is_that_text(completion)

    def _is_that_text(self, completion: Completion) -> bool:
        """True if the ids decode to the text, with no special token among them but an end at the
        end: a text that spells one out may as well be typed."""
        ids = list(completion.token_ids)
        if not self._knows(completion):
            return False
        body = ids[:-1] if ids and ids[-1] in self._policy.eos_ids else ids
        if not self._special.isdisjoint(body):
            return False
        return completion.text == self._policy.decode(ids)

    def _ends_as_told(self, completion: Completion) -> bool:
        ends = completion.token_ids[-1:] != () and completion.token_ids[-1] in self._policy.eos_ids
        return ends == (completion.finish_reason is FinishReason.STOP)

    def _knows(self, completion: Completion) -> bool:
        return max(completion.token_ids, default=0) < self._policy.vocabulary

    def _claimed(self, tokens: list[int], logprobs: Sequence[float]) -> torch.Tensor | None:
        """A completion's own log-probs, if they are possible; some engines fill in zeros."""
        whole = len(logprobs) == len(tokens) and any(logprobs)
        if not whole or not all(math.isfinite(v) and v <= LOGPROB_ERROR_MAX for v in logprobs):
            return None
        return torch.tensor(logprobs, dtype=torch.float32, device=self._policy.device)

    def _fits(self, prompt: list[int], row: Row) -> bool:
        count = len(row.tokens)
        if row.own and max(row.tokens, default=0) >= self._policy.vocabulary:
            return False  # made elsewhere; looking it up would end this process
        if not row.count or not 0 < count <= self._policy.context_tokens - len(prompt):
            return False
        padded = padded_tokens([Unit(prompt, [row])])
        return self._row_tokens_max is None or padded <= self._row_tokens_max


def _begin_at(row: Row, begun: int) -> None:
    """Make context of a foreign row's first tokens. Kept of a draft, they follow neither the policy
    that drew them nor the one that kept them: no log-prob says by what to weigh them."""
    assert row.behaviour_logprobs is not None
    row.said = (list(range(len(row.tokens))) if row.said is None else row.said)[begun:]
    row.behaviour_logprobs, row.begun = row.behaviour_logprobs[begun:], begun


def weigh(rows: Sequence[Row], aggregation: Aggregation, tokens_max: int | None = None) -> None:
    """Give each row the weight of its tokens in the batch, by `token_weights`."""
    counted = [row.tokens_counted or row.count for row in rows]
    for row, count, weight in zip(
        rows, counted, losses.token_weights(counted, aggregation, tokens_max), strict=True
    ):
        row.weight = weight * count / row.count * row.factor


def expect(units: Sequence[Unit]) -> None:
    """Give each row the `expected` log-prob of its group; None where nobody knows it."""
    for unit in units:
        found = [row.behaviour for row in unit.rows if row.behaviour is not None]
        known = [each for each in found if len(each)]
        for row in unit.rows:
            row.expected = expected(known) if known else None


def take_scored(row: Row, version: int) -> None:
    """Put what this policy version was found to make of its tokens in the place of what an engine
    said; nan for tokens of versions that nobody knows."""
    assert row.scored is not None
    if row.behaviour is None:
        row.behaviour = torch.full_like(row.scored, torch.nan)
    at, found = 0, row.behaviour.clone()
    for made_by, count in row.spans:
        if made_by == version:
            found[at : at + count] = row.scored[at : at + count]
        at += count
    row.behaviour = found


def contrast(unit: Unit) -> Unit | None:
    """The best own row and the worst, the shorter among equals; None: all are alike."""
    rows = [row for row in unit.rows if row.own and not row.is_guidance]
    if not rows:
        return None
    best = max(rows, key=lambda row: (row.advantage, -row.count))
    worst = min(rows, key=lambda row: (row.advantage, row.count))
    return Unit(unit.prompt, [best, worst]) if best.advantage > worst.advantage else None


def push_apart(pairs: Sequence[Unit], set_to: Dpo) -> float:
    """Give the rows of pairs their `push` by `losses.preferred`, and return the mean loss. Without
    a reference it is the policy as it is: margins are 0."""
    moved = []
    for unit in pairs:
        best, worst = (
            0.0
            if row.before is None or row.reference is None
            else float((row.before - row.reference).sum())
            for row in unit.rows
        )
        moved.append(best - worst)
    margins = torch.tensor(moved).requires_grad_()
    loss = losses.preferred(margins, set_to).mean()
    (pushes,) = torch.autograd.grad(loss, margins)
    for unit, push in zip(pairs, pushes.tolist(), strict=True):
        unit.rows[0].push, unit.rows[1].push = push, -push
    return float(loss.detach())


def _is_centred(advantages: Sequence[float]) -> bool:
    """True if the baseline is the mean of these very completions. A median, the lead of the best,
    the mean of a larger group or of other prompts leaves a sum."""
    return abs(math.fsum(advantages)) <= ROUNDING * max(map(abs, advantages))


def _centre(rows: Sequence[Row]) -> None:
    advantages = [row.advantage for row in rows]
    mean = fmean(advantages)
    is_flat = not informative(advantages)
    for row in rows:
        row.advantage = 0.0 if is_flat else row.advantage - mean
        if row.token_advantages is not None:
            row.token_advantages -= mean


def padded_tokens(units: Sequence[Unit]) -> int:
    """Token positions that a micro-batch computes or keeps in its attention, padding included."""
    prompt = max(len(unit.prompt) for unit in units)
    rows = [row for unit in units for row in unit.rows]
    tail = max(len(row.tokens) for row in rows)
    return len(units) * prompt + len(rows) * (tail + prompt // CACHED_TOKEN_SHARE)


# A batch cut into micro-batches, so that little is padded and each fits into memory.

PASS_TOKENS: Final = 256  # what a pass costs beside its tokens, in tokens
CUTS_MAX: Final = 32  # lengths at which rows may be cut apart
PROBE_ROWS_MAX: Final = 16
PROBE_TOKENS_MAX: Final = 8192  # of completions


def pack(
    units: Sequence[Unit], tokens_max: int, kinds: Sequence[Sequence[int]] | None = None
) -> Iterator[list[Unit]]:
    """Cut units into micro-batches of at most `tokens_max` padded tokens, where one row allows.

    Units with completions of unlike lengths are split by rows. With `kinds`, sets of indices, only
    units of one set meet, in a grid in which each prompt has room for as many rows as the longest.
    """
    is_grid = kinds is not None
    for kind in kinds if kinds is not None else [range(len(units))]:
        for level in levels([units[index] for index in kind], is_grid=is_grid):
            yield from _filled(level, tokens_max, is_grid=is_grid)


def pieces(unit: Unit, tokens_max: int) -> Iterator[Unit]:
    """A unit in parts of at most `tokens_max` padded tokens, where one row allows, the shortest
    rows first."""
    piece: list[Row] = []
    for row in sorted(unit.rows, key=lambda row: len(row.tokens)):
        if piece and padded_tokens([Unit(unit.prompt, [*piece, row])]) > tokens_max:
            yield Unit(unit.prompt, piece)
            piece = []
        piece.append(row)
    yield Unit(unit.prompt, piece)


def levels(units: Sequence[Unit], *, is_grid: bool) -> list[list[Unit]]:
    """The same rows, cut apart by length where that saves more than it costs; ascending."""
    cuts = _cuts([len(row.tokens) for unit in units for row in unit.rows])
    counts = [[0] * len(cuts) for _ in units]  # rows of a unit at each cut
    for unit, steps in zip(units, counts, strict=True):
        for row in unit.rows:
            steps[bisect_left(cuts, len(row.tokens))] += 1
    least, begins = [0.0], [0]  # tokens up to a cut, and where the level that ends there begins
    for end in range(1, len(cuts) + 1):
        best, at = math.inf, 0
        together = [0] * len(units)
        for begin in range(end - 1, -1, -1):
            together = [n + steps[begin] for n, steps in zip(together, counts, strict=True)]
            cost = least[begin] + _level_tokens(units, together, cuts[end - 1], is_grid)
            if cost < best:
                best, at = cost, begin
        least.append(best)
        begins.append(at)
    found: list[list[Unit]] = []
    end = len(cuts)
    while end:
        begin = begins[end]
        found.append(_between(units, cuts[begin - 1] if begin else 0, cuts[end - 1]))
        end = begin
    return found[::-1]


def _between(units: Sequence[Unit], above: int, most: int) -> list[Unit]:
    parts = [
        Unit(unit.prompt, [row for row in unit.rows if above < len(row.tokens) <= most])
        for unit in units
    ]
    return [part for part in parts if part.rows]


def _cuts(lengths: Sequence[int]) -> list[int]:
    """Some of the lengths, the longest among them, ascending."""
    known = sorted(set(lengths))
    count = min(len(known), CUTS_MAX)
    return [known[(place + 1) * len(known) // count - 1] for place in range(count)]


def _level_tokens(units: Sequence[Unit], rows: Sequence[int], tail: int, is_grid: bool) -> int:
    """The cost of running so many rows of each unit together, all padded to `tail`."""
    there = [unit for unit, count in zip(units, rows, strict=True) if count]
    cells = len(there) * max(rows) if is_grid else sum(rows)
    return sum(len(unit.prompt) for unit in there) + cells * tail + PASS_TOKENS


def _filled(units: Sequence[Unit], tokens_max: int, *, is_grid: bool) -> Iterator[list[Unit]]:
    """Micro-batches of units, ordered so that neighbours are alike. A prompt that would pad the
    others by more than a pass costs begins the next one."""
    batch: list[Unit] = []
    for unit in sorted(units, key=lambda u: (len(u.rows) if is_grid else 0, len(u.prompt))):
        for piece in pieces(unit, tokens_max):
            whole = _padded([*batch, piece], is_grid)
            apart = _padded(batch, is_grid) + _padded([piece], is_grid) + PASS_TOKENS
            if batch and (whole > tokens_max or whole > apart):
                yield batch
                batch = []
            batch.append(piece)
    if batch:
        yield batch


def _padded(units: Sequence[Unit], is_grid: bool) -> int:
    if not units:
        return 0
    if not is_grid:
        return padded_tokens(units)
    widest = max(units, key=lambda unit: len(unit.rows))
    longest = max((row for unit in units for row in unit.rows), key=lambda row: len(row.tokens))
    return padded_tokens([Unit(unit.prompt, [longest] * len(widest.rows)) for unit in units])


def probe(batches: Sequence[Sequence[Unit]]) -> list[list[Unit]]:
    """The rows of each micro-batch on which a step is measured: own ones if any, from all over the
    batch, at most `PROBE_ROWS_MAX` and about `PROBE_TOKENS_MAX`."""
    rows = [row for batch in batches for unit in batch for row in unit.rows]
    rows = [row for row in rows if row.own] or rows
    chosen: set[int] = set()
    tokens = 0
    for row in rows[:: max(1, math.ceil(len(rows) / PROBE_ROWS_MAX))]:
        tokens += len(row.tokens)
        if chosen and tokens > PROBE_TOKENS_MAX:
            break
        chosen.add(id(row))
    return [
        [Unit(unit.prompt, [row for row in unit.rows if id(row) in chosen]) for unit in batch]
        for batch in batches
    ]
