"""Does staleness hurt a central learner, and which loss helps: real training on the tiny policy.

One policy learns by GRPO from groups that are S steps old, S in 0, 1, 3, 6, 11, under three losses:
`grpo`, whose clip is around the policy that generated; `decoupled`, which weighs tokens by it; and
`m2po`, which leaves out what moves the second moment of the ratios too far. With `--higher-rate`
a second learning rate is tried at S in 0, 6, 11.

Batches are generated ahead, S + 1 of them before the first step and one after each: batch t is
always sampled by the policy of step max(0, t - S), and trained on by that of step t. All runs of a
seed have the same tasks and sampling seeds, as many steps and as many groups; only S and the loss
differ. The loss takes the mean over tokens in all of them. Trainer, engine, tasks and scorer are
the production ones, in this process and on one thread; nothing is on a network.

    python experiment_staleness.py            # everything, resumable; then table and plot
    python experiment_staleness.py --updates 4 --staleness 0 6 11 --losses grpo m2po gspo gepo bapo

With one update of a batch a clip around the policy before the update cannot act: `--updates` makes
several. Any of the losses that `swarm-node methods` lists may be named.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Generic, TypeVar

from experiment_sapo import interval
from on_record import key_of

from node.methods.losses.settings import LOSSES

STALENESS: Final = (0, 1, 3, 6, 11)  # S, in steps
STALENESS_HIGHER: Final = (0, 6, 11)  # at the higher learning rate
DEFAULT_LOSSES: Final = ("grpo", "decoupled", "m2po")
STREAM: Final = "staleness"  # no valid peer id: its tasks are in nobody's stream
EVALUATION_SEED: Final = 1

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Setting:
    """One run."""

    learning_rate: float
    loss: str
    staleness: int
    seed: int
    updates: int = 1


class Ahead(Generic[Batch]):
    """Batches that were generated S steps before they are trained on; batch `steps` - 1 is last."""

    def __init__(
        self, staleness: int, steps: int, generate: Callable[[int], Awaitable[Batch]]
    ) -> None:
        self._staleness, self._steps, self._generate = staleness, steps, generate
        self._waiting: deque[Batch] = deque(maxlen=staleness + 1)
        self._generated = 0

    async def batch(self, step: int) -> Batch:
        """That of a step, 0 ≤ step < steps; ask for them in order, before the step's update."""
        while self._generated < min(self._steps, step + self._staleness + 1):
            self._waiting.append(await self._generate(self._generated))
            self._generated += 1
        return self._waiting.popleft()


# --- one run --------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """All runs, by seed."""
    wanted = [(options.learning_rate, tuple(options.staleness))]
    if options.higher_rate is not None:
        wanted.append((options.higher_rate, STALENESS_HIGHER))
    return [
        Setting(rate, loss, staleness, seed, options.updates)
        for rate, all_of_them in wanted
        for seed in range(1, options.seeds + 1)
        for staleness in all_of_them
        for loss in options.losses
    ]


def run_one(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Train one policy; what it did at each step, and its held-out pass rates."""
    import torch
    import trio

    from node.config import load_config
    from node.hosting.models import resolve_model, trainer_spec

    flags = {
        "learning_rate": setting.learning_rate,
        "threads": 1,
        "seed": setting.seed,
        "loss": f"{setting.loss}, aggregation=token_mean",
        "updates_per_batch": setting.updates,
    }
    config = load_config(flags, os.environ, Path(options.run))
    model = resolve_model(config, lambda line: print(line, file=sys.stderr))
    torch.manual_seed(setting.seed)
    spec = trainer_spec(config, model)
    started = time.perf_counter()
    result: dict[str, Any] = trio.run(_learn, config.run, spec, setting, options)
    return {**vars(setting), **result, "wall_s": time.perf_counter() - started}


# Long: one training run from start to end.
async def _learn(
    run: Any, spec: Any, setting: Setting, options: argparse.Namespace
) -> dict[str, Any]:
    from node.interfaces.trainer import TrainingGroup
    from node.loops.evaluation import score
    from node.methods.advantages.group import grpo_advantages
    from node.training.process import InProcessTrainer
    from node.verification.assignment import held_out_tasks
    from node.verification.held_out import HeldOutGuard
    from node.verification.verifier import InlineVerifier

    trainer, verifier = InProcessTrainer(spec), InlineVerifier(run)
    stream = f"{STREAM}/{setting.seed}"
    wanted = options.steps * options.groups
    assigned, _ = await HeldOutGuard(run, verifier).assignments(stream, 0, wanted)
    spent = dict.fromkeys(("generate", "train", "evaluate"), 0.0)
    rewards_of: list[float] = []

    async def generate(number: int) -> list[TrainingGroup]:
        here = assigned[number * options.groups : (number + 1) * options.groups]
        prompts, seed = [each.prompt for each in here], 1_000_000 * setting.seed + number
        began = time.process_time()
        made = await trainer.generate(prompts, options.group_size, run.engine_sampling, seed)
        rewards = await score(verifier, [each.task for each in here], made)
        spent["generate"] += time.process_time() - began
        rewards_of.append(fmean(reward for group in rewards for reward in group))
        return [
            TrainingGroup(prompt, completions, grpo_advantages(group), own_tokens=True)
            for prompt, completions, group in zip(prompts, made, rewards, strict=True)
        ]

    async def evaluate() -> float:
        tasks = held_out_tasks(run)
        prompts = [problem.prompt for problem in await verifier.problems(tasks)]
        began = time.process_time()
        made = await trainer.generate(
            prompts, options.answers, run.engine_sampling, EVALUATION_SEED
        )
        rewards = await score(verifier, tasks, made)
        spent["evaluate"] += time.process_time() - began
        return fmean(reward for group in rewards for reward in group)

    ahead = Ahead(setting.staleness, options.steps, generate)
    evaluations, steps = [(0, await evaluate())], []
    for step in range(options.steps):
        groups = await ahead.batch(step)
        version = (await trainer.info()).policy_version
        behind = [version - c.policy_version for group in groups for c in group.completions]
        began = time.process_time()
        report = await trainer.train(groups)
        spent["train"] += time.process_time() - began
        steps.append(_step(rewards_of[step], behind, report))
        if (step + 1) % options.evaluate_every == 0:
            evaluations.append((step + 1, await evaluate()))
    return {"evaluations": evaluations, "steps": steps, "spent_s": spent}


def _step(reward: float, behind: Sequence[int], report: Any) -> dict[str, Any]:
    known = report.known_tokens > 0
    return {
        "reward": reward,
        "staleness_mean": fmean(behind),
        "staleness_max": max(behind),
        "trained_tokens": report.trained_tokens,
        "grad_norm": report.grad_norm,
        "clip_fraction": report.clip_fraction,
        "mask_fraction": report.mask_fraction,
        "unknown_tokens": report.unknown_tokens,
        "mismatch_k3": report.mismatch_k3 if known else None,
        "effective_share": report.effective_share if known else None,
        "weight_max": report.weight_max if known else None,
    }


# --- all runs -------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what has no result yet, one after the other; all results."""
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = settings_of(options)
    missing = [each for each in wanted if not result_file(options, each).exists()]
    started = time.monotonic()
    for number, setting in enumerate(missing, start=1):
        result = run_one(setting, options)
        save(result, result_file(options, setting))
        minutes = (time.monotonic() - started) / 60
        print(
            f"{setting}: {result['evaluations'][0][1]:.1%} -> {result['evaluations'][-1][1]:.1%}; "
            f"about {minutes / number * (len(missing) - number):.0f} min left",
            flush=True,
        )
    return [json.loads(result_file(options, each).read_text()) for each in wanted]


def result_file(options: argparse.Namespace, setting: Setting) -> Path:
    """Where a run's result is kept. Its name holds all that decides the result."""
    sizes = f"t{options.steps}-r{options.groups}x{options.group_size}-e{options.evaluate_every}"
    which = f"lr{setting.learning_rate}-{setting.loss}-S{setting.staleness}-u{setting.updates}"
    facts = {"sizes": f"{sizes}x{options.answers}", "run": options.run, **vars(setting)}
    return Path(options.out) / f"{which}-seed{setting.seed}-{key_of(facts)}.json"


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(path)


# --- table and plot -------------------------------------------------------------------------


def final(result: dict[str, Any]) -> float:
    """The last held-out pass rate, in percent."""
    return float(100 * result["evaluations"][-1][1])


def arms(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Loss, S and the runs of all seeds, in the table's order."""
    for loss in dict.fromkeys(result["loss"] for result in results):
        for staleness in sorted({result["staleness"] for result in results}):
            found = [
                result
                for result in sorted(results, key=lambda each: each["seed"])
                if (result["loss"], result["staleness"]) == (loss, staleness)
            ]
            if found:
                yield loss, staleness, found


def by_token(runs: Sequence[dict[str, Any]], name: str) -> float:
    """The mean of what steps report, over trained tokens; nan where none does."""
    known = [
        (step[name], step["trained_tokens"])
        for each in runs
        for step in each["steps"]
        if step[name] is not None
    ]
    total = sum(tokens for _, tokens in known)
    return sum(value * tokens for value, tokens in known) / total if total else math.nan


def _row(loss: str, staleness: int, runs: Sequence[dict[str, Any]], fresh: Sequence[float]) -> str:
    ends = [final(each) for each in runs]
    path = [100 * fmean(passed for _, passed in each["evaluations"][1:]) for each in runs]
    lost = "–"
    if staleness:
        lost = "{:+.1f} ± {:.1f}".format(
            *interval([end - begin for end, begin in zip(ends, fresh, strict=True)])
        )
    steps = [step for each in runs for step in each["steps"]]
    cells = (
        loss,
        str(staleness),
        "{:.1f} ± {:.1f}".format(*interval(ends)),
        lost,
        "{:.1f} ± {:.1f}".format(*interval(path)),
        f"{fmean(step['staleness_mean'] for step in steps):.2f}",
        str(max(step["staleness_max"] for step in steps)),
        f"{by_token(runs, 'mismatch_k3'):.4f}",
        f"{by_token(runs, 'effective_share'):.3f}",
        f"{100 * by_token(runs, 'clip_fraction'):.2f}",
        f"{100 * by_token(runs, 'mask_fraction'):.2f}",
        f"{fmean(each['spent_s']['generate'] for each in runs):.0f} + "
        f"{fmean(each['spent_s']['train'] for each in runs):.0f}",
        f"{fmean(each['wall_s'] for each in runs):.0f}",
    )
    return f"| {' | '.join(cells)} |"


def table(results: Sequence[dict[str, Any]]) -> str:
    """One table for each learning rate."""
    lines = []
    for rate in sorted({result["learning_rate"] for result in results}):
        here = [result for result in results if result["learning_rate"] == rate]
        start = fmean(100 * result["evaluations"][0][1] for result in here)
        fresh = {loss: [final(r) for r in runs] for loss, s, runs in arms(here) if s == 0}
        lines += [
            f"Learning rate {rate:g}; all start at {start:.1f} % held-out.",
            "",
            "| loss | S | held-out at the end, % | less that of S = 0 | mean over steps | "
            "staleness, mean | worst | k3 | effective share | clipped, % | left out, % | "
            "generate + train, CPU s | wall-clock, s |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(_row(loss, s, runs, fresh[loss]) for loss, s, runs in arms(here)),
            "",
        ]
    return "\n".join(lines)


def plot(results: Sequence[dict[str, Any]], out: Path) -> None:
    """For each learning rate: curves by loss and S, and where they end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = sorted({result["learning_rate"] for result in results})
    losses = list(dict.fromkeys(result["loss"] for result in results))
    depths = sorted({result["staleness"] for result in results})
    shape = (len(rates), len(losses) + 1)
    figure, rows = plt.subplots(*shape, figsize=(16, 4.0 * len(rates)), sharey="row", squeeze=False)
    for panels, rate in zip(rows, rates, strict=True):
        here = [result for result in results if result["learning_rate"] == rate]
        for loss, staleness, runs in arms(here):
            panel, colour = panels[losses.index(loss)], f"C{depths.index(staleness)}"
            xs = [step for step, _ in runs[0]["evaluations"]]
            ys = [[100 * each["evaluations"][i][1] for each in runs] for i in range(len(xs))]
            panel.plot(xs, [fmean(y) for y in ys], color=colour, label=f"S = {staleness}")
            low, high = [min(y) for y in ys], [max(y) for y in ys]
            panel.fill_between(xs, low, high, color=colour, alpha=0.1)
            panel.set_title(f"{loss}, learning rate {rate:g}")
            panel.set_xlabel("steps")
        _ends(panels[-1], here)
        panels[0].set_ylabel("held-out pass rate, %")
        for panel in panels:
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=100)


def _ends(panel: Any, results: Sequence[dict[str, Any]]) -> None:
    for number, loss in enumerate(dict.fromkeys(result["loss"] for result in results)):
        points = [
            (staleness, *interval([final(each) for each in runs]))
            for name, staleness, runs in arms(results)
            if name == loss
        ]
        xs, means, widths = zip(*points, strict=True)
        shifted = [x + 0.15 * (number - 1) for x in xs]
        panel.errorbar(shifted, means, yerr=widths, fmt="o-", capsize=3, label=loss)
    panel.set_title("at the end, 95 % intervals over seeds")
    panel.set_xlabel("S, steps")


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", default="demo", help="run file or packaged run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=8, help="a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--higher-rate", type=float)
    parser.add_argument("--updates", type=int, default=1, help="of a batch")
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS, metavar="S")
    parser.add_argument("--losses", nargs="+", default=DEFAULT_LOSSES, choices=LOSSES)
    parser.add_argument("--evaluate-every", type=int, default=20)
    parser.add_argument("--answers", type=int, default=2, help="to each held-out problem")
    parser.add_argument("--out", type=Path, default=Path("out/experiment_staleness"))
    parser.add_argument("--one", nargs=3, metavar=("LOSS", "S", "RATE"), help="with --seed")
    parser.add_argument("--seed", type=int, default=1, help="of the one run")
    options = parser.parse_args()
    if options.steps % options.evaluate_every:
        parser.error("--steps must be a multiple of --evaluate-every")
    if options.one:
        loss, staleness, rate = options.one
        setting = Setting(float(rate), loss, int(staleness), options.seed, options.updates)
        result = run_one(setting, options)
        passed = ", ".join(f"{step}: {passed:.1%}" for step, passed in result["evaluations"])
        print(f"{loss}, S = {staleness}, learning rate {rate}: {passed}; {result['spent_s']}")
        return
    results = run_all(options)
    text = table(results)
    (options.out / "table.md").write_text(text + "\n")
    plot(results, options.out / "staleness.png")
    print(f"{text}\nplot: {options.out / 'staleness.png'}")


if __name__ == "__main__":
    main()
