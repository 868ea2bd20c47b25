"""The records that everyone passes around: Task, Completion, RolloutGroup.

They are plain values. How they travel is in `swarm.wire.messages`, how foreign bytes become one of
them is in `swarm.wire.codec`, and what a prompt or an answer is, only the node's `tasks` know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NewType

from swarm.errors import LocalProtocolError
from swarm.identity import PeerId

GroupId = NewType("GroupId", bytes)  # SHA-256 of the domain-tagged payload; 32 bytes
PLAIN_PRECISIONS = frozenset({"", "float32", "float16", "bfloat16"})  # "": unsaid
REWARD_SPREAD_MIN = 1e-8  # rewards closer than this are equal: the group teaches nothing
Spans = tuple[tuple[int, int], ...]  # (policy version, how many tokens in a row it made)


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the policy emitted its end-of-sequence token
    LENGTH = "length"  # the token limit cut it
    ABORT = "abort"  # the engine was interrupted


@dataclass(frozen=True, slots=True)
class Task:
    """One problem, from which any node regenerates the same prompt and answer."""

    environment: str
    version: str  # of the environment; another version may make another problem
    parameters: str  # canonical JSON (sorted keys, no spaces)
    seed: int  # 0 <= seed < 2**63
    index: int  # position in the producer's stream, 0 <= index < 2**31


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. The columns are as long as each other, EOS included where sampled.

    `spans` says which policy version made which tokens, where the weights were replaced between two
    of them; empty: `policy_version` made them all. Rollouts on the wire carry no spans.
    """

    text: str
    token_ids: tuple[int, ...]  # of the producer's tokenizer
    logprobs: tuple[float, ...]  # natural log, of the distribution that was sampled from
    finish_reason: FinishReason
    policy_version: int  # optimizer updates behind the oldest policy that made a token of it
    spans: Spans = ()


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """One task with all its completions: what is shared, sampled and trained on.

    Everything in it but the signature's origin is a claim; rewards are absent because a receiver
    computes them itself.
    """

    run_id: str
    producer: PeerId
    round: int  # of the producer
    task: Task
    completions: tuple[Completion, ...]
    tokenizer: str  # fingerprint; token ids and log-probs mean nothing under another one
    temperature: float
    top_p: float
    created_at_s: int  # unix time by the producer's clock
    expires_at_s: int
    engine: str = ""  # what sampled it, such as `vllm`; empty: unsaid
    precision: str = (
        ""  # what that computed in, such as `bfloat16`, or how its weights are quantised
    )

    @property
    def is_quantised(self) -> bool:
        """Whether its producer says that quantised weights sampled it."""
        return is_quantised(self.precision)


@dataclass(frozen=True, slots=True)
class VerifiedGroup:
    """A group together with what this node worked out about it: never taken from a sender."""

    group_id: GroupId
    group: RolloutGroup
    prompt: str  # regenerated from the task
    rewards: tuple[float, ...]  # one for each completion, by this node's own verifier, in [0, 1]


def informative(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ, so that its advantages are not all zero."""
    return max(rewards) - min(rewards) > REWARD_SPREAD_MIN


def is_quantised(precision: str) -> bool:
    """Whether an engine of this precision computes with quantised weights."""
    return precision not in PLAIN_PRECISIONS


def version_spans(completion: Completion) -> Spans:
    """Runs of (policy version, tokens), in order, that add up to the completion's tokens.

    Raises:
        LocalProtocolError: its spans say something else; for those of a peer ask `spans_fault`.
    """
    fault = spans_fault(completion)
    if fault is not None:
        raise LocalProtocolError(f"spans of a completion: {fault}")
    if completion.spans or not completion.token_ids:
        return completion.spans
    return ((completion.policy_version, len(completion.token_ids)),)


def spans_fault(completion: Completion) -> str | None:
    """What is wrong with a completion's spans; None: nothing, as if there are none."""
    spans, tokens = completion.spans, len(completion.token_ids)
    if not spans:
        return None
    if any(count < 1 for _, count in spans):
        return "a run without tokens"
    if sum(count for _, count in spans) != tokens:
        return f"{sum(count for _, count in spans)} tokens in runs, {tokens} in all"
    if any(later < earlier for (earlier, _), (later, _) in pairwise(spans)):
        return "a version before an older one"
    if spans[0][0] != completion.policy_version:
        return f"version {completion.policy_version} is not the oldest, {spans[0][0]} is"
    return None


def oldest_version(group: RolloutGroup) -> int:
    """The oldest policy version that made a token of the group.

    Raises:
        LocalProtocolError: it has no completions, or spans that make no sense.
    """
    if not group.completions:
        raise LocalProtocolError("a group without completions has no policy version")
    for completion in group.completions:
        version_spans(completion)
    return min(completion.policy_version for completion in group.completions)
