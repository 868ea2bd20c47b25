"""Hosts on slow and lossy links, on this machine: network namespaces with shaped links in between.

    python wanlab.py [--profile volunteer] [--hosts 4] [--home 0] [--seconds 60]
    python wanlab.py --shell
    python wanlab.py --hosts 2 -- python ask.py {name} {address} {first}

By default each host runs `swarm-node join` on the tiny policy; host 0 starts the swarm. A command
after `--` runs instead, once on each host, and `--shell` runs nothing and prints a line that opens
a shell on each host. `--home` puts that many of the hosts behind routers of their own, which
masquerade them and let nobody in. Needs Linux and root; Ctrl-C takes everything down.

What hosts print is in OUT/host-N/console.log. Exit status: 0 when every command ended well or was
still running at the end, 1 when one failed, 2 where this machine cannot run a lab, 130 when
interrupted.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from node.monitor.status import fetch_status
from node.records.event_log import FILE_NAME, history, read_events
from swarm.errors import ConfigError, RequestTimeout
from swarm.simulation.profiles import PROFILES, links_of
from swarm.simulation.sockets.lab import Home, Lab, missing, missing_for_homes, open_lab

POLL_S = 0.5
START_TIMEOUT_S = 240.0  # a node's first start may make the tiny policy
LEAVE_TIMEOUT_S = 60.0
PORT = 4001
LOG_NAME = "console.log"
LEFT_WELL = (0, 130, -signal.SIGINT)


class LabFailed(Exception):
    """The lab cannot go on; the message says why in one line."""


@dataclass(slots=True)
class Running:
    """One host's command."""

    name: str
    directory: Path
    process: "subprocess.Popen[bytes]"

    def failed(self) -> bool:
        """Whether it ended, and not well."""
        return self.process.poll() not in (None, *LEFT_WELL)


def run_on(lab: Lab, name: str, command: Sequence[str], out: Path) -> Running:
    """Start a command on a host; what it prints goes to its log. Ctrl-C reaches the lab alone."""
    directory = out / f"host-{name}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOG_NAME).open("wb") as log:
        process = lab.start(
            name,
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
    return Running(name, directory, process)


def join(lab: Lab, name: str, out: Path, peer: str | None) -> Running:
    """Start a node on a host."""
    command = [sys.executable, "-m", "node.cli", "join", "--run", "demo", "--model", "tiny"]
    command += ["--data-dir", str(out / f"host-{name}"), "--listen", f"/ip4/0.0.0.0/tcp/{PORT}"]
    command += ["--threads", "1", "--local", "2", "--external", "2", "--evaluate-every", "0"]
    if peer is not None:
        command += ["--peer", peer]
    return run_on(lab, name, command, out)


def address_of(node: Running, ip: str) -> str:
    """Where a node listens on its host's own address, once it does.

    Raises:
        LabFailed: it ended or does not answer.
    """
    limit_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < limit_s:
        if node.process.poll() is not None:
            break
        try:
            addresses = fetch_status(node.directory).addresses
            return next(each for each in addresses if each.startswith(f"/ip4/{ip}/"))
        except (ConfigError, RequestTimeout, StopIteration):
            time.sleep(POLL_S)
    raise LabFailed(f"host {node.name} did not start: see {node.directory / LOG_NAME}")


def start_all(lab: Lab, arguments: argparse.Namespace) -> list[Running]:
    """Start each host's command, or none."""
    names, out = lab.hosts(), arguments.out
    if arguments.shell:
        return []
    if arguments.command:
        facts = {"first": lab.address(names[0])}
        return [
            run_on(
                lab,
                name,
                [
                    word.format(name=name, address=lab.address(name), **facts)
                    for word in arguments.command
                ],
                out,
            )
            for name in names
        ]
    nodes = [join(lab, names[0], out, None)]
    peer = address_of(nodes[0], lab.address(names[0]))
    return nodes + [join(lab, name, out, peer) for name in names[1:]]


def wait(running: Sequence[Running], seconds: float | None) -> None:
    """Until the time is up or all commands ended; without either, until Ctrl-C."""
    limit_s = time.monotonic() + seconds if seconds is not None else None
    while limit_s is None or time.monotonic() < limit_s:
        if running and all(each.process.poll() is not None for each in running):
            return
        time.sleep(POLL_S)


def stop_all(running: Sequence[Running]) -> None:
    """Ask all to leave, and wait; the lab's end kills those that stay."""
    for each in running:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGINT)
    limit_s = time.monotonic() + LEAVE_TIMEOUT_S
    for each in running:
        try:
            each.process.wait(max(0.1, limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()


def show_hosts(console: Console, lab: Lab, arguments: argparse.Namespace) -> None:
    """What was made."""
    public = arguments.hosts - arguments.home
    heads = ("host", "address", "up Mbit/s", "down", "one way ms", "jitter", "loss %", "where")
    table = Table(*heads, box=None)
    for index, link in enumerate(links_of(arguments.profile, arguments.hosts)):
        where = "public" if index < public else f"behind {lab.address(f'router-{index}')}"
        table.add_row(
            str(index),
            lab.address(str(index)),
            *(f"{rate * 8e-6:g}" for rate in (link.up_bytes_per_s, link.down_bytes_per_s)),
            *(f"{1e3 * each:g}" for each in (link.latency_s, link.jitter_s)),
            f"{100 * link.loss:g}",
            where,
        )
    console.print(table)
    for name in lab.hosts() if arguments.shell else ():
        command = " ".join(lab.command(name, [os.environ.get("SHELL", "bash")]))
        console.print(f"host {name}:  {command}", soft_wrap=True, highlight=False)


def show_end(console: Console, lab: Lab, running: Sequence[Running]) -> None:
    """What went over each access link, and what the nodes did."""
    table = Table("link", "sent MB", "packets", "lost", "overflowed", box=None)
    for name, sent in lab.counters().items():
        counts = [f"{sent[what]:,}" for what in ("packets", "lost", "overflowed")]
        table.add_row(name, f"{sent['bytes'] / 1e6:.2f}", *counts)
    console.print(table)
    for each in running:
        if (each.directory / FILE_NAME).exists():
            rounds = [done for _, done in history(read_events(each.directory / FILE_NAME)).rounds]
            shared = sum(done.groups_shared for done in rounds)
            used = sum(done.external_groups for done in rounds)
            done = f"{len(rounds)} rounds, {shared} groups shared, {used} of others used"
            console.print(f"host {each.name}: {done}", highlight=False)
        if each.failed():
            log = each.directory / LOG_NAME
            console.print(f"host {each.name} ended with {each.process.returncode}: see {log}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--profile", default="volunteer", choices=sorted(PROFILES))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--home", type=int, default=0, metavar="N", help="hosts behind routers")
    parser.add_argument("--symmetric", action="store_true", help="routers that change ports")
    parser.add_argument("--seconds", type=float, help="then end; default: Ctrl-C ends")
    parser.add_argument("--seed", type=int, default=0, help="of jitter and loss")
    parser.add_argument("--shell", action="store_true", help="only print how to enter the hosts")
    parser.add_argument("--out", type=Path, default=Path("out/wanlab"))
    parser.add_argument("command", nargs="*", help="instead of a node, after --")
    arguments = parser.parse_args()
    if not 0 <= arguments.home < arguments.hosts:
        parser.error(f"--home {arguments.home}: host 0 is public, so from 0 to one less than hosts")
    return arguments


def run(arguments: argparse.Namespace, console: Console) -> int:
    """The lab from beginning to end; the exit status."""
    links = links_of(arguments.profile, arguments.hosts)
    public = arguments.hosts - arguments.home
    homes = [
        Home(f"router-{index}", links[index], (str(index),), arguments.symmetric)
        for index in range(public, arguments.hosts)
    ]
    for old in arguments.out.glob("host-*"):
        if (old / LOG_NAME).is_file():
            shutil.rmtree(old)
    hosts = {str(index): links[index] for index in range(public)}
    with open_lab(hosts, homes, arguments.seed) as lab:
        show_hosts(console, lab, arguments)
        running: list[Running] = []
        interrupted = False
        try:
            running = start_all(lab, arguments)
            wait(running, arguments.seconds)
        except KeyboardInterrupt:
            interrupted = True
        stop_all(running)
        show_end(console, lab, running)
        failed = any(each.failed() for each in running)
    return 1 if failed else 130 if interrupted and arguments.seconds else 0


def main() -> None:
    arguments, console = parse(), Console()
    if (reason := missing_for_homes() if arguments.home else missing()) is not None:
        console.print(reason)
        sys.exit(2)
    try:
        sys.exit(run(arguments, console))
    except (LabFailed, ConfigError) as error:
        console.print(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
