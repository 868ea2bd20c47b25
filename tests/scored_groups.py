"""Scored groups for tests of methods: only what a test names matters."""

from collections.abc import Sequence

from swarm.identity import PeerId
from swarm.rollouts import (
    Completion,
    FinishReason,
    GroupId,
    RolloutGroup,
    ScoredGroup,
    Task,
)


def scored(
    rewards: Sequence[float],
    prompt: str = "",
    source: str = "",
    *,
    lengths: Sequence[int] = (),
    texts: Sequence[str] = (),
    logprobs: Sequence[float] = (),
    contexts: Sequence[str] = (),
) -> ScoredGroup:
    """A group with these rewards. `lengths`: tokens of each completion, all of the same log-prob,
    which `logprobs` gives; no `source`: an own group."""
    count = len(rewards)
    tokens = tuple(lengths) or (1,) * count
    logs = tuple(logprobs) or (0.0,) * count
    said = tuple(texts) or tuple(str(place) for place in range(count))
    made = tuple(
        Completion(text, (1,) * n, (log,) * n, FinishReason.STOP, 0)
        for text, n, log in zip(said, tokens, logs, strict=True)
    )
    return of_completions(made, rewards, prompt, source, contexts)


def of_completions(
    completions: Sequence[Completion],
    rewards: Sequence[float],
    prompt: str = "",
    source: str = "",
    contexts: Sequence[str] = (),
    task: Task | None = None,
) -> ScoredGroup:
    task = task or Task("", "", "", 0, 0)
    made = tuple(completions)
    group = RolloutGroup("run", PeerId(source), 0, task, made, "", 1.0, 1.0, 0, 0)
    own = not source
    return ScoredGroup(
        GroupId(b""), group, prompt, tuple(rewards), own=own, contexts=tuple(contexts)
    )
