"""Network namespaces that live as long as this process holds them. They have no name in the file
system; others enter by `Namespace.path`, for example with `nsenter --net=PATH`."""

import ctypes
import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import ConfigError

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
        """The kernel's id of the namespace."""
        return os.fstat(self.descriptor).st_ino


def new_namespace() -> Namespace:
    """Make a network with loopback only.

    Raises:
        ConfigError: this process may not.
    """
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
    """Run `ip` commands in the current namespace.

    Raises:
        ConfigError: one failed.
    """
    run("ip", "-batch", "-", text="\n".join(commands))


def masquerade(*, symmetric: bool) -> None:
    """Make this namespace a home router: outbound packets get its address, inbound ones must answer
    outbound ones. Source ports are kept if free; a `symmetric` router changes them for each
    connection."""
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
    """Run a command with this input.

    Raises:
        ConfigError: it failed or is not there.
    """
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
    """True if a process is in one of the networks, or an `nsenter` on its way in. The order of the
    checks matters: the latter becomes the former."""
    arguments = (process / "cmdline").read_bytes().split(b"\0")
    return any(word in entrances for word in arguments[:2]) or (
        (process / "ns/net").stat().st_ino in numbers
    )


def _check(result: int) -> None:
    if result:
        error = os.strerror(ctypes.get_errno())
        raise ConfigError(f"network namespaces: {error}; this needs Linux and root")
