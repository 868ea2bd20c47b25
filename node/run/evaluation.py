"""The held-out pass rate: one completion for each of the run's fixed tasks.

Tasks and sampling seed are the same at every evaluation and node of a run, and no node trains on
them. Decisions follow from the pass rate on a node's validation tasks, sampled in the same call.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import trio

from node.config import RunConfig
from node.config.run import GREEDY_TEMPERATURE
from node.envs.replay_turns import said_of
from node.interfaces.engine import Engine, Sampling
from node.observe.abilities import TaskResult
from node.observe.records import HeldOut
from node.run.groups import examples, seed_of
from node.run.parts import NodeParts
from node.run.progress import Progress
from node.run.turns import Player, completions
from node.verify.held_out import TOO_LONG, Assignment, HeldOutGuard
from node.verify.verifier import Verifier
from swarm.errors import ConfigError
from swarm.rollouts import Completion, Task

AT_ONCE_MAX = 32  # samples of each task
REWARD_DIGITS = 4  # of a task's reward in the log


async def evaluate(
    node: NodeParts,
    engine: Engine,
    progress: Progress,
    validation: Sequence[Assignment] = (),
) -> HeldOut:
    """Sample and score the held-out set by the run's rules, and a node's validation tasks."""
    run, verifier = node.config.run, node.verifier
    started_s = trio.current_time()
    held_out = await node.guard.held_out()
    assigned = [*held_out, *validation]
    player = Player(run, engine, verifier)
    made = await completions(player, assigned, 1, run.held_out_sampling, seed_of(run.run_id))
    for each, group in zip(assigned, made, strict=True):
        if not group:
            node.guard.leave_out(each, TOO_LONG)
    rewards = await score(verifier, [each.task for each in assigned], made)
    if run.reward == "exact":  # a reward for the format alone is no pass
        rewards = [tuple(float(each == 1.0) for each in group) for group in rewards]
    test = rewards[: len(held_out)]
    validated = [group for group in rewards[len(held_out) :] if group]
    by_environment: dict[str, list[float]] = {}
    for each, group_rewards in zip(held_out, test, strict=True):
        if group_rewards:
            by_environment.setdefault(each.task.environment, []).extend(group_rewards)
    if held_out and not by_environment:
        raise ConfigError(f"none of {len(held_out)} held-out tasks can be done: {TOO_LONG}")
    return HeldOut(
        round=progress.round,
        generated_tokens_total=progress.generated_tokens,
        passed=fmean(reward for group_rewards in test for reward in group_rewards),
        passed_by_environment={name: fmean(r) for name, r in sorted(by_environment.items())},
        tasks=sum(map(bool, test)),
        seconds=trio.current_time() - started_s,
        validation=fmean(reward for group in validated for reward in group) if validated else None,
        validation_tasks=len(validated),
        examples=examples(run, progress.round, held_out, made[: len(held_out)], test),
        rewards=tuple(round(group[0], REWARD_DIGITS) if group else None for group in test),
    )


async def examine(
    run: RunConfig, engine: Engine, verifier: Verifier, samples: int
) -> list[TaskResult]:
    """Pass rates of the held-out tasks: one greedy answer and `samples` samples each. Only a full
    score passes. Samples go in batches, to fit a frame and the verifier's time."""
    assigned = await HeldOutGuard(run, verifier).held_out()
    tasks = [each.task for each in assigned]
    player = Player(run, engine, verifier)
    likeliest = replace(run.engine_sampling, temperature=GREEDY_TEMPERATURE)

    async def rewards_of(each: int, sampling: Sampling, seed: int) -> list[tuple[float, ...]]:
        made = await completions(player, assigned, each, sampling, seed)
        return await score(verifier, tasks, made)

    greedy = await rewards_of(1, likeliest, seed_of(run.run_id))
    passed = [0] * len(tasks)
    for done in range(0, samples, AT_ONCE_MAX):
        each = min(AT_ONCE_MAX, samples - done)
        of_all = await rewards_of(each, run.engine_sampling, seed_of(run.run_id) + done)
        for place, rewards in enumerate(of_all):
            passed[place] += rewards.count(1.0)
    return [
        TaskResult(task.environment, first == (1.0,), count, samples)
        for task, first, count in zip(tasks, greedy, passed, strict=True)
        if first  # else its prompt does not fit the context
    ]


async def score(
    verifier: Verifier, tasks: Sequence[Task], made: Sequence[Sequence[Completion]]
) -> list[tuple[float, ...]]:
    """Rewards of each task's completions, by this node's own verifier; 0 for what is undecided."""
    found = await verifier.score(tasks, [[said_of(c) for c in group] for group in made])
    return [tuple(each or 0.0 for each in verdicts) for verdicts in found]
