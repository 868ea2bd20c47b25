"""Steps of TRL's GRPOTrainer for `bench_step.py`, which starts this with a Python that has TRL.

    python trl_step.py MODEL STEPS float32|bfloat16 THREADS

Prints the seconds of each step as JSON. Settings are TRL's own, but for sizes, the temperature and
activation checkpointing, which is off since it costs time and saves memory alone."""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from step_tasks import COMPLETIONS, GROUPS, NEW_TOKENS, RATE, TEMPERATURE, prompts
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Notes when steps begin and end."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.began)


def reward(completions, **_):
    """Every other completion is right: the work of a step hangs on no luck."""
    return [float(place % 2) for place, _ in enumerate(completions)]


def main():
    """Train for some steps and print their times."""
    model, steps, precision, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    roles = ("system", "user")
    rows = [
        {"prompt": [{"role": r, "content": text} for r, text in zip(roles, each, strict=True)]}
        for each in prompts(int(steps) * GROUPS)
    ]
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out, use_cpu=True, bf16=precision == "bfloat16", learning_rate=RATE,
            per_device_train_batch_size=GROUPS * COMPLETIONS, num_generations=COMPLETIONS,
            max_completion_length=NEW_TOKENS, temperature=TEMPERATURE, max_steps=int(steps),
            gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        clock = Clock()
        GRPOTrainer(
            model=model, args=settings, reward_funcs=reward, train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        ).train()  # fmt: skip
    print(json.dumps({"step_s": clock.seconds}))


main()
