"""The items that a run's founder brought along: had before anything starts, and handed on.

Whoever lacks them fetches them from the peers that it joins through, if its user agrees; whoever
founds a run on a file of its own in an open swarm agrees that strangers get them.
"""

from collections.abc import Callable
from typing import Final

import trio

from node.config import NodeConfig, RunConfig
from node.config.run import EnvironmentSpec
from node.environments.data import store
from node.environments.data.dataset import prompt_of
from node.environments.data.items import rows_of
from node.environments.data.rules import NAME, DataRules, rules_of
from node.hosting.fetched_models import Consent
from node.hosting.handed_on_runs import ask_in_turn
from node.hosting.membership import Membership
from node.records.format import amount
from swarm.errors import ConfigError
from swarm.identity import Identity, PeerId
from swarm.peers.run_data import HeldData, ask_for_manifest, fetch_chunks
from swarm.storage.files import RunSync
from swarm.transport.base import Transport
from swarm.wire.messages import DataManifest

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
    """Have the items of the run on this machine, fit for it, and agreed to be handed on.

    Raises:
        ConfigError: nobody hands them on, the user does not agree, or the run asks for more than
            they are.
    """
    for sha256, rules in data_of(config.run).items():
        if not store.is_here(sha256):
            _fetch(config, identity, membership, rules, agreed, say)
    check_data(config.run)
    for sha256 in data_of(config.run):
        manifest, _ = store.read(sha256)
        _agree_to_share(membership, sha256, manifest, agreed, say)


def check_data(run: RunConfig) -> None:
    """Check that the items on this machine are enough, and short enough, for the run.

    Raises:
        ConfigError: one line that says what to change.
    """
    for rules in data_of(run).values():
        items, columns = rules.items(), rules.columns
        questions, longest = set(), 0
        for place in range(len(items)):
            prompt = prompt_of(columns.item(items.row(place)))
            questions.add(hash(prompt))
            longest = max(longest, len(prompt))
        if longest > run.limits.prompt_chars_max:
            raise ConfigError(
                f"environment {NAME}: a question has {longest} characters, limits.prompt_chars_max "
                f"is {run.limits.prompt_chars_max}; raise it, or leave such items out"
            )
        fit = int(HELD_OUT_SHARE_MAX * len(questions))
        share = sum(spec.weight for spec in run.environments if _has(spec, rules)) / sum(
            spec.weight for spec in run.environments
        )
        if run.held_out.tasks * share > fit:
            raise ConfigError(
                f"environment {NAME}: of {len(questions)} different questions held_out.tasks = "
                f"{run.held_out.tasks} would leave too few to train on; "
                + (f"take at most {int(fit / share)}" if fit else "bring more of them")
            )


def _has(spec: EnvironmentSpec, rules: DataRules) -> bool:
    return spec.name == NAME and rules_of(spec.parameters) == rules


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

    async def ask_one(transport: Transport, peer: PeerId) -> DataManifest:
        return await ask_for_manifest(transport, peer, data)

    async def fetch_from(transport: Transport, peer: PeerId) -> PeerId:
        assert manifest is not None
        await _fetch_into_place(transport, peer, rules, manifest)
        return peer

    manifest, troubles = ask_in_turn(identity, membership.key, config.bootstrap, ask_one)
    if manifest is not None:
        _agree_to_fetch(manifest, agreed)
        say(f"fetching {_told(manifest)} of this run")
        giver, troubles = ask_in_turn(identity, membership.key, config.bootstrap, fetch_from)
        for trouble in troubles:
            say(f"not from everybody: {trouble}")
        if giver is not None:
            say(f"{giver} handed on the items of this run: {store.path_of(rules.sha256)}")
            return
    raise ConfigError(
        f"environment {NAME}: nobody handed the items {rules.sha256[:12]}… on "
        f"({'; '.join(troubles)}); try again with another --peer"
    )


def _told(manifest: DataManifest) -> str:
    return f"{manifest.items} items, {amount(manifest.size_bytes, 'B')},"


def _agree_to_fetch(manifest: DataManifest, agreed: Consent) -> None:
    what = _told(manifest)
    if not agreed(f"This run's {what} come from strangers, to be trained on. Fetch them?"):
        raise ConfigError(
            f"environment {NAME}: this run has {what} of strangers, which are not on this machine; "
            "--yes agrees to fetch them"
        )


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
    """Put in place what a user's own file could have come to; no other bytes.

    Raises:
        ConfigError: they are what the run's hash says, and no items for its scorer.
    """
    try:
        _check_came(arriving.whole(), rules, manifest)
    except ConfigError:
        arriving.give_up()
        raise
    arriving.finish()


def _check_came(came: bytes, rules: DataRules, manifest: DataManifest) -> None:
    name = f"the items {rules.sha256[:12]}… that came"
    content = rules.content(rows_of(came.splitlines(keepends=True), name), name)
    if content.data != came or content.items != manifest.items:
        raise ConfigError(f"{name}: not as items are written; this run cannot be joined")


# --- handing on -------------------------------------------------------------------------------


def held_data(run: RunConfig, run_sync: RunSync) -> dict[bytes, HeldData]:
    """The data that this node hands on: the items of its run.

    Raises:
        ConfigError: they are not on this machine.
    """
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
