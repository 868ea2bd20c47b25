"""Reports and watched nodes for the page's tests."""

from typing import Any

from swarm.identity import Identity
from swarm.telemetry.fleet_view import Gone, NodeView
from swarm.telemetry.reports import NodeReport, encode_report

INSTANCE = "1"
NOW_S = 1_800_000_000.0


def report(peer: str, **changes: Any) -> NodeReport:
    """A report with few figures; `metrics` are floats by name."""
    fields: dict[str, Any] = {
        "peer_id": peer, "run_id": "sums", "role": "node", "instance": INSTANCE, "sequence": 1,
        "sent_at_s": NOW_S, "interval_s": 1.0, "phase": "training", "metrics": {"round": 3.0},
    }  # fmt: skip
    return NodeReport(**(fields | changes))


def seen(peer: str, *, gone: bool = False, heard_s: float = 0.5, **changes: Any) -> NodeView:
    """A node as `Watch` would show it."""
    return NodeView(
        report=report(peer, **changes),
        heard_s=heard_s,
        gone=Gone.SILENT if gone else None,
        lost=0,
    )


def signed(identity: Identity, **changes: Any) -> tuple[str, bytes]:
    """A report as a broker delivers it: topic and payload."""
    made = report(identity.peer_id, **changes)
    return f"swarm/{made.run_id}/{made.peer_id}/report", encode_report(made, identity)
