"""Policies that are small and that vLLM takes: it wants heads of at least 32."""

from contextlib import AbstractAsyncContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from node.engines.vllm.engine import VllmEngine, open_vllm
from node.engines.vllm.server import ServerSettings
from node.interfaces.adapter_files import AdapterShape
from node.policies import adapters, checkpoint
from node.policies.policy import load_policy
from node.policies.tiny import byte_tokenizer

VLLM_TIMEOUT_S = 900.0  # to start a server and use it: a busy machine starves it
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model_directory(
    directory: Path,
    seed: int,
    *,
    tied: bool = True,
    chat: bool = False,
    moe: bool = False,
    stops: bool = True,
    context_tokens: int = 128,
) -> Path:
    """A small policy that is far from uniform. With `stops` many tokens end a completion besides
    the usual one; with `moe` it is a mixture of experts."""
    tokenizer = byte_tokenizer()
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    config_type: Any = Qwen3MoeConfig if moe else Qwen3Config
    config = config_type(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=context_tokens, tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(EXPERTS if moe else {}),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)(config)
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    if stops:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, 60, 2)]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def adapter_directory(model: Path, directory: Path, seed: int) -> Path:
    """A version that is an adapter on a model, and makes much of a difference to it."""
    policy = load_policy(str(model), "cpu")
    adapters.attach(policy, AdapterShape(4, 8.0, ()), 0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factor in adapters.factors(policy).values():
            factor.normal_(0.0, 0.15, generator=generator)
    directory.mkdir(parents=True)
    checkpoint.export(directory, policy)
    return directory


def open_model(model: Path, data: Path, **options: Any) -> AbstractAsyncContextManager[VllmEngine]:
    """`open_vllm` with the fields of `ServerSettings` among the options."""
    names = {field.name for field in fields(ServerSettings)} & options.keys()
    settings = ServerSettings(**{name: options.pop(name) for name in names})
    return open_vllm(model, data, settings, **options)
