"""The stage of each method that acts in a round, by its settings."""

from collections.abc import Mapping
from typing import Any, Final

from node.config import NodeConfig
from node.methods import filters, generation, hints, replay, task_control
from node.methods.method import MethodSettings
from node.stages import control, draw, generate, replaying
from node.stages.own import GuardedMethod
from node.stages.stage import Stage, Stages

STAGES: Final[Mapping[type[MethodSettings], type[Stage[Any]]]] = {
    task_control.Vade: control.ChooseByInformation,
    task_control.AdaptiveExternal: control.AdaptForeignGroups,
    generation.Speculative: generate.Redraft,
    hints.Hints: generate.GiveHints,
    filters.ByNeed: draw.DrawByNeed,
    replay.Rescue: replaying.RescueFailed,
}


def stages_of(config: NodeConfig) -> Stages:
    """The stages of the methods that a node's settings name, in the order of a round."""
    found: list[Stage[Any]] = []
    for family, each in config.named_methods():
        if each.own is not None and family not in ("loss", "correction"):
            found.append(GuardedMethod(each))
        elif type(each) in STAGES:
            found.append(STAGES[type(each)](each))
    return Stages(found)
