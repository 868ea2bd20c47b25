"""The node's last report for Prometheus at `/metrics`.

The only file with prometheus_client and h11. `swarm.telemetry.web_hosts` says which names it
answers to.
"""

import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import h11
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from node.system.bounded_server import CLIENTS_MAX, serve_answers
from swarm.errors import ConfigError
from swarm.telemetry.metrics import METRICS, PEER_METRICS, measured
from swarm.telemetry.reports import NodeReport
from swarm.telemetry.web_hosts import WebHosts

ANSWER_TIMEOUT_S: Final = 5.0
REQUEST_BYTES_MAX: Final = 16_384
READ_BYTES: Final = 4_096

NO_HTTP: Final = "no_http"  # why a client got no answer, besides those of `serve_answers`
OUR_FAULT: Final = "our_fault"

Latest = Callable[[], NodeReport | None]


@dataclass(eq=False)
class _Report(Collector):
    """A report as Prometheus' client sees it. What the report lacks is not there."""

    latest: Latest
    unanswered: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        report = self.latest()
        if report is None:
            return
        info = {"peer_id": report.peer_id, "run_id": report.run_id, "role": report.role}
        yield InfoMetricFamily("swarm", "the node", value=info | {"agent": report.agent})
        for name, metric in METRICS.items():
            made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            labels = [metric.label] if metric.label else []
            family = made(f"swarm_{name}", metric.help, labels=labels)
            if metric.label is None and name in report.metrics:
                family.add_metric([], report.metrics[name])
            for value, amount in report.labelled.get(name, {}).items():
                family.add_metric([value], amount)
            if family.samples:
                yield family
        peers = [(peer.peer_id, measured(peer)) for peer in report.peers]
        for name, metric in PEER_METRICS.items():
            family = CounterMetricFamily(f"swarm_{name}", metric.help, labels=["peer"])
            for peer_id, found in peers:
                family.add_metric([peer_id], found[name])
            yield family
        labels = ["kind", "level"]
        alarms = GaugeMetricFamily("swarm_alarm", "1: the alarm stands", labels=labels)
        for alarm in report.alarms:
            alarms.add_metric([alarm.kind, alarm.level], 1.0)
        yield alarms
        told = "who asked for this page or the status in vain"
        unanswered = CounterMetricFamily("swarm_unanswered_total", told, labels=["reason"])
        for reason, count in self.unanswered.items():
            unanswered.add_metric([reason], float(count))
        yield unanswered


def page(latest: Latest, unanswered: Mapping[str, int]) -> bytes:
    """The last report in Prometheus' text format; empty before there is one."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Report(latest, unanswered))
    return generate_latest(registry)


async def serve_metrics(
    address: str,
    latest: Latest,
    unanswered: Counter[str],
    tell: Callable[[str], Awaitable[None]],
    *,
    names: Sequence[str] = (),
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer at `host:port` until cancelled; reports the port once it listens.

    `unanswered`: as of `serve_answers`. Our own answer may break HTTP by a bug: `tell` gets the
    first, and all are counted. `names`: as of `WebHosts`.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    try:
        listeners = await trio.open_tcp_listeners(
            int(port), host=host.strip("[]"), backlog=CLIENTS_MAX
        )
    except OSError as error:
        raise ConfigError(
            f"--metrics-listen {address}: {error.strerror}; choose another one"
        ) from None

    bound_ip = listeners[0].socket.getsockname()[0]
    hosts = WebHosts(bound_ip, [socket.gethostname(), *names])

    async def answer(stream: trio.SocketStream) -> None:
        try:
            await _answer(stream, lambda: page(latest, unanswered), hosts)
        except h11.RemoteProtocolError:
            unanswered[NO_HTTP] += 1
        except h11.LocalProtocolError as bug:
            unanswered[OUR_FAULT] += 1
            if unanswered[OUR_FAULT] == 1:
                await tell(f"the metrics page answered what is no HTTP: {bug}")

    task_status.started(listeners[0].socket.getsockname()[1])
    await serve_answers(answer, listeners, unanswered, timeout_s=ANSWER_TIMEOUT_S)


async def _answer(stream: trio.SocketStream, made: Callable[[], bytes], hosts: WebHosts) -> None:
    """
    Raises:
        RemoteProtocolError: of h11: the client speaks no HTTP.
        LocalProtocolError: of h11: we do not.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await stream.receive_some(READ_BYTES))
    if not isinstance(event, h11.Request):
        return  # it hung up without a word
    status, body = _judge(event, hosts)
    if status == 200:
        body = made()
    headers = [
        *([("allow", "GET, HEAD")] if status == 405 else []),
        ("content-type", CONTENT_TYPE_LATEST if status == 200 else "text/plain; charset=utf-8"),
        ("content-length", str(len(body))),
        ("connection", "close"),
    ]
    head = connection.send(h11.Response(status_code=status, headers=headers))
    is_head = event.method == b"HEAD"  # the headers are those of GET, and nothing follows them
    data = None if is_head else connection.send(h11.Data(data=body))
    end = connection.send(h11.EndOfMessage())
    await stream.send_all(b"".join(each for each in (head, data, end) if each))


def _judge(request: h11.Request, hosts: WebHosts) -> tuple[int, bytes]:
    """The status of the answer, and its text where it is not the page."""
    given = {
        name: [value.decode("latin-1") for key, value in request.headers if key == name]
        for name in (b"host", b"origin")
    }
    refusal = hosts.objection(given[b"host"], given[b"origin"])
    if refusal is not None:
        return refusal[0], refusal[1].encode() + b"\n"
    if request.target.partition(b"?")[0] != b"/metrics":
        return 404, b"there is /metrics here, and nothing else\n"
    if request.method not in (b"GET", b"HEAD"):
        return 405, b"GET it\n"
    return 200, b""
