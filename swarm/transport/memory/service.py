"""One served protocol of a simulated host: its places, its limits, and what was counted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.errors import LocalProtocolError, RemoteProtocolError, RequestRefused
from swarm.identity import PeerId
from swarm.transport.base import Handler, Sent, ServeLimits, TransportCounters


@dataclass(eq=False, slots=True)
class MemoryService:
    """One served protocol and who is being served."""

    protocol: str
    handler: Handler
    limits: ServeLimits
    sent: Sent
    counters: TransportCounters
    busy: Counter[PeerId] = field(default_factory=Counter)

    @contextmanager
    def place(self, client: PeerId) -> Iterator[None]:
        """Hold one of the places.

        Raises:
            RequestRefused: all are taken.
        """
        if self.busy.total() >= self.limits.concurrent_max:
            self.count_refused()
            raise RequestRefused(f"{self.protocol}: too many requests at a time")
        if self.busy[client] >= self.limits.concurrent_per_peer_max:
            self.count_refused()
            raise RequestRefused(f"{self.protocol}: too many requests of one peer at a time")
        self.busy[client] += 1
        try:
            yield
        finally:
            self.busy[client] -= 1
            if not self.busy[client]:
                del self.busy[client]

    def check_request(self, payload: bytes) -> None:
        if len(payload) > self.limits.request_bytes_max:
            self.count_refused()
            raise RequestRefused(f"{self.protocol}: over {self.limits.request_bytes_max} bytes")

    async def handle(self, client: PeerId, payload: bytes) -> bytes:
        self.counters.count_in(self.protocol, len(payload), client)
        try:
            response = await self.handler(client, payload)
        except RemoteProtocolError as error:
            raise RequestRefused(str(error)) from error
        if len(response) > self.limits.response_bytes_max:
            raise LocalProtocolError(f"{self.protocol}: answer of {len(response)} bytes")
        self.counters.count_out(self.protocol, len(response), client)
        return response

    def count_refused(self) -> None:
        self.counters.refused[self.protocol] += 1
