"""A learner, its workers and its coordinator that report to one broker, and the page beside them:
what it shows is what they say, and what its actions ask for happens in the running swarm."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from coordinator.overrides import read_depth, read_drained
from coordinator.view import load_state
from node.observe.event_log import FILE_NAME, read_events
from node.observe.records import StepDone, WorkDone
from swarm.errors import ConfigError
from swarm.identity import Identity
from tests.brokers import open_mosquitto
from tests.integration.nodes import ENVIRON, LOOPBACK, NodeProcess, swarm_node, until

pytestmark = [pytest.mark.integration, pytest.mark.broker, pytest.mark.long]

TOKEN = "a token for this test"
WAIT_S = 300.0
BOUND, DEPTH, GROUPS_PER_STEP = 3, 3, 4
STEPS_SETTLED = 6  # of the learner, over which a change must hold
PRICES = {"a": 0.25, "b": 0.5}
RUN = """
name = "watched-sums"
environments = [{{name = "scripted_sum", parameters = {{max = 9}}}}]
sampling = {{max_new_tokens = 4}}
held_out = {{tasks = 20}}

[learner]
peer = "{peer}"
staleness_max = {bound}
groups_per_step = {groups}
group_size = 4
lease_life_s = 20
"""
FLEET = """
run = "watched.toml"
peers = ["{address}"]

[settings]
margin = 4.0
shortage_s = 2
saving_s = 600
dwell_s = 2
cooldown_s = 5
join_s_max = 240

[pacing]
depth = {depth}
"""
WORKER = """
[[workers]]
provider = "local"
name = "{name}"
price_per_h = {price}
groups_per_s = 2.0
generation_s = 1
up_mbit_per_s = 1000
down_mbit_per_s = 1000
arguments = [
  "--threads", "1", "--no-lan", "--listen", "{listen}", "--telemetry", "{broker}",
  "--telemetry-interval", "0.5",
]
"""


@dataclass
class Swarm:
    """All processes, and what can be seen of them from outside."""

    directory: Path
    broker: str
    cache_dir: Path
    stack: ExitStack
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    learner: NodeProcess = field(init=False)
    url: str = field(init=False)

    @property
    def coordinator_dir(self) -> Path:
        return self.directory / "coordinator"

    def start(self) -> None:
        key, run_file = self.directory / "key.pem", self.directory / "watched.toml"
        peer = swarm_node("keygen", "--out", key).stdout.strip()
        run_file.write_text(RUN.format(peer=peer, bound=BOUND, groups=GROUPS_PER_STEP))
        self.coordinator_dir.mkdir()
        own_key = self.coordinator_dir / "identity.pem"
        Identity.generate().save(own_key, None)
        flags = ["--key-file", str(key), "--evaluate-every", "0", "--no-lan"]
        flags += ["--coordinator", Identity.load(own_key, None).peer_id]
        flags += ["--telemetry", self.broker, "--telemetry-interval", "0.5"]
        self.learner = NodeProcess(
            self.directory / "learner", run_file, self.cache_dir, tuple(flags), ("learn",)
        )
        self.stack.callback(self.learner.clean_up)
        self.learner.start()
        fleet = FLEET.format(address=self.learner.address(), depth=DEPTH)
        for name, price in PRICES.items():
            fleet += WORKER.format(name=name, price=price, listen=LOOPBACK, broker=self.broker)
        (self.directory / "fleet.toml").write_text(fleet)
        serve = ["serve", "--file", str(self.directory / "fleet.toml"), "--interval", "1"]
        self._coordinate("serve", [*serve, "--telemetry", self.broker])
        page = ["dashboard", "--broker", self.broker, "--listen", "127.0.0.1:0"]
        self._coordinate("page", [*page, "--token-env", "DASHBOARD_TOKEN"])
        line = until(lambda: self.said("page").partition("the page is at ")[2], said=self.words)
        self.url = line.partition(";")[0]

    def _coordinate(self, name: str, words: list[str]) -> None:
        words = [*words, "--data-dir", str(self.coordinator_dir)]
        environ = {"SWARM_NODE_CACHE_DIR": str(self.cache_dir), "DASHBOARD_TOKEN": TOKEN}
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "coordinator.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ENVIRON | environ,
            )
        self.started.append(process)
        self.stack.callback(end_tree, process)

    # --- what is seen ----------------------------------------------------------------------

    def said(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def words(self) -> str:
        return f"{self.learner.said()}\n---\n{self.said('serve')}\n---\n{self.said('page')}"

    def until(self, is_so: Callable[[], Any]) -> Any:
        def checked() -> Any:
            ended = [each.args for each in self.started if each.poll() is not None]
            assert not ended, f"{ended} ended: {self.words()}"
            assert self.learner.process.poll() is None, self.words()
            return is_so()

        return until(checked, WAIT_S, self.words)

    def page(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}api/state")
        return answer.json() if answer.status_code == 200 else {}

    def page_workers(self) -> dict[str, dict[str, Any]]:
        return rows_of(self.page())

    def view(self) -> dict[str, Any]:
        """What the coordinator saw last."""
        try:
            return load_state(self.coordinator_dir)
        except ConfigError:
            return {"report": None, "predicted": None, "workers": []}

    def view_row(self, name: str) -> dict[str, Any]:
        return next((row for row in self.view()["workers"] if row["name"] == name), {})

    def steps(self) -> list[StepDone]:
        return self.learner.events(StepDone)

    def batches(self, name: str) -> int:
        path = self.coordinator_dir / "workers" / name / FILE_NAME
        if not path.exists():
            return 0
        return sum(isinstance(record, WorkDone) for _, record in read_events(path))

    def process(self, name: str) -> psutil.Process | None:
        """A worker's process, while it runs."""
        path = self.coordinator_dir / "workers" / name / "coordinator.json"
        try:
            process = psutil.Process(json.loads(path.read_text())["pid"])
            return process if process.status() != psutil.STATUS_ZOMBIE else None
        except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
            return None

    def ask(self, action: str, token: str | None, **wanted: Any) -> httpx.Response:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.post(f"{self.url}api/actions/{action}", json=wanted, headers=headers)


def rows_of(page: dict[str, Any]) -> dict[str, dict[str, Any]]:
    table = page.get("workers", {"columns": (), "rows": ()})
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return {row["name"]: row for row in rows}


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """As a person ends it, and with force what is left."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_workers(swarm: Swarm) -> None:
    """A coordinator ends its workers; this is for one that was killed."""
    for name in PRICES:
        process = swarm.process(name)
        if process is not None:
            for each in (process, *process.children(recursive=True)):
                each.kill()


@contextmanager
def running(directory: Path, cache_dir: Path) -> Iterator[Swarm]:
    with open_mosquitto(directory / "broker") as mosquitto, ExitStack() as stack:
        swarm = Swarm(directory, f"mqtt://127.0.0.1:{mosquitto.port}", cache_dir, stack)
        stack.callback(end_workers, swarm)
        swarm.start()
        yield swarm


def test_the_page_beside_a_coordinated_run_shows_it_and_steers_it(
    tmp_path: Path, prepared: tuple[Path, Path]
) -> None:
    assert os.environ.get("DASHBOARD_TOKEN") != TOKEN
    with running(tmp_path, prepared[1]) as swarm:
        check_what_is_shown(swarm)
        check_without_the_token(swarm)
        check_the_depth(swarm)
        check_a_drain(swarm)


def check_what_is_shown(swarm: Swarm) -> None:
    """The model's prediction beside what is measured, prices and versions."""
    swarm.until(lambda: all(swarm.batches(name) > 1 for name in PRICES))
    swarm.until(lambda: len(swarm.steps()) >= STEPS_SETTLED)

    def agree() -> bool:
        """The page shows the numbers of the coordinator's last look."""
        view, page = swarm.view(), swarm.page()
        shown, predicted = page.get("capacity"), view["predicted"]
        if not shown or not predicted:
            return False
        wanted = {
            "predicted_idle_ratio": 1.0 - predicted["utilisation"],
            "predicted_staleness_steps": predicted["staleness_worst"],
            "cost_per_h": view["cost_per_h"],
        }
        return {name: shown[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)

    swarm.until(agree)
    shown = swarm.page()["capacity"]
    assert 0.0 <= shown["predicted_idle_ratio"] <= 1.0
    assert 0.0 <= shown["idle_ratio"] <= 1.0
    assert shown["staleness_bound_steps"] == BOUND
    assert 0 <= shown["staleness_mean_steps"] <= shown["staleness_max_steps"] <= BOUND
    assert 0 < shown["cost_per_h"] <= sum(PRICES.values())

    def versions() -> bool:
        rows = swarm.page_workers()
        return all((rows.get(name, {}).get("version") or 0) >= 1 for name in PRICES)

    swarm.until(versions)
    page = swarm.page()
    rows = rows_of(page)
    assert {name: row["price_per_h"] for name, row in rows.items()} == PRICES
    newest = page["headline"]["published_version"]
    assert newest >= 1
    for row in rows.values():
        assert row["behind"] == max(0, newest - row["version"])
    assert page["headline"]["roles"] == {"learner": 1, "worker": 2, "coordinator": 1}
    assert page["can_act"] is True
    assert page["broadcast"]["version"] >= 1


def check_without_the_token(swarm: Swarm) -> None:
    """Refused, and nothing changes."""
    for token in (None, TOKEN[:-1], "another token of some length"):
        for action, wanted in (("drain", {"worker": "a"}), ("depth", {"depth": 0})):
            assert swarm.ask(action, token, **wanted).status_code == 401
    looked = swarm.view()["unix_s"]
    swarm.until(lambda: swarm.view().get("unix_s", 0.0) > looked + 3.0)  # it looked again since
    assert read_drained(swarm.coordinator_dir) == frozenset()
    assert read_depth(swarm.coordinator_dir) is None
    assert swarm.view_row("a")["phase"] != "drained"
    assert swarm.view()["report"]["rules"]["pacing"] == DEPTH


def check_the_depth(swarm: Swarm) -> None:
    """Leases follow it: what is trained on is never older, and less is under way."""
    swarm.until(lambda: max(step.staleness_max for step in swarm.steps()) > 0)
    swarm.until(lambda: max(map(under_way, swarm.steps())) > GROUPS_PER_STEP)
    answer = swarm.ask("depth", TOKEN, depth=0)
    assert (answer.status_code, answer.json()) == (200, {"done": "planned for 0 steps"})
    swarm.until(lambda: swarm.view()["report"]["rules"]["pacing"] == 0)  # as the learner tells
    since = len(swarm.steps())
    # leases of before are still out, and their groups in the queue
    swarm.until(lambda: [s for s in swarm.steps()[since:] if under_way(s) <= GROUPS_PER_STEP])
    fresh = len(swarm.steps()) + GROUPS_PER_STEP
    swarm.until(lambda: len(swarm.steps()) >= fresh + STEPS_SETTLED)
    later = swarm.steps()[fresh:]
    assert max(step.staleness_max for step in later) == 0
    assert max(map(under_way, later)) <= GROUPS_PER_STEP
    answer = swarm.ask("depth", TOKEN, depth=DEPTH)
    assert answer.status_code == 200
    swarm.until(lambda: swarm.view()["report"]["rules"]["pacing"] == DEPTH)
    refused = swarm.ask("depth", TOKEN, depth=-1)
    assert refused.status_code == 400
    assert "depth" in refused.json()["error"]


def under_way(step: StepDone) -> int:
    return step.leased_groups + step.buffered_groups


def check_a_drain(swarm: Swarm) -> None:
    """It hands in what it has and works no more, and is given back; the other goes on."""
    assert swarm.ask("drain", TOKEN, worker="nobody").status_code == 400
    swarm.until(lambda: swarm.process("a"))
    peer = swarm.view_row("a")["peer"]
    answer = swarm.ask("drain", TOKEN, worker="a")
    assert answer.status_code == 200
    swarm.until(lambda: swarm.view_row("a")["phase"] == "drained")
    swarm.until(lambda: swarm.page_workers()["a"]["phase"] == "drained")
    swarm.until(lambda: swarm.process("a") is None)  # this one was started by the coordinator
    done, others = swarm.batches("a"), swarm.batches("b")
    since = swarm.steps()[-1].step
    # what it had handed in may still be trained on
    swarm.until(lambda: [s for s in swarm.steps() if s.step > since + 2 * (BOUND + 1)])
    swarm.until(lambda: swarm.steps()[-1].step >= since + 2 * (BOUND + 1) + STEPS_SETTLED)
    later = [step for step in swarm.steps() if step.step > since + 2 * (BOUND + 1)]
    assert all(peer not in step.groups_by_worker for step in later)
    assert swarm.batches("a") == done
    assert swarm.batches("b") > others
    assert swarm.ask("activate", TOKEN, worker="a").status_code == 200
    # whether it is started again is the capacity model's affair; nobody keeps it off any more
    swarm.until(lambda: swarm.view_row("a")["phase"] != "drained")
    assert read_drained(swarm.coordinator_dir) == frozenset()
