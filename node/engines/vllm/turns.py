"""What stands between two turns of a transcript, found out from a server's chat template.

It is what `node.policies.policy.Policy.between_turns` has, without the library that renders there:
rendered by difference, so that a template that rewrites earlier turns changes none.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.engines.vllm.server import MODEL_NAME
from node.engines.vllm.text import ModelText
from node.engines.vllm.unfinished import Unfinished
from node.engines.vllm.work import VllmWork, prompt_seeds
from node.interfaces.engine import Context, Sampling
from node.interfaces.prompts import TWO_TURNS, around_reply, behind, placeholder
from swarm.errors import ConfigError

Tokenize = Callable[[dict[str, Any]], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True)
class Between:
    """What is put around a reply."""

    before: tuple[int, ...]  # without the end token, which was sampled
    after: tuple[int, ...]
    lines: bool = False  # it stands on a line of its own instead

    def ids(self, text: ModelText, reply: str) -> list[int]:
        """The ids between a turn that ended by itself and the next one."""
        if self.lines:
            return text.encode(f"\n{reply}\n")
        return [*self.before, *text.encode(reply), *self.after]


async def between(text: ModelText, tokenize: Tokenize) -> Between:
    """What a model has around a reply. `tokenize`: what a server makes of a request for ids.

    Raises:
        ConfigError: its chat template leaves out what it is given.
    """
    if not text.chat:
        word = placeholder(0)
        ids = await tokenize({"model": MODEL_NAME, "prompt": word})
        after = behind(text.encode(word), ids)
        return Between((), after, lines=not after)
    ids = await tokenize(
        {"model": MODEL_NAME, "messages": TWO_TURNS, "add_generation_prompt": True}
    )
    rendered = text.spell(ids)
    around = around_reply(rendered)
    if around is None or text.encode(rendered, special=True) != ids:
        raise ConfigError(
            "the model's chat template leaves out what was said before, or its tokens do not spell "
            "it; a run with turns needs another model, or --engine torch"
        )
    end, begin = around
    before = text.encode(end, special=True)
    if before and before[0] in text.eos_ids:
        del before[0]
    return Between(tuple(before), tuple(text.encode(begin, special=True)))


def works_of(
    contexts: Sequence[Context],
    begun: Mapping[str, Sequence[int]],
    around: Between,
    text: ModelText,
    sampling: Sampling,
    seed: int,
    context_tokens: int,
) -> list[VllmWork | None]:
    """The next turn of each transcript, to be sampled; None: there is no room for it. `begun`: the
    ids of each prompt. Random numbers are other ones in each turn."""
    seeds = prompt_seeds([f"{each.prompt}\x1f{len(each.turns)}" for each in contexts], seed)
    works: list[VllmWork | None] = []
    for context, own in zip(contexts, seeds, strict=True):
        ids = list(begun[context.prompt])
        for sampled, reply in context.turns:
            ids += [*sampled, *around.ids(text, reply)]
        room = min(context.tokens_max, context_tokens - len(ids))
        works.append(VllmWork(Unfinished(ids, 1, room, own), 1, sampling) if room > 0 else None)
    return works
