"""Gossip between simulated hosts, as GossipSub does it.

Each subscriber keeps a mesh of a few connected subscribers and forwards each new message to it. The
mesh is mended at once when connections change, not at the next heartbeat. At each heartbeat a host
offers its recent message ids to some peers outside the mesh, which ask for missing ones.

Arrivals are calls at their time, not tasks: hundreds of hosts stay affordable.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import trio

from swarm.identity import PeerId
from swarm.transport.base import Subscription, TransportCounters

if TYPE_CHECKING:
    from swarm.transport.memory.network import MemoryNetwork

DEGREE, DEGREE_LOW, DEGREE_HIGH = 6, 4, 12
HEARTBEAT_S = 1.0
OFFER_HEARTBEATS = 3  # heartbeats during which a message is offered
OFFER_PEERS = 6  # per heartbeat
KEPT_HEARTBEATS = 5  # heartbeats during which it can be asked for
OFFERED_IDS_MAX = 256  # per offer
ID_BYTES = 40  # size of a message id on the wire
LINK_GOSSIP_MAX = 256  # in flight between two hosts; more are dropped
SEEN_MESSAGES_MAX = 8192  # ids remembered by a host


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Flight:
    """A message in flight: first and last byte at the receiver's downlink, and the time when the
    sender's uplink is free again. `copies`: 0 means lost, 2 duplicated."""

    first_s: float
    last_s: float
    wire_bytes: int
    copies: int
    left_s: float = 0.0
    slow_s: float = 0.0  # of that, delay by slow start


@dataclass(frozen=True, slots=True)
class Message:
    number: int  # unique in this network
    origin: PeerId
    topic: str
    payload: bytes


@dataclass(eq=False, slots=True)
class MeshSubscription(Subscription):
    """One host's subscription and its mesh for a topic."""

    mesh: "dict[PeerId, GossipEnd]" = field(default_factory=dict)
    # validated messages by heartbeat, newest last
    heard: deque[list[Message]] = field(default_factory=lambda: deque([[]], maxlen=KEPT_HEARTBEATS))


@dataclass(eq=False, slots=True)
class GossipEnd:
    peer_id: PeerId
    counters: TransportCounters
    subscriptions: dict[str, MeshSubscription] = field(default_factory=dict)
    # by peer, with an object of each connection: messages in flight die with it
    links: "dict[PeerId, tuple[GossipEnd, object]]" = field(default_factory=dict)
    in_flight: Counter[PeerId] = field(default_factory=Counter)
    seen: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def mark_seen(self, number: int) -> bool:
        """Mark a message as seen. Returns True if it is new."""
        if number in self.seen:
            return False
        self.seen[number] = None
        if len(self.seen) > SEEN_MESSAGES_MAX:
            self.seen.popitem(last=False)
        return True

    def subscribers_near(self, topic: str) -> "list[GossipEnd]":
        """Connected subscribers of a topic, ordered by id."""
        ends = [end for _, (end, _) in sorted(self.links.items())]
        return [end for end in ends if topic in end.subscriptions]


class MemoryGossip:
    def __init__(self, wire: "MemoryNetwork", rng: Random) -> None:
        self._wire = wire
        self._rng = rng
        self._messages = 0
        self.duplicates = 0  # copies received again

    def connect(self, one: GossipEnd, other: GossipEnd) -> None:
        link = object()
        one.links[other.peer_id] = (other, link)
        other.links[one.peer_id] = (one, link)
        for topic in list(one.subscriptions):
            if topic in other.subscriptions:
                self._mend(one, topic)
                self._mend(other, topic)

    def disconnect(self, one: GossipEnd, other: GossipEnd) -> None:
        del one.links[other.peer_id], other.links[one.peer_id]
        for near, far in ((one, other), (other, one)):
            for topic, subscription in list(near.subscriptions.items()):
                if subscription.mesh.pop(far.peer_id, None) is not None:
                    self._mend(near, topic)

    def subscribe(self, host: GossipEnd, topic: str, subscription: MeshSubscription) -> None:
        host.subscriptions[topic] = subscription
        self._mend(host, topic)
        for fellow in host.subscribers_near(topic):
            self._mend(fellow, topic)
        self._next_beat(host, topic)

    def leave(self, host: GossipEnd) -> None:
        for subscription in host.subscriptions.values():
            subscription.channel.close()
        host.subscriptions.clear()

    def _mend(self, host: GossipEnd, topic: str) -> None:
        """Fill a thin mesh from peers with room in theirs; if there are none, a full one takes the
        host in."""
        mesh = host.subscriptions[topic].mesh
        if len(mesh) >= DEGREE_LOW:
            return
        others = [end for end in host.subscribers_near(topic) if end.peer_id not in mesh]
        free = [end for end in others if len(end.subscriptions[topic].mesh) < DEGREE_HIGH]
        if not mesh and not free:
            free = others[:1]
        for end in self._rng.sample(free, min(len(free), DEGREE - len(mesh))):
            mesh[end.peer_id] = end
            end.subscriptions[topic].mesh[host.peer_id] = host

    def publish(self, host: GossipEnd, topic: str, payload: bytes) -> None:
        """Publish a message; a host that does not subscribe sends it to a few that do."""
        self._messages += 1
        message = Message(self._messages, host.peer_id, topic, payload)
        host.mark_seen(message.number)
        subscription = host.subscriptions.get(topic)
        if subscription is None:
            subscribers_near = host.subscribers_near(topic)
            targets = self._rng.sample(subscribers_near, min(len(subscribers_near), DEGREE))
        else:
            subscription.heard[-1].append(message)
            targets = list(subscription.mesh.values())
        for target in targets:
            self._pass_on(host, target, message)

    def _pass_on(self, source: GossipEnd, target: GossipEnd, message: Message) -> None:
        here, there = source.peer_id, target.peer_id
        if source.in_flight[there] >= LINK_GOSSIP_MAX:
            source.counters.dropped[message.topic] += 1
            return
        source.in_flight[there] += 1

        def end() -> None:
            source.in_flight[there] -= 1

        def lose() -> None:
            self._wire.observe("lost", here, there, message.topic, message.payload)

        then = partial(self._receive, target, here, message)
        size = len(message.payload)
        self._carry(source, target, message.topic, size, then, reliable=False, end=end, lose=lose)

    def _carry(
        self,
        source: GossipEnd,
        target: GossipEnd,
        topic: str,
        size_bytes: int,
        then: Callable[[], None],
        *,
        reliable: bool = True,
        end: Callable[[], None] = _nothing,
        lose: Callable[[], None] = _nothing,
    ) -> None:
        """Send bytes; call `then` with each copy that arrives over the same connection, `lose` if
        none does, and `end` before the last."""
        here, there = source.peer_id, target.peer_id
        link = source.links[there][1]
        flight = self._wire.send(here, there, size_bytes, topic, reliable=reliable)

        def reach() -> None:
            copies = 0 if self._wire.is_cut(here, there) else flight.copies
            if copies == 0:
                lose()
                end()
            for left in reversed(range(copies)):
                land = partial(self._wire.when_awake, there, partial(arrive, left))
                self._wire.at(self._wire.receive(there, flight), land)

        def arrive(left: int) -> None:
            if not left:
                end()
            if there in source.links and source.links[there][1] is link:
                then()

        self._wire.at(flight.last_s, reach)

    def _receive(self, host: GossipEnd, sender: PeerId, message: Message) -> None:
        subscription = host.subscriptions.get(message.topic)
        if subscription is None:
            return
        if message.number in host.seen:
            self.duplicates += 1
            return
        if not subscription.admit(sender):
            host.counters.refused[message.topic] += 1
            return
        host.mark_seen(message.number)
        topic, payload = message.topic, message.payload
        self._wire.observe("gossip", sender, host.peer_id, topic, payload)
        if subscription.deliver(topic, sender, payload, host.counters):
            subscription.heard[-1].append(message)
            for peer, target in list(subscription.mesh.items()):
                if peer not in (sender, message.origin):
                    self._pass_on(host, target, message)

    def _next_beat(self, host: GossipEnd, topic: str) -> None:
        beat = partial(self._wire.when_awake, host.peer_id, partial(self._beat, host, topic))
        self._wire.at(trio.current_time() + HEARTBEAT_S, beat)

    def _beat(self, host: GossipEnd, topic: str) -> None:
        """Run one heartbeat and schedule the next."""
        subscription = host.subscriptions.get(topic)
        if subscription is None:
            return
        self._next_beat(host, topic)
        recent = [m for heard in list(subscription.heard)[-OFFER_HEARTBEATS:] for m in heard]
        subscription.heard.append([])
        if recent:
            others = [e for e in host.subscribers_near(topic) if e.peer_id not in subscription.mesh]
            for end in self._rng.sample(others, min(len(others), OFFER_PEERS)):
                self._offer(host, end, topic, recent[-OFFERED_IDS_MAX:])

    def _offer(
        self, source: GossipEnd, target: GossipEnd, topic: str, messages: Sequence[Message]
    ) -> None:
        def offered() -> None:
            subscription = target.subscriptions.get(topic)
            if subscription is None or not subscription.asks():
                return
            missing = [m for m in messages if m.number not in target.seen]
            if missing:
                size = ID_BYTES * len(missing)
                self._carry(target, source, topic, size, partial(asked, missing))

        def asked(missing: Sequence[Message]) -> None:
            for message in missing:
                if message.number not in target.seen and topic in source.subscriptions:
                    self._pass_on(source, target, message)

        self._carry(source, target, topic, ID_BYTES * len(messages), offered)
