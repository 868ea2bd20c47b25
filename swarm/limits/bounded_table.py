"""A bounded mapping that strangers fill, fair between origins. Pure. An origin is a path from
wide to narrow (network, block, address). Eviction follows the largest origin at each level, so
an attacker evicts its own entries. High ranks go only when no lower rank is left."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from swarm.limits.address_blocks import RELAYED_PATH, OriginPath, is_public_network

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class OriginLimits:
    """Most entries of one origin, by kind. Paths: of `path_of`, then peer, then its asker."""

    block: int | None = None  # per public address block
    address: int | None = None  # per public address
    private_block: int | None = None
    private_address: int | None = None
    relayed: int | None = None  # all relayed peers together
    peer: int | None = None
    asker: int | None = None

    def __call__(self, path: OriginPath) -> int | None:
        if path[0] == RELAYED_PATH[0] or len(path) == 1:
            return self.relayed if path == RELAYED_PATH else None
        block, address = self.block, self.address
        if not is_public_network(path[1]):
            block, address = self.private_block, self.private_address
        return (block, address, self.peer, self.asker)[len(path) - 2]


@dataclass(eq=False, slots=True)
class _Entry(Generic[K, V]):
    key: K
    value: V
    path: OriginPath
    rank: int


@dataclass(frozen=True, slots=True)
class Evicted(Generic[K, V]):
    """An evicted entry and the origin that was full; () is the whole table."""

    key: K
    value: V
    path: OriginPath


class _Origin(Generic[K, V]):
    """Parts (origins or entries), grouped by their number of entries."""

    __slots__ = ("_by_size", "_largest", "inner", "size")

    def __init__(self) -> None:
        self.size = 0
        self.inner: dict[str, _Origin[K, V]] = {}
        self._by_size: dict[int, OrderedDict[str | _Entry[K, V], None]] = {}
        self._largest = 0

    def resize(self, part: str | _Entry[K, V], before: int, after: int) -> None:
        """Change the size of a part; it becomes the last of its size."""
        self.size += after - before
        if before:
            same = self._by_size[before]
            del same[part]
            if not same:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, OrderedDict())[part] = None
        elif isinstance(part, str):
            del self.inner[part]
        self._largest = max(self._largest, after)
        if self._largest not in self._by_size:
            self._largest = max(0, before - 1)

    def touch(self, part: str | _Entry[K, V], size: int) -> None:
        self._by_size[size].move_to_end(part)

    def largest_part(self, newest_first: bool) -> str | _Entry[K, V]:
        """The part with the most entries; the first or last of equals."""
        largest = self._by_size[self._largest]
        return next(reversed(largest)) if newest_first else next(iter(largest))

    def spread(self, rng: Random) -> list[_Entry[K, V]]:
        """All entries, one of each part before two of any."""
        parts = [part for same in self._by_size.values() for part in same]
        rng.shuffle(parts)
        queues = [
            self.inner[part].spread(rng) if isinstance(part, str) else [part] for part in parts
        ]
        longest = max(map(len, queues), default=0)
        return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


class BoundedTable(Mapping[K, V], Generic[K, V]):
    """At most `total_max` entries, ordered by last use."""

    def __init__(
        self,
        total_max: int,
        *,
        limit_of: Callable[[OriginPath], int | None] | None = None,
        rank_of: Callable[[K, V], int] | None = None,
        newest_first: bool = False,
    ) -> None:
        """`limit_of` bounds an origin. `rank_of` is called on insertion, use and eviction."""
        self._total_max = total_max
        self._limit_of = limit_of
        self._rank_of = rank_of
        self._newest_first = newest_first
        self._entries: OrderedDict[K, _Entry[K, V]] = OrderedDict()
        self._sizes: Counter[OriginPath] = Counter()
        self._origins: dict[int, _Origin[K, V]] = {}  # by rank

    def __getitem__(self, key: K) -> V:
        return self._entries[key].value

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def size_of(self, path: OriginPath) -> int:
        return self._sizes.get(path, 0) if path else len(self)

    def put(self, key: K, value: V, path: OriginPath = ()) -> Evicted[K, V] | None:
        """Insert or replace an entry; returns the evicted entry, which may be the new one."""
        self.pop(key)
        entry = self._entries[key] = _Entry(key, value, path, 0)
        entry.rank = self._rank(entry)
        self._change(entry, 1)
        for length in range(len(path), -1, -1):
            wider = path[:length]
            most = self._total_max if not wider else self._limit_of and self._limit_of(wider)
            if most is not None and self.size_of(wider) > most:
                return self.evict(wider)  # one eviction is enough for all wider origins
        return None

    def use(self, key: K) -> V | None:
        """Look up an entry and mark it as used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        rank = self._rank(entry)
        if rank == entry.rank:
            self._touch(entry)
        else:
            self._change(entry, -1)
            entry.rank = rank
            self._change(entry, 1)
        return entry.value

    def obtain(self, key: K, make: Callable[[], V], path: OriginPath = ()) -> V:
        """As `use`, but creates a missing entry."""
        value = self.use(key)
        if value is None:
            value = make()
            self.put(key, value, path)
        return value

    def pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._change(entry, -1)
        return entry.value

    def evict(self, path: OriginPath = ()) -> Evicted[K, V]:
        """Remove the next victim of an origin; KeyError: it has no entry."""
        entry = self._first_to_go(path, self._newest_first)
        while (rank := self._rank(entry)) > entry.rank:
            self._change(entry, -1)  # its rank has risen
            entry.rank = rank
            self._change(entry, 1)
            entry = self._first_to_go(path, self._newest_first)
        self.pop(entry.key)
        return Evicted(entry.key, entry.value, path)

    def oldest(self, path: OriginPath = ()) -> K:
        """Key of the least recently used victim of an origin; KeyError: it has no entry."""
        return self._first_to_go(path, newest_first=False).key

    def spread(self, count: int, rng: Random) -> list[K]:
        """Up to `count` random keys: high ranks first, one of each origin before two of any."""
        ranks = sorted(self._origins, reverse=True)
        return [entry.key for rank in ranks for entry in self._origins[rank].spread(rng)][:count]

    def _rank(self, entry: _Entry[K, V]) -> int:
        return 0 if self._rank_of is None else self._rank_of(entry.key, entry.value)

    def _first_to_go(self, path: OriginPath, newest_first: bool) -> _Entry[K, V]:
        for rank in sorted(self._origins):
            crowd: _Origin[K, V] | None = self._origins[rank]
            for name in path:
                crowd = None if crowd is None else crowd.inner.get(name)
            if crowd is not None:
                while isinstance(part := crowd.largest_part(newest_first), str):
                    crowd = crowd.inner[part]
                return part
        raise KeyError(path)

    def _touch(self, entry: _Entry[K, V]) -> None:
        crowd = self._origins[entry.rank]
        for name in entry.path:
            inner = crowd.inner[name]
            crowd.touch(name, inner.size)
            crowd = inner
        crowd.touch(entry, 1)

    def _change(self, entry: _Entry[K, V], by: int) -> None:
        """Count an entry in (+1) or out (-1)."""
        crowds = [self._origins.setdefault(entry.rank, _Origin())]
        for length, name in enumerate(entry.path, 1):
            self._sizes[entry.path[:length]] += by
            if not self._sizes[entry.path[:length]]:
                del self._sizes[entry.path[:length]]
            crowds.append(crowds[-1].inner.setdefault(name, _Origin()))
        crowds[-1].resize(entry, (1 - by) // 2, (1 + by) // 2)
        for outer, inner, name in reversed(list(zip(crowds, crowds[1:], entry.path, strict=False))):
            outer.resize(name, inner.size - by, inner.size)
        if not crowds[0].size:
            del self._origins[entry.rank]
