"""Two phases: the old version serves until the new one is loaded, and on whenever that fails."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarm.errors import ChildFailed, StorageFailed, StoreFull
from swarm.weights import manifest
from swarm.weights.hot_swap import Applied, Made, apply_version
from swarm.weights.version_store import Versions
from tests.weights_samples import manifest_of, write_files

LOAD_S, MAKE_S = 4.0, 50.0


class DiskEngine:
    """Serves what it reads from a version's directory, and takes its time."""

    def __init__(self) -> None:
        self.serving: bytes | None = None  # content of one file
        self.calls: list[str] = []
        self.faults: dict[str, list[Exception | None]] = {}  # for the next calls of each kind
        self.load_s = [LOAD_S, LOAD_S]  # of the next calls

    async def _call(self, name: str, takes_s: float) -> None:
        self.calls.append(name)
        await trio.sleep(takes_s)
        fault = self.faults.get(name, []).pop(0) if self.faults.get(name) else None
        if fault is not None:
            raise fault

    async def load(self, directory: Path) -> None:
        self.serving = None  # half of the new one
        await self._call("load", self.load_s.pop(0))
        self.serving = (directory / "part-0.json").read_bytes()


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """A virtual clock cannot see threads; the disk is quick enough."""
    return function(*arguments)


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.versions = Versions(directory)
        self.engine = DiskEngine()
        self.add(1)
        self.versions.make_current(1)
        self.engine.serving = self.content(1)

    def add(self, version: int) -> None:
        write_files(self.versions.staging(version), version)
        self.versions.commit(manifest.encode_manifest(manifest_of(version)))

    def content(self, version: int) -> bytes:
        return (
            self.versions.held()[0].directory.parent / f"v{version:08d}" / "part-0.json"
        ).read_bytes()

    async def make(self) -> Made:
        await trio.sleep(MAKE_S)
        assert not self.engine.calls
        self.add(2)
        return Made(2, fetch_s=40.0, patch_s=10.0, bytes_fetched=30, full_bytes=1000)

    def apply(self, make: Callable[[], Awaitable[Made]] | None = None, **settings: Any) -> Applied:
        async def main() -> Applied:
            return await apply_version(
                2, make or self.make, self.versions, self.engine, run_sync=inline, **settings
            )

        return trio.run(main, clock=MockClock(autojump_threshold=0))

    def serves(self, version: int) -> bool:
        """The engine has it and generates, and a restart would bring the same."""
        current = self.versions.current()
        assert current is not None
        return (self.engine.serving, current.version) == (self.content(version), version)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_engine_stops_for_the_load_alone(world: World) -> None:
    applied = world.apply()
    assert applied == Applied(
        wanted=2,
        serving=2,
        failure=None,
        paused_s=LOAD_S,
        fetch_s=40.0,
        patch_s=10.0,
        bytes_fetched=30,
        bytes_saved=970,
    )
    assert world.engine.calls == ["load"]
    assert world.serves(2)


@pytest.mark.parametrize("error", [StoreFull("no room"), OSError(28, "No space left on device")])
def test_what_fails_before_the_load_does_not_touch_the_engine(
    world: World, error: Exception
) -> None:
    async def make() -> Made:
        write_files(world.versions.staging(2), 2)
        raise error

    applied = world.apply(make)
    assert (applied.serving, applied.failure, applied.paused_s) == (1, str(error), 0.0)
    assert world.engine.calls == []
    assert world.serves(1)
    assert not list((world.directory / "versions").glob("*.partial"))


def test_a_version_that_was_not_completed(world: World) -> None:
    async def make() -> Made:
        return Made(2, 0.0, 0.0, 0, 0)

    applied = world.apply(make)
    assert (applied.serving, applied.failure) == (1, "version 2 was not completed")
    assert world.serves(1)


def test_a_bug_of_ours_is_not_hidden(world: World) -> None:
    async def make() -> Made:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        world.apply(make)


def test_a_load_that_fails_brings_the_old_version_back(world: World) -> None:
    world.engine.faults = {"load": [RuntimeError("size mismatch")]}
    applied = world.apply()
    assert applied.serving == 1
    assert applied.failure == "the engine did not load version 2: RuntimeError: size mismatch"
    assert applied.paused_s == 2 * LOAD_S
    assert world.engine.calls == ["load", "load"]
    assert world.serves(1)


@pytest.mark.parametrize("fault", [StorageFailed("no room"), KeyError("bug")])
def test_in_the_load_a_disk_may_fail_and_our_code_may_not(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    make_current, faults = world.versions.make_current, [fault]

    def refuse_once(version: int) -> None:
        if faults:
            raise faults.pop()
        make_current(version)

    monkeypatch.setattr(world.versions, "make_current", refuse_once)
    if isinstance(fault, KeyError):
        with pytest.raises(KeyError):
            world.apply()
    else:
        failure = world.apply().failure
        assert failure == "the engine did not load version 2: StorageFailed: no room"
        assert world.serves(1)


def test_an_engine_that_hangs_has_failed(world: World) -> None:
    world.engine.load_s = [float("inf"), LOAD_S]
    applied = world.apply(load_timeout_s=30.0)
    assert applied.failure == "the engine did not load version 2: no answer in 30 s"
    assert applied.paused_s == 30.0 + LOAD_S
    assert world.serves(1)


def test_an_engine_that_can_load_neither(world: World) -> None:
    world.engine.faults = {"load": [RuntimeError("no memory"), RuntimeError("dead")]}
    with pytest.raises(ChildFailed, match=r"version 2: .*no memory; nor version 1 again: .*dead"):
        world.apply()
    current = world.versions.current()
    assert current is not None
    assert current.version == 1


def test_without_a_version_before_a_failed_load_is_the_engines_end(world: World) -> None:
    (world.directory / "current").unlink()
    world.engine.faults = {"load": [RuntimeError("no memory")]}
    with pytest.raises(ChildFailed, match="there is no version before it"):
        world.apply()


@pytest.mark.parametrize(
    ("cancel_s", "version"),
    [(MAKE_S - 1, 1), (MAKE_S + 0.5, 2), (MAKE_S + 2, 2)],
)
def test_cancelling_never_leaves_half_of_it(world: World, cancel_s: float, version: int) -> None:
    """While it is made: as if nothing had been. Once the engine loads: to the end."""

    async def main() -> None:
        with trio.move_on_after(cancel_s):
            await apply_version(2, world.make, world.versions, world.engine, run_sync=inline)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert world.serves(version)
    assert bool(world.engine.calls) == (version == 2)
