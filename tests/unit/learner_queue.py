"""A learner, its rollout workers and their buffer as a queue: what the capacity model is held to.

Nothing of the model is in here: events, credits and versions alone. A worker has as many slots as
groups it generates at once; a slot takes a credit, generates for a while, and hands in its group,
which counts as of the version that its worker had when it began. The learner takes the oldest R
admissible groups, trains, and hands the weights out every so many steps; a worker has them when
its own transfer is through.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class QueuedWorker:
    """`slots` groups at once, each taking `generation_s`; new weights take `transfer_s`."""

    slots: int
    generation_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class Queue:
    """One run of it. Times in seconds, `inflight_max` in groups: generating and waiting together.

    `paused`: nothing is generated at a worker from publication until the weights are there.
    `staleness_max` None: nothing is ever refused. `jitter` 0.3: generation takes 0.7 to 1.3 times
    as long.
    """

    groups_per_step: int
    train_s: float
    period_steps: int
    workers: Sequence[QueuedWorker]
    inflight_max: int
    paused: bool = False
    staleness_max: int | None = None
    jitter: float = 0.0
    steps: int = 400
    warm_up_steps: int = 60
    seed: int = 0


@dataclass(slots=True)
class Seen:
    """What happened after the warm-up."""

    utilisation: float = 0.0
    step_s: float = 0.0
    staleness_worst: int = 0
    consumed: int = 0
    refused: int = 0

    @property
    def refused_share(self) -> float:
        return self.refused / max(self.refused + self.consumed, 1)


@dataclass(slots=True)
class _Slot:
    worker: int
    version: int = 0
    begun: int = -1  # which group this is, in the order of their beginnings; -1: none
    ends_s: float = 0.0
    epoch: int = 0  # a finish that was planned before a pause is no finish


class _Run:
    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.rng = Random(queue.seed)
        self.events: list[tuple[float, int, str, int, int]] = []
        self.order = itertools.count()
        self.begun = itertools.count()
        self.now_s = 0.0
        self.version = 0
        self.training = False
        self.credits = queue.inflight_max
        self.has = [0] * len(queue.workers)  # the version of each worker
        self.paused_from_s = [-1.0] * len(queue.workers)
        self.slots = [
            _Slot(number) for number, each in enumerate(queue.workers) for _ in range(each.slots)
        ]
        self.rng.shuffle(self.slots)
        self.free = deque(range(len(self.slots)))
        self.buffer: list[tuple[int, int]] = []  # begun, version
        self.seen = Seen()
        self.step = 0
        self.measured_from_s = 0.0
        self.busy_s = 0.0

    def plan(self, at_s: float, kind: str, index: int = 0, epoch: int = 0) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), kind, index, epoch))

    def begin(self) -> None:
        """Free slots take credits, those that waited longest first."""
        waiting = len(self.free)
        for _ in range(waiting):
            if not self.credits:
                return
            index = self.free.popleft()
            slot = self.slots[index]
            if self.paused_from_s[slot.worker] >= 0.0:
                self.free.append(index)
                continue
            self.credits -= 1
            factor = 1.0 + self.queue.jitter * (2.0 * self.rng.random() - 1.0)
            slot.version, slot.begun = self.has[slot.worker], next(self.begun)
            slot.ends_s = self.now_s + factor * self.queue.workers[slot.worker].generation_s
            self.plan(slot.ends_s, "finish", index, slot.epoch)

    def finish(self, index: int, epoch: int) -> None:
        slot = self.slots[index]
        if slot.epoch != epoch or slot.begun < 0:
            return
        heapq.heappush(self.buffer, (slot.begun, slot.version))
        slot.begun = -1
        self.free.append(index)

    def train(self) -> None:
        """Begin a step if there are R groups that may be used."""
        queue = self.queue
        if queue.staleness_max is not None:
            kept = [each for each in self.buffer if self.version - each[1] <= queue.staleness_max]
            if self.step >= queue.warm_up_steps:
                self.seen.refused += len(self.buffer) - len(kept)
            self.credits += len(self.buffer) - len(kept)
            self.buffer = kept
            heapq.heapify(self.buffer)
        enough = len(self.buffer) >= queue.groups_per_step
        if self.training or not enough or self.step >= queue.steps:
            return
        taken = [heapq.heappop(self.buffer) for _ in range(queue.groups_per_step)]
        self.credits += len(taken)
        if self.step == queue.warm_up_steps:
            self.measured_from_s = self.now_s
        if self.step >= queue.warm_up_steps:
            worst = max(self.version - version for _, version in taken)
            self.seen.staleness_worst = max(self.seen.staleness_worst, worst)
            self.seen.consumed += len(taken)
            self.busy_s += queue.train_s
        self.training = True
        self.plan(self.now_s + queue.train_s, "trained")

    def trained(self) -> None:
        self.training = False
        self.version += 1
        self.step += 1
        if self.version % self.queue.period_steps == 0:
            for number, worker in enumerate(self.queue.workers):
                if self.queue.paused and self.paused_from_s[number] < 0.0:
                    self.pause(number)
                self.plan(self.now_s + worker.transfer_s, "arrive", number, self.version)

    def pause(self, number: int) -> None:
        """What is being generated there stands still."""
        self.paused_from_s[number] = self.now_s
        for slot in self.slots:
            if slot.worker == number:
                slot.epoch += 1

    def arrive(self, number: int, version: int) -> None:
        self.has[number] = max(self.has[number], version)
        if not self.queue.paused or self.paused_from_s[number] < 0.0:
            return
        stood_s = self.now_s - self.paused_from_s[number]
        self.paused_from_s[number] = -1.0
        for index, slot in enumerate(self.slots):
            if slot.worker == number and slot.begun >= 0:
                slot.ends_s += stood_s
                self.plan(slot.ends_s, "finish", index, slot.epoch)

    def run(self) -> Seen:
        self.begin()
        while self.step < self.queue.steps and self.events:
            self.now_s, _, kind, index, epoch = heapq.heappop(self.events)
            if kind == "finish":
                self.finish(index, epoch)
            elif kind == "trained":
                self.trained()
            else:
                self.arrive(index, epoch)
            if self.events and self.events[0][0] == self.now_s:
                continue  # what happens at one moment happens before anybody decides
            self.train()
            self.begin()
        spent_s = self.now_s - self.measured_from_s
        self.seen.utilisation = self.busy_s / spent_s
        self.seen.step_s = self.queue.train_s / self.seen.utilisation
        return self.seen


def simulate(queue: Queue) -> Seen:
    """Run it: utilisation, seconds a step, the oldest group that was consumed, what was refused."""
    return _Run(queue).run()
