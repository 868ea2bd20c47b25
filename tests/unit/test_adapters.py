"""LoRA: what is trained, kept, written and loaded of a policy that has an adapter."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from node.config import load_config
from node.hosting.models import trainer_spec
from node.interfaces.adapter_files import BASE_FILE, CONFIG_FILE, WEIGHTS_FILE, AdapterShape
from node.interfaces.engine import Sampling
from node.interfaces.trainer import DamagedCheckpoint
from node.interfaces.trainer_spec import TrainerSpec
from node.policies import adapters, checkpoint, lean
from node.policies.policy import Policy
from node.train import frames, memory, trainer_worker
from node.train.process import InProcessTrainer
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import TrainerCore, load_version
from swarm.errors import ChildFailed, ConfigError, LocalProtocolError
from tests.support import run
from tests.unit.training_support import (
    generate,
    gpt2_directory,
    group,
    mamba_directory,
    open_policy,
    qwen_directory,
)

SPEC = TrainerSpec("test", learning_rate=1e-2)
SHAPE = AdapterShape(4, 8.0, ())
MANY = 100_000
KINDS = pytest.mark.parametrize("make", [qwen_directory, gpt2_directory])


def adapted(model: Path, seed: int | None = None, shape: AdapterShape = SHAPE) -> Policy:
    """A policy with an adapter; with a seed, one that makes much of a difference."""
    policy = open_policy(model)
    adapters.attach(policy, shape, 0)
    if seed is not None:
        shuffle(policy, seed)
    return policy


def shuffle(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in adapters.factors(policy).values():
            factor.normal_(0.0, 0.1, generator=generator)


def exported(policy: Policy, directory: Path) -> Path:
    directory.mkdir()
    checkpoint.export(directory, policy)
    return directory


def trained(policy: Policy, steps: int, trainer: GroupTrainer | None = None) -> GroupTrainer:
    trainer = trainer or GroupTrainer(policy, SPEC, MANY)
    for step in range(trainer.policy_version, trainer.policy_version + steps):
        answers = [str(step), str(step + 1), "x"]
        trainer.train([group(policy, f"{step}+0=", answers, [1.0, -0.5, -0.5])])
    return trainer


def logits(model) -> torch.Tensor:
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        return model(ids).logits


def numbers(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in adapters.factors(policy).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# what is trained


@KINDS
def test_a_new_adapter_changes_nothing(tmp_path, make):
    model = make(tmp_path / "model")
    assert torch.equal(logits(adapted(model).model), logits(open_policy(model).model))


@KINDS
def test_an_update_changes_the_adapter_alone(tmp_path, make):
    policy = adapted(make(tmp_path / "model"))
    frozen = {
        name: value.clone()
        for name, value in policy.model.state_dict().items()
        if ".default." not in name
    }
    before = numbers(policy)
    trainer = trained(policy, 3)
    after = policy.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in frozen.items())
    assert not any(torch.equal(before[n], value) for n, value in adapters.factors(policy).items())
    held = sum(v.numel() for state in trainer.optimizer.state.values() for v in state.values())
    count = sum(value.numel() for value in before.values())
    assert held == 2 * count + len(before)  # Adam's moments and steps
    assert all(
        (parameter.requires_grad and ".default." in name)
        or (not parameter.requires_grad and parameter.grad is None)
        for name, parameter in policy.model.named_parameters()
    )


def test_the_lean_pass_and_the_module_have_the_same_gradients(tmp_path, monkeypatch):
    model = qwen_directory(tmp_path / "model")

    def gradients() -> dict[str, torch.Tensor]:
        policy = adapted(model, 3)
        trainer = GroupTrainer(policy, SPEC, MANY)
        monkeypatch.setattr(trainer.optimizer, "zero_grad", lambda **_: None)
        trainer.train([group(policy, "1+2=", ["3", "4"], [1.0, -1.0])])
        return {name: value.grad for name, value in adapters.factors(policy).items()}

    quick = gradients()
    monkeypatch.setattr(lean, "supports", lambda _: False)
    slow = gradients()
    assert quick.keys() == slow.keys()
    for name, value in quick.items():
        torch.testing.assert_close(value, slow[name], rtol=1e-4, atol=1e-6)


def test_some_layers_may_be_named(tmp_path):
    policy = adapted(qwen_directory(tmp_path / "m"), shape=AdapterShape(2, 2.0, ("q_proj",)))
    assert {name.split(".")[-3] for name in adapters.factors(policy)} == {"q_proj"}


def test_it_is_said_what_is_adapted_and_that_experts_are_not(tmp_path):
    policy = adapted(qwen_directory(tmp_path / "m"), shape=AdapterShape(2, 4.0, ("q_proj",)))
    assert adapters.described(policy) == "of rank 2, alpha 4, on q_proj"
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=64,
        num_hidden_layers=1,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    mixture = replace(policy, model=Qwen3MoeForCausalLM(config), adapter=None)
    adapters.attach(mixture, SHAPE, 0)
    assert adapters.described(mixture) == (
        "of rank 4, alpha 8, on k_proj, o_proj, q_proj, v_proj; experts are left as they are"
    )


def test_models_and_layers_without_it_are_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"no linear layer nothing; it has .*q_proj") as caught:
        adapted(qwen_directory(tmp_path / "a"), shape=AdapterShape(2, 2.0, ("nothing",)))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="recurrent"):
        adapted(mamba_directory(tmp_path / "b"))


# checkpoints


@KINDS
def test_resuming_is_bit_for_bit(tmp_path, make):
    model, saved = make(tmp_path / "model"), tmp_path / "saved"
    saved.mkdir()
    first = adapted(model)
    trainer = trained(first, 3)
    checkpoint.save(saved, first, trainer.optimizer, trainer.policy_version)
    held = load_file(saved / "model.safetensors")
    assert held.keys() == adapters.factors(first).keys()
    trained(first, 2, trainer)
    second = adapted(model)
    resumed = GroupTrainer(second, SPEC, MANY)
    resumed.policy_version = checkpoint.load(saved, second, resumed.optimizer)
    trained(second, 2, resumed)
    assert equal(numbers(first), numbers(second))


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    model, other = qwen_directory(tmp_path / "a"), qwen_directory(tmp_path / "b", seed=1)
    saved, whole = tmp_path / "saved", tmp_path / "whole"
    saved.mkdir()
    whole.mkdir()
    policy = adapted(model)
    checkpoint.save(saved, policy, trained(policy, 1).optimizer, 1)
    plain = open_policy(model)
    checkpoint.save(whole, plain, trained(plain, 1).optimizer, 1)
    for directory, made, words in (
        (saved, open_policy(model), r"trains a whole model: set lora_rank = 4 as it was"),
        (whole, adapted(model), r"trains an adapter: set lora_rank = 0 as it was"),
        (saved, adapted(other), "with base"),
        (saved, adapted(model, shape=replace(SHAPE, rank=2)), "with rank 4, not 2"),
        (saved, adapted(model, shape=replace(SHAPE, alpha=2.0)), "with alpha"),
    ):
        before = logits(made.model)
        with pytest.raises(ConfigError, match=words) as caught:
            checkpoint.load(directory, made, GroupTrainer(made, SPEC, MANY).optimizer)
        assert not isinstance(caught.value, DamagedCheckpoint)
        assert torch.equal(logits(made.model), before)


# versions


@KINDS
def test_peft_reads_what_is_written(tmp_path, make):
    model = make(tmp_path / "model")
    policy = adapted(model, 1)
    version = exported(policy, tmp_path / "version")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, version).eval()
    assert torch.equal(logits(theirs), logits(policy.model))


@KINDS
def test_updates_are_what_a_fresh_model_with_them_merged_computes(tmp_path, make):
    model, source = make(tmp_path / "model"), adapted(make(tmp_path / "same"))
    serving = open_policy(model)
    for number in range(5):
        shuffle(source, number)
        version = exported(source, tmp_path / f"version-{number}")
        load_version(serving, version)
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        fresh = PeftModel.from_pretrained(plain, version).merge_and_unload().eval()
        torch.testing.assert_close(logits(serving.model), logits(fresh), rtol=1e-4, atol=1e-4)
        [[made]] = generate(serving, ["1+1="], 1, Sampling(max_new_tokens=12), 3, number)
        prompt = serving.encode_prompt("1+1=")
        with torch.no_grad():
            said = fresh(torch.tensor([[*prompt, *made.token_ids]])).logits[0].log_softmax(-1)
        for place, (token, logprob) in enumerate(zip(made.token_ids, made.logprobs, strict=True)):
            assert math.isclose(said[len(prompt) - 1 + place, token], logprob, abs_tol=1e-4)


@KINDS
def test_a_whole_export_is_base_and_adapter_and_leaves_both_as_they_were(
    tmp_path, make, monkeypatch
):
    model = make(tmp_path / "model")
    policy = adapted(model, 2)
    before, base = logits(policy.model), policy.adapter.base
    whole = tmp_path / "whole"
    whole.mkdir()
    checkpoint.export_whole(whole, policy)
    assert torch.equal(logits(policy.model), before)
    torch.testing.assert_close(logits(open_policy(whole).model), before, rtol=1e-4, atol=1e-4)
    assert {p.name for p in whole.glob("*.safetensors")} == {"model.safetensors"}
    assert (
        load_file(whole / "model.safetensors").keys()
        == load_file(model / "model.safetensors").keys()
    )
    during: list[str] = []

    def full_disk(directory: Path) -> None:
        during.append(adapters.base_hash(policy.model))
        raise OSError("no room")

    monkeypatch.setattr(policy.model, "save_pretrained", full_disk)
    with pytest.raises(OSError, match="no room"):
        checkpoint.export_whole(whole, policy)
    assert during != [base]
    assert torch.equal(logits(policy.model), before)
    for value in adapters.factors(policy).values():
        torch.nn.init.zeros_(value)
    with adapters.merged(policy):
        assert adapters.base_hash(policy.model) == base


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    policy = adapted(qwen_directory(tmp_path / "model"))
    with torch.no_grad():
        next(iter(adapters.factors(policy).values()))[0, 0] = float("nan")
    (tmp_path / "version").mkdir()
    for write in (checkpoint.export, checkpoint.export_whole):
        with pytest.raises(LocalProtocolError, match="not finite"):
            write(tmp_path / "version", policy)
    assert not list((tmp_path / "version").iterdir())


def _cut(version: Path) -> None:
    path = version / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])


def _tensor(version: Path, value: torch.Tensor | None) -> None:
    weights = load_file(version / WEIGHTS_FILE)
    name = sorted(weights)[0]
    if value is None:
        del weights[name]
    else:
        weights[name] = value
    save_file(weights, version / WEIGHTS_FILE)


def _not_a_number(version: Path) -> None:
    weights = load_file(version / WEIGHTS_FILE)
    _tensor(version, torch.full_like(weights[min(weights)], float("nan")))


def _config(version: Path, **changes: object) -> None:
    config = json.loads((version / CONFIG_FILE).read_text())
    (version / CONFIG_FILE).write_text(json.dumps(config | changes))


FAULTS = {
    "cut short": (_cut, "adapter_model.safetensors"),
    "no weights": (lambda v: (v / WEIGHTS_FILE).unlink(), "adapter_model.safetensors"),
    "a tensor is missing": (lambda v: _tensor(v, None), "is missing"),
    "a tensor of another shape": (lambda v: _tensor(v, torch.zeros(3, 3)), "has shape"),
    "not a number": (_not_a_number, "not finite"),
    "another rank": (lambda v: _config(v, r=2), "of rank 2"),
    "another scale": (lambda v: _config(v, lora_alpha=1.0), "alpha 1,"),
    "an infinite scale": (lambda v: _config(v, lora_alpha=float("inf")), "makes no sense"),
    "no scale": (lambda v: _config(v, lora_alpha=float("nan")), "makes no sense"),
    "another kind": (lambda v: _config(v, use_dora=True), "only plain LoRA"),
    "nonsense": (lambda v: _config(v, r="4"), "makes no sense"),
    "no JSON": (lambda v: (v / CONFIG_FILE).write_text("{"), "is damaged"),
    "no base": (lambda v: (v / BASE_FILE).unlink(), "base.json"),
    "another base": (
        lambda v: (v / BASE_FILE).write_text(json.dumps({"format": 1, "base": "0" * 64})),
        "is for the base 000000000000",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_version_that_does_not_fit_is_refused_and_the_old_one_serves(tmp_path, fault):
    spoil, words = FAULTS[fault]
    model = qwen_directory(tmp_path / "model")
    good = exported(adapted(model, 1), tmp_path / "good")
    bad = shutil.copytree(exported(adapted(model, 2), tmp_path / "other"), tmp_path / "bad")
    spoil(bad)

    async def body() -> None:
        engine = InProcessTrainer(TrainerSpec(str(model), threads=1))
        await engine.load(good, 1)
        rows = [list(range(20))]
        before = await engine.logprobs(rows)
        with pytest.raises(ChildFailed, match=words) as caught:
            await engine.load(bad, 2)
        assert "\n" not in str(caught.value)
        assert await engine.logprobs(rows) == before
        assert (await engine.info()).policy_version == 1
        await engine.load(tmp_path / "other", 2)
        assert await engine.logprobs(rows) != before

    run(body)


@KINDS
@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"another scale"}))
def test_a_first_version_that_does_not_fit_leaves_the_policy_as_it_was(tmp_path, make, fault):
    spoil, words = FAULTS[fault]
    model = make(tmp_path / "model")
    good = exported(adapted(model, 1), tmp_path / "good")
    bad = shutil.copytree(good, tmp_path / "bad")
    spoil(bad)
    policy = open_policy(model)
    before, names = logits(policy.model), [name for name, _ in policy.model.named_parameters()]
    with pytest.raises(ConfigError, match="has shape" if fault == "another rank" else words):
        load_version(policy, bad)
    assert policy.adapter is None
    assert names == [name for name, each in policy.model.named_parameters() if each.requires_grad]
    assert torch.equal(logits(policy.model), before)
    load_version(policy, good)
    assert torch.equal(logits(policy.model), logits(adapted(model, 1).model))


def test_an_adapter_and_a_whole_model_do_not_replace_each_other(tmp_path):
    model = qwen_directory(tmp_path / "model")
    policy = adapted(model, 1)
    before = logits(policy.model)
    with pytest.raises(ConfigError, match="takes adapters"):
        load_version(policy, model)
    assert torch.equal(logits(policy.model), before)
    stranger = open_policy(qwen_directory(tmp_path / "other", seed=1))
    with pytest.raises(ConfigError, match="give the model that it was trained on"):
        load_version(stranger, exported(policy, tmp_path / "version"))
    assert stranger.adapter is None


def test_the_hash_of_a_base_is_of_its_weights_alone(tmp_path):
    model = qwen_directory(tmp_path / "a")
    first = adapters.base_hash(open_policy(model).model)
    halves = tmp_path / "halves"
    policy = open_policy(model)
    policy.model.save_pretrained(halves, max_shard_size="20KB")
    policy.tokenizer.save_pretrained(halves)
    assert len(list(halves.glob("*.safetensors"))) > 1
    assert adapters.base_hash(open_policy(halves).model) == first
    with torch.no_grad():
        policy.model.model.norm.weight[0] += 1e-6
    assert adapters.base_hash(policy.model) != first


# memory and settings


@KINDS
def test_memory_counts_gradients_and_moments_of_the_adapter_alone(tmp_path, make):
    model = make(tmp_path / "model")
    shape = memory.shape_of(str(model), SHAPE)
    held = sum(value.numel() for value in adapters.factors(adapted(model)).values())
    assert shape.adapter_parameters == held
    whole = TrainerSpec(str(model), memory_bytes_max=2**34)  # what is free changes meanwhile
    some = replace(whole, lora_rank=4, lora_base="float32")
    plans = memory.plan(whole), memory.plan(some)
    saved = plans[0].held_bytes - plans[1].held_bytes
    assert saved == 4 * (3 * shape.parameters - 4 * held)
    # where a micro-batch takes most, a whole model's gradients are not there yet, but its head's
    saved = plans[0].estimate_bytes - plans[1].estimate_bytes
    head = shape.vocabulary * shape.hidden
    assert saved == 4 * (2 * shape.parameters - 4 * held + 4 * head)
    handed = memory.plan(replace(some, writes_merged=True)).estimate_bytes
    assert handed - memory.plan(some).estimate_bytes == 4 * shape.parameters
    assert memory.plan(replace(whole, writes_merged=True)) == memory.plan(whole)


def test_what_vllm_gets_merged_is_counted():
    def merges(**settings: str) -> bool:
        return trainer_spec(load_config({"lora_rank": "4", **settings}, {}), "model").writes_merged

    assert merges(engine="vllm")
    assert not merges(engine="torch")


def test_a_trainer_is_built_with_its_adapter(tmp_path):
    model = qwen_directory(tmp_path / "model")
    spec = TrainerSpec(str(model), lora_rank=3, lora_targets=("v_proj", "q_proj"), threads=1)
    assert (
        TrainerSpec.from_record(spec.to_record() | {"lora_targets": ["v_proj", "q_proj"]}) == spec
    )
    core, again = TrainerCore(spec), TrainerCore(spec)
    assert core.policy.adapter.shape == AdapterShape(3, 6.0, ("q_proj", "v_proj"))
    assert equal(numbers(core.policy), numbers(again.policy))
    other = TrainerCore(replace(spec, seed=1))
    assert not equal(numbers(core.policy), numbers(other.policy))


def test_what_is_not_installed_is_a_matter_of_settings(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "node.policies.adapters")
    monkeypatch.delattr("node.policies.adapters")
    spec = TrainerSpec(str(qwen_directory(tmp_path / "model")), lora_rank=3, threads=1)
    arguments = frames.pack((spec.to_record(), None))
    request = {trainer_worker.NUMBER: 1, "op": "open", "arguments": arguments}
    answer = trainer_worker._Server(TrainerCore).answer(request)
    assert (answer["error"], answer["message"]) == (
        "ConfigError",
        "peft is not installed here: pip install peft",
    )


@pytest.mark.parametrize("setting", [{"lora_alpha": "8"}, {"lora_targets": "q_proj"}])
def test_settings_of_an_adapter_need_one(setting):
    assert load_config(setting | {"lora_rank": "4"}, {}).lora_rank == 4
    with pytest.raises(ConfigError, match=f"lora-rank 0: {next(iter(setting))} is of") as caught:
        load_config(setting, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"lora_rank": -1}, {"lora_rank": 513}, {"lora_alpha": 0.0}, {"lora_alpha": math.inf}]
)
def test_settings_out_of_range_are_refused(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=name.replace("_", "[-_]")):
        load_config({"lora_rank": "4", name: str(value)}, {})
