"""A small MQTT broker in a process of its own: `python -m node.monitor.embedded_broker HOST PORT`.

It is amqtt: MQTT 3.1.1, no TLS, anybody who reaches it may read and write, and nothing survives
its end. Good for one machine or a network among friends; else take mosquitto. It ends when its
standard input does, so that it never outlives who started it. The only file with amqtt.

amqtt reads packets of any length, waits for ever, and keeps whatever is slower to go than to come.
So what it reads and writes passes through here, where it is bounded before it is held; see
`broker_limits` for how much of each. A client over a limit loses its connection.

What the broker retains is bounded: whoever reaches it could name a million topics. The topic that
nobody has published to for longest makes room, so that a flood costs a node what it said last until
it says something again, and goes away by itself. To standard output it says that it listens, and
then how many topics it gave up and how many clients it refused or sent away, where that changes.
"""

import asyncio
import logging
import os
import sys
import threading
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import Any, Final

from amqtt.adapters import ReaderAdapter, StreamWriterAdapter
from amqtt.broker import Broker
from amqtt.contexts import BrokerConfig, ListenerConfig
from amqtt.errors import AMQTTError, BrokerError
from amqtt.session import Session

from node.monitor.broker_limits import CLIENTS_MAX, Header, Pace, TooMuch, clients_of
from node.system.memory import GIVE_BACK_EVERY_S, give_back
from swarm.limits.address_blocks import path_of
from swarm.limits.bounded_table import BoundedTable

READ_BYTES: Final = 4_096
EXIT_TAKEN: Final = 3  # the address cannot be listened on
LISTENS: Final = b"listens\n"
DROPPED: Final = b"dropped "  # and a number
REFUSED: Final = b"refused "  # and a number
TELL_S: Final = 0.5
RETAINED_TOPICS_MAX: Final = 8_192  # a node has three
RETAINED_BYTES_MAX: Final = 128 << 20
RETAINED_MESSAGE_BYTES_MAX: Final = 131_072  # twice what a report may have; longer ones pass by

CONNECT_TIMEOUT_S: Final = 10.0  # from the connection to a whole CONNECT
PACKET_TIMEOUT_S: Final = 20.0  # for the rest of a packet that has begun
IDLE_S_MAX: Final = 600.0  # between two packets of a client that named no time of its own
WRITE_TIMEOUT_S: Final = 30.0  # for a client to take what waits for it
CLOSE_TIMEOUT_S: Final = 5.0
MESSAGES_PER_CLIENT_MAX: Final = 16  # of its own that are not dealt with; then it is not read
MESSAGES_MAX: Final = 256  # of all, likewise
BIG_BYTES: Final = 16_384  # a body over it needs one of so many places:
BIG_BODIES_MAX: Final = 64
LOOK_S: Final = 0.01  # between two looks whether what was sent is dealt with
WAITING_PER_CLIENT_MAX: Final = 512  # messages for a client that takes them slowly; more pass by
FILTERS_PER_CLIENT_MAX: Final = 16
FILTERS_MAX: Final = 512
FILTER_CHARS_MAX: Final = 256
REFUSED_FILTER: Final = 0x80


class _Reader(ReaderAdapter):
    """What a client sends, packet by packet, none of which is longer than it may be. Each read may
    be cancelled and asked for again: amqtt does so whenever a client is silent."""

    def __init__(self, reader: asyncio.StreamReader, broker: "Bounded", ip: str | None) -> None:
        self._reader = reader
        self.ip = ip
        self._broker = broker
        self._header = Header()
        self._head = bytearray()  # of a packet that may be read, as far as amqtt has not
        self._body_bytes = 0  # as above
        self._pace = Pace(_now_s())
        self._heard_s = _now_s()
        self._until_s = self._heard_s  # by then the packet has to be there
        self._has_to_go = False
        self.session: Session | None = None  # None: there was no CONNECT

    async def read(self, n: int = -1) -> bytes:
        """See `ReaderAdapter`.

        Raises:
            IncompleteReadError: the client is gone, or has to go.
        """
        if self._has_to_go:
            raise asyncio.IncompleteReadError(b"", n)
        try:
            return await self._read(n)
        except (TooMuch, TimeoutError, OSError) as error:
            self._broker.sent_away[type(error).__name__] += 1
            self._has_to_go = True
            raise asyncio.IncompleteReadError(b"", n) from error

    async def _read(self, n: int) -> bytes:
        if not self._head and not self._body_bytes:
            await self._next_packet()
        if self._head:
            part = bytes(self._head[:n])
            del self._head[:n]
            return part
        if not 0 <= n <= self._body_bytes:
            raise TooMuch("a packet that ends before what is in it")
        left_s = max(0.0, self._until_s - _now_s())
        part = await asyncio.wait_for(self._broker.read_body(self._reader, n), left_s)
        self._body_bytes -= n
        return part

    async def _next_packet(self) -> None:
        """Wait for a packet that may be read. The first has to be there in full in time."""
        await self._until_dealt_with()
        until_s = self._heard_s + self._idle_s()
        while self._header.body_bytes is None:
            left_s = max(0.0, until_s - _now_s())
            (byte,) = await asyncio.wait_for(self._reader.readexactly(1), left_s)
            if not self._header.raw and self.session is not None:
                until_s = _now_s() + PACKET_TIMEOUT_S
            self._header.take(byte)
        header, self._header = self._header, Header()
        self._head, self._body_bytes = header.raw, header.body_bytes or 0
        self._heard_s = _now_s()
        pause_s = self._pace.spend(self._body_bytes + len(self._head), self._heard_s)
        self._until_s = until_s + pause_s
        await asyncio.sleep(pause_s)

    def _idle_s(self) -> float:
        if self.session is None:
            return CONNECT_TIMEOUT_S
        named_s = 1.5 * self.session.keep_alive
        return min(named_s, IDLE_S_MAX) if named_s else IDLE_S_MAX

    async def _until_dealt_with(self) -> None:
        """Leave the rest to the socket while what came before is not dealt with."""
        session = self.session
        if session is None:
            return
        if len(session.inflight_in) > MESSAGES_PER_CLIENT_MAX:
            raise TooMuch("messages of the second quality that it does not release")
        while (
            session.delivered_message_queue.qsize() >= MESSAGES_PER_CLIENT_MAX
            or self._broker.messages >= MESSAGES_MAX
        ):
            await asyncio.sleep(LOOK_S)
            self._heard_s = _now_s()  # it is we who are late

    def feed_eof(self) -> None:
        """See `ReaderAdapter`."""
        self._reader.feed_eof()


class _Writer(StreamWriterAdapter):
    """What goes to a client, which has to take it."""

    is_closed: bool

    async def drain(self) -> None:
        """See `WriterAdapter`.

        Raises:
            ConnectionResetError: it does not take it.
        """
        try:
            await asyncio.wait_for(super().drain(), WRITE_TIMEOUT_S)
        except TimeoutError:
            self._writer.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None

    async def close(self) -> None:
        """See `WriterAdapter`. Returns at once; what is written goes out if it does so soon."""
        if not self.is_closed:
            self.is_closed = True
            self._writer.close()
            loop = asyncio.get_running_loop()
            loop.call_later(CLOSE_TIMEOUT_S, self._writer.transport.abort)


class Bounded(Broker):
    """amqtt's broker, which holds so much and no more. `dropped` counts what it did not keep."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sizes: BoundedTable[str, int] = BoundedTable(RETAINED_TOPICS_MAX)  # by topic
        self._retained_bytes = 0
        self._clients: BoundedTable[asyncio.StreamWriter, None] = BoundedTable(
            CLIENTS_MAX, limit_of=clients_of, newest_first=True
        )
        self._turned_away = 0
        self._big_bodies = asyncio.Semaphore(BIG_BODIES_MAX)
        self._filters: dict[int, list[str]] = {}  # that the clients have asked for, by session
        self._tasks_left = 0
        self.sent_away: Counter[str] = Counter()
        self.dropped = 0

    # --- clients ---------------------------------------------------------------------------

    @property
    def refused(self) -> int:
        """Clients that got no place, or lost it."""
        return self._turned_away + self.sent_away.total()

    @property
    def messages(self) -> int:
        """Those of all clients that are not handed on yet."""
        count: int = self._broadcast_queue.qsize()
        return count

    async def read_body(self, reader: asyncio.StreamReader, size: int) -> bytes:
        """A part of a packet's body."""
        if size <= BIG_BYTES:
            return await reader.readexactly(size)
        async with self._big_bodies:
            return await reader.readexactly(size)

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        """See `Broker`."""
        remote = writer.get_extra_info("peername")
        ip = str(remote[0]) if remote else None
        gone = self._clients.put(writer, None, path_of(ip))
        if gone is not None:
            self._turned_away += 1
            gone.key.transport.abort()
            if gone.key is writer:
                return
        bounded, adapter = _Reader(reader, self, ip), _Writer(writer)
        try:
            await self._client_connected(listener_name, bounded, adapter)
        finally:
            self._clients.pop(writer)
            await adapter.close()  # amqtt leaves some of those open that sent no CONNECT

    async def _handle_client_session(
        self, reader: Any, writer: Any, client_session: Any, handler: Any, *rest: Any
    ) -> None:
        """See `Broker`. A session ends with its connection: nothing is kept for who is away."""
        reader.session = client_session
        client_session.remote_address = reader.ip
        filters = self._filters[id(client_session)] = []
        handler.mqtt_publish = partial(self._publish, handler.mqtt_publish, filters, Counter())
        try:
            await super()._handle_client_session(reader, writer, client_session, handler, *rest)
        finally:
            del self._filters[id(client_session)]
            _, current = self._sessions.get(client_session.client_id, (None, None))
            if current is handler:
                await self._delete_session(client_session.client_id)

    # --- what goes to them -----------------------------------------------------------------

    async def _publish(
        self,
        publish: Any,
        filters: list[str],
        waiting: Counter[str],
        topic: str,
        data: bytes,
        qos: int | None,
        retain: bool,
        ack_timeout: int | None = None,
    ) -> None:
        """Send one message to one client, unless too many wait for it. amqtt sends what is retained
        to whoever connects, by what others have asked for."""
        if retain and not any(self._matches(topic, each) for each in filters):
            return
        if not retain and waiting["messages"] >= WAITING_PER_CLIENT_MAX:
            self.sent_away["slow"] += 1
            return
        waiting["messages"] += 1
        try:
            await publish(topic, data, qos, retain, ack_timeout)
        finally:
            waiting["messages"] -= 1

    async def _run_broadcast(self, running_tasks: deque[Any]) -> None:
        """See `Broker`, which keeps all tasks that end while an earlier one waits."""
        await super()._run_broadcast(running_tasks)
        if len(running_tasks) > 2 * self._tasks_left + MESSAGES_MAX:
            unfinished = [task for task in running_tasks if not task.done()]
            running_tasks.clear()
            running_tasks.extend(unfinished)
            self._tasks_left = len(unfinished)

    async def add_subscription(self, subscription: tuple[str, int], session: Any) -> int:
        """See `Broker`."""
        wanted, _ = subscription
        own = self._filters.get(id(session), [])
        is_new = wanted not in self._subscriptions
        if (
            len(wanted) > FILTER_CHARS_MAX
            or len(own) >= FILTERS_PER_CLIENT_MAX
            or (is_new and len(self._subscriptions) >= FILTERS_MAX)
        ):
            return REFUSED_FILTER
        own.append(wanted)  # each time: what is retained is sent again
        return int(await super().add_subscription(subscription, session))

    async def _handle_unsubscription(self, *args: Any) -> None:
        """See `Broker`, which keeps filters that nobody has."""
        await super()._handle_unsubscription(*args)
        for unused in [each for each, who in self._subscriptions.items() if not who]:
            del self._subscriptions[unused]

    # --- what is retained ------------------------------------------------------------------

    async def retain_message(
        self,
        source_session: Any,
        topic_name: str | None,
        data: bytes | bytearray | None,
        qos: int | None = None,
    ) -> None:
        """See `Broker`; every message to retain comes here, those of wills as well."""
        if topic_name is None:
            return
        if data and len(data) + len(topic_name) > RETAINED_MESSAGE_BYTES_MAX:
            self.dropped += 1
            return
        self._forget(topic_name)
        await super().retain_message(None, topic_name, data, qos)
        if not data:
            return
        size_bytes = len(data) + len(topic_name)
        self._retained_bytes += size_bytes
        where = path_of(getattr(source_session, "remote_address", None))
        gone = self._sizes.put(topic_name, size_bytes, where)
        if gone is not None:
            self._retained_bytes -= gone.value
            self._drop(gone.key)
        while self._retained_bytes > RETAINED_BYTES_MAX:
            gone = self._sizes.evict()
            self._retained_bytes -= gone.value
            self._drop(gone.key)

    def _drop(self, topic: str) -> None:
        self.retained_messages.pop(topic, None)
        self.dropped += 1

    def _forget(self, topic: str) -> None:
        self._retained_bytes -= self._sizes.pop(topic) or 0


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _tell(broker: Bounded) -> None:
    """Say how much was dropped and who was refused, when that changes."""
    said: dict[bytes, int] = {DROPPED: 0, REFUSED: 0}
    while True:
        await asyncio.sleep(TELL_S)
        for what, count in ((DROPPED, broker.dropped), (REFUSED, broker.refused)):
            if count != said[what]:
                said[what] = count
                os.write(sys.stdout.fileno(), what + b"%d\n" % count)


async def _give_memory_back() -> None:
    while True:
        await asyncio.sleep(GIVE_BACK_EVERY_S)
        await asyncio.to_thread(give_back)


async def _serve(host: str, port: int) -> int:
    listener = ListenerConfig(bind=f"{host}:{port}")  # who is too many is not even waited with
    anybody = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    broker = Bounded(BrokerConfig(listeners={"default": listener}, plugins=anybody))
    try:
        await broker.start()
    except (BrokerError, OSError):
        return EXIT_TAKEN
    os.write(sys.stdout.fileno(), LISTENS)
    orphaned, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait_for_end_of_input() -> None:
        while os.read(sys.stdin.fileno(), READ_BYTES):
            pass
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(orphaned.set)

    threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    beside = [asyncio.create_task(each) for each in (_tell(broker), _give_memory_back())]
    await orphaned.wait()
    for task in beside:
        task.cancel()
    with suppress(AMQTTError):
        await broker.shutdown()
    return 0


def main() -> None:
    """The process."""
    logging.disable(logging.CRITICAL)
    host, port = sys.argv[1:]
    os._exit(asyncio.run(_serve(host, int(port))))


if __name__ == "__main__":
    main()
