"""The dashboard for Grafana: every query is PromQL on metrics that a node has, and every field is
one that Grafana knows. The parser is not Prometheus' own; `tests/integration/test_prometheus.py`
asks that one."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus, timeseries

from node.cli import main
from node.observe.metrics_page import page
from swarm.telemetry.metrics import METRICS
from tests.grafana import dashboard, plain, queries
from tests.unit.test_metrics_page import full_report, samples

OWN_LABELS = {"instance", "job"}  # Prometheus adds them


def selectors(expr: Any) -> list[Any]:
    """All that a query selects."""
    found: list[Any] = []

    def look(node: Any) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(expr, look)
    return found


def labels_of(name: str) -> set[str]:
    """The labels that the node's page has with a metric, and Prometheus'."""
    there = samples(page(full_report, {"slow": 1}))
    return OWN_LABELS | {label for labels, _ in there[name] for label in labels}


def problems(expr: str) -> list[str]:
    """What is wrong with a query."""
    try:
        parsed = promql_parser.parse(plain(expr))
    except ValueError as error:
        return [f"{expr}: {error}"]
    there = samples(page(full_report, {"slow": 1}))
    found = []
    for selector in selectors(parsed):
        if selector.name not in there:
            found.append(f"{selector.name}: is not on a node's page")
            continue
        asked = {matcher.name for matcher in selector.matchers.matchers} - {"__name__"}
        unknown = asked - labels_of(selector.name)
        found += [f"{selector.name}: has no label {label}" for label in sorted(unknown)]
        metric = METRICS.get(selector.name.removeprefix("swarm_"))
        if metric is not None and "rate(" in expr and metric.kind != "counter":
            found.append(f"{selector.name}: is no counter, and has no rate")
    if not selectors(parsed):
        found.append(f"{expr}: selects nothing")
    return found


def test_every_query_is_promql_on_what_a_node_s_page_has() -> None:
    asked = queries()
    assert len(asked) > len(dashboard()["panels"])
    assert [problem for expr in asked for problem in problems(expr)] == []


def test_alerting_rules_on_the_page_ask_for_what_a_node_has() -> None:
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    rules = yaml.safe_load(block)["groups"][0]["rules"]
    asked = [rule["expr"] for rule in rules if not rule["expr"].startswith("up{")]
    assert len(asked) == len(rules) - 1
    assert [problem for expr in asked for problem in problems(expr)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(swarm_bytes_in_total[5m]",
        "swarm_no_such_metric",
        'swarm_peers{protocol="x"}',
        "rate(swarm_peers[5m])",
        "sum by reason (swarm_rejected_total)",
        "1 + 1",
        'rate(swarm_bytes_in_total{instance=~"$instance"}[$typo])',
    ],
)
def test_a_wrong_query_is_found(wrong: str) -> None:
    assert problems(wrong)


# --- the file ----------------------------------------------------------------------------------


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """What is in our JSON and not, or otherwise, in Grafana's own types once they have read it."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from lost(value, theirs[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{path}/{place}")
    elif ours != theirs or type(ours) is not type(theirs):
        yield path


def read_by_grafana(ours: dict[str, Any]) -> tuple[models.Dashboard, list[str]]:
    register_default_plugins()
    read = models.Dashboard.from_json(copy.deepcopy(ours))
    return read, list(lost(ours, json.loads(json.dumps(read, cls=JSONEncoder))))


def test_grafana_s_own_types_read_every_field_of_the_dashboard() -> None:
    read, missing = read_by_grafana(dashboard())
    assert missing == []
    assert read.panels is not None
    for panel in read.panels:
        assert isinstance(panel, models.Panel)
        assert panel.type_val == "timeseries"
        assert isinstance(panel.options, timeseries.Options)
        assert panel.targets
        assert all(isinstance(target, prometheus.Dataquery) for target in panel.targets)
    # an older one is migrated when it is loaded; a newer one would not be understood
    assert dashboard()["schemaVersion"] <= models.Dashboard().schema_version


@pytest.mark.parametrize(
    "path", [("panels", 0, "gridPos"), ("panels", 3, "targets", 0, "expr"), ("templating",)]
)
def test_a_field_that_grafana_does_not_know_is_found(path: tuple[Any, ...]) -> None:
    wrong = dashboard()
    at = wrong
    for key in path[:-1]:
        at = at[key]
    at[f"{path[-1]}x"] = at.pop(path[-1])
    _, missing = read_by_grafana(wrong)
    assert "/" + "/".join(map(str, path)) + "x" in missing


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_metric_has_a_line() -> None:
    asked = " ".join(queries())
    assert [name for name in METRICS if f"swarm_{name}{{" not in asked] == []


def test_the_command_prints_the_dashboard(capsys) -> None:
    assert main(["monitor", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out) == dashboard()
