"""The dashboard for Grafana, and its queries as Prometheus gets them."""

import json
from typing import Any

from swarm.telemetry.dashboard.grafana import grafana_dashboard

VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}  # what Grafana puts in


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(grafana_dashboard()))  # as Grafana reads it
    return found


def queries() -> list[str]:
    """Of all panels, as they are in the file."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def plain(expr: str) -> str:
    """A query without Grafana's variables."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr
