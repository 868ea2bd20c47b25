"""Do policies fall, what does it help to weigh foreign groups, and which methods help?

    python experiment_policies.py falls        # 400 rounds, as policies were trained and now
    python experiment_policies.py foreign      # foreign groups weighed in four ways
    python experiment_policies.py falls --seeds 5 --parallel 2
    python experiment_policies.py advantages --seeds 3      # and losses: each method by name
    python experiment_policies.py control --seeds 3         # tasks as they come, or chosen
    python experiment_policies.py generate --seeds 3        # from prompts, or from drafts
    python experiment_policies.py methods    # or peers, sft ...: kinds of `methods_plan.toml`

Production nodes run in one process, on the in-memory network under a virtual clock. The default is
the run `demo`, the policy `tiny`, four nodes, and 4 own and 4 foreign groups of 8 a round.

- `falls`: without and with the means against falls. A fall is an evaluation more than ten points
  below the node's best one before.
- `foreign`: foreign groups unweighted, by a truncated ratio (default), better ones alone, or none.
- `advantages`, `losses`: two nodes with own groups alone; losses make four updates of a batch.
- `corrections`: two nodes that share.
- `rescue`: four nodes that share, on `unlike.toml`, with others' right completions for own groups
  that are all wrong. `meeting`: also hints, on `meeting.toml`, whose tasks come again.
- `control`: two nodes that share, on `unlike.toml`; tasks as they come, or by `vade`.
- `generate`: two nodes with own groups alone of tasks that come again (`again.toml`).
  `generate_smollm2`: one with SmolLM2-135M (`sums_again.toml`).

- The kinds of `methods_plan.toml` say there what they compare, and have a table of their own: at
  equal tokens and seconds. Arms that settings do not allow are named and left out.

At the end each policy answers the held-out tasks greedily and in 8 samples. Arms are compared in
pairs of one seed; intervals are Student's t over seeds at 95 %. Results on record are not made
again.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import planned
from measuring import examine_swarm, told, train_swarm, value_at
from on_record import CODE, files_of, kept, key_of, run_missing

from node.methods.choices import ADVANTAGES
from node.methods.loss_settings import CORRECTIONS, LOSSES

HERE = Path(__file__).parent
RUNS = {  # of others: `demo`
    "control": HERE / "unlike.toml",
    "rescue": HERE / "unlike.toml",
    "meeting": HERE / "meeting.toml",
    "generate": HERE / "again.toml",
    "generate_smollm2": HERE / "sums_again.toml",
}
SAMPLES = 8
MEASURING = "scripts/experiments/measuring.py"
FALL = 0.10
COMMON = {"local_groups": 4, "external_groups": 4, "group_size": 8, "threads": 1}
AS_IT_WAS = {
    "step_guard": False,
    "clips_to_median": False,
    "foreign_weighting": "none",
    "warm_up_updates": 0,
    "validation_tasks": 0,
}
TOTALS = (
    "generated_tokens", "drafted_tokens", "kept_tokens", "local_groups", "own_informative",
    "rescued_groups", "hinted_groups",
)  # fmt: skip
ALONE = {"external_groups": 0, "share": "none"}
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "falls": {
        "as it was": AS_IT_WAS,
        "as it is": {},
    },
    "foreign": {
        "unweighted": {"foreign_weighting": "none"},
        "weighted": {},
        "positives": {"foreign_weighting": "positives"},
        "no foreign groups": {"external_groups": 0},
    },
    "advantages": {name: {"advantage": name, **ALONE} for name in ADVANTAGES},
    "corrections": {"none": {}, **{name: {"correction": name} for name in CORRECTIONS}},
    "losses": {name: {"loss": name, "updates_per_batch": 4, **ALONE} for name in LOSSES},
    "control": {
        "as they come": {},
        "by the node's own map": {"control": "vade, others_max=0"},
        "by the shared map": {"control": "vade"},
    },
    "rescue": {
        "drawn alone": {},
        "rescued": {"replay": "rescue"},
        "rescued, by the shared map": {"replay": "rescue", "control": "vade"},
    },
    "meeting": {
        "drawn alone": {},
        "rescued": {"replay": "rescue"},
        "hinted": {"generate": "hints"},
        "rescued and hinted": {"replay": "rescue", "generate": "hints"},
    },
    "generate_smollm2": {
        "from prompts": {"model": "smollm2", "local_groups": 8, **ALONE},
        "from drafts": {
            "model": "smollm2", "local_groups": 8, "generate": "speculative", **ALONE,
        },
    },
    "generate": {
        "from prompts": {"local_groups": 8, **ALONE},
        "from drafts": {"local_groups": 8, "generate": "speculative", **ALONE},
        "from drafts, strictly": {
            "local_groups": 8, "generate": "speculative, lenience=0", **ALONE,
        },
    },
}  # fmt: skip
_NODES = {"falls": 4, "foreign": 4, "rescue": 4, "meeting": 4, "generate_smollm2": 1}
_ROUNDS = {"falls": 400, "foreign": 60, "generate": 60, "generate_smollm2": 24}
_EVERY = {
    "falls": 10, "control": 5, "rescue": 5, "meeting": 5, "generate": 5, "generate_smollm2": 6,
}  # fmt: skip
for _kind, _plan in planned.KINDS.items():
    ARMS[_kind] = {arm: planned.settings_of(_kind, arm) for arm in _plan["arms"]}
    RUNS[_kind] = HERE / _plan["run"]
    _ROUNDS[_kind], _EVERY[_kind] = _plan["rounds"], _plan["every"]
NODES = {kind: _NODES.get(kind, 2) for kind in ARMS}
ROUNDS = {kind: _ROUNDS.get(kind, 40) for kind in ARMS}
EVALUATE_EVERY = {kind: _EVERY.get(kind, 20) for kind in ARMS}


# --- one run --------------------------------------------------------------------------------


def config_of(kind: str, arm: str, seed: int, rounds: int) -> Any:
    """The settings of each node of a run."""
    from node.config import load_config

    settings = {
        **COMMON,
        **({} if kind == "falls" else {"validation_tasks": 0}),
        "rounds": rounds,
        "evaluate_every_rounds": EVALUATE_EVERY[kind],
        "seed": seed,
        **ARMS[kind][arm],
    }
    return load_config(settings, os.environ, RUNS.get(kind, Path("demo")))


def models_of(kind: str, arm: str, config: Any, out: Path) -> list[str]:
    """The model directory of each node of an arm."""
    from node.hosting.models import resolve_model

    if kind in planned.KINDS:
        return planned.models_of(kind, arm, out)
    return [resolve_model(config, lambda line: print(line, file=sys.stderr))] * NODES[kind]


def run_one(kind: str, arm: str, seed: int, rounds: int, out: Path) -> dict[str, Any]:
    """Train one swarm; its evaluations, and what its policies could do at the start and the end."""
    import torch

    from swarm.simulation.world import deterministic_run

    config = config_of(kind, arm, seed, rounds)
    torch.set_num_threads(config.threads)
    models = models_of(kind, arm, config, out)
    started = time.process_time()
    swarm = partial(_swarm, config, models, seed)
    if kind in planned.KINDS:
        swarm = partial(examine_swarm, config, models, seed, planned.SAMPLES)
    result = deterministic_run(swarm, seed=seed)
    return {"arm": arm, "seed": seed, **result, "processor_s": time.process_time() - started}


async def _swarm(config: Any, models: Sequence[str], seed: int) -> dict[str, Any]:
    from node.observe.records import HeldOut, RoundDone
    from node.run.evaluation import examine

    points: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    totals = dict.fromkeys((*TOTALS, "steps_taken_back"), 0)

    async def heard(simulated: Any, trainer: Any, record: object) -> None:
        if isinstance(record, RoundDone):
            for name in totals:
                totals[name] += getattr(record, name)
        if not isinstance(record, HeldOut):
            return
        about = {"node": simulated.host, "round": record.round}
        tokens = record.generated_tokens_total
        points.append({**about, "passed": record.passed, "generated": tokens})
        if record.round in (0, config.rounds):
            found = await examine(config.run, trainer, simulated.node.verifier, SAMPLES)
            ends.append({**about, "tasks": [[each.greedy, each.passed] for each in found]})

    await train_swarm(config, models, seed, heard)
    taken_back = totals.pop("steps_taken_back")
    return {"points": points, "ends": ends, "steps_taken_back": taken_back, "totals": totals}


# --- all runs -------------------------------------------------------------------------------


def facts_of(
    kind: str, arm: str, seed: int, rounds: int, policies: Sequence[str]
) -> dict[str, Any]:
    """The part of a result's key without code, packages and processor. `policies`: hashes of the
    nodes' models."""
    config = config_of(kind, arm, seed, rounds)
    settings = config.model_dump(mode="json")
    settings.pop("cache_dir", None)
    samples = planned.SAMPLES if kind in planned.KINDS else SAMPLES
    facts = {"settings": settings, "run": config.run.run_id, "policies": list(policies)}
    return facts | {"samples": samples, "planned": kind in planned.KINDS}


def allowed(options: argparse.Namespace) -> list[str]:
    """The arms whose settings are allowed; others are named with the reason."""
    from swarm.errors import ConfigError

    found = []
    for arm in options.arms:
        try:
            config_of(options.kind, arm, 1, options.rounds)
            found.append(arm)
        except ConfigError as error:
            print(f"{options.kind}: {arm} is left out: {error}", flush=True)
    return found


def key(options: argparse.Namespace, arm: str, seed: int) -> str:
    """What a result is kept under."""
    config = config_of(options.kind, arm, seed, options.rounds)
    models = models_of(options.kind, arm, config, options.out)
    policies = [files_of(Path(model)) for model in models]
    facts = facts_of(options.kind, arm, seed, options.rounds, policies)
    return key_of(facts, *CODE, MEASURING)


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run what is not on record, `--parallel` at a time, and return all results."""
    seeds = range(1, options.seeds + 1)
    keys = {(arm, seed): key(options, arm, seed) for arm in allowed(options) for seed in seeds}

    def start(cell: tuple[str, int]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, __file__, options.kind, "--one", cell[0]]
        command += ["--seed", str(cell[1]), "--rounds", str(options.rounds)]
        return subprocess.Popen([*command, "--out", str(options.out), "--key", keys[cell]])

    cells = sorted(keys, key=lambda cell: cell[1])
    missing = [cell for cell in cells if not (options.out / f"{keys[cell]}.json").exists()]
    run_missing(missing, start, options.parallel, options.kind)
    return [json.loads((options.out / f"{keys[cell]}.json").read_text()) for cell in cells]


# --- table ----------------------------------------------------------------------------------


def falls_of(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, int]]:
    """Depth and number of evaluations of each fall of a swarm's nodes."""
    found: list[tuple[float, int]] = []
    for node in sorted({point["node"] for point in points}):
        best, depth, lasted = 0.0, 0.0, 0
        curve = sorted((p["round"], p["passed"]) for p in points if p["node"] == node)
        for _, passed in curve:
            best = max(best, passed)
            if best - passed > FALL:
                depth, lasted = max(depth, best - passed), lasted + 1
            elif lasted:
                found.append((depth, lasted))
                depth, lasted = 0.0, 0
        if lasted:
            found.append((depth, lasted))
    return found


def figures_of(result: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Of one swarm at its end, means over its nodes, in percent."""
    last = {each["node"]: each["tasks"] for each in result["ends"] if each["round"] == rounds}
    first = {each["node"]: each["tasks"] for each in result["ends"] if each["round"] == 0}
    locked = {
        node: [at for at, (greedy, passed) in enumerate(tasks) if not greedy and not passed]
        for node, tasks in first.items()
    }
    unlocked = [
        fmean(last[node][at][0] for at in places) for node, places in locked.items() if places
    ]
    tasks = [task for each in last.values() for task in each]
    return {
        "sampled": 100 * fmean(passed / SAMPLES for _, passed in tasks),
        "greedy": 100 * fmean(greedy for greedy, _ in tasks),
        f"pass@{SAMPLES}": 100 * fmean(passed > 0 for _, passed in tasks),
        "unlocked": 100 * fmean(unlocked) if unlocked else 0.0,
    }


def costs_of(
    results: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Costs of an arm's swarms by seed, and their share of the tokens of the first arm (`others`)
    until they were as good as that at its end."""
    found: dict[str, list[float]] = defaultdict(list)
    for mine, first in zip(results, others, strict=True):
        totals = mine["totals"]
        found["tokens"].append(totals["generated_tokens"])
        found["kept, %"].append(100 * totals["kept_tokens"] / max(1, totals["drafted_tokens"]))
        for name in ("own_informative", "rescued_groups", "hinted_groups"):
            found[name].append(100 * totals[name] / totals["local_groups"])
        found["processor, s"].append(mine["processor_s"])
        goal, whole = _curve(first)[-1]
        found["to the end"].append(reached(_curve(mine), goal) / whole)
    return found


def ahead(results: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[float]:
    """Points by which swarms are better than the first arm's (`others`) at equal tokens, by seed:
    at the end of the one that generated less."""
    found = []
    for mine, first in zip(results, others, strict=True):
        curves = [[(at, passed) for passed, at in _curve(each)] for each in (mine, first)]
        where = min(curve[-1][0] for curve in curves)
        here, there = (value_at(curve, where) for curve in curves)
        found.append(100 * (here - there))
    return found


def _curve(result: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(pass rate, tokens so far) of a swarm, both means over the same three evaluations in a row,
    so that an arm with cheap rounds does not look better than it is."""
    rounds = sorted({point["round"] for point in result["points"]})
    each = [[p for p in result["points"] if p["round"] == at] for at in rounds]
    passed = [fmean(p["passed"] for p in points) for points in each]
    tokens = [float(sum(p["generated"] for p in points)) for points in each]
    if len(each) < 3:
        return list(zip(passed, tokens, strict=True))
    return [(fmean(passed[at : at + 3]), fmean(tokens[at : at + 3])) for at in range(len(each) - 2)]


def reached(curve: Sequence[tuple[float, float]], goal: float) -> float:
    """The tokens at which a curve first reaches the goal, interpolated; infinite: never."""
    for (low, begin), (high, end) in pairwise(curve):
        if low < goal <= high:
            return begin + (end - begin) * (goal - low) / (high - low)
    return math.inf


def table(kind: str, results: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """Results of each arm, and differences to the first one in pairs of one seed."""
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_arm.setdefault(result["arm"], []).append(result)
    arms = list(by_arm)
    seeds = len(by_arm[arms[0]])
    figures = {arm: [figures_of(each, rounds) for each in by_arm[arm]] for arm in arms}
    names = list(figures[arms[0]][0])
    heads = ["arm", *names, *(f"{name} less {arms[0]}" for name in names), "falls", "deepest"]
    heads += ["longest", "steps taken back", "tokens", "kept, %", "informative, %"]
    heads += ["rescued, %", "hinted, %", "processor, s", "share of tokens to the first arm's end"]
    heads += [f"sampled less {arms[0]}, at equal tokens"]
    lines = [
        f"{NODES[kind]} nodes, {rounds} rounds, {seeds} seeds, means of percent with 95 % "
        f"intervals, not widened for the number of comparisons. A "
        f"fall: over {100 * FALL:.0f} points below the node's own best; longest: in evaluations "
        f"in a row, one every {EVALUATE_EVERY[kind]} rounds.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for arm in arms:
        cells = [told([each[name] for each in figures[arm]]) for name in names]
        for name in names:
            pairs = zip(figures[arm], figures[arms[0]], strict=True)
            differences = [mine[name] - first[name] for mine, first in pairs]
            cells.append("" if arm == arms[0] else told(differences, sign="+"))
        fell = [fall for each in by_arm[arm] for fall in falls_of(each["points"])]
        deepest = max((depth for depth, _ in fell), default=0.0)
        cells += [str(len(fell)), f"{100 * deepest:.0f}"]
        cells += [str(max((lasted for _, lasted in fell), default=0))]
        cells += [str(sum(each["steps_taken_back"] for each in by_arm[arm]))]
        for name, values in costs_of(by_arm[arm], by_arm[arms[0]]).items():
            never = sum(map(math.isinf, values))
            digits = 2 if name == "to the end" else 0
            mean = fmean([each for each in values if math.isfinite(each)] or [math.nan])
            cells.append(f"{mean:,.{digits}f}" + (f" ({never} never)" if never else ""))
        points = ahead(by_arm[arm], by_arm[arms[0]])
        cells.append("" if arm == arms[0] else told(points, sign="+"))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=[*ARMS])
    parser.add_argument("--rounds", type=int, help="default: 400 of falls, 60 of some, else 40")
    parser.add_argument("--arms", nargs="+", help="these alone; default: all of the kind")
    parser.add_argument("--seeds", type=int, help="default: as the plan says, else 5")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("out/experiment_policies"))
    parser.add_argument("--one", help="run this arm alone, with --seed and --key")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", help="end if its result would be kept under another")
    options = parser.parse_args()
    options.seeds = options.seeds or planned.KINDS.get(options.kind, {}).get("seeds", 5)
    options.rounds = options.rounds or ROUNDS[options.kind]
    options.arms = options.arms or list(ARMS[options.kind])
    if unknown := [arm for arm in options.arms if arm not in ARMS[options.kind]]:
        parser.error(f"no arm {unknown[0]!r}: {', '.join(ARMS[options.kind])}")
    if options.rounds % EVALUATE_EVERY[options.kind] or options.rounds < 1 or options.seeds < 1:
        parser.error(f"--rounds must be a multiple of {EVALUATE_EVERY[options.kind]}")
    if options.one:
        of = key(options, options.one, options.seed)
        if options.key not in (None, of):
            raise SystemExit(f"{options.one}: the code changed since this was begun")
        arguments = options.kind, options.one, options.seed, options.rounds, options.out
        kept(options.out, of, partial(run_one, *arguments))
        return
    results = run_all(options)
    tell = planned.table if options.kind in planned.KINDS else table
    text = tell(options.kind, results, options.rounds)
    (options.out / f"{options.kind}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
