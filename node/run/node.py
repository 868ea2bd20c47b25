"""The common part of all roles: a peer, the verifier, the exchange where the role draws groups."""

import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final, TypeVar

import trio

from node.config import NodeConfig
from node.hosting.membership import Membership
from node.hosting.run_data import held_data
from node.interfaces.engine import EngineInfo
from node.interfaces.trainer import PolicyInfo
from node.methods.replay import SolvedTasks
from node.methods.task_control import Vade
from node.observe.event_log import Record
from node.observe.progress_bars import Work
from node.observe.records import (
    BanStatus,
    PeerStatus,
    RoundDone,
    Started,
    StatusSnapshot,
    StepDone,
    Trouble,
    WorkDone,
)
from node.policies.presets import PRESETS
from node.run.parts import NodeParts
from node.run.peer import Network, Peer, open_peer
from node.run.progress import Progress
from node.run.world import World
from node.verify.assignment import is_common
from node.verify.held_out import HeldOutGuard
from node.verify.task_choice import TaskChoice
from node.verify.verifier import Verifier
from swarm.exchange.exchange_service import Exchange, ExchangeRules
from swarm.exchange.fetching import Verify
from swarm.exchange.pool import Pool, PoolLimits, PoolStatistics
from swarm.identity import Identity, PeerId
from swarm.peers.run_data import serve_data, serve_rules
from swarm.rollouts import RolloutGroup, is_quantised
from swarm.storage import Runtime
from swarm.transport.connection_slots import SlotFigures

STOCK_FACTOR: Final = 3  # foreign groups kept ready, in multiples of what a round or step draws
POOL_LOOK_S: Final = 2.0  # how old the pool's figures in a snapshot may be
RATE_LOOKS: Final = 15  # over which traffic by peer is averaged, each `POOL_LOOK_S` apart
FETCH_PARALLEL: Final = 4  # peers that groups are fetched from at a time
POOL_FILE: Final = "pool.sqlite"


def pool_limits(config: NodeConfig) -> PoolLimits:
    """The bounds of a node's pool."""
    return PoolLimits(bytes_max=config.pool_bytes_max)


class RolloutSharing:
    """One node's pool and exchange."""

    def __init__(
        self,
        world: Network,
        config: NodeConfig,
        peer: Peer,
        pool: Pool,
        verify: Verify,
        draws: int,
    ) -> None:
        limits = config.run.limits
        self.pool = pool
        self.figures = PoolStatistics(0, 0, 0, 0, 0, {})
        self._world = world
        self.exchange = Exchange(
            ExchangeRules(
                run_id=config.run.run_id,
                stock_groups=STOCK_FACTOR * draws,
                record_life_s=limits.record_life_s,
                clock_skew_s=limits.clock_skew_s,
                group_size_max=limits.group_size_max,
                group_bytes_max=config.run.group_bytes_max,
                fetch_parallel=FETCH_PARALLEL,
                fetch_bytes_per_s=float(config.fetch_bytes_per_s_max),
                serve_bytes_per_s=float(config.serve_bytes_per_s_max),
            ),
            peer.identity,
            peer.transport,
            pool,
            verify,
            Runtime(world.now_s, world.rng("exchange"), world.run_sync),
            peer.gater,
        )

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and fetch until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.exchange.run)
            task_status.started()
            while True:
                look = self.pool.statistics
                self.figures = await self._world.run_sync(look, self._world.now_s())
                await trio.sleep(POOL_LOOK_S)


TOKENS_PER_S_ROUNDS: Final = 5  # rounds over which the generation rate is averaged
ENGINE_NOTE: Final = "engine"
ELSEWHERE: Final = "elsewhere"

Counted = TypeVar("Counted", RoundDone, StepDone, WorkDone)


class Notes(dict[str, str]):
    """Notes for people, by topic, so that a healed trouble disappears."""

    def put(self, topic: str, text: str | None) -> None:
        """Set a note; None removes it."""
        if text is None:
            self.pop(topic, None)
        else:
            self[topic] = text


class Node:
    """One process of a run, whatever its role. The trainer comes and may go."""

    def __init__(
        self,
        config: NodeConfig,
        world: Network,
        peer: Peer,
        verifier: Verifier,
        pool: Pool | None,
        draws: int | None,
    ) -> None:
        """`draws`: shared groups that the role draws in a round or step, at most. None: it takes no
        part in the exchange and needs no `pool`."""
        self._config = config
        self._world = world
        self._started_at = trio.current_time()
        self._first_round_at: float | None = None
        self._rates: deque[float] = deque(maxlen=TOKENS_PER_S_ROUNDS)
        self._looks: deque[tuple[float, dict[PeerId, tuple[int, int]]]] = deque(maxlen=RATE_LOOKS)
        self.peer = peer
        self.gater, self.discovery, self.ledger = peer.gater, peer.discovery, peer.ledger
        self.verifier = verifier
        self.guard = HeldOutGuard(config.run, verifier, config.validated_by)
        self.choice = TaskChoice(config.run, config.method(Vade), self._voice_of, world.now_s)
        self.solved = SolvedTasks()
        self.sharing: RolloutSharing | None = None
        if pool is not None and draws is not None:
            self.sharing = RolloutSharing(world, config, peer, pool, self._verify, draws)
        serve_rules(peer.transport, self.gater, config.run.run_id, config.run.as_json())
        if held := held_data(config.run, world.run_sync):
            serve_data(peer.transport, self.gater, held)
        self.run_sync = world.run_sync
        self.phase = "starting"
        self.precision = ""  # of the engine
        self.notes = Notes()

    @property
    def parts(self) -> NodeParts:
        """The parts that the loops work with."""
        return NodeParts(
            self._config,
            self.peer.identity.peer_id,
            self.verifier,
            self.guard,
            None if self.sharing is None else self.sharing.exchange,
            self.choice,
            self.solved,
            self._world.now_s,
            self.enter,
        )

    def _voice_of(self, producer: PeerId) -> str:
        """The group of producers that share one voice: an address block, all relayed peers, or all
        peers without a connection."""
        share = self.gater.share_of(producer)
        return ELSEWHERE if share == producer else str(share)

    async def _verify(self, group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        """Verify a foreign group. Keep what a good one reports of its task."""
        prompt, rewards = await self.guard.verify(group)
        self.choice.receive(group)
        if self._config.hears_solutions and is_common(self._config.run, group.task):
            scored = zip(group.completions, rewards, strict=True)
            most = self._config.run.completion_chars_max
            fit = [each for each in scored if len(each[0].text) <= most]
            self.solved.receive(group.task, group.producer, fit, self._voice_of(group.producer))
        return prompt, rewards

    def enter(self, phase: str) -> None:
        """Set the phase, which `status` shows."""
        self.phase = phase

    async def run_network(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Join the swarm, serve and fetch until cancelled."""
        async with trio.open_nursery() as nursery:
            if self.sharing is not None:
                await nursery.start(self.sharing.run)
            await nursery.start(self.peer.run)
            task_status.started()

    def is_over(self, progress: Progress) -> bool:
        """True if the settings end the run."""
        rounds = self._config.rounds
        if rounds is not None and progress.round >= rounds:
            return True
        return trio.current_time() >= self.ends_at

    @property
    def ends_at(self) -> float:
        """When the time limit ends the run, by trio's clock. It counts from the first use."""
        if self._first_round_at is None:
            self._first_round_at = trio.current_time()
        limit_s = self._config.stop_after_s
        return math.inf if limit_s is None else self._first_round_at + limit_s

    # --- what roles tell of themselves --------------------------------------------------------

    def counted(self, record: Counted) -> Counted:
        """The record with the network's figures."""
        counters = self.peer.transport.counters
        record = replace(
            record,
            bytes_in_total=counters.bytes_in.total(),
            bytes_out_total=counters.bytes_out.total(),
        )
        if isinstance(record, WorkDone):
            return record
        return replace(record, peers=len(self.discovery.peers))

    def note_rate(self, record: RoundDone | WorkDone) -> None:
        """Count a record in the average of generated tokens a second."""
        if record.generate_s > 0:
            self._rates.append(record.generated_tokens / record.generate_s)

    async def note_maker(
        self, maker: EngineInfo, tell: Callable[[Record], Awaitable[None]]
    ) -> None:
        """Record the engine for `status`; tell once if its weights are quantised."""
        self.precision = maker.precision
        if not is_quantised(maker.precision):
            self.notes.put(ENGINE_NOTE, None)
            return
        note = (
            f"the engine samples with quantised weights ({maker.precision}): its log-probs are "
            "other than a trainer's, and its groups say so"
        )
        if self.notes.get(ENGINE_NOTE) != note:
            self.notes[ENGINE_NOTE] = note
            await tell(Trouble(note))

    def started(self, policy: PolicyInfo, progress: Progress) -> Started:
        """The record of a start, with the settings' sizes."""
        config = self._config
        return Started(
            peer_id=self.peer.identity.peer_id,
            run_id=config.run.run_id,
            agent=self._world.agent,
            model=policy.name,
            parameters=policy.parameters,
            tokenizer=policy.tokenizer,
            engine=config.engine,
            round=progress.round,
            seed=config.seed,
            local_groups=config.local_groups,
            external_groups=config.external_groups,
            group_size=config.group_size,
            addresses=self.peer.transport.addresses(),
        )

    # --- for whoever watches ------------------------------------------------------------------

    def works(self) -> list[Work]:
        """The slow work of this moment."""
        works = []
        if self.phase == "evaluating":
            works.append(Work(f"evaluating on {self._config.run.held_out.tasks} held-out tasks"))
        if self.phase == "saving":
            works.append(Work("saving a checkpoint"))
        stock = self.sharing.exchange.fetcher.catching_up() if self.sharing is not None else None
        if stock is not None:
            works.append(Work("fetching groups of others", *stock))
        return works

    def snapshot(self, *, memory_bytes: int = 0) -> StatusSnapshot:
        """The node as it is now, to be filled by its role; quick, for it answers `status`."""
        counters, sharing = self.peer.transport.counters, self.sharing
        pool = PoolStatistics(0, 0, 0, 0, 0, {}) if sharing is None else sharing.figures
        oldest_s = pool.oldest_eligible_at_s
        session, ever = self.ledger.credit.session, self.ledger.credit.ever
        names = sorted(set(counters.bytes_in) | set(counters.bytes_out))
        return StatusSnapshot(
            peer_id=self.peer.identity.peer_id,
            run_id=self._config.run.run_id,
            agent=self._world.agent,
            model=self._config.model,
            parameters=0,
            engine=self._config.engine,
            uptime_s=trio.current_time() - self._started_at,
            phase=self.phase,
            round=0,
            policy_version=0,
            local_groups=0,
            external_groups=0,
            external_groups_wanted=0,
            own_reward=None,
            held_out_passed=None,
            held_out_first=None,
            tokens_per_s=sum(self._rates) / len(self._rates) if self._rates else 0.0,
            pool_groups=pool.groups,
            pool_foreign=pool.foreign_eligible,
            pool_bytes=pool.bytes,
            pool_age_s=None if oldest_s is None else max(0.0, self._world.now_s() - oldest_s),
            link_model=self.link_model,
            precision=self.precision,
            accepted=self.ledger.accepted,
            rejected={str(k): v for k, v in sorted(self.ledger.rejected.items())},
            bytes_in=counters.bytes_in.total(),
            bytes_out=counters.bytes_out.total(),
            bytes_by_protocol={n: (counters.bytes_in[n], counters.bytes_out[n]) for n in names},
            memory_bytes=memory_bytes,
            trainer_memory_bytes=0,
            addresses=self.peer.transport.addresses(),
            peers=self._peer_statuses(),
            bans=self._ban_statuses(),
            notes=(*self.notes.values(), *self.discovery.notes, *self._left_out()),
            door=self._door(),
            credited_groups=session.groups,
            credited_by=session.peers,
            credited_groups_ever=ever.groups,
            credited_by_ever=ever.peers,
        )

    @property
    def link_model(self) -> str:
        """The model, if newcomers may begin with it and anybody can fetch it."""
        model = self._config.model
        return model if model in PRESETS and self._config.run.learner is None else ""

    def _left_out(self) -> tuple[str, ...]:
        note, peer = self.verifier.counters.note, self.gater.last_unlisted
        listed = f"--allow {self._config.allow}: refused {peer}, which is not in that file"
        unlisted = f"{listed}; to let it in, add a line with that id and start again"
        return tuple(filter(None, (note, unlisted if peer else None)))

    def _door(self) -> SlotFigures | None:
        """The transport's figures, with the refusals of our own rules."""
        door = self.peer.transport.door
        if door is None:
            return None
        refused = {why.replace(" ", "_"): n for why, n in self.gater.refused_connections.items()}
        return replace(door, turned_away=door.turned_away | refused)

    def _ban_statuses(self) -> tuple[BanStatus, ...]:
        now = trio.current_time()
        return tuple(
            BanStatus(ban.subject, ban.is_block, ban.why, ban.until - now, ban.number)
            for ban in self.gater.bans()
        )

    def _peer_statuses(self) -> tuple[PeerStatus, ...]:
        """Connected peers, and those that are gone but broke a rule."""
        connected = self.discovery.peers
        offenders = {p for p in self.ledger.peers() if self.ledger.account(p).rejected}
        statuses, rates = [], self._traffic_rates()
        for peer in sorted(connected.keys() | offenders):
            info, account = connected.get(peer), self.ledger.account(peer)
            statuses.append(
                PeerStatus(
                    peer_id=peer,
                    addresses=info.addresses if info else (),
                    agent=info.agent if info else "",
                    groups_accepted=account.accepted,
                    groups_trained=account.trained,
                    groups_credited=self.ledger.credit.of(peer),
                    rejected={str(k): v for k, v in sorted(account.rejected.items())},
                    in_bytes_per_s=rates.get(peer, (0.0, 0.0))[0],
                    out_bytes_per_s=rates.get(peer, (0.0, 0.0))[1],
                )
            )
        return tuple(statuses)

    def _traffic_rates(self) -> dict[PeerId, tuple[float, float]]:
        """Bytes a second from and to each connected peer, since the oldest look at it."""
        now, by_peer = trio.current_time(), self.peer.transport.counters.by_peer
        totals = {peer: by_peer.of(peer) for peer in self.discovery.peers}
        counts = {peer: (each.bytes_in, each.bytes_out) for peer, each in totals.items()}
        rates = {}
        for peer, (came, went) in counts.items():
            at, before = next(
                ((t, was[peer]) for t, was in self._looks if peer in was), (now, None)
            )
            if before is not None and now > at:
                span_s = now - at
                rates[peer] = max(0, came - before[0]) / span_s, max(0, went - before[1]) / span_s
        if not self._looks or now - self._looks[-1][0] >= POOL_LOOK_S:
            self._looks.append((now, counts))
        return rates


@asynccontextmanager
async def open_node(
    world: World,
    config: NodeConfig,
    identity: Identity,
    membership: Membership,
    draws: int | None,
) -> AsyncIterator[Node]:
    """A node that can be connected to and does not run yet; `draws` as in `Node`."""
    async with AsyncExitStack() as stack:
        pool = None
        if draws is not None:
            pool = stack.enter_context(Pool(config.data_dir / POOL_FILE, pool_limits(config)))
        peer = await stack.enter_async_context(
            open_peer(world, config, identity, membership, dht=config.dht)
        )
        verifier = await stack.enter_async_context(world.open_verifier(config))
        # Parameters that make no task, and a format that does not suit, are refused here
        await verifier.problems([])
        node = Node(config, world, peer, verifier, pool, draws)
        if pool is not None and pool.damaged_path is not None:
            node.notes["pool"] = f"the pool file was damaged and moved to {pool.damaged_path}"
        yield node
