"""What a thousand reporting nodes cost the web page, and how late it shows them.

    python bench_dashboard.py [--nodes 1000] [--seconds 60] [--interval 1] [--browser]

Signed reports of simulated nodes, each a few kilobytes, go over one connection to Debian's
mosquitto, and from there to `swarm-coordinator dashboard`, which has one core for itself; the
broker, the nodes and whoever watches share the others. A client reads the stream of states.
Latency is from the moment that a report is made to the moment that the first state which shows it,
or a later one of its node, was read whole. With `--browser` a page in Chromium is open as well, and
its latency is to when the table's cell had changed, for the nodes that it shows. Nothing is lost
silently if what was published is what the watch took plus what it counts as lost.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import psutil
import trio

from swarm.identity import Identity
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.metrics import METRICS
from swarm.telemetry.mqtt import MqttPublisher, Outgoing
from swarm.telemetry.reports import (
    NodeReport,
    PeerTraffic,
    Topic,
    encode_report,
)

PATHS: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
PEERS: Final = 12  # of each node
WARM_UP_S: Final = 5.0
START_TIMEOUT_S: Final = 30.0
QUEUE_MAX: Final = 4_096
CONNECT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Result:
    """Latencies in seconds, memory in bytes."""

    nodes: int
    seconds: float
    report_bytes: int
    published: int
    publisher_dropped: int
    taken: int
    lost_counted: int
    dropped_counted: int
    frames: int
    frame_bytes: int
    latency_p50_s: float
    latency_p99_s: float
    latency_max_s: float
    page_p50_s: float | None
    page_max_s: float | None
    memory_max_bytes: int
    cpu_share: float


class Nodes:
    """Simulated nodes: what each has published, and when."""

    def __init__(self, count: int, interval_s: float) -> None:
        self.identities = [Identity.generate() for _ in range(count)]
        self.interval_s = interval_s
        self.made_s: dict[tuple[str, int], float] = {}  # by peer and sequence
        self.sequence = 0
        self.report_bytes = 0
        random = Random(7)
        ids = [each.peer_id for each in self.identities]
        self._peers = [random.sample(ids, min(PEERS, count)) for _ in ids]

    def messages(self, sequence: int) -> Iterator[Outgoing]:
        """The reports of all nodes at one round."""
        self.sequence = sequence
        for place, identity in enumerate(self.identities):
            now_s = time.time()
            metrics = {
                name: 1.5 + place + sequence
                for name, each in METRICS.items()
                if each.label is None and not name.startswith(("staleness", "predicted", "cost"))
            }
            report = NodeReport(
                peer_id=identity.peer_id,
                run_id="bench",
                role="node",
                agent="swarm-node/0.1.0",
                instance="1",
                sequence=sequence,
                sent_at_s=now_s,
                interval_s=self.interval_s,
                phase="generating",
                metrics={**metrics, "round": float(sequence)},
                labelled={"rejected_total": {"duplicate": float(sequence)}},
                peers=tuple(
                    PeerTraffic(peer_id=peer, bytes_in=sequence * 999, groups_trained=sequence)
                    for peer in self._peers[place]
                ),
            )
            payload = encode_report(report, identity)
            self.report_bytes = len(payload)
            self.made_s[identity.peer_id, sequence] = now_s
            yield Outgoing(str(Topic("bench", identity.peer_id, "report")), payload)


class Reader:
    """Whoever watches: when each node's report was first shown. In a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.shown_s: dict[tuple[str, int], float] = {}
        self.frames = 0
        self.frame_bytes = 0
        self.telemetry: dict[str, int] = {}
        self.wanted = True

    def run(self) -> None:
        last: dict[str, int] = {}
        with httpx.stream("GET", f"{self._url}api/stream", timeout=30.0, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self._take(line[6:], last, time.time())
                if not self.wanted:
                    return

    def _take(self, text: str, last: dict[str, int], now_s: float) -> None:
        state = json.loads(text)
        self.frames += 1
        self.frame_bytes = len(text)
        self.telemetry = state["telemetry"]
        columns = state["nodes"]["columns"]
        peer_at, round_at = columns.index("id"), columns.index("round")
        for row in state["nodes"]["rows"]:
            peer, number = row[peer_at], int(row[round_at])
            for each in range(last.get(peer, number - 1) + 1, number + 1):
                self.shown_s[peer, each] = now_s
            last[peer] = number


@contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator[None]:
    """End it with the block."""
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_broker(stack: ExitStack, folder: Path) -> int:
    """Debian's mosquitto on a free port, which is returned."""
    binary = shutil.which("mosquitto", path=PATHS)
    if binary is None:
        raise SystemExit("mosquitto is not installed: apt-get install mosquitto")
    port = free_port()
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n"
        "persistence false\n"
    )
    stack.enter_context(
        ended(subprocess.Popen([binary, "-c", str(config)], stderr=subprocess.DEVNULL))
    )
    time.sleep(1.0)
    return port


def start_page(stack: ExitStack, broker: str) -> tuple[psutil.Process, str]:
    """The dashboard on a core of its own, and its address."""
    flags = ["--broker", broker, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", "dashboard", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(ended(process))
    found = psutil.Process(process.pid)
    cores = psutil.Process().cpu_affinity()
    found.cpu_affinity(cores[:1])
    psutil.Process().cpu_affinity(cores[1:] or cores)
    assert process.stdout is not None
    line = process.stdout.readline()
    return found, line.removeprefix("the page is at ").partition(";")[0]


async def publish(broker: str, nodes: Nodes, rounds: int) -> int:
    """All nodes report for some rounds, evenly spread over each interval. Returns how many reports
    the publisher gave up itself."""

    def said(_: int) -> Outgoing:
        return Outgoing("swarm/bench", b"")  # no node's topic: the watch counts it

    publisher = MqttPublisher(Broker.parse(broker), said, said, Random(1), queue_max=QUEUE_MAX)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(publisher.run)
        await trio.sleep(CONNECT_S)
        if not publisher.connected:
            raise SystemExit(f"the broker does not answer: {publisher.failure}")
        began_s = trio.current_time()
        spacing_s = nodes.interval_s / len(nodes.identities)
        for sequence in range(1, rounds + 1):
            for place, message in enumerate(nodes.messages(sequence)):
                publisher.put(message)
                due_s = began_s + (sequence - 1) * nodes.interval_s + (place + 1) * spacing_s
                await trio.sleep(max(0.0, due_s - trio.current_time()))
        await trio.sleep(3.0)  # what is on its way arrives
        nursery.cancel_scope.cancel()
    return publisher.dropped


WATCH_CELLS: Final = """() => {
    window.cells = [];
    new MutationObserver(() => {
        const now = Date.now() / 1000;
        for (const row of document.querySelectorAll("#node-table tbody tr:not(.detail)")) {
            const [id, , round] = [...row.children].slice(0, 3).map((cell) => cell.textContent);
            window.cells.push([id, Number(round.replaceAll(",", "")), now]);
        }
    }).observe(document.querySelector("#node-table"), {
        subtree: true, childList: true, characterData: true,
    });
}"""


@contextmanager
def watched_by_chromium(url: str, wanted: bool) -> Iterator[list[tuple[str, int, float]]]:
    """What a page's cells said and when, once the block has ended."""
    cells: list[tuple[str, int, float]] = []
    if not wanted:
        yield cells
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.goto(url)
        page.evaluate(WATCH_CELLS)
        yield cells
        cells += [tuple(each) for each in page.evaluate("window.cells")]
        browser.close()


def page_latencies(
    cells: Sequence[tuple[str, int, float]], nodes: Nodes, first: int
) -> list[float]:
    """From when a report was made to when a cell first said it, or a later one of its node."""
    by_short = {identity.peer_id[-8:]: identity.peer_id for identity in nodes.identities}
    latencies, last = [], dict[str, int]()
    for name, number, now_s in cells:
        peer = by_short.get(name)
        if peer is None or number <= last.get(peer, first - 1):
            continue
        made = (
            nodes.made_s.get((peer, each))
            for each in range(max(first, last.get(peer, number - 1) + 1), number + 1)
        )
        latencies += [now_s - each for each in made if each is not None]
        last[peer] = number
    return latencies


# Long: one measurement from start to end.
def measure(count: int, seconds: float, interval_s: float, with_browser: bool) -> Result:
    """One run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = f"mqtt://127.0.0.1:{start_broker(stack, folder)}"
        process, url = start_page(stack, broker)
        nodes, reader = Nodes(count, interval_s), Reader(url)
        thread = threading.Thread(target=reader.run, daemon=True)
        thread.start()
        memory: list[int] = []
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.5):
                memory.append(process.memory_info().rss)

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        rounds = round((WARM_UP_S + seconds) / interval_s)
        before, began_s = process.cpu_times(), time.monotonic()
        with watched_by_chromium(url, with_browser) as cells:
            dropped: list[int] = []
            sender = threading.Thread(
                target=lambda: dropped.append(trio.run(publish, broker, nodes, rounds))
            )
            sender.start()
            sender.join()
        after, elapsed_s = process.cpu_times(), time.monotonic() - began_s
        done.set()
        reader.wanted = False
        thread.join(START_TIMEOUT_S)
        first = round(WARM_UP_S / interval_s) + 1
        late = sorted(
            shown_s - nodes.made_s[key]
            for key, shown_s in reader.shown_s.items()
            if key[1] >= first and key in nodes.made_s
        )
        on_page = sorted(page_latencies(cells, nodes, first))
        told = reader.telemetry
        return Result(
            nodes=count,
            seconds=seconds,
            report_bytes=nodes.report_bytes,
            published=count * rounds,
            publisher_dropped=dropped[0],
            taken=told["reports_taken"],
            lost_counted=told["reports_lost"],
            dropped_counted=told["messages_dropped"]
            + sum(value for name, value in told.items() if name.startswith("dropped_"))
            - told.get("dropped_topic", 0),
            frames=reader.frames,
            frame_bytes=reader.frame_bytes,
            latency_p50_s=late[len(late) // 2],
            latency_p99_s=late[int(0.99 * len(late))],
            latency_max_s=late[-1],
            page_p50_s=on_page[len(on_page) // 2] if on_page else None,
            page_max_s=on_page[-1] if on_page else None,
            memory_max_bytes=max(memory),
            cpu_share=(after.user + after.system - before.user - before.system) / elapsed_s,
        )


def table(r: Result) -> str:
    """The result for people."""
    silent = r.published - r.publisher_dropped - r.taken - r.lost_counted
    state = f"{r.latency_p50_s:.2f} / {r.latency_p99_s:.2f} / {r.latency_max_s:.2f}"
    lines = [
        ("nodes, each report", f"{r.nodes:,}, {r.report_bytes:,} bytes"),
        ("published, taken", f"{r.published:,}, {r.taken:,}"),
        ("counted as lost, as dropped", f"{r.lost_counted:,}, {r.dropped_counted:,}"),
        ("lost silently", f"{silent:,}"),
        ("a state read, p50 / p99 / max (s)", state),
    ]
    if r.page_p50_s is not None:
        lines.append(("the page's cell, p50 / max (s)", f"{r.page_p50_s:.2f} / {r.page_max_s:.2f}"))
    lines += [
        ("states read, bytes each", f"{r.frames:,}, {r.frame_bytes:,}"),
        ("memory of the dashboard, at most", f"{r.memory_max_bytes / 1e6:.0f} MB"),
        ("of its core", f"{r.cpu_share:.0%}"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="How late a web page shows what many nodes report."
    )
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--browser", action="store_true", help="measure a page in Chromium as well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.nodes, options.seconds, options.interval, options.browser)
    print(json.dumps(asdict(result)) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
