"""Own groups that are all wrong, and others' right completions of the same tasks."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le

from node.methods.advantages.group import is_flat
from node.methods.method import MethodSettings
from swarm.identity import PeerId
from swarm.rollouts import Completion, FinishReason, Task

CHARS_MAX: Final = (
    2**24
)  # of all texts that are kept; of more, those heard longest ago are given up
EACH_MAX: Final = 4  # producers of a task, the newest


@dataclass(frozen=True, slots=True)
class Rescue(MethodSettings):
    """A group that is all wrong takes right completions of others on its task, by their texts."""

    kind: Literal["rescue"] = "rescue"
    successes_max: Annotated[int, Ge(1), Le(8)] = 1
    """For one group, each of another producer; not published."""
    groups_share_max: Annotated[float, Gt(0), Le(1)] = 0.5
    """Of a round's own groups that share, rounded up, is rescued at most; not published."""
    shaping: Annotated[float, Gt(0), Le(1)] = 0.1
    """A token counts by p / (p + shaping), p its probability now (LUFFY, arXiv 2504.14945): what is
    unlikely still has a gradient, and what is likely hardly any."""


@dataclass(frozen=True, slots=True)
class Success:
    """A right completion of somebody else. Its text alone is believed: it was scored here."""

    producer: PeerId
    completion: Completion
    voice: str = ""  # in whose name it counts: of an address block; empty: of the producer alone


class SolvedTasks:
    """Right completions of tasks that come again, of each producer its newest one. Bounded."""

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
        """Keep the shortest of a group's right completions that ended by themselves, if there is
        one that nobody else gave: who copies another's takes no place. Where there are more than
        have room, the oldest of the voice with most of them goes: keys are free."""
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
        """Those of a task, the newest last."""
        return tuple(self._tasks.get(task, {}).values())


def rescue(
    rewards: Sequence[Sequence[float]],
    successes: Mapping[int, Sequence[Success]],
    rng: Random,
    set_to: Rescue,
) -> dict[int, tuple[Success, ...]]:
    """The right completions of others for each own group that takes some.

    Args:
        rewards: (groups, G) of a round's own groups.
        successes: by the place of a group, what others made of its task.

    Raises:
        ValueError: a reward is no finite number.
    """
    failed = [at for at, each in enumerate(rewards) if is_flat(each) and not any(each)]
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
