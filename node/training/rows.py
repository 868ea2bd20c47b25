"""From rollout groups to the token rows of a batch: whose tokens, at which weight, which not.

The rules for other nodes' tokens are in `node.training.foreign`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import torch

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.losses import clip as losses
from node.methods.losses.ratios import expected
from node.methods.losses.settings import Aggregation
from node.policies.policy import Policy
from node.training.foreign import is_left_out, logprob_floor, takes_tokens
from swarm.rollouts import Author, Completion, FinishReason, informative

LOGPROB_ERROR_MAX: Final = 1e-3  # how far above zero rounding may put a log-prob
CACHED_TOKEN_SHARE: Final = 4  # a token only attended to costs about this fraction of memory


@dataclass(slots=True)
class Row:
    """One completion to train on."""

    tokens: list[int]
    advantage: float
    own: bool
    weight: float = 0.0  # of each of its token losses
    old_logprobs: torch.Tensor | None = None  # under the policy before the update
    claimed: torch.Tensor | None = None  # log-probs that came with its tokens, if these are ours
    behaviour: torch.Tensor | None = None  # the same, where the loss takes them
    expected: float | None = None  # log-prob of a token of its group's, where the loss asks that
    shaping: float = 0.0  # over 0: guidance, see `ratios.guided`
    source: int = 0  # number of who generated it, within the batch
    kept: torch.Tensor | None = None  # tokens that the loss trains on, where it decides that first
    before: torch.Tensor | None = None  # log-probs right before the last step
    floor: float | None = None  # tokens that were less likely before the update teach nothing
    tokens_counted: int = 0  # as how long it weighs, in a mean over tokens
    said: list[int] | None = None  # places of its tokens that the policy sampled; None: all

    @property
    def count(self) -> int:
        """Tokens that are trained on: what an environment said is none of them."""
        return len(self.tokens) if self.said is None else len(self.said)

    @property
    def weighing(self) -> torch.Tensor | None:
        """The log-probs by which it counts, where it is of another node and they came along."""
        return None if self.own else self.claimed


@dataclass(slots=True)
class Unit:
    """One prompt with completions: what a micro-batch is packed from."""

    prompt: list[int]
    rows: list[Row]

    @property
    def lacking(self) -> int:
        """Rows without behaviour log-probs; guidance needs none."""
        return sum(row.behaviour is None and not row.shaping for row in self.rows)

    @property
    def is_informative(self) -> bool:
        """True if any row has an advantage: the others have no gradient."""
        return any(row.advantage != 0.0 for row in self.rows)


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
        self, policy: Policy, spec: TrainerSpec, row_tokens_max: int | None, uses_behaviour: bool
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._row_tokens_max = row_tokens_max
        self._uses_behaviour = uses_behaviour
        added = policy.tokenizer.added_tokens_decoder.items()
        self._special = frozenset(index for index, token in added if token.special)

    def prepare(self, groups: Sequence[TrainingGroup]) -> Prepared:
        """All groups that have rows. Where rows are left out the others' advantages are centred
        again: if long answers are the right ones, the short ones are not all wrong for that."""
        made = Prepared([])
        numbers = {name: n for n, name in enumerate(sorted({group.source for group in groups}))}
        for group in groups:
            prompt, found = self.rows(group)
            rows = [row for row in found if row is not None]
            made.skipped += len(found) - len(rows)
            if rows and len(rows) < len(found):
                _centre(rows)
            kept = [row for row in rows if row.own or not is_left_out(self._spec, row.advantage)]
            made.left_out += len(rows) - len(kept)
            for row in kept:
                row.source = numbers[group.source]
                row.floor = None if row.own else logprob_floor(self._spec, row.advantage)
            if kept:
                made.units.append(Unit(prompt, kept))
        return made

    def rows(self, group: TrainingGroup) -> tuple[list[int], list[Row | None]]:
        """The prompt's tokens, and of each completion its row; None: it cannot be trained on."""
        prompt = self._policy.encode_prompt(group.prompt)
        found: list[Row | None] = []
        own = len(group.completions) - group.guided
        pairs = zip(group.completions, group.advantages, strict=True)
        for place, (completion, advantage) in enumerate(pairs):
            row = (self._row if place < own else self._guidance)(group, completion, advantage)
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
            row.claimed = self._claimed(row.tokens, completion.logprobs)
        else:
            most = self._spec.completion_chars_max
            if most is not None and len(completion.text) > most:
                return None
            row = self._carried(group, completion, advantage)
        row.tokens_counted = self._counted(row)
        if self._uses_behaviour:
            row.behaviour = row.claimed
        return row

    def _guidance(
        self, group: TrainingGroup, completion: Completion, advantage: float
    ) -> Row | None:
        """Somebody else's right completion, by its text alone."""
        most = self._spec.completion_chars_max
        if most is not None and len(completion.text) > most:
            return None
        row = Row(self._encoded(completion), advantage, own=False, shaping=group.shaping)
        row.tokens_counted = self._counted(row)
        return row

    def _carried(self, group: TrainingGroup, completion: Completion, advantage: float) -> Row:
        """A foreign completion by its own tokens, where these can be trusted to be its text's and
        their log-probs came along; else by its text."""
        ids = list(completion.token_ids)
        claimed = self._claimed(ids, completion.logprobs)
        if (
            takes_tokens(self._spec, group.tokenizer, self._policy.fingerprint, claimed)
            and self._is_that_text(completion)
            and self._ends_as_told(completion)
            and len(ids) <= self._tokens_max()
        ):
            return Row(ids, advantage, own=False, claimed=claimed)
        return Row(self._encoded(completion), advantage, own=False)

    def _transcript(
        self, group: TrainingGroup, completion: Completion, advantage: float
    ) -> Row | None:
        """A completion of several turns, with what was said to the policy between them: in our own
        words of a chat, and not trained on. Its own turns are taken by their ids where a completion
        of one turn would be."""
        turns = turns_of(completion)
        claimed = self._claimed(list(completion.token_ids), completion.logprobs)
        own = group.own_tokens and (
            not group.source or all(self._is_that_text(each) for each in turns)
        )
        carried = (
            takes_tokens(self._spec, group.tokenizer, self._policy.fingerprint, claimed)
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
            said += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
        row = Row(tokens, advantage, own, said=said)
        row.claimed = claimed if own or carried else None
        return row

    def _encoded(self, completion: Completion) -> list[int]:
        tokens = self._policy.encode_completion(completion.text)
        if completion.finish_reason is FinishReason.STOP:
            tokens.append(self._policy.eos_id)
        return tokens

    def _counted(self, row: Row) -> int:
        """An answer that is long in our tokens alone, because ours are bytes, counts as one of the
        run's length."""
        return row.count if row.own else min(row.count, self._tokens_max())

    def _tokens_max(self) -> int:
        """The most tokens of a foreign completion, EOS included."""
        most = self._spec.completion_tokens_max
        return self._policy.context_tokens if most is None else most + 1

    def _has_that_text(self, group: TrainingGroup, completion: Completion) -> bool:
        """True if tokens that another machine made are those of the text. The text was rewarded;
        where the tokens are others, it is what is trained on."""
        if not group.source or not self._knows(completion):
            return True  # made here; or no tokens of ours, which `_fits` leaves out
        return self._is_that_text(completion)

    def _is_that_text(self, completion: Completion) -> bool:
        """Also that no special token is among them but an end at the end: a text that spells one
        out may as well be typed, and is judged as that."""
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
        """A completion's own log-probs, where they can be ones; some engines fill in zeros."""
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


def weigh(rows: Sequence[Row], aggregation: Aggregation, tokens_max: int | None = None) -> None:
    """Give each row the weight of its tokens in the batch. `tokens_max`: see `token_weights`."""
    counted = [row.tokens_counted or row.count for row in rows]
    for row, count, weight in zip(
        rows, counted, losses.token_weights(counted, aggregation, tokens_max), strict=True
    ):
        row.weight = weight * count / row.count


def expect(units: Sequence[Unit]) -> None:
    """Give each row what a loss by groups compares it with; none where nobody knows it."""
    for unit in units:
        found = [row.behaviour for row in unit.rows if row.behaviour is not None]
        known = [each for each in found if len(each)]
        for row in unit.rows:
            row.expected = expected(known) if known else None


def _centre(rows: Sequence[Row]) -> None:
    advantages = [row.advantage for row in rows]
    mean = fmean(advantages)
    is_flat = not informative(advantages)
    for row in rows:
        row.advantage = 0.0 if is_flat else row.advantage - mean


def padded_tokens(units: Sequence[Unit]) -> int:
    """Token positions that a micro-batch computes or keeps in its attention, padding included."""
    prompt = max(len(unit.prompt) for unit in units)
    rows = [row for unit in units for row in unit.rows]
    tail = max(len(row.tokens) for row in rows)
    return len(units) * prompt + len(rows) * (tail + prompt // CACHED_TOKEN_SHARE)
