"""Bytes that a node sends in a round, over the size of the swarm, at fixed I, J and G.

Production nodes with scripted policies in a simulated network, after a warm-up, with no faults.
What is counted is on the wire: gossip with all that is passed on, requests, answers, handshakes.

    python bench_bytes.py                 # 8 to 64 nodes
    python bench_bytes.py --least 128 --most 512      # an hour of a whole core
"""

import argparse
import sys
from collections import Counter

from node.simulation.scenario import Scenario, SwarmTable
from node.simulation.simulate import simulate
from node.simulation.simulation_report import Replay, Report
from swarm.transport.memory.network import HANDSHAKE
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    HELLO_PROTOCOL,
    HOLDERS_PROTOCOL,
    ROLLOUTS_PROTOCOL,
)

SIZES = (8, 16, 32, 64, 128, 256, 512)
TOLERANCE = 0.2
NAMES = {
    ROLLOUTS_PROTOCOL: "fetch",
    HOLDERS_PROTOCOL: "holders",
    HELLO_PROTOCOL: "hello",
    ADVERTS_PROTOCOL: "catch-up",
    HANDSHAKE: "connect",
}
COLUMNS = ("fetch", "gossip", "hello", "catch-up", "holders", "connect")


def measure(nodes: int, options: argparse.Namespace) -> Report:
    """One swarm without faults."""
    round_s = options.round_s
    scenario = Scenario(
        title="bytes",
        nodes=nodes,
        profile="volunteer",
        warm_up_s=options.warm_up * round_s,
        duration_s=(options.warm_up + options.rounds) * round_s,
        settle_s=0.0,
        swarm=SwarmTable(
            local_groups=options.local,
            external_groups=options.external,
            group_size=options.group_size,
            group_bytes=options.group_bytes,
            generate_s=0.7 * round_s,
            train_s=0.3 * round_s,
        ),
    )
    return simulate(Replay("bytes", scenario, nodes, options.seed, scenario.profile))


def per_node_round(report: Report) -> Counter[str]:
    """Kilobytes by what they are for."""
    kinds: Counter[str] = Counter()
    for kind, size_bytes in report.bytes_by_kind.items():
        kinds[NAMES.get(kind, "gossip")] += size_bytes / report.rounds / 1e3  # type: ignore[assignment]
    return kinds


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--least", type=int, default=SIZES[0], help="nodes in the smallest swarm")
    parser.add_argument("--most", type=int, default=64, help="nodes in the largest swarm")
    parser.add_argument("--local", type=int, default=4, help="I")
    parser.add_argument("--external", type=int, default=4, help="J")
    parser.add_argument("--group-size", type=int, default=8, help="G")
    parser.add_argument("--group-bytes", type=int, default=16_384)
    parser.add_argument("--round-s", type=float, default=30.0)
    parser.add_argument("--warm-up", type=int, default=3, help="rounds")
    parser.add_argument("--rounds", type=int, default=4, help="that are counted")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if not any(options.least <= size <= options.most for size in SIZES):
        parser.error(f"no size of {SIZES} is between --least and --most")
    print("KB that a node sends in a round, mean")
    print("nodes      all" + "".join(f"{name:>10}" for name in COLUMNS) + "   J used   real s")
    totals: dict[int, float] = {}
    for nodes in (size for size in SIZES if options.least <= size <= options.most):
        report = measure(nodes, options)
        kinds = per_node_round(report)
        totals[nodes] = sum(kinds.values())
        cells = "".join(f"{kinds[name]:10.1f}" for name in COLUMNS)
        drawn = report.drawn / max(1, report.rounds)
        print(f"{nodes:5d}{totals[nodes]:9.1f}{cells}{drawn:9.2f}{report.real_s:9.0f}", flush=True)
    middle = (max(totals.values()) + min(totals.values())) / 2
    spread = max(totals.values()) / middle - 1
    print(f"\nspread about the middle: ±{100 * spread:.0f} % (goal: ±{100 * TOLERANCE:.0f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
