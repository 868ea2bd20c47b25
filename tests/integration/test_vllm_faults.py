"""What goes wrong around a vLLM server: it comes back by itself, or says why not in one line."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import trio

from node.engines.vllm import server as vllm_server
from node.engines.vllm.concurrency import LIMIT_FIRST
from node.engines.vllm.engine import VllmEngine, make_vllm
from node.engines.vllm.server import ServerSettings
from node.interfaces.engine import Sampling
from swarm.errors import ChildFailed, ConfigError
from tests.integration.shared_vllm import held, hold, use_holding_worker
from tests.integration.vllm_models import VLLM_TIMEOUT_S, model_directory, open_model
from tests.support import run
from tests.unit.training_support import open_policy, reference_logprobs

CONTEXT_TOKENS = 512
SETTINGS = ServerSettings(threads=1, context_tokens=CONTEXT_TOKENS)
LONG = Sampling(max_new_tokens=400)
PROMPTS = tuple(f"{number}+1=" for number in range(12))
LOGPROB_ERROR_MAX = 2e-3
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.integration]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "model", 1, stops=False, context_tokens=CONTEXT_TOKENS)


def group_of(engine: VllmEngine) -> None:
    """Kill the server and all that it started."""
    assert engine.pid is not None
    os.killpg(engine.pid, signal.SIGKILL)


def core_of(engine: VllmEngine) -> None:
    """Kill the process that computes, and leave the one that answers."""
    [server] = psutil.Process(engine.pid).children()
    core = max(server.children(), key=lambda child: child.memory_info().rss)
    core.kill()


async def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  of processes, which tell nobody
        await trio.sleep(0.01)


def test_a_server_killed_at_any_time_comes_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it starts, and while it samples: all is sampled, as if nothing had happened."""
    use_holding_worker(monkeypatch)
    told: list[str] = []

    async def tell(text: str) -> None:
        told.append(text)

    async def body() -> None:
        engine = await make_vllm(model, tmp_path / "data", SETTINGS, tell=tell)
        pids: list[int] = []
        spawn = trio.lowlevel.open_process

        async def noted(*args: object, **options: object) -> trio.Process:
            process = await spawn(*args, **options)  # type: ignore[arg-type, unused-ignore]
            pids.append(process.pid)
            return process

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trio.lowlevel, "open_process", noted)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.start)
                await wait_until(lambda: bool(pids))
                await wait_until(lambda: bool(psutil.Process(pids[0]).children()))
                os.killpg(pids[0], signal.SIGKILL)
        try:
            assert len(pids) == 2
            calm = await engine.generate(PROMPTS, 2, LONG, 7)
            for number, kill in enumerate((group_of, core_of), 1):
                made: list[object] = []

                async def generate(made: list[object] = made) -> None:
                    made += await engine.generate(PROMPTS, 2, LONG, 7)

                hold(engine)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(generate)
                    await held(engine)
                    kill(engine)
                assert engine.restarts == len(told) == number
                assert f"started again ({number} so far)" in told[-1]
                assert [[c.token_ids for c in group] for group in made] == [
                    [c.token_ids for c in group] for group in calm
                ]
        finally:
            await engine.close()

    run(body, timeout_s=VLLM_TIMEOUT_S)


def test_more_than_the_cache_holds_is_finished_all_the_same(model: Path, tmp_path: Path) -> None:
    """A completion that is thrown out of the cache goes on where it was, with the same log-probs;
    and less is let in."""

    async def body() -> list[object]:
        engine = await make_vllm(model, tmp_path / "data", SETTINGS)
        token = 2 * 4 * 2 * 32  # keys and values, bytes, layers, width
        engine._settings = replace(engine._settings, cache_bytes=4 * CONTEXT_TOKENS * token)
        try:
            await engine.start()
            made: list[object] = []
            for _ in range(3):
                made = await engine.generate(PROMPTS, 4, LONG, 7)
            assert engine._server is not None
            load = await engine._server.load()
            assert load is not None
            assert load.preempted_total > 0
            assert 0 < load.cache_tokens <= 4 * CONTEXT_TOKENS
            assert engine.flow.preempted > 0
            assert engine.flow.limit < LIMIT_FIRST
            assert engine.restarts == 0
        finally:
            await engine.close()
        return made

    made = run(body, timeout_s=VLLM_TIMEOUT_S)
    policy = open_policy(model)
    for prompt, group in list(zip(PROMPTS, made, strict=True))[::4]:
        for completion in group:
            said = reference_logprobs(policy, prompt, completion, LONG)
            assert completion.logprobs == pytest.approx(said, abs=LOGPROB_ERROR_MAX)


def cut_weights(model: Path, _: pytest.MonkeyPatch) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def no_weights(model: Path, _: pytest.MonkeyPatch) -> None:
    (model / "model.safetensors").unlink()


def spoilt_config(model: Path, _: pytest.MonkeyPatch) -> None:
    (model / "config.json").write_text("{")


def spoilt_tokenizer(model: Path, _: pytest.MonkeyPatch) -> None:
    (model / "tokenizer.json").write_text("{}")


def taken_socket(model: Path, patch: pytest.MonkeyPatch) -> None:
    taken = model / "api.sock"
    taken.mkdir()
    patch.setattr(vllm_server, "SOCKET_NAME", str(taken))


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (cut_weights, ChildFailed, "model.safetensors"),
        (no_weights, ChildFailed, "no safetensors file"),
        (spoilt_config, ConfigError, "config.json: .*line 1"),
        (spoilt_tokenizer, ConfigError, "tokenizer.json"),
        (taken_socket, ChildFailed, "ended while starting: .*api.sock|in use|directory"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    kind: type[Exception],
    said: str,
) -> None:
    spoil(model, monkeypatch)

    async def body() -> None:
        with pytest.raises(kind, match=said) as failure:
            async with open_model(model, tmp_path / "data", threads=1):
                pass
        assert "\n" not in str(failure.value)

    run(body, timeout_s=VLLM_TIMEOUT_S)
