"""The catalogue of attacks on a node's sockets, and the parts that attacks are made of.

An attack goes on until its time is over; whatever it has open ends with it. As a program,
`python -m tests.hostile.attack`, this is the attackers' process: it reads one order in JSON, runs
its attacks side by side, and prints in JSON what they cost. It is niced, ends by itself, and starts
no other process. Each attack has a bound in number or rate: none tests who has more machines.
"""

import json
import os
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import trio

from swarm.identity import Identity
from tests.hostile.wire import FAILURES, Door, Mux, Spent, Wire, admitted, dialled, framed

CLASSES = (
    "control",
    "pre_handshake",
    "handshake",
    "muxer",
    "gossip",
    "address_book",
    "exchange",
    "verifier",
    "leases",
    "weights",
    "relay",
    "telemetry",
    "local_files",
)
KEYS_MAX = 4_096  # that one attack makes
BYTES_MAX = 1_200_000_000  # that one attack sends
OFTEN = 1_000_000  # repetitions: until the time is over
NICENESS = 15
GRACE_S = 10.0  # for an attack to end after its time
DESCRIPTORS_MAX = 8_192
MEMORY_BYTES_MAX = 2 * 2**30  # of address space; beyond it this process fails, and nothing else


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure that an attack measured itself, and its bound."""

    what: str
    value: float
    most: float

    @property
    def holds(self) -> bool:
        return self.value <= self.most


@dataclass(eq=False, slots=True)
class Assault:
    """One run of an attack: its target, addresses, keys and account."""

    name: str
    door: Door
    run_id: str
    seconds: float
    network: str  # the first two bytes of its addresses, such as 127.9; "": any address
    block: int = 1  # the third byte
    extra: dict[str, Any] = field(default_factory=dict)
    identity: Identity | None = None  # the only key; None: a new one for each connection
    spent: Spent = field(default_factory=Spent)
    claims: list[Claim] = field(default_factory=list)
    keys: int = 0

    @property
    def rng(self) -> Random:
        """The attack's own randomness, the same in each run."""
        return Random(self.name)

    @property
    def data_dir(self) -> Path:
        """The data directory of the node under siege."""
        return Path(self.extra["data_dir"])

    def source(self, number: int = 0, block: int = 0) -> str | None:
        """An address of the attacker's: all of one block unless another is asked for."""
        if not self.network:
            return None
        return f"{self.network}.{(self.block + block) % 256}.{1 + number % 250}"

    def key(self) -> Identity:
        """A key that nobody has seen yet, or the only one."""
        if self.identity is not None:
            return self.identity
        assert self.keys < KEYS_MAX, "an attack makes so many keys and no more"
        self.keys += 1
        return Identity(sha256(f"{self.name}/{self.keys}".encode()).digest())

    def dialled(self, number: int = 0, block: int = 0) -> AbstractAsyncContextManager[Wire]:
        """A TCP connection; see `source` for its address."""
        return dialled(self.door, self.source(number, block), self.spent)

    def admitted(
        self, number: int = 0, key: Identity | None = None, *, deaf: bool = False
    ) -> AbstractAsyncContextManager[Mux]:
        """A connection up to Yamux."""
        return admitted(self.door, key or self.key(), self.source(number), self.spent, deaf=deaf)

    def claim(self, what: str, value: float, most: float) -> None:
        self.claims.append(Claim(what, value, most))


Run = Callable[[Assault], Awaitable[None]]
Once = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """An entry of the catalogue."""

    name: str
    kind: str  # of `CLASSES`
    rate: str  # in words
    bound: str  # in words
    run: Run
    target: str
    alone: bool  # never beside others of its class: it measures something itself
    seconds_min: float  # less shows nothing


ATTACKS: dict[str, Attack] = {}


def attack(
    rate: str, bound: str, *, target: str = "node", alone: bool = False, seconds_min: float = 0.0
) -> Callable[[Run], Run]:
    """Enter a function into the catalogue, under its name and the class of its module."""

    def enter(run: Run) -> Run:
        name, kind = getattr(run, "__name__", ""), run.__module__.rpartition(".")[2]
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(
            name, kind if kind in CLASSES else "control", rate, bound, run, target, alone,
            seconds_min,
        )  # fmt: skip
        return run

    return enter


@attack("nothing is sent", "one core at low priority", alone=True)
async def computes_beside_it(assault: Assault) -> None:
    """No attack: a process of low priority computes. If this row misses a goal, the machine is too
    small or too busy for the other rows to say much."""
    until_s = trio.current_time() + assault.seconds
    while trio.current_time() < until_s:
        sum(range(200_000))
        await trio.lowlevel.checkpoint()


# --- the shapes of attacks ---------------------------------------------------------------------


def dialling(per_s: float, most: int, together: int) -> Callable[..., Run]:
    """Decorate what one TCP connection does: `most` of them begin at a rate, `together` at most
    are open."""

    def shaped(use: Callable[[Assault, Wire, int], Awaitable[None]]) -> Run:
        async def once(assault: Assault, number: int) -> None:
            async with assault.dialled(number) as wire:
                await use(assault, wire, number)

        @wraps(use)
        async def run(assault: Assault) -> None:
            await crowd(assault, partial(once, assault), per_s, most, together)

        return run

    return shaped


def redialling(count: int, per_s: float = 1.0) -> Callable[..., Run]:
    """Decorate what one TCP connection does: there are `count`, each dialled again when it ends."""

    def shaped(use: Callable[[Assault, Wire], Awaitable[None]]) -> Run:
        @wraps(use)
        async def run(assault: Assault) -> None:
            async def once(place: int, _: int) -> None:
                async with assault.dialled(place) as wire:
                    await use(assault, wire)

            await side_by_side(
                count, lambda place: over_and_over(assault, partial(once, place), per_s)
            )

        return run

    return shaped


def admitting(count: int, per_s: float = 1.0, *, deaf: bool = False) -> Callable[..., Run]:
    """Decorate what one admitted connection does: there are `count` of one address, each made again
    under a new key when it ends."""

    def shaped(use: Callable[[Assault, Mux], Awaitable[None]]) -> Run:
        @wraps(use)
        async def run(assault: Assault) -> None:
            await connected(assault, count, partial(use, assault), per_s, deaf=deaf)

        return run

    return shaped


async def connected(
    assault: Assault,
    count: int,
    use: Callable[[Mux], Awaitable[None]],
    per_s: float = 1.0,
    *,
    deaf: bool = False,
) -> None:
    """As `admitting`, for what is known only when the attack runs."""

    async def once(_: int) -> None:
        async with assault.admitted(deaf=deaf) as mux:
            await use(mux)

    await side_by_side(count, lambda _: over_and_over(assault, once, per_s))


class _Pace:
    """See `paced`. No generator: a cancelled attack would leave it unfinished."""

    def __init__(self, assault: Assault, per_s: float, most: int, mux: Mux | None) -> None:
        self._assault, self._per_s, self._most, self._mux = assault, per_s, most, mux
        self._began_s = trio.current_time()
        self._number = 0

    def __aiter__(self) -> "_Pace":
        return self

    async def __anext__(self) -> int:
        number, now_s = self._number, trio.current_time()
        due_s = self._began_s + number / self._per_s
        if number < self._most and now_s - due_s > 1.0:
            self._began_s += now_s - due_s - 1.0
        await trio.sleep_until(due_s)
        is_over = self._mux is not None and self._mux.over.is_set()
        if number >= self._most or is_over or self._assault.spent.bytes_out > BYTES_MAX:
            raise StopAsyncIteration
        self._number += 1
        return number


def paced(
    assault: Assault, per_s: float, most: int = OFTEN, mux: Mux | None = None
) -> AsyncIterator[int]:
    """Count up to `most` at a rate, while a connection lasts. Delays of more than a second are not
    made up for."""
    return _Pace(assault, per_s, most, mux)


async def asking(
    assault: Assault, mux: Mux, protocol: str, payload: bytes, per_s: float, most: int = OFTEN
) -> None:
    """Make requests at a rate."""
    async for _ in paced(assault, per_s, most, mux):
        await tried(assault, mux.request, protocol, payload)
        assault.spent.count("asked")


async def asking_unread(
    assault: Assault, mux: Mux, protocol: str, payload: bytes, per_s: float
) -> None:
    """Make requests at a rate and leave the answers lying."""
    async for _ in paced(assault, per_s, OFTEN, mux):
        await mux.open(protocol, framed(payload))


async def over_and_over(assault: Assault, once: Once, per_s: float, most: int = OFTEN) -> None:
    """Do it, and whenever it ends do it again, at a rate."""
    async for number in paced(assault, per_s, most):
        await tried(assault, once, number)


async def tried(assault: Assault, once: Callable[..., Awaitable[Any]], *values: Any) -> None:
    """Do it once; the node may end it whenever it likes."""
    try:
        await once(*values)
    except FAILURES as error:
        assault.spent.count(f"ended: {type(error).__name__}")
    except BaseExceptionGroup as group:
        if group.split(FAILURES)[1] is not None:
            raise
        assault.spent.count("ended: in a group")


async def side_by_side(count: int, once: Once) -> None:
    """Do it so many times at once."""
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(once, number)


async def crowd(assault: Assault, once: Once, per_s: float, most: int, together_max: int) -> None:
    """Begin them at a rate without waiting for their ends; so many run together at most."""
    limit = trio.CapacityLimiter(together_max)

    async def one(number: int) -> None:
        async with limit:
            await tried(assault, once, number)

    async with trio.open_nursery() as nursery:
        async for number in paced(assault, per_s, most):
            while limit.statistics().tasks_waiting:  # noqa: ASYNC110  no event for it
                await trio.sleep(0.01)
            nursery.start_soon(one, number)


async def held(wire_or_mux: Wire | Mux, seconds: float) -> None:
    """Hold a connection until the other end has enough of it."""
    with trio.move_on_after(seconds), suppress(*FAILURES):
        if isinstance(wire_or_mux, Mux):
            await wire_or_mux.over.wait()
        else:
            await wire_or_mux.discard()


async def drip(end: Any, data: bytes, every_s: float) -> None:
    """Send byte by byte."""
    for byte in data:
        await end.send(bytes([byte]))
        await trio.sleep(every_s)


def load(kind: str) -> None:
    """Have one class in the catalogue, and the modules that it uses."""
    if kind != "control":
        import_module(f"tests.hostile.attacks.{kind}")


def load_all() -> None:
    for kind in CLASSES:
        load(kind)


# --- the attackers' process --------------------------------------------------------------------


async def attacked(assault: Assault) -> dict[str, Any]:
    """Run one attack for its time; what it cost and found."""
    failure = ""
    with trio.move_on_after(assault.seconds):
        try:
            await tried(assault, ATTACKS[assault.name].run, assault)
        except Exception as error:  # noqa: BLE001  boundary: told in the table as a broken attack
            failure = repr(error)[:300]
    return {
        "name": assault.name,
        "bytes_out": assault.spent.bytes_out,
        "connections": assault.spent.connections,
        "counts": assault.spent.counts,
        "failure": failure,
        "claims": [asdict(each) | {"holds": each.holds} for each in assault.claims],
    }


async def obeyed(order: dict[str, Any]) -> dict[str, Any]:
    """Run all attacks of an order, from one block of addresses."""
    results: list[dict[str, Any]] = []
    shared = {key: order[key] for key in ("run_id", "seconds", "network", "block")}

    async def run(place: int) -> None:
        extra = order["extra"] | {"place": place}
        assault = Assault(order["names"][place], Door(*order["door"]), **shared, extra=extra)
        results.append(await attacked(assault))

    with trio.move_on_after(order["seconds"] + GRACE_S):
        await side_by_side(len(order["names"]), run)
    return {"attacks": sorted(results, key=lambda each: str(each["name"]))}


def bound_ourselves() -> None:
    """Let an attack that goes wrong hurt nobody but this process."""
    os.nice(NICENESS)
    most = min(DESCRIPTORS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))


def cpu_s() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    order = json.load(sys.stdin)
    load(order["kind"])
    bound_ourselves()
    began_s = cpu_s()  # what is above counts as nobody's
    answer = trio.run(obeyed, order)
    sys.stdout.write(json.dumps(answer | {"cpu_s": cpu_s() - began_s}) + "\n")


if __name__ == "__main__":
    # As `__main__` this module would have a catalogue of its own, beside that of the attacks.
    import_module("tests.hostile.attack").main()
