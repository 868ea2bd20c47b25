"""A run whose rules come from a peer: `--run ID` or an invitation, on a machine without the file.

The id holds a fingerprint of the rules, and the peer is one whom the user named, whose key its
address holds. What the rules would have this machine import or fetch is agreed to first.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import trio
from pydantic import ValidationError

from node.config import DEFAULT_RUN, RunConfig, load_config
from node.config.errors import Source, config_error
from node.config.load import handed_on_path, unknown_run
from node.environments.registry import is_plug_in
from node.environments.tasksets.rules import NAME as TASKSETS
from node.hosting.fetched_models import ask
from node.hosting.membership import known_key, load_identity
from node.hosting.models import TINY
from node.policies.presets import PRESETS
from node.system.child_environment import ENVIRON_PREFIX
from swarm.errors import ConfigError, RemoteProtocolError, TransportError, first_of
from swarm.identity import Identity, PeerId
from swarm.peers.invite import Invitation, JoinKey
from swarm.peers.run_data import ask_for_rules
from swarm.storage.files import write_whole
from swarm.storage.locking import data_directory
from swarm.texts import printable
from swarm.transport.base import Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.transport.libp2p.reach.reachability import ReachRules

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 20.0
NAME_CHARS_SHOWN: Final = 100  # of what a peer sent
COMPLAINT_CHARS: Final = 500
_OWN: Final = ("data_dir", "key_file", "passphrase_env", "peers", "yes")  # of no run


def fetch_unknown_run(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    run_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Have the rules of the run that the settings name, if this machine lacks them.

    Raises:
        ConfigError: no peer is named, none hands the rules on, they are not those of the id, or
            the user does not agree to what they bring.
    """
    wanted = unknown_run(flags, environ, run_file)
    if wanted is None:
        return
    settings = {f"{ENVIRON_PREFIX}{name.upper()}" for name in _OWN}
    config = load_config(
        {name: flags.get(name) for name in _OWN},
        {name: value for name, value in environ.items() if name in settings},
        Path(DEFAULT_RUN),
    )
    text = flags.get("invite") or environ.get(f"{ENVIRON_PREFIX}INVITE")
    invitation = Invitation.decode(str(text)) if text else None
    addresses = [*config.peers, *(invitation.addresses if invitation else ())]
    if not addresses:
        raise ConfigError(
            f"--run {wanted}: the rules of this run are not here; name a node of it with --peer "
            "or --invite, or give the run's file"
        )
    with data_directory(config.data_dir, say=say):
        key = known_key(invitation, config.data_dir)
        rules, peer = _ask(load_identity(config), key, addresses, wanted)
        run = _checked(rules, wanted, ask(config.yes, by_default=False))
        path = handed_on_path(config.data_dir, wanted)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, run.as_json())
    say(f"{peer} handed on the rules of run {wanted}: {path}")


def _ask(
    identity: Identity, key: JoinKey | None, addresses: Sequence[str], run_id: str
) -> tuple[bytes, str]:
    """The rules by the first of the peers that has them, and who that is."""

    async def ask_one(transport: Transport, peer: PeerId) -> tuple[bytes, str]:
        return await ask_for_rules(transport, peer, run_id), peer

    found, troubles = ask_in_turn(identity, key, addresses, ask_one)
    if found is None:
        raise ConfigError(
            f"--run {run_id}: nobody handed its rules on ({'; '.join(troubles)}); try again, or "
            "give the run's file"
        )
    return found


def ask_in_turn(
    identity: Identity,
    key: JoinKey | None,
    addresses: Sequence[str],
    ask_one: Callable[[Transport, PeerId], Awaitable[T]],
) -> tuple[T | None, list[str]]:
    """The answer of the first peer that gives one, or None; and the failures of those asked before
    it. The node's own key asks, for lists of allowed peers name it.

    Raises:
        ConfigError: an address is wrong, or `ask_one` says so.
    """

    async def ask(transport: Transport, peer: PeerId, address: str) -> T:
        return await ask_one(transport, peer)

    found, troubles = ask_each(identity, key, addresses, ask, most=1)
    return (found[0] if found else None), troubles


def ask_each(
    identity: Identity,
    key: JoinKey | None,
    addresses: Sequence[str],
    ask_one: Callable[[Transport, PeerId, str], Awaitable[T]],
    *,
    most: int | None = None,
) -> tuple[list[T], list[str]]:
    """The answers of the peers at these addresses, at most `most`; and the failures, by address.

    Raises:
        ConfigError: as `ask_in_turn`.
    """
    found: list[T] = []
    troubles: list[str] = []

    async def main() -> None:
        async with open_libp2p(
            identity,
            ["/ip4/127.0.0.1/tcp/0"],
            network_key=key.handshake_key() if key else None,
            reach=ReachRules(relay=False),
        ) as transport:
            for address in addresses:
                try:
                    peer = await transport.connect(address, timeout_s=CONNECT_TIMEOUT_S)
                except TransportError as error:
                    troubles.append(str(error))  # which names the address
                    continue
                try:
                    found.append(await ask_one(transport, peer, address))
                except (TransportError, RemoteProtocolError) as error:
                    troubles.append(f"{address}: {error}")
                if most is not None and len(found) >= most:
                    return

    try:
        trio.run(main)
    except* ConfigError as group:
        raise first_of(group) from None
    return found, troubles


def _taskset(environment: Mapping[str, Any]) -> str:
    parameters = json.loads(environment["parameters"])
    return printable(str(parameters["taskset"]), NAME_CHARS_SHOWN)


def _checked(rules: bytes, run_id: str, agreed: Callable[[str], bool]) -> RunConfig:
    """The rules, if they are those of the id and the user agrees to what they bring along. That is
    asked first, because reading rules imports the environments that they name."""
    try:
        table = json.loads(rules)
        environments = [str(each["name"]) for each in table["environments"]]
        tasksets = [_taskset(each) for each in table["environments"] if each["name"] == TASKSETS]
        model = str((table.get("learner") or {}).get("model", TINY))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"--run {run_id}: what the peer sent are no rules of a run") from None
    brings = [f"the installed plug-in {name!r}" for name in environments if is_plug_in(name)]
    brings += [f"the installed taskset {name!r}" for name in tasksets]
    if model not in (TINY, *PRESETS):
        shown = printable(model, NAME_CHARS_SHOWN)
        brings.append(f"the learner's model {shown!r}, from disk or Hugging Face")
    if brings and not agreed(f"This run uses {', '.join(brings)}. Go on?"):
        raise ConfigError(f"--run {run_id}: it uses {', '.join(brings)}; --yes agrees to that")
    label = Source.in_file(f"the rules of {run_id}")
    try:
        run = RunConfig.model_validate(table)  # what was looked at: parsers may differ
    except ValidationError as error:
        complaint = str(config_error(error, RunConfig, lambda _: label))
        raise ConfigError(printable(complaint, COMPLAINT_CHARS)) from None
    except ConfigError as error:
        raise ConfigError(printable(str(error), COMPLAINT_CHARS)) from None
    if run.run_id != run_id:
        raise ConfigError(
            f"--run {run_id}: the peer sent the rules of {run.run_id}; ask whoever gave you the "
            "line for the run's file"
        )
    return run
