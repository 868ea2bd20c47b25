"""A served teacher, which says how likely own completions are to it."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Final

import trio

from node.engines.openai_server import ChatAsks, OpenAiServer, ServerTrouble, open_server
from node.methods.groups import Advantages
from node.methods.replay import Teacher
from node.stages.stage import BatchGroup, Stage, View
from swarm.errors import ConfigError

REQUESTS_MAX: Final = 16  # under way at once
Column = tuple[float, ...]


@asynccontextmanager
async def open_teacher(set_to: Teacher, asks: ChatAsks) -> AsyncIterator[OpenAiServer]:
    """The teacher's server. Raises ConfigError and ServerTrouble."""
    key = os.environ.get(set_to.key_env) if set_to.key_env else None
    if set_to.key_env and not key:
        raise ConfigError(f"key_env={set_to.key_env}: that variable is not set")
    async with open_server(set_to.url, key, set_to.prompts, REQUESTS_MAX, asks) as server:
        await server.choose(set_to.model or None)
        yield server


class LearnFromTeacher(Stage[Teacher]):
    """On-policy distillation: each token's advantage grows by weight (log q - log p), q the
    teacher's probability and p that of the policy that sampled it. Only own completions to a task's
    own prompt are asked about. What the teacher has not told in time is trained on without it."""

    def __init__(self, set_to: Teacher) -> None:
        super().__init__(set_to)
        self._told: list[list[Column]] = []  # of each group of the batch

    async def advantage(self, batch: Sequence[BatchGroup], at: View) -> Advantages | None:
        """None. Here, and not in `weigh`, because it may wait."""
        self._told = [[() for _ in each.scored.rewards] for each in batch]
        asks = ChatAsks(at.config.run.chat.arguments)
        with suppress(ServerTrouble, ConfigError), trio.move_on_after(self.set_to.wait_s):
            async with open_teacher(self.set_to, asks) as server, trio.open_nursery() as nursery:
                for each, columns in zip(batch, self._told, strict=True):
                    if not each.drawn and each.is_bare:
                        nursery.start_soon(self._ask, server, each, columns, at)
        self.acted += sum(map(bool, chain.from_iterable(self._told)))
        return None

    async def _ask(
        self, server: OpenAiServer, each: BatchGroup, columns: list[Column], at: View
    ) -> None:
        group = each.scored.group
        own = group.completions[: len(columns) - each.guided]
        if group.tokenizer != at.tokenizer:
            return
        with suppress(ServerTrouble, ConfigError):  # it may be back in the next round
            context = await server.tokens_of(each.scored.prompt)
            for place, made in enumerate(own):
                columns[place] = await server.logprobs_of(context, made.token_ids)

    def weigh(
        self, batch: Sequence[BatchGroup], worth: Advantages, at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        found = []
        added: list[list[Column]] = [[] for _ in batch[len(self._told) :]]  # last, since then
        for each, columns in zip(batch, [*self._told, *added], strict=True):
            guidance = [()] * (len(each.scored.rewards) - len(columns))  # that joined since then
            padded = (*columns, *guidance)
            found.append(replace(each, teacher_logprobs=padded) if any(padded) else each)
        return found, worth
