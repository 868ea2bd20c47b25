"""The scorers of data set items, by name.

Texts, and fetched items, may be a stranger's. So each scorer has a bound on the length of its
input, beyond which a text scores 0, and takes time in proportion to it. Each item's own answer is
tried when the item is read.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal, get_args

from node.envs.answers import bare, stated
from node.envs.data.items import Item
from node.envs.numerals import number_at_end, plain
from node.system.extras import extra_line
from swarm.errors import ConfigError

ScorerName = Literal["exact", "numeric", "choice", "math", "regex", "json_schema"]
NAMES: Final[tuple[ScorerName, ...]] = get_args(ScorerName)
EXACT_CHARS_MAX: Final = 65_536
NUMBER_CHARS_MAX: Final = 128
CHOICE_CHARS_MAX: Final = 4096
_NAMED: Final = re.compile(r"\(?(?P<letter>[a-z])(?:\)[.:]?|[.:])? ?(?:[-\N{EN DASH}] )?")
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Settings = Mapping[str, float | bool]


def installed(scorer: ScorerName, package: str, extra: str, why: str = "") -> str:
    """The version of a scorer's package; ConfigError naming `extra` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f"environment dataset: the scorer {scorer} takes {package}{why}: {extra_line(extra)}"
        ) from None


class ItemScorer:
    engine = ""  # package and version that decides the rewards; empty: this tree
    needs: frozenset[str] = frozenset()  # columns besides question and answer
    takes: frozenset[str] = frozenset()  # names of settings

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError if the scorer's package is not installed."""

    def prepare(self) -> None:
        """Import the scorer's packages, before any text and before a verifier forks."""

    def own_answer(self, item: Item) -> str:
        """The item's answer as a completion gives it; ValueError if the item is unfit."""
        raise NotImplementedError

    def score(self, item: Item, text: str) -> float:
        """The reward of a text, 0 to 1."""
        raise NotImplementedError


class ExactScorer(ItemScorer):
    """The text is the answer, except for blanks, emphasis and closing marks around it, and words
    that announce it."""

    takes = frozenset({"ignore_case"})

    def __init__(self, settings: Settings) -> None:
        self._ignores_case = bool(settings.get("ignore_case", False))

    def own_answer(self, item: Item) -> str:
        answer: str = item["answer"].strip()
        if not answer:
            raise ValueError("an empty answer")
        return answer

    def score(self, item: Item, text: str) -> float:
        if len(text) > EXACT_CHARS_MAX:
            return 0.0
        answer = self._plain(item["answer"])
        readings = {self._plain(each) for each in (text, bare(text, ""), bare(text), stated(text))}
        return float(answer in readings or answer.removesuffix(".") in readings - {""})

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._ignores_case else text.strip()


class NumericScorer(ItemScorer):
    """The text is a number, as close to the answer as `tolerance` (absolute) or
    `relative_tolerance` allows. The answer is the number at the end of its column."""

    takes = frozenset({"tolerance", "relative_tolerance"})

    def __init__(self, settings: Settings) -> None:
        self._absolute = Fraction(str(settings.get("tolerance", 0)))
        self._relative = Fraction(str(settings.get("relative_tolerance", 0)))

    def own_answer(self, item: Item) -> str:
        answer = item["answer"].strip()
        number = number_at_end(answer, units=False)
        if number is None:
            raise ValueError("an answer without a number at its end")
        return number.text if "/" in number.text else plain(number.value)

    def score(self, item: Item, text: str) -> float:
        if len(text) > NUMBER_CHARS_MAX:
            return 0.0
        text = stated(text)
        number = number_at_end(text)
        if number is None or not number.is_all:
            return 0.0
        right = Fraction(self.own_answer(item))
        leave = max(self._absolute, self._relative * abs(right))
        return float(abs(number.value - right) <= leave)


class ChoiceScorer(ItemScorer):
    """The text is a letter, as in `B`, `(b)`, `**B**` or `Answer: B`, the text of that choice, or
    both, as in `B. Paris`. The answer is a choice's text, its letter, or its place from 0: the
    first of these that fits."""

    def own_answer(self, item: Item) -> str:
        answer, choices = item["answer"].strip(), item.get("choices")
        letters = LETTERS if choices is None else LETTERS[: len(choices)]
        texts = [] if choices is None else [_folded(each) for each in choices]
        for at, text in enumerate(texts):
            if len(text) == 1 and letters.find(text.upper()) not in (-1, at):
                raise ValueError(f"a choice {text!r} that is another choice's letter")
        if texts.count(_folded(answer)) > 1:
            raise ValueError("an answer that is the text of two choices")
        if _folded(answer) in texts:
            return letters[texts.index(_folded(answer))]
        letter = _letter(answer)
        if len(letter) == 1 and letter in letters:
            return letter
        if answer.isascii() and answer.isdigit() and len(answer) < 3 and int(answer) < len(texts):
            return letters[int(answer)]
        raise ValueError("an answer that is none of the choices' letters")

    def score(self, item: Item, text: str) -> float:
        if len(text) > CHOICE_CHARS_MAX:
            return 0.0
        right, choices = self.own_answer(item), item.get("choices")
        text = stated(text)
        if _letter(text) == right:
            return 1.0
        if choices is None:
            return 0.0
        text = _folded(text.replace("**", ""))
        named = _NAMED.match(text)
        rest = text[named.end() :] if named and named["letter"].upper() == right else text
        return float(_folded(choices[LETTERS.index(right)]) in (text, rest))


def _folded(text: str) -> str:
    return " ".join(bare(text, ".").split()).casefold()


def _letter(text: str) -> str:
    """The letter of a text such as `B`, `(b)` or `B.`, else the text."""
    text = text.strip().rstrip(".:)]").lstrip("([")
    return text.upper() if len(text) == 1 else text
