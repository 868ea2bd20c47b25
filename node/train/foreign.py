"""The weight of other nodes' tokens in an update. All rules about it are in this file.

1. A completion is trained on by its own token ids if its log-probs came along, both are of our
   tokenizer, and the tokens are those of its text (`takes_tokens`). Else its text is encoded again.
2. With `foreign_weighting = "positives"`, completions worse than their group are left out
   (`is_left_out`).
3. Tokens below a log-prob count nothing (`logprob_floor`). With negative advantage that floor is at
   least `NEGATIVE_LOGPROB_MIN`: pushing unlikely tokens down can collapse the policy.
4. A token counts by p(here, before the update) / p(where it was sampled), at most
   `FOREIGN_WEIGHT_MAX`, if its log-prob is known; else as 1 (`weights`). A run's `correction`
   replaces this for all tokens with known log-probs, and a loss that uses them weighs by itself.
5. What was kept of a draft is context, where tokens count by log-probs: it follows neither policy
   (`Completion.splices`, `node.train.rows`).
6. A foreign group has at most as many completions in a batch as an own one
   (`node.run.groups.foreign_group`), and a group with unknown log-probs may be left out
   (`node.methods.samplers.within_unknown_share`).
"""

from typing import Final

import torch

from node.interfaces.trainer_spec import TrainerSpec
from node.methods.losses import behaviour_weights

FOREIGN_WEIGHT_MAX: Final = 2.0  # of a token, as in truncated importance sampling (`tis`)
NEGATIVE_LOGPROB_MIN: Final = -4.0  # nats; e^-4 = 2 % is about as rare as honest samples get


def takes_tokens(
    spec: TrainerSpec, tokenizer: str, own_tokenizer: str, logprobs: torch.Tensor | None
) -> bool:
    """Rule 1, without the comparison of tokens and text."""
    return spec.foreign_weighting == "auto" and tokenizer == own_tokenizer and logprobs is not None


def is_left_out(spec: TrainerSpec, advantage: float) -> bool:
    """Rule 2."""
    return spec.foreign_weighting == "positives" and advantage < 0.0


def logprob_floor(spec: TrainerSpec, advantage: float) -> float | None:
    """Rule 3, in nats; None: no floor. It also holds for weighted tokens, because a made-up
    log-prob would double the weight of such a token."""
    floors = [spec.foreign_logprob_min]
    if spec.foreign_weighting == "auto" and advantage < 0.0:
        floors.append(NEGATIVE_LOGPROB_MIN)
    return max((each for each in floors if each is not None), default=None)


def weights(proximal: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Rule 4. Log-probs (T,) before the update, and where the tokens were sampled."""
    return behaviour_weights(proximal, behaviour).clamp(max=FOREIGN_WEIGHT_MAX)
