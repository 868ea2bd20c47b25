"""A trainer and vLLM on one GPU: memory that goes to and fro, and weights that are lent."""

from pathlib import Path

import pytest
import torch

from node.engines.vllm import probe
from node.engines.vllm.server import is_cpu_build
from node.interfaces.engine import Sampling
from swarm.rollouts import Completion
from tests.integration.hand_over_cases import PROMPTS, trainer_and_engine
from tests.integration.vllm_models import model_directory
from tests.support import run
from tests.unit.training_support import open_policy, reference_logprobs

SHORT = Sampling(max_new_tokens=24)
SHARE = 0.3  # of the GPU's memory, for the engine
GIVEN_BACK = 0.6  # of that share, at least, while it sleeps
TIMEOUT_S = 900.0
pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.integration]


@pytest.fixture(autouse=True)
def for_gpus() -> None:
    if is_cpu_build():
        pytest.skip("vLLM is installed in its build for CPUs")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("models")
    return [
        model_directory(directory / f"v{n}", n, stops=False, context_tokens=1024) for n in range(4)
    ]


def distance(directory: Path, made: list[tuple[Completion, ...]]) -> float:
    """Mean of |delta log p| of sampled tokens, from what a policy says of them in fp32: of the
    engine's steps of single tokens, which its own probe does not take."""
    policy = open_policy(directory)
    apart = [
        abs(ours - theirs)
        for prompt, group in zip(PROMPTS, made, strict=True)
        for completion in group
        for ours, theirs in zip(
            completion.logprobs, reference_logprobs(policy, prompt, completion, SHORT), strict=True
        )
    ]
    return sum(apart) / len(apart)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def test_rounds_of_sleeping_and_lending(models: list[Path], tmp_path: Path) -> None:
    """The engine's own probe compares each version with the trainer. Its memory is the trainer's
    while this trains, and its own again afterwards."""

    async def body() -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        async with trainer_and_engine(
            models[0], tmp_path, device="cuda", gpu_memory_share=SHARE
        ) as pair:
            for version, directory in enumerate([*models[1:], *models[:3]], 1):
                awake = free_bytes()
                await pair.hand_over.before_training()
                assert free_bytes() - awake > GIVEN_BACK * SHARE * total
                await pair.learn(directory)
                update = pair.engine.last_update
                assert update is not None
                assert (update.policy_version, update.lent) == (version, True)
                assert update.probe is not None
                assert abs(free_bytes() - awake) < 0.05 * total
                made = await pair.engine.generate(PROMPTS, 4, SHORT, version)
                assert {c.policy_version for group in made for c in group} == {version}
                assert distance(directory, made) < probe.BF16.mean
                other = models[(models.index(directory) + 1) % len(models)]
                assert distance(other, made) > 2 * probe.BF16.mean
            assert (pair.engine.restarts, pair.engine.rolled_back, pair.told) == (0, 0, [])

    run(body, timeout_s=TIMEOUT_S)


def test_weights_are_lent_to_an_engine_that_is_awake(models: list[Path], tmp_path: Path) -> None:
    """In the middle of completions, which go on under them."""

    async def body() -> None:
        async with trainer_and_engine(
            models[0], tmp_path, device="cuda", gpu_memory_share=SHARE
        ) as pair:
            short = await pair.engine.begin(PROMPTS[:1], 1, SHORT, 1)
            long = await pair.engine.begin(PROMPTS, 2, Sampling(max_new_tokens=700), 3)
            await pair.engine.advance([*short, *long], 1)
            await pair.learn(models[1], sleeping=False)
            assert pair.engine.last_update is not None
            assert pair.engine.last_update.lent
            await pair.engine.advance(long, len(long))
            made = await pair.engine.collect(long)
            assert {c.spans[-1][0] for group in made for c in group if c.spans} == {1}
            assert all(len(c.token_ids) == len(c.logprobs) for group in made for c in group)
            assert pair.told == []

    run(body, timeout_s=TIMEOUT_S)
