"""Fuzz target: foreign bytes into the stream handlers, on the desk of `tests/fuzz/rig.py`.

An input is a mode, how its stream ends (`End`), how the bytes are cut into pieces, and the bytes:

    0  an inbound stream from its first byte
    1  a request: the first byte chooses the protocol, the rest is its payload
    2  the payload of a hello that its peer signed
    3  one gossip RPC
    4  the payload of an advert that its producer signed, as a signed gossip message
    5  the answer to a request of ours, from its first byte
    6  what peers answer to all that discovery and exchange ask: the first byte chooses to whom the
       rest goes; records in it that are not signed are signed on the way
    7  an address, as bytes where somebody wants to be dialled, and as text

Nothing may come out but what the interfaces name, whatever is sent; every slot that was taken is
given back; and it is over within the virtual time that the limits allow.
"""

import hashlib
import re
from itertools import chain
from random import Random
from typing import Any

import msgpack
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.relay.circuit_v2.pb import circuit_pb2, dcutr_pb2
from libp2p.utils import encode_delim, encode_uvarint
from multiaddr import Multiaddr

from swarm.errors import ConfigError, RemoteProtocolError, RequestRefused
from swarm.identity import peer_id_of, public_key_of
from swarm.limits.address_blocks import GLOBAL, NOWHERE, reach_of_ip
from swarm.peers.address_book import reach_of
from swarm.transport.libp2p.addresses import parse_peer_address
from swarm.transport.libp2p.gossipsub import MESHSUB_PROTOCOL
from swarm.transport.libp2p.negotiation import MULTISTREAM
from swarm.transport.libp2p.reachability import PUNCH_PROTOCOL
from swarm.transport.libp2p.relay import HOP_PROTOCOL, STOP_PROTOCOL, encoded
from swarm.transport.libp2p.streams import LENGTH, STATUS, receive
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERT_DOMAIN,
    ADVERTS_PROTOCOL,
    GROUP_DOMAIN,
    HELLO_DOMAIN,
    HELLO_PROTOCOL,
    HOLDERS_PROTOCOL,
    REACH_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    AdvertEntry,
    Want,
    adverts_topic,
)
from tests.fuzz import fuzz_codec
from tests.fuzz.fuzz_codec import sealed
from tests.fuzz.rig import HEAD_BYTES, RUN_ID, Bench, BenchCheck, DeskStream, End
from tests.unit.test_wire_files import golden
from tests.wire_samples import ALICE, sample_advert, sample_group

INPUT_BYTES_MAX = 2_048
ANSWER_BYTES_MAX = 65_536
WRITTEN_BYTES_MAX = 5_000_000  # by a node on one stream
LOOPS_S = 6.0  # virtual, that discovery and exchange run over an answer
MODES = 8
STREAM, REQUEST, HELLO, RPC, ADVERT, ANSWER, REPLIES, ADDRESS = range(MODES)
PROTOCOLS = (HELLO_PROTOCOL, ADVERTS_PROTOCOL, ROLLOUTS_PROTOCOL, HOLDERS_PROTOCOL, REACH_PROTOCOL)
ALICE_KEYS = create_new_key_pair(ALICE.seed)
ALICE_ID = ID.from_base58(ALICE.peer_id)


async def _run(bench: Bench, mode: int, end: End, cut: int, data: bytes) -> None:
    if mode == ANSWER:
        await _check_answer(data, cut, end)
    elif mode == ADDRESS:
        _check_address(bench, data)
    elif mode == REPLIES:
        await _check_replies(bench, data)
    else:
        await _check_stream(bench, _stream_bytes(mode, data), cut, end)


check = BenchCheck(MODES, _run)


def choose(protocol: str, payload: bytes) -> bytes:
    """A whole stream: both choices of multistream-select, and the payload."""
    return encode_delim(MULTISTREAM.encode()) + encode_delim(protocol.encode()) + payload


def request(protocol: str, payload: bytes) -> bytes:
    return choose(protocol, LENGTH.pack(len(payload)) + payload)


def gossip(rpc: bytes) -> bytes:
    return choose(MESHSUB_PROTOCOL, encode_uvarint(len(rpc)) + rpc)


def _stream_bytes(mode: int, data: bytes) -> bytes:
    if mode == REQUEST:
        protocol = PROTOCOLS[data[0] % len(PROTOCOLS)] if data else HELLO_PROTOCOL
        return request(protocol, data[1:])
    if mode == HELLO:
        return request(HELLO_PROTOCOL, sealed(data, HELLO_DOMAIN))
    if mode == RPC:
        return gossip(data)
    if mode == ADVERT:
        message = signed_message(sealed(data, ADVERT_DOMAIN))
        return gossip(rpc_pb2.RPC(publish=[message]).SerializeToString())
    return data


def signed_message(payload: bytes) -> rpc_pb2.Message:
    """A gossip message that Alice signed as libp2p asks for."""
    message = rpc_pb2.Message(
        from_id=ALICE_ID.to_bytes(),
        seqno=hashlib.sha256(payload).digest()[:8],
        data=payload,
        topicIDs=[adverts_topic(RUN_ID)],
    )
    unsigned = b"libp2p-pubsub:" + message.SerializeToString()
    message.signature = ALICE_KEYS.private_key.sign(unsigned)
    return message


async def _check_stream(bench: Bench, data: bytes, cut: int, end: End) -> None:
    async with bench.desk() as desk:
        stream = await desk.serve_stream(data, cut, end)
        for protocol, served in desk.real._served.items():
            taken = [*served.requests_by_peer, *served.slots]
            assert not taken, f"{protocol}: a slot is not given back"
        assert stream.written <= WRITTEN_BYTES_MAX, f"{stream.written} bytes written"


async def _check_answer(data: bytes, cut: int, end: End) -> None:
    stream = DeskStream(ALICE_ID, data, cut, end)
    with trio.move_on_after(LOOPS_S):
        try:
            answer = await receive(stream, ROLLOUTS_PROTOCOL, ANSWER_BYTES_MAX)
            assert len(answer) <= ANSWER_BYTES_MAX
        except (RemoteProtocolError, RequestRefused) as error:
            _check_text(str(error))
        except BaseLibp2pError:
            pass  # the stream is over


def _check_text(text: str) -> None:
    assert text.isprintable(), "text of a peer that could steer a terminal"
    assert len(text) < fuzz_codec.DETAIL_CHARS_MAX


async def _check_replies(bench: Bench, data: bytes) -> None:
    protocol = PROTOCOLS[data[0] % len(PROTOCOLS)] if data else HELLO_PROTOCOL
    answer = _signed_inside(data[1:], protocol)
    bench.pool.expire(2**41)  # else what it holds already would not be fetched again
    async with bench.new_desk() as desk:
        desk.transport.answer = {protocol: answer}.get
        hear = desk.real._subscriptions[adverts_topic(RUN_ID)].validate
        hear(ALICE.peer_id, offer())
        await trio.sleep(LOOPS_S)


def _check_address(bench: Bench, data: bytes) -> None:
    """Dialled are IP addresses alone, of bytes; of text also names. None is ours or a neighbour's
    where the asker is not; none holds what our own messages could not carry."""
    reach = bench.real._reach
    assert reach is not None
    for address in chain.from_iterable(reach._sensible([data]).values()):
        assert reach_of(str(address)) == GLOBAL
        assert address.to_bytes() == data
    text = data.decode(errors="replace")
    assert reach_of_ip(text) == NOWHERE or re.fullmatch("[0-9a-fA-F:.]+", text)
    for peer in ("", f"/p2p/{ALICE.peer_id}"):
        try:
            where, name = parse_peer_address(text + peer)
        except ConfigError:
            continue
        assert name == peer_id_of(public_key_of(name))
        assert str(where).count("/") == 4, where


def offer() -> bytes:
    """An advert of Alice's sample group."""
    group_id, record = codec.sign_group(sample_group(), ALICE)
    entry = AdvertEntry(group_id=group_id, size_bytes=len(record))
    return codec.sign_advert(sample_advert().model_copy(update={"groups": (entry,)}), ALICE)[1]


def _signed_inside(data: bytes, protocol: str) -> bytes:
    """The answer with its records signed, where it has any that are not."""
    domains = {ADVERTS_PROTOCOL: ADVERT_DOMAIN, ROLLOUTS_PROTOCOL: GROUP_DOMAIN}
    try:
        tree: Any = msgpack.unpackb(data, strict_map_key=False)
        records = tree["records"]
        if protocol not in domains or not all(isinstance(each, bytes) for each in records):
            return data
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return data
    tree["records"] = [
        each if b"signature" in each else sealed(each, domains[protocol]) for each in records
    ]
    packed: bytes = msgpack.packb(tree)
    return packed


# --- seeds and mutation ----------------------------------------------------------------------


def _head(mode: int, end: End = End.EOF, cut: int = 0) -> bytes:
    return bytes([mode, end, cut])


def _payloads() -> dict[str, bytes]:
    found = dict(golden())
    for name in ("group", "advert", "hello"):
        found[name] = msgpack.unpackb(found[f"signed_{name}"])["payload"]
    return found


def seeds() -> dict[str, bytes]:
    """Inputs to start from, by name: one of every kind that is answered, and some that are not."""
    known = _payloads()
    group_id = codec.sign_group(sample_group(), ALICE)[0]
    want = codec.encode(Want(type="want", run_id=RUN_ID, group_ids=(group_id,)))
    asked = {
        HELLO_PROTOCOL: known["signed_hello"],
        ADVERTS_PROTOCOL: known["recent_adverts"],
        ROLLOUTS_PROTOCOL: want,
        HOLDERS_PROTOCOL: known["have"],
        REACH_PROTOCOL: known["dial_back"],
    }
    answers = {
        HELLO_PROTOCOL: known["hello_reply"],
        ADVERTS_PROTOCOL: msgpack.packb({"type": "adverts", "records": [known["advert"]]}),
        ROLLOUTS_PROTOCOL: msgpack.packb({"type": "groups", "records": [known["group"]]}),
        HOLDERS_PROTOCOL: known["have_reply"],
        REACH_PROTOCOL: known["dial_back_reply"],
    }
    found: dict[str, bytes] = {}
    for at, protocol in enumerate(PROTOCOLS):
        name = protocol.split("/")[2]
        found[f"stream-{name}"] = _head(STREAM, cut=at) + request(protocol, asked[protocol])
        found[f"request-{name}"] = _head(REQUEST, End.SILENCE) + bytes([at]) + asked[protocol]
        found[f"replies-{name}"] = _head(REPLIES) + bytes([at]) + answers[protocol]
    found["hello-signed"] = _head(HELLO) + known["hello"]
    found["advert-signed"] = _head(ADVERT) + known["advert"]
    addresses = {
        "bytes": Multiaddr("/ip4/8.8.8.8/tcp/80").to_bytes(),
        "bytes-name": Multiaddr("/dns4/example.org/tcp/80").to_bytes(),
        "bytes-cut": b"\x2a\x8e\xc0\xfe",
        "bytes-no-port": b"\x04\x08\x08\x08\x08\x86\x00P",
        "bytes-own": Multiaddr("/ip6/::1/tcp/80").to_bytes(),
        "text": b"/dns/example.org/tcp/4001",
        "text-zone": b"fe80::1%\x1b[2J",
        "text-circuit": f"/ip4/8.8.8.8/tcp/1/p2p/{ALICE.peer_id}/p2p-circuit".encode(),
    }
    found |= {f"address-{name}": _head(ADDRESS) + data for name, data in addresses.items()}
    return found | _gossip_seeds(known["signed_advert"]) | _stream_seeds() | _answer_seeds()


def _gossip_seeds(advert: bytes) -> dict[str, bytes]:
    topic = adverts_topic(RUN_ID)
    ids = [signed_message(advert).from_id + bytes(8)] * 3
    control = rpc_pb2.ControlMessage(
        ihave=[rpc_pb2.ControlIHave(topicID=topic, messageIDs=ids)],
        iwant=[rpc_pb2.ControlIWant(messageIDs=ids)],
        graft=[rpc_pb2.ControlGraft(topicID=topic)],
        prune=[
            rpc_pb2.ControlPrune(topicID=topic, backoff=5, peers=[rpc_pb2.PeerInfo(peerID=b"x")])
        ],
        idontwant=[rpc_pb2.ControlIDontWant(messageIDs=ids)],
    )
    rpcs = {
        "subscription": rpc_pb2.RPC(
            subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic)]
        ),
        "publish": rpc_pb2.RPC(publish=[signed_message(advert)]),
        "control": rpc_pb2.RPC(control=control, senderRecord=b"record"),
    }
    return {f"rpc-{name}": _head(RPC) + rpc.SerializeToString() for name, rpc in rpcs.items()}


def _stream_seeds() -> dict[str, bytes]:
    others = ("/ipfs/ping/1.0.0", "/ipfs/id/1.0.0", MESHSUB_PROTOCOL)
    found = {
        f"stream-{name.split('/')[-2]}": _head(STREAM, End.SILENCE) + choose(name, bytes(32))
        for name in others
    }
    peer = circuit_pb2.PeerId(id=ALICE_ID.to_bytes())
    calls = {
        "hop": (HOP_PROTOCOL, circuit_pb2.HopMessage(type=0, peer=peer)),
        "hop-connect": (HOP_PROTOCOL, circuit_pb2.HopMessage(type=1, peer=peer)),
        "stop": (STOP_PROTOCOL, circuit_pb2.StopMessage(type=0, peer=peer)),
        "punch": (PUNCH_PROTOCOL, dcutr_pb2.HolePunch(type=100, ObsAddrs=[b"\x04\x7f"])),
    }
    found |= {
        f"stream-{name}": _head(STREAM, End.SILENCE) + choose(protocol, encoded(message))
        for name, (protocol, message) in calls.items()
    }
    choices = b"".join(encode_delim(f"/other/{i}".encode()) for i in range(20))
    return found | {
        "stream-many-choices": _head(STREAM) + encode_delim(MULTISTREAM.encode()) + choices,
        "stream-length-bomb": _head(STREAM) + choose(ROLLOUTS_PROTOCOL, LENGTH.pack(2**32 - 1)),
        "stream-cut": _head(STREAM, End.EOF, 1) + request(ROLLOUTS_PROTOCOL, bytes(99))[:-9],
        "stream-silent": _head(STREAM, End.SILENCE) + request(ROLLOUTS_PROTOCOL, bytes(9))[:-1],
        "stream-no-choice": _head(STREAM, End.SILENCE) + encode_delim(MULTISTREAM.encode()),
        "stream-reset": _head(STREAM, End.RESET, 2) + encode_delim(MULTISTREAM.encode())[:5],
        "stream-deaf": _head(STREAM, End.DEAF) + request(ROLLOUTS_PROTOCOL, golden()["want"]),
        "stream-long-varint": _head(STREAM) + b"\xff" * 12,
    }


def _answer_seeds() -> dict[str, bytes]:
    def answer(status: int, length: int, body: bytes) -> bytes:
        return choose(ROLLOUTS_PROTOCOL, STATUS.pack(status, length) + body)

    answers = {
        "good": answer(0, 5, b"12345"),
        "refused": answer(1, 4, b"busy"),
        "steering": answer(1, 6, b"\x1b[2J\n\xff"),
        "long": answer(0, 2**32 - 1, b""),
        "other-status": answer(7, 1, b"x"),
        "not-served": encode_delim(MULTISTREAM.encode()) + encode_delim(b"na"),
    }
    return {f"answer-{name}": _head(ANSWER) + data for name, data in answers.items()}


def mutate(data: bytes, random: Random) -> bytes | None:
    """Change the message inside as the codec's mutator does, or the head alone."""
    if len(data) <= HEAD_BYTES:
        return None
    mode = data[0] % MODES
    if random.random() < 0.1:
        return bytes([data[0], random.randrange(len(End)), random.randrange(5)]) + data[HEAD_BYTES:]
    start = HEAD_BYTES + (mode in (REQUEST, REPLIES))
    if mode in (STREAM, RPC, ANSWER, ADDRESS):
        return None
    changed = fuzz_codec.mutate(bytes([fuzz_codec.MESSAGE]) + data[start:], random)
    return None if changed is None else data[:start] + changed[1:]
