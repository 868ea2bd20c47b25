"""The interface between the coordinator and the providers of workers.

A provider that fails to start a worker, starts it late, or loses it in the middle of a lease is
normal: it says so in what it sees, and the coordinator plans with that.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from coordinator.fleet_file import Fleet, Machine
from swarm import texts
from swarm.errors import ConfigError, SwarmError
from swarm.identity import Identity, PeerId
from swarm.leases.coordination import ReportedWorker

QUOTED_CHARS_MAX: Final = 300


class ProviderFailed(SwarmError):
    """A worker could not be started or ended; one line that says why."""


class Condition(StrEnum):
    """The condition of a machine."""

    STARTING = "starting"
    UP = "up"
    FAILED = "failed"  # it was started, and is not there


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine that runs a worker, or should. `peer` None: not known yet."""

    name: str
    condition: Condition
    peer: PeerId | None
    detail: str = ""


class Provider(Protocol):
    """Runs the machines of one kind."""

    def use(self, fleet: Fleet) -> None:
        """Go by this fleet file from now on."""
        ...

    def owns(self, peer: PeerId) -> bool:
        """True if the peer is a worker of this provider's, running or not."""
        ...

    async def look(self, reported: Iterable[ReportedWorker]) -> Mapping[str, Instance]:
        """All that were started, also by a coordinator before this one, and not released; by name.
        `reported`: what the learner says of its workers."""
        ...

    async def start(self, machine: Machine) -> None:
        """Have it run a worker; returns once that is under way. One that runs already goes on.

        Raises:
            ProviderFailed: it could not be started.
        """
        ...

    async def release(self, name: str) -> None:
        """End it, or have it stand by; it may be started again. One that is not there is no error.

        Raises:
            ProviderFailed: it could not be ended.
        """
        ...


def printable(line: str) -> str:
    """The output of a program or a cloud, fit to be quoted in a message."""
    return texts.printable(line, QUOTED_CHARS_MAX)


# The keys of workers that a provider runs: made here, one directory each, kept for good.

KEY_FILE: Final = "identity.pem"


class WorkerKeys:
    """Blocks on the disk, but for `of` and `__contains__`; threads may share one."""

    def __init__(self, directory: Path) -> None:
        """`directory`: of folders named as the workers are."""
        self._directory = directory
        self._peer_ids: dict[str, PeerId] = {}  # of all that were ever started here, by name

    def __contains__(self, peer: PeerId) -> bool:
        return peer in list(self._peer_ids.values())  # threads add to it

    def of(self, name: str) -> PeerId | None:
        """A worker's peer id, where it is known."""
        return self._peer_ids.get(name)

    def look(self) -> None:
        """Read those that an earlier process made."""
        for key in self._directory.glob(f"*/{KEY_FILE}"):
            if key.parent.name not in self._peer_ids:
                with contextlib.suppress(ConfigError):  # said when it is to be started
                    self._peer_ids[key.parent.name] = Identity.load(key, None).peer_id

    def made(self, name: str) -> Path:
        """A worker's key file, there from now on.

        Raises:
            ConfigError: it cannot be used.
            OSError: it cannot be written.
        """
        path = self._directory / name / KEY_FILE
        if not path.exists():
            Identity.generate().save(path, None)
        self._peer_ids[name] = Identity.load(path, None).peer_id
        return path
