"""From a broker into a `Watch`, and what to say of that broker."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from swarm.telemetry.broker_address import Broker
from swarm.telemetry.dashboard.state import ReportSource
from swarm.telemetry.fleet_view import Watch
from swarm.telemetry.mqtt import Incoming, Subscriber

TOPICS: Final = ("swarm/+/+/report", "swarm/+/+/status")


class Listening:
    """Hears what nodes publish at a broker. `unix_s` and `rng` as in `Watch` and `Subscriber`."""

    def __init__(
        self, broker: Broker, watch: Watch, *, unix_s: Callable[[], float], rng: Random
    ) -> None:
        self._name = str(broker)
        self._watch = watch
        self._unix_s = unix_s
        self._subscriber = Subscriber(broker, TOPICS, rng)
        self._heard_s = unix_s()  # when it was connected, for all that was seen

    async def run(self) -> None:
        """Listen until cancelled; a broker that does not answer is tried again and again."""
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
        """Counts messages by what became of them before the watch saw them."""
        return {
            "messages_received": self._subscriber.received,
            "messages_dropped": self._subscriber.dropped,
            "connections_tried": self._subscriber.connections,
        }
