"""`swarm-node doctor`: what works from here, one line each, and what to do about the rest.

Nothing is assumed of the internet, and every check ends by itself in a bounded time. What cannot
be found out is said to be so; it is no fault.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import trio

from node.config import NodeConfig
from node.doctor.machine import (
    Finding,
    check_broker,
    check_congestion,
    check_directory,
    check_gpu,
    check_model,
    check_sandbox,
    check_server,
    check_software,
    check_tasks,
    check_vllm,
)
from node.hosting.membership import JOIN_KEY_FILE
from node.interfaces.trainer_spec import TrainerSpec
from node.monitor.status import fetch_status
from swarm.errors import (
    ConfigError,
    RequestRefused,
    SwarmError,
    TransportError,
)
from swarm.identity import Identity, PeerId
from swarm.limits.address_blocks import GLOBAL, LOCAL
from swarm.peers.address_book import AddressBook, reach_of
from swarm.peers.invite import JoinKey
from swarm.peers.mdns import LanUnavailable, announced, run_lan, tag_of
from swarm.peers.upnp import NoRouter, map_port
from swarm.telemetry.broker_address import PASSWORD_VARIABLE
from swarm.transport.base import ServeLimits
from swarm.transport.libp2p.host import Libp2pTransport, open_libp2p
from swarm.transport.libp2p.reach.reachability import ReachRules
from swarm.wire import codec
from swarm.wire.messages import HELLO_BYTES_MAX, HELLO_PROTOCOL, HELLO_REPLY_BYTES_MAX

DIAL_TIMEOUT_S = 10.0
BOOK_DIALS_MAX = 4
PEERS_WAIT_S = 12.0  # for hellos and for dialling back
LAN_WAIT_S = 4.0
HEARD_MAX = 64
CARRIER_NAT = "100."  # 100.64.0.0/10; what of 100/8 is not global is in there


def examine(
    config: NodeConfig,
    spec: TrainerSpec | None,
    say: Callable[[str], None],
    now_s: Callable[[], float],
) -> int:
    """Run all checks, saying each as it is done. 0 if a node would work here, else 1. `spec`: what
    its trainer would be built from; None: its model comes from the run's learner."""
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        say(finding.line())

    for check in (
        check_software, check_gpu, check_vllm, check_sandbox, check_congestion, check_directory
    ):  # fmt: skip
        tell(check(config))
    tell(trio.run(check_tasks, config))
    tell(check_model(config, spec))
    if config.engine == "openai":
        tell(trio.run(check_server, config))
    password = os.environ.get(PASSWORD_VARIABLE)
    tell(trio.run(check_broker, config, password, Random(secrets.randbits(64))))
    trio.run(examine_network, config, tell, now_s)
    failed = [finding.check for finding in findings if finding.level == "fail"]
    say(f"a node would not work here: {', '.join(failed)}" if failed else "a node would work here")
    return 1 if failed else 0


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
    """Report the result of peers' dialling back, and the alternatives if that failed."""
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
