"""The metrics endpoint: what Prometheus reads there, and what a client can do to it."""

import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import httpx
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from node.observe import metrics_page
from node.observe.metrics_page import (
    NO_HTTP,
    OUR_FAULT,
    REQUEST_BYTES_MAX,
    page,
    serve_metrics,
)
from node.system.bounded_server import CLIENTS_MAX, CROWDED
from swarm.errors import ConfigError
from swarm.telemetry.metrics import METRICS, PEER_METRICS
from swarm.telemetry.reports import (
    ADVICE,
    Alarm,
    AlarmReport,
    NodeReport,
    PeerTraffic,
)
from tests.grafana import dashboard
from tests.support import run

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
HOSTILE = 'a"b\\c\nd<script>'


def full_report() -> NodeReport:
    return NodeReport(
        peer_id="p",
        run_id="r",
        role="node",
        agent=HOSTILE,
        instance="i",
        sequence=1,
        sent_at_s=1.0,
        interval_s=2.0,
        metrics={name: 1.5 for name, metric in METRICS.items() if metric.label is None},
        labelled={name: {HOSTILE: 2.0} for name, metric in METRICS.items() if metric.label},
        peers=(PeerTraffic(peer_id="q", bytes_in=7),),
        alarms=(
            AlarmReport(
                kind=Alarm.DISK_LOW, level="critical", text="t", advice=ADVICE[Alarm.DISK_LOW]
            ),
        ),
    )


def samples(text: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def names() -> set[str]:
    """Every name that the page may have, as Prometheus sees it."""
    own = {"info", "alarm", "unanswered_total"}
    return {f"swarm_{name}" for name in {*METRICS, *PEER_METRICS, *own}}


def test_all_metrics_are_there_under_their_names() -> None:
    found = samples(page(full_report, {"slow": 3}))
    assert set(found) == names()
    assert found["swarm_round_s"] == [({}, 1.5)]
    assert found["swarm_rejected_total"] == [({"reason": HOSTILE}, 2.0)]
    assert found["swarm_peer_bytes_in_total"] == [({"peer": "q"}, 7.0)]
    assert found["swarm_alarm"] == [({"kind": "disk_low", "level": "critical"}, 1.0)]
    assert found["swarm_unanswered_total"] == [({"reason": "slow"}, 3.0)]
    assert found["swarm_info"][0][0]["agent"] == HOSTILE


def test_what_is_not_reported_is_not_there() -> None:
    assert page(lambda: None, {"slow": 3}) == b""
    bare = full_report().model_copy(update={"metrics": {"round": 1.0}, "labelled": {}})
    assert "swarm_peers" not in samples(page(lambda: bare, {}))


def test_a_dashboard_asks_for_nothing_that_is_not_there() -> None:
    shown = dashboard()
    asked = [each["expr"] for panel in shown["panels"] for each in panel["targets"]]
    asked += [each["query"]["query"] for each in shown["templating"]["list"][1:]]
    used = {name for text in asked for name in re.findall(r"\bswarm_[a-z0-9_]+", text)}
    assert used <= names()
    assert all(re.search(r"\bswarm_[a-z0-9_]+", text) for text in asked)
    labels = {label for text in asked for label in re.findall(r"by \(([a-z_]+)\)", text)}
    assert labels <= {metric.label for metric in METRICS.values()} | {"role", "peer"}
    ids = [panel["id"] for panel in shown["panels"]]
    assert len(set(ids)) == len(ids)


class Told:
    """What the node was told, and who got no answer."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.unanswered: Counter[str] = Counter()

    async def tell(self, text: str) -> None:
        self.texts.append(text)


def served(body: Callable[[int], Awaitable[None]], told: Told | None = None) -> None:
    told = told or Told()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            port = await nursery.start(
                serve_metrics, "127.0.0.1:0", full_report, told.unanswered, told.tell
            )
            await body(port)
            nursery.cancel_scope.cancel()

    run(main)


def test_a_page_is_served_and_nothing_else() -> None:
    async def body(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            found = await client.get("/metrics?x=1")
            assert (found.status_code, found.content) == (200, page(full_report, {}))
            assert found.headers["content-type"].startswith("text/plain")
            assert (await client.get("/")).status_code == 404
            assert (await client.post("/metrics", content=b"x")).status_code == 405

    served(body)


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_page_of_another_host_reads_nothing(method: str) -> None:
    async def body(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for headers, status in (
                ({"host": f"evil.example:{port}"}, 421),
                ({"host": "192.0.2.1"}, 421),
                ({"origin": "http://evil.example"}, 403),
                ({"origin": "null"}, 403),
            ):
                for path in ("/metrics", "/"):
                    found = await client.request(method, path, headers=headers)
                    assert found.status_code == status
                    assert b"swarm_" not in found.content
            for host in ("localhost", f"localhost:{port}", "127.0.0.1", "[::1]:9"):
                found = await client.get("/metrics", headers={"host": host})
                assert found.status_code == 200

    served(body)


def test_who_scrapes_by_a_name_that_was_given_or_by_an_address_is_answered() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            serve = partial(serve_metrics, names=["node1.lan"])
            told = Told()
            where = "0.0.0.0:0"
            port = await nursery.start(serve, where, full_report, told.unanswered, told.tell)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for host, status in (
                    ("node1.lan:9464", 200), ("192.0.2.1:1", 200), ("[2001:db8::1]:9464", 200),
                    ("localhost", 200), ("node2.lan", 421),
                ):  # fmt: skip
                    found = await client.get("/metrics", headers={"host": host})
                    assert found.status_code == status, host
            nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.parametrize("path", ["/metrics", "/"])
@pytest.mark.parametrize("method", [*METHODS, "BREW"])
def test_no_method_ends_the_node(method: str, path: str) -> None:
    async def body(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            expected = await client.get(path)
            found = await client.request(method, path)
            if method in ("GET", "HEAD"):
                assert found.status_code == expected.status_code
                assert found.headers["content-length"] == str(len(expected.content))
                assert found.content == (expected.content if method == "GET" else b"")
            else:
                assert found.status_code == (405 if path == "/metrics" else 404)
            assert (await client.get("/metrics")).status_code == 200

    served(body)


@pytest.mark.parametrize(
    ("sent", "counted"),
    [
        (b"", {}),
        (b"\x16\x03\x01\r\n", {NO_HTTP: 1}),
        (b"GET /metrics\r\n\r\n", {NO_HTTP: 1}),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000, {NO_HTTP: 1}),
    ],
)
def test_who_speaks_no_http_is_let_go_and_counted(sent: bytes, counted: dict[str, int]) -> None:
    assert REQUEST_BYTES_MAX < 100_000
    told = Told()

    async def body(port: int) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with suppress(trio.BrokenResourceError):  # it hung up
                await stream.send_all(sent)
                await stream.send_eof()
                assert b"200" not in await stream.receive_some(10_000)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200

    served(body, told)
    assert told.unanswered == counted
    assert told.texts == []


def test_a_bug_in_our_answer_ends_nothing_and_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "CONTENT_TYPE_LATEST", "no\nheader")
    told = Told()

    async def body(port: int) -> None:
        async with httpx.AsyncClient() as client:
            for _ in range(3):
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get(f"http://127.0.0.1:{port}/metrics")

    served(body, told)
    assert told.unanswered == {OUR_FAULT: 3}
    assert len(told.texts) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
def test_silent_clients_of_one_address_keep_no_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "ANSWER_TIMEOUT_S", 1_000.0)
    told = Told()

    async def body(port: int) -> None:
        silent = [
            await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.0.2")
            for _ in range(CLIENTS_MAX)
        ]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200
        for stream in silent:
            await trio.aclose_forcefully(stream)

    served(body, told)
    assert told.unanswered[CROWDED] == 1


def test_an_address_that_is_taken_is_told_of() -> None:
    async def body(port: int) -> None:
        with pytest.raises(ConfigError, match="--metrics-listen"):
            await serve_metrics(f"127.0.0.1:{port}", full_report, Counter(), Told().tell)

    served(body)
