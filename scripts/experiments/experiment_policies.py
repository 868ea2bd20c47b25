"""Comparisons of methods and of starting policies: kinds and arms of `methods_plan.toml`.

    python experiment_policies.py methods                        # resumable
    python experiment_policies.py methods --arms default cdas    # each is compared to the first
    python experiment_policies.py peers --seeds 3 --parallel 2

Production nodes run in one process, on the in-memory network under a virtual clock. At each
evaluation every policy answers the held-out tasks greedily and in some samples. Arms are compared
in pairs of one seed, where the one of the pair that used less ends: at equal generated tokens of a
node, and for one node alone also at equal seconds. Intervals are Student's t over seeds at 95 %.

A result is kept under a key of settings, policies, code, packages and processor, and is not made
again. Arms that settings do not allow are named and left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from measuring import examine_swarm, told, train_swarm, value_at
from on_record import CODE, files_of, kept, key_of, run_missing

from node.methods.choices import KNOWN

HERE: Final = Path(__file__).parent
MEASURED_BY: Final = (*CODE, "scripts/experiments/measuring.py")
PLAN: Final[dict[str, Any]] = tomllib.loads((HERE / "methods_plan.toml").read_text())
SAMPLES: Final[int] = PLAN["samples"]
FIGURES: Final = {  # of a task: its greedy answer, and how many samples pass
    "greedy": lambda right, passed: right,
    "sampled": lambda right, passed: passed / SAMPLES,
    f"pass@{SAMPLES}": lambda right, passed: passed > 0,
}


def _whole(kind: Mapping[str, Any]) -> dict[str, Any]:
    """A kind with what it takes from the one that `as` names, or from all methods of a family."""
    whole = {**(_whole(PLAN["kinds"][kind["as"]]) if "as" in kind else PLAN["usual"]), **kind}
    if family := whole.get("each_of"):
        whole["arms"] = {**whole["arms"], **{name: {family: name} for name in KNOWN[family]}}
    return whole


KINDS: Final = {name: _whole(kind) for name, kind in PLAN["kinds"].items()}


def load(kind: str, **settings: Any) -> Any:
    """The settings of a kind's nodes, and these."""
    from node.config import load_config

    file = HERE / f"{KINDS[kind]['run']}.toml"
    run = file if file.exists() else Path(KINDS[kind]["run"])
    return load_config({**PLAN["settings"], **KINDS[kind]["settings"], **settings}, os.environ, run)


def config_of(kind: str, arm: str, seed: int, rounds: int) -> Any:
    """The settings of each node of a run."""
    settings = {"rounds": rounds, "evaluate_every_rounds": KINDS[kind]["every"], "seed": seed}
    settings |= KINDS[kind]["arms"][arm]
    return load(kind, **{name: value for name, value in settings.items() if name != "nodes"})


# --- where nodes begin ----------------------------------------------------------------------


def models_of(kind: str, arm: str, out: Path) -> list[str]:
    """The model directory of each node of an arm, made where it is not there yet."""
    names = KINDS[kind]["arms"][arm].get("nodes") or KINDS[kind]["nodes"]
    return [_policy(kind, name, out) for name in names]


def _policy(kind: str, name: str, out: Path) -> str:
    from node.hosting.models import resolve_model

    rounds = PLAN["more_rounds"]
    settings = {"local_groups": 8, "external_groups": 0, "share": "none", "seed": 0}
    settings |= {"rounds": rounds, "evaluate_every_rounds": rounds}
    config = load(kind, **settings, **({"model": name} if name == "tiny" else {}))
    plain = resolve_model(config, lambda line: print(line, file=sys.stderr))
    if name in ("plain", "tiny"):
        return plain
    chosen = config.model_dump(mode="json", exclude={"cache_dir"})
    facts = {"name": name, "of": files_of(Path(plain)), "settings": chosen}
    facts |= {"run": config.run.run_id, "answers": PLAN["answers"]}
    key = key_of(facts, *CODE, "scripts/experiments/experiment_policies.py")
    directory = out.absolute() / "policies" / f"{name.replace(' ', '-')}-{key}"
    if not directory.exists():
        unfinished = directory.with_suffix(".partial")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        _MAKERS[name](config, plain, unfinished)
        unfinished.rename(directory)
    return str(directory)


def _trained(config: Any, plain: str, directory: Path) -> None:
    """The policy after more rounds alone."""
    import torch

    from swarm.simulation.world import deterministic_run

    torch.set_num_threads(config.threads)

    async def heard(simulated: Any, trainer: Any, record: Any) -> None:
        if type(record).__name__ == "HeldOut" and record.round == config.rounds:
            trainer.compute("export_whole", directory)

    async def train() -> None:
        await train_swarm(config, [plain], config.seed, heard)

    deterministic_run(train, seed=config.seed)


def _other_tokenizer(config: Any, plain: str, directory: Path) -> None:
    """A tiny policy for which ` 0` and ` 1` are tokens, in place of two bytes of no text."""
    from node.hosting.models import warm_up_pairs
    from node.policies import tiny
    from node.policies.presets import TinyRecipe
    from node.verify.warm_up import asked_of

    plain_tokenizer = tiny.byte_tokenizer
    tiny.byte_tokenizer = lambda: merging(plain_tokenizer())
    try:
        pairs = warm_up_pairs(asked_of(config))
        tiny.make_tiny(pairs, directory, lambda share, line: None, TinyRecipe(seed=1))
    finally:
        tiny.byte_tokenizer = plain_tokenizer


def merging(made: Any) -> Any:
    """The tokenizer of bytes, with two merges in place of bytes 254 and 255."""
    from tokenizers import models

    letters = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)[:256]
    space = made.tokenize(" ")[-1]
    for rare, digit in zip(("þ", "ÿ"), "01", strict=True):
        letters[letters.index(rare)] = space + digit
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges = [(space, digit) for digit in "01"]
    made.backend_tokenizer.model = models.BPE(vocab=vocab, merges=merges)
    return made


def _supervised(config: Any, plain: str, directory: Path) -> None:
    """The policy after `swarm-node sft` on worked answers, none to a held-out task."""
    from node.hosting.models import warm_up_pairs
    from node.verify.warm_up import asked_of

    data = directory.with_suffix(".jsonl")
    with data.open("w") as file:
        for said, answer in islice(warm_up_pairs(asked_of(config)), PLAN["answers"]):
            question = said.removeprefix(config.run.answer.system).lstrip()
            print(json.dumps({"question": question, "answer": answer}), file=file)
    command = [sys.executable, "-m", "node.cli", "sft", data, "--model", plain, "--out", directory]
    command += ["--system", config.run.answer.system, "--epochs", "1"]
    command += ["--threads", config.threads]
    subprocess.run([*map(str, command)], check=True, cwd=HERE.parents[1])


_MAKERS: Final = {
    "trained": _trained,
    "another tokenizer": _other_tokenizer,
    "supervised": _supervised,
}


# --- all runs -------------------------------------------------------------------------------


def run_one(kind: str, arm: str, seed: int, rounds: int, out: Path) -> dict[str, Any]:
    """Train one swarm."""
    import torch

    from swarm.simulation.world import deterministic_run

    config = config_of(kind, arm, seed, rounds)
    torch.set_num_threads(config.threads)
    swarm = partial(examine_swarm, config, models_of(kind, arm, out), seed, SAMPLES)
    facts = {"kind": kind, "arm": arm, "seed": seed}
    return facts | deterministic_run(swarm, seed=seed)


def facts_of(
    kind: str, arm: str, seed: int, rounds: int, policies: Sequence[str]
) -> dict[str, Any]:
    """The part of a result's key without code, packages and processor. `policies`: hashes of the
    nodes' models."""
    config = config_of(kind, arm, seed, rounds)
    settings = config.model_dump(mode="json", exclude={"cache_dir"})
    facts = {"settings": settings, "run": config.run.run_id, "samples": SAMPLES}
    return facts | {"policies": list(policies)}


def key(options: argparse.Namespace, arm: str, seed: int) -> str:
    """The key that a result is kept under."""
    models = models_of(options.kind, arm, options.out)
    policies = [files_of(Path(model)) for model in models]
    return key_of(facts_of(options.kind, arm, seed, options.rounds, policies), *MEASURED_BY)


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


def curve(result: Mapping[str, Any], axis: str, figure: str) -> list[tuple[float, float]]:
    """(tokens or seconds so far, percent right) at each evaluation; means over nodes."""
    found = []
    for at in sorted({point["round"] for point in result["points"]}):
        points = [point for point in result["points"] if point["round"] == at]
        right = [FIGURES[figure](*task) for point in points for task in point["tasks"]]
        found.append((fmean(point[axis] for point in points), 100 * fmean(right)))
    return found


def ahead(mine: Mapping[str, Any], first: Mapping[str, Any], axis: str, figure: str) -> float:
    """Points by which a result is ahead of another where the one that used less ends."""
    curves = [curve(each, axis, figure) for each in (mine, first)]
    where = min(each[-1][0] for each in curves)
    here, there = (value_at(each, where) for each in curves)
    return here - there


def table(kind: str, results: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """Results of each arm, and differences to the first one in pairs of one seed."""
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_arm.setdefault(result["arm"], []).append(result)
    first, others = next(iter(by_arm.items()))
    count = KINDS[kind].get("comparisons", len(KINDS[kind]["arms"]) - 1)
    pairs = [(axis, figure) for axis in KINDS[kind]["axes"] for figure in FIGURES]
    heads = ["arm", "greedy at the start", *(f"{figure} at the end" for figure in FIGURES)]
    heads += ["greedy by node", "deepest fall", *KINDS[kind]["axes"], "acted in a run"]
    heads += [f"{figure} less {first}, at equal {axis}" for axis, figure in pairs]
    heads += [f"PRIMARY, for {count} comparisons"]
    lines = [
        f"**{kind}**: {KINDS[kind]['says']}. {rounds} rounds, {len(others)} seeds, percent with "
        f"95 % intervals of one figure alone. PRIMARY: {PLAN['primary']}, with the interval for "
        "all comparisons together.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for arm, mine in by_arm.items():
        cells = [told([curve(each, "tokens", "greedy")[0][1] for each in mine])]
        cells += [told([curve(each, "tokens", name)[-1][1] for each in mine]) for name in FIGURES]
        nodes = [_by_node(each) for each in mine]
        of_seeds = zip(*([100 * node[-1] for node in each] for each in nodes), strict=True)
        cells.append(" / ".join(f"{fmean(each):.1f}" for each in of_seeds))
        cells.append(f"{100 * max(_fall(node) for each in nodes for node in each):.1f}")
        for axis in KINDS[kind]["axes"]:
            cells.append(f"{fmean(curve(each, axis, 'greedy')[-1][0] for each in mine):,.0f}")
        acted = {name for each in mine for name in each["acted"]}
        times = {name: fmean(each["acted"].get(name, 0) for each in mine) for name in acted}
        cells.append(", ".join(f"{name} {times[name]:.0f}" for name in sorted(times)))
        both = list(zip(mine, others, strict=True))
        found = [[ahead(*pair, *where) for pair in both] for where in pairs]
        differences = [told(each, sign="+") for each in found] + [told(found[0], count, "+")]
        cells += [""] * len(differences) if arm == first else differences
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_node(result: Mapping[str, Any]) -> list[list[float]]:
    """The share of right greedy answers at each evaluation, node by node."""
    found: dict[int, list[float]] = {}
    for point in sorted(result["points"], key=lambda point: (point["node"], point["round"])):
        right = fmean(greedy for greedy, _ in point["tasks"])
        found.setdefault(point["node"], []).append(right)
    return list(found.values())


def _fall(values: Sequence[float]) -> float:
    """The most by which a value is below the best one before."""
    return max(max(values[: at + 1]) - value for at, value in enumerate(values))


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rounds", type=int, help="default: as the plan says")
    parser.add_argument("--arms", nargs="+", help="these alone; default: all of the kind")
    parser.add_argument("--seeds", type=int, help="default: as the plan says")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("out/experiment_policies"))
    parser.add_argument("--one", help="run this arm alone, with --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", help="end if its result would be kept under another")
    options = parser.parse_args()
    kind = KINDS[options.kind]
    options.seeds = kind["seeds"] if options.seeds is None else options.seeds
    options.rounds = kind["rounds"] if options.rounds is None else options.rounds
    options.arms = options.arms or list(kind["arms"])
    if unknown := [arm for arm in options.arms if arm not in kind["arms"]]:
        parser.error(f"no arm {unknown[0]!r}: {', '.join(kind['arms'])}")
    if options.rounds % kind["every"] or options.rounds < 1 or options.seeds < 1:
        parser.error(f"--rounds must be a multiple of {kind['every']}, --seeds at least 1")
    if options.one:
        found = key(options, options.one, options.seed)
        if options.key not in (None, found):
            raise SystemExit(f"{options.one}: the code changed since this was begun")
        arguments = options.kind, options.one, options.seed, options.rounds, options.out
        kept(options.out, found, partial(run_one, *arguments))
        return
    text = table(options.kind, run_all(options), options.rounds)
    (options.out / f"{options.kind}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
