"""The ways to make transports that the contract suite runs over.

A maker is `open(identities, keys)`: an async context manager that yields one transport for each
identity, in order, none of them connected yet. `keys` are their network keys; none: open to all.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from random import Random
from typing import Protocol

import trio

from swarm.identity import Identity
from swarm.simulation.links import LinkProfile, SimulatedLinks
from swarm.transport.base import Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.transport.memory.network import MemoryNetwork

Keys = Sequence[bytes | None]


class Open(Protocol):
    def __call__(
        self, identities: Sequence[Identity], keys: Keys = ()
    ) -> AbstractAsyncContextManager[Sequence[Transport]]: ...


@dataclass(frozen=True, slots=True)
class TransportMaker:
    """`virtual` makers run under the virtual clock, the others in real time."""

    name: str
    open: Open
    virtual: bool


@asynccontextmanager
async def open_libp2p_hosts(
    identities: Sequence[Identity], keys: Keys = ()
) -> AsyncIterator[Sequence[Transport]]:
    """Real hosts in this process, on loopback."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                open_libp2p(identity, ["/ip4/127.0.0.1/tcp/0"], network_key=key)
            )
            for identity, key in zip_longest(identities, keys)
        ]


HOME = LinkProfile(latency_s=0.002, jitter_s=0.001, up_bytes_per_s=5e7, down_bytes_per_s=5e7)


@asynccontextmanager
async def open_memory_hosts(
    identities: Sequence[Identity], keys: Keys = ()
) -> AsyncIterator[Sequence[Transport]]:
    """Hosts of one simulated network, whose links are not the same in any two messages."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(Random(0), SimulatedLinks(HOME), nursery)
        yield [
            network.join(identity.peer_id, network_key=key)
            for identity, key in zip_longest(identities, keys)
        ]
        nursery.cancel_scope.cancel()


MAKERS = (
    TransportMaker("libp2p", open_libp2p_hosts, virtual=False),
    TransportMaker("memory", open_memory_hosts, virtual=True),
)
