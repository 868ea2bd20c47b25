"""The interface between the coordinator and the providers of workers.

A provider that fails to start a worker, starts it late, or loses it in the middle of a lease is
normal: it says so in what it sees, and the coordinator plans with that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from coordinator.files.fleet import Fleet, Machine
from swarm import texts
from swarm.errors import SwarmError
from swarm.identity import PeerId
from swarm.leasing.coordination import ReportedWorker

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
