"""TCP connections that never say a word: they keep nobody out."""

import pytest
import trio

from swarm.errors import PeerUnreachable
from swarm.identity import Identity
from swarm.transport import connection_slots
from swarm.transport.connection_slots import (
    CONNECTIONS_MAX,
    HANDSHAKE_PATIENCE_S,
    HANDSHAKES_MAX,
    HANDSHAKES_PER_BLOCK_MAX,
    HANDSHAKES_PER_PRIVATE_IP_MAX,
    ConnectionSlots,
)
from swarm.transport.libp2p import admission
from swarm.transport.libp2p.host import open_libp2p
from tests.support import run

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.integration
def test_silent_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_slots, "HANDSHAKE_PATIENCE_S", 0.1)
    monkeypatch.setattr(admission, "ADMISSION_TIMEOUT_S", 3_600.0)

    async def main() -> None:
        async with (
            open_libp2p(Identity(b"a" * 32), LOOPBACK) as a,
            open_libp2p(Identity(b"b" * 32), LOOPBACK) as b,
            trio.open_nursery() as nursery,
        ):
            port = int(a.own_addresses()[0].rpartition("/")[2])
            gone = 0

            async def hold() -> None:
                nonlocal gone
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                async with stream:
                    try:
                        while await stream.receive_some():
                            pass  # the offer of a protocol
                    except trio.BrokenResourceError:
                        pass
                gone += 1

            for number in range(CONNECTIONS_MAX + 20):
                nursery.start_soon(hold)
                if number % 40 == 0:  # over 128 at once the kernel forgets some, and tells nobody
                    await trio.sleep(0.1)
            while gone < CONNECTIONS_MAX + 20 - HANDSHAKES_PER_PRIVATE_IP_MAX:  # noqa: ASYNC110  no event for it
                await trio.sleep(0.01)
            while not b.peers():
                try:
                    await b.connect(a.addresses()[0], timeout_s=3.0)
                except PeerUnreachable:  # all who wait are within their patience yet
                    await trio.sleep(0.1)
            assert a._network.slots.handshakes <= HANDSHAKES_PER_PRIVATE_IP_MAX
            nursery.cancel_scope.cancel()

    run(main)


def test_a_block_ends_its_own_handshakes_and_not_those_of_others() -> None:
    async def main() -> None:
        slots = ConnectionSlots()
        other = slots.begin_handshake("198.51.100.1")
        assert other is not None
        mine = [slots.begin_handshake(f"203.0.113.{i}") for i in range(HANDSHAKES_PER_BLOCK_MAX)]
        assert None not in mine
        assert slots.begin_handshake("203.0.113.99") is None
        await trio.sleep(HANDSHAKE_PATIENCE_S)
        assert slots.begin_handshake("203.0.113.99") is not None
        cancelled = [each for each in (other, *mine) if each and each.scope.cancel_called]
        assert cancelled == mine[:1]
        assert slots.handshakes == 1 + HANDSHAKES_PER_BLOCK_MAX

    run(main, virtual=True)


def test_where_all_places_are_taken_the_largest_block_gives_way() -> None:
    async def main() -> None:
        slots = ConnectionSlots()
        many = [slots.begin_handshake("203.0.113.1") for _ in range(HANDSHAKES_PER_BLOCK_MAX)]
        for i in range(HANDSHAKES_MAX - HANDSHAKES_PER_BLOCK_MAX):
            assert slots.begin_handshake(f"{i + 11}.0.0.1") is not None
        await trio.sleep(HANDSHAKE_PATIENCE_S)
        newcomer = slots.begin_handshake("198.51.100.1")
        assert newcomer is not None
        assert [each.scope.cancel_called for each in many if each] == [True] + [False] * (
            HANDSHAKES_PER_BLOCK_MAX - 1
        )
        assert slots.handshakes == HANDSHAKES_MAX
        slots.release(newcomer)
        assert slots.handshakes == HANDSHAKES_MAX - 1

    run(main, virtual=True)
