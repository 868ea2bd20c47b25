"""Replay: completions of the past or of others that join own groups."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from random import Random
from typing import Any

from node.interfaces.engine import Request
from node.interfaces.prompts import NO_TEXT, Prompt
from node.methods.advantages import PASSED
from node.methods.groups import Advantages
from node.methods.replay import (
    Distil,
    PoolOfSuccesses,
    ReplayedSuccesses,
    Rescue,
    Salvage,
    distil_weight,
    pool_of_successes,
    replayed_successes,
    rescue,
    salvage,
)
from node.methods.step_judge import JUDGES
from node.stages.control import bucket
from node.stages.stage import BatchGroup, More, RoundOutcome, Stage, View, Wanted
from node.verify.assignment import is_common
from swarm.rollouts import Completion, FinishReason

LOGPROB_DIGITS = 5  # of log-probs in a checkpoint


class RescueFailed(Stage[Rescue]):
    """Right completions of others for own groups that are all wrong."""

    def replay(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        own = [each for each in batch if not each.drawn]
        known = {
            place: at.solved.of(each.scored.group.task)
            for place, each in enumerate(own)
            if each.scored.decided and each.is_bare
        }
        rewards = [each.scored.rewards for each in own]
        found = rescue(rewards, known, at.rng("rescue"), self.set_to)
        self.acted += len(found)
        for place, successes in found.items():
            texts = [each.completion for each in successes]
            own[place] = with_guidance(own[place], texts, self.set_to.shaping)
        return [*own, *(each for each in batch if each.drawn)]


def with_guidance(
    each: BatchGroup,
    completions: Sequence[Completion],
    shaping: float = 0.0,
    guided_weight: float = 0.0,
) -> BatchGroup:
    """An own group with right completions of others as guidance, as if they were its own."""
    more = replace(_of(each, completions), guided=len(completions))
    return replace(each.joined(more), shaping=shaping, guided_weight=guided_weight)


def _of(each: BatchGroup, completions: Sequence[Completion]) -> BatchGroup:
    """Right completions of the group's task."""
    group = replace(each.scored.group, completions=tuple(completions))
    rewards = (PASSED,) * len(completions)
    return BatchGroup(replace(each.scored, group=group, rewards=rewards, contexts=()))


class DistilSuccesses(Stage[Distil]):
    """Others' right completions as a supervised loss, beside the method's own. They are joined
    after the advantages, which they do not change."""

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        weight = distil_weight(at.step, self.set_to)
        own = [place for place, each in enumerate(batch) if not each.drawn and not each.guided]
        fit = [place for place in own if weight and self._needs(batch[place], at)]
        most = ceil(self.set_to.groups_share_max * len(own))
        rng = at.rng("distil")
        groups, values = list(batch), list(worth)
        for place in sorted(rng.sample(fit, min(most, len(fit)))):
            offered = sorted(at.solved.of(batch[place].scored.group.task), key=lambda s: s.producer)
            count = min(self.set_to.successes_max, len(offered))
            texts = [each.completion for each in rng.sample(offered, count)]
            groups[place] = with_guidance(batch[place], texts, guided_weight=weight)
            values[place] = (*worth[place], *[1.0] * count)
            self.acted += count
        return groups, values

    def _needs(self, each: BatchGroup, at: View) -> bool:
        rewards = each.scored.rewards
        right = sum(reward >= PASSED for reward in rewards)
        is_rare = right <= self.set_to.success_max * len(rewards)
        return each.is_bare and is_rare and bool(at.solved.of(each.scored.group.task))


class _Pooled(Stage[Any]):
    """A node's own right completions of tasks that come again, with their log-probs. Bounded."""

    draw_from: Callable[[Sequence[str], Sequence[float], Random, Any], tuple[str, ...]]
    task_max: int = 8  # newest successes of a task

    def __init__(self, set_to: PoolOfSuccesses | ReplayedSuccesses) -> None:
        super().__init__(set_to)
        self._kept: OrderedDict[str, list[Completion]] = OrderedDict()  # by bucket
        self._tokens = 0

    def replay(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        rng = at.rng(self.set_to.kind)
        return [self._joined(each, rng, at) if self._fits(each, at) else each for each in batch]

    def _fits(self, each: BatchGroup, at: View) -> bool:
        is_own = not each.drawn and not each.guided and each.is_bare
        return is_own and is_common(at.config.run, each.scored.group.task)

    def _joined(self, each: BatchGroup, rng: Random, at: View) -> BatchGroup:
        kept = self._kept.get(bucket(each.scored.group.task, at), [])
        names = list(map(str, range(len(kept))))
        places = type(self).draw_from(names, each.scored.rewards, rng, self.set_to)
        if not places:
            return each
        self.acted += len(places)
        return each.joined(_of(each, [kept[int(place)] for place in places]))

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        for each in outcome.own:
            if not each.scored.decided or not self._fits(each, at):
                continue
            made = zip(each.scored.group.completions, each.scored.rewards, strict=True)
            right = [c for c, reward in made if reward >= PASSED and len(c.logprobs) > 0]
            if right:
                self._keep(bucket(each.scored.group.task, at), right)

    def _keep(self, name: str, right: Sequence[Completion]) -> None:
        before = self._kept.pop(name, [])
        known = [each for each in before if each.token_ids not in {c.token_ids for c in right}]
        unlike = {c.token_ids: replace(c, segments=(), splices=()) for c in right}
        self._kept[name] = [*known, *unlike.values()][-self.task_max :]
        self._tokens += _tokens(self._kept[name]) - _tokens(before)
        while self._tokens > self.set_to.tokens_max:
            self._tokens -= _tokens(self._kept.popitem(last=False)[1])

    def to_record(self) -> Any:
        return [
            [
                name,
                [
                    [
                        each.text,
                        list(each.token_ids),
                        [round(value, LOGPROB_DIGITS) for value in each.logprobs],
                        str(each.finish_reason),
                        each.policy_version,
                    ]
                    for each in kept
                ],
            ]
            for name, kept in self._kept.items()
        ]

    def restore(self, record: Any) -> None:
        for name, kept in record:
            self._kept[name] = [
                Completion(text, tuple(ids), tuple(logprobs), FinishReason(reason), version)
                for text, ids, logprobs, reason, version in kept
            ]
        self._tokens = sum(map(_tokens, self._kept.values()))


class InjectSuccesses(_Pooled):
    """DART: a task that nobody solves in this round gets successes of before."""

    draw_from = staticmethod(pool_of_successes)

    def __init__(self, set_to: PoolOfSuccesses) -> None:
        super().__init__(set_to)
        self.task_max = set_to.task_max


class ReplaySuccesses(_Pooled):
    """RLEP: a task that is rarely solved gets own successes of before."""

    draw_from = staticmethod(replayed_successes)


def _tokens(kept: Sequence[Completion]) -> int:
    return sum(len(each.token_ids) for each in kept)


class BeginAgain(Stage[Salvage]):
    """SCOPE: wrong own completions are begun again after their last right step. What continues one
    joins its group, which is then not shared. The beginning is a part of the prompt, so that it is
    not trained on."""

    def __init__(self, set_to: Salvage) -> None:
        super().__init__(set_to)
        self._is_asked = False  # in this round

    def begin(self) -> None:
        super().begin()
        self._is_asked = False

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        if self._is_asked:
            return More()
        self._is_asked = True
        fit = [each for each in made if each.scored.decided and each.is_bare]
        again = [found for each in fit for found in self._begun(each)]
        again = at.rng("salvage").sample(again, min(self.set_to.tries, len(again)))
        self.acted += len(again)
        return More(again)

    def _begun(self, each: BatchGroup) -> list[Wanted]:
        scored, found = each.scored, []
        for completion, reward in zip(scored.group.completions, scored.rewards, strict=True):
            kept = None
            if reward < PASSED and NO_TEXT not in completion.text:
                kept = salvage(completion.text, JUDGES[self.set_to.judge], self.set_to)
            if kept is not None:
                prompt = Prompt.read(scored.prompt).begun(kept.prefix).text
                found.append(Wanted(each.assigned, Request(prompt)))
        return found
