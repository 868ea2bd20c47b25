"""The libp2p host: which protocols it speaks by itself, and how it opens streams."""

from collections.abc import Callable, Sequence

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.host.exceptions import StreamFailure
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarm.errors import RemoteProtocolError, RequestRefused
from swarm.transport.libp2p.admission.front_door import HardSwarm
from swarm.transport.libp2p.connection.negotiation import Reader, agree, proposal
from swarm.transport.libp2p.connection.yamux import MuxedConnection

STREAM_TIMEOUT_S = 10.0  # for a peer to agree on the protocol of a stream that we open


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

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """A stream to a connected peer, about the first of the protocols.

        Upstream collects an answer of any announced length, and dials a peer that is gone.

        Raises:
            SwarmException: the peer is not connected.
            StreamFailure: it does not speak the protocol, or not as it should.
        """
        protocol = protocol_ids[0]
        for conn in reversed(self._network.get_connections(peer_id)):
            assert isinstance(conn.muxed_conn, MuxedConnection)
            if conn.muxed_conn.alive:
                break
        else:
            raise SwarmException(f"not connected to {peer_id}")
        stream = await conn.new_stream()
        try:
            with trio.fail_after(STREAM_TIMEOUT_S):
                await stream.muxed_stream.write(proposal(str(protocol)))  # type: ignore[attr-defined]
                await agree(Reader(stream.muxed_stream), str(protocol))  # type: ignore[attr-defined]
        except BaseException as error:
            with trio.move_on_after(STREAM_TIMEOUT_S, shield=True):
                await stream.reset()
            if isinstance(
                error, (BaseLibp2pError, RemoteProtocolError, RequestRefused, trio.TooSlowError)
            ):
                raise StreamFailure(f"{peer_id} does not speak {protocol}") from error
            raise
        stream.set_protocol(protocol)
        return stream

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        pass
