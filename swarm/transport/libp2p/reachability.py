"""Reachability: can others dial this node, and relays and hole punching where they cannot.

Connected peers are asked to dial back to the IP address at which they see us, never to another. If
enough of them succeed (`observations.py`), we tell others that address. Otherwise we keep
reservations at up to `RESERVATIONS_WANTED` relays, until somebody has connected directly, and tell
the relayed addresses.

Both ends of a relayed connection try to replace it by a direct one (libp2p's DCUtR over TCP): they
dial each other at the same moment. That works if

* both dial from their listening port, and their routers keep port numbers (most do; a "symmetric
  NAT" does not);
* neither router answers the other's first packet with a reset;
* the end that was dialled through the relay acts as server in the handshake.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain, cycle
from random import Random
from typing import Any, Protocol
from weakref import WeakSet

import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import dcutr_pb2 as pb
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from swarm.errors import (
    PeerUnreachable,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
)
from swarm.identity import PeerId
from swarm.limits.address_blocks import GLOBAL, LOCAL, THIS_MACHINE, canonical_ip, reach_of_ip
from swarm.limits.bounded_table import BoundedTable
from swarm.limits.dial_backoff import DialAttempts
from swarm.transport.base import ServeLimits, Transport
from swarm.transport.libp2p.admission import (
    BoundedRawConnection,
    HardSwarm,
    is_live,
    remote_ip,
)
from swarm.transport.libp2p.negotiation import Reader
from swarm.transport.libp2p.observed_addresses import (
    ASK_AGAIN_S,
    Observations,
    Opinion,
    ReachVerdict,
    voice_of,
)
from swarm.transport.libp2p.relay import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    Call,
    Relay,
    accept_circuit,
    encoded,
    read_message,
    reserve,
)
from swarm.transport.libp2p.streams import READ_BYTES, reset
from swarm.transport.libp2p.yamux import MuxedConnection
from swarm.wire import codec
from swarm.wire.messages import (
    REACH_BYTES_MAX,
    REACH_PORTS_MAX,
    REACH_PROTOCOL,
    DialBack,
    DialBackReply,
)

PUNCH_PROTOCOL = "/libp2p/dcutr"

TICK_S = 2.0
ASK_TIMEOUT_S = 15.0

DIAL_BACK_TIMEOUT_S = 4.0
DIAL_BACKS_MAX = 4  # at a time
DIAL_BACK_EVERY_S = 10.0  # for one peer
DIAL_BACKS_PER_IP_MAX = 8  # per public IP address within the window below
DIAL_BACKS_WINDOW_S = 60.0
DIALLED_BACK_MAX = 256  # peers with a remembered time

RESERVATIONS_WANTED = 2
REFUSED_AGAIN_S = 120.0
RENEW_SHARE = 0.5  # of its duration, after which it is renewed

PUNCH_ROUNDS = 3
PUNCH_ROUND_S = 8.0
PUNCH_DIAL_S = 2.5  # time for two SYNs
PUNCH_DIAL_EVERY_S = 0.5  # per IP address
PUNCH_ADDRESSES_MAX = 8
PUNCH_IPS_MAX = 2  # dialled per peer, so that we are no tool for a flood
PUNCH_ROUNDS_PER_IP_MAX = 9  # per public IP address within `PUNCH_AGAIN_S`
PUNCHES_MAX = 8  # at a time, in both roles
PUNCHED_MAX = 256  # remembered peers; beyond it no punching
DIRECT_FIRST_S = 3.0  # plain dial before punching
RELAY_GRACE_S = 3.0  # between the direct connection and closing the relayed one
PUNCH_AGAIN_S = 300.0
ANSWER_AGAIN_S = 0.9 * PUNCH_AGAIN_S  # less than above, so that honest peers are never refused

_Targets = Mapping[str, Sequence[Multiaddr]]  # by IP address

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReachRules:
    relay: bool = True  # for others, if this node is reachable
    punch: bool = True


@dataclass(slots=True)
class ReachSummary:
    """Current knowledge. `reachable` None: too few peers were asked."""

    reachable: bool | None = None
    voices: int = 0  # address blocks or private addresses that reported
    observed_ip: str | None = None  # that they agree on
    keeps_ports: bool | None = None  # our router keeps ports, which hole punching needs
    addresses: tuple[str, ...] = ()  # proven from outside and not listened on
    relays: tuple[PeerId, ...] = ()  # with a reservation of ours
    relayed_for: int = 0  # reservations held here for others
    punched: int = 0
    punch_failures: int = 0


class Host(Transport, Protocol):
    """The parts of a libp2p host that are used here, beside the common interface."""

    def own_addresses(self) -> Sequence[str]: ...
    def blame(self, peer: ID, reason: Reject) -> None: ...
    def handle(self, protocol: str, handler: Callable[[INetStream], Awaitable[None]]) -> None: ...


# Long: asking, answering, relaying and punching share one picture.
class Reachability:
    """Reachability of one node. `run` keeps it current until cancelled."""

    def __init__(self, host: Host, network: HardSwarm, rules: ReachRules, rng: Random) -> None:
        self._host = host
        self._network = network
        self._rules = rules
        self._rng = rng
        self._observations = Observations()
        self._verdict = ReachVerdict()
        self._inbound: WeakSet[SwarmConn] = WeakSet()  # inbound connections already counted
        self._asked: dict[PeerId, float] = {}
        self._dialled_back: BoundedTable[PeerId, float] = BoundedTable(DIALLED_BACK_MAX)
        self._reservations: dict[PeerId, tuple[float, float]] = {}  # renew at, over at
        self._through: Counter[PeerId] = Counter()  # circuits to us by relay
        self._refused: dict[PeerId, float] = {}
        self._punching: set[ID] = set()  # now
        self._punched: dict[ID, float] = {}  # punched by us: not again before
        self._answered: dict[ID, tuple[int, float]] = {}  # by the peer: rounds, until when
        self._dial_backs = DialAttempts(DIAL_BACKS_PER_IP_MAX, DIAL_BACKS_WINDOW_S)
        self._attempts = DialAttempts(PUNCH_ROUNDS_PER_IP_MAX, PUNCH_AGAIN_S)
        self._relay = Relay(self.direct, self._direct_ip, self._offers_relay, host.blame)
        self._nursery: trio.Nursery | None = None
        self.summary = ReachSummary()

    # --- connections -----------------------------------------------------------------------

    def direct(self, peer: ID) -> SwarmConn | None:
        """A live connection to a peer without a relay."""
        return self._network.live(peer, relayed=False)

    def _direct_ip(self, peer: ID) -> str | None:
        conn = self.direct(peer)
        return None if conn is None else remote_ip(conn.muxed_conn)

    def _direct_peers(self) -> list[tuple[PeerId, str]]:
        found = [(peer, self._direct_ip(ID.from_base58(peer))) for peer in self._host.peers()]
        return [(peer, ip) for peer, ip in found if ip is not None]

    # --- life ------------------------------------------------------------------------------

    def ask_again(self) -> None:
        """Drop all reports and ask again: our network has changed."""
        self._observations.forget()
        self._asked.clear()

    def start(self) -> None:
        self._host.serve(
            REACH_PROTOCOL,
            self._serve_dial_back,
            ServeLimits(
                REACH_BYTES_MAX, REACH_BYTES_MAX, DIAL_BACKS_MAX, 1,
                timeout_s=REACH_PORTS_MAX * DIAL_BACK_TIMEOUT_S,
            ),
        )  # fmt: skip
        self._host.handle(STOP_PROTOCOL, self._serve_stop)
        self._host.handle(PUNCH_PROTOCOL, self._serve_punch)
        if self._rules.relay:
            self._host.handle(HOP_PROTOCOL, self._relay.serve)

    async def run(self) -> None:
        async with trio.open_nursery() as self._nursery:
            while True:
                await trio.sleep(TICK_S * (0.9 + 0.2 * self._rng.random()))
                self._record_inbound()
                await self._ask_next()
                await self._keep_reservations()
                self._forget()
                for target in list(self._network.connections):  # that dialled us through a relay
                    conn = self._relayed(target)
                    if conn is not None and not conn.muxed_conn.is_initiator:
                        self._begin_punch(target)
                self.summary.relayed_for = self._relay.reservations

    def _forget(self) -> None:
        now_s, here = trio.current_time(), set(self._host.peers())
        for notes in (self._asked, self._refused):
            for peer in notes.keys() - here:
                del notes[peer]
        self._punched = {
            peer: until_s for peer, until_s in self._punched.items() if until_s > now_s
        }
        self._answered = {peer: each for peer, each in self._answered.items() if each[1] > now_s}

    # --- the check -------------------------------------------------------------------------

    def _ports(self) -> tuple[int, ...]:
        ports = [int(address.split("/")[4]) for address in self._host.own_addresses()]
        return tuple(dict.fromkeys(ports))[:REACH_PORTS_MAX]

    async def _ask_next(self) -> None:
        """Ask one more peer if needed, then update the verdict."""
        now_s = trio.current_time()
        able = (
            (peer, ip)
            for peer, ip in self._direct_peers()
            if now_s - self._asked.get(peer, -ASK_AGAIN_S) >= ASK_AGAIN_S
        )
        chosen = self._observations.choose_peer(able, now_s, self._rng)
        if chosen is not None:
            self._asked[chosen[0]] = now_s
            await self._ask(*chosen)
        self._update_verdict()

    async def _ask(self, peer: PeerId, ip: str) -> None:
        local = _local_port(self.direct(ID.from_base58(peer)))  # the answer may end the connection
        request = codec.encode(DialBack(type="dial_back", ports=self._ports()))
        try:
            answer = await self._host.request(
                peer, REACH_PROTOCOL, request,
                timeout_s=ASK_TIMEOUT_S, response_bytes_max=REACH_BYTES_MAX,
            )  # fmt: skip
            reply = codec.decode(answer, DialBackReply, REACH_BYTES_MAX)
        except RemoteProtocolError as error:
            self._host.blame(ID.from_base58(peer), error.reason)
            return
        except TransportError as error:
            log.debug("%s does not dial back: %r", peer, error)
            return
        observed_ip = canonical_ip(reply.observed_ip)
        if observed_ip is None:
            self._host.blame(ID.from_base58(peer), Reject.MALFORMED)  # no usable address
            return
        opinion = Opinion(
            ip,  # as we see it, not as it claims
            observed_ip,
            frozenset(reply.ports) & frozenset(self._ports()),
            None if local is None else local == reply.observed_port,
            trio.current_time(),
        )
        self._observations.record(peer, opinion)

    def _record_inbound(self) -> None:
        """Record inbound connections as proof of reachability, except those from hole punching."""
        for target, conns in self._network.connections.items():
            for conn in conns:
                assert isinstance(conn, SwarmConn)
                if conn in self._inbound or conn.muxed_conn.is_initiator or not is_live(conn):
                    continue
                self._inbound.add(conn)
                ip = remote_ip(conn.muxed_conn)
                if ip is not None and target not in {*self._punched, *self._answered}:
                    self._observations.record_inbound(PeerId(str(target)), ip)

    def _update_verdict(self) -> None:
        verdict = self._verdict = self._observations.decide(trio.current_time())
        self.summary.reachable = verdict.reachable
        self.summary.voices = len(self._observations)
        self.summary.observed_ip = verdict.observed_ip
        self.summary.keeps_ports = verdict.keeps_ports
        known = set(self._host.own_addresses())
        found = [_multiaddr(ip, port) for ip, port in verdict.proven]
        self.summary.addresses = tuple(each for each in found if each not in known)

    async def _serve_dial_back(self, peer: PeerId, payload: bytes) -> bytes:
        target = ID.from_base58(peer)
        try:
            asked = codec.decode(payload, DialBack, REACH_BYTES_MAX)
        except RemoteProtocolError as error:
            self._host.blame(target, error.reason)
            raise
        ip = self._direct_ip(target)
        now_s = trio.current_time()
        if ip is None:
            raise RequestRefused("no direct connection: nothing to dial back to")
        if now_s - self._dialled_back.get(peer, -DIAL_BACK_EVERY_S) < DIAL_BACK_EVERY_S:
            raise RequestRefused("asked a moment ago")
        if not self._dial_backs.allow(ip, now_s):
            raise RequestRefused("others asked from the same address")
        self._dialled_back.put(peer, now_s)
        reached = [
            port for port in dict.fromkeys(asked.ports) if await self._answers_at(ip, port, target)
        ]
        conn = self.direct(target)
        remote = None if conn is None else conn.muxed_conn.secured_conn.get_remote_address()  # type: ignore[attr-defined]
        reply = DialBackReply(
            type="dial_back_reply",
            observed_ip=ip,
            observed_port=remote[1] if remote is not None else None,
            ports=tuple(reached),
        )
        return codec.encode(reply)

    async def _answers_at(self, ip: str, port: int, target: ID) -> bool:
        """True if the peer answers at this address with its key."""
        address = Multiaddr(_multiaddr(ip, port))
        with trio.move_on_after(DIAL_BACK_TIMEOUT_S), suppress(BaseLibp2pError, OSError):
            raw = await TCP().dial(address)
            try:
                await self._network.upgrader.upgrade_security(raw, True, target)
            finally:
                with trio.CancelScope(shield=True):
                    await raw.close()
            return True
        return False

    # --- reservations ----------------------------------------------------------------------

    def _offers_relay(self) -> bool:
        """One peer that could dial us is enough: relayed peers announce the address at which they
        dialled us."""
        verdict = self._verdict
        return self._rules.relay and verdict.reachable is not False and verdict.has_led_here

    async def _keep_reservations(self) -> None:
        now_s = trio.current_time()
        for peer, (_, over_s) in list(self._reservations.items()):
            if over_s <= now_s or self.direct(ID.from_base58(peer)) is None:
                del self._reservations[peer]
        if self._verdict.needs_relay:
            for peer, (renew_s, _) in list(self._reservations.items()):
                if renew_s <= now_s:
                    await self._reserve_at(peer)
            for _ in range(RESERVATIONS_WANTED - len(self._reservations)):
                chosen = self._choose_relay()
                if chosen is not None:
                    await self._reserve_at(chosen)
        self.summary.relays = tuple(self._reservations)

    def _choose_relay(self) -> PeerId | None:
        """A relay at random, if possible in another address block than the current ones."""
        now_s = trio.current_time()
        voices = {peer: voice_of(peer, ip) for peer, ip in self._direct_peers()}
        taken = {voices.get(relay) for relay in self._reservations}
        able = [
            peer
            for peer in voices
            if peer not in self._reservations
            and now_s - self._refused.get(peer, -REFUSED_AGAIN_S) >= REFUSED_AGAIN_S
        ]
        apart = [peer for peer in able if voices[peer] not in taken]
        return self._rng.choice(apart or able) if able else None

    async def _reserve_at(self, peer: PeerId) -> None:
        conn = self.direct(ID.from_base58(peer))
        if conn is None:
            return
        now_s = trio.current_time()
        try:
            life_s = await reserve(conn)
        except (PeerUnreachable, RemoteProtocolError) as error:
            log.debug("%s: %s", peer, error)
            if isinstance(error, RemoteProtocolError):
                self._host.blame(conn.muxed_conn.peer_id, error.reason)
            self._refused[peer] = now_s
            return
        self._reservations[peer] = (now_s + RENEW_SHARE * life_s, now_s + life_s)

    def relayed_addresses(self) -> list[str]:
        """Our addresses through relays, that of the least used relay first."""
        found: list[str] = []
        for relay in sorted(self._reservations, key=lambda relay: self._through[relay]):
            conn = self.direct(ID.from_base58(relay))
            where = None if conn is None else dialled_address(conn)
            if where is not None:
                found.append(f"{where}/p2p/{relay}/p2p-circuit/p2p/{self._host.peer_id}")
        return found

    async def _serve_stop(self, stream: INetStream) -> None:
        """Accept a circuit from one of our relays."""
        raw: Any = stream.muxed_stream  # type: ignore[attr-defined]
        relay = PeerId(str(stream.muxed_conn.peer_id))
        if relay not in self._reservations:
            raise RequestRefused("not a relay of ours, or no longer")
        circuit = await accept_circuit(raw)
        muxed = await self._network.upgrade_inbound_raw_conn(
            BoundedRawConnection(circuit, False), Multiaddr("/p2p-circuit")
        )
        assert isinstance(muxed, MuxedConnection)
        self._begin_punch(muxed.peer_id)
        self._through[relay] += 1
        try:
            await muxed.event_closed.wait()
        finally:
            self._through -= Counter([relay])

    # --- hole punching ---------------------------------------------------------------------

    def _punch_addresses(self) -> list[bytes]:
        """Addresses for the peer to try: our router's with our own port, and our own."""
        ip = self._verdict.likely_ip  # unproven, but a try is cheap
        seen = [] if ip is None else [_multiaddr(ip, port) for port in self._ports()]
        texts = dict.fromkeys([*seen, *self._host.own_addresses()])
        return [Multiaddr(text).to_bytes() for text in [*texts][:PUNCH_ADDRESSES_MAX]]

    def _sensible(self, received: Iterable[bytes]) -> dict[str, list[Multiaddr]]:
        """Addresses worth dialling, by IP. Private ones only if the peer shares our network."""
        parsed = [_ip_and_port(raw) for raw in list(received)[:PUNCH_ADDRESSES_MAX]]
        told = [each for each in parsed if each is not None]
        own_ip = self.summary.observed_ip
        nearest = reach_of_ip(own_ip) if own_ip else GLOBAL
        if any(ip == own_ip for ip, _ in told):
            nearest = min(nearest, LOCAL)  # same router
        nearest = max(nearest, THIS_MACHINE)
        able = [(ip, port) for ip, port in told if reach_of_ip(ip) >= nearest]
        ips = list(dict.fromkeys(ip for ip, _ in able))[:PUNCH_IPS_MAX]
        return {
            aim: [Multiaddr(_multiaddr(ip, port)) for ip, port in able if ip == aim] for aim in ips
        }

    def _targets(self, received: Iterable[bytes]) -> _Targets:
        """The sensible addresses within the limits of this round."""
        sensible, now_s = self._sensible(received), trio.current_time()
        return {ip: sensible[ip] for ip in sorted(sensible) if self._attempts.allow(ip, now_s)}

    def _begin_punch(self, target: ID) -> None:
        now_s = trio.current_time()
        if (
            self._nursery is None
            or not self._rules.punch
            or self._punched.get(target, 0.0) > now_s
            or len(self._punched) >= PUNCHED_MAX
            or self.direct(target) is not None
            or not self._may_punch(target)
        ):
            return
        self._punched[target] = now_s + PUNCH_AGAIN_S
        self._punching.add(target)
        self._nursery.start_soon(self._punch, target)

    def _may_punch(self, target: ID) -> bool:
        return target not in self._punching and len(self._punching) < PUNCHES_MAX

    async def _punch(self, target: ID) -> None:
        """Server's side: try to get a direct connection, else stay on the relay."""
        try:
            for _ in range(PUNCH_ROUNDS):
                try:
                    await self._punch_once(target)
                except RemoteProtocolError as error:
                    self._host.blame(target, error.reason)
                    break
                except (BaseLibp2pError, RequestRefused, OSError, trio.TooSlowError) as error:
                    log.debug("punching through to %s: %r", target, error)
                if self.direct(target) is not None or self._relayed(target) is None:
                    break
        finally:
            self._punching.discard(target)
        if self.direct(target) is None:
            self.summary.punch_failures += 1
        else:
            self.summary.punched += 1
            await self._leave_relay(target)

    def _relayed(self, target: ID) -> SwarmConn | None:
        return self._network.live(target, relayed=True)

    async def _punch_once(self, target: ID) -> None:
        conn = self._relayed(target)
        if conn is None:
            return
        hello = pb.HolePunch(type=pb.HolePunch.CONNECT, ObsAddrs=self._punch_addresses())
        with trio.fail_after(ASK_TIMEOUT_S):
            sent_s = trio.current_time()
            call, answer = await Call.ask(conn, PUNCH_PROTOCOL, hello)
            try:
                round_trip_s = trio.current_time() - sent_s
                theirs = self._targets(answer.ObsAddrs)
                await self._dial_plainly(target, theirs)
                if self.direct(target) is None:
                    await call.send(pb.HolePunch(type=pb.HolePunch.SYNC))
                    await trio.sleep(round_trip_s / 2)
            except BaseException:
                await call.drop()
                raise
        try:
            if self.direct(target) is None:
                await self._dial_at_once(target, theirs, as_server=True)
        finally:
            await call.drop()

    async def _serve_punch(self, stream: INetStream) -> None:
        """Client's side: answer, then dial on the peer's signal."""
        raw: Any = stream.muxed_stream  # type: ignore[attr-defined]
        target = stream.muxed_conn.peer_id
        if self._relayed(target) is None or not self._rules.punch:
            raise RequestRefused("nothing to punch through to")
        if not self._may_answer(target):
            raise RequestRefused("punched enough")
        self._punching.add(target)
        try:
            await self._answer_punch(target, raw)
        except trio.TooSlowError:
            log.debug("%s does not go on with punching", target)
        finally:
            self._punching.discard(target)
            with trio.CancelScope(shield=True):
                await reset(raw)

    def _may_answer(self, target: ID) -> bool:
        """Count one more round of the peer. False: it had enough."""
        now_s = trio.current_time()
        rounds, until_s = self._answered.get(target, (0, 0.0))
        if until_s <= now_s:
            rounds, until_s = 0, now_s + ANSWER_AGAIN_S
        is_known = target in self._answered
        if (
            rounds >= PUNCH_ROUNDS
            or not self._may_punch(target)
            or (not is_known and len(self._answered) >= PUNCHED_MAX)
        ):
            return False
        self._answered[target] = (rounds + 1, until_s)
        return True

    async def _answer_punch(self, target: ID, raw: Any) -> None:
        reader = Reader(raw, READ_BYTES)
        with trio.fail_after(ASK_TIMEOUT_S):
            theirs = self._targets((await read_message(reader, pb.HolePunch)).ObsAddrs)
            hello = pb.HolePunch(type=pb.HolePunch.CONNECT, ObsAddrs=self._punch_addresses())
            await raw.write(encoded(hello))
            sync = await read_message(reader, pb.HolePunch)
        if sync.type == pb.HolePunch.SYNC and self.direct(target) is None:
            await self._dial_at_once(target, theirs, as_server=False)

    async def _dial_plainly(self, target: ID, addresses: _Targets) -> None:
        """Try plain dials first: punching may be unnecessary."""

        async def dial(address: Multiaddr) -> None:
            with suppress(BaseLibp2pError, OSError):
                await self._network.dial_addr(address, target)
                nursery.cancel_scope.cancel()

        with trio.move_on_after(DIRECT_FIRST_S):
            async with trio.open_nursery() as nursery:
                for address in chain.from_iterable(addresses.values()):
                    nursery.start_soon(dial, address)

    async def _dial_at_once(self, target: ID, addresses: _Targets, *, as_server: bool) -> None:
        """Dial all addresses repeatedly from our listening port for one round."""
        with trio.move_on_after(PUNCH_ROUND_S):
            async with trio.open_nursery() as nursery:
                for ip in addresses:
                    nursery.start_soon(
                        self._dial_from_our_port, target, ip, addresses[ip], as_server
                    )
                while self.direct(target) is None:  # noqa: ASYNC110  nobody tells
                    await trio.sleep(0.05)
                nursery.cancel_scope.cancel()

    async def _dial_from_our_port(
        self, target: ID, ip: str, addresses: Sequence[Multiaddr], as_server: bool
    ) -> None:
        """Dial addresses of one IP, taking turns with other punches there."""
        is_ip6 = ":" in ip
        own = (each for each in self._host.own_addresses() if each.startswith("/ip6/") == is_ip6)
        if (listening := next(own, None)) is None:
            return
        source = ("::" if is_ip6 else "0.0.0.0", int(listening.split("/")[4]))
        dial = self._network.dial_addr_as_responder if as_server else self._network.dial_addr
        for address in cycle(addresses):
            await trio.sleep_until(
                self._attempts.next_turn_s(ip, trio.current_time(), PUNCH_DIAL_EVERY_S)
            )
            with trio.move_on_after(PUNCH_DIAL_S):
                try:
                    await dial(address, target, source)
                except (BaseLibp2pError, OSError) as error:
                    log.debug("punching at %s: %r", address, error)
            await trio.sleep(PUNCH_DIAL_EVERY_S)

    async def _leave_relay(self, target: ID) -> None:
        await trio.sleep(RELAY_GRACE_S)  # let data in flight arrive
        while (conn := self._relayed(target)) is not None and self.direct(target) is not None:
            await conn.close()


def _ip_and_port(raw: bytes) -> tuple[str, int] | None:
    """Parse a binary multiaddr of an IP address and TCP port; None for any other. The library's
    parser raises arbitrary errors."""
    for code, size in ((4, 4), (41, 16)):
        if len(raw) == size + 4 and raw[0] == code and raw[size + 1] == 6:
            port = int.from_bytes(raw[-2:], "big")
            return (str(ip_address(raw[1 : size + 1])), port) if port else None
    return None


def _multiaddr(ip: str, port: int) -> str:
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/{port}"


def _local_port(conn: SwarmConn | None) -> int | None:
    """Our local port of an outbound connection. None: inbound, or over."""
    if conn is None or not conn.muxed_conn.is_initiator:
        return None
    raw = conn.muxed_conn.secured_conn.conn  # type: ignore[attr-defined]
    if isinstance(raw, RawConnection) and isinstance(raw.stream, TrioTCPStream):
        with suppress(OSError):
            return int(raw.stream.stream.socket.getsockname()[1])
    return None


def dialled_address(conn: SwarmConn) -> str | None:
    """Multiaddr at which we dialled the peer. None: the peer dialled us."""
    if not conn.muxed_conn.is_initiator:
        return None
    found = conn.get_transport_addresses()
    return str(found[0]) if found else None
