"""Who lies about tokens and log-probs is found out, and who does not is left in peace: how often.

A policy learns for some steps, each a version. Workers of several kinds then hand in groups that
claim to be of the last version; a learner re-scores them as it does in production. `passed` is the
share of groups that nothing is held against one by one: for honest workers one minus the false
rejections, for others the false acceptances. Over many groups of one worker evidence adds up: the
second half of the table draws rows of groups from those that were made, again and again, and says
after how many a worker is found out (median, and the share found within 50), or, of honest ones,
how many alarms there were in so many groups. `KL/noise` is the mean KL in units of what a learner
takes for the noise of engines of that precision.

    python bench_claims.py [--groups 100] [--temperature 1.0] [--model tiny] [--run FILE] [--honest]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median

import torch

from node.config import NodeConfig, RunConfig, load_run
from node.engines import torch_engine
from node.environments.scoring import pose, score_group
from node.hosting.models import resolve_model
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.loops.claims import FULL, ClaimedToken, Fit, Record, fault_of, fit_of, noise_between
from node.methods.advantages.group import grpo_advantages
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
REAL_RATE = 1e-6  # of a learner with a real model
NOISE = 0.2  # of a weight's own spread, in the other model
EDITED = 0.1  # of the tokens
HONEST_GROUPS = 1_000_000  # drawn for each honest worker
ROWS = 400  # of groups, drawn for each other worker
ROW_MAX = 2000
SOON = 50  # groups
MIXES = (0.25, 0.5)  # of the way from the last version to the one before
Worker = Callable[[str, int], tuple[Completion, ...]]


@dataclass(frozen=True)
class Kind:
    """A worker. What it hands in claims to be of the last version."""

    name: str
    honest: bool
    work: Worker
    precision: str = FULL

    @property
    def noise_kl(self) -> float:
        """What the learner, which scores in full precision, takes for granted."""
        return noise_between(self.precision, FULL)


class Laboratory:
    """A policy with its last versions, and what is done with them."""

    def __init__(self, model: str, run: RunConfig, rate: float) -> None:
        self.run = run
        self.sampling = run.engine_sampling
        spec = TrainerSpec(
            model, learning_rate=rate, threads=2, temperature=self.sampling.temperature
        )
        self.core = TrainerCore(spec)
        self.versions: list[dict[str, torch.Tensor]] = []
        for step in range(STEPS + 1):
            self.versions.append(deepcopy(self.core.policy.model.state_dict()))
            if step < STEPS:
                self.core.train([self._group(f"step-{step}", at) for at in range(STEP_GROUPS)])
        self.scorer = TrainerCore(spec)
        self.scorer.policy.model.load_state_dict(self.versions[-1])

    def prompt(self, producer: str, index: int) -> str:
        task = assigned_task(self.run, producer, index)
        rule = self.run.answer_rule(task.environment, task.parameters)
        return pose(task, self.run.limits.prompt_chars_max, rule).prompt

    def generate(
        self, prompt: str, seed: int, policy: Policy | None = None, heat: float = 1.0
    ) -> tuple[Completion, ...]:
        """`heat`: times the run's temperature."""
        sampling = replace(self.sampling, temperature=heat * self.sampling.temperature)
        return torch_engine.generate(
            policy or self.core.policy, [prompt], GROUP_SIZE, sampling, seed, STEPS
        )[0]

    def _group(self, producer: str, index: int) -> TrainingGroup:
        task = assigned_task(self.run, producer, index)
        prompt = self.prompt(producer, index)
        completions = self.generate(prompt, index)
        rule = self.run.answer_rule(task.environment, task.parameters)
        texts = [c.text for c in completions]
        rewards = score_group(task, texts, self.run.reward, rule).rewards
        return TrainingGroup(prompt, completions, grpo_advantages(rewards), own_tokens=True)

    def other(self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Policy:
        """A policy with other weights than the last version."""
        model = deepcopy(self.core.policy.model)
        model.load_state_dict(change(self.versions[-1]))
        return replace(self.core.policy, model=model)

    def mixed(self, share: float) -> Policy:
        """Of the last version and the one before."""
        last, before = self.versions[-1], self.versions[-2]
        return self.other(
            lambda _: {
                name: value.lerp(before[name], share) if value.is_floating_point() else value
                for name, value in last.items()
            }
        )

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
    mixed = {share: laboratory.mixed(share) for share in MIXES}

    def fitted(
        prompt: str, seed: int, policy: Policy | None, heat: float
    ) -> tuple[Completion, ...]:
        return laboratory.rescored(prompt, make(prompt, seed, policy, heat))

    return [
        Kind("same engine, fp32", True, make),
        Kind("another engine", True, partial(without_lean, laboratory, None)),
        Kind("another engine, bf16", True, partial(without_lean, laboratory, rough), "bfloat16"),
        Kind("other model, its own log-probs", False, lambda p, s: make(p, s, other)),
        Kind("other model, log-probs made to fit", False, lambda p, s: fitted(p, s, other, 1.0)),
        *(
            Kind(f"{share} of a version older", False, lambda p, s, o=policy: make(p, s, o))
            for share, policy in mixed.items()
        ),
        *(
            Kind(f"{share} of a version older, as bf16", False, *each)
            for share, policy in mixed.items()
            for each in [(lambda p, s, o=policy: make(p, s, o), "bfloat16")]
        ),
        *(
            Kind(f"{back} versions older, as bf16", False, *each)
            for back, policy in older.items()
            for each in [(lambda p, s, o=policy: make(p, s, o), "bfloat16")]
        ),
        *(
            Kind(f"{back} versions older", False, lambda p, s, o=policy: make(p, s, o))
            for back, policy in older.items()
        ),
        Kind("edited text, log-probs made to fit", False, partial(edited, laboratory)),
        Kind("temperature 0.7, its own log-probs", False, lambda p, s: make(p, s, None, 0.7)),
        Kind("temperature 0.7, made to fit", False, lambda p, s: fitted(p, s, None, 0.7)),
        Kind("temperature 0.9, made to fit", False, lambda p, s: fitted(p, s, None, 0.9)),
    ]


def alarms(fits: Sequence[Fit], kind: Kind, temperature: float) -> int:
    """Of one honest worker, in `HONEST_GROUPS` groups drawn from those that were made."""
    rng, record, found = Random(1), Record(), 0
    for _ in range(HONEST_GROUPS):
        if record.fault_after(rng.choice(fits), kind.noise_kl, temperature) is not None:
            found, record = found + 1, Record()
    return found


def groups_until_found(fits: Sequence[Fit], kind: Kind, temperature: float) -> list[int]:
    """Of `ROWS` workers; `ROW_MAX` stands for those that were not found out."""
    rng, found = Random(1), []
    for _ in range(ROWS):
        record, count = Record(), 0
        while count < ROW_MAX:
            fit, count = rng.choice(fits), count + 1
            together = record.fault_after(fit, kind.noise_kl, temperature)
            if together is not None or fault_of(fit, temperature) is not None:
                break
        found.append(count)
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=100, help="of each kind")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the run")
    parser.add_argument("--model", default="tiny", help="smollm2 trains on run `sums`")
    parser.add_argument("--run", type=Path, help="another run's file; default: demo")
    parser.add_argument("--honest", action="store_true", help="of honest workers alone")
    options = parser.parse_args()
    run, _ = load_run(options.run or Path("demo" if options.model == "tiny" else "sums"), {})
    heat = options.temperature
    run = run.model_copy(update={"sampling": run.sampling.model_copy(update={"temperature": heat})})
    config = NodeConfig(run=run, model=options.model)
    model = resolve_model(config, partial(print, file=sys.stderr))
    laboratory = Laboratory(model, run, LEARNING_RATE if options.model == "tiny" else REAL_RATE)
    print(
        f"{'worker':38} {'passed':>7}  {'distance':>9} {'KL':>9} {'std errors':>11}   (medians)"
        f"  {'KL/noise':>8}  over many groups"
    )
    for kind in kinds(laboratory):
        if options.honest and not kind.honest:
            continue
        fits = []
        for index in range(options.groups):
            prompt = laboratory.prompt("claims", index)
            fits.append(laboratory.fit(prompt, kind.work(prompt, index)))
        passed = sum(fault_of(fit, heat) is None for fit in fits) / len(fits)
        unit = kind.noise_kl / min(1.0, heat) ** 2
        if kind.honest:
            many = f"{alarms(fits, kind, heat)} alarms in {HONEST_GROUPS:,} groups"
        else:
            rows = groups_until_found(fits, kind, heat)
            soon = sum(each <= SOON for each in rows) / len(rows)
            middle = median(rows)
            after = f"{middle:.0f}" if middle < ROW_MAX else f"over {ROW_MAX}"
            many = f"found after {after}, {soon:.0%} within {SOON}"
        print(
            f"{kind.name:38} {100 * passed:6.1f}%  {median(f.distance for f in fits):9.4f} "
            f"{median(f.kl for f in fits):9.2e} {median(f.deviations for f in fits):11.2f}"
            f"   {'honest' if kind.honest else '':9}  {fmean(f.kl for f in fits) / unit:8.2f}"
            f"  {many}",
            flush=True,
        )


if __name__ == "__main__":
    main()
