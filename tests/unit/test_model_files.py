"""A model directory whose files are not what its configuration says, or that brings code."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from node.hosting.models import code_note
from node.policies import chat, checkpoint
from node.policies.policy import load_policy
from node.policies.tiny import byte_tokenizer
from node.train.memory import shape_of
from swarm.errors import ConfigError
from swarm.weights.delta import names_code
from tests.unit.training_support import gpt2_directory, open_policy, qwen_directory

CODE = "raise SystemExit('this code ran')\n"


def llama_directory(directory: Path, *, tied: bool = False, kind: str = "llama") -> Path:
    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=tied,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def change(directory: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    how(tensors)
    save_file(tensors, file, {"format": "pt"})


def configure(directory: Path, **told: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | told))


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_policy(str(directory), "cpu")
    told = str(caught.value)
    assert "\n" not in told
    assert str(directory) in told
    return told


# tensors

NORM = "model.layers.1.input_layernorm.weight"


def test_a_missing_tensor_is_named(tmp_path):
    model = llama_directory(tmp_path)
    change(model, lambda tensors: tensors.pop(NORM))
    assert f"lack tensors that its config.json describes: {NORM}" in refused(model)


def test_an_untied_head_without_a_tensor_is_named(tmp_path):
    model = llama_directory(tmp_path)
    change(model, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refused(model)


def test_renamed_layers_are_named_a_few_of_them(tmp_path):
    model = llama_directory(tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("layers", "blocks")] = tensors.pop(name)

    change(model, rename)
    told = refused(model)
    assert "model.layers.0." in told
    assert "and 15 more" in told


def test_fewer_layers_than_the_files_have_are_named(tmp_path):
    model = llama_directory(tmp_path)
    configure(model, num_hidden_layers=1)
    told = refused(model)
    assert "hold tensors that its config.json does not describe: model.layers.1." in told


def test_another_shape_is_named(tmp_path):
    model = llama_directory(tmp_path)
    change(model, lambda tensors: tensors.update({NORM: torch.ones(31)}))
    assert f"tensor {NORM} is (31,) in its files and (32,) by its config.json" in refused(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_named(tmp_path, value):
    model = llama_directory(tmp_path)
    change(model, lambda tensors: tensors[NORM].__setitem__(3, value))
    assert f"tensor {NORM} holds numbers that are not finite" in refused(model)


def test_large_numbers_are_finite(tmp_path):
    model = llama_directory(tmp_path)
    change(model, lambda tensors: tensors[NORM].fill_(3e38))
    load_policy(str(model), "cpu")


def test_versions_with_such_numbers_change_nothing(tmp_path):
    policy = open_policy(llama_directory(tmp_path / "a"))
    version = llama_directory(tmp_path / "b")
    change(version, lambda tensors: tensors[NORM].__setitem__(3, float("nan")))
    before = policy.model.state_dict()[NORM].clone()
    with pytest.raises(ConfigError, match=f"{NORM} holds numbers that are not finite"):
        policy.load_weights(version)
    assert torch.equal(policy.model.state_dict()[NORM], before)


def test_an_index_of_other_files_beside_a_whole_model_is_refused(tmp_path):
    model = llama_directory(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
    network.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    for path in (tmp_path / "shards").iterdir():
        if path.name != "config.json":
            path.rename(model / path.name)
    assert "model.safetensors and an index of other files" in refused(model)
    (model / "model.safetensors").unlink()
    load_policy(str(model), "cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3_text", "mistral", "phi3"])
def test_whole_models_load_tied_or_not(tmp_path, kind, tied):
    policy = open_policy(llama_directory(tmp_path / "model", tied=tied, kind=kind))
    (tmp_path / "out").mkdir()
    checkpoint.export_whole(tmp_path / "out", policy)
    open_policy(tmp_path / "out")


@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory])
def test_buffers_of_old_releases_are_nothing_to_speak_of(tmp_path, make):
    model = make(tmp_path)
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "transformer.h.0.attn.masked_bias": torch.ones(1),
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
    }
    kept = {
        name: value for name, value in old.items() if ("h.0" in name) == (make is gpt2_directory)
    }
    change(model, lambda tensors: tensors.update(kept))
    load_policy(str(model), "cpu")


# code


def with_code(model: Path, *, known: bool) -> Path:
    """A model directory with code of its own; `known`: of a class that transformers has as well."""
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    configure(model, auto_map=names, **({} if known else {"model_type": "nobodys"}))
    (model / "own.py").write_text(CODE)
    path = model / "tokenizer_config.json"
    tokenizer = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer))
    return model


def test_code_of_a_known_model_is_not_run_and_not_named_any_further(tmp_path):
    model = with_code(qwen_directory(tmp_path / "model"), known=True)
    assert "config.json names code of its own, which is not run" in str(code_note(model))
    policy = open_policy(model)
    shape_of(str(model))
    (tmp_path / "out").mkdir()
    checkpoint.export_whole(tmp_path / "out", policy)
    assert names_code(tmp_path / "out") is None
    assert code_note(tmp_path / "out") is None


def test_a_model_that_needs_its_code_is_refused(tmp_path):
    model = with_code(qwen_directory(tmp_path), known=False)
    assert "code that comes with a model (auto_map) is never run" in refused(model)
    with pytest.raises(ConfigError, match="never run"):
        shape_of(str(model))


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_nobody_is_asked_whether_code_may_run(tmp_path, known):
    """Whatever comes by standard input, or never comes: a question would be answered, or wait."""
    model = with_code(qwen_directory(tmp_path), known=known)
    command = [sys.executable, "-m", "node.policies.chat", str(model), "--max-new-tokens", "2"]
    answered = subprocess.run(command, input="1\ny\n", capture_output=True, text=True, check=False)
    assert "this code ran" not in answered.stdout + answered.stderr
    assert answered.returncode == (0 if known else 2)
    assert ("never run" in answered.stderr) == (not known)
    silent = subprocess.Popen(
        [*command, "--once"] if not known else command,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with silent:
        if not known:  # it ends though its input does not
            assert silent.wait() == 2
        else:
            assert silent.stdin is not None
            silent.stdin.close()
            assert silent.wait() == 0


@pytest.mark.slow
def test_a_node_does_not_wait_for_an_answer_on_a_pipe(tmp_path):
    """Its standard input stays open, and says nothing."""
    model = with_code(qwen_directory(tmp_path / "model"), known=False)
    command = [sys.executable, "-m", "node.cli", "join", "--model", model, "--no-lan", "--no-dht"]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--data-dir", tmp_path / "data"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as node:
        assert node.stdout is not None
        said = node.stdout.read()
        assert node.wait() == 2
    assert "config.json names code of its own, which is not run" in said
    assert "Do you wish to run" not in said
    assert said.strip().splitlines()[-1].endswith("is never run; take another model")


@pytest.mark.parametrize("once", [True, False])
def test_who_talks_to_a_model_shares_the_cores_with_nodes(monkeypatch, once):
    """With a thread on each core, and nodes on them, a reply takes minutes."""
    taken = []
    monkeypatch.setattr(sys, "argv", ["chat", "model", *(["--once"] if once else [])])
    monkeypatch.setattr(chat, "core_count", lambda: 6)
    monkeypatch.setattr(chat, "counted", lambda: nullcontext(lambda: 3))
    monkeypatch.setattr(chat, "load_policy", lambda *_, **__: None)
    for answers in ("chat", "answer_once"):
        monkeypatch.setattr(chat, answers, lambda *_: taken.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert chat.main() == 0
    finally:
        torch.set_num_threads(before)
    assert taken == [2]
