"""`swarm-node sft`: supervised fine-tuning on a file of worked answers, before a run begins.

The trainer is that of a run. At one update a batch, its clipped surrogate of an answer with
advantage 1 has the gradient of -log p, averaged over the batch's answer tokens.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from node.config import NodeConfig
from node.envs.data.worked import Worked
from node.hosting.fetched_models import DONE_FILE
from node.hosting.models import resolve_model
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.losses import OBJECTIVES
from node.observe.text_format import amount, counted, duration
from node.policies.checkpoint import sync_directory
from node.train.rows import Encoder
from node.train.trainer_worker import TrainerCore
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Completion, FinishReason
from swarm.storage import make_shared, write_whole
from swarm.texts import first_line

WORK: Final = "sft"  # in the directory to write: arguments and checkpoint, apart from the model
ARGUMENTS: Final = "arguments.json"
CHECKPOINT: Final = "epoch-"  # and the number of epochs that are done
HELD_OUT_MAX: Final = 512  # answers; ours: they are measured one by one after each epoch
LINE_INTERVAL_S: Final = 5.0  # of training between lines about progress

Groups = Sequence[TrainingGroup]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The directory to write, and how often and in which batches each answer is trained on."""

    out: Path
    epochs: int
    batch: int
    held_out: float  # share of the answers

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("batch", self.batch)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: must be at least 1")
        if not 0 <= self.held_out <= 0.5:
            raise ConfigError(f"--held-out {self.held_out}: must be from 0 to 0.5")

    @property
    def work(self) -> Path:
        return self.out / WORK

    @property
    def is_over(self) -> bool:
        return (self.out / DONE_FILE).exists()

    def newest(self) -> tuple[int, Path | None]:
        """The epochs that are done, and their checkpoint; None: there is none."""
        found = self.work.glob(f"{CHECKPOINT}*")
        done = max((int(path.name.removeprefix(CHECKPOINT)) for path in found), default=0)
        return done, self.work / f"{CHECKPOINT}{done}" if done else None


def fine_tune(config: NodeConfig, plan: Plan, answers: Sequence[Worked], say: Say) -> None:
    """Train and write the model; go on after the last whole epoch of an earlier call.

    Raises:
        ConfigError: the directory is another's, or was begun with other arguments.
        ChildFailed: out of memory, or a loss that is not finite.
    """
    out = plan.out
    try:
        is_ours = (plan.work / ARGUMENTS).is_file()
        if out.exists() and not is_ours and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out} is there, and not of sft; name a new directory")
        model = resolve_model(config, say)
        plan.work.mkdir(parents=True, exist_ok=True)
        with _alone(plan):
            _begin(plan, _facts(config, plan, model, answers))
            if plan.is_over:
                say(f"{out}: finished before; name another --out to train again")
            else:
                _train(config, plan, model, answers, say)
    except (MemoryError, RuntimeError) as error:
        raise ChildFailed(f"sft: {type(error).__name__}: {first_line(error)}") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror}") from None


@contextmanager
def _alone(plan: Plan) -> Iterator[None]:
    """Lock the directory; ConfigError: another process trains into it."""
    lock = os.open(plan.work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {plan.out}: another sft is at work on it") from None
        yield
    finally:
        os.close(lock)


def _facts(config: NodeConfig, plan: Plan, model: str, answers: Sequence[Worked]) -> dict[str, Any]:
    """All that decides the weights, by the flags' names."""
    data = hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]
    names = ("learning_rate", "seed", "threads", "context_tokens_max", "lora_rank")
    told = {"epochs": plan.epochs, "batch": plan.batch, "held_out": plan.held_out}
    return {"data": data, "model": model, **told} | {name: getattr(config, name) for name in names}


def _begin(plan: Plan, facts: Mapping[str, Any]) -> None:
    """Write the arguments, which hold from the first checkpoint on."""
    file = plan.work / ARGUMENTS
    if plan.is_over or plan.newest()[0]:
        before = json.loads(file.read_text())
        for name in (name for name in facts if facts[name] != before.get(name)):
            raise ConfigError(
                f"--out {plan.out} was begun with {name} = {before.get(name)}, not {facts[name]}; "
                "give that, or another --out"
            )
    write_whole(file, json.dumps(facts))


def _train(config: NodeConfig, plan: Plan, model: str, answers: Sequence[Worked], say: Say) -> None:
    spec = TrainerSpec(
        model,
        learning_rate=config.learning_rate,
        step_guard=False,  # all answers are right, and the first steps may go far
        context_tokens_max=config.context_tokens_max,
        lora_rank=config.lora_rank,
        seed=config.seed,
        threads=config.threads,
        template_rules=config.run.template_rules,
    )
    done, saved = plan.newest()
    core = TrainerCore(spec, saved)
    fitting = _fitting(core, answers, say)
    Random(config.seed).shuffle(fitting)
    count = min(round(plan.held_out * len(fitting)), HELD_OUT_MAX)
    held_out, trained = fitting[:count], fitting[count:]
    say(f"{len(trained)} answers to train on, {count} held out; {core.trainer.suited}")
    say(f"{counted(done, 'epochs')} done before{_held_out_loss(core, held_out)}")
    for epoch in range(done, plan.epochs):
        order = Random(f"{config.seed}/{epoch}").sample(trained, len(trained))
        if not _epoch(core, plan, order, epoch, say):
            _stop(core, plan)
        _save(core, plan, epoch + 1)
        say(f"epoch {epoch + 1} of {plan.epochs} saved{_held_out_loss(core, held_out)}")
    _finish(core, plan)
    say(f"{plan.out}: the model; swarm-node join --model {plan.out} goes on from it")


def _fitting(core: TrainerCore, answers: Sequence[Worked], say: Say) -> list[TrainingGroup]:
    """The answers that the trainer takes; ConfigError: none."""
    encoder = Encoder(core.policy, core.spec, core.plan.row_tokens_max, OBJECTIVES["sapo"])
    groups = [
        TrainingGroup(
            prompt, (Completion(answer, (), (), FinishReason.STOP, 0),), (1.0,), own_tokens=False
        )
        for prompt, answer in answers
    ]
    fitting = [group for group in groups if encoder.rows(group)[1] != [None]]
    left_out = (
        f"{len(groups) - len(fitting)} of {len(groups)} answers, with their questions, are longer "
        f"than the context of {core.policy.context_tokens} tokens, or than memory allows"
    )
    if not fitting:
        raise ConfigError(left_out)
    if len(fitting) < len(groups):
        say(f"{left_out}; left out")
    return fitting


def _epoch(core: TrainerCore, plan: Plan, order: Groups, epoch: int, say: Say) -> bool:
    """Train once on each answer; False: a loss was not finite, and that step not taken."""
    each = -(-len(order) // plan.batch)
    total, spent_s = each * plan.epochs, 0.0
    loss, tokens, seconds = 0.0, 0, 0.0  # since the last line
    for place in range(each):
        step = epoch * each + place
        core.slow_down(1.0 - step / total)  # to zero in a line; ours
        report = core.train(order[place * plan.batch : (place + 1) * plan.batch])
        if not report.trained_tokens:
            return False
        loss -= report.foreign_logprob * report.trained_tokens
        tokens += report.trained_tokens
        seconds += report.seconds
        spent_s += report.seconds
        if seconds >= LINE_INTERVAL_S or place + 1 == each:
            left_s = spent_s / (place + 1) * (total - step - 1)
            say(
                f"step {step + 1} of {total}: loss {loss / tokens:.4f}, "
                f"{amount(tokens / seconds)} answer tokens/s, {duration(left_s)} left"
            )
            loss, tokens, seconds = 0.0, 0, 0.0
    return True


def _held_out_loss(core: TrainerCore, groups: Groups) -> str:
    if not groups:
        return ""
    found = [value for group in core.trainer.logprobs(groups) for row in group for value in row]
    return f": held-out loss {-sum(found) / len(found):.4f}"


def _save(core: TrainerCore, plan: Plan, done: int) -> None:
    """Replace the checkpoint."""
    _, before = plan.newest()
    made = _empty(plan.work / "partial")
    core.save(made)
    made.rename(plan.work / f"{CHECKPOINT}{done}")
    sync_directory(plan.work)
    if before is not None:
        shutil.rmtree(before)


def _finish(core: TrainerCore, plan: Plan) -> None:
    """Write the model, its `DONE_FILE` last, and remove the checkpoint."""
    made = _empty(plan.work / "model")
    core.export_whole(made)
    make_shared(made)
    for path in sorted(made.iterdir(), key=lambda path: path.name == DONE_FILE):
        path.rename(plan.out / path.name)
    for old in filter(Path.is_dir, list(plan.work.iterdir())):
        shutil.rmtree(old)


def _stop(core: TrainerCore, plan: Plan) -> None:
    """End after a loss that is not finite, with the model of the last whole epoch."""
    done, saved = plan.newest()
    kept = "nothing was saved before"
    if saved is not None:
        core.trainer.resume(saved)
        _finish(core, plan)
        kept = f"{plan.out} holds the model after epoch {done}"
    raise ChildFailed(f"epoch {done + 1}: the loss is not finite; {kept}; lower --learning-rate")


def _empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory
