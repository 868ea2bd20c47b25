"""What every rollout engine must do, stated once: `scripted`, `torch` and `vllm`."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from node.engines.scripted import ScriptedPolicy
from node.interfaces.adapter_files import AdapterShape
from node.interfaces.engine import Engine, Outcome, Request, Sampling, plain_requests
from node.interfaces.trainer_spec import TrainerSpec
from node.policies import adapters, checkpoint
from node.train.process import InProcessTrainer, open_trainer
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import Completion, FinishReason, version_spans
from swarm.wire import codec
from tests.integration.shared_vllm import SharedVllm, shared_vllm
from tests.integration.vllm_models import model_directory
from tests.support import run
from tests.unit.training_support import gpt2_directory, open_policy, qwen_directory
from tests.wire_samples import ALICE, sample_group

PROMPTS = ("1+1=", "12+30=", "1+1=")
SAMPLING = Sampling(max_new_tokens=6)
LONG = Sampling(max_new_tokens=40)  # several segments


@dataclass(frozen=True)
class Case:
    """An engine, and a directory of other weights that it can load."""

    open: Callable[[Path], AbstractAsyncContextManager[Engine]]
    weights: Callable[[Path], Path]
    marks: tuple[pytest.MarkDecorator, ...] = ()
    run: Callable[..., Any] = run


@asynccontextmanager
async def scripted(_: Path) -> AsyncIterator[Engine]:
    yield ScriptedPolicy(generate_s=0.0)


@asynccontextmanager
async def torch_lean(directory: Path) -> AsyncIterator[Engine]:
    yield InProcessTrainer(TrainerSpec(str(qwen_directory(directory / "model")), device="cpu"))


@asynccontextmanager
async def torch_hugging_face(directory: Path) -> AsyncIterator[Engine]:
    yield InProcessTrainer(TrainerSpec(str(gpt2_directory(directory / "model")), device="cpu"))


@asynccontextmanager
async def torch_process(directory: Path) -> AsyncIterator[Engine]:
    spec = TrainerSpec(str(qwen_directory(directory / "model")), device="cpu", threads=1)
    async with open_trainer(spec, directory / "data") as trainer:
        yield trainer


class Vllm:
    """The vLLM engine that the tests of this module share, opened by the first of them."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.directory: Path | None = None  # the module's
        self._shared: SharedVllm | None = None

    def run(self, body: Callable[[], Any]) -> None:
        if self._shared is None:
            assert self.directory is not None
            base = model_directory(self.directory / "base", 1)
            opened = shared_vllm(self.directory, base)
            self._shared = self.stack.enter_context(opened)
        self._shared.run(body)

    @asynccontextmanager
    async def open(self, _: Path) -> AsyncIterator[Engine]:
        assert self._shared is not None
        yield await self._shared.reset()


VLLM = Vllm()


@pytest.fixture(scope="module", autouse=True)
def vllm_closed(tmp_path_factory):
    VLLM.directory = tmp_path_factory.mktemp("vllm")
    with VLLM.stack:
        yield


def other_qwen(directory: Path) -> Path:
    return qwen_directory(directory / "other", seed=5)


def other_gpt2(directory: Path) -> Path:
    return gpt2_directory(directory / "other", seed=5)


def other_for_vllm(directory: Path) -> Path:
    return model_directory(directory / "other", 2)


def other_skill(directory: Path) -> Path:
    (directory / "skill").write_text("0.9")
    return directory


def other_adapter(directory: Path) -> Path:
    """A version that the policy takes, as an adapter on what it began with."""
    policy = open_policy(qwen_directory(directory / "base"))
    adapters.attach(policy, AdapterShape(4, 8.0, ()), 0)
    with torch.no_grad():
        for number, factor in enumerate(adapters.factors(policy).values()):
            factor.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(number))
    (directory / "version").mkdir()
    checkpoint.export(directory / "version", policy)
    return directory / "version"


FOR_VLLM = (pytest.mark.vllm, pytest.mark.integration)
IN_A_PROCESS = (pytest.mark.integration, pytest.mark.long)  # a child that loads torch, each time
CASES = {
    "torch-adapter": Case(torch_lean, other_adapter),
    "scripted": Case(scripted, other_skill),
    "torch": Case(torch_lean, other_qwen),
    "torch-hugging-face": Case(torch_hugging_face, other_gpt2),
    "torch-process": Case(torch_process, other_qwen, IN_A_PROCESS),
    "vllm": Case(VLLM.open, other_for_vllm, FOR_VLLM, VLLM.run),
}


@pytest.fixture(
    params=[pytest.param(each, id=name, marks=each.marks) for name, each in CASES.items()]
)
def case(request) -> Case:
    return request.param


@pytest.mark.slow
def test_it_says_what_it_is_in_words_that_groups_can_carry(case, tmp_path):
    async def body():
        async with case.open(tmp_path) as engine:
            maker = engine.maker
            assert maker.engine in ("scripted", "torch", "vllm")
            said = replace(sample_group(), engine=maker.engine, precision=maker.precision)
            assert codec.decode_group(codec.sign_group(said, ALICE)[1])[1] == said
            assert not said.is_quantised
            if maker.engine != "scripted":
                assert maker.precision in ("float32", "bfloat16")

    case.run(body)


@pytest.mark.slow
def test_completions_come_in_the_order_and_number_asked_for(case, tmp_path):
    async def body():
        async with case.open(tmp_path) as engine:
            groups = await engine.generate(PROMPTS, 4, SAMPLING, 7)
            assert [len(group) for group in groups] == [4, 4, 4]
            assert await engine.generate([], 4, SAMPLING, 7) == []

    case.run(body)


@pytest.mark.slow
def test_columns_agree_and_limits_hold(case, tmp_path):
    async def body():
        async with case.open(tmp_path) as engine:
            groups = await engine.generate(PROMPTS, 4, SAMPLING, 7)
            for completion in (c for group in groups for c in group):
                assert 1 <= len(completion.token_ids) <= SAMPLING.max_new_tokens
                assert len(completion.logprobs) == len(completion.token_ids)
                assert all(value <= 0.0 and math.isfinite(value) for value in completion.logprobs)
                assert completion.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
                if completion.finish_reason is FinishReason.LENGTH:
                    assert len(completion.token_ids) == SAMPLING.max_new_tokens
                completion.text.encode()

    case.run(body)


@pytest.mark.slow
def test_the_seed_decides(case, tmp_path):
    async def body():
        async with case.open(tmp_path) as engine:
            once = await engine.generate(PROMPTS, 4, SAMPLING, 7)
            assert await engine.generate(PROMPTS, 4, SAMPLING, 7) == once
            assert await engine.generate(PROMPTS, 4, SAMPLING, 8) != once

    case.run(body)


@pytest.mark.slow
def test_completions_of_a_prompt_differ_also_where_it_is_repeated(case, tmp_path):
    async def body():
        async with case.open(tmp_path) as engine:
            first, _, again = await engine.generate(PROMPTS, 8, SAMPLING, 7)
            assert len({c.logprobs for c in (*first, *again)}) > 8

    case.run(body)


@pytest.mark.slow
def test_loading_weights_sets_the_version_of_what_follows(case, tmp_path):
    async def body():
        weights = case.weights(tmp_path)
        async with case.open(tmp_path) as engine:
            [[before]] = await engine.generate(["1+1="], 1, SAMPLING, 7)
            await engine.load(weights, 41)
            [[after]] = await engine.generate(["1+1="], 1, SAMPLING, 7)
            assert (before.policy_version, after.policy_version) == (0, 41)

    case.run(body)


@pytest.mark.slow
def test_a_load_that_fails_leaves_the_old_version_serving(case, tmp_path):
    async def body():
        empty = tmp_path / "empty"
        empty.mkdir()
        async with case.open(tmp_path) as engine:
            before = await engine.generate(PROMPTS, 2, SAMPLING, 7)
            for bad in (empty, tmp_path / "nowhere"):
                with pytest.raises(ChildFailed, match=bad.name):
                    await engine.load(bad, 41)
            assert await engine.generate(PROMPTS, 2, SAMPLING, 7) == before

    case.run(body)


@pytest.mark.slow
def test_spans_tell_the_truth_of_a_load_in_the_middle(case, tmp_path):
    """Whatever an engine does with what it has begun: tokens that it says are of a version are."""

    async def body():
        weights = case.weights(tmp_path)
        async with case.open(tmp_path) as engine:
            old = await engine.generate(PROMPTS, 4, LONG, 7)
            mixed: list[tuple[Completion, ...]] = []

            async def generate() -> None:
                mixed.extend(await engine.generate(PROMPTS, 4, LONG, 7))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(generate)
                await wait_all_tasks_blocked()
                await engine.load(weights, 41)
            new = await engine.generate(PROMPTS, 4, LONG, 7)
            for ours, by_old, by_new in zip(
                *([c for group in each for c in group] for each in (mixed, old, new)), strict=True
            ):
                (first, count), *others = version_spans(ours)
                assert [version for version, _ in others] in ([], [41])
                whole = {0: by_old, 41: by_new}[first]
                assert ours.token_ids[:count] == whole.token_ids[:count]
                assert others or ours.token_ids == whole.token_ids
            assert {c.policy_version for group in new for c in group} == {41}
            assert [c.token_ids for group in old for c in group] != [
                c.token_ids for group in new for c in group
            ]

    case.run(body)


ALL = frozenset(("entropies", "runners_up", "hidden"))
BEGINNING = (70, 71)
WANTED = {
    "requests": [
        Request("1+1=", 2, limit=3),
        Request("1+1=", 3, temperature=0.5),
        Request("12+30=", seed=3),
    ],
    "beginnings": [
        Request("1+1=", 2, beginning=BEGINNING, beginning_logprobs=(-0.5, -0.25)),
        Request("1+1=", beginning=BEGINNING, limit=2),
    ],
    "entropies": [Request("1+1=", 2, record=frozenset({"entropies"}))],
    "runners_up": [Request("1+1=", 2, record=frozenset({"runners_up"}))],
    "hidden": [Request("1+1=", 2, record=frozenset({"hidden"}))],
    "noise": plain_requests(["1+1="], 4),
}


@pytest.mark.slow
def test_plain_requests_are_what_generate_gives(case, tmp_path):
    async def body():
        async with case.open(tmp_path) as engine:
            groups = await engine.generate(PROMPTS, 4, SAMPLING, 7)
            plain = plain_requests(PROMPTS, 4)
            assert await engine.sample(plain, SAMPLING, 7) == [Outcome(each) for each in groups]
            assert await engine.sample(plain, SAMPLING, 8) != [Outcome(each) for each in groups]
            few, many = await engine.sample([plain[0], Request("1+1=", 6)], SAMPLING, 7)
            assert (len(few.completions), len(many.completions)) == (4, 6)

    case.run(body)


@pytest.mark.slow
@pytest.mark.parametrize("capability", WANTED)
def test_a_request_is_done_as_asked_or_refused_by_name(case, tmp_path, capability):
    async def body():
        async with case.open(tmp_path) as engine:
            wanted, noise = WANTED[capability], 0.1 * (capability == "noise")
            can = engine.capabilities
            if not (capability in can.records or getattr(can, capability, False)):
                with pytest.raises(ConfigError, match=f"the engine {engine.maker.engine} "):
                    await engine.sample(wanted, Sampling(max_new_tokens=6), 7, noise)
                return
            outcomes = await engine.sample(wanted, Sampling(max_new_tokens=6), 7, noise)
            assert outcomes == await engine.sample(wanted, Sampling(max_new_tokens=6), 7, noise)
            assert [len(each.completions) for each in outcomes] == [each.n for each in wanted]
            CHECKS[capability](wanted, outcomes)
            if noise:
                plain = await engine.sample(wanted, Sampling(max_new_tokens=6), 7)
                assert plain != outcomes
                assert plain == await engine.sample(wanted, Sampling(max_new_tokens=6), 7)

    case.run(body)


def as_limited(wanted: list[Request], outcomes: list[Outcome]) -> None:
    for request, outcome in zip(wanted, outcomes, strict=True):
        for made in outcome.completions:
            limit = request.limit or 6
            assert len(made.token_ids) <= limit
            if made.finish_reason is FinishReason.LENGTH:
                assert len(made.token_ids) == limit


def as_begun(wanted: list[Request], outcomes: list[Outcome]) -> None:
    for made in (made for each in outcomes for made in each.completions):
        assert made.token_ids[:2] == BEGINNING
        assert made.splices == (2,)
        assert len(made.logprobs) == len(made.token_ids)
    assert outcomes[0].completions[0].logprobs[:2] == (-0.5, -0.25)
    assert len(outcomes[0].completions[0].token_ids) > 2
    [whole] = outcomes[1].completions
    assert (whole.token_ids, whole.finish_reason) == (BEGINNING, FinishReason.LENGTH)
    assert all(value < 0.0 for value in whole.logprobs)


def as_recorded(wanted: list[Request], outcomes: list[Outcome]) -> None:
    """Shapes; values are compared with those of a plain pass elsewhere."""
    for request, outcome in zip(wanted, outcomes, strict=True):
        [name] = request.record
        for made, recorded in zip(outcome.completions, outcome.recorded, strict=True):
            for other in ALL:
                assert bool(getattr(recorded, other)) == (other == name)
            assert name == "hidden" or len(getattr(recorded, name)) == len(made.token_ids)
            assert all(value >= 0.0 for value in recorded.entropies)
            assert all(first >= second for _, first, second in recorded.runners_up)


CHECKS = {
    "requests": as_limited,
    "beginnings": as_begun,
    "noise": as_limited,
} | dict.fromkeys(ALL, as_recorded)
