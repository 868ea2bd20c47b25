"""The process that a learner scores samples with."""

import pytest
import trio

from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.run.claims import Scorer
from swarm.rollouts import Completion, FinishReason
from tests.support import run
from tests.unit.training_support import qwen_directory

pytestmark = pytest.mark.integration

ANSWER = Completion("2", (50,), (-1.0,), FinishReason.LENGTH, 1)


def test_who_runs_out_of_time_leaves_a_scorer_that_is_ready(tmp_path):
    """Else one that takes longer to start than a submission may wait would never be there."""
    model = qwen_directory(tmp_path / "v00000001")
    group = TrainingGroup("1+1=", (ANSWER,), (1.0,), own_tokens=True)

    async def body():
        spec = TrainerSpec(str(model), device="cpu", threads=1)
        async with Scorer.open(spec, tmp_path, lambda version: model) as scorer:
            with trio.move_on_after(0.1) as scope:
                await scorer.score(1, group)
            assert scope.cancelled_caught
            assert scorer._process.alive
            assert scorer._loaded == 1
            columns = await scorer.score(1, group)
            assert columns is not None
            assert len(columns[0]) == 3  # of its one token: log-prob, mean, variance

    run(body)
