"""`swarm-node methods`: the methods of losses, advantages and other choices, by name."""

import argparse
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from node.commands.arguments import add_command, say
from node.methods.method import Family, KnownMethod
from swarm.command import EXIT_FAILED, EXIT_OK
from swarm.errors import ConfigError

Say = Callable[[str], None]


def add_methods(commands: Any) -> None:
    methods = add_command(commands, "methods", _run, "losses, advantages and others, by name")
    methods.add_argument("name", nargs="?", metavar="NAME", help="one of them, or `check`")
    methods.add_argument(
        "--literature",
        action="store_true",
        help="by which systems they are, and what is left out",
    )
    methods.add_argument(
        "words", nargs="*", metavar="METHOD", help="after `check`: the method, and its settings"
    )
    methods.add_argument("--family", choices=get_args(Family), help="of the method to check")
    methods.add_argument("--run", metavar="FILE", help="which of them a node of that run may use")
    methods.add_argument("--engine", help="of that node: torch (default), vllm or openai")


def _run(options: argparse.Namespace) -> int:
    if options.name == "check" and options.words:
        from node.commands.methods_check import check_method

        is_good = check_method(" ".join(options.words), options.family, say)
        return EXIT_OK if is_good else EXIT_FAILED
    if options.words:
        raise ConfigError(f"method {options.name}: give one name, or `check` and a method")
    if options.literature:
        list_literature(say)
    elif options.run is not None or options.engine is not None:
        if options.name is not None:
            raise ConfigError(f"method {options.name}: --run is for all; leave the name out")
        given = {} if options.engine is None else {"engine": options.engine}
        list_usable(say, given, os.environ, options.run and Path(options.run))
    elif options.name is None:
        list_methods(say)
    else:
        show_method(options.name, say)
    return EXIT_OK


def list_methods(say: Say) -> None:
    """Say all methods by family, and those that packages add."""
    from node.methods.own import added
    from node.methods.registry import families

    for family, methods in families().items():
        say(f"{family}, by --{family.replace('_', '-')} NAME:")
        width = max(len(each.name) for each in methods)
        for each in methods:
            say(f"  {each.name:<{width}}  {each.about}")
    for name, point in added().items():
        say(f"plug-in {name}: {point.value}, of {point.dist.name if point.dist else 'no package'}")
    say("swarm-node methods NAME says what one is, needs and is set to")


def list_usable(
    say: Say, given: Mapping[str, Any], environ: Mapping[str, str], run_file: Path | None
) -> None:
    """Say which methods a node with these settings may use, and why it refuses the others."""
    from node.config import load_config
    from node.hosting.models import trainer_spec
    from node.methods.registry import families
    from node.stages.table import refuse_of_others

    config = load_config(given, environ, run_file)
    said = f"run {config.run.name}, engine {config.engine}"
    for family, methods in families().items():
        usable, refused = [], []
        for each in methods:
            try:
                own = load_config({**given, family: each.name}, environ, run_file)
                trainer_spec(own, own.model)
                refuse_of_others(own, "node")
            except ConfigError as error:
                refused.append(f"  not {each.name}: {error}")
            else:
                usable.append(each.name)
        if usable or refused:
            say(f"{family}, {said}: {', '.join(usable) or 'none'}")
            for line in refused:
                say(line)
    if config.external_groups and config.foreign_weighting == "auto":
        say(
            "groups of nodes with another tokenizer bring no log-probs: losses other than sapo "
            "train on some of them as on the node's own, and corrections leave their weight at 1"
        )


def list_literature(say: Say) -> None:
    """Say which functions implement each published system and who uses them, or why it is
    absent."""
    from node.methods.registry import LITERATURE, METHODS

    known = {each.name: each for each in METHODS}
    for row in LITERATURE:
        parts = [row.where] if row.where else []
        parts += [_in_the_tree(known[name]) for name in row.methods]
        said = "; ".join(parts) or f"left out: {row.why_not}"
        say(f"{row.name} ({row.source}): {said}")


def _in_the_tree(each: KnownMethod) -> str:
    """A method's stage, function, engines, roles, and tests of the function and in the loop."""
    from node.config.node import ENGINE_GIVES, ENGINE_NEEDS

    needs = each.needs & ENGINE_NEEDS
    engines = ", ".join(name for name, gives in ENGINE_GIVES.items() if needs <= gives)
    function = f"{each.function.__module__}.{each.function.__name__}"
    tests = f"{each.function_test}.py, {Path(each.loop_test).name}.py"
    roles = ", ".join(each.roles)
    return f"{each.name} ({each.family}; {function}; {engines}; {roles}; {tests})"


def show_method(name: str, say: Say) -> None:
    """Say what one method is, in each family that has one of this name."""
    from node.methods.own import is_own
    from node.methods.registry import METHODS, named

    if is_own(name):
        raise ConfigError(f"method {name}: is your own; swarm-node methods check {name}")
    found = named(name)
    if not found:
        near = difflib.get_close_matches(name, [each.name for each in METHODS], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"method {name}: no such method; {hint}swarm-node methods lists them")
    for each in found:
        source = f"arXiv {each.source}" if each.source[:1].isdigit() else each.source
        say(f"{each.family} {each.name} ({source})")
        say(f"  {each.about}")
        for parameter, value in each.defaults.items():
            say(f"  {parameter} = {value}")
        say(f"  needs: {', '.join(sorted(each.needs)) or 'rewards alone'}")
        say(f"  used by: {', '.join(each.roles)}")
        say(f"  measured: {each.measured or 'not yet'}")
        first = next((f", {name}={value}" for name, value in each.defaults.items()), "")
        command = "join" if "node" in each.roles else "learn"
        say(f"  swarm-node {command} --{each.family.replace('_', '-')} '{each.name}{first}'")
