"""Rollout tokens per second against transformers' `generate`, and training tokens per second.

    python bench_rollouts.py [--model DIRECTORY] [--threads N] [--repeats N] [--json]

Both sides sample from the same model and prompts, in turns, so that what else the machine does hits
both; tokens count up to and with the end of their completion. Figures are medians over the repeats.
Without `--model` it takes a tiny model with random weights, whose speed is the warmed one's.

    full     prompts of about 40 bytes, as in the demo; every completion runs to the limit
    ending   the same prompts; completions end here and there, as real ones do: about one token in
             twenty ends one (with random weights)
    long     prompts of 300 bytes, every completion runs to the limit
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import rival_generate
import torch
from transformers.utils import logging

from node.engines.torch_engine import generate
from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.policies.policy import Policy, load_policy
from node.policies.recipe import TinyRecipe
from node.policies.tiny import blank_model, byte_tokenizer
from node.training.trainer import GroupTrainer

GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 32
SHORT = [
    f"{k:04b} 0{k:03b}\n1{k:03b} 01{k % 4:02b}\n=\n".replace("", " ") for k in range(1, GROUPS + 1)
]
LONG = [
    f"Simplify the fraction {k}/{3 * k} to its lowest terms. Give only the simplified "
    "fraction as your final answer, and nothing else but it, please." * 2
    for k in range(1, GROUPS + 1)
]
NEVER = frozenset({1_000_000})  # no token has this id
OFTEN = frozenset(range(0, 260, 20))
CASES = {"full": (SHORT, NEVER), "ending": (SHORT, OFTEN), "long": (LONG, NEVER)}


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        policy = load_policy(arguments.model or str(_fresh_tiny(Path(scratch))), "auto")
    if arguments.model is None:
        policy.name = "tiny with random weights"
    results = {
        name: _measure(policy, prompts, ends, arguments.repeats)
        for name, (prompts, ends) in CASES.items()
    }
    if arguments.json:
        json.dump({"model": policy.name, "threads": arguments.threads, **results}, sys.stdout)
        return
    print(
        f"{policy.name}, {policy.parameters:,} parameters, {arguments.threads} threads, "
        f"{GROUPS} prompts x {GROUP_SIZE} completions x {NEW_TOKENS} tokens, "
        f"medians of {arguments.repeats}"
    )
    print(
        f"{'prompts':8} {'engine tok/s':>14} {'generate tok/s':>15} {'ratio':>7} "
        f"{'train tok/s':>13}"
    )
    for name, result in results.items():
        print(
            f"{name:8} {result['engine']:>14,.0f} {result['generate']:>15,.0f} "
            f"{result['ratio']:>7.2f} {result['train']:>13,.0f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory or hub id")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _fresh_tiny(directory: Path) -> Path:
    tokenizer = byte_tokenizer()
    blank_model(TinyRecipe(), tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _measure(
    policy: Policy, prompts: list[str], ends: frozenset[int], repeats: int
) -> dict[str, float]:
    policy.eos_ids = ends
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    trainer = GroupTrainer(policy, TrainerSpec("bench", learning_rate=1e-6), 8192)
    rates: dict[str, list[float]] = {"engine": [], "generate": [], "train": []}
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        groups = generate(policy, prompts, GROUP_SIZE, sampling, repeat, 0)
        sampled = time.perf_counter()
        tokens = rival_generate.generate(policy, prompts, GROUP_SIZE, NEW_TOKENS)
        generated = time.perf_counter()
        report = trainer.train(
            [
                TrainingGroup(prompt, group, (1.0, -1.0) * (GROUP_SIZE // 2), own_tokens=True)
                for prompt, group in zip(prompts, groups, strict=True)
            ]
        )
        if repeat:  # the first one warms up
            ours = sum(len(c.token_ids) for group in groups for c in group)
            rates["engine"].append(ours / (sampled - started))
            rates["generate"].append(tokens / (generated - sampled))
            rates["train"].append(report.trained_tokens / report.seconds)
    ratios = [ours / his for ours, his in zip(rates["engine"], rates["generate"], strict=True)]
    return {**{name: median(values) for name, values in rates.items()}, "ratio": median(ratios)}


if __name__ == "__main__":
    main()
