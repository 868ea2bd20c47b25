"""Faults of libp2p 0.8.1 that our transport does not have."""

import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.utils import encode_varint_prefixed

from swarm.errors import ConfigError, RequestRefused, SwarmError
from swarm.identity import Identity, PeerId
from swarm.transport.base import GOSSIP_BYTES_MAX, ServeLimits
from swarm.transport.libp2p import gossipsub
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p, require_version
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
PROTOCOL = "/test/echo/1.0.0"
TOPIC = "/test/topic/1.0.0"
MIB = 1_048_576


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    """Two connected hosts, the first of which dialled."""
    async with (
        open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
        open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
    ):
        await a.connect(b.addresses()[0])
        await until(lambda: a.peer_id in b.peers())
        yield a, b


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110  transports announce no changes
            await trio.sleep(0.01)


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


async def survives_cancelled_writes() -> bool:
    async with two() as (a, b):
        b.serve(PROTOCOL, echo, ServeLimits(8 * MIB, 8 * MIB, concurrent_per_peer_max=64))
        try:
            for step in range(12):
                # An answer too: those that were given up just now may still hold their bytes there.
                with trio.move_on_after(0.004 * step), suppress(RequestRefused):
                    await a.request(
                        b.peer_id,
                        PROTOCOL,
                        bytes(4 * MIB),
                        timeout_s=5.0,
                        response_bytes_max=8 * MIB,
                    )
            for _ in range(3):
                await a.request(
                    b.peer_id, PROTOCOL, bytes(1000), timeout_s=3.0, response_bytes_max=1000
                )
        except SwarmError:
            return False
        return a.peers() == (b.peer_id,)


def test_cancelled_write_leaves_the_connection_whole() -> None:
    assert run(survives_cancelled_writes)


async def survives_a_pause(pause_s: float) -> bool:
    """Send more than any window to a reader that starts to read after `pause_s`."""
    size = 20 * MIB
    got = 0
    finished = trio.Event()

    async def read_late(stream: Any) -> None:
        nonlocal got
        await trio.sleep(pause_s)
        try:
            while got < size:
                got += len(await stream.read(65_536))
        finally:
            finished.set()

    async with two() as (a, b):
        b._host.set_stream_handler(TProtocol("/test/late"), read_late)
        stream = await a._host.new_stream(b._id, [TProtocol("/test/late")])
        try:
            await stream.write(bytes(size))
        except Exception:  # noqa: BLE001  whatever upstream raises: it gave the stream up
            return False
        await finished.wait()
    return got == size


def test_reader_may_pause_longer_than_upstream_waits() -> None:
    assert run(survives_a_pause, 6.0)


def task_count() -> int:
    """All trio tasks, system tasks included."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    open_tasks = [root]
    count = 0
    while open_tasks:
        task = open_tasks.pop()
        count += 1
        for nursery in task.child_nurseries:
            open_tasks.extend(nursery.child_tasks)
    return count


async def tasks_left_per_cycle(cycles: int) -> float:
    async with two() as (a, b):
        await a.disconnect(b.peer_id)
        await until(lambda: not b.peers())
        await trio.sleep(0.3)
        before = task_count()
        for _ in range(cycles):
            await a.connect(b.addresses()[0])
            await until(lambda: a.peer_id in b.peers())
            await a.disconnect(b.peer_id)
            await until(lambda: not b.peers())
        await trio.sleep(0.3)
        return (task_count() - before) / cycles


def test_connections_leave_no_tasks_behind() -> None:
    assert run(tasks_left_per_cycle, 10) == 0.0


async def delivered_of_a_burst(count: int, wait_s: float, size: int = 4096) -> int:
    async with two() as (a, b):
        await a.subscribe(TOPIC, lambda peer, payload: True)
        channel = await b.subscribe(TOPIC, lambda peer, payload: True)
        mesh = a._router.mesh
        await until(lambda: b._id in mesh[TOPIC])
        for i in range(count):
            await a.publish(TOPIC, i.to_bytes(2, "big") + bytes(size - 2))
        with trio.move_on_after(wait_s):
            await until(lambda: channel.statistics().current_buffer_used == count, wait_s + 1)
        return channel.statistics().current_buffer_used


@pytest.mark.parametrize(("count", "size"), [(40, 4_096), (500, 4_096), (20, GOSSIP_BYTES_MAX)])
def test_burst_of_gossip_arrives_whole(count: int, size: int) -> None:
    assert run(delivered_of_a_burst, count, 20.0, size) == count


def test_a_burst_crosses_a_mesh_whole_and_is_encoded_once_for_each_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Upstream encodes a message for each neighbour, and lists the host's addresses each time."""
    count, encoded, listed = 40, 0, 0

    def encode(data: bytes) -> bytes:
        nonlocal encoded
        encoded += len(data) > 4_000
        return encode_varint_prefixed(data)

    async def main() -> None:
        nonlocal listed
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(open_libp2p(Identity(bytes([i]) * 32), LOOPBACK))
                for i in range(6)
            ]
            channels = [await node.subscribe(TOPIC, lambda *_: True) for node in nodes]
            for i, node in enumerate(nodes):
                for other in nodes[:i]:
                    await node.connect(other.addresses()[0])
            await until(lambda: all(len(node._router.mesh[TOPIC]) >= 4 for node in nodes))
            await until(lambda: all(len(node._gossip.peer_topics[TOPIC]) == 5 for node in nodes))
            monkeypatch.setattr(gossipsub, "encode_varint_prefixed", encode)
            for node in nodes:
                inner = node._host.get_addrs

                def get_addrs(inner: Any = inner) -> Any:
                    nonlocal listed
                    listed += 1
                    return inner()

                monkeypatch.setattr(node._host, "get_addrs", get_addrs)
            for i in range(count):
                await nodes[0].publish(TOPIC, i.to_bytes(2, "big") + bytes(4_094))
            await until(
                lambda: all(c.statistics().current_buffer_used == count for c in channels[1:])
            )

    run(main)
    assert encoded == count * 6
    assert listed == 0


async def carry_64_megabytes() -> int:
    """Over one stream of two real hosts; the most memory that Python held meanwhile."""
    piece = random.Random(0).randbytes(MIB)
    done = trio.Event()
    right = True

    async def check(stream: Any) -> None:
        nonlocal right
        got = 0
        while got < 64 * MIB:
            data = await stream.read(300_000)
            right &= data == (piece + piece)[got % MIB :][: len(data)]
            got += len(data)
        done.set()

    async with two() as (a, b):
        b._host.set_stream_handler(TProtocol("/test/large"), check)
        stream = await a._host.new_stream(b._id, [TProtocol("/test/large")])
        tracemalloc.start()
        try:
            for _ in range(64):
                await stream.write(piece)
            await done.wait()
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert right
        return peak_bytes


def test_64_megabytes_arrive_whole_in_bounded_memory() -> None:
    assert run(carry_64_megabytes) < 32 * MIB


def test_another_libp2p_is_refused_by_name() -> None:
    require_version("0.8.1")
    with pytest.raises(ConfigError, match=r"needs libp2p 0\.8\.1, found 0\.9\.0"):
        require_version("0.9.0")
