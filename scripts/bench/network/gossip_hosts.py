"""A number of loopback hosts that gossip, all in this process, for `bench_network.py`.

    python gossip_hosts.py STACK HOSTS SIZE RATE SECONDS        prints one JSON object

`ours` or `stock` (libp2p with its defaults, but a heartbeat of 1 s). Each host dials four others,
drawn at random. Up to eight of them publish messages of SIZE bytes RATE times a second each; then
one publishes 40 messages of 4 KB at once, and 20 of 64 KB. Real sockets, one process: all hosts
share one core, so a delivery's CPU time is the portable figure and latency includes the queue.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr
from stream_peers import LOOPBACK, stock_host

from swarm.identity import Identity
from swarm.transport.base import GOSSIP_BYTES_MAX
from swarm.transport.libp2p.host import open_libp2p

TOPIC = "/bench/gossip/1.0.0"
DIALS, PUBLISHERS_MAX = 4, 8
NUMBER_BYTES = 8
BURSTS = ((40, 4_096), (20, GOSSIP_BYTES_MAX))
MESH_TIMEOUT_S, SETTLE_S, DRAIN_S, POLL_S = 60.0, 3.0, 10.0, 0.02


@dataclass(frozen=True, slots=True)
class Host:
    """One host, subscribed to the topic."""

    address: str
    connect: Callable[[str], Awaitable[object]]
    publish: Callable[[bytes], Awaitable[object]]
    mesh: Callable[[], Collection[object]]  # those that it gossips with


@dataclass(slots=True)
class Tally:
    """Published messages, and those that arrived."""

    published_s: dict[int, float] = field(default_factory=dict)
    arrived: Counter[int] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    received: int = 0  # copies that came over the network, duplicates included

    def payload(self, size: int) -> bytes:
        number = len(self.published_s)
        self.published_s[number] = time.perf_counter()
        return number.to_bytes(NUMBER_BYTES, "big") + bytes(size - NUMBER_BYTES)

    def deliver(self, payload: bytes) -> None:
        number = int.from_bytes(payload[:NUMBER_BYTES], "big")
        self.arrived[number] += 1
        self.latencies_s.append(time.perf_counter() - self.published_s[number])


# --- ours ------------------------------------------------------------------------------------


@asynccontextmanager
async def open_ours(tally: Tally, nursery: trio.Nursery) -> AsyncIterator[Host]:
    async with open_libp2p(Identity.generate(), [LOOPBACK]) as transport:
        _count_copies(transport._gossip, tally, "_judge")
        channel = await transport.subscribe(TOPIC, lambda peer, payload: True)

        async def receive() -> None:
            async for message in channel:
                tally.deliver(message.payload)

        nursery.start_soon(receive)
        yield Host(
            transport.addresses()[0],
            transport.connect,
            partial(transport.publish, TOPIC),
            lambda: transport._router.mesh[TOPIC],
        )


# --- libp2p as it comes ----------------------------------------------------------------------


@asynccontextmanager
async def open_stock(tally: Tally, nursery: trio.Nursery) -> AsyncIterator[Host]:
    host = stock_host()
    router = GossipSub([TProtocol("/meshsub/1.1.0")], 6, 4, 12, heartbeat_interval=1)
    pubsub = Pubsub(host, router)
    async with (
        host.run([Multiaddr(LOOPBACK)]),
        background_trio_service(pubsub),
        background_trio_service(router),
    ):
        await pubsub.wait_until_ready()
        _count_copies(pubsub, tally, "push_msg")
        subscription = await pubsub.subscribe(TOPIC)

        async def receive() -> None:
            while True:
                message = await subscription.get()
                if message.from_id != host.get_id().to_bytes():
                    tally.deliver(message.data)

        nursery.start_soon(receive)
        yield Host(
            str(host.get_addrs()[0]),
            lambda address: host.connect(info_from_p2p_addr(Multiaddr(address))),
            partial(pubsub.publish, TOPIC),
            lambda: router.mesh.get(TOPIC, ()),
        )


def _count_copies(pubsub: Pubsub, tally: Tally, entrance: str) -> None:
    """`entrance`: the method through which each copy of a message passes."""
    inner = getattr(pubsub, entrance)

    async def counted(forwarder: Any, message: Any) -> Any:
        if forwarder != pubsub.my_id:
            tally.received += 1
        return await inner(forwarder, message)

    setattr(pubsub, entrance, counted)


STACKS: dict[str, Callable[..., Any]] = {"ours": open_ours, "stock": open_stock}


# --- measuring -------------------------------------------------------------------------------


async def _gossip(stack: str, hosts: int, size: int, rate: float, seconds: float) -> dict[str, Any]:
    tally = Tally()
    async with trio.open_nursery() as nursery, AsyncExitStack() as opened:
        swarm = [
            await opened.enter_async_context(STACKS[stack](tally, nursery)) for _ in range(hosts)
        ]
        await _join(swarm)
        steady = await _measured(tally, hosts, partial(_publish, swarm, tally, size, rate, seconds))
        bursts = [
            await _measured(tally, hosts, partial(_burst, swarm[0], tally, count, burst_size))
            for count, burst_size in BURSTS
        ]
        nursery.cancel_scope.cancel()
    return {"steady": steady, "bursts": bursts}


async def _join(swarm: list[Host]) -> None:
    """Connect every host to four others, and wait until each has peers to gossip with."""
    draw = Random(0)
    for i, host in enumerate(swarm[1:], start=1):
        for other in draw.sample(swarm[:i], min(i, DIALS)):
            await host.connect(other.address)
    with trio.fail_after(MESH_TIMEOUT_S):
        while not all(len(host.mesh()) >= min(len(swarm) - 1, 2) for host in swarm):  # noqa: ASYNC110  nobody announces it
            await trio.sleep(POLL_S)
    await trio.sleep(SETTLE_S)


async def _publish(swarm: list[Host], tally: Tally, size: int, rate: float, seconds: float) -> None:
    async def one(host: Host, offset_s: float) -> None:
        await trio.sleep(offset_s)
        for _ in range(max(1, round(rate * seconds))):
            await host.publish(tally.payload(size))
            await trio.sleep(1 / rate)

    publishers = swarm[:PUBLISHERS_MAX]
    async with trio.open_nursery() as nursery:
        for i, host in enumerate(publishers):
            nursery.start_soon(one, host, i / len(publishers) / rate)


async def _burst(host: Host, tally: Tally, count: int, size: int) -> None:
    for _ in range(count):
        await host.publish(tally.payload(size))


async def _measured(tally: Tally, hosts: int, publish: Callable[[], Any]) -> dict[str, Any]:
    """The fate of published messages."""
    first, tally.received = len(tally.published_s), 0
    tally.latencies_s.clear()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    await publish()
    wanted = range(first, len(tally.published_s))
    await _drained(tally, wanted, hosts - 1)
    cpu_s = time.process_time() - cpu_s
    times_ms = sorted(1e3 * latency_s for latency_s in tally.latencies_s) or [0.0]
    delivered = sum(tally.arrived[number] for number in wanted)
    return {
        "messages": len(wanted),
        "delivery": delivered / (len(wanted) * (hosts - 1)),
        "p50_ms": times_ms[len(times_ms) // 2],
        "p99_ms": times_ms[int(len(times_ms) * 0.99)],
        "duplicates": (tally.received - delivered) / max(delivered, 1),
        "cpu_ms": 1e3 * cpu_s / max(delivered, 1),
        "seconds": time.perf_counter() - started_s,
    }


async def _drained(tally: Tally, wanted: range, each: int) -> None:
    """Wait until all have all, or nothing has arrived for a while."""
    before, last_s = -1, trio.current_time()
    while any(tally.arrived[number] < each for number in wanted):
        if len(tally.latencies_s) > before:
            before, last_s = len(tally.latencies_s), trio.current_time()
        if trio.current_time() - last_s > DRAIN_S:
            return
        await trio.sleep(POLL_S)


def main(stack: str, hosts: str, size: str, rate: str, seconds: str) -> None:
    result = trio.run(_gossip, stack, int(hosts), int(size), float(rate), float(seconds))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
