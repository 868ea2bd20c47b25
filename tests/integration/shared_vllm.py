"""A vLLM engine that several tests share: to start one takes ten seconds and more.

The engine belongs to a loop in a thread of its own, which outlives the tests; they run their
bodies there.
"""

import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from node.engines.vllm import server
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.probe import LogProbs, Rows
from node.engines.vllm.server import VllmServer
from node.interfaces.engine import Sampling
from node.policies.policy import load_policy
from swarm.rollouts import Completion, version_spans
from tests.integration.failing_worker import HOLD, WAITS
from tests.integration.vllm_models import VLLM_TIMEOUT_S, model_directory, open_model
from tests.unit.training_support import reference_logprobs

TIMEOUT_S = 300.0  # for a body
CONTEXT_TOKENS = 1024  # of policies that sample on for long
LOGPROB_ERROR_MAX = 2e-3  # fp32 against fp32, over completions of hundreds of sharp tokens


def long_models(directory: Path, count: int) -> list[Path]:
    """Policies that sample on for long."""
    return [
        model_directory(directory / f"v{n}", n, stops=False, context_tokens=CONTEXT_TOKENS)
        for n in range(count)
    ]


def _log_probs(directory: Path, rows: Rows) -> LogProbs:
    policy = load_policy(str(directory), "cpu")
    with torch.no_grad():
        logits = policy.model(torch.tensor(rows)).logits[:, :-1].double()
    targets = torch.tensor(rows)[:, 1:, None]
    found: LogProbs = logits.log_softmax(-1).gather(-1, targets).squeeze(-1).tolist()
    return found


async def reference(directory: Path, rows: Rows) -> LogProbs:
    """What weights say of rows of tokens, by a forward pass of transformers."""
    return await trio.to_thread.run_sync(_log_probs, directory, rows)


async def under_way(engine: VllmEngine, asked: int = 1) -> None:
    """Until the server samples so many completions."""
    while True:
        assert engine._server is not None
        load = await engine._server.load()
        if load is not None and load.running >= asked:
            return
        await trio.sleep(0.01)


def check_spans(
    models: Mapping[int, Path],
    prompts: Sequence[str],
    groups: Sequence[Sequence[Completion]],
    sampling: Sampling,
) -> set[int]:
    """Every token's log-prob is that of the version which its completion says made it, by a forward
    pass of transformers. Returns the versions that made some. `models`: by version."""
    policies = {version: load_policy(str(path), "cpu") for version, path in models.items()}
    seen = set()
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            begin = 0
            for version, count in version_spans(completion):
                said = reference_logprobs(policies[version], prompt, completion, sampling)
                part = slice(begin, begin + count)
                assert completion.logprobs[part] == pytest.approx(said[part], abs=LOGPROB_ERROR_MAX)
                begin += count
                seen.add(version)
            assert begin == len(completion.token_ids)
            assert completion.policy_version == version_spans(completion)[0][0]
    return seen


def use_holding_worker(patch: pytest.MonkeyPatch) -> None:
    """Servers started from now on hold what they sample, once they were told to (`hold`), until it
    is interrupted."""
    post = VllmServer.post

    async def post_and_let_go(
        self: VllmServer, route: str, body: dict[str, Any] | None = None
    ) -> bytes:
        answer = await post(self, route, body)
        if route == "/abort_requests":
            (self._scratch / HOLD).unlink(missing_ok=True)
        return answer

    worker = "tests.integration.holding_worker.HoldingExtension"
    patch.setattr(server, "WORKER_EXTENSION", worker)
    patch.setattr(VllmServer, "post", post_and_let_go)


def hold(engine: VllmEngine) -> None:
    """What its server samples from now on gets a few tokens and no more, until it is interrupted or
    `let_go` is called. Needs `use_holding_worker`."""
    assert engine._server is not None
    (engine._server._scratch / HOLD).touch()


def let_go(engine: VllmEngine) -> None:
    """End a `hold`."""
    assert engine._server is not None
    (engine._server._scratch / HOLD).unlink(missing_ok=True)


async def held(engine: VllmEngine) -> None:
    """Until its server is in the middle of completions, and stays there."""
    assert engine._server is not None
    waits = engine._server._scratch / WAITS
    while not waits.exists():  # noqa: ASYNC110  of a process
        await trio.sleep(0.01)


class SharedVllm:
    """An engine and its loop."""

    def __init__(self, engine: VllmEngine, token: trio.lowlevel.TrioToken, first: Path) -> None:
        self.engine = engine
        self._token = token
        self._first = first

    def run(self, async_fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run a test's body on the engine's loop."""

        async def bounded() -> Any:
            with trio.fail_after(TIMEOUT_S):
                return await async_fn(*args)

        return trio.from_thread.run(bounded, trio_token=self._token)

    async def reset(self) -> VllmEngine:
        """The engine with its first weights, as version 0."""
        await self.engine.load(self._first, 0)
        return self.engine


@contextmanager
def shared_vllm(directory: Path, model: Path | None = None, **options: Any) -> Iterator[SharedVllm]:
    """An engine on a model, by default on one that stops at many tokens."""
    first = model or model_directory(directory / "first", 1)
    opened: list[SharedVllm] = []
    failures: list[BaseException] = []
    ready, over = threading.Event(), trio.Event()

    async def serve() -> None:
        with trio.fail_after(VLLM_TIMEOUT_S) as starting:
            async with open_model(first, directory / "data", threads=1, **options) as engine:
                starting.deadline = math.inf
                token = trio.lowlevel.current_trio_token()
                opened.append(SharedVllm(engine, token, engine.directory))
                ready.set()
                await over.wait()

    def live() -> None:
        try:
            trio.run(serve)
        except BaseException as error:  # noqa: BLE001 - told to the thread of the tests
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    ready.wait()
    if failures:
        raise failures[0]
    try:
        yield opened[0]
    finally:
        trio.from_thread.run_sync(over.set, trio_token=opened[0]._token)
        thread.join(TIMEOUT_S)
    assert not failures, failures[0]
