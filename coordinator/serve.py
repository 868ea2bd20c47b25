"""`swarm-coordinator serve`: the coordinator as a process."""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Final

import trio

from coordinator.fleet_file import Fleet, check_peer, priced
from coordinator.loop import VOLUNTEERS, Coordinator, Say
from coordinator.overrides import read_depth, read_drained
from coordinator.providers.base import Provider, ProviderFailed
from coordinator.providers.local import LocalProvider
from coordinator.providers.skypilot import Catalogue, SkyProvider, load_sky
from coordinator.providers.static import StaticProvider
from coordinator.reporting import CoordinatorReports
from coordinator.tables import named, read_tables
from coordinator.view import load_state, render_state, save_state, view_json
from swarm.errors import ConfigError, PeerUnreachable, first_of
from swarm.identity import Identity, PeerId
from swarm.leases.coordination import ControlClient
from swarm.leaving import set_when_asked
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.invite import Invitation
from swarm.peers.reputation import Ledger
from swarm.storage import Runtime, data_directory
from swarm.telemetry.broker_address import Broker
from swarm.transport.base import Transport
from swarm.transport.libp2p.host import open_libp2p

AGENT: Final = f"swarm-coordinator/{version('swarm-node')}"
KEY_FILE: Final = "identity.pem"
CONNECT_TIMEOUT_S: Final = 10.0


def learner_of(run_file: Path) -> PeerId:
    """The learner of a run file.

    Raises:
        ConfigError: it cannot be read, or names none.
    """
    with named(run_file):
        learner = read_tables(run_file).get("learner")
        peer = learner.get("peer") if isinstance(learner, dict) else None
        if not isinstance(peer, str):
            raise ConfigError("has no learner; it says learner.peer")
        check_peer(peer, "learner.peer")
    return PeerId(peer)


def identity_of(data_dir: Path, key_file: Path | None) -> Identity:
    """The coordinator's key, made at its first start.

    Raises:
        ConfigError: the key file cannot be used.
    """
    path = key_file or data_dir / KEY_FILE
    if not path.exists():
        if key_file is not None:
            raise ConfigError(
                f"--key-file {key_file}: no such file; make it with swarm-node keygen"
            )
        Identity.generate().save(path, None)
    return Identity.load(path, None)


def show_state(data_dir: Path, *, as_json: bool) -> str:
    state = load_state(data_dir)
    return json.dumps(state, indent=2) if as_json else render_state(state, time.time())


# Long: the composition root: what is opened here ends in this order.
def serve(
    load: Callable[[], Fleet],
    data_dir: Path,
    say: Say,
    *,
    key_file: Path | None,
    invite: str | None,
    interval_s: float,
    keep_workers: bool,
    broker: Broker | None,
) -> None:
    """Coordinate until interrupted. `load` reads the fleet file, at each look again.

    Raises:
        ConfigError: bad input, found before anything started.
    """
    catalogue = Catalogue(time.monotonic, load_sky)

    def load_priced() -> Fleet:
        return priced(load(), catalogue.price_per_h)

    fleet = load_priced()
    learner = learner_of(fleet.run_file)
    read_drained(data_dir)
    read_depth(data_dir)
    join_key = Invitation.decode(invite).key if invite else None
    network_key = join_key.handshake_key() if join_key else None
    with data_directory(data_dir, "coordinator", say):
        identity = identity_of(data_dir, key_file)
        say(f"this coordinator is {identity.peer_id}; the learner has to be started with")
        say(f"  --coordinator {identity.peer_id}")

        async def work() -> None:
            async with open_libp2p(
                identity, ("/ip4/0.0.0.0/tcp/0",), network_key=network_key
            ) as transport:
                providers: dict[str, Provider] = {
                    "local": LocalProvider(data_dir / "workers", fleet, invite),
                    "skypilot": SkyProvider(data_dir / "clouds", fleet, identity.peer_id),
                    VOLUNTEERS: StaticProvider(fleet),  # the last: it gets the remaining workers
                }
                source = _Source(load_priced, fleet, data_dir, say)
                service = _Service(source, providers, data_dir, say, interval_s, keep_workers)
                async with trio.open_nursery() as reporting:
                    if broker is not None:
                        service.reports = CoordinatorReports(
                            broker,
                            identity,
                            AGENT,
                            transport.counters,
                            reporting,
                            instance=secrets.token_hex(8),
                            interval_s=interval_s,
                            now_s=time.time,
                            rng=Random(secrets.randbits(64)),
                        )
                    await service.run(transport, fleet.peers, learner)
                    reporting.cancel_scope.cancel()

        try:
            trio.run(work)
        except* ConfigError as group:
            raise first_of(group) from None


class _Source:
    """The fleet file and the orders, which a user may change at any time. If one is wrong, the last
    good contents of all stay in force."""

    def __init__(self, load: Callable[[], Fleet], fleet: Fleet, data_dir: Path, say: Say) -> None:
        self._load = load
        self._data_dir = data_dir
        self._say = say
        self._refused = ""
        self.fleet = fleet
        self.drained: frozenset[str] = frozenset()

    def look(self) -> None:
        """Read both again."""
        try:
            fleet, drained = self._load(), read_drained(self._data_dir)
            depth = read_depth(self._data_dir)
        except ConfigError as error:
            if str(error) != self._refused:
                self._say(f"{error}; what was read before goes on")
            self._refused = str(error)
            return
        self._refused, self.drained = "", drained
        if depth is not None:  # the order comes before the file
            fleet = replace(fleet, pacing=replace(fleet.pacing, depth=depth))
        if fleet != self.fleet:
            self._say("the fleet file has changed")
            self.fleet = fleet


@dataclass(slots=True)
class _Service:
    """A coordinator on one data directory."""

    source: _Source
    providers: dict[str, Provider]
    data_dir: Path
    say: Say
    interval_s: float
    keep_workers: bool  # at the end
    complaint: str = ""  # the last error of a beat
    reports: CoordinatorReports | None = None

    async def run(self, transport: Transport, peers: tuple[str, ...], learner: PeerId) -> None:
        """Until interrupted."""
        leaving = trio.Event()
        gater = ConnectionGater(transport, Ledger(), admits=lambda peer, ip: peer == learner)
        async with trio.open_nursery() as services:
            services.start_soon(gater.run)
            services.start_soon(set_when_asked, leaving)
            async with trio.open_nursery() as nursery:
                coordinator = Coordinator(
                    self.source.fleet,
                    self.providers,
                    ControlClient(transport, gater.ledger, learner),
                    nursery,
                    Runtime(time.time, Random(), trio.to_thread.run_sync),
                    lambda: self.source.drained,
                    self.say,
                )
                while not leaving.is_set():
                    await trio.to_thread.run_sync(self.source.look)
                    coordinator.fleet = self.source.fleet
                    await self._beat(coordinator, await _connect(transport, peers, learner))
                    pause_s = self.interval_s * (0.9 + 0.2 * secrets.randbelow(100) / 100)
                    with trio.move_on_after(pause_s):
                        await leaving.wait()
            if not self.keep_workers:
                self.say("leaving: the workers that were started here are ended")
                await coordinator.release_all()
            services.cancel_scope.cancel()

    async def _beat(self, coordinator: Coordinator, unreachable: str) -> None:
        """One beat, saved for `workers`. It is tried again if the disk or a provider fails."""
        try:
            view = await coordinator.beat(unreachable)
            if self.reports is not None:
                self.reports.note(view)
            state = view_json(view, time.time(), self.interval_s)
            await trio.to_thread.run_sync(save_state, self.data_dir, state)
        except (OSError, ConfigError, ProviderFailed) as error:
            if str(error) != self.complaint:
                self.say(f"{error}; tried again at the next look")
            self.complaint = str(error)
        else:
            self.complaint = ""


async def _connect(transport: Transport, peers: tuple[str, ...], learner: PeerId) -> str:
    """Connect to the learner by any of its addresses. Returns why that failed, else ""."""
    if learner in transport.peers():
        return ""
    why = f"no address of the learner's is known: give one that ends in /p2p/{learner}"
    for address in peers:
        if address.rpartition("/p2p/")[2] != learner:
            continue
        try:
            await transport.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        except PeerUnreachable as error:
            why = str(error)
            continue
        return ""
    return why
