"""Versions of a run's policy on their way through the network, from a learner to its workers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import trio

from node.config import NodeConfig
from node.hosting.outlet import Outlet
from node.hosting.policy_host import HostsPolicy
from node.hosting.policy_weights import policy_weights, published_versions, version_directory
from node.roles.peer import Network, Peer
from node.roles.world import Publishing, Watchers
from swarm.weights.publisher import Publisher
from swarm.weights.service import Outcome, Stage, WeightsService

EXPORTS: Final = "exports"


@asynccontextmanager
async def publishing(
    world: Network, config: NodeConfig, peer: Peer, watchers: Watchers
) -> AsyncIterator[Publishing]:
    """Versions that the learner makes are broadcast until the block ends."""
    with policy_weights(config, peer.transport, peer.gater, world, publishes=True) as service:
        publisher = Publisher(service, peer.identity, watchers.spread)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            nursery.start_soon(publisher.run)
            outlet = Outlet(
                service,
                publisher,
                config.data_dir / EXPORTS,
                nursery,
                watchers.failed,
                world.run_sync,
                watchers.published,
            )
            yield Publishing(
                outlet,
                partial(published_versions, service),
                partial(version_directory, service),
                service,
                lambda: outlet.making,
            )
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def following(
    world: Network,
    config: NodeConfig,
    peer: Peer,
    host: HostsPolicy,
    tell: Callable[[Outcome], None],
    watch: Callable[[Stage], None],
) -> AsyncIterator[WeightsService]:
    """The host serves what is here, and each newer version until the block ends."""
    with policy_weights(
        *(config, peer.transport, peer.gater, world),
        publishes=False,
        engine=host,
        tell=tell,
        watch=watch,
    ) as service:
        current = service.versions.current()
        if current is not None:
            await host.load(current.directory)
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            yield service
            nursery.cancel_scope.cancel()
