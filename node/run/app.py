"""The composition root: builds one production node and runs it in its role.

The order is lock and key, policy, node, network services, role. Leaving a block ends what it
opened, children included.
"""

import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from shlex import quote

import psutil
import trio

from node.config import NodeConfig, run_argument
from node.config.explain import effective
from node.config.joined import keep_start, remember
from node.hosting.fetched_models import ask
from node.hosting.membership import Membership, load_identity
from node.hosting.models import lasting_model, resolve_model
from node.hosting.run_data import have_data
from node.observe.event_log import EventLog, Record
from node.observe.figures import credit_text
from node.observe.live import LiveView
from node.observe.node_reports import Reporter, Traffic
from node.observe.progress_bars import Work
from node.observe.records import Banned, SampledGroup, StartEnded, StatusSnapshot, Trouble
from node.observe.samples import keep, sample_log
from node.observe.status import serve_status
from node.observe.telemetry import Sources, Telemetry, broker_of, machine_of
from node.observe.tracker import Tracked, Tracker, open_tracker
from node.run.checkpoints import Checkpoint
from node.run.machine import AGENT, RealWorld
from node.run.node import Node, open_node
from node.run.role import Role, checkpoints_of, forked
from node.run.sapo_role import SapoRole
from node.system.machine import GIVE_BACK_EVERY_S, counted, freeze_garbage_collector, give_back
from node.train.ranks import Ranks
from swarm.command import STORAGE_ERRORS, output_failure, output_may_fail
from swarm.errors import (
    CannotHeal,
    ChildFailed,
    ConfigError,
    IdentityInUse,
    OutputFailed,
    StorageFailed,
    first_of,
)
from swarm.identity import Identity
from swarm.leaving import set_when_asked
from swarm.peers.invite import Invitation
from swarm.peers.mdns import LanUnavailable, announced, run_lan, tag_of
from swarm.peers.reputation import Ban
from swarm.peers.upnp import keep_mapped
from swarm.storage import data_directory
from swarm.telemetry import reports
from swarm.telemetry.broker_address import PASSWORD_VARIABLE
from swarm.telemetry.mqtt import publisher_of
from swarm.transport.libp2p.host import Libp2pTransport
from swarm.weights.weights_service import VersionOutcome

EVENTS_FILE = "events.jsonl"
DATA_DIR = NodeConfig.model_fields["data_dir"].default
VIEW_INTERVAL_S = 0.5


def run_node(
    config: NodeConfig,
    view: LiveView,
    say: Callable[[str], None],
    role_class: type[Role] = SapoRole,
    run_given: str = "",
) -> int:
    """Run a node in a role until it is done or told to leave. Returns the exit status."""
    if config.fork and (role_class.KIND != "node" or config.engine == "openai"):
        raise ConfigError(f"--fork {config.fork}: only a node that learns by itself takes it")
    if not config.data_dir.exists():
        with forked(config, None):
            pass  # a refusal leaves no directory behind
    with data_directory(config.data_dir, say=say):
        identity = load_identity(config)
        membership = Membership.of(config)
        have_data(config, identity, membership, ask(config.yes, by_default=False), say)
        needs = role_class.needs(config, identity)
        checkpoints = checkpoints_of(config)
        resumed = checkpoints.latest()  # refuses another run's before a model is made
        with forked(config, resumed) as source:
            model = resolve_model(config, say) if needs.policy else ""
            if source is not None:
                say(f"copying {source.directory}")
                resumed = checkpoints.copy(source)
        start = _Start(
            *(config, identity, membership, role_class, needs.draws, resumed, model),
            *(run_given, view, say),
        )
        with suppress(OSError):  # a convenience, which a full disk does without
            keep_start(config, role_class.KIND, time.time())
        try:
            with output_may_fail():
                trio.run(_run, start)
        except* (ConfigError, IdentityInUse, ChildFailed, CannotHeal, OutputFailed) as group:
            raise first_of(group) from None
        except* (sqlite3.OperationalError, OSError) as group:
            error = first_of(group)
            if isinstance(error, OSError) and error.errno not in STORAGE_ERRORS:
                raise  # not the disk: a bug of ours, which shall be seen whole
            raise StorageFailed(
                f"--data-dir {config.data_dir}: {error}; what the last checkpoint holds is safe"
            ) from group
    return 0


@dataclass(frozen=True, slots=True)
class _Start:
    """The facts of a start, before anything listens."""

    config: NodeConfig
    identity: Identity
    membership: Membership
    role_class: type[Role]
    draws: int | None  # as in `Needs`
    resumed: Checkpoint | None  # the node goes on from it
    model: str  # to begin with; empty where the role needs none
    run_given: str  # as --run had it
    view: LiveView
    say: Callable[[str], None]


async def _run(start: _Start) -> None:
    config, role_class, say = start.config, start.role_class, start.say
    with (
        EventLog(config.data_dir / EVENTS_FILE, time.time) as events,
        sample_log(config.data_dir, time.time) as samples,
        counted() as nodes_here,
        _ending(events),
    ):
        is_learner = role_class.KIND == "learner"
        count = "step" if is_learner else "round"
        ranks = Ranks.of(os.environ) if is_learner else None
        world = RealWorld(start.model, nodes_here, say, is_learner=is_learner, ranks=ranks)
        async with (
            _open_tracker(config, start.identity, role_class.KIND, say) as tracker,
            open_node(world, config, start.identity, start.membership, start.draws) as node,
        ):
            app = App(start, world, node, events, samples, tracker)
            if start.resumed is not None:
                say(f"resuming after {count} {start.resumed.progress.round}")
            transport = node.peer.transport
            assert isinstance(transport, Libp2pTransport)
            with suppress(OSError):  # a convenience, which a full disk does without
                run = start.run_given or run_argument(config.run)
                remember(config, run, lasting_model(config.model), transport.ports())
            await app.run()
            await node.ledger.credit.save_if_changed(trio.to_thread.run_sync)
            gains = [credit_text(app.snapshot()), app.farewell()]
    _say_goodbye(config, say, count)
    for gain in filter(None, gains):
        say(gain)


@contextmanager
def _ending(events: EventLog) -> Iterator[None]:
    """Log the end of the block, and its failure if it has one. The disk may be full or gone."""
    failure = None
    try:
        yield
    except BaseException as error:
        failure = str(first_of(error)) or type(first_of(error)).__name__
        raise
    finally:
        with suppress(OSError):
            events.write(StartEnded(failure))


def _say_goodbye(config: NodeConfig, say: Callable[[str], None], count: str) -> None:
    """Print commands that use the trained policy."""
    saved = checkpoints_of(config).latest()
    if saved is None:
        return
    where = "" if config.data_dir == DATA_DIR else f" --data-dir {quote(str(config.data_dir))}"
    say(f"left after {count} {saved.progress.round}, which is saved; what it has learned:")
    lines = {
        f"samples{where}": "what it said, and what its answers were",
        f"export my-model{where}": "as a Hugging Face directory",
        "chat my-model": "talk to it",
    }
    width = max(map(len, lines))
    for line, what in lines.items():
        say(f"  swarm-node {line:<{width}}  # {what}")


@asynccontextmanager
async def _open_tracker(
    config: NodeConfig, identity: Identity, kind: reports.Role, say: Callable[[str], None]
) -> AsyncIterator[Tracker | None]:
    if config.report_to is None:
        yield None
        return
    peer, run = str(identity.peer_id), config.run
    tracked = Tracked(
        config.report_to,
        config.report_project,
        run=config.start_name or f"{run.name}-{peer[-8:]}",
        run_id=f"{run.run_id}-{peer[-12:]}",
        directory=str(config.data_dir.absolute() / "tracking" / config.report_to),
        settings={
            **effective(config, is_learner=kind == "learner"),
            "run_id": run.run_id,
            "peer_id": peer,
            "role": kind,
            "agent": AGENT,
        },
        started_s=time.time(),
    )
    async with open_tracker(tracked, say) as tracker:
        yield tracker


async def _give_memory_back() -> None:
    while True:
        await trio.sleep(GIVE_BACK_EVERY_S)
        await trio.to_thread.run_sync(give_back)


class App:
    """One process: a node in its role, with its reports to people and to the machine."""

    def __init__(
        self,
        start: _Start,
        world: RealWorld,
        node: Node,
        events: EventLog,
        samples: EventLog,
        tracker: Tracker | None,
    ) -> None:
        self._config = start.config
        self._membership = start.membership
        self._view = start.view
        self.say = start.say
        self._world = world
        self._node = node
        self._events = events
        self._samples = samples
        self._tracker = tracker
        self._leaving = trio.Event()
        self._process = psutil.Process()
        self._unanswered: Counter[str] = Counter()  # of those who ask for status and metrics
        self._role = start.role_class(world, start.config, node, self)
        self._telemetry = self._make_telemetry(start.role_class.KIND)
        node.gater.on_ban = self._tell_ban

    async def run(self) -> None:
        """Until the role is done or told to leave."""
        async with trio.open_nursery() as nursery:
            await self._open_doors(nursery)
            freeze_garbage_collector()
            await self._role.run(self._leaving)
            nursery.cancel_scope.cancel()

    async def _open_doors(self, nursery: trio.Nursery) -> None:
        """Start the network and the reports; both outlive the trainer."""
        transport = self._node.peer.transport
        assert isinstance(transport, Libp2pTransport)
        told = partial(self.say, "leaving: saving first; once more to leave at once")
        nursery.start_soon(set_when_asked, self._leaving, told)
        await nursery.start(self._node.run_network)
        await nursery.start(serve_status, self._config.data_dir, self.snapshot, self._unanswered)
        self._greet(transport.addresses())
        nursery.start_soon(self._look_on_the_lan, transport.addresses())
        nursery.start_soon(self._ask_the_router, transport)
        nursery.start_soon(self._show, transport)
        nursery.start_soon(_give_memory_back)
        nursery.start_soon(self._telemetry.run)
        await self._serve_metrics(nursery)

    def _greet(self, addresses: tuple[str, ...]) -> None:
        run_id, model = self._config.run.run_id, self._node.link_model
        self.say(f"this node is {self._node.peer.identity.peer_id}, run {run_id}")
        if self._membership.key is not None:
            self.say("this swarm is private: this prints an invitation for the next machine:")
            self.say(f"  swarm-node invite --data-dir {self._config.data_dir}")
            return
        self.say("the next machine joins with any one of these lines:")
        for link in Invitation(run_id, addresses, model=model).links:
            self.say(f"  swarm-node join {link}")

    async def _look_on_the_lan(self, addresses: Sequence[str]) -> None:
        """Find nodes on the local network, unless this node listens on loopback alone."""
        own = announced(addresses)
        if not self._config.lan or not own:
            return
        tag = tag_of(self._config.run.run_id, self._membership.key)
        found = partial(self._node.discovery.learn_found, by="the local network")
        try:
            await run_lan(self._node.peer.identity.peer_id, tag, own, found)
        except LanUnavailable as error:
            self._node.notes["lan"] = f"no discovery on the local network: {error}"

    async def _ask_the_router(self, transport: Libp2pTransport) -> None:
        """Map the port. Peers that dial back show whether that works."""
        ports = [int(address.split("/")[4]) for address in announced(transport.own_addresses())]
        if self._config.upnp and ports:
            await keep_mapped(ports[0], lambda _: transport.check_reach())

    async def _show(self, transport: Libp2pTransport) -> None:
        while True:
            reach, unreached = transport.reach, None
            if reach is not None and reach.reachable is False and not reach.relays:
                unreached = (
                    "others cannot dial this node, and no peer relays for it: swarm-node doctor "
                    "says what to do"
                )
            self._node.notes.put("reach", unreached)
            if self._tracker is not None:
                self._node.notes.put("tracker", self._tracker.note)
            self._view.update(self.snapshot())
            starting = [Work(name) for name in self._world.starting]
            self._view.works([*starting, *self._role.works()])
            if output_failure() is not None:  # nobody would see what it does
                self._leaving.set()
            await trio.sleep(VIEW_INTERVAL_S)

    def farewell(self) -> str:
        return self._role.farewell()

    def snapshot(self) -> StatusSnapshot:
        memory_bytes = self._process.memory_info().rss
        return self._role.status(self._node.snapshot(memory_bytes=memory_bytes))

    def _make_telemetry(self, kind: reports.Role) -> Telemetry:
        config, run_id = self._config, self._config.run.run_id
        transport = self._node.peer.transport
        instance = secrets.token_hex(8)
        publisher = None
        broker = broker_of(config, os.environ.get(PASSWORD_VARIABLE))
        if broker is not None:
            rng = Random(secrets.randbits(64))
            publisher = publisher_of(broker, self._node.peer.identity, run_id, instance, rng)
        return Telemetry(
            Reporter(
                self._node.peer.identity.peer_id,
                run_id,
                kind,
                AGENT,
                instance=instance,
                interval_s=config.telemetry_interval_s,
            ),
            self._node.peer.identity,
            run_id,
            Sources(
                self.snapshot,
                lambda: Traffic(transport.counters, transport.peers()),
                self._role.extras,
                lambda: machine_of(config.data_dir),
            ),
            self._node.notes,
            interval_s=config.telemetry_interval_s,
            publisher=publisher,
            now_s=time.time,
            run_sync=trio.to_thread.run_sync,
        )

    async def _serve_metrics(self, nursery: trio.Nursery) -> None:
        address = self._config.metrics_listen
        if address is None:
            return
        from node.observe.metrics_page import serve_metrics  # an optional dependency

        port = await nursery.start(
            partial(serve_metrics, names=self._config.web_names),
            address,
            lambda: self._telemetry.latest,
            self._unanswered,
            lambda text: self.tell(Trouble(text)),
        )
        self.say(f"metrics for Prometheus: http://{address.rpartition(':')[0]}:{port}/metrics")

    async def _tell_ban(self, ban: Ban) -> None:
        until_s = time.time() + ban.until - trio.current_time()
        await self.tell(Banned(ban.subject, ban.is_block, ban.why, until_s, ban.number))

    async def show(self, groups: Sequence[SampledGroup]) -> None:
        await trio.to_thread.run_sync(keep, self._samples, groups)

    def note_outcome(self, outcome: VersionOutcome) -> None:
        self._telemetry.reporter.note_outcome(outcome)

    async def tell(self, record: Record) -> None:
        await trio.to_thread.run_sync(self._events.write, record)
        reporter, snapshot = self._telemetry.reporter, self.snapshot()
        reporter.note(record)
        if self._tracker is not None and (of_round := reporter.tracked(record, snapshot)):
            self._tracker.put(of_round[0], time.time(), of_round[1])
        self._view.update(snapshot)
        self._view.event(record)
