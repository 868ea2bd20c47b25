"""The reference of commands, settings and methods, as Markdown, from the code that reads them.

    python scripts/docs/reference.py

This writes docs/commands.md and docs/settings.md below the line `MARK`. `make docs` puts each other
text into the page that has the line `<!-- generated: NAME -->`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import BaseModel

from coordinator import fleet_file as fleet
from coordinator import plan_file
from coordinator.cli import parser as coordinator_parser
from coordinator.model.activation import Settings
from coordinator.model.capacity import MBIT, Run, Worker
from coordinator.model.pacing import PacingRules
from node.cli import whole_parser as node_parser
from node.commands.arguments import Parser
from node.commands.environments import template
from node.config.described import Setting, default_of, groups_of, kind_of, meanings, settings_of
from node.config.node import NodeConfig
from node.config.run import (
    AnswerRules,
    ChatRules,
    CommonRules,
    EnvironmentAnswers,
    EnvironmentSpec,
    Example,
    HeldOutRules,
    LearnerRules,
    RunConfig,
    RunLimits,
    SamplingRules,
    ThinkingRules,
    TrainingRules,
)
from node.methods.method import Family
from node.methods.registry import families

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
MARK: Final = "<!-- below: written by scripts/docs/reference.py -->"
HEAD: Final = ("Setting", "Type", "Default", "Meaning")
PARSERS: Final[Mapping[str, Callable[[], argparse.ArgumentParser]]] = {
    "swarm-node": node_parser,
    "swarm-coordinator": coordinator_parser,
}

Model = type[Any]  # a pydantic model or a dataclass

RUN_TABLES: Final[Mapping[str, Model]] = {
    "The top of the file": RunConfig,
    "`[[environments]]`": EnvironmentSpec,
    "`[sampling]`": SamplingRules,
    "`[chat]`": ChatRules,
    "`[thinking]`": ThinkingRules,
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


def all_settings_of(model: Model) -> list[Setting]:
    """All settings of a pydantic model or of a dataclass, in the order of its fields."""
    if issubclass(model, BaseModel):
        return list(settings_of(model).values())
    return [_of_dataclass(model, field) for field in dataclasses.fields(model)]


def _of_dataclass(model: Model, field: dataclasses.Field[Any]) -> Setting:
    annotation, default = get_type_hints(model, include_extras=True)[field.name], field.default
    aliases = [getattr(each, "alias", None) for each in getattr(annotation, "__metadata__", ())]
    name = next((each for each in aliases if each), field.name)
    kind = kind_of(annotation)
    if name != field.name:
        kind += ", Mbit/s"
        default = default if default is dataclasses.MISSING else default / MBIT
    told = "required" if default is dataclasses.MISSING else default_of(default)
    return Setting(name, kind, told, meanings(model).get(field.name, ""))


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
    settings = {}
    if isinstance(parser, Parser):
        parser.help_text(whole=True)
        settings = parser.settings
    own = [
        (_flags(action), str(action.help or "").replace("%%", "%"))
        for action in parser._actions
        if action.dest not in {"help", *settings}
    ]
    lines = [f"### {name}", "", f"{told[:1].upper()}{told[1:]}.", ""]
    if parser.description:
        lines += [parser.description, ""]
    if len(settings) == len(NodeConfig.model_fields):
        lines += ["Takes every [setting](settings.md) of a node as a flag.", ""]
    elif settings:
        flags = ", ".join(f"`{each.option}`" for each in settings.values())
        lines += [f"Takes the [settings](settings.md) {flags}.", ""]
    return "\n".join([*lines, _table(("Argument", "Meaning"), own)] if own else lines)


def _flags(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if not action.option_strings:
        return f"`{value}`"
    return f"`{', '.join(action.option_strings)}{f' {value}' if action.nargs != 0 else ''}`"


def settings_page() -> str:
    """Every setting of a node, a run file, a fleet file and a plan file."""
    parts = ["## A node: `[node]`\n"]
    for title, settings in groups_of(NodeConfig):
        rows = [(_names(each), *_cells(each)) for each in settings if each.name != "run"]
        parts += [f"### {title}\n", _table(HEAD, rows)]
    parts += ["## A run file\n", *_tables(RUN_TABLES)]
    parts += ["## A fleet file\n", _example("serve", fleet.EXAMPLE)]
    parts += ["`run` and `peers` stand at the top.\n", *_tables(FLEET_TABLES)]
    parts += ["## A plan file\n", _example("plan", plan_file.EXAMPLE), *_tables(PLAN_TABLES)]
    return "\n".join(parts)


def _names(setting: Setting) -> str:
    """The setting, and its flag where that has another name."""
    is_alike = setting.option == f"--{setting.name.replace('_', '-')}"
    return f"`{setting.name}`" + ("" if is_alike else f" (`{setting.option}`)")


def _cells(setting: Setting) -> tuple[str, str, str]:
    default = setting.default
    words = ("required", "none", "its defaults")
    return setting.kind, default if default in words else f"`{default}`", setting.meaning


def _example(command: str, text: str) -> str:
    return f"`swarm-coordinator {command} --example` prints:\n\n```toml\n{text.rstrip()}\n```\n"


def _tables(models: Mapping[str, Model]) -> Iterator[str]:
    for title, model in models.items():
        yield f"### {title}\n"
        rows = [(f"`{each.name}`", *_cells(each)) for each in all_settings_of(model)]
        if title.endswith("`[[workers]]`"):
            rows.append(("`count`", "whole number, at least 1", "`1`", "How many of these."))
        yield _table(HEAD, rows)


def methods_page(*wanted: Family) -> str:
    """Every method of some families with the defaults of its parameters."""
    rows = [
        (
            f"`{each.name}`",
            each.about,
            ", ".join(f"`{name}` {value}" for name, value in each.defaults.items()) or "–",
            each.source,
        )
        for family in wanted
        for each in families()[family]
    ]
    return _table(("Method", "What it is", "Parameters", "Source"), rows)


def template_page() -> str:
    """The module that a new environment begins with."""
    return f"```python\n{template('my_puzzles')['my_puzzles.py']}```\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    cells = ([each.replace("|", "\\|").replace("\n", " ") for each in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "commands": commands_page,
    "settings": settings_page,
}
GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    "losses": partial(methods_page, "loss"),
    "advantages": partial(methods_page, "advantage"),
    "corrections": partial(methods_page, "correction"),
    "controls": partial(methods_page, "control"),
    "generates": partial(methods_page, "generate"),
    "draws": partial(methods_page, "draw", "external_rule"),
    "replays": partial(methods_page, "replay"),
    "filters": partial(methods_page, "filter"),
    "preferences": partial(methods_page, "preference"),
    "rewards": partial(methods_page, "reward"),
    "template": template_page,
}


def page(name: str) -> str:
    """The whole text that docs/NAME.md should have."""
    path = DOCS / f"{name}.md"
    return f"{path.read_text().partition(MARK)[0]}{MARK}\n\n{PAGES[name]()}"


def main() -> None:
    """Write the pages that are in the tree."""
    for name in PAGES:
        (DOCS / f"{name}.md").write_text(page(name))


if __name__ == "__main__":
    main()
