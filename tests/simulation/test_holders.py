"""Groups outlive their producer, and no holder costs more than a bounded wait."""

from dataclasses import replace

import pytest
import trio

from swarm.errors import Reject, RemoteProtocolError
from swarm.identity import PeerId
from swarm.rollouts import RolloutGroup, ScoredGroup
from swarm.simulation.links import LinkProfile
from swarm.wire import codec
from swarm.wire.messages import (
    HOLDERS_PROTOCOL,
    ROLLOUTS_PROTOCOL,
    WANT_BYTES_MAX,
    AdvertsReply,
    GroupsReply,
    Have,
    HaveReply,
    RecentAdverts,
    Want,
    adverts_topic,
)
from tests.simulation.exchanges import (
    RUN_ID,
    Peer,
    Swarm,
    approve,
    exchanges,
    group_of,
    until,
)
from tests.support import run


def serves(peer: Peer, records: dict[bytes, bytes]) -> None:
    """Let a host without an exchange say that it holds everything, and hand out `records`."""

    async def have(_: PeerId, payload: bytes) -> bytes:
        asked = codec.decode(payload, Have, WANT_BYTES_MAX)
        return codec.encode(HaveReply(type="have_reply", held=tuple(range(len(asked.group_ids)))))

    async def want(_: PeerId, payload: bytes) -> bytes:
        asked = codec.decode(payload, Want, WANT_BYTES_MAX)
        found = tuple(records[i] for i in asked.group_ids if i in records)
        return codec.encode(GroupsReply(type="groups", records=found))

    peer.serve(HOLDERS_PROTOCOL, have)
    peer.serve(ROLLOUTS_PROTOCOL, want)


async def shared_by_the_dead(swarm: Swarm, count: int = 3) -> list[ScoredGroup]:
    """Host 0 shares, host 1 fetches, host 0 dies; nobody else ever reached host 0."""
    producer, first, *others = swarm.peers
    swarm.partition(0, *range(2, len(swarm.peers)))
    await swarm.start(0, 1)
    groups = await producer.share_new(count)
    await until(lambda: first.has(groups))
    swarm.world.crash(0)
    assert not any(peer.has(groups[:1]) for peer in others)
    return groups


def test_what_one_node_fetched_from_a_producer_that_died_reaches_all_others() -> None:
    async def main() -> None:
        async with exchanges(12) as swarm:
            groups = await shared_by_the_dead(swarm)
            await swarm.start(*range(2, 12))
            took_s = await until(lambda: all(peer.has(groups) for peer in swarm.peers[1:]))
            assert took_s < 20
            for peer in swarm.peers[2:]:
                assert peer.exchange.ledger.account(swarm.peers[0].peer_id).accepted == 3
                assert not peer.exchange.ledger.rejected  # they existed: nobody is at fault

    run(main, virtual=True, timeout_s=1000)


def test_it_spreads_to_nodes_that_know_no_holder_at_first() -> None:
    async def main() -> None:
        async with exchanges(6) as swarm:
            for host in range(1, 6):  # a chain behind the one that fetched
                far = [other for other in range(1, 6) if abs(other - host) > 1]
                swarm.partition(host, *far)
            groups = await shared_by_the_dead(swarm)
            await swarm.start(*range(2, 6))
            await until(lambda: swarm.peers[5].has(groups), timeout_s=600)

    run(main, virtual=True, timeout_s=1000)


def test_nobody_is_asked_for_what_producers_deliver() -> None:
    async def main() -> None:
        async with exchanges(5) as swarm:
            await swarm.start(*range(5))
            for first in range(0, 40, 2):
                for peer in swarm.peers:
                    await peer.share_new(2, first, round_=first)
                await trio.sleep(5)
            for peer in swarm.peers:
                assert peer.exchange.ledger.accepted >= 8
                assert not peer.transport.counters.bytes_out[HOLDERS_PROTOCOL]

    run(main, virtual=True, timeout_s=1000)


def test_few_peers_are_asked_for_a_missing_batch() -> None:
    async def main() -> None:
        async with exchanges(20) as swarm:
            await shared_by_the_dead(swarm)
            asker = swarm.peers[2]
            await swarm.start(2)
            counters = asker.transport.counters
            await until(lambda: counters.messages_out[HOLDERS_PROTOCOL] > 0)
            await trio.sleep(5)
            assert counters.messages_out[HOLDERS_PROTOCOL] <= 8
            assert counters.bytes_out[HOLDERS_PROTOCOL] < 8 * 200

    run(main, virtual=True, timeout_s=1000)


async def adverts_from(peer: Peer, advert: bytes) -> None:
    """Let a host without an exchange hand on an advert to those who ask for recent ones."""

    async def recent(_: PeerId, payload: bytes) -> bytes:
        codec.decode(payload, RecentAdverts, WANT_BYTES_MAX)
        return codec.encode(AdvertsReply(type="adverts", records=(advert,)))

    peer.serve("/swarm/adverts/1.0.0", recent)


async def lost_producer(
    swarm: Swarm, change: bytes = b"", count: int = 2
) -> tuple[dict[bytes, bytes], list[bytes]]:
    """Records of host 0, which advertised them and died; hosts 1.. have heard of them."""
    producer = swarm.peers[0]
    adverts: list[bytes] = []
    await swarm.peers[1].transport.subscribe(
        adverts_topic(RUN_ID), lambda _, payload: not adverts.append(payload)
    )
    await swarm.start(0)
    groups = await producer.share_new(count)
    await until(lambda: bool(adverts))
    records = {}
    for group in groups:
        record = producer.pool.record(group.group_id, 0.0)
        assert record is not None
        records[group.group_id] = record
    swarm.world.crash(0)
    return records, adverts


@pytest.mark.parametrize("fault", ["garbage", "signature", "other"])
def test_a_holder_pays_for_what_it_made_up_and_the_next_one_delivers(fault: str) -> None:
    async def main() -> None:
        async with exchanges(4) as swarm:
            producer, liar, honest, asker = swarm.peers
            records, (advert,) = await lost_producer(swarm)
            forged = {i: forge(swarm, fault, record) for i, record in records.items()}
            serves(liar, forged)
            serves(honest, records)
            await adverts_from(liar, advert)
            asker.exchange.fetcher._holders._rests_until.put(
                honest.peer_id, trio.current_time() + 6
            )
            await swarm.start(3)
            await until(lambda: asker.exchange.ledger.accepted == 2, timeout_s=300)
            reason = {
                "garbage": Reject.MALFORMED,
                "signature": Reject.BAD_SIGNATURE,
                "other": Reject.NOT_REQUESTED,
            }[fault]
            assert asker.blamed(liar) == {reason: 2}
            assert not asker.blamed(honest)
            assert set(asker.blamed(producer)) <= {Reject.UNAVAILABLE}

    run(main, virtual=True, timeout_s=1000)


def forge(swarm: Swarm, fault: str, record: bytes) -> bytes:
    if fault == "garbage":
        return b"\xc1" + record
    if fault == "signature":
        at = record.index(b"signature") + len(b"signature") + 2
        return record[:at] + bytes(64) + record[at + 64 :]
    own = swarm.peers[1].identity
    return codec.sign_group(group_of(own, 77), own)[1]


def test_a_relay_does_not_pay_for_a_bad_group_that_its_producer_signed() -> None:
    async def refuse(group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        if group.task.index == 1:
            raise RemoteProtocolError(Reject.UNASSIGNED_TASK, "not its task")
        return await approve(group)

    async def main() -> None:
        async with exchanges(3, verify=refuse) as swarm:
            producer, relay, asker = swarm.peers
            records, (advert,) = await lost_producer(swarm)
            serves(relay, records)
            await adverts_from(relay, advert)
            await swarm.start(2)
            await until(lambda: asker.exchange.ledger.accepted == 1)
            assert asker.blamed(producer) == {Reject.UNASSIGNED_TASK: 1}
            assert not asker.blamed(relay)

    run(main, virtual=True, timeout_s=1000)


def test_a_holder_that_goes_silent_costs_one_bounded_wait() -> None:
    async def main() -> None:
        async with exchanges(4) as swarm:
            _, silent, honest, asker = swarm.peers
            records, (advert,) = await lost_producer(swarm)
            serves(honest, records)

            async def never(peer: PeerId, payload: bytes) -> bytes:
                await trio.sleep_forever()
                raise AssertionError

            async def have_all(_: PeerId, payload: bytes) -> bytes:
                return codec.encode(HaveReply(type="have_reply", held=(0,)))

            silent.serve(HOLDERS_PROTOCOL, have_all)
            silent.serve(ROLLOUTS_PROTOCOL, never)
            await adverts_from(silent, advert)
            await swarm.start(3)
            took_s = await until(lambda: asker.exchange.ledger.accepted == 2)
            assert took_s < 10
            assert not asker.blamed(silent)

    run(main, virtual=True, timeout_s=1000)


def test_no_more_requests_are_open_at_a_holder_than_the_protocol_allows() -> None:
    open_now = most = 0

    async def main() -> None:
        async with exchanges(20, fetch_parallel=32, stock_groups=64) as swarm:
            *producers, holder, asker = swarm.peers
            records: dict[bytes, bytes] = {}
            adverts: list[bytes] = []
            await holder.transport.subscribe(
                adverts_topic(RUN_ID), lambda _, payload: not adverts.append(payload)
            )
            for producer in producers:
                (group,) = await producer.share_new(1)
                records[group.group_id] = producer.pool.record(group.group_id, 0.0) or b""
            await until(lambda: len(adverts) == len(producers))
            for host in range(len(producers)):
                swarm.world.crash(host)

            async def want(_: PeerId, payload: bytes) -> bytes:
                nonlocal open_now, most
                open_now += 1
                most = max(most, open_now)
                await trio.sleep(1)
                open_now -= 1
                (wanted,) = codec.decode(payload, Want, WANT_BYTES_MAX).group_ids
                return codec.encode(GroupsReply(type="groups", records=(records[wanted],)))

            async def have(_: PeerId, payload: bytes) -> bytes:
                return codec.encode(HaveReply(type="have_reply", held=(0,)))

            async def recent(_: PeerId, payload: bytes) -> bytes:
                return codec.encode(AdvertsReply(type="adverts", records=tuple(adverts)))

            holder.serve(HOLDERS_PROTOCOL, have)
            holder.serve(ROLLOUTS_PROTOCOL, want)
            holder.serve("/swarm/adverts/1.0.0", recent)
            await swarm.start(len(producers) + 1)
            await until(lambda: asker.exchange.ledger.accepted == len(producers), timeout_s=900)
            assert 1 < most <= 4
            assert not holder.transport.counters.refused

    run(main, virtual=True, timeout_s=1000)


# --- slow uplinks --------------------------------------------------------------------------------

ADSL = replace(LinkProfile(latency_s=0.02), up_bytes_per_s=125_000.0)
SHARE_OF_20_MBIT = replace(ADSL, up_bytes_per_s=2_500_000.0 / 60)
LONG_TEXT = "x" * 25_000


def test_an_uplink_that_many_share_is_slow_and_not_unavailable() -> None:
    async def main() -> None:
        async with exchanges(2, profiles={0: SHARE_OF_20_MBIT}) as swarm:
            producer, asker = swarm.peers
            await swarm.start(0, 1)
            groups = await producer.share_new(4, text=LONG_TEXT)
            took_s = await until(lambda: asker.has(groups))
            assert took_s > 8  # as long as an empty answer may take
            assert asker.transport.counters.messages_out[ROLLOUTS_PROTOCOL] == 1
            assert not asker.exchange.ledger.rejected

    run(main, virtual=True, timeout_s=1000)


def test_holders_relieve_a_producer_whose_uplink_is_slow() -> None:
    async def main() -> None:
        async with exchanges(9, profiles={0: ADSL}) as swarm:
            await swarm.start(*range(9))
            groups = await swarm.peers[0].share_new(4, text=LONG_TEXT)
            took_s = await until(lambda: all(peer.has(groups) for peer in swarm.peers[1:]))
            assert took_s < 0.5 * 8 * 4 * 100_000 / ADSL.up_bytes_per_s  # from the producer alone
            assert not any(peer.exchange.ledger.rejected for peer in swarm.peers)

    run(main, virtual=True, timeout_s=1000)


def test_a_slow_producer_keeps_no_place_from_a_quick_one() -> None:
    async def main() -> None:
        async with exchanges(3, profiles={0: SHARE_OF_20_MBIT}, fetch_parallel=1) as swarm:
            slow, quick, asker = swarm.peers
            await swarm.start(0, 1, 2)
            much = await slow.share_new(4, text=2 * LONG_TEXT)
            await trio.sleep(0.5)  # its first batch is under way
            few = await quick.share_new(4)
            assert await until(lambda: asker.has(few)) < 6
            assert not asker.has(much)
            await until(lambda: asker.has(much))
            assert not asker.exchange.ledger.rejected

    run(main, virtual=True, timeout_s=1000)
