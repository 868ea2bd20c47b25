"""`swarm-node methods check`: a method on generated batches."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

import torch
import trio

from node.config import load_config
from node.engines.scripted import ScriptedPolicy
from node.interfaces.engine import Request
from node.methods.choices import KNOWN, advantages, chosen
from node.methods.importance_weights import importance_weights
from node.methods.losses import Tokens, objective_of
from node.methods.method import Family, MethodSettings
from node.methods.own import is_own
from node.methods.registry import named
from node.methods.replay import SolvedTasks
from node.run.groups import seed_of
from node.stages.own import GuardedMethod, check_worth
from node.stages.stage import BatchGroup, View, Wanted
from node.stages.table import STAGES
from node.verify.assignment import assigned_task
from node.verify.held_out import Assignment
from node.verify.task_choice import TaskChoice
from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.rollouts import Completion, FinishReason, GroupId, RolloutGroup, ScoredGroup

Method = Callable[[list[Any]], list[Any]]  # a result for each group, or each completion of a loss
BATCHES: Final = 24
GROUPS: Final = 6  # of a batch
SIZE: Final = 8  # completions of a group
GROUP_MS_MAX: Final = 50.0  # on average
NO_SUCH: Final = "no such method; swarm-node methods lists them"
_CHARS: Final = 160


def check_method(text: str, family: Family | None, say: Callable[[str], None]) -> bool:
    """Say what a method does on generated batches; False if a check fails.

    Raises:
        ConfigError: no such method, or settings that it does not take.
    """
    set_to, family = _settings(text, family)
    method = _method(set_to, family)
    made = _tokens if family in ("loss", "correction") else trial_groups
    batches = [made(Random(seed)) for seed in range(BATCHES)]
    say(f"{family} {set_to}, {BATCHES} batches of {GROUPS} groups of {SIZE}")
    is_good = True
    for name, check in _CHECKS.items():
        if name == "order" and family not in ("advantage", "reward", "filter"):
            continue
        fault = next((f"{why}: {_line(b)}" for b in batches if (why := check(method, b))), "")
        say(f"  {name:<8} {fault or 'good'}")
        is_good = is_good and not fault
        if name == "bounds" and fault:
            return False
    began = time.perf_counter()
    for batch in batches:
        method(batch)
    each_ms = (time.perf_counter() - began) * 1e3 / (BATCHES * GROUPS)
    slow = f", above {GROUP_MS_MAX:g}: {_line(batches[-1])}" if each_ms > GROUP_MS_MAX else ""
    say(f"  speed    {each_ms:.2f} ms a group of {SIZE}{slow}")
    return is_good and not slow


def _settings(text: str, family: Family | None) -> tuple[MethodSettings, Family]:
    name = text.partition(",")[0].strip()
    families = [family] if family else [each.family for each in named(name)]
    if not families and is_own(name):
        families = ["filter", "advantage"]  # a stage, or a function
    if not families or (len(families) > 1 and not is_own(name)):
        told = f"it is of {', '.join(families)}: name one by --family"
        raise ConfigError(f"method {name}: {told if families else NO_SUCH}")
    error = ValueError()
    for each in families:
        known = KNOWN[each] or {m.name: m.parameters for m in named(name) if m.family == each}
        try:
            return chosen(known, text, each), each
        except ValueError as why:
            error = why
    raise ConfigError(f"method {text}: {error}")


def _method(set_to: MethodSettings, family: Family) -> Method:
    if family == "loss":
        objective = objective_of(set_to)  # type: ignore[arg-type]

        def losses(batch: list[Any]) -> list[Any]:
            return [tuple(objective.losses(_kept(each), set_to).each.tolist()) for each in batch]

        def _kept(each: Tokens) -> Tokens:
            if objective.keep is None:
                return each
            sources = torch.zeros(len(each.logprobs), dtype=torch.long)
            columns = (each.logprobs, each.proximal, each.behaviour, each.advantages)
            return Tokens(*columns, objective.keep(each, sources, set_to))

        return losses
    if family == "correction":
        return lambda batch: [
            tuple(importance_weights(e.proximal, e.behaviour, e.advantages, set_to).tolist())
            for e in batch
        ]
    own = set_to.own
    if type(set_to) in STAGES or isinstance(own, type):
        return lambda batch: trio.run(_stages, set_to, batch)
    if family != "advantage":
        raise ConfigError(f"method {set_to.kind}: no check on batches for a {family}")

    def formula(batch: list[Any]) -> list[Any]:
        found = advantages(batch, set_to)
        check_worth(found, [BatchGroup(each) for each in batch])
        return list(found)

    return formula


async def _stages(set_to: MethodSettings, batch: Sequence[ScoredGroup]) -> list[Any]:
    """For each group, what it wants of its task, and what a new stage makes of it."""
    kind = STAGES.get(type(set_to))
    stage, at = GuardedMethod(set_to, kind(set_to) if kind else None), trial_view()
    wanted = [Wanted(Assignment(e.group.task, e.prompt), Request(e.prompt, SIZE)) for e in batch]
    planned = {each.assigned.task: each for each in stage.plan(wanted, at)}
    groups: Sequence[BatchGroup] = [BatchGroup(each) for each in batch]
    for hook in (stage.reward, stage.replay, stage.select):
        groups = hook(groups, at)
    worth = await stage.advantage(groups, at)
    if worth is None:
        worth = advantages([each.scored for each in groups], at.config.advantage)
    groups, worth = stage.weigh(groups, worth, at)
    found = {
        each.scored.group.task: (each.scored.rewards, each.weights, each.masks, values)
        for each, values in zip(groups, worth, strict=True)
    }
    tasks = [each.group.task for each in batch]
    return [(planned.get(task), found.get(task)) for task in tasks]


def trial_view() -> View:
    config, policy = load_config({}, {}), ScriptedPolicy()
    return View(
        1, "node", config,
        lambda purpose, *more: seed_of(0, PeerId("check"), purpose, (1, *more)),
        "check", policy, policy, TaskChoice(config.run, None), SolvedTasks(),
    )  # fmt: skip


# --- batches ------------------------------------------------------------------------------------


def trial_groups(rng: Random) -> list[Any]:
    """Groups of the node and of a peer; some all right or all wrong, some with partial rewards."""
    config = load_config({}, {})
    made = []
    for place in range(GROUPS):
        task = assigned_task(config.run, PeerId("check"), place)
        steps, chance = rng.choice((1, 4)), rng.choice((0.0, 0.3, 0.7, 1.0))
        rewards = [sum(rng.random() < chance for _ in range(steps)) / steps for _ in range(SIZE)]
        completions = []
        for reward in rewards:
            ids = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 12)))
            logs = tuple(-rng.random() for _ in ids)
            end = rng.choice((FinishReason.STOP, FinishReason.LENGTH))
            completions.append(Completion(f"{reward:g} {ids[0]}", ids, logs, end, 0))
        producer = PeerId(rng.choice(("check", "peer")))
        group = RolloutGroup(
            config.run.run_id, producer, 0, task, tuple(completions), "check", 1.0, 1.0, 0, 1
        )
        own = producer == "check"
        made.append(ScoredGroup(GroupId(b""), group, f"{place} + 1", tuple(rewards), own))
    return made


def _tokens(rng: Random) -> list[Any]:
    made = []
    for _ in range(GROUPS * SIZE):
        count = rng.randrange(1, 12)
        logs, old, behaviour = torch.tensor([-3 * rng.random() for _ in range(3 * count)]).view(
            3, -1
        )
        worth = torch.full((count,), rng.uniform(-2, 2))
        made.append(Tokens(logs.requires_grad_(), old, behaviour, worth))
    return made


def _line(batch: Sequence[Any]) -> str:
    """The numbers of a batch in one line."""
    if isinstance(batch[0], ScoredGroup):
        said = "; ".join(" ".join(f"{r:g}" for r in each.rewards) for each in batch)
        return f"rewards {said}"[:_CHARS]
    first = batch[0].logprobs.tolist()
    said = ", ".join(f"{value:.3g}" for value in first)
    return f"log-probs {said}, A {float(batch[0].advantages[0]):.3g}"[:_CHARS]


# --- checks: each returns a fault, or nothing -------------------------------------------------


def _bounds(method: Method, batch: list[Any]) -> str:
    try:
        method(list(batch))
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


def _finite(method: Method, batch: list[Any]) -> str:
    return "" if all(map(math.isfinite, _numbers(method(list(batch))))) else "not finite"


def _pure(method: Method, batch: list[Any]) -> str:
    given = list(batch)
    before = repr(given)
    first = method(given)
    if repr(given) != before:
        return "changes its input"
    return "" if first == method(list(batch)) else "another result the second time"


def _order(method: Method, batch: list[Any]) -> str:
    places = list(range(len(batch)))
    Random(1).shuffle(places)
    first = list(_numbers([method(list(batch))[place] for place in places]))
    other = list(_numbers(method([batch[place] for place in places])))
    same = len(first) == len(other) and all(map(_close, first, other))
    return "" if same else "another result for groups in another order"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _numbers(found: Any) -> Iterator[float]:
    if isinstance(found, int | float):
        yield float(found)
    elif isinstance(found, tuple | list):
        for each in found:
            yield from _numbers(each)


_CHECKS: Final[dict[str, Callable[[Method, list[Any]], str]]] = {
    "bounds": _bounds,
    "finite": _finite,
    "pure": _pure,
    "order": _order,
}
