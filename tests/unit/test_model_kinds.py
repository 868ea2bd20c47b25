"""Models that are no decoder of text, tokenizers that are read otherwise than their files say, and
directories that hold something else than one whole model."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from node.engines.vllm.text import ModelText
from node.hosting.fetched_models import convert_file
from node.hosting.models import lasting_model, resolve_model
from node.policies import checkpoint
from node.policies.model_files import check_files
from node.policies.policy import load_policy
from node.policies.tiny import byte_tokenizer
from node.train.memory import shape_of
from swarm.errors import ConfigError
from tests.unit.tasks_support import make_config, make_run
from tests.unit.test_model_files import change, configure, llama_directory, refused
from tests.unit.training_support import open_policy, qwen_directory

TEXT = "Two  blanks,\n\n\tit's 12.5 \u4e2d\u6587"


def edit(file: Path, **told: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | told))


def save(directory: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def sized(**more: object) -> dict[str, object]:
    tokenizer = byte_tokenizer()
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **ends, **more}


# tokenizers


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_tokenizer_is_what_its_file_says_whatever_class_is_named(tmp_path, named):
    """Classes of transformers 5 replace steps of the file: one loses blanks, others cut numbers."""
    model = qwen_directory(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save_pretrained(model)
    edit(model / "tokenizer_config.json", tokenizer_class=named)
    policy = open_policy(model)
    in_file = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert policy.encode_completion(TEXT) == in_file
    assert policy.decode(in_file) == TEXT


@pytest.mark.parametrize(
    "steps",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    ],
)
def test_a_tokenizer_that_loses_text_is_refused(tmp_path, steps):
    model = qwen_directory(tmp_path)
    edit(model / "tokenizer.json", **steps)
    assert 'its tokenizer loses text: "Two  blanks,\\n\\n\\ta line' in refused(model)


def test_a_file_that_cuts_and_fills_texts_changes_none(tmp_path):
    model = qwen_directory(tmp_path)
    tokenizer = byte_tokenizer().backend_tokenizer
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64, pad_id=258, pad_token="<pad>")
    tokenizer.save(str(model / "tokenizer.json"))
    ids = ModelText(model).encode_completion(TEXT)
    assert ids == open_policy(model).encode_completion(TEXT)
    assert len(ids) == len(TEXT.encode())


def test_a_prompt_does_not_end_as_completions_do(tmp_path):
    """Some tokenizers put EOS behind each text."""
    model = qwen_directory(tmp_path)
    tokenizer = byte_tokenizer()
    ends = [{"SpecialToken": {"id": "<eos>", "type_id": 0}}]
    told = {"id": "<eos>", "ids": [tokenizer.eos_token_id], "tokens": ["<eos>"]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, *ends]
    edit(
        model / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": single,
            "pair": single,
            "special_tokens": {"<eos>": told},
        },
    )
    policy = open_policy(model)
    assert policy.encode_prompt("1 + 1") == policy.encode_completion("1 + 1")


def cut_rows(model: Path, rows: int) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.embed_tokens.weight"
        tensors[name] = tensors[name][:rows].clone()

    change(model, cut)
    configure(model, vocab_size=rows, pad_token_id=None)


def test_embeddings_smaller_than_the_tokenizer_are_refused(tmp_path):
    model = qwen_directory(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(model)
    told = refused(model)
    assert "its embeddings have 260 rows, and its tokenizer 2 tokens beyond them" in told
    assert "such as 260" in told


def test_a_special_token_that_nothing_uses_may_lack_a_row(tmp_path):
    """As in Gemma 3, whose token for images has none in its models of text."""
    model = qwen_directory(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(model)
    policy = load_policy(str(model), "cpu")
    assert max(policy.encode_completion("an <image>")) < policy.vocabulary


def test_an_end_of_sequence_without_a_row_is_refused(tmp_path):
    model = qwen_directory(tmp_path)
    cut_rows(model, byte_tokenizer().eos_token_id)
    assert "tokens beyond them" in refused(model)


# kinds of models


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "xlm-roberta"])
def test_encoders_are_refused_by_name(tmp_path, kind):
    config = AutoConfig.for_model(
        kind, **sized(hidden_size=32, intermediate_size=32, num_hidden_layers=1),
        num_attention_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    told = refused(save(tmp_path, model))
    assert f"{type(model).__name__} sees tokens before they are sampled: it is an encoder" in told


def test_half_of_an_encoder_and_decoder_is_not_trained(tmp_path):
    config = BartConfig(
        **sized(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2),
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    )  # fmt: skip
    model = save(tmp_path, BartForConditionalGeneration(config))
    assert "bart reads prompts with an encoder" in refused(model)
    with pytest.raises(ConfigError, match="bart reads prompts with an encoder"):
        shape_of(str(model))


def text_sizes(**more: object) -> dict[str, object]:
    return sized(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, **more,
    )  # fmt: skip


def test_a_vision_tower_is_not_taken_along(tmp_path):
    config = Gemma3Config(
        text_config=text_sizes(num_hidden_layers=2),
        vision_config={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        image_token_index=4, mm_tokens_per_image=4,
    )  # fmt: skip
    model = save(tmp_path, Gemma3ForConditionalGeneration(config))
    assert "Gemma3ForConditionalGeneration takes image, text" in refused(model)


def test_a_model_that_is_trained_as_text_alone_says_so(tmp_path):
    config = Qwen3_5Config(
        text_config=text_sizes(
            num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        ),
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "out_hidden_size": 32, "num_position_embeddings": 16,
        },
    )  # fmt: skip
    model = save(tmp_path / "model", Qwen3_5ForConditionalGeneration(config))
    said: list[str] = []
    assert resolve_model(make_config(make_run(), model=str(model)), said.append) == str(model)
    assert said == [f"model {model}: trained and exported as text alone, without vision_config"]
    (tmp_path / "out").mkdir()
    checkpoint.export_whole(tmp_path / "out", open_policy(model))
    assert not [name for name in load_file(tmp_path / "out/model.safetensors") if "vis" in name]
    assert type(open_policy(tmp_path / "out").model).__name__ == "Qwen3_5ForCausalLM"


def test_a_head_that_only_the_configuration_ties_is_refused(tmp_path):
    model = llama_directory(tmp_path, tied=True)
    change(
        model,
        lambda tensors: tensors.update(
            {"lm_head.weight": 2 * tensors["model.embed_tokens.weight"]}
        ),
    )
    assert "ties the head to the embeddings, and its files hold another head" in refused(model)


@pytest.mark.parametrize(
    "told",
    [
        {"num_attention_heads": 0},
        {"hidden_act": "nope"},
        {"rms_norm_eps": "small"},
        {"num_hidden_layers": "two"},
        {"rope_parameters": {"rope_type": "nope", "rope_theta": 1.0}},
    ],
)
def test_a_configuration_without_sense_is_one_line(tmp_path, told):
    model = llama_directory(tmp_path)
    configure(model, **told)
    refused(model)


# directories: told at once, without torch


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "consolidated.safetensors"])
def test_weights_beside_the_models_own_are_refused(tmp_path, name):
    model = llama_directory(tmp_path)
    (model / name).write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=f"weights beside its own: {name}: move them elsewhere"):
        check_files(str(model))


def test_yes_is_no_token(tmp_path):
    model = llama_directory(tmp_path)
    (model / "generation_config.json").write_text('{"eos_token_id": true}')
    assert 1 not in load_policy(str(model), "cpu").eos_ids


def adapter(model: Path) -> None:
    model.mkdir(exist_ok=True)
    (model / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "some/base"})
    )


def whole_and_adapter(model: Path) -> None:
    adapter(llama_directory(model))


def lacks_a_shard(model: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(llama_directory(model), trust_remote_code=False)
    (model / "model.safetensors").unlink()
    network.save_pretrained(model, max_shard_size="20KB")
    (model / "model-00002-of-00006.safetensors").unlink()


def cut_short(model: Path) -> None:
    file = llama_directory(model) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def holds(name: str, text: str) -> Callable[[Path], None]:
    return lambda model: (llama_directory(model) / name).write_text(text) and None


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "an adapter": (adapter, "an adapter for some/base, not a whole model"),
    "both": (whole_and_adapter, r"an adapter \(adapter_config.json\) lies beside a whole model"),
    "a shard less": (lacks_a_shard, "files that are not there: model-00002-of-00006.safetensors"),
    "cut short": (cut_short, "model.safetensors of the model is damaged"),
    "no JSON": (holds("config.json", '{"model_type": '), "its config.json: Expecting value"),
    "a list": (holds("config.json", "[]"), "its config.json is no JSON object"),
    "no kind": (holds("config.json", "{}"), "its config.json names no model_type"),
    "an odd index": (holds("model.safetensors.index.json", "{}"), "index.json has no weight_map"),
    "nothing": (Path.mkdir, "not a model directory; it needs config.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_directory_that_is_no_model_is_refused_before_a_node_starts(tmp_path, name):
    make, told = WRONG[name]
    make(tmp_path / "model")
    with pytest.raises(ConfigError, match=told) as caught:
        resolve_model(make_config(make_run(), model=str(tmp_path / "model")), print)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "it holds a vocabulary alone, without weights"),
        (b"GGUF", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "not a GGUF file"),
    ],
)
def test_a_gguf_file_without_weights_makes_no_model(tmp_path, content, told):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        convert_file(file, tmp_path / "cache", print)


def test_a_directory_lasts_by_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("tiny").mkdir()
    assert lasting_model("./mine") == lasting_model("mine/") == str(tmp_path / "mine")
    assert lasting_model("tiny") == "tiny"
    assert lasting_model("some/base") == "some/base"


# exports


def exported(model: Path, out: Path, precision: str = "float32") -> Path:
    out.mkdir()
    checkpoint.export_whole(out, open_policy(model), precision)
    return out


def test_an_export_holds_the_models_own_tokenizer_files(tmp_path):
    model = qwen_directory(tmp_path / "model")
    (model / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}\n')
    (model / "tokenizer.model").write_bytes(b"as it is")
    out = exported(model, tmp_path / "out")
    for name in ("tokenizer.json", "special_tokens_map.json", "tokenizer.model"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    told = json.loads((out / "tokenizer_config.json").read_text())
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 5 says Backend
    assert open_policy(out).fingerprint == open_policy(model).fingerprint


def test_an_export_keeps_the_models_own_configuration(tmp_path):
    model = llama_directory(tmp_path / "model")
    old = json.loads((model / "config.json").read_text())
    theta = old.pop("rope_parameters")["rope_theta"]
    old.pop("dtype")
    old |= {"rope_theta": theta, "torch_dtype": "float32", "of_its_own": 3}
    (model / "config.json").write_text(json.dumps(old))
    out = exported(model, tmp_path / "out", "bfloat16")
    told = json.loads((out / "config.json").read_text())
    assert told == old | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}


def rotations_of(model: Path) -> object:
    return AutoConfig.from_pretrained(model, trust_remote_code=False).rope_parameters


@pytest.mark.parametrize(
    ("rotations", "told"),
    [
        ({"rope_type": "default", "rope_theta": 7e5}, {"rope_theta": 7e5}),
        (
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5},
            {"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_an_export_is_spelled_for_both_generations_of_transformers(tmp_path, rotations, told):
    model = llama_directory(tmp_path / "model")
    configure(model, rope_parameters=rotations)
    out = exported(model, tmp_path / "out")
    written = json.loads((out / "config.json").read_text())
    assert written.items() >= (told | {"rope_parameters": rotations}).items()
    before, after = (rotations_of(each) for each in (model, out))
    assert before == after


def test_an_export_names_experts_and_layered_rotations_as_before(tmp_path):
    kinds = {"qwen3_moe": {"moe_intermediate_size": 8, "num_experts_per_tok": 2}, "gemma3_text": {}}
    for kind, more in kinds.items():
        config = AutoConfig.for_model(kind, **text_sizes(num_hidden_layers=2), **more)
        if more:
            config.num_experts = 4
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        out = exported(save(tmp_path / kind, network), tmp_path / f"{kind}-out")
        written = json.loads((out / "config.json").read_text())
        assert "rope_theta" in written
        assert written.get("num_experts") == (4 if more else None)
        assert ("rope_local_base_freq" in written) == (kind == "gemma3_text")
        open_policy(out)


def test_a_model_whose_forward_fails_is_refused_in_one_line(tmp_path, monkeypatch):
    directory = llama_directory(tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr("node.policies.policy._refuse_encoder", fails)
    with pytest.raises(ConfigError, match="no kernel for it"):
        load_policy(str(directory), "cpu")
