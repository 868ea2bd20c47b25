"""A node's training computed again from what it kept: its settings, its key, and the foreign
groups that it says it trained on. No network is there, so what comes out can depend on others
only through those groups."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from node.config import NodeConfig, load_config
from node.hosting.membership import load_identity
from node.hosting.models import resolve_model, trainer_spec
from node.methods.replay import SolvedTasks
from node.methods.task_control import Vade
from node.observe.records import RoundDone
from node.run.parts import LivePolicy, NodeParts
from node.run.progress import Progress
from node.run.sapo import Sapo
from node.train.process import open_trainer
from node.verify.held_out import HeldOutGuard
from node.verify.task_choice import TaskChoice
from node.verify.verifier import ProcessVerifier
from swarm.peers.reputation import Ledger
from swarm.rollouts import GroupId, ScoredGroup
from swarm.wire.codec import decode_group
from tests.integration.nodes import NodeProcess


def settings_of(node: NodeProcess) -> NodeConfig:
    """Those that the process had, as far as learning goes."""
    flags = {
        "data_dir": node.data_dir,
        "cache_dir": node.cache_dir,
        "threads": 1,
        "local_groups": 2,
        "external_groups": 2,
        "group_size": 4,
    }
    return load_config(flags, {}, node.run_file)


def groups_kept(pool_file: Path) -> dict[GroupId, ScoredGroup]:
    """All groups of a pool that is not in use, with the prompts and rewards worked out for them."""
    with closing(sqlite3.connect(pool_file)) as db:
        rows = db.execute("SELECT record, prompt, rewards FROM groups JOIN records USING (seq)")
        found = {}
        for record, prompt, rewards in rows:
            group_id, group = decode_group(bytes(record))
            values = tuple(float(each) for each in rewards.strip("[]").split(","))
            found[group_id] = ScoredGroup(group_id, group, prompt, values)
    return found


class RecordedExchange:
    """Hands out what the real exchange handed out in each round, and takes what is shared."""

    def __init__(
        self, kept: Mapping[GroupId, ScoredGroup], drawn: Mapping[int, Sequence[GroupId]]
    ) -> None:
        self._kept = kept
        self._drawn = drawn
        self.ledger = Ledger()

    async def share(self, *_: Any) -> None:
        pass

    async def candidates(self) -> list[Any]:
        return []

    async def take(self, _: Sequence[GroupId], round_: int) -> list[ScoredGroup]:
        return [self._kept[group_id] for group_id in self._drawn[round_]]


def replayed(config: NodeConfig, rounds: Sequence[RoundDone], work_dir: Path) -> list[RoundDone]:
    """The same rounds once more, from the first on, of a node that ran with `config`.

    `work_dir` takes the trainer's log. The node's own files are only read.
    """
    drawn = {
        each.round: [GroupId(bytes.fromhex(t)) for t in each.foreign_groups] for each in rounds
    }
    exchange = RecordedExchange(groups_kept(config.data_dir / "pool.sqlite"), drawn)
    identity = load_identity(config)
    model = resolve_model(config, print)

    async def main() -> list[RoundDone]:
        async with (
            open_trainer(trainer_spec(config, model), work_dir, None) as trainer,
            ProcessVerifier.open(config) as verifier,
        ):
            parts = NodeParts(
                config,
                identity.peer_id,
                verifier,
                HeldOutGuard(config.run, verifier, config.validated_by),
                exchange,  # type: ignore[arg-type]  # the parts of it that a round uses
                TaskChoice(config.run, config.method(Vade)),
                SolvedTasks(),
                now_s=lambda: 0.0,
            )
            sapo = Sapo(parts, await LivePolicy.of(trainer, trainer), Progress())
            return [await sapo.round() for _ in rounds]

    return trio.run(main)


def curve(rounds: Sequence[RoundDone]) -> list[SimpleNamespace]:
    """What training came to, round by round, to the last bit."""
    return [
        SimpleNamespace(
            round=each.round,
            loss=each.loss,
            grad_norm=each.grad_norm,
            own_reward=each.own_reward,
            trained_tokens=each.trained_tokens_total,
            foreign_groups=each.foreign_groups,
        )
        for each in rounds
    ]
