"""The interface between the coordinator and the providers of workers.

Failed starts, late starts and lost workers are normal: `look` reports them.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from coordinator.fleet_file import Fleet, Machine
from swarm.errors import ConfigError, SwarmError
from swarm.identity import Identity, PeerId
from swarm.leases.coordination import ReportedWorker

QUOTED_CHARS_MAX: Final = 300  # of a program's output, in a message


class ProviderFailed(SwarmError):
    """A worker could not be started or ended; one line."""


class Condition(StrEnum):
    """The condition of a machine."""

    STARTING = "starting"
    UP = "up"
    FAILED = "failed"  # started, and not there


@dataclass(frozen=True, slots=True)
class Instance:
    """A machine that was started."""

    name: str
    condition: Condition
    peer: PeerId | None  # None: not known yet
    detail: str = ""


class Provider(Protocol):
    """Runs the machines of one kind."""

    def use(self, fleet: Fleet) -> None:
        """Take a new fleet file."""
        ...

    def owns(self, peer: PeerId) -> bool:
        """True if the peer is a worker of this provider, running or not."""
        ...

    async def look(self, reported: Iterable[ReportedWorker]) -> Mapping[str, Instance]:
        """All machines that were started, also by an earlier coordinator, and not released; by
        name. `reported`: the learner's workers."""
        ...

    async def start(self, machine: Machine) -> None:
        """Start a worker, unless it runs.

        Raises:
            ProviderFailed: it could not be started.
        """
        ...

    async def release(self, name: str) -> None:
        """End a worker, or let it stand by. An unknown name is no error.

        Raises:
            ProviderFailed: it could not be ended.
        """
        ...


KEY_FILE: Final = "identity.pem"


class KeyedWorkers:
    """The workers of a provider that makes their keys, each in a directory of its name.

    Threads may share one. `_find_keys` and `_make_key` block on the disk.
    """

    def __init__(self, directory: Path, fleet: Fleet) -> None:
        self._directory = directory
        self._peer_ids: dict[str, PeerId] = {}  # by name, of all that were ever started here
        self.use(fleet)

    def use(self, fleet: Fleet) -> None:
        self._run_file, self._peers = fleet.run_file.absolute(), fleet.peers

    def owns(self, peer: PeerId) -> bool:
        return peer in list(self._peer_ids.values())  # threads add to it

    def _find_keys(self) -> None:
        """Read the keys that an earlier process made."""
        for key in self._directory.glob(f"*/{KEY_FILE}"):
            if key.parent.name not in self._peer_ids:
                with contextlib.suppress(ConfigError):  # raised again at the worker's start
                    self._peer_ids[key.parent.name] = Identity.load(key, None).peer_id

    def _make_key(self, name: str) -> Path:
        """Load or make a worker's key; returns its file.

        Raises:
            ConfigError: it cannot be used.
            OSError: it cannot be written.
        """
        path = self._directory / name / KEY_FILE
        if not path.exists():
            Identity.generate().save(path, None)
        self._peer_ids[name] = Identity.load(path, None).peer_id
        return path
