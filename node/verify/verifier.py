"""Scores groups: prompts and rewards follow from tasks, never from what a sender says.

`ProcessVerifier` scores foreign groups in one child process and own groups in another. Producers
take turns by the CPU time that they used (`fair_queue`), and are blamed for CPU time alone, since a
machine may be busy or paused. If a batch fails, its groups are scored again one by one.
`InlineVerifier` scores in the calling task, for simulations.
"""

import math
import signal
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Protocol

import trio

from node.config import NodeConfig, RunConfig
from node.envs.answers import AnswerRule
from node.envs.replay_turns import Said, chars_of, said_of
from node.envs.scoring import (
    GroupScore,
    PosedProblem,
    ScoreRule,
    check_format,
    pose,
    replies,
    score_group,
)
from node.observe.text_format import counted
from node.sandbox.bounds import SCORING_BYTES
from node.system.child_process import NUMBER, ChildChannel, encode
from node.verify.assignment import assigned_task, format_samples, is_common, sample_tasks
from node.verify.confinement_settings import confinement_of, worker_environ
from node.verify.fair_queue import End, FairQueue, QueueFull, Ticket
from node.verify.verifier_worker import OUT_OF_CPU, OUT_OF_TIME, WAITED
from node.verify.worker_answers import (
    GroupVerdict,
    WorkEnded,
    checked_replies,
    checked_scores,
)
from swarm.errors import ChildFailed, ConfigError, LocalProtocolError, Reject, RemoteProtocolError
from swarm.rollouts import RolloutGroup, Task
from swarm.texts import printable

WORKER = "node.verify.verifier_worker"
ANSWER_BYTES_MAX = 64 * 2**20
START_TIMEOUT_S = 180.0  # imports, behind all else that a busy machine does
FIRST_SHARE = 0.25  # of a group's CPU limit, for its first try
BATCH_CPU_S = 0.02  # CPU seconds of a batch after which none of its groups is begun
# Share of a group's CPU limit that the code in its texts may use. It bounds that code's wall-clock
# time as well: a group that waits delays the next one no longer than a group that computes.
RUN_SHARE = 0.75
LEFT_OUT_MAX = 10_000  # counted tasks
REASON_CHARS_MAX = 200
STARVED_FACTOR = 10.0  # wall-clock timeout as a multiple of the CPU limit; beyond it: overloaded
WAITING_SHARE = 0.25  # of a failed try's wall-clock time that is charged, if its CPU time is less
SECOND_WAITING_MAX_S = 30.0  # wait for a second try's turn, which may never come on a busy node
_SELF_DESTRUCTION_S = 10.0  # a worker that nobody killed ends so long after its limit
_ENDED_BY_OTHERS = frozenset(  # the kernel where memory is short, a user, a shutdown
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)
Verdicts = tuple[float | None, ...]  # rewards; None: undecided


class Verifier(Protocol):
    """Judges own and foreign work by the run's rules."""

    @property
    def counters(self) -> "VerifierCounters": ...

    async def verify(
        self, group: RolloutGroup, task: Task | None = None
    ) -> tuple[str, tuple[float, ...]]:
        """The prompt and rewards of a foreign group. `task`: from its producer's lease; None: from
        the producer's own stream.

        Raises:
            RemoteProtocolError: the group is refused. For UNDECIDED nobody is to blame.
            ChildFailed: it was not scored, through our own fault or for want of time.
        """
        ...

    async def problems(self, tasks: Sequence[Task]) -> list[PosedProblem]:
        """The problems of own tasks; one that its environment fails to pose has a `failure`.

        Raises:
            ConfigError: the run's parameters make no problem.
            ChildFailed: the worker was ended by others; the caller may try again.
        """
        ...

    async def score(
        self,
        tasks: Sequence[Task],
        texts: Sequence[Sequence[Said]],
        rule: ScoreRule | None = None,
    ) -> list[Verdicts]:
        """Rewards of own completions, task by task, by a rule or the run's. Raises as
        `problems`."""
        ...

    async def replies(
        self, tasks: Sequence[Task], transcripts: Sequence[Sequence[Sequence[str]]]
    ) -> list[list[str | None]]:
        """The environment's replies to the last turn of each own transcript, task by task; None:
        the transcript is over. Raises as `problems`."""
        ...


@dataclass(slots=True)
class VerifierCounters:
    """Since the start; read by the node's status."""

    groups: int = 0  # foreign groups scored
    scorer_errors: int = 0  # texts on which a scorer failed; they were worth 0
    second_tries: int = 0  # foreign groups that took more CPU time than the first try has
    overruns: int = 0  # foreign groups that used up the CPU time of a group
    starved: int = 0  # calls that ran out of wall-clock time: the machine was busy
    turned_away: int = 0  # foreign groups that met a full queue, or waited too long
    starts: int = 0  # worker processes started; more than two: some were lost
    # CPU seconds of foreign groups: `proven` and `unproven` producers, and `overrun`
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    left_out: dict[Task, str] = field(default_factory=dict)  # own tasks, and why; the first ones

    def leave_out(self, task: Task, why: str) -> None:
        if len(self.left_out) < LEFT_OUT_MAX:
            self.left_out.setdefault(task, why)

    @property
    def note(self) -> str | None:
        """The tasks that were left out, of which one is named."""
        if not self.left_out:
            return None
        task, why = next(iter(self.left_out.items()))
        number = counted(len(self.left_out), "tasks")
        return (
            f"{number} left out so far; the first is number {task.index} of {task.environment}: "
            f"{printable(why, REASON_CHARS_MAX)}"
        )


def check_assignment(run: RunConfig, group: RolloutGroup, task: Task | None = None) -> None:
    """Refuse a foreign group whose task or texts the run does not allow its producer. `task`: from
    a lease; None: from the producer's own stream."""
    again = task is None and is_common(run, group.task)  # anybody's, in any attempt
    expected = task or assigned_task(run, group.producer, group.task.index)
    if not again and (group.task != expected or group.attempt):
        raise RemoteProtocolError(
            Reject.UNASSIGNED_TASK, f"not the task of {group.producer} at {group.task.index}"
        )
    longest = max((len(completion.text) for completion in group.completions), default=0)
    if longest > run.limits.text_chars_max:
        raise RemoteProtocolError(Reject.OVERSIZE, f"a completion of {longest} characters")
    leased = task is not None  # a worker has no drafts
    odd = any(c.propensity != 1.0 or (leased and c.splices) for c in group.completions)
    if group.context or odd:
        raise RemoteProtocolError(
            Reject.UNVERIFIABLE, "with a context, or prefixes of another: no rule of this run's"
        )


def _check_forgery(name: str) -> None:
    if name:
        raise RemoteProtocolError(Reject(name), "its transcript is not what the task makes of it")


def _check_own(forgery: str) -> None:
    if forgery:  # others would refuse it
        raise LocalProtocolError(f"own transcript: {forgery}; it was not scored as it was made")


def _decided(verdicts: Verdicts) -> tuple[float, ...]:
    rewards = tuple(each for each in verdicts if each is not None)
    if len(rewards) < len(verdicts):
        raise RemoteProtocolError(Reject.UNDECIDED, "too near to a limit of the environment")
    return rewards


def _rule_of(run: RunConfig, task: Task) -> AnswerRule:
    return run.answer_rule(task.environment, task.parameters)


class InlineVerifier:
    """Verifies in the calling task, without limits."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self.counters = VerifierCounters()
        for rule, tasks in format_samples(run):
            check_format(tasks, rule)

    async def verify(
        self, group: RolloutGroup, task: Task | None = None
    ) -> tuple[str, tuple[float, ...]]:
        await trio.lowlevel.checkpoint()
        check_assignment(self._run, group, task)
        try:
            scored = self._score(group.task, [said_of(each) for each in group.completions])
        except ConfigError as error:
            raise RemoteProtocolError(Reject.UNVERIFIABLE, str(error)) from None
        _check_forgery(str(scored.forgery or ""))
        self.counters.groups += 1
        return scored.prompt, _decided(scored.rewards)

    async def problems(self, tasks: Sequence[Task]) -> list[PosedProblem]:
        await trio.lowlevel.checkpoint()
        prompt_max, text_max = self._run.limits.prompt_chars_max, self._run.limits.text_chars_max
        found = []
        for task in tasks:
            try:
                found.append(pose(task, prompt_max, _rule_of(self._run, task), text_max))
            except ConfigError as error:
                self.counters.leave_out(task, str(error))
                found.append(PosedProblem("", "", str(error)))
        return found

    async def score(
        self,
        tasks: Sequence[Task],
        texts: Sequence[Sequence[Said]],
        rule: ScoreRule | None = None,
    ) -> list[Verdicts]:
        await trio.lowlevel.checkpoint()
        scored = [self._score(*group, rule) for group in zip(tasks, texts, strict=True)]
        for each in scored:
            _check_own(str(each.forgery or ""))
        return [each.rewards for each in scored]

    async def replies(
        self, tasks: Sequence[Task], transcripts: Sequence[Sequence[Sequence[str]]]
    ) -> list[list[str | None]]:
        await trio.lowlevel.checkpoint()
        return [replies(*each) for each in zip(tasks, transcripts, strict=True)]

    def _score(
        self, task: Task, texts: Sequence[Said], rule: ScoreRule | None = None
    ) -> GroupScore:
        scored = score_group(task, texts, rule or self._run.reward, _rule_of(self._run, task))
        self.counters.scorer_errors += scored.scorer_errors
        return scored


@dataclass(frozen=True, slots=True)
class _Limits:
    cpu_s: float
    wall_s: float  # on a machine that is busy with other work
    apart_s: float | None = None  # wall-clock limit on a machine with a free core; None: `wall_s`


OWN_BATCH_LIMITS = _Limits(cpu_s=60.0, wall_s=120.0)  # before it is tried group by group
DOUBTFUL_MAX = 3  # undecided and slow groups of one producer; the third is an offence
OWN_ENOUGH_S = 20.0  # CPU seconds of one request; the rest is asked for again


class _Overran(Exception):
    """A call used up its CPU time."""


class _Waited(_Overran):
    """A call let its time go by, on a machine with a free core."""


class _WrongSettings(ConfigError):
    """A worker refused the run's settings before it saw any text."""


@dataclass(eq=False, slots=True)
class _Foreign:
    """A foreign group in the queue, and its result."""

    task: Task
    texts: list[Said]
    limits: _Limits
    done: trio.Event = field(default_factory=trio.Event)
    scored: GroupVerdict | None = None
    error: Exception | None = None
    wasted_s: float = 0.0  # CPU seconds of failed batches that it was in


_Answer = Mapping[str, Any]
_task_values = attrgetter(*(each.name for each in fields(Task)))  # `astuple` is ten times slower


class _Worker:
    """One child process, started when needed. One call at a time: callers take turns."""

    def __init__(self, prepare: Mapping[str, Any], counters: VerifierCounters) -> None:
        self._prepare = prepare
        self._counters = counters
        self._channel: ChildChannel | None = None
        self._owed_until: float | None = None  # deadline of an answer that a caller left behind

    async def call(self, request: Mapping[str, Any], limits: _Limits) -> tuple[_Answer, float]:
        """The answer to one request, and the CPU seconds that it took. The limits hold for the
        work, not for a start before it.

        Raises:
            _Overran: it used up its CPU time.
            WorkEnded: it ended the worker.
            _WrongSettings: no worker starts with these settings.
            ChildFailed: it got no time, or something else ended the worker.
        """
        await self._settle()
        if self._channel is not None and self._channel.process.poll() is not None:
            await self.close()  # it ended while it had nothing to do
        if self._channel is None:
            await self._start()
        answer = await self._exchange(request, limits)
        if isinstance(answer.get("ended"), int):
            raise _why_ended(answer["ended"])
        used_s = answer.get("cpu_s")
        if not isinstance(used_s, float) or not 0.0 <= used_s < math.inf:
            await self.close()  # what ran in it writes into its pipe
            raise WorkEnded("a verifier does not say what it used")
        return answer, used_s

    async def close(self) -> None:
        """End the child and its fork."""
        channel, self._channel, self._owed_until = self._channel, None, None
        if channel is not None:
            channel.kill()
            await channel.close(0.0)

    async def _start(self) -> None:
        limits = _Limits(START_TIMEOUT_S, START_TIMEOUT_S)
        try:
            self._channel = await ChildChannel.start(
                "verifier",
                WORKER,
                subprocess.DEVNULL,
                worker_environ(confined=self._prepare["trust"] != "off"),
                ANSWER_BYTES_MAX,
            )
            self._counters.starts += 1
            _result(await self._exchange(self._prepare, limits))
        except ConfigError as error:
            await self.close()
            raise _WrongSettings(str(error)) from None
        except (ChildFailed, OSError) as error:
            await self.close()
            raise ChildFailed(f"no verifier started: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def _exchange(self, request: Mapping[str, Any], limits: _Limits) -> _Answer:
        assert self._channel is not None
        more = {
            NUMBER: self._channel.next_number,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s + _SELF_DESTRUCTION_S,
            "apart_s": limits.wall_s if limits.apart_s is None else limits.apart_s,
        }
        answer: _Answer | None = None
        try:
            with trio.move_on_after(limits.wall_s):
                await self._channel.send(encode({**request, **more}))
                self._owed_until = trio.current_time() + limits.wall_s
                answer = await self._channel.answer()
                self._owed_until = None
        except BaseException as error:
            if isinstance(error, ChildFailed) or self._owed_until is None:  # not sent whole
                await self.close()
            raise
        if answer is None:
            self._counters.starved += 1
            await self.close()
            raise ChildFailed(
                f"a verifier got less than {limits.cpu_s:g} s of CPU time in {limits.wall_s:g} s"
            )
        return answer

    async def _settle(self) -> None:
        """Wait for an answer that a cancelled caller left behind: a new worker would cost more, and
        who may cancel calls could end it again and again."""
        if self._channel is None or self._owed_until is None:
            return
        with suppress(ChildFailed), trio.move_on_at(self._owed_until):
            await self._channel.settle()
            self._owed_until = None
        if self._owed_until is not None:
            await self.close()


def _why_ended(status: int) -> Exception:
    """The error for a fork's exit status. A signal that others may have sent blames nobody."""
    if status == WAITED:
        return _Waited()
    if status == OUT_OF_CPU:
        return _Overran()
    if status == OUT_OF_TIME or -status in _ENDED_BY_OTHERS:
        return ChildFailed(f"a verifier was ended by signal {-status}")
    return WorkEnded(f"a verifier ended with status {status}")


def _why(error: Exception) -> str:
    return str(error) or f"it took over {OWN_BATCH_LIMITS.cpu_s:.0f} s of CPU time"


def _result(answer: _Answer) -> Any:
    """The result in a worker's answer; ConfigError if the settings are wrong, WorkEnded if it
    failed."""
    if "config" in answer:
        raise ConfigError(str(answer["config"]))
    if "ok" not in answer:
        raise WorkEnded(f"a verifier failed: {answer.get('failed')}")
    return answer["ok"]


class ProcessVerifier:
    """Verifies in child processes. Make one with `open`."""

    def __init__(self, config: NodeConfig) -> None:
        self._run = config.run
        cpu_s = config.verify_cpu_s
        wall_s = STARVED_FACTOR * cpu_s
        self._run_s = RUN_SHARE * cpu_s
        self._limits = _Limits(cpu_s, wall_s)
        self._last_limits = _Limits(cpu_s, wall_s, cpu_s + self._run_s / 2)
        self._first_limits = _Limits(FIRST_SHARE * cpu_s, wall_s, self._run_s)
        self.counters = VerifierCounters()
        self._prepare = {
            **self._pose_request(sample_tasks(self._run)),
            "formats": [
                [rule.to_values(), [_task_values(task) for task in tasks]]
                for rule, tasks in format_samples(self._run)
            ],
            "memory_bytes_max": SCORING_BYTES,
            **confinement_of(config),
        }
        self._own = _Worker(self._prepare, self.counters)
        self._own_turn = trio.Lock()
        self._foreign = _Worker(self._prepare, self.counters)
        self._waiting: FairQueue[_Foreign] = FairQueue()
        self._arrived = trio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, config: NodeConfig) -> AsyncIterator["ProcessVerifier"]:
        """A verifier whose children start at their first use and end with the block."""
        verifier = cls(config)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(verifier._serve)
                yield verifier
                nursery.cancel_scope.cancel()
        finally:
            await verifier._own.close()
            await verifier._foreign.close()

    # --- strangers' work ----------------------------------------------------------------------

    async def verify(
        self, group: RolloutGroup, task: Task | None = None
    ) -> tuple[str, tuple[float, ...]]:
        check_assignment(self._run, group, task)
        try:
            scored = await self._score_foreign(group)
        except _WrongSettings as error:
            raise ChildFailed(str(error)) from error
        except (WorkEnded, ConfigError) as error:  # it was this text that the worker was at
            raise RemoteProtocolError(Reject.UNVERIFIABLE, str(error)) from None
        self.counters.groups += 1
        _check_forgery(scored.forgery)
        return scored.prompt, _decided(self._rewards(scored))

    async def _score_foreign(self, group: RolloutGroup) -> GroupVerdict:
        """Score one group with little time at first, which is enough for nearly all. A group that
        takes more gets all of its time when no other waits; one that idled gets no second try."""
        limits, last = self._first_limits, False
        while True:
            try:
                return await self._score_in_turn(group, limits, last=last)
            except _Overran as error:
                if last or isinstance(error, _Waited):
                    break
            self.counters.second_tries += 1
            limits, last = self._last_limits, True
        self.counters.overruns += 1
        raise RemoteProtocolError(
            Reject.OVERRUN, f"not scored within {limits.cpu_s:g} s of CPU time, or it waited"
        )

    async def _score_in_turn(
        self, group: RolloutGroup, limits: _Limits, *, last: bool
    ) -> GroupVerdict:
        """Have the worker score a group when its turn comes. Raises as `_Worker.call` and
        `_result`, and ChildFailed if too many wait or its turn would come too late."""
        item = _Foreign(group.task, [said_of(each) for each in group.completions], limits)
        try:
            size = sum(map(chars_of, item.texts))
            alone = self._prepare["apart"]  # a text's code must see no other group
            ticket = self._waiting.add(group.producer, item, last=last, size=size, alone=alone)
        except QueueFull as error:
            self.counters.turned_away += 1
            raise ChildFailed(str(error)) from None
        self._arrived.set()
        try:
            if last:
                with trio.move_on_after(SECOND_WAITING_MAX_S):
                    await item.done.wait()
                if self._waiting.discard(ticket):
                    self.counters.turned_away += 1
                    raise ChildFailed(f"{len(self._waiting)} groups wait for a verifier")
            await item.done.wait()
        finally:
            self._waiting.discard(ticket)
        if item.error is not None:
            raise item.error
        assert item.scored is not None
        return item.scored

    async def _serve(self) -> None:
        while True:
            if batch := self._waiting.pop(trio.current_time()):
                await self._score_batch(batch)
            else:
                self._arrived = trio.Event()
                await self._arrived.wait()

    async def _score_batch(self, batch: Sequence[Ticket[_Foreign]]) -> None:
        """Score a batch as far as its time goes; the rest waits again."""
        items = [ticket.item for ticket in batch]
        texts = [item.texts for item in items]
        request = self._score_request([item.task for item in items], texts)
        request["foreign"] = True
        request["run_s"] = (self._run_s, self._run_s)
        limits = items[0].limits
        if len(batch) > 1:  # each group still has the time that it has alone
            request["enough_s"] = BATCH_CPU_S
            limits = replace(limits, cpu_s=limits.cpu_s + BATCH_CPU_S)
        used_s = limits.cpu_s  # unless an answer says less
        began = trio.current_time()
        try:
            answer, used_s = await self._foreign.call(request, limits)
            scores = checked_scores(_result(answer), texts)
        except (ChildFailed, ConfigError, _Overran) as error:
            if isinstance(error, ChildFailed) and not isinstance(error, WorkEnded):
                # Perhaps our own fault, but it held others up, which must cost something.
                used_s = WAITING_SHARE * (trio.current_time() - began)
            self._blame(batch, error, used_s)
            return
        common_s = (used_s - sum(scored.cpu_s for scored in scores)) / len(scores)
        for ticket, scored in zip(batch, scores, strict=False):
            self._take(ticket, scored, scored.cpu_s + common_s)
        for ticket in batch[len(scores) :]:
            self._waiting.put_back(ticket)

    def _take(self, ticket: Ticket[_Foreign], scored: GroupVerdict, used_s: float) -> None:
        """Settle a group's result. A group that idled is not scored. An undecided one that took the
        time of a first try is `DOUBTFUL`."""
        item, end = ticket.item, End.DONE
        item.scored = scored
        if scored.waited:
            item.error, end, used_s = _Waited(), End.OVERRUN, max(used_s, self._run_s)
        elif None in scored.rewards:
            end = End.DOUBTFUL if used_s >= self._first_limits.cpu_s else End.FAILED
        self._conclude(ticket, used_s, end)
        if end is End.DOUBTFUL and self._waiting.doubtful(ticket.producer) >= DOUBTFUL_MAX:
            item.error = _Waited()

    def _blame(self, batch: Sequence[Ticket[_Foreign]], error: Exception, used_s: float) -> None:
        """Settle groups over which the worker failed. Of a batch each is tried alone; the one that
        fails then also pays for the batch."""
        for ticket in batch:
            ticket.item.wasted_s += used_s
            if len(batch) > 1:
                self._waiting.put_back(ticket, alone=True)
                continue
            ticket.item.error = error
            end = End.OVERRUN if isinstance(error, _Overran) else End.FAILED
            self._conclude(ticket, ticket.item.wasted_s, end)

    def _conclude(self, ticket: Ticket[_Foreign], used_s: float, end: End) -> None:
        producer = ticket.producer
        self._waiting.charge(producer, used_s, trio.current_time(), end)
        kind = "proven" if self._waiting.is_proven(producer) else "unproven"
        self.counters.cpu_s["overrun" if end is End.OVERRUN else kind] += used_s
        ticket.item.done.set()

    # --- own work -----------------------------------------------------------------------------

    async def problems(self, tasks: Sequence[Task]) -> list[PosedProblem]:
        try:
            posed = await self._call_own(self._pose_request(tasks), OWN_BATCH_LIMITS)
        except (_Overran, WorkEnded) as error:
            if len(tasks) > 1:
                return [(await self.problems([task]))[0] for task in tasks]
            posed = [("", "", _why(error))]
        problems = [PosedProblem(*problem) for problem in posed]
        for task, problem in zip(tasks, problems, strict=True):
            if problem.failure:
                self.counters.leave_out(task, problem.failure)
        return problems

    async def score(
        self,
        tasks: Sequence[Task],
        texts: Sequence[Sequence[Said]],
        rule: ScoreRule | None = None,
    ) -> list[Verdicts]:
        """A group that runs out of CPU time on its own is worth 0, and one that ends the scorer is
        undecided."""
        scored: list[Verdicts] = []
        while len(scored) < len(tasks):  # a worker answers for `OWN_ENOUGH_S` of them
            rest = (tasks[len(scored) :], texts[len(scored) :])
            try:
                found = await self._call_own(self._score_request(*rest, rule), OWN_BATCH_LIMITS)
            except (_Overran, WorkEnded):
                alone = [await self._score_alone(*group, rule) for group in zip(*rest, strict=True)]
                return [*scored, *alone]
            scored += [self._rewards(group) for group in checked_scores(found, rest[1])]
        return scored

    async def replies(
        self, tasks: Sequence[Task], transcripts: Sequence[Sequence[Sequence[str]]]
    ) -> list[list[str | None]]:
        found: list[list[str | None]] = []
        while len(found) < len(tasks):
            rest = transcripts[len(found) :]
            request = {
                "op": "reply",
                "tasks": [_task_values(task) for task in tasks[len(found) :]],
                "texts": [[list(texts) for texts in each] for each in rest],
                "enough_s": OWN_ENOUGH_S,
                "run_s": (self._run_s, self._limits.wall_s),
            }
            try:
                said = await self._call_own(request, OWN_BATCH_LIMITS)
            except (_Overran, WorkEnded) as error:
                task, transcript = tasks[len(found)], rest[0]
                if len(rest) == 1:
                    self.counters.leave_out(task, _why(error))
                    found.append([None] * len(transcript))
                else:
                    found += await self.replies([task], [transcript])
                continue
            found += checked_replies(said, rest)
        return found

    async def _score_alone(
        self, task: Task, texts: Sequence[Said], rule: ScoreRule | None
    ) -> Verdicts:
        try:
            request = self._score_request([task], [texts], rule)
            found = checked_scores(await self._call_own(request, self._limits), [texts])
            return self._rewards(found[0])
        except _Overran:
            return (0.0,) * len(texts)
        except WorkEnded as error:
            self.counters.leave_out(task, _why(error))
            return (None,) * len(texts)

    async def _call_own(self, request: Mapping[str, Any], limits: _Limits) -> Any:
        async with self._own_turn:
            return _result((await self._own.call(request, limits))[0])

    def _rewards(self, scored: GroupVerdict) -> Verdicts:
        _check_own(scored.forgery)
        self.counters.scorer_errors += scored.scorer_errors
        return tuple(scored.rewards)

    def _pose_request(self, tasks: Sequence[Task]) -> dict[str, Any]:
        return {
            "op": "pose",
            "tasks": [_task_values(task) for task in tasks],
            "answers": [_rule_of(self._run, task).to_values() for task in tasks],
            "prompt_chars_max": self._run.limits.prompt_chars_max,
            "text_chars_max": self._run.limits.text_chars_max,
            "run_s": (OWN_BATCH_LIMITS.cpu_s, OWN_BATCH_LIMITS.wall_s),
        }

    def _score_request(
        self,
        tasks: Sequence[Task],
        texts: Sequence[Sequence[Said]],
        rule: ScoreRule | None = None,
    ) -> dict[str, Any]:
        return {
            "op": "score",
            "tasks": [_task_values(task) for task in tasks],
            "texts": [list(group) for group in texts],
            "answers": [_rule_of(self._run, task).to_values() for task in tasks],
            "rule": rule or self._run.reward,
            "enough_s": OWN_ENOUGH_S,
            "foreign": False,
            "run_s": (self._run_s, self._limits.wall_s),  # CPU and wall seconds of each group
        }
