"""Scorers by name: own answers pass, others do not, and no text or item costs more than it may."""

import json
import re
import time
from typing import Any

import pytest

from node.envs.answers import AnswerFormat, answer_in
from node.envs.data.dataset import SCORERS
from node.envs.data.items import Item
from node.envs.data.scorers import NAMES, ItemScorer, ScorerName
from swarm.errors import ConfigError

TEXT_CPU_S_MAX = 2.0  # four times what any scorer allows itself: the machine may be busy
SCHEMA = json.dumps(
    {
        "type": "object",
        "required": ["name", "age"],
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"minimum": 0}},
        "additionalProperties": False,
    }
)


def item(answer: str, **more: Any) -> Item:
    return {"question": "?", "answer": answer, **more}


def scorer(name: ScorerName, **settings: float | bool) -> ItemScorer:
    made = SCORERS[name](settings)
    made.prepare()
    return made


RIGHT_AND_WRONG: list[tuple[ScorerName, dict[str, Any], Item, list[str], list[str]]] = [
    ("exact", {}, item(" yes "), ["yes", " yes", "**yes**", "yes.", "Answer: yes", "`yes`\n"],
     ["Yes", "yes no", "", "y es", "not yes"]),
    ("exact", {}, item("f(x)!"), ["f(x)!", "$f(x)!$"], ["f(x)", "f(x"]),
    ("exact", {"ignore_case": True}, item("Straße"), ["straße", "STRASSE"], ["Strase"]),
    ("numeric", {}, item("so #### 1,200"), ["1200", "1,200", "1200.0", "1.2e3", "$1{,}200$"],
     ["12 00", "120", "1,2"]),
    ("numeric", {}, item("-0.5"), ["-0.5", "-1/2", "\N{MINUS SIGN}0.5", "-\\frac{1}{2}", "-50%"],
     ["0.5", "1/2", "--0.5"]),
    ("numeric", {}, item("7"), ["7", "007", "The answer is 7.", "x = 7", "7 meters", "\\text{7}"],
     ["7 apples", "so 7", "7%", "y < 7", "", "nan", "inf", "6 or 7", "\\sqrt{7}"]),
    ("numeric", {}, item("50%"), ["50%", "0.5", "1/2", "50\\%"], ["50", "5%"]),
    ("numeric", {"tolerance": 0.1}, item("3.1"), ["3", "3.2", "16/5"], ["2.99", "3.201", "1/0"]),
    ("numeric", {"relative_tolerance": 0.01}, item("-200"), ["-198", "-202"], ["-203", "200"]),
    ("choice", {}, item("B"), ["B", "(B)", "B.", "B)", "B:", "b", "**B**", "$B$", "\\boxed{B}",
     "Answer: B", "The correct option is B.", "\\text{(B)}"],
     ["A", "BB", "B or C", "(", "A, B, C, or D", "not B", "B. Paris"]),
    ("choice", {}, item("2", choices=["x", "y", "z"]), ["C", "z", "c. z", "(C) z"],
     ["2", "D", "A", "y", "C. y", "A. z"]),
    ("choice", {}, item("y", choices=["x", "y", "z"]), ["B", "y"], ["A", "x"]),
    ("choice", {}, item("3", choices=["3", "5", "2", "8"]), ["3", "A", "A. 3"], ["D", "8", "D. 3"]),
    ("choice", {}, item("b", choices=["Rome", "Paris"]),
     ["B. Paris", "paris", "**Paris**", "B", "**B.** Paris", "Option B", "(B): Paris", "[B]",
      "The correct option is (B) Paris.", "B - Paris", "\\boxed{\\text{(B) Paris}}"],
     ["B. Rome", "Rome", "A", "Pari"]),
    ("math", {}, item("\\frac{1}{2}"), ["1/2", "0.5", "\\frac12", "$0.50$"], ["2", "0.49", "1/2x"]),
    ("math", {}, item("so \\boxed{x^{2}+2x+1}"), ["(x+1)^2", "1+2x+x^2"], ["(x-1)^2", "x^2"]),
    ("math", {}, item("#### \\sqrt{8}"), ["2\\sqrt{2}"], ["2", "\\sqrt{7}"]),
    ("math", {}, item("(1, 2)"), ["(1,2)"], ["(2,1)", "1"]),
    ("regex", {}, item("ab12", rule="[a-z]+[0-9]{2}"), ["x99"], ["x9", "x99 ", "x999", "X99"][:1]),
    ("json_schema", {}, item('{"name": "a", "age": 1}', rule=SCHEMA),
     ['{"age": 0, "name": ""}'], ['{"age": -1, "name": ""}', "{}", "[]", "NaN", '{"age": 1}',
     '{"age": 1, "name": "a", "name": "b"}', '{"age": 1, "name": "a", "x": 1}', "not json"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "asked", "right", "wrong"), RIGHT_AND_WRONG)
def test_right_texts_score_and_wrong_ones_do_not(
    name: ScorerName, settings: dict[str, Any], asked: Item, right: list[str], wrong: list[str]
) -> None:
    judge = scorer(name, **settings)
    assert judge.score(asked, judge.own_answer(asked)) == 1.0
    assert [judge.score(asked, text) for text in right] == [1.0] * len(right)
    assert [judge.score(asked, text) for text in wrong] == [0.0] * len(wrong)


# How models end, by format: the text is found and scored.
ENDS: list[tuple[ScorerName, AnswerFormat, str, str, float]] = [
    ("math", "boxed", "420", "So the sum is \\(\\boxed{420}\\).", 1.0),
    ("math", "boxed", "420", "Hence\n\\[\n\\boxed{420}\n\\]", 1.0),
    ("math", "boxed", "420", "\\[ \\boxed{420} \\].\n", 1.0),
    ("math", "boxed", "420", "$\\boxed{420}$.", 1.0),
    ("math", "boxed", "420", "**\\(\\boxed{420}\\)**", 1.0),
    ("math", "boxed", "420", "\\(\\boxed{420}\\) square meters.", 1.0),
    ("math", "boxed", "420", "\\boxed{420\\text{ meters}}", 1.0),
    ("math", "boxed", "420", "\\boxed{\\$420}", 1.0),
    ("math", "boxed", "420", "\\boxed{x=420}", 1.0),
    ("math", "boxed", "420", "\\boxed{420\\%}", 0.0),
    ("math", "boxed", "420", "\\boxed{420}\\%", 0.0),
    ("math", "boxed", "420", "\\boxed{420} and more", 0.0),
    ("math", "boxed", "42", "\\boxed{41} \\boxed{42} \\boxed{43}", 0.0),
    ("math", "tags", "1/2", "<answer>\\frac{1}{2}</answer>\n", 1.0),
    ("math", "last_line", "12", "Step one.\nSo the answer is 12.", 1.0),
    ("math", "last_line", "42", "The answer is definitely not 42.", 0.0),
    ("numeric", "tags", "42", "<answer> $42$. </answer>.", 1.0),
    ("numeric", "boxed", "14/3", "\\(\\boxed{\\frac{14}{3}}\\).", 1.0),
    ("numeric", "last_number", "18", "**Answer: $18.00**", 1.0),
    ("numeric", "last_number", "1000", "- 1000", 0.0),
    ("numeric", "last_number", "3", "1, 2, and 3", 0.0),
    ("numeric", "last_number", "5", "1.2e5", 0.0),
    ("numeric", "last_number", "2", "\\frac{x}{2}", 0.0),
    ("exact", "tags", "Paris", "<answer>Paris.</answer>\n", 1.0),
    ("exact", "last_line", "Paris", "The answer is **Paris**.\n", 1.0),
    ("exact", "boxed", "Paris", "$\\boxed{\\text{Paris}}$.", 1.0),
    ("exact", "whole", "Paris", "Paris.\n", 1.0),
    ("exact", "whole", "Paris", "Paris, or Rome.", 0.0),
    ("choice", "boxed", "B", "So it is \\(\\boxed{\\text{B}}\\).", 1.0),
    ("choice", "tags", "B", "<answer>(b)</answer>\n", 1.0),
    ("choice", "last_line", "B", "Let me see.\n**Final Answer: B**\n", 1.0),
]


@pytest.mark.parametrize(("name", "kind", "gold", "text", "worth"), ENDS)
def test_the_end_of_a_completion_is_read_alike_in_all_formats(
    name: ScorerName, kind: AnswerFormat, gold: str, text: str, worth: float
) -> None:
    found = answer_in(kind, text)
    assert (0.0 if found is None else scorer(name).score(item(gold), found)) == worth


def test_every_scorer_is_tried() -> None:
    assert {name for name, *_ in RIGHT_AND_WRONG} == set(NAMES) == set(SCORERS)


NOT_ITEMS: list[tuple[ScorerName, Item, str]] = [
    ("exact", item(" "), "empty"),
    ("numeric", item("seven"), "without a number"),
    ("numeric", item("1/0"), "without a number"),
    ("choice", item("AB"), "none of the choices"),
    ("choice", item("3", choices=["x", "y", "z"]), "none of the choices"),
    ("choice", item("x", choices=["x", "X"]), "the text of two choices"),
    ("choice", item("1", choices=["b", "a"]), "another choice's letter"),
    ("numeric", item("5 apples"), "without a number"),
    ("numeric", item("5 meters"), "without a number"),
    ("numeric", item("12:30"), "without a number"),
    ("numeric", item("\\text{Evelyn}"), "without a number"),
    ("math", item("\\int_0^1 x"), "does not read (the command \\int)"),
    ("math", item("9^{9^{9}}"), "a number of over 8192 bits"),
    ("math", item(""), "empty"),
    ("regex", item("a", rule="(a"), "RE2 does not take"),
    ("regex", item("a", rule="(a)\\1"), "RE2 does not take"),
    ("regex", item("a", rule="(((a{100}){100}){100})"), "RE2 does not take"),
    ("regex", item("a", rule="[\\pL]{900}"), "RE2 does not take"),
    ("regex", item("b", rule="a"), "does not match"),
    ("json_schema", item("1", rule="{"), "no JSON"),
    ("json_schema", item("1", rule='{"$ref": "http://192.0.2.1/s"}'), "$ref"),
    ("json_schema", item('"a"', rule='{"pattern": "(a*)*b"}'), "pattern"),
    ("json_schema", item("{}", rule='{"patternProperties": {"(a*)*b": true}}'), "patternProp"),
    ("json_schema", item("1", rule='{"anyOf": [{"items": {"format": "regex"}}]}'), "format"),
    ("json_schema", item("1", rule='{"type": 1}'), "a schema that is none"),
    ("json_schema", item("1", rule='{"type": "string"}'), "does not fit"),
    ("json_schema", item("1", rule="[" * 9_000), "nested"),
    ("json_schema", item("1", rule='["' + "]" * 900 + '", ' + "[" * 900), "nested"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "wrong", "told"), NOT_ITEMS)
def test_what_is_no_item_is_told(name: ScorerName, wrong: Item, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as refused:
        scorer(name).own_answer(wrong)
    assert len(str(refused.value)) < 150


# --- hostile texts ----------------------------------------------------------------------------

HOSTILE_TEXTS: list[str] = [
    "",
    "\0",
    "9" * 65_536,
    "1/" * 30_000,
    "(" * 65_536,
    "[" * 8_000,
    '{"a":' * 1_600,
    '[{"a":[1]}]' * 700,
    "[" + "1," * 4_000 + "1]",
    "a" * 65_536,
    "a" * 4_096,
    "ab" * 2_048 + "!",
    "\\frac{1}{" * 60,
    "\\sqrt{" * 30,
    "9^{9^{9^{9}}}",
    "9^{99999999}",
    "(a+b+c+d)^{12}",
    "(a+b)^{12}(c+d)^{12}",
    "\\sin(a+b+c+d)\\cos(a-b-c-d)\\tan(a+b)",
    "1/2/2/2/2/2/2/2/2",
    "\\frac{1}{a+b+\\frac{1}{a+c+\\frac{1}{b+d+\\frac{1}{a+b}}}}",
    "xyzw" * 40,
    "|x|+|y|+|z|+|x+y|+|x-y|+|z-x|",
    "\\text{__import__('os').system('true')}",
    "__import__('os').system('true')",
    "1000000000000000003000000000000077!",
    "\\sqrt{10000000000000000000000000000777}",
    "\U0001d7d9" * 1_000,
    "٣",
]
HOSTILE_ITEMS: dict[ScorerName, list[Item]] = {
    "exact": [item("a" * 60_000)],
    "numeric": [item("9" * 40), item("1/3")],
    "choice": [item("A"), item("1", choices=["x"] * 26)],
    "math": [item("1"), item("\\sin(x)"), item("\\frac{a+b}{c+d}"), item("x>3"), item("\\{1,2\\}")],
    "regex": [
        item("", rule="(a*)*b"),
        item("", rule="(a|aa|aaa)+$"),
        item("", rule="(.*)(.*)(.*)(.*)(.*)x"),
        item("", rule="(?i)(a?){200}a{200}"),
    ],
    "json_schema": [
        item("1", rule=json.dumps({"items": {"anyOf": [{"minimum": n} for n in range(900)]}})),
        item("1", rule=json.dumps({"allOf": [{"contains": {"const": n}} for n in range(300)]})),
        item("1", rule=json.dumps({"enum": [[n] * 9 for n in range(200)]})),
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_no_hostile_text_costs_more_than_it_may(name: ScorerName) -> None:
    judge = scorer(name)
    for asked in HOSTILE_ITEMS[name]:
        for text in HOSTILE_TEXTS:
            began = time.process_time()
            try:
                reward = judge.score(asked, text)
            except Exception:  # noqa: BLE001 - as `scoring.score_group` does, which counts it
                reward = 0.0
            assert 0.0 <= reward <= 1.0
            assert time.process_time() - began < TEXT_CPU_S_MAX, (asked, text[:60])


@pytest.mark.parametrize(
    ("name", "package"),
    [("math", "mpmath"), ("regex", "google-re2"), ("json_schema", "jsonschema")],
)
def test_what_is_not_installed_is_told_by_name(
    name: ScorerName, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    def none(wanted: str) -> str:
        raise metadata.PackageNotFoundError(wanted)

    monkeypatch.setattr("node.envs.data.scorers.version", none)
    with pytest.raises(ConfigError, match=rf"takes {package}.*: .*install '{package}"):
        SCORERS[name]({})
