"""Does a real model learn here, and does sharing help it?

    make install && .venv/bin/python scripts/experiments/experiment_real_model.py [--seeds 0 10 20]
        [--out DIR]

For each seed `make demo` runs twice, nine minutes each: two nodes that share, and two that take
nothing from each other (`SWARM_NODE_EXTERNAL_GROUPS=0`). A pass rate is of the greedy answers on
the run's held-out tasks, the mean of the two nodes; between two evaluations it is interpolated. The
pairs are of one seed, and the intervals 95 % over seeds, with Student's t. A run that is on record
is not done again; its directory is named by what decides it: code, packages, processor and seed.
"""

import argparse
import hashlib
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from experiment_sapo import interval, value_at

from node.records.event_log import FILE_NAME, history, read_events

ROOT = Path(__file__).parents[2]
NODES = 2
ROUNDS = 20  # both ways of a seed do at least that many
WINDOW = 4  # rounds at the start and at the end of which answers are counted
DONE = "done"
SHARED_NOTHING = "no node trained on another's groups"  # as the demo complains
CODE = ("node", "swarm", "scripts/demo.py")


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation of one node: how far it was, and the pass rate, in [0, 1]."""

    rounds: float
    tokens: float  # generated
    groups: float  # trained on, with an advantage
    seconds: float
    passed: float


@dataclass(frozen=True, slots=True)
class Node:
    """What the event log of one node tells."""

    points: tuple[Point, ...]
    read: tuple[float, float]  # share of completions with an answer, in the first and last rounds
    right: tuple[float, float]  # share of those answers that were right


def key(seed: int, sharing: bool) -> str:
    """What decides a run, hashed."""
    git = ["git", "-C", str(ROOT)]
    code = [subprocess.check_output([*git, "rev-parse", f"HEAD:{path}"]) for path in CODE]
    code.append(subprocess.check_output([*git, "diff", "HEAD", "--", *CODE]))
    packages = [version(name) for name in ("torch", "transformers", "reasoning-gym")]
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    facts = repr((code, packages, platform.python_version(), cpu, seed, sharing))
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def demo(directory: Path, seed: int, sharing: bool) -> None:
    """Run the demo, unless it is on record.

    Raises:
        RuntimeError: it failed.
    """
    if (directory / DONE).exists():
        return
    environment = dict(os.environ)
    if not sharing:
        environment["SWARM_NODE_EXTERNAL_GROUPS"] = "0"
    command = [sys.executable, str(ROOT / "scripts/demo.py"), "--model", "smollm2"]
    command += ["--seed", str(seed), "--out", str(directory)]
    with directory.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, env=environment, stdout=log, check=False).returncode
    told = directory.with_suffix(".log").read_text(errors="replace")
    if "a tiny policy, made here, learns instead" in told:
        raise RuntimeError(f"SmolLM2 cannot be run here: see {directory}.log")
    if code and (sharing or SHARED_NOTHING not in told or "ended with status" in told):
        raise RuntimeError(f"the demo of seed {seed} ended with {code}: see {directory}.log")
    (directory / DONE).touch()


def node(directory: Path) -> Node:
    """Read one node's log."""
    told = history(read_events(directory / FILE_NAME))
    begin_s = told.rounds[0][0] - told.rounds[0][1].generate_s - told.rounds[0][1].train_s
    tokens, groups = {0: 0}, {0: 0}
    for _, done in told.rounds:
        tokens[done.round] = done.generated_tokens_total
        groups[done.round] = groups[done.round - 1] + done.informative_groups
    points = tuple(
        Point(each.round, tokens[each.round], groups[each.round], at_s - begin_s, each.passed)
        for at_s, each in told.held_out
    )
    counted = [done.answers for _, done in told.rounds if done.answers is not None]
    read, right = [], []
    for part in (counted[:WINDOW], counted[-WINDOW:]):
        answered = sum(each.completions - each.unread for each in part)
        read.append(answered / sum(each.completions for each in part))
        right.append(sum(each.right for each in part) / max(1, answered))
    return Node(points, (read[0], read[1]), (right[0], right[1]))


def passed_at(node: Node, by: Callable[[Point], float], where: float) -> float:
    """The pass rate of a node, interpolated; beyond its last evaluation, that one's."""
    return value_at([(by(point), point.passed) for point in node.points], where)


def points_of(values: Sequence[float]) -> str:
    """A mean and its interval over seeds, in points."""
    mean, half = interval(values)
    return f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 10, 20])
    parser.add_argument("--out", type=Path, default=Path("out/real_model"))
    options = parser.parse_args()
    ways: dict[bool, list[list[Node]]] = {True: [], False: []}
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for sharing, found in ways.items():
            directory = options.out / key(seed, sharing)
            demo(directory, seed, sharing)
            found.append([node(directory / f"node-{k}") for k in range(NODES)])
            print(f"seed {seed}, {'sharing' if sharing else 'alone'}")
            for each in found[-1]:
                first, last = each.points[0], each.points[-1]
                shares = (
                    f"{before:.0%} to {after:.0%}" for before, after in (each.read, each.right)
                )
                print(
                    f"  {100 * first.passed:.1f} to {100 * last.passed:.1f} % in "
                    f"{last.rounds:.0f} rounds, {last.tokens:,.0f} tokens; "
                    f"answers read {next(shares)}, of them right {next(shares)}",
                    flush=True,
                )
    table(ways[True], ways[False])


def table(shared: list[list[Node]], alone: list[list[Node]]) -> None:
    """Print the two ways side by side, at equal rounds, tokens, groups and seconds."""
    measures: dict[str, Callable[[Point], float]] = {
        "rounds": lambda point: point.rounds,
        "generated tokens": lambda point: point.tokens,
        "groups trained on": lambda point: point.groups,
        "seconds": lambda point: point.seconds,
    }
    print(f"{'at equal':<28}{'sharing':>9}{'alone':>9}  difference in points")
    for name, by in measures.items():
        last = min(by(n.points[-1]) for pair in shared + alone for n in pair)
        where = float(ROUNDS) if name == "rounds" else last
        rates = [
            [statistics.mean(passed_at(n, by, where) for n in pair) for pair in way]
            for way in (shared, alone)
        ]
        print(
            f"{f'{name} ({where:,.0f})':<28}"
            + "".join(f"{100 * statistics.mean(way):>7.1f} %" for way in rates)
            + f"  {points_of([a - b for a, b in zip(*rates, strict=True)])}"
        )
    rises = [statistics.mean(n.points[-1].passed - n.points[0].passed for n in p) for p in shared]
    print(f"rise of nodes that share: {points_of(rises)}")


if __name__ == "__main__":
    main()
