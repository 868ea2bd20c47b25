"""Peak memory of one training step of a model, measured and as planned.

    python bench_training_memory.py --model DIRECTORY [--lengths 512,2048] [--ways whole,chunks]
        [--lora-rank 16 --lora-base bfloat16]

Each line is a process of its own: it loads the model, makes a first small update, so that Adam's
moments are there, and then one on a single row of so many tokens. `whole`: all logits at once;
`chunks`: a part of them at a time, computed again for the gradient; `layers`: in chunks, and layers
keep their input alone. With `--lora-rank` an adapter is trained over a frozen base. Peaks are
resident memory (Linux), the planner's figures those of `node.train.memory`; `whole` has none,
for no trainer works so any more.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from random import Random

import torch

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.train import memory
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import opened
from swarm.rollouts import Completion, FinishReason

WAYS = ("whole", "chunks", "layers")
MANY = 2**30  # tokens or numbers: no limit
FIRST_TOKENS = 32


def row(tokens: int, vocabulary: int) -> TrainingGroup:
    """One completion of random tokens."""
    rng = Random(tokens)
    ids = tuple(rng.randrange(vocabulary // 2, vocabulary) for _ in range(tokens))
    completion = Completion("", ids, (-1.0,) * tokens, FinishReason.LENGTH, 0)
    return TrainingGroup("What is 2 + 3?", (completion,), (1.0,), own_tokens=True)


def measure(spec: TrainerSpec, tokens: int, way: str) -> dict[str, float]:
    """One step in this process."""
    torch.set_num_threads(spec.threads)
    policy = opened(spec, "cpu")
    trainer = GroupTrainer(policy, spec, MANY, recomputes=way == "layers")
    if way == "whole":
        trainer.logits_max = MANY
    trainer.train([row(FIRST_TOKENS, policy.vocabulary)])
    prompt = len(policy.encode_prompt("What is 2 + 3?"))
    started = time.perf_counter()
    trainer.train([row(tokens - prompt, policy.vocabulary)])
    taken_s = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shape = memory.shape_of(spec.model, spec.adapter, spec.held)
    copies = memory.copies_of(spec)
    twice = way == "layers"
    planned = memory.estimate_bytes(shape, tokens, copies, recomputes=twice, is_one_row=True)
    return {"peak": peak, "planned": planned, "seconds": taken_s}


def child(options: argparse.Namespace, tokens: int, way: str) -> dict[str, float] | None:
    """One step in a process of its own; None: it did not end well, for want of memory perhaps."""
    command = [sys.executable, __file__, "--one", f"{tokens},{way}"]
    command += ["--model", options.model, "--threads", str(options.threads)]
    command += ["--lora-rank", str(options.lora_rank), "--lora-base", options.lora_base]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face model directory")
    parser.add_argument("--lengths", default="512,2048", help="tokens of the row")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lora-rank", type=int, default=0, help="of the adapter; 0: whole model")
    parser.add_argument("--lora-base", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        tokens, _, way = options.one.partition(",")
        spec = TrainerSpec(
            options.model,
            threads=options.threads,
            context_tokens_max=MANY,
            lora_rank=options.lora_rank,
            lora_base=options.lora_base,
        )
        print(json.dumps(measure(spec, int(tokens), way)))
        return
    print("| tokens | way | peak, MiB | planned, MiB | off by | step, s |")
    print("|---|---|---|---|---|---|")
    for tokens in map(int, options.lengths.split(",")):
        for way in options.ways.split(","):
            found = child(options, tokens, way)
            if found is None:
                print(f"| {tokens} | {way} | failed | – | – | – |", flush=True)
                continue
            peak, planned = found["peak"] / 2**20, found["planned"] / 2**20
            off = "–" if way == "whole" else f"{100 * (planned / peak - 1):+.0f} %"
            told = "–" if way == "whole" else f"{planned:,.0f}"
            print(
                f"| {tokens} | {way} | {peak:,.0f} | {told} | {off} | {found['seconds']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
