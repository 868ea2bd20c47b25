"""A metric's name is spelled once, in `metrics.toml`; all else asks `swarm.telemetry.metrics`."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from node.interfaces.trainer import TrainReport
from node.observe.records import StepDone
from swarm.telemetry import metrics as m
from swarm.telemetry.metrics import FIGURES, METRICS

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "coordinator")
SCHEMA = "swarm/telemetry/metrics.py"
DEALS_IN_REPORTS = re.compile(r"\b(import metrics as m|NodeReport|NodeView|Extras)\b")
OTHER_NAMES = {"swarm/telemetry/reports.py"}  # the report's own fields
COMPUTED = {
    "node/interfaces/trainer.py",
    "node/methods/losses.py",
    "node/train/trainer.py",
}
# Of a learner's steps the record, the report of a run, and what goes to a coordinator by wire.
STEPS = {
    "node/observe/records.py",
    "node/observe/figures.py",
    "node/run/learner.py",
    "node/observe/saved_report.py",
    "node/run/coordinator_client.py",
    "swarm/wire/messages.py",
    "coordinator/loop.py",
    "coordinator/model/pacing.py",
}


def modules() -> Iterator[tuple[str, str]]:
    """The product's modules but for the schema: path and source."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name != SCHEMA:
                yield name, path.read_text()


def spelled_metrics(source: str) -> list[str]:
    """Names of metrics that a module which makes or reads reports has as strings of its own.
    Elsewhere such a word may be the name of a setting or of a field."""
    if not DEALS_IN_REPORTS.search(source):
        return []
    return [
        f"{node.lineno}: {node.value}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in METRICS
    ]


def spelled_figures(source: str) -> set[str]:
    """Fields of `RoundFigures` of which the trainer tells that a module names."""
    known = FIGURES.keys() & {each.name for each in fields(TrainReport)}
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Name(id=name):
                found.add(name)
            case ast.Constant(value=str(name)):
                found.add(name)
    return found & known


def test_names_of_metrics_are_spelled_in_the_schema_alone() -> None:
    found = {path: spelled_metrics(source) for path, source in modules() if path not in OTHER_NAMES}
    assert {path: names for path, names in found.items() if names} == {}


def unknown_metrics(source: str) -> list[str]:
    """Names that a module asks `swarm.telemetry.metrics` for in vain: no type checker sees them."""
    asked = re.findall(r"\bm\.([A-Z_]+)\b", source) if "import metrics as m" in source else []
    return [name for name in asked if not hasattr(m, name)]


def test_only_metrics_that_there_are_are_asked_for() -> None:
    assert {path: names for path, text in modules() if (names := unknown_metrics(text))} == {}
    line = "from swarm.telemetry import metrics as m\nx = m.ROUND_S, m.ROUNDS_S"
    assert unknown_metrics(line) == ["ROUNDS_S"]


def test_figures_of_a_round_are_named_by_the_schema_and_by_what_computes_them() -> None:
    of_steps = {each.name for each in fields(StepDone)}
    wrong = {
        path: names
        for path, source in modules()
        if (names := spelled_figures(source) - (of_steps if path in STEPS else set()))
        and path not in COMPUTED
    }
    assert wrong == {}


def test_a_metric_that_is_spelled_again_is_found() -> None:
    line = 'report.metrics["round_s"]\n'
    assert spelled_metrics(f"from swarm.telemetry import metrics as m\n{line}") == ["2: round_s"]
    assert spelled_metrics("from swarm.telemetry.reports import NodeReport\nx = {'peers': 1.0}")
    assert not spelled_metrics(f"from swarm.telemetry import metrics as m\n{line[:14]}[m.ROUND_S]")
    assert not spelled_metrics("parser.add_argument('peers')")
    assert spelled_figures("a = s.mismatch_mean") == {"mismatch_mean"}
    assert spelled_figures("f(mismatch_mean=1)") == {"mismatch_mean"}
    assert spelled_figures("class A:\n    mismatch_max: float = 0.0") == {"mismatch_max"}
    assert spelled_figures("getattr(s, 'mismatch_k3')") == {"mismatch_k3"}
    assert not spelled_figures("a = s.mismatch")
