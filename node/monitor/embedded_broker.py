"""A small MQTT broker in a process of its own: `python -m node.monitor.embedded_broker HOST PORT`.

It is amqtt: MQTT 3.1.1, no TLS, anybody who reaches it may read and write, and nothing survives
its end. Good for one machine or a network among friends; else take mosquitto. It ends when its
standard input does, so that it never outlives who started it. The only file with amqtt.

What it retains is bounded: whoever reaches it could name a million topics. The topic that nobody
has published to for longest makes room, so that a flood costs a node what it said last until it
says something again, and goes away by itself. To standard output it says that it listens, and then
how many topics it gave up, where that changes.
"""

import asyncio
import logging
import os
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any, Final

from amqtt.broker import Broker
from amqtt.contexts import BrokerConfig, ListenerConfig
from amqtt.errors import AMQTTError, BrokerError

CLIENTS_MAX: Final = 2_048
READ_BYTES: Final = 4_096
EXIT_TAKEN: Final = 3  # the address cannot be listened on
LISTENS: Final = b"listens\n"
DROPPED: Final = b"dropped "  # and a number
TELL_S: Final = 0.5
RETAINED_TOPICS_MAX: Final = 8_192  # a node has three
RETAINED_BYTES_MAX: Final = 128 << 20
RETAINED_MESSAGE_BYTES_MAX: Final = 131_072  # twice what a report may have; longer ones pass by


class Bounded(Broker):
    """amqtt's broker, which retains so much and no more. `dropped` counts what it did not keep."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by topic, the longest unheard first
        self._retained_bytes = 0
        self.dropped = 0

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
        await super().retain_message(source_session, topic_name, data, qos)
        if not data:
            return
        self._sizes[topic_name] = len(data) + len(topic_name)
        self._retained_bytes += self._sizes[topic_name]
        while len(self._sizes) > RETAINED_TOPICS_MAX or self._retained_bytes > RETAINED_BYTES_MAX:
            oldest = next(iter(self._sizes))
            self._forget(oldest)
            self.retained_messages.pop(oldest, None)
            self.dropped += 1

    def _forget(self, topic: str) -> None:
        self._retained_bytes -= self._sizes.pop(topic, 0)


async def _tell(broker: Bounded) -> None:
    """Say how much was dropped, when that changes."""
    said = 0
    while True:
        await asyncio.sleep(TELL_S)
        if broker.dropped != said:
            said = broker.dropped
            os.write(sys.stdout.fileno(), DROPPED + b"%d\n" % said)


async def _serve(host: str, port: int) -> int:
    listener = ListenerConfig(bind=f"{host}:{port}", max_connections=CLIENTS_MAX)
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
    telling = asyncio.create_task(_tell(broker))
    await orphaned.wait()
    telling.cancel()
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
