"""The methods that there are, by family and name."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from node.methods import admission_control, advantages, filters, generation, hints, replay, rewards
from node.methods import rollout_budgets as budgets
from node.methods import task_control as tasks
from node.methods.choices import ADVANTAGES, KNOWN
from node.methods.importance_weights import IMPORTANCE_WEIGHTS
from node.methods.loss_settings import CORRECTIONS, LOSSES, Dpo
from node.methods.losses import OBJECTIVES, preferred, taught
from node.methods.method import Family, KnownMethod, MethodSettings

_DEFAULT: Final = "the default, which others are measured against"
_SAME: Final = "within a few points of grpo, tiny policy, three seeds"
_NOT_AHEAD: Final = "not ahead of sapo on own groups, tiny policy, three seeds"


def _method(
    parameters: type[MethodSettings],
    function: Callable[..., Any],
    family: Family,
    source: str,
    measured: str = "",
) -> KnownMethod:
    used_by = parameters.roles if parameters.kind in KNOWN[family] else ()
    return KnownMethod(parameters, function, family, source, measured, used_by)


def _advantage(name: str, source: str, measured: str = "") -> KnownMethod:
    return _method(*ADVANTAGES[name], "advantage", source, measured)


def _loss(kind: str, source: str, measured: str = "") -> KnownMethod:
    return _method(LOSSES[kind], OBJECTIVES[kind].losses, "loss", source, measured)


def _correction(kind: str, source: str) -> KnownMethod:
    measured = "no difference to none at two nodes that share, tiny policy, three seeds"
    return _method(CORRECTIONS[kind], IMPORTANCE_WEIGHTS[kind], "correction", source, measured)


METHODS: Final[tuple[KnownMethod, ...]] = (
    _advantage("grpo", "2402.03300", measured=_DEFAULT),
    _advantage("dr_grpo", "2503.20783", measured=_SAME),
    _advantage("rloo", "2402.14740", measured=_SAME),
    _advantage("reinforce_pp", "2501.03262", measured=_SAME),
    _advantage("opo", "2505.23585", measured=_SAME),
    _advantage("pass_k", "verl", measured="samples 5 points worse, greedy answers as good"),
    _advantage("mc_grpo", "2601.22582", measured="2 points ahead in three seeds of three"),
    _advantage("gapo", "2510.21830", measured=_SAME),
    _advantage("contexts", "2605.15726", measured=_SAME),
    _advantage("novelty", "2510.06672", measured=_SAME),
    _advantage("uniqueness", "2601.08763", measured=_SAME),
    _method(advantages.Hacpo, advantages.hacpo, "advantage", "2603.02604"),
    _method(advantages.TwoLevels, advantages.two_levels, "advantage", "2509.11543"),
    _method(advantages.SubProblems, advantages.sub_problems, "advantage", "2605.22074"),
    _method(rewards.CrossValue, rewards.cross_value, "advantage", "2605.07579"),
    _method(rewards.Majority, rewards.majority, "reward", "2504.16084"),
    _method(rewards.Distribution, rewards.distribution, "reward", "2601.21804"),
    _method(rewards.Flawed, rewards.flawed, "reward", "2510.22543"),
    _loss("sapo", "2509.08721", f"{_DEFAULT}; foreign tokens are weighed"),
    _loss("grpo", "2402.03300", "loses nothing up to eleven steps of staleness"),
    _loss("dapo", "2503.14476", "a learner's default"),
    _loss("decoupled", "2505.24298", "loses 8 points at eleven steps of staleness"),
    _loss("tis", "verl", "as sapo on own groups"),
    _loss("m2po", "2510.01161", "loses 8 points at eleven steps of staleness"),
    _loss("gspo", "2507.18071", _NOT_AHEAD),
    _loss("gepo", "2508.17850", "loses 3 points at eleven steps of staleness, four updates"),
    _loss("hacpo", "2603.02604"),
    _loss("ppo_ewma", "2110.00641"),
    _loss("aepo", "2510.14545"),
    _loss("cispo", "2506.13585", _NOT_AHEAD),
    _loss("soft_gate", "2511.20347", _NOT_AHEAD),
    _loss("topr", "2503.14286", _NOT_AHEAD),
    _loss("bapo", "2510.18927", _NOT_AHEAD),
    _method(Dpo, preferred, "preference", "2505.19000"),
    _correction("truncated", "verl"),
    _correction("icepop", "slime"),
    _correction("masked", "verl"),
    _correction("veto", "verl"),
    _correction("geometric", "verl"),
    _correction("k3", "verl"),
    _correction("opsm", "slime"),
    _method(tasks.Cdas, tasks.cdas, "control", "2505.17652"),
    _method(
        tasks.Vade, tasks.vade, "control", "2511.18902",
        "with the shared map 2 points ahead sampled, tiny policy, three seeds",
    ),
    _method(budgets.VarianceCurriculum, budgets.variance_curriculum, "control", "2509.19803"),
    _method(budgets.LengthSchedule, budgets.length_schedule, "control", "2509.25176"),
    _method(budgets.Dars, budgets.dars, "control", "2508.13755"),
    _method(budgets.Brorl, budgets.brorl, "control", "2510.01180"),
    _method(budgets.XrpoAllocation, budgets.xrpo_allocation, "control", "2510.06672"),
    _method(budgets.Duet, budgets.duet, "control", "2605.08441"),
    _method(admission_control.Admission, admission_control.admission, "control", "2505.24298"),
    _method(admission_control.Reclamation, admission_control.reclamation, "control", "ROLL"),
    _method(
        tasks.AdaptiveExternal, tasks.adaptive_external, "external_rule",
        "ours, of J in 2509.08721",
    ),
    _method(filters.ZeroAdvantage, filters.zero_advantage, "filter", "2503.14476"),
    _method(filters.DynamicSampling, filters.dynamic_sampling, "filter", "2503.14476"),
    _method(filters.ByNeed, filters.by_need, "draw", "ours"),
    _method(filters.Overlong, filters.overlong, "filter", "2503.14476"),
    _method(filters.Variance, filters.variance, "filter", "2509.19803"),
    _method(filters.Extremes, filters.extremes, "filter", "2509.22115"),
    _method(replay.PoolOfSuccesses, replay.pool_of_successes, "replay", "2509.23866"),
    _method(replay.ReplayedSuccesses, replay.replayed_successes, "replay", "2507.07451"),
    _method(
        replay.Rescue, replay.rescue, "replay", "ours, of 2504.14945",
        "no difference where one group in eighty is rescued, tiny policy, three seeds",
    ),
    _method(replay.Distil, replay.distil_weight, "replay", "ours, of 2605.07244"),
    _method(replay.Teacher, taught, "replay", "Tinker"),
    _method(replay.Salvage, replay.salvage, "replay", "2602.24110"),
    _method(
        generation.Speculative, generation.speculative, "generate", "2509.23232",
        "SmolLM2: 44 % of the tokens; 6 points ahead at equal tokens, 6 behind at equal rounds",
    ),
    _method(generation.WeightNoise, generation.noise, "generate", "2510.11696"),
    _method(generation.Pruning, generation.pruning, "generate", "2603.24840"),
    _method(generation.Branching, generation.branching, "generate", "2510.24302"),
    _method(generation.Purify, generation.purify, "generate", "2601.21244"),
    _method(hints.Hints, hints.hints, "generate", "2512.13095"),
    _method(hints.Nudges, hints.nudges, "generate", "2605.15726"),
)  # fmt: skip


TEST_OF_FUNCTION: Final[Mapping[Family, str]] = {
    "control": "methods_control",
    "generate": "methods_generate",
    "draw": "draw_by_need",
    "external_rule": "methods_control",
    "reward": "methods_advantages",
    "replay": "methods_filters",
    "filter": "methods_filters",
    "advantage": "methods_advantages",
    "loss": "training_objectives",
    "correction": "methods_weighing",
    "preference": "training_preferences",
}
"""The file with the tests of a family's functions, tests/unit/test_NAME.py."""

_SHARING: Final = frozenset({"vade", "adaptive_external", "need", "rescue", "speculative", "hints"})
_BY_LOSS: Final = frozenset({"loss", "correction", "preference"})
_ELSEWHERE: Final[Mapping[str, str]] = {
    **dict.fromkeys(_SHARING, "test_stages_sharing"),
    **dict.fromkeys(("admission", "reclamation"), "../simulation/test_learner_stages"),
    **dict.fromkeys(("contexts", "uniqueness"), "test_stages_loss"),
    **dict.fromkeys(
        ("hacpo", "two_levels", "sub_problems", "cross_value", "salvage"), "test_stages_rewards"
    ),
}


def loop_test(each: KnownMethod) -> str:
    """The file in tests/unit with the test of the method in a round."""
    if each.family in _BY_LOSS:
        return "test_stages_loss"
    plural = {"filter": "filters", "reward": "rewards"}.get(each.family, each.family)
    return _ELSEWHERE.get(each.name, f"test_stages_{plural}")


def families(methods: Iterable[KnownMethod] = METHODS) -> dict[Family, list[KnownMethod]]:
    """Methods by family, in their order."""
    found: dict[Family, list[KnownMethod]] = {}
    for each in methods:
        found.setdefault(each.family, []).append(each)
    return found


# Methods of the literature on rollouts: each with its place in the tree, or the reason that it is
# absent.

_SURROGATE = "time steps of a numerical surrogate: no policy, no reward, no tokens"
_DENOISING = "denoising steps, whose likelihoods are no token's"


@dataclass(frozen=True, slots=True)
class LiteratureRow:
    """One system. `methods`: names in `registry.METHODS`; `where`: another part that serves it;
    `why_not`: it is left out."""

    name: str
    source: str
    methods: tuple[str, ...] = ()
    where: str = ""
    why_not: str = ""


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower().replace("+", "p"))


def named(name: str) -> list[KnownMethod]:
    """The methods of a name, or else of an arXiv number or a system, such as `dr.grpo` or
    `vcrl`."""
    if exact := [each for each in METHODS if each.name == name]:
        return exact
    plain, of_system = _plain(name), set[str]()
    for row in LITERATURE:
        if name == row.source or plain in map(_plain, row.name.split(", ")):
            of_system.update(row.methods)
    return [
        each
        for each in METHODS
        if plain == _plain(each.name) or name in each.source.split() or each.name in of_system
    ]


LITERATURE: Final = (
    LiteratureRow("SAPO, sharing of rollouts", "2509.08721", ("sapo",), "node/run/sapo.py"),
    LiteratureRow("ECHO-2", "2602.02192", where="coordinator/, node/run/learner.py"),
    LiteratureRow("AReaL", "2505.24298", ("decoupled", "admission")),
    LiteratureRow("APRIL", "2509.18521", where="node/run/partial_rollouts.py"),
    LiteratureRow("M2PO", "2510.01161", ("m2po",)),
    LiteratureRow("Missing Old Logits", "2605.12070", ("ppo_ewma",)),
    LiteratureRow("GFCR survey", "2605.02913", where="the families of methods are its vocabulary"),
    LiteratureRow("ROLL", "ROLL", ("reclamation",)),
    LiteratureRow("RollArt", "RollArt", where="nodes of unlike hardware, each at its own pace"),
    LiteratureRow("SPEC-RL", "2509.23232", ("speculative",)),
    LiteratureRow("BAPO", "2510.18927", ("bapo",)),
    LiteratureRow("GAPO", "2510.21830", ("gapo",)),
    LiteratureRow("MC-GRPO", "2601.22582", ("mc_grpo",)),
    LiteratureRow("VADE", "2511.18902", ("vade",)),
    LiteratureRow("VCRL", "2509.19803", ("variance_curriculum", "variance")),
    LiteratureRow("CDAS", "2505.17652", ("cdas",)),
    LiteratureRow("DARS", "2508.13755", ("dars",)),
    LiteratureRow("D3S", "2509.22115", ("extremes",)),
    LiteratureRow("XRPO", "2510.06672", ("novelty", "xrpo_allocation")),
    LiteratureRow("DUET", "2605.08441", ("duet",)),
    LiteratureRow("ARRoL", "2603.24840", ("pruning",)),
    LiteratureRow("LENS", "2601.21244", ("purify",)),
    LiteratureRow("LATR", "2510.24302", ("branching",)),
    LiteratureRow("UI-S1", "2509.11543", ("two_levels",)),
    LiteratureRow("DART", "2509.23866", ("truncated", "pool_of_successes")),
    LiteratureRow("Uniqueness-aware RL", "2601.08763", ("uniqueness",)),
    LiteratureRow("BroRL", "2510.01180", ("brorl",)),
    LiteratureRow("NudgeRL", "2605.15726", ("contexts", "nudges")),
    LiteratureRow("POISE", "2605.07579", ("cross_value",)),
    LiteratureRow("FAPO", "2510.22543", ("flawed",)),
    LiteratureRow("SCRL", "2605.22074", ("sub_problems",)),
    LiteratureRow("SIRI", "2509.25176", ("length_schedule",)),
    LiteratureRow("QeRL, AQN", "2510.11696", ("noise",)),
    LiteratureRow("DARE", "2601.21804", ("distribution",)),
    LiteratureRow("TTRL", "2504.16084", ("majority",)),
    LiteratureRow("RLEP", "2507.07451", ("replayed_successes",)),
    LiteratureRow("LUFFY", "2504.14945", ("rescue",)),
    LiteratureRow(
        "ECHO for test-time RL", "2602.02150", why_not="its constants are not published"
    ),
    LiteratureRow("AEPO", "2510.14545", ("aepo",)),
    LiteratureRow("ADHint", "2512.13095", ("hints",)),
    LiteratureRow("SCOPE", "2602.24110", ("salvage",)),
    LiteratureRow("BES", "2605.28814", why_not="generates offline; its operators are not public"),
    LiteratureRow("VerIPO", "2505.19000", ("dpo",)),
    LiteratureRow("AgentMath", "AgentMath", where="node/run/partial_rollouts.py"),
    LiteratureRow("FlexMARL", "FlexMARL", why_not="several agents that learn together"),
    LiteratureRow("ToMPO", "ToMPO", why_not="several agents, on a graph"),
    LiteratureRow("OTR", "OTR", why_not="supervised: a loss for single tokens of given answers"),
    LiteratureRow("RTV, PDR", "RTV", why_not="scaffolds at inference time"),
    LiteratureRow("HACPO", "2603.02604", ("hacpo",)),
    LiteratureRow("GEPO", "2508.17850", ("gepo",)),
    LiteratureRow("SAGE", "SAGE", why_not="an agent's scaffold"),
    LiteratureRow("semi-PD", "semi-PD", why_not="serving inside of one machine, below an engine"),
    LiteratureRow("Sol-RL", "Sol-RL", why_not=_DENOISING),
    LiteratureRow("BranchGRPO", "BranchGRPO", why_not=_DENOISING),
    LiteratureRow("FedAMD", "FedAMD", why_not="shares gradients, not experience"),
    LiteratureRow("RAVL", "RAVL", why_not="offline control with a learned model of the world"),
    LiteratureRow("Mixed Fair Division", "survey", why_not="theory of dividing goods"),
    LiteratureRow("Privacy policies by jurisdiction", "study", why_not="no learning"),
    LiteratureRow("DeepONet", "DeepONet", why_not=_SURROGATE),
    LiteratureRow("PDE-Refiner", "PDE-Refiner", why_not=_SURROGATE),
    LiteratureRow("StreamChar", "StreamChar", why_not=_DENOISING),
    LiteratureRow("ReflectDrive-2", "ReflectDrive-2", why_not=_DENOISING),
    LiteratureRow("Multi-agent software platform", "platform", why_not="no learning"),
)  # fmt: skip
