"""One scenario in two worlds: hosts with libp2p, each a process in a network namespace on shaped
links, and hosts on a `MemoryNetwork` under the virtual clock. Host 0 dials the others, asks them,
fetches from them and gossips to them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random

import trio
import trio.testing

from swarm.identity import Identity, PeerId
from swarm.simulation.links import LinkProfile, SimulatedLinks
from swarm.simulation.socket_lab import Lab
from swarm.transport.base import GossipMessage, ServeLimits, Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.transport.memory.network import MemoryNetwork

FETCH = "/lab/fetch/1.0.0"  # asks for so many bytes
HEARD = "/lab/heard/1.0.0"  # asks how late each gossip message came
TOPIC = "/lab/gossip/1.0.0"
BULK_BYTES = 2**20
GOSSIP_BYTES = 4096
REPLY_BYTES_MAX = 2**21
PAUSE_S = 0.5  # between gossip messages, so that none waits for another
TRIES_MAX = 40  # to be heard at all, and for all to be heard
PORT = 4001
TIMEOUT_S = 120.0
LIMITS = ServeLimits(1024, REPLY_BYTES_MAX, timeout_s=TIMEOUT_S)

Seconds = dict[str, list[float]]
Now = Callable[[], float]
OpenLab = Callable[..., Lab]  # that of the fixture `wan_sockets`


@dataclass(slots=True)
class Host:
    """What every host does: answer, and remember what it heard."""

    transport: Transport
    now: Now
    heard_s: list[float] = field(default_factory=list)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        self.transport.serve(FETCH, self._fetch, LIMITS)
        self.transport.serve(HEARD, self._heard, LIMITS)
        messages = await self.transport.subscribe(TOPIC, lambda peer, payload: True)
        task_status.started()
        async for message in messages:
            self._hear(message)

    def _hear(self, message: GossipMessage) -> None:
        self.heard_s.append(self.now() - float(message.payload[:32]))

    async def _fetch(self, peer: PeerId, payload: bytes) -> bytes:
        return bytes(int(payload))

    async def _heard(self, peer: PeerId, payload: bytes) -> bytes:
        heard_s, self.heard_s = self.heard_s, []
        return json.dumps(heard_s).encode()


async def ask(transport: Transport, peer: PeerId, protocol: str, number: int) -> bytes:
    """One request."""
    return await transport.request(
        peer,
        protocol,
        str(number).encode(),
        timeout_s=TIMEOUT_S,
        response_bytes_max=REPLY_BYTES_MAX,
    )


async def measure(transport: Transport, others: Sequence[str], now: Now, repeats: int) -> Seconds:
    """What host 0 does. It leaves the others running."""
    seconds: Seconds = {}

    async def timed(what: str, peer: PeerId, protocol: str, number: int) -> None:
        start_s = now()
        await ask(transport, peer, protocol, number)
        seconds.setdefault(what, []).append(now() - start_s)

    peers = []
    for address in others:
        start_s = now()
        peers.append(await transport.connect(address, timeout_s=TIMEOUT_S))
        seconds.setdefault("connect", []).append(now() - start_s)
    for peer in peers:
        await ask(transport, peer, FETCH, 1)
    for _ in range(repeats):
        for peer in peers:
            await timed("round trip", peer, FETCH, 1)
    for _ in range(repeats):
        await timed("1 MB fetched", peers[0], FETCH, BULK_BYTES)
    seconds["4 KB gossiped"] = await gossip(transport, peers, now, repeats)
    return seconds


async def gossip(
    transport: Transport, peers: Sequence[PeerId], now: Now, repeats: int
) -> list[float]:
    """How late each message was at each peer; what is lost is not there."""

    async def heard_by(peer: PeerId, count: int) -> list[float]:
        found: list[float] = []
        for _ in range(TRIES_MAX):
            found += json.loads(await ask(transport, peer, HEARD, 0))
            if len(found) >= count:
                break
            await trio.sleep(PAUSE_S)
        return found

    async def publish() -> None:
        await transport.publish(TOPIC, f"{now():32.9f}".encode().ljust(GOSSIP_BYTES))
        await trio.sleep(PAUSE_S)

    for peer in peers:  # until the peer is in the mesh
        for _ in range(TRIES_MAX):
            await publish()
            if json.loads(await ask(transport, peer, HEARD, 0)):
                break
    for peer in peers:
        await ask(transport, peer, HEARD, 0)
    for _ in range(repeats):
        await publish()
    return [late_s for peer in peers for late_s in await heard_by(peer, repeats)]


def identity(host: int) -> Identity:
    """Each host's key is its number."""
    return Identity(bytes([host]) * 32)


# --- the simulated world ---------------------------------------------------------------------


def simulated(links: Sequence[LinkProfile], repeats: int) -> Seconds:
    """Run the scenario on simulated links, in virtual seconds."""

    async def world() -> Seconds:
        ids = [identity(host).peer_id for host in range(len(links))]
        model = SimulatedLinks(links[0], dict(zip(ids, links, strict=True)))
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(Random(0), model, nursery)
            transports = [network.join(peer_id) for peer_id in ids]
            for transport in transports:
                await nursery.start(Host(transport, trio.current_time).run)
            others = [transport.addresses()[0] for transport in transports[1:]]
            seconds = await measure(transports[0], others, trio.current_time, repeats)
            nursery.cancel_scope.cancel()
        return seconds

    return trio.run(world, clock=trio.testing.MockClock(autojump_threshold=0.0))


# --- the real one ----------------------------------------------------------------------------


def real(open_lab: OpenLab, links: Sequence[LinkProfile], repeats: int) -> Seconds:
    """Run the scenario with one process per host on shaped links."""
    lab = open_lab({str(host): link for host, link in enumerate(links)})
    addresses = [
        f"/ip4/{lab.address(str(host))}/tcp/{PORT}/p2p/{identity(host).peer_id}"
        for host in range(len(links))
    ]
    with ExitStack() as stack:

        def start(host: int, *others: str) -> "subprocess.Popen[str]":
            words = [sys.executable, __file__, str(host), str(repeats), *others]
            process: subprocess.Popen[str] = lab.start(
                str(host), words, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        for server in [start(host) for host in range(1, len(links))]:
            assert server.stdout is not None
            server.stdout.readline()
        said, _ = start(0, *addresses[1:]).communicate(timeout=TIMEOUT_S)
    found: Seconds = json.loads(said)
    return found


async def be_host(host: int, others: Sequence[str], repeats: int) -> None:
    """One process of the real world: measures if it is told of others, else serves."""
    listen = [f"/ip4/0.0.0.0/tcp/{PORT}"]
    async with (
        open_libp2p(identity(host), listen) as transport,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(Host(transport, time.monotonic).run)
        if not others:
            print("ready", flush=True)
            await trio.sleep_forever()
        print(json.dumps(await measure(transport, others, time.monotonic, repeats)), flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    own, count, *known = sys.argv[1:]
    trio.run(be_host, int(own), known, int(count))
