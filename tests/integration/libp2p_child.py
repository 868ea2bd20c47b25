"""A host in a process of its own: prints its address, then echoes until it is killed."""

import sys

import trio

from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p.host import open_libp2p


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


async def main() -> None:
    async with open_libp2p(Identity(b"c" * 32), ["/ip4/127.0.0.1/tcp/0"]) as node:
        node.serve("/test/echo/1.0.0", echo, ServeLimits(2**23, 2**23))
        sys.stdout.write(node.addresses()[0] + "\n")
        sys.stdout.flush()
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main)
