"""Replays transcripts: what an environment must have said, and how a transcript is forged. Pure."""

from collections.abc import Sequence
from typing import Final

from node.envs.base import Interaction, Problem
from swarm.errors import Reject
from swarm.rollouts import Author, Completion, FinishReason

REPLY_CHARS_MAX: Final = 2_048  # of an environment's reply; the rest is cut off

Parts = Sequence[tuple[bool, str]]  # (True: by the policy, text)
Said = str | tuple[bool, Parts]  # a text, or (True: its last turn was cut, transcript)


def said_of(completion: Completion) -> Said:
    """A completion as it is scored."""
    if not completion.segments:
        return completion.text
    parts = [(author is Author.POLICY, text) for author, text in completion.parts()]
    return completion.finish_reason is not FinishReason.STOP, parts


def chars_of(said: Said) -> int:
    return len(said) if isinstance(said, str) else sum(len(text) for _, text in said[1])


def replies(source: Interaction, problem: Problem, texts: Sequence[str]) -> list[str | None]:
    """The reply to each of the policy's turns; None, as the last one: it is over."""
    found: list[str | None] = []
    state = source.begin(problem)
    for text in texts[: source.turns_max]:
        if len(found) + 1 == source.turns_max:  # nobody reads a reply to the last turn
            return [*found, None]
        state, reply = source.reply(problem, state, text)
        if reply is None:
            return [*found, None]
        # half a surrogate pair fits no file, wire or tokenizer
        found.append(reply[:REPLY_CHARS_MAX].encode("utf-8", "replace").decode())
    return found


def takes_turns(parts: Parts) -> bool:
    """True if the policy begins and ends, and turns alternate."""
    return len(parts) % 2 == 1 and all(mine is (at % 2 == 0) for at, (mine, _) in enumerate(parts))


def forgery(source: Interaction, problem: Problem, said: Said) -> Reject | None:
    """The fault of a received transcript; None: it is right."""
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
    """True if the wrong reply is right after one more, empty turn."""
    found = replies(source, problem, [*texts[:at], "", texts[at]])
    return len(found) == at + 2 and found[-1] == heard[at]
