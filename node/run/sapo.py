"""One SAPO round, in the order of the algorithm (arXiv 2509.08721, section 3). Read this first.

    tasks        the next I of this node's own stream
    completions  G for each, by the rollout engine
    rewards      by this node's own verifier
    share        sign the groups, advertise them; others pull what they want
    draw         the I own groups, and J of what has arrived from others
    update       one GRPO step over all of them
    evaluate     now and then, on the run's fixed held-out tasks and on the node's validation tasks

Nothing here waits for the network: with fewer than J usable groups the batch is smaller. With J = 0
this is plain GRPO, and all randomness follows from the node's seed, its peer id and the round.
Results are equal bit for bit with the torch engine, the same `--threads`, and memory for the whole
micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, isfinite, nan
from random import Random
from statistics import fmean
from typing import Any

import trio

from node.config import RunConfig
from node.config.run import COMPLETION_OVERHEAD_BYTES, GROUP_OVERHEAD_BYTES, SEGMENT_BYTES
from node.envs.answers import answer_in
from node.envs.replay_turns import Said, said_of
from node.interfaces.prompts import NO_TEXT, Prompt
from node.interfaces.trainer import TrainingGroup, TrainReport, training_group
from node.methods.choices import advantages
from node.methods.drafts import DraftBank
from node.methods.filters import ByNeed
from node.methods.generation import Speculative
from node.methods.hints import BareSuccess, Hints
from node.methods.replay import Success, rescue
from node.methods.samplers import distinct, draw_foreign, draw_needed
from node.methods.task_control import ExternalGains, evaluated, groups_of
from node.observe.records import HeldOut, RoundDone, SampledGroup
from node.observe.samples import bounded
from node.run.evaluation import evaluate, rewards_of
from node.run.groups import (
    finite,
    foreign_group,
    outcome_counts,
    rollout_group,
    sampled,
    seed_of,
)
from node.run.partial_rollouts import Assign, EngineWorks, PartialRollouts
from node.run.parts import LivePolicy, NodeParts, OnSamples
from node.run.progress import Progress
from node.run.turns import Player, completions
from node.verify.assignment import is_common
from node.verify.held_out import Assignment
from swarm.exchange.pool import Candidate
from swarm.rollouts import (
    Completion,
    GroupId,
    RolloutGroup,
    ScoredGroup,
    informative,
)
from swarm.telemetry.metrics import figures_of
from swarm.wire.messages import TOKENS_MAX


def _is_bare(group: ScoredGroup) -> bool:
    """True if the policy wrote all of each completion, without a hint."""
    return not Prompt.read(group.prompt).beginning


def _with_hint_text(group: ScoredGroup) -> ScoredGroup:
    """The group as people read it: each completion begins with the hint."""
    if _is_bare(group):
        return group
    whole = Prompt.read(group.prompt).whole
    made = (replace(c, text=whole(c.text)) for c in group.group.completions)
    return replace(group, group=replace(group.group, completions=tuple(made)))


def _fits_the_wire(group: RolloutGroup, run: RunConfig) -> bool:
    """True if other nodes would accept the group; else it is trained on and not shared."""
    size_bytes = GROUP_OVERHEAD_BYTES
    for completion in group.completions:
        size_bytes += COMPLETION_OVERHEAD_BYTES + len(completion.text.encode())
        size_bytes += 8 * (len(completion.token_ids) + len(completion.spans))
        size_bytes += SEGMENT_BYTES * len(completion.segments)
        if len(completion.text) > run.limits.text_chars_max:
            return False
        if len(completion.token_ids) > TOKENS_MAX:
            return False
    return _has_logprobs(group) and size_bytes <= run.group_bytes_max


def _has_logprobs(group: RolloutGroup) -> bool:
    """True if each log-prob is finite; those of a diverged policy may not be."""
    return all(all(map(isfinite, each.logprobs)) for each in group.completions)


def _sampled(completion: Completion) -> int:
    """Tokens that were sampled, and not kept of a draft."""
    return len(completion.token_ids) - (completion.splices[-1] if completion.splices else 0)


def _wholes(prompt: str, completions: Sequence[Completion]) -> list[Said]:
    """The texts to score: hint, completion and replies of the environment."""
    said = Prompt.read(prompt)
    if said.beginning:
        return [said.whole(each.text) for each in completions]
    return [said_of(each) for each in completions]


# Long: one round, in the order of the algorithm, from one place.
class Sapo:
    """The round loop's body. Holds the node's progress and nothing else that changes."""

    def __init__(
        self,
        node: NodeParts,
        policy: LivePolicy,
        progress: Progress,
        before_share: Callable[[int], Awaitable[None]] | None = None,
        on_samples: OnSamples | None = None,
    ) -> None:
        """`before_share` makes a new data position durable."""
        self._node = node
        self._config = config = node.config
        self._policy = policy
        self._engine = policy.engine
        self._player = Player(config.run, policy.engine, node.verifier)
        self._partial: PartialRollouts[Any] | None = None
        if config.over_provision > 1.0:
            by_engine = EngineWorks(policy.engine)
            works = self._player if config.run.has_turns else by_engine
            self._partial = PartialRollouts(works, config.over_provision)
        self._drafts, self._drafted = DraftBank(), 0
        self._bare = BareSuccess()
        self._before_share = before_share
        self._on_samples = on_samples
        self.progress = progress
        self._sampling = config.run.engine_sampling

    async def round(self) -> RoundDone:
        """Run one round. If cancelled before the update, it leaves only the groups it shared."""
        start = self.progress
        number = start.round + 1
        clock = _Stopwatch()
        self._drafted = 0
        own, next_index = await self._generate(number, clock)
        shared: list[ScoredGroup] = []
        if self._config.share == "all":
            if self._before_share is not None:
                await self._before_share(next_index)
            shared = [
                each
                for each in own
                if each.decided and _is_bare(each) and _fits_the_wire(each.group, self._config.run)
            ]
            await self._share(shared)
        foreign = await self._draw(number)
        hand_over = self._policy.hand_over
        with trio.CancelScope(shield=True):  # what was drawn is marked as trained on
            if self._on_samples is not None:
                await self._on_samples(self._samples(own, foreign, number))
            self._node.enter("training")
            if hand_over is not None:
                await hand_over.before_training()
            rescued = self._rescued(own, number)
            report = await self._policy.trainer.train(self._batch(own, foreign, rescued, number))
            clock.lap("train")
            paused_s = None
            if hand_over is not None:
                paused_s = await hand_over.after_training(report.policy_version)
            measured = [each for each in own if each.decided and _is_bare(each)]
            self._node.choice.learn([(each.group.task, each.rewards) for each in measured])
            self._keep_beginnings(own)
            generated = self._generated(own)
            self.progress = replace(
                start,
                round=number,
                next_index=next_index,
                generated_tokens=start.generated_tokens + generated,
                trained_tokens=start.trained_tokens + report.trained_tokens,
                groups_shared=start.groups_shared + len(shared),
            )
        return replace(
            self._record(own, foreign, report, clock),
            paused_s=paused_s,
            groups_shared=len(shared),
            generated_tokens=generated,
            rescued_groups=len(rescued),
        )

    def _generated(self, own: Sequence[ScoredGroup]) -> int:
        """The number of tokens that were sampled for the round."""
        if self._engine.capabilities.counts:
            return self._engine.take_sampled()
        return sum(_sampled(c) for each in own for c in each.group.completions)

    # --- tasks, completions, rewards -------------------------------------------------------

    async def _generate(self, number: int, clock: "_Stopwatch") -> tuple[list[ScoredGroup], int]:
        """The round's own groups and the next data position."""
        index = self.progress.next_index
        self._node.choice.expire()
        choose = partial(self._node.choice.choose, rng=Random(self._seed("tasks", number)))

        async def assign(count: int) -> list[Assignment]:
            nonlocal index
            assigned, index = await self._node.guard.assignments(
                self._node.peer_id, index, count, choose, self._node.choice.ahead
            )
            return [self._with_hint(each, number) for each in assigned]

        if self._config.local_groups == 0:
            return [], index
        groups = await self._attempt(assign, self._seed("generate", number, 0), clock)
        return groups, index

    async def _attempt(self, assign: Assign, seed: int, clock: "_Stopwatch") -> list[ScoredGroup]:
        """I groups more."""
        self._node.enter("generating")
        wanted, each = self._config.local_groups, self._config.group_size
        if self._partial is not None:
            made = await self._partial.groups(wanted, each, self._sampling, seed, assign)
        elif isinstance(self._config.generate, Speculative):
            assigned = await assign(wanted)
            redrafted = await self._redrafted(assigned, self._config.generate, seed)
            made = list(zip(assigned, redrafted, strict=True))
        else:
            assigned = await assign(wanted)
            made_of = await completions(self._player, assigned, each, self._sampling, seed)
            made = list(zip(assigned, made_of, strict=True))
        clock.lap("generate")
        self._node.enter("scoring")
        texts = [_wholes(its.prompt, group) for its, group in made]
        verdicts = await self._node.verifier.score([its.task for its, _ in made], texts)
        clock.lap("score")
        return [
            ScoredGroup(
                GroupId(b""),
                rollout_group(self._node, self._policy, self.progress.round + 1, its, group),
                its.prompt,
                rewards_of(found),
                own=True,
                decided=None not in found,
            )
            for (its, group), found in zip(made, verdicts, strict=True)
        ]

    async def _redrafted(
        self, assigned: Sequence[Assignment], set_to: Speculative, seed: int
    ) -> list[tuple[Completion, ...]]:
        """G completions of each task, from what the node made of it before where it did."""
        each = self._config.group_size
        drafts = [
            draft for its in assigned for draft in self._drafts.drafts(its.task, its.prompt, each)
        ]
        self._drafted += sum(len(draft.token_ids) for draft in drafts)
        made = await self._engine.redraft(drafts, set_to, self._sampling, seed)
        return [tuple(made[at : at + each]) for at in range(0, len(made), each)]

    def _with_hint(self, assigned: Assignment, number: int) -> Assignment:
        """A task with the beginning of another node's right completion, if it is hard for this one.
        A hint has at most as many bytes as a completion may have tokens."""
        if not isinstance(self._config.generate, Hints):
            return assigned
        most = self._sampling.max_new_tokens
        texts = [each.completion.text for each in self._node.solved.of(assigned.task)]
        fit = [text for text in texts if len(text.encode()) <= most and NO_TEXT not in text]
        task = assigned.task
        rule = self._config.run.answer_rule(task.environment, task.parameters)
        find = partial(answer_in, rule.format)
        hint = self._bare.hint(task, fit, number - 1, self._config.generate, find)
        if not hint:
            return assigned
        return replace(assigned, prompt=Prompt.read(assigned.prompt).begun(hint).text)

    def _keep_beginnings(self, own: Sequence[ScoredGroup]) -> None:
        """Keep drafts, or pass rates without hints, of tasks that come again."""
        if self._config.generate is None:
            return
        for each in own:
            group = each.group
            if is_common(self._config.run, group.task):
                if isinstance(self._config.generate, Hints):
                    if each.decided and _is_bare(each):
                        self._bare.learn(group.task, each.rewards)
                elif _has_logprobs(group):
                    self._drafts.keep(group.task, group.completions)

    # --- sharing and drawing ---------------------------------------------------------------

    async def _share(self, own: Sequence[ScoredGroup]) -> None:
        """Sign and offer groups, without splices: to others all log-probs are the sharer's."""
        created_at_s = int(self._node.now_s())
        told = self._node.choice.told(len(own))
        groups = [
            replace(
                each.group,
                completions=tuple(replace(c, splices=()) for c in each.group.completions),
                created_at_s=created_at_s,
                expires_at_s=created_at_s + self._config.run.limits.record_life_s,
                counters=counters,
            )
            for each, counters in zip(own, told, strict=True)
        ]
        await self._node.the_exchange.share(
            groups, [each.prompt for each in own], [each.rewards for each in own]
        )

    async def _draw(self, number: int) -> list[ScoredGroup]:
        wanted = self._external_wanted
        if wanted == 0:
            return []
        rng = Random(self._seed("draw", number))
        each_max = ceil(self._config.foreign_share_max * wanted)
        candidates = await self._node.the_exchange.candidates()
        if self._config.draw is None:
            chosen = draw_foreign(candidates, wanted, rng, each_max)
        else:
            chosen = await self._needed(candidates, wanted, rng, each_max, self._config.draw)
        taken = distinct(await self._node.the_exchange.take(chosen, number))
        return await self._node.guard.trainable(taken)

    @property
    def _external_wanted(self) -> int:
        """J of this round."""
        wanted, rule = self._config.external_groups, self._config.external_rule
        return wanted if rule is None else groups_of(self.progress.external, wanted, rule)

    async def _needed(
        self, candidates: Sequence[Candidate], wanted: int, rng: Random, each_max: int, draw: ByNeed
    ) -> list[GroupId]:
        """Draw by how often the node solves such tasks itself."""
        times = draw.looked_at
        looked = draw_foreign(candidates, times * wanted, rng, times * each_max)
        said = distinct(await self._node.the_exchange.look(looked))
        tasks = {each.group_id: each.group.task for each in said}
        found = [each for each in candidates if each.group_id in tasks]
        passes = [self._node.choice.own_pass_rate(tasks[each.group_id]) for each in found]
        return draw_needed(found, passes, wanted, rng, draw, each_max)

    def _rescued(self, own: Sequence[ScoredGroup], number: int) -> dict[int, tuple[Success, ...]]:
        """Right completions of others, by the place of an own group that is all wrong."""
        if self._config.replay is None:
            return {}
        known = {
            at: self._node.solved.of(each.group.task)
            for at, each in enumerate(own)
            if each.decided and _is_bare(each)
        }
        rng = Random(self._seed("rescue", number))
        return rescue([group.rewards for group in own], known, rng, self._config.replay)

    def _batch(
        self,
        own: Sequence[ScoredGroup],
        foreign: Sequence[ScoredGroup],
        rescued: Mapping[int, Sequence[Success]],
        number: int,
    ) -> list[TrainingGroup]:
        joined = [_joined(each, rescued.get(place, ())) for place, each in enumerate(own)]
        worth = advantages([*joined, *foreign], self._config.advantage)
        batch = [
            self._own_group(each, len(rescued.get(place, ())), values)
            for place, (each, values) in enumerate(zip(joined, worth, strict=False))
        ]
        for verified, values in zip(foreign, worth[len(own) :], strict=True):
            rng = Random(self._seed(f"keep/{verified.group_id.hex()}", number))
            batch.append(foreign_group(verified, values, self._config.group_size, rng))
        return batch

    def _own_group(
        self, joined: ScoredGroup, successes: int, worth: Sequence[float | None]
    ) -> TrainingGroup:
        """An own group to train on, whose last `successes` completions are right ones of others."""
        made = joined.group.completions
        found = training_group(joined.prompt, made, worth, own_tokens=True)
        if self._config.replay is None or not successes:
            return found
        guided = sum(value is not None for value in worth[len(made) - successes :])
        return replace(found, guided=guided, shaping=self._config.replay.shaping)

    # --- evaluating and telling ------------------------------------------------------------

    def _samples(
        self, own: Sequence[ScoredGroup], foreign: Sequence[ScoredGroup], number: int
    ) -> list[SampledGroup]:
        run = self._config.run
        made = (sampled(run, number, _with_hint_text(each)) for each in own)
        drawn = (sampled(run, number, each) for each in foreign)
        return [*bounded(made), *bounded(drawn)]

    async def evaluate(self) -> HeldOut:
        """Measure the pass rates, and note that on the held-out tasks in the progress."""
        self._node.enter("evaluating")
        validation = await self._node.guard.validation()
        record = await evaluate(self._node, self._engine, self.progress, validation)
        external = self._next_external(record)
        self.progress = replace(self.progress.with_held_out(record.passed), external=external)
        return record

    def _next_external(self, record: HeldOut) -> ExternalGains:
        """The estimate of how many foreign groups help, with the number to try next."""
        before, rule = self.progress.validated, self._config.external_rule
        known = self.progress.external
        if rule is None or record.validation is None:
            return known
        # a policy that was rolled back began at the best pass rate
        since = before.best if before.went_back else before.last
        gain = None if since is None else record.validation - since
        rng = Random(self._seed("external", record.round))
        return evaluated(known, gain, rng, rule)

    # Long: one record, field by field.
    def _record(
        self,
        own: Sequence[ScoredGroup],
        foreign: Sequence[ScoredGroup],
        report: TrainReport,
        clock: "_Stopwatch",
    ) -> RoundDone:
        """The round as this node saw it; `Node.counted` adds the network's figures."""
        bare = [each for each in own if _is_bare(each)]
        rewards = [reward for each in bare for reward in each.rewards]
        trained = [*own, *foreign]
        completions = [c for each in own for c in each.group.completions]
        ledger = self._node.the_exchange.ledger
        producers = Counter(str(verified.group.producer) for verified in foreign)
        return RoundDone(
            round=self.progress.round,
            policy_version=report.policy_version,
            own_reward=fmean(rewards) if rewards else nan,
            local_groups=len(own),
            external_groups=len(foreign),
            informative_groups=sum(informative(each.rewards) for each in trained),
            foreign_by_producer=dict(sorted(producers.items())),
            groups_shared=0,
            rescued_groups=0,
            generated_tokens=0,
            hinted_groups=len(own) - len(bare),
            hinted_taught=sum(informative(g.rewards) for g in own if not _is_bare(g)),
            drafted_tokens=self._drafted,
            kept_tokens=sum(len(c.token_ids) - _sampled(c) for c in completions),
            generated_tokens_total=self.progress.generated_tokens,
            trained_tokens_total=self.progress.trained_tokens,
            generate_s=clock.laps["generate"],
            score_s=clock.laps["score"],
            train_s=clock.laps["train"],
            loss=report.loss,
            grad_norm=report.grad_norm,
            own_logprob=report.own_logprob,
            foreign_logprob=finite(report.foreign_logprob),
            clip_fraction=report.clip_fraction,
            peers=0,
            pool_groups=0,
            pool_bytes=0,
            accepted_total=ledger.accepted,
            rejected_total={str(why): count for why, count in sorted(ledger.rejected.items())},
            bytes_in_total=0,
            bytes_out_total=0,
            foreign_groups=tuple(verified.group_id.hex() for verified in foreign),
            step_kl=finite(report.step_kl),
            steps_taken_back=report.steps_taken_back,
            rate_scale=report.rate_scale,
            rate_share=self.progress.validated.rate_share,
            unlikely_tokens=report.unlikely_tokens,
            own_informative=sum(informative(group.rewards) for group in own),
            answers=outcome_counts(self._config.run, bare),
            weighted_tokens=report.weighted_tokens,
            external_wanted=self._external_wanted,
            foreign_gradient=finite(report.foreign_gradient),
            groups_quantised=sum(each.group.is_quantised for each in trained),
            **self._mismatch(report),
        )

    def _mismatch(self, report: TrainReport) -> dict[str, float | None]:
        """Figures of engine against trainer, where both have one distribution."""
        whole = self._sampling.is_whole
        return {
            name: finite(value) if whole else None for name, value in figures_of(report).items()
        }

    def _seed(self, purpose: str, *numbers: int) -> int:
        return seed_of(self._config.seed, self._node.peer_id, purpose, numbers)


def _joined(group: ScoredGroup, successes: Sequence[Success]) -> ScoredGroup:
    """An own group with right completions of others, as if they were its own."""
    more = tuple(each.completion for each in successes)
    return replace(
        group,
        group=replace(group.group, completions=(*group.group.completions, *more)),
        rewards=(*group.rewards, *[1.0] * len(more)),
    )


class _Stopwatch:
    """Splits a round's time into named laps, seconds of the loop's clock."""

    def __init__(self) -> None:
        self.laps: defaultdict[str, float] = defaultdict(float)
        self._last = trio.current_time()

    def lap(self, name: str) -> None:
        now = trio.current_time()
        self.laps[name] += now - self._last
        self._last = now
