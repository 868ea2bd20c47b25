"""Tasks taken by what is known of them: reports that merge in any order, liars that move little."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from node.config import NodeConfig, RunConfig
from node.config.run import CommonRules, EnvironmentSpec
from node.engines.scripted import ScriptedPolicy
from node.interfaces.engine import Sampling
from node.interfaces.prompts import Prompt
from node.methods.task_control import SharedMap, SuccessCounts, TriesReport, Vade, information
from node.observe.records import RoundDone
from node.run.node import ELSEWHERE
from node.simulation.simulated_nodes import build
from node.simulation.simulated_nodes import run as run_simulated
from node.verify.assignment import (
    ENVIRONMENT_BUCKETS,
    bucket_of,
    common_task,
    is_bucket,
    is_common,
    next_task,
)
from node.verify.task_choice import TOLD_EACH_MAX, TaskChoice
from swarm.identity import PeerId
from swarm.rollouts import Completion, RolloutGroup, Task
from swarm.simulation.links import LinkProfile
from swarm.simulation.world import deterministic_run, open_world
from tests.unit.tasks_support import ALICE, make_run

TWO = (
    {"name": "scripted_sum", "parameters": {"max": 9}},
    {"name": "scripted_sum", "parameters": {"max": 99}},
)
BUCKET = ENVIRONMENT_BUCKETS
FOR_EVER = 2**40


def report(
    producer: str,
    tries: int,
    successes: int,
    *,
    at_s: int = 0,
    round_: int = 0,
    bucket: int = BUCKET,
    voice: str = "",
    expires_at_s: int = FOR_EVER,
) -> TriesReport:
    return TriesReport(
        at_s, round_, producer, bucket, tries, successes, expires_at_s, voice or producer
    )


def rate(counts: SuccessCounts) -> float:
    return counts.right / (counts.right + counts.wrong)


# --- merging ---------------------------------------------------------------------------------

VOICES = {"a": "one", "b": "one", "c": "two", "d": "d"}
REPORTS = st.lists(
    st.builds(
        lambda producer, *a, **more: report(producer, *a, voice=VOICES[producer], **more),
        st.sampled_from("abcd"),
        st.integers(0, 40),
        st.just(0),
        at_s=st.integers(0, 3),
        round_=st.integers(0, 3),
        bucket=st.integers(0, 5),
    ),
    max_size=40,
)


@given(
    REPORTS,
    st.randoms(use_true_random=False),
    st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4)),
)
@settings(max_examples=300)
def test_reports_merge_in_any_order_and_twice_even_where_the_map_is_full(
    reports: list[TriesReport], random: Random, most: tuple[int, int, int]
) -> None:
    one, other = SharedMap(*most), SharedMap(*most)
    one.receive(reports)
    again = [*reports, *reports]
    random.shuffle(again)
    for each in again:
        other.receive([each])
    assert one == other
    assert len(one) == len(other) <= most[0]


def test_a_map_knows_another_from_itself() -> None:
    one, other = SharedMap(), SharedMap()
    one.receive([report("a", 8, 3)])
    other.receive([report("a", 8, 4)])
    assert one != other


def test_the_newest_report_of_a_producer_counts_and_the_oldest_ones_leave() -> None:
    map_ = SharedMap(reports_max=2)
    map_.receive(
        [report("a", 16, 0, at_s=5, voice="one"), report("a", 16, 16, at_s=4, voice="one")]
    )
    assert map_.of(BUCKET, 16) == SuccessCounts(0.0, 16.0)
    map_.receive(report(each, 16, 16, at_s=9, voice="one") for each in "bc")
    assert len(map_) == 2
    assert map_.of(BUCKET, 16) == SuccessCounts(16.0, 0.0)  # a's is gone


def test_a_full_map_gives_up_what_the_voice_with_most_has() -> None:
    map_ = SharedMap(reports_max=16, per_voice_max=10, per_producer_max=5)
    map_.receive([report("honest", 8, 4, at_s=1, voice="honest")])
    for key in range(100):
        voice = f"block-{key % 4}"
        map_.receive([report(f"key-{key}", 8, 8, at_s=9, bucket=b, voice=voice) for b in range(5)])
    assert len(map_) == 16
    assert map_.voice_of("honest") == "honest"


def test_who_dates_reports_ahead_has_them_no_longer_than_others() -> None:
    run = make_run(*TWO)
    choice = TaskChoice(run, Vade(), now_s=lambda: 1_000.0)
    task, _ = next_task(run, ALICE, 0)
    for producer, at_s in (("honest", 900), ("liar", 1_120)):
        group = RolloutGroup(
            run.run_id, PeerId(producer), 1, task, (), "t", 1.0, 1.0, at_s, 2_000,
            counters=((bucket_of(run, task), 8, 2),),
        )  # fmt: skip
        choice.receive(group)
    dates = [each.created_at_s for each in choice.others._buckets[bucket_of(run, task)].values()]
    assert sorted(dates) == [900, 1_000]


def test_many_keys_of_one_voice_push_nobody_elses_reports_out() -> None:
    map_ = SharedMap(reports_max=40, per_voice_max=10, per_producer_max=5)
    map_.receive([report("honest", 8, 4, voice="honest")])
    for key in range(100):
        of_key = [report(f"key-{key}", 8, 8, at_s=9, bucket=b, voice="block") for b in range(5)]
        map_.receive(of_key)
    assert len(map_) == 11
    assert map_.voice_of("honest") == "honest"
    assert map_.of(BUCKET, 16) == SuccessCounts(4.0, 4.0)


def test_within_a_voice_no_producer_shouts_others_down() -> None:
    map_ = SharedMap()
    said = [report(f"n-{n}", 32, 8, voice="elsewhere") for n in range(3)]
    map_.receive([*said, report("liar", 2**31, 2**31, voice="elsewhere")])
    assert rate(map_.of(BUCKET, 16)) == 0.25


def test_reports_expire_with_their_groups() -> None:
    map_ = SharedMap()
    map_.receive([report("a", 8, 8, expires_at_s=10), report("b", 8, 0, expires_at_s=11)])
    map_.expire(10)
    assert map_.of(BUCKET, 16) == SuccessCounts(0.0, 8.0)
    map_.expire(11)
    assert len(map_) == 0
    assert map_.of(BUCKET, 16) == SuccessCounts()


# --- liars -----------------------------------------------------------------------------------


def honest(count: int, rng: Random) -> list[TriesReport]:
    """Each with 32 tries of its own at a task that a third of the tries solves."""
    return [
        report(f"honest-{n}", 32, sum(rng.random() < 1 / 3 for _ in range(32)))
        for n in range(count)
    ]


@pytest.mark.parametrize("lie", [0, 2**31])
def test_what_a_minority_of_liars_moves_stays_within_what_honest_nodes_say(lie: int) -> None:
    for seed in range(20):
        said = honest(11, Random(seed))
        rates = [each.successes / each.tries for each in said]
        for liars in range(11):
            map_ = SharedMap()
            map_.receive([*said, *(report(f"liar-{n}", 2**31, lie) for n in range(liars))])
            assert min(rates) <= rate(map_.of(BUCKET, 16)) <= max(rates)


def test_one_peer_moves_less_than_honest_nodes_differ() -> None:
    moved = []
    for seed in range(50):
        plain, lied = SharedMap(), SharedMap()
        plain.receive(honest(10, Random(seed)))
        lied.receive([*honest(10, Random(seed)), report("liar", 2**31, 2**31)])
        moved.append(abs(rate(lied.of(BUCKET, 16)) - rate(plain.of(BUCKET, 16))))
    assert fmean(moved) < 0.03  # a mean of all tries would have moved to 1


def test_ten_keys_of_one_block_are_one_voice() -> None:
    block, strangers = SharedMap(), SharedMap()
    said = honest(7, Random(1))
    ten = [report(f"liar-{n}", 64, 64) for n in range(10)]
    block.receive([*said, *(replace(each, voice="10.1.2.0/24") for each in ten)])
    strangers.receive([*said, *ten])
    rates = [each.successes / each.tries for each in said]
    assert min(rates) <= rate(block.of(BUCKET, 16)) <= max(rates)
    assert rate(strangers.of(BUCKET, 16)) == 1.0  # the control: ten of seventeen


@pytest.mark.parametrize(("voices", "tries"), [(3, 4), (15, 1)])
def test_who_states_many_tries_is_one_voice_among_those_who_have_few(
    voices: int, tries: int
) -> None:
    map_ = SharedMap()
    map_.receive(report(f"honest-{n}", tries, tries) for n in range(voices))
    map_.receive([report("liar", 2**16 - 1, 0)])
    assert map_.of(BUCKET, 16) == SuccessCounts(min(16.0, float((voices + 1) * tries)), 0.0)


@pytest.mark.parametrize("liars", [1, 10, 1000])
def test_all_liars_together_bring_no_more_than_others_may(liars: int) -> None:
    run = make_run(*TWO)
    choice = TaskChoice(run, Vade(others_max=16.0))
    task, _ = next_task(run, ALICE, 0)
    bucket = bucket_of(run, task)
    choice.others.receive(report(f"liar-{n}", 64, 64, bucket=bucket) for n in range(liars))
    believed = []
    for _ in range(8):  # rounds in which the node itself finds 8 of 32 right
        believed.append(rate(choice.belief(task)))
        choice.learn([(task, [1.0, 1.0, *[0.0] * 6])] * 4)
    assert believed[0] == 1.0
    assert believed[1] == pytest.approx((8 + 16) / (32 + 16))
    assert believed[-1] < 0.25 + 0.07


def test_whose_share_is_nothing_is_not_heard() -> None:
    map_ = SharedMap()
    map_.receive([report("a", 8, 8)])
    assert map_.of(BUCKET, 0.0) == SuccessCounts(0.0, 0.0)


# --- choosing --------------------------------------------------------------------------------


def test_buckets_are_environments_and_common_tasks() -> None:
    run = make_run(*TWO, common={"tasks": 8, "share": 0.25})
    for index in range(64):
        task, _ = next_task(run, ALICE, index)
        bucket = bucket_of(run, task)
        assert is_bucket(run, bucket)
        if bucket < ENVIRONMENT_BUCKETS:
            assert common_task(run, bucket) == task
        else:
            spec = run.environments[bucket - ENVIRONMENT_BUCKETS]
            assert (task.environment, task.parameters) == (spec.name, spec.parameters)
    assert not is_bucket(run, 8)
    assert not is_bucket(run, ENVIRONMENT_BUCKETS + 2)
    assert not is_bucket(make_run(*TWO), 0)  # nothing is common


def due_of(run: RunConfig, count: int) -> list[tuple[Task, int]]:
    return [next_task(run, ALICE, index) for index in range(count)]


def test_tasks_that_promise_most_are_taken_in_their_order() -> None:
    run = make_run(*TWO)
    choice = TaskChoice(run, Vade())
    easy, hard = run.environments
    due = due_of(run, 32)
    of_easy = next(task for task, _ in due if task.parameters == easy.parameters)
    of_hard = next(task for task, _ in due if task.parameters == hard.parameters)
    choice.learn([(of_easy, [1.0] * 8)] * 8 + [(of_hard, [1.0, 0.0, 0.0])] * 8)
    taken = choice.choose(due, 8, Random(1))
    assert [task.parameters for task, _ in taken] == [hard.parameters] * 8
    assert [due.index(each) for each in taken] == sorted(due.index(each) for each in taken)
    plain = TaskChoice(run, None)
    plain.learn([(of_easy, [1.0] * 8)])
    assert plain.ahead == 1
    assert plain.choose(due[:8], 8, Random(1)) == due[:8]


def test_a_common_task_that_nobody_did_is_as_hard_as_its_environment() -> None:
    run = make_run(*TWO, common={"tasks": 64, "share": 0.5})
    choice = TaskChoice(run, Vade())
    easy, hard = run.environments
    by_parameters = {easy.parameters: 1, hard.parameters: 0}
    for task, _ in due_of(run, 40):
        if not is_common(run, task):
            choice.learn([(task, [float(by_parameters[task.parameters])] * 8)])
    for number in range(64):
        task = common_task(run, number)
        counts = choice.belief(task)
        assert counts.right + counts.wrong == pytest.approx(8.0)
        assert rate(counts) == by_parameters[task.parameters]
    task = common_task(run, 0)
    choice.learn([(task, [1.0] * 16 + [0.0] * 16)])  # then its own results count more
    assert 0.3 < rate(choice.belief(task)) < 0.7
    alone = TaskChoice(run, Vade(prior_max=0.0))
    alone.learn([(due_of(run, 1)[0][0], [1.0] * 8)])
    assert alone.belief(common_task(run, 5)) == SuccessCounts()


def test_the_same_seed_takes_the_same_tasks_and_another_one_others() -> None:
    run = make_run(*TWO)
    due = due_of(run, 64)
    taken = [TaskChoice(run, Vade()).choose(due, 8, Random(seed)) for seed in (1, 1, 2)]
    assert taken[0] == taken[1] != taken[2]


def test_a_round_tells_each_bucket_once_and_those_with_the_newest_results() -> None:
    run = make_run(*TWO, common={"tasks": 100, "share": 1.0})
    choice = TaskChoice(run, None)
    for number in range(100):
        choice.learn([(common_task(run, number), [1.0, 1.0, 0.0, 0.0])])
    told = choice.told(2)
    assert [len(each) for each in told] == [TOLD_EACH_MAX] * 2
    every = [each for counters in told for each in counters]
    common = {bucket for bucket, _, _ in every if bucket < ENVIRONMENT_BUCKETS}
    assert common == set(range(100 - len(common), 100))
    assert len(every) == len({bucket for bucket, _, _ in every}) == 2 * TOLD_EACH_MAX
    assert all(counters == tuple(sorted(counters)) for counters in told)
    assert all(tries > 0 and successes <= tries for _, tries, successes in every)
    assert TaskChoice(make_run(*TWO), None).told(2) == [(), ()]
    assert choice.told(0) == []


# --- on nodes --------------------------------------------------------------------------------

RUN = RunConfig.model_validate(
    {
        "name": "unlike",
        "environments": list(TWO),
        "sampling": {"max_new_tokens": 4},
        "held_out": {"tasks": 4},
    }
)
CONFIG = NodeConfig(
    run=RUN, local_groups=8, external_groups=2, group_size=8, rounds=12, evaluate_every_rounds=0
)


class Unlike(ScriptedPolicy):
    """Solves all sums that begin with a small number and a third of the others; learns nothing."""

    async def generate(
        self, prompts: Sequence[str], completions_each: int, sampling: Sampling, seed: int
    ) -> list[tuple[Completion, ...]]:
        made = []
        for at, prompt in enumerate(prompts):
            self.skill = 1.0 if int(Prompt.read(prompt).question.partition("+")[0]) < 10 else 1 / 3
            made += await super().generate([prompt], completions_each, sampling, seed + at)
        return made


def lives(configs: Sequence[NodeConfig], late_s: float = 0.0) -> list[list[RoundDone]]:
    """The rounds of each node; the last one comes late."""
    records: list[list[RoundDone]] = [[] for _ in configs]

    async def body() -> None:
        link = LinkProfile(latency_s=0.02)
        async with open_world(1, len(configs), link) as world, trio.open_nursery() as nursery:
            over = trio.Semaphore(0)
            first: list[str] = []

            async def live(host: int) -> None:
                node = build(world, host, configs[host], first)
                first.extend(() if first else node.transport.addresses())

                async def keep(record: object) -> None:
                    if isinstance(record, RoundDone):
                        records[host].append(record)
                        if record.round == configs[host].rounds:
                            over.release()

                policy = Unlike(generate_s=0.1)
                await run_simulated(node, policy, policy, keep)

            for host in range(len(configs)):
                if host == len(configs) - 1:
                    await trio.sleep(late_s)
                nursery.start_soon(live, host)
                await trio.sleep(0.1)
            for _ in configs:
                await over.acquire()
            nursery.cancel_scope.cancel()

    deterministic_run(body, seed=1)
    return records


def informative_share(records: Sequence[RoundDone]) -> float:
    return sum(r.own_informative or 0 for r in records) / sum(r.local_groups for r in records)


def changed(**values: object) -> NodeConfig:
    return CONFIG.model_copy(update=values)


def test_a_node_that_chooses_has_more_groups_that_teach() -> None:
    silo = {"external_groups": 0, "share": "none"}
    (as_they_come,) = lives([changed(**silo)])
    (chosen,) = lives([changed(**silo, control=Vade())])
    assert informative_share(as_they_come) < 0.6
    assert informative_share(chosen[4:]) > 0.8


def test_a_newcomer_begins_with_what_others_found_out() -> None:
    one = EnvironmentSpec(name="scripted_sum", parameters='{"max":19}')  # half of it is easy
    common = CommonRules(tasks=64, share=1.0)
    run = RUN.model_copy(update={"common": common, "environments": (one,)})

    def newcomer(others_max: float) -> float:
        control = Vade(others_max=others_max)
        old = changed(run=run, control=Vade(), rounds=40)
        new = changed(run=run, control=control, rounds=4)  # meets each task for the first time
        _, records = lives([old, new], late_s=15.0)
        return informative_share(records[1:])  # its first round begins before any group has come

    assert newcomer(16.0) > newcomer(0.0) + 0.1


def test_counters_of_buckets_that_the_run_has_not_are_passed_over() -> None:
    run = make_run(*TWO)
    choice = TaskChoice(run, Vade())
    task, _ = next_task(run, ALICE, 0)
    group = RolloutGroup(
        run.run_id, PeerId(ALICE), 1, task, (), "t", 1.0, 1.0, 0, 100,
        counters=((3, 8, 8), (bucket_of(run, task), 8, 2), (ENVIRONMENT_BUCKETS + 9, 8, 8)),
    )  # fmt: skip
    choice.receive(group)
    assert len(choice.others) == 1
    assert choice.belief(task) == SuccessCounts(2.0, 6.0)
    deaf = TaskChoice(run, None)
    deaf.receive(group)
    assert len(deaf.others) == 0


def test_promise_is_largest_where_a_third_is_right() -> None:
    assert max((information(p / 99), p / 99) for p in range(100))[1] == pytest.approx(1 / 3)


def test_producers_that_are_not_connected_have_one_voice_together() -> None:
    """Whoever has ten keys and lets one peer serve their groups is not ten voices."""
    voices: list[str] = []

    async def body() -> None:
        link = LinkProfile(latency_s=0.02)
        async with open_world(1, 1, link) as world:
            node = build(world, 0, CONFIG).node
            voices.extend(node._voice_of(PeerId(f"{ALICE[:-1]}{letter}")) for letter in "abc")

    deterministic_run(body, seed=1)
    assert set(voices) == {ELSEWHERE}
