"""One file from a publisher to all others, by real processes on hosts with links of their own.

    python bench_weights_real.py --small       # 12 MiB: about three minutes
    python bench_weights_real.py               # 256 MiB: 45 minutes, most of it HTTP's

Ours (`swarm-node weights publish` and `fetch`), libtorrent, shardcast and HTTP, one after another
on the same links: a publisher and eight receivers in network namespaces, every link as fast up as
down. `last` is when the last receiver has all of it, verified and on disk, in seconds since it was
announced; `x` is that over the bound max(F/u_s, F/d_min, N F/(u_s + sum u_i)). What can be prepared
(hashing, cutting, processes that run and listen) is done before. The others come from PyPI into a
throw-away environment.

All of it, the links too, shares this machine's cores, so look at `busy`: where all cores were, they
were the limit and not the links. `self` is what the contender's processes took of them, `links`
what carrying packets took; carrying goes first, so that links keep their rates. `origin F` and
`all F` are the bytes that the publisher and that all hosts sent, over those of the file. Needs
Linux and root.
"""

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil
import rivals
from rivals import Arrived, Child, Http, Ours, RivalFailed, Setting, Shardcast, Torrent

from swarm.errors import ConfigError
from swarm.simulation.links import LinkProfile
from swarm.simulation.socket_lab import Lab, missing, open_lab

MIB = 1 << 20
MBIT = 1_000_000 / 8
TENSOR_BYTES = 16 * MIB
WRITE_BYTES = MIB
FULL_MIB, SMALL_MIB = 256, 12
PIECE_BYTES = 64 << 10  # libtorrent's; 256 KiB was measured to be slower on these links
MIDDLES = 2  # of shardcast: with 2 or 3 the fewest copies leave any one of nine hosts
SHARDS = 64  # of a file, for shardcast: its own 50 MB are made for tens of gigabytes
TIMEOUT_BOUNDS, TIMEOUT_S = 20.0, 120.0
NAMES = ("ours", "libtorrent", "shardcast", "http")


@dataclass(frozen=True, slots=True)
class Row:
    """What one transfer came to. Cores are means over it."""

    name: str
    last_s: float
    median_s: float
    origin_copies: float  # of the file, headers and packets that were lost included
    all_copies: float
    overflowed: int  # packets that did not fit into a queue
    busy_cores: float
    own_cores: float
    links_cores: float


def make_file(path: Path, size_bytes: int) -> None:
    """Weights of random bits, which nobody can compress, in tensors of 16 MiB."""
    offsets = [*range(0, size_bytes, TENSOR_BYTES), size_bytes]
    header = {
        f"w{index}": {"dtype": "BF16", "shape": [(end - start) // 2], "data_offsets": [start, end]}
        for index, (start, end) in enumerate(pairwise(offsets))
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, size_bytes, WRITE_BYTES):
            file.write(os.urandom(min(WRITE_BYTES, size_bytes - start)))


@dataclass(frozen=True, slots=True)
class _Meter:
    """Cores and bytes so far."""

    at_s: float
    busy_s: float
    own_s: float
    links_s: float
    counters: dict[str, dict[str, int]]

    @classmethod
    def read(cls, lab: Lab, children: Sequence[Child]) -> "_Meter":
        times = psutil.cpu_times()
        links = psutil.Process(lab.pid).cpu_times()
        return cls(
            time.monotonic(),
            sum(times) - times.idle - times.iowait - times.guest - times.guest_nice,
            sum(child.cpu_s() for child in children),
            links.user + links.system,
            lab.counters(),
        )

    def total(self, what: str) -> int:
        return sum(each[what] for each in self.counters.values())


def measure(
    name: str, setting: Setting, children: Sequence[Child], send: Callable[[], Arrived]
) -> Row:
    """Have a contender send, and see what it took."""
    before = _Meter.read(setting.lab, children)
    arrived = send()
    after = _Meter.read(setting.lab, children)
    times = sorted(done_s - arrived.announced_s for done_s in arrived.done_s)
    elapsed_s, first = after.at_s - before.at_s, setting.hosts[0]
    origin = after.counters[first]["bytes"] - before.counters[first]["bytes"]
    return Row(
        name,
        times[-1],
        statistics.median(times),
        origin / setting.size_bytes,
        (after.total("bytes") - before.total("bytes")) / setting.size_bytes,
        after.total("overflowed") - before.total("overflowed"),
        (after.busy_s - before.busy_s) / elapsed_s,
        (after.own_s - before.own_s) / elapsed_s,
        (after.links_s - before.links_s) / elapsed_s,
    )


def run_ours(setting: Setting, versions: int) -> Iterator[Row]:
    """A first version, when nobody knows any link's rate, and as many more as are asked for."""
    ours = Ours(setting, make_file)
    with rivals.ending(ours.children):
        ours.start()
        for version in range(versions):
            following = setting.work / "next.safetensors"
            make_file(following, setting.weights_bytes)
            name = "ours, first version" if not version else "ours, next version"
            yield measure(name, setting, ours.children, lambda file=following: ours.send(file))  # type: ignore[misc]


def run_others(name: str, setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    """One of the others, once."""
    contender: Torrent | Shardcast | Http
    if name == "libtorrent":
        contender = Torrent(setting, options.protocol, options.piece_kib << 10)
    elif name == "shardcast":
        contender = Shardcast(setting, MIDDLES, -(-setting.size_bytes // SHARDS))
    else:
        contender = Http(setting)
    with rivals.ending(contender.children):
        contender.start()
        yield measure(contender.name, setting, contender.children, contender.send)


@contextmanager
def settings(options: argparse.Namespace, scratch: Path) -> Iterator[Callable[[str], Setting]]:
    """Gives a function that opens a fresh network for one contender; all see the same file."""
    published = scratch / "file" / "model.safetensors"
    published.parent.mkdir()
    make_file(published, options.mib * MIB)
    with published.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    python = None
    if {"libtorrent", "shardcast"} & set(options.only):
        python = options.python or rivals.install(scratch)
        if python is None:
            print(f"without {' and '.join(rivals.PACKAGES)}: PyPI cannot be reached")
    rate = options.mbit * MBIT
    profile = LinkProfile(options.latency_ms / 1e3, options.jitter_ms / 1e3, rate, rate)
    hosts = tuple(str(number) for number in range(options.receivers + 1))
    current = None

    def fresh(name: str) -> Setting:
        nonlocal current
        if current is not None:
            current.__exit__(None, None, None)
        current = open_lab(dict.fromkeys(hosts, profile), mtu=options.mtu)
        lab = current.__enter__()
        with suppress(PermissionError):  # links do not wait for the hosts' work
            os.sched_setscheduler(lab.pid, os.SCHED_RR, os.sched_param(1))
        work = scratch / name
        work.mkdir()
        timeout_s = TIMEOUT_BOUNDS * published.stat().st_size / rate + TIMEOUT_S
        return Setting(lab, hosts, published, options.mib * MIB, sha256, work, python, timeout_s)

    try:
        yield fresh
    finally:
        if current is not None:
            current.__exit__(None, None, None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help=f"{SMALL_MIB} MiB, unless --mib")
    parser.add_argument("--mib", type=int, help=f"size of the file; default {FULL_MIB}")
    parser.add_argument("--mbit", type=float, default=12.0, help="of each link, up and down")
    parser.add_argument("--latency-ms", type=float, default=15.0, help="one way")
    parser.add_argument("--jitter-ms", type=float, default=1.0)
    parser.add_argument("--mtu", type=int, default=3000, help="larger packets take fewer cores")
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--versions", type=int, default=2, help="of ours, one after another")
    parser.add_argument(
        "--protocol", choices=("tcp", "utp", "both"), default="tcp", help="libtorrent's"
    )
    parser.add_argument("--piece-kib", type=int, default=PIECE_BYTES >> 10, help="libtorrent's")
    parser.add_argument("--python", type=Path, help="an interpreter with the others installed")
    options = parser.parse_args()
    options.mib = options.mib or (SMALL_MIB if options.small else FULL_MIB)
    return options


def show_head(options: argparse.Namespace, bound_s: float) -> None:
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(
        f"{options.mib} MiB to {options.receivers} receivers; every link {options.mbit:g} Mbit/s up"
        f" and down, {options.latency_ms:g} ms one way, jitter {options.jitter_ms:g} ms, packets of"
        f" {options.mtu} bytes, TCP {control}\nbound {bound_s:.1f} s; {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f} before\n"
        "ours: versions of random bits, fetched as a whole, in a swarm that is connected already\n"
        f"libtorrent: {options.protocol}, a seed and leechers that know all others, pieces of"
        f" {options.piece_kib} KiB, no limits, no tracker\n"
        f"shardcast: {MIDDLES} receivers are middle nodes too, {SHARDS} shards, a look a second\n"
        "HTTP: one threaded server\n"
        f"{'':22} {'last s':>7} {'median':>7} {'x':>6} {'origin F':>8} {'all F':>6} {'lost':>6}"
        f" {'busy':>5} {'self':>5} {'links':>5}",
        flush=True,
    )


def show(row: Row, bound_s: float) -> None:
    print(
        f"{row.name:22} {row.last_s:7.1f} {row.median_s:7.1f} {row.last_s / bound_s:6.2f}"
        f" {row.origin_copies:8.2f} {row.all_copies:6.2f} {row.overflowed:6} {row.busy_cores:5.2f}"
        f" {row.own_cores:5.2f} {row.links_cores:5.2f}",
        flush=True,
    )


def main() -> None:
    options = parse()
    if (reason := missing()) is not None:
        sys.exit(f"bench_weights_real: {reason}")
    failed = False
    with (
        tempfile.TemporaryDirectory(prefix="rivals-") as scratch,
        settings(options, Path(scratch)) as fresh,
    ):
        size_bytes = (Path(scratch) / "file" / "model.safetensors").stat().st_size
        bound_s = size_bytes / (options.mbit * MBIT)  # with equal links, the first of the three
        show_head(options, bound_s)
        for name in options.only:
            setting = fresh(name)
            if name in ("libtorrent", "shardcast") and setting.python is None:
                continue
            try:
                rows = (
                    run_ours(setting, options.versions)
                    if name == "ours"
                    else run_others(name, setting, options)
                )
                for row in rows:
                    show(row, bound_s)
            except (RivalFailed, ConfigError) as error:
                failed = True
                print(f"{name:22} {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
