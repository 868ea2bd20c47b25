"""The adversarial search: a few seeds, those that once failed, and proof that each rule bites."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from node.simulation import simulate as simulate_module
from node.simulation.scenario import CHAOS, GANG, Scenario, SwarmTable, chaos_scenario
from node.simulation.simulate import SimulatedPolicy, replay_of, simulate
from node.simulation.simulation_report import Replay, Report
from swarm.errors import Reject, RequestRefused
from swarm.exchange.exchange_service import Exchange
from swarm.exchange.fetching import Fetcher
from swarm.exchange.pool import Pool
from swarm.identity import PeerId
from swarm.limits.address_blocks import block_of
from swarm.peers import reputation
from swarm.peers.connection_gater import ConnectionGater
from swarm.simulation import invariants as bounds
from swarm.simulation import invariants as invariants_module
from swarm.simulation.delivery import PAIRS_MIN
from swarm.simulation.lies import CATALOGUE
from swarm.simulation.links import draw_ips
from swarm.simulation.network_faults import KINDS
from swarm.transport.memory.network import RUNS_ON
from swarm.wire import codec

CASES = tomllib.loads((Path(__file__).parent / "chaos_cases.toml").read_text())["cases"]
SEEDS = (pytest.param(101, marks=pytest.mark.quick), 102, 112, 113)
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
    assert not report.shortfalls, report.replay.line


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["seed"]))
def test_what_was_found_stays_found(case: dict[str, Any]) -> None:
    report = simulate(replay_of(CHAOS, case["seed"]))
    assert not report.violations, case["found"]
    assert not report.shortfalls, case["found"]


def test_seeds_differ_in_their_faults_and_some_are_calm() -> None:
    plans = [simulate_module.planned_faults(replay_of(CHAOS, seed)) for seed in range(120)]
    kinds = [frozenset(event.kind for event in events) for events in plans]
    assert frozenset() in kinds
    assert set.union(*map(set, kinds)) == set(KINDS)
    assert len(set(kinds)) > 15
    assert {chaos_scenario(seed).liars for seed in range(60)} == {0, 1, GANG}


# --- each rule bites ------------------------------------------------------------------------


def rules_broken(report: Report) -> set[str]:
    return {violation.rule for violation in report.violations}


def test_without_a_planted_fault_no_rule_is_broken() -> None:
    report = run_small(liars=1)
    assert not report.violations
    assert report.rejected
    assert report.deliveries.ratio == 1.0
    assert report.bans["peer"]
    assert report.deliveries.due >= PAIRS_MIN
    assert report.reach_pairs > 0
    assert not report.shortfalls


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
    monkeypatch.setattr(
        ConnectionGater, "_good", lambda self, peer: self._bad(peer, Reject.MALFORMED)
    )
    assert "ban" in rules_broken(run_small())


def test_a_household_that_is_banned_for_one_of_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reputation, "BLOCK_BAN_AT", reputation.BAN_AT)
    report = run_small(liars=1)
    assert rules_broken(report) == {"ban"}
    assert "with 1 liars in it" in str(report.violations[0])


def test_a_block_full_of_liars_is_banned_and_costs_its_honest_host_no_more() -> None:
    report = run_small(nodes=4, liars=GANG, liars_share_block=True, duration_s=60.0)
    assert not report.violations
    assert report.bans["block"] >= 3
    assert report.bans["peer"]
    innocent = 3  # by whom and of whom nothing is judged: who bans its block closes its connections
    assert innocent not in report.deliveries.due_at
    assert set(report.deliveries.due_at) == {0, 1, 2}
    assert report.deliveries.ratio == 1.0


def test_one_of_a_few_hosts_shares_a_block_with_another() -> None:
    """So the rule about households is looked at in runs like these."""
    blocks = [block_of(ip) for ip in draw_ips(4, Random("1/addresses"))]
    assert len(set(blocks)) == 3


def test_a_group_that_never_comes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Fetcher, "run", never)
    report = run_small()
    assert rules_broken(report) == {"reach"}
    assert report.deliveries.ratio == 0.0


def test_a_run_that_leaves_nothing_to_judge_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_module, "still_on_offer", lambda *_: [])
    report = run_small()
    assert rules_broken(report) == {"reach"}
    assert report.reach_pairs == 0


def test_a_host_that_stops_fetching_is_below_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    real, deaf = Fetcher.run, []

    async def run(self: Fetcher, *args: Any, **kwargs: Any) -> None:
        if not deaf:
            deaf.append(RUNS_ON.get())
        if RUNS_ON.get() == deaf[0]:
            await trio.sleep_forever()
        await real(self, *args, **kwargs)

    monkeypatch.setattr(Fetcher, "run", run)
    report = run_small(nodes=4, duration_s=60.0)
    assert any("due at host" in line for line in report.shortfalls)


def test_a_host_that_stops_serving_is_below_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    real, mute = Exchange._serve_groups, []

    async def refuse(self: Exchange, peer: PeerId, payload: bytes) -> bytes:
        if not mute:
            mute.append(self)
        if self is mute[0]:
            raise RequestRefused("not today")
        return await real(self, peer, payload)

    monkeypatch.setattr(Exchange, "_serve_groups", refuse)
    report = run_small(nodes=4, duration_s=60.0)
    assert any("shared by host" in line for line in report.shortfalls)


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
    "name",
    [
        "AddressBook.entries",
        "AdvertCache._by_producer[]",
        "Quotas._buckets",
        "Reputation._accounts",
    ],
)
def test_a_collection_over_its_own_limit_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With one limit set below what is normal, it and no other is broken."""
    monkeypatch.setattr(bounds, "LIMITS", {**bounds.LIMITS, name: 0})
    report = run_small(liars=1)
    assert rules_broken(report) == {"collections"}
    assert all(f" {name} has " in str(violation) for violation in report.violations)


def test_a_collection_that_is_not_named_may_hardly_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {name: limit for name, limit in bounds.LIMITS.items() if name != "Quotas._buckets"}
    monkeypatch.setattr(bounds, "LIMITS", rest)
    assert rules_broken(run_small(nodes=6)) == {"collections"}


def test_more_bytes_than_a_budget_allows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    watch: Callable[..., Any] = invariants_module.ByteWatch
    monkeypatch.setattr(simulate_module, "ByteWatch", lambda *_: watch(10.0, 10.0, 10.0))
    assert rules_broken(run_small()) == {"budget"}
