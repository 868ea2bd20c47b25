"""Frozen weights under an adapter in bf16: what they are, what is computed with them, and who is
refused."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from node.config import load_config
from node.hosting import models
from node.interfaces.adapter_files import BASE_FILE, AdapterShape, card_of
from node.interfaces.engine import Sampling
from node.interfaces.trainer_spec import TrainerSpec
from node.policies import adapters, checkpoint, frozen, lean
from node.policies.policy import Policy
from node.policies.rounding import to_bfloat16
from node.train import memory
from node.train.ranks import Ranks
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import TrainerCore, load_version, opened
from swarm.errors import ConfigError
from tests.unit.training_support import (
    generate,
    gpt2_directory,
    group,
    open_policy,
    qwen_directory,
    reference_logprobs,
)

SPEC = TrainerSpec("test", learning_rate=1e-2, grad_norm_max=1e9, step_guard=False)
SHAPE = AdapterShape(4, 8.0, ())
MANY = 100_000
MAKERS = [qwen_directory, gpt2_directory]
KINDS = pytest.mark.parametrize("make", MAKERS)
HELD = pytest.mark.parametrize("held", ["float32", "bfloat16"])
CPU = torch.device("cpu")


def rounded(model: Path, directory: Path, *, halves: bool = False) -> Path:
    """The same model with weights that bf16 holds, but for norms and biases; in files of fp32, or
    of bf16 (`halves`), where these are rounded as well."""
    policy = open_policy(model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if halves or parameter.dim() > 1:
                parameter.copy_(parameter.to(torch.bfloat16))
    if halves:
        policy.model.to(torch.bfloat16)
    policy.model.save_pretrained(directory)
    policy.tokenizer.save_pretrained(directory)
    return directory


def adapted(model: Path, held: str, seed: int | None = 3) -> Policy:
    """A policy with an adapter; with a seed, one that makes much of a difference."""
    policy = opened(TrainerSpec(str(model), lora_rank=4, lora_base=held), "cpu")
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for factor in adapters.factors(policy).values():
                factor.normal_(0.0, 0.1, generator=generator)
    return policy


def exported(policy: Policy, directory: Path, precision: str = "") -> Path:
    directory.mkdir()
    if precision:
        checkpoint.export_whole(directory, policy, precision)
    else:
        checkpoint.export(directory, policy)
    return directory


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.model(torch.arange(40).view(2, 20)).logits


def gradients(
    policy: Policy, *, recomputes: bool = False, logits_max: int = MANY
) -> dict[str, torch.Tensor]:
    """Of a batch, by what is trained."""
    trainer = GroupTrainer(policy, SPEC, MANY, recomputes=recomputes)
    trainer.logits_max = logits_max
    trainer.optimizer.zero_grad = lambda **_: None
    batch = [group(policy, "1+2=", ["3", "a longer one"], [1.0, -1.5])]
    trainer.train([*batch, group(policy, "say something", ["a", "b"], [0.5, -1.0])])
    return {name: value.grad for name, value in adapters.factors(policy).items()}


# what is held


@KINDS
def test_weights_are_in_bf16_and_all_that_learns_in_fp32(tmp_path, make):
    policy = adapted(make(tmp_path / "m"), "bfloat16", None)
    trainer = GroupTrainer(policy, SPEC, MANY)
    trainer.train([group(policy, "1+2=", ["3", "4"], [1.0, -1.0])])
    learns = adapters.factors(policy).values()
    moments = [v for state in trainer.optimizer.state.values() for v in state.values()]
    assert {v.dtype for v in (*learns, *moments)} == {torch.float32}
    for name, parameter in policy.model.named_parameters():
        wide = ".default." in name or parameter.dim() == 1  # norms and biases
        assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), name
    assert logits(policy).dtype == torch.float32
    assert policy.precision == "float32"  # what it computes in
    assert adapters.described(policy).endswith(", the base in bfloat16")
    assert opened(TrainerSpec(str(tmp_path / "m"), lora_rank=4), "cpu").adapter.held == "bfloat16"


@KINDS
def test_the_result_is_that_of_fp32_numbers_which_bf16_holds(tmp_path, make):
    """And the gradient is: the same bits would be luck, for products are added in another order."""
    model = make(tmp_path / "m")
    exact = adapted(rounded(model, tmp_path / "r"), "float32")
    ours, other = adapted(model, "bfloat16"), adapted(model, "float32")
    assert torch.equal(logits(ours), logits(exact))
    assert not torch.allclose(logits(ours), logits(other), atol=1e-3)
    assert_close(gradients(ours), gradients(exact))


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_a_product_in_bf16_would_be_noticed(tmp_path, monkeypatch, fault):
    model = gpt2_directory(tmp_path / "m")
    exact = adapted(rounded(model, tmp_path / "r"), "float32")

    def forward(x, weight, bias=None):
        product = functional.linear(x.to(weight.dtype), weight).to(x.dtype)
        return product if bias is None else product + bias

    def backward(ctx, gradient):
        [weight] = ctx.saved_tensors
        return (gradient.to(weight.dtype) @ weight).to(gradient.dtype), None, None

    if fault == "forward":
        monkeypatch.setattr(frozen, "linear", forward)
    else:
        monkeypatch.setattr(frozen._Linear, "backward", staticmethod(backward))
    with pytest.raises(AssertionError):
        assert_close(gradients(adapted(model, "bfloat16")), gradients(exact))


def test_the_lean_pass_and_the_module_have_the_same_gradients(tmp_path, monkeypatch):
    model = qwen_directory(tmp_path / "m")
    quick = gradients(adapted(model, "bfloat16"))
    monkeypatch.setattr(lean, "supports", lambda _: False)
    assert_close(quick, gradients(adapted(model, "bfloat16")))


@KINDS
def test_a_weight_in_parts_gives_the_same_gradients(tmp_path, make, monkeypatch):
    model = make(tmp_path / "m")
    whole, before = gradients(adapted(model, "bfloat16")), logits(adapted(model, "bfloat16"))
    monkeypatch.setattr(frozen, "ROOM_NUMBERS", 200)  # a few rows of a layer
    assert len(frozen._parts(torch.zeros(48, 32))) == 8
    torch.testing.assert_close(logits(adapted(model, "bfloat16")), before, rtol=1e-4, atol=1e-5)
    assert_close(gradients(adapted(model, "bfloat16")), whole)


@KINDS
def test_chunks_and_layers_that_run_twice_change_no_gradient(tmp_path, make):
    model = make(tmp_path / "m")
    whole = gradients(adapted(model, "bfloat16"))
    assert_close(gradients(adapted(model, "bfloat16"), logits_max=3 * 260), whole)
    assert_close(gradients(adapted(model, "bfloat16"), recomputes=True), whole)


def test_no_copy_in_fp32_waits_for_the_backward_pass():
    """Counted by what autograd saves: of a layer in bf16 its weight, and nothing as large."""
    layer = nn.Linear(64, 32, bias=False)
    layer.weight.requires_grad_(False)
    frozen.hold(layer)
    kept: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    x = torch.ones(3, 64, requires_grad=True)
    with hooks:
        out = layer(x)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.bfloat16, 64 * 32)]
    with hooks:  # the planted fault: the obvious way
        functional.linear(x, layer.weight.float())
    assert kept[-1].dtype == torch.float32
    out.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.float().sum(0).expand(3, -1))


def test_what_is_no_layer_of_a_known_kind_stays_in_fp32():
    class Scaled(nn.Embedding):
        """It may do anything with its weight."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = Scaled(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.experts = nn.Parameter(torch.zeros(2, 4, 4))
            self.inner = nn.Linear(4, 4)

    model = Model().requires_grad_(requires_grad=False).to(torch.bfloat16)
    assert frozen.numbers(model) == 16
    frozen.hold(model)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds.pop("inner.weight") == torch.bfloat16
    assert set(kinds.values()) == {torch.float32}


@HELD
def test_engine_and_trainer_say_the_same_of_a_token(tmp_path, monkeypatch, held):
    sampling = Sampling(max_new_tokens=12)
    for make, is_lean in ((qwen_directory, True), (qwen_directory, False), (gpt2_directory, False)):
        if not is_lean:
            monkeypatch.setattr(lean, "supports", lambda _: False)
        policy = adapted(make(tmp_path / f"{make.__name__}-{is_lean}"), held)
        trainer = GroupTrainer(policy, SPEC, MANY)
        [[made]] = generate(policy, ["1+1="], 1, sampling, 3, 0)
        batch = replace(group(policy, "1+1=", ["x"], [1.0]), completions=(made,))
        [[said]] = trainer.logprobs([batch])
        assert said == pytest.approx(made.logprobs, abs=1e-4)
        alone = reference_logprobs(policy, "1+1=", made, sampling)
        assert alone == pytest.approx(made.logprobs, abs=1e-4)


# which base it is


@KINDS
def test_a_base_has_one_hash_whatever_it_is_held_in(tmp_path, make):
    model = make(tmp_path / "m")
    before = adapters.base_hash(open_policy(model).model)
    wide, narrow = adapted(model, "float32"), adapted(model, "bfloat16")
    assert wide.adapter.base == narrow.adapter.base == before
    files = rounded(model, tmp_path / "h", halves=True)
    assert adapters.base_hash(open_policy(files).model) != before
    halves = [adapted(files, held).adapter.base for held in ("float32", "bfloat16")]
    assert set(halves) == {adapters.base_hash(open_policy(files).model)}


def test_an_adapter_goes_from_one_precision_to_another(tmp_path):
    model = qwen_directory(tmp_path / "m")
    wide, narrow = adapted(model, "float32", 1), adapted(model, "bfloat16", 2)
    version = exported(wide, tmp_path / "version")
    load_version(narrow, version)
    theirs, ours = adapters.factors(wide), adapters.factors(narrow)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    saved = tmp_path / "saved"
    saved.mkdir()
    checkpoint.save(saved, wide, GroupTrainer(wide, SPEC, MANY).optimizer, 3)
    fresh = adapted(model, "bfloat16")
    assert checkpoint.load(saved, fresh, GroupTrainer(fresh, SPEC, MANY).optimizer) == 3
    assert torch.equal(logits(fresh), logits(narrow))


def test_a_worker_holds_the_base_as_its_learner_did(tmp_path):
    model = qwen_directory(tmp_path / "m")
    learner = adapted(model, "bfloat16")
    version = exported(learner, tmp_path / "version")
    assert card_of(version).held == "bfloat16"
    worker = open_policy(model)
    load_version(worker, version)
    assert torch.equal(logits(worker), logits(learner))
    set_otherwise = open_policy(model)
    load_version(set_otherwise, version, "float32")
    assert not torch.allclose(logits(set_otherwise), logits(learner), atol=1e-3)
    for held in (None, "float32"):  # by way of the process that serves it
        core = TrainerCore(TrainerSpec(str(model), lora_base=held, threads=1))
        core.load(version, 1)
        assert core.policy.adapter.held == (held or "bfloat16")
        assert core.policy.is_narrow == (held is None)


def _told(version: Path, **changes: object) -> None:
    record = json.loads((version / BASE_FILE).read_text()) | changes
    kept = {name: value for name, value in record.items() if value is not None}
    (version / BASE_FILE).write_text(json.dumps(kept))


def test_a_version_that_does_not_say_was_trained_over_fp32(tmp_path):
    model = qwen_directory(tmp_path / "m")
    learner = adapted(model, "float32")
    version = exported(learner, tmp_path / "version")
    _told(version, held=None)
    worker = open_policy(model)
    load_version(worker, version)
    assert torch.equal(logits(worker), logits(learner))
    _told(version, held="4bit")  # which this machine has no GPU for
    worker = open_policy(model)
    load_version(worker, version)
    assert worker.adapter.held == "bfloat16"
    _told(version, held="2bit")
    with pytest.raises(ConfigError, match=r"base.json: held = '2bit' is not known here"):
        load_version(open_policy(model), version)


def test_files_of_bf16_are_never_wholly_in_fp32(tmp_path, monkeypatch):
    wide = qwen_directory(tmp_path / "m")
    files = rounded(wide, tmp_path / "h", halves=True)
    asked: list[torch.dtype] = []
    load = AutoModelForCausalLM.from_pretrained

    def watched(model, dtype, **more):
        asked.append(dtype)
        return load(model, dtype=dtype, **more)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    for model, held, wanted in (
        (files, "bfloat16", torch.bfloat16),
        (files, "float32", torch.float32),
        (wide, "bfloat16", torch.float32),
    ):
        policy = adapted(model, held)
        assert asked.pop() == wanted
        assert {b.dtype for b in policy.model.buffers()} <= {torch.float32}
    assert torch.equal(logits(adapted(files, "bfloat16")), logits(adapted(files, "float32")))
    plain = open_policy(files)
    assert {p.dtype for p in plain.model.parameters()} == {torch.float32}

    def with_buffer(model, dtype, **more):
        network, told = watched(model, dtype, **more)
        network.register_buffer("scale", torch.ones(1, dtype=dtype), persistent=False)
        return network, told

    asked.clear()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", with_buffer)
    adapted(files, "bfloat16")
    assert asked == [torch.bfloat16, torch.float32]


# what is written


@KINDS
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_whole_export_is_merged_in_fp32_of_what_is_held_here(tmp_path, make, precision):
    policy = adapted(make(tmp_path / "m"), "bfloat16")
    before = logits(policy)
    whole = exported(policy, tmp_path / "whole", precision)
    assert torch.equal(logits(policy), before)
    tensors = load_file(whole / "model.safetensors")
    wanted = getattr(torch, precision)
    assert {value.dtype for value in tensors.values()} == {wanted}
    assert json.loads((whole / "config.json").read_text())["dtype"] == precision
    with adapters.merged(policy):
        state = policy.model.state_dict()
        as_told = to_bfloat16 if wanted == torch.bfloat16 else torch.Tensor.float
        assert all(torch.equal(tensors[name], as_told(state[name])) for name in tensors)
    near = {"float32": 1e-4, "bfloat16": 0.5}[precision]
    torch.testing.assert_close(logits(open_policy(whole)), before, rtol=1e-3, atol=near)


# memory


@KINDS
def test_the_plan_counts_what_is_held(tmp_path, make):
    model = str(make(tmp_path / "m"))
    policy = adapted(Path(model), "bfloat16")
    halved = sum(p.numel() for p in policy.model.parameters() if p.dtype == torch.bfloat16)
    wide = TrainerSpec(model, memory_bytes_max=2**34, lora_rank=4, lora_base="float32")
    plans = {held: memory.plan(replace(wide, lora_base=held)) for held in ("float32", "bfloat16")}
    assert plans["float32"].held_bytes - plans["bfloat16"].held_bytes == 2 * halved
    assert memory.plan(replace(wide, lora_base=None)) == plans["bfloat16"]
    assert memory.shape_of(model).is_lean == (make is qwen_directory)
    shapes = [memory.shape_of(model, SHAPE, held) for held in ("bfloat16", "4bit")]
    linear = sum(
        layer.base_layer.weight.numel()
        for _, _, layer in adapters._adapted(policy.model)
        if type(layer.base_layer) is nn.Linear
    )
    assert shapes[1].spared_bytes - shapes[0].spared_bytes == int((2 - 0.5625) * linear)


def test_autocast_keeps_two_bytes_of_all_but_norms():
    shape = memory.ModelShape(134_515_008, 30, 576, 1536, 9, 49_152)
    in_bf16 = replace(shape, number_bytes=2)
    tokens = memory.estimate_bytes(shape, 4096) - memory.estimate_bytes(shape, 2048)
    halved = memory.estimate_bytes(in_bf16, 4096) - memory.estimate_bytes(in_bf16, 2048)
    numbers = 13 * 576 + 4 * 1536 + 8 * 9
    assert tokens == 2048 * 30 * 4 * numbers
    assert halved == 2048 * 30 * (2 * numbers + 2 * 6 * 576)


# settings and refusals


def test_four_bits_are_refused_in_a_line_that_says_what_to_set(tmp_path, monkeypatch):
    model = str(qwen_directory(tmp_path / "m"))
    spec = TrainerSpec(model, lora_rank=4, lora_base="4bit", device="cpu")
    for ask in (lambda: opened(spec, "cpu"), lambda: memory.plan(spec)):
        with pytest.raises(ConfigError, match=r"on an NVIDIA GPU, and this policy is on the cpu"):
            ask()
    with pytest.raises(ConfigError, match=r"4bit.*cpu: set lora_base = 'bfloat16'") as caught:
        load_version(open_policy(Path(model)), _version(tmp_path), "4bit")
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not there
    with pytest.raises(ConfigError, match=r"pip install 'bitsandbytes") as caught:
        frozen.check("4bit", torch.device("cuda"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="of several ranks holds the base in float32"):
        memory.plan(spec, Ranks(0, 2, 0, 2, 0))
    frozen.check("bfloat16", CPU)


def _version(directory: Path) -> Path:
    model = qwen_directory(directory / "m")
    return exported(adapted(model, "float32"), directory / "version")


def test_the_setting_reaches_the_trainer():
    def base(**settings: str) -> str | None:
        config = load_config({"lora_rank": "4", **settings}, {})
        return models.trainer_spec(config, "model").lora_base

    assert load_config({}, {}).lora_base == "bfloat16"
    assert base() is None  # bf16 where an adapter is trained, as its learner had it where loaded
    assert base(lora_base="float32") == "float32"
    for wrong in ({"lora_base": "8bit"}, {"lora_base": "int8"}):
        with pytest.raises(ConfigError, match="lora"):
            load_config(wrong, {})


def test_a_rounded_base_is_not_far_from_its_own(tmp_path):
    """How much the default costs where a model's files are in fp32: a weight's last 16 bits."""
    policy = adapted(qwen_directory(tmp_path / "m"), "bfloat16", None)
    whole = open_policy(tmp_path / "m")
    apart = (logits(policy).log_softmax(-1) - logits(whole).log_softmax(-1)).abs()
    assert 0 < float(apart.mean()) < 0.1
    assert math.isfinite(float(apart.max()))
