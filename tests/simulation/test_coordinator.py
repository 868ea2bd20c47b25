"""A coordinator at work, over simulated links: production code but for training and generation,
which take their time, and for who starts machines."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import trio

from coordinator.fleet_file import Fleet, LearnerCosts, Machine
from coordinator.loop import Coordinator
from coordinator.model.activation import Settings
from coordinator.model.pacing import PacingRules
from coordinator.providers.base import Condition, Instance, Provider, ProviderFailed
from coordinator.providers.static import StaticProvider
from node.config import RunConfig
from node.config.run import LearnerRules
from node.simulation.simulated_learner import LEARNER, run_of
from node.simulation.simulated_nodes import EPOCH_S, run_inline
from swarm.identity import PeerId
from swarm.leases.coordination import ControlClient, ReportedWorker, pack_peers
from swarm.leases.lease_table import LeaseRules
from swarm.peers.reputation import Ledger
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from swarm.storage import Runtime
from swarm.wire.messages import SetPlan
from tests.simulation.lab_learner import LabCase, LabLearner
from tests.wire_samples import ALICE

LINK = LinkProfile(latency_s=0.04, up_bytes_per_s=2e6, down_bytes_per_s=1e7)
RUN = RunConfig.model_validate(
    {"name": "fed", "environments": [{"name": "scripted_sum", "parameters": {"max": 9999}}]}
)
RULES = LearnerRules(
    peer=ALICE.peer_id, staleness_max=4, groups_per_step=8, group_size=4, rescored_share=0.0
)
LEASES = LeaseRules(target_s=8.0, first_s=10.0, life_s_min=20.0, groups_max=8)
TRAIN_S = 3.0  # 8 groups in 3 s: 2.7 a second
GENERATE_S = {"a": 0.8, "b": 0.85, "c": 0.9, "dear": 0.5}
PRICES = {"a": 0.04, "b": 0.05, "c": 0.06, "dear": 0.9}
SETTINGS = Settings(
    margin=1.05, shortage_s=8, saving_s=20, dwell_s=30, cooldown_s=40, join_s_max=60
)
BEAT_S = 2.0


class Machines:
    """Starts simulated workers; see `Provider`."""

    def __init__(self, there: LabLearner, hosts: Mapping[str, int]) -> None:
        self._there = there
        self._hosts = hosts
        self.started: list[str] = []
        self.released: list[str] = []
        self.broken: set[str] = set()
        self.release_s = 0.0
        self._running: set[str] = set()

    def use(self, fleet: Fleet) -> None:
        pass

    def owns(self, peer: PeerId) -> bool:
        return any(self._there.world.peer_id(host) == peer for host in self._hosts.values())

    async def look(self, reported: Iterable[ReportedWorker]) -> Mapping[str, Instance]:
        await trio.lowlevel.checkpoint()
        found = {}
        for name in self._running:
            host = self._hosts[name]
            gone = self._there.gone[host].is_set()
            condition = Condition.FAILED if gone else Condition.UP
            found[name] = Instance(name, condition, PeerId(self._there.world.peer_id(host)))
        return found

    async def start(self, machine: Machine) -> None:
        if machine.name in self.broken:
            raise ProviderFailed(f"{machine.name} is sold out")
        host = self._hosts[machine.name]
        if machine.name in self._running and not self._there.gone[host].is_set():
            return
        self.started.append(machine.name)
        self._running.add(machine.name)
        await self._there.start(host)

    async def release(self, name: str) -> None:
        self.released.append(name)
        await trio.sleep(self.release_s)
        self._running.discard(name)
        if not self._there.gone[self._hosts[name]].is_set():
            await self._there.kill(self._hosts[name])


@dataclass
class Stage:
    """One coordinator and what it works on."""

    there: LabLearner
    machines: Machines
    fleet: Fleet
    said: list[str] = field(default_factory=list)
    drained: set[str] = field(default_factory=set)
    coordinator: Coordinator | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def host(self, name: str) -> int:
        return 1 + list(GENERATE_S).index(name)

    def peer(self, name: str) -> str:
        return str(self.there.world.peer_id(self.host(name)))

    def at_work(self) -> set[str]:
        view = self.coordinator.view if self.coordinator else None
        return {row.name for row in view.rows if row.phase == "active"} if view else set()

    @asynccontextmanager
    async def coordinated(self):
        """A coordinator, as long as the block; what it started stays."""
        client = ControlClient(
            self.there.transports[COORDINATOR], self.ledger, PeerId(self.there.world.peer_id(0))
        )
        providers: dict[str, Provider] = {
            "local": self.machines,
            "static": StaticProvider(self.fleet),
        }
        async with trio.open_nursery() as nursery:
            self.coordinator = Coordinator(
                self.fleet,
                providers,
                client,
                nursery,
                Runtime(lambda: EPOCH_S + trio.current_time(), Random(0), run_inline),
                lambda: frozenset(self.drained),
                self.said.append,
            )

            async def beat() -> None:
                while True:
                    assert self.coordinator is not None
                    await self.coordinator.beat()
                    await trio.sleep(BEAT_S)

            nursery.start_soon(beat)
            yield self.coordinator
            nursery.cancel_scope.cancel()

    async def until(self, what: Callable[[], bool], limit_s: float = 600.0) -> None:
        with trio.fail_after(limit_s):
            while not what():  # noqa: ASYNC110 - of no one event
                await trio.sleep(1.0)


COORDINATOR = 1 + len(GENERATE_S)


def play(
    directory: Path,
    scene: Callable[[Stage], Awaitable[None]],
    coordinator: PeerId | None = None,
    seed: int = 7,
) -> Stage:
    """`coordinator`: whom the learner takes for its own; None: the one on the stage."""
    case = LabCase(RULES, tuple(GENERATE_S.values()), train_s=TRAIN_S, leases=LEASES)
    machines = tuple(
        Machine(name, price_per_h=PRICES[name], groups_per_s=0.9 / seconds, generation_s=2.0)
        for name, seconds in GENERATE_S.items()
    )
    fleet = Fleet(
        Path("run.toml"),
        ("/ip4/1.2.3.4/tcp/1/p2p/x",),
        machines,
        LearnerCosts(price_per_h=1.0, train_s=TRAIN_S),
        SETTINGS,
        PacingRules(),
    )
    found: list[Stage] = []

    async def main() -> None:
        async with (
            open_world(seed, COORDINATOR + 1, LINK) as world,
            trio.open_nursery() as nursery,
        ):
            there = LabLearner(case, world, directory, nursery, run_of(world, RULES, RUN))
            there.coordinator = coordinator or PeerId(world.peer_id(COORDINATOR))
            await there.start(LEARNER)
            transport = there.transports[COORDINATOR] = world.join(COORDINATOR)
            there.gone[COORDINATOR] = trio.Event()
            await transport.connect(there.transports[LEARNER].addresses()[0])
            hosts = {name: 1 + place for place, name in enumerate(GENERATE_S)}
            stage = Stage(there, Machines(there, hosts), fleet)
            found.append(stage)
            await scene(stage)
            nursery.cancel_scope.cancel()

    deterministic_run(main, seed=seed)
    (stage,) = found
    assert all(step.staleness_max <= RULES.staleness_max for step in stage.there.steps)
    assert not stage.ledger.rejected
    return stage


@pytest.mark.long
def test_the_dearest_comes_in_for_one_that_is_lost_and_goes_again(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.coordinated():
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"})
            await trio.sleep(60.0)
            assert stage.at_work() == {"a", "b", "c"}
            assert "dear" not in stage.machines.started
            await stage.there.kill(stage.host("a"))
            await stage.until(lambda: "dear" in stage.at_work())
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"})
            await trio.sleep(60.0)
            assert stage.at_work() == {"a", "b", "c"}
            view = stage.coordinator.view if stage.coordinator else None
            assert view is not None
            assert view.predicted is not None
            assert view.report is not None
            assert abs(view.report.pace.idle_share - (1 - view.predicted.utilisation)) < 0.1

    stage = play(tmp_path, scene, seed=1)
    assert stage.machines.released == ["dear"]
    assert stage.machines.started.count("dear") == 1
    assert stage.machines.started.count("a") == 2


def test_nobody_is_started_twice_by_a_coordinator_that_comes_back(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.coordinated():
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"})
            await stage.until(lambda: len(stage.there.steps) > 3)
        before, step = list(stage.machines.started), stage.there.steps[-1].step
        await trio.sleep(60.0)  # nobody coordinates, and the learner goes on
        assert stage.there.steps[-1].step > step + 10
        async with stage.coordinated():
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"})
            await trio.sleep(60.0)
        assert stage.machines.started == before
        assert not stage.machines.released

    stage = play(tmp_path, scene)
    assert "found at work: a, b, c" in stage.said


def test_who_is_drained_hands_in_and_is_replaced(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.coordinated():
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"})
            stage.drained.add("b")
            await stage.until(lambda: "b" in stage.machines.released)
            await stage.until(lambda: stage.at_work() == {"a", "c", "dear"})
            assert stage.there.up is not None
            assert "expired" not in stage.there.up.intake.counts().discarded
            stage.machines.release_s = 30.0
            stage.drained.clear()
            await stage.until(lambda: stage.at_work() >= {"a", "b", "c"})
            stage.drained.add("b")
            await stage.until(lambda: stage.machines.released.count("b") == 2)
            stage.drained.clear()  # while it is being released
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"})

    play(tmp_path, scene)


@pytest.mark.long
def test_a_machine_that_does_not_start_is_left_alone_for_a_while(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.machines.broken.add("b")
        async with stage.coordinated():
            await stage.until(lambda: stage.at_work() == {"a", "c", "dear"})
            tries = stage.said.count("b did not start: b is sold out")
            await trio.sleep(100.0)
            assert stage.said.count("b did not start: b is sold out") <= tries + 3
            stage.machines.broken.clear()
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"}, 2_000.0)

    play(tmp_path, scene)


def test_a_volunteer_is_measured_then_counts_and_costs_nothing(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.fleet = replace(stage.fleet, machines=stage.fleet.machines[:3])
        async with stage.coordinated():
            await stage.until(lambda: stage.at_work() == {"a", "b", "c"})
            await stage.there.start(stage.host("dear"))  # it comes by itself
            volunteer = stage.peer("dear")
            stage.machines.owns = lambda peer: (
                str(peer) != volunteer
                and (  # type: ignore[method-assign]
                    Machines.owns(stage.machines, peer)
                )
            )
            await stage.until(lambda: volunteer in stage.at_work())
            await stage.until(lambda: len(stage.at_work()) < 4)  # some rent is saved
            assert volunteer in stage.at_work()

    play(tmp_path, scene)


def test_who_delivered_before_makes_the_first_steps_after_a_restart(tmp_path: Path) -> None:
    """A restarted learner knows what it delivered, and nobody knows what a step takes."""

    async def scene(stage: Stage) -> None:
        anna = replace(
            stage.fleet.machines[0], name="anna", provider="static", peer=stage.peer("a")
        )
        costs = LearnerCosts(price_per_h=1.0)  # and no guess of a step
        stage.fleet = replace(stage.fleet, machines=(anna,), learner=costs)
        stage.machines.owns = lambda peer: False  # type: ignore[method-assign]
        learner = stage.there
        await learner.start(stage.host("a"))
        async with stage.coordinated():
            await stage.until(lambda: len(learner.steps) > 3)
        await learner.kill(LEARNER)
        await learner.kill(stage.host("a"))
        step = learner.steps[-1].step
        await learner.start(LEARNER)
        transport = learner.transports[COORDINATOR]
        await transport.connect(learner.transports[LEARNER].addresses()[0])
        async with stage.coordinated():
            await trio.sleep(10.0)  # it was not there when the coordinator looked first
            await learner.start(stage.host("a"))
            await stage.until(lambda: learner.steps[-1].step > step + 3, 200.0)

    play(tmp_path, scene)


def test_nobody_else_may_coordinate(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        async with stage.coordinated() as coordinator:
            await trio.sleep(10.0)
            assert coordinator.view is not None
            assert not coordinator.view.reachable
            assert not stage.machines.started

    play(tmp_path, scene, PeerId(ALICE.peer_id))


def test_a_plan_outlives_the_learner_and_an_older_one_changes_nothing(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        client = ControlClient(
            stage.there.transports[COORDINATOR], Ledger(), PeerId(stage.there.world.peer_id(0))
        )
        learner = stage.there

        def plan(number: int, name: str) -> SetPlan:
            return SetPlan(
                type="plan",
                number=number,
                standby=pack_peers([PeerId(stage.peer(name))]),
                pacing=2,
                publish_every=1,
                credits=20,
            )

        assert (await client.set_plan(plan(5, "a"))).number == 5
        reply = await client.set_plan(plan(4, "b"))
        assert reply.number == 5
        assert reply.detail
        for _ in range(2):
            assert learner.up is not None
            assert learner.up.intake.standby == {stage.peer("a")}
            account = learner.up.intake.book.account
            assert (account.pacing, account.rules.groups_max) == (2, 20)
            assert learner.up.learner.publish_every == 1
            await learner.kill(LEARNER)
            await learner.start(LEARNER)

    play(tmp_path, scene)
