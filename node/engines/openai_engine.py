"""An engine whose model another server serves, and the trainer of a node that has none.

The node generates, verifies and shares. It takes no weights and trains nothing, so it needs no
torch. While its server is away it waits.
"""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final

import trio

from node.engines.openai_server import (
    PLAIN_ASKS,
    ChatAsks,
    OpenAiServer,
    Prompts,
    Said,
    ServerTrouble,
    open_server,
)
from node.interfaces.engine import Capabilities, Engine, EngineInfo, Sampling, Tell
from node.interfaces.trainer import PolicyInfo, TrainingGroup, TrainReport
from node.interfaces.trainer_spec import Precision
from swarm.errors import ChildFailed, ConfigError
from swarm.limits.backoff import Backoff
from swarm.rollouts import Completion
from swarm.wire.messages import NAME_CHARS_MAX

RETRY: Final = Backoff(1.0, 60.0)  # seconds between tries of an absent server
ROUND_S_MIN: Final = 1.0  # bounds the rate of announcements, which training bounds elsewhere
TRIAL: Final = "1+1="
TRIAL_TOKENS: Final = 16  # by which a thought that is told apart has begun
EMPTY_MAX: Final = 8  # answers in a row, to one prompt


_EMPTY: Final = (
    "its answers are empty, and those are not shared; see that its model's words come as content"
)


class ServedModel(Engine):
    """Engine and trainer in one. Made by `open_served_model`."""

    capabilities = Capabilities(requests=True, loads=False, counts=True)

    def __init__(self, server: OpenAiServer, tokenizer: str, requests_max: int) -> None:
        self._server = server
        self.maker = EngineInfo("openai", server.precision)
        self._tokenizer = tokenizer
        self._slots = trio.CapacityLimiter(requests_max)
        self._sampled = 0
        self._next_round_at = -math.inf
        self._away = False  # the server, and that was told
        self.tell: Tell | None = None

    @property
    def tells_logprobs(self) -> bool:
        return bool(self._tokenizer) and self._server.tells_logprobs

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        """Send one request for each completion, because many servers ignore a larger number.
        Whether a seed repeats its completions depends on the server."""
        rng = Random(seed)
        seeds = [[rng.getrandbits(31) for _ in range(completions_each)] for _ in prompts]
        found: dict[tuple[int, int], Completion] = {}
        refused: list[ConfigError] = []
        async with trio.open_nursery() as nursery:

            async def one(at: int, place: int) -> None:
                try:
                    async with self._slots:
                        said = await self._said(prompts[at], sampling, seeds[at][place])
                except ConfigError as error:
                    refused.append(error)
                    nursery.cancel_scope.cancel()
                    return
                self._sampled += said.tokens
                found[at, place] = Completion(
                    text=said.text,
                    token_ids=said.token_ids if self._tokenizer else (),
                    logprobs=said.logprobs if self._tokenizer else (),
                    finish_reason=said.finish_reason,
                    policy_version=0,
                )

            for at in range(len(prompts)):
                for place in range(completions_each):
                    nursery.start_soon(one, at, place)
        if refused:
            raise refused[0]
        return [
            tuple(found[at, place] for place in range(completions_each))
            for at in range(len(prompts))
        ]

    async def _said(self, prompt: str, sampling: Sampling, seed: int) -> Said:
        """Ask the server for a completion until it answers. ConfigError: it answers with nothing,
        which is no sample of its model: what was said may be where nobody looks."""
        tries = empty = 0
        while True:
            try:
                said = await self._server.complete(prompt, sampling, seed)
            except ServerTrouble as trouble:
                wait_s = max(trouble.wait_s, RETRY.after(tries))
                tries += 1
                was_away, self._away = self._away, True  # before another request fails as well
                if self.tell is not None and not was_away:
                    where = f"the server at {self._server.url}"
                    await self.tell(f"{where}: {trouble}; the node tries until it answers")
                await trio.sleep(wait_s)
            else:
                self._away = False
                if said.text:
                    return said
                empty += 1
                seed += 1
                if empty == EMPTY_MAX:
                    raise ConfigError(f"--engine-url {self._server.url}: {_EMPTY}")

    def take_sampled(self) -> int:
        sampled, self._sampled = self._sampled, 0
        return sampled

    async def load(self, weights: Path, policy_version: int) -> None:
        raise ChildFailed("a served model takes no weights")

    async def info(self) -> PolicyInfo:
        """The server's model. An unknown tokenizer gets a name that no other node has."""
        name = self._server.name
        tokenizer = self._tokenizer or f"served:{name}"[:NAME_CHARS_MAX]
        return PolicyInfo(name, 0, tokenizer, 0, 0, clipping_active=True)

    async def train(self, groups: Sequence[TrainingGroup]) -> TrainReport:
        """Train nothing, and return `ROUND_S_MIN` after the last call at the earliest."""
        await trio.sleep_until(max(trio.current_time(), self._next_round_at))
        self._next_round_at = trio.current_time() + ROUND_S_MIN
        nan = float("nan")
        return TrainReport(0, 0.0, 0.0, 0, 0.0, nan, nan, 0, 0.0)

    async def features(self, groups: Sequence[TrainingGroup]) -> list[list[tuple[float, ...]]]:
        raise ChildFailed("a served model's hidden states cannot be read")

    async def prompt_logprobs(self, prompts: Sequence[str]) -> list[tuple[list[str], list[float]]]:
        raise ChildFailed("a served model does not tell the log-probs of prompts")

    async def save(self, directory: Path) -> None:
        await trio.lowlevel.checkpoint()

    async def roll_back(self, directory: Path) -> int:
        raise ChildFailed("a served model takes no weights")

    async def slow_down(self, rate_share: float) -> None:
        await trio.lowlevel.checkpoint()

    async def export(self, directory: Path, precision: Precision = "float32") -> None:
        raise ChildFailed("a served model has no weights here")

    async def export_whole(self, directory: Path, precision: Precision = "float32") -> None:
        await self.export(directory, precision)

    async def memory_bytes(self) -> int:
        return 0


@asynccontextmanager
async def open_served_model(
    url: str,
    model: str | None,
    key: str | None,
    *,
    prompts: Prompts = "chat",
    tokenizer: str = "",
    requests_max: int = 16,
    asks: ChatAsks = PLAIN_ASKS,
) -> AsyncIterator[ServedModel]:
    """A served model that has answered once. `model` None: the only one. `tokenizer`:
    fingerprint."""
    async with open_server(url, key, prompts, requests_max, asks) as server:
        try:
            await server.choose(model)
            said = await server.complete(TRIAL, Sampling(max_new_tokens=TRIAL_TOKENS), 0)
        except ServerTrouble as trouble:
            raise ConfigError(f"--engine-url {url}: {trouble}; is the server running?") from None
        if not said.text:
            raise ConfigError(f"--engine-url {url}: {_EMPTY}")
        yield ServedModel(server, tokenizer, requests_max)
