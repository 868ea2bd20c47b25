"""Log-probs without all logits at once, and layers that run twice: losses and gradients stay."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from node.config.load import load_config
from node.interfaces.trainer_spec import TrainerSpec
from node.methods import losses
from node.methods.chunks import LOGITS_MAX, chunk_tokens, in_chunks, recompute_layers
from node.policies import lean
from node.policies.policy import Policy
from node.train.memory import ModelShape, estimate_bytes, fit
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError
from tests.unit.small_models import made
from tests.unit.training_support import (
    gpt2_directory,
    group,
    mamba_directory,
    open_policy,
    qwen_directory,
)

SPEC = TrainerSpec(
    "test", grad_norm_max=1e9, step_guard=False, clips_to_median=False, updates_per_batch=1
)
MANY = 100_000  # tokens: one micro-batch
MAKERS = (qwen_directory, gpt2_directory, mamba_directory)


def batch(policy: Policy):
    return [
        group(policy, "1+1=", ["2", "13", "a longer answer"], [1.0, -1.5, 0.5]),
        group(policy, "say something longer:", ["a", "bb"], [0.5, -0.5]),
    ]


def update(directory, *, logits_max: int = LOGITS_MAX, recomputes: bool = False):
    """Loss and gradient of a batch: a step of plain gradient descent."""
    policy = open_policy(directory)
    before = [p.detach().clone() for p in policy.model.parameters()]
    trainer = GroupTrainer(policy, SPEC, MANY, recomputes=recomputes)
    trainer.logits_max = logits_max
    trainer.optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)
    report = trainer.train(batch(policy))
    after = policy.model.parameters()
    pairs = zip(before, after, strict=True)
    return report, torch.cat([(b - a.detach()).flatten() for b, a in pairs]), trainer


@pytest.mark.parametrize("make", MAKERS)
def test_chunks_change_no_loss_and_no_gradient_but_for_rounding(tmp_path, make, monkeypatch):
    directory = make(tmp_path)
    whole, gradient, _ = update(directory)
    largest = []
    seen = losses.token_logprobs

    def watched(logits, targets):
        largest.append(logits.numel())
        return seen(logits, targets)

    monkeypatch.setattr(losses, "token_logprobs", watched)
    for tokens in (1, 3, 16):
        largest.clear()
        report, ours, trainer = update(directory, logits_max=tokens * 260)
        assert max(largest) <= tokens * trainer.policy.vocabulary
        assert report.loss == pytest.approx(whole.loss, abs=1e-5)
        assert report.own_logprob == pytest.approx(whole.own_logprob, abs=1e-5)
        assert torch.allclose(ours, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory])
def test_layers_that_run_twice_change_no_loss_and_no_gradient(tmp_path, make):
    directory = make(tmp_path)
    whole, gradient, _ = update(directory)
    report, ours, trainer = update(directory, recomputes=True)
    assert trainer._recomputes
    assert report.loss == pytest.approx(whole.loss, abs=1e-5)
    assert torch.allclose(ours, gradient, rtol=1e-4, atol=1e-5)


def test_a_layer_that_runs_twice_keeps_its_input_alone():
    """Counted by what autograd saves."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(self.inner(x))

    class Model(torch.nn.Module):
        _no_split_modules = ("Layer",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(Layer(), Layer())

    def saved(model: Model) -> int:
        kept = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        )
        with hooks:
            model.layers(torch.ones(100, 8, requires_grad=True)).sum()
        return sum(kept)

    model = Model()
    before = saved(model)
    assert recompute_layers(model)
    assert saved(model) < before / 3
    assert not recompute_layers(torch.nn.Linear(2, 2))  # names none


def test_a_model_that_caps_its_logits_goes_its_own_way(tmp_path):
    policy = open_policy(qwen_directory(tmp_path))
    trainer = GroupTrainer(policy, SPEC, MANY)
    assert trainer._plain_head() is policy.model.get_output_embeddings()
    forward = policy.model.forward

    def capped(*args, **kwargs):
        found = forward(*args, **kwargs)
        found.logits = 2.0 * torch.tanh(found.logits / 2.0)
        return found

    policy.model.forward = capped
    assert GroupTrainer(policy, SPEC, MANY)._plain_head() is None


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "minicpm3"])
def test_so_does_one_that_does_more_to_logits_however_small_they_are(kind):
    """A cap or a scale, also of weights that have learned nothing."""
    policy = replace(made(kind), model=deepcopy(made(kind).model))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(1e-2)
    assert GroupTrainer(policy, SPEC, MANY)._plain_head() is None
    policy.model.config.get_text_config().final_logit_softcapping = None
    if kind == "gemma2":
        assert GroupTrainer(policy, SPEC, MANY)._plain_head() is not None


def test_one_chunk_of_all_is_no_chunk():
    hidden, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 4])
    head = torch.nn.Linear(4, 6, bias=False)
    whole = losses.token_logprobs(head(hidden), targets)
    assert torch.equal(in_chunks(head, hidden, targets, losses.token_logprobs, 5), whole)
    with torch.no_grad():
        parts = in_chunks(head, hidden, targets, losses.token_logprobs, 2)
    assert torch.allclose(parts, whole, atol=1e-6)
    assert (chunk_tokens(49_152), chunk_tokens(2**30)) == (170, 1)


# --- the plan -----------------------------------------------------------------------------------

SMOL = ModelShape(134_515_008, 30, 576, 1536, 9, 49_152)
SMALL = ModelShape(31_991_296, 8, 512, 1408, 8, 16_384, is_lean=True)
LARGE = ModelShape(361_825_216, 32, 960, 2560, 15, 49_152, is_lean=True)


def test_layers_run_twice_only_where_it_would_not_fit_otherwise():
    enough = estimate_bytes(SMOL, 2048)
    assert not fit(SMOL, 2048, enough, "m", recomputing="auto").recomputes
    tight = fit(SMOL, 2048, enough - 1, "m", recomputing="auto")
    assert tight.recomputes
    assert tight.micro_batch_tokens == 2048
    assert not fit(SMOL, 2048, enough - 1, "m", recomputing="off").recomputes
    assert fit(SMOL, 2048, enough - 1, "m", recomputing="off").micro_batch_tokens == 1024
    assert fit(SMOL, 256, 2**40, "m", recomputing="on").recomputes
    assert not fit(SMOL, 16_384, enough, "m", recomputing="auto").recomputes  # halved instead
    assert tight.row_tokens_max > fit(SMOL, 2048, enough, "m").row_tokens_max


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"activation.checkpointing"):
        load_config({"activation_checkpointing": "never"}, {})


@pytest.mark.parametrize(
    ("shape", "tokens", "recomputes", "measured_mib"),
    [
        ("smol", 512, False, 3_343),
        ("smol", 2048, False, 5_386),
        ("smol", 3072, False, 6_778),
        ("smol", 512, True, 2_651),
        ("smol", 2048, True, 2_622),
        ("smol", 3072, True, 2_667),
        ("small", 2048, False, 1_958),
        ("small", 8192, False, 4_612),
        ("small", 2048, True, 1_007),
        ("small", 8192, True, 1_407),
        ("large", 2048, False, 12_043),
    ],
)
def test_the_plan_is_near_what_was_measured(shape, tokens, recomputes, measured_mib):
    """SmolLM2, and random weights of 32 and 362 million, on a CPU; see BENCHMARKS.md."""
    shapes = {"smol": SMOL, "small": SMALL, "large": LARGE}
    planned = estimate_bytes(shapes[shape], tokens, recomputes=recomputes, is_one_row=True)
    assert planned / 2**20 == pytest.approx(measured_mib, rel=0.15)


# With an adapter of rank 16 over a base in bf16: the preset `tiny`, and 32 million random numbers.
TINY = ModelShape(
    1_058_624, 2, 192, 704, 6, 260,
    adapter_parameters=126_976, spared_bytes=2_115_072, is_lean=True,
)  # fmt: skip


LARGER = ModelShape(
    31_991_296, 8, 512, 1408, 8, 16_384,
    adapter_parameters=1_196_032, spared_bytes=63_963_136, is_lean=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "tokens", "measured_mib"),
    [(TINY, 512, 450), (TINY, 1000, 529), (LARGER, 512, 938), (LARGER, 2048, 1404)],
)
def test_the_plan_of_an_adapter_is_near_what_was_measured(shape, tokens, measured_mib):
    planned = estimate_bytes(shape, tokens, 1.0, is_one_row=True) / 2**20
    assert planned == pytest.approx(measured_mib, rel=0.15)


def test_scores_are_bounded_and_a_row_that_has_more_takes_another_way():
    most = 4 * lean.SCORES_MAX * (1 + 2.5 / 2)
    plain = replace(TINY, is_lean=False)
    for tokens in (2_300, 2_400, 16_384):
        more = estimate_bytes(TINY, tokens, 1.0) - estimate_bytes(plain, tokens, 1.0)
        scores = 2 * 6 * tokens**2
        assert more == (4 * scores * 2.25 if scores <= lean.SCORES_MAX else most)
        one = estimate_bytes(TINY, tokens, 1.0, is_one_row=True)
        assert (one > estimate_bytes(plain, tokens, 1.0)) == (scores <= lean.SCORES_MAX)
    twice = [estimate_bytes(each, 512, 1.0, recomputes=True) for each in (TINY, plain)]
    assert twice[0] == twice[1]
