"""Groups that are too large for one answer: fetched in pieces, from one peer, one after the other.

A run's rules say how large its groups can get. Only where that is more than an ordinary answer
carries does a node hear of large groups, ask for them and serve them. What is under way has the
bound that ordinary answers have: `GROUPS_REPLY_BYTES_MAX` for each batch. Nothing of a group is
looked at before all of it is there; then its id is held to its content as that of any other group.
"""

from typing import Final

import trio

from swarm.errors import Reject, RemoteProtocolError, RequestRefused, RequestTimeout
from swarm.identity import PeerId
from swarm.peers.requests import ask
from swarm.rollouts import GroupId
from swarm.transport.base import Transport
from swarm.wire.messages import (
    PIECE_BYTES,
    PIECE_REPLY_BYTES_MAX,
    PIECES_PROTOCOL,
    PieceReply,
    WantPiece,
)

RETRY_S: Final = 0.5  # after a refusal in the middle: the responder's budget refills


async def fetch(
    transport: Transport,
    peer: PeerId,
    run_id: str,
    group_id: GroupId,
    size_bytes: int,
    *,
    timeout_s: float,
    piece_timeout_s: float,
) -> bytes | None:
    """The signed record of `size_bytes`, as advertised, that a peer gives for an id; None: it has
    none. `timeout_s` is for all of it.

    Raises:
        RemoteProtocolError: MALFORMED or OVERSIZE: pieces that do not make up what was advertised.
        TransportError: as `Transport.request`.
    """
    record = bytearray()
    with trio.move_on_after(timeout_s):
        while len(record) < size_bytes:
            want = WantPiece(
                type="want_piece",
                run_id=run_id,
                group_id=group_id,
                piece=len(record) // PIECE_BYTES,
            )
            try:
                reply = await ask(
                    transport,
                    peer,
                    PIECES_PROTOCOL,
                    want,
                    PieceReply,
                    PIECE_REPLY_BYTES_MAX,
                    piece_timeout_s,
                )
            except RequestRefused:
                if not record:
                    raise
                await trio.sleep(RETRY_S)
                continue
            if not reply.data:
                return None
            if reply.size_bytes != size_bytes:
                raise RemoteProtocolError(Reject.MALFORMED, "a group of another size than told")
            if len(reply.data) != min(PIECE_BYTES, size_bytes - len(record)):
                raise RemoteProtocolError(Reject.MALFORMED, "a piece of another size")
            record += reply.data
        return bytes(record)
    raise RequestTimeout(f"{len(record)} of {size_bytes} bytes in {timeout_s:.0f} s")
