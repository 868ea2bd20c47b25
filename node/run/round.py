"""One round, stage by stage, for nodes that share (SAPO, arXiv 2509.08721) and for learners with
workers (ECHO-2, arXiv 2602.02192). Read this first.

    own        a node: control chooses and plans, the engine generates, the verifier scores, and
               methods may ask for more; a learner: groups that its workers made under leases
    share      a node signs its groups and offers them; others pull what they want
    draw       J groups of what has arrived from others
    reward     rewards to train on, where these are not the verifier's
    replay     completions of the past or of others join own groups
    filter     groups that teach
    advantage  what each completion is worth beside its group
    weigh      weights and masks of completions and tokens
    update     one step over all of them, by the loss and its correction
    learn      every method sees what the round came to

`Stages` runs the methods that the node's settings name (`node.stages`). Without any, each stage
leaves things as they are. No stage waits for peers: with fewer than J usable groups the batch is
smaller. A served teacher is waited for, for at most `wait_s`. With J = 0 this is plain GRPO, and
all randomness follows from the node's seed, its stream (`NodeParts`) and the round. Results are
equal bit for bit with the torch engine, equal `--threads`, and memory for the whole micro-batch.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

import trio

from node.interfaces.trainer import TrainingGroup, TrainReport, training_group
from node.methods.groups import Advantages
from node.methods.method import Role
from node.methods.samplers import kept_completions
from node.run.parts import LivePolicy, NodeParts
from node.stages.stage import BatchGroup, RoundOutcome, Seed, Stages, View
from swarm.rollouts import ScoredGroup


class GroupSource(Protocol):
    """The origin of a round's groups, and the place where they go."""

    async def own(self, at: View, clock: "Stopwatch") -> list[BatchGroup] | None:
        """The groups of this node's tasks. None: there is no round."""
        ...

    async def share(self, own: Sequence[BatchGroup], at: View) -> int:
        """Offer groups to others; the number of those that were offered."""
        ...

    async def draw(self, at: View) -> list[ScoredGroup]:
        """Groups of others for the batch."""
        ...

    async def show(self, own: Sequence[BatchGroup], foreign: Sequence[ScoredGroup]) -> None:
        """Show people what is about to be trained on."""
        ...


def view_of(node: NodeParts, policy: LivePolicy, role: Role, number: int, seed: Seed) -> View:
    """The node and the round `number` for its methods."""
    return View(
        number,
        role,
        node.config,
        seed,
        policy.tokenizer,
        policy.engine,
        policy.trainer,
        node.choice,
        node.solved,
        node.exchange,
        node.verifier,
    )


class Round:
    """The stages of a node or a learner, over its source of groups."""

    def __init__(
        self, node: NodeParts, policy: LivePolicy, source: GroupSource, stages: Stages
    ) -> None:
        self._node, self._policy = node, policy
        self._source, self.stages = source, stages
        self.clock = Stopwatch()

    async def run(self, at: View) -> RoundOutcome | None:
        """One round; None if the source has none. If cancelled before the update, it leaves only
        the groups that it shared."""
        self.stages.begin()
        self.clock = Stopwatch()
        own = await self._source.own(at, self.clock)
        if own is None:
            return None
        shared = await self._source.share(own, at)
        foreign = await self._source.draw(at)
        with trio.CancelScope(shield=True):  # what was drawn is marked as trained on
            await self._source.show(own, foreign)
            self._node.enter("training")
            batch, trained = await self.batch(own, foreign, at)
            report, paused_s = await self._update(trained)
            outcome = RoundOutcome(own, foreign, batch, report, shared, paused_s, trained)
            self.stages.learn(outcome, at)
        return outcome

    async def batch(
        self, own: Sequence[BatchGroup], foreign: Sequence[ScoredGroup], at: View
    ) -> tuple[Sequence[BatchGroup], list[TrainingGroup]]:
        """The batch, and what the trainer gets of it."""
        drawn = [BatchGroup(each, drawn=True) for each in foreign]
        batch, worth = await self._weighed([*own, *drawn], at)
        return batch, training_groups(batch, worth, at)

    async def _weighed(
        self, batch: Sequence[BatchGroup], at: View
    ) -> tuple[Sequence[BatchGroup], Advantages]:
        """The groups to train on, and the advantages of their completions."""
        batch = self.stages.reward(batch, at)
        batch = self.stages.replay(batch, at)
        batch = self.stages.select(batch, at)
        worth = await self.stages.advantage(batch, at)
        return self.stages.weigh(batch, worth, at)

    async def _update(self, groups: Sequence[TrainingGroup]) -> tuple[TrainReport, float | None]:
        """The report of the update, and for how long an engine of its own could not sample."""
        hand_over = self._policy.hand_over
        if hand_over is not None:
            await hand_over.before_training()
        report = await self._policy.trainer.train(groups)
        self.clock.lap("train")
        if hand_over is None:
            return report, None
        return report, await hand_over.after_training(report.policy_version)


def training_groups(
    batch: Sequence[BatchGroup], worth: Advantages, at: View
) -> list[TrainingGroup]:
    """The batch for the trainer: one group for each prompt under which completions were made."""
    found = []
    for each, values in zip(batch, worth, strict=True):
        places = _kept(each, at)
        for prompt in dict.fromkeys(map(each.prompt_of, places)):
            under = [place for place in places if each.prompt_of(place) == prompt]
            part = each if len(under) == len(values) else each.only(under)
            found.append(_training_group(part, prompt, [values[place] for place in under], at))
    return found


def _kept(each: BatchGroup, at: View) -> Sequence[int]:
    """Places of at most G completions of a drawn group: one of 64 would outweigh eight of 8. Their
    advantages are those within the whole group."""
    count = len(each.scored.group.completions)
    if not each.drawn:
        return range(count)
    rng = Random(at.seed(f"keep/{each.scored.group_id.hex()}"))
    return kept_completions(count, max(2, at.group_size), rng)


def _training_group(
    each: BatchGroup, prompt: str, worth: Sequence[float | None], at: View
) -> TrainingGroup:
    scored = each.scored
    found = training_group(
        prompt,
        scored.group.completions,
        worth,
        own_tokens=not each.drawn and scored.group.tokenizer == at.tokenizer,
        source=scored.source,
        tokenizer=scored.group.tokenizer if each.drawn else "",
        weights=each.weights,
        masks=each.masks,
        token_advantages=each.token_advantages,
        teacher_logprobs=each.teacher_logprobs,
    )
    if not each.guided:
        return found
    guided = sum(value is not None for value in worth[len(worth) - each.guided :])
    weight = each.guided_weight
    return replace(found, guided=guided, shaping=each.shaping, guided_weight=weight)


class Stopwatch:
    """Splits a round's time into named laps, seconds of the loop's clock."""

    def __init__(self) -> None:
        self.laps: defaultdict[str, float] = defaultdict(float)
        self._last = trio.current_time()

    def lap(self, name: str) -> None:
        now = trio.current_time()
        self.laps[name] += now - self._last
        self._last = now
