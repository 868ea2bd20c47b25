"""A dashboard for Grafana, made from the registry of metrics: a panel for each group and unit."""

from typing import Any, Final

from swarm.telemetry.metrics import METRICS, PEER_METRICS, Metric

WIDTH, HEIGHT = 12, 8  # of a panel; Grafana's grid is 24 wide
UNITS: Final = {"s": "s", "bytes": "bytes", "share": "percentunit", "dollars/h": "currencyUSD"}
RATES: Final = {"bytes": "Bps"}  # of counters; all others are counts a second
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
NODES: Final = '{instance=~"$instance"}'
VARIABLES: Final = (
    {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
    {
        "name": "instance",
        "type": "query",
        "label": "Node",
        "datasource": SOURCE,
        "query": {"query": "label_values(swarm_info, instance)", "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    },
)
INFO: Final = f"count by (role) (swarm_info{NODES})"

Query = tuple[str, str]  # PromQL, and the legend of its lines


def grafana_dashboard() -> dict[str, Any]:
    """The dashboard as JSON's values, for Grafana's import."""
    panels: dict[tuple[str, str], list[Query]] = {
        ("Alarms", "short"): [(f"swarm_alarm{NODES}", "{{instance}} {{kind}} ({{level}})")],
        ("Nodes", "short"): [(INFO, "{{role}}")],
    }
    for metric in (*METRICS.values(), *PEER_METRICS.values()):
        unit = (
            RATES.get(metric.unit, "cps")
            if metric.kind == "counter"
            else (UNITS.get(metric.unit, "short"))
        )
        panels.setdefault((metric.group, unit), []).append(_query(metric))
    return {
        "title": "Swarm",
        "uid": "swarm-nodes",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["swarm"],
        "templating": {"list": list(VARIABLES)},
        "annotations": {"list": []},
        "panels": [
            _panel(place, title, unit, queries)
            for place, ((title, unit), queries) in enumerate(panels.items())
        ],
    }


def _query(metric: Metric) -> Query:
    name = metric.name.removesuffix("_total").replace("_", " ")
    expr = f"swarm_{metric.name}{NODES}"
    if metric.kind == "counter":
        expr = f"rate({expr}[$__rate_interval])"
    if metric.label is None:
        return expr, f"{name} {{{{instance}}}}"
    return f"sum by ({metric.label}) ({expr})", f"{name} {{{{{metric.label}}}}}"


def _panel(place: int, title: str, unit: str, queries: list[Query]) -> dict[str, Any]:
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "description": "",
        "datasource": SOURCE,
        "gridPos": {
            "x": WIDTH * (place % 2),
            "y": HEIGHT * (place // 2),
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "expr": expr,
                "legendFormat": legend,
                "datasource": SOURCE,
            }
            for at, (expr, legend) in enumerate(queries)
        ],
    }
