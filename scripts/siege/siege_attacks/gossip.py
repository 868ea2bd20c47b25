"""What an admitted peer can do with GossipSub's messages and libp2p's small protocols."""

import secrets
from collections.abc import Callable

import trio
from libp2p.pubsub.pb import rpc_pb2
from siege_wire import DATA, FIN, KEY_HEAD, Mux, Stream, frame, varint

from siege_attacks import Assault, attack, over_and_over, paced, side_by_side
from swarm.identity import Identity, public_key_of
from swarm.wire.messages import adverts_topic

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


def published(*messages: rpc_pb2.Message) -> bytes:
    """What carries these messages."""
    return bytes(rpc_pb2.RPC(publish=messages).SerializeToString())


def wrapped(rpc: bytes) -> bytes:
    """A message with its length before it."""
    return varint(len(rpc)) + rpc


def subscription(topic: str, on: bool = True) -> rpc_pb2.RPC:
    """That we want a topic, or no longer."""
    return rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=on, topicid=topic)])


def control(**entries: object) -> bytes:
    """A message of control entries."""
    return rpc_pb2.RPC(control=rpc_pb2.ControlMessage(**entries)).SerializeToString()


async def gossiping(mux: Mux, topic: str) -> Stream:
    """A gossip stream on which we have said that we want a topic."""
    return await mux.open(MESHSUB, wrapped(subscription(topic).SerializeToString()))


async def stream_of_rpcs(assault: Assault, per_s: float, made: Made, key: Identity | None) -> None:
    """Messages at a rate, on a connection that is made again when it ends."""

    async def once(number: int) -> None:
        async with assault.admitted(0, key) as mux:
            stream = await gossiping(mux, adverts_topic(assault.run_id))
            async for count in paced(assault, per_s, 10_000_000):
                await stream.send(made(count))
                assault.spent.count("messages")

    await over_and_over(assault, once, 1.0)


@attack("gossip", "4 a second", "1 MB a message")
async def empty_iwants(assault: Assault) -> None:
    """One message of 520,000 entries that want nothing."""
    entries = b"\x12\x00" * (RPC_BYTES // 2)
    rpc = wrapped(b"\x1a" + varint(len(entries)) + entries)
    await stream_of_rpcs(assault, 4.0, lambda _: rpc, None)


@attack("gossip", "4 a second", "1 MB a message")
async def empty_entries(assault: Assault) -> None:
    """As before, with offers, grafts and prunes, which have a topic, and with subscriptions."""
    parts = []
    for tag in (b"\x0a\x00", b"\x1a\x00", b"\x22\x00"):
        entries = tag * (RPC_BYTES // 2)
        parts.append(wrapped(b"\x1a" + varint(len(entries)) + entries))
    parts.append(wrapped(b"\x0a\x00" * (RPC_BYTES // 2)))
    await stream_of_rpcs(assault, 4.0, lambda n: parts[n % len(parts)], None)


@attack("gossip", "4 a second", "1 MB a message")
async def empty_messages(assault: Assault) -> None:
    """Published messages with nothing in them, half a million at once."""
    rpc = wrapped(b"\x12\x00" * (RPC_BYTES // 2))
    await stream_of_rpcs(assault, 4.0, lambda _: rpc, None)


@attack("gossip", "50 a second", "2,000 ids each")
async def ihave_flood(assault: Assault) -> None:
    """Offer messages that do not exist."""
    topic = adverts_topic(assault.run_id)

    def made(_: int) -> bytes:
        ids = [secrets.token_hex(20).encode() for _ in range(2_000)]
        return wrapped(control(ihave=[rpc_pb2.ControlIHave(topicID=topic, messageIDs=ids)]))

    await stream_of_rpcs(assault, 50.0, made, None)


@attack("gossip", "50 a second", "2,000 ids each")
async def iwant_flood(assault: Assault) -> None:
    """Want messages that do not exist."""

    def made(_: int) -> bytes:
        ids = [secrets.token_hex(20).encode() for _ in range(2_000)]
        return wrapped(control(iwant=[rpc_pb2.ControlIWant(messageIDs=ids)]))

    await stream_of_rpcs(assault, 50.0, made, None)


@attack("gossip", "1,000 a second", "one stream")
async def graft_and_prune(assault: Assault) -> None:
    """In and out of the mesh."""
    topic = adverts_topic(assault.run_id)
    both = (
        wrapped(control(graft=[rpc_pb2.ControlGraft(topicID=topic)])),
        wrapped(control(prune=[rpc_pb2.ControlPrune(topicID=topic, backoff=600)])),
    )
    await stream_of_rpcs(assault, 1_000.0, lambda n: both[n % 2], None)


@attack("gossip", "200,000 a second", "one stream")
async def empty_rpcs(assault: Assault) -> None:
    """Messages of no length at all."""
    await stream_of_rpcs(assault, 50.0, lambda _: bytes(4_000), None)


@attack("gossip", "500 a second", "one stream")
async def many_topics(assault: Assault) -> None:
    """Subscribe to ever new topics, and leave them again."""

    def made(number: int) -> bytes:
        return wrapped(subscription(f"/topic/{number // 2}", number % 2 == 0).SerializeToString())

    await stream_of_rpcs(assault, 500.0, made, None)


@attack("gossip", "10 a second", "16,000 topics each")
async def topic_lists(assault: Assault) -> None:
    """Huge lists of topics, in a message and in subscriptions."""
    key = assault.key()
    topics = [f"/t/{number}" for number in range(16_000)]
    lists = rpc_pb2.RPC(
        subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=t) for t in topics]
    )
    both = (
        wrapped(rpc_pb2.RPC(publish=[signed(key, topics, b"x")]).SerializeToString()),
        wrapped(lists.SerializeToString()),
    )
    await stream_of_rpcs(assault, 10.0, lambda n: both[n % 2], key)


@attack("gossip", "200 a second", "4 connections of new keys")
async def bad_signatures(assault: Assault) -> None:
    """Messages in the name of somebody who did not sign them; a new key when it is cut off."""
    topic = adverts_topic(assault.run_id)

    async def once(_: int) -> None:
        key = assault.key()
        message = signed(key, [topic], b"x" * 1_000)

        def made(number: int) -> bytes:
            message.seqno = number.to_bytes(8, "big")
            return wrapped(rpc_pb2.RPC(publish=[message]).SerializeToString())

        await stream_of_rpcs(assault, 50.0, made, key)

    await side_by_side(4, once)


@attack("gossip", "5 a second", "1 MB a message")
async def oversize(assault: Assault) -> None:
    """Payloads that are too large, in messages that are not."""
    key, topic = assault.key(), adverts_topic(assault.run_id)
    rpc = wrapped(rpc_pb2.RPC(publish=[signed(key, [topic], bytes(900_000))]).SerializeToString())
    await stream_of_rpcs(assault, 5.0, lambda _: rpc, key)


@attack("gossip", "400 a second", "one stream, each message signed")
async def tiny_messages(assault: Assault) -> None:
    """Well signed messages of a byte on the run's topic, which say nothing."""
    key, topic = assault.key(), adverts_topic(assault.run_id)

    def made(_: int) -> bytes:
        return wrapped(rpc_pb2.RPC(publish=[signed(key, [topic], b"x")]).SerializeToString())

    await stream_of_rpcs(assault, 400.0, made, key)


@attack("gossip", "100 a second", "one stream of 200 messages each")
async def other_topics(assault: Assault) -> None:
    """Messages of topics that nobody here wants, 200 in each."""
    key = assault.key()
    messages = [signed(key, [f"/other/{number}"], b"x") for number in range(200)]
    rpc = wrapped(rpc_pb2.RPC(publish=messages).SerializeToString())
    await stream_of_rpcs(assault, 100.0, lambda _: rpc, key)


@attack("gossip", "5 a second", "half a message each, 20 connections")
async def half_messages(assault: Assault) -> None:
    """The larger part of a message, and never its end."""

    async def once(place: int) -> None:
        async def one(_: int) -> None:
            async with assault.admitted(0) as mux:
                stream = await gossiping(mux, adverts_topic(assault.run_id))
                await stream.send(varint(RPC_BYTES) + bytes(RPC_BYTES - 10))
                await mux.over.wait()

        await over_and_over(assault, one, 1.0)

    await side_by_side(20, once)


@attack("gossip", "200 a second", "4 connections of one address")
async def identify_flood(assault: Assault) -> None:
    """Ask who the node is, over and over."""
    await _ask_small(assault, IDENTIFY, b"", 50.0)


@attack("gossip", "200 a second, and 32 bytes to echo", "4 connections of one address")
async def ping_protocol_flood(assault: Assault) -> None:
    """Have 32 bytes echoed, over and over, on streams that stay open."""
    await _ask_small(assault, PING_PROTOCOL, bytes(32) * 64, 50.0)


async def _ask_small(assault: Assault, protocol: str, data: bytes, per_s: float) -> None:
    async def once(place: int) -> None:
        async def one(_: int) -> None:
            async with assault.admitted(0) as mux:
                async for _number in paced(assault, per_s, 1_000_000):
                    stream = await mux.open(protocol, data)
                    assault.spent.count("asked")
                    await mux.send(frame(DATA, FIN, stream.number, 0))
                    if len(mux.streams) > 100:
                        await trio.sleep(0.1)
                    if mux.over.is_set():
                        return

        await over_and_over(assault, one, 1.0)

    await side_by_side(4, once)
