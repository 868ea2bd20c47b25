"""Replay: completions of the past or of others that join own groups."""

from collections.abc import Sequence
from dataclasses import replace

from node.methods.replay import Rescue, Success, rescue
from node.stages.stage import BatchGroup, Stage, View
from swarm.rollouts import Completion


class RescueFailed(Stage[Rescue]):
    """Right completions of others for own groups that are all wrong."""

    def replay(self, batch: Sequence[BatchGroup], at: View) -> Sequence[BatchGroup]:
        own = [each for each in batch if not each.drawn]
        known = {
            place: at.solved.of(each.scored.group.task)
            for place, each in enumerate(own)
            if each.scored.decided and each.is_bare
        }
        rewards = [each.scored.rewards for each in own]
        found = rescue(rewards, known, at.rng("rescue"), self.set_to)
        self.acted += len(found)
        rest = iter(found.get(place, ()) for place in range(len(own)))
        return [
            each if each.drawn or not (more := next(rest)) else self._joined(each, more)
            for each in batch
        ]

    def _joined(self, group: BatchGroup, successes: Sequence[Success]) -> BatchGroup:
        return with_guidance(group, [each.completion for each in successes], self.set_to.shaping)


def with_guidance(
    each: BatchGroup,
    completions: Sequence[Completion],
    shaping: float = 0.0,
    guided_weight: float = 0.0,
) -> BatchGroup:
    """An own group with right completions of others as guidance, as if they were its own."""
    made = tuple(completions)
    group = replace(each.scored.group, completions=made)
    scored = replace(each.scored, group=group, rewards=(1.0,) * len(made), contexts=())
    more = BatchGroup(scored, guided=len(made))
    return replace(each.joined(more), shaping=shaping, guided_weight=guided_weight)
