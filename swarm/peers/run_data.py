"""Serve and fetch the rules of a run, and its data items. The run id holds the fingerprint of
the rules, which hold the hash of the manifest, which holds the hash of each chunk."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import trio

from swarm.errors import RequestRefused
from swarm.identity import PeerId
from swarm.limits.quotas import RATES, Kind
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.requests import ask
from swarm.transport.base import ServeLimits, Transport
from swarm.wire import codec
from swarm.wire.messages import (
    DATA_CHUNK_BYTES_MAX,
    DATA_MANIFEST_BYTES_MAX,
    DATA_MANIFEST_PROTOCOL,
    DATA_PROTOCOL,
    RULES_BYTES_MAX,
    RUN_PROTOCOL,
    RUN_REPLY_BYTES_MAX,
    WANT_DATA_BYTES_MAX,
    WANT_RUN_BYTES_MAX,
    DataManifest,
    RunReply,
    WantData,
    WantDataManifest,
    WantRun,
    chunk_hash,
    chunk_size,
    chunks_of,
)

RULES_TIMEOUT_S: Final = 20.0
TIMEOUT_S: Final = 30.0
REFUSALS_MAX: Final = 6  # in a row by one peer
REFUSED_WAIT_S: Final = 2.0
PACE_S: Final = 1.25 / RATES[Kind.DATA].per_s  # between requests: below the quota

Keep = Callable[[int, bytes], Awaitable[None]]
"""(chunk number, bytes): stores a checked chunk."""


@dataclass(frozen=True, slots=True)
class HeldData:
    """Data that a node serves. `read`: bytes from an offset on."""

    manifest: DataManifest
    read: Callable[[int, int], Awaitable[bytes]]


def serve_rules(transport: Transport, gater: ConnectionGater, run_id: str, rules: bytes) -> None:
    """Serve the run's rules within the quota, unless they exceed `RULES_BYTES_MAX`."""

    async def serve(peer: PeerId, payload: bytes) -> bytes:
        want = gater.read(Kind.RUN, peer, payload, WantRun, WANT_RUN_BYTES_MAX)
        if want.run_id != run_id:
            raise RequestRefused(f"this node is of run {run_id}")
        if len(rules) > RULES_BYTES_MAX:
            raise RequestRefused("the rules of this run are too large to be handed on")
        return codec.encode(RunReply(type="run", rules=rules))

    limits = ServeLimits(
        WANT_RUN_BYTES_MAX, RUN_REPLY_BYTES_MAX, concurrent_max=4, concurrent_per_peer_max=1
    )
    transport.serve(RUN_PROTOCOL, serve, limits)


async def ask_for_rules(transport: Transport, peer: PeerId, run_id: str) -> bytes:
    """Fetch the rules of a run from a connected peer; raises as `ask`."""
    want = WantRun(type="want_run", run_id=run_id)
    reply = await ask(
        transport, peer, RUN_PROTOCOL, want, RunReply, RUN_REPLY_BYTES_MAX, RULES_TIMEOUT_S
    )
    return reply.rules


def serve_data(
    transport: Transport, gater: ConnectionGater, held: Mapping[bytes, HeldData]
) -> None:
    """Serve the run's data by manifest hash, within the quota."""

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
    """Fetch the manifest with this hash from a connected peer; raises as `ask`."""
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
    """Fetch chunks within the peer's quota. RemoteProtocolError: a wrong hash."""
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
