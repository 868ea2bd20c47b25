"""Control: which tasks, how many completions of each, how long, and how many groups of others."""

from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from typing import Any

from node.methods.task_control import (
    AdaptiveExternal,
    ExternalGains,
    Vade,
    evaluated,
    groups_of,
)
from node.stages.stage import Stage, View
from node.verify.held_out import Due


class ChooseByInformation(Stage[Vade]):
    """VADE: the node's own and others' counts of successes are kept by its `TaskChoice`."""

    def __init__(self, set_to: Vade) -> None:
        super().__init__(set_to)
        self.ahead = set_to.ahead

    def choose(self, due: Sequence[Due], count: int, rng: Random, at: View) -> Sequence[Due] | None:
        chosen = at.choice.choose(due, count, rng)
        self.acted += list(chosen) != list(due[:count])
        return chosen


class AdaptForeignGroups(Stage[AdaptiveExternal]):
    """J by a bandit, whose arms are tried from one evaluation to the next."""

    def __init__(self, set_to: AdaptiveExternal) -> None:
        super().__init__(set_to)
        self.gains = ExternalGains()

    def foreign_wanted(self, wanted: int, at: View) -> int:
        return groups_of(self.gains, wanted, self.set_to)

    def evaluated(self, gain: float | None, rng: Random) -> None:
        self.gains = evaluated(self.gains, gain, rng, self.set_to)
        self.acted += 1

    def to_record(self) -> Any:
        return asdict(self.gains)

    def restore(self, record: Any) -> None:
        self.gains = ExternalGains.from_json(record)
