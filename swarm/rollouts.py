"""Plain values that everyone passes around: Task, Completion, RolloutGroup."""

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
Counters = tuple[tuple[int, int, int], ...]  # (bucket, tries, successes), buckets ascending


class FinishReason(StrEnum):
    STOP = "stop"  # the policy emitted its end-of-sequence token
    LENGTH = "length"  # the token limit cut it
    ABORT = "abort"  # the engine was interrupted


class Author(StrEnum):
    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a transcript. An environment's has no tokens: each node encodes it itself."""

    author: Author
    chars: int
    tokens: int


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
    """One sampled answer. The columns have equal lengths, EOS included if sampled.

    `spans`: policy version of each run of tokens if the weights changed in between; empty:
    `policy_version` made all. `segments`: turns of a transcript, in which `text` is all that was
    said and the columns are of the policy's tokens alone; empty: one turn of the policy.
    """

    text: str
    token_ids: tuple[int, ...]  # of the producer's tokenizer
    logprobs: tuple[float, ...]  # natural log, of the distribution that was sampled from
    finish_reason: FinishReason
    policy_version: int  # optimizer updates behind the oldest policy that made a token of it
    spans: Spans = ()
    segments: tuple[Turn, ...] = ()
    propensity: float = 1.0  # with which a continuation was chosen whose prefix was another's
    splices: tuple[int, ...] = ()  # after so many tokens a prefix by another policy ends; ascending

    def parts(self) -> list[tuple[Author, str]]:
        if not self.segments:
            return [(Author.POLICY, self.text)]
        found, at = [], 0
        for segment in self.segments:
            found.append((segment.author, self.text[at : at + segment.chars]))
            at += segment.chars
        return found


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """One task with all its completions. All of it but the signer is a claim."""

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
    attempt: int = 0  # how many groups of its producer for this task came before
    context: str = ""  # the short name of what stood before the task's prompt
    counters: Counters = ()  # tries at this task, by its producer

    @property
    def is_quantised(self) -> bool:
        return is_quantised(self.precision)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with this node's own results, none of which come from a sender."""

    group_id: GroupId  # empty until the node signs its own group
    group: RolloutGroup
    prompt: str  # regenerated from the task
    rewards: tuple[float, ...]  # one for each completion, by this node's own verifier, in [0, 1]
    own: bool = False  # this node's policy generated it
    decided: bool = (
        True  # False: of other completions no reward is known; other nodes refuse the group
    )
    contexts: tuple[str, ...] = ()  # of each completion: the hint or nudge it was generated under

    @property
    def source(self) -> str:
        return "" if self.own else str(self.group.producer)


def informative(rewards: Sequence[float]) -> bool:
    """True if the rewards differ, so that not all advantages are zero."""
    return max(rewards) - min(rewards) > REWARD_SPREAD_MIN


def is_quantised(precision: str) -> bool:
    """True if an engine of this precision computes with quantised weights."""
    return precision not in PLAIN_PRECISIONS


def version_spans(completion: Completion) -> Spans:
    """Runs of (policy version, tokens) that cover all tokens; raises if `spans` is wrong."""
    fault = spans_fault(completion)
    if fault is not None:
        raise LocalProtocolError(f"spans of a completion: {fault}")
    if completion.spans or not completion.token_ids:
        return completion.spans
    return ((completion.policy_version, len(completion.token_ids)),)


def spans_fault(completion: Completion, tokens: int | None = None) -> str | None:
    """Fault of a completion's spans; None: none. `tokens` None: as many as its column."""
    spans, tokens = completion.spans, len(completion.token_ids) if tokens is None else tokens
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


def segments_fault(completion: Completion, tokens: int) -> str | None:
    """Fault of the turns of a completion of so many tokens; None: none."""
    if not completion.segments:
        return None
    if sum(each.chars for each in completion.segments) != len(completion.text):
        return "turns of other lengths than the text's"
    if sum(each.tokens for each in completion.segments) != tokens:
        return "turns of other numbers of tokens than the column's"
    if any((each.author is Author.POLICY) != (each.tokens > 0) for each in completion.segments):
        return "a turn of the policy without tokens, or one of the environment with some"
    return None


def splices_fault(splices: Sequence[int], tokens: int) -> str | None:
    """Fault of the ends of prefixes in so many tokens; None: none."""
    if any(later <= earlier for earlier, later in pairwise((0, *splices))):
        return "splices that do not ascend"
    return "a splice beyond the tokens" if splices and splices[-1] > tokens else None


def counters_fault(counters: Counters) -> str | None:
    """Fault of counters of tries; None: none."""
    if any(later[0] <= earlier[0] for earlier, later in pairwise(counters)):
        return "buckets that do not ascend"
    return "more successes than tries" if any(s > t for _, t, s in counters) else None
