"""The whole path of a version's chunks between two processes on loopback, step by step.

    python bench_weights_path.py [--sizes 48 512] [--repeats 5] [--rows ...] [--json]

One gives an artifact of random bytes, one gets it, by production code over libp2p; both processes
are new for each run. From the first request to the last chunk stored:

    tls        the same bytes over trio's TCP and TLS, no libp2p: what all is compared with
    stream     one stream of our transport
    requests   one request on one stream for each chunk, 8 at a time, from memory to nowhere
    memory     a broadcast: asks, picks, paces and hashes, from memory to memory
    disk       the whole: read from a store on disk, verified, written to a store on disk

Rows take turns, so that what else the machine does hits all of them; figures are medians, with the
least and the most in brackets. Where the machine is busy, go by the CPU seconds for each gigabyte.
`--profile PREFIX` writes a cProfile of each end of the row `disk`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from bench_network import child
from weights_peers import make_artifact

from swarm.weights.format.artifacts import suggested_chunk_bytes

HERE: Final = Path(__file__).parent
MB, GB, MIB = 1e6, 1e9, 1 << 20
STREAMS: Final = {"tls": "tls", "stream": "ours"}  # rows that `stream_peers.py` knows
ROWS: Final = (*STREAMS, "requests", "memory", "disk")
SETTLE_S: Final = 0.5  # for what follows a connection


@dataclass(slots=True)
class Row:
    """One step of the path with one size; one value for each run."""

    name: str
    size_bytes: int
    mb_per_s: list[float] = field(default_factory=list)
    give_cpu_s_per_gb: list[float] = field(default_factory=list)
    get_cpu_s_per_gb: list[float] = field(default_factory=list)


def main() -> None:
    """Run and print."""
    arguments = _arguments()
    rows: list[Row] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as base:
        for size in arguments.sizes:
            directory = Path(base) / str(size)
            directory.mkdir()
            make_artifact(directory, size * MIB)
            rows += _of_size(directory, size * MIB, arguments)
    if arguments.json:
        json.dump([asdict(row) for row in rows], sys.stdout)
    else:
        print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")
        _print(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[48, 512], help="in MiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--directory", type=Path, help="where the stores are (default: /tmp)")
    parser.add_argument("--profile", metavar="PREFIX", help="cProfiles of both ends of `disk`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def _of_size(directory: Path, size_bytes: int, arguments: argparse.Namespace) -> list[Row]:
    rows = [Row(name, size_bytes) for name in arguments.rows]
    for _ in range(arguments.repeats):
        for row in rows:
            profile = arguments.profile if row.name == "disk" else None
            seconds, give_s, get_s = _transfer(row.name, directory, size_bytes, profile)
            row.mb_per_s.append(size_bytes / MB / seconds)
            row.give_cpu_s_per_gb.append(give_s / (size_bytes / GB))
            row.get_cpu_s_per_gb.append(get_s / (size_bytes / GB))
    return rows


def _transfer(
    name: str, directory: Path, size_bytes: int, profile: str | None
) -> tuple[float, float, float]:
    """One run. Seconds that it took, CPU seconds of who gives and of who gets."""
    with ExitStack() as opened:
        if name in STREAMS:
            start = partial(child, str(HERE / "stream_peers.py"), STREAMS[name])
            get = opened.enter_context(start("listen"))
            give = opened.enter_context(start("send", get.line()))
            asked, line = give, str(size_bytes)
        else:
            variables = {"SWARM_PROFILE": profile} if profile else {}
            start = partial(child, str(HERE / "weights_peers.py"), name, **variables)
            give = opened.enter_context(start("give", str(directory)))
            get = opened.enter_context(start("get", str(directory), give.line()))
            asked, line = get, "go"
        assert asked.line() == "ready"
        time.sleep(SETTLE_S)
        give_s, get_s = give.cpu_s(), get.cpu_s()
        asked.tell(line)
        seconds = float(asked.line())
        return seconds, give.cpu_s() - give_s, get.cpu_s() - get_s


def _print(rows: list[Row]) -> None:
    print(
        f"{'size':>8} {'chunks':>9} {'row':9} {'MB/s':>18} {'/ tls':>6}"
        f" {'CPU s/GB giving':>20} {'CPU s/GB getting':>20}"
    )
    for row in rows:
        same = {each.name: each for each in rows if each.size_bytes == row.size_bytes}
        tls = median(same["tls"].mb_per_s) if "tls" in same else float("nan")
        chunk_bytes = suggested_chunk_bytes(row.size_bytes)
        print(
            f"{row.size_bytes / MIB:4.0f} MiB {chunk_bytes / 1024:5.0f} KiB {row.name:9}"
            f" {_spread(row.mb_per_s, 0):>18} {median(row.mb_per_s) / tls:6.2f}"
            f" {_spread(row.give_cpu_s_per_gb, 2):>20} {_spread(row.get_cpu_s_per_gb, 2):>20}"
        )


def _spread(values: list[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{median(values):.{digits}f} [{low}-{high}]"


if __name__ == "__main__":
    main()
