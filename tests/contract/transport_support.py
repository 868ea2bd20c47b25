"""What the contract tests of transports share."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits, Transport
from tests.contract.transport_makers import TransportMaker
from tests.support import run

PROTOCOL = "/test/echo/1.0.0"
TOPIC = "/test/topic/1.0.0"
MIB = 1_048_576
LIMITS = ServeLimits(request_bytes_max=2 * MIB, response_bytes_max=2 * MIB)

Body = Callable[[Sequence[Transport]], Awaitable[None]]


def identities(count: int) -> list[Identity]:
    return [Identity(bytes([i + 1]) * 32) for i in range(count)]


def check(maker: TransportMaker, count: int, body: Body) -> None:
    """Run `body` over `count` transports that are not connected."""

    async def main() -> None:
        async with maker.open(identities(count)) as transports:
            await body(transports)

    run(main, virtual=maker.virtual)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110  transports announce no changes
            await trio.sleep(0.01)


async def link(a: Transport, b: Transport) -> None:
    """Connect `a` to `b` and wait until both know."""
    await a.connect(b.addresses()[0])
    await until(lambda: a.peer_id in b.peers() and b.peer_id in a.peers())


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


async def ask(
    a: Transport, b: Transport, payload: bytes = b"x", *, timeout_s: float = 10.0
) -> bytes:
    return await a.request(
        b.peer_id, PROTOCOL, payload, timeout_s=timeout_s, response_bytes_max=2 * MIB
    )


def accept(peer: PeerId, payload: bytes) -> bool:
    return True
