"""Attacks on a peer that serves weights: requests, and false statements of chunks and versions."""

import secrets
import time
from collections.abc import Callable
from functools import wraps

from swarm.errors import RemoteProtocolError
from swarm.identity import Identity
from swarm.wire import codec
from swarm.wire.messages import (
    CHUNKS_PROTOCOL,
    HEAD_DOMAIN,
    HEADS_PROTOCOL,
    HEADS_REPLY_BYTES_MAX,
    MANIFEST_PROTOCOL,
    HeadBody,
    HeadsReply,
    Signed,
    WantHeads,
    WantManifest,
    weights_topic,
)
from tests.hostile.attack import (
    Assault,
    Run,
    admitting,
    asking,
    asking_unread,
    attack,
    connected,
    paced,
)
from tests.hostile.attacks.gossip import gossiping, published, signed
from tests.hostile.messages import sealed, want_chunk
from tests.hostile.wire import Mux


def want_heads(run_id: str) -> bytes:
    return codec.encode(WantHeads(type="want_heads", run_id=run_id))


async def root_of(assault: Assault) -> bytes:
    """The root of the newest manifest that the node tells of; a random one if it tells of none."""
    async with assault.admitted() as mux:
        answer = await mux.request(HEADS_PROTOCOL, want_heads(assault.run_id))
    try:
        reply = codec.decode(answer or b"", HeadsReply, HEADS_REPLY_BYTES_MAX)
        envelope = codec.decode(reply.records[0], Signed, HEADS_REPLY_BYTES_MAX)
        head = codec.decode(envelope.payload, HeadBody, HEADS_REPLY_BYTES_MAX)
    except (RemoteProtocolError, IndexError):
        return secrets.token_bytes(32)
    assault.spent.count("manifests known")
    return head.root


def flood(
    protocol: str, keys: int, per_s: float, *, deaf: bool = False
) -> Callable[[Callable[[str, bytes], bytes]], Run]:
    """Decorate what makes a request of the run's id and the newest root: so many keys of one
    address make it at a rate."""

    def shaped(make: Callable[[str, bytes], bytes]) -> Run:
        @wraps(make)
        async def run(assault: Assault) -> None:
            payload = make(assault.run_id, await root_of(assault))
            ask = asking_unread if deaf else asking
            await connected(
                assault, keys, lambda mux: ask(assault, mux, protocol, payload, per_s), deaf=deaf
            )

        return run

    return shaped


@attack("80 a second", "4 keys of one address", target="learner")
@flood(HEADS_PROTOCOL, 4, 20.0)
def heads_flood(run_id: str, root: bytes) -> bytes:
    """Which versions are there?"""
    return want_heads(run_id)


@attack("80 a second", "4 keys of one address", target="learner")
@flood(MANIFEST_PROTOCOL, 4, 20.0)
def manifest_flood(run_id: str, root: bytes) -> bytes:
    """The manifest, over and over."""
    return codec.encode(WantManifest(type="want_manifest", run_id=run_id, root=root))


@attack("200 a second", "8 connections that do not read", target="learner")
@flood(CHUNKS_PROTOCOL, 8, 25.0, deaf=True)
def chunks_unread(run_id: str, root: bytes) -> bytes:
    """Chunks, which nobody reads."""
    return want_chunk(root)


@attack("400 a second", "8 keys of one address", target="learner")
@flood(CHUNKS_PROTOCOL, 8, 50.0)
def chunk_flood(run_id: str, root: bytes) -> bytes:
    """Chunks, as fast as they come, and read."""
    return want_chunk(root)


@attack("20 a second, each waits 20 s", "8 keys of one address", target="learner")
@admitting(8)
async def waits_for_chunks(assault: Assault, mux: Mux) -> None:
    """Requests that wait for what never comes."""
    payload = want_chunk(secrets.token_bytes(32), kind="relayed", wait_ms=20_000)
    await asking_unread(assault, mux, CHUNKS_PROTOCOL, payload, 20.0)


@attack("100 a second", "4 keys of one address", target="learner")
@flood(CHUNKS_PROTOCOL, 4, 25.0)
def false_accusations(run_id: str, root: bytes) -> bytes:
    """Say of others that they send wrong chunks."""
    return want_chunk(root, kind="lost", accused=Identity.generate().peer_id)


@attack("50 a second", "one stream, 32 KB each", target="learner")
@admitting(1)
async def invented_heads(assault: Assault, mux: Mux) -> None:
    """Versions of a publisher that is none, with the longest plans there are."""
    topic = weights_topic(assault.run_id)
    stream = await gossiping(mux, topic)
    async for number in paced(assault, 50.0, mux=mux):
        record = head(assault.run_id, mux.key, number)
        await stream.send(published(signed(mux.key, [topic], record)))


def head(run_id: str, key: Identity, number: int) -> bytes:
    """A head of ours, for a version of the far future."""
    body = HeadBody(
        type="weights",
        run_id=run_id,
        policy="policy",
        version=1_000_000 + number,
        publisher=key.peer_id,
        root=secrets.token_bytes(32),
        manifest_bytes=1_000,
        created_at_s=int(time.time()),
    )
    return sealed(key, codec.encode(body), HEAD_DOMAIN)
