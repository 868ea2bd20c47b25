"""A model with which engine or trainer do not compute what it says of each text alone is refused
before work starts, in one line that says what to do."""

from dataclasses import replace

import pytest
import torch

from node.interfaces.adapter_files import AdapterShape
from node.policies import prefixes
from node.policies.adapters import attach
from node.policies.policy import Policy
from node.train import self_check, trainer
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import TrainerCore
from swarm.errors import ConfigError
from tests.unit.small_models import SPEC, made
from tests.unit.training_support import qwen_directory


def trainer_of(kind: str, forward: str = "auto", window: int = 16) -> GroupTrainer:
    return GroupTrainer(replace(made(kind, window), forward=forward), SPEC, 4096)


def refusal(of: GroupTrainer) -> str:
    with pytest.raises(ConfigError) as caught:
        self_check.check(of)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["mistral", "mpt", "gemma3_text"])
def test_pads_between_a_prompt_and_its_completion_are_noticed(kind, monkeypatch):
    """Windows and ALiBi count places."""

    def run(policy, prompts):
        cache, lengths = real(policy, prompts)
        prefixes.move_right(cache, lengths - lengths.max())
        return cache, lengths

    def seen(lengths, width):
        return torch.arange(width, device=lengths.device) < lengths[:, None]

    real = prefixes.run
    self_check.check(trainer_of(kind))
    monkeypatch.setattr(prefixes, "run", run)
    monkeypatch.setattr(prefixes, "seen", seen)
    told = refusal(trainer_of(kind))
    assert told.startswith(f"model {kind} (")
    assert "the engine is" in told
    assert told.endswith(": take --forward plain")
    self_check.check(trainer_of(kind, "plain"))


@pytest.mark.parametrize("kind", ["lfm2", "minimax", "bamba"])
def test_a_state_that_nobody_knows_of_is_noticed(kind, monkeypatch):
    self_check.check(trainer_of(kind))
    monkeypatch.setattr(Policy, "stateful", False)
    assert refusal(trainer_of(kind)).endswith(": take --forward plain")


def test_a_model_that_takes_no_positions_needs_rows_apart():
    assert "take --forward plain" in refusal(trainer_of("bart"))
    self_check.check(trainer_of("bart", "plain"))


@pytest.mark.parametrize("forward", ["auto", "plain"])
def test_a_model_whose_tokens_see_later_ones_is_refused(forward):
    assert refusal(trainer_of("roberta", forward)).endswith(": take another model")


def test_one_pass_of_the_trainer_alone_is_named(monkeypatch):
    of = trainer_of("llama")
    lean = of._lean
    monkeypatch.setattr(of, "_lean", lambda *given: [each + 0.01 for each in lean(*given)])
    assert "the trainer's pass 'lean' is 0.01 nats off" in refusal(of)


def test_a_number_that_is_none_is_refused(monkeypatch):
    of = trainer_of("gpt2")
    shared = of._shared
    monkeypatch.setattr(of, "_shared", lambda *given: [each * torch.nan for each in shared(*given)])
    assert "the trainer's pass 'shared' is inf nats off" in refusal(of)


def test_lack_of_memory_is_no_fault_of_the_model(monkeypatch):
    def full(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] can't allocate memory")

    of = trainer_of("gpt2")
    monkeypatch.setattr(of, "_shared", full)
    with pytest.raises(RuntimeError, match="memory"):
        self_check.check(of)


def test_the_noise_of_fewer_bits_is_allowed(monkeypatch):
    monkeypatch.setattr(Policy, "autocast", lambda _: torch.autocast("cpu", dtype=torch.bfloat16))
    of = trainer_of("gemma3_text")
    found = self_check.findings(of)
    assert max(each.nats for each in found) > self_check.EXACT_NATS
    assert all(each.stands for each in found)


def test_a_long_window_costs_no_more_than_a_micro_batch_and_a_bound_of_work(monkeypatch):
    lengths = []
    real = self_check._sampled
    monkeypatch.setattr(
        self_check,
        "_sampled",
        lambda policy, prompts: lengths.append(max(map(len, prompts))) or real(policy, prompts),
    )
    of = trainer_of("mistral", window=100)
    self_check.check(of)
    of.micro_batch_tokens = 200
    self_check.check(of)
    of.micro_batch_tokens = 4096
    monkeypatch.setitem(self_check.WORK_MAX, "cpu", 10_000)
    self_check.check(of)
    few = self_check.LENGTHS[-1]
    assert lengths == [100 + self_check.PAST_WINDOW, few, few]


def test_it_leaves_random_numbers_and_weights_as_they_are():
    of = trainer_of("gpt2")
    numbers = torch.get_rng_state()
    before = [each.clone() for each in of.policy.model.parameters()]
    self_check.check(of)
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(map(torch.equal, before, of.policy.model.parameters()))
    assert all(each.grad is None for each in of.policy.model.parameters())


def test_a_trainer_does_not_start_with_such_a_model(tmp_path, monkeypatch):
    spec = replace(SPEC, model=str(qwen_directory(tmp_path)), device="cpu", threads=1)
    TrainerCore(spec)
    monkeypatch.setattr(trainer.GroupTrainer, "_shared", lambda *_: [])  # too few rows
    with pytest.raises(ConfigError, match="take --forward plain"):
        TrainerCore(spec)
    TrainerCore(replace(spec, forward="plain"))


@pytest.mark.parametrize(
    "kind",
    ["lfm2", "lfm2_moe", "minimax", "qwen3_5_text", "bamba", "mamba", "jamba", "kimi_linear"],
)
def test_models_with_a_state_are_known_by_their_layers_and_take_no_adapter(kind):
    with pytest.raises(ConfigError, match="LoRA is not for models with recurrent state"):
        attach(made(kind), AdapterShape(2, 4.0, ()), seed=0)
