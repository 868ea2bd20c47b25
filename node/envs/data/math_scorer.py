"""Texts that equal the answer as mathematics, such as `1/2`, `0.5` and `\\frac{1}{2}`."""

from fractions import Fraction
from typing import Final

from node.envs.answers import BOX, answer_in, bare, stated
from node.envs.data.expressions import TEXT_CHARS_MAX, BeyondGrammar, Value, read, same
from node.envs.data.items import Item
from node.envs.data.scorers import ItemScorer, Settings, installed
from node.envs.numerals import plain

_DIGITS_MAX: Final = 32
_ENDS: Final = ".,;"  # a formula may end in `!`


class MathScorer(ItemScorer):
    """LaTeX, plain arithmetic or words that equal the answer's last `\\boxed{...}`, or the part
    after `####`, or all of it."""

    def __init__(self, settings: Settings) -> None:
        installed("math", "mpmath", "math")
        self.engine = ""

    def prepare(self) -> None:
        read("\\sqrt{2}")

    def own_answer(self, item: Item) -> str:
        answer = _final(item["answer"])
        try:
            value = read(answer)
        except BeyondGrammar as fault:
            raise ValueError(f"an answer that the scorer math does not read ({fault})") from None
        return _usual(answer, value)

    def score(self, item: Item, text: str) -> float:
        if len(text) > TEXT_CHARS_MAX:
            return 0.0
        answer = _final(item["answer"])
        try:
            return float(same(read(stated(text, _ENDS)), read(answer)))
        except BeyondGrammar:
            return 0.0


def _final(answer: str) -> str:
    if BOX in answer:
        answer = answer_in("boxed", answer[: answer.rindex("}") + 1]) or answer
    return stated(answer.rpartition("####")[2], _ENDS)


def _usual(answer: str, value: Value) -> str:
    """The usual spelling of a number or words."""
    if value.kind == "words":
        return bare(answer)
    exact = value.parts[0]
    is_short = isinstance(exact, Fraction) and max(map(len, str(exact).split("/"))) <= _DIGITS_MAX
    return plain(exact) if is_short else answer
