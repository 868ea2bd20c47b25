"""The stage of each method that acts in a round, by its settings."""

from collections.abc import Mapping
from typing import Any, Final

from node.config import NodeConfig
from node.methods import (
    admission_control,
    advantages,
    filters,
    generation,
    hints,
    replay,
    rewards,
    rollout_budgets,
    task_control,
)
from node.methods.method import MethodSettings, Role
from node.stages import (
    advantage,
    budgets,
    control,
    draw,
    feeding,
    filtering,
    generate,
    replaying,
    rewarding,
    teacher,
    trees,
)
from node.stages.own import GuardedMethod
from node.stages.stage import Stage, Stages
from swarm.errors import ConfigError

STAGES: Final[Mapping[type[MethodSettings], type[Stage[Any]]]] = {
    task_control.Cdas: control.ChooseByCompetence,
    task_control.Vade: control.ChooseByInformation,
    task_control.AdaptiveExternal: control.AdaptForeignGroups,
    rollout_budgets.VarianceCurriculum: control.ScheduleVariance,
    rollout_budgets.LengthSchedule: control.ScheduleLengths,
    rollout_budgets.Dars: budgets.MoreOfHard,
    rollout_budgets.Brorl: budgets.WidenByPassRate,
    rollout_budgets.XrpoAllocation: budgets.AllocateInPhases,
    rollout_budgets.Duet: budgets.SpendTokens,
    admission_control.Admission: feeding.AdmitInTime,
    admission_control.Reclamation: feeding.GiveUpOld,
    generation.Speculative: generate.Redraft,
    generation.WeightNoise: generate.AddNoise,
    generation.Pruning: trees.PruneRollouts,
    generation.Branching: trees.GrowTrees,
    generation.Purify: generate.PurifyPrompts,
    hints.Hints: generate.GiveHints,
    hints.Nudges: generate.Nudge,
    filters.ByNeed: draw.DrawByNeed,
    replay.PoolOfSuccesses: replaying.InjectSuccesses,
    replay.ReplayedSuccesses: replaying.ReplaySuccesses,
    filters.ZeroAdvantage: filtering.DropFlat,
    filters.DynamicSampling: filtering.SampleUntilInformative,
    filters.Overlong: filtering.PenaliseLong,
    filters.Variance: filtering.DropUnvaried,
    filters.Extremes: filtering.KeepExtremes,
    replay.Rescue: replaying.RescueFailed,
    replay.Distil: replaying.DistilSuccesses,
    replay.Teacher: teacher.LearnFromTeacher,
    replay.Salvage: replaying.BeginAgain,
    rewards.Majority: rewarding.CountVotes,
    rewards.Distribution: rewarding.CountSureVotes,
    rewards.Flawed: rewarding.PenaliseFlaws,
    advantages.Hacpo: advantage.MeasureByCapability,
    advantages.TwoLevels: advantage.MeasureTurns,
    advantages.SubProblems: advantage.MeasureParts,
    rewards.CrossValue: advantage.MeasureByPartner,
}


def refuse_of_others(config: NodeConfig, role: Role) -> None:
    """ConfigError: a setting does nothing in this role."""
    if config.task_seed is not None and role != "node":
        raise ConfigError(f"--task-seed: for a node, and this is a {role}; leave it out")
    if config.record_rounds and role != "node":
        raise ConfigError(f"--record: for a node, and this is a {role}; leave it out")
    for family, each in config.named_methods():
        if role not in each.roles:
            flag = family.replace("_", "-")
            raise ConfigError(f"--{flag} {each.kind}: for a {each.roles[0]}, and this is a {role}")


def stages_of(config: NodeConfig) -> Stages:
    """The stages of the methods that a node's settings name, in the order of a round."""
    found: list[Stage[Any]] = []
    for family, each in config.named_methods():
        if each.own is not None and family not in ("loss", "correction"):
            found.append(GuardedMethod(each))
        elif type(each) in STAGES:
            found.append(STAGES[type(each)](each))
    return Stages(found)
