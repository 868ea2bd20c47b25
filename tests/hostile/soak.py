"""A soak: a swarm of real processes for an hour and a half, everybody killed at random by a seed.

    python -m tests.hostile soak [--minutes 90] [--seed 1] [--out out/soak]

Four nodes that share rollouts, a learner with two workers, and a hostile peer that takes leases,
hands in nonsense and floods a little; all in one run, on loopback, with the tiny model, one thread
each and little priority. Every ten seconds memory, descriptors, threads, disk and databases are
written to `samples.jsonl`, by process; at the end, or at a SIGTERM, a table says what grew.

It fits on two shared cores. Exit status: 0 when it came to its end and nothing grew by more than
five per cent; 1 when something did, or nothing was trained; 2 for bad arguments; 143 when ended.
"""

import argparse
import json
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import psutil
import trio

from swarm.identity import Identity
from tests.hostile.soak_figures import Groups, sizes_of, table
from tests.hostile.targets import ask_status, free_port, prepare, start

NODES, WORKERS = ("node-1", "node-2", "node-3", "node-4"), ("worker-1", "worker-2")
LEARNER, HOSTILE = "learner", "hostile"
NICENESS = 12
SAMPLE_S = 10.0
GROUPS_S = 30.0  # between two looks into the pools
LIFE_S = 900.0  # of a process, in the mean, until it is killed
DOWN_S = (2.0, 12.0)  # how long a killed one stays away
CALM_S = 120.0  # at the start and at the end, in which nobody is killed
START_TIMEOUT_S = 300.0
LEAVE_TIMEOUT_S = 60.0
NOTICE_S = 20.0  # within which children are to end when who started them was killed
TERMINATE_S = 45.0  # to leave after a SIGTERM in the middle, before it is killed
MINUTES_MAX = 24 * 60.0
TOKENS_PER_S = 60  # of a worker: what the learner can use on a slow machine
ENDED = 143
RUN_FILE = """# Made by the soak.
name = "soak"
environments = [{{name = "binary_matrix", parameters = {{prompt = "terse", min_n = 4, max_n = 4}}}}]
sampling = {{max_new_tokens = 40}}
held_out = {{tasks = 20}}

[learner]
peer = "{peer}"
staleness_max = 3
groups_per_step = 4
group_size = 4
lease_life_s = 60

[training]
loss = "decoupled"
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """The command line."""

    minutes: float
    seed: int
    out: Path


@dataclass(eq=False, slots=True)
class Member:
    """A process of the swarm, which is started again whenever it ends."""

    name: str
    command: list[str]
    data_dir: Path
    process: "subprocess.Popen[bytes] | None" = None
    started_s: float = 0.0
    starts: int = 0
    ends: Counter[str] = field(default_factory=Counter)  # by how it came to its end

    @property
    def role(self) -> str:
        """The name without its number."""
        return self.name.partition("-")[0]

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it, again or for the first time."""
        self.process = start(self.command, self.data_dir, NICENESS)
        self.started_s = time.monotonic()
        self.starts += 1

    def tree(self) -> list[psutil.Process]:
        """Its process and all under it."""
        if not self.running:
            return []
        assert self.process is not None
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def kill_all(self) -> None:
        """End it and whatever it started, at once."""
        for each in reversed(self.tree()):
            with suppress(psutil.Error):
                each.kill()
        if self.process is not None:
            self.process.wait()


# --- the swarm -----------------------------------------------------------------------------


def key_of(data_dir: Path) -> Identity:
    """The key in a data directory, made if there is none."""
    path = data_dir / "identity.pem"
    if not path.exists():
        Identity.generate().save(path, None)
    return Identity.load(path, None)


def swarm(settings: Settings) -> list[Member]:
    """All members, none of them started. Each keeps the address that others know."""
    names = [LEARNER, *NODES, *WORKERS]
    keys = {name: key_of(settings.out / name) for name in names}
    ports: dict[str, int] = {}
    while len(set(ports.values())) < len(names):
        ports = {name: free_port("127.0.0.1") for name in names}
    addresses = {
        name: f"/ip4/127.0.0.1/tcp/{ports[name]}/p2p/{keys[name].peer_id}" for name in names
    }
    run_file = settings.out / "soak.toml"
    run_file.write_text(RUN_FILE.format(peer=keys[LEARNER].peer_id))
    members = []
    for place, name in enumerate(names):
        common = ["--run", str(run_file), "--data-dir", str(settings.out / name), "--no-lan"]
        common += ["--no-upnp", "--listen", f"/ip4/127.0.0.1/tcp/{ports[name]}", "--threads", "1"]
        known = [names[(place + step) % len(names)] for step in (1, 3)]
        for other in {*known, LEARNER} - {name}:
            common += ["--peer", addresses[other]]
        members.append(Member(name, ["node.cli", *words_of(name), *common], settings.out / name))
    hostile = ["tests.hostile.soak_peer", str(run_file), addresses[LEARNER], addresses["node-1"]]
    return [*members, Member(HOSTILE, hostile, settings.out / HOSTILE)]


def words_of(name: str) -> list[str]:
    """The subcommand and flags of a member."""
    if name == LEARNER:
        return ["learn", "--evaluate-every", "0"]
    if name in WORKERS:
        return ["join", "--tokens-per-s-max", str(TOKENS_PER_S)]
    flags = ["join", "--role", "node", "--local", "4", "--external", "2", "--group-size", "4"]
    return [*flags, "--evaluate-every", "0"]


# --- killing -------------------------------------------------------------------------------


async def keep_alive(member: Member) -> None:
    """Start a member that has ended by itself again, and count that."""
    while True:
        await trio.sleep(1.0)
        if member.process is not None and not member.running and not member.ends["being killed"]:
            member.ends[f"by itself ({member.process.poll()})"] += 1
            await trio.sleep(DOWN_S[0])
            if not member.running:
                member.start()


async def kill_at_random(member: Member, rng: Random, calm_s: float, until_s: float) -> None:
    """Once all are up, end it now and then, by SIGKILL or SIGTERM, until it is time to calm
    down."""
    await trio.sleep(calm_s)
    while True:
        await trio.sleep(max(30.0, rng.expovariate(1 / LIFE_S)))
        if trio.current_time() > until_s:
            return
        hard = rng.random() < 0.5
        down_s = rng.uniform(*DOWN_S)
        member.ends["being killed"] += 1  # so that nobody starts it meanwhile
        try:
            await end_one(member, hard)
            await trio.sleep(down_s)
        finally:
            member.ends["being killed"] -= 1
        member.start()


async def end_one(member: Member, hard: bool) -> None:
    """End one member by a signal; a hard end spares its children as little as a power cut does."""
    if not member.running:
        return
    assert member.process is not None
    children = member.tree()[1:]
    if not hard:
        member.process.terminate()
        with trio.move_on_after(TERMINATE_S):
            while member.running:  # noqa: ASYNC110  no event for it
                await trio.sleep(0.2)
    member.ends["SIGKILL" if hard or member.running else "SIGTERM"] += 1
    if not hard and member.running:
        member.ends["did not heed SIGTERM"] += 1
    if member.running:
        member.process.kill()
        member.process.wait()
    for each in await still_there(children):
        with suppress(psutil.Error):
            member.ends[f"left behind: {program_of(each)}"] += 1
            each.kill()


async def still_there(children: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not noticed in their time that who started them is gone."""
    with trio.move_on_after(NOTICE_S):
        while any(is_alive(each) for each in children):  # noqa: ASYNC110  no event for it
            await trio.sleep(0.5)
    return [each for each in children if is_alive(each)]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def program_of(process: psutil.Process) -> str:
    """The module that a process of ours runs."""
    words = process.cmdline()
    return next((word for word in words if word.startswith("node.")), process.name())


# --- sampling ------------------------------------------------------------------------------


def sample_of(member: Member, at_s: float) -> dict[str, Any]:
    """All that is measured of a member now."""
    record: dict[str, Any] = {"at_s": round(at_s, 1), "name": member.name, "role": member.role}
    record |= {"life": member.starts, "age_s": round(time.monotonic() - member.started_s, 1)}
    record |= sizes_of(member.data_dir)
    tree = member.tree()
    if not tree:
        return record | {"down": True}
    with suppress(psutil.Error):
        with tree[0].oneshot():
            record["rss"] = tree[0].memory_info().rss
            record["fds"] = tree[0].num_fds()
            record["threads"] = tree[0].num_threads()
        record["pss"] = tree[0].memory_full_info().pss
        record["children_pss"] = sum(each.memory_full_info().pss for each in tree[1:])
        record["children"] = len(tree) - 1
    status = ask_status(member.data_dir) if member.name != HOSTILE else None
    if status:
        names = ("round", "tasks", "pool_groups", "accepted", "phase")
        record |= {name: status[name] for name in names if name in status}
        record["bans"] = len(status.get("bans", ()))
    return record


async def sample(members: Sequence[Member], samples: list[dict[str, Any]], file: Path) -> None:
    """Measure everybody every ten seconds, and write it down at once."""
    began_s = trio.current_time()
    while True:
        due_s = trio.current_time() + SAMPLE_S
        at_s = trio.current_time() - began_s
        found = [await trio.to_thread.run_sync(sample_of, each, at_s) for each in members]
        samples += found
        with file.open("a") as out:
            out.writelines(json.dumps(each) + "\n" for each in found)
        await trio.sleep_until(due_s)


async def look_into_pools(members: Sequence[Member], groups: Groups) -> None:
    """Follow each group from its producer's pool into the others'."""
    while True:
        for member in members:
            if member.name in NODES:
                await trio.to_thread.run_sync(groups.look, member.data_dir, member.name)
        await trio.sleep(GROUPS_S)


# --- from start to end -----------------------------------------------------------------------


async def begin(members: Sequence[Member]) -> None:
    """Start the learner and, when it listens, the others."""
    members[0].start()
    with trio.move_on_after(START_TIMEOUT_S):
        while await trio.to_thread.run_sync(ask_status, members[0].data_dir) is None:
            if not members[0].running:
                raise SystemExit(f"the learner ended: see {members[0].data_dir}/console.log")
            await trio.sleep(0.5)
    for member in members[1:]:
        member.start()
        await trio.sleep(2.0)


async def leave_all(members: Sequence[Member]) -> None:
    """Ask all to leave, then insist. Nothing that was started here outlives this."""
    trees = [each for member in members for each in member.tree()]
    for member in members:
        if member.running and member.process is not None:
            member.process.send_signal(signal.SIGINT)
    with trio.move_on_after(LEAVE_TIMEOUT_S):
        while any(member.running for member in members):  # noqa: ASYNC110  no event for it
            await trio.sleep(0.2)
    for member in members:
        if member.running:
            member.ends["had to be killed at the end"] += 1
        member.kill_all()
    for each in trees:
        with suppress(psutil.Error):
            each.kill()


@dataclass(slots=True)
class Soak:
    """The swarm and what was measured of it."""

    members: list[Member]
    samples: list[dict[str, Any]] = field(default_factory=list)
    groups: Groups = field(default_factory=Groups)
    whole: bool = False  # it came to its end


async def run(settings: Settings, soak: Soak) -> None:
    """All of it. Whatever happens, no process outlives it."""

    async def leave(scope: trio.CancelScope) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            async for _ in signals:
                scope.cancel()

    members = soak.members
    rng = Random(settings.seed)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave, nursery.cancel_scope)
            await begin(members)
            ends_s = trio.current_time() + 60 * settings.minutes
            calm_s = min(CALM_S, 6 * settings.minutes)
            nursery.start_soon(sample, members, soak.samples, settings.out / "samples.jsonl")
            nursery.start_soon(look_into_pools, members, soak.groups)
            for member in members:
                own = Random(rng.getrandbits(64))
                nursery.start_soon(keep_alive, member)
                nursery.start_soon(kill_at_random, member, own, calm_s, ends_s - calm_s)
            await trio.sleep_until(ends_s)
            soak.whole = True
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await leave_all(members)
            for member in members:
                if member.name in NODES:
                    soak.groups.look(member.data_dir, member.name)


def parsed(words: Sequence[str]) -> Settings:
    """Parse the command line."""
    parser = argparse.ArgumentParser("soak", description="A swarm, killed at random.")
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    given = parser.parse_args(words)
    if not 0.5 <= given.minutes <= MINUTES_MAX:
        parser.error(f"--minutes {given.minutes:g}: must be from 0.5 to {MINUTES_MAX:g}")
    return Settings(given.minutes, given.seed, given.out.absolute())


def clear(out: Path) -> None:
    """Delete what an earlier soak left, known by its run file; the learner's key stays, for the
    run and so the policy in the cache depend on it."""
    if (out / "soak.toml").exists():
        for name in (*NODES, *WORKERS, HOSTILE):
            shutil.rmtree(out / name, ignore_errors=True)
        for path in (out / LEARNER).glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "identity.pem":
                path.unlink()
        for name in ("samples.jsonl", "table.txt"):
            (out / name).unlink(missing_ok=True)


def main(words: Sequence[str]) -> int:
    """Run the command."""
    settings = parsed(words)
    settings.out.mkdir(parents=True, exist_ok=True)
    clear(settings.out)
    soak = Soak(swarm(settings))
    prepare(str(settings.out / "soak.toml"))
    trio.run(run, settings, soak)
    text, grew = table(soak, settings)
    (settings.out / "table.txt").write_text(text + "\n")
    print(text)
    if not soak.whole:
        return ENDED
    return 1 if grew else 0
