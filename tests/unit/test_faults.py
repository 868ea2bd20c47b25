"""Plans of faults: drawn from a seed, within their time, to as many hosts as said."""

from random import Random

import pytest

from swarm.simulation.network_faults import KINDS, Fault, draw_faults, plan

HOSTS = range(10)


def test_a_seed_gives_one_plan_and_another_seed_another() -> None:
    fault = Fault(kind="crash", every_s=20.0, for_s=(1.0, 5.0), spread_s=10.0)
    plans = [plan([fault], HOSTS, 100.0, Random(seed)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize("kind", KINDS)
def test_faults_keep_to_their_time_and_share(kind: str) -> None:
    fault = Fault(kind=kind, at_s=5.0, every_s=20.0, for_s=(2.0, 30.0), share=0.3)  # type: ignore[arg-type]
    events = plan([fault], HOSTS, 100.0, Random(1))
    assert events == sorted(events, key=lambda event: (event.at_s, event.hosts))
    assert {event.at_s for event in events} == {5.0, 25.0, 45.0, 65.0, 85.0}
    assert all(event.at_s + 2.0 <= event.until_s <= 100.0 for event in events)
    for at_s in (5.0, 85.0):
        hit = [host for event in events if event.at_s == at_s for host in event.hosts]
        assert len(hit) == len(set(hit)) == 3
    if kind == "partition":
        assert all(len(event.hosts) == 3 for event in events)


def test_a_fault_hits_at_least_one_host_and_once_is_once() -> None:
    (event,) = plan([Fault(kind="clog", at_s=1.0, share=0.01)], HOSTS, 100.0, Random(1))
    assert len(event.hosts) == 1
    assert (event.at_s, event.until_s) == (1.0, 11.0)


def test_each_kind_is_left_out_of_about_half_of_all_runs() -> None:
    drawn = [draw_faults(Random(seed), 100.0) for seed in range(400)]
    for kind in KINDS:
        share = sum(any(fault.kind == kind for fault in faults) for faults in drawn) / len(drawn)
        assert share == pytest.approx(0.5, abs=0.08)
    assert () in drawn
