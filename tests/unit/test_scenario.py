"""Scenario files: what is right, and one line for each wrong one."""

from pathlib import Path

import pytest

from node.cli import main
from node.simulation.scenario import load_scenario, packaged_scenarios, parse_scenario
from swarm.command import EXIT_USAGE
from swarm.errors import ConfigError
from swarm.simulation.network_faults import Fault


def test_seven_come_with_the_package() -> None:
    names = {"calm", "catch-up", "churn", "clogged", "hostile", "learner", "partition"}
    assert names <= set(packaged_scenarios())
    assert all(load_scenario(name).title for name in names)


def test_a_time_is_a_number_or_a_range() -> None:
    scenario = parse_scenario(
        '[[faults]]\nkind = "clog"\nfor_s = 3\n[[faults]]\nkind = "pause"\nfor_s = [1, 2.5]', "x"
    )
    assert [fault.for_s for fault in scenario.faults] == [(3, 3), (1, 2.5)]
    assert scenario.faults[0].share == Fault(kind="clog").share


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nodes = 1", "nodes = 1 in x.toml: must be at least 2; try nodes = 16"),
        ("node = 8", "node in x.toml: no such setting; did you mean nodes?"),
        ('duration_s = "long"', "duration_s = long in x.toml: must be a number of seconds; try"),
        ("[swarm]\ngroup_size = 1", "swarm.group_size = 1 in x.toml: must be at least 2"),
        ("[[faults]]\nshare = 0.5", "faults.0.kind in x.toml: is missing; add it"),
        ('[[faults]]\nkind = "flood"', "faults.0.kind = flood in x.toml: must be 'crash', "),
        ('[[faults]]\nkind = "clog"\nshare = 2', "faults.0.share = 2 in x.toml: must be at most 1"),
        ('[[faults]]\nkind = "clog"\nfor_s = [5, 1]', "must be the shorter time first"),
        ("late_nodes = 16", "late_nodes must be fewer than nodes: somebody has to be there"),
        ("nodes = ", "x.toml: not TOML"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as info:
        parse_scenario(text, "x.toml")
    assert line in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--scenario", "nowhere.toml"], "No such file or directory; give a TOML file or one of"),
        (["--scenario", "calm", "--nodes", "many"], "--nodes many: must be a whole number"),
        (["--scenario", "calm", "--nodes", "1"], "--nodes 1: must be from 2 to"),
        (["--scenario", "calm", "--seed", "-1"], "--seed -1: must be from 0 to"),
        (["--scenario", "calm", "--profile", "moon"], "profile moon: no such profile; known: 4g,"),
        (["--scenario", "catch-up", "--nodes", "2"], "2 of them join late; try more"),
        (["--scenario", "chaos", "--nodes", "8"], "the seed decides nodes and profile"),
    ],
)
def test_wrong_flags_end_with_one_line_and_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert line in told
    assert told.startswith("swarm-node: ")
    assert told.count("\n") == 1


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_scenario(str(path))
    path.write_bytes(b"#" * 70_000)
    with pytest.raises(ConfigError, match="larger than"):
        load_scenario(str(path))
