"""Each alarm: that it fires when it should, and does not where all is well."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from coordinator.cli import parser as coordinator_parser
from node.cli import whole_parser
from node.config import NodeConfig
from node.observe.alarms import (
    CHECKS,
    DISK_CRITICAL_BYTES,
    DISK_FREE_BYTES_MIN,
    DOMINATED_GROUPS_MIN,
    FUTURE_PEERS_MIN,
    HISTORY_S,
    MEMORY_BYTES_MIN,
    PATIENCE_S,
    REJECTS_MIN,
    ROUNDS_KEPT,
    ROUNDS_MIN,
    alarms_of,
)
from swarm.telemetry.reports import (
    ADVICE,
    ALARMS_MAX,
    ALONE_ADVICE,
    Alarm,
    NodeReport,
    PeerTraffic,
    WorkerRow,
)
from tests.architecture.test_cli_surface import surface

SLOW_S = 300.0  # a round
LOOK_S = 2.0
At = Callable[[int], dict[str, Any]]


def history(at: At, count: int = 10, **fields: Any) -> list[NodeReport]:
    """Reports every ten seconds; `at` gives the fields of each."""
    common: dict[str, Any] = {
        "peer_id": "p",
        "run_id": "r",
        "role": "node",
        "instance": "i",
        "interval_s": 10.0,
    }
    return [
        NodeReport(**(common | {"sequence": i, "sent_at_s": 10.0 * i} | fields | at(i)))
        for i in range(count)
    ]


def kinds(reports: Sequence[NodeReport]) -> set[Alarm]:
    return {each.kind for each in alarms_of(reports)}


def node(**metrics: Callable[[int], float] | float) -> At:
    """A node whose metrics are these; by default one that shares well."""
    usual: dict[str, Any] = {
        "peers": 3,
        "round": lambda i: i,
        "accepted_total": lambda i: 2 * i,
        "external_groups": 4,
        "external_groups_wanted": 4,
        "disk_free_bytes": DISK_FREE_BYTES_MIN,
        "memory_available_bytes": MEMORY_BYTES_MIN,
    }

    def at(i: int) -> dict[str, Any]:
        values = {n: v(i) if callable(v) else v for n, v in (usual | metrics).items()}
        return {"metrics": {name: float(value) for name, value in values.items()}}

    return at


def learner(version: Callable[[int], int] | None = None, **metrics: float) -> At:
    """A learner with three workers; `version`: of one of them."""
    usual = {
        "idle_ratio": 0.1,
        "staleness_mean_steps": 1.5,
        "staleness_bound_steps": 4.0,
        "queued_staleness_max_steps": 3.0,
    }

    def at(i: int) -> dict[str, Any]:
        newest = 10 + i
        versions = [newest, newest - 1, newest if version is None else version(newest)]
        return {
            "metrics": usual
            | {"round": float(i), "published_version": float(newest)}
            | {name: float(value) for name, value in metrics.items()},
            "workers": tuple(
                WorkerRow(name=f"w{n}", phase="working", version=v, admitted=5 * i)
                for n, v in enumerate(versions)
            ),
        }

    return at


def shares(*rises: int) -> At:
    """Peers of whom so many groups are trained on in each interval."""

    def at(i: int) -> dict[str, Any]:
        peers = tuple(
            PeerTraffic(peer_id=f"p{n}", groups_trained=i * rise) for n, rise in enumerate(rises)
        )
        return node()(i) | {"peers": peers}

    return at


def works(*rises: int) -> At:
    """Workers of whom so many groups are admitted in each interval."""

    def at(i: int) -> dict[str, Any]:
        workers = tuple(
            WorkerRow(name=f"w{n}", peer_id=f"w{n}", phase="idle", version=10 + i, admitted=i * r)
            for n, r in enumerate(rises)
        )
        return learner()(i) | {"workers": workers}

    return at


def rejects(reason: str, each: float, accepted: float = 0.0) -> At:
    def at(i: int) -> dict[str, Any]:
        fields = node(accepted_total=accepted * i + i)(i)
        return fields | {"labelled": {"rejected_total": {reason: each * i, "expired": 7.0}}}

    return at


def turned_away(reason: str, each: float) -> At:
    """A node at whose door so many newcomers are refused in each interval."""

    def at(i: int) -> dict[str, Any]:
        fields = node(connections=256, connections_max=256, largest_origin_connections=250)(i)
        return fields | {"labelled": {"turned_away_total": {reason: each * i}}}

    return at


def dates(fast: int, right: int, each: int = 3) -> At:
    """Peers whose clocks are fast, seen from here, and peers whose groups are accepted."""

    def at(i: int) -> dict[str, Any]:
        peers = [
            PeerTraffic(peer_id=f"f{n}", rejected=each * i, future=each * i) for n in range(fast)
        ]
        peers += [PeerTraffic(peer_id=f"r{n}", groups_accepted=each * i) for n in range(right)]
        return node()(i) | {"peers": tuple(peers)}

    return at


def learns(
    informative: Callable[[int], float] | float = 0.0,
    *,
    groups: int = 4,
    unread: float = 0.0,
    right: float = 0.0,
    cut: float = 0.0,
    thoughts_cut: float = 0.0,
) -> At:
    """A node with so many informative groups so far; shares of its completions, eight a group."""
    made = 8 * groups
    return node(
        groups_total=lambda i: groups * i,
        informative_groups_total=informative,
        completions_total=lambda i: made * i,
        unread_completions_total=lambda i: unread * made * i,
        right_completions_total=lambda i: right * made * i,
        cut_completions_total=lambda i: cut * made * i,
        cut_thoughts_total=lambda i: thoughts_cut * made * i,
    )


LEARNER = {"role": "learner"}


def falls(returns: Callable[[int], float]) -> At:
    """A node whose policy went back so many times."""
    return node(returns_total=returns, rate_share_ratio=0.5)


FIRES: list[tuple[Alarm, At, dict[str, Any]]] = [
    (Alarm.NOT_SHARING, node(accepted_total=9), {}),
    (Alarm.NO_FOREIGN, node(external_groups=0), {}),
    (Alarm.LEARNER_STARVING, learner(idle_ratio=0.6), LEARNER),
    (Alarm.STALENESS_NEAR_BOUND, learner(staleness_mean_steps=3.3), LEARNER),
    (Alarm.STALENESS_NEAR_BOUND, learner(queued_staleness_max_steps=5), LEARNER),
    (Alarm.ONE_PRODUCER, shares(10, 1, 0), {}),
    (Alarm.ONE_PRODUCER, works(10, 1, 0), LEARNER),
    (Alarm.REJECT_STORM, rejects("malformed", REJECTS_MIN / 5), {}),
    (Alarm.DISK_LOW, node(disk_free_bytes=DISK_FREE_BYTES_MIN - 1), {}),
    (Alarm.MEMORY_LOW, node(memory_available_bytes=MEMORY_BYTES_MIN - 1), {}),
    (Alarm.CLOCK_SKEW, dates(FUTURE_PEERS_MIN, FUTURE_PEERS_MIN - 1), {}),
    (Alarm.VERSION_SPLIT, learner(version=lambda newest: newest - 5), LEARNER),
    (Alarm.REFUSING_NEWCOMERS, turned_away("full", 2), {}),
    (Alarm.REFUSING_NEWCOMERS, turned_away("too_many_of_one_block", 2), {}),
    (Alarm.NOTHING_TO_LEARN, learns(informative=7, right=0.5), {}),  # none since long ago
    (Alarm.CUT_THOUGHTS, learns(right=0.5, thoughts_cut=0.2), {}),
    (Alarm.LAGGING_VERSION, learner(version_lag_ratio=0.6), LEARNER),
    (Alarm.WENT_BACK, falls(lambda i: int(i >= 7)), {}),
]
QUIET: list[tuple[Alarm, At, dict[str, Any]]] = [
    (Alarm.NOT_SHARING, node(), {}),
    (Alarm.NOT_SHARING, node(accepted_total=9, peers=lambda i: int(i > 5)), {}),  # just came
    (Alarm.NOT_SHARING, node(accepted_total=9, round=3), {}),  # nobody has made a round
    (Alarm.NOT_SHARING, node(accepted_total=9, external_groups_wanted=0), {}),
    (Alarm.NO_FOREIGN, node(external_groups=lambda i: int(i == 4)), {}),
    (Alarm.NO_FOREIGN, node(external_groups=0, external_groups_wanted=0), {}),
    (Alarm.NO_FOREIGN, node(external_groups=0, round=lambda i: i // 5), {}),
    (Alarm.LEARNER_STARVING, learner(), LEARNER),
    (Alarm.LEARNER_STARVING, learner(idle_ratio=0.9), {"role": "worker"}),
    (Alarm.STALENESS_NEAR_BOUND, learner(), LEARNER),
    (Alarm.STALENESS_NEAR_BOUND, learner(staleness_bound_steps=0), LEARNER),
    (Alarm.ONE_PRODUCER, shares(10, 9, 9), {}),
    (Alarm.ONE_PRODUCER, shares(10, 1), {}),  # of two, one always does
    (Alarm.ONE_PRODUCER, shares((DOMINATED_GROUPS_MIN - 1) // 9, 0, 0), {}),
    (Alarm.ONE_PRODUCER, works(3, 3, 3), LEARNER),
    (Alarm.REJECT_STORM, rejects("malformed", 1), {}),
    (Alarm.REJECT_STORM, rejects("malformed", 10, accepted=10), {}),
    (Alarm.DISK_LOW, node(), {}),
    (Alarm.MEMORY_LOW, node(), {}),
    (Alarm.CLOCK_SKEW, rejects("expired", 5), {}),
    (Alarm.CLOCK_SKEW, dates(1, 0, each=500), {}),  # one fast clock, and nobody else
    (Alarm.CLOCK_SKEW, dates(FUTURE_PEERS_MIN - 1, 0), {}),
    (Alarm.CLOCK_SKEW, dates(FUTURE_PEERS_MIN, FUTURE_PEERS_MIN), {}),  # no majority
    (Alarm.CLOCK_SKEW, dates(FUTURE_PEERS_MIN, 0, each=0), {}),  # long ago
    (Alarm.REFUSING_NEWCOMERS, turned_away("full", 0), {}),
    (Alarm.REFUSING_NEWCOMERS, turned_away("banned_peer", 50), {}),
    (Alarm.VERSION_SPLIT, learner(), LEARNER),
    (Alarm.VERSION_SPLIT, learner(version=lambda v: 0 if v == 12 else v), LEARNER),
    (Alarm.NOTHING_TO_LEARN, learns(informative=lambda i: i, unread=0.9), {}),
    (Alarm.NOTHING_TO_LEARN, learns(informative=lambda i: i // 5), {}),  # one in five rounds
    (Alarm.NOTHING_TO_LEARN, learns(groups=1), {}),  # too few to tell
    (Alarm.NOTHING_TO_LEARN, node(), {}),
    (Alarm.CUT_THOUGHTS, learns(right=0.5, thoughts_cut=0.1), {}),
    (Alarm.CUT_THOUGHTS, node(), {}),
    (Alarm.LAGGING_VERSION, learner(version_lag_ratio=0.4), LEARNER),
    (Alarm.LAGGING_VERSION, node(version_lag_ratio=lambda i: 0.9 if i > 10 else 0.1), {}),
    (Alarm.LAGGING_VERSION, node(), {}),
    (Alarm.WENT_BACK, falls(lambda i: 0), {}),
    (Alarm.WENT_BACK, falls(lambda i: 1), {}),  # long ago
    (Alarm.WENT_BACK, node(), {}),
]


@pytest.mark.parametrize(("alarm", "at", "fields"), FIRES, ids=[str(f[0]) for f in FIRES])
def test_an_alarm_fires(alarm: Alarm, at: At, fields: dict[str, Any]) -> None:
    found = [each for each in alarms_of(history(at, **fields)) if each.kind is alarm]
    assert len(found) == 1
    assert found[0].text
    assert found[0].advice == ADVICE[alarm]


@pytest.mark.parametrize(
    ("at", "reason", "advice"),
    [
        (learns(unread=1.0), "; 100% of the completions have no answer in the run", "format"),
        (
            learns(unread=0.75, cut=1.0),
            "; 100% of the completions were cut by the token limit, and 75% have no answer",
            "max_new_tokens",
        ),
        (learns(right=1.0), "; 100% of the answers are right", "harder"),
        (learns(cut=1.0, right=1.0), "; 100% of the answers are right", "harder"),
        (learns(unread=0.25), "; 0% of the answers are right", "easier"),
        (learns(right=0.5), "all rewards are alike", "swarm-node samples"),
    ],
)
def test_why_nothing_can_be_learned_is_said(at: At, reason: str, advice: str) -> None:
    (found,) = (each for each in alarms_of(history(at)) if each.kind is Alarm.NOTHING_TO_LEARN)
    assert found.level == "critical"
    assert found.text.startswith("nothing can be learned here: in each of the last ")
    assert reason in found.text
    assert advice in found.advice


@pytest.mark.parametrize(
    ("returns", "times"), [(lambda i: int(i > 3), "once"), (lambda i: i // 4, "2 times")]
)
def test_how_often_a_policy_fell_is_said(returns: Callable[[int], float], times: str) -> None:
    (found,) = (each for each in alarms_of(history(falls(returns))) if each.kind is Alarm.WENT_BACK)
    assert found.level == "warning"
    assert found.text == (
        f"the policy fell and went back to its best {times} within 9 rounds; it learns at 50% of "
        "its rate"
    )


@pytest.mark.parametrize(("alarm", "at", "fields"), QUIET, ids=[str(q[0]) for q in QUIET])
def test_an_alarm_is_quiet_where_all_is_well(alarm: Alarm, at: At, fields: dict[str, Any]) -> None:
    assert alarm not in kinds(history(at, **fields))


def test_each_alarm_is_looked_for_and_tested() -> None:
    assert set(CHECKS) == set(Alarm) == {each[0] for each in FIRES} == {each[0] for each in QUIET}
    assert len(Alarm) <= ALARMS_MAX


def test_a_healthy_node_and_a_healthy_learner_have_no_alarm() -> None:
    assert alarms_of(history(node())) == ()
    assert alarms_of(history(learner(), **LEARNER)) == ()
    assert alarms_of([]) == ()
    assert alarms_of(history(lambda i: {"metrics": {}}, 1)) == ()  # it has just begun


def test_critical_ones_come_first() -> None:
    low = history(node(memory_available_bytes=MEMORY_BYTES_MIN - 1, disk_free_bytes=0))
    assert [each.level for each in alarms_of(low)] == ["critical", "warning"]
    assert alarms_of(low)[0].kind is Alarm.DISK_LOW
    assert DISK_CRITICAL_BYTES < DISK_FREE_BYTES_MIN


def test_what_is_long_past_or_of_another_process_does_not_count() -> None:
    storm = history(rejects("malformed", REJECTS_MIN), 4)
    assert Alarm.REJECT_STORM in kinds(storm)
    late = storm[-1].model_copy(update={"sent_at_s": storm[-1].sent_at_s + HISTORY_S + 1})
    assert Alarm.REJECT_STORM not in kinds([*storm, late])
    again = storm[-1].model_copy(update={"instance": "j"})
    assert Alarm.REJECT_STORM not in kinds([*storm[:-1], again])


def test_passing_states_are_given_time() -> None:
    soon = int(PATIENCE_S / 10)
    assert Alarm.NOT_SHARING not in kinds(history(node(accepted_total=9), soon))
    assert Alarm.NOT_SHARING in kinds(history(node(accepted_total=9), soon + 1))


# --- rounds of any length ----------------------------------------------------------------------

Slow = Callable[[float, int], dict[str, float]]


def stood(of: Slow, round_s: float, rounds: int, role: str = "node") -> list[set[Alarm]]:
    """Which alarms stood at each look, with as much of the past as a node keeps; `of` gives the
    metrics by the time and the rounds done."""
    recent: list[NodeReport] = []
    first: list[NodeReport] = []
    found = []
    for n in range(int(rounds * round_s / LOOK_S) + 1):
        at_s = n * LOOK_S
        done = int(at_s // round_s)
        metrics = {"round": float(done)} | of(at_s, done)
        [report] = history(lambda i: {}, 1, role=role, metrics=metrics, sequence=n, sent_at_s=at_s)
        found.append(kinds([*first, *recent, report]))
        recent = [*(r for r in recent if r.sent_at_s > at_s - HISTORY_S), report]
        if not first or first[-1].metrics["round"] != done:
            first = [*first, report][-ROUNDS_KEPT:]
    return found


@pytest.mark.parametrize("round_s", [2.0, 40.0, 120.0, SLOW_S, 3000.0])
@pytest.mark.slow
def test_a_healthy_swarm_has_no_alarm_however_long_its_rounds_are(round_s: float) -> None:
    def of(at_s: float, done: int) -> dict[str, float]:
        theirs = 4.0 * ((at_s + round_s / 2) // round_s)  # of peers that are half a round off
        foreign = 4.0 * (done > 0)
        return {
            "peers": 3,
            "accepted_total": theirs,
            "external_groups": foreign,
            "external_groups_wanted": 4,
        }

    assert set().union(*stood(of, round_s, 10)) == set()


@pytest.mark.parametrize("round_s", [20.0, 60.0, 130.0, SLOW_S])
def test_what_goes_on_for_rounds_is_seen_however_long_they_are(round_s: float) -> None:
    def none_trained_on(at_s: float, done: int) -> dict[str, float]:
        return {"peers": 3, "accepted_total": at_s, "external_groups_wanted": 4}

    def none_accepted(at_s: float, done: int) -> dict[str, float]:
        return {"peers": 3, "external_groups_wanted": 4, "external_groups": 4}

    def starving(at_s: float, done: int) -> dict[str, float]:
        return {"idle_ratio": 0.95} if done else {}

    looks = int(ROUNDS_MIN * round_s / LOOK_S)
    for of, alarm, role in (
        (none_trained_on, Alarm.NO_FOREIGN, "node"),
        (none_accepted, Alarm.NOT_SHARING, "node"),
        (starving, Alarm.LEARNER_STARVING, "learner"),
    ):
        found = stood(of, round_s, ROUNDS_MIN + 5, role)
        assert not any(alarm in each for each in found[:looks])
        assert all(each == {alarm} for each in found[looks + 1 :])


def test_one_slow_step_is_no_starving() -> None:
    def of(at_s: float, done: int) -> dict[str, float]:
        return {"idle_ratio": 1.0 if done == 1 else 0.1} if done else {}

    assert set().union(*stood(of, SLOW_S, 10, "learner")) == set()


def test_who_worked_alone_before_the_others_came_does_not_feed_all() -> None:
    def at(i: int) -> dict[str, Any]:
        made = [10 * min(i, 5), 0, 0] if i < 6 else [50 + i, i, i]
        peers = [PeerTraffic(peer_id=f"p{n}", groups_trained=m) for n, m in enumerate(made)]
        return node()(i) | {"peers": tuple(peers[: 1 if i < 6 else 3])}

    assert Alarm.ONE_PRODUCER not in kinds(history(at))


# --- advice ------------------------------------------------------------------------------------


def test_a_node_without_peers_is_told_another_thing() -> None:
    [alone] = alarms_of(history(node(external_groups=0, peers=0, accepted_total=0)))
    assert alone.kind is Alarm.NO_FOREIGN
    assert alone.advice == ALONE_ADVICE
    [among] = alarms_of(history(node(external_groups=0)))
    assert among.advice == ADVICE[Alarm.NO_FOREIGN]


def test_advice_names_what_there_is() -> None:
    flags = " ".join((surface(whole_parser()) | surface(coordinator_parser())).values()).split()
    advice = " ".join((*ADVICE.values(), ALONE_ADVICE))
    named = re.findall(r"--[a-z][a-z-]*", advice)
    assert "--external" in named
    assert set(named) <= set(flags)
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", advice)) <= set(NodeConfig.model_fields)
    commands = surface(whole_parser()) | surface(coordinator_parser())
    assert set(re.findall(r"`swarm-[a-z]+ ([a-z]+)`", advice)) <= set(commands)
