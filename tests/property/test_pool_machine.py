"""The pool against a model that keeps the same rules with lists."""

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.errors import LocalProtocolError
from swarm.exchange.pool import AddResult, Pool, PoolLimits
from swarm.rollouts import GroupId
from tests.pool_samples import CREATED_AT_S, PRODUCERS, make_group

OWN = 0
LIMITS = PoolLimits(groups_max=6, groups_per_producer_max=3, tombstones_max=1000, rounds_max=4)
ROUNDS = (0, 1, 2, 5, 6, 1)  # by index, in order of creation: in the end it was set back

SAMPLES = {
    (producer, index, variant): make_group(
        producer,
        index,
        variant=variant,
        round_=ROUNDS[index],
        created_at_s=CREATED_AT_S + index,
        expires_at_s=CREATED_AT_S + 50 + 13 * index,
    )
    for producer in range(len(PRODUCERS))
    for index in range(6)
    for variant in range(2)
}


@dataclass
class Row:
    """One group in the model."""

    producer: int
    index: int
    expires_at_s: int
    trained: bool = False


class PoolMachine(RuleBasedStateMachine):
    """Rows are in order of arrival; `tasks` and `trained` remember for ever, `newest` as long as
    a producer has any group here."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.path = Path(self.directory.name) / "pool.sqlite"
        self.pool = Pool(self.path, LIMITS)
        self.now_s = float(CREATED_AT_S)
        self.rows: dict[GroupId, Row] = {}
        self.tasks: dict[tuple[int, int], GroupId] = {}
        self.trained: dict[GroupId, int] = {}
        self.newest: dict[int, int] = {}  # by producer

    def teardown(self) -> None:
        self.pool.close()
        self.directory.cleanup()

    @rule()
    def reopen(self) -> None:
        self.pool.close()
        self.pool = Pool(self.path, LIMITS)
        self.newest.clear()  # now it is the newest one that is still here
        for row in self.rows.values():
            self.newest[row.producer] = max(row.index, self.newest.get(row.producer, -1))
        for each, row in list(self.rows.items()):
            if ROUNDS[row.index] <= ROUNDS[self.newest[row.producer]] - LIMITS.rounds_max:
                del self.rows[each]

    @rule(keys=st.lists(st.sampled_from(sorted(SAMPLES)), max_size=4), own=st.booleans())
    def add(self, keys: list[tuple[int, int, int]], own: bool) -> None:
        keys = [key for key in keys if (key[0] == OWN) is own]
        self.drop_expired()
        expected = [self.expected_add(key, SAMPLES[key][1].group_id) for key in keys]
        groups = [SAMPLES[key] for key in keys]
        assert self.pool.add_all(groups, own=own, now_s=self.now_s) == expected

    def expected_add(self, key: tuple[int, int, int], group_id: GroupId) -> AddResult:
        producer, index, _ = key
        if group_id in self.tasks.values():
            return AddResult.KNOWN
        if (producer, index) in self.tasks:
            return AddResult.DUPLICATE_TASK
        newest = self.newest_index(producer, -1)
        if index < newest and ROUNDS[index] <= ROUNDS[newest] - LIMITS.rounds_max:
            return AddResult.TOO_OLD
        mine = [each for each, row in self.rows.items() if row.producer == producer]
        if len(mine) >= LIMITS.groups_per_producer_max:
            gone = [each for each in mine if self.rows[each].trained]
            del self.rows[(gone or mine)[0]]
        if len(self.rows) >= LIMITS.groups_max:
            del self.rows[self.first_to_go()]
        expires_at_s = SAMPLES[key][1].group.expires_at_s
        self.rows[group_id] = Row(producer, index, expires_at_s)
        self.tasks[producer, index] = group_id
        self.newest[producer] = max(index, self.newest_index(producer, index))
        oldest = ROUNDS[self.newest[producer]] - LIMITS.rounds_max
        for each, row in list(self.rows.items()):
            if row.producer == producer and ROUNDS[row.index] <= oldest:
                del self.rows[each]
        return AddResult.ADDED

    def newest_index(self, producer: int, new: int) -> int:
        """Of a producer's groups in a row; what is not here any more counts while others are."""
        if not any(r.producer == producer and r.index != new for r in self.rows.values()):
            self.newest.pop(producer, None)
        return self.newest.get(producer, -1)

    def first_to_go(self) -> GroupId:
        for group_id, row in self.rows.items():
            if row.trained:
                return group_id
        foreign = [row.producer for row in self.rows.values() if row.producer != OWN]
        # max takes the first of equals: the producer whose oldest group is the oldest
        largest = max(foreign, key=foreign.count) if foreign else OWN
        return next(each for each, row in self.rows.items() if row.producer == largest)

    def drop_expired(self) -> int:
        gone = [each for each, row in self.rows.items() if row.expires_at_s <= self.now_s]
        for each in gone:
            del self.rows[each]
        return len(gone)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), round_number=st.integers(0, 3))
    def mark(self, data: st.DataObject, round_number: int) -> None:
        choice = st.lists(st.sampled_from(sorted(self.tasks.values())), max_size=3, unique=True)
        ids = data.draw(choice)
        if any(self.trained.get(each, round_number) != round_number for each in ids):
            try:
                self.pool.mark_trained(ids, round_number)
            except LocalProtocolError:
                return
            raise AssertionError("a group was marked for two rounds")
        self.pool.mark_trained(ids, round_number)
        for each in ids:
            self.trained[each] = round_number
            if each in self.rows:
                self.rows[each].trained = True

    @rule(seconds=st.integers(0, 30))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def expire(self) -> None:
        assert self.pool.expire(self.now_s) == self.drop_expired()

    @invariant()
    def bounds_hold(self) -> None:
        statistics = self.pool.statistics()
        assert statistics.groups <= LIMITS.groups_max
        shares = statistics.by_producer.values()
        assert all(0 < share <= LIMITS.groups_per_producer_max for share in shares)
        assert statistics.groups == sum(shares) == statistics.own + statistics.foreign

    @invariant()
    def the_pool_holds_what_the_model_holds(self) -> None:
        all_ids = [verified.group_id for _, verified in SAMPLES.values()]
        assert self.pool.held(all_ids, -math.inf) == set(self.rows)
        assert self.pool.ids_seen(all_ids) == set(self.tasks.values())
        for own in (False, True):
            expected = sorted(
                each
                for each, row in self.rows.items()
                if (row.producer == OWN) is own
                and not row.trained
                and row.expires_at_s > self.now_s
            )
            found = self.pool.eligible(own=own, now_s=self.now_s)
            assert [each.group_id for each in found] == expected


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, database=None
)
TestPoolMachine = PoolMachine.TestCase
