"""Filter: the groups, completions and tokens that are trained on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Final

from node.interfaces.engine import Outcome
from node.methods import filters as formulas
from node.methods.advantages import is_flat
from node.methods.groups import Advantages, lengths
from node.methods.rollout_budgets import VarianceCurriculum
from node.stages.stage import BatchGroup, More, Sample, Stage, View, Wanted
from node.verify.held_out import Assignment
from swarm.rollouts import Task

BANK_CHARS_MAX: Final = 2**19  # of the prompts and tasks in VCRL's bank


class DropFlat(Stage[formulas.ZeroAdvantage]):
    """Groups whose rewards are all equal are left out, unless they have guidance."""

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        teach = formulas.zero_advantage([each.scored for each in batch], self.set_to)
        kept = [each for place, each in enumerate(batch) if place in teach or each.guided]
        self.acted += len(batch) - len(kept)
        return kept


class SampleUntilInformative(Stage[formulas.DynamicSampling]):
    """DAPO: other tasks take the places of those whose own groups are flat."""

    def __init__(self, set_to: formulas.DynamicSampling) -> None:
        super().__init__(set_to)
        self._rounds = 0  # of generation, in this round

    def begin(self) -> None:
        super().begin()
        self._rounds = 0

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        self._rounds += 1
        kept = sum(not is_flat(each.scored.rewards) for each in made)
        tasks = formulas.dynamic_sampling(
            at.config.local_groups, kept, len(made), self._rounds, self.set_to
        )
        self.acted += tasks
        return More(tasks=tasks)

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        """At most as many own groups as without it, those first generated."""
        kept: list[BatchGroup] = []
        own = 0
        for each in batch:
            if not each.drawn and not each.guided:
                if is_flat(each.scored.rewards) or own == at.config.local_groups:
                    continue
                own += 1
            kept.append(each)
        self.acted += len(batch) - len(kept)
        return kept


class PenaliseLong(Stage[formulas.Overlong]):
    """DAPO: the reward falls where a completion comes near its limit, in the node's own tokens."""

    def reward(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        return [self._lowered(each, at) for each in batch]

    def _lowered(self, each: BatchGroup, at: View) -> BatchGroup:
        scored = each.scored
        has_tokens = all(made.token_ids for made in scored.group.completions)
        if not has_tokens or scored.group.tokenizer != at.tokenizer:
            return each
        offsets = formulas.overlong(lengths(scored), at.sampling.max_new_tokens, self.set_to)
        self.acted += sum(map(bool, offsets))
        rewards = tuple(map(sum, zip(scored.rewards, offsets, strict=True)))
        return replace(each, scored=replace(scored, rewards=rewards))


class DropUnvaried(Stage[formulas.Variance]):
    """VCRL: own groups that vary too little are left out. In the next round tasks of the bank take
    their places. Others do not see these again: a task has one place in a node's stream."""

    def __init__(self, set_to: formulas.Variance) -> None:
        super().__init__(set_to)
        self._bank: Mapping[str, float] = {}  # scores by task
        self._recalled: tuple[str, ...] = ()  # prompts for the next round
        self._known: dict[str, Assignment] = {}  # of the bank and of these, by prompt
        self._asked: set[str] = set()  # prompts of this round

    def begin(self) -> None:
        super().begin()
        self._asked = set()

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        asked = {each.assigned.prompt for each in wanted}
        again = [self._known[prompt] for prompt in self._recalled if prompt not in asked]
        self._recalled = ()
        again = again[: len(wanted)]
        self.acted += len(again)
        kept = len(wanted) - len(again)
        found = [*wanted[:kept], *map(_again, wanted[kept:], again)]
        self._asked |= {each.assigned.prompt for each in found}
        return found

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        """Foreign groups stay, and those with guidance."""
        own = [each for each in batch if not each.drawn and not each.guided]
        has_schedule = at.config.method(VarianceCurriculum) is not None
        score_min = 0.0 if has_schedule else self.set_to.score_min
        groups = [each.scored for each in own]
        is_node = at.role == "node"
        wanted = at.config.local_groups if is_node else 0
        left_out = self._asked - {each.prompt for each in groups}  # by methods before
        scores = {task: s for task, s in self._bank.items() if task not in left_out}
        choice = formulas.variance(groups, score_min, scores, self.set_to, wanted)
        if is_node:
            self._keep(choice, own)
        dropped = {id(own[place]) for place in set(range(len(own))) - set(choice.kept)}
        self.acted += len(dropped)
        return [each for each in batch if id(each) not in dropped]

    def _keep(self, choice: formulas.VarianceChoice, own: Sequence[BatchGroup]) -> None:
        """Keep what is needed to ask again, up to a bound, the best first."""
        known = self._known | {each.scored.prompt: each.assigned for each in own}
        self._known = {}
        chars = 0
        for prompt in (*choice.recalled, *choice.bank):
            chars += len(json.dumps(_fields(known[prompt])))
            if chars > BANK_CHARS_MAX:
                break
            self._known[prompt] = known[prompt]
        self._bank = {task: s for task, s in choice.bank.items() if task in self._known}
        self._recalled = tuple(each for each in choice.recalled if each in self._known)

    def to_record(self) -> Any:
        known = [_fields(each) for each in self._known.values()]
        return [known, dict(self._bank), self._recalled] if known else None

    def restore(self, record: Any) -> None:
        known, scores, recalled = record
        every = [Assignment(Task(*task), prompt, attempt) for task, prompt, attempt in known]
        self._known = {each.prompt: each for each in every}
        self._bank = {task: scores[task] for task in scores if task in self._known}
        self._recalled = tuple(each for each in recalled if each in self._known)


def _fields(assigned: Assignment) -> tuple[Any, ...]:
    return astuple(assigned.task), assigned.prompt, assigned.attempt


def _again(wanted: Wanted, assigned: Assignment) -> Wanted:
    """A task of the bank in a planned one's place."""
    request = replace(wanted.request, prompt=assigned.prompt)
    return replace(wanted, assigned=assigned, request=request, private=True)


class KeepExtremes(Stage[formulas.Extremes]):
    """D3S: the completions whose advantages vary most, over all groups, and their deciding tokens
    where entropies were recorded."""

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        if "entropies" not in at.engine.capabilities.records or at.config.run.has_turns:
            return await sample(wanted)
        return await sample([with_entropies(each) for each in wanted])

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        progress = at.step / self.set_to.steps
        kept = set(formulas.extremes(worth, progress, self.set_to))
        found: Advantages = [
            tuple(value if (row, place) in kept else None for place, value in enumerate(values))
            for row, values in enumerate(worth)
        ]
        before = sum(value is not None for values in worth for value in values)
        self.acted += before - len(kept)
        return self._masked(batch, found, progress), found

    def _masked(
        self, batch: Sequence[BatchGroup], worth: Advantages, progress: float
    ) -> Sequence[BatchGroup]:
        told = {
            (row, place): (value, each.recorded[place].entropies)
            for row, each in enumerate(batch)
            for place, value in enumerate(worth[row])
            if value is not None and each.recorded and each.recorded[place].entropies
        }
        values, entropies = [v for v, _ in told.values()], [e for _, e in told.values()]
        masks = formulas.deciding_tokens(values, entropies, progress, self.set_to)
        by_place = dict(zip(told, masks, strict=True))
        self.acted += sum(mask.count(False) for mask in masks)
        if all(map(all, masks)):
            return batch
        return [
            replace(
                each,
                masks=tuple(
                    _both(mask, by_place.get((row, place), ()))
                    for place, mask in enumerate(each.column("masks", ()))
                ),
            )
            for row, each in enumerate(batch)
        ]


def with_entropies(wanted: Wanted) -> Wanted:
    """A request that records the entropy of each token."""
    request = wanted.request
    return replace(wanted, request=replace(request, record=request.record | {"entropies"}))


def _both(one: tuple[bool, ...], other: tuple[bool, ...]) -> tuple[bool, ...]:
    """The tokens of both masks; an empty one is of all tokens."""
    if not one or not other:
        return one or other
    return tuple(a and b for a, b in zip(one, other, strict=True))
