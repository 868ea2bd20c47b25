"""What is kept of rollouts for people, and how strangers' texts are shown."""

import json
from pathlib import Path

import pytest

from node.cli import main
from node.envs.scoring import pose
from node.interfaces.prompts import Prompt
from node.observe.records import AnswerCounts, SampledGroup, SampledText
from node.observe.samples import (
    FILE_NAME,
    GROUPS_MAX,
    SHOWN_CHARS_MAX,
    TEXT_CHARS_MAX,
    TEXTS_MAX,
    bounded,
    keep,
    read_samples,
    render_samples,
    sample_log,
    shortened,
)
from node.run.groups import outcome_counts, sampled
from node.verify.assignment import assigned_task
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason
from swarm.texts import printable
from tests.scored_groups import of_completions
from tests.unit.tasks_support import ALICE, BOB, make_run

EVIL = "\x1b[31m\x1b]0;title\x07 \u202e\u200b\r\n\x9b2J [red]<b>&"


def clock() -> float:
    return 5.0


def group(number: int, *rewards: float, own: bool = True, text: str = "It is 8.") -> SampledGroup:
    texts = tuple(SampledText(text, "8", reward, "stop") for reward in rewards)
    return SampledGroup(number, own, str(ALICE if own else BOB), "chain_sum", "3 + 5 =", texts)


def kept(tmp_path: Path, *groups: SampledGroup) -> Path:
    with sample_log(tmp_path, clock) as log:
        keep(log, groups)
    return tmp_path


def test_the_newest_the_best_and_the_worst(tmp_path: Path) -> None:
    kept(tmp_path, group(1, 0.0, 1.0), group(2, 0.5), group(3, 0.1, own=False))

    def rewards(**which: object) -> list[float]:
        wanted = {"own": True, "order": "newest", "count": 9, **which}
        return [each.text.reward for each in read_samples(tmp_path, **wanted)]  # type: ignore[arg-type]

    assert rewards() == [0.5, 1.0, 0.0]
    assert rewards(count=1) == [0.5]
    assert rewards(order="best") == [1.0, 0.5, 0.0]
    assert rewards(order="worst", count=2) == [0.0, 0.5]
    assert rewards(own=False) == [0.1]


def test_a_learner_shows_what_its_workers_made(tmp_path: Path) -> None:
    kept(tmp_path, group(1, 0.2, own=False))
    assert [each.text.reward for each in read_samples(tmp_path, own=True, order="newest", count=1)]


def test_what_a_group_says_again_is_shown_once(tmp_path: Path) -> None:
    kept(tmp_path, group(1, 1.0, 1.0, 0.0), group(2, 1.0))
    found = read_samples(tmp_path, own=True, order="newest", count=9)
    assert [(each.group.round, each.text.reward, each.times) for each in found] == [
        (2, 1.0, 1),
        (1, 0.0, 1),
        (1, 1.0, 2),
    ]
    assert [", said 2 times" in part for part in render_samples(found).split("\n\n")] == [
        False,
        False,
        True,
    ]


def test_nothing_is_kept_of_a_node_that_never_ran(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no samples; name a node's"):
        read_samples(tmp_path, own=True, order="newest", count=1)
    assert main(["samples", "--data-dir", str(tmp_path)]) == 2


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.observe.samples.FILE_BYTES_MAX", 10_000)
    kept(tmp_path, *(group(number, 1.0) for number in range(500)))
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == [FILE_NAME, f"{FILE_NAME}.1"]
    assert all(each.stat().st_size <= 10_000 for each in files)
    newest = read_samples(tmp_path, own=True, order="newest", count=1)[0]
    assert newest.group.round == 499


def test_a_round_and_a_group_are_bounded() -> None:
    assert len(bounded(group(n, 1.0) for n in range(99))) == GROUPS_MAX
    assert shortened("x" * TEXT_CHARS_MAX) == "x" * TEXT_CHARS_MAX
    long = shortened("a" * TEXT_CHARS_MAX + "the end")
    assert len(long) == TEXT_CHARS_MAX
    assert long.endswith("the end")
    run = make_run()
    task = assigned_task(run, ALICE, 0)
    made = tuple(Completion("\U0001f600" * 8000, (), (), FinishReason.STOP, 1) for _ in range(64))
    found = sampled(run, 1, of_completions(made, (0.0,) * 64, "?" * 9000, task=task))
    assert len(found.texts) == TEXTS_MAX
    assert len(json.dumps([each.text for each in found.texts])) < 1_000_000  # a line's limit


def test_what_is_counted_and_kept_goes_by_the_runs_format() -> None:
    run = make_run(answer={"format": "last_number", "system": "Be brief."})
    task = assigned_task(run, ALICE, 0)
    prompt = Prompt.of("1+1=", "Be brief.").text
    texts = ("It is 8.", "eight", "8 or so", "It is about")
    made = tuple(
        Completion(text, (), (), FinishReason.LENGTH if "about" in text else FinishReason.STOP, 1)
        for text in texts
    )
    scored = of_completions(made, (1.0, 0.0, 0.0, 0.0), prompt, BOB, task=task)
    assert outcome_counts(run, [scored, scored]) == AnswerCounts(8, unread=6, right=2, cut=2)
    found = sampled(run, 3, scored)
    assert [each.answer for each in found.texts] == ["8", None, None, None]
    assert (found.round, found.own, found.producer) == (3, False, BOB)
    assert found.prompt == "Be brief.\n\n1+1="
    assert outcome_counts(make_run(), [scored]).unread == 0
    assert pose(task, 100).answer


def test_strangers_texts_are_shown_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = group(1, 0.0, own=False, text=EVIL + " " * 3)
    kept(tmp_path, SampledGroup(1, False, EVIL, EVIL, EVIL, evil.texts))
    assert main(["samples", "--data-dir", str(tmp_path), "--foreign", "--worst", "-n", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "\\x1b[31m\\x1b]0;title\\x07 \\u202e\\u200b\\r\\n\\x9b2J [red]<b>&   »" in shown
    assert "answer      «8»" in shown
    assert main(["samples", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == shown  # it made none itself
    assert main(["samples", "--data-dir", str(tmp_path), "-n", "0"]) == 2


def test_the_escaping_is_what_keeps_them_harmless() -> None:
    """The negative control: the same text as it is steers a terminal."""
    sample = read_rendered(EVIL)
    assert sample.isprintable()
    assert not EVIL.isprintable()


def read_rendered(text: str) -> str:
    return printable(text, SHOWN_CHARS_MAX, escapes=True)


@pytest.mark.parametrize(
    ("text", "plain", "escaped"),
    [
        ("a b", "a b", "a b"),
        ("a\n", "a?", "a\\n"),
        ("\ud800", "?", "\\ud800"),
        ("\U000e0001", "?", "\\U000e0001"),
        ("\u00a0", "?", "\\xa0"),
        ("x" * 21, "x" * 19 + "…", "x" * 19 + "…"),
        ("\x1b" * 20, "?" * 20, ("\\x1b" * 5)[:19] + "…"),
    ],
)
def test_what_is_not_printable_is_replaced(text: str, plain: str, escaped: str) -> None:
    assert printable(text, 20) == plain
    assert printable(text, 20, escapes=True) == escaped


def test_nothing_to_show_is_said() -> None:
    assert render_samples([]) == "none kept"
