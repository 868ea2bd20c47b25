"""What a peer can make a node do by GossipSub's control messages: what the protocol needs."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_delim, encode_varint_prefixed

from swarm.errors import Reject
from swarm.identity import Identity, PeerId
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.reputation import Ledger
from swarm.transport.base import GOSSIP_BYTES_MAX
from swarm.transport.libp2p import gossipsub
from swarm.transport.libp2p.gossipsub import (
    BACK_OFF_S_MAX,
    ID_BYTES_MAX,
    IDS_PER_RPC_MAX,
    MESHSUB_PROTOCOL,
    TOPICS_PER_PEER_MAX,
    trim_control,
)
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from tests.support import run

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
TOPIC = "/test/topic"
Control = rpc_pb2.ControlMessage


def trimmed(**fields: Any) -> rpc_pb2.RPC:
    rpc = rpc_pb2.RPC(control=Control(**fields))
    trim_control(rpc, {TOPIC})
    return rpc


def test_each_wanted_message_counts_once() -> None:
    ids = [b"a", b"b", b"a", *[b"c"] * 10_000, bytes(ID_BYTES_MAX + 1)]
    rpc = trimmed(iwant=[rpc_pb2.ControlIWant(messageIDs=ids)] * 50)
    assert [list(entry.messageIDs) for entry in rpc.control.iwant] == [[b"a", b"b", b"c"]]


def test_ids_are_bounded() -> None:
    ids = [i.to_bytes(4, "big") for i in range(IDS_PER_RPC_MAX + 9)]
    rpc = trimmed(
        iwant=[rpc_pb2.ControlIWant(messageIDs=ids)],
        ihave=[rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=ids)] * (TOPICS_PER_PEER_MAX + 1),
    )
    assert [len(entry.messageIDs) for entry in rpc.control.iwant] == [IDS_PER_RPC_MAX]
    assert [len(entry.messageIDs) for entry in rpc.control.ihave] == (
        [IDS_PER_RPC_MAX] + [0] * (TOPICS_PER_PEER_MAX - 1)
    )


def test_nobody_is_named_and_nothing_of_later_versions_is_kept() -> None:
    prune = rpc_pb2.ControlPrune(
        topicID=TOPIC, backoff=2**63, peers=[rpc_pb2.PeerInfo(peerID=b"x", signedPeerRecord=b"y")]
    )
    rpc = trimmed(
        prune=[prune],
        graft=[rpc_pb2.ControlGraft(topicID=TOPIC), rpc_pb2.ControlGraft(topicID="/other")],
        idontwant=[rpc_pb2.ControlIDontWant(messageIDs=[b"a"])],
    )
    assert rpc.control == Control(
        prune=[rpc_pb2.ControlPrune(topicID=TOPIC, backoff=BACK_OFF_S_MAX)],
        graft=[rpc_pb2.ControlGraft(topicID=TOPIC)],
    )
    rpc = rpc_pb2.RPC(senderRecord=b"record")
    trim_control(rpc, {TOPIC})
    assert not rpc.HasField("senderRecord")


def test_peers_that_prune_us_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossipsub, "BACK_OFFS_MAX", 3)

    async def main() -> None:
        async with open_libp2p(Identity(b"b" * 32), LOOPBACK) as b:
            await b.subscribe(TOPIC, lambda peer, payload: True)
            prune = rpc_pb2.ControlPrune(topicID=TOPIC, backoff=60)
            for i in range(9):
                peer = ID.from_base58(Identity(bytes([i]) * 32).peer_id)
                await b._gossip._process_rpc(peer, rpc_pb2.RPC(control=Control(prune=[prune])))
            assert len(b._router.back_off[TOPIC]) == 3

    run(main)


@asynccontextmanager
async def subscribed_pair() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    """Two hosts in each other's mesh."""
    async with (
        open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
        open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
    ):
        for each in (a, b):
            await each.subscribe(TOPIC, lambda peer, payload: True)
        await a.connect(b.addresses()[0])
        await until(lambda: b._id in a._router.mesh[TOPIC] and a._id in b._router.mesh[TOPIC])
        yield a, b


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  state of another library
        await trio.sleep(0.01)


def test_messages_are_sent_again_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 50_000
    monkeypatch.setattr(gossipsub, "ANSWER_BYTES_PER_S", 3.0 * size)

    async def main() -> None:
        async with subscribed_pair() as (a, b):
            for i in range(8):
                await b.publish(TOPIC, bytes([i]) * size)
            await until(lambda: a.counters.messages_in[TOPIC] == 8)
            sent: list[rpc_pb2.RPC] = []
            b._gossip.peer_queues[a._id].push = (  # type: ignore[method-assign]
                lambda rpc, *rest, **more: sent.append(rpc)
            )
            wanted = rpc_pb2.ControlIWant(messageIDs=list(b._router.mcache.msgs) * 3)
            assert len(wanted.messageIDs) == 24
            await b._gossip._process_rpc(a._id, rpc_pb2.RPC(control=Control(iwant=[wanted])))
            again = [message for rpc in sent for message in rpc.publish]
            assert len(again) == 3
            assert len({message.seqno for message in again}) == 3

    run(main)


def test_what_is_offered_is_asked_for_while_it_is_wanted() -> None:
    async def main() -> None:
        wanted = True
        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
            open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
        ):
            await a.subscribe(TOPIC, lambda peer, payload: True)
            await b.subscribe(TOPIC, lambda peer, payload: True, asks=lambda: wanted)
            await a.connect(b.addresses()[0])
            await until(lambda: a._id in b._router.mesh[TOPIC])
            await until(lambda: a._id in b._gossip.peer_queues)
            sent: list[rpc_pb2.RPC] = []
            b._gossip.peer_queues[a._id].push = (  # type: ignore[method-assign]
                lambda rpc, *rest, **more: sent.append(rpc)
            )
            offer = rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=[b"00", b"01"])
            for wanted, asked in ((False, 0), (True, 2)):  # noqa: B007  read by `asks`
                await b._gossip._process_rpc(a._id, rpc_pb2.RPC(control=Control(ihave=[offer])))
                ids = [i for rpc in sent for each in rpc.control.iwant for i in each.messageIDs]
                assert len(ids) == asked

    run(main)


def test_a_prune_makes_nobody_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream dials the peers that it names, at the addresses that it gives."""

    async def main() -> None:
        async with subscribed_pair() as (a, b):
            dialled: list[object] = []

            async def note(peer: object) -> None:
                dialled.append(peer)
                await trio.lowlevel.checkpoint()

            monkeypatch.setattr(b._host, "connect", note)
            victim = Identity(b"v" * 32).peer_id
            named = rpc_pb2.PeerInfo(peerID=a._id.from_base58(victim).to_bytes())
            b._host.get_peerstore().add_addrs(a._id.from_base58(victim), [], 60)
            prune = rpc_pb2.ControlPrune(topicID=TOPIC, peers=[named])
            await b._gossip._process_rpc(a._id, rpc_pb2.RPC(control=Control(prune=[prune])))
            assert a._id not in b._router.mesh[TOPIC]  # it was heard
            assert dialled == []

    run(main)


async def open_stream(a: Libp2pTransport, b: Libp2pTransport, data: bytes) -> Any:
    """A stream of gossip from one to the other, beside the one there is."""
    connection: Any = a._network.live(b._id)
    stream = await connection.muxed_conn.open_stream()
    head = encode_delim(b"/multistream/1.0.0") + encode_delim(MESHSUB_PROTOCOL.encode())
    await stream.write(head + data)
    return stream


def test_a_peer_has_one_stream_of_gossip() -> None:
    """Else each holds as much as a message may have."""

    async def main() -> None:
        async with subscribed_pair() as (a, b):
            half = b"\xc0\x9a\x0c" + bytes(100_000)  # of a message of 200,000 bytes
            streams = [await open_stream(a, b, half) for _ in range(20)]
            await until(lambda: sum(not stream.closed for stream in streams) == 1)
            assert list(b._gossip._inbound) == [a._id]
            assert b._gossip.peer_topics[TOPIC] == {a._id}  # it is no other peer for that
            await b.publish(TOPIC, b"still")
            await until(lambda: a.counters.messages_in[TOPIC] == 1)

    run(main)


def test_the_rest_of_a_message_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossipsub, "RPC_TIMEOUT_S", 0.2)

    async def main() -> None:
        async with subscribed_pair() as (a, b):
            stream = await open_stream(a, b, b"\x80\x80\x3c")
            await until(lambda: stream.closed)
            await until(lambda: not b._gossip._inbound)
            assert a.peers() == (b.peer_id,)

    run(main)


# --- whose fault it is ----------------------------------------------------------------------------


def altered(message: rpc_pb2.Message, **changes: Any) -> rpc_pb2.Message:
    other = rpc_pb2.Message()
    other.CopyFrom(message)
    other.MergeFrom(rpc_pb2.Message(**changes))
    return other


async def published(a: Libp2pTransport, payload: bytes) -> rpc_pb2.Message:
    """A message that is signed as it should be."""
    await a.publish(TOPIC, payload)
    message: Any = a._router.mcache.get(list(a._router.mcache.msgs)[-1])
    return altered(message)


def test_what_no_honest_peer_forwards_costs_the_forwarder() -> None:
    async def main() -> None:
        async with subscribed_pair() as (a, b):
            ledger = Ledger()
            gater = ConnectionGater(b, ledger)
            stream = await open_stream(a, b, b"")
            good = await published(a, b"x" * 60_000)
            forged = [
                altered(good, data=b"evil", seqno=b"1"),
                altered(good, signature=bytes(64), seqno=b"2"),
                altered(good, from_id=ID.from_base58(Identity(b"v" * 32).peer_id).to_bytes()),
            ]
            for count, message in enumerate(forged, 1):
                await stream.write(encode_varint_prefixed(rpc(message)))
                await until(lambda count=count: ledger.rejected[Reject.BAD_SIGNATURE] == count)  # type: ignore[misc]
            assert gater.is_banned(a.peer_id)
            for message, reason in (
                (altered(good, topicIDs=["more"], seqno=b"4"), Reject.MALFORMED),
                (altered(good, data=bytes(GOSSIP_BYTES_MAX + 1), seqno=b"5"), Reject.OVERSIZE),
            ):
                b._gossip._admit = lambda peer, topic: True
                await stream.write(encode_varint_prefixed(rpc(message)))
                await until(lambda reason=reason: ledger.rejected[reason] == 1)  # type: ignore[misc]
            assert set(ledger.peers()) == {a.peer_id}

    run(main)


def rpc(*messages: rpc_pb2.Message) -> bytes:
    return rpc_pb2.RPC(publish=messages).SerializeToString()


def test_what_honest_peers_forward_costs_them_nothing() -> None:
    """A payload that is no good, what is known, what is for others, what is over the quota."""

    async def main() -> None:
        async with subscribed_pair() as (a, b):
            blamed: list[object] = []
            b.report_to(lambda *offence: blamed.append(offence))
            b._subscriptions[TOPIC].validate = lambda peer, payload: False
            bad = await published(a, b"no good")
            elsewhere = altered(bad)
            elsewhere.topicIDs[:] = ["/other"]
            b_own = altered(bad, from_id=b._id.to_bytes())
            over = altered(bad, data=b"over the quota", seqno=b"1")
            for message in (bad, bad, altered(bad, data=b"known"), elsewhere, b_own):
                await b._gossip.push_msg(a._id, message)
            b._gossip._admit = lambda peer, topic: False
            await b._gossip.push_msg(a._id, over)
            assert not blamed
            b._gossip._admit = lambda peer, topic: True
            await b._gossip.push_msg(a._id, over)
            assert blamed == [(a.peer_id, Reject.BAD_SIGNATURE)]

    run(main)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x03\xff\xff\xff", Reject.MALFORMED),
        (b"\xff" * 20, Reject.MALFORMED),
        (b"\x80\x80\x80\x01", Reject.OVERSIZE),
        (b"\x05half", None),
    ],
)
def test_bytes_that_are_no_gossip_cost_their_sender(
    data: bytes, reason: Reject | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gossipsub, "RPC_TIMEOUT_S", 0.2)

    async def main() -> None:
        async with subscribed_pair() as (a, b):
            blamed: list[object] = []
            b.report_to(lambda *offence: blamed.append(offence))
            stream = await open_stream(a, b, data)
            await until(lambda: stream.closed)
            await until(lambda: not b._gossip._inbound)
            assert blamed == ([(a.peer_id, reason)] if reason else [])

    run(main)


@pytest.mark.parametrize("field", ["subscriptions", "publish", "ihave", "observe", "prune.peers"])
def test_a_message_of_empty_fields_is_refused_before_it_is_parsed(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser would make half a million of them first."""
    parsed: list[int] = []
    parse = gossipsub._parsed
    monkeypatch.setattr(gossipsub, "_parsed", lambda data: parsed.append(len(data)) or parse(data))
    number = {"subscriptions": 1, "publish": 2, "ihave": 1, "observe": 7, "prune.peers": 2}[field]
    rpc = bytes([number << 3 | 2, 0]) * 500_000
    if field == "prune.peers":
        rpc = encode_delim_field(4, rpc)
    if field not in ("subscriptions", "publish"):
        rpc = encode_delim_field(3, rpc)

    async def main() -> None:
        async with subscribed_pair() as (a, b):
            blamed: list[object] = []
            b.report_to(lambda *offence: blamed.append(offence))
            del parsed[:]
            await open_stream(a, b, encode_varint_prefixed(rpc))
            await until(lambda: bool(blamed))
            assert blamed == [(a.peer_id, Reject.FLOOD)]
            assert max(parsed, default=0) < 10_000

    run(main)


def encode_delim_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + encode_varint_prefixed(data)


def test_what_is_unfinished_is_bounded_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds most of it loses the stream, and nobody else."""
    monkeypatch.setattr(gossipsub, "UNFINISHED_BYTES_MAX", 1_000_000)

    async def main() -> None:
        async with (
            subscribed_pair() as (a, b),
            open_libp2p(Identity(b"c" * 32), LOOPBACK) as c,
        ):
            await c.connect(b.addresses()[0])
            await until(lambda: {a._id, c._id} <= b._gossip._inbound.keys())
            small = await open_stream(c, b, encode_varint_prefixed(bytes(300_000))[:-1])
            await until(lambda: sum(b._gossip._unfinished.values()) > 299_000)
            large = await open_stream(a, b, encode_varint_prefixed(bytes(800_000))[:-1])
            await until(lambda: large.closed)
            assert not small.closed
            await until(lambda: sum(b._gossip._unfinished.values()) < 301_000)
            assert [stream.muxed_conn.peer_id for stream in b._gossip._unfinished] == [c._id]

    run(main)


def test_who_is_over_the_quota_keeps_no_message_from_us() -> None:
    """Nor makes us check signatures."""
    turned_away: list[PeerId] = []

    def admit(peer: PeerId) -> bool:
        turned_away.append(peer)
        return len(turned_away) > 3

    async def main() -> None:
        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
            open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
        ):
            channel = await b.subscribe(TOPIC, lambda peer, payload: True, admit)
            await a.publish(TOPIC, b"good")
            (message_id,) = a._router.mcache.msgs
            message: Any = a._router.mcache.get(message_id)
            forged = rpc_pb2.Message()
            forged.CopyFrom(message)
            forged.data = b"evil"
            for each in (message, forged, message, forged, message, message):
                await b._gossip.push_msg(a._id, each)
            assert channel.receive_nowait().payload == b"good"
            assert channel.statistics().current_buffer_used == 0
            assert b.counters.refused[TOPIC] == 3
            assert len(turned_away) == 5  # and what is known asks no more

    run(main)
