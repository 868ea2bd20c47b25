"""That no child of a node gets its secrets, asked of the processes themselves."""

import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from node.cli import _config, _parser
from node.engines.vllm import server as vllm_server
from node.engines.vllm.server import ServerSettings, VllmServer
from node.observe.monitoring import embedded_broker
from node.train.process import _spawn
from node.verify.verifier import ProcessVerifier
from swarm.errors import ChildFailed
from tests.brokers import free_port
from tests.support import environ_of, run
from tests.unit.tasks_support import make_config, make_run

pytestmark = pytest.mark.integration

SECRETS = ("SWARM_NODE_TELEMETRY_PASSWORD", "SWARM_NODE_PASSPHRASE", "SWARM_NODE_INVITE", "OUR_KEY")
SETTINGS = ServerSettings(threads=1, context_tokens=64, cache_bytes=1, start_timeout_s=60.0)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE_PASSPHRASE_ENV", "OUR_KEY")
    _config(_parser().parse_args(["join"]))
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("NO_SECRET", "a setting")


def check(environ: Mapping[str, str], *, strict: bool = False) -> None:
    """`strict`: it gets what Python needs and nothing else."""
    assert environ.get("NO_SECRET") == (None if strict else "a setting")
    assert [name for name in SECRETS if name in environ] == []
    assert "a secret" not in environ.values()


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.parametrize("sandbox", ["auto", "off"])
def test_the_verifiers(sandbox: str) -> None:
    async def body() -> None:
        before = children()
        made = make_run({"name": "scripted_sum"})
        config = make_config(made, verify_sandbox=sandbox)
        async with ProcessVerifier.open(config) as verifier:
            await verifier.problems([])
            [child] = children() - before
            check(await environ_of(child), strict=sandbox == "auto")

    run(body)


def test_the_trainers(tmp_path: Path) -> None:
    async def body() -> None:
        channel = await _spawn("node.train.trainer_worker", tmp_path / "log")
        try:
            check(await environ_of(psutil.Process(channel.process.pid)))
        finally:
            await channel.close(0.0)

    run(body)


def test_the_vllm_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "environ"
    tell = f"open({str(told)!r}, 'w').write(open('/proc/self/environ').read())"
    monkeypatch.setattr(vllm_server, "_command", lambda *_: [sys.executable, "-c", tell])

    async def body() -> None:
        with pytest.raises(ChildFailed):
            await VllmServer.start(tmp_path, SETTINGS, tmp_path / "log")

    run(body)
    lines = told.read_text().split("\0")
    check(dict(line.split("=", 1) for line in lines if line))


def test_the_embedded_brokers() -> None:
    async def body() -> None:
        before = children()
        async with embedded_broker(f"127.0.0.1:{free_port()}"):
            [child] = children() - before
            check(await environ_of(child))

    run(body)
