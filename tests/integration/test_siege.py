"""The siege's own measuring: what is planted in a target is told as a miss, and nothing else is."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from tests.hostile import siege as module
from tests.hostile.attack import load_all
from tests.hostile.targets import Target
from tests.hostile.wire import Door
from tests.support import run

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("siege_child.py")
SECONDS = (1.5, 6.0, 24.0)  # of an attack; the next where the machine was too busy for it
WAIT_S = 90.0


@pytest.fixture
def siege(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The siege, with short times of rest."""
    load_all()
    for name, value in {"QUIET_S": 0.1, "BACK_S": 1.0, "CENSUS_TRIES": 1, "CENSUS_MAX": 96}.items():
        monkeypatch.setattr(module, name, value)
    return module


@asynccontextmanager
async def besieged(siege: Any, kind: str, folder: Path, seconds: float) -> AsyncIterator[Any]:
    """A small target of a kind; its places are counted where it has any."""
    command = [sys.executable, str(CHILD), kind]
    process = await trio.lowlevel.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = b""
        while not address.endswith(b"\n"):
            address += await process.stdout.receive_some()
        target = Target("child", folder, process._proc, psutil.Process(process.pid))
        target.extra |= {"door": Door.of(address.decode().strip()), "run_id": "run"}
        settings = siege.Settings(seconds, False, (), False, folder)
        made = siege.Siege(settings, target, None)
        if kind != "hoarding":
            made.places = await siege.count_places(made.door, settings.networks[1])
        yield made
    finally:
        with trio.CancelScope(shield=True):
            await siege.ended(process)


def misses_of(
    siege: Any, kind: str, attack: str, folder: Path, *, seconds: float = SECONDS[0]
) -> Any:
    """The row of one attack on a target."""

    async def main() -> Any:
        async with besieged(siege, kind, folder, seconds) as made:
            return await siege.hold(made, siege.Round("handshake", "node", (attack,)), 1)

    return run(main, timeout_s=WAIT_S)


@pytest.mark.parametrize("kind", ["sound", "leaky"])
def test_places_that_stay_taken_are_a_miss(siege: Any, kind: str, tmp_path: Path) -> None:
    for seconds in SECONDS:
        row = misses_of(siege, kind, "many_keys_of_one_address", tmp_path, seconds=seconds)
        if row.attacks[0]["counts"]["admitted"] > siege.PLACES_LEFT_MAX:
            break
    assert row.attacks[0]["counts"]["admitted"] > siege.PLACES_LEFT_MAX
    told = [miss for miss in row.misses if "places lost" in miss]
    if kind == "sound":
        assert not row.misses
    else:
        assert told
        assert row.places_lost >= row.attacks[0]["counts"]["admitted"] - siege.PLACES_LEFT_MAX


def test_memory_that_is_held_is_a_miss(siege: Any, tmp_path: Path) -> None:
    for seconds in SECONDS:  # a busy machine sends less in the same time
        row = misses_of(siege, "hoarding", "line_of_26_mb", tmp_path, seconds=seconds)
        if row.memory_gain_bytes > siege.MEMORY_GAIN_BYTES_MAX:
            break
    assert row.memory_gain_bytes > siege.MEMORY_GAIN_BYTES_MAX
    assert [miss for miss in row.misses if miss.startswith("memory +")]
    assert [miss for miss in row.misses if miss.startswith("after a minute")]
    assert row.attacker_bytes >= row.memory_gain_bytes // 2
