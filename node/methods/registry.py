"""The methods that there are, by family and name."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from node.methods.advantages import rewards, turns
from node.methods.choices import ADVANTAGES
from node.methods.control import admission, budgets, cdas, external, schedules, vade, widths
from node.methods.filters import (
    extremes,
    informative,
    need,
    overlong,
    rescue,
    salvage,
    successes,
    variance,
)
from node.methods.generate import branching, hints, noise, pruning, purify, speculative
from node.methods.losses.objectives import OBJECTIVES
from node.methods.losses.settings import LOSSES, StaleLoss
from node.methods.losses.weighing import IMPORTANCE_WEIGHTS
from node.methods.losses.weighing_settings import CORRECTIONS
from node.methods.method import Family, KnownMethod, MethodSettings, Need

_NODES: Final = ("node", "learner")
_DEFAULT: Final = "the default, which others are measured against"
_SAME: Final = "within a few points of grpo, tiny policy, three seeds"
_NOT_AHEAD: Final = "not ahead of sapo on own groups, tiny policy, three seeds"


def _advantage(name: str, source: str, *needs: Need, measured: str = "") -> KnownMethod:
    parameters, function = ADVANTAGES[name]
    return KnownMethod(
        parameters, function, "advantage", source, frozenset(needs), _NODES, measured
    )


def _loss(kind: str, source: str, measured: str = "") -> KnownMethod:
    needs = {Need.BEHAVIOUR} if issubclass(LOSSES[kind], StaleLoss) else set()
    function = OBJECTIVES[kind].losses
    return KnownMethod(LOSSES[kind], function, "loss", source, frozenset(needs), _NODES, measured)


def _correction(kind: str, source: str) -> KnownMethod:
    needs = frozenset({Need.BEHAVIOUR})
    function = IMPORTANCE_WEIGHTS[kind]
    measured = "no difference to none at two nodes that share, tiny policy, three seeds"
    return KnownMethod(CORRECTIONS[kind], function, "correction", source, needs, _NODES, measured)


def _alone(
    parameters: type[MethodSettings],
    function: Callable[..., Any],
    family: Family,
    source: str,
    *needs: Need,
) -> KnownMethod:
    return KnownMethod(parameters, function, family, source, frozenset(needs))


METHODS: Final[tuple[KnownMethod, ...]] = (
    _advantage("grpo", "2402.03300", measured=_DEFAULT),
    _advantage("dr_grpo", "2503.20783", measured=_SAME),
    _advantage("rloo", "2402.14740", measured=_SAME),
    _advantage("reinforce_pp", "2501.03262", measured=_SAME),
    _advantage("opo", "2505.23585", Need.LENGTHS, measured=_SAME),
    _advantage("pass_k", "verl", measured="samples 5 points worse, greedy answers as good"),
    _advantage("mc_grpo", "2601.22582", measured="2 points ahead in three seeds of three"),
    _advantage("gapo", "2510.21830", measured=_SAME),
    _advantage("contexts", "2605.15726", Need.CONTEXTS, measured=_SAME),
    _advantage("novelty", "2510.06672", Need.LOGPROBS, measured=_SAME),
    _advantage("uniqueness", "2601.08763", Need.TEXTS, measured=_SAME),
    _alone(turns.TwoLevels, turns.two_levels, "advantage", "2509.11543", Need.TURNS),
    _alone(turns.SubProblems, turns.sub_problems, "advantage", "2605.22074", Need.PARTS),
    _alone(rewards.CrossValue, rewards.cross_value, "advantage", "2605.07579", Need.FEATURES),
    _alone(rewards.Majority, rewards.majority, "reward", "2504.16084", Need.TEXTS),
    _alone(
        rewards.Distribution, rewards.distribution, "reward", "2601.21804",
        Need.TEXTS, Need.ENTROPY,
    ),
    _alone(rewards.Flawed, rewards.flawed, "reward", "2510.22543", Need.JUDGE),
    _loss("sapo", "2509.08721", f"{_DEFAULT}; foreign tokens are weighed"),
    _loss("grpo", "2402.03300", "loses nothing up to eleven steps of staleness"),
    _loss("dapo", "2503.14476", "a learner's default"),
    _loss("decoupled", "2505.24298", "loses 8 points at eleven steps of staleness"),
    _loss("tis", "verl", "as sapo on own groups"),
    _loss("m2po", "2510.01161", "loses 8 points at eleven steps of staleness"),
    _loss("gspo", "2507.18071", _NOT_AHEAD),
    _loss("gepo", "2508.17850", "loses 3 points at eleven steps of staleness, four updates"),
    _loss("cispo", "2506.13585", _NOT_AHEAD),
    _loss("soft_gate", "2511.20347", _NOT_AHEAD),
    _loss("topr", "2503.14286", _NOT_AHEAD),
    _loss("bapo", "2510.18927", _NOT_AHEAD),
    _correction("truncated", "verl"),
    _correction("icepop", "slime"),
    _correction("masked", "verl"),
    _correction("veto", "verl"),
    _correction("geometric", "verl"),
    _correction("k3", "verl"),
    _correction("opsm", "slime"),
    _alone(cdas.Cdas, cdas.cdas, "control", "2505.17652", Need.REVISITS),
    KnownMethod(
        vade.Vade, vade.vade, "control", "2511.18902", frozenset({Need.REVISITS}), ("node",),
        "with the shared map 2 points ahead sampled, tiny policy, three seeds",
    ),
    _alone(schedules.VarianceCurriculum, schedules.variance_curriculum, "control", "2509.19803"),
    _alone(schedules.LengthSchedule, schedules.length_schedule, "control", "2509.25176"),
    _alone(widths.Dars, widths.dars, "control", "2508.13755"),
    _alone(widths.Brorl, widths.brorl, "control", "2510.01180", Need.REVISITS),
    _alone(budgets.XrpoAllocation, budgets.xrpo_allocation, "control", "2510.06672"),
    _alone(
        budgets.Duet, budgets.duet, "control", "2605.08441",
        Need.LENGTHS, Need.LOGPROBS, Need.REVISITS,
    ),
    _alone(admission.Admission, admission.admission, "control", "2505.24298"),
    _alone(admission.Reclamation, admission.reclamation, "control", "ROLL"),
    KnownMethod(
        external.AdaptiveExternal, external.adaptive_external, "external_rule",
        "ours, of J in 2509.08721", used_by=("node",),
    ),
    _alone(informative.ZeroAdvantage, informative.zero_advantage, "filter", "2503.14476"),
    _alone(informative.DynamicSampling, informative.dynamic_sampling, "filter", "2503.14476"),
    KnownMethod(need.ByNeed, need.by_need, "draw", "ours", used_by=("node",)),
    _alone(overlong.Overlong, overlong.overlong, "filter", "2503.14476", Need.LENGTHS),
    _alone(variance.Variance, variance.variance, "filter", "2509.19803", Need.REVISITS),
    _alone(extremes.Extremes, extremes.extremes, "filter", "2509.22115", Need.ENTROPY),
    _alone(
        successes.PoolOfSuccesses, successes.pool_of_successes, "replay", "2509.23866",
        Need.REVISITS,
    ),
    _alone(
        successes.ReplayedSuccesses, successes.replayed_successes, "replay", "2507.07451",
        Need.REVISITS,
    ),
    KnownMethod(
        rescue.Rescue, rescue.rescue, "replay", "ours, of 2504.14945", frozenset({Need.REVISITS}),
        ("node",), "no difference where one group in eighty is rescued, tiny policy, three seeds",
    ),
    _alone(salvage.Salvage, salvage.salvage, "replay", "2602.24110", Need.TEXTS, Need.JUDGE),
    KnownMethod(
        speculative.Speculative, speculative.speculative, "generate", "2509.23232",
        frozenset({Need.BEHAVIOUR, Need.REVISITS}), ("node",),
        "SmolLM2: 44 % of the tokens; 6 points ahead at equal tokens, 6 behind at equal rounds",
    ),
    _alone(noise.WeightNoise, noise.noise, "generate", "2510.11696"),
    _alone(pruning.Pruning, pruning.pruning, "generate", "2603.24840", Need.FEATURES),
    _alone(branching.Branching, branching.branching, "generate", "2510.24302"),
    _alone(
        purify.Purify, purify.purify, "generate", "2601.21244", Need.REFERENCE, Need.BEHAVIOUR
    ),
    KnownMethod(
        hints.Hints, hints.hints, "generate", "2512.13095", frozenset({Need.REVISITS}), ("node",)
    ),
    _alone(hints.Nudges, hints.nudges, "generate", "2605.15726", Need.CONTEXTS),
)  # fmt: skip


def families(methods: Iterable[KnownMethod] = METHODS) -> dict[Family, list[KnownMethod]]:
    """Methods by family, in their order."""
    found: dict[Family, list[KnownMethod]] = {}
    for each in methods:
        found.setdefault(each.family, []).append(each)
    return found
