"""A tracker in its process: what it is told, and what a node does without it. Packages are made up
here; `tests/integration/test_trackers.py` has the real ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from node.observe import tracker as trackers
from node.observe.tracker import Tracked, Tracker, open_tracker
from swarm.errors import ConfigError
from tests.support import run

# Of Weights & Biases what the child uses, writing down what it is told.
WANDB = """
import json, os, sys
class Run:
    url = None
    def define_metric(self, *names, **more): pass
    def log(self, told):
        {log}
        with open({file!r}, "a") as file: file.write(json.dumps(told) + "\\n")
    def finish(self): open({file!r}, "a").write("finished\\n")
def init(**told):
    print("a banner, on standard output")
    {init}
    return Run()
"""


def said(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(init: str = "pass", log: str = "pass") -> Path:
        file = tmp_path / "told"
        (tmp_path / "wandb.py").write_text(WANDB.format(init=init, log=log, file=str(file)))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
        monkeypatch.syspath_prepend(str(tmp_path))  # so that it is found to be installed
        return file

    return make


def tracked(tmp_path: Path) -> Tracked:
    return Tracked("wandb", "swarm-node", "sums-a", "sums-1-a", str(tmp_path / "w"), {"seed": 1})


def test_each_round_is_told_in_order_and_the_end_too(package, tmp_path):
    file = package()
    lines: list[str] = []

    async def body() -> None:
        async with open_tracker(tracked(tmp_path), lines.append) as tracker:
            for number in (1, 2, 2):  # again after a checkpoint
                tracker.put(number, 7.5, {"own_reward": number / 4})

    run(body)
    *rounds, end = file.read_text().splitlines()
    assert [json.loads(each) for each in rounds] == [
        {"own_reward": number / 4, "round": number} for number in (1, 2, 2)
    ]
    assert end == "finished"
    assert lines == [f"wandb: offline, in {tmp_path / 'w'}"]


@pytest.mark.parametrize(
    ("init", "why"),
    [
        ("raise RuntimeError('no API key\\nconfigured')", "no API key configured"),
        ("raise KeyError", "KeyError"),
        ("os._exit(3)", "it ended"),
    ],
)
def test_one_that_cannot_begin_is_said_in_one_line(package, tmp_path, init, why):
    package(init=init)

    async def body() -> None:
        async with open_tracker(tracked(tmp_path), said):
            raise AssertionError("it began")

    with pytest.raises(ConfigError) as caught:
        run(body)
    assert str(caught.value) == f"--report-to wandb: {why}"


def test_one_that_never_answers_is_given_up(package, tmp_path, monkeypatch):
    package(init="import time; time.sleep(60)")
    monkeypatch.setattr(trackers, "STARTS_TIMEOUT_S", 1.0)
    monkeypatch.setattr(trackers, "ENDS_TIMEOUT_S", 0.1)

    async def body() -> None:
        async with open_tracker(tracked(tmp_path), said):
            raise AssertionError("it began")

    with pytest.raises(ConfigError, match="not answered in 1 s"):
        run(body)


def test_one_that_ends_is_noted_and_the_node_goes_on(package, tmp_path):
    package(log="os._exit(5)")

    async def body() -> None:
        async with open_tracker(tracked(tmp_path), lambda _: None) as tracker:
            with trio.fail_after(20):
                while tracker.note is None:
                    tracker.put(1, 0.0, {"own_reward": 0.5})
                    await trio.sleep(0.05)
            assert tracker.note == ("wandb has ended (status 5): rounds are told to it no more")
            tracker.put(2, 0.0, {})  # and nothing is lost by telling it

    run(body)


def test_one_that_hangs_makes_nobody_wait(package, tmp_path, monkeypatch):
    package(log="import time; time.sleep(60)")
    monkeypatch.setattr(trackers, "WAITING_MAX", 4)
    monkeypatch.setattr(trackers, "ENDS_TIMEOUT_S", 0.2)
    big = {f"figure_{number}": 0.125 for number in range(5000)}

    async def body() -> Tracker:
        async with open_tracker(tracked(tmp_path), lambda _: None) as tracker:
            for number in range(20):
                tracker.put(number, 0.0, big)
                await trio.sleep(0.01)
            return tracker

    tracker = run(body)
    assert tracker.dropped > 0
    assert tracker.note == "wandb is behind: some rounds are not told to it"


def test_a_package_that_is_not_installed_is_said_before_work(tmp_path):
    async def body() -> None:
        async with open_tracker(Tracked("trackio", "p", "r", "i", str(tmp_path), {}), said):
            pass

    with pytest.raises(ConfigError, match=r"not installed: .*install 'trackio"):
        run(body)
