"""Advantages that need more than the rewards of a batch."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from node.methods.advantages import Hacpo, grpo_advantages, hacpo
from node.methods.groups import Advantages
from node.stages.stage import BatchGroup, Stage, View
from swarm.rollouts import ScoredGroup

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
