"""The page beside a swarm of real nodes: a broker, four nodes and the dashboard, each a process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.overrides import read_depth, read_drained
from coordinator.view import save_state
from tests.brokers import Mosquitto, open_mosquitto
from tests.integration.nodes import ENVIRON, MakeNode, NodeProcess, until
from tests.integration.process_groups import PAUSE_S, pause

pytestmark = [pytest.mark.browser, pytest.mark.broker, pytest.mark.integration]

INTERVAL_S = 0.5
LEAVE_S = 30.0
GONE_S = 10.0  # a node that was killed shows as gone within so much
BROKEN = ("net::ERR_",)  # what a browser logs of a server that is gone
TOKEN = "a token for this test"


@contextmanager
def dashboard(broker: str, data_dir: Path, *flags: str) -> Iterator[str]:
    """`swarm-coordinator dashboard` as a person starts it; the page's address."""
    command = ["dashboard", "--broker", broker, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator.cli", *command, "--data-dir", str(data_dir), *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRON | {"DASHBOARD_TOKEN": TOKEN},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("the page is at http://"), line
        yield line.removeprefix("the page is at ").partition(";")[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(LEAVE_S) == 0
    finally:
        process.kill()
        process.communicate()


def four_nodes(make_node: MakeNode, broker: str) -> list[NodeProcess]:
    flags = ("--telemetry", broker, "--telemetry-interval", str(INTERVAL_S), "--no-lan")
    first = make_node("n0", *flags).start()
    address = first.address()
    return [first, *(make_node(f"n{n}", *flags).start("--peer", address) for n in range(1, 4))]


def state_of(page: Any) -> dict[str, Any]:
    """What the page gets from its server."""
    found: dict[str, Any] = page.evaluate("fetch('/api/state').then(answer => answer.json())")
    return found


def rows(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    table = state["nodes"]
    made = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    return {row["id"]: row for row in made}


def shown(page: Any) -> dict[str, dict[str, str]]:
    """The node table as a person reads it, by the short ids."""
    read: list[list[str]] = page.evaluate(
        "[...document.querySelectorAll('#node-table tr:not(.detail)')]"
        ".map(row => [...row.children].map(cell => cell.textContent.trim()))"
    )
    heads, *bodies = read
    return {body[0]: dict(zip(heads, body, strict=True)) for body in bodies}


def counted(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.long
def test_a_live_swarm_is_shown_as_it_says_of_itself(
    tmp_path: Path, make_node: MakeNode, open_page: Callable[..., Any], shoot: Callable[..., None]
) -> None:
    with open_mosquitto(tmp_path / "broker") as mosquitto:
        broker = f"mqtt://127.0.0.1:{mosquitto.port}"
        nodes = four_nodes(make_node, broker)
        with dashboard(broker, tmp_path / "none") as url:
            page = open_page(url, allowed=BROKEN)
            ids = [nodes[0].until(node.status).peer_id for node in nodes]
            until(lambda: len(shown(page)) == 4)
            until(lambda: all(node.foreign_trained() > 0 for node in nodes))
            _check_numbers(page, nodes, ids)
            until(lambda: state_of(page)["feeding"]["edges"])
            until(lambda: state_of(page)["headline"]["in_bytes_per_s"])
            shoot(page, "swarm")
            _check_a_killed_node(page, nodes, ids, shoot)
            _check_the_brokers_death(page, mosquitto, shoot)


def _check_numbers(page: Any, nodes: list[NodeProcess], ids: list[str]) -> None:
    """What is shown lies between what the node says and what it said before: by an interval of
    reports, one of frames, and the way."""
    until(lambda: all(row["peers"] == "3" for row in shown(page).values()))
    for node, peer in zip(nodes, ids, strict=True):
        page.get_by_role("button", name=peer[-8:]).click()
        before = node.until(node.status)
        pause_for(INTERVAL_S + 2.0)
        row, told = shown(page)[peer[-8:]], page.inner_text("tr.detail")
        after = node.until(node.status)
        taken = counted(told.partition("received in all")[2].split()[0])
        assert before.bytes_in <= taken <= after.bytes_in
        assert before.round <= counted(row["round"]) <= after.round
        assert before.accepted <= counted(row["accepted"]) <= after.accepted
        page.get_by_role("button", name=peer[-8:]).click()


def _check_a_killed_node(
    page: Any, nodes: list[NodeProcess], ids: list[str], shoot: Callable[..., None]
) -> None:
    nodes[3].kill()
    page.wait_for_function(
        "id => [...document.querySelectorAll('#node-table tr.gone')]"
        ".some(row => row.textContent.includes(id))",
        arg=ids[3][-8:],
        timeout=1000 * GONE_S,
    )
    assert "is gone" in page.inner_text("#verdict-text") or page.is_visible("#alarms")
    shoot(page, "swarm-gone")


def _check_the_brokers_death(page: Any, mosquitto: Mosquitto, shoot: Callable[..., None]) -> None:
    mosquitto.kill()
    page.wait_for_function("() => document.body.dataset.state === 'stale'")
    assert "does not answer" in page.inner_text("#banner")
    shoot(page, "swarm-stale")
    mosquitto.start()
    page.wait_for_function("() => document.body.dataset.state === 'live'", timeout=90_000)
    taken = state_of(page)["telemetry"]["reports_taken"]
    until(lambda: state_of(page)["telemetry"]["reports_taken"] > taken + 3)


def pause_for(seconds: float) -> None:
    for _ in range(int(seconds / PAUSE_S) + 1):
        pause()


def test_with_a_token_workers_are_drained_and_the_depth_is_set(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    data_dir = tmp_path / "coordinator"
    with (
        open_mosquitto(tmp_path / "broker") as mosquitto,
        dashboard(
            f"mqtt://127.0.0.1:{mosquitto.port}", data_dir, "--token-env", "DASHBOARD_TOKEN"
        ) as url,
    ):
        page = open_page(url, allowed=("status of 40", *BROKEN))
        page.wait_for_function("() => document.body.dataset.state === 'empty'")

        def act(button: str, said: str) -> None:
            page.evaluate("document.getElementById('workers').hidden = false")
            page.evaluate("name => document.querySelector(`[data-act=${name}]`).click()", button)
            page.wait_for_function(
                "said => document.getElementById('act-said').textContent.includes(said)", arg=said
            )

        page.evaluate("document.getElementById('act-worker').value = 'spot-1'")
        act("drain", "not the token")
        assert read_drained(data_dir) == frozenset()
        page.evaluate("token => { document.getElementById('act-token').value = token; }", TOKEN)
        act("drain", "no coordinator has worked here")
        assert read_drained(data_dir) == frozenset()
        data_dir.mkdir(parents=True, exist_ok=True)
        save_state(data_dir, {"workers": [{"name": "spot-1", "peer": "p"}]})
        act("drain", "gets no more work")
        assert read_drained(data_dir) == {"spot-1"}
        act("activate", "may work again")
        assert read_drained(data_dir) == frozenset()
        page.evaluate("document.getElementById('act-depth').value = '3'")
        act("depth", "planned for 3 steps")
        assert read_depth(data_dir) == 3
        page.evaluate("document.getElementById('act-depth').value = '9999'")
        act("depth", "must be a whole number")
        assert read_depth(data_dir) == 3
        page.evaluate("document.getElementById('act-depth').value = ''")
        act("depth", "found again")
        assert read_depth(data_dir) is None


def test_bad_flags_are_told_in_one_line(tmp_path: Path) -> None:
    def said(*flags: str, **environ: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "coordinator.cli", "dashboard", *flags],
            capture_output=True, text=True, timeout=LEAVE_S, check=False,
            env={**os.environ, **environ},
        )  # fmt: skip
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        return json.dumps(done.stderr)

    here = ("--broker", "mqtt://127.0.0.1:1")
    assert "must look like" in said("--broker", "http://x")
    assert "no such variable" in said(*here, "--token-env", "NOT_THERE")
    assert "too short" in said(*here, "--token-env", "SHORT", SHORT="abc")
    assert "no address" in said(*here, "--listen", "nowhere")
