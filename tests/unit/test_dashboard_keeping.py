"""What a page has seen survives a restart: curves, and nodes that were there."""

import json
from typing import Any

import pytest

from swarm.identity import Identity
from swarm.telemetry.dashboard.listening import FILE_BYTES_MAX, kept, restore
from swarm.telemetry.dashboard.page_state import SHOWN_S, PageState, ReportSource
from swarm.telemetry.fleet_view import Gone, Watch
from tests.dashboard_samples import NOW_S, signed

HERE, LEFT = Identity(b"h" * 32), Identity(b"l" * 32)
SOURCE = ReportSource("mqtt://127.0.0.1:1883")
SECONDS = 300


def watched() -> tuple[Watch, PageState]:
    """Five minutes of two nodes, of which one left after one."""
    watch, state = Watch(), PageState()
    for second in range(SECONDS):
        now_s = NOW_S + second
        for node, until in ((HERE, SECONDS), (LEFT, 60)):
            if second < until:
                told = {"sequence": second, "sent_at_s": now_s, "metrics": {"own_reward": 0.5}}
                watch.take(*signed(node, **told), now_s)
        state.look(watch.nodes(now_s), {}, SOURCE, now_s)
    return watch, state


def page(watch: Watch, state: PageState, now_s: float) -> dict[str, Any]:
    return state.look(watch.nodes(now_s), {}, SOURCE, now_s)


def test_another_start_goes_on_with_curves_and_nodes() -> None:
    content = kept(*watched(), NOW_S + SECONDS)
    watch, state = Watch(), PageState()
    again_s = NOW_S + SECONDS + 40.0  # longer than a node may be silent
    assert restore(content, watch, state, again_s)
    shown = page(watch, state, again_s)
    before = page(*watched(), NOW_S + SECONDS)
    recent = shown["history"]["recent"]
    assert recent["t"][:-1] == before["history"]["recent"]["t"][:-1]  # and a point of now
    assert recent["reward"][:-1] == before["history"]["recent"]["reward"][:-1]
    folded = shown["history"]["all"]
    assert folded["t"][:-1] == before["history"]["all"]["t"][:-1]
    # Nobody listened: the one that was there is not gone yet, and the other one is
    gone = {node.report.peer_id: node.gone for node in watch.nodes(again_s)}
    assert gone[LEFT.peer_id] is Gone.OFFLINE
    assert shown["headline"]["gone"] == 1
    assert page(watch, state, again_s + 11.0)["headline"]["gone"] == 2
    # What comes now is newer, and what nobody heard meanwhile is not lost
    report = signed(HERE, sequence=SECONDS + 40, sent_at_s=again_s + 12.0)
    assert watch.take(*report, again_s + 12.0) is not None
    assert watch.lost == 0
    assert page(watch, state, again_s + 12.0)["headline"]["gone"] == 1


def test_old_reports_are_not_taken_for_new_ones_after_a_restart() -> None:
    content = kept(*watched(), NOW_S + SECONDS)
    watch = Watch()
    assert restore(content, watch, PageState(), NOW_S + SECONDS)
    old = signed(HERE, sequence=5, sent_at_s=NOW_S + 5)
    assert watch.take(*old, NOW_S + SECONDS) is None


def test_who_is_not_shown_is_not_kept_and_other_runs_are_not_taken() -> None:
    watch, state = watched()
    assert json.loads(kept(watch, state, NOW_S + SECONDS + SHOWN_S))["nodes"] == []
    other = Watch("another-run")
    assert restore(kept(watch, state, NOW_S + SECONDS), other, PageState(), NOW_S + SECONDS)
    assert other.nodes(NOW_S + SECONDS) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(form=1),
        lambda told: told.update(unix_s=NOW_S * 2),
        lambda told: told.update(unix_s="soon"),
        lambda told: told.pop("curves"),
        lambda told: told["curves"]["sums"].update(names=["t", "other"]),
        lambda told: told["curves"]["sums"]["recent"][0].pop(),
        lambda told: told["curves"]["sums"]["all"].update(rows=[[0.0] * 11] * 9_999),
        lambda told: told["curves"]["sums"]["all"].update(per_point="x"),
        lambda told: told["nodes"][0]["report"].pop("peer_id"),
        lambda told: told.update(nodes=7),
    ],
)
def test_a_file_of_another_form_begins_anew(change: Any) -> None:
    told = json.loads(kept(*watched(), NOW_S + SECONDS))
    change(told)
    watch, state = Watch(), PageState()
    assert not restore(json.dumps(told).encode(), watch, state, NOW_S + SECONDS)
    assert page(watch, state, NOW_S + SECONDS)["history"]["recent"]["t"] == [NOW_S + SECONDS]
    assert watch.nodes(NOW_S + SECONDS) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b" " * (FILE_BYTES_MAX + 1)])
def test_what_is_no_such_file_begins_anew(content: bytes) -> None:
    assert not restore(content, Watch(), PageState(), NOW_S)
