"""Whole swarms by scenario: what a report says, and that a seed replays it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from node.cli import EXIT_OK, main
from node.simulation.scenario import packaged_scenarios
from node.simulation.simulate import replay_of, simulate
from node.simulation.simulation_report import Replay, render, report_json

SHORT = """
title = "short"
nodes = 5
profile = "lan"
duration_s = 30
settle_s = 15
[[faults]]
kind = "crash"
at_s = 12
for_s = 4
"""


@pytest.fixture
def short(tmp_path: Path) -> str:
    path = tmp_path / "short.toml"
    path.write_text(SHORT)
    return str(path)


def test_a_calm_swarm_delivers_all_it_should() -> None:
    report = simulate(replay_of("calm", 3, nodes=4, profile="fibre"))
    assert not report.violations
    assert report.deliveries.due > 50
    assert report.deliveries.ratio == 1.0
    assert report.rounds >= 40
    assert report.groups == report.rounds
    assert not report.rejected
    assert {"record", "trainer", "pool", "collections", "budget", "reach"} <= set(report.checks)


def test_a_report_is_also_json_and_progress_is_shown() -> None:
    shares: list[float] = []
    report = simulate(replay_of("calm", 0, nodes=3), shares.append)
    told = json.loads(report_json(report))
    assert told["deliveries"]["due"] == report.deliveries.due
    assert told["replay"] == report.replay.line
    assert len(shares) > 10
    assert shares == sorted(shares)


def test_one_command_prints_a_table_and_the_line_that_replays_it(
    short: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["simulate", "--scenario", short, "--seed", "8"]
    drawn = Path(short).with_suffix(".png")
    assert main([*given, "--plot", str(drawn)]) == EXIT_OK
    assert drawn.read_bytes().startswith(b"\x89PNG")
    first = capsys.readouterr().out
    replay = first.splitlines()[-1].removeprefix("replay: swarm-node ").split()
    assert main(replay) == EXIT_OK
    assert _without_real_time(capsys.readouterr().out) == _without_real_time(first)
    assert "crash 2" in first


def _without_real_time(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("virtual, real")]


def test_fresh_processes_replay_a_run(short: str) -> None:
    script = (
        "import sys; from node.simulation.simulate import *;"
        "print(simulate(replay_of(sys.argv[1], sys.argv[2])).trace_hash)"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", script, short, seed],
            env={"PYTHONHASHSEED": hash_seed, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, hash_seed in (("8123", "1"), ("8123", "2"), ("8124", "1"))
    ]
    assert traces[0] == traces[1] != traces[2]


@pytest.mark.parametrize("name", packaged_scenarios())
def test_packaged_scenarios_are_right(name: str) -> None:
    replay = replay_of(name, 1)
    assert isinstance(replay, Replay)
    assert replay.scenario.title


def test_a_report_says_what_was_broken() -> None:
    report = simulate(replay_of("calm", 3, nodes=2, profile="lan"))
    report.violation_count = 1
    report.violations = ["3.000 s, host 1: record: expired"]  # type: ignore[list-item]
    assert "1 broken rules:\n  3.000 s, host 1: record: expired\n\nreplay: " in render(report)


def test_a_learner_and_its_workers_live_beside_nodes_that_share() -> None:
    report = simulate(replay_of("learner", 1, profile="lan"))
    assert report.violations == []
    assert report.rounds > 10
    assert report.reach_pairs > 0
    assert report.steps >= 4
    assert report.step_groups - report.step_shared == 4 * report.steps  # of its workers
    assert report.step_shared >= 24  # as many as one step draws
    said = render(report)
    assert f"{report.steps}, {report.step_groups}; {report.step_shared} of them shared" in said
