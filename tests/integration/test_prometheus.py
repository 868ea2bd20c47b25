"""A real Prometheus asks a node's metrics page, and then answers every query of the dashboard."""

import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from node.observe.metrics_page import serve_metrics
from tests.brokers import free_port
from tests.grafana import plain, queries
from tests.integration.nodes import until
from tests.unit.test_metrics_page import Told, full_report

pytestmark = [pytest.mark.integration, pytest.mark.prometheus]

SCRAPES_MIN = 4  # a rate needs two
CONFIG = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
scrape_configs:
  - job_name: swarm
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


@contextmanager
def metrics_page() -> Iterator[int]:
    """A page in a thread of its own; its port."""
    found: list[int] = []
    ready, scope = threading.Event(), trio.CancelScope()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                unanswered = Counter({"slow": 1})
                port = await nursery.start(
                    serve_metrics, "127.0.0.1:0", full_report, unanswered, Told().tell
                )
                found.append(port)
                ready.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        trio.from_thread.run_sync(scope.cancel, trio_token=tokens[0])
        thread.join()


@contextmanager
def prometheus(directory: Path, page_port: int) -> Iterator[str]:
    """It, once it is ready; where it answers."""
    directory.mkdir()
    config, port = directory / "prometheus.yml", free_port()
    config.write_text(CONFIG.format(port=page_port))
    binary = shutil.which("prometheus")
    assert binary is not None
    words = [binary, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        try:
            return httpx.get(f"{url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready)
        yield url
    finally:
        process.kill()
        process.wait()


def asked(url: str, expr: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expr})
    found: dict[str, Any] = answer.json()
    return found


def test_prometheus_answers_every_query_of_the_dashboard(tmp_path: Path) -> None:
    with metrics_page() as port, prometheus(tmp_path / "prometheus", port) as url:

        def scraped() -> bool:
            result = asked(url, "count_over_time(swarm_info[5m])")["data"]["result"]
            return bool(result) and int(result[0]["value"][1]) >= SCRAPES_MIN

        until(scraped)
        for expr in queries():
            answer = asked(url, plain(expr))
            assert answer["status"] == "success", (expr, answer)
            assert answer["data"]["result"], expr
        assert asked(url, "rate(swarm_peers[")["status"] == "error"
        assert asked(url, "swarm_no_such_metric")["data"]["result"] == []
        up = asked(url, "up")["data"]["result"]
        assert [sample["value"][1] for sample in up] == ["1"]
