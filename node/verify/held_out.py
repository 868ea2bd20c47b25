"""Keeps held-out problems out of training.

A small problem space repeats questions under other seeds. So a node skips tasks whose question is
held out, and refuses foreign groups with one. Questions are compared without the run's
instructions. A node also skips the questions of its validation tasks; their number is a setting of
each node, so others that train on them are not blamed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from node.config import RunConfig
from node.envs.scoring import PosedProblem
from node.interfaces.prompts import Prompt
from node.verify.assignment import (
    ORDINARY_PRODUCER,
    VALIDATION_PRODUCER,
    first_tasks,
    held_out_tasks,
    leased_task,
    next_task,
)
from node.verify.verifier import Verifier
from swarm.errors import ConfigError, Reject, RemoteProtocolError
from swarm.rollouts import RolloutGroup, ScoredGroup, Task
from swarm.texts import printable

SKIPS_PER_TASK_MAX = 50  # consecutive held-out prompts; more: the run has too few problems
POSED_AT_ONCE = 200  # problems in one request, so that its CPU time suffices
CANDIDATES = 2  # drawn for each validation task: some are held out or repeat a question
Due = tuple[Task, int]  # a task, and how often the node did it before
Choose = Callable[[Sequence[Due], int], Sequence[Due]]  # picks a number of tasks, in their order
TOO_LONG = "its prompt does not fit the context of the model"
QUESTION_CHARS_SHOWN = 60
MISSED_SHARE_MAX = 0.125  # share of a run's tasks that validation may take from training


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task of the node's own stream and its prompt."""

    task: Task
    prompt: str
    attempt: int = 0  # how often the node did it before; of common tasks alone


class HeldOutGuard:
    """Knows the run's held-out prompts and the node's validation tasks, from their first use on."""

    def __init__(self, run: RunConfig, verifier: Verifier, validation: int = 0) -> None:
        """`validation`: number of the node's validation tasks."""
        self._run = run
        self.verifier = verifier
        self._questions: frozenset[str] | None = None
        self._lock = trio.Lock()
        self._validation_wanted = validation
        self._validation: tuple[Assignment, ...] | None = None
        self._validation_lock = trio.Lock()

    def leave_out(self, assigned: Assignment, why: str) -> None:
        """Count a task that nobody can do."""
        shown = printable(Prompt.read(assigned.prompt).question, QUESTION_CHARS_SHOWN)
        self.verifier.counters.leave_out(assigned.task, f"{shown!r}: {why}")

    async def held_out(self) -> list[Assignment]:
        """The run's evaluation tasks, without those that cannot be posed. ConfigError if that is
        all."""
        tasks = held_out_tasks(self._run)
        posed = zip(tasks, await self._posed(tasks), strict=True)
        found = [Assignment(task, each.prompt) for task, each in posed if each is not None]
        if tasks and not found:
            note = self.verifier.counters.note
            raise ConfigError(f"run {self._run.name}: no held-out task is left: {note}")
        return found

    async def _posed(self, tasks: Sequence[Task]) -> list[PosedProblem | None]:
        """The problems of tasks; None for one that cannot be posed."""
        return [None if each.failure else each for each in await self.verifier.problems(tasks)]

    @property
    def lacks_validation(self) -> bool:
        """True if validation tasks were wanted and the run has too few problems for any."""
        return self._validation_wanted > 0 and self._validation == ()

    async def questions(self) -> frozenset[str]:
        if self._questions is not None:
            return self._questions
        async with self._lock:
            if self._questions is None:
                self._questions = frozenset(
                    Prompt.read(each.prompt).question for each in await self.held_out()
                )
            return self._questions

    async def validation(self) -> tuple[Assignment, ...]:
        """The validation tasks, all with different questions and none held out. Empty if the run
        has so few problems that training would miss them."""
        if self._validation is None:
            held_out = await self.questions()
            async with self._validation_lock:
                if self._validation is None:
                    self._validation = await self._fit_for_validation(held_out)
        return self._validation

    async def _fit_for_validation(self, held_out: frozenset[str]) -> tuple[Assignment, ...]:
        """The first fit tasks of their stream. Another stream shows how often the run poses one of
        their questions: one stream of few items does not repeat itself soon."""
        wanted = self._validation_wanted
        candidates = first_tasks(self._run, VALIDATION_PRODUCER, CANDIDATES * wanted)
        tasks = (*candidates, *first_tasks(self._run, ORDINARY_PRODUCER, wanted))
        problems: list[PosedProblem | None] = []
        for begin in range(0, len(tasks), POSED_AT_ONCE):
            problems += await self._posed(tasks[begin : begin + POSED_AT_ONCE])
        questions = [
            None if each is None else Prompt.read(each.prompt).question for each in problems
        ]
        found: dict[str, Assignment] = {}
        for task, problem, question in zip(candidates, problems, questions, strict=False):
            if len(found) == wanted:
                break
            if problem is not None and question is not None and question not in held_out:
                found.setdefault(question, Assignment(task, problem.prompt))
        again = sum(question in found for question in questions[len(candidates) :])
        return tuple(found.values()) if again <= MISSED_SHARE_MAX * wanted else ()

    async def trainable(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups whose question is not one of validation."""
        apart = {Prompt.read(each.prompt).question for each in await self.validation()}
        return [each for each in groups if Prompt.read(each.prompt).question not in apart]

    async def verify(
        self, group: RolloutGroup, task: Task | None = None
    ) -> tuple[str, tuple[float, ...]]:
        """As `Verifier.verify`; refuses HELD_OUT questions."""
        held_out = await self.questions()
        prompt, rewards = await self.verifier.verify(group, task)
        if Prompt.read(prompt).question in held_out:
            raise RemoteProtocolError(Reject.HELD_OUT, "a held-out problem")
        return prompt, rewards

    async def assignments(
        self,
        producer: str,
        index: int,
        count: int,
        choose: Choose = lambda due, count: due[:count],
        ahead: int = 1,
    ) -> tuple[list[Assignment], int]:
        """The producer's next `count` tasks from data position `index` that are neither held out
        nor for validation, and the position after them. `choose` takes them from `ahead` times as
        many tasks; the others are left out for good.

        Raises:
            ConfigError: nearly all problems of the run are held out, or fail to be posed.
        """
        apart = await self.questions()
        apart |= {Prompt.read(each.prompt).question for each in await self.validation()}
        found: list[Assignment] = []
        last = index + ahead * count * (1 + SKIPS_PER_TASK_MAX)
        while len(found) < count:
            wanted = count - len(found)
            if index >= last:
                raise self._all_held_out()
            due = [next_task(self._run, producer, index + n) for n in range(ahead * wanted)]
            index += len(due)
            due = list(choose(due, wanted))
            problems = await self._posed([task for task, _ in due])
            found += [
                Assignment(task, problem.prompt, attempt)
                for (task, attempt), problem in zip(due, problems, strict=True)
                if problem is not None and Prompt.read(problem.prompt).question not in apart
            ]
        return found, index

    async def leased(self, stream: str, places: Sequence[int]) -> list[Assignment]:
        """The tasks at these places of a lease, without those that cannot be posed. Raises as
        `assignments`."""
        held_out = await self.questions()
        found: dict[int, Assignment | None] = {}
        for attempt in range(SKIPS_PER_TASK_MAX):
            left = [place for place in places if place not in found]
            if not left:
                return [each for place in places if (each := found[place]) is not None]
            tasks = [leased_task(self._run, stream, place, attempt) for place in left]
            problems = await self._posed(tasks)
            for place, task, problem in zip(left, tasks, problems, strict=True):
                if problem is None:
                    found[place] = None  # further attempts are for held-out tasks alone
                elif Prompt.read(problem.prompt).question not in held_out:
                    found[place] = Assignment(task, problem.prompt)
        raise self._all_held_out()

    def _all_held_out(self) -> ConfigError:
        note = self.verifier.counters.note
        left_out = f" or fail ({note})" if note else ""
        return ConfigError(
            f"run {self._run.name}: nearly all its problems are held out{left_out}; ask for fewer "
            "in held_out.tasks or widen the environments' parameters"
        )
