"""What a worker without work says of it, and that it leaves its machine alone when asked to."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import trio

from node.run.rollout_worker import IN_WORDS, NOTE_AFTER_S, IdleNote, RolloutWorker
from swarm.leases.intake import STANDBY
from swarm.leases.lease_client import Declined
from swarm.leases.staleness import Denial
from tests.support import run


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
