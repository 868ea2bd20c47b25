"""Methods of the literature on rollouts: each with its place in the tree, or the reason that it is
absent."""

from dataclasses import dataclass
from typing import Final

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


LITERATURE: Final = (
    LiteratureRow("SAPO, sharing of rollouts", "2509.08721", ("sapo",), "node/loops/sapo.py"),
    LiteratureRow("ECHO-2", "2602.02192", where="coordinator/, node/loops/learner.py"),
    LiteratureRow("AReaL", "2505.24298", ("decoupled", "admission")),
    LiteratureRow("APRIL", "2509.18521", where="node/loops/partial_rollouts.py"),
    LiteratureRow("M2PO", "2510.01161", ("m2po",)),
    LiteratureRow(
        "Missing Old Logits", "2605.12070",
        why_not="PPO-EWMA needs snapshots of the trainer, which it does not keep yet",
    ),
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
    LiteratureRow("QeRL", "2510.11696", ("noise",)),
    LiteratureRow("DARE, TTRL", "2601.21804", ("distribution", "majority")),
    LiteratureRow(
        "ECHO for test-time RL", "2602.02150", why_not="its constants are not published"
    ),
    LiteratureRow("AEPO", "2510.14545", why_not="its abstract alone is known: no formula"),
    LiteratureRow("ADHint", "2512.13095", ("hints",)),
    LiteratureRow("SCOPE", "2602.24110", ("salvage",)),
    LiteratureRow("BES", "2605.28814", why_not="generates offline; its operators are not public"),
    LiteratureRow("VerIPO", "VerIPO", why_not="DPO needs a reference policy, which is not kept"),
    LiteratureRow("AgentMath", "AgentMath", where="node/loops/partial_rollouts.py"),
    LiteratureRow("FlexMARL", "FlexMARL", why_not="several agents that learn together"),
    LiteratureRow("ToMPO", "ToMPO", why_not="several agents, on a graph"),
    LiteratureRow("OTR", "OTR", why_not="supervised: a loss for single tokens of given answers"),
    LiteratureRow("RTV, PDR", "RTV", why_not="scaffolds at inference time"),
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
