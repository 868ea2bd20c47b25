"""Hosts with real sockets on slow, lossy and masqueraded links, in network namespaces that live
as long as this process holds them. Others enter by `Namespace.path`, for example with `nsenter
--net=PATH`."""

import ctypes
import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError
from swarm.simulation.links import LinkProfile

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
COMMAND_TIMEOUT_S = 20.0
WAN = "wan0"  # access link of a host or router
LAN = "lan0"  # router's bridge to its hosts
MTU = 1500

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace, held by an open descriptor."""

    descriptor: int

    @property
    def path(self) -> str:
        """Path for other processes."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @property
    def number(self) -> int:
        return os.fstat(self.descriptor).st_ino


def new_namespace() -> Namespace:
    """Make a network with loopback only; ConfigError: this process may not."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.unshare(CLONE_NEWNET))
        made = Namespace(os.open("/proc/self/ns/net", os.O_RDONLY))
        configure("link set lo up")
        _check(_libc.setns(home, CLONE_NEWNET))
    finally:
        os.close(home)
    return made


@contextmanager
def inside(namespace: Namespace) -> Iterator[None]:
    """Run the block, child processes included, in this network."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.setns(namespace.descriptor, CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(home, CLONE_NEWNET))
    finally:
        os.close(home)


def open_tun() -> int:
    """Make the interface `WAN` here; its packets go through the descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", WAN.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def configure(*commands: str) -> None:
    """Run `ip` commands in the current namespace; ConfigError if one fails."""
    run("ip", "-batch", "-", text="\n".join(commands))


def masquerade(*, symmetric: bool) -> None:
    """Make a home router, which lets only answers in. `symmetric`: new source ports each time."""
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    answers_only = f'iifname "{WAN}" ct state established,related accept; iifname "{WAN}" drop'
    source_nat = f'oifname "{WAN}" masquerade {"fully-random" if symmetric else ""}'
    chains = (
        ("nat", "postrouting", "srcnat", source_nat),
        ("filter", "input", "filter", answers_only),
        ("filter", "forward", "filter", answers_only),
    )
    lines = [
        f"add chain ip lab {hook} {{ type {kind} hook {hook} priority {priority}; }}\n"
        + "\n".join(f"add rule ip lab {hook} {rule}" for rule in rules.split("; "))
        for kind, hook, priority, rules in chains
    ]
    run("nft", "-f", "-", text="\n".join(["add table ip lab", *lines]) + "\n")


def run(*command: str, text: str) -> None:
    """Run a command with this input; ConfigError if it fails or is not there."""
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed") from None
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip()} in: {text}")


def close_all(namespaces: Collection[Namespace]) -> None:
    """Close the networks and kill every process in them."""
    numbers = {namespace.number for namespace in namespaces}
    entrances = {f"--net={namespace.path}".encode() for namespace in namespaces}
    for namespace in namespaces:
        os.close(namespace.descriptor)
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if _is_inside(folder, numbers, entrances):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:  # ended meanwhile
                continue


def _is_inside(process: Path, numbers: Collection[int], entrances: Collection[bytes]) -> bool:
    """True if a process is in one of the networks, or an `nsenter` on its way in. The order of
    the checks matters: the latter becomes the former."""
    arguments = (process / "cmdline").read_bytes().split(b"\0")
    return any(word in entrances for word in arguments[:2]) or (
        (process / "ns/net").stat().st_ino in numbers
    )


def _check(result: int) -> None:
    if result:
        error = os.strerror(ctypes.get_errno())
        raise ConfigError(f"network namespaces: {error}; this needs Linux and root")


HOSTS_MAX = 200  # homes included; fits a /24
END_TIMEOUT_S = 20.0
PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Home:
    """Hosts on an unlimited local network behind a masquerading router that lets nobody in. A
    `symmetric` router takes a random port per connection, others keep source ports."""

    name: str
    profile: LinkProfile
    hosts: tuple[str, ...]
    symmetric: bool = False


class Lab:
    def __init__(self, process: "subprocess.Popen[str]", plan: Mapping[str, Any]) -> None:
        self._process = process
        made = self._ask(plan)
        self._paths: dict[str, str] = made["paths"]
        self._addresses: dict[str, str] = made["addresses"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def address(self, name: str) -> str:
        """IP address of a host; of a home, its router's public address."""
        return self._addresses[name]

    def namespace(self, host: str) -> str:
        """Path for `nsenter --net=PATH`."""
        return self._paths[host]

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Command line that runs on a host under the same process id."""
        return ["nsenter", f"--net={self.namespace(host)}", "--", *command]

    def start(self, host: str, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process on a host; `options` are those of `Popen`."""
        return subprocess.Popen(self.command(host, command), **options)

    def cut(
        self, sources: Collection[str], targets: Collection[str], *, one_way: bool = False
    ) -> None:
        """Silently drop everything between public hosts or homes."""
        pairs = [(sources, targets)] if one_way else [(sources, targets), (targets, sources)]
        for here, there in pairs:
            self._ask({"do": "cut", "sources": list(here), "targets": list(there)})

    def heal(self) -> None:
        self._ask({"do": "heal"})

    def counters(self) -> dict[str, dict[str, int]]:
        """`shaper.LinkCounters` of each public host and home."""
        answer: dict[str, dict[str, int]] = self._ask({"do": "counters"})
        return answer

    def _ask(self, question: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise ConfigError("the lab's process ended")
        found = json.loads(answer)
        if "error" in found:
            raise ConfigError(found["error"])
        return found


@contextmanager
def open_lab(
    hosts: Mapping[str, LinkProfile], homes: Sequence[Home] = (), seed: int = 0, mtu: int = MTU
) -> Iterator[Lab]:
    """Make hosts on a public network and behind routers. `seed` draws jitter and loss; kernel
    timing still varies. ConfigError: the machine does not allow it, or bad names."""
    _check_names(hosts, homes)
    plan = {
        "hosts": {name: asdict(profile) for name, profile in hosts.items()},
        "homes": [asdict(home) for home in homes],
        "seed": seed,
        "mtu": mtu,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.simulation.lab_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the owner handles Ctrl-C
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Lab(process, plan)
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(END_TIMEOUT_S)


def _check_names(hosts: Mapping[str, LinkProfile], homes: Sequence[Home]) -> None:
    at_home = [host for home in homes for host in home.hosts]
    names = [*hosts, *(home.name for home in homes), *at_home]
    if len(set(names)) < len(names):
        raise ConfigError(f"each host and home needs a name of its own: {', '.join(names)}")
    if len(names) > HOSTS_MAX:
        raise ConfigError(f"{len(names)} hosts and homes: at most {HOSTS_MAX}")


def missing() -> str | None:
    """Reason why this machine cannot run a lab, with the remedy. None: it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root: run as root"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun: modprobe tun"
    for tool, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: apt-get install {package}"
    probe = ("unshare", "--net", "true")
    if subprocess.run(probe, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False).returncode:
        return "network namespaces are not allowed here (a container without CAP_SYS_ADMIN?)"
    return None
