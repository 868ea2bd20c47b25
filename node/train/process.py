"""The trainer from the node's side, which is its rollout engine too.

`TrainerProcess` keeps torch out of the node's process, so that its event loop answers peers while
training runs. `InProcessTrainer` computes in the calling thread, for experiments with many nodes in
one process. Both call operations of `trainer_worker.TrainerCore` by name.

A generation is made of segments, each a request of its own, so weights can be loaded in the middle
of one."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import trio

from node.interfaces.engine import (
    Capabilities,
    Context,
    Engine,
    EngineInfo,
    Outcome,
    Request,
    Sampling,
)
from node.interfaces.trainer import PolicyInfo, TrainingGroup, TrainReport, check_scorable, error_of
from node.interfaces.trainer_spec import Precision, TrainerSpec
from node.methods.drafts import Draft
from node.methods.generation import Speculative
from node.system.child_process import NUMBER, ChildChannel, encode
from node.train import frames
from node.train.ranks import Ranks
from swarm.errors import ChildFailed, ConfigError, LocalProtocolError
from swarm.rollouts import Completion

LOG_BYTES_MAX = 1_048_576  # of the child's standard error; then the file is begun anew
LOG_NAME = "trainer.log"
WORKER = "node.train.trainer_worker"
SHARDED_WORKER = "node.train.sharded_worker"
SEGMENT_STEPS = 16  # tokens of each row in one segment of a generation
STOP_TIMEOUT_S = 10.0  # for a polite end, before the child is killed
_WRITE_TIMEOUT_S = 20.0  # a cancelled call may still finish writing its request for this long
T = TypeVar("T")


class TrainerClient(Engine):
    """Trainer and rollout engine by the operations of a `TrainerCore`."""

    capabilities = Capabilities(
        requests=True,
        beginnings=True,
        records=frozenset(("entropies", "runners_up", "hidden")),
        noise=True,
        turns=True,
        drafts=True,
    )

    def __init__(self) -> None:
        self.maker = EngineInfo("torch")  # its precision is known once it has started
        self._generating = trio.Lock()
        self._session = 0  # of the last generation

    async def _call(self, op: str, *arguments: Any) -> Any:
        """The result of one operation.

        Raises:
            ConfigError: something configured is wrong.
            ChildFailed: out of memory or a crash.
        """
        raise NotImplementedError

    async def _leave(self, session: int) -> None:
        """End a generation that nobody waits for."""
        raise NotImplementedError

    async def info(self) -> PolicyInfo:
        info: PolicyInfo = await self._call("info")
        return info

    async def sample(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, noise: float = 0.0
    ) -> list[Outcome]:
        """Calls wait for each other."""
        self.check_requests(requests, sampling, noise)
        return await self._sampled("requests", requests, sampling, seed, noise)

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        outcomes = await self._sampled("turns", contexts, sampling, seed)
        return [each.completions[0] for each in outcomes]

    async def redraft(
        self, drafts: Sequence[Draft], set_to: Speculative, sampling: Sampling, seed: int
    ) -> list[Completion]:
        outcomes = await self._sampled("drafts", drafts, set_to, sampling, seed)
        return [each.completions[0] for each in outcomes]

    async def _sampled(self, kind: str, *arguments: Any) -> list[Outcome]:
        async with self._generating:
            self._session += 1
            session, outcomes = self._session, None
            try:
                await self._call("begin", session, kind, *arguments)
                while outcomes is None:
                    outcomes = await self._call("advance", session, SEGMENT_STEPS)
            except BaseException:
                await self._leave(session)
                raise
        return list(outcomes)

    async def load(self, weights: Path, policy_version: int) -> None:
        """For weights from elsewhere: what this trainer learns, it samples with at once."""
        try:
            await self._call("load", weights, policy_version)
        except ConfigError as error:  # weights are no configuration
            raise ChildFailed(f"trainer, load: {error}") from error

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        report: TrainReport = await self._call("train", groups)
        return report

    async def forward_backward(self, groups: Sequence[TrainingGroup], loss: Any = None) -> float:
        """Add the gradient of a batch's loss to that of the batches before it, and return the loss.
        `loss`: as in settings; None: as before."""
        return float(await self._call("forward_backward", groups, loss))

    async def optim_step(self, learning_rate: float | None = None) -> TrainReport:
        """Update by the gradient so far; None: at the trainer's own learning rate."""
        report: TrainReport = await self._call("optim_step", learning_rate)
        return report

    async def resume(self, directory: Path) -> None:
        """Load all that `save` wrote, version and momentum included. Errors as `roll_back`."""
        await self._call("resume", directory)

    async def score(self, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]]:
        """Columns under the loaded weights, see `node.train.rescoring`. LocalProtocolError: a group
        without `own_tokens`."""
        check_scorable(groups)
        return [list(map(tuple, group)) for group in await self._call("score", groups)]

    async def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-probs of rows of tokens, all of one length, under the loaded weights: of each
        token but the first, given those before it."""
        return list(map(list, await self._call("logprobs", rows)))

    async def prompt_logprobs(self, prompts: Sequence[str]) -> list[tuple[list[str], list[float]]]:
        found = await self._call("prompt_logprobs", prompts)
        return [(list(texts), list(told)) for texts, told in found]

    async def features(self, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]]:
        return [list(map(tuple, group)) for group in await self._call("features", groups)]

    async def save(self, directory: Path) -> None:
        await self._call("save", directory)

    async def digests(self) -> dict[str, str]:
        """The SHA-256 of each trained weight, by name."""
        return dict(await self._call("digests"))

    async def origin(self) -> Mapping[str, Any]:
        """`spec`, by which another trainer computes the same bits, and `facts`: what else decides
        them, by name."""
        return dict(await self._call("origin"))

    async def roll_back(self, directory: Path) -> int:
        return int(await self._call("roll_back", directory))

    async def slow_down(self, rate_share: float) -> None:
        await self._call("slow_down", rate_share)

    async def export(self, directory: Path, precision: Precision = "float32") -> None:
        await self._call("export", directory, precision)

    async def export_whole(self, directory: Path, precision: Precision = "float32") -> None:
        await self._call("export_whole", directory, precision)

    async def lend(self, directory: Path) -> str | None:
        """Lend a fresh export to an engine on the same device, see `node.policies.ipc_weights`.
        Returns why its files have to be read instead, or None."""
        why_not: str | None = await self._call("lend", directory)
        return why_not

    async def release(self) -> None:
        """Give a GPU back the memory that training needs no more."""
        await self._call("release")

    async def memory_bytes(self) -> int:
        return int(await self._call("memory_bytes"))


class TrainerProcess(TrainerClient):
    """A trainer in a child process, one request at a time. A cancelled call returns at once, and
    may still take effect in the child. A dead child stays dead until `start` is called again."""

    def __init__(self, spec: TrainerSpec, data_directory: Path, ranks: Ranks | None = None) -> None:
        """With `ranks` the child trains together with those that torchrun started beside this
        process, which is rank 0."""
        super().__init__()
        self._spec = spec
        self._module = WORKER if ranks is None else SHARDED_WORKER
        self._log = data_directory / LOG_NAME
        self._lock = trio.Lock()
        self._channel: ChildChannel | None = None
        self._left: int | None = None  # sessions up to this one are nobody's any more

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._channel.process.returncode is None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before the first start."""
        return self._channel.process.pid if self._channel is not None else None

    async def start(self, checkpoint: Path | None = None) -> None:
        """Start (again) from the model, or from a checkpoint that `save` wrote.

        Raises:
            ConfigError: the model does not load or does not fit in memory.
            ChildFailed: the child ended while loading.
        """
        async with self._lock:
            await self._close()
            self._channel = await _spawn(self._module, self._log)
            try:
                opened = (self._spec.to_record(), checkpoint)
                precision: str = await _called(self._channel, "open", opened)
            except BaseException:
                await self._close()
                raise
            self.maker = EngineInfo("torch", precision)

    async def close(self) -> None:
        """End the child, also in the middle of a request."""
        channel = self._channel
        if channel is not None and channel.process.returncode is None:
            await channel.close(STOP_TIMEOUT_S)

    async def _call(self, op: str, *arguments: Any) -> Any:
        async with self._lock:
            if self._channel is None:
                raise LocalProtocolError(f"trainer, {op}: called before start")
            if not self.alive:
                raise ChildFailed(await self._channel.obituary())
            try:
                return await _called(self._channel, op, arguments)
            finally:
                await self._end_session()

    async def _leave(self, session: int) -> None:
        """Have the child end a session at once or after the present call, without waiting."""
        self._left = session
        with suppress(trio.WouldBlock):
            self._lock.acquire_nowait()
            try:
                await self._end_session()
            finally:
                self._lock.release()

    async def _end_session(self) -> None:
        """With the lock held: end the sessions that were left."""
        session, self._left = self._left, None
        if session is not None and self._channel is not None and self.alive:
            frame = _request(self._channel.next_number, "end", (session,))
            with suppress(ChildFailed), trio.move_on_after(_WRITE_TIMEOUT_S, shield=True):
                await self._channel.send(frame)  # its answer is the next call's to drop

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.close(STOP_TIMEOUT_S)


def _request(number: int, op: str, arguments: Sequence[Any]) -> bytes:
    return encode({"op": op, "arguments": frames.pack(arguments), NUMBER: number})


async def _called(channel: ChildChannel, op: str, arguments: Sequence[Any]) -> Any:
    """The result of one request. Cancelling does not stop it from being written."""
    frame = await trio.to_thread.run_sync(_request, channel.next_number, op, arguments)
    await channel.settle()
    with trio.move_on_after(_WRITE_TIMEOUT_S, shield=True) as patience:
        await channel.send(frame)
    if patience.cancelled_caught:
        raise ChildFailed("the trainer process took no request and was ended")
    answer = await channel.answer()
    if "error" not in answer:
        return await trio.to_thread.run_sync(frames.unpack, answer["ok"])
    error = error_of(answer["error"], answer["message"])
    if isinstance(error, ChildFailed):
        error = ChildFailed(f"trainer, {op}: {error}")
        error.add_note(answer["traceback"])
    raise error


@asynccontextmanager
async def open_trainer(
    spec: TrainerSpec,
    data_directory: Path,
    checkpoint: Path | None = None,
    ranks: Ranks | None = None,
) -> AsyncIterator[TrainerProcess]:
    """A started trainer process that ends with the block."""
    trainer = TrainerProcess(spec, data_directory, ranks)
    try:
        await trainer.start(checkpoint)
        yield trainer
    finally:
        await trainer.close()


class InProcessTrainer(TrainerClient):
    """The same without a child."""

    def __init__(self, spec: TrainerSpec, checkpoint: Path | None = None) -> None:
        from node.train.trainer_worker import TrainerCore  # torch stays out of the node's process

        super().__init__()
        self._core = TrainerCore(spec, checkpoint)
        self.maker = EngineInfo("torch", self._core.policy.precision)

    async def _call(self, op: str, *arguments: Any) -> Any:
        """Errors of torch become `ChildFailed`, as in the process."""
        await trio.lowlevel.checkpoint()
        try:
            return self.compute(op, *arguments)
        except (MemoryError, RuntimeError) as error:
            raise ChildFailed(f"trainer: {type(error).__name__}: {error}") from error

    def compute(self, op: str, *arguments: Any) -> Any:
        """The result of one operation, synchronously."""
        return getattr(self._core, op)(*arguments)

    async def _leave(self, session: int) -> None:
        self._core.end(session)


async def _spawn(module: str, log: Path) -> ChildChannel:
    with await trio.to_thread.run_sync(_open_log, log) as stderr:
        return await ChildChannel.start("trainer", module, stderr)


def _open_log(log: Path) -> BinaryIO:
    """For appending; begun anew beyond `LOG_BYTES_MAX`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    fresh = not log.exists() or log.stat().st_size > LOG_BYTES_MAX
    return log.open("wb" if fresh else "ab")
