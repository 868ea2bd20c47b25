"""Broadcasts of weights over simulated links, against the least time that is possible.

Production code on simulated links (`simulated_broadcasts.py`); of the bytes of chunks
there are only the sizes. `last` is when the last live honest peer has everything, in virtual
seconds since publication; `x` is that over the bound max(F/u_s, F/d_min, N F/(u_s + sum u_i)),
which knows neither latency nor what peers that leave or lie take with them.

    python bench_weights.py                    # N = 8 and 32, deltas of 20 and 200 MB
    python bench_weights.py --full             # also N = 128 and 16 GB: takes hours
"""

import argparse
import time
from dataclasses import dataclass
from multiprocessing import Pool

from simulated_broadcasts import BroadcastCase, BroadcastResult, simulate

from swarm.simulation.links import LinkProfile, links_of
from swarm.wire.messages import CHUNK_BYTES_MAX

MB = 1_000_000
MBIT = MB / 8
EQUAL = LinkProfile(latency_s=0.028, up_bytes_per_s=100 * MBIT, down_bytes_per_s=100 * MBIT)
CHUNK_BYTES = {20 * MB: 65_536, 200 * MB: 262_144, 16_000 * MB: 16_777_216}
CHUNK_BYTES_MIN = 4096
MIXES = ("equal", "volunteer")  # of links
LEAVE_SHARE, CORRUPT_SHARE = 0.2, 0.1
ROWS = {
    "all stay": {},
    "20 % leave": {"leave_share": LEAVE_SHARE},
    "10 % corrupt": {"corrupt_share": CORRUPT_SHARE},
    "rates unknown": {"rates_known": False},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    mix: str
    peers: int
    size_bytes: int
    chunk_bytes: int
    name: str
    seed: int


def links(mix: str, peers: int) -> tuple[LinkProfile, ...]:
    """The publisher's link and those of its peers."""
    if mix == "equal":
        return (EQUAL,) * (peers + 1)
    return links_of("volunteer", 1) + links_of("volunteer", peers)


def run(row: Row) -> tuple[Row, BroadcastResult, float]:
    """One broadcast, and the seconds that simulating it took."""
    case = BroadcastCase(
        row.size_bytes,
        row.chunk_bytes,
        links(row.mix, row.peers),
        seed=row.seed,
        **ROWS[row.name],
    )
    began_s = time.perf_counter()
    return row, simulate(case), time.perf_counter() - began_s


def rows(options: argparse.Namespace) -> list[Row]:
    """The cases, in the order of the tables."""
    sizes = [20 * MB, 200 * MB, 16_000 * MB] if options.full else [20 * MB, 200 * MB]
    if options.sizes:
        sizes = [size * MB for size in options.sizes if size * MB in CHUNK_BYTES]
    counts = [8, 32, 128] if options.full else options.peers
    return [
        Row(mix, peers, size, options.chunk_bytes or CHUNK_BYTES[size], name, options.seed)
        for peers in counts
        for size in sizes
        for mix in options.links
        for name in ROWS
        if name.startswith(tuple(options.rows))
    ]


def show(row: Row, result: BroadcastResult, real_s: float) -> None:
    """One line."""
    times = sorted(result.times_s)
    median_s = times[len(times) // 2] if times else float("inf")
    print(
        f"{row.mix:9} {row.peers:4} {row.size_bytes / MB:6.0f} MB  {row.name:23}"
        f" {result.bound_s:8.2f} {result.last_s:8.2f}"
        f" {result.over_bound:6.2f} {median_s:8.2f} {result.publisher_copies:7.2f}"
        f" {100 * result.duplicate_share:6.1f} {result.corrupt_bytes / MB:8.1f} {real_s:6.0f}",
        flush=True,
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="N = 128 and 16 GB as well")
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--links", nargs="+", choices=MIXES, default=MIXES)
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows that begin so")
    parser.add_argument("--sizes", type=int, nargs="+", help="in MB, of those above")
    parser.add_argument(
        "--chunk-bytes",
        type=int,
        help="of all sizes; else what a publisher takes: 64 KiB, 256 KiB and 16 MiB",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    chunk_bytes = options.chunk_bytes
    if chunk_bytes is not None and not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX:
        parser.error(f"--chunk-bytes {chunk_bytes}: take {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}")
    print("simulated links, sizes without bytes; equal links are 100/100 Mbit/s, 28 ms")
    print(
        f"{'links':9} {'N':>4} {'F':>9}  {'':23} {'bound s':>8} {'last s':>8}"
        f" {'x':>6} {'median':>8} {'sent F':>7} {'twice%':>6} {'bad MB':>8} {'real s':>6}"
    )
    with Pool(options.processes) as pool:
        for row, result, real_s in pool.imap(run, rows(options)):
            show(row, result, real_s)


if __name__ == "__main__":
    main()
