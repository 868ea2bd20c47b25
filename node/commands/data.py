"""`swarm-node data`: check a file of questions and answers before a run uses it."""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from node.commands.arguments import add_command, say
from swarm.errors import ConfigError

REFUSED_SHOWN_MAX: Final = 5
COLUMNS: Final = ("question", "answer", "choices", "rule")
SETTINGS: Final = ("tolerance", "relative_tolerance", "ignore_case")


def add_data(commands: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        given = {name: getattr(options, name) for name in (*COLUMNS, "scorer", *SETTINGS)}
        for line in check_file(
            Path(options.file), {k: v for k, v in given.items() if v is not None}
        ):
            say(line)

    data = commands.add_parser("data", help="questions and answers of your own")
    actions = data.add_subparsers(required=True, metavar="ACTION")
    told = "what a file would be as a run's items; keeps nothing"
    check = add_command(actions, "check", run, told)
    check.add_argument("file", metavar="FILE", help="JSON lines, Parquet, or a saved dataset")
    for column in COLUMNS:
        check.add_argument(
            f"--{column}", metavar="COLUMN", help=f"its name in the file; default: {column}"
        )
    check.add_argument("--scorer", metavar="NAME", help="exact (default), numeric, choice, math...")
    check.add_argument("--tolerance", type=float, metavar="X", help="of numeric: absolute")
    check.add_argument("--relative-tolerance", type=float, metavar="X", help="of numeric")
    check.add_argument("--ignore-case", action="store_true", default=None, help="of exact")


def check_file(path: Path, parameters: dict[str, Any]) -> Iterator[str]:
    """Describe a file as a run's items, with its table for a run file. Refuses wrong own
    answers."""
    from node.envs.data import items as store
    from node.envs.data.dataset import DataRules, prompt_of
    from node.envs.data.items import Items
    from node.envs.data.readers import read_rows
    from node.observe.text_format import amount

    rules = DataRules.of(parameters)
    content = rules.content(read_rows(path, rules.columns), path.name)
    items = Items(content.data)
    rules.judge.prepare()
    lengths: list[int] = []
    seen: Counter[str] = Counter()
    refused: list[int] = []
    for place in range(len(items)):
        item = rules.columns.item(items.row(place))
        seen[item["question"]] += 1
        lengths.append(len(prompt_of(item)))
        if rules.judge.score(item, rules.judge.own_answer(item)) != 1.0:
            refused.append(place + 1)
    lengths.sort()
    middle = lengths[len(lengths) // 2]
    yield f"{content.items} items, {amount(len(content.data), 'B')}, {store.sha256_of(content)}"
    yield f"prompts: {lengths[0]} to {lengths[-1]} characters, half of them at most {middle}"
    yield f"questions that come more than once: {sum(count > 1 for count in seen.values())}"
    passed = content.items - len(refused)
    yield f"own answers that pass the scorer {rules.scorer}: {passed} of {content.items}"
    if refused:
        shown = ", ".join(map(str, refused[:REFUSED_SHOWN_MAX]))
        raise ConfigError(f"{path}: the own answers of items {shown} do not pass; correct them")
    yield ""
    yield from _table(path, parameters)


def _table(path: Path, parameters: dict[str, Any]) -> Iterator[str]:
    from node.envs.data.items import canonical_json

    yield "[[environments]]"
    yield 'name = "dataset"'
    yield "[environments.parameters]"
    for name, value in {"path": str(path.absolute()), **parameters}.items():
        yield f"{name} = {canonical_json(value)}"
