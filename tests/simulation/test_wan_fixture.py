"""The fixture for other people's tests, used as docs/simulation.md says."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from swarm.errors import ConfigError
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld

pytest_plugins = ["swarm.simulation.pytest_plugin"]
PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()


def test_the_examples_on_the_page_pass_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    examples = [block for block in blocks if "wan" in block]
    (tmp_path / "test_example.py").write_text("\n".join(examples))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert examples
    assert f"{len(examples)} passed" in done.stdout, done.stdout + done.stderr


async def one_round_trip(world: SimulatedWorld) -> float:
    one, other = world.join(0), world.join(1)
    await one.connect(other.addresses()[0])
    return trio.current_time()


def test_profiles_are_names_links_or_a_link_for_each_host(wan: Callable[..., Any]) -> None:
    near, far = LinkProfile(latency_s=0.01), LinkProfile(latency_s=0.09)
    for profile in (near, [near, near]):
        assert wan(one_round_trip, profile=profile) == pytest.approx(12 * 0.01)
    assert wan(one_round_trip, profile=[near, far]) == pytest.approx(12 * 0.05)
    assert wan(one_round_trip, profile="4g") > wan(one_round_trip, profile="fibre")
    with pytest.raises(ConfigError, match="known: 4g, adsl, cable"):
        wan(one_round_trip, profile="satellite")


def test_a_seed_replays_a_test_and_another_does_not(wan: Callable[..., Any]) -> None:
    times = [wan(one_round_trip, profile="4g", seed=seed) for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_a_failure_says_its_seed_and_waiting_ends(wan: Callable[..., Any]) -> None:
    async def hang(world: SimulatedWorld) -> None:
        await trio.sleep_forever()

    with pytest.raises(trio.TooSlowError) as info:
        wan(hang, seed=5)
    assert "seed=5" in info.value.__notes__[0]


def test_a_paused_host_stands_still_and_finds_that_time_has_jumped(wan: Callable[..., Any]) -> None:
    async def main(world: SimulatedWorld) -> list[float]:
        ticks: list[float] = []

        async def tick() -> None:
            while len(ticks) < 6:
                await trio.sleep(1.0)
                ticks.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            with world.on(0):
                nursery.start_soon(tick)
            await trio.sleep(2.5)
            world.pause(0, for_s=10.0)
        return ticks

    assert wan(main) == [1.0, 2.0, 12.5, 13.5, 14.5, 15.5]


def test_tasks_of_other_hosts_go_on_meanwhile(wan: Callable[..., Any]) -> None:
    async def main(world: SimulatedWorld) -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await trio.sleep(1.0)
                ticks += 1

        async with trio.open_nursery() as nursery:
            with world.on(1):
                nursery.start_soon(tick)
            world.pause(0, for_s=10.0)
            await trio.sleep(5.5)
            nursery.cancel_scope.cancel()
        return ticks

    assert wan(main) == 5
