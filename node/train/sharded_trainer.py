"""A trainer whose model is cut over several processes (FSDP2), one on each GPU.

Each rank holds its share of weights, gradients and Adam's moments, and gathers one layer at a time.
Every rank gets the whole batch and runs its own rows with their weights in the whole batch, so loss
and gradient are those of one process, but for rounding.

Rows run whole, prompt included: gradients through shared keys and values would reach a layer after
its weights were given back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from node.interfaces.trainer_spec import TrainerSpec
from node.methods.chunks import OfLogits
from node.policies.policy import Policy
from node.train.ranks import Ranks
from node.train.rows import Unit, pack
from node.train.trainer import GroupTrainer, Sums

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, each of a parameter's shape
STEP = "step"


class ShardedTrainer(GroupTrainer):
    """This rank's part. All ranks call the same methods with the same arguments, in one order."""

    def __init__(
        self, policy: Policy, spec: TrainerSpec, ranks: Ranks, tokens_max: int, row_max: int | None
    ) -> None:
        """Cuts the policy's model, in place; all have met. `tokens_max` and `row_max` are the same
        everywhere."""
        self._ranks = ranks
        self._mesh = init_device_mesh(policy.device.type, (ranks.size,))
        cut(policy, self._mesh)
        super().__init__(policy, spec, tokens_max, row_max)
        self._lean_fits = False
        self._version_lag = None  # whole weights fit nowhere

    # --- what `GroupTrainer` leaves open ---------------------------------------------------

    def _micro_batches(self, units: Sequence[Unit]) -> list[list[Unit]]:
        """Ours, and empty ones where another rank has more: they take part in gathering."""
        rows = [Unit(unit.prompt, [row]) for unit in units for row in unit.rows]
        lengths = [len(unit.prompt) + len(unit.rows[0].tokens) for unit in rows]
        of_all = [
            list(pack([rows[place] for place in share], self.micro_batch_tokens))
            for share in dealt(lengths, self._ranks.size)
        ]
        ours = of_all[self._ranks.rank]
        return [*ours, *([] for _ in range(max(map(len, of_all)) - len(ours)))]

    def _forward_all(self, units: Sequence[Unit], of_logits: OfLogits) -> list[torch.Tensor]:
        if not any(unit.rows for unit in units):
            self._nothing()
            return []
        return self._plain([unit for unit in units if unit.rows], of_logits)

    def _plain_head(self) -> None:
        """Not to be called by itself: the model gathers its weights as a whole."""
        return

    def _backward(self, batch: Sequence[Unit], sums: Sums) -> None:
        if batch:
            super()._backward(batch, sums)
        else:
            self._descend(self._nothing())

    def _nothing(self) -> torch.Tensor:
        """A forward pass like any other, of which nothing counts."""
        ids = torch.full((1, 2), self.policy.eos_id, device=self.policy.device)
        logits: torch.Tensor = self.policy.model(input_ids=ids, use_cache=False).logits
        return logits.float().sum() * 0.0

    def _descend(self, loss: torch.Tensor) -> None:
        (loss * self._ranks.size).backward()  # what is then averaged over ranks

    def _of_all(self, columns: torch.Tensor) -> tuple[torch.Tensor, int]:
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(self._ranks.size)]
        distributed.all_gather(counts, torch.tensor([columns.shape[1]]))
        lengths = [int(count) for count in counts]
        padded = torch.zeros(columns.shape[0], max(lengths), device=columns.device)
        padded[:, : columns.shape[1]] = columns
        found = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(found, padded)
        whole = [part[:, :length] for part, length in zip(found, lengths, strict=True)]
        return torch.cat(whole, dim=1), sum(lengths[: self._ranks.rank])

    def _summed(self, sums: Sums) -> Sums:
        names = [each.name for each in fields(Sums) if each.name not in ("known", "by_lag")]
        column = torch.tensor([getattr(sums, name) for name in names], dtype=torch.float64)
        distributed.all_reduce(column)
        known, _ = self._of_all(sums.known_columns().to(self.policy.device))
        whole = dict(zip(names, column.tolist(), strict=True))
        counts = {name: int(whole[name]) for name in ("masked", "unlikely", "tokens")}
        return Sums(**whole | counts, known=[known], by_lag=sums.by_lag)

    def _clip_gradient(self, norm_max: float) -> float:
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        gradients = [each.grad for each in parameters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(parameters, norm_max, norm)
        return float(norm)

    # --- between the shares and one whole model --------------------------------------------

    def spread(self, whole: GroupTrainer | None, moments: bool) -> None:
        """Take over the weights of rank 0's `whole`, and with `moments` its optimizer's state."""
        with torch.no_grad(), self._cut() as parameters:
            for place, parameter in enumerate(parameters):
                theirs = _parameters(whole)[place] if whole is not None else None
                parameter.copy_(self._share(parameter, theirs))
                if moments:
                    self._spread_moments(parameter, whole, theirs)
            for place, buffer in enumerate(self.policy.model.buffers()):
                if whole is not None:
                    buffer.copy_(list(whole.policy.model.buffers())[place])
                distributed.broadcast(buffer, 0)

    def _spread_moments(
        self,
        parameter: torch.Tensor,
        whole: GroupTrainer | None,
        theirs: torch.Tensor | None,
    ) -> None:
        known = {}
        if whole is not None and theirs is not None:
            known = whole.optimizer.state.get(theirs, {})
        step = torch.tensor(float(known.get(STEP, -1.0)))
        distributed.broadcast(step, 0)
        if step < 0:  # never updated
            return
        state = {name: self._share(parameter, known.get(name)) for name in MOMENTS}
        self.optimizer.state[parameter] = {STEP: step, **state}

    def _share(self, like: torch.Tensor, whole: torch.Tensor | None) -> DTensor:
        """This rank's share of a tensor that rank 0 has."""
        assert isinstance(like, DTensor)
        device = self.policy.device
        full = torch.empty(like.shape, device=device) if whole is None else whole.to(device)
        distributed.broadcast(full, 0)
        return distribute_tensor(full, self._mesh, like.placements, src_data_rank=None)

    def collect(self, whole: GroupTrainer | None, moments: bool) -> None:
        """Put the weights into rank 0's `whole`, and with `moments` its optimizer's state too, in
        main memory. One tensor at a time is whole elsewhere."""
        with torch.no_grad(), self._cut() as parameters:
            for place, parameter in enumerate(parameters):
                assert isinstance(parameter, DTensor)
                full = parameter.full_tensor()
                if whole is not None:
                    _parameters(whole)[place].data = full.to(whole.policy.device)
                if moments:
                    self._collect_moments(parameter, whole, place)

    def _collect_moments(
        self, parameter: torch.Tensor, whole: GroupTrainer | None, place: int
    ) -> None:
        state = self.optimizer.state.get(parameter)
        if not state:
            return
        full = {name: state[name].full_tensor() for name in MOMENTS}
        if whole is not None:
            theirs = {name: value.cpu() for name, value in full.items()}
            whole.optimizer.state[_parameters(whole)[place]] = {STEP: state[STEP].cpu(), **theirs}

    @contextmanager
    def _cut(self) -> Iterator[list[torch.Tensor]]:
        """All parameters as shares: after a pass without gradient some are still whole."""
        for module in self.policy.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        yield _parameters(self)


def cut(policy: Policy, mesh: DeviceMesh) -> None:
    """Cut a model over the mesh, each layer by itself. It may be on the CPU before. On CUDA it
    computes in bf16."""
    model, computes_in = policy.model, MixedPrecisionPolicy()
    if mesh.device_type == "cuda":
        computes_in = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    layers = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=computes_in)
    fully_shard(model, mesh=mesh, mp_policy=computes_in)


def release(whole: GroupTrainer) -> None:
    """Free the weights and moments of a model that others hold in shares."""
    for parameter in whole.policy.model.parameters():
        parameter.data = parameter.data.new_empty(0)
    whole.optimizer.state.clear()


def dealt(lengths: Sequence[int], hands: int) -> list[list[int]]:
    """Places of rows for each hand, about as many tokens for each: the longest first, each to the
    hand that has least."""
    shares: list[list[int]] = [[] for _ in range(hands)]
    totals = [0] * hands
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        hand = totals.index(min(totals))
        shares[hand].append(place)
        totals[hand] += lengths[place]
    return shares


def _parameters(trainer: GroupTrainer) -> list[torch.Tensor]:
    return list(trainer.policy.model.parameters())
