"""While a broker is away no node is heard of: that says nothing of the nodes. Pure."""

from dataclasses import replace
from math import inf

from swarm.telemetry.fleet_view import Gone, NodeView, gone_after_s


class Outages:
    """Remembers the last time that the broker was away, and who was there before it."""

    def __init__(self) -> None:
        self._began_s = inf
        self._ended_s = -inf
        self._is_away = False

    def note(self, now_s: float, *, connected: bool, away_s: float | None) -> None:
        """Note the broker's state at a time."""
        if not connected:
            if not self._is_away:
                self._began_s = now_s - (away_s or 0.0)
            self._ended_s = now_s
        self._is_away = not connected

    def excused(self, node: NodeView, now_s: float) -> NodeView:
        """The node, and not gone where only the broker was: it then has as long to be heard of from
        the broker's return on as it has after a report."""
        if node.gone is not Gone.SILENT:
            return node
        patience_s, heard_at_s = gone_after_s(node.report), now_s - node.heard_s
        was_there = heard_at_s >= self._began_s - patience_s
        silent_s = now_s - max(heard_at_s, self._ended_s)
        return replace(node, gone=None) if was_there and silent_s <= patience_s else node
