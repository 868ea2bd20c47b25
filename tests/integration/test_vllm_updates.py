"""New weights in the middle of what vLLM samples, and loads that go wrong.

One server serves all tests here. Its worker can be told to fail (`failing_worker`). What weights
say is worked out by a forward pass of transformers, never by vLLM.
"""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from safetensors.torch import load_file, save_file

from node.engines.vllm.engine import VllmEngine
from node.interfaces.engine import Sampling
from swarm.errors import ChildFailed
from swarm.rollouts import Completion, version_spans
from tests.integration.failing_worker import CORRUPT, DIE, FAIL, FORGET, HANG, HANGS
from tests.integration.shared_vllm import (
    CONTEXT_TOKENS,
    SharedVllm,
    check_spans,
    held,
    hold,
    let_go,
    long_models,
    reference,
    shared_vllm,
    use_holding_worker,
)

LONG = Sampling(max_new_tokens=700)
SHORT = Sampling(max_new_tokens=8)
PROMPTS = ("3+4=", "what day is it?", "and tomorrow?")
TIMEOUT_S = 400.0
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.integration]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return long_models(tmp_path_factory.mktemp("models"), 4)


@pytest.fixture(scope="module")
def shared(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedVllm]:
    with pytest.MonkeyPatch.context() as patch:
        use_holding_worker(patch)
        directory = tmp_path_factory.mktemp("shared")
        options = {"context_tokens": CONTEXT_TOKENS, "reference": reference}
        with shared_vllm(directory, models[0], **options) as found:
            yield found


async def check(models: dict[int, Path], groups: list[tuple[Completion, ...]]) -> None:
    """As `check_spans`, while the engine's loop goes on."""
    await trio.to_thread.run_sync(check_spans, models, PROMPTS, groups, LONG)


async def sampled_through(
    engine: VllmEngine, loads: list[tuple[Path, int]]
) -> list[tuple[Completion, ...]]:
    """Long completions, with loads in the middle of them."""
    made: list[tuple[Completion, ...]] = []

    async def generate() -> None:
        made.extend(await engine.generate(PROMPTS, 4, LONG, 7))

    async def drained() -> None:
        while "load" not in engine._holders:  # noqa: ASYNC110  of the engine, which tells nobody
            await trio.sleep(0.01)
        let_go(engine)

    async with trio.open_nursery() as nursery:
        for number, (weights, version) in enumerate(loads):
            hold(engine)  # before anything is sampled: no task of the engine's has run since a load
            if number == 0:
                nursery.start_soon(generate)
            await held(engine)
            if engine._mode == "drain":
                nursery.start_soon(drained)
            await engine.load(weights, version)
    return made


def test_kept_tokens_are_of_the_versions_that_their_spans_name(
    shared: SharedVllm, models: list[Path]
) -> None:
    async def body() -> None:
        engine = await shared.reset()
        made = await sampled_through(engine, [(models[1], 3), (models[2], 4)])
        await check({0: models[0], 3: models[1], 4: models[2]}, made)
        runs = [[version for version, _ in version_spans(c)] for group in made for c in group]
        assert [0, 3, 4] in runs
        assert engine.last_update is not None
        assert 0 < engine.last_update.paused_s < TIMEOUT_S
        assert engine.restarts == 0

    shared.run(body)


@pytest.mark.parametrize(("mode", "version"), [("drain", 0), ("abort", 3)])
def test_a_mode_without_mixed_completions(
    shared: SharedVllm, models: list[Path], mode: str, version: int
) -> None:
    async def body() -> None:
        engine = await shared.reset()
        engine._mode = mode
        try:
            made = await sampled_through(engine, [(models[1], 3)])
        finally:
            engine._mode = "keep"
        assert {version_spans(c)[0][0] for group in made for c in group} == {version}
        assert not any(c.spans for group in made for c in group)
        await check({0: models[0], 3: models[1]}, made)

    shared.run(body)


def test_an_older_version_is_another_line(shared: SharedVllm, models: list[Path]) -> None:
    """Its numbers would say of tokens of the line before that it made them."""

    async def body() -> None:
        engine = await shared.reset()
        await engine.load(models[1], 5)
        made = await sampled_through(engine, [(models[2], 2)])
        assert {(c.policy_version, c.spans) for group in made for c in group} == {(2, ())}
        await check({2: models[2]}, made)

    shared.run(body)


def test_only_what_changed_is_loaded(
    shared: SharedVllm, models: list[Path], tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(models[0], tmp_path / "changed"))
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] *= 1.5
    save_file(weights, changed / "model.safetensors")

    async def body() -> None:
        engine = await shared.reset()
        await engine.load(changed, 1)
        layer = sum(name.startswith("model.layers.1.") for name in weights)
        assert engine.last_update is not None
        assert (engine.last_update.tensors, engine.last_update.tensors_total) == (
            layer, len(weights)
        )  # fmt: skip
        await engine.load(changed, 2)
        assert engine.last_update.tensors == 0
        made = await engine.generate(PROMPTS, 2, LONG, 7)
        await check({2: changed}, made)

    shared.run(body)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said", "restarts"),
    [
        (FORGET, "log-probs differ from the trainer's by", 0),
        (CORRUPT, "log-probs differ from the trainer's by", 0),
        (FAIL, "no memory for it", 1),
        (DIE, "the vLLM server (lost its engine|broke off|answered)", 1),
        (HANG, "the vLLM server (lost its engine|broke off)", 1),
    ],
)
def test_a_load_that_goes_wrong_is_taken_back(
    shared: SharedVllm, models: list[Path], tmp_path: Path, fault: str, said: str, restarts: int
) -> None:
    """What is under way goes on under the version before, from the tokens that it had. A load that
    hangs is one in which the server is killed, and all that it started."""
    bad = Path(shutil.copytree(models[1], tmp_path / "bad"))
    (bad / fault).touch()

    async def body() -> None:
        engine = await shared.reset()
        before, again = engine.restarts, engine.rolled_back
        made: list[tuple[Completion, ...]] = []

        async def generate() -> None:
            made.extend(await engine.generate(PROMPTS, 4, LONG, 7))

        async def kill() -> None:
            while not (bad / HANGS).exists():  # noqa: ASYNC110  of a process
                await trio.sleep(0.01)
            assert engine.pid is not None
            os.killpg(engine.pid, signal.SIGKILL)

        hold(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await held(engine)
            if fault == HANG:
                nursery.start_soon(kill)
            with pytest.raises(ChildFailed, match=said) as failure:
                await engine.load(bad, 3)
        assert "version 0 serves on" in str(failure.value)
        assert "\n" not in str(failure.value)
        assert (engine.restarts - before, engine.rolled_back - again) == (restarts, 1)
        assert {(c.policy_version, c.spans) for group in made for c in group} == {(0, ())}
        await check({0: models[0]}, made)
        await engine.load(models[1], 3)
        made = await engine.generate(PROMPTS, 2, SHORT, 7)
        await check({3: models[1]}, made)

    shared.run(body)


@pytest.mark.long
def test_a_server_that_dies_after_a_swap_leaves_each_token_its_version(
    shared: SharedVllm, models: list[Path]
) -> None:
    """What it had handed back was the version's before; what it took with it is sampled again."""

    async def body() -> None:
        engine = await shared.reset()
        restarts = engine.restarts
        made: list[tuple[Completion, ...]] = []

        async def generate() -> None:
            made.extend(await engine.generate(PROMPTS, 4, LONG, 7))

        hold(engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await held(engine)
            await engine.load(models[1], 3)
            hold(engine)
            await held(engine)
            assert engine.pid is not None
            os.killpg(engine.pid, signal.SIGKILL)
        assert engine.restarts == restarts + 1
        await check({0: models[0], 3: models[1]}, made)
        runs = [[version for version, _ in version_spans(c)] for group in made for c in group]
        assert [0, 3] in runs
        assert engine.directory == models[1]

    shared.run(body)
