"""Versions that are adapters: what a rollout worker samples with, and a learner that ships them."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from node.config import NodeConfig, RunConfig
from node.engines.vllm.engine import VllmEngine
from node.hosting.engine_hosts import ReferencePolicy
from node.hosting.policy_host import PolicyHost
from node.interfaces.adapter_files import BASE_FILE, WEIGHTS_FILE
from node.interfaces.engine import Sampling
from node.observe.records import StepDone, VersionCame, WorkDone
from node.policies.policy import Policy
from node.train.trainer_worker import load_version
from swarm.errors import ChildFailed
from swarm.rollouts import Completion, version_spans
from swarm.wire.messages import CHUNKS_PROTOCOL
from tests.integration.failing_worker import CORRUPT
from tests.integration.nodes import WAIT_S, MakeFed, MakeNode
from tests.integration.shared_vllm import held, hold, use_holding_worker
from tests.integration.vllm_models import VLLM_TIMEOUT_S, adapter_directory, model_directory
from tests.support import run
from tests.unit.training_support import open_policy, reference_logprobs

pytestmark = pytest.mark.integration

RUN = RunConfig.model_validate({"name": "host", "environments": [{"name": "scripted_sum"}]})
SHORT, LONG = Sampling(max_new_tokens=4), Sampling(max_new_tokens=300)
SWAPS_MAX = 20  # until one is in the middle of a completion
PROMPT = "1+1=" * 40  # over a block of vLLM's cache, which must not outlive a version
BY_VLLM = [pytest.mark.vllm, pytest.mark.long]  # which takes a minute or two to start on two cores
ENGINES = pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=BY_VLLM)])


def policy_of(model: Path, version: Path) -> Policy:
    policy = open_policy(model)
    load_version(policy, version)
    return policy


def check(made: list[Completion], policies: dict[int, Policy], sampling: Sampling) -> set[int]:
    """Each token has the log-prob that it has under its version; which versions there were."""
    for completion in made:
        begin = 0
        for version, count in version_spans(completion):
            said = reference_logprobs(policies[version], PROMPT, completion, sampling)
            part = slice(begin, begin + count)
            assert completion.logprobs[part] == pytest.approx(said[part], abs=2e-3)
            begin += count
    return {version for completion in made for version, _ in version_spans(completion)}


async def sampled(host: PolicyHost, sampling: Sampling = SHORT, count: int = 2) -> list[Completion]:
    assert host.serving is not None
    [group] = await host.serving.engine.generate([PROMPT], count, sampling, 3)
    return list(group)


async def sampled_through(host: PolicyHost, version: Path, wait_s: float) -> list[Completion]:
    """What is sampled until a version has been swapped in, and the group in which that is over."""
    made: list[Completion] = []
    over = trio.Event()

    async def generate() -> None:
        while not over.is_set():
            made.extend(await sampled(host, LONG, 8))

    assert host._host is not None
    vllm = host._host.engine if isinstance(host._host.engine, VllmEngine) else None
    if vllm is not None:
        hold(vllm)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(generate)
        if vllm is not None:
            await held(vllm)
        await trio.sleep(wait_s)
        await host.load(version)
        over.set()
    return made


@ENGINES
def test_a_worker_takes_adapters_in_the_middle_and_refuses_what_does_not_fit(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_holding_worker(monkeypatch)
    model = model_directory(tmp_path / "base", 1, stops=False, context_tokens=512)
    versions = [adapter_directory(model, tmp_path / f"v0000000{n}", n) for n in (1, 2, 3)]
    damaged = shutil.copytree(versions[2], tmp_path / "damaged" / "v00000003")
    whole = (damaged / WEIGHTS_FILE).read_bytes()
    (damaged / WEIGHTS_FILE).write_bytes(whole[: len(whole) // 2])
    stranger = shutil.copytree(versions[2], tmp_path / "stranger" / "v00000003")
    (stranger / BASE_FILE).write_text(json.dumps({"format": 1, "base": "0" * 64}))
    policies = {n: policy_of(model, path) for n, path in enumerate(versions, start=1)}

    async def body() -> None:
        config = NodeConfig.model_validate(
            {"run": RUN, "data_dir": tmp_path / "data", "threads": 1, "model": str(model)}
            | {"engine": engine}
        )
        host = PolicyHost(config)
        try:
            await host.load(versions[0])
            for attempt in range(SWAPS_MAX):  # how long a generation takes is the machine's affair
                made = await sampled_through(host, versions[1], 0.05 * attempt)
                if any(len(version_spans(each)) == 2 for each in made):
                    break
                assert engine == "torch"  # what vLLM samples is held
                await host.load(versions[0])
            else:
                pytest.fail("no swap was in the middle of a completion")
            made.extend(await sampled(host))
            assert check(made, policies, LONG) == {1, 2}
            assert made[-1].policy_version == 2
            for bad, words in ((damaged, WEIGHTS_FILE), (stranger, "base 000000000000")):
                with pytest.raises(ChildFailed, match=words) as caught:
                    await host.load(bad)
                assert "\n" not in str(caught.value)
                assert check(await sampled(host), policies, SHORT) == {2}
            await host.load(versions[2])
            assert check(await sampled(host), policies, SHORT) == {3}
        finally:
            await host.stop()

    run(body, timeout_s=VLLM_TIMEOUT_S)
    assert not list((tmp_path / "data").glob("policy-*"))


@pytest.mark.vllm
@pytest.mark.long
def test_an_adapter_that_vllm_got_wrong_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "node.engines.vllm.server.WORKER_EXTENSION",
        "tests.integration.failing_worker.FailingExtension",
    )
    model = model_directory(tmp_path / "base", 1, context_tokens=512)
    versions = [adapter_directory(model, tmp_path / f"v0000000{n}", n) for n in (1, 2)]
    policies = {n: policy_of(model, path) for n, path in enumerate(versions, start=1)}
    merge: Callable[..., Any] = ReferencePolicy._merge
    spoils = [False]

    async def merge_spoilt(self: ReferencePolicy, weights: Path, version: int) -> Path:
        made: Path = await merge(self, weights, version)
        if spoils[0]:
            (made / CORRUPT).touch()
        return made

    monkeypatch.setattr(ReferencePolicy, "_merge", merge_spoilt)

    async def body() -> None:
        config = NodeConfig.model_validate(
            {"run": RUN, "data_dir": tmp_path / "data", "threads": 1, "model": str(model)}
            | {"engine": "vllm"}
        )
        host = PolicyHost(config)
        try:
            await host.load(versions[0])
            before = await sampled(host)
            spoils[0] = True
            with pytest.raises(ChildFailed, match="differ from the trainer's"):
                await host.load(versions[1])
            assert host._host is not None
            assert isinstance(host._host.engine, VllmEngine)
            assert host._host.engine.rolled_back == 1
            assert await sampled(host) == before
            assert check(before, policies, SHORT) == {1}
            spoils[0] = False
            os.killpg(host._host.engine.pid, signal.SIGKILL)  # comes up again with what it had
            assert check(await sampled(host), policies, SHORT) == {1}
            await host.load(versions[1])
            assert check(await sampled(host), policies, SHORT) == {2}
        finally:
            await host.stop()

    run(body, timeout_s=VLLM_TIMEOUT_S)


@ENGINES
@pytest.mark.long
def test_a_learner_ships_adapters_and_a_worker_feeds_it(
    engine: str, make_fed: MakeFed, prepared: tuple[Path, Path]
) -> None:
    learner, worker = make_fed("--lora-rank", "4", worker=("--engine", engine))
    wait_s = VLLM_TIMEOUT_S if engine == "vllm" else WAIT_S
    worker.until(lambda: any(each.policy_version >= 4 for each in worker.events(WorkDone)), wait_s)
    learner.until(lambda: len(learner.events(StepDone)) >= 5)
    assert worker.troubles() == []
    assert learner.troubles() == []
    for step in learner.events(StepDone):
        if step.informative_groups and step.staleness_max == 0:
            assert step.mismatch_k3 is not None
            assert step.mismatch_k3 < 1e-6
    status = worker.status()
    assert status is not None
    assert status.precision == "float32"
    came = [each for each in worker.events(VersionCame) if each.failure is None]
    shipped_bytes = status.bytes_by_protocol[CHUNKS_PROTOCOL][0]
    models = (prepared[1] / "policies").glob("*/model.safetensors")
    whole_bytes = min(model.stat().st_size for model in models)
    assert len(came) >= 3
    assert 0 < shipped_bytes / len(came) < whole_bytes / 10
    assert worker.interrupt() == 0
    assert learner.interrupt() == 0
    saved = max((learner.data_dir / "checkpoints").glob("round-*"))
    held_bytes = sum(path.stat().st_size for path in saved.iterdir())
    assert held_bytes < whole_bytes / 2
    steps = len(learner.events(StepDone))
    learner.start()
    assert "resuming after step" in learner.until(lambda: learner.address() and learner.said())
    assert learner.interrupt() == 0
    assert len(learner.events(StepDone)) >= steps


@pytest.mark.vllm
@pytest.mark.long
def test_a_node_trains_an_adapter_and_samples_with_vllm(make_node: MakeNode) -> None:
    flags = ("--engine", "vllm", "--external", "0", "--evaluate-every", "0", "--lora-rank", "4")
    node = make_node("a", *flags)
    node.start()
    node.until(lambda: node.last_round() >= 3)
    assert node.troubles() == []
    for record in node.rounds():
        assert record.paused_s is not None
        if record.informative_groups:
            assert record.mismatch_max is not None
            assert record.mismatch_max < 1e-3
    assert node.interrupt() == 0
