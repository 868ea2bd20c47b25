"""docs/gpus.md: its table is what the memory planner says.

python -m tests.unit.test_gpu_page      prints it
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from node.interfaces.adapter_files import AdapterShape, Held
from node.train import memory
from swarm.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "gpus.md"
CARDS_GIB = (6, 8, 10, 12, 16, 24, 32, 48, 80, 141)
TOKENS = 2048  # in a micro-batch
LORA = AdapterShape(16, 32.0, ())
WAYS: dict[str, tuple[AdapterShape | None, Held, float]] = {
    "whole model": (None, "float32", memory._COPIES),
    "adapter over bf16": (LORA, "bfloat16", memory._FROZEN),
    "adapter over 4 bits": (LORA, "4bit", memory._FROZEN),
}


def sized(
    kind: type[PreTrainedConfig], vocabulary: int,
    hidden: int, layers: int, heads: int, kv: int, inter: int, **more: Any,
) -> PreTrainedConfig:  # fmt: skip
    return kind(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, intermediate_size=inter,
        **{"vocab_size": vocabulary, "tie_word_embeddings": True, **more},
    )  # fmt: skip


qwen, llama = partial(sized, Qwen2Config, 151_936), partial(sized, LlamaConfig, 49_152)
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
# The sizes in the `config.json` of each
MODELS: dict[str, PreTrainedConfig] = {
    "SmolLM2-135M": llama(576, 30, 9, 3, 1536),
    "SmolLM2-360M": llama(960, 32, 15, 5, 2560),
    "Qwen2.5-0.5B": qwen(896, 24, 14, 2, 4864),
    "Qwen2.5-1.5B": qwen(1536, 28, 12, 2, 8960),
    "SmolLM2-1.7B": llama(2048, 24, 32, 32, 8192),
    "Qwen2.5-3B": qwen(2048, 36, 16, 2, 11_008),
    "Qwen2.5-7B": qwen(3584, 28, 28, 4, 18_944, vocab_size=152_064, **UNTIED),
    "Llama-3.1-8B": llama(4096, 32, 32, 8, 14_336, vocab_size=128_256, **UNTIED),
}


def need(name: str, way: str) -> str:
    """The estimate in GiB and the smallest card whose usable part holds it."""
    adapter, held, copies = WAYS[way]
    shape = memory.shape_of_network(memory.without_weights(MODELS[name]), name, adapter, held)
    shape = memory.replace(shape, number_bytes=memory._HALF, is_lean=False)  # as on a GPU
    for card in CARDS_GIB:
        usable = int(memory._USABLE * card * 2**30)
        try:
            plan = memory.fit(shape, TOKENS, usable, name, copies, "auto")
        except ConfigError:
            continue
        if plan.micro_batch_tokens == TOKENS:
            again = ", layers twice" if plan.recomputes else ""
            return f"{plan.estimate_bytes / 2**30:.1f}: {card} GiB{again}"
    return "none of these"


def row(name: str) -> str:
    return f"| {name} | {' | '.join(need(name, way) for way in WAYS)} |"


@pytest.mark.parametrize("name", MODELS)
def test_the_table_is_what_the_planner_says(name: str) -> None:
    assert row(name) in PAGE.read_text().splitlines()


def test_the_models_have_the_sizes_in_their_names() -> None:
    sizes = {"135M": 134.5e6, "360M": 361.8e6, "1.7B": 1.711e9, "0.5B": 494e6}
    sizes |= {"1.5B": 1.544e9, "3B": 3.086e9, "7B": 7.616e9, "8B": 8.030e9}
    for name, config in MODELS.items():
        parameters = memory.shape_of_network(memory.without_weights(config), name).parameters
        assert parameters == pytest.approx(sizes[name.rpartition("-")[2]], rel=0.002)


if __name__ == "__main__":
    print(f"| Model | {' | '.join(WAYS)} |")  # noqa: T201 - a program
    print("|---|---|---|---|")  # noqa: T201
    for each in MODELS:
        print(row(each))  # noqa: T201
