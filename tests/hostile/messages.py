"""The project's own messages, as attackers and honest peers of the siege send them."""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.config import RunConfig, load_config
from node.verify.assignment import assigned_task
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.wire import codec
from swarm.wire.messages import (
    GROUP_DOMAIN,
    AdvertBody,
    AdvertEntry,
    AdvertsReply,
    ChunkRequest,
    FindProviders,
    GroupsReply,
    Hello,
    HelloReply,
    KnownPeer,
    Signed,
    Submission,
    Want,
    WantLease,
)

LIFE_S = 600
INDICES_MAX = 4_000  # that are looked through for a task of one environment


def load_run(path: str) -> RunConfig:
    """The rules of a run, by a file or by the name of a packaged one."""
    return load_config({}, {}, Path(path)).run


def hello(run_id: str, identity: Identity, addresses: Sequence[str] = ()) -> bytes:
    """A signed hello."""
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
    """A request for a group that nobody has."""
    return codec.encode(Want(type="want", run_id=run_id, group_ids=(secrets.token_bytes(32),)))


def want_chunk(
    root: bytes, kind: Any = "fresh", accused: str | None = None, wait_ms: int = 0
) -> bytes:
    """A request for a chunk of the first artifact, by a peer that has nothing yet."""
    return codec.encode(
        ChunkRequest(
            type="chunk",
            root=root,
            artifact=0,
            kind=kind,
            chunk=0,
            accused=accused,
            have=b"",
            relaying=b"",
            pending=(),
            wait_ms=wait_ms,
            up_bytes_per_s=2**40,
            down_bytes_per_s=2**40,
        )
    )


def want_lease(run_id: str, version: int) -> bytes:
    return codec.encode(WantLease(type="want_lease", run_id=run_id, version=version))


def sealed(key: Identity, payload: bytes, domain: bytes) -> bytes:
    """A record whose signature holds, whatever is in it."""
    signature = key.sign(domain, payload)
    return codec.encode(Signed(payload=payload, signer=key.peer_id, signature=signature))


def spoiled(key: Identity, lease: bytes, size_bytes: int) -> bytes:
    """A submission whose signature holds, and nothing else does."""
    record = sealed(key, secrets.token_bytes(size_bytes), GROUP_DOMAIN)
    return codec.encode(Submission(type="submission", lease=lease, record=record))


def find_providers(key: bytes, intent: Any, addresses: Sequence[str] = ()) -> bytes:
    """Ask for the providers of a run, or say that we are one at these addresses."""
    body = FindProviders(type="find_providers", key=key, intent=intent, addresses=tuple(addresses))
    return codec.encode(body)


def no_adverts(payload: bytes) -> bytes:
    """An answer without adverts."""
    return codec.encode(AdvertsReply(type="adverts", records=()))


class Producer:
    """A peer with groups on offer: its adverts, and its answers to peers that want the groups."""

    def __init__(self, identity: Identity, run: RunConfig, address: str) -> None:
        self.identity = identity
        self.run = run
        self.records: dict[bytes, bytes] = {}
        self.wanted_at_s: list[float] = []
        self._address = address
        self._index = 0
        self._round = 0

    def _times(self) -> dict[str, int]:
        now_s = int(time.time())
        life_s = min(LIFE_S, self.run.limits.record_life_s)
        return {"created_at_s": now_s, "expires_at_s": now_s + life_s}

    def add(self, environment: str, texts: Sequence[str]) -> bytes:
        """Make a group for the next task of an environment; its id."""
        for _ in range(INDICES_MAX):
            self._index += 1
            task = assigned_task(self.run, self.identity.peer_id, self._index)
            if task.environment == environment:
                break
        tokens = [tuple(text.encode()) for text in texts]
        group = RolloutGroup(
            run_id=self.run.run_id,
            producer=PeerId(self.identity.peer_id),
            round=self._round + 1,
            task=task,
            completions=tuple(
                Completion(text, ids, (-0.1,) * len(ids), FinishReason.STOP, 1)
                for text, ids in zip(texts, tokens, strict=True)
            ),
            tokenizer="siege",
            temperature=1.0,
            top_p=1.0,
            **self._times(),
        )
        group_id, record = codec.sign_group(group, self.identity)
        self.records[group_id] = record
        return group_id

    def advert(self, group_ids: Sequence[bytes]) -> bytes:
        """The next round's advert, of these groups."""
        self._round += 1
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
            **self._times(),
        )
        return codec.sign_advert(body, self.identity)[1]

    def answer_want(self, payload: bytes) -> bytes:
        """The records that are wanted."""
        wanted = codec.decode(payload, Want, 1 << 20)
        found = [self.records[each] for each in wanted.group_ids if each in self.records]
        self.wanted_at_s += [time.monotonic()] * len(found)
        return codec.encode(GroupsReply(type="groups", records=tuple(found)))
