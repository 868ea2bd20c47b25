"""The stage of each method that acts in a round, by its settings."""

from collections.abc import Mapping
from typing import Any, Final

from node.config import NodeConfig
from node.methods import (
    advantages,
    filters,
    generation,
    hints,
    replay,
    rewards,
    rollout_budgets,
    task_control,
)
from node.methods.method import MethodSettings
from node.stages import (
    advantage,
    budgets,
    control,
    draw,
    filtering,
    generate,
    replaying,
    rewarding,
    teacher,
)
from node.stages.stage import Stage, Stages

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
    generation.Speculative: generate.Redraft,
    hints.Hints: generate.GiveHints,
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


def stages_of(config: NodeConfig) -> Stages:
    """The stages of the methods that a node's settings name, in the order of a round."""
    return Stages([STAGES[type(each)](each) for each in config.methods if type(each) in STAGES])
