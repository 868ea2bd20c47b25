"""When a node does nothing on its owner's machine."""

import shutil
import time
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import trio

from node.cli import main
from node.config import load_config
from node.system.pause_rules import PAUSED_FILE, Hours, PauseRules
from swarm.errors import ConfigError
from tests.support import run


def clock(text: str) -> Callable[[], time.struct_time]:
    return lambda: time.strptime(text, "%H:%M")


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("08:00-18:30", ["08:00", "12:00", "18:29"], ["07:59", "18:30", "00:00"]),
        ("22:00-07:00", ["22:00", "23:59", "00:00", "06:59"], ["21:59", "07:00", "12:00"]),
        ("00:00-23:59", ["00:00", "23:58"], ["23:59"]),
    ],
)
def test_hours_may_go_past_midnight(hours, inside, outside, tmp_path):
    for text in inside:
        why = PauseRules(tmp_path, [Hours.parse(hours)], now=clock(text)).why()
        assert why == f"quiet until {hours[-5:]}"
    for text in outside:
        assert PauseRules(tmp_path, [Hours.parse(hours)], now=clock(text)).why() is None


@pytest.mark.parametrize("text", ["8-18", "24:00-01:00", "08:00-08:00", "08:60-09:00", ""])
def test_what_are_no_hours_is_refused(text):
    with pytest.raises(ConfigError, match=r"must look like|begins when"):
        load_config({"quiet_hours": [text]}, {})


def test_hours_come_from_a_variable_too():
    config = load_config({}, {"SWARM_NODE_QUIET_HOURS": "08:00-12:00, 13:00-18:00"})
    assert config.quiet_hours == ("08:00-12:00", "13:00-18:00")


@pytest.mark.parametrize(("plugged", "waits"), [(True, False), (False, True), (None, False)])
def test_a_battery_counts_where_that_was_asked_for(plugged, waits, tmp_path, monkeypatch):
    found = SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found)
    assert PauseRules(tmp_path).why() is None
    asked = PauseRules(tmp_path, pause_on_battery=True)
    assert asked.why() == ("waiting for mains power" if waits else None)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    assert asked.why() is None


def test_a_full_disk_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**27))
    assert PauseRules(tmp_path).why() == "waiting for disk space"


def test_each_reason_is_told_once_and_the_last_one_ends_it(tmp_path):
    told: list[str] = []
    paused = tmp_path / PAUSED_FILE
    paused.touch()

    async def body() -> float:
        async def later() -> None:
            await trio.sleep(10)
            paused.unlink()

        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            await PauseRules(tmp_path).wait(told.append)
        return trio.current_time() - began_s

    assert 10 <= run(body, virtual=True) <= 11
    assert told == ["paused (swarm-node resume)"]


@pytest.mark.parametrize(("share", "rests_s"), [(1.0, 0.0), (0.5, 8.0), (0.2, 32.0)])
def test_it_rests_in_the_share_of_its_work(share, rests_s, tmp_path):
    async def body() -> float:
        there = PauseRules(tmp_path, busy_share=share)
        await there.wait(lambda _: None)  # the first round is not waited for
        await trio.sleep(8)
        began_s = trio.current_time()
        await there.wait(lambda _: None)
        return trio.current_time() - began_s

    assert run(body, virtual=True) == pytest.approx(rests_s, abs=0.1)


def test_pause_and_resume_say_what_they_do(tmp_path, capsys):
    data = tmp_path / "data"
    assert main(["pause", "--data-dir", str(data)]) == 2
    assert "no node has been here" in capsys.readouterr().err
    data.mkdir()
    assert main(["pause", "--data-dir", str(data)]) == 0
    assert "no node runs here now" in capsys.readouterr().out
    assert (data / PAUSED_FILE).exists()
    assert main(["resume", "--data-dir", str(data)]) == 0
    assert main(["resume", "--data-dir", str(data)]) == 2
    assert "no node is paused here" in capsys.readouterr().err


def test_people_are_told_that_it_waits_and_that_it_goes_on(tmp_path):
    said: list[str] = []
    paused = tmp_path / PAUSED_FILE
    paused.touch()

    async def body() -> None:
        async def later() -> None:
            await trio.sleep(10)
            paused.unlink()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            await PauseRules(tmp_path, say=said.append).wait(lambda _: None)

    run(body)
    assert said == ["no work for now: paused (swarm-node resume)", "at work again"]
