"""Transcripts worked out again: what an environment must have said, and who lies about it. Pure."""

from collections.abc import Sequence
from typing import Final

from node.envs.base import Interaction, Problem
from swarm.errors import Reject
from swarm.rollouts import Author, Completion, FinishReason

REPLY_CHARS_MAX: Final = 2_048  # of what an environment says in one turn; the rest is left out

Parts = Sequence[tuple[bool, str]]  # (whether the policy said it, text), in turns
Said = str | tuple[bool, Parts]
"""What is scored: a text, or a transcript with whether the policy was cut in its last turn."""


def said_of(completion: Completion) -> Said:
    """A completion as it is scored."""
    if not completion.segments:
        return completion.text
    parts = [(author is Author.POLICY, text) for author, text in completion.parts()]
    return completion.finish_reason is not FinishReason.STOP, parts


def chars_of(said: Said) -> int:
    """The number of characters."""
    return len(said) if isinstance(said, str) else sum(len(text) for _, text in said[1])


def replies(source: Interaction, problem: Problem, texts: Sequence[str]) -> list[str | None]:
    """The reply to each of the policy's turns; None, which is the last: it is over."""
    found: list[str | None] = []
    state = source.begin(problem)
    for text in texts[: source.turns_max]:
        if len(found) + 1 == source.turns_max:  # nothing that is said then is heard
            return [*found, None]
        state, reply = source.reply(problem, state, text)
        if reply is None:
            return [*found, None]
        # half a surrogate pair is in no file, on no wire and of no tokenizer
        found.append(reply[:REPLY_CHARS_MAX].encode("utf-8", "replace").decode())
    return found


def takes_turns(parts: Parts) -> bool:
    """True if the policy begins and ends, and no turn of either is missing."""
    return len(parts) % 2 == 1 and all(mine is (at % 2 == 0) for at, (mine, _) in enumerate(parts))


def forgery(source: Interaction, problem: Problem, said: Said) -> Reject | None:
    """The fault of a transcript that somebody sent; None: it is as it must be."""
    if isinstance(said, str):
        return Reject.SKIPPED_TURN
    cut, parts = said
    if not takes_turns(parts):
        return Reject.SKIPPED_TURN
    texts, heard = [text for _, text in parts[::2]], [text for _, text in parts[1::2]]
    found = replies(source, problem, texts)
    wrong = [at for at, text in enumerate(heard) if at < len(found) and found[at] != text]
    if wrong:
        if found[wrong[0]] is None or _explained_by_a_turn_left_out(
            source, problem, texts, heard, wrong[0]
        ):
            return Reject.SKIPPED_TURN
        if len(wrong) == len(heard) > 1:
            return Reject.OTHER_TRANSCRIPT
        return Reject.FORGED_TOOL_RESULT if source.tools else Reject.FORGED_OBSERVATION
    over = found[-1] is None
    if len(found) < len(texts) or not (over or cut):
        return Reject.SKIPPED_TURN
    return None


def _explained_by_a_turn_left_out(
    source: Interaction, problem: Problem, texts: Sequence[str], heard: Sequence[str], at: int
) -> bool:
    """True if the reply that does not fit would, after one more turn that said nothing."""
    found = replies(source, problem, [*texts[:at], "", texts[at]])
    return len(found) == at + 2 and found[-1] == heard[at]
