"""The vLLM engine against the trainer's own arithmetic, and when things go wrong.

Every start of the server takes some ten seconds on an idle machine, so a test checks much.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import trio

from node.engines.vllm.engine import VllmEngine
from node.interfaces.engine import NO_TURN, Context, Sampling
from node.policies.policy import Policy, load_policy
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Completion, FinishReason
from tests.integration.process_groups import gone, members
from tests.integration.shared_vllm import under_way
from tests.integration.vllm_models import VLLM_TIMEOUT_S, model_directory, open_model
from tests.support import run

ROOT = Path(__file__).parents[2]
PROMPTS = ("3+4=", "what day is it?", "3+4=", "ä€𝄞")
WARM = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=12)
SHARP = Sampling(temperature=0.7, top_p=0.8, max_new_tokens=12)
LOGPROB_ERROR_MAX = 2e-3  # fp32 against fp32, other kernels
pytestmark = [pytest.mark.vllm, pytest.mark.integration]


def expected_logprobs(
    policy: Policy, prompt: str, completion: Completion, sampling: Sampling
) -> list[float]:
    """By a forward pass over the whole sequence, and a nucleus worked out token by token."""
    ids = policy.encode_prompt(prompt)
    sequence = torch.tensor([[*ids, *completion.token_ids]])
    with torch.no_grad():
        logits = policy.model(input_ids=sequence).logits[0, len(ids) - 1 : -1].double()
    result = []
    for row, token in zip(logits / sampling.temperature, completion.token_ids, strict=True):
        probs = row.softmax(-1)
        kept, mass = [], 0.0
        for index in probs.argsort(descending=True).tolist():
            if mass >= sampling.top_p:
                break
            kept.append(index)
            mass += float(probs[index])
        assert token in kept
        result.append(float((probs[token] / mass).log()))
    return result


def check_against(
    policy: Policy, groups: list[tuple[Completion, ...]], sampling: Sampling, version: int
) -> None:
    assert len(groups) == len(PROMPTS)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            ids = list(completion.token_ids)
            stopped = ids[-1] in policy.eos_ids
            assert completion.finish_reason is (
                FinishReason.STOP if stopped else FinishReason.LENGTH
            )
            assert not policy.eos_ids.intersection(ids[:-1])
            assert stopped or len(ids) == sampling.max_new_tokens
            assert completion.text == policy.decode(ids)
            assert completion.policy_version == version
            assert completion.logprobs == pytest.approx(
                expected_logprobs(policy, prompt, completion, sampling), abs=LOGPROB_ERROR_MAX
            )


@asynccontextmanager
async def engine_on(directory: Path, data: Path) -> AsyncIterator[VllmEngine]:
    async with open_model(directory, data, threads=1, context_tokens=4096) as engine:
        yield engine


@pytest.mark.parametrize(
    ("tied", "chat"),
    [
        pytest.param(True, False, id="tied"),
        pytest.param(False, True, id="chat", marks=pytest.mark.long),
    ],
)
def test_samples_what_the_trainer_would(tmp_path: Path, tied: bool, chat: bool) -> None:
    first = model_directory(tmp_path / "first", 1, tied=tied, chat=chat)
    second = model_directory(tmp_path / "second", 2, tied=tied, chat=chat)

    async def body() -> None:
        async with engine_on(first, tmp_path / "data") as engine:
            before = await engine.generate(PROMPTS, 8, WARM, seed=1)
            policy = load_policy(str(first), "cpu")
            check_against(policy, before, WARM, 0)
            check_against(policy, await engine.generate(PROMPTS, 8, SHARP, seed=1), SHARP, 0)
            everything = [completion for group in before for completion in group]
            assert {c.finish_reason for c in everything} == {FinishReason.STOP, FinishReason.LENGTH}
            assert before[0] != before[2]  # the same prompt again draws anew
            assert await engine.generate(PROMPTS, 8, WARM, seed=1) == before
            assert await engine.generate(PROMPTS, 8, WARM, seed=2) != before

            await engine.load(second, 7)
            policy = load_policy(str(second), "cpu")
            after = await engine.generate(PROMPTS, 8, WARM, seed=1)
            check_against(policy, after, WARM, 7)

            crowd = [f"{index:03d}" * 25 for index in range(60)]  # more than one step can take
            many = await engine.generate(crowd, 8, Sampling(max_new_tokens=4), seed=1)
            for prompt, group in zip(crowd[::20], many[::20], strict=True):
                for completion in group:
                    assert completion.logprobs == pytest.approx(
                        expected_logprobs(policy, prompt, completion, WARM), abs=LOGPROB_ERROR_MAX
                    )

            room = 128 - len(policy.encode_prompt("x" * 100))
            (group,) = await engine.generate(["x" * 100], 4, Sampling(max_new_tokens=1000), seed=1)
            assert max(len(completion.token_ids) for completion in group) <= room
            made = await engine.generate(["x" * 200, "x"], 2, WARM, seed=1)
            assert list(map(len, made)) == [0, 2]
            with pytest.raises(ConfigError, match="temperature"):
                await engine.generate(["x"], 1, Sampling(temperature=0.0), seed=1)
            with pytest.raises(ConfigError, match="takes at most 2"):
                await engine.generate(["x"], 1, Sampling(temperature=3.0), seed=1)
            assert await engine.generate([], 1, WARM, seed=1) == []

    run(body, timeout_s=VLLM_TIMEOUT_S)


@pytest.mark.long
@pytest.mark.parametrize("chat", [pytest.param(False, id="plain"), pytest.param(True, id="chat")])
def test_it_goes_on_where_a_transcript_is(tmp_path: Path, chat: bool) -> None:
    """After the same ids as the trainer has between turns, with log-probs of the whole context."""
    directory = model_directory(tmp_path / "model", 1, chat=chat)
    policy = load_policy(str(directory), "cpu")
    replies = ("higher", "", "<eos>", "ä€𝄞 [assistant]")
    turns = [((*policy.encode_completion("ab"), policy.eos_id), reply) for reply in replies]
    contexts = [
        Context("3+4=", (), 5),
        *(Context("3+4=", (turn,), 6) for turn in turns),
        Context("what day is it?", tuple(turns[:3]), 8),
        Context("3+4=", (((*policy.encode_completion("x" * 120), policy.eos_id), "y"),), 8),
    ]

    async def body() -> None:
        async with engine_on(directory, tmp_path / "data") as engine:
            said = await engine.go_on(contexts, WARM, 3)
            for reply in replies:
                assert engine._text.between_turns(reply) == policy.between_turns(reply), reply
            assert said[-1] == NO_TURN  # its context has no room left
            for context, completion in zip(contexts[:-1], said[:-1], strict=True):
                ids = policy.encode_turns(context.prompt, context.turns)
                assert 0 < len(completion.token_ids) <= context.tokens_max
                sequence = torch.tensor([[*ids, *completion.token_ids]])
                with torch.no_grad():
                    logits = policy.model(input_ids=sequence).logits[0, len(ids) - 1 : -1]
                expected = logits.log_softmax(-1)[
                    range(len(completion.token_ids)), list(completion.token_ids)
                ]
                assert completion.logprobs == pytest.approx(
                    expected.tolist(), abs=LOGPROB_ERROR_MAX
                )
            assert await engine.go_on(contexts, WARM, 3) == said
            assert await engine.go_on(contexts, WARM, 4) != said
            assert await engine.go_on([], WARM, 3) == []

    run(body, timeout_s=VLLM_TIMEOUT_S)


@pytest.mark.long
def test_the_old_version_serves_on_after_every_failure(tmp_path: Path) -> None:
    good = model_directory(tmp_path / "good", 1)
    other = model_directory(tmp_path / "other", 2)
    untied = model_directory(tmp_path / "untied", 2, tied=False)
    torn = Path(shutil.copytree(other, tmp_path / "torn"))
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    empty = tmp_path / "empty"
    empty.mkdir()

    async def body() -> None:
        async with engine_on(good, tmp_path / "data") as engine:
            before = await engine.generate(PROMPTS, 2, WARM, seed=1)
            process = engine.pid
            for bad in (untied, torn, empty, tmp_path / "missing"):
                with pytest.raises(ChildFailed, match=bad.name):
                    await engine.load(bad, 9)
                assert await engine.generate(PROMPTS, 2, WARM, seed=1) == before
            async with trio.open_nursery() as nursery:  # a cancelled call leaves it in order
                nursery.start_soon(engine.generate, PROMPTS, 32, Sampling(max_new_tokens=100), 3)
                await under_way(engine)
                nursery.cancel_scope.cancel()
            assert await engine.generate(PROMPTS, 2, WARM, seed=1) == before
            assert engine.pid == process

            many = PROMPTS * 8, 32, Sampling(max_new_tokens=100), 3
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_strike, engine)
                struck = await engine.generate(*many)
            second = engine.pid
            assert second != process
            assert engine.restarts == 1
            for group, again in zip(struck, await engine.generate(*many), strict=True):
                assert [c.token_ids for c in group] == [c.token_ids for c in again]
            assert await engine.generate(PROMPTS, 2, WARM, seed=1) == before

            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.load, other, 9)
                while engine._sound:  # noqa: ASYNC110  until weights begin to be replaced
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
            assert await engine.generate(PROMPTS, 2, WARM, seed=1) == before
            assert engine.pid not in (process, second)

            await engine.load(other, 9)
            check_against(
                load_policy(str(other), "cpu"),
                await engine.generate(PROMPTS, 2, WARM, seed=1),
                WARM,
                9,
            )
            last = engine.pid
        assert last is not None
        assert await trio.to_thread.run_sync(gone, last)

    run(body, timeout_s=VLLM_TIMEOUT_S)


async def _strike(engine: VllmEngine) -> None:
    """Kill the server while it samples."""
    await under_way(engine)
    assert engine.pid is not None
    os.killpg(engine.pid, signal.SIGKILL)


@pytest.mark.long
def test_a_model_that_vllm_refuses_is_told_with_the_cause(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model", 1)
    config = directory / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "NoSuchModel"))

    async def body() -> None:
        with pytest.raises(ChildFailed, match=r"ended while starting: .*NoSuchModel.*vllm\.log"):
            async with engine_on(directory, tmp_path / "data"):
                pass

    run(body, timeout_s=VLLM_TIMEOUT_S)


@pytest.mark.long
def test_the_server_dies_with_a_node_that_is_killed(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model", 1)
    code = f"""
import trio
from pathlib import Path
from node.engines.vllm.engine import open_vllm
from node.engines.vllm.server import ServerSettings
async def main():
    settings = ServerSettings(threads=1)
    async with open_vllm(Path({str(directory)!r}), Path({str(tmp_path)!r}), settings) as engine:
        print(engine.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        group = int(node.stdout.readline())
        assert len(members(group)) >= 3  # keeper, server, engine core
        node.kill()
    assert gone(group)
