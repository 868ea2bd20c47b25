"""The loop of a rollout worker: lease, generate, submit.

Submissions go on while the next batch is generated. A new version of the policy may replace the old
one between two tokens; each completion names the versions of its tokens.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final

import trio

from node.config.node import rules_of
from node.interfaces.engine import Sampling, Serving
from node.observe.records import WorkDone
from node.run.groups import rollout_group
from node.run.parts import NodeParts
from node.run.turns import Player, completions
from node.verify.held_out import TOO_LONG
from swarm.leases.intake import STANDBY
from swarm.leases.lease_client import Declined, HeldLease, LeaseClient
from swarm.leases.staleness import Denial
from swarm.rollouts import RolloutGroup

SUBMISSIONS_MAX = 64  # submissions under way; beyond them generation waits
NOTE_AFTER_S: Final = 5.0  # without work before a note: short waits are usual

IN_WORDS: Final[Mapping[str, str]] = {
    Denial.NO_CREDIT: "the learner has as many groups as it can use for now",
    Denial.TRIAL_FULL: "the learner gives little work to workers that have delivered nothing yet; "
    "others have it now, and this one's turn comes",
    Denial.WOULD_BE_STALE: "begun with this policy it would come too late; the next one is awaited",
    Denial.UNKNOWN_VERSION: "the learner does not know the policy version that is here",
    Denial.LEASES_OPEN: "the learner waits for groups that this worker took on before",
    Denial.WORKERS_FULL: "the learner has as many workers as it takes",
    STANDBY: "its coordinator has this worker stand by",
}
"""Reasons of a learner that gives no work; others are shown as the learner gives them."""

OnWork = Callable[[WorkDone], Awaitable[None]]
Rest = Callable[[Callable[[str], None]], Awaitable[None]]
"""Waits until the machine may be used, and says why it waits."""


class IdleNote:
    """A note on a worker without work, once that has lasted `NOTE_AFTER_S`. Pure."""

    def __init__(self) -> None:
        self._worked_s: float | None = None
        self._batches = 0

    def poll(self, waiting_for: str | None, batches: int, now_s: float) -> str | None:
        """The note; None: none is due. `batches`: done by now."""
        if waiting_for is None or batches != self._batches or self._worked_s is None:
            self._worked_s, self._batches = now_s, batches
        if waiting_for is None or now_s - self._worked_s < NOTE_AFTER_S:
            return None
        return f"no work: {waiting_for}"


class RolloutWorker:
    """The worker's loop. Restarts keep nothing: what was leased and not handed in expires."""

    def __init__(
        self, node: NodeParts, source: LeaseClient, on_work: OnWork, rest: Rest | None = None
    ) -> None:
        self._node = node
        self._source = source
        self._on_work = on_work
        self._rest = rest
        self._places = trio.Semaphore(SUBMISSIONS_MAX)
        self.waiting_for: str | None = "the learner's first policy has not come"
        self.batches = 0
        self.tokens = 0

    async def run(self, serving: Serving) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                waited_from_s = trio.current_time()
                if self._rest is not None:
                    await self._rest(self._wait_for)
                lease = await self._source.lease(serving.version())
                if isinstance(lease, Declined):
                    self.waiting_for = IN_WORDS.get(lease.reason, lease.reason)
                    await trio.sleep(lease.retry_s)
                    continue
                self.waiting_for = None
                wait_s = trio.current_time() - waited_from_s
                await self._work(lease, serving, nursery, wait_s)

    def _wait_for(self, why: str) -> None:
        self.waiting_for = why

    async def _work(
        self, lease: HeldLease, serving: Serving, nursery: trio.Nursery, wait_s: float
    ) -> None:
        started_s = trio.current_time()
        assigned = await self._node.guard.leased(lease.stream, range(lease.groups))
        most = self._node.config.run.limits.group_size_max
        seed = int.from_bytes(hashlib.sha256(b"swarm/lease-seed/1\x00" + lease.id).digest()[:7])
        made = await completions(
            Player(self._node.config.run, serving.engine, self._node.guard.verifier),
            assigned,
            min(lease.width, most) or rules_of(self._node.config).group_size,
            self._sampling(lease),
            seed,
        )
        generate_s = trio.current_time() - started_s
        for assignment, samples in zip(assigned, made, strict=True):
            if not samples:
                self._node.guard.leave_out(assignment, TOO_LONG)
                continue
            group = rollout_group(self._node, serving, lease.learner_version, assignment, samples)
            await self._places.acquire()
            nursery.start_soon(self._submit, lease, group)
        tokens = sum(len(each.token_ids) for group in made for each in group)
        self.batches += 1
        self.tokens += tokens
        await self._on_work(
            WorkDone(
                batch=self.batches,
                policy_version=serving.version(),
                learner_version=self._source.learner_version,
                groups=sum(map(bool, made)),
                generated_tokens=tokens,
                generated_tokens_total=self.tokens,
                generate_s=generate_s,
                wait_s=wait_s,
                verdicts_total=dict(sorted(self._source.verdicts.items())),
            )
        )
        if (tokens_per_s_max := self._node.config.tokens_per_s_max) is not None:
            self.waiting_for = "its tokens a second are used up (--tokens-per-s-max)"
            await trio.sleep_until(started_s + tokens / tokens_per_s_max)

    def _sampling(self, lease: HeldLease) -> Sampling:
        """The run's sampling, with the lease's own limit, which is not above the run's."""
        found = self._node.config.run.engine_sampling
        most = min(lease.limit or found.max_new_tokens, found.max_new_tokens)
        return replace(found, max_new_tokens=most)

    async def _submit(self, lease: HeldLease, group: RolloutGroup) -> None:
        try:
            await self._source.submit(lease, group)
        finally:
            self._places.release()
