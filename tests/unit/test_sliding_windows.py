"""Prompts of unlike lengths, far longer than a model's window, beside each other: what is recorded
and what is trained is what a model says of each prompt alone."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from node.engines.drafts import DraftGeneration
from node.engines.torch_engine import Generation, TurnGeneration
from node.interfaces.engine import Context, Sampling, plain_requests
from node.interfaces.trainer import TrainingGroup
from node.interfaces.trainer_spec import TrainerSpec
from node.methods.drafts import Draft
from node.methods.generation import Speculative
from node.policies import lean
from node.policies.policy import Policy, tokenizer_fingerprint
from node.policies.tiny import byte_tokenizer
from node.train.trainer import GroupTrainer
from swarm.rollouts import Completion, FinishReason
from tests.unit.training_support import gradients

WINDOW = 16
NATS = 1e-5
EACH, TOKENS = 3, 24
PROMPTS = ("1+1=", "a prompt of some forty letters, no more.", "x" + " and so on" * 9, "two")
SAMPLING = Sampling(temperature=1.0, max_new_tokens=TOKENS)
SPEC = TrainerSpec("test", grad_norm_max=1e9, step_guard=False)
MANY, FEW = 100_000, 40  # tokens: one micro-batch, one for each row
SOME_EACH: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
NONE: dict[str, Any] = {"sliding_window": None}
WINDOWS: dict[str, dict[str, Any]] = {
    "cohere2": SOME_EACH,
    "exaone4": SOME_EACH,
    "gemma2": {},
    "gemma3_text": SOME_EACH,
    "gpt_neo": NONE
    | {"num_layers": 2, "attention_types": [[["local", "global"], 1]], "window_size": "window"},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "llama4_text": {"attention_chunk_size": "window", "num_local_experts": 2},
    "ministral": SOME_EACH,
    "mistral": {},
    "olmo3": SOME_EACH,
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "starcoder2": {},
}
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": NONE | {"n_layer": 2, "n_head": 4},  # this and the next two: biases by distance
    "falcon": NONE | {"alibi": True, "new_decoder_architecture": False, "head_dim": None},
    "mpt": NONE | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "lfm2": NONE | {"layer_types": ["conv", "full_attention"]},  # this and the next: a state
    "minimax": NONE | {"layer_types": ["linear_attention", "full_attention"]},
    "llama": NONE,  # the lean pass
}
KINDS = WINDOWS | OTHERS


@cache
def made(kind: str, window: int = WINDOW) -> Policy:
    """A random model of two small layers."""
    tokenizer = byte_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 256, "sliding_window": "window",
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings |= KINDS[kind]
        told = {name: window if value == "window" else value for name, value in settings.items()}
        told = {name: value for name, value in told.items() if value is not None}
        config = AutoConfig.for_model(kind, **told)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # random weights alone are nearly uniform
                parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)
    eos = tokenizer.eos_token_id
    return Policy(
        kind, model, tokenizer, tokenizer_fingerprint(tokenizer), 256, frozenset({eos}), eos,
        torch.device("cpu"),
    )  # fmt: skip


@pytest.fixture(params=KINDS)
def policy(request) -> Policy:
    return made(request.param)


def alone(policy: Policy, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs of a model that sees nothing else, in one plain pass."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    said = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
    return said.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def off(policy: Policy, prompt: Sequence[int], completion: Completion) -> float:
    """By how many nats a log-prob of a completion is not the model's, at most."""
    said = alone(policy, prompt, completion.token_ids)
    return float((said - torch.tensor(completion.logprobs)).abs().max())


def sampled(generation: Generation, steps: int = TOKENS) -> list[Completion]:
    while not generation.done:
        generation.advance(steps, 1)
    return [each for group in generation.completions() for each in group]


def prompts(policy: Policy) -> list[list[int]]:
    return [policy.encode_prompt(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", WINDOWS)
def test_these_models_have_a_window(kind):
    """That the tests below can fail: the same weights say something else without it."""
    prompt, tokens = prompts(made(kind))[2], [70] * 9
    near, far = alone(made(kind), prompt, tokens), alone(made(kind, 256), prompt, tokens)
    assert float((near - far).abs().max()) > 100 * NATS


def test_recorded_log_probs_are_those_of_each_prompt_alone(policy):
    made = sampled(Generation(policy, plain_requests(PROMPTS, EACH), SAMPLING, seed=1))
    owners = [prompt for prompt in prompts(policy) for _ in range(EACH)]
    pairs = zip(owners, made, strict=True)
    assert max(off(policy, prompt, each) for prompt, each in pairs) < NATS


def test_so_they_are_after_new_weights_in_mid_completion(policy):
    generation = Generation(policy, plain_requests(PROMPTS, EACH), SAMPLING, seed=1)
    generation.advance(TOKENS // 2, 1)
    generation.weights_changed()
    owners = [prompt for prompt in prompts(policy) for _ in range(EACH)]
    pairs = zip(owners, sampled(generation), strict=True)
    assert max(off(policy, prompt, each) for prompt, each in pairs) < NATS


def test_so_they_are_where_drafts_are_kept_to_unlike_lengths(policy):
    made = sampled(Generation(policy, plain_requests(PROMPTS, EACH), SAMPLING, seed=1))
    texts = [prompt for prompt in PROMPTS for _ in range(EACH)]
    drafts = [
        Draft(text, each.token_ids, tuple(value + 0.1 for value in each.logprobs))
        for text, each in zip(texts, made, strict=True)
    ]
    again = sampled(DraftGeneration(policy, drafts, Speculative(lenience=0.0), SAMPLING, seed=2))
    assert len({each.splices for each in again}) > 3
    pairs = zip(texts, again, strict=True)
    assert max(off(policy, policy.encode_prompt(text), each) for text, each in pairs) < NATS


def test_so_they_are_in_second_turns(policy):
    said = [policy.encode_completion("well, " * n) for n in range(1, 5)]
    contexts = [
        Context(prompt, (((*ids, policy.eos_id), "go on"),), TOKENS)
        for prompt, ids in zip(PROMPTS, said, strict=True)
    ]
    made = sampled(TurnGeneration(policy, contexts, SAMPLING, seed=1))
    befores = [policy.encode_turns(each.prompt, each.turns) for each in contexts]
    pairs = zip(befores, made, strict=True)
    assert max(off(policy, before, each) for before, each in pairs) < NATS


def groups(policy: Policy) -> list[TrainingGroup]:
    """Of unlike prompts, each with completions of unlike lengths."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        ids = [
            (*policy.encode_completion("so it is " * (n + number)), policy.eos_id) for n in range(3)
        ]
        texts = [policy.decode(list(each)) for each in ids]
        completions = tuple(
            Completion(text, each, (-1.0,) * len(each), FinishReason.STOP, 0)
            for text, each in zip(texts, ids, strict=True)
        )
        found.append(TrainingGroup(prompt, completions, (1.0, -0.5, -0.5), True))
    return found


def trained(policy: Policy, trainer: GroupTrainer) -> tuple[float, torch.Tensor]:
    """By how many nats a pass over the batch is off, and the gradient of one batch."""
    units = trainer._encoder.prepare(groups(policy)).units
    worst = 0.0
    for batch in trainer._micro_batches(units):
        rows = [(unit.prompt, row.tokens) for unit in batch for row in unit.rows]
        with torch.no_grad():
            found = trainer._forward(batch)
        for (prompt, tokens), values in zip(rows, found, strict=True):
            worst = max(worst, float((alone(policy, prompt, tokens) - values).abs().max()))
    trainer.optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
    seen: list[torch.Tensor] = []
    trainer._clipped_gradient = lambda: seen.append(gradient(policy)) or 1.0  # type: ignore[func-returns-value]
    trainer.train(groups(policy))
    return worst, seen[0]


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([each.flatten() for each in gradients(policy).values()])


def test_every_pass_of_the_trainer_is_the_plain_one_and_has_one_gradient(policy, monkeypatch):
    """Shared or lean; a row at a time; completions one by one; layers run again."""
    worst, whole = trained(policy, GroupTrainer(policy, SPEC, MANY))
    assert worst < NATS
    for name in ("packed", "shared", "plain", "recomputed"):
        with monkeypatch.context() as patch:
            chosen = policy
            if name == "shared":
                patch.setattr(lean, "SCORES_MAX", 0)
            if name == "recomputed":
                chosen = replace(policy, model=deepcopy(policy.model))
            trainer = GroupTrainer(
                chosen, SPEC, FEW if name == "packed" else MANY, recomputes=name == "recomputed"
            )
            if name == "plain":
                patch.setattr(trainer, "_shared", trainer._plain)
                patch.setattr(trainer, "_lean", trainer._plain)
            far, other = trained(chosen, trainer)
        assert far < NATS, name
        assert float((whole - other).norm() / whole.norm()) < NATS, name
