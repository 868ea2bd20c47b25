"""The queue that publishes a learner's versions."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import trio

from swarm.errors import SwarmError
from swarm.storage import RunSync
from swarm.weights.publisher import Published, Publisher
from swarm.weights.weights_service import WeightsService

RETRY_S: Final = 15.0  # after a version could not be published


class PublisherQueue:
    """Publishes one version after the other while the learner trains. One that fails is tried again
    until a newer one is offered: without any, workers would soon be too old to get work."""

    def __init__(
        self,
        service: WeightsService,
        publisher: Publisher,
        directory: Path,
        nursery: trio.Nursery,
        complain: Callable[[str], Awaitable[None]],
        run_sync: RunSync,
        note: Callable[[Published], None],
    ) -> None:
        """Versions are exported to `directory`, one at a time. `complain` gets why one was not
        published, `note` each that was."""
        self._service = service
        self._publisher = publisher
        self._directory = directory
        self._nursery = nursery
        self._complain = complain
        self._run_sync = run_sync
        self._note = note
        self._free = trio.Semaphore(1)
        self._wanted = 0  # the newest that was offered
        self._offered = trio.Event()  # anew
        head = service.heads.newest(service.rules.policy)
        self.newest = 0 if head is None else head.version  # on offer, or on its way there; 0: none
        self.making: int | None = None  # the version that is exported and put on offer

    async def offer(self, version: int, export: Callable[[Path], Awaitable[None]]) -> None:
        """Have `export` write the policy's directory, and put that on offer. Returns when the
        policy may change again; the rest goes on in the background."""
        self._wanted = version
        self._offered.set()
        await self._free.acquire()
        self.making = version
        try:
            target = self._directory / f"version-{version}"
            await self._run_sync(_make_empty, target)
            await export(target)
        except BaseException:
            self.making = None
            self._free.release()
            raise
        self.newest = version
        self._nursery.start_soon(self._publish, target, version)

    async def _publish(self, target: Path, version: int) -> None:
        try:
            while self._wanted == version and not await self._try(target, version):
                if self._wanted == version:
                    self._offered = trio.Event()
                    with trio.move_on_after(RETRY_S):
                        await self._offered.wait()
        finally:
            with trio.CancelScope(shield=True):
                await self._run_sync(_remove, target)
            self.making = None
            self._free.release()

    async def _try(self, target: Path, version: int) -> bool:
        try:
            published = await self._publisher.publish(target, version)
        except SwarmError as error:
            await self._complain(f"version {version} was not published: {error}; it is tried again")
            return False
        if published is not None:
            self._note(published)
        return True


def _make_empty(directory: Path) -> None:
    _remove(directory)
    directory.mkdir(parents=True)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
