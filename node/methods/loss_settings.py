"""Settings of losses and of importance weights, free of torch.

A ratio to the policy that generated the tokens uses log-probs that a peer may have made up. A dual
clip or a largest weight bounds the damage; a large number is as none."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le, Lt

from node.methods.method import Count, MethodSettings, Need, NonNegative, Share
from node.methods.method import Positive as WeightBound

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_norm"]
LARGE: Final = 1e6  # as a bound that is as none; times what losses are made of it stays finite
Positive = Annotated[float, Gt(0), Le(LARGE)]
Above = Annotated[float, Gt(1), Le(LARGE)]
Low = Annotated[float, Gt(0), Lt(1)]


class LossSettings(MethodSettings):
    """Settings of all losses."""

    aggregation: Aggregation = "token_mean"  # see `losses.token_weights`


class StaleLoss(LossSettings, needs={Need.BEHAVIOUR}):
    """Settings of losses that use behaviour log-probs."""

    unknown_share_max: Share = 0.5  # of a batch's completions without behaviour log-probs
    # Policy versions whose weights are kept, to score the tokens that they made.
    snapshots: Annotated[int, Ge(0), Le(16)] = 0


class SapoLoss(LossSettings, kind="sapo"):
    """The clipped surrogate around the policy before the update, for own tokens and foreign: swarm
    sampling policy optimization. TRL's `sapo` is `soft_gate`."""

    clip_low: Low = 0.2
    clip_high: Positive = 0.28


class GrpoLoss(StaleLoss, kind="grpo"):
    """The clipped surrogate of GRPO, around the policy that generated."""

    aggregation: Aggregation = "sequence_mean"
    clip_low: Low = 0.2
    clip_high: Positive = 0.2
    dual_clip: Above = 10.0


class DapoLoss(GrpoLoss, kind="dapo"):
    """As `grpo`, with DAPO's clip and the mean over tokens."""

    aggregation: Aggregation = "token_mean"
    clip_high: Positive = 0.28


class DecoupledLoss(StaleLoss, kind="decoupled"):
    """The clip is around the policy before the update; a weight corrects for what generated."""

    clip_low: Low = 0.2
    clip_high: Positive = 0.2
    behaviour_weight_max: Positive = 5.0  # tokens with a larger weight are masked


class TisLoss(DecoupledLoss, kind="tis"):
    """As `decoupled`, with weights cut at the bound."""

    clip_high: Positive = 0.28
    behaviour_weight_max: Positive = 2.0


class M2poLoss(StaleLoss, kind="m2po"):
    """No clip; the farthest tokens go until the second moment of the rest is in a bound."""

    second_moment_max: Positive = 0.04
    behaviour_weight_max: Positive = 10.0


class GspoLoss(GrpoLoss, kind="gspo"):
    """The clip is of whole completions, by the geometric mean of their tokens' ratios. Its dual
    clip is ours."""

    clip_low: Low = 3e-4
    clip_high: Positive = 4e-4


class GepoLoss(GrpoLoss, kind="gepo"):
    """`gspo` with one behaviour log-prob for each group in place of one for each completion. Its
    dual clip is ours."""


class HacpoLoss(GspoLoss, kind="hacpo"):
    """`gspo` for own completions; foreign ones count by their ratio within a bound that tightens
    from one update on a batch to the next, and by a power of it."""

    alpha: NonNegative = 1.0  # the power
    delta: Low = 0.2  # the ratio's lower bound is 1 - delta at first
    delta_step: NonNegative = 0.025  # by which it rises with each update on the same batch


class EwmaLoss(StaleLoss, kind="ppo_ewma"):
    """`decoupled`, with the clip around an average of the weights over past updates."""

    clip: Low = 0.2
    ratio_max: Above = 10.0  # to what generated; the source has 100, and peers may make it up
    centre_of_mass: NonNegative = 8.0  # of the average, in updates

    @property
    def decay(self) -> float:
        """The share of an update's weight in the average that is left one update later."""
        return self.centre_of_mass / (1.0 + self.centre_of_mass)


class AepoLoss(GrpoLoss, kind="aepo"):
    """As `grpo`, but good tokens keep a gradient above the clip, and high entropy counts more."""

    aggregation: Aggregation = "token_mean"
    dual_clip: Above = 3.0
    entropy_weight: NonNegative = 0.2


class CispoLoss(StaleLoss, kind="cispo"):
    """The ratio is cut and not the token: each keeps its gradient."""

    ratio_max: Positive = 5.0  # of a token; its authors tune it and publish none


class SoftGateLoss(StaleLoss, kind="soft_gate"):
    """A smooth gate in place of the clip: soft adaptive policy optimization, TRL's `sapo`."""

    sharpness_positive: Positive = 1.0
    sharpness_negative: Positive = 1.05


class ToprLoss(StaleLoss, kind="topr"):
    """Right answers count in full, without any ratio; wrong ones as far as the policy might still
    say the whole of them, by a ratio up to 1."""

    unknown_share_max: Share = 1.0


class BapoLoss(StaleLoss, kind="bapo"):
    """The clip's bounds follow each source's batch, until positive tokens have their share."""

    positive_share: Share = 0.5
    ratio_low: Low = 0.6
    ratio_low_max: Low = 0.9
    ratio_high: Above = 1.2
    ratio_high_max: Above = 3.0
    step: Annotated[float, Ge(0.01)] = 0.05
    dual_clip: Above = 3.0


LOSSES: Final[Mapping[str, type[LossSettings]]] = {
    "sapo": SapoLoss,
    "grpo": GrpoLoss,
    "dapo": DapoLoss,
    "decoupled": DecoupledLoss,
    "tis": TisLoss,
    "m2po": M2poLoss,
    "gspo": GspoLoss,
    "gepo": GepoLoss,
    "hacpo": HacpoLoss,
    "ppo_ewma": EwmaLoss,
    "aepo": AepoLoss,
    "cispo": CispoLoss,
    "soft_gate": SoftGateLoss,
    "topr": ToprLoss,
    "bapo": BapoLoss,
}
DEFAULT_LOSS: Final = "sapo"
# A learner's groups are up to S steps old, which `sapo`, with its ratio to the policy right before
# the update, does not correct. `dapo` has the same mean and clip around the policy that generated.
# Plain GRPO lost nothing up to S = 11; `decoupled` and `m2po` lost 8 points (EXPERIMENTS.md).
DEFAULT_LEARNER_LOSS: Final = "dapo"


class Dpo(MethodSettings, kind="dpo"):
    """After some batches, one more update on the best completion of each own group against its
    worst, the shorter among equals; as VerIPO has it between phases of GRPO."""

    beta: Positive = 0.1
    every: Count = 4  # batches; ours


# Settings of `importance_weights.py`. rho is a token's probability before the update over that
# where it was generated. Weights are within one completion: no peer changes another's.


class Truncated(MethodSettings, kind="truncated", needs={Need.BEHAVIOUR}):
    """A token's loss counts by rho, and by no more than a bound (TIS)."""

    weight_max: WeightBound = 2.0


class IcePop(MethodSettings, kind="icepop", needs={Need.BEHAVIOUR}):
    """A token's loss counts by rho within a band, and not at all outside."""

    weight_min: WeightBound = 0.5
    weight_max: WeightBound = 5.0


class Masked(MethodSettings, kind="masked", needs={Need.BEHAVIOUR}):
    """A token counts in full where rho is within a band, and not at all outside: rejection
    of tokens, as verl has it. With rho itself for a weight it is `icepop`."""

    weight_min: WeightBound = 0.5
    weight_max: WeightBound = 2.0


class Veto(MethodSettings, kind="veto", needs={Need.BEHAVIOUR}):
    """A completion with any token that has become all but impossible is left out."""

    weight_min: WeightBound = 1e-4


class Geometric(MethodSettings, kind="geometric", needs={Need.BEHAVIOUR}):
    """A completion is left out where the geometric mean of rho is outside of a band."""

    weight_min: WeightBound = 0.999
    weight_max: WeightBound = 1.001


class K3(MethodSettings, kind="k3", needs={Need.BEHAVIOUR}):
    """A completion is left out where the mean of rho - log rho - 1 is above a bound."""

    divergence_max: WeightBound = 0.01


class Opsm(MethodSettings, kind="opsm", needs={Need.BEHAVIOUR}):
    """A wrong completion is left out where the policy has moved away from it (OPSM)."""

    moved_max: NonNegative = 1e-4  # nats a token, on average


CORRECTIONS: Final[Mapping[str, type[MethodSettings]]] = {
    each.kind: each for each in (Truncated, IcePop, Masked, Veto, Geometric, K3, Opsm)
}
