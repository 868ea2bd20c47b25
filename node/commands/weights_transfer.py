"""`swarm-node weights publish` and `weights fetch`: checkpoints over a swarm, without training.

The peers form the swarm of a named run, or one of their own, whose id follows from the publisher's
key. A command that was killed continues from its data directory.
"""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import trio

from node.config import NodeConfig
from node.hosting.membership import Membership, load_identity
from node.hosting.policy_weights import (
    STORE_BYTES_MAX,
    open_weights_service,
    weights_rules,
)
from node.observe.progress_bars import Bars, Work, on_stderr, spread_work, version_work
from node.observe.text_format import amount
from node.run.machine import RealNetwork
from node.run.peer import ADDRESSES_FILE, Peer, open_peer
from swarm.command import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from swarm.errors import ConfigError, RemoteProtocolError, StorageFailed, SwarmError, first_of
from swarm.identity import PeerId, public_key_of
from swarm.leaving import set_when_asked
from swarm.storage import data_directory, make_shared, shared_files
from swarm.weights.hot_swap import Applied
from swarm.weights.publisher import Published, Publisher, Spread
from swarm.weights.version_store import MANIFEST_SUFFIX, LocalVersion
from swarm.weights.weights_service import Follower, VersionOutcome, WeightsRules, WeightsService

DEFAULT_POLICY: Final = "policy"
LOOK_S: Final = 0.5
BARS_S: Final = 0.25
HEADS_WAIT_S: Final = 10.0  # for what peers know, before a number is given to a version
WAITING_S: Final = 15.0  # until it is said what is waited for
SETTLED_LOOKS: Final = 2  # at a directory that stays as it is, before it is published

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of both commands. `run_given`: the user named `config.run`."""

    config: NodeConfig
    run_given: bool
    policy: str = DEFAULT_POLICY
    publisher: str | None = None  # whose weights are believed; None: as the run says
    store_bytes: int = STORE_BYTES_MAX

    def __post_init__(self) -> None:
        if self.publisher is not None:
            try:
                public_key_of(self.publisher)
            except RemoteProtocolError as error:
                raise ConfigError(
                    f"--publisher {self.publisher}: {error.detail}; copy what publish prints"
                ) from None
        name = self.policy.replace("-", "")
        if not (name.isascii() and name.isalnum() and name.islower() and len(self.policy) <= 64):
            raise ConfigError(
                f"--policy {self.policy}: must be up to 64 lower-case letters, digits and hyphens"
            )
        if self.store_bytes < 1:
            raise ConfigError(f"--store-bytes {self.store_bytes}: must be at least 1")


def _rules(options: TransferOptions, own: PeerId, *, publishes: bool) -> WeightsRules:
    """The swarm to join, and the publishers to believe."""
    run = options.config.run
    named = (PeerId(options.publisher),) if options.publisher else ()
    publishers = tuple(map(PeerId, run.weights_publishers)) if options.run_given else ()
    if publishes:
        if publishers and own not in publishers:
            raise ConfigError(
                f"this key, {own}, is no publisher of run {run.name}; take one of those that are "
                "with --key-file, or name it in the run file's publishers"
            )
        publishers = publishers or (own,)
    else:
        if publishers and named and named[0] not in publishers:
            raise ConfigError(f"--publisher {named[0]}: no publisher of run {run.name}")
        publishers = named or publishers
        if not publishers:
            raise ConfigError(
                "whose weights? name the publisher's key with --publisher PEERID; "
                "weights publish prints the whole command"
            )
    digest = sha256(publishers[0].encode()).hexdigest()[:12]
    run_id = run.run_id if options.run_given else f"weights-{digest}"
    skew_s = float(run.limits.clock_skew_s)
    return weights_rules(run_id, publishers, skew_s, options.policy, publishes=publishes)


@dataclass(slots=True)
class _Swarm:
    """A running service with its peer and progress bars."""

    service: WeightsService
    peer: Peer
    nursery: trio.Nursery
    bars: Bars
    is_making: bool = False  # a version, to publish


@asynccontextmanager
async def _open(
    options: TransferOptions, tell: Callable[[VersionOutcome], None], *, publishes: bool
) -> AsyncIterator[_Swarm]:
    """Join the swarm and share the local versions until the block ends."""
    config = options.config
    identity, world = load_identity(config), RealNetwork()
    rules = _rules(options, identity.peer_id, publishes=publishes)
    run_id = rules.heads.run_id
    async with open_peer(world, config, identity, Membership.of(config), run_id) as peer:
        with open_weights_service(
            *(config.data_dir, rules, peer.transport, peer.gater, world),
            Follower(tell=tell),
            store_bytes=options.store_bytes,
        ) as service:
            async with trio.open_nursery() as nursery:
                await nursery.start(service.run)
                await nursery.start(peer.run)
                swarm = _Swarm(service, peer, nursery, on_stderr())
                nursery.start_soon(_show, swarm)
                try:
                    yield swarm
                finally:
                    swarm.bars.set(())
                nursery.cancel_scope.cancel()


def _run(config: NodeConfig, work: Callable[[], Any]) -> int:
    """Run one command on its data directory; its exit status."""
    with data_directory(config.data_dir):
        try:
            status: int = trio.run(work)
        except* SwarmError as group:
            raise first_of(group) from None
    return status


def publish(
    options: TransferOptions, directory: Path, say: Say, *, once: bool, follow: bool
) -> int:
    """Publish the weights in a directory until interrupted. `once`: leave when all peers that came
    have everything. `follow`: publish each change of the directory."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; name one of safetensors files")
    return _run(options.config, lambda: _publish(options, directory, say, once, follow))


async def _publish(
    options: TransferOptions, directory: Path, say: Say, once: bool, follow: bool
) -> int:
    left = trio.Event()

    def tell(spread: Spread) -> None:
        over = _over(spread.time_s, spread.bound_s)
        peers = "1 peer" if spread.peers == 1 else f"{spread.peers} peers"
        say(f"version {spread.version} is at {peers} after {spread.time_s:.2f} s{over}")
        if once:
            left.set()

    async with _open(options, lambda _: None, publishes=True) as swarm:
        publisher = Publisher(swarm.service, swarm.peer.identity, tell)
        swarm.nursery.start_soon(set_when_asked, left)
        if options.config.bootstrap:
            with trio.move_on_after(HEADS_WAIT_S):
                await swarm.service.heard.wait()
        signature = _signature(directory)
        _tell_published(await _make(publisher, directory, swarm), swarm, options, say)
        swarm.nursery.start_soon(publisher.run)
        if follow:
            swarm.nursery.start_soon(_publish_changes, publisher, directory, signature, swarm, say)
        await left.wait()
    return EXIT_OK


async def _make(publisher: Publisher, directory: Path, swarm: _Swarm) -> Published | None:
    swarm.is_making = True
    try:
        return await publisher.publish(directory)
    finally:
        swarm.is_making = False


def _tell_published(
    published: Published | None, swarm: _Swarm, options: TransferOptions, say: Say
) -> None:
    say("the version that is on offer already" if published is None else _made_line(published))
    config = options.config
    more = f" --run {config.run.name}" if options.run_given else ""
    more += f" --policy {options.policy}" if options.policy != DEFAULT_POLICY else ""
    say("others get it with any one of these lines:")
    for address in swarm.peer.transport.addresses():
        say(
            f"  swarm-node weights fetch --publisher {swarm.peer.identity.peer_id} "
            f"--peer {address}{more}"
        )


def _made_line(published: Published) -> str:
    delta = published.delta_bytes
    or_less = "" if delta is None else f", or {amount(delta, 'B')} for who has the one before"
    return (
        f"version {published.version} of {amount(published.size_bytes, 'B')} is on offer: "
        f"{amount(published.full_bytes, 'B')}{or_less}, "
        f"made in {published.made_s:.2f} s"
    )


def _over(seconds: float, bound_s: float | None) -> str:
    return f" ({seconds / bound_s:.2f} times the least possible)" if bound_s else ""


async def _publish_changes(
    publisher: Publisher, directory: Path, published: object, swarm: _Swarm, say: Say
) -> None:
    """Publish each state of a directory that lasts for some looks."""
    before, looks = published, 0
    while True:
        await trio.sleep(LOOK_S)
        now = await trio.to_thread.run_sync(_signature, directory)
        looks = looks + 1 if now == before else 0
        before = now
        if now == published or looks < SETTLED_LOOKS:
            continue
        published = now
        try:
            made = await _make(publisher, directory, swarm)
        except SwarmError as error:
            say(f"{error}; the version before stays on offer")
            continue
        if made is not None:
            say(_made_line(made))


def _signature(directory: Path) -> object:
    """A value that changes with the directory, found without reading its files."""
    found = []
    try:
        for path in sorted(directory.resolve().rglob("*")):
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns, status.st_ino))
    except OSError:
        return None  # while somebody writes there
    return tuple(found)


def fetch(options: TransferOptions, out: Path | None, say: Say, *, follow: bool) -> int:
    """Get the newest version, or with `follow` each one, until interrupted. `out`: the directory to
    copy it to; None: it stays in the data directory."""
    config = options.config
    if not config.bootstrap and not (config.data_dir / ADDRESSES_FILE).exists():
        raise ConfigError("from whom? name a peer with --peer; weights publish prints its address")
    if out is not None:
        out = out.absolute()
        is_ours = out.with_name(out.name + MANIFEST_SUFFIX).exists()  # an earlier version
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise ConfigError(f"--out {out}: is there already and no directory; name another")
        if out.is_dir() and not is_ours and any(out.iterdir()):
            raise ConfigError(f"--out {out}: holds something else already; name another")
    _rules(options, PeerId(""), publishes=False)
    return _run(config, lambda: _fetch(options, out, say, follow))


async def _fetch(options: TransferOptions, out: Path | None, say: Say, follow: bool) -> int:
    left = trio.Event()
    send, receive = trio.open_memory_channel[VersionOutcome](16)

    def tell(outcome: VersionOutcome) -> None:
        with suppress(trio.WouldBlock):  # a newer version follows on its heels
            send.send_nowait(outcome)

    status = EXIT_INTERRUPTED
    async with _open(options, tell, publishes=False) as swarm:
        service = swarm.service

        async def work() -> None:
            nonlocal status
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_explain, service, swarm, say)
                nursery.start_soon(_notice_current, service, send)
                async for outcome in receive:
                    is_done = await _take(outcome, service, out, say)
                    if not follow:
                        status = EXIT_OK if is_done else EXIT_FAILED
                        break
                nursery.cancel_scope.cancel()
            left.set()

        swarm.nursery.start_soon(set_when_asked, left)
        swarm.nursery.start_soon(work)
        await left.wait()
    return EXIT_OK if follow else status


async def _notice_current(
    service: WeightsService, send: trio.MemorySendChannel[VersionOutcome]
) -> None:
    """Report the newest version as if it had just come, if it is here already."""
    await service.heard.wait()
    await trio.sleep(LOOK_S)
    head = service.heads.newest(service.rules.policy)
    current = await service.run_sync(service.versions.current)
    if head is not None and current is not None and current.version == head.version:
        await send.send(VersionOutcome(Applied(current.version, current.version, None)))


async def _take(
    outcome: VersionOutcome, service: WeightsService, out: Path | None, say: Say
) -> bool:
    """Say the outcome of a version and copy it out. True if all of it worked."""
    applied = outcome.applied
    for doubt in outcome.doubts:
        say(doubt)
    if applied.failure is not None:
        serving = "none" if applied.serving is None else f"version {applied.serving}"
        say(f"version {applied.wanted} failed: {applied.failure}; {serving} still serves")
        return False
    local = service.versions.get(applied.wanted)
    if local is None:
        return True  # a newer one took its place
    where = local.directory
    if out is not None:
        try:
            await trio.to_thread.run_sync(export, local, out)
        except StorageFailed as error:
            say(f"version {applied.wanted} is in {local.directory}, not in {out}: {error}")
            return False
        where = out
    say(f"{_summary(outcome)} in {where}")
    return True


def _summary(outcome: VersionOutcome) -> str:
    applied, bound = outcome.applied, outcome.bound_s
    if not outcome.bases:
        return f"version {applied.wanted}: here already"
    bases = ",".join("nothing" if base is None else str(base) for base in outcome.bases)
    saved, reused = applied.bytes_saved, outcome.reused_bytes
    less = f", {amount(saved, 'B')} less than as a whole" if saved > 0 else ""
    here = f", {amount(reused, 'B')} more were here" if reused else ""
    return (
        f"version {applied.wanted} from {bases}: {amount(applied.bytes_fetched, 'B')} fetched in "
        f"{applied.fetch_s:.2f} s{_over(applied.fetch_s, bound)}{less}{here}; patched in "
        f"{applied.patch_s:.2f} s,"
    )


async def _show(swarm: _Swarm) -> None:
    """Show progress bars of the version on its way, and of what others fetch from here."""
    service = swarm.service
    while True:
        await trio.sleep(BARS_S)
        works = [Work("making a version")] if swarm.is_making else []
        progress = service.progress()
        if progress is not None:
            works.append(version_work(progress))
        head = service.heads.newest(service.rules.policy)
        spread = None if head is None else spread_work(service.sharing, head.version)
        swarm.bars.set(works + ([] if spread is None else [spread]))


async def _explain(service: WeightsService, swarm: _Swarm, say: Say) -> None:
    """Say why nothing comes, once for each reason."""
    said: set[str] = set()
    waited_s = 0.0
    while True:
        await trio.sleep(LOOK_S)
        lines = [f"a version was announced and refused: {service.refused}"] * bool(service.refused)
        waited_s = 0.0 if service.progress() else waited_s + LOOK_S
        if swarm.peer.discovery.meets_strangers and not service.heard.is_set():
            lines += swarm.peer.discovery.notes
            lines.append(
                "the peer offers the weights of another publisher than --publisher, or of another "
                "--run: weights publish prints the whole command; waiting"
            )
        elif waited_s >= WAITING_S and not service.heard.is_set():
            lines += swarm.peer.discovery.notes or ["no peer answers yet: waiting"]
        elif waited_s >= WAITING_S and service.heads.newest(service.rules.policy) is None:
            lines.append("no peer knows of a version yet: waiting")
        for line in lines:
            if line not in said and len(said) < 16:
                said.add(line)
                say(line)


def export(local: LocalVersion, out: Path) -> None:
    """Copy a version and its manifest, for `weights verify`, to `out`, whole or not at all."""
    partial, old = (out.with_name(out.name + suffix) for suffix in (".partial", ".old"))
    body = local.directory.with_name(local.directory.name + MANIFEST_SUFFIX)
    try:
        for path in (partial, old):
            if path.exists():
                shutil.rmtree(path)
        with shared_files():
            partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(local.directory, partial)
        make_shared(partial)  # the copies are as private as what they are of
        if out.exists():
            out.rename(old)
        partial.rename(out)
        with shared_files():
            shutil.copyfile(body, out.with_name(out.name + MANIFEST_SUFFIX))
        if old.exists():
            shutil.rmtree(old)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        reason = error.strerror if isinstance(error, OSError) else "copying failed"
        raise StorageFailed(f"{out}: {reason or error}") from None
