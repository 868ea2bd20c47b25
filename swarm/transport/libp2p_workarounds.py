"""What py-libp2p 0.8.1 does that a busy node cannot live with, and what is done instead.

Each piece below names the upstream behaviour it replaces. Each can be switched off through
`Workarounds`, so that a test can show that it is still needed. They reach into internals, so the
host refuses to start on any other version of libp2p.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import trio
from libp2p.abc import (
    IMuxedConn,
    INetStream,
    IRawConnection,
    ISecureConn,
    ISecureTransport,
    ITransport,
)
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux import yamux
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.exceptions import (
    MuxerUpgradeFailure,
    SecurityUpgradeFailure,
    UpgradeFailure,
)
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarm.errors import ConfigError
from swarm.transport.handshakes import Handshakes
from swarm.transport.libp2p_noise import SOCKET_READ_BYTES, Noise
from swarm.transport.libp2p_yamux import HardYamux, MuxedConnection, OnEnd

log = logging.getLogger(__name__)

LIBP2P_VERSION = "0.8.1"

UPGRADE_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 256


@dataclass(frozen=True, slots=True)
class Workarounds:
    """Which upstream behaviours are replaced. All of them, except in tests."""

    hard_yamux: bool = True
    reap_inbound: bool = True
    gossip_limits: bool = True
    fast_noise: bool = True


ALL_WORKAROUNDS = Workarounds()


def require_version(found: str | None = None) -> None:
    """Refuse any libp2p but the one whose internals this module replaces.

    Raises:
        ConfigError: another version is installed.
    """
    found = found or metadata.version("libp2p")
    if found != LIBP2P_VERSION:
        raise ConfigError(
            f"needs libp2p {LIBP2P_VERSION}, found {found}: "
            f"run pip install libp2p=={LIBP2P_VERSION}"
        )


# --- raw connections ----------------------------------------------------------------------


class BoundedRawConnection(RawConnection):
    """Upstream passes lengths that a stranger chose on to the socket, which allocates them."""

    async def read(self, n: int | None = None) -> bytes:
        return await super().read(SOCKET_READ_BYTES if n is None else min(n, SOCKET_READ_BYTES))


# --- upgrades ------------------------------------------------------------------------------


class HardUpgrader(TransportUpgrader):
    """Noise and Yamux and nothing else; upstream hard-codes its own Yamux class.

    Whatever a stranger's bytes bring about in here comes out as `UpgradeFailure`: upstream decodes
    names that need be no text, and lets what that raises out to whoever dialled.
    """

    def __init__(
        self,
        keys: KeyPair,
        workarounds: Workarounds,
        network_key: bytes | None,
        on_end: OnEnd,
    ) -> None:
        noise: ISecureTransport = Noise(keys, network_key)
        if not workarounds.fast_noise:
            assert network_key is None, "upstream has no private swarms"
            noise = NoiseTransport(keys, noise_privkey=create_x25519_key_pair().private_key)
        super().__init__(
            secure_transports_by_protocol={NOISE_PROTOCOL: noise},
            muxer_transports_by_protocol={TProtocol(yamux.PROTOCOL_ID): Yamux},
        )
        self._workarounds = workarounds
        self._on_end = on_end

    async def upgrade_security(
        self, raw_conn: IRawConnection, is_initiator: bool, peer_id: ID | None = None
    ) -> ISecureConn:
        if type(raw_conn) is RawConnection:  # of a dial: upstream bounds no read of it
            raw_conn = BoundedRawConnection(raw_conn.stream, raw_conn.is_initiator)
        try:
            return await super().upgrade_security(raw_conn, is_initiator, peer_id)
        except UpgradeFailure:
            raise
        except Exception as error:  # boundary: libp2p's parsers on foreign bytes
            raise SecurityUpgradeFailure("the handshake failed") from error

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        try:
            await self.muxer_multistream.select_transport(conn)
        except Exception as error:  # boundary: libp2p's parsers on foreign bytes
            raise MuxerUpgradeFailure("no common stream muxer") from error
        if self._workarounds.hard_yamux:
            return HardYamux(conn, peer_id, self._on_end)
        return MuxedConnection(conn, peer_id)


# --- connections ---------------------------------------------------------------------------


class NoAutoConnector(AutoConnector):
    """Dials nobody: whom to know is decided above the transport."""

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()


def remote_ip(muxed: IMuxedConn) -> str | None:
    """The address at the far end, without the zone that link-local ones carry."""
    remote = muxed.secured_conn.get_remote_address() if isinstance(muxed, HardYamux) else None
    return None if remote is None else remote[0].partition("%")[0]


class HardSwarm(Swarm):
    """The swarm without its own ideas about whom to dial.

    Upstream keeps one task and one of its inbound places for every connection that ever came
    in; dials known peers by itself while it has few; and runs a nursery of callbacks for each
    stream. Addresses are dialled as given: upstream's `dial_peer` waits 250 ms after success,
    prefers other addresses than the one asked for, and blacklists a failed peer for a minute.
    """

    def __init__(
        self,
        keys: KeyPair,
        self_id: ID,
        workarounds: Workarounds,
        admits: Callable[[ID, str | None], bool],
        network_key: bytes | None,
        on_end: OnEnd,
    ) -> None:
        peerstore = PeerStore()
        peerstore.add_key_pair(self_id, keys)
        transports: list[ITransport] = [TCP()]
        super().__init__(
            self_id,
            peerstore,
            HardUpgrader(keys, workarounds, network_key, on_end),
            transports,
            retry_config=RetryConfig(max_retries=0),
            connection_config=ConnectionConfig(
                max_connections=CONNECTIONS_MAX,
                high_watermark=CONNECTIONS_MAX,
                low_watermark=0,
                min_connections=0,
                inbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
                outbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
            ),
        )
        self._workarounds = workarounds
        self._admits = admits
        self._handshakes = Handshakes()

    async def _handle_inbound_connection(
        self, read_write_closer: ReadWriteCloser, maddr: Multiaddr
    ) -> None:
        """Upstream has the same places for connections and for what may become one some day."""
        if not self._workarounds.reap_inbound:
            await super()._handle_inbound_connection(read_write_closer, maddr)
            return
        raw = BoundedRawConnection(read_write_closer, False)
        try:
            muxed = await self._shake_hands(raw, maddr)
            if muxed is not None:
                assert isinstance(muxed, MuxedConnection)
                await muxed.event_closed.wait()
        except SwarmException as error:
            log.debug("inbound connection refused: %r", error)
        finally:
            with trio.CancelScope(shield=True):
                await raw.close()

    async def _shake_hands(self, raw: BoundedRawConnection, maddr: Multiaddr) -> IMuxedConn | None:
        """None where there is no place for one more handshake, or no longer."""
        remote = raw.get_remote_address()
        handshake = self._handshakes.enter(None if remote is None else remote[0].partition("%")[0])
        if handshake is None:
            return None
        try:
            with handshake.scope:
                return await self.upgrade_inbound_raw_conn(raw, maddr)
            return None
        finally:
            self._handshakes.leave(handshake)

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> Any:
        if muxed_conn.peer_id == self.self_id:
            await muxed_conn.close()
            raise SwarmException("the peer runs under our own key")
        if not self._admits(muxed_conn.peer_id, remote_ip(muxed_conn)):
            await muxed_conn.close()
            raise SwarmException("the connection is refused")
        return await super().add_conn(muxed_conn, direction)

    async def notify_opened_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()

    async def notify_closed_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = NoAutoConnector(swarm=self)


class HardHost(BasicHost):
    """A host that does not ask every peer to identify itself, and that nobody pushes to.

    Upstream asks from a task outside every nursery, where an error in a peer's answer ends the
    whole program, and stores as many pushed addresses as a peer likes.
    """

    def __init__(self, network: HardSwarm, addresses: Callable[[], Sequence[str]]) -> None:
        super().__init__(
            network,
            addrs_factory=lambda _: [Multiaddr(text) for text in addresses()],
            disable_identify_address_discovery=True,
        )
        self.remove_stream_handler(TProtocol("/ipfs/id/push/1.0.0"))

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        pass
