"""Bulk streams and gossip between loopback hosts, beside other ways to do the same.

    python bench_network.py [--quick] [--only streams|gossip] [--core N]

All processes share one core, and stacks take turns within each repetition. Figures are medians with
the least and the most in brackets. On a busy machine a stack of more processes gets more of the
core, so compare CPU seconds per gigabyte, both ends together.

Streams: one sender, or four at once, to one receiver. The baselines are libp2p as it comes
(`stock`), TLS without libp2p (`tls`) and go-libp2p's daemon (`p2pd`, fetched from PyPI; its figures
include a local socket and a Python process at each end).

Gossip: hosts of one process; up to eight publish. A delivery is one message at one host. The
delivery ratio is the least of all runs, also after two bursts: 40 messages of 4 KB, 20 of 64 KB.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
from tests import p2pd  # noqa: E402  the daemon of the interoperability tests

MB, GB = 1e6, 1e9
TRANSFER_BYTES = {"ours": 192 << 20, "tls": 192 << 20, "p2pd": 192 << 20, "stock": 64 << 20}
QUICK_SHARE = 4  # of a transfer's bytes with --quick: one in so many
STACKS = ("ours", "tls", "p2pd", "stock")
BASELINES = ("stock", "tls", "p2pd")
SENDERS = (1, 4)
REPEATS, QUICK_REPEATS = 5, 2
ANSWER_TIMEOUT_S, STOP_TIMEOUT_S, GOSSIP_TIMEOUT_S = 60.0, 10.0, 150.0


@dataclass(frozen=True, slots=True)
class GossipCase:
    stack: str
    hosts: int
    size_bytes: int
    per_second: float  # of each publisher
    seconds: float
    runs: int


GOSSIP = (
    GossipCase("ours", 8, 4_096, 2.0, 6.0, 5),
    GossipCase("stock", 8, 4_096, 2.0, 6.0, 2),
    GossipCase("ours", 8, 65_536, 1.0, 6.0, 2),
    GossipCase("ours", 32, 4_096, 0.5, 6.0, 3),
    GossipCase("ours", 64, 4_096, 0.5, 6.0, 2),
)
QUICK_GOSSIP = (
    GossipCase("ours", 8, 4_096, 2.0, 3.0, 1),
    GossipCase("ours", 32, 4_096, 0.5, 3.0, 1),
)


def main() -> None:
    arguments = _arguments()
    if hasattr(os, "sched_setaffinity"):
        core = arguments.core if arguments.core is not None else min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})  # the children inherit it
    results: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    if arguments.only != "gossip":
        results["streams"] = [asdict(row) for row in _streams(arguments.quick)]
    if arguments.only != "streams":
        cases = QUICK_GOSSIP if arguments.quick else GOSSIP
        results["gossip"] = [_gossip(case) for case in cases]
    _print(results)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bulk streams and gossip on loopback.")
    parser.add_argument("--quick", action="store_true", help="a minute instead of several")
    parser.add_argument("--only", choices=("streams", "gossip"))
    parser.add_argument("--core", type=int, help="the core that all share (default: the first)")
    return parser.parse_args()


# --- streams ---------------------------------------------------------------------------------


@dataclass(slots=True)
class StreamRow:
    """Results of one stack with so many senders; one value for each repetition."""

    stack: str
    senders: int
    missing: str | None = None  # why there are no values
    mb_per_s: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)


def _streams(quick: bool) -> list[StreamRow]:
    rows: list[StreamRow] = []
    there = p2pd.fetch()
    for senders in SENDERS:
        with ExitStack() as opened:
            current = [StreamRow(stack, senders) for stack in STACKS]
            running: list[tuple[StreamRow, list[Child]]] = []
            for row in current:
                if row.stack == "p2pd" and there is None:
                    row.missing = f"{p2pd.WHEEL} could not be fetched"
                else:
                    running.append((row, _transfer_processes(opened, row, there)))
            for repeat in range((QUICK_REPEATS if quick else REPEATS) + 1):
                for row, processes in running:
                    count = TRANSFER_BYTES[row.stack] // (QUICK_SHARE if quick else 1)
                    seconds, cpu_s = _transfer(processes, count // senders)
                    if repeat:  # the first warms up, and opens the windows
                        row.mb_per_s.append(count / MB / seconds)
                        row.cpu_s_per_gb.append(cpu_s / (count / GB))
            rows.extend(current)
    return rows


@dataclass(slots=True)
class Child:
    """A process that answers a line with a line."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")
        return line.strip()

    def tell(self, line: str) -> None:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(f"{line}\n")
        stdin.flush()

    def cpu_s(self) -> float:
        """Of the process and those that it started."""
        process = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


@contextmanager
def child(*arguments: str, **variables: str) -> Iterator[Child]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )
    try:
        yield Child(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # both kinds of children leave then
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _transfer_processes(opened: ExitStack, row: StreamRow, daemon: Path | None) -> list[Child]:
    """The receiver and then its senders, connected."""
    script = str(HERE / "stream_peers.py")
    variables = {"SWARM_P2PD": str(daemon)} if daemon else {}
    receiver = opened.enter_context(child(script, row.stack, "listen", **variables))
    address = receiver.line()
    senders = [
        opened.enter_context(child(script, row.stack, "send", address, **variables))
        for _ in range(row.senders)
    ]
    for sender in senders:
        assert sender.line() == "ready"
    return [receiver, *senders]


def _transfer(processes: Sequence[Child], count: int) -> tuple[float, float]:
    """Let each sender send so many bytes. Seconds until all have arrived, CPU seconds of all."""
    _, *senders = processes
    cpu_s = sum(process.cpu_s() for process in processes)
    started_s = time.perf_counter()
    for sender in senders:
        sender.tell(str(count))
    for sender in senders:
        sender.line()
    seconds = time.perf_counter() - started_s
    return seconds, sum(process.cpu_s() for process in processes) - cpu_s


# --- gossip ----------------------------------------------------------------------------------


def _gossip(case: GossipCase) -> dict[str, Any]:
    """Runs of one case, each in a process of its own."""
    runs: list[dict[str, Any]] = []
    command = [sys.executable, str(HERE / "gossip_hosts.py"), case.stack, str(case.hosts)]
    command += [str(case.size_bytes), str(case.per_second), str(case.seconds)]
    for _ in range(case.runs):
        done = subprocess.run(
            command, check=True, timeout=GOSSIP_TIMEOUT_S, capture_output=True, text=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    steady = [run["steady"] for run in runs]
    bursts = [burst for run in runs for burst in run["bursts"]]
    return {
        **asdict(case),
        "delivery": min(part["delivery"] for part in steady),
        "delivery_bursts": min(part["delivery"] for part in bursts),
        **{name: [part[name] for part in steady] for name in ("p50_ms", "p99_ms", "cpu_ms")},
        "duplicates": median(part["duplicates"] for part in steady),
        "burst_cpu_ms": [run["bursts"][0]["cpu_ms"] for run in runs],
    }


# --- printing --------------------------------------------------------------------------------


def _spread(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{median(values):.{digits}f} [{low}-{high}]"


def _print(results: dict[str, Any]) -> None:
    print(f"load {results['load_before']:.1f} before, {os.getloadavg()[0]:.1f} after; one core")
    if "streams" in results:
        _print_streams(results["streams"])
    if "gossip" in results:
        _print_gossip(results["gossip"])


def _print_streams(rows: Sequence[dict[str, Any]]) -> None:
    head = " ".join(f"{'/ ' + name:>7}" for name in BASELINES)
    print(f"\n{'streams':14} {'MB/s':>15} {head} {'CPU s/GB':>18} {head}")
    for row in rows:
        name = f"{row['stack']}, {row['senders']} to 1"
        if row["missing"]:
            print(f"{name:14} {row['missing']}")
            continue
        same = {each["stack"]: each for each in rows if each["senders"] == row["senders"]}
        columns = []
        for key, width, digits in (("mb_per_s", 15, 0), ("cpu_s_per_gb", 18, 2)):
            columns.append(f"{_spread(row[key], digits):>{width}}")
            columns += [_ratio(row[key], same[name][key]) for name in BASELINES]
        print(f"{name:14} " + " ".join(columns))


def _ratio(values: Sequence[float], baseline: Sequence[float]) -> str:
    return f"{median(values) / median(baseline):7.2f}" if baseline else f"{'-':>7}"


def _print_gossip(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"\n{'gossip':26} {'runs':>4} {'delivery':>8} {'bursts':>6} {'p50, ms':>8} {'p99, ms':>8} "
        f"{'duplicates':>10} {'CPU ms/delivery':>19} {'in a burst':>10}"
    )
    for row in rows:
        name = f"{row['stack']}, {row['hosts']} hosts, {row['size_bytes'] / 1024:.0f} KB"
        print(
            f"{name:26} {row['runs']:4} {row['delivery']:8.3f} {row['delivery_bursts']:6.3f} "
            f"{median(row['p50_ms']):8.1f} {median(row['p99_ms']):8.1f} {row['duplicates']:10.2f} "
            f"{_spread(row['cpu_ms'], 2):>19} {median(row['burst_cpu_ms']):10.2f}"
        )


if __name__ == "__main__":
    main()
