"""Generate: what completions begin with, and how they are sampled."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import isfinite
from random import Random
from typing import Any, Final

from node.interfaces.engine import Outcome, Request
from node.interfaces.prompts import NO_TEXT, Prompt
from node.methods.drafts import Draft, DraftBank
from node.methods.generation import (
    Purify,
    Speculative,
    WeightNoise,
    is_purified,
    noise,
    purify,
    replaced,
    success_weight,
)
from node.methods.groups import Advantages
from node.methods.hints import BareSuccess, Hints, Nudges, nudges
from node.stages.stage import BatchGroup, More, RoundOutcome, Sample, Stage, View, Wanted
from node.verify.assignment import is_common
from swarm.rollouts import Task

REFERENCE_TOKENS_MAX: Final = 2**18  # whose log-probs are kept; of more, the oldest prompts go


class AddNoise(Stage[WeightNoise]):
    """QeRL's adaptive noise. The log-probs are the noisy policy's, so groups are shared."""

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        deviation = noise(at.step, self.set_to.steps, self.set_to)
        self.acted += len(wanted) if deviation else 0
        return await sample(wanted, noise=deviation)


class Nudge(Stage[Nudges]):
    """NudgeRL: some of a task's prompts name a strategy. Its completions are also learned from
    under the bare prompt, with a small weight."""

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        rng = at.rng("nudges")
        return [part for each in wanted for part in self._split(each, rng)]

    def _split(self, wanted: Wanted, rng: Random) -> list[Wanted]:
        count = min(self.set_to.strategies, len(self.set_to.texts))
        texts = rng.sample(self.set_to.texts, count)
        found = nudges(rng, wanted.request.n, replace(self.set_to, strategies=count))
        named = sorted("" if each is None else texts[each] for each in found)
        self.acted += sum(map(bool, named))
        return [self._nudged(wanted, text, len(list(same))) for text, same in groupby(named)]

    def _nudged(self, wanted: Wanted, text: str, count: int) -> Wanted:
        request = replace(wanted.request, n=count)
        if text:
            said = Prompt.read(request.prompt)
            request = replace(request, prompt=said.asking(f"{said.question}\n\n{text}").text)
        return replace(wanted, request=request, context=text)

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        """Add the nudged completions under the bare prompt, as if nobody knew their log-probs."""
        groups, values = list(batch), list(worth)
        for each, its in zip(batch, worth, strict=True):
            named = [] if each.drawn else each.scored.contexts
            places = [place for place, context in enumerate(named) if context]
            if places and self.set_to.distil:
                groups.append(self._distilled(each.only(places)))
                values.append(tuple(its[place] for place in places))
        return groups, values

    def _distilled(self, nudged: BatchGroup) -> BatchGroup:
        group = nudged.scored.group
        made = tuple(replace(each, logprobs=()) for each in group.completions)
        scored = replace(nudged.scored, group=replace(group, completions=made))
        weights = tuple(self.set_to.distil * each for each in nudged.column("weights", 1.0))
        return replace(nudged, scored=scored, prompts=(), weights=weights)


class PurifyPrompts(Stage[Purify]):
    """LENS: prompts that go badly are tried again without some of their tokens. What succeeds then
    is learned from under the whole prompt. The reference is the policy as it was when it first saw
    the prompt, so a task has to come again."""

    def __init__(self, set_to: Purify) -> None:
        super().__init__(set_to)
        self._reference: OrderedDict[str, Sequence[float]] = OrderedDict()  # by a prompt's hash
        self._shortened: dict[str, str] = {}  # of this round, by the whole prompt

    def begin(self) -> None:
        super().begin()
        self._shortened = {}

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        prompts = [
            each.request.prompt
            for each in wanted
            if each.request.prompt == each.assigned.prompt
            and is_common(at.config.run, each.assigned.task)
        ]
        told = await at.trainer.prompt_logprobs(prompts)
        for prompt, (texts, logprobs) in zip(prompts, told, strict=True):
            self._look(prompt, texts, logprobs)
        return await sample(wanted)

    def _look(self, prompt: str, texts: Sequence[str], logprobs: Sequence[float]) -> None:
        """Shorten a prompt that was seen before."""
        name = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        reference = self._reference.get(name)
        if reference is None:
            self._reference[name] = [round(each, 3) for each in logprobs]
            while sum(map(len, self._reference.values())) > REFERENCE_TOKENS_MAX:
                self._reference.popitem(last=False)
        elif len(reference) == len(texts) > 1:
            kept = purify(logprobs, reference, self.set_to)
            question = "".join(texts[place] for place in kept)
            self._shortened[prompt] = Prompt.read(prompt).asking(question).text

    def more(self, made: Sequence[BatchGroup], at: View) -> More:
        found = []
        for each in made:
            right = [reward == 1.0 for reward in each.scored.rewards]
            shortened = self._shortened.pop(each.scored.prompt, None)
            is_whole = shortened is not None and each.is_bare and each.scored.decided
            if shortened and is_whole and is_purified(right, self.set_to):
                found.append(Wanted(each.assigned, Request(shortened, len(right))))
        return More(found)

    def select(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        """Put successes with a shortened prompt in the places of failures with the whole one."""
        rng = at.rng("purify")
        return [self._mixed(each, rng) if is_mixed(each) else each for each in batch]

    def _mixed(self, group: BatchGroup, rng: Random) -> BatchGroup:
        right = [reward == 1.0 for reward in group.scored.rewards]
        whole = [at for at in range(len(right)) if group.prompt_of(at) == group.scored.prompt]
        short = [at for at in range(len(right)) if at not in whole]
        gone, new = replaced([right[at] for at in whole], [right[at] for at in short], rng)
        self.acted += len(new)
        left = {whole[at] for at in gone}
        places = [*(at for at in whole if at not in left), *(short[at] for at in new)]
        found = replace(group.only(places), prompts=())
        if not new:
            return found
        weights = tuple(
            weight * success_weight(at in whole and right[at], self.set_to)
            for at, weight in zip(places, found.column("weights", 1.0), strict=True)
        )
        return replace(found, weights=weights)

    def to_record(self) -> Any:
        return dict(self._reference)

    def restore(self, record: Any) -> None:
        self._reference = OrderedDict(record)


def is_mixed(group: BatchGroup) -> bool:
    """True if some completions have the whole prompt, and others a shortened one."""
    return not group.drawn and not group.scored.contexts and len(set(group.prompts)) > 1


class GiveHints(Stage[Hints]):
    """The beginning of another node's right completion, where a task is hard for this node."""

    def __init__(self, set_to: Hints) -> None:
        super().__init__(set_to)
        self._bare = BareSuccess()

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        return [self._hinted(each, at) for each in wanted]

    def _hinted(self, wanted: Wanted, at: View) -> Wanted:
        """A hint has at most as many bytes as a completion may have tokens."""
        task, most = wanted.assigned.task, at.sampling.max_new_tokens
        texts = [each.completion.text for each in at.solved.of(task)]
        fit = [text for text in texts if len(text.encode()) <= most and NO_TEXT not in text]
        rule = at.config.run.answer_rule(task.environment, task.parameters)
        hint = self._bare.hint(task, fit, at.step, self.set_to, rule.find)
        if not hint:
            return wanted
        self.acted += 1
        prompt = Prompt.read(wanted.request.prompt).begun(hint).text
        return replace(wanted, request=replace(wanted.request, prompt=prompt))

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        for each in outcome.own:
            task = each.scored.group.task
            if each.scored.decided and each.is_bare and is_common(at.config.run, task):
                self._bare.learn(task, each.scored.rewards)


class Redraft(Stage[Speculative]):
    """SPEC-RL: keep the beginnings of what the node made of the same task before."""

    def __init__(self, set_to: Speculative) -> None:
        super().__init__(set_to)
        self._drafts = DraftBank()
        self._calls = 0  # in this round
        self._offered: set[Task] = set()  # in this round: further completions get no drafts again

    def begin(self) -> None:
        super().begin()
        self._calls, self._offered = 0, set()

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        drafts = [draft for its in wanted for draft in self._of(its)]
        self.acted += sum(len(draft.token_ids) for draft in drafts)
        seed = at.seed("generate", self._calls)
        self._calls += 1
        made = iter(await at.engine.redraft(drafts, self.set_to, at.sampling, seed))
        return [Outcome(tuple(next(made) for _ in range(each.request.n))) for each in wanted]

    def _of(self, its: Wanted) -> list[Draft]:
        """The drafts of a task's own prompt, once in a round; others have none."""
        task, request = its.assigned.task, its.request
        is_bare = request.prompt == its.assigned.prompt
        if task in self._offered or not is_bare:
            return [Draft(request.prompt)] * request.n
        self._offered.add(task)
        return self._drafts.drafts(task, request.prompt, request.n)

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        for each in outcome.own:
            group = each.scored.group
            has_logprobs = all(all(map(isfinite, c.logprobs)) for c in group.completions)
            if has_logprobs and each.is_bare and is_common(at.config.run, group.task):
                self._drafts.keep(group.task, group.completions)
