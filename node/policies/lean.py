"""A lean forward pass for small models of the Llama family (Llama, Qwen2, Qwen3), with gradients.

It computes what the Hugging Face module computes, from the same parameters, but text that rows have
in common only once: rows lie in a grid of P prompts with g rows each, and text before a row is kept
once for each prompt or once for all. Attention scores are held in full, so it is for short texts
(`SCORES_MAX`) and models that a CPU computes fast.

Letters in shapes: P prompts, g rows of each, C tokens of a row in this pass, d hidden size, K
key-value heads, r query heads for each of them, S tokens before, D head size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from node.policies import frozen
from node.policies.rounding import rounded

PARAMETERS_MAX = 500_000_000
ADAPTED_PARAMETERS_MAX = 50_000_000  # trained with an adapter; see `trains`
SCORES_MAX = 2**26  # of attention, that one pass holds
COMMON_TOKENS_MIN = 16  # a shorter common beginning is not worth a pass of its own
SAVED_TOKENS_MIN = 256  # nor is one that saves fewer tokens than this in all
_MODEL_TYPES = ("qwen3", "qwen2", "llama")
_HIDDEN = float("-inf")

KeyValues = list[tuple[torch.Tensor, torch.Tensor]]  # of each layer


@dataclass(slots=True)
class Segment:
    """Text before the rows: keys and values (P or 1, K, S, D) of each layer."""

    layers: KeyValues
    bias: torch.Tensor | None = None  # (P, 1, 1, S): 0, or -inf on padding; None: no padding


@dataclass(slots=True)
class RowCache:
    """Room for the rows' own keys and values while decoding: (P, K, g, room, D) a layer."""

    layers: KeyValues
    used: int = 0
    bias: torch.Tensor | None = None  # (P, g, room): 0, or -inf on what a row does not see


@dataclass(slots=True)
class _Layer:
    """One layer: its norms' weights, and its projections by input."""

    norm: torch.Tensor
    qkv: "_Project"
    head_norms: torch.Tensor | None  # (query heads + K, D): the norm's weight for each head
    out: "_Project"
    mlp_norm: torch.Tensor
    gate_up: "_Project"
    down: "_Project"


_Project = Callable[[torch.Tensor], torch.Tensor]


def supports(model: PreTrainedModel) -> bool:
    """True if the lean pass computes this model on the device where it is."""
    return knows(model) and next(model.parameters()).device.type == "cpu"


def knows(model: PreTrainedModel) -> bool:
    """True if it does on a CPU."""
    config = model.config
    return (
        getattr(config, "model_type", "") in _MODEL_TYPES
        and looks_at_all(config)
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and sum(p.numel() for p in model.parameters()) <= PARAMETERS_MAX
    )


def looks_at_all(config: PreTrainedConfig) -> bool:
    """True if every token of a model sees all before it, in all its layers."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) == {"full_attention"}
    return not getattr(config, "sliding_window", None)


def layers_of(config: PreTrainedConfig) -> Sequence[PreTrainedConfig]:
    """The configurations of a model's layers where they differ, else the one of all."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config]


def trains(parameters: int, adapted: int) -> bool:
    """True if a model that it computes is also trained so. With an adapter each pass makes base +
    BA and both gradients, which for a larger model is what an adapter is to save."""
    return not adapted or parameters <= ADAPTED_PARAMETERS_MAX


def scores_of_prompts(model: PreTrainedModel, prompts: int, longest: int) -> int:
    """Attention scores held at a time by a pass over prompts, without gradients."""
    return int(model.config.num_attention_heads) * prompts * longest**2


def scores_of_rows(model: PreTrainedModel, prompts: int, each: int, row: int, prompt: int) -> int:
    """Attention scores kept for gradients by a pass over a grid of rows and one over their prompts
    (longest lengths)."""
    config = model.config
    per_prompt = each * row * (row + prompt) + prompt**2
    return int(config.num_hidden_layers * config.num_attention_heads * prompts * per_prompt)


def common_length(rows: Sequence[list[int]]) -> int:
    """The length of the longest common beginning of all rows, in tokens."""
    return len(commonprefix(rows))  # noqa: RUF071 - of lists


def alike(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Indices of prompts by common beginning, each set ordered by length: one for each beginning
    that is worth a pass of its own, and one for all others."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        kinds.setdefault(tuple(prompts[index][:COMMON_TOKENS_MIN]), []).append(index)
    sets, others = [], []
    for _, members in sorted(kinds.items()):
        shared = common_length([prompts[index] for index in members])
        if shared * (len(members) - 1) >= SAVED_TOKENS_MIN:
            sets.append(members)
        else:
            others += members
    if others:
        sets.append(sorted(others, key=lambda index: len(prompts[index])))
    return sets


class LeanModel:
    """The weights of one model at one moment; build it anew after they change."""

    def __init__(self, model: PreTrainedModel, *, joined: bool = True) -> None:
        """`joined`: adapters are merged into weights, and weights with the same input are one,
        which is quick and copies the model; else its own layers are called. Under autocast the
        copy is in bf16."""
        config = model.config
        parts: Any = model  # modules have no types for their parts
        self._body = parts.model
        self._head: torch.Tensor = parts.lm_head.weight
        self.dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        if joined:
            self._head = _in(self._head, self.dtype)
        self._eps = config.rms_norm_eps
        self._heads = config.num_attention_heads
        self.key_value_heads = config.num_key_value_heads
        self.head_size = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        project = partial(_join, self.dtype) if joined else _apart
        self._layers = [
            _layer_of(layer, self._heads, self.key_value_heads, project)
            for layer in self._body.layers
        ]

    @property
    def layers(self) -> int:
        return len(self._layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., d) -> (..., V)."""
        return frozen.linear(hidden, self._head)

    def run(
        self,
        ids: torch.Tensor,
        start: torch.Tensor,
        above: Sequence[Segment] = (),
        cache: RowCache | None = None,
    ) -> tuple[torch.Tensor, KeyValues]:
        """Hidden states (P, g, C, d) of tokens (P, g, C) from position `start`, (P,) or (P, g), and
        the rows' keys and values (P, K, g, C, D). Rows see `above`, then themselves causally. They
        are added to `cache`, if given, and see what it holds: keys and values are then of all that
        it holds (S for C)."""
        prompts, each, count = ids.shape
        x = functional.embedding(ids, self._body.embed_tokens.weight).float()
        positions = start.view(prompts, -1, 1) + torch.arange(count)  # (P, 1 or g, C)
        cos, sin = self._body.rotary_emb(x, positions.flatten(0, 1))
        apart = (*positions.shape, 1, -1)
        turn = (cos.reshape(apart), sin.reshape(apart))
        causal, used = None, cache.used if cache is not None else 0
        if count > 1:
            causal = torch.full((count, used + count), _HIDDEN).triu(used + 1)
        unseen = None
        if cache is not None and cache.bias is not None:
            unseen = cache.bias[:, None, :, None, : used + count]
        collected: KeyValues = []
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, x, turn)
            if cache is not None:
                key, value = _extend(cache, index, key, value)
            mixed = _attend(
                query,
                [segment.layers[index] for segment in above],
                [segment.bias for segment in above],
                key,
                value,
                causal,
                unseen,
            )
            x = x + layer.out(mixed.reshape(prompts, each, count, -1))
            normed = functional.rms_norm(x, x.shape[-1:], layer.mlp_norm, self._eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
            collected.append((key, value))
        if cache is not None:
            cache.used += count
        return functional.rms_norm(x, x.shape[-1:], self._body.norm.weight, self._eps), collected

    def _project(
        self, layer: _Layer, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query (P, K, g, r, C, D), key and value (P, K, g, C, D), rotated."""
        prompts, each, count, _ = x.shape
        normed = functional.rms_norm(x, x.shape[-1:], layer.norm, self._eps)
        joined = layer.qkv(normed)
        joined = joined.view(prompts, each, count, -1, self.head_size)
        few = self.key_value_heads
        turned, value = joined.split([self._heads + few, few], dim=3)
        if layer.head_norms is not None:  # queries and keys in one go
            turned = functional.rms_norm(turned, turned.shape[-1:], None, self._eps)
            turned = turned * layer.head_norms
        query, key = _rotate(turned, turn).split([self._heads, few], dim=3)
        query = query.reshape(prompts, each, count, few, -1, self.head_size)
        return (
            query.permute(0, 3, 1, 4, 2, 5),
            key.permute(0, 3, 1, 2, 4),
            value.permute(0, 3, 1, 2, 4),
        )


def _weight(part: Any) -> torch.Tensor:
    """The weight of a projection, its adapter included if it has one."""
    if not hasattr(part, "lora_A"):
        plain: torch.Tensor = part.weight
        return plain
    from node.policies.adapters import effective_weight  # brings PEFT in

    return effective_weight(part)


def _in(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    narrows = dtype == torch.bfloat16 and weight.dtype != dtype
    return rounded(weight) if narrows else weight.to(dtype)


def _join(dtype: torch.dtype, *parts: Any) -> _Project:
    """Projections of the same input as one."""
    weights = [_in(_weight(part), dtype) for part in parts]
    biases = [part.bias for part in parts if part.bias is not None]
    return partial(
        functional.linear,
        weight=torch.cat(weights) if len(weights) > 1 else weights[0],
        bias=torch.cat(biases).to(dtype) if biases else None,
    )


def _apart(*parts: _Project) -> _Project:
    """The same, each as it is."""
    if len(parts) == 1:
        return parts[0]
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _layer_of(
    layer: Any, heads: int, key_value_heads: int, project: Callable[..., _Project]
) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = None
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm.weight, attention.k_norm.weight
        head_norms = torch.cat([query.expand(heads, -1), key.expand(key_value_heads, -1)])
    return _Layer(
        norm=layer.input_layernorm.weight,
        qkv=project(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=head_norms,
        out=project(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=project(mlp.gate_proj, mlp.up_proj),
        down=project(mlp.down_proj),
    )


def _rotate(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-right, left], dim=-1) * turn[1]


def _extend(
    cache: RowCache, index: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = cache.layers[index]
    end = cache.used + key.shape[3]
    keys[:, :, :, cache.used : end] = key
    values[:, :, :, cache.used : end] = value
    return keys[:, :, :, :end], values[:, :, :, :end]


def _attend(
    query: torch.Tensor,
    above: Sequence[tuple[torch.Tensor, torch.Tensor]],
    biases: Sequence[torch.Tensor | None],
    key: torch.Tensor,
    value: torch.Tensor,
    causal: torch.Tensor | None,
    unseen: torch.Tensor | None,
) -> torch.Tensor:
    """Mixed values (P, g, C, K, r, D) for queries (P, K, g, r, C, D)."""
    prompts, few, each, per, count, size = query.shape
    query = query * size**-0.5
    flat = query.reshape(prompts, few, each * per * count, size)
    by_row = query.reshape(prompts, few, each, per * count, size)
    scores = []
    for (keys, _), bias in zip(above, biases, strict=True):
        part = flat @ keys.transpose(-1, -2)
        scores.append(part if bias is None else part + bias)
    own = by_row @ key.transpose(-1, -2)  # (P, K, g, r C, S own)
    if causal is not None:
        own = (own.unflatten(3, (per, count)) + causal).flatten(3, 4)  # causal: (C, S own)
    if unseen is not None:
        own = own + unseen  # (P, 1, g, 1, S own)
    scores.append(own.flatten(2, 3))
    shares = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
    pieces: tuple[torch.Tensor, ...] = shares.split([part.shape[-1] for part in scores], dim=-1)
    mixed: torch.Tensor = (pieces[-1].unflatten(2, (each, -1)) @ value).flatten(2, 3)
    for piece, (_, values) in zip(pieces, above, strict=False):
        mixed = mixed + piece @ values
    return mixed.view(prompts, few, each, per, count, size).permute(0, 2, 4, 1, 3, 5)


def pad_right(rows: Sequence[Sequence[int]], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, longest) and their lengths (rows,)."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), fill)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids, torch.tensor([len(row) for row in rows])


def padding_bias(lengths: torch.Tensor, width: int) -> torch.Tensor | None:
    """The bias of a right-padded segment; None where nothing is padded."""
    hidden = torch.arange(width) >= lengths[:, None]
    if not bool(hidden.any()):
        return None
    bias = torch.zeros(hidden.shape).masked_fill(hidden, _HIDDEN)
    return bias[:, None, None, :]


def prompt_segments(
    model: LeanModel, prompts: Sequence[list[int]], fill: int
) -> tuple[list[Segment], torch.Tensor]:
    """The segments before the rows of each prompt: their common beginning once, then the rest of
    each; and the last hidden state of each prompt (P, d). Prompts are not empty."""
    shared = common_length(prompts) if len(prompts) > 1 else 0
    shared = min(shared, min(len(prompt) for prompt in prompts) - 1)
    above: list[Segment] = []
    if shared >= COMMON_TOKENS_MIN:
        ids = torch.tensor([[prompts[0][:shared]]])
        _, keys = model.run(ids, torch.zeros(1, dtype=torch.long))
        above.append(as_segment(keys))
    else:
        shared = 0
    ids, lengths = pad_right([prompt[shared:] for prompt in prompts], fill)
    hidden, keys = model.run(ids[:, None], torch.full((len(prompts),), shared), above)
    segments = [*above, as_segment(keys, padding_bias(lengths, ids.shape[1]))]
    return segments, hidden[torch.arange(len(prompts)), 0, lengths - 1]


def mixed_segments(
    model: LeanModel, prompts: Sequence[list[int]], fill: int
) -> tuple[list[Segment], torch.Tensor]:
    """As `prompt_segments`, for prompts of several kinds: those that begin alike are run together.
    Without gradients."""
    kinds = alike(prompts)
    if len(kinds) == 1:
        return prompt_segments(model, prompts, fill)
    width = max(len(prompt) for prompt in prompts)
    room = (len(prompts), model.key_value_heads, width, model.head_size)
    kind = model.dtype
    layers = [
        (torch.zeros(room, dtype=kind), torch.zeros(room, dtype=kind)) for _ in range(model.layers)
    ]
    last: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    for members in kinds:
        segments, hidden = prompt_segments(model, [prompts[i] for i in members], fill)
        for place, index in enumerate(members):
            last[index] = hidden[place]
        begin = 0
        for segment in segments:
            end = begin + segment.layers[0][0].shape[2]
            for (keys, values), (more_keys, more_values) in zip(
                layers, segment.layers, strict=True
            ):
                keys[members, :, begin:end] = more_keys.to(kind)
                values[members, :, begin:end] = more_values.to(kind)
            begin = end
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return [Segment(layers, padding_bias(lengths, width))], torch.stack(last)


def as_segment(layers: KeyValues, bias: torch.Tensor | None = None) -> Segment:
    """Keys and values of single rows (P, K, 1, S, D) as text for others."""
    return Segment([(key.squeeze(2), value.squeeze(2)) for key, value in layers], bias)
