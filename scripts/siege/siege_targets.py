"""What the siege attacks, by the names that attacks have for it."""

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import psutil
import trio
from siege_target import (
    ENVIRON,
    LOG_NAME,
    ROOT,
    START_TIMEOUT_S,
    Target,
    TargetFailed,
    node_target,
    start,
    until_works,
)
from siege_wire import Door

from swarm.identity import Identity

JOIN = ("join", "--local", "4", "--external", "2", "--group-size", "4", "--evaluate-every", "0")
TOKENS_PER_S = "200"  # of the honest worker
LEARNER_SEED = b"the learner of the siege".ljust(32)  # always the same: its policy is cached
LEARNER_REST = 2.5  # times as long in peace as others: its pace is measured in it
PACE_KEPT = 0.5  # of it, that strangers must leave to it
REASONER_RUN = """
name = "siege-reasoner"
sampling = {max_new_tokens = 4}
held_out = {tasks = 20}
environments = [
  {name = "scripted_sum", parameters = {max = 9}, weight = 8.0},
  {name = "propositional_logic", weight = 1.0, parameters = {prompt = "terse"}},
]
"""
LEARNER_RUN = """
name = "siege-learner"
sampling = {{max_new_tokens = 4}}
held_out = {{tasks = 20}}
environments = [{{name = "scripted_sum", parameters = {{max = 9}}}}]

[learner]
peer = "{peer}"
staleness_max = 3
groups_per_step = 2
group_size = 4
lease_life_s = 30
"""


def free_port(host: str) -> int:
    """A port that nobody has now."""
    with socket.create_server((host, 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def node(data_dir: Path, host: str) -> AsyncIterator[Target]:
    """A node of the packaged demo run, with a metrics page."""
    port = free_port(host)
    flags = [*JOIN, "--run", "demo", "--model", "tiny", "--metrics-listen", f"{host}:{port}"]
    async with node_target("node", data_dir, host, flags) as target:
        target.extra |= {"has_status": True, "metrics_port": port}
        yield target


@asynccontextmanager
async def reasoner(data_dir: Path, host: str) -> AsyncIterator[Target]:
    """A node of a run with answers that take long to parse."""
    run_file = data_dir.with_suffix(".toml")
    run_file.write_text(REASONER_RUN)
    flags = [*JOIN, "--run", str(run_file), "--model", "tiny"]
    async with node_target("node", data_dir, host, flags) as target:
        target.extra |= {"has_status": True, "run_file": str(run_file)}
        yield target


@asynccontextmanager
async def learner(data_dir: Path, host: str) -> AsyncIterator[Target]:
    """A learner that has made a step, and its honest worker."""
    key_file = data_dir.with_suffix(".pem")
    key = Identity(LEARNER_SEED)
    key.save(key_file, None)
    run_file = data_dir.with_suffix(".toml")
    run_file.write_text(LEARNER_RUN.format(peer=key.peer_id))
    flags = ["learn", "--run", str(run_file), "--key-file", str(key_file), "--evaluate-every", "0"]
    async with node_target("learner", data_dir, host, flags, rounds=0) as target:
        door: Door = target.extra["door"]
        words = ["join", "--run", str(run_file), "--tokens-per-s-max", TOKENS_PER_S]
        words += ["--peer", f"/ip4/{host}/tcp/{door.port}/p2p/{door.peer_id}"]
        place = data_dir.with_name(f"{data_dir.name}-worker")
        async with node_target("worker", place, host, words, rounds=0):
            await until_works(target, rounds=1)
            target.extra |= {"has_status": True, "run_file": str(run_file)}
            target.extra |= {"rest": LEARNER_REST, "pace_kept": PACE_KEPT}
            yield target


@asynccontextmanager
async def _monitor(data_dir: Path, host: str, *, broker: bool) -> AsyncIterator[Target]:
    ports = free_port(host), free_port(host)
    words = ["node.cli", "monitor", "--broker-listen", f"{host}:{ports[0]}"]
    process = start([*words, "--listen", f"{host}:{ports[1]}"], data_dir)
    target = Target("monitor", data_dir, process, psutil.Process(process.pid))
    try:
        await _until_listening(target, data_dir)
        if broker:
            target.watched = await _broker_of(process)
        target.extra["attacked"] = Door(host, ports[0] if broker else ports[1], "")
        target.extra["run_id"] = ""
        yield target
    finally:
        with trio.CancelScope(shield=True):
            await target.end()


async def _until_listening(target: Target, data_dir: Path) -> None:
    with trio.move_on_after(START_TIMEOUT_S):
        while target.process.poll() is None:
            if "the page is at" in (data_dir / LOG_NAME).read_text(errors="replace"):
                return
            await trio.sleep(0.2)
    raise TargetFailed(f"the monitor did not start:\n{target.tail()}")


async def _broker_of(process: "subprocess.Popen[bytes]") -> psutil.Process:
    for child in psutil.Process(process.pid).children(recursive=True):
        if "node.monitor.embedded_broker" in " ".join(child.cmdline()):
            return child
    await trio.lowlevel.checkpoint()
    raise TargetFailed("the monitor has no broker of its own")


TARGETS: dict[str, Callable[[Path, str], AbstractAsyncContextManager[Target]]] = {
    "node": node,
    "reasoner": reasoner,
    "learner": learner,
    "broker": lambda data_dir, host: _monitor(data_dir, host, broker=True),
    "page": lambda data_dir, host: _monitor(data_dir, host, broker=False),
}


def opened(kind: str, data_dir: Path, host: str) -> AbstractAsyncContextManager[Target]:
    """A target of a kind."""
    return TARGETS[kind](data_dir, host)


def second(first: Target, data_dir: Path, host: str) -> AbstractAsyncContextManager[Target]:
    """One more real node, which knows the first."""
    door: Door = first.extra["door"]
    run = first.extra.get("run_file", "demo")
    flags = [*JOIN, "--run", str(run), "--model", "tiny"]
    flags += ["--peer", f"/ip4/{host}/tcp/{door.port}/p2p/{door.peer_id}"]
    return node_target("second", data_dir, host, flags, rounds=0)


def prepare() -> None:
    """Make the demo's tiny policy ahead of time, so that no node's start waits for it."""
    words = [sys.executable, "-m", "node.cli", "prepare", "--run", "demo", "--model", "tiny"]
    subprocess.run(words, check=True, env=ENVIRON, cwd=ROOT, stdout=subprocess.DEVNULL)
