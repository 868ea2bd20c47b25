"""A small target for the siege, with a fault that is planted, or without one.

    python tests/integration/siege_child.py sound|leaky|hoarding

`sound` is the project's own transport. `leaky` has the same, and a place less for each connection
that ever came from the attackers' addresses. `hoarding` keeps whatever is sent to it. It prints
where it listens, and ends with its input.
"""

import sys

import trio

from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p.host import open_libp2p
from swarm.wire.messages import HELLO_BYTES_MAX, HELLO_PROTOCOL, HELLO_REPLY_BYTES_MAX

PLACES = 48
ATTACKERS = "127.9."


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def answer(peer: PeerId, payload: bytes) -> bytes:
    """A hello with nothing in it: what a newcomer waits for."""
    await trio.lowlevel.checkpoint()
    return b"hello"


async def serve_peers(leaks: bool) -> None:
    """A transport that takes few connections, by a gate of its own."""
    taken = 0
    async with open_libp2p(Identity(b"t" * 32), ["/ip4/127.0.0.1/tcp/0"]) as transport:

        def admits(peer: PeerId, ip: str | None) -> bool:
            nonlocal taken
            if len(transport.peers()) + taken >= PLACES:
                return False
            taken += leaks and (ip or "").startswith(ATTACKERS)
            return True

        transport.set_gate(admits)
        limits = ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX)
        transport.serve(HELLO_PROTOCOL, answer, limits)
        say(transport.addresses()[0])
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


async def hoard() -> None:
    """Take all that comes, and keep it."""
    kept: list[bytes | bytearray] = []

    async def take(stream: trio.SocketStream) -> None:
        async for part in stream:
            kept.append(part)

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    say(f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity(b't' * 32).peer_id}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, take, listeners)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "hoarding":
        trio.run(hoard)
    else:
        trio.run(serve_peers, kind == "leaky")
