"""From scored groups to batches, counts and samples, for the loops that train.

Answers are found by the verifier's function. Its work on strangers' texts is bounded.
"""

import hashlib
from collections.abc import Iterable, Sequence
from math import isfinite
from statistics import fmean

from node.config import RunConfig
from node.envs.answers import after_thought
from node.interfaces.engine import Serving
from node.interfaces.prompts import Prompt
from node.observe.records import AnswerCounts, SampledGroup, SampledText
from node.observe.samples import EXAMPLES, TEXTS_MAX, shortened
from node.run.parts import LivePolicy, NodeParts
from node.verify.held_out import Assignment
from swarm.rollouts import Author, Completion, FinishReason, RolloutGroup, ScoredGroup, Task


def seed_of(*parts: object) -> int:
    """A seed of 56 bits from what identifies a draw."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def rollout_group(
    node: NodeParts,
    policy: LivePolicy | Serving,
    round_: int,
    assigned: Assignment,
    completions: tuple[Completion, ...],
) -> RolloutGroup:
    """A group of this node, made at this moment."""
    run, created_at_s = node.config.run, int(node.now_s())
    return RolloutGroup(
        run_id=run.run_id,
        producer=node.peer_id,
        round=round_,
        task=assigned.task,
        completions=completions,
        tokenizer=policy.tokenizer,
        temperature=run.sampling.temperature,
        top_p=run.sampling.top_p,
        created_at_s=created_at_s,
        expires_at_s=created_at_s + run.limits.record_life_s,
        engine=policy.engine.maker.engine,
        precision=policy.engine.maker.precision,
        attempt=assigned.attempt,
    )


def finite(value: float | None) -> float | None:
    """The value; None where it is unknown or no number."""
    return value if value is not None and isfinite(value) else None


def lengths(completions: Iterable[Completion]) -> dict[str, float]:
    """The mean and the largest number of tokens; nothing if the engine tells no tokens."""
    counts = [len(each.token_ids) for each in completions if each.token_ids]
    if not counts:
        return {}
    return {"completion_tokens_mean": fmean(counts), "completion_tokens_max": float(max(counts))}


def outcome_counts(run: RunConfig, groups: Iterable[ScoredGroup]) -> AnswerCounts:
    """Count all completions of the groups."""
    completions = unread = right = cut = thoughts_cut = 0
    for each in groups:
        task, made = each.group.task, each.group.completions
        rule = run.answer_rule(task.environment, task.parameters)
        completions += len(made)
        unread += sum(rule.find(c.text) is None for c in made)
        right += sum(reward == 1.0 for reward in each.rewards)
        ends = [c for c in made if c.finish_reason is FinishReason.LENGTH]
        cut += len(ends)
        thoughts_cut += sum(after_thought(c.text, rule.thought_end) is None for c in ends)
    return AnswerCounts(completions, unread, right, cut, thoughts_cut)


def sampled(run: RunConfig, round_: int, scored: ScoredGroup) -> SampledGroup:
    """The group as people look at it."""
    group = scored.group
    texts = _texts(run, group.task, group.completions, scored.rewards)
    prompt, where = shortened(Prompt.read(scored.prompt).plain), group.task.environment
    return SampledGroup(round_, scored.own, str(group.producer), where, prompt, texts)


def examples(
    run: RunConfig,
    round_: int,
    assigned: Sequence[Assignment],
    made: Sequence[Sequence[Completion]],
    rewards: Sequence[Sequence[float]],
) -> tuple[SampledGroup, ...]:
    """The first of an evaluation's tasks with their answers, always of the same tasks."""
    return tuple(
        SampledGroup(
            round_,
            True,
            "",
            each.task.environment,
            shortened(Prompt.read(each.prompt).plain),
            _texts(run, each.task, completions, scores),
        )
        for each, completions, scores in list(zip(assigned, made, rewards, strict=True))[:EXAMPLES]
    )


def _texts(
    run: RunConfig, task: Task, completions: Sequence[Completion], rewards: Sequence[float]
) -> tuple[SampledText, ...]:
    rule = run.answer_rule(task.environment, task.parameters)
    texts = []
    for completion, reward in list(zip(completions, rewards, strict=True))[:TEXTS_MAX]:
        answer = rule.find(completion.text)
        texts.append(
            SampledText(
                shortened(_shown(completion)),
                None if answer is None else shortened(answer),
                reward,
                str(completion.finish_reason),
            )
        )
    return tuple(texts)


def _shown(completion: Completion) -> str:
    """The text; replies of the environment stand in brackets on their own lines."""
    return "".join(
        text if author is Author.POLICY else f"\n[{text}]\n" for author, text in completion.parts()
    )
