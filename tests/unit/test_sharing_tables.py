"""The experiment on sharing: its plan, and that its tables say what was measured."""

import copy
import io
import json
import math
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import script

for imported in ("on_record", "measuring", "races"):
    script(imported)
sharing = script("sharing")
SEEDS = (1, 2, 3)
ENVIRONMENTS = ("sums", "words")
TASKS = 20  # of each environment


def result(arm: str, seed: int, solved: int, tokens: int) -> dict[str, Any]:
    """A swarm of two nodes: both solve one task in ten at the start, and `solved` sums at the end
    (and a word more for each seed). What is solved was locked before."""
    points = []
    for node in range(2):
        for at, sums in ((0, 2), (20, solved)):
            tasks = [
                [name, number < (sums if name == "sums" else seed * (at > 0)), 0]
                for name in ENVIRONMENTS
                for number in range(TASKS)
            ]
            points.append(
                {
                    "node": node, "round": at, "tokens": tokens * at, "seconds": float(at),
                    "sampled": 0.5, "tasks": tasks,
                }
            )  # fmt: skip
    totals = dict.fromkeys(sharing.COUNTED, 0) | {"local_groups": 80, "own_informative": 20}
    totals["informative_groups"] = 60
    return {
        "condition": "equal", "arm": arm, "seed": seed, "points": points, "totals": totals,
        "took_s": 60.0,
    }  # fmt: skip


def results() -> list[dict[str, Any]]:
    arms = {"alone": (4, 100), "8/0": (6, 200), "4/4": (10, 100)}
    return [result(arm, seed, *told) for seed in SEEDS for arm, told in arms.items()]


def row(arm: str, told: list[dict[str, Any]]) -> dict[str, str]:
    lines = sharing.table("equal", told).splitlines()
    heads = [each.strip() for each in lines[2].strip("|").split("|")]
    (found,) = (line for line in lines if line.startswith(f"| {arm} |"))
    return dict(zip(heads, (each.strip() for each in found.strip("|").split("|")), strict=True))


def test_the_plan_can_be_run():
    assert set(sharing.PLAN["controls"]) <= set(sharing.ARMS)
    for condition, told in sharing.CONDITIONS.items():
        for arm in told.get("arms", sharing.ALL_RUN):
            config = sharing.config_of(condition, arm, 1, sharing.PLAN["rounds"])
            names = {each.name for each in config.run.environments}
            assert set(told["nodes"]) <= names | {"", "strong", "smollm2", "veteran"}
            assert config.seed == 1
            places = sharing.places_of(condition, arm)
            for each in sharing.unlike_of(condition, places):
                type(config).model_validate(config.model_dump() | each)


def test_specialists_are_of_the_model_that_the_plan_names() -> None:
    models = {
        condition: sharing.config_of(condition, "alone", 1, 20).model
        for condition in ("specialists", "two specialists", "late joiner")
    }
    assert models == {"specialists": "tiny", "two specialists": "smollm2", "late joiner": "smollm2"}


def test_veterans_are_of_the_condition_that_the_plan_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: Path, **_: Any) -> None:
        path.mkdir(parents=True)  # what a swarm that trains would leave

    monkeypatch.setattr(sharing, "_simulated", lambda *_: None)
    monkeypatch.setattr(sharing, "shutil", SimpleNamespace(rmtree=make))

    def directory_of(condition: str) -> Path:
        found = sharing._trained(condition, str(tmp_path / "model"), 1, tmp_path)
        return Path(found[0]).parent

    teacher, longer = "a teacher that does not learn", "a teacher, longer steps"
    assert directory_of(longer) == directory_of(teacher)
    monkeypatch.delitem(sharing.CONDITIONS[longer], "veterans_of")
    monkeypatch.setitem(sharing.CONDITIONS[longer], "veteran_rounds", 60)
    assert directory_of(longer) != directory_of(teacher)


def test_what_a_round_takes_and_what_each_node_passes_are_told() -> None:
    found = row("8/0", results())
    assert (found["own tokens, a round"], found["seconds, a round"]) == ("200.0 ± 0.0", "1.0 ± 0.0")
    made = [result("4/4", 1, 10, 100)]
    assert sharing.of_nodes(made, 0) == "0 sums 10, 0 words 0, 1 sums 10, 1 words 0"
    assert sharing.of_nodes(made, -1) == "0 sums 50, 0 words 5, 1 sums 50, 1 words 5"


PRIMARY = "PRIMARY: greedy, less that control"


def test_the_primary_figure_is_at_equal_tokens_against_the_best_control() -> None:
    found = row("4/4", results())
    # 8/0 spends twice as many tokens: at those of the others it is half way from 2 to 6 sums and
    # to a word for each seed, in two environments of 20; `alone` is at 4 sums and all its words.
    assert found["best control, at so many tokens"] == "alone, 2,000"
    assert found[PRIMARY] == "+15.0 ± 0.0"
    assert found["greedy at equal generated tokens"].startswith("30.0")


def test_the_primary_figure_is_the_same_whatever_else_is_in_the_table() -> None:
    less = [result("2/6", seed, 3, 50) for seed in SEEDS]
    assert row("4/4", results())[PRIMARY] == row("4/4", results() + less)[PRIMARY]
    # the control: the columns of the arms in the table do change
    name = "greedy at equal generated tokens"
    assert row("4/4", results())[name] != row("4/4", results() + less)[name]


def test_without_all_controls_nothing_is_claimed() -> None:
    found = row("4/4", [each for each in results() if each["arm"] != "8/0"])
    assert found[PRIMARY] == ""
    assert found["the same over tasks"] == ""


def test_what_is_expected_stands_beside_what_was_found(tmp_path) -> None:
    """Of one node half of the groups teach, in the mean of start and end; of the other none do."""

    def teaching(arm: str) -> dict[str, Any]:
        told = result(arm, 1, 4, 100)
        for point in told["points"]:
            for place, task in enumerate(point["tasks"]):
                task[2] = 0 if point["node"] else 3 * (place < (30 if point["round"] else 10))
        return told

    told = sharing.expectations([teaching("4/4"), teaching("alone")])
    assert [each.arm for each in told] == ["4/4", "alone"]
    shared, alone = told
    # 4 own groups: 2 of one node and none of the other; of its 2 the other takes both, which are
    # the half of J that one producer may have at most
    assert shared.expected == (1.0, 1.0)
    assert alone.expected == (1.0, 0.0)
    assert shared.found == (20 / 40, 40 / 40)
    text = sharing.expected_table(told)
    assert "| equal | 4/4 | 1.00 | 0.50 | 1.00 | 1.00 | 2.00 | 3.00 |" in text
    sharing.plot(told, tmp_path / "expected.png")
    assert (tmp_path / "expected.png").stat().st_size > 0


def test_a_control_is_not_compared() -> None:
    assert row("8/0", results())["greedy at equal rounds"].startswith("20.0")
    assert row("8/0", results())[PRIMARY] == ""


def test_intervals_are_those_of_all_comparisons_of_the_plan() -> None:
    solved = {1: 10, 2: 12, 3: 11}
    told = [each for each in results() if each["arm"] != "4/4"]
    told += [result("4/4", seed, count, 100) for seed, count in solved.items()]
    found = row("4/4", told)
    # 6, 8 and 7 sums more of 40 tasks: 15, 20 and 17.5 points, a standard error of 2.5 / sqrt(3)
    assert sharing.comparisons_of("equal") == 8 * 2
    mean, width = (float(each) for each in found[PRIMARY].split(" ± "))
    assert mean == 17.5
    quantile = width / (2.5 / math.sqrt(3))
    # with two degrees of freedom the quantile has a closed form
    p = 1 - 0.025 / 16
    assert quantile == pytest.approx((2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p))), rel=1e-2)


def test_tasks_are_drawn_with_all_their_seeds() -> None:
    """Sums 4 to 9 of 40 tasks are solved by one arm alone, in all seeds and nodes: were rows drawn
    instead, six times as many would make the interval narrower by the root of six."""
    of = {each["arm"]: [r for r in results() if r["arm"] == each["arm"]] for each in results()}
    told = sharing.over_tasks(of["4/4"], of["alone"], 2_000, 1)
    low, high = (float(each) for each in told.split(" to "))
    error = 100 * math.sqrt(0.15 * 0.85 / 40)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)
    wider = sharing.over_tasks(of["4/4"], of["alone"], 2_000, sharing.comparisons_of("equal"))
    assert float(wider.split(" to ")[1]) > high
    half_way = sharing.over_tasks(of["4/4"], of["alone"], 1_000, 1)
    assert float(half_way.split(" to ")[1]) == pytest.approx(high / 2, rel=0.1)


def test_what_was_solved_before_is_not_unlocked():
    (one, *_) = results()
    assert sharing.unlocked(one, "sums") == pytest.approx(100 * 2 / 18)
    assert sharing.unlocked(one, "words") == pytest.approx(100 * 1 / 20)
    sampled = copy.deepcopy(one)
    for point in sampled["points"]:
        for task in point["tasks"]:
            task[2] = 1  # in a sample, before the first round
    assert math.isnan(sharing.unlocked(sampled))


def tokens_to(arm: str, told: list[dict[str, Any]]) -> str:
    found = row(arm, told)
    (head,) = (name for name in found if name.startswith("tokens to"))
    return found[head]


def test_tokens_to_a_threshold_are_read_off_the_curve_or_never() -> None:
    assert 0 < float(tokens_to("4/4", results()).replace(",", "")) < 2_000
    # 17 % are wanted, four fifths of what 8/0 gains: `alone` ends at 12.5, 15 and 17.5, and a mean
    # over the one that came there would flatter it
    assert tokens_to("alone", results()) == "never in 2 of 3"
    slow = [each for each in results() if each["arm"] != "4/4"]
    slow += [result("4/4", seed, 2 + 6 * (seed > 1), 100) for seed in SEEDS]
    assert tokens_to("4/4", slow) == "never in 1 of 3"


def test_where_no_control_gains_there_is_no_goal() -> None:
    told = [result(arm, seed, 2, 100) for arm in ("alone", "8/0", "4/4") for seed in SEEDS]
    for each in told:
        for point in each["points"]:
            point["tasks"] = each["points"][0]["tasks"]
    assert tokens_to("4/4", told) == ""
    assert sharing.tokens_to(told[-3:], 4.0) == "0"  # there from the start


def test_intervals_of_more_comparisons_are_wider():
    one, many = (sharing.told([1.0, 2.0, 4.0], count) for count in (1, 5))
    assert float(one.split("± ")[1]) < float(many.split("± ")[1])


def test_over_tasks_nothing_is_made_of_noise_free_equality() -> None:
    mine = [result("4/4", seed, 4, 100) for seed in SEEDS]
    assert sharing.over_tasks(mine, mine, 2_000, 1) == "+0.0"


def test_a_key_holds_what_decides_and_files_that_git_does_not_follow(tmp_path, monkeypatch) -> None:
    one, other = (
        sharing.facts_of("equal", arm, 1, 120, ["weights"]) for arm in ("4/4", "4/4, by need")
    )
    assert one != other
    assert one != sharing.facts_of("equal", "4/4", 1, 120, ["other weights"])
    assert one != sharing.facts_of("equal", "4/4", 2, 120, ["weights"])
    on_record = script("on_record")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "node").mkdir()
    (tmp_path / "node/a.py").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(on_record, "ROOT", tmp_path)
    seen = [on_record.code_of("node")]
    for name, text in (("a.py", "2"), ("b.py", "1"), ("b.py", "2")):
        (tmp_path / "node" / name).write_text(text)
        seen.append(on_record.code_of("node"))
    assert len(set(seen)) == 4


def test_a_run_whose_code_changed_is_not_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sharing, "models_of", lambda condition, out: [])
    monkeypatch.setattr(sharing, "run_one", lambda *given: {"told": given[:4]})
    told = ["--conditions", "equal", "--one", "4/4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sharing.py", *told, "--key", "of other code"])
    with pytest.raises(SystemExit, match="the code changed"):
        sharing.main()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["sharing.py", *told])
    sharing.main()
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert found["told"] == ["equal", "4/4", 1, sharing.PLAN["rounds"]]
    assert found["facts"]["settings"]["external_groups"] == 4


def archive(path: Path, *results: dict[str, Any]) -> Path:
    with tarfile.open(path, "w:xz") as file:
        for number, result in enumerate(results):
            content = json.dumps(result).encode()
            told = tarfile.TarInfo(f"sharing/{path.stem}-{number}.json")
            told.size = len(content)
            file.addfile(told, io.BytesIO(content))
    return path


def test_of_results_on_record_whole_seeds_count_and_none_twice(tmp_path: Path, capsys) -> None:
    def cell(condition: str, arm: str, seed: int) -> dict[str, Any]:
        return {"condition": condition, "arm": arm, "seed": seed}

    ones = [cell("specialists", arm, seed) for arm in ("4/4", "alone") for seed in (2, 1)]
    one = archive(tmp_path / "one.tar.xz", *ones)
    two = archive(tmp_path / "two.tar.xz", cell("specialists", "8/0", 1), cell("smollm2", "4/4", 1))
    found = sharing.recorded([two, one])
    assert list(found) == ["specialists", "smollm2"]
    assert found["specialists"] == [cell("specialists", arm, 1) for arm in ("alone", "8/0", "4/4")]
    assert "of seeds [1, 2] all arms have [1]" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="specialists, 4/4, 2 is there already"):
        sharing.recorded([one, one])


def test_no_more_foreign_groups_are_expected_than_are_wanted_or_made() -> None:
    assert sharing.expected_foreign([2.0] * 7, 3) == 3.0
    assert sharing.expected_foreign([4.0, 1.0], 8, each_max=2) == 3.0
    assert sharing.expected_foreign([2.0, 0.0], 8) == 2.0
