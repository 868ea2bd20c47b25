"""An adapter over a base in four bits: a step of it, what is written, and what it takes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.interfaces.engine import Sampling
from node.interfaces.trainer_spec import TrainerSpec
from node.policies import adapters, checkpoint, frozen
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import opened
from tests.unit import training_support
from tests.unit.training_support import generate, group, open_policy, qwen_directory

SPEC = TrainerSpec("test", learning_rate=1e-2)
MANY = 100_000
BF16_NEAR = 0.1  # nats of a log-prob, which products in bf16 may be off
pytestmark = [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    wide = replace(training_support.SMALL, hidden=64, head_size=16, intermediate=128)
    monkeypatch.setattr(training_support, "SMALL", wide)  # four bits come in blocks of 64


@pytest.mark.parametrize("held", ["bfloat16", "4bit"])
def test_a_step_over_a_base_in_few_bits(tmp_path: Path, held: str) -> None:
    model = qwen_directory(tmp_path / "model")
    policy = opened(TrainerSpec(str(model), lora_rank=4, lora_base=held), "cuda")
    assert policy.precision == {"bfloat16": "bfloat16", "4bit": "nf4"}[held]
    wide = open_policy(model)
    assert policy.adapter is not None
    assert policy.adapter.base == adapters.base_hash(wide.model)
    factors = adapters.factors(policy)
    assert policy.parameters == wide.parameters + sum(v.numel() for v in factors.values())
    layers = [layer.base_layer for _, _, layer in adapters._adapted(policy.model)]
    assert {frozen.is_quantised(layer) for layer in layers} == {held == "4bit"}
    kept = [value.clone() for value in factors.values()]
    trainer = GroupTrainer(policy, SPEC, MANY)
    batch = [group(policy, "1+2=", ["3", "4"], [1.0, -1.0])]
    before = trainer.logprobs(batch)
    report = trainer.train(batch)
    assert (report.policy_version, report.trained_tokens > 0) == (1, True)
    assert {value.dtype for value in adapters.factors(policy).values()} == {torch.float32}
    changed = zip(kept, adapters.factors(policy).values(), strict=True)
    assert not all(torch.equal(one, other) for one, other in changed)
    after = trainer.logprobs(batch)
    assert sum(after[0][0]) > sum(before[0][0])  # what was right has become likelier

    [[made]] = generate(policy, ["1+2="], 1, Sampling(max_new_tokens=8), 3, 1)
    group_made = type(batch[0])("1+2=", (made,), (0.0,), own_tokens=True)
    [[said]] = trainer.logprobs([group_made])
    assert said == pytest.approx(list(made.logprobs), abs=BF16_NEAR)

    whole = tmp_path / "whole"
    whole.mkdir()
    checkpoint.export_whole(whole, policy)
    merged = GroupTrainer(open_policy(whole), SPEC, MANY)
    [[theirs]] = merged.logprobs([group_made])
    assert theirs == pytest.approx(said, abs=BF16_NEAR)
    assert {frozen.is_quantised(layer) for layer in layers} == {held == "4bit"}
