"""The fleet file, what is made of measurements, drains, and what people are told."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.estimates import (
    MachineHistory,
    calibrated_load_s,
    is_measured,
    run_of,
    worker_of,
)
from coordinator.fleet_file import EXAMPLE, Fleet, LearnerCosts, Machine, load_fleet
from coordinator.model.capacity import Run
from coordinator.overrides import drain, read_depth, read_drained, set_depth
from coordinator.serve import _Source, learner_of
from coordinator.view import load_state, save_state
from swarm.errors import ConfigError, RemoteProtocolError
from swarm.identity import PeerId
from swarm.leases import coordination
from swarm.leases.coordination import ReportedWorker
from tests.wire_samples import ALICE, BOB, steering_messages

PEER = f"/ip4/127.0.0.1/tcp/1/p2p/{ALICE.peer_id}"
SMALL = f"""
run = "run.toml"
peers = ["{PEER}"]

[[workers]]
name = "w"
count = 2
groups_per_s = 0.5
up_mbit_per_s = 8
"""
REPORTED = ReportedWorker(
    peer=PeerId(BOB.peer_id),
    version=3,
    groups_per_s=0.9,
    failed_share=0.1,
    turnaround_s=12.0,
    heard_s=1.0,
    admitted=90,
    refused=10,
    leased=4,
    up_bytes_per_s=5_000_000,
    down_bytes_per_s=0,
)
MACHINE = Machine("w", groups_per_s=0.5, generation_s=30.0, lifetime_s=1_000.0)
REPORT = steering_messages()["report"]


def fleet_of(tmp_path: Path, text: str) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return load_fleet(path)


def test_the_example_reads_but_for_its_invented_peer(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, EXAMPLE.replace("12D3Koo...", ALICE.peer_id))
    assert [each.name for each in fleet.machines] == ["here-1", "here-2", "anna"]
    with pytest.raises(ConfigError, match="peer = 12D3Koo"):
        fleet_of(tmp_path, EXAMPLE)


def test_a_small_file_and_an_address_more(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, SMALL)
    assert [each.name for each in fleet.machines] == ["w-1", "w-2"]
    assert fleet.machines[0].up_bytes_per_s == 1e6
    assert fleet.run_file == tmp_path / "run.toml"
    assert load_fleet(tmp_path / "fleet.toml", ["/x"]).peers == ("/x", PEER)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "run: must name"),
        ('run = "r"', "peers: 0 addresses"),
        (SMALL + "[learner]\nstep = 3", "did you mean"),
        (SMALL + "[pacing]\nsteps = 0", "steps = 0"),
        (SMALL.replace('"w"', '"../w"'), "name = ../w"),
        (SMALL.replace("0.5", "0"), "groups_per_s = 0"),
        (SMALL + '[[workers]]\nname = "w-1"', "two workers"),
        (SMALL + '[[workers]]\nname = "x"\nprovider = "cloud"', "provider = cloud"),
        (SMALL + '[[workers]]\nname = "x"\nprovider = "static"', "static has one"),
        (SMALL + f'[[workers]]\nname = "x"\npeer = "{BOB.peer_id}"', "others have none"),
        (SMALL + '[[workers]]\nname = "x"\narguments = "--threads"', "list of texts"),
        (SMALL.replace("count = 2", "count = 1000"), "count = 1000"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as info:
        fleet_of(tmp_path, text)
    assert "\n" not in str(info.value)
    assert str(tmp_path / "fleet.toml") in str(info.value)


def test_the_command_line_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--example"]) == 0
    assert "[[workers]]" in capsys.readouterr().out
    assert main(["serve", "--file", str(tmp_path / "none.toml")]) == 2
    assert main(["workers", "--data-dir", str(tmp_path)]) == 2
    assert "no coordinator has worked here" in capsys.readouterr().err
    path = tmp_path / "fleet.toml"
    path.write_text(SMALL)
    (tmp_path / "run.toml").write_text('name = "x"')
    assert main(["serve", "--file", str(path), "--data-dir", str(tmp_path)]) == 2
    assert "has no learner" in capsys.readouterr().err
    assert main(["serve", "--file", str(path), "--interval", "0"]) == 2


def test_the_learner_is_whom_the_run_file_names(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f'[learner]\npeer = "{ALICE.peer_id}"')
    assert learner_of(run) == ALICE.peer_id
    run.write_text('[learner]\npeer = "nobody"')
    with pytest.raises(ConfigError, match=r"learner\.peer"):
        learner_of(run)


# --- measured, not declared --------------------------------------------------------------------


def test_what_was_measured_takes_the_place_of_guesses() -> None:
    guessed = worker_of(MACHINE, None, MachineHistory())
    assert (guessed.groups_per_s, guessed.generation_s) == (0.5, 30.0)
    known = worker_of(MACHINE, REPORTED, MachineHistory())
    assert known.groups_per_s * (1 - known.failed_share) == pytest.approx(0.9)
    assert known.generation_s == 12.0
    assert known.up_bytes_per_s == 5e6
    assert known.down_bytes_per_s == MACHINE.down_bytes_per_s  # not known yet
    new = replace(REPORTED, admitted=1, refused=0, failed_share=0.0)
    assert not is_measured(new)
    assert worker_of(MACHINE, new, MachineHistory()).groups_per_s == 0.5
    empty = replace(REPORTED, groups_per_s=0.0, failed_share=1.0, admitted=0, refused=0)
    assert (
        worker_of(MACHINE, empty, MachineHistory()).groups_per_s < 1e-3
    )  # it took leases for nothing
    tiny = replace(REPORTED, down_bytes_per_s=1)
    assert worker_of(MACHINE, tiny, MachineHistory()).down_bytes_per_s == 16_384


def test_losses_shorten_the_life_that_is_counted_on_and_a_guess_fades() -> None:
    history = MachineHistory().served(500.0)
    assert history.lifetime_s(None) is None
    assert history.lifetime_s(1_000.0) == 1_500.0
    for _ in range(4):
        history = history.lost()
    assert history.lifetime_s(1_000.0) == 300.0
    assert history.lifetime_s(None) == 125.0
    started = history.started(20.0).started(40.0)
    assert started.start_s is not None
    assert 20.0 < started.start_s < 40.0


def test_a_run_is_what_the_learner_measured() -> None:
    run = run_of(REPORT, LearnerCosts(price_per_h=2.0), 4, aimed=True)
    assert isinstance(run, Run)
    assert (run.train_s, run.staleness_max, run.groups_per_step) == (100.0, 4, 128)
    assert run.delta_bytes == ((3, 680_000_000),)
    slow = LearnerCosts(step_s=500.0)
    aimed, real = (run_of(REPORT, slow, 4, aimed=aimed) for aimed in (True, False))
    assert aimed is not None
    assert real is not None
    assert (aimed.train_s, real.train_s) == (500.0, 100.0)
    pace = REPORT.pace.model_copy(update={"train_s": 0.0})
    nothing = REPORT.model_copy(update={"pace": pace})
    assert run_of(nothing, LearnerCosts(), 4, aimed=True) is None


def test_a_broadcast_that_takes_longer_than_its_bytes_is_put_down_to_loading() -> None:
    run = run_of(REPORT, LearnerCosts(), 4, aimed=True)
    assert run is not None
    workers = [worker_of(MACHINE, replace(REPORTED, down_bytes_per_s=10**9), MachineHistory())]
    quick, slow = (calibrated_load_s(run, workers, s) for s in (1.0, 5_000.0))
    assert quick == run.load_s
    assert slow > 1_000.0


def test_rows_of_workers_come_back_as_they_were_and_bad_ones_are_refused() -> None:
    unknown = replace(REPORTED, peer=PeerId(ALICE.peer_id), groups_per_s=None, standing_by=True)
    column = coordination.pack([REPORTED, unknown])
    back = coordination.unpack(column)
    assert [each.peer for each in back] == [BOB.peer_id, ALICE.peer_id]
    assert back[1].groups_per_s is None
    assert back[1].standing_by
    assert back[0].groups_per_s == pytest.approx(0.9)
    nan = coordination.pack([replace(REPORTED, turnaround_s=float("nan"))])
    for bad in (column[:-1], column + column[:88], nan):
        with pytest.raises(RemoteProtocolError):
            coordination.unpack(bad)
    with pytest.raises(RemoteProtocolError):
        coordination.unpack_peers(b"short")


# --- drains, and what people are told ------------------------------------------------------------


def test_a_depth_that_is_asked_for_is_kept_until_it_is_taken_back(tmp_path: Path) -> None:
    assert read_depth(tmp_path) is None
    set_depth(tmp_path, 3)
    assert read_depth(tmp_path) == 3
    for bad in (-1, 2_000, 1.5, "3", True):
        with pytest.raises(ConfigError, match="whole number"):
            set_depth(tmp_path, bad)  # type: ignore[arg-type]
    assert read_depth(tmp_path) == 3
    set_depth(tmp_path, None)
    assert read_depth(tmp_path) is None
    (tmp_path / "depth.json").write_text("[]")
    with pytest.raises(ConfigError, match="delete it"):
        read_depth(tmp_path)


def test_a_look_takes_up_what_was_asked_for_and_what_is_damaged_changes_nothing(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path / "run.toml", ("/ip4/127.0.0.1/tcp/1",), ())
    said: list[str] = []
    source = _Source(lambda: fleet, fleet, tmp_path, said.append)
    drain(tmp_path, "w", undo=False)
    set_depth(tmp_path, 2)
    source.look()
    assert source.fleet.pacing.depth == 2
    assert source.drained == {"w"}
    (tmp_path / "depth.json").write_text("{")
    source.look()
    assert source.fleet.pacing.depth == 2
    assert "delete it" in said[-1]
    set_depth(tmp_path, None)
    source.look()
    assert source.fleet.pacing.depth is None


def test_drains_are_kept_and_undone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for undo in ([], ["--undo"]):
        assert main(["drain", "w-1", "--data-dir", str(tmp_path), *undo]) == 2
        assert "no coordinator has worked here" in capsys.readouterr().err
    assert read_drained(tmp_path) == frozenset()
    save_state(tmp_path, {"workers": [{"name": "w-1", "peer": ALICE.peer_id}]})
    assert main(["drain", "w-2", "--data-dir", str(tmp_path)]) == 2
    assert "known: w-1" in capsys.readouterr().err
    assert main(["drain", "w-1", "--data-dir", str(tmp_path)]) == 0
    drain(tmp_path, BOB.peer_id, undo=False)
    assert read_drained(tmp_path) == {"w-1", BOB.peer_id}
    assert main(["drain", "w-1", "--undo", "--data-dir", str(tmp_path)]) == 0
    assert read_drained(tmp_path) == {BOB.peer_id}
    (tmp_path / "drained.json").write_text("{")
    assert main(["drain", "w-1", "--data-dir", str(tmp_path)]) == 2
    assert "delete it" in capsys.readouterr().err


def test_a_state_that_was_saved_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "unix_s": 0.0,
        "interval_s": 5.0,
        "learner": ALICE.peer_id,
        "reachable": True,
        "why": "nothing cheaper",
        "problem": "",
        "report": REPORT.model_dump(exclude={"workers"}),
        "plan": 3,
        "depth": 2,
        "depth_why": "as little as the links allow",
        "predicted": None,
        "cost_per_h": 0.5,
        "workers": [],
    }
    save_state(tmp_path, state)
    assert load_state(tmp_path) == json.loads(json.dumps(state))
    assert main(["workers", "--data-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "the coordinator does not run" in told
    assert "no workers" in told
    assert main(["workers", "--json", "--data-dir", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == 3
