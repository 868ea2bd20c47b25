"""The sharing experiment of SAPO (arXiv 2509.08721, sections 4 and 5), with controls.

Eight nodes with different task streams train from one warmed policy, at I own and J foreign groups
a round: 8/0, 6/2, 4/4, 2/6. Three controls answer what the paper leaves open: does sharing help, or
only the filter (8/0 with the same zero-advantage filter, by over-generation)? Sharing, or only the
smaller budget (8/0 at the generated tokens of 4/4)? And does it matter that foreign completions
belong to their tasks (4/4 with them shuffled)?

The nodes are production nodes in one process: exchange, verification, pool, sampling, trainer and
engine are the real ones; the network between them is the in-memory transport under a virtual
clock, so results are those of asynchronous nodes of equal speed and do not depend on this machine.
Seconds are the processor's, measured around each node's own generation and training.

    python experiment_sapo.py                 # everything, resumable; then table and plot
    python experiment_sapo.py --seeds 5 --rounds 200
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from on_record import run_missing
from scipy.stats import t as student

SETTINGS: dict[str, dict[str, Any]] = {
    "8/0": {"local_groups": 8, "external_groups": 0},
    "6/2": {"local_groups": 6, "external_groups": 2},
    "4/4": {"local_groups": 4, "external_groups": 4},
    "2/6": {"local_groups": 2, "external_groups": 6},
    "8/0 filtered": {"local_groups": 8, "external_groups": 0, "filter_own": True},
    "8/0 at 4/4's tokens": {"local_groups": 4, "external_groups": 0},
    "4/4 shuffled": {"local_groups": 4, "external_groups": 4, "foreign_shuffle": True},
}
# Run one at a time, with --one: not part of the table.
MORE_SETTINGS: dict[str, dict[str, Any]] = {
    "4/4 likely tokens": {**SETTINGS["4/4"], "foreign_logprob_min": -4.0},
}
AXES = ("round", "generated_tokens", "seconds")


@dataclass(frozen=True)
class Point:
    """One evaluation of one node."""

    node: int
    round: int
    generated_tokens: int
    seconds: float  # processor time of this node's generation and training so far
    passed: float


# --- one run --------------------------------------------------------------------------------


def run_one(setting: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one swarm and return its learning curves."""
    import torch

    from node.config import load_config
    from node.hosting.models import resolve_model
    from swarm.simulation.determinism import deterministic_run

    torch.set_num_threads(1)
    config = load_config(
        {
            "rounds": options.rounds,
            "group_size": options.group_size,
            "evaluate_every_rounds": options.evaluate_every,
            "validation_tasks": 0,  # the loss is compared, and not who comes back from a fall
            "learning_rate": options.learning_rate,
            "threads": 1,
            "seed": seed,
            **{**SETTINGS, **MORE_SETTINGS}[setting],
        },
        os.environ,
        Path(options.run),
    )
    model = resolve_model(config, lambda line: print(line, file=sys.stderr))
    started = time.perf_counter()
    body = partial(_swarm, config, model, options.nodes, seed)
    points, external = deterministic_run(body, seed=seed)
    return {
        "setting": setting,
        "seed": seed,
        "external": external,
        "wall_s": time.perf_counter() - started,
        "points": [asdict(point) for point in points],
    }


async def _swarm(config: Any, model: str, nodes: int, seed: int) -> tuple[list[Point], float]:
    import trio

    from node.hosting.models import trainer_spec
    from node.records.records import HeldOut, RoundDone
    from node.simulation.nodes import SimulatedNode, build, run
    from swarm.simulation.links import LinkProfile
    from swarm.simulation.world import open_world

    points: list[Point] = []
    external: list[int] = []
    async with (
        open_world(seed, nodes, LinkProfile(latency_s=0.05)) as world,
        trio.open_nursery() as nursery,
    ):
        done = trio.Semaphore(0)

        async def live(simulated: SimulatedNode) -> None:
            trainer = Timed(trainer_spec(config, model))

            async def on_record(record: object) -> None:
                if isinstance(record, RoundDone):
                    external.append(record.external_groups)
                elif isinstance(record, HeldOut):
                    tokens, spent = record.generated_tokens_total, trainer.training_s
                    point = Point(simulated.host, record.round, tokens, spent, record.passed)
                    points.append(point)
                    if record.round >= config.rounds:
                        done.release()

            await run(simulated, trainer, trainer, on_record)

        first = build(world, 0, config)
        others = [build(world, n, config, first.transport.addresses()) for n in range(1, nodes)]
        for simulated in (first, *others):
            nursery.start_soon(live, simulated)
        for _ in range(nodes):
            await done.acquire()
        nursery.cancel_scope.cancel()
    return points, fmean(external)


def Timed(spec: Any) -> Any:
    """The production trainer in this process, which takes one virtual second for each call and
    counts the processor's seconds. Evaluations, which the paper's budget does not know, are not
    counted: they generate one completion a prompt."""
    import trio

    from node.training.process import InProcessTrainer

    class TimedTrainer(InProcessTrainer):
        training_s = 0.0
        counts = True

        async def generate(self, prompts: Any, each: int, sampling: Any, seed: int) -> Any:
            self.counts = each > 1
            result = await super().generate(prompts, each, sampling, seed)
            await trio.sleep(1.0)
            return result

        async def train(self, groups: Any) -> Any:
            self.counts = True
            result = await super().train(groups)
            await trio.sleep(1.0)
            return result

        async def _run(self, compute: Any) -> Any:
            def timed() -> Any:  # the computation alone: other nodes run while this one waits
                before = time.process_time()
                try:
                    return compute()
                finally:
                    if self.counts:
                        self.training_s += time.process_time() - before

            return await super()._run(timed)

    return TimedTrainer(spec)


# --- all runs -------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what has no result yet, `--parallel` at a time, and return all results."""
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [(s, seed) for seed in range(1, options.seeds + 1) for s in SETTINGS]
    missing = [each for each in wanted if not result_file(options, *each).exists()]
    prepare = [sys.executable, "-m", "node.cli", "prepare", "--run", options.run]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    run_missing(missing, lambda cell: start(options, *cell), options.parallel, "sapo")
    return [json.loads(result_file(options, *each).read_text()) for each in wanted]


def result_file(options: argparse.Namespace, setting: str, seed: int) -> Path:
    """Where a run's result is kept. Its name holds all that decides the result."""
    name = setting.replace("/", "-").replace(" ", "_").replace("'", "")
    sizes = f"n{options.nodes}-r{options.rounds}-g{options.group_size}-lr{options.learning_rate}"
    return Path(options.out) / f"{options.run}-{sizes}-{name}-seed{seed}.json"


def start(options: argparse.Namespace, setting: str, seed: int) -> "subprocess.Popen[bytes]":
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--one", setting, "--seed", str(seed)]
    for name in ("run", "nodes", "rounds", "group_size", "learning_rate", "evaluate_every", "out"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return subprocess.Popen(command)


# --- table and plot -------------------------------------------------------------------------


def curve(result: dict[str, Any], axis: str) -> list[tuple[float, float]]:
    """The swarm's mean pass rate over the mean of `axis`, one point for each evaluation."""
    by_round: dict[int, list[dict[str, Any]]] = {}
    for point in result["points"]:
        by_round.setdefault(point["round"], []).append(point)
    return [
        (fmean(p[axis] for p in points), fmean(p["passed"] for p in points))
        for _, points in sorted(by_round.items())
    ]


def value_at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear interpolation; the ends are held."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (max(x, x0) - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval over seeds."""
    if len(values) < 2:
        return fmean(values), math.nan
    quantile = float(student.ppf(0.975, len(values) - 1))
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))


def table(results: Sequence[dict[str, Any]]) -> str:
    """Held-out pass rate in percent at equal rounds, generated tokens and seconds."""
    common = {axis: min(curve(result, axis)[-1][0] for result in results) for axis in AXES}
    first = fmean(curve(result, "round")[0][1] for result in results)
    lines = [
        f"All start at {first:.1%} held-out. Pass rate in percent, mean over seeds with the "
        "half-width of its 95 % interval,",
        f"at {common['round']:.0f} rounds, at {common['generated_tokens']:,.0f} generated tokens a "
        f"node, and at {common['seconds']:.1f} processor-seconds a node.",
        "",
        "| setting (I/J) | at equal rounds | mean over rounds | at equal tokens "
        "| at equal seconds | best | J effective |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        of_setting = [result for result in results if result["setting"] == setting]
        cells = []
        for axis in AXES:
            values = [100 * value_at(curve(r, axis), common[axis]) for r in of_setting]
            cells.append("{:.1f} ± {:.1f}".format(*interval(values)))
            if axis == "round":
                means = [100 * fmean(y for _, y in curve(r, axis)) for r in of_setting]
                cells.append("{:.1f} ± {:.1f}".format(*interval(means)))
        best = fmean(100 * max(y for _, y in curve(r, "round")) for r in of_setting)
        external = fmean(r["external"] for r in of_setting)
        lines.append(f"| {setting} | {' | '.join(cells)} | {best:.1f} | {external:.2f} |")
    return "\n".join(lines)


def plot(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Mean curves over the three axes; the band spans the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    labels = {
        "round": "rounds",
        "generated_tokens": "generated tokens per node",
        "seconds": "processor-seconds per node",
    }
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.8), sharey=True)
    for panel, axis in zip(panels, AXES, strict=True):
        for number, setting in enumerate(SETTINGS):
            curves = [curve(r, axis) for r in results if r["setting"] == setting]
            xs = [fmean(c[i][0] for c in curves) for i in range(len(curves[0]))]
            ys = [[100 * c[i][1] for c in curves] for i in range(len(curves[0]))]
            style = "-" if number < 4 else "--"
            colour = f"C{number}"
            panel.plot(xs, [fmean(y) for y in ys], style, color=colour, label=setting)
            panel.fill_between(
                xs, [min(y) for y in ys], [max(y) for y in ys], color=colour, alpha=0.1
            )
        panel.set_xlabel(labels[axis])
        panel.xaxis.set_major_locator(MaxNLocator(6))
        if axis == "generated_tokens":
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:.0f} k"))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out pass rate, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=len(SETTINGS))
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(out, dpi=110)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", default="demo", help="run file or packaged run")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("out/experiment_sapo"))
    parser.add_argument(
        "--one", choices=[*SETTINGS, *MORE_SETTINGS], help="run this setting alone, with --seed"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the one setting")
    options = parser.parse_args()
    if options.rounds % options.evaluate_every:
        parser.error("--rounds must be a multiple of --evaluate-every")
    if options.one:
        result = run_one(options.one, options.seed, options)
        final = result_file(options, options.one, options.seed)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial_file = final.with_suffix(".partial")
        partial_file.write_text(json.dumps(result))
        partial_file.rename(final)
        passed = ", ".join(f"{x:.0f}: {y:.1%}" for x, y in curve(result, "round"))
        print(f"{options.one}, seed {options.seed}, held-out pass rate by round: {passed}")
        return
    results = run_all(options)
    text = table(results)
    (options.out / "table.md").write_text(text + "\n")
    plot(results, options.out / "curves.png")
    print(text)
    print(f"\nplot: {options.out / 'curves.png'}")


if __name__ == "__main__":
    main()
