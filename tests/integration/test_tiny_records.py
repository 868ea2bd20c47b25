"""Noise records that carry next to nothing: many come in one read, others have turns between."""

from typing import Any

import pytest
import trio
from libp2p.peer.id import ID

from swarm.identity import Identity
from swarm.transport.libp2p.yamux import HEADER, MuxedConnection
from tests.integration.raw_pipes import pipe
from tests.integration.test_libp2p_noise import DIALLER, LISTENER, ours, secured
from tests.support import run

pytestmark = pytest.mark.integration

PEER = ID.from_base58(Identity(b"p" * 32).peer_id)
RECORDS = 10_000  # a read of the socket brings up to 14,000 empty ones
TURNS_MIN = RECORDS // 300

EMPTY = [b""] * RECORDS
ONE_FRAME = [HEADER.pack(0, 1, 1, 1, 0) + HEADER.pack(0, 0, 0, 1, RECORDS), *[b"x"] * RECORDS]


async def turns_of_another(payloads: list[bytes]) -> int:
    """How many turns another task has while a connection takes in what came at once."""
    ends = pipe()
    theirs, mine = await secured(ours(DIALLER), ours(LISTENER), ends)
    conn = MuxedConnection(mine, PEER)
    before, turns = mine._received, 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(conn.start)
        await conn.event_started.wait()
        wire: Any = ends[0].pipe._inner
        sealed = bytearray()

        async def keep(data: bytes) -> None:
            sealed.extend(data)

        wire.send_all, send = keep, wire.send_all
        for payload in payloads:
            await theirs.write(payload)
        await send(sealed)
        while mine._received < before + len(payloads):
            turns += 1
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    return turns


@pytest.mark.parametrize("payloads", [EMPTY, ONE_FRAME], ids=["empty", "one-byte"])
def test_others_have_turns_while_tiny_records_are_taken(payloads: list[bytes]) -> None:
    assert run(turns_of_another, payloads, virtual=True, timeout_s=1_000) >= TURNS_MIN
