"""`swarm-node monitor` as a person starts it: its own broker, its page, and its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest
import trio

from node.observe.monitoring import embedded_broker
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.fleet_view import Gone, Watch
from swarm.telemetry.mqtt import Incoming, Outgoing, Subscriber, publisher_of
from swarm.telemetry.reports import NodeReport, Topic, encode_report
from tests.brokers import free_port, open_mosquitto
from tests.integration.nodes import WAIT_S, all_gone, until
from tests.support import run

NODE = Identity(b"n" * 32)
RUN = "demo-0123456789abcdef0123456789abcdef"

pytestmark = pytest.mark.integration


def report(sequence: int) -> Outgoing:
    made = NodeReport(
        peer_id=NODE.peer_id,
        run_id=RUN,
        role="node",
        instance="i",
        sequence=sequence,
        sent_at_s=datetime.now(UTC).timestamp(),  # who left long ago is not shown
        interval_s=60.0,
        metrics={"round": float(sequence)},
    )
    return Outgoing(str(Topic(RUN, NODE.peer_id, "report")), encode_report(made, NODE))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one page has seen is not the next one's, where both have one port after the other."""
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path))


@contextmanager
def monitor(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and the page's address."""
    words = [sys.executable, "-u", "-m", "node.cli", "monitor", "--listen", "127.0.0.1:0", *flags]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if b"the page is at" in line:
                yield process, line.decode().split()[-1]
                break
        else:
            raise AssertionError(f"it ended with {process.wait()}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def state(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}api/state").json()
    return found


def publish(broker: Broker) -> None:
    """One report, and its node leaves."""

    async def body() -> None:
        sending = publisher_of(broker, NODE, RUN, "i", Random(1))
        sending.put(report(3))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sending.run)
            with trio.fail_after(WAIT_S):
                while not sending.published:  # noqa: ASYNC110  its thread announces nothing
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()

    run(body, timeout_s=WAIT_S)


def test_the_page_shows_who_reports_to_its_own_broker() -> None:
    port = free_port()
    with monitor("--broker-listen", f"127.0.0.1:{port}") as (process, url):
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 1
        publish(Broker.parse(f"mqtt://127.0.0.1:{port}"))
        until(lambda: state(url)["headline"]["nodes"] == 1)
        assert state(url)["source"]["connected"]
        assert state(url)["runs"] == [RUN]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert all_gone(children)


def test_what_it_has_seen_is_there_after_a_restart() -> None:
    flags = ("--broker-listen", f"127.0.0.1:{free_port()}")
    with monitor(*flags) as (process, url):
        publish(Broker.parse(f"mqtt://{flags[1]}"))
        until(lambda: state(url)["headline"]["nodes"] == 1)
        until(lambda: len(state(url)["history"]["recent"]["t"]) > 2)
        seen = state(url)["history"]["recent"]["t"][:2]
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    with monitor(*flags) as (_, url):
        until(lambda: httpx.get(f"{url}api/state").status_code == 200)
        again = state(url)
        assert again["history"]["recent"]["t"][:2] == seen
        assert again["headline"]["nodes"] == 1  # its broker has forgotten it
        assert again["runs"] == [RUN]
    with monitor(*flags, "--run-id", "another-0123456789abcdef0123456789abcdef") as (_, url):
        until(lambda: httpx.get(f"{url}api/state").status_code == 200)
        assert state(url)["headline"]["nodes"] == 0


def test_its_broker_ends_when_it_is_killed() -> None:
    with monitor("--broker-listen", f"127.0.0.1:{free_port()}") as (process, _):
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 1
        process.kill()
        assert all_gone(children)


@pytest.mark.broker
def test_the_page_shows_who_reports_to_another_broker_and_that_it_died(tmp_path: Path) -> None:
    with open_mosquitto(tmp_path) as mosquitto:
        broker = f"mqtt://127.0.0.1:{mosquitto.port}"
        with monitor("--broker", broker, "--run-id", RUN) as (process, url):
            assert psutil.Process(process.pid).children() == []
            publish(Broker.parse(broker))
            until(lambda: state(url)["headline"]["nodes"] == 1)
            mosquitto.kill()
            until(lambda: not state(url)["source"]["connected"])
            mosquitto.start()
            until(lambda: state(url)["source"]["connected"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--broker", "host"), "mqtt://"),
        (("--broker", "mqtt://127.0.0.1:1", "--broker-listen", "127.0.0.1:2"), "--broker-listen"),
        (("--broker-listen", "0.0.0.0:1883"), "mosquitto"),
        (("--broker-listen", "[::]:1883"), "mosquitto"),
        (("--broker-listen", "broker.example:1883"), "mosquitto"),
        (("--broker", "mqtt://127.0.0.1:1", "--listen", "nowhere"), "nowhere"),
        (("--broker", "mqtt://127.0.0.1:1", "--broker-ca", "/x"), "mqtts"),
    ],
)
def test_wrong_input_is_told_in_one_line(flags: tuple[str, ...], named: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "node.cli", "monitor", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_is_taken_is_told_of() -> None:
    async def body() -> None:
        async with embedded_broker(f"127.0.0.1:{free_port()}") as broker:
            with pytest.raises(ConfigError, match="--broker-listen"):
                async with embedded_broker(f"{broker.host}:{broker.port}"):
                    pass

    run(body, timeout_s=WAIT_S)


def test_a_monitor_whose_own_broker_dies_says_so_and_ends(tmp_path: Path) -> None:
    monitor = subprocess.Popen(
        [
            *(sys.executable, "-m", "node.cli", "monitor", "--listen", f"127.0.0.1:{free_port()}"),
            *("--broker-listen", f"127.0.0.1:{free_port()}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert monitor.stdout is not None
    assert "--telemetry mqtt://" in monitor.stdout.readline()
    (broker,) = [
        child
        for child in psutil.Process(monitor.pid).children()
        if "node.observe.embedded_broker" in child.cmdline()
    ]
    broker.kill()
    _, said = monitor.communicate(timeout=WAIT_S)
    assert monitor.returncode == 1
    assert said.startswith("swarm-node: the embedded broker has ended (status -9)")
    assert len(said.splitlines()) == 1


def test_a_broker_of_mqtt_3_carries_reports_and_wills() -> None:
    """It gives up on MQTT 5 without a word."""
    watch = Watch()

    def take(message: Incoming) -> None:
        watch.take(message.topic, message.payload, 100.0, retained=message.retained)

    def gone() -> Gone | None:
        return next((view.gone for view in watch.nodes(100.0)), None)

    async def body() -> None:
        async with embedded_broker(f"127.0.0.1:{free_port()}") as broker:
            async with trio.open_nursery() as nursery:
                topics = ("swarm/+/+/report", "swarm/+/+/status")
                hearing = Subscriber(broker, topics, Random(2))
                nursery.start_soon(hearing.listen, take)
                await trio.to_thread.run_sync(publish, broker)
                with trio.fail_after(WAIT_S):
                    while gone() is not Gone.OFFLINE:  # noqa: ASYNC110  as above
                        await trio.sleep(0.02)
                nursery.cancel_scope.cancel()
            assert watch.taken == 1

    run(body, timeout_s=WAIT_S)
