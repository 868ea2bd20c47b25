"""A central learner and its workers on this machine: real processes, real libp2p, the policy's
versions by the real broadcast, a tiny policy.

The learner is `swarm-node learn`, each worker `swarm-node join` on the same run file. In the middle
one worker is killed (kill -9) and later started again: its leases expire, their tasks go to others,
and it fetches the newest version when it is back.

    python scripts/demo_learner.py [--workers 4] [--seconds 240] [--out out/demo-learner]

Exit status: 0 when the learner learned, every version reached a worker and no group was consumed
beyond the bound; 1 when not; 2 for bad arguments; 130 when interrupted.
"""

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import trio
from demo import (
    LEFT_WELL,
    LOG_NAME,
    LOOPBACK,
    Child,
    DemoFailed,
    end_all,
    first_address,
    log_tail,
    stop_on_signals,
)
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.monitor.events import FILE_NAME, Record, read_events
from node.monitor.format import percent, short_id
from node.monitor.records import HeldOut, StepDone, WorkDone
from swarm.identity import Identity

WORKERS_MAX: Final = 16
LINE_INTERVAL_S: Final = 15.0
KILL_SHARE: Final = 0.4  # of the time, after which a worker is killed
BACK_SHARE: Final = 0.6
STEPS_COMPARED: Final = 5  # rewards of the first and the last so many
STALENESS_MAX: Final = 3
GROUPS_PER_STEP: Final = 12
LEARNING_RATE: Final = "1e-4"
RUN_FILE: Final = """# Made by the demo: the learner's key is part of what a run is.
name = "demo-learner"

[sampling]
temperature = 1.0
top_p = 1.0
max_new_tokens = 40

[held_out]
tasks = 200

[[environments]]
name = "binary_matrix"
parameters = {{ prompt = "terse", min_n = 4, max_n = 4 }}

[learner]
peer = "{peer}"
staleness_max = {staleness_max}
groups_per_step = {groups}
lease_life_s = 30

[training]
loss = "decoupled"

[node]
learning_rate = {learning_rate}
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    workers: int
    seconds: float
    out: Path


def key_file(settings: Settings) -> Path:
    """The learner's key. It outlives the demo's results: the run, and so the warmed policy in the
    cache, depend on it."""
    path = settings.out / "learner-key.pem"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        Identity.generate().save(path, None)
    return path


def write_run(settings: Settings) -> Path:
    """The run file."""
    path = settings.out / "demo-learner.toml"
    peer = Identity.load(key_file(settings), None).peer_id
    path.write_text(
        RUN_FILE.format(
            peer=peer,
            staleness_max=STALENESS_MAX,
            groups=GROUPS_PER_STEP,
            learning_rate=LEARNING_RATE,
        )
    )
    return path


def start(settings: Settings, place: int, peers: Sequence[str]) -> Child:
    """Start the learner (place 0) or a worker, in a session of its own."""
    data_dir = settings.out / ("learner" if place == 0 else f"worker-{place}")
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "node.cli", "learn" if place == 0 else "join"]
    command += ["--run", str(settings.out / "demo-learner.toml"), "--listen", LOOPBACK]
    command += ["--data-dir", str(data_dir), "--threads", "1", "--no-lan"]
    if place == 0:
        command += ["--key-file", str(key_file(settings)), "--evaluate-every", "20"]
        command += ["--stop-after", f"{settings.seconds:g}"]
    for peer in peers:
        command += ["--peer", peer]
    with (data_dir / LOG_NAME).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(place, data_dir, process)


def clear(settings: Settings) -> None:
    """Delete what an earlier demo left: directories with a log of ours."""
    for data_dir in (settings.out / "learner", *settings.out.glob("worker-*")):
        if (data_dir / LOG_NAME).is_file():
            shutil.rmtree(data_dir)


def events_of(child: Child) -> list[Record]:
    """What a process has logged so far."""
    try:
        return [record for _, record in read_events(child.data_dir / FILE_NAME)]
    except FileNotFoundError:
        return []


async def run(settings: Settings, console: Console, children: list[Child]) -> None:
    """Start everything, kill one worker and start it again, until the learner is done."""
    console.print("Preparing the policy that the learner starts from (made once, then cached)")
    prepare = [sys.executable, "-m", "node.cli", "prepare", "--run"]
    prepared = await trio.run_process(
        [*prepare, str(settings.out / "demo-learner.toml")], check=False, start_new_session=True
    )
    if prepared.returncode:
        raise DemoFailed(f"the policy could not be made (exit status {prepared.returncode})")
    children.append(start(settings, 0, ()))
    address = await first_address(children[0])
    console.print("The learner listens; any other machine could work for it with")
    console.print(
        f"  swarm-node join --run {settings.out}/demo-learner.toml --peer {address}",
        soft_wrap=True,
        highlight=False,
    )
    children += [start(settings, place, (address,)) for place in range(1, settings.workers + 1)]
    began_s = said_s = trio.current_time()
    victim, back = settings.workers, False
    while children[0].running:
        await trio.sleep(1.0)
        elapsed_s = trio.current_time() - began_s
        if victim and elapsed_s > KILL_SHARE * settings.seconds:
            children[victim].process.kill()
            console.print(f"[{elapsed_s:4.0f} s] worker {victim} is killed", highlight=False)
            victim, back = 0, True
        if back and elapsed_s > BACK_SHARE * settings.seconds:
            last = settings.workers
            children[last].process.wait()
            children[last] = start(settings, last, (address,))
            console.print(f"[{elapsed_s:4.0f} s] worker {last} is back", highlight=False)
            back = False
        if trio.current_time() - said_s >= LINE_INTERVAL_S:
            said_s = trio.current_time()
            records = await trio.to_thread.run_sync(events_of, children[0])
            console.print(f"[{elapsed_s:4.0f} s] {line(records)}", highlight=False)


def line(records: Iterable[Record]) -> str:
    """Where the learner is."""
    steps = [record for record in records if isinstance(record, StepDone)]
    if not steps:
        return "no step yet: workers fetch the first version"
    last = steps[-1]
    share = ", ".join(f"{short_id(who)} {n}" for who, n in last.groups_by_worker.items())
    return (
        f"step {last.step}, version {last.published_version} on offer, reward {last.reward:.3f}, "
        f"staleness {last.staleness_mean:.1f}, waited {last.idle_s:.1f} s of "
        f"{last.idle_s + last.train_s:.1f} s; groups of {share}"
    )


def summary(settings: Settings, console: Console, children: Sequence[Child]) -> list[str]:
    """Print what came of it, and give what went wrong."""
    records = events_of(children[0])
    steps = [record for record in records if isinstance(record, StepDone)]
    held_out = [record for record in records if isinstance(record, HeldOut)]
    if not steps:
        return ["the learner made no step"]
    last = steps[-1]
    first_reward = fmean(step.reward for step in steps[:STEPS_COMPARED])
    last_reward = fmean(step.reward for step in steps[-STEPS_COMPARED:])
    idle_s, train_s = sum(s.idle_s for s in steps), sum(s.train_s for s in steps)
    by_worker: Counter[str] = Counter()
    for step in steps:
        by_worker.update(step.groups_by_worker)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("steps", f"{last.step}, version {last.version}")
    table.add_row("reward", f"{first_reward:.3f} → {last_reward:.3f} (five first and last steps)")
    if held_out:
        table.add_row("held-out", f"{percent(held_out[0].passed)} → {percent(held_out[-1].passed)}")
    worst = max(step.staleness_max for step in steps)
    mean = fmean(step.staleness_mean for step in steps)
    table.add_row("staleness", f"{mean:.2f} in the mean, at most {worst} (bound {STALENESS_MAX})")
    table.add_row("learner", f"{percent(idle_s / (idle_s + train_s))} of the time without groups")
    table.add_row("discarded", str(last.discarded_total or "nothing"))
    console.print(table)
    workers = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "groups trained on", "batches", "tokens", "answers"):
        workers.add_column(name)
    for child in children[1:]:
        work = [record for record in events_of(child) if isinstance(record, WorkDone)]
        peer = Identity.load(child.data_dir / "identity.pem", None).peer_id
        workers.add_row(
            f"{child.place} {short_id(peer)}",
            str(by_worker[peer]),
            str(len(work)),
            str(sum(record.generated_tokens for record in work)),
            str(work[-1].verdicts_total if work else "–"),
        )
    console.print(workers)
    found = []
    if worst > STALENESS_MAX:
        found.append(f"a group of staleness {worst} was consumed")
    if children[0].process.returncode not in LEFT_WELL:
        found.append(f"the learner ended with status {children[0].process.returncode}")
    if last_reward <= first_reward:
        found.append("the reward did not rise")
    if len(by_worker) < settings.workers:
        found.append("not every worker's groups were trained on")
    return found


async def demo(settings: Settings, console: Console) -> int:
    """The whole demo; gives the exit status. Whatever happens, no process outlives it."""
    clear(settings)
    await trio.to_thread.run_sync(write_run, settings)
    children: list[Child] = []
    failure = ""
    async with stop_on_signals() as stop:
        try:
            with stop.scope:
                await run(settings, console, children)
        except DemoFailed as error:
            failure = str(error)
        finally:
            with trio.CancelScope(shield=True):
                await end_all(children, stop)
    if stop.asked:
        return 130
    problems = [failure] if failure else summary(settings, console, children)
    for child in children:
        if child.process.returncode not in LEFT_WELL:
            console.rule(f"end of {child.log}")
            console.print(log_tail(child), markup=False, highlight=False)
    for problem in problems:
        console.print(Text(problem, style="red"))
    return 1 if problems else 0


def parse(arguments: Sequence[str]) -> Settings:
    """The settings of a command line; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(description="A central learner and workers on this machine.")
    parser.add_argument("--workers", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for learning, s")
    parser.add_argument("--out", type=Path, default=Path("out/demo-learner"))
    given = parser.parse_args(arguments)
    if not 2 <= given.workers <= WORKERS_MAX:
        parser.error(f"--workers {given.workers}: must be from 2 to {WORKERS_MAX}")
    if not 10 <= given.seconds <= 86_400:
        parser.error(f"--seconds {given.seconds:g}: must be from 10 to 86400")
    return Settings(given.workers, given.seconds, given.out)


def main() -> int:
    """Run the demo from the command line."""
    try:
        return trio.run(demo, parse(sys.argv[1:]), Console())
    except KeyboardInterrupt:  # before the demo watches for signals itself
        return 130


if __name__ == "__main__":
    sys.exit(main())
