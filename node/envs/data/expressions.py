"""Answers of mathematics, read and compared: LaTeX or plain arithmetic, lists, sets, tuples,
intervals, equations, matrices, words. Only this file imports `mpmath`.

A library for this, math-verify, parses by ANTLR and compares by sympy. Short texts can take it
minutes, a limit of time ends otherwise on another machine, and verdicts change with versions. It
also takes 50% for 50, 4210 in base 5 for 4210, and (3, 4) for the set.

Here nothing is transformed. Both texts are evaluated, with fractions where that is exact, else with
512 bits. Letters stand for two fixed points, one of which is complex. Texts are equal if all values
are. So work is in proportion to the text, and no value has more than `BITS_MAX` bits. Verdicts are
the same everywhere: equal values differ by rounding alone, which is far below `_NEAR`.
"""

import functools
import hashlib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from node.envs.numerals import UNITS

TEXT_CHARS_MAX: Final = 512
DEPTH_MAX: Final = 16
BITS_MAX: Final = 8192  # of a number, before and after the point
LISTED_MAX: Final = 32
FACTORIAL_MAX: Final = 200
BINOMIAL_MAX: Final = 1024
ROOT_MAX: Final = 64
POINTS: Final = 2
_PRECISION_BITS: Final = 512
_NEAR: Final = Fraction(1, 2**256)  # relative, and absolute below 1
_ANGLE_MAX: Final = 2**64  # of a sine's argument

Token = tuple[str, str]  # (kind, text): number, letter, command, text, unit or sign
Tokens = Sequence[Token]

_FUNCTIONS: Final = frozenset(
    {
        "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec",
        "csc", "ln", "log", "exp",
    }
)  # fmt: skip
_NAMES: Final = frozenset(
    {
        "alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "phi", "omega",
        "sigma", "rho", "tau", "emptyset", "varnothing",
    }
)  # fmt: skip
_ATOMS: Final = frozenset({"frac", "binom", "sqrt", "pi", "infty", "lfloor", "lceil"})
_KNOWN: Final = frozenset(
    {
        *_FUNCTIONS, *_NAMES, *_ATOMS, "cdot", "times", "div", "pm", "mp", "in", "cup", "le", "ge",
        "ne", "leq", "geq", "neq", "lt", "gt", "approx", "circ", "begin", "end", "rfloor", "rceil",
    }
)  # fmt: skip
_REPLACED: Final = (
    *(("\N{MINUS SIGN}", "-"), ("\N{EN DASH}", "-"), ("\u00d7", "\\times "), ("\u00b7", "\\cdot ")),
    *(("\u00f7", "/"), ("\u03c0", "\\pi "), ("\u221a", "\\sqrt "), ("\u00b0", "^\\circ ")),
    *(("\u221e", "\\infty "), ("\u222a", "\\cup "), ("\u2264", "\\le "), ("\u2265", "\\ge ")),
    *(("\u2260", "\\ne "), ("\u00b2", "^2"), ("\u00b3", "^3"), ("\u00b1", "\\pm "), ("**", "^")),
    *(("<=", "\\le "), (">=", "\\ge "), ("!=", "\\ne "), ("\\lbrace", "\\{"), ("\\rbrace", "\\}")),
    *(("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cfrac", "\\frac"), ("\\dbinom", "\\binom")),
    *(("\\lvert", "|"), ("\\rvert", "|"), ("\\vert", "|"), ("\\operatorname", "\\text")),
    *(("{,}", ","), (",\\! ", ","), ("\\!", "")),
)
_DROPPED: Final = re.compile(
    r"\\(?:left|right|bigg?[lr]?|Bigg?[lr]?|displaystyle|limits|qq?uad|angle|triangle)(?![A-Za-z])"
    r"|(?<!\\)\\[,;: ]|[~$]|\\(?=\$)"
)
_THOUSANDS: Final = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")
_COINS: Final = {"\u20ac": "euro", "\u00a3": "\u00a3", "\u00a5": "\u00a5"}
_COIN: Final = re.compile(r"(?:\A-?|[0-9}] ?)([\u20ac\u00a3\u00a5])")
_REPEATING: Final = re.compile(
    r"(?P<whole>[0-9]*)\.(?P<first>[0-9]*)\\overline\s*\{\s*(?P<again>[0-9]+)\s*\}"
)
_SCALES: Final = {"hundred": 100, "dozen": 12} | {
    name: 1000**power
    for power, name in enumerate(("thousand", "million", "billion", "trillion"), 1)
}
_NO_UNIT: Final = frozenset(  # words after a number with which it is another one, or none
    {
        "or", "not", "no", "is", "isn't", "wrong", "incorrect", "false", "never", "least", "most",
        "half", "halves", "third", "thirds", "fourth", "fourths", "fifths", "sixths", "eighths",
        "tenths", "hundredths", "squared", "cubed", "factorial", "mod", "base", "negative",
    }
)  # fmt: skip
_AREA: Final = re.compile(
    r"(?P<before>square|sq\.?|cubic|cu\.?) (?P<name>[a-z]+)"
    r"|(?P<unit>[a-z]+) (?P<after>squared|cubed)"
)
_LISTS: Final = re.compile(r"[(\[]|\\\{|\A\{")  # in which commas separate values
_UNIT: Final = re.compile(r"[A-Za-z$ .]+(?:\^?[23])?(?:/[A-Za-z ]+)?")
_TOKEN: Final = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|textrm|mathbf|mathbb|textit|overline|boldsymbol)\s*\{(?P<text>[^{}]*)\}"
    r"|\\(?P<command>[A-Za-z]+)\*?"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?)"
    r"|(?P<word>[A-Za-z]+)|(?P<sign>\\\\|\\[{}%&]|[-+*/^=<>(),;|.:%!\[\]{}_&'])|\s+"
)
_WORDS: Final = re.compile(r"[A-Za-z][A-Za-z0-9 .'-]*")
_NAME: Final = re.compile(  # what is asked: `x`, `a_{10}`, `f^{-1}(x)`, `(x,y)`
    r"[A-Za-z](?:_(?:\w|\{\w+\}))?'?(?:(?:\^\{-1\})?\([A-Za-z](?:,[A-Za-z])*\))?"
    r"|\([A-Za-z](?:,[A-Za-z])+\)|alpha|beta|theta"
)
_BRACKETS: Final = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_CLOSING: Final = frozenset({")", "]", "}", "\\}"})
_OPENED: Final = {("command", "begin"), *(("sign", each) for each in _BRACKETS)}
_CLOSED: Final = {("command", "end"), *(("sign", each) for each in _CLOSING)}
_RELATIONS: Final = {
    "=": "=", "approx": "=", "<": "<", "lt": "<", ">": ">", "gt": ">", "le": "<=", "leq": "<=",
    "ge": ">=", "geq": ">=", "ne": "!=", "neq": "!=",
}  # fmt: skip
_EMPTY: Final = (
    [("command", "emptyset")],
    [("command", "varnothing")],
    [("sign", "\\{"), ("sign", "\\}")],
)
_DEGREES: Final = ("^{circ}", "^circ")
_TURNED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


class BeyondGrammar(ValueError):
    """The reason why a text is beyond the grammar."""


@dataclass(frozen=True, slots=True)
class Value:
    """A number, by its values at the points, or another thing, by its parts."""

    kind: str  # number, words, set, relation, matrix, or the brackets of a tuple or interval
    parts: tuple[Any, ...]
    unit: str = ""


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Value:
    """The value of a text; `BeyondGrammar` if it is beyond the grammar."""
    if not 0 < len(text) <= TEXT_CHARS_MAX:
        raise BeyondGrammar(f"empty, or over {TEXT_CHARS_MAX} characters")
    plain = text
    for old, new in _REPLACED:
        plain = plain.replace(old, new)
    is_money = re.search(r"(?<![0-9A-Za-z])\\\$|\A-?\$", text) is not None
    coin = _COIN.search(plain)
    plain = _DROPPED.sub(" ", plain if coin is None else plain.replace(coin[1], " ")).strip()
    plain = _REPEATING.sub(_repeated, plain)
    words = re.sub(r"\\(?:text|mathrm|mbox|textbf|textrm|textit)\s*\{([^{}]*)\}", r" \1 ", plain)
    words = " ".join(words.split())
    if _WORDS.fullmatch(words) and not _is_formula(words):
        return Value("words", (words.rstrip(".").casefold(),))
    if not _LISTS.search(plain):
        plain = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), plain)
    try:
        value = _answer(_tokens(plain), 0)
    except BeyondGrammar:
        raise
    except (ArithmeticError, ValueError):  # from a function where it has no value
        raise BeyondGrammar("a division by zero") from None
    unit = value.unit or (_COINS[coin[1]] if coin is not None else "$" if is_money else "")
    return Value(value.kind, value.parts, unit) if unit else value


def _repeated(found: re.Match[str]) -> str:
    """A repeating decimal as a fraction in parentheses."""
    first, again = found["first"], found["again"]
    below = 10 ** len(first) * (10 ** len(again) - 1)
    above = int(f"{found['whole']}{first}{again}") - int(f"0{found['whole']}{first}")
    return f"({above}/{below})"


def _is_formula(words: str) -> bool:
    """True for letters that are factors, such as `xy`, or names of functions."""
    runs = re.findall("[A-Za-z]+", words)
    return all(len(run) < 3 or run in _KNOWN or run in UNITS for run in runs)


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise BeyondGrammar(f"the sign {text[at]!r}")
        at = token.end()
        kind = token.lastgroup
        if kind == "command" and token["command"] not in _KNOWN:
            raise BeyondGrammar(f"the command \\{token['command'][:20]}")
        if kind == "word":
            found += _word(token["word"])
        elif kind == "text":
            name = token["text"].strip().rstrip(".").lower()
            if name in ("and", "or"):
                found.append(("sign", ","))
                continue
            first, _, rest = name.partition(" ")
            if first in _SCALES and found:
                found += [("sign", "*"), ("number", str(_SCALES[first]))]
                name = rest.strip()
            if name or not rest:
                found += [unit] if (unit := _unit(name)) else [("text", name)] if name else []
        elif kind is not None:
            found.append((kind, token[0].lstrip("\\") if kind == "command" else token[0]))
    return found


def _word(word: str) -> list[Token]:
    if word in _KNOWN:
        return [("command", word)]
    if word in ("and", "or"):
        return [("sign", ",")]
    if word in _SCALES:
        return [("sign", "*"), ("number", str(_SCALES[word]))]
    unit = _unit(word) if len(word) > 1 else None
    if unit is not None:
        return [unit]
    name = next((n for n in sorted(_FUNCTIONS | {"sqrt", "pi"}) if word.startswith(n)), None)
    if name is not None:
        return [("command", name), *_word(word[len(name) :])] if word != name else []
    return [("letter", letter) for letter in word]


def _unit(name: str) -> Token | None:
    if name == "percent":
        return ("sign", "%")
    if (area := _AREA.fullmatch(name)) is not None:
        unit = UNITS.get(area["name"] or area["unit"])
        power = 3 if (area["before"] or area["after"]).startswith("cu") else 2
        return None if unit is None else ("unit", f"{unit}^{power}")
    return ("unit", UNITS[name]) if name in UNITS else None


# --- lists, sets, equations -------------------------------------------------------------------


def _split(tokens: Tokens, is_border: Callable[[Token], bool]) -> list[tuple[Token, Tokens]]:
    """The parts between borders outside of all brackets, each with the border before it."""
    parts: list[tuple[Token, Tokens]] = []
    depth, begin, border = 0, 0, ("", "")
    for at, token in enumerate(tokens):
        if token in _OPENED:
            depth += 1
        elif token in _CLOSED:
            depth -= 1
        elif depth == 0 and is_border(token):
            parts.append((border, tokens[begin:at]))
            begin, border = at + 1, token
    return [*parts, (border, tokens[begin:])]


def _answer(tokens: Tokens, depth: int) -> Value:
    """A list, or a single value."""
    if depth > DEPTH_MAX:
        raise BeyondGrammar(f"nested deeper than {DEPTH_MAX}")
    parts = _split(tokens, lambda token: token in (("sign", ","), ("sign", ";")))
    given = [part for _, part in parts if part]
    if not given:
        raise BeyondGrammar("nothing")
    values = [value for part in given for value in _one(part, depth)]
    return values[0] if len(values) == 1 else _set(values)


def _set(values: Sequence[Value]) -> Value:
    if not values:
        raise BeyondGrammar("a list of nothing")
    if len(values) > LISTED_MAX:
        raise BeyondGrammar(f"over {LISTED_MAX} values in a list")
    return Value("set", tuple(values))


def _one(tokens: Tokens, depth: int) -> list[Value]:
    """One value, or the two that `\\pm` makes."""
    if not {("command", "pm"), ("command", "mp")} & set(tokens):
        return [_related(tokens, depth)]
    found = []
    for plus, minus in (("+", "-"), ("-", "+")):
        new = {("command", "pm"): ("sign", plus), ("command", "mp"): ("sign", minus)}
        found.append(_related([new.get(token, token) for token in tokens], depth))
    return found


def _related(tokens: Tokens, depth: int) -> Value:
    inside = _split(tokens, lambda token: token == ("command", "in"))
    if len(inside) == 2:
        tokens = inside[1][1]
    parts = _split(tokens, lambda token: token[1] in _RELATIONS and token[0] in ("sign", "command"))
    if len(parts) == 1:
        return _joined(tokens, depth)
    signs = [_RELATIONS[border[1]] for border, _ in parts[1:]]
    left = "".join(text for _, text in parts[0][1])
    is_named = signs == ["="] and _NAME.fullmatch(left) is not None
    sides = tuple(_joined(part, depth) for _, part in parts)
    return Value("relation", (tuple(signs), sides, is_named))


def _joined(tokens: Tokens, depth: int) -> Value:
    parts = [part for _, part in _split(tokens, lambda token: token == ("command", "cup"))]
    if len(parts) > 1:
        return _set([_bracketed(part, depth) for part in parts])
    return _bracketed(tokens, depth)


def _bracketed(tokens: Tokens, depth: int) -> Value:
    """A tuple, interval, set, matrix or number."""
    first, last = (tokens[0], tokens[-1]) if tokens else (("", ""), ("", ""))
    if tokens in _EMPTY:
        return Value("words", ("the empty set",))
    if first == ("command", "begin"):
        return _matrix(tokens, depth)
    if first[0] == last[0] == "sign" and first[1] in ("(", "[", "\\{", "{") and last[1] in _CLOSING:
        inner = tokens[1:-1]
        parts = [part for _, part in _split(inner, lambda token: token == ("sign", ","))]
        is_set = first[1] in ("\\{", "{")
        if _is_one_bracket(tokens) and (len(parts) > 1 or first[1] == "\\{"):
            if is_set:
                return _set([v for part in parts if part for v in _one(part, depth + 1)])
            values = tuple(_answer(part, depth + 1) for part in parts)
            return Value(first[1] + last[1], values)
    ratio = [part for _, part in _split(tokens, lambda token: token == ("sign", ":"))]
    if len(ratio) > 1:
        return Value("ratio", tuple(_number(part, depth) for part in ratio))
    return _number(tokens, depth)


def _is_one_bracket(tokens: Tokens) -> bool:
    """True if the first bracket is closed by the last token."""
    depth = 0
    for at, (kind, sign) in enumerate(tokens):
        depth += kind == "sign" and sign in _BRACKETS
        depth -= kind == "sign" and sign in _CLOSING
        if depth == 0:
            return at == len(tokens) - 1
    return False


def _matrix(tokens: Tokens, depth: int) -> Value:
    name = [token[1] for token in tokens if token[0] == "letter"]
    size = next((at for at, token in enumerate(tokens) if token == ("sign", "}")), 0)
    if tokens[1:2] != [("sign", "{")] or "".join(name[: size - 2])[1:] != "matrix":
        raise BeyondGrammar("an environment that is no matrix")
    end = len(tokens) - size - 1
    if tokens[end : end + 1] != [("command", "end")]:
        raise BeyondGrammar("something after a matrix")
    rows = [part for _, part in _split(tokens[size + 1 : end], lambda t: t == ("sign", "\\\\"))]
    cells = [
        tuple(_number(cell, depth + 1) for _, cell in _split(row, lambda t: t == ("sign", "&")))
        for row in rows
        if row
    ]
    if not cells:
        raise BeyondGrammar("a matrix of nothing")
    return Value("matrix", tuple(cells))


def _number(tokens: Tokens, depth: int) -> Value:
    """A formula, with its unit."""
    tokens, unit = _without_unit(tokens)
    if len(tokens) > 2 and tokens[1] == ("sign", "_") and tokens[0][0] == "number":
        return Value("based", tuple(text for _, text in tokens if text not in ("{", "}")))
    if len(tokens) == 1 and tokens[0][0] == "text":
        return Value("words", (tokens[0][1],))
    return Value("number", tuple(_Formula(tokens, at, depth).all() for at in range(POINTS)), unit)


def _without_unit(tokens: Tokens) -> tuple[Tokens, str]:
    """A number's tokens and its unit, a known one or words in `\\text`."""
    is_angle = any(token[1] in _FUNCTIONS for token in tokens)
    for end in (4, 2):
        if "".join(text for _, text in tokens[-end:]) in _DEGREES and not is_angle:
            return tokens[:-end], "degree"
    place = next((at for at, t in enumerate(tokens) if at and t[0] in ("unit", "text")), None)
    unit = "" if place is None else "".join(t[1] for t in tokens[place:] if t[1] not in ("{", "}"))
    if place is not None and tokens[place][0] == "text" and re.search(r"[a-z]\d", unit):
        return tokens, ""  # a number behind words, as in `5 to 3`
    is_unit = _UNIT.fullmatch(unit) is not None and _NO_UNIT.isdisjoint(unit.split())
    return (tokens[:place], unit) if is_unit else (tokens, "")


# --- formulas ---------------------------------------------------------------------------------


@functools.cache
def _context() -> Any:
    import mpmath

    context = mpmath.mp.clone()
    context.prec = _PRECISION_BITS
    return context


@functools.lru_cache(maxsize=256)
def _letter(name: str, point: int) -> Any:
    """The number that stands for a letter: positive at the first point, complex at the second."""
    digest = hashlib.blake2b(name.encode(), digest_size=64).digest()
    real, imaginary = (
        _context().mpf(int.from_bytes(part, "big")) / 2**256 + 0.5
        for part in (digest[:32], digest[32:])
    )
    return real if point == 0 else _context().mpc(-imaginary, real)


def _float(value: Any) -> Any:
    if isinstance(value, Fraction):
        return _context().mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Any) -> Any:
    """The value; `BeyondGrammar` if it is infinite or has too many bits."""
    if isinstance(value, Fraction):
        if max(abs(value.numerator), value.denominator).bit_length() > BITS_MAX:
            raise BeyondGrammar(f"a number of over {BITS_MAX} bits")
        return value
    size = _context().mag(value) if value else 0
    if not _context().isfinite(value) or abs(size) > BITS_MAX:
        raise BeyondGrammar(f"a number of over {BITS_MAX} bits")
    return value


class _Formula:
    """By recursive descent: sums of products of powers. Each token is taken once, so that the work
    is in proportion to the text."""

    def __init__(self, tokens: Tokens, point: int, depth: int) -> None:
        self._tokens, self._point, self._depth, self._at = tokens, point, depth, 0
        self._bars = 0  # open ones

    def all(self) -> Any:
        value = self._sum()
        if self._at < len(self._tokens):
            raise BeyondGrammar(f"{self._tokens[self._at][1]!r} where a formula ends")
        return value

    def _peek(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("", "")

    def _take(self, *wanted: str) -> str:
        """The next sign or command if it is one of these, else an empty text."""
        kind, text = self._peek()
        if kind not in ("sign", "command") or text not in wanted:
            return ""
        self._at += 1
        return text

    def _sum(self) -> Any:
        value = self._product()
        while sign := self._take("+", "-"):
            value = self._two(value, self._product(), _ADDED[sign])
        return value

    def _two(self, one: Any, other: Any, made: Callable[..., Any]) -> Any:
        if not (isinstance(one, Fraction) and isinstance(other, Fraction)):
            one, other = _float(one), _float(other)
        return _bounded(made(one, other))

    def _product(self) -> Any:
        is_negative = self._take("+", "-") == "-"
        value = self._power()
        while True:
            sign = self._take("*", "cdot", "times", "/", "div")
            if not sign and not self._begins():
                return -value if is_negative else value
            right = self._signed() if sign else self._factor_after(value)
            if sign in ("/", "div"):
                value = self._divided(value, right)
            else:
                value = self._two(value, right, operator.mul)

    def _signed(self) -> Any:
        sign = self._take("+", "-")
        value = self._power()
        return -value if sign == "-" else value

    def _begins(self) -> bool:
        kind, text = self._peek()
        if kind == "sign":
            return text in ("(", "[", "{") or (text == "|" and not self._bars)
        return kind in ("number", "letter", "text", "unit") or (
            kind == "command" and text in _FUNCTIONS | _NAMES | _ATOMS
        )

    def _factor_after(self, value: Any) -> Any:
        """A factor without a sign before it. After a whole number a proper fraction is no factor:
        together they are a mixed number."""
        before, here = self._tokens[self._at - 1], self._peek()
        is_mixed = before[0] == "number" and isinstance(value, Fraction) and value.denominator == 1
        if here == ("command", "frac") and is_mixed:
            right = self._power()
            if isinstance(right, Fraction) and 0 < right < 1 and value:
                return 1 + right / value
            return right
        if here[0] != "number":
            return self._power()
        ahead = self._tokens[self._at : self._at + 3]
        if is_mixed and len(ahead) == 3 and ahead[1] == ("sign", "/") and ahead[2][0] == "number":
            self._at += 3
            part = self._divided(Fraction(ahead[0][1]), Fraction(ahead[2][1]))
            if 0 < part < 1 and value:
                return 1 + part / value
        raise BeyondGrammar("two numbers side by side")

    def _divided(self, one: Any, other: Any) -> Any:
        if not other or (not isinstance(other, Fraction) and abs(other) < _float(_NEAR)):
            raise BeyondGrammar("a division by zero")
        return self._two(one, other, operator.truediv)

    def _power(self) -> Any:
        value = self._postfix(self._atom())
        for end in (4, 2):
            if "".join(text for _, text in self._tokens[self._at : self._at + end]) in _DEGREES:
                self._at += end
                return self._two(_context().pi / 180, value, operator.mul)
        if self._take("^"):
            value = self._postfix(self._raised(value, self._exponent()))
        return value

    def _postfix(self, value: Any) -> Any:
        while sign := self._take("!", "%", "\\%"):
            if sign != "!":
                value = self._divided(value, Fraction(100))
            elif abs(value) > FACTORIAL_MAX:
                raise BeyondGrammar(f"a factorial beyond {FACTORIAL_MAX}")
            elif isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
                value = Fraction(math.factorial(int(value)))
            else:
                value = _bounded(_context().factorial(_float(value)))
        return value

    def _exponent(self) -> Any:
        if self._take("-"):
            return -self._atom()
        return self._atom()

    def _raised(self, base: Any, exponent: Any) -> Any:
        if not base and (not isinstance(exponent, Fraction) or exponent <= 0):
            raise BeyondGrammar("a power of zero")
        if isinstance(exponent, Fraction) and isinstance(base, Fraction):
            size = max(abs(base.numerator), base.denominator).bit_length() * abs(exponent)
            if size > BITS_MAX:
                raise BeyondGrammar(f"a number of over {BITS_MAX} bits")
            if exponent.denominator == 1:
                return base**exponent.numerator
            if exponent.denominator <= ROOT_MAX:
                root = _exact_root(base, exponent.denominator)
                if root is not None:
                    return root**exponent.numerator
        one, other = _float(base), _float(exponent)
        if not base or abs(other) * (abs(_context().mag(one)) + 4) > BITS_MAX:
            raise BeyondGrammar(f"a number of over {BITS_MAX} bits")
        return _bounded(_context().power(one, other))

    def _group(self, closing: str) -> Any:
        value = self._sum()
        if not self._take(closing):
            raise BeyondGrammar(f"no {closing} where one is missing")
        return value

    def _digit(self) -> Any:
        """A part of `\\frac`: braces, or one digit or letter."""
        kind, text = self._peek()
        if kind == "number" and len(text) > 1 and text.isdigit():
            self._tokens = [*self._tokens[: self._at], ("number", text[0]), ("number", text[1:]),
                            *self._tokens[self._at + 1 :]]  # fmt: skip
        return self._atom()

    def _atom(self) -> Any:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise BeyondGrammar(f"nested deeper than {DEPTH_MAX}")
        value = self._any_atom()
        self._depth -= 1
        return value

    def _any_atom(self) -> Any:
        kind, text = self._peek()
        self._at += 1
        if kind == "number":
            return _bounded(Fraction(text))
        if kind == "letter" or (kind == "command" and text in _NAMES):
            return self._named(text)
        if kind in ("text", "unit"):
            return _letter(f"text {text}", self._point)
        if kind == "sign" and text in ("(", "[", "{"):
            return self._group(_BRACKETS[text])
        if (kind, text) == ("sign", "|"):
            self._bars += 1
            value = abs(self._group("|"))
            self._bars -= 1
            return value
        if kind == "command":
            return self._command(text)
        raise BeyondGrammar(f"{text!r} where a number begins" if text else "a number is missing")

    def _named(self, name: str) -> Any:
        if self._take("_"):
            in_braces = bool(self._take("{"))
            while True:
                name += f"_{self._peek()[1]}"
                self._at += 1
                if not in_braces or self._take("}") or not self._peek()[1]:
                    break
        if name == "e":
            return _context().e + 0
        return _context().j + 0 if name == "i" else _letter(name, self._point)

    def _command(self, name: str) -> Any:
        if name == "frac":
            above = self._digit()
            return self._divided(above, self._digit())
        if name == "binom":
            return self._binomial(self._digit(), self._digit())
        if name == "sqrt":
            index = self._group("]") if self._take("[") else Fraction(2)
            return self._root(self._atom(), index)
        if name == "pi":
            return _context().pi + 0
        if name == "infty":
            if len(self._tokens) > 1 + (self._tokens[0][1] in ("+", "-")):
                raise BeyondGrammar("a calculation with infinity")
            return _letter("infinity", 0)
        if name in ("lfloor", "lceil"):
            value = self._group({"lfloor": "rfloor", "lceil": "rceil"}[name])
            if not isinstance(value, Fraction):
                raise BeyondGrammar("a rounded number that is not exact")
            return Fraction(math.floor(value) if name == "lfloor" else math.ceil(value))
        if name in _FUNCTIONS:
            return self._function(name)
        raise BeyondGrammar(f"{name} where a number begins")

    def _binomial(self, above: Any, below: Any) -> Any:
        if abs(above) > BINOMIAL_MAX or abs(below) > BINOMIAL_MAX:
            raise BeyondGrammar(f"a binomial beyond {BINOMIAL_MAX}")
        is_whole = all(isinstance(e, Fraction) and e.denominator == 1 for e in (above, below))
        if is_whole and 0 <= below <= above:
            return Fraction(math.comb(int(above), int(below)))
        return _bounded(_context().binomial(_float(above), _float(below)))

    def _root(self, value: Any, index: Any) -> Any:
        if not isinstance(index, Fraction) or index.denominator != 1 or not 1 < index <= ROOT_MAX:
            raise BeyondGrammar("a root that is none")
        if not value:
            return value
        if isinstance(value, Fraction):
            root = _exact_root(value, int(index))
            if root is not None:
                return root
            if value < 0 and index % 2:
                return -self._raised(-value, 1 / index)
        return self._raised(value, 1 / index)

    def _function(self, name: str) -> Any:
        base = self._atom() if self._take("_") else None
        exponent = self._exponent() if self._take("^") else Fraction(1)
        value = _float(self._operand())
        if exponent == -1 and name in ("sin", "cos", "tan"):
            name, exponent = f"arc{name}", Fraction(1)
        if name in ("ln", "log") and not value:
            raise BeyondGrammar("a logarithm of zero")
        if abs(value) > (_ANGLE_MAX if name != "exp" else BITS_MAX // 2):
            raise BeyondGrammar("a function of too large a number")
        if name == "log":
            base = Fraction(10) if base is None else base
        context = _context()
        if name in ("ln", "log"):
            below = context.log(_float(base)) if base is not None else context.mpf(1)
            found = self._divided(context.log(value), below)
        else:
            arc = name.startswith("arc")
            found = getattr(context, f"a{name[3:]}" if arc else name)(value)
        return self._raised(_bounded(found), exponent) if exponent != 1 else _bounded(found)

    def _operand(self) -> Any:
        """The argument of a function: one in parentheses, or factors side by side."""
        if self._peek() in (("sign", "("), ("sign", "{")):
            return self._power()
        value = self._signed()
        while self._begins() and self._peek()[1] not in _FUNCTIONS | {"("}:
            value = self._two(value, self._factor_after(value), operator.mul)
        return value


_ADDED: Final[dict[str, Callable[..., Any]]] = {"+": operator.add, "-": operator.sub}


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """The root if it is a fraction: of an odd index also for negative numbers."""
    if value < 0:
        root = _exact_root(-value, index) if index % 2 else None
        return None if root is None else -root
    above, below = (_whole_root(part, index) for part in (value.numerator, value.denominator))
    return Fraction(above, below) if Fraction(above, below) ** index == value else None


def _whole_root(value: int, index: int) -> int:
    """The largest whole number whose power is at most `value`, by Newton's method."""
    root = 1 << -(-value.bit_length() // index)
    while root > 1:
        less = ((index - 1) * root + value // root ** (index - 1)) // index
        if less >= root:
            break
        root = less
    return root


# --- comparison -------------------------------------------------------------------------------


def same(one: Value, other: Value) -> bool:
    """True if both are equal, whatever their spelling. Sets have no order. An equation `x = 5` and
    its right side are the same, as are numbers of which only one has a unit."""
    if one.kind != other.kind:
        first, second = _right_side(one), _right_side(other)
        if first is not None:
            return same(first, other)
        return second is not None and same(one, second)
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if len(one.parts) != len(other.parts):
        return False
    if one.kind == "number":
        return all(map(_near, one.parts, other.parts))
    if one.kind == "set":
        return _same_sets(list(one.parts), list(other.parts))
    if one.kind == "relation":
        return _same_relations(one.parts, other.parts)
    if one.kind == "matrix":
        rows = zip(one.parts, other.parts, strict=True)
        return all(len(a) == len(b) and all(map(same, a, b)) for a, b in rows)
    if one.kind in ("words", "based"):
        return one.parts == other.parts
    return all(map(same, one.parts, other.parts))


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    one, other = _float(one), _float(other)
    return bool(abs(one - other) <= _float(_NEAR) * max(1, abs(one), abs(other)))


def _same_sets(one: list[Value], other: list[Value]) -> bool:
    for each in one:
        place = next((at for at, found in enumerate(other) if same(each, found)), None)
        if place is None:
            return False
        del other[place]
    return True


def _right_side(value: Value) -> Value | None:
    if value.kind != "relation" or not value.parts[2]:
        return None
    right: Value = value.parts[1][1]
    return right


def _same_relations(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (signs, sides, _), (others, other_sides, _) = one, other
    if len(signs) != len(others):
        return False
    if signs == others and all(map(same, sides, other_sides)):
        return True
    turned = tuple(_TURNED.get(sign, sign) for sign in reversed(others))
    if signs == turned and all(map(same, sides, reversed(other_sides))):
        return True
    return signs == others == ("=",) and _in_proportion(sides, other_sides)


def _in_proportion(one: Sequence[Value], other: Sequence[Value]) -> bool:
    """True if two equations differ by a factor, as `y = 2x` and `2y - 4x = 0` do."""
    if any(value.kind != "number" for value in (*one, *other)):
        return False
    gaps = [
        [_float(a) - _float(b) for a, b in zip(left.parts, right.parts, strict=True)]
        for left, right in (one, other)
    ]
    if any(abs(gap) < _float(_NEAR) for pair in gaps for gap in pair):
        return False
    ratios = [first / second for first, second in zip(*gaps, strict=True)]
    return _near(ratios[0], ratios[1])
