"""Machines in clouds as the coordinator keeps them, over a fake of SkyPilot's few functions."""

import os
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from coordinator.fleet_file import EXAMPLE, Cloud, Fleet, Machine, load_fleet, priced
from coordinator.providers.base import Condition, Instance, ProviderFailed
from coordinator.providers.skypilot import (
    GONE,
    NOT_THERE,
    PRICE_LIFE_S,
    Catalogue,
    SkyProvider,
    cluster_of,
    load_sky,
)
from swarm.errors import ConfigError
from tests.fake_sky import ClusterStatus, FakeSky, JobStatus
from tests.wire_samples import ALICE, BOB

CLOUD = Cloud(infra="runpod/US", accelerators="RTX4090:1", use_spot=True, setup=("echo ready",))
MACHINE = Machine("spot-1", "skypilot", cloud=CLOUD, arguments=("--threads", "1 2"))
PEER = f"/ip4/203.0.113.7/tcp/4001/p2p/{ALICE.peer_id}"
ITS = cluster_of(ALICE.peer_id, "spot-1")


def fleet_in(directory: Path) -> Fleet:
    return Fleet(directory / "run.toml", (PEER,), (MACHINE,))


def provider_of(tmp_path: Path, sky: Any) -> SkyProvider:
    return SkyProvider(tmp_path / "clouds", fleet_in(tmp_path), ALICE.peer_id, lambda: sky)


def failing(call: str, error: Exception) -> Callable[[str], None]:
    def broken(name: str) -> None:
        if name == call:
            raise error

    return broken


async def seen(provider: SkyProvider) -> Instance | None:
    """What the next look at the cloud itself says."""
    provider._refreshed_s = float("-inf")
    return (await provider.look(())).get("spot-1")


def test_names_of_clusters_are_one_machines_of_one_coordinators() -> None:
    names = ("a", "A", "a.b", "a-b", "a_b", "-", "x" * 64, "x" * 63 + "y")
    clusters = {cluster_of(owner.peer_id, name) for owner in (ALICE, BOB) for name in names}
    assert len(clusters) == 2 * len(names)
    assert all(each.replace("-", "").isalnum() and each == each.lower() for each in clusters)
    assert max(map(len, clusters)) < 50
    assert cluster_of(ALICE.peer_id, "a") == cluster_of(ALICE.peer_id, "a")


def test_a_machine_is_started_with_its_key_found_again_and_ended(tmp_path: Path) -> None:
    sky = FakeSky()
    sky.clusters["mine"] = sky._record("mine", ClusterStatus.UP)

    async def main() -> None:
        await provider_of(tmp_path, sky).start(MACHINE)
        ((cluster, task, how),) = sky.launched
        assert cluster == ITS
        assert how == {"down": True, "idle_minutes_to_autostop": CLOUD.idle_min}
        key = task.file_mounts["~/swarm-worker/identity.pem"]
        assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
        assert task.file_mounts["~/swarm-worker/run.toml"] == str(tmp_path / "run.toml")
        assert task.setup == "set -e\necho ready"
        assert f"--peer {PEER} --threads '1 2'" in task.run
        assert "timeout --kill-after=60 86400 swarm-node join --run run.toml" in task.run
        other = provider_of(tmp_path, sky)  # of a coordinator that starts anew
        instance = await seen(other)
        assert instance is not None
        assert instance.condition is Condition.UP
        assert instance.peer is not None
        assert other.owns(instance.peer)
        await other.start(MACHINE)  # which runs already
        assert len(sky.launched) == 1
        await other.release("spot-1")
        await other.release("spot-1")  # which is not there: no error
        assert sky.ended == [ITS]
        assert list(sky.clusters) == ["mine"]
        assert await seen(other) is None
        await other.start(MACHINE)
        again = await seen(other)
        assert again is not None
        assert again.peer == instance.peer

    trio.run(main)


@pytest.mark.parametrize(
    ("change", "condition", "detail"),
    [
        (None, Condition.FAILED, "taken back"),
        ({"status": ClusterStatus.STOPPED}, Condition.FAILED, "it is STOPPED"),
        ({"status": ClusterStatus.INIT}, Condition.STARTING, ""),
        (
            {"status": ClusterStatus.INIT, "init_kind": "unhealthy", "init_status_reason": "a\nb"},
            Condition.FAILED,
            "a",
        ),
        ({"job": JobStatus.FAILED}, Condition.FAILED, "its worker has ended: FAILED"),
        ({"job": None}, Condition.UP, ""),
    ],
)
def test_what_became_of_a_machine_shows_and_it_can_be_started_again(
    tmp_path: Path, change: dict[str, Any] | None, condition: Condition, detail: str
) -> None:
    sky = FakeSky()

    async def main() -> None:
        provider = provider_of(tmp_path, sky)
        await provider.start(MACHINE)
        if change is None:
            del sky.clusters[ITS]
        else:
            sky.clusters[ITS].update(change)
        instance = await seen(provider)
        assert instance is not None
        assert instance.condition is condition
        assert detail in instance.detail
        assert (ITS in sky.clusters) == (condition is not Condition.FAILED)  # or it would cost
        later = await seen(provider)
        assert later == instance
        if condition is Condition.FAILED:
            anew = await seen(provider_of(tmp_path, sky))
            assert anew is not None
            assert (anew.condition, anew.detail) == (condition, GONE)
        await provider.start(MACHINE)
        assert len(sky.launched) == (1 if condition is Condition.UP else 2)
        instance = await seen(provider)
        assert instance is not None
        assert instance.condition is Condition.UP

    trio.run(main)


def test_what_does_not_start_is_ended_and_said_in_one_line(tmp_path: Path) -> None:
    sky = FakeSky(broken=failing("launch", RuntimeError("\x1b[31m\n sold out\x1b[0m\nhistory")))

    async def main() -> None:
        provider = provider_of(tmp_path, sky)
        with pytest.raises(ProviderFailed) as info:
            await provider.start(MACHINE)
        assert str(info.value) == "spot-1: sold out"
        assert (sky.ended, sky.clusters) == ([ITS], {})
        assert await seen(provider) is None

    trio.run(main)


def test_what_neither_started_nor_ended_stays_on_record(tmp_path: Path) -> None:
    sky = FakeSky()

    def broken(call: str) -> None:
        if call in ("launch", "down"):
            raise RuntimeError(call)

    async def main() -> None:
        provider = provider_of(tmp_path, sky)
        sky.broken = broken
        with pytest.raises(ProviderFailed, match="spot-1: down"):
            await provider.start(MACHINE)
        instance = (await provider.look(()))["spot-1"]
        assert instance.condition is not Condition.UP
        with pytest.raises(ProviderFailed, match="spot-1: down"):
            await provider.release("spot-1")
        sky.broken = lambda call: None
        await provider_of(tmp_path, sky).release("spot-1")
        assert not sky.clusters

    trio.run(main)


def test_a_machine_whose_key_was_lost_is_started_anew(tmp_path: Path) -> None:
    sky = FakeSky()
    sky.clusters[ITS] = sky._record(ITS, ClusterStatus.UP)
    trio.run(provider_of(tmp_path, sky).start, MACHINE)
    assert sky.ended == [ITS]
    assert len(sky.launched) == 1


def test_one_operation_at_a_time_though_nobody_waits_for_it(tmp_path: Path) -> None:
    """A start that was cancelled goes on in its thread; a release comes after it."""
    sky = FakeSky(hold=threading.Event())

    async def main() -> None:
        provider = provider_of(tmp_path, sky)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.start, MACHINE)
            await trio.to_thread.run_sync(sky.entered.wait, 10)
            nursery.cancel_scope.cancel()
        instance = (await provider.look(()))["spot-1"]
        assert instance.condition is Condition.STARTING
        async with trio.open_nursery() as nursery:
            nursery.start_soon(provider.release, "spot-1")
            await trio.testing.wait_all_tasks_blocked()
            assert not sky.ended
            assert sky.hold is not None
            sky.hold.set()
        assert (sky.ended, sky.most_at_once) == ([ITS], 1)
        assert await seen(provider) is None

    trio.run(main)


def test_two_at_once_would_be_noticed() -> None:
    sky = FakeSky(hold=threading.Event())
    thread = threading.Thread(target=sky.launch(None, "x"))  # type: ignore[arg-type]
    thread.start()
    sky.entered.wait(10)
    sky.get(sky.down("x"))
    assert sky.most_at_once == 2
    assert sky.hold is not None
    sky.hold.set()
    thread.join()


def test_what_was_asked_before_a_start_says_nothing_of_it(tmp_path: Path) -> None:
    sky = FakeSky()

    async def main() -> None:
        provider = provider_of(tmp_path, sky)
        await provider.start(MACHINE)
        del sky.clusters[ITS]
        answered, asked = sky.job_status, sky.status

        def late(names: list[str], refresh: str) -> Callable[[], Any]:
            answer = asked(names, refresh)()  # it is gone
            sky.status = asked  # type: ignore[method-assign]
            provider._start(MACHINE)
            return lambda: answer

        sky.status = late  # type: ignore[method-assign]
        instance = await seen(provider)
        assert instance is not None
        assert instance.condition is Condition.UP
        assert sky.job_status == answered

    trio.run(main)


def test_where_skypilot_does_not_answer_what_was_seen_stands(tmp_path: Path) -> None:
    sky = FakeSky()

    async def main() -> None:
        provider = provider_of(tmp_path, sky)
        await provider.start(MACHINE)
        said = "SkyPilot API server process exited unexpectedly.\nView logs"
        sky.broken = failing("status", RuntimeError(said))
        instance = await seen(provider)
        assert instance is not None
        assert instance.condition is Condition.UP
        assert "sky api start" in instance.detail
        with pytest.raises(ProviderFailed, match="spot-1: SkyPilot API server") as info:
            await provider.start(MACHINE)
        assert "\n" not in str(info.value)

    trio.run(main)


def test_skypilot_is_loaded_only_for_machines_of_its_own_and_missed_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    provider = SkyProvider(tmp_path / "clouds", fleet_in(tmp_path), ALICE.peer_id, load_sky)

    async def main() -> None:
        assert not await provider.look(())
        await provider.release("spot-1")
        with pytest.raises(ProviderFailed) as info:
            await provider.start(MACHINE)
        assert str(info.value) == f"spot-1: {NOT_THERE}"
        assert not await provider.look(())

    trio.run(main)
    with pytest.raises(ConfigError, match="pip install"):
        Catalogue(lambda: 0.0, load_sky).price_per_h(CLOUD)


# --- prices and the file --------------------------------------------------------------------------


def test_prices_are_the_catalogues_cheapest_kept_for_a_while() -> None:
    sky, now = FakeSky(), [0.0]
    catalogue = Catalogue(lambda: now[0], lambda: sky)
    assert catalogue.price_per_h(CLOUD) == pytest.approx(0.2)
    assert catalogue.price_per_h(replace(CLOUD, use_spot=False)) == pytest.approx(0.7)
    sky.broken = failing("offers", RuntimeError("no network"))
    now[0] += 2 * PRICE_LIFE_S
    assert catalogue.price_per_h(CLOUD) == pytest.approx(0.2)  # and goes on
    with pytest.raises(ConfigError, match="its price: no network"):
        catalogue.price_per_h(replace(CLOUD, disk_gb=65))
    with pytest.raises(ConfigError, match="names no cloud"):
        catalogue.price_per_h(replace(CLOUD, infra=""))
    sky.broken = lambda call: None
    sky.offers = lambda resources: []  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no such offer in runpod/US"):
        catalogue.price_per_h(replace(CLOUD, disk_gb=66))


FILE = f"""
run = "run.toml"
peers = ["{PEER}"]
[[workers]]
provider = "skypilot"
name = "spot"
count = 2
cloud = {{ infra = "runpod/US", accelerators = "RTX4090:1", use_spot = true }}
"""


def fleet_of(tmp_path: Path, text: str) -> Fleet:
    (tmp_path / "fleet.toml").write_text(text)
    return load_fleet(tmp_path / "fleet.toml")


def test_a_price_in_the_file_counts_and_one_left_out_is_looked_up(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, FILE)
    assert fleet.unpriced == {"spot-1", "spot-2"}
    assert fleet.machines[0].cloud == Cloud("runpod/US", "RTX4090:1", use_spot=True)
    found = priced(fleet, lambda cloud: 0.25)
    assert [each.price_per_h for each in found.machines] == [0.25, 0.25]
    given = fleet_of(tmp_path, FILE.replace("count = 2", "price_per_h = 0.0"))
    assert not given.unpriced
    assert priced(given, lambda cloud: 0.25).machines[0].price_per_h == 0.0

    def nowhere(cloud: Cloud) -> float:
        raise ConfigError("its price: no network")

    with pytest.raises(ConfigError, match="spot-1: its price: no network; price_per_h"):
        priced(fleet, nowhere)


def test_the_examples_block_reads_once_it_is_no_comment(tmp_path: Path) -> None:
    text = EXAMPLE.replace("12D3Koo...", ALICE.peer_id)
    before, _, block = text.rpartition("\n# [[workers]]")
    lines = [line.removeprefix("# ") for line in f"# [[workers]]{block}".splitlines()]
    fleet = fleet_of(tmp_path, "\n".join([before, *lines]))
    spot = fleet.machines[-1]
    assert (spot.name, spot.price_per_h) == ("spot-4", 0.35)
    assert spot.cloud is not None
    assert spot.cloud.use_spot


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("cloud = {", "# {", "skypilot has it"),
        ('"skypilot"', '"local"', "others do not"),
        ("use_spot = true", "use_spot = 1", "use_spot = 1: must be true or false"),
        ("use_spot = true", "spot = true", "did you mean use_spot"),
        ("use_spot = true", "disk_gb = 0", "disk_gb = 0"),
        ("use_spot = true", "life_h = 0", "life_h = 0"),
        ("use_spot = true", "idle_min = 0", "idle_min = 0"),
        ("use_spot = true", 'command = " "', "command: must name"),
        ("use_spot = true", "setup = [" + "'x'," * 65 + "]", "at most 64 commands"),
        ("use_spot = true", f'image = "{"x" * 4097}"', "longer than 4096"),
    ],
)
def test_what_is_wrong_with_a_machine_is_said(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as info:
        fleet_of(tmp_path, FILE.replace(old, new))
    assert "\n" not in str(info.value)
