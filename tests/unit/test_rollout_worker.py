"""What a worker without work says of it, and that it leaves its machine alone when asked to."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import trio

from node.config import NodeConfig, RunConfig
from node.engines.scripted import ScriptedPolicy
from node.interfaces.engine import Serving
from node.run.rollout_worker import IN_WORDS, NOTE_AFTER_S, IdleNote, RolloutWorker
from swarm.leases.intake import STANDBY
from swarm.leases.lease_client import Declined, HeldLease
from swarm.leases.staleness import Denial
from swarm.rollouts import RolloutGroup
from tests.support import run
from tests.unit.stages_support import RUN, parts_of
from tests.unit.tasks_support import ALICE


def test_each_reason_of_a_learner_has_words() -> None:
    assert set(IN_WORDS) == {*Denial, STANDBY}
    assert not any("_" in words for words in IN_WORDS.values())


def test_a_worker_that_is_sent_away_for_moments_is_not_told_of() -> None:
    note = IdleNote()
    busy = [note.poll("so" if s % 5 else None, 0, float(s)) for s in range(60)]
    begun = [note.poll("so", s // 4, float(s)) for s in range(60, 120)]  # works between two looks
    assert set(busy + begun) == {None}


def test_a_worker_that_gets_no_work_says_so_until_it_does() -> None:
    note = IdleNote()
    assert note.poll("so", 0, 10.0) is None
    assert note.poll("so", 0, 10.0 + NOTE_AFTER_S - 0.1) is None
    assert note.poll("so", 0, 10.0 + NOTE_AFTER_S) == "no work: so"
    assert note.poll("else", 0, 11.0 + NOTE_AFTER_S) == "no work: else"
    assert note.poll(None, 0, 12.0 + NOTE_AFTER_S) is None
    assert note.poll("so", 0, 13.0 + NOTE_AFTER_S) is None


def test_a_worker_asks_for_no_work_while_its_machine_rests() -> None:
    async def body() -> None:
        asked: list[float] = []
        rests = trio.Event()

        class Source:
            async def lease(self, version: int) -> Declined:
                asked.append(trio.current_time())
                await trio.lowlevel.checkpoint()
                return Declined(STANDBY, 1.0)

        async def rest(tell: Callable[[str], None]) -> None:
            if not rests.is_set():
                tell("paused")
            await rests.wait()

        nothing = cast("Any", None)
        worker = RolloutWorker(nothing, cast("Any", Source()), nothing, rest)
        serving = cast("Any", SimpleNamespace(version=lambda: 1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run, serving)
            await trio.sleep(10)
            assert (asked, worker.waiting_for) == ([], "paused")
            rests.set()
            await trio.sleep(2.5)
            assert len(asked) == 3
            nursery.cancel_scope.cancel()

    run(body, virtual=True)


def test_a_learner_gets_no_more_completions_than_the_run_allows() -> None:
    limits = {"group_size_max": 6}
    learner = {"peer": str(ALICE), "group_size": 4}
    rules = {**RUN.model_dump(exclude={"answer"}), "learner": learner, "limits": limits}
    config = NodeConfig(run=RunConfig.model_validate(rules), group_size=4)
    policy = ScriptedPolicy()
    made: dict[int, int] = {}

    async def body() -> None:
        for width in (0, 5, 64):
            handed = trio.Event()

            class Source:
                learner_version, verdicts = 1, dict[str, int]()

                async def lease(self, version: int) -> HeldLease | Declined:
                    await trio.lowlevel.checkpoint()
                    return HeldLease(bytes(16), 1, "0" * 32, 1, 1e9, width)  # noqa: B023

                async def submit(self, lease: HeldLease, group: RolloutGroup) -> None:
                    await trio.lowlevel.checkpoint()
                    made[lease.width] = len(group.completions)
                    handed.set()  # noqa: B023

            async def on_work(record: object) -> None:
                await trio.lowlevel.checkpoint()

            worker = RolloutWorker(parts_of(config), cast("Any", Source()), on_work)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.run, Serving(policy, "t", lambda: 1))
                await handed.wait()
                nursery.cancel_scope.cancel()

    run(body, virtual=True)
    assert made == {0: 4, 5: 5, 64: 6}
