"""Two nodes train on each other's transcripts of an environment by TRL's contract."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.envs.factory_rules import rules_from
from node.envs.factory_upstream import check
from node.envs.method_calls import written
from node.interfaces.engine import Context, Sampling
from node.observe.records import RoundDone
from node.simulation.simulated_nodes import SimulatedNode, build, run
from swarm.rollouts import Author, Completion, FinishReason, ScoredGroup
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world

FACTORIES = Path(__file__).parents[1] / "factories"
PRICES = {"apple": 3, "bread": 7, "candle": 12, "drum": 40}
ROUNDS = 4


class Shopper(ScriptedPolicy):
    """Buys what it is asked for in three turns, and forgets to, or pays too much, now and then."""

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        await trio.sleep(1.0)
        rng = Random(seed)
        return [
            tuple(self._said(self._adds(prompt, rng)) for _ in range(completions_each))
            for prompt in prompts
        ]

    async def go_on(
        self, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> list[Completion]:
        await trio.sleep(1.0)
        rng = Random(seed)
        return [self._said(self._pays(context, rng)) for context in contexts]

    def _adds(self, prompt: str, rng: Random) -> str:
        words = prompt.rpartition("Buy ")[2].partition(",")[0].split(" and ")
        wanted = [each.split(" x ") for each in words]
        if rng.random() < 0.2:
            wanted = wanted[:1]
        return "".join(written("add", {"name": n, "count": int(count)}) for count, n in wanted)

    def _pays(self, context: Context, rng: Random) -> str:
        if len(context.turns) > 1:
            return "Thank you."
        total = int(context.turns[0][1].split()[-2])
        return written("pay", {"amount": total + (rng.random() < 0.4)})

    def _said(self, text: str) -> Completion:
        ids = (*text.encode(), 0)
        return Completion(text, ids, (-0.5,) * len(ids), FinishReason.STOP, self.version)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> NodeConfig:
    monkeypatch.syspath_prepend(str(FACTORIES))
    parameters: dict[str, Any] = {"factory": "shop_counter:Shop", "turns": 3}
    parameters["sha256"] = check(rules_from(parameters)).sha256
    entry = {"name": "environment_factory", "parameters": parameters}
    told = {"name": "shop", "environments": [entry], "sampling": {"max_new_tokens": 512}}
    rules = RunConfig.model_validate({**told, "held_out": {"tasks": 4}, "reward": "partial"})
    return NodeConfig(run=rules, rounds=ROUNDS, local_groups=2, external_groups=2, group_size=4)


def test_two_nodes_share_replay_and_train_and_come_to_the_same_rewards(config: NodeConfig) -> None:
    rounds: list[list[RoundDone]] = [[], []]
    pools: list[dict[bytes, ScoredGroup]] = [{}, {}]
    over = trio.Event()

    async def body() -> None:
        async with open_world(1, 2, LinkProfile(latency_s=0.02)) as world:
            first = build(world, 0, config)
            nodes = [first, build(world, 1, config, first.transport.addresses())]
            async with trio.open_nursery() as nursery:
                for place, node in enumerate(nodes):
                    policy = Shopper()
                    nursery.start_soon(run, node, policy, policy, keeper(node, place))
                await over.wait()
                nursery.cancel_scope.cancel()

    def keeper(node: SimulatedNode, place: int) -> Any:
        async def keep(record: object) -> None:
            if isinstance(record, RoundDone):
                rounds[place].append(record)
                if all(len(each) >= ROUNDS for each in rounds):
                    over.set()
                for own in (True, False):
                    ids = [each.group_id for each in node.pool.eligible(own, 0.0)]
                    pools[place] |= {each.group_id: each for each in node.pool.groups(ids)}

        return keep

    deterministic_run(body, seed=1)
    assert all(sum(each.external_groups for each in mine) >= 2 for mine in rounds)
    assert [mine[-1].rejected_total for mine in rounds] == [{}, {}]
    shared = pools[0].keys() & pools[1].keys()
    assert len(shared) >= 4
    rewards = [[pool[each].rewards for each in shared] for pool in pools]
    assert rewards[0] == rewards[1]
    assert {0.0, 0.5, 1.0} <= {reward for group in rewards[0] for reward in group}
    made = [each for group in shared for each in pools[0][group].group.completions]
    turns = [turn for each in made for turn in each.segments]
    assert {turn.author for turn in turns} == {Author.POLICY, Author.ENVIRONMENT}
