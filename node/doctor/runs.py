"""`swarm-node runs`: which runs peers take part in, and what each needs of a machine.

Peers are asked as a node that joins would ask them. What they answer is shown, not believed: rules
are read as a table of texts, and nothing that they name is imported.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from node.config import NodeConfig
from node.config.run import RUN_ID
from node.environments.registry import is_known, needs_sandbox
from node.hosting.handed_on_runs import ask_each
from node.hosting.membership import known_key
from node.records.format import printable
from node.sandbox.confinement import found
from swarm.errors import ConfigError
from swarm.identity import Identity, PeerId
from swarm.peers.run_data import ask_for_rules
from swarm.transport.base import Transport
from swarm.wire import codec
from swarm.wire.messages import (
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    RUN_ID_CHARS_MAX,
    Hello,
    HelloReply,
)

NOBODYS_RUN: Final = "nobody-000000000000"  # of who only asks
PEERS_MAX: Final = 16
ASK_TIMEOUT_S: Final = 10.0
NAMES_SHOWN: Final = 6
NAME_CHARS: Final = 64


@dataclass(slots=True)
class FoundRun:
    """A run as its nodes tell of it."""

    run_id: str
    address: str  # of a node of it
    release: str
    packages: dict[str, str]  # what makes its tasks there
    nodes: set[PeerId] = field(default_factory=set)
    rules: Mapping[str, Any] | None = None  # None: no node handed them on


class _Asking:
    """Asks one peer after the other."""

    def __init__(self, identity: Identity, now_s: Callable[[], float]) -> None:
        self.runs: dict[str, FoundRun] = {}
        self._identity = identity
        self._now_s = now_s

    async def ask(self, transport: Transport, peer: PeerId, address: str) -> None:
        """Ask a peer for its run, the other nodes of the run, and the run's rules."""
        reply = await self._greet(transport, peer)
        packages = {each.name: each.version for each in reply.packages}
        found_now = FoundRun(reply.run_id, address, reply.agent, packages)
        run = self.runs.setdefault(reply.run_id, found_now)
        run.nodes.add(peer)
        run.nodes |= {PeerId(each.peer_id) for each in reply.known_peers}
        if run.rules is None:
            run.rules = _table(await ask_for_rules(transport, peer, reply.run_id))

    async def _greet(self, transport: Transport, peer: PeerId) -> HelloReply:
        now_s = int(self._now_s())
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
            peer, HELLO_PROTOCOL, codec.sign_hello(hello, self._identity),
            timeout_s=ASK_TIMEOUT_S, response_bytes_max=HELLO_REPLY_BYTES_MAX,
        )  # fmt: skip
        return codec.decode(answer, HelloReply, HELLO_REPLY_BYTES_MAX)


def _table(rules: bytes) -> Mapping[str, Any] | None:
    try:
        table = json.loads(rules)
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


# --- in words ------------------------------------------------------------------------------------


def described(run: FoundRun) -> list[str]:
    """Some lines about a run, the last of which joins it, or says that nothing does."""
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
    return [*lines, f"  swarm-node join --peer {run.address} --run {run.run_id}"]


def _told(rules: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    names = _names(rules)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    found["tasks"] = ", ".join(names[:NAMES_SHOWN]) + more
    sampling = rules.get("sampling")
    tokens = sampling.get("max_new_tokens", 64) if isinstance(sampling, dict) else 64
    found["completions"] = f"up to {printable(str(tokens), 12)} tokens"
    learner = rules.get("learner")
    if isinstance(learner, dict):
        model = printable(str(learner.get("model", "tiny")), NAME_CHARS)
        found["model"] = f"{model}, which a central learner trains: nodes work for it"
    else:
        models = rules.get("models")
        listed = models if isinstance(models, list) else []
        named = [printable(str(each), NAME_CHARS) for each in listed]
        found["model"] = ", ".join(named[:NAMES_SHOWN]) or "any: each node trains its own"
    return found


def _names(rules: Mapping[str, Any]) -> list[str]:
    """Of its environments, each once."""
    environments = rules.get("environments")
    listed = environments if isinstance(environments, list) else []
    counted = Counter(str(each.get("name")) for each in listed if isinstance(each, dict))
    return [printable(name, NAME_CHARS) for name in counted]


def _needs(run: FoundRun) -> list[str]:
    """The packages and environments that a run needs, each with whether it is here."""
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


def show_runs(config: NodeConfig, say: Callable[[str], None], now_s: Callable[[], float]) -> int:
    """Say which runs there are. 0 if there is one, else 1.

    Raises:
        ConfigError: no peer is named, or not by an address.
    """
    if not config.bootstrap:
        raise ConfigError("runs: of whom? name a node with --peer, or its --invite")
    identity = Identity.generate()
    asking = _Asking(identity, now_s)
    key = known_key(config.invitation, config.data_dir)
    _, troubles = ask_each(identity, key, config.bootstrap[:PEERS_MAX], asking.ask)
    runs = sorted(asking.runs.values(), key=lambda run: (-len(run.nodes), run.run_id))
    for trouble in troubles:
        say(f"! {trouble}")
    for run in runs:
        for line in described(run):
            say(line)
    return 0 if runs else 1
