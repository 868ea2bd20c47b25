"""transformers' own `generate`, for the benchmarks that put the engines beside it."""

from collections.abc import Sequence

import torch

from node.policies.policy import Policy


def generate(policy: Policy, prompts: Sequence[str], group_size: int, tokens_max: int) -> int:
    """Sample `group_size` completions of each prompt, at most `tokens_max` long, as the engines do.

    Returns how many tokens that made: each completion's up to and with its end, without the pads.
    """
    rows = [policy.encode_prompt(prompt) for prompt in prompts for _ in range(group_size)]
    width = max(len(row) for row in rows)
    pads = [[policy.eos_id] * (width - len(row)) for row in rows]
    ids = torch.tensor([pad + row for pad, row in zip(pads, rows, strict=True)])
    mask = torch.tensor([[0] * len(p) + [1] * len(r) for p, r in zip(pads, rows, strict=True)])
    with torch.inference_mode(), policy.autocast():
        out = policy.model.generate(
            input_ids=ids.to(policy.device),
            attention_mask=mask.to(policy.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=tokens_max,
            eos_token_id=sorted(policy.eos_ids),
            pad_token_id=policy.eos_id,
        )
    made = 0
    for row in out[:, width:].tolist():
        ended = [place for place, token in enumerate(row) if token in policy.eos_ids]
        made += ended[0] + 1 if ended else len(row)
    return made
