"""What few peers can do to the slots in which requests are answered, and to their connections."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.utils import encode_delim

from swarm.errors import RequestRefused
from swarm.identity import Identity, PeerId
from swarm.transport import request_slots
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from tests.support import run

pytestmark = pytest.mark.integration

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PROTOCOL = "/test/large/1.0.0"
ANSWER_BYTES = 2_000_000  # more than a stream's first window
LIMITS = ServeLimits(4_096, ANSWER_BYTES, concurrent_max=4, concurrent_per_peer_max=2)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  transports announce no changes
        await trio.sleep(0.01)


async def large(peer: PeerId, payload: bytes) -> bytes:
    return bytes(ANSWER_BYTES)


@asynccontextmanager
async def attacked(request: bytes) -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    """A server, two of whose peers said `request` on as many streams as it has slots and read
    nothing, and an honest peer of it."""
    async with AsyncExitStack() as stack:
        server, honest, *liars = [
            await stack.enter_async_context(open_libp2p(Identity(bytes([i]) * 32), LOOPBACK))
            for i in range(4)
        ]
        server.serve(PROTOCOL, large, LIMITS)
        for each in (honest, *liars):
            await each.connect(server.addresses()[0])
        head = encode_delim(b"/multistream/1.0.0") + encode_delim(PROTOCOL.encode())
        for liar in liars:
            connection: Any = liar._network.live(server._id)
            for _ in range(2):
                stream = await connection.muxed_conn.open_stream()
                await stream.write(head + request)
        await until(
            lambda: server._served[PROTOCOL].requests_by_peer.total() == LIMITS.concurrent_max
        )
        yield server, honest


async def ask(asker: Libp2pTransport, server: Libp2pTransport) -> bytes:
    return await asker.request(
        server.peer_id, PROTOCOL, b"x", timeout_s=30.0, response_bytes_max=ANSWER_BYTES
    )


def test_half_a_request_has_no_place() -> None:
    async def main() -> None:
        async with attacked((100).to_bytes(4, "big")) as (server, honest):
            assert len(await ask(honest, server)) == ANSWER_BYTES

    run(main)


def test_who_reads_no_answers_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_slots, "ANSWER_SLOW_S", 0.0)

    async def main() -> None:
        async with attacked(bytes([0, 0, 0, 1, 0])) as (server, honest):
            slots = server._served[PROTOCOL].slots
            await until(lambda: sum(p.answering_since_s is not None for p in slots) == 4)
            assert len(await ask(honest, server)) == ANSWER_BYTES
            assert server.counters.refused[PROTOCOL] == 1

    run(main)


def test_a_quick_answer_is_not_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_slots, "ANSWER_SLOW_S", 3_600.0)

    async def main() -> None:
        async with attacked(bytes([0, 0, 0, 1, 0])) as (server, honest):
            with pytest.raises(RequestRefused, match="busy"):
                await ask(honest, server)

    run(main)


def test_only_a_larger_share_gives_way() -> None:
    async def main() -> None:
        served = request_slots.Served(large, ServeLimits(1, 1, concurrent_max=3))
        slots = [await served.acquire(PeerId(name)) for name in ("two", "two", "one")]
        assert await served.acquire(PeerId("new")) is None  # their handlers are still at it
        for slot in slots:
            assert slot is not None
            slot.answering_since_s = trio.current_time()
        assert await served.acquire(PeerId("new")) is None  # and these are quick yet
        await trio.sleep(request_slots.ANSWER_SLOW_S)
        assert await served.acquire(PeerId("one")) is None  # has one, and would have two
        assert await served.acquire(PeerId("new")) is not None
        assert [slot.scope.cancel_called for slot in slots if slot] == [True, False, False]
        assert await served.acquire(PeerId("newer")) is None  # each has one now
        assert len(served.slots) == 3
        assert not served.waiting

    run(main, virtual=True)


def test_who_has_least_has_the_next_place() -> None:
    """Many keys that ask as often as each may keep nobody out who asks now and then."""

    async def main() -> None:
        served = request_slots.Served(large, ServeLimits(1, 1, concurrent_max=4))
        came: list[str] = []

        async def take(name: str) -> None:
            slot = await served.acquire(PeerId(name))
            came.append(f"{name}: {'in' if slot else 'busy'} at {trio.current_time():.1f}")

        many = [await served.acquire(PeerId("many")) for _ in range(3)]
        few = await served.acquire(PeerId("few"))
        async with trio.open_nursery() as nursery:
            for name in ("many", "few", "new"):
                nursery.start_soon(take, name)
                await trio.testing.wait_all_tasks_blocked()
            assert len(served.waiting) == 2
            assert few is not None
            served.release(few)
            served.release(few)  # it has it no longer
            await trio.testing.wait_all_tasks_blocked()
            assert len(served.slots) == 4
        assert many[0] is not None
        served.release(many[0])
        assert len(served.slots) == 3
        assert came == ["many: busy at 0.0", "few: in at 0.0", "new: busy at 2.0"]

    run(main, virtual=True)


def test_a_place_that_comes_as_its_request_is_given_up_is_free_again() -> None:
    async def main() -> None:
        served = request_slots.Served(large, ServeLimits(1, 1, concurrent_max=2))
        first = [await served.acquire(PeerId("two")) for _ in range(2)]
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.acquire, PeerId("new"))
                await trio.testing.wait_all_tasks_blocked()
                assert first[0] is not None
                scope.cancel()
                served.release(first[0])
        assert len(served.slots) == 1
        assert not served.waiting

    run(main, virtual=True)


def test_arriving_requests_of_many_keys_are_bounded_and_newcomers_come_in() -> None:
    megabyte = 1 << 20
    limits = ServeLimits(megabyte, 100, concurrent_max=64, concurrent_per_peer_max=16)

    async def short(peer: PeerId, payload: bytes) -> bytes:
        return len(payload).to_bytes(4, "big")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            server, honest, *liars = [
                await stack.enter_async_context(open_libp2p(Identity(bytes([i]) * 32), LOOPBACK))
                for i in range(5)
            ]
            server.serve(PROTOCOL, short, limits)
            for each in (honest, *liars):
                await each.connect(server.addresses()[0])
            head = encode_delim(b"/multistream/1.0.0") + encode_delim(PROTOCOL.encode())
            for liar in liars:
                connection: Any = liar._network.live(server._id)
                for _ in range(16):
                    stream = await connection.muxed_conn.open_stream()
                    await stream.write(head + megabyte.to_bytes(4, "big") + bytes(1_000))
            await until(lambda: server.counters.refused[PROTOCOL] >= 3 * 16 - 12)
            assert server._arrivals.held_bytes == request_slots.ARRIVING_BYTES_MAX
            answer = await honest.request(
                server.peer_id, PROTOCOL, bytes(megabyte), timeout_s=30.0, response_bytes_max=100
            )
            assert int.from_bytes(answer, "big") == megabyte
            left = request_slots.ARRIVING_BYTES_MAX - megabyte
            await until(lambda: server._arrivals.held_bytes == left)  # the answer was out before

    run(main)
