"""Reports over a real broker: delivered, signed off, and counted where they are lost."""

import gc
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.limits.backoff import Backoff
from swarm.telemetry import mqtt
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.fleet_view import Drop, Gone, Watch
from swarm.telemetry.mqtt import (
    PACKET_BYTES_MAX,
    PUBLISH_QUEUE_MAX,
    Incoming,
    MqttPublisher,
    Outgoing,
    Subscriber,
    _Queue,
)
from swarm.telemetry.reports import (
    DOMAIN,
    REPORT_BYTES_MAX,
    NodeReport,
    Status,
    Topic,
    decode_report,
    encode_report,
    sealed,
)
from tests.brokers import PASSWORD, USER, Mosquitto, free_port, open_mosquitto
from tests.support import run

NODE = Identity(b"n" * 32)
RUN = "demo-0123456789abcdef0123456789abcdef"
TOPICS = ("swarm/+/+/report", "swarm/+/+/status")
BOUND_S = 30.0

pytestmark = pytest.mark.integration
broker_test = pytest.mark.broker


def report(sequence: int, **metrics: float) -> Outgoing:
    made = NodeReport(
        peer_id=NODE.peer_id,
        run_id=RUN,
        role="node",
        instance="i",
        sequence=sequence,
        sent_at_s=100.0 + sequence,
        interval_s=60.0,
        metrics=metrics,
    )
    return Outgoing(str(Topic(RUN, NODE.peer_id, "report")), encode_report(made, NODE))


def status(connection: int, *, online: bool, left: bool = False) -> Outgoing:
    said = Status(run_id=RUN, instance="i", connection=connection, online=online, left=left)
    return Outgoing(str(Topic(RUN, NODE.peer_id, "status")), sealed(said, NODE), qos=1)


CHILD = """
import sys, trio
from swarm.telemetry.broker_address import Broker
from tests.integration.test_mqtt import publisher, report
sending = publisher(Broker.parse(sys.argv[1]))
sending.put(report(1))
trio.run(sending.run)
"""


def publisher(broker: Broker, **options: Any) -> MqttPublisher:
    return MqttPublisher(
        broker,
        lambda connection, online, left=False: status(connection, online=online, left=left),
        Random(1),
        **options,
    )


def at(mosquitto: Mosquitto, scheme: str = "mqtt", **options: Any) -> Broker:
    user = f"{USER}@" if "password" in options else ""
    return Broker.parse(f"{scheme}://{user}127.0.0.1:{mosquitto.port}", **options)


async def until(condition: Callable[[], Any]) -> None:
    with trio.fail_after(BOUND_S):
        while not condition():  # noqa: ASYNC110  threads of libraries announce nothing
            await trio.sleep(0.01)


class Seen:
    """A watch, and what it was fed with."""

    def __init__(self) -> None:
        self.watch = Watch()
        self.messages: list[Incoming] = []

    def take(self, message: Incoming) -> None:
        self.messages.append(message)
        self.watch.take(message.topic, message.payload, 100.0, retained=message.retained)

    @property
    def sequence(self) -> int:
        return max((view.report.sequence for view in self.watch.nodes(100.0)), default=-1)

    @property
    def gone(self) -> Gone | None:
        [view] = self.watch.nodes(100.0)
        return view.gone

    @property
    def left(self) -> bool:
        [view] = self.watch.nodes(100.0)
        return view.left


@contextmanager
def leaving(nursery: trio.Nursery) -> Iterator[None]:
    yield
    nursery.cancel_scope.cancel()


@asynccontextmanager
async def watched(
    broker: Broker, **options: Any
) -> AsyncIterator[tuple[Seen, MqttPublisher, Subscriber]]:
    """A publisher and who hears it, both at work."""
    seen, sending = Seen(), publisher(broker, **options)
    subscriber = Subscriber(broker, TOPICS, Random(2))
    async with trio.open_nursery() as nursery:
        with leaving(nursery):
            nursery.start_soon(subscriber.listen, seen.take)
            nursery.start_soon(sending.run)
            yield seen, sending, subscriber


@broker_test
def test_what_is_published_is_heard_and_kept_for_who_comes_later(tmp_path: Path) -> None:
    async def body(broker: Broker) -> None:
        async with watched(broker) as (first, sending, _):
            sending.put(report(0))
            await until(lambda: first.sequence == 0)  # so it has subscribed
            for sequence in range(1, 5):
                sending.put(report(sequence))
            await until(lambda: first.sequence == 4 and first.watch.taken == 5)
            assert (first.watch.lost, sending.dropped) == (0, 0)
            later = Seen()
            async with trio.open_nursery() as nursery:
                with leaving(nursery):
                    nursery.start_soon(Subscriber(broker, TOPICS, Random(3)).listen, later.take)
                    await until(lambda: later.sequence == 4)
            assert later.watch.taken == 1
            assert all(message.retained for message in later.messages)
            assert first.gone is None

    with open_mosquitto(tmp_path) as mosquitto:
        run(body, at(mosquitto))


@broker_test
def test_who_leaves_says_so_and_who_is_killed_is_said_to_be_gone(tmp_path: Path) -> None:
    """The first by itself, the second by its will at the broker."""

    async def body(broker: Broker) -> None:
        seen = Seen()
        async with trio.open_nursery() as nursery:
            with leaving(nursery):
                nursery.start_soon(Subscriber(broker, TOPICS, Random(2)).listen, seen.take)
                async with trio.open_nursery() as node:
                    with leaving(node):
                        sending = publisher(broker)
                        node.start_soon(sending.run)
                        sending.put(report(0))
                        await until(lambda: seen.sequence == 0)
                await until(lambda: seen.gone is Gone.OFFLINE)
                assert seen.left
                words = [sys.executable, "-c", CHILD, str(broker)]
                child = await trio.lowlevel.open_process(words)
                try:
                    await until(lambda: seen.sequence == 1)
                    assert seen.gone is None
                finally:
                    child.kill()
                    await child.wait()
                await until(lambda: seen.gone is Gone.OFFLINE)
                assert not seen.left

    with open_mosquitto(tmp_path) as mosquitto:
        run(body, at(mosquitto))


@broker_test
@pytest.mark.parametrize("secured", [False, True])
def test_a_broker_that_is_killed_costs_what_is_counted(tmp_path: Path, *, secured: bool) -> None:
    async def body(mosquitto: Mosquitto, broker: Broker) -> None:
        async with watched(broker, queue_max=8) as (seen, sending, subscriber):
            sending.put(report(0))
            await until(lambda: seen.sequence == 0)
            mosquitto.kill()
            await until(lambda: not sending.connected and not subscriber.connected)
            for sequence in range(1, 101):
                sending.put(report(sequence))
            assert sending.dropped == 100 - 8
            await trio.to_thread.run_sync(mosquitto.start)
            await until(lambda: sending.connected and subscriber.connected)
            sending.put(report(101))
            await until(lambda: seen.sequence == 101)
            await until(lambda: sending.published + sending.dropped == 102)
            # What the subscriber missed is either dropped here, or came to the broker before
            # the subscriber was back; the gaps tell of both.
            assert seen.watch.taken + seen.watch.lost == 102
            assert seen.watch.lost >= sending.dropped

    with open_mosquitto(tmp_path, tls=secured, users=secured) as mosquitto:
        options = {"password": PASSWORD, "ca_file": tmp_path / "ca.pem"} if secured else {}
        run(body, mosquitto, at(mosquitto, "mqtts" if secured else "mqtt", **options))


# paho leaves the socket of a handshake that failed to the garbage collector
@pytest.mark.filterwarnings("ignore:.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
@broker_test
@pytest.mark.parametrize("wrong", ["password", "nobody", "certificate", "plain"])
def test_a_broker_that_does_not_let_us_in_is_told_of(tmp_path: Path, wrong: str) -> None:
    async def body(broker: Broker) -> None:
        sending = publisher(broker)
        async with trio.open_nursery() as nursery:
            with leaving(nursery):
                nursery.start_soon(sending.run)
                sending.put(report(0))
                await until(lambda: sending.failure)
                assert not sending.connected
                assert sending.published == 0
                assert "hush" not in sending.failure

    with open_mosquitto(tmp_path / "broker", tls=True, users=True) as mosquitto:
        right = at(mosquitto, "mqtts", password=PASSWORD, ca_file=tmp_path / "broker" / "ca.pem")
        others = {
            "password": replace(right, password="hush"),
            "nobody": replace(right, user=None, password=None),
            "certificate": replace(right, ca_file=None),
            "plain": replace(right, tls=False),
        }
        run(body, others[wrong])


@broker_test
def test_a_huge_payload_does_not_reach_us(tmp_path: Path) -> None:
    async def body(broker: Broker) -> None:
        async with watched(broker) as (seen, sending, _):
            sending.put(replace(report(0), payload=b"x" * (2 * PACKET_BYTES_MAX)))
            sending.put(report(1))
            await until(lambda: seen.sequence == 1)
            assert max(len(message.payload) for message in seen.messages) < 10_000

    with open_mosquitto(tmp_path) as mosquitto:
        run(body, at(mosquitto))


@broker_test
def test_whatever_a_broker_carries_an_honest_node_is_seen(tmp_path: Path) -> None:
    """A flood of topics, forged reports, numbers that are none and huge payloads: each is dropped
    and counted, and none of it stays."""
    honest, forger = report(1), Identity(b"f" * 32)
    body_text = decode_report(honest.payload, NODE.peer_id).model_dump_json()
    forged = encode_report(decode_report(honest.payload, NODE.peer_id), forger)
    no_number = body_text.replace('"metrics":{}', '"metrics":{"round":NaN}')
    assert no_number != body_text
    signature = NODE.sign(DOMAIN, no_number.encode()).hex()
    not_finite = json.dumps({"report": no_number, "signature": signature}).encode()
    flood = [Outgoing(f"swarm/{i}/<script>/report", b"x", retain=False) for i in range(2_000)]
    wrong = [
        replace(honest, payload=forged, retain=False),
        replace(honest, payload=not_finite, retain=False),
        replace(honest, payload=b"x" * REPORT_BYTES_MAX, retain=False),
        replace(honest, payload=b"x" * (REPORT_BYTES_MAX + 1), retain=False),
    ]

    async def body(broker: Broker) -> None:
        async with watched(broker, queue_max=5_000) as (seen, sending, _):
            sending.put(report(0))
            await until(lambda: seen.sequence == 0)
            for message in (*flood, *wrong, honest):
                sending.put(message)
            await until(lambda: seen.sequence == 1)
            assert seen.watch.dropped == {
                Drop.TOPIC: 2_000,
                Drop.FORGED: 1,
                Drop.MALFORMED: 2,
                Drop.OVERSIZE: 1,
            }
            assert len(seen.watch.nodes(100.0)) == 1

    with open_mosquitto(tmp_path) as mosquitto:
        run(body, at(mosquitto))


def test_a_broker_that_is_not_there_costs_a_counter_and_no_wait() -> None:
    async def body() -> None:
        sending = publisher(Broker.parse(f"mqtt://127.0.0.1:{free_port()}"))
        async with trio.open_nursery() as nursery:
            with leaving(nursery):
                nursery.start_soon(sending.run)
                await until(lambda: sending.failure)
                for sequence in range(10_000):
                    sending.put(Outgoing("t", b"%d" % sequence))
                assert sending.dropped == 10_000 - PUBLISH_QUEUE_MAX

    run(body)


def test_a_broker_that_never_answers_holds_nothing_up() -> None:
    """It accepts connections, and that is all that it does. To leave takes a bounded time."""

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            sending = publisher(Broker.parse(f"mqtt://127.0.0.1:{silent.getsockname()[1]}"))
            async with trio.open_nursery() as nursery:
                with leaving(nursery):
                    nursery.start_soon(sending.run)
                    await until(lambda: sending.connections == 1)
                    for sequence in range(100):
                        sending.put(Outgoing("t", b"%d" % sequence))
                    assert sending.dropped == 100 - PUBLISH_QUEUE_MAX
            assert not sending.connected

    run(body)


def test_a_try_that_failed_leaves_no_socket_open() -> None:
    async def body() -> None:
        async with trio.open_nursery() as nursery:
            with leaving(nursery):
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                async with listeners[0] as silent:
                    port = silent.socket.getsockname()[1]
                    sending = publisher(Broker.parse(f"mqtt://127.0.0.1:{port}"))
                    nursery.start_soon(sending.run)
                    async with await silent.accept() as first:
                        with trio.fail_after(BOUND_S):
                            while await first.receive_some(1_000):
                                pass
                    assert sending.connections <= 3  # at once, not when its keep-alive ran out

    run(body)


CONNACK = b"\x20\x03\x00\x00\x00"
NONSENSE = (
    b"",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x20\x00",  # a connack of nothing
    b"\x20\x03\x00\x87\x00",  # not authorised
    CONNACK + b"\x30\xff\xff\xff\xff\xff",  # a length without end
    CONNACK + b"\x30\x04\x00\x01\xff\x00",  # a topic that is no text
    CONNACK + b"\x30\x04\x00\x01#\x00",  # a topic that is none
    CONNACK + b"\x30\x02\x00\x09",  # a topic longer than the packet
    CONNACK + b"\x90\x00",  # a suback of nothing
    CONNACK + b"\xf0\x00\x00\x00",
)


@pytest.mark.parametrize("hears", [False, True])
def test_whatever_a_broker_says_is_its_own_affair(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, hears: bool
) -> None:
    monkeypatch.setattr(mqtt, "ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(mqtt, "AGAIN", Backoff(0.01, 0.01))

    async def body() -> None:
        said = iter(NONSENSE)

        async def speak(stream: trio.SocketStream) -> None:
            async with stream:
                await stream.receive_some(1_000)
                await stream.send_all(next(said, b""))

        async with trio.open_nursery() as nursery:
            with leaving(nursery):
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(trio.serve_listeners, speak, listeners)
                broker = Broker.parse(f"mqtt://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
                client = Subscriber(broker, TOPICS, Random(1)) if hears else publisher(broker)
                nursery.start_soon(client.run)
                await until(lambda: client.connections > len(NONSENSE))

    run(body)
    gc.collect()  # when asyncio tells of errors that nobody asked for
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


def test_a_bug_of_ours_is_no_broker_that_cannot_be_reached() -> None:
    async def body() -> None:
        async def let_in(stream: trio.SocketStream) -> None:
            async with stream:
                await stream.send_all(CONNACK)
                await stream.receive_some(1_000)
                await stream.receive_some(1_000)

        async with trio.open_nursery() as nursery:
            with leaving(nursery):
                listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                nursery.start_soon(trio.serve_listeners, let_in, listeners)
                broker = Broker.parse(f"mqtt://127.0.0.1:{listeners[0].socket.getsockname()[1]}")

                def told(connection: int, online: bool, *, left: bool = False) -> Outgoing:
                    if online:
                        raise ZeroDivisionError
                    return status(connection, online=False)

                sending = MqttPublisher(broker, told, Random(1))
                with trio.fail_after(BOUND_S), pytest.RaisesGroup(ZeroDivisionError):
                    await sending.run()

    run(body)


def test_a_file_of_certificates_must_hold_some(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        publisher(Broker.parse("mqtts://h", ca_file=file))


def test_a_queue_gives_up_the_oldest_by_count_and_by_bytes() -> None:
    by_count: _Queue[Outgoing] = _Queue(3, 1_000)
    by_bytes: _Queue[Outgoing] = _Queue(100, 10)
    for number in range(5):
        for queue in (by_count, by_bytes):
            queue.put(Outgoing(str(number), b"four"))
    for queue, kept in ((by_count, "234"), (by_bytes, "34")):
        assert queue.dropped == 5 - len(kept)
        assert [queue.take().topic for _ in kept] == list(kept)  # type: ignore[union-attr]
        assert queue.take() is None
        queue.put(Outgoing("again", b"ten bytes!"))
        assert queue.take() is not None
