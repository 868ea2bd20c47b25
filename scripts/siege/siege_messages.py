"""What attackers and honest peers of the siege say in the project's own messages."""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from node.config import RunConfig, load_config
from node.verification.assignment import assigned_task
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.wire import codec
from swarm.wire.messages import (
    AdvertBody,
    AdvertEntry,
    AdvertsReply,
    ChunkRequest,
    FindProviders,
    GroupsReply,
    Hello,
    HelloReply,
    KnownPeer,
    Want,
)

LIFE_S = 600
INDICES_MAX = 4_000  # that are looked through for a task of one environment


def hello(run_id: str, identity: Identity, addresses: Sequence[str] = ()) -> bytes:
    """A proper one, but perhaps for the addresses."""
    now_s = int(time.time())
    body = Hello(
        type="hello",
        packages=(),
        run_id=run_id,
        instance=secrets.token_bytes(16),
        started_at_s=now_s,
        sent_at_s=now_s,
        agent="siege",
        addresses=tuple(addresses),
    )
    return codec.sign_hello(body, identity)


def hello_reply(run_id: str, addresses: Sequence[str], known: Sequence[KnownPeer] = ()) -> bytes:
    """An answer that knows these peers."""
    reply = HelloReply(
        type="hello_reply",
        packages=(),
        run_id=run_id,
        agent="siege",
        addresses=tuple(addresses),
        known_peers=tuple(known),
        other_hello=None,
    )
    return codec.encode(reply)


def known_peer(address: str) -> KnownPeer:
    """A peer that nobody has heard of, at an address of somebody else's."""
    peer = Identity.generate().peer_id
    return KnownPeer(peer_id=peer, addresses=(f"{address}/p2p/{peer}",))


def want(run_id: str) -> bytes:
    """A group that nobody has."""
    return codec.encode(Want(type="want", run_id=run_id, group_ids=(secrets.token_bytes(32),)))


def want_chunk() -> bytes:
    """A chunk of weights that nobody has."""
    return codec.encode(
        ChunkRequest(
            type="chunk",
            root=secrets.token_bytes(32),
            artifact=0,
            kind="fresh",
            chunk=0,
            accused=None,
            have=b"",
            relaying=b"",
            pending=(),
            wait_ms=0,
            up_bytes_per_s=0,
            down_bytes_per_s=0,
        )
    )


def provide(key: bytes, addresses: Sequence[str]) -> bytes:
    """That we take part in a run, at these addresses."""
    body = FindProviders(
        type="find_providers", key=key, intent="provide", addresses=tuple(addresses)
    )
    return codec.encode(body)


def wanted(key: bytes) -> bytes:
    """Who takes part in a run?"""
    return codec.encode(FindProviders(type="find_providers", key=key, intent="find", addresses=()))


def load_run(path: str) -> RunConfig:
    """The rules of a run, by a file or by the name of a packaged one."""
    return load_config({}, {}, Path(path)).run


# --- groups --------------------------------------------------------------------------------


class Producer:
    """A peer with groups on offer: what it advertises, and what it answers to who wants them."""

    def __init__(self, identity: Identity, run: RunConfig, address: str) -> None:
        self.identity = identity
        self.run = run
        self.records: dict[bytes, bytes] = {}
        self.sizes: dict[bytes, int] = {}
        self.wanted_at_s: list[float] = []
        self._address = address
        self._index = 0
        self._round = 0

    def add(self, environment: str, texts: Sequence[str]) -> bytes:
        """Make a group for the next task of an environment; its id."""
        self._index += 1
        task = assigned_task(self.run, self.identity.peer_id, self._index)
        for _ in range(INDICES_MAX):
            if task.environment == environment:
                break
            self._index += 1
            task = assigned_task(self.run, self.identity.peer_id, self._index)
        now_s = int(time.time())
        completions = tuple(
            Completion(
                text, tuple(text.encode()), (-0.1,) * len(text.encode()), FinishReason.STOP, 1
            )
            for text in texts
        )
        group = RolloutGroup(
            run_id=self.run.run_id,
            producer=PeerId(self.identity.peer_id),
            round=self._round + 1,
            task=task,
            completions=completions,
            tokenizer="siege",
            temperature=1.0,
            top_p=1.0,
            created_at_s=now_s,
            expires_at_s=now_s + min(LIFE_S, self.run.limits.record_life_s),
        )
        group_id, record = codec.sign_group(group, self.identity)
        self.records[group_id] = record
        return group_id

    def advert(self, group_ids: Sequence[bytes]) -> bytes:
        """That these are on offer; the next round's advert."""
        self._round += 1
        now_s = int(time.time())
        entries = tuple(
            AdvertEntry(group_id=each, size_bytes=len(self.records[each])) for each in group_ids
        )
        body = AdvertBody(
            type="advert",
            run_id=self.run.run_id,
            producer=self.identity.peer_id,
            round=self._round,
            addresses=(f"{self._address}/p2p/{self.identity.peer_id}",),
            groups=entries,
            created_at_s=now_s,
            expires_at_s=now_s + min(LIFE_S, self.run.limits.record_life_s),
        )
        return codec.sign_advert(body, self.identity)[1]

    def answer_want(self, payload: bytes) -> bytes:
        """The records that are wanted."""
        wanted = codec.decode(payload, Want, 1 << 20)
        found = [self.records[each] for each in wanted.group_ids if each in self.records]
        self.wanted_at_s += [time.monotonic()] * len(found)
        return codec.encode(GroupsReply(type="groups", records=tuple(found)))


def no_adverts(payload: bytes) -> bytes:
    """Nothing that the asker missed."""
    return codec.encode(AdvertsReply(type="adverts", records=()))
