"""One SAPO round, in the order of the algorithm (arXiv 2509.08721, section 3). Read this first.

    tasks        the next I of this node's own stream
    completions  G for each, by the rollout engine
    rewards      by this node's own verifier
    share        sign the groups, advertise them; others pull what they want
    draw         the I own groups, and J of what has arrived from others
    update       one GRPO step over all of them
    evaluate     now and then, on the run's fixed held-out tasks and on the node's validation tasks

Nothing here waits for the network. What has arrived is what is drawn; with fewer than J usable
foreign groups the batch is smaller, and the round's record says so. With J = 0 this is plain
GRPO, whoever is connected: all randomness is derived from the node's seed, its peer id and the
round. It is so bit for bit with the torch engine, a given `--threads`, and memory for the wanted
micro-batch: sums round by how they are cut up, and by default both a node's share of the cores
and how far it halves the micro-batch depend on who else runs there when it starts.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil, isfinite, nan
from random import Random
from statistics import fmean
from typing import Any, Protocol, cast

import trio

from node.config import NodeConfig, RunConfig
from node.config.run import COMPLETION_OVERHEAD_BYTES, GROUP_OVERHEAD_BYTES, SEGMENT_BYTES
from node.environments.answers import answer_in
from node.environments.turns.replay import Said, said_of
from node.interfaces.engine import CountingEngine, DraftingEngine, PartialEngine, RolloutEngine
from node.interfaces.prompts import NO_TEXT, hint_of, hinted, whole
from node.interfaces.trainer import Trainer, TrainingGroup, TrainReport, training_group
from node.loops.evaluation import held_out, rewards_of
from node.loops.partial_rollouts import Assign, EngineWorks, PartialRollouts
from node.loops.tally import Scored, sampled, scored_of, tally
from node.loops.turns.play import Player, completions
from node.loops.validation import Validated
from node.methods.choices import advantages
from node.methods.control.external import ExternalGains, evaluated, groups_of
from node.methods.filters.need import ByNeed
from node.methods.filters.rescue import SolvedTasks, Success, rescue
from node.methods.generate.drafts import DraftBank
from node.methods.generate.hints import BareSuccess, Hints
from node.methods.generate.speculative import Speculative
from node.methods.groups import GroupView, view_of
from node.methods.samplers import distinct, draw_foreign, draw_needed, kept_completions
from node.records.records import HeldOut, RoundDone, SampledGroup
from node.records.samples import bounded
from node.verification.assignment import is_common
from node.verification.held_out import Assignment, HeldOutGuard
from node.verification.task_choice import TaskChoice
from node.verification.verifier import Verifier
from swarm.exchange.pool import Candidate
from swarm.exchange.service import Exchange
from swarm.identity import PeerId
from swarm.rollouts import (
    Completion,
    GroupId,
    RolloutGroup,
    Task,
    VerifiedGroup,
    informative,
    is_quantised,
)
from swarm.telemetry.metrics import figures_of
from swarm.wire.messages import TOKENS_MAX


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the node has come. Saved with each checkpoint; totals count from its first start."""

    round: int = 0
    next_index: int = 0  # of the node's own task stream
    generated_tokens: int = 0
    trained_tokens: int = 0
    groups_shared: int = 0
    held_out_first: float | None = None
    held_out_last: float | None = None
    validated: Validated = field(default_factory=Validated)
    external: ExternalGains = field(default_factory=ExternalGains)

    def with_next_index(self, next_index: int) -> "Progress":
        """The same, at another data position."""
        return replace(self, next_index=next_index)

    def with_held_out(self, passed: float) -> "Progress":
        """The same, evaluated once more."""
        first = passed if self.held_out_first is None else self.held_out_first
        return replace(self, held_out_first=first, held_out_last=passed)

    def to_json(self) -> dict[str, Any]:
        """As plain data for the checkpoint's state file."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Progress":
        """What `to_json` gave; older checkpoints say nothing of validation, and of what foreign
        groups brought.

        Raises:
            TypeError, KeyError, AttributeError: it is none.
        """
        external = fields.get("external")
        known = {
            "validated": Validated(**fields.get("validated", {})),
            "external": ExternalGains() if external is None else ExternalGains.from_json(external),
        }
        return cls(**{**fields, **known})


@dataclass(frozen=True, slots=True)
class OwnGroup:
    """One task with what this node's policy made of it, and what that was worth."""

    task: Task
    prompt: str
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    attempt: int = 0  # how often the node did the task before
    decided: bool = True  # whether it is worth the same everywhere; else nobody would take it

    @property
    def bare(self) -> bool:
        """Whether the policy made the whole of it, and got no hint."""
        return not hint_of(self.prompt)

    @property
    def scored(self) -> Scored:
        """What is counted of it, each completion from its hint on."""
        if self.bare:
            return self.task, self.completions, self.rewards
        made = [replace(c, text=whole(self.prompt, c.text)) for c in self.completions]
        return self.task, made, self.rewards


def _fits_the_wire(group: OwnGroup, run: RunConfig) -> bool:
    """Whether others would take the group: one that is too long, or whose log-probs are not
    numbers, is trained on here and not shared."""
    size_bytes = GROUP_OVERHEAD_BYTES
    for completion in group.completions:
        size_bytes += COMPLETION_OVERHEAD_BYTES + len(completion.text.encode())
        size_bytes += 8 * (len(completion.token_ids) + len(completion.spans))
        size_bytes += SEGMENT_BYTES * len(completion.segments)
        if len(completion.text) > run.limits.text_chars_max:
            return False
        if len(completion.token_ids) > TOKENS_MAX or not all(map(isfinite, completion.logprobs)):
            return False
    return size_bytes <= run.group_bytes_max


def _has_logprobs(group: OwnGroup) -> bool:
    """Whether each token's log-prob is a number: a policy that goes astray may give others."""
    return all(all(map(isfinite, each.logprobs)) for each in group.completions)


def _sampled(completion: Completion) -> int:
    """How many of its tokens were sampled, and not kept of a draft."""
    return len(completion.token_ids) - (completion.splices[-1] if completion.splices else 0)


def _as_sampled(completion: Completion) -> Completion:
    """As others are told of it: all of its log-probs are of the policy that shares it."""
    return replace(completion, splices=()) if completion.splices else completion


def _wholes(prompt: str, completions: Sequence[Completion]) -> list[Said]:
    """What is scored of a group: all that was said, and what a hint said before it."""
    if hint_of(prompt):
        return [whole(prompt, each.text) for each in completions]
    return [said_of(each) for each in completions]


OnSamples = Callable[[Sequence[SampledGroup]], Awaitable[None]]


class HandOver(Protocol):
    """To an engine of its own, around each update."""

    async def before_training(self) -> None:
        """Nothing is sampled from here to the end of `after_training`."""
        ...

    async def after_training(self, policy_version: int) -> float:
        """Have the engine sample from the new policy; how long it stood still for that, in seconds.

        Raises:
            ChildFailed: the engine takes none.
        """
        ...


# Long: one round, in the order of the algorithm, from one place.
class Sapo:
    """The round loop's body. Holds the node's progress and nothing else that changes."""

    def __init__(
        self,
        config: NodeConfig,
        peer_id: PeerId,
        engine: RolloutEngine,
        trainer: Trainer,
        verifier: Verifier,
        guard: HeldOutGuard,
        exchange: Exchange,
        progress: Progress,
        *,
        tokenizer: str,
        now_s: Callable[[], float],
        on_phase: Callable[[str], None] = lambda _: None,
        before_share: Callable[[int], Awaitable[None]] | None = None,
        hand_over: HandOver | None = None,
        on_samples: OnSamples | None = None,
        choice: TaskChoice | None = None,
        solved: SolvedTasks | None = None,
    ) -> None:
        """`on_samples`: gets some of each round's groups, for people to look at. `choice`: what is
        known of how hard tasks are, `solved`: what others made of them; None: nothing yet."""
        self._config = config
        self._peer_id = peer_id
        self._engine = engine
        self._player = Player(config.run, engine, verifier)
        self._partial: PartialRollouts[Any] | None = None
        if config.over_provision > 1.0:
            by_engine = EngineWorks(cast("PartialEngine", engine))
            works = self._player if config.run.has_turns else by_engine
            self._partial = PartialRollouts(works, config.over_provision)
        self._drafts, self._drafted = DraftBank(), 0
        self._bare = BareSuccess()
        self._trainer = trainer
        self._verifier = verifier
        self._guard = guard
        self._exchange = exchange
        self._tokenizer = tokenizer
        self._now_s = now_s
        self._on_phase = on_phase
        self._before_share = before_share  # makes the new data position durable
        self._hand_over = hand_over
        self._on_samples = on_samples
        self._solved = solved if solved is not None else SolvedTasks()
        self._choice = choice or TaskChoice(config.run, config.control)
        self.progress = progress
        self._sampling = config.run.engine_sampling

    async def round(self) -> RoundDone:
        """Run one round and count it. Cancelled before the update, it leaves no trace but the
        groups that it shared."""
        start = self.progress
        number = start.round + 1
        clock = _Stopwatch()
        self._drafted = 0
        own, next_index = await self._generate(number, clock)
        shared: list[OwnGroup] = []
        if self._config.share == "all":
            if self._before_share is not None:
                await self._before_share(next_index)
            shared = [
                group
                for group in own
                if group.decided and group.bare and _fits_the_wire(group, self._config.run)
            ]
            await self._share(shared, number)
        foreign = await self._draw(number)
        with trio.CancelScope(shield=True):  # what was drawn is marked as trained on
            if self._on_samples is not None:
                await self._on_samples(self._samples(own, foreign, number))
            self._on_phase("training")
            chosen = own
            if self._hand_over is not None:
                await self._hand_over.before_training()
            rescued = self._rescued(chosen, number)
            report = await self._trainer.train(self._batch(chosen, foreign, rescued, number))
            clock.lap("train")
            paused_s = None
            if self._hand_over is not None:
                paused_s = await self._hand_over.after_training(report.policy_version)
            measured = [each for each in own if each.decided and each.bare]
            self._choice.learn([(group.task, group.rewards) for group in measured])
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
        counts = (generated, len(shared), len(rescued))
        record = self._record(own, chosen, foreign, report, clock, *counts)
        return replace(record, paused_s=paused_s)

    def _generated(self, own: Sequence[OwnGroup]) -> int:
        """Tokens that were sampled for the round."""
        if isinstance(self._engine, CountingEngine):
            return self._engine.take_sampled()
        return sum(_sampled(c) for group in own for c in group.completions)

    # --- tasks, completions, rewards -------------------------------------------------------

    async def _generate(self, number: int, clock: "_Stopwatch") -> tuple[list[OwnGroup], int]:
        """The round's own groups and the next data position."""
        index = self.progress.next_index
        self._choice.expire()
        choose = partial(self._choice.choose, rng=Random(self._seed("tasks", number)))

        async def assign(count: int) -> list[Assignment]:
            nonlocal index
            assigned, index = await self._guard.assignments(
                self._peer_id, index, count, choose, self._choice.ahead
            )
            return [self._with_hint(each, number) for each in assigned]

        if self._config.local_groups == 0:
            return [], index
        groups = await self._attempt(assign, self._seed("generate", number, 0), clock)
        return groups, index

    async def _attempt(self, assign: Assign, seed: int, clock: "_Stopwatch") -> list[OwnGroup]:
        """I groups more."""
        self._on_phase("generating")
        wanted, each = self._config.local_groups, self._config.group_size
        if self._partial is not None:
            made = await self._partial.groups(wanted, each, self._sampling, seed, assign)
        elif isinstance(self._config.generate, Speculative):
            assigned = await assign(wanted)
            redrafted = await self._redrafted(assigned, self._config.generate, seed)
            made = list(zip(assigned, redrafted, strict=True))
        else:
            assigned = await assign(wanted)
            made_of = await completions(
                self._player,
                [assignment.task for assignment in assigned],
                [assignment.prompt for assignment in assigned],
                each,
                self._sampling,
                seed,
            )
            made = list(zip(assigned, made_of, strict=True))
        clock.lap("generate")
        self._on_phase("scoring")
        texts = [_wholes(its.prompt, group) for its, group in made]
        verdicts = await self._verifier.score([its.task for its, _ in made], texts)
        clock.lap("score")
        return [
            OwnGroup(its.task, its.prompt, group, rewards_of(found), its.attempt, None not in found)
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
        engine = cast("DraftingEngine", self._engine)
        made = await engine.redraft(drafts, set_to, self._sampling, seed)
        return [tuple(made[at : at + each]) for at in range(0, len(made), each)]

    def _with_hint(self, assigned: Assignment, number: int) -> Assignment:
        """A task with the beginning of what another node got right, if it is hard for this one. A
        hint takes no more bytes than a completion may have tokens: however a tokenizer cuts it, it
        is no longer than one."""
        if not isinstance(self._config.generate, Hints):
            return assigned
        most = self._sampling.max_new_tokens
        texts = [each.completion.text for each in self._solved.of(assigned.task)]
        fit = [text for text in texts if len(text.encode()) <= most and NO_TEXT not in text]
        task = assigned.task
        rule = self._config.run.answer_rule(task.environment, task.parameters)
        find = partial(answer_in, rule.format)
        hint = self._bare.hint(task, fit, number - 1, self._config.generate, find)
        return replace(assigned, prompt=hinted(assigned.prompt, hint)) if hint else assigned

    def _keep_beginnings(self, own: Sequence[OwnGroup]) -> None:
        """Of tasks that come again: what is gone on from the next time, or what is given away."""
        if self._config.generate is None:
            return
        for group in own:
            if is_common(self._config.run, group.task):
                if isinstance(self._config.generate, Hints):
                    if group.decided and group.bare:
                        self._bare.learn(group.task, group.rewards)
                elif _has_logprobs(group):
                    self._drafts.keep(group.task, group.completions)

    # --- sharing and drawing ---------------------------------------------------------------

    async def _share(self, own: Sequence[OwnGroup], number: int) -> None:
        created_at_s = int(self._now_s())
        told = self._choice.told(len(own))
        groups = [
            RolloutGroup(
                run_id=self._config.run.run_id,
                producer=self._peer_id,
                round=number,
                task=group.task,
                completions=tuple(map(_as_sampled, group.completions)),
                tokenizer=self._tokenizer,
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                created_at_s=created_at_s,
                expires_at_s=created_at_s + self._config.run.limits.record_life_s,
                engine=self._engine.maker.engine,
                precision=self._engine.maker.precision,
                attempt=group.attempt,
                counters=counters,
            )
            for group, counters in zip(own, told, strict=True)
        ]
        await self._exchange.share(
            groups, [group.prompt for group in own], [group.rewards for group in own]
        )

    async def _draw(self, number: int) -> list[VerifiedGroup]:
        wanted = self._external_wanted
        if wanted == 0:
            return []
        rng = Random(self._seed("draw", number))
        each_max = ceil(self._config.foreign_share_max * wanted)
        candidates = await self._exchange.candidates()
        if self._config.draw is None:
            chosen = draw_foreign(candidates, wanted, rng, each_max)
        else:
            chosen = await self._needed(candidates, wanted, rng, each_max, self._config.draw)
        taken = distinct(await self._exchange.take(chosen, number))
        return await self._guard.trainable(taken)

    @property
    def _external_wanted(self) -> int:
        """J of this round."""
        wanted, rule = self._config.external_groups, self._config.external_rule
        return wanted if rule is None else groups_of(self.progress.external, wanted, rule)

    async def _needed(
        self, candidates: Sequence[Candidate], wanted: int, rng: Random, each_max: int, draw: ByNeed
    ) -> list[GroupId]:
        """By how often the node solves such tasks itself, of some that are drawn alike."""
        times = draw.looked_at
        looked = draw_foreign(candidates, times * wanted, rng, times * each_max)
        said = distinct(await self._exchange.look(looked))  # the rest would go once it is drawn
        tasks = {each.group_id: each.group.task for each in said}
        found = [each for each in candidates if each.group_id in tasks]
        passes = [self._choice.own_pass_rate(tasks[each.group_id]) for each in found]
        return draw_needed(found, passes, wanted, rng, draw, each_max)

    def _rescued(self, own: Sequence[OwnGroup], number: int) -> dict[int, tuple[Success, ...]]:
        """By the place of an own group that is all wrong, right completions of others."""
        if self._config.replay is None:
            return {}
        known = {
            at: self._solved.of(group.task)
            for at, group in enumerate(own)
            if group.decided and group.bare
        }
        rng = Random(self._seed("rescue", number))
        return rescue([group.rewards for group in own], known, rng, self._config.replay)

    def _batch(
        self,
        own: Sequence[OwnGroup],
        foreign: Sequence[VerifiedGroup],
        rescued: Mapping[int, Sequence[Success]],
        number: int,
    ) -> list[TrainingGroup]:
        views = [self._view(group, rescued.get(place, ())) for place, group in enumerate(own)]
        views += map(view_of_foreign, foreign)
        worth = advantages(views, self._config.advantage)
        batch = [
            self._own_group(group, rescued.get(place, ()), values)
            for place, (group, values) in enumerate(zip(own, worth, strict=False))
        ]
        for verified, values in zip(foreign, worth[len(own) :], strict=True):
            rng = Random(self._seed(f"keep/{verified.group_id.hex()}", number))
            batch.append(foreign_group(verified, values, self._config.group_size, rng))
        return batch

    @staticmethod
    def _view(group: OwnGroup, successes: Sequence[Success]) -> GroupView:
        """An own group as methods see it, with what others got right as if it were its own."""
        more = [each.completion for each in successes]
        rewards = (*group.rewards, *[1.0] * len(more))
        return view_of(group.prompt, [*group.completions, *more], rewards)

    def _own_group(
        self, group: OwnGroup, successes: Sequence[Success], worth: Sequence[float | None]
    ) -> TrainingGroup:
        """An own group to train on, with what others got right. They stay one group: where its
        guidance does not fit, nothing is learned of a group that is all wrong."""
        made = [*group.completions, *(each.completion for each in successes)]
        found = training_group(group.prompt, made, worth, own_tokens=True)
        if self._config.replay is None or not successes:
            return found
        guided = sum(value is not None for value in worth[len(group.completions) :])
        return replace(found, guided=guided, shaping=self._config.replay.shaping)

    # --- evaluating and telling ------------------------------------------------------------

    def _samples(
        self, own: Sequence[OwnGroup], foreign: Sequence[VerifiedGroup], number: int
    ) -> list[SampledGroup]:
        run, ours = self._config.run, self._peer_id
        made = (sampled(run, number, ours, each.prompt, each.scored, own=True) for each in own)
        drawn = (
            sampled(run, number, each.group.producer, each.prompt, scored_of(each), own=False)
            for each in foreign
        )
        return [*bounded(made), *bounded(drawn)]

    async def evaluate(self) -> HeldOut:
        """Measure the pass rates, and note that on the held-out tasks in the progress."""
        self._on_phase("evaluating")
        record = await held_out(
            self._config.run,
            self._engine,
            self._verifier,
            after_round=self.progress.round,
            generated_tokens=self.progress.generated_tokens,
            validation=await self._guard.validation(),
        )
        external = self._next_external(record)
        self.progress = replace(self.progress.with_held_out(record.passed), external=external)
        return record

    def _next_external(self, record: HeldOut) -> ExternalGains:
        """What is known of how many foreign groups help, and what is tried next."""
        before, rule = self.progress.validated, self._config.external_rule
        known = self.progress.external
        if rule is None or record.validation is None:
            return known
        # A policy that has gone back to the best one since began where that one was
        since = before.best if before.went_back else before.last
        gain = None if since is None else record.validation - since
        rng = Random(self._seed("external", record.round))
        return evaluated(known, gain, rng, rule)

    # Long: one record, field by field.
    def _record(
        self,
        own: Sequence[OwnGroup],
        chosen: Sequence[OwnGroup],
        foreign: Sequence[VerifiedGroup],
        report: TrainReport,
        clock: "_Stopwatch",
        generated: int,
        shared: int,
        rescued: int,
    ) -> RoundDone:
        """The round as this node saw it; the app adds what only the network knows."""
        bare = [group for group in own if group.bare]
        rewards = [reward for group in bare for reward in group.rewards]
        trained = [group.rewards for group in chosen] + [group.rewards for group in foreign]
        producers = Counter(str(verified.group.producer) for verified in foreign)
        return RoundDone(
            round=self.progress.round,
            policy_version=report.policy_version,
            own_reward=fmean(rewards) if rewards else nan,
            local_groups=len(chosen),
            external_groups=len(foreign),
            informative_groups=sum(informative(group_rewards) for group_rewards in trained),
            foreign_by_producer=dict(sorted(producers.items())),
            groups_shared=shared,
            generated_tokens=generated,
            rescued_groups=rescued,
            hinted_groups=len(own) - len(bare),
            hinted_taught=sum(informative(g.rewards) for g in chosen if not g.bare),
            drafted_tokens=self._drafted,
            kept_tokens=sum(
                len(c.token_ids) - _sampled(c) for group in own for c in group.completions
            ),
            generated_tokens_total=self.progress.generated_tokens,
            trained_tokens_total=self.progress.trained_tokens,
            generate_s=clock.laps["generate"],
            score_s=clock.laps["score"],
            train_s=clock.laps["train"],
            loss=report.loss,
            grad_norm=report.grad_norm,
            own_logprob=report.own_logprob,
            foreign_logprob=_known(report.foreign_logprob),
            clip_fraction=report.clip_fraction,
            peers=0,
            pool_groups=0,
            pool_bytes=0,
            accepted_total=self._exchange.ledger.accepted,
            rejected_total={
                str(reason): count
                for reason, count in sorted(self._exchange.ledger.rejected.items())
            },
            bytes_in_total=0,
            bytes_out_total=0,
            foreign_groups=tuple(verified.group_id.hex() for verified in foreign),
            step_kl=_known(report.step_kl),
            steps_taken_back=report.steps_taken_back,
            rate_scale=report.rate_scale,
            rate_share=self.progress.validated.rate_share,
            unlikely_tokens=report.unlikely_tokens,
            own_informative=sum(informative(group.rewards) for group in chosen),
            answers=tally(self._config.run, [group.scored for group in bare]),
            weighed_tokens=report.weighed_tokens,
            external_wanted=self._external_wanted,
            foreign_gradient=_known(report.foreign_gradient),
            groups_quantised=sum(verified.group.is_quantised for verified in foreign)
            + len(chosen) * is_quantised(self._engine.maker.precision),
            **self._mismatch(report),
        )

    def _mismatch(self, report: TrainReport) -> dict[str, float | None]:
        """Of the engine's log-probs and the trainer's, where both are of one distribution."""
        whole = self._sampling.is_whole
        return {
            name: value if whole and value is not None and isfinite(value) else None
            for name, value in figures_of(report).items()
        }

    def _seed(self, purpose: str, *numbers: int) -> int:
        text = f"{self._config.seed}/{self._peer_id}/{purpose}/{numbers}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def view_of_foreign(verified: VerifiedGroup) -> GroupView:
    """A foreign group as methods see it."""
    group = verified.group
    return view_of(verified.prompt, group.completions, verified.rewards, str(group.producer))


def foreign_group(
    verified: VerifiedGroup, worth: Sequence[float | None], group_size: int, rng: Random
) -> TrainingGroup:
    """A foreign group with at most as many completions as an own one has: token weights count rows,
    so that a group of 64 would outweigh eight of 8. `worth`: the advantages in the whole group."""
    group = verified.group
    kept = kept_completions(len(group.completions), max(2, group_size), rng)
    return training_group(
        verified.prompt,
        [group.completions[at] for at in kept],
        [worth[at] for at in kept],
        own_tokens=False,
        source=str(group.producer),
        tokenizer=group.tokenizer,
    )


def _known(value: float) -> float | None:
    return value if isfinite(value) else None


class _Stopwatch:
    """Splits a round's time into named laps, seconds of the loop's clock."""

    def __init__(self) -> None:
        self.laps: defaultdict[str, float] = defaultdict(float)
        self._last = trio.current_time()

    def lap(self, name: str) -> None:
        now = trio.current_time()
        self.laps[name] += now - self._last
        self._last = now
