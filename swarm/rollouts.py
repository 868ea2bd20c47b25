"""The records that everyone passes around: Task, Completion, RolloutGroup.

They are plain values. How they travel is in `swarm.messages`, how foreign bytes become one of
them is in `swarm.codec`, and what a prompt or an answer is, only the node's `tasks` know.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from swarm.identity import PeerId

GroupId = NewType("GroupId", bytes)  # SHA-256 of the domain-tagged payload; 32 bytes


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
    """One sampled answer. The columns are as long as each other, EOS included where sampled."""

    text: str
    token_ids: tuple[int, ...]  # of the producer's tokenizer
    logprobs: tuple[float, ...]  # natural log, of the distribution that was sampled from
    finish_reason: FinishReason
    policy_version: int  # optimizer updates behind the policy that generated it


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


@dataclass(frozen=True, slots=True)
class VerifiedGroup:
    """A group together with what this node worked out about it: never taken from a sender."""

    group_id: GroupId
    group: RolloutGroup
    prompt: str  # regenerated from the task
    rewards: tuple[float, ...]  # one for each completion, by this node's own verifier, in [0, 1]
