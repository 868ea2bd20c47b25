"""The demo's own part: starting, watching and ending processes. The nodes here are stand-ins that
speak the real status protocol; that the demo works with real nodes, `make demo` shows."""

import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import trio
from rich.console import Console

from node.observe.event_log import FILE_NAME, EventLog
from node.observe.records import HeldOut, SampledGroup, SampledText
from tests.support import run
from tests.unit.monitor_records import held_out

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "/ip4/127.0.0.1/tcp/4321/p2p/test"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_script", ROOT / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_script", module)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec.loader.exec_module(module)

    async def prepare(*_: object) -> bool:
        """The policy is another test's concern."""
        return True

    module.prepare = prepare
    module.free_memory_bytes = lambda: 2**40
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    module.POLL_INTERVAL_S = 0.1
    module.EVALUATION_TIMEOUT_S = 0.0  # what stands in evaluates at once
    module.LEAVE_TIMEOUT_S = 0.5
    module.TERMINATE_TIMEOUT_S = 0.5
    return module


def stand_ins(
    demo: ModuleType, behaviours: Sequence[str], rounds: int = 3
) -> list[tuple[int, tuple[str, ...]]]:
    """Make the demo start stand-ins; gives the list that its calls (place, peers) go to."""
    calls: list[tuple[int, tuple[str, ...]]] = []

    def command(_: object, place: int, data_dir: Path, peers: Sequence[str]) -> list[str]:
        calls.append((place, tuple(peers)))
        program = [sys.executable, "-m", "tests.unit.demo_node", str(data_dir)]
        return [*program, ADDRESS, behaviours[place], str(rounds)]

    demo.node_command = command
    return calls


def play(
    demo: ModuleType,
    out: Path,
    nodes: int,
    *more: str,
    during: Callable[[], None] | None = None,
) -> tuple[int, str]:
    settings = demo.parse(["--nodes", str(nodes), "--seconds", "1", "--out", str(out), *more])
    text = io.StringIO()

    async def main() -> int:
        async with trio.open_nursery() as nursery:
            if during is not None:
                logs = [out / f"node-{place}" / FILE_NAME for place in range(nodes)]
                nursery.start_soon(_once_all_run, logs, during)
            return await demo.demo(settings, Console(file=text, width=120))

    return run(main), text.getvalue()


async def _once_all_run(logs: Sequence[Path], action: Callable[[], None]) -> None:
    while not all(log.exists() for log in logs):  # noqa: ASYNC110  of processes
        await trio.sleep(0.01)
    action()


@pytest.mark.slow
def test_the_others_are_given_the_address_of_the_first(demo: ModuleType, tmp_path: Path) -> None:
    calls = stand_ins(demo, ["well", "well"])
    status, text = play(demo, tmp_path, 2, "--no-late")
    assert calls == [(0, ()), (1, (ADDRESS,))]
    assert status == 0, text
    assert "+20.0" in text
    assert f"--peer {ADDRESS}" in text
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_one_more_joins_half_way_and_is_compared_with_the_others(
    demo: ModuleType, tmp_path: Path
) -> None:
    calls = stand_ins(demo, ["stuck", "stuck", "well"])  # the first two stay until they are ended
    demo.START_TIMEOUT_S = 20.0
    status, text = play(demo, tmp_path, 2)
    assert calls == [(0, ()), (1, (ADDRESS,)), (2, (ADDRESS,))]
    assert status == 1  # for those that were ended
    assert "Node 2 joined late" in text


def test_the_late_node_is_told_its_times(demo: ModuleType, tmp_path: Path) -> None:
    settings = demo.parse(["--model", "smollm2", "--seconds", "100"])
    late, first = (demo.node_command(settings, place, tmp_path, [ADDRESS]) for place in (2, 0))
    assert late[late.index("--stop-after") + 1] == "40"
    assert int(late[late.index("--evaluate-every") + 1]) * 2 == int(
        first[first.index("--evaluate-every") + 1]
    )


def test_tokens_to_a_level_are_on_straight_lines(demo: ModuleType) -> None:
    curve = [(0, 0.25), (100, 0.5), (300, 0.75)]
    assert demo.tokens_to(curve, 0.375) == (50.0, True)
    assert demo.tokens_to(curve, 0.625) == (200.0, True)
    assert demo.tokens_to(curve, 0.1) == (0.0, True)
    assert demo.tokens_to(curve, 0.9) == (300.0, False)  # over that


def test_a_late_node_that_needed_more_is_said_to_need_more(demo: ModuleType) -> None:
    assert demo.compared_tokens(2_000, 5_000, "") == "2.5 times fewer tokens than"
    assert demo.compared_tokens(5_000, 2_000, "") == "2.5 times as many tokens as"
    assert demo.compared_tokens(2_000, 5_000, "over ") == "over 2.5 times fewer tokens than"
    assert demo.compared_tokens(5_000, 2_000, "over ") == "under 2.5 times as many tokens as"
    assert demo.compared_tokens(5_000, 0, "") == "5000.0 times as many tokens as"


@pytest.mark.slow
def test_a_node_that_fails_is_named_and_fails_the_demo(demo: ModuleType, tmp_path: Path) -> None:
    stand_ins(demo, ["well", "fails"])
    status, text = play(demo, tmp_path, 2, "--no-late")
    assert status == 1
    assert "node 1 ended with status 3" in text
    assert "?[31mno such policy" in text  # the end of its log, unable to colour the terminal


def test_nothing_goes_on_without_the_first_node(demo: ModuleType, tmp_path: Path) -> None:
    calls = stand_ins(demo, ["fails", "well"])
    status, text = play(demo, tmp_path, 2)
    assert status == 1
    assert len(calls) == 1
    assert "node 0 ended with status 3" in text


@pytest.mark.slow
def test_a_stuck_node_is_ended_in_the_end(demo: ModuleType, tmp_path: Path) -> None:
    stand_ins(demo, ["stuck"])
    first_address = demo.first_address

    async def first_address_and_no_longer(child: object) -> str:
        address: str = await first_address(child)
        demo.START_TIMEOUT_S = 0.0  # it had all the time that it took; now it is overdue
        return address

    demo.first_address = first_address_and_no_longer
    status, text = play(demo, tmp_path, 1)
    assert status == 1
    assert f"node 0 ended with status {-signal.SIGKILL}" in text


@pytest.mark.slow
def test_interrupting_ends_every_node_and_still_sums_up(demo: ModuleType, tmp_path: Path) -> None:
    stand_ins(demo, ["well", "well"], rounds=3000)
    started: list[object] = []
    start_node = demo.start_node

    def remember(*arguments: object) -> object:
        started.append(start_node(*arguments))
        return started[-1]

    demo.start_node = remember
    ask = partial(os.kill, os.getpid(), signal.SIGINT)
    status, text = play(demo, tmp_path, 2, "--no-late", during=ask)
    assert status == 130
    assert "save and leave" in text
    assert started
    assert not any(child.running for child in started)  # type: ignore[attr-defined]


def test_an_earlier_demo_is_cleared_and_nothing_else(demo: ModuleType, tmp_path: Path) -> None:
    ours = tmp_path / "node-0"
    ours.mkdir()
    (ours / demo.LOG_NAME).write_text("")
    other = tmp_path / "node-notes"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    demo.clear(demo.parse(["--out", str(tmp_path)]))
    assert not ours.exists()
    assert (other / "thesis.tex").exists()


def test_the_command_line_of_a_node(demo: ModuleType, tmp_path: Path) -> None:
    settings = demo.parse(["--model", "tiny", "--seed", "7", "--seconds", "90"])
    command = demo.node_command(settings, 2, tmp_path, [ADDRESS])
    assert command[1:4] == ["-m", "node.cli", "join"]
    pairs = dict(zip(command[4::2], command[5::2], strict=True))
    assert pairs["--seed"] == "9"
    assert pairs["--peer"] == ADDRESS
    assert pairs["--stop-after"] == "90"
    assert pairs["--listen"].endswith("/tcp/0")
    assert pairs["--rounds"] == str(demo.PLAYS["tiny"].rounds)
    assert (pairs["--model"], pairs["--run"]) == ("tiny", "demo")


def test_a_demo_that_goes_on_has_no_more_limit_of_rounds_than_it_is_given(
    demo: ModuleType, tmp_path: Path
) -> None:
    def command(*arguments: str) -> list[str]:
        return demo.node_command(demo.parse(arguments), 0, tmp_path, [])

    assert "--rounds" not in command("--model", "tiny", "--resume")
    assert command("--resume", "--rounds", "500")[-2:] == ["--rounds", "500"]


@pytest.mark.parametrize(
    "wrong", [["--nodes", "0"], ["--nodes", "99"], ["--seconds", "nan"], ["--rounds", "0"]]
)
def test_wrong_arguments_end_it_with_status_2(demo: ModuleType, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.parse(wrong)
    assert ended.value.code == 2


@pytest.mark.parametrize(("refused", "said"), [({"smollm2"}, "tiny"), ({"smollm2", "tiny"}, None)])
def test_without_the_model_a_tiny_policy_learns(
    demo: ModuleType, tmp_path: Path, refused: set[str], said: str | None
) -> None:
    async def prepare(settings: Any, _: object) -> bool:
        return settings.model not in refused

    demo.prepare = prepare
    settings = demo.parse(["--out", str(tmp_path), "--seconds", "7"])
    assert settings.model == "smollm2"
    text = io.StringIO()
    if said is None:
        with pytest.raises(demo.DemoFailed):
            run(lambda: demo.prepared(settings, Console(file=text)))
        return
    found = run(lambda: demo.prepared(settings, Console(file=text)))
    assert (found.model, found.run, found.nodes, found.seconds) == ("tiny", "demo", 4, 7.0)
    assert "cannot be had here" in text.getvalue()


@pytest.mark.parametrize(
    ("memory_gib", "disk_gib", "model"),
    [(7.9, 99.0, "tiny"), (99.0, 7.9, "tiny"), (8.0, 8.0, "smollm2")],
)
def test_a_model_that_does_not_fit_is_not_tried(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_gib: float,
    disk_gib: float,
    model: str,
) -> None:
    demo.free_memory_bytes = lambda: int(memory_gib * 2**30)
    disk = SimpleNamespace(free=int(disk_gib * 2**30))
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: disk)
    text = io.StringIO()
    settings = demo.parse(["--nodes", "2", "--out", str(tmp_path)])
    found = run(lambda: demo.prepared(settings, Console(file=text, width=300)))
    assert found.model == model
    assert ("7.9 are free" in text.getvalue()) == (model == "tiny")


def test_the_same_questions_are_shown_with_their_first_and_last_answers(
    tmp_path: Path, demo: ModuleType
) -> None:
    def evaluated(round_: int, answers: Sequence[str]) -> HeldOut:
        shown = tuple(
            SampledGroup(
                round_, True, "", "sums", f"{n} + 1 = ?", (SampledText(text, text, n % 2, "stop"),)
            )
            for n, text in enumerate(answers)
        )
        return held_out(round_, 0.5, examples=shown)

    log = EventLog(tmp_path / FILE_NAME, lambda: 1.0)
    assert demo.samples_table(tmp_path) is None
    log.write(evaluated(0, ["x", "\x1b[2Jy"]))
    log.write(evaluated(3, ["in the middle", "z"]))
    log.write(evaluated(8, ["1", "2"]))
    console = Console(width=100, file=io.StringIO())
    console.print(demo.samples_table(tmp_path))
    text = console.file.getvalue()
    assert "round 0" in text
    assert "round 8" in text
    for row in (("0 + 1 = ?", "x", "0", "1", "0"), ("1 + 1 = ?", "\\x1b[2Jy", "1", "2", "1")):
        assert " ".join(row) in " ".join(text.split())
    assert "middle" not in text
    log = EventLog(tmp_path / "older" / FILE_NAME, lambda: 1.0)
    log.write(held_out(0, 0.5))
    assert demo.samples_table(tmp_path / "older") is None
