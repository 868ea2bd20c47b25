"""Nodes on one run, of several turns, with a tool, or on data of one's own: what becomes of them.

    python scripts/experiments/experiment_environments.py [--run guess] [--seeds 3] [--rounds 40]
        [--nodes 2] [--alone]

Each is `swarm-node join` on loopback, with one thread. `guess` and `tool` are of the tiny policy,
`problems` (500 word problems as JSON lines) and `calculator` (a product and a sum, with a
calculator) of SmolLM2-135M. `--alone`: nodes share, and take nothing of each other. For each seed
one line for each node: the pass rate on the held-out tasks at the start, half-way and at the end,
what it trained on of the others', and what it rejected.
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
SMOLLM2 = """
sampling = {temperature = 0.6, max_new_tokens = 40}
held_out = {tasks = 100, greedy = true}
"""
PROBLEMS = ("500", "0", "20")  # so many, from this seed, of numbers up to that
RUNS["problems"] = f"""
name = "problems"
{SMOLLM2}
[answer]
format = "last_number"
system = "Work it out in one line."
examples = [
    {{question = "Ada has 9 pens and loses 4. How many are left?", completion = "9 - 4 = 5"}},
    {{question = "6 boxes hold 7 coins each. How many in all?", completion = "6 x 7 = 42"}},
    {{question = "Ben has 3 books and gets 8 more. How many now?", completion = "3 + 8 = 11"}},
    {{question = "Eve shares 24 pens among 6. How many for each?", completion = "24 / 6 = 4"}},
]
[[environments]]
name = "dataset"
parameters = {{path = "problems.jsonl", scorer = "numeric"}}
"""
RUNS["calculator"] = f"""
name = "calculator"
environments = [{{name = "calculator_sum"}}]
{SMOLLM2}
[answer]
format = "whole"
system = "Have the calculator work it out, then give its result alone."
examples = [
    {{question = "12*34+5=", completion = "<tool>calculator: 12*34+5</tool>"}},
    {{question = "<result>413</result>", completion = "413"}},
]
"""
OF_SMOLLM2 = ("problems", "calculator")
START_S = 300.0


def command(run: Path, data: Path, seed: int, rounds: int, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "node.cli", "join", "--run", str(run), "--data-dir", str(data),
        "--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", "--seed", str(seed),
        "--rounds", str(rounds), "--evaluate-every", str(rounds // 2),
        *more,
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


def together(run: Path, scratch: Path, seed: int, options: argparse.Namespace) -> None:
    names = [chr(ord("a") + number) for number in range(options.nodes)]
    more = ["--local", "8"]
    if options.run in OF_SMOLLM2:
        more = ["--local", "4", "--model", "smollm2", "--yes"]
    more += ["--external", "0" if options.alone else "4"]
    with ExitStack() as stack:
        nodes: list[subprocess.Popen[bytes]] = []
        for name in names:
            data = scratch / f"{seed}-{name}"
            data.mkdir(parents=True)
            peer = ["--peer", address(scratch / f"{seed}-a")] if nodes else []
            log = stack.enter_context((data / "console.log").open("wb"))
            own = options.nodes * seed + len(nodes)
            line = command(run, data, own, options.rounds, *more, *peer)
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
    for name in names:
        sys.stdout.write(f"seed {seed}, node {name}: {told(scratch / f'{seed}-{name}')}\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", choices=sorted(RUNS), default="guess")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run.toml"
        run.write_text(RUNS[options.run])
        writer = [sys.executable, str(Path(__file__).parents[1] / "word_problems.py")]
        problems = subprocess.check_output([*writer, *PROBLEMS])
        (Path(name) / "problems.jsonl").write_bytes(problems)
        for seed in range(options.seeds):
            together(run, Path(name), seed, options)


if __name__ == "__main__":
    main()
