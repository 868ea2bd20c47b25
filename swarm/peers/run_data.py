"""The items of a run that its founder brought along, for whoever lacks them: any member serves.

Whoever asks has the hash of their manifest from the run's rules. It learns from the manifest how
much there is, and checks each chunk by itself; what a peer sent that is not right is not kept.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from swarm.errors import RequestRefused
from swarm.identity import PeerId
from swarm.limits.quotas import RATES, Kind
from swarm.peers.connection_gater import ConnectionGater
from swarm.transport.base import ServeLimits, Transport
from swarm.wire import codec
from swarm.wire.data_manifest import chunk_hash, chunk_size, chunks_of
from swarm.wire.messages import (
    DATA_CHUNK_BYTES_MAX,
    DATA_MANIFEST_BYTES_MAX,
    DATA_MANIFEST_PROTOCOL,
    DATA_PROTOCOL,
    WANT_DATA_BYTES_MAX,
    DataManifest,
    WantData,
    WantDataManifest,
)

TIMEOUT_S: Final = 30.0
REFUSALS_MAX: Final = 6  # in a row, of a peer that is at its limit
REFUSED_WAIT_S: Final = 2.0
PACE_S: Final = 1.25 / RATES[Kind.DATA].per_s  # from one request to the next: below the quota

Keep = Callable[[int, bytes], Awaitable[None]]
"""Takes a chunk that was checked: its place, and its bytes."""


@dataclass(frozen=True, slots=True)
class HeldData:
    """What a node serves. `read`: bytes from an offset on."""

    manifest: DataManifest
    read: Callable[[int, int], Awaitable[bytes]]


def serve_data(
    transport: Transport, gater: ConnectionGater, held: Mapping[bytes, HeldData]
) -> None:
    """Hand the data of this node's run, by the hashes of their manifests, to whoever asks, as often
    as the quota has it."""

    def find(data: bytes) -> HeldData:
        if data not in held:
            raise RequestRefused("no data of this node's run")
        return held[data]

    async def serve_manifest(peer: PeerId, payload: bytes) -> bytes:
        want = gater.read(Kind.DATA, peer, payload, WantDataManifest, WANT_DATA_BYTES_MAX)
        return codec.encode(find(want.data).manifest)

    async def serve_chunk(peer: PeerId, payload: bytes) -> bytes:
        want = gater.read(Kind.DATA, peer, payload, WantData, WANT_DATA_BYTES_MAX)
        found = find(want.data)
        if want.chunk >= chunks_of(found.manifest.size_bytes):
            raise RequestRefused("the data has no such chunk")
        size = chunk_size(found.manifest, want.chunk)
        return await found.read(want.chunk * DATA_CHUNK_BYTES_MAX, size)

    for protocol, serve, bytes_max in (
        (DATA_MANIFEST_PROTOCOL, serve_manifest, DATA_MANIFEST_BYTES_MAX),
        (DATA_PROTOCOL, serve_chunk, DATA_CHUNK_BYTES_MAX),
    ):
        limits = ServeLimits(
            WANT_DATA_BYTES_MAX, bytes_max, concurrent_max=4, concurrent_per_peer_max=1
        )
        transport.serve(protocol, serve, limits)


async def ask_for_manifest(transport: Transport, peer: PeerId, data: bytes) -> DataManifest:
    """The manifest with this hash, by a connected peer.

    Raises:
        TransportError: it does not answer, or refuses, as one without the data does.
        RemoteProtocolError: it answers with something else.
    """
    request = codec.encode(WantDataManifest(type="want_data_manifest", data=data))
    answer = await transport.request(
        peer,
        DATA_MANIFEST_PROTOCOL,
        request,
        timeout_s=TIMEOUT_S,
        response_bytes_max=DATA_MANIFEST_BYTES_MAX,
    )
    return codec.decode_data_manifest(answer, data)


async def fetch_chunks(
    transport: Transport,
    peer: PeerId,
    data: bytes,
    manifest: DataManifest,
    missing: Iterable[int],
    keep: Keep,
) -> None:
    """Have these chunks from a connected peer, one after the other, at a pace that it allows.

    Raises:
        TransportError: it does not answer, or keeps on refusing.
        RemoteProtocolError: it sent other bytes than those with the hash that was asked for.
    """
    for chunk in missing:
        content = await _ask_for_chunk(transport, peer, data, chunk)
        codec.check_data_chunk(content, chunk_hash(manifest, chunk))
        await keep(chunk, content)
        await trio.sleep(PACE_S)


async def _ask_for_chunk(transport: Transport, peer: PeerId, data: bytes, chunk: int) -> bytes:
    request = codec.encode(WantData(type="want_data", data=data, chunk=chunk))
    refusals = 0
    while True:
        try:
            return await transport.request(
                peer,
                DATA_PROTOCOL,
                request,
                timeout_s=TIMEOUT_S,
                response_bytes_max=DATA_CHUNK_BYTES_MAX,
            )
        except RequestRefused:
            refusals += 1
            if refusals > REFUSALS_MAX:
                raise
            await trio.sleep(REFUSED_WAIT_S)
