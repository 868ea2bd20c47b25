"""vLLM stops in the middle of completions once enough groups are done, and goes on later."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from node.interfaces.engine import Sampling
from swarm.rollouts import FinishReason
from tests.integration.shared_vllm import (
    CONTEXT_TOKENS,
    SharedVllm,
    check_spans,
    long_models,
    shared_vllm,
)

SHORT, LONG = Sampling(max_new_tokens=8), Sampling(max_new_tokens=600)
PROMPTS = tuple(f"{n}+1=" for n in range(6))
pytestmark = [pytest.mark.vllm, pytest.mark.integration]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return long_models(tmp_path_factory.mktemp("models"), 2)


@pytest.fixture(scope="module")
def shared(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedVllm]:
    directory = tmp_path_factory.mktemp("shared")
    with shared_vllm(directory, models[0], context_tokens=CONTEXT_TOKENS) as found:
        yield found


@pytest.mark.long
def test_what_is_interrupted_is_finished_by_the_next_version(
    shared: SharedVllm, models: list[Path]
) -> None:
    async def body() -> None:
        engine = await shared.reset()
        begun = await engine.begin(PROMPTS[:3], 4, LONG, 1)
        begun += await engine.begin(PROMPTS[3:], 4, SHORT, 2)
        assert not any(work.done for work in begun)
        prompt = begun[0].asks()[0].token_ids
        await engine.advance(begun, 3)
        assert [work.done for work in begun] == [False] * 3 + [True] * 3
        assert len(await engine.collect(begun[3:])) == 3
        assert any(len(ask.token_ids) > len(prompt) for ask in begun[0].asks())
        await engine.load(models[1], 1)
        await engine.advance(begun, 6)
        made = await engine.collect(begun)
        assert all(len(group) == 4 for group in made)
        assert not any(c.finish_reason is FinishReason.ABORT for group in made for c in group)
        seen = check_spans(dict(enumerate(models)), PROMPTS, made, LONG)
        assert seen == {0, 1}

    shared.run(body)


@pytest.mark.long
def test_enough_that_is_done_already_samples_nothing(shared: SharedVllm) -> None:
    async def body() -> None:
        engine = await shared.reset()
        works = await engine.begin(PROMPTS[:2], 2, SHORT, 1)
        await engine.advance(works, 0)
        assert not any(work.done for work in works)
        await engine.advance(works, 1)
        assert any(work.done for work in works)
        await engine.advance(works, 2)
        assert [len(group) for group in await engine.collect(works)] == [2, 2]

    shared.run(body)
