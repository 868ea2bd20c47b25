"""Earlier completions of tasks that come again, as drafts."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarm.rollouts import Completion, Task

TOKENS_MAX: Final = 2**22  # 32 MiB; of more, those of the tasks done longest ago are given up


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt and an earlier completion of it, of which the present policy may keep a part."""

    prompt: str
    token_ids: tuple[int, ...] = ()  # of the engine's tokenizer, end included where sampled
    logprobs: tuple[float, ...] = ()  # natural log, where they were generated


class DraftBank:
    """The newest completions of each task. Bounded."""

    def __init__(self, tokens_max: int = TOKENS_MAX) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._groups: OrderedDict[Task, list[tuple[array[int], array[float]]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def keep(self, task: Task, completions: Sequence[Completion]) -> None:
        """Replace a task's completions."""
        self._forget(task)
        group = [(array("I", c.token_ids), array("f", c.logprobs)) for c in completions]
        self._groups[task] = group
        self._tokens += _tokens(group)
        while self._tokens > self._tokens_max:
            self._forget(next(iter(self._groups)))

    def drafts(self, task: Task, prompt: str, count: int) -> list[Draft]:
        """`count` drafts of the task, the last ones empty where fewer are kept."""
        kept = self._groups.get(task, [])[:count]
        found = [Draft(prompt, tuple(ids), tuple(logprobs)) for ids, logprobs in kept]
        return found + [Draft(prompt)] * (count - len(found))

    def _forget(self, task: Task) -> None:
        self._tokens -= _tokens(self._groups.pop(task, []))


def _tokens(group: Sequence[tuple["array[int]", "array[float]"]]) -> int:
    return sum(len(ids) for ids, _ in group)
