"""A siege: a real node under attack by everything in the catalogue, and what honest peers notice.

    python -m tests.hostile siege                  attackers of one class together, class by class
    python -m tests.hostile siege --full           each attacker alone
    python -m tests.hostile siege --only gossip    one class, or one attack by its name (repeatable)
    python -m tests.hostile siege --list           the catalogue

A node is started as a user starts it, with its trainer. Two honest peers ask it fourteen times a
second all the while, and every two seconds a newcomer of another address block wants in. Attackers
run in a process of their own, with little priority, on loopback or (`--public`, as root) in a
network namespace of their own with addresses that count as public. Everything stops by itself.

Exit status: 0, also where goals were missed; with `--strict` 1 then; 2 for bad arguments or where
the siege itself could not be held; 130 when interrupted.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import trio

from swarm.errors import first_of
from swarm.identity import Identity
from tests.hostile.attack import ATTACKS, CLASSES, load_all
from tests.hostile.honest import greet
from tests.hostile.targets import (
    MIB,
    ROOT,
    TARGETS,
    Figures,
    Target,
    TargetFailed,
    aligned,
    heading,
    percentile,
    prepare,
    refused_of,
)
from tests.hostile.wire import FAILURES, Door, Spent, admitted

SECONDS = 12.0
SECONDS_MAX = 600.0
QUIET_S = 5.0  # before each attack, for the baseline
FIRST_QUIET_S = 12.0
SAMPLE_S = 0.25
LAG_S = 1.0
BACK_S = 60.0  # within which memory and descriptors are to be back
GRACE_S = 25.0  # for the attackers' process beyond its time
CENSUS_MAX = 300  # connections, of other blocks each, with which places are counted
CENSUS_WAVE = 24
CENSUS_TRIES, CENSUS_PAUSE_S = 2, 5.0
NEWCOMERS_AFTER = 8
MEMORY_GAIN_BYTES_MAX = 32 * MIB
MEMORY_LEFT_BYTES_MAX = 12 * MIB  # what a node that trains comes and goes by itself
P99_GAIN_MS_MAX = 50.0
DESCRIPTORS_LEFT_MAX = 6  # of the honest and of newcomers that are just leaving
PLACES_LEFT_MAX = 3  # as those
LOOPBACK, PUBLIC = ("127.9", "127.7", "127.0.0.1"), ("198.18", "198.19", "198.19.255.1")
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    seconds: float
    full: bool
    only: tuple[str, ...]
    public: bool
    out: Path

    @property
    def networks(self) -> tuple[str, str, str]:
        """The first two bytes of attackers' and newcomers' addresses, and where nodes listen."""
        return PUBLIC if self.public else LOOPBACK


@dataclass(frozen=True, slots=True)
class Round:
    """Attacks that run together."""

    kind: str
    target: str
    names: tuple[str, ...]


@dataclass(slots=True)
class Row:
    """The figures of one round."""

    kind: str
    names: tuple[str, ...]
    rate: str
    attacker_cpu_s: float = 0.0
    attacker_bytes: int = 0
    node_cpu_s: float = 0.0
    memory_gain_bytes: int = 0
    memory_left_bytes: int = 0
    back_s: float | None = None  # None: not within the time
    descriptors_gain: int = 0
    descriptors_left: int = 0
    honest: int = 0
    honest_failed: int = 0
    honest_why: str = ""  # what most of these say
    times_ms: tuple[float, float] = (NAN, NAN)  # median and 99th percentile of honest requests
    base_times_ms: tuple[float, float] = (NAN, NAN)  # in peace
    lags_ms: tuple[float, float] = (NAN, NAN)  # median and most of the status socket
    newcomers: int = 0
    newcomers_in: int = 0
    after: int = 0
    after_in: int = 0
    places_lost: int | None = None
    pace_per_min: float = NAN  # rounds or steps of the target itself
    base_pace_per_min: float = NAN
    refused: int = 0
    banned: int = 0
    attacks: list[dict[str, Any]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        if len(self.names) == 1:
            return self.names[0]
        return f"{self.kind}: {len(self.names)} together"

    @property
    def is_back(self) -> bool:
        """Whether memory and descriptors are as they were."""
        return (
            self.memory_left_bytes <= MEMORY_LEFT_BYTES_MAX
            and self.descriptors_left <= DESCRIPTORS_LEFT_MAX
        )


# --- honest peers --------------------------------------------------------------------------


class Observer:
    """The process of the honest peers, and what it has told."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.records: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Take in what it tells, until it ends."""
        assert self.process.stdout is not None
        rest = b""
        async for data in self.process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            self.records += [json.loads(each) for each in lines]

    def between(self, who: str, from_s: float, to_s: float) -> list[dict[str, Any]]:
        """Answers in a time; each counts where it came in, so that a stall is seen at its end."""
        return [r for r in self.records if r["who"] == who and from_s <= r["at_s"] < to_s]


async def open_child(module: str, *words: str) -> trio.Process:
    """A process of the siege's own."""
    return await trio.lowlevel.open_process(
        [sys.executable, "-m", f"tests.hostile.{module}", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )


async def ended(process: trio.Process) -> None:
    """Let a process of the siege's own end, and insist."""
    with trio.CancelScope(shield=True):
        if process.stdin is not None:
            await process.stdin.aclose()
        with trio.move_on_after(3.0):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def observed(door: Door, run_id: str, network: str) -> AsyncIterator[Observer]:
    """Honest peers of a node, for the block."""
    address = f"/ip4/{door.host}/tcp/{door.port}/p2p/{door.peer_id}"
    process = await open_child("honest", address, run_id, network)
    observer = Observer(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(observer.read)
            yield observer
            nursery.cancel_scope.cancel()
    finally:
        await ended(process)


# --- one round -----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Siege:
    """A target, its honest peers, and its figures in peace."""

    settings: Settings
    target: Target
    observer: Observer | None
    quiet: list[tuple[float, float]] = field(default_factory=list)
    quiet_rounds: int = 0  # of the target's own work in these times
    places: int | None = None  # of newcomers of other blocks, counted before any attack

    @property
    def door(self) -> Door:
        """Of the node that honest peers know."""
        door: Door = self.target.extra["door"]
        return door

    async def rest(self, seconds: float) -> None:
        """Measure the target in peace."""
        began_s, before = time.monotonic(), await self.rounds()
        await trio.sleep(seconds * self.target.extra.get("rest", 1.0))
        self.quiet_rounds += await self.rounds() - before
        self.quiet.append((began_s, time.monotonic()))

    async def rounds(self) -> int:
        """Rounds or steps that the target has done, where it does any."""
        if not self.target.extra.get("has_status"):
            return 0
        return int((await self.target.status() or {}).get("round", 0))

    async def census(self, enough: int = CENSUS_MAX) -> int:
        """Count the newcomers of other blocks that find a place at the same time.

        Count again where it is not as many as it was: a busy machine takes no place for good.
        """
        best = 0
        for _ in range(CENSUS_TRIES):
            best = max(best, await count_places(self.door, self.settings.networks[1]))
            if best >= enough - PLACES_LEFT_MAX:
                break
            await trio.sleep(CENSUS_PAUSE_S)
        return best


async def count_places(door: Door, network: str) -> int:
    """Come in waves, each newcomer from a block of its own, until nobody more is let in."""
    places, refused = 0, 0

    async def come(number: int, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        nonlocal places, refused
        source = f"{network}.{number % 250 + 1}.{number // 250 + 9}"
        with suppress(*FAILURES):
            async with admitted(door, Identity.generate(), source, Spent()) as mux:
                if await mux.answers():
                    places += 1
                    task_status.started()
                    await trio.sleep_forever()
        refused += 1
        task_status.started()

    async with trio.open_nursery() as nursery:
        for first in range(0, CENSUS_MAX, CENSUS_WAVE):
            async with trio.open_nursery() as wave:
                for number in range(first, first + CENSUS_WAVE):
                    wave.start_soon(nursery.start, come, number)
            if refused > CENSUS_WAVE:
                break
        nursery.cancel_scope.cancel()
    await trio.sleep(1.0)  # until the node has noticed that they are gone
    return places


async def attackers(siege: Siege, round_: Round, block: int) -> dict[str, Any]:
    """Run the attackers' process; what it told, or why it told nothing."""
    target = siege.target
    seconds = max(siege.settings.seconds, *(ATTACKS[name].seconds_min for name in round_.names))
    door: Door = target.extra.get("attacked") or siege.door
    plain = {k: v for k, v in target.extra.items() if isinstance(v, str | int | float)}
    order = {
        "kind": ATTACKS[round_.names[0]].kind,
        "names": round_.names,
        "door": [door.host, door.port, door.peer_id],
        "run_id": target.extra["run_id"],
        "seconds": seconds,
        "network": siege.settings.networks[0],
        "block": block,
        "extra": {"data_dir": str(target.data_dir), **plain},
    }
    process = await open_child("attack")
    answer = b""
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send_all(json.dumps(order).encode())
        await process.stdin.aclose()
        with trio.move_on_after(seconds + GRACE_S):
            async for part in process.stdout:
                answer += part
    finally:
        await ended(process)
    try:
        told: dict[str, Any] = json.loads(answer)
    except ValueError:
        return {"attacks": [], "cpu_s": 0.0, "failure": "the attackers' process told nothing"}
    return told


async def sample(target: Target, found: list[Figures]) -> None:
    """Note memory and descriptors, again and again."""
    while True:
        now = target.figures()
        if now is not None:
            found.append(now)
        await trio.sleep(SAMPLE_S)


async def feel_lag(target: Target, lags_ms: list[float]) -> None:
    """Note how long the node takes to answer on its own status socket."""
    while target.extra.get("has_status"):
        began_s = time.monotonic()
        if await target.status() is not None:
            lags_ms.append(1_000 * (time.monotonic() - began_s))
        await trio.sleep(LAG_S)


async def hold(siege: Siege, round_: Round, block: int) -> Row:
    """One round: rest, attack, and see what stays behind."""
    target = siege.target
    await siege.rest(QUIET_S)
    row = Row(round_.kind, round_.names, ATTACKS[round_.names[0]].rate)
    before, status = target.figures(), await target.status() or {}
    if before is None:
        raise TargetFailed(f"{target.name} is gone before the attack")
    say(f"{row.label}: attack")
    began_s = time.monotonic()
    told = await attacked(siege, round_, block, row, before)
    say(f"{row.label}: attacked for {time.monotonic() - began_s:.0f} s; what stays behind?")
    if siege.observer is not None:
        note_honest(siege, siege.observer, row, began_s, time.monotonic())
        await come_after(siege, row)
    await wait_until_back(target, before, row)
    if siege.places is not None:
        row.places_lost = siege.places - await siege.census(siege.places)
    after = await target.status() or {}
    row.refused = refused_of(after) - refused_of(status)
    row.banned = len(after.get("bans", ())) - len(status.get("bans", ()))
    row.misses = misses(row, target, told)
    return row


async def attacked(
    siege: Siege, round_: Round, block: int, row: Row, before: Figures
) -> dict[str, Any]:
    """Attack, and measure the target meanwhile; what the attackers told."""
    found, lags_ms = [before], list[float]()
    began_s, done = time.monotonic(), await siege.rounds()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sample, siege.target, found)
        nursery.start_soon(feel_lag, siege.target, lags_ms)
        told = await attackers(siege, round_, block)
        nursery.cancel_scope.cancel()
    minutes = (time.monotonic() - began_s) / 60
    row.pace_per_min = (await siege.rounds() - done) / minutes
    quiet_s = sum(to_s - from_s for from_s, to_s in siege.quiet)
    row.base_pace_per_min = 60 * siege.quiet_rounds / quiet_s if quiet_s else NAN
    row.attacks, row.attacker_cpu_s = told["attacks"], told["cpu_s"]
    row.attacker_bytes = sum(each["bytes_out"] for each in row.attacks)
    row.node_cpu_s = found[-1].cpu_s - before.cpu_s
    row.memory_gain_bytes = max(each.memory_bytes for each in found) - before.memory_bytes
    row.descriptors_gain = max(each.descriptors for each in found) - before.descriptors
    if lags_ms:
        row.lags_ms = median(lags_ms), max(lags_ms)
    return told


async def come_after(siege: Siege, row: Row) -> None:
    """Newcomers when it is over, each of another block."""
    for number in range(NEWCOMERS_AFTER):
        source = f"{siege.settings.networks[1]}.{241 + number}.9"
        why = await greet(siege.door, siege.target.extra["run_id"], source)
        row.after += 1
        row.after_in += not why


async def wait_until_back(target: Target, before: Figures, row: Row) -> None:
    """Wait until memory and descriptors are as they were, for a minute at most."""
    began_s = time.monotonic()
    while (now := target.figures()) is not None:
        row.memory_left_bytes = now.memory_bytes - before.memory_bytes
        row.descriptors_left = now.descriptors - before.descriptors
        elapsed_s = time.monotonic() - began_s
        if row.is_back:
            row.back_s = elapsed_s
            return
        if elapsed_s > BACK_S:
            return
        await trio.sleep(0.5)


def medians(records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Median and 99th percentile of latencies, in ms."""
    values = [float(record["ms"]) for record in records]
    return percentile(values, 0.5), percentile(values, 0.99)


def note_honest(siege: Siege, observer: Observer, row: Row, began_s: float, ended_s: float) -> None:
    """Note what honest peers and newcomers noticed."""
    asked = observer.between("honest", began_s, ended_s)
    row.honest, row.honest_failed = len(asked), sum(not each["ok"] for each in asked)
    reasons = Counter(each["why"] for each in asked if not each["ok"])
    row.honest_why = reasons.most_common(1)[0][0] if reasons else ""
    row.times_ms = medians(asked)
    in_peace = [each for times in siege.quiet for each in observer.between("honest", *times)]
    row.base_times_ms = medians(in_peace)
    came = observer.between("newcomer", began_s, ended_s)
    row.newcomers, row.newcomers_in = len(came), sum(each["ok"] for each in came)


def misses(row: Row, target: Target, told: dict[str, Any]) -> list[str]:
    """The goals that were missed, in words."""
    gain_ms = row.times_ms[1] - row.base_times_ms[1]
    kept_out, after_out = row.newcomers - row.newcomers_in, row.after - row.after_in
    left = f"+{row.memory_left_bytes / MIB:.0f} MB and {row.descriptors_left:+d} descriptors"
    failed = f"{row.honest_failed} of {row.honest} honest requests failed ({row.honest_why})"
    slow = row.pace_per_min < target.extra.get("pace_kept", 0.0) * row.base_pace_per_min
    pace = f"{row.pace_per_min:.0f} steps a minute for {row.base_pace_per_min:.0f} in peace"
    found = {
        "the process ended": not target.running,
        f"memory +{row.memory_gain_bytes / MIB:.0f} MB": (
            row.memory_gain_bytes > MEMORY_GAIN_BYTES_MAX
        ),
        f"after a minute {left} are left": row.back_s is None,
        f"honest p99 +{gain_ms:.0f} ms": gain_ms > P99_GAIN_MS_MAX,
        failed: row.honest_failed,
        f"{kept_out} of {row.newcomers} newcomers kept out during it": kept_out,
        f"{after_out} of {row.after} newcomers kept out after it": after_out,
        f"{row.places_lost} places lost": (row.places_lost or 0) > PLACES_LEFT_MAX,
        pace: slow,
        told.get("failure", ""): "failure" in told,
    }
    texts = [text for text, missed in found.items() if missed]
    for each in row.attacks:
        texts += [
            f"{claim['what']}: {claim['value']:g} (at most {claim['most']:g})"
            for claim in each["claims"]
            if not claim["holds"]
        ]
        if each["failure"]:
            texts.append(f"the attack {each['name']} itself broke: {each['failure']}")
    return texts


# --- all rounds ----------------------------------------------------------------------------


def plan(settings: Settings) -> list[Round]:
    """The attacks that run together, target by target, in the order of the classes."""
    only = settings.only
    chosen = [e for e in ATTACKS.values() if not only or e.name in only or e.kind in only]
    rounds: list[Round] = []
    for target in TARGETS:
        for kind in CLASSES:
            here = [each for each in chosen if each.kind == kind and each.target == target]
            apart = [each for each in here if each.alone or settings.full]
            together = tuple(each.name for each in here if each not in apart)
            if together:
                rounds.append(Round(kind, target, together))
            rounds += [Round(kind, target, (each.name,)) for each in apart]
    return rounds


async def besiege(settings: Settings, rounds: Sequence[Round], rows: list[Row]) -> None:
    """Hold all rounds; a target that is not as it was makes way for a new one."""
    waiting = list(rounds)
    while waiting:
        kind = waiting[0].target
        async with AsyncExitStack() as stack:
            siege = await begun(settings, kind, len(waiting), stack)
            while waiting and waiting[0].target == kind:
                row = await hold(siege, waiting.pop(0), block=1 + (len(rows) % 200))
                rows.append(row)
                say(f"{row.label}: {'; '.join(row.misses) or 'all goals met'}")
                if worn(row, siege.target):
                    break


async def begun(settings: Settings, kind: str, number: int, stack: AsyncExitStack) -> Siege:
    """A fresh target and its honest peers."""
    say(f"starting the {kind} to be attacked")
    place = settings.out / f"{kind}-{number}"
    target = await stack.enter_async_context(TARGETS[kind](place, settings.networks[2]))
    siege = Siege(settings, target, None)
    if "door" in target.extra:
        peers = observed(siege.door, target.extra["run_id"], settings.networks[1])
        siege.observer = await stack.enter_async_context(peers)
        siege.places = await siege.census()
        say(f"places for newcomers of other blocks: {siege.places}")
    await siege.rest(FIRST_QUIET_S)
    return siege


def worn(row: Row, target: Target) -> bool:
    """Whether what was left behind would count against the next attack."""
    return (
        not target.running
        or row.back_s is None
        or row.after_in < row.after
        or (row.places_lost or 0) > PLACES_LEFT_MAX
    )


def say(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"# {time.strftime('%T')} {text}\n")
    sys.stderr.flush()


HEAD = (
    "attack", "costs it cpu s, MB", "node cpu s", "memory +MB peak, left", "fds peak, left",
    "honest p50/p99 ms", "in peace", "lag p50/max ms", "newcomers", "after", "places lost",
    "rounds/min, in peace", "refused", "banned", "misses",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table."""
    return (
        row.label,
        f"{row.attacker_cpu_s:.1f}, {row.attacker_bytes / 1e6:.1f}",
        f"{row.node_cpu_s:.1f}",
        f"{row.memory_gain_bytes / MIB:.0f}, {row.memory_left_bytes / MIB:.0f}",
        f"{row.descriptors_gain}, {row.descriptors_left}",
        *("{:.0f}/{:.0f}".format(*two) for two in (row.times_ms, row.base_times_ms, row.lags_ms)),
        f"{row.newcomers_in}/{row.newcomers}",
        f"{row.after_in}/{row.after}",
        "–" if row.places_lost is None else str(row.places_lost),
        f"{row.pace_per_min:.0f}, {row.base_pace_per_min:.0f}",
        str(row.refused),
        str(row.banned),
        "; ".join(row.misses) or "none",
    )


def table(rows: Sequence[Row], settings: Settings) -> str:
    """The goals and the figures of all rounds, for a person."""
    goals = (
        f"goals: memory +{MEMORY_GAIN_BYTES_MAX // MIB} MB at most and back within "
        f"{BACK_S:.0f} s; honest p99 at most {P99_GAIN_MS_MAX:.0f} ms above that in peace; every "
        "newcomer of another block admitted, during and after; nothing left behind"
    )
    attacks, missed = sum(len(row.names) for row in rows), sum(bool(row.misses) for row in rows)
    foot = (
        f"{attacks} attackers in {len(rows)} rounds of {settings.seconds:g} s; {missed} rounds "
        "missed a goal"
    )
    return "\n".join([*heading("siege"), goals, *aligned([HEAD, *map(cells, rows)]), foot])


# --- the command ---------------------------------------------------------------------------


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("siege", description="Attacks on a real node.")
    parser.add_argument("--full", action="store_true", help="each attacker alone")
    parser.add_argument("--only", action="append", default=[], metavar="NAME|CLASS")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--public", action="store_true", help="addresses that count as public")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--list", action="store_true", help="print the catalogue and stop")
    given = parser.parse_args(words)
    unknown = set(given.only) - set(CLASSES) - set(ATTACKS)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such attack or class")
    if not 1.0 <= given.seconds <= SECONDS_MAX:
        parser.error(f"--seconds {given.seconds:g}: must be from 1 to {SECONDS_MAX:g}")
    return given


def in_a_namespace(words: Sequence[str]) -> None:
    """Start this command again in a network namespace of its own, or set up the one we are in.

    Addresses of 198.18.0.0/15 are for tests of network devices; in there, all of them are ours.
    """
    if os.environ.get("SIEGE_NAMESPACE") != "1":
        again = ["unshare", "--net", sys.executable, "-m", "tests.hostile", "siege", *words]
        os.execvpe("unshare", again, os.environ | {"SIEGE_NAMESPACE": "1"})
    subprocess.check_call(["ip", "link", "set", "lo", "up"])
    subprocess.check_call(["ip", "route", "add", "local", "198.18.0.0/15", "dev", "lo"])


async def run(settings: Settings, rows: list[Row]) -> bool:
    """The siege, until it is over or a signal ends it; whether it came to its end."""

    async def leave(scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for number in signals:
                say(f"ended by {signal.Signals(number).name}")
                scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave, nursery.cancel_scope)
        await besiege(settings, plan(settings), rows)
        nursery.cancel_scope.cancel()
        return True
    return False


def main(words: Sequence[str]) -> int:
    """Run the command."""
    load_all()
    given = parsed(words)
    if given.list:
        for each in ATTACKS.values():
            print(f"{each.kind:14} {each.name:28} {each.rate}; {each.bound}")
        print(f"{len(ATTACKS)} attackers")
        return 0
    if given.public:
        in_a_namespace(words)
    out = Path(tempfile.mkdtemp(prefix="siege-"))
    out.chmod(0o755)  # what others may read in it, the node has to say
    settings = Settings(given.seconds, given.full, tuple(given.only), given.public, out)
    rows: list[Row] = []
    whole = False
    try:
        prepare("demo")
        whole = trio.run(run, settings, rows)
    except* TargetFailed as group:
        print(f"siege: {first_of(group)}", file=sys.stderr)
    finally:
        shutil.rmtree(out, ignore_errors=True)
        print(table(rows, settings) + ("" if whole else "\nnot all of it: it was ended before"))
        if given.json:
            given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if not whole:
        return 130
    return 1 if given.strict and any(row.misses for row in rows) else 0
