"""Generate: what completions begin with, and how they are sampled."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isfinite

from node.envs.answers import answer_in
from node.interfaces.engine import Outcome
from node.interfaces.prompts import NO_TEXT, Prompt
from node.methods.drafts import DraftBank
from node.methods.generation import Speculative
from node.methods.hints import BareSuccess, Hints
from node.stages.stage import RoundOutcome, Sample, Stage, View, Wanted
from node.verify.assignment import is_common


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
        find = partial(answer_in, rule.format)
        hint = self._bare.hint(task, fit, at.step, self.set_to, find)
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
        self._calls = 0

    def plan(self, wanted: Sequence[Wanted], at: View) -> Sequence[Wanted]:
        self._calls = 0
        return wanted

    async def generate(self, wanted: Sequence[Wanted], at: View, sample: Sample) -> list[Outcome]:
        drafts = [
            draft
            for its in wanted
            for draft in self._drafts.drafts(its.assigned.task, its.request.prompt, its.request.n)
        ]
        self.acted += sum(len(draft.token_ids) for draft in drafts)
        seed = at.seed("generate", self._calls)
        self._calls += 1
        made = iter(await at.engine.redraft(drafts, self.set_to, at.sampling, seed))
        return [Outcome(tuple(next(made) for _ in range(each.request.n))) for each in wanted]

    def learn(self, outcome: RoundOutcome, at: View) -> None:
        for each in outcome.own:
            group = each.scored.group
            has_logprobs = all(all(map(isfinite, c.logprobs)) for c in group.completions)
            if has_logprobs and is_common(at.config.run, group.task):
                self._drafts.keep(group.task, group.completions)
