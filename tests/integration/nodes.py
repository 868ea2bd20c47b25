"""Real nodes, one process each, as a person starts them, and what can be seen of them."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from node.observe.event_log import read_events
from node.observe.records import RoundDone, Started, StatusSnapshot, Trouble
from node.observe.status import fetch_status
from swarm.errors import SwarmError
from tests.integration.process_groups import PAUSE_S, pause

RUN_TEXT = """
name = "sums"
environments = [{name = "scripted_sum", parameters = {max = 9}}]
sampling = {max_new_tokens = 4}
held_out = {tasks = 20}
"""
LEARNER_RUN_TEXT = (
    RUN_TEXT
    + """
[learner]
peer = "{peer}"
staleness_max = 2
groups_per_step = 4
group_size = 4
"""
)
JOIN = ("join", "--local", "2", "--external", "2", "--group-size", "4", "--checkpoint-every", "1")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
WAIT_S = 120.0  # a busy machine is no failure
COMMAND_TIMEOUT_S = 300.0  # two cores, and another test at work
# Nothing is looked up on the network; a small machine gets no more threads than it has cores.
ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_NODE_")},
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def until(is_so: Callable[[], Any], wait_s: float = WAIT_S, said: Callable[[], str] = str) -> Any:
    """Wait for a true answer and give it back; fail with what was `said` after `wait_s`."""
    for _ in range(int(wait_s / PAUSE_S)):
        if answer := is_so():
            return answer
        pause()
    raise AssertionError(f"not within {wait_s} s: {said()}")


def swarm_node(
    *arguments: object, python: str = sys.executable, **environ: str
) -> subprocess.CompletedProcess[str]:
    """One whole command."""
    return subprocess.run(
        [python, "-m", "node.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        env=ENVIRON | environ,
        check=False,
    )


@dataclass
class NodeProcess:
    """A node on a data directory, which may be started again; one of those that share rollouts
    unless `command` says otherwise."""

    data_dir: Path
    run_file: Path | None  # None: `flags` say which run, or a peer does
    cache_dir: Path
    flags: tuple[str, ...] = ()
    command: tuple[str, ...] = JOIN
    python: str = sys.executable
    environ: dict[str, str] = field(default_factory=dict)
    starts: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *more: str) -> "NodeProcess":
        self.data_dir.mkdir(parents=True, exist_ok=True)
        common = ["--run", str(self.run_file)] if self.run_file else []
        common += ["--data-dir", str(self.data_dir)]
        common += ["--listen", LOOPBACK, "--threads", "1"]
        with self.log.open("ab") as log:
            self.starts.append(
                subprocess.Popen(
                    [self.python, "-m", "node.cli", *self.command, *common, *self.flags, *more],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=ENVIRON | {"SWARM_NODE_CACHE_DIR": str(self.cache_dir)} | self.environ,
                )
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.starts[-1]

    @property
    def log(self) -> Path:
        return self.data_dir / "console.log"

    def said(self) -> str:
        """What it printed, at all its starts."""
        return self.log.read_text()

    # --- from outside ----------------------------------------------------------------------

    def status(self) -> StatusSnapshot | None:
        try:
            return fetch_status(self.data_dir)
        except SwarmError:
            return None

    def address(self) -> str:
        """Where it listens, once it does."""
        snapshot = self.until(self.status)
        return str(snapshot.addresses[0])

    def until(self, is_so: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
        """As the function, and an end of the process is a failure."""

        def checked() -> Any:
            assert self.process.poll() is None, f"the node ended: {self.said()}"
            return is_so()

        return until(checked, wait_s, said=self.said)

    def trainer(self) -> psutil.Process | None:
        """Its trainer process, if one runs."""
        return next(
            iter(p for p in self.children() if "node.train.trainer_worker" in _line(p)), None
        )

    def children(self) -> list[psutil.Process]:
        """All processes under it."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    # --- from its files --------------------------------------------------------------------

    def events(self, kind: type) -> list[Any]:
        path = self.data_dir / "events.jsonl"
        if not path.exists():
            return []
        return [record for _, record in read_events(path) if isinstance(record, kind)]

    def rounds(self) -> list[RoundDone]:
        return self.events(RoundDone)

    def starts_told(self) -> list[Started]:
        return self.events(Started)

    def troubles(self) -> list[Trouble]:
        return self.events(Trouble)

    def last_round(self) -> int:
        return max((record.round for record in self.rounds()), default=0)

    def sources(self) -> set[str]:
        """Whose groups it trained on."""
        return {producer for record in self.rounds() for producer in record.foreign_by_producer}

    def foreign_trained(self) -> int:
        return sum(record.external_groups for record in self.rounds())

    def marked(self) -> list[bytes]:
        """The groups that its pool says were trained on. Only when it does not run."""
        return self._pool(
            "SELECT group_id FROM groups WHERE trained_round IS NOT NULL"
            " UNION ALL SELECT group_id FROM tombstones WHERE trained_round IS NOT NULL"
        )

    def rounds_pooled_of(self, producer: str) -> list[int]:
        """The rounds of another's groups in its pool. Only when it does not run."""
        return self._pool("SELECT round FROM groups WHERE producer = ?", producer)

    def _pool(self, query: str, *values: str) -> list[Any]:
        with closing(sqlite3.connect(self.data_dir / "pool.sqlite")) as pool:
            return [row[0] for row in pool.execute(query, values)]

    def accepted_of(self, producer: str) -> int:
        """How many groups of another it took in since it started."""
        status = self.status()
        found = [p.groups_accepted for p in status.peers if p.peer_id == producer] if status else []
        return sum(found)

    # --- ends ------------------------------------------------------------------------------

    def interrupt(self) -> int:
        """One Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def clean_up(self) -> None:
        """Leave nothing behind, whatever the test came to."""
        for process in (p for p in self.starts if p.poll() is None):
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait(WAIT_S)
            for child in children:
                if child.is_running():
                    child.kill()


MakeNode = Callable[..., NodeProcess]
"""The fixture `make_node`: (name, further flags) -> a node that has not been started."""

MakeFed = Callable[..., list[NodeProcess]]
"""The fixture `make_fed`: (flags of all, `worker`: further ones of workers, `names`: of these) -> a
learner and workers that feed it, all started."""


def all_gone(processes: list[psutil.Process], wait_s: float = 30.0) -> bool:
    """Whether all of them end within the time; a zombie has ended."""
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
