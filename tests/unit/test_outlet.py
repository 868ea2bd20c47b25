"""Versions leave for the workers, also where publishing one fails for a while."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from node.hosting.publisher_queue import RETRY_S, PublisherQueue
from swarm.errors import StoreFull


class FullDisk:
    """A publisher that fails for some tries."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.published: list[tuple[int, float]] = []

    async def publish(self, directory: Path, version: int) -> None:
        assert (directory / "weights").read_text() == str(version)
        await trio.sleep(1.0)
        if self.failures:
            self.failures -= 1
            raise StoreFull("no room")
        self.published.append((version, trio.current_time()))


def play(directory: Path, publisher: FullDisk, versions: list[tuple[float, int]]) -> list[str]:
    complaints: list[str] = []

    async def complain(what: str) -> None:
        await trio.lowlevel.checkpoint()
        complaints.append(what)

    async def inline(function: Any, *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    async def main() -> None:
        heads = SimpleNamespace(newest=lambda policy: None)
        service: Any = SimpleNamespace(heads=heads, rules=SimpleNamespace(policy="policy"))
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            publisher_queue = PublisherQueue(
                service,
                publisher,
                directory,
                nursery,
                complain,
                inline,  # type: ignore[arg-type]
                lambda published: None,
            )
            for at_s, version in versions:
                await trio.sleep_until(began_s + at_s)

                async def export(target: Path, version: int = version) -> None:
                    await trio.lowlevel.checkpoint()
                    (target / "weights").write_text(str(version))

                await publisher_queue.offer(version, export)
                assert publisher_queue.newest == version
        publisher.published = [(v, at_s - began_s) for v, at_s in publisher.published]

    trio.run(main, clock=MockClock(autojump_threshold=0))
    return complaints


def test_a_version_that_fails_is_tried_again(tmp_path: Path) -> None:
    publisher = FullDisk(failures=2)
    complaints = play(tmp_path, publisher, [(0.0, 1)])
    assert publisher.published == [(1, 3.0 + 2 * RETRY_S)]
    assert len(complaints) == 2
    assert "no room" in complaints[0]
    assert not (tmp_path / "version-1").exists()


def test_a_newer_version_takes_the_place_of_one_that_fails(tmp_path: Path) -> None:
    publisher = FullDisk(failures=1)
    play(tmp_path, publisher, [(0.0, 1), (5.0, 3)])
    assert publisher.published == [(3, 6.0)]


def test_one_at_a_time(tmp_path: Path) -> None:
    publisher = FullDisk(failures=0)
    play(tmp_path, publisher, [(0.0, 1), (0.5, 2)])
    assert publisher.published == [(1, 1.0), (2, 2.0)]
