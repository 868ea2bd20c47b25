"""Who pays for what is wrong, and what a ban means for what the peer made."""

from collections.abc import Callable

import msgpack
import trio

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import Identity, PeerId
from swarm.rollouts import GroupId, RolloutGroup
from swarm.transport.base import ServeLimits
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERT_DOMAIN,
    GROUP_DOMAIN,
    HOLDERS_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertBody,
    AdvertEntry,
    HaveReply,
    Signed,
    adverts_topic,
)
from tests.simulation.test_exchange import RUN_ID, Setting, group_of, now_s, server_of, setting
from tests.support import run


def sealed(payload: bytes, domain: bytes, identity: Identity) -> bytes:
    signature = identity.sign(domain, payload)
    return codec.encode(Signed(payload=payload, signer=identity.peer_id, signature=signature))


def advert_body(identity: Identity, ids: list[bytes]) -> dict[str, object]:
    body = AdvertBody(
        type="advert",
        run_id=RUN_ID,
        producer=identity.peer_id,
        round=1,
        addresses=(),
        groups=tuple(AdvertEntry(group_id=each, size_bytes=900) for each in ids),
        created_at_s=int(now_s()),
        expires_at_s=int(now_s()) + 900,
    )
    return body.model_dump()


def blamed(here: Setting) -> dict[PeerId, dict[Reject, int]]:
    ledger = here.exchange.ledger
    return {
        p: dict(ledger.account(p).rejected) for p in ledger.peers() if ledger.account(p).rejected
    }


def told(body: Callable[[Setting], object]) -> None:
    async def main() -> None:
        async with setting() as here:
            await body(here)  # type: ignore[misc]

    run(main, virtual=True, timeout_s=1000)


async def relay(here: Setting, record: bytes) -> None:
    """`identity` hands over by gossip what somebody else made."""
    await here.transport.publish(adverts_topic(RUN_ID), record)
    await trio.sleep(1)


def test_a_malformed_advert_is_its_signers_offence_and_not_its_relays() -> None:
    async def body(here: Setting) -> None:
        lie = {**advert_body(here.other, [bytes(32)]), "informative": False}
        await relay(here, sealed(msgpack.packb(lie), ADVERT_DOMAIN, here.other))
        assert blamed(here) == {here.other.peer_id: {Reject.MALFORMED: 1}}

    told(body)


def test_an_advert_that_nobody_signed_is_its_senders_offence() -> None:
    async def body(here: Setting) -> None:
        payload = msgpack.packb(advert_body(here.other, [bytes(32)]))
        envelope = msgpack.unpackb(sealed(payload, ADVERT_DOMAIN, here.other))
        envelope["signature"] = bytes(64)
        await relay(here, msgpack.packb(envelope))
        assert blamed(here) == {here.identity.peer_id: {Reject.BAD_SIGNATURE: 1}}

    told(body)


async def holds_it(peer: PeerId, payload: bytes) -> bytes:
    return codec.encode(HaveReply(type="have_reply", held=(0,)))


def bad_group(identity: Identity) -> tuple[bytes, bytes]:
    """A record that its signer made wrong, and its id."""
    group_id, record = codec.sign_group(group_of(identity, 1), identity)
    body = msgpack.unpackb(msgpack.unpackb(record)["payload"])
    body["rewards"] = [1.0] * 4
    record = sealed(msgpack.packb(body), GROUP_DOMAIN, identity)
    return group_id, record


def test_a_bad_group_of_the_producer_that_was_asked_for_is_that_producers_offence() -> None:
    async def body(here: Setting) -> None:
        """`identity` relays the advert and serves the record of `other`, which is away."""
        group_id, record = bad_group(here.other)
        here.serve(server_of({group_id: record}))
        here.transport.serve(HOLDERS_PROTOCOL, holds_it, ServeLimits(WANT_BYTES_MAX, 999))
        advert = sealed(
            msgpack.packb(advert_body(here.other, [group_id])), ADVERT_DOMAIN, here.other
        )
        await here.others_transport.disconnect(here.own)
        await relay(here, advert)
        await trio.sleep(60)
        counts = blamed(here)
        assert here.identity.peer_id not in counts
        assert counts[here.other.peer_id][Reject.MALFORMED] > 0

    told(body)


def test_a_bad_group_of_somebody_who_was_not_asked_for_is_the_senders_offence() -> None:
    async def body(here: Setting) -> None:
        wanted, _ = codec.sign_group(group_of(here.identity, 1), here.identity)
        _, record = bad_group(Identity(b"x" * 32))
        here.serve(server_of({wanted: record}))
        await relay(
            here,
            sealed(
                msgpack.packb(advert_body(here.identity, [wanted])), ADVERT_DOMAIN, here.identity
            ),
        )
        await trio.sleep(20)
        assert blamed(here) == {here.identity.peer_id: {Reject.MALFORMED: 1}}

    told(body)


def test_a_producer_of_groups_that_cost_too_much_is_banned_in_the_middle_of_its_answer() -> None:
    looked_at: list[int] = []

    async def costly(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        await trio.sleep(2.0)
        looked_at.append(group.task.index)
        raise RemoteProtocolError(Reject.OVERRUN, "too dear")

    async def main() -> None:
        async with setting(costly) as here:
            records = await here.advertise(*(group_of(here.identity, n) for n in range(8)))
            here.serve(server_of(records))
            await trio.sleep(60)
            assert blamed(here) == {here.identity.peer_id: {Reject.OVERRUN: 3}}
            assert here.exchange.gater.is_banned(here.identity.peer_id)
            assert len(looked_at) == 3

    run(main, virtual=True, timeout_s=1000)


def test_what_a_banned_peer_made_is_neither_drawn_nor_served_nor_offered() -> None:
    async def body(here: Setting) -> None:
        records = await here.advertise(group_of(here.identity, 1))
        here.serve(server_of(records))
        await trio.sleep(10)
        (candidate,) = await here.exchange.candidates()
        (group_id,) = records
        assert candidate.group_id == group_id
        assert await here.want(here.others_transport, group_id) == 1
        for _ in range(3):
            here.exchange.ledger.reject(here.identity.peer_id, Reject.MALFORMED)
        await trio.sleep(1)
        assert await here.exchange.candidates() == []
        assert await here.want(here.others_transport, group_id) == 0
        assert here.exchange._pool.groups([GroupId(group_id)])  # it is there, for when the ban ends
        payload = msgpack.packb(advert_body(here.identity, [b"n" * 32]))
        record = sealed(payload, ADVERT_DOMAIN, here.identity)
        assert not here.exchange._hear_gossip(here.other.peer_id, record)
        await trio.sleep(300)
        assert [each.group_id for each in await here.exchange.candidates()] == [group_id]
        assert await here.want(here.others_transport, group_id) == 1
        assert here.exchange._hear_gossip(here.other.peer_id, record)

    told(body)


def test_groups_that_are_undecided_are_left_alone_and_nobody_is_blamed() -> None:
    looked_at: list[int] = []
    rests: list[object] = []

    async def doubtful(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        looked_at.append(group.task.index)
        raise RemoteProtocolError(Reject.UNDECIDED, "too near to a limit")

    async def main() -> None:
        async with setting(doubtful) as here:
            here.exchange._offers.rest = lambda *how: rests.append(how)  # type: ignore[method-assign]
            records = await here.advertise(*(group_of(here.identity, n) for n in range(8)))
            here.serve(server_of(records))
            await trio.sleep(60)
            assert blamed(here) == {here.identity.peer_id: {Reject.UNDECIDED: 8}}
            assert not here.exchange.gater.is_banned(here.identity.peer_id)
            assert sorted(looked_at) == list(range(8))  # each once
            assert await here.exchange.candidates() == []
            assert rests == []

    run(main, virtual=True, timeout_s=1000)
