"""Attacks of an admitted peer with GossipSub's messages and libp2p's small protocols."""

import secrets
from collections.abc import Callable
from functools import wraps

import trio
from libp2p.pubsub.pb import rpc_pb2

from swarm.identity import Identity, public_key_of
from swarm.wire.messages import adverts_topic
from tests.hostile.attack import Assault, Run, admitting, attack, connected, held, paced
from tests.hostile.wire import DATA, FIN, KEY_HEAD, Mux, Stream, frame, varint

MESHSUB = "/meshsub/1.1.0"
IDENTIFY, PING_PROTOCOL = "/ipfs/id/1.0.0", "/ipfs/ping/1.0.0"
SIGN_DOMAIN = b"libp2p-pubsub:"
RPC_BYTES = 1_040_000  # just within what one message may have
Made = Callable[[int], bytes]


def peer_bytes(identity: Identity) -> bytes:
    """A peer id as gossip carries it."""
    return b"\x00\x24" + KEY_HEAD + public_key_of(identity.peer_id)


def signed(identity: Identity, topics: list[str], data: bytes) -> rpc_pb2.Message:
    """A message as an honest peer signs it."""
    message = rpc_pb2.Message(
        from_id=peer_bytes(identity), seqno=secrets.token_bytes(8), data=data, topicIDs=topics
    )
    message.signature = identity.sign(SIGN_DOMAIN, message.SerializeToString())
    return message


def wrapped(rpc: bytes) -> bytes:
    """A message with its length before it."""
    return varint(len(rpc)) + rpc


def published(*messages: rpc_pb2.Message) -> bytes:
    """The RPC that carries these messages."""
    return wrapped(rpc_pb2.RPC(publish=messages).SerializeToString())


def subscription(*topics: str, on: bool = True) -> bytes:
    """The RPC that subscribes to topics, or leaves them."""
    changes = [rpc_pb2.RPC.SubOpts(subscribe=on, topicid=topic) for topic in topics]
    return wrapped(rpc_pb2.RPC(subscriptions=changes).SerializeToString())


def control(**entries: object) -> bytes:
    """An RPC of control entries."""
    return wrapped(rpc_pb2.RPC(control=rpc_pb2.ControlMessage(**entries)).SerializeToString())


def empty_control(tag: bytes) -> bytes:
    """An RPC of half a million control entries with nothing in them."""
    entries = tag * (RPC_BYTES // 2)
    return wrapped(b"\x1a" + varint(len(entries)) + entries)


async def gossiping(mux: Mux, topic: str) -> Stream:
    """A gossip stream that is subscribed to a topic."""
    return await mux.open(MESHSUB, subscription(topic))


def rpcs(per_s: float, count: int = 1) -> Callable[..., Run]:
    """Decorate what makes a connection's RPCs: they are sent at a rate on so many connections."""

    def shaped(make: Callable[[str, Identity], Made]) -> Run:
        @wraps(make)
        async def run(assault: Assault) -> None:
            topic = adverts_topic(assault.run_id)

            async def use(mux: Mux) -> None:
                made, stream = make(topic, mux.key), await gossiping(mux, topic)
                async for number in paced(assault, per_s, 10_000_000, mux):
                    await stream.send(made(number))
                    assault.spent.count("messages")

            await connected(assault, count, use)

        return run

    return shaped


@attack("4 a second", "1 MB a message")
@rpcs(4.0)
def empty_iwants(topic: str, key: Identity) -> Made:
    """One message of 520,000 entries that want nothing."""
    rpc = empty_control(b"\x12\x00")
    return lambda _: rpc


@attack("4 a second", "1 MB a message")
@rpcs(4.0)
def empty_entries(topic: str, key: Identity) -> Made:
    """As before, with offers, grafts and prunes, which have a topic, and with subscriptions."""
    parts = [empty_control(tag) for tag in (b"\x0a\x00", b"\x1a\x00", b"\x22\x00")]
    parts.append(wrapped(b"\x0a\x00" * (RPC_BYTES // 2)))
    return lambda n: parts[n % len(parts)]


@attack("4 a second", "1 MB a message")
@rpcs(4.0)
def empty_messages(topic: str, key: Identity) -> Made:
    """Published messages with nothing in them, half a million at once."""
    rpc = wrapped(b"\x12\x00" * (RPC_BYTES // 2))
    return lambda _: rpc


def _nonexistent() -> list[bytes]:
    return [secrets.token_hex(20).encode() for _ in range(2_000)]


@attack("50 a second", "2,000 ids each")
@rpcs(50.0)
def ihave_flood(topic: str, key: Identity) -> Made:
    """Offer messages that do not exist."""
    entry = rpc_pb2.ControlIHave
    return lambda _: control(ihave=[entry(topicID=topic, messageIDs=_nonexistent())])


@attack("50 a second", "2,000 ids each")
@rpcs(50.0)
def iwant_flood(topic: str, key: Identity) -> Made:
    """Want messages that do not exist."""
    return lambda _: control(iwant=[rpc_pb2.ControlIWant(messageIDs=_nonexistent())])


@attack("1,000 a second", "one stream")
@rpcs(1_000.0)
def graft_and_prune(topic: str, key: Identity) -> Made:
    """In and out of the mesh."""
    both = (
        control(graft=[rpc_pb2.ControlGraft(topicID=topic)]),
        control(prune=[rpc_pb2.ControlPrune(topicID=topic, backoff=600)]),
    )
    return lambda n: both[n % 2]


@attack("200,000 a second", "one stream")
@rpcs(50.0)
def empty_rpcs(topic: str, key: Identity) -> Made:
    """Messages of no length at all."""
    return lambda _: bytes(4_000)


@attack("500 a second", "one stream")
@rpcs(500.0)
def many_topics(topic: str, key: Identity) -> Made:
    """Subscribe to ever new topics, and leave them again."""
    return lambda n: subscription(f"/topic/{n // 2}", on=n % 2 == 0)


@attack("10 a second", "16,000 topics each")
@rpcs(10.0)
def topic_lists(topic: str, key: Identity) -> Made:
    """Huge lists of topics, in a message and in subscriptions."""
    topics = [f"/t/{number}" for number in range(16_000)]
    both = (published(signed(key, topics, b"x")), subscription(*topics))
    return lambda n: both[n % 2]


@attack("200 a second", "4 connections of new keys")
@rpcs(50.0, 4)
def bad_signatures(topic: str, key: Identity) -> Made:
    """Messages in the name of somebody who did not sign them; a new key when it is cut off."""
    message = signed(key, [topic], b"x" * 1_000)

    def made(number: int) -> bytes:
        message.seqno = number.to_bytes(8, "big")
        return published(message)

    return made


@attack("5 a second", "1 MB a message")
@rpcs(5.0)
def oversize(topic: str, key: Identity) -> Made:
    """Payloads that are too large, in messages that are not."""
    rpc = published(signed(key, [topic], bytes(900_000)))
    return lambda _: rpc


@attack("400 a second", "one stream, each message signed")
@rpcs(400.0)
def tiny_messages(topic: str, key: Identity) -> Made:
    """Well signed messages of a byte on the run's topic, which say nothing."""
    return lambda _: published(signed(key, [topic], b"x"))


@attack("100 a second", "one stream of 200 messages each")
@rpcs(100.0)
def other_topics(topic: str, key: Identity) -> Made:
    """Messages of topics that nobody here wants, 200 in each."""
    rpc = published(*(signed(key, [f"/other/{number}"], b"x") for number in range(200)))
    return lambda _: rpc


@attack("5 a second", "half a message each, 20 connections")
@admitting(20)
async def half_messages(assault: Assault, mux: Mux) -> None:
    """The larger part of a message, and never its end."""
    stream = await gossiping(mux, adverts_topic(assault.run_id))
    await stream.send(varint(RPC_BYTES) + bytes(RPC_BYTES - 10))
    await mux.over.wait()


@attack("2 a second", "3 streams of one connection, 50 KB each")
@admitting(1)
async def garbage_on_gossip(assault: Assault, mux: Mux) -> None:
    """Bytes that are no messages."""
    for junk in (b"\xff" * 10, b"\x80\x80\x80\x80\x01", assault.rng.randbytes(50_000)):
        stream = await mux.open(MESHSUB, junk)
        await trio.sleep(0.5)
        await stream.reset()
    await held(mux, 2.0)


async def _ask_small(assault: Assault, mux: Mux, protocol: str, data: bytes) -> None:
    async for _ in paced(assault, 50.0, mux=mux):
        stream = await mux.open(protocol, data)
        assault.spent.count("asked")
        await mux.send(frame(DATA, FIN, stream.number, 0))
        if len(mux.streams) > 100:
            await trio.sleep(0.1)


@attack("200 a second", "4 connections of one address")
@admitting(4)
async def identify_flood(assault: Assault, mux: Mux) -> None:
    """Ask who the node is, over and over."""
    await _ask_small(assault, mux, IDENTIFY, b"")


@attack("200 a second, and 32 bytes to echo", "4 connections of one address")
@admitting(4)
async def ping_protocol_flood(assault: Assault, mux: Mux) -> None:
    """Have 32 bytes echoed, over and over, on streams that stay open."""
    await _ask_small(assault, mux, PING_PROTOCOL, bytes(32) * 64)
