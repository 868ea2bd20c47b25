"""Volunteers: machines that come and go by themselves. The learner's plan activates them."""

from collections.abc import Iterable, Mapping
from typing import Final

import trio

from coordinator.fleet_file import Fleet, Machine
from coordinator.providers.base import Condition, Instance, ProviderFailed
from swarm.identity import PeerId
from swarm.leases.coordination import ReportedWorker

SILENT_S: Final = 45.0  # silence after which a disconnected volunteer has left


def is_there(worker: ReportedWorker) -> bool:
    """True if the learner can count on the worker."""
    return worker.connected or worker.heard_s < SILENT_S


class StaticProvider:
    """The provider of volunteers. Those that the fleet file does not name go by their peer ids."""

    def __init__(self, fleet: Fleet) -> None:
        self.use(fleet)
        self._there: frozenset[str] = frozenset()
        self._active: set[str] = set()

    def use(self, fleet: Fleet) -> None:
        self._names = {PeerId(each.peer): each.name for each in fleet.machines if each.peer}

    def owns(self, peer: PeerId) -> bool:
        return peer in self._names

    async def look(self, reported: Iterable[ReportedWorker]) -> Mapping[str, Instance]:
        await trio.lowlevel.checkpoint()
        found: dict[str, Instance] = {}
        there: set[str] = set()
        for worker in reported:
            name = self._names.get(worker.peer, str(worker.peer))
            if is_there(worker):
                there.add(name)
                if not worker.standing_by or name in self._active:
                    found[name] = Instance(name, Condition.UP, worker.peer)
        for name in self._active - there:
            found[name] = Instance(name, Condition.FAILED, None, "it has left")
        self._active = {name for name, each in found.items() if each.condition is Condition.UP}
        self._there = frozenset(there)
        return found

    async def start(self, machine: Machine) -> None:
        await trio.lowlevel.checkpoint()
        if machine.name not in self._there:
            raise ProviderFailed(f"{machine.name} is not there; it comes by itself")
        self._active.add(machine.name)

    async def release(self, name: str) -> None:
        await trio.lowlevel.checkpoint()
        self._active.discard(name)
