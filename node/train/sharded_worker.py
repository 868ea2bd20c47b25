"""A trainer of several ranks: rank 0's part beyond that of every trainer, and the others'.

Rank 0 has the whole model only while it samples, scores or writes, and gives it back before it
trains. So it writes what one process would write, and any number of ranks can resume it.

A rank that dies ends the trainer: the others end at their next common step, with one line. torchrun
starts again, and the learner resumes from its last checkpoint."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from node.interfaces.engine import Outcome
from node.interfaces.trainer import PolicyInfo, TrainingGroup, TrainReport
from node.interfaces.trainer_spec import Precision, TrainerSpec
from node.policies.policy import Policy, move
from node.train import frames, memory, self_check
from node.train.ranks import Ranks
from node.train.sharded_team import Team, line_of
from node.train.sharded_trainer import ShardedTrainer, release
from node.train.step_guard import StepGuard
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import NICENESS, CannotGoOn, TrainerCore, main, opened, threads
from swarm.command import EXIT_FAILED, EXIT_OK
from swarm.errors import ChildFailed, LocalProtocolError


class ShardedCore(TrainerCore):
    """Rank 0's trainer."""

    def __init__(self, spec: TrainerSpec, saved: Path | None, team: Team) -> None:
        """As `TrainerCore`.

        Raises:
            CannotGoOn: not all ranks came.
        """
        self._team = team
        self._is_whole = True  # whether `policy` has the weights as they are
        super().__init__(spec, saved)

    def _open(self, saved: Path | None) -> tuple[Policy, GroupTrainer]:
        """Load on the CPU what may fail on this rank alone; then have the others come."""
        self.plan = plan_of(self.spec, self._team.ranks)
        whole = opened(_held_whole(self.spec), "cpu")
        self._parameters = whole.parameters
        trainer = GroupTrainer(whole, self.spec, self.plan.micro_batch_tokens)
        self_check.check(trainer)
        if saved is not None:
            trainer.resume(saved)
        with self._common("load"):
            step_guard = trainer.step_guard.to_record()
            self._team.tell("load", spec=self.spec.to_record(), step_guard=step_guard)
            self._shares = open_shares(self.spec, self._team, self.plan)
            self._shares.step_guard = StepGuard.from_record(step_guard)
            self._shares.spread(trainer, moments=True)
        release(trainer)
        self._is_whole = False
        move(whole.model, self._shares.policy.device)
        whole.device = self._shares.policy.device
        whole.computes_in = self._shares.policy.computes_in
        version = trainer.policy_version
        limits = (self._shares.micro_batch_tokens, self._shares.row_tokens_max)
        trainer = GroupTrainer(whole, self.spec, *limits)
        trainer.policy_version = version
        return whole, trainer

    def info(self) -> PolicyInfo:
        suited = self._shares.suited  # by the shares: what is whole here may be released
        return replace(
            super().info(),
            parameters=self._parameters,
            learning_rate=suited.learning_rate,
            warm_up_updates=suited.warm_up_updates,
            rate_told=str(suited),
        )

    def _prepare_for(self, session: int) -> None:
        self._collect()
        super()._prepare_for(session)

    def advance(self, session: int, steps: int) -> list[Outcome] | None:
        self._collect()
        return super().advance(session, steps)

    def load(self, weights: Path, policy_version: int) -> None:
        self._collect()
        super().load(weights, policy_version)
        with self._common("load weights"):
            self._team.tell("spread")
            self._shares.spread(self.trainer, moments=False)

    def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        self._weights_changed()
        release(self.trainer)
        self._is_whole = False
        with self._common("train"):
            version = self.trainer.policy_version
            self._team.tell("train", frames.pack((groups, version)))
            self._shares.policy_version = version
            report = self._shares.train(groups)
        self.trainer.policy_version = report.policy_version
        return report

    def score(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        self._collect()
        return super().score(groups)

    def features(self, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
        self._collect()
        return super().features(groups)

    def prompt_logprobs(self, prompts: Sequence[str]) -> list[tuple[list[str], list[float]]]:
        self._collect()
        return super().prompt_logprobs(prompts)

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        self._collect()
        return super().logprobs(rows)

    def save(self, directory: Path) -> None:
        self._collect(moments=True)
        try:
            self.trainer.step_guard = self._shares.step_guard
            self.trainer.save(directory)
        finally:
            self.trainer.optimizer.state.clear()

    def roll_back(self, directory: Path) -> int:
        raise LocalProtocolError("a learner's trainer has no best policy to go back to")

    def slow_down(self, rate_share: float) -> None:
        raise LocalProtocolError("a learner's trainer keeps its rate")

    def export(self, directory: Path, precision: Precision = "float32") -> None:
        self._collect()
        super().export(directory, precision)

    def export_whole(self, directory: Path, precision: Precision = "float32") -> None:
        self._collect()
        super().export_whole(directory, precision)

    def lend(self, directory: Path) -> str | None:
        """Never lent: the next update frees the gathered weights."""
        return "the trainer is cut over several processes"

    def _collect(self, moments: bool = False) -> None:
        """Have the whole model here."""
        if self._is_whole and not moments:
            return
        with self._common("collect"):
            self._team.tell("collect", moments=moments)
            self._shares.collect(self.trainer, moments)
        self._is_whole = True

    @contextmanager
    def _common(self, what: str) -> Iterator[None]:
        """Within it all ranks do the same."""
        try:
            yield
        except ChildFailed as error:
            raise CannotGoOn(str(error)) from error
        except Exception as error:
            # boundary: wherever this rank stopped, the others wait for it; torch raises many kinds
            ranks = f"{self._team.ranks.size} ranks"
            raise CannotGoOn(
                f"{what} by {ranks}: one is gone or failed: {line_of(error)}"
            ) from error


def plan_of(spec: TrainerSpec, ranks: Ranks) -> memory.MemoryPlan:
    """The memory plan of this rank. Sets its threads and its device. ConfigError as in
    `memory.plan`."""
    torch.set_num_threads(threads(spec.threads, ranks.local_size))
    _device(spec, ranks)
    return memory.plan(spec, ranks)


def open_shares(spec: TrainerSpec, team: Team, plan: memory.MemoryPlan) -> ShardedTrainer:
    """This rank's share of the model, once all have met."""
    device = _device(spec, team.ranks)
    team.meet(device)
    limits = torch.tensor([plan.micro_batch_tokens, plan.row_tokens_max])
    distributed.all_reduce(limits, distributed.ReduceOp.MIN)
    policy = opened(_held_whole(spec), "cpu")
    policy.device, policy.computes_in = device, plan.computes_in.precision
    tokens_max, row_max = limits.tolist()
    return ShardedTrainer(policy, spec, team.ranks, tokens_max, row_max)


def follow(ranks: Ranks, say: Callable[[str], None]) -> int:
    """Be a rank other than 0 until rank 0 ends. Returns the exit status.

    Raises:
        ChildFailed: nobody keeps a store for the ranks.
    """
    asked: list[int] = []  # by signals, to leave: rank 0 saves first, and needs this one to
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: asked.append(received))
    os.nice(NICENESS)
    team = Team(ranks)
    say(f"rank {ranks.rank} of {ranks.size} trains for the learner of rank 0")
    shares: ShardedTrainer | None = None
    try:
        for order, body in team.orders(lambda: bool(asked)):
            shares = _obey(order, body, shares, team)
    except Exception as error:  # noqa: BLE001 - boundary: one line, and the end of this rank
        if team.stopped():
            return EXIT_OK
        say(f"swarm-node: rank {ranks.rank} of {ranks.size} ends: {line_of(error)}")
        return EXIT_FAILED
    return EXIT_OK


def _obey(
    order: dict[str, Any], body: bytes, shares: ShardedTrainer | None, team: Team
) -> ShardedTrainer:
    """Do what rank 0 does at the same time."""
    if order["op"] == "load":
        spec = TrainerSpec.from_record(order["spec"])
        shares = open_shares(spec, team, plan_of(spec, team.ranks))
        shares.step_guard = StepGuard.from_record(order["step_guard"])
        shares.spread(None, moments=True)
        return shares
    assert shares is not None
    if order["op"] == "train":
        groups, shares.policy_version = frames.unpack(body)
        shares.train(groups)
    elif order["op"] == "collect":
        shares.collect(None, order["moments"])
    else:
        assert order["op"] == "spread", order
        shares.spread(None, moments=False)
    return shares


def _held_whole(spec: TrainerSpec) -> TrainerSpec:
    """Ranks cut weights of one type; a frozen base is in fp32 there, as what is trained."""
    return replace(spec, lora_base="float32")


def _device(spec: TrainerSpec, ranks: Ranks) -> torch.device:
    if spec.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def lead(ranks: Ranks) -> None:
    """Be rank 0's trainer: `worker.main` for several ranks."""
    team = Team(ranks)
    team.live()
    main(partial(ShardedCore, team=team), team.stopper())


if __name__ == "__main__":
    found = Ranks.of(os.environ)
    assert found is not None, "started by the node, which has looked"
    lead(found)
