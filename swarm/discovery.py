"""Finding peers and keeping in touch: bootstrap, hello, heartbeat, address book.

Every peer that we are connected to gets a signed `Hello` on connecting and then as a heartbeat;
its answer names other peers to dial. The address book keeps what worked across restarts, so that
a node comes back without any bootstrap peer. A peer that takes part in another run is left.

A hello also guards the identity: peers hand a newcomer the newest hello that they heard from
another process under the newcomer's own key. Only the key's holder can have signed it, and its
time shows whether that process is alive now.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import trio

from swarm import codec
from swarm.errors import (
    ConfigError,
    IdentityInUse,
    Reject,
    RemoteProtocolError,
    TransportError,
)
from swarm.identity import Identity, PeerId
from swarm.ledger import Ledger
from swarm.messages import (
    ADDRESSES_MAX,
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    KNOWN_PEERS_MAX,
    Hello,
    HelloReply,
    KnownPeer,
)
from swarm.transport.base import ServeLimits, Transport

HEARTBEAT_S = 5.0
HELLO_TIMEOUT_S = 10.0
DIAL_TIMEOUT_S = 10.0
DIALS_PER_BEAT_MAX = 4
PEERS_WANTED = 12  # connections that a node seeks by itself; it accepts more
BOOK_PEERS_MAX = 512
INSTANCES_MAX = 256
DIAL_FAILURES_MAX = 5  # in a row, after which an address is forgotten
SAME_KEY_MARGIN_S = 2  # a hello sent this long after our start is no echo of our own past


@dataclass(slots=True)
class PeerInfo:
    """What a peer said in its last hello or reply."""

    agent: str
    addresses: tuple[str, ...]


@dataclass(slots=True)
class _Entry:
    addresses: tuple[str, ...]
    failures: int = 0


@dataclass(slots=True)
class AddressBook:
    """Peers and where they were reachable, newest last, bounded; saved as one JSON file."""

    path: Path | None = None
    entries: OrderedDict[PeerId, _Entry] = field(default_factory=OrderedDict)

    @classmethod
    def load(cls, path: Path) -> "AddressBook":
        """Read the book; a missing or damaged one is an empty one."""
        book = cls(path)
        try:
            stored = json.loads(path.read_text())
            for peer, addresses in list(stored.items())[-BOOK_PEERS_MAX:]:
                book.entries[PeerId(str(peer))] = _Entry(tuple(str(a) for a in addresses))
        except (OSError, ValueError, AttributeError, TypeError):
            book.entries.clear()
        return book

    def save(self) -> None:
        """Write the book atomically. Does nothing for a book without a file."""
        if self.path is None:
            return
        text = json.dumps({peer: entry.addresses for peer, entry in self.entries.items()})
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self.path)

    def learn(self, peer: PeerId, addresses: Sequence[str], *, worked: bool) -> None:
        """Note a peer's addresses. Hearsay never replaces what worked."""
        known = self.entries.get(peer)
        if known is not None and not worked:
            return
        if addresses:
            self.entries[peer] = _Entry(tuple(addresses[:ADDRESSES_MAX]))
        if worked and peer in self.entries:
            self.entries.move_to_end(peer)
        while len(self.entries) > BOOK_PEERS_MAX:
            self.entries.popitem(last=False)

    def failed(self, peer: PeerId) -> None:
        """Count a dial that failed; forget the peer after `DIAL_FAILURES_MAX` in a row."""
        entry = self.entries.get(peer)
        if entry is not None:
            entry.failures += 1
            if entry.failures >= DIAL_FAILURES_MAX:
                del self.entries[peer]


class Discovery:
    """One node's membership in the swarm. `run` works until cancelled."""

    def __init__(
        self,
        run_id: str,
        agent: str,
        identity: Identity,
        instance: bytes,
        transport: Transport,
        bootstrap: Sequence[str],
        book: AddressBook,
        ledger: Ledger,
        *,
        now_s: Callable[[], float],
        rng: Random,
    ) -> None:
        self._run_id = run_id
        self._agent = agent
        self._identity = identity
        self._instance = instance
        self._started_at_s = int(now_s())
        self._transport = transport
        self._bootstrap = tuple(bootstrap)
        self._book = book
        self._ledger = ledger
        self._now_s = now_s
        self._rng = rng
        # The newest hello of each instance, by peer: at most two instances each
        self._heard: OrderedDict[PeerId, OrderedDict[bytes, bytes]] = OrderedDict()
        self._strangers: set[PeerId] = set()  # of other runs; never dialled again
        self.peers: dict[PeerId, PeerInfo] = {}  # connected peers that answered a hello
        self.notes: list[str] = []  # what a person should know, e.g. an unreachable bootstrap

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, and stay joined.

        Raises:
            IdentityInUse: an older live process runs under our key.
        """
        self._transport.serve(
            HELLO_PROTOCOL,
            self._serve_hello,
            ServeLimits(HELLO_BYTES_MAX, HELLO_REPLY_BYTES_MAX, concurrent_max=32),
        )
        task_status.started()
        while True:
            await self._dial_round()
            await self._hello_round()
            self._book.save()
            await trio.sleep(HEARTBEAT_S * (0.9 + 0.2 * self._rng.random()))

    # --- dialling --------------------------------------------------------------------------

    async def _dial_round(self) -> None:
        connected = set(self._transport.peers())
        unreachable: list[str] = []
        async with trio.open_nursery() as nursery:
            for address in self._bootstrap:
                peer = PeerId(address.rpartition("/")[2])
                if peer in self._strangers:
                    unreachable.append(f"{address} (it takes part in another run)")
                elif peer not in connected:
                    nursery.start_soon(self._dial_bootstrap, address, unreachable)
            missing = PEERS_WANTED - len(connected)
            known = sorted(
                peer
                for peer in self._book.entries
                if peer not in connected
                and peer not in self._strangers
                and peer != self._identity.peer_id
            )
            for peer in self._rng.sample(
                known, max(0, min(missing, DIALS_PER_BEAT_MAX, len(known)))
            ):
                nursery.start_soon(self._dial, peer, self._book.entries[peer].addresses)
        self.notes = [f"cannot join through {text}" for text in sorted(unreachable)]

    async def _dial_bootstrap(self, address: str, unreachable: list[str]) -> None:
        if address.endswith(f"/p2p/{self._identity.peer_id}"):
            raise IdentityInUse(
                f"{address} is this node's own peer id: give --peer another node's address, "
                "or start with another key (--key-file or --data-dir)"
            )
        try:
            await self._transport.connect(address, timeout_s=DIAL_TIMEOUT_S)
        except TransportError as error:
            unreachable.append(f"{address} ({error})")

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        for address in addresses:
            try:
                await self._transport.connect(address, timeout_s=DIAL_TIMEOUT_S)
            except (TransportError, ConfigError):
                continue
            return
        if self._transport.peers():  # with nobody to be reached, the fault may be our own link's
            self._book.failed(peer)

    # --- hello -----------------------------------------------------------------------------

    async def _hello_round(self) -> None:
        connected = self._transport.peers()
        for gone in self.peers.keys() - set(connected):
            del self.peers[gone]
        record = self._own_hello()
        async with trio.open_nursery() as nursery:
            for peer in connected:
                nursery.start_soon(self._hello, peer, record)

    def _own_hello(self) -> bytes:
        body = Hello(
            type="hello",
            run_id=self._run_id,
            instance=self._instance,
            started_at_s=self._started_at_s,
            sent_at_s=int(self._now_s()),
            agent=self._agent,
            addresses=self._transport.addresses()[:ADDRESSES_MAX],
        )
        return codec.sign_hello(body, self._identity)

    async def _hello(self, peer: PeerId, record: bytes) -> None:
        try:
            answer = await self._transport.request(
                peer,
                HELLO_PROTOCOL,
                record,
                timeout_s=HELLO_TIMEOUT_S,
                response_bytes_max=HELLO_REPLY_BYTES_MAX,
            )
            reply = codec.decode(answer, HelloReply, HELLO_REPLY_BYTES_MAX)
        except RemoteProtocolError as error:
            self._ledger.reject(peer, error.reason)
            return
        except TransportError:
            return
        if reply.run_id != self._run_id:
            await self._leave(peer)
            return
        self._strangers.discard(peer)  # it may have come back with our run
        self.peers[peer] = PeerInfo(reply.agent, reply.addresses)
        self._book.learn(peer, reply.addresses, worked=True)
        for known in reply.known_peers:
            if known.peer_id != self._identity.peer_id:
                self._book.learn(PeerId(known.peer_id), known.addresses, worked=False)
        if reply.other_hello is not None:
            self._check_other(peer, reply.other_hello)

    async def _leave(self, peer: PeerId) -> None:
        self._ledger.reject(peer, Reject.WRONG_RUN)
        if len(self._strangers) < BOOK_PEERS_MAX:
            self._strangers.add(peer)
        self.peers.pop(peer, None)
        await self._transport.disconnect(peer)

    def _check_other(self, peer: PeerId, record: bytes) -> None:
        """Stop if the record proves that an older process than ours is alive under our key."""
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
        try:
            hello = _own_hello_of(peer, payload)
        except RemoteProtocolError as error:
            self._ledger.reject(peer, error.reason)
            raise
        if hello.run_id != self._run_id:
            self._ledger.reject(peer, Reject.WRONG_RUN)
        else:
            self.peers[peer] = PeerInfo(hello.agent, hello.addresses)
            self._book.learn(peer, hello.addresses, worked=False)
        reply = HelloReply(
            type="hello_reply",
            run_id=self._run_id,
            agent=self._agent,
            addresses=self._transport.addresses()[:ADDRESSES_MAX],
            known_peers=self._known_peers(peer),
            other_hello=self._note_instance(peer, hello.instance, payload),
        )
        return _encode_fitting(reply)

    def _known_peers(self, asker: PeerId) -> tuple[KnownPeer, ...]:
        known = [
            KnownPeer(peer_id=peer, addresses=info.addresses[:ADDRESSES_MAX])
            for peer, info in sorted(self.peers.items())
            if peer != asker and info.addresses
        ]
        return tuple(self._rng.sample(known, min(len(known), KNOWN_PEERS_MAX)))

    def _note_instance(self, peer: PeerId, instance: bytes, record: bytes) -> bytes | None:
        """Keep this hello; give back the newest one of another instance under the same peer id."""
        instances = self._heard.setdefault(peer, OrderedDict())
        self._heard.move_to_end(peer)
        instances[instance] = record
        instances.move_to_end(instance)
        while len(instances) > 2:
            instances.popitem(last=False)
        while len(self._heard) > INSTANCES_MAX:
            self._heard.popitem(last=False)
        return next((r for i, r in instances.items() if i != instance), None)


def _encode_fitting(reply: HelloReply) -> bytes:
    """The reply with as many known peers as fit: what peers said never puts us over our limit."""
    encoded = codec.encode(reply)
    while len(encoded) > HELLO_REPLY_BYTES_MAX and reply.known_peers:
        fewer = reply.known_peers[: len(reply.known_peers) // 2]
        reply = reply.model_copy(update={"known_peers": fewer})
        encoded = codec.encode(reply)
    return encoded


def _own_hello_of(peer: PeerId, record: bytes) -> Hello:
    """The hello of the peer that sent it, not one that it heard from somebody else."""
    signer, hello = codec.decode_hello(record)
    if signer != peer:
        raise RemoteProtocolError(Reject.WRONG_PRODUCER, "hello of another peer")
    return hello
