"""Answers as mathematics: golds of real benchmarks, right and wrong texts, bounds on work."""

import sys
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from node.envs.data.expressions import (
    BITS_MAX,
    DEPTH_MAX,
    TEXT_CHARS_MAX,
    BeyondGrammar,
    read,
    same,
)
from node.envs.data.items import Item
from node.envs.data.math_scorer import MathScorer

SCORER = MathScorer({})

# Forms of answers in MATH, AIME, OlympiadBench and Minerva.
GOLDS = r"""
\left( 3, \frac{\pi}{2} \right)
p - q
\frac{14}{3}
\text{Evelyn}
90^\circ
3\sqrt{13}
2220
6 - 5i
-50
\pi
6+9i
1,-2
\$32,348
-2 + 7i
\text{(C)}
3R^2
\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}
\begin{pmatrix} 1/5 & -2/5 \\ -2/5 & 4/5 \end{pmatrix}
(3,\infty)
(-\infty, -2] \cup [3, \infty)
x \in [-2,7]
(0,9) \cup (9,36)
\{1\pm\sqrt{5},-2\}
1 \pm \sqrt{19}
y = 2x + 3
4210_{5}
2516_8
12,\! 000
\sqrt[3]{4}
137 \frac{1}{2}
5.4 \text{ cents}
15\mbox{ cm}^2
10\%
11\sqrt2
\frac{3\sqrt{3}}{4}
\frac{1}{2} + \frac{\sqrt{3}}{2} i
\cot x
2k\pi
e^{i\pi/3}
\ln 2
\log_2 3
\frac{\sqrt{2} + \sqrt{6}}{4}
x^3 + 3x - 6
(x+2)(x-3)
-\frac{35}{9}
\text{odd}
\text{ellipse}
E
A,B
\text{June 20}
5, -3
(1,-16,-4,43)
\left(\frac{8}{5}, -\frac{35}{2}\right)
(-1,3) \cup (3,5)
.35625
2\sin^2 x
70 \sqrt{2}
18.90
\left[ -\frac{1}{2}, 1 \right)
7:4
10:30
f^{-1}(x) = \frac{x}{2}
f(x) = x^2 + 1
\frac{x+2}{7}
1+274i
2^{2009}-1
3^{1006}
\binom{10}{3}
7!
x > 3
-2 \le x \le 3
x^2 + y^2 = 25
y = \frac{1}{2}x + 1
\frac{270}7\text{ degrees}
1.36 \text{ m}
\frac43
\frac{\pi}{6}, \frac{5\pi}{6}
(2n+1)\pi
n(n+1)/2
\frac{n(n+1)(2n+1)}{6}
a_n = 2^n
x_1 + x_2
|x-1|
\tan 15^\circ
\arctan \frac{1}{2}
\frac{\sin x}{x}
\text{all real numbers}
\infty
3\pm 2\sqrt{2}
6 \text{ inches}
ABC
xy
\text{Yes}
no
\frac{7}{2} \text{ hours}
10^{-3}
1.2 \times 10^{5}
p^2 - q
{1,2,3}
\sqrt{5+2\sqrt{2}}
x=1, y=2
(x,y) = (1,2)
2:1
\frac{1}{1-x}
\sqrt{\frac{2}{3}}
\frac{5}{4}\pi
4+2\sqrt{3}
-\frac{\sqrt{2}}{2}
\pm\sqrt{7}
\frac{-1 \pm \sqrt{13}}{2}
\frac{n!}{2}
\binom{n}{2}
[0,\infty)
(-\infty,-3)\cup(-3,\infty)
\text{no solution}
x \neq 3
1:2:3
\mathbb{R}
\emptyset
\angle PQR
A=\pi r^2
3.00 \times 10^8
\frac{\ln 2}{\ln 3}
2^{n+1}-1
y^4-2y^3+7y^2+y-5
\frac{400}{3}\pi
1 \frac{4}{5}
6,\!000,\!000
2 \text{ and } 3
\sqrt{x-1}+2
x^2 - (a+b)x + ab
"""
GOLD_LIST = [each for each in GOLDS.split("\n") if each]

EQUAL = [
    ("42", "  42  "), ("1000", "1,000"), ("1,000", "1000"), ("42", "042"), ("42", "+42"),
    ("0.5", "0.50"), ("0.5", ".5"), ("3", "3.0"), ("1000", "1e3"), ("0.001", "1E-3"),
    ("-5", "\N{MINUS SIGN}5"), ("-5", "- 5"), ("0", "-0"), ("0.5", "1/2"), ("1/2", "2/4"),
    ("1/2", "\\dfrac{1}{2}"), ("3/2", "1 1/2"), ("2*sqrt(3)", "2\\sqrt{3}"),
    ("\\sqrt{2}", "\\sqrt 2"), ("\\pi", "\u03c0"), ("2\\pi", "2 \\pi"), ("5", "$5$"),
    ("5", "\\boxed{5}"), ("\\boxed{5}", "5"), ("5", "\\text{5}"), ("5", "(5)"), ("5", "x = 5"),
    ("5", "5 meters"), ("50\\%", "50%"), ("(1,2)", "(1, 2)"), ("{1,2,3}", "{3,2,1}"),
    ("x^{2}+2x+1", "(x+1)^2"), ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"), ("\\sin^2 x", "1-\\cos^2 x"),
    ("3\\pm2\\sqrt2", "3-2\\sqrt{2}, 3+2\\sqrt{2}"),
    ("(-\\infty,2)\\cup(3,4]", "(3,4]\\cup(-\\infty,2)"), ("y = 2x+3", "2x - y + 3 = 0"),
    ("x > 3", "3 < x"), ("1\\frac{4}{5}", "1.8"), ("1\\frac{4}{5}", "\\frac{9}{5}"),
    ("90^\\circ", "90"), ("90", "90^{\\circ}"), ("\\text{Evelyn}", "Evelyn"),
    ("\\text{(C)}", "C"), ("C", "\\text{(C)}"), ("x \\in [-2,7]", "[-2,7]"), ("1,-2", "-2, 1"),
    ("-2,1", "1 and -2"), ("e^{i\\pi}", "-1"), ("\\log_2 8", "3"),
    ("\\frac{1}{1-x}", "-1/(x-1)"), ("2^{10}", "1024"), ("5.4 \\text{ cents}", "5.4"),
    ("\\$32,348", "32348 dollars"), ("\\sqrt[3]{-8}", "-2"), ("12,\\! 000", "12000"),
    ("\\binom{5}{2}", "10"), ("5!", "120"), ("\\frac{a+b}{c}", "a/c+b/c"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
    ("\\text{Yes}", "yes"), ("3\\sqrt{13}", "\\sqrt{117}"), ("x^{3/2}", "x\\sqrt{x}"),
    ("1.2 \\times 10^{5}", "120000"), ("\\frac{270}7\\text{ degrees}", "\\frac{270}{7}^\\circ"),
    ("x^2+y^2=25", "y^2 + x^2 = 25"), ("\\sqrt{2}\\sqrt{3}", "\\sqrt{6}"),
    ("7", "The answer is 7."), ("7", "**Answer:** 7"), ("7", "x = 7."), ("2k\\pi", "2\\pi k"),
    ("0.5", "50\\%"), ("10\\text{ cm}", "10 cm"), ("\\text{June 20}", "June 20"),
    ("3:4", "3 : 4"), ("\\cos x", "cos(x)"), ("2\\sqrt3", "2sqrt3"), ("A,B", "B, A"),
    ("42", "{42}"), ("\\frac34", "3/4"), ("11", "\\mathbf{11}"), ("E", "\\textbf{(E)}"),
    ("x<3", "x\\lt 3"), ("3", "The final answer is $3$."), ("yes", "Yes."), ("42", "**42**"),
    ("\\frac{1}{2}\\sin 2x", "\\sin x \\cos x"), ("2^{2009}", "2\\cdot 2^{2008}"),
    ("42", "The product is **42**."), ("42", "6 times 7 makes 42, so \\boxed{42}"),
    ("\\frac{1000}{3}", "\\frac{1,000}{3}"), ("2\\sqrt{3}", "\u221a12"), ("2|x|", "2|x|"),
    ("(n+1)!", "(n+1)n!"), ("\\binom{n}{2}", "\\frac{n(n-1)}{2}"), ("12", "= 12"),
    ("2-\\sqrt{3}", "\\tan 15^\\circ"), ("4\\sin 30^{\\circ} + 1", "3"),
    ("60^\\circ", "60 degrees"), ("\\frac16", "0.1\\overline{6}"), ("0.\\overline{3}", "\\frac13"),
    ("4/3", "1.\\overline{3}"), ("0.\\overline{9}", "1"), ("\\{\\}", "\\emptyset"),
    ("\\emptyset", "\\varnothing"), ("5000000", "5\\text{ million}"), ("5\\text{ million}", "5e6"),
    ("\\$5 million", "\\$5,000,000"), ("24", "2\\text{ dozen eggs}"),
    ("9\\text{ ft}^2", "9 \\text{ square feet}"), ("9\\text{ cubic meters}", "9\\text{ meters}^3"),
    ("5", "\N{EURO SIGN}5"), ("5\\text{ euros}", "5 \N{EURO SIGN}"), ("\N{POUND SIGN}5.50", "5.5"),
    ("(-\\infty, 2)", "(-\\infty, 2)"), ("[1, +\\infty)", "[1, \\infty)"),
]  # fmt: skip

UNLIKE = [
    ("0.5", "0.05"), ("10", "100"), ("12", "21"), ("5", "-5"), ("1/2", "2/1"), ("3.14159", "3.14"),
    ("42", "43"), ("5", "52"), ("42", "142"), ("yes", "no"), ("A", "B"), ("0", ""),
    ("5 meters", "5 feet"), ("5\\text{ meters}", "5 feet"), ("(2,1)", "(1,2)"),
    ("1000", "1000\\%"), ("50", "50\\%"), ("4210_{5}", "4210"), ("(3,4)", "3,4"),
    ("(1,2)", "[1,2]"), ("\\frac{1}{2}", "1/2x"), ("xy", "|xy|"), ("x", "|x|"),
    ("x", "\\sqrt{x^2}"), ("\\pi", "3.14159265358979"), ("\\pi", "22/7"), ("12:30", "1230"),
    ("2^{2009}-1", "2^{2009}"), ("y=2x+3", "y=2x-3"), ("x>3", "x<3"), ("x>3", "x\\ge 3"),
    ("\\{1,2\\}", "\\{1,2,3\\}"), ("42", "42 or 43"), ("42", "41, 42"), ("C", "A, B, C, or D"),
    ("42", "definitely not 42"), ("42", "not 42"), ("\\sqrt{2}", "1.41421356237309504880"),
    ("3:4", "4:3"), ("3:4", "3/4"), ("x^2", "2x"), ("x_1", "x_2"),
    ("\\text{listen}", "\\text{silent}"), ("\\infty", "-\\infty"), ("3\\sqrt{13}", "13"),
    ("10^3", "3"), ("5!", "5"), ("e", "2.718281828"), ("25", "2 5"), ("1.5", "1 5"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)"), ("x=5", "y=6"), ("5", "5x"), ("5", "5i"),
    ("\\log x", "\\ln x"), ("x", "X"), ("7", "7 apples"), ("x=1", "x=1, x=2"), ("5", "5 = 6"),
    ("\\sqrt{2}+10^{60}", "10^{60}"), ("5", "y = x = 6"), ("6", "2x = 6"), ("2", "x^2 = 2"),
    ("\\tan 15", "\\tan 15^\\circ"), ("5", "5\\text{ million}"), ("5\\text{ million}", "5"),
    ("5", "5\\text{ or more}"), ("5", "5\\text{ is wrong}"), ("3", "3\\text{ halves}"),
    ("5", "5\\text{ squared}"), ("3\\text{ feet}", "3\\text{ square feet}"),
    ("0.12", "0.\\overline{12}"), ("5", "5\\text{ to }3"), ("5", "5\\text{ plus }2"),
    ("\\$5", "\N{EURO SIGN}5"), ("\N{EURO SIGN}5", "\N{POUND SIGN}5"),
    ("1", "\\infty/\\infty"), ("0", "\\infty-\\infty"), ("0", "\\{\\}"), ("\\{0\\}", "\\{\\}"),
]  # fmt: skip


def item(answer: str) -> Item:
    return {"question": "?", "answer": answer}


@pytest.mark.parametrize("gold", GOLD_LIST)
def test_an_answer_of_a_benchmark_is_read_and_right(gold: str) -> None:
    own = SCORER.own_answer(item(gold))
    for text in (own, gold, f"${gold}$.", f"\\({gold}\\)", f"The final answer is ${gold}$."):
        assert SCORER.score(item(gold), text) == 1.0, text


def test_answers_of_a_benchmark_are_not_taken_for_each_other() -> None:
    values = [(gold, read(SCORER.own_answer(item(gold)))) for gold in GOLD_LIST]
    alike = {
        (one, other)
        for at, (one, first) in enumerate(values)
        for other, second in values[at + 1 :]
        if same(first, second) or same(second, first)
    }
    assert alike == {("\\frac{1}{2} + \\frac{\\sqrt{3}}{2} i", "e^{i\\pi/3}")}


@pytest.mark.parametrize(("gold", "text"), EQUAL)
def test_equal_values_are_equal_in_any_spelling(gold: str, text: str) -> None:
    assert SCORER.score(item(gold), text) == 1.0


@pytest.mark.parametrize(("gold", "text"), UNLIKE)
def test_other_values_are_not_equal(gold: str, text: str) -> None:
    assert SCORER.score(item(gold), text) == 0.0


# --- hostile texts ------------------------------------------------------------------------------

CALLS_EACH_MAX = 160  # of Python functions, for each character of a text
HOSTILE = r"""
9^{9^{9^{9}}} 9^{99999999} 2^{-99999999} x^{1/99999999999999} 8^{1/99999999999}
(a+b+c+d)^{128} ((((a+b)^{64})^{64})^{64})^{64} \sin(10^{99}) \exp(10^{9}) \tan(1)^{9999}
200!^{200} 200!! 10^{9}! \binom{10^{9}}{10^{8}} 1e999^{999}
1000000000000000003000000000000077! \sqrt{1000000000000777} 1/(x-x) 0^0 1/0 \sqrt[0]{5}
\sqrt[9999]{5} __import__('os').system('true') \begin{pmatrix} \begin
\begin{pmatrix}1\end{pmatrix { } \ \frac \frac1 \pm \cup = < _ ^ x_ x_{ | || |x \in (,)
{,} : 1:
"""
HOSTILE_TEXTS = [
    *HOSTILE.split(),
    *("\\cot 0", "\\log_1 5", "\\ln 0", "\ud800", "\0", "\U0001d7d9", "\u0663", "\u00bd"),
]
REPEATED = r"""
( [ { \{ ((1) - + 1- -- 1, 1/ 1/2 2^ 2^{ x^{2} \frac{1}{ \sqrt{ \sqrt \sqrt[3] \sin \sin(
\log_2 | |x| ! 1! % x_ x_{ 9 0. a ab xyzw = x= x< \pm 1\pm \cup(1,2) \in : 1: \frac12
\binom{9}{4} \text{a} \text{ \begin{pmatrix} & 1& \\ $ \$ \boxed{ \lfloor1.5\rfloor
\lfloor e^ i \infty ' (x+1) (1,2)\cup \left( 1,000, * ** _
"""
REPEATED_TEXTS = [*REPEATED.split(), "1 ", "5 cm ", "\\sin x", " ", "\n"]


KNOWN = [  # told in docs/data.md
    (r"-2 < x < 3", "(-2, 3)", 0.0),
    (r"x > 5", r"(5, \infty)", 0.0),
    ("AB = 5", "5", 0.0),
    (r"\angle ABC = 30^\circ", "30", 0.0),
    (r"\{2\}", "2", 0.0),
    ("\u00bd", "1/2", 0.0),
    ("10 000", "10000", 0.0),
    (r"42\text{ apples}", "42", 1.0),
    (r"y \in [1, 2]", "x \\in [1, 2]", 1.0),
]


@pytest.mark.parametrize(("text", "gold", "reward"), KNOWN)
def test_misses_that_the_page_tells_are_as_it_says(text: str, gold: str, reward: float) -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    assert f"`{text}`" in page
    assert SCORER.score(item(gold), text) == reward


def calls(text: str) -> int:
    """The number of Python functions that are called to score a text."""
    found = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal found
        found += event == "call"

    read.cache_clear()
    sys.setprofile(count)
    try:
        reward = SCORER.score(item("\\frac{x+1}{2}"), text)
    finally:
        sys.setprofile(None)
    assert reward in (0.0, 1.0)
    return found


SCORER.prepare()
FIXED = 2 * calls("1")  # reading the answer, mostly


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_a_hostile_text_is_refused_or_cheap(text: str) -> None:
    assert calls(text) < FIXED + CALLS_EACH_MAX * max(16, len(text))


@pytest.mark.parametrize("part", REPEATED_TEXTS)
def test_work_is_in_proportion_to_the_text_and_has_a_bound(part: str) -> None:
    for length in (64, TEXT_CHARS_MAX):
        text = part * (length // len(part))
        assert calls(text) < FIXED + CALLS_EACH_MAX * length, length
    assert calls(part * (1_000_000 // len(part))) < FIXED
    with pytest.raises(BeyondGrammar, match=f"over {TEXT_CHARS_MAX}"):
        read(part * (TEXT_CHARS_MAX + 1))


def test_random_texts_of_the_grammar_are_cheap() -> None:
    rng = Random(1)
    for _ in range(300):
        text = "".join(rng.choice(REPEATED_TEXTS) for _ in range(rng.randint(2, 60)))[
            :TEXT_CHARS_MAX
        ]
        assert calls(text) < FIXED + CALLS_EACH_MAX * max(16, len(text)), text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("(" * (DEPTH_MAX + 1) + "1" + ")" * (DEPTH_MAX + 1), "nested deeper"),
        (f"2^{{{BITS_MAX + 1}}}", f"over {BITS_MAX} bits"),
        ("1 2", "two numbers side by side"),
        ("x" * (TEXT_CHARS_MAX + 1), "over 512 characters"),
        ("\\int x", "the command"),
        ("\\{,\\}", "a list of nothing"),
        ("\\begin{pmatrix}\\\\\\end{pmatrix}", "a matrix of nothing"),
    ],
)
def test_what_is_beyond_the_grammar_is_told(text: str, told: str) -> None:
    with pytest.raises(BeyondGrammar, match=told):
        read(text)
