"""DNS names of a node's own settings, and a resolver that hangs."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from multiaddr import Multiaddr

from swarm.transport.libp2p import addresses
from swarm.transport.libp2p.addresses import LOOK_UPS_MAX, dial_in_turn
from tests.support import run

NAME = Multiaddr("/dns4/node.example.org/tcp/4001")


class Resolver:
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.asked = self.waiting = 0

    def __call__(self, *args: Any) -> list[Any]:
        with self.lock:
            self.asked += 1
            self.waiting += 1
        self.go.wait()
        with self.lock:
            self.waiting -= 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("203.0.113.7", 4001))]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    hanging = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(addresses, "LOOK_UP_TIMEOUT_S", 0.2)
    yield hanging
    hanging.go.set()


async def give_up(failures: list[str]) -> None:
    async def dial(address: Multiaddr) -> None:
        raise AssertionError("it has no address")

    try:
        await dial_in_turn(NAME, dial)
    except OSError as error:
        failures.append(str(error))


async def places_taken(resolver: Resolver, look_ups: int) -> int:
    """How many places for other work in threads are taken while the resolver hangs."""
    taken = 0
    failures: list[str] = []
    async with trio.open_nursery() as nursery:
        for _ in range(look_ups):
            nursery.start_soon(give_up, failures)
        while len(failures) < look_ups:
            limiter = trio.to_thread.current_default_thread_limiter()
            taken = max(taken, int(limiter.borrowed_tokens))
            await trio.sleep(0.01)
    assert all("was not found within 0.2 s" in text for text in failures)
    return taken


def test_a_hanging_resolver_takes_few_threads_and_none_of_others(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        assert await places_taken(resolver, 3 * LOOK_UPS_MAX) == 0
        assert resolver.asked == resolver.waiting == LOOK_UPS_MAX
        monkeypatch.setattr(addresses, "LOOK_UP_TIMEOUT_S", 30.0)
        resolver.go.set()
        dialled: list[str] = []

        async def dial(address: Multiaddr) -> None:
            await trio.lowlevel.checkpoint()
            dialled.append(str(address))

        await dial_in_turn(NAME, dial)
        assert dialled == ["/ip4/203.0.113.7/tcp/4001"]

    run(main)


def test_with_everybody_elses_threads_it_would_show(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = trio.to_thread.current_default_thread_limiter
    monkeypatch.setattr(addresses, "_lookup_threads", default)

    async def main() -> None:
        assert await places_taken(resolver, 3 * LOOK_UPS_MAX) == 3 * LOOK_UPS_MAX

    run(main)
