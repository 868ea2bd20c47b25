"""The engine of a rollout worker, through its death and versions that come at the wrong moment."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import trio

from node.config import NodeConfig, RunConfig
from node.engines.vllm import server
from node.engines.vllm.engine import VllmEngine
from node.hosting.policy_host import PolicyHost
from node.interfaces.engine import Sampling
from node.train.process import TrainerProcess
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Completion, version_spans
from tests.integration.failing_worker import CORRUPT
from tests.integration.shared_vllm import held, hold, use_holding_worker
from tests.integration.vllm_models import VLLM_TIMEOUT_S, model_directory
from tests.support import run
from tests.unit.training_support import open_policy, qwen_directory, reference_logprobs

pytestmark = pytest.mark.integration

RUN = RunConfig.model_validate({"name": "host", "environments": [{"name": "scripted_sum"}]})
LONG = Sampling(max_new_tokens=400)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[Path]:
    directory = tmp_path_factory.mktemp("versions")
    return [qwen_directory(directory / f"v0000000{number}", seed=number) for number in (1, 2)]


async def serves(host: PolicyHost) -> int:
    """The version that what is generated now says it is of."""
    assert host.serving is not None
    [[completion]] = await host.serving.engine.generate(["1+1="], 1, Sampling(max_new_tokens=4), 3)
    return completion.policy_version


async def kill(host: PolicyHost) -> None:
    assert host._host is not None
    assert isinstance(host._host.engine, TrainerProcess)
    assert host._host.engine.pid is not None
    os.kill(host._host.engine.pid, signal.SIGKILL)
    with pytest.raises(ChildFailed):
        await serves(host)


def children() -> list[int]:
    """Processes of engines, of either kind."""
    return [each.pid for each in psutil.Process().children() if "-m node." in _line(each)]


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_version_that_finds_the_engine_dead_starts_it(versions, tmp_path):
    async def body():
        host = PolicyHost(NodeConfig(run=RUN, data_dir=tmp_path, threads=1))
        try:
            await host.load(versions[0])
            await kill(host)
            await host.load(versions[1])
            assert (host.version, await serves(host)) == (2, 2)
        finally:
            await host.stop()

    run(body)


def test_a_version_that_comes_in_a_restart_leaves_one_engine(versions, tmp_path):
    async def body():
        host = PolicyHost(NodeConfig(run=RUN, data_dir=tmp_path, threads=1))
        try:
            await host.load(versions[0])
            await kill(host)
            await host.stop()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.restart)
                while not children():  # noqa: ASYNC110  of a process
                    await trio.sleep(0.01)
                nursery.start_soon(host.load, versions[1])
            assert (host.version, await serves(host)) == (2, 2)
            assert len(children()) == 1
        finally:
            await host.stop()
        assert children() == []

    run(body)


@pytest.mark.vllm
@pytest.mark.long
def test_a_first_version_that_vllm_cannot_run_is_told_with_what_to_do(versions, tmp_path):
    async def body():
        host = PolicyHost(NodeConfig(run=RUN, data_dir=tmp_path, threads=1, engine="vllm"))
        with pytest.raises(ConfigError, match=r"--engine vllm: .*Error: .*--engine torch") as told:
            await host.load(versions[0])  # its heads are too small
        assert "\n" not in str(told.value)
        assert host.serving is None
        assert children() == []

    run(body, timeout_s=VLLM_TIMEOUT_S)


@pytest.mark.parametrize(("given", "taken"), [(None, 0.9), (0.3, 0.3)])
def test_a_workers_vllm_takes_what_it_is_given_of_a_gpu(
    versions, tmp_path, monkeypatch, given, taken
):
    asked: list[float] = []

    async def refuse(_model, _data, settings, **__) -> VllmEngine:
        asked.append(settings.gpu_memory_share)
        raise ChildFailed("no server today")

    monkeypatch.setattr("node.hosting.engine_hosts.make_vllm", refuse)
    config = NodeConfig(
        run=RUN, data_dir=tmp_path, threads=1, engine="vllm", engine_gpu_share=given
    )

    async def body():
        host = PolicyHost(config)
        with pytest.raises(ChildFailed, match="no server today"):
            await host.load(versions[0])
        await host.stop()

    run(body)
    assert asked == [taken]
    assert children() == []


def gpu_flags(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a build of vLLM for GPUs would be started."""
    with monkeypatch.context() as patch:
        patch.setattr(server, "is_cpu_build", lambda: False)
        return " ".join(server._command(engine.directory, engine._settings, Path("x")))


async def sampled_through(host: PolicyHost, version: Path) -> list[Completion]:
    """Long completions, in the middle of which vLLM is given a version."""
    made: list[Completion] = []

    async def generate() -> None:
        assert host.serving is not None
        [group] = await host.serving.engine.generate(["1+1="], 8, LONG, 3)
        made.extend(group)

    assert host._host is not None
    assert isinstance(host._host.engine, VllmEngine)
    hold(host._host.engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        await held(host._host.engine)
        await host.load(version)
    return made


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_takes_versions_in_the_middle_and_is_checked_without_a_trainer(tmp_path, monkeypatch):
    use_holding_worker(monkeypatch)
    first, second, third = (
        model_directory(tmp_path / f"v0000000{n}", n, stops=False, context_tokens=512)
        for n in (1, 2, 3)
    )
    made: list[Completion] = []

    async def body():
        config = NodeConfig(run=RUN, data_dir=tmp_path / "data", threads=1, engine="vllm")
        host = PolicyHost(config)
        try:
            await host.load(first)
            assert host.serving is not None
            assert host.serving.tokenizer == open_policy(first).fingerprint
            assert host.paused_s == 0.0  # nothing was sampled before
            assert len(children()) == 2  # the server's keeper, and who says what is right
            made.extend(await sampled_through(host, second))
            assert host.paused_s is not None
            assert host.paused_s > 0
            assert "--gpu-memory-utilization 0.9" in gpu_flags(host._host.engine, monkeypatch)
            assert (host.version, await serves(host)) == (2, 2)
            (third / CORRUPT).touch()
            with pytest.raises(ChildFailed, match="differ from the trainer's"):
                await host.load(third)
            assert (host.version, await serves(host)) == (2, 2)
            os.kill(host._host.reference._process.pid, signal.SIGKILL)
            os.killpg(host._host.engine.pid, signal.SIGKILL)
            (third / CORRUPT).unlink()
            await host.load(third)
            assert (host.version, await serves(host)) == (3, 3)
        finally:
            await host.stop()
        assert children() == []

    run(body, timeout_s=VLLM_TIMEOUT_S)
    policies = {1: open_policy(first), 2: open_policy(second)}
    assert len(made) == 8
    runs = [tuple(version for version, _ in version_spans(c)) for c in made]
    assert (1, 2) in runs
    assert set(runs) <= {(1, 2), (2,)}
    for completion in made:
        begin = 0
        for version, count in version_spans(completion):
            said = reference_logprobs(policies[version], "1+1=", completion, LONG)
            part = slice(begin, begin + count)
            assert completion.logprobs[part] == pytest.approx(said[part], abs=2e-3)
            begin += count
