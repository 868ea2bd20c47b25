"""Fuzz target: gossip messages and their control entries, however many.

An input is how often its body is repeated (a power of two), in which field of the control message,
or 0 for the body as it is, and the body. What is left of a message has the bounds that it should
have, and to find that out costs no more than its bytes.
"""

from random import Random

from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_uvarint

from swarm.errors import Reject, RemoteProtocolError
from swarm.transport.libp2p.gossipsub import (
    BACK_OFF_S_MAX,
    CONTROL_ENTRIES_MAX,
    FIELDS_MAX,
    ID_BYTES_MAX,
    IDS_PER_RPC_MAX,
    RPC_BYTES_MAX,
    TOPICS_PER_PEER_MAX,
    WITHIN_RPC,
    _parsed,
    check_size,
    trim_control,
)
from swarm.transport.libp2p.protobuf_fields import count_fields

INPUT_BYTES_MAX = 2_048
HEAD_BYTES = 2
TOPIC = "/swarm/test"
TOPICS = {TOPIC}
REPEATED_MAX = 8  # of a control message that are repeated
DOUBLINGS_MAX = 18


def check(data: bytes) -> None:
    """Judge one input.

    Raises:
        Exception: more is left of it than may be, or something else comes out.
    """
    if len(data) < HEAD_BYTES:
        return
    rpc, reason = _taken(whole(data[0], data[1], data[HEAD_BYTES:]))
    if rpc is None:
        assert reason in (Reject.MALFORMED, Reject.FLOOD)
        return
    assert entries(rpc.control) <= CONTROL_ENTRIES_MAX
    looked_at = trim_control(rpc, TOPICS)
    assert looked_at <= 2 * IDS_PER_RPC_MAX
    control = rpc.control
    assert not rpc.HasField("senderRecord")
    assert not control.idontwant
    assert len(control.iwant) <= 1
    for kind in (control.ihave, control.graft, control.prune):
        assert len(kind) <= TOPICS_PER_PEER_MAX
        assert all(entry.topicID == TOPIC for entry in kind)
    assert all(prune.backoff <= BACK_OFF_S_MAX and not prune.peers for prune in control.prune)
    for some in (control.iwant, control.ihave):
        ids = [each for entry in some for each in entry.messageIDs]
        assert len(ids) <= IDS_PER_RPC_MAX
        assert all(len(each) <= ID_BYTES_MAX for each in ids)


def _taken(data: bytes) -> tuple[rpc_pb2.RPC | None, Reject | None]:
    """The message, or why it is not looked at."""
    try:
        count_fields(memoryview(data), WITHIN_RPC, FIELDS_MAX)
        rpc = _parsed(data)
        check_size(rpc)
    except RemoteProtocolError as error:
        return None, error.reason
    return rpc, None


def entries(control: rpc_pb2.ControlMessage) -> int:
    """How many entries there are, counted one by one."""
    kinds = (control.ihave, control.iwant, control.graft, control.prune, control.idontwant)
    return sum(1 for kind in kinds for _ in kind)


def whole(doublings: int, field: int, body: bytes) -> bytes:
    """The bytes of a message, as many as one may have."""
    if field % REPEATED_MAX == 0:
        return body
    entry = encode_uvarint(field % REPEATED_MAX << 3 | 2) + encode_uvarint(len(body)) + body
    count = min(1 << doublings % DOUBLINGS_MAX, (RPC_BYTES_MAX - 8) // len(entry))
    control = entry * count
    return b"\x1a" + encode_uvarint(len(control)) + control


def seeds() -> dict[str, bytes]:
    """Inputs to start from, by name."""
    have = rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=[b"a", b"b", bytes(300)])
    want = rpc_pb2.ControlIWant(messageIDs=[b"a", b"a", b"c"])
    prune = rpc_pb2.ControlPrune(
        topicID=TOPIC, backoff=2**40, peers=[rpc_pb2.PeerInfo(peerID=b"x")]
    )
    graft = rpc_pb2.ControlGraft(topicID=TOPIC)
    all_kinds = rpc_pb2.RPC(
        control=rpc_pb2.ControlMessage(
            ihave=[have] * 3,
            iwant=[want] * 3,
            graft=[graft],
            prune=[prune],
            idontwant=[rpc_pb2.ControlIDontWant(messageIDs=[b"a"])],
        ),
        subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=TOPIC)],
    )
    found = {"all-kinds": bytes([0, 0]) + all_kinds.SerializeToString()}
    bodies = {1: have, 2: want, 3: graft, 4: prune}
    for field, entry in bodies.items():
        for doublings in (0, 4, 9, 11, 17):
            name = f"field-{field}-times-{1 << doublings}"
            found[name] = bytes([doublings, field]) + entry.SerializeToString()
        found[f"field-{field}-empty"] = bytes([17, field])
    return found


def mutate(data: bytes, random: Random) -> bytes | None:
    """Change the head alone now and then."""
    if len(data) <= HEAD_BYTES or random.random() < 0.7:
        return None
    head = bytes([random.randrange(DOUBLINGS_MAX), random.randrange(REPEATED_MAX)])
    return head + data[HEAD_BYTES:]
