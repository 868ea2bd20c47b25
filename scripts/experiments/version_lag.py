"""The part of a step that reaches workers: weights are in fp32, versions in bf16.

    python version_lag.py --model DIRECTORY --rates 1e-6 1e-5 --steps 60 --seeds 1 2 3

One learner in this process. Groups come from the published bf16 version. The production trainer
makes a step, and the next version is the rounded policy. Tasks are sums of two numbers. The arm
`nearest` rounds to the nearest number, `spread` by `node.policies.rounding` as versions are; both
train in fp32. `bf16` is `spread`, and computes in bf16 with the version's weights in linear layers.
Arms of one seed have the same start, tasks and sampling seeds. Each measured step gives a line:

    lag        mean |log p(policy) - log p(version)| over mean |log p(policy) - log p(start)|.
    changed    share of the version's numbers that the last step changed.
    delta      bytes a parameter of the delta from the version before.
    held_out   pass rate of the version's likeliest answers to the held-out tasks.

At the end: held-out by arm in the mean of the course and at its end, and the paired differences
with intervals of 95 %.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from measuring import told
from safetensors.torch import save_file

from node.engines.torch_engine import Generation
from node.envs.answers import answer_in
from node.envs.registry import environment
from node.interfaces.engine import Request, Sampling
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy, load_policy
from node.policies.rounding import to_bfloat16
from node.train.trainer import GroupTrainer
from node.train.version_lag import swapped
from swarm.rollouts import Completion, Task
from swarm.weights.artifacts import encode_artifact
from swarm.weights.manifest import open_weights

ARMS = {
    "nearest": (lambda each: each.to(torch.bfloat16), "float32"),
    "spread": (to_bfloat16, "float32"),
    "bf16": (to_bfloat16, "bfloat16"),
}
PARAMETERS = '{"max_digits":2,"max_terms":2,"min_digits":1,"min_terms":2}'
SYSTEM = "Give the final answer only."
GROUPS, COMPLETIONS, NEW_TOKENS = 4, 8, 16
TEMPERATURE, GREEDY = 0.6, 1e-3
HELD_OUT_TASKS = 64
HELD_OUT_SEED, TRAINING_SEED = 0, 1
CHUNK_BYTES = 1 << 20
MICRO_BATCH_TOKENS = 4096
FIRST_STEPS = (1, 2, 5)  # that are measured, beside each tenth
EACH = 10

Weights = list[torch.Tensor]


def numbered(seed: int, places: Sequence[int]) -> list[Task]:
    version = environment("chain_sum").version
    return [Task("chain_sum", version, PARAMETERS, seed, place) for place in places]


def prompt_of(task: Task) -> str:
    return Prompt.of(environment("chain_sum").problem(task).prompt, SYSTEM).text


def score(task: Task, completion: Completion) -> float:
    """1 if the last number of the text is the sum."""
    problem = environment("chain_sum").problem(task)
    return float(answer_in("last_number", completion.text) == problem.answer)


def sample(
    policy: Policy, tasks: Sequence[Task], n: int, temperature: float, seed: int
) -> list[tuple[Completion, ...]]:
    requests = [Request(prompt_of(task), n=n, limit=NEW_TOKENS) for task in tasks]
    sampling = Sampling(temperature=temperature, max_new_tokens=NEW_TOKENS)
    generation = Generation(policy, requests, sampling, seed=seed)
    while not generation.done:
        generation.advance(NEW_TOKENS, 0)
    return [tuple(each.completions) for each in generation.outcomes()]


class Learner:
    """A policy, its trainer and its version, by one arm."""

    def __init__(self, model: str, rate: float, arm: str, seed: int) -> None:
        self.policy = load_policy(model, "cpu")
        spec = TrainerSpec(model, learning_rate=rate, loss="dapo", temperature=TEMPERATURE)
        self.names = [name for name, _ in self.policy.model.named_parameters()]
        self.trained = list(self.policy.model.parameters())
        for each in self.trained:  # as a published version has them
            each.data = each.data.to(torch.bfloat16).float()
        self._round, self._precision = ARMS[arm]
        self.policy.compute_in(self._precision)
        self.trainer = GroupTrainer(self.policy, spec, MICRO_BATCH_TOKENS)
        self._seed = seed
        self._rng = Random(seed)
        self.tokens = 0
        self.start = self.before = self.version = self._rounded()

    def _rounded(self) -> Weights:
        return [self._round(each.detach()) for each in self.trained]

    @contextmanager
    def having(self, version: Weights) -> Iterator[None]:
        """Within it the policy has a version's weights."""
        with torch.no_grad(), swapped(self.trained, [each.float() for each in version]):
            yield

    def step(self, number: int) -> list[TrainingGroup]:
        """Generate by the version, train the policy on it, and make the next version."""
        places = [self._rng.randrange(10_000) for _ in range(GROUPS)]
        tasks = numbered(TRAINING_SEED, places)
        with self.having(self.version):
            made = sample(self.policy, tasks, COMPLETIONS, TEMPERATURE, self._seed * 1000 + number)
        self.tokens += sum(len(each.token_ids) for group in made for each in group)
        groups = []
        for task, group in zip(tasks, made, strict=True):
            rewards = [score(task, each) for each in group]
            mean = fmean(rewards)
            advantages = tuple(each - mean for each in rewards)
            groups.append(TrainingGroup(prompt_of(task), group, advantages, own_tokens=True))
        self.trainer.train(groups)
        self.before, self.version = self.version, self._rounded()
        return groups

    def lag(self, groups: Sequence[TrainingGroup]) -> float:
        def logprobs() -> torch.Tensor:
            found = self.trainer.logprobs(groups)
            return torch.tensor([x for group in found for each in group for x in each])

        self.policy.compute_in("float32")
        now = logprobs()
        with self.having(self.version):
            version = logprobs()
        with self.having(self.start):
            start = logprobs()
        self.policy.compute_in(self._precision)
        moved = float((now - start).abs().mean())
        return float((now - version).abs().mean()) / moved if moved else 0.0

    def delta(self) -> tuple[float, float]:
        """The share of numbers that the last step changed, and the delta's bytes a parameter."""
        count = sum(each.numel() for each in self.trained)
        pairs = zip(self.version, self.before, strict=True)
        changed = sum(int((one != other).sum()) for one, other in pairs)
        with tempfile.TemporaryDirectory() as folder:
            opened = []
            for name, version in (("new", self.version), ("base", self.before)):
                directory = Path(folder) / name
                directory.mkdir()
                named = dict(zip(self.names, version, strict=True))
                save_file(
                    {key: each.contiguous() for key, each in named.items()},
                    directory / "model.safetensors",
                )
                opened.append(open_weights(directory))
            size_bytes = sum(map(len, encode_artifact(*opened, CHUNK_BYTES)))
        return changed / count, size_bytes / count

    def held_out(self) -> float:
        tasks = numbered(HELD_OUT_SEED, range(HELD_OUT_TASKS))
        with self.having(self.version):
            made = sample(self.policy, tasks, 1, GREEDY, 0)
        return fmean(score(task, group[0]) for task, group in zip(tasks, made, strict=True))


def run(options: argparse.Namespace, rate: float, arm: str, seed: int) -> Iterator[dict[str, Any]]:
    """One learner's course."""
    torch.manual_seed(seed)
    learner, began_s = Learner(options.model, rate, arm, seed), time.perf_counter()
    for number in range(1, options.steps + 1):
        groups = learner.step(number)
        if number in FIRST_STEPS or number % EACH == 0:
            changed, delta = learner.delta()
            yield {
                "rate": rate,
                "arm": arm,
                "seed": seed,
                "step": number,
                "tokens": learner.tokens,
                "lag": round(learner.lag(groups), 3),
                "changed": round(changed, 5),
                "delta": round(delta, 5),
                "held_out": learner.held_out() if number % EACH == 0 else None,
                "seconds": round(time.perf_counter() - began_s),
            }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=60, help=f"at least {EACH}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["nearest", "spread"])
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    mean: dict[tuple[float, str], list[float]] = defaultdict(list)
    last: dict[tuple[float, str], list[float]] = defaultdict(list)
    for rate in options.rates:
        for seed in options.seeds:
            for arm in options.arms:
                passed = []
                for line in run(options, rate, arm, seed):
                    print(json.dumps(line), flush=True)
                    if line["held_out"] is not None:
                        passed.append(100.0 * line["held_out"])
                mean[rate, arm].append(fmean(passed))
                last[rate, arm].append(passed[-1])
        for what, found in (("mean of the course", mean), ("last evaluation", last)):
            for arm in options.arms:
                print(f"{rate:g} {arm}, held-out, {what}: {told(found[rate, arm])} %")
            if len(options.arms) > 1:
                pairs = zip(*(found[rate, arm] for arm in options.arms[:2]), strict=True)
                difference = told([b - a for a, b in pairs], sign="+")
                print(
                    f"{rate:g} {options.arms[1]} - {options.arms[0]}, {what}: {difference} points"
                )


if __name__ == "__main__":
    main()
