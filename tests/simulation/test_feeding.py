"""A learner and its workers over simulated links: leases, submissions, and what lies about them."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random

import msgpack
import pytest
import trio

from swarm.errors import ChildFailed, ConfigError, Reject, RemoteProtocolError, RequestRefused
from swarm.leases.intake import CHECKS_MAX, STANDBY, Intake, IntakeRules
from swarm.leases.lease_client import Declined, HeldLease, LeaseClient
from swarm.leases.lease_table import Lease, LeaseBook, LeaseRules
from swarm.leases.staleness import Account, StalenessRules
from swarm.peers.connection_gater import ConnectionGater
from swarm.peers.credit import Credited
from swarm.peers.reputation import Ledger
from swarm.rollouts import Completion, FinishReason, RolloutGroup, ScoredGroup, Task
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import SimulatedWorld, deterministic_run, open_world
from swarm.transport.memory.network import MemoryTransport
from swarm.wire import codec
from swarm.wire.messages import SUBMISSION_REPLY_BYTES_MAX, SUBMISSIONS_PROTOCOL, SubmissionReply

RUN_ID = "feeding-1"
LEARNER = 0
RULES = IntakeRules(RUN_ID, 2, "bytes-1", 1.0, 1.0, rescored_share=0.1)
SECRET = bytes(range(32))
LINK = LinkProfile(latency_s=0.05, up_bytes_per_s=1e6, down_bytes_per_s=1e7)
LEASES = LeaseRules(first_groups=4, groups_max=4)
STALENESS = StalenessRules(bound=3, groups_per_step=4, groups_max=8)


def task_at(stream: str, place: int) -> Task:
    return Task("sums", "1", "{}", int(stream[:12], 16), place)


def group_of(
    worker: SimulatedWorld,
    host: int,
    lease: HeldLease,
    place: int,
    version: int,
    *,
    text: str = "7",
) -> RolloutGroup:
    completion = Completion(text, (5, 6), (-0.5, -0.25), FinishReason.STOP, version)
    return RolloutGroup(
        run_id=RUN_ID,
        producer=worker.peer_id(host),
        round=lease.learner_version,
        task=task_at(lease.stream, place),
        completions=(completion,) * RULES.group_size,
        tokenizer=RULES.tokenizer,
        temperature=1.0,
        top_p=1.0,
        created_at_s=1_800_000_000,
        expires_at_s=1_800_000_600,
    )


@dataclass
class ScriptedChecks:
    """Rewards by the text. Texts in `lies` have log-probs that do not fit."""

    takes_s: float = 0.0
    lies: frozenset[str] = frozenset()
    failures: list[Exception] = field(default_factory=list)  # of our own, in this order
    rewarded: int = 0
    rescored: Counter[str] = field(default_factory=Counter)

    async def reward(self, lease: Lease, group: RolloutGroup) -> tuple[str, tuple[float, ...]]:
        await trio.sleep(self.takes_s)
        if self.failures:
            raise self.failures.pop(0)
        if group.task != task_at(lease.stream, group.task.index):
            raise RemoteProtocolError(Reject.UNASSIGNED_TASK, "another task")
        self.rewarded += 1
        return "3 + 4 =", tuple(float(c.text == "7") for c in group.completions)

    async def rescore(self, group: RolloutGroup, prompt: str) -> str | None:
        await trio.lowlevel.checkpoint()
        self.rescored[str(group.producer)] += 1
        text = group.completions[0].text
        return "far off" if text in self.lies else None


@dataclass
class Learner:
    intake: Intake
    gater: ConnectionGater
    checks: ScriptedChecks
    book: LeaseBook


@dataclass
class Scene:
    world: SimulatedWorld
    learner: Learner
    transports: dict[int, MemoryTransport]
    nursery: trio.Nursery

    def source(self, host: int) -> LeaseClient:
        transport = self.transports[host]
        return LeaseClient(
            RUN_ID,
            self.world.peer_id(LEARNER),
            self.world.identities[host],
            transport,
            Ledger(),
            Random(host),
        )

    async def lease(self, host: int, version: int = 0) -> HeldLease:
        lease = await self.source(host).lease(version)
        assert isinstance(lease, HeldLease), lease
        return lease


@asynccontextmanager
async def scene(
    hosts: int = 3, checks: ScriptedChecks | None = None, leases: LeaseRules | None = None
) -> AsyncIterator[Scene]:
    async with open_world(0, hosts, LINK) as world, trio.open_nursery() as nursery:
        transports = {host: world.join(host) for host in range(hosts)}
        gater = ConnectionGater(transports[LEARNER], Ledger())
        book = LeaseBook(
            leases or LeaseRules(first_groups=4, groups_max=4),
            Account(STALENESS),
            RUN_ID,
            SECRET,
            1,
        )
        checks = checks or ScriptedChecks()
        intake = Intake(RULES, book, transports[LEARNER], gater, checks, world.rng("intake"))
        nursery.start_soon(gater.run)
        await nursery.start(intake.run)
        address = transports[LEARNER].addresses()[0]
        for host in range(1, hosts):
            await transports[host].connect(address, timeout_s=5.0)
        yield Scene(world, Learner(intake, gater, checks, book), transports, nursery)
        nursery.cancel_scope.cancel()


def play(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()

    deterministic_run(main, seed=0)


def test_groups_come_in_and_are_consumed_once() -> None:
    async def body() -> None:
        async with scene() as there:
            source, intake = there.source(1), there.learner.intake
            taken: list[ScoredGroup] = []

            async def learn() -> None:
                for version in (1, 2):
                    taken.extend(await intake.take())
                    intake.advance(version)

            there.nursery.start_soon(learn)
            for version in (0, 1):
                lease = await source.lease(version)
                assert isinstance(lease, HeldLease)
                for place in range(lease.groups):
                    group = group_of(there.world, 1, lease, place, version)
                    assert await source.submit(lease, group) == "accepted"
                    assert await source.submit(lease, group) == "accepted"  # and counted once
            await trio.sleep(1.0)
            assert len(taken) == 8
            assert len({each.group_id for each in taken}) == 8
            assert all(each.rewards == (1.0, 1.0) for each in taken)
            counts = intake.counts()
            assert (counts.consumed, counts.buffered, counts.leased) == (8, 0, 0)
            assert counts.consumed_by_staleness == {0: 8}
            assert there.learner.checks.rewarded == 8
            account = intake._gater.ledger.account(taken[0].group.producer)
            assert (account.accepted, account.trained) == (8, 8)
            told = intake._gater.ledger.credit.told_to(taken[0].group.producer)
            mine = source._ledger.credit
            mine.hear(source.learner, told)  # as a hello brings it
            mine.hear(source.learner, told)
            assert mine.session == Credited(groups=8, peers=1)

    play(body)


def test_credits_push_back_before_anything_is_thrown_away() -> None:
    async def body() -> None:
        async with scene() as there:
            for host in (1, 2):
                await there.lease(host)
            declined = await there.source(1).lease(0)
            assert isinstance(declined, Declined)
            assert declined.reason == "no_credit"
            assert there.learner.intake.counts().discarded == {}

    play(body)


@pytest.mark.parametrize(
    ("completions", "tokens", "is_taken"), [(4, 3, True), (2, 3, False), (4, 4, False)]
)
def test_a_lease_says_how_many_completions_and_how_long(completions, tokens, is_taken) -> None:
    async def body() -> None:
        async with scene() as there:
            source, intake = there.source(1), there.learner.intake
            intake.book.terms = (4, 3)
            lease = await source.lease(0)
            assert isinstance(lease, HeldLease)
            assert (lease.width, lease.limit) == (4, 3)
            group = group_of(there.world, 1, lease, 0, 0)
            first = replace(
                group.completions[0], token_ids=(5,) * tokens, logprobs=(-1.0,) * tokens
            )
            made = replace(group, completions=(first,) * completions)
            intake.book.terms = (0, 0)  # leases that are out keep their terms
            assert (await source.submit(lease, made) == "accepted") is is_taken
            known = there.learner.gater.ledger.rejected
            assert known[Reject.MALFORMED] == (0 if is_taken else known.total())

    play(body)


def test_a_wide_group_of_a_lease_that_a_restart_forgot_is_no_fault() -> None:
    async def body() -> None:
        async with scene() as there:
            there.learner.intake.book.terms = (4, 0)
            source = there.source(1)
            lease = await there.lease(1)
            made = group_of(there.world, 1, lease, 0, 0)
            wide = replace(made, completions=made.completions * 2)
            forgotten = replace(lease, id=bytes(16))
            assert await source.submit(forgotten, wide) == "refused"
            assert source.verdicts == {"unknown_lease": 1}
            assert there.learner.gater.ledger.rejected.total() == 0

    play(body)


@dataclass(frozen=True)
class Lie:
    """What a worker does with an honest group, what it hears, and what is held against it."""

    change: Callable[[RolloutGroup], RolloutGroup]
    reason: str | None  # None: refused as an offence, by the transport
    against: Reject | None = None


LIES = {
    "another task": Lie(
        lambda g: replace(g, task=replace(g.task, seed=g.task.seed + 1)),
        "faulty",
        Reject.UNASSIGNED_TASK,
    ),
    "a place that the lease does not have": Lie(
        lambda g: replace(g, task=replace(g.task, index=4)), "not_assigned"
    ),
    "a version from the future": Lie(
        lambda g: replace(
            g, completions=tuple(replace(c, policy_version=9) for c in g.completions)
        ),
        "unknown_version",
    ),
    "another run": Lie(lambda g: replace(g, run_id="other"), None, Reject.WRONG_RUN),
    "one completion less": Lie(
        lambda g: replace(g, completions=g.completions[:1]), None, Reject.MALFORMED
    ),
    "no tokens": Lie(
        lambda g: replace(
            g,
            completions=(replace(g.completions[0], token_ids=(), logprobs=()), *g.completions[1:]),
        ),
        None,
        Reject.MALFORMED,
    ),
    "another tokenizer": Lie(lambda g: replace(g, tokenizer="x"), None, Reject.MALFORMED),
    "another temperature": Lie(lambda g: replace(g, temperature=0.5), None, Reject.MALFORMED),
    "log-probs of another policy": Lie(
        lambda g: replace(g, completions=tuple(replace(c, text="lie") for c in g.completions)),
        "faulty",
        Reject.FALSE_LOGPROBS,
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_by_name(name: str) -> None:
    lie = LIES[name]

    async def body() -> None:
        async with scene(checks=ScriptedChecks(lies=frozenset({"lie"}))) as there:
            source, lease = there.source(1), await there.lease(1)
            group = lie.change(group_of(there.world, 1, lease, 0, 0))
            payload = codec.encode(codec.submission(lease.id, group, there.world.identities[1])[1])
            learner = there.world.peer_id(LEARNER)

            async def ask() -> bytes:
                return await there.transports[1].request(
                    learner,
                    SUBMISSIONS_PROTOCOL,
                    payload,
                    timeout_s=5.0,
                    response_bytes_max=SUBMISSION_REPLY_BYTES_MAX,
                )

            if lie.reason is None:
                with pytest.raises(RequestRefused):
                    await ask()
            else:
                answer = codec.decode(await ask(), SubmissionReply, SUBMISSION_REPLY_BYTES_MAX)
                assert (answer.verdict, answer.reason) == ("refused", lie.reason)
            rejected = there.learner.gater.ledger.account(there.world.peer_id(1)).rejected
            assert dict(rejected) == ({} if lie.against is None else {lie.against: 1})
            assert there.learner.intake.counts().buffered == 0
            # what is left of the lease is still good for an honest group
            honest = group_of(there.world, 1, lease, 1, 0)
            assert await source.submit(lease, honest) == "accepted"

    play(body)


def test_who_is_turned_away_does_not_insist() -> None:
    async def body() -> None:
        async with scene() as there:
            source, lease = there.source(1), await there.lease(1)
            group = replace(group_of(there.world, 1, lease, 0, 0), tokenizer="another")
            assert await source.submit(lease, group) is None
            assert source.verdicts == {"turned_away": 1}
            assert not there.learner.gater.is_banned(there.world.peer_id(1))

    play(body)


def test_a_learner_that_does_not_serve_yet_has_no_work_yet() -> None:
    async def body() -> None:
        async with scene() as there:
            await there.transports[1].connect(there.transports[2].addresses()[0], timeout_s=5.0)
            source = there.source(1)
            source.learner = there.world.peer_id(2)  # which serves no leases
            declined = await source.lease(0)
            assert isinstance(declined, Declined)
            assert declined.reason == "the learner has no work to give yet"
            assert declined.retry_s > 0.0

    play(body)


def test_nobody_hands_in_for_another() -> None:
    async def body() -> None:
        async with scene() as there:
            lease = await there.lease(1)
            thief = there.source(2)
            group = group_of(there.world, 2, lease, 0, 0)
            assert await thief.submit(lease, group) == "refused"
            assert thief.verdicts == {"other_worker": 1}

    play(body)


def test_what_comes_late_is_answered() -> None:
    async def body() -> None:
        async with scene(
            leases=LeaseRules(first_groups=4, groups_max=4, first_s=5.0, life_s_min=5.0)
        ) as there:
            source, lease = there.source(1), await there.lease(1)
            await trio.sleep(20.0)
            assert there.learner.intake.counts().leased == 0
            assert there.learner.intake.counts().discarded == {"expired": 4}
            assert await source.submit(lease, group_of(there.world, 1, lease, 0, 0)) == "refused"
            assert source.verdicts == {"late": 1}

    play(body)


def test_who_stands_by_gets_nothing_until_it_is_wanted() -> None:
    async def body() -> None:
        async with scene() as there:
            there.learner.intake.standby = frozenset({str(there.world.peer_id(1))})
            declined = await there.source(1).lease(0)
            assert isinstance(declined, Declined)
            assert declined.reason == STANDBY
            await there.lease(2)

    play(body)


def test_good_standing_means_fewer_closer_looks() -> None:
    async def body() -> None:
        async with scene() as there:
            source, intake = there.source(1), there.learner.intake
            looks = []
            for version in range(60):
                lease = await source.lease(version)
                assert isinstance(lease, HeldLease)
                for place in range(lease.groups):
                    group = group_of(there.world, 1, lease, place, version)
                    assert await source.submit(lease, group) == "accepted"
                while intake.counts().buffered < 4:
                    more = await source.lease(version)
                    assert isinstance(more, HeldLease)
                    for place in range(more.groups):
                        group = group_of(there.world, 1, more, place, version)
                        await source.submit(more, group)
                await intake.take()
                intake.advance(version + 1)
                looks.append(there.learner.checks.rescored.total())
            first, last = looks[3], looks[-1] - looks[-21]
            assert first >= 4  # of the first sixteen
            assert 2 <= last <= 20  # of the last eighty
            assert intake.counts().discarded == {}

    play(body)


def test_an_intake_goes_on_from_its_record() -> None:
    async def body() -> None:
        async with scene() as there:
            source, lease = there.source(1), await there.lease(1)
            groups = [group_of(there.world, 1, lease, place, 0) for place in range(4)]
            for group in groups[:3]:
                assert await source.submit(lease, group) == "accepted"
            intake = there.learner.intake
            record = msgpack.unpackb(msgpack.packb(intake.to_record()), strict_map_key=False)
            assert await source.submit(lease, groups[3]) == "accepted"
            await intake.take()
            intake.advance(1)
            # the learner falls back to the record: what came after it is to be handed in again
            book = LeaseBook.from_record(
                record["book"],
                rules=there.learner.book.rules,
                staleness_rules=STALENESS,
                run_id=RUN_ID,
                secret=SECRET,
                start=2,
                now=trio.current_time(),
            )
            intake.restore(book, record)
            counts = intake.counts()
            assert (intake.version, counts.buffered, counts.leased) == (0, 3, 1)
            assert await source.submit(lease, groups[3]) == "accepted"
            taken = await intake.take()
            assert [each.group for each in taken] == groups

    play(body)


def test_a_fault_of_our_own_costs_nobody_the_group() -> None:
    async def body() -> None:
        failures = [ChildFailed("a verifier process ended"), ConfigError("no such environment")]
        async with scene(checks=ScriptedChecks(failures=list(failures))) as there:
            source, lease = there.source(1), await there.lease(1)
            assert await source.submit(lease, group_of(there.world, 1, lease, 0, 0)) == "accepted"
            intake = there.learner.intake
            assert (intake.check_failures, intake.last_check_failure) == (2, str(failures[1]))
            assert intake.counts().discarded == {}
            assert not there.learner.gater.ledger.account(there.world.peer_id(1)).rejected

    play(body)


def test_a_group_that_is_never_looked_at_is_refused_and_nobody_blamed() -> None:
    """It would else be handed in until the lease of an honest worker runs out."""

    async def body() -> None:
        failures: list[Exception] = [ChildFailed("a verifier process ended")] * 100
        async with scene(checks=ScriptedChecks(failures=failures)) as there:
            source, lease = there.source(1), await there.lease(1)
            assert await source.submit(lease, group_of(there.world, 1, lease, 0, 0)) == "refused"
            intake = there.learner.intake
            assert intake.check_failures == CHECKS_MAX
            assert intake.faulty == 0
            assert not there.learner.gater.ledger.account(there.world.peer_id(1)).rejected

    play(body)


def test_one_group_of_a_task_is_looked_at_at_a_time() -> None:
    async def body() -> None:
        async with scene(checks=ScriptedChecks(takes_s=5.0)) as there:
            lease = await there.lease(1)
            verdicts: list[object] = []

            async def hand_in(place: int, text: str) -> None:
                group = group_of(there.world, 1, lease, place, 0, text=text)
                verdicts.append(await there.source(1).submit(lease, group))

            async with trio.open_nursery() as nursery:
                for text in "0123456789":
                    nursery.start_soon(hand_in, 0, text)
                nursery.start_soon(hand_in, 1, "7")
            assert Counter(verdicts) == {"accepted": 2, "refused": 9}
            assert there.learner.checks.rewarded == 2

    play(body)
