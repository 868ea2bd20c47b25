"""Control: which tasks, how many completions of each, how long, and how many groups of others."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from random import Random
from statistics import fmean
from typing import Any

from node.interfaces.engine import Outcome
from node.methods.advantages import PASSED
from node.methods.filters import ROUNDING, Variance, reward_score
from node.methods.rollout_budgets import (
    LengthSchedule,
    VarianceCurriculum,
    length_schedule,
    variance_curriculum,
)
from node.methods.task_control import (
    AdaptiveExternal,
    Cdas,
    Competence,
    ExternalGains,
    TaskDifficulty,
    Vade,
    cdas,
    evaluated,
    groups_of,
    rated,
)
from node.stages.stage import BatchGroup, RoundOutcome, Sample, Stage, View, Wanted
from node.verify.assignment import bucket_of
from node.verify.held_out import Due
from swarm.rollouts import Task


def bucket(task: Task, at: View) -> str:
    """The name under which is kept what was learned of a task: that of its bucket."""
    return str(bucket_of(at.config.run, task))


def measured(batch: Sequence[BatchGroup]) -> list[BatchGroup]:
    """Own groups that say how able the policy is: decided plain samples of the tasks' prompts."""
    able = [each for each in batch if not each.drawn and each.scored.decided and each.is_bare]
    return [each for each in able if not each.private]


class ChooseByInformation(Stage[Vade]):
    """VADE: the node's own and others' counts of successes are kept by its `TaskChoice`."""

    def __init__(self, set_to: Vade) -> None:
        super().__init__(set_to)
        self.ahead = set_to.ahead

    def choose(self, due: Sequence[Due], count: int, rng: Random, at: View) -> Sequence[Due] | None:
        chosen = at.choice.choose(due, count, rng)
        self.acted += list(chosen) != list(due[:count])
        return chosen


class ChooseByCompetence(Stage[Cdas]):
    """CDAS: tasks about as difficult as the policy is competent. Each common task has a rating, and
    all others of an environment have one together."""

    def __init__(self, set_to: Cdas) -> None:
        super().__init__(set_to)
        self.ahead = set_to.ahead
        self._state = Competence()

    def choose(self, due: Sequence[Due], count: int, rng: Random, at: View) -> Sequence[Due] | None:
        rates = [self._state.difficulty(bucket(task, at)) for task, _ in due]
        known = {str(place): TaskDifficulty(rate) for place, rate in enumerate(rates)}
        names = cdas(replace(self._state, difficulties=known), known, count, rng, self.set_to)
        chosen = [due[place] for place in sorted(map(int, names))]
        self.acted += chosen != list(due[:count])
        return chosen

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        passed = defaultdict[str, list[bool]](list)
        for each in measured(outcome.own):
            passed[bucket(each.scored.group.task, at)] += [
                reward >= PASSED for reward in each.scored.rewards
            ]
        run = at.config.run
        tasks = len(run.environments) + (run.common.tasks if run.common.share else 0)
        rates = {name: fmean(each) for name, each in passed.items()}
        self._state = rated(self._state, rates, tasks, self.set_to)

    def to_record(self) -> Any:
        return self._state.to_record()

    def restore(self, record: Any) -> None:
        self._state = Competence.from_record(record)


class ScheduleLengths(Stage[LengthSchedule]):
    """SIRI: the limit of completions swings below the run's."""

    def lease(self, width: int, limit: int, at: View) -> tuple[int, int]:
        most = self._limit(at)
        self.acted += most < limit
        return width, min(limit, most)

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        """Here, and not in `plan`, so that what methods ask for later has the limit too."""
        most = self._limit(at)
        if most == at.sampling.max_new_tokens:
            return await sample(wanted)
        self.acted += len(wanted)
        return await sample(
            [replace(each, request=replace(each.request, limit=most)) for each in wanted]
        )

    def _limit(self, at: View) -> int:
        return length_schedule(at.step, at.sampling.max_new_tokens, self.set_to)


class ScheduleVariance(Stage[VarianceCurriculum]):
    """VCRL's schedule: own groups with a lower score than the step's are not trained on."""

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        least = variance_curriculum(at.step, self.set_to) - ROUNDING
        reward_range = (at.config.method(Variance) or Variance()).reward_range
        kept = [
            each
            for each in batch
            if each.drawn or each.guided or reward_score(each.scored.rewards, reward_range) >= least
        ]
        self.acted += len(batch) - len(kept)
        return kept


class AdaptForeignGroups(Stage[AdaptiveExternal]):
    """J by a bandit, whose arms are tried from one evaluation to the next."""

    def __init__(self, set_to: AdaptiveExternal) -> None:
        super().__init__(set_to)
        self.gains = ExternalGains()

    def foreign_wanted(self, wanted: int, at: View) -> int:
        found = groups_of(self.gains, wanted, self.set_to)
        self.acted += found != wanted
        return found

    def evaluated(self, gain: float | None, rng: Random) -> None:
        self.gains = evaluated(self.gains, gain, rng, self.set_to)

    def to_record(self) -> Any:
        return asdict(self.gains)

    def restore(self, record: Any) -> None:
        self.gains = ExternalGains.from_json(record)
