"""The graph of groups given: it stays legible however many nodes there are. Pure.

The busiest nodes are drawn one by one, all others together by role. An edge goes from whoever made
groups to whoever trained on them, and carries their number since the receiver's start.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from swarm.telemetry.fleet_view import NodeView

DRAWN_MAX: Final = 36  # nodes drawn one by one
EDGES_MAX: Final = 240
FRESH_S: Final = 30.0  # an edge that carried something in this time is alive
CENTRE_ROLES: Final = ("learner", "coordinator")
UNWATCHED: Final = "unwatched"  # peers in reports of others that do not report themselves
UNWATCHED_DOT: Final = f"*{UNWATCHED}"

Edge = tuple[str, str]


class Feeding:
    """The graph; remembers when each drawn edge last carried something."""

    def __init__(self) -> None:
        self._carried: dict[Edge, tuple[int, float]] = {}  # the number, and when it last rose

    def look(self, nodes: Sequence[NodeView], now_s: float) -> dict[str, Any]:
        """`dots` and `edges` for the page, and how many edges were left out."""
        edges = _edges(nodes)
        drawn = _drawn(nodes, edges)
        together: Counter[Edge] = Counter()
        for (giver, taker), groups in edges.items():
            together[drawn.get(giver, UNWATCHED_DOT), drawn[taker]] += groups
        shown = together.most_common(EDGES_MAX)
        self._carried = {edge: self._last(edge, groups, now_s) for edge, groups in shown}
        return {
            "dots": _dots(nodes, drawn, {end for edge, _ in shown for end in edge}),
            "edges": [
                [giver, taker, groups, now_s - self._carried[giver, taker][1] <= FRESH_S]
                for (giver, taker), groups in shown
            ],
            "edges_left_out": len(together) - len(shown),
        }

    def _last(self, edge: Edge, groups: int, now_s: float) -> tuple[int, float]:
        before = self._carried.get(edge)
        if before is None:
            return groups, now_s - 2 * FRESH_S  # it may be hours old
        return (groups, now_s) if groups > before[0] else (groups, before[1])


def _edges(nodes: Iterable[NodeView]) -> Counter[Edge]:
    edges: Counter[Edge] = Counter()
    for node in nodes:
        taker = node.report.peer_id
        for peer in node.report.peers:
            if peer.groups_trained and peer.peer_id != taker:
                edges[peer.peer_id, taker] += peer.groups_trained
        if node.report.role == "learner":
            for worker in node.report.workers:
                edge = (worker.peer_id, taker)
                if worker.admitted and worker.peer_id not in ("", taker):
                    edges[edge] = max(edges[edge], worker.admitted)
    return edges


def _drawn(nodes: Sequence[NodeView], edges: Mapping[Edge, int]) -> dict[str, str]:
    """The dot of each watched node, by peer id."""
    moved: Counter[str] = Counter()
    for (giver, taker), groups in edges.items():
        moved[giver] += groups
        moved[taker] += groups

    def rank(node: NodeView) -> tuple[bool, bool, int, str]:
        report = node.report
        central = report.role in CENTRE_ROLES
        return (not central, not report.alarms, -moved[report.peer_id], report.peer_id)

    single = sorted(nodes, key=rank)
    room = len(single) if len(single) <= DRAWN_MAX else DRAWN_MAX - 1
    of = {node.report.peer_id: node.report.peer_id for node in single[:room]}
    of |= {node.report.peer_id: f"*{node.report.role}" for node in single[room:]}
    return of


def _dots(
    nodes: Sequence[NodeView], drawn: Mapping[str, str], ends: set[str]
) -> list[dict[str, Any]]:
    """One for each node that is drawn by itself, one for each role of the others, and one for
    unwatched peers if an edge ends there."""
    dots = {UNWATCHED_DOT: _dot(UNWATCHED_DOT, UNWATCHED)} if UNWATCHED_DOT in ends else {}
    for node in nodes:
        report = node.report
        name = drawn[report.peer_id]
        dot = dots.setdefault(name, _dot(name, report.role))
        dot["count"] += 1
        dot["gone"] += node.gone is not None
        dot["alarms"] += bool(report.alarms) and node.gone is None
    return [dots[name] for name in sorted(dots)]


def _dot(name: str, role: str) -> dict[str, Any]:
    centre = role in CENTRE_ROLES and not name.startswith("*")
    return {"id": name, "role": role, "count": 0, "gone": 0, "alarms": 0, "centre": centre}
