"""Search for other holders of a group whose producer does not deliver. A node asks a few
connected peers at once; to announce holdings would cost every node bytes for every group."""

from collections.abc import Sequence
from random import Random

import trio

from swarm.errors import RemoteProtocolError, TransportError
from swarm.identity import PeerId
from swarm.limits.bounded_table import BoundedTable
from swarm.peers.reputation import Ledger
from swarm.peers.requests import ask
from swarm.rollouts import GroupId
from swarm.transport.base import Transport
from swarm.wire.messages import (
    HAVE_REPLY_BYTES_MAX,
    HOLDERS_PROTOCOL,
    WANT_GROUPS_MAX,
    Have,
    HaveReply,
)

ASKED_MAX = 8  # peers, for one batch of missing groups
FORWARDERS_MAX = 2  # of them, who forwarded the adverts: they heard of the groups early
HAVE_TIMEOUT_S = 3.0
SEARCHES_MAX = 4  # at a time; each asks a peer once, and 4 requests may be open at one peer
RESTING_MAX = 256  # peers left alone as holders, the most recent ones

Found = list[tuple[PeerId, frozenset[GroupId]]]


class HolderSearch:
    """Asks connected peers what they hold; those that did not deliver rest for a while."""

    def __init__(self, run_id: str, transport: Transport, ledger: Ledger, rng: Random) -> None:
        self._run_id = run_id
        self._transport = transport
        self._ledger = ledger
        self._rng = rng
        self._rests_until: BoundedTable[PeerId, float] = BoundedTable(RESTING_MAX)
        self._searches = trio.Semaphore(SEARCHES_MAX)

    def rest(self, peer: PeerId, seconds: float) -> None:
        """Do not ask this peer for `seconds`: it held a group and did not deliver it."""
        self._rests_until.put(peer, trio.current_time() + seconds)

    async def find(
        self, wanted: Sequence[GroupId], forwarders: Sequence[PeerId], producer: PeerId
    ) -> Found:
        """Peers that would serve wanted groups, most groups first. Returns when somebody holds
        all, when all have answered, or `HAVE_TIMEOUT_S` after it began."""
        group_ids = list(wanted[:WANT_GROUPS_MAX])
        have = Have(type="have", run_id=self._run_id, group_ids=tuple(group_ids))
        found: Found = []
        async with self._searches, trio.open_nursery() as nursery:

            async def ask(peer: PeerId) -> None:
                held = await self._ask(peer, have, group_ids)
                if held:
                    found.append((peer, held))
                if len(held) == len(group_ids):
                    nursery.cancel_scope.cancel()

            for peer in self._whom(forwarders, producer):
                nursery.start_soon(ask, peer)
        return sorted(found, key=lambda each: -len(each[1]))

    def _whom(self, forwarders: Sequence[PeerId], producer: PeerId) -> list[PeerId]:
        now = trio.current_time()
        connected = [
            peer
            for peer in self._transport.peers()
            if peer != producer and self._rests_until.get(peer, now) <= now
        ]
        first = [peer for peer in dict.fromkeys(forwarders) if peer in connected][:FORWARDERS_MAX]
        others = [peer for peer in connected if peer not in first]
        return first + self._rng.sample(others, min(len(others), ASKED_MAX - len(first)))

    async def _ask(
        self, peer: PeerId, have: Have, group_ids: Sequence[GroupId]
    ) -> frozenset[GroupId]:
        try:
            reply = await ask(
                self._transport,
                peer,
                HOLDERS_PROTOCOL,
                have,
                HaveReply,
                HAVE_REPLY_BYTES_MAX,
                HAVE_TIMEOUT_S,
                self._ledger,
            )
        except (RemoteProtocolError, TransportError):
            return frozenset()
        return frozenset(group_ids[at] for at in reply.held if at < len(group_ids))
