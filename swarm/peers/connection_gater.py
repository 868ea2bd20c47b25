"""Admission of peers: connections, dials on hearsay, quotas, and bans. A ban closes the peer's
connections and refuses new ones; its adverts are ignored, its groups neither served nor drawn. A
ban of a block refuses connections only. Bans end with a restart."""

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import trio

from swarm.errors import (
    ConfigError,
    DialHeldBack,
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
)
from swarm.identity import PeerId
from swarm.limits.address_blocks import Block, OriginPath, path_of
from swarm.limits.bounded_table import OriginLimits
from swarm.limits.dial_backoff import DialBackoff, hops_of
from swarm.limits.quotas import RELAYED, Kind, Quotas, Verdict, shared_block
from swarm.peers.reputation import Ban, Ledger, Reputation
from swarm.transport.base import Gate, Transport
from swarm.wire import codec
from swarm.wire.messages import WireModel

M = TypeVar("M", bound=WireModel)

log = logging.getLogger(__name__)

NEW_BANS_MAX: Final = 64  # waiting for `on_ban`; dropped ones are in force
# Connections of one origin, for each direction. A private block may hold many honest nodes; all
# relayed peers may be one person.
CONNECTION_LIMITS: Final = OriginLimits(block=32, address=16, private_block=128, relayed=64)

OnBan = Callable[[Ban], Awaitable[None]]


class ConnectionGater:
    """One node's gate for the transport, fed with offences by the ledger."""

    def __init__(
        self,
        transport: Transport,
        ledger: Ledger,
        limits: OriginLimits = CONNECTION_LIMITS,
        admits: Gate = lambda peer, ip: True,
    ) -> None:
        """`admits` decides who may connect at all."""
        self.transport = transport
        self.ledger = ledger
        self._reputation = Reputation()
        self._quotas = Quotas()
        self._new: deque[Ban] = deque(maxlen=NEW_BANS_MAX)
        self._wake = trio.Event()
        self._membership = admits
        self.refused_connections: Counter[str] = Counter()  # by reason
        self.last_unlisted: PeerId | None = None  # the last that `admits` refused
        self.dials = DialBackoff()
        self.on_ban: OnBan | None = None
        transport.set_gate(self._admits, limits)
        transport.report_to(ledger.reject)
        ledger.on_accept, ledger.on_reject = self._good, self._bad

    def _admits(self, peer: PeerId, ip: str | None) -> bool:
        is_member = self._membership(peer, ip)
        why = self._objection(peer, ip) if is_member else "no member"
        if why is None:
            return True
        self.refused_connections[why] += 1
        self.last_unlisted = self.last_unlisted if is_member else peer
        log.debug("%s, from %s, is not let in: %s", peer, ip, why)
        return False

    def _objection(self, peer: PeerId, ip: str | None) -> str | None:
        now, share = trio.current_time(), shared_block(ip)
        if self._reputation.is_banned(peer, now):
            return "banned peer"
        if self._reputation.is_banned(share, now):
            return "banned block"
        if self._quotas.spend(Kind.CONNECT, peer, share, now) is not Verdict.GRANTED:
            return "too often"
        return None

    def block_of(self, peer: PeerId) -> Block | None:
        """The public block with which a connected peer may be banned, if any."""
        block = self._shared_block(peer)
        return None if block == RELAYED else block

    def _shared_block(self, peer: PeerId) -> Block | None:
        connected = peer in self.transport.peers()
        return shared_block(self.transport.ip_of(peer)) if connected else None

    def is_relayed(self, peer: PeerId) -> bool:
        """True if the peer is connected without a known address."""
        return self._shared_block(peer) == RELAYED

    def share_of(self, peer: PeerId) -> PeerId | Block:
        """The block or peer under which a divided resource is counted."""
        return self._shared_block(peer) or peer

    def path_of(self, peer: PeerId) -> OriginPath:
        return (*path_of(self.transport.ip_of(peer)), peer)

    def may_dial(self) -> Callable[[str], bool]:
        """A function: True for an address that `dial` would dial now."""
        connected, now_s = frozenset(self.transport.peers()), trio.current_time()
        return lambda address: self.dials.allows(hops_of(address, connected), now_s)

    async def dial(self, address: str, *, timeout_s: float) -> PeerId:
        """Dial an address that a peer named; DialHeldBack: too soon."""
        connected = self.transport.peers()
        peer = PeerId(address.rpartition("/p2p/")[2])
        if peer in connected:
            return await self.transport.connect(address, timeout_s=timeout_s)
        hops = hops_of(address, connected)
        if not self.dials.begin(hops, trio.current_time()):
            raise DialHeldBack(f"{address}: dialled not long ago, or too many like it were")
        try:
            found = await self.transport.connect(address, timeout_s=timeout_s)
        except (TransportError, ConfigError) as error:
            log.debug("dialled in vain: %s", error)  # the error names the address
            connected = self.transport.peers()
            failed = hops_of(address, connected)[0]  # through a relay, the first not connected
            # without any connection, our own link may be down
            self.dials.failed(failed, trio.current_time(), counts=bool(connected))
            raise
        self.record_answer(address)
        return found

    def record_answer(self, address: str) -> None:
        for hop in hops_of(address, ()):
            self.dials.succeeded(hop)

    async def dial_one_of(self, addresses: Sequence[str], *, timeout_s: float) -> str:
        """The first address that answers. DialHeldBack: it is too soon for all."""
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

    def allows(self, kind: Kind, peer: PeerId, cost: float = 1.0) -> bool:
        """Spend the peer's quota. False: it is used up."""
        block = self._shared_block(peer)
        verdict = self._quotas.spend(kind, peer, block, trio.current_time(), cost)
        if verdict is Verdict.FLOOD and kind is not Kind.ADVERT:
            # a forwarder does not choose the number of adverts
            self.ledger.reject(peer, Reject.FLOOD)
        return verdict is Verdict.GRANTED

    def check_quota(self, kind: Kind, peer: PeerId) -> None:
        """As `allows`, but raises RequestRefused."""
        if not self.allows(kind, peer):
            raise RequestRefused(f"too many requests ({kind})")

    def read(self, quota: Kind, peer: PeerId, payload: bytes, kind: type[M], bytes_max: int) -> M:
        """A peer's request of this kind, within its quota; offences are counted."""
        self.check_quota(quota, peer)
        message: M = self.ledger.judge(peer, codec.decode, payload, kind, bytes_max)
        return message

    def check_run(self, peer: PeerId, run_id: str, own: str) -> None:
        """Refuse a request of another run; counted against the peer."""
        if run_id != own:
            self.ledger.reject(peer, Reject.OTHER_RUN)
            raise RemoteProtocolError(Reject.OTHER_RUN, run_id)

    def _good(self, peer: PeerId) -> None:
        self._reputation.record_good(peer, trio.current_time())

    def _bad(self, peer: PeerId, reason: Reject) -> None:
        if peer == self.transport.peer_id:
            return
        bans = self._reputation.record_offence(
            peer, reason, self.block_of(peer), trio.current_time()
        )
        if bans:
            self._new.extend(bans)
            self._wake.set()

    def is_banned(self, peer: PeerId) -> bool:
        return self._reputation.is_banned(peer, trio.current_time())

    def banned_peers(self) -> frozenset[PeerId]:
        return frozenset(PeerId(ban.subject) for ban in self.bans() if not ban.is_block)

    def bans(self) -> list[Ban]:
        """Active bans, oldest first; `until` is of trio's clock."""
        return self._reputation.bans(trio.current_time())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Close connections of banned peers and call `on_ban`, until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                now = trio.current_time()
                for peer in self.transport.peers():
                    bans = (peer, self.block_of(peer))
                    if any(self._reputation.is_banned(subject, now) for subject in bans):
                        nursery.start_soon(self.transport.disconnect, peer)
                while self._new:
                    ban = self._new.popleft()
                    if self.on_ban is not None:
                        await self.on_ban(ban)
