"""A small MQTT broker in a process of its own: `python -m node.observe.embedded_broker HOST PORT`.

It is amqtt as it comes: MQTT 3.1.1, no TLS, no password, and nothing survives its end. So it is for
loopback alone. It ends when its standard input does, so that it never outlives who started it. The
only file with amqtt.
"""

import asyncio
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Final

from amqtt.broker import Broker
from amqtt.contexts import BrokerConfig, ListenerConfig
from amqtt.errors import AMQTTError, BrokerError

READ_BYTES: Final = 4_096
EXIT_TAKEN: Final = 3  # the address cannot be listened on
LISTENS: Final = b"listens\n"


async def _serve(host: str, port: int) -> int:
    listener = ListenerConfig(bind=f"{host}:{port}")
    anybody = {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}}
    broker = Broker(BrokerConfig(listeners={"default": listener}, plugins=anybody))
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
    await orphaned.wait()
    with suppress(AMQTTError):
        await broker.shutdown()
    return 0


def main() -> None:
    logging.disable(logging.CRITICAL)
    host, port = sys.argv[1:]
    os._exit(asyncio.run(_serve(host, int(port))))


if __name__ == "__main__":
    main()
