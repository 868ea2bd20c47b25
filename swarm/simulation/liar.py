"""A peer that speaks the protocols and tells the lies of `lies.py`, forged from honest payloads.
It behaves until it is told to lie."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgpack
import trio

from swarm.errors import SwarmError
from swarm.identity import Identity, PeerId
from swarm.rollouts import RolloutGroup
from swarm.transport.base import ServeLimits, Transport
from swarm.wire import codec
from swarm.wire.messages import (
    ADDRESSES_MAX,
    ADVERTS_PROTOCOL,
    GROUP_DOMAIN,
    HELLO_BYTES_MAX,
    HELLO_PROTOCOL,
    HOLDERS_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertBody,
    AdvertEntry,
    AdvertsReply,
    Have,
    HaveReply,
    HelloReply,
    KnownPeer,
    Signed,
    Want,
    adverts_topic,
)

LIFE_S = 600
SERVE_BYTES_MAX = 5 * 1024 * 1024
REQUEST_TIMEOUT_S = 10.0
RECORDS_MAX = 4096  # that a liar keeps on offer

Body = dict[str, Any]
MakeGroup = Callable[[PeerId, int], RolloutGroup]
"""A group that would pass every check if that producer signed it, for its task at an index."""


@dataclass(eq=False)
class Liar:
    """A peer that answers whatever it is told to. Call `serve` first."""

    identity: Identity
    transport: Transport
    run_id: str
    make_group: MakeGroup
    now_s: Callable[[], float]
    rng: Random
    victim: Identity  # another peer; its key is used for what it might have signed elsewhere
    group_size_max: int = 8  # of the run, below what the wire allows
    records: dict[bytes, bytes] = field(default_factory=dict)
    answers: dict[bytes, bytes] = field(default_factory=dict)  # whole answers, by wanted id
    silent: bool = False
    other_hello: bytes | None = None
    known_peers: tuple[KnownPeer, ...] = ()
    hello_reply: bytes | None = None  # instead of a proper one
    adverts_reply: bytes | None = None
    adverts_asked: int = 0
    index: int = 0

    async def serve(self) -> None:
        limits = ServeLimits(
            max(WANT_BYTES_MAX, HELLO_BYTES_MAX),
            SERVE_BYTES_MAX,
            concurrent_max=256,
            concurrent_per_peer_max=64,
        )
        self.transport.serve(HELLO_PROTOCOL, self._answer_hello, limits)
        self.transport.serve(ADVERTS_PROTOCOL, self._answer_adverts, limits)
        self.transport.serve(ROLLOUTS_PROTOCOL, self._answer_want, limits)
        self.transport.serve(HOLDERS_PROTOCOL, self._answer_have, limits)
        await self.transport.subscribe(adverts_topic(self.run_id), lambda *_: True)

    async def _answer_hello(self, peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if self.hello_reply is not None:
            return self.hello_reply
        reply = HelloReply(
            type="hello_reply",
            packages=(),
            run_id=self.run_id,
            agent="liar",
            addresses=self.transport.addresses()[:ADDRESSES_MAX],
            known_peers=self.known_peers,
            other_hello=self.other_hello,
        )
        return codec.encode(reply)

    async def _answer_adverts(self, peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        self.adverts_asked += 1
        nothing = codec.encode(AdvertsReply(type="adverts", records=()))
        return nothing if self.adverts_reply is None else self.adverts_reply

    async def _answer_want(self, peer: PeerId, payload: bytes) -> bytes:
        if self.silent:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        want = codec.decode(payload, Want, WANT_BYTES_MAX)
        for group_id in want.group_ids:
            if group_id in self.answers:
                return self.answers[group_id]
        records = [self.records[each] for each in want.group_ids if each in self.records]
        answer: bytes = msgpack.packb({"type": "groups", "records": records})  # of whatever size
        return answer

    async def _answer_have(self, peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        have = codec.decode(payload, Have, WANT_BYTES_MAX)
        held = tuple(n for n, each in enumerate(have.group_ids) if each in self.records)
        return codec.encode(HaveReply(type="have_reply", held=held))

    def group(self) -> RolloutGroup:
        self.index += 1
        return self.make_group(self.identity.peer_id, self.index)

    def seal(self, payload: bytes, domain: bytes = GROUP_DOMAIN) -> bytes:
        """A record with a signature that holds, whatever is in it."""
        signature = self.identity.sign(domain, payload)
        envelope = Signed.model_construct(
            payload=payload, signer=self.identity.peer_id, signature=signature
        )
        return codec.encode(envelope)

    def forged(self, change: Callable[[Body], object], group: RolloutGroup | None = None) -> bytes:
        """The signed record of an honest group with something changed in it."""
        _, record = codec.sign_group(group or self.group(), self.identity)
        body = msgpack.unpackb(msgpack.unpackb(record)["payload"])
        change(body)
        return self.seal(msgpack.packb(body, use_bin_type=True))

    async def offer(self, record: bytes, group_id: bytes | None = None, round_: int = 1) -> None:
        """Advertise a record, under its own id if it has one."""
        if group_id is None:
            payload = msgpack.unpackb(record)["payload"]
            group_id = hashlib.sha256(GROUP_DOMAIN + payload).digest()
        if len(self.records) >= RECORDS_MAX:
            self.records.clear()
        self.records[group_id] = record
        size_bytes = min(max(1, len(record)), 1_048_576)
        await self.advertise([AdvertEntry(group_id=group_id, size_bytes=size_bytes)], round_)

    async def offer_group(self, change: Callable[[RolloutGroup], RolloutGroup]) -> None:
        group = change(self.group())
        group_id, record = codec.sign_group(group, self.identity)
        await self.offer(record, group_id, group.round)

    def advert(self, entries: Sequence[AdvertEntry], round_: int = 1, **changes: Any) -> AdvertBody:
        now_s = int(self.now_s())
        fields: Body = {
            "type": "advert",
            "run_id": self.run_id,
            "producer": self.identity.peer_id,
            "round": round_,
            "addresses": self.transport.addresses()[:ADDRESSES_MAX],
            "groups": tuple(entries),
            "created_at_s": now_s,
            "expires_at_s": now_s + LIFE_S,
        }
        return AdvertBody.model_validate(fields | changes)

    async def advertise(
        self, entries: Sequence[AdvertEntry], round_: int = 1, **changes: Any
    ) -> None:
        await self.publish(
            codec.sign_advert(self.advert(entries, round_, **changes), self.identity)[1]
        )

    async def publish(self, payload: bytes) -> None:
        await self.transport.publish(adverts_topic(self.run_id), payload)

    def entry(self) -> AdvertEntry:
        """A group that exists nowhere."""
        return AdvertEntry(group_id=self.rng.randbytes(32), size_bytes=9_000)

    async def ask_all(self, protocol: str, payload: bytes) -> None:
        """Send one request to each peer and ignore the answers."""
        for peer in self.transport.peers():
            try:
                await self.transport.request(
                    peer,
                    protocol,
                    payload,
                    timeout_s=REQUEST_TIMEOUT_S,
                    response_bytes_max=SERVE_BYTES_MAX,
                )
            except SwarmError:
                continue
