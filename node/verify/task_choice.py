"""A node's choice among the tasks ahead in its stream, by how often they are solved.

A producer may leave tasks out. With a method of control a node leaves out the least promising ones.
It forgets its own results at a restart; others' reports come again with their groups.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random

from node.config import RunConfig
from node.methods.task_control import (
    SharedMap,
    SuccessBeliefs,
    SuccessCounts,
    Vade,
    learned,
    reports_of,
    vade,
)
from node.verify.assignment import bucket_of, environment_bucket, is_bucket
from node.verify.held_out import Due
from swarm.identity import PeerId
from swarm.rollouts import Counters, RolloutGroup, Task
from swarm.wire.messages import COUNTERS_MAX

TOLD_EACH_MAX = min(16, COUNTERS_MAX)  # counters in one group: 192 bytes at most


class TaskChoice:
    """One node's knowledge of the difficulty of tasks, and its choices."""

    def __init__(
        self,
        run: RunConfig,
        control: Vade | None,
        voice_of: Callable[[PeerId], str] = str,
        now_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`control` None: tasks are taken as they come, others' reports are ignored, and own
        counters are sent only if the run has common tasks. `voice_of`: the name under which a
        producer's reports count."""
        self._run, self._control = run, control
        self.voice_of, self._now_s = voice_of, now_s
        self._own = SuccessBeliefs()
        self.others = SharedMap()

    @property
    def ahead(self) -> int:
        """Tasks considered for each one taken."""
        return self._control.ahead if self._control is not None else 1

    def choose(self, due: Sequence[Due], count: int, rng: Random) -> list[Due]:
        """`count` of these tasks, in their order."""
        if self._control is None or len(due) <= count:
            return list(due)
        pooled = lru_cache(maxsize=None)(self._pooled)  # many tasks are of one environment
        known = {str(at): self._belief(task, pooled) for at, (task, _) in enumerate(due)}
        chosen = sorted(map(int, vade(SuccessBeliefs(known), known, count, rng)))
        return [due[at] for at in chosen]

    def belief(self, task: Task) -> SuccessCounts:
        """Successes and failures at a task, own and reported. For a common task those at its
        environment are a prior."""
        return self._belief(task, self._pooled)

    def own_pass_rate(self, task: Task) -> float:
        """The node's own pass rate at such tasks; 0.5 before it tried any."""
        counts = self._belief(task, lambda bucket: self._own.of(str(bucket)))
        return (counts.right + 1.0) / (counts.right + counts.wrong + 2.0)

    def _belief(self, task: Task, pooled: Callable[[int], SuccessCounts]) -> SuccessCounts:
        bucket, environment = bucket_of(self._run, task), environment_bucket(self._run, task)
        counts = pooled(bucket)
        if bucket == environment:
            return counts
        prior, most = pooled(environment), (self._control or Vade()).prior_max
        share = min(1.0, most / max(most, prior.right + prior.wrong)) if most else 0.0
        return SuccessCounts(counts.right + share * prior.right, counts.wrong + share * prior.wrong)

    def _pooled(self, bucket: int) -> SuccessCounts:
        own = self._own.of(str(bucket))
        others = self.others.of(bucket, self._control.others_max if self._control else 0.0)
        return SuccessCounts(own.right + others.right, own.wrong + others.wrong)

    def learn(self, results: Sequence[tuple[Task, Sequence[float]]]) -> None:
        """Count the rewards of own groups."""
        found = [
            (str(bucket), sum(each == 1.0 for each in rewards), len(rewards))
            for task, rewards in results
            for bucket in {bucket_of(self._run, task), environment_bucket(self._run, task)}
        ]
        self._own = learned(self._own, found, self._control or Vade())

    def receive(self, group: RolloutGroup) -> None:
        """Count what an accepted group reports of its producer's tries."""
        if self._control is None or not group.counters:
            return
        known = tuple(each for each in group.counters if is_bucket(self._run, each[0]))
        # The first voice stays: a producer's address changes as it comes and goes.
        voice = self.others.voice_of(group.producer) or self.voice_of(group.producer)
        self.others.receive(
            reports_of(
                known,
                group.producer,
                group.round,
                min(group.created_at_s, int(self._now_s())),  # a fast clock must not outlive others
                group.expires_at_s,
                voice,
            )
        )

    def expire(self) -> None:
        self.others.expire(self._now_s())

    def told(self, groups: int) -> list[Counters]:
        """The node's own counters for each of a round's groups: the buckets with the newest
        results, each once."""
        if groups < 1 or (self._control is None and not self._run.common.share):
            return [()] * groups
        newest = [
            (int(bucket), round(each.right + each.wrong), round(each.right))
            for bucket, each in list(self._own.counts.items())[-TOLD_EACH_MAX * groups :]
        ]
        newest = [each for each in newest if each[1] > 0]
        return [tuple(sorted(newest[at::groups])) for at in range(groups)]
