"""The node's own judge: prompts and rewards from tasks, never from what a sender says.

`ProcessVerifier` is the production one: strangers' text is scored in a child process under limits
of time and memory, apart from the child that scores the node's own work. `InlineVerifier` computes
right where it is called, for simulations and experiments with environments that are trusted.
"""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import trio
import trio.abc

from node.child_environment import child_environ
from node.config import NodeConfig, RunConfig
from node.tasks.scoring import GroupScore, PosedProblem, pose, score_group
from node.tasks.stream import assigned_task, sample_tasks
from node.tasks.verifier_worker import FRAME_BYTES_MAX, encode
from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError
from swarm.rollouts import RolloutGroup, Task

START_TIMEOUT_S = 60.0  # imports on a busy machine
OWN_BATCH_TIMEOUT_S = 60.0  # for a whole batch of own work, before it is tried group by group
_SELF_DESTRUCTION_S = 10.0  # after its limit, a worker that nobody killed ends by itself
_RECEIVE_BYTES = 65_536


class Verifier(Protocol):
    """Judges own and foreign work by the run's rules."""

    async def verify(
        self, group: RolloutGroup, task: Task | None = None
    ) -> tuple[str, tuple[float, ...]]:
        """The prompt and the rewards of a foreign group. `task`: what its producer was given by a
        lease; None: the one of its own stream.

        Raises:
            RemoteProtocolError: it is not its producer's task at that index (UNASSIGNED_TASK), a
                text is over the run's limit (OVERSIZE), or it took too much time or memory or
                made the environment fail (UNVERIFIABLE).
            ChildFailed: it could not be looked at, through our own fault.
        """
        ...

    async def problems(self, tasks: Sequence[Task]) -> list[PosedProblem]:
        """What own tasks ask, in their order.

        Raises:
            ConfigError: the run's parameters make no problem.
            ChildFailed: the worker ended; it may be tried again.
        """
        ...

    async def score(
        self, tasks: Sequence[Task], texts: Sequence[Sequence[str]]
    ) -> list[tuple[float, ...]]:
        """Rewards of own completions, for each task in its order.

        Raises:
            As `problems`.
        """
        ...


@dataclass(slots=True)
class VerifierCounters:
    """Since the start; read by the node's status."""

    groups: int = 0  # foreign ones that were scored
    scorer_errors: int = 0  # texts on which a scorer failed; they were worth 0
    timeouts: int = 0  # calls that ran out of time
    starts: int = 0  # of worker processes; more than two means that some were lost


def check_assignment(run: RunConfig, group: RolloutGroup, task: Task | None = None) -> None:
    """Whether a foreign group's task and texts are what the run allows its producer; `task` is the
    one that it was given by a lease, None: that of its own stream.

    Raises:
        RemoteProtocolError: they are not.
    """
    expected = task or assigned_task(run, group.producer, group.task.index)
    if group.task != expected:
        raise RemoteProtocolError(
            Reject.UNASSIGNED_TASK, f"not the task of {group.producer} at {group.task.index}"
        )
    longest = max((len(completion.text) for completion in group.completions), default=0)
    if longest > run.limits.text_chars_max:
        raise RemoteProtocolError(Reject.OVERSIZE, f"a completion of {longest} characters")


class InlineVerifier:
    """Verifies in the calling task, without limits. `counters` are the production one's."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self.counters = VerifierCounters()

    async def verify(
        self, group: RolloutGroup, task: Task | None = None
    ) -> tuple[str, tuple[float, ...]]:
        """See `Verifier.verify`."""
        await trio.lowlevel.checkpoint()
        check_assignment(self._run, group, task)
        try:
            scored = self._score(group.task, [completion.text for completion in group.completions])
        except ConfigError as error:
            raise RemoteProtocolError(Reject.UNVERIFIABLE, str(error)) from None
        self.counters.groups += 1
        return scored.prompt, scored.rewards

    async def problems(self, tasks: Sequence[Task]) -> list[PosedProblem]:
        """See `Verifier.problems`."""
        await trio.lowlevel.checkpoint()
        return [pose(task, self._run.limits.prompt_chars_max) for task in tasks]

    async def score(
        self, tasks: Sequence[Task], texts: Sequence[Sequence[str]]
    ) -> list[tuple[float, ...]]:
        """See `Verifier.score`."""
        await trio.lowlevel.checkpoint()
        return [self._score(*group).rewards for group in zip(tasks, texts, strict=True)]

    def _score(self, task: Task, texts: Sequence[str]) -> GroupScore:
        scored = score_group(task, texts, self._run.reward)
        self.counters.scorer_errors += scored.scorer_errors
        return scored


class _OutOfTime(Exception):
    """A call to a worker ran into its time limit; the worker is gone."""


class _NotStarted(ChildFailed):
    """No worker came up: nobody's text had a part in that."""


class _WrongSettings(ConfigError):
    """A worker refused the run's settings before it saw anybody's text."""


class _Worker:
    """One child process, started when needed, killed when late. One call at a time, others wait."""

    def __init__(self, prepare: Mapping[str, Any], counters: VerifierCounters) -> None:
        self._prepare = prepare
        self._counters = counters
        self._lock = trio.Lock()
        self._process: trio.Process | None = None

    async def call(self, request: Mapping[str, Any], time_limit_s: float) -> Any:
        """The result of one request. The limit holds for the work, not for a start before it.

        Raises:
            _OutOfTime: killed at the limit; the next call starts another worker.
            ConfigError: the worker says that the run's settings are wrong.
            ChildFailed: it failed or ended.
        """
        async with self._lock:
            if self._process is not None and self._process.poll() is not None:
                await self.close()  # it ended while it had nothing to do: nobody's text did that
            if self._process is None:
                await self._start()
            return await self._exchange(request, time_limit_s)

    async def close(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            for pipe in _pipes(process):
                await pipe.aclose()

    async def _start(self) -> None:
        try:
            await self._start_process()
            await self._exchange(self._prepare, START_TIMEOUT_S)
        except _OutOfTime:
            raise _NotStarted(f"no verifier started within {START_TIMEOUT_S:.0f} s") from None
        except ConfigError as error:
            await self.close()
            raise _WrongSettings(str(error)) from None
        except (ChildFailed, OSError) as error:
            await self.close()
            raise _NotStarted(str(error)) from error
        except BaseException:
            await self.close()
            raise

    async def _start_process(self) -> None:
        self._process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "node.tasks.verifier_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_worker_environ(),
            start_new_session=True,  # Ctrl-C in the terminal is the node's to handle
        )
        self._counters.starts += 1

    async def _exchange(self, request: Mapping[str, Any], time_limit_s: float) -> Any:
        assert self._process is not None
        frame = encode({**request, "time_limit_s": time_limit_s + _SELF_DESTRUCTION_S})
        line = b""
        try:
            with trio.move_on_after(time_limit_s) as scope:
                line = await _ask(self._process, frame)
        finally:
            if not line.endswith(b"\n"):  # cancelled, late or dead: its pipes are of no more use
                await self.close()
        if scope.cancelled_caught:
            self._counters.timeouts += 1
            raise _OutOfTime
        if not line:
            raise ChildFailed("a verifier process ended")
        return _result(json.loads(line))


def _pipes(process: trio.Process) -> tuple[trio.abc.SendStream, trio.abc.ReceiveStream]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


async def _ask(process: trio.Process, frame: bytes) -> bytes:
    """The answer's line; empty if the process ended instead."""
    stdin, stdout = _pipes(process)
    answer = bytearray()
    try:
        await stdin.send_all(frame)
        while not answer.endswith(b"\n"):
            part = await stdout.receive_some(_RECEIVE_BYTES)
            if not part or len(answer) + len(part) > FRAME_BYTES_MAX:
                return b""
            answer += part
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return b""
    return bytes(answer)


def _result(answer: Mapping[str, Any]) -> Any:
    if "config" in answer:
        raise ConfigError(answer["config"])
    if "failed" in answer:
        raise ChildFailed(f"a verifier failed: {answer['failed']}")
    return answer["ok"]


def _worker_environ() -> dict[str, str]:
    """Ours but for secrets, our import path, one thread for libraries that would take all cores."""
    return {
        **child_environ(),
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


class ProcessVerifier:
    """Verifies in child processes; see the module. Make one with `open`."""

    def __init__(self, config: NodeConfig) -> None:
        self._run = config.run
        self._time_limit_s = config.verify_timeout_s
        self.counters = VerifierCounters()
        prepare = {
            **self._pose_request(sample_tasks(self._run)),
            "op": "prepare",
            "memory_bytes_max": config.verify_memory_bytes_max,
        }
        self._own = _Worker(prepare, self.counters)
        self._foreign = _Worker(prepare, self.counters)

    @classmethod
    @asynccontextmanager
    async def open(cls, config: NodeConfig) -> AsyncIterator["ProcessVerifier"]:
        """A verifier whose children end with the block. They start at their first use."""
        verifier = cls(config)
        try:
            yield verifier
        finally:
            await verifier._own.close()
            await verifier._foreign.close()

    async def verify(
        self, group: RolloutGroup, task: Task | None = None
    ) -> tuple[str, tuple[float, ...]]:
        """See `Verifier.verify`."""
        check_assignment(self._run, group, task)
        request = self._score_request(
            [group.task], [[completion.text for completion in group.completions]]
        )
        try:
            scored = (await self._foreign.call(request, self._time_limit_s))[0]
        except _OutOfTime:
            raise RemoteProtocolError(
                Reject.UNVERIFIABLE, f"not scored within {self._time_limit_s:g} s"
            ) from None
        except (_NotStarted, _WrongSettings) as error:
            raise ChildFailed(str(error)) from error
        except (ChildFailed, ConfigError) as error:  # it was this text that the worker was at
            raise RemoteProtocolError(Reject.UNVERIFIABLE, str(error)) from None
        self.counters.groups += 1
        return scored[0], self._rewards(scored)

    async def problems(self, tasks: Sequence[Task]) -> list[PosedProblem]:
        """See `Verifier.problems`."""
        try:
            posed = await self._own.call(self._pose_request(tasks), OWN_BATCH_TIMEOUT_S)
        except _OutOfTime:
            raise ChildFailed(f"no problems within {OWN_BATCH_TIMEOUT_S:.0f} s") from None
        return [PosedProblem(*problem) for problem in posed]

    async def score(
        self, tasks: Sequence[Task], texts: Sequence[Sequence[str]]
    ) -> list[tuple[float, ...]]:
        """See `Verifier.score`. A group that runs out of time when it is alone is worth 0."""
        try:
            scored = await self._own.call(self._score_request(tasks, texts), OWN_BATCH_TIMEOUT_S)
        except _OutOfTime:
            return [await self._score_alone(*group) for group in zip(tasks, texts, strict=True)]
        return [self._rewards(group) for group in scored]

    async def _score_alone(self, task: Task, texts: Sequence[str]) -> tuple[float, ...]:
        try:
            request = self._score_request([task], [texts])
            return self._rewards((await self._own.call(request, self._time_limit_s))[0])
        except _OutOfTime:
            return (0.0,) * len(texts)

    def _rewards(self, scored: Sequence[Any]) -> tuple[float, ...]:
        _, rewards, scorer_errors = scored
        self.counters.scorer_errors += scorer_errors
        return tuple(rewards)

    def _pose_request(self, tasks: Sequence[Task]) -> dict[str, Any]:
        return {
            "op": "pose",
            "tasks": [astuple(task) for task in tasks],
            "prompt_chars_max": self._run.limits.prompt_chars_max,
        }

    def _score_request(
        self, tasks: Sequence[Task], texts: Sequence[Sequence[str]]
    ) -> dict[str, Any]:
        return {
            "op": "score",
            "tasks": [astuple(task) for task in tasks],
            "texts": [list(group) for group in texts],
            "rule": self._run.reward,
        }
