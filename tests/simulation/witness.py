"""Judges a simulated learner's batches by the groups themselves.

It shares no code with `swarm.leases`, which enforces the bound. It compares three things: the
versions of all tokens in the trainer's batch, the trainer's version, and the versions that really
made a group by the workers' engines, about which a worker may have lied.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from node.interfaces.trainer import TrainingGroup
from swarm.rollouts import version_spans

MADE_MAX: Final = 65_536  # groups whose makers are remembered, the oldest forgotten first
TRAINED_MAX: Final = 1 << 20  # groups that are remembered so that none is trained on twice
EXAMPLES_MAX: Final = 8  # violations that are kept in words


@dataclass(slots=True)
class Witness:
    """An account of all groups that were trained on, against the bound S in steps."""

    bound: int
    groups: int = 0
    by_age: Counter[int] = field(default_factory=Counter)  # as the groups say themselves
    worst_at: dict[int, int] = field(default_factory=dict)  # learner's version -> oldest group
    violations: int = 0  # older than S by what they say, or of a version that does not exist
    true_violations: int = 0  # older than S by what really made them
    worst_true: int = 0
    false_groups: int = 0  # that were made by an older version than they say
    repeated: int = 0  # trained on twice, without the learner having lost the first time
    examples: list[str] = field(default_factory=list)
    _made: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)
    _trained: set[tuple[str, str]] = field(default_factory=set)

    @property
    def worst(self) -> int:
        """The oldest group of all, as it says itself."""
        return max(self.by_age, default=0)

    def made(self, worker: str, prompt: str, version: int) -> None:
        """An engine began a group under this version of the policy."""
        self._made[worker, prompt] = version
        if len(self._made) > MADE_MAX:
            self._made.popitem(last=False)

    def lost(self) -> None:
        """The learner died: what it trains on again has left no trace the first time."""
        self._trained.clear()

    def trained(self, groups: Sequence[TrainingGroup], version: int) -> None:
        """The learner, at this version, makes a step of these groups."""
        worst = 0
        for group in groups:
            versions = [run[0] for each in group.completions for run in version_spans(each)]
            age = version - min(versions)
            worst = max(worst, age)
            self.groups += 1
            self.by_age[age] += 1
            if age > self.bound or max(versions) > version:
                self.violations += 1
                self._note(f"versions {sorted(set(versions))} at version {version}")
            self._judge_truth(group, min(versions), version)
        self.worst_at[version] = worst

    def _judge_truth(self, group: TrainingGroup, said: int, version: int) -> None:
        key = (group.source, group.prompt)
        self.repeated += key in self._trained
        if len(self._trained) < TRAINED_MAX:
            self._trained.add(key)
        made = self._made.get(key, said)
        self.false_groups += made < said
        self.worst_true = max(self.worst_true, version - made)
        self.true_violations += version - made > self.bound

    def _note(self, what: str) -> None:
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(what)
