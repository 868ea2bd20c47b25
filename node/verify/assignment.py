"""The task of a producer at an index: a pure function of run, producer and index.

Everybody can compute it, so groups with another task are refused. The index is the producer's data
position, where its stream continues after a restart. A run may have common tasks, a stream of their
own: each producer does every one once in an epoch, at positions that follow from its peer id. A
group of such a task says in which attempt it was made, which its producer may choose.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from random import Random

from node.config import RunConfig
from node.config.run import CommonRules, EnvironmentSpec
from node.envs.answers import AnswerRule
from swarm.rollouts import Task

# None is a valid peer id, so no node can train on these streams.
HELD_OUT_PRODUCER = "held-out"
VALIDATION_PRODUCER = "validation"
COMMON_PRODUCER = "common"
ORDINARY_PRODUCER = "ordinary"
INDEX_MAX = 2**31 - 1
ENVIRONMENT_BUCKETS = 2**31  # first bucket of environments; common tasks have those below
FORMAT_SAMPLES = 24  # tasks of an environment, enough to meet each kind of its answers

_SEED_DOMAIN = b"swarm/task-seed/1"
_ENVIRONMENT_DOMAIN = b"swarm/task-environment/1"
_COMMON_DOMAIN = b"swarm/common-tasks/1"
_EPOCHS_CACHED = 16
_SEED_BITS = 62  # a seed plus an index stays below 2**63


def assigned_task(run: RunConfig, producer: str, index: int) -> Task:
    """The only task that `producer` may work on at `index`, 0 <= index <= INDEX_MAX."""
    assert 0 <= index <= INDEX_MAX, index
    spec = _environment_at(run, producer, index)
    seed = _hash_bits(_SEED_BITS, _SEED_DOMAIN, run.run_id, producer, spec.name, spec.parameters)
    return Task(spec.name, spec.version, spec.parameters, seed, index)


def common_task(run: RunConfig, number: int) -> Task:
    """The common task of that number, 0 <= number < run.common.tasks."""
    return assigned_task(run, COMMON_PRODUCER, number)


def is_common(run: RunConfig, task: Task) -> bool:
    """True if the task is one that all nodes of the run have in common."""
    rules = run.common
    return bool(rules.share) and task.index < rules.tasks and task == common_task(run, task.index)


def bucket_of(run: RunConfig, task: Task) -> int:
    """The bucket in which nodes count how often a task is solved: its own for a common task, else
    that of its environment and parameters."""
    return task.index if is_common(run, task) else environment_bucket(run, task)


def environment_bucket(run: RunConfig, task: Task) -> int:
    """The bucket of all tasks of the task's environment and parameters."""
    specs = [(spec.name, spec.parameters) for spec in run.environments]
    return ENVIRONMENT_BUCKETS + specs.index((task.environment, task.parameters))


def is_bucket(run: RunConfig, bucket: int) -> bool:
    if bucket < ENVIRONMENT_BUCKETS:
        return bool(run.common.share) and 0 <= bucket < run.common.tasks
    return bucket < ENVIRONMENT_BUCKETS + len(run.environments)


def next_task(run: RunConfig, producer: str, index: int) -> tuple[Task, int]:
    """The task at a producer's data position, and how often the producer did it before."""
    if not run.common.share:
        return assigned_task(run, producer, index), 0
    epoch, place = divmod(index, run.common.epoch)
    numbers, places = _common_places(run.run_id, run.common, producer, epoch)
    number = numbers.get(place)
    if number is not None:
        return common_task(run, number), epoch
    before = epoch * run.common.tasks + bisect_left(places, place)  # its own have no gaps
    return assigned_task(run, producer, index - before), 0


@lru_cache(maxsize=_EPOCHS_CACHED)
def _common_places(
    run_id: str, rules: CommonRules, producer: str, epoch: int
) -> tuple[Mapping[int, int], Sequence[int]]:
    """The common tasks in a producer's epoch: their numbers by place, and the places in order."""
    seed = _hash_bits(63, _COMMON_DOMAIN, run_id, producer, str(epoch))
    draw = Random(seed).random  # the one method whose numbers no release of Python changes
    places = sorted(range(rules.epoch), key=[draw() for _ in range(rules.epoch)].__getitem__)
    chosen = places[: rules.tasks]
    return {place: number for number, place in enumerate(chosen)}, sorted(chosen)


def leased_task(run: RunConfig, stream: str, place: int, attempt: int) -> Task:
    """The task at a place of a lease, if the problems of all attempts before are held out."""
    return assigned_task(run, f"{stream}/{attempt}", place)


def held_out_tasks(run: RunConfig) -> tuple[Task, ...]:
    """The run's evaluation tasks, the same for all nodes."""
    return first_tasks(run, HELD_OUT_PRODUCER, run.held_out.tasks)


def first_tasks(run: RunConfig, producer: str, count: int) -> tuple[Task, ...]:
    """The first tasks of a stream. That of `ORDINARY_PRODUCER` has tasks as any node may have them,
    which show how often the run poses a question."""
    return tuple(assigned_task(run, producer, i) for i in range(count))


def sample_tasks(run: RunConfig) -> tuple[Task, ...]:
    """One task of each environment, to try them at start."""
    return tuple(_sample(spec, 0) for spec in run.environments)


def format_samples(run: RunConfig) -> list[tuple[AnswerRule, tuple[Task, ...]]]:
    """Tasks of each environment whose answers are extracted from texts, with the rule."""
    return [
        (rule, tuple(_sample(spec, index) for index in range(FORMAT_SAMPLES)))
        for spec in run.environments
        if (rule := run.answer_rule(spec.name, spec.parameters)).format != "whole"
    ]


def _sample(spec: EnvironmentSpec, index: int) -> Task:
    return Task(spec.name, spec.version, spec.parameters, seed=0, index=index)


def _environment_at(run: RunConfig, producer: str, index: int) -> EnvironmentSpec:
    if len(run.environments) == 1:
        return run.environments[0]
    draw = _hash_bits(53, _ENVIRONMENT_DOMAIN, run.run_id, producer, str(index)) / 2**53
    remaining = draw * sum(spec.weight for spec in run.environments)
    for spec in run.environments:
        remaining -= spec.weight
        if remaining < 0:
            return spec
    return run.environments[-1]  # the sum was rounded


def _hash_bits(bits: int, domain: bytes, *parts: str) -> int:
    """A number below 2**bits from text parts, each framed by its length."""
    raw = [part.encode() for part in parts]
    framed = b"".join([domain, *(len(each).to_bytes(8, "big") + each for each in raw)])
    return int.from_bytes(hashlib.sha256(framed).digest()[:8], "big") >> (64 - bits)
