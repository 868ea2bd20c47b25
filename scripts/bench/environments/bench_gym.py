"""Every dataset of reasoning-gym as a row: offered or refused, and what it costs.

    python scripts/bench/environments/bench_gym.py [--seconds S]

Problems a second and verdicts on right answers a second, on one core; the dearest hostile text by
its CPU time, in ms. `docs/environments.md` has the table.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from node.environments.gym.datasets import OFFERED_BY_GROUP, REFUSED_BY_GROUP, Rules
from node.environments.gym.environment import ReasoningGym
from node.environments.trial import scored, tasks_of, texts_for

HEAD = ("Dataset", "Group", "Scorer", "Problems/s", "Verdicts/s", "Dearest text, ms")
TASKS = 256


def row(name: str, group: str, rules: Rules, seconds: float) -> tuple[str, ...]:
    """One that is offered."""
    source = ReasoningGym(name)
    tasks = iter(tasks_of(source, "{}", TASKS))
    problem = source.problem(next(tasks))  # the imports are not counted
    posed = rate(lambda: source.problem(next(tasks)), seconds)
    judged = rate(lambda: source.score(problem, problem.answer), seconds)
    with tempfile.TemporaryDirectory() as room:
        texts = [text for _, text, _ in texts_for(problem, Path(room) / "made")]
        worst = max(min(scored(source, problem, t).cpu_s for _ in range(2)) for t in texts)
    return name, group, rules.verdict, f"{posed:,.0f}", f"{judged:,.0f}", f"{worst * 1e3:.2f}"


def rate(work: Callable[[], object], seconds: float) -> float:
    """How often a second, by CPU time; ends early where there is no more work."""
    began, count = time.process_time(), 0
    with contextlib.suppress(StopIteration):
        while time.process_time() - began < seconds:
            work()
            count += 1
    return count / max(1e-9, time.process_time() - began)


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a table of all datasets of reasoning-gym.")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    seconds = parser.parse_args().seconds
    print(line(HEAD))
    print(line(tuple("---" for _ in HEAD)))
    for group, members in OFFERED_BY_GROUP.items():
        for name, rules in members.items():
            print(line(row(name, group, rules, seconds)), flush=True)
    for group, reasons in REFUSED_BY_GROUP.items():
        for name, reason in reasons.items():
            print(line((name, group, f"refused: {reason}", "", "", "")))


if __name__ == "__main__":
    main()
