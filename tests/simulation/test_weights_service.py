"""Versions among hosts of a simulated network: who learns of them, what is fetched, from whom."""

from pathlib import Path
from typing import Any

import pytest
import trio

from swarm.errors import ConfigError, Reject, RequestRefused
from swarm.identity import PeerId
from swarm.limits.quotas import RATES, Kind
from swarm.simulation.links import LinkProfile
from swarm.weights import weights_service
from swarm.weights.publisher import SPREAD_LOOK_S
from swarm.weights.weights_service import MANIFEST_NEXT_S
from swarm.wire import codec
from swarm.wire.messages import (
    CHUNKS_PROTOCOL,
    HEADS_PROTOCOL,
    HEADS_REPLY_BYTES_MAX,
    MANIFEST_PROTOCOL,
    HeadsReply,
    WantHeads,
    WantManifest,
)
from tests.simulation.weights_hosts import (
    LINK,
    LOOK_S,
    POLICY,
    PUBLISHER,
    RUN_ID,
    SETTLED_S,
    Hosts,
    SimulatedHost,
    play,
)
from tests.weights_samples import figures_of


async def ask(host: SimulatedHost, other: SimulatedHost, protocol: str, message: Any) -> bytes:
    return await host.transport.request(
        other.peer_id,
        protocol,
        codec.encode(message),
        timeout_s=60.0,
        response_bytes_max=HEADS_REPLY_BYTES_MAX,
    )


ASKED = 200  # at once


async def answers(host: SimulatedHost, other: SimulatedHost, protocol: str, message: Any) -> int:
    """How many of many requests are answered before one is refused."""
    for answered in range(ASKED):
        try:
            await ask(host, other, protocol, message)
        except RequestRefused:
            return answered
    return ASKED


def test_who_comes_late_learns_of_it_from_any_peer(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        await hosts.kill(PUBLISHER)
        late = await hosts.start(2)
        assert await hosts.until_all_have(1, range(2, 3))
        assert late.has_exactly(hosts.source(1))
        assert late.outcomes[-1].bases == (None,)

    play(scene, tmp_path)


def test_silent_peers_cost_seconds_and_not_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weights_service, "MANIFEST_ANSWER_S", 1_000.0
    )  # as for one of many megabytes

    async def silent(peer: PeerId, payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 13))
        for number in range(2, 13):
            hosts[number].transport._services[MANIFEST_PROTOCOL].handler = silent
        await hosts.kill(PUBLISHER)
        began_s = trio.current_time()
        late = await hosts.start(13)
        assert await hosts.until_all_have(1, range(13, 14))
        assert late.has_exactly(hosts.source(1))
        assert trio.current_time() - began_s < 12 * MANIFEST_NEXT_S + SETTLED_S / 2

    play(scene, tmp_path, hosts=14)


def test_a_host_that_comes_back_gives_on_what_it_had(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        await hosts.kill(PUBLISHER)
        await hosts.kill(1)
        again = await hosts.start(1)
        assert again.serving == 1
        await hosts.start(2)
        assert await hosts.until_all_have(1, range(2, 3))
        assert figures_of(again.store).stored == 0

    play(scene, tmp_path)


def test_a_version_costs_its_delta_and_who_slept_takes_few_steps(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 3))
        full = hosts[1].outcomes[-1].applied.bytes_fetched
        await hosts.kill(2)
        for version in range(2, 8):
            await hosts.publish(version)
            assert await hosts.until_all_have(version, range(1, 2))
        assert all(each.bases == (each.applied.wanted - 1,) for each in hosts[1].outcomes[1:])
        delta = hosts[1].outcomes[-1].applied.bytes_fetched
        assert 0 < delta < full / 5
        slept = await hosts.start(2)
        assert await hosts.until_all_have(7, range(2, 3))
        assert slept.outcomes[-1].bases in ((1, 5), (1, 3), (1, 5, 6), (1, 2, 6), (1, 3, 5))
        assert len(slept.outcomes[-1].bases) <= 3
        assert slept.outcomes[-1].applied.bytes_saved > 0
        assert slept.has_exactly(hosts.source(7))

    play(scene, tmp_path)


def test_versions_that_follow_each_other_closely_each_arrive(tmp_path: Path) -> None:
    """Requests of a version that is complete wait for a while yet, and are in nobody's way."""

    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 4))
        for version in range(2, 6):
            await hosts.publish(version)
            with trio.fail_after(3.0):
                assert await hosts.until_all_have(version, range(1, 4))

    play(scene, tmp_path)


def test_the_publisher_goes_on_after_a_restart_without_a_version_more(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        await hosts.kill(PUBLISHER)
        again = await hosts.start(PUBLISHER)
        assert again.publisher is not None
        assert await again.publisher.publish(hosts.source(1)) is None
        head = again.service.heads.newest(POLICY)
        assert head is not None
        assert head.version == 1
        with pytest.raises(ConfigError, match="take 2 or more"):
            await again.publisher.publish(hosts.source(2), 1)
        await hosts.publish(2)
        assert await hosts.until_all_have(2, range(1, 2))
        assert hosts[1].outcomes[-1].bases == (1,)

    play(scene, tmp_path)


def test_a_higher_number_is_published_also_where_nothing_changed(tmp_path: Path) -> None:
    """What a learner's step left as it was is a version for its workers all the same."""

    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 3))
        publisher = hosts[PUBLISHER].publisher
        assert publisher is not None
        for version in (2, 5):
            published = await publisher.publish(hosts.source(1), version)
            assert published is not None
            assert published.version == version
            assert await hosts.until_all_have(version, range(1, 3))
        assert hosts[1].outcomes[-1].applied.bytes_fetched == 0
        assert hosts[1].has_exactly(hosts.source(1))

    play(scene, tmp_path)


def test_a_publisher_that_lost_its_disk_counts_on_from_what_peers_know(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(5, range(1, 2))
        await hosts.kill(PUBLISHER)
        (hosts[PUBLISHER].directory).rename(tmp_path / "lost")
        again = await hosts.start(PUBLISHER)
        assert again.publisher is not None
        await again.service.heard.wait()
        published = await again.publisher.publish(hosts.source(6))
        assert published is not None
        assert published.version == 6
        assert await hosts.until_all_have(6, range(1, 2))
        assert hosts[1].has_exactly(hosts.source(6))

    play(scene, tmp_path)


@pytest.mark.parametrize("wait_s", [0.3, 39.4, 600.0])
def test_who_comes_late_is_no_slow_broadcast(wait_s: float, tmp_path: Path) -> None:
    """However long nobody was there, or all who were had it: that is not the network's time."""

    async def scene(hosts: Hosts) -> None:
        publisher = await hosts.start(PUBLISHER)
        await hosts.publish(1)
        for late in (1, 2, 3):
            await trio.sleep(wait_s)
            came_s = trio.current_time()
            await hosts.start(late)
            assert await hosts.until_all_have(1, range(late, late + 1))
            assert await hosts.until(lambda late=late: len(publisher.spreads) >= late)  # type: ignore[misc]
            spread = publisher.spreads[-1]
            assert spread.peers == late
            taken_s = trio.current_time() - came_s
            assert 0.0 < spread.time_s <= taken_s + SPREAD_LOOK_S + LOOK_S
            assert late == 1 or spread.bound_s is None
        await hosts.kill(3)
        await trio.sleep(60.0)
        assert [each.peers for each in publisher.spreads] == [1, 2, 3]  # who leaves is no news

    wide = LinkProfile(latency_s=0.02, up_bytes_per_s=2e7, down_bytes_per_s=2e7)
    play(scene, tmp_path, link=wide)


def test_who_asks_too_often_is_refused(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        one = hosts[1]
        head = one.service.heads.newest(POLICY)
        assert head is not None
        requests = {
            Kind.HEADS: (HEADS_PROTOCOL, WantHeads(type="want_heads", run_id=RUN_ID)),
            Kind.MANIFEST: (
                MANIFEST_PROTOCOL,
                WantManifest(type="want_manifest", run_id=RUN_ID, root=head.root),
            ),
        }
        for kind, (protocol, message) in requests.items():
            answered = await answers(one, hosts[PUBLISHER], protocol, message)
            assert RATES[kind].burst / 2 <= answered < ASKED

    play(scene, tmp_path)


def test_a_request_for_chunks_that_is_none_is_held_against_its_sender(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.start(PUBLISHER)
        await hosts.publish(1)
        one = await hosts.start(1)
        with pytest.raises(RequestRefused):
            await ask(
                one, hosts[PUBLISHER], CHUNKS_PROTOCOL, WantHeads(type="want_heads", run_id=RUN_ID)
            )
        assert hosts[PUBLISHER].blamed(one.peer_id) == {Reject.MALFORMED: 1}

    play(scene, tmp_path)


def test_a_chunk_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.all_at(1, range(1, 2))
        one = hosts[1]
        for path in (one.directory / "store").glob("chunks/*/*"):
            path.unlink()
            path.mkdir()  # reads fail, and not as those of a file that is gone
        late = await hosts.start(2, connect=False)
        await late.transport.connect(one.transport.addresses()[0])
        await trio.sleep(SETTLED_S)
        assert late.serving is None
        assert one.serving == 1
        await late.transport.connect(hosts[PUBLISHER].transport.addresses()[0])
        assert await hosts.until_all_have(1, range(2, 3))
        assert late.blamed(one.peer_id) == {}

    play(scene, tmp_path)


def test_what_is_asked_of_another_run_is_refused(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.start(PUBLISHER)
        await hosts.publish(1)
        one = await hosts.start(1)
        with pytest.raises(RequestRefused):
            await ask(
                one,
                hosts[PUBLISHER],
                HEADS_PROTOCOL,
                WantHeads(type="want_heads", run_id="another"),
            )
        own = WantHeads(type="want_heads", run_id=RUN_ID)
        reply = codec.decode(
            await ask(one, hosts[PUBLISHER], HEADS_PROTOCOL, own), HeadsReply, HEADS_REPLY_BYTES_MAX
        )
        assert len(reply.records) == 1

    play(scene, tmp_path)


def test_a_store_without_room_is_one_line_and_nothing_of_it_stays(tmp_path: Path) -> None:
    async def scene(hosts: Hosts) -> None:
        await hosts.start(PUBLISHER)
        await hosts.publish(1)
        small = await hosts.start(1, store_bytes=100_000)
        assert await hosts.until(lambda: bool(small.failures()))
        assert "the store may hold 100000" in small.failures()[0]
        assert small.serving is None
        await trio.sleep(SETTLED_S)
        assert small.chunks() == set()

    play(scene, tmp_path, link=LINK)
