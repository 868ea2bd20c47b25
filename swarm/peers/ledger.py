"""Accepted groups and offences by peer. Pure and bounded."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.limits.bounded_table import BoundedTable

log = logging.getLogger(__name__)

LEDGER_PEERS_MAX = 1024

T = TypeVar("T")


def _ignore(*_: object) -> None:
    pass


@dataclass(slots=True)
class PeerRecord:
    accepted: int = 0
    trained: int = 0
    rejected: Counter[Reject] = field(default_factory=Counter)


class Ledger:
    """Accounts of peers. When full, the least recently used without an accepted group goes first:
    keys cost nothing. Totals stay."""

    def __init__(self, peers_max: int = LEDGER_PEERS_MAX) -> None:
        self._peers: BoundedTable[PeerId, PeerRecord] = BoundedTable(
            peers_max, rank_of=lambda _, record: int(record.accepted > 0)
        )
        self.on_accept: Callable[[PeerId], None] = _ignore
        self.on_reject: Callable[[PeerId, Reject], None] = _ignore
        self.accepted = 0
        self.rejected: Counter[Reject] = Counter()

    def of(self, peer: PeerId) -> PeerRecord:
        """Account of a peer, created if missing."""
        return self._peers.obtain(peer, PeerRecord)

    def accept(self, producer: PeerId) -> None:
        """Count a group that passed every check."""
        self.accepted += 1
        self.of(producer).accepted += 1
        self.on_accept(producer)

    def reject(self, peer: PeerId, reason: Reject) -> None:
        self.rejected[reason] += 1
        log.debug("what %s sent is refused: %s", peer, reason.value)
        self.of(peer).rejected[reason] += 1
        self.on_reject(peer, reason)

    def judge(self, peer: PeerId, check: Callable[..., T], *args: Any) -> T:
        """Run a check of foreign bytes. An error counts against their proven signer, else against
        the sender `peer`.

        Raises:
            RemoteProtocolError: the check's.
        """
        try:
            return check(*args)
        except RemoteProtocolError as error:
            self.reject(PeerId(error.signer or peer), error.reason)
            raise

    def peers(self) -> list[PeerId]:
        """Peers with an account, ordered by id."""
        return sorted(self._peers)
