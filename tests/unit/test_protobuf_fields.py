"""Fields of a protobuf message, counted before it is parsed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.pubsub.pb import rpc_pb2

from swarm.errors import Reject, RemoteProtocolError
from swarm.transport.libp2p.gossipsub import WITHIN_RPC
from swarm.transport.libp2p.protobuf_fields import count_fields

MOST = 8_192


def counted(data: bytes, most: int = MOST) -> int:
    return count_fields(memoryview(data), WITHIN_RPC, most)


def test_fields_of_messages_within_are_counted() -> None:
    prune = rpc_pb2.ControlPrune(topicID="t", peers=[rpc_pb2.PeerInfo()] * 3, backoff=300)
    message = rpc_pb2.Message(from_id=b"x", topicIDs=["a", "b"], data=bytes(300))
    rpc = rpc_pb2.RPC(
        subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid="t")],
        publish=[message, message],
        control=rpc_pb2.ControlMessage(prune=[prune]),
    )
    assert counted(rpc.SerializeToString()) == (1 + 2) + 2 * (1 + 4) + (1 + 1 + 5)
    assert counted(b"") == 0


def test_too_many_are_a_flood_and_not_looked_at_to_the_end() -> None:
    broken_at_its_end = b"\x12\x00" * 11 + b"\xff"
    with pytest.raises(RemoteProtocolError) as caught:
        counted(broken_at_its_end, 10)
    assert caught.value.reason is Reject.FLOOD
    nested = b"\x1a\x10" + b"\x12\x00" * 8
    assert counted(nested, 9) == 9
    with pytest.raises(RemoteProtocolError):
        counted(nested, 8)


@pytest.mark.parametrize(
    "data", [b"\x12", b"\x12\x05abc", b"\x0d\x00\x00", b"\x13\x14", b"\xff" * 11, b"\x08\x80"]
)
def test_what_is_no_message_is_malformed(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        counted(data)
    assert caught.value.reason is Reject.MALFORMED


TEXTS = st.lists(st.text(max_size=4), max_size=4)
IDS = st.lists(st.binary(max_size=4), max_size=4)
PRUNE = st.builds(
    rpc_pb2.ControlPrune,
    topicID=st.text(max_size=4),
    peers=st.lists(st.builds(rpc_pb2.PeerInfo, peerID=st.binary(max_size=200)), max_size=3),
    backoff=st.integers(0, 2**64 - 1),
)
CONTROL = st.builds(
    rpc_pb2.ControlMessage,
    ihave=st.lists(st.builds(rpc_pb2.ControlIHave, messageIDs=IDS), max_size=3),
    prune=st.lists(PRUNE, max_size=3),
)
MESSAGE = st.builds(rpc_pb2.Message, data=st.binary(max_size=200), topicIDs=TEXTS)


@given(st.builds(rpc_pb2.RPC, publish=st.lists(MESSAGE, max_size=3), control=CONTROL))
@pytest.mark.slow
def test_the_count_is_that_of_the_parser(rpc: rpc_pb2.RPC) -> None:
    def walked(message: Any) -> int:
        count = 0
        for field, value in message.ListFields():
            each = value if field.is_repeated else [value]
            count += len(each)
            if field.message_type is not None:
                count += sum(map(walked, each))
        return count

    assert counted(rpc.SerializeToString()) == walked(rpc)
