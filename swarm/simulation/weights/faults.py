"""What goes wrong on a version's way, one scenario each, and what comes of it.

Each ends with a row: what the user of the host concerned sees, and whether its weights are in the
end, bit for bit, those that were published.
"""

import resource
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from swarm.errors import Reject
from swarm.identity import PeerId
from swarm.simulation.determinism import deterministic_run
from swarm.simulation.links import LinkProfile
from swarm.simulation.weights.hosts import (
    LINK,
    POLICY,
    PUBLISHER,
    RUN_ID,
    Hosts,
    SimulatedHost,
    open_hosts,
)
from swarm.transport.base import ServeLimits
from swarm.wire import codec
from swarm.wire.messages import (
    HEADS_PROTOCOL,
    HEADS_REPLY_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    MANIFEST_PROTOCOL,
    WANT_HEADS_BYTES_MAX,
    WANT_MANIFEST_BYTES_MAX,
    HeadsReply,
    weights_topic,
)

SETTLED_S: Final = 30.0  # in which whatever should not happen would have happened
SLOW: Final = LinkProfile(latency_s=0.02, up_bytes_per_s=2e3, down_bytes_per_s=2e6)
FAST: Final = LinkProfile(latency_s=0.02, up_bytes_per_s=2e6, down_bytes_per_s=2e6)


@dataclass(frozen=True, slots=True)
class FaultRow:
    """What came of one fault. `seen`: the lines that a user sees, and figures that matter."""

    fault: str
    seen: str
    served_meanwhile: str  # on the host concerned
    is_identical: bool
    figures: dict[str, int]


Scenario = Callable[[Hosts], Awaitable[FaultRow]]


def run_fault(name: str, directory: Path, seed: int = 0) -> FaultRow:
    """Run one scenario of `FAULTS` in an empty directory."""
    scenario, hosts, link = FAULTS[name]

    async def main() -> FaultRow:
        async with open_hosts(seed, directory, hosts, link) as there:
            return await scenario(there)

    return deterministic_run(main, seed=seed)


def _line(host: SimulatedHost) -> str:
    """The last outcome, as it is told."""
    if not host.outcomes:
        return "nothing"
    applied = host.outcomes[-1].applied
    if applied.failure is not None:
        return f"version {applied.wanted} failed: {applied.failure}"
    bases = ",".join("nothing" if each is None else str(each) for each in host.outcomes[-1].bases)
    doubts = "".join(f"{doubt}; " for doubt in host.outcomes[-1].doubts)
    return f"{doubts}version {applied.wanted} from {bases}"


# --- faults ------------------------------------------------------------------------------------


async def publisher_killed(hosts: Hosts) -> FaultRow:
    """The publisher dies once its peers together hold every chunk, and no single one holds all."""
    peers = range(1, 5)
    await hosts.start(PUBLISHER)
    for number in peers:
        await hosts.start(number)
    await hosts.publish(1)
    every = hosts[PUBLISHER].chunks()
    assert await hosts.until(lambda: set().union(*(hosts[n].chunks() for n in peers)) >= every)
    unfinished = sum(hosts[number].chunks() != every for number in peers)
    await hosts.kill(PUBLISHER)
    await hosts.until_all_have(1, peers)
    return FaultRow(
        "publisher killed",
        _line(hosts[1]),
        "nothing, it was the first version",
        all(hosts[number].has_exactly(hosts.source(1)) for number in peers),
        {"unfinished when it died": unfinished},
    )


async def receiver_killed(hosts: Hosts) -> FaultRow:
    """It dies half-way and is started again on what it left."""
    await hosts.start(PUBLISHER)
    await hosts.publish(1)
    every = hosts[PUBLISHER].chunks()
    receiver = await hosts.start(1)
    assert await hosts.until(lambda: len(receiver.chunks()) >= len(every) // 2)
    await hosts.kill(1)
    before = receiver.chunks()
    receiver = await hosts.start(1)
    await hosts.until_all_have(1, range(1, 2))
    again = receiver.store.figures().stored - len(every - before)
    return FaultRow(
        "receiver killed and resumed",
        f"{_line(receiver)}, {len(before)} of {len(every)} chunks were here, {again} came again",
        "nothing, it was the first version",
        receiver.has_exactly(hosts.source(1)),
        {"here before": len(before), "fetched again": again},
    )


@contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """The disk takes no file larger than this: the kernel refuses, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def disk_full(hosts: Hosts) -> FaultRow:
    """There is no room for the next version; later there is."""
    await hosts.all_at(1, range(1, 2))
    receiver = hosts[1]
    await hosts.publish(2)
    with files_up_to(4_096):
        await hosts.until(lambda: bool(receiver.failures()))
        seen, meanwhile = _line(receiver), receiver.serving
        old_is_whole = receiver.has_exactly(hosts.source(1))
    await hosts.until_all_have(2, range(1, 2))
    return FaultRow(
        "disk full",
        seen,
        f"version {meanwhile}",
        old_is_whole and receiver.has_exactly(hosts.source(2)),
        {"failures": len(receiver.failures())},
    )


async def corrupt_chunk(hosts: Hosts) -> FaultRow:
    """One peer's disk turned over a bit of each chunk after it was verified: it serves garbage."""
    await hosts.all_at(1, range(1, 3))
    liar = hosts[2]
    for path in (liar.directory / "store").glob("chunks/*/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    late = await hosts.start(3, connect=False)
    await late.transport.connect(liar.transport.addresses()[0])  # knows nobody else at first
    await hosts.until(lambda: bool(late.blamed(liar.peer_id)))
    await late.transport.connect(hosts[1].transport.addresses()[0])
    await hosts.until_all_have(1, range(3, 4))
    blamed = late.blamed(liar.peer_id)
    return FaultRow(
        "corrupt chunk",
        f"{_line(late)}; held against the sender: {_told(blamed)}",
        "nothing, it was the first version",
        late.has_exactly(hosts.source(1)),
        {
            "offences of the sender": sum(blamed.values()),
            "offences of others": sum(late.blamed(hosts[1].peer_id).values()),
        },
    )


def _told(blamed: dict[Reject, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in blamed.items()) or "nothing"


async def wrong_base(hosts: Hosts) -> FaultRow:
    """Somebody wrote to the files of the version that the delta is based on."""
    await hosts.all_at(1, range(1, 2))
    receiver = hosts[1]
    current = receiver.service.versions.current()
    assert current is not None
    path = current.directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    await hosts.publish(2)
    await hosts.until_all_have(2, range(1, 2))
    return FaultRow(
        "wrong base",
        _line(receiver),
        "version 1",
        receiver.has_exactly(hosts.source(2)),
        {"from nothing": int(receiver.outcomes[-1].bases == (None,))},
    )


async def forged_manifest(hosts: Hosts) -> FaultRow:
    """A peer tells of a version under its own key, and answers for the manifest with another."""
    await hosts.all_at(1, range(1, 2))
    forger = hosts.world.join(2)
    body = hosts[PUBLISHER].service.versions.manifest_body(1)
    head = hosts[PUBLISHER].service.heads.newest(POLICY)
    assert head is not None
    other = bytearray(body)
    other[-1] ^= 1
    identity = hosts.world.identities[2]
    lie = codec.sign_head(
        head.model_copy(update={"publisher": identity.peer_id, "version": 7}), identity
    )

    async def manifest(peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(other)

    async def heads(peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        record = hosts[PUBLISHER].service.heads.record(POLICY, 1)
        assert record is not None
        return codec.encode(HeadsReply(type="heads", records=(record, lie)))

    forger.serve(
        MANIFEST_PROTOCOL, manifest, ServeLimits(WANT_MANIFEST_BYTES_MAX, MANIFEST_BYTES_MAX)
    )
    forger.serve(HEADS_PROTOCOL, heads, ServeLimits(WANT_HEADS_BYTES_MAX, HEADS_REPLY_BYTES_MAX))
    late = await hosts.start(3, connect=False)
    await late.transport.connect(forger.addresses()[0])  # knows nobody else at first
    await hosts.until(lambda: bool(late.blamed(forger.peer_id)))
    await late.transport.connect(hosts[1].transport.addresses()[0])
    await hosts.until_all_have(1, range(3, 4))
    return FaultRow(
        "forged manifest",
        f"{_line(late)}; held against the forger: {_told(late.blamed(forger.peer_id))}",
        "nothing, it was the first version",
        late.has_exactly(hosts.source(1)),
        {
            "offences of the forger": sum(late.blamed(forger.peer_id).values()),
            "offences of others": sum(late.blamed(hosts[1].peer_id).values()),
        },
    )


async def overtaken(hosts: Hosts) -> FaultRow:
    """Two more versions are published while one is on its way."""
    await hosts.all_at(1, range(1, 2))
    receiver = hosts[1]
    hosts.world.links.change(hosts[PUBLISHER].peer_id, SLOW)
    await hosts.publish(2)
    # before the first chunk leaves: nothing overtakes it on the publisher's uplink
    assert await hosts.until(lambda: _is_on_its_way(receiver, 2), FAST.latency_s / 4)
    await hosts.publish(3)
    await hosts.publish(4)
    meanwhile = receiver.serving
    await hosts.until_all_have(4, range(1, 2))
    return FaultRow(
        "two versions published while one is in flight",
        _line(receiver),
        f"version {meanwhile}",
        receiver.has_exactly(hosts.source(4)),
        {"outcomes": len(receiver.outcomes)},
    )


def _is_on_its_way(host: SimulatedHost, version: int) -> bool:
    progress = host.service.progress()
    return progress is not None and progress.version == version and progress.total_bytes > 0


async def clock_skew(hosts: Hosts) -> FaultRow:
    """The receiver's clock is an hour slow, until somebody sets it."""
    await hosts.all_at(1, range(1, 2))
    receiver = hosts[1]
    receiver.clock_s = -3_600.0
    await hosts.publish(2)
    await trio.sleep(SETTLED_S)
    seen, meanwhile = receiver.service.refused or "nothing", receiver.serving
    is_told = receiver.service.ahead is not None
    receiver.clock_s = 0.0
    await hosts.until_all_have(2, range(1, 2))
    is_told_still = receiver.service.ahead is not None
    return FaultRow(
        "clock skew",
        f"a version was announced and refused: {seen}",
        f"version {meanwhile}",
        receiver.has_exactly(hosts.source(2)),
        {
            "banned": int(receiver.service.gater.is_banned(hosts[PUBLISHER].peer_id)),
            "told of the clock": int(is_told),
            "told of it afterwards": int(is_told_still),
        },
    )


async def replayed(hosts: Hosts) -> FaultRow:
    """A peer gossips, and answers with, the head of an older version."""
    await hosts.all_at(1, range(1, 2))
    service = hosts[PUBLISHER].service
    old = service.heads.record(POLICY, 1)
    assert old is not None
    await hosts.publish(2)
    await hosts.until_all_have(2, range(1, 2))
    receiver = hosts[1]
    told = len(receiver.outcomes)
    replayer = hosts.world.join(2)
    await replayer.connect(receiver.transport.addresses()[0])
    await replayer.subscribe(weights_topic(RUN_ID), lambda peer, payload: True)
    await trio.sleep(5.0)
    await replayer.publish(weights_topic(RUN_ID), old)
    await trio.sleep(SETTLED_S)
    return FaultRow(
        "older head replayed",
        "nothing" if len(receiver.outcomes) == told else _line(receiver),
        f"version {receiver.serving}",
        receiver.has_exactly(hosts.source(2)),
        {"offences": sum(receiver.blamed(replayer.peer_id).values())},
    )


FAULTS: Final[dict[str, tuple[Scenario, int, LinkProfile]]] = {
    "publisher killed": (publisher_killed, 5, LINK),
    "receiver killed": (receiver_killed, 2, LINK),
    "disk full": (disk_full, 2, LINK),
    "corrupt chunk": (corrupt_chunk, 4, FAST),
    "wrong base": (wrong_base, 2, LINK),
    "forged manifest": (forged_manifest, 4, FAST),
    "overtaken": (overtaken, 2, LINK),
    "clock skew": (clock_skew, 2, LINK),
    "replayed head": (replayed, 3, LINK),
}
