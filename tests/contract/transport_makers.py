"""The ways to make transports that the contract suite runs over.

A maker is `open(identities)`: an async context manager that yields one transport for each
identity, in order, none of them connected yet.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from swarm.identity import Identity
from swarm.transport.base import Transport
from swarm.transport.libp2p_host import open_libp2p

Open = Callable[[Sequence[Identity]], AbstractAsyncContextManager[Sequence[Transport]]]


@dataclass(frozen=True, slots=True)
class TransportMaker:
    """`virtual` makers run under the virtual clock, the others in real time."""

    name: str
    open: Open
    virtual: bool


@asynccontextmanager
async def open_libp2p_hosts(identities: Sequence[Identity]) -> AsyncIterator[Sequence[Transport]]:
    """Real hosts in this process, on loopback."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(open_libp2p(identity, ["/ip4/127.0.0.1/tcp/0"]))
            for identity in identities
        ]


MAKERS = (TransportMaker("libp2p", open_libp2p_hosts, virtual=False),)
