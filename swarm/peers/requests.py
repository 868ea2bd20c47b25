"""Requests to peers, and the choice of peers to ask for news."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from swarm.errors import RemoteProtocolError
from swarm.identity import PeerId
from swarm.peers.reputation import Ledger
from swarm.transport.base import Transport
from swarm.wire import codec
from swarm.wire.messages import WireModel

M = TypeVar("M", bound=WireModel)


async def ask(
    transport: Transport,
    peer: PeerId,
    protocol: str,
    question: WireModel | bytes,
    answer: type[M],
    bytes_max: int,
    timeout_s: float,
    ledger: Ledger | None = None,
) -> M:
    """The peer's answer; raises as `Transport.request` and `codec.decode`. `question`: a message,
    or its encoded record. `ledger` counts what breaks the protocol against the peer."""
    body = question if isinstance(question, bytes) else codec.encode(question)
    try:
        data = await transport.request(
            peer, protocol, body, timeout_s=timeout_s, response_bytes_max=bytes_max
        )
        return codec.decode(data, answer, bytes_max)
    except RemoteProtocolError as error:
        if ledger is not None:
            ledger.reject(peer, error.reason)
        raise


class PeersToAsk:
    """Chooses each new peer once, and one of all peers about every `again_s`."""

    def __init__(self, again_s: float, most: int, rng: Random, now_s: float) -> None:
        """`most`: new peers in one draw."""
        self._again_s = again_s
        self._most = most
        self._rng = rng
        self._again_at_s = now_s + again_s
        self._asked: set[PeerId] = set()

    def draw(self, peers: Sequence[PeerId], now_s: float) -> list[PeerId]:
        self._asked.intersection_update(peers)
        new = [peer for peer in peers if peer not in self._asked]
        chosen = self._rng.sample(new, min(len(new), self._most))
        if peers and now_s >= self._again_at_s:
            self._again_at_s = now_s + self._again_s * (0.75 + self._rng.random() / 2)
            chosen.append(self._rng.choice(peers))
        self._asked.update(chosen)
        return list(dict.fromkeys(chosen))

    def forget(self, peer: PeerId) -> None:
        """Count a peer as new: it did not answer."""
        self._asked.discard(peer)

    def forget_all(self) -> None:
        self._asked.clear()
