"""Discovery: bootstrap, hello, heartbeat, address book.

Each connected peer gets a signed `Hello`, then repeats as heartbeat; the answer names other peers.
The answer also holds the newest hello of another process under the newcomer's key. A split swarm
rejoins: a node with enough peers still dials one more now and then.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import trio

from swarm.errors import (
    DialHeldBack,
    IdentityInUse,
    Reject,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
)
from swarm.identity import Identity, PeerId, public_key_of
from swarm.limits.bounded_table import BoundedTable
from swarm.limits.quotas import Kind
from swarm.peers.address_book import BOOK_PEERS_MAX, AddressBook, addresses_of_peer, plausible
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.requests import ask
from swarm.storage import RunSync
from swarm.texts import printable
from swarm.transport.base import ServeLimits
from swarm.wire import codec
from swarm.wire.messages import (
    ADDRESSES_MAX,
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    PACKAGES_MAX,
    RUN_ID_CHARS_MAX,
    Hello,
    HelloReply,
    KnownPeer,
    PackageBody,
)

log = logging.getLogger(__name__)

NOBODYS_RUN = "nobody-000000000000"  # of who only asks, and takes part in nothing
HEARTBEAT_S = 5.0
HELLO_TIMEOUT_S = 10.0
DIAL_TIMEOUT_S = 10.0
DIALS_AT_A_TIME_MAX = 6
BOOTSTRAP_DIALS_MAX = 6  # at a time, beside the above
HELLOS_PER_BEAT_MAX = 4  # longest not greeted first; new peers come on top
KNOWN_PEERS_TOLD = 8  # random ones per answer
DIAL_ADDRESSES_MAX = 2  # per peer, within `DIAL_TIMEOUT_S` together
NEW_PEER_LOOK_S = 1.0
PEERS_WANTED = 12  # connections that a node seeks; it accepts more
HEARSAY_PER_REPLY_MAX = 8
INSTANCES_MAX = 256
EXTRA_DIAL_S = 60.0  # period of extra dials with enough peers
EXTRA_PEERS_MAX = 4  # connections kept from extra dials
VERSION_NOTES_MAX = 8  # notes about peers with other package versions
SAME_KEY_MARGIN_S = 2  # a later hello is not from our own past


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """This node's facts for other nodes."""

    run_id: str
    agent: str
    identity: Identity
    instance: bytes  # random, to tell processes with one key apart
    packages: Mapping[str, str] = field(default_factory=dict)  # versions of what makes the tasks
    watches: bool = False  # it hears of the run, and is no peer of it to others


@dataclass(slots=True)
class PeerInfo:
    """Content of a peer's last hello or reply."""

    agent: str
    addresses: tuple[str, ...]


# Long: hellos both ways and the address book share one table of peers.
class Discovery:
    def __init__(
        self,
        node: NodeInfo,
        bootstrap: Sequence[str],
        book: AddressBook,
        gater: ConnectionGater,
        *,
        now_s: Callable[[], float],
        rng: Random,
        run_sync: RunSync,
    ) -> None:
        self._run_id = node.run_id
        self._agent = node.agent
        self._watches = node.watches
        self._packages = dict(sorted(node.packages.items())[:PACKAGES_MAX])
        self._own_packages = tuple(
            PackageBody(name=name, version=own) for name, own in self._packages.items()
        )
        self._other_versions: BoundedTable[PeerId, str] = BoundedTable(VERSION_NOTES_MAX)
        self._identity = node.identity
        self._instance = node.instance
        self._started_at_s = int(now_s())
        self._transport = gater.transport
        self._bootstrap = tuple(bootstrap)
        self._book = book
        self._gater = gater
        self._ledger = gater.ledger
        self._now_s = now_s
        self._rng = rng
        self._run_sync = run_sync
        self._dialled: dict[PeerId, str] = {}  # connected peers with the address that answered
        self._last_dial_s: float = trio.current_time()
        self._extra_peers: deque[PeerId] = deque()
        self._asked: set[PeerId] = set()  # peers with a hello under way
        # newest hello of each instance by peer, at most two instances each
        self._heard: BoundedTable[PeerId, BoundedTable[bytes, bytes]] = BoundedTable(INSTANCES_MAX)
        self._strangers: dict[PeerId, str] = {}  # peers of other runs, never dialled again
        self.peers: dict[PeerId, PeerInfo] = {}  # connected peers that answered a hello
        self._dialling: set[PeerId] = set()
        self._greeted_at: dict[PeerId, float] = {}
        self._unreachable: dict[str, str] = {}  # bootstrap address -> problem
        self._shut: set[PeerId] = set()  # bootstrap peers that ended a connection unanswered
        self.sought: PeerId | None = None  # dialled whenever it is not connected

    @property
    def notes(self) -> list[str]:
        """Messages for the user, e.g. that a bootstrap peer is unreachable."""
        unreachable = {**self._shut_out(), **self._unreachable, **self._strange()}
        lines = [f"cannot join through {text}" for text in sorted(unreachable.values())]
        return [*lines, *self._other_versions.values()]

    def _shut_out(self) -> dict[str, str]:
        """Bootstrap addresses whose peers end each connection, with the problem."""
        told = (
            "it ended the connection without an answer: if its owner accepts listed nodes alone, "
            f"have this one added (--allow), {self._identity.peer_id}; if its swarm is private, "
            "ask for an invitation"
        )
        return {a: f"{a}: {told}" for a in self._bootstrap if _peer_of(a) in self._shut}

    @property
    def meets_strangers(self) -> bool:
        return bool(self._strange())

    def _strange(self) -> dict[str, str]:
        """Bootstrap addresses of other runs, with the problem."""
        runs = {each: self._strangers.get(_peer_of(each)) for each in self._bootstrap}
        return {
            address: f"{address}: it takes part in another run, "
            f"{printable(run_id, RUN_ID_CHARS_MAX)}, than this node, {self._run_id}"
            for address, run_id in runs.items()
            if run_id is not None
        }

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join and stay joined. IdentityInUse: an older live process runs under our key."""
        self._transport.serve(
            HELLO_PROTOCOL,
            self._serve_hello,
            ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX, concurrent_max=32),
        )
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._dial_regularly)
            nursery.start_soon(self._save_regularly)
            await self._greet_regularly(nursery)

    def _beat_s(self) -> float:
        return HEARTBEAT_S * (0.9 + 0.2 * self._rng.random())

    async def _save_regularly(self) -> None:
        next_beat = trio.current_time() + self._beat_s()
        while True:
            await trio.sleep(NEW_PEER_LOOK_S)
            await self._ledger.credit.save_if_changed(self._run_sync)
            if trio.current_time() >= next_beat:
                next_beat = trio.current_time() + self._beat_s()
                await self._book.save_if_changed(self._run_sync)

    # --- dialling --------------------------------------------------------------------------

    async def _dial_regularly(self) -> None:
        for address in self._bootstrap:
            if address.endswith(f"/p2p/{self._identity.peer_id}"):
                raise IdentityInUse(
                    f"{address} is this node's own peer id: give --peer another node's address, "
                    "or start with another key (--key-file or --data-dir)"
                )
        next_beat = trio.current_time()
        async with trio.open_nursery() as nursery:
            while True:
                on_beat = trio.current_time() >= next_beat
                if on_beat:
                    next_beat = trio.current_time() + self._beat_s()
                    self._dial_bootstrap_peers(nursery)
                    self._dial_sought(nursery)
                    self._dial_extra(nursery)
                if on_beat or self._transport.peers():  # cut off: try more slowly
                    self._dial_more(nursery)
                await trio.sleep(NEW_PEER_LOOK_S)

    def _dial_bootstrap_peers(self, nursery: trio.Nursery) -> None:
        connected, room = self._transport.peers(), BOOTSTRAP_DIALS_MAX
        waiting: dict[PeerId, str] = {}
        for address in self._bootstrap:
            peer = _peer_of(address)
            if peer in self._strangers:
                continue
            if peer in connected:
                self._unreachable.pop(address, None)
            elif peer in self._dialling:
                room -= 1
            else:
                waiting.setdefault(peer, address)
        chosen = list(waiting.items())
        if len(chosen) > room:  # random: some may never answer
            chosen = self._rng.sample(chosen, max(0, room))
        for peer, address in chosen:
            self._dialling.add(peer)
            nursery.start_soon(self._dial_bootstrap, peer, address)

    def _dial_sought(self, nursery: trio.Nursery) -> None:
        peer = self.sought
        if peer is None or peer in self._excluded_peers():
            return
        if any(map(self._gater.may_dial(), self._book.addresses(peer))):
            self._start_dial(nursery, peer)

    def _dial_more(self, nursery: trio.Nursery) -> None:
        """Dial until there are enough peers; a silent one delays no other."""
        under_way = len(self._dialling)
        missing = PEERS_WANTED - len(self._transport.peers()) - under_way
        for peer in self._draw(min(missing, DIALS_AT_A_TIME_MAX - under_way)):
            self._start_dial(nursery, peer)

    def _dial_extra(self, nursery: trio.Nursery) -> None:
        """With enough peers, dial one more now and then, maybe of a separated part of the swarm."""
        connected = self._transport.peers()
        now = trio.current_time()
        if len(connected) < PEERS_WANTED or now - self._last_dial_s < EXTRA_DIAL_S:
            return
        if len(self._dialling) >= DIALS_AT_A_TIME_MAX:
            return
        nursery.start_soon(self._close_oldest_extra, connected)
        for peer in self._draw(1):
            self._extra_peers.append(peer)
            self._start_dial(nursery, peer)

    def _draw(self, number: int) -> list[PeerId]:
        if number <= 0:
            return []
        now_s, may_dial = trio.current_time(), self._gater.may_dial()
        return self._book.draw(number, self._excluded_peers(), self._rng, now_s, may_dial)

    def _excluded_peers(self) -> set[PeerId]:
        """Peers that are connected, being dialled, banned, of another run, or this node."""
        excluded = {*self._transport.peers(), *self._strangers, *self._dialling}
        return excluded | {self._identity.peer_id} | self._gater.banned_peers()

    def _start_dial(self, nursery: trio.Nursery, peer: PeerId) -> None:
        self._last_dial_s = trio.current_time()
        self._dialling.add(peer)
        nursery.start_soon(self._dial, peer, self._choose_addresses(self._book.addresses(peer)))

    async def _close_oldest_extra(self, connected: Collection[PeerId]) -> None:
        while len(self._extra_peers) >= EXTRA_PEERS_MAX:
            peer = self._extra_peers.popleft()
            if peer in connected and len(self._transport.peers()) > PEERS_WANTED:
                await self._transport.disconnect(peer)

    def _choose_addresses(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """The first dialable address and random others."""
        able = list(filter(self._gater.may_dial(), addresses))
        number = min(len(able[1:]), DIAL_ADDRESSES_MAX - 1)
        return (*able[:1], *self._rng.sample(able[1:], number))

    async def _dial_bootstrap(self, peer: PeerId, address: str) -> None:
        try:
            peer = await self._transport.connect(address, timeout_s=DIAL_TIMEOUT_S)
        except TransportError as error:
            why = str(error)  # mostly begins with the address
            self._unreachable[address] = why if why.startswith(address) else f"{address}: {why}"
        else:
            self._unreachable.pop(address, None)
            self._dialled[peer] = address
            self._gater.record_answer(address)
        finally:
            self._dialling.discard(peer)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        timeout_s = DIAL_TIMEOUT_S / max(1, len(addresses))
        try:
            self._dialled[peer] = await self._gater.dial_one_of(addresses, timeout_s=timeout_s)
        except DialHeldBack:
            pass  # the address was dialled a moment ago
        except TransportError:
            if self._transport.peers():  # else our own link may be down
                self._book.failed(peer, trio.current_time())
        finally:
            self._dialling.discard(peer)

    # --- hello -----------------------------------------------------------------------------

    async def _greet_regularly(self, nursery: trio.Nursery) -> None:
        """Greet new peers soon, and a bounded number of others at each beat."""
        next_beat = trio.current_time()
        while True:
            now, connected = trio.current_time(), self._transport.peers()
            here = set(connected)
            for gone in self.peers.keys() - here:
                log.debug("%s is gone", gone)
            self._note_shut(self._dialled.keys() - here - self.peers.keys())
            for known in (self.peers, self._dialled, self._greeted_at):
                for gone in known.keys() - here:
                    del known[gone]
            due = [peer for peer in connected if peer not in self._greeted_at]
            if now >= next_beat:
                greeted = sorted(self._greeted_at, key=lambda peer: (self._greeted_at[peer], peer))
                due += greeted[:HELLOS_PER_BEAT_MAX]
                next_beat = now + self._beat_s()
            for peer in due:
                self._greeted_at[peer] = now
                if peer not in self._asked:
                    self._asked.add(peer)
                    nursery.start_soon(self._hello, peer, self._own_hello(peer))
            await trio.sleep(max(0.0, min(NEW_PEER_LOOK_S, next_beat - trio.current_time())))

    def _note_shut(self, gone: Iterable[PeerId]) -> None:
        """Note bootstrap peers that were dialled and left before they answered."""
        named = set(map(_peer_of, self._bootstrap))
        self._shut |= named.intersection(gone) - self._strangers.keys()
        self._shut -= self.peers.keys()

    def _own_hello(self, peer: PeerId) -> bytes:
        body = Hello(
            type="hello",
            run_id=NOBODYS_RUN if self._watches else self._run_id,
            instance=self._instance,
            started_at_s=self._started_at_s,
            sent_at_s=int(self._now_s()),
            agent=self._agent,
            packages=self._own_packages,
            addresses=self._transport.addresses()[:ADDRESSES_MAX],
        )
        trained = () if self._watches else self._ledger.credit.told_to(peer)
        if trained:  # else the field is absent
            body = body.model_copy(update={"trained": trained})
        return codec.sign_hello(body, self._identity)

    async def _hello(self, peer: PeerId, record: bytes) -> None:
        try:
            reply = await ask(
                self._transport, peer, HELLO_PROTOCOL, record, HelloReply,
                HELLO_REPLY_BYTES_MAX, HELLO_TIMEOUT_S,
            )  # fmt: skip
            for known in reply.known_peers:
                public_key_of(known.peer_id)  # an honest node is connected to each of them
        except RemoteProtocolError as error:
            self._ledger.reject(peer, error.reason)
            return
        except TransportError as error:
            log.debug("%s did not answer a hello: %s", peer, error)
            return
        finally:
            self._asked.discard(peer)
        self._compare(peer, reply.packages)
        if reply.run_id != self._run_id:
            log.debug("%s is of run %s", peer, reply.run_id)
            self._record_stranger(peer, reply.run_id)
            self.peers.pop(peer, None)
            await self._transport.disconnect(peer)
            return
        self._strangers.pop(peer, None)  # it may have changed to our run
        addresses = self._plausible(peer, peer, reply.addresses)
        if peer not in self.peers:
            log.debug("%s is a peer, %s, at %s", peer, reply.agent, ", ".join(addresses))
        self.peers[peer] = PeerInfo(reply.agent, addresses)
        worked = [self._dialled[peer]] if peer in self._dialled else []
        path = self._gater.path_of(peer)[:-1]
        self._book.learn(peer, list(dict.fromkeys([*worked, *addresses])), worked=True, path=path)
        self._learn_hearsay(peer, reply.known_peers)
        if reply.other_hello is not None:
            self._check_other(peer, reply.other_hello)

    def _compare(self, peer: PeerId, theirs: Sequence[PackageBody]) -> None:
        """Note the packages that differ: tasks may then differ."""
        other = [
            (each, self._packages[each.name])
            for each in theirs
            if self._packages.get(each.name, each.version) != each.version
        ]
        self._other_versions.pop(peer)
        if other:
            theirs_are = ", ".join(f"{each.name} {each.version}" for each, _ in other)
            ours = ", ".join(f"{each.name} {own}" for each, own in other)
            there = " ".join(f"{each.name}=={own}" for each, own in other)
            here = " ".join(f"{each.name}=={each.version}" for each, _ in other)
            self._other_versions.put(
                peer,
                f"peer {peer} has {theirs_are}, and this run is of {ours}: it shares nothing here "
                f"until it takes yours (pip install {there}), or all others theirs ({here})",
                self._gater.path_of(peer),
            )

    def _plausible(self, teller: PeerId, peer: PeerId, addresses: Sequence[str]) -> tuple[str, ...]:
        return plausible(addresses_of_peer(peer, addresses), self._transport.ip_of(teller))

    def _learn_hearsay(self, teller: PeerId, known_peers: Sequence[KnownPeer]) -> None:
        """Keep a few new names: no peer may fill our book."""
        new = [
            known
            for known in known_peers
            if not self._book.addresses(PeerId(known.peer_id))
            and known.peer_id != self._identity.peer_id
        ]
        told_by = self._gater.share_of(teller)
        for known in new[:HEARSAY_PER_REPLY_MAX]:
            peer = PeerId(known.peer_id)
            addresses = self._plausible(teller, peer, known.addresses)
            self._book.learn(peer, addresses, worked=False, told_by=told_by)

    def learn_found(self, peer: PeerId, addresses: Sequence[str], *, by: str) -> None:
        """Record a peer found by DHT or local network, as hearsay."""
        if peer != self._identity.peer_id:
            self._book.learn(peer, addresses_of_peer(peer, addresses), worked=False, told_by=by)

    def _record_stranger(self, peer: PeerId, run_id: str) -> None:
        self._ledger.reject(peer, Reject.OTHER_RUN)
        if len(self._strangers) < BOOK_PEERS_MAX:
            self._strangers[peer] = run_id

    def _check_other(self, peer: PeerId, record: bytes) -> None:
        """Stop if the record proves that an older live process uses our key."""
        try:
            signer, other = codec.decode_hello(record)
        except RemoteProtocolError as error:
            self._ledger.reject(peer, error.reason)
            return
        if signer != self._identity.peer_id or other.instance == self._instance:
            self._ledger.reject(peer, Reject.MALFORMED)
            return
        alive_now = other.sent_at_s > self._started_at_s + SAME_KEY_MARGIN_S
        is_older = (other.started_at_s, other.instance) < (self._started_at_s, self._instance)
        if alive_now and is_older:
            raise IdentityInUse(
                f"another live node runs under this key ({self._identity.peer_id}): stop it, or "
                "start this one with its own --data-dir or --key-file"
            )

    async def _serve_hello(self, peer: PeerId, payload: bytes) -> bytes:
        self._gater.check_quota(Kind.HELLO, peer)
        try:
            signer, hello = codec.decode_hello(payload)
        except RemoteProtocolError as error:
            self._ledger.reject(peer, error.reason)
            raise
        if signer != peer:
            self._ledger.reject(peer, Reject.WRONG_PRODUCER)
            raise RemoteProtocolError(Reject.WRONG_PRODUCER, "hello of another peer")
        asks_only = hello.run_id == NOBODYS_RUN
        if not asks_only:
            self._compare(peer, hello.packages)
        if hello.run_id != self._run_id and not asks_only:
            self._record_stranger(peer, hello.run_id)  # it may leave before answering ours
        elif not asks_only:
            self._strangers.pop(peer, None)
            addresses = self._plausible(peer, peer, hello.addresses)
            self.peers[peer] = PeerInfo(hello.agent, addresses)
            told_by = self._gater.share_of(peer)
            self._book.learn(peer, addresses, worked=False, told_by=told_by)
            self._ledger.credit.hear(peer, hello.trained)
        if self._watches:
            raise RequestRefused("it watches, and takes part in nothing")
        reply = HelloReply(
            type="hello_reply",
            run_id=self._run_id,
            agent=self._agent,
            packages=self._own_packages,
            addresses=self._transport.addresses()[:ADDRESSES_MAX],
            known_peers=self._known_peers(peer),
            other_hello=None if asks_only else self._record_instance(peer, hello.instance, payload),
        )
        while len(encoded := codec.encode(reply)) > HELLO_REPLY_BYTES_MAX and reply.known_peers:
            fewer = reply.known_peers[: len(reply.known_peers) // 2]
            reply = reply.model_copy(update={"known_peers": fewer})
        return encoded

    def _known_peers(self, asker: PeerId) -> tuple[KnownPeer, ...]:
        known = [
            KnownPeer(peer_id=peer, addresses=info.addresses[:ADDRESSES_MAX])
            for peer, info in sorted(self.peers.items())
            if peer != asker and info.addresses
        ]
        return tuple(self._rng.sample(known, min(len(known), KNOWN_PEERS_TOLD)))

    def _record_instance(self, peer: PeerId, instance: bytes, record: bytes) -> bytes | None:
        """Keep this hello; returns the newest one of another instance of the peer."""
        where = self._gater.path_of(peer)
        instances = self._heard.obtain(peer, lambda: BoundedTable(2), where)
        instances.put(instance, record)
        return next((r for i, r in instances.items() if i != instance), None)


def _peer_of(address: str) -> PeerId:
    return PeerId(address.rpartition("/")[2])
