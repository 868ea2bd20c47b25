"""Items of one's own: one hash everywhere, their order, what is refused, and held-out ones."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio

from node.commands.data import check_file
from node.config import RunConfig
from node.config.load import load_run
from node.config.run import HeldOutRules
from node.envs.data import items as store
from node.envs.data.dataset import rules_of, shuffled
from node.envs.data.items import Items, Judging, content_of, rows_of
from node.envs.data.shapes import Columns
from node.envs.registry import environment
from node.envs.scoring import pose, score_group
from node.hosting.run_data import check_data
from node.interfaces.prompts import Prompt
from node.verify.assignment import assigned_task, held_out_tasks
from node.verify.held_out import HeldOutGuard
from node.verify.verifier import InlineVerifier
from swarm.errors import ConfigError
from swarm.identity import Identity
from tests.support import script

RUN = """
name = "mine"
answer = {format = "last_number"}
held_out = {tasks = %d}
[[environments]]
name = "dataset"
parameters = {path = "items.jsonl", scorer = "numeric"}
"""
ANYBODY = Identity.generate().peer_id
JUDGING = Judging(lambda item: None)
word_problems = script("word_problems").word_problems


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path / "cache"))
    store.load.cache_clear()


def write(folder: Path, rows: list[Any], name: str = "items.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def found(folder: Path, count: int = 60, held_out: int = 20, seed: int = 0) -> RunConfig:
    """A run on so many word problems."""
    write(folder, list(word_problems(count, seed)))
    path = folder / "run.toml"
    path.write_text(RUN % held_out)
    return load_run(path, {})[0]


def sha256_in(run: RunConfig) -> str:
    return rules_of(run.environments[0].parameters).sha256


def test_the_hash_is_of_what_the_run_names_and_of_nothing_else(tmp_path: Path) -> None:
    rows = list(word_problems(30))
    run = found(tmp_path, 30, 5)
    told = json.loads(run.environments[0].parameters)
    assert set(told) == {"sha256", "question", "answer", "scorer"}
    spaced = tmp_path / "items.jsonl"
    spaced.write_text("\n\n".join(json.dumps({"x": 1, **row}, indent=None) for row in rows))
    assert load_run(tmp_path / "run.toml", {})[0].run_id == run.run_id
    kept = store.path_of(sha256_in(run)).read_bytes()
    assert (
        kept.splitlines()[0]
        == json.dumps(rows[0], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )
    spaced.write_bytes(kept)  # what is kept is a file of the same items
    assert load_run(tmp_path / "run.toml", {})[0].run_id == run.run_id
    spaced.write_bytes(kept.replace(b"?", b"!", 1))  # one byte
    assert load_run(tmp_path / "run.toml", {})[0].run_id != run.run_id


def test_one_hash_and_a_path_must_agree(tmp_path: Path) -> None:
    run = found(tmp_path)
    text = (tmp_path / "run.toml").read_text()
    pinned = text.replace("{path", f'{{sha256 = "{sha256_in(run)}", path')
    (tmp_path / "run.toml").write_text(pinned)
    assert load_run(tmp_path / "run.toml", {})[0].run_id == run.run_id
    write(tmp_path, list(word_problems(60, seed=1)))
    with pytest.raises(ConfigError, match="remove sha256 to found another run"):
        load_run(tmp_path / "run.toml", {})


def test_rules_of_strangers_name_no_path(tmp_path: Path) -> None:
    secret = write(tmp_path, [{"question": "1", "answer": "1"}])
    table = {
        "name": "far",
        "environments": [{"name": "dataset", "parameters": {"path": str(secret)}}],
    }
    with pytest.raises(ConfigError, match="path: for a run file of one's own alone"):
        RunConfig.model_validate(table)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": "1+1="}', "line 3: no column 'answer'"),
        ('{"question": "", "answer": "2"}', "line 3: an empty question"),
        ('{"question": "\\u001e[]", "answer": "2"}', "line 3: an empty question, or one"),
        ('{"question": "1+1=", "answer": "two"}', "line 3: an answer without a number"),
        ('{"question": "\\ud800", "answer": "2"}', "line 3: half a character"),
        ('["1+1=", "2"]', "line 3: not an object"),
        ('{"question": "1+1=", "answer": 2', "line 3: not JSON; write one object a line"),
        ("[" * 100_000, "line 3: not JSON"),
        (json.dumps({"question": "1" * 70_000, "answer": "2"}), "line 3: 70029 bytes, at most"),
        ("x" * 5_000_000, "line 3: over 4194304 bytes"),
    ],
    ids=range(10),
)
def test_a_bad_line_is_left_out_and_told_by_its_number(
    tmp_path: Path, line: str, told: str
) -> None:
    found(tmp_path)
    good = '{"question": "1+1=", "answer": 2}'
    (tmp_path / "items.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    sha256 = sha256_in(load_run(tmp_path / "run.toml", {})[0])
    assert len(store.load(sha256)) == 2
    place, _, why = told.partition(": ")
    table = store.told_of(sha256)
    assert "items.jsonl: left out: 1 of 3 rows" in table
    assert any(why in each and each.endswith(place) for each in table)
    assert all(len(each) < 200 for each in table)
    (tmp_path / "items.jsonl").write_text(f"\n\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        load_run(tmp_path / "run.toml", {})
    assert len(str(refused.value)) < 250
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({}, "no items; name a file of them as path"),
        ({"path": "gone.jsonl"}, "gone.jsonl: no such file"),
        ({"path": "empty.jsonl"}, "no items"),
        ({"path": "none"}, "no .jsonl or .parquet file; name one file"),
        ({"sha256": "ab"}, "sha256 = 'ab'"),
        ({"path": "items.jsonl", "scorer": "magic"}, "write one of exact, numeric"),
        ({"path": "items.jsonl", "colour": 1}, "colour: no such parameter; known: path, sha256"),
        ({"path": "items.jsonl", "tolerance": 1.0}, "exact has no such setting"),
        ({"path": "items.jsonl", "scorer": "numeric", "tolerance": -1.0}, "tolerance = '-1'"),
        ({"path": "items.jsonl", "scorer": "regex"}, "regex takes a column rule"),
        ({"path": "items.jsonl", "rule": "answer"}, "exact reads no such column"),
        ({"path": "items.jsonl", "scorer": "math", "engine": "math-verify-0.0.1"}, "install that"),
    ],
)
def test_wrong_parameters_are_one_line(
    tmp_path: Path, parameters: dict[str, Any], told: str
) -> None:
    write(tmp_path, list(word_problems(3)))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "none").mkdir()
    spec = {"name": "dataset", "parameters": parameters}
    with pytest.raises(ConfigError, match=told) as refused:
        RunConfig.model_validate({"name": "far", "environments": [spec]}, context=tmp_path)
    assert "\n" not in str(refused.value)


def test_limits_on_items_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [json.dumps({"question": str(n), "answer": "1"}).encode() for n in range(9)]
    for limit, value in (("DATA_ITEMS_MAX", 8), ("DATA_BYTES_MAX", 250)):
        with monkeypatch.context() as patch:
            content_of(rows_of(rows, "f"), Columns(), "f", JUDGING)
            patch.setattr(f"node.envs.data.items.{limit}", value)
            with pytest.raises(ConfigError, match=r"f line 9: over .* leave some out"):
                content_of(rows_of(rows, "f"), Columns(), "f", JUDGING)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1000])
def test_an_order_has_each_item_once(count: int) -> None:
    orders = [
        tuple(shuffled(place, count, seed, epoch) for place in range(count))
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**62, 2**31 // count))
    ]
    assert all(sorted(order) == list(range(count)) for order in orders)
    if count > 10:
        assert len(set(orders)) == len(orders)
        assert all(order != tuple(range(count)) for order in orders)


def test_first_places_are_spread_evenly() -> None:
    firsts = Counter(shuffled(0, 10, seed, 0) for seed in range(5_000))
    assert all(400 < firsts[item] < 600 for item in range(10))


def test_a_stream_repeats_no_item_within_an_epoch(tmp_path: Path) -> None:
    run = found(tmp_path, 50)
    source = environment("dataset")
    asked = [source.problem(assigned_task(run, ANYBODY, n)).prompt for n in range(100)]
    assert len(set(asked[:50])) == len(set(asked[50:])) == 50
    assert asked[:50] != asked[50:]
    assert len(set(asked[25:75])) < 50  # else it would be one order again and again


def test_own_answers_score_and_others_do_not(tmp_path: Path) -> None:
    run = found(tmp_path)
    rule = run.answer_rule("dataset", run.environments[0].parameters)
    for index in range(60):
        task = assigned_task(run, ANYBODY, index)
        answer = pose(task, 8192, rule).answer
        texts = [
            answer,
            f"So it is {answer}.",
            f"{answer} so",
            str(int(answer) + 1),
            "",
            answer * 99,
        ]
        assert score_group(task, texts, "exact", rule).rewards == (1, 1, 0, 0, 0, 0)


def test_held_out_validation_and_training_share_no_question(tmp_path: Path) -> None:
    run = found(tmp_path, count=200, held_out=60)
    guard = HeldOutGuard(run, InlineVerifier(run), validation=10)

    async def main() -> tuple[set[str], set[str], list[str]]:
        held_out = set(await guard.questions())
        validation = {Prompt.read(each.prompt).question for each in await guard.validation()}
        trained, index = [], 0
        while len(trained) < 260:  # two epochs of what is left
            found, index = await guard.assignments(ANYBODY, index, 10)
            trained += [Prompt.read(each.prompt).question for each in found]
        return held_out, validation, trained

    held_out, validation, trained = trio.run(main)
    assert (len(held_out), len(validation), len(set(trained))) == (60, 10, 130)
    assert not held_out & validation
    assert not (held_out | validation) & set(trained)


def test_few_items_are_not_spent_on_validation(tmp_path: Path) -> None:
    """A stream without repeats must not hide that validation takes a fifth of all there is."""
    run = found(tmp_path, count=100, held_out=10)

    async def validated(wanted: int) -> int:
        return len(await HeldOutGuard(run, InlineVerifier(run), validation=wanted).validation())

    assert trio.run(validated, 5) == 5
    assert trio.run(validated, 30) == 0


@pytest.mark.parametrize(("count", "fits"), [(40, True), (39, False), (1, False)])
def test_too_few_items_for_the_held_out_ones_are_refused(
    tmp_path: Path, count: int, fits: bool
) -> None:
    run = found(tmp_path, count=count, held_out=20)
    if fits:
        check_data(run)
        assert len(held_out_tasks(run)) == 20
        return
    with pytest.raises(ConfigError, match=r"held_out\.tasks = 20 would leave too few") as refused:
        check_data(run)
    assert ("take at most 19" if count > 1 else "bring more") in str(refused.value)


def test_questions_over_the_runs_limit_are_counted_before_it_starts(tmp_path: Path) -> None:
    run = found(tmp_path)
    limits = run.limits.model_copy(update={"prompt_chars_max": 46})
    small = run.model_copy(update={"limits": limits})
    long = sum(len(row["question"]) > 46 for row in word_problems(60))
    (told,) = check_data(small.model_copy(update={"held_out": HeldOutRules(tasks=1)}))
    assert 0 < long < 60
    assert f"left out: {long} of 60 items" in told
    with pytest.raises(ConfigError, match=r"held_out\.tasks = 20 would leave too few"):
        check_data(small)


def test_a_task_that_cannot_be_posed_is_left_out_counted_and_named(tmp_path: Path) -> None:
    run = found(tmp_path, count=200, held_out=10)
    limits = run.limits.model_copy(update={"prompt_chars_max": 49})
    small = run.model_copy(update={"limits": limits})
    guard = HeldOutGuard(small, InlineVerifier(small), validation=10)

    async def main() -> list[str]:
        assert 0 < len(await guard.held_out()) < 10
        assert len(await guard.validation()) == 10
        assigned, index = await guard.assignments(ANYBODY, 0, 60)
        assert index > 60
        leased = await guard.leased("a", range(20))
        assert 0 < len(leased) < 20
        return [Prompt.read(each.prompt).question for each in (*assigned, *leased)]

    assert max(map(len, trio.run(main))) <= 49
    told = guard.verifier.counters.note
    assert told is not None
    assert re.match(r"\d\d tasks left out so far; the first .*prompt_chars_max is 49", told)
    none = limits.model_copy(update={"prompt_chars_max": 9})
    nobody = run.model_copy(update={"limits": none})
    with pytest.raises(ConfigError, match="prompt_chars_max is 9"):
        trio.run(HeldOutGuard(nobody, InlineVerifier(nobody)).assignments, ANYBODY, 0, 4)


def test_items_that_changed_on_disk_are_not_used(tmp_path: Path) -> None:
    run = found(tmp_path)
    path = store.path_of(sha256_in(run))
    path.write_bytes(path.read_bytes().replace(b"?", b"!", 1))
    with pytest.raises(ConfigError, match="is damaged; delete it"):
        environment("dataset").problem(assigned_task(run, ANYBODY, 0))
    path.unlink()
    with pytest.raises(ConfigError, match="are not on this machine; join with --peer"):
        environment("dataset").problem(assigned_task(run, ANYBODY, 0))


def test_a_run_may_not_name_other_columns_of_the_same_items(tmp_path: Path) -> None:
    run = found(tmp_path)
    table = json.loads(run.environments[0].parameters) | {"answer": "solution"}
    spec = {"name": "dataset", "parameters": table}
    other = RunConfig.model_validate({"name": "far", "environments": [spec]})
    with pytest.raises(ConfigError, match="its items have no column 'solution'"):
        environment("dataset").problem(assigned_task(other, ANYBODY, 0))


def test_rows_are_read_where_they_are() -> None:
    rows = [{"question": f"{n}\n\u2028é", "answer": "1"} for n in range(50)]
    lines = [json.dumps(row).encode() for row in rows]
    items = Items(content_of(rows_of(lines, "f"), Columns(), "f", JUDGING).data)
    assert [items.row(place) for place in range(len(items))] == rows


def test_parquet_and_saved_datasets_are_the_same_items(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    run = found(tmp_path, 30, 5)
    rows = [{**row, "answer": int(row["answer"]), "note": "x"} for row in word_problems(30)]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table.slice(0, 20), tmp_path / "a.parquet")
    parquet.write_table(table.slice(20), tmp_path / "b.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    with ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    named = [{"filename": "data-00000-of-00001.arrow"}]
    (saved / "state.json").write_text(json.dumps({"_data_files": named}))
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in "ab":
        (tmp_path / f"{name}.parquet").rename(parts / f"{name}.parquet")
    text = (tmp_path / "run.toml").read_text()
    for path in ("saved", "parts"):
        (tmp_path / "run.toml").write_text(text.replace("items.jsonl", path))
        assert load_run(tmp_path / "run.toml", {})[0].run_id == run.run_id
    (saved / "dataset_dict.json").write_text("{}")
    (saved / "train").mkdir()
    (tmp_path / "run.toml").write_text(text.replace("items.jsonl", "saved"))
    with pytest.raises(ConfigError, match="several splits; name the folder of one: train"):
        load_run(tmp_path / "run.toml", {})


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(tmp_path)
    (tmp_path / "items.parquet").touch()
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    text = (tmp_path / "run.toml").read_text().replace("jsonl", "parquet")
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"install 'pyarrow>=20'; or write"):
        load_run(tmp_path / "run.toml", {})


def test_check_says_what_a_file_would_be(tmp_path: Path) -> None:
    rows = [
        *word_problems(20),
        {"question": "1+1=", "answer": 2},
        {"question": "1+1=", "answer": 2},
    ]
    path = write(tmp_path, rows)
    lines = list(check_file(str(path), {"scorer": "numeric"}))
    said = "\n".join(lines)
    for words in (
        "22 items",
        "than once, blanks apart: 1",
        "prompts: 4 to",
        "scorer numeric: 22 of 22",
    ):
        assert words in said
    assert not list((tmp_path / "cache").rglob("*"))  # it keeps nothing
    run = tmp_path / "run.toml"
    table = lines[lines.index("[[environments]]") :]
    run.write_text("\n".join(['name = "mine"', "held_out = {tasks = 5}", *table]))
    assert sha256_in(load_run(run, {})[0]) in lines[0]  # the table that it prints is of these items
    write(tmp_path, [{"question": "1+1=", "answer": "two"}])
    with pytest.raises(ConfigError, match=r"items\.jsonl line 1: an answer without a number"):
        list(check_file(str(path), {"scorer": "numeric"}))
