"""The attackers of the siege: one module for each class, and here what all of them are made with.

An attack is a function that goes on until its time is over; whatever it has open ends with it. It
runs in a process apart from the node's and from those of honest peers, so that what it costs is
measured for itself. Each has a named bound in number or rate: none is a test of who has more
machines.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from random import Random
from typing import Any

import trio
from siege_wire import FAILURES, Door, Mux, Spent, Wire, admitted, dialled

from swarm.identity import Identity

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


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that an attack measured itself, and what it may be at most."""

    what: str
    value: float
    most: float

    @property
    def holds(self) -> bool:
        """Whether it is within."""
        return self.value <= self.most


@dataclass(eq=False, slots=True)
class Assault:
    """What an attack has to hand: its target, its addresses, its keys and its account."""

    name: str
    door: Door
    run_id: str
    seconds: float
    network: str  # the first two bytes of its addresses, such as 127.9
    block: int  # the third
    extra: dict[str, Any] = field(default_factory=dict)
    spent: Spent = field(default_factory=Spent)
    claims: list[Claim] = field(default_factory=list)
    keys: int = 0

    @property
    def rng(self) -> Random:
        """Its own randomness, the same in each run."""
        return Random(self.name)

    @property
    def data_dir(self) -> Path:
        """Of the node under siege, for who attacks its files."""
        return Path(self.extra["data_dir"])

    def source(self, number: int = 0, block: int = 0) -> str:
        """An address of the attacker's: all of one block unless another is asked for."""
        return f"{self.network}.{(self.block + block) % 256}.{1 + number % 250}"

    def key(self) -> Identity:
        """A key that nobody has seen yet."""
        assert self.keys < KEYS_MAX, "an attack makes so many keys and no more"
        self.keys += 1
        return Identity(sha256(f"{self.name}/{self.keys}".encode()).digest())

    def dialled(self, number: int = 0, block: int = 0) -> AbstractAsyncContextManager[Wire]:
        """A TCP connection; see `source` for where it comes from."""
        return dialled(self.door, self.source(number, block), self.spent)

    def admitted(
        self, number: int = 0, key: Identity | None = None, *, deaf: bool = False
    ) -> AbstractAsyncContextManager[Mux]:
        """A connection up to Yamux."""
        return admitted(self.door, key or self.key(), self.source(number), self.spent, deaf=deaf)

    def claim(self, what: str, value: float, most: float) -> None:
        """Say what was measured here."""
        self.claims.append(Claim(what, value, most))


Run = Callable[[Assault], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Attack:
    """One way of attacking."""

    name: str
    kind: str  # of `CLASSES`
    rate: str  # in words
    bound: str  # beyond which it does not go, in words
    run: Run
    target: str  # of what kind
    alone: bool  # never beside others of its class: it measures something itself
    seconds_min: float  # in less than which it shows nothing


ATTACKS: dict[str, Attack] = {}


def attack(
    kind: str,
    rate: str,
    bound: str,
    *,
    target: str = "node",
    alone: bool = False,
    seconds_min: float = 0.0,
) -> Callable[[Run], Run]:
    """Enter a function into the catalogue, under its name."""
    assert kind in CLASSES, kind

    def enter(run: Run) -> Run:
        name = getattr(run, "__name__", "")
        assert name not in ATTACKS, name
        ATTACKS[name] = Attack(name, kind, rate, bound, run, target, alone, seconds_min)
        return run

    return enter


# --- what attacks are made of ----------------------------------------------------------------


async def paced(assault: Assault, per_s: float, most: int) -> AsyncIterator[int]:
    """Count up at a rate, without catching up for more than a second, and to `most` at most."""
    began_s = trio.current_time()
    for number in range(most):
        due_s = began_s + number / per_s
        now_s = trio.current_time()
        if now_s - due_s > 1.0:
            began_s += now_s - due_s - 1.0
        await trio.sleep_until(due_s)
        if assault.spent.bytes_out > BYTES_MAX:
            return
        yield number


async def over_and_over(
    assault: Assault, once: Callable[[int], Awaitable[None]], per_s: float, most: int = 1_000_000
) -> None:
    """Do it, and whenever it ends do it again, at a rate."""
    async for number in paced(assault, per_s, most):
        await tried(assault, once, number)


async def tried(assault: Assault, once: Callable[..., Awaitable[None]], *values: Any) -> None:
    """Do it once; the node may end it whenever it likes."""
    try:
        await once(*values)
    except FAILURES as error:
        assault.spent.count(f"ended: {type(error).__name__}")
    except BaseExceptionGroup as group:
        rest = group.split(FAILURES)[1]
        if rest is not None:
            raise
        assault.spent.count("ended: in a group")


async def side_by_side(count: int, once: Callable[[int], Awaitable[None]]) -> None:
    """So many at once."""
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(once, number)


async def crowd(
    assault: Assault,
    once: Callable[[int], Awaitable[None]],
    per_s: float,
    most: int,
    together_max: int,
) -> None:
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


async def held(wire_or_mux: Any, seconds: float) -> None:
    """Hold a connection until the other end has enough of it."""
    with trio.move_on_after(seconds), suppress(*FAILURES):
        if isinstance(wire_or_mux, Mux):
            await wire_or_mux.over.wait()
        else:
            await wire_or_mux.discard()


def load_class(kind: str) -> None:
    """Have one class in the catalogue, and what it is made of."""
    assert kind in CLASSES, kind
    import_module(f"{__name__}.{kind}")


def load_all() -> None:
    """Have every class in the catalogue."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
