"""Kinds of `experiment_policies.py` that `methods_plan.toml` fixed before the runs: where their
nodes begin, and the table."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from measuring import told, train_swarm, value_at
from on_record import CODE, files_of, key_of

HERE: Final = Path(__file__).parent
PLAN: Final[dict[str, Any]] = tomllib.loads((HERE / "methods_plan.toml").read_text())
SAMPLES: Final[int] = PLAN["samples"]
CHANCES: Final = f"pass@{SAMPLES}"
FIGURES: Final = {  # of a task: its greedy answer, and how many samples pass
    "greedy": lambda right, passed: right,
    "sampled": lambda right, passed: passed / SAMPLES,
    CHANCES: lambda right, passed: passed > 0,
}


def _whole(kind: Mapping[str, Any]) -> dict[str, Any]:
    """A kind with what it takes from the one that `as` names."""
    return {**(_whole(PLAN["kinds"][kind["as"]]) if "as" in kind else {}), **kind}


KINDS: Final = {name: _whole(kind) for name, kind in PLAN["kinds"].items()}


def settings_of(kind: str, arm: str) -> dict[str, Any]:
    """The settings of an arm's nodes."""
    settings = {**KINDS[kind]["settings"], **KINDS[kind]["arms"][arm]}
    return {name: value for name, value in settings.items() if name != "nodes"}


# --- where nodes begin ----------------------------------------------------------------------


def models_of(kind: str, arm: str, out: Path) -> list[str]:
    """The model directory of each node of an arm, made where it is not there yet."""
    names = KINDS[kind]["arms"][arm].get("nodes") or KINDS[kind]["nodes"]
    return [_policy(kind, name, out) for name in names]


def _policy(kind: str, name: str, out: Path) -> str:
    from node.config import load_config
    from node.hosting.models import resolve_model

    run, rounds = HERE / KINDS[kind]["run"], PLAN["more_rounds"]
    settings = KINDS[kind]["settings"] | {"local_groups": 8, "external_groups": 0, "share": "none"}
    settings |= {"rounds": rounds, "evaluate_every_rounds": rounds, "validation_tasks": 0}
    if name == "tiny":
        settings["model"] = name
    config = load_config({"threads": 1, **settings, "seed": 0}, os.environ, run)
    plain = resolve_model(config, lambda line: print(line, file=sys.stderr))
    if name in ("plain", "tiny"):
        return plain
    facts = {"name": name, "of": files_of(Path(plain)), "run": config.run.run_id}
    facts |= {"settings": settings, "answers": PLAN["answers"]}
    key = key_of(facts, *CODE, "scripts/experiments/planned.py")
    directory = out.absolute() / "policies" / f"{name.replace(' ', '-')}-{key}"
    if not directory.exists():
        unfinished = directory.with_suffix(".partial")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        _MAKERS[name](config, run, plain, unfinished)
        unfinished.rename(directory)
    return str(directory)


def _trained(config: Any, run: Path, plain: str, directory: Path) -> None:
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


def _other_tokenizer(config: Any, run: Path, plain: str, directory: Path) -> None:
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


def _supervised(config: Any, run: Path, plain: str, directory: Path) -> None:
    """The policy after `swarm-node sft` on worked answers, none to a held-out task."""
    from node.hosting.models import warm_up_pairs
    from node.verify.warm_up import asked_of

    data = directory.with_suffix(".jsonl")
    with data.open("w") as file:
        for said, answer in islice(warm_up_pairs(asked_of(config)), PLAN["answers"]):
            question = said.removeprefix(config.run.answer.system).lstrip()
            print(json.dumps({"question": question, "answer": answer}), file=file)
    command = [sys.executable, "-m", "node.cli", "sft", data, "--run", run, "--model", plain]
    command += ["--out", directory, "--epochs", "1", "--threads", str(config.threads)]
    subprocess.run([*map(str, command)], check=True, cwd=HERE.parents[1])


_MAKERS: Final = {
    "trained": _trained,
    "another tokenizer": _other_tokenizer,
    "supervised": _supervised,
}


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
    (first, others), count = next(iter(by_arm.items())), KINDS[kind]["comparisons"]
    pairs = [(axis, figure) for axis in KINDS[kind]["axes"] for figure in FIGURES]
    heads = ["arm", "greedy at the start", *(f"{figure} at the end" for figure in FIGURES)]
    heads += ["greedy by node", *KINDS[kind]["axes"], "acted in a run"]
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
        cells.append(" / ".join(f"{value:.1f}" for value in _by_node(mine)))
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


def _by_node(results: Sequence[Mapping[str, Any]]) -> list[float]:
    """Greedy answers of each node at the end, in percent."""
    of_node: dict[int, list[bool]] = {}
    for result in results:
        last = max(point["round"] for point in result["points"])
        for point in (each for each in result["points"] if each["round"] == last):
            of_node.setdefault(point["node"], []).extend(right for right, _ in point["tasks"])
    return [100 * fmean(of_node[node]) for node in sorted(of_node)]
