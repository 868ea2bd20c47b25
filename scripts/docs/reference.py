"""The reference of commands and of settings, as Markdown, from the code that reads them.

    python scripts/docs/reference.py {commands,losses,settings,template}

`make docs` puts each text into the page that has the line `<!-- generated: NAME -->`.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from coordinator.cli import parser as coordinator_parser
from coordinator.files import fleet, plan_file
from coordinator.model.activation import Settings
from coordinator.model.capacity import Run, Worker
from coordinator.model.pacing import PacingRules
from coordinator.model.ranges import MBIT
from node.cli import _parser as node_parser
from node.commands.environment_template import template
from node.config.node import NodeConfig
from node.config.run import (
    AnswerRules,
    CommonRules,
    EnvironmentAnswers,
    EnvironmentSpec,
    Example,
    HeldOutRules,
    LearnerRules,
    RunConfig,
    RunLimits,
    SamplingRules,
    TrainingRules,
)
from node.methods.method import Family
from node.methods.registry import families

USAGE_COLUMNS: Final = 96
SETTING_COMMANDS: Final = ("swarm-node join", "swarm-node learn")
PARSERS: Final[Mapping[str, Callable[[], argparse.ArgumentParser]]] = {
    "swarm-node": node_parser,
    "swarm-coordinator": coordinator_parser,
}

Model = type[Any]  # a pydantic model or a dataclass

RUN_TABLES: Final[Mapping[str, Model]] = {
    "The top of the file": RunConfig,
    "`[[environments]]`": EnvironmentSpec,
    "`[sampling]`": SamplingRules,
    "`[limits]`": RunLimits,
    "`[held_out]`": HeldOutRules,
    "`[answer]`": AnswerRules,
    "`answer` of an environment": EnvironmentAnswers,
    "Each of `examples`": Example,
    "`[common]`": CommonRules,
    "`[training]`": TrainingRules,
    "`[learner]`": LearnerRules,
}
FLEET_TABLES: Final[Mapping[str, Model]] = {
    "Fleet: `[learner]`": fleet.LearnerCosts,
    "Fleet: `[settings]`": Settings,
    "Fleet: `[pacing]`": PacingRules,
    "Fleet: `[[workers]]`": fleet.Machine,
    "Fleet: `[workers.cloud]`": fleet.Cloud,
}
PLAN_TABLES: Final[Mapping[str, Model]] = {
    "Plan: `[run]`": Run,
    "Plan: `[settings]`": Settings,
    "Plan: `[[workers]]`": Worker,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, in words."""

    name: str
    kind: str
    default: str
    meaning: str


@functools.cache
def meanings(model: Model) -> Mapping[str, str]:
    """What stands below each field of a class, by the field's name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def settings_of(model: Model) -> list[Setting]:
    """All settings of a model, in the order of its fields."""
    told = meanings(model)
    if issubclass(model, BaseModel):
        return [
            Setting(
                name,
                _AS_WRITTEN.get(name) or kind_of(field.annotation) + _bounds(tuple(field.metadata)),
                default_of(field.default),
                told.get(name, ""),
            )
            for name, field in model.model_fields.items()
        ]
    return [_of_dataclass(model, field, told) for field in dataclasses.fields(model)]


def _of_dataclass(model: Model, field: dataclasses.Field[Any], told: Mapping[str, str]) -> Setting:
    annotation, default = get_type_hints(model, include_extras=True)[field.name], field.default
    aliases = [getattr(each, "alias", None) for each in getattr(annotation, "__metadata__", ())]
    name = next((each for each in aliases if each), field.name)
    kind = kind_of(annotation)
    if name != field.name:
        kind += ", Mbit/s"
        default = default if default is dataclasses.MISSING else default / MBIT
    return Setting(name, kind, default_of(default), told.get(field.name, ""))


_AS_WRITTEN: Final = {"parameters": "table"}  # a file has it so; it is kept as text
_SIMPLE: Final = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
}


def kind_of(annotation: Any) -> str:
    """A type in words, with its bounds."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(inner[0]) + _bounds(inner[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(each) for each in inner if each is not type(None))
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in inner)
    if origin is tuple:
        of = "pairs" if get_origin(inner[0]) is tuple else f"{kind_of(inner[0])}s"
        return f"list of {of}"
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    return "table"


def _bounds(metadata: tuple[Any, ...]) -> str:
    flat = [each for entry in metadata for each in (getattr(entry, "metadata", None) or [entry])]
    found = {
        bound: _number(value)
        for bound in ("ge", "gt", "le", "lt")
        for each in flat
        if (value := getattr(each, bound, None)) is not None
    }
    if found.keys() == {"ge", "le"}:
        return f" from {found['ge']} to {found['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return "".join(f", {words[bound]} {value}" for bound, value in found.items())


def _number(value: float) -> str:
    if value != int(value):
        return f"{value:g}"
    whole = int(value)
    is_power = whole > 2**40 and whole & (whole - 1) == 0
    return f"2^{whole.bit_length() - 1}" if is_power else f"{whole:_}"


def default_of(value: Any) -> str:
    """A default as a file would say it."""
    if value in (PydanticUndefined, dataclasses.MISSING):
        return "required"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, tuple):
        return ", ".join(f"`{each}`" for each in value) or "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value}`" if str(value) else "none"


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Every command without further ones below it: its full name, parser, and one line of help."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        told = {each.dest: each.help or "" for each in action._choices_actions}
        for name, command in action.choices.items():
            below = list(commands(command))
            yield from below or [(command.prog, command, told.get(name, ""))]


def commands_page() -> str:
    """Every command of both programs."""
    parts = []
    for program, make in PARSERS.items():
        parts.append(f"## {program}\n\n{make().description}\n")
        parts += [_command(*each) for each in commands(make())]
    return "\n".join(parts)


def _command(name: str, parser: argparse.ArgumentParser, told: str) -> str:
    parser.formatter_class = functools.partial(  # type: ignore[assignment]
        argparse.HelpFormatter, width=USAGE_COLUMNS
    )
    usage = parser.format_usage().replace("\n       ", "\n").removeprefix("usage: ").rstrip()
    takes_settings = name in SETTING_COMMANDS
    rows = [
        (_flags(action), meaning_of(action, takes_settings=takes_settings))
        for action in parser._actions
        if action.dest != "help"
    ]
    lines = [f"### {name}", "", f"{told[:1].upper()}{told[1:]}.", "", "```text", usage, "```", ""]
    if parser.description:
        lines += [parser.description, ""]
    return "\n".join([*lines, _table(("Argument", "Meaning"), rows)])


def _flags(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{f' {value}' if action.nargs != 0 else ''}`"


def meaning_of(action: argparse.Action, *, takes_settings: bool = False) -> str:
    """What an argument says of itself, or what the setting does that it gives.

    Args:
        takes_settings: each flag gives the setting of its name; what turns one off says so itself.
    """
    setting = meanings(NodeConfig).get(action.dest, "") if action.dest != "run" else ""
    told = str(action.help or "")
    is_off = action.option_strings and action.option_strings[0].startswith("--no-")
    return setting or told if takes_settings and not is_off else told or setting


def flags_by_setting() -> Mapping[str, str]:
    """The flags of `join` and `learn` that give a setting of a node."""
    found: dict[str, dict[str, None]] = {}
    for name, parser, _ in commands(node_parser()):
        if name in SETTING_COMMANDS:
            for action in parser._actions:
                found.setdefault(action.dest, {}).update(dict.fromkeys(action.option_strings))
    return {dest: ", ".join(f"`{flag}`" for flag in flags) for dest, flags in found.items()}


def settings_page() -> str:
    """Every setting of a node, a run file, a fleet file and a plan file."""
    flags = flags_by_setting()
    node = [
        (f"`{each.name}`", flags.get(each.name, ""), each.kind, each.default, each.meaning)
        for each in settings_of(NodeConfig)
        if each.name != "run"
    ]
    parts = ["## A node: `[node]`\n"]
    parts += [_table(("Setting", "Flag", "Type", "Default", "Meaning"), node)]
    parts += ["## A run file\n", *_tables(RUN_TABLES)]
    parts += ["## A fleet file\n", _example("serve", fleet.EXAMPLE)]
    parts += ["`run` and `peers` stand at the top.\n", *_tables(FLEET_TABLES)]
    parts += ["## A plan file\n", _example("plan", plan_file.EXAMPLE), *_tables(PLAN_TABLES)]
    return "\n".join(parts)


def _example(command: str, text: str) -> str:
    return f"`swarm-coordinator {command} --example` prints:\n\n```toml\n{text.rstrip()}\n```\n"


def _tables(models: Mapping[str, Model]) -> Iterator[str]:
    for title, model in models.items():
        yield f"### {title}\n"
        rows = [(f"`{s.name}`", s.kind, s.default, s.meaning) for s in settings_of(model)]
        if title.endswith("`[[workers]]`"):
            rows.append(("`count`", "whole number, at least 1", "`1`", "How many of these."))
        yield _table(("Setting", "Type", "Default", "Meaning"), rows)


def methods_page(*wanted: Family, used: bool | None = None) -> str:
    """Every method of some families with the defaults of its parameters. `used`: those alone that
    some loop uses, or none does."""
    rows = [
        (
            f"`{each.name}`",
            each.about,
            ", ".join(f"`{name}` {value}" for name, value in each.defaults.items()) or "–",
            each.source,
        )
        for family in wanted
        for each in families()[family]
        if used is None or bool(each.used_by) is used
    ]
    return _table(("Method", "What it is", "Parameters", "Source"), rows)


def template_page() -> str:
    """The module that a new environment begins with."""
    return f"```python\n{template('my_puzzles')['my_puzzles.py']}```\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    cells = ([each.replace("|", "\\|").replace("\n", " ") for each in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    "commands": commands_page,
    "losses": partial(methods_page, "loss"),
    "advantages": partial(methods_page, "advantage"),
    "corrections": partial(methods_page, "correction"),
    "controls": partial(methods_page, "control", used=True),
    "generates": partial(methods_page, "generate", used=True),
    "draws": partial(methods_page, "draw", "external_rule", used=True),
    "replays": partial(methods_page, "replay", used=True),
    "functions": partial(methods_page, "control", "filter", "replay", "generate", used=False),
    "rewards": partial(methods_page, "reward"),
    "settings": settings_page,
    "template": template_page,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print a generated part of the documentation.")
    parser.add_argument("part", choices=sorted(GENERATED))
    sys.stdout.write(GENERATED[parser.parse_args().part]())
