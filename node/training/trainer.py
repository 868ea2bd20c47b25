"""One GRPO update from rollout groups, independent of padding, order and micro-batch split.

A group's prompt is run once: its keys and values are then shared, with gradients, by all its
completions: `_lean` for small models of known families, which also run what several prompts have
in common once, `_shared` for others. Models with recurrent state take the plain way, one full row
for each completion (`_plain`). All give the same log-probs but for rounding.

Groups whose advantages are all zero have no gradient. They are not computed and do not enter the
denominator of the loss: means are over the tokens that are trained.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from node.training import corrections, lean, losses
from node.training.base import TrainingGroup, TrainReport
from node.training.objectives import OBJECTIVES, Tokens
from node.training.policy import Policy
from node.training.samplers import within_unknown_share
from node.training.spec import TrainerSpec
from swarm.rollouts import Completion, FinishReason

OfLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits, targets

LOGPROB_ERROR_MAX = 1e-3  # how far above zero rounding may put a log-prob


@dataclass(slots=True)
class _Row:
    """One completion to train on."""

    tokens: list[int]
    advantage: float
    own: bool
    weight: float = 0.0  # of each of its token losses
    old_logprobs: torch.Tensor | None = None  # under the policy before the update
    claimed: torch.Tensor | None = None  # log-probs that came with its tokens, if these are ours
    behaviour: torch.Tensor | None = None  # the same, where the loss takes them
    source: int = 0  # number of who generated it, within the batch
    kept: torch.Tensor | None = None  # tokens that the loss trains on, where it decides that first


@dataclass(slots=True)
class Unit:
    """One prompt with completions: what a micro-batch is packed from."""

    prompt: list[int]
    rows: list[_Row]

    @property
    def lacking(self) -> int:
        """Rows without behaviour log-probs."""
        return sum(row.behaviour is None for row in self.rows)


@dataclass(slots=True)
class Sums:
    """What the micro-batches add up to."""

    loss: float = 0.0
    own_logprob: float = 0.0
    foreign_logprob: float = 0.0
    clipped: float = 0.0
    masked: int = 0
    unlikely: int = 0
    tokens: int = 0
    known: list[torch.Tensor] = field(default_factory=list)  # (2, T): old, behaviour

    def known_columns(self) -> torch.Tensor:
        """Log-probs before the update, and of the behaviour policy where it is known: (2, T)."""
        return torch.cat(self.known, dim=1) if self.known else torch.zeros(2, 0)


class GroupTrainer:
    """Owns the optimizer over a policy. Synchronous; not safe for use from two threads."""

    def __init__(
        self,
        policy: Policy,
        spec: TrainerSpec,
        micro_batch_tokens: int,
        row_tokens_max: int | None = None,
    ) -> None:
        """A row of more than `row_tokens_max` padded tokens is skipped; None: every row fits."""
        self.policy = policy
        self.spec = spec
        self._objective, self._set_to = OBJECTIVES[spec.loss], spec.loss_parameters()
        self.micro_batch_tokens = micro_batch_tokens
        self.row_tokens_max = row_tokens_max
        self.policy_version = 0  # optimizer updates so far
        self._lean_fits = lean.supports(policy.model)
        self.optimizer = torch.optim.Adam(
            [p for p in policy.model.parameters() if p.requires_grad], lr=spec.learning_rate
        )

    def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        """Update on one batch. Without a single trainable token the policy stays as it is."""
        started, version = time.perf_counter(), self.policy_version
        units, skipped = self._prepare(groups)
        informative, units = len(units), self._within_share(units)
        rows = [row for unit in units for row in unit.rows]
        for row, weight in zip(
            rows,
            losses.token_weights([len(row.tokens) for row in rows], self._set_to.aggregation),
            strict=True,
        ):
            row.weight = weight
        try:
            first, grad_norm, whole = self._updates(self._micro_batches(units))
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            raise
        own = sum(len(row.tokens) for row in rows if row.own)
        foreign = first.tokens - own
        far = corrections.mismatch(*first.known_columns())
        return TrainReport(
            policy_version=self.policy_version,
            loss=first.loss,
            grad_norm=grad_norm,
            trained_tokens=first.tokens if self.policy_version > version else 0,
            clip_fraction=whole.clipped / whole.tokens if whole.tokens else 0.0,
            own_logprob=first.own_logprob / own if own else math.nan,
            foreign_logprob=first.foreign_logprob / foreign if foreign else math.nan,
            skipped_completions=skipped,
            unlikely_tokens=first.unlikely,
            mask_fraction=whole.masked / whole.tokens if whole.tokens else 0.0,
            unknown_tokens=first.tokens - far.tokens if self._objective.uses_behaviour else 0,
            left_out_groups=informative - len(units),
            known_tokens=far.tokens,
            effective_share=far.effective_share,
            mismatch_k1=far.k1,
            mismatch_k3=far.k3,
            weight_max=far.weight_max,
            mismatch_mean=far.mean,
            mismatch_max=far.max,
            seconds=time.perf_counter() - started,
        )

    def logprobs(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        """Log-probs of every completion's tokens under the present policy, group by group.

        A completion that would be skipped in training gets an empty list.
        """
        return self._measured(groups, losses.token_logprobs)

    def moments(self, groups: Sequence[TrainingGroup]) -> list[list[list[list[float]]]]:
        """As `logprobs`; of each token its log-prob, and mean and variance of a sample's."""
        return self._measured(groups, losses.token_moments)

    def _measured(self, groups: Sequence[TrainingGroup], of_logits: OfLogits) -> list[list[Any]]:
        result = []
        with torch.no_grad():
            for group in groups:
                prompt, rows, _ = self._rows(group)
                unit = Unit(prompt, [row for row in rows if row is not None])
                found: dict[int, list[Any]] = {}
                for piece in _pieces(unit, self.micro_batch_tokens):
                    for row, values in zip(
                        piece.rows, self._forward([piece], of_logits), strict=True
                    ):
                        found[id(row)] = values.tolist()
                result.append([found.get(id(row), []) for row in rows])
        return result

    def _updates(self, batches: Sequence[Sequence[Unit]]) -> tuple[Sums, float, Sums]:
        """All optimizer steps of one batch: sums and norm of the first, and what was clipped,
        masked and seen over all."""
        if not batches:
            return Sums(), 0.0, Sums()
        if self.spec.updates_per_batch > 1:
            self._remember_old(batches)
        first, first_norm, whole = Sums(), 0.0, Sums()
        for step in range(self.spec.updates_per_batch):
            sums = Sums()
            self._decide_kept(batches)
            for batch in batches:
                self._backward(batch, sums)
            sums = self._summed(sums)
            grad_norm = self._clip_gradient()
            whole.clipped += sums.clipped
            whole.masked += sums.masked
            whole.tokens += sums.tokens
            if step == 0:
                first, first_norm = sums, grad_norm
            finite = math.isfinite(sums.loss) and math.isfinite(grad_norm)
            if finite:
                self.optimizer.step()
                self.policy_version += 1
            self.optimizer.zero_grad(set_to_none=True)
            if not finite:  # one such step would spoil the weights for good
                break
        return first, first_norm, whole

    def _remember_old(self, batches: Sequence[Sequence[Unit]]) -> None:
        with torch.no_grad():
            for batch in batches:
                rows = [row for unit in batch for row in unit.rows]
                for row, values in zip(rows, self._forward(batch), strict=True):
                    row.old_logprobs = values

    def _decide_kept(self, batches: Sequence[Sequence[Unit]]) -> None:
        """Ask a loss that needs all tokens at once which to train on: one more forward pass."""
        if self._objective.keep is None:
            return
        rows, found = [], [torch.zeros(5, 0, device=self.policy.device)]
        with torch.no_grad():
            for batch in batches:
                here = [row for unit in batch for row in unit.rows]
                rows += here
                found += [
                    _columns(self._tokens(row, values), row.source)
                    for row, values in zip(here, self._forward(batch), strict=True)
                ]
        ours = torch.cat(found, dim=1)
        columns, begin = self._of_all(ours)
        kept = self._objective.keep(Tokens(*columns[:4]), columns[4].long(), self._set_to)
        kept = kept[begin : begin + ours.shape[1]]
        for row, here in zip(rows, kept.split([len(row.tokens) for row in rows]), strict=True):
            row.kept = here

    # what differs where a model is cut over several processes: see `sharded`

    def _micro_batches(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """What this process computes of a batch, as it fits into memory."""
        kinds = lean.alike([unit.prompt for unit in units]) if self._lean_fits else None
        return list(pack(units, self.micro_batch_tokens, kinds))

    def _of_all(self, columns: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Columns (C, T) of the tokens of all processes, and where this one's begin."""
        return columns, 0

    def _summed(self, sums: Sums) -> Sums:
        """The sums over all processes."""
        return sums

    def _descend(self, loss: torch.Tensor) -> None:
        """Add to the gradient that of one micro-batch's part of the loss."""
        loss.backward()

    def _clip_gradient(self) -> float:
        """The norm of the whole gradient, which is at most `grad_norm_max` afterwards."""
        parameters = self.policy.model.parameters()
        return float(torch.nn.utils.clip_grad_norm_(parameters, self.spec.grad_norm_max))

    def _tokens(self, row: _Row, values: torch.Tensor) -> Tokens:
        old = values.detach() if row.old_logprobs is None else row.old_logprobs
        behaviour = old if row.behaviour is None else row.behaviour
        return Tokens(values, old, behaviour, torch.full_like(values, row.advantage), row.kept)

    def _backward(self, batch: Sequence[Unit], sums: Sums) -> None:
        rows = [row for unit in batch for row in unit.rows]
        loss = torch.zeros((), device=self.policy.device)
        for row, values in zip(rows, self._forward(batch), strict=True):
            tokens = self._tokens(row, values)
            old = tokens.proximal
            each, clipped, masked = self._objective.losses(tokens, self._set_to)
            if self.spec.foreign_logprob_min is not None and not row.own:
                unlikely = old < self.spec.foreign_logprob_min
                each = each.masked_fill(unlikely, 0.0)
                sums.unlikely += int(unlikely.sum())
            loss = loss + row.weight * each.sum()
            sums.clipped += float(clipped.sum())
            sums.masked += int(masked.sum())
            sums.tokens += len(row.tokens)
            if row.claimed is not None:
                sums.known.append(torch.stack([old, row.claimed]))
            total = float(old.sum())
            sums.own_logprob += total if row.own else 0.0
            sums.foreign_logprob += 0.0 if row.own else total
        self._descend(loss)
        sums.loss += float(loss.detach())

    # from groups to token rows

    def _prepare(self, groups: Sequence[TrainingGroup]) -> tuple[list[Unit], int]:
        units, skipped = [], 0
        numbers = {name: n for n, name in enumerate(sorted({group.source for group in groups}))}
        for group in groups:
            prompt, rows, skipped_here = self._rows(group)
            skipped += skipped_here
            kept = [row for row in rows if row is not None]
            for row in kept:
                row.source = numbers[group.source]
            if any(row.advantage != 0.0 for row in kept):
                units.append(Unit(prompt, kept))
        return units, skipped

    def _within_share(self, units: list[Unit]) -> list[Unit]:
        """Those units that the share of rows without behaviour log-probs leaves in the batch."""
        if not self._objective.uses_behaviour:
            return units
        counts = [(len(unit.rows), unit.lacking) for unit in units]
        return [units[i] for i in within_unknown_share(counts, self._set_to.unknown_share_max)]

    def _rows(self, group: TrainingGroup) -> tuple[list[int], list[_Row | None], int]:
        prompt = self.policy.encode_prompt(group.prompt)
        rows: list[_Row | None] = []
        for completion, advantage in zip(group.completions, group.advantages, strict=True):
            own = group.own_tokens and self._has_that_text(group, completion)
            if own:
                tokens, limit = list(completion.token_ids), None
            else:
                tokens = self.policy.encode_completion(completion.text)
                limit = self.spec.completion_tokens_max
                if completion.finish_reason is FinishReason.STOP:
                    tokens.append(self.policy.eos_id)
            row = _Row(tokens, advantage, own)
            if own:
                row.claimed = self._claimed(tokens, completion.logprobs)
            if self._objective.uses_behaviour:
                row.behaviour = row.claimed
            rows.append(row if self._fits(prompt, row, limit) else None)
        return prompt, rows, rows.count(None)

    def _has_that_text(self, group: TrainingGroup, completion: Completion) -> bool:
        """Whether tokens that another machine made are those of the text. The text was rewarded;
        where the tokens are others, it is what is trained on."""
        if not group.source or max(completion.token_ids, default=0) >= self.policy.vocabulary:
            return True  # made here; or no tokens of ours, which `_fits` leaves out
        return completion.text == self.policy.decode(list(completion.token_ids))

    def _claimed(self, tokens: list[int], logprobs: Sequence[float]) -> torch.Tensor | None:
        """A completion's own log-probs, where they can be ones; some engines fill in zeros."""
        whole = len(logprobs) == len(tokens) and any(logprobs)
        if not whole or not all(math.isfinite(v) and v <= LOGPROB_ERROR_MAX for v in logprobs):
            return None
        return torch.tensor(logprobs, dtype=torch.float32, device=self.policy.device)

    def _fits(self, prompt: list[int], row: _Row, completion_tokens_max: int | None) -> bool:
        count = len(row.tokens)
        if row.own and max(row.tokens, default=0) >= self.policy.vocabulary:
            return False  # made elsewhere; looking it up would end this process
        if not 0 < count <= self.policy.context_tokens - len(prompt):
            return False
        if completion_tokens_max is not None and count > completion_tokens_max + 1:  # EOS
            return False
        padded = padded_tokens([Unit(prompt, [row])])
        return self.row_tokens_max is None or padded <= self.row_tokens_max

    # log-probs with gradient

    def _forward(
        self, units: Sequence[Unit], of_logits: OfLogits = losses.token_logprobs
    ) -> list[torch.Tensor]:
        """Log-probs of each row's tokens, or what else is wanted of them, in the order of rows."""
        units = [unit for unit in units if unit.rows]
        if not units:
            return []
        with self.policy.autocast():
            if self.policy.stateful or min(len(unit.prompt) for unit in units) < 2:
                return self._plain(units, of_logits)
            way = self._lean if self._lean_fits else self._shared
            return way(units, of_logits)

    def _plain(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        result = []
        pairs = [(unit.prompt, row.tokens) for unit in units for row in unit.rows]
        ids, _ = self._right_padded([prompt + tokens for prompt, tokens in pairs])
        kept = ids.shape[1] - min(len(prompt) for prompt, _ in pairs)
        logits = self.policy.model(
            input_ids=ids[:, :-1], use_cache=False, **self.policy.logits_kept(kept)
        ).logits
        targets = ids[:, -logits.shape[1] :]
        dropped = ids.shape[1] - logits.shape[1]  # positions of the first logits
        for index, (prompt, tokens) in enumerate(pairs):
            span = slice(len(prompt) - dropped, len(prompt) - dropped + len(tokens))
            result.append(of_logits(logits[index, span], targets[index, span]))
        return result

    def _lean(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        """As `_shared`, in a grid of prompts by rows; a missing row is filled by a short one."""
        model = lean.LeanModel(self.policy.model)
        above, _ = lean.prompt_segments(
            model, [unit.prompt[:-1] for unit in units], self.policy.eos_id
        )
        each = max(len(unit.rows) for unit in units)
        tails: list[list[int]] = []
        for unit in units:
            tails += [unit.prompt[-1:] + row.tokens for row in unit.rows]
            tails += [[self.policy.eos_id] * 2] * (each - len(unit.rows))
        ids, _ = lean.pad_right(tails, self.policy.eos_id)
        start = torch.tensor([len(unit.prompt) - 1 for unit in units])
        hidden, _ = model.run(ids[:, :-1].view(len(units), each, -1), start, above)
        values = of_logits(model.logits(hidden), ids[:, 1:].view(len(units), each, -1))
        return [
            values[place, index, : len(row.tokens)]
            for place, unit in enumerate(units)
            for index, row in enumerate(unit.rows)
        ]

    def _shared(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        """Prompts without their last token fill the cache; completions, that token put first,
        are run on it. Right padding of the prompts leaves a gap that the mask hides."""
        cache, prefix_mask = self._prefix_cache(units)
        owner = [index for index, unit in enumerate(units) for _ in unit.rows]
        rows = [row for unit in units for row in unit.rows]
        tails = [units[o].prompt[-1:] + row.tokens for o, row in zip(owner, rows, strict=True)]
        ids, mask = self._right_padded(tails)
        select = torch.tensor(owner, device=self.policy.device)
        cache.batch_select_indices(select)
        lengths = torch.tensor([len(unit.prompt) - 1 for unit in units], device=ids.device)
        positions = lengths[select, None] + torch.arange(ids.shape[1] - 1, device=ids.device)
        logits = self.policy.model(
            input_ids=ids[:, :-1],
            attention_mask=torch.cat([prefix_mask[select], mask[:, :-1]], dim=1),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits
        values = of_logits(logits, ids[:, 1:])
        return [values[index, : len(row.tokens)] for index, row in enumerate(rows)]

    def _prefix_cache(self, units: Sequence[Unit]) -> tuple[DynamicCache, torch.Tensor]:
        ids, mask = self._right_padded([unit.prompt[:-1] for unit in units])
        cache = DynamicCache()
        body = getattr(self.policy.model, self.policy.model.base_model_prefix)
        body(input_ids=ids, past_key_values=cache, use_cache=True)
        return cache, mask

    def _right_padded(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, (rows, longest); pads are EOS and never attended to."""
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), self.policy.eos_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        return ids.to(self.policy.device), mask.to(self.policy.device)


def _columns(tokens: Tokens, source: int) -> torch.Tensor:
    """(5, T): what a loss decides on, and the source's number."""
    each = (tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages)
    return torch.stack([*each, torch.full_like(tokens.logprobs, source)])


def pack(
    units: Sequence[Unit], tokens_max: int, kinds: Sequence[Sequence[int]] | None = None
) -> Iterator[list[Unit]]:
    """Cut units into micro-batches of at most `tokens_max` padded tokens, where one row allows.

    Units are ordered by prompt length, so that little is padded; a unit too large for one
    micro-batch is split by rows. With `kinds`, sets of indices, only units of one set meet.
    """
    for kind in kinds if kinds is not None else [range(len(units))]:
        batch: list[Unit] = []
        for unit in sorted((units[index] for index in kind), key=lambda unit: len(unit.prompt)):
            for piece in _pieces(unit, tokens_max):
                if batch and padded_tokens([*batch, piece]) > tokens_max:
                    yield batch
                    batch = []
                batch.append(piece)
        if batch:
            yield batch


def padded_tokens(units: Sequence[Unit]) -> int:
    """Token positions that a micro-batch computes or keeps in its attention, padding included."""
    prompt = max(len(unit.prompt) for unit in units)
    rows = [row for unit in units for row in unit.rows]
    tail = max(len(row.tokens) for row in rows)
    return len(units) * prompt + len(rows) * (tail + prompt // CACHED_TOKEN_SHARE)


CACHED_TOKEN_SHARE = 4  # a token that is only attended to costs about this fraction of memory


def _pieces(unit: Unit, tokens_max: int) -> Iterator[Unit]:
    piece: list[_Row] = []
    for row in sorted(unit.rows, key=lambda row: len(row.tokens)):
        if piece and padded_tokens([Unit(unit.prompt, [*piece, row])]) > tokens_max:
            yield Unit(unit.prompt, piece)
            piece = []
        piece.append(row)
    yield Unit(unit.prompt, piece)
