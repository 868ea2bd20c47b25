"""A seed replays a simulated run; without the seed in the scheduler it does not."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from swarm.errors import LocalProtocolError
from swarm.identity import PeerId
from swarm.simulation import world
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run
from tests.simulation.determinism_child import run_swarm
from tests.simulation.test_swarm import swarm_of

ROOT = Path(__file__).parents[2]
RUNS = 3
TIES = LinkProfile(latency_s=0.1)
BUSY = LinkProfile(0.1, 0.02, up_bytes_per_s=1e5, down_bytes_per_s=1e6, loss=0.01, duplication=0.05)


def hashes_of_fresh_processes(how: str) -> list[str]:
    command = [sys.executable, "-m", "tests.simulation.determinism_child", how, "7"]
    return [
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for _ in range(RUNS)
    ]


def test_fresh_processes_with_one_seed_agree() -> None:
    hashes = hashes_of_fresh_processes("seeded")
    assert len(hashes[0]) == 64
    assert len(set(hashes)) == 1


def test_fresh_processes_with_an_unseeded_scheduler_do_not() -> None:
    """The control: with ties, the virtual clock and the world's seed alone are not enough."""
    assert len(set(hashes_of_fresh_processes("unseeded"))) > 1


@pytest.mark.parametrize("profile", [TIES, BUSY])
def test_another_seed_is_another_run(profile: LinkProfile) -> None:
    hashes = [deterministic_run(run_swarm, seed, profile, seed=seed) for seed in (1, 1, 2, 2)]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]


def test_the_scheduler_alone_decides_ties() -> None:
    """The world's seed is the same and nothing in it is drawn: what differs is task order."""
    assert len({deterministic_run(run_swarm, 7, TIES, seed=seed) for seed in range(3)}) == 3


def test_whole_nodes_replay_with_a_seeded_scheduler_and_diverge_without() -> None:
    """Production nodes that all start at one moment and take equally long: ties everywhere."""
    seeded = [deterministic_run(swarm_of, 4, 7, 2, seed=7)[0] for _ in range(2)]
    assert seeded[0] == seeded[1]
    unseeded = {
        trio.run(swarm_of, 4, 7, 2, clock=MockClock(autojump_threshold=0.0))[0] for _ in range(3)
    }
    assert len(unseeded) > 1


def test_trio_is_left_as_it_was() -> None:
    before = world.scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state = world.scheduler._r.getstate()

    async def fail() -> None:
        await trio.sleep(3600.0)
        raise KeyError

    with pytest.raises(KeyError):
        deterministic_run(fail, seed=1)
    assert before is world.scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    assert world.scheduler._r.getstate() == state


def test_a_trio_that_looks_different_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "scheduler", SimpleNamespace())
    with pytest.raises(LocalProtocolError, match="cannot be seeded"):
        deterministic_run(trio.sleep, 0.0, seed=1)


def test_a_trio_whose_tasks_cannot_be_held_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimpleNamespace(GLOBAL_RUN_CONTEXT=SimpleNamespace(runner=SimpleNamespace()))
    monkeypatch.setattr(world, "scheduler", runner)
    with pytest.raises(LocalProtocolError, match="cannot hold up tasks"):
        world.Freezer().freeze(PeerId("a"))


def test_a_killed_task_does_not_finish_what_it_shielded() -> None:
    async def main() -> list[str]:
        done: list[str] = []

        async def stubborn() -> None:
            with trio.CancelScope(shield=True):
                await trio.sleep(5.0)
                done.append("finished")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stubborn)
            await trio.sleep(1.0)
            world.stop_at_once(nursery)
        return [*done, str(trio.current_time())]

    assert deterministic_run(main, seed=1) == ["1.0"]
