"""Small random models of every causal language model that transformers has, and what becomes of
each. `python -m tests.unit.small_models` prints the table of docs/engines.md."""

import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from node.interfaces.trainer_spec import TrainerSpec
from node.methods.losses import token_logprobs
from node.policies import checkpoint
from node.policies.policy import Policy, load_policy, tokenizer_fingerprint
from node.policies.tiny import byte_tokenizer
from node.train import self_check
from node.train.rows import Row, Unit
from node.train.trainer import GroupTrainer
from swarm.errors import ConfigError

WINDOW = 16
CONTEXT = 256
PARAMETERS_MAX = 3_000_000
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_WINDOWS = (
    "sliding_window",
    "attention_window",
    "window_size",
    "attention_chunk_size",
    "index_topk",
)
_NAMES: dict[str, Any] = {
    "hidden_size d_model n_embd n_embed dim": 32,
    "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dff hidden_dim dim_ff": 48,
    "decoder_ffn_dim encoder_ffn_dim moe_num_ffn": 48,
    "num_hidden_layers n_layer num_layers n_layers decoder_layers num_decoder_layers": 2,
    "encoder_layers num_encoder_layers": 2,
    "num_attention_heads n_head num_heads n_heads decoder_attention_heads": 4,
    "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim": 8,
    "qk_head_dim q_lora_rank kv_lora_rank": 16,
    "max_position_embeddings n_positions max_seq_len n_ctx": CONTEXT,
    **dict.fromkeys(_WINDOWS, WINDOW),
    "moe_intermediate_size shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok num_experts_per_token moe_k": 2,
    "n_group topk_group n_shared_experts first_k_dense_replace": 1,
    "mamba_n_heads": 4,
    "index_n_heads": 32,  # with few there are ties, which a text's length decides
    "mamba_d_head": 16,
    "mamba_d_state mamba_chunk_size state_size chunk_size index_head_dim": 8,
    "mamba_d_conv time_step_rank": 4,
    "mamba_expand expand linear_num_key_heads": 2,
    "mamba_n_groups n_groups": 1,
    "linear_num_value_heads": 4,
    "linear_key_head_dim linear_value_head_dim": 8,
}
_USUAL = {name: value for names, value in _NAMES.items() for name in names.split()}
_MLA: dict[str, Any] = {"num_key_value_heads": 4}
# What a kind needs beside it; None: its own default.
ODD: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["local", "global"], 1]]},
    "llama4_text": {"num_experts_per_tok": 1},
    "reformer": {
        "is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [16, 16],
        "attn_layers": ["local", "local"], "attention_head_size": 8,
    },
    "cohere_compass_text": {"layer_types": [_SLIDING, _FULL]},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260,
        "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 260, "global_head_dim": 16,
    },
    "gemma4_unified_text": {"layer_types": [_SLIDING, _FULL], "global_head_dim": 16},
    "kimi_linear": _MLA
    | {"layer_types": [_LINEAR, _FULL], "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", _FULL]},
    "lfm2_moe": {"layer_types": ["conv", _FULL]},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "longcat_flash": _MLA | {"expert_ffn_hidden_size": 24, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "zamba2": {
        "num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8,
        "num_key_value_heads": 4, "num_mem_blocks": 2,
    },
    "zamba": {
        "num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4,
    },
    "xlm": {"emb_dim": 32, "n_words": 260},
    "xglm": {"max_position_embeddings": 512},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        (
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
            "glm_moe_dsa", "minicpm3", "youtu",
        ),
        _MLA,
    ),
}  # fmt: skip
KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


class NotSmall(Exception):
    """No small configuration of this kind is known."""


def _told(kind: type[PreTrainedConfig], window: int) -> dict[str, Any]:
    """Small values of the settings that a kind of configuration has."""
    default = kind()
    known = {kind.attribute_map.get(name, name) for name in (*vars(default), *kind.attribute_map)}
    told = {name: value for name, value in _USUAL.items() if name in known}
    for name in told.keys() & _WINDOWS:
        told[name] = window
    for name, part in kind.sub_configs.items():
        if name in ("text_config", "vision_config", "audio_config"):
            told[name] = _told(part, window) | (
                {"vocab_size": 300} if name == "text_config" else {}
            )
    return told


def _model(kind: str, window: int, vocabulary: int) -> PreTrainedModel:
    tokenizer = byte_tokenizer()
    told = _told(CONFIG_MAPPING[kind], window) | {"vocab_size": vocabulary, "pad_token_id": 0}
    told |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CONFIG_MAPPING[kind](**told | ODD.get(kind, {}))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    if (count := sum(each.numel() for each in empty.parameters())) > PARAMETERS_MAX:
        raise NotSmall(f"{count} parameters")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(70, 90)[None], use_cache=False)
    return model


@cache
def made(kind: str, window: int = WINDOW) -> Policy:
    """A random model of two small layers; NotSmall: none can be made."""
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of how transformers writes some
        torch.manual_seed(0)
        try:
            model = _model(kind, window, len(tokenizer))
        except Exception as error:  # boundary: configurations refuse in many ways
            raise NotSmall(f"{type(error).__name__}: {error}") from error
        with torch.no_grad():
            for parameter in model.parameters():  # random weights alone are nearly uniform
                parameter.mul_(4.0 if parameter.ndim == 2 else 1.0)
    eos = tokenizer.eos_token_id
    return Policy(
        kind, model, tokenizer, tokenizer_fingerprint(tokenizer), CONTEXT, frozenset({eos}), eos,
        torch.device("cpu"),
    )  # fmt: skip


SPEC = TrainerSpec("test", grad_norm_max=1e9, step_guard=False)
NATS = 1e-4
MICRO_BATCH = 4096
TEXTS = ((3, (9, 4)), (WINDOW + 24, (6,)), (11, (2, 30)))  # tokens of a prompt, and of completions
How = Literal["works", "apart", "plain", "refused", "untried"]
WORDS: dict[How, str] = {
    "works": "works",
    "apart": "works, in the engine without cache",
    "plain": "with `--forward plain`",
    "refused": "refused",
    "untried": "not tried",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one kind; `why` it did not work, and `nats` off at most."""

    how: How
    nats: float = math.nan
    why: str = ""


def outcome(kind: str, directory: Path) -> Outcome:
    """`directory` gets its export. AssertionError: it is neither right nor refused."""
    try:
        policy = made(kind)
    except NotSmall:
        return Outcome("untried", why="no small one can be made")
    trainer = GroupTrainer(policy, SPEC, MICRO_BATCH)
    found = self_check.findings(trainer)
    nats = max((each.nats for each in found if math.isfinite(each.nats)), default=math.nan)
    how: How = "apart" if policy.plain else "works"
    if not all(each.stands for each in found):
        with pytest.raises(ConfigError) as caught:
            self_check.check(trainer)
        refusal = str(caught.value)
        assert refusal.startswith(f"model {kind} ("), refusal
        assert "\n" not in refusal
        if not refusal.endswith("take --forward plain"):
            return Outcome("refused", nats, _reason(policy, found))
        trainer, how = GroupTrainer(replace(policy, forward="plain"), SPEC, MICRO_BATCH), "plain"
        self_check.check(trainer)
    try:
        off = max(*_trained(trainer), _exported(policy, directory))
    except AssertionError:  # of transformers, where a gradient begins
        return Outcome("refused", nats, "at the first update: it trains with dropout alone")
    except ConfigError as error:  # of what came back from the export
        if "only models of text can be trained" not in str(error):
            raise
        return Outcome("refused", why="it takes more than text")
    assert off < NATS, (kind, off)
    if how == "plain":
        return Outcome(how, nats, "pads move the text beside them")
    return Outcome(how, max(nats, off))


def _reason(policy: Policy, found: Sequence[self_check.Agreement]) -> str:
    """The reason of a refusal, for the table."""
    error = next((each.error for each in found if each.error), "")
    ids = torch.arange(70, 90)[None]
    with torch.no_grad():
        one, two = (
            policy.model(input_ids=each, use_cache=False).logits for each in (ids, ids[:, :9])
        )
    if not torch.allclose(one[:, :9], two, atol=1e-3):
        return "its tokens see later ones"
    return error.partition(":")[0] or "it computes longer texts otherwise"


def units() -> list[Unit]:
    """Prompts and completions of unlike lengths, beyond the window."""
    numbers = torch.Generator().manual_seed(7)

    def some(count: int) -> list[int]:
        return torch.randint(65, 120, (count,), generator=numbers).tolist()

    return [
        Unit(some(prompt), [Row(some(each), 1.0, True) for each in completions])
        for prompt, completions in TEXTS
    ]


def alone(policy: Policy, batch: Sequence[Unit]) -> list[torch.Tensor]:
    """Log-probs of each row by one bare pass over it."""
    found = []
    for prompt, row in ((unit.prompt, row) for unit in batch for row in unit.rows):
        ids = torch.tensor([prompt + row.tokens])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(token_logprobs(logits, ids[0, len(prompt) :]))
    return found


def gradient_of(policy: Policy, values: Sequence[torch.Tensor]) -> torch.Tensor:
    policy.model.zero_grad()
    torch.cat(list(values)).mean().backward()
    parts = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return torch.cat(parts)


def _trained(trainer: GroupTrainer) -> list[float]:
    """By how much the log-probs and gradients of each pass are off, the latter in shares."""
    policy, batch = trainer.policy, units()
    bare = alone(policy, batch)
    right, worst = gradient_of(policy, bare), []
    for forward in trainer.passes().values():
        found = forward(batch, token_logprobs)
        worst += [float((a - b).detach().abs().max()) for a, b in zip(found, bare, strict=True)]
        far = gradient_of(policy, found) - right
        worst.append(float(far.norm() / right.norm()))
    return worst


def _exported(policy: Policy, directory: Path) -> float:
    """By how much what the export says is off."""
    policy.model.zero_grad(set_to_none=True)
    checkpoint.export(directory, policy)
    again = load_policy(str(directory), "cpu")
    with torch.no_grad():
        pairs = zip(alone(policy, units()), alone(again, units()), strict=True)
        return max(float((one - two).abs().max()) for one, two in pairs)


def main() -> None:
    """Print the table."""
    rows: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as directory:
            found = outcome(kind, Path(directory))
        sys.stderr.write(f"{kind} {found}\n")
        rows.setdefault((WORDS[found.how], found.why), []).append((kind, found.nats))
    order = list(WORDS.values())
    sys.stdout.write("| Kinds | Outcome | Why | Off by at most, in nats |\n|---|---|---|---|\n")
    for (how, why), kinds in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        known = [nats for _, nats in kinds if math.isfinite(nats)]
        nats = f"{max(known):.1g}" if known else ""
        names = ", ".join(f"`{kind}`" for kind, _ in kinds)
        sys.stdout.write(f"| {names} | {how} | {why} | {nats} |\n")


if __name__ == "__main__":
    main()
