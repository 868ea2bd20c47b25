"""Two phases from one version to the next: make it while the old one serves, then load it.

Making a version (fetch, verify, patch) is the caller's and takes as long as it takes; nothing of it
touches the engine. The engine stops sampling only to load. Whatever fails, before or in the load,
leaves the version before in place and serving, and the result says why.
"""

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
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
from swarm.storage import RunSync
from swarm.weights.manifest import is_newer_head
from swarm.weights.version_store import LocalVersion, Versions
from swarm.wire import codec
from swarm.wire.messages import HEADS_PER_REPLY_MAX, HeadBody

LOAD_TIMEOUT_S: Final = 600.0


class VersionLoader(Protocol):
    """An engine that serves a policy. Any exception means that it failed."""

    async def load(self, directory: Path) -> None:
        """Serve the weights in a version's directory. Unfinished completions end under the old
        weights or continue under the new ones; the engine sees to that by itself."""
        ...


@dataclass(frozen=True, slots=True)
class Made:
    """A version that is complete on disk, and what that took."""

    version: int
    fetch_s: float
    patch_s: float
    bytes_fetched: int
    full_bytes: int  # what a full snapshot of it would have cost to fetch


@dataclass(frozen=True, slots=True)
class Applied:
    """The outcome of applying a version. `bytes_saved` is against a full snapshot."""

    wanted: int
    serving: int | None  # the version that serves now; None: none of ours yet
    failure: str | None  # None: it serves; else why the one before does
    paused_s: float = 0.0
    fetch_s: float = 0.0
    patch_s: float = 0.0
    bytes_fetched: int = 0
    bytes_saved: int = 0


async def apply_version(
    wanted: int,
    make: Callable[[], Awaitable[Made]],
    versions: Versions,
    engine: VersionLoader,
    *,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    run_sync: RunSync = trio.to_thread.run_sync,
) -> Applied:
    """Make a version, then have the engine serve it.

    Cancelling it while it makes the version leaves everything as it was; once the engine loads,
    the swap is finished first, so an engine is never left with half a version.

    Args:
        make: fetches, verifies, patches and commits the version; it is `wanted` when it returns.
        load_timeout_s: an engine that takes longer has failed.
        run_sync: where blocking calls go.

    Raises:
        ChildFailed: the engine can load neither this version nor the one before.
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
    """Why the version before serves on; None: the new one does."""

    async def load(version: LocalVersion) -> str | None:
        failure = await _attempt(lambda: engine.load(version.directory), load_timeout_s)
        if failure is None:
            try:  # ours, so only what a disk may do is told: anything else is a fault of this code
                await run_sync(versions.make_current, version.version)
            except (StorageFailed, StoreFull) as error:
                failure = f"{type(error).__name__}: {error}"
        return failure

    failure = await load(local)
    if failure is not None:
        failure = f"the engine did not load version {local.version}: {failure}"
        await _go_back(before, load, failure)
    return failure


async def _go_back(
    before: LocalVersion | None,
    load: Callable[[LocalVersion], Awaitable[str | None]],
    failure: str,
) -> None:
    """A load that failed may have left anything in the engine: load the version before again."""
    if before is None:
        raise ChildFailed(f"{failure}; there is no version before it")
    again = await load(before)
    if again is not None:
        raise ChildFailed(f"{failure}; nor version {before.version} again: {again}")


async def _attempt(action: Callable[[], Awaitable[None]], timeout_s: float) -> str | None:
    """Why the engine failed; None: it did not. The boundary to engines: they may raise anything."""
    with trio.move_on_after(timeout_s):
        try:
            await action()
        except Exception as error:  # noqa: BLE001  boundary: the caller reports it
            return f"{type(error).__name__}: {error}"
        return None
    return f"no answer in {timeout_s:.0f} s"


# The heads that are believed: the newest of each policy, and older versions' on offer. Pure, but
# for the files that keep them across restarts.

POLICIES_MAX: Final = 8  # of one run that are kept track of; others change nothing
HEADS_KEPT_MAX: Final = 16  # of one policy
SUFFIX: Final = ".head"


@dataclass(frozen=True, slots=True)
class HeadRules:
    """The publishers whose heads count, and the lead that their clocks may have."""

    run_id: str
    publishers: frozenset[PeerId]
    clock_skew_s: float = 120.0


@dataclass(slots=True)
class _Line:
    """The versions of one policy."""

    newest: HeadBody
    heads: dict[int, HeadBody] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)


class HeadTable:
    """The heads of one run."""

    def __init__(self, rules: HeadRules, now_s: Callable[[], float]) -> None:
        self._rules = rules
        self._now_s = now_s
        self._lines: dict[str, _Line] = {}

    def hear(self, record: bytes) -> tuple[HeadBody, bool]:
        """Judge a signed head, keep it if it is to be believed, and say whether it is the newest.

        Raises:
            RemoteProtocolError: as `codec.decode_head` and `is_newer_head`; REPUBLISHED also for
                other weights under the number of an older version that is known.
        """
        head = codec.decode_head(record)
        line = self._lines.get(head.policy)
        is_newer = is_newer_head(
            head,
            line.newest if line else None,
            run_id=self._rules.run_id,
            publishers=self._rules.publishers,
            now_s=self._now_s(),
            skew_s=self._rules.clock_skew_s,
        )
        if line is None:
            if len(self._lines) >= POLICIES_MAX:
                return head, False
            line = self._lines[head.policy] = _Line(head)
        known = line.heads.get(head.version)
        if known is not None and known.root != head.root:
            raise RemoteProtocolError(
                Reject.REPUBLISHED, f"other weights as version {head.version}", head.publisher
            )
        if is_newer:
            line.newest = head
        if known is None:
            line.heads[head.version], line.records[head.version] = head, record
            for version in sorted(line.heads)[:-HEADS_KEPT_MAX]:
                del line.heads[version], line.records[version]
        return head, is_newer

    def newest(self, policy: str) -> HeadBody | None:
        """The head of a policy's newest version."""
        line = self._lines.get(policy)
        return line.newest if line else None

    def of(self, policy: str, version: int) -> HeadBody | None:
        """The head of a version, if it is kept."""
        line = self._lines.get(policy)
        return line.heads.get(version) if line else None

    def older(self, policy: str) -> tuple[HeadBody, ...]:
        """The heads of a policy but the newest, newest first."""
        line = self._lines.get(policy)
        return tuple(line.heads[version] for version in sorted(line.heads)[-2::-1]) if line else ()

    def record(self, policy: str, version: int) -> bytes | None:
        """A head as its publisher signed it."""
        line = self._lines.get(policy)
        return line.records.get(version) if line else None

    def records(self, policy: str, versions: Collection[int]) -> tuple[bytes, ...]:
        """The heads to send to a peer, as many as a reply holds: the newest of each policy, then
        those of these versions of one policy, newest first."""
        told = [line.records[line.newest.version] for line in self._lines.values()]
        line = self._lines.get(policy)
        if line is not None:
            told += [
                line.records[version]
                for version in sorted(line.records, reverse=True)
                if version in versions and version != line.newest.version
            ]
        return tuple(told[:HEADS_PER_REPLY_MAX])


# --- kept across restarts ----------------------------------------------------------------------


def save_head(directory: Path, version: int, record: bytes, keep: Collection[int]) -> None:
    """Keep the head of a version that is here, and those of the versions in `keep`; no others.

    Raises:
        StorageFailed: the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"{version}{SUFFIX}.partial"
        temporary.write_bytes(record)
        temporary.replace(directory / f"{version}{SUFFIX}")
        for path in directory.glob(f"*{SUFFIX}"):
            if path.stem not in {str(version), *map(str, keep)}:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageFailed(f"weights: {directory}: {error.strerror}") from None


def load_heads(directory: Path) -> tuple[bytes, ...]:
    """The records that were saved, in no order; they are judged as if a peer had sent them."""
    records = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with suppress(OSError):  # it is heard of again from a peer
            records.append(path.read_bytes())
    return tuple(records)
