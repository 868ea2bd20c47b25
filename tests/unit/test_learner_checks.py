"""What a learner finds out about a worker's groups, by a scorer that says what it is told to."""

from dataclasses import replace
from typing import cast

import trio

from node.interfaces.trainer import TrainingGroup
from node.run.claims import Columns, LearnerChecks, noise_between
from node.verify.held_out import HeldOutGuard
from swarm.identity import PeerId
from swarm.rollouts import Completion, FinishReason, RolloutGroup
from tests.unit.tasks_support import ALICE, make_group, make_run
from tests.wire_samples import BOB

TOKENS = 100
CLAIMED = -1.0


class Scores:
    """Each token's log-prob is so much off what is claimed; nothing is known of its spread."""

    def __init__(self, off: float, precision: str = "float32") -> None:
        self.off, self.precision = off, precision

    async def score(self, version: int, group: TrainingGroup) -> Columns:
        await trio.lowlevel.checkpoint()
        unknown = (float("nan"),) * (2 * TOKENS)
        return [(CLAIMED + self.off,) * TOKENS + unknown for _ in group.completions]


def group_of(worker: PeerId, precision: str) -> RolloutGroup:
    said = Completion("x", (1,) * TOKENS, (CLAIMED,) * TOKENS, FinishReason.STOP, 0)
    made = make_group(make_run(), producer=worker)
    return replace(made, completions=(said, said), precision=precision)


async def first_fault(checks: LearnerChecks, group: RolloutGroup, most: int = 200) -> int | None:
    for count in range(1, most + 1):
        if await checks.rescore(group, "?"):
            return count
    return None


NOISE = noise_between("float32", "float32")


def checks_of(off: float, precision: str = "float32") -> LearnerChecks:
    return LearnerChecks(cast("HeldOutGuard", None), Scores(off, precision))


def test_what_no_single_group_shows_many_of_one_worker_do() -> None:
    off = (8 * NOISE) ** 0.5  # a KL of four times the noise

    async def body() -> None:
        checks = checks_of(off)
        found = await first_fault(checks, group_of(ALICE, "float32"))
        assert found is not None
        assert 5 < found < 50
        # another worker begins with nothing against it, and the first is still found out
        assert await first_fault(checks, group_of(BOB.peer_id, "float32"), most=5) is None
        assert await first_fault(checks, group_of(ALICE, "float32"), most=1) == 1
        assert checks.doubts == {}

    trio.run(body)


def test_what_is_within_the_noise_is_let_pass() -> None:
    async def body() -> None:
        checks = checks_of((1.8 * NOISE) ** 0.5)  # nine tenths of it
        assert await first_fault(checks, group_of(ALICE, "float32")) is None
        assert checks.doubts == {}

    trio.run(body)


def test_of_other_precisions_people_are_told_and_nobody_is_refused() -> None:
    """How far honest engines of them are apart depends on the policy and the machine."""

    async def body() -> None:
        for engine, scorer in (("bfloat16", "float32"), ("float32", "bfloat16")):
            noise = noise_between(engine, scorer)
            assert noise > 3e-4
            checks = checks_of(0.0495, scorer)  # more than it, and no single group shows it
            assert await first_fault(checks, group_of(ALICE, engine)) is None
            assert "log-probs are off by more than rounding" in checks.doubts[ALICE]
            honest = checks_of((8 * NOISE) ** 0.5, scorer)
            assert await first_fault(honest, group_of(ALICE, engine)) is None
            assert honest.doubts == {}

    trio.run(body)
