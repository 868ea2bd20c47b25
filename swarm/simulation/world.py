"""Deterministic runs under a virtual clock. Only this file touches trio's private scheduler; it
refuses an unknown trio. Runs must not use threads, processes, sockets, the wall clock, or the
order of sets."""

import hashlib
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.metadata import version
from random import Random
from typing import Any, TypeVar

import trio
import trio._core._run as scheduler
from trio.testing import MockClock

from swarm.errors import LocalProtocolError
from swarm.identity import Identity, PeerId
from swarm.simulation.links import LinkProfile, SimulatedLinks, links_of, separate_ips
from swarm.transport.memory.network import RUNS_ON, Cut, MemoryNetwork, MemoryTransport

T = TypeVar("T")
_FLAG = "_ALLOW_DETERMINISTIC_SCHEDULING"
_RANDOM = "_r"
_QUEUE = "runq"


def deterministic_run(async_fn: Callable[..., Awaitable[T]], *args: Any, seed: int | str) -> T:
    """`trio.run` under a virtual clock, with scheduling drawn from `seed`."""
    rng = getattr(scheduler, _RANDOM, None)
    before = getattr(scheduler, _FLAG, None)
    if not isinstance(rng, Random) or not isinstance(before, bool):
        raise LocalProtocolError(f"trio {version('trio')} cannot be seeded: use another version")
    state = rng.getstate()
    rng.seed(f"{seed}/scheduler")
    setattr(scheduler, _FLAG, True)
    try:
        return trio.run(async_fn, *args, clock=MockClock(autojump_threshold=0.0))
    finally:
        setattr(scheduler, _FLAG, before)
        rng.setstate(state)


class Freezer:
    """Suspends all tasks of a host; answers and timeouts meanwhile take effect on waking."""

    def __init__(self) -> None:
        self._frozen: dict[PeerId, list[Any]] = {}

    def freeze(self, host: PeerId) -> None:
        self._frozen.setdefault(host, [])
        runner = scheduler.GLOBAL_RUN_CONTEXT.runner
        before = getattr(runner, _QUEUE, None)
        if not isinstance(before, deque):
            raise LocalProtocolError(f"trio {version('trio')} cannot hold up tasks")
        queue = _RunQueue(self._frozen)
        for task in before:  # suspend ready tasks as well
            queue.append(task)
        setattr(runner, _QUEUE, queue)

    def thaw(self, host: PeerId) -> None:
        held = self._frozen.pop(host, [])
        getattr(scheduler.GLOBAL_RUN_CONTEXT.runner, _QUEUE).extend(held)


class _RunQueue(deque[Any]):
    """Trio's run queue, without the tasks of frozen hosts."""

    def __init__(self, frozen: dict[PeerId, list[Any]]) -> None:
        super().__init__()
        self._frozen = frozen

    def append(self, task: Any) -> None:
        if self._frozen and (held := self._frozen.get(task.context.get(RUNS_ON))) is not None:
            held.append(task)
        else:
            super().append(task)


def stop_at_once(nursery: trio.Nursery) -> None:
    """End all tasks in a nursery like a killed process: shielded work is not finished."""
    todo = list(nursery.child_tasks)
    while todo:
        task = todo.pop()
        for inner in task.child_nurseries:
            todo.extend(inner.child_tasks)
        status: Any = task._cancel_status
        while status is not None and status is not nursery._cancel_status:
            status._scope.shield = False
            status = status.parent
    nursery.cancel_scope.cancel()


class SimulatedWorld:
    """Identities of `hosts` and their network, drawn from one seed."""

    def __init__(
        self,
        seed: int | str,
        hosts: int,
        profile: LinkProfile,
        nursery: trio.Nursery,
        profiles: Mapping[int, LinkProfile] | None = None,
        ips: Sequence[str] | None = None,
    ) -> None:
        """`profiles`: single hosts' links. `ips` None: public, in separate blocks."""
        self.seed = seed
        self.ips = separate_ips(hosts) if ips is None else tuple(ips)
        self.identities = tuple(
            Identity(self.rng(f"identity/{index}").randbytes(32)) for index in range(hosts)
        )
        self._names = {each.peer_id: str(index) for index, each in enumerate(self.identities)}
        by_host = {self.peer_id(index): each for index, each in (profiles or {}).items()}
        self.links = SimulatedLinks(profile, by_host)
        self.network = MemoryNetwork(self.rng("links"), self.links, nursery, self._observe)
        self._freezer = Freezer()
        self._last_pause = 0
        self._pauses: dict[int, int] = {}  # host -> number of its current pause
        self._stillborn_until_s: dict[PeerId, float] = {}
        self.events = 0
        self._hash = hashlib.sha256()

    def rng(self, name: str) -> Random:
        return Random(f"{self.seed}/{name}")

    def peer_id(self, host: int) -> PeerId:
        return self.identities[host].peer_id

    def join(self, host: int) -> MemoryTransport:
        """Put a host on the network, the first time or after it left."""
        return self.network.join(self.peer_id(host), self.ips[host])

    def crash(self, host: int) -> None:
        """Take a host off the network at once; the caller cancels its tasks."""
        self.resume(host)
        self.network.crash(self.peer_id(host))

    @contextmanager
    def on(self, host: int) -> Iterator[None]:
        """Tasks started in this context run on the host, so that `pause` suspends them."""
        token = RUNS_ON.set(self.peer_id(host))
        try:
            yield
        finally:
            RUNS_ON.reset(token)

    def pause(self, host: int, for_s: float) -> None:
        """Suspend a host like a closed laptop: its tasks stop and messages to it wait."""
        self._last_pause += 1
        number = self._pauses[host] = self._last_pause
        self.record(f"pause {host}")
        self._freezer.freeze(self.peer_id(host))
        self.network.pause(self.peer_id(host))

        def wake() -> None:
            if self._pauses.get(host) == number:
                self.resume(host)

        self.network.at(trio.current_time() + for_s, wake)

    def resume(self, host: int) -> None:
        if self._pauses.pop(host, None) is not None:
            self.record(f"resume {host}")
            self._freezer.thaw(self.peer_id(host))
            self.network.resume(self.peer_id(host))

    def clog(self, host: int, for_s: float) -> None:
        self.record(f"clog {host}")
        self.links.clog(self.peer_id(host), trio.current_time() + for_s)

    def kill_newborn(self, host: int, for_s: float) -> None:
        """Close a host's connections, and for a while each new one once admitted."""
        self.record(f"stillborn {host}")
        peer = self.peer_id(host)
        self._stillborn_until_s[peer] = trio.current_time() + for_s
        for other in self.identities:
            self.network.part(peer, other.peer_id)

    def cut(
        self,
        hosts: Collection[int],
        others: Collection[int] | None = None,
        *,
        one_way: bool = False,
    ) -> Cut:
        """Cut hosts off from others, or from all."""
        if others is None:
            others = [host for host in range(len(self.identities)) if host not in hosts]
        self.record(f"cut {sorted(hosts)} {sorted(others)} {one_way}")
        ends = ([self.peer_id(host) for host in side] for side in (hosts, others))
        return self.network.partition(*ends, one_way=one_way)

    def heal(self, cut: Cut | None = None) -> None:
        self.record("heal")
        self.network.heal(cut)

    @property
    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def record(self, event: str) -> None:
        self.events += 1
        self._hash.update(f"{trio.current_time():.9f} {event}\n".encode())

    def _observe(
        self, what: str, source: PeerId, target: PeerId, about: str, payload: bytes
    ) -> None:
        digest = hashlib.sha256(payload).hexdigest()[:16] if payload else "-"
        ends = f"{self._names.get(source, source)}>{self._names.get(target, target)}"
        self.record(f"{what} {ends} {about or '-'} {len(payload)} {digest}")
        now_s = trio.current_time()
        if what == "connect" and any(
            self._stillborn_until_s.get(peer, 0.0) > now_s for peer in (source, target)
        ):
            self.network.at(now_s, partial(self.network.part, source, target))


@asynccontextmanager
async def open_world(
    seed: int | str,
    hosts: int,
    profile: LinkProfile,
    profiles: Mapping[int, LinkProfile] | None = None,
    ips: Sequence[str] | None = None,
) -> AsyncIterator[SimulatedWorld]:
    async with trio.open_nursery() as nursery:
        yield SimulatedWorld(seed, hosts, profile, nursery, profiles, ips)
        nursery.cancel_scope.cancel()


def run_in_world(
    main: Callable[[SimulatedWorld], Awaitable[T]],
    *,
    hosts: int = 2,
    profile: str | LinkProfile | Sequence[LinkProfile] = "cable",
    seed: int | str = 0,
    timeout_s: float = 3600.0,
) -> T:
    """Run `main` in a new world. `profile`: a name, one link for all hosts, or one per host.
    `timeout_s` is virtual; beyond it TooSlowError."""
    if isinstance(profile, str):
        links: Sequence[LinkProfile] = links_of(profile, hosts)
    elif isinstance(profile, LinkProfile):
        links = [profile] * hosts
    else:
        links = profile

    async def body() -> T:
        failure: Exception | None = None
        async with open_world(seed, hosts, links[0], dict(enumerate(links))) as world:
            try:
                with trio.fail_after(timeout_s):
                    return await main(world)
            except Exception as error:  # noqa: BLE001 - raised below, out of the world's nursery
                failure = error
        assert failure is not None
        raise failure

    try:
        return deterministic_run(body, seed=seed)
    except BaseException as error:
        error.add_note(f"in wan(hosts={hosts}, profile={profile!r}, seed={seed!r})")
        raise
