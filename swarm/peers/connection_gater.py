"""Keeps the peace: who may connect, whom we dial on others' word, how much each may ask, and what
a ban means.

A ban closes the peer's connections and refuses new ones, in both directions. While it runs, its
adverts are ignored and not passed on, it is neither asked nor dialled, and what the pool still
holds of it is neither served nor drawn. The ban of a block refuses its connections and no more:
what its peers signed may be as good as anybody's.

Bans are forgotten when the node restarts. A peer that goes on as before is banned again within
seconds; one that has stopped is not punished for what nobody remembers the reasons of.
"""

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from swarm.errors import (
    ConfigError,
    DialHeldBack,
    PeerUnreachable,
    Reject,
    RequestRefused,
    TransportError,
)
from swarm.identity import PeerId
from swarm.limits.address_blocks import Block, OriginPath, path_of
from swarm.limits.bounded_table import OriginLimits
from swarm.limits.dial_backoff import DialBackoff, hops_of
from swarm.limits.quotas import RELAYED, Kind, Quotas, Verdict, shared_block
from swarm.peers.ledger import Ledger
from swarm.peers.reputation import Ban, Reputation
from swarm.transport.base import Gate, Transport

log = logging.getLogger(__name__)

NEW_BANS_MAX: Final = 64  # that wait to be told of; the oldest are in force and not told of


# Inbound connections of one origin, and as many outbound ones. A private block may hold many honest
# nodes, such as a laboratory. All relayed peers may be one person.
CONNECTION_LIMITS: Final = OriginLimits(block=32, address=16, private_block=128, relayed=64)

OnBan = Callable[[Ban], Awaitable[None]]


async def _tell_nobody(ban: Ban) -> None:
    await trio.lowlevel.checkpoint()


class ConnectionGater:
    """One node's defence. It becomes the transport's gate and learns of offences from the ledger;
    `run` closes connections."""

    def __init__(
        self,
        transport: Transport,
        ledger: Ledger,
        limits: OriginLimits = CONNECTION_LIMITS,
        reputation: Reputation | None = None,
        quotas: Quotas | None = None,
        admits: Gate = lambda peer, ip: True,
    ) -> None:
        """`admits` says who may connect at all."""
        self._transport = transport
        self.ledger = ledger
        self._reputation = reputation or Reputation()
        self._quotas = quotas or Quotas()
        self._new: deque[Ban] = deque(maxlen=NEW_BANS_MAX)
        self._wake = trio.Event()
        self._membership = admits
        self.refused_connections: Counter[str] = Counter()  # by why
        self.dials = DialBackoff()
        self.on_ban: OnBan = _tell_nobody
        transport.set_gate(self._admits, limits)
        transport.report_to(ledger.reject)
        ledger.on_accept, ledger.on_reject = self._good, self._bad

    # --- connections -----------------------------------------------------------------------

    def _admits(self, peer: PeerId, ip: str | None) -> bool:
        why = self._objection(peer, ip) if self._membership(peer, ip) else "no member"
        if why is None:
            return True
        self.refused_connections[why] += 1
        log.debug("%s, from %s, is not let in: %s", peer, ip, why)
        return False

    def _objection(self, peer: PeerId, ip: str | None) -> str | None:
        now, share = trio.current_time(), shared_block(ip)
        if self._reputation.is_banned(peer, now):
            return "banned peer"
        if self._reputation.is_banned(share, now):
            return "banned block"
        if self._quotas.take(Kind.CONNECT, peer, share, now) is not Verdict.GRANTED:
            return "too often"
        return None

    def block_of(self, peer: PeerId) -> Block | None:
        """The peer's public address block, with which it may be banned. None: it is not connected,
        relayed, or at a private address."""
        block = self._shared_block(peer)
        return None if block == RELAYED else block

    def _shared_block(self, peer: PeerId) -> Block | None:
        connected = peer in self._transport.peers()
        return shared_block(self._transport.ip_of(peer)) if connected else None

    def is_relayed(self, peer: PeerId) -> bool:
        """Whether the peer is connected and nothing shows where it is."""
        return self._shared_block(peer) == RELAYED

    def share_of(self, peer: PeerId) -> PeerId | Block:
        """In whose name the peer takes a share of something that is divided by peers."""
        return self._shared_block(peer) or peer

    def path_of(self, peer: PeerId) -> OriginPath:
        """Where the peer is, and in that itself."""
        return (*path_of(self._transport.ip_of(peer)), peer)

    # --- dialling --------------------------------------------------------------------------

    def may_dial(self) -> Callable[[str], bool]:
        """Tells of addresses whether `dial` would dial them now."""
        connected, now_s = frozenset(self._transport.peers()), trio.current_time()
        return lambda address: self.dials.allows(hops_of(address, connected), now_s)

    async def dial(self, address: str, *, timeout_s: float) -> PeerId:
        """Dial an address that others named; see `dial_backoff`. Those that a person gave, such as
        bootstrap peers', are dialled without this.

        Raises:
            DialHeldBack: it is too soon.
            PeerUnreachable: as of `Transport.connect`.
            ConfigError: likewise.
        """
        connected = self._transport.peers()
        peer = PeerId(address.rpartition("/p2p/")[2])
        if peer in connected:
            return await self._transport.connect(address, timeout_s=timeout_s)
        hops = hops_of(address, connected)
        if not self.dials.begin(hops, trio.current_time()):
            raise DialHeldBack(f"{address}: dialled not long ago, or too many like it were")
        try:
            found = await self._transport.connect(address, timeout_s=timeout_s)
        except (TransportError, ConfigError) as error:
            log.debug("dialled in vain: %s", error)  # which names the address
            self._note_failure(address)
            raise
        self.note_answer(address)
        return found

    def note_answer(self, address: str) -> None:
        """A peer has answered there, whoever gave the address."""
        for hop in hops_of(address, ()):
            self.dials.succeeded(hop)

    async def dial_one_of(self, addresses: Sequence[str], *, timeout_s: float) -> str:
        """Dial a peer's addresses, each with that time, until it answers at one; returns that one.

        Raises:
            DialHeldBack: it is too soon for all of them.
            PeerUnreachable: it answers at none.
        """
        tried = False
        for address in addresses:
            try:
                await self.dial(address, timeout_s=timeout_s)
            except DialHeldBack:
                continue
            except (TransportError, ConfigError):
                tried = True
                continue
            return address
        if not tried and addresses:
            raise DialHeldBack("no address of the peer may be dialled now")
        raise PeerUnreachable("the peer answers at none of its addresses")

    def _note_failure(self, address: str) -> None:
        """Note a failed dial. Through a relay, the first part that did not come about failed."""
        connected, now_s = self._transport.peers(), trio.current_time()
        failed = hops_of(address, connected)[0]
        # with nobody to be reached, the fault may be our own link's
        self.dials.failed(failed, now_s, counts=bool(connected))

    # --- quotas ----------------------------------------------------------------------------

    def allows(self, kind: Kind, peer: PeerId, cost: float = 1.0) -> bool:
        """Whether the peer is within its quota; asking costs."""
        block = self._shared_block(peer)
        verdict = self._quotas.take(kind, peer, block, trio.current_time(), cost)
        if verdict is Verdict.FLOOD and kind is not Kind.ADVERT:
            # a forwarder of adverts cannot help how many there are
            self.ledger.reject(peer, Reject.FLOOD)
        return verdict is Verdict.GRANTED

    def check_quota(self, kind: Kind, peer: PeerId) -> None:
        """As `allows`.

        Raises:
            RequestRefused: it is over its quota.
        """
        if not self.allows(kind, peer):
            raise RequestRefused(f"too many requests ({kind})")

    # --- reputation ------------------------------------------------------------------------

    def _good(self, peer: PeerId) -> None:
        self._reputation.good(peer, trio.current_time())

    def _bad(self, peer: PeerId, reason: Reject) -> None:
        if peer == self._transport.peer_id:
            return
        bans = self._reputation.bad(peer, reason, self.block_of(peer), trio.current_time())
        if bans:
            self._new.extend(bans)
            self._wake.set()

    def is_banned(self, peer: PeerId) -> bool:
        """Whether a ban on the peer runs."""
        return self._reputation.is_banned(peer, trio.current_time())

    def banned_peers(self) -> frozenset[PeerId]:
        """All peers on whom a ban runs."""
        return frozenset(PeerId(ban.subject) for ban in self.bans() if not ban.is_block)

    def bans(self) -> list[Ban]:
        """The bans that run now, oldest first; `until` is of trio's clock."""
        return self._reputation.bans(trio.current_time())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Close the connections of whoever is banned, and tell of each ban, until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                now = trio.current_time()
                for peer in self._transport.peers():
                    bans = (peer, self.block_of(peer))
                    if any(self._reputation.is_banned(subject, now) for subject in bans):
                        nursery.start_soon(self._transport.disconnect, peer)
                while self._new:
                    await self.on_ban(self._new.popleft())
