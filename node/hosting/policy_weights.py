"""The weights of a run's policy in a node's data directory: what learner and workers share."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final, Protocol

from node.config import NodeConfig
from node.hosting.weights import POLICIES, STORE
from swarm.identity import PeerId
from swarm.peers.connection_gater import ConnectionGater
from swarm.storage.files import RunSync, Runtime
from swarm.transport.base import Transport
from swarm.weights.heads import HeadRules
from swarm.weights.publisher import VERSIONS_KEPT
from swarm.weights.service import (
    Follower,
    WeightsRules,
    WeightsService,
)
from swarm.weights.store.chunks import ChunkStore
from swarm.weights.store.versions import Versions

POLICY: Final = "policy"
STORE_BYTES_MAX: Final = 64 << 30
FETCHED_KEPT: Final = 2  # versions that stay on a worker's disk
PATCH_THREADS_MAX: Final = 4


class Clock(Protocol):
    """Time and chance of wherever this runs, and a place for what blocks."""

    @property
    def run_sync(self) -> RunSync:
        """The place for calls that block."""
        ...

    def now_s(self) -> float:
        """Unix time."""
        ...

    def rng(self, purpose: str) -> Random:
        """Chance for one purpose, other at each start."""
        ...


def weights_rules(
    run_id: str, publishers: Iterable[PeerId], clock_skew_s: float, policy: str, *, publishes: bool
) -> WeightsRules:
    """The rules of this machine for a policy, as its publisher or as a follower of versions."""
    return WeightsRules(
        heads=HeadRules(run_id, frozenset(publishers), clock_skew_s),
        policy=policy,
        follows=not publishes,
        shared_versions=VERSIONS_KEPT if publishes else FETCHED_KEPT,
        patch_threads=min(PATCH_THREADS_MAX, os.cpu_count() or 1),
    )


@contextmanager
def open_weights_service(
    data_dir: Path,
    rules: WeightsRules,
    transport: Transport,
    gater: ConnectionGater,
    clock: Clock,
    follower: Follower,
    store_bytes: int = STORE_BYTES_MAX,
) -> Iterator[WeightsService]:
    """The service of a policy in a data directory, not running yet; its store is open for the
    block.

    Raises:
        ConfigError: another process has the store.
    """
    directory = data_dir / POLICIES / rules.policy
    with ChunkStore(data_dir / STORE, store_bytes) as store:
        yield WeightsService(
            rules,
            transport,
            gater,
            Versions(directory, rules.shared_versions),
            store,
            Runtime(clock.now_s, clock.rng("weights"), clock.run_sync),
            follower,
        )


@contextmanager
def policy_weights(
    config: NodeConfig,
    transport: Transport,
    gater: ConnectionGater,
    clock: Clock,
    follower: Follower | None = None,
) -> Iterator[WeightsService]:
    """The service of a run's policy (see `open_weights_service`), for a follower of its versions;
    None: this node publishes them."""
    rules = weights_rules(
        config.run.run_id,
        map(PeerId, config.run.weights_publishers),
        float(config.run.limits.clock_skew_s),
        POLICY,
        publishes=follower is None,
    )
    with open_weights_service(
        config.data_dir, rules, transport, gater, clock, follower or Follower()
    ) as service:
        yield service


def version_directory(service: WeightsService, version: int) -> Path | None:
    """The directory of a version; None: it is not here."""
    local = service.versions.get(version)
    return None if local is None else local.directory


def published_versions(service: WeightsService) -> tuple[int, ...]:
    """The newest versions that were published, as far as they are kept here, ascending."""
    return tuple(local.version for local in service.versions.held())
