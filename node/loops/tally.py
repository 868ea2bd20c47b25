"""What became of a batch's completions: how many had an answer, a right one, an end. Pure.

The same function finds the answers here and in the verifier; it is bounded, so that strangers'
texts may be looked at outside of the verifier's process.
"""

from collections.abc import Iterable, Sequence

from node.config import RunConfig
from node.environments.answers import answer_in
from node.interfaces.prompts import plain_text
from node.records.records import AnswerCounts, SampledGroup, SampledText
from node.records.samples import TEXTS_MAX, shortened
from swarm.identity import PeerId
from swarm.rollouts import Author, Completion, FinishReason, Task, VerifiedGroup

Scored = tuple[Task, Sequence[Completion], Sequence[float]]  # one group with its rewards


def scored_of(verified: VerifiedGroup) -> Scored:
    """Of somebody's group what is counted."""
    return verified.group.task, verified.group.completions, verified.rewards


def tally(run: RunConfig, groups: Iterable[Scored]) -> AnswerCounts:
    """Count over all completions of the groups."""
    completions = unread = right = cut = 0
    for task, made, rewards in groups:
        kind = run.answer_rule(task.environment, task.parameters).format
        completions += len(made)
        unread += sum(answer_in(kind, each.text) is None for each in made)
        right += sum(reward == 1.0 for reward in rewards)
        cut += sum(each.finish_reason is FinishReason.LENGTH for each in made)
    return AnswerCounts(completions, unread, right, cut)


def sampled(
    run: RunConfig, round_: int, producer: PeerId, prompt: str, group: Scored, *, own: bool
) -> SampledGroup:
    """A group as people look at it."""
    task, made, rewards = group
    kind = run.answer_rule(task.environment, task.parameters).format
    texts = []
    for completion, reward in list(zip(made, rewards, strict=True))[:TEXTS_MAX]:
        answer = answer_in(kind, completion.text)
        texts.append(
            SampledText(
                shortened(_shown(completion)),
                None if answer is None else shortened(answer),
                reward,
                str(completion.finish_reason),
            )
        )
    return SampledGroup(
        round_, own, str(producer), task.environment, shortened(plain_text(prompt)), tuple(texts)
    )


def _shown(completion: Completion) -> str:
    """Its text; in a transcript, what was said to the policy stands in brackets on its own line."""
    return "".join(
        text if author is Author.POLICY else f"\n[{text}]\n" for author, text in completion.parts()
    )
