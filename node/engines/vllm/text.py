"""Text and tokens on the way to a vLLM server and back."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from node.engines.vllm.server import (
    CACHE_BLOCK_TOKENS,
    CPU_CACHE_BYTES_MAX,
    CPU_CACHE_BYTES_MIN,
    CPU_CACHE_SHARE,
    MODEL_NAME,
    SEQUENCES_MAX,
)
from node.engines.vllm.unfinished import Ask, Piece
from node.interfaces.contexts import context_in
from node.interfaces.engine import Request, Sampling
from node.interfaces.prompts import (
    NO_TEXT,
    PLAIN_RULES,
    AddedToken,
    PromptEncoder,
    TemplateRenderer,
    TemplateRules,
    around,
    placeholder,
)
from node.interfaces.quantisation import Quantisation
from swarm.errors import ChildFailed, ConfigError
from swarm.rollouts import FinishReason

CONTEXT_TOKENS_MAX: Final = 32_768  # unless the engine is set to another limit
_MODELOPT: Final = "hf_quant_config.json"  # some checkpoints say it there alone
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_REASONS: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


class ModelText(PromptEncoder):
    """The tokenizer, chat template and end tokens of a model directory, and the requests to its
    server. Synchronous, for one thread at a time."""

    def __init__(
        self,
        directory: Path,
        context_tokens: int = CONTEXT_TOKENS_MAX,
        template_rules: TemplateRules = PLAIN_RULES,
    ) -> None:
        """`context_tokens`: a limit below the model's own. `template_rules`: the run's."""
        config = _read(directory, "config.json")
        tokens = _read(directory, "tokenizer_config.json")
        self.name = directory.name
        self._tokenizer = _tokenizer(directory)
        self.quantised: str = quantisation_of(directory)
        self._config = config.get("text_config", config)
        self.context_tokens = min(context_in(self._config) or context_tokens, context_tokens)
        self.vocabulary: int = self._config.get("vocab_size") or self._tokenizer.get_vocab_size()
        in_file = directory / "chat_template.jinja"
        template = _text(directory, in_file.name) if in_file.exists() else None
        self._template = _default(template or tokens.get("chat_template"))
        self._constants = _special_texts(tokens)
        self._template_rules = template_rules
        self._renderer: TemplateRenderer | None = None
        self.control: tuple[object, Mapping[int, AddedToken]] | None = None
        self._around: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        eos = self._constants.get("eos_token")
        named = [None if eos is None else self._tokenizer.token_to_id(eos)]
        if (directory / "generation_config.json").exists():
            named.append(_read(directory, "generation_config.json").get("eos_token_id"))
        ids, last = self.find_ends(
            [*named, config.get("eos_token_id"), self._config.get("eos_token_id")]
        )
        if last is None:
            raise ConfigError(f"model {directory}: it names no end-of-sequence token")
        self.eos_ids: tuple[int, ...] = tuple(sorted(ids))
        self.eos_id = last

    @property
    def chat_template(self) -> str | None:
        return self._template

    def template_renderer(self) -> TemplateRenderer:
        if self._renderer is None:
            from node.policies.chat_templates import Renderer  # brings jinja2 in

            assert self._template is not None
            rules = self._template_rules
            self._renderer = Renderer(self.name, self._template, self._constants, rules)
        return self._renderer

    def cache_bytes(self, context_tokens: int, free_bytes: int, number_bytes: int) -> int:
        """Bytes for keys and values: room for a full batch of full sequences, at most
        `CPU_CACHE_SHARE` of the free memory within the two bounds, at least two sequences."""
        most = min(max(CPU_CACHE_BYTES_MIN, int(CPU_CACHE_SHARE * free_bytes)), CPU_CACHE_BYTES_MAX)
        config = self._config
        heads = config.get("num_attention_heads")
        keys = ("num_hidden_layers", "hidden_size")
        if heads is None or any(config.get(key) is None for key in keys):
            return most
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        width = (config.get("num_key_value_heads") or heads) * head_size
        token: int = 2 * number_bytes * config["num_hidden_layers"] * width
        one = token * (context_tokens + CACHE_BLOCK_TOKENS)
        return max(2 * one, min(SEQUENCES_MAX * one, most))

    def check_quantisation(self, kind: Quantisation, *, cpu: bool) -> None:
        problem = ""
        if kind != "none" and self.quantised:
            problem = f"the model's weights are quantised already ({self.quantised})"
        elif kind == "int8" or (kind == "fp8" and cpu):
            experts = max(self._config.get(key) or 0 for key in _EXPERTS)
            if experts > 1:
                problem = "the model is a mixture of experts, which are not quantised so here"
        if problem:
            raise ConfigError(f"--engine-quantization {kind}: {problem}; use none")

    def affixes_request(self) -> dict[str, Any] | None:
        """The request to `/tokenize` for `take_affixes`; None: not needed. Not every
        `tokenizer.json` names the special tokens around a plain text, so the server is asked."""
        if self._template is not None or self._around is not None:
            return None
        return {"model": MODEL_NAME, "prompt": placeholder(0)}

    def take_affixes(self, ids: Sequence[int]) -> None:
        """Find the ids around any plain text, from the server's ids of one word."""
        self._around = around(self.encode_completion(placeholder(0)), ids)

    def encode_plain(self, text: str) -> list[int]:
        before, after = self._around or ((), ())
        return [*before, *self.encode_completion(text), *after]

    def added_tokens(self) -> Mapping[int, AddedToken]:
        found: Mapping[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        return found

    def encode_split(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def encode_special(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = not special
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def beginning(self, request: Request, settings: Sampling, tokens_max: int) -> Piece | None:
        """The beginning of a request as a part of each completion, which goes on unless it has an
        end or all tokens. ConfigError: nobody says its log-probs."""
        ids = request.beginning
        if not ids:
            return None
        if not request.beginning_logprobs and (settings.temperature, settings.top_p) != (1.0, 1.0):
            raise ConfigError(
                "the engine vllm finds log-probs of beginnings at temperature 1 and top_p 1 alone"
            )
        reason = FinishReason.ABORT
        if len(ids) >= tokens_max or not set(ids).isdisjoint(self.eos_ids):
            reason = FinishReason.STOP if ids[-1] in self.eos_ids else FinishReason.LENGTH
        return Piece(ids, request.beginning_logprobs, reason)

    def generate_request(self, ask: Ask, sampling: Sampling) -> dict[str, Any]:
        """The body for `/inference/v1/generate`."""
        return {
            "model": MODEL_NAME,
            "token_ids": ask.token_ids,
            "sampling_params": {
                "n": len(ask.rows),
                "max_tokens": ask.tokens_max,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "seed": ask.seed,
                "stop_token_ids": self.eos_ids,
                "logprobs": 0,
                "detokenize": False,
            },
        }

    def pieces(self, answer: bytes, label: str) -> list[Piece]:
        """The completions in an answer, in the order of rows; all tokens must carry the label."""
        choices = sorted(json.loads(answer)["choices"], key=lambda choice: choice["index"])
        return [self._piece(choice, label) for choice in choices]

    def _piece(self, choice: dict[str, Any], label: str) -> Piece:
        ids = tuple(choice["token_ids"])
        entries = (choice["logprobs"] or {}).get("content") or []
        reason = _REASONS.get(choice["finish_reason"])
        stopped = bool(ids) and ids[-1] in self.eos_ids
        if (
            reason is None
            or stopped != (reason is FinishReason.STOP)
            or [entry["token_id"] for entry in entries] != list(ids)
        ):
            raise ChildFailed(
                f"vLLM ended {len(ids)} tokens with {len(entries)} log-probs for "
                f"{choice['finish_reason']}"
            )
        made_by = [each["version"] for each in choice["weight_versions"] or [] if ids]
        if any(each != label for each in made_by):
            raise ChildFailed(f"vLLM sampled with weights {made_by}, not with {label}")
        return Piece(ids, tuple(entry["logprob"] for entry in entries), reason)

    def probe_request(self, row: Sequence[int]) -> dict[str, Any]:
        """The body for the log-probs of a row's tokens."""
        return {
            "model": MODEL_NAME,
            "token_ids": row,
            "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }

    def probe_answer(self, row: Sequence[int], answer: bytes) -> list[float]:
        """The log-probs of a row's tokens but the first."""
        found = json.loads(answer)["prompt_logprobs"][1:]
        return [each[str(token)]["logprob"] for token, each in zip(row[1:], found, strict=True)]

    def decode(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        if ids and ids[-1] in self.eos_ids:
            del ids[-1]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text + NO_TEXT * sum(self._tokenizer.id_to_token(each) is None for each in ids)


def _default(template: Any) -> str | None:
    """The template to use, of one or of several with names."""
    if isinstance(template, list):
        template = {each.get("name"): each.get("template") for each in template}
    found = template.get("default") if isinstance(template, dict) else template
    return found if isinstance(found, str) else None


def _special_texts(tokens: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a template may name, such as `bos_token`."""
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def quantisation_of(directory: Path) -> str:
    """The quantisation of a model directory's weights, such as `fp8` or `awq`; empty: none."""
    told = _read(directory, "config.json").get("quantization_config")
    if (directory / _MODELOPT).exists():
        told = told or {"quant_method": "modelopt"}
    if not told:
        return ""
    method = str(told.get("quant_method", "")).lower() if isinstance(told, dict) else ""
    return method if re.fullmatch(r"[a-z0-9._+-]{1,32}", method) else "quantised"


def _text(directory: Path, name: str) -> str:
    try:
        return (directory / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model {directory}: {name}: {error.strerror}") from None


def _tokenizer(directory: Path) -> Tokenizer:
    text = _text(directory, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # what the library raises is Exception itself
        if type(error) is not Exception:
            raise
        raise ConfigError(f"model {directory}: tokenizer.json: {error}") from None
    tokenizer.no_truncation()  # which some files hold from their training
    tokenizer.no_padding()
    return tokenizer


def _read(directory: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(_text(directory, name))
    except ValueError as error:
        raise ConfigError(f"model {directory}: {name}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"model {directory}: {name}: no JSON object")
    return content
