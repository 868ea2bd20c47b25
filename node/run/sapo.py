"""A node that learns by itself and shares (SAPO, arXiv 2509.08721): the source of its rounds.

Its own groups are of the next I tasks of its stream, scored by its own verifier. It signs and
offers them, and draws J groups of what has arrived from others. `node.run.round` trains on both.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, nan
from random import Random
from statistics import fmean
from typing import Any

from node.config import RunConfig
from node.config.run import COMPLETION_OVERHEAD_BYTES, GROUP_OVERHEAD_BYTES, SEGMENT_BYTES
from node.envs.replay_turns import said_of
from node.interfaces.engine import Outcome, Request
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import TrainReport
from node.methods.samplers import distinct
from node.observe.records import HeldOut, RoundDone
from node.observe.samples import bounded
from node.run.evaluation import evaluate
from node.run.groups import finite, lengths, outcome_counts, rollout_group, sampled, seed_of
from node.run.partial_rollouts import EngineWorks, PartialRollouts
from node.run.parts import LivePolicy, NodeParts, OnSamples
from node.run.progress import Progress
from node.run.round import Round, Stopwatch, view_of
from node.run.turns import Player, outcomes
from node.stages.stage import (
    MORE_MAX,
    ROLLOUTS_TIMES_MAX,
    BatchGroup,
    RoundOutcome,
    View,
    Wanted,
)
from node.stages.table import stages_of
from node.verify.held_out import SKIPS_PER_TASK_MAX, TOO_LONG, Assignment, Choose
from swarm.errors import ConfigError
from swarm.rollouts import Completion, GroupId, RolloutGroup, ScoredGroup, informative
from swarm.telemetry.metrics import ALWAYS, FIGURES, figures_of
from swarm.wire.messages import TOKENS_MAX


def _with_prompt_text(group: BatchGroup) -> ScoredGroup:
    """The group as people read it: each completion begins with the hint that it was given."""
    if group.is_bare:
        return group.scored
    made = [
        replace(each, text=Prompt.read(group.prompt_of(place)).whole(each.text))
        for place, each in enumerate(group.scored.group.completions)
    ]
    return replace(group.scored, group=replace(group.scored.group, completions=tuple(made)))


def _shareable(group: BatchGroup, run: RunConfig) -> ScoredGroup | None:
    """The group for others, at most as many completions as the run allows. None: it is not shared,
    because others would refuse it or could not tell how it was made."""
    if not group.scored.decided or not group.is_bare or group.private:
        return None
    most = range(min(len(group.scored.rewards), run.limits.group_size_max))
    found = group.only(most).scored
    return found if _fits_the_wire(found.group, run) else None


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
    has_logprobs = all(all(map(isfinite, each.logprobs)) for each in group.completions)
    return has_logprobs and size_bytes <= run.group_bytes_max  # those of a diverged policy have not


def _sampled(completion: Completion) -> int:
    """Tokens that were sampled, and not kept of a draft."""
    return len(completion.token_ids) - (completion.splices[-1] if completion.splices else 0)


def _total(made: Iterable[tuple[Wanted, Outcome]]) -> int:
    return sum(_sampled(each) for _, got in made for each in got.completions)


def _weights(its: Wanted, got: Outcome) -> tuple[float, ...]:
    """The weight of each completion; empty: 1."""
    found = tuple(its.weight * each for each in got.weights or (1.0,) * len(got.completions))
    return found if set(found) != {1.0} else ()


def _said(prompt: str, completion: Completion) -> Any:
    """The text to score: hint, completion and replies of the environment."""
    said = Prompt.read(prompt)
    return said.whole(completion.text) if said.beginning else said_of(completion)


def _within(wanted: Sequence[Wanted], rollouts: int) -> list[Wanted]:
    """The first requests, up to so many completions in all."""
    found: list[Wanted] = []
    for each in wanted:
        count = min(each.request.n, rollouts)
        if count > 0:
            found.append(replace(each, request=replace(each.request, n=count)))
        rollouts -= count
    return found


# Long: the source and its record share the progress.
class Sapo:
    """The source of a node's rounds. Holds its progress, its methods and groups under way."""

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
        self._before_share = before_share
        self._on_samples = on_samples
        self.progress = progress
        self._next_index = progress.next_index
        self._sampling = config.run.engine_sampling
        self._tokens = 0  # sampled in this round
        self._long = 0  # tasks of the last call that do not fit the context
        self._long_in_a_row = 0  # such tasks since the last that did
        self._external_wanted = 0  # J of this round
        self.staged = Round(node, policy, self, stages_of(config))
        self.assigned: list[Sequence[Assignment]] = []  # in this round, call by call
        self.outcome: RoundOutcome | None = None  # of the last round
        self.stages = self.staged.stages
        self.stages.restore(progress.methods)

    def view(self, number: int) -> View:
        def seed(purpose: str, *more: int) -> int:
            return seed_of(self._config.seed, self._node.stream, purpose, (number, *more))

        return view_of(self._node, self._policy, "node", number, seed)

    async def round(self) -> RoundDone:
        """Run one round. If cancelled before the update, it leaves only the groups it shared."""
        start = self.progress
        outcome = await self.staged.run(self.view(start.round + 1))
        assert outcome is not None
        self.outcome = outcome
        measured = [
            each.scored
            for each in outcome.own
            if each.scored.decided and each.is_bare and not each.private
        ]
        self._node.choice.learn([(each.group.task, each.rewards) for each in measured])
        return self._record(outcome, self.advance(outcome.report, outcome.shared))

    def advance(self, report: TrainReport, shared: int) -> int:
        """Count a round that is over; the number of tokens that it sampled."""
        start, counts = self.progress, self._engine.capabilities.counts
        generated = self._engine.take_sampled() if counts else self._tokens
        self.progress = replace(
            start,
            round=start.round + 1,
            next_index=self._next_index,
            generated_tokens=start.generated_tokens + generated,
            trained_tokens=start.trained_tokens + report.trained_tokens,
            groups_shared=start.groups_shared + shared,
            methods=self.stages.to_record(),
        )
        return generated

    # --- tasks, completions, rewards -------------------------------------------------------

    async def own(self, at: View, clock: Stopwatch) -> list[BatchGroup]:
        """The round's own groups, with what methods asked for more."""
        self.begin()
        wanted, each = self._config.local_groups, self._config.group_size
        if wanted == 0:
            return []
        choose = partial(self.stages.choose, rng=at.rng("tasks"), at=at)

        async def assign(count: int) -> Sequence[Wanted]:
            return self.stages.plan(await self.assign(count, each, choose), at)

        self._node.enter("generating")
        if self._partial is not None:
            seed = at.seed("generate", 0)
            begun = await self._partial.groups(wanted, self._sampling, seed, assign)
            self._note_too_long([its for its, _ in begun], [got for _, got in begun])
            begun = [(its, got) for its, got in begun if got.completions]
            self._tokens += _total(begun)
        else:
            begun = await self.generate(await assign(wanted), 0, at)
            while (left := self._long) and len(begun) < wanted:  # others take their places
                begun += await self.generate(await assign(left), 0, at)
        found = _merged((), await self.scored(begun, clock))
        for attempt in range(1, MORE_MAX + 1):
            more = self.stages.more(found, at)
            further = [*more.wanted, *(await assign(more.tasks) if more.tasks else ())]
            rollouts = sum(len(group.scored.rewards) for group in found)
            further = _within(further, ROLLOUTS_TIMES_MAX * wanted * each - rollouts)
            if not further:
                break
            self._node.enter("generating")
            scored = await self.scored(await self.generate(further, attempt, at), clock)
            found = _merged(found, scored)
        return found

    def begin(self) -> None:
        """Begin a round's own groups."""
        self._next_index, self._tokens = self.progress.next_index, 0
        self.assigned = []
        self._node.choice.expire()

    async def assign(self, count: int, each: int, choose: Choose) -> list[Wanted]:
        """`each` completions wanted of the next `count` tasks of the node's stream."""
        assigned, self._next_index = await self._node.guard.assignments(
            self._node.stream, self._next_index, count, choose, self.stages.ahead
        )
        self.assigned.append(assigned)
        return [Wanted(a, Request(a.prompt, each)) for a in assigned]

    async def generate(
        self, wanted: Sequence[Wanted], attempt: int, at: View
    ) -> list[tuple[Wanted, Outcome]]:
        calls = self._long = 0

        async def sample(wanted: Sequence[Wanted], noise: float = 0.0) -> list[Outcome]:
            nonlocal calls
            seed = at.seed("generate", attempt, *([calls] if calls else []))
            calls += 1
            requests = [each.request for each in wanted]
            tasks = [each.assigned.task for each in wanted]
            made = await outcomes(self._player, tasks, requests, self._sampling, seed, noise)
            self._note_too_long(wanted, made)
            self._tokens += _total(zip(wanted, made, strict=True))
            return made

        made = list(zip(wanted, await self.stages.generate(wanted, at, sample), strict=True))
        self._tokens += 0 if calls else _total(made)  # a method may sample in its own way
        return [(its, got) for its, got in made if got.completions]

    def _note_too_long(self, wanted: Sequence[Wanted], made: Sequence[Outcome]) -> None:
        """Count the tasks that the engine could not begin; ConfigError if nothing else comes."""
        long = [its for its, got in zip(wanted, made, strict=True) if not got.completions]
        for each in long:
            self._node.guard.leave_out(each.assigned, TOO_LONG)
        self._long += len(long)
        self._long_in_a_row = 0 if len(long) < len(made) else self._long_in_a_row + len(long)
        if self._long_in_a_row > SKIPS_PER_TASK_MAX:
            raise ConfigError(
                f"none of {self._long_in_a_row} tasks in a row can be done: {TOO_LONG}; choose "
                "smaller task settings, or a model with a longer context"
            )

    async def scored(
        self, made: Sequence[tuple[Wanted, Outcome]], clock: Stopwatch
    ) -> list[BatchGroup]:
        clock.lap("generate")
        self._node.enter("scoring")
        texts = [[_said(its.request.prompt, c) for c in got.completions] for its, got in made]
        verdicts = await self._node.verifier.score([its.assigned.task for its, _ in made], texts)
        clock.lap("score")
        found = []
        for (its, got), each in zip(made, verdicts, strict=True):
            group = rollout_group(
                self._node, self._policy, self.progress.round + 1, its.assigned, got.completions
            )
            if its.request.temperature is not None:
                group = replace(group, temperature=its.request.temperature)
            count = len(each)
            decided = [at for at, verdict in enumerate(each) if verdict is not None]
            scored = ScoredGroup(
                GroupId(b""), group, its.assigned.prompt, tuple(verdict or 0.0 for verdict in each),
                own=True, decided=len(decided) == count,
                contexts=(its.context,) * count if its.context else (),
            )  # fmt: skip
            prompt = its.request.prompt
            whole = BatchGroup(
                scored,
                prompts=(prompt,) * count if prompt != its.assigned.prompt else (),
                recorded=got.recorded,
                weights=_weights(its, got),
                private=its.private or got.private,
            )
            if decided:
                found.append(whole.only(decided))
        return found

    # --- sharing and drawing ---------------------------------------------------------------

    async def share(self, own: Sequence[BatchGroup], at: View) -> int:
        """Sign and offer groups."""
        if self._config.share != "all":
            return 0
        if self._before_share is not None:
            await self._before_share(self._next_index)
        shared = [
            found for each in own if (found := _shareable(each, self._config.run)) is not None
        ]
        created_at_s = int(self._node.now_s())
        told = self._node.choice.told(len(shared))
        groups = [
            replace(
                each.group,
                created_at_s=created_at_s,
                expires_at_s=created_at_s + self._config.run.limits.record_life_s,
                counters=counters,
            )
            for each, counters in zip(shared, told, strict=True)
        ]
        await self._node.the_exchange.share(
            groups, [each.prompt for each in shared], [each.rewards for each in shared]
        )
        return len(shared)

    async def draw(self, at: View) -> list[ScoredGroup]:
        self._external_wanted = wanted = self.stages.foreign_wanted(
            self._config.external_groups, at
        )
        return await self.take(wanted, at) if wanted else []

    async def take(self, wanted: int, at: View) -> list[ScoredGroup]:
        """At most so many groups of others that have arrived."""
        candidates = await self._node.the_exchange.candidates()
        chosen = await self.stages.draw(candidates, wanted, at)
        taken = distinct(await self._node.the_exchange.take(chosen, at.number))
        return await self._node.guard.trainable(taken)

    # --- evaluating and telling ------------------------------------------------------------

    async def show(self, own: Sequence[BatchGroup], foreign: Sequence[ScoredGroup]) -> None:
        if self._on_samples is not None:
            run, number = self._config.run, self.progress.round + 1
            made = (sampled(run, number, _with_prompt_text(each)) for each in own)
            drawn = (sampled(run, number, each) for each in foreign)
            await self._on_samples([*bounded(made), *bounded(drawn)])

    async def evaluate(self) -> HeldOut:
        """Measure the pass rates, and note that on the held-out tasks in the progress."""
        self._node.enter("evaluating")
        validation = await self._node.guard.validation()
        record = await evaluate(self._node, self._engine, self.progress, validation)
        self._tell_gain(record)
        self.progress = replace(
            self.progress.with_held_out(record.passed), methods=self.stages.to_record()
        )
        return record

    def _tell_gain(self, record: HeldOut) -> None:
        """Tell the methods the gain since the last evaluation; a policy that was rolled back began
        at the best pass rate."""
        if record.validation is None:
            return
        before = self.progress.validated
        since = before.best if before.went_back else before.last
        gain = None if since is None else record.validation - since
        seed = seed_of(self._config.seed, self._node.stream, "external", (record.round,))
        self.stages.evaluated(gain, Random(seed))

    # Long: one record, field by field.
    def _record(self, outcome: RoundOutcome, generated: int) -> RoundDone:
        """The round as this node saw it; `Node.counted` adds the network's figures."""
        own, foreign, report = outcome.own, outcome.foreign, outcome.report
        bare = [each.scored for each in own if each.is_bare]
        hinted = [each.scored for each in own if not each.is_bare]
        rewards = [
            reward
            for each in own
            for place, reward in enumerate(each.scored.rewards)
            if each.prompt_of(place) == each.scored.prompt
        ]
        trained = [*(each.scored for each in own), *foreign]
        completions = [c for each in own for c in each.scored.group.completions]
        ledger = self._node.the_exchange.ledger
        laps = self.staged.clock.laps
        producers = Counter(str(verified.group.producer) for verified in foreign)
        acted = self.stages.acted
        return RoundDone(
            round=self.progress.round,
            policy_version=report.policy_version,
            own_reward=fmean(rewards) if rewards else nan,
            local_groups=len(own),
            external_groups=len(foreign),
            informative_groups=sum(informative(each.rewards) for each in trained),
            foreign_by_producer=dict(sorted(producers.items())),
            groups_shared=outcome.shared,
            rescued_groups=acted.get("rescue", 0),
            generated_tokens=generated,
            hinted_groups=len(hinted),
            hinted_taught=sum(informative(each.rewards) for each in hinted),
            drafted_tokens=acted.get("speculative", 0),
            kept_tokens=sum(len(c.token_ids) - _sampled(c) for c in completions),
            generated_tokens_total=self.progress.generated_tokens,
            trained_tokens_total=self.progress.trained_tokens,
            generate_s=laps["generate"],
            score_s=laps["score"],
            train_s=laps["train"],
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
            own_informative=sum(informative(each.scored.rewards) for each in own),
            answers=outcome_counts(self._config.run, bare),
            weighted_tokens=report.weighted_tokens,
            external_wanted=self._external_wanted,
            foreign_gradient=finite(report.foreign_gradient),
            groups_quantised=sum(each.group.is_quantised for each in trained),
            paused_s=outcome.paused_s,
            acted=acted,
            **lengths(completions),
            **self._mismatch(report),
        )

    def _mismatch(self, report: Any) -> dict[str, float | None]:
        """Figures of engine against trainer, where both have one distribution."""
        return {
            name: finite(value)
            for name, value in figures_of(report).items()
            if self._sampling.is_whole or FIGURES[name][ALWAYS]
        }


def _merged(found: Sequence[BatchGroup], more: Sequence[BatchGroup]) -> list[BatchGroup]:
    """Groups of the same task and attempt as one group, in the order of the first."""
    groups: dict[object, BatchGroup] = {}
    for each in (*found, *more):
        name = each.scored.group.task, each.scored.group.attempt
        groups[name] = groups[name].joined(each) if name in groups else each
    return list(groups.values())
