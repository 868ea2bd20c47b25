"""Counts of completions with an answer, with a right answer, and cut by the token limit.

The verifier finds answers by the same function. Its work is bounded, so that strangers' texts may
be searched outside the verifier's process.
"""

from collections.abc import Iterable

from node.config import RunConfig
from node.environments.answers import answer_in
from node.interfaces.prompts import Prompt
from node.records.records import AnswerCounts, SampledGroup, SampledText
from node.records.samples import TEXTS_MAX, shortened
from swarm.rollouts import Author, Completion, FinishReason, VerifiedGroup


def outcome_counts(run: RunConfig, groups: Iterable[VerifiedGroup]) -> AnswerCounts:
    """Count all completions of the groups."""
    completions = unread = right = cut = 0
    for each in groups:
        task, made = each.group.task, each.group.completions
        kind = run.answer_rule(task.environment, task.parameters).format
        completions += len(made)
        unread += sum(answer_in(kind, c.text) is None for c in made)
        right += sum(reward == 1.0 for reward in each.rewards)
        cut += sum(c.finish_reason is FinishReason.LENGTH for c in made)
    return AnswerCounts(completions, unread, right, cut)


def sampled(run: RunConfig, round_: int, scored: VerifiedGroup) -> SampledGroup:
    """The group as people look at it."""
    group = scored.group
    task = group.task
    kind = run.answer_rule(task.environment, task.parameters).format
    texts = []
    for completion, reward in list(zip(group.completions, scored.rewards, strict=True))[:TEXTS_MAX]:
        answer = answer_in(kind, completion.text)
        texts.append(
            SampledText(
                shortened(_shown(completion)),
                None if answer is None else shortened(answer),
                reward,
                str(completion.finish_reason),
            )
        )
    prompt = shortened(Prompt.read(scored.prompt).plain)
    return SampledGroup(
        round_, scored.own, str(group.producer), task.environment, prompt, tuple(texts)
    )


def _shown(completion: Completion) -> str:
    """Its text; in a transcript, what was said to the policy stands in brackets on its own line."""
    return "".join(
        text if author is Author.POLICY else f"\n[{text}]\n" for author, text in completion.parts()
    )
