"""The rules and items of a run, fetched from a peer that the user named, and handed on.

A run's id holds a fingerprint of its rules. The user agrees first to plug-ins, models and items.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import trio
from pydantic import ValidationError

from node.config import DEFAULT_RUN, NodeConfig, RunConfig, load_config
from node.config.errors import Source, config_error
from node.config.load import handed_on_path, unknown_run
from node.envs.data import items as store
from node.envs.data.dataset import NAME, DataRules, prompt_of, rules_of
from node.envs.data.items import rows_of
from node.envs.factory_rules import NAME as FACTORY
from node.envs.registry import is_plug_in
from node.envs.taskset_rules import NAME as TASKSETS
from node.envs.taskset_rules import TOOLS_NAME
from node.hosting.fetched_models import Consent, ask
from node.hosting.membership import Membership, known_key, load_identity
from node.hosting.models import TINY
from node.interfaces.prompts import Prompt
from node.observe.text_format import amount
from node.policies.presets import PRESETS
from node.system.child_environment import ENVIRON_PREFIX
from swarm.errors import ConfigError, RemoteProtocolError, TransportError, first_of
from swarm.identity import Identity, PeerId
from swarm.peers.invite import Invitation, JoinKey
from swarm.peers.run_data import HeldData, ask_for_manifest, ask_for_rules, fetch_chunks
from swarm.storage import RunSync, data_directory, write_whole
from swarm.texts import printable
from swarm.transport.base import Transport
from swarm.transport.libp2p.host import open_libp2p
from swarm.transport.libp2p.reachability import ReachRules
from swarm.wire.messages import DataManifest

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 20.0
NAME_CHARS_SHOWN: Final = 100  # of what a peer sent
COMPLAINT_CHARS: Final = 500
# Parameters that name a package, by environment.
_PACKAGE_WORDS: Final = {TASKSETS: "taskset", TOOLS_NAME: "taskset", FACTORY: "factory"}
_OWN: Final = ("data_dir", "key_file", "passphrase_env", "peers", "yes")  # of no run


def fetch_unknown_run(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    run_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Have the rules of the run that the settings name, if this machine lacks them."""
    wanted = unknown_run(flags, environ, run_file)
    if wanted is None:
        return
    config = own_settings(flags, environ)
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


def own_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> NodeConfig:
    """The settings that depend on no run; all others have defaults."""
    settings = {f"{ENVIRON_PREFIX}{name.upper()}" for name in _OWN}
    return load_config(
        {name: flags.get(name) for name in _OWN},
        {name: value for name, value in environ.items() if name in settings},
        Path(DEFAULT_RUN),
    )


def _ask(
    identity: Identity, key: JoinKey | None, addresses: Sequence[str], run_id: str
) -> tuple[bytes, str]:
    """The rules from the first peer that has them, and that peer."""

    async def ask_one(transport: Transport, peer: PeerId, _: str) -> tuple[bytes, str]:
        return await ask_for_rules(transport, peer, run_id), peer

    found, troubles = ask_each(identity, key, addresses, ask_one, most=1)
    if not found:
        raise ConfigError(
            f"--run {run_id}: nobody handed its rules on ({'; '.join(troubles)}); try again, or "
            "give the run's file"
        )
    return found[0]


def ask_each(
    identity: Identity,
    key: JoinKey | None,
    addresses: Sequence[str],
    ask_one: Callable[[Transport, PeerId, str], Awaitable[T]],
    *,
    most: int | None = None,
) -> tuple[list[T], list[str]]:
    """The answers of the peers at these addresses, at most `most`; and the failures, by address.
    The node's own key asks, because lists of allowed peers name it."""
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


def _checked(rules: bytes, run_id: str, agreed: Callable[[str], bool]) -> RunConfig:
    """The rules, if they fit the id and the user agrees to what they bring. The question comes
    first, because reading rules imports the environments that they name."""
    try:
        table = json.loads(rules)
        environments = [str(each["name"]) for each in table["environments"]]
        packages = [
            (word, printable(str(json.loads(each["parameters"])[word]), NAME_CHARS_SHOWN))
            for each in table["environments"]
            if (word := _PACKAGE_WORDS.get(str(each["name"])))
        ]
        model = str((table.get("learner") or {}).get("model", TINY))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"--run {run_id}: what the peer sent are no rules of a run") from None
    brings = [f"the installed plug-in {name!r}" for name in environments if is_plug_in(name)]
    brings += [f"the installed {word} {name!r}" for word, name in packages]
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


# --- the items that a run's founder brought along -----------------------------------------------

HELD_OUT_SHARE_MAX: Final = 0.5  # of a run's items: the rest is trained on


def data_of(run: RunConfig) -> dict[str, DataRules]:
    """The sets of items that a run has, by their hashes."""
    named = [rules_of(spec.parameters) for spec in run.environments if spec.name == NAME]
    return {rules.sha256: rules for rules in named}


def have_data(
    config: NodeConfig,
    identity: Identity,
    membership: Membership,
    agreed: Consent,
    say: Callable[[str], None],
) -> None:
    """Have the items of the run on this machine, fit for it, and agreed to be handed on."""
    for sha256, rules in data_of(config.run).items():
        if not store.is_here(sha256):
            _fetch(config, identity, membership, rules, agreed, say)
        for line in store.told_of(sha256):
            say(line)
    for line in check_data(config.run):
        say(line)
    for sha256 in data_of(config.run):
        manifest, _ = store.read(sha256)
        _agree_to_share(membership, sha256, manifest, agreed, say)


def check_data(run: RunConfig) -> list[str]:
    """Check that the items on this machine are enough for the run. Returns a line on those that are
    left out because they are too long for it."""
    told = []
    for rules in data_of(run).values():
        items, most = rules.items(), run.limits.prompt_chars_max
        spec = next(
            each
            for each in run.environments
            if each.name == NAME and rules_of(each.parameters) == rules
        )
        answer = run.answer_rule(NAME, spec.parameters)
        questions, long = set(), 0
        for place in range(len(items)):
            prompt = prompt_of(items.row(place))
            if len(Prompt.read(prompt).below(answer.system, answer.examples).text) > most:
                long += 1
            else:
                questions.add(hash(prompt))
        if long:
            told.append(
                f"environment {NAME}: left out: {long} of {len(items)} items, whose prompts have "
                f"over limits.prompt_chars_max = {most} characters"
            )
        _check_held_out(run, rules, len(questions))
    return told


def _check_held_out(run: RunConfig, rules: DataRules, questions: int) -> None:
    fit = int(HELD_OUT_SHARE_MAX * questions)
    share = sum(
        spec.weight
        for spec in run.environments
        if spec.name == NAME and rules_of(spec.parameters) == rules
    ) / sum(spec.weight for spec in run.environments)
    if run.held_out.tasks * share > fit:
        raise ConfigError(
            f"environment {NAME}: of {questions} different questions held_out.tasks = "
            f"{run.held_out.tasks} would leave too few to train on; "
            + (f"take at most {int(fit / share)}" if fit else "bring more of them")
        )


def _agree_to_share(
    membership: Membership,
    sha256: str,
    manifest: DataManifest,
    agreed: Consent,
    say: Callable[[str], None],
) -> None:
    is_open = membership.key is None and membership.allowed is None
    if not is_open or not store.is_unshared(sha256):
        return
    what = f"{_told(manifest)} of your own"
    if not agreed(
        f"This swarm is open: {what} go to whoever joins (with --private to the invited alone). "
        "Go on?"
    ):
        raise ConfigError(
            f"environment {NAME}: {what} would go to strangers; start the swarm with --private and "
            "invite those who may have them, or agree with --yes"
        )
    store.agree_to_share(sha256)
    say(f"{what} go to whoever joins this open swarm; --private is for the invited alone")


# --- fetching ---------------------------------------------------------------------------------


def _fetch(
    config: NodeConfig,
    identity: Identity,
    membership: Membership,
    rules: DataRules,
    agreed: Consent,
    say: Callable[[str], None],
) -> None:
    if not config.bootstrap:
        raise ConfigError(
            f"environment {NAME}: the items {rules.sha256[:12]}… are not on this machine; name a "
            "node of the run with --peer or --invite, or their file as path in the run file"
        )
    data = bytes.fromhex(rules.sha256)

    async def fetch_from(transport: Transport, peer: PeerId, _: str) -> PeerId:
        await _fetch_into_place(transport, peer, rules, manifest)
        return peer

    sources = (identity, membership.key, config.bootstrap)
    manifests, troubles = ask_each(
        *sources, lambda transport, peer, _: ask_for_manifest(transport, peer, data), most=1
    )
    if manifests:
        manifest = manifests[0]
        what = _told(manifest)
        if not agreed(f"This run's {what} come from strangers, to be trained on. Fetch them?"):
            raise ConfigError(
                f"environment {NAME}: this run has {what} of strangers, which are not on this "
                "machine; --yes agrees to fetch them"
            )
        say(f"fetching {what} of this run")
        givers, troubles = ask_each(*sources, fetch_from, most=1)
        for trouble in troubles:
            say(f"not from everybody: {trouble}")
        if givers:
            say(f"{givers[0]} handed on the items of this run: {store.path_of(rules.sha256)}")
            return
    raise ConfigError(
        f"environment {NAME}: nobody handed the items {rules.sha256[:12]}… on "
        f"({'; '.join(troubles)}); try again with another --peer"
    )


def _told(manifest: DataManifest) -> str:
    return f"{manifest.items} items, {amount(manifest.size_bytes, 'B')},"


async def _fetch_into_place(
    transport: Transport, peer: PeerId, rules: DataRules, manifest: DataManifest
) -> None:
    async def keep(chunk: int, content: bytes) -> None:
        await trio.to_thread.run_sync(arriving.write, chunk, content)

    try:
        arriving = store.Arriving(rules.sha256, manifest)
        missing = await trio.to_thread.run_sync(lambda: list(arriving.missing()))
        data = bytes.fromhex(rules.sha256)
        await fetch_chunks(transport, peer, data, manifest, missing, keep)
        await trio.to_thread.run_sync(_judge, arriving, rules, manifest)
    except OSError as error:
        if store.is_here(rules.sha256):
            return  # another node of this machine fetched them meanwhile
        raise ConfigError(
            f"environment {NAME}: {store.path_of(rules.sha256)} cannot be written "
            f"({error.strerror}); make room, or set SWARM_NODE_CACHE_DIR"
        ) from None


def _judge(arriving: store.Arriving, rules: DataRules, manifest: DataManifest) -> None:
    """Put the items in place if a user's own file could have become these bytes."""
    try:
        _check_came(arriving.whole(), rules, manifest)
    except ConfigError:
        arriving.give_up()
        raise
    arriving.finish()


def _check_came(came: bytes, rules: DataRules, manifest: DataManifest) -> None:
    name = f"the items {rules.sha256[:12]}… that came"
    content = rules.content(rows_of(came.splitlines(keepends=True), name), name)
    for where, why in content.left_out:
        raise ConfigError(f"{where}: {why}; this run cannot be joined")
    if content.data != came or content.items != manifest.items:
        raise ConfigError(f"{name}: not as items are written; this run cannot be joined")


# --- handing on -------------------------------------------------------------------------------


def held_data(run: RunConfig, run_sync: RunSync) -> dict[bytes, HeldData]:
    """The items of the run, which this node hands on."""
    return {bytes.fromhex(sha256): _held(sha256, run_sync) for sha256 in data_of(run)}


def _held(sha256: str, run_sync: RunSync) -> HeldData:
    path = store.path_of(sha256)

    def read_now(offset: int, size: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    async def read(offset: int, size: int) -> bytes:
        content: bytes = await run_sync(read_now, offset, size)
        return content

    return HeldData(store.read(sha256)[0], read)
