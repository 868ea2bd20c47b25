"""GossipSub 1.1, with those upstream defaults changed that lose messages or grow without bound.

Upstream forwards at most ten messages per second, topic and peer and drops the rest silently. Its
queues hold 32 messages; its adaptive mode stretches the heartbeat from 1 s to 60 s. It signs an
address record with every message, mixes up the control messages of different peers, and obeys all
of them. After a restart it reuses sequence numbers, and one malformed message ends the host.
"""

import logging
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any, cast

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetConn, INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamError
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.rpc_queue import PriorityQueue, RpcQueue
from libp2p.pubsub.utils import safe_bytes_from_hex
from libp2p.pubsub.validators import signature_validator
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.utils import encode_varint_prefixed

from swarm.errors import Reject, RemoteProtocolError
from swarm.limits.bounded_table import BoundedTable
from swarm.limits.quotas import ByteBudget
from swarm.transport.base import GOSSIP_BYTES_MAX
from swarm.transport.libp2p.admission import HardHost
from swarm.transport.libp2p.protobuf_fields import Within, count_fields
from swarm.transport.libp2p.streams import finish, reset
from swarm.transport.libp2p.yamux import MuxedConnection, Stream
from swarm.transport.metering import ENTRY_S, MESSAGE_S, RPC_S, UNMETERED, Payer

MESHSUB_PROTOCOL = TProtocol("/meshsub/1.1.0")
DEGREE, DEGREE_LOW, DEGREE_HIGH = 6, 4, 12
HEARTBEAT_S = 1
PRUNE_BACK_OFF_S = 5
PEER_QUEUE_MAX = 1_024  # messages waiting for one peer
PEER_QUEUE_BYTES_MAX = 33_554_432
RPC_BYTES_MAX = 1_048_576
SENT_BYTES_MAX = 262_144  # of our own RPCs with several messages
FIELDS_MAX = 8_192  # per RPC, nested ones included; ours have 6 per message at most
CONTROL_ENTRIES_MAX = 1_024  # per RPC; an honest one has one of each kind per topic
RPC_TIMEOUT_S = 60.0  # from first to last byte
UNFINISHED_BYTES_MAX = 8_388_608  # of incomplete RPCs of all peers
MESSAGES_PER_RPC_MAX = 256  # each costs a signature check; the rest is ignored
SEEN_MAX = 65_536
SEEN_TTL_S = 120.0
IDS_PER_RPC_MAX = 2_048  # offered by a peer, and as many wanted
ID_BYTES_MAX = 256
BACK_OFF_S_MAX = 600
BACK_OFFS_MAX = 1_024  # per topic
ANSWER_BYTES_PER_S = 262_144.0  # sent to one peer on request
ANSWERED_PEERS_MAX = 256  # with a kept budget
TOPIC_CHARS_MAX = 256
TOPICS_PER_PEER_MAX = 16
READ_BYTES = 65_536
WRITE_BYTES = 65_536  # of messages sent together to one peer
LENGTH_PREFIX_BYTES_MAX = 5
# Nested messages of an RPC: subscriptions, messages, control entries, peers in a prune.
WITHIN_RPC: Within = {
    1: {},
    2: {},
    3: {1: {}, 2: {}, 3: {}, 4: {2: {}}, 5: {}, 6: {}, 7: {}, 8: {}},
}

Admits = Callable[[ID, str], bool]
"""(forwarder, topic) -> accept one more message?"""

AsksFor = Callable[[str], bool]
"""topic -> ask for messages that peers offer?"""

Deliver = Callable[[ID, str, bytes], bool]
"""(forwarder, topic, payload) -> forward the new message? Delivers it, too."""

Blame = Callable[[ID, Reject], None]
"""(forwarder, reason): an offence that no honest peer commits."""

log = logging.getLogger(__name__)


class Router(GossipSub):
    """Upstream's mesh, with the limits of this module."""

    def __init__(self, asks: AsksFor = lambda topic: True) -> None:
        self._asks = asks
        super().__init__(
            [MESHSUB_PROTOCOL],
            DEGREE,
            DEGREE_LOW,
            DEGREE_HIGH,
            heartbeat_interval=HEARTBEAT_S,
            prune_back_off=PRUNE_BACK_OFF_S,
            unsubscribe_back_off=PRUNE_BACK_OFF_S,
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,
            eclipse_protection_enabled=False,
        )
        # upstream keeps the time of every message
        self.recent_message_deliveries = cast("Any", defaultdict(lambda: deque(maxlen=1)))
        self._answer_budgets: BoundedTable[ID, ByteBudget] = BoundedTable(ANSWERED_PEERS_MAX)

    def _check_equivocation(self, msg: rpc_pb2.Message) -> bool:
        """Upstream keeps up to 1,000 messages for this; our payloads carry signatures."""
        return True

    async def publish(self, msg_forwarder: ID, pubsub_msg: rpc_pb2.Message) -> None:
        """Forward a message to the mesh, encoded once. Upstream encodes it for each peer and adds
        this host's addresses. Upstream's method still serves peers that have not told their topics.
        """
        pubsub = self.pubsub
        assert pubsub is not None
        topic = pubsub_msg.topicIDs[0]
        origin = ID(pubsub_msg.from_id)
        if not pubsub.peers.keys() - {msg_forwarder, origin} <= pubsub.peer_topics.get(
            topic, set()
        ):
            await super().publish(msg_forwarder, pubsub_msg)
            return
        self.mcache.put(pubsub_msg)
        key = pubsub.get_message_id(pubsub_msg)
        targets = self._get_peers_to_send([topic], msg_forwarder, origin, key)
        frame = _encoded(rpc_pb2.RPC(publish=[pubsub_msg]))
        for peer in targets:
            if (queue := pubsub.peer_queues.get(peer)) is not None:
                queue.push(cast("Any", frame))

    async def emit_control_message(self, control_msg: rpc_pb2.ControlMessage, to_peer: ID) -> None:
        self.send_rpc(to_peer, rpc_pb2.RPC(control=control_msg), priority=True)

    async def handle_rpc(self, rpc: rpc_pb2.RPC, sender_peer_id: ID) -> None:
        await super().handle_rpc(rpc, sender_peer_id)
        for peers in self.back_off.values():  # upstream keeps all of them
            while len(peers) > BACK_OFFS_MAX:
                del peers[next(iter(peers))]

    async def handle_ihave(self, ihave_msg: rpc_pb2.ControlIHave, sender_peer_id: ID) -> None:
        """Upstream asks for all that it has not seen."""
        if self._asks(ihave_msg.topicID):
            await super().handle_ihave(ihave_msg, sender_peer_id)

    async def handle_iwant(self, iwant_msg: rpc_pb2.ControlIWant, sender_peer_id: ID) -> None:
        """Upstream sends 1 MB for every 100 bytes of asking."""
        now = trio.current_time()
        budget = self._answer_budgets.obtain(
            sender_peer_id, lambda: ByteBudget(ANSWER_BYTES_PER_S, now)
        )
        answered: list[bytes] = []
        for message_id in iwant_msg.messageIDs:
            message = self.mcache.get(safe_bytes_from_hex(message_id) or b"")
            if message is not None and not budget.is_spent(now):
                budget.spend(message.ByteSize(), now)
                answered.append(message_id)
        await super().handle_iwant(rpc_pb2.ControlIWant(messageIDs=answered), sender_peer_id)

    async def _emit_control_msgs(
        self,
        peers_to_graft: dict[ID, list[str]],
        peers_to_prune: dict[ID, list[str]],
        peers_to_gossip: dict[ID, dict[str, list[bytes]]],
    ) -> None:
        """Upstream sends one peer's control messages to the next peers as well."""
        for peer in {*peers_to_graft, *peers_to_prune, *peers_to_gossip}:
            grafts = [rpc_pb2.ControlGraft(topicID=t) for t in peers_to_graft.get(peer, ())]
            prunes = [
                rpc_pb2.ControlPrune(topicID=t, backoff=PRUNE_BACK_OFF_S)
                for t in peers_to_prune.get(peer, ())
            ]
            offers = [
                rpc_pb2.ControlIHave(topicID=topic, messageIDs=ids)
                for topic, ids in peers_to_gossip.get(peer, {}).items()
            ]
            message = self.pack_control_msgs(offers, grafts, prunes)
            await self.emit_control_message(message, peer)

    def send_rpc(self, peer_id: ID, rpc: rpc_pb2.RPC, priority: bool = False) -> None:
        """Leaves out address records: peers learn addresses elsewhere."""
        rpc.ClearField("senderRecord")
        super().send_rpc(peer_id, rpc, priority)


def check_size(rpc: rpc_pb2.RPC) -> None:
    """Check the size of an RPC without walking it. RemoteProtocolError: it holds more than an
    honest peer sends."""
    control = rpc.control
    wants = len(control.iwant) + len(control.ihave) + len(control.idontwant)
    entries = wants + len(control.graft) + len(control.prune) + len(rpc.subscriptions)
    if entries > CONTROL_ENTRIES_MAX:
        raise RemoteProtocolError(Reject.FLOOD, f"{entries} entries in one gossip message")


def trim_control(rpc: rpc_pb2.RPC, topics: Container[str]) -> int:
    """Reduce control messages to those of version 1.1 for our topics. Returns the number of ids
    looked at.

    Lists are cut before they are walked. Upstream remembers every topic named, dials peers named in
    a prune, and handles repeated ids again.
    """
    rpc.ClearField("senderRecord")
    control = rpc_pb2.ControlMessage()
    offered = 0
    for offer in _about(topics, rpc.control.ihave):
        ids = offer.messageIDs[: IDS_PER_RPC_MAX - offered]
        offered += len(ids)
        entry = rpc_pb2.ControlIHave(topicID=offer.topicID, messageIDs=_valid_ids(ids))
        control.ihave.append(entry)
    control.graft.extend(_about(topics, rpc.control.graft))
    for prune in _about(topics, rpc.control.prune):
        back_off_s = min(prune.backoff, BACK_OFF_S_MAX)
        control.prune.append(rpc_pb2.ControlPrune(topicID=prune.topicID, backoff=back_off_s))
    wanted: list[bytes] = []
    for want in rpc.control.iwant[:TOPICS_PER_PEER_MAX]:
        wanted += want.messageIDs[: IDS_PER_RPC_MAX - len(wanted)]
    if wanted:
        control.iwant.append(rpc_pb2.ControlIWant(messageIDs=_valid_ids(wanted)))
    rpc.control.CopyFrom(control)
    return offered + len(wanted)


def _about(topics: Container[str], entries: Sequence[Any]) -> list[Any]:
    some = entries[:CONTROL_ENTRIES_MAX]
    return [entry for entry in some if entry.topicID in topics][:TOPICS_PER_PEER_MAX]


def _valid_ids(ids: Sequence[bytes]) -> list[bytes]:
    """Distinct ids of legal length."""
    return [each for each in dict.fromkeys(ids) if len(each) <= ID_BYTES_MAX]


class SeenMessages:
    """Ids of recent messages. Upstream's has no bound and keeps a thread per host."""

    def __init__(self) -> None:
        self._expires_at_s: dict[bytes, float] = {}  # ordered by expiry

    def has(self, key: bytes) -> bool:
        return key in self._expires_at_s

    def add(self, key: bytes) -> bool:
        """Remember an id. Returns True if it is new."""
        now_s = trio.current_time()
        while self._expires_at_s:
            oldest = next(iter(self._expires_at_s))
            if len(self._expires_at_s) < SEEN_MAX and self._expires_at_s[oldest] > now_s:
                break
            del self._expires_at_s[oldest]
        if key in self._expires_at_s:
            return False
        self._expires_at_s[key] = now_s + SEEN_TTL_S
        return True


class BoundedQueue(PriorityQueue):
    """Encoded messages (`bytes`) that wait for one peer, bounded in bytes, too."""

    def __init__(self, messages_max: int) -> None:
        super().__init__(messages_max)
        self._bytes = 0

    def push(self, rpc: Any, priority: bool = False) -> bool:
        frame = rpc if isinstance(rpc, bytes) else _encoded(rpc)
        has_room = self._bytes + len(frame) <= PEER_QUEUE_BYTES_MAX
        if not has_room or not super().push(cast("Any", frame), priority):
            return False
        self._bytes += len(frame)
        return True

    def pop(self) -> Any:
        frame: Any = super().pop()
        self._bytes -= len(frame or b"")
        return frame


class Gossip(Pubsub):
    """Reads, checks and forwards messages, one at a time for each peer."""

    def __init__(
        self, host: HardHost, router: Router, admit: Admits, deliver: Deliver, blame: Blame
    ) -> None:
        super().__init__(
            host,
            router,
            max_subscriptions_per_rpc=TOPICS_PER_PEER_MAX,
            max_subscriptions_per_peer=TOPICS_PER_PEER_MAX,
            max_inbound_rpc_size=RPC_BYTES_MAX,
        )
        self.seen_messages.stop()
        self.seen_messages = cast("Any", SeenMessages())
        self._mesh = router
        self._admit = admit
        self._deliver = deliver
        self._blame = blame
        self._inbound: dict[ID, INetStream] = {}  # newest stream of each peer
        self._opening: set[ID] = set()
        self._unfinished: dict[NetStream, int] = {}  # bytes of incomplete messages
        self.counter = secrets.randbits(62)

    async def stream_handler(self, stream: INetStream) -> None:
        peer_id = stream.muxed_conn.peer_id
        former = self._inbound.get(peer_id)
        self._inbound[peer_id] = stream
        try:
            if former is not None:
                await _reset(former)
            await self._read_messages(stream, peer_id)
        except MuxedStreamEOF:
            await stream.close()
        except (BaseLibp2pError, RemoteProtocolError, ValueError) as error:
            log.debug("gossip stream of %s ended: %s", peer_id, error)
            if isinstance(error, RemoteProtocolError):
                self._blame(peer_id, error.reason)
            await stream.reset()
            # else the peer may have told its topics on another stream
            if _alive(stream) and self._inbound.get(peer_id) is stream:
                self._handle_dead_peer(peer_id)
        finally:
            if self._inbound.get(peer_id) is stream:
                del self._inbound[peer_id]
            assert isinstance(stream, NetStream)
            self._unfinished.pop(stream, None)

    async def handle_dead_peer_queue(self) -> None:
        """Upstream keeps a dead stream if the peer has another connection."""
        self.event_handle_dead_peer_queue_started.set()
        async with self.dead_peer_receive_channel:
            async for peer_id in self.dead_peer_receive_channel:
                stream = self.peers.get(peer_id)
                if stream is None or not _alive(stream):
                    self._handle_dead_peer(peer_id)

    def _handle_dead_peer(self, peer_id: ID) -> None:
        """Forget a peer, or move our stream to another connection to it. Upstream forgets the
        topics even then, and leaks our stream when it takes a new one."""
        stream = self.peers.get(peer_id)
        connections = self.host.get_network().get_connections(peer_id)
        if stream is None or _alive(stream) or not any(map(_alive, connections)):
            super()._handle_dead_peer(peer_id)
            if stream is not None and _alive(stream) and self.manager.is_running:
                self.manager.run_task(_close_and_reset, stream)
            return
        del self.peers[peer_id]
        self.peer_queues.pop(peer_id).close()
        self._schedule_peer_stream_retry(peer_id)

    async def _read_messages(self, stream: INetStream, peer_id: ID) -> None:
        assert isinstance(stream, NetStream)
        buffer = bytearray()
        while True:
            if not buffer:
                await self._read_more(stream, buffer)
            with trio.move_on_after(RPC_TIMEOUT_S) as scope:
                while (end := _whole_message(buffer)) is None:
                    await self._read_more(stream, buffer)
            if end is None or scope.cancelled_caught:
                raise StreamError(f"the rest of a message did not come in {RPC_TIMEOUT_S:.0f} s")
            data = bytes(memoryview(buffer)[end[0] : end[1]])
            del buffer[: end[1]]
            self._unfinished.pop(stream, None)
            fields = count_fields(memoryview(data), WITHIN_RPC, FIELDS_MAX)
            rpc = _parsed(data)
            check_size(rpc)
            self._payer_of(peer_id).owe(fields * ENTRY_S)
            await self._process_rpc(peer_id, rpc)

    async def _read_more(self, stream: NetStream, buffer: bytearray) -> None:
        """Read more of a message. If all peers' incomplete messages take too much, the largest
        stream is reset."""
        buffer += await stream.muxed_stream.read(READ_BYTES)
        self._unfinished[stream] = len(buffer)
        if sum(self._unfinished.values()) > UNFINISHED_BYTES_MAX:
            largest = max(self._unfinished, key=self._unfinished.__getitem__)
            log.debug("unfinished gossip of %s is too much", largest.muxed_conn.peer_id)
            del self._unfinished[largest]
            await _reset(largest)

    def _payer_of(self, peer_id: ID) -> Payer:
        stream = self._inbound.get(peer_id)
        muxed = None if stream is None else stream.muxed_conn
        return muxed.payer if isinstance(muxed, MuxedConnection) else UNMETERED

    async def _process_rpc(self, peer_id: ID, rpc: rpc_pb2.RPC) -> None:
        payer, ids_looked_at = self._payer_of(peer_id), 0
        payer.owe(RPC_S)
        if len(rpc.publish) > MESSAGES_PER_RPC_MAX:
            log.debug("%s sent %d messages at once", peer_id, len(rpc.publish))
        for message in rpc.publish[:MESSAGES_PER_RPC_MAX]:
            if await self._judge(peer_id, message) and payer.owe(MESSAGE_S):
                await payer.pay()
            await trio.lowlevel.checkpoint()  # rejecting a message awaits nothing
        for subscription in rpc.subscriptions[:TOPICS_PER_PEER_MAX]:
            if len(subscription.topicid) <= TOPIC_CHARS_MAX:
                self.handle_subscription(peer_id, subscription)
        if rpc.HasField("control"):
            ids_looked_at = trim_control(rpc, self._mesh.mesh)
            await self.router.handle_rpc(rpc, peer_id)
        if payer.owe(ids_looked_at * ENTRY_S):
            await payer.pay()
        elif not rpc.publish:
            await trio.lowlevel.checkpoint()

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        await self._judge(msg_forwarder, msg)

    async def _judge(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> bool:
        """Validate one message, deliver it, and forward it if it is valid. Returns False if it was
        ignored.

        Every peer makes these checks before forwarding, so a failure is the forwarder's offence.
        `_deliver` finds faults of the author.
        """
        if self._is_msg_seen(msg):
            return False
        own, topic = msg_forwarder == self.my_id, msg.topicIDs[0] if msg.topicIDs else ""
        if not own:
            if topic not in self.topic_ids or ID(msg.from_id) == self.my_id:
                return False  # this node may have left the topic or restarted
            if not self._admit(msg_forwarder, topic):
                return False  # not marked as seen: another peer may bring it
            offence = offence_of(msg)
            if offence is not None:
                self._blame(msg_forwarder, offence)
                return True
        self._mark_msg_seen(msg)
        if own or self._deliver(msg_forwarder, topic, msg.data):
            await self.router.publish(msg_forwarder, msg)
        return True

    async def _handle_new_peer(self, peer_id: ID) -> None:
        """Upstream opens two streams where two connections come at once, and does not tell the peer
        of topics that we join or leave meanwhile."""
        if peer_id in self._opening:
            return
        self._opening.add(peer_id)
        topics = set(self.topic_ids)
        try:
            await super()._handle_new_peer(peer_id)
        finally:
            self._opening.discard(peer_id)
        self._send_topics(peer_id, topics.symmetric_difference(self.topic_ids))
        queue = self.peer_queues.get(peer_id)
        if queue is not None:
            queue.max_message_size = SENT_BYTES_MAX
            wide = BoundedQueue(PEER_QUEUE_MAX)
            while (rpc := queue._queue.pop()) is not None:
                wide.push(rpc)
            queue._queue = wide

    def _send_topics(self, peer_id: ID, topics: set[str]) -> None:
        """Tell one peer our current subscription of each of these topics."""
        if topics and peer_id in self.peers:
            now = set(self.topic_ids)
            said = [rpc_pb2.RPC.SubOpts(subscribe=each in now, topicid=each) for each in topics]
            self._mesh.send_rpc(peer_id, rpc_pb2.RPC(subscriptions=said))

    async def write_msg(self, stream: INetStream, rpc_msg: rpc_pb2.RPC) -> bool:
        rpc_msg.ClearField("senderRecord")
        return await super().write_msg(stream, rpc_msg)

    async def handle_sending_messages(
        self, peer_id: ID, stream: INetStream, queue: RpcQueue
    ) -> None:
        """Send waiting messages, several in one write. Upstream writes each alone."""
        assert isinstance(stream, NetStream)
        try:
            while (frame := cast("Any", await queue.pop())) is not None:
                batch, size = [frame], 0
                while size < WRITE_BYTES and (more := cast("Any", queue._queue.pop())) is not None:
                    batch.append(more)
                    size += len(more)
                await stream.muxed_stream.write(b"".join(batch))
        except (BaseLibp2pError, OSError):
            log.debug("gossip stream to %s ended", peer_id)
            if self.peers.get(peer_id) is stream:  # else it was replaced
                self._handle_dead_peer(peer_id)


async def _reset(stream: INetStream) -> None:
    """Reset a stream that another has replaced."""
    with suppress(BaseLibp2pError):  # the connection may be gone
        await reset(stream.muxed_stream)  # type: ignore[attr-defined]


async def _close_and_reset(stream: INetStream) -> None:
    """Close our end of a stream, and reset it soon after."""
    muxed: Stream = stream.muxed_stream  # type: ignore[attr-defined]
    with suppress(BaseLibp2pError):  # the peer may be faster
        await muxed.close()
    await finish(muxed)


def _encoded(rpc: rpc_pb2.RPC) -> bytes:
    """The message with its length prefix and without address record."""
    rpc.ClearField("senderRecord")
    return encode_varint_prefixed(rpc.SerializeToString())


def _alive(user: INetStream | INetConn) -> bool:
    assert isinstance(user.muxed_conn, MuxedConnection)
    return user.muxed_conn.alive


def _whole_message(buffer: bytearray) -> tuple[int, int] | None:
    """Start and end of the first length-prefixed message. None: it is incomplete.
    RemoteProtocolError: the prefix is malformed or too large."""
    length = 0
    for i, byte in enumerate(buffer[:LENGTH_PREFIX_BYTES_MAX]):
        length |= (byte & 0x7F) << (7 * i)
        if not byte & 0x80:
            if length > RPC_BYTES_MAX:
                raise RemoteProtocolError(Reject.OVERSIZE, f"gossip of {length} bytes")
            return (i + 1, i + 1 + length) if len(buffer) > i + length else None
    if len(buffer) >= LENGTH_PREFIX_BYTES_MAX:
        raise RemoteProtocolError(Reject.MALFORMED, "no length prefix")
    return None


def _parsed(data: bytes) -> rpc_pb2.RPC:
    """RemoteProtocolError: it is malformed."""
    rpc = rpc_pb2.RPC()
    try:
        rpc.ParseFromString(data)
    except DecodeError:
        raise RemoteProtocolError(Reject.MALFORMED, "no gossip message") from None
    return rpc


def offence_of(message: rpc_pb2.Message) -> Reject | None:
    """The rule that forwarding this message breaks, whoever made it; None if it breaks no rule."""
    if len(message.topicIDs) != 1:
        return Reject.MALFORMED
    if len(message.data) > GOSSIP_BYTES_MAX:
        return Reject.OVERSIZE
    return None if _signed(message) else Reject.BAD_SIGNATURE


def _signed(message: rpc_pb2.Message) -> bool:
    """True if the message is signed by its claimed author."""
    try:
        return signature_validator(message)
    except Exception:  # noqa: BLE001  boundary: key parsing raises what it likes on foreign bytes
        return False
