"""Policies that are small and that vLLM takes: it wants heads of at least 32."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from node.training.tiny import byte_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model_directory(directory: Path, seed: int, *, tied: bool = True, chat: bool = False) -> Path:
    """A small policy that is far from uniform, and stops at many tokens besides the usual one."""
    tokenizer = byte_tokenizer()
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=tied, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, 60, 2)]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
