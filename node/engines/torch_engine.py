"""Batched KV-cache sampling with torch, in the trainer's process.

Completions share the keys and values of their prompt. Finished rows leave the batch in bulk. Each
prompt has its own random numbers, so other rows change a completion by rounding at most.

A `Generation` is sampled in segments, and the weights may change between two. Then the new weights
run over each prompt and its tokens, and sampling continues with the same random numbers.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random
from typing import Protocol

import torch
from transformers import PreTrainedConfig

from node.engines import recording
from node.interfaces.engine import (
    NO_TURN,
    Context,
    Outcome,
    Record,
    Recorded,
    Request,
    Sampling,
    extend_spans,
)
from node.interfaces.prompts import Thinking
from node.policies import lean, prefixes
from node.policies.policy import Policy
from swarm.errors import ConfigError
from swarm.rollouts import Completion, FinishReason

ROWS_MAX = 512  # completions sampled at a time
LOGITS_MAX = 2**23  # rows x vocabulary of one step; picking takes some 50 bytes for each
CACHED_TOKENS_MAX = 262_144  # rows x longest sequence of one batch
CACHE_BYTES_MAX = 2**30  # keys and values of one batch, in fp32
CATCH_UP_TOKENS_MAX = 2048  # rows x tokens of one pass over what older weights sampled
_KEEP_SHARE = 0.75  # rows still running, below which the batch is shrunk


@dataclass(slots=True)
class SampledRow:
    """One unfinished completion, or a beginning."""

    owner: int  # index of its prompt
    uniforms: torch.Tensor  # (tokens,) in [0, 1)
    limit: int  # of its tokens
    temperature: float
    record: frozenset[Record] = frozenset()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)  # perhaps of more than its tokens
    runners_up: list[tuple[int, float, float]] = field(default_factory=list)  # as well
    hidden: tuple[float, ...] = ()
    stopped: bool = False
    thought: "ThoughtBudget | None" = None
    spans: list[tuple[int, int]] = field(default_factory=list)  # (policy version, tokens)

    @property
    def running(self) -> bool:
        return not self.stopped and len(self.tokens) < self.limit

    def take(self, token: int, logprob: float, eos_ids: frozenset[int]) -> bool:
        """Add a token to a running row; True if it still runs."""
        if not self.running:
            return False
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in eos_ids
        if self.thought is not None and self.running and self.thought.is_spent(self.tokens):
            self.limit = len(self.tokens)
        return self.running

    def credit(self, policy_version: int) -> None:
        """Attribute all tokens without a version to this one."""
        count = len(self.tokens) - sum(count for _, count in self.spans)
        extend_spans(self.spans, policy_version, count)

    def recorded(self, begun: "SampledRow") -> Recorded:
        """The columns of a beginning and this row together."""
        parts = ((begun, len(begun.tokens)), (self, len(self.tokens)))
        return Recorded(
            tuple(value for part, count in parts for value in part.entropies[:count]),
            tuple(value for part, count in parts for value in part.runners_up[:count]),
            self.hidden or begun.hidden,
        )


@dataclass(slots=True)
class ThoughtBudget:
    """The rest of a row's thought. `forced`: the end's tokens that are still to come after it."""

    policy: Policy
    thinking: Thinking
    begun: tuple[int, ...] = ()  # what the row continues
    forced: list[int] = field(default_factory=list)

    def is_spent(self, tokens: Sequence[int]) -> bool:
        """True if the row ends here, because its thought takes all tokens that it may have."""
        most = self.thinking.tokens_max
        if most is None or len(self.begun) + len(tokens) != most:
            return False
        if self.thinking.end in self.policy.decode([*self.begun, *tokens]):
            return False
        if self.thinking.forced:
            self.forced = self.policy.encode_special(self.thinking.end)
        return not self.thinking.forced


class Generation:
    """Unfinished completions, sampled a segment at a time. Synchronous. Call `weights_changed` when
    the policy's weights change between two segments.

    Rows that continue beginnings follow those without. The log-probs of a beginning are those given
    with it, else the present policy's.
    """

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[Request],
        sampling: Sampling,
        seed: int,
        noise: float = 0.0,
        encoded: Sequence[list[int]] | None = None,
    ) -> None:
        """Compute nothing yet. `encoded` replaces each prompt's ids; then the prompts only
        determine random numbers."""
        sampling.check(1)
        settings = [each.settings(sampling) for each in requests]
        for each, own in zip(requests, settings, strict=True):
            own.check(each.n)
            if _is_weighed(each) and not sampling.is_whole:
                raise ConfigError("beginnings are weighed by the whole distribution: top_p is 1")
            if any(not 0 <= token < policy.vocabulary for token in each.beginning):
                raise ConfigError("a beginning has token ids that are not in the vocabulary")
        self._policy, self._requests, self._settings = policy, tuple(requests), settings
        self._seed, self._noise = seed, noise
        most = max([sampling.max_new_tokens, *(own.max_new_tokens for own in settings)])
        self._drawn_each = sampling.max_new_tokens
        self._sampling = replace(sampling, max_new_tokens=most)
        self._prompt_ids = encoded or [policy.encode_prompt(each.prompt) for each in requests]
        self._encoded = [
            [*ids, *each.beginning] for ids, each in zip(self._prompt_ids, requests, strict=True)
        ]
        self._fits = [
            len(ids) <= policy.context_tokens - (not each.beginning)
            for ids, each in zip(self._encoded, requests, strict=True)
        ]
        self._version: int | None = None  # of the last segment
        self._begin()

    def _begin(self) -> None:
        policy = self._policy
        drawn = iter(uniforms_of(self._requests, self._drawn_each, self._seed))
        self._rows: list[SampledRow] = []
        self._beginnings: list[SampledRow] = []
        for owner, (each, own) in enumerate(zip(self._requests, self._settings, strict=True)):
            room = policy.context_tokens - len(self._prompt_ids[owner])
            limit = min(own.max_new_tokens, room) - len(each.beginning)
            if not policy.eos_ids.isdisjoint(each.beginning):
                limit = 0
            for uniforms in islice(drawn, each.n):
                if self._fits[owner]:
                    row = SampledRow(owner, uniforms, limit, own.temperature, each.record)
                    if policy.thinking is not None:
                        row.thought = ThoughtBudget(policy, policy.thinking, each.beginning)
                    self._rows.append(row)
            begun = SampledRow(owner, torch.empty(0), 0, own.temperature, each.record)
            begun.tokens += each.beginning
            self._beginnings.append(begun)
        plain = [row for row in self._rows if not self._requests[row.owner].beginning]
        self._batches = in_batches(policy, self._encoded, plain, self._sampling)
        begun_rows = [row for row in self._beginnings if row.tokens and self._fits[row.owner]]
        longest = max((len(row.tokens) for row in begun_rows), default=0)
        passes = batches_of(policy, self._prompt_ids, begun_rows, longest)
        self._unweighed = deque([row.owner for row in rows] for rows in passes)

    @property
    def done(self) -> bool:
        return not self._batches and not self._unweighed

    def advance(self, steps: int, policy_version: int) -> None:
        """Sample at most `steps` more tokens of each row, one batch after the other. To weigh the
        beginnings of a batch counts as one step.

        An older version than before begins another line of versions. Its numbers are ambiguous, so
        everything is sampled again from its beginning.
        """
        if self._version is not None and policy_version < self._version:
            self._begin()
        self._version = policy_version
        noisy = recording.noisy(self._policy.model, self._noise, self._seed)
        with noisy, torch.inference_mode(), self._policy.autocast():
            if not self._batches and self._unweighed:
                self._weigh(self._unweighed.popleft(), policy_version)
                steps -= 1
            while steps > 0 and self._batches:
                steps -= self._batches[0].advance(steps, policy_version)
                if self._batches[0].done:
                    self._batches.popleft()

    def _weigh(self, places: Sequence[int], policy_version: int) -> None:
        """Find the columns of some beginnings, and set up their continuation."""
        begun = [self._beginnings[at] for at in places]
        asked = [row for row in begun if _is_weighed(self._requests[row.owner])]
        if asked:
            prompts = [self._prompt_ids[row.owner] for row in asked]
            longest = max(len(row.tokens) for row in asked)
            foretell(self._policy, decoder_of(self._policy, prompts, longest), asked)
        for row in begun:
            row.logprobs = list(self._requests[row.owner].beginning_logprobs) or row.logprobs
            row.credit(policy_version)
        here = set(places)
        rows = [row for row in self._rows if row.owner in here]
        going_on = {row.owner for row in rows if row.running}
        note_hidden(
            self._policy, self._prompt_ids, [row for row in begun if row.owner not in going_on]
        )
        running = [row for row in rows if row.running]
        self._batches = in_batches(self._policy, self._encoded, running, self._sampling)

    def weights_changed(self) -> None:
        """Drop what the old weights computed; the tokens stay."""
        if self._batches:
            self._batches[0].forget()

    def completions(self) -> list[tuple[Completion, ...]]:
        return [each.completions for each in self.outcomes()]

    def outcomes(self) -> list[Outcome]:
        """One for each request, after all are done; empty if its prompt does not fit."""
        found, rows = [], iter(self._rows)
        asked = zip(self._requests, self._beginnings, self._fits, strict=True)
        for each, begun, fits in asked:
            made = list(islice(rows, each.n if fits else 0))
            completions = tuple(self._completion(each.prompt, begun, row) for row in made)
            recorded = tuple(row.recorded(begun) for row in made) if each.record else ()
            found.append(Outcome(completions, recorded))
        return found

    def _completion(self, prompt: str, begun: SampledRow, row: SampledRow) -> Completion:
        tokens = (*begun.tokens, *row.tokens)
        spans = list(begun.spans)
        for version, count in row.spans:
            extend_spans(spans, version, count)
        ended = tokens[-1] in self._policy.eos_ids
        return Completion(
            text=self._policy.text_of(prompt, tokens),
            token_ids=tokens,
            logprobs=(*begun.logprobs, *row.logprobs),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            policy_version=spans[0][0],
            spans=tuple(spans) if len(spans) > 1 else (),
            splices=(len(begun.tokens),) if begun.tokens else (),
        )


def _is_weighed(request: Request) -> bool:
    """True if columns of the beginning have to be computed."""
    lacks = not request.beginning_logprobs or bool(request.record - {"hidden"})
    return bool(request.beginning) and lacks


class TurnGeneration(Generation):
    """One turn of each context, each with its own limit, for `Engine.go_on`."""

    def __init__(
        self, policy: Policy, contexts: Sequence[Context], sampling: Sampling, seed: int
    ) -> None:
        encoded = [policy.encode_turns(each.prompt, each.turns) for each in contexts]
        limits = [
            min(each.tokens_max, policy.context_tokens - len(ids))
            for each, ids in zip(contexts, encoded, strict=True)
        ]
        self._places = [at for at, limit in enumerate(limits) if limit > 0]
        self._contexts = len(contexts)
        super().__init__(
            policy,
            # random numbers are drawn by these prompts: other ones in each turn
            [
                Request(f"{contexts[at].prompt}\x1f{len(contexts[at].turns)}", limit=limits[at])
                for at in self._places
            ],
            sampling,
            seed,
            encoded=[encoded[at] for at in self._places],
        )

    def outcomes(self) -> list[Outcome]:
        found = [Outcome((NO_TURN,))] * self._contexts
        for at, outcome in zip(self._places, super().outcomes(), strict=True):
            found[at] = outcome
        return found


def distribution(
    logits: torch.Tensor, temperature: float | torch.Tensor, top_p: float
) -> torch.Tensor:
    """The probabilities (R, V) that tokens are drawn by; `temperature` may be (R, 1)."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    return _nucleus(probs, top_p) if top_p < 1.0 else probs


def pick_tokens(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (R,) by inverse transform sampling from probabilities (R, V) with uniforms (R,) in
    [0, 1), and their log-probs."""
    cumulative = probs.cumsum(dim=-1)
    points = (uniforms * cumulative[:, -1]).unsqueeze(-1)
    tokens = torch.searchsorted(cumulative, points, right=True).clamp_max(probs.shape[-1] - 1)
    chosen = probs.gather(-1, tokens).clamp_min(torch.finfo(probs.dtype).tiny)
    return tokens.squeeze(-1), chosen.log().squeeze(-1)


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest likeliest tokens that together reach `top_p`, renormalised."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter(-1, order, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


def uniforms_of(
    requests: Sequence[Request], tokens_max: int, seed: int, purpose: str = ""
) -> list[torch.Tensor]:
    """Random numbers in [0, 1) for each completion, `tokens_max` or as many as its request's limit.
    They depend on the purpose, the seed, the prompt and its repetition alone."""
    seen: Counter[tuple[int, str]] = Counter()
    found = []
    for each in requests:
        key = (seed if each.seed is None else each.seed, each.prompt)
        digest = hashlib.sha256(f"{purpose}{key[0]}/{seen[key]}/{key[1]}".encode()).digest()
        seen[key] += 1
        rng = Random(int.from_bytes(digest, "big"))  # torch's on a CPU takes 32 bits of a seed
        count = max(tokens_max, each.limit or 0)
        for _ in range(each.n):
            drawn = [rng.random() for _ in range(count)]
            found.append(torch.tensor(drawn, dtype=torch.float64))
    return found


def in_batches(
    policy: Policy, encoded: Sequence[list[int]], rows: Sequence[SampledRow], sampling: Sampling
) -> "deque[Batch]":
    """Cut rows into batches that fit in memory."""
    return deque(
        Batch(policy, encoded, some, sampling)
        for some in batches_of(policy, encoded, rows, sampling.max_new_tokens)
    )


def batches_of(
    policy: Policy, encoded: Sequence[list[int]], rows: Sequence[SampledRow], tokens_max: int
) -> Iterator[list[SampledRow]]:
    """Rows with prompts of similar lengths (equal ones for recurrent models), as many as fit in
    memory with `tokens_max` more tokens each, at least one."""
    rows_max, cached_max = _limits(policy)
    batch: list[SampledRow] = []
    for row in sorted(rows, key=lambda row: len(encoded[row.owner])):
        length = len(encoded[row.owner])
        count = len(batch) + 1
        full = count > rows_max or count * (length + tokens_max) > cached_max
        mixed = bool(batch) and policy.plain and len(encoded[batch[0].owner]) != length
        if batch and (full or mixed):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _limits(policy: Policy) -> tuple[int, int]:
    """Rows and cached tokens of one batch, by the model alone, so that a seed repeats its bits."""
    config = policy.model.config.get_text_config()
    token_bytes = 2 * 4 * config.num_hidden_layers * max(map(_cached, lean.layers_of(config)))
    return (
        max(1, min(ROWS_MAX, LOGITS_MAX // config.vocab_size)),
        min(CACHED_TOKENS_MAX, CACHE_BYTES_MAX // token_bytes),
    )


def _cached(config: PreTrainedConfig) -> int:
    """Numbers that a layer keeps of a token as its key."""
    heads = getattr(config, "num_attention_heads", None) or 1
    key_value_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return key_value_heads * head_size


class Decoder(Protocol):
    """Decodes the rows of one batch."""

    logits: torch.Tensor  # (rows, V), of each row's next token

    def select(self, rows: list[int]) -> None:
        """Keep these rows alone, by ascending position."""
        ...

    def step(self, tokens: torch.Tensor) -> None:
        """Take tokens (rows, C)."""
        ...

    def foretold(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `step`; the logits (rows, C, V) after each token."""
        ...

    def rewind(self, rows: list[int], kept: Sequence[int], tokens: Sequence[int]) -> bool:
        """Keep these rows alone, each with its first `kept` tokens after the prompt. `tokens`: the
        last remaining token of each row or its prompt. False: impossible, and the decoder is
        useless."""
        ...


class _HuggingFaceDecoder:
    """Decoding through any Hugging Face causal LM with its own cache."""

    logits: torch.Tensor  # (rows, V), after the last token

    def __init__(self, policy: Policy, prompts: Sequence[list[int]], owners: Sequence[int]) -> None:
        """Run the prompts but for their last tokens: only what follows needs logits."""
        self._model, self._policy = policy.model, policy
        cache, self._lengths = prefixes.run(policy, [prompt[:-1] for prompt in prompts])
        self._begun = int(self._lengths.max())  # the place of prompts' last tokens
        self._mask = prefixes.seen(self._lengths, self._begun)
        self._cache = prefixes.windowed(policy, cache)
        self._select(list(owners))
        self.step(torch.tensor([prompts[owner][-1:] for owner in owners], device=policy.device))

    def select(self, rows: list[int]) -> None:
        self._select(rows)
        self.logits = self.logits[rows]

    def _select(self, rows: list[int]) -> None:
        chosen = torch.tensor(rows, device=self._mask.device)
        self._cache.batch_select_indices(chosen)
        self._lengths, self._mask = self._lengths[chosen], self._mask[chosen]

    def step(self, tokens: torch.Tensor) -> None:
        self._run(tokens, 1)

    def foretold(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._run(tokens, tokens.shape[1])

    def rewind(self, rows: list[int], kept: Sequence[int], tokens: Sequence[int]) -> bool:
        if any(getattr(layer, "is_sliding", False) for layer in self._cache.layers):
            return False  # they may have dropped what is to be seen again
        if self._begun + max(kept) == 0:
            return False  # models refuse an empty cache
        taken = self._mask.shape[1] - self._begun
        self._select(rows)
        left = torch.tensor(kept, device=self._mask.device)
        width = self._begun + int(left.max())
        self._cache.crop(min(0, width - self._cache.get_seq_length()))
        prefixes.move_right(self._cache, left.max() - left)
        self._lengths = self._lengths - taken + left
        self._mask = prefixes.seen(self._lengths, width)
        self.step(torch.tensor(tokens, device=self._mask.device)[:, None])
        return True

    def _run(self, tokens: torch.Tensor, kept: int) -> torch.Tensor:
        """Logits (rows, kept, V) after the last of the tokens (rows, C)."""
        count = tokens.shape[1]
        self._mask = torch.nn.functional.pad(self._mask, (0, count), value=True)
        out = self._model(
            input_ids=tokens,
            attention_mask=self._mask.long(),
            position_ids=self._positions(count),
            past_key_values=self._cache,
            use_cache=True,
            **self._policy.logits_kept(kept),
        )
        self._lengths = self._lengths + count
        self.logits = out.logits[:, -1]
        logits: torch.Tensor = out.logits[:, -kept:]
        return logits

    def _positions(self, count: int) -> torch.Tensor:
        """Positions of the next tokens (rows, C). Those of ended rows and padded drafts may exceed
        the context and are clamped; they count for nothing."""
        ahead = torch.arange(count, device=self._lengths.device)
        return (self._lengths[:, None] + ahead).clamp_max(self._policy.context_tokens - 1)


class _PlainDecoder:
    """Slow decoding of equally long prompts without a cache, for models with another."""

    def __init__(self, policy: Policy, prompts: Sequence[list[int]], owners: Sequence[int]) -> None:
        self._policy = policy
        self._ids = torch.tensor([prompts[owner] for owner in owners], device=policy.device)
        self.logits = self._run(1)[:, -1]

    def select(self, rows: list[int]) -> None:
        self._ids, self.logits = self._ids[rows], self.logits[rows]

    def step(self, tokens: torch.Tensor) -> None:
        self._ids = torch.cat([self._ids, tokens], dim=1)
        self.logits = self._run(1)[:, -1]

    def foretold(self, tokens: torch.Tensor) -> torch.Tensor:
        self._ids = torch.cat([self._ids, tokens], dim=1)
        return self._run(tokens.shape[1])

    def rewind(self, rows: list[int], kept: Sequence[int], tokens: Sequence[int]) -> bool:
        return False  # rows are of one length

    def _run(self, kept: int) -> torch.Tensor:
        """Logits (rows, kept, V) after the last tokens."""
        last = self._policy.logits_kept(kept)
        out = self._policy.model(input_ids=self._ids, use_cache=False, **last)
        logits: torch.Tensor = out.logits[:, -kept:]
        return logits


class _LeanDecoder:
    """Decoding of small models in a grid of prompts by rows, without copies of the prompts."""

    def __init__(
        self, policy: Policy, prompts: Sequence[list[int]], owners: Sequence[int], room: int
    ) -> None:
        self._model = lean.LeanModel(policy.model)
        self._above, hidden = lean.mixed_segments(self._model, prompts, policy.eos_id)
        self._next = torch.tensor([len(ids) for ids in prompts])
        self._cells, each = _grid(owners)
        shape = (len(prompts), self._model.key_value_heads, each, room, self._model.head_size)
        self._cache = lean.RowCache(
            [(self._room(shape), self._room(shape)) for _ in range(self._model.layers)]
        )
        self._each = each
        self.logits = self._model.logits(hidden)[torch.tensor(owners)]

    def _room(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._model.dtype)

    def select(self, rows: list[int]) -> None:
        self.logits = self.logits[rows]
        cells = [self._cells[row] for row in rows]
        alive = sorted({prompt for prompt, _ in cells})
        place = {prompt: index for index, prompt in enumerate(alive)}
        self._cells, each = _grid([place[prompt] for prompt, _ in cells])
        source = torch.zeros(len(alive), each, dtype=torch.long)  # old column of each new cell
        for (prompt, column), (_, old) in zip(self._cells, cells, strict=True):
            source[prompt, column] = old
        kept = torch.tensor(alive)
        for index, (keys, values) in enumerate(self._cache.layers):
            self._cache.layers[index] = (
                _columns(keys[kept], source),
                _columns(values[kept], source),
            )
        self._above = [_kept_segment(segment, kept) for segment in self._above]
        self._next, self._each = self._next[kept], each
        if self._next.ndim == 2:
            self._next = self._next.gather(1, source)
        if (bias := self._cache.bias) is not None:
            columns = source[..., None].expand(-1, -1, bias.shape[-1])
            self._cache.bias = bias[kept].gather(1, columns)

    def step(self, tokens: torch.Tensor) -> None:
        self.logits = self._model.logits(self._run(tokens)[:, -1])

    def foretold(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._model.logits(self._run(tokens))

    def rewind(self, rows: list[int], kept: Sequence[int], tokens: Sequence[int]) -> bool:
        """The last remaining token runs once more to predict the next. A prompt's own token sees
        itself in the prompt, so the row's copy is masked."""
        self._next = self._next - self._cache.used
        self.select(rows)
        left = torch.zeros(len(self._next), self._each, dtype=torch.long)
        prompts, columns = (list(side) for side in zip(*self._cells, strict=True))
        left[prompts, columns] = torch.tensor(kept)
        width = max(0, max(kept) - 1)
        places = torch.arange(self._cache.layers[0][0].shape[3])
        hidden = (places >= left[..., None] - 1) & (places < width)
        hidden |= (left[..., None] == 0) & (places == width)
        self._cache.bias = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        self._cache.used = width
        self._next = self._next[:, None] + left - 1
        self.step(torch.tensor(tokens)[:, None])
        return True

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states (rows, C, H) after each of the tokens (rows, C)."""
        prompts, columns = (list(side) for side in zip(*self._cells, strict=True))
        count = tokens.shape[1]
        ids = torch.zeros(len(self._next), self._each, count, dtype=torch.long)
        ids[prompts, columns] = tokens
        hidden, _ = self._model.run(ids, self._next, self._above, self._cache)
        self._next = self._next + count
        return hidden[prompts, columns]


def _grid(owners: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """A cell (prompt, column) for each row, and the number of columns."""
    counts: Counter[int] = Counter()
    cells = []
    for owner in owners:
        cells.append((owner, counts[owner]))
        counts[owner] += 1
    return cells, max(counts.values())


def _columns(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """(P, K, g, ...) -> (P, K, g', ...): for each prompt its columns `source` (P, g')."""
    index = source[:, None, :, None, None].expand(
        -1, tensor.shape[1], -1, tensor.shape[3], tensor.shape[4]
    )
    return tensor.gather(2, index)


def _kept_segment(segment: lean.Segment, kept: torch.Tensor) -> lean.Segment:
    """The segment of some prompts; a segment that all prompts share is unchanged."""
    if segment.layers[0][0].shape[0] == 1:
        return segment
    bias = segment.bias[kept] if segment.bias is not None else None
    return lean.Segment([(keys[kept], values[kept]) for keys, values in segment.layers], bias)


def open_decoder(
    policy: Policy, prompts: Sequence[list[int]], owners: Sequence[int], room: int
) -> Decoder:
    longest = max(len(prompt) for prompt in prompts)
    scores = (
        not policy.plain
        and lean.supports(policy.model)
        and lean.scores_of_prompts(policy.model, len(prompts), longest)
    )
    if scores and scores <= lean.SCORES_MAX:
        return _LeanDecoder(policy, prompts, owners, room)
    if policy.plain:
        return _PlainDecoder(policy, prompts, owners)
    return _HuggingFaceDecoder(policy, prompts, owners)


def decoder_of(policy: Policy, prompts: Sequence[list[int]], room: int) -> Decoder:
    """A decoder with one row for each of these prompts, of which equal ones run once."""
    places: dict[tuple[int, ...], int] = {}
    owners = [places.setdefault(tuple(ids), len(places)) for ids in prompts]
    return open_decoder(policy, [list(ids) for ids in places], owners, room)


def foretell(policy: Policy, decoder: Decoder, rows: Sequence[SampledRow]) -> None:
    """Find what the policy says of the tokens that rows have: log-probs of the whole distribution,
    and what is to be recorded. Logits are computed for some tokens at a time."""
    longest = max(len(row.tokens) for row in rows)
    padded = [[*row.tokens, *[policy.eos_id] * (longest - len(row.tokens))] for row in rows]
    tokens = torch.tensor(padded, device=policy.device)
    hot = torch.tensor([row.temperature for row in rows], dtype=torch.float64)
    hot = hot.to(policy.device)[:, None, None]
    width = max(1, LOGITS_MAX // (len(rows) * policy.vocabulary))
    logits, first = decoder.logits[:, None], 0
    while True:
        last = first + logits.shape[1]
        told = (logits.double() / hot).log_softmax(-1)
        chosen = told.gather(-1, tokens[:, first:last, None]).squeeze(-1)
        for row, values in zip(rows, chosen.tolist(), strict=True):
            row.logprobs += values
        note(rows, told.exp)
        if last == longest:
            break
        first, end = last, min(last + width, longest)
        logits = decoder.foretold(tokens[:, last - 1 : end - 1])
    for row in rows:  # causal: pads change nothing before them
        del row.logprobs[len(row.tokens) :]


def note(rows: Sequence[SampledRow], probs: Callable[[], torch.Tensor]) -> None:
    """Add what rows are to record of the distributions (rows, C, V) before their next tokens."""
    wanted = {record for row in rows for record in row.record}
    if "entropies" in wanted:
        for row, values in zip(rows, recording.entropies(probs()).tolist(), strict=True):
            row.entropies += values if "entropies" in row.record else ()
    if "runners_up" in wanted:
        for row, runners_up in zip(rows, recording.runners_up(probs()), strict=True):
            row.runners_up += runners_up if "runners_up" in row.record else ()


def note_hidden(policy: Policy, encoded: Sequence[list[int]], rows: Sequence[SampledRow]) -> None:
    """Fill in the hidden state of those rows that are to record it."""
    rows = [row for row in rows if "hidden" in row.record and not row.hidden]
    states = recording.states_after(policy, [[*encoded[row.owner], *row.tokens] for row in rows])
    for row, state in zip(rows, states, strict=True):
        row.hidden = state


class Batch:
    """Rows that are sampled together until all end."""

    def __init__(
        self,
        policy: Policy,
        encoded: Sequence[list[int]],
        rows: Sequence[SampledRow],
        sampling: Sampling,
        decoder: Decoder | None = None,
    ) -> None:
        """`decoder`: stands before the first token of these rows; None: one is opened."""
        self._policy, self._encoded, self._sampling = policy, encoded, sampling
        self._live = list(rows)  # still in the batch, finished ones perhaps among them
        self._step = 0  # tokens that each running row has
        self._decoder = decoder
        if decoder is not None:
            self._draw()

    @property
    def done(self) -> bool:
        return not self._live

    def forget(self) -> None:
        """Drop the decoder; the next segment opens another one."""
        self._decoder = None

    def advance(self, steps: int, policy_version: int) -> int:
        """Sample up to `steps` tokens a row; the number of steps made."""
        decoder = self._open() if self._decoder is None else self._decoder
        segment = list(self._live)
        made = 0
        while self._live and made < steps:
            self._sample(decoder)
            made += 1
        for row in segment:
            row.credit(policy_version)
        note_hidden(self._policy, self._encoded, [row for row in segment if not row.running])
        self._decoder = decoder if self._live else None
        return made

    def _open(self) -> Decoder:
        """A decoder that stands before the next token of the running rows."""
        self._live = [row for row in self._live if row.running]
        owners = sorted({row.owner for row in self._live})
        place = {owner: index for index, owner in enumerate(owners)}
        decoder = open_decoder(
            self._policy,
            [self._encoded[owner] for owner in owners],
            [place[row.owner] for row in self._live],
            self._sampling.max_new_tokens,
        )
        width = max(1, CATCH_UP_TOKENS_MAX // len(self._live))
        for begin in range(0, self._step, width):
            end = min(begin + width, self._step)
            tokens = [row.tokens[begin:end] for row in self._live]
            decoder.step(torch.tensor(tokens, device=self._policy.device))
        self._draw()
        return decoder

    def _draw(self) -> None:
        # rows have room for unlike numbers of tokens
        uniforms = torch.nn.utils.rnn.pad_sequence([row.uniforms for row in self._live], True)
        self._uniforms = uniforms.to(self._policy.device)
        self._temperature = self._hot()

    def _hot(self) -> float | torch.Tensor:
        """The temperature of all rows, or (rows, 1)."""
        each = [row.temperature for row in self._live]
        if len(set(each)) == 1:
            return each[0]
        return torch.tensor(each, dtype=torch.float64, device=self._policy.device)[:, None]

    def _sample(self, decoder: Decoder) -> None:
        """Sample one token for each row; if any still runs, compute the next logits."""
        probs = distribution(decoder.logits, self._temperature, self._sampling.top_p)
        note(self._live, lambda: probs[:, None])
        tokens, logprobs = pick_tokens(probs, self._uniforms[:, self._step])
        for at, row in enumerate(self._live):
            if row.thought is not None and row.thought.forced:
                tokens[at] = row.thought.forced.pop(0)
                least = torch.finfo(probs.dtype).tiny
                logprobs[at] = probs[at, tokens[at]].clamp_min(least).log()
        self._step += 1
        columns = zip(self._live, tokens.tolist(), logprobs.tolist(), strict=True)
        running = [
            position
            for position, (row, token, logprob) in enumerate(columns)
            if row.take(token, logprob, self._policy.eos_ids)
        ]
        if not running:
            self._live = []
            return
        if len(running) < _KEEP_SHARE * len(self._live):
            decoder.select(running)
            tokens, self._uniforms = tokens[running], self._uniforms[running]
            self._live = [self._live[position] for position in running]
            self._temperature = self._hot()
        decoder.step(tokens[:, None])
