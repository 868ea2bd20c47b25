"""The dashboard for Grafana, and its queries as Prometheus gets them."""

import json
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "swarm" / "telemetry" / "dashboard" / "grafana.json"
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}  # what Grafana puts in


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> list[str]:
    """Of all panels, as they are in the file."""
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def plain(expr: str) -> str:
    """A query without Grafana's variables."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr
