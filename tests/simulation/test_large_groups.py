"""Groups too large for one answer: who hears of them, how they come, what lies about them cost."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import trio

from swarm.errors import Reject
from swarm.exchange.fetching import PIECE_RETRY_S
from swarm.identity import PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from swarm.simulation.world import deterministic_run
from swarm.wire import codec
from swarm.wire.messages import (
    ADVERTS_PROTOCOL,
    GROUP_BYTES_MAX,
    HOLDERS_PROTOCOL,
    PIECE_BYTES,
    PIECES_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertBody,
    AdvertEntry,
    Have,
    HaveReply,
    PieceReply,
    WantPiece,
    adverts_topic,
)
from tests.simulation.exchanges import RUN_ID, Peer, Swarm, exchanges, group_of, until

BYTES_MAX = 2 * GROUP_BYTES_MAX


def large_group(peer: Peer, index: int = 0) -> RolloutGroup:
    """Sixteen answers of 8,192 tokens and 4 characters for each."""
    answer = Completion("word" * 8_192, (7,) * 8_192, (-0.5,) * 8_192, FinishReason.STOP, 1)
    return replace(group_of(peer.identity, index), completions=(answer,) * 16)


def simulate(body: Callable[[Swarm], Awaitable[Any]], hosts: int, **rules: Any) -> Any:
    async def main() -> Any:
        async with exchanges(
            hosts, **{"group_size_max": 16, "group_bytes_max": BYTES_MAX, **rules}
        ) as swarm:
            return await body(swarm)

    return deterministic_run(main, seed=1)


def test_a_large_group_comes_whole_and_late_joiners_hear_of_it() -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(0, 1)
        await trio.sleep(2)
        maker, taker, late = swarm.peers
        shared = await maker.share(group_of(maker.identity, 1), large_group(maker))
        await until(lambda: taker.has(shared))
        await swarm.start(2)
        await until(lambda: late.has(shared))
        records = {peer.pool.record(shared[1].group_id, 0.0) for peer in swarm.peers}
        (record,) = records
        assert record is not None
        assert len(record) > GROUP_BYTES_MAX
        assert taker.pool.groups([shared[1].group_id])[0].group == shared[1].group
        assert not any(peer.exchange.ledger.rejected for peer in swarm.peers)

    simulate(body, 3)


def test_an_advert_of_a_group_larger_than_the_run_allows_is_its_makers_offence() -> None:
    async def body(swarm: Swarm) -> None:
        maker, taker, strict = swarm.peers
        strict.exchange._rules = strict.exchange.fetcher._rules = replace(
            strict.exchange._rules, group_bytes_max=GROUP_BYTES_MAX
        )
        await swarm.start(0, 1, 2)
        await trio.sleep(2)
        shared = await maker.share(large_group(maker))
        await until(lambda: taker.has(shared))
        await trio.sleep(60)
        assert not strict.has(shared)
        assert set(strict.exchange.ledger.account(maker.peer_id).rejected) == {Reject.OVERSIZE}

    simulate(body, 3)


Serve = Callable[[PeerId, bytes], Awaitable[bytes]]


def pieces_of(record: bytes, change: Callable[[int, PieceReply], PieceReply]) -> Serve:
    async def serve(peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        at = codec.decode(payload, WantPiece, WANT_BYTES_MAX).piece
        data = record[at * PIECE_BYTES : (at + 1) * PIECE_BYTES]
        honest = PieceReply(type="piece", size_bytes=len(record), data=data)
        return codec.encode(change(at, honest))

    return serve


async def fetched(swarm: Swarm, change: Callable[[int, PieceReply], PieceReply]) -> bool:
    """Whether the first peer takes in what the other serves, in place of its exchange."""
    own, other = swarm.peers
    await swarm.start(0)

    async def nothing(peer: PeerId, payload: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        asked = codec.decode(payload, Have, WANT_BYTES_MAX)
        assert asked.group_ids
        return codec.encode(HaveReply(type="have_reply", held=()))

    other.serve(HOLDERS_PROTOCOL, nothing)
    group = large_group(other)
    group_id, record = codec.sign_group(group, other.identity, BYTES_MAX)
    other.serve(PIECES_PROTOCOL, pieces_of(record, change))
    body = AdvertBody(
        type="advert",
        run_id=RUN_ID,
        producer=other.peer_id,
        round=1,
        addresses=(),
        groups=(AdvertEntry(group_id=group_id, size_bytes=len(record)),),
        created_at_s=group.created_at_s,
        expires_at_s=group.expires_at_s,
    )
    topic = adverts_topic(RUN_ID)
    await other.transport.subscribe(topic, lambda *_: True)
    await trio.sleep(2)
    await other.transport.publish(topic, codec.sign_advert(body, other.identity)[1])
    with trio.move_on_after(30):
        await until(lambda: bool(own.pool.groups([group_id])))
    return bool(own.pool.groups([group_id]))


def test_the_honest_server_of_the_faults_below_is_believed() -> None:
    async def body(swarm: Swarm) -> None:
        assert await fetched(swarm, lambda at, reply: reply)
        assert not swarm.peers[0].exchange.ledger.rejected

    simulate(body, 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda at, reply: reply.model_copy(update={"size_bytes": 7}), Reject.MALFORMED),
        (lambda at, reply: reply.model_copy(update={"data": reply.data[:-1]}), Reject.MALFORMED),
        (
            lambda at, reply: reply.model_copy(update={"data": bytes(len(reply.data))}),
            Reject.MALFORMED,
        ),
        (
            lambda at, reply: reply.model_copy(
                update={"data": reply.data[:-1] + bytes([reply.data[-1] ^ 1])} if at == 1 else {}
            ),
            Reject.BAD_SIGNATURE,
        ),
    ],
    ids=["another size", "short", "zeros", "one byte"],
)
def test_pieces_that_are_not_the_group_are_their_senders_offence(
    change: Callable[[int, PieceReply], PieceReply], reason: Reject
) -> None:
    async def body(swarm: Swarm) -> None:
        assert not await fetched(swarm, change)
        own, other = swarm.peers
        assert set(own.blamed(other)) == {reason}

    simulate(body, 2)


def test_a_refusal_in_the_middle_is_waited_out() -> None:
    async def body(swarm: Swarm) -> None:
        own, other = swarm.peers
        other.exchange._rules = replace(other.exchange._rules, serve_bytes_per_s=PIECE_BYTES)
        other.exchange._serve_budget._rate = PIECE_BYTES / (8 * PIECE_RETRY_S)
        await swarm.start(0, 1)
        await trio.sleep(2)
        shared = await other.share(large_group(other))
        took_s = await until(lambda: own.has(shared), timeout_s=120)
        assert took_s > 4 * PIECE_RETRY_S
        assert other.transport.counters.messages_in[PIECES_PROTOCOL] > 3  # pieces, and refusals

    simulate(body, 2)


def test_pieces_are_served_only_where_the_run_can_have_them() -> None:
    async def body(swarm: Swarm) -> None:
        await swarm.start(0, 1)
        served = swarm.peers[0].transport._services
        assert ADVERTS_PROTOCOL in served
        assert PIECES_PROTOCOL not in served

    simulate(body, 2, group_bytes_max=GROUP_BYTES_MAX)
