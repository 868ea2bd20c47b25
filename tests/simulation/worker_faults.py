"""Faults around a simulated learner: workers that lie, submissions that come twice, random deaths
and delays."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import ClassVar, Final, TypeVar

import trio

from node.interfaces.engine import Sampling
from node.simulation.simulated_learner import LEARNER
from swarm.errors import RequestTimeout
from swarm.leases.lease_client import Declined, HeldLease, LeaseClient
from swarm.rollouts import Completion
from swarm.wire.messages import SUBMISSIONS_PROTOCOL, WireModel
from tests.simulation.lab_learner import Actor, LabEngine, LabLearner

M = TypeVar("M", bound=WireModel)

REPEATED_SHARE: Final = 0.2  # of submissions
REPEAT_S_MAX: Final = 60.0
DEATH_EVERY_S: Final = 150.0  # in the mean
AWAY_S_MAX: Final = 120.0
STILL_S_MAX: Final = 20.0
FAST_BATCHES: Final = 6  # of a worker that is fast until it is trusted
FAST_FACTOR: Final = 20.0
HELD_S: Final = 3_600.0
HELD_OF_A_KEY: Final = 2  # leases, as many as a worker may have at a time
HOLDER_REST_S: Final = 0.5


class RepeatingSource(LeaseClient):
    """Sends a share of its submissions twice: at once because the answer got lost, or later."""

    async def _ask(
        self, protocol: str, question: WireModel, kind: type[M], bytes_max: int, timeout_s: float
    ) -> M:
        reply = await super()._ask(protocol, question, kind, bytes_max, timeout_s)
        if protocol != SUBMISSIONS_PROTOCOL or self._rng.random() >= REPEATED_SHARE:
            return reply
        if self._rng.random() < 0.5:
            raise RequestTimeout("the answer got lost")
        await trio.sleep(REPEAT_S_MAX * self._rng.random())
        return await super()._ask(protocol, question, kind, bytes_max, timeout_s)


class OldEngine(LabEngine):
    """Never loads a version after its first, and says that it has the newest that was published."""

    _said = 0

    def take(self, version: int, skill: float) -> None:
        """Loads the first only."""
        if not self._said:
            super().take(version, skill)
        self._said = version

    @property
    def said_version(self) -> int:
        """A lie."""
        return self._said

    def reported(self, prompt: str, completion: Completion, versions: Sequence[int]) -> Completion:
        told = super().reported(prompt, completion, versions)
        return replace(told, policy_version=self.said_version, spans=())


class NewestEngine(OldEngine):
    """Says instead that it has the version that the learner has, published or not."""

    @property
    def said_version(self) -> int:
        """A lie."""
        return max(self._said, self.newest())


class InventingEngine(LabEngine):
    """Hands in log-probs that no version gave."""

    def reported(self, prompt: str, completion: Completion, versions: Sequence[int]) -> Completion:
        told = super().reported(prompt, completion, versions)
        return replace(told, logprobs=(-0.01,) * len(told.token_ids))


class HoardingEngine(LabEngine):
    """Is fast until it gets large leases, and then sits on all that it is given."""

    _batches = 0

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        self._batches += 1
        if self._batches == 1:
            self.group_s /= FAST_FACTOR
        if self._batches > FAST_BATCHES:
            await trio.sleep(HELD_S)
        return await super().generate(prompts, completions_each, sampling, seed)


class HoldingSource(LeaseClient):
    """Holds on to what it is given, and asks for more."""

    held: ClassVar[Callable[[], None]]  # told of each that it holds

    async def lease(self, version: int) -> HeldLease | Declined:
        while True:
            lease = await super().lease(version)
            if isinstance(lease, Declined):
                return lease
            type(self).held()
            await trio.sleep(HOLDER_REST_S)


async def take_and_hold(there: LabLearner, keys: Iterator[int], *, rotating: bool) -> None:
    """Hold leases until cancelled, in one place. `keys` are hosts that nobody else uses;
    `rotating`: on to the next as soon as one holds `HELD_OF_A_KEY` leases."""
    for host in keys:
        taken = trio.Event()
        leases: list[int] = []

        def hold(leases: list[int] = leases, taken: trio.Event = taken) -> None:
            leases.append(1)
            if rotating and len(leases) == HELD_OF_A_KEY:
                taken.set()

        source = type("_Holding", (HoldingSource,), {"held": staticmethod(hold)})
        there.actors[host] = Actor(LabEngine, source)
        await there.start(host)
        await taken.wait()
        await there.kill(host)
        await trio.sleep(HOLDER_REST_S)


REPEATING: Final = Actor(LabEngine, RepeatingSource)
LIARS: Final = {
    "version: the newest published": Actor(OldEngine),
    "version: the learner's own": Actor(NewestEngine),
    "log-probs": Actor(InventingEngine),
    "speed": Actor(HoardingEngine),
}


async def storm(there: LabLearner, deaths: list[int]) -> None:
    """Kill workers and have links stand still at random times, until cancelled. At least half of
    the workers are there at any time. `deaths`: one number, counted up."""
    rng: Random = there.world.rng("storm")
    hosts = [host for host in there.transports if host != LEARNER]
    away: set[int] = set()
    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(rng.expovariate(1.0 / DEATH_EVERY_S))
            victim = rng.choice([host for host in hosts if host not in away])
            there.world.clog(rng.choice([LEARNER, *hosts]), STILL_S_MAX * rng.random())
            if 2 * (len(away) + 1) > len(hosts):
                continue
            away.add(victim)
            deaths[0] += 1
            await there.kill(victim)
            nursery.start_soon(come_back, there, victim, AWAY_S_MAX * rng.random(), away)


async def come_back(there: LabLearner, host: int, after_s: float, away: set[int]) -> None:
    """Start a host again some time after it died."""
    await trio.sleep(after_s)
    away.discard(host)
    await there.start(host)
