"""A trainer of two processes computes what one computes, and what it writes one can read."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import trio
from safetensors.torch import load_file
from torch import distributed

from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup, TrainReport
from node.interfaces.trainer_spec import TrainerSpec
from node.train.process import InProcessTrainer, TrainerProcess, open_trainer
from node.train.ranks import Ranks
from node.train.trainer_worker import TrainerCore
from swarm.errors import ChildFailed, ConfigError
from tests.integration import sharded_child
from tests.support import run
from tests.unit.training_support import qwen_directory

pytestmark = pytest.mark.integration

ROUNDING = 2e-5
SAMPLING = Sampling(max_new_tokens=8)
ADVANTAGES = (1.0, -1.0, 0.5, -0.5)
WAIT_S = 300.0  # a busy machine is no failure


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> TrainerSpec:
    model = qwen_directory(tmp_path_factory.mktemp("model"))
    return TrainerSpec(str(model), device="cpu", threads=1, learning_rate=1e-3, loss="m2po")


def test_two_ranks_train_as_one_process_does_and_the_test_would_see_it_if_not(spec, tmp_path):
    out = tmp_path / "found.json"
    arguments = ["--standalone", "--nproc-per-node", "2", sharded_child.__file__, spec.model, out]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)],
        check=True,
        capture_output=True,
        timeout=WAIT_S,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(out.read_text())
    for name in sharded_child.SPECS:
        apart = found[name]
        assert apart["moved"] > 1e-3
        assert max(apart[what] for what in ("reported", "weights", "moments")) < ROUNDING, name
    assert 0 < found["m2po"]["masked"] < 1  # or there was nothing to decide
    for name in sharded_child.FAULTS:
        for what in ("reported", "weights", "moments"):
            assert found[name][what] > 10 * ROUNDING, (name, what)


class Follower:
    """The other rank, as torchrun would start it, and the store of both."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environ = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        for name, value in {**environ, "RANK": "0", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "node.cli", "learn"],
            env=os.environ | {"RANK": "1", "LOCAL_RANK": "1"},
            stderr=subprocess.PIPE,
        )

    async def end(self) -> tuple[int, str]:
        """Its exit status and the last line that it said."""
        _, said = await trio.to_thread.run_sync(self.process.communicate)
        return self.process.returncode, said.decode().splitlines()[-1]


@asynccontextmanager
async def two_ranks(
    spec: TrainerSpec, data: Path, monkeypatch: pytest.MonkeyPatch, saved: Path | None = None
) -> AsyncIterator[tuple[TrainerProcess, Follower]]:
    follower = Follower(monkeypatch)
    ranks = Ranks.of(os.environ)
    try:
        async with open_trainer(spec, data, saved, ranks) as trainer:
            yield trainer, follower
        if follower.process.returncode is None:
            status, said = await follower.end()
            assert (status, said) == (0, "rank 1 of 2 trains for the learner of rank 0")
    finally:
        follower.process.kill()


async def one_round(trainer) -> tuple[tuple, TrainReport]:
    [sampled] = await trainer.generate(["1+1="], 4, SAMPLING, 3)
    # M2PO asks which way each token moved; of tokens that did not move, rounding would decide
    completions = tuple(
        replace(each, logprobs=tuple(p - 0.05 * (-1) ** at for at, p in enumerate(each.logprobs)))
        for each in sampled
    )
    group = TrainingGroup("1+1=", completions, ADVANTAGES, own_tokens=True)
    stale = TrainingGroup("12/4=", completions, ADVANTAGES[::-1], own_tokens=True)
    return sampled, await trainer.train([group, stale])


async def same_round(left, right) -> None:
    """Both sample and learn the same."""
    (ours, report), (theirs, other) = await one_round(left), await one_round(right)
    assert [c.text for c in ours] == [c.text for c in theirs]
    assert [c.policy_version for c in ours] == [c.policy_version for c in theirs]
    for name, value in asdict(replace(report, seconds=0.0)).items():
        assert value == pytest.approx(
            asdict(replace(other, seconds=0.0))[name], abs=ROUNDING, nan_ok=True
        ), name


def elsewhere(spec: TrainerSpec, directory: Path) -> Path:
    """A version that another trainer made."""
    if spec.adapter is None:
        return qwen_directory(directory, seed=5)
    directory.mkdir()
    TrainerCore(replace(spec, seed=5)).export(directory)
    return directory


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_trainer_of_two_ranks_samples_saves_and_resumes_as_one(
    spec, lora_rank, tmp_path, monkeypatch
):
    spec = replace(spec, lora_rank=lora_rank)
    one = replace(spec, lora_base="float32")  # in which ranks hold a base, whatever is said
    saved, alone_saved, exported = (tmp_path / n for n in ("saved", "alone", "exported"))
    for directory in (saved, alone_saved, exported):
        directory.mkdir()

    async def body():
        alone = InProcessTrainer(one)
        async with two_ranks(spec, tmp_path / "a", monkeypatch) as (trainer, _):
            whole, ours = await alone.info(), await trainer.info()
            assert ours == replace(whole, held_bytes=ours.held_bytes)  # each of its own share
            await same_round(trainer, alone)
            await trainer.save(saved)
            await alone.save(alone_saved)
            await same_round(InProcessTrainer(one, saved), trainer)
            other = elsewhere(spec, tmp_path / "other")
            alone = InProcessTrainer(one)
            for each in (trainer, alone):
                await each.load(other, 7)
            await trainer.export(exported)
            left, right = (load_file(next(d.glob("*.safetensors"))) for d in (exported, other))
            assert left.keys() == right.keys()
            assert all(left[name].equal(right[name]) for name in left)
            alone = InProcessTrainer(one)
            with pytest.raises(ChildFailed, match="trainer, save"):  # rank 0's own affair
                await trainer.save(tmp_path / "nowhere")
            assert (await trainer.info()).policy_version == 7
        async with two_ranks(spec, tmp_path / "b", monkeypatch, alone_saved) as (trainer, _):
            await same_round(trainer, InProcessTrainer(one, alone_saved))

    run(body, timeout_s=WAIT_S)


def test_a_rank_that_dies_ends_the_trainer_with_one_line(spec, tmp_path, monkeypatch):
    async def body():
        async with two_ranks(spec, tmp_path, monkeypatch) as (trainer, follower):
            completions, _ = await one_round(trainer)
            follower.process.kill()
            await follower.end()
            group = TrainingGroup("1+1=", completions, ADVANTAGES, own_tokens=True)
            with pytest.raises(ChildFailed, match="train by 2 ranks: one is gone") as caught:
                await trainer.train([group])
            assert "\n" not in str(caught.value)
            assert "/" not in str(caught.value)  # no place in somebody's source
            with pytest.raises(ChildFailed, match=r"the trainer process ended \(status 1\)"):
                await trainer.train([group])

    run(body, timeout_s=WAIT_S)


def test_a_rank_whose_trainer_dies_ends_with_one_line(spec, tmp_path, monkeypatch):
    async def body():
        async with two_ranks(spec, tmp_path, monkeypatch) as (trainer, follower):
            await one_round(trainer)
            os.kill(trainer.pid, 9)
            follower.process.terminate()  # as torchrun does when the node has gone
            status, said = await follower.end()
            assert (status, said) == (0, "rank 1 of 2 trains for the learner of rank 0")

    run(body, timeout_s=WAIT_S)


def test_what_torchrun_says_is_checked():
    good = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "host", "MASTER_PORT": "29500",
    }  # fmt: skip
    assert Ranks.of(good) == Ranks(1, 4, 1, 2)
    assert Ranks.of(good | {"TORCHELASTIC_RESTART_COUNT": "3"}).attempt == 3
    assert Ranks.of({}) is None
    assert Ranks.of(good | {"WORLD_SIZE": "1", "RANK": "0"}) is None
    for name, bad in (
        ("RANK", "4"), ("RANK", "-1"), ("WORLD_SIZE", "many"), ("LOCAL_RANK", "2"),
        ("MASTER_PORT", "0"), ("MASTER_ADDR", ""), ("WORLD_SIZE", "²"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            Ranks.of(good | {name: bad})
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        with pytest.raises(ConfigError, match=name):
            Ranks.of({key: value for key, value in good.items() if key != name})
