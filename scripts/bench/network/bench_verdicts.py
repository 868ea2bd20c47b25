"""What a verdict costs, with a sandbox and without.

    python bench_verdicts.py [--groups N] [--repeats N]

Groups of eight texts go to the production verifier one after the other, as those of strangers do:
of a built-in environment, for which one fork serves; of the same one as a plug-in, for which each
group has a fork of its own in the sandbox; and functions in Python, the code of which runs in a
child for each text. CPU milliseconds are of the worker and all that it starts, for each group; the
start is by the clock, to the first verdict. Ways take turns, so that other load meets all of them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil
import trio

from node.config import NodeConfig, RunConfig
from node.environments.scripted import ScriptedSum
from node.verification.assignment import assigned_task
from node.verification.verifier import ProcessVerifier
from swarm.identity import Identity, PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup, Task

GROUP_SIZE = 8
PLUG_IN = "bench_plug_in"
WAYS = (
    ("scripted_sum", "off"),
    ("scripted_sum", "auto"),
    (PLUG_IN, "off"),
    (PLUG_IN, "auto"),
    ("python_function", "auto"),
)


class PlugIn(ScriptedSum):
    """A built-in environment, as another package would bring it."""

    name = PLUG_IN


def main() -> None:
    parser = argparse.ArgumentParser(description="What a verdict costs in a sandbox.")
    parser.add_argument("--groups", type=int, default=200, help="in each repeat")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        _install(Path(folder))
        for _ in range(arguments.repeats):
            for way in WAYS:
                found.setdefault(way, []).append(trio.run(_verdicts, *way, arguments.groups))
    print(f"groups of {GROUP_SIZE} texts; medians of {arguments.repeats} times {arguments.groups}")
    print(f"{'environment':18} {'sandbox':8} {'start s':>8} {'CPU ms':>8} {'clock ms':>9}")
    for (name, sandbox), values in found.items():
        start_s, cpu_ms, wall_ms = (median(column) for column in zip(*values, strict=True))
        print(f"{name:18} {sandbox:8} {start_s:8.2f} {cpu_ms:8.2f} {wall_ms:9.2f}")


def _install(folder: Path) -> None:
    package = folder / "bench_plug_in-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-plug-in\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        f"[swarm_node.environments]\n{PLUG_IN} = {Path(__file__).stem}:PlugIn\n"
    )
    sys.path.insert(0, str(folder))


async def _verdicts(name: str, sandbox: str, groups: int) -> tuple[float, float, float]:
    run = RunConfig.model_validate(
        {
            "name": "bench-verdicts",
            "environments": [{"name": name}],
            "answer": {"format": "code"} if name == "python_function" else {},
        }
    )
    config = NodeConfig(run=run, engine="scripted", verify_sandbox=sandbox)
    producer = Identity.generate().peer_id
    tasks = [assigned_task(run, producer, index) for index in range(groups + 1)]
    async with ProcessVerifier.open(config) as verifier:
        posed = await verifier.problems(tasks)
        began = time.perf_counter()
        await verifier.verify(_group(run, producer, tasks[0], [posed[0].answer] * GROUP_SIZE))
        start_s = time.perf_counter() - began
        began, before_s = time.perf_counter(), _spent_s()
        for task, problem in zip(tasks[1:], posed[1:], strict=True):
            texts = [problem.answer] * (GROUP_SIZE // 2) + ["wrong"] * (GROUP_SIZE // 2)
            await verifier.verify(_group(run, producer, task, texts))
        wall_s, cpu_s = time.perf_counter() - began, _spent_s() - before_s
    return start_s, 1e3 * cpu_s / groups, 1e3 * wall_s / groups


def _spent_s() -> float:
    """CPU seconds of all children, those that have ended among them."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def _group(run: RunConfig, producer: PeerId, task: Task, texts: Sequence[str]) -> RolloutGroup:
    now_s = int(time.time())
    return RolloutGroup(
        run_id=run.run_id,
        producer=producer,
        round=1,
        task=task,
        completions=tuple(Completion(text, (), (), FinishReason.STOP, 0) for text in texts),
        tokenizer="bench",
        temperature=1.0,
        top_p=1.0,
        created_at_s=now_s,
        expires_at_s=now_s + 3600,
    )


if __name__ == "__main__":
    main()
