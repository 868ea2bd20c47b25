"""A version on its way to the nodes, chunk by chunk, in a width that a page can draw. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from swarm.telemetry import metrics as m
from swarm.telemetry.dashboard.series import mean, metrics, short
from swarm.telemetry.fleet_view import NodeView
from swarm.telemetry.reports import BroadcastReport

CELLS_MAX: Final = 96  # in a row; of more chunks, each cell stands for several
ROWS_MAX: Final = 12  # nodes drawn one by one: those that miss most
LEVELS: Final = "0123456789"  # of a cell: none of its chunks, up to all of them


def broadcast_rows(present: Sequence[NodeView]) -> dict[str, Any] | None:
    """The newest version that is on its way or complete; None where there is none.

    `rows` are nodes and their cells, those that miss most first; `swarm` is the mean over all. A
    node that reports an older version has none of its chunks.
    """
    reported = [(n, n.report.broadcast) for n in present if n.report.broadcast is not None]
    if not reported:
        return None
    version = max(broadcast.version for _, broadcast in reported)
    at_it = [(node, broadcast) for node, broadcast in reported if broadcast.version == version]
    # Nodes count chunks alike; of those that do not, the majority is drawn.
    chunks = Counter(broadcast.chunks for _, broadcast in at_it).most_common(1)[0][0]
    at_it = [(node, broadcast) for node, broadcast in at_it if broadcast.chunks == chunks]
    shares = {node.report.peer_id: cell_shares(broadcast) for node, broadcast in at_it}
    behind = [node for node, broadcast in reported if broadcast.version < version]
    width = cells_of(chunks)
    shares |= {node.report.peer_id: [0.0] * width for node in behind}
    together = [sum(column) / len(shares) for column in zip(*shares.values(), strict=True)]
    rows = sorted(shares.items(), key=lambda item: (sum(item[1]), item[0]))
    return {
        "version": version,
        "chunks": chunks,
        "size_bytes": max(broadcast.size_bytes for _, broadcast in at_it),
        "complete": sum(broadcast.complete for _, broadcast in at_it),
        "nodes": len(shares),
        "behind": len(behind),
        "swarm": levels(together),
        "share": short(mean(together)),
        "rows": [[peer, short(mean(cells)), levels(cells)] for peer, cells in rows[:ROWS_MAX]],
        "left_out": max(0, len(rows) - ROWS_MAX),
        **_took(present),
    }


def _took(present: Sequence[NodeView]) -> dict[str, float | None]:
    """Seconds that the last version took, over the bound, and of pause; the worst node's."""
    names = (m.BROADCAST_S, m.BROADCAST_BOUND_RATIO, m.PAUSED_S)
    return {name: max(metrics(present, name), default=None) for name in names}


def cells_of(chunks: int) -> int:
    return min(max(chunks, 1), CELLS_MAX)


def cell_shares(broadcast: BroadcastReport) -> list[float]:
    """The share of chunks that is there, 0 to 1, for each cell. A coarser bitfield is spread
    evenly; one that is no hexadecimal number counts as empty."""
    width = cells_of(broadcast.chunks)
    if broadcast.complete:
        return [1.0] * width
    bits = bits_of(broadcast.have)[: broadcast.chunks]
    if not bits:
        return [0.0] * width
    shares = []
    for cell in range(width):
        begin = cell * len(bits) // width
        end = max(begin + 1, (cell + 1) * len(bits) // width)
        part = bits[begin:end]
        shares.append(sum(part) / len(part))
    return shares


def bits_of(have: str) -> list[int]:
    """A hexadecimal bitfield's bits, the first chunk's first."""
    try:
        field = bytes.fromhex(have if len(have) % 2 == 0 else have + "0")
    except ValueError:
        return []
    return [byte >> place & 1 for byte in field for place in range(7, -1, -1)]


def levels(shares: Sequence[float]) -> str:
    """One digit for each share; only what is whole is 9, and only what is empty is 0."""
    top = len(LEVELS) - 1
    inner = (LEVELS[min(top - 1, max(1, int(share * top)))] for share in shares)
    ends = {0.0: LEVELS[0], 1.0: LEVELS[top]}
    return "".join(ends.get(share, level) for share, level in zip(shares, inner, strict=True))
