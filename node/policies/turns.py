"""Conversations of several turns as tokens, for one policy.

A policy's own turns stay the ids that it sampled. What stands between two of them, the end of its
turn and what was said to it, is rendered from the chat template by difference: nothing that came
before is ever rendered again, so a template that rewrites earlier turns changes none.
"""

from collections.abc import Iterable

from node.interfaces.prompts import MARK
from node.policies.policy import Policy
from swarm.errors import ConfigError

_PLACES = ("turn-7f3a-question", "turn-7f3a-said", "turn-7f3a-reply")


def glue(policy: Policy, reply: str) -> list[int]:
    """The ids between a turn that ended by itself, its end token included, and the next one.

    Raises:
        ConfigError: the chat template leaves out what it is given.
    """
    template = policy.tokenizer.chat_template
    plain = policy.encode_completion(reply)
    if not template:
        after = _after_prompt(policy)
        return [*plain, *after] if after else policy.encode_completion(f"\n{reply}\n")
    question, said, place = _PLACES
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": said},
        {"role": "user", "content": place},
    ]
    _, found, rest = policy.render(messages).partition(said)
    end, found_reply, begin = rest.partition(place)
    if not (found and found_reply):
        raise ConfigError(
            f"model {policy.name}: its chat template leaves out what was said before; a run with "
            "turns needs another model"
        )
    ending = policy.encode_special(end)
    if ending and ending[0] in policy.eos_ids:
        ending = ending[1:]  # it was sampled
    return [*ending, *plain, *policy.encode_special(begin)]


def after_turns(
    policy: Policy, prompt: str, turns: Iterable[tuple[Iterable[int], str]]
) -> list[int]:
    """The ids of a prompt and what came after it: sampled ids, each with what was said to them.

    Raises:
        ConfigError: as `glue`.
    """
    ids = policy.encode_prompt(prompt)
    for sampled, reply in turns:
        ids += [*sampled, *glue(policy, reply)]
    return ids


def _after_prompt(policy: Policy) -> list[int]:
    """What a tokenizer without a chat template puts behind a prompt."""
    word = MARK + "x"
    plain = policy.encode_completion(word)
    ids = list(policy.tokenizer(word, split_special_tokens=True)["input_ids"])
    for at in range(len(ids) - len(plain) + 1):
        if ids[at : at + len(plain)] == plain:
            return ids[at + len(plain) :]
    return []
