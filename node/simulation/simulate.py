"""Whole swarms on a laptop: production nodes in a simulated network, judged while they run.

Scenario, number of nodes, profile and seed determine a run. `swarm/simulation/delivery.py` says
which group is due where. Where an honest host's address block is banned for its neighbours, the
host loses connections, as PROTOCOL.md says; then neither delivery nor reach is judged there.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import trio

from node.config import NodeConfig, RunConfig
from node.config.run import LearnerRules
from node.engines.scripted import TOKENIZER
from node.envs.scoring import pose
from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.observe.records import RoundDone
from node.run.checkpoints import Checkpoints
from node.run.node import FETCH_PARALLEL, pool_limits
from node.run.progress import Progress
from node.simulation.scenario import CHAOS, NODES_MAX, chaos_scenario, load_scenario, whole_number
from node.simulation.simulated_learner import LearnerCase, SimulatedLearner, run_of
from node.simulation.simulated_nodes import EPOCH_S, SimulatedNode, build, run, run_inline
from node.simulation.simulated_policy import KeptPolicy
from node.simulation.simulation_report import Replay, Report
from node.verify.assignment import assigned_task
from swarm.errors import ConfigError, TransportError
from swarm.exchange.fetching import ADVERTS_PER_PRODUCER_MAX, BATCHES_FACTOR, OFFER_LIMITS
from swarm.exchange.pool import AddResult, PoolLimits
from swarm.identity import PeerId
from swarm.limits.address_blocks import Block, block_of
from swarm.peers.address_book import AddressBook
from swarm.peers.reputation import Ban
from swarm.rollouts import Completion, FinishReason, GroupId, RolloutGroup, ScoredGroup
from swarm.simulation.delivery import Away, count_deliveries, shortfalls
from swarm.simulation.invariants import (
    BanRules,
    ByteWatch,
    Invariants,
    PublishedGroup,
    WatchedPool,
    limits_of,
    still_on_offer,
)
from swarm.simulation.liar import Liar
from swarm.simulation.lies import CATALOGUE
from swarm.simulation.links import draw_ips, links_of
from swarm.simulation.network_faults import FaultEvent, FaultRunner, draw_faults, plan
from swarm.simulation.world import deterministic_run, open_world, stop_at_once
from swarm.wire.messages import GROUPS_REPLY_BYTES_MAX, ROLLOUTS_PROTOCOL

BOOTSTRAP_HOSTS = 3  # whose addresses every node is given
START_SPREAD_S = 2.0  # within which the nodes start
LOOK_S = 1.0  # between two checks of the invariants
THOROUGH_LOOK_S = 10.0
LIE_PAUSE_S = 3.0  # at most, between two lies
BUDGET_WINDOW_S = 10.0
REST_OF_GROUP_BYTES = 420  # of a signed group, without its completions
REST_OF_COMPLETION_BYTES = 75
MEMORY_DISK = Path("/dev/shm")


def replay_of(
    name: str,
    seed: int | str,
    *,
    nodes: int | str | None = None,
    profile: str | None = None,
) -> Replay:
    """A run by the name of a scenario or file, with numbers as they were typed."""
    number = whole_number("seed", seed, 0, 2**63 - 1)
    scenario = chaos_scenario(number) if name == CHAOS else load_scenario(name)
    if name == CHAOS and (nodes is not None or profile is not None):
        raise ConfigError("--scenario chaos: the seed decides nodes and profile; leave them out")
    wanted = scenario.nodes if nodes is None else whole_number("nodes", nodes, 2, NODES_MAX)
    if wanted <= scenario.late_nodes:
        raise ConfigError(f"--nodes {wanted}: {scenario.late_nodes} of them join late; try more")
    chosen = scenario.profile if profile is None else profile
    links_of(chosen, 1)
    return Replay(name, scenario, wanted, number, chosen)


def simulate(replay: Replay, show: Callable[[float], None] = lambda share: None) -> Report:
    """`show` gets the share of the virtual time that is over, now and then."""
    place = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="swarm-", dir=place) as disks:
        report: Report = deterministic_run(
            _Simulation(replay, Path(disks), show).run, seed=replay.seed
        )
    report.real_s = time.perf_counter() - started
    return report


def planned_faults(replay: Replay) -> list[FaultEvent]:
    """The faults of a run with their times, drawn before it begins."""
    scenario, rng = replay.scenario, Random(f"{replay.seed}/faults")
    is_drawn = replay.name == CHAOS
    faults = draw_faults(rng, scenario.duration_s) if is_drawn else scenario.faults
    present = range(replay.nodes - scenario.late_nodes)
    return plan(faults, present, scenario.duration_s, rng)


class SimulatedPolicy(KeptPolicy):
    """A scripted policy with completions of a given length in tokens."""

    def __init__(
        self,
        tokens: int,
        generate_s: float,
        train_s: float,
        on_trained: Callable[[TrainingGroup], None],
    ) -> None:
        super().__init__(skill=0.5, generate_s=generate_s, train_s=train_s)
        self._tokens = tokens
        self._on_trained = on_trained

    def _complete(self, prompt: str, sampling: Sampling, rng: Random) -> Completion:
        short = super()._complete(prompt, sampling, rng)
        padding = max(0, self._tokens - len(short.token_ids))
        return replace(
            short,
            token_ids=short.token_ids + (32,) * padding,
            logprobs=short.logprobs + (-0.5,) * padding,
        )

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        for group in groups:
            if not group.own_tokens:
                self._on_trained(group)
        return await super().train(groups)


@dataclass(eq=False, slots=True)
class _Host:
    """One honest host over all its starts."""

    number: int
    disk: Path
    generate_s: float
    train_s: float
    starts: int = 0
    nursery: trio.Nursery | None = None  # of its tasks, while it is up
    node: SimulatedNode | None = None
    served: ByteWatch | None = None
    fetched: ByteWatch | None = None


# Long: every kind of fault acts on the same hosts and links.
class _Simulation:
    """One run. `run` is its body."""

    def __init__(self, replay: Replay, disks: Path, show: Callable[[float], None]) -> None:
        self._replay = replay
        self._show = show
        self._scenario = replay.scenario
        self._disks = disks
        swarm = self._scenario.swarm
        others = replay.nodes - 1
        wanted = swarm.external_groups
        self._wants_all = wanted is None
        # twice what the others make, so that the stock never ends the fetching
        external = min(1024, 2 * swarm.local_groups * others) if wanted is None else wanted
        share = (swarm.group_bytes - REST_OF_GROUP_BYTES) // swarm.group_size
        self._tokens = max(1, (share - REST_OF_COMPLETION_BYTES) // 8)
        self._config = NodeConfig(
            run=RunConfig.model_validate(
                {
                    "name": "simulated",
                    "environments": [{"name": "scripted_sum", "parameters": {"max": 9999}}],
                    "sampling": {"max_new_tokens": max(8, self._tokens)},
                    "limits": {
                        "record_life_s": swarm.record_life_s,
                        "group_size_max": max(8, swarm.group_size),
                    },
                    "held_out": {"tasks": 1},
                }
            ),
            engine="scripted",
            local_groups=swarm.local_groups,
            external_groups=external,
            group_size=swarm.group_size,
            seed=replay.seed,
            evaluate_every_rounds=0,
        )
        self._limits = limits_of(
            replay.nodes - 1 + self._scenario.liars + self._scenario_hosts,
            BATCHES_FACTOR * FETCH_PARALLEL,
            PoolLimits().groups_max,
            external,
        )
        self._learner: SimulatedLearner | None = None
        self._report = Report(replay)
        self._cold_bytes: Counter[str] = Counter()
        self._bootstrap = range(min(BOOTSTRAP_HOSTS, replay.nodes))
        self._published: dict[GroupId, PublishedGroup] = {}
        self._arrived: dict[tuple[GroupId, int], float] = {}
        self._came_up: list[tuple[float, int]] = []
        self._first_foreign: dict[int, list[float]] = {}
        self._banned_blocks: set[PeerId | Block] = set()

    # --- the course of a run ----------------------------------------------------------------

    async def run(self) -> Report:
        replay, scenario = self._replay, self._scenario
        liars = range(replay.nodes, replay.nodes + scenario.liars)
        links = links_of(replay.profile, liars.stop + self._scenario_hosts)
        async with open_world(
            replay.seed, len(links), links[0], dict(enumerate(links)), self._ips(len(links))
        ) as self._world:
            learner_hosts = range(liars.stop, len(links))
            case = self._with_learner(learner_hosts)
            limits = self._config.run.limits
            self._invariants = Invariants(
                self._config.run.run_id, limits.record_life_s, limits.clock_skew_s, self._now_s
            )
            self._hosts = [self._host(number) for number in range(replay.nodes)]
            self._honest = [self._world.peer_id(host.number) for host in self._hosts]
            self._ban_rules = BanRules(
                frozenset((*self._honest, *map(self._world.peer_id, learner_hosts))),
                Counter(block_of(self._world.ips[number]) for number in liars),
            )
            self._events = planned_faults(replay)
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._look)
                for number in liars:
                    self._nursery.start_soon(self._lie, number)
                if case is not None:
                    self._nursery.start_soon(self._start_learner, case, learner_hosts)
                await self._live()
                self._check_reach()
                self._conclude()
                for host in self._hosts:  # else what they still answer outlives their pools
                    if host.nursery is not None:
                        self._world.crash(host.number)
                for number in learner_hosts:
                    self._world.crash(number)
                self._nursery.cancel_scope.cancel()
        return self._report

    def _ips(self, hosts: int) -> tuple[str, ...]:
        """Liars that share a block share it with the last honest host of the start."""
        together: tuple[int, ...] = ()
        if self._scenario.liars_share_block:
            present = self._replay.nodes - self._scenario.late_nodes
            together = (present - 1, *range(self._replay.nodes, hosts - self._scenario_hosts))
        return draw_ips(hosts, Random(f"{self._replay.seed}/addresses"), together)

    @property
    def _scenario_hosts(self) -> int:
        """The number of hosts of a learner and its workers, after all others."""
        return 0 if self._scenario.learner is None else 1 + self._scenario.learner.workers

    def _with_learner(self, hosts: range) -> LearnerCase | None:
        """Give the run a learner if the scenario has one; nodes still learn by themselves."""
        table = self._scenario.learner
        if table is None:
            return None
        rules = LearnerRules(
            peer=str(self._world.peer_id(hosts.start)),
            rescored_share=0.0,
            **table.model_dump(include=set(LearnerRules.model_fields)),
        )
        run = run_of(self._world, rules, self._config.run, hosts.start)
        self._config = self._config.model_copy(update={"run": run, "role": "node"})
        return LearnerCase(
            rules, (table.generate_s,) * table.workers, table.train_s, table.version_bytes
        )

    async def _start_learner(self, case: LearnerCase, hosts: range) -> None:
        self._learner = SimulatedLearner(
            *(case, self._world, self._disks / "learner", self._nursery, self._config.run),
            first=hosts.start,
            peers=tuple(map(self._address, self._bootstrap)),
        )
        for number in hosts:
            await self._learner.start(number)

    async def _live(self) -> None:
        scenario = self._scenario
        start_s = trio.current_time()
        if scenario.warm_up_s:
            self._world.network.at(start_s + scenario.warm_up_s, self._warm_up)
        rng = self._world.rng("starts")
        late = self._replay.nodes - scenario.late_nodes
        async with trio.open_nursery() as nursery:
            for host in self._hosts:
                at_s = scenario.late_s if host.number >= late else 0.0
                at_s += START_SPREAD_S * rng.random()
                nursery.start_soon(self._restart, host.number, at_s)
            runner = FaultRunner(self._world, self._events, self._crash, self._restart)
            nursery.start_soon(runner.run)
        await trio.sleep_until(start_s + scenario.duration_s)
        for host in self._hosts:
            if host.node is not None:
                host.node.leaving.set()
        with trio.move_on_after(scenario.settle_s):
            while self._missing():  # noqa: ASYNC110 - what is waited for sets no event
                await trio.sleep(LOOK_S)

    def _warm_up(self) -> None:
        """Count bytes and rounds from here on."""
        self._cold_bytes = self._honest_traffic()
        self._report.rounds = self._report.drawn = 0

    def _honest_traffic(self) -> Counter[str]:
        """Bytes that honest hosts have sent, by protocol or topic."""
        total: Counter[str] = Counter()
        for peer in self._honest:
            total.update(self._world.network.traffic_out.get(peer, Counter()))
        return total

    async def _restart(self, number: int, at_s: float = 0.0) -> None:
        await trio.sleep_until(at_s)
        with self._world.on(number):
            await self._nursery.start(self._run_host, self._hosts[number])

    async def _lie(self, number: int) -> None:
        """A liar joins, and tells lie after lie until the faults end."""
        world = self._world
        liar = Liar(
            identity=world.identities[number],
            transport=world.join(number),
            run_id=self._config.run.run_id,
            make_group=self._honest_group,
            now_s=self._now_s,
            rng=world.rng(f"liar/{number}"),
            victim=world.identities[0],
            group_size_max=self._config.run.limits.group_size_max,
        )
        await liar.serve()
        end_s = trio.current_time() + self._scenario.duration_s
        await trio.sleep(2 * START_SPREAD_S)
        while trio.current_time() < end_s:
            for host in self._hosts:
                with suppress(TransportError):
                    await liar.transport.connect(self._address(host.number), timeout_s=3.0)
            lie = liar.rng.choice(CATALOGUE)
            world.record(f"lie {number} {lie.name}")
            with trio.move_on_at(end_s):
                await lie.tell(liar)
            self._report.lies[lie.name] += 1
            await trio.sleep(LIE_PAUSE_S * liar.rng.random())

    def _honest_group(self, producer: PeerId, index: int) -> RolloutGroup:
        """A group that would pass every check, from which lies are made."""
        run = self._config.run
        task, created_at_s = assigned_task(run, producer, index), int(self._now_s())
        answer = pose(task, run.limits.prompt_chars_max).answer
        completions = tuple(
            Completion(text, tuple(text.encode()), (-0.1,) * len(text), FinishReason.STOP, 1)
            for text in ("1", "23", "4", answer)
        )
        return RolloutGroup(
            run_id=run.run_id,
            producer=producer,
            round=1,
            task=task,
            completions=completions,
            tokenizer=TOKENIZER,
            temperature=1.0,
            top_p=1.0,
            created_at_s=created_at_s,
            expires_at_s=created_at_s + run.limits.record_life_s,
        )

    async def _crash(self, number: int) -> None:
        host = self._hosts[number]
        if host.nursery is not None:
            self._world.crash(number)
            stop_at_once(host.nursery)
            host.nursery = None
            self._count_rejected(host)

    async def _run_host(
        self, host: _Host, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """One start of a host, until it is killed; the first of two at the same instant."""
        if host.nursery is not None:
            task_status.started()
            return
        self._came_up.append((trio.current_time(), host.number))
        async with trio.open_nursery() as nursery:
            host.nursery = nursery
            nursery.start_soon(self._run_judged, host)
            task_status.started()

    async def _run_judged(self, host: _Host) -> None:
        """Run a node; its end by itself counts as a broken rule."""
        try:
            await self._run_node(host)
        except Exception as error:  # noqa: BLE001 - judged, whatever it is
            self._invariants.violate(host.number, "node", f"ended by {error!r}")
            self._world.crash(host.number)
            host.node = host.nursery = None

    async def _run_node(self, host: _Host) -> None:
        host.starts += 1
        config = self._config.model_copy(update={"data_dir": host.disk})
        with WatchedPool(
            host.disk / "pool.sqlite",
            pool_limits(config),
            partial(self._on_stored, host.number),
            self._on_refused,
        ) as pool:
            host.node = build(
                self._world,
                host.number,
                config,
                [self._address(n) for n in self._bootstrap if n != host.number],
                pool=pool,
                book=AddressBook.load(host.disk / "peers.json"),
                start=host.starts,
            )
            host.node.node.gater.on_ban = partial(self._on_ban, host)
            slack = float(GROUPS_REPLY_BYTES_MAX)
            host.served = ByteWatch(config.serve_bytes_per_s_max, slack, BUDGET_WINDOW_S)
            slack *= FETCH_PARALLEL
            host.fetched = ByteWatch(config.fetch_bytes_per_s_max, slack, BUDGET_WINDOW_S)
            policy, progress, checkpoints = self._resume(host)
            await run(
                *(host.node, policy, policy, self._on_record),
                progress=progress,
                checkpoints=checkpoints,
            )

    def _resume(self, host: _Host) -> tuple[SimulatedPolicy, Progress, Checkpoints]:
        """As the production node does after its start."""
        trained = partial(self._on_trained, host.number)
        policy = SimulatedPolicy(self._tokens, host.generate_s, host.train_s, trained)
        checkpoints = Checkpoints(host.disk / "checkpoints", 2, {}, run_inline)
        saved = checkpoints.latest()
        if saved is not None:
            policy.restore(saved.directory)
        return policy, checkpoints.progress_after(saved), checkpoints

    def _host(self, number: int) -> _Host:
        swarm, rng = self._scenario.swarm, self._world.rng(f"host/{number}")
        disk = self._disks / str(number)
        disk.mkdir()
        slower = 1.0 + swarm.unevenness * (2.0 * rng.random() - 1.0)
        return _Host(number, disk, swarm.generate_s * slower, swarm.train_s * slower)

    def _address(self, number: int) -> str:
        return self._world.network.address(self._world.peer_id(number))

    def _now_s(self) -> float:
        return EPOCH_S + trio.current_time()

    # --- what nodes do ----------------------------------------------------------------------

    async def _on_record(self, record: object) -> None:
        self._world.record(str(record))
        if isinstance(record, RoundDone):
            self._report.rounds += 1
            self._report.drawn += record.external_groups

    def _on_trained(self, host: int, group: TrainingGroup) -> None:
        drawn = [(c.text, c.logprobs[:16]) for c in group.completions]
        self._invariants.trained(host, repr((group.prompt, drawn)).encode())

    def _on_stored(self, host: int, record: bytes, verified: ScoredGroup, own: bool) -> None:
        now_s, group = trio.current_time(), verified.group
        self._invariants.stored(host, record, verified.group_id)
        self._world.record(f"stored {host} {verified.group_id.hex()}")
        if own:
            self._report.groups += 1
            self._published[verified.group_id] = PublishedGroup(
                verified.group_id, host, group.round, now_s, group.expires_at_s - EPOCH_S
            )
        else:
            self._arrived[verified.group_id, host] = now_s
            self._first_foreign.setdefault(host, []).append(now_s)

    def _on_refused(self, verified: ScoredGroup, result: AddResult) -> None:
        self._report.fetched_again += result is AddResult.KNOWN

    # --- what must hold ---------------------------------------------------------------------

    async def _look(self) -> None:
        """Look at all live hosts now and then."""
        next_thorough_s = THOROUGH_LOOK_S
        while True:
            await trio.sleep(LOOK_S)
            self._show(min(1.0, trio.current_time() / self._scenario.duration_s))
            thorough = trio.current_time() >= next_thorough_s
            if thorough:
                next_thorough_s += THOROUGH_LOOK_S
            for host in self._hosts:
                if host.nursery is not None and host.node is not None:
                    self._look_at(host, host.node, thorough=thorough)
            if thorough and (learner := self._learner) is not None:
                for number, node in learner.nodes.items():
                    self._invariants.check_collections(number, node, self._limits)
                detail = f"trained on groups that it should not: {list(learner.stale)}"
                self._invariants.require(not learner.stale, learner.first, "staleness", detail)

    def _look_at(self, host: _Host, node: SimulatedNode, *, thorough: bool) -> None:
        now_s, counters = trio.current_time(), node.transport.counters
        assert host.served is not None
        assert host.fetched is not None
        for watch, total, what in (
            (host.served, counters.bytes_out[ROLLOUTS_PROTOCOL], "served"),
            (host.fetched, counters.bytes_in[ROLLOUTS_PROTOCOL], "fetched"),
        ):
            excess = watch.excess(total, now_s)
            detail = f"{what} {excess:.0f} bytes too many"
            self._invariants.require(excess == 0, host.number, "budget", detail)
        for ban in node.node.gater.bans():  # those that were not told of as well
            self._invariants.check_ban(host.number, ban, self._ban_rules)
        if thorough:
            self._invariants.check_pool(host.number, node.pool)
            for root in (node.node, node.rounds):
                self._invariants.check_collections(host.number, root, self._limits)

    async def _on_ban(self, host: _Host, ban: Ban) -> None:
        """A gater banned somebody just now."""
        await trio.lowlevel.checkpoint()
        self._world.record(f"ban {host.number} {ban.subject}")
        self._report.bans["block" if ban.is_block else "peer"] += 1
        self._invariants.check_ban(host.number, ban, self._ban_rules)
        if ban.is_block:
            self._banned_blocks.add(ban.subject)

    @property
    def _judged(self) -> list[int]:
        """Hosts that nobody has shut out for what their neighbours did."""
        ips = self._world.ips
        numbers = (host.number for host in self._hosts)
        return [each for each in numbers if block_of(ips[each]) not in self._banned_blocks]

    def _wanted(self) -> list[tuple[PublishedGroup, _Host]]:
        """The groups of others, still on offer, that should have come to each live host."""
        if not self._wants_all:
            return []
        judged = self._judged
        on_offer = still_on_offer(
            self._published.values(), OFFER_LIMITS.rounds_max, ADVERTS_PER_PRODUCER_MAX
        )
        now_s = trio.current_time()
        live = [h for h in self._hosts if h.nursery is not None and h.number in judged]
        return [
            (each, host)
            for each in on_offer
            for host in live
            if each.expires_at_s > now_s and each.host != host.number and each.host in judged
        ]

    def _missing(self) -> list[tuple[PublishedGroup, _Host]]:
        stored = self._invariants.has_stored
        return [(each, h) for each, h in self._wanted() if not stored(h.number, each.group_id)]

    def _check_reach(self) -> None:
        """After healing, everything published that is still on offer has come everywhere."""
        for host in self._hosts:
            up = host.nursery is not None
            self._invariants.require(up, host.number, "reach", "is not up after healing")
        if not self._scenario.settle_s or not self._wants_all:
            return
        pairs = self._report.reach_pairs = len(self._wanted())
        self._invariants.checks["reach"] += pairs
        if not pairs:
            self._invariants.violate(0, "reach", "nothing was left on offer that could be judged")
        for each, host in self._missing():
            self._invariants.violate(
                host.number,
                "reach",
                f"group {each.group_id.hex()[:16]} of host {each.host}, round {each.round}, "
                f"shared at {each.at_s:.1f} s, never came",
            )

    # --- the figures ------------------------------------------------------------------------

    def _conclude(self) -> None:
        report, world, network = self._report, self._world, self._world.network
        report.deliveries = count_deliveries(
            self._published.values(),
            self._arrived,
            self._judged,
            self._away(),
            self._scenario.patience_s,
            trio.current_time(),
        )
        report.shortfalls = shortfalls(report.deliveries, len(self._judged))
        for at_s, number in self._came_up:
            came = [s for s in self._first_foreign.get(number, ()) if s >= at_s]
            report.comebacks_s.append(came[0] - at_s if came else inf)
        report.comebacks_s.sort()
        report.bytes_by_kind = self._honest_traffic() - self._cold_bytes
        report.gossip_duplicates = network.gossip.duplicates
        for host in self._hosts:
            self._count_rejected(host)
        if self._learner is not None:
            report.steps = len(self._learner.steps)
            report.step_groups = sum(step.groups for step in self._learner.steps)
            report.step_shared = sum(step.shared_groups for step in self._learner.steps)
        report.faults.update(event.kind for event in self._events)
        report.violations = self._invariants.violations
        report.violation_count = self._invariants.count
        report.checks = self._invariants.checks
        report.virtual_s = trio.current_time()
        report.events, report.trace_hash = world.events, world.trace_hash

    def _count_rejected(self, host: _Host) -> None:
        """At the end of each of a host's starts."""
        if host.node is not None:
            self._report.rejected.update(host.node.node.ledger.rejected)
            host.node = None

    def _away(self) -> Away:
        late = self._replay.nodes - self._scenario.late_nodes
        joined_s = {
            host.number: START_SPREAD_S + (self._scenario.late_s if host.number >= late else 0.0)
            for host in self._hosts
        }
        return Away.of(joined_s, self._events)
