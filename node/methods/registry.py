"""The methods that there are, by family and name."""

from typing import Final

from node.methods.advantages import contexts, group, rewards, robust, turns, unlikely
from node.methods.method import Family, KnownMethod, Need

_NODES: Final = ("node", "learner")

METHODS: Final[tuple[KnownMethod, ...]] = (
    KnownMethod(
        group.Grpo, group.grpo, "advantage", "r - mean over std of the group", "2402.03300",
        used_by=_NODES, measured="the default; others are measured against it",
    ),
    KnownMethod(
        group.DrGrpo, group.dr_grpo, "advantage", "r - mean of the group", "2503.20783",
        used_by=_NODES,
    ),
    KnownMethod(
        group.Rloo, group.rloo, "advantage", "r - mean of the group's others", "2402.14740",
        used_by=_NODES,
    ),
    KnownMethod(
        group.ReinforcePlusPlus, group.reinforce_pp, "advantage",
        "r - mean of the group, over the spread of each source's groups", "2501.03262",
        used_by=_NODES,
    ),
    KnownMethod(
        group.Opo, group.opo, "advantage", "r - mean reward by length", "2505.23585",
        needs=frozenset({Need.LENGTHS}), used_by=_NODES,
    ),
    KnownMethod(
        group.PassK, group.pass_k, "advantage", "the best one's lead over the second", "verl",
        used_by=_NODES,
    ),
    KnownMethod(
        robust.McGrpo, robust.mc_grpo, "advantage", "r - median; the median is left out",
        "2601.22582", used_by=_NODES,
    ),
    KnownMethod(
        robust.Gapo, robust.gapo, "advantage", "r - median of the densest window", "2510.21830",
        used_by=_NODES,
    ),
    KnownMethod(
        contexts.Contexts, contexts.contexts, "advantage",
        "baselines by source and hint, and a part of the gap between them", "2605.15726",
        needs=frozenset({Need.CONTEXTS}), used_by=_NODES,
    ),
    KnownMethod(
        unlikely.Novelty, unlikely.novelty, "advantage", "more for unlikely right ones",
        "2510.06672", needs=frozenset({Need.LOGPROBS}), used_by=_NODES,
    ),
    KnownMethod(
        unlikely.Uniqueness, unlikely.uniqueness, "advantage", "less for right ones of a kind",
        "2601.08763", needs=frozenset({Need.TEXTS}), used_by=_NODES,
    ),
    KnownMethod(
        turns.TwoLevels, turns.two_levels, "advantage", "turns and transcripts, each by others",
        "2509.11543", needs=frozenset({Need.TURNS}),
    ),
    KnownMethod(
        turns.SubProblems, turns.sub_problems, "advantage", "parts of an answer, each by others",
        "2605.22074", needs=frozenset({Need.PARTS}),
    ),
    KnownMethod(
        rewards.CrossValue, rewards.cross_value, "advantage",
        "r - what the other completion's inner states tell", "2605.07579",
        needs=frozenset({Need.FEATURES}),
    ),
    KnownMethod(
        rewards.Majority, rewards.majority, "reward", "the answer that most peers give",
        "2504.16084", needs=frozenset({Need.TEXTS}),
    ),
    KnownMethod(
        rewards.Distribution, rewards.distribution, "reward",
        "an answer's share of the votes, by certainty", "2601.21804",
        needs=frozenset({Need.TEXTS, Need.ENTROPY}),
    ),
    KnownMethod(
        rewards.Flawed, rewards.flawed, "reward", "right answers with a flaw on the way lose",
        "2510.22543", needs=frozenset({Need.JUDGE}),
    ),
)  # fmt: skip


def of_family(family: Family) -> dict[str, KnownMethod]:
    """Its methods by name."""
    return {each.name: each for each in METHODS if each.family == family}
