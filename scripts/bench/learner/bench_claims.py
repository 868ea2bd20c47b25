"""Who lies about tokens and log-probs is found out, and who does not is left in peace: how often.

The tiny policy learns for some steps, each a version. Workers of several kinds then hand in groups
that claim to be of the last version; a learner re-scores them as it does in production. `passed` is
the share of groups that nothing is held against: for honest workers one minus the false rejections,
for others the false acceptances.

    python bench_claims.py [--groups 100]
"""

import argparse
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import torch

from node.config import NodeConfig, load_run
from node.engines import torch_engine
from node.environments.scoring import pose, score_group
from node.hosting.models import resolve_model
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.loops.claims import ClaimedToken, Fit, fault_of, fit_of
from node.methods.advantages import grpo_advantages
from node.policies import lean
from node.policies.policy import Policy
from node.training import rescoring
from node.training.worker import TrainerCore
from node.verification.assignment import assigned_task
from swarm.rollouts import Completion

GROUP_SIZE = 8
STEP_GROUPS = 16
STEPS = 8
LEARNING_RATE = 1e-4
NOISE = 0.2  # of a weight's own spread, in the other model
EDITED = 0.1  # of the tokens
Worker = Callable[[str, int], tuple[Completion, ...]]


@dataclass(frozen=True)
class Kind:
    """A worker. What it hands in claims to be of the last version."""

    name: str
    honest: bool
    work: Worker


class Laboratory:
    """A policy with its last versions, and what is done with them."""

    def __init__(self, model: str, directory: Path) -> None:
        self.run, _ = load_run(Path("demo"), {})
        self.core = TrainerCore(TrainerSpec(model, learning_rate=LEARNING_RATE, threads=2))
        self.sampling = self.run.engine_sampling
        self.versions: list[dict[str, torch.Tensor]] = []
        for step in range(STEPS + 1):
            self.versions.append(deepcopy(self.core.policy.model.state_dict()))
            if step < STEPS:
                self.core.train([self._group(f"step-{step}", at) for at in range(STEP_GROUPS)])
        self.scorer = TrainerCore(TrainerSpec(model, threads=2))
        self.scorer.policy.model.load_state_dict(self.versions[-1])

    def prompt(self, producer: str, index: int) -> str:
        task = assigned_task(self.run, producer, index)
        return pose(task, self.run.limits.prompt_chars_max).prompt

    def generate(
        self, prompt: str, seed: int, policy: Policy | None = None, temperature: float = 1.0
    ) -> tuple[Completion, ...]:
        sampling = replace(self.sampling, temperature=temperature)
        return torch_engine.generate(
            policy or self.core.policy, [prompt], GROUP_SIZE, sampling, seed, STEPS
        )[0]

    def _group(self, producer: str, index: int) -> TrainingGroup:
        task = assigned_task(self.run, producer, index)
        prompt = self.prompt(producer, index)
        completions = self.generate(prompt, index)
        rewards = score_group(task, [c.text for c in completions], self.run.reward).rewards
        return TrainingGroup(prompt, completions, grpo_advantages(rewards), own_tokens=True)

    def other(self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Policy:
        """A policy with other weights than the last version."""
        model = deepcopy(self.core.policy.model)
        model.load_state_dict(change(self.versions[-1]))
        return replace(self.core.policy, model=model)

    def rescored(self, prompt: str, completions: tuple[Completion, ...]) -> tuple[Completion, ...]:
        """With the log-probs that the claimed version has: what a careful liar reports."""
        [columns] = self.columns(prompt, completions)
        return tuple(
            replace(c, logprobs=tuple(column[: len(c.token_ids)]))
            for c, column in zip(completions, columns, strict=True)
        )

    def columns(self, prompt: str, completions: tuple[Completion, ...]) -> list[list[list[float]]]:
        group = TrainingGroup(prompt, completions, (0.0,) * len(completions), own_tokens=True)
        return rescoring.score(self.scorer.trainer, [group])

    def fit(self, prompt: str, completions: tuple[Completion, ...]) -> Fit:
        """As the learner sees it."""
        [columns] = self.columns(prompt, completions)
        samples = []
        for completion, column in zip(completions, columns, strict=True):
            count = len(completion.token_ids)
            rows = (column[count * part : count * (part + 1)] for part in range(3))
            samples += [
                ClaimedToken(*each) for each in zip(completion.logprobs, *rows, strict=True)
            ]
        return fit_of(samples)


def noisy(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: each + NOISE * each.std() * torch.randn(each.shape, generator=generator)
        if each.is_floating_point() and each.numel() > 1
        else each
        for name, each in weights.items()
    }


def without_lean(
    laboratory: Laboratory, policy: Policy | None, prompt: str, seed: int
) -> tuple[Completion, ...]:
    """Through Hugging Face's own forward pass and cache."""
    supports = lean.supports
    lean.supports = lambda model: False
    try:
        return laboratory.generate(prompt, seed, policy)
    finally:
        lean.supports = supports


def edited(laboratory: Laboratory, prompt: str, seed: int) -> tuple[Completion, ...]:
    """Some tokens exchanged for others of the same group; text and log-probs made to fit."""
    rng = Random(seed)
    made = laboratory.generate(prompt, seed)
    seen = [token for completion in made for token in completion.token_ids]
    changed = []
    for c in made:
        ids = [rng.choice(seen) if rng.random() < EDITED else t for t in c.token_ids]
        text = laboratory.core.policy.decode(ids)
        changed.append(replace(c, token_ids=tuple(ids), text=text))
    return laboratory.rescored(prompt, tuple(changed))


def kinds(laboratory: Laboratory) -> list[Kind]:
    """All workers."""
    make = laboratory.generate
    rough = laboratory.other(lambda weights: weights)
    rough = replace(rough, model=rough.model.to(torch.bfloat16))
    other = laboratory.other(noisy)
    older = {
        back: laboratory.other(lambda _, back=back: laboratory.versions[-1 - back])
        for back in (1, 2, 4, 8)
    }

    def fitted(
        prompt: str, seed: int, policy: Policy | None, heat: float
    ) -> tuple[Completion, ...]:
        return laboratory.rescored(prompt, make(prompt, seed, policy, heat))

    return [
        Kind("same engine, fp32", True, make),
        Kind("another engine", True, partial(without_lean, laboratory, None)),
        Kind("another engine, bf16", True, partial(without_lean, laboratory, rough)),
        Kind("other model, its own log-probs", False, lambda p, s: make(p, s, other)),
        Kind("other model, log-probs made to fit", False, lambda p, s: fitted(p, s, other, 1.0)),
        *(
            Kind(f"{back} versions older", False, lambda p, s, o=policy: make(p, s, o))
            for back, policy in older.items()
        ),
        Kind("edited text, log-probs made to fit", False, partial(edited, laboratory)),
        Kind("temperature 0.7, its own log-probs", False, lambda p, s: make(p, s, None, 0.7)),
        Kind("temperature 0.7, made to fit", False, lambda p, s: fitted(p, s, None, 0.7)),
        Kind("temperature 0.9, made to fit", False, lambda p, s: fitted(p, s, None, 0.9)),
    ]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=100, help="of each kind")
    options = parser.parse_args()
    run, _ = load_run(Path("demo"), {})
    config = NodeConfig(run=run)
    model = resolve_model(config, partial(print, file=sys.stderr))
    with TemporaryDirectory() as directory:
        laboratory = Laboratory(model, Path(directory))
    print(f"{'worker':38} {'passed':>7}  {'distance':>9} {'KL':>9} {'std errors':>11}   (medians)")
    for kind in kinds(laboratory):
        fits = []
        for index in range(options.groups):
            prompt = laboratory.prompt("claims", index)
            fits.append(laboratory.fit(prompt, kind.work(prompt, index)))
        passed = sum(fault_of(fit) is None for fit in fits) / len(fits)
        print(
            f"{kind.name:38} {100 * passed:6.1f}%  {median(f.distance for f in fits):9.4f} "
            f"{median(f.kl for f in fits):9.5f} {median(f.deviations for f in fits):11.2f}"
            f"   {'honest' if kind.honest else ''}",
            flush=True,
        )


if __name__ == "__main__":
    main()
