"""A prompt as text: a question alone, or one that a system prompt and worked examples come before.

A question alone is its own text, so that runs without instructions have the prompts that they
always had. Otherwise the prompt is a mark and the messages as JSON: one text, which pools keep,
processes pass on and nodes compare. Policies with a chat template read it as messages
(`messages_of`), others as plain text (`plain_text`).

A prompt may end with a hint: what a completion begins with, which its policy is not to make itself.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

MARK: Final = "\x1e"  # ASCII's record separator, which no question begins with
NO_TEXT: Final = "\N{REPLACEMENT CHARACTER}"  # in a completion, for a token that has no text
_ROLES: Final = frozenset({"system", "user", "assistant"})

Message = dict[str, str]  # `role` and `content`
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def placeholder(number: int) -> str:
    """A word that no template has, which stands for a message in it."""
    return f"0cd1e2a7{number:04}"


def prompt_of(question: str, system: str = "", examples: Sequence[tuple[str, str]] = ()) -> str:
    """The prompt of a question. `examples`: (question, completion)."""
    if not system and not examples:
        return question
    told = [("system", system)] if system else []
    shown = [pair for q, c in examples for pair in (("user", q), ("assistant", c))]
    messages = [*told, *shown, ("user", question)]
    return MARK + json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


def hinted(prompt: str, hint: str) -> str:
    """A prompt whose completions begin with `hint`."""
    messages = [*_asked(prompt), ("assistant", hint)]
    return MARK + json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


def hint_of(prompt: str) -> str:
    """What the completions of a prompt begin with; mostly nothing."""
    role, content = _pairs(prompt)[-1]
    return content if role == "assistant" else ""


def begun(prompt: str) -> str:
    """What a policy goes on from of a prompt's hint: without the gap that it may end with, as words
    are tokens together with the gaps before them."""
    return hint_of(prompt).rstrip()


def whole(prompt: str, text: str) -> str:
    """A completion's text behind what it went on from, if its prompt has a hint."""
    return begun(prompt) + text


def decoded(prompt: str, ids: Sequence[int], encode: Encode, decode: Decode) -> str:
    """The text of a completion's ids. Behind a hint it is what these ids add to the hint's: some
    tokenizers lose the gap that a text begins with, and then tokens alone do not say whether the
    policy made one."""
    if not (hint := begun(prompt)):
        return decode(list(ids))
    before = list(encode(hint))
    alone, both = decode(before), decode([*before, *ids])
    return both.removeprefix(alone) if both.startswith(alone) else decode(list(ids))


def messages_of(prompt: str, *, with_system: bool = True) -> list[Message]:
    """The messages of a prompt, the question last, without a hint. Without `with_system` what the
    system says comes first in the first question, for chat templates that know no such role."""
    messages = [{"role": role, "content": content} for role, content in _asked(prompt)]
    if with_system or messages[0]["role"] != "system":
        return messages
    told, first, *others = messages
    return [{**first, "content": f"{told['content']}\n\n{first['content']}"}, *others]


def question_of(prompt: str) -> str:
    """The question alone."""
    return _asked(prompt)[-1][1]


def plain_text(prompt: str) -> str:
    """The prompt for a policy without a chat template, without a hint. After worked examples the
    answer begins on a line of its own, as theirs do."""
    *before, (_, question) = _asked(prompt)
    parts = []
    for role, content in before:
        parts.append(f"{content}\n" if role == "user" else f"{content}\n\n")
    shown = any(role == "user" for role, _ in before)
    return "".join(parts) + question + ("\n" if shown else "")


def takes_system(chat_template: str | Mapping[str, str] | None) -> bool:
    """Whether a chat template has a place for what the system says. One that does not either never
    names that role or raises an error that says so."""
    text = chat_template if isinstance(chat_template, str) else str(chat_template or "")
    return "system" in text and "not supported" not in text.lower()


# --- between two turns ---------------------------------------------------------------------------

_PLACES: Final = tuple(placeholder(number) for number in range(3))
TWO_TURNS: Final[list[Message]] = [
    {"role": role, "content": place}
    for role, place in zip(("user", "assistant", "user"), _PLACES, strict=True)
]


def around_reply(rendered: str) -> tuple[str, str] | None:
    """What a chat template puts between a policy's turn and a reply, and behind the reply; None: it
    leaves one of them out. `rendered`: `TWO_TURNS`, up to where the next turn begins."""
    _, said, place = _PLACES
    _, found, rest = rendered.partition(said)
    end, found_reply, begin = rest.partition(place)
    return (end, begin) if found and found_reply else None


def behind(plain: Sequence[int], ids: Sequence[int]) -> tuple[int, ...]:
    """What a tokenizer without a chat template puts behind a prompt. `plain`: the ids of the text
    alone, as they stand in `ids`."""
    for at in range(len(ids) - len(plain) + 1):
        if list(ids[at : at + len(plain)]) == list(plain):
            return tuple(ids[at + len(plain) :])
    return ()


def _asked(prompt: str) -> list[tuple[str, str]]:
    """(role, content) of each message up to the question."""
    messages = _pairs(prompt)
    return messages[:-1] if messages[-1][0] == "assistant" else messages


def _pairs(prompt: str) -> list[tuple[str, str]]:
    """(role, content) of each message."""
    if prompt.startswith(MARK):
        try:
            messages = [(role, content) for role, content in json.loads(prompt[1:])]
        except (ValueError, TypeError, RecursionError):
            messages = []
        # An answer alone is none: there is a question before it
        if (
            messages
            and all(r in _ROLES and isinstance(c, str) for r, c in messages)
            and any(r == "user" for r, _ in messages)
        ):
            return messages
    return [("user", prompt)]
