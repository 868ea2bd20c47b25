"""The policy on its way from a trainer to a vLLM engine on the same device: lent and not copied,
to an engine that has slept meanwhile.

On a CPU vLLM keeps its memory while it sleeps. So these tests have its worker lose its weights
then, as it does on a GPU.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from node.engines.vllm import server
from node.engines.vllm.unfinished import Unfinished
from node.engines.vllm.worker import ReloadExtension
from node.interfaces.engine import Sampling
from node.policies import ipc_weights
from swarm.errors import ChildFailed
from swarm.rollouts import Completion, version_spans
from tests.integration.hand_over_cases import PROMPTS, Pair, trainer_and_engine
from tests.integration.shared_vllm import check_spans, long_models
from tests.integration.vllm_models import VLLM_TIMEOUT_S
from tests.support import run

LONG = Sampling(max_new_tokens=700)
SHORT = Sampling(max_new_tokens=24)
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.integration]


class ForgetfulExtension(ReloadExtension):
    """Can lose its weights."""

    def forget(self: Any) -> None:
        layers = list(self.model_runner.get_model().modules())
        with torch.no_grad():
            for layer in layers:
                for parameter in layer.parameters(recurse=False):
                    parameter.zero_()
                if hasattr(layer, "cpu_linear"):
                    layer.cpu_linear = lambda x, *_: x.new_zeros(())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return long_models(tmp_path_factory.mktemp("models"), 4)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = f"{__name__}.{ForgetfulExtension.__name__}"
    monkeypatch.setattr(server, "WORKER_EXTENSION", worker)


async def sleep(pair: Pair) -> None:
    """Have the engine sleep, and lose its weights."""
    await pair.hand_over.before_training()
    assert pair.engine._asleep
    assert pair.engine._server is not None
    await pair.engine._server.order("/collective_rpc", {"method": "forget"})


async def check(models: dict[int, Path], groups: list[tuple[Completion, ...]]) -> None:
    """As `check_spans`, while the engine's loop goes on."""
    sampling = LONG if len(groups[0][0].token_ids) > SHORT.max_new_tokens else SHORT
    await trio.to_thread.run_sync(check_spans, models, PROMPTS, groups, sampling)


async def begun(pair: Pair) -> list[Unfinished]:
    """Long completions that have some of their tokens."""
    short = await pair.engine.begin(PROMPTS[:1], 1, SHORT, 1)
    long = await pair.engine.begin(PROMPTS, 2, LONG, 3)
    await pair.engine.advance([*short, *long], 1)
    assert not any(work.done for work in long)
    return long


def test_rounds_of_sleeping_and_lending(models: list[Path], tmp_path: Path) -> None:
    """Completions are kept through a sleep and go on under the weights that end it."""

    async def body() -> None:
        async with trainer_and_engine(models[0], tmp_path) as pair:
            engine = pair.engine
            works = await begun(pair)
            await sleep(pair)
            await pair.learn(models[1])
            assert engine.last_update is not None
            assert engine.last_update.lent
            assert engine.last_update.tensors == engine.last_update.tensors_total
            await engine.advance(works, len(works))
            made = await engine.collect(works)
            await check({0: models[0], 1: models[1]}, made)
            runs = {tuple(v for v, _ in version_spans(c)) for group in made for c in group}
            assert (0, 1) in runs
            for number in (2, 3):
                await sleep(pair)
                await pair.learn(models[number])
                assert engine.last_update.policy_version == number
                await check({number: models[number]}, await engine.generate(PROMPTS, 2, SHORT, 5))
            assert (engine.restarts, engine.rolled_back, pair.told) == (0, 0, [])

    run(body, timeout_s=VLLM_TIMEOUT_S)


def test_an_engine_that_sleeps_wakes_for_completions_and_dies_for_none(
    models: list[Path], tmp_path: Path
) -> None:
    """It has the weights that it slept with; so has one that died in its sleep."""

    async def body() -> None:
        async with trainer_and_engine(models[0], tmp_path) as pair:
            engine = pair.engine
            await pair.learn(models[1])
            await sleep(pair)
            await check({1: models[1]}, await engine.generate(PROMPTS, 2, SHORT, 5))
            assert engine.restarts == 0
            await sleep(pair)
            assert engine.pid is not None
            os.killpg(engine.pid, signal.SIGKILL)
            await check({1: models[1]}, await engine.generate(PROMPTS, 2, SHORT, 5))
            assert engine.restarts == 1
            await sleep(pair)
            os.killpg(engine.pid, signal.SIGKILL)
            await pair.learn(models[2])
            await check({2: models[2]}, await engine.generate(PROMPTS, 2, SHORT, 5))
            assert engine.restarts == 2

    run(body, timeout_s=VLLM_TIMEOUT_S)


def test_what_is_lent_is_checked(models: list[Path], tmp_path: Path) -> None:
    """A trainer that steps on while its weights are read is
    found out, and the version before serves on, from its files. Handles that are of no use leave
    the files, and that is told once."""

    async def body() -> None:
        async with trainer_and_engine(models[0], tmp_path) as pair:
            engine, trainer = pair.engine, pair.trainer
            await pair.learn(models[1])
            await pair.learn(models[3], sleeping=False)
            assert engine.last_update is not None
            assert engine.last_update.lent
            assert engine.last_update.tensors == engine.last_update.tensors_total
            await check({2: models[3]}, await engine.generate(PROMPTS, 2, SHORT, 5))

            await trainer.load(models[2], 3)
            directory = await pair.files.export(trainer, 3)
            assert await trainer.lend(directory) is None
            expected = await trainer.logprobs(engine._rows)

            async def step_on(*_: object) -> object:
                await trainer.load(models[1], 4)
                return expected

            before, engine._reference = engine._reference, step_on  # type: ignore[assignment]
            with pytest.raises(ChildFailed, match=r"differ from the trainer's .*version 2 serves"):
                await engine.load(directory, 3, lent=True)
            assert engine.rolled_back == 1
            await check({2: models[3]}, await engine.generate(PROMPTS, 2, SHORT, 5))

            engine._reference = before
            await trainer.load(models[2], 3)
            for version in (3, 4):
                directory = await pair.files.export(trainer, version)
                assert await trainer.lend(directory) is None
                lent = (directory / ipc_weights.LENT).read_bytes()
                (directory / ipc_weights.LENT).write_bytes(b"GPU 7\n" + lent)
                await engine.load(directory, version, lent=True)
                assert not engine.last_update.lent
                await trainer.load(models[3], 4)
            await check({4: models[3]}, await engine.generate(PROMPTS, 2, SHORT, 5))
            said = "vLLM reads weights from files, not from the trainer's memory: the trainer is on"
            assert [each.startswith(said) for each in pair.told] == [True]

    run(body, timeout_s=VLLM_TIMEOUT_S)
