"""One node, put together: the network's services, the round loop, and what it says of itself.

Built over interfaces alone, so that the same code runs in production (`app`), in a simulated
network under a virtual clock, and in experiments with many nodes in one process.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from random import Random

import trio

from node.checkpoints import Checkpoints
from node.config import NodeConfig
from node.engines.base import RolloutEngine
from node.learner import version_after
from node.leaving import unless
from node.monitor.records import (
    BanStatus,
    HeldOut,
    PeerStatus,
    RoundDone,
    StatusSnapshot,
    StepDone,
    WorkDone,
)
from node.sapo import HandOver, Progress, Sapo
from node.tasks.held_out import HeldOutGuard
from node.tasks.verifier import Verifier
from node.training.base import Trainer
from swarm.exchange.pool import Pool, PoolStatistics
from swarm.exchange.service import Exchange, ExchangeRules, RunSync
from swarm.identity import Identity
from swarm.peers.address_book import AddressBook
from swarm.peers.connection_gater import Warden
from swarm.peers.dht import Dht, key_of
from swarm.peers.discovery import Discovery
from swarm.peers.ledger import Ledger
from swarm.transport.base import Gate, Transport
from swarm.transport.places import PlaceFigures

LONELY_PEERS = 4  # of the run; with fewer, more are looked for everywhere
STOCK_FACTOR = 3  # foreign groups kept ready, in multiples of J
POOL_LOOK_S = 2.0  # how old the pool's figures in a snapshot may be
TOKENS_PER_S_ROUNDS = 5  # rounds over which the generation rate is averaged


@dataclass(frozen=True, slots=True)
class World:
    """What a node must not reach for by itself."""

    now_s: Callable[[], float]  # unix time
    rng: Random
    run_sync: RunSync  # where blocking calls go
    instance: bytes  # 16 bytes, other at each start
    agent: str
    can_be_dialled: Callable[[], bool] = lambda: True  # as far as is known
    dht: bool = False  # take part in the distributed hash table
    admits: Gate = lambda peer, ip: True  # who may connect at all


Record = RoundDone | HeldOut
OnRecord = Callable[[Record], Awaitable[None]]


class Node:
    """A node over a transport, a pool and a verifier. The trainer comes and may go."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        transport: Transport,
        pool: Pool,
        verifier: Verifier,
        book: AddressBook,
        world: World,
    ) -> None:
        self._config = config
        self._identity = identity
        self._transport = transport
        self._pool = pool
        self._verifier = verifier
        self._world = world
        self._started_at = trio.current_time()
        self._pool_figures = PoolStatistics(0, 0, 0, 0, 0, {})
        self._rates: list[float] = []
        self._first_round_at: float | None = None
        self.phase = "starting"
        self.precision = ""  # of the engine
        self.progress = Progress()
        self.last_round: RoundDone | None = None
        self.last_step: StepDone | None = None  # of a learner
        self.last_work: WorkDone | None = None  # of a worker
        self.notes: dict[str, str] = {}  # by topic, so that a healed trouble disappears
        self.warden = Warden(transport, Ledger(), admits=world.admits)
        self.guard = HeldOutGuard(config.run, verifier)
        self.exchange = Exchange(
            self._exchange_rules(),
            identity,
            transport,
            pool,
            self.guard.verify,
            now_s=world.now_s,
            rng=Random(world.rng.random()),
            run_sync=world.run_sync,
            warden=self.warden,
        )
        self.discovery = Discovery(
            config.run.run_id,
            world.agent,
            identity,
            world.instance,
            transport,
            config.bootstrap,
            book,
            self.warden,
            now_s=world.now_s,
            rng=Random(world.rng.random()),
            run_sync=world.run_sync,
        )

        self.dht: Dht | None = None
        if world.dht:
            self.dht = Dht(
                key_of(config.run.run_id),
                transport,
                self.warden,
                config.bootstrap,
                partial(self.discovery.learn_found, by="the hash table"),
                self._is_lonely,
                rng=Random(world.rng.random()),
                serves=world.can_be_dialled,
            )

    def _exchange_rules(self) -> ExchangeRules:
        limits = self._config.run.limits
        return ExchangeRules(
            run_id=self._config.run.run_id,
            stock_groups=STOCK_FACTOR * self._config.external_groups,
            record_life_s=limits.record_life_s,
            clock_skew_s=limits.clock_skew_s,
            group_size_max=limits.group_size_max,
            fetch_parallel=self._config.fetch_concurrent_max,
            fetch_bytes_per_s=float(self._config.fetch_bytes_per_s_max),
            serve_bytes_per_s=float(self._config.serve_bytes_per_s_max),
        )

    def _is_lonely(self) -> bool:
        return len(self.discovery.peers) < LONELY_PEERS

    def addresses(self) -> tuple[str, ...]:
        """Where others may dial this node."""
        return self._transport.addresses()

    @property
    def ledger(self) -> Ledger:
        """Who sent what."""
        return self.warden.ledger

    async def run_network(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Join the swarm, serve and fetch until cancelled, whatever the trainer does."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.exchange.run)
            await nursery.start(self.discovery.run)
            if self.dht is not None:
                await nursery.start(self.dht.run)
            nursery.start_soon(self._look_at_pool)
            task_status.started()

    async def _look_at_pool(self) -> None:
        while True:
            self._pool_figures = await self._world.run_sync(
                self._pool.statistics, self._world.now_s()
            )
            await trio.sleep(POOL_LOOK_S)

    async def run_rounds(
        self,
        trainer: Trainer,
        engine: RolloutEngine,
        progress: Progress,
        *,
        leaving: trio.Event,
        on_record: OnRecord,
        checkpoints: Checkpoints | None = None,
        hand_over: HandOver | None = None,
    ) -> None:
        """Run rounds from `progress` until the configured number, the time limit or `leaving`.

        Leaving abandons a round that has not reached its update; what was trained is saved.
        A run that reaches its end is evaluated once more; one that is interrupted is not.

        Raises:
            ExceptionGroup: of `ChildFailed`, where the trainer, engine or verifier failed; start
                again from a checkpoint.
        """
        info = await trainer.info()
        sapo = Sapo(
            self._config,
            self._identity.peer_id,
            engine,
            trainer,
            self._verifier,
            self.guard,
            self.exchange,
            progress,
            tokenizer=info.tokenizer,
            now_s=self._world.now_s,
            on_phase=self._enter,
            before_share=checkpoints.reserve if checkpoints else None,
            hand_over=hand_over,
        )
        self.progress = progress
        if progress.round == 0 and self._config.evaluate_every_rounds:
            await unless(leaving, lambda: self._evaluate(sapo, on_record))
        if self._first_round_at is None:
            self._first_round_at = trio.current_time()
        while not leaving.is_set() and not self.is_over(sapo.progress):
            await unless(leaving, lambda: self._round(sapo, on_record))
            done = sapo.progress.round
            every = self._config.evaluate_every_rounds
            if every and done % every == 0:
                await unless(leaving, lambda: self._evaluate(sapo, on_record))
            if done % self._config.checkpoint_every_rounds == 0:
                await self._save(sapo, trainer, checkpoints)
        every = self._config.evaluate_every_rounds
        if every and not leaving.is_set() and sapo.progress.round % every:
            await self._evaluate(sapo, on_record)
        await self._save(sapo, trainer, checkpoints)
        self._enter("leaving")

    def is_over(self, progress: Progress) -> bool:
        """Whether the settings say so. The time limit counts from the first round of this process,
        not from its start."""
        rounds, limit_s = self._config.rounds, self._config.stop_after_s
        if rounds is not None and progress.round >= rounds:
            return True
        if self._first_round_at is None:
            self._first_round_at = trio.current_time()
        return limit_s is not None and trio.current_time() - self._first_round_at >= limit_s

    async def _round(self, sapo: Sapo, on_record: OnRecord) -> None:
        record = await sapo.round()
        self._note_rate(record)
        counters = self._transport.counters
        record = replace(
            record,
            peers=len(self.discovery.peers),
            pool_groups=self._pool_figures.groups,
            pool_bytes=self._pool_figures.bytes,
            bytes_in_total=counters.bytes_in.total(),
            bytes_out_total=counters.bytes_out.total(),
        )
        self.progress, self.last_round = sapo.progress, record
        self._note_sharing(record)
        with trio.CancelScope(shield=True):  # what was trained is told, also when leaving
            await on_record(record)

    def note_work(self, record: WorkDone) -> None:
        """A worker has made a batch."""
        self.last_work = record
        self._note_rate(record)

    def _note_rate(self, record: RoundDone | WorkDone) -> None:
        if record.generate_s > 0:
            rate = record.generated_tokens / record.generate_s
            self._rates = [*self._rates, rate][-TOKENS_PER_S_ROUNDS:]

    def _note_sharing(self, record: RoundDone) -> None:
        """Say it when sharing does not work: a silent J = 0 looks like health and is none."""
        self.notes.pop("sharing", None)
        failures = self.exchange.verifier_failures
        if failures:
            self.notes["verifier"] = (
                f"the verifier of foreign groups failed {failures} times so far"
            )
        found = self._verifier.counters
        if found.overruns:
            self.notes["overruns"] = (
                f"{found.overruns} foreign groups used up their CPU time in the verifier, "
                f"{found.cpu_s['overrun']:.0f} s in all, and {found.turned_away} found no turn"
            )
        wanted = self._config.external_groups
        if wanted and record.external_groups == 0 and record.peers > 0:
            self.notes["sharing"] = (
                f"no usable foreign group in round {record.round} although {record.peers} peers "
                "are connected: they may be starting, or all their groups pass or fail alike"
            )

    async def _evaluate(self, sapo: Sapo, on_record: OnRecord) -> None:
        record = await sapo.evaluate()
        self.progress = sapo.progress
        with trio.CancelScope(shield=True):
            await on_record(record)

    async def _save(self, sapo: Sapo, trainer: Trainer, checkpoints: Checkpoints | None) -> None:
        if checkpoints is not None and sapo.progress.round > 0:
            self._enter("saving")
            with trio.CancelScope(shield=True):
                await checkpoints.save(sapo.progress, trainer)

    def _enter(self, phase: str) -> None:
        self.phase = phase

    def snapshot(
        self, *, model: str, parameters: int, memory_bytes: int, trainer_memory_bytes: int
    ) -> StatusSnapshot:
        """The node as it is now; quick, for the loop answers `swarm-node status` with it."""
        last, progress, counters = self.last_round, self.progress, self._transport.counters
        names = sorted(set(counters.bytes_in) | set(counters.bytes_out))
        snapshot = StatusSnapshot(
            peer_id=self._identity.peer_id,
            run_id=self._config.run.run_id,
            agent=self._world.agent,
            model=model,
            parameters=parameters,
            engine=self._config.engine,
            uptime_s=trio.current_time() - self._started_at,
            phase=self.phase,
            round=progress.round,
            policy_version=last.policy_version if last else 0,
            local_groups=last.local_groups if last else 0,
            external_groups=last.external_groups if last else 0,
            external_groups_wanted=self._config.external_groups,
            own_reward=last.own_reward if last else None,
            held_out_passed=progress.held_out_last,
            held_out_first=progress.held_out_first,
            tokens_per_s=sum(self._rates) / len(self._rates) if self._rates else 0.0,
            pool_groups=self._pool_figures.groups,
            pool_foreign=self._pool_figures.foreign_eligible,
            pool_bytes=self._pool_figures.bytes,
            pool_age_s=self._pool_age_s(),
            mismatch_mean=last.mismatch_mean if last else None,
            mismatch_max=last.mismatch_max if last else None,
            mismatch_k3=last.mismatch_k3 if last else None,
            effective_share=last.effective_share if last else None,
            paused_s=last.paused_s if last else None,
            precision=self.precision,
            accepted=self.ledger.accepted,
            rejected={str(k): v for k, v in sorted(self.ledger.rejected.items())},
            bytes_in=counters.bytes_in.total(),
            bytes_out=counters.bytes_out.total(),
            bytes_by_protocol={n: (counters.bytes_in[n], counters.bytes_out[n]) for n in names},
            memory_bytes=memory_bytes,
            trainer_memory_bytes=trainer_memory_bytes,
            addresses=self._transport.addresses(),
            peers=self._peer_statuses(),
            bans=self._ban_statuses(),
            notes=(*self.notes.values(), *self.discovery.notes),
            groups_quantised=last.groups_quantised if last else 0,
            door=self._door(),
        )
        return self._of_learners_run(snapshot)

    def _door(self) -> PlaceFigures | None:
        """The transport's figures, with whom our own rules refused."""
        door = self._transport.door
        if door is None:
            return None
        refused = {why.replace(" ", "_"): n for why, n in self.warden.refused_connections.items()}
        return replace(door, turned_away=door.turned_away | refused)

    def _of_learners_run(self, snapshot: StatusSnapshot) -> StatusSnapshot:
        """With what a learner or its worker has done, where the run has a learner."""
        rules = self._config.run.learner
        if rules is None:
            return snapshot
        if rules.peer != self._identity.peer_id:
            work = self.last_work
            return replace(
                snapshot,
                role="worker",
                round=work.batch if work else 0,
                policy_version=work.policy_version if work else 0,
                local_groups=work.groups if work else 0,
                external_groups_wanted=0,
                staleness_bound=rules.staleness_max,
                work=work,
            )
        snapshot = replace(
            snapshot,
            role="learner",
            policy_version=version_after(self.progress),
            external_groups_wanted=rules.pool_groups_per_step,
            staleness_bound=rules.staleness_max,
        )
        step = self.last_step
        if step is None:
            return snapshot
        return replace(
            snapshot,
            policy_version=step.version,
            local_groups=step.groups - step.shared_groups,
            external_groups=step.shared_groups,
            own_reward=step.reward if isfinite(step.reward) else None,
            mismatch_k3=step.mismatch_k3,
            effective_share=step.effective_share,
            groups_quantised=step.groups_quantised,
            step=step,
        )

    def _pool_age_s(self) -> float | None:
        oldest_s = self._pool_figures.oldest_eligible_at_s
        return None if oldest_s is None else max(0.0, self._world.now_s() - oldest_s)

    def _ban_statuses(self) -> tuple[BanStatus, ...]:
        now = trio.current_time()
        return tuple(
            BanStatus(ban.subject, ban.is_block, ban.why, ban.until - now, ban.number)
            for ban in self.warden.bans()
        )

    def _peer_statuses(self) -> tuple[PeerStatus, ...]:
        """Connected peers, and those that are gone but broke a rule."""
        connected = self.discovery.peers
        offenders = {p for p in self.ledger.peers() if self.ledger.of(p).rejected}
        statuses = []
        for peer in sorted(connected.keys() | offenders):
            info, account = connected.get(peer), self.ledger.of(peer)
            statuses.append(
                PeerStatus(
                    peer_id=peer,
                    addresses=info.addresses if info else (),
                    agent=info.agent if info else "",
                    groups_accepted=account.accepted,
                    groups_trained=account.trained,
                    rejected={str(k): v for k, v in sorted(account.rejected.items())},
                )
            )
        return tuple(statuses)
