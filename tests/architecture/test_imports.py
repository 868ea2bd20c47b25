"""The import contracts hold, and each of them would notice the violation that it is there for."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "coordinator")
FORBIDDEN_EVERYWHERE_LIGHT = ("torch", "vllm", "transformers")

# contract name (as in pyproject.toml) -> files, each with a line that breaks that contract alone
VIOLATIONS = {
    "node and coordinator stand on swarm and never on each other": [
        ("node/run/planted.py", "import coordinator"),
        ("coordinator/model/planted.py", "import node"),
        ("swarm/limits/planted.py", "import node"),
    ],
    "the rooms of swarm stand on each other in one order": [
        ("swarm/limits/planted.py", "import swarm.peers.reputation"),
        ("swarm/exchange/planted.py", "import swarm.leases.lease_table"),
        ("swarm/planted.py", ""),  # belongs to no room
    ],
    "the rooms of node stand on each other in one order": [
        ("node/observe/planted.py", "import node.run.app"),
        ("node/hosting/planted.py", "import node.run.sapo"),
        ("node/run/planted.py", "import node.simulation.scenario"),
        ("node/planted.py", ""),  # belongs to no room
    ],
    "the trainer knows nothing of its being cut": [
        ("node/train/trainer.py", "import node.train.sharded_team"),
    ],
    "the rooms of the coordinator stand on each other in one order": [
        ("coordinator/model/planted.py", "import coordinator.fleet_file"),
        ("coordinator/fleet_file.py", "import coordinator.providers.base"),
        ("coordinator/planted.py", ""),  # belongs to no room
    ],
    "both transports stand on what they share": [
        ("swarm/transport/memory/planted.py", "import swarm.transport.libp2p.addresses"),
        ("swarm/transport/connection_slots.py", "import swarm.transport.base"),
    ],
    "a libp2p host stands on reachability, admission and connections in this order": [
        ("swarm/transport/libp2p/yamux.py", "import swarm.transport.libp2p.admission"),
        ("swarm/transport/libp2p/planted.py", ""),
    ],
    "broadcasts stand on stores, and stores on the format of versions": [
        ("swarm/weights/manifest.py", "import swarm.weights.chunk_store"),
        ("swarm/weights/version_store.py", "import swarm.weights.piece_selection"),
        ("swarm/weights/planted.py", ""),
    ],
    "swarm and coordinator import neither torch nor vLLM nor transformers": [
        ("swarm/limits/planted.py", "import torch"),
        ("coordinator/model/planted.py", "import vllm.engine"),
        ("swarm/transport/planted.py", "def late():\n    import transformers"),
    ],
    "libp2p is imported in swarm.transport.libp2p alone": [
        ("swarm/limits/planted.py", "import libp2p"),
        ("swarm/transport/planted.py", "from libp2p.host import basic_host"),
        ("node/system/planted.py", "import libp2p.peer.id"),
    ],
    "zeroconf is imported in swarm.peers.mdns alone": [
        ("swarm/limits/planted.py", "import zeroconf"),
        ("node/system/planted.py", "from zeroconf import Zeroconf"),
    ],
    "starlette and uvicorn are imported in swarm.telemetry.dashboard.page_server alone": [
        ("swarm/limits/planted.py", "import starlette"),
        ("swarm/telemetry/dashboard/planted.py", "from starlette.routing import Route"),
        ("node/system/planted.py", "import uvicorn"),
        ("coordinator/model/planted.py", "from starlette.applications import Starlette"),
    ],
    "prometheus_client and h11 are imported in node.observe.metrics_page alone": [
        ("node/system/planted.py", "import prometheus_client"),
        ("swarm/limits/planted.py", "import h11"),
    ],
    "asyncio and what needs it stay in swarm.telemetry.mqtt and node.observe.embedded_broker": [
        ("node/system/planted.py", "import amqtt.broker"),
        ("swarm/limits/planted.py", "import aiomqtt"),
        ("node/system/planted.py", "import asyncio"),
        ("coordinator/model/planted.py", "from paho.mqtt import client"),
    ],
    "zstandard is imported in swarm.weights.entropy_coding alone": [
        ("swarm/limits/planted.py", "import zstandard"),
        ("swarm/weights/chunk_store.py", "from zstandard import ZstdCompressor"),
    ],
    "reasoning_gym is imported in node.envs.gym.upstream alone": [
        ("node/system/planted.py", "import reasoning_gym"),
        ("node/envs/planted.py", "from reasoning_gym import factory"),
    ],
    "verifiers is imported in node.envs.taskset_upstream alone": [
        ("node/system/planted.py", "import verifiers.v1"),
        ("node/envs/planted.py", "def late():\n    import verifiers"),
    ],
    "mpmath is imported in node.envs.data.expressions alone": [
        ("node/system/planted.py", "import mpmath"),
        ("node/envs/data/planted.py", "def late():\n    import mpmath"),
    ],
    "re2 is imported in node.envs.data.regex_scorer alone": [
        ("node/system/planted.py", "import re2"),
        ("node/envs/data/planted.py", "def late():\n    import re2"),
    ],
    "jsonschema is imported in node.envs.data.schema_scorer alone": [
        ("node/system/planted.py", "import jsonschema"),
        ("node/envs/data/planted.py", "def late():\n    import jsonschema"),
    ],
    "pyarrow is imported in node.envs.data.readers alone": [
        ("node/system/planted.py", "import pyarrow"),
        ("node/envs/data/planted.py", "def late():\n    import pyarrow"),
    ],
    "peft is imported in node.policies.adapters alone": [
        ("node/system/planted.py", "import peft"),
        ("node/policies/planted.py", "def late():\n    from peft import LoraConfig"),
    ],
    "bitsandbytes is imported in node.policies.frozen alone": [
        ("node/system/planted.py", "import bitsandbytes"),
        ("node/policies/planted.py", "def late():\n    from bitsandbytes import nn"),
    ],
    "sky is imported in coordinator.providers.skypilot alone": [
        ("coordinator/model/planted.py", "import sky"),
        ("coordinator/providers/planted.py", "def late():\n    from sky import launch"),
        ("node/system/planted.py", "import sky.client.sdk"),
    ],
    "production code does not import the simulated network": [
        ("node/run/planted.py", "import swarm.simulation"),
        ("coordinator/model/planted.py", "import swarm.simulation"),
    ],
}
CASES = [(name, path, line) for name, plants in VIOLATIONS.items() for path, line in plants]
HEADING = re.compile(r"^(.+)\n-+$", re.M)


def lint_imports(directory: Path) -> tuple[int, dict[str, str]]:
    """The exit status, and the report of each broken contract by the contract's name."""
    code = "from importlinter.cli import lint_imports_command as c; c()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-cache", "--no-logo"],
        cwd=directory,
        env={"PYTHONPATH": str(directory), "COLUMNS": "200", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Contracts:" in done.stdout, done.stdout + done.stderr
    _, *sections = HEADING.split(done.stdout.partition("Broken contracts")[2])
    return done.returncode, dict(zip(sections[::2], sections[1::2], strict=True))


def plant(tree: Path) -> dict[str, set[str]]:
    """Add every violation to the tree; the modules that break each contract."""
    modules: dict[str, set[str]] = {}
    for number, (contract, path, line) in enumerate(CASES):
        file = tree / path
        if file.stem == "planted":  # one module for each violation
            file = file.with_stem(f"planted_{number}")
        with file.open("a") as source:
            source.write(f"\n{line}\n")
        module = ".".join(file.relative_to(tree).with_suffix("").parts)
        modules.setdefault(contract, set()).add(module)
    return modules


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages and of the contracts."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold() -> None:
    assert lint_imports(ROOT) == (0, {})


def test_each_violation_is_found_by_its_contract_alone(tree: Path) -> None:
    planted = plant(tree)
    status, reports = lint_imports(tree)
    named = {
        contract: set(re.findall(r"^-\s+([\w.]+)", report, re.M))
        for contract, report in reports.items()
    }
    assert status == 1
    assert named == planted


def test_every_contract_has_a_violation() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    contracts = text.split("[[tool.importlinter.contracts]]")[1:]
    assert len(contracts) == len(VIOLATIONS)
    assert all(any(f'"{name}"' in contract for contract in contracts) for name in VIOLATIONS)


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["swarm", "coordinator"])
def test_light_packages_stay_light(package: str) -> None:
    """Also what they import at run time, by whatever way, is neither torch nor vLLM."""
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    )
    assert modules
    held = modules_after("import " + ", ".join(modules))
    assert held.isdisjoint(FORBIDDEN_EVERYWHERE_LIGHT)


def test_lightness_is_really_measured() -> None:
    assert "torch" in modules_after("import torch")
