"""Batched KV-cache sampling with torch, in the trainer's process.

A prompt is run once and its keys and values are shared by its completions. Finished rows leave
the batch when enough of them have piled up. Each prompt has its own stream of random numbers, drawn
before the first token, so what else is in the batch changes a completion by rounding at most.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from node.engines.base import Sampling
from node.training.policy import Policy
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason

ROWS_MAX = 512  # completions sampled at a time
CACHED_TOKENS_MAX = 262_144  # rows x longest sequence of one batch
_KEEP_SHARE = 0.75  # rows still running, below which the batch is shrunk


@dataclass(slots=True)
class _Row:
    """One completion in the making."""

    owner: int  # index of its prompt
    uniforms: list[float]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


def generate(
    policy: Policy,
    prompts: Sequence[str],
    completions_each: int,
    sampling: Sampling,
    seed: int,
    policy_version: int,
) -> list[tuple[Completion, ...]]:
    """Sample; see `RolloutEngine.generate`. Synchronous.

    Raises:
        ConfigError: a prompt leaves no room for a token, or the sampling settings make no sense.
    """
    _check(sampling, completions_each)
    encoded = [policy.encode_prompt(prompt) for prompt in prompts]
    for ids in encoded:
        if len(ids) >= policy.context_tokens:
            raise ConfigError(
                f"a prompt of {len(ids)} tokens does not fit the context of "
                f"{policy.context_tokens} tokens: choose smaller task settings"
            )
    rows = _rows(prompts, completions_each, sampling.max_new_tokens, seed)
    with torch.inference_mode(), policy.autocast():
        for batch in _batches(policy, encoded, completions_each, sampling.max_new_tokens):
            chosen = set(batch)
            _sample(policy, encoded, [r for r in rows if r.owner in chosen], sampling)
    return _finish(policy, rows, len(prompts), policy_version)


def pick_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (R,) by inverse transform sampling from logits (R, V) with uniforms (R,) in [0, 1),
    and their log-probs under the distribution after temperature and top-p."""
    scaled = logits.double() / temperature
    probs = torch.softmax(scaled, dim=-1)
    if top_p < 1.0:
        probs = _nucleus(probs, top_p)
    cumulative = probs.cumsum(dim=-1)
    points = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    tokens = torch.searchsorted(cumulative, points, right=True).clamp_max(logits.shape[-1] - 1)
    chosen = probs.gather(-1, tokens).clamp_min(torch.finfo(probs.dtype).tiny)
    return tokens.squeeze(-1), chosen.log().squeeze(-1)


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most probable tokens that reach `top_p` together, renormalised."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter(-1, order, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


def _check(sampling: Sampling, completions_each: int) -> None:
    if sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.max_new_tokens < 1:
        raise ConfigError(
            f"sampling {sampling}: take temperature > 0, 0 < top_p <= 1, max_new_tokens >= 1"
        )
    if completions_each < 1:
        raise ConfigError(f"completions_each = {completions_each}: take at least 1")


def _rows(prompts: Sequence[str], each: int, tokens_max: int, seed: int) -> list[_Row]:
    """Rows with random numbers that depend on the seed, the prompt and its repetition alone."""
    seen: Counter[str] = Counter()
    rows = []
    for owner, prompt in enumerate(prompts):
        digest = hashlib.sha256(f"{seed}/{seen[prompt]}/{prompt}".encode()).digest()
        seen[prompt] += 1
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        for _ in range(each):
            drawn = torch.rand(tokens_max, dtype=torch.float64, generator=generator)
            rows.append(_Row(owner, drawn.tolist()))
    return rows


def _batches(
    policy: Policy, encoded: Sequence[list[int]], each: int, tokens_max: int
) -> Iterator[list[int]]:
    """Prompt indices, similar lengths together (equal ones only, for models with a state)."""
    batch: list[int] = []
    for index in sorted(range(len(encoded)), key=lambda i: len(encoded[i])):
        length = len(encoded[index])
        rows = (len(batch) + 1) * each
        full = rows > ROWS_MAX or rows * (length + tokens_max) > CACHED_TOKENS_MAX
        mixed = bool(batch) and policy.stateful and len(encoded[batch[0]]) != length
        if batch and (full or mixed):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class _HuggingFaceDecoder:
    """Decoding through any Hugging Face causal LM with its own cache."""

    def __init__(self, policy: Policy, prompts: Sequence[list[int]]) -> None:
        """Run the prompts, right padded; causal attention keeps real tokens off the pads."""
        self._model = policy.model
        self._lengths = torch.tensor([len(ids) for ids in prompts], device=policy.device)
        width = int(self._lengths.max())
        ids = torch.full((len(prompts), width), policy.eos_id)
        for index, row in enumerate(prompts):
            ids[index, : len(row)] = torch.tensor(row)
        ids = ids.to(policy.device)
        self._mask = torch.arange(width, device=ids.device) < self._lengths[:, None]
        out = self._model(input_ids=ids, use_cache=True)
        self._cache: DynamicCache = out.past_key_values
        self.logits = out.logits[torch.arange(len(prompts)), self._lengths - 1]  # (rows, V)

    def select(self, rows: torch.Tensor) -> None:
        """Continue with these rows of the batch, repeats allowed."""
        self._cache.batch_select_indices(rows)
        self._lengths, self._mask = self._lengths[rows], self._mask[rows]
        self.logits = self.logits[rows]

    def step(self, tokens: torch.Tensor) -> None:
        """Take one more token for each row."""
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        out = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask.long(),
            position_ids=self._lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._lengths = self._lengths + 1
        self.logits = out.logits[:, -1]


def _sample(
    policy: Policy, encoded: Sequence[list[int]], rows: Sequence[_Row], sampling: Sampling
) -> None:
    """Sample one batch of rows to their ends."""
    owners = sorted({row.owner for row in rows})
    place = {owner: index for index, owner in enumerate(owners)}
    decoder = _HuggingFaceDecoder(policy, [encoded[owner] for owner in owners])
    decoder.select(torch.tensor([place[row.owner] for row in rows], device=policy.device))
    limits = [
        min(sampling.max_new_tokens, policy.context_tokens - len(encoded[row.owner]))
        for row in rows
    ]
    live = list(range(len(rows)))  # rows still in the batch, finished ones perhaps among them
    for step in range(sampling.max_new_tokens):
        uniforms = torch.tensor([rows[i].uniforms[step] for i in live], dtype=torch.float64)
        tokens, logprobs = pick_tokens(
            decoder.logits, uniforms.to(policy.device), sampling.temperature, sampling.top_p
        )
        running = []
        columns = zip(live, tokens.tolist(), logprobs.tolist(), strict=True)
        for position, (index, token, logprob) in enumerate(columns):
            row = rows[index]
            if row.stopped or len(row.tokens) >= limits[index]:
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stopped = token in policy.eos_ids
            if not row.stopped and len(row.tokens) < limits[index]:
                running.append(position)
        if not running:
            return
        if len(running) < _KEEP_SHARE * len(live):
            kept = torch.tensor(running, device=policy.device)
            decoder.select(kept)
            tokens = tokens[kept]
            live = [live[position] for position in running]
        decoder.step(tokens)


def _finish(
    policy: Policy, rows: Sequence[_Row], prompts: int, policy_version: int
) -> list[tuple[Completion, ...]]:
    groups: list[list[Completion]] = [[] for _ in range(prompts)]
    for row in rows:
        groups[row.owner].append(
            Completion(
                text=policy.decode(row.tokens),
                token_ids=tuple(row.tokens),
                logprobs=tuple(row.logprobs),
                finish_reason=FinishReason.STOP if row.stopped else FinishReason.LENGTH,
                policy_version=policy_version,
            )
        )
    return [tuple(group) for group in groups]
