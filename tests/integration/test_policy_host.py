"""The engine of a rollout worker, through its death and versions that come at the wrong moment."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import trio

from node.config import NodeConfig, RunConfig
from node.engines.base import Sampling
from node.worker_app import PolicyHost
from swarm.errors import ChildFailed
from tests.support import run
from tests.unit.training_support import qwen_directory

pytestmark = pytest.mark.integration

RUN = RunConfig.model_validate({"name": "host", "environments": [{"name": "scripted_sum"}]})


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[Path]:
    directory = tmp_path_factory.mktemp("versions")
    return [qwen_directory(directory / f"v0000000{number}", seed=number) for number in (1, 2)]


async def serves(host: PolicyHost) -> int:
    """The version that what is generated now says it is of."""
    assert host.serving is not None
    [[completion]] = await host.serving.engine.generate(["1+1="], 1, Sampling(4), 3)
    return completion.policy_version


async def kill(host: PolicyHost) -> None:
    assert host._process is not None
    assert host._process.pid is not None
    os.kill(host._process.pid, signal.SIGKILL)
    with pytest.raises(ChildFailed):
        await serves(host)


def children() -> list[int]:
    return [each.pid for each in psutil.Process().children() if "node.training" in _line(each)]


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
            await host.pause()
            await host.load(versions[1])
            await host.resume()
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
                await trio.sleep(0.1)
                nursery.start_soon(host.load, versions[1])
            assert (host.version, await serves(host)) == (2, 2)
            assert len(children()) == 1
        finally:
            await host.stop()
        assert children() == []

    run(body)
