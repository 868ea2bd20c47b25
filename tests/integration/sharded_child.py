"""One rank of several: trains on the same batches as a trainer that has them alone, and tells how
far apart the two are. `torchrun ... sharded_child.py MODEL OUT`."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import distributed

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy
from node.train.ranks import Ranks
from node.train.sharded_trainer import ShardedTrainer
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import opened
from tests.unit.training_support import group

STEPS = 3
TOKENS_MAX = 64  # a few micro-batches, not as many for each rank
RATE = 1e-3
SPECS = {  # each loss, and each option that a micro-batch reads
    "sapo": TrainerSpec("test", learning_rate=RATE, updates_per_batch=2, foreign_weighting="none"),
    "sequences": TrainerSpec("test", learning_rate=RATE, loss="sapo, aggregation=sequence_mean"),
    "decoupled": TrainerSpec("test", learning_rate=RATE, loss="decoupled"),
    "m2po": TrainerSpec(
        "test",
        learning_rate=RATE,
        loss="m2po, second_moment_max=4",
        updates_per_batch=2,
        foreign_weighting="none",
    ),
    "unlikely": TrainerSpec("test", learning_rate=RATE, foreign_logprob_min=-2.0),
    "adapter": TrainerSpec(
        "test", learning_rate=RATE, lora_rank=4, lora_base="float32", warm_up_updates=0
    ),
}


class LocalMeans(ShardedTrainer):
    """The planted fault: each rank takes the mean over its own tokens."""

    def _micro_batches(self, units):
        batches = super()._micro_batches(units)
        rows = [row for batch in batches for unit in batch for row in unit.rows]
        total = sum(len(row.tokens) for row in rows)
        for row in rows:
            row.weight = 1.0 / total / self._ranks.size
        return batches


class OwnDecisions(ShardedTrainer):
    """Another: each rank decides by its own tokens which to leave out."""

    def _of_all(self, columns):
        return (columns, 0) if len(columns) == 5 else super()._of_all(columns)


FAULTS = {"local means": ("sapo", LocalMeans), "own decisions": ("m2po", OwnDecisions)}


def groups_of(policy: Policy, step: int) -> list[TrainingGroup]:
    """Uneven groups of two sources, own with log-probs of another policy, and foreign."""
    eight = [str(7 * k + step) + "x" * (k % 5) for k in range(8)]
    made = [
        group(policy, "1+1=", ["2", "13"], [1.0, -1.0]),
        group(
            policy, "say something longer:", ["a", "bb" * step, "ccc", ""], [0.5, -1.5, 0.7, 0.3]
        ),
        group(policy, "12/16=", eight, [1.0, -1.0] * 4, own=False),
    ]
    return [
        replace(
            each,
            source=f"worker {number % 2}",
            completions=tuple(
                replace(
                    c, logprobs=tuple(-1 - 0.7 * (row + at) % 6 for at in range(len(c.token_ids)))
                )
                for row, c in enumerate(each.completions)
            ),
        )
        for number, each in enumerate(made)
    ]


def far_apart(model: Path, spec: TrainerSpec, kind: type[ShardedTrainer], ranks: Ranks) -> dict:
    """The largest differences after some steps: of what is reported, and of weights."""
    spec = replace(spec, model=str(model))
    alone = GroupTrainer(opened(spec, "cpu"), spec, TOKENS_MAX)
    shared = kind(opened(spec, "cpu"), spec, ranks, TOKENS_MAX, None)
    reported = masked = 0.0
    before = [p.detach().clone() for p in alone.policy.model.parameters()]
    for step in range(1, STEPS + 1):
        left = asdict(alone.train(groups_of(alone.policy, step)))
        right = asdict(shared.train(groups_of(shared.policy, step)))
        for name in left.keys() - {"seconds", "by_lag"}:  # the latter is of one rank
            if left[name] == left[name] or right[name] == right[name]:  # both nan: the same
                reported = max(reported, abs(left[name] - right[name]))
        masked = max(masked, left["mask_fraction"])
    whole = GroupTrainer(opened(spec, "cpu"), spec, TOKENS_MAX) if ranks.rank == 0 else None
    shared.collect(whole, moments=True)
    if whole is None:
        return {}
    pairs = list(zip(alone.policy.model.parameters(), whole.policy.model.parameters(), strict=True))
    moments = [
        float((alone.optimizer.state[a][name] - whole.optimizer.state[b][name]).abs().max())
        for a, b in pairs
        if a.requires_grad
        for name in ("exp_avg", "exp_avg_sq", "step")
    ]
    with torch.no_grad():
        return {
            "reported": reported,
            "masked": masked,
            "moments": max(moments),
            "weights": max(float((a - b).abs().max()) for a, b in pairs),
            "moved": max(
                float((a - b).abs().max()) for (a, _), b in zip(pairs, before, strict=True)
            ),
        }


def main() -> None:
    torch.set_num_threads(1)
    ranks = Ranks.of(os.environ)
    assert ranks is not None
    distributed.init_process_group("gloo")
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = {name: far_apart(model, spec, ShardedTrainer, ranks) for name, spec in SPECS.items()}
    for name, (spec, kind) in FAULTS.items():
        found[name] = far_apart(model, SPECS[spec], kind, ranks)
    if ranks.rank == 0:
        out.write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
