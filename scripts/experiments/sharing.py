"""When does sharing help? Conditions and arms of `sharing_plan.toml`, fixed before the runs.

    python sharing.py                                   # the default ones; resumable
    python sharing.py --conditions smollm2 --seeds 3 --parallel 1
    python sharing.py --conditions "near zero" --arms 8/0 6/2 4/4 2/6 --seeds 5
    python sharing.py --recorded experiments/results/sharing-*.tar.xz   # runs nothing

Production nodes run in one process, on the in-memory network under a virtual clock. A condition's
nodes may begin with different policies: the tiny one warmed on some environments, or SmolLM2-135M.
Every few rounds each policy answers the held-out tasks greedily, at the end also in some samples.

Tables are at equal rounds, tokens and processor seconds of a node. The primary figure compares an
arm that shares to the best control at the most tokens that both have, in pairs of one seed.
Intervals are of 95 % for all pairs of the plan together (Bonferroni), by Student's t over seeds and
by a bootstrap over tasks. They hold for these first policies: all seeds have one warm-up. Taking
the best control works against the arms that share. A last table and a plot compare the results to
the model of when sharing pays (`expectations`).

Conditions with `levels` are races: their figure is the own tokens until a level (`races`).

Results are kept under a key of settings, policies, code, packages and processor.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

import numpy as np
import races
from measuring import told, train_swarm, value_at
from on_record import CODE as LIBRARY
from on_record import code_of, files_of, kept, key_of, run_missing
from scipy.stats import bootstrap

HERE: Final = Path(__file__).parent
PLAN: Final[dict[str, Any]] = tomllib.loads((HERE / "sharing_plan.toml").read_text())
CONDITIONS: Final[dict[str, Any]] = PLAN["conditions"]
ARMS: Final[dict[str, Any]] = PLAN["arms"]
CODE: Final = (*LIBRARY, "scripts/experiments/measuring.py", "scripts/experiments/shuffled.py")
AXES: Final = {"round": "rounds", "tokens": "generated tokens", "seconds": "seconds"}
MEASURED: Final = 1  # raise it where `run_one` writes down something else
VETERAN, VETERAN_ARM, VETERAN_SEED = "veteran", "4/4", 100  # of no swarm that is compared
STRONG_TO: Final = 0.20  # of the one that was warmed longer
ALL_RUN: Final = [arm for arm in ARMS if not ARMS[arm].get("races")]  # in conditions without levels
ALL_OWN: Final = "8/0"  # the arm that SAPO compares the others to
SPECIAL: Final = 6.0  # a specialist's environment comes so many times as often as another
COUNTED: Final = (
    "local_groups", "own_informative", "external_groups", "informative_groups", "rescued_groups",
)  # fmt: skip


# --- where nodes begin ----------------------------------------------------------------------


def threads_of(condition: str) -> int:
    """Threads of a swarm's process: a real model fills the memory, so it gets all cores."""
    return int(CONDITIONS[condition].get("threads", 2 if is_real(condition) else 1))


def is_real(condition: str) -> bool:
    """True if its nodes train SmolLM2, False if they train the tiny policy."""
    nodes = CONDITIONS[condition]["nodes"]
    return "smollm2" in (CONDITIONS[condition].get("model"), *nodes)


def arms_of(condition: str, asked: Sequence[str] | None = None) -> list[str]:
    """The arms to run: those asked for, the condition's, or the default ones."""
    default = [arm for arm, told in ARMS.items() if told.get("default")]
    return list(asked or CONDITIONS[condition].get("arms", default))


def comparisons_of(condition: str) -> int:
    """The pairs of an arm that shares and a control that a condition has, run or not."""
    ours = CONDITIONS[condition].get("arms", ALL_RUN)
    sharing = [arm for arm in ours if arm not in PLAN["controls"]]
    return len(sharing) * len(PLAN["controls"])


def places_of(condition: str, arm: str) -> list[int]:
    """The nodes of a swarm that run. Where nothing is shared, those that do not count may rest."""
    every = list(range(len(CONDITIONS[condition]["nodes"])))
    is_alone = ARMS[arm].get("share") == "none"
    return list(CONDITIONS[condition].get("counted", every)) if is_alone else every


def config_of(condition: str, arm: str, seed: int, rounds: int) -> Any:
    """The settings of each node of a swarm."""
    from node.config import load_config

    settings = {key: value for key, value in ARMS[arm].items() if key not in ("default", "races")}
    if str(settings.get("advantage", "")).startswith("./"):
        settings["advantage"] = f"{HERE}/{settings['advantage'][2:]}"
    settings |= CONDITIONS[condition].get("settings", {})
    settings |= {
        "model": "smollm2" if is_real(condition) else "tiny",
        "group_size": PLAN["group_size"],
        "rounds": rounds,
        "evaluate_every_rounds": rounds // evaluations_of(condition),
        "validation_tasks": 0,
        "threads": threads_of(condition),
        "seed": seed,
    }
    return load_config(settings, os.environ, HERE / CONDITIONS[condition]["run"])


def unlike_of(condition: str, places: Sequence[int]) -> list[dict[str, Any]]:
    """The settings in which single nodes of a swarm differ from all."""
    told = CONDITIONS[condition].get("unlike")
    return [told[place] for place in places] if told else []


def models_of(condition: str, out: Path) -> list[str]:
    """The model directory of each node, made where it is not there yet. SmolLM2, a veteran, or an
    environment that it trained on alone; of the tiny policy one that it was warmed on."""
    from node.hosting.models import resolve_model

    config = config_of(condition, next(iter(ARMS)), 1, PLAN["rounds"])
    kinds = CONDITIONS[condition]["nodes"]
    if config.model != "tiny":
        model = resolve_model(config, lambda line: print(line, file=sys.stderr))
        veterans = iter(_trained(condition, model, kinds.count(VETERAN), out))
        first = {"smollm2": lambda: model, VETERAN: lambda: next(veterans)}
        return [
            str(first[kind]() if kind in first else _trained(condition, model, 1, out, kind)[0])
            for kind in kinds
        ]
    to = CONDITIONS[condition]["warmed_to"]
    return [
        str(_warmed(config, *(("", STRONG_TO) if kind == "strong" else (kind, to)), out))
        for kind in CONDITIONS[condition]["nodes"]
    ]


def _warmed(config: Any, environment: str, to: float, out: Path) -> Path:
    """A tiny policy warmed on the run's tasks, on those of this environment `SPECIAL` times as
    often; "": on all alike."""
    from node.policies.presets import TinyRecipe, recipe_key
    from node.policies.tiny import make_tiny

    recipe = TinyRecipe(target=to, steps=1_200)
    code = code_of(
        "node/policies",
        "node/envs",
        "node/hosting/models.py",
        "node/verify/warm_up.py",
    )
    key = recipe_key(recipe, f"{config.run.run_id} {environment} {SPECIAL} {code}")
    directory = out / "policies" / f"{environment or 'all'}-{key[:16]}"
    if not directory.exists():
        unfinished = directory.with_suffix(".partial")
        pairs = _mixed_pairs(config, environment)
        reached_share = make_tiny(pairs, unfinished, lambda share, line: None, recipe)
        print(f"warmed on {environment or 'all'}: {reached_share:.1%}", flush=True)
        unfinished.rename(directory)
    return directory


def _trained(
    condition: str, model: str, count: int, out: Path, environment: str = ""
) -> list[Path]:
    """Policies of a swarm that has trained this model for the condition's `veteran_rounds`, on
    one of its environments or, by default, on all. A single node has own groups alone."""
    if not count:
        return []
    condition = CONDITIONS[condition].get("veterans_of", condition)
    rounds = CONDITIONS[condition]["veteran_rounds"]
    arm = VETERAN_ARM if count > 1 else ALL_OWN
    config = config_of(condition, arm, VETERAN_SEED, rounds)
    facts = facts_of(condition, arm, VETERAN_SEED, rounds, [files_of(Path(model))])
    config = config.model_copy(update={"evaluate_every_rounds": rounds})
    if environment:
        only = tuple(each for each in config.run.environments if each.name == environment)
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"environments": only})}
        )
        facts |= {"environment": environment}
    key = key_of(facts | {"count": count}, *CODE)
    directory = out / "policies" / f"{environment or VETERAN}s-{key}"
    found = [directory / str(place) for place in range(count)]
    if not directory.exists():
        unfinished = directory.with_suffix(".partial")

        async def keep(simulated: Any, trainer: Any, record: Any) -> None:
            if type(record).__name__ == "HeldOut" and record.round == rounds:
                made = unfinished / str(simulated.host)
                made.mkdir(parents=True, exist_ok=True)
                await trainer.export_whole(made)
                said = f"{environment or VETERAN} {simulated.host}: {record.passed:.1%}"
                print(said, file=sys.stderr, flush=True)

        shutil.rmtree(unfinished, ignore_errors=True)
        train = partial(train_swarm, config, [model] * count, VETERAN_SEED, keep)
        _simulated(condition, train, VETERAN_SEED)
        unfinished.rename(directory)
    return found


def _simulated(condition: str, run: Any, seed: int) -> Any:
    import torch

    from swarm.simulation.world import deterministic_run

    torch.set_num_threads(threads_of(condition))
    return deterministic_run(run, seed=seed)


def _mixed_pairs(config: Any, special: str) -> Iterator[tuple[str, str]]:
    from node.hosting.models import warm_up_pairs
    from node.verify.warm_up import asked_of

    names = sorted({each.name for each in config.run.environments})
    pairs = [warm_up_pairs(asked_of(config, {name})) for name in names]
    weights = [SPECIAL if name == special else 1.0 for name in names]
    rng = Random(f"{special} pairs")
    while True:
        yield next(*rng.choices(pairs, weights))


# --- one swarm ------------------------------------------------------------------------------


def run_one(condition: str, arm: str, seed: int, rounds: int, out: Path) -> dict[str, Any]:
    """Train one swarm; what its policies could do at each evaluation."""
    config, places = config_of(condition, arm, seed, rounds), places_of(condition, arm)
    models = models_of(condition, out)
    began_s = time.monotonic()
    run = partial(_swarm, config, [models[place] for place in places], seed, places, condition)
    result = _simulated(condition, run, seed)
    took_s = time.monotonic() - began_s
    return {"condition": condition, "arm": arm, "seed": seed, **result, "took_s": took_s}


async def _swarm(
    config: Any, models: Sequence[str], seed: int, places: Sequence[int], condition: str
) -> dict[str, Any]:
    from node.observe.records import HeldOut, RoundDone
    from node.run.evaluation import examine

    points: list[dict[str, Any]] = []
    totals = dict.fromkeys(COUNTED, 0)
    counted = CONDITIONS[condition].get("counted", places)

    async def heard(simulated: Any, trainer: Any, record: object) -> None:
        if isinstance(record, RoundDone):
            for name in COUNTED:
                totals[name] += getattr(record, name)
        if not isinstance(record, HeldOut):
            return
        if places[simulated.host] not in counted:
            if record.round:
                return  # of the others the first pass rate alone is used
            if CONDITIONS[condition].get("others_rest"):
                trainer.train = partial(_untrained, trainer.train)
        samples = PLAN["samples"] if record.round in (0, config.rounds) else 0
        spent_s = trainer.training_s
        found = await examine(config.run, trainer, simulated.node.verifier, samples)
        trainer.training_s = spent_s
        points.append(
            {
                "node": places[simulated.host],
                "round": record.round,
                "tokens": record.generated_tokens_total,
                "seconds": spent_s,
                "sampled": record.passed,
                "tasks": [[each.environment, each.greedy, each.passed] for each in found],
            }
        )

    def is_over() -> bool:
        return races.is_over(CONDITIONS[condition], {"points": points})

    await train_swarm(config, models, seed, heard, is_over, unlike_of(condition, places))
    return {"points": points, "totals": totals}


async def _untrained(train: Any, groups: Sequence[Any]) -> Any:
    """An update on nothing, which leaves a policy as it is."""
    return await train([])


def rounds_of(options: argparse.Namespace, condition: str) -> int:
    """As asked for, or as the plan says."""
    return int(options.rounds or CONDITIONS[condition].get("rounds", PLAN["rounds"]))


def evaluations_of(condition: str) -> int:
    """After the first one."""
    return int(CONDITIONS[condition].get("evaluations", PLAN["evaluations"]))


def facts_of(
    condition: str, arm: str, seed: int, rounds: int, policies: Sequence[str]
) -> dict[str, Any]:
    """The part of a result's key without code, packages and processor. `policies`: hashes."""
    config = config_of(condition, arm, seed, rounds)
    settings = config.model_dump(mode="json")
    settings.pop("cache_dir", None)
    facts = {"settings": settings, "run": config.run.run_id, "policies": list(policies)}
    return facts | {"samples": PLAN["samples"], "measured": MEASURED}


def key_of_swarm(
    condition: str, arm: str, seed: int, rounds: int, policies: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """The key of a swarm's result and its facts, with those in which its nodes are unlike."""
    facts = facts_of(condition, arm, seed, rounds, policies)
    places = places_of(condition, arm)
    if unlike := unlike_of(condition, places):
        facts["unlike"] = unlike
    if CONDITIONS[condition].get("others_rest") and len(places) > 1:
        facts["others_rest"] = True
    return key_of(facts, *CODE), facts


def run_kept(options: argparse.Namespace, condition: str) -> None:
    """Run `--one`, and keep its result with its facts; end if its key is another than `--key`."""
    rounds = rounds_of(options, condition)
    policies = [files_of(Path(model)) for model in models_of(condition, options.out)]
    key, facts = key_of_swarm(condition, options.one, options.seed, rounds, policies)
    if options.key not in (None, key):
        raise SystemExit(f"{condition}, {options.one}: the code changed since this was begun")
    run = partial(run_one, condition, options.one, options.seed, rounds, options.out)
    kept(options.out, key, lambda: {**run(), "facts": facts})


def run_all(options: argparse.Namespace, condition: str) -> list[dict[str, Any]]:
    """Run what is not on record of a condition, `--parallel` at a time; all results."""
    rounds = rounds_of(options, condition)
    policies = [files_of(Path(model)) for model in models_of(condition, options.out)]
    keys = {
        (arm, seed): key_of_swarm(condition, arm, seed, rounds, policies)[0]
        for seed in range(1, options.seeds + 1)
        for arm in arms_of(condition, options.arms)
    }

    def start(cell: tuple[str, int]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, __file__, "--conditions", condition, "--one", cell[0]]
        command += ["--seed", str(cell[1]), "--rounds", str(rounds)]
        return subprocess.Popen([*command, "--out", str(options.out), "--key", keys[cell]])

    missing = [cell for cell in keys if not (options.out / f"{keys[cell]}.json").exists()]
    run_missing(missing, start, options.parallel, condition)
    return [json.loads((options.out / f"{key}.json").read_text()) for key in keys.values()]


def recorded(files: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """Results in files of `experiments/results`, by condition, in the plan's order; but for races,
    of the seeds that all arms have. Ends if one result is there twice."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for file in files:
        with tarfile.open(file) as archive:
            for member in archive.getmembers():
                content = archive.extractfile(member) if member.name.endswith(".json") else None
                if content is None:
                    continue
                result = json.load(content)
                cell = result["condition"], result["arm"], result["seed"]
                if cell in found:
                    raise SystemExit(f"{file}: {', '.join(map(str, cell))} is there already")
                found[cell] = result
    by_condition: dict[str, list[dict[str, Any]]] = {}
    for condition in (name for name in CONDITIONS if any(cell[0] == name for cell in found)):
        arms = [arm for arm in ARMS if any(cell[:2] == (condition, arm) for cell in found)]
        seeds = sorted({cell[2] for cell in found if cell[0] == condition})
        cells = [(condition, arm, seed) for seed in seeds for arm in arms]
        if "levels" in CONDITIONS[condition]:
            by_condition[condition] = [found[cell] for cell in cells if cell in found]
            continue
        whole = [seed for seed in seeds if all((condition, arm, seed) in found for arm in arms)]
        if whole != seeds:
            print(f"{condition}: of seeds {seeds} all arms have {whole}", file=sys.stderr)
        by_condition[condition] = [found[cell] for cell in cells if cell[2] in whole]
    return by_condition


# --- what came of it ------------------------------------------------------------------------


def greedy(point: Mapping[str, Any]) -> float:
    """Of one policy, in percent."""
    return 100 * fmean(right for _, right, _ in point["tasks"])


def sampled(point: Mapping[str, Any]) -> float:
    """One sample of each task, in percent."""
    return 100 * float(point["sampled"])


def over_rounds(result: Mapping[str, Any]) -> float:
    """The sampled pass rate in the mean over all rounds, in percent, interpolated between
    evaluations: SAPO's figure, but of held-out tasks."""
    rounds, values = zip(*curve(result, "round", sampled), strict=True)
    return float(np.trapezoid(values, rounds)) / (rounds[-1] - rounds[0])


def curve(result: Mapping[str, Any], axis: str, value: Any) -> list[tuple[float, float]]:
    """Means over a swarm's nodes, one for each evaluation."""
    found = []
    for at in sorted({point["round"] for point in result["points"]}):
        of_round = [point for point in result["points"] if point["round"] == at]
        found.append((fmean(p[axis] for p in of_round), fmean(map(value, of_round))))
    return found


def ends_of(result: Mapping[str, Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Of each node its tasks before the first round and after the last one."""
    by_node: dict[int, dict[int, list[Any]]] = {}
    for point in result["points"]:
        by_node.setdefault(point["node"], {})[point["round"]] = point["tasks"]
    for rounds in by_node.values():
        yield rounds[0], rounds[max(rounds)]


def unlocked(result: Mapping[str, Any], environment: str | None = None) -> float:
    """Share of the tasks locked at the start whose greedy answer is right at the end, in percent;
    NaN if none was locked."""
    found = [
        after[1]
        for first, last in ends_of(result)
        for before, after in zip(first, last, strict=True)
        if not before[1] and not before[2] and environment in (None, before[0])
    ]
    return 100 * fmean(found) if found else math.nan


def pass_at(result: Mapping[str, Any]) -> float:
    """Share of tasks that at least one sample solves at the end, in percent."""
    return 100 * fmean(task[2] > 0 for _, last in ends_of(result) for task in last)


def _a_round(result: Mapping[str, Any], axis: str) -> float:
    """Own tokens or processor seconds of one node's round, in the mean."""
    rounds = curve(result, "round", greedy)[-1][0]
    return curve(result, axis, greedy)[-1][0] / rounds


Results = Sequence[Mapping[str, Any]]  # of one arm, by seed


def at(results: Results, axis: str, where: float, value: Any = greedy) -> list[float]:
    """Of each seed the value where so many rounds, tokens or seconds are behind it."""
    return [value_at(curve(each, axis, value), where) for each in results]


def least(*arms: Results, axis: str = "tokens") -> float:
    """The results of every swarm of these arms."""
    return min(curve(each, axis, greedy)[-1][0] for results in arms for each in results)


def best_control(mine: Results, controls: Mapping[str, Results]) -> str:
    """The control that is best against `mine` at the most tokens that both have."""

    def behind(name: str) -> float:
        where = least(mine, controls[name])
        return fmean(at(mine, "tokens", where)) - fmean(at(controls[name], "tokens", where))

    return min(controls, key=behind)


def over_tasks(mine: Results, others: Results, where: float, comparisons: int) -> str:
    """The 95 % interval of the difference in greedy answers at `where` tokens, by a bootstrap over
    tasks, each with all of its nodes and seeds."""
    pairs = zip(mine, others, strict=True)
    by_seed = [zip(by_task(one, where), by_task(other, where), strict=True) for one, other in pairs]
    each = [fmean(one - other for one, other in place) for place in zip(*by_seed, strict=True)]
    if len(set(each)) == 1:
        return f"{each[0]:+.1f}"
    level = 1 - 0.05 / comparisons
    drawn = bootstrap(
        (each,), fmean, vectorized=False, method="percentile", confidence_level=level, rng=1
    )
    return "{:+.1f} to {:+.1f}".format(*drawn.confidence_interval)


def by_task(result: Mapping[str, Any], where: float) -> list[float]:
    """Of each task its greedy answers at so many tokens, in percent of the nodes."""

    def right(place: int, point: Mapping[str, Any]) -> float:
        return 100.0 * point["tasks"][place][1]

    places = range(len(result["points"][0]["tasks"]))
    return [value_at(curve(result, "tokens", partial(right, place)), where) for place in places]


def compared(mine: Results, controls: Mapping[str, Results], comparisons: int) -> list[str]:
    """The cells of the primary figure: control, over seeds, over tasks. Empty if a control of the
    plan is missing."""
    if set(controls) != set(PLAN["controls"]):
        return ["", "", ""]
    best = best_control(mine, controls)
    where = least(mine, controls[best])
    pairs = zip(at(mine, "tokens", where), at(controls[best], "tokens", where), strict=True)
    differences = [one - other for one, other in pairs]
    over = over_tasks(mine, controls[best], where, comparisons)
    return [f"{best}, {where:,.0f}", told(differences, comparisons, "+"), over]


def tokens_to(results: Results, goal: float | None) -> str:
    """The tokens that a node needed to reach the goal; no mean if one never did."""
    if goal is None:
        return ""
    needed = [races.first(curve(result, "tokens", greedy), goal) for result in results]
    never = sum(not each.ever for each in needed)
    return f"never in {never} of {len(needed)}" if never else f"{fmean(e.at for e in needed):,.0f}"


def goal_of(controls: Mapping[str, Results]) -> float | None:
    """The level of the best control after most of its gain, in percent; None: none gains."""
    ends = {
        name: [fmean(curve(each, "round", greedy)[place][1] for each in mine) for place in (0, -1)]
        for name, mine in controls.items()
    }
    start, end = max(ends.values(), key=lambda found: found[1], default=(0.0, 0.0))
    return start + PLAN["threshold_share"] * (end - start) if end > start else None


# Long: one table, column by column.
def table(condition: str, results: Results) -> str:
    """Results of each arm of a condition, and the primary figure against the best control."""
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_arm.setdefault(result["arm"], []).append(result)
    comparisons = comparisons_of(condition)
    equal = {axis: least(*by_arm.values(), axis=axis) for axis in AXES}
    controls = {arm: by_arm[arm] for arm in PLAN["controls"] if arm in by_arm}
    goal = goal_of(controls)
    own_alone = fmean(map(over_rounds, by_arm[ALL_OWN])) if ALL_OWN in by_arm else 0.0
    start = fmean(curve(r, "round", greedy)[0][1] for r in results)
    environments = sorted({task[0] for task in results[0]["points"][0]["tasks"]})
    heads = ["arm", *(f"greedy at equal {name}" for name in AXES.values())]
    heads += ["best control, at so many tokens", "PRIMARY: greedy, less that control"]
    heads += ["the same over tasks", "tokens to " + ("a goal" if goal is None else f"{goal:.1f} %")]
    heads += ["sampled, at the end", "sampled, over all rounds", f"the same, times {ALL_OWN}'s"]
    heads.append(f"pass@{PLAN['samples']}")
    heads += ["unlocked", *(f"unlocked, {name}" for name in environments)]
    heads += ["own groups that teach, %", "others' that teach, a round", "rescued, %"]
    heads += ["own tokens, a round", "seconds, a round", "minutes"]
    lines = [
        f"**{condition}**: {CONDITIONS[condition]['says']}. {len(by_arm[next(iter(by_arm))])} "
        f"seeds; greedy answers of {start:.1f} % are right at the start. Equal are "
        + ", ".join(f"{equal[axis]:,.0f} {name}" for axis, name in AXES.items())
        + f" of a node. Intervals of the primary figure hold for the plan's {comparisons} pairs of "
        "an arm that shares and a control together; the others are of one figure alone. Samples "
        "are at the run's temperature.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for arm, mine in by_arm.items():
        cells = [told(at(mine, axis, equal[axis])) for axis in AXES]
        is_control = arm in PLAN["controls"]
        cells += ["", "", ""] if is_control else compared(mine, controls, comparisons)
        cells.append(tokens_to(mine, goal))
        cells.append(told([curve(r, "round", sampled)[-1][1] for r in mine]))
        cells.append(told([over_rounds(r) for r in mine]))
        cells.append(f"{fmean(map(over_rounds, mine)) / own_alone:.2f}" if own_alone else "")
        cells.append(told([pass_at(r) for r in mine]))
        cells.append(told([unlocked(r) for r in mine]))
        cells += [f"{fmean(unlocked(r, name) for r in mine):.1f}" for name in environments]
        sums = {name: sum(r["totals"][name] for r in mine) for name in COUNTED}
        node_rounds = len(mine) * sum(p["round"] == 0 for p in mine[0]["points"])
        node_rounds *= max(p["round"] for p in mine[0]["points"])
        foreign = sums["informative_groups"] - sums["own_informative"]
        cells.append(f"{100 * sums['own_informative'] / sums['local_groups']:.0f}")
        cells.append(f"{foreign / node_rounds:.2f}")
        cells.append(f"{100 * sums['rescued_groups'] / sums['local_groups']:.0f}")
        cells += [told([_a_round(r, axis) for r in mine]) for axis in ("tokens", "seconds")]
        cells.append(f"{fmean(r['took_s'] for r in mine) / 60:.1f}")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    if len(set(CONDITIONS[condition]["nodes"])) > 1:
        lines += [
            "",
            "Greedy answers of each node, in percent, at the start: " + of_nodes(results, 0),
        ]
        lines += [f"{arm}, at the end: {of_nodes(mine, -1)}" for arm, mine in by_arm.items()]
    return "\n".join(lines)


def of_nodes(results: Results, place: int) -> str:
    """Of each node its greedy answers by environment, before the first round or after the last."""
    right: dict[tuple[int, str], list[bool]] = {}
    for result in results:
        number = sorted({point["round"] for point in result["points"]})[place]
        for point in (each for each in result["points"] if each["round"] == number):
            for environment, is_right, _ in point["tasks"]:
                right.setdefault((point["node"], environment), []).append(is_right)
    told = (
        f"{node} {name} {100 * fmean(each):.0f}" for (node, name), each in sorted(right.items())
    )
    return ", ".join(told)


def race(condition: str, results: Results) -> str:
    """The table of a condition with levels. Intervals hold for all of its arms and levels."""
    told, ours = CONDITIONS[condition], arms_of(condition)
    sharing = [arm for arm in ours if arm not in PLAN["controls"]]
    comparisons = len(sharing) * len(told["levels"])
    return f"**{condition}**: " + races.table(told, results, PLAN["controls"], comparisons)


# --- what the model of when it pays says ------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """Groups that teach in a round of a node of one swarm: own ones and others'."""

    condition: str
    arm: str
    expected: tuple[float, float]
    found: tuple[float, float]


def expectations(results: Results) -> list[Told]:
    """Expected and found groups of each swarm. The expectation takes the mean share of groups that
    teach before the first round and after the last."""
    found = []
    for result in results:
        config = config_of(result["condition"], result["arm"], result["seed"], PLAN["rounds"])
        shares = [fmean(map(_teaching, ends)) for ends in ends_of(result)]
        # Of the only other node a round takes all that it wants.
        bound = math.ceil(config.foreign_share_max * config.external_groups)
        each_max = bound if len(shares) > 2 else math.inf
        made = [config.local_groups * share for share in shares]
        taken = [
            expected_foreign(
                [*made[:place], *made[place + 1 :]], config.external_groups, each_max=each_max
            )
            for place in range(len(made))
        ]
        totals = result["totals"]
        rounds = len(shares) * max(point["round"] for point in result["points"])
        foreign = totals["informative_groups"] - totals["own_informative"]
        found.append(
            Told(
                result["condition"],
                result["arm"],
                (fmean(made), fmean(taken)),
                (totals["own_informative"] / rounds, foreign / rounds),
            )
        )
    return found


def expected_foreign(others: Sequence[float], wanted: int, *, each_max: float = math.inf) -> float:
    """Foreign groups that teach in a round. `others`: those that each other node makes; `each_max`:
    the most that a round takes of one."""
    return min(float(wanted), sum(min(each_max, made) for made in others))


def _teaching(tasks: Sequence[Sequence[Any]]) -> float:
    """The share of one policy's groups that teach, one group of each task."""
    if PLAN["samples"] != PLAN["group_size"]:
        raise SystemExit("the plan's samples are no group: what is expected would be too low")
    return fmean(0 < passed < PLAN["samples"] for _, _, passed in tasks)


def expected_table(each: Sequence[Told]) -> str:
    """Means over seeds."""
    lines = [
        "Groups that teach in a node's round, as the model of when sharing pays says and as found, "
        "and how many times as many as alone:",
        "",
        "| condition | arm | own, expected | own, found | others', expected | others', found | "
        "times alone, expected | times alone, found |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for condition, arm in dict.fromkeys((one.condition, one.arm) for one in each):
        mine = [one for one in each if (one.condition, one.arm) == (condition, arm)]
        sides = [
            [fmean(side[place] for side in sides) for place in (0, 1)]
            for sides in ([one.expected for one in mine], [one.found for one in mine])
        ]
        cells = [f"{side[place]:.2f}" for place in (0, 1) for side in sides]
        cells += [f"{sum(side) / side[0]:.2f}" if side[0] else "–" for side in sides]
        lines.append(f"| {condition} | {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(each: Sequence[Told], out: Path) -> None:
    """Results over expectations, a point for each swarm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 4.5))
    for place, (panel, whose) in enumerate(zip(panels, ("own", "others'"), strict=True)):
        for condition in dict.fromkeys(one.condition for one in each):
            mine = [one for one in each if one.condition == condition]
            xs, ys = [one.expected[place] for one in mine], [one.found[place] for one in mine]
            panel.scatter(xs, ys, label=condition, alpha=0.7)
        most = max([1.0, *(max(one.expected[place], one.found[place]) for one in each)])
        panel.plot([0, most], [0, most], color="grey", linewidth=1)
        panel.set_title(f"{whose} groups that teach, a round")
        panel.set_xlabel("expected")
        panel.set_ylabel("found")
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(out, dpi=100)
    plt.close(figure)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = [name for name, told in CONDITIONS.items() if told.get("default")]
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=default)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: as the plan says")
    parser.add_argument("--rounds", type=int, default=0, help="default: as the plan says")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=2, help="swarms at a time")
    parser.add_argument("--out", type=Path, default=Path("out/sharing"))
    parser.add_argument(
        "--recorded", nargs="+", type=Path, help="run nothing: tables and plot of results on record"
    )
    parser.add_argument("--one", choices=ARMS, help="run this arm alone, with --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", help="end if its result would be kept under another")
    options = parser.parse_args()
    options.out = options.out.absolute()
    for each in map(evaluations_of, options.conditions):
        if options.rounds < 0 or options.rounds % each or options.seeds < 1:
            parser.error(f"--rounds must be a multiple of {each}, --seeds at least 1")
    if options.one:
        run_kept(options, options.conditions[0])
        return
    told_of: list[Told] = []
    on_record = recorded(options.recorded) if options.recorded else None
    for condition in options.conditions if on_record is None else on_record:
        results = run_all(options, condition) if on_record is None else on_record[condition]
        if "levels" in CONDITIONS[condition]:
            print(f"\n{race(condition, results)}\n", flush=True)
            continue
        print(f"\n{table(condition, results)}\n", flush=True)
        told_of += expectations(results)
    if not told_of:
        return
    print(expected_table(told_of))
    options.out.mkdir(parents=True, exist_ok=True)
    plot(told_of, options.out / "expected.png")
    print(f"plot: {options.out / 'expected.png'}")


if __name__ == "__main__":
    main()
