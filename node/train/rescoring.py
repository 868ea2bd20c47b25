"""Log-probs under the loaded weights of tokens that others sampled, to compare with their claims.

Token ids are taken as they are: they must be of this policy's tokenizer, and their text that of the
completion, which was rewarded."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainingGroup, check_scorable
from node.policies.policy import Policy
from node.train.rows import turns_of
from node.train.trainer import GroupTrainer
from swarm.rollouts import Completion

IMPOSSIBLE = -math.inf  # the log-prob of each token of a completion that no policy can have sampled


def score(trainer: GroupTrainer, groups: Sequence[TrainingGroup]) -> list[list[list[float]]]:
    """A column for each completion of each group: the log-prob of each of its n tokens, then n
    means and n variances of a sample's log-prob there, at the run's temperature.

    A completion without tokens, or too long for context or memory, gets an empty column. One with a
    token outside the vocabulary, or with another text than its tokens', is `IMPOSSIBLE` throughout.
    LocalProtocolError: a group's token ids are not of our tokenizer."""
    check_scorable(groups)
    result = []
    for group in groups:
        known = [_is_possible(trainer.policy, c) for c in group.completions]
        completions = [c for c, good in zip(group.completions, known, strict=True) if good]
        zeros = (0.0,) * len(completions)
        part = TrainingGroup(
            group.prompt, tuple(completions), zeros, group.own_tokens, group.source
        )
        [rows] = trainer.moments([part])
        values = iter(rows)
        result.append(
            [
                _column(next(values)) if good else _impossible(len(completion.token_ids))
                for completion, good in zip(group.completions, known, strict=True)
            ]
        )
    return result


def of_rows(policy: Policy, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of rows of tokens of one length: of each token but the first, given those before
    it."""
    ids = torch.tensor(rows, device=policy.device)
    with torch.inference_mode(), policy.autocast():
        logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    found: list[list[float]] = (
        logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).tolist()
    )
    return found


def of_prompts(policy: Policy, prompts: Sequence[str]) -> list[tuple[list[str], list[float]]]:
    """The texts of the tokens of each prompt's question, and their log-probs, 0 where nothing comes
    before. Both are empty where its tokens are not within the prompt's, or not each a text."""
    found: list[tuple[list[str], list[float]]] = []
    for prompt in prompts:
        ids, question = policy.encode_prompt(prompt), Prompt.read(prompt).question
        asked = policy.encode_completion(question)
        ends = [policy.decode(asked[:count]) for count in range(len(asked) + 1)]
        texts = [after[len(before) :] for before, after in pairwise(ends)]
        starts = range(len(ids) - len(asked), -1, -1)
        begin = next((at for at in starts if ids[at : at + len(asked)] == asked), None)
        if begin is None or "".join(texts) != question:
            found.append(([], []))
            continue
        [told] = of_rows(policy, [ids])
        found.append((texts, [0.0, *told][begin : begin + len(asked)]))
    return found


def _column(row: Sequence[Sequence[float]]) -> list[float]:
    return [moments[place] for place in range(3) for moments in row]


def _impossible(tokens: int) -> list[float]:
    return [IMPOSSIBLE] * tokens + [0.0] * (2 * tokens)


def _is_possible(policy: Policy, completion: Completion) -> bool:
    if max(completion.token_ids, default=0) >= policy.vocabulary:
        return False
    turns = turns_of(completion)
    went_on = all(
        turn.token_ids[-1:] and turn.token_ids[-1] in policy.eos_ids for turn in turns[:-1]
    )
    return went_on and all(turn.text == policy.decode(list(turn.token_ids)) for turn in turns)
