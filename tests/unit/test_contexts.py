"""How long a model's texts may be, where its rotations change beyond a length."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from node.interfaces.contexts import context_in
from node.policies.policy import load_policy
from node.policies.tiny import byte_tokenizer

LONG: dict[str, Any] = {"max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, None),
        (LONG, 4096),
        ({"n_positions": 8}, 8),
        (LONG | {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, 4096),
        (LONG | {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, 64),
        (
            LONG
            | {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 9}},
            9,
        ),
        (
            LONG
            | {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "longrope",
                        "original_max_position_embeddings": 7,
                    },
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            7,
        ),
    ],
)
def test_a_text_ends_where_rotations_would_change(
    config: dict[str, Any], tokens: int | None
) -> None:
    assert context_in(config) == tokens


def test_a_long_text_would_change_what_is_said_beside_it(tmp_path) -> None:
    """So a policy takes none."""
    tokenizer = byte_tokenizer()
    rope = {"rope_type": "longrope", "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
    config = AutoConfig.for_model(
        "phi3", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=rope,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.arange(80)[None] + 30
    with torch.no_grad():
        short, long = (model(ids[:, :width]).logits[0, :60] for width in (64, 80))
    assert float((short - long).abs().max()) > 1e-3
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_policy(str(tmp_path)).context_tokens == 64
