"""Real SkyPilot, without a cloud: what it makes of the coordinator's machines, and how far a start
goes where nobody has credentials. Its API server runs on loopback meanwhile."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import extra_env

pytestmark = [pytest.mark.sky, pytest.mark.long, pytest.mark.integration]

ROOT = Path(__file__).parents[2]
CHILD_TIMEOUT_S = 300.0
# Two offers, as the catalogue's files have them: who wrote them by hand is not overwritten.
VMS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Region,SpotPrice,Price,AvailabilityZone
1x_RTX4090_SECURE,RTX4090,1.0,16.0,24.0,,US,0.31,0.69,US-CA-1
1x_RTX4090_SECURE,RTX4090,1.0,16.0,24.0,,CZ,0.29,0.66,CZ-1
"""
ACCELERATORS = "AcceleratorName,AcceleratorMemory,Clouds\nRTX4090,24GB,RunPod\n"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `sky_child` saw."""
    directory = tmp_path_factory.mktemp("sky")
    catalogue = directory / ".sky" / "catalogs" / "v8"
    for name, text in (("runpod/vms.csv", VMS), ("common/accelerators.csv", ACCELERATORS)):
        (catalogue / name).parent.mkdir(parents=True)
        (catalogue / name).write_text(text)
    (directory / "run.toml").write_text('name = "x"')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    python = extra_env.find("sky")
    assert python is not None
    # a file and no pipe: the server that it starts keeps what it inherits open
    log = directory / "child.log"
    try:
        with log.open("w") as output:
            done = subprocess.run(
                [str(python), "-m", "tests.integration.sky_child", str(directory)],
                cwd=ROOT,
                env={
                    **kept,
                    "HOME": str(directory),
                    "PYTHONPATH": str(ROOT),
                    "SKYPILOT_API_SERVER_LOCAL_PORT": str(port),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CHILD_TIMEOUT_S,
                check=False,
            )
        assert done.returncode == 0, log.read_text()[-4000:]
        yield json.loads((directory / "outcome.json").read_text())
    finally:
        end_server(port)


def end_server(port: int) -> None:
    """The API server that was started for this port, and what it started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "sky.server.server" in words and f"--port={port}" in words:
                for each in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.Error):
                        each.kill()


def test_skypilot_takes_the_task_as_it_is_meant(outcome: dict[str, Any]) -> None:
    task = outcome["task"]
    its = task["resources"]
    assert its["infra"] == "runpod/US"
    assert its["accelerators"] == {"RTX4090": 1}
    assert (its["use_spot"], its["disk_size"]) == (True, 80)
    assert its["image_id"] == {"US": "docker:ubuntu:24.04"}
    assert task["setup"].splitlines() == ["set -e", "echo one", "echo two"]
    assert set(task["file_mounts"]) == {"~/swarm-worker/identity.pem", "~/swarm-worker/run.toml"}
    assert "swarm-node join --run run.toml" in task["run"]
    assert task["num_nodes"] == 1


def test_prices_are_those_of_its_catalogue(outcome: dict[str, Any]) -> None:
    prices = outcome["prices"]
    assert prices["spot"] == pytest.approx(0.31)
    assert prices["on demand"] == prices["instance"] == pytest.approx(0.69)
    assert prices["anywhere"] == pytest.approx(0.66)
    for name in ("no such offer", "no such instance", "no such cloud", "any cloud"):
        assert prices[name].count("\n") == 0
        assert "its price: " in prices[name]
    assert "no such offer in runpod/US" in prices["no such offer"]
    assert "names no cloud" in prices["any cloud"]


def test_what_is_wrong_it_says_itself_in_one_line(outcome: dict[str, Any]) -> None:
    for line in outcome["wrong"].values():
        assert line.startswith("sky: ")
        assert "\n" not in line


def test_without_credentials_a_start_fails_in_one_line_and_leaves_nothing(
    outcome: dict[str, Any],
) -> None:
    assert outcome["start"] == "spot: Cloud access is not set up. Run: sky check"
    assert outcome["left"] == []


def test_a_dry_run_goes_as_far_as_credentials(outcome: dict[str, Any]) -> None:
    """Task, resources and accelerator are valid; then a cloud is needed."""
    assert outcome["dry run"] == "sky: Cloud access is not set up. Run: sky check"


def test_a_machine_that_it_does_not_know_was_lost(outcome: dict[str, Any]) -> None:
    assert outcome["lost"][0] == "failed"
    assert "it is gone" in outcome["lost"][1]
    assert outcome["released"] == []
    assert outcome["threads"] == ["MainThread"]  # nothing keeps a coordinator from leaving
