"""Data sets as people have them: files, columns, values, and what is no item."""

import base64
import codecs
import datetime
import gzip
import io
import json
import os
import re
import sqlite3
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from node.cli import main
from node.commands.data import check_file
from node.config.load import load_run
from node.envs.data.dataset import DataRules, Reading, prompt_of, read_file, told_of
from node.envs.data.items import Item, Items, rows_of
from node.envs.data.shapes import text_of
from node.envs.data.worked import PromptRules, read_worked
from node.interfaces.prompts import Prompt, PromptMessage
from swarm.errors import ConfigError
from tests.support import script
from tests.unit.training_support import qwen_directory

ROOT = Path(__file__).parents[2]
ASKED = "What is 3 + 4?"


def chatting(directory: Path) -> Path:
    """A model with a chat template."""
    template = (
        "{# system #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    (qwen_directory(directory) / "chat_template.jinja").write_text(template)
    return directory


def write(folder: Path, rows: Any, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, **parameters: Any) -> Reading:
    reading = read_file(path, DataRules.of(parameters))
    again = reading.rules.content(rows_of(reading.content.data.splitlines(), "f"), "f")
    assert again.data == reading.content.data  # what travels is a file of the same items
    return reading


def items_of(reading: Reading) -> list[Item]:
    items = Items(reading.content.data)
    return [items.row(place) for place in range(len(items))]


def only_item(path: Path, **parameters: Any) -> Item:
    (item,) = items_of(read(path, **parameters))
    return item


SHAPES: list[tuple[str, dict[str, Any], str, str]] = [
    ("verl", {"data_source": "x", "prompt": [{"role": "user", "content": ASKED}],
              "reward_model": {"ground_truth": "7", "style": "rule"}}, ASKED, "7"),
    ("prime-rl", {"prompt": ASKED, "verification_info": '{"ground_truth": "7"}'}, ASKED, "7"),
    ("TRL", {"prompt": ASKED, "completion": [{"role": "assistant", "content": "7"}]}, ASKED, "7"),
    ("ShareGPT", {"conversations": [{"from": "human", "value": ASKED},
                                    {"from": "gpt", "value": "7"}]}, ASKED, "7"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": ASKED}]},
                           {"role": "assistant", "content": "7"}]}, ASKED, "7"),
    ("Alpaca", {"instruction": "Add.", "input": "3 and 4", "output": "7"}, "Add.\n\n3 and 4", "7"),
    ("Alpaca, no input", {"instruction": ASKED, "input": "", "output": "7"}, ASKED, "7"),
    ("blanks", {"question": ASKED, "answer": " 7\n"}, ASKED, "7"),
    ("GSM8K", {"question": ASKED, "answer": "It is 3 + 4 = 7.\n#### 7"}, ASKED, "7"),
    ("MATH", {"problem": ASKED, "solution": "So $\\boxed{\\frac{1}{2}}$."}, ASKED, "\\frac{1}{2}"),
    ("MATH-500", {"problem": ASKED, "solution": "It is 7.", "answer": "7"}, ASKED, "7"),
    ("SVAMP", {"Body": "3 and 4.", "Question": "Sum?", "Answer": 7.0}, "3 and 4.\n\nSum?", "7"),
    ("AIME", {"ID": "2024-I-1", "Problem": ASKED, "Answer": 204}, ASKED, "204"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "question", "answer"), [each[1:] for each in SHAPES],
                         ids=[each[0] for each in SHAPES])  # fmt: skip
def test_columns_are_found_by_shape(
    tmp_path: Path, row: dict[str, Any], question: str, answer: str
) -> None:
    path = write(tmp_path, [row])
    assert only_item(path) == {"question": question, "answer": answer}
    lines = list(check_file(str(path), {}))
    told = any("columns found by" in line for line in lines)  # shown,
    assert told or row.keys() == {"question", "answer"}
    table = lines[lines.index("[environments.parameters]") + 1 :]
    named = dict(line.split(" = ", 1) for line in table)
    chosen = {name: json.loads(named[name]) for name in ("question", "answer")}
    assert only_item(path, **chosen) == {"question": question, "answer": answer}  # and confirmed


def test_messages_keep_their_roles_and_earlier_turns(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": ASKED},
    ]
    item = only_item(write(tmp_path, [{"prompt": chat, "solution": "7"}]))
    assert item == {"question": chat, "answer": "7"}
    asked = Prompt.read(prompt_of(item))
    assert asked.messages == tuple(PromptMessage(each["role"], each["content"]) for each in chat)
    assert asked.below("Be long.", [("q", "a")]) == asked  # its own system message
    bare = Prompt(asked.messages[1:])
    roles = [each.role for each in bare.below("Be long.", [("q", "a")]).messages]
    assert roles == ["system", *["user", "assistant"] * 2, "user"]
    (worked,) = read_worked(
        write(tmp_path, [{"messages": [*chat, {"role": "assistant", "content": "7"}]}]),
        PromptRules(system="Be long."),
        print,
    )
    assert worked == (asked.text, "7")


BAD: list[tuple[Any, str]] = [
    ({"question": "q", "answer": None}, "its answer is null"),
    ({"question": None, "answer": "2"}, "its question is null"),
    ({"question": "q"}, "no column 'answer'"),
    ({"question": "q", "answer": {"text": "7"}}, "a record; name one of its fields, such as answe"),
    ({"question": "q", "answer": ["7", "8"]}, "a list; name one of its values, such as answer.0"),
    ({"question": {"text": "q"}, "answer": "7"}, "question is a record"),
    ({"question": ["q"], "answer": "7"}, "its chat is no list of messages"),
    ({"question": [], "answer": "7"}, "its chat is no list of messages"),
    ({"question": [{"role": "user", "content": [{"type": "image"}]}], "answer": "7"}, "type image"),
    ({"question": [{"role": "tool", "content": "7"}], "answer": "7"}, "turns of user and assistan"),
    ({"question": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
      "answer": "7"}, "does not end in a question"),
    ({"question": "q", "answer": float("nan")}, "of the type float, no text"),
    ({"question": "q", "answer": ""}, "an empty answer"),
    ({"question": "q", "answer": "so \\boxed{7"}, "not closed"),
    ({"question": "q", "answer": "It is clear.\nSo it is seven."}, "a worked solution without"),
]  # fmt: skip


def test_all_bad_rows_are_in_one_table_and_the_others_stay(tmp_path: Path) -> None:
    good = {"question": ASKED, "answer": 7}
    path = write(tmp_path, [good, *(row for row, _ in BAD), good])
    reading = read(path)
    assert items_of(reading) == [{"question": ASKED, "answer": "7"}] * 2
    assert len(reading.content.left_out) == len(BAD)
    for (_, told), found in zip(BAD, reading.content.left_out, strict=True):
        assert told in found.why, (told, found)
    assert [each.where for each in reading.content.left_out] == [
        f"rows.jsonl line {number}" for number in range(2, len(BAD) + 2)
    ]
    table = "\n".join(told_of(path, reading))
    assert f"left out: {len(BAD)} of {len(BAD) + 2} rows" in table
    assert "     2  its chat is no list of messages: line 8, line 9" in table


def test_values_of_tables_are_numbers_texts_or_bad_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    day = datetime.date(2024, 5, 1)
    values: list[tuple[Any, str | None]] = [
        (Decimal("42.00"), "42"), (Decimal("0.50"), "0.5"), (7.0, "7"), (1e22, "1" + "0" * 22),
        (1e-05, "0.00001"), (5, "5"), (True, "true"), (day, None), (b"7", None),
        (datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC), None), (datetime.timedelta(1), None),
        (float("inf"), None), ({"a": 1}, None), ([1], None), (None, None),
    ]  # fmt: skip
    for number, (value, told) in enumerate(values):
        path = tmp_path / f"{number}.parquet"
        rows = [{"question": "q", "answer": value, "at": day, "raw": b"\xff"}]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        if told is None:
            with pytest.raises(ConfigError, match="none of its 1 rows is an item") as refused:
                read(path)
            assert "\n" not in str(refused.value)
        else:
            assert only_item(path) == {"question": "q", "answer": told}
    far = pyarrow.array([1, 2**61], pyarrow.duration("s"))
    odd = pyarrow.table({"question": ["q", "r"], "answer": far})
    parquet.write_table(odd, tmp_path / "odd.parquet")
    with pytest.raises(ConfigError, match="none of its 2 rows is an item") as refused:
        read(tmp_path / "odd.parquet")  # Python has no such duration
    assert "\n" not in str(refused.value)


FILES: dict[str, bytes] = {
    "plain.jsonl": b'{"question": "q", "answer": "\xc3\xa9"}\n',
    "list.json": b' [{"question": "q", "answer": "\xc3\xa9"}]',
    "list.jsonl": b'[\n {"question": "q", "answer": "\xc3\xa9"}\n]\n',
    "lines.json": b'{"question": "q", "answer": "\xc3\xa9"}\n',
    "pretty.json": b'{"data": [{\n"question": "q",\n"answer": "\xc3\xa9"}], "version": 1}',
    "columns.json": b'{"question": ["q"], "answer": ["\xc3\xa9"]}',
    "comma.csv": b'id,question,answer\r\n1,q,"\xc3\xa9"\r\n',
    "semicolon.csv": b"question;answer\nq;\xc3\xa9\n",
    "tabs.tsv": b"question\tanswer\nq\t\xc3\xa9\n",
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_the_same_items(tmp_path: Path, name: str) -> None:
    text = FILES[name].decode()
    plain = tmp_path / name
    plain.write_bytes(FILES[name])
    wanted = read(plain).content.data
    assert wanted == b'{"answer":"\xc3\xa9","question":"q"}\n'
    crlf = text.replace("\r\n", "\n").replace("\n", "\r\n").encode()
    others = {
        "bom": codecs.BOM_UTF8 + FILES[name],
        "le": codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
        "be": codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        "bare-le": text.encode("utf-16-le"),
        "bare-be": text.encode("utf-16-be"),
        "crlf": crlf,
    }
    for kind, content in others.items():
        (tmp_path / f"{kind}-{name}").write_bytes(content)
        assert read(tmp_path / f"{kind}-{name}").content.data == wanted, kind
        (tmp_path / f"{kind}-{name}.gz").write_bytes(gzip.compress(content))
        assert read(tmp_path / f"{kind}-{name}.gz").content.data == wanted, kind


def test_cells_of_a_sheet_may_hold_line_ends_and_bad_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "sheet.csv"
    path.write_bytes(b'question,answer\n"a,\nb",7\nc\nd,8,9\n"e"x,1\nf,2\n"g,3\nh,4\n')
    reading = read(path)
    assert items_of(reading) == [
        {"question": "a,\nb", "answer": "7"},
        {"question": "f", "answer": "2"},
    ]
    told = [(each.where[-5:], each.why[:9]) for each in reading.content.left_out]
    assert told == [
        ("row 2", "1 cells, "),
        ("row 3", "3 cells, "),
        ("row 4", "not CSV: "),
        ("row 6", "not CSV: "),
    ]


def zipped(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # a workbook is one, too
        archive.writestr("rows", content)
    return packed.getvalue()


def sqlite() -> bytes:
    base = sqlite3.connect(":memory:")
    base.execute("create table rows (question, answer)")
    return base.serialize()


DAMAGED: dict[str, tuple[bytes, str]] = {
    "cut.jsonl.gz": (gzip.compress(FILES["plain.jsonl"] * 99)[:-9], "end early"),
    "cut.json": (b'[{"question": "q", "answer": "7"}, {"quest', "not JSON"),
    "none.jsonl": (b"q,a\n1,2\n", "none of its"),
    "picture.jsonl": (base64.b64decode("iVBORw0KGgoAAAANSUhEUg=="), "no text; unpack it"),
    "book.csv": (zipped(FILES["comma.csv"]), "no text; unpack it"),
    "packed.json.gz": (gzip.compress(zipped(FILES["list.json"])), "no text; unpack it"),
    "table.jsonl": (sqlite(), "no text; unpack it"),
    "half.csv": (codecs.BOM_UTF16_LE + b"q\0u", "no text in UTF-8"),
    "twice.csv": (b"answer,answer\n1,2\n", "two columns of one name"),
    "splits.json": (b'{"train": [], "test": []}', "several splits"),
    "other.jsonl": (b'{"text": "q", "lang": "en"}\n', "among text, lang; name them"),
    "false.parquet": (b"PAR1nothing", "write it again"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str) -> None:
    content, told = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path / name)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_byte_that_is_no_text_spoils_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(FILES["plain.jsonl"] + b'{"question": "q", "answer": "\xe9"}\n')
    reading = read(path)
    assert reading.content.items == 1
    assert reading.content.left_out[0].where == "latin.jsonl line 2"


def test_a_folder_of_several_splits_is_not_one_set(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path, [{"question": "q", "answer": "7"}], f"{split}-00000-of-00001.jsonl")
    with pytest.raises(ConfigError, match=r"several splits; name one file, such as test-00000"):
        read(tmp_path)
    (tmp_path / "test-00000-of-00001.jsonl").rename(tmp_path / "train-00001-of-00001.jsonl")
    assert read(tmp_path).content.items == 2


def test_an_odd_answer_does_not_refuse_its_file(tmp_path: Path) -> None:
    rows = [{"question": str(n), "answer": gold} for n, gold in enumerate(["7", "seven", "8"])]
    reading = read(write(tmp_path, rows), scorer="numeric")
    assert reading.content.items == 2
    assert reading.content.left_out[0].where == "rows.jsonl line 2"


def test_choices_are_shown_and_a_number_is_a_place(tmp_path: Path) -> None:
    row = {"question": "Sum?", "choices": ["5", "6", "7", "8"], "answer": 2}
    reading = read(write(tmp_path, [row]))  # as MMLU has it
    (item,) = items_of(reading)
    assert reading.rules.scorer == "choice"
    assert item["answer"] == "C"
    assert prompt_of(item) == "Sum?\nA. 5\nB. 6\nC. 7\nD. 8"
    arc = {"question": "Sum?", "choices": {"text": ["5", "7"], "label": ["1", "2"]}}
    item = only_item(write(tmp_path, [{**arc, "answerKey": "2"}]))
    assert (item["choices"], item["answer"]) == (["5", "7"], "B")
    both = [{"label": "A", "text": "5"}, {"label": "B", "text": "7"}]
    asked = {"question": {"stem": "Sum?", "choices": both}, "answerKey": "B"}  # CommonsenseQA
    item = only_item(write(tmp_path, [asked]))
    assert item == {"question": "Sum?", "choices": ["5", "7"], "answer": "B"}
    aqua = {"question": "Sum?", "options": ["A)5", "B)7"], "rationale": "3 + 4", "correct": "B"}
    assert only_item(write(tmp_path, [aqua])) == item
    path = tmp_path / "choices.csv"
    path.write_text('question,choices,answer\nSum?,"[""x"", ""y""]",y\n')
    assert only_item(path)["choices"] == ["x", "y"]
    reading = read(write(tmp_path, [row, {**row, "answer": 4}, {**row, "choices": ["5", None]}]))
    why = [each.why for each in reading.content.left_out]
    assert why == ["place 4 of 4 choices; places count from 0", "its choices is null, no text"]


def test_records_stand_for_their_json_in_a_schema_alone(tmp_path: Path) -> None:
    row = {"q": "A record?", "answer": {"a": 1}, "rule": {"type": "object"}}
    named = {"question": "q", "answer": "answer", "rule": "rule", "scorer": "json_schema"}
    item = only_item(write(tmp_path, [row]), **named)
    assert (item["answer"], item["rule"]) == ('{"a":1}', '{"type":"object"}')


def test_check_tells_contradictions_and_duplicates_over_blanks(tmp_path: Path) -> None:
    rows = [
        {"question": "a?", "answer": "1"},
        {"question": "a? ", "answer": "2"},
        {"question": "b  c?", "answer": "#### 3"},
        {"question": "b\nc?", "answer": 3},
    ]
    said = "\n".join(check_file(str(write(tmp_path, rows)), {}))
    assert "questions that come more than once, blanks apart: 2" in said
    assert "contradictions, questions with more than one answer: 1" in said
    assert "  'a?': '1' (rows.jsonl line 1), '2' (rows.jsonl line 2)" in said
    assert "answers: 1 after ####, 3 as it stands; the longest has 1 characters" in said


def test_the_examples_of_the_page_work_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = chatting(tmp_path / "model")
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.S)
    (row,) = [json.loads(text) for kind, text in blocks if kind == "json"]
    assert only_item(write(tmp_path, [row])) == row
    write(tmp_path, script("word_problems").word_problems(500), "items.jsonl")
    (run,) = [text for kind, text in blocks if kind == "toml"]
    (tmp_path / "mine.toml").write_text(run)
    spec = load_run(tmp_path / "mine.toml", {})[0].environments[0]
    sha256 = json.loads(spec.parameters)["sha256"]
    lines = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    checks = [line.split()[1:] for line in lines if line.startswith("swarm-node data check")]
    assert len(checks) == 2
    for words in checks:
        asked = [str(model) if word == "smollm2" else word for word in words]
        assert main(asked) == 0
        said = capsys.readouterr().out
        assert said.startswith("500 items, ")
        assert sha256 in said
    assert "tokens of prompts for model: " in said
    table = said[said.index("[[environments]]") :]
    (tmp_path / "printed.toml").write_text(f'name = "mine"\nheld_out = {{tasks = 60}}\n{table}')
    assert sha256 in load_run(tmp_path / "printed.toml", {})[0].environments[0].parameters


def test_a_question_too_long_for_the_model_is_named_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    long = {"question": "word " * 3000, "answer": "7"}
    path = write(tmp_path, [long, {"question": chat, "answer": "7"}])
    (tmp_path / "run.toml").write_text(
        'name = "mine"\nanswer = {system = "Think."}\n[[environments]]\nname = "chain_sum"\n'
    )
    model = str(chatting(tmp_path / "model"))
    words = ["data", "check", str(path), "--model", model, "--run", str(tmp_path / "run.toml")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"too long .*, left out by a node: 1 of 2 items: rows.jsonl line 1 \(15\d\d\d\)\n", said
    )
    assert "<system>Think.<user>word word" in said
    assert f"item 2: '<system>Be brief.<user>{ASKED}<assistant>' is answered by '7'" in said


def test_prompts_are_shown_with_the_runs_values_for_templates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, [{"question": ASKED, "answer": "7"}])
    (tmp_path / "run.toml").write_text(
        'name = "mine"\n[chat]\narguments = \'{"mood": "calm"}\'\n'
        '[[environments]]\nname = "chain_sum"\n'
    )
    model = chatting(tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text("{{ mood }};" + template.read_text())
    words = ["data", "check", str(path), "--model", str(model)]
    assert main([*words, "--run", str(tmp_path / "run.toml")]) == 0
    assert f"item 1: 'calm;<user>{ASKED}" in capsys.readouterr().out


LETTERED = {
    "letters": "question,A,B,C,D,answer\nSum?,5,6,7,8,C\nProduct?,1,2,3,4,D\n",
    "options": "question,option_a,option_b,option_c,answer\nSum?,5,6,7,c\n",
    "numbers": "question,choice1,choice2,choice3,choice4,label\nSum?,5,6,7,8,7\n",
    "fewer": "question,A,B,C,D,answer\nSum?,5,6,7,,C\n",
}


@pytest.mark.parametrize("name", LETTERED)
def test_a_column_for_each_choice_makes_choices(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(LETTERED[name])
    reading = read(path)
    first = items_of(reading)[0]
    assert (reading.rules.scorer, first["choices"][:3]) == ("choice", ["5", "6", "7"])
    assert reading.rules.judge.own_answer(first) == "C"


@pytest.mark.parametrize(
    "text",
    [
        "question,a,b,answer\nWhat is a + b?,5,6,11\n",  # numbers of a task
        "question,A,C,answer\nSum?,5,6,A\n",  # not in a row
        "question,A,answer\nSum?,5,A\n",  # one alone
    ],
)
def test_other_columns_of_one_letter_are_no_choices(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    assert read(path).columns.choices is None


def test_rows_with_choices_are_judged_by_the_scorer_that_is_told(tmp_path: Path) -> None:
    rows = [{"question": "Which?", "choices": ["3", "5"], "answer": a} for a in ("5", "9")]
    reading = read(write(tmp_path, rows))
    assert reading.rules.scorer == "choice"
    assert [reading.rules.judge.own_answer(item) for item in items_of(reading)] == ["B"]
    assert [each.where for each in reading.content.left_out] == ["rows.jsonl line 2"]
    assert reading.content.data == read(tmp_path / "rows.jsonl", scorer="choice").content.data


def test_numbers_of_any_size_keep_all_their_digits() -> None:
    long = "123456789012345678901234567890.12"
    values = [1e300, -0.0, 1e-7, Decimal(long), Decimal("1.50"), Decimal(10**50)]
    told = [text_of(value, "answer") for value in values]
    assert told == [f"1{'0' * 300}", "0", "0.0000001", long, "1.5", f"1{'0' * 50}"]
    with pytest.raises(ValueError, match="is a number of over"):
        text_of(Decimal("1e-1000000000"), "answer")


def test_short_floats_of_a_table_are_as_people_write_them(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {
        "question": ["a", "b"],
        "answer": pyarrow.array([0.1, None], pyarrow.float32()),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    assert only_item(tmp_path / "rows.parquet")["answer"] == "0.1"


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="no regular file; write its rows to one"):
        read(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"no \.jsonl or \.parquet file"):
        read(tmp_path)


def test_a_chat_that_is_written_as_text_is_no_question(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "7"}]
    rows: list[Any] = [
        {"prompt": json.dumps(chat[:1]), "answer": "7"},
        {"prompt": str(chat[:1]), "answer": "7"},
        {"prompt": "[1, 2] + [3] = ?", "answer": "7"},
    ]
    reading = read(write(tmp_path, rows))
    assert [each.where for each in reading.content.left_out] == [
        "rows.jsonl line 1",
        "rows.jsonl line 2",
    ]
    assert "write it as a list" in reading.content.left_out[0].why
    with pytest.raises(ConfigError, match="its chat is no list of messages"):
        read(write(tmp_path, [{"messages": json.dumps(chat)}], "chats.jsonl"))


@pytest.mark.parametrize(
    "damage", [b"\x1f\x8babc" * 50, gzip.compress(b"{}", mtime=0)[:-8] + bytes(8)]
)
def test_damaged_gzip_says_what_to_do(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"its data are damaged .*; pack it again"):
        read(tmp_path / "rows.jsonl.gz")
