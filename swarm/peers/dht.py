"""A distributed hash table of the members of each run (Kademlia). Each node announces itself to
the nodes whose ids are closest (by XOR, 256 bits) to the run's key, and asks them for others. A
peer can announce only itself; only peers that answered are passed on."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

import trio

from swarm.errors import (
    ConfigError,
    DialHeldBack,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
)
from swarm.identity import PeerId, public_key_of
from swarm.limits.address_blocks import OriginPath, is_public, path_of
from swarm.limits.bounded_table import BoundedTable
from swarm.limits.quotas import Kind
from swarm.peers.address_book import addresses_of_peer, ip_in, plausible
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.requests import ask
from swarm.transport.base import ServeLimits
from swarm.wire import codec
from swarm.wire.messages import (
    ADDRESSES_MAX,
    CLOSER_PER_REPLY_MAX,
    PROVIDERS_BYTES_MAX,
    PROVIDERS_PER_REPLY_MAX,
    PROVIDERS_PROTOCOL,
    PROVIDERS_REPLY_BYTES_MAX,
    FindProviders,
    KnownPeer,
    ProvidersReply,
)

KEY_DOMAIN: Final = b"swarm/dht/run/1\x00"
PEER_DOMAIN: Final = b"swarm/dht/peer/1\x00"
BUCKET_PEERS_MAX: Final = 8
BUCKETS_MAX: Final = 32  # by leading bits shared with our id; the last holds the rest
ENTRIES_MAX: Final = 4_096  # (key, peer) pairs
PROVIDERS_PER_KEY_MAX: Final = 64
KEYS_PER_PROVIDER_MAX: Final = 4
OF_PEER: Final = "/p2p/"  # prefix of a peer in a path
PROVIDER_LIFE_S: Final = 1_800.0
ASKERS_MAX: Final = 256
LOOKUP_PEERS_MAX: Final = 24  # asked by one lookup
LOOKUP_PARALLEL: Final = 3
HOLDERS: Final = 4  # closest peers that get our announcement
REQUEST_TIMEOUT_S: Final = 10.0
DIAL_TIMEOUT_S: Final = 5.0
DIAL_ADDRESSES_MAX: Final = 2  # per peer
LONELY_LOOKUP_S: Final = 60.0
LOOKUP_S: Final = 600.0
FIRST_LOOKUP_S: Final = 3.0


def key_of(run_id: str) -> bytes:
    return hashlib.sha256(KEY_DOMAIN + run_id.encode()).digest()


def point_of(peer: PeerId) -> bytes:
    """Point of a peer. It follows from its key, so choosing a place means making keys."""
    return hashlib.sha256(PEER_DOMAIN + peer.encode()).digest()


def distance(one: bytes, other: bytes) -> int:
    return int.from_bytes(one, "big") ^ int.from_bytes(other, "big")


Where = tuple[str, ...]


class Table:
    """Peers that answered, in buckets by distance. A full bucket keeps them while they answer,
    except the newest of an origin that has more than a newcomer's."""

    def __init__(self, own: bytes) -> None:
        self._own = own
        self.buckets: dict[int, BoundedTable[PeerId, Where]] = {}

    def _bucket(self, peer: PeerId) -> BoundedTable[PeerId, Where]:
        shared_bits = 256 - distance(self._own, point_of(peer)).bit_length()
        number = min(shared_bits, BUCKETS_MAX - 1)
        if number not in self.buckets:
            self.buckets[number] = BoundedTable(BUCKET_PEERS_MAX, newest_first=True)
        return self.buckets[number]

    def add(self, peer: PeerId, addresses: Sequence[str], path: OriginPath = ()) -> None:
        self._bucket(peer).put(peer, tuple(addresses[:ADDRESSES_MAX]), path)

    def drop(self, peer: PeerId) -> None:
        self._bucket(peer).pop(peer)

    def closest(self, key: bytes, number: int) -> list[tuple[PeerId, Where]]:
        known = [entry for bucket in self.buckets.values() for entry in bucket.items()]
        return sorted(known, key=lambda entry: distance(key, point_of(entry[0])))[:number]


class Store:
    """Announced members by run. When full, the oldest of the largest origin goes."""

    def __init__(self) -> None:
        self.runs: dict[bytes, BoundedTable[PeerId, tuple[float, Where]]] = {}
        self._all: BoundedTable[tuple[bytes, PeerId], None] = BoundedTable(
            ENTRIES_MAX,
            limit_of=lambda path: KEYS_PER_PROVIDER_MAX if path[-1].startswith(OF_PEER) else None,
        )

    def put(
        self,
        key: bytes,
        peer: PeerId,
        addresses: Sequence[str],
        now_s: float,
        path: OriginPath = (),
    ) -> None:
        entry = now_s + PROVIDER_LIFE_S, tuple(addresses[:ADDRESSES_MAX])
        run = self.runs.setdefault(key, BoundedTable(PROVIDERS_PER_KEY_MAX))
        of_run = run.put(peer, entry, path)
        if of_run is not None:
            self._all.pop((key, of_run.key))
        if of_run is None or of_run.key != peer:
            of_all = self._all.put((key, peer), None, (*path, f"{OF_PEER}{peer}"))
            if of_all is not None:
                self._remove(*of_all.key)

    def _remove(self, key: bytes, peer: PeerId) -> None:
        self._all.pop((key, peer))
        self.runs[key].pop(peer)
        if not self.runs[key]:
            del self.runs[key]

    def members(self, key: bytes, now_s: float) -> list[tuple[PeerId, Where]]:
        run = self.runs.get(key)
        if run is None:
            return []
        for peer in [peer for peer, (until_s, _) in run.items() if until_s <= now_s]:
            self._remove(key, peer)
        return [(peer, where) for peer, (_, where) in run.items()]

    def choose(
        self, key: bytes, count: int, now_s: float, rng: Random
    ) -> list[tuple[PeerId, Where]]:
        """Up to `count` random members, one of each origin before two of any."""
        known = dict(self.members(key, now_s))
        run = self.runs.get(key)
        return [] if run is None else [(peer, known[peer]) for peer in run.spread(count, rng)]


@dataclass(slots=True)
class _Lookup:
    key: bytes
    where: dict[PeerId, Where] = field(default_factory=dict)
    asked: dict[PeerId, None] = field(default_factory=dict)
    answered: list[PeerId] = field(default_factory=list)

    def next(self, number: int) -> list[PeerId]:
        """The closest peers not asked yet, until enough were asked."""
        left = min(number, LOOKUP_PEERS_MAX - len(self.asked))
        open_ones = [peer for peer in self.where if peer not in self.asked]
        chosen = self._closest(open_ones, self.asked)[: max(0, left)]
        self.asked |= dict.fromkeys(chosen)
        return chosen

    def holders(self) -> list[PeerId]:
        """The closest peers that answered; they get our announcement."""
        return self._closest(self.answered, ())[:HOLDERS]

    def _closest(self, peers: Iterable[PeerId], taken: Iterable[PeerId]) -> list[PeerId]:
        """Order by distance, but one of each origin before two of any."""
        turns = Counter(self._path(peer) for peer in taken)
        ordered: list[tuple[int, int, PeerId]] = []
        for peer in sorted(peers, key=lambda p: distance(self.key, point_of(p))):
            path = self._path(peer)
            ordered.append((turns[path], len(ordered), peer))
            turns[path] += 1
        return [peer for _, _, peer in sorted(ordered)]

    def _path(self, peer: PeerId) -> OriginPath:
        """Public address block of a peer as it was named; else the peer itself."""
        ips = [ip for address in self.where[peer] if (ip := ip_in(address)) and is_public(ip)]
        return path_of(ips[0])[:2] if ips else (peer,)


Found = Callable[[PeerId, Sequence[str]], None]


class Dht:
    def __init__(
        self,
        key: bytes,
        gater: ConnectionGater,
        bootstrap: Sequence[str],
        found: Found,
        is_lonely: Callable[[], bool],
        *,
        rng: Random,
        serves: Callable[[], bool] = lambda: True,
    ) -> None:
        """`serves` False: a client, which nobody can dial."""
        self._key = key
        self._transport = gater.transport
        self._gater = gater
        self._bootstrap = tuple(bootstrap)
        self._found = found
        self._is_lonely = is_lonely
        self._rng = rng
        self._serves = serves
        self._asker_addresses: BoundedTable[PeerId, Where] = BoundedTable(ASKERS_MAX)
        self.table = Table(point_of(gater.transport.peer_id))
        self.store = Store()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._transport.serve(
            PROVIDERS_PROTOCOL,
            self._serve,
            ServeLimits(PROVIDERS_BYTES_MAX, PROVIDERS_REPLY_BYTES_MAX, concurrent_per_peer_max=2),
        )
        task_status.started()
        await trio.sleep(FIRST_LOOKUP_S * (0.5 + self._rng.random()))
        while True:
            await self.look_up()
            pause_s = LONELY_LOOKUP_S if self._is_lonely() else LOOKUP_S
            await trio.sleep(pause_s * (0.75 + 0.5 * self._rng.random()))

    async def look_up(self) -> None:
        """Walk to the nodes closest to our run's key; announce ourselves and collect members."""
        lookup = _Lookup(self._key)
        for address in self._bootstrap:
            lookup.where[PeerId(address.rpartition("/")[2])] = (address,)
        for peer in self._transport.peers():
            lookup.where.setdefault(peer, self._asker_addresses.get(peer, ()))
        lookup.where |= dict(self.table.closest(self._key, LOOKUP_PEERS_MAX))
        lookup.where.pop(self._transport.peer_id, None)
        while batch := lookup.next(LOOKUP_PARALLEL):
            async with trio.open_nursery() as nursery:
                for peer in batch:
                    nursery.start_soon(self._ask, lookup, peer, False)
        async with trio.open_nursery() as nursery:
            for peer in lookup.holders():
                nursery.start_soon(self._ask, lookup, peer, True)

    async def _ask(self, lookup: _Lookup, peer: PeerId, provide: bool) -> None:
        request = FindProviders(
            type="find_providers",
            key=lookup.key,
            intent="provide" if provide else "find",
            addresses=self._transport.addresses()[:ADDRESSES_MAX],
        )
        try:
            if not await self._connect(peer, lookup.where[peer]):
                return
            reply = await ask(
                self._transport, peer, PROVIDERS_PROTOCOL, request, ProvidersReply,
                PROVIDERS_REPLY_BYTES_MAX, REQUEST_TIMEOUT_S,
            )  # fmt: skip
            for known in (*reply.providers, *reply.closer):
                public_key_of(known.peer_id)  # an honest node got an answer from each
        except RemoteProtocolError as error:
            self._gater.ledger.reject(peer, error.reason)
            return
        except TransportError:
            self.table.drop(peer)
            return
        if not provide:
            lookup.answered.append(peer)
            self.table.add(peer, lookup.where[peer], path_of(self._transport.ip_of(peer)))
        teller_ip = self._transport.ip_of(peer)
        for other, where in _sensible(reply.providers, teller_ip):
            if other != self._transport.peer_id:
                self._found(other, where)
        for other, where in _sensible(reply.closer, teller_ip):
            if other != self._transport.peer_id and where:
                lookup.where.setdefault(other, where)

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> bool:
        """Connect to a peer if needed. A peer that does not answer is forgotten."""
        if peer in self._transport.peers():
            return True
        if self._gater.is_banned(peer):
            self.table.drop(peer)
            return False
        given = next((each for each in addresses if each in self._bootstrap), None)
        try:
            if given is not None:  # given by the user; lookups are rare anyway
                await self._transport.connect(given, timeout_s=DIAL_TIMEOUT_S)
            else:
                where = addresses[:DIAL_ADDRESSES_MAX]
                await self._gater.dial_one_of(where, timeout_s=DIAL_TIMEOUT_S)
        except DialHeldBack:
            return False
        except (TransportError, ConfigError):
            self.table.drop(peer)
            return False
        return True

    async def _serve(self, peer: PeerId, payload: bytes) -> bytes:
        asked = self._gater.read(Kind.PROVIDERS, peer, payload, FindProviders, PROVIDERS_BYTES_MAX)
        now_s = trio.current_time()
        if not self._serves():
            raise RequestRefused("a client of the table")
        where = plausible(addresses_of_peer(peer, asked.addresses), self._transport.ip_of(peer))
        path = path_of(self._transport.ip_of(peer))
        if where:
            self._asker_addresses.put(peer, where, path)
        if where and asked.intent == "provide":
            self.store.put(asked.key, peer, where, now_s, path)
        known = self.store.choose(asked.key, PROVIDERS_PER_REPLY_MAX + 1, now_s, self._rng)
        chosen = [entry for entry in known if entry[0] != peer][:PROVIDERS_PER_REPLY_MAX]
        closer = [e for e in self.table.closest(asked.key, CLOSER_PER_REPLY_MAX) if e[0] != peer]
        reply = ProvidersReply(
            type="providers", providers=_named(chosen), closer=_named(e for e in closer if e[1])
        )
        return codec.encode(reply)


def _named(entries: Iterable[tuple[PeerId, tuple[str, ...]]]) -> tuple[KnownPeer, ...]:
    return tuple(KnownPeer(peer_id=peer, addresses=where) for peer, where in entries)


def _sensible(
    named: Sequence[KnownPeer], teller_ip: str | None
) -> list[tuple[PeerId, tuple[str, ...]]]:
    """Named peers with their dialable addresses."""
    peers = ((PeerId(known.peer_id), known.addresses) for known in named)
    return [(peer, plausible(addresses_of_peer(peer, own), teller_ip)) for peer, own in peers]
