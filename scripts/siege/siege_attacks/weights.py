"""What a peer can ask of who serves weights, and what it can say about chunks and versions."""

import secrets
import time

from siege_wire import Mux

from siege_attacks import Assault, attack, over_and_over, paced, side_by_side, tried
from siege_attacks.gossip import gossiping, published, signed, wrapped
from swarm.errors import RemoteProtocolError
from swarm.identity import Identity
from swarm.wire import codec
from swarm.wire.messages import (
    CHUNKS_PROTOCOL,
    HEAD_DOMAIN,
    HEADS_PROTOCOL,
    HEADS_REPLY_BYTES_MAX,
    MANIFEST_PROTOCOL,
    ChunkRequest,
    HeadBody,
    HeadsReply,
    Signed,
    WantHeads,
    WantManifest,
    weights_topic,
)


async def root_of(assault: Assault, mux: Mux) -> bytes:
    """Of the newest manifest that the node tells of; one of nothing where it tells of none."""
    ask = codec.encode(WantHeads(type="want_heads", run_id=assault.run_id))
    answer = await mux.request(HEADS_PROTOCOL, ask)
    try:
        reply = codec.decode(answer or b"", HeadsReply, HEADS_REPLY_BYTES_MAX)
        envelope = codec.decode(reply.records[0], Signed, HEADS_REPLY_BYTES_MAX)
        head = codec.decode(envelope.payload, HeadBody, HEADS_REPLY_BYTES_MAX)
    except (RemoteProtocolError, IndexError):
        return secrets.token_bytes(32)
    assault.spent.count("manifests known")
    return head.root


def chunk_request(root: bytes, kind: str, accused: str | None = None, wait_ms: int = 0) -> bytes:
    """For a chunk of the first artifact, by somebody who has nothing yet."""
    return codec.encode(
        ChunkRequest(
            type="chunk",
            root=root,
            artifact=0,
            kind=kind,  # type: ignore[arg-type]
            chunk=0,
            accused=accused,
            have=b"",
            relaying=b"",
            pending=(),
            wait_ms=wait_ms,
            up_bytes_per_s=2**40,
            down_bytes_per_s=2**40,
        )
    )


async def _flood(assault: Assault, protocol: str, keys: int, per_s: float, payload: bytes) -> None:
    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                async for _number in paced(assault, per_s, 100_000):
                    await tried(assault, mux.request, protocol, payload)
                    assault.spent.count("asked")
                    if mux.over.is_set():
                        return

        await over_and_over(assault, once, 1.0)

    await side_by_side(keys, one)


@attack("weights", "80 a second", "4 keys of one address", target="learner")
async def heads_flood(assault: Assault) -> None:
    """Which versions are there?"""
    ask = codec.encode(WantHeads(type="want_heads", run_id=assault.run_id))
    await _flood(assault, HEADS_PROTOCOL, 4, 20.0, ask)


@attack("weights", "80 a second", "4 keys of one address", target="learner")
async def manifest_flood(assault: Assault) -> None:
    """The manifest, over and over."""
    async with assault.admitted(0) as mux:
        root = await root_of(assault, mux)
    ask = codec.encode(WantManifest(type="want_manifest", run_id=assault.run_id, root=root))
    await _flood(assault, MANIFEST_PROTOCOL, 4, 20.0, ask)


@attack("weights", "200 a second", "8 connections that do not read", target="learner")
async def chunks_unread(assault: Assault) -> None:
    """Chunks, which nobody reads."""
    async with assault.admitted(0) as mux:
        root = await root_of(assault, mux)
    payload = chunk_request(root, "fresh")

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0, deaf=True) as mux:
                async for _number in paced(assault, 25.0, 10_000):
                    await mux.open(CHUNKS_PROTOCOL, len(payload).to_bytes(4, "big") + payload)

        await over_and_over(assault, once, 1.0)

    await side_by_side(8, one)


@attack("weights", "400 a second", "8 keys of one address", target="learner")
async def chunk_flood(assault: Assault) -> None:
    """Chunks, as fast as they come, and read."""
    async with assault.admitted(0) as mux:
        root = await root_of(assault, mux)
    await _flood(assault, CHUNKS_PROTOCOL, 8, 50.0, chunk_request(root, "fresh"))


@attack("weights", "20 a second, each waits 20 s", "8 keys of one address", target="learner")
async def waits_for_chunks(assault: Assault) -> None:
    """Requests that wait for what never comes."""
    payload = chunk_request(secrets.token_bytes(32), "relayed", wait_ms=20_000)

    async def one(_: int) -> None:
        async def once(_: int) -> None:
            async with assault.admitted(0) as mux:
                async for _number in paced(assault, 20.0, 10_000):
                    await mux.open(CHUNKS_PROTOCOL, len(payload).to_bytes(4, "big") + payload)
                    if mux.over.is_set():
                        return

        await over_and_over(assault, once, 1.0)

    await side_by_side(8, one)


@attack("weights", "100 a second", "4 keys of one address", target="learner")
async def false_accusations(assault: Assault) -> None:
    """Say of others that they send wrong chunks."""
    async with assault.admitted(0) as mux:
        root = await root_of(assault, mux)
    payload = chunk_request(root, "lost", accused=Identity.generate().peer_id)
    await _flood(assault, CHUNKS_PROTOCOL, 4, 25.0, payload)


@attack("weights", "50 a second", "one stream, 32 KB each", target="learner")
async def invented_heads(assault: Assault) -> None:
    """Versions of a publisher that is none, with the longest plans there are."""
    key, topic = assault.key(), weights_topic(assault.run_id)

    async def once(_: int) -> None:
        async with assault.admitted(0, key) as mux:
            stream = await gossiping(mux, topic)
            async for number in paced(assault, 50.0, 100_000):
                message = signed(key, [topic], head(assault, key, number))
                await stream.send(wrapped(published(message)))
                if mux.over.is_set():
                    return

    await over_and_over(assault, once, 1.0)


def head(assault: Assault, key: Identity, number: int) -> bytes:
    """A head of ours, for a version of the far future."""
    body = HeadBody(
        type="weights",
        run_id=assault.run_id,
        policy="policy",
        version=1_000_000 + number,
        publisher=key.peer_id,
        root=secrets.token_bytes(32),
        manifest_bytes=1_000,
        created_at_s=int(time.time()),
    )
    payload = codec.encode(body)
    signature = key.sign(HEAD_DOMAIN, payload)
    return codec.encode(Signed(payload=payload, signer=key.peer_id, signature=signature))
