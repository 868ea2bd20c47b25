"""Advantages that need more than the rewards of a batch."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import mul
from statistics import fmean
from typing import Any, Final, TypeVar

from node.envs.replay_turns import said_of
from node.interfaces.trainer import TrainingGroup
from node.methods.advantages import (
    PASSED,
    Hacpo,
    SubProblems,
    TwoLevels,
    grpo_advantages,
    hacpo,
    sub_problems,
    two_levels,
)
from node.methods.groups import Advantages
from node.methods.method import MethodSettings
from node.methods.rewards import CrossValue, cross_value
from node.methods.ridge import Ridge, sketched
from node.stages.stage import BatchGroup, Stage, View
from swarm.rollouts import Author, Completion, ScoredGroup

S = TypeVar("S", bound=MethodSettings)

SOURCES_MAX: Final = 1024  # whose capability is kept, those seen last


def _as_source(each: BatchGroup) -> ScoredGroup:
    """The group as this policy's own unless it was drawn: workers sample it for a learner."""
    return replace(each.scored, own=not each.drawn)


class MeasureByCapability(Stage[Hacpo]):
    """HACPO. A capability is the mean reward of a source's groups in each of the last rounds that
    had any, before filters. All rewards are of this node's verifier, so none can be claimed. A peer
    can still choose what it shares. Sources with other tasks are compared as if tasks were alike,
    and old groups count for the round that trains on them: the paper leaves both open."""

    def __init__(self, set_to: Hacpo) -> None:
        super().__init__(set_to)
        self._lately: OrderedDict[str, list[float]] = OrderedDict()  # mean rewards by source

    def reward(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        told = defaultdict[str, list[float]](list)
        for each in batch:
            if each.scored.decided and each.is_bare:
                told[_as_source(each).source] += each.scored.rewards
        for source, rewards in told.items():
            known = [*self._lately.pop(source, ()), fmean(rewards)]
            self._lately[source] = known[-self.set_to.rounds :]
        while len(self._lately) > SOURCES_MAX:
            self._lately.popitem(last=False)
        return batch

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages | None:
        groups = list(map(_as_source, batch))
        capability = {source: fmean(means) for source, means in self._lately.items()}
        found = hacpo(groups, self.set_to, capability)
        alone = [grpo_advantages(each.rewards) for each in groups]
        self.acted += sum(a != b for a, b in zip(found, alone, strict=True))
        return found

    def to_record(self) -> Any:
        return list(self._lately.items()) or None

    def restore(self, record: Any) -> None:
        self._lately = OrderedDict((source, list(map(float, means))) for source, means in record)


class _ByTurn(Stage[S]):
    """Advantages of the turns of own transcripts, by rewards of turns that this node's verifier
    gives. Others' transcripts have GRPO's: own work is scored apart from strangers' texts."""

    def __init__(self, set_to: S) -> None:
        super().__init__(set_to)
        self._worth: list[tuple[tuple[float, ...], ...]] = []  # tokens of each group's completions

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        """Advantages of each turn of each transcript of a task, by their rewards."""
        raise NotImplementedError

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages | None:
        rewards = iter(await self._rewards([each.scored for each in batch if not each.drawn], at))
        self._worth, found = [], Advantages()
        for each in batch:
            if each.drawn:
                self._worth.append(())
                found.append(grpo_advantages(each.scored.rewards))
                continue
            told = next(rewards)
            known = iter(self.of_turns([of_one for of_one in told if of_one is not None]))
            values = [None if of_one is None else next(known) for of_one in told]
            made = each.scored.group.completions
            self.acted += sum(len(set(of_one or ())) > 1 for of_one in values)
            self._worth.append(tuple(map(_by_token, made, values)))
            found.append(tuple(None if v is None else fmean(v or (0.0,)) for v in values))
        return found

    async def _rewards(
        self, own: Sequence[ScoredGroup], at: View
    ) -> list[list[list[float] | None]]:
        """The reward of each turn of each completion of own groups. None: one is undecided, and the
        completion is left out."""
        assert at.verifier is not None
        tasks = [each.group.task for each in own]
        said = [[s for made in each.group.completions for s in _beginnings(made)] for each in own]
        found = []
        verdicts = await at.verifier.score(tasks, said, "turn")
        for each, rewards in zip(own, map(iter, verdicts), strict=True):
            of_all = [[next(rewards) for _ in _turns(one)] for one in each.group.completions]
            found.append([None if None in one else [r or 0.0 for r in one] for one in of_all])
        return found

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        pairs = zip(batch, self._worth, strict=True)
        return [replace(each, token_advantages=values) for each, values in pairs], worth


def _turns(made: Completion) -> list[int]:
    """Tokens of each turn of the policy."""
    turns = [each.tokens for each in made.segments if each.author is Author.POLICY]
    return turns or [len(made.token_ids)]


def _by_token(made: Completion, values: Sequence[float] | None) -> tuple[float, ...]:
    pairs = () if values is None else zip(values, _turns(made), strict=True)
    return tuple(value for value, count in pairs for _ in range(count))


def _beginnings(made: Completion) -> Iterator[Any]:
    """A transcript up to each turn of the policy, as it is scored."""
    said = said_of(made)
    if isinstance(said, str):
        yield said
        return
    for end in range(1, len(said[1]) + 1, 2):
        yield True, said[1][:end]


class MeasureTurns(_ByTurn[TwoLevels]):
    """UI-S1: a turn that was right is followed by the next one's return."""

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        followed = [[reward >= PASSED for reward in each] for each in rewards]
        return two_levels(rewards, followed, self.set_to)


class MeasureParts(_ByTurn[SubProblems]):
    """SCRL, with turns as the parts of a task: one that was not reached was not right."""

    def of_turns(self, rewards: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        most = max(map(len, rewards), default=0)
        right = [[r >= PASSED for r in each] + [False] * (most - len(each)) for each in rewards]
        found = sub_problems(right, self.set_to)
        return [values[: len(each)] for values, each in zip(found, rewards, strict=True)]


class MeasureByPartner(Stage[CrossValue]):
    """POISE: completions of a task are paired in their order, an odd last one with the first. A
    regression on earlier batches predicts a reward from the trainer's states of the partner. With
    too few pairs, or a partner that the trainer skips, the group's mean is expected."""

    def __init__(self, set_to: CrossValue) -> None:
        super().__init__(set_to)
        self._known = Ridge(set_to.width + 1)

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages | None:
        asked = [_alone(each, place, at) for each in batch for place in _places(each)]
        states = iter(await at.trainer.features(asked))
        rows = [[self._row(*next(states)) for _ in _places(each)] for each in batch]
        is_known = self._known.rows >= self.set_to.pairs_min
        weights = self._known.weights(self.set_to.ridge) if is_known else []
        found: Advantages = [
            self._worth(each.scored.rewards, of_group, weights)
            for each, of_group in zip(batch, rows, strict=True)
        ]
        self._known.fade(self.set_to.kept)
        for each, of_group in zip(batch, rows, strict=True):
            for one, other in _pairs(len(of_group)):
                if of_group[other]:
                    self._known.add(of_group[other], each.scored.rewards[one])
        return found

    def _row(self, state: Sequence[float]) -> list[float]:
        return sketched(state, self.set_to.width) if state else []

    def _worth(
        self,
        rewards: Sequence[float],
        rows: Sequence[Sequence[float]],
        weights: Sequence[float],
    ) -> tuple[float, ...]:
        mean = fmean(rewards or (0.0,))
        told = [sum(map(mul, weights, row)) if weights and row else mean for row in rows]
        self.acted += sum(bool(weights and row) for row in rows)
        found = [reward - mean for reward in rewards]
        for one, other in _pairs(len(rows)):
            both = (rewards[one], rewards[other]), (told[one], told[other])
            found[one] = cross_value(*both)[0]
        return tuple(found)

    def to_record(self) -> Any:
        return self._known.to_record() if self._known.rows else None

    def restore(self, record: Any) -> None:
        self._known.restore(record)


def _places(each: BatchGroup) -> range:
    return range(len(each.scored.rewards))


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    """Each completion with its partner."""
    for one in range(count):
        other = one ^ 1 if one ^ 1 < count else 0
        if one != other:
            yield one, other


def _alone(each: BatchGroup, place: int, at: View) -> TrainingGroup:
    """One completion, for the trainer to read."""
    group, is_guided = each.scored.group, place >= len(_places(each)) - each.guided
    return TrainingGroup(
        each.prompt_of(place),
        (group.completions[place],),
        (0.0,),
        not each.drawn and group.tokenizer == at.tokenizer,
        each.scored.source,
        group.tokenizer if each.drawn else "",
        guided=int(is_guided),
    )
