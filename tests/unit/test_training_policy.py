import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.engines.vllm.text import ModelText
from node.envs.answers import answer_in
from node.interfaces.prompts import Prompt
from node.interfaces.trainer import DamagedCheckpoint
from node.interfaces.trainer_spec import TrainerSpec
from node.policies import checkpoint
from node.policies.policy import CONTEXT_TOKENS_MAX, load_policy, pick_device
from node.policies.rounding import to_bfloat16
from node.train.memory import (
    MICRO_BATCH_TOKENS,
    MICRO_BATCH_TOKENS_MIN,
    ModelShape,
    estimate_bytes,
    fit,
    plan,
)
from node.train.trainer import GroupTrainer
from node.train.trainer_worker import TrainerCore, opened
from swarm.errors import ConfigError, LocalProtocolError
from tests.unit.small_models import made
from tests.unit.training_support import (
    gpt2_directory,
    group,
    model_text,
    open_policy,
    qwen_directory,
)

SPEC = TrainerSpec("test", learning_rate=1e-3)
MANY = 100_000


def weights(policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.model.parameters()]


def same(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# loading


def test_a_local_directory_loads_in_fp32(tmp_path):
    policy = open_policy(qwen_directory(tmp_path / "small"))
    assert policy.name == "small"
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert policy.context_tokens == 128
    assert policy.eos_ids == {policy.eos_id}


@pytest.mark.parametrize(
    ("own", "wanted", "found"),
    [
        (8192, None, 8192),
        (131_072, None, CONTEXT_TOKENS_MAX),
        (131_072, 100_000, 100_000),
        (8192, 100_000, 8192),
        (8192, 4096, 4096),
    ],
)
def test_the_context_is_the_models_own_unless_it_is_set(tmp_path, own, wanted, found):
    directory = qwen_directory(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": own}))
    spec = TrainerSpec(str(directory), context_tokens_max=wanted)
    assert opened(spec, "cpu").context_tokens == found
    assert opened(replace(spec, lora_rank=2), "cpu").context_tokens == found


def test_a_quantised_model_is_refused_in_one_line(tmp_path):
    directory = qwen_directory(tmp_path / "small")
    plan(TrainerSpec(str(directory)))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (directory / "config.json").write_text(json.dumps(config))
    for refuses in (
        lambda: load_policy(str(directory), "cpu"),
        lambda: plan(TrainerSpec(str(directory))),
    ):
        with pytest.raises(ConfigError, match=r"quantised \(awq\).*name the model") as caught:
            refuses()
        assert "\n" not in str(caught.value)


def test_text_survives_the_tokenizer(tmp_path):
    policy = open_policy(qwen_directory(tmp_path))
    text = "12/16=\n(P ∧ ¬Q) é"
    ids = policy.encode_completion(text)
    assert len(ids) == len(text.encode())
    assert policy.decode([*ids, policy.eos_id]) == text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/nowhere/at/all", "no such directory"),
        ("someone/no-such-model-anywhere", "HF_HOME"),
    ],
)
def test_a_model_that_is_not_there_says_what_to_do(model, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=words) as caught:
        load_policy(model, "cpu")
    assert "\n" not in str(caught.value)


def test_to_decode_asks_the_tokenizers_size_once(tmp_path, monkeypatch):
    policy = open_policy(qwen_directory(tmp_path))
    kind, asked = type(policy.tokenizer), []
    size = len(policy.tokenizer)
    monkeypatch.setattr(kind, "__len__", lambda _: asked.append(1) or size)
    ids = policy.encode_completion("a text of more than one token")
    assert policy.decode(ids) == "a text of more than one token"
    assert len(asked) <= 1


def test_a_directory_without_a_model_says_so(tmp_path):
    with pytest.raises(ConfigError, match="not a model directory"):
        load_policy(str(tmp_path), "cpu")


def test_cuda_by_name_needs_cuda(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        load_policy(str(tmp_path), "cuda")


# fingerprint


def test_the_fingerprint_is_of_the_tokenizer_alone(tmp_path):
    one = open_policy(qwen_directory(tmp_path / "a"))
    other = open_policy(qwen_directory(tmp_path / "b", seed=1))
    assert one.fingerprint == other.fingerprint
    assert len(one.fingerprint) == 64


def test_another_chat_template_is_another_fingerprint(tmp_path):
    plain = open_policy(qwen_directory(tmp_path / "a"))
    chatty = qwen_directory(tmp_path / "b")
    template = "Q: {{ messages[0]['content'] }}\nA:"
    (chatty / "chat_template.jinja").write_text(template)
    policy = open_policy(chatty)
    assert policy.fingerprint != plain.fingerprint
    assert policy.encode_prompt("1+1?") == policy.encode_completion("Q: 1+1?\nA:")


SPELLED = "a<eos>b<answer><bos>"


def test_special_tokens_spelled_out_in_text_stay_text(tmp_path):
    policy = open_policy(qwen_directory(tmp_path))
    ids = policy.encode_completion(SPELLED)
    assert len(ids) == len(SPELLED)
    assert not set(ids) & set(policy.tokenizer.all_special_ids)
    assert policy.decode(ids) == SPELLED
    first, *middle, last = policy.encode_prompt(SPELLED)
    assert middle == ids
    assert [first, last] == policy.tokenizer.convert_tokens_to_ids(["<bos>", "<answer>"])


def test_what_a_completion_hides_is_seen_in_its_text(tmp_path):
    """Padded with special tokens, an answer would be right and its padding taught."""
    policy = open_policy(qwen_directory(tmp_path))
    answer, special = policy.encode_completion("12"), policy.tokenizer.convert_tokens_to_ids
    assert policy.decode([*answer, policy.eos_id]) == policy.decode(answer) == "12"
    padded = [*answer, *special(["<pad>", "<bos>"]), policy.eos_id]
    assert policy.decode(padded) == "12<pad><bos>"
    assert policy.decode([policy.eos_id, *answer]) == "<eos>12"
    assert policy.decode([*answer, len(policy.tokenizer)]) == "12\N{REPLACEMENT CHARACTER}"
    for text in (policy.decode(padded), policy.decode([*answer, len(policy.tokenizer)])):
        assert answer_in("last_number", text) is None


CHAT = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% else %}"
    "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}assistant:<answer>"
)


@pytest.mark.parametrize("question", ["1+1?", SPELLED])
def test_instructions_go_through_the_chat_template(tmp_path, question):
    directory = qwen_directory(tmp_path)
    (directory / "chat_template.jinja").write_text(CHAT)
    policy = open_policy(directory)
    prompt = Prompt.of(question, "Be brief.", (("2+2?", "4"),)).text
    first, *middle, last = policy.encode_prompt(prompt)
    assert [first, last] == policy.tokenizer.convert_tokens_to_ids(["<bos>", "<answer>"])
    text = f"[Be brief.]user: 2+2?\nassistant: 4\nuser: {question}\nassistant:"
    assert middle == policy.encode_completion(text)
    assert ModelText(directory).encode_prompt(prompt) == policy.encode_prompt(prompt)


@pytest.mark.parametrize("template", ["no such role", "'system' {{ raise('not supported') }}"])
def test_a_template_without_a_system_gets_it_in_the_first_question(tmp_path, template):
    directory = qwen_directory(tmp_path)
    no_system = "<bos>{{ messages[0].content }}<answer>{# " + template + " #}"
    (directory / "chat_template.jinja").write_text(no_system)
    policy, prompt = open_policy(directory), Prompt.of("1+1?", "Be brief.").text
    assert policy.encode_prompt(prompt)[1:-1] == policy.encode_completion("Be brief.\n\n1+1?")
    assert ModelText(directory).encode_prompt(prompt) == policy.encode_prompt(prompt)


def test_without_a_chat_template_instructions_are_plain_text(tmp_path):
    policy = open_policy(qwen_directory(tmp_path))
    prompt = Prompt.of("1+1?", "Be brief.").text
    assert policy.encode_prompt(prompt)[1:-1] == policy.encode_completion("Be brief.\n\n1+1?")
    assert model_text(tmp_path, policy).encode_prompt(prompt) == policy.encode_prompt(prompt)


@pytest.mark.parametrize("content", ["content", "content | upper"])
def test_a_chat_template_keeps_its_special_tokens_and_a_prompt_gets_none(tmp_path, content):
    directory = qwen_directory(tmp_path)
    template = f"<bos>Q: {{{{ messages[0].{content} }}}}\nA:<answer>"
    (directory / "chat_template.jinja").write_text(template)
    policy = open_policy(directory)
    special = policy.tokenizer.convert_tokens_to_ids(["<bos>", "<answer>"])
    plain = policy.encode_prompt("1+1?")
    assert [plain[0], plain[-1]] == special
    ids = policy.encode_prompt(SPELLED)
    said = SPELLED if content == "content" else SPELLED.upper()
    assert [ids[0], ids[-1]] == special
    assert not set(ids[1:-1]) & set(policy.tokenizer.all_special_ids)
    assert ids[1:-1] == policy.encode_completion(f"Q: {said}\nA:")


def test_another_vocabulary_is_another_fingerprint(tmp_path):
    plain = open_policy(qwen_directory(tmp_path / "a"))
    changed = qwen_directory(tmp_path / "b")
    path = changed / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    assert open_policy(changed).fingerprint != plain.fingerprint


# weights from elsewhere


def test_weights_of_the_same_shape_are_taken_over(tmp_path):
    policy = open_policy(qwen_directory(tmp_path / "a"))
    other = open_policy(qwen_directory(tmp_path / "b", seed=1))
    assert not same(weights(policy), weights(other))
    policy.load_weights(tmp_path / "b")
    assert same(weights(policy), weights(other))


def test_other_weights_change_nothing(tmp_path):
    policy = open_policy(qwen_directory(tmp_path / "a"))
    before = weights(policy)
    gpt2_directory(tmp_path / "b")
    (tmp_path / "c").mkdir()
    for wrong in ("b", "c", "nowhere"):
        with pytest.raises(ConfigError):
            policy.load_weights(tmp_path / wrong)
    assert same(weights(policy), before)


@pytest.mark.parametrize("fault", ["torn", "lacking", "surplus", "misshapen"])
def test_weights_that_fail_in_the_last_file_change_nothing(tmp_path, fault):
    policy = open_policy(qwen_directory(tmp_path / "a"))
    other = open_policy(qwen_directory(tmp_path / "b", seed=1)).model
    other.save_pretrained(tmp_path / "c", max_shard_size="40KB")
    *first, last = sorted((tmp_path / "c").glob("*.safetensors"))
    assert first
    open_policy(tmp_path / "a").load_weights(tmp_path / "c")
    tensors = {name: value.clone() for name, value in load_file(last).items()}
    name = sorted(tensors)[-1]
    if fault == "torn":
        last.write_bytes(last.read_bytes()[:-4])
    else:
        if fault == "surplus":
            tensors["another"] = torch.zeros(3)
        else:
            value = tensors.pop(name)
            tensors |= {name: torch.zeros(*value.shape, 2)} if fault == "misshapen" else {}
        save_file(tensors, last)
    before = weights(policy)
    with pytest.raises(ConfigError, match=str(tmp_path / "c")):
        policy.load_weights(tmp_path / "c")
    assert same(weights(policy), before)


# checkpoints


def trained(policy, steps: int, trainer: GroupTrainer | None = None) -> GroupTrainer:
    trainer = trainer or GroupTrainer(policy, SPEC, MANY)
    for step in range(trainer.policy_version, trainer.policy_version + steps):
        answers = [str(step), str(step + 1), "x"]
        trainer.train([group(policy, f"{step}+0=", answers, [1.0, -0.5, -0.5])])
    return trainer


@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory])
def test_resuming_is_bit_for_bit(tmp_path, make):
    model, saved = make(tmp_path / "model"), tmp_path / "saved"
    saved.mkdir()
    first = open_policy(model)
    trainer = trained(first, 3)
    checkpoint.save(saved, first, trainer.optimizer, trainer.policy_version)
    trained(first, 2, trainer)
    second = open_policy(model)
    resumed = GroupTrainer(second, SPEC, MANY)
    resumed.policy_version = checkpoint.load(saved, second, resumed.optimizer)
    assert resumed.policy_version == 3
    trained(second, 2, resumed)
    assert same(weights(first), weights(second))


def test_without_the_optimizer_a_resume_would_differ(tmp_path):
    model = qwen_directory(tmp_path / "model")
    first = open_policy(model)
    trainer = trained(first, 3)
    second = open_policy(model)
    second.model.load_state_dict(first.model.state_dict())
    trained(first, 2, trainer)
    fresh = GroupTrainer(second, SPEC, MANY)
    fresh.policy_version = 3
    trained(second, 2, fresh)
    assert not same(weights(first), weights(second))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_checkpoint_is_refused(tmp_path, name, damage):
    policy = open_policy(qwen_directory(tmp_path / "model"))
    trainer = trained(policy, 1)
    saved = tmp_path / "saved"
    saved.mkdir()
    checkpoint.save(saved, policy, trainer.optimizer, 1)
    path = saved / name
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedCheckpoint, match=r"^checkpoint damaged"):
        checkpoint.load(saved, policy, trainer.optimizer)


@pytest.mark.parametrize("state", ["[]", "{}"])
def test_a_checkpoint_with_a_strange_state_is_damaged(tmp_path, state):
    policy = open_policy(qwen_directory(tmp_path / "model"))
    trainer = trained(policy, 1)
    saved = tmp_path / "saved"
    saved.mkdir()
    checkpoint.save(saved, policy, trainer.optimizer, 1)
    (saved / "trainer.json").write_text(state)
    with pytest.raises(DamagedCheckpoint):
        checkpoint.load(saved, policy, trainer.optimizer)


def test_weights_that_are_not_finite_are_neither_written_nor_read(tmp_path):
    policy = open_policy(qwen_directory(tmp_path / "model"))
    trainer = trained(policy, 1)
    saved = tmp_path / "saved"
    saved.mkdir()
    checkpoint.save(saved, policy, trainer.optimizer, 1)
    path = saved / "model.safetensors"
    held = load_file(path)
    held["model.norm.weight"][3] = float("nan")
    save_file(held, path)
    with pytest.raises(DamagedCheckpoint, match=r"model\.norm\.weight"):
        checkpoint.load(saved, policy, trainer.optimizer)
    (tmp_path / "new").mkdir()
    with torch.no_grad():
        policy.model.model.norm.weight[3] = float("inf")
    with pytest.raises(LocalProtocolError, match=r"model\.norm\.weight"):
        checkpoint.save(tmp_path / "new", policy, trainer.optimizer, 1)
    with pytest.raises(LocalProtocolError, match=r"model\.norm\.weight"):
        checkpoint.export(tmp_path / "new", policy)
    assert not list((tmp_path / "new").iterdir())


def test_another_learning_rate_holds_after_a_resume(tmp_path):
    policy = open_policy(qwen_directory(tmp_path / "model"))
    trainer = trained(policy, 1)
    saved = tmp_path / "saved"
    saved.mkdir()
    checkpoint.save(saved, policy, trainer.optimizer, 1)
    resumed = GroupTrainer(policy, TrainerSpec("test", learning_rate=3e-5), MANY)
    checkpoint.load(saved, policy, resumed.optimizer)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [3e-5]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    gpt2 = open_policy(gpt2_directory(tmp_path / "a"))
    checkpoint.save(saved, gpt2, trained(gpt2, 1).optimizer, 1)
    qwen = open_policy(qwen_directory(tmp_path / "b"))
    with pytest.raises(ConfigError, match="another model"):
        checkpoint.load(saved, qwen, GroupTrainer(qwen, SPEC, MANY).optimizer)


def test_an_export_loads_as_a_model_directory(tmp_path):
    policy = open_policy(qwen_directory(tmp_path / "a"))
    trained(policy, 1)
    exported = tmp_path / "exported"
    exported.mkdir()
    checkpoint.export(exported, policy)
    again = open_policy(exported)
    assert same(weights(policy), weights(again))
    assert again.fingerprint == policy.fingerprint


@pytest.mark.parametrize("make", [qwen_directory, gpt2_directory])  # gpt2 ties its head
def test_an_export_in_bf16_is_the_policy_rounded_and_leaves_it_as_it_is(tmp_path, make):
    policy = open_policy(make(tmp_path / "a"))
    trained(policy, 1)
    before = weights(policy)
    whole, rounded = tmp_path / "whole", tmp_path / "rounded"
    for directory, precision in ((whole, "float32"), (rounded, "bfloat16")):
        directory.mkdir()
        checkpoint.export(directory, policy, precision)
    full, half = (load_file(each / "model.safetensors") for each in (whole, rounded))
    assert full.keys() == half.keys()
    assert {value.dtype for value in half.values()} == {torch.bfloat16}
    assert all(torch.equal(to_bfloat16(value), half[name]) for name, value in full.items())
    assert not all(torch.equal(value, half[name].float()) for name, value in full.items())
    assert json.loads((rounded / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((whole / "config.json").read_text())["dtype"] == "float32"
    assert same(before, weights(policy))
    again = open_policy(rounded)
    assert {value.dtype for value in weights(again)} == {torch.float32}
    policy.load_weights(rounded)
    assert same(weights(again), weights(policy))


# memory

SHAPE = ModelShape(1_000_000, 4, 128, 384, 4, 260)


def test_the_micro_batch_is_halved_until_it_fits():
    room = estimate_bytes(SHAPE, 2048)
    made = fit(SHAPE, 8192, room, "m")
    assert (made.micro_batch_tokens, made.row_tokens_max) == (2048, 2048)
    assert fit(SHAPE, 256, room, "m").row_tokens_max == 2048
    assert fit(SHAPE, 8192, 2**40, "m").micro_batch_tokens == 8192


@pytest.mark.parametrize("vocabulary", [260, 150_000])
@pytest.mark.parametrize("tokens", [300, 5000, 40_000])
@pytest.mark.parametrize("adapter", [0, 20_000])
def test_the_longest_row_is_the_longest_that_fits(vocabulary, tokens, adapter):
    """Also where its logits are less than a chunk."""
    shape = replace(SHAPE, vocabulary=vocabulary, adapter_parameters=adapter)
    copies = 1.0 if adapter else 4.0
    room = estimate_bytes(shape, tokens, copies)
    assert fit(shape, 256, room, "m", copies).row_tokens_max == tokens
    assert fit(shape, 256, room - 1, "m", copies).row_tokens_max == tokens - 1


def test_a_model_that_cannot_fit_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="MiB are free"):
        fit(SHAPE, 8192, estimate_bytes(SHAPE, MICRO_BATCH_TOKENS_MIN) - 1, "m")


def test_the_plan_reads_the_configuration_alone(tmp_path):
    directory = qwen_directory(tmp_path / "a")
    (directory / "model.safetensors").unlink()
    made = plan(TrainerSpec(str(directory), device="cpu", memory_bytes_max=2**40))
    assert made.micro_batch_tokens == MICRO_BATCH_TOKENS["cpu"] == 4_096
    wanted = TrainerSpec(
        str(directory), device="cpu", memory_bytes_max=2**40, micro_batch_tokens=16_384
    )
    assert plan(wanted).micro_batch_tokens == 16_384
    with pytest.raises(ConfigError, match="no such directory"):
        plan(TrainerSpec(str(tmp_path / "b"), device="cpu"))


def test_layers_of_unlike_sizes_are_planned_and_trained(tmp_path):
    """As those of Gemma 4: heads of its full layers are larger."""
    checkpoint.export(tmp_path, made("gemma4_text"))
    spec = TrainerSpec(str(tmp_path), device="cpu", threads=1, memory_bytes_max=2**32)
    core = TrainerCore(spec)
    assert core.train([group(core.policy, "1+1=", ["2", "3"], [1.0, -1.0])]).trained_tokens


def test_a_copied_checkpoint_directory_is_whole(tmp_path):
    policy = open_policy(qwen_directory(tmp_path / "model"))
    trainer = trained(policy, 1)
    saved = tmp_path / "saved"
    saved.mkdir()
    checkpoint.save(saved, policy, trainer.optimizer, 1)
    shutil.move(saved, tmp_path / "moved")
    assert checkpoint.load(tmp_path / "moved", policy, trainer.optimizer) == 1


@pytest.mark.parametrize(
    ("count", "line"),
    [
        (0, "--device cuda:1: torch sees no GPU here; take cpu or auto"),
        (1, "--device cuda:1: torch sees cuda:0 here; take cuda:0 or auto"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_in_one_line(
    count: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError) as refused:
        pick_device("cuda:1")
    assert str(refused.value) == line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
