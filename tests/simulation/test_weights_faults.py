"""Whatever goes wrong on a version's way, the weights in the end are those that were published."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from swarm.errors import Reject
from swarm.identity import PeerId
from swarm.simulation.links import LinkProfile
from swarm.transport.base import ServeLimits
from swarm.transport.memory.network import MemoryTransport
from swarm.weights.chunk_server import CHUNK_LIMITS, join
from swarm.weights.manifest import decode_manifest
from swarm.wire import codec
from swarm.wire.messages import (
    CHUNK_REQUEST_BYTES_MAX,
    CHUNKS_PROTOCOL,
    HEADS_PROTOCOL,
    HEADS_REPLY_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_PROTOCOL,
    WANT_HEADS_BYTES_MAX,
    WANT_MANIFEST_BYTES_MAX,
    ChunkRequest,
    HeadsReply,
    weights_topic,
)
from tests.simulation.weights_hosts import (
    FAST,
    LINK,
    POLICY,
    PUBLISHER,
    RUN_ID,
    SETTLED_S,
    Hosts,
    SimulatedHost,
    files_of,
    files_up_to,
    play,
    write_version,
)
from tests.weights_samples import figures_of

SLOW = LinkProfile(latency_s=0.02, up_bytes_per_s=2e3, down_bytes_per_s=2e6)


def told(host: SimulatedHost) -> str:
    """The last outcome, as it is told."""
    outcome = host.outcomes[-1]
    if outcome.applied.failure is not None:
        return f"version {outcome.applied.wanted} failed: {outcome.applied.failure}"
    bases = ",".join("nothing" if each is None else str(each) for each in outcome.bases)
    doubts = "".join(f"{doubt}; " for doubt in outcome.doubts)
    return f"{doubts}version {outcome.applied.wanted} from {bases}"


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_publisher_dies_once_its_peers_together_hold_every_chunk(tmp_path: Path) -> None:
    peers = range(1, 5)

    async def scene(hosts: Hosts) -> None:
        await hosts.start(PUBLISHER)
        for number in peers:
            await hosts.start(number)
        await hosts.publish(1)
        every = hosts[PUBLISHER].chunks()
        assert await hosts.until(lambda: set().union(*(hosts[n].chunks() for n in peers)) >= every)
        assert any(hosts[number].chunks() != every for number in peers)
        await hosts.kill(PUBLISHER)
        await hosts.until_all_have(1, peers)
        assert told(hosts[1]) == "version 1 from nothing"
        assert all(hosts[number].has_exactly(hosts.source(1)) for number in peers)

    play(scene, tmp_path, hosts=5, link=LINK)


def test_a_receiver_that_dies_half_way_goes_on_with_what_it_left(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.start(PUBLISHER)
        await hosts.publish(1)
        every = hosts[PUBLISHER].chunks()
        receiver = await hosts.start(1)
        assert await hosts.until(lambda: len(receiver.chunks()) >= len(every) // 2)
        await hosts.kill(1)
        before = receiver.chunks()
        receiver = await hosts.start(1)
        await hosts.until_all_have(1, range(1, 2))
        assert len(before) >= 2
        assert figures_of(receiver.store).stored == len(every - before)  # nothing came again
        assert told(receiver) == "version 1 from nothing"
        assert receiver.has_exactly(hosts.source(1))

    play(scene, tmp_path, hosts=2, link=LINK)


def test_a_full_disk_leaves_the_version_before_until_there_is_room(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        receiver = hosts[1]
        await hosts.publish(2)
        with files_up_to(4_096):
            await hosts.until(lambda: bool(receiver.failures()))
            assert told(receiver).startswith("version 2 failed: ")
            assert receiver.serving == 1
            assert receiver.has_exactly(hosts.source(1))
        await hosts.until_all_have(2, range(1, 2))
        assert receiver.has_exactly(hosts.source(2))
        assert len(receiver.failures()) < 9

    play(scene, tmp_path, hosts=2, link=LINK)


async def comes_to_the_end(hosts: Hosts, late: SimulatedHost, liar: PeerId) -> None:
    """Host 3 meets an honest peer, has the version, and has blamed the liar alone."""
    await late.transport.connect(hosts[1].transport.addresses()[0])
    await hosts.until_all_have(1, range(3, 4))
    assert told(late) == "version 1 from nothing"
    assert set(late.blamed(liar)) == {Reject.MALFORMED}
    assert sum(late.blamed(liar).values()) < 9
    assert not late.blamed(hosts[1].peer_id)
    assert late.has_exactly(hosts.source(1))


def test_who_serves_damaged_chunks_is_blamed_and_nobody_else(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 3))
        liar = hosts[2]
        for path in (liar.directory / "store").glob("chunks/*/*"):
            flip_last_bit(path)  # after it was verified
        late = await hosts.start(3, connect=False)
        await late.transport.connect(liar.transport.addresses()[0])  # knows nobody else at first
        await hosts.until(lambda: bool(late.blamed(liar.peer_id)))
        await comes_to_the_end(hosts, late, liar.peer_id)

    play(scene, tmp_path)


def test_a_base_that_somebody_wrote_to_is_not_built_on(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        receiver = hosts[1]
        current = receiver.service.versions.current()
        assert current is not None
        flip_last_bit(current.directory / "model.safetensors")
        await hosts.publish(2)
        await hosts.until_all_have(2, range(1, 2))
        assert told(receiver) == (
            "weights: base 1: 'layer.weight' is not what it was; version 2 from nothing"
        )
        assert receiver.has_exactly(hosts.source(2))

    play(scene, tmp_path, hosts=2, link=LINK)


def test_a_forged_head_and_a_forged_manifest_cost_their_sender_alone(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        forger, identity = hosts.world.join(2), hosts.world.identities[2]
        source = hosts[PUBLISHER].service
        body, record = source.versions.manifest_body(1), source.heads.record(POLICY, 1)
        head = source.heads.newest(POLICY)
        assert head is not None
        assert record is not None
        lie = codec.sign_head(
            head.model_copy(update={"publisher": identity.peer_id, "version": 7}), identity
        )

        async def manifest(peer: PeerId, payload: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return body[:-1] + bytes([body[-1] ^ 1])

        async def heads(peer: PeerId, payload: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return codec.encode(HeadsReply(type="heads", records=(record, lie)))

        limits = ServeLimits(WANT_MANIFEST_BYTES_MAX, MANIFEST_BYTES_MAX)
        forger.serve(MANIFEST_PROTOCOL, manifest, limits)
        limits = ServeLimits(WANT_HEADS_BYTES_MAX, HEADS_REPLY_BYTES_MAX)
        forger.serve(HEADS_PROTOCOL, heads, limits)
        late = await hosts.start(3, connect=False)
        await late.transport.connect(forger.addresses()[0])  # knows nobody else at first
        await hosts.until(lambda: bool(late.blamed(forger.peer_id)))
        await late.transport.connect(hosts[1].transport.addresses()[0])
        await hosts.until_all_have(1, range(3, 4))
        assert told(late) == "version 1 from nothing"
        blamed = late.blamed(forger.peer_id)
        assert set(blamed) == {Reject.NOT_A_PUBLISHER, Reject.WRONG_HASH}
        assert blamed[Reject.NOT_A_PUBLISHER] == 1
        assert sum(blamed.values()) < 9
        assert not late.blamed(hosts[1].peer_id)
        assert late.has_exactly(hosts.source(1))

    play(scene, tmp_path)


Answering = Callable[[list[bytes]], bytes]
FAULTS: dict[str, Answering] = {
    "cut in the middle": lambda chunks: join(chunks)[:-1],
    "garbage": lambda chunks: join([bytes(len(each)) for each in chunks]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_relay_that_is_good_at_first_is_found_out_and_blamed_alone(
    tmp_path: Path, fault: Answering
) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        liar = await lying_relay(hosts, 2, fault)
        late = await hosts.start(3, connect=False)
        await late.transport.connect(liar.addresses()[0])  # knows nobody else at first
        await hosts.until(lambda: bool(late.blamed(liar.peer_id)))
        assert late.chunks()  # what it sent before it lied
        await comes_to_the_end(hosts, late, liar.peer_id)

    play(scene, tmp_path)


async def lying_relay(hosts: Hosts, number: int, fault: Answering) -> MemoryTransport:
    """A host that tells of version 1 and gives a good chunk to who asks for one; its answers with
    two have a fault."""
    relay, source = hosts.world.join(number), hosts[PUBLISHER]
    body, record = source.service.versions.manifest_body(1), source.service.heads.record(POLICY, 1)
    assert record is not None
    refs = decode_manifest(body).artifacts[0].chunks
    chunks = [source.store.get(ref.sha256) or b"" for ref in refs]
    given = 0

    async def manifest(peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return body

    async def heads(peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return codec.encode(HeadsReply(type="heads", records=(record,)))

    async def chunk(peer: PeerId, payload: bytes) -> bytes:
        nonlocal given
        await trio.lowlevel.checkpoint()
        request = codec.decode(payload, ChunkRequest, CHUNK_REQUEST_BYTES_MAX)
        if request.kind != "relayed":
            return b""
        given += 1
        return join(chunks[given : given + 1]) if request.most == 1 else fault(chunks[-2:])

    limits = ServeLimits(WANT_MANIFEST_BYTES_MAX, MANIFEST_BYTES_MAX)
    relay.serve(MANIFEST_PROTOCOL, manifest, limits)
    relay.serve(HEADS_PROTOCOL, heads, ServeLimits(WANT_HEADS_BYTES_MAX, HEADS_REPLY_BYTES_MAX))
    relay.serve(CHUNKS_PROTOCOL, chunk, CHUNK_LIMITS)
    return relay


def test_a_publisher_that_restarts_in_a_broadcast_goes_on_with_it(tmp_path: Path) -> None:
    peers = range(1, 4)

    async def scene(hosts: Hosts) -> None:
        await hosts.start(PUBLISHER)
        for number in peers:
            await hosts.start(number)
        await hosts.publish(1)
        every = hosts[PUBLISHER].chunks()
        assert await hosts.until(lambda: all(hosts[number].chunks() for number in peers))
        assert set().union(*(hosts[number].chunks() for number in peers)) < every
        await hosts.kill(PUBLISHER)
        await hosts.start(PUBLISHER)
        await hosts.until_all_have(1, peers)
        for number in peers:
            assert told(hosts[number]) == "version 1 from nothing"
            assert hosts[number].has_exactly(hosts.source(1))
            assert not hosts[number].blamed(hosts[PUBLISHER].peer_id)

    play(scene, tmp_path, link=LINK)


def is_on_its_way(host: SimulatedHost, version: int) -> bool:
    progress = host.service.progress()
    return progress is not None and progress.version == version and progress.total_bytes > 0


def test_two_versions_published_while_one_is_in_flight_overtake_it(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        receiver = hosts[1]
        hosts.world.links.change(hosts[PUBLISHER].peer_id, SLOW)
        await hosts.publish(2)
        # before the first chunk leaves: nothing overtakes it on the publisher's uplink
        assert await hosts.until(lambda: is_on_its_way(receiver, 2), FAST.latency_s / 4)
        await hosts.publish(3)
        await hosts.publish(4)
        assert receiver.serving == 1
        await hosts.until_all_have(4, range(1, 2))
        assert told(receiver) == "version 4 from 1,3"
        assert len(receiver.outcomes) == 2
        assert receiver.has_exactly(hosts.source(4))

    play(scene, tmp_path, hosts=2, link=LINK)


def test_a_clock_that_is_slow_is_told_of_until_it_is_set(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        receiver = hosts[1]
        receiver.clock_s = -3_600.0
        await hosts.publish(2)
        await trio.sleep(SETTLED_S)
        assert (receiver.service.refused or "").startswith("created 3")
        assert receiver.service.ahead is not None
        assert receiver.serving == 1
        receiver.clock_s = 0.0
        await hosts.until_all_have(2, range(1, 2))
        assert receiver.service.ahead is None
        assert not receiver.service.gater.is_banned(hosts[PUBLISHER].peer_id)
        assert receiver.has_exactly(hosts.source(2))

    play(scene, tmp_path, hosts=2, link=LINK)


def test_the_head_of_an_older_version_changes_nothing_and_is_no_offence(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        old = hosts[PUBLISHER].service.heads.record(POLICY, 1)
        assert old is not None
        await hosts.publish(2)
        await hosts.until_all_have(2, range(1, 2))
        receiver = hosts[1]
        outcomes = len(receiver.outcomes)
        replayer = hosts.world.join(2)
        await replayer.connect(receiver.transport.addresses()[0])
        await replayer.subscribe(weights_topic(RUN_ID), lambda peer, payload: True)
        await trio.sleep(5.0)
        await replayer.publish(weights_topic(RUN_ID), old)
        await trio.sleep(SETTLED_S)
        assert len(receiver.outcomes) == outcomes
        assert receiver.serving == 2
        assert not receiver.blamed(replayer.peer_id)
        assert receiver.has_exactly(hosts.source(2))

    play(scene, tmp_path, hosts=3, link=LINK)


def test_one_bit_would_be_noticed(tmp_path: Path) -> None:
    """What `has_exactly` compares differs from version to version and by a single bit."""
    one, two = (write_version(tmp_path / str(version), version) for version in (1, 2))
    assert files_of(one) != files_of(two)
    again = write_version(tmp_path / "again", 1)
    assert files_of(one) == files_of(again)
    flip_last_bit(again / "model.safetensors")
    assert files_of(one) != files_of(again)
