"""One update from rollout groups, independent of padding, order and micro-batch split.

A group's prompt is run once, and its completions share its keys and values with gradients: by
`_lean` for small models of known families, by `_shared` for others. Models with recurrent state
take a full row for each completion (`_plain`). Log-probs are equal but for rounding.

Groups without advantage are not computed and do not enter the denominator of the loss."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

from node.engines.recording import states_after
from node.interfaces.trainer import DamagedCheckpoint, LagFigures, TrainingGroup, TrainReport
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import losses
from node.methods.choices import chosen_correction, chosen_loss, chosen_preference
from node.methods.chunks import LOGITS_MAX, OfLogits, chunk_tokens, in_chunks, recompute_layers
from node.methods.importance_weights import importance_weights
from node.methods.loss_settings import EwmaLoss, LossSettings, StaleLoss
from node.methods.losses import Tokens
from node.methods.samplers import within_unknown_share
from node.policies import checkpoint, lean, prefixes
from node.policies.policy import Policy
from node.system.machine import give_back_at_once
from node.train import default_rate as suited
from node.train.foreign import weights as foreign_weights
from node.train.kept_weights import KeptWeights
from node.train.rows import (
    Encoder,
    Prepared,
    Row,
    Unit,
    contrast,
    expect,
    pack,
    pieces,
    probe,
    push_apart,
    take_scored,
    weigh,
)
from node.train.step_guard import StepGuard, take_back
from node.train.version_lag import VersionLag

# Kept weights: their file in a checkpoint, and the field of a row for their log-probs.
_AVERAGE: Final = "averaged"
_REFERENCE: Final = "reference"
_LARGE: Final = 1e3  # logits, in looking for a cap on them
LAGS_MAX: Final = 16  # that are told apart in a report
_BATCHES: Final = "batches"  # in a checkpoint, beside the step guard's record

Pass = Callable[[Sequence[Unit], OfLogits], list[torch.Tensor]]


@dataclass(slots=True)
class _Lagged:
    """The sums over tokens of one lag."""

    tokens: int = 0
    clipped: float = 0.0
    masked: int = 0
    known: list[torch.Tensor] = field(default_factory=list)  # (2, T): old, behaviour

    def figures(self, lag: int) -> LagFigures:
        share = None
        if self.known:
            share = losses.mismatch(*torch.cat(self.known, dim=1)).effective_share
        return LagFigures(
            lag, self.tokens, share, self.clipped / self.tokens, self.masked / self.tokens
        )


@dataclass(slots=True)
class Sums:
    """The sums over micro-batches."""

    loss: float = 0.0
    own_logprob: float = 0.0
    foreign_logprob: float = 0.0
    reference_kl: float = 0.0
    clipped: float = 0.0
    masked: int = 0
    unlikely: int = 0
    tokens: int = 0
    own_pull: float = 0.0  # |d loss / d log p| over tokens of ours
    foreign_pull: float = 0.0  # the same over others'
    known: list[torch.Tensor] = field(default_factory=list)  # (2, T): old, behaviour
    by_lag: dict[int, _Lagged] = field(default_factory=dict)  # of this process alone

    def note_lag(self, row: Row, version: int, clipped: torch.Tensor, masked: torch.Tensor) -> None:
        """Count a row by the age of its first token's version, in updates."""
        if not row.spans:
            return
        lag = min(max(0, version - row.spans[0][0]), LAGS_MAX - 1)
        found = self.by_lag.setdefault(lag, _Lagged())
        found.tokens += row.count
        found.clipped += float(clipped.sum())
        found.masked += int(masked.sum())
        found.known += self.known[-1:] if row.behaviour_logprobs is not None else []

    def known_columns(self) -> torch.Tensor:
        """Log-probs before the update and of the behaviour policy, where it is known: (2, T)."""
        return torch.cat(self.known, dim=1) if self.known else torch.zeros(2, 0)

    def foreign_share(self) -> float:
        """Share of the total |dL/dlogp| that comes from foreign tokens; nan without any."""
        whole = self.own_pull + self.foreign_pull
        return self.foreign_pull / whole if whole else math.nan


@dataclass(slots=True)
class _Batch:
    """Groups whose gradient is added up for the next steps, and what came of the steps."""

    units: list[Unit] = field(default_factory=list)
    batches: list[list[Unit]] = field(default_factory=list)  # of micro-batches
    skipped: int = 0  # completions
    left_out: int = 0
    left_out_groups: int = 0
    sums: Sums = field(default_factory=Sums)  # of the step to come
    first: Sums | None = None  # of the first step
    whole: Sums = field(default_factory=Sums)  # what was clipped, masked and seen over all
    grad_norm: float = 0.0  # of the first
    step_kl: float = math.nan  # of the largest step
    taken_back: int = 0
    rate: float = math.nan  # of the last
    is_trained: bool = False  # a step was made that stands
    seconds: float = 0.0

    @property
    def rows(self) -> list[Row]:
        return [row for unit in self.units for row in unit.rows]

    def note(self, sums: Sums, grad_norm: float) -> None:
        self.whole.clipped += sums.clipped
        self.whole.masked += sums.masked
        self.whole.tokens += sums.tokens
        if self.first is None:
            self.first, self.grad_norm = sums, grad_norm
        self.sums = Sums()


# Long: the ways of one forward pass share the model and the memory's bounds.
class GroupTrainer:
    """Owns the optimizer over a policy. Synchronous; not safe for use from two threads."""

    def __init__(
        self,
        policy: Policy,
        spec: TrainerSpec,
        micro_batch_tokens: int,
        row_tokens_max: int | None = None,
        recomputes: bool = False,
    ) -> None:
        """Rows of more than `row_tokens_max` padded tokens are skipped; None: every row fits.
        `recomputes`: layers keep their input alone and run again in the backward pass."""
        self.policy = policy
        self.spec = spec
        self._correction = chosen_correction(spec.correction) if spec.correction else None
        self.micro_batch_tokens = micro_batch_tokens
        self.row_tokens_max = row_tokens_max
        self.policy_version = 0  # optimizer updates so far
        self._preference = chosen_preference(spec.preference) if spec.preference else None
        self._batches = 0  # trained on so far
        self._update = 0  # number of the one on the present batch
        self._batch: _Batch | None = None  # whose gradient waits for a step
        self.step_guard = StepGuard()
        self.rate_share = 1.0  # that updates take, by what evaluations showed
        self._recomputes = recomputes and recompute_layers(policy.model)
        if self._recomputes:
            give_back_at_once()
        self._head: tuple[Callable[[torch.Tensor], torch.Tensor] | None] | None = None  # not tried
        self.logits_max = LOGITS_MAX
        trained = [p for p in policy.model.parameters() if p.requires_grad]
        adapted = 0 if policy.adapter is None else sum(p.numel() for p in trained)
        base = policy.parameters - adapted
        self._lean_fits = lean.supports(policy.model) and lean.trains(base, adapted)
        rate, warm_up = spec.learning_rate, spec.warm_up_updates
        self.suited = suited.suited(base, adapted, rate, warm_up)
        self.optimizer = torch.optim.Adam(trained, lr=self.suited.learning_rate, fused=True)
        # a fused step leaves tensor versions alone, by which rounded copies are known to be old
        self.optimizer.register_step_post_hook(lambda *_: increment_version(trained))
        self._trained = trained
        self._snapshots: dict[int, KeptWeights] = {}  # by policy version
        self._kept: dict[str, KeptWeights] = {}
        self._learn_by(chosen_loss(spec.loss))
        if spec.kl_weight:
            self._kept[_REFERENCE] = KeptWeights(trained)
        rounds = spec.generates_in == "bfloat16" and policy.adapter is None
        self._version_lag = VersionLag(spec.model, policy.model) if rounds else None

    def _learn_by(self, set_to: LossSettings) -> None:
        self._set_to, self._objective = set_to, losses.objective_of(set_to)
        self._encoder = Encoder(self.policy, self.spec, self.row_tokens_max, self._objective)
        if isinstance(set_to, EwmaLoss) and _AVERAGE not in self._kept:
            self._kept[_AVERAGE] = KeptWeights(self._trained)

    def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        """Update on one batch. Without a single trainable token the policy stays as it is."""
        self._drop()
        self.forward_backward(groups)
        return self.optim_step()

    def forward_backward(self, groups: Sequence[TrainingGroup], loss: Any = None) -> float:
        """Add the gradient of these groups' loss to that of the groups before them since the last
        `optim_step`, and return the loss. The denominator is of these groups alone. `loss`: as in
        settings, from here on; None: as before."""
        if loss is not None:
            self._learn_by(chosen_loss(loss))
        with self._whole_or_none() as batch:
            units, made, left_out_groups = self._prepare(groups)
            rows = [row for unit in units for row in unit.rows]
            weigh(rows, self._set_to.aggregation, self.spec.completion_tokens_max)
            batches = self._micro_batches(units)
            batch.skipped += made.skipped
            batch.left_out += made.left_out
            batch.left_out_groups += left_out_groups
            before = batch.sums.loss
            if batches:
                self._remember_kept(batches, _REFERENCE)
                self._whiten_entropies(batches)
                if self.spec.updates_per_batch > 1:
                    self._remember(batches, "old_logprobs")
                self._add_gradient(batches, batch.sums, 0)
            batch.units += units
            batch.batches += batches
            return batch.sums.loss - before

    def optim_step(self, learning_rate: float | None = None) -> TrainReport:
        """Update by the gradient so far, and by the later gradients of `updates_per_batch`.
        `learning_rate`: of this update; None: the trainer's own, with its warm-up and caution."""
        with self._whole_or_none() as batch:
            for update in range(self.spec.updates_per_batch if batch.batches else 0):
                if update:
                    self._add_gradient(batch.batches, batch.sums, update)
                if not self._take(batch, learning_rate):
                    break
            pairs = self._prefer(batch.units) if batch.is_trained else (0, math.nan)
        self._batch = None
        return self._report(batch, *pairs)

    def _report(self, batch: _Batch, pairs: int, pairs_loss: float) -> TrainReport:
        first, whole, rows = batch.first or Sums(), batch.whole, batch.rows
        own = sum(row.count for row in rows if row.own)
        foreign = first.tokens - own
        return TrainReport(
            policy_version=self.policy_version,
            loss=first.loss,
            grad_norm=batch.grad_norm,
            trained_tokens=first.tokens if batch.is_trained else 0,
            clip_fraction=whole.clipped / whole.tokens if whole.tokens else 0.0,
            own_logprob=first.own_logprob / own if own else math.nan,
            foreign_logprob=first.foreign_logprob / foreign if foreign else math.nan,
            reference_kl=first.reference_kl / own if own and self.spec.kl_weight else math.nan,
            preference_pairs=pairs,
            preference_loss=pairs_loss,
            skipped_completions=batch.skipped,
            left_out_completions=batch.left_out,
            weighted_tokens=sum(row.count for row in rows if row.weighing is not None),
            step_kl=batch.step_kl,
            steps_taken_back=batch.taken_back,
            rate_scale=self.step_guard.caution,
            step_rate=batch.rate,
            unlikely_tokens=first.unlikely,
            foreign_gradient=first.foreign_share(),
            mask_fraction=whole.masked / whole.tokens if whole.tokens else 0.0,
            unknown_tokens=self._unknown_tokens(rows) if first.tokens else 0,
            left_out_groups=batch.left_out_groups,
            **_distances(first),
            seconds=batch.seconds,
            version_lag=self._lag(batch.batches, batch.seconds) if batch.is_trained else math.nan,
            by_lag=tuple(each.figures(lag) for lag, each in sorted(first.by_lag.items())),
        )

    @contextmanager
    def _whole_or_none(self) -> Iterator[_Batch]:
        """The batch under way, timed. An error within the block drops it."""
        began_s = time.perf_counter()
        self._batch = batch = self._batch or _Batch()
        try:
            yield batch
        except BaseException:
            self._drop()
            raise
        batch.seconds += time.perf_counter() - began_s

    def _drop(self) -> None:
        """Forget gradients that no step has taken."""
        self._batch = None
        self.optimizer.zero_grad(set_to_none=True)

    def _lag(self, batches: Sequence[Sequence[Unit]], seconds: float) -> float:
        if self._version_lag is None:
            return math.nan

        def logprobs() -> torch.Tensor:
            return torch.cat([each for batch in probe(batches) for each in self._forward(batch)])

        return self._version_lag.measure(self.policy_version, seconds, logprobs)

    def _unknown_tokens(self, rows: Sequence[Row]) -> int:
        if not self._objective.uses_behaviour:
            return 0
        return sum(row.count for row in rows if row.behaviour is None)

    def logprobs(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        """Log-probs of every completion's tokens under the present policy, group by group. A
        completion that training would skip gets an empty list."""
        return self._measured(groups, losses.token_logprobs)

    def moments(self, groups: Sequence[TrainingGroup]) -> list[list[list[list[float]]]]:
        """As `logprobs`; of each token its log-prob, and mean and variance of a sample's."""
        return self._measured(
            groups, lambda logits, targets: losses.token_moments(self._heated(logits), targets)
        )

    def features(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        """The last hidden state (H,) at each completion's last token; empty as in `logprobs`."""
        result = []
        with torch.no_grad(), self.policy.autocast():
            for group in groups:
                prompt, rows = self._encoder.rows(group)
                whole = [prompt + row.tokens for row in rows if row is not None]
                states = iter(states_after(self.policy, whole))
                result.append([[] if row is None else list(next(states)) for row in rows])
        return result

    def _measured(self, groups: Sequence[TrainingGroup], of_logits: OfLogits) -> list[list[Any]]:
        result = []
        with torch.no_grad():
            for group in groups:
                prompt, rows = self._encoder.rows(group)
                unit = Unit(prompt, [row for row in rows if row is not None])
                found: dict[int, list[Any]] = {}
                for piece in pieces(unit, self.micro_batch_tokens):
                    for row, values in zip(
                        piece.rows, self._forward([piece], of_logits), strict=True
                    ):
                        found[id(row)] = values.tolist()
                result.append([found.get(id(row), []) for row in rows])
        return result

    def save(self, directory: Path) -> None:
        for name, kept in self._kept.items():
            kept.save(directory / f"{name}.safetensors")
        step_guard = self.step_guard.to_record() | {_BATCHES: self._batches}
        checkpoint.save(directory, self.policy, self.optimizer, self.policy_version, step_guard)

    def resume(self, directory: Path) -> None:
        """Restore what `save` wrote; errors as in `checkpoint.load`."""
        self._drop()
        self._snapshots.clear()
        self.policy_version = checkpoint.load(directory, self.policy, self.optimizer)
        for name, kept in self._kept.items():
            kept.load(directory / f"{name}.safetensors")
        record = checkpoint.step_guard_of(directory)
        try:
            self.step_guard = StepGuard.from_record(record)
            self._batches = int(record.get(_BATCHES, 0))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(
                f"checkpoint damaged: {directory}: its step guard and rate do not load"
            ) from error

    def roll_back(self, directory: Path) -> None:
        """Take weights, second moments and step guard from a checkpoint, with no momentum. The
        version rises and random numbers go on. Errors as in `checkpoint.load`."""
        version, numbers = self.policy_version + 1, torch.get_rng_state()
        self.resume(directory)
        torch.set_rng_state(numbers)
        self.policy_version = version
        for state in self.optimizer.state.values():
            state["exp_avg"].zero_()

    def take_over(self, policy_version: int) -> None:
        """Go on from weights that were loaded from elsewhere."""
        self.policy_version = policy_version
        for kept in self._kept.values():
            kept.restart()

    def _add_gradient(self, batches: Sequence[Sequence[Unit]], sums: Sums, update: int) -> None:
        """One backward pass over micro-batches, for the update of this number on their batch."""
        self._update = update
        self._remember_kept(batches, _AVERAGE)
        self._decide_kept(batches)
        for batch in batches:
            self._backward(batch, sums)

    def _take(self, batch: _Batch, learning_rate: float | None) -> bool:
        """One step by the gradient so far. False: it is not finite, or the guard took it back."""
        sums = self._summed(batch.sums)
        grad_norm = self._clipped_gradient()
        batch.note(sums, grad_norm)
        finite = math.isfinite(sums.loss) and math.isfinite(grad_norm)
        stands = finite and self._step(batch.batches, batch, learning_rate)
        if stands:
            self._stood()
            batch.is_trained = True
        self.optimizer.zero_grad(set_to_none=True)
        return stands

    def _stood(self) -> None:
        """Note a step that was made."""
        self.policy_version += 1
        if isinstance(self._set_to, EwmaLoss):
            self._kept[_AVERAGE].follow(self._set_to.decay)
        every = self.spec.kl_reset_every
        if every and self.policy_version % every == 0 and _REFERENCE in self._kept:
            self._kept[_REFERENCE].restart()

    def _prefer(self, units: Sequence[Unit]) -> tuple[int, float]:
        """Make one update on pairs of the batch where that is due: their number, and the loss."""
        self._batches += 1
        pairs: list[Unit] = []
        if self._preference is not None and self._batches % self._preference.every == 0:
            pairs = [pair for unit in units if (pair := contrast(unit)) is not None]
        if self._preference is None or not pairs:
            return 0, math.nan
        batches = self._micro_batches(pairs)
        self._remember(batches, "before")
        self._remember_kept(batches, _REFERENCE)
        loss = push_apart(pairs, self._preference)
        for batch in batches:
            rows = [row for unit in batch for row in unit.rows]
            found = zip(rows, self._forward(batch), strict=True)
            self._descend(torch.stack([row.push * values.sum() for row, values in found]).sum())
        norm = self._clip_gradient(self.spec.grad_norm_max)
        if math.isfinite(norm) and self._step(batches, _Batch()):
            self._stood()
        self.optimizer.zero_grad(set_to_none=True)
        return len(pairs), loss

    def _clipped_gradient(self) -> float:
        """The norm of the gradient before it was clipped."""
        limit = self.spec.grad_norm_max
        if self.spec.clips_to_median:
            limit = self.step_guard.norm_bound(limit)
        norm = self._clip_gradient(limit)
        self.step_guard.note_norm(norm)
        return norm

    def _step(
        self, batches: Sequence[Sequence[Unit]], done: _Batch, learning_rate: float | None = None
    ) -> bool:
        """Take one step. False: it moved the policy too far and was taken back."""
        factor = self.suited.warmth(self.policy_version) * self.step_guard.caution * self.rate_share
        if learning_rate is not None:
            factor = learning_rate / self.suited.learning_rate
        done.rate = factor * self.suited.learning_rate
        with _rate_times(self.optimizer, factor):
            self.optimizer.step()
            if not self.spec.step_guard:
                return True
            move = self._moved(batches)
            done.step_kl = move if math.isnan(done.step_kl) else max(done.step_kl, move)
            if self.step_guard.takes(move):
                return True
            take_back(self.optimizer)
        done.taken_back += 1
        return False

    def _moved(self, batches: Sequence[Sequence[Unit]]) -> float:
        """Divergence (k3, nats a token) of the last step on some of the rows."""
        found = [torch.zeros(2, 0, device=self.policy.device)]
        with torch.no_grad():
            for batch in probe(batches):
                rows = [row for unit in batch for row in unit.rows]
                found += [
                    torch.stack([values, row.before])
                    for row, values in zip(rows, self._forward(batch), strict=True)
                    if row.before is not None
                ]
        columns, _ = self._of_all(torch.cat(found, dim=1))
        return losses.mismatch(*columns).k3

    def _remember_kept(self, batches: Sequence[Sequence[Unit]], name: str) -> None:
        if name in self._kept:
            with self._kept[name].loaded():
                self._remember(batches, name)

    def _remember(
        self, batches: Sequence[Sequence[Unit]], column: str, of_logits: OfLogits | None = None
    ) -> None:
        """Keep `of_logits`, by default the present log-probs, in this field of the rows."""
        with torch.no_grad():
            for batch in batches:
                rows = [row for unit in batch for row in unit.rows]
                for row, values in zip(rows, self._forward(batch, of_logits), strict=True):
                    setattr(row, column, values)

    def _whiten_entropies(self, batches: Sequence[Sequence[Unit]]) -> None:
        """For a loss that asks: each token's entropy, compared to those of the whole batch."""
        if not self._objective.by_entropy:
            return
        self._remember(batches, "whitened", self._entropies)
        rows = [row for batch in batches for unit in batch for row in unit.rows]
        found = [row.whitened for row in rows if row.whitened is not None]
        ours = torch.cat([torch.zeros(0, device=self.policy.device), *found])
        of_all, _ = self._of_all(ours[None])
        for row, entropies in zip(rows, found, strict=True):
            row.whitened = losses.whiten(entropies, of_all)

    def _entropies(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -losses.token_moments(self._heated(logits), targets)[..., 1]

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
        for row, here in zip(rows, kept.split([row.count for row in rows]), strict=True):
            row.kept = here

    # overridden where a model is sharded over several processes: `sharded_trainer`

    def _micro_batches(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """This process's share of a batch, cut so that it fits into memory."""
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
        with self.policy.with_rounded():  # for layers that run again
            loss.backward()

    def _clip_gradient(self, norm_max: float) -> float:
        """The norm of the whole gradient, which is at most `norm_max` afterwards."""
        return float(torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), norm_max))

    def _tokens(self, row: Row, values: torch.Tensor) -> Tokens:
        old = values.detach() if row.old_logprobs is None else row.old_logprobs
        behaviour = old if row.behaviour is None else row.behaviour
        if row.expected is not None:
            behaviour = torch.full_like(values, row.expected)
        advantages = row.token_advantages
        if advantages is None:
            advantages = torch.full_like(values, row.advantage)
        if row.teacher is not None:
            was = row.behaviour_logprobs if row.own else None  # others may make theirs up
            was = old if was is None else was
            advantages = losses.taught(advantages, was, row.teacher, self.spec.teacher_weight)
        told = (row.kept, row.own, self._update, row.whitened, row.averaged)
        return Tokens(values, old, behaviour, advantages, *told)

    def _backward(self, batch: Sequence[Unit], sums: Sums) -> None:
        rows = [row for unit in batch for row in unit.rows]
        loss = torch.zeros((), device=self.policy.device)
        pulls = torch.zeros(2, device=self.policy.device)  # by own rows, and by others'
        for row, values in zip(rows, self._forward(batch), strict=True):
            values.register_hook(partial(_add_size, pulls, int(not row.own)))
            tokens = self._tokens(row, values)
            old, row.before = tokens.proximal, values.detach()
            each, clipped, masked = self._losses(row, tokens)
            weights = self._weights(row, tokens)
            if weights is not None:
                each = each * weights
                masked = masked | (weights == 0.0)
            if row.floor is not None:
                unlikely = old < row.floor
                each = each.masked_fill(unlikely, 0.0)
                sums.unlikely += int(unlikely.sum())
            if row.own and row.reference is not None:
                far = losses.divergence(values, row.reference)
                each = each + self.spec.kl_weight * far
                sums.reference_kl += float(far.detach().sum())
            if row.mask is not None:
                each = each.masked_fill(~row.mask, 0.0)
                masked = masked | ~row.mask
            loss = loss + row.weight * each.sum()
            sums.clipped += float(clipped.sum())
            sums.masked += int(masked.sum())
            sums.tokens += row.count
            if row.own and row.behaviour_logprobs is not None:
                sums.known.append(torch.stack([old, row.behaviour_logprobs]))
            sums.note_lag(row, self.policy_version, clipped, masked)
            total = float(old.sum())
            sums.own_logprob += total if row.own else 0.0
            sums.foreign_logprob += 0.0 if row.own else total
        self._descend(loss)
        own_pull, foreign_pull = pulls.tolist()
        sums.own_pull += own_pull
        sums.foreign_pull += foreign_pull
        sums.loss += float(loss.detach())

    def _losses(self, row: Row, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if row.guided_weight:
            return losses.supervised(tokens.logprobs, row.guided_weight)
        if row.shaping:
            return losses.guided(tokens.logprobs, tokens.advantages, row.shaping)
        return self._objective.losses(tokens, self._set_to)

    def _weights(self, row: Row, tokens: Tokens) -> torch.Tensor | None:
        """Weights of a row's tokens; None: 1 each. A loss that uses behaviour log-probs weighs by
        itself."""
        if self._objective.uses_behaviour or row.is_guidance:
            return None
        if self._correction is not None and row.behaviour_logprobs is not None:
            columns = (tokens.proximal, row.behaviour_logprobs, tokens.advantages)
            return importance_weights(*columns, self._correction)
        if row.weighing is None:
            return None
        return foreign_weights(tokens.proximal, row.weighing)

    # from groups to token rows

    def _prepare(self, groups: Sequence[TrainingGroup]) -> tuple[list[Unit], Prepared, int]:
        """The rows to train on, the counts of the groups, and the number of informative groups that
        are left out for their share of rows without behaviour log-probs.

        The share is of the whole batch, own groups without advantage included: a policy that fails
        at all of its own tasks needs the others' groups most."""
        made = self._encoder.prepare(groups)
        self._score_by_snapshots(made.units)
        if self._objective.by_group:
            expect(made.units)
        units = [unit for unit in made.units if unit.is_informative]
        if not self._objective.uses_behaviour:
            return units, made, 0
        idle = [unit for unit in made.units if not unit.is_informative and not unit.lacking]
        counts = [(len(unit.rows), unit.lacking) for unit in units]
        assert isinstance(self._set_to, StaleLoss)
        share_max = self._set_to.unknown_share_max
        within = within_unknown_share(counts, share_max, sum(len(unit.rows) for unit in idle))
        return [units[place] for place in within], made, len(units) - len(within)

    def _score_by_snapshots(self, units: Sequence[Unit]) -> None:
        """Take behaviour log-probs from the kept weights of the versions that made the tokens
        (Missing Old Logits, arXiv 2605.12070). Tokens of other versions keep an engine's."""
        if not isinstance(self._set_to, StaleLoss) or not self._set_to.snapshots:
            return
        if self.policy_version not in self._snapshots:
            self._snapshots[self.policy_version] = KeptWeights(self._trained)
        for version in sorted(self._snapshots)[: -self._set_to.snapshots]:
            del self._snapshots[version]
        for version, kept in self._snapshots.items():
            made = [Unit(u.prompt, [r for r in u.rows if version in dict(r.spans)]) for u in units]
            batches = self._micro_batches([unit for unit in made if unit.rows])
            with kept.loaded():
                self._remember(batches, "scored")
            for row in (row for unit in made for row in unit.rows):
                take_scored(row, version)
        for row in (row for unit in units for row in unit.rows):
            if row.behaviour is not None and row.behaviour.isnan().any():
                row.behaviour = None

    # log-probs with gradient

    def _forward(
        self, units: Sequence[Unit], of_logits: OfLogits | None = None
    ) -> list[torch.Tensor]:
        """For each row, `of_logits` of the tokens that its policy sampled; by default their
        log-probs at the run's temperature."""
        rows = [row for unit in units for row in unit.rows]
        found = self._forward_all(units, of_logits or self._tempered)
        pairs = zip(rows, found, strict=True)
        return [values if row.said is None else values[row.said] for row, values in pairs]

    def _forward_all(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        """As `_forward`, of all tokens, also of an environment's."""
        units = [unit for unit in units if unit.rows]
        if not units:
            return []
        with self.policy.autocast():
            passes = self.passes()
            if "shared" not in passes or min(len(unit.prompt) for unit in units) < 2:
                return self._plain(units, of_logits)
            if "lean" in passes and self._is_short(units):
                return self._lean(units, of_logits)
            has_common = any(len(unit.rows) > 1 for unit in units)
            return (self._shared if has_common else self._plain)(units, of_logits)

    def passes(self) -> Mapping[str, Pass]:
        """The forward passes that batches may take, by name. Autocast is the caller's."""
        found: dict[str, Pass] = {"plain": self._plain}
        if self.policy.plain or self._recomputes:  # a cache would be filled once more
            return found
        found["shared"] = self._shared
        if self._lean_fits:
            found["lean"] = self._lean
        return found

    def _is_short(self, units: Sequence[Unit]) -> bool:
        """True if the lean pass's attention scores fit its limit."""
        rows = [row for unit in units for row in unit.rows]
        scores = lean.scores_of_rows(
            self.policy.model,
            len(units),
            max(len(unit.rows) for unit in units),
            max(len(row.tokens) for row in rows),
            max(len(unit.prompt) for unit in units),
        )
        return scores <= lean.SCORES_MAX

    def _tempered(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return losses.token_logprobs(self._heated(logits), targets)

    def _heated(self, logits: torch.Tensor) -> torch.Tensor:
        temperature = self.spec.temperature
        return logits if temperature == 1.0 else logits.float() / temperature

    def _plain(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        pairs = [(unit.prompt, row.tokens) for unit in units for row in unit.rows]
        ids, _ = self._right_padded([prompt + tokens for prompt, tokens in pairs])
        head = self._plain_head()
        if head is None:
            return self._plain_of_all(pairs, ids, of_logits)
        hidden = self._body()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        begins = [len(prompt) - 1 for prompt, _ in pairs]
        return self._of_rows(head, hidden, begins, [tokens for _, tokens in pairs], of_logits)

    def _plain_of_all(
        self, pairs: Sequence[tuple[list[int], list[int]]], ids: torch.Tensor, of_logits: OfLogits
    ) -> list[torch.Tensor]:
        """By the model's own way from hidden states to logits."""
        result = []
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

    def _plain_head(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The layer from hidden states to logits; None: the model does more (a cap, a scale)."""
        if self._head is None:
            self._head = (_head_of(self.policy),)
        return self._head[0]

    def _of_rows(
        self,
        head: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        begins: Sequence[int],
        rows: Sequence[Sequence[int]],
        of_logits: OfLogits,
    ) -> list[torch.Tensor]:
        """From hidden states (rows, positions, d): for each row, values of its tokens, which the
        states from `begins` on predict."""
        lengths = [len(tokens) for tokens in rows]
        spans = zip(begins, lengths, strict=True)
        flat = torch.cat(
            [hidden[place, begin : begin + count] for place, (begin, count) in enumerate(spans)]
        )
        targets = torch.tensor([token for tokens in rows for token in tokens], device=flat.device)
        chunk = chunk_tokens(self.policy.vocabulary, self.logits_max)
        return list(in_chunks(head, flat, targets, of_logits, chunk).split(lengths))

    def _lean(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        """As `_shared`, in a grid of prompts by rows; missing rows are filled by short ones."""
        # copies in fp32 would cost what fewer bits save
        model = lean.LeanModel(self.policy.model, joined=not self.policy.is_narrow)
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
        if hidden[..., 0].numel() > chunk_tokens(self.policy.vocabulary, self.logits_max):
            places = [p * each + i for p, unit in enumerate(units) for i in range(len(unit.rows))]
            tokens = [row.tokens for unit in units for row in unit.rows]
            flat = hidden.flatten(0, 1)[places]
            return self._of_rows(model.logits, flat, [0] * len(places), tokens, of_logits)
        values = of_logits(model.logits(hidden), ids[:, 1:].view(len(units), each, -1))
        return [
            values[place, index, : len(row.tokens)]
            for place, unit in enumerate(units)
            for index, row in enumerate(unit.rows)
        ]

    def _shared(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        """Prompts without their last token fill the cache; completions, that token put first, run
        on it. Pads stand before prompts and behind completions."""
        cache, lengths = prefixes.run(self.policy, [unit.prompt[:-1] for unit in units])
        owner = [index for index, unit in enumerate(units) for _ in unit.rows]
        rows = [row for unit in units for row in unit.rows]
        tails = [units[o].prompt[-1:] + row.tokens for o, row in zip(owner, rows, strict=True)]
        ids, mask = self._right_padded(tails)
        select = torch.tensor(owner, device=self.policy.device)
        prefix_mask = prefixes.seen(lengths, cache.get_seq_length())
        cache.batch_select_indices(select)
        positions = lengths[select, None] + torch.arange(ids.shape[1] - 1, device=ids.device)
        head = self._plain_head()
        seen = torch.cat([prefix_mask[select], mask[:, :-1]], dim=1)
        found = (self.policy.model if head is None else self._body())(
            input_ids=ids[:, :-1],
            attention_mask=_attention_mask(self.policy, seen, ids.shape[1] - 1),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        if head is None:
            values = of_logits(found.logits, ids[:, 1:])
            return [values[index, : len(row.tokens)] for index, row in enumerate(rows)]
        tokens = [row.tokens for row in rows]
        return self._of_rows(head, found.last_hidden_state, [0] * len(rows), tokens, of_logits)

    def _body(self) -> torch.nn.Module:
        """The model without what makes logits."""
        body: torch.nn.Module = getattr(self.policy.model, self.policy.model.base_model_prefix)
        return body

    def _right_padded(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask, (rows, longest); pads are EOS and never attended to."""
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), self.policy.eos_id)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        return ids.to(self.policy.device), mask.to(self.policy.device)


def _head_of(policy: Policy) -> Callable[[torch.Tensor], torch.Tensor] | None:
    head: torch.nn.Module | None = policy.model.get_output_embeddings()
    body = getattr(policy.model, policy.model.base_model_prefix, None)
    if head is None or body is None:
        return None
    ids = torch.full((1, 2), policy.eos_id, device=policy.device)
    with torch.no_grad(), policy.autocast():
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        factor = _LARGE / head(hidden).abs().max()  # to more than any cap lets pass
        hook = head.register_forward_hook(lambda _, given, logits: logits * factor)
        try:
            ours = head(hidden).float()
            logits = policy.model(input_ids=ids, use_cache=False).logits.float()
        finally:
            hook.remove()
    same = ours.shape == logits.shape and torch.allclose(ours, logits, rtol=1e-3, atol=1e-4)
    return head if same else None


def _attention_mask(policy: Policy, seen: torch.Tensor, count: int) -> torch.Tensor:
    """The attention mask of the last `count` of the tokens (rows, tokens) for all layers, (rows, 1,
    count, tokens), added to their scores. From a mask of 0 and 1 each layer would make one of its
    own and keep it for its gradient. As given where layers do not see all tokens."""
    config = policy.model.config.get_text_config()
    takes = getattr(config, "_attn_implementation", "") in ("sdpa", "eager")
    by_distance = getattr(config, "alibi", config.model_type in ("bloom", "mpt"))  # ALiBi
    if not takes or by_distance or not lean.looks_at_all(config):
        return seen
    dtype = torch.bfloat16 if policy.computes_in == "bfloat16" else torch.float32
    hidden = torch.full((), -torch.inf, dtype=dtype, device=seen.device)
    width = seen.shape[1]
    later = torch.ones(count, width, dtype=torch.bool, device=seen.device).triu(width - count + 1)
    return torch.where(later | (seen[:, None, None, :] == 0), hidden, hidden.new_zeros(()))


@contextmanager
def _rate_times(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the optimizer's rates within the block."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _add_size(sizes: torch.Tensor, place: int, gradient: torch.Tensor) -> None:
    sizes[place] += gradient.detach().abs().sum()


def _distances(sums: Sums) -> dict[str, Any]:
    far = losses.mismatch(*sums.known_columns())
    return {
        "behaviour_tokens": far.tokens,
        "effective_share": far.effective_share,
        "mismatch_k1": far.k1,
        "mismatch_k3": far.k3,
        "weight_max": far.weight_max,
        "mismatch_mean": far.mean,
        "mismatch_max": far.max,
    }


def _columns(tokens: Tokens, source: int) -> torch.Tensor:
    """(5, T): the columns that a loss decides on, and the source's number."""
    each = (tokens.logprobs, tokens.proximal, tokens.behaviour, tokens.advantages)
    return torch.stack([*each, torch.full_like(tokens.logprobs, source)])
