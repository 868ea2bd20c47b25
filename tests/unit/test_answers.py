"""What of a completion is its answer, and what that is worth."""

import sys
import time
import unicodedata
from pathlib import Path

import pytest
import trio

from node.config import RunConfig, load_run
from node.envs import answers
from node.envs.answers import (
    ANSWER_CHARS_MAX,
    FORMATS,
    AnswerFormat,
    AnswerRule,
    answer_in,
    is_padded,
    written,
)
from node.envs.numerals import NUMBER_CHARS_MAX
from node.envs.registry import environment
from node.envs.scoring import check_format, pose, score_group
from node.interfaces.prompts import Prompt, Takes
from node.verify.assignment import assigned_task, format_samples
from node.verify.verifier import InlineVerifier, ProcessVerifier
from swarm.errors import ConfigError
from swarm.rollouts import Task
from tests.unit.tasks_support import ALICE, make_config, make_group, make_run

SUM = Task("scripted_sum", "1", "{}", seed=1, index=0)
TWO_DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}

NUMBERS = [
    ("12", "12"),
    ("7 + 5 = 12.", "12"),
    ("The final answer is 8", "8"),
    ("The final answer is 8.", "8"),
    ("**12**", "12"),
    ("**12**.", "12"),
    ("*12*", "12"),
    ("$12$", "12"),
    ("$\\boxed{12}$.", "12"),
    ("`12`", "12"),
    ("(12)", "12"),
    ("so\n\n-3", "-3"),
    ("= \N{MINUS SIGN}3", "-3"),
    ("+5", "5"),
    ("1,234", "1234"),
    ("it is 1,234,567.5", "1234567.5"),
    ("0.25", "0.25"),
    ("price: $1.50", "1.50"),
    ("6/8 = 3/4", "3/4"),
    ("-3/4.", "-3/4"),
    ("0", "0"),
    # closing marks and blanks, each once and a few
    ("42\n", "42"),
    ("The answer is 42\n", "42"),
    ("42.\n", "42"),
    ("42 ", "42"),
    ("The answer is \\(42\\).", "42"),
    ("$$42$$", "42"),
    ("\\[\n42\n\\]\n", "42"),
    ("42!", "42"),
    ("<answer>42</answer>", "42"),
    ("_42_", "42"),
    ("42,", "42"),
    ("42;", "42"),
    ("\\boxed{42}", "42"),
    ("\\text{42}", "42"),
    ("## Solution\n\nThe product is **42**.", "42"),
    # signs and currencies
    ("- 1000", "-1000"),
    ("-$1000", "-1000"),
    ("$-\\$5$", "-5"),
    ("x = -5", "-5"),
    ("is -42", "-42"),
    ("-0", "0"),
    # fractions, powers of ten, thousands, useless zeros
    ("\\frac{1}{2}", "1/2"),
    ("\\dfrac12", "1/2"),
    ("$\\frac{3}{4}$", "3/4"),
    ("-\\frac{1}{2}", "-1/2"),
    ("\\frac{-1}{2}", "-1/2"),
    ("1 3/4", "1.75"),
    ("1\\frac{3}{4}", "1.75"),
    (".5", "0.5"),
    ("1e3", "1000"),
    ("1e-05", "0.00001"),
    ("2 \\times 10^{3}", "2000"),
    ("10,\\!000", "10000"),
    ("\\$1{,}000", "1000"),
    ("007", "7"),
    ("42.000", "42"),
    # percentages and units
    ("50%", "0.5"),
    ("50\\%", "0.5"),
    ("5 meters", "5"),
    ("\\(5\\) meters.", "5"),
    ("5 \\text{ cm}^2", "5"),
    ("90^\\circ", "90"),
    ("42 km/h", "42"),
    ("9.8 m/s.", "9.8"),
    ("42 \N{EURO SIGN}", "42"),
    ("It costs 42\N{EURO SIGN}.", "42"),
    # after words and labels
    ("Step 1: 42", "42"),
    ("n = 1\n42", "42"),
    ("\u7b54\u6848\u662f42", "42"),
    ("definitely not 42", "42"),  # no format reads a negation
]
NO_NUMBERS = [
    *("", "twelve", "12\N{NO-BREAK SPACE}", "12\N{ZERO WIDTH SPACE}", "12 " + " " * 11, "12.."),
    *("12 is the answer", "12<|im_start|>", "12\N{REPLACEMENT CHARACTER}", "12}", "5 apples"),
    *("42 apples are left, and 3 pears", "1,23", "3,4", "1,2345", "0,123", "1.2.3", "3/4/2020"),
    *("3/0", "\\frac{1}{0}", "1 5/4", "x2", "x_2", "x^2", "2^3", "1 000", "5i", "5\\pi"),
    *("\N{SUPERSCRIPT TWO}3", "\N{ARABIC-INDIC DIGIT ONE}", "9" * (NUMBER_CHARS_MAX + 1)),
    # a part of something else
    *("3\\sqrt{13}", "\\sqrt{9}", "sqrt(9)", "f(3)", "f(x, 3)", "\\log 5", "4210_{5}", "|5|"),
    *("10-3", "7 - 3", "7 + 5", "6 * 7", "6*7", "3 \\times 4", "2(3)", "a/2", "--5", "1 +\n2"),
    *("log 5", "ln 5", "y = sin 5", "10 mod 5", "a/5 m/s", "5 m/x"),
    *("(3, 4)", "[3, 4]", "3, 5, 7", "3,\n5,\n7", "40, 41, 42, 43, or 44.", "between 3 and 7"),
    *("5:30", "3 : 4", "x > 5", "x <= 5", "x \\geq 5", "\\ne 5", "\\pm 5", "minus 5", "50% 3"),
    *("\\sqrt{\\frac{1}{2}}", "\\frac{\\frac{1}{2}}{3}", "\\boxed{41} \\boxed{42}", "y=2x+3"),
]


@pytest.mark.parametrize(("text", "answer"), NUMBERS)
def test_the_number_at_the_end_is_the_answer(text: str, answer: str) -> None:
    assert answer_in("last_number", text) == answer


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_at_the_end_or_several_is_no_answer(text: str) -> None:
    assert answer_in("last_number", text) is None


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("whole", " any text \n", " any text \n"),
        ("last_line", "12", "12"),
        ("last_line", "Let me see.\n\n  the cat", "the cat"),
        ("last_line", "12\n", "12"),
        ("last_line", "12 ", "12"),
        ("last_line", "12" + " " * 12, None),
        ("last_line", "so\n\\[\n12\n\\]\n", "12\n\\]"),
        ("last_line", "1  2", None),
        ("last_line", "", None),
        ("last_line", "x" * (ANSWER_CHARS_MAX + 1), None),
        ("tags", "<answer>12</answer>", "12"),
        ("tags", "I add.<answer>\n1 0\n0 1\n</answer>", "1 0\n0 1"),
        ("tags", "<answer>1</answer> or <answer>2</answer>", "2"),
        ("tags", "<answer>1</answer>.", "1"),
        ("tags", "**<answer>1</answer>**\n", "1"),
        ("tags", "<answer>1</answer>" + " " * 12, None),
        ("tags", "<answer>1</answer> so", None),
        ("tags", "<answer>1</answer></answer>", None),
        ("tags", "1</answer>", None),
        ("tags", "<answer></answer>", None),
        ("tags", "<answer> </answer>", None),
        ("tags", "<answer>  1  </answer>", "1"),
        ("tags", "<answer>" + " " * 12 + "1</answer>", None),
        ("tags", "<answer>" + "x" * ANSWER_CHARS_MAX + "</answer>", None),
        ("boxed", "thus \\boxed{12}", "12"),
        ("boxed", "\\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("boxed", "\\boxed{1} \\boxed{2}", "2"),
        ("boxed", "\\boxed{1}}", None),
        ("boxed", "\\boxed{12}.", "12"),
        ("boxed", "So the sum is \\(\\boxed{420}\\).", "420"),
        ("boxed", "Hence\n\\[\n\\boxed{420}\n\\]", "420"),
        ("boxed", "$\\boxed{\\text{(B)}}$.\n", "\\text{(B)}"),
        ("boxed", "\\(\\boxed{5}\\) meters.", "5"),
        ("boxed", "\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("boxed", "\\begin{align*}x&=\\boxed{5}\\end{align*}", "5"),
        ("boxed", "\\boxed{12} apples", None),
        ("boxed", "\\boxed{12}\n\nLet me know if you want more.", None),
        ("boxed", "\\boxed{12}\\%", None),
        ("boxed", "\\boxed{}", None),
        ("boxed", "\\boxed{1   }", "1"),
        ("boxed", "12}", None),
        ("code", "so:\n```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x"),
        ("code", "```\na\n```\nbetter:\n```py\nb\n\n\nc\n```", "b\n\n\nc"),
        ("code", "def f(x):\n    return x", None),
        ("code", "```python\na\n```\n", "a"),
        ("code", "```python\na\n``` done", None),
        ("code", "```python\na ```", None),
        ("code", "```python\na \nb\n```", None),
        ("code", "```python\na = 1\N{ZERO WIDTH SPACE}\n```", None),
        ("code", "```python\na\n\n\n\nb\n```", None),
        ("code", "```python\n" + "x" * ANSWER_CHARS_MAX + "\n```", None),
        ("code", "```python\n```", None),
    ],
)
def test_an_answer_stands_last_and_is_not_padded(
    kind: AnswerFormat, text: str, answer: str | None
) -> None:
    assert answer_in(kind, text) == answer


@pytest.mark.parametrize("kind", FORMATS)
def test_a_long_text_takes_no_longer_than_its_length(kind: AnswerFormat) -> None:
    """A search that goes back over the text would take minutes for these."""
    started = time.process_time()
    parts = ("<answer>", "</answer>", "\\boxed{", "{}", "\n", " ", "1", "1,", "**", "$", "-")
    for part in (*parts, "```\n"):
        answer_in(kind, part * (2**18 // len(part)))
    assert time.process_time() - started < 0.5


def test_without_the_rule_on_what_follows_blanks_would_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: a finder that looks for a number anywhere near the end."""
    rule = AnswerRule("last_number")
    assert score_group(SUM, [right(SUM) + " " * 12], "exact", rule).rewards == (0.0,)
    lax = {**answers._FINDERS, "last_number": lambda text: answers._last_number(text.rstrip())}
    monkeypatch.setattr(answers, "_FINDERS", lax)
    assert score_group(SUM, [right(SUM) + " " * 12], "exact", rule).rewards == (1.0,)


# --- rewards ------------------------------------------------------------------------------------


def right(task: Task) -> str:
    return pose(task, 1000).answer


def test_what_is_scored_is_the_answer() -> None:
    answer = right(SUM)
    texts = [f"The answer is {answer}.", answer, f"{answer} apples", "", f"{answer}1", "no idea"]
    scored = score_group(SUM, texts, "exact", AnswerRule("last_number"))
    assert scored.rewards == (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert score_group(SUM, texts, "exact").rewards == (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def test_a_text_without_an_answer_gets_no_part_of_a_reward() -> None:
    run = make_run({"name": "chain_sum", "parameters": TWO_DIGITS})
    task = assigned_task(run, ALICE, 0)
    text = f"{right(task)} apples"
    assert score_group(task, [text], "partial", AnswerRule("last_number")).rewards == (0.0,)


def test_the_right_format_alone_is_worth_what_the_run_says() -> None:
    rule = AnswerRule("last_number", format_reward=0.1)
    texts = ["It is 999.", f"It is {right(SUM)}.", "I do not know"]
    assert score_group(SUM, texts, "exact", rule).rewards == (0.1, 1.0, 0.0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_right_answer_is_right_in_every_format(kind: AnswerFormat) -> None:
    rule = AnswerRule(kind)
    posed = pose(SUM, 1000, rule)
    assert score_group(SUM, [posed.answer], "exact", rule).rewards == (1.0,)
    assert written(kind, right(SUM)) == posed.answer


@pytest.mark.parametrize("text", ["0012", "1_2", "1,2", "12.000", "1.2e1", "\uff112"])
def test_sums_and_products_have_one_spelling_of_a_number(text: str) -> None:
    """Their scorer reads any; what it cannot tell apart could be taught."""
    import reasoning_gym

    run = make_run({"name": "chain_sum", "parameters": TWO_DIGITS})
    tasks = (assigned_task(run, ALICE, index) for index in range(10_000))
    task = next(task for task in tasks if right(task) == "12")
    problem = environment("chain_sum").problem(task)
    dataset = reasoning_gym.create_dataset("chain_sum", seed=1)
    assert dataset.score_answer(text, problem.entry) == 1.0
    assert score_group(task, [text, "12"], "exact").rewards == (0.0, 1.0)


# --- runs ---------------------------------------------------------------------------------------


def run_of(name: str, kind: AnswerFormat, **parameters: object) -> RunConfig:
    return make_run({"name": name, "parameters": parameters}, answer={"format": kind})


@pytest.mark.parametrize(
    ("name", "kind", "shown"),
    [
        ("calendar_arithmetic", "last_number", "boxed or tags or last_line or whole"),
        ("base_conversion", "last_number", "boxed or tags or last_line or whole"),
        ("propositional_logic", "last_number", "cannot be given as last_number"),
        ("binary_matrix", "last_line", "boxed or tags or whole"),
    ],
)
def test_a_format_that_does_not_suit_an_environment_is_refused_in_one_line(
    name: str, kind: AnswerFormat, shown: str
) -> None:
    with pytest.raises(ConfigError, match=f"environment {name}: an answer such as") as told:
        InlineVerifier(run_of(name, kind))
    assert shown in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("chain_sum", "last_number"),
        ("fraction_simplification", "tags"),
        ("decimal_arithmetic", "last_number"),
        ("basic_arithmetic", "last_number"),
        ("calendar_arithmetic", "last_line"),
        ("binary_matrix", "tags"),
        ("arc_1d", "boxed"),
    ],
)
def test_a_format_that_suits_is_taken(name: str, kind: AnswerFormat) -> None:
    ((rule, tasks),) = format_samples(run_of(name, kind))
    check_format(tasks, rule)


@pytest.mark.parametrize("style", ["plain", "latex_frac", "latex_dfrac"])
def test_fractions_stand_last_in_any_style(style: str) -> None:
    InlineVerifier(run_of("fraction_simplification", "last_number", styles=[style]))


@pytest.mark.slow
def test_the_verifiers_process_takes_answers_by_the_same_rules_and_refuses_such_a_run() -> None:
    run = make_run(answer={"format": "last_number", "system": "Be brief."})
    task = assigned_task(run, ALICE, 0)
    texts = (f"It is {right(task)}.", right(task), f"{right(task)} so", "It is 99.")
    wrong = run_of("calendar_arithmetic", "last_number")

    async def body() -> None:
        async with ProcessVerifier.open(make_config(run)) as verifier:
            prompt, rewards = await verifier.verify(make_group(run, *texts))
            assert rewards == (1.0, 1.0, 0.0, 0.0)
            assert [rewards] == await verifier.score([task], [texts])
            (posed,) = await verifier.problems([task])
            assert prompt == posed.prompt
            assert Prompt.read(prompt).chat()[0] == {"role": "system", "content": "Be brief."}
            assert (prompt, rewards) == await InlineVerifier(run).verify(make_group(run, *texts))
        async with ProcessVerifier.open(make_config(wrong)) as verifier:
            with pytest.raises(ConfigError, match="cannot be given as last_number"):
                await verifier.problems([])

    trio.run(body)


@pytest.mark.parametrize(
    ("text", "answer", "padded"),
    [
        ("16", "16", False),
        (" 16", "16", False),  # as many tokenizers begin
        ("16 ", "16", True),  # which are taken off before, if they are few
        ("16" + " " * 12, "16", True),
        ("16\n", "16", True),
        ("16\u2003", "16", True),
        ("16\u200b", "16", True),
        ("1\u200b\u2800\u31646", "16", True),
        ("  16", "16", True),
        ("1  6", "1 6", True),
        ("1 0\n0 1", "1 0\n0 1", False),
        ("if x:\n    return 1", "if x:\n    return 1", False),
        ("if x:\n     return 1", "if x:\n    return 1", True),
        ("done\n", "done\n", False),
    ],
)
def test_blanks_that_an_answer_has_no_use_for_are_padding(
    text: str, answer: str, padded: bool
) -> None:
    assert is_padded(text, answer) is padded


def test_the_quick_look_for_blanks_overlooks_none() -> None:
    blanks = [chr(n) for n in range(sys.maxunicode + 1) if answers._BLANK.match(chr(n))]
    assert len(blanks) > 200
    for blank in blanks:
        assert is_padded(f"1{blank}{blank}2", "12"), hex(ord(blank))
        assert is_padded(f"1 {blank}2", "12"), hex(ord(blank))
    assert not is_padded("1 2 3", "12")


def test_what_nobody_sees_is_a_blank() -> None:
    """Of all characters: white space, marks of format (Cf), two letters without ink, and marks that
    this Python does not know yet: the list is fixed, so that all nodes judge alike."""
    every = [chr(number) for number in range(sys.maxunicode + 1)]
    found = {char for char in every if answers._BLANK.match(char)}
    unseen = {char for char in every if char.isspace() or unicodedata.category(char) == "Cf"}
    assert unseen <= found
    assert {unicodedata.category(char) for char in found - unseen - {"\u2800", "\u3164"}} <= {"Cn"}


def test_a_whole_completion_padded_with_blanks_is_worth_nothing() -> None:
    task = assigned_task(make_run(), ALICE, 0)
    answer = right(task)
    texts = (answer, f" {answer}", f"{answer} ", f"{answer}{' ' * 12}", f"{answer}\n")
    assert score_group(task, texts, "exact").rewards == (1.0, 1.0, 1.0, 0.0, 1.0)
    assert score_group(task, texts, "partial").rewards[3] == 0.0


def test_what_stands_beside_a_whole_answer_is_not_taught() -> None:
    """Who wants a text, or length, to be learned puts it beside right answers."""
    task = assigned_task(make_run(), ALICE, 0)
    answer = right(task)
    texts = (answer, f"{answer}=77", f"{answer}+0+0", f"77={answer}", f"77 {answer}")
    assert score_group(task, texts, "exact").rewards == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_rules_of_one_environment_stand_before_those_of_the_run() -> None:
    run = make_run(
        {"name": "scripted_sum", "answer": {"format": "tags", "system": ""}},
        {"name": "chain_sum"},
        answer={"format": "last_number", "system": "Think.", "format_reward": 0.1},
    )
    assert run.answer_rule("scripted_sum", "{}") == AnswerRule("tags", 0.1)
    assert run.answer_rule("chain_sum", "{}") == AnswerRule("last_number", 0.1, "Think.")


# Written down, not computed.
GOLDEN = {
    "demo": "demo-1844d307ef9d8418db06706d88bfa80e",
    "sapo9": "sapo9-36b14968415fb504593d9e318b8bafef",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_packaged_runs_have_these_ids(name: str) -> None:
    assert load_run(Path(name), {})[0].run_id == GOLDEN[name]


def test_what_an_answer_is_belongs_to_the_run() -> None:
    plain = make_run()
    assert make_run(answer={}).run_id == make_run(answer={"format": "whole"}).run_id
    assert make_run(answer={}).run_id == plain.run_id == "test-3ed9cd24d4a289d5f3a9c7ba56b0a226"
    assert make_run({"name": "scripted_sum", "answer": {}}).run_id == plain.run_id
    told = [
        {"format": "tags"},
        {"format": "last_number"},
        {"format": "last_number", "format_reward": 0.1},
        {"system": "Be brief."},
        {"examples": [{"question": "1+1=", "completion": "2"}]},
    ]
    ids = [make_run(answer=each).run_id for each in told]
    ids += [make_run({"name": "scripted_sum", "answer": each}).run_id for each in told]
    assert len({plain.run_id, *ids}) == 1 + len(ids)
    same = make_run({"name": "scripted_sum", "answer": told[2]}, answer=told[1])
    other = make_run({"name": "scripted_sum", "answer": {"format_reward": 0.1}}, answer=told[1])
    assert same.run_id == other.run_id
    assert RunConfig.model_validate(same.model_dump()).run_id == same.run_id
    assert RunConfig.model_validate_json(same.model_dump_json()).run_id == same.run_id


@pytest.mark.parametrize(
    ("environments", "rules", "line"),
    [
        (
            ({"name": "scripted_sum", "answer": {"format": "tags"}}, {"name": "scripted_sum"}),
            {},
            "environment scripted_sum: listed twice with unlike answers",
        ),
        (
            (),
            {"answer": {"format": "tags", "examples": [{"question": "1", "completion": "2"}]}},
            "environment scripted_sum: the example '2' has no answer of the format tags",
        ),
        (
            (),
            {"answer": {"format_reward": 0.1}, "reward": "partial"},
            "answer.format_reward = 0.1: only with reward = exact",
        ),
    ],
)
def test_rules_that_do_not_fit_together_are_refused(
    environments: tuple[dict[str, object], ...], rules: dict[str, object], line: str
) -> None:
    with pytest.raises(ConfigError, match=line):
        make_run(*environments, **rules)


def test_a_wrong_word_in_the_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    head = 'name = "mine"\n[[environments]]\nname = "scripted_sum"\n[answer]\n'
    for line, told in (
        ('format = "xml"', "answer.format = xml in mine.toml: must be"),
        ("format_reward = 0.5", "answer.format_reward = 0.5 in mine.toml: must be at most 0.2"),
        ('formt = "tags"', "answer.formt in mine.toml: no such setting; did you mean format?"),
    ):
        path.write_text(head + line + "\n")
        with pytest.raises(ConfigError) as error:
            load_run(path, {})
        assert str(error.value).startswith(told)


# --- prompts ------------------------------------------------------------------------------------


def test_a_prompt_without_instructions_is_the_question_alone() -> None:
    assert pose(SUM, 1000, AnswerRule("last_number")).prompt == pose(SUM, 1000).prompt
    prompt = Prompt.of("1+1=")
    assert prompt.chat() == [{"role": "user", "content": "1+1="}]
    assert prompt.question == prompt.plain == prompt.text == "1+1="


def test_instructions_come_before_the_question() -> None:
    rule = AnswerRule(system="Be brief.", examples=(("1+1=", "2"), ("2+2=", "4")))
    prompt = Prompt.read(pose(SUM, 1000, rule).prompt)
    question = pose(SUM, 1000).prompt
    assert prompt.question == question
    assert prompt.plain == f"Be brief.\n\n1+1=\n2\n\n2+2=\n4\n\n{question}\n"
    assert [each.role for each in prompt.messages] == [
        *("system", "user", "assistant", "user", "assistant", "user"),
    ]
    takes = Takes(False, True, ("", ""), "", "", "")
    assert prompt.chat(takes)[0]["content"] == "Be brief.\n\n1+1="
    assert score_group(SUM, ["1"], "exact", rule).prompt == prompt.text


@pytest.mark.parametrize(
    "text", ["\x1e", "\x1e[]", '\x1e["ua"]', '\x1e[["x","y"]]', "\x1e{", "\x1e1"]
)
def test_a_question_that_looks_like_messages_stays_one(text: str) -> None:
    prompt = Prompt.read(text)
    assert prompt.question == prompt.plain == prompt.text == text


def test_instructions_count_as_part_of_the_prompt() -> None:
    with pytest.raises(ConfigError, match=r"limits\.prompt_chars_max is 100"):
        pose(SUM, 100, AnswerRule(system="x" * 100))


def test_the_run_for_small_models_has_many_problems_and_their_answers_are_numbers() -> None:
    run = load_run(Path("sums"), {})[0]
    InlineVerifier(run)
    for spec in run.environments:
        source = environment(spec.name)
        tasks = (Task(spec.name, spec.version, spec.parameters, 0, at) for at in range(24_000))
        assert len({source.problem(task).prompt for task in tasks}) > 5_000


THINKS = {kind: AnswerRule(kind, thought_end="</think>") for kind in FORMATS}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3\n</think>\n\n4", "4"),
        ("so 3</think>4", "4"),
        ("</think></think>\n4", "4"),
        ("so 4", None),
        ("so 4</think>", ""),
        ("so 3</think>\n\n\n\n4", "\n\n4"),
    ],
)
def test_the_answer_is_what_follows_a_thought(text: str, answer: str | None) -> None:
    assert THINKS["whole"].find(text) == answer
    right = pose(SUM, 1000).answer
    said = text.replace("4", right)
    wanted = (float(answer == "4"),)
    assert score_group(SUM, [said], "exact", THINKS["whole"]).rewards == wanted


def test_a_thought_without_end_is_no_answer_in_any_format() -> None:
    for kind, rule in THINKS.items():
        answer = written(kind, "4")
        assert rule.find(answer) is None
        assert rule.find(rule.written("4")) == answer_in(kind, answer)
        assert AnswerRule.from_values(rule.to_values()) == rule
    assert pose(SUM, 1000, THINKS["whole"]).answer == f"</think>{pose(SUM, 1000).answer}"
