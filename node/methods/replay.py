"""Successes that are kept, for tasks on which there are none or few."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

from node.methods.advantages import PASSED, is_flat
from node.methods.checked import finite, whole
from node.methods.method import (
    NODE,
    Count,
    MethodSettings,
    Need,
    Positive,
    PositiveShare,
    Share,
)
from node.methods.step_judge import JudgeName, StepJudge
from swarm.identity import PeerId
from swarm.rollouts import Completion, FinishReason, Task


class PoolOfSuccesses(
    MethodSettings,
    kind="pool_of_successes",
    needs={Need.REVISITS, Need.ONE_TURN},
    roles=NODE,
):
    """A task that nobody solves now gets successes of before."""

    injected: Annotated[int, Ge(1), Le(64)] = 1  # successes for such a group; ours
    task_max: Annotated[int, Ge(1), Le(1_024)] = 8  # newest successes kept of a task; ours
    tokens_max: Count = 131_072  # of all successes, which the checkpoint holds; ours


class ReplayedSuccesses(
    MethodSettings,
    kind="replayed_successes",
    needs={Need.REVISITS, Need.ONE_TURN},
    roles=NODE,
):
    """A task that is rarely solved gets own successes of before."""

    replayed: Annotated[int, Ge(1), Le(64)] = 2  # successes added to a group; ours
    success_max: Share = 0.25  # share of right ones at which a task is rarely solved; ours
    tokens_max: Count = 131_072  # of all successes, which the checkpoint holds; ours


def pool_of_successes(
    names: Sequence[str], rewards: Sequence[float], rng: Random, set_to: PoolOfSuccesses
) -> tuple[str, ...]:
    """Those of a task's stored successes, by name, that join its group (DART, arXiv 2509.23866): a
    draw without replacement if none of its own completions passed, else none."""
    if any(each >= PASSED for each in finite(rewards, "rewards")):
        return ()
    return _drawn(names, set_to.injected, rng)


def replayed_successes(
    names: Sequence[str], rewards: Sequence[float], rng: Random, set_to: ReplayedSuccesses
) -> tuple[str, ...]:
    """Those of a task's earlier own successes, by name, that join its group (RLEP, arXiv
    2507.07451, which adds them to every group): a draw without replacement if few enough of the
    group passed, else none."""
    right = sum(each >= PASSED for each in finite(rewards, "rewards"))
    if not rewards or right > set_to.success_max * len(rewards):
        return ()
    return _drawn(names, set_to.replayed, rng)


def _drawn(names: Sequence[str], count: int, rng: Random) -> tuple[str, ...]:
    return tuple(rng.sample(sorted(names), min(count, len(names))))


# Own groups that are all wrong, and others' right completions of the same tasks.

CHARS_MAX: Final = 2**24  # of all kept texts; beyond it the tasks received longest ago go
EACH_MAX: Final = 4  # producers of a task, the newest


class Rescue(
    MethodSettings,
    kind="rescue",
    needs={Need.REVISITS, Need.PEERS, Need.ONE_TURN},
    roles=NODE,
):
    """A group that is all wrong takes right completions of others on its task, by their texts."""

    successes_max: Annotated[int, Ge(1), Le(8)] = 1  # for one group, each of another producer; ours
    groups_share_max: PositiveShare = 0.5  # of a round's own groups, rounded up; ours
    shaping: PositiveShare = 0.1  # a token counts by p / (p + shaping), p its present probability


class Distil(
    MethodSettings,
    kind="distil",
    needs={Need.REVISITS, Need.PEERS, Need.ONE_TURN},
    roles=NODE,
):
    """Others' right completions of own tasks are learned by supervision too, by their texts."""

    weight: PositiveShare = 0.1  # of the supervised loss at first, beside 1 of the method's; ours
    weight_last: Share = 0.0  # in the end; ours
    steps: Count = 200  # until it is reached, linearly; ours
    successes_max: Annotated[int, Ge(1), Le(8)] = 1  # for one group, each of another producer; ours
    groups_share_max: PositiveShare = 0.5  # of a round's own groups, rounded up; ours
    success_max: PositiveShare = 1.0  # share of right ones above which a task needs none; ours


def distil_weight(step: int, set_to: Distil) -> float:
    """The weight of the supervised loss at a step, counted from 0: linear down to `weight_last`."""
    left = max(0.0, 1.0 - whole(step, "step") / set_to.steps)
    return set_to.weight_last + (set_to.weight - set_to.weight_last) * left


@dataclass(frozen=True, slots=True)
class Success:
    """A right completion of another node, scored here. Only its text is used."""

    producer: PeerId
    completion: Completion
    voice: str = ""  # in whose name it counts: of an address block; empty: of the producer alone


class SolvedTasks:
    """Right completions of tasks that come again, the newest of each producer. Bounded."""

    def __init__(self, chars_max: int = CHARS_MAX) -> None:
        self._chars_max = chars_max
        self._chars = 0
        self._tasks: dict[Task, dict[PeerId, Success]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def receive(
        self,
        task: Task,
        producer: PeerId,
        scored: Sequence[tuple[Completion, float]],
        voice: str = "",
    ) -> None:
        """Keep the shortest of a group's right completions that ended by themselves, if no other
        producer gave it. If a task has too many, the oldest of the voice with most of them goes."""
        known = self._tasks.pop(task, {})
        self._chars -= _chars(known)
        others = {each.completion.text for name, each in known.items() if name != producer}
        fresh = [
            each.text
            for each, reward in scored
            if reward == 1.0
            and each.finish_reason is FinishReason.STOP
            and not each.segments
            and each.text not in others
        ]
        if fresh:
            shortest = min(fresh, key=lambda text: (len(text), text))
            known.pop(producer, None)
            bare = Completion(shortest, (), (), FinishReason.STOP, 0)
            known[producer] = Success(producer, bare, voice)
            while len(known) > EACH_MAX:
                voices = [each.voice or name for name, each in known.items()]
                most = max(Counter(voices).values())
                crowded = next(voice for voice in voices if voices.count(voice) == most)
                del known[next(name for name, v in zip(known, voices, strict=True) if v == crowded)]
        if known:
            self._tasks[task] = known
            self._chars += _chars(known)
        while self._chars > self._chars_max:
            self._chars -= _chars(self._tasks.pop(next(iter(self._tasks))))

    def of(self, task: Task) -> tuple[Success, ...]:
        return tuple(self._tasks.get(task, {}).values())


def rescue(
    rewards: Sequence[Sequence[float]],
    successes: Mapping[int, Sequence[Success]],
    rng: Random,
    set_to: Rescue,
) -> dict[int, tuple[Success, ...]]:
    """Right completions of others for some own groups without a success, by place. `rewards`:
    (groups, G); `successes`: those of each group's task, by its place."""
    failed = [at for at, each in enumerate(rewards) if is_flat(each) and max(each, default=0) <= 0]
    known = [at for at in failed if successes.get(at)]
    most = math.ceil(set_to.groups_share_max * len(rewards))
    found: dict[int, tuple[Success, ...]] = {}
    taken: Counter[PeerId] = Counter()  # no producer gives more than others that could
    for at in sorted(rng.sample(known, min(most, len(known)))):
        offered = sorted(successes[at], key=lambda each: each.producer)
        rng.shuffle(offered)
        offered.sort(key=lambda each: taken[each.producer])
        found[at] = tuple(offered[: set_to.successes_max])
        taken.update(each.producer for each in found[at])
    return found


def _chars(successes: Mapping[PeerId, Success]) -> int:
    return sum(len(each.completion.text) for each in successes.values())


class Teacher(MethodSettings, kind="teacher", needs={Need.BEHAVIOUR, Need.ONE_TURN}):
    """A served model of the same tokenizer corrects own completions, token by token."""

    url: str = "http://127.0.0.1:8000/v1"  # where vLLM serves by itself
    weight: Positive = 1.0
    model: str = ""  # empty: the only one that it serves
    prompts: Literal["chat", "text"] = "chat"
    key_env: str = ""  # the variable that holds the server's key; empty: it wants none
    wait_s: Positive = 60.0  # for all of a round's answers; ours


# The right part of a wrong answer.


class Salvage(MethodSettings, kind="salvage", needs={Need.TEXTS, Need.ONE_TURN}, roles=NODE):
    """A wrong answer is begun again after its last right step."""

    judge: JudgeName = "arithmetic"
    tries: Annotated[int, Ge(1), Le(64)] = 4  # answers of a round that are begun again; ours
    steps_min: Count = 1  # right steps of a beginning that is worth it; ours
    steps_max: Count = 256  # steps of an answer that the judge gets; ours


@dataclass(frozen=True, slots=True)
class SalvagedAnswer:
    """The beginning of an answer, to be continued."""

    prefix: str
    steps: int  # that it has
    dropped: str  # the rest


def steps_of(text: str) -> tuple[str, ...]:
    """A text cut after each run of blank lines. The steps put together are the text."""
    steps: list[list[str]] = []
    says, is_over = False, True  # the step so far; a blank line came after what it says
    for line in text.splitlines(keepends=True):
        is_blank = not line.strip()
        if is_over and (not steps or not is_blank):
            steps.append([])
            says = False
        steps[-1].append(line)
        says = says or not is_blank
        is_over = says and is_blank
    return tuple(map("".join, steps))


def salvage(text: str, judge: StepJudge, set_to: Salvage) -> SalvagedAnswer | None:
    """The steps of a wrong answer up to the first that a judge finds wrong (SCOPE, arXiv
    2602.24110). Its continuation is not of the policy and needs a mask or weights of its own. None:
    no step is wrong, too few are right, or there are too many to ask about."""
    steps = steps_of(text)
    if not steps or len(steps) > set_to.steps_max:
        return None
    wrong = judge(steps)
    if wrong is None:
        return None
    if not 0 <= wrong < len(steps):
        raise ValueError(f"the judge finds step {wrong} wrong of {len(steps)}")
    if wrong < set_to.steps_min:
        return None
    return SalvagedAnswer("".join(steps[:wrong]), wrong, "".join(steps[wrong:]))
