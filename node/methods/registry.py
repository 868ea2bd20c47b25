"""The methods that there are, by family and name: `registry.toml` and their code."""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from node.methods.choices import KNOWN
from node.methods.importance_weights import IMPORTANCE_WEIGHTS
from node.methods.losses import OBJECTIVES, preferred, taught
from node.methods.method import Family, KnownMethod, MethodSettings

_TABLE: Final = tomllib.loads(
    files("node.methods").joinpath("registry.toml").read_text(encoding="utf-8")
)
_FUNCTIONS: Final = {"need": "by_need", "distil": "distil_weight"}
"""Those that have another name than their method. Each stands beside its settings."""


@dataclass(frozen=True, slots=True)
class LiteratureRow:
    """One system. `methods`: names in `registry.METHODS`; `where`: another part that serves it;
    `why_not`: it is left out."""

    name: str
    source: str
    methods: tuple[str, ...] = ()
    where: str = ""
    why_not: str = ""


def _function(family: Family, parameters: type[MethodSettings]) -> Callable[..., Any]:
    kind = parameters.kind
    if family == "loss":
        return OBJECTIVES[kind].losses
    if family == "correction":
        return IMPORTANCE_WEIGHTS[kind]
    if family == "preference":
        return preferred
    if kind == "teacher":
        return taught
    name = _FUNCTIONS.get(kind, kind)
    return vars(sys.modules[parameters.__module__])[name]  # type: ignore[no-any-return]


def _methods() -> Iterator[KnownMethod]:
    for family in sorted(KNOWN, key=list(_TABLE).index):
        rows = _TABLE[family]
        tests = {"function_test": rows["function_test"], "loop_test": rows["loop_test"]}
        for name, parameters in KNOWN[family].items():
            function = _function(family, parameters)
            yield KnownMethod(parameters, function, family, **{**tests, **rows[name]})


METHODS: Final = tuple(_methods())
LITERATURE: Final = tuple(
    LiteratureRow(name, **{**row, "methods": tuple(row.get("methods", ()))})
    for name, row in _TABLE["literature"].items()
)
"""Systems on rollouts, each with its place in the tree, or the reason that it is absent."""


def families() -> dict[Family, list[KnownMethod]]:
    """Methods by family, in their order."""
    found: dict[Family, list[KnownMethod]] = {}
    for each in METHODS:
        found.setdefault(each.family, []).append(each)
    return found


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower().replace("+", "p"))


def named(name: str) -> list[KnownMethod]:
    """The methods of a name, or else of an arXiv number or a system, such as `dr.grpo` or
    `vcrl`."""
    if exact := [each for each in METHODS if each.name == name]:
        return exact
    plain, of_system = _plain(name), set[str]()
    for row in LITERATURE:
        if name == row.source or plain in map(_plain, row.name.split(", ")):
            of_system.update(row.methods)
    return [
        each
        for each in METHODS
        if plain == _plain(each.name) or name in each.source.split() or each.name in of_system
    ]
