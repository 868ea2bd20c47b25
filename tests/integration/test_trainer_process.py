"""The trainer in its child process: as good as in this one, and harmless however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM
from trio.testing import wait_all_tasks_blocked

from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.train import process
from node.train.process import InProcessTrainer, TrainerProcess, open_trainer
from swarm.errors import ChildFailed, ConfigError, LocalProtocolError
from swarm.rollouts import version_spans
from tests.integration.nodes import until
from tests.support import run
from tests.unit.training_support import qwen_directory

pytestmark = pytest.mark.integration

SAMPLING = Sampling(max_new_tokens=8)
LONG = Sampling(max_new_tokens=5 * process.SEGMENT_STEPS)
ADVANTAGES = (1.0, -1.0, 0.5, -0.5)
CHILD_END_TIMEOUT_S = 10.0
COMPUTES_S = 0.1  # of CPU, more than it takes to hear what is asked


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> TrainerSpec:
    model = qwen_directory(tmp_path_factory.mktemp("model"))
    return TrainerSpec(str(model), device="cpu", threads=1, learning_rate=1e-3)


def by_definition(model: Path, rows: list[list[int]]) -> list[list[float]]:
    """Log-probs of each row's tokens but the first."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = network(torch.tensor(rows)).logits.log_softmax(-1)
    return [
        [float(logprobs[place, index, token]) for index, token in enumerate(row[1:])]
        for place, row in enumerate(rows)
    ]


async def one_round(trainer) -> tuple:
    [completions] = await trainer.generate(["1+1="], 4, SAMPLING, 3)
    report = await trainer.train([TrainingGroup("1+1=", completions, ADVANTAGES, True)])
    return completions, replace(report, seconds=0.0)


def test_process_and_in_process_trainers_agree_and_resume_alike(spec, tmp_path):
    async def body():
        saved, exported = tmp_path / "saved", tmp_path / "exported"
        saved.mkdir()
        exported.mkdir()
        async with open_trainer(spec, tmp_path / "data") as child:
            here = InProcessTrainer(spec)
            assert await child.info() == await here.info()
            first = await one_round(child)
            # foreign log-probs are nan in both, and nan is not equal to itself
            assert repr(first) == repr(await one_round(here))
            await child.save(saved)
            await child.export(exported)
            assert await child.memory_bytes() > 10_000_000
            rows = [[5, 6, 7, 8], [9, 10, 5, 5]]
            said = await child.logprobs(rows)
            assert said == await here.logprobs(rows)
            told = await child.prompt_logprobs(["1+1="])
            assert told == await here.prompt_logprobs(["1+1="])
            assert told[0][0] == list("1+1=")
            assert said == [pytest.approx(row, abs=1e-4) for row in by_definition(exported, rows)]
            second = await one_round(child)
            assert psutil.Process(child.pid).nice() >= 10
        resumed = InProcessTrainer(spec, saved)
        assert (await resumed.info()).policy_version == 1
        assert repr(await one_round(resumed)) == repr(second)
        other = InProcessTrainer(replace(spec, model=str(exported)))
        assert (await other.generate(["1+1="], 4, SAMPLING, 3))[0][0].text == second[0][0].text

    run(body)


def test_the_way_back_is_the_same_in_both(spec, tmp_path):
    async def there_and_back(trainer, saved: Path) -> tuple:
        await one_round(trainer)
        await trainer.save(saved)
        await one_round(trainer)
        assert await trainer.roll_back(saved) == 3
        await trainer.slow_down(0.5)
        return await one_round(trainer)

    for name in ("child", "here"):
        (tmp_path / name).mkdir()

    async def body():
        async with open_trainer(spec, tmp_path / "data") as child:
            first = await there_and_back(child, tmp_path / "child")
            (tmp_path / "child" / "optimizer.pt").write_bytes(b"?")
            with pytest.raises(ConfigError, match=r"^checkpoint damaged"):
                await child.roll_back(tmp_path / "child")
        here = await there_and_back(InProcessTrainer(spec), tmp_path / "here")
        assert repr(first) == repr(here)

    run(body)


def test_errors_come_back_and_the_child_lives_on(spec, tmp_path):
    async def body():
        async with open_trainer(spec, tmp_path) as trainer:
            with pytest.raises(ConfigError, match="temperature"):
                await trainer.generate(["x"], 1, replace(SAMPLING, temperature=0.0), 1)
            assert await trainer.generate(["x" * 500], 1, SAMPLING, 1) == [()]
            with pytest.raises(ChildFailed, match="trainer, save") as caught:
                await trainer.save(tmp_path / "nowhere" / "at all")
            assert "\n" not in str(caught.value)
            assert "Traceback" in caught.value.__notes__[0]
            assert trainer.alive
            assert (await trainer.info()).policy_version == 0
        assert not trainer.alive

    run(body)


def test_a_model_that_does_not_load_is_a_config_error(spec, tmp_path):
    async def body():
        with pytest.raises(ConfigError, match="no such directory"):
            async with open_trainer(replace(spec, model="/nowhere"), tmp_path):
                pass
        with pytest.raises(ConfigError, match="MiB are free"):
            async with open_trainer(replace(spec, memory_bytes_max=1000), tmp_path):
                pass

    run(body)


def test_a_cancelled_call_returns_at_once_and_the_next_gets_its_own_answer(spec, tmp_path):
    async def body():
        async with open_trainer(spec, tmp_path) as trainer:
            with trio.move_on_after(0.05) as scope:
                await trainer.generate(["1+1="] * 64, 8, Sampling(max_new_tokens=100), 1)
            assert scope.cancelled_caught
            assert len(await trainer.generate(["1+1="], 2, SAMPLING, 1)) == 1
            assert (await trainer.info()).parameters > 0

    run(body)


def test_a_generation_pauses_and_takes_new_weights_between_its_segments(spec, tmp_path):
    """What the process then says of its tokens is re-scored under each of the two versions."""

    async def body():
        old, new = Path(spec.model), qwen_directory(tmp_path / "new", seed=5)
        async with open_counting(spec, tmp_path) as trainer:
            [mixed] = await generate_around(trainer, lambda trainer: trainer.load(new, 3))
            scored = {}
            for version, directory in ((3, new), (0, old)):
                await trainer.load(directory, version)
                batch = [TrainingGroup("1+1=", mixed, (0.0,) * len(mixed), own_tokens=True)]
                [scored[version]] = await trainer.score(batch)
            with pytest.raises(LocalProtocolError, match="own tokenizer"):
                await trainer.score([replace(batch[0], own_tokens=False)])
        assert any(completion.spans for completion in mixed)
        for index, completion in enumerate(mixed):
            begin = 0
            for version, count in version_spans(completion):
                end = begin + count
                assert end == len(completion.token_ids) or end % process.SEGMENT_STEPS == 0
                ours = completion.logprobs[begin:end]
                assert ours == pytest.approx(scored[version][index][begin:end], abs=1e-4)
                assert ours != pytest.approx(scored[3 - version][index][begin:end], abs=1e-2)
                begin = end

    run(body)


def test_a_cancelled_generation_frees_its_session(spec, tmp_path, monkeypatch):
    """There is room for one: the next generation would be refused, as it is without `_leave`."""

    async def body():
        async with open_counting(spec, tmp_path) as trainer:
            for weights in (None, Path(spec.model)):
                await cancel_in_the_middle(trainer, weights)
                assert len(await trainer.generate(["1+1="], 2, SAMPLING, 1)) == 1

            async def stay(trainer: TrainerProcess, session: int) -> None:
                await trio.lowlevel.checkpoint()

            monkeypatch.setattr(TrainerProcess, "_leave", stay)
            await cancel_in_the_middle(trainer, None)
            with pytest.raises(ChildFailed, match="generation 6: 1 others have not ended"):
                await trainer.generate(["1+1="], 2, SAMPLING, 1)

    run(body)


class Counting(TrainerProcess):
    """A trainer process that counts the segments it has asked for."""

    segments = 0
    _counted = trio.Event()

    async def pass_segments(self, count: int) -> None:
        """Wait until so many more have been asked for."""
        until = self.segments + count
        while self.segments < until:
            self._counted = trio.Event()
            await self._counted.wait()

    async def _call(self, op: str, *arguments: Any) -> Any:
        if op == "advance":
            self.segments += 1
            self._counted.set()
        return await super()._call(op, *arguments)


@asynccontextmanager
async def open_counting(spec: TrainerSpec, data: Path) -> AsyncIterator[Counting]:
    trainer = Counting(spec, data)
    try:
        await trainer.start()
        yield trainer
    finally:
        await trainer.close()


async def generate_around(trainer: Counting, act: Callable[[Counting], Awaitable[None]]) -> list:
    """One prompt's completions; something happens after the second segment was asked for."""
    groups = []

    async def generate() -> None:
        groups.extend(await trainer.generate(["1+1="], 8, LONG, 3))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await trainer.pass_segments(2)
        await act(trainer)
    return groups


async def cancel_in_the_middle(trainer: Counting, weights: Path | None) -> None:
    """Cancel a generation in its second segment; with weights, while a load waits for that."""
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:

            async def cancel() -> None:
                await trainer.pass_segments(2)
                if weights is not None:
                    nursery.start_soon(trainer.load, weights, 1)
                    await wait_all_tasks_blocked()
                scope.cancel()

            nursery.start_soon(cancel)
            await trainer.generate(["1+1="], 8, LONG, 1)
        assert scope.cancelled_caught


def test_a_killed_child_fails_its_call_and_can_be_started_again(spec, tmp_path):
    async def body():
        async with open_counting(spec, tmp_path) as trainer:

            async def kill() -> None:
                await trainer.pass_segments(2)
                os.kill(trainer.pid, signal.SIGKILL)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with pytest.raises(ChildFailed, match="killed by signal 9"):
                    await trainer.generate(["1+1="] * 512, 8, Sampling(max_new_tokens=100), 1)
            with pytest.raises(ChildFailed):
                await trainer.info()
            await trainer.start()
            assert (await trainer.info()).policy_version == 0

    run(body)


def test_a_call_before_the_start_is_our_own_mistake(spec, tmp_path):
    async def body():
        with pytest.raises(LocalProtocolError, match="before start"):
            await TrainerProcess(spec, tmp_path).info()

    run(body)


PARENT = """
import sys
from pathlib import Path
import trio
from node.interfaces.engine import Sampling
from node.train.process import open_trainer
from node.interfaces.trainer_spec import TrainerSpec

async def main():
    spec = TrainerSpec(sys.argv[1], device="cpu", threads=1)
    async with open_trainer(spec, Path(sys.argv[2])) as trainer:
        print(trainer.pid, flush=True)
        sys.stdin.readline()
        while True:
            await trainer.generate(["1+1="] * 64, 8, Sampling(max_new_tokens=100), 1)

trio.run(main)
"""


def test_the_child_ends_with_a_killed_parent_also_while_it_computes(spec, tmp_path):
    command = [sys.executable, "-c", PARENT, spec.model, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        idle_s = child.cpu_times().user
        parent.stdin.write("\n")
        parent.stdin.flush()
        until(lambda: child.cpu_times().user > idle_s + COMPUTES_S)
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=CHILD_END_TIMEOUT_S)
    assert not alive


def test_the_log_stays_bounded_and_prints_do_not_break_the_pipe(spec, tmp_path):
    log = tmp_path / process.LOG_NAME
    log.write_bytes(b"x" * (process.LOG_BYTES_MAX + 1))

    async def body():
        async with open_trainer(spec, tmp_path) as trainer:
            with pytest.raises(ChildFailed):
                await trainer.save(tmp_path / "nowhere")
        assert b"Traceback" in log.read_bytes()
        assert log.stat().st_size < process.LOG_BYTES_MAX

    run(body)
