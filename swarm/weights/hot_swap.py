"""Two phases from one version to the next: make it while the old one serves, then load it.

Making a version (fetch, verify, patch) is the caller's and takes as long as it takes; nothing of it
touches the engine. The engine stops sampling only to load. Whatever fails, before or in the load,
leaves the version before in place and serving, and the result says why.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import trio

from swarm.errors import ChildFailed, StorageFailed, StoreFull, SwarmError
from swarm.storage.files import RunSync
from swarm.weights.store.versions import LocalVersion, Versions

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
