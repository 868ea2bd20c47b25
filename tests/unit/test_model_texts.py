"""Chat templates and tokenizers that loop, repeat or multiply, and those that do not."""

import gc
import json
from pathlib import Path

import pytest
import trio

from node.engines import openai_tokenizer
from node.interfaces.prompts import Prompt
from node.policies import chat_templates, tokenizer_files
from node.policies.chat_templates import Renderer
from node.policies.policy import load_policy, load_tokenizer
from node.policies.tiny import byte_tokenizer
from swarm.errors import ConfigError
from tests.unit.training_support import open_policy, qwen_directory

MESSAGES = [
    {"role": "system", "content": "be <brief> & 'kind'"},
    {"role": "user", "content": "1 + 1 = ?\nß 中"},
]
ENDS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
HONEST = {
    "chat": "{{ bos_token }}{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n"
    f"{{% endfor %}}\n{ENDS}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1} | tojson }}"
    + ENDS,
    "breaks": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}" + ENDS,
    "generation": "{% for m in messages %}{% set n = loop.index %}"
    "{% generation %}{{ n }}{{ m.content }}{% endgeneration %}{% endfor %}" + ENDS,
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ tools is none }}{{ documents is none }}{{ eos_token }}" + ENDS,
    "macro": "{% macro say(m) %}[{{ m.role | upper }}]{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}" + ENDS,
    "date": "{{ strftime_now('%Y') }}" + ENDS,
}
ENDLESS = {
    "a range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "a long text": "{{ 'x' * 10**8 }}",
    "a text over memory": "{{ 'x' * 10**10 }}",
    "doubling": "{% set ns = namespace(t='x') %}{% for i in range(60) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t | length }}",
    "what was said": "{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}",
    "itself": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "a filter": "{{ range(99999) | map('string') | list | join('y' * 10000) }}",
}
WRONG = {
    "syntax": "{% for m in messages %}",
    "a refusal": "{{ raise_exception('only with tools') }}",
    "what is not there": "{{ tools | length }}",
    "python": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}


def renderer(template: str) -> Renderer:
    return Renderer("m", template, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", HONEST)
def test_a_template_renders_as_transformers_has_it(name):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = HONEST[name]
    wanted = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ours = Renderer("m", HONEST[name], tokenizer.special_tokens_map)
    assert ours.render(MESSAGES) == wanted


@pytest.mark.parametrize("template", [*ENDLESS.values(), *WRONG.values()], ids=[*ENDLESS, *WRONG])
def test_a_template_without_end_is_refused_in_one_line(template):
    with pytest.raises(ConfigError) as caught:
        renderer(template).render(MESSAGES)
    assert str(caught.value).startswith("model m: its chat template cannot be used: it ")
    assert len(str(caught.value).splitlines()) == 1


def test_who_renders_is_there_again_after_a_limit():
    ours = renderer("{% if messages | length == 1 %}" + ENDLESS["loops in loops"] + "{% endif %}-")
    assert ours.render(MESSAGES) == "-"
    with pytest.raises(ConfigError, match="takes over"):
        ours.render(MESSAGES[1:])
    assert ours.render(MESSAGES) == "-"


def test_a_long_question_is_no_fault_of_a_template():
    ours = renderer(HONEST["chat"])
    long = [{"role": "user", "content": "word " * 200_000}]
    assert len(ours.render(long)) > 999_000


def test_who_renders_ends_with_who_asked():
    ours = renderer(HONEST["chat"])
    ours.render(MESSAGES)
    child = ours._child
    assert child is not None
    del ours
    gc.collect()
    assert child.returncode is not None


def test_who_renders_has_neither_torch_nor_what_is_secret(monkeypatch):
    """It is given messages alone, and its memory is bounded."""
    assert chat_templates.MEMORY_BYTES <= 2**30
    monkeypatch.setenv("SWARM_NODE_PASSPHRASE", "secret")
    ours = renderer(HONEST["chat"])
    ours.render(MESSAGES)
    assert ours._child is not None
    process = Path("/proc") / str(ours._child.pid)
    if process.exists():
        assert b"SWARM_NODE_PASSPHRASE" not in (process / "environ").read_bytes()
        assert "torch" not in (process / "maps").read_text()


def test_a_policy_renders_by_its_own_template(tmp_path):
    model = qwen_directory(tmp_path)
    policy = open_policy(model)
    policy.tokenizer.chat_template = HONEST["chat"]
    ids = policy.encode_prompt(Prompt.of("why?", "be brief").text)
    assert policy.tokenizer.decode(ids) == "<bos>  system: be brief\n  user: why?\n<|assistant|>"
    policy.tokenizer.chat_template = "[{{ messages[-1].content }}]"
    assert policy.tokenizer.decode(policy.encode_prompt("why?")) == "[why?]"


def test_a_model_with_such_a_template_does_not_load(tmp_path):
    model = qwen_directory(tmp_path)
    (model / "chat_template.jinja").write_text(ENDLESS["loops in loops"])
    with pytest.raises(ConfigError, match="its chat template cannot be used"):
        load_policy(str(model), "cpu")


# tokenizers


def replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: object) -> dict[str, object]:
    return {"type": "Sequence", "normalizers": list(steps)}


MULTIPLIES = {
    "a regex": {"normalizer": replace({"Regex": "[aeiou]"}, "a" * 1000)},
    "nested": {"normalizer": sequence(*[replace({"Regex": "a"}, "a" * 30)] * 4)},
    "a search that goes back and back": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(a+)+b"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "a rare character": {"normalizer": replace({"String": "\u4e10"}, "x" * 1000)},
    "a word": {"normalizer": replace({"String": "hello"}, "x" * 100_000)},
    "nothing": {"normalizer": replace({"Regex": ""}, "x" * 1000)},
    "its way back": {
        "decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "a" * 99)] * 4}
    },
    "a prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
    "no steps": {"normalizer": 3},
}
KEEPS = {
    "nothing": {},
    "unicode": {"normalizer": {"type": "NFKC"}},
    "blanks": {
        "normalizer": sequence(
            {"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")
        )
    },
    "punctuation": {"normalizer": sequence(*(replace({"String": c}, c + " ") for c in "!?;:"))},
}


def tokenizer_file(folder: Path, told: dict[str, object]) -> Path:
    byte_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    return file


@pytest.mark.parametrize("name", MULTIPLIES)
def test_a_tokenizer_that_multiplies_is_refused_in_one_line(tmp_path, name):
    tokenizer_file(tmp_path, MULTIPLIES[name])
    with pytest.raises(ConfigError, match=r"its tokenizer.json cannot be used: ") as caught:
        load_tokenizer(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_a_tokenizer_that_draws_tokens_at_random_is_refused(tmp_path):
    model = json.loads(tokenizer_file(tmp_path, {}).read_text())["model"]
    tokenizer_file(tmp_path, {"model": model | {"dropout": 0.1}})
    with pytest.raises(ConfigError, match=r"set model\.dropout to null"):
        load_tokenizer(str(tmp_path))
    tokenizer_files.check("m", tokenizer_file(tmp_path, {"model": model | {"dropout": None}}))


@pytest.mark.parametrize("name", KEEPS)
def test_a_tokenizer_that_keeps_to_its_text_is_within_the_limits(tmp_path, name):
    tokenizer_files.check("m", tokenizer_file(tmp_path, KEEPS[name]))


@pytest.mark.slow
def test_a_server_is_told_of_such_a_tokenizer_too(tmp_path):
    tokenizer_file(tmp_path, MULTIPLIES["a word"])
    with pytest.raises(ConfigError, match=r"its tokenizer.json cannot be used"):
        trio.run(openai_tokenizer.fingerprint_of, tmp_path)
