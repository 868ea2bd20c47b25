"""The scorers of data set items, by name.

Texts, and fetched items, may be a stranger's. So each scorer has a bound on the length of its
input, beyond which a text scores 0, and takes time in proportion to it. Each item's own answer is
tried when the item is read.
"""

from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal, get_args

from node.envs.answers import answer_in
from node.envs.data.items import Item
from swarm.errors import ConfigError

ScorerName = Literal["exact", "numeric", "choice", "math", "regex", "json_schema"]
NAMES: Final[tuple[ScorerName, ...]] = get_args(ScorerName)
EXACT_CHARS_MAX: Final = 65_536
CHOICE_CHARS_MAX: Final = 8
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Settings = Mapping[str, float | bool]


def installed(scorer: ScorerName, package: str, extra: str, why: str = "") -> str:
    """The version of a scorer's package; ConfigError naming `extra` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f"environment dataset: the scorer {scorer} takes {package}{why}; install "
            f"swarm-node[{extra}]"
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
    """The text is the answer, except for blanks around it."""

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
        return float(self._plain(text) == self._plain(item["answer"]))

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._ignores_case else text.strip()


class NumericScorer(ItemScorer):
    """The text is a number in one spelling, as close to the answer as `tolerance` (absolute) or
    `relative_tolerance` allows. The answer is the number at the end of its column."""

    takes = frozenset({"tolerance", "relative_tolerance"})

    def __init__(self, settings: Settings) -> None:
        self._absolute = Fraction(str(settings.get("tolerance", 0)))
        self._relative = Fraction(str(settings.get("relative_tolerance", 0)))

    def own_answer(self, item: Item) -> str:
        number = answer_in("last_number", item["answer"])
        if number is None:
            raise ValueError("an answer without a number at its end")
        return number

    def score(self, item: Item, text: str) -> float:
        text = text.strip()
        number = answer_in("last_number", text)
        spelled = text.replace(",", "").replace("\N{MINUS SIGN}", "-").removeprefix("+")
        if number is None or number != spelled:
            return 0.0
        right = Fraction(self.own_answer(item))
        leave = max(self._absolute, self._relative * abs(right))
        return float(abs(Fraction(number) - right) <= leave)


class ChoiceScorer(ItemScorer):
    """The text is a letter, as in `B`, `(B)`, `B.` or `B)`. The answer is a letter too, or the
    place of a choice, from 0, or its text."""

    def own_answer(self, item: Item) -> str:
        answer, choices = item["answer"].strip(), item.get("choices")
        letters = LETTERS if choices is None else LETTERS[: len(choices)]
        if len(answer) == 1 and answer in letters:
            return str(answer)
        if choices is not None and answer.isascii() and answer.isdigit() and len(answer) < 3:
            if int(answer) < len(choices):
                return letters[int(answer)]
        elif choices is not None and choices.count(answer) == 1:
            return letters[choices.index(answer)]
        raise ValueError("an answer that is none of the choices' letters")

    def score(self, item: Item, text: str) -> float:
        text = text.strip()
        if len(text) > CHOICE_CHARS_MAX:
            return 0.0
        letter = text.removeprefix("(").rstrip(".:").removesuffix(")")
        return float(len(letter) == 1 and letter == self.own_answer(item))
