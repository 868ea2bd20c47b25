"""A central learner, its workers and their coordinator on this machine, as real processes.

The learner is `swarm-node learn`. `swarm-coordinator serve` starts the workers, each a `swarm-node
join`, from a file of machines with speeds and prices. All but the dearest suffice for the wanted
pace, so that stays off. One of the others is killed (kill -9): the dearest comes in, the killed one
is started again, and the dearest goes.

Workers are slowed down to their machine's speed in the file, so the figures are the same on any
computer. The policy is a tiny one with three cheap workers, or with `--model smollm2`
SmolLM2-135M-Instruct with two.

    python scripts/demo_learner.py [--model tiny] [--seconds 270] [--out out/demo-learner]

Exit status: 0 when the learner learned, no group was consumed beyond the bound, and the dearest
worker was left off, turned on and off again; 1 when not; 2 for bad arguments; 130 when interrupted.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import trio
from demo import (
    LEFT_WELL,
    LOG_NAME,
    LOOPBACK,
    Child,
    DemoFailed,
    first_address,
    main,
    make_policy,
    show_ends,
    staged,
    start,
)
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coordinator.view import load_state
from node.observe.event_log import FILE_NAME, Record, read_events
from node.observe.records import HeldOut, StepDone, WorkDone
from node.observe.text_format import percent, short_id
from swarm.errors import ConfigError
from swarm.identity import Identity

LINE_INTERVAL_S: Final = 15.0
SPAN_S: Final = 300.0  # over which predictions are compared with what was measured
STEPS_COMPARED: Final = 5  # rewards of the first and the last so many
STALENESS_MAX: Final = 3
SECONDS_MIN, SECONDS_MAX = 60.0, 86_400.0
TAKE_LONGER = 'a busy machine needs more time: make demo-learner DEMO_ARGS="--seconds 600"'
BEAT_S: Final = 2.0  # of the coordinator
PRICES: Final = {"a": 0.04, "b": 0.05, "c": 0.06, "dear": 0.90}  # dollars an hour, invented
DEAR: Final = "dear"
VICTIM: Final = "a"
STEPS_FIRST: Final = 3  # of the learner, before anything is said
SETTLE_STEPS: Final = 6  # of all cheap workers, before one is killed
FLEET_FILE: Final = """# Made by the demo. The coordinator reads it again when it changes.
run = "demo-learner.toml"
peers = ["{address}"]

[learner]
price_per_h = 0.50
step_s = {step_s:g}

[settings]
margin = 1.1
shortage_s = {shortage_s:g}
saving_s = {saving_s:g}
dwell_s = {dwell_s:g}
cooldown_s = 45
join_s_max = 120
"""
MACHINE: Final = """
[[workers]]
provider = "local"
name = "{name}"
price_per_h = {price}
groups_per_s = {guess}
generation_s = 1
up_mbit_per_s = 1000
down_mbit_per_s = 1000
arguments = ["--threads", "1", "--no-lan", "--listen", "{listen}", "--tokens-per-s-max", "{speed}"]
"""
RUN_FILE: Final = """# Made by the demo: the learner's key is part of what a run is.
name = "demo-learner"

{run}
[learner]
peer = "{peer}"
model = "{model}"
staleness_max = {staleness_max}
groups_per_step = {groups}
lease_life_s = {lease_life_s}
"""
TINY_RUN: Final = """
[sampling]
temperature = 1.0
top_p = 1.0
max_new_tokens = 40

[held_out]
tasks = 200

[[environments]]
name = "binary_matrix"
parameters = { prompt = "terse", min_n = 4, max_n = 4 }

[training]
loss = "decoupled"

[node]
learning_rate = 1e-4
"""


@dataclass(frozen=True, slots=True)
class Play:
    """The settings of the demo with a model."""

    run: str  # tables of the run file without the learner's
    groups_per_step: int
    step_s: float  # wanted pace
    speeds: Mapping[str, int]  # tokens a second, by machine
    tokens_guessed: float  # in a group
    lease_life_s: int
    seconds: float
    evaluate_every: int  # steps

    @property
    def cheap(self) -> frozenset[str]:
        return frozenset(self.speeds) - {DEAR}


def sums_run() -> str:
    """The tables of the packaged run for small real models; its name comes before them."""
    text = files("node.config").joinpath("runs", "sums.toml").read_text()
    return text[text.index("\n[") :]


TINY: Final = "tiny"
PLAYS: Final = {
    TINY: Play(TINY_RUN, 12, 4.0, {"a": 380, "b": 350, "c": 320, DEAR: 500}, 240.0, 30, 270.0, 20),
    "smollm2": Play(sums_run(), 8, 22.0, {"a": 28, "b": 26, DEAR: 40}, 115.0, 120, 720.0, 10),
}


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    seconds: float
    out: Path

    @property
    def play(self) -> Play:
        return PLAYS[self.model]

    @property
    def coordinator(self) -> Path:
        return self.out / "coordinator"


@dataclass(frozen=True, slots=True)
class Compared:
    """A prediction of the coordinator, and what it measured after the learner's next step."""

    at_s: float
    predicted_step_s: float
    step_s: float
    predicted_wait: float  # share of the time
    wait: float


@dataclass(slots=True)
class Story:
    """Times of events, in seconds since the learner was up, and the coordinator's predictions."""

    enough_at_s: float | None = None  # the cheap workers alone at work
    killed_at_s: float | None = None
    dear_at_s: float | None = None  # the dearest at work
    off_at_s: float | None = None  # the dearest off again
    compared: list[Compared] = field(default_factory=list)
    before: dict[str, Any] | None = None  # the state before, as `look` has it

    def note(self, state: dict[str, Any], at_s: float) -> None:
        """Compare with what was predicted before, if there was a step since."""
        before, self.before = self.before, state
        predicted = before and before["predicted"]
        if before is None or not predicted:
            return
        if state["report"]["version"] > before["report"]["version"]:
            pace, wait = state["report"]["pace"], 1.0 - predicted["utilisation"]
            step_s = predicted["step_s"]
            found = Compared(at_s, step_s, pace["step_s"], wait, pace["idle_share"])
            self.compared.append(found)

    @property
    def problems(self) -> list[str]:
        told = {
            "the cheap workers never worked alone": self.enough_at_s,
            "the dearest worker never came in for the one that was killed": self.dear_at_s,
            "the dearest worker was not released again": self.off_at_s,
        }
        missing = [problem for problem, at_s in told.items() if at_s is None]
        return [*missing, TAKE_LONGER] if missing else []


def key_file(settings: Settings) -> Path:
    """The learner's key, which outlives the results: the run and its cached policy depend on it."""
    path = settings.out / "learner-key.pem"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        Identity.generate().save(path, None)
    return path


def write_run(settings: Settings) -> Path:
    path = settings.out / "demo-learner.toml"
    peer = Identity.load(key_file(settings), None).peer_id
    path.write_text(
        RUN_FILE.format(
            run=settings.play.run,
            peer=peer,
            model=settings.model,
            staleness_max=STALENESS_MAX,
            groups=settings.play.groups_per_step,
            lease_life_s=settings.play.lease_life_s,
        )
    )
    return path


def coordinator_id(settings: Settings) -> str:
    """Of the key that the coordinator will find."""
    path = settings.coordinator / "identity.pem"
    path.parent.mkdir(parents=True, exist_ok=True)
    Identity.generate().save(path, None)
    return Identity.load(path, None).peer_id


def write_fleet(settings: Settings, address: str) -> None:
    play = settings.play
    text = FLEET_FILE.format(
        address=address,
        step_s=play.step_s,
        shortage_s=1.5 * play.step_s,
        saving_s=2.0 * play.step_s,
        dwell_s=3.0 * play.step_s,
    )
    for name, speed in play.speeds.items():
        price, guess = PRICES[name], speed / play.tokens_guessed
        text += MACHINE.format(name=name, price=price, speed=speed, guess=guess, listen=LOOPBACK)
    (settings.out / "fleet.toml").write_text(text)


def start_learner(settings: Settings, coordinator: str) -> Child:
    data_dir = settings.out / "learner"
    command = [sys.executable, "-m", "node.cli", "learn", "--data-dir", str(data_dir)]
    command += ["--run", str(settings.out / "demo-learner.toml")]
    command += ["--listen", LOOPBACK, "--threads", "1", "--no-lan"]
    command += ["--key-file", str(key_file(settings)), "--yes"]
    command += ["--evaluate-every", str(settings.play.evaluate_every)]
    command += ["--stop-after", f"{settings.seconds:g}", "--coordinator", coordinator]
    return start(command, 0, data_dir)


def start_coordinator(settings: Settings) -> Child:
    command = [sys.executable, "-m", "coordinator.cli", "serve"]
    command += ["--data-dir", str(settings.coordinator)]
    command += ["--file", str(settings.out / "fleet.toml")]
    broker = os.environ.get("SWARM_NODE_TELEMETRY")  # the nodes read it themselves
    if broker:
        command += ["--telemetry", broker]
    return start([*command, "--interval", f"{BEAT_S:g}"], 1, settings.coordinator)


def clear(settings: Settings) -> None:
    """Delete an earlier demo's directories, known by the log in them."""
    for data_dir in (settings.out / "learner", settings.coordinator):
        if (data_dir / LOG_NAME).is_file():
            shutil.rmtree(data_dir)


def look(settings: Settings) -> dict[str, Any] | None:
    """The coordinator's last report."""
    try:
        state: dict[str, Any] = load_state(settings.coordinator)
    except ConfigError:
        return None
    return state if state["report"] is not None else None


def at_work(state: dict[str, Any]) -> set[str]:
    """Workers with the policy, by name."""
    return {row["name"] for row in state["workers"] if row["phase"] == "active"}


def running(state: dict[str, Any]) -> set[str]:
    """Workers with a process."""
    return {row["name"] for row in state["workers"] if row["condition"] == "up"}


def events_of(child: Child) -> list[Record]:
    """The log of a process so far."""
    try:
        return [record for _, record in read_events(child.data_dir / FILE_NAME)]
    except FileNotFoundError:
        return []


async def run(settings: Settings, console: Console, children: list[Child], story: Story) -> None:
    """Start everything, and tell the story, until the learner is done."""
    console.print("Preparing the policy that the learner starts from (made once, then cached)")
    if status := await make_policy(["--run", str(settings.out / "demo-learner.toml")]):
        raise DemoFailed(f"the policy could not be made (exit status {status})")
    children.append(start_learner(settings, coordinator_id(settings)))
    address = await first_address(children[0])
    console.print("The learner listens; any other machine could work for it with")
    console.print(
        f"  swarm-node join --run {settings.out}/demo-learner.toml --peer {address}",
        soft_wrap=True,
        highlight=False,
    )
    write_fleet(settings, address)
    children.append(start_coordinator(settings))
    began_s = said_s = trio.current_time()
    while children[0].running:
        await trio.sleep(1.0)
        elapsed_s = trio.current_time() - began_s
        state = await trio.to_thread.run_sync(look, settings)
        if state is not None:
            story.note(state, elapsed_s)
            for said in go_on(settings, state, story, elapsed_s):
                console.print(f"[{elapsed_s:4.0f} s] {said}", highlight=False)
        if trio.current_time() - said_s >= LINE_INTERVAL_S:
            said_s = trio.current_time()
            records = await trio.to_thread.run_sync(events_of, children[0])
            names = ", ".join(sorted(at_work(state))) if state else "none"
            console.print(f"[{elapsed_s:4.0f} s] at work {names}; {line(records)}", highlight=False)
        if not children[1].running:
            raise DemoFailed(f"the coordinator ended with {children[1].process.returncode}")


def go_on(
    settings: Settings, state: dict[str, Any], story: Story, elapsed_s: float
) -> Iterator[str]:
    """The next event of the story, if it is time for one, in words."""
    play = settings.play
    if story.enough_at_s is None:
        steps = state["report"]["version"] - 1
        if at_work(state) == running(state) == play.cheap and steps >= STEPS_FIRST:
            story.enough_at_s = elapsed_s
            yield f"{len(play.cheap)} workers suffice: the dearest stays off"
    elif story.killed_at_s is None:
        if elapsed_s - story.enough_at_s > SETTLE_STEPS * play.step_s:
            story.killed_at_s = elapsed_s
            kill(settings)
            yield f"worker {VICTIM} is killed"
    elif story.dear_at_s is None:
        if DEAR in at_work(state):
            story.dear_at_s = elapsed_s
            yield "the dearest worker came in"
    elif story.off_at_s is None and DEAR not in running(state) and VICTIM in at_work(state):
        story.off_at_s = elapsed_s
        yield f"worker {VICTIM} is back, and the dearest is off again"


def kill(settings: Settings) -> None:
    """End one worker as a power cut would."""
    record = settings.coordinator / "workers" / VICTIM / "coordinator.json"
    os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


def line(records: Iterable[Record]) -> str:
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


def show_workers(settings: Settings, console: Console, by_worker: Mapping[str, int]) -> None:
    workers = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("worker", "an hour", "groups trained on", "batches", "tokens", "answers"):
        workers.add_column(name)
    for name in settings.play.speeds:
        directory = settings.coordinator / "workers" / name
        if not directory.exists():
            continue
        work = [
            each for each in read_events(directory / FILE_NAME) if isinstance(each[1], WorkDone)
        ]
        records = [record for _, record in work]
        peer = Identity.load(directory / "identity.pem", None).peer_id
        workers.add_row(
            f"{name} {short_id(peer)}",
            f"${PRICES[name]:.2f}",
            str(by_worker[peer]),
            str(len(records)),
            str(sum(record.generated_tokens for record in records)),
            _told(records[-1].verdicts_total) if records else "–",
        )
    console.print(workers)


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "–"


def predictions(compared: Sequence[Compared]) -> Table:
    """Means over spans of time, and the mean distance of single looks."""
    table = Table(box=None, padding=(0, 2, 0, 0), title="Predicted and measured, off by look")
    for name in ("minutes", "step in s", "", "off", "waits", "", "off"):
        table.add_column(name, justify="right")
    for span in sorted({int(each.at_s / SPAN_S) for each in compared}):
        here = [each for each in compared if int(each.at_s / SPAN_S) == span]
        step_off = fmean(abs(each.predicted_step_s / each.step_s - 1.0) for each in here)
        wait_off = fmean(abs(each.predicted_wait - each.wait) for each in here)
        table.add_row(
            f"{SPAN_S / 60 * span:.0f} to {SPAN_S / 60 * (span + 1):.0f}",
            f"{fmean(each.predicted_step_s for each in here):.1f}",
            f"{fmean(each.step_s for each in here):.1f}",
            percent(step_off),
            percent(fmean(each.predicted_wait for each in here)),
            percent(fmean(each.wait for each in here)),
            f"{100 * wait_off:.1f} points",
        )
    return table


def summary(
    settings: Settings, console: Console, children: Sequence[Child], story: Story
) -> list[str]:
    """Print the results, and return the failures."""
    records = events_of(children[0])
    steps = [record for record in records if isinstance(record, StepDone)]
    held_out = [record for record in records if isinstance(record, HeldOut)]
    if not steps:
        return ["the learner made no step"]
    last = steps[-1]
    first_reward = fmean(step.reward for step in steps[:STEPS_COMPARED])
    last_reward = fmean(step.reward for step in steps[-STEPS_COMPARED:])
    idle_s, train_s = sum(s.idle_s for s in steps), sum(s.train_s for s in steps)
    state = look(settings)
    report, predicted = (state["report"], state["predicted"]) if state else (None, None)
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
    if report and predicted:
        table.add_row(
            "at the end",
            f"a step took {report['pace']['step_s']:.1f} s, asked for {settings.play.step_s:.1f}; "
            f"staleness at most {report['pace']['staleness_worst']}, predicted "
            f"{predicted['staleness_worst']}",
        )
    table.add_row("discarded", str(last.discarded_total or "nothing"))
    console.print(table)
    console.print(predictions(story.compared))
    show_workers(settings, console, by_worker)
    found = []
    if worst > STALENESS_MAX:
        found.append(f"a group of staleness {worst} was consumed")
    if children[0].process.returncode not in LEFT_WELL:
        found.append(f"the learner ended with status {children[0].process.returncode}")
    if last_reward <= first_reward:
        found.append("the reward did not rise")
    return [*found, *story.problems]


async def demo(settings: Settings, console: Console) -> int:
    """Run the demo; the exit status."""
    clear(settings)
    await trio.to_thread.run_sync(write_run, settings)
    children: list[Child] = []
    story = Story()
    stopped, failure = await staged(
        console, children, lambda: run(settings, console, children, story)
    )
    if stopped:
        return 130
    problems = [failure] if failure else summary(settings, console, children, story)
    show_ends(console, children)
    for problem in problems:
        console.print(Text(problem, style="red"))
    return 1 if problems else 0


def parse(arguments: Sequence[str]) -> Settings:
    """The settings of a command line; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(description="A central learner and workers on this machine.")
    parser.add_argument(
        "--model", choices=PLAYS, default=TINY, help=f"of the learner (default: {TINY})"
    )
    times = ", ".join(f"{play.seconds:g} of {name}" for name, play in PLAYS.items())
    parser.add_argument("--seconds", type=float, help=f"time for learning, s (default: {times})")
    parser.add_argument("--out", type=Path, default=Path("out/demo-learner"))
    given = parser.parse_args(arguments)
    seconds = PLAYS[given.model].seconds if given.seconds is None else given.seconds
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        parser.error(f"--seconds {seconds:g}: must be from {SECONDS_MIN:g} to {SECONDS_MAX:g}")
    return Settings(given.model, seconds, given.out)


if __name__ == "__main__":
    sys.exit(main(demo, parse))
