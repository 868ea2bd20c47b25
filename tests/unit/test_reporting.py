"""From a node's status and records to a report."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from node.observe.node_reports import (
    OTHERS,
    Extras,
    MachineResources,
    Reporter,
    Traffic,
    bitfield,
    bounded,
    broadcast_row,
    worker_rows,
)
from node.observe.records import AnswerCounts, PeerStatus, StepDone, Trouble, WentBack, WorkDone
from swarm.identity import Identity, PeerId
from swarm.leases.coordination import ReportedWorker
from swarm.telemetry.dashboard.version_broadcasts import bits_of, cell_shares
from swarm.telemetry.metrics import METRICS
from swarm.telemetry.reports import (
    CHUNKS_MAX,
    LABELS_MAX,
    NOTES_MAX,
    PEERS_MAX,
    WORKERS_MAX,
    NodeReport,
    decode_report,
    encode_report,
)
from swarm.transport.base import TransportCounters
from swarm.weights.broadcast import Holding
from swarm.weights.hot_swap import Applied
from swarm.weights.weights_service import VersionOutcome
from swarm.wire.messages import REPORT_WORKERS_MAX, ROLLOUTS_PROTOCOL, adverts_topic
from tests.unit.monitor_records import round_done, snapshot, started

NODE = Identity(b"n" * 32)
OTHER = Identity(b"o" * 32).peer_id
RUN = "test-run"
MACHINE = MachineResources(memory_available_bytes=7_000, disk_free_bytes=9_000)

STEP = StepDone(
    step=7,
    version=7,
    published_version=6,
    groups=16,
    shared_groups=4,
    informative_groups=9,
    reward=0.5,
    staleness_mean=1.25,
    staleness_max=3,
    idle_s=1.0,
    train_s=3.0,
    groups_by_worker={},
    buffered_groups=2,
    leased_groups=8,
    discarded_total={"expired": 1},
    trained_tokens_total=5_000,
    loss=0.0,
    grad_norm=1.0,
    clip_fraction=0.0,
    effective_share=None,
    mismatch_k3=None,
    peers=3,
    bytes_in_total=1,
    bytes_out_total=1,
)
WORK = WorkDone(
    batch=3,
    policy_version=5,
    learner_version=6,
    groups=4,
    generated_tokens=600,
    generated_tokens_total=1_800,
    generate_s=3.0,
    wait_s=1.0,
    verdicts_total={},
)


def reporter(role: Any = "node") -> Reporter:
    return Reporter(NODE.peer_id, RUN, role, "test", instance="i", interval_s=2.0)


def traffic(**bytes_in: int) -> Traffic:
    counters = TransportCounters()
    counters.count_in(adverts_topic(RUN), 70, OTHER)
    counters.count_out(ROLLOUTS_PROTOCOL, 30, OTHER)
    return Traffic(counters, (OTHER,))


NO_EXTRAS = Extras()


def make(made: Reporter, extras: Extras = NO_EXTRAS, **changes: Any) -> NodeReport:
    return made.make(snapshot(**changes), traffic(), MACHINE, extras, now_s=50.0, dropped=3)


def test_a_report_has_the_mismatch_where_it_was_measured() -> None:
    measured = make(reporter(), mismatch_k3=0.002, effective_share=0.97).metrics
    assert (measured["mismatch_k3_nats"], measured["effective_sample_ratio"]) == (0.002, 0.97)
    without = make(reporter()).metrics
    assert not {"mismatch_k3_nats", "effective_sample_ratio"} & without.keys()


def test_a_report_has_what_sharing_brought_where_it_can_be_said() -> None:
    said, unsaid = reporter(), reporter()
    for made in (said, unsaid):
        made.note(round_done(9))
    measured = make(said, foreign_gradient=0.4, sharing_per_token=1.9).metrics
    assert (measured["foreign_gradient_ratio"], measured["sharing_per_token_ratio"]) == (0.4, 1.9)
    without = make(unsaid).metrics
    assert not {"foreign_gradient_ratio", "sharing_per_token_ratio"} & without.keys()


def test_a_report_has_the_figures_of_status_traffic_and_round() -> None:
    made = reporter()
    made.note(round_done(9, external_groups=2))
    report = make(made, rejected={"expired": 4}, bytes_by_protocol={"/a": (5, 6)})
    shown = snapshot()
    expected = {
        "peers": 1,
        "adverts_in_total": 1,
        "fetches_total": 1,
        "bytes_in_total": shown.bytes_in,
        "accepted_total": shown.accepted,
        "pool_groups": shown.pool_groups,
        "external_groups": 2,
        "external_groups_wanted": shown.external_groups_wanted,
        "generated_tokens_total": 9_000,
        "round_s": 1.6,
        "memory_bytes": shown.memory_bytes + shown.trainer_memory_bytes,
        "memory_available_bytes": 7_000,
        "disk_free_bytes": 9_000,
        "telemetry_dropped_total": 3,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected)
    assert report.labelled == {
        "protocol_bytes_in_total": {"/a": 5.0},
        "protocol_bytes_out_total": {"/a": 6.0},
        "rejected_total": {"expired": 4.0},
    }
    traded = next(each for each in report.peers if each.peer_id == OTHER)
    assert (traded.bytes_in, traded.bytes_out, traded.connected) == (70, 30, True)


def test_a_report_has_what_validation_came_to() -> None:
    made = reporter()
    made.note(WentBack(10, 12, 0.25, 0.5, 8, 0.5))
    told = make(made, validation_passed=0.25, validation_best=0.5, rate_share=0.5).metrics
    names = ("validation_ratio", "validation_best_ratio", "rate_share_ratio", "returns_total")
    assert [told[name] for name in names] == [0.25, 0.5, 0.5, 1.0]
    assert not set(names[:3]) & set(make(reporter()).metrics)


@pytest.mark.parametrize("role", ["node", "learner", "worker"])
def test_all_that_is_reported_has_a_name_and_travels(role: str) -> None:
    made = reporter(role)
    made.note(round_done(9))
    made.note(STEP)
    made.note(WORK)
    made.note_outcome(VersionOutcome(Applied(5, 5, None, 0.5, 2.0, 1.0, 10, 90), bound_s=1.0))
    report = make(made)
    assert set(report.metrics) | set(report.labelled) <= set(METRICS)
    assert decode_report(encode_report(report, NODE), NODE.peer_id) == report


def test_a_step_and_a_batch_show_what_was_waited() -> None:
    learner, worker = reporter("learner"), reporter("worker")
    learner.note(STEP)
    worker.note(WORK)
    steps, works = make(learner).metrics, make(worker).metrics
    assert (steps["idle_ratio"], works["idle_ratio"]) == (0.25, 0.25)
    assert (steps["round"], steps["staleness_max_steps"]) == (7, 3)
    assert (steps["local_groups"], steps["external_groups"]) == (12, 4)
    assert (works["tokens_per_s"], works["published_version"]) == (200.0, 6)


def test_what_was_not_measured_is_left_out() -> None:
    empty = make(reporter(), own_reward=None, held_out_passed=None)
    assert not {"own_reward", "held_out_ratio", "idle_ratio", "pool_age_s"} & set(empty.metrics)
    instant = replace(WORK, generate_s=0.0, wait_s=0.0)
    made = reporter("worker")
    made.note(instant)
    assert make(made).metrics["idle_ratio"] == 0.0
    assert (
        "disk_free_bytes"
        not in made.make(
            snapshot(), traffic(), MachineResources(1, None), Extras(), now_s=1.0, dropped=0
        ).metrics
    )


def test_the_mean_of_nothing_is_left_out() -> None:
    """As a step's reward is that trained on shared groups alone."""
    made = reporter("learner")
    made.note(replace(STEP, reward=float("nan"), staleness_mean=float("inf")))
    nothing = float("nan")
    extras = Extras({"broadcast_s": nothing}, {"discarded_total": {"late": nothing}})
    report = make(made, extras, own_reward=None)
    assert not {"own_reward", "staleness_mean_steps", "broadcast_s"} & set(report.metrics)
    assert report.labelled["discarded_total"] == {}
    decode_report(encode_report(report, NODE), NODE.peer_id)


def test_a_failed_version_leaves_the_figures_of_the_last() -> None:
    made = reporter("worker")
    made.note_outcome(VersionOutcome(Applied(5, 5, None, 0.5, 2.0, 1.0, 10, 90), bound_s=1.0))
    made.note_outcome(VersionOutcome(Applied(6, 5, "no room")))
    metrics = make(made).metrics
    assert metrics["paused_s"] == 0.5
    assert metrics["broadcast_s"] == 3.0
    assert metrics["broadcast_bound_ratio"] == 2.0
    assert metrics["saved_bytes_total"] == 90


def test_sequences_rise_by_one_and_errors_are_counted() -> None:
    made = reporter()
    made.note(Trouble("it broke"))
    first, second = make(made), make(made)
    assert second.sequence == first.sequence + 1
    assert first.metrics["errors_total"] == 1


def test_figures_of_before_a_restart_from_a_checkpoint_are_gone() -> None:
    made = reporter()
    made.note(round_done(9))
    made.note(started(round_=5))
    assert "round_s" not in make(made).metrics


def test_what_there_was_to_learn_is_counted_over_rounds_and_steps() -> None:
    made = reporter()
    assert "groups_total" not in make(made).metrics
    answers = AnswerCounts(completions=32, unread=3, right=10, cut=2)
    made.note(round_done(1, informative_groups=0, answers=answers))
    made.note(round_done(2, informative_groups=5))  # of an older release
    made.note(replace(STEP, groups=7, informative_groups=1, answers=answers))
    expected = {
        "groups_total": 6 + 6 + 7,
        "informative_groups_total": 6,
        "completions_total": 64,
        "unread_completions_total": 6,
        "right_completions_total": 20,
        "cut_completions_total": 4,
    }
    metrics = make(made).metrics
    assert {name: metrics[name] for name in expected} == expected


def test_extras_enter() -> None:
    rows = worker_rows([ReportedWorker(OTHER, 4, 0.5, 0.0, 1.0, 2.0, 7, 1, 3, 0, 0)])
    holding = Holding(version=5, chunks=3, have=0b101, size_bytes=30, complete=False)
    extras = Extras(
        {"in_flight_groups": 3.0}, {"discarded_total": {"late": 1.0}}, rows, broadcast_row(holding)
    )
    report = make(reporter("learner"), extras)
    assert report.metrics["in_flight_groups"] == 3
    assert report.labelled["discarded_total"] == {"late": 1.0}
    assert (report.workers[0].phase, report.workers[0].admitted) == ("working", 7)
    assert report.broadcast is not None
    assert report.broadcast.have == "a"


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"connected": False}, "gone"),
        ({"standing_by": True}, "standing by"),
        ({"leased": 0}, "idle"),
        ({}, "working"),
    ],
)
def test_a_worker_has_one_phase(changes: dict[str, Any], phase: str) -> None:
    worker = replace(ReportedWorker(OTHER, 4, 0.5, 0.0, 1.0, 2.0, 7, 1, 3, 0, 0), **changes)
    assert worker_rows([worker])[0].phase == phase


def test_workers_that_are_there_are_the_first_rows() -> None:
    """As the learner lists them, those heard of longest ago come first."""
    some = ReportedWorker(OTHER, 4, 0.5, 0.0, 1.0, 2.0, 7, 1, 3, 0, 0)
    gone = [replace(some, connected=False, heard_s=9e3 - n) for n in range(WORKERS_MAX)]
    there = [replace(some, heard_s=50.0 - n) for n in range(44)]
    report = make(reporter("learner"), Extras(workers=worker_rows([*gone, *there])))
    rows = report.workers
    assert report.workers_left_out == 44
    assert len(rows) == WORKERS_MAX
    assert [row.heard_s for row in rows[:44]] == [7.0 + n for n in range(44)]
    assert {row.phase for row in rows[44:]} == {"gone"}


def test_there_are_only_so_many_rows_and_labels() -> None:
    many = [ReportedWorker(OTHER, 4, None, 0.0, 1.0, 2.0, 7, 1, 3, 0, 0)] * REPORT_WORKERS_MAX
    report = make(reporter("learner"), Extras(workers=worker_rows(many)))
    assert len(report.workers) == WORKERS_MAX
    assert report.workers_left_out == REPORT_WORKERS_MAX - WORKERS_MAX
    values = {f"label{i}": float(i) for i in range(LABELS_MAX + 5)}
    kept = bounded(values)
    assert len(kept) == LABELS_MAX
    assert sum(kept.values()) == sum(values.values())
    assert kept[OTHERS] == sum(range(6))
    peers = tuple(PeerStatus(f"p{i}", (), "", 0, 0, {}) for i in range(PEERS_MAX + 9))
    report = make(reporter(), peers=peers, notes=("x" * 900,) * (NOTES_MAX + 1), phase="p" * 90)
    assert len(report.peers) == PEERS_MAX
    assert report.peers[0].peer_id == OTHER  # who has traffic is not left out


@pytest.mark.parametrize(
    ("have", "chunks", "text"),
    [
        (0b1, 1, "8"),
        (0b101, 3, "a"),
        (0b1_0000, 5, "08"),
        (0b1111_1111, 8, "ff"),
        (0, 9, "000"),
    ],
)
def test_a_bitfield_begins_with_the_first_chunk(have: int, chunks: int, text: str) -> None:
    assert bitfield(have, chunks) == text


@pytest.mark.parametrize("chunks", [1, 7, 64, 1_001, CHUNKS_MAX, CHUNKS_MAX + 1, 50_001])
def test_a_bitfield_is_what_each_chunk_says(chunks: int) -> None:
    have = Random(chunks).getrandbits(chunks) | Random(1).getrandbits(chunks)
    each = -(-chunks // CHUNKS_MAX)
    there = f"{have:0{chunks}b}"[::-1]
    marks = [set(there[at : at + each]) == {"1"} for at in range(0, chunks, each)]
    text = bitfield(have, chunks)
    assert bits_of(text)[: len(marks)] == marks
    assert not any(bits_of(text)[len(marks) :])
    assert len(text) == -(-len(marks) // 4)


def test_a_complete_broadcast_is_drawn_without_its_bitfield() -> None:
    row = broadcast_row(Holding(1, 9, 2**9 - 1, 90, complete=True))
    assert row is not None
    assert row.have == ""
    assert cell_shares(row) == [1.0] * 9


def test_a_bit_of_a_large_broadcast_stands_for_several_chunks() -> None:
    chunks = 2 * CHUNKS_MAX + 1  # three chunks a bit
    bits = -(-chunks // 3)
    text = bitfield((1 << chunks) - 1, chunks)
    assert len(text) == -(-bits // 4)
    assert int(text, 16).bit_count() == bits
    lacking = bitfield((1 << chunks) - 1 - (1 << 4), chunks)
    assert int(lacking, 16).bit_count() == bits - 1
    assert lacking[0] == "b"


def test_there_is_no_broadcast_of_nothing() -> None:
    assert broadcast_row(None) is None
    assert broadcast_row(Holding(1, 0, 0, 0, complete=True)) is None


def test_a_peer_that_is_gone_is_told_of_as_gone() -> None:
    gone = PeerStatus(PeerId("gone"), (), "", 2, 1, {"expired": 1, "future": 2})
    row = next(r for r in make(reporter(), peers=(gone,)).peers if r.peer_id == "gone")
    assert (row.connected, row.groups_trained, row.rejected, row.future) == (False, 1, 3, 2)
