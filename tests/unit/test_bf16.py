"""A policy that computes in bf16: its weights, its gradients, and where it is chosen."""

from dataclasses import replace

import pytest
import torch

from node.interfaces.engine import Sampling
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.policies import lean
from node.policies.lean import LeanModel
from node.policies.rounding import to_bfloat16
from node.train import memory, precision, self_check
from node.train.precision import FULL, choose
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import TrainerCore
from node.train.version_lag import swapped
from tests.unit.training_support import (
    generate,
    gpt2_directory,
    gradients,
    group,
    mamba_directory,
    open_policy,
    qwen_directory,
)

LARGE = (100_000_000, 576, 1536)  # parameters, hidden and intermediate size
NEAR = 0.1  # of a gradient's norm


def rounded_policy(directory, *, keeps=True):
    policy = open_policy(directory)
    policy.compute_in("bfloat16", keeps=keeps)
    return policy


def logits_of(policy):
    ids = torch.tensor([policy.encode_prompt("12+34=")])
    with torch.no_grad(), policy.autocast():
        return policy.model(input_ids=ids, use_cache=False).logits.float()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory, mamba_directory])
def test_engine_and_all_passes_agree_within_the_noise(tmp_path, make, keeps):
    policy = rounded_policy(make(tmp_path / "a"), keeps=keeps)
    trainer = GroupTrainer(policy, TrainerSpec("x"), 4096)
    found = self_check.findings(trainer)
    assert all(each.stands for each in found), found
    assert min(each.most for each in found) > self_check.EXACT_NATS  # rounding was noticed
    assert policy.precision == "bfloat16"


def test_prompts_of_several_kinds_are_sampled_together(tmp_path):
    """Each kind has a beginning of its own that is worth a pass."""
    policy = rounded_policy(qwen_directory(tmp_path / "a"))
    begins = [" ".join(map(str, range(n, n + 40))) + "=" for n in (1, 50)]
    prompts = [f"{begin}{n}" for begin in begins for n in range(4)]
    assert len(lean.alike([policy.encode_prompt(each) for each in prompts])) == 2
    made = generate(policy, prompts, 2, Sampling(max_new_tokens=3), seed=1, policy_version=0)
    groups = [
        TrainingGroup(prompt, each, (1.0, -1.0), own_tokens=True)
        for prompt, each in zip(prompts, made, strict=True)
    ]
    trained = GroupTrainer(policy, TrainerSpec("x"), 4096).logprobs(groups)
    for each, rows in zip(made, trained, strict=True):
        for completion, row in zip(each, rows, strict=True):
            assert completion.logprobs == pytest.approx(row, abs=self_check.EXACT_NATS + 0.05)


@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory])
@pytest.mark.parametrize(("recomputes", "keeps"), [(False, True), (True, True), (True, False)])
def test_gradients_reach_the_fp32_weights(tmp_path, make, recomputes, keeps):
    directory = make(tmp_path / "a")
    found = []
    for policy in (open_policy(directory), rounded_policy(directory, keeps=keeps)):
        groups = [group(policy, "1+1=", ["2", "34"], [1.0, -1.0])]
        trainer = GroupTrainer(
            policy, TrainerSpec("x", learning_rate=0.0), 4096, recomputes=recomputes
        )
        seen = {}
        trainer.optimizer.step = lambda policy=policy, seen=seen: seen.update(gradients(policy))
        trainer.train(groups)
        found.append(seen)
    exact, ours = found
    assert exact.keys() == ours.keys()
    for name, gradient in exact.items():
        assert ours[name].dtype == torch.float32
        off = (ours[name] - gradient).norm()
        assert float(off) <= NEAR * float(gradient.norm()) + 1e-6, name
    assert any(not torch.equal(exact[name], ours[name]) for name in exact)


def test_what_is_not_kept_computes_the_same_and_leaves_nothing(tmp_path):
    policies = [rounded_policy(qwen_directory(tmp_path / "a"), keeps=k) for k in (True, False)]
    kept, made = (logits_of(each) for each in policies)
    assert torch.equal(kept, made)
    with torch.inference_mode():
        assert torch.equal(logits_of(policies[1]), kept)
    rounded = policies[1].rounded
    assert not rounded._kept
    weights = [each.weight for each in rounded._layers]
    assert all(each.dtype == torch.float32 for each in weights)
    with pytest.raises(RuntimeError, match="shape"), policies[1].autocast():
        policies[1].model.lm_head(torch.zeros(1, 3))
    assert policies[1].model.lm_head.weight.dtype == torch.float32


def test_linear_layers_compute_with_the_weights_of_the_published_version(tmp_path):
    policy = rounded_policy(qwen_directory(tmp_path / "a"))
    masters = {name: each.clone() for name, each in policy.model.named_parameters()}
    layer = policy.model.model.layers[0].mlp.down_proj
    with policy.autocast():
        inside = layer.weight.detach().clone()
        assert inside.dtype == torch.bfloat16
        assert policy.model.model.norm.weight.dtype == torch.float32
        lean = LeanModel(policy.model)
        assert lean.dtype == torch.bfloat16
    assert torch.equal(inside, to_bfloat16(layer.weight))
    assert not torch.equal(inside, layer.weight.bfloat16())
    now = dict(policy.model.named_parameters())
    assert all(torch.equal(now[name], before) for name, before in masters.items())


def test_small_steps_reach_the_policy_that_computes(tmp_path, monkeypatch):
    """Steps of 1e-6 from weights on the grid of bf16, which rounding to the nearest would hide."""

    def moved(rounds) -> float:
        policy = rounded_policy(qwen_directory(tmp_path / "a"))
        monkeypatch.setattr("node.policies.rounding.to_bfloat16", rounds)
        for parameter in policy.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        layer = policy.model.model.layers[0].mlp.down_proj
        with policy.autocast():
            before = layer.weight.detach().float()
        spec = TrainerSpec("x", learning_rate=1e-6, warm_up_updates=0, step_guard=False)
        trained = [group(policy, "1+1=", ["2", "3"], [1.0, -1.0])]
        GroupTrainer(policy, spec, 4096).train(trained)
        with policy.autocast():
            return float((layer.weight.detach().float() - before).abs().mean())

    assert moved(to_bfloat16) == pytest.approx(1e-6, rel=0.5)
    assert moved(lambda value: value.detach().bfloat16()) < 2e-7


def test_other_weights_are_seen_wherever_they_come_from(tmp_path):
    policy = rounded_policy(qwen_directory(tmp_path / "a"))
    other = rounded_policy(qwen_directory(tmp_path / "b", seed=1))
    first, theirs = logits_of(policy), logits_of(other)
    trained = list(policy.model.parameters())
    for _ in range(3):  # memory may be used again
        with swapped(trained, [each.data.clone() for each in other.model.parameters()]):
            assert torch.equal(logits_of(policy), theirs)
        with swapped(trained, [each.data.clone() for each in trained]):
            assert torch.equal(logits_of(policy), first)
    policy.load_weights(tmp_path / "b")
    assert torch.equal(logits_of(policy), theirs)


def test_without_a_word_of_the_change_the_old_weights_are_kept(tmp_path):
    """The reason why `swapped` tells of it."""
    policy = rounded_policy(qwen_directory(tmp_path / "a"))
    first = logits_of(policy)
    weight = policy.model.model.layers[0].mlp.down_proj.weight
    weight.data.mul_(2.0)
    assert torch.equal(logits_of(policy), first)
    torch.autograd.graph.increment_version(weight)
    assert not torch.equal(logits_of(policy), first)


def test_sampling_and_training_take_turns(tmp_path):
    policy = rounded_policy(qwen_directory(tmp_path / "a"))
    sampling = Sampling(max_new_tokens=4)
    spec = TrainerSpec("x", learning_rate=1e-2, warm_up_updates=0, step_guard=False)
    before = generate(policy, ["1+1="], 2, sampling, 0, 0)
    trained = [group(policy, "1+1=", ["2", "3"], [1.0, -1.0])]
    GroupTrainer(policy, spec, 4096).train(trained)
    after = generate(policy, ["1+1="], 2, sampling, 0, 0)
    assert before != after


# where it is chosen


def test_it_is_chosen_where_it_is_clearly_faster(monkeypatch):
    spec = TrainerSpec("x")
    for gain, expected in ((2.0, "bfloat16"), (1.1, "float32"), (0.2, "float32")):
        monkeypatch.setattr(precision, "measured_gain", lambda *_, gain=gain: gain)
        found = choose(spec, "cpu", *LARGE)
        assert (found.precision, bool(found.told)) == (expected, expected == "bfloat16")
    monkeypatch.setattr(precision, "measured_gain", lambda *_: 2.0)
    assert "2.0 times" in choose(spec, "cpu", *LARGE).told
    assert choose(spec, "cpu", precision.PARAMETERS_MIN - 1, *LARGE[1:]) == FULL
    exact_base = replace(spec, lora_rank=8, lora_base="float32")
    assert choose(exact_base, "cpu", *LARGE) == FULL
    assert choose(replace(exact_base, lora_base=None), "cpu", *LARGE).precision == "bfloat16"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_a_set_precision_is_taken_without_timing(device, wanted, monkeypatch):
    monkeypatch.setattr(precision, "measured_gain", lambda *_: pytest.fail("timed"))
    assert choose(TrainerSpec("x", precision=wanted), device, 1, 1, 1).precision == wanted
    assert choose(TrainerSpec("x"), "cuda", 1, 1, 1).precision == "bfloat16"
    assert choose(TrainerSpec("x", precision="by_device"), "cuda", *LARGE).precision == "bfloat16"
    assert choose(TrainerSpec("x", precision="by_device"), "cpu", *LARGE) == FULL


def test_the_gain_is_a_ratio_of_two_times():
    assert 0.001 < precision.measured_gain(64, 128) < 1000


@pytest.mark.parametrize("wanted", ["auto", "float32", "bfloat16"])
def test_a_trainer_computes_and_tells_in_what(tmp_path, wanted):
    directory = qwen_directory(tmp_path / "a")
    core = TrainerCore(TrainerSpec(str(directory), precision=wanted))
    expected = "bfloat16" if wanted == "bfloat16" else "float32"
    assert core.info().precision == core.policy.precision == expected
    report = core.train([group(core.policy, "1+1=", ["2", "3"], [1.0, -1.0])])
    assert report.trained_tokens > 0


def test_the_plan_counts_the_rounded_weights(tmp_path):
    directory = str(qwen_directory(tmp_path / "a"))
    full, half = (
        memory.plan(TrainerSpec(directory, precision=each)) for each in ("float32", "bfloat16")
    )
    assert half.held_bytes - full.held_bytes == 2 * open_policy(tmp_path / "a").parameters
    assert (full.computes_in, half.computes_in.precision) == (FULL, "bfloat16")
    twice = memory.plan(TrainerSpec(directory, precision="bfloat16", activation_checkpointing="on"))
    assert twice.held_bytes == full.held_bytes
