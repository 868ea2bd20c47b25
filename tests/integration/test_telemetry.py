"""Real nodes that are watched: what is told of them is what they say of themselves."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import httpx
import pytest
import trio

from node.observe.records import StatusSnapshot
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.fleet_view import Gone, NodeView, Watch
from swarm.telemetry.mqtt import Incoming, Subscriber
from swarm.telemetry.reports import NodeReport
from tests.brokers import open_mosquitto
from tests.integration.nodes import MakeFed, MakeNode, until


def now_s() -> float:
    return datetime.now(UTC).timestamp()


pytestmark = [pytest.mark.integration, pytest.mark.broker]


class Watcher:
    """A watch in a thread of its own, fed by a broker."""

    def __init__(self, broker: Broker) -> None:
        self.watch = Watch()
        self._subscriber = Subscriber(broker, ("swarm/+/+/report", "swarm/+/+/status"), Random(1))
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=trio.run, args=(self._run,))

    async def _run(self) -> None:
        def take(message: Incoming) -> None:
            self.watch.take(message.topic, message.payload, now_s(), retained=message.retained)

        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            await self._subscriber.listen(take)

    @contextmanager
    def watching(self) -> Iterator["Watcher"]:
        self._thread.start()
        try:
            yield self
        finally:
            trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
            self._thread.join()

    def view(self, peer: str) -> NodeView | None:
        return next((v for v in self.watch.nodes(now_s()) if v.report.peer_id == peer), None)

    def report(self, peer: str) -> NodeReport | None:
        view = self.view(peer)
        return None if view is None else view.report


def test_what_is_watched_is_what_nodes_say_of_themselves(
    tmp_path: Path, make_node: MakeNode
) -> None:
    with open_mosquitto(tmp_path / "broker") as mosquitto:
        broker = Broker.parse(f"mqtt://127.0.0.1:{mosquitto.port}")
        flags = ("--telemetry", str(broker), "--telemetry-interval", "0.5")
        with Watcher(broker).watching() as watcher:
            ann = make_node("ann", *flags, "--metrics-listen", "127.0.0.1:0").start()
            ben = make_node("ben", *flags).start("--peer", ann.address())
            ann_id, ben_id = (ann.until(node.status).peer_id for node in (ann, ben))
            ann.until(lambda: ann.foreign_trained() > 0)

            def feeds() -> bool:
                """Ann's report tells of Ben's groups and bytes."""
                report = watcher.report(ann_id)
                rows = [row for row in report.peers if row.peer_id == ben_id] if report else []
                return any(row.groups_trained and row.bytes_in and row.connected for row in rows)

            ann.until(feeds)
            before, after = agreeing(watcher, ann_id, lambda: ann.until(ann.status))
            report = watcher.report(ann_id)
            assert report is not None
            for name, field in (
                ("accepted_total", "accepted"),
                ("bytes_in_total", "bytes_in"),
                ("bytes_out_total", "bytes_out"),
                ("round", "round"),
            ):
                assert getattr(before, field) <= report.metrics[name] <= getattr(after, field)

            line = next(line for line in ann.said().splitlines() if "/metrics" in line)
            text = httpx.get(line.rpartition(" ")[2]).text
            assert f'peer_id="{ann_id}"' in text
            assert "swarm_bytes_in_total " in text

            ben.kill()
            until(lambda: getattr(watcher.view(ben_id), "gone", None) is Gone.OFFLINE)
            assert ann.interrupt() == 0
            until(lambda: getattr(watcher.view(ann_id), "gone", None) is Gone.OFFLINE)
            assert watcher.watch.lost == 0
            assert watcher.watch.dropped == {}


def agreeing(watcher: Watcher, peer: str, status: object) -> tuple[StatusSnapshot, StatusSnapshot]:
    """The node's status before and after a report that was made between the two."""
    assert callable(status)
    before = status()
    first = watcher.report(peer)
    assert first is not None

    def two_later() -> bool:
        report = watcher.report(peer)
        return report is not None and report.sequence >= first.sequence + 2

    until(two_later)
    return before, status()


@pytest.mark.long
def test_a_learner_and_its_worker_are_watched(tmp_path: Path, make_fed: MakeFed) -> None:
    """The learner tells of its worker, and the worker of the version that it was sent."""
    with open_mosquitto(tmp_path / "broker") as mosquitto, ExitStack() as stack:
        broker = Broker.parse(f"mqtt://127.0.0.1:{mosquitto.port}")
        watcher = stack.enter_context(Watcher(broker).watching())
        learner, worker = make_fed("--telemetry", str(broker), "--telemetry-interval", "0.5")
        learner_id, worker_id = (n.until(n.status).peer_id for n in (learner, worker))

        def fed() -> bool:
            """The learner has trained on what the worker handed in, and says so."""
            report = watcher.report(learner_id)
            rows = [row for row in report.workers if row.peer_id == worker_id] if report else []
            return bool(
                report
                and report.role == "learner"
                and {"staleness_max_steps", "in_flight_groups", "idle_ratio"} <= set(report.metrics)
                and any(row.admitted and row.phase in ("working", "idle") for row in rows)
            )

        def sent() -> bool:
            """A later version than the first came to the worker, and all of it is there."""
            report = watcher.report(worker_id)
            return bool(
                report
                and report.role == "worker"
                and report.metrics.get("policy_version", 0) >= 2
                and {"paused_s", "broadcast_s", "tokens_per_s"} <= set(report.metrics)
                and report.broadcast
                and report.broadcast.version >= 2
            )

        learner.until(fed)
        worker.until(sent)
        assert watcher.watch.dropped == {}
