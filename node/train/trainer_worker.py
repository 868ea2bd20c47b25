"""The trainer process: `python -m node.train.trainer_worker`, one request at a time over its pipes.

Answers leave on the standard output of the start; prints of libraries go to standard error. A
thread ends the process when its input ends, also during a computation. (The kernel's parent-death
signal follows the thread that started the child, which in trio comes and goes.)"""

import json
import os
import platform
import queue
import re
import select
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from node.engines.drafts import DraftGeneration
from node.engines.torch_engine import Generation, TurnGeneration
from node.interfaces.adapter_files import Held, is_adapter
from node.interfaces.engine import Outcome
from node.interfaces.trainer import PolicyInfo, TrainingGroup, TrainReport, error_name
from node.interfaces.trainer_spec import Device, Precision, TrainerSpec
from node.policies import checkpoint, frozen, ipc_weights
from node.policies.policy import Policy, load_policy, pick_device
from node.system.child_process import HEADER, NUMBER, body_length, decode, encode
from node.system.extras import install_line
from node.system.machine import THREADS_DEFAULT_MAX, give_back_at_once, processor
from node.train import frames, memory, rescoring, self_check
from node.train.trainer import GroupTrainer
from swarm.errors import ChildFailed, ConfigError, LocalProtocolError
from swarm.texts import first_line, printable

NICENESS: Final = 10  # the node's event loop comes first
SESSIONS_MAX: Final = 1  # generations begun and not ended; each may hold `CACHE_BYTES_MAX`
_PARENT_CHECK_S: Final = 1.0
_QUEUE_MAX: Final = 2
_STDIN: Final = 0
_PARENT: Final = os.getppid()


OPERATIONS: Final = frozenset(
    {
        *("advance", "begin", "end", "export", "export_whole", "info", "lend", "load", "logprobs"),
        *("memory_bytes", "release", "save", "score", "slow_down", "train", "roll_back"),
        *("features", "prompt_logprobs", "forward_backward", "optim_step", "resume"),
        *("digests", "origin"),
    }
)  # of `TrainerCore`, by request
GENERATIONS: Final[Mapping[str, type[Generation]]] = {
    "requests": Generation,
    "turns": TurnGeneration,
    "drafts": DraftGeneration,
}


class CannotGoOn(ChildFailed):
    """The state of this process is of no more use: it reports that and ends."""


class TrainerCore:
    """All operations of a trainer, synchronous: for the process and for the in-process variant."""

    def __init__(self, spec: TrainerSpec, saved: Path | None = None) -> None:
        """Load the model, then the checkpoint `saved` if there is one. Sets the process's number of
        torch threads: results are bit-equal only under the same number.

        Raises:
            ConfigError: the model does not load or fit, or the checkpoint is not of it.
        """
        self.spec = spec
        self._sessions: dict[int, Generation] = {}
        self.policy, self.trainer = self._open(saved)
        self._lender = ipc_weights.Lender(self.policy)

    def _open(self, saved: Path | None) -> tuple[Policy, GroupTrainer]:
        spec = self.spec
        torch.set_num_threads(threads(spec.threads))
        self.plan = memory.plan(spec)
        policy = opened(spec, spec.device)
        policy.compute_in(self.plan.computes_in.precision, keeps=not self.plan.recomputes)
        limits = (self.plan.micro_batch_tokens, self.plan.row_tokens_max)
        trainer = GroupTrainer(policy, spec, *limits, self.plan.recomputes)
        self_check.check(trainer)
        if saved is not None:
            trainer.resume(saved)
        return policy, trainer

    def info(self) -> PolicyInfo:
        return PolicyInfo(
            name=self.policy.name,
            parameters=self.policy.parameters,
            tokenizer=self.policy.fingerprint,
            policy_version=self.trainer.policy_version,
            context_tokens=self.policy.context_tokens,
            clipping_active=self.spec.updates_per_batch > 1,
            precision=self.policy.precision,
            adapted=self._adapted(),
            held_bytes=self.plan.held_bytes,
            device_bytes=memory.total_bytes(self.policy.device),
            learning_rate=self.trainer.suited.learning_rate,
            warm_up_updates=self.trainer.suited.warm_up_updates,
            rate_told=str(self.trainer.suited),
            precision_told=self.plan.computes_in.told,
            thoughts_told=self._thoughts_told(),
            arguments_told=self._arguments_told(),
        )

    def _thoughts_told(self) -> str:
        policy = self.policy
        if self.spec.thinking is not None or not policy.chat_template:
            return ""
        if not policy.template_renderer().takes.opens_thought:
            return ""
        return (
            f"model {policy.name}: its chat template opens a thought, and the run has no table "
            "[thinking]: a thought that is cut is read as an answer"
        )

    def _arguments_told(self) -> str:
        names: list[str] = list(json.loads(self.spec.template_rules.arguments))
        template = self.policy.chat_template or ""
        unread = [each for each in names if not re.search(rf"\b{re.escape(each)}\b", template)]
        if not unread:
            return ""
        named = printable(", ".join(unread), 200)
        return (
            f"model {self.policy.name}: its chat template does not read {named} of "
            "chat.arguments; they change nothing here"
        )

    def _adapted(self) -> str:
        if self.policy.adapter is None:
            return ""
        from node.policies import adapters  # brings PEFT in

        return adapters.described(self.policy)

    def begin(self, session: int, kind: str, *arguments: Any) -> None:
        """Begin a generation of `GENERATIONS`, under a number that the caller chooses.
        LocalProtocolError: `SESSIONS_MAX` others have not ended."""
        self._prepare_for(session)
        self._sessions[session] = GENERATIONS[kind](self.policy, *arguments)

    def _prepare_for(self, session: int) -> None:
        if len(self._sessions) >= SESSIONS_MAX:
            raise LocalProtocolError(f"generation {session}: {SESSIONS_MAX} others have not ended")

    def advance(self, session: int, steps: int) -> list[Outcome] | None:
        """Sample on for one segment. Returns the outcomes once the generation is over, else
        None. A generation that fails is over as well."""
        generation = self._sessions.pop(session, None)
        if generation is None:
            raise LocalProtocolError(f"generation {session} has not begun here, or is over")
        if not generation.done:
            generation.advance(steps, self.trainer.policy_version)
        if generation.done:
            return generation.outcomes()
        self._sessions[session] = generation
        return None

    def end(self, session: int) -> None:
        """End the generations up to this number."""
        for number in [number for number in self._sessions if number <= session]:
            del self._sessions[number]

    def load(self, weights: Path, policy_version: int) -> None:
        """Load a version. Generations that have begun go on with its weights; an adapter goes onto
        the model that was loaded at the start."""
        load_version(self.policy, weights, self.spec.lora_base)
        self.trainer.take_over(policy_version)
        self._weights_changed()

    def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self._weights_changed()  # before: training needs the memory
        self._lender.forget()
        return self.trainer.train(groups)

    def forward_backward(self, groups: Sequence[TrainingGroup], loss: Any) -> float:
        """One half of `train`, as `GroupTrainer` has it."""
        self._weights_changed()
        return self.trainer.forward_backward(groups, loss)

    def optim_step(self, learning_rate: float | None) -> TrainReport:
        self._weights_changed()
        self._lender.forget()
        return self.trainer.optim_step(learning_rate)

    def score(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        return rescoring.score(self.trainer, groups)

    def features(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        return self.trainer.features(groups)

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return rescoring.of_rows(self.policy, rows)

    def prompt_logprobs(self, prompts: Sequence[str]) -> list[tuple[list[str], list[float]]]:
        return rescoring.of_prompts(self.policy, prompts)

    def _weights_changed(self) -> None:
        for generation in self._sessions.values():
            generation.weights_changed()

    def save(self, directory: Path) -> None:
        self.trainer.save(directory)

    def resume(self, directory: Path) -> None:
        self._weights_changed()
        self.trainer.resume(directory)

    def digests(self) -> dict[str, str]:
        return checkpoint.digests(self.policy)

    def origin(self) -> dict[str, Any]:
        """The settings by which another trainer computes the same bits, and what else decides
        them."""
        policy, plan, count = self.policy, self.plan, torch.get_num_threads()
        spec = replace(
            self.spec,
            threads=count,
            precision=plan.computes_in.precision,
            micro_batch_tokens=plan.micro_batch_tokens,
            activation_checkpointing="on" if plan.recomputes else "off",
        )
        is_cpu = policy.device.type == "cpu"
        facts = {
            "precision": policy.precision,
            "threads": str(count),
            "processor": processor() if is_cpu else torch.cuda.get_device_name(policy.device),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "tokens of a micro-batch": str(plan.micro_batch_tokens),
            "tokens of a row at most": str(min(plan.row_tokens_max, policy.context_tokens)),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "swarm-node")},
        }
        return {"spec": spec.to_record(), "facts": facts}

    def roll_back(self, directory: Path) -> int:
        self._weights_changed()
        self.trainer.roll_back(directory)
        return self.trainer.policy_version

    def slow_down(self, rate_share: float) -> None:
        self.trainer.rate_share = rate_share

    def export(self, directory: Path, precision: Precision = "float32") -> None:
        checkpoint.export(directory, self.policy, precision)

    def export_whole(self, directory: Path, precision: Precision = "float32") -> None:
        checkpoint.export_whole(directory, self.policy, precision)

    def lend(self, directory: Path) -> str | None:
        return self._lender.lend(directory)

    def memory_bytes(self) -> int:
        return memory.resident_bytes()

    def release(self) -> None:
        """Give a GPU back the memory that the last step needs no more."""
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()


def load_version(policy: Policy, weights: Path, held: Held | None = None) -> None:
    """Load a version's directory, a whole model or an adapter, or change nothing. `held` as in
    `adapters.load`.

    Raises:
        ConfigError: it is damaged, or not for this policy.
    """
    if is_adapter(weights):
        from node.policies import adapters  # brings PEFT in

        adapters.load(policy, weights, held)
    elif policy.adapter is not None:
        raise ConfigError(f"{weights}: a whole model, and this policy takes adapters")
    else:
        policy.load_weights(weights)


def opened(spec: TrainerSpec, device: Device) -> Policy:
    """The policy that a trainer begins with, with its adapter if one is trained.

    Raises:
        ConfigError: the model does not load, or takes no such adapter.
    """
    if spec.adapter is None:
        return _loaded(spec, device)
    from node.policies import adapters  # brings PEFT in

    place, narrow = pick_device(device), spec.held != "float32"
    frozen.check(spec.held, place)
    if narrow and place.type == "cpu":  # whoever does so wants the memory
        give_back_at_once()
    policy = _loaded(spec, "cpu", narrow=narrow)
    adapters.attach(policy, spec.adapter, spec.seed, held=spec.held, device=place)
    return policy


def _loaded(spec: TrainerSpec, device: Device, *, narrow: bool = False) -> Policy:
    policy = load_policy(
        spec.model,
        device,
        spec.context_tokens_max,
        narrow=narrow,
        template_rules=spec.template_rules,
        thinking=spec.thinking,
    )
    policy.forward = spec.forward
    return policy


OpenCore = Callable[[TrainerSpec, Path | None], TrainerCore]


class _Server:
    """Turns request maps into answer maps."""

    def __init__(self, open_core: OpenCore) -> None:
        self.is_over = False
        self._open_core = open_core
        self._core: TrainerCore | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; an error is in it with its traceback."""
        try:
            result = self._result(request["op"], frames.unpack(request["arguments"]))
            return {NUMBER: request[NUMBER], "ok": frames.pack(result)}
        except Exception as error:  # noqa: BLE001 - boundary: reported to the parent, in full
            self.is_over = isinstance(error, CannotGoOn)
            return _failure(request, error)

    def _result(self, op: str, arguments: Sequence[Any]) -> Any:
        if op == "open":
            spec, saved = arguments
            self._core = self._open_core(TrainerSpec.from_record(spec), saved)
            return self._core.policy.precision
        if self._core is None:
            raise LocalProtocolError("the trainer process has loaded no model yet")
        if op not in OPERATIONS:
            raise LocalProtocolError(f"no operation of a trainer: {op}")
        return getattr(self._core, op)(*arguments)


def main(open_core: OpenCore = TrainerCore, on_end: Callable[[], None] = lambda: None) -> None:
    """Serve until standard input ends or a `stop` arrives. `on_end` is called before the end,
    perhaps by another thread."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(NICENESS)
    requests: queue.Queue[bytes] = queue.Queue(maxsize=_QUEUE_MAX)
    threading.Thread(target=_read_requests, args=(requests, on_end), daemon=True).start()
    server = _Server(open_core)
    while True:
        request = decode(requests.get())
        if request["op"] == "stop":
            on_end()
            _write(answers, {NUMBER: request[NUMBER], "ok": None})
            return
        _write(answers, server.answer(request))
        if server.is_over:
            os._exit(1)  # whatever else is under way waits for somebody who is gone


def _write(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(encode(message))
    answers.flush()


def _read_requests(requests: "queue.Queue[bytes]", on_end: Callable[[], None]) -> None:
    """Fill the queue; end the process when the pipe ends or the parent is another one."""
    try:
        while True:
            header = _read_exactly(HEADER.size)
            requests.put(_read_exactly(body_length(header)))
    except (EOFError, OSError, LocalProtocolError):
        try:
            on_end()
        finally:
            os._exit(0)


def _read_exactly(count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        while not select.select([_STDIN], [], [], _PARENT_CHECK_S)[0]:
            if os.getppid() != _PARENT:
                raise EOFError
        part = os.read(_STDIN, count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _failure(request: dict[str, Any], error: Exception) -> dict[str, Any]:
    detail = traceback.format_exc()
    sys.stderr.write(detail)
    sys.stderr.flush()
    is_ours = isinstance(error, ConfigError | ChildFailed)
    message = str(error) if is_ours else _described(error)
    name = error_name(error)
    if isinstance(error, ModuleNotFoundError):
        name = ConfigError.__name__
    return {NUMBER: request[NUMBER], "error": name, "message": message, "traceback": detail}


def _described(error: Exception) -> str:
    """One line about an error that is not ours."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed here: {install_line(error.name or '')}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory: {first_line(error, 300)}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return f"out of memory: {first_line(error, 300)}"
    return f"{type(error).__name__}: {first_line(error, 300)}"


def threads(wanted: int, processes: int = 1) -> int:
    """The number of torch's threads if so many processes compute on this machine."""
    return wanted or min(max(1, ((os.cpu_count() or 1) - 1) // processes), THREADS_DEFAULT_MAX)


if __name__ == "__main__":
    main()
