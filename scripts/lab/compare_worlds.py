"""The same scenario on real sockets and in the simulation, side by side.

    python compare_worlds.py [--profile cable] [--hosts 4] [--repeats 5] [--json]

The real world is one libp2p process for each host, in network namespaces on shaped links; it needs
Linux and root. The simulated one is `MemoryNetwork` under the virtual clock. One program runs in
both. Host 0 dials the others, asks them, fetches from them, gossips to them, and then hands out 16
groups of 16 KB to all of them at once. Seconds are medians; a ratio is real / simulated.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random

import trio
import trio.testing

from swarm.errors import ConfigError, PeerUnreachable, RequestTimeout
from swarm.identity import Identity, PeerId
from swarm.simulation.links import LinkProfile, SimulatedLinks
from swarm.simulation.profiles import PROFILES, links_of
from swarm.simulation.sockets.lab import open_lab
from swarm.transport.base import GossipMessage, ServeLimits, Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.transport.memory.network import MemoryNetwork

FETCH = "/lab/fetch/1.0.0"  # asks for so many bytes
TAKE = "/lab/take/1.0.0"  # asks a host to fetch groups from whoever asks
HEARD = "/lab/heard/1.0.0"  # asks how late each gossip message came
TOPIC = "/lab/gossip/1.0.0"
GROUP_BYTES = 16_384
GROUPS = 16
BULK_BYTES = 2**20
GOSSIP_BYTES = 4096
REPLY_BYTES_MAX = 2**21
PAUSE_S = 0.5  # between gossip messages, so that none waits for another
TRIES_MAX = 40  # to be heard at all, and for all to be heard
PORT = 4001
TIMEOUT_S = 300.0
LIMITS = ServeLimits(1024, REPLY_BYTES_MAX, timeout_s=TIMEOUT_S)

Seconds = dict[str, list[float]]
Now = Callable[[], float]


@dataclass(slots=True)
class Host:
    """What every host does: answer, and remember what it heard."""

    transport: Transport
    now: Now
    heard_s: list[float] = field(default_factory=list)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        self.transport.serve(FETCH, self._fetch, LIMITS)
        self.transport.serve(TAKE, self._take, LIMITS)
        self.transport.serve(HEARD, self._heard, LIMITS)
        messages = await self.transport.subscribe(TOPIC, lambda peer, payload: True)
        task_status.started()
        async for message in messages:
            self._hear(message)

    def _hear(self, message: GossipMessage) -> None:
        self.heard_s.append(self.now() - float(message.payload[:32]))

    async def _fetch(self, peer: PeerId, payload: bytes) -> bytes:
        return bytes(int(payload))

    async def _take(self, peer: PeerId, payload: bytes) -> bytes:
        for _ in range(int(payload)):
            await ask(self.transport, peer, FETCH, GROUP_BYTES)
        return b""

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
    for what, size in (("16 KB fetched", GROUP_BYTES), ("1 MB fetched", BULK_BYTES)):
        for _ in range(repeats):
            await timed(what, peers[0], FETCH, size)
    seconds["4 KB gossiped"] = await gossip(transport, peers, now, repeats)
    for _ in range(repeats):
        start_s = now()
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, transport, peer, TAKE, GROUPS)
        seconds.setdefault(f"{GROUPS} groups to each", []).append(now() - start_s)
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


def simulated(links: Sequence[LinkProfile], repeats: int, seed: int) -> Seconds:
    """Run the scenario on simulated links, in virtual seconds."""

    async def world() -> Seconds:
        ids = [identity(host).peer_id for host in range(len(links))]
        model = SimulatedLinks(links[0], dict(zip(ids, links, strict=True)))
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(Random(seed), model, nursery)
            transports = [network.join(peer_id) for peer_id in ids]
            for transport in transports:
                await nursery.start(Host(transport, trio.current_time).run)
            others = [transport.addresses()[0] for transport in transports[1:]]
            seconds = await measure(transports[0], others, trio.current_time, repeats)
            nursery.cancel_scope.cancel()
        return seconds

    return trio.run(world, clock=trio.testing.MockClock(autojump_threshold=0.0))


# --- the real one ----------------------------------------------------------------------------


def real(links: Sequence[LinkProfile], repeats: int, seed: int) -> Seconds:
    """Run the scenario with one process per host on shaped links."""
    with ExitStack() as stack:
        profiles = {str(host): link for host, link in enumerate(links)}
        lab = stack.enter_context(open_lab(profiles, seed=seed))
        addresses = [
            f"/ip4/{lab.address(name)}/tcp/{PORT}/p2p/{identity(int(name)).peer_id}"
            for name in profiles
        ]

        def start(host: int, *more: object) -> "subprocess.Popen[str]":
            words = [sys.executable, __file__, "--be-host", host, *more]
            process: subprocess.Popen[str] = lab.start(
                str(host), [str(word) for word in words], stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        for server in [start(host) for host in range(1, len(links))]:
            assert server.stdout is not None
            server.stdout.readline()
        said, _ = start(0, "--repeats", repeats, "--others", *addresses[1:]).communicate()
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


# --- what is told ----------------------------------------------------------------------------


def table(real_s: Mapping[str, list[float]], simulated_s: Mapping[str, list[float]]) -> str:
    """Both worlds in Markdown."""
    lines = ["| what | real s | simulated s | ratio |", "|---|---:|---:|---:|"]
    for what, values in real_s.items():
        ours, theirs = statistics.median(values), statistics.median(simulated_s[what])
        lines.append(f"| {what} | {ours:.3f} | {theirs:.3f} | {ours / theirs:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", default="cable", choices=sorted(PROFILES))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="all seconds instead of a table")
    parser.add_argument("--be-host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--others", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_host is not None:
        trio.run(be_host, arguments.be_host, arguments.others, arguments.repeats)
        return
    links = links_of(arguments.profile, arguments.hosts)
    try:
        worlds = {
            "simulated": simulated(links, arguments.repeats, arguments.seed),
            "real": real(links, arguments.repeats, arguments.seed),
        }
    except (ConfigError, PeerUnreachable, RequestTimeout) as error:
        sys.exit(f"compare_worlds: {error}")
    if arguments.json:
        print(json.dumps(worlds))
    else:
        print(f"{arguments.hosts} hosts, {arguments.profile}\n")
        print(table(worlds["real"], worlds["simulated"]))


if __name__ == "__main__":
    main()
