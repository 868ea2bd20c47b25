"""`swarm-node replay` repeats the rounds of real nodes bit for bit, and names what was changed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from node.commands.replay import replay
from node.config import NodeConfig, load_config
from node.config.node import Conflict
from node.hosting.models import resolve_model, trainer_spec
from node.observe.records import RoundDone
from node.run import recorded
from node.run.recorded import RecordedRound, RecordedStart, recorded_rounds, round_path
from node.simulation.simulated_nodes import build, run
from node.train.process import InProcessTrainer
from swarm.errors import ConfigError
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from tests.integration.nodes import swarm_node

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROUNDS = 10
NODES = 3
LINK = LinkProfile(latency_s=0.05)


class Paced(InProcessTrainer):
    """Others' groups arrive while it trains, by the virtual clock."""

    async def train(self, groups: Any) -> Any:
        await trio.sleep(2.0)
        return await super().train(groups)


def settings(prepared: tuple[Path, Path], data_dir: Path, **more: Any) -> NodeConfig:
    run_file, cache = prepared
    flags = {
        "data_dir": data_dir,
        "cache_dir": cache,
        "threads": 1,
        "local_groups": 2,
        "external_groups": 2,
        "group_size": 4,
        "evaluate_every_rounds": 0,
        "rounds": ROUNDS,
        "record_rounds": ROUNDS // 2,
    }
    return load_config(flags | more, {}, run_file)


async def live_together(configs: list[NodeConfig]) -> list[int]:
    """Run a node of each of these to its last round; the foreign groups that each trained on."""
    model = resolve_model(configs[0], print)
    foreign = [0] * len(configs)
    async with open_world(7, len(configs), LINK) as world, trio.open_nursery() as nursery:
        done = trio.Semaphore(0)

        async def live(simulated: Any, config: NodeConfig) -> None:
            async def on_record(record: object) -> None:
                if isinstance(record, RoundDone):
                    foreign[simulated.host] += record.external_groups
                    if record.round == config.rounds:
                        done.release()

            trainer = Paced(trainer_spec(config, model))
            await run(simulated, trainer, trainer, on_record)

        known: tuple[str, ...] = ()
        for host, config in enumerate(configs):
            config.data_dir.mkdir()
            simulated = build(world, host, config, known)
            known = known or simulated.transport.addresses()
            nursery.start_soon(live, simulated, config)
        for _ in configs:
            await done.acquire()
        nursery.cancel_scope.cancel()
    return foreign


@pytest.fixture(scope="module")
def swarm(prepared: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The data directories of three nodes that learned from each other."""
    room = tmp_path_factory.mktemp("swarm")
    configs = [settings(prepared, room / str(n)) for n in range(NODES)]
    foreign = deterministic_run(live_together, configs, seed=7)
    assert all(count >= ROUNDS for count in foreign), foreign
    return [config.data_dir for config in configs]


def changed_round(
    swarm: list[Path], room: Path, change: Callable[[RecordedRound], RecordedRound]
) -> tuple[Path, int]:
    """A copy of a node's directory with one change in a round that drew from others."""
    copy = room / "copy"
    shutil.copytree(swarm[0], copy)
    for number, part in recorded_rounds(copy).items():
        path = round_path(part, number)
        whole = recorded._read(path, RecordedRound)
        if whole.own and whole.foreign and whole.trained:
            recorded.write_record(path, change(whole))
            return copy, number
    raise AssertionError("no round drew from others")


def said_of(data_dir: Path, number: int | None) -> str:
    lines: list[str] = []
    assert replay(data_dir, number, lines.append) is (not lines[-1].startswith(("DIFF", " ")))
    return "\n".join(lines)


def with_token(group: Any, completion: int, token: int) -> Any:
    """The group with another token there."""
    made = list(group.completions)
    ids = list(made[completion].token_ids)
    ids[token] += 1
    made[completion] = replace(made[completion], token_ids=tuple(ids))
    return replace(group, completions=tuple(made))


@pytest.mark.parametrize("host", range(NODES))
def test_all_rounds_of_a_swarm_match(swarm: list[Path], host: int) -> None:
    said = said_of(swarm[host], None)
    matches = [line for line in said.splitlines() if line.startswith("MATCH")]
    assert matches == [f"MATCH: round {n}" for n in range(1, ROUNDS + 1)]


def test_rounds_without_others_match_and_old_ones_go(
    prepared: tuple[Path, Path], tmp_path: Path
) -> None:
    alone = settings(prepared, tmp_path / "alone", external_groups=0, record_rounds=2, rounds=7)
    deterministic_run(live_together, [alone], seed=7)
    assert list(recorded_rounds(alone.data_dir)) == [5, 6, 7]
    assert said_of(alone.data_dir, 6).splitlines()[-1] == "MATCH: round 6"


def test_a_changed_token_is_named(swarm: list[Path], tmp_path: Path) -> None:
    def own(whole: RecordedRound) -> RecordedRound:
        group = replace(whole.own[1], group=with_token(whole.own[1].group, 2, 0))
        return replace(whole, own=(whole.own[0], group, *whole.own[2:]))

    copy, number = changed_round(swarm, tmp_path, own)
    assert f"DIFFERS: round {number}: own group 2: completion 3: token 1: " in said_of(copy, number)


def test_a_changed_token_of_others_is_named(swarm: list[Path], tmp_path: Path) -> None:
    def foreign(whole: RecordedRound) -> RecordedRound:
        first = replace(whole.foreign[0], group=with_token(whole.foreign[0].group, 1, 0))
        return replace(whole, foreign=(first, *whole.foreign[1:]))

    copy, number = changed_round(swarm, tmp_path, foreign)
    assert f"DIFFERS: round {number}: foreign group 1: its content" in said_of(copy, number)


def test_a_changed_token_of_the_batch_is_named(swarm: list[Path], tmp_path: Path) -> None:
    def batch(whole: RecordedRound) -> RecordedRound:
        last = with_token(whole.trained[-1], 1, 0)
        return replace(whole, trained=(*whole.trained[:-1], last))

    copy, number = changed_round(swarm, tmp_path, batch)
    place = len(
        recorded._read(round_path(recorded_rounds(copy)[number], number), RecordedRound).trained
    )
    named = f"group of the batch {place}: completion 2: token 1: "
    assert f"DIFFERS: round {number}: {named}" in said_of(copy, number)


def test_a_changed_advantage_is_named(swarm: list[Path], tmp_path: Path) -> None:
    def advantage(whole: RecordedRound) -> RecordedRound:
        first, *others = whole.trained
        values = list(first.advantages)
        values[3] += 2**-50
        return replace(whole, trained=(replace(first, advantages=tuple(values)), *others))

    copy, number = changed_round(swarm, tmp_path, advantage)
    named = "group of the batch 1: advantage of completion 4: "
    assert f"DIFFERS: round {number}: {named}" in said_of(copy, number)


def test_a_changed_weight_is_named_with_what_else_is_unlike(
    swarm: list[Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(swarm[0], copy)
    part = recorded_rounds(copy)[ROUNDS]
    weights = load_file(part / "model.safetensors")
    name = sorted(weights)[5]
    flat = weights[name].flatten()
    flat[7] = torch.nextafter(flat[7], torch.tensor(9.0))
    save_file(weights | {name: flat.view_as(weights[name])}, part / "model.safetensors")
    start = recorded._read(part / "start.record", RecordedStart)
    facts = {**start.facts, "torch": "1.0"}
    recorded.write_record(part / "start.record", replace(start, facts=facts))
    said = said_of(copy, ROUNDS).splitlines()
    assert said[0] == f"DIFFERS: weights before round {ROUNDS // 2 + 1}: tensor {name}"
    assert said[1:] == [f"  torch: 1.0 in the record, {version('torch')} here"]


def test_another_seed_differs_at_once(swarm: list[Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(swarm[0], copy)
    part = recorded_rounds(copy)[1]
    start = recorded._read(part / "start.record", RecordedStart)
    other = json.dumps({**json.loads(start.settings), "seed": 1})
    recorded.write_record(part / "start.record", replace(start, settings=other))
    assert "DIFFERS: round 1: own group 1: completion " in said_of(copy, 1)


def test_bad_input_is_one_clear_line(swarm: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--round 99: not recorded; take one of 1, 2, 3, "):
        replay(swarm[0], 99, print)
    with pytest.raises(ConfigError, match=r"no round is recorded.* swarm-node join --record 8"):
        replay(tmp_path, 1, print)
    with pytest.raises(ConfigError, match="no such directory"):
        replay(tmp_path / "none", 1, print)
    copy = tmp_path / "copy"
    shutil.copytree(swarm[0], copy)
    path = round_path(recorded_rounds(copy)[2], 2)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"00000002\.record: damaged"):
        replay(copy, 2, print)
    done = swarm_node("replay", copy, "--round", "2")
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1


def test_what_cannot_be_recorded_is_refused() -> None:
    for flags in ({"engine": "scripted"}, {"loss": "tis, snapshots=2"}):
        with pytest.raises((ConfigError, Conflict), match="record"):
            load_config({"record_rounds": 4, **flags}, {})
