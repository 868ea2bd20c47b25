"""Defences against the attacks on rollout sharing, each of which this script can switch off.

All but the length cap, the unlikely tokens and the format of answers are switched off here and
nowhere else: no setting of a node does it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Guards:
    """Which defences the honest nodes have. All off is what no node can be set to."""

    own_answers: bool = False  # foreign groups are scored against the regenerated answer
    exact: bool = False  # a text that says more than the answer is wrong
    informative: bool = False  # foreign groups with equal rewards are not drawn
    producer_cap: bool = False  # one producer gets at most half of the foreign places
    length_cap: bool = False  # the run's limit on a completion's text is near the answers' length
    likely_tokens: bool = False  # foreign tokens that the own policy finds unlikely teach nothing
    partial: bool = False  # instead of `exact`: the run's rule `reward = "partial"`
    last_number: bool = False  # the run's format of answers, in place of `whole`
    common: bool = False  # no defence: all tasks are common to all nodes, so that peers meet on one
    rescue: bool = False  # none either: own groups that are all wrong take others' right texts

    @property
    def own_rule(self) -> bool:
        """Whether texts are scored by a rule that a run can have."""
        return self.exact or self.partial


AS_SHIPPED = Guards(own_answers=True, exact=True, informative=True, producer_cap=True)
LAST_NUMBER = replace(AS_SHIPPED, last_number=True)
GUARDS: dict[str, Guards] = {
    "none": Guards(),
    "own answers": Guards(own_answers=True),
    "exact": Guards(exact=True),
    "informative": Guards(informative=True),
    "producer cap": Guards(producer_cap=True),
    "length cap": Guards(length_cap=True),
    "likely tokens": Guards(likely_tokens=True),
    "as shipped": AS_SHIPPED,
    "last number": LAST_NUMBER,
    "common": replace(AS_SHIPPED, common=True),
    "rescue": replace(AS_SHIPPED, common=True, rescue=True),
    "common, last number": replace(LAST_NUMBER, common=True),
    "rescue, last number": replace(LAST_NUMBER, common=True, rescue=True),
    "partial": Guards(own_answers=True, informative=True, producer_cap=True, partial=True),
    "all": Guards(True, True, True, True, True, True),
}


def first_number_right(text: str, answer: str) -> bool:
    """The lenient rule, as of a checker that finds the answer in a longer text."""
    found = re.match(r"\s*([0-9]+)", text)
    return found is not None and found[1] == answer


def exactly_right(text: str, answer: str) -> bool:
    """The strictest rule: this text and no other."""
    return text.removeprefix(" ") == answer


Claims = dict[tuple[str, str], str]  # (producer, prompt) -> the answer that it would send along


class GuardedVerifier:
    """A verifier with the strictness that is asked for; the production one where all is on."""

    def __init__(self, run: Any, guards: Guards, claims: Mapping[tuple[str, str], str]) -> None:
        from node.verification.verifier import InlineVerifier

        self._inner = InlineVerifier(run)
        self._guards = guards
        self._claims = claims
        self.counters = self._inner.counters
        self.answers: dict[str, str] = {}  # by prompt, of all problems seen

    async def problems(self, tasks: Any) -> Any:
        """See `Verifier.problems`."""
        posed = await self._inner.problems(tasks)
        self.answers.update({problem.prompt: problem.answer for problem in posed})
        return posed

    async def score(self, tasks: Any, texts: Any) -> list[tuple[float, ...]]:
        """See `Verifier.score`: own work is scored against the right answers, always."""
        if self._guards.own_rule:
            return await self._inner.score(tasks, texts)
        posed = await self.problems(tasks)
        return [
            self._rewards(group, problem.answer)
            for group, problem in zip(texts, posed, strict=True)
        ]

    async def verify(self, group: Any, task: Any = None) -> tuple[str, tuple[float, ...]]:
        """See `Verifier.verify`."""
        prompt, rewards = await self._inner.verify(group, task)  # its checks are never off
        if self._guards.own_answers and self._guards.own_rule:
            return prompt, rewards
        (problem,) = await self.problems([group.task])
        answer = problem.answer
        if not self._guards.own_answers:
            answer = self._claims.get((group.producer, prompt), answer)
        return prompt, self._rewards([c.text for c in group.completions], answer)

    def _rewards(self, texts: Sequence[str], answer: str) -> tuple[float, ...]:
        right = exactly_right if self._guards.exact else first_number_right
        return tuple(float(right(text, answer)) for text in texts)


@contextmanager
def drawing(guards: Guards) -> Iterator[None]:
    """Let rounds draw foreign groups without the filter, if it is off."""
    from node.loops import sapo

    shipped = sapo.draw_foreign

    def unfiltered(candidates: Any, *rest: Any) -> list[Any]:
        return shipped([each._replace(rewards=(0.0, 1.0)) for each in candidates], *rest)

    if not guards.informative:
        sapo.draw_foreign = unfiltered
    try:
        yield
    finally:
        sapo.draw_foreign = shipped
