"""The change from one version to the next, and the heads that are believed.

A version is made (fetched, verified, patched) while the one before serves; the engine stops only to
load it. Whatever fails leaves the version before in place and serving.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import trio

from swarm.errors import (
    ChildFailed,
    Reject,
    RemoteProtocolError,
    StorageFailed,
    StoreFull,
    SwarmError,
)
from swarm.identity import PeerId
from swarm.storage import RunSync, write_whole
from swarm.weights.manifest import disk
from swarm.weights.version_store import LocalVersion, Versions
from swarm.wire import codec
from swarm.wire.messages import HEADS_PER_REPLY_MAX, HeadBody

LOAD_TIMEOUT_S: Final = 600.0


class VersionLoader(Protocol):
    """An engine that serves a policy. Any exception means that it failed."""

    async def load(self, directory: Path) -> None:
        """Serve the weights in a directory. Unfinished completions are the engine's concern."""
        ...


@dataclass(frozen=True, slots=True)
class Made:
    """A version that is complete on disk, and its cost."""

    version: int
    fetch_s: float
    patch_s: float
    bytes_fetched: int
    full_bytes: int  # what a full snapshot of it would have cost to fetch


@dataclass(frozen=True, slots=True)
class Applied:
    """The outcome of applying a version."""

    wanted: int
    serving: int | None  # the version that serves; None: none of ours yet
    failure: str | None  # None: it serves; else why the one before does
    paused_s: float = 0.0
    fetch_s: float = 0.0
    patch_s: float = 0.0
    bytes_fetched: int = 0
    bytes_saved: int = 0  # against a full snapshot


async def apply_version(
    wanted: int,
    make: Callable[[], Awaitable[Made]],
    versions: Versions,
    engine: VersionLoader,
    *,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    run_sync: RunSync = trio.to_thread.run_sync,
) -> Applied:
    """Make and commit a version with `make`, then have the engine serve it.

    Cancelling leaves everything as it was, but a load is finished first. Raises `ChildFailed` if
    the engine can load neither this version nor the one before.
    """
    before = await run_sync(versions.current)
    serving = None if before is None else before.version
    try:
        made = await make()
        local = versions.get(wanted)
        if local is None:
            return Applied(wanted, serving, f"version {wanted} was not completed")
    except (SwarmError, OSError) as error:
        await run_sync(versions.discard, wanted)
        return Applied(wanted, serving, str(error))
    start_s = trio.current_time()
    with trio.CancelScope(shield=True):
        failure = await _swap(local, before, versions, engine, load_timeout_s, run_sync)
    return Applied(
        wanted=wanted,
        serving=serving if failure is not None else wanted,
        failure=failure,
        paused_s=trio.current_time() - start_s,
        fetch_s=made.fetch_s,
        patch_s=made.patch_s,
        bytes_fetched=made.bytes_fetched,
        bytes_saved=made.full_bytes - made.bytes_fetched,
    )


async def _swap(
    local: LocalVersion,
    before: LocalVersion | None,
    versions: Versions,
    engine: VersionLoader,
    load_timeout_s: float,
    run_sync: RunSync,
) -> str | None:
    """The reason why the version before serves on; None: the new one serves."""

    async def load(version: LocalVersion) -> str | None:
        failure: str | None = f"no answer in {load_timeout_s:.0f} s"
        with trio.move_on_after(load_timeout_s):
            try:
                await engine.load(version.directory)
                failure = None
            except Exception as error:  # noqa: BLE001  boundary: the caller reports it
                failure = f"{type(error).__name__}: {error}"
        if failure is None:
            try:
                await run_sync(versions.make_current, version.version)
            except (StorageFailed, StoreFull) as error:
                failure = f"{type(error).__name__}: {error}"
        return failure

    failure = await load(local)
    if failure is None:
        return None
    # The failed load may have left anything in the engine.
    failure = f"the engine did not load version {local.version}: {failure}"
    if before is None:
        raise ChildFailed(f"{failure}; there is no version before it")
    again = await load(before)
    if again is not None:
        raise ChildFailed(f"{failure}; nor version {before.version} again: {again}")
    return failure


# Heads: the newest of each policy, and those of older versions on offer.

POLICIES_MAX: Final = 8  # of one run; heads of others are ignored
HEADS_KEPT_MAX: Final = 16  # of one policy
SUFFIX: Final = ".head"


@dataclass(frozen=True, slots=True)
class HeadRules:
    """The publishers whose heads count, and how far their clocks may be ahead."""

    run_id: str
    publishers: frozenset[PeerId]
    clock_skew_s: float = 120.0


class HeadTable:
    """The heads of one run."""

    def __init__(self, rules: HeadRules, now_s: Callable[[], float]) -> None:
        self._rules = rules
        self._now_s = now_s
        self._heads: dict[str, dict[int, tuple[HeadBody, bytes]]] = {}  # and as they were signed

    def hear(self, record: bytes) -> tuple[HeadBody, bool]:
        """Check and keep a signed head. The flag is true if it is the newest.

        Raises `RemoteProtocolError`: WRONG_RUN without a signer, as whoever brings it here is to
        blame; with the publisher as signer NOT_A_PUBLISHER, FUTURE, or REPUBLISHED for other
        weights under the number of a known version; as `codec.decode_head`.
        """
        head = codec.decode_head(record)
        self._check(head)
        newest = self.newest(head.policy)
        if head.policy not in self._heads and len(self._heads) >= POLICIES_MAX:
            return head, False
        heads = self._heads.setdefault(head.policy, {})
        known, _ = heads.setdefault(head.version, (head, record))
        if known.root != head.root:
            raise RemoteProtocolError(
                Reject.REPUBLISHED, f"other weights as version {head.version}", head.publisher
            )
        for version in sorted(heads)[:-HEADS_KEPT_MAX]:
            del heads[version]
        return head, newest is None or head.version > newest.version

    def _check(self, head: HeadBody) -> None:
        publisher = PeerId(head.publisher)
        if head.run_id != self._rules.run_id:
            raise RemoteProtocolError(Reject.WRONG_RUN, "a head of another run")
        if publisher not in self._rules.publishers:
            why = f"{publisher} is no publisher of this run"
            raise RemoteProtocolError(Reject.NOT_A_PUBLISHER, why, publisher)
        ahead_s = head.created_at_s - self._now_s()
        if ahead_s > self._rules.clock_skew_s:
            raise RemoteProtocolError(Reject.FUTURE, f"created {ahead_s:.0f} s ahead", publisher)

    def newest(self, policy: str) -> HeadBody | None:
        heads = self._heads.get(policy)
        return heads[max(heads)][0] if heads else None

    def of(self, policy: str, version: int) -> HeadBody | None:
        found = self._heads.get(policy, {}).get(version)
        return found and found[0]

    def older(self, policy: str) -> tuple[HeadBody, ...]:
        """The heads of a policy but the newest, newest first."""
        heads = self._heads.get(policy, {})
        return tuple(heads[version][0] for version in sorted(heads)[-2::-1])

    def record(self, policy: str, version: int) -> bytes | None:
        """A head as its publisher signed it."""
        found = self._heads.get(policy, {}).get(version)
        return found and found[1]

    def records(self, policy: str, versions: Collection[int]) -> tuple[bytes, ...]:
        """The heads for a reply: the newest of each policy, then these versions of one policy."""
        told = [heads[max(heads)][1] for heads in self._heads.values()]
        heads = self._heads.get(policy, {})
        told += [heads[each][1] for each in sorted(heads)[-2::-1] if each in versions]
        return tuple(told[:HEADS_PER_REPLY_MAX])


def save_head(directory: Path, version: int, record: bytes, keep: Collection[int]) -> None:
    """Save a version's head and drop all others but those in `keep`; raises `StorageFailed`."""
    with disk(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / f"{version}{SUFFIX}", record)
        for path in directory.glob(f"*{SUFFIX}"):
            if path.stem not in {str(version), *map(str, keep)}:
                path.unlink(missing_ok=True)


def load_heads(directory: Path) -> tuple[bytes, ...]:
    """The saved records; they are judged as if a peer had sent them."""
    records = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with suppress(OSError):  # it is heard of again from a peer
            records.append(path.read_bytes())
    return tuple(records)
