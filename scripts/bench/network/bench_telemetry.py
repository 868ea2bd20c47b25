"""What telemetry costs a node, and what a broker and a watch carry on one core.

    python bench_telemetry.py                 # both, as `make bench` does
    python bench_telemetry.py load [--nodes 1000] [--seconds 30]
    python bench_telemetry.py cost [--trials 6] [--rounds 400]

`load`: nodes that report each second through a few connections to mosquitto; broker and watch
share one core, the sender has the others. What did not come is counted by the gaps in what came.
`cost`: what a report takes of a node's process; then two loopback nodes, telemetry off and on in
turns, each run with the same rounds to do. Both need mosquitto.
"""

import argparse
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory

import paho.mqtt.client as mqtt
import psutil
import trio

from node.monitor.reporting import Extras, Reporter, Traffic
from node.monitor.telemetry import Sources, Telemetry, machine_of
from node.records.event_log import read_events
from node.records.records import PeerStatus, RoundDone, StatusSnapshot
from swarm.identity import Identity
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.fleet_view import Watch
from swarm.telemetry.metrics import METRICS
from swarm.telemetry.mqtt import Incoming, Subscriber, publisher_of
from swarm.telemetry.reports import (
    NodeReport,
    PeerTraffic,
    Topic,
    encode_report,
)
from swarm.transport.base import TransportCounters

RUN_ID = "bench-0123456789abcdef0123456789abcdef"
CONNECTIONS = 10
PEERS = tuple(Identity(bytes([i]) * 32).peer_id for i in range(8))  # in each report
WARM_S = 5.0
POLL_S = 1.0
WARM_ROUNDS = 50
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
RUN_TEXT = """
name = "sums"
environments = [{name = "scripted_sum", parameters = {max = 9}}]
sampling = {max_new_tokens = 16}
held_out = {tasks = 20}
"""


@contextmanager
def mosquitto(directory: Path, core: int | None = None) -> Iterator[tuple[Broker, int]]:
    """A broker on loopback, and its process id."""
    binary = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None:
        sys.exit("mosquitto is not installed: apt-get install mosquitto")
    port = free_port()
    config = directory / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nlog_type none\n")
    process = subprocess.Popen([binary, "-c", str(config)], stderr=subprocess.DEVNULL)
    if core is not None:
        psutil.Process(process.pid).cpu_affinity([core])
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.05)
    try:
        yield Broker.parse(f"mqtt://127.0.0.1:{port}"), process.pid
    finally:
        process.kill()
        process.wait()


# --- load --------------------------------------------------------------------------------------


def report_of(identity: Identity, sequence: int, now_s: float) -> NodeReport:
    """As a node of a middling swarm makes it."""
    peers = tuple(
        PeerTraffic(peer_id=peer, bytes_in=sequence, bytes_out=i, groups_trained=sequence)
        for i, peer in enumerate(PEERS)
    )
    return NodeReport(
        peer_id=identity.peer_id,
        run_id=RUN_ID,
        role="node",
        agent="bench",
        instance="i",
        sequence=sequence,
        sent_at_s=now_s,
        interval_s=1.0,
        phase="training",
        metrics={name: float(sequence) for name in list(METRICS)[:30] if not METRICS[name].label},
        labelled={"rejected_total": {"expired": 1.0, "malformed": 2.0}},
        peers=peers,
    )


def publish(broker: Broker, count: int, stop: Event) -> None:
    """`count` nodes report each second, through `CONNECTIONS` connections, as fast as paho goes."""
    nodes = [Identity(i.to_bytes(32, "big")) for i in range(1, count + 1)]
    topics = [str(Topic(RUN_ID, node.peer_id, "report")) for node in nodes]
    clients = []
    for _ in range(CONNECTIONS):
        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        client.connect(broker.host, broker.port)
        client.loop_start()
        clients.append(client)
    sequence, behind_s, begun_s = 0, 0.0, time.monotonic()
    while not stop.is_set():
        sequence += 1
        for i, node in enumerate(nodes):
            payload = encode_report(report_of(node, sequence, time.time()), node)
            clients[i % CONNECTIONS].publish(topics[i], payload, retain=True)
            due_s = begun_s + sequence - 1 + (i + 1) / count
            behind_s = max(behind_s, time.monotonic() - due_s)
            time.sleep(max(0.0, due_s - time.monotonic()))
    for client in clients:
        client.disconnect()
        client.loop_stop()
    print(
        f"sender: {sequence} reports of each of {count} nodes, {len(payload)} bytes, at most "
        f"{behind_s:.2f} s behind"
    )


def load(nodes: int, seconds: float) -> None:
    """Print what one core carried."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    with TemporaryDirectory() as directory, mosquitto(Path(directory), cores[-1]) as (broker, pid):
        stop = context.Event()
        sender = context.Process(target=publish, args=(broker, nodes, stop))
        sender.start()
        if len(cores) > 1:
            psutil.Process(sender.pid).cpu_affinity(cores[:-1])
        psutil.Process().cpu_affinity([cores[-1]])
        trio.run(watch, broker, nodes, seconds, psutil.Process(pid))
        stop.set()
        sender.join()


async def watch(broker: Broker, nodes: int, seconds: float, broker_process: psutil.Process) -> None:
    """Watch for `seconds` once all nodes are known, then print."""
    seen, late_s, own = Watch(), [], psutil.Process()

    def take(message: Incoming) -> None:
        report = seen.take(message.topic, message.payload, time.time(), retained=message.retained)
        if isinstance(report, NodeReport):
            late_s.append(time.time() - report.sent_at_s)

    async with trio.open_nursery() as nursery:
        subscriber = Subscriber(broker, ("swarm/+/+/report", "swarm/+/+/status"), Random(1))
        nursery.start_soon(subscriber.listen, take)
        while len(seen.nodes(time.time())) < nodes:  # noqa: ASYNC110  a watch announces nothing
            await trio.sleep(0.1)
        await trio.sleep(WARM_S)
        late_s.clear()
        lost, taken = seen.lost, seen.taken
        before = [sum(p.cpu_times()[:2]) for p in (own, broker_process)]
        for _ in range(int(seconds)):
            await trio.sleep(1.0)
            seen.nodes(time.time())
        spent = [
            sum(p.cpu_times()[:2]) - b for p, b in zip((own, broker_process), before, strict=True)
        ]
        late_s.sort()
        print(
            f"{nodes} nodes, {seconds:.0f} s: {seen.taken - taken} reports taken, "
            f"{seen.lost - lost} lost by gaps, {subscriber.dropped} dropped in our queue, "
            f"refused {dict(seen.dropped)}"
        )
        print(
            f"watch: {100 * spent[0] / seconds:.0f}% of a core, "
            f"{own.memory_info().rss / 2**20:.0f} MiB resident; broker: "
            f"{100 * spent[1] / seconds:.0f}%, {broker_process.memory_info().rss / 2**20:.0f} MiB"
        )
        print(
            f"from sent to taken: median {1000 * median(late_s):.1f} ms, 99% within "
            f"{1000 * late_s[int(0.99 * len(late_s))]:.1f} ms, at most {1000 * late_s[-1]:.1f} ms"
        )
        nursery.cancel_scope.cancel()


# --- cost --------------------------------------------------------------------------------------


def own_cost(broker: Broker, reports: int = 500) -> float:
    """CPU seconds that one report takes of a node's process, its MQTT thread included: made of a
    status with eight peers, looked through for alarms, signed, sent."""
    node = Identity(b"n" * 32)
    counters = TransportCounters()
    for i, peer in enumerate(PEERS):
        counters.count_in(f"/protocol/{i}", 100, peer)
    rows = tuple(PeerStatus(peer, ("/ip4/192.0.2.1/tcp/1",), "a", 1, 1, {}) for peer in PEERS)
    snapshot = StatusSnapshot(
        peer_id=node.peer_id, run_id=RUN_ID, agent="bench", model="tiny", parameters=1,
        engine="torch", uptime_s=1.0, phase="training", round=1, policy_version=1, local_groups=4,
        external_groups=4, external_groups_wanted=4, own_reward=0.5, held_out_passed=0.5,
        held_out_first=0.4, tokens_per_s=1.0, pool_groups=9, pool_foreign=5, pool_bytes=9,
        accepted=9, rejected={"expired": 1}, bytes_in=9, bytes_out=9,
        bytes_by_protocol=dict.fromkeys(counters.bytes_in, (9, 9)), memory_bytes=9,
        trainer_memory_bytes=9, addresses=(), peers=rows,
    )  # fmt: skip

    async def body() -> float:
        publisher = publisher_of(broker, node, RUN_ID, "i", Random(1))
        telemetry = Telemetry(
            Reporter(node.peer_id, RUN_ID, "node", "bench", instance="i", interval_s=2.0),
            node,
            RUN_ID,
            Sources(
                lambda: snapshot,
                lambda: Traffic(counters, PEERS),
                Extras,
                lambda: machine_of(Path()),
            ),
            {},
            interval_s=2.0,
            publisher=publisher,
            now_s=time.time,
            run_sync=trio.to_thread.run_sync,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher.run)
            while not publisher.connected:  # noqa: ASYNC110  its thread announces nothing
                await trio.sleep(0.05)
            before_s = time.process_time()
            for _ in range(reports):
                await telemetry.report()
                await trio.sleep(0.005)
            spent_s = time.process_time() - before_s
            assert publisher.dropped == 0
            nursery.cancel_scope.cancel()
        return spent_s / reports

    return float(trio.run(body))


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a node has come, and the CPU seconds of all its processes until then."""

    rounds: int
    cpu_s: float


def spell(directory: Path, rounds: int, flags: Sequence[str]) -> tuple[float, float]:
    """Median seconds and mean CPU seconds of a round of two nodes, the first rounds left out.

    Keys, seeds and I are set and J = 0, so that each run trains the same policies on the same
    tokens: all that differs is what `flags` say.
    """
    run_file = directory / "sums.toml"
    run_file.write_text(RUN_TEXT)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    common = [sys.executable, "-m", "node.cli", "join", "--run", str(run_file), "--threads", "1"]
    common += ["--seed", "1", "--local", "4", "--external", "0", "--rounds", str(rounds)]
    common += ["--no-lan", "--no-upnp", "--no-dht"]
    common += ["--evaluate-every", "0", "--checkpoint-every", "1000", *flags]
    keys = {name: Identity(name.encode() * 32) for name in ("a", "b")}
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    ways = {
        "a": ["--listen", address],
        "b": ["--listen", LOOPBACK, "--peer", f"{address}/p2p/{keys['a'].peer_id}"],
    }
    nodes: dict[Path, psutil.Popen] = {}
    found: dict[Path, list[Reading]] = {}
    with (directory / "log").open("wb") as log:
        for name, key in keys.items():
            data_dir = directory / name
            data_dir.mkdir()
            key.save(data_dir / "identity.pem")
            words = [*common, "--data-dir", str(data_dir), *ways[name]]
            nodes[data_dir] = psutil.Popen(words, stdout=log, stderr=log, env=environ)
            found[data_dir] = []
        while all(process.poll() is None for process in nodes.values()):
            time.sleep(POLL_S)
            for data_dir, process in nodes.items():
                found[data_dir].append(Reading(len(round_ends(data_dir)), tree_cpu_s(process)))
        for process in nodes.values():
            if process.wait():
                sys.exit(f"a node ended with status {process.returncode}: {log_end(directory)}")
    ends = [round_ends(data_dir)[WARM_ROUNDS:] for data_dir in nodes]
    wall_s = median(later - earlier for each in ends for earlier, later in pairwise(each))
    return wall_s, fmean(cpu_of_a_round(readings) for readings in found.values())


def cpu_of_a_round(readings: Sequence[Reading]) -> float:
    """CPU seconds, from the first warm reading to the last at which all processes lived."""
    warm = [each for each in readings if each.rounds >= WARM_ROUNDS]
    last = max(warm, key=lambda each: each.cpu_s)
    return (last.cpu_s - warm[0].cpu_s) / (last.rounds - warm[0].rounds)


def round_ends(data_dir: Path) -> list[float]:
    """Unix seconds at which each round ended, as the node's log has them so far."""
    path = data_dir / "events.jsonl"
    if not path.exists():
        return []
    return [at_s for at_s, record in read_events(path) if isinstance(record, RoundDone)]


def tree_cpu_s(process: psutil.Popen) -> float:
    """Of a process and all under it; those that have ended count no more."""
    spent_s = 0.0
    with suppress(psutil.NoSuchProcess):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                spent_s += sum(each.cpu_times()[:2])
    return spent_s


def log_end(directory: Path) -> str:
    """The last line that a node printed."""
    return ((directory / "log").read_text().splitlines() or ["nothing printed"])[-1]


def free_port() -> int:
    """Of loopback, free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cost(trials: int, rounds: int) -> None:
    """Print both modes by trial, and the median of the trials' differences."""
    with TemporaryDirectory() as directory, mosquitto(Path(directory)) as (broker, _):
        spent_s = own_cost(broker)
        print(f"one report: {1000 * spent_s:.2f} ms of CPU; every 2 s {100 * spent_s / 2:.3f}%")
        pairs: list[dict[str, tuple[float, float]]] = []
        for trial in range(trials):
            pair = {}
            for mode in ("off", "on") if trial % 2 == 0 else ("on", "off"):
                flags = ["--telemetry", str(broker)] if mode == "on" else []
                with TemporaryDirectory() as place:
                    wall_s, cpu_s = pair[mode] = spell(Path(place), rounds, flags)
                print(
                    f"trial {trial + 1} {mode:>3}: a round takes {1000 * wall_s:.2f} ms (median), "
                    f"{1000 * cpu_s:.2f} ms of CPU",
                    flush=True,
                )
            pairs.append(pair)
    for place_of, what in enumerate(("wall", "CPU")):
        changes = sorted(100 * (p["on"][place_of] / p["off"][place_of] - 1) for p in pairs)
        print(
            f"{what}: on over off {median(changes):+.2f}% in the median of {trials} trials, "
            f"from {changes[0]:+.2f} to {changes[-1]:+.2f}%"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("load", "cost"), help="default: both")
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    if options.what != "cost":
        load(options.nodes, options.seconds)
    if options.what != "load":
        cost(options.trials, options.rounds)


if __name__ == "__main__":
    main()
