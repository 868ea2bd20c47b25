"""MQTT publisher and subscriber. The only file with asyncio, which aiomqtt needs.

Each client has a thread with its own loop. A bounded queue between it and trio drops the oldest
message for the newest, so nothing waits for a broker. A lost connection is made again with back-off
and jitter. Brokers that speak only MQTT 3.1.1 may hang up on version 5 or say nothing, so tries
alternate between both versions until one works.
"""

import asyncio
import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Generic, Protocol, TypeVar

import aiomqtt
import trio
from aiomqtt import Client, ProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.limits.backoff import Backoff
from swarm.telemetry.broker_address import Broker
from swarm.telemetry.reports import REPORT_BYTES_MAX, Status, Topic, sealed

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())  # what fails is in `failure`

PUBLISH_QUEUE_MAX: Final = 32
SUBSCRIBE_QUEUE_MAX: Final = 8192
SUBSCRIBE_QUEUE_BYTES_MAX: Final = 64 << 20
PACKET_BYTES_MAX: Final = REPORT_BYTES_MAX + 1_024  # asked of a broker that speaks MQTT 5
KEEPALIVE_S: Final = 15
ANSWER_TIMEOUT_S: Final = 10.0  # of the broker, to anything
HELLO_TIMEOUT: Final = Backoff(2.0, ANSWER_TIMEOUT_S)  # seconds for a try to connect
KNOCKS_MAX: Final = 4  # two with either version
KNOCK_LOOK_S: Final = 0.05
KNOWN_TRIES: Final = 4  # with the version that worked, before the other is tried again
LEAVE_TIMEOUT_S: Final = 3.0  # to say goodbye
AGAIN: Final = Backoff(0.5, 30.0)  # seconds between two tries to connect
FAILURE_CHARS_MAX: Final = 200
TAKEN_AT_A_TIME: Final = 64  # messages, before others get their turn on trio's loop


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish. `qos`: 0 at most once, 1 at least once."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = True


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message that a broker delivered; `retained`: it had kept it."""

    topic: str
    payload: bytes
    retained: bool


OnMessage = Callable[[Incoming], None]
"""Takes one message, on trio's loop; quick, and never raises."""

T = TypeVar("T", Outgoing, Incoming)


class _Queue(Generic[T]):
    """Bounded, between two threads; drops the oldest items. `ring` is called after each put, in the
    thread that puts."""

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self._items: deque[T] = deque()
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._lock = threading.Lock()
        self.ring: Callable[[], None] = lambda: None
        self.dropped = 0

    def put(self, item: T) -> None:
        with self._lock:
            self._items.append(item)
            self._held_bytes += len(item.payload)
            while len(self._items) > self._count_max or self._held_bytes > self._bytes_max:
                self._held_bytes -= len(self._items.popleft().payload)
                self.dropped += 1
        self.ring()

    def take(self) -> T | None:
        with self._lock:
            if not self._items:
                return None
            item = self._items.popleft()
            self._held_bytes -= len(item.payload)
            return item


class _Connecting:
    """A client in its own thread that stays connected until it is cancelled."""

    def __init__(self, broker: Broker, rng: Random) -> None:
        """
        Raises:
            ConfigError: the file of certificates cannot be used.
        """
        self._broker = broker
        self._rng = rng
        self._tls = _tls_context(broker)
        self._protocol = ProtocolVersion.V5
        self._failures = 0  # in a row
        self._works = False  # the version, as of the last connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()  # to send, or that it is time to leave
        self._wanted = True
        self.connected = False
        self.connections = 0  # tried
        self.established = 0  # of these
        self.failure = ""  # of the last try; empty: it goes well

    async def run(self) -> None:
        """Keep a connection until cancelled; then disconnect within `LEAVE_TIMEOUT_S`."""
        leaving = trio.CancelScope(shield=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._leave, leaving)
            with leaving:
                await trio.to_thread.run_sync(
                    lambda: asyncio.run(self._keep_connected()),
                    thread_name="mqtt",
                    abandon_on_cancel=True,
                    limiter=trio.CapacityLimiter(1),
                )

    async def _leave(self, leaving: trio.CancelScope) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._wanted = False
            self._ring()
            leaving.deadline = trio.current_time() + LEAVE_TIMEOUT_S

    def _ring(self) -> None:
        """Wake the loop of the thread. From any thread."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(self._news.set)

    async def _keep_connected(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Of connections alone: what is ours runs in tasks that are awaited.
        self._loop.set_exception_handler(lambda _, what: log.warning("%s", what))
        while self._wanted:
            self.connections += 1
            client = self._client()
            try:
                async with client:
                    client.timeout = ANSWER_TIMEOUT_S
                    self._failures, self.failure = 0, ""
                    self._works = self.connected = True
                    self.established += 1
                    await self._used(client)
            except aiomqtt.MqttError as error:  # also where paho stumbles over a broker's bytes
                if not self.connected:
                    self._choose_protocol()
                self.failure = (str(error) or type(error).__name__)[:FAILURE_CHARS_MAX]
            finally:
                self.connected = False
                _let_go(client)
            if self._wanted:
                await self._rest(AGAIN.after(self._failures))
                self._failures += 1

    def _choose_protocol(self) -> None:
        """For the next try, after one that failed."""
        if self._works and self._failures < KNOWN_TRIES:
            return
        self._works = False
        is_5 = self._protocol is ProtocolVersion.V5
        self._protocol = ProtocolVersion.V311 if is_5 else ProtocolVersion.V5

    async def _rest(self, seconds: float) -> None:
        until = asyncio.get_running_loop().time() + seconds * (0.5 + self._rng.random())
        while self._wanted:
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)

    def _client(self, **options: Any) -> Client:
        broker, heard = self._broker, self._heard

        class Inbox(asyncio.Queue[aiomqtt.Message]):
            """aiomqtt's own would grow without end, or drop the newest messages uncounted."""

            def put_nowait(self, item: aiomqtt.Message) -> None:
                heard(item)

        properties = None
        if self._protocol is ProtocolVersion.V5:
            properties = Properties(PacketTypes.CONNECT)
            properties.MaximumPacketSize = PACKET_BYTES_MAX
        else:
            options["clean_session"] = True
        return Client(
            broker.host,
            broker.port,
            username=broker.user,
            password=broker.password,
            logger=log,
            protocol=self._protocol,
            timeout=HELLO_TIMEOUT.after(self._failures // 2),  # each is tried with both versions
            keepalive=KEEPALIVE_S,
            properties=properties,
            tls_context=self._tls,
            queue_type=Inbox,
            **options,
        )

    async def _used(self, client: Client) -> None:
        """Use the connection for as long as it is wanted.

        Raises:
            MqttError: it was lost, or an answer did not come in time.
        """
        using = asyncio.ensure_future(self._use(client))
        lost = asyncio.ensure_future(anext(client.messages))  # ends with the connection
        try:
            await asyncio.wait((using, lost), return_when=asyncio.FIRST_COMPLETED)
            (using if using.done() else lost).result()
        finally:
            for each in (using, lost):
                each.cancel()
            await asyncio.gather(using, lost, return_exceptions=True)

    async def _use(self, client: Client) -> None:
        """Use the connection until it is not wanted any more."""
        while self._wanted:
            self._news.clear()
            await self._news.wait()

    def _heard(self, message: aiomqtt.Message) -> None:
        """Ignore a message that was not asked for."""


def _let_go(client: Client) -> None:
    """Close the socket of a try that ended; aiomqtt leaves that of a failed one open."""
    left = client._client.socket()
    if left is not None and left.fileno() >= 0:
        loop = asyncio.get_running_loop()
        loop.remove_reader(left)
        loop.remove_writer(left)
        left.close()


def _tls_context(broker: Broker) -> ssl.SSLContext | None:
    if not broker.tls:
        return None
    try:
        return ssl.create_default_context(cafile=broker.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{broker.ca_file}: no CA certificates in PEM ({error})") from None


class StatusOf(Protocol):
    def __call__(self, connection: int, online: bool, *, left: bool = False) -> Outgoing: ...


class MqttPublisher(_Connecting):
    """Publishes messages. `status` makes the first message, the last will and the goodbye of each
    connection, by its number, by whether it stands, and by whether the process leaves."""

    def __init__(
        self,
        broker: Broker,
        status: StatusOf,
        rng: Random,
        *,
        queue_max: int = PUBLISH_QUEUE_MAX,
    ) -> None:
        super().__init__(broker, rng)
        self._status = status
        self._queue: _Queue[Outgoing] = _Queue(queue_max, queue_max * PACKET_BYTES_MAX)
        self._queue.ring = self._ring
        self._failed = 0
        self.published = 0

    @property
    def dropped(self) -> int:
        """Messages that made room for newer ones, or with which the connection was lost."""
        return self._queue.dropped + self._failed

    def put(self, message: Outgoing) -> None:
        """Publish this as soon as there is a connection. Never waits."""
        self._queue.put(message)

    def _client(self, **options: Any) -> Client:
        will = self._status(self.connections, False)
        return super()._client(
            will=aiomqtt.Will(will.topic, will.payload, will.qos, will.retain), **options
        )

    async def _use(self, client: Client) -> None:
        await _publish(client, self._status(self.connections, True))
        while self._wanted:
            self._news.clear()
            while (message := self._queue.take()) is not None:
                try:
                    await _publish(client, message)
                except BaseException:
                    self._failed += 1
                    raise
                self.published += 1
            if self._wanted:
                await self._news.wait()
        await _publish(client, self._status(self.connections, False, left=True))


async def _publish(client: Client, message: Outgoing) -> None:
    await client.publish(message.topic, message.payload, message.qos, message.retain)


async def knock(broker: Broker, rng: Random, timeout_s: float) -> str:
    """Connect once. Returns why that cannot be done; empty: it can."""
    try:
        knocking = _Connecting(broker, rng)
    except ConfigError as error:
        return str(error)
    with trio.move_on_after(timeout_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(knocking.run)
            while not knocking.established and knocking.connections <= KNOCKS_MAX:  # noqa: ASYNC110
                await trio.sleep(KNOCK_LOOK_S)
            nursery.cancel_scope.cancel()
    return "" if knocking.established else knocking.failure or "it does not answer"


def publisher_of(
    broker: Broker, identity: Identity, run_id: str, instance: str, rng: Random
) -> MqttPublisher:
    """A publisher that announces this process as online, and by its last will as offline."""
    topic = str(Topic(run_id, identity.peer_id, "status"))

    def status(connection: int, online: bool, *, left: bool = False) -> Outgoing:
        said = Status(
            run_id=run_id, instance=instance, connection=connection, online=online, left=left
        )
        return Outgoing(topic, sealed(said, identity), qos=1)

    return MqttPublisher(broker, status, rng)


class Subscriber(_Connecting):
    def __init__(self, broker: Broker, topics: tuple[str, ...], rng: Random) -> None:
        super().__init__(broker, rng)
        self._topics = topics
        self._queue: _Queue[Incoming] = _Queue(SUBSCRIBE_QUEUE_MAX, SUBSCRIBE_QUEUE_BYTES_MAX)
        self.received = 0

    @property
    def dropped(self) -> int:
        """Messages that made room for newer ones, because they were not taken in time."""
        return self._queue.dropped

    async def listen(self, on_message: OnMessage) -> None:
        """Hand on each message, on trio's loop, until cancelled."""
        token, news = trio.lowlevel.current_trio_token(), trio.Event()

        def wake() -> None:
            news.set()

        def ring() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(wake, idempotent=True)

        self._queue.ring = ring
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.run)
            while True:
                await news.wait()
                news = trio.Event()
                taken = 0
                while (message := self._queue.take()) is not None:
                    on_message(message)
                    taken += 1
                    if taken % TAKEN_AT_A_TIME == 0:
                        await trio.lowlevel.checkpoint()

    def _heard(self, message: aiomqtt.Message) -> None:
        payload = message.payload if isinstance(message.payload, bytes) else b""
        self.received += 1
        self._queue.put(Incoming(str(message.topic), payload, message.retain))

    async def _use(self, client: Client) -> None:
        for topic in self._topics:
            await client.subscribe(topic, qos=0)
        await super()._use(client)
