"""swarm-coordinator: what `plan` tells of a file, and what it says of a bad one."""

import json
import re
import socket
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.model.capacity import Form
from coordinator.plan import make_report, render_plan
from coordinator.plan_file import EXAMPLE, PlanFile, load_plan
from coordinator.tables import FILE_BYTES_MAX
from swarm.errors import ConfigError

SMALL = """
[run]
groups_per_step = 64
train_s = 100.0
staleness_max = 6
weights_bytes = 100_000_000
up_mbit_per_s = 1000

[[workers]]
name = "a"
count = 3
groups_per_s = 0.3
generation_s = 40.0
up_mbit_per_s = 100
down_mbit_per_s = 500
price_per_h = 1.0
"""


def plan(tmp_path: Path, text: str, *flags: str) -> int:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return main(["plan", "--file", str(path), *flags])


def plan_of(tmp_path: Path, text: str) -> PlanFile:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return load_plan(path)


def test_the_example_is_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--example"]) == 0
    text = capsys.readouterr().out
    assert text == EXAMPLE
    assert plan(tmp_path, text) == 0
    said = capsys.readouterr().out
    assert "Run 12 of 17 workers" in said
    assert "κ = S - 1 = 5 would waste samples" in said
    assert "use κ = 3" in said
    assert max(len(line) for line in said.splitlines()) <= 130


def test_json_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert plan(tmp_path, SMALL, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"]["names"] == ["a-1", "a-2", "a-3"]
    assert {row["form"] for row in told["forms"]} == {str(form) for form in Form}
    assert [row["runs"] for row in told["workers"]] == [True, True, True]
    assert told["feasible"]


def test_no_network_is_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(AssertionError, match="a socket"):
        socket.socket()
    assert plan(tmp_path, SMALL) == 0


def test_no_plan_says_why_and_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert plan(tmp_path, SMALL.replace("count = 3", "count = 2")) == 1
    said = capsys.readouterr().out
    assert "No plan (supply): all 2 workers together bring 0.6" in said
    assert re.search(r"- 1 more worker like \S+ would suffice, for \$\S+ an hour more", said)
    assert re.search(r"- groups_per_step = \d+ would suffice", said)
    assert plan(tmp_path, SMALL.replace("staleness_max = 6", "staleness_max = 1"), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"]["obstacle"] == "staleness"
    assert re.search(r"S = \d would suffice", " ".join(told["notes"]))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("train_s = 100.0", "", "run: train_s is missing"),
        ("train_s = 100.0", "train_s = -1", "run: train_s = -1: must be a number above 0"),
        ("train_s = 100.0", "train_s = nan", "run: train_s = nan: must be a number above 0"),
        ("train_s = 100.0", 'train_s = "1"', "run: train_s = 1: must be a number"),
        ("train_s = 100.0", "train_s = true", "run: train_s = True: must be a number"),
        ("groups_per_step = 64", "groups_per_step = 6.4", "must be a whole number"),
        ("train_s = 100.0", "trian_s = 1", "run: trian_s: no such setting; did you mean train_s?"),
        ("count = 3", "count = 0", "workers 1: count = 0: must be a whole number above 0"),
        ("count = 3", "count = 513", "all workers together at most 512"),
        ("[run]", "[runs]", "runs: no such setting; did you mean run?"),
        ("down_mbit_per_s = 500", "down_mbit_per_s = 0", "workers 1: down_mbit_per_s = 0: must be"),
        ('name = "a"', 'name = ""', "workers 1: name: must not be empty"),
        ("[[workers]]", "[workers]", "must be a list of tables"),
        ("[run]", "[run", "no TOML"),
        ("[run]\n", "[settings]\nmargin = 0.5\n[run]\n", "settings: margin = 0.5: must be from 1"),
        ("[run]\n", "[run]\ndelta_bytes = [1, 2]\n", "must be a list of [steps, bytes]"),
        ("[run]\n", "[run]\ndelta_bytes = [[2, 9], [1, 9]]\n", "does not rise"),
        ("train_s = 100.0", "train_s = 1979-05-27", "train_s = 1979-05-27: must be a number"),
        ("up_mbit_per_s = 100\n", "up_mbit_per_s = inf\n", "workers 1: up_mbit_per_s = inf: must"),
        ("[run]\n", f"x = {'[' * 290}{']' * 290}\n[run]\n", "too deeply nested"),
        ("count = 3", "relayed = 1", "relayed = 1: must be true or false"),
    ],
)
def test_a_bad_file_is_one_line(
    old: str, new: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert old in SMALL
    assert plan(tmp_path, SMALL.replace(old, new)) == 2
    error = capsys.readouterr().err
    assert error.startswith("swarm-coordinator: ")
    assert said in error
    assert error.count("\n") == 1


def test_two_workers_of_one_name_are_refused(tmp_path: Path) -> None:
    twice = SMALL + SMALL[SMALL.index("[[workers]]") :]
    with pytest.raises(ConfigError, match="name = a-1: two workers have it"):
        plan_of(tmp_path, twice)


def test_files_that_cannot_be_read_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "--file", str(tmp_path / "none.toml")]) == 2
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert main(["plan", "--file", str(tmp_path / "bytes.toml")]) == 2
    (tmp_path / "large.toml").write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    assert main(["plan", "--file", str(tmp_path / "large.toml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(
        words in line for words, line in zip(("No such", "UTF-8", "bytes"), lines, strict=True)
    )


def test_a_worker_that_stands_by_says_why(tmp_path: Path) -> None:
    file = plan_of(
        tmp_path,
        SMALL
        + """
[[workers]]
name = "modem"
groups_per_s = 0.3
generation_s = 40.0
up_mbit_per_s = 1
down_mbit_per_s = 1
price_per_h = 0.0
""",
    )
    report = make_report(file)
    modem = next(each for each in report["workers"] if each["name"] == "modem")
    assert not modem["runs"]
    assert "with it: " in modem["why"]
    assert "modem" in render_plan(report)


@pytest.mark.parametrize("arguments", [[], ["plan"], ["plan", "--file", "x", "--example"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "said"), [("--version", "swarm-coordinator "), ("--help", "usage")]
)
def test_flags(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert said in capsys.readouterr().out
