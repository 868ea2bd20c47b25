"""The file from which a page resumes: its curves and the last report of each node.

The file belongs to this user. Its form is checked all the same.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from swarm.telemetry.dashboard.state import SHOWN_S, DashboardState
from swarm.telemetry.fleet_view import NodeView, Watch
from swarm.telemetry.reports import NodeReport

FORM: Final = 1
NODES_KEPT_MAX: Final = 1_024
FILE_BYTES_MAX: Final = 32 << 20


def read_kept(path: Path) -> bytes | None:
    """The content that was written last; None: there is none. Blocking."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_kept(path: Path, content: bytes) -> None:
    """Replace the file. Blocking; an error is ignored, because a page works without history."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(content)
        partial.replace(path)


def kept(watch: Watch, state: DashboardState, now_s: float) -> bytes:
    """All of it at `now_s`, unix time; nodes that were heard last first, none that is not shown."""
    nodes = [node for node in watch.nodes(now_s) if node.heard_s <= SHOWN_S][:NODES_KEPT_MAX]
    told = {
        "form": FORM,
        "unix_s": now_s,
        "curves": state.curves(),
        "nodes": [_kept_node(node, now_s) for node in nodes],
    }
    return json.dumps(told, allow_nan=False, separators=(",", ":")).encode()


def _kept_node(node: NodeView, now_s: float) -> dict[str, Any]:
    return {
        "report": node.report.model_dump(mode="json"),
        "heard_at_s": now_s - node.heard_s,
        "gone": node.gone is not None,
    }


def restore(content: bytes, watch: Watch, state: DashboardState, now_s: float) -> bool:
    """Go on with what was kept; False, and nothing is changed but nodes that were read, where it
    is not what `kept` makes. That nobody listened in between says nothing of the nodes."""
    if len(content) > FILE_BYTES_MAX:
        return False
    try:
        told = json.loads(content)
        if told["form"] != FORM or not now_s - float(told["unix_s"]) >= 0:
            return False
        found = [
            (
                NodeReport.model_validate_json(json.dumps(node["report"])),
                min(now_s, float(node["heard_at_s"])),
                bool(node["gone"]),
            )
            for node in told["nodes"][:NODES_KEPT_MAX]
        ]
        state.go_on(told["curves"], float(told["unix_s"]), now_s)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError):
        return False
    for report, heard_at_s, gone in reversed(found):
        watch.remember(report, heard_at_s, now_s, gone=gone)
    return True
