"""Extraction of the answer from a completion, by the format that a run names. Pure.

Any reasoning may precede an answer. Text after it could teach what no scorer sees, so a completion
that goes on has no answer and is worth nothing:

    whole        the completion is the answer; useless blanks make it worth nothing (`is_padded`)
    last_line    the last line, without the end of the line
    tags         the content of `<answer>...</answer>` at the end
    boxed        the content of `\\boxed{...}` at the end
    last_number  the number at the end; `CLOSING_MARKS` may follow, each once
    code         the last block between fences of three backticks, at the end

Within an answer there are no two blanks in a row, and a number has one spelling except for one or
two zeros at its end. Code is indented, but no line ends in a blank, and blanks are spaces, tabs and
line ends. Each format reads a text a bounded number of times, from its end, and at most
`ANSWER_CHARS_MAX` characters of an answer.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

AnswerFormat = Literal["whole", "last_line", "tags", "boxed", "last_number", "code"]
FORMATS: Final[tuple[AnswerFormat, ...]] = get_args(AnswerFormat)

ANSWER_CHARS_MAX: Final = 4096  # of all formats but `whole`
NUMBER_CHARS_MAX: Final = 40
CLOSING_MARKS: Final = ("**", "*", "$", ".", "`", ")", "}")  # after a number; the longest first
OPENING_TAG, CLOSING_TAG = "<answer>", "</answer>"
BOX: Final = "\\boxed{"
FENCE: Final = "```"
EMPTY_LINES_MAX: Final = 2  # in a row, in code
FORMAT_REWARD_MAX: Final = 0.2

# Invisible characters: white space, format characters (Cf), and two letters without ink.
_BLANK: Final = re.compile(
    r"[\s\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f\u2800\u3164]"
)
_BLANKS: Final = re.compile(f"{_BLANK.pattern}+")
_TWO_BLANKS: Final = re.compile(f"{_BLANK.pattern}{{2}}")
# A blank of another kind or before the end of a line, or more empty lines than people write.
_UNSEEN_IN_CODE: Final = re.compile(
    rf"(?![ \t\n]){_BLANK.pattern}|[ \t]\n|\A\n|\n{{{EMPTY_LINES_MAX + 2}}}|\n\n\Z"
)
_DIGITS: Final = frozenset("0123456789")
_NUMBER_CHARS: Final = _DIGITS | frozenset(".,/")
_MINUS_SIGNS: Final = frozenset("-\N{MINUS SIGN}")
_SIGNS: Final = _MINUS_SIGNS | {"+"}
_THOUSANDS_DIGITS: Final = 3
_PADDING: Final = "000"  # at the end of decimals; 1.50 is a price, and 0.730 a computed number


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """A run's rules for the completions of one environment."""

    format: AnswerFormat = "whole"
    format_reward: float = 0.0  # of a wrong answer in the right format
    system: str = ""  # system prompt
    examples: tuple[tuple[str, str], ...] = ()  # (question, completion), shown before the question
    thought_end: str = ""  # the answer follows it; empty: completions hold no thoughts

    def to_values(self) -> list[object]:
        """As plain JSON values, for another process."""
        examples = [list(each) for each in self.examples]
        return [self.format, self.format_reward, self.system, examples, self.thought_end]

    def find(self, text: str) -> str | None:
        """The answer in a completion's text, after its thought; None: it has none."""
        said = after_thought(text, self.thought_end)
        return None if said is None else answer_in(self.format, said)

    def written(self, answer: str) -> str:
        """The shortest completion that has this answer."""
        return self.thought_end + written(self.format, answer)

    @classmethod
    def from_values(cls, values: list[object]) -> "AnswerRule":
        """The inverse of `to_values`."""
        kind, reward, system, examples, end = values
        return cls(kind, reward, system, tuple((q, c) for q, c in examples), end)  # type: ignore[arg-type,attr-defined]


WHOLE: Final = AnswerRule()


def after_thought(text: str, end: str) -> str | None:
    """The text after the last `end` of a thought, without up to two line ends; None: the thought
    does not end. An empty `end` gives the whole text."""
    if not end:
        return text
    _, found, said = text.rpartition(end)
    return said.removeprefix("\n").removeprefix("\n") if found else None


def answer_in(kind: AnswerFormat, text: str) -> str | None:
    """The answer in a completion's text; None: it has none of this format."""
    return _FINDERS[kind](text)


def written(kind: AnswerFormat, answer: str) -> str:
    """The shortest completion that has this answer, where the format can hold it."""
    if kind == "tags":
        return f"{OPENING_TAG}{answer}{CLOSING_TAG}"
    if kind == "code":
        return f"{FENCE}python\n{answer}\n{FENCE}"
    return f"{BOX}{answer}}}" if kind == "boxed" else answer


def is_padded(text: str, answer: str) -> bool:
    """True if a completion that is all answer ends in a blank, or has more blanks in a row, where
    the environment's own answer does not: most scorers overlook that. One blank may always stand
    before it, as many tokenizers put one there."""
    if _BLANK.match(text[-1:]) and not _BLANK.match(answer[-1:]):
        return True
    # a tenth of the pattern's time; only three blanks are printable
    if text.isprintable() and not any(each in text for each in ("  ", "\u2800", "\u3164")):
        return False
    in_a_row = max(map(len, _BLANKS.findall(answer)), default=0)
    return re.search(f"{_BLANK.pattern}{{{max(1, in_a_row) + 1}}}", text) is not None


def _last_line(text: str) -> str | None:
    line = text[text.rfind("\n") + 1 :]
    return _unpadded(line.lstrip()) if len(line) <= ANSWER_CHARS_MAX else None


def _in_tags(text: str) -> str | None:
    if not text.endswith(CLOSING_TAG):
        return None
    end = len(text) - len(CLOSING_TAG)
    begin = text.rfind(OPENING_TAG, max(0, end - ANSWER_CHARS_MAX), end)
    inside = text[begin + len(OPENING_TAG) : end]
    return None if begin < 0 or CLOSING_TAG in inside else _unpadded(_without_margins(inside))


def _in_box(text: str) -> str | None:
    if not text.endswith("}"):
        return None
    end = len(text) - 1
    begin = text.rfind(BOX, max(0, end - ANSWER_CHARS_MAX), end)
    inside = text[begin + len(BOX) : end]
    return None if begin < 0 or not _balanced(inside) else _unpadded(_without_margins(inside))


def _in_fence(text: str) -> str | None:
    """The block after the last fence but one, if that opens it: with a name of letters or none."""
    end = len(text) - len(FENCE) - 1
    if not text.endswith(f"\n{FENCE}"):
        return None
    begin = text.rfind(FENCE, max(0, end - ANSWER_CHARS_MAX), end + 1)
    first = text.find("\n", begin, end + 1)
    if begin < 0 or (begin and text[begin - 1] != "\n"):
        return None
    name, code = text[begin + len(FENCE) : first], text[first + 1 : end]
    if name and not (name.isascii() and name.isalnum()):
        return None
    return None if not code or _UNSEEN_IN_CODE.search(f"{code}\n") else code


def _balanced(text: str) -> bool:
    """True if braces close what they open, and nothing before."""
    depth = 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0


def _without_margins(text: str) -> str:
    """Without one blank or end of a line on either side."""
    begin = 1 if text[:1].isspace() else 0
    end = len(text) - 1 if text[begin:][-1:].isspace() else len(text)
    return text[begin:end]


def _unpadded(text: str) -> str | None:
    """The text if it is not empty and has no blank at its ends and no two in a row, else None."""
    if not text or _BLANK.match(text) or _BLANK.match(text[-1]) or _TWO_BLANKS.search(text):
        return None
    return text


# --- numbers ----------------------------------------------------------------------------------


def _last_number(text: str) -> str | None:
    """The number at the end, without its thousands separators: an integer, a decimal or a fraction
    of integers, with its sign. None where it could be read in two ways, such as 3,4 or 1 3/4."""
    end = _before_marks(text)
    begin = end
    while begin and text[begin - 1] in _NUMBER_CHARS:
        begin -= 1
        if end - begin > NUMBER_CHARS_MAX:
            return None
    number = _plain_number(text[begin:end])
    if number is None or _is_glued(text, begin):
        return None
    if "/" in number and begin > 1 and text[begin - 1].isspace() and text[begin - 2] in _DIGITS:
        return None  # a mixed number
    return ("-" if _is_negative(text, begin) else "") + number


def _before_marks(text: str) -> int:
    """The end of the text without its closing marks."""
    end, left = len(text), list(CLOSING_MARKS)
    while found := next((mark for mark in left if text.endswith(mark, 0, end)), None):
        left.remove(found)
        end -= len(found)
    return end


def _is_glued(text: str, begin: int) -> bool:
    """True if it belongs to the text before it, as in x2, 1e5 or 1e-5."""
    at = begin - 1
    if at > 0 and text[at] in _SIGNS:
        return text[at - 1].isascii() and text[at - 1].isalpha()
    before = text[at] if begin else " "
    return before == "_" or before.isnumeric() or (before.isascii() and before.isalpha())


def _is_negative(text: str, begin: int) -> bool:
    """True if a minus sign before it is no subtraction."""
    if not begin or text[begin - 1] not in _MINUS_SIGNS:
        return False
    before = text[begin - 2] if begin > 1 else " "
    return not (before.isalnum() or before in ")]}._")


def _plain_number(text: str) -> str | None:
    whole, slash, below = text.partition("/")
    if not slash:
        return _decimal(whole)
    parts = [_integer(whole), _integer(below)]
    return None if None in parts or below == "0" else f"{parts[0]}/{parts[1]}"


def _decimal(text: str) -> str | None:
    whole, point, decimals = text.partition(".")
    integer = _grouped(whole)
    if integer is None or not point:
        return integer
    if not decimals or not _DIGITS.issuperset(decimals):
        return None
    return None if decimals.endswith(_PADDING) else f"{integer}.{decimals}"


def _grouped(text: str) -> str | None:
    """An integer, with or without separators of its thousands."""
    first, *others = text.split(",")
    if not others:
        return _integer(first)
    if len(first) > _THOUSANDS_DIGITS or any(len(each) != _THOUSANDS_DIGITS for each in others):
        return None
    if first == "0" or not _DIGITS.issuperset("".join(others)):
        return None
    integer = _integer(first)
    return None if integer is None else integer + "".join(others)


def _integer(text: str) -> str | None:
    """Digits without leading zeros."""
    if not text or not _DIGITS.issuperset(text) or (text[0] == "0" and text != "0"):
        return None
    return text


_FINDERS: Final[Mapping[AnswerFormat, Callable[[str], str | None]]] = {
    "whole": lambda text: text,
    "last_line": _last_line,
    "tags": _in_tags,
    "boxed": _in_box,
    "last_number": _last_number,
    "code": _in_fence,
}
