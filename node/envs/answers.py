"""Extraction of the answer from a completion, by the format that a run names. Pure.

Any reasoning may precede an answer. Text after it could teach what no scorer sees, so a completion
that goes on has no answer and is worth nothing.

    whole        the completion is the answer; useless blanks make it worth nothing (`is_padded`)
    last_line    the last line
    tags         the content of `<answer>...</answer>` at the end
    boxed        the content of `\\boxed{...}` at the end
    last_number  the number at the end (`node.envs.numerals`), in the usual spelling
    code         the last block between fences of three backticks

`BLANKS_MAX` blanks may stand after an answer of each format. After all but `whole` and `code` so
may `CLOSING_MARKS`, each once, and a known unit after a number or a box.

Within an answer there are no two blanks in a row. Code is indented, but no line ends in a blank,
and blanks are spaces, tabs and line ends. Each format reads a text a bounded number of times, from
its end, and at most `ANSWER_CHARS_MAX` characters of an answer.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from node.envs.numerals import (
    BLANKS,
    BLANKS_MAX,
    before_ending,
    before_marks,
    number_at_end,
)

AnswerFormat = Literal["whole", "last_line", "tags", "boxed", "last_number", "code"]
FORMATS: Final[tuple[AnswerFormat, ...]] = get_args(AnswerFormat)

# Part of each run's id. Raise it with each change of the answer that is found in a text: nodes of
# different revisions would give other rewards.
REVISION: Final = 2
ANSWER_CHARS_MAX: Final = 4096  # of all formats but `whole`
OPENING_TAG, CLOSING_TAG = "<answer>", "</answer>"
BOX: Final = "\\boxed{"
FENCE: Final = "```"
CLOSING_CHARS_MAX: Final = 128  # after an answer
EMPTY_LINES_MAX: Final = 2  # in a row, in code
FORMAT_REWARD_MAX: Final = 0.2

# Invisible characters: white space, format characters (Cf), and two letters without ink.
_BLANK: Final = re.compile(
    r"[\s\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f\u2800\u3164]"
)
_BLANKS: Final = re.compile(f"{_BLANK.pattern}+")
_BRACE: Final = re.compile(r"\\.|[{}]", re.DOTALL)
_TWO_BLANKS: Final = re.compile(f"{_BLANK.pattern}{{2}}")
# A blank of another kind or before the end of a line, or more empty lines than people write.
_UNSEEN_IN_CODE: Final = re.compile(
    rf"(?![ \t\n]){_BLANK.pattern}|[ \t]\n|\A\n|\n{{{EMPTY_LINES_MAX + 2}}}|\n\n\Z"
)
_WRAPPINGS: Final = (
    ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("*", "*"),
    ("__", "__"), ("_", "_"), ("`", "`"), ('"', '"'), ("'", "'"), (BOX, "}"),
    *((f"\\{name}{{", "}") for name in ("text", "textbf", "mathbf", "mathrm", "textrm", "mbox")),
)  # fmt: skip
_WRAPPINGS_MAX: Final = 8  # taken off one answer
SENTENCE_ENDS: Final = ".,;!"
_LABEL: Final = re.compile(
    r"\*{0,2}(?:(?:so|thus|hence|therefore),? )?(?:(?:the|my) )?(?:(?:final|correct|right) )?"
    r"(?:answer|option|choice|result|solution|value|sum|product|difference|quotient|total|number)"
    r"(?: is:|:\*\*|\*\*:|\*\* is|:| is| =)\s?|(?:option|choice) |#{2,4} |= ",
    re.IGNORECASE,
)


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


def without_blanks(text: str) -> str:
    """Without the blanks that may stand after an answer."""
    return text[:-BLANKS_MAX] + text[-BLANKS_MAX:].rstrip(BLANKS)


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


def bare(answer: str, ends: str = SENTENCE_ENDS) -> str:
    """An answer without blanks, emphasis, quotes, LaTeX's delimiters and boxes around all of it,
    and without a mark of `ends` after it."""
    for _ in range(_WRAPPINGS_MAX):
        answer = answer.strip(BLANKS)
        inside = next((each for each in (_inside(answer, *w) for w in _WRAPPINGS) if each), None)
        if inside is None and answer[-1:] in ends:
            inside = answer[:-1]
        if not inside:
            break
        answer = inside
    return answer


def stated(answer: str, ends: str = SENTENCE_ENDS) -> str:
    """A bare answer without words that only announce it, such as `The answer is`; of a text that
    ends in a box, its content."""
    answer = bare(_in_box(answer) or answer, ends)
    label = _LABEL.match(answer)
    return bare(answer[label.end() :], ends) if label else answer


def _inside(text: str, opening: str, closing: str) -> str:
    """The text within one pair of marks; empty: it is not within them."""
    if not (text.startswith(opening) and text.endswith(closing)):
        return ""
    inside = text[len(opening) : -len(closing)]
    is_one = _balanced(inside) if closing == "}" else opening not in inside
    return inside if is_one else ""


def _last_line(text: str) -> str | None:
    end = len(without_blanks(text))
    bare_end = before_marks(text, end)
    begin = text.rfind("\n", max(0, end - ANSWER_CHARS_MAX - 1), bare_end) + 1
    if not bare_end or end - begin > ANSWER_CHARS_MAX:
        return None
    return _unpadded(text[begin:end].lstrip())


def _in_tags(text: str) -> str | None:
    end = text.rfind(CLOSING_TAG, -CLOSING_CHARS_MAX)
    if end < 0 or not _closes(text, end + len(CLOSING_TAG)):
        return None
    begin = text.rfind(OPENING_TAG, max(0, end - ANSWER_CHARS_MAX), end)
    inside = text[begin + len(OPENING_TAG) : end]
    return None if begin < 0 or CLOSING_TAG in inside else _unpadded(_without_margins(inside))


def _in_box(text: str) -> str | None:
    begin = text.rfind(BOX, -ANSWER_CHARS_MAX - CLOSING_CHARS_MAX)
    if begin < 0:
        return None
    begin += len(BOX)
    end = _closing_brace(text, begin)
    if end is None or not _closes(text, end + 1):
        return None
    return _unpadded(_without_margins(text[begin:end]))


def _closing_brace(text: str, begin: int) -> int | None:
    """The place of the brace that closes one opened just before `begin`."""
    depth = 1
    for found in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return None


def _closes(text: str, begin: int) -> bool:
    """True if only blanks, closing marks and one known unit follow from `begin` on."""
    return len(text) - begin <= CLOSING_CHARS_MAX and before_ending(text) <= begin


def _in_fence(text: str) -> str | None:
    """The block after the last fence but one, if that opens it: with a name of letters or none."""
    text = without_blanks(text)
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
    return _closing_brace(text + "}", 0) == len(text)


def _without_margins(text: str) -> str:
    """Without the blanks that may stand on either side."""
    text = text[:BLANKS_MAX].lstrip(BLANKS) + text[BLANKS_MAX:]
    return without_blanks(text)


def _unpadded(text: str) -> str | None:
    """The text if it is not empty and has no blank at its ends and no two in a row, else None."""
    if not text or _BLANK.match(text) or _BLANK.match(text[-1]) or _TWO_BLANKS.search(text):
        return None
    return text


def _last_number(text: str) -> str | None:
    number = number_at_end(text)
    return None if number is None else number.text


_FINDERS: Final[Mapping[AnswerFormat, Callable[[str], str | None]]] = {
    "whole": lambda text: text,
    "last_line": _last_line,
    "tags": _in_tags,
    "boxed": _in_box,
    "last_number": _last_number,
    "code": _in_fence,
}
