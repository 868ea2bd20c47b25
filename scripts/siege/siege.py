"""A siege: a real node under attack by all that we could think of, and what honest peers notice.

    python siege.py                  all attackers of one class together, class after class
    python siege.py --full           each attacker alone
    python siege.py --only gossip    one class, or one attack by its name (repeatable)
    python siege.py --list           the catalogue

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
from siege_attacks import ATTACKS, CLASSES, Attack, load_all
from siege_measure import greet, medians
from siege_table import HEAD, Row, cells, label, machine
from siege_target import MIB, ROOT, Figures, Target, TargetFailed, refused_of
from siege_targets import TARGETS, opened, prepare, second
from siege_wire import FAILURES, Door, Spent, admitted

from swarm.identity import Identity

HERE = Path(__file__).parent
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


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    seconds: float
    full: bool
    only: tuple[str, ...]
    public: bool
    second: bool
    out: Path

    @property
    def networks(self) -> tuple[str, str, str]:
        """Of attackers and newcomers: the first two bytes; and where nodes listen."""
        return PUBLIC if self.public else LOOPBACK


@dataclass(frozen=True, slots=True)
class Round:
    """Attacks that run together."""

    kind: str
    target: str
    names: tuple[str, ...]


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
        while data := await self.process.stdout.receive_some(65_536):
            *lines, rest = (rest + data).split(b"\n")
            self.records += [json.loads(each) for each in lines]

    def between(self, who: str, from_s: float, to_s: float) -> list[dict[str, Any]]:
        """Answers in a time; each counts where it came in, so that a stall is seen at its end."""
        return [r for r in self.records if r["who"] == who and from_s <= r["at_s"] < to_s]


@asynccontextmanager
async def observed(door: Door, run_id: str, network: str) -> AsyncIterator[Observer]:
    """Honest peers of a node, for the block."""
    address = f"/ip4/{door.host}/tcp/{door.port}/p2p/{door.peer_id}"
    command = [sys.executable, str(HERE / "siege_measure.py"), address, run_id, network]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environ()
    )
    observer = Observer(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(observer.read)
            yield observer
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await ended(process)


def child_environ() -> dict[str, str]:
    """Of our own children: they are of this siege, and take the node's code where we have it."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}


async def ended(process: trio.Process) -> None:
    """Ask a child of ours to end, and insist."""
    if process.stdin is not None:
        await process.stdin.aclose()
    with trio.move_on_after(3.0):
        await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()


# --- one round -----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Siege:
    """A target, its honest peers, and what was measured while nobody attacked it."""

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

    @property
    def attacked(self) -> Door:
        """Where the attackers go: the node, unless something beside it is the target."""
        door: Door = self.target.extra.get("attacked") or self.door
        return door

    async def rest(self, seconds: float) -> None:
        """Measure the target in peace."""
        began_s, before = time.monotonic(), await self.rounds()
        await trio.sleep(seconds)
        self.quiet_rounds += await self.rounds() - before
        self.quiet.append((began_s, time.monotonic()))

    async def rounds(self) -> int:
        """Rounds or steps that the target has done, where it is one that does any."""
        if not self.target.extra.get("has_status"):
            return 0
        return int((await self.target.status() or {}).get("round", 0))

    def pace_in_peace(self) -> float:
        """Of its work, a minute."""
        seconds = sum(to_s - from_s for from_s, to_s in self.quiet)
        return 60 * self.quiet_rounds / seconds if seconds else float("nan")

    def honest_in_peace(self) -> list[dict[str, Any]]:
        """Latencies of all quiet times of this target so far."""
        assert self.observer is not None
        return [
            record for times in self.quiet for record in self.observer.between("honest", *times)
        ]

    async def census(self, enough: int = CENSUS_MAX) -> int:
        """How many newcomers of other blocks find a place at the same time.

        Counted again where it is not as many as it was: a busy machine takes no place for good.
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
    settings, door = siege.settings, siege.attacked
    order = {
        "kind": ATTACKS[round_.names[0]].kind,
        "names": round_.names,
        "door": [door.host, door.port, door.peer_id],
        "run_id": siege.target.extra["run_id"],
        "seconds": seconds_of(settings, round_),
        "network": settings.networks[0],
        "block": block,
        "extra": {
            "data_dir": str(siege.target.data_dir),
            **{k: v for k, v in siege.target.extra.items() if isinstance(v, str | int | float)},
        },
    }
    process = await trio.lowlevel.open_process(
        [sys.executable, str(HERE / "siege_attackers.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environ(),
    )
    answer = b""
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send_all(json.dumps(order).encode())
        await process.stdin.aclose()
        with trio.move_on_after(seconds_of(settings, round_) + GRACE_S):
            async for part in process.stdout:
                answer += part
    finally:
        with trio.CancelScope(shield=True):
            if process.returncode is None:
                with trio.move_on_after(2.0):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    try:
        told: dict[str, Any] = json.loads(answer)
    except ValueError:
        return {"attacks": [], "cpu_s": 0.0, "failure": "the attackers' process told nothing"}
    return told


def seconds_of(settings: Settings, round_: Round) -> float:
    """How long a round takes: some show nothing in less than a while."""
    return max(settings.seconds, *(ATTACKS[name].seconds_min for name in round_.names))


async def sample(target: Target, found: list[Figures]) -> None:
    """Note memory and descriptors, again and again."""
    while True:
        now = target.figures()
        if now is not None:
            found.append(now)
        await trio.sleep(SAMPLE_S)


async def feel_lag(target: Target, lags_ms: list[float]) -> None:
    """How long the node takes to answer on its own status socket: its loop, from outside."""
    while True:
        began_s = time.monotonic()
        if await target.status() is not None:
            lags_ms.append(1_000 * (time.monotonic() - began_s))
        await trio.sleep(LAG_S)


async def hold(siege: Siege, round_: Round, block: int) -> Row:
    """One round: rest, attack, and what stays behind."""
    target = siege.target
    await siege.rest(QUIET_S * target.extra.get("rest", 1.0))
    row = Row(round_.kind, round_.names, "; ".join(ATTACKS[n].rate for n in round_.names[:1]))
    before, status = target.figures(), await target.status() or {}
    if before is None:
        raise TargetFailed(f"{target.name} is gone before the attack")
    found, lags_ms = [before], []
    say(f"{label(row)}: attack")
    began_s, done = time.monotonic(), await siege.rounds()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sample, target, found)
        if target.extra.get("has_status"):
            nursery.start_soon(feel_lag, target, lags_ms)
        told = await attackers(siege, round_, block)
        nursery.cancel_scope.cancel()
    ended_s = time.monotonic()
    row.pace_per_min = 60 * (await siege.rounds() - done) / (ended_s - began_s)
    row.base_pace_per_min = siege.pace_in_peace()
    say(f"{label(row)}: attacked for {ended_s - began_s:.0f} s; what stays behind?")
    row.attacks = told["attacks"]
    row.attacker_cpu_s = told["cpu_s"]
    row.attacker_bytes = sum(each["bytes_out"] for each in row.attacks)
    last = found[-1]
    row.node_cpu_s = last.cpu_s - before.cpu_s
    row.memory_gain_bytes = max(each.memory_bytes for each in found) - before.memory_bytes
    row.descriptors_gain = max(each.descriptors for each in found) - before.descriptors
    if lags_ms:
        row.lag_p50_ms, row.lag_max_ms = median(lags_ms), max(lags_ms)
    await come_after(siege, row)
    await wait_until_back(target, before, row)
    if siege.observer is not None:
        note_honest(siege, row, began_s, ended_s)
    if siege.places is not None:
        now = await siege.census(siege.places)
        row.places_lost = siege.places - now
    after = await target.status() or {}
    row.refused = refused_of(after) - refused_of(status)
    row.banned = len(after.get("bans", ())) - len(status.get("bans", ()))
    row.misses = misses(row, target, told)
    return row


async def come_after(siege: Siege, row: Row) -> None:
    """Newcomers when it is over, each of another block."""
    if siege.observer is None:
        return
    network = siege.settings.networks[1]
    for number in range(NEWCOMERS_AFTER):
        why = await greet(
            siege.door, siege.target.extra["run_id"], f"{network}.{241 + number}.9", Spent()
        )
        row.after += 1
        row.after_in += not why


async def wait_until_back(target: Target, before: Figures, row: Row) -> None:
    """Until memory and descriptors are as they were, for a minute at most."""
    began_s = time.monotonic()
    while True:
        now = target.figures()
        if now is None:
            return
        row.memory_left_bytes = now.memory_bytes - before.memory_bytes
        row.descriptors_left = now.descriptors - before.descriptors
        elapsed_s = time.monotonic() - began_s
        if is_back(row):
            row.back_s = elapsed_s
            return
        if elapsed_s > BACK_S:
            return
        await trio.sleep(0.5)


def is_back(row: Row) -> bool:
    """Whether nothing of the attack is left in memory and descriptors."""
    return (
        row.memory_left_bytes <= MEMORY_LEFT_BYTES_MAX
        and row.descriptors_left <= DESCRIPTORS_LEFT_MAX
    )


def note_honest(siege: Siege, row: Row, began_s: float, ended_s: float) -> None:
    """What honest peers and newcomers noticed."""
    assert siege.observer is not None
    asked = siege.observer.between("honest", began_s, ended_s)
    row.honest, row.honest_failed = len(asked), sum(not each["ok"] for each in asked)
    reasons = Counter(each["why"] for each in asked if not each["ok"])
    row.honest_why = reasons.most_common(1)[0][0] if reasons else ""
    row.p50_ms, row.p99_ms = medians(asked)
    row.base_p50_ms, row.base_p99_ms = medians(siege.honest_in_peace())
    came = siege.observer.between("newcomer", began_s, ended_s)
    row.newcomers, row.newcomers_in = len(came), sum(each["ok"] for each in came)


def misses(row: Row, target: Target, told: dict[str, Any]) -> list[str]:
    """Which goals were missed, in words."""
    gain_ms = row.p99_ms - row.base_p99_ms
    found = [
        (not target.running, "the process ended"),
        (
            row.memory_gain_bytes > MEMORY_GAIN_BYTES_MAX,
            f"memory +{row.memory_gain_bytes / MIB:.0f} MB",
        ),
        (
            row.back_s is None,
            f"after a minute +{row.memory_left_bytes / MIB:.0f} MB and "
            f"{row.descriptors_left:+d} descriptors are left",
        ),
        (gain_ms > P99_GAIN_MS_MAX, f"honest p99 +{gain_ms:.0f} ms"),
        (
            row.honest_failed > 0,
            f"{row.honest_failed} of {row.honest} honest requests failed ({row.honest_why})",
        ),
        (
            row.newcomers_in < row.newcomers,
            f"{row.newcomers - row.newcomers_in} of {row.newcomers} newcomers kept out during it",
        ),
        (
            row.after_in < row.after,
            f"{row.after - row.after_in} of {row.after} newcomers kept out after it",
        ),
        ((row.places_lost or 0) > PLACES_LEFT_MAX, f"{row.places_lost} places lost"),
        (
            row.pace_per_min < target.extra.get("pace_kept", 0.0) * row.base_pace_per_min,
            f"{row.pace_per_min:.0f} steps a minute for {row.base_pace_per_min:.0f} in peace",
        ),
    ]
    texts = [text for missed, text in found if missed]
    for each in row.attacks:
        texts += [
            f"{claim['what']}: {claim['value']:g} (at most {claim['most']:g})"
            for claim in each["claims"]
            if not claim["holds"]
        ]
        if each["failure"]:
            texts.append(f"the attack {each['name']} itself broke: {each['failure']}")
    if "failure" in told:
        texts.append(told["failure"])
    return texts


# --- all rounds ----------------------------------------------------------------------------


def plan(settings: Settings) -> list[Round]:
    """What runs with what, in the order of the classes."""
    chosen = [each for each in ATTACKS.values() if is_chosen(each, settings.only)]
    rounds: list[Round] = []
    for kind in CLASSES:
        for target in TARGETS:
            here = [each for each in chosen if each.kind == kind and each.target == target]
            apart = [each for each in here if each.alone or settings.full]
            together = tuple(each.name for each in here if each not in apart)
            if together:
                rounds.append(Round(kind, target, together))
            rounds += [Round(kind, target, (each.name,)) for each in apart]
    return sorted(rounds, key=lambda each: list(TARGETS).index(each.target))


def is_chosen(attack: Attack, only: Sequence[str]) -> bool:
    """Whether a command line asks for an attack."""
    return not only or attack.name in only or attack.kind in only


async def besiege(settings: Settings, rounds: Sequence[Round], rows: list[Row]) -> None:
    """Hold all rounds; a target that is not as it was makes way for a new one."""
    waiting = list(rounds)
    while waiting:
        kind = waiting[0].target
        async with AsyncExitStack() as stack:
            siege = await begun(settings, kind, len(waiting), stack)
            while waiting and waiting[0].target == kind:
                round_ = waiting.pop(0)
                row = await hold(siege, round_, block=1 + (len(rows) % 200))
                rows.append(row)
                tell(row)
                if worn(row, siege.target):
                    break


async def begun(settings: Settings, kind: str, number: int, stack: AsyncExitStack) -> Siege:
    """A fresh target and its honest peers."""
    data_dir = settings.out / f"{kind}-{number}"
    say(f"starting the {kind} to be attacked")
    target = await stack.enter_async_context(opened(kind, data_dir, settings.networks[2]))
    observer = None
    if "door" in target.extra:
        observer = await stack.enter_async_context(
            observed(target.extra["door"], target.extra["run_id"], settings.networks[1])
        )
        if settings.second:
            place = settings.out / f"second-{number}"
            await stack.enter_async_context(second(target, place, settings.networks[2]))
    siege = Siege(settings, target, observer)
    if observer is not None:
        siege.places = await siege.census()
        say(f"places for newcomers of other blocks: {siege.places}")
    await siege.rest(FIRST_QUIET_S * target.extra.get("rest", 1.0))
    return siege


def worn(row: Row, target: Target) -> bool:
    """Whether what was left behind would count against the next attack."""
    return (
        not target.running
        or row.back_s is None
        or row.after_in < row.after
        or ((row.places_lost or 0) > PLACES_LEFT_MAX)
    )


# --- telling -------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line about how it goes."""
    print(f"# {time.strftime('%T')} {text}", file=sys.stderr, flush=True)


def tell(row: Row) -> None:
    """One row, when it is done."""
    say(f"{label(row)}: {'; '.join(row.misses) or 'all goals met'}")


def table(rows: Sequence[Row], settings: Settings) -> str:
    """All of it, for a person: what, where, the goals, and a line for each round."""
    lines = [f"command: python scripts/siege/siege.py {' '.join(sys.argv[1:])}".rstrip()]
    lines += [f"commit: {commit()}", f"machine: {machine()}"]
    lines.append(
        f"goals: memory +{MEMORY_GAIN_BYTES_MAX // MIB} MB at most and back within "
        f"{BACK_S:.0f} s; honest p99 at most {P99_GAIN_MS_MAX:.0f} ms above that in peace; every "
        "newcomer of another block admitted, during and after; nothing left behind"
    )
    grid = [HEAD, *(cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in grid) for at in range(len(HEAD) - 1)]
    for line in grid:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        lines.append("  ".join([*padded, line[-1]]))
    attacks = sum(len(row.names) for row in rows)
    missed = sum(bool(row.misses) for row in rows)
    lines.append(
        f"{attacks} attackers in {len(rows)} rounds of {settings.seconds:g} s; {missed} rounds "
        "missed a goal"
    )
    return "\n".join(lines)


def commit() -> str:
    """Of the code under siege, and whether it has changes."""
    with suppress(OSError, subprocess.CalledProcessError):
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
        return subprocess.check_output(words, text=True).strip()
    return "unknown"


# --- the command ---------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true", help="each attacker alone")
    parser.add_argument("--only", action="append", default=[], metavar="NAME|CLASS")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--public", action="store_true", help="addresses that count as public")
    parser.add_argument("--second", action="store_true", help="a second real node beside it")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a goal is missed")
    parser.add_argument("--list", action="store_true", help="print the catalogue and stop")
    given = parser.parse_args()
    unknown = set(given.only) - set(CLASSES) - set(ATTACKS)
    if unknown:
        parser.error(f"--only {', '.join(sorted(unknown))}: no such attack or class")
    if not 1.0 <= given.seconds <= SECONDS_MAX:
        parser.error(f"--seconds {given.seconds:g}: must be from 1 to {SECONDS_MAX:g}")
    return given


def in_a_namespace() -> None:
    """Start this command again in a network namespace of its own, or set up the one we are in.

    Addresses of 198.18.0.0/15 are for tests of network devices; in there, all of them are ours.
    """
    if os.environ.get("SIEGE_NAMESPACE") != "1":
        words = ["unshare", "--net", sys.executable, *sys.argv]
        os.execvpe("unshare", words, os.environ | {"SIEGE_NAMESPACE": "1"})
    subprocess.check_call(["ip", "link", "set", "lo", "up"])
    subprocess.check_call(["ip", "route", "add", "local", "198.18.0.0/15", "dev", "lo"])


async def run(settings: Settings, rows: list[Row]) -> bool:
    """The siege, until it is over or a signal ends it. Whether it came to its end."""

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


def first_of(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first error in a group of groups."""
    first = group.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def main() -> int:
    """The command."""
    load_all()
    given = parsed()
    if given.list:
        for each in ATTACKS.values():
            print(f"{each.kind:14} {each.name:28} {each.rate}; {each.bound}")
        print(f"{len(ATTACKS)} attackers")
        return 0
    if given.public:
        in_a_namespace()
    out = Path(tempfile.mkdtemp(prefix="siege-"))
    out.chmod(0o755)  # what others may read in it, the node has to say
    settings = Settings(
        given.seconds, given.full, tuple(given.only), given.public, given.second, out
    )
    rows: list[Row] = []
    whole = False
    try:
        prepare()
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


if __name__ == "__main__":
    sys.exit(main())
