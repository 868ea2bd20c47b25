"""Rewards to train on, in place of the verifier's. Reports keep the verifier's."""

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from statistics import fmean
from typing import TypeVar

from node.interfaces.engine import Outcome
from node.interfaces.prompts import Prompt
from node.methods.advantages import PASSED
from node.methods.groups import by_task, mean_logprobs
from node.methods.method import MethodSettings
from node.methods.rewards import Distribution, Flawed, Majority, distribution, flawed, majority
from node.methods.step_judge import JUDGES
from node.stages.filtering import with_entropies
from node.stages.stage import BatchGroup, Sample, Stage, View, Wanted

S = TypeVar("S", bound=MethodSettings)


class _Votes(Stage[S]):
    """Rewards by votes on each task. Own and foreign groups of a task vote together. An address
    block has one vote, however many producers it has. A learner's workers are producers too."""

    def reward(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        found = list(batch)
        for places in by_task([each.scored for each in batch]):
            groups = [batch[place] for place in places]
            answers = [answer for each in groups for answer in _answers(each, at)]
            rest = iter(self._counted(groups, answers, at))
            for place in places:
                found[place] = self._with(batch[place], [next(rest) for _ in _of(batch[place])])
        return found

    def _counted(
        self, groups: Sequence[BatchGroup], answers: Sequence[str | None], at: View
    ) -> Sequence[float]:
        raise NotImplementedError

    def _with(self, each: BatchGroup, rewards: Sequence[float]) -> BatchGroup:
        self.acted += sum(a != b for a, b in zip(rewards, each.scored.rewards, strict=True))
        return replace(each, scored=replace(each.scored, rewards=tuple(rewards)))


def _of(each: BatchGroup) -> tuple[float, ...]:
    return each.scored.rewards


def _answers(each: BatchGroup, at: View) -> list[str | None]:
    """The answers of a group's completions, as the run's rule reads them, without blanks around."""
    group = each.scored.group
    rule = at.config.run.answer_rule(group.task.environment, group.task.parameters)
    found = [
        rule.find(Prompt.read(each.prompt_of(place)).whole(made.text))
        for place, made in enumerate(group.completions)
    ]
    return [None if answer is None else answer.strip() for answer in found]


def _voters(groups: Sequence[BatchGroup], at: View) -> list[str]:
    """The voice of each completion's producer: all of one address block have one vote together."""
    voices = [
        "" if each.scored.own else at.choice.voice_of(each.scored.group.producer) for each in groups
    ]
    return [voice for voice, each in zip(voices, groups, strict=True) for _ in _of(each)]


class CountVotes(_Votes[Majority]):
    """TTRL: the answer of most votes is right, whatever the verifier says."""

    def _counted(
        self, groups: Sequence[BatchGroup], answers: Sequence[str | None], at: View
    ) -> Sequence[float]:
        return majority(answers, _voters(groups, at), self.set_to)


class CountSureVotes(_Votes[Distribution]):
    """DARE: votes count by certainty, the more the lower the mean entropy H of a completion's
    tokens. The source divides H by the logarithm of the vocabulary, which a peer's text does not
    tell: here the doubt is 1 - exp(-H), H in nats.

    Completions without entropies, such as others', have H estimated by the mean of -log p of their
    tokens where they were sampled. Peers could make these up, so no peer's doubt is below the mean
    of own ones; it is 1 where there are none of either."""

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        return await sample([with_entropies(each) for each in wanted])

    def _counted(
        self, groups: Sequence[BatchGroup], answers: Sequence[str | None], at: View
    ) -> Sequence[float]:
        own = [doubt for each in groups if not each.drawn for doubt in _doubts(each)]
        least = fmean(own) if own else 1.0
        doubts = [
            max(doubt, least) if each.drawn else doubt for each in groups for doubt in _doubts(each)
        ]
        return distribution(answers, doubts, _voters(groups, at), self.set_to)


def _doubts(each: BatchGroup) -> list[float]:
    logprobs = mean_logprobs(each.scored) or [-float("inf")] * len(_of(each))
    told = [recorded.entropies for recorded in each.recorded] or [()] * len(logprobs)
    means = [
        fmean(entropies) if entropies else -log
        for entropies, log in zip(told, logprobs, strict=True)
    ]
    return [1.0 - exp(-max(0.0, mean)) for mean in means]


class PenaliseFlaws(Stage[Flawed]):
    """FAPO: a right answer is worth less if a judge finds a false step in its text."""

    def reward(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        return [self._judged(each) for each in batch]

    def _judged(self, each: BatchGroup) -> BatchGroup:
        scored, judge = each.scored, JUDGES[self.set_to.judge]
        right = [reward >= PASSED for reward in scored.rewards]
        has_flaw = [
            is_right and judge([made.text]) is not None
            for is_right, made in zip(right, scored.group.completions, strict=True)
        ]
        self.acted += sum(has_flaw)
        rewards = flawed(right, has_flaw, self.set_to)
        return replace(each, scored=replace(scored, rewards=rewards))
