"""Two nodes that share transcripts of a game of several turns: what becomes of their success.

    python scripts/experiments/experiment_turns.py [--run guess|tool] [--seeds 3] [--rounds 40]

Both are `swarm-node join` on loopback, with the tiny policy. For each seed one line for each node:
the pass rate on the held-out tasks at the start and at the end, what it trained on of the other's,
and what it rejected.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import sleep

from node.monitor.status import fetch_status
from node.records.event_log import read_events
from node.records.records import HeldOut, RoundDone
from swarm.errors import SwarmError

RUNS = {
    "guess": """
name = "guess"
environments = [{name = "guess_number", parameters = {max = 15, tries = 4}}]
sampling = {max_new_tokens = 20}
held_out = {tasks = 200}
""",
    "tool": """
name = "tool"
environments = [{name = "calculator_sum", parameters = {max = 20}}]
sampling = {max_new_tokens = 64}
held_out = {tasks = 200}
""",
}
START_S = 300.0


def command(run: Path, data: Path, seed: int, rounds: int, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "node.cli", "join", "--run", str(run), "--data-dir", str(data),
        "--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", "--seed", str(seed),
        "--rounds", str(rounds), "--evaluate-every", str(rounds // 2), "--local", "8",
        "--external", "4", *more,
    ]  # fmt: skip


def address(data: Path) -> str:
    for _ in range(int(START_S)):
        try:
            if found := fetch_status(data).addresses:
                return str(found[0])
        except SwarmError:
            pass
        sleep(1.0)
    raise TimeoutError(f"no node in {data}")


def told(data: Path) -> str:
    events = [event for _, event in read_events(data / "events.jsonl")]
    passed = [f"{each.passed:.3f}" for each in events if isinstance(each, HeldOut)]
    rounds = [each for each in events if isinstance(each, RoundDone)]
    rejected = rounds[-1].rejected_total
    first = sum(each.own_reward for each in rounds[:5]) / 5
    last = sum(each.own_reward for each in rounds[-5:]) / 5
    foreign = sum(each.external_groups for each in rounds)
    return (
        f"held-out {' -> '.join(passed)}; own reward, first and last five rounds {first:.3f} -> "
        f"{last:.3f}; {foreign} groups of the other; rejected {rejected}"
    )


def pair(run: Path, scratch: Path, seed: int, rounds: int) -> None:
    with ExitStack() as stack:
        nodes = []
        for name in ("a", "b"):
            data = scratch / f"{seed}-{name}"
            data.mkdir(parents=True)
            peer = ["--peer", address(scratch / f"{seed}-a")] if nodes else []
            log = stack.enter_context((data / "console.log").open("wb"))
            line = command(run, data, 2 * seed + len(nodes), rounds, *peer)
            nodes.append(
                stack.enter_context(
                    subprocess.Popen(
                        line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ
                    )
                )
            )
        try:
            for node in nodes:
                node.wait()
        finally:
            for node in nodes:
                node.kill()
    for name in ("a", "b"):
        sys.stdout.write(f"seed {seed}, node {name}: {told(scratch / f'{seed}-{name}')}\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", choices=sorted(RUNS), default="guess")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run.toml"
        run.write_text(RUNS[options.run])
        for seed in range(options.seeds):
            pair(run, Path(name), seed, options.rounds)


if __name__ == "__main__":
    main()
