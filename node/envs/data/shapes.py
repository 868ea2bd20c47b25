"""Columns of the data sets that people have, found by their names, and the values in them.

A column is named by a path: `reward_model.ground_truth` is a field of a record, `answers.0` the
first of a list, and `instruction+input` two columns below each other. Only texts, numbers and
messages become questions and answers; other values are refused by their kind.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from string import ascii_uppercase as LETTERS
from typing import Any, Final

from node.envs.answers import BOX
from node.interfaces.prompts import MARK, PromptMessage

CHOICES_MAX: Final = 26
FINAL: Final = "####"  # GSM8K's mark before the answer
WORKED_CHARS_MAX: Final = 200  # beyond it a solution without a marked answer is no answer
NAMES_SHOWN_CHARS: Final = 160
DIGITS_MAX: Final = 1024  # before or after the point of a number in a table
_ROLES: Final = {"human": "user", "gpt": "assistant"}  # of ShareGPT, which has from and value
_KINDS: Final = {"NoneType": "null", "dict": "a record", "list": "a list", "tuple": "a list"}
_LETTERED: Final = re.compile(r"\(?([A-Z])[).:]\s*(\S.*)", re.DOTALL)
_CHAT_AS_TEXT: Final = re.compile(r"""\s*\[\s*\{\s*["'](?:role|from|content|value)["']\s*:""")
_QUESTIONS: Final = ("question", "problem", "prompt", "query", "instruction")
_ANSWERS: Final = (
    "answer", "final_answer", "expected_answer", "ground_truth", "answerKey", "solution",
    "completion", "output", "response", "target", "gold", "correct", "label",
)  # fmt: skip
_CHOICES: Final = ("choices", "options", "endings", "question.choices")
# One column for each choice: A, B, C, D; option_a, option_b; choice1, choice2
_ONE_CHOICE: Final = re.compile(
    r"((?:choice|option|opt|op|ending)[ _-]?|)([A-J]|\d)", re.IGNORECASE
)
_SHAPES: Final = (  # before the names above, which some of them have too
    ("verl", "prompt", "reward_model.ground_truth"),
    ("prime-rl", "prompt", "verification_info.ground_truth"),
    ("SVAMP", "body+question", "answer"),
    ("CommonsenseQA", "question.stem", "answerKey"),
    ("Alpaca", "instruction+input", "output"),
    ("ShareGPT", "conversations", "conversations"),
    ("a chat", "messages", "messages"),
)


@dataclass(frozen=True, slots=True)
class Columns:
    """Paths of a file's columns by their use; None: there is no such column."""

    question: str = "question"
    answer: str = "answer"
    choices: str | None = None
    rule: str | None = None
    shape: str = ""  # where they were found by their names; empty: somebody named them

    def by_use(self) -> dict[str, str]:
        named = (("question", self.question), ("answer", self.answer))
        more = (("choices", self.choices), ("rule", self.rule))
        return {use: name for use, name in (*named, *more) if name is not None}

    @property
    def tops(self) -> list[str]:
        """The names, in small letters, that one of a file's columns may have."""
        parts = {part for path in self.by_use().values() for part in (path, *path.split("+"))}
        return sorted({name.lower() for part in parts for name in (part, part.partition(".")[0])})

    @property
    def is_chat(self) -> bool:
        """True if one list of messages has both the question and the answer."""
        return self.question == self.answer


def found_in(rows: Sequence[Mapping[str, Any]], choices: str | None) -> Columns | None:
    """The columns of these rows, by the first shape that one of them has; None: of no shape.
    `choices`: their column, where somebody named it."""
    if choices is None:
        choices = next((name for name in _CHOICES if _has_choices(rows, name)), _one_each(rows))
    for shape, question, answer in _SHAPES:
        if all(_has(rows, part) for part in (*question.split("+"), answer)):
            return Columns(question, answer, choices, shape=shape)
    question = next((name for name in _QUESTIONS if _has(rows, name)), "")
    answer = next((name for name in _ANSWERS if name != question and _has(rows, name)), "")
    if not question or not answer:
        return None
    shape = "MATH" if (question, answer) == ("problem", "solution") else "their names"
    return Columns(question, answer, choices, shape=shape)


def _has(rows: Sequence[Mapping[str, Any]], path: str) -> bool:
    return any(value_at(row, path) is not None for row in rows)


def _has_choices(rows: Sequence[Mapping[str, Any]], path: str) -> bool:
    values = [value_at(row, path) for row in rows]
    return any(isinstance(v, list | dict) or (isinstance(v, str) and v[:1] == "[") for v in values)


def _one_each(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The columns of choices that have one each, joined by `+`; None: there are none, or answers
    that are neither a letter nor one of them."""
    families: dict[str, list[str]] = {}
    for name in dict.fromkeys(str(name) for row in rows for name in row):
        if found := _ONE_CHOICE.fullmatch(name):
            families.setdefault(found[1].lower(), []).append(name)
    for names in families.values():
        ends = "".join(name[-1].lower() for name in names)
        answers = next((name for name in _ANSWERS if name not in names and _has(rows, name)), "")
        in_order = any(ends in order for order in ("abcdefghij", "0123456789"))
        if answers and in_order and 2 <= len(ends) <= CHOICES_MAX:
            known = [_is_choice(row, names, value_at(row, answers)) for row in rows]
            if all(known):
                return "+".join(names)
    return None


def _is_choice(row: Mapping[str, Any], names: Sequence[str], answer: Any) -> bool:
    """True if an answer is a choice's text, letter or place, or is missing."""
    if answer is None or answer in (texts := [value_at(row, name) for name in names]):
        return True
    place = answer if isinstance(answer, int) else LETTERS.find(str(answer).strip().upper() or "?")
    return 0 <= place < len(texts) and (isinstance(answer, int) or len(str(answer).strip()) == 1)


def choices_at(row: Mapping[str, Any], path: str) -> Any:
    """The value in the column of choices; of several, joined by `+`, those up to the last one."""
    if "+" not in path or value_at(row, path) is not None:
        return value_at(row, path)
    found = [value_at(row, each) for each in path.split("+")]
    while found and (found[-1] is None or found[-1] == ""):
        del found[-1]
    return found


def names_in(rows: Iterable[Mapping[str, Any]]) -> str:
    names = ", ".join(dict.fromkeys(str(name) for row in rows for name in row))
    return names[:NAMES_SHOWN_CHARS] or "none"


def value_at(row: Any, path: str) -> Any:
    """The value at a path, whatever the case of its letters; None: there is none. A record or list
    may also be written as JSON."""
    value = _field(row, path)
    head, dot, rest = path.partition(".")
    if value is not None or not dot:
        return value
    inner = _field(row, head)
    if isinstance(inner, str) and inner[:1] in ("{", "["):
        try:
            inner = json.loads(inner)
        except (ValueError, RecursionError):
            return None
    return None if inner is None else value_at(inner, rest)


def _field(row: Any, name: str) -> Any:
    if isinstance(row, list | tuple):
        return row[int(name)] if name.isdecimal() and int(name) < len(row) else None
    if not isinstance(row, Mapping) or name in row:
        return row.get(name) if isinstance(row, Mapping) else None
    return next((row[each] for each in row if str(each).lower() == name.lower()), None)


# --- values -----------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """The kind of a value that is no text."""
    name = type(value).__name__
    return _KINDS.get(name) or f"of the type {name}"


def text_of(value: Any, path: str) -> str:
    """A text, or a number as people write it; ValueError for every other kind."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        exact = Decimal(repr(value)) if isinstance(value, float) else value
        if abs(exact.adjusted()) > DIGITS_MAX:
            raise ValueError(f"its {path} is a number of over {DIGITS_MAX} digits")
        written = f"{exact:f}"
        written = written.rstrip("0").rstrip(".") if "." in written else written
        return written if exact else "0"
    said = f"its {path} is {kind_of(value)}"
    if isinstance(value, Mapping) and value:
        raise ValueError(f"{said}; name one of its fields, such as {path}.{next(iter(value))}")
    if isinstance(value, list | tuple) and value:
        raise ValueError(f"{said}; name one of its values, such as {path}.0")
    raise ValueError(f"{said}, no text")


def texts_of(row: Mapping[str, Any], path: str) -> str:
    """The texts of columns that are joined by `+`. The first must be there."""
    if value_at(row, path) is not None:
        return text_of(value_at(row, path), path)
    first, *others = path.split("+")
    told = [text_of(value_at(row, first), first)]
    told += [text_of(value, each) for each in others if (value := value_at(row, each))]
    return "\n\n".join(told)


def messages_of(value: Any) -> list[PromptMessage]:
    """The messages of a chat: perhaps a system's, then user's and assistant's in turn.

    Raises:
        ValueError: it is no such list, or a message has more than text.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("its chat is no list of messages")
    said = [_message(each) for each in value]
    opened = said[0].role == "system"
    for place, each in enumerate(said[opened:]):
        if each.role != ("user", "assistant")[place % 2]:
            raise ValueError("its chat must be turns of user and assistant, after a system's")
    return said


def _message(each: Any) -> PromptMessage:
    if not isinstance(each, Mapping):
        raise ValueError("its chat is no list of messages")  # noqa: TRY004
    role = str(each.get("role") or each.get("from"))
    content = each.get("content", each.get("value"))
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        kinds = {str(part.get("type")) for part in content}
        if kinds != {"text"}:
            raise ValueError(
                f"its chat has a part of the type {min(kinds - {'text'}, default='?')}"
            )
        content = "".join(str(part.get("text") or "") for part in content)
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"its chat has a message of {role} without text")
    return PromptMessage(_ROLES.get(role, role), content)


def question_of(row: Mapping[str, Any], columns: Columns) -> str | list[dict[str, str]]:
    """The question: a text, or the messages of a chat that ends in it; ValueError says why there is
    none."""
    value = value_at(row, columns.question)
    if isinstance(value, list) or (columns.is_chat and value is not None):
        said = messages_of(value)[: -1 if columns.is_chat else None]
        if not said or said[-1].role != "user":
            raise ValueError("its chat does not end in a question of the user")
        text = said[-1].content
        found = [{"role": each.role, "content": each.content} for each in said]
    else:
        check_there(row, "question", columns.question)
        text, found = texts_of(row, columns.question), []
    if not text.strip() or text.startswith(MARK):
        raise ValueError("an empty question, or one that begins with a control character")
    if _CHAT_AS_TEXT.match(text):
        raise ValueError(f"its {columns.question} is a chat as text; write it as a list")
    return found if len(found) > 1 else text


def answer_of(row: Mapping[str, Any], columns: Columns) -> str:
    """The answer as it stands; ValueError says why there is none."""
    value = value_at(row, columns.answer)
    if isinstance(value, list) and (columns.is_chat or _is_said(value)):
        last = messages_of(value)[-1] if columns.is_chat else _message(value[0])
        if last.role != "assistant":
            raise ValueError("its chat does not end in an answer of the assistant")
        return last.content
    check_there(row, "answer", columns.answer)
    return texts_of(row, columns.answer)


def _is_said(value: list[Any]) -> bool:
    """True for TRL's completions: one message of the assistant."""
    return len(value) == 1 and isinstance(value[0], Mapping) and "content" in value[0]


def check_there(row: Mapping[str, Any], use: str, path: str) -> None:
    """Raise ValueError if a row has no value in the column of this use."""
    if all(value_at(row, each) is None for each in (path, path.partition("+")[0])):
        names = {str(name).lower() for name in row}
        if names.isdisjoint(name.lower() for name in (path, path.partition(".")[0])):
            raise ValueError(f"no column {path!r}; name another one as {use}, or add it")
        raise ValueError(f"its {path} is null")


def choices_of(value: Any, path: str) -> tuple[list[str], list[str]]:
    """Choices, and the labels that they have of their own, as in ARC and CommonsenseQA."""
    if isinstance(value, str) and value[:1] == "[":
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    labels: list[str] = []
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        value = {name: [each.get(name) for each in value] for name in ("label", "text")}
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        labels = [text_of(each, f"{path}.label") for each in value.get("label") or ()]
        value = value["text"]
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= CHOICES_MAX:
        raise ValueError(f"its {path} must be a list of 2 to {CHOICES_MAX} texts")
    texts = [text_of(each, path) for each in value]
    if not all(each.strip() for each in texts):
        raise ValueError("an empty choice")
    named = [_LETTERED.fullmatch(text) for text in texts]
    if all(found and found[1] == LETTERS[at] for at, found in enumerate(named)):
        texts = [found[2] for found in named if found]  # the prompt gives letters of its own
    return texts, labels if len(labels) == len(texts) else []


def lettered(answer: Any, text: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    """The answer as a letter, where its place is certain: it is a number from 0, or a label."""
    if text in labels:
        return LETTERS[labels.index(text)]
    if isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(choices):
            raise ValueError(f"place {answer} of {len(choices)} choices; places count from 0")
        return LETTERS[answer]
    return text


def gold_in(text: str) -> tuple[str, str] | None:
    """The final answer in a worked one, and how it is marked: by GSM8K's `####` in the last line,
    or by MATH's last `\\boxed{}`; None: it has no mark."""
    last = text.rstrip().rpartition("\n")[2]
    if FINAL in last:
        return last.rpartition(FINAL)[2].strip(), f"after {FINAL}"
    begin = text.rfind(BOX)
    if begin < 0:
        return None
    depth, end = 1, begin + len(BOX)
    while end < len(text) and depth:
        depth += (text[end] == "{") - (text[end] == "}")
        end += 1
    if depth:
        raise ValueError(f"an answer with a {BOX}}} that is not closed")
    return text[begin + len(BOX) : end - 1].strip(), f"in {BOX}}}"


def is_worked(text: str) -> bool:
    """True for a text that reasons: no answer has several lines, or is so long."""
    return "\n" in text.strip() or len(text) > WORKED_CHARS_MAX
