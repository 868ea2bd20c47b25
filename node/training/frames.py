"""The records inside the frames between the node and its trainer process.

Token columns are packed because they are the bulk. No weights pass here: they go through files.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from node.interfaces.engine import Context
from node.interfaces.trainer import TrainingGroup
from node.methods.generate.drafts import Draft
from swarm.rollouts import Author, Completion, FinishReason, Turn


def completion_record(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": array("I", completion.token_ids).tobytes(),
        "logprobs": array("d", completion.logprobs).tobytes(),
        "finish_reason": completion.finish_reason.value,
        "policy_version": completion.policy_version,
        "spans": completion.spans,
        "segments": [(str(t.author), t.chars, t.tokens) for t in completion.segments],
        "splices": completion.splices,
    }


def completion_of(record: Mapping[str, Any]) -> Completion:
    return Completion(
        text=record["text"],
        token_ids=tuple(array("I", record["token_ids"])),
        logprobs=tuple(array("d", record["logprobs"])),
        finish_reason=FinishReason(record["finish_reason"]),
        policy_version=record["policy_version"],
        spans=tuple((version, count) for version, count in record["spans"]),
        segments=tuple(Turn(Author(who), chars, n) for who, chars, n in record["segments"]),
        splices=tuple(record["splices"]),
    )


def context_records(contexts: Sequence[Context]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": context.prompt,
            "turns": [(array("I", ids).tobytes(), reply) for ids, reply in context.turns],
            "tokens_max": context.tokens_max,
        }
        for context in contexts
    ]


def contexts_of(records: Sequence[Mapping[str, Any]]) -> list[Context]:
    return [
        Context(
            prompt=record["prompt"],
            turns=tuple((tuple(array("I", ids)), reply) for ids, reply in record["turns"]),
            tokens_max=record["tokens_max"],
        )
        for record in records
    ]


def draft_records(drafts: Sequence[Draft]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": draft.prompt,
            "token_ids": array("I", draft.token_ids).tobytes(),
            "logprobs": array("d", draft.logprobs).tobytes(),
        }
        for draft in drafts
    ]


def drafts_of(records: Sequence[Mapping[str, Any]]) -> list[Draft]:
    return [
        Draft(
            record["prompt"],
            tuple(array("I", record["token_ids"])),
            tuple(array("d", record["logprobs"])),
        )
        for record in records
    ]


def group_records(groups: Sequence[TrainingGroup]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": group.prompt,
            "completions": [completion_record(c) for c in group.completions],
            "advantages": group.advantages,
            "own_tokens": group.own_tokens,
            "source": group.source,
            "tokenizer": group.tokenizer,
            "guided": group.guided,
            "shaping": group.shaping,
        }
        for group in groups
    ]


def groups_of(records: Sequence[Mapping[str, Any]]) -> list[TrainingGroup]:
    return [
        TrainingGroup(
            prompt=record["prompt"],
            completions=tuple(completion_of(c) for c in record["completions"]),
            advantages=tuple(record["advantages"]),
            own_tokens=record["own_tokens"],
            source=record["source"],
            tokenizer=record["tokenizer"],
            guided=record["guided"],
            shaping=record["shaping"],
        )
        for record in records
    ]


def column_records(groups: Sequence[Sequence[Sequence[float]]]) -> list[list[bytes]]:
    """One column of numbers for each completion of each group."""
    return [[array("d", column).tobytes() for column in group] for group in groups]


def columns_of(records: Sequence[Sequence[bytes]]) -> list[list[tuple[float, ...]]]:
    return [[tuple(array("d", column)) for column in group] for group in records]
