"""A peer of a run: transport, gater, discovery and hash table, real or simulated."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import trio

from node.config import NodeConfig
from node.envs.registry import packages_of
from node.hosting.membership import Membership
from node.hosting.policy_weights import Clock
from swarm.identity import Identity
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.credit import Credit
from swarm.peers.dht import Dht, key_of
from swarm.peers.discovery import Discovery, NodeInfo
from swarm.peers.reputation import Ledger
from swarm.transport.base import Gate, Transport

ADDRESSES_FILE: Final = "addresses.json"
CREDIT_FILE: Final = "credit.json"
INSTANCE_BYTES: Final = 16
LONELY_PEERS: Final = 4  # of the run; with fewer, more are looked for everywhere


class Network(Clock, Protocol):
    """The part of a world that a peer uses."""

    @property
    def agent(self) -> str:
        """The program's name for other peers."""

    def secret(self, size_bytes: int) -> bytes:
        """New unpredictable bytes at each call."""

    def open_transport(
        self, identity: Identity, config: NodeConfig, membership: Membership
    ) -> AbstractAsyncContextManager[Transport]:
        """This machine's connection to the others, until the block ends."""

    def can_be_dialled(self, transport: Transport) -> bool:
        """True unless it is known that others cannot reach this machine."""


def _anybody(peer: str, ip: str | None) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The swarm that a peer joins, and how it finds and admits others."""

    run_id: str
    bootstrap: Sequence[str] = ()
    book: AddressBook = field(default_factory=AddressBook)
    credit: Credit = field(default_factory=Credit)
    admits: Gate = _anybody  # who may connect at all
    dht: bool = False  # take part in the hash table
    packages: Mapping[str, str] | None = None  # of plug-ins, by name: see `Discovery`
    watches: bool = False  # as of `NodeInfo`


class Peer:
    """One process among the peers of a run."""

    def __init__(
        self, world: Network, identity: Identity, transport: Transport, settings: PeerSettings
    ) -> None:
        self.identity = identity
        self.transport = transport
        self.gater = ConnectionGater(
            transport, Ledger(credit=settings.credit), admits=settings.admits
        )
        self.ledger = self.gater.ledger
        self.discovery = Discovery(
            NodeInfo(
                settings.run_id,
                world.agent,
                identity,
                world.secret(INSTANCE_BYTES),
                packages=settings.packages or {},
                watches=settings.watches,
            ),
            settings.bootstrap,
            settings.book,
            self.gater,
            now_s=world.now_s,
            rng=world.rng("discovery"),
            run_sync=world.run_sync,
        )
        self.dht: Dht | None = None
        if settings.dht:
            self.dht = Dht(
                key_of(settings.run_id),
                self.gater,
                settings.bootstrap,
                partial(self.discovery.learn_found, by="the hash table"),
                lambda: len(self.discovery.peers) < LONELY_PEERS,
                rng=world.rng("dht"),
                serves=partial(world.can_be_dialled, transport),
            )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, and stay joined until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.gater.run)
            await nursery.start(self.discovery.run)
            if self.dht is not None:
                await nursery.start(self.dht.run)
            task_status.started()


@asynccontextmanager
async def open_peer(
    world: Network,
    config: NodeConfig,
    identity: Identity,
    membership: Membership,
    run_id: str | None = None,
    *,
    dht: bool = False,
    watches: bool = False,
) -> AsyncIterator[Peer]:
    """A peer that accepts connections and does not run yet. `run_id`: None for the run's. `dht`:
    look for others in the hash table, which a private swarm never does. `watches`: as of
    `NodeInfo`."""
    settings = PeerSettings(
        run_id or config.run.run_id,
        config.bootstrap,
        AddressBook.load(config.data_dir / ADDRESSES_FILE),
        Credit(config.data_dir / CREDIT_FILE),
        admits=membership.admits,
        dht=dht and membership.key is None,
        packages=packages_of(spec.name for spec in config.run.environments),
        watches=watches,
    )
    async with world.open_transport(identity, config, membership) as transport:
        yield Peer(world, identity, transport, settings)
