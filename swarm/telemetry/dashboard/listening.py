"""Feeds a broker's messages into a `Watch`, and keeps the page's history in a file."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

from pydantic import ValidationError

from swarm.storage import write_whole
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.dashboard.page_state import SHOWN_S, PageState, ReportSource
from swarm.telemetry.fleet_view import Watch
from swarm.telemetry.mqtt import Incoming, Subscriber
from swarm.telemetry.reports import NodeReport

TOPICS: Final = ("swarm/+/+/report", "swarm/+/+/status")


class Listening:
    def __init__(
        self, broker: Broker, watch: Watch, *, unix_s: Callable[[], float], rng: Random
    ) -> None:
        self._name = str(broker)
        self._watch = watch
        self._unix_s = unix_s
        self._subscriber = Subscriber(broker, TOPICS, rng)
        self._heard_s = unix_s()  # when it was connected, for all that was seen

    async def run(self) -> None:
        """Listen until cancelled, reconnecting as needed."""
        await self._subscriber.listen(self._take)

    def _take(self, message: Incoming) -> None:
        self._watch.take(message.topic, message.payload, self._unix_s(), retained=message.retained)

    def source(self) -> ReportSource:
        """The broker, for the page; called once a frame."""
        now_s, connected = self._unix_s(), self._subscriber.connected
        if connected:
            self._heard_s = now_s
        away_s = None if connected else max(0.0, now_s - self._heard_s)
        return ReportSource(self._name, connected, away_s, self._name)

    @property
    def failure(self) -> str:
        """Why the last try to connect failed; empty: it went well."""
        return self._subscriber.failure

    def counters(self) -> Mapping[str, int]:
        return {
            "messages_received": self._subscriber.received,
            "messages_dropped": self._subscriber.dropped,
            "connections_tried": self._subscriber.connections,
        }


# The file from which a page resumes: its curves and the last report of each node.

FORM: Final = 2
NODES_KEPT_MAX: Final = 1_024
FILE_BYTES_MAX: Final = 32 << 20


def read_kept(path: Path) -> bytes | None:
    """The content that was written last; None: there is none. Blocking."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_kept(path: Path, content: bytes) -> None:
    """Replace the file. Blocking; an error is ignored, because a page works without history."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, content)


def kept(watch: Watch, state: PageState, now_s: float) -> bytes:
    """The curves and the nodes that are shown at `now_s`, unix time."""
    nodes = [node for node in watch.nodes(now_s) if node.heard_s <= SHOWN_S][:NODES_KEPT_MAX]
    told = {
        "form": FORM,
        "unix_s": now_s,
        "curves": state.curves(),
        "nodes": [
            {
                "report": node.report.model_dump(mode="json"),
                "heard_at_s": now_s - node.heard_s,
                "gone": node.gone is not None,
            }
            for node in nodes
        ],
    }
    return json.dumps(told, allow_nan=False, separators=(",", ":")).encode()


def restore(content: bytes, watch: Watch, state: PageState, now_s: float) -> bool:
    """Go on with the content of `kept`; False, with nothing changed, if it is something else."""
    if len(content) > FILE_BYTES_MAX:
        return False
    try:
        told = json.loads(content)
        if told["form"] != FORM or not now_s - float(told["unix_s"]) >= 0:
            return False
        found = [
            (
                NodeReport.model_validate_json(json.dumps(node["report"])),
                min(now_s, float(node["heard_at_s"])),
                bool(node["gone"]),
            )
            for node in told["nodes"][:NODES_KEPT_MAX]
        ]
        state.go_on(told["curves"], float(told["unix_s"]), now_s)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError):
        return False
    for report, heard_at_s, gone in reversed(found):
        watch.remember(report, heard_at_s, now_s, gone=gone)
    return True
