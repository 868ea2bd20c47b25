"""What methods cost beside the update that they are part of.

    python bench_methods.py [--completions 4096] [--tokens 1024]

Each advantage is worked out for a batch of groups of eight, and each loss for its tokens, forward
and backward. The baseline is one update of the policy `tiny`, the smallest there is, on fewer
completions of as many tokens, counted up to the batch: forward and backward of the model. Medians
of five, in one process with one thread.
"""

import argparse
import time
from collections.abc import Callable
from random import Random
from statistics import median

import torch

from node.config import load_config
from node.hosting.models import resolve_model
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.choices import ADVANTAGES, advantages, chosen_loss
from node.methods.groups import GroupView
from node.methods.losses.objectives import OBJECTIVES, Tokens
from node.methods.losses.settings import LOSSES
from node.training.trainer import GroupTrainer
from node.training.worker import opened
from swarm.rollouts import Completion, FinishReason

GROUP = 8
REPEATS = 5
TRAINED = 32  # completions of the baseline
PROMPT = "12+34="


def seconds(work: Callable[[], object]) -> float:
    """The median time of a piece of work."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


def model_s(tokens: int) -> float:
    """One completion's part of an update of the policy `tiny`."""
    model = resolve_model(load_config({}, {}), print)
    spec = TrainerSpec(model, device="cpu", threads=1, step_guard=False)
    policy = opened(spec, "cpu")
    trainer = GroupTrainer(policy, spec, 4096)
    tokens = min(tokens, policy.context_tokens - len(policy.encode_prompt(PROMPT)))
    rng = Random(0)
    made = [
        Completion(
            "",
            tuple(rng.randrange(policy.vocabulary) for _ in range(tokens)),
            (-1.0,) * tokens,
            FinishReason.LENGTH,
            0,
        )
        for _ in range(TRAINED)
    ]
    signs = tuple(float(at % 2) * 2 - 1 for at in range(GROUP))
    groups = [
        TrainingGroup(PROMPT, tuple(made[at : at + GROUP]), signs, own_tokens=True)
        for at in range(0, TRAINED, GROUP)
    ]
    return seconds(lambda: trainer.train(groups)) / TRAINED / tokens


def views(completions: int, tokens: int) -> list[GroupView]:
    """Groups of random rewards, of four sources."""
    rng = Random(1)
    return [
        GroupView(
            tuple(rng.choice((0.0, 0.5, 1.0)) for _ in range(GROUP)),
            prompt=str(at),
            source="abcd"[at % 4],
            lengths=tuple(rng.randint(1, tokens) for _ in range(GROUP)),
            texts=tuple(str(rng.random()) for _ in range(GROUP)),
            logprobs=tuple(-rng.random() for _ in range(GROUP)),
        )
        for at in range(completions // GROUP)
    ]


def loss_s(name: str, completions: int, tokens: int) -> float:
    """A loss over all tokens, with its decision over the whole batch, forward and backward."""
    torch.manual_seed(0)
    count = completions * tokens
    logprobs = (-torch.rand(count)).requires_grad_(True)
    behaviour = (logprobs.detach() + 0.1 * torch.randn(count)).clamp(max=-1e-4)
    worth = torch.randn(completions).repeat_interleave(tokens)
    sources = torch.arange(completions).remainder(4).repeat_interleave(tokens)
    objective, set_to = OBJECTIVES[name], chosen_loss(name)

    def work() -> None:
        logprobs.grad = None
        batch = Tokens(logprobs, logprobs.detach(), behaviour, worth)
        kept = objective.keep(batch, sources, set_to) if objective.keep else None
        batch = Tokens(logprobs, logprobs.detach(), behaviour, worth, kept)
        objective.losses(batch, set_to).each.sum().backward()

    return seconds(work)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--completions", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole_s = model_s(options.tokens) * options.completions * options.tokens
    print(f"one update of tiny on {options.completions} x {options.tokens}: {whole_s:,.0f} s")
    batch = views(options.completions, options.tokens)
    for name, (kind, _) in ADVANTAGES.items():
        taken_s = seconds(lambda kind=kind: advantages(batch, kind()))
        print(f"advantage {name:<13} {1000 * taken_s:8.1f} ms  {taken_s / whole_s:9.4%}")
    for name in LOSSES:
        taken_s = loss_s(name, options.completions, options.tokens)
        print(f"loss {name:<18} {1000 * taken_s:8.1f} ms  {taken_s / whole_s:9.4%}")


if __name__ == "__main__":
    main()
