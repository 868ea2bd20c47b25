"""Numbers, units and closing marks as people and models write them. Pure; every search looks at
`NUMBER_CHARS_MAX` characters or less, so its work has a bound for any text.

A number is an integer, a decimal, a fraction (`3/4`, `\\frac{3}{4}`, `\\dfrac34`), a mixed number
(`1 3/4`) or in scientific notation (`1e3`, `2 \\times 10^{3}`). It may have thousands separators
(`1,000`, `1{,}000`, `1\\,000`), a sign, a currency, `%` (which divides by 100), and one known unit.
Text before it must not make it part of something else: an expression, a list, a time, a bound.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

NUMBER_CHARS_MAX: Final = 96
BLANKS_MAX: Final = 4  # in a row, after an answer

# After an answer, each once, with blanks between them; longer ones first.
CLOSING_MARKS: Final = (
    "\\end{equation*}", "\\end{equation}", "\\end{aligned}", "\\end{align*}", "\\end{align}",
    "</answer>", "\\]", "\\)", "$$", "**", "__", "*", "_", "$", "`", '"', "'", ".", "\u3002", ",",
    ";", "!", ")", "]",
)  # fmt: skip
PLACES_MAX: Final = 20
BRACES_MAX: Final = 2  # closed after a number
BLANKS: Final = " \n\t\r"
MINUS_SIGNS: Final = "-\N{MINUS SIGN}\N{EN DASH}"

_UNITS: Final = """
m meter meters metre metres|cm centimeter centimeters centimetre centimetres|km kilometer kilometers
kilometre kilometres|mm millimeter millimeters|inch inches|ft foot feet|yd yard yards|mile miles|mph
g gram grams|kg kilogram kilograms|mg milligram milligrams|lb lbs pound pounds|oz ounce ounces|ton
tons|L liter liters litre litres|mL ml milliliter milliliters|gallon gallons|s sec second seconds
|min minute minutes|h hr hrs hour hours|day days|week weeks|month months|year years|$ dollar dollars
USD|cent cents|euro euros EUR|degree degrees|radian radians|unit units|percent
"""
UNITS: Final = {name: group.split()[0] for group in _UNITS.split("|") for name in group.split()}
_WORD: Final = "|".join(
    sorted((re.escape(each) for each in UNITS if len(each) > 1 and each != "percent"), reverse=True)
)
_UNIT: Final = (
    rf"(?:(?:square|sq\.?|cubic) )?"
    rf"(?:(?:{_WORD})(?: ?(?:/|per) ?(?:{_WORD}))?|(?:{_WORD}|m) ?/ ?[hs])"
    r"(?: squared| cubed|\^\{?[23]\}?|[\u00b2\u00b3])?"
)
_UNIT_AT_END: Final = re.compile(
    rf"(?:\A|(?<=[^A-Za-z\\^_]))(?:(?:{_UNIT})|[\u20ac\u00a3]|\\(?:text|mathrm|mbox|textrm)\{{\s*(?:{_UNIT})\.?\s*\}}"
    r"(?:\^\{?[23]\}?)?)\Z"
)

_INTEGER: Final = r"(?:[1-9][0-9]{0,2}(?:(?:,|\{,\}|\\,|\\!|,\\!|\\!,) ?[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL: Final = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
_MINUS: Final = f"[{MINUS_SIGNS}]"
_TEN: Final = rf"10\s?\^\s?(?:\{{\s?{_MINUS}?\s?[0-9]{{1,3}}\s?\}}|{_MINUS}?[0-9]{{1,3}})"
_PART: Final = rf"(?:\{{\s?{_MINUS}?\s?{_DECIMAL}\s?\}}|[0-9])"
_LITERAL: Final = re.compile(
    rf"""(?P<mixed>{_INTEGER}(?:\s{{1,2}}|\\\ )(?={_INTEGER}\s?/)|{_INTEGER}\s?(?=\\[dtc]?frac))?
    (?: \\[dtc]?frac\s?(?P<above>{_PART})\s?(?P<below>{_PART})
      | (?P<numerator>{_INTEGER})\s?/\s?(?P<denominator>{_INTEGER})
      | (?:(?P<factor>{_DECIMAL})\s?(?:\\times|\\cdot|[\u00d7\u00b7*])\s?)?(?P<ten>{_TEN})
      | (?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}}))?
    )(?:(?P<percent>\s?\\?%|\spercent)|\s?\^\s?(?:\\circ|\{{\s?\\circ\s?\}})|\u00b0)?\Z""",
    re.VERBOSE,
)
_SEPARATORS: Final = re.compile(r"[,{}!\\ ]")
_ZEROS: Final = "000"  # at the end of decimals; 1.50 is a price, and 0.730 a computed number

# Before a number: what surrounds or announces it.
_OPENING: Final = re.compile(
    r"(?:\s|\\?\$|[*_`\"'#\u20ac\u00a3\u00a5]|\\[(\[,;:! ]|\\q?quad|<answer>|(?P<bracket>[(\[])"
    r"|(?P<brace>\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s?\{)"
    r"|\\(?:Rightarrow|rightarrow|to|implies|therefore|approx|displaystyle)(?![A-Za-z]))\Z"
)
# Before a number of which it is not the sole value: a command, a sign in words, a list.
_JOINING: Final = re.compile(
    r"(?:\\[A-Za-z]+|\b(?:minus|negative|log|ln|sin|cos|tan|sqrt|mod)"
    r"|[0-9)}%$*]\s?,?\s?(?:or|and|to|by|of|plus|times|over|point|versus|vs))\Z",
    re.IGNORECASE,
)
_ANNOUNCED: Final = "=:;.?!\u2014\u2026\u2248\u2192\u21d2\u3002\uff1a\uff0c\uff1d"


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    text: str  # in the usual spelling, which has at most two useless zeros
    is_all: bool  # nothing but signs, emphasis and brackets stands before it


def before_marks(text: str, end: int) -> int:
    """The end of `text[:end]` without its closing marks and the blanks around them."""
    left = list(CLOSING_MARKS)
    while True:
        begin = max(0, end - BLANKS_MAX)
        bare = begin + len(text[begin:end].rstrip(BLANKS))
        mark = next((each for each in left if text.endswith(each, 0, bare)), None)
        if mark is None:
            return bare
        left.remove(mark)
        end = bare - len(mark)


def before_unit(text: str, end: int) -> int:
    """The end of the text before a known unit that ends at `end`; without one, `end`."""
    begin = max(0, end - NUMBER_CHARS_MAX)
    found = _UNIT_AT_END.search(text[begin:end])
    return end if found is None else begin + found.start()


def before_ending(text: str, *, units: bool = True) -> int:
    """The end of a text before its closing marks, with a known unit among them."""
    end = before_marks(text, len(text))
    bare = before_unit(text, end) if units else end
    return end if bare == end else before_marks(text, bare)


def number_at_end(text: str, *, units: bool = True) -> Number | None:
    """The number at the end of a text, perhaps before a unit and closing marks; None: there is
    none, or it is part of something else. A brace after it closes `\\boxed{` or `\\text{`.
    `units`: whether a known unit may follow, which is lost."""
    end = before_ending(text, units=units)
    for braces in range(BRACES_MAX + 1):  # noqa: B007 - needed after the loop
        begin = max(0, end - NUMBER_CHARS_MAX)
        found = _LITERAL.search(text[begin:end])
        if found is not None:
            break
        if not text.endswith("}", 0, end):
            return None
        end = before_marks(text, end - 1)
    if found is None or (begin and not found.start()):
        return None
    at = begin + found.start()
    sign, is_all = _sign(text[max(0, at - NUMBER_CHARS_MAX) : at], braces, ")" in text[end:])
    value = _value(found) if sign else None
    return None if value is None else Number(sign * value[0], _signed(sign, value[1]), is_all)


def plain(value: Fraction) -> str:
    """A value as a decimal if it has one of at most `PLACES_MAX` places, else as a fraction."""
    places = next((n for n in range(PLACES_MAX + 1) if 10**n % value.denominator == 0), None)
    if places is None:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    whole = digits if not places else f"{digits[:-places]}.{digits[-places:]}"
    return f"-{whole}" if value < 0 else whole


def _value(found: re.Match[str]) -> tuple[Fraction, str] | None:
    """The value and usual spelling of a literal; None: it divides by zero or is no proper mixed
    number."""
    part = found.groupdict()
    spelled = None
    if part["above"] is not None or part["numerator"] is not None:
        above = _decimal(part["above"] or part["numerator"])
        below = _decimal(part["below"] or part["denominator"])
        if not below:
            return None
        value = above / below
        if above.denominator == 1 and below.denominator == 1 and below > 0:
            spelled = f"{above}/{below}"
    elif part["ten"] is not None:
        value = _decimal(part["factor"] or "1") * Fraction(10) ** int(_decimal(part["ten"][2:]))
    else:
        value = _decimal(part["decimal"]) * Fraction(10) ** int(part["exponent"] or 0)
        spelled = None if part["exponent"] else _spelled(part["decimal"])
    if part["mixed"] is not None:
        if not 0 < value < 1:
            return None
        value, spelled = value + _decimal(part["mixed"]), None
    if part["percent"] is not None:
        value, spelled = value / 100, None
    return value, spelled or plain(value)


def _decimal(text: str) -> Fraction:
    for sign in MINUS_SIGNS[1:]:
        text = text.replace(sign, "-")
    return Fraction(_SEPARATORS.sub("", text).replace("^", "").strip())


def _spelled(text: str) -> str:
    whole, point, decimals = _SEPARATORS.sub("", text).partition(".")
    whole = whole.lstrip("0") or "0"
    if decimals.endswith(_ZEROS):
        decimals = decimals.rstrip("0")
    return f"{whole}.{decimals}" if point and decimals else whole


def _signed(sign: int, text: str) -> str:
    if sign > 0 or not text.strip("0."):
        return text
    return text[1:] if text.startswith("-") else f"-{text}"


def _sign(before: str, braces: int, closes: bool) -> tuple[int, bool]:
    """The sign of a number after this text, 1 or -1, and whether no more than what opens it stands
    before it; 0: it is part of something else. `braces`: closed after the number; `closes`: a
    parenthesis is closed there."""
    if before and (before[-1] == "." or _is_glue(before[-1])):
        return 0, False
    sign = 0
    attached = blank = line = False
    while before:
        opening = _OPENING.search(before)
        if opening is None and before[-1] in MINUS_SIGNS + "+" and not (sign or line):
            sign = 1 if before[-1] == "+" else -1
            attached, blank, before = not blank, False, before[:-1]
            continue
        if opening is None:
            break
        before = before[: opening.start()]
        blank |= opening[0].isspace()
        line |= opening[0] == "\n"
        braces -= opening["brace"] is not None
        joins = opening["bracket"] or opening[0] == "_"
        if joins and (before[-1:] in (")", "}") or _is_glue(before[-1:])):
            return 0, False
    is_minus = not sign or not before or line or before[-1] in _ANNOUNCED + ">"
    if not (is_minus or (attached and blank and re.search(r"[^\W\d]{2}\Z", before))):
        return 0, False
    if braces or not _stands_alone(before, blank, line, closes):
        return 0, False
    return sign or 1, not before or re.fullmatch(r"[A-Za-z]\s?=", before) is not None


def _is_glue(char: str) -> bool:
    """True for digits, and for letters that make a number part of a name or product; scripts
    without blanks, such as Chinese, do not."""
    is_letter = char.isalpha() and (char.isascii() or "\u0370" <= char <= "\u03ff")
    return is_letter or char.isnumeric()


def _stands_alone(before: str, blank: bool, line: bool, closes: bool) -> bool:
    """True if a text, without what opens or announces a number, may stand before one."""
    if not before:
        return True
    last = before[-1]
    if last == ",":
        return not closes and not re.search(r"[0-9)}%$*]\s?,\Z|\b[A-Za-z],\Z", before)
    if last == ":":
        return line or not re.search(r"[0-9]\s?:\Z" if not blank else r"[0-9]\s:\Z", before)
    if last == ">":
        return before.endswith(("->", "=>"))
    if line:
        return last not in ("+", "/", "^", "<", "\u00d7", "*")
    if last == "=":
        return not before.endswith(("<=", ">=", "!=", "\\neq"))
    if last in _ANNOUNCED:
        return True
    return last.isalpha() and not _JOINING.search(before)
