"""How an engine that shares a device with the trainer is treated around an update.

The real engine and trainer are in `tests/integration/test_vllm_hand_over.py`; here is what they
will not do when asked to: fail in their sleep.
"""

from pathlib import Path

import pytest

from node.engines.scripted import ScriptedPolicy
from node.engines.vllm_server import (
    GPU_MEMORY_SHARE_ALONE,
    GPU_MEMORY_SHARE_MIN,
    GPU_RESERVE_BYTES,
    gpu_share,
)
from node.hand_over import HAND_OVERS_MAX, EngineHandOver
from swarm.errors import ChildFailed
from tests.support import run

GIB = 2**30


class Trainer(ScriptedPolicy):
    """Lends, or not."""

    lends = True
    released = 0

    async def lend(self, _: Path) -> bool:
        return self.lends

    async def release(self) -> None:
        self.released += 1


class Engine:
    """Fails as often as it is told to."""

    def __init__(self) -> None:
        self.fails_asleep = self.fails_loading = 0
        self.slept = 0
        self.loads: list[tuple[int, bool]] = []
        self.directory = Path("first")
        self.paused_s = 0.5

    async def sleep(self) -> None:
        if self.fails_asleep:
            self.fails_asleep -= 1
            raise ChildFailed("it cannot sleep")
        self.slept += 1

    async def load(self, weights: Path, policy_version: int, *, lent: bool = False) -> None:
        if self.fails_loading:
            self.fails_loading -= 1
            raise ChildFailed("it does not take it")
        self.directory = weights
        self.loads.append((policy_version, lent))


class Files:
    async def export(self, _: object, policy_version: int) -> Path:
        return Path(f"v{policy_version}")

    async def keep_only(self, directory: Path) -> None:
        self.kept = directory


class Case:
    def __init__(self, **options: bool) -> None:
        self.trainer, self.engine, self.files = Trainer(), Engine(), Files()
        self.told: list[str] = []
        parts = (self.trainer, self.engine, self.files, self._tell)
        self.hand_over = EngineHandOver(*parts, **options)  # type: ignore[arg-type]

    async def _tell(self, text: str) -> None:
        self.told.append(text)

    async def update(self, version: int) -> float:
        await self.hand_over.before_training()
        return await self.hand_over.after_training(version)


def test_an_engine_with_memory_of_its_own_neither_sleeps_nor_borrows() -> None:
    case = Case()

    async def body() -> None:
        assert await case.update(1) == 0.5

    run(body)
    assert (case.engine.slept, case.engine.loads, case.trainer.released) == (0, [(1, False)], 0)


def test_one_that_shares_a_device_sleeps_and_borrows_what_is_lent() -> None:
    case = Case(shares_device=True, sleeps=True)

    async def body() -> None:
        await case.update(1)
        case.trainer.lends = False
        await case.update(2)

    run(body)
    assert case.engine.slept == 2
    assert case.engine.loads == [(1, True), (2, False)]
    assert case.trainer.released == 2  # before each load: the engine needs its memory
    assert case.files.kept == Path("v2")


def test_one_that_fails_at_sleeping_is_not_asked_again() -> None:
    case = Case(shares_device=True, sleeps=True)
    case.engine.fails_asleep = 1

    async def body() -> None:
        await case.update(1)
        await case.update(2)

    run(body)
    assert case.engine.slept == 0
    assert case.engine.loads == [(1, True), (2, True)]
    assert case.told == ["the engine keeps its memory while the trainer trains: it cannot sleep"]


def test_a_version_that_is_not_taken_leaves_the_one_before_and_a_few_in_a_row_end_it() -> None:
    case = Case()

    async def body() -> None:
        await case.update(1)
        case.engine.fails_loading = HAND_OVERS_MAX - 1
        for version in range(2, 2 + HAND_OVERS_MAX):
            await case.update(version)
        case.engine.fails_loading = HAND_OVERS_MAX
        for version in range(10, 9 + HAND_OVERS_MAX):
            await case.update(version)
        with pytest.raises(ChildFailed, match="it does not take it"):
            await case.update(9 + HAND_OVERS_MAX)

    run(body)
    assert case.engine.loads == [(1, False), (1 + HAND_OVERS_MAX, False)]
    assert case.told[0] == "the engine did not take version 2: it does not take it"
    assert len(case.told) == 2 * (HAND_OVERS_MAX - 1)
    assert case.files.kept == Path(f"v{1 + HAND_OVERS_MAX}")


@pytest.mark.parametrize(
    ("total", "held", "share"),
    [
        (80 * GIB, 8 * GIB, 1 - 11 / 80),
        (80 * GIB, 56 * GIB, 1 - 59 / 80),
        (80 * GIB, 0, GPU_MEMORY_SHARE_ALONE),
        (24 * GIB, 23 * GIB, GPU_MEMORY_SHARE_MIN),
    ],
)
def test_an_engine_that_sleeps_has_what_the_trainer_does_not_hold(
    total: int, held: int, share: float
) -> None:
    assert GPU_RESERVE_BYTES == 3 * GIB
    assert gpu_share(total, held) == pytest.approx(share, abs=1e-3)
