"""The catalogue of lies that a message can tell. Lies below messages (slow streams, many
connections) need sockets."""

import gzip
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import trio

from swarm.errors import Reject
from swarm.identity import Identity
from swarm.rollouts import RolloutGroup
from swarm.simulation.liar import LIFE_S, Body, Liar
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERT_DOMAIN,
    ADVERT_GROUPS_MAX,
    ADVERTS_PROTOCOL,
    COMPLETIONS_MAX,
    GROUPS_REPLY_BYTES_MAX,
    HELLO_PROTOCOL,
    HELLO_REPLY_BYTES_MAX,
    ROLLOUTS_PROTOCOL,
    AdvertEntry,
    GroupsReply,
    Hello,
    KnownPeer,
    RecentAdverts,
    Want,
)

FLOOD_REQUESTS = 600  # beyond what any quota grants at once, several times over
FLOOD_PARALLEL = 4  # as many as one peer may have open


@dataclass(frozen=True, slots=True)
class Lie:
    """`reason`: how it must be counted; None: the claim is used by nobody and costs nothing."""

    name: str
    tell: Callable[[Liar], Awaitable[None]]
    reason: Reject | None


CATALOGUE: list[Lie] = []


def _lie(
    reason: Reject | None, name: str = ""
) -> Callable[[Callable[[Liar], Awaitable[None]]], None]:
    def add(tell: Callable[[Liar], Awaitable[None]]) -> None:
        CATALOGUE.append(Lie(name or getattr(tell, "__name__", ""), tell, reason))

    return add


def _forge(name: str, reason: Reject | None, change: Callable[[Body], object]) -> None:
    _lie(reason, name)(lambda liar: liar.offer(liar.forged(change)))


def _alter(
    name: str, reason: Reject | None, change: Callable[[RolloutGroup], RolloutGroup]
) -> None:
    _lie(reason, name)(lambda liar: liar.offer_group(change))


def _bytes(name: str, reason: Reject, make: Callable[[Liar], bytes]) -> None:
    """A record that is no signed group at all."""
    _lie(reason, name)(lambda liar: liar.offer(make(liar), liar.rng.randbytes(32)))


def _gossip(name: str, reason: Reject, make: Callable[[Liar], bytes]) -> None:
    _lie(reason, name)(lambda liar: liar.publish(make(liar)))


def _request(name: str, reason: Reject, protocol: str, make: Callable[[Liar], bytes]) -> None:
    _lie(reason, name)(lambda liar: liar.ask_all(protocol, make(liar)))


def _sealed_with(record: bytes, **changes: Any) -> bytes:
    """A signed record with parts of its envelope replaced."""
    changed: bytes = msgpack.packb(msgpack.unpackb(record) | changes)
    return changed


def _bomb(head: bytes) -> bytes:
    """A length of 4 GiB, and little behind it."""
    return head.ljust(16, b"\0")


# --- whose it is ---------------------------------------------------------------------------------


@_lie(Reject.BAD_SIGNATURE)
async def signature(liar: Liar) -> None:
    group_id, record = codec.sign_group(liar.group(), liar.identity)
    await liar.offer(_sealed_with(record, signature=bytes(64)), group_id)


@_lie(Reject.BAD_SIGNATURE)
async def signature_of_another_kind(liar: Liar) -> None:
    """A signature for an advert, on a group."""
    group_id, record = codec.sign_group(liar.group(), liar.identity)
    payload = msgpack.unpackb(record)["payload"]
    await liar.offer(liar.seal(payload, ADVERT_DOMAIN), group_id)


@_lie(Reject.BAD_SIGNATURE)
async def signer(liar: Liar) -> None:
    group_id, record = codec.sign_group(liar.group(), liar.identity)
    await liar.offer(_sealed_with(record, signer=liar.victim.peer_id), group_id)


@_lie(Reject.WRONG_PRODUCER)
async def record_of_another_producer(liar: Liar) -> None:
    theirs = liar.make_group(liar.victim.peer_id, liar.group().task.index)
    group_id, record = codec.sign_group(theirs, liar.victim)
    await liar.offer(record, group_id)


_forge("producer", Reject.WRONG_PRODUCER, lambda b: b.update(producer="12D3KooWsomebodyElse"))
_alter("run_id", Reject.WRONG_RUN, lambda g: replace(g, run_id="another-run"))


# --- the task ------------------------------------------------------------------------------------


def _task(name: str, **changes: Any) -> None:
    _alter(
        f"task_{name}",
        Reject.UNASSIGNED_TASK,
        lambda group: replace(group, task=replace(group.task, **changes)),
    )


_task("environment", environment="another_environment")
_task("environment_version", version="99.0")
_task("parameters", parameters='{"max":1}')
_task("seed", seed=12345)


@_lie(Reject.UNASSIGNED_TASK)
async def task_of_another(liar: Liar) -> None:
    """A task that an honest peer has at that index."""
    victim = liar.victim.peer_id
    await liar.offer_group(
        lambda group: replace(group, task=liar.make_group(victim, group.task.index).task)
    )


@_lie(Reject.DUPLICATE_TASK)
async def same_task_twice(liar: Liar) -> None:
    group = liar.group()
    await liar.offer_group(lambda _: group)
    await trio.sleep(3.0)
    await liar.offer_group(lambda _: replace(group, temperature=0.9))


# --- what it is worth ----------------------------------------------------------------------------


def _each_completion(change: Callable[[Body], object]) -> Callable[[Body], None]:
    def changed(body: Body) -> None:
        for completion in body["completions"]:
            change(completion)

    return changed


_forge("claimed_rewards", Reject.MALFORMED, lambda b: b.update(rewards=[1.0, 0.0, 0.0, 0.0]))
_forge(
    "claimed_reward_of_completions",
    Reject.MALFORMED,
    _each_completion(lambda c: c.update(reward=1.0)),
)
_forge("claimed_zero_advantage", Reject.MALFORMED, lambda b: b.update(advantages=[0.0] * 4))
_gossip(  # that others' groups are not worth a fetch, in a field that does not exist
    "claimed_zero_advantage_in_the_advert",
    Reject.MALFORMED,
    lambda liar: _raw_advert(liar, lambda body: body["groups"][0].update(informative=False)),
)


# --- completions ---------------------------------------------------------------------------------


@_lie(Reject.OVERSIZE)
async def group_over_the_runs_limit(liar: Liar) -> None:
    await liar.offer_group(
        lambda g: replace(g, completions=g.completions[:1] * (liar.group_size_max + 1))
    )


_forge(
    "group_over_the_wires_limit",
    Reject.MALFORMED,
    lambda b: b.update(completions=b["completions"][:1] * (COMPLETIONS_MAX + 1)),
)
_forge("group_empty", Reject.MALFORMED, lambda b: b.update(completions=[]))
_alter(
    "text_too_long",
    Reject.OVERSIZE,
    lambda g: replace(
        g, completions=(replace(g.completions[0], text="1" * 20_000), *g.completions)
    ),
)
_forge("text_no_utf_8", Reject.MALFORMED, _each_completion(lambda c: c.update(text=b"\xff\xfe")))


def _tokens(name: str, token_id: int) -> None:
    def change(group: RolloutGroup) -> RolloutGroup:
        others = (
            replace(each, token_ids=(token_id,) * len(each.token_ids)) for each in group.completions
        )
        return replace(group, completions=tuple(others))

    _alter(name, None, change)


_tokens("tokens_of_another_text", 7)
_tokens("tokens_outside_the_vocabulary", 2**32 - 1)
_forge(
    "logprobs_too_few",
    Reject.MALFORMED,
    _each_completion(lambda c: c.update(logprobs=c["logprobs"][:-4])),
)
_forge(
    "logprobs_cut_in_a_number",
    Reject.MALFORMED,
    _each_completion(
        lambda c: c.update(token_ids=c["token_ids"][:-1], logprobs=c["logprobs"][:-1])
    ),
)


def _logprobs(name: str, value: float) -> None:
    def change(completion: Body) -> None:
        count = len(completion["logprobs"]) // 4
        completion["logprobs"] = struct.pack(f"<{count}f", *([value] * count))

    _forge(f"logprobs_{name}", Reject.MALFORMED, _each_completion(change))


_logprobs("nan", float("nan"))
_logprobs("infinite", float("-inf"))
_logprobs("positive", 1.0)
_forge("finish_reason", Reject.MALFORMED, _each_completion(lambda c: c.update(finish_reason="won")))
_forge("temperature_nan", Reject.MALFORMED, lambda b: b.update(temperature=float("nan")))
_forge("temperature_as_text", Reject.MALFORMED, lambda b: b.update(temperature="1.0"))
_forge("round_as_boolean", Reject.MALFORMED, lambda b: b.update(round=True))
_forge("round_unlike_the_advert", Reject.MALFORMED, lambda b: b.update(round=7))


# --- times ---------------------------------------------------------------------------------------


def _shift(seconds: int) -> Callable[[RolloutGroup], RolloutGroup]:
    return lambda g: replace(
        g, created_at_s=g.created_at_s + seconds, expires_at_s=g.created_at_s + seconds + LIFE_S
    )


_alter("clock_in_the_future", Reject.FUTURE, _shift(90_000))
_alter("expired", Reject.EXPIRED, _shift(-90_000))
_alter(
    "life_too_long", Reject.EXPIRED, lambda g: replace(g, expires_at_s=g.created_at_s + 10_000_000)
)


# --- bytes ---------------------------------------------------------------------------------------


def _length_bomb(of: str, head: bytes) -> None:
    _bytes(f"length_bomb_{of}", Reject.MALFORMED, lambda _: _bomb(head))


_length_bomb("bytes", b"\xc6\xff\xff\xff\xff")
_length_bomb("text", b"\xdb\xff\xff\xff\xff")
_length_bomb("array", b"\xdd\xff\xff\xff\xff")
_length_bomb("map", b"\xdf\xff\xff\xff\xff")
_length_bomb("extension", b"\xc9\xff\xff\xff\xff\x05")
_bytes("nesting_bomb", Reject.MALFORMED, lambda _: b"\x91" * 100_000 + b"\x00")
_bytes("zip_bomb", Reject.MALFORMED, lambda _: gzip.compress(bytes(10_000_000), mtime=0))
_bytes("garbage", Reject.MALFORMED, lambda liar: liar.rng.randbytes(500))
_bytes("nothing", Reject.MALFORMED, lambda _: b"")
_bytes("signed_length_bomb", Reject.MALFORMED, lambda li: li.seal(b"\xdd\xff\xff\xff\xff"))
_bytes("signed_nesting_bomb", Reject.MALFORMED, lambda li: li.seal(b"\x91" * 9_000 + b"\x00"))
_bytes("signed_zip_bomb", Reject.MALFORMED, lambda li: li.seal(gzip.compress(bytes(10**7))))


@_lie(Reject.OVERSIZE)
async def values_bomb(liar: Liar) -> None:
    tiny: list[list[Body]] = [[{} for _ in range(60)] for _ in range(60)]
    await liar.offer(liar.seal(msgpack.packb({"completions": tiny})))


@_lie(Reject.NOT_REQUESTED)
async def one_id_for_another_content(liar: Liar) -> None:
    _, record = codec.sign_group(liar.group(), liar.identity)
    await liar.offer(record, liar.rng.randbytes(32))


@_lie(Reject.MALFORMED)
async def answer_cut_short(liar: Liar) -> None:
    entry = liar.entry()
    whole = codec.encode(GroupsReply(type="groups", records=(bytes(99),)))
    liar.answers[entry.group_id] = whole[:-40]
    await liar.advertise([entry])


@_lie(Reject.OVERSIZE)
async def answer_too_large(liar: Liar) -> None:
    entry = liar.entry()
    liar.answers[entry.group_id] = bytes(GROUPS_REPLY_BYTES_MAX + 1)
    await liar.advertise([entry])


@_lie(Reject.UNAVAILABLE)
async def silence(liar: Liar) -> None:
    """Groups that exist nowhere, and no answer to requests for them."""
    liar.silent = True
    try:
        for _ in range(8):
            await liar.advertise([liar.entry() for _ in range(ADVERT_GROUPS_MAX)])
            await liar.advertise([liar.entry() for _ in range(ADVERT_GROUPS_MAX)])
            await trio.sleep(1.0)
    finally:
        liar.silent = False


# --- adverts -------------------------------------------------------------------------------------


def _advert_of(liar: Liar, **changes: Any) -> bytes:
    return codec.sign_advert(liar.advert([liar.entry()], **changes), liar.identity)[1]


def _advert_at(liar: Liar, from_now_s: int) -> bytes:
    at_s = int(liar.now_s()) + from_now_s
    return _advert_of(liar, created_at_s=at_s, expires_at_s=at_s + LIFE_S)


def _raw_advert(liar: Liar, change: Callable[[Body], object]) -> bytes:
    body = liar.advert([liar.entry()]).model_dump()
    change(body)
    return liar.seal(msgpack.packb(body), ADVERT_DOMAIN)


_gossip("advert_nothing", Reject.MALFORMED, lambda _: b"")
_gossip("advert_garbage", Reject.MALFORMED, lambda liar: liar.rng.randbytes(4_000))
_gossip("advert_oversize", Reject.OVERSIZE, lambda liar: liar.rng.randbytes(60_000))
_gossip("advert_length_bomb", Reject.MALFORMED, lambda _: _bomb(b"\xc6\xff\xff\xff\xff"))
_gossip("advert_nesting_bomb", Reject.MALFORMED, lambda _: b"\x91" * 9_000 + b"\x00")
_gossip("advert_zip_bomb", Reject.MALFORMED, lambda _: gzip.compress(bytes(10**6), mtime=0))
_gossip("advert_run", Reject.WRONG_RUN, lambda liar: _advert_of(liar, run_id="another-run"))
_gossip("advert_of_tomorrow", Reject.FUTURE, lambda liar: _advert_at(liar, 86_400))
_gossip("advert_of_yesterday", Reject.EXPIRED, lambda liar: _advert_at(liar, -86_400))
_gossip(
    "advert_for_another",
    Reject.WRONG_PRODUCER,
    lambda liar: _raw_advert(liar, lambda body: body.update(producer=liar.victim.peer_id)),
)
_gossip(
    "advert_of_another_run_replayed",
    Reject.WRONG_RUN,
    lambda liar: codec.sign_advert(
        liar.advert([liar.entry()], producer=liar.victim.peer_id, run_id="another-run"),
        liar.victim,
    )[1],
)
_gossip(
    "advert_with_no_groups",
    Reject.MALFORMED,
    lambda liar: _raw_advert(liar, lambda b: b.update(groups=[])),
)
_gossip(
    "advert_with_negative_size",
    Reject.MALFORMED,
    lambda liar: _raw_advert(liar, lambda b: b["groups"][0].update(size_bytes=-1)),
)
_gossip(
    "advert_signature",
    Reject.BAD_SIGNATURE,
    lambda liar: _sealed_with(_advert_of(liar), signature=bytes(64)),
)


@_lie(Reject.MALFORMED)
async def recent_adverts_garbage(liar: Liar) -> None:
    """In answer to a request for missed adverts."""
    liar.adverts_reply, before = liar.rng.randbytes(300), liar.adverts_asked
    for _ in range(60):
        if liar.adverts_asked == before:
            await trio.sleep(1.0)
    liar.adverts_reply = None


@_lie(None)
async def size_of_a_group(liar: Liar) -> None:
    """An honest group, advertised as of one byte."""
    group_id, record = codec.sign_group(liar.group(), liar.identity)
    liar.records[group_id] = record
    await liar.advertise([AdvertEntry(group_id=group_id, size_bytes=1)])


# --- hello ---------------------------------------------------------------------------------------


def hello(liar: Liar, identity: Identity) -> bytes:
    now_s = int(liar.now_s())
    body = Hello(
        type="hello",
        packages=(),
        run_id=liar.run_id,
        instance=liar.rng.randbytes(16),
        started_at_s=now_s,
        sent_at_s=now_s,
        agent="liar",
        addresses=(),
    )
    return codec.sign_hello(body, identity)


_request(
    "hello_of_another",
    Reject.WRONG_PRODUCER,
    HELLO_PROTOCOL,
    lambda liar: hello(liar, liar.victim),
)
_request("hello_garbage", Reject.MALFORMED, HELLO_PROTOCOL, lambda liar: liar.rng.randbytes(200))


@_lie(Reject.OVERSIZE)
async def hello_reply_oversize(liar: Liar) -> None:
    liar.hello_reply = bytes(HELLO_REPLY_BYTES_MAX + 1)
    await trio.sleep(6.0)
    liar.hello_reply = None


@_lie(Reject.BAD_SIGNATURE)
async def other_instance_forged(liar: Liar) -> None:
    """A claim that another process uses the receiver's key, with a false signature."""
    liar.other_hello = _sealed_with(hello(liar, liar.identity), signature=bytes(64))
    await trio.sleep(6.0)
    liar.other_hello = None


@_lie(None)
async def known_peers_invented(liar: Liar) -> None:
    found = []
    for _ in range(32):
        peer = Identity(liar.rng.randbytes(32)).peer_id
        found.append(KnownPeer(peer_id=peer, addresses=(f"/memory/99999/p2p/{peer}",)))
    liar.known_peers = tuple(found)
    await trio.sleep(12.0)
    liar.known_peers = ()


@_lie(Reject.MALFORMED)
async def known_peers_without_a_key(liar: Liar) -> None:
    liar.known_peers = (KnownPeer(peer_id="nobody", addresses=("/memory/1/p2p/nobody",)),)
    await trio.sleep(12.0)
    liar.known_peers = ()


# --- requests ------------------------------------------------------------------------------------


_request("want_garbage", Reject.MALFORMED, ROLLOUTS_PROTOCOL, lambda liar: liar.rng.randbytes(100))
_request("want_bomb", Reject.MALFORMED, ROLLOUTS_PROTOCOL, lambda _: _bomb(b"\xdd\xff\xff\xff\xff"))


def _flood(name: str, protocol: str, make: Callable[[Liar], bytes]) -> None:
    @_lie(Reject.FLOOD, name)
    async def tell(liar: Liar) -> None:
        payload = make(liar)

        async def ask() -> None:
            for _ in range(FLOOD_REQUESTS // FLOOD_PARALLEL):
                await liar.ask_all(protocol, payload)

        async with trio.open_nursery() as nursery:
            for _ in range(FLOOD_PARALLEL):
                nursery.start_soon(ask)


_flood(
    "flood_of_wants",
    ROLLOUTS_PROTOCOL,
    lambda li: codec.encode(Want(type="want", run_id=li.run_id, group_ids=(li.rng.randbytes(32),))),
)
_flood(
    "flood_of_catch_ups",
    ADVERTS_PROTOCOL,
    lambda li: codec.encode(RecentAdverts(type="recent_adverts", run_id=li.run_id)),
)
_flood("flood_of_hellos", HELLO_PROTOCOL, lambda li: hello(li, li.identity))
