"""A vLLM server process.

It listens on a Unix socket in a directory that only this user can enter, so no port can be taken
and nobody else reaches its development routes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final, Self

import httpx
import trio

from node.engines.vllm.concurrency import EngineLoad
from node.interfaces.engine import Tell
from node.interfaces.prompts import PLAIN_RULES, TemplateRules, Thinking
from node.interfaces.quantisation import Quantisation, server_flags
from node.interfaces.trainer_spec import Precision
from node.system.bounded_server import WholeBody
from node.system.child_environment import child_environ
from node.system.pause_gate import Gate
from swarm.errors import ChildFailed, ConfigError

LOG_NAME: Final = "vllm.log"
SOCKET_NAME: Final = "api.sock"
MODEL_NAME: Final = "policy"
WORKER_EXTENSION = "node.engines.vllm.worker.ReloadExtension"  # tests replace it
CPU_CACHE_SHARE: Final = 0.25  # of the free memory, for keys and values
CPU_CACHE_BYTES_MIN: Final = 134_217_728  # also where less is free
CPU_CACHE_BYTES_MAX: Final = 17_179_869_184
BATCH_TOKENS_MIN: Final = 4096  # of prompts in one step, on CPUs
CACHE_BLOCK_TOKENS: Final = 128  # on CPUs, the unit in which a sequence takes room
GPU_MEMORY_SHARE: Final = 0.4  # weights, keys and values; the trainer has the rest
GPU_MEMORY_SHARE_ALONE: Final = 0.9  # where no trainer is on the same GPU
GPU_SHARE_ASLEEP: Final = 0.06  # that a server holds in its sleep: its context, graphs, gaps
GPU_PARAMETER_BYTES: Final = 2  # bfloat16
GPU_CACHE_BYTES_MIN: Final = 2**30  # for keys and values, and what a step computes with
GPU_RESERVE_BYTES: Final = 3 * 2**30  # what two processes take besides: contexts, gaps
SEQUENCES_MAX: Final = 128  # sampled at a time, on CPUs
GPU_SEQUENCES_MAX: Final = 1024
CONNECTIONS_MAX: Final = 256  # of requests for completions
CONTROL_CONNECTIONS_MAX: Final = 8  # besides these: what interrupts must not wait for them
REQUEST_TIMEOUT_S: Final = 900.0
START_TIMEOUT_S: Final = 1800.0  # a large model from a slow disk; one that ends is seen at once
STOP_TIMEOUT_S: Final = 15.0
STARTING_TOLD_S: Final = 120.0  # between words on a server that is not up yet
_HEALTH_INTERVAL_S: Final = 0.25
_HEALTH_TIMEOUT_S: Final = 20.0  # a busy machine is no failure
_METRICS: Final = 4  # that `_METRIC` finds
_CACHE_TOKENS: Final = re.compile(
    r'^vllm:cache_config_info\{[^}]*\bkv_cache_size_tokens="(\d+)"', re.MULTILINE
)
_NOTE_LINES: Final = 20
_LINE_CHARS: Final = 300
_PASSING: Final = re.compile("Free memory on device|memory profiling")  # others on the same GPU
_CAUSE: Final = re.compile(  # the last line of a traceback, behind what vLLM's log puts before it
    r"^(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?"
    r"((?![\w.]*EngineDeadError)[\w.]*(?:Error|Exception): (?!Engine core init).*)"
)

_METRIC: Final = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)"
    r"\{[^}]*\} (\S+)$",
    re.MULTILINE,
)

_ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # on a few cores, the system places threads best
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets a build for CPUs do without one more process
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and load
}


class ServerFailed(ChildFailed):
    """The server ended, did not answer, or answered that it cannot go on."""


class ServerRefused(ServerFailed):
    """The server refused a request, or cannot run at all; trying again is useless."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    threads: int = 0  # of a build for CPUs; 0: chosen by `make_vllm`
    context_tokens: int = 1024
    cache_bytes: int = 0  # for keys and values, on CPUs; set by `make_vllm`
    start_timeout_s: float = START_TIMEOUT_S
    sequences_max: int = SEQUENCES_MAX  # sampled at a time
    gpu_memory_share: float = GPU_MEMORY_SHARE
    sleeps: bool = False  # can give its GPU memory back for a time
    quantization: Quantisation = "none"  # of the weights, as they go in
    template_rules: TemplateRules = PLAIN_RULES
    thinking: Thinking | None = None
    gpus: int = 1  # that the weights are cut over, layer by layer (tensor parallel)


def is_installed(package: str) -> bool:
    """Check without an import."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def is_cpu_build() -> bool:
    return is_installed("vllm-cpu")


def dtype(quantization: Quantisation = "none") -> Precision:
    """The precision of computing in the installed vLLM, apart from quantised weights."""
    return "float32" if is_cpu_build() and quantization == "none" else "bfloat16"


def gpu_share(
    total_bytes: int, held_bytes: int, parameters: int, name: str, gpus: int = 1
) -> float:
    """The share of a GPU for an engine that sleeps while the trainer works: all that the trainer
    does not hold between updates, less a reserve. With several `gpus` the trainer is on one, and
    vLLM takes the same share of each."""
    free_bytes = total_bytes - held_bytes - GPU_RESERVE_BYTES
    needed_bytes = GPU_PARAMETER_BYTES * -(-parameters // gpus) + GPU_CACHE_BYTES_MIN
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"model {name}: on a GPU of {total_bytes / 2**30:.1f} GiB the trainer holds "
            f"{held_bytes / 2**30:.1f}, and vLLM needs {needed_bytes / 2**30:.1f} beside it: train "
            "an adapter (--lora-rank), take a smaller model, more GPUs (engine_gpus), or --engine "
            "torch"
        )
    return round(min(free_bytes / total_bytes, GPU_MEMORY_SHARE_ALONE), 3)


class VllmServer:
    """A running server. Made by `start`, ended by `close`."""

    def __init__(self, process: trio.Process, scratch: Path, log: Path) -> None:
        self._process = process
        self._scratch = scratch
        self._log = log
        self._failed = False
        self.proven = False  # it has done what it is for; set by who saw that
        self._killed = False
        self._requests = Gate()  # shut for good where the server is closed
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=str(scratch / SOCKET_NAME),
                limits=httpx.Limits(max_connections=CONNECTIONS_MAX + CONTROL_CONNECTIONS_MAX),
            ),
            base_url="http://vllm",
            timeout=httpx.Timeout(REQUEST_TIMEOUT_S, pool=None),
            trust_env=False,
        )

    @classmethod
    async def start(
        cls, directory: Path, settings: ServerSettings, log: Path, tell: Tell | None = None
    ) -> Self:
        """Start a server of the model directory and wait until it answers."""
        scratch = Path(tempfile.mkdtemp(prefix="swarm-vllm-"))  # removed by the child as well
        process = await trio.lowlevel.open_process(
            [
                *(sys.executable, "-m", "node.engines.vllm.child", str(log), str(scratch)),
                *_command(directory, settings, scratch),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(settings, scratch),
        )
        server = cls(process, scratch, log)
        try:
            await server._wait_until_healthy(settings.start_timeout_s, tell)
        except BaseException:
            await server.close()
            raise
        return server

    @property
    def usable(self) -> bool:
        """True if its process runs and has not failed."""
        return self._process.returncode is None and not self._failed

    @property
    def pid(self) -> int:
        """The server's process group."""
        return self._process.pid

    async def post(self, route: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of a good answer.

        Raises:
            ServerRefused: it does not do that.
            ChildFailed: another answer, or none.
        """
        content = await trio.to_thread.run_sync(json.dumps, body) if body is not None else None
        if not self._requests.is_open:
            raise ChildFailed(f"the vLLM server was ended before {route}")
        try:
            async with self._requests.passing():
                response = await self._answer("POST", route, content)
        except httpx.TransportError as error:
            raise await self._failure(f"broke off {route} ({type(error).__name__})") from error
        if response.is_server_error:
            raise await self._failure(f"answered {route} with status {response.status_code}")
        if response.status_code != httpx.codes.OK:
            said = response.text[:_LINE_CHARS]
            raise ServerRefused(f"vLLM, {route}: status {response.status_code}: {said}")
        return response.content

    async def _answer(
        self,
        method: str,
        route: str,
        content: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> httpx.Response:
        body = (content or "").encode()
        request = self._client.build_request(
            method,
            route,
            content=body,
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(timeout_s, pool=None),
        )
        request.stream = WholeBody(body)
        return await self._client.send(request)

    async def order(self, route: str, body: dict[str, Any] | None = None) -> bytes:
        """As `post`, but fails when the engine dies meanwhile: vLLM would never answer then."""
        answers: list[bytes | ChildFailed] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                try:
                    answers.append(await self.post(route, body))
                except ChildFailed as error:
                    answers.append(error)
                nursery.cancel_scope.cancel()

            nursery.start_soon(ask)
            while True:
                await trio.sleep(_HEALTH_INTERVAL_S)
                if not await self.healthy():
                    break
            answers.append(await self._failure(f"lost its engine in {route}"))
            nursery.cancel_scope.cancel()
        if isinstance(answers[0], ChildFailed):
            raise answers[0]
        return answers[0]

    async def load(self) -> EngineLoad | None:
        """The load of the server; None if unknown."""
        try:
            response = await self._answer("GET", "/metrics", timeout_s=_HEALTH_TIMEOUT_S)
        except httpx.TransportError:
            return None
        found = {name: float(value) for name, value in _METRIC.findall(response.text)}
        if len(found) < _METRICS:
            return None
        room = _CACHE_TOKENS.search(response.text)
        return EngineLoad(
            running=int(found["num_requests_running"]),
            waiting=int(found["num_requests_waiting"]),
            cache_share=found["kv_cache_usage_perc"],
            preempted_total=int(found["num_preemptions_total"]),
            cache_tokens=int(room[1]) if room else 0,
        )

    async def close(self) -> None:
        """End the server and its children; may be called again."""
        with trio.CancelScope(shield=True):
            assert self._process.stdin is not None
            await self._process.stdin.aclose()
            with trio.move_on_after(STOP_TIMEOUT_S):
                await self._process.wait()
            if not self._killed:  # once, as a group's number is free again when nobody is in it
                self._killed = True
                with suppress(ProcessLookupError):  # a child that was killed alone left the server
                    os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            with trio.move_on_after(STOP_TIMEOUT_S):  # requests that are cut off end by themselves
                await self._requests.pause()
            await self._client.aclose()
            await trio.to_thread.run_sync(partial(shutil.rmtree, self._scratch, ignore_errors=True))

    async def _wait_until_healthy(self, timeout_s: float, tell: Tell | None) -> None:
        start_s = told_s = trio.current_time()
        with trio.move_on_after(timeout_s):
            while self.usable:
                if await self.healthy():
                    return
                now_s = trio.current_time()
                if tell is not None and now_s - told_s >= STARTING_TOLD_S:
                    told_s = now_s
                    waited = f"vLLM is not up after {now_s - start_s:.0f} s"
                    await tell(f"{waited}; what it says is in {self._log}")
                await trio.sleep(_HEALTH_INTERVAL_S)
            raise await self._failure("ended while starting")
        raise await self._failure(f"did not answer within {timeout_s:g} s")

    async def healthy(self) -> bool:
        """True if it answers and its engine lives."""
        try:
            response = await self._answer("GET", "/health", timeout_s=_HEALTH_TIMEOUT_S)
        except httpx.TransportError:
            return False  # no socket yet
        return response.status_code == httpx.codes.OK

    async def _failure(self, what: str) -> ChildFailed:
        self._failed = True
        lines = await trio.to_thread.run_sync(_lines, self._log)
        cause, its_own = _cause(lines)
        its_own = its_own and not self.proven and not _PASSING.search(cause)
        kind = ServerRefused if its_own else ServerFailed
        error = kind(f"the vLLM server {what}{cause} (log: {self._log})")
        error.add_note("\n".join(lines[-_NOTE_LINES:]))
        return error


def _command(directory: Path, settings: ServerSettings, scratch: Path) -> list[str]:
    flags = {
        "model": str(directory),
        "served-model-name": MODEL_NAME,
        "uds": str(scratch / SOCKET_NAME),
        "max-model-len": str(settings.context_tokens),
        "max-num-seqs": str(settings.sequences_max),
        "generation-config": "vllm",  # only what a request asks for decides how to sample
        "logprobs-mode": "processed_logprobs",  # of the distribution that is sampled from
        "chat-template-content-format": "string",
        "worker-extension-cls": WORKER_EXTENSION,
        "distributed-executor-backend": "uni" if settings.gpus == 1 else "mp",
        "uvicorn-log-level": "warning",
        "dtype": dtype(settings.quantization),
    }
    for name, value in server_flags(settings.quantization).items():
        flags[name] = value if isinstance(value, str) else json.dumps(value)
    # tokens in and out are what vLLM counts among its routes for scaling out
    switches = ["--disable-uvicorn-access-log", "--enable-scale-out"]
    if is_cpu_build():
        flags |= {
            "kv-cache-memory-bytes": str(settings.cache_bytes),
            "max-num-batched-tokens": str(max(BATCH_TOKENS_MIN, settings.context_tokens)),
        }
        # The CPU's generators cannot be wound back, which a seeded request cut in chunks needs.
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
    else:
        flags["gpu-memory-utilization"] = str(settings.gpu_memory_share)
        if settings.gpus > 1:
            flags["tensor-parallel-size"] = str(settings.gpus)
        if settings.sleeps:
            switches.append("--enable-sleep-mode")
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *(part for name, value in flags.items() for part in (f"--{name}", value)),
        *switches,
    ]


def _environment(settings: ServerSettings, scratch: Path) -> dict[str, str]:
    extra = {"TMPDIR": str(scratch), "OMP_NUM_THREADS": str(settings.threads)}
    if is_cpu_build():
        extra["TORCHDYNAMO_DISABLE"] = "1"
    return {**child_environ(), **_ENVIRONMENT, **extra}


def _lines(log: Path) -> list[str]:
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _cause(lines: Sequence[str]) -> tuple[str, bool]:
    """The first error of the log and True, or the log's last line and False."""
    for index, line in enumerate(lines):
        found = _CAUSE.search(line)
        if found:
            more = [each.strip() for each in lines[index + 1 : index + 2] if each[0] != "("]
            return f": {' '.join([found.group(1), *more])}"[:_LINE_CHARS], True
    return (f": {lines[-1].strip()}"[:_LINE_CHARS] if lines else ""), False
