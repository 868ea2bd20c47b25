"""The adversarial search: a few seeds, those that once failed, and proof that each rule bites."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from node import simulate as simulate_module
from node.scenario import CHAOS, Scenario, SwarmTable, chaos_scenario
from node.simulate import SimulatedPolicy, replay_of, simulate
from node.simulation_report import Replay, Report
from swarm import codec
from swarm.fetching import Fetcher
from swarm.pool import Pool
from swarm.simulation import invariants as invariants_module
from swarm.simulation.lies import CATALOGUE
from swarm.warden import Warden

CASES = tomllib.loads((Path(__file__).parent / "chaos_cases.toml").read_text())["cases"]
SEEDS = (101, 102, 112, 113)
SMALL = Scenario(
    title="small",
    nodes=3,
    profile="lan",
    duration_s=30.0,
    settle_s=10.0,
    swarm=SwarmTable(group_size=4, group_bytes=1024, generate_s=2.0, train_s=1.0),
)


def run_small(**changes: Any) -> Report:
    scenario = SMALL.model_copy(update=changes)
    return simulate(Replay("small", scenario, scenario.nodes, 1, scenario.profile))


@pytest.mark.parametrize("seed", SEEDS)
def test_seed(seed: int) -> None:
    report = simulate(replay_of(CHAOS, seed))
    assert not report.violations, report.replay.line


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["seed"]))
def test_what_was_found_stays_found(case: dict[str, Any]) -> None:
    report = simulate(replay_of(CHAOS, case["seed"]))
    assert not report.violations, case["found"]


def test_seeds_differ_in_their_faults_and_some_are_calm() -> None:
    plans = [simulate_module.planned_faults(replay_of(CHAOS, seed)) for seed in range(60)]
    kinds = [frozenset(event.kind for event in events) for events in plans]
    assert frozenset() in kinds
    assert set.union(*map(set, kinds)) == {"crash", "pause", "partition", "clog", "bad_link"}
    assert len(set(kinds)) > 15
    assert {chaos_scenario(seed).liars for seed in range(60)} == {0, 1}


# --- each rule bites ------------------------------------------------------------------------


def rules_broken(report: Report) -> set[str]:
    return {violation.rule for violation in report.violations}


def test_without_a_planted_fault_no_rule_is_broken() -> None:
    report = run_small(liars=1)
    assert not report.violations
    assert report.rejected
    assert report.delivery_ratio == 1.0


def one_lie(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lies = [lie for lie in CATALOGUE if lie.name == name]
    assert lies
    monkeypatch.setattr(simulate_module, "CATALOGUE", lies)


def test_a_record_with_a_wrong_signature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one_lie(monkeypatch, "signature")
    monkeypatch.setattr(codec, "verify", lambda *_: None)
    report = run_small(liars=1)
    assert rules_broken(report) == {"record"}
    assert "mis-signed" in str(report.violations[0])


def test_a_record_out_of_its_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lies = [lie for lie in CATALOGUE if lie.reason in ("expired", "future")]
    monkeypatch.setattr(simulate_module, "CATALOGUE", lies)
    monkeypatch.setattr(codec, "check_times", lambda *_: None)
    broken = {str(v).rpartition(": ")[2] for v in run_small(liars=1).violations}
    assert broken & {"expired", "of the future", "lives too long"}


def test_a_group_that_is_trained_on_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "mark_trained", lambda *_: None)
    assert rules_broken(run_small()) == {"trainer"}


def test_an_honest_host_that_is_banned_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Warden, "is_banned", lambda *_: True)
    assert "ban" in rules_broken(run_small())


def test_a_group_that_never_comes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Fetcher, "run", never)
    report = run_small()
    assert rules_broken(report) == {"reach"}
    assert report.delivery_ratio == 0.0


def test_a_pool_over_its_bounds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = simulate_module.pool_limits
    monkeypatch.setattr(
        simulate_module, "pool_limits", lambda config: replace(real(config), groups_max=4)
    )
    assert not rules_broken(run_small(settle_s=0.0))
    monkeypatch.setattr(Pool, "_make_room", lambda *_, **__: None)
    assert rules_broken(run_small(settle_s=0.0)) == {"pool"}


def test_a_node_that_ends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        await trio.lowlevel.checkpoint()
        raise KeyError("a bug")

    monkeypatch.setattr(SimulatedPolicy, "train", fail)
    report = run_small(settle_s=0.0)
    assert rules_broken(report) == {"node", "reach"}
    assert "KeyError" in str(report.violations[0])


@pytest.mark.parametrize(
    ("constant", "rule"), [("COLLECTION_MAX", "collections"), ("BUDGET_BYTES", "budget")]
)
def test_other_bounds_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, constant: str, rule: str
) -> None:
    """With a bound set below what is normal, each of these rules is broken."""
    if constant == "COLLECTION_MAX":
        monkeypatch.setattr(invariants_module, constant, 8)
        assert rules_broken(run_small(nodes=6)) == {rule}
        return
    watch: Callable[..., Any] = invariants_module.ByteWatch
    monkeypatch.setattr(simulate_module, "ByteWatch", lambda *_: watch(10.0, 10.0, 10.0))
    assert rules_broken(run_small()) == {rule}
