"""What the page shows for what is watched, in each of its states."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.observe.event_log import FILE_NAME, EventLog
from node.observe.records import Trouble, VersionPublished
from node.observe.saved_report import write_report
from swarm.identity import Identity
from swarm.telemetry.dashboard.page_state import DashboardState
from swarm.telemetry.reports import (
    Alarm,
    AlarmReport,
    BroadcastReport,
    PeerTraffic,
    Status,
    WorkerRow,
    sealed,
)
from tests.browser.live_page import LivePage, blank_page, figures
from tests.unit.monitor_records import held_out, round_done, started

pytestmark = [pytest.mark.browser, pytest.mark.integration]

FOUR = tuple(Identity.generate() for _ in range(4))
HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>\u202e&amp;'
FOREIGN = "http://192.0.2.1/x.png"
BROKEN = ("net::ERR_", "status of 503")  # what a browser logs of a server that is gone
WIDTHS = [(width, scheme) for width in (1280, 360) for scheme in ("light", "dark")]


def report_four(live: LivePage, round_number: int = 10, **changes: Any) -> None:
    """Each of four nodes reports, fed by the three others."""
    for place, node in enumerate(FOUR):
        peers = tuple(
            PeerTraffic(peer_id=each.peer_id, groups_trained=round_number + 5 * number)
            for number, each in enumerate(FOUR)
            if each is not node
        )
        fields = {
            "metrics": dict(figures(round_number, place)),
            "labelled": {"rejected_total": {"duplicate": 3.0}},
            "peers": peers,
        }
        live.report(node, **(fields | changes))


def rounds(live: LivePage, count: int) -> None:
    """Four nodes report for some rounds, a second each."""
    for number in range(1, count + 1):
        live.now_s += 1.0
        report_four(live, number)


def in_state(page: Any, state: str) -> None:
    page.wait_for_function("state => document.body.dataset.state === state", arg=state)


def reads(page: Any, selector: str, text: str) -> None:
    """The element comes to say this."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)",
        arg=[selector, text],
    )


def figure(page: Any, label: str) -> str:
    return str(page.locator(f'[data-figure="{label}"] .value').inner_text()).replace("\n", " ")


def cells(page: Any, peer: str) -> list[str]:
    """The row of a node."""
    row = page.locator("#node-table tbody tr").filter(has_text=peer[-8:])
    return [str(text).strip() for text in row.locator("td").all_inner_texts()]


def column(page: Any, peer: str, name: str) -> str:
    heads = [
        re.sub(r" [↑↓]$", "", each) for each in page.locator("#node-table th").all_inner_texts()
    ]
    return cells(page, peer)[heads.index(name)]


# --- states ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "scheme"), WIDTHS)
def test_every_state_fits_its_screen(
    open_page: Callable[..., Any], shoot: Callable[..., None], width: int, scheme: str
) -> None:
    def checked(page: Any, state: str) -> None:
        in_state(page, state)
        shoot(page, f"{state}-{width}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    with blank_page() as url:
        checked(open_page(url, width=width, scheme=scheme, allowed=BROKEN), "loading")
    live = LivePage()
    with ExitStack() as running:
        running.enter_context(live.running())
        page = open_page(live.url, width=width, scheme=scheme, allowed=BROKEN)
        checked(page, "empty")
        rounds(live, 12)
        reads(page, "#verdict-text", "All is well")
        checked(page, "live")
        live.broker(connected=False, away_s=14.0)
        checked(page, "stale")
        running.close()
        checked(page, "lost")
        with live.running():
            live.broker(connected=True)
            in_state(page, "live")


def test_an_empty_page_says_how_to_fill_it(live: LivePage, open_page: Callable[..., Any]) -> None:
    page = open_page(live.url)
    in_state(page, "empty")
    assert "--telemetry mqtt://127.0.0.1:1883" in page.inner_text("#verdict-hint")
    assert not page.is_visible("#throughput")


def test_without_a_server_the_page_says_so(open_page: Callable[..., Any]) -> None:
    with blank_page() as url:
        page = open_page(url, allowed=BROKEN)
        in_state(page, "loading")
    in_state(page, "error")
    assert page.inner_text("#verdict-text") == "Not connected"


def test_a_frame_that_it_cannot_read_is_an_error_that_is_shown(
    live: LivePage, open_page: Callable[..., Any]
) -> None:
    page = open_page(live.url)
    in_state(page, "empty")
    context = page.context
    other = context.new_page()
    other.route("**/api/stream", lambda route: route.fulfill(
        content_type="text/event-stream", body='data: {"runs": null}\n\n'
    ))  # fmt: skip
    other.goto(live.url)
    in_state(other, "error")
    assert "failed to show" in other.inner_text("#verdict-text")


# --- figures -----------------------------------------------------------------------------------


def test_what_is_shown_is_what_was_reported(live: LivePage, open_page: Callable[..., Any]) -> None:
    page = open_page(live.url)
    rounds(live, 11)
    reads(page, '[data-figure="Round"]', "11")
    live.now_s += 1.0
    report_four(live, 12)
    reads(page, '[data-figure="Round"]', "12")
    reads(page, '[data-figure="Throughput"]', "460")  # 1.0 + 1.1 + 1.2 + 1.3 times 100 kB
    assert figure(page, "Nodes") == "4"
    assert figure(page, "Throughput").replace(" ", "") == "460kB/s"
    assert figure(page, "Reward") == "0.378"
    assert figure(page, "Refused") == "4.0%"  # 12 of 300
    told = page.inner_text("#verdict-detail")
    assert "2.0 foreign groups of 2.0 wanted, which give 45 % of the gradient." in told
    assert "Sharing brings 1.6 times the groups that teach for each token generated." in told
    for place, node in enumerate(FOUR):
        assert column(page, node.peer_id, "round") == "12"
        assert column(page, node.peer_id, "accepted") == "72"
        assert column(page, node.peer_id, "J") == "2 of 2"
        page.get_by_role("button", name=node.peer_id[-8:]).click()
        told = page.inner_text("tr.detail")
        assert f"{int(1.2e6 * (1 + 0.1 * place)):,} bytes" in told
        assert node.peer_id in told
        page.get_by_role("button", name=node.peer_id[-8:]).click()


def test_every_metric_that_is_reported_is_among_all_figures(
    live: LivePage, open_page: Callable[..., Any]
) -> None:
    page = open_page(live.url)
    report_four(live, 10)
    reads(page, "#verdict-text", "All is well")
    page.get_by_text("All figures").click()
    rows = [row.split("\t") for row in page.inner_text("#figure-table tbody").split("\n")]
    assert {row[0].replace(" ", "_") for row in rows} == set(figures(10))
    shown = {row[0]: row[1:6] for row in rows}
    assert shown["own reward"] == ["share", "0.34", "0.37", "0.40", "4"]
    assert shown["memory bytes"] == ["bytes", "600 MB", "600 MB", "600 MB", "4"]


def test_the_page_follows_without_being_loaded_again(
    live: LivePage, open_page: Callable[..., Any]
) -> None:
    page = open_page(live.url)
    rounds(live, 3)
    reads(page, '[data-figure="Round"]', "3")
    page.evaluate("window.same = true")
    page.locator("#node-filter").fill("training")
    page.locator("#node-filter").focus()
    rounds(live, 7)
    reads(page, '[data-figure="Round"]', "7")
    assert page.evaluate("window.same && document.activeElement.id") == "node-filter"


def test_who_feeds_whom_is_drawn_and_told(live: LivePage, open_page: Callable[..., Any]) -> None:
    page = open_page(live.url)
    report_four(live, 10)
    reads(page, "#map-caption", "12 ways")
    assert page.locator("#map .edge").count() == 12
    page.locator("#map svg").focus()
    page.keyboard.press("ArrowRight")
    first = min(node.peer_id for node in FOUR)
    reads(page, "#map-caption", first[-8:])
    assert page.locator("#map .edge.on").count() == 6
    given = 3 * (10 + 5 * [node.peer_id for node in FOUR].index(first))
    assert f"feeds 3 with {given} groups" in page.inner_text("#map-caption")


def test_curves_are_read_with_the_keys(live: LivePage, open_page: Callable[..., Any]) -> None:
    page = open_page(live.url)
    rounds(live, 3)
    reads(page, '[data-figure="Round"]', "3")
    for number in range(4, 9):  # a frame for each
        live.now_s += 1.0
        report_four(live, number)
        reads(page, '[data-figure="Round"]', str(number))
    chart = page.locator("#throughput-chart svg")
    chart.focus()
    page.keyboard.press("End")
    page.wait_for_selector("#throughput-chart .readout:not([hidden])")
    assert "received 460 kB/s" in page.inner_text("#throughput-chart .readout")
    assert "received 460 kB/s" in str(chart.get_attribute("aria-label"))


def test_tables_are_sorted_and_searched(live: LivePage, open_page: Callable[..., Any]) -> None:
    page = open_page(live.url)
    rounds(live, 2)
    reads(page, '[data-figure="Round"]', "2")
    page.get_by_role("button", name="reward").focus()
    page.keyboard.press("Enter")
    shown = page.locator("#node-table tbody td:first-child").all_inner_texts()
    assert [text.strip() for text in shown] == [node.peer_id[-8:] for node in reversed(FOUR)]
    assert page.locator('th[aria-sort="descending"]').inner_text().startswith("reward")
    page.fill("#node-filter", FOUR[2].peer_id[-8:].lower())
    assert page.locator("#node-table tbody tr").count() == 1


# --- trouble -----------------------------------------------------------------------------------


def test_alarms_come_first_and_with_advice(
    live: LivePage, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    page = open_page(live.url)
    alarm = AlarmReport(
        kind=Alarm.DISK_LOW, level="critical", text="1 GB left", advice="Free some."
    )
    report_four(live, 5)
    live.report(FOUR[1], metrics=dict(figures(6)), alarms=(alarm,))
    reads(page, "#verdict-text", "1 alarm needs attention")
    told = page.inner_text("#alarms")
    assert "1 GB left" in told
    assert "Free some." in told
    assert FOUR[1].peer_id[-8:] in told
    tops = page.evaluate(
        "['alarms', 'figures'].map(id => document.getElementById(id).getBoundingClientRect().top)"
    )
    assert tops[0] < tops[1]
    assert FOUR[1].peer_id[-8:] in page.inner_text("#node-table tbody tr:first-child")
    shoot(page, "alarms")
    live.report(FOUR[1], metrics=dict(figures(7)))
    reads(page, "#verdict-text", "All is well")


def test_a_node_that_falls_silent_is_gone_and_comes_back(
    live: LivePage, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    page = open_page(live.url)
    report_four(live)
    reads(page, "#verdict-text", "All is well")
    live.now_s += 10.5
    for node in FOUR[1:]:
        live.report(node, metrics=dict(figures(11)))
    reads(page, "#verdict-text", "1 node is gone")
    assert column(page, FOUR[0].peer_id, "heard").startswith("gone")
    assert figure(page, "Nodes") == "3"
    shoot(page, "gone")
    live.report(FOUR[0], metrics=dict(figures(11)))
    reads(page, "#verdict-text", "All is well")


def test_of_two_runs_the_page_shows_the_chosen_one(
    live: LivePage, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    page = open_page(live.url, width=420)
    report_four(live)
    reads(page, "#verdict-text", "All is well")
    assert page.is_disabled("#runs")
    alarm = AlarmReport(kind=Alarm.DISK_LOW, level="critical", text="1 GB left", advice="Free it.")
    other = Identity(b"o" * 32)
    live.report(other, run_id="other", metrics=dict(figures(77)), alarms=(alarm,))
    reads(page, "#runs", "other, 1 alarm")
    assert figure(page, "Nodes") == "4"
    assert page.inner_text("#verdict-text") == "All is well"
    assert "one of 2 runs; choose another above" in page.inner_text("#verdict-detail")
    page.select_option("#runs", "other")
    reads(page, "#verdict-text", "1 alarm needs attention")
    assert figure(page, "Nodes") == "1"
    assert figure(page, "Round") == "77"
    assert page.locator("#node-table tbody tr").count() == 1
    live.report(other, run_id="other", metrics=dict(figures(78)))
    reads(page, "#verdict-text", "All is well")
    assert figure(page, "Round") == "78"  # the choice stays
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    shoot(page, "two-runs-420-light")


def test_a_report_of_two_runs_is_read_on_a_narrow_page(
    tmp_path: Path, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    for place, run in enumerate(("one", "two", "two")):
        peer = FOUR[place].peer_id
        life = [
            replace(started(peer), run_id=run), held_out(0, 0.4), round_done(1), held_out(1, 0.5),
            VersionPublished(2, 9, 9, 9, 0.5, 0.1), held_out(2, 0.7),
        ]  # fmt: skip
        ticks = iter(range(1_800_000_000, 1_800_000_100, 5))
        with EventLog(tmp_path / str(place) / FILE_NAME, lambda t=ticks: float(next(t))) as log:
            for record in life:
                log.write(record)
    summary = write_report([tmp_path / str(n) for n in range(3)], tmp_path / "out")
    page = open_page(summary.html.as_uri(), width=420)
    in_state(page, "saved")
    assert page.locator("#node-table tbody tr").count() == 1
    page.select_option("#runs", "two")
    reads(page, "#verdict-detail", "2 language models practised")
    assert page.locator("#node-table tbody tr").count() == 2
    assert page.locator(".waterfall").count() == 1  # those of the other run are gone
    sizes = page.evaluate(
        """() => [...document.querySelectorAll("svg text")].map((text) => {
            const scale = text.getScreenCTM().a;
            return scale * parseFloat(getComputedStyle(text).fontSize);
        })"""
    )
    assert len(sizes) > 10
    assert min(sizes) >= 9.0
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    shoot(page, "saved-420-light")


def test_a_goodbye_is_no_trouble_and_two_runs_are_named(
    live: LivePage, open_page: Callable[..., Any]
) -> None:
    page = open_page(live.url)
    report_four(live)
    reads(page, "#verdict-text", "All is well")
    leaver = FOUR[0]
    said = Status(run_id="sums", instance="1", connection=1, online=False, left=True)
    live.take(f"swarm/sums/{leaver.peer_id}/status", sealed(said, leaver))
    for node in FOUR[1:]:
        live.report(node, metrics=dict(figures(11)))
    page.locator("#figures", has_text="1 left").wait_for()
    assert page.inner_text("#verdict-text") == "All is well"
    assert column(page, leaver.peer_id, "heard").startswith("left")
    live.report(Identity(b"o" * 32), run_id="other", metrics=dict(figures(11)))
    page.locator("#verdict-detail", has_text="one of 2 runs").wait_for()
    page.set_viewport_size({"width": 420, "height": 900})
    hint = "getComputedStyle(document.querySelector('#nodes .scroll')).backgroundAttachment"
    assert page.evaluate(hint) == "local, scroll"


@pytest.mark.parametrize("silent_s", [20.0, 700.0, 7_200.0])  # just now, no news, not shown
def test_a_swarm_that_nobody_hears_of_is_not_well(
    live: LivePage, open_page: Callable[..., Any], silent_s: float
) -> None:
    page = open_page(live.url)
    report_four(live)
    reads(page, "#verdict-text", "All is well")
    live.now_s += silent_s
    reads(page, "#verdict-text", "Nobody reports any more")


def test_where_no_page_can_be_made_the_last_one_is_shown_as_old(
    live: LivePage, open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page(live.url)
    report_four(live)
    reads(page, "#verdict-text", "All is well")
    monkeypatch.setattr(DashboardState, "look", lambda *_: {"number": float("inf")})
    in_state(page, "stale")
    reads(page, "#banner", "what is shown is from then")
    page.wait_for_function(
        "() => /frames failed\\D*[1-9]/.test(document.querySelector('#telemetry-list').textContent)"
    )
    monkeypatch.undo()
    in_state(page, "live")


def test_the_brokers_death_shows_and_heals(live: LivePage, open_page: Callable[..., Any]) -> None:
    page = open_page(live.url)
    report_four(live)
    in_state(page, "live")
    live.broker(connected=False, away_s=3.0)
    in_state(page, "stale")
    assert "does not answer" in page.inner_text("#banner")
    live.broker(connected=True)
    in_state(page, "live")
    assert not page.is_visible("#banner")


def test_texts_of_strangers_stay_text(
    live: LivePage, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    page = open_page(live.url, width=360)
    node = FOUR[0]
    live.report(
        node,
        phase=HOSTILE[:40],
        agent=HOSTILE[:80],
        role="learner",
        metrics=dict(figures(1)),
        labelled={"rejected_total": {HOSTILE[:80]: 3.0}, "protocol_bytes_in_total": {HOSTILE: 1.0}},
        workers=(WorkerRow(name=HOSTILE[:80], phase=HOSTILE[:40]),),
        alarms=(
            AlarmReport(kind=Alarm.DISK_LOW, level="warning", text=HOSTILE * 4, advice=HOSTILE),
        ),
        notes=(HOSTILE, "x" * 400),
    )
    live.take(f"swarm/{HOSTILE}/x/report", b"{}")
    reads(page, "#alarms", "<img src=x")
    reads(page, "#worker-table", "<img src=x")
    reads(page, "#refused-list", "<img src=x")
    page.get_by_role("button", name=node.peer_id[-8:]).click()
    reads(page, "tr.detail", "<img src=x")
    assert page.locator("main img, main script").count() == 0
    assert "\u202e" not in page.inner_text("main")  # it would turn the line around
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    reads(page, "#telemetry-list", "dropped topic")
    shoot(page, "hostile-360-light")


def test_a_script_that_got_in_would_not_run(live: LivePage, open_page: Callable[..., Any]) -> None:
    page = open_page(live.url, allowed=("Content Security Policy", FOREIGN))
    page.evaluate(
        """(foreign) => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
            const image = new Image();
            image.src = foreign;
            document.body.append(image);
        }""",
        FOREIGN,
    )
    in_state(page, "empty")
    assert page.evaluate("window.ran") is None


def test_a_saved_report_is_the_page_and_asks_for_nothing(
    tmp_path: Path, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    peers = [node.peer_id for node in FOUR[:2]]
    lives = [
        [started(peer), held_out(0, 0.4), round_done(1, foreign_by_producer={HOSTILE: 2}),
         round_done(2), held_out(2, 0.6), Trouble(HOSTILE)]
        for peer in peers
    ]  # fmt: skip
    for peer, life in zip(peers, lives, strict=True):
        ticks = iter(range(1_800_000_000, 1_800_000_100, 5))
        with EventLog(tmp_path / peer / FILE_NAME, lambda ticks=ticks: float(next(ticks))) as log:
            for record in (*life, VersionPublished(2, 9, 9, 9, 0.5, 0.1)):
                log.write(record)
    summary = write_report([tmp_path / peer for peer in peers], tmp_path / "out")
    page = open_page(summary.html.as_uri())
    in_state(page, "saved")
    assert "2 nodes in 4 rounds" in page.inner_text("#verdict-detail")
    assert figure(page, "Held-out") == "60.0%"
    assert cells(page, peers[0])[2] == "2"
    assert page.locator(".saved .line").count() == 6  # two nodes in three charts
    assert page.locator(".waterfall .bar").count() == 2
    assert page.locator("main img, main script").count() == 0
    shoot(page, "saved-1280-light")


# --- learners, and many nodes ------------------------------------------------------------------


def test_a_learner_its_workers_and_a_broadcast(
    live: LivePage, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    learner, planner, *workers = FOUR
    page = open_page(live.url)
    rows = tuple(
        WorkerRow(name=f"w{n}", peer_id=each.peer_id, version=8 - n, admitted=9, price_per_h=0.25)
        for n, each in enumerate(workers)
    )
    live.report(
        learner,
        role="learner",
        metrics={**figures(4), "published_version": 8.0, "idle_ratio": 0.12,
                 "staleness_max_steps": 2.0, "staleness_bound_steps": 4.0},
        workers=rows,
    )  # fmt: skip
    live.report(
        planner, role="coordinator", metrics={"predicted_idle_ratio": 0.05, "cost_per_h": 0.5}
    )
    for have, worker in zip(("ff00", "f000"), workers, strict=True):
        on_way = BroadcastReport(
            version=8, chunks=16, have=have, size_bytes=16_000_000, complete=False
        )
        live.report(worker, role="worker", metrics=dict(figures(3)), broadcast=on_way)
    reads(page, "#broadcast-text", "Version 8: 16.0 MB in 16 chunks, complete at 0 of 2 nodes")
    shares = page.locator("#broadcast-rows .share").all_inner_texts()
    assert [text.strip() for text in shares[1:]] == ["25 %", "50 %"]
    reads(page, "#capacity-rows", "5.0 %")
    reads(page, "#capacity-rows", "12.0 %")
    behind = page.locator("#worker-table tbody tr").nth(1).locator("td").nth(4).inner_text()
    assert behind == "1"
    reads(page, '[data-figure="Workers cost"]', "0.50")
    shoot(page, "learner")


def test_a_thousand_nodes_stay_legible(
    live: LivePage, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    many = [Identity.generate() for _ in range(1_000)]
    for place, node in enumerate(many):
        fed = tuple(
            PeerTraffic(peer_id=many[(place + step) % 1_000].peer_id, groups_trained=step)
            for step in (1, 7, 300)
        )
        live.report(node, metrics=dict(figures(9, place % 7)), peers=fed)
    page = open_page(live.url)
    reads(page, "#verdict-detail", "All 1,000 nodes report")
    assert page.locator("#map .dot").count() <= 40
    assert page.locator("#node-table tbody tr").count() == 25
    page.get_by_role("button", name="Show up to 200").click()
    assert page.locator("#node-table tbody tr").count() == 200
    page.fill("#node-filter", many[777].peer_id)
    assert page.locator("#node-table tbody tr").count() == 1
    assert page.evaluate("document.querySelectorAll('*').length") < 12_000
    shoot(page, "thousand")


# --- everybody ---------------------------------------------------------------------------------


def test_reduced_motion_is_respected(open_page: Callable[..., Any]) -> None:
    moving = "getComputedStyle(document.querySelector('.lamp')).animationName"
    with blank_page() as url:
        assert open_page(url, reduced_motion="reduce").evaluate(moving) == "none"
        assert open_page(url, reduced_motion="no-preference").evaluate(moving) != "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(live: LivePage, open_page: Callable[..., Any], scheme: str) -> None:
    """WCAG AA for small text is 4.5."""
    page = open_page(live.url, scheme=scheme)
    report_four(live)
    in_state(page, "live")
    ratios = page.evaluate(
        """() => {
            const light = (text) => {
                const [r, g, b] = text.match(/\\d+/g).map((part) => {
                    const c = part / 255;
                    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const paper = light(getComputedStyle(document.documentElement).backgroundColor);
            const texts = "h1, h2, .soft, dt, dd, th, td, .legend, #link";
            return [...document.querySelectorAll(texts)].map((each) => {
                const ink = light(getComputedStyle(each).color);
                return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
            });
        }"""
    )
    assert len(ratios) > 50
    assert min(ratios) >= 4.5


def test_everything_is_reached_with_the_tab_key_and_has_a_name(
    live: LivePage, open_page: Callable[..., Any]
) -> None:
    page = open_page(live.url)
    report_four(live)
    in_state(page, "live")
    reads(page, "#node-table", FOUR[0].peer_id[-8:])
    visited = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        visited.add(page.evaluate("document.activeElement.outerHTML"))
    wanted = page.evaluate(
        "[...document.querySelectorAll('button, input, a, [tabindex=\"0\"]')]"
        ".filter(each => each.checkVisibility()).length"
    )
    assert len(visited - {page.evaluate("document.body.outerHTML")}) >= wanted
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, svg[role], section:not([hidden])')]"
        ".filter(each => each.checkVisibility() && !(each.textContent.trim() ||"
        " each.ariaLabel || each.labels?.length || each.getAttribute('aria-labelledby'))).length"
    )
    assert unnamed == 0
