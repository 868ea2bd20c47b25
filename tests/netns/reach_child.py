"""A host for labs: prints what it knows as JSON lines whenever that changes; dials what it is told.

A line on its standard input is an address to dial. All times that others wait for are short.
"""

import json
import sys

import trio

from swarm.errors import SwarmError
from swarm.identity import Identity, PeerId
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p import reachability
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.reachability import ReachRules

LISTEN = ["/ip4/0.0.0.0/tcp/4001"]
PROTOCOL = "/test/echo/1.0.0"
MIB = 1_048_576
LIFE_S = 150.0  # a test that still waits for something then sees that its host has ended


async def echo(peer: PeerId, payload: bytes) -> bytes:
    return payload


async def dial(node: Libp2pTransport) -> None:
    async for line in trio.lowlevel.FdStream(sys.stdin.fileno()):
        for address in line.decode().split():
            try:
                peer = await node.connect(address)
                answer = await node.request(
                    peer, PROTOCOL, bytes(MIB), timeout_s=30, response_bytes_max=MIB
                )
                say({"answered": len(answer)})
            except SwarmError as error:
                say({"failed": str(error)})


def say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(seed: str) -> None:
    reachability.TICK_S = 0.1
    reachability.REFUSED_AGAIN_S = 0.5
    reachability.DIRECT_FIRST_S = 1.0
    reachability.PUNCH_ROUNDS = 2
    reachability.PUNCH_ROUND_S = 4.0
    reachability.PUNCH_AGAIN_S = 5.0
    reachability.ANSWER_AGAIN_S = 4.5
    with trio.move_on_after(LIFE_S):
        await live(seed)


async def live(seed: str) -> None:
    async with (
        open_libp2p(Identity(seed.encode() * 32), LISTEN, reach=ReachRules()) as node,
        trio.open_nursery() as nursery,
    ):
        node.serve(PROTOCOL, echo, ServeLimits(MIB, MIB))
        nursery.start_soon(dial, node)
        said: dict[str, object] = {}
        while True:
            assert node.reach is not None
            now = {
                "addresses": [a for a in node.addresses() if "/127." not in a],
                "reachable": node.reach.reachable,
                "peers": {peer: node.ip_of(peer) for peer in node.peers()},
                "punched": node.reach.punched,
                "punch_failures": node.reach.punch_failures,
            }
            if now != said:
                said = dict(now)
                say(said)
            await trio.sleep(0.05)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
