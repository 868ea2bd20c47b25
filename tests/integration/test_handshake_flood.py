"""TCP connections that never say a word: they keep nobody out."""

import pytest
import trio

from swarm.errors import PeerUnreachable
from swarm.identity import Identity
from swarm.transport import places
from swarm.transport.libp2p.admission import front_door
from swarm.transport.libp2p.host import open_libp2p
from swarm.transport.places import (
    CONNECTIONS_MAX,
    HANDSHAKES_MAX,
    OF_BLOCK_MAX,
    OF_PRIVATE_MAX,
    PATIENCE_S,
    Places,
)
from tests.support import run

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.integration
def test_silent_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PATIENCE_S", 0.1)
    monkeypatch.setattr(front_door, "ADMISSION_TIMEOUT_S", 3_600.0)

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
            while gone < CONNECTIONS_MAX + 20 - OF_PRIVATE_MAX:  # noqa: ASYNC110  no event for it
                await trio.sleep(0.01)
            while not b.peers():
                try:
                    await b.connect(a.addresses()[0], timeout_s=3.0)
                except PeerUnreachable:  # all who wait are within their patience yet
                    await trio.sleep(0.1)
            assert a._network.places.handshakes <= OF_PRIVATE_MAX
            nursery.cancel_scope.cancel()

    run(main)


def test_a_block_ends_its_own_handshakes_and_not_those_of_others() -> None:
    async def main() -> None:
        door = Places()
        other = door.enter("198.51.100.1")
        assert other is not None
        mine = [door.enter(f"203.0.113.{i}") for i in range(OF_BLOCK_MAX)]
        assert None not in mine
        assert door.enter("203.0.113.99") is None
        await trio.sleep(PATIENCE_S)
        assert door.enter("203.0.113.99") is not None
        cancelled = [each for each in (other, *mine) if each and each.scope.cancel_called]
        assert cancelled == mine[:1]
        assert door.handshakes == 1 + OF_BLOCK_MAX

    run(main, virtual=True)


def test_where_all_places_are_taken_the_largest_block_gives_way() -> None:
    async def main() -> None:
        door = Places()
        many = [door.enter("203.0.113.1") for _ in range(OF_BLOCK_MAX)]
        for i in range(HANDSHAKES_MAX - OF_BLOCK_MAX):
            assert door.enter(f"{i + 11}.0.0.1") is not None
        await trio.sleep(PATIENCE_S)
        newcomer = door.enter("198.51.100.1")
        assert newcomer is not None
        assert [each.scope.cancel_called for each in many if each] == [True] + [False] * (
            OF_BLOCK_MAX - 1
        )
        assert door.handshakes == HANDSHAKES_MAX
        door.leave(newcomer)
        assert door.handshakes == HANDSHAKES_MAX - 1

    run(main, virtual=True)
