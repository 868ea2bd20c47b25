"""A user's own method among the stages of a round: it decides for its node, within the run's rules.

Each hook gets copies of the round's lists, and what it returns is checked. A method that raises or
breaks a bound ends the node with one line that names it. Built-in methods are not wrapped.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from random import Random
from typing import Any, Final

from node.interfaces.engine import Outcome
from node.methods.choices import advantages
from node.methods.groups import Advantages
from node.methods.method import MethodSettings
from node.methods.own import told
from node.stages.stage import (
    COLUMNS,
    RECORD_CHARS_MAX,
    ROLLOUTS_TIMES_MAX,
    BatchGroup,
    More,
    RoundOutcome,
    Sample,
    Stage,
    View,
    Wanted,
)
from node.verify.held_out import Due
from swarm.exchange.pool import Candidate
from swarm.rollouts import GroupId, Task

ADVANTAGE_MAX: Final = 100.0  # |A|
REWARD_MAX: Final = 100.0  # |r|
WEIGHT_MAX: Final = 100.0  # of a completion's loss
AHEAD_MAX: Final = 64  # tasks looked at for each one taken
HEAT_MIN: Final = 0.01  # of a request's temperature
HEAT_MAX: Final = 10.0


class GuardedMethod(Stage[MethodSettings]):
    """An own method and the checks of its results."""

    def __init__(self, set_to: MethodSettings, stage: Stage[Any] | None = None) -> None:
        """`stage` None: the method's own."""
        self.set_to = set_to
        with told(set_to):
            made = set_to.own if isinstance(set_to.own, type) else _OwnFormula
            self._own: Stage[Any] = stage or made(set_to)
            self.ahead = int(self._own.ahead)
            _check_range(self.ahead, 1, AHEAD_MAX, "as ahead")

    @property
    def acted(self) -> int:
        return self._own.acted

    @acted.setter
    def acted(self, times: int) -> None:
        self._own.acted = times

    def begin(self) -> None:
        with told(self.set_to):
            self._own.begin()

    def choose(self, due: Sequence[Due], count: int, rng: Random, at: View) -> Sequence[Due] | None:
        with told(self.set_to):
            found = self._own.choose(list(due), count, rng, at)
            if found is not None:
                is_fit = min(1, len(due)) <= len(found) <= count
                _check(is_fit, f"takes {len(found)} tasks of {count}")
                _check_part(found, due, "takes tasks that are not due, or one twice")
            return found

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        with told(self.set_to):
            found = list(self._own.plan(list(wanted), at))
            _check_wanted(found, {each.assigned.task for each in wanted}, at)
            return found

    def lease(self, width: int, limit: int, at: View) -> tuple[int, int]:
        with told(self.set_to):
            width, limit = self._own.lease(width, limit, at)
            _check_range(width, 1, at.config.run.limits.group_size_max, "completions of a task")
            _check_range(limit, 1, at.sampling.max_new_tokens, "tokens of a completion")
            return width, limit

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        """Others than plain samples of the requests become private: peers could not tell."""
        calls: list[tuple[Sequence[Wanted], list[Outcome]]] = []

        async def watched(wanted: Sequence[Wanted], noise: float = 0.0) -> list[Outcome]:
            calls.append((wanted, await sample(wanted, noise)))
            return list(calls[-1][1])

        with told(self.set_to):
            found = await self._own.generate(list(wanted), at, watched)
            made = [len(each.completions) for each in found]
            asked = [each.request.n for each in wanted]
            _check(made == asked, f"gives {made} completions for {asked}")
            for completion in (made for each in found for made in each.completions):
                _check_range(len(completion.token_ids), 0, at.sampling.max_new_tokens, "tokens")
            told_of = [[made.completions for made in outcomes] for _, outcomes in calls]
            is_plain = told_of == [[made.completions for made in found]]
            if is_plain and _how(calls[0][0]) == _how(wanted):
                return found
            return [replace(each, private=True) for each in found]

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        with told(self.set_to):
            found = self._own.more(list(made), at)
            _check_wanted(found.wanted, {each.scored.group.task for each in made}, at)
            _check_range(found.tasks, 0, ROLLOUTS_TIMES_MAX * at.config.local_groups, "tasks")
            return found

    def foreign_wanted(self, wanted: int, at: View) -> int:
        with told(self.set_to):
            found = self._own.foreign_wanted(wanted, at)
            _check_range(found, 0, at.config.external_groups, "groups of others")
            return found

    async def draw(
        self, candidates: Sequence[Candidate], wanted: int, each_max: int, at: View
    ) -> list[GroupId] | None:
        with told(self.set_to):
            found = await self._own.draw(list(candidates), wanted, each_max, at)
            if found is not None:
                _check_range(len(found), 0, wanted, "groups of others")
                known = [each.group_id for each in candidates]
                _check_part(found, known, "draws groups that nobody offers, or one twice")
            return found

    def reward(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        with told(self.set_to):
            found = list(self._own.reward(list(batch), at))
            _check_same(found, batch)
            return found

    def replay(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        with told(self.set_to):
            found = list(self._own.replay(list(batch), at))
            _check_groups(found)
            most = at.group_size * max(1, at.config.local_groups) * ROLLOUTS_TIMES_MAX
            _check_range(len(_ids(found)), 0, len(_ids(batch)) + most, "completions")
            return found

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        with told(self.set_to):
            found = list(self._own.select(list(batch), at))
            _check_groups(found)
            _check_part(_ids(found), _ids(batch), "keeps completions that are not in the batch")
            return found

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages | None:
        with told(self.set_to):
            found = await self._own.advantage(list(batch), at)
            if found is not None or at.config.advantage is self.set_to:
                check_worth(found or [], batch)
            return found

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        with told(self.set_to):
            groups, values = self._own.weigh(list(batch), list(worth), at)
            _check_same(groups, batch)
            check_worth(values, groups)
            return groups, values

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        with told(self.set_to):
            self._own.learn(outcome, at)

    def evaluated(self, gain: float | None, rng: Random) -> None:
        with told(self.set_to):
            self._own.evaluated(gain, rng)

    def to_record(self) -> Any:
        with told(self.set_to):
            record = self._own.to_record()
            _check_range(len(json.dumps(record)), 0, RECORD_CHARS_MAX, "characters of its record")
            return record

    def restore(self, record: Any) -> None:
        with told(self.set_to):
            self._own.restore(record)


def _check(is_good: bool, fault: str) -> None:
    if not is_good:
        raise ValueError(fault)


def _how(wanted: Sequence[Wanted]) -> list[Any]:
    """All that decides what the completions are samples of."""
    asked = [each.request for each in wanted]
    return [(each.prompt, each.n, each.temperature, each.beginning) for each in asked]


def _check_range(value: float, least: float, most: float, what: str) -> None:
    _check(least <= value <= most, f"{value:g} {what}: not within {least:g} and {most:g}")


def _check_part(found: Sequence[Any], known: Sequence[Any], fault: str) -> None:
    _check(Counter(found) <= Counter(known), fault)


def _check_wanted(found: Sequence[Wanted], tasks: set[Task], at: View) -> None:
    for each in found:
        limit, heat = each.request.limit, each.request.temperature
        _check(each.assigned.task in tasks, "asks for a task that is not the round's")
        _check_range(1 if limit is None else limit, 1, at.sampling.max_new_tokens, "tokens")
        _check_range(1 if heat is None else heat, HEAT_MIN, HEAT_MAX, "as temperature")
        _check_range(each.weight, 0, WEIGHT_MAX, "as weight")
        _check(each.request.n >= 1, "asks for no completion of a task")
    most = ROLLOUTS_TIMES_MAX * at.group_size * max(1, at.config.local_groups)
    _check_range(sum(each.request.n for each in found), 0, most, "completions")


def _check_groups(found: Sequence[BatchGroup]) -> None:
    """Each group is whole, and its numbers are finite."""
    for each in found:
        rewards = each.scored.rewards
        count = len(each.scored.group.completions)
        _check(len(rewards) == count, f"gives {len(rewards)} rewards for {count}")
        _check(all(abs(r) <= REWARD_MAX for r in rewards), f"gives rewards beyond {REWARD_MAX:g}")
        _check_range(each.guided, 0, count, "completions as guidance")
        numbers = (*each.token_advantages, *each.teacher_logprobs)
        _check(all(all(map(isfinite, row)) for row in numbers), "gives columns that are not finite")
        lengths = {len(getattr(each, name)) for name in COLUMNS} - {0, count}
        _check(not lengths, f"gives columns of {sorted(lengths)} entries for {count}")
        for weight in each.weights:
            _check_range(weight, 0, WEIGHT_MAX, "as weight")


def _check_same(found: Sequence[BatchGroup], batch: Sequence[BatchGroup]) -> None:
    _check_groups(found)
    _check(_ids(found) == _ids(batch), "gives other completions than the batch has")


def check_worth(found: Advantages, batch: Sequence[BatchGroup]) -> None:
    made, asked = [len(each) for each in found], [len(each.scored.rewards) for each in batch]
    _check(made == asked, f"gives {made} advantages for groups of {asked}")
    for value in (value for each in found for value in each if value is not None):
        _check_range(value, -ADVANTAGE_MAX, ADVANTAGE_MAX, "as advantage")


class _OwnFormula(Stage[MethodSettings]):
    """An advantage that is a function of scored groups alone."""

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages | None:
        self.acted += len(batch)
        return advantages([each.scored for each in batch], self.set_to)


def _ids(batch: Sequence[BatchGroup]) -> list[int]:
    return [id(made) for each in batch for made in each.scored.group.completions]
